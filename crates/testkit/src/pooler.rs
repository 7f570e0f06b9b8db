// SPDX-License-Identifier: Apache-2.0
//! Poolers under test, from one description: ours and Debian's PgBouncer start from the same ini.

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use nix::sys::signal::Signal;
use tempfile::TempDir;

use crate::process::{service_command, service_directory, service_user, write_service_file};
use crate::{Account, Client, Error, MockServer, Options, Port, Postgres, Process, Response, Result};

const START_LIMIT: Duration = Duration::from_secs(60);
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// Environment variable: `off` or `require`, the `kernel_path` of our poolers whose [`Ini`] does not have the key.
const KERNEL_PATH_VARIABLE: &str = "UNDERPASS_TEST_KERNEL_PATH";

/// The pooler's variable that takes clients out of their lanes at random.
const FLIP_VARIABLE: &str = "UNDERPASS_TEST_FLIP";

/// The admin user that every [`Ini`] has, by any `auth_type`.
const ADMIN: (&str, &str) = ("pooler_admin", "pooler_admin_password");

/// The text of a pgbouncer.ini with its userlist and HBA file, independent of ports and directories.
///
/// Already set: `listen_addr` 127.0.0.1, port and `unix_socket_dir` of the fixture, `auth_type = trust`, an admin user,
/// `max_client_conn = 1000`, no cap on idle logins. A later value of a key wins, as in the file itself.
#[derive(Debug, Clone, Default)]
pub struct Ini {
    databases: Vec<(String, String)>,
    users: Vec<(String, String)>,
    settings: BTreeMap<String, String>,
    userlist: Vec<(String, String)>,
    hba: Option<String>,
    tail: String,
    launch: Launch,
}

/// How the process is started.
#[derive(Debug, Clone, Default)]
struct Launch {
    /// With kernel lanes: with our own privileges.
    has_lanes: bool,
    environment: Vec<(String, String)>,
}

impl Ini {
    /// No databases and users yet.
    pub fn new() -> Self {
        Self::default().userlist(ADMIN.0, ADMIN.1)
    }

    /// Any database name (`*`) leads to this server.
    pub fn for_server(server: &Postgres) -> Self {
        Self::new().database("*", &format!("host=127.0.0.1 port={}", server.port())).userlist("postgres", "")
    }

    /// Transaction pooling over one connection to a scripted server, which is asked for nothing that it does not expect.
    pub fn for_mock(mock: &MockServer) -> Self {
        Self::new()
            .database("postgres", &format!("host=127.0.0.1 port={} user=joe pool_size=1", mock.port()))
            .userlist("postgres", "")
            .set("pool_mode", "transaction")
            .set("server_tls_sslmode", "disable")
            .set("server_check_delay", "1000")
    }

    /// A line of `[databases]`: name and connection string.
    pub fn database(mut self, name: &str, connection: &str) -> Self {
        self.databases.push((name.into(), connection.into()));
        self
    }

    /// A line of `[users]`.
    pub fn user(mut self, name: &str, settings: &str) -> Self {
        self.users.push((name.into(), settings.into()));
        self
    }

    /// A key of `[pgbouncer]`.
    pub fn set(mut self, key: &str, value: &str) -> Self {
        self.settings.insert(key.into(), value.into());
        self
    }

    /// A line of the userlist: plain password, md5 hash or SCRAM secret.
    pub fn userlist(mut self, user: &str, secret: &str) -> Self {
        self.userlist.push((user.into(), secret.into()));
        self
    }

    /// Text of `auth_hba_file`; also sets `auth_type = hba`.
    pub fn hba(mut self, text: &str) -> Self {
        self.hba = Some(text.into());
        self.set("auth_type", "hba")
    }

    /// Further text at the end of the file, as it is: sections of our own, `%include`, mistakes.
    pub fn tail(mut self, text: &str) -> Self {
        self.tail.push_str(text);
        self.tail.push('\n');
        self
    }

    /// Kernel lanes, required: the pooler starts with our own privileges and becomes the service user by itself. `same_host` is that key
    /// of `[underpass]`: `off` for lane D, `server` for lane A, `both` for lane B. `None`, said on standard error, where we are not root.
    pub fn lanes(mut self, same_host: &str, threads: u32) -> Option<Self> {
        let Some(user) = service_user() else {
            eprintln!("skipped: kernel lanes need root");
            return None;
        };
        self.launch.has_lanes = true;
        Some(self.set("user", &user.name).tail(&format!(
            "[underpass]\nkernel_path = require\nsame_host = {same_host}\nthreads = {threads}"
        )))
    }

    /// As [`KERNEL_PATH_VARIABLE`] wants it.
    fn by_environment(&self) -> Self {
        let wanted = env::var(KERNEL_PATH_VARIABLE).unwrap_or_default();
        if wanted.is_empty() || self.tail.contains("kernel_path") {
            return self.clone();
        }
        let told = self.clone().tail(&format!("[underpass]\nkernel_path = {wanted}"));
        match (wanted.as_str(), service_user()) {
            ("require", Some(user)) => {
                let mut told =
                    if self.settings.contains_key("user") { told } else { told.set("user", &user.name) };
                told.launch.has_lanes = true;
                told
            }
            // The pooler's own word on what is missing fails the test.
            _ => told,
        }
    }

    /// A variable of the process's environment.
    pub fn environment(mut self, name: &str, value: &str) -> Self {
        self.launch.environment.push((name.into(), value.into()));
        self
    }

    /// Writes ini, userlist and HBA file into `directory`; returns the ini's path.
    fn write(&self, directory: &Path, port: u16) -> Result<PathBuf> {
        let mut settings: BTreeMap<String, String> = BTreeMap::new();
        let mut set = |key: &str, value: String| settings.insert(key.into(), value);
        set("listen_addr", "127.0.0.1".into());
        set("listen_port", port.to_string());
        set("unix_socket_dir", directory.display().to_string());
        set("auth_type", "trust".into());
        set("auth_file", directory.join("userlist.txt").display().to_string());
        set("admin_users", ADMIN.0.into());
        set("max_client_conn", "1000".into());
        if let Some(hba) = &self.hba {
            let path = directory.join("hba.conf");
            write_service_file(&path, hba, 0o644)?;
            set("auth_hba_file", path.display().to_string());
        }
        settings.extend(self.settings.clone());

        let mut text = String::from("[databases]\n");
        for (name, connection) in &self.databases {
            let _ = writeln!(text, "{name} = {connection}");
        }
        text.push_str("[users]\n");
        for (name, keys) in &self.users {
            let _ = writeln!(text, "{name} = {keys}");
        }
        text.push_str("[pgbouncer]\n");
        for (key, value) in &settings {
            let _ = writeln!(text, "{key} = {value}");
        }
        text.push_str(&self.tail);

        let quote = |value: &str| value.replace('"', "\"\"");
        let userlist: String = self
            .userlist
            .iter()
            .map(|(user, secret)| format!("\"{}\" \"{}\"\n", quote(user), quote(secret)))
            .collect();
        write_service_file(&directory.join("userlist.txt"), &userlist, 0o600)?;
        let path = directory.join("pgbouncer.ini");
        write_service_file(&path, &text, 0o644)?;
        Ok(path)
    }
}

/// Which pooler to start, for tests that run the same on both.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolerKind {
    /// Debian's PgBouncer.
    PgBouncer,
    /// Ours.
    Underpass,
}

impl PoolerKind {
    /// Both.
    pub const ALL: [Self; 2] = [Self::PgBouncer, Self::Underpass];

    /// Starts one.
    pub fn start(self, ini: &Ini) -> Result<Box<dyn Pooler>> {
        Ok(match self {
            Self::PgBouncer => Box::new(PgBouncer::start(ini)?),
            Self::Underpass => Box::new(Underpass::start(ini)?),
        })
    }

    /// Starts one that is expected to fail; returns exit status and log, or an error if it does start.
    pub fn start_refused(self, ini: &Ini) -> Result<(ExitStatus, String)> {
        let mut running = Running::spawn(self, ini)?;
        let status = running.process.wait(START_LIMIT)?;
        Ok((status, running.process.log()))
    }

    fn name(self) -> &'static str {
        match self {
            Self::PgBouncer => "pgbouncer",
            Self::Underpass => "underpass",
        }
    }
}

/// A pooler process.
pub trait Pooler: Send {
    /// Which one it is.
    fn kind(&self) -> PoolerKind;
    /// The running parts, which all the other methods use.
    fn running(&self) -> &Running;
    /// As [`Self::running`].
    fn running_mut(&mut self) -> &mut Running;

    /// TCP port on 127.0.0.1.
    fn port(&self) -> u16 {
        self.running().port.number()
    }

    /// Directory with the ini, the userlist and the unix socket.
    fn directory(&self) -> &Path {
        self.running().directory.path()
    }

    /// Process identifier.
    fn pid(&self) -> u32 {
        self.running().process.pid()
    }

    /// Everything logged so far.
    fn log(&self) -> String {
        self.running().process.log()
    }

    /// Waits until a line of the log contains `phrase`; returns the line.
    fn wait_log(&mut self, phrase: &str, limit: Duration) -> Result<String> {
        self.running_mut().process.wait_log(phrase, limit)
    }

    /// Options of a TCP client.
    fn options(&self, user: &str, database: &str) -> Options {
        Options::new(self.port(), user, database)
    }

    /// Runs one command of the admin console (database `pgbouncer`).
    fn console(&self, command: &str) -> Result<Response> {
        self.admin()?.query(command)
    }

    /// A connection of the console: SUSPEND ends with it.
    fn admin(&self) -> Result<Client> {
        Client::connect(&self.options(ADMIN.0, "pgbouncer").password(ADMIN.1).unix(self.directory()))
    }

    /// Sends a signal.
    fn signal(&self, signal: Signal) -> Result<()> {
        self.running().process.signal(signal)
    }

    /// Replaces the ini (and userlist and HBA file) on disk; takes effect with the next RELOAD.
    fn rewrite(&mut self, ini: &Ini) -> Result<()> {
        let ini = for_kind(self.kind(), ini);
        ini.write(self.directory(), self.port()).map(drop)
    }

    /// Whether the process has not ended.
    fn is_running(&mut self) -> bool {
        self.running_mut().process.is_running()
    }

    /// Waits for the end of the process.
    fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        self.running_mut().process.wait(limit)
    }

    /// Called before the process is ended.
    fn before_end(&mut self) {}

    /// SIGQUIT, the immediate shutdown.
    fn stop(&mut self) -> Result<()> {
        self.before_end();
        self.running_mut().process.stop(Signal::SIGQUIT, STOP_LIMIT).map(drop)
    }

    /// `kill -9`.
    fn kill(&mut self) -> Result<()> {
        self.before_end();
        self.running_mut().process.stop(Signal::SIGKILL, STOP_LIMIT).map(drop)
    }

    /// Starts again after it has ended, from the files on disk, on the same port.
    fn start_again(&mut self) -> Result<()> {
        let kind = self.kind();
        let running = self.running_mut();
        if running.process.is_running() {
            return Ok(());
        }
        running.process = spawn(kind, running.directory.path(), &running.launch)?;
        running.wait_ready()
    }

    /// Resident memory of the process in KiB (`VmRSS` of /proc/PID/status).
    fn resident_kib(&self) -> Result<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid()))
            .map_err(Error::io("read /proc/PID/status"))?;
        Ok(status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .and_then(|rest| rest.split_whitespace().next())
            .and_then(|number| number.parse().ok())
            .unwrap_or(0))
    }
}

/// Process, port and directory of a pooler.
#[derive(Debug)]
pub struct Running {
    // Order matters: the process ends before its directory goes.
    process: Process,
    port: Port,
    directory: TempDir,
    launch: Launch,
}

impl Running {
    fn spawn(kind: PoolerKind, ini: &Ini) -> Result<Self> {
        let ini = &for_kind(kind, ini);
        let directory = service_directory()?;
        let port = Port::reserve()?;
        ini.write(directory.path(), port.number())?;
        let becomes = ini.settings.get("user").map(String::as_str);
        if becomes.is_some() && becomes != service_user().as_ref().map(|user| &*user.name) {
            // Whoever it becomes makes its unix socket here.
            fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777))
                .map_err(Error::io("chmod a directory"))?;
        }
        let process = spawn(kind, directory.path(), &ini.launch)?;
        Ok(Self { process, port, directory, launch: ini.launch.clone() })
    }

    fn start(kind: PoolerKind, ini: &Ini) -> Result<Self> {
        let mut running = Self::spawn(kind, ini)?;
        running.wait_ready()?;
        Ok(running)
    }

    /// Ready means that the console asks for a login or lets us in: sockets are open and the event loop runs.
    fn wait_ready(&mut self) -> Result<()> {
        let options = Options::new(self.port.number(), ADMIN.0, "pgbouncer").password(ADMIN.1);
        self.process.wait_ready(START_LIMIT, || match Client::connect(&options) {
            // Its port may be open long before it serves, while lanes are tried on a busy machine.
            Err(error @ (Error::Io { .. } | Error::Timeout { .. })) => Err(error),
            // A refusal is an answer: TLS may be demanded, or the admin user renamed.
            Ok(_) | Err(_) => Ok(()),
        })
    }
}

/// What PgBouncer does not know is not for it.
fn for_kind(kind: PoolerKind, ini: &Ini) -> Ini {
    match kind {
        PoolerKind::PgBouncer => ini.clone(),
        PoolerKind::Underpass => ini.by_environment(),
    }
}

fn spawn(kind: PoolerKind, directory: &Path, launch: &Launch) -> Result<Process> {
    let mut command = match kind {
        PoolerKind::PgBouncer => service_command(&pgbouncer_binary()?, directory),
        PoolerKind::Underpass => {
            let mut command = service_command(&reachable(&underpass_binary()?, directory)?, directory);
            if launch.has_lanes {
                command.uid(0).gid(0);
            }
            command.envs(launch.environment.iter().cloned());
            command.arg("pooler");
            command
        }
    };
    command.arg(directory.join("pgbouncer.ini"));
    Process::spawn(kind.name(), &mut command, &directory.join("pooler.log"), directory, Signal::SIGQUIT)
}

/// Debian's PgBouncer.
#[derive(Debug)]
pub struct PgBouncer {
    running: Running,
}

impl PgBouncer {
    /// Starts it and waits until it answers.
    pub fn start(ini: &Ini) -> Result<Self> {
        Ok(Self { running: Running::start(PoolerKind::PgBouncer, ini)? })
    }
}

impl Pooler for PgBouncer {
    fn kind(&self) -> PoolerKind {
        PoolerKind::PgBouncer
    }
    fn running(&self) -> &Running {
        &self.running
    }
    fn running_mut(&mut self) -> &mut Running {
        &mut self.running
    }
}

/// Our pooler: `underpass pooler FILE.ini`.
#[derive(Debug)]
pub struct Underpass {
    running: Running,
    forgets_pools: bool,
}

impl Underpass {
    /// Starts it and waits until it answers.
    pub fn start(ini: &Ini) -> Result<Self> {
        let forgets_pools =
            ["autodb_idle_timeout", "pool_idle_timeout"].iter().any(|key| ini.settings.contains_key(*key));
        Ok(Self { running: Running::start(PoolerKind::Underpass, ini)?, forgets_pools })
    }

    /// Whether it was started with kernel lanes required.
    pub fn has_lanes(&self) -> bool {
        self.running.launch.has_lanes
    }

    /// For a test whose RELOAD makes pools go away: its account cannot ask for their transactions. With `autodb_idle_timeout` or
    /// `pool_idle_timeout` that goes without saying.
    #[must_use]
    pub fn forgets_pools(mut self) -> Self {
        self.forgets_pools = true;
        self
    }

    /// With kernel lanes, says on standard error where its transactions were.
    ///
    /// # Panics
    /// Something is wrong with them: see [`Account::mistakes`].
    fn close_account(&mut self) {
        if !self.running.launch.has_lanes || !self.is_running() {
            return;
        }
        match Account::of(self) {
            Ok(Some(mut account)) => {
                account.forgets = self.forgets_pools;
                eprintln!("{account}");
                let flips = self.running.launch.environment.iter().any(|(name, _)| name == FLIP_VARIABLE);
                let mistakes = account.mistakes(flips);
                assert!(
                    mistakes.is_empty() || std::thread::panicking(),
                    "the account is wrong: {}\n{account}\n{}",
                    mistakes.join("; "),
                    self.log()
                );
            }
            // Lanes that a test took away, or a console that it closed.
            Ok(None) => eprintln!("account: no lanes"),
            Err(error) => eprintln!("account: not told: {error}"),
        }
    }

    /// Path of the binary under test: `UNDERPASS_BIN`, else `underpass` next to the test's own executable. Cargo does not
    /// build it for tests of other crates: `cargo build -p underpass-cli` first, as `make test` does.
    pub fn binary() -> Result<PathBuf> {
        underpass_binary()
    }
}

impl Pooler for Underpass {
    fn kind(&self) -> PoolerKind {
        PoolerKind::Underpass
    }
    fn running(&self) -> &Running {
        &self.running
    }
    fn running_mut(&mut self) -> &mut Running {
        &mut self.running
    }
    fn before_end(&mut self) {
        self.close_account();
    }
}

impl Drop for Underpass {
    fn drop(&mut self) {
        self.close_account();
    }
}

fn pgbouncer_binary() -> Result<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    // Debian installs it in /usr/sbin, which is not on every user's PATH.
    env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin")])
        .map(|directory| directory.join("pgbouncer"))
        .find(|file| file.exists())
        .ok_or_else(|| Error::NotFound {
            program: "pgbouncer".into(),
            hint: "apt-get install pgbouncer".into(),
        })
}

fn underpass_binary() -> Result<PathBuf> {
    if let Some(path) = env::var_os("UNDERPASS_BIN") {
        return Ok(path.into());
    }
    // target/PROFILE/deps/test-HASH, or target/PROFILE/some-binary
    let exe = env::current_exe().map_err(Error::io("path of the test"))?;
    exe.ancestors()
        .skip(1)
        .take(2)
        .map(|directory| directory.join("underpass"))
        .find(|file| file.is_file())
        .ok_or_else(|| Error::NotFound {
            program: "underpass".into(),
            hint: "cargo build --workspace --bins, or set UNDERPASS_BIN".into(),
        })
}

/// A path of `binary` that the service user can execute: itself, or a copy if a directory above it is closed to others.
fn reachable(binary: &Path, directory: &Path) -> Result<PathBuf> {
    let open = |path: &Path| fs::metadata(path).is_ok_and(|meta| meta.permissions().mode() & 0o001 != 0);
    if service_user().is_none() || binary.ancestors().filter(|path| !path.as_os_str().is_empty()).all(open) {
        return Ok(binary.into());
    }
    let copy = directory.join("underpass");
    if !copy.exists() {
        fs::copy(binary, &copy).map_err(Error::io(format!("copy {}", binary.display())))?;
    }
    Ok(copy)
}
