// SPDX-License-Identifier: Apache-2.0
//! Starting and stopping programs so that nothing of a run outlives it.
//!
//! Every program is started through `setpriv --pdeathsig`, so even a killed bench leaves no server behind, in a
//! process group of its own, so that Ctrl-C at the terminal reaches only the bench, which then stops them in order.
//! The death signal follows the *thread* that started the program: only the main thread starts long-lived ones.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};
use std::{env, fs, io, thread};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Gid, Pid, Uid, User};

/// Who runs the servers: PostgreSQL refuses root.
#[derive(Clone, Debug)]
pub struct Account {
    /// User id for `setpriv`, or `None` when the bench itself is unprivileged and everything runs as it.
    pub switch_to: Option<(Uid, Gid)>,
    /// The account's name, which PostgreSQL's trust and peer rules and `user =` of a pooler need.
    pub name: String,
}

impl Account {
    /// The account for servers: `postgres`, else `nobody`, when the bench is root; else the caller.
    ///
    /// # Errors
    /// When the account database has none of them.
    pub fn for_servers() -> Result<Self> {
        if !Uid::effective().is_root() {
            let user = User::from_uid(Uid::effective())?.context("this user has no entry in passwd")?;
            return Ok(Self { switch_to: None, name: user.name });
        }
        for name in ["postgres", "nobody"] {
            if let Some(user) = User::from_name(name)? {
                return Ok(Self { switch_to: Some((user.uid, user.gid)), name: user.name });
            }
        }
        bail!("running as root, and neither user postgres nor nobody exists to run PostgreSQL as: create one")
    }

    /// Gives a path to the account, so that its programs can write there.
    ///
    /// # Errors
    /// When the owner cannot be changed.
    pub fn give(&self, path: &Path) -> Result<()> {
        let (uid, gid) = match self.switch_to {
            Some((uid, gid)) => (Some(uid), Some(gid)),
            None => return Ok(()),
        };
        nix::unistd::chown(path, uid, gid).with_context(|| format!("chown {}", path.display()))
    }
}

/// How a program is to be started.
#[derive(Clone, Debug, Default)]
pub struct Launch {
    /// Network namespace by name (`ip netns`), or the current one.
    pub netns: Option<String>,
    /// CPUs it may use, as `taskset -c` takes them, or all.
    pub cpus: Option<String>,
    /// Folder of a control group that it is in from its first instruction on.
    pub cgroup: Option<PathBuf>,
    /// Stay the user of the bench instead of switching to the server account.
    pub keep_user: bool,
}

impl Launch {
    /// A command that ends in `program`, run as asked.
    #[must_use]
    pub fn command(&self, account: &Account, program: impl AsRef<OsStr>) -> Command {
        let mut words: Vec<String> = Vec::new();
        if let Some(netns) = &self.netns {
            words.extend(["nsenter".to_owned(), format!("--net=/run/netns/{netns}")]);
        }
        if let Some(cgroup) = &self.cgroup {
            let enter = "echo $$ > \"$0\"/cgroup.procs && exec \"$@\"";
            words.extend(["sh".to_owned(), "-c".to_owned(), enter.to_owned(), cgroup.display().to_string()]);
        }
        if let Some(cpus) = &self.cpus {
            words.extend(["taskset".to_owned(), "-c".to_owned(), cpus.clone()]);
        }
        words.extend(["setpriv".to_owned(), "--pdeathsig".to_owned(), "TERM".to_owned()]);
        if let (Some((uid, gid)), false) = (account.switch_to, self.keep_user) {
            words.push(format!("--reuid={uid}"));
            words.push(format!("--regid={gid}"));
            words.push("--clear-groups".to_owned());
        }
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).arg("--").arg(program).process_group(0);
        command
    }
}

/// A running program that is stopped when the value goes.
#[derive(Debug)]
pub struct Running {
    child: Child,
    what: String,
    stop_with: Signal,
}

impl Running {
    /// Starts `command`; `what` names it in messages and `stop_with` is its signal for an orderly end.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(mut command: Command, what: &str, stop_with: Signal) -> Result<Self> {
        let child = command.spawn().with_context(|| format!("cannot start {what}"))?;
        Ok(Self { child, what: what.to_owned(), stop_with })
    }

    /// Its process id. The launcher execs, so this is the program itself.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The standard output, error or input, once.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// The exit status if it has ended.
    ///
    /// # Errors
    /// As waitpid(2).
    pub fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Sends a signal to the program.
    pub fn signal(&self, signal: Signal) {
        // The pid is ours until it is waited for, which only this value does; an error means it has just ended.
        let _ = kill(self.nix_pid(), signal);
    }

    /// Asks it to end, waits up to `patience`, then kills its whole process group.
    pub fn stop(&mut self, patience: Duration) {
        if matches!(self.child.try_wait(), Ok(Some(_)) | Err(_)) {
            return;
        }
        self.signal(self.stop_with);
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline {
            if matches!(self.child.try_wait(), Ok(Some(_)) | Err(_)) {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        eprintln!("{} did not stop within {} s: killed", self.what, patience.as_secs());
        let _ = nix::sys::signal::killpg(self.nix_pid(), Signal::SIGKILL);
        let _ = self.child.wait();
    }

    fn nix_pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).expect("a pid fits i32"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop(Duration::from_secs(5));
    }
}

/// Runs a program to its end and returns its standard output.
///
/// # Errors
/// When it cannot be started or fails; the message carries what it wrote to standard error.
pub fn output(mut command: Command, what: &str) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot run {what}"))?;
    if !output.status.success() {
        bail!("{what} failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Finds a program: beside this one, in target/release, among PostgreSQL's own, on PATH, in the sbin folders.
#[must_use]
pub fn find_program(name: &str) -> Option<PathBuf> {
    if name.contains('/') {
        return is_program(Path::new(name)).then(|| PathBuf::from(name));
    }
    let beside = env::current_exe().ok().and_then(|path| path.parent().map(Path::to_path_buf));
    let release = PathBuf::from("target/release");
    let path = env::var_os("PATH").unwrap_or_default();
    beside
        .into_iter()
        .chain([release])
        // Before PATH: there Debian has wrappers in Perl that would be measured too.
        .chain(postgres_folders())
        .chain(env::split_paths(&path))
        .chain(["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|path| is_program(path))
        // Links are kept: some programs look at the name they were called by.
        .map(|path| std::path::absolute(&path).unwrap_or(path))
}

/// `bin` folders of installed PostgreSQL servers, newest first.
fn postgres_folders() -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir("/usr/lib/postgresql") else { return Vec::new() };
    let mut versions: Vec<(u32, PathBuf)> = entries
        .flatten()
        .filter_map(|entry| {
            Some((entry.file_name().to_string_lossy().parse().ok()?, entry.path().join("bin")))
        })
        .collect();
    versions.sort();
    versions.into_iter().rev().map(|(_, path)| path).collect()
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nobody_special() -> Account {
        Account { switch_to: None, name: "me".to_owned() }
    }

    #[test]
    fn a_dropped_program_is_gone() {
        let mut command = Launch::default().command(&nobody_special(), "sleep");
        command.arg("60");
        let running = Running::start(command, "sleep", Signal::SIGTERM).unwrap();
        let proc = PathBuf::from(format!("/proc/{}", running.pid()));
        assert!(proc.exists());
        drop(running);
        assert!(!proc.exists());
    }

    #[test]
    fn a_program_that_ignores_its_signal_is_killed() {
        let mut command = Launch::default().command(&nobody_special(), "sh");
        command.args(["-c", "trap '' TERM; while :; do sleep 0.1; done"]);
        let mut running = Running::start(command, "stubborn sh", Signal::SIGTERM).unwrap();
        thread::sleep(Duration::from_millis(200));
        running.stop(Duration::from_millis(300));
        assert!(!PathBuf::from(format!("/proc/{}", running.pid())).exists());
    }

    #[test]
    fn programs_are_found_and_missing_ones_are_not() {
        assert!(find_program("sh").is_some());
        assert!(find_program("no-such-program-anywhere").is_none());
        assert!(find_program("/etc/passwd").is_none());
    }

    #[test]
    fn a_failing_program_tells_its_error() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo broken >&2; exit 3"]);
        let error = output(command, "the test program").unwrap_err().to_string();
        assert!(error.contains("broken") && error.contains("the test program"), "{error}");
    }
}
