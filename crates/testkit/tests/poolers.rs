// SPDX-License-Identifier: Apache-2.0
//! The pooler fixture, proven on Debian's PgBouncer.

use std::time::Duration;

use underpass_testkit::{
    AuthMethod, Client, Direction, Fault, FaultProxy, Ini, MockServer, PgBouncer, Pooler, PoolerKind,
    Postgres, Result, Signal,
};

#[test]
fn clients_share_one_server_in_transaction_pooling() -> Result<()> {
    let server = Postgres::start()?;
    let ini = Ini::for_server(&server).set("pool_mode", "transaction").set("default_pool_size", "1");
    let pooler = PgBouncer::start(&ini)?;
    let options = pooler.options("postgres", "postgres");
    let mut clients = [Client::connect(&options)?, Client::connect(&options)?];
    let pids: Vec<_> = clients
        .iter_mut()
        .map(|client| client.query("select pg_backend_pid()").map(|answer| answer.rows()))
        .collect::<Result<_>>()?;
    assert_eq!(pids[0], pids[1]);
    let unix = Client::connect(&options.unix(pooler.directory()))?.query("select 7")?;
    assert_eq!(unix.value(), Some("7"));
    Ok(())
}

#[test]
fn console_reload_signals_and_restart() -> Result<()> {
    let server = Postgres::start()?;
    let ini = Ini::for_server(&server);
    let mut pooler = PgBouncer::start(&ini)?;
    assert!(pooler.console("show version")?.value().is_some_and(|version| version.starts_with("PgBouncer")));
    pooler.rewrite(&ini.set("default_pool_size", "7"))?;
    pooler.signal(Signal::SIGHUP)?;
    pooler.wait_log("SIGHUP", Duration::from_secs(10))?;
    let config = pooler.console("show config")?.rows();
    let size = config.iter().find(|row| row[0].as_deref() == Some("default_pool_size"));
    assert_eq!(size.and_then(|row| row[1].as_deref()), Some("7"));
    assert!(pooler.resident_kib()? > 100);
    pooler.kill()?;
    assert!(!pooler.is_running());
    pooler.start_again()?;
    Client::connect(&pooler.options("postgres", "postgres"))?.query("select 1")?;
    pooler.stop()
}

#[test]
fn passwords_go_through_the_userlist_and_bad_files_are_refused() -> Result<()> {
    let server = Postgres::builder().auth(AuthMethod::Scram).user("alice", "secret").start()?;
    let ini = Ini::for_server(&server).set("auth_type", "scram-sha-256").userlist("alice", "secret");
    let pooler = PgBouncer::start(&ini)?;
    let options = pooler.options("alice", "postgres");
    Client::connect(&options.clone().password("secret"))?.query("select 1")?;
    assert!(Client::connect(&options.password("wrong")).is_err());

    let (status, log) = PoolerKind::PgBouncer.start_refused(&ini.set("pool_mode", "sometimes"))?;
    assert!(!status.success() && log.contains("pool_mode"), "{log}");
    Ok(())
}

#[test]
fn the_fault_proxy_splits_delays_stalls_and_cuts() -> Result<()> {
    let server = Postgres::start()?;
    let proxy = FaultProxy::start(server.port())?;
    let options = server.options("postgres", "postgres").port(proxy.port());
    proxy.set_both(Fault::Split(1));
    let mut client = Client::connect(&options)?;
    assert_eq!(client.query("select repeat('x', 100)")?.value().map(str::len), Some(100));

    proxy.set_both(Fault::None);
    proxy.set(Direction::ToClient, Fault::Delay(Duration::from_millis(50)));
    let begin = std::time::Instant::now();
    client.query("select 1")?;
    assert!(begin.elapsed() >= Duration::from_millis(50));

    // The chunk that a read was already waiting for passes; what comes later stays.
    proxy.set_both(Fault::Stall);
    client.set_read_timeout(Duration::from_millis(200))?;
    let stalled = client.query("select pg_sleep(0.01)").and_then(|_| client.query("select 2"));
    assert!(stalled.is_err());
    proxy.set_both(Fault::None);

    let mut client = Client::connect(&options)?;
    proxy.set(Direction::ToClient, Fault::CloseAfter(10));
    assert!(client.query("select 1").unwrap_err().is_closed());
    proxy.set_both(Fault::None);

    let mut client = Client::connect(&options)?;
    client.query("select 1")?;
    proxy.reset_all();
    let error = client.query("select 1").unwrap_err();
    assert!(error.is_closed(), "{error}");
    assert_eq!(proxy.accepted(), 3);
    assert!(proxy.bytes(Direction::ToClient) > 1000);

    proxy.refuse(true);
    assert!(Client::connect(&options).is_err());
    Ok(())
}

#[test]
fn a_pooler_in_front_of_a_mock_server() -> Result<()> {
    let mock = MockServer::serving()?;
    let ini = Ini::new()
        .database("*", &format!("host=127.0.0.1 port={}", mock.port()))
        .userlist("bob", "")
        .set("pool_mode", "transaction");
    let pooler = PgBouncer::start(&ini)?;
    let mut client = Client::connect(&pooler.options("bob", "any"))?;
    assert_eq!(client.query("select which()")?.value(), Some("0"));
    assert!(mock.queries().contains(&"select which()".into()));
    mock.check()
}
