// SPDX-License-Identifier: Apache-2.0
//! A child process with its log in a file, that never outlives the test.
//!
//! Three ways to end are covered: drop (also during a panic's unwinding), and the death of the test process by a signal,
//! for which every child has a *guard*: a shell that reads from a pipe whose other end only the test process holds. End of
//! file there means that the owner is gone; the guard then ends the child and removes its directory. PR_SET_PDEATHSIG
//! would not do: it fires when the *thread* that started the child ends, and fixtures are shared between test threads.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::{Pid, User, geteuid};

use crate::{Error, Result};

/// How often a condition is looked at while waiting for it.
pub(crate) const POLL: Duration = Duration::from_millis(5);

const GUARD: &str = r#"trap '' INT TERM HUP QUIT
read -r _
kill -s "$1" "$2" 2>/dev/null
n=0; while [ $n -lt 100 ] && kill -0 "$2" 2>/dev/null; do sleep 0.05; n=$((n + 1)); done
kill -s KILL "$2" 2>/dev/null
rm -rf -- "$3""#;

/// A child process that ends with this value.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    guard: Child,
    log: PathBuf,
    end_signal: Signal,
    status: Option<ExitStatus>,
}

impl Process {
    /// Starts `command` with its output appended to `log`.
    ///
    /// `end_signal` is what ends it for good when the value is dropped or the test process dies; `directory` is removed by
    /// the guard in the latter case.
    pub fn spawn(
        name: &str,
        command: &mut Command,
        log: &Path,
        directory: &Path,
        end_signal: Signal,
    ) -> Result<Self> {
        Self::spawn_by(Command::spawn, name, command, log, directory, end_signal)
    }

    /// As [`Self::spawn`], as the first process of a process namespace of its own; as root only.
    pub(crate) fn spawn_apart(
        name: &str,
        command: &mut Command,
        log: &Path,
        directory: &Path,
        end_signal: Signal,
    ) -> Result<Self> {
        // The namespace is for what the thread starts from then on, which must be this child alone.
        let start = |command: &mut Command| {
            thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    unshare(CloneFlags::CLONE_NEWPID)?;
                    command.spawn()
                });
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
        };
        Self::spawn_by(start, name, command, log, directory, end_signal)
    }

    fn spawn_by(
        start: impl FnOnce(&mut Command) -> io::Result<Child>,
        name: &str,
        command: &mut Command,
        log: &Path,
        directory: &Path,
        end_signal: Signal,
    ) -> Result<Self> {
        let output = File::options()
            .create(true)
            .append(true)
            .open(log)
            .map_err(Error::io(format!("open {}", log.display())))?;
        let errors = output.try_clone().map_err(Error::io("duplicate log"))?;
        // A process group of its own: Ctrl-C in the terminal reaches the test, and the test ends its children in order.
        command.stdin(Stdio::null()).stdout(output).stderr(errors).process_group(0);
        let mut child = start(command).map_err(Error::io(format!("start {name}")))?;
        let guard = Command::new("/bin/sh")
            .args(["-c", GUARD, "testkit-guard"])
            .arg(end_signal.as_str().trim_start_matches("SIG"))
            .arg(child.id().to_string())
            .arg(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn();
        let guard = match guard {
            Ok(guard) => guard,
            Err(source) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(Error::Io { what: "start guard".into(), source });
            }
        };
        Ok(Self { name: name.into(), child, guard, log: log.into(), end_signal, status: None })
    }

    /// Process identifier.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything that the process has written so far.
    pub fn log(&self) -> String {
        fs::read(&self.log).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// The last 30 lines of the log, for messages.
    pub(crate) fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    /// Sends a signal. After SIGSTOP it is waited for: the threads of a process stop one by one, each when it is scheduled next.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        if self.status.is_some() {
            return Err(self.exited_error());
        }
        let pid = Pid::from_raw(self.pid() as i32);
        let failed = |errno: Errno| Error::Io { what: format!("signal {}", self.name), source: errno.into() };
        kill(pid, signal).map_err(failed)?;
        if signal == Signal::SIGSTOP {
            // The kernel tells the parent when the last thread has stopped. Who has ended instead stays to be waited for.
            let flags = WaitPidFlag::WSTOPPED | WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
            waitid(Id::Pid(pid), flags).map_err(failed)?;
        }
        Ok(())
    }

    /// Whether it has not ended.
    pub fn is_running(&mut self) -> bool {
        if self.status.is_none() {
            self.status = self.child.try_wait().ok().flatten();
        }
        self.status.is_none()
    }

    /// Waits until it has ended by itself.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + limit;
        while self.is_running() {
            if Instant::now() > deadline {
                return Err(self.timeout_error("end of process", limit));
            }
            thread::sleep(POLL);
        }
        self.status.ok_or(Error::Closed)
    }

    /// Sends `signal`, waits at most `limit`, then kills.
    pub fn stop(&mut self, signal: Signal, limit: Duration) -> Result<ExitStatus> {
        if self.is_running() {
            self.signal(signal)?;
        }
        let ended = self.wait(limit);
        if ended.is_err() {
            let _ = self.child.kill();
            self.status = self.child.wait().ok();
        }
        ended
    }

    /// Waits until a line of the log contains `phrase`, and returns that line.
    pub fn wait_log(&mut self, phrase: &str, limit: Duration) -> Result<String> {
        let deadline = Instant::now() + limit;
        loop {
            let running = self.is_running();
            if let Some(line) = self.log().lines().find(|line| line.contains(phrase)) {
                return Ok(line.into());
            }
            if !running {
                return Err(self.exited_error());
            }
            if Instant::now() > deadline {
                return Err(self.timeout_error(&format!("`{phrase}` in the log of {}", self.name), limit));
            }
            thread::sleep(POLL);
        }
    }

    /// Calls `probe` until it succeeds, the process ends or the time is over.
    pub(crate) fn wait_ready(
        &mut self,
        limit: Duration,
        mut probe: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let deadline = Instant::now() + limit;
        loop {
            let Err(error) = probe() else { return Ok(()) };
            if !self.is_running() {
                return Err(self.exited_error());
            }
            if Instant::now() > deadline {
                return Err(self.timeout_error(&format!("{} answers ({error})", self.name), limit));
            }
            thread::sleep(POLL);
        }
    }

    pub(crate) fn exited_error(&self) -> Error {
        let status = self.status.map_or_else(|| "running".into(), |status| status.to_string());
        Error::Exited { program: self.name.clone(), status, log: self.log_tail() }
    }

    fn timeout_error(&self, what: &str, limit: Duration) -> Error {
        Error::Timeout { what: what.into(), limit, log: self.log_tail() }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The guard first: once the child is reaped its number may belong to somebody else.
        let _ = self.guard.kill();
        let _ = self.guard.wait();
        let _ = self.stop(self.end_signal, Duration::from_secs(10));
    }
}

/// The user that PostgreSQL and the pooler run as: `None` unless we are root, else `postgres`, else `nobody`.
pub fn service_user() -> Option<User> {
    if !geteuid().is_root() {
        return None;
    }
    ["postgres", "nobody"].into_iter().find_map(|name| User::from_name(name).ok().flatten())
}

/// A command that runs as [`service_user`], in `directory` (the current one may be closed to that user).
pub(crate) fn service_command(program: &Path, directory: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(directory).env("HOME", directory).env("LC_ALL", "C").env("TZ", "UTC");
    if let Some(user) = service_user() {
        command.uid(user.uid.as_raw()).gid(user.gid.as_raw());
    }
    command
}

/// A temporary directory that [`service_user`] owns and that holds unix sockets (so its name is short).
pub(crate) fn service_directory() -> Result<tempfile::TempDir> {
    let directory = tempfile::Builder::new()
        .prefix("underpass-")
        .tempdir_in("/tmp")
        .map_err(Error::io("temporary directory"))?;
    give_to_service_user(directory.path(), 0o755)?;
    Ok(directory)
}

/// Makes a directory that [`service_user`] owns.
pub(crate) fn make_service_directory(path: &Path) -> Result<()> {
    fs::create_dir(path).map_err(Error::io(format!("make {}", path.display())))?;
    give_to_service_user(path, 0o700)
}

/// Writes a file that [`service_user`] owns.
pub(crate) fn write_service_file(path: &Path, content: &str, mode: u32) -> Result<()> {
    fs::write(path, content).map_err(Error::io(format!("write {}", path.display())))?;
    give_to_service_user(path, mode)
}

fn give_to_service_user(path: &Path, mode: u32) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let name = path.display().to_string();
    if let Some(user) = service_user() {
        chown(path, Some(user.uid.as_raw()), Some(user.gid.as_raw()))
            .map_err(Error::io(format!("chown {name}")))?;
    }
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(Error::io(format!("chmod {name}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper(directory: &Path) -> Process {
        let mut command = service_command(Path::new("/bin/sleep"), directory);
        Process::spawn("sleep", command.arg("1000"), &directory.join("log"), directory, Signal::SIGKILL)
            .unwrap()
    }

    fn exists(pid: u32) -> bool {
        kill(Pid::from_raw(pid as i32), None).is_ok()
    }

    #[test]
    fn drop_ends_the_child() {
        let directory = service_directory().unwrap();
        let process = sleeper(directory.path());
        let pid = process.pid();
        drop(process);
        assert!(!exists(pid));
    }

    #[test]
    fn a_panic_ends_the_child() {
        let directory = service_directory().unwrap();
        let process = sleeper(directory.path());
        let pid = process.pid();
        let thread = thread::spawn(move || {
            let _process = process;
            panic!("expected by the test");
        });
        assert!(thread.join().is_err());
        assert!(!exists(pid));
    }

    #[test]
    fn the_guard_ends_the_child_when_the_owner_is_gone() {
        let directory = service_directory().unwrap();
        let mut process = sleeper(directory.path());
        // What the kernel does when the owner is killed: the pipe's only writing end is closed.
        drop(process.guard.stdin.take());
        process.wait(Duration::from_secs(10)).unwrap();
        process.guard.wait().unwrap();
        assert!(!directory.path().exists());
    }

    #[test]
    fn an_early_end_is_reported_with_the_log() {
        let directory = service_directory().unwrap();
        let mut command = service_command(Path::new("/bin/sh"), directory.path());
        command.args(["-c", "echo no such thing; exit 3"]);
        let mut process = Process::spawn(
            "sh",
            &mut command,
            &directory.path().join("log"),
            directory.path(),
            Signal::SIGKILL,
        )
        .unwrap();
        let error = process.wait_log("ready", Duration::from_secs(10)).unwrap_err().to_string();
        assert!(error.contains("no such thing") && error.contains('3'), "{error}");
    }
}
