// SPDX-License-Identifier: Apache-2.0
//! A private MariaDB: its own data directory, port and socket. Nothing of the system's configuration or data is read.
//!
//! `UNDERPASS_MYSQL_HOME=DIRECTORY` has it be a MySQL 5.6 instead, with the programs in `DIRECTORY/bin` and the tables in `DIRECTORY/share`,
//! as they are in its archive for Linux. The shell is MariaDB's all the same.
//!
//! `root` enters by the Unix socket without password, `ann` with the password `S3cret` and `bob` with none, from anywhere, and both
//! may do everything. There is a database `shop`.

use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use nix::sys::signal::Signal;
use tempfile::TempDir;

use crate::process::{make_service_directory, service_command, service_directory, write_service_file};
use crate::{Authority, Error, Port, Process, Result, template};

/// Longest start on a loaded machine.
const START_LIMIT: Duration = Duration::from_secs(90);
/// Longest end of a killed process on a loaded machine.
const STOP_LIMIT: Duration = Duration::from_secs(30);
/// What the server runs before it listens.
const INIT: &str = "CREATE DATABASE IF NOT EXISTS shop;
CREATE USER ann@'%' IDENTIFIED BY 'S3cret';
CREATE USER bob@'%';
GRANT ALL ON *.* TO ann@'%' WITH GRANT OPTION;
GRANT ALL ON *.* TO bob@'%';
";
/// Where a MySQL is, which takes MariaDB's place.
const MYSQL_HOME: &str = "UNDERPASS_MYSQL_HOME";
/// The system tables of MySQL 5.6, as its mysql_install_db makes them.
const MYSQL_TABLES: [&str; 2] = ["mysql_system_tables.sql", "mysql_system_tables_data.sql"];

/// A running private MariaDB.
#[derive(Debug)]
pub struct Mariadb {
    // Order matters: the process ends before its directory goes.
    process: Process,
    port: Port,
    socket: PathBuf,
    _directory: TempDir,
}

impl Mariadb {
    /// Whether the server is a MySQL, which knows less SQL than MariaDB and has no TLS that today's clients accept.
    pub fn is_mysql() -> bool {
        mysql_home().is_some()
    }

    /// Whether the server's programs are missing here: tests that need it are skipped, and say so.
    pub fn is_missing() -> bool {
        !Self::is_mysql() && ["mariadbd", "mariadb-install-db"].iter().any(|name| program(name).is_err())
    }

    /// Makes a data directory and starts a server on it, which has no TLS.
    ///
    /// # Errors
    /// A program is missing, fails, or does not get ready in time.
    pub fn start() -> Result<Self> {
        Self::start_with(None)
    }

    /// The same with TLS, by a certificate of `authority` for localhost and 127.0.0.1.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_tls(authority: &Authority) -> Result<Self> {
        Self::start_with(Some(authority))
    }

    fn start_with(authority: Option<&Authority>) -> Result<Self> {
        let directory = service_directory()?;
        let (data, socket) = (directory.path().join("data"), directory.path().join("mariadb.sock"));
        match mysql_home() {
            Some(home) => install_mysql(&home, directory.path(), &data)?,
            None => install_mariadb(&data)?,
        }
        let init = directory.path().join("init.sql");
        write_service_file(&init, INIT, 0o600)?;
        let port = Port::reserve()?;
        let mut command = match mysql_home() {
            Some(home) => mysqld(&home, directory.path()),
            None => service_command(&program("mariadbd")?, directory.path()),
        };
        // Durability is off: the machine does not crash under a test.
        if mysql_home().is_none() {
            command.arg("--no-defaults");
        }
        command.args(["--bind-address=127.0.0.1", "--skip-name-resolve", "--local-infile=1"]);
        command.args(["--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=32M"]);
        command.arg("--max-allowed-packet=64M").env("TMPDIR", directory.path());
        command.arg(format!("--port={}", port.number()));
        let pid_file = directory.path().join("mariadb.pid");
        for (name, path) in
            [("datadir", &data), ("socket", &socket), ("pid-file", &pid_file), ("init-file", &init)]
        {
            command.arg(option(name, path));
        }
        if let Some(authority) = authority {
            authority.server(&["localhost", "127.0.0.1"])?.write(directory.path(), "server")?;
            for (name, file) in [("ssl-cert", "server.crt"), ("ssl-key", "server.key")] {
                command.arg(option(name, &directory.path().join(file)));
            }
        }
        let log = directory.path().join("mariadb.log");
        let process = Process::spawn("mariadbd", &mut command, &log, directory.path(), Signal::SIGTERM)?;
        let mut server = Self { process, port, socket, _directory: directory };
        let (address, socket) = (("127.0.0.1", server.port()), server.socket.clone());
        // The socket is there when the init file has been run; the listener comes before it.
        server.process.wait_ready(START_LIMIT, || {
            std::net::TcpStream::connect(address).map_err(Error::io("connect by TCP"))?;
            shell(&socket, &["-e", "select 1 from mysql.user where user = 'bob'"]).map(drop)
        })?;
        Ok(server)
    }

    /// TCP port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    /// Process identifier.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The server's log so far.
    pub fn log(&self) -> String {
        self.process.log()
    }

    /// Runs SQL as root by the Unix socket; returns what the shell prints, without column names.
    ///
    /// # Errors
    /// The shell's own, with its message.
    pub fn sql(&self, sql: &str) -> Result<String> {
        shell(&self.socket, &["-N", "-B", "-e", sql])
    }

    /// The server's shell as `ann` by TCP, in database `shop`; to be given a script on its standard input or with `-e`.
    ///
    /// # Errors
    /// The shell is not installed.
    pub fn shell(&self) -> Result<Command> {
        let mut command = self.shell_as_ann()?;
        command.args(["--protocol=tcp", "--host=127.0.0.1"]).arg(format!("--port={}", self.port()));
        Ok(command)
    }

    /// The same by the Unix socket.
    ///
    /// # Errors
    /// The shell is not installed.
    pub fn shell_by_socket(&self) -> Result<Command> {
        let mut command = self.shell_as_ann()?;
        command.arg("--protocol=socket").arg(option("socket", &self.socket));
        Ok(command)
    }

    fn shell_as_ann(&self) -> Result<Command> {
        let mut command = Command::new(program("mariadb")?);
        command.args(["--no-defaults", "--user=ann", "--password=S3cret", "--database=shop"]);
        Ok(command)
    }

    /// Kills the server, without a chance to say goodbye.
    ///
    /// # Errors
    /// It cannot be signalled, or does not end.
    pub fn kill(&mut self) -> Result<()> {
        self.process.stop(Signal::SIGKILL, STOP_LIMIT).map(drop)
    }
}

fn mysql_home() -> Option<PathBuf> {
    std::env::var_os(MYSQL_HOME).map(PathBuf::from)
}

fn install_mariadb(data: &Path) -> Result<()> {
    let name = "mariadb-install-db";
    let program = program(name)?;
    let arguments = ["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db"];
    template::copy(&program, &arguments, data, |directory, data| {
        let mut install = service_command(&program, directory);
        // Servers that start together would meet in /tmp.
        install.args(arguments).arg(option("datadir", data)).env("TMPDIR", directory);
        succeed(name, install.output().map_err(Error::io(format!("run {name}")))?)
    })
}

/// MySQL's own program for this is in Perl and looks around in the system.
fn install_mysql(home: &Path, directory: &Path, data: &Path) -> Result<()> {
    let mut script = String::from("create database mysql;\nuse mysql;\n");
    for name in MYSQL_TABLES {
        let path = home.join("share").join(name);
        let text = std::fs::read_to_string(&path).map_err(Error::io(format!("read {}", path.display())))?;
        script.push_str(&text);
    }
    // Nobody, from this host, would come before `ann` from anywhere.
    script.push_str("delete from mysql.user where user = '';\n");
    let path = directory.join("tables.sql");
    write_service_file(&path, &script, 0o600)?;
    make_service_directory(data)?;
    let input = File::open(&path).map_err(Error::io("open the script of tables"))?;
    let mut install = mysqld(home, directory);
    install.arg("--bootstrap").arg(option("datadir", data)).stdin(input);
    succeed("mysqld --bootstrap", install.output().map_err(Error::io("run mysqld --bootstrap"))?)
}

fn mysqld(home: &Path, directory: &Path) -> Command {
    let mut command = service_command(&home.join("bin/mysqld"), directory);
    command.arg("--no-defaults").arg(option("basedir", home)).env("TMPDIR", directory);
    command.arg(option("lc-messages-dir", &home.join("share"))).arg("--innodb-log-file-size=64M");
    command
}

fn succeed(program: &str, output: Output) -> Result<()> {
    if output.status.success() {
        return Ok(());
    }
    Err(Error::Exited {
        program: program.into(),
        status: output.status.to_string(),
        log: String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned(),
    })
}

fn shell(socket: &Path, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new(program("mariadb")?);
    command.args(["--no-defaults", "--user=root"]).arg(option("socket", socket)).args(arguments);
    let Output { status, stdout, stderr } = command.output().map_err(Error::io("run mariadb"))?;
    if status.success() {
        return Ok(String::from_utf8_lossy(&stdout).trim_end().to_owned());
    }
    let log = String::from_utf8_lossy(&stderr).into_owned();
    Err(Error::Exited { program: "mariadb".into(), status: status.to_string(), log })
}

fn option(name: &str, path: &Path) -> std::ffi::OsString {
    let mut argument = std::ffi::OsString::from(format!("--{name}="));
    argument.push(path.as_os_str());
    argument
}

/// A program of the server, where Debian has it or on the path.
fn program(name: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/usr/bin".into()])
        .map(|directory| directory.join(OsStr::new(name)))
        .find(|path| path.exists())
        .ok_or_else(|| Error::NotFound {
            program: name.into(),
            hint: "install mariadb-server and mariadb-client".into(),
        })
}
