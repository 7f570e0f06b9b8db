// SPDX-License-Identifier: Apache-2.0
//! `underpass replay` as a user types it: other names, a dry run, force, and its end by signals. The traces are made by hand.

mod common;

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::time::Instant;

use common::{LIMIT, binary, ended, output, wait};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use underpass_testkit::{Batch, Client, Postgres};
use underpass_trace::{
    ByteTotals, EndReason, Frontend, Meta, Options, Outcome, Ready, Record, Response, SessionEnd, SessionId,
    SessionStart, Source, TransactionStatus, Transport, Writer,
};

/// A trace of one session of user `joe` in database `shop`: texts and their tags, each answered 1 ms after it was sent.
fn trace(directory: PathBuf, system_identifier: &str, units: &[(&str, &str)]) -> PathBuf {
    let session = SessionId(1);
    let mut meta = Meta::default();
    meta.server.system_identifier = Some(system_identifier.into());
    let mut writer = Writer::create(&directory, &meta, Options::default()).expect("a trace");
    let start = SessionStart {
        session,
        time_ns: 1,
        ready_ns: Some(2),
        source: Source::Synthetic,
        transport: Transport::Tcp,
        peer: None,
        backend_pid: None,
        midstream: false,
        protocol_version: 3 << 16,
        database: Some(b"shop"[..].into()),
        user: Some(b"joe"[..].into()),
        application_name: None,
        parameters: Vec::new(),
        frontend_offset: 0,
        backend_offset: 0,
    };
    let mut records = vec![Record::SessionStart(start)];
    let (mut request, mut time_ns) = (0, 2);
    for (text, tag) in units {
        let message = Batch::new().query(text).as_bytes().to_vec();
        let len = message.len() as u64;
        records.push(Record::Frontend(Frontend::new(session, time_ns, request, message)));
        time_ns += 1_000_000;
        let outcome = Outcome::Complete { tag: tag.as_bytes().to_vec().into() };
        let (first_ns, last_ns, rows) = (time_ns, time_ns, u64::from(tag.starts_with("SELECT")));
        records.push(Record::Response(Response {
            session,
            request,
            offset: 0,
            len: 1,
            first_ns,
            last_ns,
            rows,
            outcome,
        }));
        let status = TransactionStatus::Idle;
        records.push(Record::Ready(Ready { session, time_ns, request, offset: 0, status }));
        request += len;
    }
    let (frontend, backend) = (ByteTotals::default(), ByteTotals::default());
    records.push(Record::SessionEnd(SessionEnd {
        session,
        time_ns,
        reason: EndReason::Terminate,
        frontend,
        backend,
    }));
    records.iter().for_each(|record| writer.write(record).expect("a record"));
    writer.finish().expect("the end");
    directory
}

fn dsn(server: &Postgres) -> String {
    format!("host=127.0.0.1 port={} user=postgres dbname=postgres sslmode=disable", server.port())
}

/// Exit status and both outputs.
fn replay(server: &Postgres, trace: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(binary());
    command.args(["replay", "--to", &dsn(server)]).args(arguments).arg(trace);
    let Output { status, stdout, stderr } = output(&mut command);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (status.code(), text(&stdout), text(&stderr))
}

#[test]
fn names_are_mapped_a_dry_run_sends_nothing_and_force_plays_on_the_captured_server() {
    let server = Postgres::start().expect("a server");
    server.sql("create role jane login").expect("a user");
    server.sql("create database copy").expect("a database");
    let setup = "create table t (who text, place text); grant all on t to jane";
    let mut admin = Client::connect(&server.options("postgres", "copy")).expect("connect");
    admin.query(setup).expect("an answer").ok().expect("a table");
    let rows = |admin: &mut Client| {
        admin.query("select who, place from t").expect("an answer").ok().expect("rows").rows()
    };
    let parent = tempfile::tempdir().expect("a directory");
    let units = [
        ("insert into t values (current_user, current_database())", "INSERT 0 1"),
        ("select who from t where who = 'nobody'", "SELECT 0"),
    ];
    let foreign = trace(parent.path().join("foreign"), "1", &units);
    let identifier = server.sql_value("select system_identifier from pg_control_system()").expect("a number");
    let own = trace(parent.path().join("own"), &identifier, &units);
    let names = ["--map-user", "joe=jane", "--map-database", "shop=copy"];
    let with = |arguments: &[&'static str]| [&names[..], arguments].concat();

    // What does not fit is said, and nothing played.
    for arguments in [&["--dry-run"][..], &[]] {
        let (code, out, err) = replay(&server, &foreign, arguments);
        let said = if arguments.is_empty() { &err } else { &out };
        assert_eq!(code, Some(1), "{out}{err}");
        assert!(said.contains("no user joe") && said.contains("no database shop"), "{out}{err}");
    }
    let (code, out, err) = replay(&server, &foreign, &with(&["--dry-run"]));
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("Would play 2 units in 1 sessions (1 at once at most)"), "{out}");
    assert!(
        out.contains("The target parsed 2 distinct statements.") && !out.contains("does not fit"),
        "{out}"
    );
    assert!(rows(&mut admin).is_empty(), "a dry run sends nothing");

    let arguments = ["--pace", "think", "--speed", "1000", "--require-equal", "--json", "-"];
    let (code, out, err) = replay(&server, &foreign, &with(&arguments));
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("\"pace\": \"think\"") && out.contains("\"speed\": 1000.0"), "{out}");
    let row = vec![Some("jane".to_owned()), Some("copy".to_owned())];
    assert_eq!(rows(&mut admin), std::slice::from_ref(&row));

    // The captured server itself: also by a dry run that is told to force it.
    for arguments in [&["--dry-run"][..], &["--dry-run", "--force"], &[]] {
        let (code, out, err) = replay(&server, &own, &with(arguments));
        let said = if arguments.is_empty() { &err } else { &out };
        assert_eq!(code, Some(1), "{out}{err}");
        assert!(said.contains("is the captured server itself"), "{out}{err}");
    }
    assert_eq!(rows(&mut admin).len(), 1);
    let (code, out, err) = replay(&server, &own, &with(&["--force", "--require-equal"]));
    assert_eq!(code, Some(0), "{out}{err}");
    assert!(out.contains("forced: ") && out.contains("is the captured server itself"), "{out}");
    assert_eq!(rows(&mut admin), [row.clone(), row]);
}

#[test]
fn arguments_that_mean_nothing_are_refused() {
    for (name, values, why) in [
        ("--speed", &["0", "-1", "fast", "1001", "nan"][..], "a number"),
        ("--map-user", &["joe", "=jane", "joe="], "OLD=NEW"),
        ("--from", &["-1", "soon"], "seconds"),
        ("--pace", &["slow"], "timed"),
    ] {
        for value in values {
            let mut command = Command::new(binary());
            command.args(["replay", "nothing", "--to", "postgres://a@127.0.0.1:1/b"]);
            let said = output(command.arg(format!("{name}={value}")));
            let text = String::from_utf8_lossy(&said.stderr).into_owned();
            assert_eq!(said.status.code(), Some(2), "{name}={value}: {text}");
            assert!(text.contains(why) || text.contains("not a number"), "{name}={value}: {text}");
        }
    }
}

/// A target that holds up the second of three statements, until it is let go.
struct Held {
    server: Postgres,
    holder: Client,
    trace: PathBuf,
    _parent: tempfile::TempDir,
}

impl Held {
    fn new() -> Self {
        let server = Postgres::start().expect("a server");
        server.sql("create role joe login").expect("a user");
        server.sql("create database shop").expect("a database");
        let mut holder = Client::connect(&server.options("postgres", "shop")).expect("connect");
        holder.query("select pg_advisory_lock(7)").expect("an answer").ok().expect("the lock");
        let parent = tempfile::tempdir().expect("a directory");
        let units = [
            ("select 1", "SELECT 1"),
            ("select pg_advisory_xact_lock(7)", "SELECT 1"),
            ("select 3", "SELECT 1"),
        ];
        let trace = trace(parent.path().join("trace"), "1", &units);
        Self { server, holder, trace, _parent: parent }
    }

    fn wait(&self) {
        let waiting = "select count(*) from pg_stat_activity where wait_event = 'advisory'";
        wait("the statement", || (self.server.sql_value(waiting).expect("statistics") == "1").then_some(()));
    }

    fn let_go(&mut self) {
        self.holder.query("select pg_advisory_unlock(7)").expect("an answer").ok().expect("no lock");
    }

    fn start(&self, arguments: &[&str]) -> (Child, BufReader<ChildStderr>) {
        let mut command = Command::new(binary());
        command.args(["replay", "--pace", "asap", "--to", &dsn(&self.server)]).args(arguments);
        command.arg(&self.trace).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("underpass");
        let said = BufReader::new(child.stderr.take().expect("stderr"));
        self.wait();
        (child, said)
    }
}

fn ask_to_stop(child: &Child, said: &mut impl std::io::BufRead, signal: Signal) {
    kill(Pid::from_raw(child.id() as i32), signal).expect("kill");
    let mut line = String::new();
    said.read_line(&mut line).expect("a line");
    assert!(line.contains("finishing what is under way"), "{line}");
}

#[test]
fn the_first_signal_waits_for_what_is_under_way_and_reports() {
    let mut held = Held::new();
    // With the demand for equality it fails, because something was not compared.
    for (signal, arguments, expected) in
        [(Signal::SIGINT, &[][..], 0), (Signal::SIGTERM, &["--require-equal"], 3)]
    {
        let (mut child, mut said) = held.start(arguments);
        ask_to_stop(&child, &mut said, signal);
        // Who waits is not over.
        assert!(child.try_wait().expect("a process").is_none());
        held.let_go();
        let (code, text) = ended(child);
        assert_eq!(code, Some(expected), "{text}");
        assert!(text.starts_with("Played 2 of 3 units in 1 sessions"), "{text}");
        for sentence in ["Stopped before the end.", "2 equal", "1 units: the replay was stopped"] {
            assert!(text.contains(sentence), "{sentence}: {text}");
        }
        held.holder.query("select pg_advisory_lock(7)").expect("an answer").ok().expect("the lock");
    }
}

#[test]
fn the_second_signal_stops_at_once() {
    let held = Held::new();
    let (child, mut said) = held.start(&[]);
    ask_to_stop(&child, &mut said, Signal::SIGINT);
    ask_to_stop(&child, &mut said, Signal::SIGTERM);
    let (code, text) = ended(child);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.starts_with("Played 1 of 3 units") && text.contains("Stopped before the end."), "{text}");
    // Nor does the statement go on there.
    let waiting = "select count(*) from pg_stat_activity where wait_event = 'advisory'";
    wait("the end of the statement", || {
        (held.server.sql_value(waiting).expect("statistics") == "0").then_some(())
    });
}

/// On a terminal, which `script` makes.
#[test]
fn a_terminal_shows_how_far_the_replay_is() {
    let mut held = Held::new();
    let replay = format!(
        "stty cols 200; exec {} replay --pace asap --to '{}' {}",
        binary().display(),
        dsn(&held.server),
        held.trace.display()
    );
    let mut command = Command::new("script");
    command.args(["-q", "-e", "-f", "-c", &replay, "/dev/null"]).env("TERM", "xterm");
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("script");
    held.wait();
    // One statement is answered, one is being executed. Each state of the bar begins with a carriage return.
    let mut out = BufReader::new(child.stdout.take().expect("stdout"));
    let mut shown = Vec::new();
    let deadline = Instant::now() + LIMIT;
    loop {
        assert!(Instant::now() < deadline, "{}", String::from_utf8_lossy(&shown));
        let mut part = Vec::new();
        assert!(out.read_until(b'\r', &mut part).expect("a bar") > 0, "{}", String::from_utf8_lossy(&shown));
        let text = String::from_utf8_lossy(&part).into_owned();
        shown.extend_from_slice(&part);
        // Its parts are set one after the other, and may be shown between.
        if text.contains("1/3") && text.contains("1 sessions, 0 errors") {
            assert!(text.contains(&format!("127.0.0.1:{}", held.server.port())), "{text}");
            break;
        }
    }
    held.let_go();
    let mut rest = String::new();
    out.read_to_string(&mut rest).expect("a report");
    assert!(rest.contains("Played 3 of 3 units"), "{rest}");
    assert_eq!(child.wait().expect("an end").code(), Some(0), "{rest}");
}
