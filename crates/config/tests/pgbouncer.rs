// SPDX-License-Identifier: Apache-2.0
//! The real PgBouncer reads the same file; SHOW CONFIG of both must agree on every key both have.
//!
//! Runs where a `pgbouncer` binary exists; PgBouncer refuses to run as root, so as root it is started as `postgres` or
//! `nobody`. Otherwise the test says why it does not run. The console is asked by hand over its unix socket: a client
//! library would bring a dependency for four messages.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use underpass_config::Config;

/// Defaults that changed between PgBouncer 1.18 and 1.25; they are compared only when the file sets the key.
const NEWER_DEFAULTS: [&str; 5] =
    ["server_tls_sslmode", "server_check_query", "client_tls_ciphers", "server_tls_ciphers", "auth_query"];

fn binary() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let fixed = [PathBuf::from("/usr/sbin")];
    std::env::split_paths(&path).chain(fixed).map(|d| d.join("pgbouncer")).find(|p| p.is_file())
}

/// uid and gid to run as: ours, or those of an unprivileged user if we are root.
fn unprivileged(dir: &Path) -> Option<(u32, u32)> {
    let me = std::fs::metadata(dir).ok()?;
    if me.uid() != 0 {
        return Some((me.uid(), me.gid()));
    }
    let passwd = std::fs::read_to_string("/etc/passwd").ok()?;
    ["postgres", "nobody"].iter().find_map(|name| {
        let line = passwd.lines().find(|l| l.split(':').next() == Some(name))?;
        let mut ids = line.split(':').skip(2).map(str::parse);
        Some((ids.next()?.ok()?, ids.next()?.ok()?))
    })
}

struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Nothing to do about failures here: the process is gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(binary: &Path, dir: &Path, ini: &str, (uid, gid): (u32, u32)) -> Running {
    std::fs::write(dir.join("p.ini"), ini).expect("ini");
    std::fs::write(dir.join("users"), "\"tester\" \"\"\n").expect("users");
    if std::fs::metadata(dir).expect("dir").uid() != uid {
        std::os::unix::fs::chown(dir, Some(uid), Some(gid)).expect("chown");
    }
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755)).expect("chmod");
    let mut command = Command::new(binary);
    command.arg("p.ini").current_dir(dir).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    if std::fs::metadata("/proc/self").expect("proc").uid() == 0 {
        command.uid(uid).gid(gid);
    }
    Running(command.spawn().expect("start pgbouncer"))
}

/// SHOW CONFIG as `key -> (value, default, changeable)`.
fn show_config(socket: &Path, running: &mut Running) -> BTreeMap<String, Vec<Option<String>>> {
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut stream = loop {
        match UnixStream::connect(socket) {
            Ok(stream) => break stream,
            Err(e) if Instant::now() > deadline => panic!("{}: {e}", socket.display()),
            Err(_) => {
                if running.0.try_wait().expect("wait").is_some() {
                    let mut log = String::new();
                    running.0.stderr.take().expect("piped").read_to_string(&mut log).expect("log");
                    panic!("pgbouncer refused the file:\n{log}");
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    };
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("timeout");
    let body = b"\x00\x03\x00\x00user\0tester\0database\0pgbouncer\0\0";
    // Each in one piece: PgBouncer's console hangs up on a message that comes in parts.
    stream.write_all(&[&(body.len() as u32 + 4).to_be_bytes(), &body[..]].concat()).expect("startup");
    let query = b"SHOW CONFIG\0";
    let mut rows = BTreeMap::new();
    let mut asked = false;
    loop {
        let mut head = [0; 5];
        stream.read_exact(&mut head).expect("header");
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
        let mut message = vec![0; length - 4];
        stream.read_exact(&mut message).expect("body");
        match head[0] {
            b'E' => panic!("{}", String::from_utf8_lossy(&message)),
            b'D' => {
                let mut columns = Vec::new();
                let mut rest = &message[2..];
                while !rest.is_empty() {
                    let length = i32::from_be_bytes([rest[0], rest[1], rest[2], rest[3]]);
                    rest = &rest[4..];
                    let value = usize::try_from(length).ok().map(|n| {
                        let (value, after) = rest.split_at(n);
                        rest = after;
                        String::from_utf8(value.to_vec()).expect("text")
                    });
                    columns.push(value);
                }
                rows.insert(columns.remove(0).expect("key"), columns);
            }
            b'Z' if !asked => {
                asked = true;
                let length = (query.len() as u32 + 4).to_be_bytes();
                stream.write_all(&[b"Q", &length[..], query].concat()).expect("query");
            }
            b'Z' => return rows,
            _ => {}
        }
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").expect("port").local_addr().expect("address").port()
}

/// Compares one file; `settings` go into `[pgbouncer]` after what the test needs itself.
fn compare(settings: &str) {
    let Some(binary) = binary() else { return println!("skipped: no pgbouncer on this machine") };
    let dir = tempfile::Builder::new().prefix("underpass-config").tempdir().expect("directory");
    let Some(ids) = unprivileged(dir.path()) else {
        return println!("skipped: root and no user to run pgbouncer as");
    };
    let port = free_port();
    let listen = format!(
        "[pgbouncer]\nlisten_port={port}\nunix_socket_dir = {}\nauth_type=trust\nauth_file=users\nadmin_users=tester\n",
        dir.path().display()
    );
    let settings = settings.replace("@again\n", &listen);
    let ini = format!(
        "[databases]\na.b-c_1 = host=127.0.0.1 port=1 application_name='it''s'\n* = host=/nowhere\n[users]\nu = pool_mode=statement\n{listen}{settings}"
    );
    let mut running = start(&binary, dir.path(), &ini, ids);
    let theirs = show_config(&dir.path().join(format!(".s.PGSQL.{port}")), &mut running);
    assert!(theirs.len() > 60, "{}", theirs.len());
    let config = Config::parse("p.ini", &ini).unwrap_or_else(|e| panic!("{e}")).config;
    let ours: BTreeMap<String, _> = config.show().map(|row| (row.key.clone(), row)).collect();
    let mut differing = Vec::new();
    for (key, columns) in &theirs {
        let row = ours.get(key).unwrap_or_else(|| panic!("PgBouncer has {key}, we do not"));
        let default = row.default.map(str::to_owned);
        if NEWER_DEFAULTS.contains(&key.as_str()) {
            if config.is_set(key) && columns[0] != row.value {
                differing.push(format!("{key}: {:?}, ours {:?}", columns[0], row.value));
            }
            continue;
        }
        let mine = [row.value.clone(), default, Some(if row.changeable { "yes" } else { "no" }.to_owned())];
        if columns[..] != mine {
            differing.push(format!("{key}: {columns:?}, ours {mine:?}"));
        }
    }
    assert!(differing.is_empty(), "{}", differing.join("\n"));
}

#[test]
fn defaults() {
    compare("");
}

#[test]
fn every_kind_of_value() {
    compare(
        "pool_mode = Transaction\nmax_client_conn = 0x20\ndefault_pool_size = 010\nunix_socket_mode = 0700\nquery_timeout = 1.5\nclient_idle_timeout=0.00001\nserver_lifetime=1e6\nautodb_idle_timeout=1234567.5\nserver_idle_timeout = 12.3456789\nserver_check_query = select ';' # 1\nserver_reset_query =\nstats_users = a, b c\nignore_startup_parameters=options,extra_float_digits\nserver_tls_sslmode=REQUIRE\nlog_connections=0\nlog_stats = 0\nmax_packet_size=1000000\nstats_period = 7\ntcp_keepidle = 30\nclient_tls_ciphers=normal\nverbose = 1\nserver_login_retry=.25\n",
    );
}

#[test]
fn later_lines_override() {
    compare(
        "pool_mode=statement\nmax_client_conn=5\nmax_client_conn=6\nquery_timeout=3\n[databases]\nz = host=y\n",
    );
}

#[test]
fn a_second_main_section_resets() {
    // PgBouncer forgets the port and the socket's directory too, so the file ends with them.
    compare("pool_mode=statement\nmax_client_conn=5\n@again\nquery_timeout=3\n");
}

#[test]
fn both_refuse_the_same_files() {
    let Some(binary) = binary() else { return println!("skipped: no pgbouncer on this machine") };
    for body in [
        "[pgbouncer]\nno_such_key = 1\n",
        "[pgbouncer]\nmax_client_conn = 10k\n",
        "[pgbouncer]\nmax_client_conn =\n",
        "[pgbouncer]\nlog_connections = yes\n",
        "[pgbouncer]\nquery_timeout = 5s\n",
        "[pgbouncer]\nquery_timeout = -1\n",
        "[pgbouncer]\npool_mode = fast\n",
        "[pgbouncer]\nauth_type = ldap\n",
        "[pgbouncer]\n%include gone.ini\n",
        "[pgbouncer]\n[underpass]\nthreads = 1\nno_such_key = 1\n",
        "[pgbouncer]\n[sessions]\n",
        "[pgbouncer\n",
        "[databases]\npgbouncer = host=x\n[pgbouncer]\n",
        "[databases]\na = host=\n[pgbouncer]\n",
        "[databases]\na = host='x\n[pgbouncer]\n",
        "[databases]\na = hots=x\n[pgbouncer]\n",
        "[databases]\na = port=0\n[pgbouncer]\n",
        "[databases]\na b = host=x\n[pgbouncer]\n",
        "[databases]\na = host=x\n",
        "[users]\nu = pool_mode=fast\n[pgbouncer]\n",
        "listen_port = 1\n[pgbouncer]\n",
        "[pgbouncer]\njust words\n",
    ] {
        assert!(Config::parse("p.ini", body).is_err(), "we accept {body:?}");
        let dir = tempfile::Builder::new().prefix("underpass-config").tempdir().expect("directory");
        let Some(ids) = unprivileged(dir.path()) else {
            return println!("skipped: root and no user to run pgbouncer as");
        };
        let mut running = start(&binary, dir.path(), body, ids);
        let deadline = Instant::now() + Duration::from_secs(10);
        let status = loop {
            if let Some(status) = running.0.try_wait().expect("wait") {
                break status;
            }
            assert!(Instant::now() < deadline, "PgBouncer accepts {body:?}");
            std::thread::sleep(Duration::from_millis(2));
        };
        assert!(!status.success(), "{body:?}");
    }
}
