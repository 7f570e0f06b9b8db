// SPDX-License-Identifier: Apache-2.0
//! Rows that differ, from those of the capture or of another server, and those that do not.

mod recorder;

use std::collections::BTreeMap;

use recorder::Recorder;
use underpass_replay::compare::Kind;
use underpass_replay::plan::{self, Rows};
use underpass_replay::report::Report;
use underpass_replay::run::{Options, Pace};
use underpass_replay::{Identities, Target};
use underpass_testkit::{Batch, Client, Options as ClientOptions, Postgres};
use underpass_trace::{Level, Meta, Record};

/// What the client asks by simple queries: a result in an order that is said, one in whatever order, and a change.
const ASKED: [&str; 3] =
    ["select id, v from t order by id", "select id, v from t", "update t set v = v where id < 3"];

/// A server with these rows, stored in this order.
fn server(rows: &str) -> Postgres {
    let server = Postgres::start().expect("PostgreSQL");
    fill(&server, rows);
    server
}

/// The same in a server that is there.
fn fill(server: &Postgres, rows: &str) {
    let fresh = "drop table if exists t; create table t (id int, v text)";
    server.sql(&format!("{fresh}; insert into t values {rows}")).expect("setup");
}

const ROWS: &str = "(1, 'a'), (2, 'b'), (3, null)";
/// The same in another order.
const MOVED: &str = "(3, null), (2, 'b'), (1, 'a')";
/// One value is another, of the same length.
const CHANGED: &str = "(1, 'a'), (2, 'X'), (3, null)";
/// What was NULL is empty.
const EMPTIED: &str = "(1, 'a'), (2, 'b'), (3, '')";
/// One row is missing.
const FEWER: &str = "(1, 'a'), (3, null)";

fn record(server: &Postgres, level: Level) -> (Meta, Vec<Record<'static>>) {
    let recorder = Recorder::start(server.port(), level);
    let mut client =
        Client::connect(&ClientOptions::new(recorder.port(), "postgres", "postgres")).expect("connect");
    for query in ASKED {
        client.query(query).expect("an answer").ok().expect("no error");
    }
    let batch = Batch::new().extended("select v from t where id = $1", &[Some("2")]).sync();
    client.exchange(&batch).expect("an answer");
    client.terminate().expect("terminate");
    (recorder::meta(server, level), recorder.records())
}

fn target(server: &Postgres) -> Target {
    recorder::target(server.port(), Identities::default())
}

fn options(rows: Rows) -> (plan::Options, Options) {
    (
        plan::Options { rows, ..plan::Options::default() },
        Options { pace: Pace::Asap, rows, ..Options::default() },
    )
}

/// What differs, with the statements.
fn told(report: &Report) -> BTreeMap<(Kind, &str), u64> {
    assert_eq!(report.is_equal(), report.divergences.is_empty(), "{}", report.text());
    report.divergences.iter().map(|one| ((one.kind, one.statement.as_str()), one.count)).collect()
}

#[test]
fn rows_that_differ_from_the_captured_ones_are_told() {
    let (meta, records) = record(&server(ROWS), Level::Full);
    let copy = Postgres::start().expect("PostgreSQL");
    // An update moves rows, so each comparison has its own.
    let compare = |rows: Rows, with: &str| {
        fill(&copy, with);
        let (planned, played) = options(rows);
        let plan = recorder::plan(&meta, &records, &planned);
        recorder::play(plan, target(&copy), played).2
    };
    let one_by_one = "select v from t where id = $1";
    for rows in [Rows::Ordered, Rows::Unordered] {
        let report = compare(rows, ROWS);
        assert!(report.is_equal() && report.counts.equal == 4, "{}", report.text());
        let report = compare(rows, CHANGED);
        let contents = [ASKED[0], ASKED[1], one_by_one].map(|text| ((Kind::RowContents, text), 1));
        assert_eq!(told(&report), BTreeMap::from(contents), "{}", report.text());
        assert!(report.text().contains("other rows"), "{}", report.text());
        let report = compare(rows, EMPTIED);
        let contents = [ASKED[0], ASKED[1]].map(|text| ((Kind::RowContents, text), 1));
        assert_eq!(told(&report), BTreeMap::from(contents), "{}", report.text());
    }
    // Their number is the same.
    let report = compare(Rows::Count, CHANGED);
    assert!(report.is_equal() && report.counts.equal == 4, "{}", report.text());
    // The order counts where that is asked for.
    let report = compare(Rows::Ordered, MOVED);
    assert_eq!(told(&report), [((Kind::RowContents, ASKED[1]), 1)].into(), "{}", report.text());
    let report = compare(Rows::Unordered, MOVED);
    assert!(report.is_equal() && report.counts.equal == 4, "{}", report.text());
}

/// The capture has no rows, and the two servers have others than it had, and yet the same.
#[test]
fn two_servers_are_compared_with_each_other_and_not_with_the_capture() {
    let (meta, records) = record(&server(ROWS), Level::Summary);
    let compare = |rows: Rows, one: &Postgres, other: &Postgres| {
        let (planned, played) = options(rows);
        let plan = recorder::plan(&meta, &records, &planned);
        recorder::play_both(plan, &target(one), &target(other), &played)
    };
    let (one, other) = (server(FEWER), server(FEWER));
    for rows in [Rows::Count, Rows::Ordered, Rows::Unordered] {
        let report = compare(rows, &one, &other);
        assert!(report.is_equal() && report.counts.equal == 4, "{}", report.text());
        assert_eq!(report.compared_with, target(&one).name());
        // How long it took is compared, too.
        assert!(report.groups.iter().all(|group| group.ratio.is_some_and(|it| it.median > 0.0)));
    }
    fill(&one, ROWS);
    fill(&other, CHANGED);
    let contents = [ASKED[0], ASKED[1], "select v from t where id = $1"];
    let contents = contents.map(|text| ((Kind::RowContents, text), 1));
    assert_eq!(told(&compare(Rows::Ordered, &one, &other)), BTreeMap::from(contents));
    assert!(compare(Rows::Count, &one, &other).is_equal());
    fill(&other, FEWER);
    let report = compare(Rows::Count, &one, &other);
    let kinds: Vec<Kind> = told(&report).keys().map(|(kind, _)| *kind).collect();
    assert_eq!(kinds, [Kind::Rows; 4], "{}", report.text());
    // What fails on one and not on the other.
    for (strict, kind) in [(&one, Kind::NoError), (&other, Kind::Error)] {
        fill(&one, FEWER);
        fill(&other, FEWER);
        strict.sql("alter table t add check (v <> 'a') not valid").expect("a check");
        let report = compare(Rows::Ordered, &one, &other);
        let kinds: Vec<Kind> = told(&report).keys().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, [kind], "{}", report.text());
    }
}
