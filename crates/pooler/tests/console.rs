// SPDX-License-Identifier: Apache-2.0
//! The console and the control plane against a real PostgreSQL, while clients work: what may not fail does not fail.
//!
//! `cargo build -p underpass` first: these tests start the binary.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use underpass_console::Show;
use underpass_testkit::{
    Batch, Client, Ini, MockServer, Options, Pooler, Port, Postgres, Response, Signal, Step, Underpass,
};

const LIMIT: Duration = Duration::from_secs(20);
/// Transactions until a disturbance no longer shows in the share that kernel lanes carried: each takes every client out of its lane.
const STEADY: u64 = 1000;

fn transaction_pool(server: &Postgres) -> Ini {
    Ini::for_server(server).set("pool_mode", "transaction").set("default_pool_size", "3")
}

/// The message of the first error in a response.
fn error(response: &Response) -> Option<String> {
    response.clone().ok().err().map(|error| error.to_string())
}

fn admin(pooler: &Underpass) -> Client {
    let options = pooler.options("pooler_admin", "pgbouncer").password("pooler_admin_password");
    Client::connect(&options).unwrap()
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < LIMIT, "{what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// A sample of the metrics.
fn metric(port: u16, sample: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    let value = page.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    value.unwrap_or_default().to_owned()
}

/// Clients that insert a row in each transaction until they are stopped or sent away.
struct Load {
    stop: Arc<AtomicBool>,
    committed: Arc<AtomicU64>,
    threads: Vec<JoinHandle<Option<String>>>,
}

impl Load {
    fn start(options: &Options, clients: usize) -> Self {
        let (stop, committed) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let threads = (0..clients)
            .map(|_| {
                let mut client = Client::connect(options).unwrap();
                let (stop, committed) = (stop.clone(), committed.clone());
                thread::spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        for (sql, ends) in
                            [("BEGIN", false), ("INSERT INTO t VALUES (1)", false), ("COMMIT", true)]
                        {
                            match client.query(sql) {
                                Ok(response) => match error(&response) {
                                    None => {
                                        committed.fetch_add(u64::from(ends), Ordering::Relaxed);
                                    }
                                    failed => return failed,
                                },
                                Err(error) => return Some(format!("{sql}: {error}")),
                            }
                        }
                    }
                    None
                })
            })
            .collect();
        Self { stop, committed, threads }
    }

    fn committed(&self) -> u64 {
        self.committed.load(Ordering::Relaxed)
    }

    fn progresses(&self) {
        self.commits(20);
    }

    /// Waits for so many transactions.
    fn commits(&self, count: u64) {
        let before = self.committed();
        wait_until("transactions go on", || self.committed() >= before + count);
    }

    /// What each client ended with; `None` where nothing failed.
    fn join(self) -> Vec<Option<String>> {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    }
}

fn server_with_table() -> Postgres {
    let server = Postgres::start().unwrap();
    server.sql("CREATE TABLE t (n int)").unwrap();
    server
}

/// Rows of the table, each of one committed transaction.
fn rows(server: &Postgres) -> u64 {
    server.sql_value("SELECT count(*) FROM t").unwrap().parse().unwrap()
}

#[test]
fn every_show_has_its_columns() {
    let server = Postgres::start().unwrap();
    let pooler = Underpass::start(&transaction_pool(&server)).unwrap();
    let mut client = Client::connect(&pooler.options("postgres", "postgres")).unwrap();
    client.query("SELECT 1").unwrap().ok().unwrap();
    let mut admin = admin(&pooler);
    for show in Show::ALL {
        let response = admin.query(&format!("SHOW {}", show.name())).unwrap().ok().unwrap();
        let columns: Vec<_> = show.columns().iter().map(|column| column.name).collect();
        assert_eq!(response.column_names(), columns, "{}", show.name());
        assert_eq!(response.commands(), ["SHOW"]);
        assert_eq!(response.status(), Some(b'I'));
    }
}

#[test]
fn control_commands_lose_no_transaction() {
    let server = server_with_table();
    let mut pooler = Underpass::start(&transaction_pool(&server)).unwrap();
    let load = Load::start(&pooler.options("postgres", "postgres"), 8);
    let mut admin = admin(&pooler);
    let mut run = |command: &str| {
        let response = admin.query(command).unwrap();
        assert_eq!(error(&response), None, "{command}");
        response.rows().len()
    };
    load.commits(STEADY);
    for _ in 0..3 {
        for (begin, end) in
            [("PAUSE", "RESUME"), ("PAUSE postgres", "RESUME postgres"), ("SUSPEND", "RESUME")]
        {
            run(begin);
            if begin != "SUSPEND" {
                assert_eq!(run("SHOW SERVERS"), 0, "{begin} closes all servers");
            }
            let before = load.committed();
            thread::sleep(Duration::from_millis(50));
            // Each client may still have to count the answer that it was given last.
            assert!(load.committed() <= before + 8, "{begin} stops the work");
            run(end);
            load.commits(STEADY);
        }
        run("RECONNECT");
        run("WAIT_CLOSE");
        load.commits(STEADY);
        run("SET default_pool_size = 2");
        load.commits(STEADY);
        pooler.rewrite(&transaction_pool(&server).set("default_pool_size", "4")).unwrap();
        run("RELOAD");
        load.commits(STEADY);
    }
    let committed = load.committed.clone();
    assert_eq!(load.join(), vec![None; 8]);
    assert_eq!(rows(&server), committed.load(Ordering::Relaxed));
}

#[test]
fn a_drain_ends_at_transaction_boundaries() {
    let server = server_with_table();
    let mut pooler = Underpass::start(&transaction_pool(&server)).unwrap();
    let load = Load::start(&pooler.options("postgres", "postgres"), 8);
    load.progresses();
    admin(&pooler).query("SHUTDOWN WAIT_FOR_SERVERS").unwrap().ok().unwrap();
    assert!(pooler.wait(LIMIT).unwrap().success());
    let committed = load.committed.clone();
    for outcome in load.join() {
        let message = outcome.expect("the pooler is gone");
        assert!(message.contains("server shutting down"), "{message}");
    }
    // Each COMMIT that was carried out was answered, and no other was.
    assert_eq!(rows(&server), committed.load(Ordering::Relaxed));
}

/// A session has its server until it ends: it may hold a temporary table, or a lock.
#[test]
fn a_drain_leaves_sessions_their_servers() {
    let server = server_with_table();
    let mut pooler = Underpass::start(&transaction_pool(&server).set("pool_mode", "session")).unwrap();
    let mut client = Client::connect(&pooler.options("postgres", "postgres")).unwrap();
    client.query("create temp table kept ()").unwrap().ok().unwrap();
    admin(&pooler).query("SHUTDOWN WAIT_FOR_SERVERS").unwrap().ok().unwrap();
    thread::sleep(Duration::from_millis(500));
    client.query("select from kept").unwrap().ok().unwrap();
    client.terminate().unwrap();
    assert!(pooler.wait(LIMIT).unwrap().success());
}

/// As PgBouncer: what was a drain waits for clients from then on.
#[test]
fn a_drain_that_is_to_wait_for_clients_drops_nobody_more() {
    let server = Postgres::start().unwrap();
    let mut pooler = Underpass::start(&transaction_pool(&server)).unwrap();
    let options = pooler.options("postgres", "postgres");
    let (mut client, mut idle) = (Client::connect(&options).unwrap(), Client::connect(&options).unwrap());
    client.query("BEGIN").unwrap().ok().unwrap();
    let mut console = admin(&pooler);
    console.query("SHUTDOWN WAIT_FOR_SERVERS").unwrap().ok().unwrap();
    idle.until_closed().unwrap();
    console.query("SHUTDOWN WAIT_FOR_CLIENTS").unwrap().ok().unwrap();
    client.query("COMMIT").unwrap().ok().unwrap();
    thread::sleep(Duration::from_millis(400));
    client.query("SELECT 1").unwrap().ok().unwrap();
    drop(client);
    assert!(pooler.wait(LIMIT).unwrap().success());
}

/// Its pause stays, as with PgBouncer.
#[test]
fn a_console_that_leaves_while_it_waits_is_gone_at_once() {
    let server = Postgres::start().unwrap();
    let pooler = Underpass::start(&transaction_pool(&server)).unwrap();
    let mut client = Client::connect(&pooler.options("postgres", "postgres")).unwrap();
    client.query("BEGIN").unwrap().ok().unwrap();
    let (mut console, mut other) = (admin(&pooler), admin(&pooler));
    let mut consoles = || {
        let rows = other.query("SHOW CLIENTS").unwrap().ok().unwrap().rows();
        rows.iter().filter(|row| row[2].as_deref() == Some("pgbouncer")).count()
    };
    assert_eq!(consoles(), 2);
    console.send(&Batch::new().query("PAUSE")).unwrap();
    let mut third = admin(&pooler);
    wait_until("paused", || state(&mut third, "paused") == "yes");
    drop(third);
    drop(console);
    wait_until("one is left", || consoles() == 1);
    assert_eq!(state(&mut other, "paused"), "yes");
    client.query("COMMIT").unwrap().ok().unwrap();
    other.query("RESUME").unwrap().ok().unwrap();
    client.query("SELECT 1").unwrap().ok().unwrap();
}

#[test]
fn a_cancelled_pause_is_no_pause() {
    let server = server_with_table();
    let pooler = Underpass::start(&transaction_pool(&server)).unwrap();
    let mut client = Client::connect(&pooler.options("postgres", "postgres")).unwrap();
    client.query("BEGIN").unwrap().ok().unwrap();
    let mut console = admin(&pooler);
    console.send(&Batch::new().query("PAUSE")).unwrap();
    let mut other = admin(&pooler);
    let is_paused = |console: &mut Client| {
        let rows = console.query("SHOW STATE").unwrap().rows();
        rows.iter().any(|row| row[0].as_deref() == Some("paused") && row[1].as_deref() == Some("yes"))
    };
    wait_until("paused", || is_paused(&mut other));
    console.cancel().unwrap();
    let answer = console.response().unwrap();
    assert!(error(&answer).is_some_and(|message| message.contains("canceling statement")));
    assert!(!is_paused(&mut other));
    client.query("COMMIT").unwrap().ok().unwrap();
    client.query("SELECT 1").unwrap().ok().unwrap();
}

#[test]
fn what_nobody_uses_is_forgotten_and_comes_back() {
    let server = Postgres::start().unwrap();
    let ini = transaction_pool(&server).set("autodb_idle_timeout", "0.5").set("pool_idle_timeout", "0.3");
    let pooler = Underpass::start(&ini).unwrap();
    let mut admin = admin(&pooler);
    let mut names = |show: &str| -> Vec<String> {
        admin.query(show).unwrap().rows().into_iter().filter_map(|row| row[0].clone()).collect()
    };
    for _ in 0..2 {
        let mut client = Client::connect(&pooler.options("postgres", "postgres")).unwrap();
        client.query("SELECT 1").unwrap().ok().unwrap();
        assert_eq!(names("SHOW DATABASES"), ["pgbouncer", "postgres"]);
        assert_eq!(names("SHOW POOLS"), ["pgbouncer", "postgres"]);
        client.terminate().unwrap();
        wait_until("the database is forgotten", || names("SHOW DATABASES") == ["pgbouncer"]);
        assert_eq!(names("SHOW POOLS"), ["pgbouncer"]);
        assert!(names("SHOW SERVERS").is_empty());
    }
    let log = pooler.log();
    for phrase in [
        "cleaning up idle pool for user postgres on db postgres because: pool idle timeout (age= ",
        "dropping database 'postgres' as it does not exist anymore or inactive auto-database",
    ] {
        assert_eq!(log.matches(phrase).count(), 2, "{phrase}: {log}");
    }
}

/// Who waits looks ten times a second at all pools, and at the same time new names make new ones: each side holds what the other wants next.
#[test]
fn consoles_that_wait_and_names_that_are_new_do_not_stop_one_another() {
    const DATABASES: usize = 25;
    const TOGETHER: usize = 50;
    const WHILE: Duration = Duration::from_secs(4);
    let server = Postgres::start().unwrap();
    let nowhere = Port::reserve().unwrap();
    let to = format!("host=127.0.0.1 port={} dbname=postgres user=postgres", server.port());
    let ini = (0..DATABASES)
        .fold(Ini::new(), |ini, number| ini.database(&format!("paused{number}"), &to))
        .database("closed", &to)
        .database("*", &format!("host=127.0.0.1 port={} user=postgres", nowhere.number()))
        .set("auth_type", "any")
        .set("pool_mode", "transaction")
        .set("max_client_conn", "500")
        .set("log_connections", "0")
        .set("log_disconnections", "0")
        .tail("[underpass]\nthreads = 4");
    let pooler = Underpass::start(&ini).unwrap().forgets_pools();
    let options = pooler.options("anybody", "").read_timeout(LIMIT);
    let holder = |name: &str| {
        let mut client = Client::connect(&options.clone().database(name)).unwrap();
        client.query("BEGIN").unwrap().ok().unwrap();
        client
    };
    let mut holders = vec![holder("closed")];
    holders.extend((0..DATABASES).map(|number| holder(&format!("paused{number}"))));
    pooler.console("RECONNECT closed").unwrap().ok().unwrap();
    let commands = (0..DATABASES).flat_map(|n| [format!("PAUSE paused{n}"), "WAIT_CLOSE closed".to_owned()]);
    let mut consoles: Vec<Client> = commands
        .map(|command| {
            let mut console = admin(&pooler);
            console.send(&Batch::new().query(&command)).unwrap();
            console
        })
        .collect();

    let begun = Instant::now();
    let say_names = |speaker: usize| -> usize {
        let mut said = 0;
        while begun.elapsed() < WHILE {
            let named = |number: usize| options.clone().database(&format!("name_{speaker}_{number}"));
            // Each is told after a while that nothing is there.
            let mut clients: Vec<Client> =
                (said..said + TOGETHER).map(|number| Client::open(&named(number)).unwrap()).collect();
            clients.iter_mut().try_for_each(Client::startup).unwrap();
            for client in &mut clients {
                let told =
                    client.authenticate().and_then(|()| client.finish_login()).expect_err("nothing is there");
                let told = told.to_string();
                assert!(told.contains("connect failed"), "the pooler does not answer in {LIMIT:?}: {told}");
            }
            said += TOGETHER;
        }
        said
    };
    let said: usize = thread::scope(|scope| {
        let say_names = &say_names;
        let speakers = [0, 1, 2, 3].map(|speaker| scope.spawn(move || say_names(speaker)));
        speakers.into_iter().map(|speaker| speaker.join().expect("no panic")).sum()
    });
    println!("{said} new names");
    for client in &mut holders {
        client.query("COMMIT").unwrap().ok().unwrap();
    }
    for console in &mut consoles {
        console.response().unwrap().ok().unwrap();
    }
}

/// What one word of SHOW STATE is.
fn state(console: &mut Client, word: &str) -> String {
    let rows = console.query("SHOW STATE").unwrap().ok().unwrap().rows();
    let row = rows.into_iter().find(|row| row[0].as_deref() == Some(word)).unwrap();
    row[1].clone().unwrap()
}

/// What the console says against a command.
fn refusal(console: &mut Client, command: &str) -> String {
    console.query(command).and_then(Response::ok).unwrap_err().to_string()
}

/// As PgBouncer: a shutdown that waits for clients changes nothing for them, so what is paused stays so.
#[test]
fn a_shutdown_that_waits_for_clients_does_not_end_a_pause() {
    let server = Postgres::start().unwrap();
    let mut pooler = Underpass::start(&transaction_pool(&server)).unwrap();
    let mut client = Client::connect(&pooler.options("postgres", "postgres")).unwrap();
    client.query("SELECT 1").unwrap().ok().unwrap();
    let mut console = admin(&pooler);
    console.query("PAUSE").unwrap().ok().unwrap();
    client.send(&Batch::new().query("SELECT 1")).unwrap();
    pooler.signal(Signal::SIGTERM).unwrap();
    pooler.wait_log("got SIGTERM", LIMIT).unwrap();
    client.set_read_timeout(Duration::from_secs(1)).unwrap();
    assert!(client.response().is_err(), "it is served in a pause");
    assert_eq!(state(&mut console, "paused"), "yes");
    let told = refusal(&mut console, "PAUSE");
    assert!(told.contains("already suspended/paused"), "{told}");
    let told = refusal(&mut console, "RESUME");
    assert!(told.contains("shutting down"), "{told}");
    pooler.signal(Signal::SIGTERM).unwrap();
    assert!(pooler.wait(LIMIT).unwrap().success());
}

#[test]
fn a_pause_is_answered_when_it_is_one_whatever_shuts_down() {
    let server = Postgres::start().unwrap();
    for is_shutdown_first in [false, true] {
        let mut pooler = Underpass::start(&transaction_pool(&server)).unwrap();
        let mut client = Client::connect(&pooler.options("postgres", "postgres")).unwrap();
        client.query("BEGIN").unwrap().ok().unwrap();
        let (mut console, mut other) = (admin(&pooler), admin(&pooler));
        let shut_down = |pooler: &mut Underpass| {
            pooler.signal(Signal::SIGTERM).unwrap();
            pooler.wait_log("got SIGTERM", LIMIT).unwrap();
        };
        if is_shutdown_first {
            shut_down(&mut pooler);
        }
        console.send(&Batch::new().query("PAUSE")).unwrap();
        wait_until("paused", || state(&mut other, "paused") == "yes");
        if !is_shutdown_first {
            shut_down(&mut pooler);
        }
        console.set_read_timeout(Duration::from_secs(1)).unwrap();
        assert!(console.response().is_err(), "a transaction is open");
        client.query("COMMIT").unwrap().ok().unwrap();
        console.set_read_timeout(LIMIT).unwrap();
        console.response().unwrap().ok().unwrap();
        assert!(other.query("SHOW SERVERS").unwrap().rows().is_empty());
        // Nobody is left to be paused.
        drop(client);
        assert!(pooler.wait(LIMIT).unwrap().success());
    }
}

/// Without a line in the file too, and `-v` or SET are not taken back by a RELOAD, as in PgBouncer.
#[test]
fn set_verbose_says_more_until_it_is_set_back() {
    let server = Postgres::start().unwrap();
    let pooler = Underpass::start(&transaction_pool(&server)).unwrap();
    let run = |command: &str| drop(pooler.console(command).unwrap().ok().unwrap());
    // A login is logged in more detail with each level.
    let says_more = || {
        let before = pooler.log().len();
        Client::connect(&pooler.options("postgres", "postgres"))
            .unwrap()
            .query("SELECT 1")
            .unwrap()
            .ok()
            .unwrap();
        run("RECONNECT");
        let log = pooler.log();
        log[before..].lines().any(|line| line.contains(" DEBUG ") || line.contains(" NOISE "))
    };
    assert!(!says_more());
    run("SET verbose = 2");
    assert!(says_more(), "{}", pooler.log());
    run("RELOAD");
    assert!(says_more(), "after RELOAD");
    run("SET verbose = 0");
    assert!(!says_more(), "{}", pooler.log());
}

/// As PgBouncer: databases are paused, so each can be brought back by itself. A RESUME of everything brings back the rest.
#[test]
fn a_kill_of_everything_is_resumed_by_database() {
    let server = Postgres::start().unwrap();
    let to = format!("host=127.0.0.1 port={} dbname=postgres", server.port());
    let ini = ["p0", "p1", "p2"].iter().fold(transaction_pool(&server), |ini, name| ini.database(name, &to));
    let pooler = Underpass::start(&ini).unwrap();
    let client = |name: &str| Client::connect(&pooler.options("postgres", name)).unwrap();
    let mut old = client("p0");
    old.query("SELECT 1").unwrap().ok().unwrap();
    let mut console = admin(&pooler);
    let mut run = |command: &str| console.query(command).unwrap();
    run("PAUSE p2").ok().unwrap();
    run("KILL").ok().unwrap();
    assert!(old.query("SELECT 1").and_then(Response::ok).is_err());
    let paused = |run: &mut dyn FnMut(&str) -> Response| -> Vec<String> {
        let response = run("SHOW DATABASES").ok().unwrap();
        let column = response.column_names().iter().position(|name| *name == "paused").unwrap();
        let rows = response.rows().into_iter().filter(|row| row[column].as_deref() == Some("1"));
        rows.filter_map(|row| row[0].clone())
            .filter(|name| name.starts_with('p') && name.len() == 2)
            .collect()
    };
    assert_eq!(paused(&mut run), ["p0", "p1", "p2"]);
    run("RESUME p0").ok().unwrap();
    assert_eq!(paused(&mut run), ["p1", "p2"]);
    client("p0").query("SELECT 1").unwrap().ok().unwrap();
    run("RESUME").ok().unwrap();
    assert_eq!(paused(&mut run), ["p2"], "that was paused by name");
    client("p1").query("SELECT 1").unwrap().ok().unwrap();
    // One RESUME ends whatever kept all waiting.
    let mut run = |command: &str| console.query(command).unwrap();
    run("KILL").ok().unwrap();
    run("PAUSE").ok().unwrap();
    run("RESUME").ok().unwrap();
    assert_eq!(paused(&mut run), ["p2"]);
    client("p1").query("SELECT 1").unwrap().ok().unwrap();
    assert!(refusal(&mut console, "RESUME").contains("not paused"));
}

/// PgBouncer shows them, and they are what an operator looks for when a server does not answer.
#[test]
fn show_clients_shows_who_waits_for_a_server_in_its_login() {
    let silent = MockServer::start(|_| vec![Step::Startup, Step::WaitClose]).unwrap();
    let ini = Ini::new()
        .database("db", &format!("host=127.0.0.1 port={} dbname=postgres", silent.port()))
        .userlist("joe", "")
        .set("server_tls_sslmode", "disable");
    let pooler = Underpass::start(&ini).unwrap();
    let options = pooler.options("joe", "db");
    let waiting = thread::spawn(move || Client::connect(&options).map(drop));
    let mut console = admin(&pooler);
    let column = |name: &str| Show::Clients.columns().iter().position(|column| column.name == name).unwrap();
    let mut row = Vec::new();
    wait_until("a client waits", || {
        let rows = console.query("SHOW CLIENTS").unwrap().ok().unwrap().rows();
        let found = rows.into_iter().find(|row| row[column("user")].as_deref() == Some("joe"));
        let waited = |row: &Vec<Option<String>>| row[column("wait_us")].as_deref() != Some("0");
        row = found.filter(waited).unwrap_or_default();
        !row.is_empty()
    });
    assert_eq!(row[column("state")].as_deref(), Some("waiting"));
    assert_eq!(row[column("database")].as_deref(), Some("db"));
    drop(pooler);
    assert!(waiting.join().unwrap().is_err());
}

#[test]
fn show_clients_shows_how_long_a_query_has_run() {
    let server = Postgres::start().unwrap();
    for ini in
        [Some(transaction_pool(&server)), transaction_pool(&server).lanes("off", 1)].into_iter().flatten()
    {
        let pooler = Underpass::start(&ini).unwrap();
        let mut client = Client::connect(&pooler.options("postgres", "postgres")).unwrap();
        let mut console = admin(&pooler);
        let mut waits = || {
            let answer = console.query("SHOW CLIENTS").unwrap().ok().unwrap();
            let names = answer.column_names();
            let column = |name: &str| names.iter().position(|column| column == name).unwrap();
            let is_ours = |row: &Vec<Option<String>>| row[column("database")].as_deref() == Some("postgres");
            let row = answer.rows().into_iter().find(is_ours).unwrap();
            let figure = |name: &str| row[column(name)].as_deref().unwrap().parse::<u64>().unwrap();
            figure("wait") * 1_000_000 + figure("wait_us")
        };
        client.query("select 1").unwrap().ok().unwrap();
        assert_eq!(waits(), 0);
        client.send(&Batch::new().query("select pg_sleep(600)")).unwrap();
        wait_until("the query has run a while", || waits() > 300_000);
        client.cancel().unwrap();
        assert!(client.response().unwrap().ok().is_err());
        assert_eq!(waits(), 0);
    }
}

#[test]
fn metrics_count_what_show_lists_counts() {
    let server = Postgres::start().unwrap();
    let metrics = Port::reserve().unwrap();
    let ini = transaction_pool(&server).userlist("never_seen", "secret").tail(&format!(
        "[peers]\n2 = host=127.0.0.1 port=1\n[underpass]\nmetrics_listen = 127.0.0.1:{}",
        metrics.number()
    ));
    let other = format!("host=127.0.0.1 port={} dbname=postgres", server.port());
    let mut pooler = Underpass::start(&ini.clone().database("other", &other)).unwrap();
    drop(Client::connect(&pooler.options("postgres", "postgres")).unwrap());
    drop(Client::connect(&pooler.options("postgres", "other")).unwrap());
    // One that RELOAD has removed is known for a while.
    pooler.rewrite(&ini).unwrap();
    let mut console = admin(&pooler);
    console.query("RELOAD").unwrap().ok().unwrap();
    let mut compared = Vec::new();
    for row in console.query("SHOW LISTS").unwrap().ok().unwrap().rows() {
        let (list, items) = (row[0].clone().unwrap(), row[1].clone().unwrap());
        let sample = format!("underpass_items{{list=\"{list}\"}}");
        assert_eq!(metric(metrics.number(), &sample), items, "{list}");
        compared.push((list, items));
    }
    assert!(compared.contains(&("peer_pools".to_owned(), "1".to_owned())), "{compared:?}");
    pooler.stop().unwrap();
}

#[test]
fn commands_are_logged_with_their_words() {
    let server = Postgres::start().unwrap();
    let mut pooler = Underpass::start(&transaction_pool(&server)).unwrap();
    let mut client = Client::connect(&pooler.options("postgres", "postgres")).unwrap();
    client.query("SELECT 1").unwrap().ok().unwrap();
    let mut console = admin(&pooler);
    for command in ["WAIT_CLOSE", "SHUTDOWN WAIT_FOR_CLIENTS", "SHUTDOWN WAIT_FOR_SERVERS"] {
        console.query(command).unwrap();
        pooler.wait_log(&format!("{command} command issued"), LIMIT).unwrap();
    }
}

/// As PgBouncer since 1.25: who must look, or end it, gets in by the unix socket. Nobody else does.
#[test]
fn the_console_can_be_reached_until_the_last_client_has_left() {
    let server = Postgres::start().unwrap();
    let mut pooler = Underpass::start(&transaction_pool(&server)).unwrap();
    let mut client = Client::connect(&pooler.options("postgres", "postgres")).unwrap();
    client.query("SELECT 1").unwrap().ok().unwrap();
    pooler.signal(Signal::SIGTERM).unwrap();
    let tcp = pooler.options("postgres", "postgres");
    wait_until("its port is closed", || Client::connect(&tcp).is_err_and(|error| error.sqlstate().is_none()));
    for _ in 0..3 {
        let rows = pooler.console("SHOW CLIENTS").unwrap().ok().unwrap().rows();
        assert_eq!(rows.len(), 2, "the client and the console");
        let told = Client::connect(&tcp.clone().unix(pooler.directory())).err().unwrap();
        assert_eq!(told.sqlstate(), Some("57P01"), "{told}");
    }
    client.query("SELECT 1").unwrap().ok().unwrap();
    client.terminate().unwrap();
    assert!(pooler.wait(LIMIT).unwrap().success());
    let left = std::fs::read_dir(pooler.directory()).unwrap();
    assert!(left.flatten().all(|file| !file.file_name().to_string_lossy().starts_with(".s.PGSQL")));
}
