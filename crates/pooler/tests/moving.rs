// SPDX-License-Identifier: Apache-2.0
//! Busy clients that change their worker: nobody loses anything on the way, and the console and cancel requests find everybody.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use underpass_testkit::{Authority, Batch, Client, Ini, Options, Pooler, Postgres, Result, Tls, Underpass};

const MOVED: &str = " goes from worker ";

/// A pooler of so many workers that tells who moves, in user space: clients of lanes do not.
fn workers(server: &Postgres, threads: u32) -> Ini {
    Ini::for_server(server)
        .set("pool_mode", "transaction")
        .set("verbose", "2")
        .set("max_prepared_statements", "10")
        .tail(&format!("[underpass]\nthreads = {threads}\nkernel_path = off\n"))
}

/// Clients that SHOW CLIENTS has, without those of the console.
fn clients_seen(pooler: &Underpass) -> Result<usize> {
    let rows = pooler.console("show clients")?.ok()?.rows();
    let is_other = |row: &&Vec<Option<String>>| row.iter().flatten().all(|cell| cell != "pgbouncer");
    Ok(rows.iter().filter(is_other).count())
}

/// What one client does, `rounds` times, and sees to be right.
fn work(options: &Options, number: usize, rounds: usize) -> Result<()> {
    let mut client = Client::connect(options)?;
    let name = format!("client {number}");
    client.query(&format!("set application_name = '{name}'"))?.ok()?;
    let prepare = Batch::new().parse("mine", &format!("select $1 || ' of {number}'")).sync();
    client.exchange(&prepare)?;
    let padding = "x".repeat(70_000);
    for round in 0..rounds {
        let said = format!("{number}.{round}");
        match round % 5 {
            0 => {
                let run = Batch::new().bind("", "mine", &[Some(&said)]).execute("", 0).sync();
                let answer = client.exchange(&run)?.remove(0).ok()?;
                assert_eq!(answer.value(), Some(format!("{said} of {number}").as_str()));
            }
            1 => assert_eq!(client.query("show application_name")?.ok()?.value(), Some(name.as_str())),
            2 => {
                let answer = client.query(&format!("select '{said}', length('{padding}')"))?.ok()?;
                assert_eq!(answer.rows(), [[Some(said), Some("70000".to_owned())]]);
            }
            3 => {
                client.query("begin")?.ok()?;
                assert_eq!(client.query(&format!("select '{said}'"))?.ok()?.value(), Some(said.as_str()));
                client.query("commit")?.ok()?;
            }
            _ => {
                // Three at once.
                let batch =
                    Batch::new().query("select 1").query(&format!("select '{said}'")).query("select 3");
                let values: Vec<_> =
                    client.exchange(&batch)?.iter().map(|answer| answer.value().map(str::to_owned)).collect();
                assert_eq!(values, [Some("1".to_owned()), Some(said), Some("3".to_owned())]);
            }
        }
    }
    Ok(())
}

/// Each of them after every transaction, with and without TLS, while the console asks and orders.
#[test]
fn who_moves_loses_nothing() -> Result<()> {
    let (server, authority) = (Postgres::start()?, Authority::new("test")?);
    let identity = authority.server(&["localhost", "127.0.0.1"])?;
    let directory = server.socket_dir();
    let (certificate, key) = identity.write(directory, "pooler")?;
    let ini = workers(&server, 3)
        .set("default_pool_size", "5")
        .set("client_tls_sslmode", "allow")
        .set("client_tls_cert_file", &certificate.display().to_string())
        .set("client_tls_key_file", &key.display().to_string())
        .environment("UNDERPASS_TEST_MOVE", "1");
    let pooler = Underpass::start(&ini)?;
    let plain = pooler.options("postgres", "postgres");
    let tls = plain.clone().tls(Tls::new(&authority, None)?);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| -> Result<()> {
        let clients: Vec<_> = (0..12)
            .map(|number| {
                let options = if number % 3 == 0 { &tls } else { &plain };
                scope.spawn(move || work(options, number, 150))
            })
            .collect();
        let console = scope.spawn(|| -> Result<usize> {
            let mut most = 0;
            // SUSPEND ends with the console connection.
            let commands = ["pause", "resume", "reload", "suspend", "show stats"];
            for command in commands.iter().cycle() {
                if is_over.load(Ordering::Relaxed) {
                    return Ok(most);
                }
                let begun = Instant::now();
                most = most.max(clients_seen(&pooler)?);
                pooler.console(command)?.ok()?;
                thread::sleep(Duration::from_millis(30));
                assert!(begun.elapsed() < Duration::from_secs(20), "{command}");
            }
            unreachable!("the commands come again and again");
        });
        for client in clients {
            client.join().expect("no client panics")?;
        }
        is_over.store(true, Ordering::Relaxed);
        let most = console.join().expect("the console stays")?;
        // One that was on its way would be there twice.
        assert!(most <= 12, "{most} clients");
        Ok(())
    })?;
    let moves = pooler.log().matches(MOVED).count();
    assert!(moves > 500, "only {moves} moves");
    Ok(())
}

/// Twelve that live as long as the test, and move.
#[test]
fn the_console_finds_each_client_once() -> Result<()> {
    let server = Postgres::start()?;
    let pooler = Underpass::start(&workers(&server, 2).environment("UNDERPASS_TEST_MOVE", "1"))?;
    let options = pooler.options("postgres", "postgres");
    let is_over = AtomicBool::new(false);
    let clients: Vec<_> = (0..12).map(|_| Client::connect(&options)).collect::<Result<_>>()?;
    thread::scope(|scope| -> Result<()> {
        for mut client in clients {
            let is_over = &is_over;
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    client.query("select 1").and_then(|answer| answer.ok()).expect("answered");
                }
            });
        }
        let counted = (0..200).map(|_| clients_seen(&pooler)).collect();
        is_over.store(true, Ordering::Relaxed);
        let counted: Result<Vec<usize>> = counted;
        let counted = counted?;
        assert!(counted.iter().all(|&count| count == 12), "{counted:?}");
        Ok(())
    })?;
    assert!(pooler.log().matches(MOVED).count() > 1000);
    Ok(())
}

#[test]
fn a_cancel_request_finds_a_client_that_has_moved() -> Result<()> {
    let server = Postgres::start()?;
    let pooler = Underpass::start(&workers(&server, 2).environment("UNDERPASS_TEST_MOVE", "1"))?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    for moves in 0..6 {
        client.query("select 1")?.ok()?;
        client.send(&Batch::new().query("select pg_sleep(60)"))?;
        let sleeps =
            "select count(*) from pg_stat_activity where query like 'select pg_sleep%' and state = 'active'";
        let begun = Instant::now();
        while server.sql_value(sleeps)? != "1" {
            assert!(begun.elapsed() < Duration::from_secs(15), "it sleeps");
            thread::sleep(Duration::from_millis(20));
        }
        client.cancel()?;
        let error = client.response()?.ok().expect_err("cancelled");
        assert_eq!(error.sqlstate(), Some("57014"), "after {moves} moves");
    }
    assert!(pooler.log().matches(MOVED).count() >= 6);
    Ok(())
}

/// Between the answer that ends a client's stay at one worker and its arrival at the next, a request may come already.
#[test]
fn a_cancel_request_finds_a_client_that_is_on_its_way() -> Result<()> {
    const TRIES: usize = 200;
    let server = Postgres::start()?;
    let pooler = Underpass::start(&workers(&server, 2).environment("UNDERPASS_TEST_MOVE", "1"))?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    let mut missed = 0;
    for _ in 0..TRIES {
        client.query("select 1")?.ok()?;
        client.send(&Batch::new().query("select pg_sleep(1)"))?;
        client.cancel()?;
        let cancelled = client.response()?.ok().err();
        missed += usize::from(cancelled.is_none_or(|error| error.sqlstate() != Some("57014")));
    }
    // PostgreSQL forgets a cancel request that comes before its backend has read the statement, which can happen on a busy machine.
    assert!(missed <= TRIES / 10, "{missed} of {TRIES} were not cancelled");
    assert!(pooler.log().matches(MOVED).count() >= TRIES);
    Ok(())
}

/// One that does little is gathered at the first worker, and stays there.
#[test]
fn little_work_is_gathered_and_comes_to_rest() -> Result<()> {
    let server = Postgres::start()?;
    let pooler = Underpass::start(&workers(&server, 2))?;
    let options = pooler.options("postgres", "postgres");
    let together = || -> Result<Vec<Client>> {
        thread::scope(|scope| {
            let clients: Vec<_> = (0..24).map(|_| scope.spawn(|| Client::connect(&options))).collect();
            clients.into_iter().map(|client| client.join().expect("connecting does not panic")).collect()
        })
    };
    let one_each = |clients: &mut Vec<Client>| -> Result<()> {
        for client in clients {
            client.query("select 1")?.ok()?;
        }
        thread::sleep(Duration::from_millis(50));
        Ok(())
    };
    let begun = Instant::now();
    // The worker that watches the listener longest gets a connection, or the next one if that is at work just then: who come one by one
    // may all be with the first. Of those who come together both have some, or of those after them.
    let mut clients = together()?;
    for round in 1.. {
        one_each(&mut clients)?;
        if pooler.log().contains(MOVED) {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "nobody moves");
        if round % 20 == 0 {
            clients = together()?;
        }
    }
    // All that were there have come by within a second or two; nobody goes on after that.
    let (mut moves, mut quiet) = (0, 0);
    while quiet < 20 {
        one_each(&mut clients)?;
        let now = pooler.log().matches(MOVED).count();
        quiet = if now == moves { quiet + 1 } else { 0 };
        moves = now;
        assert!(begun.elapsed() < Duration::from_secs(60), "{moves} moves and no rest");
    }
    let log = pooler.log();
    assert!(moves <= 24 && !log.contains("goes from worker 0 to"), "{moves} moves");
    Ok(())
}
