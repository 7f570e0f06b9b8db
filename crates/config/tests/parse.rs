// SPDX-License-Identifier: Apache-2.0
//! Whole files: sections, includes, overlays, connection strings, errors with their places.

use std::path::Path;
use std::time::Duration;

use underpass_config::{
    Config, ErrorKind, Errors, Host, KernelPath, LoadBalanceHosts, Loaded, LogFormat, MemFiles, MirrorMode,
    MirrorOverflow, PoolMode, SyncEach, UnixSocketDir,
};

fn parse(text: &str) -> Loaded {
    Config::parse("pgbouncer.ini", text).unwrap_or_else(|e| panic!("{e}"))
}

fn fails(text: &str) -> Errors {
    Config::parse("pgbouncer.ini", text).expect_err("a faulty file")
}

fn database(line: &str) -> underpass_config::Database {
    parse(&format!("[databases]\n{line}\n[pgbouncer]\n"))
        .config
        .databases
        .named
        .into_values()
        .next()
        .expect("a database")
}

#[test]
fn a_usual_file() {
    let loaded = parse(
        "[databases]\nshop = host=10.0.0.1 port=5433 dbname=shop_prod pool_size=50\nforced = host=/run/pg user=app password='it''s' connect_query='select 1'\n* = host=fallback.example\n
[users]\nbatch = pool_mode=session max_user_connections=5\n
[peers]\n1 = host=/run/a\n2 = host=b.example port=7000 pool_size=3\n
[pgbouncer]\nlisten_addr = 127.0.0.1, ::1\nlisten_port=6433\npool_mode = transaction\nadmin_users = root,admin stats\nunix_socket_dir = @under\nquery_timeout = 0.5\n
[underpass]\nthreads = 4\nkernel_path = off\nlog_format = JSON\nmetrics_listen = [::1]:9127\n",
    );
    assert_eq!(loaded.warnings, []);
    let c = loaded.config;
    let shop = &c.databases.named["shop"];
    assert_eq!((shop.server_dbname(), shop.port, shop.pool_size), ("shop_prod", 5433, Some(50)));
    assert_eq!(shop.host.as_ref().map(|h| h.hosts()), Some(&[Host::Ip([10, 0, 0, 1].into())][..]));
    let forced = &c.databases.named["forced"];
    assert_eq!(forced.password.as_ref().map(|p| p.expose()), Some("it's"));
    assert_eq!(forced.connect_query.as_deref(), Some("select 1"));
    assert_eq!(c.listen_addr.iter().collect::<Vec<_>>(), ["127.0.0.1", "::1"]);
    assert!(c.admin_users.contains("stats") && !c.admin_users.contains("stat"));
    assert_eq!(c.unix_socket_dir, UnixSocketDir::Abstract("under".into()));
    assert_eq!(c.query_timeout, Duration::from_millis(500));
    assert_eq!(
        (c.underpass.threads, c.underpass.kernel_path, c.underpass.log_format),
        (Some(4), KernelPath::Off, LogFormat::Json)
    );
    assert_eq!(c.peers[&2].port, 7000);
    assert_eq!(c.conffile.as_deref(), Some(Path::new("pgbouncer.ini")));
    assert!(c.is_set("pool_mode") && !c.is_set("max_client_conn") && c.is_set("underpass.threads"));

    let (auto, is_auto) = c.database("other").expect("fall-back");
    assert!(is_auto);
    assert_eq!((auto.name.as_str(), auto.server_dbname()), ("other", "other"));
    assert!(c.database("pgbouncer").is_none(), "the console is no fall-back database");
    assert!(!c.database("shop").expect("named").1);
}

#[test]
fn later_lines_override_earlier_ones() {
    let c =
        parse("[databases]\na = host=x\na = host=y\n[pgbouncer]\npool_mode=session\npool_mode=statement\n")
            .config;
    assert_eq!(c.pool_mode, PoolMode::Statement);
    assert_eq!(c.databases.named["a"].host.as_ref().map(|h| h.as_str()), Some("y"));
}

#[test]
fn a_second_main_section_resets_as_in_pgbouncer() {
    let loaded =
        parse("[pgbouncer]\npool_mode=transaction\nauth_file=u\n[databases]\n[pgbouncer]\nlisten_port=1\n");
    assert_eq!(loaded.config.pool_mode, PoolMode::Session);
    assert_eq!(loaded.config.auth_file.as_deref(), Some(Path::new("u")), "null defaults are not filled in");
    assert_eq!(loaded.config.listen_port, 1);
    assert_eq!(loaded.warnings.len(), 1);
    assert!(loaded.warnings[0].to_string().starts_with("pgbouncer.ini:5: "), "{}", loaded.warnings[0]);
    assert!(loaded.warnings[0].text.contains("pool_mode"));
    assert!(
        parse("[pgbouncer]\n[databases]\n[pgbouncer]\npool_mode=session").warnings.is_empty(),
        "nothing was lost"
    );
}

#[test]
fn overlay_adds_and_does_not_reset() {
    let files = MemFiles::new([
        (
            "p.ini",
            "[pgbouncer]\npool_mode=transaction\nlisten_port=1\n[databases]\na=host=x\n%include more.ini\n",
        ),
        ("more.ini", "[underpass]\nthreads=3\n[databases]\nb=\n"),
        ("u.ini", "[underpass]\nkernel_path=require\n[pgbouncer]\nlisten_port=2\n[databases]\na=host=z\n"),
    ]);
    let c = Config::load_with(&files, &[Path::new("p.ini"), Path::new("u.ini")]).expect("valid").config;
    assert_eq!((c.pool_mode, c.listen_port), (PoolMode::Transaction, 2));
    assert_eq!((c.underpass.threads, c.underpass.kernel_path), (Some(3), KernelPath::Require));
    assert_eq!(c.databases.named["a"].host.as_ref().map(|h| h.as_str()), Some("z"));
    assert!(c.databases.named.contains_key("b"));
    assert_eq!(c.origins["listen_port"].to_string(), "u.ini:4");
    assert_eq!(c.conffile.as_deref(), Some(Path::new("p.ini")));
}

#[test]
fn includes_end_at_ten() {
    let mut files = MemFiles::default();
    for i in 0..12 {
        let text =
            if i < 10 { format!("%include f{}\n", i + 1) } else { "[pgbouncer]\nlisten_port=7\n".into() };
        files.0.insert(format!("f{i}").into(), text.into_bytes());
    }
    assert_eq!(Config::load_with(&files, &[Path::new("f0")]).expect("ten deep").config.listen_port, 7);
    files.0.insert("f10".into(), b"%include f11\n".to_vec());
    files.0.insert("f11".into(), b"[pgbouncer]\n".to_vec());
    let errors = Config::load_with(&files, &[Path::new("f0")]).expect_err("eleven deep");
    assert_eq!(errors.0.len(), 1);
    assert_eq!(
        (errors.0[0].to_string().split(' ').next(), &errors.0[0].kind),
        (Some("f10:1:"), &ErrorKind::IncludeDepth)
    );
}

#[test]
fn a_missing_include_names_who_wanted_it() {
    let error = fails("[pgbouncer]\n%include nowhere.ini\n").to_string();
    assert!(error.starts_with("nowhere.ini: could not load file"), "{error}");
    assert!(error.contains("included from pgbouncer.ini:2"), "{error}");
}

#[test]
fn all_faults_are_reported_with_their_lines() {
    let errors = fails(
        "listen_port = 1\n[pgbouncer]\npool_mod = session\nmax_client_conn = many\nauth_type = pam\n[databases]\npgbouncer = host=x\na = hots=x\nb = port=0\nc = host='x\n[peers]\n0 = host=x\n1 = port=6432\n[users]\nu = pool_mode=fast\n[sessions]\nx = y\n",
    );
    let lines: Vec<u32> = errors.0.iter().map(|e| e.at.line).collect();
    assert_eq!(lines, [1, 3, 4, 5, 7, 8, 9, 10, 12, 13, 15, 16], "{errors}");
    let text = errors.to_string();
    for part in [
        "pgbouncer.ini:3: unknown parameter: pgbouncer/pool_mod; did you mean pool_mode?",
        "pgbouncer.ini:4: invalid value \"many\" for parameter max_client_conn: expected an integer from 0 to 4294967295",
        "pgbouncer.ini:8: unrecognized connection parameter: hots; did you mean host?",
        "pgbouncer.ini:9: invalid value \"0\" for parameter b.port: expected a port from 1 to 65535",
        "pgbouncer.ini:10: syntax error in connection string of \"c\" near host",
        "pgbouncer.ini:16: unknown section [sessions]",
    ] {
        assert!(text.contains(part), "{part}\nin\n{text}");
    }
}

#[test]
fn files_without_main_section_are_refused() {
    assert_eq!(fails("").0[0].kind, ErrorKind::NoMainSection);
    assert_eq!(fails("[databases]\na = host=x\n").0[0].kind, ErrorKind::NoMainSection);
}

#[test]
fn unknown_keys_of_underpass_are_errors() {
    let errors = fails("[pgbouncer]\n[underpass]\ntreads = 2\nlisten_port = 1\n");
    assert!(errors.to_string().contains("underpass/treads; did you mean threads?"), "{errors}");
    assert_eq!(errors.0.len(), 2);
}

#[test]
fn errors_never_show_passwords() {
    for line in [
        "a = password=hunter2 pasword=hunter2",
        "a = password='hunter2",
        "a = password=hunter2 x",
        "a = password='hunter2'x",
    ] {
        let error = fails(&format!("[databases]\n{line}\n[pgbouncer]\n")).to_string();
        assert!(!error.contains("hunter2"), "{error}");
    }
}

#[test]
fn keys_without_effect_warn_once_and_only_off_default() {
    let warnings = |text: &str| parse(text).warnings.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert!(warnings("[pgbouncer]\npkt_buf = 4096\nsbuf_loopcnt=5\nclient_tls_dheparams=auto\n").is_empty());
    let some = warnings("[pgbouncer]\npkt_buf = 8192\npkt_buf = 2048\nservice_name = x\n");
    assert_eq!(some.len(), 2, "{some:?}");
    assert!(some[0].starts_with("pgbouncer.ini:3: pkt_buf has no effect"), "{some:?}");
}

#[test]
fn connection_strings_as_pgbouncer_reads_them() {
    let db = database(
        "\"my \"\"db\"\"\" = host = h1,/run/pg,@abs  port=5 application_name='a''b c' load_balance_hosts=disable reserve_pool=4 query_wait_timeout=1.5 server_lifetime=0 max_db_connections=0 pool_size=-1",
    );
    assert_eq!(db.name, "my \"db\"");
    let hosts = db.host.as_ref().expect("hosts");
    assert_eq!(
        hosts.hosts(),
        [Host::Name("h1".into()), Host::Unix("/run/pg".into()), Host::Abstract("abs".into())]
    );
    assert_eq!(hosts.hosts()[1].socket_path(5).as_deref(), Some(Path::new("/run/pg/.s.PGSQL.5")));
    assert_eq!(hosts.hosts()[2].socket_path(5).as_deref(), Some(Path::new("@abs/.s.PGSQL.5")));
    assert_eq!(db.startup_parameters().collect::<Vec<_>>(), [("application_name", "a'b c")]);
    assert_eq!(db.load_balance_hosts, LoadBalanceHosts::Disable);
    assert_eq!((db.reserve_pool_size, db.query_wait_timeout), (Some(4), Some(Duration::from_millis(1500))));
    assert_eq!((db.server_lifetime, db.max_db_connections, db.pool_size), (None, None, None), "no overrides");
    let v6 = database("a = host=2001:db8::1");
    assert!(matches!(v6.host.expect("host").hosts(), [Host::Ip(ip)] if ip.is_ipv6()));
    let empty = database("a =");
    assert_eq!((empty.host, empty.port), (None, 5432));
}

#[test]
fn numbers_with_tails_are_read_as_atoi_does_and_warned_about() {
    let loaded = parse("[databases]\na = pool_size=5s\n[pgbouncer]\n");
    assert_eq!(loaded.config.databases.named["a"].pool_size, Some(5));
    assert!(
        loaded.warnings[0].to_string().contains("pgbouncer.ini:2: pool_size=5s is read as 5"),
        "{:?}",
        loaded.warnings
    );
    assert!(Config::parse("p", "[databases]\na = pool_size=x\n[pgbouncer]\n").is_err());
}

#[test]
fn odd_bytes_may_stand_in_comments_only() {
    let mut files = MemFiles::default();
    files.0.insert("l1".into(), b"; gr\xfc\xdfe\n[pgbouncer]\r\n# \0\nlisten_port = 9\r\n".to_vec());
    assert_eq!(Config::load_with(&files, &[Path::new("l1")]).expect("Latin-1 comment").config.listen_port, 9);
    for bytes in [&b"[pgbouncer]\njob_name = gr\xfc\n"[..], b"[pgbouncer]\njob_name = a\0b\n"] {
        files.0.insert("l1".into(), bytes.to_vec());
        let errors = Config::load_with(&files, &[Path::new("l1")]).expect_err("no text");
        assert_eq!((errors.0[0].at.line, &errors.0[0].kind), (2, &ErrorKind::NotText));
    }
}

#[test]
fn a_mirror_is_a_section_of_its_own() {
    let main = "[databases]\na = host=x\n[pgbouncer]\n";
    let mirror = |text: &str| Config::parse("p.ini", &format!("{main}[underpass:mirror:{text}"));
    let loaded = mirror(
        "next]\ndatabases = a, b\nhost=10.0.0.9\nport=5433\nmode=SYNC\nsync_each=transaction\nqueue_bytes=1000\noverflow=disable\nsync_timeout=0.5\nsample=10\ncompare_rows=ordered\nuser=u\npassword=it's\npool_size=3\nshow_literals=1",
    )
    .unwrap_or_else(|e| panic!("{e}"))
    .config;
    let next = &loaded.mirrors["next"];
    assert_eq!(next.databases, ["a", "b"]);
    assert!(next.covers("a") && !next.covers("c"));
    assert_eq!((next.port, next.queue_bytes, next.sample_percent, next.pool_size), (5433, 1000, 10, Some(3)));
    assert_eq!((next.mode, next.overflow), (MirrorMode::Sync, MirrorOverflow::Disable));
    assert_eq!(next.sync_each, SyncEach::Transaction);
    assert_eq!(next.sync_timeout, Duration::from_millis(500));
    assert_eq!(next.password.as_ref().map(|p| p.expose()), Some("it's"));
    assert!(!format!("{next:?}").contains("it's"));
    for (text, says) in [
        ("m]\nhost=x", "has no databases"),
        ("m]\ndatabases=a", "has no host"),
        ("m m]\ndatabases=a\nhost=x", "is not 1 to 63 letters"),
        ("]\ndatabases=a\nhost=x", "is not 1 to 63 letters"),
        ("m]\ndatabases=a\nhost=x\nmod=sync", "did you mean mode"),
        ("m]\ndatabases=a\nhost=x\nsample=0", "underpass:mirror:m.sample"),
        ("m]\ndatabases=a\nhost=x\nmode=maybe", "one of async, sync"),
        ("m]\ndatabases=a\nhost=x\nsync_each=row", "one of statement, transaction"),
        ("m]\ndatabases=a\nhost=x\nsync_timeout=0", "above 0"),
        ("m]\ndatabases=a\nhost=x\nport=0", "a port from 1"),
        ("m]\ndatabases=a\nhost=x\npool_size=0", "at least 1"),
    ] {
        let error = mirror(text).expect_err(text).to_string();
        assert!(error.contains(says), "{text}: {error}");
    }
}
