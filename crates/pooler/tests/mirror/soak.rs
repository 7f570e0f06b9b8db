// SPDX-License-Identifier: Apache-2.0
//! The short form of `scripts/soak-mirror.sh`: the leak checker, with clients that vanish, cancel and end their servers in every way there
//! is. With a queue that holds, nothing is dropped and both servers hold the same.

use std::time::Duration;

use underpass_soak::{Config, PoolMode, run};
use underpass_testkit::{Pooler, Result};

use crate::pair::{Lanes, Pair, eventually};

const HOLDS: &str = "queue_bytes = 1000000000";

/// Statements of the checker that write. What becomes of the second one's transactions is not certain: their clients leave during commit.
const WRITES: [&str; 3] = ["insert into soak values%", "insert into soak select%", "copy soak from%"];

fn check(pair: &mut Pair, pool_mode: PoolMode, mode: &str) -> Result<()> {
    pair.both("create table soak (client int, sequence bigint, token text)")?;
    pair.wait_on()?;
    let mut config = Config::for_port(pair.pooler.port());
    config.clients = 40;
    config.transactions = 8000;
    config.pool_mode = pool_mode;
    config.prepared = true;
    config.silence = 40;
    config.fault_every = 25;
    config.require_faults = 10;
    config.table = Some("soak".into());
    let report = run(&config).expect("the checker runs");
    assert_eq!(report.exit_code(), 0, "{mode}: {report}");
    assert!(pair.pooler.is_running());
    // Of what a lane carries the pooler hears a moment later.
    let mut account = pair.settled()?;
    eventually("no further transaction is heard of", || {
        std::thread::sleep(Duration::from_millis(500));
        let before = std::mem::replace(&mut account, pair.settled()?);
        Ok(before.get("transactions") == account.get("transactions"))
    })?;
    assert_eq!(account.0["state"], "on", "{mode}: {account:?}");
    assert_eq!(account.get("dropped"), 0, "{mode}: {account:?}\n{}", pair.pooler.log());
    pair.assert_same(
        "select * from soak where token not like '% uncertain' order by client, sequence, token",
    )?;
    // Decided by who is faster, not by the mirror.
    let uncertain = "select count(*) from soak where token like '% uncertain'";
    let [here, there] = [&pair.here, &pair.there].map(|server| server.sql_value(uncertain));
    let [here, there] = [here?, there?].map(|count| count.parse::<u64>().expect("a number"));
    assert!(
        there * 2 >= here && here * 2 >= there,
        "{mode}: {here} and {there} commits of clients that vanished"
    );
    for like in WRITES {
        let (here, there) = (Pair::calls(&pair.here, like)?, Pair::calls(&pair.there, like)?);
        // A late cancel may strike on the primary what is over on the mirror before its time comes.
        assert!(
            here > 0 && (here..=here + report.late_cancels).contains(&there),
            "{mode}: {like}: {here}, {there}"
        );
    }
    Ok(())
}

#[test]
fn the_leak_checker_leaves_equal_data() -> Result<()> {
    let settings = [("pool_mode", "transaction"), ("default_pool_size", "8")];
    check(&mut Pair::start_with(&settings, HOLDS)?, PoolMode::Transaction, "async")
}

#[test]
fn the_leak_checker_leaves_equal_data_in_session_pooling() -> Result<()> {
    let settings = [("pool_mode", "session"), ("default_pool_size", "40")];
    check(&mut Pair::start_with(&settings, HOLDS)?, PoolMode::Session, "session pooling")
}

#[test]
fn the_leak_checker_leaves_equal_data_in_sync() -> Result<()> {
    let settings = [("pool_mode", "transaction"), ("default_pool_size", "8")];
    for step in ["statement", "transaction"] {
        let mirror = format!("mode = sync\nsync_each = {step}\nsync_timeout = 50");
        check(&mut Pair::start_with(&settings, &mirror)?, PoolMode::Transaction, step)?;
    }
    Ok(())
}

#[test]
fn the_leak_checker_leaves_equal_data_from_the_lanes() -> Result<()> {
    for (lane, mut lanes) in Lanes::EACH {
        lanes.lines = "mirror_ring_bytes = 16777216";
        lanes.flip = Some("20");
        let settings = [("pool_mode", "transaction"), ("default_pool_size", "40")];
        let Some(mut pair) = Pair::start_in(Some(lanes), &settings, HOLDS)? else { return Ok(()) };
        check(&mut pair, PoolMode::Transaction, lane)?;
        assert!(pair.xacts(lane)? > 500, "lane {lane}: {}", pair.xacts(lane)?);
    }
    Ok(())
}
