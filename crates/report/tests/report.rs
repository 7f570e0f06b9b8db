// SPDX-License-Identifier: Apache-2.0
//! Summary and page of a workload that is known: its numbers, and what it must confess.

use std::borrow::Cow;

use underpass_charts::ECHARTS;
use underpass_report::{Analysis, Section, page, text};
use underpass_trace::*;
use underpass_wire::frontend::build;

const MS: u64 = 1_000_000;

fn query(
    writer: &mut Writer,
    session: u64,
    time_ns: u64,
    text: &str,
    took_ns: u64,
    outcome: Outcome<'_>,
    offset: &mut u64,
) {
    let mut message = Vec::new();
    build::query(&mut message, text.as_bytes());
    let (session, request) = (SessionId(session), *offset);
    *offset += message.len() as u64;
    writer.write(&Record::Frontend(Frontend::new(session, time_ns, request, message))).unwrap();
    let last_ns = time_ns + took_ns;
    let response =
        Response { session, request, offset: 0, len: 40, first_ns: last_ns, last_ns, rows: 1, outcome };
    writer.write(&Record::Response(response)).unwrap();
    let status = match text {
        "begin" => TransactionStatus::Transaction,
        _ => TransactionStatus::Idle,
    };
    writer.write(&Record::Ready(Ready { session, time_ns: last_ns, request, offset: 0, status })).unwrap();
}

fn start(writer: &mut Writer, session: u64, midstream: bool) {
    let known = !midstream;
    writer
        .write(&Record::SessionStart(SessionStart {
            session: SessionId(session),
            time_ns: 1,
            ready_ns: known.then_some(2),
            source: Source::Synthetic,
            transport: Transport::Unix,
            peer: None,
            backend_pid: None,
            midstream,
            protocol_version: 3 << 16,
            database: Some(b"<shop>"[..].into()),
            user: known.then_some(Cow::Borrowed(&b"app"[..])),
            application_name: None,
            parameters: vec![],
            frontend_offset: 0,
            backend_offset: 0,
        }))
        .unwrap();
}

fn complete() -> Outcome<'static> {
    Outcome::Complete { tag: Cow::Borrowed(b"SELECT 1") }
}

/// What was refused before it ran: a Parse, a Bind, and the commit at a Sync.
#[test]
fn errors_before_and_behind_a_statement_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("trace");
    let mut writer = Writer::create(&directory, &Meta::default(), Options::default()).unwrap();
    start(&mut writer, 1, false);
    let (mut offset, mut now) = (0, MS);
    let mut send = |writer: &mut Writer, build: &dyn Fn(&mut Vec<u8>)| {
        let mut message = Vec::new();
        build(&mut message);
        let request = offset;
        offset += message.len() as u64;
        writer.write(&Record::Frontend(Frontend::new(SessionId(1), now, request, message))).unwrap();
        now += MS;
        request
    };
    for (fails, sqlstate) in [(0, b"42601"), (1, b"22P02"), (3, b"23505")] {
        let requests = [
            send(&mut writer, &|out| build::parse(out, b"", b"select $1 + 1", [])),
            send(&mut writer, &|out| build::bind(out, b"", b"", [], [Some(&b"x"[..])], [])),
            send(&mut writer, &|out| build::execute(out, b"", 0)),
            send(&mut writer, &build::sync),
        ];
        let session = SessionId(1);
        let time_ns = 100 * MS;
        let mut answer = |request, outcome| {
            let (first_ns, last_ns) = (time_ns, time_ns);
            let response =
                Response { session, request, offset: 0, len: 9, first_ns, last_ns, rows: 0, outcome };
            writer.write(&Record::Response(response)).unwrap();
        };
        if fails == 3 {
            answer(requests[2], complete());
        }
        let message = Cow::Borrowed(&b"no"[..]);
        answer(requests[fails], Outcome::Error(ErrorOutcome { sqlstate: *sqlstate, fatal: false, message }));
        let status = TransactionStatus::Idle;
        writer
            .write(&Record::Ready(Ready { session, time_ns, request: requests[3], offset: 0, status }))
            .unwrap();
    }
    writer.finish().unwrap();
    let analysis = Analysis::of(&mut Reader::open(&directory).unwrap()).unwrap();
    assert_eq!((analysis.statements, analysis.errors, analysis.unknown_texts), (4, 3, 0));
    let counted: Vec<_> =
        analysis.by_fingerprint.values().map(|one| (&*one.label, one.count, one.errors)).collect();
    let commit = ("(Sync: the commit of what ran before it)", 1, 1);
    assert_eq!(counted, [commit, ("select $1 + $2", 3, 2)]);
    assert_eq!(analysis.by_sqlstate.keys().collect::<Vec<_>>(), ["22P02", "23505", "42601"]);
}

/// 1000 statements of 1 ms by one session, 10 of 100 ms and an error by another that was joined midstream.
fn analysis(lossy: bool) -> Analysis {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("trace");
    let meta =
        Meta { host: "db1".into(), started: Clock { monotonic_ns: 1, realtime_ns: 0 }, ..Meta::default() };
    let mut writer = Writer::create(&directory, &meta, Options::default()).unwrap();
    start(&mut writer, 1, false);
    let mut offset = 0;
    for at in 0..1_000 {
        query(&mut writer, 1, 1 + at * 10 * MS, &format!("select {at}"), MS, complete(), &mut offset);
    }
    let mut offset = 0;
    if lossy {
        start(&mut writer, 2, true);
        for at in 0..10 {
            query(
                &mut writer,
                2,
                1 + at * 1_000 * MS,
                "select pg_sleep(0.1) as \"</script>\"",
                100 * MS,
                complete(),
                &mut offset,
            );
        }
        let message = Cow::Borrowed(&b"syntax error at or near \"<b>\""[..]);
        let error = ErrorOutcome { sqlstate: *b"42601", fatal: false, message };
        query(&mut writer, 2, 9_900 * MS, "selekt <b>", MS, Outcome::Error(error), &mut offset);
        query(&mut writer, 2, 9_910 * MS, "begin", MS, complete(), &mut offset);
        query(&mut writer, 2, 9_920 * MS, "commit", MS, complete(), &mut offset);
        writer
            .write(&Record::Loss(Loss {
                session: Some(SessionId(2)),
                time_ns: 9_950 * MS,
                direction: Direction::Backend,
                offset: 7,
                len: 1234,
                reason: LossReason::RingFull,
            }))
            .unwrap();
        let text = Cow::Borrowed(&b"3 connections turned away"[..]);
        writer.write(&Record::Note(Note { time_ns: 9_960 * MS, text })).unwrap();
    }
    let totals = ByteTotals { seen: 500, recorded: 500, ..ByteTotals::default() };
    writer
        .write(&Record::SessionEnd(SessionEnd {
            session: SessionId(1),
            time_ns: 10_000 * MS,
            reason: EndReason::Terminate,
            frontend: totals,
            backend: totals,
        }))
        .unwrap();
    writer.finish().unwrap();
    Analysis::of(&mut Reader::open(&directory).unwrap()).unwrap()
}

#[test]
fn numbers_are_those_of_the_workload() {
    let analysis = analysis(true);
    assert_eq!(
        (analysis.statements, analysis.errors, analysis.sessions, analysis.midstream),
        (1_013, 1, 2, 1)
    );
    assert_eq!((analysis.transactions, analysis.transactions_failed, analysis.sessions_max), (1, 0, 2));
    let top = analysis.top();
    let [(_, first), (_, second), ..] = &top[..] else { panic!("{top:?}") };
    // 10 of 100 ms and 1000 of 1 ms take the same time; the fingerprint decides, so look for both.
    let counts = [first.count, second.count];
    assert!(counts.contains(&1_000) && counts.contains(&10), "{counts:?}");
    let slow = if first.count == 10 { first } else { second };
    let p99 = slow.latency.value_at_quantile(0.99) as f64;
    assert!((p99 / 1e8 - 1.0).abs() < 0.02, "{p99}");
    assert_eq!(slow.label, "select pg_sleep($1) as \"</script>\"");
    assert_eq!(analysis.by_sqlstate["42601"].count, 1);
    assert!((analysis.seconds() - 10.0).abs() < 0.1);
}

#[test]
fn the_summary_confesses() {
    let summary = text(&analysis(true), 3);
    for sentence in [
        "PostgreSQL of unknown version on db1",
        "1970-01-01 00:00:00 UTC",
        "1013, 101 a second, 1 errors",
        "Lost: 1234 bytes in 1 gaps, because the ring buffer was full.",
        "1 of 2 sessions were joined in their middle",
        "The recorder says: 3 connections turned away.",
        "42601  syntax error at or near \"<b>\"",
        "select $1",
        "Never recorded: statements inside functions",
    ] {
        assert!(summary.contains(sentence), "{sentence}\n{summary}");
    }
    let whole = text(&analysis(false), 3);
    assert!(whole.contains("Nothing is known to be missing."), "{whole}");
}

#[test]
fn the_page_is_one_file_without_the_network_and_without_injection() {
    let more = Section { title: "Mirrors <1>".into(), html: "<p>none</p>".into() };
    let page = page(&analysis(true), 10, &[more]).unwrap();
    assert!(page.contains(ECHARTS));
    let page = page.replace(ECHARTS, "");
    assert!(!page.contains("src=") && !page.contains("https://") && !page.contains("{{"));
    assert!(page.contains("Mirrors &lt;1&gt;") && page.contains("<p>none</p>"));
    assert!(page.contains("&lt;shop&gt;") && !page.contains("<shop>") && !page.contains("selekt <b>"));
    let scripts = page.matches("<script").count();
    assert_eq!(scripts, page.matches("</script>").count());
    assert_eq!(
        page.matches("class=\"chart\"").count() + 2,
        scripts,
        "a script for each chart, the library, the drawing"
    );
    assert!(page.matches("class=\"chart\"").count() >= 6);
    for part in
        ["What this trace does not know", "Statements", "Errors", "Sessions", "Accounts", "Latency over time"]
    {
        assert!(page.contains(part), "{part}");
    }
}

/// Its time would be that of the loss, of the next answer or of the session's end.
#[test]
fn what_ended_unseen_has_no_latency() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("trace");
    let mut writer = Writer::create(&directory, &Meta::default(), Options::default()).unwrap();
    start(&mut writer, 1, false);
    let mut offset = 0;
    query(&mut writer, 1, 10 * MS, "select 1", 2 * MS, complete(), &mut offset);
    // Of a long answer to several statements, only the last end is seen.
    query(&mut writer, 1, 20 * MS, "select 2", 4 * MS, Outcome::Unknown, &mut offset);
    let session = SessionId(1);
    let mut ask = |writer: &mut Writer, time_ns: u64| {
        let mut message = Vec::new();
        build::query(&mut message, b"select 3");
        let request = offset;
        offset += message.len() as u64;
        writer.write(&Record::Frontend(Frontend::new(session, time_ns, request, message))).unwrap();
        request
    };
    let lost = |writer: &mut Writer, request: u64, len: u64, last_ns: u64| {
        let outcome = Outcome::Unknown;
        let response =
            Response { session, request, offset: 0, len, first_ns: last_ns, last_ns, rows: 0, outcome };
        writer.write(&Record::Response(response)).unwrap();
    };
    // Nothing of it was seen, a part of it was, and there is no word of it.
    let request = ask(&mut writer, 100 * MS);
    lost(&mut writer, request, 0, 5_000 * MS);
    let request = ask(&mut writer, 6_000 * MS);
    lost(&mut writer, request, 99, 9_000 * MS);
    ask(&mut writer, 9_100 * MS);
    let totals = ByteTotals::default();
    let (time_ns, reason) = (20_000 * MS, EndReason::Reset);
    let end = SessionEnd { session, time_ns, reason, frontend: totals, backend: totals };
    writer.write(&Record::SessionEnd(end)).unwrap();
    writer.finish().unwrap();
    let analysis = Analysis::of(&mut Reader::open(&directory).unwrap()).unwrap();
    assert_eq!((analysis.statements, analysis.unknown_outcomes, analysis.unknown_ends), (5, 4, 3));
    assert_eq!(analysis.latency.len(), 2);
    let [(_, all)] = &analysis.top()[..] else { panic!("{:?}", analysis.top()) };
    assert_eq!((all.count, all.total_ns, all.latency.len()), (5, u128::from(6 * MS), 2));
    let summary = text(&analysis, 3);
    assert!(summary.contains("The end of 3 of these was not seen: they are in no latency."), "{summary}");
    assert!(summary.contains("100.0%         5   3.00ms"), "{summary}");
}

/// Of a log without `log_disconnections`, ends are known when all of it was read.
#[test]
fn sessions_are_counted_by_their_times() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("trace");
    let mut writer = Writer::create(&directory, &Meta::default(), Options::default()).unwrap();
    for (session, time_ns) in [(1, 10), (2, 15), (3, 30), (4, 40)] {
        writer
            .write(&Record::SessionStart(SessionStart {
                session: SessionId(session),
                time_ns,
                ready_ns: Some(time_ns),
                source: Source::Import,
                transport: Transport::Unknown,
                peer: None,
                backend_pid: None,
                midstream: false,
                protocol_version: 0,
                database: None,
                user: None,
                application_name: None,
                parameters: vec![],
                frontend_offset: 0,
                backend_offset: 0,
            }))
            .unwrap();
    }
    for (session, time_ns) in [(2, 16), (1, 20), (3, 35), (4, 50)] {
        let (session, reason, totals) = (SessionId(session), EndReason::Unknown, ByteTotals::default());
        let end = SessionEnd { session, time_ns, reason, frontend: totals, backend: totals };
        writer.write(&Record::SessionEnd(end)).unwrap();
    }
    writer.finish().unwrap();
    assert_eq!(Analysis::of(&mut Reader::open(&directory).unwrap()).unwrap().sessions_max, 2);
}
