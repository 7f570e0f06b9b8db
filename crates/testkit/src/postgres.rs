// SPDX-License-Identifier: Apache-2.0
//! A private PostgreSQL: its own data directory, port, sockets and certificates.
//!
//! Durability is off (fsync, full_page_writes): the machine does not crash under a test, and a killed postmaster does not
//! lose what the kernel already has. The superuser `postgres` always enters by the unix socket without password, so
//! [`Postgres::sql`] works whatever the test demands of TCP clients.

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use nix::sys::signal::Signal;
use tempfile::TempDir;

use crate::process::{service_command, service_directory, write_service_file};
use crate::{Authority, Client, Error, Options, Port, Process, Result, template};

/// Longest start, recovery after `kill -9` included, on a loaded machine.
const START_LIMIT: Duration = Duration::from_secs(60);
const STOP_LIMIT: Duration = Duration::from_secs(30);

/// Name of the superuser and of the default database.
const SUPERUSER: &str = "postgres";

/// How clients that come by TCP prove who they are (pg_hba.conf).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuthMethod {
    /// Not at all.
    Trust,
    /// Cleartext password.
    Password,
    /// md5, stored and asked for.
    Md5,
    /// SCRAM-SHA-256, stored and asked for.
    Scram,
    /// Client certificate; needs [`PostgresBuilder::tls`].
    Cert,
}

impl AuthMethod {
    fn hba_word(self) -> &'static str {
        match self {
            Self::Trust => "trust",
            Self::Password => "password",
            Self::Md5 => "md5",
            Self::Scram => "scram-sha-256",
            Self::Cert => "cert",
        }
    }
}

/// What the server shall be like; [`PostgresBuilder::start`] makes it.
#[derive(Debug)]
pub struct PostgresBuilder<'a> {
    auth: AuthMethod,
    hba: Option<String>,
    users: Vec<(String, String)>,
    settings: BTreeMap<String, String>,
    tls: Option<&'a Authority>,
    own_processes: bool,
}

impl<'a> PostgresBuilder<'a> {
    /// Method for all TCP clients.
    pub fn auth(mut self, method: AuthMethod) -> Self {
        self.auth = method;
        self
    }

    /// Lines of pg_hba.conf instead of the one line that [`Self::auth`] stands for.
    pub fn hba(mut self, lines: &str) -> Self {
        self.hba = Some(lines.into());
        self
    }

    /// A login role with this password, stored as the method needs it.
    pub fn user(mut self, name: &str, password: &str) -> Self {
        self.users.push((name.into(), password.into()));
        self
    }

    /// A line of postgresql.conf; the value is quoted here.
    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.insert(name.into(), value.into());
        self
    }

    /// TLS on, with a certificate of `authority` for localhost and 127.0.0.1; client certificates of it are accepted.
    pub fn tls(mut self, authority: &'a Authority) -> Self {
        self.tls = Some(authority);
        self
    }

    /// In a process namespace of its own, as a container's: its processes have other numbers for themselves than for us. As root only.
    pub fn own_processes(mut self) -> Self {
        self.own_processes = true;
        self
    }

    /// Makes a data directory as initdb does, starts the server and creates the users.
    pub fn start(self) -> Result<Postgres> {
        let directory = service_directory()?;
        let data = directory.path().join("data");
        initdb(directory.path(), &data)?;
        let port = Port::reserve()?;
        self.write_configuration(directory.path(), &data, &port)?;
        let own_processes = self.own_processes;
        let process = spawn(directory.path(), &data, own_processes)?;
        let mut server = Postgres { process, port, data, own_processes, directory };
        server.wait_ready()?;
        for (name, password) in &self.users {
            let password = password.replace('\'', "''");
            server.sql(&format!("create role \"{name}\" login password '{password}'"))?;
        }
        Ok(server)
    }

    fn write_configuration(&self, directory: &Path, data: &Path, port: &Port) -> Result<()> {
        let mut settings: BTreeMap<String, String> = [
            ("listen_addresses", "127.0.0.1"),
            ("fsync", "off"),
            ("synchronous_commit", "off"),
            ("full_page_writes", "off"),
            ("max_connections", "200"),
            ("shared_buffers", "64MB"),
            ("autovacuum", "off"),
            ("log_line_prefix", "%m [%p] %u@%d "),
        ]
        .into_iter()
        .map(|(name, value)| (name.into(), value.into()))
        .collect();
        settings.insert("port".into(), port.number().to_string());
        settings.insert("unix_socket_directories".into(), directory.display().to_string());
        let encryption = if self.auth == AuthMethod::Md5 { "md5" } else { "scram-sha-256" };
        settings.insert("password_encryption".into(), encryption.into());
        if let Some(authority) = self.tls {
            authority.server(&["localhost", "127.0.0.1"])?.write(data, "server")?;
            authority.write(data, "root")?;
            settings.insert("ssl".into(), "on".into());
            settings.insert("ssl_ca_file".into(), "root.crt".into());
        }
        settings.extend(self.settings.clone());
        let mut text = String::new();
        for (name, value) in &settings {
            let _ = writeln!(text, "{name} = '{}'", value.replace('\'', "''"));
        }
        write_service_file(&data.join("postgresql.conf"), &text, 0o600)?;

        let word = self.auth.hba_word();
        let kind = if self.auth == AuthMethod::Cert { "hostssl" } else { "host" };
        let lines = self.hba.clone().unwrap_or_else(|| {
            format!(
                "local all all {unix}\n{kind} all all all {word}\n{kind} replication all all {word}\n",
                unix = if self.auth == AuthMethod::Cert { "trust" } else { word }
            )
        });
        let hba = format!("local all {SUPERUSER} trust\n{lines}\n");
        write_service_file(&data.join("pg_hba.conf"), &hba, 0o600)
    }
}

/// A running (or stopped) private PostgreSQL.
#[derive(Debug)]
pub struct Postgres {
    // Order matters: the process ends before its directory goes.
    process: Process,
    port: Port,
    data: PathBuf,
    own_processes: bool,
    directory: TempDir,
}

impl Postgres {
    /// A server that trusts everyone on loopback.
    pub fn start() -> Result<Self> {
        Self::builder().start()
    }

    /// A server to be described first.
    pub fn builder<'a>() -> PostgresBuilder<'a> {
        PostgresBuilder {
            auth: AuthMethod::Trust,
            hba: None,
            users: Vec::new(),
            settings: BTreeMap::new(),
            tls: None,
            own_processes: false,
        }
    }

    /// A physical standby of this server, which must be running: a copy of its data that follows its log.
    pub fn standby(&self) -> Result<Self> {
        let directory = service_directory()?;
        let data = directory.path().join("data");
        let output = service_command(&bin_dir()?.join("pg_basebackup"), directory.path())
            .args(["-h", "127.0.0.1", "-p", &self.port().to_string(), "-U", SUPERUSER])
            .args(["-R", "-X", "stream", "-c", "fast", "--no-sync", "-D"])
            .arg(&data)
            .output()
            .map_err(Error::io("run pg_basebackup"))?;
        if !output.status.success() {
            return Err(Error::Exited {
                program: "pg_basebackup".into(),
                status: output.status.to_string(),
                log: String::from_utf8_lossy(&output.stderr).into_owned(),
            });
        }
        let port = Port::reserve()?;
        let path = data.join("postgresql.conf");
        let mut text = fs::read_to_string(&path).map_err(Error::io("read postgresql.conf"))?;
        // The last line of a key wins.
        let _ = writeln!(text, "port = {}", port.number());
        let _ = writeln!(text, "unix_socket_directories = '{}'", directory.path().display());
        write_service_file(&path, &text, 0o600)?;
        let process = spawn(directory.path(), &data, false)?;
        let mut server = Self { process, port, data, own_processes: false, directory };
        server.wait_ready()?;
        Ok(server)
    }

    /// TCP port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// Directory of the unix socket.
    pub fn socket_dir(&self) -> &Path {
        self.directory.path()
    }

    /// Data directory.
    pub fn data_dir(&self) -> &Path {
        &self.data
    }

    /// Process identifier of the postmaster.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The server's log so far.
    pub fn log(&self) -> String {
        self.process.log()
    }

    /// Options of a TCP client.
    pub fn options(&self, user: &str, database: &str) -> Options {
        Options::new(self.port(), user, database)
    }

    /// Options of the superuser by the unix socket, database `postgres`.
    pub fn superuser(&self) -> Options {
        self.options(SUPERUSER, SUPERUSER).unix(self.socket_dir()).read_timeout(START_LIMIT)
    }

    /// Runs SQL as superuser in database `postgres`; returns the rows of all statements, NULL as `None`.
    pub fn sql(&self, sql: &str) -> Result<Vec<Vec<Option<String>>>> {
        Ok(Client::connect(&self.superuser())?.query(sql)?.rows())
    }

    /// The first column of the first row that `sql` gives; empty if there is none.
    pub fn sql_value(&self, sql: &str) -> Result<String> {
        Ok(self.sql(sql)?.into_iter().flatten().flatten().next().unwrap_or_default())
    }

    /// Fast shutdown (SIGINT): clients are told 57P01, open transactions rolled back.
    pub fn stop(&mut self) -> Result<()> {
        self.process.stop(Signal::SIGINT, STOP_LIMIT).map(drop)
    }

    /// `kill -9` of the postmaster; its backends see that and end.
    pub fn kill(&mut self) -> Result<()> {
        self.process.stop(Signal::SIGKILL, STOP_LIMIT).map(drop)
    }

    /// Sends a signal to the postmaster: SIGSTOP makes a server that accepts and stays silent.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.process.signal(signal)
    }

    /// Starts again after [`Self::stop`] or [`Self::kill`], same port and data.
    pub fn start_again(&mut self) -> Result<()> {
        if self.process.is_running() {
            return Ok(());
        }
        let deadline = Instant::now() + STOP_LIMIT;
        loop {
            self.process = spawn(self.directory.path(), &self.data, self.own_processes)?;
            match self.wait_ready() {
                // Backends of a killed server hold its memory for a moment, and the next one refuses to start until then.
                Err(Error::Exited { log, .. })
                    if log.contains("pre-existing shared memory block") && Instant::now() < deadline =>
                {
                    thread::sleep(Duration::from_millis(50));
                }
                result => return result,
            }
        }
    }

    /// Stops and starts.
    pub fn restart(&mut self) -> Result<()> {
        self.stop()?;
        self.start_again()
    }

    /// Appends settings to postgresql.conf and reloads.
    pub fn set(&self, settings: &[(&str, &str)]) -> Result<()> {
        let path = self.data.join("postgresql.conf");
        let mut text = fs::read_to_string(&path).map_err(Error::io("read postgresql.conf"))?;
        for (name, value) in settings {
            let _ = writeln!(text, "{name} = '{}'", value.replace('\'', "''"));
        }
        write_service_file(&path, &text, 0o600)?;
        self.sql("select pg_reload_conf()").map(drop)
    }

    fn wait_ready(&mut self) -> Result<()> {
        let options = self.superuser();
        self.process.wait_ready(START_LIMIT, || Client::connect(&options).map(drop))
    }
}

/// Directory with `postgres` and `initdb`: `PG_BIN`, else the newest version that Debian has installed.
pub(crate) fn bin_dir() -> Result<PathBuf> {
    if let Some(directory) = env::var_os("PG_BIN") {
        return Ok(directory.into());
    }
    let version = |path: &Path| -> u32 {
        path.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok()).unwrap_or(0)
    };
    fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.join("bin/initdb").exists())
        .max_by_key(|path| version(path))
        .map(|path| path.join("bin"))
        .ok_or_else(|| Error::NotFound {
            program: "initdb".into(),
            hint: "install postgresql, or set PG_BIN to the directory of its programs".into(),
        })
}

/// A data directory as initdb makes it, which no other has the system identifier of.
fn initdb(directory: &Path, data: &Path) -> Result<()> {
    let (program, reset) = (bin_dir()?.join("initdb"), bin_dir()?.join("pg_resetwal"));
    let arguments = ["-U", SUPERUSER, "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C"];
    let make = |directory: &Path, data: &Path| {
        run(service_command(&program, directory).arg("-D").arg(data).args(arguments))
    };
    // Some packages have the server and little else.
    if !reset.exists() {
        return make(directory, data);
    }
    template::copy(&program, &arguments, data, make)?;
    // A mirror, for one, is refused if it is the same server, and initdb too takes the time for it. It stands first in pg_control;
    // what pg_resetwal does about the checksum and the log is what makes it valid.
    let identifier = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
        ^ next_identity();
    let control = data.join("global/pg_control");
    OpenOptions::new()
        .write(true)
        .open(&control)
        .and_then(|file| file.write_all_at(&identifier.to_ne_bytes(), 0))
        .map_err(Error::io(format!("write {}", control.display())))?;
    run(service_command(&reset, directory).arg("-f").arg("-D").arg(data))
}

/// What two servers differ by that are made in the same moment, by two processes or two threads.
fn next_identity() -> u64 {
    static MADE: AtomicU64 = AtomicU64::new(0);
    (u64::from(std::process::id()) << 16) + MADE.fetch_add(1, Ordering::Relaxed)
}

fn run(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(Error::io(format!("run {program}")))?;
    if output.status.success() {
        return Ok(());
    }
    Err(Error::Exited {
        program,
        status: output.status.to_string(),
        log: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

fn spawn(directory: &Path, data: &Path, own_processes: bool) -> Result<Process> {
    let mut command = service_command(&bin_dir()?.join("postgres"), directory);
    command.arg("-D").arg(data);
    let start = if own_processes { Process::spawn_apart } else { Process::spawn };
    // SIGQUIT is PostgreSQL's immediate shutdown: the postmaster ends its backends, which SIGKILL would leave behind.
    start("postgres", &mut command, &directory.join("postgres.log"), directory, Signal::SIGQUIT)
}
