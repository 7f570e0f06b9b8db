// SPDX-License-Identifier: Apache-2.0
//! The PostgreSQL fixture and the client prove each other.

use std::fs;

use underpass_testkit::{AuthMethod, Authority, Batch, Client, Postgres, Result, Tls};

#[test]
fn every_password_method_lets_the_right_password_in_and_no_other() -> Result<()> {
    for method in [AuthMethod::Password, AuthMethod::Md5, AuthMethod::Scram] {
        let server = Postgres::builder().auth(method).user("alice", "se'cret").start()?;
        let options = server.options("alice", "postgres");
        let mut client = Client::connect(&options.clone().password("se'cret"))?;
        assert_eq!(client.query("select current_user")?.value(), Some("alice"), "{method:?}");
        let refused = Client::connect(&options.clone().password("wrong")).unwrap_err();
        assert_eq!(refused.sqlstate(), Some("28P01"), "{method:?}: {refused}");
    }
    Ok(())
}

#[test]
fn tls_verifies_the_server_and_certificates_log_in() -> Result<()> {
    let authority = Authority::new("test authority")?;
    let server = Postgres::builder().auth(AuthMethod::Cert).tls(&authority).user("alice", "").start()?;
    let identity = authority.client("alice")?;
    let options = server.options("alice", "postgres").host("localhost");
    let mut client = Client::connect(&options.clone().tls(Tls::new(&authority, Some(&identity))?))?;
    let row = client.query("select ssl, version from pg_stat_ssl where pid = pg_backend_pid()")?.rows();
    assert_eq!(row, [[Some("t".into()), Some("TLSv1.3".into())]]);

    let nameless = Client::connect(&options.clone().tls(Tls::new(&authority, None)?)).unwrap_err();
    assert_eq!(nameless.sqlstate(), Some("28000"), "{nameless}");
    let stranger = Authority::new("another authority")?;
    assert!(Client::connect(&options.tls(Tls::new(&stranger, None)?)).is_err());
    Ok(())
}

#[test]
fn the_client_shows_every_message_of_a_pipeline() -> Result<()> {
    let server = Postgres::start()?;
    let mut client = Client::connect(&server.options("postgres", "postgres"))?;
    let batch = Batch::new()
        .extended("select $1::text", &[Some("a")])
        .sync()
        // The constant is folded when Bind plans the statement, so there is no BindComplete.
        .extended("select 1/0", &[])
        .extended("select 'skipped'", &[])
        .sync()
        .query("select 'b' as x, null; select 'c'");
    let answers = client.exchange(&batch)?;
    let tags: Vec<String> = answers.iter().map(underpass_testkit::Response::tags).collect();
    assert_eq!(tags, ["12TDCZ", "1EZ", "TDCTDCZ"]);
    assert_eq!(answers[0].value(), Some("a"));
    assert_eq!(answers[1].clone().ok().unwrap_err().sqlstate(), Some("22012"));
    assert_eq!(answers[2].column_names(), ["x", "?column?"]);
    assert_eq!(answers[2].rows()[0], [Some("b".into()), None]);
    assert_eq!(answers[2].status(), Some(b'I'));
    assert_eq!(client.parameter("server_encoding"), Some("UTF8"));
    Ok(())
}

#[test]
fn a_cancel_request_reaches_the_statement() -> Result<()> {
    let server = Postgres::start()?;
    let mut client = Client::connect(&server.options("postgres", "postgres"))?;
    client.send(&Batch::new().query("select pg_sleep(60)"))?;
    // The statement must have begun, else the request finds an idle session and is dropped.
    while server.sql_value("select count(*) from pg_stat_activity where query = 'select pg_sleep(60)'")?
        != "1"
    {}
    client.cancel()?;
    assert_eq!(client.response()?.ok().unwrap_err().sqlstate(), Some("57014"));
    client.query("select 1")?;
    Ok(())
}

#[test]
fn data_survives_stop_kill_and_restart_on_the_same_port() -> Result<()> {
    let mut server = Postgres::builder().setting("work_mem", "5MB").start()?;
    let port = server.port();
    server.sql("create table t as select 42 as x")?;
    server.restart()?;
    server.kill()?;
    assert!(Client::connect(&server.options("postgres", "postgres")).is_err());
    server.start_again()?;
    assert_eq!(server.port(), port);
    assert_eq!(server.sql_value("select x from t")?, "42");
    assert_eq!(server.sql_value("show work_mem")?, "5MB");
    server.set(&[("work_mem", "6MB")])?;
    while server.sql_value("show work_mem")? != "6MB" {}
    Ok(())
}

#[test]
fn drop_removes_process_and_directory() -> Result<()> {
    let server = Postgres::start()?;
    let (pid, directory) = (server.pid(), server.socket_dir().to_owned());
    let _open = Client::connect(&server.options("postgres", "postgres"))?;
    drop(server);
    assert!(fs::metadata(format!("/proc/{pid}")).is_err());
    assert!(!directory.exists());
    Ok(())
}
