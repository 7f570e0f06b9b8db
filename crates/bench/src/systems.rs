// SPDX-License-Identifier: Apache-2.0
//! The table of systems (`bench/systems.toml`) and running instances of them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use crate::counters::Cgroup;
use crate::cpuset::Cpuset;
use crate::hosts::Hosts;
use crate::mariadb::Mariadb;
use crate::postgres::{DATABASE, PASSWORD, SCRAM_USER, Server, USER, free_port, log_tail};
use crate::procs::{Account, Launch, Running, find_program};
use crate::recordings::Told;
use crate::template;

const TABLE: &str = include_str!("../../../bench/systems.toml");

/// Ends a pooler. SIGINT would be PgBouncer's and Pgpool-II's wait for clients; at the end of a run there is nothing to
/// wait for.
const END: Signal = Signal::SIGTERM;
/// A login that takes longer is none, seconds.
const LOGIN_SECONDS: &str = "10";

/// How a configuration spells its settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// No pooler: clients connect to PostgreSQL.
    Direct,
    /// pgbouncer.ini, which Underpass reads too.
    Pgbouncer,
    /// pgpool.conf.
    Pgpool,
    /// A configuration of its own, with neither TLS nor unix sockets in its template.
    Other,
}

/// When a server connection goes back to its pool; PgBouncer's `pool_mode`.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum PoolMode {
    /// When the client disconnects.
    Session,
    /// When the transaction ends.
    Transaction,
}

impl PoolMode {
    /// PgBouncer's spelling.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Session => "session",
            Self::Transaction => "transaction",
        }
    }
}

/// One entry of the table.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct System {
    /// What `--systems` takes.
    pub name: String,
    /// What the report prints.
    pub title: String,
    /// How its configuration spells settings.
    pub kind: Kind,
    /// Program and arguments with the places of templates; `{{config}}` is the written configuration.
    #[serde(default)]
    pub command: Vec<String>,
    /// Arguments that print the version.
    #[serde(default)]
    pub version: Vec<String>,
    /// Template in bench/templates; none where arguments say everything.
    #[serde(default)]
    pub config: String,
    /// Further templates, written beside that one.
    #[serde(default)]
    pub more_configs: Vec<String>,
    /// What it can do.
    pub pool_modes: Vec<PoolMode>,
    /// Pool modes in which named prepared statements work.
    pub prepared: Vec<PoolMode>,
    /// Of [`Kind::Other`]: its template has a user who logs in by SCRAM.
    #[serde(default)]
    pub scram: bool,
    /// Reaches PostgreSQL by unix socket.
    #[serde(default)]
    pub server_unix: bool,
    /// Serves clients at addresses only: no unix socket.
    #[serde(default)]
    pub tcp_only: bool,
    /// Started as root, told to switch itself.
    #[serde(default)]
    pub as_root: bool,
    /// Its load has no more clients than the pool has connections.
    #[serde(default)]
    pub clients_of_pool: bool,
    /// Lines for the template.
    #[serde(default)]
    pub extra: String,
    /// PGOPTIONS of the clients.
    #[serde(default)]
    pub pgoptions: String,
    /// MariaDB logs all statements.
    #[serde(default)]
    pub general_log: bool,
    /// Program and arguments that run during its turns.
    #[serde(default)]
    pub beside: Vec<String>,
    /// What that program prints once it has taken hold.
    #[serde(default)]
    pub beside_ready: String,
    /// There is a second server with the same data.
    #[serde(default)]
    pub mirrored: bool,
    /// Nothing listens where its mirror is to be.
    #[serde(default)]
    pub mirror_is_down: bool,
    /// Stands before that second server.
    #[serde(default)]
    pub before_second: bool,
    /// While it is measured, a load of its own works on the second server: what a mirror has to do there, done by nobody that is measured.
    #[serde(default)]
    pub second_load: bool,
    /// The same system without its mirror.
    #[serde(default)]
    pub without: Option<String>,
    /// The lane that it is about, by its name in SHOW KERNEL: a row in which that lane carried less than
    /// [`crate::lanes::SHARE_MIN`] of the transactions fails.
    #[serde(default)]
    pub lane: Option<String>,
    /// Same program as that system; for the proof of the method.
    #[serde(default)]
    pub twin_of: Option<String>,
    /// Share of the time in percent for which the harness stops it.
    #[serde(default)]
    pub paused_percent: f64,
}

#[derive(Deserialize)]
struct Table {
    system: Vec<System>,
}

/// All systems that this program knows, from its built-in table or from `path`.
///
/// # Errors
/// When the table cannot be read or names a system twice.
pub fn table(path: Option<&Path>) -> Result<Vec<System>> {
    let (text, origin) = match path {
        Some(path) => (
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?,
            path.display().to_string(),
        ),
        None => (TABLE.to_owned(), "bench/systems.toml".to_owned()),
    };
    let systems = toml::from_str::<Table>(&text).with_context(|| origin.clone())?.system;
    for (index, system) in systems.iter().enumerate() {
        if systems[..index].iter().any(|other| other.name == system.name) {
            bail!("{origin}: system {} appears twice", system.name);
        }
    }
    Ok(systems)
}

impl System {
    /// True when it stands between client and server.
    #[must_use]
    pub fn is_pooler(&self) -> bool {
        self.kind != Kind::Direct
    }

    /// True for Underpass itself.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        self.command.first().is_some_and(|program| program == "underpass")
    }

    /// True when it is ours with a mirror, which its console tells about.
    #[must_use]
    pub fn mirrors(&self) -> bool {
        self.is_ours() && self.mirrored && !self.before_second
    }

    /// True when the tracer beside it records packets; false for one that has all from probes, and where there is none.
    #[must_use]
    pub fn records_packets(&self) -> bool {
        !self.beside.is_empty() && !self.beside.iter().any(|word| word == "--no-packets")
    }

    /// True when that one puts sessions together, whose bytes it compares with the kernel's own count.
    #[must_use]
    pub fn audits(&self) -> bool {
        let is_attached_only = self.beside.windows(2).any(|words| words == ["--stage", "attach"]);
        self.records_packets() && !is_attached_only
    }

    /// Where its program is.
    ///
    /// # Errors
    /// When it is not installed, with what to do.
    pub fn program(&self) -> Result<PathBuf> {
        let name = self.command.first().context("has no command")?;
        find_program(name).with_context(|| {
            let advice = match name.as_str() {
                "underpass" => "build it with cargo build --release --workspace".to_owned(),
                "pgpool" => "apt-get install pgpool2".to_owned(),
                other => format!("install {other} or leave the system out"),
            };
            format!("system {}: program {name} not found: {advice}", self.name)
        })
    }

    /// Whether it can be started here.
    ///
    /// # Errors
    /// What is missing, with what to do.
    pub fn ready(&self) -> Result<()> {
        if self.is_pooler() {
            self.program()?;
        }
        if let [name, command, ..] = &self.beside[..] {
            let program = find_program(name).with_context(|| format!("system {}: no {name}", self.name))?;
            let knows = Command::new(program).args([command, "--help"]).output()?.status.success();
            ensure!(knows, "system {}: this {name} has no command {command}", self.name);
        }
        Ok(())
    }

    /// The first line that its program prints about its version.
    ///
    /// # Errors
    /// When the program is missing or cannot run.
    pub fn version_line(&self) -> Result<String> {
        let program = self.program()?;
        let output = Command::new(&program).args(&self.version).output()?;
        // Pgpool-II writes its version to standard error.
        let text = [output.stdout, output.stderr].concat();
        Ok(String::from_utf8_lossy(&text).lines().next().unwrap_or("").trim().to_owned())
    }
}

/// How clients log in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Login {
    /// No password.
    #[default]
    Trust,
    /// SCRAM-SHA-256 on both legs.
    Scram,
}

/// The logins of the experiment `logins`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LoginKind {
    /// No password.
    Trust,
    /// SCRAM-SHA-256 on both legs.
    Scram,
    /// No password, over TLS with the small key.
    Tls,
    /// No password, over TLS with an RSA key of 4,096 bits.
    #[value(name = "tls-rsa4096")]
    TlsRsa4096,
}

/// Settings that are equal for all systems at one point of an experiment.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Setup {
    /// Session or transaction pooling.
    pub pool_mode: PoolMode,
    /// `default_pool_size`.
    pub pool_size: u32,
    /// `max_client_conn`; children of Pgpool-II.
    pub max_clients: u32,
    /// How clients log in.
    pub login: Login,
    /// Clients use TLS.
    pub client_tls: bool,
    /// The pooler's certificate has an RSA key of 4,096 bits: then a handshake is the pooler's work, not the client's.
    pub rsa: bool,
    /// Clients connect by unix socket.
    pub client_unix: bool,
    /// Poolers reach PostgreSQL by unix socket.
    pub server_unix: bool,
    /// CPUs of the pooler as `taskset` takes them; by a cpuset where one can be made.
    pub cpus: Option<String>,
    /// Further lines for PgBouncer's section.
    pub extra: String,
}

impl Setup {
    /// Transaction pooling over TCP, trust, no TLS.
    #[must_use]
    pub fn plain(pool_size: u32, max_clients: u32) -> Self {
        Self {
            pool_mode: PoolMode::Transaction,
            pool_size,
            max_clients,
            login: Login::Trust,
            client_tls: false,
            rsa: false,
            client_unix: false,
            server_unix: false,
            cpus: None,
            extra: String::new(),
        }
    }
}

/// Where and as whom a client connects.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Address or folder of the unix socket.
    pub host: String,
    /// Port.
    pub port: u16,
    /// User.
    pub user: &'static str,
    /// TLS.
    pub tls: bool,
    /// PGOPTIONS.
    pub options: String,
}

impl Endpoint {
    /// Adds the connection to a libpq program's environment.
    pub fn apply(&self, command: &mut Command) {
        command
            .env("PGHOST", &self.host)
            .env("PGPORT", self.port.to_string())
            .env("PGUSER", self.user)
            .env("PGDATABASE", DATABASE)
            .env("PGPASSWORD", PASSWORD)
            .env("PGOPTIONS", &self.options)
            .env("PGSSLMODE", if self.tls { "require" } else { "disable" })
            .env("PGGSSENCMODE", "disable")
            .env("PGCONNECT_TIMEOUT", "20");
    }
}

/// What an instance needs from its surroundings.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The run's temporary folder.
    pub folder: &'a Path,
    /// The server account.
    pub account: &'a Account,
    /// The hosts.
    pub hosts: &'a Hosts,
    /// PostgreSQL.
    pub server: &'a Server,
    /// A second one with the same data, where a system mirrors to it.
    pub mirror: Option<&'a Server>,
    /// MariaDB, where an experiment is about it.
    pub mariadb: Option<&'a Mariadb>,
}

impl Place<'_> {
    /// Waits until the server at this port has closed the connections of a load that is over, or that takes too long.
    pub fn wait_until_left(&self, port: u16) {
        // PostgreSQL may be on another host than this process; MariaDB is on the same.
        let tables = [self.server.pid().to_string(), "self".to_owned()]
            .map(|process| [format!("/proc/{process}/net/tcp"), format!("/proc/{process}/net/tcp6")]);
        let deadline = Instant::now() + LEAVE_PATIENCE;
        let is_left = || {
            let text = |path: &String| fs::read_to_string(path).unwrap_or_default();
            !tables.iter().flatten().any(|path| has_connection(&text(path), port))
        };
        while !is_left() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Whether a table of `/proc/net` has a connection of this local port that is neither over nor the listener's.
fn has_connection(table: &str, port: u16) -> bool {
    const TIME_WAIT: &str = "06";
    const LISTEN: &str = "0A";
    let local = format!(":{port:04X}");
    table.lines().any(|line| {
        let mut words = line.split_ascii_whitespace().skip(1);
        let (ours, _, state) = (words.next(), words.next(), words.next());
        ours.is_some_and(|ours| ours.ends_with(&local))
            && state.is_some_and(|state| ![TIME_WAIT, LISTEN].contains(&state))
    })
}

/// A system that runs with one setup.
#[derive(Debug)]
pub struct Instance {
    process: Option<Running>,
    /// Goes before the group that accounts for it, which it may be.
    #[expect(dead_code, reason = "kept until the process has ended")]
    cpuset: Option<Cpuset>,
    cgroup: Option<Cgroup>,
    log: PathBuf,
    /// Where its clients connect.
    pub endpoint: Endpoint,
    /// MariaDB is to log all statements.
    pub general_log: bool,
}

impl Instance {
    /// Writes the configuration, starts the system and waits until it answers a query.
    ///
    /// # Errors
    /// When it does not start or answer; carries the end of its log.
    pub fn start(system: &System, setup: &Setup, place: Place<'_>) -> Result<Self> {
        let user = match setup.login {
            Login::Trust => USER,
            Login::Scram => SCRAM_USER,
        };
        let mut instance = if system.is_pooler() {
            Self::start_pooler(system, setup, place, user)?
        } else {
            let unix = setup.client_unix || system.server_unix;
            let host = if unix {
                place.server.socket_folder().display().to_string()
            } else {
                place.hosts.server_from_client.to_owned()
            };
            let (port, tls) = (place.server.port, setup.client_tls);
            let endpoint = Endpoint { host, port, user, tls, options: system.pgoptions.clone() };
            let mut instance = Self::at(endpoint);
            instance.general_log = system.general_log;
            instance
        };
        instance.wait_until_answers(system, place)?;
        Ok(instance)
    }

    /// The second server without anything before it.
    ///
    /// # Errors
    /// There is none.
    pub fn second_server(place: Place<'_>) -> Result<Self> {
        let port = place.mirror.context("there is no second server")?.port;
        let host = place.hosts.server_from_client.to_owned();
        Ok(Self::at(Endpoint { host, port, user: USER, tls: false, options: String::new() }))
    }

    fn at(endpoint: Endpoint) -> Self {
        Self { process: None, cpuset: None, cgroup: None, log: PathBuf::new(), endpoint, general_log: false }
    }

    fn start_pooler(system: &System, setup: &Setup, place: Place<'_>, user: &'static str) -> Result<Self> {
        let folder = unused_folder(place.folder, &system.name)?;
        place.account.give(&folder)?;
        let port = free_port()?;
        let mut values = values(system, setup, place, &folder, port)?;
        if !system.config.is_empty() {
            let file = Path::new(&system.config).file_name().context("config names no file")?;
            let config = folder.join(file);
            let text = template::of(&system.config)?;
            fs::write(&config, template::fill(text, &values).with_context(|| system.config.clone())?)?;
            for further in &system.more_configs {
                let text =
                    template::fill(template::of(further)?, &values).with_context(|| further.clone())?;
                fs::write(folder.join(further), text)?;
            }
            values.insert("config", config.display().to_string());
        }
        let secret = place.server.scram_secret()?;
        fs::write(folder.join("userlist.txt"), format!("\"{USER}\" \"\"\n\"{SCRAM_USER}\" \"{secret}\"\n"))?;
        for file in fs::read_dir(&folder)? {
            place.account.give(&file?.path())?;
        }

        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        let cgroup = Cgroup::create(&name);
        let cpuset = setup.cpus.as_ref().and_then(|cpus| Cpuset::make(&name, cpus, cgroup.as_ref()));
        let launch = Launch {
            netns: place.hosts.pooler.clone(),
            cpus: setup.cpus.clone().filter(|_| cpuset.is_none()),
            cgroup: cpuset.as_ref().map(|set| set.path().to_owned()),
            keep_user: system.as_root,
        };
        let log = folder.join("output.log");
        let sink = fs::File::create(&log)?;
        let mut command = launch.command(place.account, system.program()?);
        for argument in &system.command[1..] {
            command.arg(template::fill(argument.clone(), &values)?);
        }
        command.stdin(Stdio::null()).stdout(sink.try_clone()?).stderr(sink);
        let process = Running::start(command, &system.name, END)?;
        let cgroup = cgroup.filter(|group| group.add(process.pid()).is_ok());
        let host = if setup.client_unix {
            folder.display().to_string()
        } else {
            place.hosts.pooler_from_client.to_owned()
        };
        let options = system.pgoptions.clone();
        let endpoint = Endpoint { host, port, user, tls: setup.client_tls, options };
        Ok(Self { process: Some(process), cpuset, cgroup, log, endpoint, general_log: false })
    }

    /// Its process, `None` for a direct connection.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Running::pid)
    }

    /// Tells it to end, without waiting: dropping it waits.
    pub fn ask_to_end(&self) {
        if let Some(process) = &self.process {
            process.signal(END);
        }
    }

    /// Its cgroup where there is one.
    #[must_use]
    pub fn cgroup(&self) -> Option<&Path> {
        self.cgroup.as_ref().map(Cgroup::path)
    }

    /// Fails when its process has ended.
    ///
    /// # Errors
    /// Carries the exit status and the end of the log.
    pub fn check_alive(&mut self) -> Result<()> {
        if let Some(status) = self.process.as_mut().map(Running::ended).transpose()?.flatten() {
            let log = [self.log.clone(), self.log.with_file_name("pooler.log")]
                .map(|path| log_tail(&path))
                .concat();
            bail!("it has ended ({status}):\n{log}");
        }
        Ok(())
    }

    /// One query, to see that it answers.
    ///
    /// # Errors
    /// When psql fails.
    pub fn ask(&self, place: Place<'_>, database: &str, sql: &str) -> Result<String> {
        let psql = find_program("psql").context("psql not found")?;
        let launch = Launch { netns: place.hosts.client.clone(), keep_user: true, ..Launch::default() };
        let mut command = launch.command(place.account, psql);
        command.args(["-X", "-q", "-A", "-t", "-c", sql]);
        self.endpoint.apply(&mut command);
        command.env("PGDATABASE", database);
        // One that accepts and says nothing is not waited for without an end.
        command.env("PGCONNECT_TIMEOUT", LOGIN_SECONDS);
        crate::procs::output(command, "psql")
    }

    fn wait_until_answers(&mut self, system: &System, place: Place<'_>) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            self.check_alive().with_context(|| format!("system {} does not start", system.name))?;
            match self.ask(place, DATABASE, "select 42") {
                Ok(answer) if answer.trim() == "42" => return Ok(()),
                Ok(answer) => bail!("system {}: select 42 gave {answer:?}", system.name),
                Err(error) if Instant::now() > deadline => {
                    let log =
                        [self.log.clone(), self.log.with_file_name("pooler.log")].map(|path| log_tail(&path));
                    bail!("system {} does not answer: {error:#}\n{}", system.name, log.concat());
                }
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        }
    }
}

/// Exit status of a tracer that lost something (`underpass trace --require-lossless`).
const LOSSY: i32 = 3;
/// How long a server may take to close the connections of a load that is over.
const LEAVE_PATIENCE: Duration = Duration::from_secs(3);

/// A program that runs beside a system during one turn.
#[derive(Debug)]
pub struct Beside {
    program: Running,
    log: PathBuf,
    is_idle: bool,
}

/// What it says when it has taken hold, for one that does nothing.
const IDLE_READY: &str = "idle";

impl Beside {
    /// Starts the system's program for the server at `port` and waits until it has taken hold. For a system without one: a program that
    /// works for as long as another took to, `took`, and then does nothing.
    ///
    /// # Errors
    /// When it cannot be started, ends at once or does not get ready, with the end of what it said.
    pub fn start(system: &System, place: Place<'_>, port: u16, took: Duration) -> Result<Self> {
        let idle = [
            "sh".to_owned(),
            "-c".to_owned(),
            format!(
                "timeout {} sh -c 'while :; do :; done'; echo {IDLE_READY}; exec sleep infinity",
                took.as_secs_f64()
            ),
        ];
        let is_idle = system.beside.is_empty();
        let (words, ready) =
            if is_idle { (&idle[..], IDLE_READY) } else { (&system.beside[..], &*system.beside_ready) };
        let [name, arguments @ ..] = words else { bail!("a system without a name for its program") };
        let folder = unused_folder(place.folder, &system.name)?;
        let values =
            BTreeMap::from([("dir", folder.display().to_string()), ("server_port", port.to_string())]);
        let launch = Launch { netns: place.hosts.server.clone(), keep_user: true, ..Launch::default() };
        let mut command =
            launch.command(place.account, find_program(name).with_context(|| format!("{name} not found"))?);
        for argument in arguments {
            command.arg(template::fill(argument.clone(), &values)?);
        }
        let log = folder.join("output.log");
        let sink = fs::File::create(&log)?;
        command.stdin(Stdio::null()).stdout(sink.try_clone()?).stderr(sink);
        let program = Running::start(command, name, Signal::SIGINT)?;
        let mut beside = Self { program, log, is_idle };
        let deadline = Instant::now() + Duration::from_secs(20);
        while !fs::read_to_string(&beside.log)?.contains(ready) {
            beside.check_running()?;
            if Instant::now() > deadline {
                bail!("the program beside it does not get ready:\n{}", log_tail(&beside.log));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(beside)
    }

    fn check_running(&mut self) -> Result<()> {
        if let Some(status) = self.program.ended()? {
            bail!("the program beside it has ended ({status}):\n{}", log_tail(&self.log));
        }
        Ok(())
    }

    /// Ends it and returns what it says of its recording; `None` for one that does nothing.
    ///
    /// # Errors
    /// When it had ended before, fails, does not end or says nothing, with the end of what it said, and when that is not what its exit
    /// status says.
    pub fn finish(mut self) -> Result<Option<Told>> {
        self.check_running()?;
        if self.is_idle {
            return Ok(None);
        }
        self.program.signal(Signal::SIGINT);
        let deadline = Instant::now() + Duration::from_secs(20);
        while Instant::now() < deadline {
            if let Some(status) = self.program.ended()? {
                let said = || log_tail(&self.log);
                let is_lossless = match status.code() {
                    Some(0) => true,
                    Some(LOSSY) => false,
                    _ => bail!("the program beside it failed ({status}):\n{}", said()),
                };
                let told = Told::parse(&fs::read_to_string(&self.log)?).with_context(|| {
                    format!("the program beside it does not say what it has:\n{}", said())
                })?;
                ensure!(
                    is_lossless == (told.waited == 0 && !told.is_lossy),
                    "the program beside it ended with {status}, which is not what it says:\n{}",
                    said()
                );
                return Ok(Some(told));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        bail!("the program beside it does not end")
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        self.program.stop(Duration::from_secs(10));
        // What it wrote may be large, and the next turn writes as much again.
        if let Some(folder) = self.log.parent() {
            let _ = fs::remove_dir_all(folder);
        }
    }
}

fn unused_folder(parent: &Path, name: &str) -> Result<PathBuf> {
    for number in 0.. {
        let folder = parent.join(format!("{name}-{number}"));
        match fs::create_dir(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error).with_context(|| format!("cannot make {}", folder.display())),
        }
    }
    unreachable!("the loop has no end")
}

/// The values of a template for one instance.
fn values(
    system: &System,
    setup: &Setup,
    place: Place<'_>,
    folder: &Path,
    port: u16,
) -> Result<BTreeMap<&'static str, String>> {
    let unix = setup.server_unix || system.server_unix;
    if unix && place.hosts.apart() {
        bail!("system {}: a unix socket does not reach another host; use --topology loopback", system.name);
    }
    let server_host = if unix {
        place.server.socket_folder().display().to_string()
    } else {
        place.hosts.server_from_pooler.into()
    };
    let (certificate, key) = place.server.certificate(setup.rsa);
    let tls_lines = match (setup.client_tls, system.kind) {
        (false, _) | (_, Kind::Direct | Kind::Other) => String::new(),
        (true, Kind::Pgbouncer) => format!(
            "client_tls_sslmode = require\nclient_tls_cert_file = {}\nclient_tls_key_file = {}",
            certificate.display(),
            key.display()
        ),
        (true, Kind::Pgpool) => {
            format!("ssl = on\nssl_cert = '{}'\nssl_key = '{}'", certificate.display(), key.display())
        }
    };
    let as_root = system.as_root && place.account.switch_to.is_some();
    let mut extra =
        if system.is_ours() { system.extra.clone() } else { format!("{}\n{}", system.extra, setup.extra) };
    let server = place.mirror.filter(|_| system.before_second).unwrap_or(place.server);
    if let Some(mirror) = place.mirror {
        // Both servers are on the same host.
        let values =
            BTreeMap::from([("mirror_host", server_host.clone()), ("mirror_port", mirror.port.to_string())]);
        extra = template::fill(extra, &values).with_context(|| format!("system {}: extra", system.name))?;
    }
    Ok(BTreeMap::from([
        ("server_host", server_host),
        ("server_port", server.port.to_string()),
        ("listen_addr", place.hosts.pooler_from_client.to_owned()),
        ("listen_port", port.to_string()),
        ("spare_port", free_port()?.to_string()),
        ("unix_dir", folder.display().to_string()),
        ("dir", folder.display().to_string()),
        ("auth_type", if setup.login == Login::Scram { "scram-sha-256" } else { "trust" }.to_owned()),
        ("auth_method", if setup.login == Login::Scram { "scram" } else { "trust" }.to_owned()),
        ("scram_user", SCRAM_USER.to_owned()),
        ("scram_secret", place.server.scram_secret()?.to_owned()),
        ("auth_file", folder.join("userlist.txt").display().to_string()),
        ("pool_mode", setup.pool_mode.name().to_owned()),
        // PgBouncer's default: a server connection is reset after a session and not after a transaction.
        ("discard", if setup.pool_mode == PoolMode::Session { "yes" } else { "no" }.to_owned()),
        ("pool_size", setup.pool_size.to_string()),
        ("password", PASSWORD.to_owned()),
        ("threads", threads(setup).to_string()),
        ("max_client_conn", setup.max_clients.to_string()),
        ("children", setup.max_clients.to_string()),
        ("tls_lines", tls_lines),
        ("prepared_lines", format!("max_prepared_statements = 200\n{}", setup.extra)),
        ("user_line", if as_root { format!("user = {}", place.account.name) } else { String::new() }),
        ("extra", extra),
    ]))
}

/// Threads of a pooler that does not count CPUs itself: one for each that it may use, as Underpass and most others have it.
fn threads(setup: &Setup) -> usize {
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let Some(cpus) = &setup.cpus else { return all };
    let count = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)? + 1)
    };
    cpus.split(',').map(count).sum::<Option<usize>>().unwrap_or(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pooler_on_some_cpus_gets_as_many_threads() {
        let on = |cpus: &str| threads(&Setup { cpus: Some(cpus.to_owned()), ..Setup::plain(20, 20) });
        assert_eq!([on("0"), on("0-1"), on("0,2-4")], [1, 2, 4]);
        assert!(threads(&Setup::plain(20, 20)) >= 1);
    }

    #[test]
    fn connections_of_a_port_are_those_that_are_not_over() {
        let table = |state: &str| {
            format!(
                "  sl  local_address rem_address   st tx_queue rx_queue\n   0: 0100007F:1538 0100007F:D431 {state} 00000000:00000000\n"
            )
        };
        let has = |state: &str, port| has_connection(&table(state), port);
        assert!(has("01", 5432) && has("08", 5432));
        assert!(!has("06", 5432) && !has("0A", 5432) && !has("01", 5433) && !has("01", 0xD431));
    }

    #[test]
    fn recordings_by_packets_are_audited_once_they_know_sessions() {
        let systems = table(None).unwrap();
        let of = |name: &str| {
            let system = systems.iter().find(|system| system.name == name).unwrap();
            (system.records_packets(), system.audits())
        };
        assert_eq!(of("trace-persist"), (true, true));
        assert_eq!(of("trace-full"), (true, true));
        assert_eq!(of("trace-attach"), (true, false));
        assert_eq!(of("trace-probes"), (false, false));
        assert_eq!(of("direct"), (false, false));
    }

    #[test]
    fn the_built_in_table_is_sound() {
        let systems = table(None).unwrap();
        for system in &systems {
            assert_eq!(system.is_pooler(), !system.command.is_empty(), "{}", system.name);
            assert!(!system.pool_modes.is_empty(), "{}", system.name);
            if !system.config.is_empty() {
                for name in system.more_configs.iter().chain([&system.config]) {
                    template::of(name).unwrap();
                }
                assert!(system.command.iter().any(|word| word.contains("{{config}}")), "{}", system.name);
            }
            if let Some(twin) = &system.twin_of {
                assert!(systems.iter().any(|other| &other.name == twin), "{}", system.name);
            }
        }
        assert!(systems.iter().any(|system| system.name == "ours-off"));
    }

    #[test]
    fn templates_have_no_place_without_a_value() {
        let known = [
            "server_host",
            "server_port",
            "listen_addr",
            "listen_port",
            "spare_port",
            "unix_dir",
            "dir",
            "auth_type",
            "auth_method",
            "scram_user",
            "scram_secret",
            "auth_file",
            "pool_mode",
            "discard",
            "pool_size",
            "password",
            "threads",
            "max_client_conn",
            "children",
            "tls_lines",
            "prepared_lines",
            "user_line",
            "extra",
        ];
        let values: BTreeMap<&'static str, String> =
            known.into_iter().map(|name| (name, "1".to_owned())).collect();
        for system in table(None).unwrap().iter().filter(|system| !system.config.is_empty()) {
            for name in system.more_configs.iter().chain([&system.config]) {
                let filled = template::fill(template::of(name).unwrap(), &values).unwrap();
                if name.ends_with(".toml") {
                    filled.parse::<toml::Table>().unwrap_or_else(|error| panic!("{name}: {error}"));
                }
            }
        }
    }

    #[test]
    fn a_table_with_a_double_or_unknown_field_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("systems.toml");
        let entry = "[[system]]\nname='x'\ntitle='x'\nkind='direct'\npool_modes=[]\nprepared=[]\n";
        fs::write(&path, format!("{entry}{entry}")).unwrap();
        assert!(table(Some(&path)).unwrap_err().to_string().contains("twice"));
        fs::write(&path, format!("{entry}colour='red'\n")).unwrap();
        assert!(format!("{:#}", table(Some(&path)).unwrap_err()).contains("colour"));
    }

    #[test]
    fn a_missing_program_names_what_to_do() {
        let mut system = table(None).unwrap().into_iter().find(|system| system.name == "pgpool").unwrap();
        system.command[0] = "no-such-pooler".to_owned();
        assert!(system.program().unwrap_err().to_string().contains("install no-such-pooler"));
    }
}
