// SPDX-License-Identifier: Apache-2.0
//! TLS on both sides, with real certificates: which sslmode does what, and what happens when the peer wants it otherwise.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use underpass_testkit::{
    Authority, Batch, Client, Direction, Fault, FaultProxy, Ini, MockServer, Pooler, PoolerKind, Postgres,
    Reply, Result, Signal, Step, Tls, Underpass,
};

const IS_ENCRYPTED: &str = "select ssl from pg_stat_ssl where pid = pg_backend_pid()";

/// A pool in front of `port` whose servers are logged in with this `server_tls_sslmode`.
fn pool(port: u16, sslmode: &str) -> Ini {
    Ini::new()
        .database("db", &format!("host=127.0.0.1 port={port} dbname=postgres"))
        .userlist("postgres", "")
        .set("pool_mode", "transaction")
        .set("server_tls_sslmode", sslmode)
}

/// What a client of the pool is told by `sql`: the value, or the error.
fn answer(ini: &Ini, sql: &str) -> Result<String> {
    let pooler = Underpass::start(ini)?;
    let asked =
        Client::connect(&pooler.options("postgres", "db")).and_then(|mut client| client.query(sql)?.ok());
    Ok(asked
        .map_or_else(|error| error.to_string(), |response| response.value().unwrap_or_default().to_owned()))
}

#[test]
fn server_sslmode_follows_what_pg_hba_conf_lets_in() -> Result<()> {
    let authority = Authority::new("test")?;
    let both = Postgres::builder().tls(&authority).start()?;
    let tls_only = Postgres::builder().tls(&authority).hba("hostssl all all all trust").start()?;
    let plain_only = Postgres::builder().tls(&authority).hba("hostnossl all all all trust").start()?;
    let none = Postgres::start()?;
    let cases = [
        ("disable", &both, "f"),
        ("allow", &both, "f"),
        ("prefer", &both, "t"),
        ("require", &both, "t"),
        ("allow", &tls_only, "t"),
        ("prefer", &tls_only, "t"),
        ("disable", &tls_only, "no encryption"),
        ("allow", &plain_only, "f"),
        ("prefer", &plain_only, "f"),
        ("require", &plain_only, "SSL encryption"),
        ("allow", &none, "f"),
        ("prefer", &none, "f"),
        ("require", &none, "server refused TLS"),
    ];
    for (sslmode, server, expected) in cases {
        let told = answer(&pool(server.port(), sslmode), IS_ENCRYPTED)?;
        let is_it = if expected.len() == 1 { told == expected } else { told.contains(expected) };
        assert!(is_it, "{sslmode}: expected {expected}, got {told}");
    }
    Ok(())
}

#[test]
fn server_certificates_are_checked_as_far_as_the_mode_says() -> Result<()> {
    let (authority, stranger) = (Authority::new("test")?, Authority::new("stranger")?);
    let server = Postgres::builder().tls(&authority).start()?;
    let directory = server.socket_dir();
    let trusted = authority.write(directory, "trusted")?.display().to_string();
    let other = stranger.write(directory, "other")?.display().to_string();
    let to = |host: &str, mode: &str, ca: &str| {
        Ini::new()
            .database("db", &format!("host={host} port={} dbname=postgres", server.port()))
            .userlist("postgres", "")
            .set("server_tls_sslmode", mode)
            .set("server_tls_ca_file", ca)
    };
    assert_eq!(answer(&to("127.0.0.1", "verify-ca", &trusted), IS_ENCRYPTED)?, "t");
    assert_eq!(answer(&to("127.0.0.1", "verify-full", &trusted), IS_ENCRYPTED)?, "t");
    assert_eq!(answer(&to("localhost", "verify-full", &trusted), IS_ENCRYPTED)?, "t");
    for mode in ["verify-ca", "verify-full"] {
        let told = answer(&to("127.0.0.1", mode, &other), IS_ENCRYPTED)?;
        assert!(told.contains("TLS handshake failed"), "{mode}: {told}");
    }
    Ok(())
}

/// A server that agrees to TLS and cannot do it. Prefer goes on without, require does not.
#[test]
fn a_handshake_that_fails_is_not_the_end_of_prefer() -> Result<()> {
    let broken = || {
        MockServer::start(|index| match index {
            0 => vec![
                Step::Startup,
                Step::Send(Reply::new().raw(b"S")),
                Step::Send(Reply::new().raw(&[0; 32])),
                Step::WaitClose,
            ],
            _ => vec![Step::Login, Step::Serve],
        })
    };
    let server = broken()?;
    assert_eq!(answer(&pool(server.port(), "prefer"), "select")?, "1", "the second connection serves");
    let startups: Vec<_> = server.received().into_iter().filter(|(_, message)| message.tag == 0).collect();
    assert_eq!(startups.iter().filter(|(index, _)| *index == 1).count(), 1, "no SSLRequest the second time");
    // Who looks learns that it is not encrypted, and is not told at every connection.
    let server = MockServer::start(|index| match index % 2 {
        0 => {
            vec![
                Step::Startup,
                Step::Send(Reply::new().raw(b"S")),
                Step::Send(Reply::new().raw(&[0; 32])),
                Step::WaitClose,
            ]
        }
        _ => vec![Step::Login, Step::Serve],
    })?;
    let pooler = Underpass::start(&pool(server.port(), "prefer").set("pool_mode", "session"))?;
    let mut clients = Vec::new();
    for _ in 0..2 {
        let mut client = Client::connect(&pooler.options("postgres", "db"))?;
        client.query("select")?.ok()?;
        clients.push(client);
    }
    let log = pooler.log();
    assert_eq!(log.matches("connections to host 127.0.0.1 are not encrypted").count(), 1, "{log}");
    let server = broken()?;
    let told = answer(&pool(server.port(), "require"), "select")?;
    assert!(told.contains("TLS handshake failed"), "{told}");
    Ok(())
}

/// A wrong password is wrong with and without TLS, and must not count twice with the server.
#[test]
fn a_wrong_password_is_not_tried_the_other_way() -> Result<()> {
    let refusal = Reply::new().error("FATAL", "28P01", "password authentication failed");
    let refusals = move |_| vec![Step::Startup, Step::Send(refusal.clone()), Step::WaitClose];
    let server = MockServer::start(refusals)?;
    let told = answer(&pool(server.port(), "allow"), "select")?;
    assert!(told.contains("password authentication failed"), "{told}");
    assert_eq!(server.received().iter().filter(|(_, message)| message.tag == 0).count(), 1);
    Ok(())
}

#[test]
fn client_sslmodes_and_certificates() -> Result<()> {
    let (authority, stranger) = (Authority::new("test")?, Authority::new("stranger")?);
    let server = Postgres::start()?;
    server.sql("create role joe login")?;
    let directory = server.socket_dir();
    let (cert, key) = authority.server(&["localhost", "127.0.0.1"])?.write(directory, "pooler")?;
    let ca = authority.write(directory, "ca")?;
    let base = Ini::for_server(&server)
        .userlist("joe", "")
        .set("client_tls_cert_file", &cert.display().to_string())
        .set("client_tls_key_file", &key.display().to_string());
    let (joe, forged) = (authority.client("joe")?, stranger.client("joe")?);
    let anonymous = Tls::new(&authority, None)?;
    let can = |pooler: &Underpass, tls: Option<&Tls>| {
        let options = pooler.options("joe", "postgres");
        let options = tls.map_or(options.clone(), |tls| options.tls(tls.clone()));
        Client::connect(&options).and_then(|mut client| client.query("select 1")?.ok()).map(drop)
    };

    for mode in ["allow", "prefer"] {
        let pooler = Underpass::start(&base.clone().set("client_tls_sslmode", mode))?;
        can(&pooler, None)?;
        can(&pooler, Some(&anonymous))?;
    }
    let pooler = Underpass::start(&base.clone().set("client_tls_sslmode", "require"))?;
    can(&pooler, Some(&anonymous))?;
    assert!(can(&pooler, None).is_err_and(|error| error.to_string().contains("SSL required")));
    // Unix sockets are not asked for TLS.
    Client::connect(&pooler.options("joe", "postgres").unix(pooler.directory()))?.query("select 1")?.ok()?;

    let checked =
        base.set("client_tls_ca_file", &ca.display().to_string()).set("client_tls_sslmode", "verify-full");
    let forced = format!("host=127.0.0.1 port={} dbname=postgres user=joe", server.port());
    let running = rustix::process::getuid();
    let own = nix::unistd::User::from_uid(running.as_raw().into())
        .expect("the list of users")
        .expect("a user")
        .name;
    let pooler = Underpass::start(
        &checked.clone().set("auth_type", "cert").userlist(&own, "").database("forced", &forced),
    )?;
    can(&pooler, Some(&Tls::new(&authority, Some(&joe))?))?;
    assert!(can(&pooler, Some(&anonymous)).is_err());
    assert!(can(&pooler, Some(&Tls::new(&authority, Some(&forged))?)).is_err(), "signed by a stranger");
    let maria = Tls::new(&authority, Some(&authority.client("maria")?))?;
    let told = can(&pooler, Some(&maria)).expect_err("the certificate names somebody else").to_string();
    assert!(told.contains("28000") || told.contains("authentication failed"), "{told}");
    // The handshake of one who says nothing does not hold up others.
    let silent = Client::open(&pooler.options("joe", "postgres"))?;
    can(&pooler, Some(&Tls::new(&authority, Some(&joe))?))?;
    drop(silent);
    // No certificate on a unix socket, whoever comes by it: the name of the process' user counts for nothing.
    for user in [&own, "joe"] {
        let options = pooler.options(user, "forced").unix(pooler.directory());
        let told = Client::connect(&options).map(drop).expect_err("no certificate").to_string();
        assert!(told.contains("28000") || told.contains("authentication failed"), "{user}: {told}");
    }

    // A map says as whom else the holder of a certificate may come.
    let ident = directory.join("ident.conf");
    std::fs::write(&ident, "people maria joe\n").expect("the test's own file");
    let mapped = checked
        .set("auth_ident_file", &ident.display().to_string())
        .hba("local all all trust\nhostssl all joe all cert map=people\n");
    let pooler = Underpass::start(&mapped)?;
    can(&pooler, Some(&maria))?;
    for other in [&joe, &authority.client("paul")?] {
        let told =
            can(&pooler, Some(&Tls::new(&authority, Some(other))?)).expect_err("not in the map").to_string();
        assert!(told.contains("28000") || told.contains("authentication failed"), "{told}");
    }
    Ok(())
}

/// As in PgBouncer: with a CA and a mode that demands no certificates those who have one come by it, and others as the rules let them.
#[test]
fn cert_rules_hold_where_certificates_are_not_demanded() -> Result<()> {
    let (authority, stranger) = (Authority::new("test")?, Authority::new("stranger")?);
    let server = Postgres::start()?;
    server.sql("create role joe login; create role maria login")?;
    let directory = server.socket_dir();
    let (cert, key) = authority.server(&["localhost", "127.0.0.1"])?.write(directory, "pooler")?;
    let ini = Ini::for_server(&server)
        .userlist("joe", "")
        .userlist("maria", "hers")
        .set("client_tls_cert_file", &cert.display().to_string())
        .set("client_tls_key_file", &key.display().to_string())
        .set("client_tls_ca_file", &authority.write(directory, "ca")?.display().to_string())
        .hba("local all all trust\nhostssl all joe all cert\nhost all maria all scram-sha-256\n");
    let (joe, forged) = (authority.client("joe")?, stranger.client("joe")?);
    let anonymous = Tls::new(&authority, None)?;
    for mode in ["allow", "prefer", "require"] {
        let pooler = Underpass::start(&ini.clone().set("client_tls_sslmode", mode))?;
        let can = |user: &str, tls: &Tls| {
            let options = pooler.options(user, "postgres").password("hers").tls(tls.clone());
            Client::connect(&options).and_then(|mut client| client.query("select 1")?.ok()).map(drop)
        };
        can("joe", &Tls::new(&authority, Some(&joe))?)?;
        let told = can("joe", &anonymous).expect_err("no certificate").to_string();
        assert!(told.contains("28000") || told.contains("authentication failed"), "{mode}: {told}");
        assert!(can("joe", &Tls::new(&authority, Some(&forged))?).is_err(), "{mode}: signed by a stranger");
        can("maria", &anonymous)?;
        can("maria", &Tls::new(&authority, Some(&joe))?)?;
        assert!(can("maria", &Tls::new(&authority, Some(&forged))?).is_err(), "{mode}: in the handshake");
    }
    Ok(())
}

/// `RELOAD` with new certificates: who is connected stays, who comes sees the new one.
#[test]
fn certificates_are_exchanged_under_running_clients() -> Result<()> {
    let (old, new) = (Authority::new("old")?, Authority::new("new")?);
    let server = Postgres::start()?;
    let directory = server.socket_dir();
    let (cert, key) = old.server(&["127.0.0.1"])?.write(directory, "pooler")?;
    let ini = Ini::for_server(&server)
        .set("client_tls_sslmode", "require")
        .set("client_tls_cert_file", &cert.display().to_string())
        .set("client_tls_key_file", &key.display().to_string());
    let pooler = Underpass::start(&ini)?;
    let by = |authority: &Authority| -> Result<Client> {
        Client::connect(&pooler.options("postgres", "postgres").tls(Tls::new(authority, None)?))
    };
    let mut before = by(&old)?;
    before.query("begin")?.ok()?;
    new.server(&["127.0.0.1"])?.write(directory, "pooler")?;
    pooler.console("RELOAD")?.ok()?;
    by(&new)?.query("select 1")?.ok()?;
    assert!(by(&old).is_err());
    before.query("commit")?.ok()?;
    // A certificate that cannot be read keeps the one in use.
    std::fs::write(&cert, "no certificate").expect("the test's own file");
    assert!(pooler.console("RELOAD").is_err());
    by(&new)?.query("select 1")?.ok()?;
    before.set_read_timeout(Duration::from_secs(2))?;
    before.send(&Batch::new().query("select 2"))?;
    assert_eq!(before.response()?.ok()?.value(), Some("2"));
    Ok(())
}

/// PgBouncer's phrase: for a setting that cannot be applied, and for who begins with TLS and breaks it.
#[test]
fn a_tls_setup_that_fails_is_logged() -> Result<()> {
    let authority = Authority::new("test")?;
    let server = Postgres::start()?;
    let (cert, key) = authority.server(&["127.0.0.1"])?.write(server.socket_dir(), "pooler")?;
    let ini = Ini::for_server(&server)
        .set("client_tls_sslmode", "allow")
        .set("client_tls_cert_file", &cert.display().to_string())
        .set("client_tls_key_file", &key.display().to_string());
    let mut pooler = Underpass::start(&ini)?;
    let _ = pooler.console("SET client_tls_cert_file = '/nowhere.crt'")?;
    pooler.wait_log(" ERROR TLS setup failed: ", Duration::from_secs(20))?;
    assert!(pooler.log().contains("/nowhere.crt"), "{}", pooler.log());
    let port = pooler.options("postgres", "postgres");
    let mut client = Client::open(&port)?;
    // A record with a ClientHello of no length.
    client.send_bytes(&[0x16, 3, 1, 0, 4, 1, 0, 0, 0])?;
    pooler.wait_log("closing because: TLS setup failed: ", Duration::from_secs(20))?;
    // Others go on.
    Client::connect(&port.tls(Tls::new(&authority, None)?))?.query("select 1")?.ok()?;
    Ok(())
}

/// Between handshake and login a RELOAD may come: a client is what its certificate said when it was shown.
#[test]
fn a_login_is_about_the_handshake_that_it_began_with() -> Result<()> {
    let authority = Authority::new("test")?;
    let server = Postgres::start()?;
    server.sql("create role joe login")?;
    let directory = server.socket_dir();
    let (cert, key) = authority.server(&["localhost", "127.0.0.1"])?.write(directory, "pooler")?;
    let base = Ini::for_server(&server)
        .set("client_tls_cert_file", &cert.display().to_string())
        .set("client_tls_key_file", &key.display().to_string())
        .set("client_tls_ca_file", &authority.write(directory, "ca")?.display().to_string())
        .set("auth_user", "postgres")
        .set("auth_query", "select $1::text, 'x'::text from pg_sleep(1.5)");
    let base = base.hba("local all all trust\nhostssl all joe all cert\n");
    let mut pooler = Underpass::start(&base.clone().set("client_tls_sslmode", "verify-full"))?;
    let joe = pooler.options("joe", "postgres").tls(Tls::new(&authority, Some(&authority.client("joe")?))?);
    let login = std::thread::spawn(move || Client::connect(&joe).map(drop));
    let asks =
        "select count(*) from pg_stat_activity where query like '%pg_sleep(1%' and pid <> pg_backend_pid()";
    while server.sql_value(asks)? == "0" {
        std::thread::sleep(Duration::from_millis(10));
    }
    pooler.rewrite(&base.set("client_tls_sslmode", "require"))?;
    pooler.console("RELOAD")?.ok()?;
    login.join().expect("no panic")
}

/// As PgBouncer: without a file the system's authorities vouch for clients, and nobody else does.
#[test]
fn verify_ca_without_a_file_still_verifies() -> Result<()> {
    let authority = Authority::new("test")?;
    let server = Postgres::start()?;
    let directory = server.socket_dir();
    let (cert, key) = authority.server(&["localhost", "127.0.0.1"])?.write(directory, "pooler")?;
    let ini = Ini::for_server(&server)
        .set("client_tls_cert_file", &cert.display().to_string())
        .set("client_tls_key_file", &key.display().to_string());
    let pooler = Underpass::start(&ini.clone().set("client_tls_sslmode", "verify-ca"))?;
    for identity in [None, Some(authority.client("postgres")?)] {
        let tls = Tls::new(&authority, identity.as_ref())?;
        assert!(Client::connect(&pooler.options("postgres", "postgres").tls(tls)).is_err());
    }
    let (status, log) = PoolerKind::Underpass.start_refused(&ini.set("client_tls_sslmode", "verify-full"))?;
    assert!(!status.success() && log.contains("client_tls_ca_file"), "{log}");
    Ok(())
}

/// A socket is asked for word of room when it has none for the first time: the answer must not end there.
#[test]
fn a_client_that_reads_late_gets_the_whole_answer() -> Result<()> {
    const LENGTH: usize = 20_000_000;
    let authority = Authority::new("test")?;
    let server = Postgres::start()?;
    let (certificate, key) = authority.server(&["127.0.0.1"])?.write(server.socket_dir(), "late")?;
    let ini = pool(server.port(), "disable")
        .set("client_tls_sslmode", "allow")
        .set("client_tls_cert_file", &certificate.display().to_string())
        .set("client_tls_key_file", &key.display().to_string());
    let pooler = Underpass::start(&ini)?;
    let plain = pooler.options("postgres", "db");
    let encrypted = plain.clone().tls(Tls::new(&authority, None)?);
    for options in [&plain, &encrypted, &plain.clone().unix(pooler.directory())] {
        let mut client = Client::connect(options)?;
        for _ in 0..2 {
            client.send(&Batch::new().query(&format!("select repeat('x', {LENGTH})")))?;
            std::thread::sleep(Duration::from_millis(300));
            let answer = client.response()?.ok()?;
            assert_eq!(answer.value().map(str::len), Some(LENGTH));
        }
        client.terminate()?;
    }
    Ok(())
}

/// The end of a stream is told once, with what comes before it. Here that is a part of a record, which says nothing by itself.
#[test]
fn a_client_that_breaks_off_within_a_record_leaves_its_server() -> Result<()> {
    let authority = Authority::new("test")?;
    let server = Postgres::start()?;
    let (certificate, key) = authority.server(&["127.0.0.1"])?.write(server.socket_dir(), "cut")?;
    let ini = pool(server.port(), "disable")
        .set("default_pool_size", "1")
        .set("client_tls_sslmode", "allow")
        .set("client_tls_cert_file", &certificate.display().to_string())
        .set("client_tls_key_file", &key.display().to_string());
    let pooler = Underpass::start(&ini)?;
    let options = pooler.options("postgres", "db").read_timeout(Duration::from_secs(10));
    let mut cut = Client::connect(&options.clone().tls(Tls::new(&authority, None)?))?;
    cut.query("begin")?.ok()?;
    pooler.signal(Signal::SIGSTOP)?;
    cut.send_beneath(&[&[0x17, 3, 3, 0x40, 0][..], &[0; 100]].concat())?;
    cut.half_close()?;
    pooler.signal(Signal::SIGCONT)?;
    assert_eq!(Client::connect(&options)?.query("select 1")?.ok()?.value(), Some("1"), "{}", pooler.log());
    Ok(())
}

/// The same of a server, in the middle of an answer.
#[test]
fn a_server_that_breaks_off_within_a_record_ends_its_client() -> Result<()> {
    let authority = Authority::new("test")?;
    let server = Postgres::builder().tls(&authority).start()?;
    let proxy = FaultProxy::start(server.port())?;
    let pooler = Underpass::start(&pool(proxy.port(), "require"))?;
    let mut client =
        Client::connect(&pooler.options("postgres", "db").read_timeout(Duration::from_secs(10)))?;
    client.query("select 1")?.ok()?;
    // PostgreSQL's records have 8 KiB, and nothing of this one can be passed on.
    proxy.set(Direction::ToClient, Fault::CloseAfter(5_000));
    client.send(&Batch::new().query("select repeat('x', 100000) from pg_sleep(0.5)"))?;
    while server.sql_value("select count(*) from pg_stat_activity where wait_event = 'PgSleep'")? == "0" {
        std::thread::sleep(Duration::from_millis(10));
    }
    pooler.signal(Signal::SIGSTOP)?;
    std::thread::sleep(Duration::from_secs(1));
    pooler.signal(Signal::SIGCONT)?;
    let told = client.response().expect_err("nothing has come").to_string();
    assert!(told.contains("server conn crashed?"), "{told}: {}", pooler.log());
    Ok(())
}

/// Without the alert a client cannot tell a version that is not spoken from a connection that broke.
#[test]
fn direct_tls_that_cannot_begin_is_told_why() -> Result<()> {
    let authority = Authority::new("test")?;
    let server = Postgres::start()?;
    let (certificate, key) = authority.server(&["127.0.0.1"])?.write(server.socket_dir(), "direct")?;
    let ini = pool(server.port(), "disable")
        .set("client_tls_sslmode", "allow")
        .set("client_tls_protocols", "tlsv1.3")
        .set("client_tls_cert_file", &certificate.display().to_string())
        .set("client_tls_key_file", &key.display().to_string());
    let pooler = Underpass::start(&ini)?;
    let mut config =
        rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS12])
            .expect("TLS 1.2")
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
    config.alpn_protocols = vec![b"postgresql".to_vec()];
    let name = "localhost".try_into().expect("a name");
    let mut hello = rustls::ClientConnection::new(Arc::new(config), name).expect("a client");
    let mut raw = TcpStream::connect(("127.0.0.1", pooler.port())).expect("connect");
    raw.set_read_timeout(Some(Duration::from_secs(10))).expect("timeout");
    let mut bytes = Vec::new();
    hello.write_tls(&mut bytes).expect("memory");
    raw.write_all(&bytes).expect("hello");
    let mut told = Vec::new();
    raw.read_to_end(&mut told).expect("the end of the connection");
    // RFC 8446, 6: an alert, fatal, protocol_version.
    assert!(told.len() == 7 && told[0] == 0x15 && told[5..] == [2, 70], "{told:?}: {}", pooler.log());
    Ok(())
}
