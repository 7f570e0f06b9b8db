// SPDX-License-Identifier: Apache-2.0
//! The files of etc/ and files as people have them.

use std::path::{Path, PathBuf};

use underpass_config::{Config, PoolMode, key};

fn etc(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../etc")).join(name)
}

#[test]
fn the_full_example_is_current_and_is_the_defaults() {
    let text = std::fs::read_to_string(etc("underpass.ini")).expect("etc/underpass.ini");
    assert!(
        text == underpass_config::full_ini(),
        "stale: cargo run -p underpass-config --example full_ini > etc/underpass.ini"
    );
    let commented = Config::parse("underpass.ini", &text).expect("valid").config;
    assert!(
        key::all().iter().all(|k| k.name == "conffile" || k.show(&commented) == k.show(&Config::default()))
    );

    // With every key switched on it says the same: each line is valid and is the default.
    let switched: String = text
        .lines()
        .map(|line| match line.strip_prefix(';') {
            Some(setting) if !setting.starts_with([';', ' ']) => format!("{setting}\n"),
            _ => format!("{line}\n"),
        })
        .filter(|line| !line.starts_with("verbose =") && !line.starts_with("conffile ="))
        .collect();
    let loaded = Config::parse("underpass.ini", &switched).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(loaded.warnings, []);
    let differing: Vec<_> =
        key::all().iter().filter(|k| k.show(&loaded.config) != k.show(&Config::default())).collect();
    assert!(differing.iter().all(|k| k.name == "conffile"), "{differing:?}");
    assert_eq!(loaded.config.databases.len(), 5);
    assert!(loaded.config.databases.named.contains_key("my shop"));
}

#[test]
fn the_small_examples_load_without_warnings() {
    let minimal = Config::load(&[&etc("underpass-minimal.ini")]).expect("valid");
    assert_eq!((minimal.warnings, minimal.config.pool_mode), (vec![], PoolMode::Transaction));
    let (ini, overlay) = (etc("underpass-server-side.ini"), etc("underpass-server-side.overlay.ini"));
    let loaded = Config::load(&[&ini, &overlay]).expect("valid");
    assert_eq!(loaded.warnings, []);
    assert!(loaded.config.underpass.metrics_listen.is_some());
    assert!(loaded.config.database("anything").is_some());
}

/// The shape of Debian's file: sections in the order databases, users, pgbouncer, mixed comment signs, tabs.
#[test]
fn a_distribution_s_file() {
    let text = "\
;;;\n;;; PgBouncer configuration file\n;;;\n\n[databases]\n\n;foodb =\n\n;bardb = host=localhost dbname=bazdb\n\n[users]\n\n;user1 = pool_mode=transaction max_user_connections=10\n
[pgbouncer]\n\nlogfile = /var/log/postgresql/pgbouncer.log\npidfile = /var/run/postgresql/pgbouncer.pid\n\nlisten_addr = localhost\nlisten_port = 6432\n\n\tunix_socket_dir = /var/run/postgresql\n\n  # and so on\nauth_type = md5\nauth_file\t=\t/etc/pgbouncer/userlist.txt\nserver_tls_ciphers = fast\n;%include /etc/pgbouncer/pgbouncer-other.ini\n";
    let c = Config::parse("pgbouncer.ini", text).expect("valid").config;
    assert_eq!(c.auth_file.as_deref(), Some(Path::new("/etc/pgbouncer/userlist.txt")));
    assert_eq!(c.listen_addr.iter().collect::<Vec<_>>(), ["localhost"]);
    assert!(c.databases.is_empty());
}

/// What container images write: everything in one section, `*` and query parameters.
#[test]
fn a_container_image_s_file() {
    let text = "################## Auto generated ##################\n[databases]\n* = host=postgresql.default.svc port=5432 auth_user=pgbouncer\nreporting = host=replica-0.pg,replica-1.pg user=reporting pool_mode=session\n\n[pgbouncer]\nlisten_addr = 0.0.0.0\nunix_socket_dir =\nuser = postgres\nauth_type = scram-sha-256\nauth_file = /etc/pgbouncer/userlist.txt\nauth_user = pgbouncer\nauth_query = SELECT usename, passwd FROM public.user_lookup($1)\npool_mode = transaction\nmax_client_conn = 10000\nignore_startup_parameters = extra_float_digits,options\nserver_tls_sslmode = require\nmax_prepared_statements = 500\n# Log settings\nadmin_users = postgres\n";
    let loaded = Config::parse("pgbouncer.ini", text).expect("valid");
    assert_eq!(loaded.warnings, []);
    let c = loaded.config;
    let (db, auto) = c.database("shop").expect("fall-back");
    assert!(auto && c.auth_user(&db) == Some("pgbouncer") && c.pool_mode(&db, "x") == PoolMode::Transaction);
    assert!(c.ignore_startup_parameters.contains("options"));
}

/// A machine that has PgBouncer's packaged file: it must load.
#[test]
fn the_packaged_file_if_there_is_one() {
    let path = Path::new("/etc/pgbouncer/pgbouncer.ini");
    match std::fs::read(path) {
        Err(e) => println!("skipped: {}: {e}", path.display()),
        Ok(_) => {
            let loaded = Config::load(&[path]).unwrap_or_else(|e| panic!("{e}"));
            println!("{} warnings", loaded.warnings.len());
        }
    }
}
