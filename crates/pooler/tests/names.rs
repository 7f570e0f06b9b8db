// SPDX-License-Identifier: Apache-2.0
//! Database names that anybody can say, thousands of them: what is kept of each.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use underpass_testkit::{Client, Ini, MockServer, Pooler, Reply, Result, Step, Underpass};

/// Until something must have come to pass that nothing hinders.
const SOON: Duration = Duration::from_secs(60);
/// Threads that say names.
const SPEAKERS: usize = 4;

fn ini(server: &MockServer) -> Ini {
    Ini::new()
        .database("*", &format!("host=127.0.0.1 port={} user=postgres", server.port()))
        .set("auth_type", "any")
        .set("pool_mode", "transaction")
        .set("max_client_conn", "500")
        .set("server_tls_sslmode", "disable")
}

/// `used` of a line of SHOW MEM.
fn used(pooler: &Underpass, of: &str) -> Result<u64> {
    let rows = pooler.console("SHOW MEM")?.ok()?.rows();
    let row = rows.iter().find(|row| row[0].as_deref() == Some(of)).expect("a line of SHOW MEM");
    Ok(row[2].as_deref().and_then(|used| used.parse().ok()).expect("a number"))
}

fn until_few_pools(pooler: &Underpass) -> Result<()> {
    let begun = Instant::now();
    loop {
        let left = used(pooler, "pool_cache")?;
        if left == 0 {
            return Ok(());
        }
        assert!(begun.elapsed() < SOON, "{left} pools after {SOON:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Says `count` names that nobody has said.
fn say_names(pooler: &Underpass, round: usize, count: usize, each: impl Fn(Result<Client>) + Sync) {
    let (options, each) = (&pooler.options("anybody", ""), &each);
    std::thread::scope(|scope| {
        for speaker in 0..SPEAKERS {
            scope.spawn(move || {
                for number in 0..count / SPEAKERS {
                    let name = format!("name_{round}_{speaker}_{number}");
                    each(Client::connect(&options.clone().database(&name)));
                }
            });
        }
    });
}

#[test]
fn names_that_come_and_go_cost_nothing_once_they_are_gone() -> Result<()> {
    let server = MockServer::serving()?;
    // In user space: what lanes carried is counted for good, and is compared with statistics that go with their pools.
    let config = ini(&server)
        .set("autodb_idle_timeout", "0.3")
        .set("server_idle_timeout", "0.2")
        .tail("[underpass]\nkernel_path = off");
    let pooler = Underpass::start(&config)?;
    let serves = |client: Result<Client>| {
        let mut client = client.unwrap();
        client.query("select 1").unwrap().ok().unwrap();
        client.terminate().unwrap();
    };
    let mut resident = Vec::new();
    for round in 0..6 {
        say_names(&pooler, round, 400, serves);
        until_few_pools(&pooler)?;
        resident.push(pooler.resident_kib()?);
    }
    println!("KiB after each round: {resident:?}");
    // Tables have grown in the first rounds, to what a busy machine has at once.
    assert!(resident[5] < resident[1] + 4096, "KiB after each round: {resident:?}");
    // Names go when there are many. No pool is shown but the console's.
    let names = used(&pooler, "db_cache")?;
    assert!(names < 1200, "{names} of 2400");
    assert_eq!(pooler.console("SHOW POOLS")?.ok()?.rows().len(), 1);
    // One comes back, with statistics of its own.
    let mut client = Client::connect(&pooler.options("anybody", "name_0_0_0"))?;
    client.query("select 1")?.ok()?;
    let stats = pooler.console("SHOW STATS")?.ok()?;
    let column = stats.column_names().iter().position(|name| name == "total_xact_count").unwrap();
    let rows = stats.rows();
    let row = rows.iter().find(|row| row[0].as_deref() == Some("name_0_0_0")).expect("its line");
    assert_eq!(row[column].as_deref(), Some("1"));
    Ok(())
}

/// A database that nobody uses is forgotten at any moment, also when somebody is about to use it.
#[test]
fn a_name_that_is_said_again_while_it_is_forgotten_is_served() -> Result<()> {
    const NAMES: usize = 10;
    const WHILE: Duration = Duration::from_secs(3);
    // Whoever waits for a server can be met waiting.
    let server =
        MockServer::start(|_| vec![Step::Delay(Duration::from_millis(20)), Step::Login, Step::Serve])?;
    let config = ini(&server)
        .set("autodb_idle_timeout", "0.05")
        .set("server_idle_timeout", "0.05")
        .set("log_connections", "0")
        .set("log_disconnections", "0")
        .tail("[underpass]\nkernel_path = off\nthreads = 4");
    let pooler = Underpass::start(&config)?;
    let (options, begun) = (&pooler.options("anybody", ""), Instant::now());
    std::thread::scope(|scope| {
        for speaker in 0..2 * SPEAKERS {
            scope.spawn(move || {
                for number in (0..NAMES).cycle().take_while(|_| begun.elapsed() < WHILE) {
                    let options = options.clone().database(&format!("name_{speaker}_{number}"));
                    let mut client = Client::connect(&options).expect("a login");
                    client.query("select 1").and_then(|answer| answer.ok()).expect("an answer");
                    client.terminate().expect("an end");
                }
            });
        }
    });
    Ok(())
}

#[test]
fn names_that_no_server_knows_are_not_kept_for_an_hour() -> Result<()> {
    let is_there = Arc::new(AtomicBool::new(false));
    let server = MockServer::start({
        let is_there = is_there.clone();
        move |_| match is_there.load(Ordering::SeqCst) {
            true => vec![Step::Login, Step::Serve],
            false => {
                let refusal = Reply::new().error("FATAL", "3D000", "database does not exist");
                vec![Step::Startup, Step::Send(refusal), Step::Close]
            }
        }
    })?;
    // With the default of `autodb_idle_timeout`, an hour.
    let pooler = Underpass::start(&ini(&server).set("server_login_retry", "0.5"))?;
    say_names(&pooler, 0, 1000, |client| {
        let error = client.expect_err("a refusal").to_string();
        assert!(error.contains("database does not exist"), "{error}");
    });
    until_few_pools(&pooler)?;
    // The database is made: its name works, and stays.
    is_there.store(true, Ordering::SeqCst);
    let mut client = Client::connect(&pooler.options("anybody", "name_0_1_2"))?;
    client.query("select 1")?.ok()?;
    client.terminate()?;
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(used(&pooler, "pool_cache")?, 1);
    Ok(())
}
