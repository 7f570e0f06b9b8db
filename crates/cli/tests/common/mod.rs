// SPDX-License-Identifier: Apache-2.0
//! A directory with a configuration, and the binary run in it.
#![allow(dead_code, reason = "every test file uses a part")]

use std::fs;
use std::io::BufRead as _;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use underpass_testkit::{Port, Postgres, service_user};

/// Longest wait for anything; a loaded machine is slow.
pub const LIMIT: Duration = Duration::from_secs(30);

/// A directory that the service user owns, with a pgbouncer.ini and a port of its own.
pub struct Site {
    directory: tempfile::TempDir,
    port: Port,
}

impl Site {
    /// `keys` are lines of `[pgbouncer]`; `{dir}` stands for the directory.
    pub fn new(keys: &str) -> Self {
        Self::with_database("* = host=127.0.0.1 port=1 user=postgres", keys, "kernel_path = off")
    }

    /// The same with a line of `[databases]` and lines of `[underpass]`.
    pub fn with_database(database: &str, keys: &str, own: &str) -> Self {
        let directory = tempfile::Builder::new().prefix("underpass-").tempdir_in("/tmp").unwrap();
        let site = Self { directory, port: Port::reserve().unwrap() };
        if let Some(user) = service_user() {
            chown(site.path(""), Some(user.uid.as_raw()), Some(user.gid.as_raw())).unwrap();
        }
        let port = site.port.number();
        let text = format!(
            "[databases]\n{database}\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
             unix_socket_dir = {{dir}}\nauth_type = any\nadmin_users = admin\n{keys}\n[underpass]\n{own}\n"
        );
        site.write("pgbouncer.ini", &text);
        site
    }

    pub fn port(&self) -> u16 {
        self.port.number()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes a file; `{dir}` in it stands for the directory.
    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text.replace("{dir}", self.directory.path().to_str().unwrap())).unwrap();
    }

    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// `underpass pooler`, as root with `-u`, and the arguments; the configuration comes last.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(binary());
        command.current_dir(self.directory.path()).env("TZ", "UTC").arg("pooler");
        if let Some(user) = service_user() {
            command.args(["-u", &user.name]);
        }
        command.args(arguments).arg(self.path("pgbouncer.ini"));
        command
    }

    /// A start that must fail: what it says on standard error.
    pub fn refused(&self, arguments: &[&str]) -> String {
        let Output { status, stderr, .. } = output(&mut self.command(arguments));
        let text = String::from_utf8(stderr).unwrap();
        assert_eq!(status.code(), Some(1), "{text}");
        assert!(text.lines().all(|line| !line.is_empty()), "{text}");
        text
    }

    /// Starts it in the foreground, without waiting.
    pub fn start(&self, arguments: &[&str]) -> Running {
        Running(self.command(arguments).stdin(Stdio::null()).spawn().unwrap())
    }

    /// Waits until the pooler serves. An open port alone does not say that: it opens early in the start.
    pub fn wait_serving(&self) {
        wait("the port", || std::net::TcpStream::connect(("127.0.0.1", self.port())).ok());
        let _ = self.console("SHOW VERSION");
    }

    /// An answer of the console: all values.
    pub fn console(&self, query: &str) -> Vec<Vec<Option<String>>> {
        let options = underpass_testkit::Options::new(self.port(), "admin", "pgbouncer").read_timeout(LIMIT);
        let mut client = underpass_testkit::Client::connect(&options).unwrap();
        client.query(query).unwrap().ok().unwrap().rows()
    }
}

/// A pooler in the foreground; killed when dropped.
pub struct Running(pub Child);

impl Running {
    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.0.id() as i32), signal).unwrap();
    }

    /// The exit code, once it has ended.
    pub fn wait(&mut self) -> Option<i32> {
        wait("the end of the pooler", || self.0.try_wait().unwrap()).code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn binary() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_underpass"))
}

/// Runs to the end. One that should have failed but serves is ended by the time limit.
pub fn output(command: &mut Command) -> Output {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    limited(child)
}

/// Asks again and again until there is an answer.
pub fn wait<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(Instant::now() < deadline, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether this process may not record; then it has said so.
pub fn skipped() -> bool {
    let missing = underpass_capture::missing_capabilities();
    if !missing.is_empty() {
        eprintln!("skipped: needs {}", missing.join(", "));
    }
    !missing.is_empty()
}

/// Waits until no client over TCP is connected any more.
pub fn wait_gone(postgres: &Postgres) {
    let clients = "select count(*) from pg_stat_activity where client_port > 0";
    wait("the last client to go", || (postgres.sql_value(clients).expect("statistics") == "0").then_some(()));
}

/// Ends a recorder as an operator does: its exit status, and what it reported.
pub fn stop_recorder(recorder: Child) -> (Option<i32>, String) {
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(recorder.id() as i32),
        nix::sys::signal::Signal::SIGTERM,
    )
    .expect("kill");
    ended(recorder)
}

/// Waits for the end of a recorder: its exit status, and what it reported. One that goes on and on is killed, which is no exit status.
pub fn ended(recorder: Child) -> (Option<i32>, String) {
    let output = limited(recorder);
    (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
}

/// What a process has printed when it ends, by itself or by the time limit.
fn limited(child: Child) -> Output {
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    let (ended, is_over) = std::sync::mpsc::channel::<()>();
    let watch = std::thread::spawn(move || {
        if is_over.recv_timeout(LIMIT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
        }
    });
    let output = child.wait_with_output().expect("an end");
    drop(ended);
    watch.join().expect("a watch");
    output
}

/// `underpass trace` that has begun.
pub fn start_recorder(arguments: &[&str]) -> Child {
    start_recorder_in(Path::new("."), arguments)
}

/// The same in a directory.
pub fn start_recorder_in(directory: &Path, arguments: &[&str]) -> Child {
    // It goes on without its terminal where SIGHUP is ignored, as it is for tests that nohup runs.
    let mut child = Command::new("env")
        .arg("--default-signal=HUP")
        .arg(binary())
        .arg("trace")
        .args(arguments)
        .current_dir(directory)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("underpass");
    let mut line = String::new();
    std::io::BufReader::new(child.stderr.take().expect("stderr")).read_line(&mut line).expect("a line");
    assert!(line.starts_with("recording PostgreSQL") || line.starts_with("recording MariaDB"), "{line}");
    child
}
