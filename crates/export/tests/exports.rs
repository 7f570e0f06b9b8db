// SPDX-License-Identifier: Apache-2.0
//! A trace in every other format: what goes in comes out, and what cannot is told.

use std::borrow::Cow;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use arrow_array::RecordBatch;
use arrow_array::cast::AsArray as _;
use arrow_array::types::{Int64Type, TimestampMicrosecondType};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::Value;
use underpass_export::{Error, csv_log, json_lines, parquet as tables, sql};
use underpass_trace::*;
use underpass_wire::frontend::build;

/// 2026-01-01 00:59:59 UTC; the second session's statements are an hour later.
const START_NS: i64 = 1_767_229_199_000_000_000;
const HOUR_NS: u64 = 3_600_000_000_000;

struct Recorder {
    writer: Writer,
    offsets: [u64; 4],
}

impl Recorder {
    fn start(&mut self, session: u64, time_ns: u64) {
        self.write(Record::SessionStart(SessionStart {
            session: SessionId(session),
            time_ns,
            ready_ns: Some(time_ns),
            source: Source::Synthetic,
            transport: Transport::Tcp,
            peer: Some(([192, 0, 2, 7], 5).into()),
            backend_pid: Some(99),
            midstream: false,
            protocol_version: 3 << 16,
            database: Some(b"shop"[..].into()),
            user: Some(b"o'neil\n\\! touch x"[..].into()),
            application_name: None,
            parameters: vec![],
            frontend_offset: 0,
            backend_offset: 0,
        }));
    }

    fn write(&mut self, record: Record<'_>) {
        self.writer.write(&record).unwrap();
    }

    fn send(&mut self, session: u64, time_ns: u64, build: impl FnOnce(&mut Vec<u8>)) -> u64 {
        let mut message = Vec::new();
        build(&mut message);
        let offset = self.offsets[session as usize];
        self.offsets[session as usize] += message.len() as u64;
        self.write(Record::Frontend(Frontend::new(SessionId(session), time_ns, offset, message)));
        offset
    }

    fn answer(&mut self, session: u64, request: u64, last_ns: u64, rows: u64, outcome: Outcome<'_>) {
        let (session, first_ns) = (SessionId(session), last_ns - 500);
        self.write(Record::Response(Response {
            session,
            request,
            offset: 0,
            len: 33,
            first_ns,
            last_ns,
            rows,
            outcome,
        }));
    }

    fn ready(&mut self, session: u64, request: u64, time_ns: u64) {
        let status = TransactionStatus::Idle;
        self.write(Record::Ready(Ready { session: SessionId(session), time_ns, request, offset: 0, status }));
    }

    fn query(&mut self, session: u64, time_ns: u64, text: &str, outcome: Outcome<'_>) {
        let request = self.send(session, time_ns, |out| build::query(out, text.as_bytes()));
        self.answer(session, request, time_ns + 2_000, 1, outcome);
        self.ready(session, request, time_ns + 2_000);
    }

    fn execute(
        &mut self,
        session: u64,
        time_ns: u64,
        text: &str,
        types: &[u32],
        formats: &[u16],
        values: &[Option<&[u8]>],
    ) {
        self.send(session, time_ns, |out| build::parse(out, b"", text.as_bytes(), types.iter().copied()));
        self.send(session, time_ns, |out| {
            build::bind(out, b"", b"", formats.iter().copied(), values.iter().copied(), [])
        });
        let request = self.send(session, time_ns, |out| build::execute(out, b"", 0));
        let sync = self.send(session, time_ns, build::sync);
        self.answer(session, request, time_ns + 3_000, 2, complete("SELECT 2"));
        self.ready(session, sync, time_ns + 3_000);
    }
}

fn complete(tag: &str) -> Outcome<'_> {
    Outcome::Complete { tag: Cow::Borrowed(tag.as_bytes()) }
}

/// Two sessions, six statements, a loss.
fn record(directory: &Path) {
    let clock = Clock { monotonic_ns: 1_000, realtime_ns: START_NS };
    let meta = Meta { started: clock, host: "db1".into(), ..Meta::default() };
    let writer = Writer::create(directory, &meta, Options::default()).unwrap();
    let mut r = Recorder { writer, offsets: [0; 4] };
    r.start(1, 1_000);
    r.query(1, 1_000, "select 'it''s' -- comment", complete("SELECT 1"));
    let failed = ErrorOutcome { sqlstate: *b"42601", fatal: false, message: b"syntax error"[..].into() };
    r.query(1, 9_000, "selekt;", Outcome::Error(failed));
    r.start(2, HOUR_NS);
    let int = 42i32.to_be_bytes();
    r.execute(
        2,
        HOUR_NS + 1_000,
        "select $1, $2, $3",
        &[23],
        &[1, 0, 0],
        &[Some(&int), Some(b"a'b\\c"), None],
    );
    r.execute(2, HOUR_NS + 2_000, "select $1", &[], &[1], &[Some(&int)]);
    let copy = r.send(2, HOUR_NS + 5_000, |out| build::query(out, b"copy t from stdin"));
    r.send(2, HOUR_NS + 5_001, |out| build::copy_data(out, b"1\tone\n2\t"));
    r.send(2, HOUR_NS + 5_002, |out| build::copy_data(out, b"two\n"));
    r.send(2, HOUR_NS + 5_003, build::copy_done);
    r.answer(2, copy, HOUR_NS + 9_000, 0, complete("COPY 2"));
    r.ready(2, copy, HOUR_NS + 9_000);
    r.write(Record::Loss(Loss {
        session: Some(SessionId(2)),
        time_ns: HOUR_NS + 9_500,
        direction: Direction::Frontend,
        offset: 1_000,
        len: 77,
        reason: LossReason::RingFull,
    }));
    let totals = ByteTotals { seen: 100, recorded: 23, lost: 77, ..ByteTotals::default() };
    r.write(Record::SessionEnd(SessionEnd {
        session: SessionId(2),
        time_ns: HOUR_NS + 10_000,
        reason: EndReason::Terminate,
        frontend: totals,
        backend: ByteTotals::default(),
    }));
    r.writer.finish().unwrap();
}

struct Site {
    folder: tempfile::TempDir,
}

impl Site {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        record(&folder.path().join("trace"));
        Self { folder }
    }

    fn reader(&self) -> Reader {
        Reader::open(&self.folder.path().join("trace")).unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

fn table(path: &Path) -> RecordBatch {
    let reader =
        ParquetRecordBatchReaderBuilder::try_new(File::open(path).unwrap()).unwrap().build().unwrap();
    let batches: Vec<RecordBatch> = reader.map(Result::unwrap).collect();
    let [batch] = &batches[..] else { panic!("{} batches", batches.len()) };
    batch.clone()
}

fn texts(batch: &RecordBatch, column: &str) -> Vec<Option<String>> {
    let column = batch.column_by_name(column).unwrap().as_string::<i32>();
    column.iter().map(|text| text.map(str::to_owned)).collect()
}

fn numbers(batch: &RecordBatch, column: &str) -> Vec<Option<i64>> {
    batch.column_by_name(column).unwrap().as_primitive::<Int64Type>().iter().collect()
}

#[test]
fn parquet_has_the_statements_by_hour() {
    let site = Site::new();
    let summary = tables::export(&mut site.reader(), &site.path("tables")).unwrap();
    let wanted = tables::Summary { statements: 5, sessions: 2, losses: 1, files: 4, malformed: 0 };
    assert_eq!(summary, wanted);

    let first = table(&site.path("tables/statements/date=2026-01-01/hour=00/part-00000.parquet"));
    assert_eq!(texts(&first, "text"), [Some("select 'it''s' -- comment".into()), Some("selekt;".into())]);
    assert_eq!(texts(&first, "sqlstate"), [None, Some("42601".into())]);
    assert_eq!(texts(&first, "tag"), [Some("SELECT 1".into()), None]);
    assert_eq!(numbers(&first, "latency_ns"), [Some(2_000), Some(2_000)]);
    assert_eq!(numbers(&first, "first_byte_ns"), [Some(1_500), Some(1_500)]);
    let time = first.column_by_name("time").unwrap().as_primitive::<TimestampMicrosecondType>().value(0);
    assert_eq!(time, START_NS / 1_000);

    let second = table(&site.path("tables/statements/date=2026-01-01/hour=01/part-00000.parquet"));
    let parameters = second.column_by_name("parameters").unwrap().as_list::<i32>().clone();
    let row = |at: usize| -> Vec<Option<String>> {
        let values = parameters.value(at);
        values.as_string::<i32>().iter().map(|text| text.map(str::to_owned)).collect()
    };
    assert_eq!(row(0), [Some("42".into()), Some("a'b\\c".into()), None]);
    assert_eq!(row(1), [Some("\\x0000002a".into())], "a type that is not known is not guessed");
    assert_eq!(texts(&second, "database"), [const { Some("shop") }; 3].map(|name| name.map(str::to_owned)));

    let sessions = table(&site.path("tables/sessions/part-00000.parquet"));
    assert_eq!(numbers(&sessions, "session"), [Some(2), Some(1)]);
    assert_eq!(numbers(&sessions, "frontend_lost"), [Some(77), None]);
    assert_eq!(texts(&sessions, "end_reason"), [Some("terminate".into()), None]);
    let losses = table(&site.path("tables/losses/part-00000.parquet"));
    assert_eq!(
        (numbers(&losses, "len"), texts(&losses, "reason")),
        (vec![Some(77)], vec![Some("ring_full".into())])
    );
}

#[test]
fn json_lines_have_every_record() {
    let site = Site::new();
    let mut out = Vec::new();
    let summary = json_lines::export(&mut site.reader(), &mut out).unwrap();
    let lines: Vec<Value> =
        String::from_utf8(out).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len() as u64, summary.records + 1);
    assert_eq!((&lines[0]["kind"], &lines[0]["meta"]["host"]), (&"meta".into(), &"db1".into()));
    let of =
        |key: &str, value: &str| lines.iter().filter(|line| line[key] == value).cloned().collect::<Vec<_>>();
    let queries: Vec<Value> = of("type", "Query").into_iter().map(|line| line["query"].clone()).collect();
    assert_eq!(queries, ["select 'it''s' -- comment", "selekt;", "copy t from stdin"]);
    let bind = &of("type", "Bind")[0];
    assert_eq!(bind["params"], serde_json::json!(["\0\0\0*", "a'b\\c", null]));
    assert_eq!(of("kind", "frontend")[0]["time"], "2026-01-01T00:59:59Z");
    assert_eq!(of("kind", "loss")[0]["reason"], "ring_full");
    assert_eq!(of("outcome", "error")[0]["sqlstate"], "42601");
    assert_eq!(of("type", "CopyData").len(), 2);
}

/// Keeps what it is given, until a flush finds no room for it.
struct Full;

impl io::Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Err(io::ErrorKind::StorageFull.into())
    }
}

#[test]
fn json_lines_that_have_no_room_are_an_error() {
    let site = Site::new();
    let export = |out: &mut dyn io::Write| json_lines::export(&mut site.reader(), out);
    let is_full =
        |result| matches!(result, Err(Error::Write(error)) if error.kind() == io::ErrorKind::StorageFull);
    assert!(is_full(export(&mut Full)));
    // The buffer takes all of it.
    let device = File::options().write(true).open("/dev/full").unwrap();
    assert!(is_full(export(&mut io::BufWriter::with_capacity(1 << 20, device))));
}

#[test]
fn scripts_say_what_sql_can() {
    let site = Site::new();
    let summary = sql::export(&mut site.reader(), &site.path("sql")).unwrap();
    assert_eq!(summary, sql::Summary { files: 2, statements: 4, left_out: 1, malformed: 0 });
    let read = |number: u32| fs::read_to_string(site.path(&format!("sql/session-{number:06}.sql"))).unwrap();
    let first = read(1);
    assert!(first.starts_with("-- database shop, user o'neil \\! touch x, application unknown\n"), "{first}");
    assert!(first.contains("select 'it''s' -- comment\n;\n"), "{first}");
    assert!(first.contains("failed with 42601\nselekt\n;\n"), "{first}");
    let second = read(2);
    // A name that was not given up, because its transaction had failed, must not be the next statement's.
    let name =
        second.lines().find_map(|line| line.strip_prefix("DEALLOCATE ")).unwrap().trim_end_matches(';');
    let prepared = format!(
        "PREPARE {name} (integer, unknown, unknown) AS select $1, $2, $3\n;\n\
         EXECUTE {name} ('42', E'a''b\\\\c', NULL);\nDEALLOCATE {name};\n"
    );
    assert!(second.contains(&prepared), "{second}");
    let names: Vec<&str> = second.lines().filter(|line| line.starts_with("PREPARE ")).collect();
    assert_eq!(names.len(), 1, "{second}");
    assert!(second.contains("-- left out: parameter $1 is binary, of a type that the client did not name\n"));
    assert!(second.contains("copy t from stdin\n;\n1\tone\n2\ttwo\n\\.\n"), "{second}");
}

/// psql would send each of several statements by itself, and what PREPARE does not take would be an error of its own.
#[test]
fn a_query_is_one_query_and_a_statement_is_one_statement() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("trace");
    let writer = Writer::create(&directory, &Meta::default(), Options::default()).unwrap();
    let mut r = Recorder { writer, offsets: [0; 4] };
    r.start(1, 1_000);
    let failed = ErrorOutcome { sqlstate: *b"22012", fatal: false, message: b"division by zero"[..].into() };
    r.query(1, 2_000, "insert into t values (1); insert into t values (1 / 0); -- ;", Outcome::Error(failed));
    r.query(1, 3_000, "insert into t values (';'); -- ; one", complete("INSERT 0 1"));
    let refused =
        ["call p($1)", "/* select */ explain select $1", "-- select\ndeclare c cursor for select $1"];
    let prepared = [
        "/* call */ Select $1",
        "with a as (select $1) table a",
        "(select $1)",
        "VALUES($1)",
        "insert into t values ($1)",
        "update t set a = $1",
        "delete from t where a = $1",
        "merge into t using s on a = $1 when matched then delete",
    ];
    let texts = refused.iter().chain(&prepared).enumerate();
    for (at, text) in texts {
        r.execute(1, 4_000 + at as u64 * 5_000, text, &[], &[], &[Some(b"1")]);
    }
    // Without parameters, there is nothing to prepare.
    r.execute(1, 90_000, "call p()", &[], &[], &[]);
    r.writer.finish().unwrap();
    let summary = sql::export(&mut Reader::open(&directory).unwrap(), &folder.path().join("sql")).unwrap();
    let script = fs::read_to_string(folder.path().join("sql/session-000001.sql")).unwrap();
    assert!(
        script.contains("\ninsert into t values (1)\\; insert into t values (1 / 0); -- \n;\n"),
        "{script}"
    );
    assert!(script.contains("\ninsert into t values (';'); -- ; one\n;\n"), "{script}");
    let left_out = "-- left out: a statement with parameters that PREPARE does not take\n";
    assert_eq!(script.matches(left_out).count(), refused.len(), "{script}");
    assert!(refused.iter().all(|text| !script.contains(text)), "{script}");
    for text in prepared {
        assert!(script.contains(&format!(" (unknown) AS {text}\n;\n")), "{text}\n{script}");
    }
    assert!(script.contains("\ncall p()\n;\n"), "{script}");
    assert_eq!((summary.statements, summary.left_out), (3 + prepared.len() as u64, refused.len() as u64));
}

/// Each of these would make psql do something else than the client did.
#[test]
fn scripts_do_nothing_that_was_not_done() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("trace");
    let writer = Writer::create(&directory, &Meta::default(), Options::default()).unwrap();
    let mut r = Recorder { writer, offsets: [0; 4] };
    r.start(1, 1_000);
    // Rows of one portal, in two goes.
    r.send(1, 2_000, |out| build::parse(out, b"", b"insert into t values (1) returning a", []));
    r.send(1, 2_000, |out| build::bind(out, b"", b"", [], [], []));
    let first = r.send(1, 2_000, |out| build::execute(out, b"", 1));
    let second = r.send(1, 2_000, |out| build::execute(out, b"", 0));
    let sync = r.send(1, 2_000, build::sync);
    r.answer(1, first, 3_000, 1, Outcome::Suspended);
    r.answer(1, second, 4_000, 1, complete("INSERT 0 1"));
    r.ready(1, sync, 4_000);
    // A COPY that was refused: what follows is no data.
    let refused = ErrorOutcome { sqlstate: *b"42501", fatal: false, message: b"denied"[..].into() };
    r.query(1, 5_000, "copy t\nfrom stdin", Outcome::Error(refused));
    r.query(1, 6_000, "copy t from stdin", complete("COPY 0"));
    r.query(1, 7_000, "select 1", complete("SELECT 1"));
    r.query(1, 8_000, "alter role a password 'x'", complete("ALTER ROLE"));
    r.writer.finish().unwrap();
    let summary = sql::export(&mut Reader::open(&directory).unwrap(), &folder.path().join("sql")).unwrap();
    assert_eq!((summary.statements, summary.left_out), (3, 3));
    let script = fs::read_to_string(folder.path().join("sql/session-000001.sql")).unwrap();
    assert_eq!(script.matches("insert into t").count(), 1, "{script}");
    assert_eq!(script.matches("copy t").count(), 1, "{script}");
    assert!(!script.contains("alter role"), "{script}");
    assert!(script.contains("copy t from stdin\n;\n\\.\n") && script.contains("select 1\n;\n"), "{script}");
}

/// A masked trace has no COPY data, and others may have lost it.
#[test]
fn a_copy_without_its_data_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("trace");
    let writer = Writer::create(&directory, &Meta::default(), Options::default()).unwrap();
    let mut r = Recorder { writer, offsets: [0; 4] };
    r.start(1, 1_000);
    r.query(1, 2_000, "copy gone from stdin", complete("COPY 5000"));
    let refused = ErrorOutcome { sqlstate: *b"42501", fatal: false, message: b"denied"[..].into() };
    for (at, text) in [
        "/* from here */ copy gone from stdin",
        "COPY gone(a, b)FROM STDIN(format csv)",
        "copy \"from\" from stdin with (delimiter ';')",
        "begin; copy gone from stdin",
    ]
    .into_iter()
    .enumerate()
    {
        r.query(1, 3_000 + at as u64 * 100, text, Outcome::Error(refused.clone()));
    }
    r.query(1, 4_000, "copy (select a from stdin) to stdout", complete("COPY 1"));
    r.query(1, 5_000, "copy none from stdin(format csv)", complete("COPY 0"));
    // Of this one, all but the end of its data is lost.
    let lost = r.send(1, 6_000, |out| build::query(out, b"copy gone from stdin"));
    r.write(Record::Loss(Loss {
        session: Some(SessionId(1)),
        time_ns: 6_100,
        direction: Direction::Frontend,
        offset: 1_000,
        len: 77,
        reason: LossReason::RingFull,
    }));
    r.send(1, 6_200, |out| build::copy_data(out, b"stray\n"));
    r.send(1, 6_300, build::copy_done);
    r.answer(1, lost, 7_000, 0, complete("COPY 9"));
    r.ready(1, lost, 7_000);
    r.query(1, 8_000, "select 1", complete("SELECT 1"));
    r.query(1, 8_100, "update t set a = 2", Outcome::Unknown);
    r.query(1, 8_200, "copy never from stdin", Outcome::Unknown);
    // Recording ended within this one.
    let unfinished = r.send(1, 9_000, |out| build::query(out, b"copy gone from stdin"));
    r.send(1, 9_100, |out| build::copy_data(out, b"stray\n"));
    r.answer(1, unfinished, 9_200, 0, Outcome::Unknown);
    r.write(Record::SessionEnd(SessionEnd {
        session: SessionId(1),
        time_ns: 9_200,
        reason: EndReason::RecordingEnded,
        frontend: ByteTotals::default(),
        backend: ByteTotals::default(),
    }));
    r.writer.finish().unwrap();
    let summary = sql::export(&mut Reader::open(&directory).unwrap(), &folder.path().join("sql")).unwrap();
    let script = fs::read_to_string(folder.path().join("sql/session-000001.sql")).unwrap();
    assert_eq!((summary.statements, summary.left_out), (4, 8), "{script}");
    assert!(script.contains(", outcome not known\nupdate t set a = 2"), "{script}");
    assert!(script.contains("-- left out: a COPY whose data and end are not in the trace\n"), "{script}");
    assert!(script.contains("-- left out: a COPY of whose data some may be lost\n"), "{script}");
    assert!(script.contains("-- left out: a COPY whose end is not in the trace\n"), "{script}");
    assert!(script.contains("-- left out: a COPY whose data is not in the trace\n"), "{script}");
    assert!(!script.contains("gone") && !script.contains("stray"), "{script}");
    assert!(script.contains("copy (select a from stdin) to stdout\n;\n"), "{script}");
    assert!(script.contains("copy none from stdin(format csv)\n;\n\\.\n"), "{script}");
    assert!(script.contains("select 1\n;\n"), "{script}");
}

/// What a server did not take, a script must not load; and what was rolled back with it, it must not commit.
#[test]
fn a_copy_that_failed_is_left_out_and_fails_its_transaction() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("trace");
    let writer = Writer::create(&directory, &Meta::default(), Options::default()).unwrap();
    let mut r = Recorder { writer, offsets: [0; 4] };
    let failed = |sqlstate: &[u8; 5]| {
        Outcome::Error(ErrorOutcome { sqlstate: *sqlstate, fatal: false, message: b"COPY t"[..].into() })
    };
    let in_block = |r: &mut Recorder, request: u64, time_ns: u64, status: TransactionStatus| {
        r.write(Record::Ready(Ready { session: SessionId(1), time_ns, request, offset: 0, status }));
    };
    r.start(1, 1_000);
    // The client gave it up; of the last of these, the answer is not known.
    for (at, outcome) in [failed(b"57014"), Outcome::Unknown].into_iter().enumerate() {
        let time_ns = 2_000 + at as u64 * 100;
        let copy = r.send(1, time_ns, |out| build::query(out, b"copy t from stdin"));
        r.send(1, time_ns, |out| build::copy_data(out, b"given up\n"));
        r.send(1, time_ns, |out| build::copy_fail(out, b"no more"));
        r.answer(1, copy, time_ns + 50, 0, outcome);
        r.ready(1, copy, time_ns + 50);
    }
    // The server refused what it held, in a transaction.
    let begin = r.send(1, 3_000, |out| build::query(out, b"begin"));
    r.answer(1, begin, 3_100, 0, complete("BEGIN"));
    in_block(&mut r, begin, 3_100, TransactionStatus::Transaction);
    let copy = r.send(1, 3_200, |out| build::query(out, b"copy t from stdin"));
    r.send(1, 3_200, |out| build::copy_data(out, b"refused\n"));
    r.send(1, 3_200, build::copy_done);
    r.answer(1, copy, 3_300, 0, failed(b"22P02"));
    in_block(&mut r, copy, 3_300, TransactionStatus::Failed);
    r.query(1, 3_400, "commit", complete("ROLLBACK"));
    // What comes later has its data.
    let copy = r.send(1, 4_000, |out| build::query(out, b"copy t from stdin"));
    r.send(1, 4_000, |out| build::copy_data(out, b"taken\n"));
    r.send(1, 4_000, build::copy_done);
    r.answer(1, copy, 4_100, 0, complete("COPY 1"));
    r.ready(1, copy, 4_100);
    r.writer.finish().unwrap();

    let summary = sql::export(&mut Reader::open(&directory).unwrap(), &folder.path().join("sql")).unwrap();
    assert_eq!((summary.statements, summary.left_out), (3, 3));
    let script = fs::read_to_string(folder.path().join("sql/session-000001.sql")).unwrap();
    assert!(!script.contains("given up") && !script.contains("refused"), "{script}");
    assert_eq!(script.matches("-- left out: a COPY that its client gave up\n").count(), 2, "{script}");
    let in_block = "-- left out: a COPY that failed with 22P02\nSELECT 1 / 0;";
    assert!(script.contains(in_block) && script.matches("1 / 0").count() == 1, "{script}");
    assert!(script.contains("copy t from stdin\n;\ntaken\n\\.\n"), "{script}");

    // JSON lines have each message, and how each request ended.
    let mut lines = Vec::new();
    json_lines::export(&mut Reader::open(&directory).unwrap(), &mut lines).unwrap();
    let lines = String::from_utf8(lines).unwrap();
    assert_eq!(lines.matches("\"type\":\"CopyFail\"").count(), 2, "{lines}");
    assert!(lines.contains("\"sqlstate\":\"22P02\""), "{lines}");
}

/// As JDBC with a fetch size does: rows of two portals in turn, and other statements between.
#[test]
fn a_portal_that_goes_on_is_written_once() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("trace");
    let writer = Writer::create(&directory, &Meta::default(), Options::default()).unwrap();
    let mut r = Recorder { writer, offsets: [0; 4] };
    r.start(1, 1_000);
    let ready = |r: &mut Recorder, request: u64, time_ns: u64| {
        let (session, status) = (SessionId(1), TransactionStatus::Transaction);
        r.write(Record::Ready(Ready { session, time_ns, request, offset: 0, status }));
    };
    let begin = r.send(1, 1_500, |out| build::query(out, b"begin"));
    r.answer(1, begin, 2_100, 0, complete("BEGIN"));
    ready(&mut r, begin, 2_100);
    let mut time_ns = 3_000;
    for (portal, text) in [(b"C_1", "select one"), (b"C_2", "select two")] {
        r.send(1, time_ns, |out| build::parse(out, b"", text.as_bytes(), []));
        r.send(1, time_ns, |out| build::bind(out, portal, b"", [], [], []));
        let first = r.send(1, time_ns, |out| build::execute(out, portal, 10));
        let sync = r.send(1, time_ns, build::sync);
        r.answer(1, first, time_ns + 600, 10, Outcome::Suspended);
        ready(&mut r, sync, time_ns + 600);
        time_ns += 1_000;
    }
    for outcome in [Outcome::Suspended, complete("SELECT 3")] {
        for portal in [b"C_1", b"C_2"] {
            let update = r.send(1, time_ns, |out| build::query(out, b"update t set a = 1"));
            r.answer(1, update, time_ns + 600, 0, complete("UPDATE 1"));
            ready(&mut r, update, time_ns + 600);
            time_ns += 1_000;
            let more = r.send(1, time_ns, |out| build::execute(out, portal, 10));
            let sync = r.send(1, time_ns, build::sync);
            r.answer(1, more, time_ns + 600, 3, outcome.clone());
            ready(&mut r, sync, time_ns + 600);
            time_ns += 1_000;
        }
    }
    r.query(1, time_ns, "commit", complete("COMMIT"));
    // The same text, bound again, is another statement.
    r.execute(1, time_ns + 5_000, "select one", &[], &[], &[]);
    r.writer.finish().unwrap();
    let summary = sql::export(&mut Reader::open(&directory).unwrap(), &folder.path().join("sql")).unwrap();
    let script = fs::read_to_string(folder.path().join("sql/session-000001.sql")).unwrap();
    let count = |text: &str| script.matches(text).count();
    assert_eq!((count("select one\n"), count("select two\n"), count("update t")), (2, 1, 4), "{script}");
    assert_eq!((summary.statements, summary.left_out), (9, 4), "{script}");
}

/// They say what the trace says, which only its owner may read.
#[test]
fn an_export_is_its_owners() {
    use std::os::unix::fs::PermissionsExt as _;
    let site = Site::new();
    tables::export(&mut site.reader(), &site.path("tables")).unwrap();
    sql::export(&mut site.reader(), &site.path("sql")).unwrap();
    let mode = |name: &str| fs::metadata(site.path(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("tables"), mode("sql")), (0o700, 0o700));
    assert_eq!(mode("tables/sessions/part-00000.parquet"), 0o600);
    assert_eq!(mode("sql/session-000001.sql"), 0o600);
}

#[test]
fn nothing_is_written_over() {
    let site = Site::new();
    fs::create_dir(site.path("mine")).unwrap();
    assert!(matches!(tables::export(&mut site.reader(), &site.path("mine")), Err(Error::Exists(_))));
    assert!(matches!(sql::export(&mut site.reader(), &site.path("mine")), Err(Error::Exists(_))));
}

/// Lines as PostgreSQL 15 writes them.
const LOG: &str = r#"2026-01-01 10:00:00.000 UTC,,,100,"[local]",65950000.64,1,"",2026-01-01 10:00:00 UTC,,0,LOG,00000,"connection received: host=[local]",,,,,,,,,"","not initialized",,0
2026-01-01 10:00:00.010 UTC,"app","shop",100,"[local]",65950000.64,2,"authentication",2026-01-01 10:00:00 UTC,3/1,0,LOG,00000,"connection authorized: user=app database=shop",,,,,,,,,"","client backend",,0
2026-01-01 10:00:01.000 UTC,"app","shop",100,"[local]",65950000.64,3,"SELECT",2026-01-01 10:00:00 UTC,3/2,0,LOG,00000,"duration: 250.500 ms  statement: select ""a"",
 'two lines'",,,,,,,,,"psql","client backend",,0
2026-01-01 10:00:02.000 UTC,"app","shop",100,"[local]",65950000.64,4,"PARSE",2026-01-01 10:00:00 UTC,3/2,0,LOG,00000,"duration: 0.100 ms  parse s1: select $1, $2",,,,,,,,,"psql","client backend",,0
2026-01-01 10:00:02.001 UTC,"app","shop",100,"[local]",65950000.64,5,"BIND",2026-01-01 10:00:00 UTC,3/2,0,LOG,00000,"duration: 0.100 ms  bind s1: select $1, $2","parameters: $1 = 'it''s', $2 = NULL",,,,,,,,"psql","client backend",,0
2026-01-01 10:00:02.002 UTC,"app","shop",100,"[local]",65950000.64,6,"SELECT",2026-01-01 10:00:00 UTC,3/2,0,LOG,00000,"duration: 1.000 ms  execute s1: select $1, $2","parameters: $1 = 'it''s', $2 = NULL",,,,,,,,"psql","client backend",,0
2026-01-01 10:00:03.000 UTC,"app","shop",100,"[local]",65950000.64,7,"SELECT",2026-01-01 10:00:00 UTC,3/3,0,ERROR,22012,"division by zero",,,,,,"select 1/0",,,"psql","client backend",,0
2026-01-01 10:00:04.000 UTC,"app","shop",100,"[local]",65950000.64,8,"idle",2026-01-01 10:00:00 UTC,3/3,0,LOG,00000,"statement: alter role app password 'secret'",,,,,,,,,"psql","client backend",,0
2026-01-01 10:00:04.500 UTC,"app","shop",100,"[local]",65950000.64,9,"ALTER ROLE",2026-01-01 10:00:00 UTC,3/3,0,LOG,00000,"duration: 500.000 ms",,,,,,,,,"psql","client backend",,0
2026-01-01 10:00:05.000 UTC,"app","shop",100,"[local]",65950000.64,10,"idle",2026-01-01 10:00:00 UTC,,0,LOG,00000,"disconnection: session time: 0:00:05.000 user=app database=shop host=[local]",,,,,,,,,"psql","client backend",,0
2026-01-01 10:00:06.000 UTC,,,90,,65950000.5a,1,,2026-01-01 09:00:00 UTC,,0,LOG,00000,"checkpoint starting: time",,,,,,,,,"","checkpointer",,0
"#;

fn import_all(logs: &[&[u8]], writer: &mut Writer) -> Result<csv_log::Summary, Error> {
    let mut import = csv_log::Import::default();
    logs.iter().try_for_each(|log| import.log(*log, writer))?;
    import.finish(writer)
}

/// A server begins a new file every day, or every so many bytes, whatever its sessions do.
#[test]
fn sessions_go_on_in_the_next_log() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("trace");
    let mut writer = Writer::create(&directory, &csv_log::meta(), Options::default()).unwrap();
    let half = LOG.match_indices("2026-01-01 10:00:03.000").next().unwrap().0;
    let other = LOG.replace("65950000.64", "65950000.65");
    let logs = [&LOG.as_bytes()[..half], &LOG.as_bytes()[half..], other.as_bytes()];
    let summary = import_all(&logs, &mut writer).unwrap();
    writer.finish().unwrap();
    assert_eq!((summary.lines, summary.sessions, summary.statements), (22, 2, 8));
    let mut reader = Reader::open(&directory).unwrap();
    let mut ids = Vec::new();
    while let Some(record) = reader.next().unwrap() {
        if let Record::SessionStart(start) = record {
            ids.push(start.session.0);
        }
    }
    assert_eq!(ids, [1, 2], "one number is one session");
}

/// Each line is in its database's encoding, and the last may not be whole.
#[test]
fn a_log_of_a_server_at_work_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer =
        Writer::create(&folder.path().join("trace"), &csv_log::meta(), Options::default()).unwrap();
    let mut log = LOG.replace("two lines", "two l\u{fc}nes").into_bytes();
    let at = log.windows(2).position(|two| two == "\u{fc}".as_bytes()).unwrap();
    log.splice(at..at + 2, [0xfc]);
    let whole = log.len();
    log.extend_from_slice(b"2026-01-01 10:00:07.000 UTC,\"app\",\"shop\",100,\"[local]\",65950000.64,11,\"SELECT\",2026-01-01 10:00:00 UTC,3/2,0,LOG,00000,\"duration: 1.0 ms  statement: select 'cut\n");
    let summary = import_all(&[&log], &mut writer).unwrap();
    assert_eq!((summary.lines, summary.not_utf8, summary.torn), (11, 1, 1));
    let summary = import_all(&[&log[..whole]], &mut writer).unwrap();
    assert_eq!((summary.lines, summary.not_utf8, summary.torn), (11, 1, 0));
    // Wherever the first column is cut.
    for cut in 1.."2026-01-01 10:00:07.000 UTC,".len() {
        let summary = import_all(&[&log[..whole + cut]], &mut writer).unwrap();
        assert_eq!((summary.lines, summary.torn), (11, 1), "{cut} bytes");
    }
}

#[test]
fn a_log_becomes_a_trace() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("trace");
    let mut writer = Writer::create(&directory, &csv_log::meta(), Options::default()).unwrap();
    let summary = import_all(&[LOG.as_bytes()], &mut writer).unwrap();
    writer.finish().unwrap();
    assert_eq!((summary.lines, summary.sessions, summary.statements, summary.errors), (11, 1, 4, 1));
    assert_eq!(summary.zones_taken_for_utc, 0);

    let mut reader = Reader::open(&directory).unwrap();
    let mut assembler = statements::Statements::new(Protocol::Postgres);
    let (mut events, mut found) = (Vec::new(), Vec::new());
    while let Some(record) = reader.next().unwrap() {
        match &record {
            Record::SessionEnd(end) => assert!(end.frontend.add_up()),
            Record::SessionStart(start) => {
                assert_eq!(start.application_name.as_deref(), Some(&b"psql"[..]));
                assert_eq!(start.transport, Transport::Unix);
            }
            _ => {}
        }
        assembler.push(&record, &mut events);
        found.extend(events.drain(..).filter_map(|event| match event {
            statements::Event::Statement(statement) => Some(statement),
            statements::Event::Transaction(_) => None,
        }));
    }
    let text = |at: usize| String::from_utf8(found[at].text.as_deref().unwrap().to_vec()).unwrap();
    assert_eq!(text(0), "select \"a\",\n 'two lines'");
    assert_eq!(found[0].end_ns - found[0].time_ns, 250_500_000);
    assert_eq!(text(1), "select $1, $2");
    assert_eq!(found[1].parameters.values, [Some(b"it's".to_vec()), None]);
    assert_eq!(found[1].outcome, complete("SELECT"));
    assert_eq!(text(2), "select 1/0");
    assert!(matches!(&found[2].outcome, Outcome::Error(error) if error.sqlstate == *b"22012"));
    assert_eq!(text(3), "alter role app password '******'");
    assert_eq!(found[3].end_ns - found[3].time_ns, 500_000_000);
    assert_eq!(found.len(), 4);
}

#[test]
fn time_zones_are_offsets_or_told() {
    let folder = tempfile::tempdir().unwrap();
    let import = |zone: &str| {
        let directory = folder.path().join(zone);
        let mut writer = Writer::create(&directory, &csv_log::meta(), Options::default()).unwrap();
        let summary = import_all(&[LOG.replace(" UTC", zone).as_bytes()], &mut writer).unwrap();
        writer.finish().unwrap();
        let mut reader = Reader::open(&directory).unwrap();
        let Some(Record::Clock(clock)) = reader.next().unwrap() else { panic!("no clock") };
        (clock.realtime_ns / 1_000_000_000, summary.zones_taken_for_utc)
    };
    let utc = 1_767_261_600; // 2026-01-01 10:00:00
    assert_eq!(import(" GMT"), (utc, 0));
    assert_eq!(import(" +02"), (utc - 2 * 3_600, 0));
    assert_eq!(import(" -03"), (utc + 3 * 3_600, 0));
    assert_eq!(import(" -03:30"), (utc + 12_600, 0));
    // Kathmandu, the Chatham Islands, the Marquesas: their abbreviations have no letters.
    assert_eq!(import(" +0545"), (utc - 20_700, 0));
    assert_eq!(import(" +05:45"), (utc - 20_700, 0));
    assert_eq!(import(" +1245"), (utc - 45_900, 0));
    assert_eq!(import(" -0930"), (utc + 34_200, 0));
    assert_eq!(import(" -00"), (utc, 0));
    for unknown in [" +", " +5:4", " +054", " +0560", " -99"] {
        assert_eq!(import(unknown), (utc, 11), "{unknown}");
    }
    assert_eq!(import(" CET"), (utc, 11), "each line is counted once");
}

/// `log_connections` is off where nobody switched it on; and a session may be older than the first of the logs.
#[test]
fn sessions_without_lines_about_their_connection_have_their_start() {
    let folder = tempfile::tempdir().unwrap();
    let starts = |name: &str, log: &str| {
        let directory = folder.path().join(name);
        let mut writer = Writer::create(&directory, &csv_log::meta(), Options::default()).unwrap();
        import_all(&[log.as_bytes()], &mut writer).unwrap();
        writer.finish().unwrap();
        let mut reader = Reader::open(&directory).unwrap();
        let (mut starts, mut first_ns) = (Vec::new(), u64::MAX);
        while let Some(record) = reader.next().unwrap() {
            match record {
                Record::SessionStart(start) => {
                    assert_eq!(start.ready_ns, (!start.midstream).then_some(start.time_ns));
                    starts.push((start.time_ns / 1_000_000, start.midstream));
                }
                Record::Frontend(message) => first_ns = first_ns.min(message.time_ns),
                _ => {}
            }
        }
        assert!(starts.iter().all(|start| start.0 <= first_ns / 1_000_000), "before its first statement");
        starts
    };
    let ten_oclock_ms = 1_767_261_600_000; // 2026-01-01 10:00:00
    let server = LOG.lines().last().unwrap();
    let (connection, statements): (Vec<&str>, Vec<&str>) =
        LOG.split_inclusive('\n').partition(|line| line.contains("\"connection "));
    let statements = statements.concat();
    assert_eq!(connection.len(), 2);
    assert_eq!(starts("lines", LOG), [(ten_oclock_ms + 10, false)]);
    // The server's own lines are older.
    let since = |time: &str| format!("{}\n{statements}", server.replace("10:00:06.000", time));
    assert_eq!(starts("column", &since("09:59:00.000")), [(ten_oclock_ms, false)]);
    assert_eq!(
        starts("same", &since("10:00:00.300")),
        [(ten_oclock_ms + 300, false)],
        "the column has no fraction"
    );
    // What began before the logs must not make them days long: replay would wait for as long.
    let old = since("09:59:00.000").replace("2026-01-01 10:00:00 UTC", "2025-12-30 10:00:00 UTC");
    assert_eq!(starts("old", &old), [(ten_oclock_ms - 60_000, true)]);
    // The first line tells of a statement that began before it.
    assert_eq!(starts("first", &statements), [(ten_oclock_ms + 749, true)]);
}

#[test]
fn what_is_no_log_is_refused_with_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let import = |name: &str, log: &str| {
        let directory = folder.path().join(name);
        let mut writer = Writer::create(&directory, &csv_log::meta(), Options::default()).unwrap();
        import_all(&[log.as_bytes()], &mut writer).unwrap_err().to_string()
    };
    assert!(import("a", "a,b,c\n").contains("line 1: too few columns"));
    let two = format!("{}{}", LOG.lines().next().unwrap(), "\nx,y\n");
    assert!(import("b", &two).contains("line 2: too few columns"), "{}", import("c", &two));
}

/// A number of parameters that no message has.
#[test]
fn a_line_with_too_many_parameters_is_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer =
        Writer::create(&folder.path().join("trace"), &csv_log::meta(), Options::default()).unwrap();
    let list = |count: usize| (0..count).map(|_| "$1 = '1'").collect::<Vec<_>>().join(", ");
    let import = |count: usize, writer: &mut Writer| {
        let log = LOG.replace("$1 = 'it''s', $2 = NULL", &list(count));
        let summary = import_all(&[log.as_bytes()], writer).unwrap();
        (summary.lines, summary.statements, summary.others)
    };
    let (lines, statements, others) = import(65_535, &mut writer);
    assert_eq!(import(65_536, &mut writer), (lines, statements - 1, others + 1));
}

/// What a server refused may be a command to psql, and so may what stands in COPY data and names.
#[test]
fn scripts_have_no_commands_of_clients() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("trace");
    let writer = Writer::create(&directory, &Meta::default(), Options::default()).unwrap();
    let mut r = Recorder { writer, offsets: [0; 4] };
    r.start(1, 1_000);
    let refused = |sqlstate: &[u8; 5]| {
        Outcome::Error(ErrorOutcome { sqlstate: *sqlstate, fatal: false, message: b"no"[..].into() })
    };
    r.query(1, 2_000, "select 1 \\! touch /tmp/x", refused(b"\n\\! x"));
    r.query(1, 3_000, "select 'abc", refused(b"42601"));
    r.query(1, 4_000, "select 1 :DBNAME", refused(b"42601"));
    r.execute(1, 5_000, "select 1; drop table gone", &[], &[], &[]);
    r.execute(1, 6_000, "select $1", &[], &[], &[Some(b"a\0b")]);
    let copy = r.send(1, 7_000, |out| build::query(out, b"copy t from stdin"));
    r.send(1, 7_001, |out| build::copy_data(out, b"1\n\\.\n\\! touch /tmp/x\n"));
    r.send(1, 7_002, build::copy_done);
    r.answer(1, copy, 7_500, 0, complete("COPY 1"));
    r.ready(1, copy, 7_500);
    r.query(1, 8_000, "copy t from stdin", complete("COPY 0"));
    r.writer.finish().unwrap();
    let summary = sql::export(&mut Reader::open(&directory).unwrap(), &folder.path().join("sql")).unwrap();
    let script = fs::read_to_string(folder.path().join("sql/session-000001.sql")).unwrap();
    assert_eq!((summary.statements, summary.left_out), (2, 5), "{script}");
    assert!(script.contains("select 1 : DBNAME\n;\n") && !script.contains("gone"), "{script}");
    let left_out = script.lines().filter(|line| line.starts_with("-- left out: ")).count();
    assert_eq!(left_out, 5, "{script}");
    // A COPY that fails ends the script, before its data is run as commands.
    let guarded = "\\set ON_ERROR_STOP on\ncopy t from stdin\n;\n\\.\n\\set ON_ERROR_STOP :underpass_stop\n";
    assert!(script.contains(guarded), "{script}");
    let commands: Vec<&str> =
        script.lines().filter(|line| !line.starts_with("--") && line.contains('\\')).collect();
    assert!(commands.iter().all(|line| line.starts_with("\\set ") || *line == "\\."), "{script}");
}

/// A portal that goes on is logged with the whole text of its statement.
#[test]
fn fetches_from_a_portal_are_no_statements() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer =
        Writer::create(&folder.path().join("trace"), &csv_log::meta(), Options::default()).unwrap();
    let execute = LOG.lines().find(|line| line.contains("execute s1: ")).unwrap();
    let first = execute.replace("execute s1: ", "execute S_1/C_2: ");
    let fetch = execute.replace("execute s1: ", "execute fetch from S_1/C_2: ");
    let log = [first, fetch.clone(), fetch].join("\n");
    let summary = import_all(&[log.as_bytes()], &mut writer).unwrap();
    assert_eq!((summary.lines, summary.statements, summary.others), (3, 1, 2));
}
