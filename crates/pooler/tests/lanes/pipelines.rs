// SPDX-License-Identifier: Apache-2.0
//! What PostgreSQL discards of a pipeline, and what comes behind a COPY that it has not answered yet.

use super::*;

/// The SQLSTATE of a reply's error, or its value.
fn outcome(reply: underpass_testkit::Response) -> String {
    let error = reply.messages.iter().find_map(|message| message.error());
    error.map_or_else(|| reply.value().unwrap_or_default().to_owned(), |error| error.sqlstate)
}

/// Behind an error PostgreSQL discards a Parse, and its unnamed statement stays what another client left.
#[test]
fn a_parse_that_is_discarded_lends_nobody_the_statement_of_another() -> Result<()> {
    each_lane(
        |ini| ini.set("default_pool_size", "1"),
        |_, pooler, lane| {
            let (mut a, mut b) = (client(pooler)?, client(pooler)?);
            prepare(&mut a, "S_1", "select pg_sleep(0.2)")?;
            let slow = Batch::new().bind("", "S_1", &[]).execute("", 0).sync();
            let failing = Batch::new().execute("nowhere", 0).parse("", "select 'a'").bind("", "", &[]);
            let failing = failing.execute("", 0).sync();
            let again = Batch::new().bind("", "", &[]).execute("", 0).sync();
            for is_apart in [false, false, true, true] {
                // Both in their lanes, and the last statement is that of b.
                for _ in 0..3 {
                    execute(&mut a, "S_1", &[])?;
                    assert_eq!(b.extended("select 'b'", &[])?.ok()?.value(), Some("b"));
                }
                a.send_bytes(&[slow.as_bytes(), failing.as_bytes()].concat())?;
                if is_apart {
                    std::thread::sleep(Duration::from_millis(50));
                }
                a.send(&again)?;
                let replies = (0..3).map(|_| a.response()).collect::<Result<Vec<_>>>()?;
                let told: Vec<_> = replies.into_iter().map(outcome).collect();
                assert_eq!(told, ["", "34000", "26000"], "lane {lane}, apart: {is_apart}");
                // In one segment.
                b.extended("select 'b'", &[])?.ok()?;
                a.send_bytes(&[failing.as_bytes(), again.as_bytes()].concat())?;
                let replies = (0..2).map(|_| a.response()).collect::<Result<Vec<_>>>()?;
                let told: Vec<_> = replies.into_iter().map(outcome).collect();
                assert_eq!(told, ["34000", "26000"], "lane {lane}");
            }
            Ok(())
        },
    )
}

/// It also discards a Query, for which no ReadyForQuery comes then.
#[test]
fn a_query_that_is_discarded_keeps_no_server() -> Result<()> {
    each_lane(
        |ini| ini.set("default_pool_size", "1"),
        |_, pooler, lane| {
            let (mut a, mut b) = (client(pooler)?, client(pooler)?);
            for _ in 0..3 {
                value(&mut a, "select 1")?;
                value(&mut b, "select 1")?;
            }
            let failing = Batch::new().parse("", "select 1/0").bind("", "", &[]).execute("", 0);
            a.send(&failing.query("select 2").sync())?;
            assert_eq!(outcome(a.response()?), "22012");
            b.set_read_timeout(Duration::from_secs(10))?;
            let answer = value(&mut b, "select 1");
            assert!(answer.as_ref().is_ok_and(|one| one == "1"), "lane {lane}: {answer:?}");
            assert_eq!(value(&mut a, "select 3")?, "3");
            Ok(())
        },
    )
}

/// A client need not wait for the answer to its CopyDone.
#[test]
fn requests_may_follow_a_copy_at_once() -> Result<()> {
    for mode in ["transaction", "session"] {
        each_lane(
            |ini| ini.set("pool_mode", mode),
            |_, pooler, lane| {
                let mut a = client(pooler)?;
                a.query(
                    "create table slow (x int); \
                     create function nap() returns trigger language plpgsql as \
                     'begin perform pg_sleep(0.2); return null; end'; \
                     create trigger nap after insert on slow execute function nap()",
                )?
                .ok()?;
                for round in 0..3 {
                    value(&mut a, "select 1")?;
                    a.send(&Batch::new().query("copy slow from stdin"))?;
                    while a.recv()?.tag != b'G' {}
                    a.send(&Batch::new().copy_data(b"1\n").copy_done())?;
                    std::thread::sleep(Duration::from_millis(20));
                    let next = Batch::new().parse("", "select 2").bind("", "", &[]).execute("", 0).sync();
                    a.send(&next)?;
                    let place = format!("lane {lane}, {mode}, {round}");
                    let copied = a.response().and_then(|reply| reply.ok());
                    assert!(copied.is_ok(), "{place}: {copied:?}");
                    let next = a.response().and_then(|reply| reply.ok());
                    assert!(next.as_ref().is_ok_and(|reply| reply.value() == Some("2")), "{place}: {next:?}");
                }
                Ok(())
            },
        )?;
    }
    Ok(())
}

/// User space writes the requests of a fed link. What the server's socket does not take at once comes behind it, and nothing before.
#[test]
fn what_a_server_does_not_take_of_a_fed_pipeline_is_not_lost() -> Result<()> {
    const REQUESTS: usize = 60;
    let server = Postgres::start()?;
    let base = || Ini::for_server(&server).set("pool_mode", "transaction").set("default_pool_size", "1");
    for (lane, same_host) in LANES {
        let Some(ini) = base().lanes(same_host, 1) else { return Ok(()) };
        let pooler = &Underpass::start(&ini.tail("lane_kept_bytes = 0"))?;

        let stop = Arc::new(AtomicU64::new(0));
        let threads: Vec<_> = (0..24)
            .map(|_| {
                let (stop, options) = (stop.clone(), pooler.options("postgres", "postgres"));
                std::thread::spawn(move || -> Result<()> {
                    let mut client = Client::connect(&options.read_timeout(Duration::from_secs(30)))?;
                    while stop.load(Ordering::Relaxed) == 0 {
                        assert_eq!(value(&mut client, "select 4")?, "4");
                    }
                    Ok(())
                })
            })
            .collect();
        let mut a = client(pooler)?;
        let begun = Instant::now();
        let fed = || kernel(pooler, "all", "fed");
        let before = fed()?;
        while fed()? - before < 1000 {
            value(&mut a, "select 1")?;
            assert!(begun.elapsed() < Duration::from_secs(30), "lane {lane}: nobody is fed");
        }
        // The others wait from here on: the server is in this transaction.
        a.query("begin")?.ok()?;
        a.send(&Batch::new().query("select pg_sleep(1)"))?;
        let long = "z".repeat(40_000);
        for n in 0..REQUESTS {
            // One at a time, as whole requests are fed.
            std::thread::sleep(Duration::from_millis(4));
            a.send(&Batch::new().query(&format!("select length('{long}') + {n}")))?;
        }
        a.response()?.ok()?;
        for n in 0..REQUESTS {
            let answer = a.response()?.ok()?;
            assert_eq!(answer.value(), Some(&*(40_000 + n).to_string()), "lane {lane}");
        }
        assert_eq!(a.query("commit")?.status(), Some(b'I'), "lane {lane}");
        stop.store(1, Ordering::Relaxed);
        threads.into_iter().try_for_each(|thread| thread.join().expect("no client panicked"))?;
    }
    Ok(())
}
