// SPDX-License-Identifier: Apache-2.0
//! The command line: texts and exit codes, and one refusal for each bad start.

mod common;

use std::os::unix::process::CommandExt as _;
use std::process::{Command, Output};

use common::{Site, binary, output};
use underpass_testkit::service_user;

fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = output(Command::new(binary()).args(arguments));
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

#[test]
fn an_error_says_its_cause_once() {
    let (_, _, text) = run(&["replay", "/nowhere", "--to", "foo bar"]);
    assert_eq!(text.matches("a word without '='").count(), 1, "{text}");
}

#[test]
fn the_version_is_one_line_and_names_pgbouncers() {
    for arguments in [&["-V"][..], &["--version"], &["pooler", "-V"], &["pooler", "--version"]] {
        let (code, out, _) = run(arguments);
        assert_eq!(code, Some(0));
        assert_eq!(out, format!("{}\n", underpass_pooler::VERSION), "{arguments:?}");
    }
}

#[test]
fn called_pgbouncer_it_is_the_pooler() {
    let Output { stdout, .. } = output(Command::new(binary()).arg0("/usr/sbin/pgbouncer").arg("--version"));
    assert_eq!(String::from_utf8(stdout).unwrap(), format!("{}\n", underpass_pooler::VERSION));
    let Output { status, stderr, .. } =
        output(Command::new(binary()).arg0("pgbouncer").args(["-q", "/nonexistent.ini"]));
    let text = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(1));
    assert!(text.contains("/nonexistent.ini"), "{text}");
    let of = |argument: &str| output(Command::new(binary()).arg0("pgbouncer").arg(argument)).status.code();
    assert_eq!((of("--no-such"), of("--help")), (Some(1), Some(0)), "as PgBouncer's");
}

#[test]
fn help_teaches() {
    let (code, out, _) = run(&["pooler", "--help"]);
    assert_eq!(code, Some(0));
    for word in ["pgbouncer.ini", "SHOW POOLS", "Exit status", "USR1", "--overlay", "systemd"] {
        assert!(out.contains(word), "{word}: {out}");
    }
    assert!(!out.contains("--reboot"), "{out}");
    let (code, out, _) = run(&["--help"]);
    assert!(
        code == Some(0) && out.contains("pooler") && out.contains("Start with the file you have"),
        "{out}"
    );
}

#[test]
fn a_wrong_command_line_is_2() {
    for arguments in
        [&[][..], &["pooler"], &["pooler", "--no-such", "x.ini"], &["pooler", "a.ini", "b.ini"], &["x"]]
    {
        let (code, out, err) = run(arguments);
        assert_eq!(code, Some(2), "{arguments:?}");
        assert!(out.is_empty() && err.contains("Usage"), "{arguments:?}: {err}");
    }
}

#[test]
fn online_restart_names_its_replacement() {
    let (code, _, err) = run(&["pooler", "-R", "-d", "x.ini"]);
    assert_eq!(code, Some(1));
    assert!(err.contains("so_reuseport") && err.contains("SIGTERM"), "{err}");
}

#[test]
fn documents_are_made_from_the_same_table() {
    let (code, out, _) = run(&["man"]);
    assert_eq!(code, Some(0));
    assert!(out.contains(".TH") && out.contains("\\-\\-overlay") && out.contains("Exit status"), "{out}");
    for shell in ["bash", "zsh", "fish"] {
        let (code, out, _) = run(&["completions", shell]);
        assert!(code == Some(0) && out.contains("overlay"), "{shell}");
    }
}

#[test]
fn check_says_what_is_wrong() {
    let check = |site: &Site| {
        let Output { status, stdout, stderr } = output(&mut site.command(&["--check"]));
        (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
    };
    let (code, out, err) = check(&Site::new(""));
    assert_eq!((code, out.starts_with("0 errors")), (Some(0), true), "{out}{err}");
    let (code, out, err) = check(&Site::new("pool_mode = sometimes\nno_such_key = 1"));
    assert_eq!((code, out.as_str()), (Some(1), "2 errors, 0 warnings\n"), "{err}");
    assert!(
        err.contains("pgbouncer.ini:") && err.contains("pool_mode") && err.contains("no_such_key"),
        "{err}"
    );
    let (code, _, err) = check(&Site::new("client_tls_sslmode = require"));
    assert_eq!(code, Some(1));
    assert!(err.contains("client_tls_key_file"), "{err}");
}

#[test]
fn a_configuration_that_is_not_there_or_wrong() {
    let site = Site::new("listen_port = many");
    let err = site.refused(&[]);
    assert!(err.contains("pgbouncer.ini:") && err.contains("listen_port"), "{err}");
    std::fs::remove_file(site.path("pgbouncer.ini")).unwrap();
    let err = site.refused(&[]);
    assert!(err.contains("pgbouncer.ini"), "{err}");
}

#[test]
fn files_that_cannot_be_used() {
    let tls = "client_tls_sslmode = require\nclient_tls_key_file = {dir}/none.key\nclient_tls_cert_file = {dir}/none.crt";
    let err = Site::new(tls).refused(&[]);
    assert!(err.contains("none.key") && err.contains("none.crt") && err.lines().count() >= 2, "{err}");
    let err = Site::new("logfile = {dir}/no/such/directory/log").refused(&[]);
    assert!(err.contains("logfile") && err.contains("check path"), "{err}");
    let err = Site::new("pidfile = {dir}/no/such/directory/pid").refused(&[]);
    assert!(err.contains("pidfile") && err.contains("check path"), "{err}");
    // There, and not to be read, whoever we are.
    let err = Site::new("auth_file = {dir}/pgbouncer.ini/users").refused(&[]);
    assert!(err.contains("auth_file") && err.contains("pgbouncer.ini/users"), "{err}");
}

/// As PgBouncer: `auth_query` or a later RELOAD may make up for it.
#[test]
fn an_auth_file_that_is_missing_is_warned_of() {
    let site = Site::new("auth_file = {dir}/none.txt\nlogfile = {dir}/log");
    let Output { status, stderr, .. } = output(&mut site.command(&["--check"]));
    let err = String::from_utf8(stderr).unwrap();
    assert!(status.success() && err.contains("warning: auth_file") && err.contains("none.txt"), "{err}");
    let _pooler = site.start(&["-q"]);
    site.wait_serving();
    let log = site.read("log");
    assert!(log.contains("WARNING could not open auth_file"), "{log}");
}

#[test]
fn places_that_are_taken() {
    let site = Site::new("");
    let tcp = std::net::TcpListener::bind(("127.0.0.1", site.port())).unwrap();
    let err = site.refused(&[]);
    assert!(err.contains(&format!("127.0.0.1:{}", site.port())) && err.contains("listen_port"), "{err}");
    drop(tcp);
    let socket = site.path(&format!(".s.PGSQL.{}", site.port()));
    let unix = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let err = site.refused(&[]);
    assert!(err.contains("unix socket") && err.contains("unix_socket_dir"), "{err}");
    drop(unix);
    let metrics = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = metrics.local_addr().unwrap();
    let site = Site::with_database("x = host=127.0.0.1", "", &format!("metrics_listen = {address}"));
    let err = site.refused(&[]);
    assert!(err.contains("metrics_listen"), "{err}");
}

#[test]
fn a_pidfile_of_a_living_process() {
    let site = Site::new("pidfile = {dir}/pid");
    site.write("pid", &format!("{}\n", std::process::id()));
    let err = site.refused(&[]);
    assert!(err.contains("pidfile") && err.contains("another instance running?"), "{err}");
    assert_eq!(site.read("pid"), format!("{}\n", std::process::id()));
}

#[test]
fn a_pidfile_that_is_something_else_stays() {
    let site = Site::new("pidfile = {dir}/pid");
    for text in ["precious\n", "-1\n"] {
        site.write("pid", text);
        let err = site.refused(&[]);
        assert!(err.contains("pidfile") && err.contains("holds no process number"), "{err}");
        assert_eq!(site.read("pid"), text);
    }
}

#[test]
fn the_background_needs_a_pidfile_and_a_log() {
    let err = Site::new("logfile = {dir}/log").refused(&["-d"]);
    assert!(err.contains("set pidfile"), "{err}");
    let err = Site::new("pidfile = {dir}/pid").refused(&["-d"]);
    assert!(err.contains("set logfile or syslog"), "{err}");
}

#[test]
fn root_needs_a_user_that_exists_and_is_not_root() {
    if service_user().is_none() {
        println!("skipped: not root");
        return;
    }
    let site = Site::new("");
    let refused = |arguments: &[&str]| {
        let mut command = Command::new(binary());
        let Output { status, stderr, .. } =
            output(command.arg("pooler").args(arguments).arg(site.path("pgbouncer.ini")));
        assert_eq!(status.code(), Some(1));
        String::from_utf8(stderr).unwrap()
    };
    assert!(refused(&[]).contains("will not run as root"));
    assert!(refused(&["-u", "root"]).contains("will not run as root"));
    assert!(refused(&["-u", "no-such-user"]).contains("does not exist"));
}

#[test]
fn unix_socket_group_must_exist() {
    let err = Site::new("unix_socket_group = no-such-group").refused(&[]);
    assert!(err.contains("unix_socket_group") && err.contains("no-such-group"), "{err}");
}
