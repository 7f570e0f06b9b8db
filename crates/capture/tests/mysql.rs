// SPDX-License-Identifier: Apache-2.0
//! A real MariaDB, or the MySQL 5.6 that `UNDERPASS_MYSQL_HOME` names (tests/versions/run.sh fetches one): what its clients sent is what
//! the trace holds. Skipped where it is not installed.

mod common;

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::{Capture, Setup, Trace, assert_tiles, eventually, lacking, skipped};
use underpass_capture::{Probes, Server, SourceKind};
use underpass_mysql::capability::{self, Capabilities};
use underpass_mysql::exchange::{End, Exchange, Session, Step};
use underpass_mysql::handshake::{Greeting, Login};
use underpass_mysql::packet::{self, put_message};
use underpass_testkit::{Authority, Mariadb};
use underpass_trace::statements::{Event, Statements};
use underpass_trace::{
    Direction, EndReason, Level, Loss, LossReason, Protocol, Record, SessionId, Source, TransactionStatus,
    Transport,
};

fn missing() -> bool {
    if Mariadb::is_missing() {
        eprintln!("skipped: mariadbd is not installed");
        return true;
    }
    skipped()
}

/// The same, and of tests of TLS: that of MySQL 5.6 is too old for today's clients.
fn missing_with_tls() -> bool {
    if Mariadb::is_mysql() {
        eprintln!("skipped: this MySQL has no TLS");
        return true;
    }
    missing()
}

/// 30,000 rows.
const MANY_ROWS: &str =
    "select 1, 'row' from information_schema.collations a, information_schema.collations b limit 30000";

fn capture(mariadb: &Mariadb, level: Level) -> Capture {
    capture_by(mariadb, Setup { level, probes: Probes::Auto, ..Setup::default() })
}

fn capture_by(mariadb: &Mariadb, setup: Setup) -> Capture {
    let server = Server::of_process(mariadb.pid()).expect("a mariadbd");
    let product = if Mariadb::is_mysql() { "MySQL" } else { "MariaDB" };
    assert_eq!((server.protocol, server.product()), (Protocol::Mysql, product));
    // Of MySQL 5.6 no file tells it.
    assert!(Mariadb::is_mysql() || server.version.starts_with("1"), "{server:?}");
    // All packets of a session are in one ring, and some statements here have 16 MiB.
    let setup = Setup { ring_bytes: 256 << 20, ..setup };
    Capture::of(server, mariadb.port(), &setup)
}

/// Runs a script in the server's own shell, which goes on after errors.
fn shell(mariadb: &Mariadb, script: &str, arguments: &[&str]) {
    run(mariadb.shell().expect("the shell"), script, arguments);
}

fn run(mut command: Command, script: &str, arguments: &[&str]) {
    command.args(["--force", "--local-infile=1"]).args(arguments).stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the shell");
    child.stdin.take().expect("its input").write_all(script.as_bytes()).expect("a script");
    child.wait().expect("the shell");
}

/// Letters in which no part is like another.
fn noise(len: usize) -> String {
    let mut state = 1u32;
    let mut letter = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        char::from(b'a' + (state >> 24) as u8 % 26)
    };
    (0..len).map(|_| letter()).collect()
}

/// Text, parameters, and how it ended.
type Told = (String, Vec<Option<String>>, String, u64);

fn told(trace: &Trace, session: SessionId) -> Vec<Told> {
    let mut statements = Statements::new(Protocol::Mysql);
    let mut events = Vec::new();
    let mut found = Vec::new();
    for record in &trace.records {
        statements.push(record, &mut events);
        for event in &events {
            let Event::Statement(statement) = event else { continue };
            if statement.session != session {
                continue;
            }
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let values = statement.parameters.values.iter().map(|value| value.as_deref().map(text)).collect();
            let outcome = match &statement.outcome {
                underpass_trace::Outcome::Complete { tag } => text(tag),
                underpass_trace::Outcome::Error(error) => text(&error.sqlstate),
                other => format!("{other:?}"),
            };
            found.push((statement.text.as_deref().map_or("?".into(), text), values, outcome, statement.rows));
        }
    }
    found
}

fn only_session(trace: &Trace) -> SessionId {
    let starts = trace.starts();
    assert_eq!(starts.len(), 1, "{starts:?}");
    starts[0].session
}

/// What is sent to the server is not in the trace as such.
fn assert_no_password(trace: &Trace) {
    let has = |bytes: &[u8], what: &[u8]| bytes.windows(what.len()).any(|window| window == what);
    let mut covered = 0;
    for record in &trace.records {
        let bytes = match record {
            Record::Frontend(r) => &r.message[..],
            Record::Backend(r) => &r.message,
            Record::PreparedFill(r) => &r.query,
            Record::Response(r) => match &r.outcome {
                underpass_trace::Outcome::Error(error) => &error.message,
                _ => continue,
            },
            _ => continue,
        };
        assert!(!has(bytes, b"S3cret"), "a password is in {record:?}");
        covered += usize::from(has(bytes, b"********"));
    }
    assert!(covered > 0, "no statement had a password");
}

#[test]
fn the_shell_is_recorded_exactly() {
    if missing() {
        return;
    }
    let mariadb = Mariadb::start().expect("a server");
    let capture = capture(&mariadb, Level::Summary);
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("rows.csv");
    std::fs::write(&file, "7\tseven\n8\teight\n9\tnine\n").expect("a file");
    let mut script = String::from(
        "create table t (a int primary key, b longtext);\n\
         insert into t values (1, 'one'), (2, 'two'), (3, NULL);\n\
         begin;\nupdate t set b = 'x' where a > 1;\nselect * from t;\ncommit;\n\
         insert into t values (1, 'again');\nselect * from nowhere;\n\
         create user eve identified by 'S3cret-2';\nset password for eve = password('S3cret-3');\n\
         grant select on shop.t to eve identified by 'S3cret-4';\nalter user eve identified by 'S3cret-5';\n",
    );
    let _ = writeln!(script, "load data local infile '{}' into table t;", file.display());
    let long = "y".repeat(200_000);
    let _ = writeln!(script, "insert into t values (4, '{long}');");
    // More than a packet's 16 MiB, either way.
    let large = format!("select length('{}')", noise((16 << 20) + 5));
    let _ = writeln!(script, "{large};");
    let _ = writeln!(script, "select repeat('w', 17 * 1024 * 1024);\n{MANY_ROWS};");
    script += "delimiter //\nselect 1; select 2; insert into t values (5, 'five')//\ndelimiter ;\n";
    script += "use mysql;\n";
    shell(&mariadb, &script, &["--max-allowed-packet=64M"]);
    let trace = capture.end();
    trace.assert_lossless();
    assert_no_password(&trace);
    let session = only_session(&trace);
    let told = told(&trace, session);
    let outcome = |beginning: &str| -> (String, u64) {
        let found: Vec<_> = told.iter().filter(|(text, ..)| text.starts_with(beginning)).collect();
        assert_eq!(found.len(), 1, "{beginning}: {found:?}");
        (found[0].2.clone(), found[0].3)
    };
    for (beginning, tag, rows) in [
        ("create table", "OK 0", 0),
        ("insert into t values (1, 'one')", "OK 3", 0),
        ("update t", "OK 2", 0),
        ("select * from t", "ROWS 3", 3),
        ("insert into t values (1, 'again')", "23000", 0),
        ("select * from nowhere", "42S02", 0),
        ("create user eve identified by '********'", "OK 0", 0),
        ("set password for eve = password('********')", "OK 0", 0),
        ("grant select on shop.t to eve identified by '********'", "OK 0", 0),
        // MySQL 5.6 does not know it, and the trace hides it all the same.
        ("alter user eve identified by '********'", if Mariadb::is_mysql() { "42000" } else { "OK 0" }, 0),
        ("load data local infile", "OK 3", 0),
        ("insert into t values (4,", "OK 1", 0),
        ("select length(", "ROWS 1", 1),
        ("select repeat(", "ROWS 1", 1),
        (MANY_ROWS, "ROWS 30000", 30_000),
        // Three answers to one command.
        ("select 1; select 2; insert", "OK 1", 2),
    ] {
        assert_eq!(outcome(beginning), (tag.to_owned(), rows), "{beginning}");
    }
    for exact in [format!("insert into t values (4, '{long}')"), large] {
        assert!(told.iter().any(|(text, ..)| *text == exact), "a statement of {} bytes differs", exact.len());
    }
    let starts = trace.starts();
    let start = starts[0];
    assert_eq!((start.user.as_deref(), start.database.as_deref()), (Some(&b"ann"[..]), Some(&b"shop"[..])));
    assert!(start.backend_pid.is_some() && !start.midstream && start.ready_ns.is_some());
    let end = trace.ends()[0];
    assert!(end.frontend.audited.is_some() && end.backend.audited.is_some(), "{end:?}");
    let in_transaction = trace
        .records
        .iter()
        .filter(|r| matches!(r, Record::Ready(ready) if ready.status == TransactionStatus::Transaction));
    assert_eq!(in_transaction.count(), 3, "begin, update, select");
    let last = trace.records.iter().rev().find_map(|r| match r {
        Record::ParameterStatus(set) if *set.name == *b"database" => Some(set.value.to_vec()),
        _ => None,
    });
    assert_eq!(last.as_deref(), Some(&b"mysql"[..]));
}

/// A client of the binary protocol, as user `bob`, who has no password.
struct Binary {
    stream: TcpStream,
    session: Session,
    sent: Vec<u8>,
    /// What the server has said.
    said: Vec<u8>,
}

impl Binary {
    fn connect(mariadb: &Mariadb, capabilities: u64) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", mariadb.port())).expect("connect");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        let capabilities = Capabilities(capability::PROTOCOL_41 | capability::TRANSACTIONS | capabilities);
        let mut client =
            Self { stream, session: Session::new(capabilities), sent: Vec::new(), said: Vec::new() };
        let greeting = client.read();
        let offered = Greeting::decode(&greeting).expect("a greeting").capabilities;
        let capabilities = Capabilities(capabilities.0 & offered.0);
        client.session = Session::new(capabilities);
        let login = Login {
            capabilities,
            collation: 45,
            user: b"bob",
            database: Some(b"shop"),
            plugin: Some(b"mysql_native_password"),
            attributes: vec![(b"program_name", b"binary")],
        };
        let mut message = Vec::new();
        login.put(&mut message, 1, b"");
        client.stream.write_all(&message).expect("a login");
        let answer = client.read();
        assert_eq!(answer.first(), Some(&0), "{}", String::from_utf8_lossy(&answer));
        client
    }

    fn read(&mut self) -> Vec<u8> {
        let mut head = [0; packet::HEADER_BYTES];
        self.stream.read_exact(&mut head).expect("a packet");
        let mut payload = vec![0; packet::Header::parse(&head).expect("a header").len];
        self.stream.read_exact(&mut payload).expect("a packet");
        self.said.extend_from_slice(&head);
        self.said.extend_from_slice(&payload);
        payload
    }

    /// Sends a command and reads its answer; the number of a prepared statement.
    fn command(&mut self, payload: &[u8]) -> u32 {
        let mut message = Vec::new();
        put_message(&mut message, 0, payload);
        self.stream.write_all(&message).expect("a command");
        self.sent.extend_from_slice(&message);
        let mut exchange = Exchange::new(payload[0]);
        let mut number = 0;
        while !exchange.is_done() {
            let answer = self.read();
            let step = exchange.message(&answer, answer.len(), &mut self.session).expect("an answer");
            if let Step::End { end: End::Prepared(prepared), .. } = step {
                number = prepared.statement;
            }
        }
        number
    }

    fn work(&mut self) {
        let number = self.command(b"\x16select ?, ?, ?, ?").to_le_bytes();
        let with = |command: u8, rest: &[u8]| [&[command][..], &number, rest].concat();
        let types = b"\0\x01\0\0\0\0\x01\x08\0\xfd\0\x05\0\x0c\0";
        let values = b"\x2a\0\0\0\0\0\0\0\x03abc\0\0\0\0\0\0\xf8\x3f\x04\xe8\x07\x02\x1d";
        self.command(&with(0x17, &[&types[..], values].concat()));
        // The types stay; the third value is NULL.
        self.command(&with(0x17, b"\0\x01\0\0\0\x04\0\x2b\0\0\0\0\0\0\0\x01d\x04\xe8\x07\x03\x01"));
        // A value in parts, and then a cursor.
        self.command(&with(0x18, b"\x01\0long "));
        self.command(&with(0x18, b"\x01\0data"));
        let types = b"\x01\x01\0\0\0\x0c\x01\x08\0\xfc\0\x06\0\x06\0";
        self.command(&with(0x17, &[&types[..], b"\x2c\0\0\0\0\0\0\0"].concat()));
        self.command(&with(0x1c, b"\x0a\0\0\0"));
        self.command(&with(0x1a, b""));
        self.command(&with(0x19, b""));
        self.command(b"\x0e");
        self.command(b"\x16select nonsense from nowhere");
        self.command(b"\x01");
    }
}

fn expected() -> Vec<Told> {
    let text = "select ?, ?, ?, ?";
    let values = |values: [Option<&str>; 4]| values.map(|v| v.map(str::to_owned)).to_vec();
    [
        (values([Some("42"), Some("abc"), Some("1.5"), Some("2024-02-29")]), 1),
        (values([Some("43"), Some("d"), None, Some("2024-03-01")]), 1),
        (values([Some("44"), Some("long data"), None, None]), 0),
        (vec![], 1),
    ]
    .map(|(values, rows)| (text.to_owned(), values, format!("ROWS {rows}"), rows))
    .into_iter()
    // It could not be prepared.
    .chain([("select nonsense from nowhere".to_owned(), vec![], "42S02".to_owned(), 0)])
    .collect()
}

#[test]
fn prepared_statements_are_recorded_exactly() {
    if missing() {
        return;
    }
    let mariadb = Mariadb::start().expect("a server");
    for (capabilities, level) in [(0, Level::Summary), (capability::DEPRECATE_EOF, Level::Full)] {
        let capture = capture(&mariadb, level);
        let mut client = Binary::connect(&mariadb, capabilities);
        client.work();
        let sent = std::mem::take(&mut client.sent);
        drop(client);
        let trace = capture.end();
        trace.assert_lossless();
        let session = trace.session("binary");
        assert!(trace.sent(session) == sent, "the bytes differ");
        assert_eq!(told(&trace, session), expected());
        let errors = trace.outcomes(session).iter().filter(|(tag, _)| tag == "42S02").count();
        assert_eq!(errors, 1);
    }
}

/// COM_QUERY.
const ROWS: &[u8] = b"\x03select repeat('y', 1000) from information_schema.collations a, information_schema.collations b limit 300";

/// By packets and by the calls of `vio_read` and `vio_write`: what is there is true, and the rest is in the holes, exactly.
#[test]
fn losses_of_a_full_ring_are_the_holes_of_the_trace_exactly() {
    if missing() {
        return;
    }
    let mariadb = Mariadb::start().expect("a server");
    for (packets, probes) in [(true, Probes::Never), (false, Probes::Always)] {
        // However fast it reads otherwise.
        let stall = Duration::from_millis(700);
        let setup = Setup { level: Level::Full, packets, probes, ring_bytes: 1, stall };
        let server = Server::of_process(mariadb.pid()).expect("a mariadbd");
        let capture = Capture::of(server, mariadb.port(), &setup);
        let mut client = Binary::connect(&mariadb, 0);
        let greeted = client.said.len() as u64;
        // As long as it takes for a pause of the recorder to be among it.
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(2500) {
            client.command(b"\x03select 1");
            let large = format!("\x03select length('{}')", noise(300_000 + client.sent.len() % 1000));
            client.command(large.as_bytes());
            client.command(ROWS);
            thread::sleep(Duration::from_millis(10));
        }
        client.command(b"\x0e");
        let (sent, said) = (std::mem::take(&mut client.sent), std::mem::take(&mut client.said));
        drop(client);
        let trace = capture.end();
        assert!(!trace.summary.lossless());
        let session = trace.session("binary");
        let starts = trace.starts();
        let start = starts.iter().find(|start| start.session == session).expect("start");
        let login = start.frontend_offset;
        let mut parts = lacking(&trace, session, Direction::Frontend);
        for message in trace.frontends(session) {
            let at = (message.offset - login) as usize;
            assert!(sent[at..].starts_with(&message.message), "a message that was not sent at {at}");
            parts.push((message.offset, message.wire_len));
        }
        assert_tiles(parts, login, login + sent.len() as u64);
        let mut parts = lacking(&trace, session, Direction::Backend);
        for message in trace.backends(session).iter().filter(|message| message.offset >= greeted) {
            let at = message.offset as usize;
            assert!(said[at..].starts_with(&message.message), "a message that was not said at {at}");
            parts.push((message.offset, message.message.len() as u64));
        }
        assert_tiles(parts, greeted, said.len() as u64);
        for direction in [Direction::Frontend, Direction::Backend] {
            let of = trace.summary.accounts.iter().filter(|(_, way, _)| *way == direction);
            let (counted, again) = of.fold((0, 0), |(counted, again), (_, _, accounts)| {
                (counted + accounts.missing(), again + accounts.again.bytes)
            });
            let is_lost = |loss: &&&Loss| loss.direction == direction && loss.reason != LossReason::Resync;
            let told: u64 = trace.losses().iter().filter(is_lost).map(|loss| loss.len).sum();
            assert!(counted > 0, "{direction:?}: the ring was large enough");
            // Of what was sent again, one may have been recorded; by calls nothing is sent again.
            assert!(told <= counted && counted - told <= again, "{direction:?}: {told}, {counted}, {again}");
            assert!(packets || again == 0, "{again}");
        }
        for end in trace.ends() {
            assert!(end.frontend.add_up() && end.backend.add_up(), "{end:?}");
        }
        // Every command is answered in the trace or not at all, never by another's answer.
        for (tag, rows) in trace.outcomes(session) {
            let is_known = [("ROWS 1", 1), ("ROWS 300", 300), ("OK 0", 0)].contains(&(&tag, rows));
            assert!(tag == "Unknown" || is_known, "{tag} {rows}");
        }
    }
}

/// By packets and by calls. While the server logs statements, what it executes has values in the place of parameters: the text is what the client prepared.
#[test]
fn a_session_is_joined_and_its_older_statements_have_their_texts() {
    if missing() {
        return;
    }
    let mariadb = Mariadb::start().expect("a server");
    let long = format!("select ?, '{}'", noise(200_000));
    for (packets, logs, text) in [
        (true, 0, "select ?, 'short'"),
        (false, 0, &long),
        (true, 1, &long),
        (false, 1, "select ? as logged"),
    ] {
        mariadb.sql(&format!("set global general_log = {logs}")).expect("a setting");
        let mut client = Binary::connect(&mariadb, if packets { 0 } else { capability::DEPRECATE_EOF });
        let number = client.command(&[b"\x16", text.as_bytes()].concat()).to_le_bytes();
        let probes = if packets { Probes::Auto } else { Probes::Always };
        let setup = Setup { level: Level::Summary, packets, probes, ..Setup::default() };
        let capture = capture_by(&mariadb, setup);
        let execute = |rest: &[u8]| [&[0x17][..], &number, b"\0\x01\0\0\0\0", rest].concat();
        // By calls the session is joined at its second command.
        client.command(b"\x0e");
        // Only once the client tells the type. What the recorder does not know it is to be told, which takes it some time.
        client.command(&execute(b"\x01\x03\0\x01\0\0\0"));
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(3) {
            client.command(&execute(b"\0\x02\0\0\0"));
            thread::sleep(Duration::from_millis(50));
        }
        client.work();
        drop(client);
        let trace = capture.end();
        let session = only_session(&trace);
        assert!(trace.starts()[0].midstream);
        if packets {
            trace.assert_lossless();
        }
        let fills: Vec<_> = trace.fills().iter().map(|fill| fill.query.to_vec()).collect();
        assert!(fills == [text.as_bytes()], "{packets} {logs}: {} texts", fills.len());
        let told = told(&trace, session);
        let (of_before, rest) = told.split_at(told.len() - expected().len());
        assert_eq!(rest, expected());
        assert_eq!(of_before[0], ("?".to_owned(), vec![], "ROWS 1".to_owned(), 1));
        let known: Vec<_> = of_before.iter().skip_while(|(text, ..)| text == "?").collect();
        assert!(known.len() > 10, "{} of {}", known.len(), of_before.len());
        let value = vec![Some("2".to_owned())];
        for one in known {
            assert!(*one == (text.to_owned(), value.clone(), "ROWS 1".to_owned(), 1), "{packets} {logs}");
        }
    }
}

/// What the only session says and hears, without what differs between two runs: times, positions, the login.
fn normalised(trace: &Trace) -> Vec<String> {
    let session = only_session(trace);
    let of = |record: &Record<'_>| match record {
        Record::Frontend(r) if r.session == session => Some(format!("{:?}", r.message)),
        Record::Response(r) if r.session == session => Some(format!("{:?} {} {}", r.outcome, r.rows, r.len)),
        Record::Ready(r) if r.session == session => Some(format!("{:?}", r.status)),
        Record::ParameterStatus(r) if r.session == session => Some(format!("{:?} {:?}", r.name, r.value)),
        _ => None,
    };
    trace.records.iter().filter_map(of).collect()
}

#[test]
fn one_workload_by_packets_tls_and_sockets_is_one_trace() {
    if missing_with_tls() {
        return;
    }
    let authority = Authority::new("authority").expect("an authority");
    let mariadb = Mariadb::start_tls(&authority).expect("a server");
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(&file, "7\tseven\n8\teight\n").expect("rows");
    let mut script = format!(
        "drop table if exists t;\ncreate table t (a int primary key, b longtext);\nbegin;\ninsert into t values (1, 'one');\ncommit;\n\
         load data local infile '{}' into table t;\nselect * from nowhere;\nuse mysql;\nuse shop;\n\
         {MANY_ROWS};\n",
        file.path().display()
    );
    let _ = writeln!(script, "insert into t values (2, '{}');", "y".repeat(300_000));
    let arguments = |ssl| [ssl, "--max-allowed-packet=64M"];
    let recorded = |setup: Setup, command: Command, ssl, source, transport| {
        let capture = capture_by(&mariadb, setup);
        run(command, &script, &arguments(ssl));
        let trace = capture.end();
        trace.assert_lossless();
        let starts = trace.starts();
        assert_eq!(starts.len(), 1, "{starts:?}");
        let start = starts[0];
        assert_eq!((start.source, start.transport, start.midstream), (source, transport, false));
        assert_eq!(
            (start.user.as_deref(), start.database.as_deref()),
            (Some(&b"ann"[..]), Some(&b"shop"[..]))
        );
        assert!(start.backend_pid.is_some() && start.ready_ns.is_some(), "{start:?}");
        assert_eq!(start.peer.is_some(), transport != Transport::Unix);
        let end = trace.ends()[0];
        // What the probes count is no audit of theirs.
        let is_audited = source == Source::CgroupSkb;
        assert_eq!(
            [end.frontend.audited.is_some(), end.backend.audited.is_some()],
            [is_audited; 2],
            "{end:?}"
        );
        normalised(&trace)
    };
    let by_tcp = || mariadb.shell().expect("the shell");
    let by_socket = || mariadb.shell_by_socket().expect("the shell");
    let setup = |packets, probes| Setup { packets, probes, level: Level::Full, ..Setup::default() };
    let plain =
        recorded(setup(true, Probes::Never), by_tcp(), "--skip-ssl", Source::CgroupSkb, Transport::Tcp);
    assert!(plain.len() > 20, "{plain:?}");
    let probed = Source::Uprobe;
    let others = [
        recorded(setup(true, Probes::Always), by_tcp(), "--ssl", probed, Transport::Tls),
        recorded(setup(true, Probes::Always), by_socket(), "--skip-ssl", probed, Transport::Unix),
        recorded(setup(false, Probes::Auto), by_tcp(), "--ssl", probed, Transport::Tls),
        recorded(setup(false, Probes::Auto), by_tcp(), "--skip-ssl", probed, Transport::Unknown),
        recorded(setup(true, Probes::Always), by_tcp(), "--skip-ssl", Source::CgroupSkb, Transport::Tcp),
    ];
    for (n, other) in others.iter().enumerate() {
        for (at, (plain, other)) in plain.iter().zip(other).enumerate() {
            assert!(plain == other, "{n}, {at}: {:.200} is not {:.200}", other, plain);
        }
        assert_eq!(plain.len(), other.len(), "{n}");
    }
}

#[test]
fn a_session_over_a_unix_socket_is_recorded_as_one_over_tcp() {
    if missing() {
        return;
    }
    let mariadb = Mariadb::start().expect("a server");
    let script =
        format!("create table t (a int);\ninsert into t values (1), (2);\n{MANY_ROWS};\ndrop table t;\n");
    let recorded = |probes, command| {
        let setup = Setup { probes, ..Setup::default() };
        let capture = capture_by(&mariadb, setup);
        run(command, &script, &["--skip-ssl"]);
        let trace = capture.end();
        trace.assert_lossless();
        (trace.starts()[0].transport, normalised(&trace))
    };
    let (tcp, plain) = recorded(Probes::Never, mariadb.shell().expect("the shell"));
    let (unix, probed) = recorded(Probes::Always, mariadb.shell_by_socket().expect("the shell"));
    assert_eq!((tcp, unix), (Transport::Tcp, Transport::Unix));
    assert_eq!(plain, probed);
}

/// A replica that reads its source's log by TLS: what it is sent there are no commands of a client.
#[test]
fn connections_that_the_server_makes_itself_are_not_recorded() {
    if missing_with_tls() {
        return;
    }
    let authority = Authority::new("authority").expect("an authority");
    let source = Mariadb::start_tls(&authority).expect("a source");
    let replica = Mariadb::start().expect("a replica");
    let setup = Setup { probes: Probes::Always, ..Setup::default() };
    let capture = capture_by(&replica, setup);
    let script = format!(
        "set global server_id = 2;\nchange master to master_host = '127.0.0.1', master_port = {}, master_user = 'ann', \
         master_password = 'S3cret', master_ssl = 1, master_ssl_verify_server_cert = 0;\nstart slave;\n",
        source.port()
    );
    shell(&replica, &script, &["--skip-ssl"]);
    // The source has no log: its reader has logged in and asked for it.
    eventually("the source is asked", || {
        let mut shell = replica.shell().expect("the shell");
        let output = shell.args(["--skip-ssl", "-e", "show slave status\\G"]).output().expect("the shell");
        let status = String::from_utf8_lossy(&output.stdout).into_owned();
        status.contains("Last_IO_Errno: 1236")
    });
    let trace = capture.end();
    trace.assert_lossless();
    assert!(trace.starts().iter().all(|start| start.source == Source::CgroupSkb), "{:?}", trace.starts());
    let read = trace
        .summary
        .accounts
        .iter()
        .find(|(source, direction, _)| (*source, *direction) == (SourceKind::Calls, Direction::Frontend));
    assert!(read.is_none_or(|(_, _, accounts)| accounts.seen.bytes == 0), "{read:?}");
}

/// A shell that runs one statement after the other, as it is told.
struct Slow(Child);

impl Slow {
    fn start(mut command: Command, arguments: &[&str]) -> Self {
        command.args(["--force", "--unbuffered"]).args(arguments).stdin(Stdio::piped());
        Self(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the shell"))
    }

    fn say(&mut self, statement: &str) {
        let input = self.0.stdin.as_mut().expect("its input");
        writeln!(input, "{statement};").expect("it listens");
    }

    fn end(mut self) {
        drop(self.0.stdin.take());
        self.0.wait().expect("the shell");
    }
}

/// Has the shell write a mark into a table; returns when it is there.
fn say_until_done(mariadb: &Mariadb, shell: &mut Slow, mark: &str) {
    shell.say(&format!("insert into marks values ('{mark}')"));
    let asked = format!("select count(*) from shop.marks where a = '{mark}'");
    eventually("the shell works", || mariadb.sql(&asked).expect("an answer") == "1");
}

#[test]
fn probes_come_when_a_session_needs_them_and_join_those_under_way() {
    if missing_with_tls() {
        return;
    }
    let authority = Authority::new("authority").expect("an authority");
    let mariadb = Mariadb::start_tls(&authority).expect("a server");
    mariadb.sql("create table shop.marks (a varchar(50))").expect("a table");
    // Without clients by the socket there is no reason for probes.
    let capture = capture(&mariadb, Level::Summary);
    let mut tls = Slow::start(mariadb.shell().expect("the shell"), &["--ssl"]);
    // The tick that attaches them comes within this time.
    say_until_done(&mariadb, &mut tls, "first");
    thread::sleep(Duration::from_secs(2));
    // The server waited for this one when the probes came, so its beginning was not seen.
    say_until_done(&mariadb, &mut tls, "second");
    say_until_done(&mariadb, &mut tls, "by tls");
    let mut local = Slow::start(mariadb.shell_by_socket().expect("the shell"), &["--skip-ssl"]);
    say_until_done(&mariadb, &mut local, "by socket");
    tls.end();
    local.end();
    let trace = capture.end();
    // On a busy machine the probes may be there before the login by TLS is over: then its session is whole. The shell that looks for the
    // marks is short, by the socket, and may be under way when they come, and waited for.
    let is_cut = trace.starts().iter().any(|start| start.peer.is_some() && start.midstream);
    let mut lacks = trace.summary.shortcomings();
    lacks.retain(|what| {
        !what.starts_with("sessions by Unix sockets") && !what.contains("probed sessions under way")
    });
    let expected = is_cut.then_some("1 encrypted connections whose beginning, or all, was not seen");
    assert_eq!(lacks, Vec::from_iter(expected), "{:?}", trace.starts());
    assert!(
        trace.summary.notes.iter().any(|note| note.starts_with("probes attached")),
        "{:?}",
        trace.summary
    );
    for (transport, midstream, mark) in
        [(Transport::Tls, true, "by tls"), (Transport::Unix, false, "by socket")]
    {
        let text = format!("insert into marks values ('{mark}')");
        let start = trace
            .starts()
            .into_iter()
            .find(|start| told(&trace, start.session).iter().any(|(told, ..)| *told == text))
            .unwrap_or_else(|| panic!("{text} is not there: {:?}", trace.starts()));
        let is_so =
            start.transport == transport && (start.midstream == midstream || transport == Transport::Tls);
        assert!(is_so, "{start:?}");
        assert_eq!(told(&trace, start.session).last().expect("a statement").2, "OK 1");
    }
}

#[test]
fn sessions_of_a_killed_server_end() {
    if missing() {
        return;
    }
    let mut mariadb = Mariadb::start().expect("a server");
    mariadb.sql("create table shop.marks (a varchar(50))").expect("a table");
    let setup = Setup { probes: Probes::Always, ..Setup::default() };
    let capture = capture_by(&mariadb, setup);
    let mut local = Slow::start(mariadb.shell_by_socket().expect("the shell"), &["--skip-ssl"]);
    say_until_done(&mariadb, &mut local, "last");
    mariadb.kill().expect("killed");
    let trace = capture.end();
    local.end();
    let text = "insert into marks values ('last')";
    let said = |session| told(&trace, session).iter().any(|(told, ..)| told == text);
    let end = trace
        .ends()
        .into_iter()
        .find(|end| said(end.session))
        .unwrap_or_else(|| panic!("{:?} {:?}", trace.starts(), trace.ends()));
    assert_eq!(end.reason, EndReason::ServerClosed);
    assert!(end.frontend.add_up() && end.backend.add_up(), "{end:?}");
}

#[test]
fn sessions_with_compression_or_without_probes_are_named() {
    if missing_with_tls() {
        return;
    }
    let authority = Authority::new("authority").expect("an authority");
    let mariadb = Mariadb::start_tls(&authority).expect("a server");
    let capture = capture_by(&mariadb, Setup::default());
    shell(&mariadb, "select 1;", &["--skip-ssl", "--compress"]);
    shell(&mariadb, "select 2;", &["--skip-ssl"]);
    shell(&mariadb, "select 3;", &["--ssl"]);
    let trace = capture.end();
    assert_eq!(trace.summary.totals.encrypted, 1, "{:?}", trace.summary);
    assert_eq!(trace.starts().len(), 1, "{:?}", trace.starts());
    assert_eq!(trace.summary.totals.refused, 1);
    assert!(trace.summary.notes.iter().any(|note| note.contains("compressed")), "{:?}", trace.summary.notes);
    // TLS is left out on purpose (--probes never).
    assert_eq!(trace.summary.shortcomings(), ["1 connections that could not be recorded"]);
    assert!(!trace.losses().iter().any(|loss| loss.reason == LossReason::Protocol));
}
