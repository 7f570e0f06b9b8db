// SPDX-License-Identifier: Apache-2.0
//! What ran in a trace of MySQL's protocol, from records as a recorder would write them.

use underpass_mysql::packet::put_message;
use underpass_trace::statements::{CAPABILITIES, Event, Statement, Statements, Transaction};
use underpass_trace::*;

use TransactionStatus::{Idle, Transaction as Open};

const SESSION: SessionId = SessionId(1);

struct Session {
    statements: Statements,
    offset: u64,
    now: u64,
    found: Vec<Statement>,
    transactions: Vec<Transaction>,
}

impl Session {
    fn new() -> Self {
        let statements = Statements::new(Protocol::Mysql);
        Self { statements, offset: 0, now: 0, found: Vec::new(), transactions: Vec::new() }
    }

    fn push(&mut self, record: &Record<'_>) {
        let mut events = Vec::new();
        self.statements.push(record, &mut events);
        for event in events {
            match event {
                Event::Statement(statement) => self.found.push(*statement),
                Event::Transaction(transaction) => self.transactions.push(transaction),
            }
        }
    }

    /// A message of the client in a packet of this number; its time and offset.
    fn send(&mut self, number: u8, payload: &[u8]) -> (u64, u64) {
        let mut message = Vec::new();
        put_message(&mut message, number, payload);
        self.now += 1;
        let offset = self.offset;
        self.offset += message.len() as u64;
        self.push(&Record::Frontend(Frontend::new(SESSION, self.now, offset, message)));
        (self.now, offset)
    }

    fn answer(&mut self, request: u64, tag: &[u8], status: TransactionStatus) {
        self.now += 1;
        let (session, offset, time_ns) = (SESSION, 0, self.now);
        self.push(&Record::Response(Response {
            session,
            request,
            offset,
            len: 10,
            first_ns: time_ns,
            last_ns: time_ns,
            rows: 0,
            outcome: Outcome::Complete { tag: tag.into() },
        }));
        self.push(&Record::Ready(Ready { session, time_ns, request, offset, status }));
    }

    fn run(&mut self, payload: &[u8], tag: &[u8], status: TransactionStatus) -> u64 {
        let (time_ns, request) = self.send(0, payload);
        self.answer(request, tag, status);
        time_ns
    }

    fn texts(&self) -> Vec<String> {
        let text = |s: &Statement| String::from_utf8_lossy(s.text.as_deref().unwrap_or(b"?")).into_owned();
        self.found.iter().map(text).collect()
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
