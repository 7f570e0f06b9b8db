// SPDX-License-Identifier: Apache-2.0
//! Precedence of overrides, and what RELOAD changes.

use std::time::Duration;

use underpass_config::{Config, PoolMode, kept_warning};

fn config(text: &str) -> Config {
    Config::parse("p.ini", text).unwrap_or_else(|e| panic!("{e}")).config
}

#[test]
fn user_beats_database_beats_global() {
    let c = config(
        "[databases]
d = pool_mode=transaction pool_size=30 reserve_pool_size=3 query_wait_timeout=7 server_lifetime=60 min_pool_size=2 max_db_connections=9 max_db_client_connections=8 auth_user=du auth_dbname=x auth_query='select 1'
plain =
[users]
u = pool_mode=statement pool_size=0 reserve_pool_size=1 query_wait_timeout=0 max_user_connections=6 max_user_client_connections=5 query_timeout=1 idle_transaction_timeout=2 transaction_timeout=3 client_idle_timeout=4
zero = max_user_connections=0 query_timeout=0
[pgbouncer]
max_user_connections = 77
query_timeout = 50
auth_user = gu
",
    );
    let d = &c.databases.named["d"];
    let plain = &c.databases.named["plain"];
    let s = Duration::from_secs;

    assert_eq!(
        [c.pool_mode(d, "u"), c.pool_mode(d, "x"), c.pool_mode(plain, "x")],
        [PoolMode::Statement, PoolMode::Transaction, PoolMode::Session]
    );
    assert_eq!([c.pool_size(d, "u"), c.pool_size(d, "x"), c.pool_size(plain, "x")], [0, 30, 20]);
    assert_eq!(
        [c.reserve_pool_size(d, "u"), c.reserve_pool_size(d, "x"), c.reserve_pool_size(plain, "x")],
        [1, 3, 0]
    );
    assert_eq!(
        [c.query_wait_timeout(d, "u"), c.query_wait_timeout(d, "x"), c.query_wait_timeout(plain, "x")],
        [s(0), s(7), s(120)]
    );
    assert_eq!([c.server_lifetime(d), c.server_lifetime(plain)], [s(60), s(3600)]);
    assert_eq!([c.min_pool_size(d), c.min_pool_size(plain)], [2, 0]);
    assert_eq!([c.max_db_connections(d), c.max_db_connections(plain)], [9, 0]);
    assert_eq!([c.max_db_client_connections(d), c.max_db_client_connections(plain)], [8, 0]);
    assert_eq!(
        [c.max_user_connections("u"), c.max_user_connections("x"), c.max_user_connections("zero")],
        [6, 77, 77]
    );
    assert_eq!([c.max_user_client_connections("u"), c.max_user_client_connections("x")], [5, 0]);
    assert_eq!([c.query_timeout("u"), c.query_timeout("x"), c.query_timeout("zero")], [s(1), s(50), s(50)]);
    assert_eq!(
        [c.idle_transaction_timeout("u"), c.transaction_timeout("u"), c.client_idle_timeout("u")],
        [s(2), s(3), s(4)]
    );
    assert_eq!([c.auth_user(d), c.auth_user(plain)], [Some("du"), Some("gu")]);
    assert_eq!([c.auth_dbname(d), c.auth_dbname(plain)], [Some("x"), None]);
    assert_eq!(c.auth_query(d), "select 1");
    assert!(c.auth_query(plain).starts_with("SELECT rolname"));
}

#[test]
fn reload_changes_what_it_may_and_names_the_rest() {
    let old = config(
        "[databases]\na = host=x\nb = host=x pool_size=1\nc =\n[users]\nu = pool_size=1\n[peers]\n1 = host=p\n[pgbouncer]\nlisten_port=1\npool_mode=session\nclient_tls_sslmode=disable\n",
    );
    let new = config(
        "; moved\n[databases]\nb = host=x pool_size=2\na = host=y\nd =\n* = host=f\n[users]\nu = pool_size=2\n[peers]\n2 = host=p\n[pgbouncer]\nlisten_port=2\npool_mode=transaction\nclient_tls_sslmode=allow\n[underpass]\nthreads=2\n",
    );
    let diff = Config::diff_for_reload(&old, &new);
    let names = |keys: &[underpass_config::ChangedKey]| keys.iter().map(|k| k.key.name).collect::<Vec<_>>();
    assert_eq!(names(&diff.changed), ["client_tls_sslmode", "pool_mode"]);
    assert_eq!(names(&diff.kept), ["listen_port", "threads"]);
    assert_eq!(kept_warning(&diff.kept[0]), "listen_port = 2 in the file needs a restart; 1 stays in effect");
    assert_eq!((diff.config.listen_port, diff.config.underpass.threads), (1, None));
    assert_eq!(diff.config.pool_mode, PoolMode::Transaction);
    assert!(diff.touches("client_tls") && !diff.touches("server_tls"));
    assert_eq!(
        (diff.databases.added, diff.databases.removed),
        (vec!["*".into(), "d".into()], vec!["c".to_owned()])
    );
    assert_eq!(diff.databases.changed, ["a", "b"]);
    assert_eq!(diff.reconnect, ["a"], "a new pool_size needs no new connections");
    assert_eq!(diff.users.changed, ["u"]);
    assert_eq!((diff.peers.added, diff.peers.removed), (vec![2], vec![1]));
}

#[test]
fn moving_lines_changes_nothing() {
    let old = config("[databases]\na = host=x\n[users]\nu =\n[peers]\n1 = host=p\n[pgbouncer]\n");
    let new = config("\n\n[pgbouncer]\n[peers]\n1 = host=p\n[users]\nu =\n[databases]\na = host=x\n");
    let diff = Config::diff_for_reload(&old, &new);
    assert!(diff.changed.is_empty() && diff.kept.is_empty() && diff.reconnect.is_empty());
    assert!(
        diff.databases.changed.is_empty() && diff.users.changed.is_empty() && diff.peers.changed.is_empty()
    );
}

#[test]
fn command_line_and_set_survive_a_reload_that_does_not_name_them() {
    let mut old = config("[pgbouncer]\n");
    old.user = Some("postgres".into());
    old.set("verbose", "2").expect("valid");
    old.set("query_timeout", "9").expect("valid");
    let diff = Config::diff_for_reload(&old, &config("[pgbouncer]\n"));
    assert_eq!((diff.config.user.as_deref(), diff.config.verbose), (Some("postgres"), 2));
    assert!(diff.kept.is_empty());
    assert!(diff.config.query_timeout.is_zero(), "the file's default wins over an earlier SET");
    let named = Config::diff_for_reload(&old, &config("[pgbouncer]\nverbose=1\nuser=other\n"));
    assert_eq!((named.config.verbose, named.config.user.as_deref()), (1, Some("postgres")));
    assert_eq!(named.kept.len(), 1);
}

#[test]
fn every_setting_of_a_connection_needs_reconnect() {
    let db =
        |line: &str| config(&format!("[databases]\nd = {line}\n[pgbouncer]\n")).databases.named["d"].clone();
    let base = db("host=x");
    for line in [
        "host=y",
        "host=x port=1",
        "host=x dbname=o",
        "host=x user=u",
        "host=x password=p",
        "host=x connect_query=q",
        "host=x auth_dbname=o",
        "host=x auth_query=q",
        "host=x load_balance_hosts=disable",
        "host=x timezone=UTC",
    ] {
        assert!(base.needs_reconnect(&db(line)), "{line}");
    }
    for line in
        ["host=x dbname=d", "host=x pool_size=3", "host=x pool_mode=statement", "host=x server_lifetime=1"]
    {
        assert!(!base.needs_reconnect(&db(line)), "{line}");
    }
}
