// SPDX-License-Identifier: Apache-2.0
//! A PostgreSQL server of our own in a temporary directory, stopped when dropped.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// The password of every role, with a character that SASLprep changes.
pub const PASSWORD: &str = "pass\u{2168}word";

/// One role per method; all of them have [`PASSWORD`].
const ROLES: &str = "
    create role admin superuser login;
    set password_encryption = 'scram-sha-256';
    create role scram_user login password 'pass\u{2168}word';
    create role plain_user login password 'pass\u{2168}word';
    create role cert_user login;
    create role reject_user login;
    create role trust_user login;
    set password_encryption = 'md5';
    create role md5_user login password 'pass\u{2168}word';";

const HBA: &str = "
    local all postgres trust
    host all scram_user 127.0.0.1/32 scram-sha-256
    host all md5_user 127.0.0.1/32 md5
    host all plain_user 127.0.0.1/32 password
    host all trust_user 127.0.0.1/32 trust
    hostssl all cert_user 127.0.0.1/32 cert
    host all reject_user 127.0.0.1/32 reject";

pub struct Postgres {
    dir: TempDir,
    bin: PathBuf,
    pub port: u16,
}

/// Where the programs of PostgreSQL are; the newest version of Debian's layout, or `PG_BIN`.
pub fn bin() -> Option<PathBuf> {
    if let Some(bin) = std::env::var_os("PG_BIN") {
        return Some(bin.into());
    }
    let versions = fs::read_dir("/usr/lib/postgresql").ok()?;
    let mut bins: Vec<_> = versions.flatten().map(|entry| entry.path().join("bin")).collect();
    bins.retain(|bin| bin.join("initdb").exists());
    bins.sort();
    bins.pop()
}

/// PostgreSQL refuses to run as root: then the account `postgres` is used.
pub fn account() -> Option<(u32, u32)> {
    let root = fs::metadata("/proc/self").map(|meta| std::os::unix::fs::MetadataExt::uid(&meta) == 0);
    if !root.unwrap_or(false) {
        return None;
    }
    let accounts = fs::read_to_string("/etc/passwd").ok()?;
    let line = accounts.lines().find(|line| line.starts_with("postgres:"))?;
    let mut ids = line.split(':').skip(2).map(|id| id.parse().ok());
    Some((ids.next()??, ids.next()??))
}

impl Postgres {
    /// `None`, with a line that says why, where PostgreSQL is not installed.
    pub fn start() -> Option<Self> {
        let Some(bin) = bin() else {
            println!("skipped: no PostgreSQL programs; install postgresql or set PG_BIN");
            return None;
        };
        let dir = tempfile::tempdir().expect("temporary directory");
        if let Some((uid, gid)) = account() {
            chown(dir.path(), Some(uid), Some(gid)).expect("chown");
        }
        let port = TcpListener::bind("127.0.0.1:0").expect("port").local_addr().expect("address").port();
        let server = Self { dir, bin, port };
        let data = server.data();
        server.run(
            "initdb",
            &["-D", data.to_str().expect("path"), "-U", "postgres", "-A", "trust", "-N", "-E", "UTF8"],
        );
        fs::write(data.join("pg_hba.conf"), HBA).expect("write");
        let settings = format!(
            "listen_addresses = '127.0.0.1'\nport = {port}\nunix_socket_directories = '{}'\nfsync = off\n",
            server.dir.path().display()
        );
        fs::write(data.join("postgresql.auto.conf"), settings).expect("write");
        server.control("start");
        server.sql(ROLES);
        Some(server)
    }

    fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// Switches TLS on, or to another certificate.
    pub fn use_tls(&self, certificates: &super::certificates::Authority) {
        let data = self.data();
        let (key, cert) = certificates.issue("server", Some(&data));
        fs::copy(certificates.ca(), data.join("root.crt")).expect("copy");
        for file in [key, cert, data.join("root.crt")] {
            if let Some((uid, gid)) = account() {
                chown(file, Some(uid), Some(gid)).expect("chown");
            }
        }
        self.sql("alter system set ssl_cert_file = 'server.crt'; ");
        self.sql("alter system set ssl_key_file = 'server.key'");
        self.sql("alter system set ssl_ca_file = 'root.crt'");
        self.sql("alter system set ssl = on");
        self.control("restart");
    }

    /// Runs SQL as superuser; rows as text.
    pub fn sql(&self, sql: &str) -> String {
        let output = Command::new(self.bin.join("psql"))
            .args(["-XAtq", "-v", "ON_ERROR_STOP=1", "-U", "postgres", "-d", "postgres", "-h"])
            .arg(self.dir.path())
            .args(["-p", &self.port.to_string(), "-c", sql])
            .output()
            .expect("psql runs");
        succeeded("psql", &output);
        String::from_utf8(output.stdout).expect("UTF-8").trim().to_owned()
    }

    fn control(&self, verb: &str) {
        let (data, log) = (self.data(), self.dir.path().join("log"));
        let text = |path: &Path| path.to_str().expect("path").to_owned();
        self.run("pg_ctl", &["-w", "-m", "fast", "-D", &text(&data), "-l", &text(&log), verb]);
    }

    fn run(&self, program: &str, arguments: &[&str]) {
        let mut command = Command::new(self.bin.join(program));
        // pg_ctl leaves the server behind, which must not hold our pipes open.
        command.args(arguments).current_dir(self.dir.path()).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(Stdio::null());
        if let Some((uid, gid)) = account() {
            command.uid(uid).gid(gid);
        }
        let status = command.status().expect("the program runs");
        if !status.success() && !std::thread::panicking() {
            let log = fs::read_to_string(self.dir.path().join("log")).unwrap_or_default();
            panic!("{program} {arguments:?}: {status}\n{log}");
        }
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        let begin = Instant::now();
        self.control("stop");
        assert!(
            begin.elapsed() < Duration::from_secs(60) || std::thread::panicking(),
            "the server did not stop"
        );
    }
}

fn succeeded(program: &str, output: &Output) {
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
}
