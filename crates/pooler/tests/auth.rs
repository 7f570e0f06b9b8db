// SPDX-License-Identifier: Apache-2.0
//! Who may enter, with a real PostgreSQL behind: every auth_type against every kind of secret, auth_query, HBA rules, pass-through, and
//! that a login which costs much holds nobody up.

use std::time::{Duration, Instant};

use underpass_testkit::{
    AuthMethod, Batch, Client, Ini, MockServer, Options, Pooler, PoolerKind, Postgres, Reply, Result, Step,
    Underpass,
};

/// `joe`'s password.
const PASSWORD: &str = "s3cret";

fn logs_in(options: &Options) -> Result<()> {
    Client::connect(options)?.query("select 1")?.ok().map(drop)
}

fn refusal(options: &Options) -> (String, String) {
    match Client::connect(options) {
        Ok(_) => ("no error".into(), String::new()),
        Err(error) => (error.sqlstate().unwrap_or_default().to_owned(), error.to_string()),
    }
}

/// PostgreSQL with `joe`, and his secrets as it stores them: md5 and SCRAM.
fn with_joe(method: AuthMethod) -> Result<(Postgres, String, String)> {
    let server = Postgres::builder().auth(method).user("joe", PASSWORD).start()?;
    let stored = "select rolpassword from pg_authid where rolname = 'joe'";
    let mut secrets = Vec::new();
    for encryption in ["md5", "scram-sha-256"] {
        server.sql(&format!(
            "set password_encryption = '{encryption}'; alter role joe password '{PASSWORD}'"
        ))?;
        secrets.push(server.sql_value(stored)?);
    }
    let scram = secrets.pop().unwrap_or_default();
    Ok((server, secrets.pop().unwrap_or_default(), scram))
}

/// The first request for a password, or what is said instead.
fn asked(options: &Options) -> Result<(u8, Vec<u8>)> {
    let mut client = Client::open(options)?;
    client.startup()?;
    let message = client.recv()?;
    // Which mechanism or method; salts differ.
    Ok((message.tag, message.body[..4.min(message.body.len())].to_vec()))
}

#[test]
fn who_does_not_exist_is_asked_for_what_others_are_asked_for() -> Result<()> {
    let (server, md5, scram) = with_joe(AuthMethod::Trust)?;
    for auth_type in ["plain", "md5", "scram-sha-256"] {
        for secret in [PASSWORD, &md5, &scram] {
            let ini = Ini::for_server(&server).set("auth_type", auth_type).userlist("joe", secret);
            let pooler = Underpass::start(&ini)?;
            let [joe, jim] = ["joe", "jim"].map(|user| asked(&pooler.options(user, "postgres")));
            assert_eq!(joe?, jim?, "auth_type = {auth_type}, {secret}");
        }
    }
    Ok(())
}

#[test]
fn every_auth_type_with_every_kind_of_secret() -> Result<()> {
    let (server, md5, scram) = with_joe(AuthMethod::Trust)?;
    let cases = [
        ("plain", PASSWORD, true),
        ("plain", &md5, true),
        ("plain", &scram, true),
        ("md5", PASSWORD, true),
        ("md5", &md5, true),
        // PgBouncer asks such users by SCRAM.
        ("md5", &scram, true),
        ("scram-sha-256", PASSWORD, true),
        ("scram-sha-256", &scram, true),
        // An md5 hash proves nothing in SCRAM.
        ("scram-sha-256", &md5, false),
    ];
    for (auth_type, secret, works) in cases {
        let pooler =
            Underpass::start(&Ini::for_server(&server).set("auth_type", auth_type).userlist("joe", secret))?;
        let joe = pooler.options("joe", "postgres");
        let kind = &secret[..secret.len().min(6)];
        assert_eq!(logs_in(&joe.clone().password(PASSWORD)).is_ok(), works, "{auth_type} with {kind}");
        // Who has the wrong password and who does not exist are told the same.
        let wrong = refusal(&joe.clone().password("wrong"));
        assert_eq!(wrong.0, "28P01", "{auth_type} with {kind}: {}", wrong.1);
        let nobody = refusal(&joe.user("nobody").password(PASSWORD));
        assert_eq!(nobody.0, "28P01", "{auth_type} with {kind}: {}", nobody.1);
        assert_eq!(wrong.1.replace("joe", "?"), nobody.1.replace("nobody", "?"));
    }
    Ok(())
}

#[test]
fn servers_are_logged_in_with_what_the_list_or_the_client_gives() -> Result<()> {
    let (server, _, scram) = with_joe(AuthMethod::Scram)?;
    // A stored password; a SCRAM secret that is the server's own, so that the client's keys pass through; a password in the connection
    // string of a forced user.
    let base = Ini::for_server(&server).set("auth_type", "scram-sha-256");
    for ini in [base.clone().userlist("joe", PASSWORD), base.clone().userlist("joe", &scram)] {
        let pooler = Underpass::start(&ini)?;
        let mut client = Client::connect(&pooler.options("joe", "postgres").password(PASSWORD))?;
        assert_eq!(client.query("select current_user")?.ok()?.value(), Some("joe"));
    }
    let forced =
        format!("host=127.0.0.1 port={} dbname=postgres user=joe password={PASSWORD}", server.port());
    let pooler = Underpass::start(&Ini::new().database("db", &forced).userlist("app", "other"))?;
    let mut client = Client::connect(&pooler.options("app", "db"))?;
    assert_eq!(client.query("select current_user")?.ok()?.value(), Some("joe"));
    // Clear text from the client serves both ends.
    let pooler = Underpass::start(&base.set("auth_type", "plain").userlist("joe", &scram))?;
    logs_in(&pooler.options("joe", "postgres").password(PASSWORD))
}

#[test]
fn auth_query_finds_whom_the_list_does_not_know() -> Result<()> {
    let (server, _, _) = with_joe(AuthMethod::Trust)?;
    server.sql("create role late login password 'x' valid until '2001-01-01'; create role open login")?;
    let ini = Ini::for_server(&server)
        .set("auth_type", "scram-sha-256")
        .set("auth_user", "postgres")
        .set("auth_dbname", "postgres");
    let pooler = Underpass::start(&ini)?;
    let joe = pooler.options("joe", "postgres").password(PASSWORD);
    logs_in(&joe)?;
    for (user, password) in [("joe", "wrong"), ("late", "x"), ("open", ""), ("o'; select '1", "x")] {
        let (sqlstate, text) = refusal(&joe.clone().user(user).password(password));
        assert_eq!(sqlstate, "28P01", "{user}: {text}");
    }
    // A password that changes is the new one at the next login.
    server.sql("alter role joe password 'changed'")?;
    assert_eq!(refusal(&joe).0, "28P01");
    logs_in(&joe.password("changed"))
}

/// Drivers that know they will be asked for a password may send it at once; it waits until the pooler knows what it is to be.
#[test]
fn a_password_that_comes_before_it_is_asked_for_counts() -> Result<()> {
    let (server, _, _) = with_joe(AuthMethod::Trust)?;
    let ini = Ini::for_server(&server)
        .set("auth_type", "plain")
        .set("auth_user", "postgres")
        .set("auth_query", &format!("select $1::text, '{PASSWORD}'"));
    let pooler = Underpass::start(&ini)?;
    for (password, last) in [(PASSWORD, b'Z'), ("wrong", b'E')] {
        let mut client = Client::open(&pooler.options("joe", "postgres"))?;
        let parameters = [("user", "joe"), ("database", "postgres")];
        client.send(&Batch::new().startup(0x0003_0000, &parameters).password(password))?;
        loop {
            let tag = client.recv()?.tag;
            assert!(b"RSKZE".contains(&tag), "{}", char::from(tag));
            if b"ZE".contains(&tag) {
                assert_eq!(char::from(tag), char::from(last), "{password}");
                break;
            }
        }
    }
    Ok(())
}

/// Of several rows the last is taken, as by PgBouncer; a query that fails, or that never ends, is PgBouncer's `bouncer config error`.
#[test]
fn an_auth_query_that_answers_too_much_ends() -> Result<()> {
    let (server, _, _) = with_joe(AuthMethod::Trust)?;
    let joe = "select rolname, rolpassword from pg_authid where rolname = $1";
    let cases = [
        ("last of two rows", format!("select $1, 'not this' union all {joe}"), None),
        ("a column too many", "select $1::text, 'a', 'b'".to_owned(), Some("expected 2 columns")),
        ("an error", "select $1::text, (1 / 0)::text".into(), Some("division by zero")),
        ("a huge secret", "select $1::text, repeat('x', 50000000)".into(), Some("longer than 65536 bytes")),
        (
            "rows without end",
            "select $1::text, generate_series(1, 2000000000)::text".into(),
            Some("longer than 65536 bytes"),
        ),
    ];
    for (what, query, why) in cases {
        let ini = Ini::for_server(&server)
            .set("auth_type", "scram-sha-256")
            .set("auth_user", "postgres")
            .set("auth_query", &query);
        let pooler = Underpass::start(&ini)?;
        let options = pooler.options("joe", "postgres").password(PASSWORD);
        let Some(why) = why else {
            logs_in(&options)?;
            continue;
        };
        let before = pooler.resident_kib()?;
        for _ in 0..3 {
            assert_eq!(
                refusal(&options),
                ("08P01".to_owned(), "FATAL 08P01: bouncer config error".to_owned()),
                "{what}"
            );
        }
        let grown = pooler.resident_kib()?.saturating_sub(before);
        assert!(grown < 8 * 1024, "{what}: {grown} KiB");
        let log = pooler.log();
        let logged = log.matches("closing because: auth_query failed: ").count();
        assert!(logged == 3 && log.contains(why), "{what}: {log}");
        if why.starts_with("longer") {
            assert_eq!(log.matches("closing because: auth_query: the answer is longer").count(), 3, "{log}");
            let left =
                "select count(*) from pg_stat_activity where query like '%$1%' and pid <> pg_backend_pid()";
            let begun = Instant::now();
            while server.sql_value(left)? != "0" {
                assert!(begun.elapsed().as_secs() < 30, "{what}: a server still answers");
                std::thread::sleep(Duration::from_millis(30));
            }
        }
    }
    Ok(())
}

#[test]
fn the_first_hba_rule_that_fits_decides() -> Result<()> {
    let (server, md5, scram) = with_joe(AuthMethod::Trust)?;
    server.sql("create role open login")?;
    let hba = "\
        # who, where, how\n\
        local   all       joe                   trust\n\
        host    template1 joe     127.0.0.1/32  reject\n\
        host    postgres  joe     127.0.0.1/32  scram-sha-256\n\
        host    postgres  maria   0.0.0.0/0     md5\n\
        hostssl all       all     all           trust\n\
        host    all       \"open\"  127.0.0.0/8   trust\n";
    let ini = Ini::for_server(&server)
        .userlist("joe", &scram)
        .userlist("maria", &md5.replace("joe", "maria"))
        .userlist("open", "")
        .hba(hba);
    let pooler = Underpass::start(&ini)?;
    let joe = pooler.options("joe", "postgres");
    logs_in(&joe.clone().password(PASSWORD))?;
    assert_eq!(refusal(&joe.clone().password("wrong")).0, "28P01");
    Client::connect(&joe.clone().unix(pooler.directory()))?;
    for (user, database) in [("joe", "template1"), ("maria", "template1"), ("postgres", "postgres")] {
        let (sqlstate, text) = refusal(&pooler.options(user, database).password(PASSWORD));
        assert_eq!(sqlstate, "28000", "{user} to {database}: {text}");
    }
    Client::connect(&pooler.options("open", "template1")).map(drop)
}

/// What is not built says so when the pooler starts, not when the first client comes.
#[test]
fn ldap_and_pam_are_refused_by_name() -> Result<()> {
    let server = Postgres::start()?;
    for method in ["ldap", "pam"] {
        let rule = format!("host all all all {method}\n");
        let inis = [Ini::for_server(&server).hba(&rule), Ini::for_server(&server).set("auth_type", method)];
        for ini in inis {
            let (status, log) = PoolerKind::Underpass.start_refused(&ini)?;
            assert!(!status.success() && log.contains(method), "{method}: {log}");
        }
    }
    Ok(())
}

/// One thread, and a password that takes PBKDF2 long: others are served meanwhile, from the client's side and from the server's.
#[test]
fn a_costly_login_holds_nobody_up() -> Result<()> {
    let server = Postgres::start()?;
    let slow = MockServer::start(|_| {
        vec![
            Step::Startup,
            Step::Send(Reply::new().authentication(10, b"SCRAM-SHA-256\0\0")),
            Step::Expect(b'p'),
            Step::Call(Box::new(|message| {
                // The client's nonce with an addition, as a real server would, and many rounds.
                let body = message.map(|message| message.body.clone()).unwrap_or_default();
                let text = String::from_utf8_lossy(&body).into_owned();
                let nonce = text.rsplit("r=").next().unwrap_or_default();
                let first = format!("r={nonce}x,s=c2FsdA==,i=200000");
                Reply::new().authentication(11, first.as_bytes())
            })),
            Step::Expect(b'p'),
            Step::Send(Reply::new().error("FATAL", "28P01", "password authentication failed")),
            Step::WaitClose,
        ]
    })?;
    let ini = Ini::for_server(&server)
        .database("slow", &format!("host=127.0.0.1 port={} user=joe password={PASSWORD}", slow.port()))
        .userlist("joe", PASSWORD)
        .set("auth_type", "scram-sha-256")
        .set("scram_iterations", "50000")
        .set("pool_mode", "transaction")
        .set("server_tls_sslmode", "disable")
        .set("admin_users", "postgres")
        .userlist("postgres", "")
        .tail("[underpass]\nthreads = 1");
    let pooler = Underpass::start(&ini)?;
    let joe = pooler.options("joe", "postgres").password(PASSWORD);
    server.sql("create role joe login")?;
    // The first login of a stored password derives its keys; then they are known.
    let begun = Instant::now();
    let mut client = Client::connect(&joe.clone().read_timeout(Duration::from_secs(60)))?;
    let cost = begun.elapsed();
    assert!(cost > Duration::from_millis(100), "the test needs a login that takes long: {cost:?}");
    client.query("select 1")?.ok()?;
    let to_slow = joe.database("slow").read_timeout(Duration::from_secs(60));
    let stranger = std::thread::spawn(move || refusal(&to_slow));
    // The pooler derives between its first SCRAM message to the server and the second one.
    let sent = || slow.received().iter().filter(|(_, message)| message.tag == b'p').count();
    let (mut served, mut begun) = (0, Instant::now());
    while sent() < 2 {
        client.query("select 1")?.ok()?;
        if sent() == 0 {
            begun = Instant::now();
        } else {
            served += 1;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{}", pooler.log());
    }
    // Held up, it would have been served once or twice in all that time.
    let took = begun.elapsed();
    assert!(took > cost / 2 && served > 10, "{served} in {took:?}, with a login of {cost:?}");
    let (_, told) = stranger.join().expect("no panic");
    assert!(told.contains("password authentication failed"), "{told}");
    Ok(())
}

/// What would be left out may be a `reject`.
#[test]
fn a_reload_with_a_rule_that_cannot_be_read_keeps_the_old_ones() -> Result<()> {
    let (server, _, scram) = with_joe(AuthMethod::Trust)?;
    let with = |rule: &str| {
        let hba = format!("local all all trust\n{rule}\nhost all all 0.0.0.0/0 trust\n");
        Ini::for_server(&server).userlist("joe", &scram).hba(&hba)
    };
    let mut pooler = Underpass::start(&with("host all joe 127.0.0.0/8 reject"))?;
    let joe = pooler.options("joe", "postgres");
    assert_eq!(refusal(&joe).0, "28000");
    pooler.rewrite(&with("host all joe 127.0.0.0/88 reject"))?;
    assert!(pooler.console("RELOAD").and_then(|response| response.ok()).is_err());
    assert_eq!(refusal(&joe).0, "28000", "the old rules are in force");
    // What is about something else reads no rules.
    pooler.console("SET query_wait_notify = 7")?.ok()?;
    assert_eq!(refusal(&joe).0, "28000");
    assert!(pooler.console("SET auth_hba_file = '/nonexistent'").and_then(|response| response.ok()).is_err());
    pooler.rewrite(&with("# nobody is refused"))?;
    pooler.console("RELOAD")?.ok()?;
    Client::connect(&joe).map(drop)
}

/// With `any` a name is not proved: whoever comes may look, and the listed ones act.
#[test]
fn any_lets_everybody_look_into_the_console() -> Result<()> {
    let server = Postgres::start()?;
    let ini = Ini::for_server(&server).set("auth_type", "any").set("admin_users", "boss");
    let pooler = Underpass::start(&ini)?;
    let run = |user: &str, command: &str| {
        Client::connect(&pooler.options(user, "pgbouncer")).and_then(|mut client| client.query(command)?.ok())
    };
    run("stranger", "SHOW POOLS")?;
    for command in ["SHOW FDS", "RELOAD", "PAUSE", "SET verbose = 1", "KILL_CLIENT 1", "SHUTDOWN"] {
        let told = run("stranger", command).expect_err(command).to_string();
        assert!(told.contains("admin access needed"), "{command}: {told}");
    }
    run("boss", "RELOAD").map(drop)
}

/// `password` is the forced user's. Nobody else is logged in with it, so that no server hears it under another name.
#[test]
fn a_databases_password_is_its_users_alone() -> Result<()> {
    let (server, _, _) = with_joe(AuthMethod::Scram)?;
    server.sql(
        "create role asker superuser login password 'ask';
         create role maria login password 'hers'",
    )?;
    let to = |rest: &str| format!("host=127.0.0.1 port={} dbname=postgres {rest}", server.port());
    let ini = Ini::new()
        .database("forced", &to(&format!("user=joe password={PASSWORD} auth_user=asker")))
        .database("no_user", &to("password=nobodys"))
        .database("both", &to("password=nobodys auth_user=asker"))
        .set("auth_type", "scram-sha-256")
        .userlist("asker", "ask");
    let pooler = Underpass::start(&ini)?;
    let maria = pooler.options("maria", "forced").password("hers");
    let who = |options: &Options| -> Result<Option<String>> {
        let response = Client::connect(options)?.query("select current_user")?.ok()?;
        Ok(response.value().map(str::to_owned))
    };
    assert_eq!(who(&maria)?.as_deref(), Some("joe"));
    assert_eq!(who(&maria.clone().database("both"))?.as_deref(), Some("maria"));
    let asker = pooler.options("asker", "no_user").password("ask");
    assert_eq!(who(&asker)?.as_deref(), Some("asker"));
    Ok(())
}

/// Which databases there are, and how many clients they and their users have, is for those who proved who they are.
#[test]
fn what_is_wrong_is_told_after_the_login() -> Result<()> {
    let (server, _, scram) = with_joe(AuthMethod::Trust)?;
    let to = |rest: &str| format!("host=127.0.0.1 port={} dbname=postgres {rest}", server.port());
    // Without `*`, which has every name.
    let ini = Ini::new()
        .database("postgres", &to(""))
        .set("pool_mode", "transaction")
        .set("auth_type", "md5")
        .database("off", &to(""))
        .database("full", &to("max_db_client_connections=1"))
        .user("joe", "max_user_client_connections=2")
        .userlist("joe", &scram);
    let pooler = Underpass::start(&ini)?;
    pooler.console("DISABLE off")?.ok()?;
    let joe = pooler.options("joe", "postgres").password(PASSWORD);
    // Half a login counts for nobody.
    let mut halves = Vec::new();
    for database in ["full", "full", "postgres", "postgres"] {
        let mut half = Client::open(&joe.clone().database(database))?;
        half.startup()?;
        assert_eq!(half.recv()?.tag, b'R');
        halves.push(half);
    }
    let one = Client::connect(&joe.clone().database("full"))?;
    let cases = [("gone", "3D000"), ("off", "57P03"), ("full", "53300")];
    for (database, sqlstate) in cases {
        let to = joe.clone().database(database);
        assert_eq!(refusal(&to).0, sqlstate, "{database}");
        let wrong = refusal(&to.clone().password("wrong"));
        assert_eq!(wrong.0, "28P01", "{database}: {}", wrong.1);
        assert_eq!(wrong, refusal(&joe.clone().password("wrong")));
        assert_eq!(refusal(&to.user("nobody")).0, "28P01", "{database}");
    }
    let two = Client::connect(&joe)?;
    assert_eq!(refusal(&joe).0, "53300", "joe's limit");
    assert_eq!(refusal(&joe.clone().password("wrong")).0, "28P01");
    drop((one, two, halves));
    Ok(())
}

/// The console has no server of its own; `auth_dbname` has one.
#[test]
fn auth_query_finds_the_users_of_the_console() -> Result<()> {
    let (server, _, _) = with_joe(AuthMethod::Trust)?;
    let ini = Ini::new()
        .database("postgres", &format!("host=127.0.0.1 port={}", server.port()))
        .userlist("postgres", "")
        .set("auth_type", "scram-sha-256")
        .set("auth_user", "postgres")
        .set("stats_users", "joe");
    let joe = |pooler: &Underpass| pooler.options("joe", "pgbouncer").password(PASSWORD);
    let pooler = Underpass::start(&ini)?;
    assert_eq!(refusal(&joe(&pooler)).0, "28P01", "nobody to ask");
    let pooler = Underpass::start(&ini.set("auth_dbname", "postgres"))?;
    Client::connect(&joe(&pooler))?.query("SHOW POOLS")?.ok()?;
    assert_eq!(refusal(&joe(&pooler).password("wrong")).0, "28P01");
    server.sql("create role maria login password 'hers'")?;
    let (_, told) = refusal(&joe(&pooler).user("maria").password("hers"));
    assert!(told.contains("not allowed"), "{told}");
    // As unknown to a database that is not there as to one that is.
    let gone = joe(&pooler).database("gone");
    assert_eq!(refusal(&gone).0, "3D000");
    assert_eq!(refusal(&gone.password("wrong")).0, "28P01");
    Ok(())
}

/// As with PgBouncer a file of users that is gone is no reason to leave everything as it was.
#[test]
fn a_reload_does_without_an_auth_file_that_is_gone() -> Result<()> {
    let (server, _, scram) = with_joe(AuthMethod::Trust)?;
    let ini = Ini::new().set("auth_type", "scram-sha-256").userlist("joe", &scram);
    let mut pooler = Underpass::start(&ini)?;
    let second = format!("host=127.0.0.1 port={} dbname=postgres", server.port());
    pooler.rewrite(&ini.clone().database("second", &second))?;
    let list = pooler.directory().join("userlist.txt");
    assert!(list.exists());
    std::fs::remove_file(&list).expect("the test's own file");
    pooler.console("SET auth_query = 'select 1'")?.ok()?;
    pooler.console("SET auth_type = 'md5'")?.ok()?;
    pooler.console("RELOAD")?.ok()?;
    pooler.wait_log("its users stay as they were", Duration::from_secs(10))?;
    logs_in(&pooler.options("joe", "second").password(PASSWORD))?;
    assert!(pooler.console("SET auth_file = '/nonexistent'").and_then(|response| response.ok()).is_err());
    logs_in(&pooler.options("joe", "second").password(PASSWORD))
}

/// What nobody uses is no reason not to serve: PgBouncer starts with all of these, and those who do not need it get in.
#[test]
fn a_start_goes_on_without_what_nobody_uses() -> Result<()> {
    let (server, _, scram) = with_joe(AuthMethod::Trust)?;
    let ini = Ini::for_server(&server).userlist("joe", &scram);
    let cases = [
        (ini.clone().set("auth_type", "scram-sha-256").set("auth_ident_file", "/nonexistent/maps"), ""),
        (ini.clone().set("auth_type", "scram-sha-256").set("auth_dbname", "gone"), ""),
        (
            ini.hba("local all all trust\nhostssl all maria all cert\nhost all joe all scram-sha-256\n"),
            "line 2: cert needs client_tls_sslmode and client_tls_ca_file",
        ),
    ];
    for (ini, warned) in cases {
        let pooler = Underpass::start(&ini)?;
        logs_in(&pooler.options("joe", "postgres").password(PASSWORD))?;
        assert!(pooler.log().contains(warned), "{}", pooler.log());
        // A RELOAD is no stricter.
        pooler.console("RELOAD")?.ok()?;
    }
    Ok(())
}
