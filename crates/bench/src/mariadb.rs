// SPDX-License-Identifier: Apache-2.0
//! A private MariaDB for the runs that are about it: made in a temporary folder, gone with the value.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;

use crate::counters::Cgroup;
use crate::postgres::{DATABASE, PASSWORD, USER, free_port, log_tail};
use crate::procs::{Account, Launch, Running, find_program, output};

/// What the server runs before it listens.
const INIT: &str = "create database if not exists {{database}};
create user if not exists {{user}}@'%' identified by '{{password}}';
grant all on *.* to {{user}}@'%';
";

/// A running private MariaDB.
#[derive(Debug)]
pub struct Mariadb {
    process: Running,
    /// As a service manager would give it one; a tracer watches the sockets in it.
    _cgroup: Option<Cgroup>,
    folder: PathBuf,
    /// TCP port on 127.0.0.1.
    pub port: u16,
}

impl Mariadb {
    /// The programs that it needs, as far as they are missing, with their packages.
    #[must_use]
    pub fn missing() -> Vec<String> {
        [
            ("mariadbd", "mariadb-server"),
            ("mariadb-install-db", "mariadb-server"),
            ("mariadb", "mariadb-client"),
        ]
        .into_iter()
        .filter(|(program, _)| find_program(program).is_none())
        .map(|(program, package)| format!("{program} not found: install {package}"))
        .collect()
    }

    /// Makes a data directory, starts a server on it and waits until it answers.
    ///
    /// # Errors
    /// When a program is missing or fails, with the end of its log.
    pub fn start(parent: &Path, account: &Account, buffer_mib: u32) -> Result<Self> {
        let folder = parent.join("mariadb");
        fs::create_dir(&folder)?;
        account.give(&folder)?;
        let data = folder.join("data");
        let plain = Launch::default();
        let mut command = plain.command(account, find("mariadb-install-db")?);
        command.args(["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db"]);
        command.arg(option("datadir", &data)).env("TMPDIR", &folder);
        output(command, "mariadb-install-db")?;
        let init = folder.join("init.sql");
        let values = [("database", DATABASE), ("user", USER), ("password", PASSWORD)];
        let text = values
            .iter()
            .fold(INIT.to_owned(), |text, (name, value)| text.replace(&format!("{{{{{name}}}}}"), value));
        fs::write(&init, text)?;
        account.give(&init)?;
        let port = free_port()?;
        let cgroup = Cgroup::create("mariadb");
        let launch =
            Launch { cgroup: cgroup.as_ref().map(|group| group.path().to_owned()), ..Launch::default() };
        let mut command = launch.command(account, find("mariadbd")?);
        // As with PostgreSQL here: the disk is not what is measured.
        command
            .args(["--no-defaults", "--bind-address=127.0.0.1", "--skip-name-resolve", "--skip-log-bin"])
            .args(["--innodb-flush-log-at-trx-commit=0", "--innodb-doublewrite=0", "--max-connections=500"])
            .arg(format!("--innodb-buffer-pool-size={buffer_mib}M"))
            .arg(format!("--port={port}"))
            .arg(option("datadir", &data))
            .arg(option("socket", &folder.join("mariadb.sock")))
            .arg(option("pid-file", &folder.join("mariadb.pid")))
            .arg(option("general-log-file", &folder.join("general.log")))
            .arg(option("init-file", &init))
            .env("TMPDIR", &folder);
        let log = fs::File::create(folder.join("server.log"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let process = Running::start(command, "mariadbd", Signal::SIGTERM)?;
        let mut server = Self { process, _cgroup: cgroup, folder, port };
        server.wait_until_ready()?;
        Ok(server)
    }

    /// Runs SQL over TCP and returns what the shell prints, without column names.
    ///
    /// # Errors
    /// When the shell fails; carries the server's message.
    pub fn sql(&self, sql: &str) -> Result<String> {
        let mut command = Command::new(find("mariadb")?);
        command
            .args(["--no-defaults", "--protocol=tcp", "--host=127.0.0.1", "-N", "-B"])
            .arg(format!("--port={}", self.port))
            .arg(format!("--user={USER}"))
            .arg(format!("--password={PASSWORD}"))
            .args([DATABASE, "-e", sql]);
        output(command, "mariadb")
    }

    /// Lets the server log all statements, or no longer, and throws away what it has logged.
    ///
    /// # Errors
    /// When the server does not answer.
    pub fn log_statements(&self, on: bool) -> Result<()> {
        self.sql(if on { "set global general_log = on" } else { "set global general_log = off" })?;
        if !on {
            // It writes on at its own position; a file that is gone is made anew at the next flush.
            let _ = fs::remove_file(self.folder.join("general.log"));
            self.sql("flush general logs")?;
        }
        Ok(())
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(90);
        let log = self.folder.join("server.log");
        loop {
            let error = match self.sql("select 1") {
                Ok(_) => return Ok(()),
                Err(error) => error,
            };
            if let Some(status) = self.process.ended()? {
                bail!("mariadbd ended at start ({status}):\n{}", log_tail(&log));
            }
            if Instant::now() > deadline {
                bail!("mariadbd did not answer within 90 s: {error:#}\n{}", log_tail(&log));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

fn find(name: &str) -> Result<PathBuf> {
    find_program(name).with_context(|| format!("{name} not found: install mariadb-server"))
}

fn option(name: &str, path: &Path) -> String {
    format!("--{name}={}", path.display())
}
