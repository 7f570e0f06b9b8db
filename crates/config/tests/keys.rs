// SPDX-License-Identifier: Apache-2.0
//! The table of keys against an independent list of PgBouncer's keys and defaults, and docs/config.md against the table.

use std::collections::BTreeMap;
use std::time::Duration;

use underpass_config::key::{self, Change, Section, Support};
use underpass_config::{AuthType, CheckQuery, Config, ErrorKind, PoolMode, SetOutcome, SslMode};

/// Every key of PgBouncer (master of 2026-07) and its default; `-` is null; `!` needs a restart.
const EXPECTED: &str = "
admin_users=
application_name_add_host=0
auth_dbname=-
auth_file=-
auth_hba_file=
auth_ident_file=-
auth_ldap_options=-
auth_query=SELECT rolname, CASE WHEN rolvaliduntil < now() THEN NULL ELSE rolpassword END FROM pg_authid WHERE rolname=$1 AND rolcanlogin
auth_type=md5
auth_user=-
autodb_idle_timeout=3600
cancel_wait_timeout=10
client_idle_timeout=0
client_login_timeout=60
client_tls13_ciphers=-
client_tls_ca_file=
client_tls_cert_file=
client_tls_ciphers=default
client_tls_dheparams=auto
client_tls_ecdhcurve=auto
client_tls_key_file=
client_tls_protocols=secure
client_tls_sslmode=disable
conffile=-
default_pool_size=20
!disable_pqexec=0
dns_max_ttl=15
dns_nxdomain_ttl=15
dns_zone_check_period=0
idle_transaction_timeout=0
ignore_startup_parameters=
!job_name=pgbouncer
!listen_addr=
!listen_backlog=128
!listen_port=6432
log_connections=1
log_disconnections=1
log_pooler_errors=1
log_stats=1
logfile=
login_notify_message=
max_client_conn=100
max_db_client_connections=0
max_db_connections=0
max_packet_size=2147483647
max_prepared_statements=200
max_user_client_connections=0
max_user_connections=0
min_pool_size=0
peer_id=0
!pidfile=
!pkt_buf=4096
pool_idle_timeout=0
pool_mode=session
query_timeout=0
query_wait_notify=5
query_wait_timeout=120
reserve_pool_size=0
reserve_pool_timeout=5
!resolv_conf=
sbuf_loopcnt=5
scram_iterations=4096
server_check_delay=30
server_check_query=<empty>
server_connect_timeout=15
server_fast_close=0
server_idle_timeout=600
server_lifetime=3600
server_login_retry=15
server_reset_query=DISCARD ALL
server_reset_query_always=0
server_round_robin=0
server_tls13_ciphers=-
server_tls_ca_file=
server_tls_cert_file=
server_tls_ciphers=default
server_tls_key_file=
server_tls_protocols=secure
server_tls_sslmode=prefer
!so_reuseport=0
stats_period=60
stats_users=
suspend_timeout=10
syslog=0
syslog_facility=daemon
syslog_ident=pgbouncer
tcp_defer_accept=1
tcp_keepalive=1
tcp_keepcnt=0
tcp_keepidle=0
tcp_keepintvl=0
tcp_socket_buffer=0
tcp_user_timeout=0
!track_extra_parameters=IntervalStyle
transaction_timeout=0
!unix_socket_dir=/tmp
!unix_socket_group=
!unix_socket_mode=0777
!user=-
verbose=-";

#[test]
fn every_key_has_pgbouncers_default_and_mark() {
    let mut expected: Vec<(&str, Option<&str>, bool)> = Vec::new();
    for line in EXPECTED.lines().skip(1) {
        let (name, default) = line.split_once('=').expect("key=default");
        let restart = name.starts_with('!');
        expected.push((name.trim_start_matches('!'), Some(default).filter(|d| *d != "-"), restart));
    }
    let ours: Vec<_> = key::all()
        .iter()
        .filter(|k| k.section == Section::Pgbouncer && k.shown)
        .map(|k| (k.name, k.default, k.change == Change::Restart))
        .collect();
    assert_eq!(ours, expected);
    let hidden: Vec<_> = key::all().iter().filter(|k| !k.shown).map(|k| k.name).collect();
    assert_eq!(hidden, ["service_name"]);
}

#[test]
fn defaults_are_typed() {
    let c = Config::default();
    assert_eq!((c.pool_mode, c.auth_type), (PoolMode::Session, AuthType::Md5));
    assert_eq!((c.client_tls_sslmode, c.server_tls_sslmode), (SslMode::Disable, SslMode::Prefer));
    assert_eq!(c.server_check_query, CheckQuery::Empty);
    assert_eq!(c.server_reset_query.as_deref(), Some("DISCARD ALL"));
    assert_eq!(c.unix_socket_mode, 0o777);
    assert_eq!(c.query_wait_timeout, Duration::from_secs(120));
    assert!(c.client_tls_protocols.v1_2 && c.client_tls_protocols.v1_3 && !c.client_tls_protocols.v1_1);
    assert!(c.track_extra_parameters.contains_ignore_case("intervalstyle"));
    assert_eq!(c.underpass.threads, None);
    assert_eq!(c.underpass.metrics_listen, None);
}

#[test]
fn show_config_has_values_defaults_and_nulls() {
    let rows: BTreeMap<String, _> = Config::default().show().map(|r| (r.key.clone(), r)).collect();
    let value = |key: &str| (rows[key].value.clone(), rows[key].default, rows[key].changeable);
    assert_eq!(value("auth_user"), (None, None, true));
    assert_eq!(value("verbose"), (Some("0".into()), None, true));
    assert_eq!(value("logfile"), (Some(String::new()), Some(""), true));
    assert_eq!(value("unix_socket_mode"), (Some("511".into()), Some("0777"), false));
    assert_eq!(value("reserve_pool_timeout"), (Some("5".into()), Some("5"), true));
    assert_eq!(value("underpass.kernel_path"), (Some("auto".into()), Some("auto"), false));
    assert!(!rows.contains_key("service_name"));
}

#[test]
fn times_print_as_c_prints_them() {
    let mut c = Config::default();
    for (text, shown) in [
        ("1.5", "1.5"),
        ("0.25", "0.25"),
        ("1e6", "1e+06"),
        ("1234567.5", "1.23457e+06"),
        ("123456", "123456"),
        ("0.00001", "1e-05"),
        (".5", "0.5"),
        ("100000", "100000"),
        ("12.3456789", "12.3457"),
        ("0", "0"),
    ] {
        c.set("query_timeout", text).expect(text);
        assert_eq!(c.get("query_timeout"), Some(Some(shown.into())), "{text}");
    }
}

#[test]
fn set_accepts_what_the_file_accepts() {
    let mut c = Config::default();
    assert_eq!(c.set("pool_mode", "TRANSACTION"), Ok(SetOutcome::Changed));
    assert_eq!(c.pool_mode, PoolMode::Transaction);
    assert_eq!(c.set("pool_mode", "transaction"), Ok(SetOutcome::Unchanged));
    assert_eq!(c.set("max_client_conn", "0x20"), Ok(SetOutcome::Changed));
    assert_eq!(c.max_client_conn, 32);
    assert_eq!(c.set("listen_port", "1"), Ok(SetOutcome::NeedsRestart));
    assert_eq!(c.listen_port, 6432);
    assert_eq!(c.set("underpass.log_format", "json"), Ok(SetOutcome::Changed));
    assert_eq!(c.set("log_connections", "2"), Ok(SetOutcome::Unchanged));
}

#[test]
fn set_refuses_with_what_was_expected() {
    let before = Config::default();
    let mut c = before.clone();
    for (key, value) in [
        ("pool_mode", "fast"),
        ("max_client_conn", "-1"),
        ("max_client_conn", "10k"),
        ("max_client_conn", "08"),
        ("max_client_conn", "4294967296"),
        ("max_client_conn", ""),
        ("query_timeout", "5s"),
        ("query_timeout", "-1"),
        ("query_timeout", "nan"),
        ("query_timeout", "inf"),
        ("query_timeout", "1e300"),
        ("log_connections", "yes"),
        ("listen_port", "65536"),
        ("peer_id", "16384"),
        ("auth_dbname", "pgbouncer"),
        ("client_tls_protocols", "sslv3"),
        ("underpass.threads", "2000"),
        ("underpass.lane_clients_max", "0"),
        ("underpass.lane_pools_max", "1048577"),
        ("underpass.lane_response_bytes", "65535"),
        ("underpass.metrics_listen", "9127"),
    ] {
        let error = c.set(key, value).expect_err(key);
        assert!(matches!(error, ErrorKind::InvalidValue { .. }), "{key}={value}: {error}");
        assert!(error.to_string().contains("expected"), "{error}");
    }
    for (key, value) in [("auth_type", "ldap"), ("auth_type", "PAM"), ("auth_ldap_options", "ldapserver=x")] {
        let error = c.set(key, value).expect_err(key).to_string();
        assert!(error.contains("not supported by Underpass; use "), "{error}");
    }
    let error = c.set("pol_mode", "session").expect_err("unknown").to_string();
    assert!(error.ends_with("did you mean pool_mode?"), "{error}");
    assert!(c.set("threads", "1").is_err(), "our keys have their prefix");
    assert_eq!(c, before);
}

#[test]
fn every_key_reads_its_own_default_and_has_words() {
    for key in key::all() {
        let mut c = Config::default();
        if let Some(default) = key.default {
            assert!(c.set(&key.full_name(), default).is_ok(), "{key:?}");
        }
        assert_eq!(c, Config::default(), "{key:?}");
        assert!(key.doc.trim().ends_with('.') || key.doc.trim().ends_with(']'), "{key:?}: {}", key.doc);
        if let Support::Differs(note) | Support::NoEffect(note) | Support::Unsupported(note) = key.support {
            assert!(!note.is_empty());
        }
    }
}

#[test]
fn docs_config_md_is_current() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/config.md");
    let page = std::fs::read_to_string(path).expect("docs/config.md");
    assert!(
        page == underpass_config::config_md(),
        "docs/config.md is stale: cargo run -p underpass-config --example config_md > docs/config.md"
    );
    for key in key::all() {
        assert!(page.contains(&format!("| `{}` |", key.name)), "{key:?}");
    }
}
