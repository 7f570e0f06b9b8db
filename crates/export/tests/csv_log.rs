// SPDX-License-Identifier: Apache-2.0
//! What a log does not say in so many words: ends of sessions, transaction status, parameters of what failed.

use underpass_export::csv_log;
use underpass_trace::TransactionStatus::{Failed, Idle, Transaction};
use underpass_trace::*;
use underpass_wire::Header;
use underpass_wire::frontend::Message;

/// A line of session 6595.`session` and process `process`, in second `second` after 10:00.
struct Line {
    second: u32,
    session: u32,
    process: u32,
    tag: &'static str,
    severity: &'static str,
    sqlstate: &'static str,
    message: String,
    detail: &'static str,
    query: &'static str,
}

impl Line {
    fn log(second: u32, session: u32, tag: &'static str, message: impl Into<String>) -> Self {
        Self {
            second,
            session,
            process: session,
            tag,
            severity: "LOG",
            sqlstate: "00000",
            message: message.into(),
            detail: "",
            query: "",
        }
    }

    fn done(second: u32, session: u32, tag: &'static str, text: &str) -> Self {
        Self::log(second, session, tag, format!("duration: 1.000 ms  statement: {text}"))
    }

    fn error(
        second: u32,
        session: u32,
        tag: &'static str,
        sqlstate: &'static str,
        query: &'static str,
    ) -> Self {
        Self { severity: "ERROR", sqlstate, query, ..Self::log(second, session, tag, "no") }
    }

    fn csv(&self) -> String {
        let Self { second, session, process, tag, severity, sqlstate, message, detail, query } = self;
        format!(
            "2026-01-01 10:00:{second:02}.000 UTC,\"app\",\"shop\",{process},\"[local]\",6595.{session},1,\"{tag}\",\
             2026-01-01 10:00:00 UTC,3/2,0,{severity},{sqlstate},\"{message}\",\"{detail}\",,,,,\"{query}\",,,\"psql\",\
             \"client backend\",,0\n"
        )
    }
}

fn import(lines: &[Line]) -> (csv_log::Summary, Vec<Record<'static>>) {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("trace");
    let mut writer = Writer::create(&directory, &csv_log::meta(), Options::default()).unwrap();
    let mut import = csv_log::Import::default();
    let log: String = lines.iter().map(Line::csv).collect();
    import.log(log.as_bytes(), &mut writer).unwrap();
    let summary = import.finish(&mut writer).unwrap();
    writer.finish().unwrap();
    let mut reader = Reader::open(&directory).unwrap();
    let mut records = Vec::new();
    while let Some(record) = reader.next().unwrap() {
        records.push(record.into_owned());
    }
    (summary, records)
}

/// Sessions that ended: number, seconds after 10:00, why.
fn ends(records: &[Record<'_>]) -> Vec<(u64, u64, EndReason)> {
    let ten_oclock = 1_767_261_600; // 2026-01-01
    let of = |record: &Record<'_>| match record {
        Record::SessionEnd(end) => {
            Some((end.session.0, end.time_ns / 1_000_000_000 - ten_oclock, end.reason))
        }
        _ => None,
    };
    records.iter().filter_map(of).collect()
}

/// `log_disconnections` is off where nobody switched it on.
#[test]
fn a_session_whose_end_is_not_logged_ends_with_its_last_line() {
    let (summary, records) = import(&[
        Line::done(1, 1, "SELECT", "select 1"),
        Line::done(2, 2, "SELECT", "select 2"),
        Line::done(3, 1, "SELECT", "select 3"),
        Line::done(40, 3, "SELECT", "select 4"),
    ]);
    assert_eq!((summary.sessions, summary.unknown_ends), (3, 3));
    let unknown = EndReason::Unknown;
    assert_eq!(ends(&records), [(2, 2, unknown), (1, 3, unknown), (3, 40, unknown)]);
}

#[test]
fn a_session_ends_with_a_fatal_error_and_with_its_process() {
    let fatal = |second, session| Line {
        severity: "FATAL",
        sqlstate: "57P01",
        ..Line::log(second, session, "idle", "terminating connection")
    };
    let over = |second, session| Line::log(second, session, "idle", "disconnection: session time: 0:00:05");
    let (summary, records) = import(&[
        Line::done(1, 1, "SELECT", "select 1"),
        Line::done(2, 2, "SELECT", "select 2"),
        fatal(5, 1),
        // It is told once.
        over(6, 1),
        // Its process is another session's now, so the crash of the server ended it.
        Line { process: 2, ..Line::done(20, 3, "SELECT", "select 3") },
        over(30, 3),
    ]);
    assert_eq!((summary.sessions, summary.unknown_ends), (3, 1));
    let wanted = [(1, 5, EndReason::ServerClosed), (2, 2, EndReason::Unknown), (3, 30, EndReason::Unknown)];
    assert_eq!(ends(&records), wanted);
}

fn statuses(lines: &[Line]) -> Vec<TransactionStatus> {
    let of = |record: &Record<'_>| match record {
        Record::Ready(ready) => Some(ready.status),
        _ => None,
    };
    import(lines).1.iter().filter_map(of).collect()
}

#[test]
fn all_statements_of_a_text_tell_the_transaction_status() {
    let whole = [
        Line::done(1, 1, "COMMIT", "begin; update t set a = 1; commit"),
        Line::done(2, 1, "BEGIN", "/* app */ begin"),
        Line::done(3, 1, "COMMIT", "commit and chain"),
        Line::error(4, 1, "SELECT", "22012", "select 1 / 0"),
        Line::done(5, 1, "ROLLBACK", "rollback; select 'x; begin'"),
    ];
    assert_eq!(statuses(&whole), [Idle, Transaction, Transaction, Failed, Idle]);
}

/// Where a text failed, its command tag tells.
#[test]
fn what_came_before_an_error_was_done() {
    let within = "begin; select 1 / 0; commit; select 2";
    for (tag, query, status) in [
        ("SELECT", within, Failed),
        ("idle", within, Idle),
        ("UPDATE", "begin; insert into t values (1); commit; update t set a = 1 / 0", Idle),
        ("INSERT", "begin; with a as (select 1) insert into t select 1 / 0", Failed),
    ] {
        assert_eq!(statuses(&[Line::error(1, 1, tag, "22012", query)]), [status], "{tag}: {query}");
    }
    let commit = [Line::done(1, 1, "BEGIN", "begin"), Line::error(2, 1, "COMMIT", "23503", "commit")];
    assert_eq!(statuses(&commit), [Transaction, Idle]);
}

/// The log has COMMIT; the client was told otherwise.
#[test]
fn a_commit_of_what_has_failed_is_a_rollback() {
    let (_, records) = import(&[
        Line::done(1, 1, "BEGIN", "begin"),
        Line::error(2, 1, "SELECT", "22012", "select 1 / 0"),
        Line::done(3, 1, "COMMIT", "commit"),
        Line::done(4, 1, "BEGIN", "begin"),
        Line::done(5, 1, "COMMIT", "commit"),
    ]);
    let tag = |record: &Record<'_>| match record {
        Record::Response(Response { outcome: Outcome::Complete { tag }, .. }) => {
            Some(String::from_utf8(tag.to_vec()).unwrap())
        }
        _ => None,
    };
    let tags: Vec<String> = records.iter().filter_map(tag).collect();
    assert_eq!(tags, ["BEGIN", "ROLLBACK", "BEGIN", "COMMIT"]);
}

/// With `log_min_duration_statement = 0` alone, what failed has no line of its own.
#[test]
fn what_failed_with_parameters_was_no_query() {
    let insert = "insert into t values ($1)";
    let bind = |second, detail| Line {
        detail,
        ..Line::log(second, 1, "BIND", format!("duration: 0.100 ms  bind s1/C_1: {insert}"))
    };
    let (summary, records) = import(&[
        bind(1, "parameters: $1 = 'it''s'"),
        Line::error(2, 1, "INSERT", "23505", insert),
        // That Bind is over.
        Line::error(3, 1, "PARSE", "42P01", insert),
        Line::error(4, 1, "SELECT", "22012", "select 1 / 0, '$1' -- $1"),
        Line::error(5, 1, "SELECT", "42P02", "select $1"),
        Line::error(6, 1, "PREPARE", "42P05", "prepare p as select $1"),
        Line::error(7, 1, "SELECT", "22012", "prepare p as select $1; select 1 / 0"),
    ]);
    assert_eq!((summary.errors, summary.unknown_parameters, summary.statements), (6, 1, 6));
    let mut said = Vec::new();
    for record in &records {
        let Record::Frontend(frontend) = record else { continue };
        let header = Header::parse(&frontend.message).unwrap().unwrap();
        match Message::decode(header.tag, &frontend.message[Header::SIZE..]).unwrap() {
            Message::Query(query) => said.push(String::from_utf8_lossy(query.query).into_owned()),
            Message::Parse(parse) => said.push(String::from_utf8_lossy(parse.query).into_owned()),
            Message::Bind(bind) => {
                let values =
                    bind.arguments.params.map(|value| String::from_utf8_lossy(value.unwrap()).into_owned());
                said.push(format!("bound: {}", values.collect::<Vec<_>>().join(", ")));
            }
            _ => {}
        }
    }
    let wanted = [
        insert,
        "bound: it's",
        insert,
        "bound: ",
        "select 1 / 0, '$1' -- $1",
        "select $1",
        "prepare p as select $1",
        "prepare p as select $1; select 1 / 0",
    ];
    assert_eq!(said, wanted);
}
