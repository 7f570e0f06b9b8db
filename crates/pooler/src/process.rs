// SPDX-License-Identifier: Apache-2.0
//! The process among others: user, capabilities, descriptors, PID file, background, service manager.
//!
//! All of it happens while the process has one thread: capabilities and no_new_privs belong to threads and are inherited by new ones.

use std::collections::HashSet;
use std::io::Read as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context as _;
use caps::{CapSet, Capability};
use nix::unistd::{Pid, User};
use sd_notify::NotifyState;
use underpass_config::Config;

use crate::lanes::Lanes;

/// Refuses to serve as root, which PgBouncer does too: a bug must not cost the machine. Returns the user to become, if any.
///
/// # Errors
/// Root without a user, a user that does not exist, or root as the user.
pub(crate) fn service_user(config: &Config, option: Option<&str>) -> anyhow::Result<Option<User>> {
    let name = option.or(config.user.as_deref()).filter(|name| !name.is_empty());
    let is_root = rustix::process::geteuid().is_root();
    let Some(name) = name else {
        anyhow::ensure!(
            !is_root,
            "will not run as root: set `user` in [pgbouncer], give -u USER, or start as another user"
        );
        return Ok(None);
    };
    let user = User::from_name(name)?
        .with_context(|| format!("user \"{name}\" does not exist: create it, or change `user` or -u"))?;
    anyhow::ensure!(!user.uid.is_root(), "will not run as root: `user` or -u must name another user");
    if rustix::process::geteuid().as_raw() == user.uid.as_raw() {
        return Ok(None);
    }
    anyhow::ensure!(is_root, "cannot become user \"{name}\": only root can; start as {name} or as root");
    Ok(Some(user))
}

/// Becomes `user`; capabilities stay permitted, for [`restrict`] to choose from.
///
/// # Errors
/// The kernel refuses, as in a container without CAP_SETUID.
pub(crate) fn become_user(user: &User) -> anyhow::Result<()> {
    let switch = || -> anyhow::Result<()> {
        // Without this the change of user id would drop them all (capabilities(7), "Effect of user ID changes").
        rustix::thread::set_keep_capabilities(true)?;
        nix::unistd::initgroups(&std::ffi::CString::new(user.name.as_str())?, user.gid)?;
        nix::unistd::setgid(user.gid)?;
        nix::unistd::setuid(user.uid)?;
        rustix::thread::set_keep_capabilities(false)?;
        Ok(())
    };
    switch().with_context(|| format!("cannot become user \"{}\"", user.name))
}

/// What kernel lanes need: BPF programs and maps (BPF), sockmaps and sk_msg (NET_ADMIN), reading kernel memory in programs (PERFMON).
const LANE_CAPABILITIES: [Capability; 3] =
    [Capability::CAP_BPF, Capability::CAP_NET_ADMIN, Capability::CAP_PERFMON];

/// Gives up, for good, every capability that the open lanes do not need; all of them without lanes. Lane A needs the sockets of other
/// processes of this host (SYS_PTRACE), too. No program started from here could get more (no_new_privs).
///
/// # Errors
/// The kernel refuses, which leaves the process with more than it should have: it must not go on.
pub(crate) fn restrict(lanes: Option<&Lanes>) -> anyhow::Result<()> {
    let mut wanted: HashSet<Capability> = HashSet::new();
    if let Some(lanes) = lanes {
        wanted.extend(LANE_CAPABILITIES);
        if lanes.is_local() {
            wanted.insert(Capability::CAP_SYS_PTRACE);
        }
    }
    let limit = || -> anyhow::Result<()> {
        let permitted = caps::read(None, CapSet::Permitted)?;
        let kept: HashSet<Capability> = permitted.intersection(&wanted).copied().collect();
        if permitted.contains(&Capability::CAP_SETPCAP) {
            // Changing the user has emptied the effective set.
            caps::set(None, CapSet::Effective, &permitted)?;
            for capability in caps::read(None, CapSet::Bounding)?.difference(&wanted) {
                caps::drop(None, CapSet::Bounding, *capability)?;
            }
        }
        if caps::read(None, CapSet::Ambient).is_ok_and(|ambient| !ambient.is_empty()) {
            caps::clear(None, CapSet::Ambient)?;
        }
        // Effective first: it must stay within permitted.
        caps::set(None, CapSet::Effective, &kept)?;
        caps::set(None, CapSet::Inheritable, &HashSet::new())?;
        caps::set(None, CapSet::Permitted, &kept)?;
        rustix::thread::set_no_new_privs(true)?;
        Ok(())
    };
    limit().context("cannot give up capabilities")
}

/// The PID file, removed when this is dropped.
#[derive(Debug)]
pub(crate) struct PidFile(PathBuf);

impl PidFile {
    /// Refuses to start beside the process that has written `pidfile`.
    ///
    /// # Errors
    /// It lives, or the file is not a PID file at all.
    pub fn refuse_second(path: &Path) -> anyhow::Result<()> {
        if let Some(pid) = running(path)? {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            anyhow::bail!(
                "pidfile {} exists, another instance running? It names process {pid} ({}): stop it, or choose another pidfile",
                path.display(),
                name.trim()
            );
        }
        Ok(())
    }

    /// Writes `pidfile`. One that a dead process left is replaced.
    ///
    /// # Errors
    /// The process it names lives, it is not a PID file at all, or it cannot be written.
    pub fn create(path: &Path) -> anyhow::Result<Self> {
        Self::refuse_second(path)?;
        if path.exists() {
            log::info!("stale pidfile, removing: {}", path.display());
            std::fs::remove_file(path)
                .with_context(|| format!("pidfile: cannot remove {}", path.display()))?;
        }
        let write = || {
            use std::io::Write as _;
            let mut file = std::fs::File::options().write(true).create_new(true).mode(0o644).open(path)?;
            writeln!(file, "{}", std::process::id())
        };
        write().with_context(|| {
            format!("pidfile: cannot write {}; check path and permissions", path.display())
        })?;
        Ok(Self(path.to_owned()))
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        // Only ours: a successor may have written its own.
        if std::fs::read_to_string(&self.0).is_ok_and(|text| text.trim() == std::process::id().to_string()) {
            let _ = std::fs::remove_file(&self.0);
        }
    }
}

/// The living process that a PID file names.
fn running(path: &Path) -> anyhow::Result<Option<i32>> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => anyhow::bail!("pidfile: cannot read {}: {error}", path.display()),
    };
    // A start that was interrupted.
    if text.trim().is_empty() {
        return Ok(None);
    }
    let pid = text.trim().parse::<i32>().ok().filter(|&pid| pid > 0);
    // Whatever it is, it is not ours to remove.
    let Some(pid) = pid else {
        anyhow::bail!(
            "pidfile {} exists and holds no process number: remove it, or choose another pidfile",
            path.display()
        );
    };
    // Our own number from an earlier life is stale: in a container every start may be process 1.
    let is_other = pid as u32 != std::process::id();
    let lives = is_other && nix::sys::signal::kill(Pid::from_raw(pid), None) != Err(nix::errno::Errno::ESRCH);
    Ok(lives.then_some(pid))
}

/// Tells the background process what it is. Its standard output is a pipe to the process that was started.
const BACKGROUND: &str = "UNDERPASS_BACKGROUND";

/// Whether this process is the one of `-d` that goes on in the background.
pub(crate) fn is_background() -> bool {
    std::env::var_os(BACKGROUND).is_some()
}

/// Starts this program again in a session of its own, and waits until that serves or has failed.
///
/// PgBouncer forks and returns before anything works; the caller here learns how it went. The new process starts from scratch, so
/// nothing is shared that a fork would copy.
///
/// # Errors
/// The background process could not start; it has said why on standard error.
pub(crate) fn start_in_background(config: &Config) -> anyhow::Result<()> {
    let has_pidfile = config.pidfile.as_ref().is_some_and(|path| !path.as_os_str().is_empty());
    anyhow::ensure!(has_pidfile, "-d needs a PID file: set pidfile in [pgbouncer]");
    let has_log = config.syslog || config.logfile.as_ref().is_some_and(|path| !path.as_os_str().is_empty());
    anyhow::ensure!(has_log, "-d needs a log: set logfile or syslog in [pgbouncer]");
    let program =
        std::env::current_exe().ok().filter(|path| path.exists()).unwrap_or_else(|| "/proc/self/exe".into());
    let mut arguments = std::env::args_os();
    let mut child = Command::new(program)
        .arg0(arguments.next().unwrap_or_else(|| "underpass".into()))
        .args(arguments)
        .env(BACKGROUND, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("-d: cannot start the background process")?;
    let mut answer = Vec::new();
    if let Some(mut pipe) = child.stdout.take() {
        let _ = pipe.read_to_end(&mut answer);
    }
    if answer == READY {
        return Ok(());
    }
    let status = child.wait()?;
    // What went wrong was said by the one that knows; the exit status carries on.
    std::process::exit(status.code().filter(|&code| code != 0).unwrap_or(1))
}

const READY: &[u8] = b"ready";

/// The background process leaves the terminal's session, before it does anything else.
pub(crate) fn detach() {
    // A process that was just started leads no group, so this cannot fail.
    let _ = rustix::process::setsid();
}

/// The background process serves: its starter may go, and its terminal is left alone from now on.
pub(crate) fn background_ready() -> anyhow::Result<()> {
    let null = std::fs::File::options().read(true).write(true).open("/dev/null").context("/dev/null")?;
    crate::logging::leave_stderr();
    let _ = rustix::io::write(rustix::stdio::stdout(), READY);
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    Ok(())
}

/// What the service manager is told (sd_notify(3)). Without one, nothing happens.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Life<'a> {
    Ready,
    Reloading,
    Stopping,
    /// One line for `systemctl status`.
    Status(&'a str),
}

/// Tells the service manager.
pub(crate) fn notify(life: Life<'_>) {
    let told = match life {
        Life::Ready => sd_notify::notify(&[NotifyState::Ready]),
        Life::Reloading => match NotifyState::monotonic_usec_now() {
            // Type=notify-reload wants to know that this is the answer to its signal and no older one.
            Ok(now) => sd_notify::notify(&[NotifyState::Reloading, now]),
            Err(error) => Err(error),
        },
        Life::Stopping => sd_notify::notify(&[NotifyState::Stopping]),
        Life::Status(line) => sd_notify::notify(&[NotifyState::Status(line)]),
    };
    if let Err(error) = told {
        log::debug!("cannot tell the service manager: {error}");
    }
}

/// Warns of files that a RELOAD could not read because the user that was switched to may not.
pub(crate) fn warn_of_unreadable(config: &Config, paths: &[PathBuf], user: &User) {
    let named = [
        &config.auth_file,
        &config.auth_hba_file,
        &config.auth_ident_file,
        &config.client_tls_key_file,
        &config.client_tls_cert_file,
        &config.client_tls_ca_file,
        &config.server_tls_key_file,
        &config.server_tls_cert_file,
        &config.server_tls_ca_file,
    ];
    for path in paths.iter().chain(named.into_iter().flatten()).filter(|path| !path.as_os_str().is_empty()) {
        if let Err(error) = std::fs::File::open(path) {
            log::warn!("user \"{}\" cannot read {} ({error}): RELOAD will fail", user.name, path.display());
        }
    }
}

/// Group and mode of a unix socket (`unix_socket_group`, `unix_socket_mode`).
///
/// # Errors
/// The group does not exist, or the process may not give the file to it.
pub(crate) fn share_socket(path: &Path, config: &Config) -> anyhow::Result<()> {
    if let Some(name) = config.unix_socket_group.as_deref().filter(|name| !name.is_empty()) {
        let gid = match nix::unistd::Group::from_name(name)? {
            Some(group) => group.gid.as_raw(),
            None => name.parse().ok().with_context(|| {
                format!("unix_socket_group: group \"{name}\" does not exist: create it or change the key")
            })?,
        };
        std::os::unix::fs::chown(path, None, Some(gid))
            .with_context(|| format!("unix_socket_group: cannot give {} to group {name}", path.display()))?;
    }
    let mode = std::fs::Permissions::from_mode(config.unix_socket_mode & 0o777);
    std::fs::set_permissions(path, mode).with_context(|| format!("unix_socket_mode: {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pidfile_of_the_dead_is_replaced_and_one_of_the_living_respected() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pid");
        // Process numbers end below this (proc_pid_max is at most 2^22).
        std::fs::write(&path, "4194305\n").unwrap();
        let file = PidFile::create(&path).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), format!("{}\n", std::process::id()));
        std::fs::write(&path, format!("{}\n", nix::unistd::getppid())).unwrap();
        let refusal = PidFile::create(&path).unwrap_err().to_string();
        assert!(refusal.contains("another instance running?"), "{refusal}");
        // It is somebody else's by now.
        drop(file);
        assert!(path.exists());
        std::fs::write(&path, format!("{}\n", std::process::id())).unwrap();
        drop(PidFile::create(&path).unwrap());
        assert!(!path.exists());
    }

    #[test]
    fn what_is_no_pidfile_is_left_alone_and_an_empty_one_is_stale() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pid");
        std::fs::write(&path, "\n").unwrap();
        assert_eq!(running(&path).unwrap(), None);
        for text in ["x", "-1", "0"] {
            std::fs::write(&path, text).unwrap();
            let refusal = running(&path).unwrap_err().to_string();
            assert!(refusal.contains("holds no process number"), "{text:?}: {refusal}");
        }
    }
}
