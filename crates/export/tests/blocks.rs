// SPDX-License-Identifier: Apache-2.0
//! Transaction blocks in SQL scripts: what was rolled back is not committed, whatever is left out.

use std::borrow::Cow;
use std::fs;

use underpass_export::sql;
use underpass_trace::TransactionStatus::{Failed, Idle, Transaction};
use underpass_trace::*;
use underpass_wire::frontend::build;

struct Recorder {
    writer: Writer,
    folder: tempfile::TempDir,
    offset: u64,
    time_ns: u64,
}

impl Recorder {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let writer =
            Writer::create(&folder.path().join("trace"), &Meta::default(), Options::default()).unwrap();
        let mut r = Self { writer, folder, offset: 0, time_ns: 1_000 };
        r.write(Record::SessionStart(SessionStart {
            session: SessionId(1),
            time_ns: 1_000,
            ready_ns: Some(1_000),
            source: Source::Synthetic,
            transport: Transport::Tcp,
            peer: None,
            backend_pid: None,
            midstream: false,
            protocol_version: 3 << 16,
            database: None,
            user: None,
            application_name: None,
            parameters: vec![],
            frontend_offset: 0,
            backend_offset: 0,
        }));
        r
    }

    fn write(&mut self, record: Record<'_>) {
        self.writer.write(&record).unwrap();
    }

    fn send(&mut self, build: impl FnOnce(&mut Vec<u8>)) -> u64 {
        let mut message = Vec::new();
        build(&mut message);
        let request = self.offset;
        self.offset += message.len() as u64;
        self.time_ns += 1_000;
        self.write(Record::Frontend(Frontend::new(SessionId(1), self.time_ns, request, message)));
        request
    }

    fn answer(&mut self, request: u64, outcome: Outcome<'_>) {
        let (session, now) = (SessionId(1), self.time_ns);
        self.write(Record::Response(Response {
            session,
            request,
            offset: 0,
            len: 9,
            first_ns: now,
            last_ns: now,
            rows: 0,
            outcome,
        }));
    }

    fn ready(&mut self, request: u64, status: TransactionStatus) {
        let (session, time_ns) = (SessionId(1), self.time_ns);
        self.write(Record::Ready(Ready { session, time_ns, request, offset: 0, status }));
    }

    /// A Query and its answer: a tag, or an SQLSTATE.
    fn query(&mut self, text: impl AsRef<[u8]>, answer: &str, status: TransactionStatus) {
        let request = self.send(|out| build::query(out, text.as_ref()));
        self.answer(request, outcome(answer));
        self.ready(request, status);
    }

    /// Parse and what follows, the first of which fails.
    fn parse_fails(&mut self, status: TransactionStatus) {
        let parse = self.send(|out| build::parse(out, b"", b"select gone", []));
        self.send(|out| build::bind(out, b"", b"", [], [], []));
        self.send(|out| build::execute(out, b"", 0));
        let sync = self.send(build::sync);
        self.answer(parse, outcome("42703"));
        self.ready(sync, status);
    }

    /// What psql would run: the script's lines without comments.
    fn script(self) -> String {
        let Self { writer, folder, .. } = self;
        writer.finish().unwrap();
        let mut reader = Reader::open(&folder.path().join("trace")).unwrap();
        sql::export(&mut reader, &folder.path().join("sql")).unwrap();
        let script = fs::read_to_string(folder.path().join("sql/session-000001.sql")).unwrap();
        let code = |line: &str| line.split(" -- ").next().unwrap().trim_end_matches(';').to_owned();
        let lines = script.lines().filter(|line| !line.starts_with("--") && *line != ";");
        lines.map(code).collect::<Vec<_>>().join("; ")
    }
}

fn outcome(answer: &str) -> Outcome<'_> {
    if answer.len() == 5 && answer.starts_with(|c: char| c.is_ascii_digit()) {
        let sqlstate = answer.as_bytes().try_into().unwrap();
        return Outcome::Error(ErrorOutcome { sqlstate, fatal: false, message: b"no"[..].into() });
    }
    Outcome::Complete { tag: Cow::Borrowed(answer.as_bytes()) }
}

/// What Parse refused is left out, but fails the block.
#[test]
fn a_block_that_a_parse_failed_is_not_committed() {
    let mut r = Recorder::new();
    r.query("begin", "BEGIN", Transaction);
    r.query("insert into t values (1)", "INSERT 0 1", Transaction);
    r.parse_fails(Failed);
    r.parse_fails(Failed);
    r.query("/* app */ commit", "ROLLBACK", Idle);
    r.query("insert into t values (2)", "INSERT 0 1", Idle);
    // Outside of a block, it fails nothing.
    r.parse_fails(Idle);
    let script = r.script();
    let wanted = "begin; insert into t values (1); SELECT 1 / 0; ROLLBACK; insert into t values (2)";
    assert_eq!(script, wanted);
}

/// The server's word is known though that it failed is not: bytes were lost.
#[test]
fn a_commit_that_rolled_back_is_a_rollback() {
    let mut r = Recorder::new();
    for (text, tag, status) in [
        ("begin", "BEGIN", Transaction),
        ("insert into t values (1)", "INSERT 0 1", Transaction),
        ("commit and chain", "ROLLBACK", Transaction),
        ("insert into t values (2)", "INSERT 0 1", Transaction),
        ("prepare transaction 'x'", "ROLLBACK", Idle),
        ("begin", "BEGIN", Transaction),
        ("rollback", "ROLLBACK", Idle),
        ("begin", "BEGIN", Transaction),
        ("end", "COMMIT", Idle),
    ] {
        r.query(text, tag, status);
    }
    let wanted = "begin; insert into t values (1); ROLLBACK AND CHAIN; insert into t values (2); ROLLBACK; \
                  begin; rollback; begin; end";
    assert_eq!(r.script(), wanted);
}

#[test]
fn what_is_left_out_begins_and_ends_its_block_nevertheless() {
    let mut r = Recorder::new();
    // Without it, the DELETE would be a transaction of its own.
    r.query("begin; copy t from stdin", "COPY 7", Transaction);
    r.query("delete from u", "DELETE 9", Transaction);
    r.query("rollback", "ROLLBACK", Idle);
    // And what follows would be a part of this one.
    r.query("begin", "BEGIN", Transaction);
    r.query("update t set a = 1", "UPDATE 1", Transaction);
    r.query(b"insert into t values ('\xff'); commit", "COMMIT", Idle);
    r.query("select 1", "SELECT 1", Idle);
    r.query("begin", "BEGIN", Transaction);
    r.query(b"insert into t values ('\xff'); rollback; begin", "BEGIN", Transaction);
    r.query(b"insert into t values ('\xff'); commit", "COMMIT", Idle);
    // One that fails in the text that began it.
    r.query(b"begin; insert into t values ('\xff')", "22021", Failed);
    r.query("commit", "ROLLBACK", Idle);
    // A whole block leaves nothing behind.
    r.query(b"begin; insert into t values ('\xff'); commit", "COMMIT", Idle);
    let wanted = [
        "BEGIN; delete from u; rollback",
        "begin; update t set a = 1; COMMIT; select 1",
        "begin; ROLLBACK; BEGIN; COMMIT",
        "BEGIN; SELECT 1 / 0; ROLLBACK",
    ];
    assert_eq!(r.script(), wanted.join("; "));
}

/// A block whose savepoint is not in the script goes on as one that has failed.
#[test]
fn a_savepoint_that_is_not_known_rolls_back_the_whole_block() {
    let mut r = Recorder::new();
    r.query("begin", "BEGIN", Transaction);
    r.query("savepoint s", "SAVEPOINT", Transaction);
    r.query("select 1 / 0", "22012", Failed);
    r.query(b"rollback to s; select '\xff'", "SELECT 1", Transaction);
    r.query("insert into t values (1)", "INSERT 0 1", Transaction);
    r.query("commit", "COMMIT", Idle);
    let wanted = "begin; savepoint s; select 1 / 0; insert into t values (1); commit";
    assert_eq!(r.script(), wanted);
}

/// Texts of several statements fail in their middle, and psql's server does the same.
#[test]
fn nothing_stands_beside_what_is_written() {
    let mut r = Recorder::new();
    r.query("begin; select 1 / 0; commit", "22012", Failed);
    r.query("rollback; begin", "BEGIN", Transaction);
    r.query("commit", "23503", Idle);
    r.query("start transaction; select 1; commit; select 2", "SELECT 1", Idle);
    let execute = |r: &mut Recorder, text: &str, tag: &str| {
        r.send(|out| build::parse(out, b"", text.as_bytes(), []));
        r.send(|out| build::bind(out, b"", b"", [], [], []));
        let request = r.send(|out| build::execute(out, b"", 0));
        r.answer(request, outcome(tag));
    };
    execute(&mut r, "begin", "BEGIN");
    execute(&mut r, "insert into t values (1)", "INSERT 0 1");
    execute(&mut r, "commit", "COMMIT");
    let sync = r.send(build::sync);
    r.ready(sync, Idle);
    let wanted = "begin\\; select 1 / 0\\; commit; rollback\\; begin; commit; \
                  start transaction\\; select 1\\; commit\\; select 2; begin; insert into t values (1); commit";
    assert_eq!(r.script(), wanted);
}
