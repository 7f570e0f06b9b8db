// SPDX-License-Identifier: Apache-2.0
//! `-d`, the PID file and the log: written, rotated, as text and as JSON.

mod common;

use std::fs;
use std::time::{Duration, Instant};

use common::{LIMIT, Site, output, wait};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use underpass_testkit::{Authority, Client, MockServer, Options, Step};

/// The background pooler of a site, by its PID file. Ends it when dropped.
struct Background<'a> {
    site: &'a Site,
    pid: Pid,
}

impl<'a> Background<'a> {
    fn start(site: &'a Site) -> Self {
        let began = Instant::now();
        let ended = output(&mut site.command(&["-d"]));
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        assert!(began.elapsed() < LIMIT, "the pipe to the background process is closed");
        // It serves, and says who it is, by the time the command returns.
        let pid = site.read("pid").trim().parse().unwrap();
        Self { site, pid: Pid::from_raw(pid) }
    }

    fn signal(&self, signal: Signal) {
        kill(self.pid, signal).unwrap();
    }

    fn is_running(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        // Its parent may be slow to collect it.
        !stat.is_empty() && !stat.contains(") Z ")
    }
}

impl Drop for Background<'_> {
    fn drop(&mut self) {
        if self.is_running() {
            let _ = kill(self.pid, Signal::SIGQUIT);
            let deadline = Instant::now() + Duration::from_secs(10);
            while self.is_running() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(10));
            }
            let _ = self.is_running().then(|| kill(self.pid, Signal::SIGKILL));
        }
        let _ = self.site;
    }
}

const FILES: &str = "pidfile = {dir}/pid\nlogfile = {dir}/log";

#[test]
fn it_goes_to_the_background_and_cleans_up() {
    let site = Site::new(FILES);
    // What a dead process left: a PID that cannot be, and a socket that nobody listens on.
    site.write("pid", "4194305\n");
    let socket = site.path(&format!(".s.PGSQL.{}", site.port()));
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    if let Some(user) = underpass_testkit::service_user() {
        std::os::unix::fs::chown(&socket, Some(user.uid.as_raw()), None).unwrap();
    }
    let pooler = Background::start(&site);
    assert_eq!(site.console("SHOW VERSION")[0][0].as_deref(), Some(underpass_pooler::VERSION));
    let stat = fs::read_to_string(format!("/proc/{}/stat", pooler.pid)).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    assert_eq!(fields[3], pooler.pid.to_string(), "a session of its own");
    assert_eq!(fields[4], "0", "no terminal");
    for number in 0..3 {
        let target = fs::read_link(format!("/proc/{}/fd/{number}", pooler.pid)).unwrap();
        assert_eq!(target.to_str(), Some("/dev/null"));
    }
    let log = site.read("log");
    for phrase in
        ["stale pidfile, removing", "listening on 127.0.0.1:", "listening on unix:", "process up: Underpass"]
    {
        assert!(log.contains(phrase), "{phrase}: {log}");
    }
    let second = site.refused(&["-d"]);
    assert!(second.contains("another instance running?"), "{second}");
    assert_eq!(site.read("pid").trim(), pooler.pid.to_string());
    pooler.signal(Signal::SIGQUIT);
    wait("the end", || (!pooler.is_running()).then_some(()));
    assert!(!site.path("pid").exists() && !socket.exists());
    assert!(site.read("log").contains("got SIGQUIT, fast exit"));
}

#[test]
fn a_failed_start_tells_the_caller_and_the_log() {
    let site = Site::new(&format!("{FILES}\nunix_socket_group = no-such-group"));
    let err = site.refused(&["-d"]);
    assert!(err.contains("unix_socket_group"), "{err}");
    assert!(site.read("log").contains("FATAL") && !site.path("pid").exists(), "{}", site.read("log"));
}

/// In one line each, to the caller, as in the foreground.
#[test]
fn what_keeps_it_from_starting_is_told_before_the_background() {
    let refused = |site: &Site, words: &[&str]| {
        let err = site.refused(&["-d"]);
        // Until it has its log, what it logs is on standard error too.
        let (told, logged): (Vec<&str>, Vec<&str>) =
            err.lines().partition(|line| line.starts_with("underpass: "));
        assert!(told.len() == 1 && words.iter().all(|word| told[0].contains(word)), "{words:?}: {err}");
        assert!(logged.iter().all(|line| line.contains(" LOG ")), "{words:?}: {err}");
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let mut command_lines = processes.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
        let name = site.path("").display().to_string();
        let is_left = |line: Vec<u8>| String::from_utf8_lossy(&line).contains(&name);
        assert!(!command_lines.any(is_left) && !site.path("pid").exists(), "{words:?}");
    };
    let site = Site::new(FILES);
    let taken = std::net::TcpListener::bind(("127.0.0.1", site.port())).unwrap();
    refused(&site, &[&format!("127.0.0.1:{}", site.port()), "listen_port"]);
    drop(taken);
    // There, and not to be read, whoever we are.
    let unreadable = "{dir}/pgbouncer.ini/file";
    refused(&Site::new(&format!("{FILES}\nauth_file = {unreadable}")), &["auth_file", "pgbouncer.ini/file"]);
    let site = Site::new(&format!(
        "{FILES}\nclient_tls_sslmode = require\nclient_tls_key_file = {unreadable}\nclient_tls_cert_file = {{dir}}/site.crt"
    ));
    let authority = Authority::new("test").unwrap();
    authority.server(&["localhost"]).unwrap().write(&site.path(""), "site").unwrap();
    refused(&site, &["client_tls_key_file", "pgbouncer.ini/file"]);
    refused(
        &Site::new("pidfile = {dir}/pid\nlogfile = {dir}/no/such/directory/log"),
        &["logfile", "check path and permissions"],
    );
}

#[test]
fn the_log_is_opened_again() {
    let site = Site::new(FILES);
    let pooler = Background::start(&site);
    fs::rename(site.path("log"), site.path("log.1")).unwrap();
    pooler.signal(Signal::SIGHUP);
    wait("the new log", || site.path("log").exists().then_some(()));
    let _ = site.console("SHOW VERSION");
    wait("a line in the new log", || site.read("log").contains("login attempt").then_some(()));
    assert!(!site.read("log.1").contains("login attempt"));
    fs::rename(site.path("log"), site.path("log.2")).unwrap();
    let _ = site.console("RELOAD");
    wait("the newer log", || site.path("log").exists().then_some(()));
}

/// One line of the text format: date, time, zone, [pid], level, rest.
fn assert_text_line(line: &str) {
    let words: Vec<&str> = line.splitn(6, ' ').collect();
    assert_eq!(words.len(), 6, "{line}");
    assert!(words[0].len() == 10 && words[1].len() == 12 && words[2] == "UTC", "{line}");
    assert!(words[3].starts_with('[') && words[3].ends_with(']'), "{line}");
    assert!(["LOG", "WARNING", "ERROR", "DEBUG", "NOISE", "FATAL"].contains(&words[4]), "{line}");
}

#[test]
fn text_lines_are_pgbouncers() {
    let site = Site::new(&format!("{FILES}\nverbose = 2"));
    let _pooler = Background::start(&site);
    let _ = site.console("SHOW VERSION");
    let log = wait("the goodbye", || Some(site.read("log")).filter(|log| log.contains("closing because")));
    log.lines().for_each(assert_text_line);
    let line = log.lines().find(|line| line.contains("login attempt")).unwrap();
    assert!(line.contains(" LOG C-0x") && line.contains(": pgbouncer/admin@127.0.0.1:"), "{line}");
    assert!(line.ends_with("login attempt: db=pgbouncer user=admin tls=no replication=no"), "{line}");
}

#[test]
fn json_lines_carry_fields() {
    let site = Site::with_database(
        "* = host=127.0.0.1 port=1 user=postgres",
        FILES,
        "log_format = json\nkernel_path = off",
    );
    let _pooler = Background::start(&site);
    let _ = site.console("SHOW VERSION");
    // No server listens on port 1: the pooler says so, and so does this client's end.
    let options = Options::new(site.port(), "some\"user\n", "some db");
    assert!(Client::connect(&options).is_err());
    let log = wait("both goodbyes", || {
        Some(site.read("log")).filter(|log| log.matches("\"event\":\"close\"").count() >= 2)
    });
    let lines: Vec<serde_json::Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    for line in &lines {
        for key in ["time", "level", "pid", "message"] {
            assert!(line.get(key).is_some(), "{key}: {line}");
        }
    }
    let of = |event: &str, user: &str| {
        let found = lines.iter().find(|line| line["event"] == event && line["user"] == user);
        found.unwrap_or_else(|| panic!("no {event} of {user:?} in {log}"))
    };
    let login = of("login_attempt", "admin");
    assert_eq!(
        (&login["side"], &login["db"], &login["level"]),
        (&"client".into(), &"pgbouncer".into(), &"LOG".into())
    );
    assert!(login["ptr"].as_str().unwrap().starts_with("0x"), "{login}");
    assert!(login["addr"].as_str().unwrap().starts_with("127.0.0.1:"), "{login}");
    assert_eq!(of("login_attempt", "some\"user\n")["db"], "some db");
    assert!(lines.iter().any(|line| line["event"] == "process_up"));
}

#[test]
fn statistics_are_logged_every_period() {
    let site = Site::new(&format!("{FILES}\nstats_period = 1"));
    let _pooler = Background::start(&site);
    let stats = wait("statistics", || {
        site.read("log").lines().find(|line| line.contains(" LOG stats: ")).map(str::to_owned)
    });
    assert!(stats.contains("0 xacts/s, 0 queries/s") && stats.ends_with("wait 0 us"), "{stats}");
}

/// As PgBouncer: an option stands for a key that the file does not have, at every RELOAD.
#[test]
fn verbosity_follows_the_command_line_and_the_file() {
    let server = MockServer::start(|_| vec![Step::Login, Step::Serve]).unwrap();
    let to = format!("* = host=127.0.0.1 port={} user=postgres", server.port());
    // The log of a pooler that logs in to a server and moves a client, before and after a RELOAD.
    let log_of = |arguments: &[&str], key: &str| {
        let keys = format!("pool_mode = transaction\n{key}");
        let site = Site::with_database(&to, &keys, "kernel_path = off\nthreads = 2");
        let mut command = site.command(arguments);
        command.env("UNDERPASS_TEST_MOVE", "1").stderr(std::process::Stdio::piped());
        let mut running = common::Running(command.spawn().unwrap());
        site.wait_serving();
        for command in ["RELOAD", "RECONNECT"] {
            let mut client = Client::connect(&Options::new(site.port(), "somebody", "db")).unwrap();
            // Whoever is served a second time has been moved.
            for _ in 0..2 {
                client.query("select").unwrap().ok().unwrap();
            }
            drop(client);
            site.console("RECONNECT");
            site.console(command);
        }
        running.signal(Signal::SIGQUIT);
        assert_eq!(running.wait(), Some(0));
        let mut text = String::new();
        std::io::Read::read_to_string(running.0.stderr.as_mut().unwrap(), &mut text).unwrap();
        text
    };
    assert_eq!(log_of(&["-q"], ""), "");
    assert_eq!(log_of(&["-q", "-vv"], ""), "");
    for (arguments, key, level) in [
        (&[][..], "", 0),
        (&["-v"], "", 1),
        (&["--verbose"], "", 1),
        (&["-vv"], "", 2),
        (&["-v", "-v"], "", 2),
        (&[], "verbose = 1", 1),
        (&[], "verbose = 2", 2),
        (&["-vv"], "verbose = 0", 0),
        (&["-v"], "verbose = 2", 2),
    ] {
        let log = log_of(arguments, key);
        assert!(log.contains(" LOG ") && log.contains("process up"), "{log}");
        let lines = |level: &str, phrase: &str| {
            log.lines().filter(|line| line.contains(level) && line.contains(phrase)).count()
        };
        let logins = lines(" DEBUG ", "login finished");
        let moves = lines(" NOISE ", "goes from worker");
        assert_eq!(logins, if level >= 1 { 2 } else { 0 }, "{arguments:?} {key}: {log}");
        assert!(if level >= 2 { moves >= 2 } else { moves == 0 }, "{arguments:?} {key}: {moves} in {log}");
    }
}
