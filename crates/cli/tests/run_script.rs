// SPDX-License-Identifier: Apache-2.0
//! `make run`: scripts/run.sh as a newcomer uses it, without the build.

mod common;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use common::{binary, output, wait};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use underpass_testkit::{AuthMethod, Client, Options, Postgres, service_user};

fn script() -> Command {
    let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/run.sh"));
    // A process group of its own is what a terminal gives it, and sends the signal of Ctrl-C to.
    command.env("UNDERPASS_BIN", binary()).env_remove("UPSTREAM").stdin(Stdio::null()).process_group(0);
    command
}

/// A run in the foreground of its terminal, interrupted when this is dropped.
struct Run {
    child: Child,
    printed: Vec<String>,
}

impl Run {
    fn start() -> Self {
        Self::of(&mut script())
    }

    fn of(script: &mut Command) -> Self {
        let child = script.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("bash");
        Self { child, printed: Vec::new() }
    }

    /// Reads until it is ready.
    fn wait_ready(&mut self) {
        let mut lines = BufReader::new(self.child.stdout.take().unwrap()).lines();
        while self.printed.last().is_none_or(|line| line != "Ctrl-C stops it.") {
            let Some(line) = lines.next() else {
                let mut said = String::new();
                self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
                panic!("it ended: {:?} {said}", self.printed);
            };
            self.printed.push(line.unwrap());
        }
    }

    /// What stands behind this word, which a line begins with.
    fn told(&self, word: &str) -> &str {
        let lines = self.printed.iter().map(|line| line.trim());
        lines.filter_map(|line| line.strip_prefix(word)).next().expect(word).trim()
    }

    fn directory(&self) -> PathBuf {
        Path::new(self.told("config")).parent().unwrap().to_owned()
    }

    /// Where the printed psql line leads.
    fn options(&self) -> Options {
        let line = self.told("try");
        let key = |key: &str| {
            let value = line.split([' ', '"']).find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
            value.unwrap_or_else(|| panic!("no {key}: {line}"))
        };
        assert_eq!(key("host"), "127.0.0.1");
        Options::new(key("port").parse().unwrap(), key("user"), key("dbname"))
    }

    /// What a printed line prints, when it is entered in a shell with this behind it.
    fn entered(&self, word: &str, more: &str) -> String {
        let ended = output(Command::new("bash").arg("-c").arg(format!("{} {more}", self.told(word))));
        assert!(ended.status.success(), "{word}: {}", String::from_utf8_lossy(&ended.stderr));
        String::from_utf8(ended.stdout).unwrap()
    }

    fn interrupt(&self) {
        killpg(Pid::from_raw(self.child.id() as i32), Signal::SIGINT).unwrap();
    }

    /// After Ctrl-C: what it leaves.
    fn leaves_nothing(mut self) {
        let directory = self.directory();
        self.interrupt();
        let status = wait("the end of scripts/run.sh", || self.child.try_wait().unwrap());
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(status.success() && said.contains("stopped, nothing left behind"), "{status}: {said}");
        assert!(!directory.exists(), "{}", directory.display());
        assert_eq!(processes_of(&directory), Vec::<String>::new());
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.interrupt();
            let _ = self.child.wait();
        }
    }
}

/// Command lines and working directories that name it.
fn processes_of(directory: &Path) -> Vec<String> {
    let name = directory.to_str().unwrap();
    let processes = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let of = |process: PathBuf| {
        let command = std::fs::read(process.join("cmdline")).ok()?;
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        let is_in = std::fs::read_link(process.join("cwd")).is_ok_and(|cwd| cwd.starts_with(directory));
        (is_in || command.contains(name)).then_some(command)
    };
    processes.filter_map(of).collect()
}

#[test]
fn two_runs_at_once_serve_and_leave_nothing_behind() {
    let mut runs = [Run::start(), Run::start()];
    runs.iter_mut().for_each(Run::wait_ready);
    assert_ne!(runs[0].directory(), runs[1].directory());
    assert_ne!(runs[0].told("try"), runs[1].told("try"), "busy ports are stepped over");
    for run in &runs {
        assert!(!processes_of(&run.directory()).is_empty());
        let mut client = Client::connect(&run.options()).unwrap();
        assert_eq!(client.query("select 41 + 1").unwrap().ok().unwrap().value(), Some("42"));
        // Whoever is connected does not keep it from ending.
        std::mem::forget(client);
    }
    runs.into_iter().for_each(Run::leaves_nothing);
}

#[test]
fn a_run_that_is_interrupted_while_it_starts_leaves_nothing_behind() {
    let is_there = |_: &Path| true;
    let has_initdb = |directory: &Path| processes_of(directory).iter().any(|line| line.contains("initdb"));
    interrupted_when("its directory", is_there);
    interrupted_when("initdb", has_initdb);
}

fn interrupted_when(what: &str, is_so: impl Fn(&Path) -> bool) {
    let scratch = tempfile::tempdir().unwrap();
    // PostgreSQL runs as another user than root.
    std::fs::set_permissions(scratch.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = script();
    command.env("TMPDIR", scratch.path()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let directory = wait(what, || {
        let mut entries = std::fs::read_dir(scratch.path()).unwrap().flatten().map(|entry| entry.path());
        entries.find(|entry| is_so(entry))
    });
    killpg(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    wait("the end of scripts/run.sh", || child.try_wait().unwrap());
    assert!(!directory.exists(), "{}", directory.display());
    assert_eq!(processes_of(&directory), Vec::<String>::new());
}

#[test]
fn an_upstream_that_asks_for_a_password_is_served_and_the_printed_lines_work() {
    let server = Postgres::builder()
        .auth(AuthMethod::Scram)
        .user("app", "it's %1: a/b@c")
        .start()
        .expect("PostgreSQL");
    assert!(Client::connect(&server.options("app", "postgres")).is_err(), "no login without the password");
    let upstream =
        format!("postgres://app:it%27s%20%251%3A%20a%2Fb%40c@127.0.0.1:{}/postgres", server.port());
    let mut run = Run::of(script().env("UPSTREAM", upstream));
    run.wait_ready();
    assert_eq!(run.entered("try", "-XAt -c 'select current_user, inet_server_port()'").trim(), {
        format!("app|{}", server.port())
    });
    let pools = run.entered("console", "-XAt");
    assert!(pools.lines().any(|line| line.starts_with("postgres|app|")), "{pools}");
    let kernel = run.entered("kernel", "-XAt");
    assert!(!kernel.is_empty());
    let metrics = run.entered("metrics", "-sS");
    let is_pool = |line: &str| line.contains("database=\"postgres\"") && line.contains("user=\"app\"");
    assert!(metrics.lines().any(is_pool), "{metrics}");
    run.leaves_nothing();
}

/// Who is not root, and has next to no programs: every package is named, and apt-get is not run.
#[test]
fn who_may_not_install_is_told_what_to_install() {
    let bin = tempfile::tempdir().unwrap();
    std::fs::set_permissions(bin.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    std::os::unix::fs::symlink("/usr/bin/id", bin.path().join("id")).unwrap();
    let apt_get = bin.path().join("apt-get");
    std::fs::write(&apt_get, format!("#!/bin/sh\n: >{}/was-run\n", bin.path().display())).unwrap();
    std::fs::set_permissions(&apt_get, std::fs::Permissions::from_mode(0o755)).unwrap();
    for (argument, packages) in [
        ("run", &["build-essential", "pkg-config", "clang-19", "postgresql-client", "curl"][..]),
        ("ci", &["build-essential", "python3-venv", "openssl", "git", "mariadb-client"]),
    ] {
        // By way of standard input: where the sources are may be closed to that user.
        let text =
            std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/install.sh")).unwrap();
        let mut command = Command::new("/bin/bash");
        command.args(["-s", argument]).env_clear().env("PATH", bin.path()).current_dir("/");
        if let Some(user) = service_user() {
            command.uid(user.uid.as_raw()).gid(user.gid.as_raw());
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(&text).unwrap();
        let ended = child.wait_with_output().unwrap();
        let said = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(1), "{said}");
        let line = said.strip_prefix("missing: install it as root with\n  apt-get install ").expect(&said);
        let named: Vec<&str> = line.split_whitespace().collect();
        assert!(packages.iter().all(|package| named.contains(package)), "{said}");
        assert!(said.lines().count() == 2 && ended.stdout.is_empty(), "{said}");
        assert!(!bin.path().join("was-run").exists());
    }
}

#[test]
fn what_upstream_says_is_passed_on_or_refused() {
    let said = |upstream: &str| {
        let ended = output(script().env("UPSTREAM", upstream));
        assert_eq!(ended.status.code(), Some(1));
        String::from_utf8(ended.stderr).unwrap()
    };
    let unknown = said("postgres://app:secret@db.example/app?sslmode=require&application_name=x");
    assert!(unknown.contains("error: UPSTREAM: application_name is not passed on"), "{unknown}");
    let wrong = said("postgres://app:secret@db.example/app?sslmode=perhaps");
    assert!(wrong.contains("server_tls_sslmode") && wrong.contains("perhaps"), "{wrong}");
    let none = said("mysql://db.example/app");
    assert!(none.contains("UPSTREAM is not postgres://"), "{none}");
}
