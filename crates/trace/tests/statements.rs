// SPDX-License-Identifier: Apache-2.0
//! What ran, with which text and parameters: told by what the server did, not by what the client hoped.

mod common;

use common::session::{SESSION, Session};
use underpass_trace::statements::{Request, Transaction};
use underpass_trace::*;
use underpass_wire::frontend::{Target, build};

impl Session {
    fn new() -> Self {
        Self::of(Protocol::Postgres)
    }

    /// The client's message; its offset.
    fn send(&mut self, build: impl FnOnce(&mut Vec<u8>)) -> u64 {
        let mut message = Vec::new();
        build(&mut message);
        self.message(message)
    }

    fn complete(&mut self, request: u64, rows: u64) {
        self.outcome(request, rows, Outcome::Complete { tag: b"OK"[..].into() });
    }

    fn fail(&mut self, request: u64) {
        self.outcome(request, 0, refused());
    }

    fn ready(&mut self, request: u64, status: TransactionStatus) {
        self.now += 1;
        self.ready_at(self.now, request, status);
    }
}

fn refused() -> Outcome<'static> {
    Outcome::Error(ErrorOutcome { sqlstate: *b"22012", fatal: false, message: b""[..].into() })
}

#[test]
fn a_query_with_several_statements_is_one() {
    let mut s = Session::new();
    let query = s.send(|out| build::query(out, b"select 1; select 2"));
    s.complete(query, 1);
    s.complete(query, 2);
    assert!(s.found.is_empty(), "it may go on");
    s.ready(query, TransactionStatus::Idle);
    let [one] = &s.found[..] else { panic!("{:?}", s.found) };
    assert_eq!((one.kind, one.rows, one.bytes, one.answers), (Request::Simple, 3, 20, 2));
    assert_eq!((one.time_ns, one.first_ns, one.end_ns), (1, 2, 3));
}

#[test]
fn a_pipeline_has_its_texts_and_parameters() {
    let mut s = Session::new();
    s.send(|out| build::parse(out, b"s", b"select $1", [23]));
    s.send(|out| build::bind(out, b"", b"s", [1], [Some(&[0, 0, 0, 7][..])], []));
    let first = s.send(|out| build::execute(out, b"", 0));
    s.send(|out| build::bind(out, b"p", b"s", [], [None], []));
    let second = s.send(|out| build::execute(out, b"p", 5));
    let sync = s.send(build::sync);
    s.complete(first, 1);
    assert_eq!(s.found.len(), 1);
    s.outcome(second, 5, Outcome::Suspended);
    s.ready(sync, TransactionStatus::Idle);
    assert_eq!(s.texts(), ["select $1", "select $1"]);
    let [one, other] = &s.found[..] else { panic!() };
    assert_eq!(one.parameters.values, [Some(vec![0, 0, 0, 7])]);
    assert_eq!((one.parameters.format(0), &one.parameters.types[..]), (1, &[23][..]));
    assert_eq!(
        (other.parameters.values.as_slice(), other.max_rows, &*other.name),
        (&[None][..], 5, &b"s"[..])
    );
    assert_eq!(other.outcome, Outcome::Suspended);
}

#[test]
fn what_the_server_skipped_did_not_happen() {
    let mut s = Session::new();
    s.send(|out| build::parse(out, b"s", b"select 1", []));
    let sync = s.send(build::sync);
    s.ready(sync, TransactionStatus::Idle);
    // The client's pipeline fails at its first statement: neither Close nor Parse behind it were done.
    s.send(|out| build::bind(out, b"", b"s", [], [], []));
    let fails = s.send(|out| build::execute(out, b"", 0));
    s.send(|out| build::close(out, Target::Statement, b"s"));
    s.send(|out| build::parse(out, b"s", b"select 2", []));
    s.send(|out| build::bind(out, b"", b"s", [], [], []));
    s.send(|out| build::execute(out, b"", 0));
    let sync = s.send(build::sync);
    // The next one is on its way already.
    s.send(|out| build::bind(out, b"", b"s", [], [], []));
    let last = s.send(|out| build::execute(out, b"", 0));
    let end = s.send(build::sync);
    s.fail(fails);
    s.ready(sync, TransactionStatus::Idle);
    s.complete(last, 1);
    s.ready(end, TransactionStatus::Idle);
    assert_eq!(s.texts(), ["select 1", "select 1"]);
    assert!(matches!(s.found[0].outcome, Outcome::Error(_)));
    assert!(matches!(s.found[1].outcome, Outcome::Complete { .. }));
}

#[test]
fn a_parse_that_failed_defined_nothing() {
    let mut s = Session::new();
    let parse = s.send(|out| build::parse(out, b"s", b"selekt", []));
    let sync = s.send(build::sync);
    s.fail(parse);
    s.ready(sync, TransactionStatus::Idle);
    s.send(|out| build::bind(out, b"", b"s", [], [], []));
    let execute = s.send(|out| build::execute(out, b"", 0));
    s.complete(execute, 0);
    assert_eq!(s.texts(), ["selekt", "?"]);
    assert_eq!((s.found[0].kind, s.found[1].kind), (Request::Prepare, Request::Extended));
}

#[test]
fn what_fails_before_it_runs_is_a_statement_that_failed() {
    let mut s = Session::new();
    s.send(|out| build::parse(out, b"s", b"select $1", [23]));
    s.send(|out| build::describe(out, Target::Statement, b"s"));
    let sync = s.send(build::sync);
    s.ready(sync, TransactionStatus::Idle);
    assert!(s.found.is_empty(), "what works before it runs is none");
    let bind = s.send(|out| build::bind(out, b"p", b"s", [], [Some(&b"x"[..])], []));
    s.send(|out| build::describe(out, Target::Portal, b"p"));
    s.send(|out| build::execute(out, b"p", 0));
    let sync = s.send(build::sync);
    s.fail(bind);
    s.ready(sync, TransactionStatus::Idle);
    let describe = s.send(|out| build::describe(out, Target::Statement, b"s"));
    let sync = s.send(build::sync);
    s.fail(describe);
    s.ready(sync, TransactionStatus::Idle);
    let nobody = s.send(|out| build::describe(out, Target::Portal, b"p"));
    let sync = s.send(build::sync);
    s.fail(nobody);
    s.ready(sync, TransactionStatus::Idle);
    assert_eq!(s.texts(), ["select $1", "select $1", "?"]);
    for one in &s.found {
        assert_eq!((one.kind, one.answers), (Request::Prepare, 1));
        assert!(matches!(one.outcome, Outcome::Error(_)) && one.end_ns > one.time_ns, "{one:?}");
    }
    assert_eq!((s.found[0].request, &*s.found[0].name), (bind, &b"s"[..]));
    assert_eq!(s.found[0].parameters.values, [Some(b"x".to_vec())]);
    assert_eq!((&*s.found[1].name, s.found[1].request), (&b"s"[..], describe));
}

#[test]
fn an_error_of_the_commit_skips_nothing() {
    let mut s = Session::new();
    s.send(|out| build::parse(out, b"", b"insert", []));
    s.send(|out| build::bind(out, b"", b"", [], [], []));
    let execute = s.send(|out| build::execute(out, b"", 0));
    let sync = s.send(build::sync);
    let query = s.send(|out| build::query(out, b"select 1"));
    s.complete(execute, 0);
    s.fail(sync);
    s.ready(sync, TransactionStatus::Idle);
    s.complete(query, 1);
    s.ready(query, TransactionStatus::Idle);
    assert_eq!(s.texts(), ["insert", "?", "select 1"]);
    let kinds: Vec<Request> = s.found.iter().map(|one| one.kind).collect();
    assert_eq!(kinds, [Request::Extended, Request::Commit, Request::Simple]);
    assert_eq!((s.found[1].request, &s.found[1].outcome), (sync, &refused()));
}

#[test]
fn statements_of_before_the_recording_get_their_text() {
    let mut s = Session::new();
    s.push(&Record::PreparedFill(PreparedFill {
        session: SESSION,
        time_ns: 0,
        name: b"old"[..].into(),
        query: b"select old"[..].into(),
        param_types: vec![],
        redaction: Redaction::None,
    }));
    for name in [&b"old"[..], b"unknown"] {
        s.send(|out| build::bind(out, b"", name, [], [], []));
        let execute = s.send(|out| build::execute(out, b"", 0));
        s.complete(execute, 0);
    }
    assert_eq!(s.texts(), ["select old", "?"]);
}

#[test]
fn transactions_have_a_length() {
    let mut s = Session::new();
    let begin = s.send(|out| build::query(out, b"begin"));
    s.complete(begin, 0);
    s.ready(begin, TransactionStatus::Transaction);
    let broken = s.send(|out| build::query(out, b"select 1/0"));
    s.fail(broken);
    s.ready(broken, TransactionStatus::Failed);
    let end = s.send(|out| build::query(out, b"rollback"));
    s.complete(end, 0);
    s.ready(end, TransactionStatus::Idle);
    let transaction = Transaction { session: SESSION, start_ns: 1, end_ns: 9, requests: 3, failed: true };
    assert_eq!(s.transactions, [transaction]);
    // A statement outside of a block is none.
    let alone = s.send(|out| build::query(out, b"select 1"));
    s.complete(alone, 1);
    s.ready(alone, TransactionStatus::Idle);
    assert_eq!(s.transactions.len(), 1);
}

#[test]
fn without_summaries_statements_still_count() {
    let mut s = Session::new();
    let query = s.send(|out| build::query(out, b"select 1"));
    s.ready(query, TransactionStatus::Idle);
    assert_eq!((s.texts(), s.found[0].answers, s.found[0].end_ns), (vec!["select 1".to_owned()], 0, 2));
    assert_eq!(s.found[0].outcome, Outcome::Unknown);
}

fn loss(time_ns: u64) -> Record<'static> {
    Record::Loss(Loss {
        session: Some(SESSION),
        time_ns,
        direction: Direction::Backend,
        offset: 0,
        len: 1,
        reason: LossReason::RingFull,
    })
}

#[test]
fn what_was_under_way_at_a_loss_has_no_known_outcome() {
    let mut s = Session::new();
    s.send(|out| build::parse(out, b"s", b"select kept", []));
    let sync = s.send(build::sync);
    s.ready(sync, TransactionStatus::Idle);
    s.send(|out| build::query(out, b"lost"));
    s.push(&loss(s.now + 1));
    s.now += 1000;
    s.send(|out| build::bind(out, b"", b"s", [], [], []));
    let execute = s.send(|out| build::execute(out, b"", 0));
    s.complete(execute, 0);
    assert_eq!(s.texts(), ["lost", "select kept"]);
    assert_eq!((&s.found[0].outcome, s.found[0].end_ns - s.found[0].time_ns), (&Outcome::Unknown, 1));
}

#[test]
fn what_is_told_of_a_statement_behind_a_loss_counts() {
    let mut s = Session::new();
    s.send(|out| build::parse(out, b"", b"select $1", []));
    s.send(|out| build::bind(out, b"", b"", [], [Some(&b"x"[..])], []));
    let first = s.send(|out| build::execute(out, b"", 0));
    s.push(&loss(s.now));
    let second = s.send(|out| build::execute(out, b"", 0));
    s.complete(first, 7);
    s.complete(second, 1);
    // The Bind may have failed: whose portal that of the second is nobody knows.
    assert_eq!(s.texts(), ["select $1", "?"]);
    assert_eq!((s.found[0].rows, &s.found[0].parameters.values[..]), (7, &[Some(b"x".to_vec())][..]));
}

#[test]
fn what_was_not_answered_at_the_end_of_a_session_has_no_known_outcome() {
    let mut s = Session::new();
    let query = s.send(|out| build::query(out, b"select pg_terminate_backend(pg_backend_pid())"));
    s.fail(query);
    s.send(|out| build::query(out, b"select 2"));
    s.push(&Record::SessionEnd(SessionEnd {
        session: SESSION,
        time_ns: s.now,
        reason: EndReason::ServerClosed,
        frontend: ByteTotals::default(),
        backend: ByteTotals::default(),
    }));
    assert_eq!(s.texts(), ["select pg_terminate_backend(pg_backend_pid())", "select 2"]);
    assert!(matches!(s.found[0].outcome, Outcome::Error(_)));
    assert_eq!(s.found[1].outcome, Outcome::Unknown);
}

#[test]
fn a_query_behind_a_parse_that_failed_did_not_happen() {
    let mut s = Session::new();
    let parse = s.send(|out| build::parse(out, b"", b"selekt", []));
    s.send(|out| build::query(out, b"skipped"));
    let sync = s.send(build::sync);
    s.fail(parse);
    s.ready(sync, TransactionStatus::Idle);
    assert_eq!(s.texts(), ["selekt"]);
}
