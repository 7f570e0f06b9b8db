// SPDX-License-Identifier: Apache-2.0
//! Session pooling in the lanes: the link is the client's until it leaves, and with it all that a session has.

use super::statistics::{expect_totals, total};
use super::*;

fn each_session_lane(
    ini: impl Fn(Ini) -> Ini,
    test: impl Fn(&Postgres, &mut Underpass, &str) -> Result<()>,
) -> Result<()> {
    each_lane(|base| ini(base.set("pool_mode", "session")), test)
}

/// Transactions in `lane` and in user space.
fn xacts(pooler: &Underpass, lane: &str) -> Result<(u64, u64)> {
    Ok((carried(pooler, lane)?, kernel(pooler, "user", "xacts")?))
}

/// Asks until the answer comes through the lane. On a busy machine an answer may be faster than the hand-over, again and again; then
/// what [`xacts`] says.
fn settle(pooler: &Underpass, lane: &str, client: &mut Client) -> Result<(u64, u64)> {
    let begun = Instant::now();
    loop {
        let before = carried(pooler, lane)?;
        value(client, "select 1")?;
        let now = xacts(pooler, lane)?;
        if now.0 > before {
            return Ok(now);
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "the session is not given to its lane");
    }
}

/// Since the pooler's counters were `before`.
fn assert_carried(pooler: &Underpass, lane: &str, before: (u64, u64)) -> Result<()> {
    let now = xacts(pooler, lane)?;
    let (carried, user) = (now.0 - before.0, now.1 - before.1);
    println!("lane {lane}: {carried} of {} transactions", carried + user);
    let exits: Vec<_> = pooler
        .console("show kernel")?
        .rows()
        .into_iter()
        .filter(|row| row[0].as_deref() == Some("exit"))
        .collect();
    assert!(
        carried * 100 >= (carried + user) * 95,
        "lane {lane}: {carried} of {}: {exits:?}",
        carried + user
    );
    Ok(())
}

#[test]
fn a_session_stays_in_the_kernel_with_all_that_it_has() -> Result<()> {
    each_session_lane(
        |ini| ini,
        |_, pooler, lane| {
            let mut a = client(pooler)?;
            let pid = value(&mut a, "select pg_backend_pid()")?;
            let before = settle(pooler, lane, &mut a)?;
            // What would go up between transactions of a shared server.
            a.query("create temp table mine (x int)")?.ok()?;
            a.query("set search_path = pg_temp, public")?.ok()?;
            a.query("prepare by_sql as select 'sql'")?.ok()?;
            prepare(&mut a, "named", "select 'named ' || $1::text")?;
            for i in 0..200 {
                assert_eq!(value(&mut a, "select pg_backend_pid()")?, pid);
                assert_eq!(execute(&mut a, "named", &[Some(&i.to_string())])?, format!("named {i}"));
                assert_eq!(value(&mut a, "execute by_sql")?, "sql");
                // Parsed in one batch, bound in another.
                a.exchange(&Batch::new().parse("", "select 42").describe_statement("").sync())?;
                let answer = a.exchange(&Batch::new().bind("", "", &[]).execute("", 0).sync())?.pop();
                assert_eq!(answer.map(|r| r.ok()).transpose()?.as_ref().and_then(|r| r.value()), Some("42"));
                // A batch without its Sync: the answer comes by Flush.
                let name = format!("n{i}");
                a.send(&Batch::new().parse(&name, "select 43").flush())?;
                assert_eq!(a.recv()?.tag, b'1');
                assert_eq!(execute(&mut a, &name, &[])?, "43");
                // A portal that lives as long as its transaction.
                a.query("begin")?.ok()?;
                a.exchange(
                    &Batch::new()
                        .parse("", "select generate_series(1, 3)")
                        .bind("portal", "", &[])
                        .execute("portal", 1)
                        .sync(),
                )?;
                let answer = a.exchange(&Batch::new().execute("portal", 1).sync())?.pop();
                assert_eq!(answer.as_ref().and_then(|r| r.value()), Some("2"));
                a.query("insert into mine values (1)")?.ok()?;
                a.query("commit")?.ok()?;
                a.query("discard plans")?.ok()?;
                a.exchange(&Batch::new().close_statement(&name).sync())?;
            }
            assert_eq!(value(&mut a, "select count(*) from mine")?, "200");
            assert_carried(pooler, lane, before)
        },
    )
}

#[test]
fn the_next_session_finds_a_clean_server() -> Result<()> {
    each_session_lane(
        |ini| ini.set("default_pool_size", "1"),
        |_, pooler, lane| {
            let mut first = None;
            for round in 0..5 {
                let mut a = client(pooler)?;
                let pid = value(&mut a, "select pg_backend_pid()")?;
                assert_eq!(first.get_or_insert(pid.clone()), &pid);
                assert_eq!(value(&mut a, "select count(*) from pg_prepared_statements")?, "0");
                assert_eq!(value(&mut a, "select to_regclass('pg_temp.mine') is null")?, "t");
                assert_eq!(value(&mut a, "select count(*) from pg_listening_channels()")?, "0");
                assert_ne!(value(&mut a, "show timezone")?, "Asia/Tokyo");
                assert_ne!(value(&mut a, "show work_mem")?, "77kB");
                a.query("create temp table mine (x int)")?.ok()?;
                a.query("prepare p as select 1")?.ok()?;
                a.query("listen news")?.ok()?;
                a.query("set timezone = 'Asia/Tokyo'")?.ok()?;
                a.query("set work_mem = '77kB'")?.ok()?;
                a.query("begin")?.ok()?;
                // It leaves in every way, in a transaction.
                match round % 3 {
                    0 => a.terminate()?,
                    1 => a.reset()?,
                    _ => drop(a),
                }
            }
            println!("lane {lane}: {:?}", xacts(pooler, lane)?);
            Ok(())
        },
    )
}

#[test]
fn notifications_and_notices_come_without_a_request() -> Result<()> {
    each_session_lane(
        |ini| ini,
        |_, pooler, lane| {
            let (mut a, mut b) = (client(pooler)?, client(pooler)?);
            a.query("listen news")?.ok()?;
            settle(pooler, lane, &mut a)?;
            let before = settle(pooler, lane, &mut b)?;
            for i in 0..50 {
                b.query(&format!("notify news, 'number {i}'"))?.ok()?;
                let told = a.recv()?;
                assert_eq!(told.tag, b'A');
                assert!(told.body.ends_with(format!("news\0number {i}\0").as_bytes()), "{told:?}");
            }
            // Behind the answer of its own statement, in one chunk with it.
            for i in 0..50 {
                a.query(&format!("notify news, 'own {i}'"))?.ok()?;
                if i % 2 == 0 {
                    assert_eq!(value(&mut a, "select 'between'")?, "between");
                }
            }
            assert_eq!(value(&mut a, "select 7")?, "7");
            assert_carried(pooler, lane, before)
        },
    )
}

#[test]
fn statistics_of_sessions_are_true() -> Result<()> {
    each_session_lane(
        |ini| ini,
        |_, pooler, _| {
            let mut a = client(pooler)?;
            let mut b = client(pooler)?;
            for _ in 0..25 {
                value(&mut a, "select 1")?;
                b.query("begin")?.ok()?;
                b.query("select 1")?.ok()?;
                b.query("commit")?.ok()?;
                a.exchange(&Batch::new().query("select 1").query("select 2"))?;
            }
            expect_totals(
                pooler,
                &[("xact_count", 25 * 4), ("query_count", 25 * 6), ("server_assignment_count", 2)],
            )?;
            assert_eq!(total(pooler, "pools", "cl_active")?, 2);
            assert_eq!((total(pooler, "pools", "sv_active")?, total(pooler, "pools", "sv_idle")?), (2, 0));
            let servers = pooler.console("show servers")?.rows();
            let linked =
                |row: &&Vec<Option<String>>| row.iter().any(|field| field.as_deref() == Some("active"));
            assert_eq!(servers.iter().filter(linked).count(), 2, "{servers:?}");
            drop(a);
            let begun = Instant::now();
            while total(pooler, "pools", "sv_idle")? != 1 {
                assert!(begun.elapsed() < Duration::from_secs(10), "the server does not come back");
                std::thread::sleep(Duration::from_millis(20));
            }
            Ok(())
        },
    )
}

#[test]
fn timeouts_reach_sessions_in_lanes() -> Result<()> {
    let ini = |ini: Ini| {
        ini.set("query_timeout", "1").set("idle_transaction_timeout", "1").set("client_idle_timeout", "1")
    };
    each_session_lane(ini, |_, pooler, _| {
        let mut idle = client(pooler)?;
        for _ in 0..3 {
            value(&mut idle, "select 1")?;
        }
        expect_timeout(pooler, 3, "select pg_sleep(30)", "query")?;
        expect_timeout(pooler, 3, "begin", "idle transaction")?;
        // `client_idle_timeout` is for clients without a server, and a session keeps its own.
        assert_eq!(value(&mut idle, "select 2")?, "2");
        Ok(())
    })
}

#[test]
fn console_commands_reach_sessions_in_lanes() -> Result<()> {
    each_session_lane(
        |ini| ini.set("server_fast_close", "1"),
        |_, pooler, lane| {
            // PAUSE waits for the end of a session, which goes on meanwhile.
            let mut a = client(pooler)?;
            value(&mut a, "select 1")?;
            std::thread::scope(|scope| -> Result<()> {
                let paused = scope.spawn(|| pooler.console("pause").and_then(|answer| answer.ok()));
                std::thread::sleep(Duration::from_millis(300));
                assert_eq!(value(&mut a, "select 8")?, "8");
                assert!(!paused.is_finished());
                a.terminate()?;
                paused.join().expect("no panic")?;
                Ok(())
            })?;
            pooler.console("resume")?.ok()?;

            // RECONNECT with server_fast_close ends a session between its transactions.
            let mut a = client(pooler)?;
            value(&mut a, "select 1")?;
            a.query("begin")?.ok()?;
            pooler.console("reconnect")?.ok()?;
            std::thread::sleep(Duration::from_millis(300));
            assert_eq!(value(&mut a, "select 9")?, "9");
            a.query("commit")?.ok()?;
            a.until_closed()?;

            // KILL leaves nothing behind.
            let mut a = client(pooler)?;
            value(&mut a, "select 1")?;
            pooler.console("kill postgres")?.ok()?;
            // Workers carry it out after the console's answer.
            let begun = Instant::now();
            while a.query("select 1").is_ok() {
                assert!(begun.elapsed() < Duration::from_secs(10), "the session goes on");
            }
            pooler.console("resume postgres")?.ok()?;
            let mut b = client(pooler)?;
            let (before, begun) = (carried(pooler, lane)?, Instant::now());
            while carried(pooler, lane)? == before {
                assert!(begun.elapsed() < Duration::from_secs(10), "the lane carries nothing");
                value(&mut b, "select 1")?;
            }
            assert!(!pooler.log().contains("ERROR kernel lanes"), "{}", pooler.log());
            Ok(())
        },
    )
}

#[test]
fn a_cancel_request_hits_its_own_session() -> Result<()> {
    each_session_lane(
        |ini| ini,
        |_, pooler, _| {
            let mut a = client(pooler)?;
            for round in 0..3 {
                value(&mut a, "select 1")?;
                a.send(&Batch::new().query("select pg_sleep(20)"))?;
                std::thread::sleep(Duration::from_millis(300));
                let begun = Instant::now();
                a.cancel()?;
                assert!(a.response()?.ok().is_err());
                assert!(begun.elapsed() < Duration::from_secs(10));
                assert_eq!(value(&mut a, &format!("select {round}"))?, round.to_string());
            }
            Ok(())
        },
    )
}

#[test]
fn a_reload_changes_the_mode_of_what_is_in_the_lanes() -> Result<()> {
    each_session_lane(
        |ini| ini.set("default_pool_size", "1"),
        |_, pooler, lane| {
            let mut a = client(pooler)?;
            for _ in 0..5 {
                value(&mut a, "select 1")?;
            }
            pooler.console("set pool_mode = 'transaction'")?.ok()?;
            // With one server, both are served only if neither keeps it.
            let mut b = client(pooler)?;
            for i in 0..20 {
                assert_eq!(value(&mut a, &format!("select {i}"))?, i.to_string());
                assert_eq!(value(&mut b, &format!("select {i}"))?, i.to_string());
            }
            pooler.console("set pool_mode = 'session'")?.ok()?;
            drop(b);
            for i in 0..20 {
                assert_eq!(value(&mut a, &format!("select {i}"))?, i.to_string());
            }
            println!("lane {lane}: {:?}", xacts(pooler, lane)?);
            Ok(())
        },
    )
}

#[test]
fn a_terminated_backend_ends_its_session() -> Result<()> {
    each_session_lane(
        |ini| ini,
        |server, pooler, _| {
            let (mut a, mut b) = (client(pooler)?, client(pooler)?);
            let pid = value(&mut a, "select pg_backend_pid()")?;
            value(&mut a, "select 1")?;
            value(&mut b, "select 1")?;
            server.sql(&format!("select pg_terminate_backend({pid})"))?;
            let told = a.until_closed()?;
            assert!(told.iter().any(|message| message.error().is_some()));
            for i in 0..20 {
                assert_eq!(value(&mut b, &format!("select {i}"))?, i.to_string());
            }
            Ok(())
        },
    )
}

/// Hand-overs in each direction: so many in `make test-lanes`. Elsewhere the leak checker has them (`crates/soak/tests/underpass.rs`).
fn least_hand_overs() -> u64 {
    if std::env::var("UNDERPASS_TEST_KERNEL_PATH").is_ok_and(|path| path == "require") { 10_000 } else { 200 }
}

/// Clients are taken out of the lane at random, and put back, also in the middle of a batch without its Sync.
#[test]
fn sessions_go_up_and_down_in_the_middle_of_anything() -> Result<()> {
    each_session_lane(
        |ini| ini.environment("UNDERPASS_TEST_FLIP", "2"),
        |_, pooler, lane| {
            let mut a = client(pooler)?;
            let begun = Instant::now();
            let mut rounds = 0;
            let hand_overs = || -> Result<u64> {
                Ok(kernel(pooler, "all", "taken")?.min(kernel(pooler, "all", "given")?))
            };
            while begun.elapsed() < Duration::from_secs(3) || hand_overs()? < least_hand_overs() {
                assert!(begun.elapsed() < Duration::from_secs(120), "hardly any hand-over");
                rounds += 1;
                let text = rounds.to_string();
                a.send(&Batch::new().parse("s", "select $1::text").flush())?;
                assert_eq!(a.recv()?.tag, b'1');
                a.send(&Batch::new().bind("", "s", &[Some(&text)]).describe_portal("").flush())?;
                assert_eq!((a.recv()?.tag, a.recv()?.tag), (b'2', b'T'));
                a.send(&Batch::new().execute("", 0).close_statement("s"))?;
                std::thread::sleep(Duration::from_millis(rounds % 3));
                let reply = a.exchange(&Batch::new().sync())?.pop().expect("an answer");
                assert_eq!(
                    reply.ok()?.messages.iter().find(|m| m.tag == b'D').map(|m| m.columns()),
                    Some(vec![Some(text)])
                );
                // A batch that fails before its Sync.
                a.send(&Batch::new().parse("", "select 1/0").bind("", "", &[]).execute("", 0).flush())?;
                while a.recv()?.tag != b'E' {}
                let reply = a.exchange(&Batch::new().parse("", "select 1").sync())?.pop().expect("an answer");
                assert_eq!(reply.status(), Some(b'I'));
            }
            println!(
                "lane {lane}: {:?} in {rounds} rounds, {} taken, {} given",
                xacts(pooler, lane)?,
                kernel(pooler, "all", "taken")?,
                kernel(pooler, "all", "given")?
            );
            assert!(carried(pooler, lane)? > 0);
            Ok(())
        },
    )
}
