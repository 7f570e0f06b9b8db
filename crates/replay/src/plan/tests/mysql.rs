// SPDX-License-Identifier: Apache-2.0
//! Plans of sessions of MariaDB and MySQL.

use std::time::Duration;

use underpass_mysql::packet;
use underpass_trace::{ParameterStatus, Withheld, WithheldReason};

use super::*;

const PASSWORD: &[u8] = b"\x16alter user joe identified by '******'";

/// One session.
#[derive(Default)]
struct Commands {
    records: Vec<Record<'static>>,
    next: u64,
}

impl Commands {
    fn start(midstream: bool) -> Self {
        Self { records: Trace::default().start(1, 0, midstream).records.clone(), next: 0 }
    }

    fn send(&mut self, time_ns: u64, payload: &[u8]) -> u64 {
        let mut bytes = Vec::new();
        packet::put_message(&mut bytes, 0, payload);
        let at = self.next;
        self.next += bytes.len() as u64;
        self.records.push(Record::Frontend(Frontend::new(SessionId(1), time_ns, at, bytes)));
        at
    }

    fn withhold(&mut self, time_ns: u64, reason: WithheldReason) -> u64 {
        let (session, direction, offset, len) = (SessionId(1), Direction::Frontend, self.next, 20);
        self.next += len;
        self.records.push(Record::Withheld(Withheld { session, time_ns, direction, offset, len, reason }));
        offset
    }

    /// A command and its answer, a nanosecond later.
    fn run(&mut self, time_ns: u64, payload: &[u8], tag: &str, status: TransactionStatus) {
        let request = self.send(time_ns, payload);
        self.answer(time_ns + 1, request, tag, status);
    }

    fn answer(&mut self, time_ns: u64, request: u64, tag: &str, status: TransactionStatus) {
        let session = SessionId(1);
        self.records.push(Record::Response(Response {
            session,
            request,
            offset: 0,
            len: 0,
            first_ns: time_ns,
            last_ns: time_ns,
            rows: 0,
            outcome: Outcome::Complete { tag: tag.as_bytes().to_vec().into() },
        }));
        self.records.push(Record::Ready(Ready { session, time_ns, request, offset: 0, status }));
    }

    fn plan(&self, options: &Options) -> Plan {
        let meta = Meta { protocol: underpass_trace::Protocol::Mysql, ..Meta::default() };
        from_records(meta, self.records.clone(), options).unwrap()
    }
}

/// COM_STMT_EXECUTE with one parameter, a string, whose type is told or not.
fn execute(number: u32, types: &[u8]) -> Vec<u8> {
    let mark = [u8::from(!types.is_empty())];
    [&[0x17][..], &number.to_le_bytes(), &[0, 1, 0, 0, 0], &[0], &mark, types, b"\x01x"].concat()
}

const STRING: &[u8] = &[0xfd, 0];

fn from(ns: u64) -> Options {
    let filter = Filter { from: Some(Duration::from_nanos(ns)), ..Filter::default() };
    Options { filter, ..Options::default() }
}

#[test]
fn statements_prepared_before_the_wanted_time_are_prepared() {
    let mut trace = Commands::start(false);
    trace.run(1, b"\x16select ?", "PREPARE 1 1", I);
    trace.run(3, b"\x16delete from t where a = ?", "PREPARE 2 1", I);
    trace.run(5, b"\x16select 2", "PREPARE 3 0", I);
    trace.run(7, &execute(1, STRING), "ROWS 1", I);
    trace.run(9, &execute(2, STRING), "OK 1", I);
    // 3 is not used again, and 2 is another one when it is.
    trace.send(11, b"\x19\x02\0\0\0");
    trace.run(12, b"\x16select ?, 2", "PREPARE 2 1", I);
    trace.run(50, &execute(1, &[]), "ROWS 1", I);
    trace.run(52, &execute(1, &[]), "ROWS 1", I);
    trace.run(54, &execute(2, STRING), "ROWS 1", I);
    let plan = trace.plan(&from(40));
    let out = Some(Reason::Filter);
    assert_eq!(omitted(&plan), [None, out, out, out, out, None, None, None, None]);
    // The server has not seen the execution that told the types.
    let mut with_types = Vec::new();
    packet::put_message(&mut with_types, 0, &execute(1, STRING));
    assert_eq!(sent(&plan, 0, 6), [with_types]);
    let mut without = Vec::new();
    packet::put_message(&mut without, 0, &execute(1, &[]));
    assert_eq!(sent(&plan, 0, 7), [without]);
}

#[test]
fn a_reset_before_the_wanted_time_forgets_what_was_prepared() {
    let mut trace = Commands::start(false);
    trace.run(1, b"\x16select ?", "PREPARE 1 1", I);
    trace.run(3, b"\x1f", "OK 0", I);
    trace.run(50, b"\x03select 1", "ROWS 1", I);
    let plan = trace.plan(&from(40));
    let out = Some(Reason::Filter);
    assert_eq!(omitted(&plan), [out, out, None]);
    // Nothing is played of a session that only prepared.
    let mut trace = Commands::start(false);
    trace.run(1, b"\x16select ?", "PREPARE 1 1", I);
    assert!(trace.plan(&from(40)).sessions.is_empty());
}

#[test]
fn what_was_prepared_with_a_password_is_not_executed() {
    let mut trace = Commands::start(false);
    trace.run(1, PASSWORD, "PREPARE 1 0", I);
    if let Some(Record::Frontend(frontend)) = trace.records.get_mut(1) {
        frontend.redaction = Redaction::Password;
    }
    trace.run(3, b"\x17\x01\0\0\0\0\x01\0\0\0", "OK 0", I);
    trace.run(5, b"\x03select 1", "ROWS 1", I);
    let password = Some(Reason::Password);
    assert_eq!(omitted(&trace.plan(&Options::default())), [password, password, None]);
}

#[test]
fn databases_are_created_and_dropped_by_commands_that_write() {
    let mut trace = Commands::start(false);
    trace.run(1, b"\x05shop", "OK 0", I);
    trace.run(3, b"\x06shop", "OK 0", I);
    let plan = trace.plan(&Options::default());
    assert!(plan.sessions[0].units.iter().all(|unit| unit.may_write));
    let plan = trace.plan(&Options { read_only: true, ..Options::default() });
    assert_eq!(omitted(&plan), [Some(Reason::ReadOnly); 2]);
}

/// A PREPARE is no part of the transaction, and stays.
#[test]
fn a_session_joined_in_a_transaction_begins_after_it() {
    let mut trace = Commands::start(true);
    trace.run(1, b"\x16select ?", "PREPARE 1 1", T);
    trace.run(3, b"\x03update t set a = 1", "OK 1", T);
    trace.run(5, &execute(1, STRING), "ROWS 1", T);
    trace.run(7, b"\x03rollback", "OK 0", I);
    trace.run(9, &execute(1, &[]), "ROWS 1", I);
    let plan = trace.plan(&Options::default());
    let cut = Some(Reason::MidstreamTransaction);
    assert_eq!(omitted(&plan)[..4], [None, cut, cut, cut]);
    // Its types were told in the transaction.
    assert_eq!(omitted(&plan)[4], cut);
}

#[test]
fn executions_that_masking_left_out_are_counted() {
    let mut trace = Commands::start(false);
    trace.run(1, b"\x16select ?", "PREPARE 1 1", I);
    for time_ns in [3, 5] {
        let offset = trace.withhold(time_ns, WithheldReason::Masking);
        trace.answer(time_ns + 1, offset, "ROWS 1", I);
    }
    trace.run(7, b"\x03select 1", "ROWS 1", I);
    let plan = trace.plan(&Options::default());
    assert_eq!(format!("{:?}", plan.omitted.units), "{Masked: 2}");
    assert_eq!(omitted(&plan), [None, None]);
}

/// Both are withheld for a password; behind one of them the session is another user's.
#[test]
fn an_execution_with_a_password_is_told_from_a_change_of_user() {
    let mut trace = Commands::start(false);
    trace.run(1, b"\x03begin", "OK 0", TransactionStatus::Transaction);
    let offset = trace.withhold(3, WithheldReason::Authentication);
    trace.answer(4, offset, "OK 1", TransactionStatus::Transaction);
    trace.run(5, b"\x03commit", "OK 0", I);
    let offset = trace.withhold(7, WithheldReason::Authentication);
    let (session, time_ns) = (SessionId(1), 8);
    let (name, value) = (b"user"[..].into(), b"bob"[..].into());
    trace.records.push(Record::ParameterStatus(ParameterStatus { session, time_ns, name, value }));
    trace.answer(8, offset, "OK 0", I);
    trace.run(9, b"\x03select 1", "ROWS 1", I);
    let plan = trace.plan(&Options::default());
    assert_eq!(omitted(&plan), [None, None, Some(Reason::ChangedUser)]);
    assert_eq!(plan.omitted.units.get(&Reason::Password), Some(&1));
}

fn message(payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    packet::put_message(&mut bytes, 0, payload);
    bytes
}

/// COM_STMT_SEND_LONG_DATA for the first parameter.
fn long_data(number: u32, data: &[u8]) -> Vec<u8> {
    [&[0x18][..], &number.to_le_bytes(), &[0, 0], data].concat()
}

const INSERT: &[u8] = b"\x03insert into t values (1)";
const SELECT: &[u8] = b"\x03select 1";

fn read_only() -> Options {
    Options { read_only: true, ..Options::default() }
}

#[test]
fn what_is_closed_ahead_of_a_command_that_is_left_out_is_closed_ahead_of_the_next() {
    let close = |number: u32| [&[0x19][..], &number.to_le_bytes()].concat();
    let mut trace = Commands::start(false);
    for number in 1..=4u8 {
        let tag = format!("PREPARE {number} 1");
        trace.run(u64::from(2 * number), b"\x16select ?", &tag, I);
    }
    trace.send(11, &close(1));
    trace.run(11, SELECT, "ROWS 1", I);
    trace.send(13, &close(2));
    trace.run(13, INSERT, "OK 1", I);
    trace.send(15, &close(3));
    // Of this the server knows nothing.
    trace.send(15, &close(9));
    trace.run(15, INSERT, "OK 1", I);
    trace.run(17, SELECT, "ROWS 1", I);
    trace.send(19, &close(4));
    trace.run(19, INSERT, "OK 1", I);
    let plan = trace.plan(&read_only());
    let session = &plan.sessions[0];
    assert_eq!(session.closes.keys().collect::<Vec<_>>(), [&7]);
    let closed: Vec<_> =
        session.closes[&7].iter().map(|step| plan.messages.read(&step.bytes()).unwrap()).collect();
    assert_eq!(closed, [message(&close(2)), message(&close(3))]);
    assert_eq!(sent(&plan, 0, 4).concat(), [message(&close(1)), message(SELECT)].concat());
    // What is not prepared need not be closed.
    let plan = trace.plan(&from(17));
    assert_eq!(omitted(&plan)[..7], [Some(Reason::Filter); 7]);
    assert!(plan.sessions[0].closes.is_empty());
}

#[test]
fn long_data_go_with_the_execution_of_their_statement() {
    let mut trace = Commands::start(false);
    trace.run(1, b"\x16select ?", "PREPARE 1 1", I);
    trace.run(3, b"\x16delete from t where a = ?", "PREPARE 2 1", I);
    for part in [&b"long"[..], b" data"] {
        trace.send(5, &long_data(1, part));
    }
    trace.send(5, &long_data(2, b"other"));
    trace.run(5, INSERT, "OK 1", I);
    trace.run(7, SELECT, "ROWS 1", I);
    trace.run(9, &execute(1, STRING), "ROWS 1", I);
    trace.run(11, &execute(2, STRING), "OK 1", I);
    trace.send(13, &long_data(1, b"forgotten"));
    trace.run(13, b"\x1a\x01\0\0\0", "OK 0", I);
    trace.run(15, &execute(1, STRING), "ROWS 1", I);
    let plan = trace.plan(&read_only());
    let out = Some(Reason::ReadOnly);
    assert_eq!(omitted(&plan), [None, None, out, None, None, out, None, None]);
    assert_eq!(sent(&plan, 0, 3).concat(), message(SELECT));
    let executed =
        [message(&long_data(1, b"long")), message(&long_data(1, b" data")), message(&execute(1, STRING))];
    assert_eq!(sent(&plan, 0, 4).concat(), executed.concat());
    assert_eq!(sent(&plan, 0, 7).concat(), message(&execute(1, STRING)));
    // The numbers in them are replaced where they are sent.
    assert!(plan.sessions[0].statement_refs.is_sorted());
}

#[test]
fn an_execution_some_of_whose_long_data_may_be_missing_is_left_out() {
    let mut trace = Commands::start(false);
    trace.run(1, b"\x16select ?", "PREPARE 1 1", I);
    trace.send(3, &long_data(1, b"long"));
    trace.next += 100;
    trace.run(5, &execute(1, STRING), "ROWS 1", I);
    trace.run(7, &execute(1, STRING), "ROWS 1", I);
    assert_eq!(omitted(&trace.plan(&Options::default())), [None, Some(Reason::Lost), None]);
}

#[test]
fn a_transaction_that_may_write_reads_in_read_only_mode() {
    const BEGIN: &[u8] = b"START TRANSACTION WITH CONSISTENT SNAPSHOT, READ WRITE";
    const KEPT: &[u8] = b"start transaction with consistent snapshot";
    let mut trace = Commands::start(false);
    trace.run(1, &[b"\x03", BEGIN].concat(), "OK 0", T);
    trace.run(3, b"\x03commit", "OK 0", I);
    trace.run(5, &[b"\x16", BEGIN].concat(), "PREPARE 1 0", I);
    trace.run(7, b"\x17\x01\0\0\0\0\x01\0\0\0", "OK 0", T);
    trace.run(9, b"\x03set session transaction read write", "OK 0", T);
    let plan = trace.plan(&read_only());
    assert_eq!(omitted(&plan), [None, None, None, None, Some(Reason::ReadOnly)]);
    assert_eq!(sent(&plan, 0, 0), [message(&[b"\x03", KEPT].concat())]);
    assert_eq!(sent(&plan, 0, 2), [message(&[b"\x16", KEPT].concat())]);
    let plan = trace.plan(&Options::default());
    assert_eq!(sent(&plan, 0, 0), [message(&[b"\x03", BEGIN].concat())]);
}

#[test]
fn a_session_goes_to_databases_by_the_names_that_they_have_there() {
    let databases = [("shop".to_owned(), "sh`op 2".to_owned())].into();
    let options = Options { databases, ..Options::default() };
    for (payload, there) in [
        (&b"\x02shop"[..], &b"\x02sh`op 2"[..]),
        (b"\x02shopping", b"\x02shopping"),
        (b"\x03USE shop", b"\x03use `sh``op 2`"),
        (b"\x03use/* of a pool */`shop` ;", b"\x03use `sh``op 2`"),
        (b"\x16use shop", b"\x16use `sh``op 2`"),
        (b"\x03use shopping", b"\x03use shopping"),
        // As docs/replay.md says.
        (b"\x03use shop; select 1", b"\x03use shop; select 1"),
        (b"\x03select 'use shop'", b"\x03select 'use shop'"),
    ] {
        let mut trace = Commands::start(false);
        trace.run(1, payload, "OK 0", I);
        trace.run(3, b"\x03select a from t", "ROWS 1", I);
        let plan = trace.plan(&options);
        assert_eq!(sent(&plan, 0, 0), [message(there)], "{}", String::from_utf8_lossy(payload));
        assert_eq!(sent(&plan, 0, 1), [message(b"\x03select a from t")]);
        assert_eq!(sent(&trace.plan(&Options::default()), 0, 0), [message(payload)]);
    }
}

impl Commands {
    /// An execution during which the text of its statement is told.
    fn fill(&mut self, time_ns: u64, payload: &[u8], text: &[u8], redaction: Redaction) {
        let request = self.send(time_ns, payload);
        let number = underpass_mysql::command::statement_number(payload).unwrap();
        self.records.push(Record::PreparedFill(PreparedFill {
            session: SessionId(1),
            time_ns,
            name: number.to_string().into_bytes().into(),
            query: text.to_vec().into(),
            param_types: Vec::new(),
            redaction,
        }));
        self.answer(time_ns + 1, request, "OK 1", I);
    }
}

#[test]
fn statements_prepared_before_recording_are_prepared_when_their_text_is_known() {
    let mut trace = Commands::start(true);
    trace.run(1, &execute(7, STRING), "OK 1", I);
    trace.run(3, &execute(8, STRING), "OK 1", I);
    trace.fill(5, &execute(7, &[]), b"update t set a = ?", Redaction::None);
    trace.run(7, &execute(7, &[]), "OK 1", I);
    trace.send(9, b"\x19\x07\0\0\0");
    trace.run(10, &execute(7, &[]), "OK 1", I);
    let unknown = Some(Reason::UnknownStatement);
    let plan = trace.plan(&Options::default());
    assert_eq!(omitted(&plan), [None, unknown, None, None, unknown]);
    let statements: Vec<_> = plan.sessions[0].statements.iter().collect();
    assert_eq!(statements, [(&7, &b"update t set a = ?".to_vec())]);
    let units = &plan.sessions[0].units;
    assert_eq!(units[0].group, units[3].group, "they are reported as one statement");
    assert_eq!(plan.executes(&units[0]), plan.executes(&units[3]));
    assert!(units[0].may_write && units[2].may_write);
    let read_only = trace.plan(&Options { read_only: true, ..Options::default() });
    let writes = Some(Reason::ReadOnly);
    assert_eq!(omitted(&read_only), [writes, unknown, writes, writes, unknown]);
    assert!(read_only.sessions[0].statements.is_empty(), "nobody needs it");
}

#[test]
fn rows_are_not_fetched_without_the_execution_that_opened_their_cursor() {
    let fetch = b"\x1c\x07\0\0\0\x01\0\0\0";
    let mut trace = Commands::start(true);
    trace.run(1, fetch, "ROWS 1", I);
    trace.run(3, &execute(7, &[]), "ROWS 0", I);
    trace.run(5, fetch, "ROWS 1", I);
    trace.fill(7, &execute(7, STRING), b"select ?", Redaction::None);
    trace.run(9, fetch, "ROWS 1", I);
    let (unknown, types) = (Some(Reason::UnknownStatement), Some(Reason::UnknownTypes));
    assert_eq!(omitted(&trace.plan(&Options::default())), [unknown, types, types, None, None]);
}

/// Which of the executions that are not kept told other types nobody knows.
#[test]
fn executions_of_unknown_statements_are_kept_within_bounds() {
    let mut trace = Commands::start(true);
    let long = [&execute(7, STRING)[..], &vec![0; 100_000]].concat();
    for at in 0..6 {
        trace.run(2 * at, &long, "OK 1", I);
    }
    trace.fill(20, &execute(7, &[]), b"select ?", Redaction::None);
    trace.run(30, &execute(7, &[]), "OK 1", I);
    trace.run(32, &execute(7, STRING), "OK 1", I);
    let plan = trace.plan(&Options::default());
    let (unknown, types) = (Some(Reason::UnknownStatement), Some(Reason::UnknownTypes));
    assert_eq!(omitted(&plan), [None, None, None, None, None, unknown, unknown, types, None]);
}

#[test]
fn without_the_types_of_its_parameters_a_statement_is_not_executed() {
    let mut trace = Commands::start(true);
    trace.run(1, &execute(7, &[]), "OK 1", I);
    trace.fill(3, &execute(7, &[]), b"select ?", Redaction::None);
    trace.run(5, &execute(7, &[]), "OK 1", I);
    trace.run(7, &execute(7, STRING), "OK 1", I);
    trace.run(9, &execute(7, &[]), "OK 1", I);
    let types = Some(Reason::UnknownTypes);
    assert_eq!(omitted(&trace.plan(&Options::default())), [types, types, types, None, None]);
}

#[test]
fn a_statement_with_a_password_of_before_recording_is_not_executed() {
    let mut trace = Commands::start(true);
    trace.fill(1, &execute(7, STRING), &PASSWORD[1..], Redaction::Password);
    trace.run(3, &execute(7, STRING), "OK 1", I);
    let plan = trace.plan(&Options::default());
    assert_eq!(omitted(&plan), [Some(Reason::Password), Some(Reason::Password)]);
    assert!(plan.sessions[0].statements.is_empty());
}
