// SPDX-License-Identifier: Apache-2.0
//! The console of the PgBouncer that is installed, asked over its unix socket, against our tables and grammar.
//!
//! Whatever an older release shows must stand in our tables with the same type and in the same relative order,
//! and what both refuse must be refused with the same words. Skipped, with a line that says so, where there is no
//! `pgbouncer`.

use std::collections::HashMap;
use std::fs::{self, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use underpass_console::logline::{Level, PeerAddress, Record, SocketLabel};
use underpass_console::rows::Lists;
use underpass_console::stats::TOTALS_NAMES;
use underpass_console::{Access, Show, Side, SocketId, Timestamp, Zone, parse, text};

/// Names that PgBouncer has changed since 1.18: (SHOW, old, new).
const RENAMED: &[(Show, &str, &str)] = &[(Show::Databases, "reserve_pool", "reserve_pool_size")];

/// Debian's place first: it is not on the PATH of every user.
fn find_pgbouncer() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::iter::once(PathBuf::from("/usr/sbin"))
        .chain(std::env::split_paths(&path))
        .map(|directory| directory.join("pgbouncer"))
        .find(|file| file.is_file())
}

/// A running PgBouncer, killed when dropped.
struct PgBouncer {
    child: Child,
    directory: tempfile::TempDir,
}

const PORT: u16 = 6432;

impl PgBouncer {
    fn start(program: &Path) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        // PgBouncer refuses to run as root: then it runs as another user, who must get into the directory.
        fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
        fs::write(path.join("users.txt"), "\"admin\" \"\"\n\"stats\" \"\"\n").unwrap();
        let ini = path.join("pgbouncer.ini");
        let settings = format!(
            "[databases]\ntest = host=127.0.0.1 port=1\n[users]\nstats = pool_mode=transaction\n[pgbouncer]\n\
             unix_socket_dir = {0}\nlisten_port = {PORT}\nauth_type = trust\nauth_file = {0}/users.txt\n\
             admin_users = admin\nstats_users = stats\nlogfile = {0}/log\n",
            path.display()
        );
        fs::write(&ini, settings).unwrap();
        let mut command = Command::new(program);
        command.arg("-q").arg(&ini).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        if fs::metadata(path).unwrap().uid() == 0 {
            let (uid, gid) = unprivileged_user();
            command.uid(uid).gid(gid);
        }
        let child = command.spawn().unwrap();
        let mut server = Self { child, directory };
        let deadline = Instant::now() + Duration::from_secs(10);
        while Session::open(&server, "admin").is_err() {
            assert_eq!(server.child.try_wait().unwrap(), None, "PgBouncer ended");
            assert!(Instant::now() < deadline, "PgBouncer does not answer");
            std::thread::sleep(Duration::from_millis(20));
        }
        server
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn unprivileged_user() -> (u32, u32) {
    let passwd = fs::read_to_string("/etc/passwd").unwrap();
    let line = passwd.lines().find(|line| line.starts_with("nobody:")).expect("a user called nobody");
    let mut numbers = line.split(':').skip(2).map(|number| number.parse().unwrap());
    (numbers.next().unwrap(), numbers.next().unwrap())
}

/// The answer to one query: columns with their type, rows, or the message of an error.
#[derive(Debug, Default)]
struct Answer {
    columns: Vec<(String, u32)>,
    rows: Vec<Vec<Option<String>>>,
    error: Option<String>,
    tag: Option<String>,
}

/// A console session, simple protocol.
struct Session(UnixStream);

impl Session {
    fn open(server: &PgBouncer, user: &str) -> io::Result<Self> {
        let stream = UnixStream::connect(server.directory.path().join(format!(".s.PGSQL.{PORT}")))?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        let mut session = Self(stream);
        let parameters = format!("user\0{user}\0database\0pgbouncer\0\0");
        let length = u32::try_from(parameters.len() + 8).unwrap();
        session.0.write_all(&[&length.to_be_bytes()[..], &[0, 3, 0, 0], parameters.as_bytes()].concat())?;
        let login = session.answer()?;
        assert_eq!(login.error, None);
        Ok(session)
    }

    fn ask(&mut self, query: &str) -> Answer {
        let length = u32::try_from(query.len() + 5).unwrap();
        let message = [b"Q", &length.to_be_bytes()[..], query.as_bytes(), b"\0"].concat();
        self.0.write_all(&message).unwrap();
        self.answer().unwrap()
    }

    /// Reads messages to ReadyForQuery.
    fn answer(&mut self) -> io::Result<Answer> {
        let mut answer = Answer::default();
        loop {
            let mut header = [0; 5];
            self.0.read_exact(&mut header)?;
            let length = u32::from_be_bytes(header[1..].try_into().unwrap()) as usize;
            let mut body = vec![0; length - 4];
            self.0.read_exact(&mut body)?;
            let mut fields = Fields(&body);
            match header[0] {
                b'Z' => return Ok(answer),
                b'T' => {
                    for _ in 0..fields.int16() {
                        let name = fields.text();
                        fields.take(6);
                        let oid = fields.int32();
                        fields.take(8);
                        answer.columns.push((name, oid));
                    }
                }
                b'D' => {
                    let count = fields.int16();
                    answer.rows.push((0..count).map(|_| fields.cell()).collect());
                }
                b'C' => answer.tag = Some(fields.text()),
                b'E' => {
                    while fields.0[0] != 0 {
                        let kind = fields.take(1)[0];
                        let value = fields.text();
                        if kind == b'M' {
                            answer.error = Some(value);
                        }
                    }
                }
                _ => {}
            }
        }
    }
}

/// Reads the fields of a message.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, length: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(length);
        self.0 = rest;
        taken
    }

    fn int16(&mut self) -> u16 {
        u16::from_be_bytes(self.take(2).try_into().unwrap())
    }

    fn int32(&mut self) -> u32 {
        u32::from_be_bytes(self.take(4).try_into().unwrap())
    }

    fn text(&mut self) -> String {
        let end = self.0.iter().position(|&byte| byte == 0).unwrap();
        let text = String::from_utf8(self.take(end).to_vec()).unwrap();
        self.take(1);
        text
    }

    fn cell(&mut self) -> Option<String> {
        let length = self.int32();
        (length != u32::MAX).then(|| String::from_utf8(self.take(length as usize).to_vec()).unwrap())
    }
}

/// Fails unless `theirs` is what remains of `ours` when some items are left out.
fn assert_subsequence<T: PartialEq + std::fmt::Debug>(theirs: &[T], ours: &[T], what: &str) {
    let mut rest = ours.iter();
    for item in theirs {
        assert!(
            rest.any(|candidate| candidate == item),
            "{what}: {item:?} is missing or out of order in {ours:?}"
        );
    }
}

#[test]
fn the_installed_pgbouncer_agrees() {
    let Some(program) = find_pgbouncer() else {
        eprintln!("skipped: no pgbouncer is installed");
        return;
    };
    let server = PgBouncer::start(&program);
    let mut admin = Session::open(&server, "admin").unwrap();
    let mut stats = Session::open(&server, "stats").unwrap();
    columns_agree(&mut admin);
    row_names_agree(&mut admin);
    refusals_agree(&mut admin, Access::Admin);
    refusals_agree(&mut stats, Access::Stats);
    commands_agree(&mut admin);
    drop(stats);
    log_lines_agree(&server);
}

/// The line of the closed `stats` session, written by us with PgBouncer's time, process and address.
fn log_lines_agree(server: &PgBouncer) {
    let peer = std::process::id();
    let deadline = Instant::now() + Duration::from_secs(10);
    let line = loop {
        let log = fs::read_to_string(server.directory.path().join("log")).unwrap();
        let found =
            log.lines().rev().find(|line| line.contains("/stats@") && line.contains("closing because"));
        if let Some(line) = found {
            break line.to_owned();
        }
        assert!(Instant::now() < deadline, "no line of a closed connection in {log}");
        std::thread::sleep(Duration::from_millis(20));
    };
    // 2026-11-21 20:54:41.123 UTC [pid] LOG C-0x...: pgbouncer/stats@unix(pid):6432 ...
    let words: Vec<_> = line.splitn(6, ' ').collect();
    let (pointer, rest) = words[5].strip_prefix("C-").and_then(|label| label.split_once(": ")).expect(&line);
    assert!(pointer.starts_with("0x"), "{line}");
    let age = line.rsplit_once("(age=").and_then(|(_, age)| age.strip_suffix("s)")).expect(&line);
    let phrase = text::closing(text::reason::CLIENT_EOF, age.parse().unwrap()).text;
    let label = SocketLabel {
        side: Side::Client,
        id: SocketId::FIRST,
        database: Some("pgbouncer"),
        user: Some("stats"),
        peer_id: None,
        address: PeerAddress::Unix { pid: Some(peer), port: PORT },
    };
    let pid = server.child.id();
    let zone = Zone::new(words[2], 0);
    let record = Record {
        time: Timestamp(0),
        pid,
        level: Level::Log,
        socket: Some(label),
        event: None,
        message: &phrase,
    };
    let mut ours = String::new();
    record.write_text(&mut ours, &zone);
    let ours = ours.trim_end();
    let (our_time, our_rest) = ours.split_at(words[0].len() + 1 + words[1].len());
    let shape = |time: &str| time.replace(|c: char| c.is_ascii_digit(), "9");
    assert_eq!(shape(our_time), shape(&format!("{} {}", words[0], words[1])));
    let theirs = format!(" {} {} {} C-{}: {rest}", words[2], words[3], words[4], SocketId::FIRST.pointer());
    assert_eq!(our_rest, theirs);
}

fn columns_agree(admin: &mut Session) {
    let mut compared = 0;
    for show in Show::ALL {
        let answer = admin.ask(&format!("SHOW {}", show.name()));
        // Newer than the installed release.
        if answer.error.is_some() {
            continue;
        }
        let renamed: HashMap<_, _> =
            RENAMED.iter().filter(|(of, ..)| *of == show).map(|&(_, old, new)| (old, new)).collect();
        let theirs: Vec<_> = answer
            .columns
            .iter()
            .map(|(name, oid)| (renamed.get(name.as_str()).copied().unwrap_or(name.as_str()), *oid))
            .collect();
        let ours: Vec<_> =
            show.columns().iter().map(|column| (column.name, column.column_type.oid())).collect();
        assert_subsequence(&theirs, &ours, show.name());
        assert_eq!(answer.tag.as_deref(), Some("SHOW"));
        compared += 1;
    }
    // 1.18 has all but PEERS, PEER_POOLS, STATE and our own.
    assert!(compared >= 19, "{compared} SHOW commands were compared");
}

fn row_names_agree(admin: &mut Session) {
    let mut names = |query: &str| -> Vec<String> {
        admin.ask(query).rows.into_iter().map(|row| row[0].clone().unwrap()).collect()
    };
    let ours: Vec<_> = Lists::default().items().iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_subsequence(&names("SHOW LISTS"), &ours, "rows of SHOW LISTS");
    let ours: Vec<_> = ["total_", "avg_"]
        .iter()
        .flat_map(|prefix| TOTALS_NAMES.map(|name| format!("{prefix}{name}")))
        .collect();
    assert_subsequence(&names("SHOW TOTALS"), &ours, "rows of SHOW TOTALS");
}

fn refusals_agree(session: &mut Session, access: Access) {
    for query in [
        "SHOW",
        "SHOW nothing",
        "SHOW STATS;;",
        "SHOW STATS; SHOW POOLS",
        "SHOW \"\"",
        "select 1+1",
        "-- ping",
        "BEGIN",
        "SHOW FDS POOLS",
        "RELOAD db",
        "SUSPEND db",
        "SHUTDOWN now",
        "DISABLE",
        "ENABLE",
        "PAUSE my-db",
        "SET",
        "SET x = y z",
        "SET x = 0.5",
        "SET 'x' = y",
        "SET \"\" = y",
        "averylongcommandword",
    ] {
        let error = parse(query.as_bytes(), access).expect_err(query);
        assert_eq!(session.ask(query).error, Some(error.to_string()), "{query} as {access:?}");
    }
    if access == Access::Stats {
        for query in ["SHOW FDS", "RELOAD", "PAUSE", "KILL test", "SET pool_mode = session", "SHUTDOWN"] {
            let error = parse(query.as_bytes(), access).expect_err(query);
            assert_eq!(session.ask(query).error, Some(error.to_string()), "{query}");
        }
    }
}

/// Commands that work on both answer with the same tag.
fn commands_agree(admin: &mut Session) {
    for query in [
        "\"show\"\n\"stats\" ;",
        "select version",
        "SHOW timezone",
        "SET timezone to 'x'",
        "SET pool_mode = 'transaction';",
        "set default_pool_size=7",
        "RELOAD",
        "DISABLE test",
        "ENABLE test",
        "PAUSE test",
        "RESUME \"test\"",
        "RECONNECT",
        "WAIT_CLOSE test",
        "KILL test",
    ] {
        let command = parse(query.as_bytes(), Access::Admin).unwrap();
        assert_eq!(admin.ask(query).tag, command.tag(), "{query}");
    }
}
