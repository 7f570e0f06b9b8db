// SPDX-License-Identifier: Apache-2.0
//! `--check`: each finding with a file that has it, and a sound file that has none.

use std::path::Path;

use underpass_config::{Config, Finding, MemFiles, Severity, check};

const FILES: [(&str, &str); 10] = [
    ("users", "\"admin\" \"x\"\n\"old\" \"md50123456789abcdef0123456789abcdef\"\n"),
    ("broken-users", "\"admin\" \"x\"\nnobody\n"),
    ("hba", "local all all peer map=m\nhost all all all scram-sha-256\n"),
    ("hba-ldap", "host all all all ldap\nlocal all all md5\n"),
    ("hba-cert", "hostssl all all all cert\n"),
    ("hba-empty", "# nothing\n"),
    ("ident", "m root postgres\n"),
    ("ident-broken", "m root\n"),
    ("key", "key"),
    ("cert", "cert"),
];

fn findings(text: &str) -> Vec<Finding> {
    let mut files = MemFiles::new(FILES);
    files.0.insert("p.ini".into(), text.as_bytes().to_vec());
    let config = Config::load_with(&files, &[Path::new("p.ini")]).unwrap_or_else(|e| panic!("{e}")).config;
    check(&config, &files)
}

#[test]
fn a_sound_file_has_no_findings() {
    let text = "[databases]\na = host=x user=admin\n* = host=y\n[pgbouncer]\nlisten_addr=*\nauth_type=hba\nauth_file=users\nauth_hba_file=hba\nauth_ident_file=ident\nadmin_users=admin\npool_mode=transaction\nclient_tls_sslmode=allow\nclient_tls_key_file=key\nclient_tls_cert_file=cert\n";
    assert_eq!(findings(text), []);
}

#[test]
fn every_trap_is_found() {
    use Severity::{Error, Warning};
    let cases: &[(&str, Severity, &str, &str)] = &[
        ("unix_socket_dir=", Error, "listen_addr", "nothing to listen on"),
        ("listen_port=0", Error, "listen_port", "no port"),
        ("unix_socket_mode=777", Warning, "unix_socket_mode", "octal"),
        ("unix_socket_mode=070", Warning, "unix_socket_mode", "octal"),
        (
            "client_tls_sslmode=require",
            Error,
            "client_tls_key_file",
            "needed because client_tls_sslmode = require",
        ),
        (
            "client_tls_sslmode=require\nclient_tls_cert_file=gone\nclient_tls_key_file=key",
            Error,
            "client_tls_cert_file",
            "cannot read gone",
        ),
        (
            "client_tls_sslmode=verify-full\nclient_tls_cert_file=cert\nclient_tls_key_file=key",
            Error,
            "client_tls_ca_file",
            "needed",
        ),
        (
            "client_tls_sslmode=allow\nclient_tls_cert_file=cert\nclient_tls_key_file=key\nclient_tls_protocols=tlsv1.1",
            Error,
            "client_tls_protocols",
            "not spoken",
        ),
        ("server_tls_protocols=all", Warning, "server_tls_protocols", "not spoken"),
        ("server_tls_sslmode=verify-ca", Warning, "server_tls_ca_file", "the system trusts"),
        ("auth_type=cert\nclient_tls_sslmode=verify-ca", Error, "client_tls_ca_file", "auth_type = cert"),
        ("client_tls_sslmode=verify-ca", Warning, "client_tls_ca_file", "the system trusts"),
        ("server_tls_key_file=key", Error, "server_tls_cert_file", "go together"),
        ("auth_file=gone", Error, "auth_file", "gone: could not load file"),
        ("auth_file=broken-users", Error, "auth_file", "broken-users:2: broken auth file"),
        ("auth_file=", Warning, "auth_file", "nobody can log in"),
        ("auth_type=hba", Error, "auth_hba_file", "needed because auth_type = hba"),
        ("auth_hba_file=hba", Warning, "auth_hba_file", "not read"),
        ("auth_type=hba\nauth_hba_file=gone", Error, "auth_hba_file", "could not load"),
        ("auth_type=hba\nauth_hba_file=hba", Error, "auth_hba_file", "hba:1: hba: \"map=m\""),
        (
            "auth_type=hba\nauth_hba_file=hba\nauth_ident_file=ident-broken",
            Error,
            "auth_ident_file",
            "ident-broken:1",
        ),
        ("auth_type=hba\nauth_hba_file=hba-ldap", Error, "auth_hba_file", "ldap is not supported"),
        ("auth_type=hba\nauth_hba_file=hba-cert", Warning, "auth_hba_file", "cert needs client_tls_sslmode"),
        (
            "auth_type=hba\nauth_hba_file=hba-cert\nclient_tls_sslmode=allow\nclient_tls_key_file=key\nclient_tls_cert_file=cert",
            Warning,
            "auth_hba_file",
            "cert needs client_tls_sslmode",
        ),
        ("auth_type=hba\nauth_hba_file=hba-empty", Error, "auth_hba_file", "no rule"),
        ("auth_type=cert", Error, "auth_type", "verify-full"),
        ("auth_type=any", Warning, "auth_type", "missing in d"),
        ("auth_type=any", Warning, "auth_type", "admin_users administer"),
        ("auth_type=scram-sha-256", Warning, "auth_type", "1 users of auth_file have one: old"),
        ("scram_iterations=0", Error, "scram_iterations", "at least 1"),
        ("auth_dbname=gone", Warning, "auth_dbname", "no such database: gone"),
        ("auth_user=admin\nauth_dbname=gone", Error, "auth_dbname", "no such database: gone"),
        (
            "auth_dbname=gone\n[databases]\nx = host=h auth_user=admin",
            Error,
            "auth_dbname",
            "no such database: gone",
        ),
        ("admin_users=admin, ghost", Warning, "admin_users", "ghost"),
        ("auth_user=admin\nadmin_users=ghost", Warning, "admin_users", "ghost"),
        ("max_client_conn=0", Warning, "max_client_conn", "no client"),
        ("reserve_pool_size=1\nreserve_pool_timeout=0", Warning, "reserve_pool_timeout", "no effect"),
        (
            "pool_mode=transaction\nserver_reset_query_always=1",
            Warning,
            "server_reset_query_always",
            "round trip",
        ),
        ("pool_mode=transaction\nserver_fast_close=1", Warning, "server_fast_close", "no effect"),
        ("server_lifetime=0", Warning, "server_lifetime", "used once"),
        ("peer_id=5", Warning, "peer_id", "names no other"),
        (
            "transaction_timeout=5\nidle_transaction_timeout=6",
            Warning,
            "idle_transaction_timeout",
            "never strikes",
        ),
        ("query_wait_timeout=1", Warning, "query_wait_notify", "never notified"),
        ("stats_period=0", Error, "stats_period", "no period"),
        ("tcp_keepalive=0\ntcp_keepcnt=3", Warning, "tcp_keepcnt", "no effect"),
        ("syslog_facility=local8", Warning, "syslog_facility", "daemon is used"),
        (
            "[databases]\nx = host=h max_db_connections=5",
            Warning,
            "databases/x",
            "more than max_db_connections 5",
        ),
        ("[databases]\nx = host=h min_pool_size=50", Warning, "databases/x", "min_pool_size 50"),
        ("[databases]\nx = host=h pool_size=0 min_pool_size=5", Warning, "databases/x", "has no effect"),
        ("[databases]\nx = host=h password=p", Warning, "databases/x", "password without user"),
        ("[databases]\nx = host=h user=ghost", Warning, "databases/x", "no password for user=ghost"),
        ("[databases]\nx = host=h auth_dbname=gone", Warning, "databases/x", "auth_dbname=gone"),
        ("listen_addr=*\nunix_socket_dir=\n[databases]\nx = dbname=y", Warning, "databases/x", "no host"),
        ("[peers]\n1 = host=h", Warning, "peer_id", "switches peering off"),
        ("peer_id=1\n[peers]\n20000 = host=h", Warning, "peers/20000", "16383"),
    ];
    for (lines, severity, key, text) in cases {
        let all = findings(&format!("[databases]\nd = host=x\n[pgbouncer]\nauth_file=users\n{lines}\n"));
        let found = all.iter().find(|f| f.key == *key && f.severity == *severity && f.text.contains(text));
        assert!(found.is_some(), "{lines:?} must give {severity:?} {key}: ...{text}...; it gives {all:#?}");
    }
    let unlimited = findings(
        "[databases]\nd = host=x\n[pgbouncer]\nauth_file=users\ndefault_pool_size=0\n[users]\nu = pool_size=0",
    );
    assert!(unlimited.iter().all(|f| !f.key.contains("pool_size") && f.key != "users/u"), "{unlimited:#?}");
    assert!(findings("[pgbouncer]\nauth_file=users\n").iter().any(|f| f.key == "databases"));
}

#[test]
fn errors_come_first_and_name_their_line() {
    let all = findings("[databases]\nd = host=x password=p\n[pgbouncer]\nauth_file=users\nstats_period=0\n");
    assert_eq!(all[0].to_string(), "p.ini:5: error: stats_period: 0 is no period; the default is 60");
    assert!(all[1].to_string().starts_with("p.ini:2: warning: databases/d: "), "{}", all[1]);
}

#[test]
fn mirrors() {
    let text = |mirror: &str| {
        format!(
            "[databases]\na = host=1.2.3.4\n[pgbouncer]\nlisten_addr=*\nauth_type=trust\n[underpass:mirror:m]\n{mirror}\n"
        )
    };
    let found = |mirror: &str| {
        let all = findings(&text(mirror));
        all.into_iter().filter(|f| f.key.contains("mirror")).map(|f| (f.severity, f.text)).collect::<Vec<_>>()
    };
    assert_eq!(found("databases=a\nhost=1.2.3.5"), []);
    for (mirror, severity, says) in [
        ("databases=a\nhost=1.2.3.4", Severity::Error, "the server it is on"),
        ("databases=*\nhost=1.2.3.4", Severity::Error, "the server it is on"),
        ("databases=b\nhost=x", Severity::Warning, "no database \"b\""),
        ("databases=a\nhost=x\nmode=sync\nsend=read_only", Severity::Error, "needs mode = async"),
        ("databases=a\nhost=x\npassword=p", Severity::Warning, "without user"),
    ] {
        let all = found(mirror);
        assert!(
            matches!(&all[..], [(s, text)] if *s == severity && text.contains(says)),
            "{mirror}: {all:?}"
        );
    }
}
