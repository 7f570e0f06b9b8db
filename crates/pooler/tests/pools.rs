// SPDX-License-Identifier: Apache-2.0
//! Pools with a real PostgreSQL behind them: modes, limits, queue, timeouts, reuse and upkeep of servers.

use std::time::{Duration, Instant};

use underpass_testkit::{Batch, Client, Ini, MockServer, Pooler, Postgres, Reply, Result, Step, Underpass};

const PID: &str = "select pg_backend_pid()";

fn pid(client: &mut Client) -> Result<String> {
    Ok(client.query(PID)?.ok()?.value().unwrap_or_default().to_owned())
}

fn refusal<T>(result: Result<T>) -> String {
    result.map_or_else(|error| error.to_string(), |_| "no error".into())
}

/// The last error that the client is told before it is closed.
fn farewell(client: &mut Client) -> Result<String> {
    let messages = client.until_closed()?;
    Ok(messages
        .iter()
        .filter_map(|message| message.error())
        .next_back()
        .map_or_else(String::new, |error| error.message.clone()))
}

#[test]
fn session_transaction_and_statement_pooling() -> Result<()> {
    let server = Postgres::start()?;
    let to = format!("host=127.0.0.1 port={} dbname=postgres", server.port());
    let ini = Ini::new()
        .userlist("postgres", "")
        .database("s", &format!("{to} pool_mode=session pool_size=1"))
        .database("t", &format!("{to} pool_mode=transaction pool_size=1"))
        .database("st", &format!("{to} pool_mode=statement pool_size=1"));
    let pooler = Underpass::start(&ini)?;
    let client = |database: &str| Client::connect(&pooler.options("postgres", database));
    // Session: the server is the client's until it leaves, and is reset then.
    let mut first = client("s")?;
    first.query("set work_mem = '5MB'")?.ok()?;
    let home = pid(&mut first)?;
    let mut second = client("s")?;
    second.send(&Batch::new().query("show work_mem"))?;
    std::thread::sleep(Duration::from_millis(150));
    first.terminate()?;
    assert_eq!(second.response()?.ok()?.value(), Some("4MB"), "DISCARD ALL");
    assert_eq!(pid(&mut second)?, home);
    // Transaction: shared as soon as a transaction is over.
    let (mut first, mut second) = (client("t")?, client("t")?);
    assert_eq!(pid(&mut first)?, pid(&mut second)?);
    // Statement: no transaction blocks.
    let mut only = client("st")?;
    only.query("select 1")?.ok()?;
    only.send(&Batch::new().query("begin"))?;
    assert_eq!(farewell(&mut only)?, "transaction blocks not allowed in statement pooling mode");
    assert_eq!(client("st")?.query("select 2")?.ok()?.value(), Some("2"));
    Ok(())
}

#[test]
fn limits_of_clients_and_the_queue() -> Result<()> {
    let server = Postgres::start()?;
    let to = format!("host=127.0.0.1 port={}", server.port());
    let ini = Ini::new()
        .userlist("postgres", "")
        .userlist("busy", "")
        .user("busy", "max_user_client_connections=1")
        .database("postgres", &format!("{to} pool_size=1 max_db_client_connections=3"))
        .set("pool_mode", "transaction")
        .set("query_wait_timeout", "1.5")
        .set("query_wait_notify", "0.3");
    server.sql("create role busy login superuser")?;
    let pooler = Underpass::start(&ini)?;
    let options = pooler.options("postgres", "postgres");
    let busy = Client::connect(&options.clone().user("busy"))?;
    assert!(refusal(Client::connect(&options.clone().user("busy"))).contains("max_user_client_connections"));
    let mut holder = Client::connect(&options)?;
    let mut waiter = Client::connect(&options)?;
    assert!(refusal(Client::connect(&options)).contains("max_db_client_connections"));
    holder.query("begin")?.ok()?;
    waiter.send(&Batch::new().query("select 1"))?;
    let begun = Instant::now();
    let notice = waiter.recv()?;
    assert_eq!(notice.tag, b'N');
    assert!(begun.elapsed() >= Duration::from_millis(250));
    assert_eq!(farewell(&mut waiter)?, "query_wait_timeout");
    assert!(begun.elapsed() >= Duration::from_millis(1400));
    drop((busy, waiter));
    holder.query("commit")?.ok()?;
    // Those that left are not counted any more.
    for _ in 0..5 {
        let mut client = Client::connect(&options)?;
        client.query("select 1")?.ok()?;
        client.terminate()?;
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

#[test]
fn a_pool_of_size_0_has_the_limits_of_its_database_only() -> Result<()> {
    let server = Postgres::start()?;
    let ini = Ini::for_server(&server).set("pool_mode", "transaction").set("max_db_connections", "3");
    let everywhere = ini.clone().set("default_pool_size", "0");
    let by_user = ini.set("default_pool_size", "1").user("postgres", "pool_size=0");
    for ini in [everywhere, by_user] {
        let pooler = Underpass::start(&ini)?;
        let options = pooler.options("postgres", "postgres");
        let mut holders = (0..3).map(|_| Client::connect(&options)).collect::<Result<Vec<_>>>()?;
        for holder in &mut holders {
            holder.query("begin")?.ok()?;
        }
        let mut waiter = Client::connect(&options)?;
        waiter.send(&Batch::new().query("select 4"))?;
        std::thread::sleep(Duration::from_millis(300));
        let waiting = pooler.console("SHOW POOLS")?.ok()?;
        let column = waiting.column_names().iter().position(|name| name == "cl_waiting").expect("cl_waiting");
        let of_pool = waiting.rows().into_iter().find(|row| row[0].as_deref() == Some("postgres"));
        assert_eq!(of_pool.expect("the pool")[column].as_deref(), Some("1"));
        holders[0].query("commit")?.ok()?;
        assert_eq!(waiter.response()?.ok()?.value(), Some("4"));
    }
    Ok(())
}

#[test]
fn reserve_pool_reuse_order_and_lifetime() -> Result<()> {
    let server = Postgres::start()?;
    let ini = Ini::for_server(&server).set("pool_mode", "transaction").set("default_pool_size", "1");
    let mut pooler =
        Underpass::start(&ini.clone().set("reserve_pool_size", "1").set("reserve_pool_timeout", "0.5"))?;
    let options = pooler.options("postgres", "postgres");
    let (mut holder, mut waiter) = (Client::connect(&options)?, Client::connect(&options)?);
    holder.query("begin")?.ok()?;
    let begun = Instant::now();
    assert_eq!(waiter.query("select 1")?.ok()?.value(), Some("1"));
    assert!(begun.elapsed() >= Duration::from_millis(450));
    pooler.wait_log("taking connection from reserve_pool", Duration::from_secs(5))?;

    // One client at a time meets one server; round robin meets all.
    for (round_robin, distinct) in [("0", 1), ("1", 3)] {
        let ini = ini
            .clone()
            .set("default_pool_size", "3")
            .set("server_round_robin", round_robin)
            .set("min_pool_size", "3");
        let pooler = Underpass::start(&ini)?;
        let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
        std::thread::sleep(Duration::from_millis(800));
        let mut pids = (0..9).map(|_| pid(&mut client)).collect::<Result<Vec<_>>>()?;
        pids.sort();
        pids.dedup();
        assert_eq!(pids.len(), distinct, "server_round_robin = {round_robin}");
    }

    let pooler = Underpass::start(&ini.clone().set("server_lifetime", "1"))?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    let first = pid(&mut client)?;
    assert_eq!(pid(&mut client)?, first);
    std::thread::sleep(Duration::from_millis(1500));
    assert_ne!(pid(&mut client)?, first);
    Ok(())
}

/// Else each transaction would begin with the `SET` that its server needs.
#[test]
fn clients_of_two_names_do_not_take_each_others_servers_while_there_are_two() -> Result<()> {
    let server = Postgres::start()?;
    let ini = Ini::for_server(&server).set("pool_mode", "transaction").tail("[underpass]\nthreads = 1");
    let pooler = Underpass::start(&ini)?;
    let options = pooler.options("postgres", "postgres");
    let named = |name: &str| Client::connect(&options.clone().parameter("application_name", name));
    let (mut one, mut other) = (named("one")?, named("other")?);
    for client in [&mut one, &mut other] {
        client.query("begin")?.ok()?;
    }
    let homes = [pid(&mut one)?, pid(&mut other)?];
    assert_ne!(homes[0], homes[1]);
    for client in [&mut other, &mut one] {
        client.query("commit")?.ok()?;
    }
    for round in 0..6 {
        // At once, and after the moment in which a client gets its own server whatever that has.
        std::thread::sleep(Duration::from_millis(10 * (round % 2)));
        assert_eq!(pid(&mut other)?, homes[1], "round {round}");
        assert_eq!(pid(&mut one)?, homes[0], "round {round}");
    }
    let mut third = named("other")?;
    assert_eq!(pid(&mut third)?, homes[1], "not the lowest, but it has the name");
    Ok(())
}

#[test]
fn every_timeout_ends_the_client_and_not_the_server() -> Result<()> {
    let server = Postgres::start()?;
    let base = Ini::for_server(&server).set("pool_mode", "transaction").set("default_pool_size", "1");
    let cases: [(&str, &str, &[&str]); 4] = [
        ("query_timeout", "query timeout", &["select pg_sleep(30)"]),
        ("idle_transaction_timeout", "idle transaction timeout", &["begin"]),
        ("transaction_timeout", "transaction timeout", &["begin"]),
        ("client_idle_timeout", "client_idle_timeout", &["select 1"]),
    ];
    for (key, text, statements) in cases {
        let pooler = Underpass::start(&base.clone().set(key, "0.7"))?;
        let options = pooler.options("postgres", "postgres");
        let home = pid(&mut Client::connect(&options)?)?;
        let mut client = Client::connect(&options)?;
        for statement in statements {
            client.send(&Batch::new().query(statement))?;
        }
        assert_eq!(farewell(&mut client)?, text, "{key}");
        assert_eq!(pid(&mut Client::connect(&options)?)?, home, "{key}: the server goes on");
    }
    Ok(())
}

/// Clients that rest are not looked at in each sweep.
#[test]
fn a_timeout_set_later_finds_the_clients_that_rest_already() -> Result<()> {
    let server = Postgres::start()?;
    let pooler = Underpass::start(&Ini::for_server(&server).set("pool_mode", "transaction"))?;
    let options = pooler.options("postgres", "postgres");
    let mut resting = (0..10).map(|_| Client::connect(&options)).collect::<Result<Vec<_>>>()?;
    let mut busy = Client::connect(&options)?;
    for client in &mut resting {
        client.query("select 1")?.ok()?;
    }
    std::thread::sleep(Duration::from_millis(600));
    pooler.console("SET client_idle_timeout = 2")?.ok()?;
    // Who has stirred since is given its time anew.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(3_500) {
        busy.query("select 1")?.ok()?;
        std::thread::sleep(Duration::from_millis(100));
    }
    for client in &mut resting {
        client.set_read_timeout(Duration::from_millis(100))?;
        assert_eq!(farewell(client)?, "client_idle_timeout");
    }
    busy.query("select 1")?.ok()?;
    Ok(())
}

#[test]
fn dead_idle_servers_are_found_before_they_are_used() -> Result<()> {
    let mut server = Postgres::start()?;
    let ini = Ini::for_server(&server)
        .set("pool_mode", "transaction")
        .set("server_check_delay", "0")
        .set("server_check_query", "select 1")
        .set("server_login_retry", "0.3");
    let pooler = Underpass::start(&ini)?;
    let options = pooler.options("postgres", "postgres");
    let mut client = Client::connect(&options)?;
    let first = pid(&mut client)?;
    // With a limit in ms it waits until the process is gone: the socket tells it then.
    server.sql(&format!("select pg_terminate_backend({first}, 10000)"))?;
    assert_ne!(pid(&mut client)?, first, "another one, and no error");
    // Mid-transaction there is nothing to save.
    client.query("begin")?.ok()?;
    let second = pid(&mut client)?;
    server.sql(&format!("select pg_terminate_backend({second})"))?;
    client.send(&Batch::new().query("select 1"))?;
    assert!(!farewell(&mut client)?.is_empty());
    // The whole server: clients are told at once and why, and it comes back.
    let mut client = Client::connect(&options)?;
    client.query("select 1")?.ok()?;
    server.stop()?;
    std::thread::sleep(Duration::from_millis(200));
    let begun = Instant::now();
    let mut told = String::new();
    for _ in 0..2 {
        client.send(&Batch::new().query("select 1"))?;
        client.set_read_timeout(Duration::from_secs(2))?;
        match farewell(&mut client) {
            Ok(text) => told = text,
            Err(_) => told = "kept waiting".into(),
        }
        client = match Client::connect(&options) {
            Ok(client) => client,
            Err(error) => {
                told = error.to_string();
                break;
            }
        };
    }
    assert!(told.contains("server login has been failing, cached error: connect failed"), "{told}");
    assert!(begun.elapsed() < Duration::from_secs(8));
    server.start_again()?;
    let begun = Instant::now();
    let mut back = Client::connect(&options).and_then(|mut client| client.query("select 1"));
    while back.is_err() && begun.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(200));
        back = Client::connect(&options).and_then(|mut client| client.query("select 1"));
    }
    back?.ok()?;
    Ok(())
}

/// A parameter that servers report is set by `connect_query` for good, and clients are told so: it is not put back for them.
#[test]
fn what_a_connect_query_sets_is_what_clients_have() -> Result<()> {
    let server = Postgres::start()?;
    let database = format!(
        "host=127.0.0.1 port={} user=postgres pool_size=1 connect_query='set timezone = ''Asia/Tokyo'''",
        server.port()
    );
    let ini =
        Ini::new().userlist("postgres", "").database("postgres", &database).set("pool_mode", "transaction");
    let pooler = Underpass::start(&ini)?;
    for _ in 0..2 {
        let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
        assert_eq!(client.parameter("TimeZone"), Some("Asia/Tokyo"));
        for _ in 0..2 {
            assert_eq!(client.query("show timezone")?.ok()?.value(), Some("Asia/Tokyo"));
        }
    }
    Ok(())
}

/// Timeouts of `[users]` for clients go by the name that the client has logged in with, whoever its servers are logged in as.
#[test]
fn client_timeouts_are_those_of_the_user_who_logs_in() -> Result<()> {
    let server = Postgres::start()?;
    let database = format!("host=127.0.0.1 port={} user=postgres pool_size=1", server.port());
    let ini = Ini::new()
        .userlist("alice", "")
        .userlist("bob", "")
        .userlist("postgres", "")
        .database("postgres", &database)
        .user("alice", "client_idle_timeout=1 query_wait_timeout=1")
        .user("postgres", "client_idle_timeout=2 query_wait_timeout=2")
        .set("pool_mode", "transaction");
    let pooler = Underpass::start(&ini)?;
    let client = |user: &str| Client::connect(&pooler.options(user, "postgres"));
    let ends = |client: &mut Client| -> Result<bool> {
        client.set_read_timeout(Duration::from_secs(4))?;
        Ok(client.recv().is_ok_and(|message| message.tag == b'E'))
    };
    let (mut alice, mut bob) = (client("alice")?, client("bob")?);
    for client in [&mut alice, &mut bob] {
        client.query("select 1")?.ok()?;
    }
    assert!(ends(&mut alice)?, "{}", pooler.log());
    assert!(!ends(&mut bob)?, "{}", pooler.log());
    // The same of those that wait.
    let (mut alice, mut holder) = (client("alice")?, client("bob")?);
    holder.query("begin")?.ok()?;
    alice.send(&Batch::new().query("select 1"))?;
    bob.send(&Batch::new().query("select 1"))?;
    assert!(ends(&mut alice)?, "{}", pooler.log());
    assert!(!ends(&mut bob)?, "{}", pooler.log());
    Ok(())
}

/// With auth_type any the name that a client gives proves nothing: it counts as the forced user.
#[test]
fn who_comes_under_any_name_counts_as_the_forced_user() -> Result<()> {
    let server = Postgres::start()?;
    let database = format!("host=127.0.0.1 port={} user=postgres", server.port());
    let ini = Ini::new()
        .database("postgres", &database)
        .set("auth_type", "any")
        .set("max_user_client_connections", "1");
    let pooler = Underpass::start(&ini)?;
    let _first = Client::connect(&pooler.options("one", "postgres"))?;
    assert!(Client::connect(&pooler.options("another", "postgres")).is_err());
    Ok(())
}

#[test]
fn forced_users_connect_queries_host_lists_and_socket_directories() -> Result<()> {
    let server = Postgres::start()?;
    server.sql("create role app login")?;
    let port = server.port();
    let directory = server.socket_dir().display().to_string();
    let ini = Ini::new()
        .userlist("anyone", "")
        .database(
            "forced",
            &format!(
                "host=127.0.0.1 port={port} dbname=postgres user=app connect_query='set lock_timeout = 77'"
            ),
        )
        .database(
            "listed",
            &format!(
                "host=127.0.0.1,127.0.0.2,127.0.0.3 port={port} dbname=postgres user=postgres pool_size=3"
            ),
        )
        .database("socket", &format!("host={directory} port={port} dbname=postgres user=postgres"))
        .set("auth_type", "any")
        .set("pool_mode", "transaction");
    let pooler = Underpass::start(&ini)?;
    let client = |database: &str| Client::connect(&pooler.options("whoever", database));
    let mut forced = client("forced")?;
    assert_eq!(forced.query("select current_user")?.ok()?.value(), Some("app"));
    assert_eq!(forced.query("show lock_timeout")?.ok()?.value(), Some("77ms"));
    assert_eq!(client("socket")?.query("select inet_server_addr() is null")?.ok()?.value(), Some("t"));
    let mut holders = Vec::new();
    for _ in 0..2 {
        let mut listed = client("listed")?;
        listed.query("begin")?.ok()?;
        holders.push(listed);
    }
    assert!(refusal(client("nowhere")).contains("no such database"));
    // Clients by the unix socket.
    let by_socket = pooler.options("whoever", "forced").unix(pooler.directory());
    Client::connect(&by_socket)?.query("select 1")?.ok()?;
    Ok(())
}

/// A failure of one host must not cost the pause that a failure of all does: clients here would be told after 200 ms.
#[test]
fn the_next_host_of_a_list_is_tried_at_once() -> Result<()> {
    let server = Postgres::start()?;
    let port = server.port();
    let to = |hosts: &str, more: &str| format!("host={hosts} port={port} user=postgres {more}");
    let ini = Ini::new()
        .userlist("anyone", "")
        .database("turns", &to("127.0.0.2,127.0.0.1", "dbname=postgres"))
        .database("stays", &to("127.0.0.2,127.0.0.3,127.0.0.1", "dbname=postgres load_balance_hosts=disable"))
        .database("none", &to("127.0.0.2,127.0.0.3", "dbname=postgres"))
        .database("denied", &to("127.0.0.1,127.0.0.2", "dbname=missing"))
        .set("auth_type", "any")
        .set("pool_mode", "transaction")
        .set("server_login_retry", "60");
    let pooler = Underpass::start(&ini)?;
    let client = |database: &str| Client::connect(&pooler.options("whoever", database));
    let failures = |database: &str| {
        let phrase = format!("{database}/postgres@127.0.0.2:{port} closing because: connect failed");
        pooler.log().lines().filter(|line| line.contains(&phrase)).count()
    };
    for database in ["turns", "stays"] {
        // Several at once: their logins fail and are repeated side by side.
        let mut clients = (0..4).map(|_| client(database)).collect::<Result<Vec<_>>>()?;
        clients.iter_mut().try_for_each(|client| client.send(&Batch::new().query("begin")))?;
        for client in &mut clients {
            client.response()?.ok()?;
        }
    }
    assert!(failures("turns") > 0 && failures("stays") > 0, "the dead host was tried");
    let before = failures("stays");
    let mut later = (0..4).map(|_| client("stays")).collect::<Result<Vec<_>>>()?;
    later.iter_mut().try_for_each(|client| client.query("begin")?.ok().map(drop))?;
    assert_eq!(failures("stays"), before, "load_balance_hosts = disable stays with the host that works");
    for _ in 0..3 {
        let told = refusal(client("none"));
        assert!(told.contains("server login has been failing, cached error: connect failed"), "{told}");
    }
    assert_eq!(failures("none"), 1, "after all hosts failed nothing is tried for server_login_retry");
    assert!(refusal(client("denied")).contains("does not exist"));
    assert_eq!(failures("denied"), 0, "a host that answers is not passed over");
    Ok(())
}

/// A round over the hosts that ends with a refusal begins anew at the first: it must not stay where it was refused.
#[test]
fn a_host_that_refuses_does_not_keep_the_pool_from_one_that_is_back() -> Result<()> {
    const DEADLINE: Duration = Duration::from_secs(15);
    let mut server = Postgres::builder().setting("listen_addresses", "127.0.0.2").start()?;
    let port = server.port();
    let _refuses = MockServer::start_at(port, |_| {
        let refusal = Reply::new().error("FATAL", "3D000", "database is not here");
        vec![Step::Startup, Step::Send(refusal), Step::Close]
    })?;
    let to =
        |more: &str| format!("host=127.0.0.2,127.0.0.1 port={port} dbname=postgres user=postgres {more}");
    let ini = Ini::new()
        .userlist("anyone", "")
        .database("turns", &to(""))
        .database("stays", &to("load_balance_hosts=disable"))
        .database("replicated", &to("load_balance_hosts=disable"))
        .set("auth_type", "any")
        .set("pool_mode", "transaction")
        .set("server_tls_sslmode", "disable")
        .set("server_login_retry", "1");
    let pooler = Underpass::start(&ini)?;
    let client = |database: &str| {
        let options = pooler.options("whoever", database);
        // A replication client has a connection of its own, whose refusal is no word on others.
        Client::connect(&match database {
            "replicated" => options.parameter("replication", "database"),
            _ => options,
        })
    };
    server.stop()?;
    for database in ["turns", "stays", "replicated"] {
        let told = refusal(client(database));
        assert!(told.contains("database is not here"), "{database}: {told}");
    }
    server.start_again()?;
    for database in ["turns", "stays", "replicated"] {
        let begun = Instant::now();
        let mut back = client(database);
        while back.is_err() && begun.elapsed() < DEADLINE {
            std::thread::sleep(Duration::from_millis(100));
            back = client(database);
        }
        assert!(back.is_ok(), "{database}: {}\n{}", refusal(back), pooler.log());
        back?.query("select 1")?.ok()?;
    }
    Ok(())
}

/// All users of a database share the host that `load_balance_hosts = disable` stays with.
#[test]
fn a_user_who_is_refused_does_not_send_others_to_the_next_host() -> Result<()> {
    let server = Postgres::builder().setting("listen_addresses", "127.0.0.1,127.0.0.2").start()?;
    let to = format!("host=127.0.0.2,127.0.0.1 port={} dbname=postgres", server.port());
    let ini = Ini::new()
        .userlist("postgres", "")
        .userlist("nobody", "")
        .database("stays", &format!("{to} load_balance_hosts=disable"))
        .set("server_login_retry", "0.2");
    let pooler = Underpass::start(&ini)?;
    for _ in 0..3 {
        let told = refusal(Client::connect(&pooler.options("nobody", "stays")));
        assert!(told.contains("does not exist"), "{told}");
        let mut client = Client::connect(&pooler.options("postgres", "stays"))?;
        let address = client.query("select host(inet_server_addr())")?.ok()?;
        assert_eq!(address.value(), Some("127.0.0.2"));
        // The next one needs a connection of its own.
        pooler.console("RECONNECT")?.ok()?;
        client.terminate()?;
        std::thread::sleep(Duration::from_millis(300));
    }
    Ok(())
}

/// See `acceptors.rs` of the pooler. Nobody is refused while workers begin and stop to accept.
#[test]
fn clients_of_a_moment_are_gathered_at_one_worker() -> Result<()> {
    const DEADLINE: Duration = Duration::from_secs(60);
    let server = Postgres::start()?;
    let ini = Ini::new()
        .userlist("postgres", "")
        .database("postgres", &format!("host=127.0.0.1 port={}", server.port()))
        .set("pool_mode", "transaction")
        .set("verbose", "1")
        .set("log_connections", "0")
        .set("log_disconnections", "0")
        .tail("[underpass]\nthreads = 2");
    let pooler = Underpass::start(&ini)?;
    let options = pooler.options("postgres", "postgres");
    // The last word on it, for a busy machine may change the pooler's mind.
    let is_alone = || {
        let log = pooler.log();
        log.rfind("the first worker accepts alone") > log.rfind("all workers accept")
    };
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let pass_by = || -> Result<()> {
            while !is_alone() && begun.elapsed() < DEADLINE {
                for _ in 0..50 {
                    let mut client = Client::connect(&options)?;
                    client.query("select 1")?.ok()?;
                    client.terminate()?;
                }
            }
            Ok(())
        };
        let passers = [(); 4].map(|()| scope.spawn(pass_by));
        passers.into_iter().try_for_each(|passer| passer.join().expect("no panic"))
    })?;
    assert!(pooler.log().contains("the first worker accepts alone"), "{}", pooler.log());
    // Those who stay are spread again.
    let mut stay = Vec::new();
    while is_alone() && begun.elapsed() < DEADLINE {
        stay.push(Client::connect(&options)?);
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(pooler.log().contains("all workers accept"), "{}", pooler.log());
    stay.iter_mut().try_for_each(|client| client.query("select 1")?.ok().map(drop))
}
