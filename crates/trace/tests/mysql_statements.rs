// SPDX-License-Identifier: Apache-2.0
//! What ran in a trace of MySQL's protocol, from records as a recorder would write them.

mod common;

use common::session::{SESSION, Session};
use underpass_mysql::packet::put_message;
use underpass_trace::statements::{CAPABILITIES, Request};
use underpass_trace::*;

use TransactionStatus::{Idle, Transaction as Open};

impl Session {
    fn new() -> Self {
        Self::of(Protocol::Mysql)
    }

    /// A message of the client in a packet of this number; its time and offset.
    fn send(&mut self, number: u8, payload: &[u8]) -> (u64, u64) {
        let mut message = Vec::new();
        put_message(&mut message, number, payload);
        let offset = self.message(message);
        (self.now, offset)
    }

    fn answer(&mut self, request: u64, tag: &[u8], status: TransactionStatus) {
        self.outcome(request, 0, Outcome::Complete { tag: tag.into() });
        self.ready_at(self.now, request, status);
    }

    fn run(&mut self, payload: &[u8], tag: &[u8], status: TransactionStatus) -> u64 {
        let (time_ns, request) = self.send(0, payload);
        self.answer(request, tag, status);
        time_ns
    }
}

#[test]
fn a_statement_that_is_closed_is_no_part_of_the_next_transaction() {
    let mut session = Session::new();
    session.run(b"\x16select ?", b"PREPARE 7 1", Idle);
    session.run(b"\x17\x07\0\0\0\0\x01\0\0\0\x01", b"ROWS 1", Idle);
    session.send(0, b"\x19\x07\0\0\0");
    session.now += 1_000;
    let begin_ns = session.run(b"\x03begin", b"OK 0", Open);
    session.run(b"\x03commit", b"OK 0", Idle);
    let [transaction] = session.transactions[..] else { panic!("{:?}", session.transactions) };
    assert_eq!((transaction.start_ns, transaction.requests), (begin_ns, 2));
    // And its number is nobody's.
    session.run(b"\x17\x07\0\0\0\0\x01\0\0\0\x01", b"OK 0", Idle);
    assert_eq!(session.texts(), ["select ?", "begin", "commit", "?"]);
}

#[test]
fn a_packet_of_a_local_file_is_no_command_whatever_its_number() {
    let mut session = Session::new();
    let (_, request) = session.send(0, b"\x03load data local infile 'x' into table t");
    for at in 0..300_u32 {
        // Numbers wrap: the file's 255th packet has number 0, and looks like a query.
        session.send((at + 2) as u8, b"\x03drop table t");
    }
    session.send(46, b"");
    session.answer(request, b"OK 300", Idle);
    session.run(b"\x03select 1", b"ROWS 1", Idle);
    assert_eq!(session.texts(), ["load data local infile 'x' into table t", "select 1"]);

    // A file whose answer is lost ends there, too.
    session.send(0, b"\x03load data local infile 'y' into table t");
    session.send(2, b"data");
    session.push(&Record::Loss(Loss {
        session: Some(SESSION),
        time_ns: session.now,
        direction: Direction::Backend,
        offset: 0,
        len: 10,
        reason: LossReason::Gap,
    }));
    session.run(b"\x03select 2", b"ROWS 1", Idle);
    assert_eq!(session.texts().last().unwrap(), "select 2");
}

#[test]
fn an_attribute_of_the_client_is_not_taken_for_its_capabilities() {
    let with_attributes = underpass_mysql::capability::QUERY_ATTRIBUTES.to_string();
    let mut session = Session::new();
    session.push(&Record::SessionStart(SessionStart {
        session: SESSION,
        time_ns: 0,
        ready_ns: Some(0),
        source: Source::Synthetic,
        transport: Transport::Tcp,
        peer: None,
        backend_pid: None,
        midstream: false,
        protocol_version: 10 << 16,
        database: None,
        user: None,
        application_name: None,
        parameters: vec![
            (CAPABILITIES.into(), b"1"[..].into()),
            (CAPABILITIES.into(), with_attributes.as_bytes().into()),
        ],
        frontend_offset: 0,
        backend_offset: 0,
    }));
    session.run(b"\x03\0\x01select 1", b"ROWS 1", Idle);
    assert_eq!(session.texts(), ["select 1"]);
}

#[test]
fn what_is_executed_behind_a_prepare_that_fails_is_not_the_statement_before() {
    let last = |session: &mut Session| session.send(0, b"\x17\xff\xff\xff\xff\0\x01\0\0\0").1;
    let error =
        || Outcome::Error(ErrorOutcome { sqlstate: *b"42000", fatal: false, message: b"no"[..].into() });
    let mut session = Session::new();
    session.run(b"\x16select 1", b"PREPARE 7 0", Idle);
    // Both are sent before the first is answered.
    let (_, prepare) = session.send(0, b"\x16selct 2");
    let execute = last(&mut session);
    for request in [prepare, execute] {
        session.outcome(request, 0, error());
        session.ready_at(session.now, request, Idle);
    }
    session.run(b"\x16select 3", b"PREPARE 8 0", Idle);
    let execute = last(&mut session);
    session.answer(execute, b"ROWS 1", Idle);
    assert_eq!(session.texts(), ["selct 2", "selct 2", "select 3"]);
    let kinds: Vec<Request> = session.found.iter().map(|one| one.kind).collect();
    assert_eq!(kinds, [Request::Prepare, Request::Extended, Request::Extended]);
}
