// SPDX-License-Identifier: Apache-2.0
//! What SHOW STATS_TOTALS says of a lane's work is what it would say of user space's.

use super::*;

/// A value of SHOW STATS_TOTALS or another table of one row per database, for database postgres.
pub fn total(pooler: &Underpass, table: &str, column: &str) -> Result<u64> {
    let answer = pooler.console(&format!("show {table}"))?;
    let names = answer.column_names();
    let at = names.iter().position(|name| name == column).expect("a column of that name");
    let rows = answer.rows();
    let row = rows.iter().find(|row| row[0].as_deref() == Some("postgres"));
    Ok(row.and_then(|row| row[at].as_deref()?.parse().ok()).unwrap_or(0))
}

/// Waits until these columns of SHOW STATS_TOTALS have these values: workers add up a moment after the answer.
pub fn expect_totals(pooler: &Underpass, wanted: &[(&str, u64)]) -> Result<()> {
    let begun = Instant::now();
    loop {
        let seen = wanted
            .iter()
            .map(|(column, _)| total(pooler, "stats_totals", column))
            .collect::<Result<Vec<_>>>()?;
        if wanted.iter().zip(&seen).all(|((_, wanted), seen)| wanted == seen) {
            return Ok(());
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "{wanted:?}: {seen:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Copies one row into table `t`. The server may refuse it.
fn copy_in(client: &mut Client, table: &str, end: Batch) -> Result<underpass_testkit::Response> {
    client.send(&Batch::new().query(&format!("copy {table} from stdin")))?;
    while client.recv()?.tag != b'G' {}
    client.send(&end)?;
    client.response()
}

/// Its lane made the link of each, and user space ends it.
#[test]
fn each_copy_was_given_a_server() -> Result<()> {
    each_lane(
        |ini| ini,
        |server, pooler, _| {
            server.sql("create table t (x int check (x > 0))")?;
            let mut a = client(pooler)?;
            for _ in 0..20 {
                copy_in(&mut a, "t", Batch::new().copy_data(b"1\n").copy_done())?.ok()?;
                // Fails in its lane, which holds the link.
                assert!(copy_in(&mut a, "t", Batch::new().copy_data(b"0\n\n"))?.ok().is_err());
                value(&mut a, "select 1")?;
            }
            expect_totals(pooler, &[("xact_count", 60), ("query_count", 60), ("server_assignment_count", 60)])
        },
    )
}

/// A transaction takes at least as long as its query, whoever ends it.
#[test]
fn a_transaction_whose_link_is_held_has_its_time() -> Result<()> {
    each_lane(
        |ini| ini,
        |server, pooler, lane| {
            // It is never true, half a second late.
            server.sql("create table slow (x int check (pg_sleep(0.5) is null))")?;
            let mut a = client(pooler)?;
            let before = carried(pooler, lane)?;
            let begun = Instant::now();
            while carried(pooler, lane)? == before {
                assert!(begun.elapsed() < Duration::from_secs(10), "lane {lane} carries nothing");
                value(&mut a, "select 1")?;
            }
            for end in [Batch::new().copy_data(b"1\n\n"), Batch::new().copy_data(b"1\n").copy_done()] {
                assert!(copy_in(&mut a, "slow", end)?.ok().is_err());
                value(&mut a, "select 1")?;
            }
            let seen = total(pooler, "stats_totals", "query_count")?;
            expect_totals(pooler, &[("xact_count", seen)])?;
            let (xact, query) =
                (total(pooler, "stats_totals", "xact_time")?, total(pooler, "stats_totals", "query_time")?);
            assert!(query >= 1_000_000 && xact >= query, "lane {lane}: {xact} us, queries {query} us");
            Ok(())
        },
    )
}

/// A pipeline is one link, and as many transactions as in user space.
#[test]
fn a_pipeline_counts_as_in_user_space() -> Result<()> {
    let count = |pooler: &Underpass| -> Result<()> {
        let mut a = client(pooler)?;
        for _ in 0..25 {
            a.exchange(&Batch::new().query("select 1").query("select 2"))?;
        }
        expect_totals(pooler, &[("xact_count", 50), ("query_count", 50), ("server_assignment_count", 25)])
    };
    let server = Postgres::start()?;
    let off = Ini::for_server(&server).set("pool_mode", "transaction").tail("[underpass]\nkernel_path = off");
    count(&Underpass::start(&off)?)?;
    each_lane(|ini| ini, |_, pooler, _| count(pooler))
}
