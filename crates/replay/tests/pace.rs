// SPDX-License-Identifier: Apache-2.0
//! When units are sent: at their moments in the trace, with the pauses of its clients, or at once; and what made one late. The trace is made
//! by hand, so that its moments are known; a relay before the target notes when each unit came.

mod recorder;

use std::collections::BTreeMap;
use std::time::Duration;

use recorder::Recorder;
use underpass_replay::Identities;
use underpass_replay::plan;
use underpass_replay::report::Report;
use underpass_replay::run::{Options, Pace, Played};
use underpass_testkit::{Batch, Postgres};
use underpass_trace::{
    ByteTotals, EndReason, Frontend, Level, Meta, Outcome, Ready, Record, Response, SessionEnd, SessionId,
    SessionStart, Source, TransactionStatus, Transport,
};

const A1: &str = "select 'a1'";
const SLOW: &str = "select slow()";
const A3: &str = "select 'a3'";
const B1: &str = "select 'b1'";
const INSERT: &str = "insert into t values (1)";
/// Session, text and tag of each unit, and when it was sent, milliseconds of the trace.
const UNITS: [(u64, &str, &str, u64); 5] = [
    (1, A1, "SELECT 1", 100),
    (1, SLOW, "SELECT 1", 500),
    (1, A3, "SELECT 1", 900),
    (2, B1, "SELECT 1", 300),
    (2, INSERT, "INSERT 0 1", 700),
];
/// So long each answer took there, milliseconds.
const ANSWER: u64 = 10;
/// The sessions' end, milliseconds.
const END: u64 = 1000;
/// So long `slow()` takes on a slow target: longer than till the next unit of its session, and of the other.
const SLOW_MS: u64 = 1000;

/// The trace, whose milliseconds are `scale` times as long.
fn records(scale: u64) -> Vec<Record<'static>> {
    let ns = |ms: u64| ms * scale * 1_000_000;
    let mut records = Vec::new();
    for number in 1..=2 {
        let session = SessionId(number);
        let start = SessionStart {
            session,
            time_ns: 0,
            ready_ns: Some(ns(ANSWER)),
            source: Source::Synthetic,
            transport: Transport::Tcp,
            peer: None,
            backend_pid: None,
            midstream: false,
            protocol_version: 3 << 16,
            database: Some(b"postgres"[..].into()),
            user: Some(b"postgres"[..].into()),
            application_name: None,
            parameters: Vec::new(),
            frontend_offset: 0,
            backend_offset: 0,
        };
        records.push((0, Record::SessionStart(start)));
        let mut request = 0;
        for (_, text, tag, sent) in UNITS.into_iter().filter(|unit| unit.0 == number) {
            let message = Batch::new().query(text).as_bytes().to_vec();
            let (len, answered) = (message.len() as u64, sent + ANSWER);
            records.push((sent, Record::Frontend(Frontend::new(session, ns(sent), request, message))));
            let (first_ns, last_ns, rows) = (ns(answered), ns(answered), u64::from(tag.starts_with('S')));
            let outcome = Outcome::Complete { tag: tag.as_bytes().to_vec().into() };
            let response = Response { session, request, offset: 0, len: 1, first_ns, last_ns, rows, outcome };
            records.push((answered, Record::Response(response)));
            let status = TransactionStatus::Idle;
            let ready = Ready { session, time_ns: ns(answered), request, offset: 0, status };
            records.push((answered, Record::Ready(ready)));
            request += len;
        }
        let (frontend, backend) = (ByteTotals::default(), ByteTotals::default());
        let reason = EndReason::Terminate;
        let end = SessionEnd { session, time_ns: ns(END), reason, frontend, backend };
        records.push((END, Record::SessionEnd(end)));
    }
    records.sort_by_key(|(ms, _)| *ms);
    records.into_iter().map(|(_, record)| record).collect()
}

/// A target whose `slow()` takes so long.
fn server(slow_ms: u64) -> Postgres {
    let server = Postgres::start().expect("PostgreSQL");
    let sleep = format!("perform pg_sleep({slow_ms} / 1000.0)");
    let function = "create function slow() returns int language plpgsql as";
    server
        .sql(&format!("create table t (v int); {function} $$ begin {sleep}; return 1; end $$"))
        .expect("setup");
    server
}

/// When the target had each unit, since a moment before the replay began, and how it went.
fn play(
    server: &Postgres,
    scale: u64,
    options: Options,
) -> (BTreeMap<&'static str, Duration>, Played, Report) {
    // Its clock runs from here.
    let relay = Recorder::start(server.port(), Level::Summary);
    let plan = recorder::plan(&Meta::default(), &records(scale), &plan::Options::default());
    assert_eq!((plan.commits, plan.units()), (2, UNITS.len()), "{:?}", plan.omitted);
    let target = recorder::target(relay.port(), Identities::default());
    let (_, played, report) = recorder::play(plan, target, options);
    assert!(report.is_equal() && report.counts.equal == UNITS.len() as u64, "{}", report.text());
    let mut seen = BTreeMap::new();
    for record in relay.records() {
        let Record::Frontend(message) = record else { continue };
        let unit = UNITS.iter().find(|unit| *message.message == *Batch::new().query(unit.1).as_bytes());
        if let Some((_, text, ..)) = unit {
            seen.insert(*text, Duration::from_nanos(message.time_ns));
        }
    }
    assert_eq!(seen.len(), UNITS.len());
    (seen, played, report)
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[test]
fn units_are_sent_at_their_moments_and_what_made_one_late_is_told() {
    assert_eq!(Options::default().pace, Pace::Timed);
    let server = server(SLOW_MS);
    // Without an order nothing waits for another session.
    let (_, _, report) = play(&server, 1, Options::default());
    let lag = &report.lag;
    // It was due at 900, and the answer came 1,000 ms after 500 at the earliest.
    assert!(lag.server_busy.max_us > 599_000.0 && lag.order_wait.max_us == 0.0, "{lag:?}");
    assert!(lag.replayer_late.max_us < 500_000.0, "{lag:?}");

    let (seen, played, report) = play(&server, 1, Options { order_commit: true, ..Options::default() });
    for (_, text, _, sent) in UNITS {
        assert!(seen[text] >= ms(sent), "{text}: {seen:?}");
    }
    // The one waited for the answer of its session, the other for the commit of the first.
    for text in [A3, INSERT] {
        assert!(seen[text] >= seen[SLOW] + ms(SLOW_MS), "{text}: {seen:?}");
    }
    assert!(played.elapsed >= ms(500 + SLOW_MS));
    let lag = &report.lag;
    assert!(lag.server_busy.max_us > 599_000.0, "{lag:?}");
    // It was due at 700, and waited from then on, or from when it was free to.
    assert!(lag.total.max_us > 799_000.0 && lag.order_wait.max_us > 100_000.0, "{lag:?}");
    assert!(lag.latency_from_due.max_us > 999_000.0, "{lag:?}");
    // Neither is the replayer's fault.
    assert!(lag.replayer_late.max_us < 500_000.0, "{lag:?}");
    assert_eq!(lag.total.count, UNITS.len());

    // The slowest group comes first.
    let slow = &report.groups[0];
    assert_eq!(slow.statement, SLOW);
    let near = |us: f64| (us - 1000.0 * ANSWER as f64).abs() < 1.0;
    assert!(slow.there.count == 1 && near(slow.there.p50_us), "{slow:?}");
    assert!(slow.here.p50_us > 999_000.0, "{slow:?}");
    let ratio = slow.ratio.expect("a ratio");
    assert!(ratio.low > 99.0 && ratio.rounds == 1, "{slow:?}");
    assert!((report.captured_s - 1.0).abs() < 0.001, "{}", report.captured_s);
}

#[test]
fn clients_that_think_pause_after_a_slow_answer_as_long_as_after_a_fast_one() {
    let (seen, _, report) = play(&server(SLOW_MS), 1, Options { pace: Pace::Think, ..Options::default() });
    let pause = |from: &str, to: &str| seen[to].saturating_sub(seen[from]);
    for (from, to) in [(A1, SLOW), (B1, INSERT)] {
        assert!(pause(from, to) >= ms(400 - ANSWER), "{from}, {to}: {seen:?}");
    }
    assert!(pause(SLOW, A3) >= ms(SLOW_MS + 400 - ANSWER), "{seen:?}");
    // Nothing is due before it is answered.
    assert!(report.lag.server_busy.max_us < 300_000.0, "{:?}", report.lag);
}

#[test]
fn time_runs_faster() {
    let server = server(0);
    for (pace, name, shortest) in [
        (Pace::Timed, "timed", END),
        // The pauses of the first session: from its login to its end.
        (Pace::Think, "think", END - 4 * ANSWER),
    ] {
        // A trace of 20 seconds.
        let (seen, played, report) = play(&server, 20, Options { pace, speed: 20.0, ..Options::default() });
        assert!(played.elapsed >= ms(shortest) && played.elapsed < ms(15_000), "{:?}", played.elapsed);
        if pace == Pace::Timed {
            assert!(UNITS.iter().all(|(_, text, _, sent)| seen[text] >= ms(*sent)), "{seen:?}");
        }
        assert_eq!((report.pace, report.speed), (name, 20.0));
        assert!((report.captured_s - 20.0).abs() < 0.001, "{}", report.captured_s);
        server.sql("truncate t").expect("an empty table");
    }
    // One of an hour, at once.
    let (_, played, _) = play(&server, 3600, Options { pace: Pace::Asap, ..Options::default() });
    assert!(played.elapsed < ms(15_000), "{:?}", played.elapsed);
}

#[test]
fn time_runs_slower() {
    let (seen, played, _) = play(&server(0), 1, Options { speed: 0.5, ..Options::default() });
    assert!(UNITS.iter().all(|(_, text, _, sent)| seen[text] >= ms(2 * sent)), "{seen:?}");
    assert!(played.elapsed >= ms(2 * END), "{:?}", played.elapsed);
}
