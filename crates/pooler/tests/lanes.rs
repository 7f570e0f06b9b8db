// SPDX-License-Identifier: Apache-2.0
//! The kernel lanes under the whole pooler. Each test runs with lanes D, A and B; without root they are skipped, and say so.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use underpass_testkit::{Account, Batch, Client, Ini, Pooler, Postgres, Result, Signal, Underpass};

#[path = "lanes/application.rs"]
mod application;
#[path = "lanes/broken.rs"]
mod broken;
#[path = "lanes/death.rs"]
mod death;
#[path = "lanes/elsewhere.rs"]
mod elsewhere;
#[path = "lanes/growth.rs"]
mod growth;
#[path = "lanes/leaving.rs"]
mod leaving;
#[path = "lanes/leftovers.rs"]
mod leftovers;
#[path = "lanes/limits.rs"]
mod limits;
#[path = "lanes/memory.rs"]
mod memory;
#[path = "lanes/outside.rs"]
mod outside;
#[path = "lanes/pipelines.rs"]
mod pipelines;
#[path = "lanes/queue.rs"]
mod queue;
#[path = "lanes/segments.rs"]
mod segments;
#[path = "lanes/session.rs"]
mod session;
#[path = "lanes/stalled.rs"]
mod stalled;
#[path = "lanes/statistics.rs"]
mod statistics;

const LANES: [(&str, &str); 3] = [("D", "off"), ("A", "server"), ("B", "both")];

fn each_lane(
    ini: impl Fn(Ini) -> Ini,
    test: impl Fn(&Postgres, &mut Underpass, &str) -> Result<()>,
) -> Result<()> {
    in_lanes(&LANES, ini, test)
}

fn in_lanes(
    lanes: &[(&str, &str)],
    ini: impl Fn(Ini) -> Ini,
    test: impl Fn(&Postgres, &mut Underpass, &str) -> Result<()>,
) -> Result<()> {
    for (lane, same_host) in lanes {
        let server = Postgres::start()?;
        let base = Ini::for_server(&server).set("pool_mode", "transaction").set("default_pool_size", "4");
        let Some(ini) = ini(base).lanes(same_host, 1) else { return Ok(()) };
        let mut pooler = Underpass::start(&ini)?;
        test(&server, &mut pooler, lane)?;
        assert!(pooler.is_running(), "{}", pooler.log());
    }
    Ok(())
}

fn client(pooler: &Underpass) -> Result<Client> {
    Client::connect(&pooler.options("postgres", "postgres"))
}

fn kernel(pooler: &Underpass, name: &str, item: &str) -> Result<u64> {
    let rows = pooler.console("show kernel")?.rows();
    let row = rows.iter().find(|row| row[1].as_deref() == Some(name) && row[2].as_deref() == Some(item));
    Ok(row.and_then(|row| row[3].as_deref()?.parse().ok()).unwrap_or(0))
}

/// Transactions that ended in a lane. Those of lane B begin in lane A, until the application's socket is found.
fn carried(pooler: &Underpass, lane: &str) -> Result<u64> {
    let beside = if lane == "B" { kernel(pooler, "A", "xacts")? } else { 0 };
    Ok(kernel(pooler, lane, "xacts")? + beside)
}

fn value(client: &mut Client, sql: &str) -> Result<String> {
    Ok(client.query(sql)?.ok()?.value().unwrap_or_default().to_owned())
}

#[test]
fn nearly_every_transaction_stays_in_the_kernel() -> Result<()> {
    each_lane(
        |ini| ini,
        |_, pooler, lane| {
            let mut a = client(pooler)?;
            // Asks again at once after the transaction that it had in user space: it is in its lane by then.
            for i in 0..300 {
                assert_eq!(value(&mut a, &format!("select {i}"))?, i.to_string());
                assert_eq!(
                    a.extended("select $1::int + 1", &[Some(&i.to_string())])?.ok()?.value(),
                    Some(&*(i + 1).to_string())
                );
                let replies = a.exchange(&Batch::new().query("begin").query("select 2").query("commit"))?;
                assert_eq!(replies.len(), 3);
            }
            let (carried, user) = (carried(pooler, lane)?, kernel(pooler, "user", "xacts")?);
            println!("lane {lane}: {carried} of {} transactions", carried + user);
            pooler.stop()?;
            let log = pooler.log();
            pooler.start_again()?;
            assert!(
                carried * 100 >= (carried + user) * 95,
                "lane {lane}: {carried} of {}: {}",
                carried + user,
                log
            );
            Ok(())
        },
    )
}

/// What the fixtures rely on: a transaction in user space that nobody explains is found, and fails the test that made it.
#[test]
fn a_transaction_without_a_reason_is_found() -> Result<()> {
    let server = Postgres::start()?;
    for mode in ["transaction", "session"] {
        let ini = Ini::for_server(&server).set("pool_mode", mode);
        let Some(ini) = ini.lanes("server", 1) else { return Ok(()) };
        let pooler = Underpass::start(&ini.environment("UNDERPASS_TEST_UNEXPLAINED", "1"))?;
        let mut a = client(&pooler)?;
        for _ in 0..3 {
            assert_eq!(value(&mut a, "select 1")?, "1");
        }
        let account = Account::of(&pooler)?.expect("lanes are on");
        assert_eq!(account.mistakes(false), ["3 transactions in user space are unexplained"], "{account}");
        let end = std::panic::catch_unwind(AssertUnwindSafe(|| drop(pooler)));
        assert!(end.is_err(), "the fixture did not fail");
    }
    Ok(())
}

/// A pipeline is as many transactions in its lane as in user space.
#[test]
fn a_pipeline_is_many_transactions() -> Result<()> {
    each_lane(
        |ini| ini,
        |_, pooler, lane| {
            let mut a = client(pooler)?;
            for _ in 0..20 {
                value(&mut a, "select 1")?;
            }
            let figures = |name: &str| kernel(pooler, name, "xacts");
            let before = (figures("named_statement")?, figures("user")?);
            let selects = |batch: Batch| (0..9).fold(batch, |batch, _| batch.query("select 1"));
            assert_eq!(a.exchange(&selects(Batch::new().parse("name", "select 1").sync()))?.len(), 10);
            let after = (figures("named_statement")?, figures("user")?);
            assert_eq!((after.0 - before.0, after.1 - before.1), (10, 10), "lane {lane}");
            // The first may find its client on its way back.
            value(&mut a, "select 1")?;
            value(&mut a, "select 1")?;
            let before = carried(pooler, lane)?;
            assert_eq!(a.exchange(&selects(Batch::new()))?.len(), 9);
            assert_eq!(carried(pooler, lane)? - before, 9, "lane {lane}");
            Ok(())
        },
    )
}

#[test]
fn errors_and_failed_transactions() -> Result<()> {
    each_lane(
        |ini| ini,
        |_, pooler, _| {
            let mut a = client(pooler)?;
            for _ in 0..3 {
                assert!(a.query("select 1/0").is_err());
                a.query("begin")?.ok()?;
                assert!(a.query("select nonsense").is_err());
                a.send(&Batch::new().query("select 1"))?;
                assert_eq!(a.response()?.status(), Some(b'E'));
                assert_eq!(a.query("rollback")?.ok()?.status(), Some(b'I'));
                assert_eq!(value(&mut a, "select 7")?, "7");
            }
            Ok(())
        },
    )
}

#[test]
fn copy_both_ways() -> Result<()> {
    each_lane(
        |ini| ini,
        |_, pooler, lane| {
            let mut a = client(pooler)?;
            a.query("create table t (x int)")?.ok()?;
            let rows: String = (0..20_000).map(|i| format!("{i}\n")).collect();
            for _ in 0..3 {
                a.send(&Batch::new().query("copy t from stdin"))?;
                while a.recv()?.tag != b'G' {}
                for chunk in rows.as_bytes().chunks(3000) {
                    a.send(&Batch::new().copy_data(chunk))?;
                }
                a.send(&Batch::new().copy_done())?;
                a.response()?.ok()?;
            }
            assert_eq!(
                value(&mut a, "select count(*) || ' ' || sum(x) from t")?,
                format!("60000 {}", 3 * 19_999u64 * 10_000)
            );
            let mut copied = |sql: &str| -> Result<Vec<u8>> {
                assert_eq!(value(&mut a, "select 1")?, "1");
                let out = a.query(sql)?.ok()?;
                let data = out.messages.iter().filter(|message| message.tag == b'd');
                Ok(data.flat_map(|message| message.body.iter().copied()).collect())
            };
            let all = copied("copy t to stdout")?;
            assert!(all == rows.repeat(3).as_bytes(), "lane {lane}: {} bytes", all.len());
            // Of a long one a reader that is slow may send the rest to user space.
            let before = carried(pooler, lane)?;
            for _ in 0..3 {
                let few = copied("copy (select * from t limit 1000) to stdout")?;
                assert!(rows.as_bytes().starts_with(&few) && few.ends_with(b"\n999\n"), "lane {lane}");
            }
            assert!(carried(pooler, lane)? - before > 3, "lane {lane} has carried none of the copies");
            Ok(())
        },
    )
}

#[test]
fn parameters_stay_with_their_client() -> Result<()> {
    each_lane(
        |ini| ini.set("default_pool_size", "1"),
        |_, pooler, _| {
            let (mut a, mut b) = (client(pooler)?, client(pooler)?);
            a.query("set application_name = 'first'")?.ok()?;
            a.query("set timezone = 'Asia/Tokyo'")?.ok()?;
            for _ in 0..20 {
                assert_eq!(
                    value(
                        &mut a,
                        "select current_setting('application_name') || current_setting('timezone')"
                    )?,
                    "firstAsia/Tokyo"
                );
                assert_ne!(value(&mut b, "show timezone")?, "Asia/Tokyo");
                assert_ne!(value(&mut b, "show application_name")?, "first");
            }
            Ok(())
        },
    )
}

#[test]
fn a_message_over_max_packet_size_ends_its_client() -> Result<()> {
    each_lane(
        |ini| ini.set("max_packet_size", "100000"),
        |_, pooler, lane| {
            let mut a = client(pooler)?;
            // In its lane by now, where a shorter one is carried.
            for _ in 0..3 {
                assert_eq!(value(&mut a, &format!("select length('{}')", "x".repeat(50_000)))?, "50000");
            }
            assert!(carried(pooler, lane)? > 0);
            a.send(&Batch::new().query(&format!("select '{}'", "x".repeat(200_000))))?;
            a.until_closed()?;
            assert_eq!(value(&mut client(pooler)?, "select 1")?, "1");
            Ok(())
        },
    )
}

/// With one client, `server_round_robin` shows in which backend answers.
#[test]
fn round_robin_is_kept() -> Result<()> {
    each_lane(
        |ini| ini.set("server_round_robin", "1").set("min_pool_size", "3").set("default_pool_size", "3"),
        |_, pooler, lane| {
            let mut a = client(pooler)?;
            let begun = Instant::now();
            // Until all three are there, and while user space still takes turns.
            loop {
                let seen =
                    (0..30).map(|_| value(&mut a, "select pg_backend_pid()")).collect::<Result<Vec<_>>>()?;
                let others = |window: &[String]| {
                    window[0] != window[1] && window[1] != window[2] && window[0] != window[2]
                };
                if seen.windows(3).all(others) && seen.windows(4).all(|window| window[0] == window[3]) {
                    break;
                }
                assert!(begun.elapsed() < Duration::from_secs(20), "{seen:?}");
                std::thread::sleep(Duration::from_millis(100));
            }
            let (carried, user) = (carried(pooler, lane)?, kernel(pooler, "user", "xacts")?);
            println!("lane {lane}: {carried} of {} transactions", carried + user);
            assert!(carried > user, "{carried} in the lane, {user} in user space");
            pooler.console("set server_round_robin = 0")?.ok()?;
            let first = value(&mut a, "select pg_backend_pid()")?;
            for _ in 0..10 {
                value(&mut a, "select 1")?;
            }
            let begun = Instant::now();
            while (0..5)
                .map(|_| value(&mut a, "select pg_backend_pid()"))
                .collect::<Result<Vec<_>>>()?
                .windows(2)
                .any(|w| w[0] != w[1])
            {
                assert!(begun.elapsed() < Duration::from_secs(20), "still in turn, begun at {first}");
            }
            Ok(())
        },
    )
}

fn prepare(client: &mut Client, name: &str, sql: &str) -> Result<()> {
    let replies = client.exchange(&Batch::new().parse(name, sql).describe_statement(name).sync())?;
    replies.into_iter().try_for_each(|reply| reply.ok().map(drop))
}

/// Executes a named statement; its first value, or the SQLSTATE of its error.
fn execute(client: &mut Client, name: &str, parameters: &[Option<&str>]) -> Result<String> {
    let replies = client
        .exchange(&Batch::new().bind("", name, parameters).describe_portal("").execute("", 0).sync())?;
    let reply = replies.into_iter().next_back().expect("a reply for each Sync");
    if let Some(error) = reply.messages.iter().find_map(|message| message.error()) {
        return Ok(error.sqlstate);
    }
    Ok(reply.value().unwrap_or_default().to_owned())
}

#[test]
fn named_statements_are_renamed_in_the_kernel() -> Result<()> {
    each_lane(
        |ini| ini.set("default_pool_size", "2"),
        |_, pooler, lane| {
            let (mut a, mut b, mut c) = (client(pooler)?, client(pooler)?, client(pooler)?);
            // One name with two meanings, two names with one; as drivers name them, short and long.
            let long = "stmtcache_0123456789abcdef0123456789abcdef0123456789abcdef";
            prepare(&mut a, "S_1", "select 'a' || $1::text")?;
            prepare(&mut b, "S_1", "select 'b' || $1::text")?;
            prepare(&mut c, "S_2", "select 'a' || $1::text")?;
            prepare(&mut c, long, "select 'long' || $1::text")?;
            for i in 0..300 {
                let i = i.to_string();
                assert_eq!(execute(&mut a, "S_1", &[Some(&i)])?, format!("a{i}"));
                assert_eq!(execute(&mut b, "S_1", &[Some(&i)])?, format!("b{i}"));
                assert_eq!(execute(&mut c, "S_2", &[Some(&i)])?, format!("a{i}"));
                assert_eq!(execute(&mut c, long, &[Some(&i)])?, format!("long{i}"));
            }
            let (carried, user) = (carried(pooler, lane)?, kernel(pooler, "user", "xacts")?);
            println!("lane {lane}: {carried} of {} transactions", carried + user);
            assert!(user * 100 <= carried + user, "lane {lane}: {user} of {} in user space", carried + user);
            // An error that the lane hands up calls the statement what the client does.
            let errors = kernel(pooler, "error", "xacts")?;
            let few = a.exchange(&Batch::new().bind("", "S_1", &[]).sync())?.remove(0).ok();
            let told = few.map_err(|error| error.to_string()).err().unwrap_or_default();
            let expected = "bind message supplies 0 parameters, but prepared statement \"S_1\" requires 1";
            assert!(told.contains(expected), "lane {lane}: {told}");
            assert_eq!(kernel(pooler, "error", "xacts")?, errors + 1, "lane {lane}");
            // What nobody prepared, and what looks like a server's name, is nobody's.
            for name in ["S_3", "~00", "S_1\u{1}"] {
                assert_eq!(execute(&mut a, name, &[Some("x")])?, "26000", "{name}");
            }
            // Close and prepare anew: the name has another meaning, here and nowhere else.
            a.exchange(&Batch::new().close_statement("S_1").sync())?;
            assert_eq!(execute(&mut a, "S_1", &[Some("x")])?, "26000");
            prepare(&mut a, "S_1", "select 'new' || $1::text")?;
            for _ in 0..20 {
                assert_eq!(execute(&mut a, "S_1", &[Some("x")])?, "newx");
                assert_eq!(execute(&mut b, "S_1", &[Some("x")])?, "bx");
            }
            b.query("discard all")?.ok()?;
            assert_eq!(execute(&mut b, "S_1", &[Some("x")])?, "26000");
            assert_eq!(execute(&mut c, "S_2", &[Some("x")])?, "ax");
            Ok(())
        },
    )
}

#[test]
fn many_statements_are_evicted_and_prepared_again() -> Result<()> {
    each_lane(
        |ini| ini.set("default_pool_size", "2").set("max_prepared_statements", "3"),
        |_, pooler, _| {
            let mut clients = [client(pooler)?, client(pooler)?, client(pooler)?];
            for (n, client) in clients.iter_mut().enumerate() {
                for s in 0..8 {
                    prepare(client, &format!("stmt{s}"), &format!("select '{n}-{s}-' || $1::text"))?;
                }
            }
            for i in 0..100 {
                for (n, client) in clients.iter_mut().enumerate() {
                    let s = (i * 7 + n) % 8;
                    let got = execute(client, &format!("stmt{s}"), &[Some(&i.to_string())])?;
                    assert_eq!(got, format!("{n}-{s}-{i}"));
                }
            }
            Ok(())
        },
    )
}

/// A plan whose columns changed is an error once; then the statement is prepared again.
#[test]
fn an_outdated_plan_is_replaced() -> Result<()> {
    each_lane(
        |ini| ini.set("default_pool_size", "1"),
        |_, pooler, _| {
            let mut a = client(pooler)?;
            a.query("create table t as select 1 as x")?.ok()?;
            prepare(&mut a, "all_of_t", "select * from t")?;
            for _ in 0..10 {
                assert_eq!(execute(&mut a, "all_of_t", &[])?, "1");
            }
            a.query("alter table t add column y int default 2")?.ok()?;
            let first = execute(&mut a, "all_of_t", &[])?;
            assert!(first == "0A000" || first == "1", "{first}");
            for _ in 0..10 {
                assert_eq!(execute(&mut a, "all_of_t", &[])?, "1");
            }
            Ok(())
        },
    )
}

/// Drivers describe an unnamed statement in one batch and bind it in the next, which may find another server.
#[test]
fn an_unnamed_statement_may_be_bound_in_a_later_batch() -> Result<()> {
    each_lane(
        |ini| ini,
        |_, pooler, _| {
            let (mut a, mut b) = (client(pooler)?, client(pooler)?);
            value(&mut a, "select 1")?;
            for _ in 0..5 {
                a.exchange(&Batch::new().parse("", "select 42").describe_statement("").sync())?
                    .pop()
                    .map(|r| r.ok())
                    .transpose()?;
                b.extended("select 'other'", &[])?.ok()?;
                let answer = a.exchange(&Batch::new().bind("", "", &[]).execute("", 0).sync())?.pop();
                assert_eq!(answer.map(|r| r.ok()).transpose()?.as_ref().and_then(|r| r.value()), Some("42"));
            }
            Ok(())
        },
    )
}

#[test]
fn a_client_killed_in_a_transaction_leaves_no_dirty_server() -> Result<()> {
    each_lane(
        |ini| ini.set("default_pool_size", "1"),
        |_, pooler, _| {
            value(&mut client(pooler)?, "create table t as select 1 as x")?;
            for reset in [false, true] {
                let mut a = client(pooler)?;
                value(&mut a, "select 1")?;
                a.query("begin")?.ok()?;
                a.query("update t set x = 2")?.ok()?;
                if reset {
                    a.reset()?
                } else {
                    drop(a)
                }
                let mut b = client(pooler)?;
                assert_eq!(value(&mut b, "select x from t")?, "1");
                assert_eq!(b.query("select 1")?.status(), Some(b'I'));
            }
            Ok(())
        },
    )
}

#[test]
fn a_cancel_request_hits_its_own_query() -> Result<()> {
    each_lane(
        |ini| ini,
        |_, pooler, _| {
            let (mut a, mut b) = (client(pooler)?, client(pooler)?);
            value(&mut a, "select 1")?;
            value(&mut b, "select 1")?;
            a.send(&Batch::new().query("select pg_sleep(20)"))?;
            b.send(&Batch::new().query("select pg_sleep(1.5), 'b'"))?;
            std::thread::sleep(Duration::from_millis(300));
            let begun = Instant::now();
            a.cancel()?;
            assert!(a.response()?.ok().is_err());
            assert!(begun.elapsed() < Duration::from_secs(10));
            b.response()?.ok()?;
            assert_eq!(value(&mut a, "select 5")?, "5");
            Ok(())
        },
    )
}

#[test]
fn timeouts_reach_clients_in_lanes() -> Result<()> {
    let ini = |ini: Ini| {
        ini.set("query_timeout", "1").set("idle_transaction_timeout", "1").set("client_idle_timeout", "3")
    };
    each_lane(ini, |_, pooler, _| {
        expect_timeout(pooler, 1, "select pg_sleep(30)", "query")?;
        expect_timeout(pooler, 1, "begin", "idle transaction")?;
        expect_timeout(pooler, 1, "select 1", "idle")
    })
}

/// A client whose lane has carried it since `before` queries is ended for what it does at last; `word` is a part of what it is told.
fn expect_timeout(pooler: &Underpass, before: usize, sql: &str, word: &str) -> Result<()> {
    let mut a = client(pooler)?;
    for _ in 0..before {
        value(&mut a, "select 1")?;
    }
    let begun = Instant::now();
    a.send(&Batch::new().query(sql))?;
    let messages = a.until_closed()?;
    let error = messages.iter().filter_map(|message| message.error()).next_back().map(|error| error.message);
    assert!(error.as_ref().is_some_and(|error| error.replace('_', " ").contains(word)), "{sql}: {error:?}");
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert_eq!(value(&mut client(pooler)?, "select 3")?, "3");
    Ok(())
}

#[test]
fn a_terminated_backend_ends_its_client_only() -> Result<()> {
    each_lane(
        |ini| ini,
        |server, pooler, _| {
            let (mut a, mut b) = (client(pooler)?, client(pooler)?);
            a.query("begin")?.ok()?;
            let pid = value(&mut a, "select pg_backend_pid()")?;
            value(&mut b, "select 1")?;
            server.sql(&format!("select pg_terminate_backend({pid})"))?;
            let told = a.until_closed()?;
            assert!(told.iter().filter_map(|message| message.error()).next_back().is_some());
            for i in 0..20 {
                assert_eq!(value(&mut b, &format!("select {i}"))?, i.to_string());
            }
            Ok(())
        },
    )
}

#[test]
fn a_reader_that_stops_costs_bounded_memory_and_loses_nothing() -> Result<()> {
    each_lane(
        |ini| ini,
        |_, pooler, _| {
            let mut a = client(pooler)?;
            value(&mut a, "select 1")?;
            let before = pooler.resident_kib()?;
            a.send(&Batch::new().query("select repeat('x', 1000) from generate_series(1, 100000)"))?;
            std::thread::sleep(Duration::from_secs(2));
            let grown = pooler.resident_kib()?.saturating_sub(before);
            assert!(grown < 4096, "{grown} KiB");
            assert!(kernel(pooler, "responses", "queued")? < 2 << 20);
            let answer = a.response()?.ok()?;
            let rows = answer.rows();
            assert_eq!(rows.len(), 100_000);
            assert!(rows.iter().all(|row| row[0].as_deref().is_some_and(|text| text.len() == 1000)));
            assert_eq!(value(&mut a, "select 1")?, "1");
            Ok(())
        },
    )
}

#[test]
fn a_killed_pooler_starts_again() -> Result<()> {
    each_lane(
        |ini| ini,
        |_, pooler, lane| {
            let mut a = client(pooler)?;
            a.query("begin")?.ok()?;
            pooler.kill()?;
            assert!(a.query("select 1").is_err());
            pooler.start_again()?;
            let mut b = client(pooler)?;
            let begun = Instant::now();
            while carried(pooler, lane)? == 0 {
                assert!(begun.elapsed() < Duration::from_secs(10), "the lane carries nothing");
                value(&mut b, "select 1")?;
            }
            Ok(())
        },
    )
}

#[test]
fn a_pooler_stopped_and_killed_under_load_tells_nobody_anything_wrong() -> Result<()> {
    each_lane(
        |ini| ini,
        |server, pooler, lane| {
            let rounds: Arc<Vec<AtomicU64>> = Arc::new((0..4).map(|_| AtomicU64::new(0)).collect());
            let threads: Vec<_> = (0..4)
                .map(|owner: usize| {
                    let (options, rounds) = (pooler.options("postgres", "postgres"), Arc::clone(&rounds));
                    std::thread::spawn(move || -> Result<()> {
                        let mut client = Client::connect(&options)?;
                        loop {
                            let round = rounds[owner].fetch_add(1, Ordering::Relaxed) + 1;
                            let wanted = format!("{owner} {round}");
                            // Until the connection ends: what comes is ours, whole and in order.
                            let begun = client.query("begin")?;
                            assert_eq!(begun.status(), Some(b'T'));
                            assert_eq!(client.query(&format!("select '{wanted}'"))?.value(), Some(&*wanted));
                            assert_eq!(client.query("commit")?.status(), Some(b'I'));
                        }
                    })
                })
                .collect();
            let all_beyond = |least: &[u64]| {
                let start = Instant::now();
                while rounds.iter().zip(least).any(|(now, least)| now.load(Ordering::Relaxed) < *least) {
                    assert!(start.elapsed() < Duration::from_secs(20), "clients stand still: {rounds:?}");
                    std::thread::sleep(Duration::from_millis(5));
                }
            };
            all_beyond(&[50; 4]);
            for _ in 0..5 {
                pooler.signal(Signal::SIGSTOP)?;
                std::thread::sleep(Duration::from_millis(100));
                pooler.signal(Signal::SIGCONT)?;
                let now: Vec<u64> = rounds.iter().map(|r| r.load(Ordering::Relaxed) + 20).collect();
                all_beyond(&now);
            }
            println!("lane {lane}: {} transactions in it", carried(pooler, lane)?);
            pooler.kill()?;
            for thread in threads {
                assert!(
                    thread.join().expect("no client hears anything wrong").is_err(),
                    "its pooler is gone"
                );
            }
            // The servers' transactions are over, too: nothing stays behind the dead pooler.
            let start = Instant::now();
            let mut direct = Client::connect(&server.options("postgres", "postgres"))?;
            let others = "select count(*) from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()";
            while value(&mut direct, others)? != "0" {
                assert!(start.elapsed() < Duration::from_secs(20), "backends of the dead pooler live on");
                std::thread::sleep(Duration::from_millis(20));
            }
            pooler.start_again()?;
            assert_eq!(value(&mut client(pooler)?, "select 1")?, "1");
            Ok(())
        },
    )
}

#[test]
fn pause_and_reconnect() -> Result<()> {
    each_lane(
        |ini| ini,
        |_, pooler, _| {
            let mut a = client(pooler)?;
            let first = value(&mut a, "select pg_backend_pid()")?;
            value(&mut a, "select 1")?;
            pooler.console("pause")?.ok()?;
            a.send(&Batch::new().query("select 8"))?;
            std::thread::sleep(Duration::from_millis(300));
            pooler.console("resume")?.ok()?;
            assert_eq!(a.response()?.ok()?.value(), Some("8"));
            pooler.console("reconnect")?.ok()?;
            assert_ne!(value(&mut a, "select pg_backend_pid()")?, first);
            Ok(())
        },
    )
}

/// A head of five bytes in two segments: half of it must neither be lost nor keep the pooler busy.
#[test]
fn requests_come_in_pieces() -> Result<()> {
    each_lane(
        |ini| ini,
        |_, pooler, _| {
            let mut a = client(pooler)?;
            let batch = Batch::new().query("select 6");
            for cut in 1..batch.as_bytes().len() {
                a.send_bytes(&batch.as_bytes()[..cut])?;
                std::thread::sleep(Duration::from_millis(5));
                a.send_bytes(&batch.as_bytes()[cut..])?;
                assert_eq!(a.response()?.ok()?.value(), Some("6"), "cut at {cut}");
            }
            Ok(())
        },
    )
}

/// Many clients on few servers: who waits is granted a server whose answers the kernel forwards, in simple and extended protocol and
/// with prepared statements of one name and two meanings.
#[test]
fn a_queue_is_fed() -> Result<()> {
    each_lane(
        |ini| ini.set("default_pool_size", "2"),
        |_, pooler, lane| {
            let stop = Arc::new(AtomicU64::new(0));
            let options = pooler.options("postgres", "postgres");
            client(pooler)?.query("create table fed (x int)")?.ok()?;
            let threads: Vec<_> = (0..24)
                .map(|number| {
                    let (stop, options) = (stop.clone(), options.clone());
                    std::thread::spawn(move || -> Result<u64> {
                        let mut client = Client::connect(&options)?;
                        prepare(&mut client, "S_1", &format!("select 'p{}' || $1::text", number % 2))?;
                        let mut turns = 0;
                        while stop.load(Ordering::Relaxed) == 0 {
                            let want = format!("{number}.{turns}");
                            assert_eq!(value(&mut client, &format!("select '{want}'"))?, want);
                            assert_eq!(
                                client.extended("select $1::text", &[Some(&want)])?.ok()?.value(),
                                Some(&*want)
                            );
                            let prepared = execute(&mut client, "S_1", &[Some(&want)])?;
                            assert_eq!(prepared, format!("p{}{want}", number % 2));
                            if turns % 16 == 0 {
                                let block = Batch::new().query("begin").query("select 7").query("commit");
                                assert_eq!(client.exchange(&block)?.len(), 3);
                                assert_eq!(value(&mut client, "begin")?, "");
                                assert_eq!(value(&mut client, &format!("select '{want}'"))?, want);
                                assert_eq!(value(&mut client, "rollback")?, "");
                                assert!(client.query("select 1/0").and_then(|reply| reply.ok()).is_err());
                                // As drivers with autocommit off do.
                                client.extended("begin", &[])?.ok()?;
                                client.send(&Batch::new().query("copy fed from stdin"))?;
                                while client.recv()?.tag != b'G' {}
                                client.send(&Batch::new().copy_data(b"1\n").copy_done())?;
                                client.response()?.ok()?;
                                assert_eq!(value(&mut client, "rollback")?, "");
                            }
                            turns += 1;
                        }
                        Ok(turns)
                    })
                })
                .collect();
            let in_lane = || carried(pooler, lane);
            let in_user = || kernel(pooler, "user", "xacts");
            // The queue must have been seen before clients are fed.
            let deadline = Instant::now() + Duration::from_secs(60);
            while in_lane()? < 2_000 && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(50));
            }
            let (lane_before, user_before) = (in_lane()?, in_user()?);
            while in_lane()? < lane_before + 10_000 && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(50));
            }
            let (carried, user) = (in_lane()? - lane_before, in_user()? - user_before);
            stop.store(1, Ordering::Relaxed);
            for thread in threads {
                assert!(thread.join().expect("no client panicked")? > 0);
            }
            println!("lane {lane}: {carried} of {} transactions", carried + user);
            assert!(carried >= 10_000 && carried * 100 >= (carried + user) * 95, "{lane}: {carried}, {user}");
            // No turn of a client's has a transaction more than it was given a server.
            let of = |column| statistics::total(pooler, "stats_totals", column);
            let begun = Instant::now();
            let is_off = || -> Result<bool> { Ok(of("xact_count")? != of("server_assignment_count")?) };
            while is_off()? {
                let counts = (of("xact_count")?, of("server_assignment_count")?);
                assert!(begun.elapsed() < Duration::from_secs(10), "lane {lane}: {counts:?}");
                std::thread::sleep(Duration::from_millis(50));
            }
            Ok(())
        },
    )
}

/// Servers that go from client to client in the kernel come up when there are too many of them.
#[test]
fn a_pool_is_made_smaller_under_load() -> Result<()> {
    each_lane(
        |ini| ini,
        |server, pooler, lane| {
            let stop = Arc::new(AtomicU64::new(0));
            let transactions = Arc::new(AtomicU64::new(0));
            let options = pooler.options("postgres", "postgres");
            let threads: Vec<_> = (0..12)
                .map(|_| {
                    let (stop, transactions) = (stop.clone(), transactions.clone());
                    let options = options.clone();
                    std::thread::spawn(move || -> Result<()> {
                        let mut client = Client::connect(&options)?;
                        while stop.load(Ordering::Relaxed) == 0 {
                            assert_eq!(value(&mut client, "select 5")?, "5");
                            transactions.fetch_add(1, Ordering::Relaxed);
                        }
                        Ok(())
                    })
                })
                .collect();
            let until = |size: &str| -> Result<()> {
                let begun = Instant::now();
                let open = "select count(*) from pg_stat_activity where client_port >= 0";
                while server.sql_value(open)? != size {
                    assert!(begun.elapsed() < Duration::from_secs(60), "lane {lane}: never {size} servers");
                    std::thread::sleep(Duration::from_millis(50));
                }
                Ok(())
            };
            until("4")?;
            pooler.console("set default_pool_size = 2")?.ok()?;
            until("2")?;
            pooler.console("set default_pool_size = 3")?.ok()?;
            until("3")?;
            // What the lanes carry is looked at when the pooler ends: the changes are not to be most of it.
            let (begun, before) = (Instant::now(), transactions.load(Ordering::Relaxed));
            while transactions.load(Ordering::Relaxed) - before < 5000
                && begun.elapsed() < Duration::from_secs(60)
            {
                std::thread::sleep(Duration::from_millis(10));
            }
            stop.store(1, Ordering::Relaxed);
            threads.into_iter().try_for_each(|thread| thread.join().expect("no client panicked"))
        },
    )
}

/// A notification that comes while user space gives a server back: the server is listened to, then given back all the same.
#[test]
fn a_server_that_speaks_while_it_is_given_back_is_not_lost() -> Result<()> {
    each_lane(
        |ini| ini,
        |server, pooler, lane| {
            let mut a = client(pooler)?;
            // One after the other, so that all four exist and listen.
            let mut all = (0..4).map(|_| client(pooler)).collect::<Result<Vec<_>>>()?;
            all.iter_mut().try_for_each(|c| c.query("begin; listen news").map(drop))?;
            all.iter_mut().try_for_each(|c| c.query("commit").map(drop))?;
            let stop = Arc::new(AtomicU64::new(0));
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let (stop, options) = (stop.clone(), server.options("postgres", "postgres"));
                    std::thread::spawn(move || -> Result<()> {
                        let mut b = Client::connect(&options)?;
                        while stop.load(Ordering::Relaxed) == 0 {
                            b.query("notify news")?.ok()?;
                        }
                        Ok(())
                    })
                })
                .collect();
            // A Parse of a named statement is user space's.
            for i in 0..1500 {
                prepare(&mut a, &format!("s{i}"), "select 1")?;
            }
            stop.store(1, Ordering::Relaxed);
            for thread in threads {
                thread.join().expect("no panic")?;
            }
            for c in &mut all {
                c.set_read_timeout(Duration::from_secs(10))?;
                let begun = c.query("begin");
                assert!(begun.is_ok(), "lane {lane}: a server is lost: {begun:?}");
            }
            Ok(())
        },
    )
}
