// SPDX-License-Identifier: Apache-2.0
//! What a change leaves behind, with a real PostgreSQL: databases that RELOAD removes, changes and brings back, minimum sizes, clients that stop in
//! the middle, names that nobody has.

use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use underpass_testkit::{Batch, Client, Ini, Pooler, Postgres, Result, Underpass};

/// Until something must have come to pass that nothing hinders.
const SOON: Duration = Duration::from_secs(60);
/// For which something that must not happen is waited for: several rounds of the pooler's upkeep.
const A_WHILE: Duration = Duration::from_millis(700);

fn until(what: &str, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while !is_so()? {
        assert!(begun.elapsed() < SOON, "not within {SOON:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Connections to `database` as `user`.
fn connections(server: &Postgres, database: &str, user: &str) -> Result<usize> {
    let sql = format!(
        "select count(*) from pg_stat_activity where datname = '{database}' and usename = '{user}' and pid <> pg_backend_pid()"
    );
    Ok(server.sql_value(&sql)?.parse().expect("a number"))
}

fn server_with_databases() -> Result<Postgres> {
    let server = Postgres::start()?;
    for sql in ["create role app login", "create role other login", "create database a", "create database b"]
    {
        server.sql(sql)?;
    }
    Ok(server)
}

fn ini(server: &Postgres, databases: &[(&str, &str)]) -> Ini {
    let to = format!("host=127.0.0.1 port={}", server.port());
    let ini = Ini::new().userlist("app", "").userlist("other", "").set("pool_mode", "transaction");
    databases.iter().fold(ini, |ini, (name, more)| ini.database(name, &format!("{to} {more}")))
}

fn ask(client: &mut Client, sql: &str) -> Result<String> {
    Ok(client.query(sql)?.ok()?.value().unwrap_or_default().to_owned())
}

#[test]
fn a_database_that_is_removed_gets_no_connection_and_comes_back_as_another() -> Result<()> {
    let server = server_with_databases()?;
    let before = ini(&server, &[("x", "dbname=a"), ("y", "dbname=b")]).set("min_pool_size", "2");
    let mut pooler = Underpass::start(&before)?.forgets_pools();
    let mut client = Client::connect(&pooler.options("app", "x"))?;
    assert_eq!(ask(&mut client, "select current_database()")?, "a");
    until("the minimum is open", || Ok(connections(&server, "a", "app")? == 2))?;

    pooler.rewrite(&ini(&server, &[("y", "dbname=b")]).set("min_pool_size", "2"))?;
    pooler.console("RELOAD")?.ok()?;
    until("its connections are closed", || Ok(connections(&server, "a", "app")? == 0))?;
    std::thread::sleep(A_WHILE);
    assert_eq!(connections(&server, "a", "app")?, 0, "nor opened again");
    pooler.console("SET query_wait_notify = 4")?.ok()?;
    std::thread::sleep(A_WHILE);
    assert_eq!(connections(&server, "a", "app")?, 0, "whatever else changes");

    pooler.rewrite(&ini(&server, &[("x", "dbname=b")]))?;
    pooler.console("RELOAD")?.ok()?;
    let mut client = Client::connect(&pooler.options("app", "x"))?;
    assert_eq!(ask(&mut client, "select current_database()")?, "b");
    Ok(())
}

/// Each worker sends its own clients away, and while it does so those of the others still wait.
#[test]
fn whoever_waits_for_a_removed_database_leaves_no_connection_behind() -> Result<()> {
    const WAITERS: usize = 20;
    let server = server_with_databases()?;
    let threads = "[underpass]\nthreads = 4\n";
    let both = ini(&server, &[("x", "dbname=a pool_size=1"), ("y", "dbname=b")]).tail(threads);
    let without = ini(&server, &[("y", "dbname=b")]).tail(threads);
    let mut pooler = Underpass::start(&both)?.forgets_pools();
    let options = pooler.options("app", "x");
    for round in 0..10 {
        let mut holder = Client::connect(&options)?;
        assert_eq!(ask(&mut holder, "select current_database()")?, "a", "round {round}: it is back");
        let mut waiters = (0..WAITERS).map(|_| Client::connect(&options)).collect::<Result<Vec<_>>>()?;
        holder.query("begin")?.ok()?;
        waiters.iter_mut().try_for_each(|client| client.send(&Batch::new().query("select 1")))?;
        until("they wait", || {
            let pools = pooler.console("SHOW POOLS")?.ok()?;
            let waiting =
                pools.column_names().iter().position(|name| name == "cl_waiting").expect("a column");
            let row = pools.rows().into_iter().find(|row| row[0].as_deref() == Some("x"));
            Ok(row.and_then(|row| row[waiting].clone()) == Some(WAITERS.to_string()))
        })?;
        pooler.rewrite(&without)?;
        pooler.console("RELOAD")?.ok()?;
        for client in waiters.iter_mut().chain([&mut holder]) {
            let told = client.until_closed()?;
            let error =
                told.iter().filter_map(|message| message.error()).next_back().expect("it is told why");
            assert_eq!(error.message, "database removed");
        }
        until("no connection is left", || Ok(connections(&server, "a", "app")? == 0))?;
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(connections(&server, "a", "app")?, 0, "round {round}: one was opened since");
        pooler.rewrite(&both)?;
        pooler.console("RELOAD")?.ok()?;
    }
    Ok(())
}

/// Their own database stays; it is the one that would have been asked about them that goes.
#[test]
fn who_is_asked_for_at_a_removed_database_is_sent_away() -> Result<()> {
    let server = server_with_databases()?;
    let slow = |ini: Ini| {
        ini.set("auth_type", "scram-sha-256")
            .set("auth_query", "select $1::text, 'secret' || pg_sleep(60)::text")
    };
    let both =
        slow(ini(&server, &[("x", "dbname=a pool_size=1"), ("y", "dbname=b auth_dbname=x auth_user=app")]));
    let without = slow(ini(&server, &[("y", "dbname=b")]));
    let mut pooler = Underpass::start(&both)?.forgets_pools();
    let options = pooler.options("stranger", "y");
    // The first is asked for, the second waits until the server has an answer.
    let mut clients = Vec::new();
    for _ in 0..2 {
        let mut client = Client::open(&options)?;
        client.startup()?;
        clients.push(client);
    }
    until("one is asked for", || Ok(connections(&server, "a", "app")? == 1))?;
    std::thread::sleep(Duration::from_millis(300));
    pooler.rewrite(&without)?;
    pooler.console("RELOAD")?.ok()?;
    for mut client in clients {
        let told = client.until_closed()?;
        let error = told.iter().filter_map(|message| message.error()).next_back();
        assert_eq!(error.expect("it is told why").message, "database removed");
    }
    Ok(())
}

#[test]
fn a_minimum_is_kept_for_clients_and_forced_users() -> Result<()> {
    let server = server_with_databases()?;
    let pooler = Underpass::start(&ini(
        &server,
        &[("x", "dbname=a min_pool_size=2"), ("y", "dbname=b user=other min_pool_size=1")],
    ))?;
    until("the forced user needs no client", || Ok(connections(&server, "b", "other")? == 1))?;
    let client = Client::connect(&pooler.options("app", "x"))?;
    until("the client's", || Ok(connections(&server, "a", "app")? == 2))?;
    client.terminate()?;
    std::thread::sleep(A_WHILE);
    server.sql("select pg_terminate_backend(pid) from pg_stat_activity where datname in ('a', 'b')")?;
    until("the forced user's is made again", || Ok(connections(&server, "b", "other")? == 1))?;
    std::thread::sleep(A_WHILE);
    assert_eq!(connections(&server, "a", "app")?, 0, "nobody is there who would use them");
    Ok(())
}

#[test]
fn minimum_sizes_do_not_evict_one_another() -> Result<()> {
    let server = server_with_databases()?;
    let ini = ini(&server, &[("x", "dbname=a max_db_connections=2 min_pool_size=2")]);
    let pooler = Underpass::start(&ini)?;
    let mut clients = ["app", "other"].map(|user| Client::connect(&pooler.options(user, "x")).expect(user));
    for client in &mut clients {
        client.query("select 1")?.ok()?;
    }
    std::thread::sleep(A_WHILE);
    let log = pooler.log();
    let evicted = log.matches("closing because: evicted").count();
    assert!(evicted <= 1, "{evicted} connections were closed for others that nobody waits for:\n{log}");
    Ok(())
}

#[test]
fn a_pause_outlasts_the_database() -> Result<()> {
    let server = server_with_databases()?;
    let both = ini(&server, &[("x", "dbname=a"), ("y", "dbname=b")]);
    let mut pooler = Underpass::start(&both)?;
    Client::connect(&pooler.options("app", "x"))?.query("select 1")?.ok()?;
    pooler.console("PAUSE")?.ok()?;
    for ini in [ini(&server, &[("y", "dbname=b")]), both] {
        pooler.rewrite(&ini)?;
        pooler.console("RELOAD")?.ok()?;
    }
    let options = pooler.options("app", "x").read_timeout(A_WHILE);
    assert!(Client::connect(&options).is_err(), "a login waits");
    assert_eq!(connections(&server, "a", "app")?, 0);
    pooler.console("RESUME")?.ok()?;
    Client::connect(&pooler.options("app", "x"))?.query("select 1")?.ok()?;
    Ok(())
}

/// As when another server takes the place of one that has failed: PAUSE, the change, RESUME.
#[test]
fn who_waits_through_a_pause_is_served_though_connecting_failed_before_it() -> Result<()> {
    let mut server = Postgres::start()?;
    let ini = Ini::for_server(&server)
        .set("pool_mode", "transaction")
        .set("query_wait_timeout", "30")
        .set("server_login_retry", "0.3");
    let pooler = Underpass::start(&ini)?;
    let connect = || Client::connect(&pooler.options("postgres", "postgres"));
    let (mut first, mut waits) = (connect()?, connect()?);
    assert_eq!(ask(&mut first, "select 1")?, "1");
    server.stop()?;
    // It waits, for nothing had failed yet.
    first.send(&Batch::new().query("select 1"))?;
    until("one is refused", || {
        let mut later = connect()?;
        later.set_read_timeout(A_WHILE)?;
        Ok(ask(&mut later, "select 1").is_err_and(|error| error.sqlstate() == Some("08001")))
    })?;
    pooler.console("PAUSE")?.ok()?;
    waits.send(&Batch::new().query("select 2"))?;
    std::thread::sleep(A_WHILE);
    server.start_again()?;
    pooler.console("RESUME")?.ok()?;
    assert_eq!(waits.response()?.ok()?.value(), Some("2"), "{}", pooler.log());
    Ok(())
}

#[test]
fn clients_of_a_forced_user_follow_a_reload() -> Result<()> {
    let server = Postgres::builder().user("app", "one").user("other", "two").start()?;
    let forced = |user: &str, password: &str| {
        let to = format!("host=127.0.0.1 port={} dbname=postgres", server.port());
        Ini::new()
            .set("auth_type", "any")
            .set("pool_mode", "transaction")
            .database("x", &format!("{to} user={user} password={password}"))
    };
    let mut pooler = Underpass::start(&forced("app", "one"))?;
    let mut client = Client::connect(&pooler.options("whoever", "x"))?;
    assert_eq!(ask(&mut client, "select current_user")?, "app");
    pooler.rewrite(&forced("other", "two"))?;
    pooler.console("RELOAD")?.ok()?;
    until("it is served as the other", || Ok(ask(&mut client, "select current_user")? == "other"))
}

#[test]
fn who_logs_in_after_a_change_is_told_what_the_new_server_says() -> Result<()> {
    let server = server_with_databases()?;
    server.sql("alter database b set timezone = 'Asia/Tokyo'")?;
    let mut pooler = Underpass::start(&ini(&server, &[("x", "dbname=a")]))?;
    Client::connect(&pooler.options("app", "x"))?.query("select 1")?.ok()?;
    pooler.rewrite(&ini(&server, &[("x", "dbname=b")]))?;
    pooler.console("RELOAD")?.ok()?;
    let client = Client::connect(&pooler.options("app", "x"))?;
    assert_eq!(client.parameter("TimeZone"), Some("Asia/Tokyo"));
    Ok(())
}

/// The first bytes of a Parse message of 5000 bytes.
fn half_a_parse() -> Vec<u8> {
    let mut bytes = vec![b'P'];
    bytes.extend_from_slice(&5000u32.to_be_bytes());
    bytes.extend_from_slice(b"name\0select");
    bytes
}

#[test]
fn half_a_message_keeps_no_server() -> Result<()> {
    let server = server_with_databases()?;
    let pooler = Underpass::start(&ini(&server, &[("x", "dbname=a pool_size=1")]))?;
    let options = pooler.options("app", "x");
    let (mut slow, mut quick) = (Client::connect(&options)?, Client::connect(&options)?);
    slow.query("select 1")?.ok()?;
    slow.send_bytes(&half_a_parse())?;
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(ask(&mut quick, "select 2")?, "2");
    // Bit by bit it is whole at last.
    let rest = 5000 - 4 - (half_a_parse().len() - 5);
    let mut text = vec![b' '; rest];
    text[..b" 3 --".len()].copy_from_slice(b" 3 --");
    text[rest - 3..].fill(0);
    let (end, parts) = text.split_last().expect("bytes");
    for part in parts.chunks(1000) {
        slow.send_bytes(part)?;
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(ask(&mut quick, "select 4")?, "4");
    }
    slow.send_bytes(&[*end])?;
    slow.send(&Batch::new().bind("", "name", &[]).execute("", 0).sync())?;
    assert_eq!(slow.response()?.ok()?.value(), Some("3"));
    Ok(())
}

#[test]
fn a_batch_without_its_end_is_under_query_timeout() -> Result<()> {
    let server = server_with_databases()?;
    let ini = ini(&server, &[("x", "dbname=a pool_size=1")]).set("query_timeout", "1");
    let pooler = Underpass::start(&ini)?;
    let options = pooler.options("app", "x");
    let mut client = Client::connect(&options)?;
    client.send(&Batch::new().parse("", "select 1").bind("", "", &[]).execute("", 0).flush())?;
    let told = client.until_closed()?;
    let error = told.iter().filter_map(|message| message.error()).next_back().expect("it is told why");
    assert_eq!(error.message, "query timeout");
    assert_eq!(ask(&mut Client::connect(&options)?, "select 2")?, "2");
    Ok(())
}

#[test]
fn an_auth_query_without_an_answer_goes_with_its_client() -> Result<()> {
    let server = server_with_databases()?;
    server.sql("create function lookup(name text) returns table (u text, p text) language plpgsql security definer as $$begin
        if name = 'stuck' then perform pg_sleep(600); end if;
        return query select name, ''::text; end$$")?;
    let ini = ini(
        &server,
        &[("x", "dbname=postgres pool_size=1 auth_user=app auth_query='select * from lookup($1)'")],
    )
    .set("auth_type", "plain")
    .set("client_login_timeout", "1");
    let pooler = Underpass::start(&ini)?;
    assert!(Client::connect(&pooler.options("stuck", "x")).is_err());
    // Whether it may in or not: the question must be answered.
    let told = Client::connect(&pooler.options("nobody", "x").password("wrong"))
        .map_or_else(|error| error.to_string(), |_| "in".into());
    assert!(!told.contains("timeout"), "{told}");
    Ok(())
}

#[test]
fn a_cancelled_request_leaves_those_behind_it() -> Result<()> {
    let server = server_with_databases()?;
    let pooler = Underpass::start(&ini(&server, &[("x", "dbname=a pool_size=1")]))?;
    let options = pooler.options("app", "x");
    let (mut holder, mut client) = (Client::connect(&options)?, Client::connect(&options)?);
    client.query("select 1")?.ok()?;
    holder.query("begin")?.ok()?;
    // Two at once, and a third later, which is announced while the first waits.
    client.send(&Batch::new().query("select 2").query("select 3"))?;
    std::thread::sleep(Duration::from_millis(100));
    client.send(&Batch::new().query("select 4"))?;
    std::thread::sleep(Duration::from_millis(100));
    client.cancel()?;
    let error = client.response()?.ok().expect_err("the first is cancelled");
    assert!(error.to_string().contains("57014"), "{error}");
    holder.query("commit")?.ok()?;
    assert_eq!(client.response()?.ok()?.value(), Some("3"));
    assert_eq!(client.response()?.ok()?.value(), Some("4"));
    Ok(())
}

#[test]
fn names_that_came_to_nothing_are_not_kept() -> Result<()> {
    let server = server_with_databases()?;
    let ini = Ini::new()
        .userlist("app", "secret")
        .set("auth_type", "plain")
        .database("*", &format!("host=127.0.0.1 port={}", server.port()));
    let pooler = Underpass::start(&ini)?;
    for number in 0..300 {
        let options = pooler.options(&format!("nobody{number}"), &format!("nowhere{number}"));
        assert!(Client::connect(&options.password("wrong")).is_err());
    }
    let known = |what: &str| -> Result<u64> {
        let lists = pooler.console("SHOW MEM")?.ok()?;
        let row = lists.rows().into_iter().find(|row| row[0].as_deref() == Some(what)).expect("a row");
        Ok(row[2].as_deref().unwrap_or_default().parse().expect("a number"))
    };
    until("they are dropped", || Ok(known("user_cache")? < 150 && known("db_cache")? < 150))
}

#[test]
fn a_reserve_without_a_timeout_is_none() -> Result<()> {
    let server = server_with_databases()?;
    let ini =
        ini(&server, &[("x", "dbname=a pool_size=1 reserve_pool_size=5")]).set("reserve_pool_timeout", "0");
    let pooler = Underpass::start(&ini)?;
    let options = pooler.options("app", "x");
    let mut holder = Client::connect(&options)?;
    holder.query("begin")?.ok()?;
    let mut waiter = Client::connect(&options.clone().read_timeout(A_WHILE))?;
    assert!(waiter.query("select 1").is_err(), "it waits");
    assert_eq!(connections(&server, "a", "app")?, 1);
    Ok(())
}

#[test]
fn what_a_session_left_is_not_met_in_transaction_pooling() -> Result<()> {
    let server = server_with_databases()?;
    let ini = |mode: &str| {
        ini(&server, &[("x", "dbname=a pool_size=1")])
            .set("pool_mode", mode)
            .set("max_prepared_statements", "0")
    };
    let mut pooler = Underpass::start(&ini("session"))?;
    let options = pooler.options("app", "x");
    let mut first = Client::connect(&options)?;
    first.query("create temp table t (x int)")?.ok()?;
    pooler.rewrite(&ini("transaction"))?;
    pooler.console("RELOAD")?.ok()?;
    first.query("select 1")?.ok()?;
    assert_eq!(ask(&mut Client::connect(&options)?, "select to_regclass('pg_temp.t')")?, "");
    Ok(())
}

/// Who gets a server and gives it back at once does so for the next that waits, and the next: not on one stack.
#[test]
fn thousands_of_waiters_may_give_their_server_back_at_once() -> Result<()> {
    const CLIENTS: usize = 4000;
    let server = server_with_databases()?;
    let ini = ini(&server, &[("x", "dbname=a pool_size=1")])
        .set("max_client_conn", "9000")
        .tail("[underpass]\nthreads = 1\n");
    let pooler = Underpass::start(&ini)?;
    let options = pooler.options("app", "x");
    pooler.console("PAUSE")?.ok()?;
    let logins = (0..CLIENTS).map(|_| {
        let mut client = Client::open(&options)?;
        client.startup()?;
        Ok(client)
    });
    let mut clients = logins.collect::<Result<Vec<_>>>()?;
    std::thread::sleep(A_WHILE);
    pooler.console("RESUME")?.ok()?;
    for client in &mut clients {
        client.authenticate()?;
        client.finish_login()?;
    }
    let mut holder = Client::connect(&options)?;
    holder.query("begin")?.ok()?;
    for client in &mut clients {
        client.send_bytes(&half_a_parse())?;
    }
    std::thread::sleep(A_WHILE);
    holder.query("commit")?.ok()?;
    assert_eq!(ask(&mut holder, "select 1")?, "1");
    Ok(())
}

/// A connection that says nothing is the kernel's affair with `tcp_defer_accept`, and ours without.
#[test]
fn tcp_defer_accept_changes_while_it_runs() -> Result<()> {
    let server = Postgres::start()?;
    let pooler = Underpass::start(&Ini::for_server(&server))?;
    let logins = || -> Result<String> {
        let rows = pooler.console("SHOW LISTS")?.ok()?.rows();
        let row = rows.into_iter().find(|row| row[0].as_deref() == Some("login_clients"));
        Ok(row.and_then(|row| row[1].clone()).unwrap_or_default())
    };
    let options = pooler.options("postgres", "postgres");
    pooler.console("SET tcp_defer_accept = 0")?.ok()?;
    let begun = Instant::now();
    let mut silent = Vec::new();
    // The first may come before the thread that has the sockets heard of it.
    while logins()? == "0" {
        assert!(begun.elapsed() < SOON, "a silent connection is not seen");
        silent.push(Client::open(&options)?);
        std::thread::sleep(Duration::from_millis(100));
    }
    drop(silent);
    while logins()? != "0" {
        assert!(begun.elapsed() < SOON, "they are gone");
        std::thread::sleep(Duration::from_millis(100));
    }
    pooler.console("SET tcp_defer_accept = 1")?.ok()?;
    std::thread::sleep(Duration::from_millis(500));
    let _silent = Client::open(&options)?;
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(logins()?, "0");
    Ok(())
}

/// SUSPEND waits until everything is written, but not for ever for somebody who does not read.
#[test]
fn who_does_not_read_is_closed_after_suspend_timeout() -> Result<()> {
    let server = server_with_databases()?;
    let pooler = Underpass::start(
        &ini(&server, &[("a", "")]).set("suspend_timeout", "1").tail("[underpass]\nkernel_path = off"),
    )?;
    let mut other = Client::connect(&pooler.options("app", "a"))?;
    assert_eq!(ask(&mut other, "select 1")?, "1");
    let mut stuck = Client::connect(&pooler.options("app", "a"))?;
    stuck.send(&Batch::new().query("select repeat('x', 1000) from generate_series(1, 100000)"))?;
    // The server waits for somebody to read; what was read from it waits in the pooler.
    until("the server is full", || {
        let waits =
            "select count(*) from pg_stat_activity where datname = 'a' and wait_event = 'ClientWrite'";
        Ok(server.sql_value(waits)? == "1")
    })?;
    let mut console = {
        let options = pooler.options("pooler_admin", "pgbouncer").password("pooler_admin_password");
        Client::connect(&options)?
    };
    // A little room may have come about in the socket since, for what is left of a message; then all is written at once.
    until("SUSPEND waits", || {
        let begun = Instant::now();
        console.query("SUSPEND")?.ok()?;
        let took = begun.elapsed();
        console.query("RESUME")?.ok()?;
        std::thread::sleep(Duration::from_millis(20));
        Ok(took >= Duration::from_millis(900))
    })?;
    assert!(pooler.log().contains("suspend_timeout"), "{}", pooler.log());
    assert_eq!(ask(&mut other, "select 2")?, "2");
    // It gets what was on its way, and the end.
    let received = stuck.until_closed()?;
    assert!(received.len() < 100_000, "{} messages", received.len());
    Ok(())
}

/// `prlimit` for the open files of a running pooler, as its user: root may lack the capability.
fn limit_files(pooler: &Underpass, arguments: &[&str]) -> String {
    let mut prlimit = Command::new("prlimit");
    if let Some(user) = underpass_testkit::service_user() {
        prlimit.uid(user.uid.as_raw()).gid(user.gid.as_raw());
    }
    let output = prlimit.args(["--pid", &pooler.pid().to_string()]).args(arguments).output();
    let output = output.expect("prlimit");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// The lowest number that no file of the pooler has.
fn lowest_free(pooler: &Underpass) -> u64 {
    let has = |number: &u64| std::fs::symlink_metadata(format!("/proc/{}/fd/{number}", pooler.pid())).is_ok();
    (0..).find(|number| !has(number)).expect("a number")
}

#[test]
fn who_waits_for_a_descriptor_slows_nobody_down() -> Result<()> {
    let server = server_with_databases()?;
    let ini = ini(&server, &[("x", "dbname=a")])
        .set("tcp_defer_accept", "0")
        .tail("[underpass]\nthreads = 1\nkernel_path = off");
    let pooler = Underpass::start(&ini)?;
    let options = pooler.options("app", "x");
    let mut client = Client::connect(&options)?;
    let mut hundred = || -> Result<Duration> {
        let begun = Instant::now();
        for _ in 0..100 {
            client.query("select 1")?.ok()?;
        }
        Ok(begun.elapsed())
    };
    let mut fastest = || -> Result<Duration> {
        let times = (0..5).map(|_| hundred()).collect::<Result<Vec<_>>>()?;
        Ok(times.into_iter().min().expect("five"))
    };
    let before = fastest()?;
    let limit = limit_files(&pooler, &["--nofile", "--output=SOFT", "--noheadings"]);
    limit_files(&pooler, &[&format!("--nofile={}:", lowest_free(&pooler))]);
    let mut waiting = Client::open(&options)?;
    waiting.startup()?;
    until("accepting fails", || Ok(pooler.log().contains("accept failed")))?;
    let (meanwhile, failures) = (fastest()?, pooler.log().matches("accept failed").count());
    // A millisecond for each packet from either side would be 200 more.
    assert!(meanwhile < before * 2 + Duration::from_millis(60), "{before:?}, then {meanwhile:?}");
    assert!(failures > 0);
    limit_files(&pooler, &[&format!("--nofile={limit}:")]);
    waiting.authenticate()?;
    waiting.finish_login()?;
    waiting.query("select 1")?.ok()?;
    Ok(())
}

/// A further process beside a pooler, as the same user, by a file in its directory.
fn second_process(pooler: &Underpass, ini: &str) -> Command {
    // The testkit starts a copy where the service user cannot reach the original.
    let copy = pooler.directory().join("underpass");
    let program = if copy.exists() { copy } else { Underpass::binary().expect("built") };
    let mut second = Command::new(program);
    // Who has lanes begins as root, and takes the user of its file after it has bound its sockets.
    let text = std::fs::read_to_string(pooler.directory().join(ini)).expect("its configuration");
    if let Some(user) = underpass_testkit::service_user()
        && !text.lines().any(|line| line.starts_with("user = "))
    {
        second.uid(user.uid.as_raw()).gid(user.gid.as_raw());
    }
    second.args(["pooler", ini]).current_dir(pooler.directory());
    second
}

/// A process that is killed with the end of the value.
struct Ends(Child);

impl Drop for Ends {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_second_start_resets_no_client_of_the_first() -> Result<()> {
    let server = server_with_databases()?;
    let ini = ini(&server, &[("x", "dbname=a")])
        .set("so_reuseport", "1")
        .set("pidfile", "pid")
        .tail("[underpass]\nkernel_path = off");
    let pooler = Underpass::start(&ini)?;
    let options = pooler.options("app", "x");
    let over = std::sync::atomic::AtomicBool::new(false);
    let is_over = || over.load(std::sync::atomic::Ordering::Relaxed);
    std::thread::scope(|scope| {
        let clients = scope.spawn(|| -> Result<usize> {
            let mut count = 0;
            while !is_over() {
                Client::connect(&options)?;
                count += 1;
            }
            Ok(count)
        });
        let start = |_| {
            let output = second_process(&pooler, "pgbouncer.ini").output().expect("it starts");
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            (output.status.success(), text)
        };
        let starts: Vec<_> = (0..10).map(start).collect();
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        for (success, text) in starts {
            assert!(!success && text.contains("another instance running?"), "{text}");
        }
        assert!(clients.join().expect("no panic")? > 10);
        Ok(())
    })
}

/// There is nobody else whom they could ask: their connections are here.
#[test]
fn who_was_let_in_before_a_shutdown_is_served() -> Result<()> {
    let server = server_with_databases()?;
    // With it a connection that has said nothing is the kernel's, which resets it.
    let ini = ini(&server, &[("x", "dbname=a")]).set("tcp_defer_accept", "0");
    let mut pooler = Underpass::start(&ini)?;
    let options = pooler.options("app", "x");
    // One has said nothing yet, one is in the middle of its login.
    let (mut silent, mut half) = (Client::open(&options)?, Client::open(&options)?);
    half.startup()?;
    std::thread::sleep(A_WHILE);
    pooler.signal(Signal::SIGTERM)?;
    pooler.wait_log("got SIGTERM", SOON)?;
    until("its port is closed", || {
        Ok(Client::connect(&options).is_err_and(|error| error.sqlstate().is_none()))
    })?;
    std::thread::sleep(A_WHILE);
    silent.startup()?;
    for client in [&mut silent, &mut half] {
        client.authenticate()?;
        client.finish_login()?;
        assert_eq!(ask(client, "select current_database()")?, "a");
    }
    silent.terminate()?;
    std::thread::sleep(A_WHILE);
    assert_eq!(ask(&mut half, "select 1")?, "1");
    half.terminate()?;
    assert!(pooler.wait(SOON)?.success());
    Ok(())
}

/// As docs/operation.md describes it. A connection that comes between the last look into the queue of a socket and its close is reset by the kernel
/// (net.ipv4.tcp_migrate_req), so a few may be.
#[test]
fn a_new_process_takes_over_and_no_client_is_refused() -> Result<()> {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
    let server = server_with_databases()?;
    let ini = ini(&server, &[("x", "dbname=a")]).set("so_reuseport", "1");
    let mut first = Underpass::start(&ini)?;
    let place = first.directory();
    let text = std::fs::read_to_string(place.join("pgbouncer.ini")).expect("its configuration");
    let text = text.replace(&format!("unix_socket_dir = {}", place.display()), "unix_socket_dir =");
    std::fs::write(place.join("second.ini"), text).expect("a configuration");
    let log = place.join("second.log");
    let mut second = second_process(&first, "second.ini");
    let second = second.stderr(std::fs::File::create(&log).expect("a log")).spawn().expect("it starts");
    let _second = Ends(second);
    until("it is up", || Ok(std::fs::read_to_string(&log).is_ok_and(|text| text.contains("process up"))))?;
    let options = first.options("app", "x");
    let (served, reset, over) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicBool::new(false));
    let come_and_go = || -> Result<()> {
        while !over.load(Relaxed) {
            let answer = Client::connect(&options).and_then(|mut client| {
                let answer = ask(&mut client, "select current_database()")?;
                client.terminate()?;
                Ok(answer)
            });
            match answer {
                Ok(answer) => {
                    assert_eq!(answer, "a");
                    served.fetch_add(1, Relaxed);
                }
                Err(error) if error.sqlstate().is_some() => return Err(error),
                Err(_) => {
                    reset.fetch_add(1, Relaxed);
                }
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4).map(|_| scope.spawn(come_and_go)).collect();
        let some = |count: usize| {
            let before = served.load(Relaxed);
            let is_over = || clients.iter().any(|client| client.is_finished());
            until("clients come and go", || Ok(served.load(Relaxed) > before + count || is_over()))
        };
        let mut replace = || -> Result<()> {
            some(200)?;
            first.signal(Signal::SIGTERM)?;
            assert!(first.wait(SOON)?.success());
            some(200)
        };
        let replaced = replace();
        over.store(true, Relaxed);
        clients.into_iter().try_for_each(|client| client.join().expect("no panic"))?;
        replaced
    })?;
    assert!(reset.load(Relaxed) <= 4, "{} of {} were reset", reset.load(Relaxed), served.load(Relaxed));
    Ok(())
}
