// SPDX-License-Identifier: Apache-2.0
//! Mirrored clients in kernel lanes: what the programs forward reaches the mirror as what user space forwards does. Without root these
//! tests are skipped, and say so.

use std::thread;
use std::time::{Duration, Instant};

use underpass_testkit::{Batch, Client, Pooler, Result};

use crate::pair::{Account, Lanes, MODES, Pair, eventually, eventually_or_not, pgbench};
use crate::same::{ALL, T, cancels_and_vanishes, say_everything};

const SETTINGS: [(&str, &str); 2] = [("pool_mode", "transaction"), ("default_pool_size", "8")];
const SYNC: &str = MODES[1];
/// What pgbench leaves behind, but for the times of its inserts.
const PGBENCH: [&str; 4] = [
    "select aid, bid, abalance from pgbench_accounts order by aid",
    "select tid, bid, tbalance from pgbench_tellers order by tid",
    "select bid, bbalance from pgbench_branches order by bid",
    "select tid, bid, aid, delta, count(*) from pgbench_history group by 1, 2, 3, 4 order by 1, 2, 3, 4",
];
const CHAIN: &str = "create table chain (id int primary key, v text);
                     insert into chain select i, '' from generate_series(1, 8) i";
const CHAINS: &str = "select id, v from chain order by id";

/// Runs a test with each lane.
fn each(
    mirror: &str,
    change: impl Fn(&mut Lanes),
    test: impl Fn(&str, &mut Pair) -> Result<()>,
) -> Result<()> {
    for (lane, mut lanes) in Lanes::EACH {
        change(&mut lanes);
        let Some(mut pair) = Pair::start_in(Some(lanes), &SETTINGS, mirror)? else { return Ok(()) };
        test(lane, &mut pair)?;
        assert!(pair.pooler.is_running(), "{}", pair.pooler.log());
    }
    Ok(())
}

/// Runs it for mirrors in `mode = sync`, with the lines that follow that.
fn each_in_sync(
    lines: &str,
    change: impl Fn(&mut Lanes),
    test: impl Fn(&str, &mut Pair) -> Result<()>,
) -> Result<()> {
    ["statement", "transaction"].into_iter().try_for_each(|step| {
        println!("sync_each = {step}");
        each(&format!("mode = sync\nsync_each = {step}\n{lines}"), &change, &test)
    })
}

/// Eight writers, each with a row of its own, whose values depend on all that was written before.
fn write_chains(pair: &Pair, rounds: usize) {
    thread::scope(|scope| {
        for id in 1..=8 {
            scope.spawn(move || -> Result<()> {
                let mut client = pair.client()?;
                for n in 0..rounds {
                    let update = format!("update chain set v = md5(v || '{n}') where id = {id}");
                    match n % 4 {
                        0 => {
                            client.query("begin")?;
                            client.query(&update)?;
                            client.query(if n % 3 == 0 { "rollback" } else { "commit" })?;
                        }
                        // More than a record of the ring holds.
                        1 => drop(client.query(&format!("/* {} */ {update}", "x".repeat(n * 37)))?),
                        _ => drop(client.query(&update)?),
                    }
                }
                Ok(())
            });
        }
    });
}

/// Opens all servers of the pool: while clients queue for servers that are being opened, user space serves them.
fn open_servers(pair: &Pair) -> Result<()> {
    pair.wait_on()?;
    let mut clients = (0..8).map(|_| pair.client()).collect::<Result<Vec<_>>>()?;
    clients.iter_mut().try_for_each(|client| client.query("begin").map(drop))?;
    clients.iter_mut().try_for_each(|client| client.query("commit").map(drop))
}

fn initialise(pair: &Pair) -> Result<()> {
    for server in [&pair.here, &pair.there] {
        pgbench(server.port(), &["-i", "-s", "1", "-I", "dtgp", "-q"]);
    }
    pair.both(CHAIN)?;
    open_servers(pair)
}

#[test]
fn everything_arrives_from_the_lanes() -> Result<()> {
    each(
        "compare_rows = ordered",
        |_| {},
        |lane, pair| {
            pair.both(T)?;
            pair.wait_on()?;
            let mut client = pair.client()?;
            say_everything(&mut client)?;
            let account = pair.settled()?;
            pair.assert_same(ALL)?;
            assert_eq!(account.get("dropped"), 0, "lane {lane}: {account:?}");
            assert_eq!(
                Pair::calls(&pair.there, "insert into t %")?,
                Pair::calls(&pair.here, "insert into t %")?
            );
            let rows = pair.differences()?;
            let differing: Vec<_> = rows.iter().filter(|row| row["differing"] != "0").collect();
            assert!(differing.is_empty(), "lane {lane}: {differing:?}");
            assert!(pair.xacts(lane)? > 3, "lane {lane}: {}", pair.xacts(lane)?);
            Ok(())
        },
    )
}

/// Lane B with a tap: requests go by TCP, answers straight to the application.
#[test]
fn applications_on_this_host_are_mirrored_from_their_lane() -> Result<()> {
    let Some(pair) = Pair::start_in(Some(Lanes::B), &SETTINGS, "")? else { return Ok(()) };
    pair.both(T)?;
    pair.wait_on()?;
    let mut client = pair.client()?;
    let mut id = 0;
    eventually("lane B carries transactions", || {
        id += 1;
        client.query(&format!("insert into t values ({id}, 'straight')"))?;
        Ok(pair.xacts("B")? > 3)
    })?;
    let account = pair.settled()?;
    pair.assert_same(ALL)?;
    assert_eq!(account.get("dropped"), 0, "{account:?}");
    Ok(())
}

#[test]
fn mirrored_transactions_stay_in_the_kernel_and_leave_equal_data() -> Result<()> {
    each(
        "compare_rows = unordered",
        |_| {},
        |lane, pair| {
            initialise(pair)?;
            let before = pair.account()?.get("transactions");
            for protocol in ["simple", "extended", "prepared"] {
                pgbench(pair.pooler.port(), &["-n", "-c", "8", "-j", "2", "-t", "300", "-M", protocol]);
            }
            write_chains(pair, 80);
            let account = pair.settled()?;
            assert_eq!(account.get("dropped"), 0, "lane {lane}: {account:?}");
            assert!(account.get("transactions") - before >= 7200 + 640, "lane {lane}: {account:?}");
            PGBENCH.iter().try_for_each(|sql| pair.assert_same(sql))?;
            pair.assert_same(CHAINS)?;
            let rows = pair.differences()?;
            let differing: Vec<_> =
                rows.iter().filter(|row| row["query"].contains("chain") && row["differing"] != "0").collect();
            assert!(differing.is_empty(), "lane {lane}: {differing:?}");
            let (carried, user) = (pair.xacts(lane)?, pair.xacts("user")?);
            println!("lane {lane}: {carried} of {} transactions", carried + user);
            pair.pooler.stop()?;
            assert!(carried * 100 >= (carried + user) * 95, "{carried}, {user}: {}", pair.pooler.log());
            pair.pooler.start_again()
        },
    )
}

#[test]
fn forced_hand_overs_lose_nothing() -> Result<()> {
    each(
        "",
        |lanes| lanes.flip = Some("8"),
        |lane, pair| {
            initialise(pair)?;
            pgbench(pair.pooler.port(), &["-n", "-c", "8", "-j", "2", "-t", "100", "-M", "prepared"]);
            write_chains(pair, 80);
            let account = pair.settled()?;
            assert_eq!(account.get("dropped"), 0, "lane {lane}: {account:?}");
            PGBENCH.iter().try_for_each(|sql| pair.assert_same(sql))?;
            pair.assert_same(CHAINS)
        },
    )
}

#[test]
fn a_small_ring_drops_whole_transactions_and_counts_them() -> Result<()> {
    const CLIENTS: u64 = 8;
    const EACH: u64 = 150;
    each(
        "",
        |lanes| lanes.lines = "mirror_ring_bytes = 4096",
        |lane, pair| {
            pair.both("create table parts (client int, n int, part int)")?;
            open_servers(pair)?;
            let before = pair.settled()?;
            thread::scope(|scope| {
                for client in 0..CLIENTS {
                    let pair = &*pair;
                    scope.spawn(move || -> Result<()> {
                        let mut connection = pair.client()?;
                        for n in 0..EACH {
                            connection.query("begin")?;
                            for part in 0..3 {
                                connection
                                    .query(&format!("insert into parts values ({client}, {n}, {part})"))?;
                            }
                            connection.query("commit")?;
                        }
                        Ok(())
                    });
                }
            });
            assert_eq!(pair.here.sql_value("select count(*) from parts")?, (CLIENTS * EACH * 3).to_string());
            let known = |account: &Account| account.get("transactions") - before.get("transactions");
            eventually("every transaction is accounted for", || {
                Ok(known(&pair.settled()?) >= CLIENTS * EACH)
            })?;
            let account = pair.settled()?;
            assert_eq!(known(&account), CLIENTS * EACH, "lane {lane}: {account:?}");
            let (executed, lost) =
                (account.get("executed") - before.get("executed"), account.get("ring_full"));
            assert!(executed > 0 && lost > 0, "lane {lane}: {account:?}");
            assert_eq!(executed + lost, CLIENTS * EACH, "lane {lane}: {account:?}");
            // What came there came as a whole.
            let whole = "select count(*) filter (where parts = 3), count(*) from
                     (select count(*) as parts from parts group by client, n) t";
            assert_eq!(pair.there.sql(whole)?, pair.there.sql(&format!("select {executed}, {executed}"))?);
            assert!(pair.xacts(lane)? >= CLIENTS * EACH / 2, "lane {lane}: {}", pair.xacts(lane)?);
            println!("lane {lane}: {executed} of {} found room", CLIENTS * EACH);
            Ok(())
        },
    )
}

#[test]
fn cancels_and_vanished_clients_reach_the_mirror_from_the_lanes() -> Result<()> {
    each("", |_| {}, |_, pair| cancels_and_vanishes(pair))
}

#[test]
fn a_mirror_is_switched_off_and_on_in_mid_session() -> Result<()> {
    each(
        "",
        |_| {},
        |lane, pair| {
            pair.both(T)?;
            pair.wait_on()?;
            let mut client = pair.client()?;
            let prepare = Batch::new().parse("ins", "insert into t values ($1, current_setting('timezone'))");
            client.exchange(&prepare.sync())?;
            client.query("insert into t values (1, 'on')")?;
            pair.settled()?;
            pair.pooler.console("DISABLE MIRROR next")?.ok()?;
            client.query("set timezone = 'Asia/Tokyo'")?;
            for id in 2..6 {
                client.query(&format!("insert into t values ({id}, 'off')"))?;
            }
            eventually("what is dropped is counted", || Ok(pair.settled()?.get("disabled") >= 5))?;
            client.query("begin")?;
            client.query("insert into t values (6, 'under')")?;
            pair.pooler.console("ENABLE MIRROR next")?.ok()?;
            client.query("insert into t values (7, 'way')")?;
            client.query("commit")?;
            pair.wait_on()?;
            client.exchange(&Batch::new().bind("", "ins", &[Some("8")]).execute("", 0).sync())?;
            // What was under way goes there as a whole if the pooler read of it when the mirror was on again, or not at all.
            let right = ["1on 8Asia/Tokyo", "1on 6under 7way 8Asia/Tokyo"];
            let mut there = String::new();
            let arrived = eventually_or_not(|| {
                there = pair.there.sql_value("select string_agg(id || v, ' ' order by id) from t")?;
                Ok(right.contains(&&*there))
            })?;
            assert!(arrived, "lane {lane}: {there}: {}", pair.pooler.log());
            assert!(pair.xacts(lane)? > 3, "lane {lane}: {}", pair.xacts(lane)?);
            Ok(())
        },
    )
}

/// One that leaves the mirror time to answer stays in its lane.
#[test]
fn clients_of_a_synchronous_mirror_stay_in_the_kernel_while_it_keeps_up() -> Result<()> {
    each(
        SYNC,
        |_| {},
        |lane, pair| {
            pair.both(T)?;
            open_servers(pair)?;
            let mut client = pair.client()?;
            // The first ones make the sessions there.
            client.query("insert into t values (0, 'sync')")?;
            let executed = pair.settled()?.get("executed");
            let before = pair.xacts(lane)?;
            for id in 1..=60 {
                client.query(&format!("insert into t values ({id}, 'sync')"))?;
                eventually("the mirror has it", || Ok(pair.account()?.get("executed") == executed + id))?;
            }
            let carried = pair.xacts(lane)? - before;
            let account = pair.settled()?;
            pair.assert_same(ALL)?;
            assert_eq!(account.get("dropped"), 0, "lane {lane}: {account:?}");
            assert!(carried >= 50, "lane {lane}: {carried} of 60: {}", pair.pooler.log());
            Ok(())
        },
    )
}

/// A block that failed on the mirror alone is rolled back there, and the next one, which may be said at the same moment, is not.
#[test]
fn what_is_rolled_back_there_is_not_the_next_block() -> Result<()> {
    const BLOCKS: u64 = 200;
    each(
        SYNC,
        |_| {},
        |lane, pair| {
            pair.both("create table t (id int)")?;
            pair.there.sql("alter table t add check (id >= 0)")?;
            pair.wait_on()?;
            open_servers(pair)?;
            // Each is in its lane until it is held once.
            for id in 0..BLOCKS {
                let mut client = pair.client()?;
                client.query("select 1")?.ok()?;
                let pipeline = Batch::new().extended("begin", &[]).extended("insert into t values (-1)", &[]);
                client.exchange(&pipeline.extended("commit", &[]).sync())?;
                client.query(&format!("begin; insert into t values ({id})"))?.ok()?;
                client.query("commit")?.ok()?;
                client.terminate()?;
            }
            let account = pair.settled()?;
            assert_eq!((&*account.0["state"], account.get("dropped")), ("on", 0), "lane {lane}: {account:?}");
            let there = pair.there.sql_value("select count(*) from t")?;
            assert_eq!(there, BLOCKS.to_string(), "lane {lane}");
            Ok(())
        },
    )
}

/// Where transactions wait, and not statements, blocks whose statements follow each other at once stay in their lane too. What comes behind one
/// while the mirror is at it comes up and waits.
#[test]
fn blocks_of_a_synchronous_mirror_stay_in_the_kernel() -> Result<()> {
    each(
        MODES[2],
        |_| {},
        |lane, pair| {
            pair.both(T)?;
            open_servers(pair)?;
            let mut client = pair.client()?;
            let block = |client: &mut Client, id: u64| -> Result<()> {
                client.query("begin")?.ok()?;
                for part in 0..4 {
                    client.query(&format!("insert into t values ({}, 'block')", id * 4 + part))?.ok()?;
                }
                client.query("commit")?.ok().map(drop)
            };
            block(&mut client, 0)?;
            let executed = pair.settled()?.get("executed");
            let before = pair.xacts(lane)?;
            for id in 1..=60 {
                block(&mut client, id)?;
                eventually("the mirror has it", || Ok(pair.account()?.get("executed") == executed + id))?;
            }
            let carried = pair.xacts(lane)? - before;
            assert!(carried >= 50, "lane {lane}: {carried} of 60: {}", pair.pooler.log());
            let mut blocker = Client::connect(&pair.there.superuser())?;
            blocker.query("begin")?;
            blocker.query("lock table t")?;
            // Its own answers do not wait; what comes behind it does.
            block(&mut client, 61)?;
            client.send(&Batch::new().query("insert into t values (1000, 'behind')"))?;
            thread::sleep(Duration::from_millis(300));
            assert_eq!(pair.here.sql_value("select count(*) from t where id = 1000")?, "0", "lane {lane}");
            blocker.query("rollback")?;
            client.response()?.ok()?;
            let account = pair.settled()?;
            pair.assert_same(ALL)?;
            assert_eq!(account.get("dropped"), 0, "lane {lane}: {account:?}");
            Ok(())
        },
    )
}

#[test]
fn everything_arrives_from_the_lanes_in_sync() -> Result<()> {
    each_in_sync(
        "sync_timeout = 30",
        |_| {},
        |lane, pair| {
            pair.both(T)?;
            pair.wait_on()?;
            let mut client = pair.client()?;
            say_everything(&mut client)?;
            let account = pair.settled()?;
            pair.assert_same(ALL)?;
            assert_eq!(account.get("dropped"), 0, "lane {lane}: {account:?}");
            assert!(pair.xacts(lane)? > 0, "lane {lane}");
            Ok(())
        },
    )
}

/// Clients that do not pause, taken out of their lanes at random as well: each row is changed by one of them, so the data agree. A client that
/// waited before it came into its lane does not wait there.
#[test]
fn a_synchronous_mirror_has_the_same_data_whoever_forwards() -> Result<()> {
    for flip in [None, Some("8")] {
        each_in_sync(
            "sync_timeout = 3",
            |lanes| lanes.flip = flip,
            |lane, pair| {
                pair.both(CHAIN)?;
                open_servers(pair)?;
                write_chains(pair, 80);
                thread::sleep(Duration::from_secs(3));
                write_chains(pair, 80);
                let account = pair.settled()?;
                assert_eq!(account.get("dropped"), 0, "lane {lane}: {account:?}");
                pair.assert_same(CHAINS)?;
                let carried = pair.xacts(lane)?;
                println!("lane {lane}, flips {flip:?}: {carried} transactions carried");
                assert!(carried > 0, "lane {lane}: {}", pair.pooler.log());
                Ok(())
            },
        )?;
    }
    Ok(())
}

/// What its client says next comes up and waits, for `sync_timeout` at most; then the lane goes on without the mirror.
#[test]
fn a_silent_mirror_in_sync_holds_who_was_in_a_lane() -> Result<()> {
    each_in_sync(
        "sync_timeout = 0.7",
        |_| {},
        |lane, pair| {
            pair.both(T)?;
            open_servers(pair)?;
            let mut client = pair.client()?;
            let insert = |client: &mut Client, id: u32| {
                client.query(&format!("insert into t values ({id}, 'sync')")).map(drop)
            };
            let mut id = 0;
            let mut carried = 0;
            eventually("its lane has it", || {
                id += 1;
                carried = pair.xacts(lane)?;
                insert(&mut client, id)?;
                pair.settled()?;
                Ok(pair.xacts(lane)? > carried)
            })?;
            let mut blocker = Client::connect(&pair.there.superuser())?;
            blocker.query("begin")?;
            blocker.query("lock table t")?;
            let begun = Instant::now();
            insert(&mut client, 1000)?;
            assert!(begun.elapsed() < Duration::from_millis(600), "its own answer does not wait");
            insert(&mut client, 1001)?;
            let waited = begun.elapsed();
            assert!(waited >= Duration::from_millis(600) && waited < Duration::from_secs(5), "{waited:?}");
            pair.wait_state("failed")?;
            let carried = pair.xacts(lane)?;
            for id in 1002..1040 {
                insert(&mut client, id)?;
            }
            assert!(pair.xacts(lane)? >= carried + 30, "lane {lane}: nobody waits any more");
            blocker.query("rollback")?;
            pair.pooler.console("ENABLE MIRROR next")?.ok()?;
            pair.wait_on()?;
            // The client is called up from its lane first. What it says before that is dropped.
            let mut id = 1999;
            eventually("the client is mirrored again", || {
                id += 1;
                insert(&mut client, id)?;
                pair.settled()?;
                Ok(pair.there.sql_value(&format!("select count(*) from t where id = {id}"))? == "1")
            })?;
            for id in 3000..3020 {
                insert(&mut client, id)?;
            }
            let account = pair.settled()?;
            assert_eq!(pair.there.sql_value("select count(*) from t where id >= 3000")?, "20", "lane {lane}");
            assert_eq!(
                account.get("dropped"),
                account.get("not_ready") + account.get("disabled"),
                "{account:?}"
            );
            Ok(())
        },
    )
}

#[test]
fn a_small_ring_drops_whole_transactions_in_sync_and_holds_nobody() -> Result<()> {
    each_in_sync(
        "sync_timeout = 30",
        |lanes| lanes.lines = "mirror_ring_bytes = 4096",
        |lane, pair| {
            pair.both("create table parts (n int, part int)")?;
            open_servers(pair)?;
            let before = pair.settled()?;
            let mut client = pair.client()?;
            for n in 0..60 {
                // Longer than the ring at times, in the lane or after a pause.
                let comment = "x".repeat(if n % 3 == 0 { 6000 } else { 10 });
                client.query("begin")?;
                for part in 0..3 {
                    client.query(&format!("/* {comment} */ insert into parts values ({n}, {part})"))?;
                }
                client.query("commit")?;
                if n % 2 == 0 {
                    pair.settled()?;
                }
            }
            let comment = "x".repeat(6000);
            let lost = || -> Result<u64> { Ok(pair.settled()?.get("ring_full") - before.get("ring_full")) };
            // A client that rests in user space, on a busy machine, is told without the ring.
            let mut count = 60u64;
            while count < 65 || (lost()? < 5 && count < 300) {
                let n = count;
                count += 1;
                // The mirror has the block, and the ring has no room for its end.
                let mut client = pair.client()?;
                client.query("begin")?;
                thread::sleep(Duration::from_millis(50));
                client.query(&format!(
                    "/* {comment} */ insert into parts values ({n}, 0), ({n}, 1), ({n}, 2); commit"
                ))?;
                // Nor for an answer, which is told by user space.
                client.query("select repeat('x', 9000)")?;
            }
            let account = pair.settled()?;
            let since = |column: &str| account.get(column) - before.get(column);
            assert_eq!(pair.here.sql_value("select count(*) from parts")?, (3 * count).to_string());
            // One more of each of the last ones: the SELECT.
            let all = 2 * count - 60;
            assert_eq!(since("transactions"), all, "lane {lane}: {account:?}");
            let (executed, lost) = (since("executed"), since("ring_full"));
            assert_eq!(executed + lost, all, "lane {lane}: {account:?}");
            assert!(lost >= 5, "lane {lane}: {account:?}");
            let executed = executed - Pair::calls(&pair.there, "select repeat%")?;
            let open = "select count(*) from pg_stat_activity where state like 'idle in transaction%'";
            assert_eq!(pair.there.sql_value(open)?, "0", "lane {lane}");
            assert_eq!(account.0["state"], "on", "lane {lane}: {account:?}");
            let whole = "select count(*) filter (where parts = 3), count(*) from
                     (select count(*) as parts from parts group by n) t";
            assert_eq!(pair.there.sql(whole)?, pair.there.sql(&format!("select {executed}, {executed}"))?);
            println!("lane {lane}: {executed} of 65 found room");
            Ok(())
        },
    )
}

#[test]
fn cancels_and_vanished_clients_reach_a_synchronous_mirror_from_the_lanes() -> Result<()> {
    each_in_sync("sync_timeout = 30", |_| {}, |_, pair| cancels_and_vanishes(pair))
}

/// RELOAD changes the mode under clients in their lanes.
#[test]
fn the_mode_of_a_mirror_changes_under_the_lanes() -> Result<()> {
    each(
        SYNC,
        |_| {},
        |lane, pair| {
            pair.both(T)?;
            pair.wait_on()?;
            let mut client = pair.client()?;
            for (round, mode) in ["", SYNC, MODES[2], "", MODES[2], SYNC].into_iter().enumerate() {
                let ids = round * 20..(round + 1) * 20;
                for id in ids {
                    client.query(&format!("insert into t values ({id}, 'x')"))?;
                    client.query(&format!("update t set v = v || {id} where id % 20 = {}", id % 20))?;
                }
                pair.reload(Some(mode))?;
            }
            let account = pair.settled()?;
            pair.assert_same(ALL)?;
            assert_eq!(account.get("dropped"), 0, "lane {lane}: {account:?}");
            assert!(pair.xacts(lane)? > 0, "lane {lane}");
            Ok(())
        },
    )
}
