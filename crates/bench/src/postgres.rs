// SPDX-License-Identifier: Apache-2.0
//! A private PostgreSQL for one run: made by initdb in a temporary folder, gone with the value.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;

use crate::counters::Cgroup;
use crate::hosts::Hosts;
use crate::procs::{Account, Launch, Running, find_program, output};

/// The user that logs in by trust.
pub const USER: &str = "bench";
/// The user that logs in by SCRAM.
pub const SCRAM_USER: &str = "bench_scram";
/// The password of [`SCRAM_USER`]; it guards nothing but a benchmark on a private server.
pub const PASSWORD: &str = "bench-password";
/// The database.
pub const DATABASE: &str = "bench";

/// What the server must be able to carry.
#[derive(Clone, Copy, Debug)]
pub struct ServerNeeds {
    /// Connections at once.
    pub connections: u32,
    /// `shared_buffers` in MiB.
    pub shared_buffers_mib: u32,
    /// Poolers need a certificate with an RSA key.
    pub rsa: bool,
}

/// A running private PostgreSQL.
#[derive(Debug)]
pub struct Server {
    process: Running,
    /// As a service manager would give it one; a tracer watches the sockets in it.
    _cgroup: Option<Cgroup>,
    folder: PathBuf,
    scram_secret: OnceLock<String>,
    /// TCP port.
    pub port: u16,
    /// First line of `postgres --version`.
    pub version: String,
}

impl Server {
    /// Runs initdb, starts the server and waits until it answers; makes users and database.
    ///
    /// # Errors
    /// When a program is missing or fails, with the end of its log.
    pub fn start(
        folder: &Path,
        name: &str,
        account: &Account,
        hosts: &Hosts,
        needs: ServerNeeds,
    ) -> Result<Self> {
        let initdb = find_program("initdb").context("initdb not found: install postgresql")?;
        let postgres = find_program("postgres").context("postgres not found: install postgresql")?;
        let folder = folder.join(name);
        fs::create_dir(&folder)?;
        account.give(&folder)?;
        let data = folder.join("data");
        let plain = Launch::default();
        let mut command = plain.command(account, initdb);
        command.args(["--no-sync", "-A", "trust", "-E", "UTF8", "--locale=C", "-U", USER, "-D"]).arg(&data);
        output(command, "initdb")?;
        write_certificate(&folder, account)?;
        if needs.rsa {
            write_rsa_certificate(&folder, account)?;
        }
        let port = free_port()?;
        fs::write(data.join("postgresql.auto.conf"), settings(&folder, hosts, port, needs))?;
        fs::write(data.join("pg_hba.conf"), HBA)?;

        let cgroup = Cgroup::create(name);
        let launch = Launch {
            netns: hosts.server.clone(),
            cgroup: cgroup.as_ref().map(|group| group.path().to_owned()),
            ..Launch::default()
        };
        let log = fs::File::create(folder.join("server.log"))?;
        let mut command = launch.command(account, &postgres);
        command.arg("-D").arg(&data).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // SIGINT is PostgreSQL's fast shutdown: it disconnects clients.
        let process = Running::start(command, "postgres", Signal::SIGINT)?;
        let mut version = Command::new(&postgres);
        version.arg("--version");
        let version = output(version, "postgres --version")?.trim().to_owned();
        let mut server =
            Self { process, _cgroup: cgroup, folder, scram_secret: OnceLock::new(), port, version };
        server.wait_until_ready()?;
        server.psql("postgres", &format!("create database {DATABASE}"))?;
        server.psql(
            DATABASE,
            &format!("create role {SCRAM_USER} login superuser password '{PASSWORD}'; create extension if not exists plpgsql"),
        )?;
        Ok(server)
    }

    /// The process id of its postmaster.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Folder of its unix socket.
    #[must_use]
    pub fn socket_folder(&self) -> &Path {
        &self.folder
    }

    /// The certificate that the server and every pooler show, and its key, readable by the server account alone; with an RSA key
    /// that of poolers only, where [`ServerNeeds::rsa`] asked for it.
    #[must_use]
    pub fn certificate(&self, rsa: bool) -> (PathBuf, PathBuf) {
        let name = if rsa { "rsa" } else { "server" };
        (self.folder.join(format!("{name}.crt")), self.folder.join(format!("{name}.key")))
    }

    /// What the server stores of [`SCRAM_USER`]'s password. A pooler that has the same can check a login without
    /// deriving keys anew, which is how it is set up where logins matter.
    ///
    /// # Errors
    /// When the server does not answer.
    pub fn scram_secret(&self) -> Result<&str> {
        if let Some(secret) = self.scram_secret.get() {
            return Ok(secret);
        }
        let secret = self
            .psql(DATABASE, &format!("select rolpassword from pg_authid where rolname = '{SCRAM_USER}'"))?;
        Ok(self.scram_secret.get_or_init(|| secret.trim().to_owned()))
    }

    /// Runs SQL over the unix socket and returns its unaligned result.
    ///
    /// # Errors
    /// When psql fails; carries the server's message.
    pub fn psql(&self, database: &str, sql: &str) -> Result<String> {
        let mut command = self.psql_command(database)?;
        command.arg("-c").arg(sql);
        output(command, "psql")
    }

    /// Runs an SQL file with variables.
    ///
    /// # Errors
    /// When psql fails; carries the server's message.
    pub fn psql_script(&self, database: &str, script: &str, variables: &[(&str, String)]) -> Result<()> {
        let path = self.folder.join("script.sql");
        fs::write(&path, script)?;
        let mut command = self.psql_command(database)?;
        for (name, value) in variables {
            command.arg("-v").arg(format!("{name}={value}"));
        }
        command.arg("-f").arg(path);
        output(command, "psql").map(drop)
    }

    fn psql_command(&self, database: &str) -> Result<Command> {
        let psql = find_program("psql").context("psql not found: install postgresql-client")?;
        let mut command = Command::new(psql);
        command
            .args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-U", USER, "-d", database])
            .args(["-p", &self.port.to_string(), "-h"])
            .arg(&self.folder);
        Ok(command)
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let error = match self.psql("postgres", "select 1") {
                Ok(_) => return Ok(()),
                Err(error) => error,
            };
            if let Some(status) = self.process.ended()? {
                bail!("postgres ended at start ({status}):\n{}", log_tail(&self.folder.join("server.log")));
            }
            if Instant::now() > deadline {
                bail!(
                    "postgres did not answer within 60 s: {error:#}\n{}",
                    log_tail(&self.folder.join("server.log"))
                );
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

const HBA: &str = "\
local all all trust
host all bench_scram all scram-sha-256
host all all all trust
";

fn settings(folder: &Path, hosts: &Hosts, port: u16, needs: ServerNeeds) -> String {
    let listen = if hosts.apart() { "*" } else { "127.0.0.1" };
    format!(
        "listen_addresses = '{listen}'\nport = {port}\nunix_socket_directories = '{folder}'\n\
         max_connections = {connections}\nsuperuser_reserved_connections = 3\n\
         shared_buffers = '{buffers}MB'\nhuge_pages = off\n\
         # The disk is not what is measured.\n\
         fsync = off\nsynchronous_commit = off\nfull_page_writes = off\nmax_wal_size = '8GB'\n\
         checkpoint_timeout = '1h'\nwal_level = minimal\nmax_wal_senders = 0\n\
         # Background work would land on some system's round and not on another's.\n\
         autovacuum = off\njit = off\nlog_min_messages = error\nlog_min_error_statement = panic\n\
         ssl = on\nssl_cert_file = '{folder}/server.crt'\nssl_key_file = '{folder}/server.key'\n",
        folder = folder.display(),
        connections = needs.connections,
        buffers = needs.shared_buffers_mib,
    )
}

fn write_certificate(folder: &Path, account: &Account) -> Result<()> {
    let names = ["localhost", "127.0.0.1", "10.222.1.2", "10.222.3.2"].map(str::to_owned).to_vec();
    let made = rcgen::generate_simple_self_signed(names)?;
    let (certificate, key) = (folder.join("server.crt"), folder.join("server.key"));
    fs::write(&certificate, made.cert.pem())?;
    fs::write(&key, made.signing_key.serialize_pem())?;
    guard(&certificate, &key, account)
}

/// By openssl: no library of ours makes RSA keys.
fn write_rsa_certificate(folder: &Path, account: &Account) -> Result<()> {
    let (certificate, key) = (folder.join("rsa.crt"), folder.join("rsa.key"));
    let mut command = Command::new(find_program("openssl").context("openssl not found: install openssl")?);
    command.args(["req", "-x509", "-newkey", "rsa:4096", "-nodes", "-days", "2", "-subj", "/CN=localhost"]);
    command.arg("-keyout").arg(&key).arg("-out").arg(&certificate);
    output(command, "openssl req")?;
    guard(&certificate, &key, account)
}

fn guard(certificate: &Path, key: &Path, account: &Account) -> Result<()> {
    fs::set_permissions(key, fs::Permissions::from_mode(0o600))?;
    account.give(certificate)?;
    account.give(key)
}

/// A TCP port that nothing listens on at the moment.
///
/// # Errors
/// When the kernel has none left.
pub fn free_port() -> Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0)).context("no free port")?.local_addr()?.port())
}

/// The last lines of a log, for messages.
#[must_use]
pub fn log_tail(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(8)..].join("\n")
}
