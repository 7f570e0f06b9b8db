// SPDX-License-Identifier: Apache-2.0
//! Plans of traces made by hand.

use underpass_trace::{
    ByteTotals, Cancel, Direction, EndReason, Frontend, Loss, LossReason, Meta, Outcome, PreparedFill, Ready,
    Record, Redaction, Response, SessionEnd, SessionId, SessionStart, Source, TransactionStatus, Transport,
};
use underpass_wire::frontend::build;

use super::*;

/// Writes a trace of several sessions, each with its own offsets.
#[derive(Clone, Default)]
struct Trace {
    records: Vec<Record<'static>>,
    offsets: BTreeMap<u64, u64>,
}

impl Trace {
    fn start(&mut self, session: u64, time_ns: u64, midstream: bool) -> &mut Self {
        self.records.push(Record::SessionStart(SessionStart {
            session: SessionId(session),
            time_ns,
            ready_ns: (!midstream).then_some(time_ns),
            source: Source::Synthetic,
            transport: Transport::Tcp,
            peer: None,
            backend_pid: None,
            midstream,
            protocol_version: 3 << 16,
            database: Some(b"db"[..].into()),
            user: Some(b"joe"[..].into()),
            application_name: None,
            parameters: Vec::new(),
            frontend_offset: 0,
            backend_offset: 0,
        }));
        self
    }

    /// Messages as one chunk; returns the offset of the last.
    fn send(&mut self, session: u64, time_ns: u64, build: impl FnOnce(&mut Vec<u8>)) -> u64 {
        let mut bytes = Vec::new();
        build(&mut bytes);
        let next = self.offsets.entry(session).or_default();
        let mut last = 0;
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let len = 1 + u32::from_be_bytes(rest[1..5].try_into().unwrap()) as usize;
            last = *next;
            *next += len as u64;
            let frontend = Frontend::new(SessionId(session), time_ns, last, rest[..len].to_vec());
            self.records.push(Record::Frontend(frontend));
            rest = &rest[len..];
        }
        last
    }

    fn ready(&mut self, session: u64, time_ns: u64, request: u64, status: TransactionStatus) {
        let session = SessionId(session);
        self.records.push(Record::Ready(Ready { session, time_ns, request, offset: 0, status }));
    }

    fn complete(&mut self, session: u64, time_ns: u64, request: u64, tag: &str) {
        self.records.push(Record::Response(Response {
            session: SessionId(session),
            request,
            offset: 0,
            len: 0,
            first_ns: time_ns,
            last_ns: time_ns,
            rows: 0,
            outcome: Outcome::Complete { tag: tag.as_bytes().to_vec().into() },
        }));
    }

    /// A query and its answer.
    fn query(&mut self, session: u64, sent_ns: u64, ready_ns: u64, sql: &str, status: TransactionStatus) {
        let request = self.send(session, sent_ns, |out| build::query(out, sql.as_bytes()));
        self.ready(session, ready_ns, request, status);
    }

    fn end(&mut self, session: u64, time_ns: u64) {
        let (frontend, backend) = (ByteTotals::default(), ByteTotals::default());
        let (session, reason) = (SessionId(session), EndReason::Terminate);
        self.records.push(Record::SessionEnd(SessionEnd { session, time_ns, reason, frontend, backend }));
    }

    fn plan(&self, options: &Options) -> Plan {
        let mut records = self.records.clone();
        records.sort_by_key(Record::time_ns);
        from_records(Meta::default(), records, options).unwrap()
    }
}

const I: TransactionStatus = TransactionStatus::Idle;
const T: TransactionStatus = TransactionStatus::Transaction;

fn omitted(plan: &Plan) -> Vec<Option<Reason>> {
    plan.sessions[0].units.iter().map(|unit| unit.omitted).collect()
}

#[test]
fn units_end_where_the_server_is_ready() {
    let mut trace = Trace::default();
    trace.start(1, 0, false);
    trace.query(1, 1, 2, "select 1", I);
    let sync = trace.send(1, 3, |out| {
        build::parse(out, b"s", b"select a from t where b = $1", []);
        build::bind(out, b"", b"s", [], [Some(&b"1"[..])], []);
        build::execute(out, b"", 0);
        build::sync(out);
    });
    trace.ready(1, 4, sync, I);
    let plan = trace.plan(&Options::default());
    let units = &plan.sessions[0].units;
    assert_eq!(units.len(), 2);
    assert_eq!((units[1].steps().len(), units[1].ready_ns(), units[1].after), (1, Some(4), 1));
    let step = &plan.sessions[0].steps[units[1].steps().start];
    assert_eq!((step.barrier, step.answers, step.says), (Barrier::None, 3, Says::Asks));
    assert_eq!(plan.groups.len(), 2);
}

#[test]
fn copy_data_belongs_to_the_unit_whose_sync_the_server_ignored() {
    let mut trace = Trace::default();
    trace.start(1, 0, false);
    trace.send(1, 1, |out| {
        build::parse(out, b"", b"copy t from stdin", []);
        build::bind(out, b"", b"", [], [], []);
        build::execute(out, b"", 0);
        build::sync(out);
    });
    let sync = trace.send(1, 2, |out| {
        build::copy_data(out, b"1\n");
        build::copy_data(out, b"2\n");
        build::copy_done(out);
        build::sync(out);
    });
    trace.ready(1, 3, sync, I);
    trace.query(1, 4, 5, "select 1", I);
    let plan = trace.plan(&Options::default());
    let session = &plan.sessions[0];
    assert_eq!(session.units.len(), 2);
    let steps: Vec<_> =
        session.steps[session.units[0].steps()].iter().map(|step| (step.barrier, step.says)).collect();
    assert_eq!(
        steps,
        [(Barrier::None, Says::Asks), (Barrier::CopyIn, Says::CopyData), (Barrier::None, Says::Asks)]
    );
    assert_eq!(session.units[0].ready_ns(), Some(3));
}

/// What a unit sends, step by step.
fn sent(plan: &Plan, session: usize, unit: usize) -> Vec<Vec<u8>> {
    let session = &plan.sessions[session];
    let steps = &session.steps[session.units[unit].steps()];
    steps.iter().map(|step| plan.messages.read(&step.bytes()).unwrap()).collect()
}

#[test]
fn a_long_copy_is_sent_in_steps_of_which_only_the_first_waits() {
    let mut trace = Trace::default();
    trace.start(1, 0, false);
    let query = trace.send(1, 1, |out| build::query(out, b"copy t from stdin"));
    let data = vec![b'x'; 400_000];
    trace.send(1, 2, |out| {
        (0..8).for_each(|_| build::copy_data(out, &data));
        build::copy_done(out);
    });
    trace.ready(1, 3, query, I);
    let plan = trace.plan(&Options::default());
    let session = &plan.sessions[0];
    let steps = &session.steps[session.units[0].steps()];
    assert!(steps.len() > 3 && steps[1].barrier == Barrier::CopyIn, "{steps:?}");
    assert!(
        steps[2..].iter().all(|step| step.barrier == Barrier::None && step.says == Says::CopyData),
        "{steps:?}"
    );
    let parts = sent(&plan, 0, 0);
    assert!(parts.iter().all(|part| part.len() < 2 << 20));
    let mut all = Vec::new();
    build::query(&mut all, b"copy t from stdin");
    (0..8).for_each(|_| build::copy_data(&mut all, &data));
    build::copy_done(&mut all);
    assert!(parts.concat() == all);
}

#[test]
fn messages_of_sessions_that_come_in_turns_stay_apart() {
    let mut trace = Trace::default();
    let text = |session: u64, part: u64| format!("select {session}, {part}");
    (1..=2).for_each(|session| {
        trace.start(session, 0, false);
    });
    for part in 0..3 {
        for session in 1..=2 {
            let parse = |out: &mut Vec<u8>| build::parse(out, b"", text(session, part).as_bytes(), []);
            trace.send(session, 1 + part, parse);
        }
    }
    for session in 1..=2 {
        let sync = trace.send(session, 5, build::sync);
        trace.ready(session, 6, sync, I);
    }
    let plan = trace.plan(&Options::default());
    for session in 1..=2 {
        let mut all = Vec::new();
        (0..3).for_each(|part| build::parse(&mut all, b"", text(session, part).as_bytes(), []));
        build::sync(&mut all);
        assert_eq!(sent(&plan, session as usize - 1, 0).concat(), all);
    }
}

#[test]
fn what_is_lost_is_not_half_played() {
    let mut trace = Trace::default();
    trace.start(1, 0, false);
    trace.query(1, 1, 2, "select 1", I);
    trace.send(1, 3, |out| build::parse(out, b"", b"select 2", []));
    let offset = trace.offsets[&1];
    let lost = Loss {
        session: Some(SessionId(1)),
        time_ns: 4,
        direction: Direction::Frontend,
        offset,
        len: 100,
        reason: LossReason::RingFull,
    };
    trace.records.push(Record::Loss(lost));
    *trace.offsets.get_mut(&1).unwrap() += 100;
    trace.query(1, 5, 6, "select 3", I);
    let plan = trace.plan(&Options::default());
    assert_eq!(omitted(&plan), [None, Some(Reason::Lost), None]);
    assert_eq!(plan.omitted.units[&Reason::Lost], 1);
    // Nobody saw the lost one's answer, so the next does not run ahead of it.
    assert_eq!(plan.sessions[0].units[2].after, 2);
}

#[test]
fn a_session_joined_in_a_transaction_begins_after_it() {
    let mut trace = Trace::default();
    trace.start(1, 0, true);
    trace.query(1, 2, 3, "update t set b = 1", T);
    trace.query(1, 4, 5, "rollback", I);
    trace.query(1, 6, 7, "begin", T);
    trace.query(1, 8, 9, "commit", I);
    let plan = trace.plan(&Options::default());
    let cut = Some(Reason::MidstreamTransaction);
    assert_eq!(omitted(&plan), [cut, cut, None, None]);
}

#[test]
fn how_a_joined_session_begins_is_told_by_its_first_unit() {
    let cut = Some(Reason::MidstreamTransaction);
    let e = TransactionStatus::Failed;
    for (sql, status, reason) in [
        ("commit", I, cut),
        ("Rollback", I, cut),
        ("/* of a pool */ end", I, cut),
        ("update t set a = 1; commit", I, cut),
        ("rollback to savepoint a", T, cut),
        ("select 1", e, cut),
        ("begin", T, None),
        ("start transaction; update t set a = 1", T, None),
        ("begin; update t set a = 1; commit", I, None),
        ("update t set a = 1", I, None),
    ] {
        let mut trace = Trace::default();
        trace.start(1, 0, true);
        trace.query(1, 1, 2, sql, status);
        trace.query(1, 3, 4, "commit", I);
        trace.query(1, 5, 6, "select 1", I);
        let plan = trace.plan(&Options::default());
        let second = cut.filter(|_| reason.is_some() && status != I);
        assert_eq!(omitted(&plan), [reason, second, None], "{sql}");
    }
}

/// Drivers prepare BEGIN, too; what is prepared in a transaction stays when it is over.
#[test]
fn a_session_joined_in_a_transaction_of_the_extended_protocol_begins_after_it() {
    let mut trace = Trace::default();
    trace.start(1, 0, true);
    for (time_ns, name, sql, status) in [
        (1, &b"s"[..], &b"update t set a = 1"[..], T),
        (3, b"c", b"commit", I),
        (5, b"b", b"begin", T),
        (7, b"d", b"delete from t", T),
    ] {
        let sync = trace.send(1, time_ns, |out| {
            build::parse(out, name, sql, []);
            build::bind(out, b"", name, [], [], []);
            build::execute(out, b"", 0);
            build::sync(out);
        });
        trace.ready(1, time_ns + 1, sync, status);
    }
    let plan = trace.plan(&Options::default());
    let cut = Some(Reason::MidstreamTransaction);
    assert_eq!(omitted(&plan), [cut, cut, None, None]);
    let mut prepared = [Vec::new(), Vec::new()];
    build::parse(&mut prepared[0], b"c", b"commit", []);
    build::parse(&mut prepared[1], b"s", b"update t set a = 1", []);
    assert_eq!(plan.sessions[0].prepared, prepared);

    // The text of what was prepared before is not known: the answer tells.
    let mut trace = Trace::default();
    trace.start(1, 0, true);
    for (time_ns, command, status) in [(1, "BEGIN", T), (3, "UPDATE 1", T), (5, "COMMIT", I)] {
        let execute = trace.send(1, time_ns, |out| {
            build::bind(out, b"", command.as_bytes(), [], [], []);
            build::execute(out, b"", 0);
        });
        trace.complete(1, time_ns + 1, execute, command);
        let sync = trace.send(1, time_ns, build::sync);
        trace.ready(1, time_ns + 1, sync, status);
        trace.records.push(Record::PreparedFill(PreparedFill {
            session: SessionId(1),
            time_ns: time_ns + 1,
            name: command.as_bytes().to_vec().into(),
            query: b"whatever"[..].into(),
            param_types: Vec::new(),
            redaction: Redaction::None,
        }));
    }
    assert_eq!(omitted(&trace.plan(&Options::default())), [None; 3]);
}

#[test]
fn statements_from_before_are_prepared_or_left_out() {
    let mut trace = Trace::default();
    trace.start(1, 0, true);
    let mut bind = |time_ns, name: &str| {
        let sync = trace.send(1, time_ns, |out| {
            build::bind(out, b"", name.as_bytes(), [], [], []);
            build::execute(out, b"", 0);
            build::sync(out);
        });
        trace.ready(1, time_ns + 1, sync, I);
    };
    bind(1, "known");
    bind(3, "unknown");
    // The text may be learned after the first use.
    trace.records.push(Record::PreparedFill(PreparedFill {
        session: SessionId(1),
        time_ns: 5,
        name: b"known"[..].into(),
        query: b"select 1"[..].into(),
        param_types: Vec::new(),
        redaction: Redaction::None,
    }));
    let plan = trace.plan(&Options::default());
    assert_eq!(omitted(&plan), [None, Some(Reason::UnknownStatement)]);
    assert_eq!(plan.sessions[0].prepared.len(), 1);
}

#[test]
fn a_cancel_request_belongs_to_the_unit_that_was_executed_then() {
    let mut trace = Trace::default();
    trace.start(1, 0, false);
    trace.query(1, 10, 20, "select pg_sleep(60)", I);
    trace.query(1, 30, 40, "select 1", I);
    let cancel = |session: Option<u64>, time_ns| {
        Record::Cancel(Cancel { time_ns, session: session.map(SessionId), backend_pid: 7 })
    };
    trace.records.extend([cancel(Some(1), 17), cancel(Some(1), 25), cancel(None, 35)]);
    let plan = trace.plan(&Options::default());
    let session = &plan.sessions[0];
    let cancels: Vec<Option<u64>> =
        (0..session.units.len()).map(|index| session.cancels.get(&index).copied()).collect();
    assert_eq!(cancels, [Some(7), None]);
    assert_eq!(plan.omitted.units.get(&Reason::Cancel), Some(&2));

    // A unit whose answer was not seen is not executed for ever.
    let mut trace = Trace::default();
    trace.start(1, 0, false);
    trace.send(1, 10, |out| build::query(out, b"select 1"));
    trace.query(1, 30, 40, "select 2", I);
    trace.send(1, 50, |out| build::query(out, b"select 3"));
    trace.send(1, 60, |out| build::query(out, b"select 4"));
    trace.records.extend([cancel(Some(1), 35), cancel(Some(1), 45), cancel(Some(1), 67)]);
    let plan = trace.plan(&Options::default());
    let session = &plan.sessions[0];
    let cancels: Vec<Option<u64>> =
        (0..session.units.len()).map(|index| session.cancels.get(&index).copied()).collect();
    assert_eq!(cancels, [None, Some(5), None, Some(7)]);
    assert_eq!(plan.omitted.units.get(&Reason::Cancel), Some(&1));
}

#[test]
fn passwords_and_open_ends_are_left_out() {
    let mut trace = Trace::default();
    trace.start(1, 0, false);
    trace.query(1, 1, 2, "alter role joe password 'xxxxxx'", I);
    if let Some(Record::Frontend(frontend)) = trace.records.get_mut(1) {
        frontend.redaction = Redaction::Password;
    }
    trace.send(1, 3, |out| build::parse(out, b"", b"select 2", []));
    let plan = trace.plan(&Options::default());
    assert_eq!(omitted(&plan), [Some(Reason::Password), Some(Reason::Incomplete)]);
}

/// It would set the password to what overwrote it in the trace.
#[test]
fn a_prepared_statement_with_a_password_is_not_executed() {
    let mut trace = Trace::default();
    trace.start(1, 0, true);
    let query = b"alter role joe password '******'";
    trace.records.push(Record::PreparedFill(PreparedFill {
        session: SessionId(1),
        time_ns: 1,
        name: b"before"[..].into(),
        query: query[..].into(),
        param_types: Vec::new(),
        redaction: Redaction::Password,
    }));
    let sync = trace.send(1, 2, |out| {
        build::parse(out, b"s", query, []);
        build::sync(out);
    });
    if let Some(Record::Frontend(frontend)) = trace.records.get_mut(2) {
        frontend.redaction = Redaction::Password;
    }
    trace.ready(1, 3, sync, I);
    for (time_ns, name) in [(4, "s"), (6, "before"), (8, "other")] {
        let sync = trace.send(1, time_ns, |out| {
            if name == "other" {
                build::parse(out, b"s", b"select 1", []);
            }
            build::bind(out, b"", if name == "other" { b"s" } else { name.as_bytes() }, [], [], []);
            build::execute(out, b"", 0);
            build::sync(out);
        });
        trace.ready(1, time_ns + 1, sync, I);
    }
    let plan = trace.plan(&Options::default());
    let password = Some(Reason::Password);
    assert_eq!(omitted(&plan), [password, password, password, None]);
    assert!(plan.sessions[0].prepared.is_empty());
}

/// A capture learns the text of a statement from before when it is used, so the fill is behind the first use.
#[test]
fn a_password_is_not_set_by_the_use_that_showed_it_and_a_closed_name_is_free() {
    fn bind(trace: &mut Trace, time_ns: u64, close: bool) {
        let sync = trace.send(1, time_ns, |out| {
            build::bind(out, b"", b"s", [], [], []);
            build::execute(out, b"", 0);
            if close {
                build::close(out, underpass_wire::frontend::Target::Statement, b"s");
            }
            build::sync(out);
        });
        trace.ready(1, time_ns + 1, sync, I);
    }
    let mut trace = Trace::default();
    trace.start(1, 0, true);
    bind(&mut trace, 2, false);
    trace.records.push(Record::PreparedFill(PreparedFill {
        session: SessionId(1),
        time_ns: 4,
        name: b"s"[..].into(),
        query: b"alter role joe password '******'"[..].into(),
        param_types: Vec::new(),
        redaction: Redaction::Password,
    }));
    bind(&mut trace, 5, true);
    // SQL prepares another by that name, which leaves no Parse.
    trace.query(1, 8, 9, "prepare s as select 1", I);
    bind(&mut trace, 10, false);
    let plan = trace.plan(&Options::default());
    let password = Some(Reason::Password);
    assert_eq!(omitted(&plan), [password, password, None, None]);
}

#[test]
fn writes_wait_for_what_was_over_before_their_answer_and_reads_for_what_was_over_before_they_began() {
    let mut trace = Trace::default();
    for session in 1..=3 {
        trace.start(session, 0, false);
    }
    // 1 holds a row from 10 to 20; 2 wants it from 12 on and has it until 30; 3 reads from 15 to 35, and again.
    trace.query(1, 10, 20, "update t set a = 1", I);
    trace.query(2, 12, 30, "update t set a = 2", I);
    trace.query(3, 15, 35, "select a from t", I);
    trace.query(3, 36, 37, "select a from t", I);
    let plan = trace.plan(&Options::default());
    let unit = |session: usize, unit: usize| &plan.sessions[session].units[unit];
    assert_eq!(plan.commits, 2);
    assert_eq!((unit(0, 0).commit(), unit(0, 0).after_commits), (Some(0), 0));
    assert_eq!((unit(1, 0).commit(), unit(1, 0).after_commits), (Some(1), 1));
    assert_eq!((unit(2, 0).commit(), unit(2, 0).after_commits), (None, 0));
    assert_eq!(unit(2, 1).after_commits, 2);
    // 10 ns apart and overlapping: the trace cannot be sure.
    assert_eq!(plan.close_commits, 1);
}

/// A server lets its locks go before it says so: the next one may have the row, and say so, earlier.
#[test]
fn who_waited_for_a_lock_is_after_its_holder_even_if_it_was_answered_first() {
    let mut trace = Trace::default();
    for session in 1..=4 {
        trace.start(session, 0, false);
    }
    // 1 holds the row until some time between 20 and 30. 2 has it at 25 and commits later; 3 has it then, without a transaction.
    trace.query(1, 1, 2, "begin", T);
    trace.query(1, 10, 11, "update t set a = 1", T);
    trace.query(1, 20, 30, "commit", I);
    trace.query(2, 1, 2, "begin", T);
    trace.query(2, 12, 25, "update t set a = 2", T);
    trace.query(2, 40, 50, "commit", I);
    trace.query(3, 13, 45, "update t set a = 3", I);
    // 4 has another row, which 3's next update took without a transaction and let go at about 60.
    trace.query(3, 52, 62, "update u set a = 3", I);
    trace.query(4, 51, 52, "begin", T);
    trace.query(4, 53, 61, "update u set a = 4", T);
    trace.query(4, 70, 71, "commit", I);
    let plan = trace.plan(&Options::default());
    let unit = |session: usize, unit: usize| &plan.sessions[session].units[unit];
    let commits = [unit(0, 2), unit(1, 2), unit(2, 0), unit(2, 1), unit(3, 2)].map(|unit| unit.commit());
    assert_eq!(commits, [Some(0), Some(1), Some(2), Some(3), Some(4)]);
    // The first COMMIT waits for nobody, and both updates for it.
    assert_eq!(unit(0, 2).after_commits, 0);
    assert_eq!((unit(1, 1).after_commits, unit(2, 0).after_commits), (1, 2));
    // The update of 4 was answered before the one it waited for.
    assert_eq!((unit(3, 1).after_commits, unit(2, 1).after_commits), (4, 3));
    assert_eq!(plan.close_commits, 1);
}

#[test]
fn a_transaction_commits_once_and_only_if_it_may_have_written() {
    let mut trace = Trace::default();
    trace.start(1, 0, false);
    for (at, (sql, status)) in [
        ("begin", T),
        ("select 1", T),
        ("commit", I),
        ("begin", T),
        ("insert into t values (1)", T),
        ("select 1", T),
        ("commit", I),
    ]
    .into_iter()
    .enumerate()
    {
        trace.query(1, 10 * at as u64, 10 * at as u64 + 5, sql, status);
    }
    let plan = trace.plan(&Options::default());
    let commits: Vec<_> = plan.sessions[0].units.iter().map(|unit| unit.commit()).collect();
    assert_eq!(commits, [None, None, None, None, None, None, Some(0)]);
}

/// What a whole text mostly does, or begins with, says nothing of the rest of it.
#[test]
fn who_writes_behind_other_words_commits() {
    for (sql, writes) in [
        ("execute p(1)", true),
        ("explain analyze execute p", true),
        ("begin; select transfer(1, 2); commit", true),
        ("set statement_timeout = 5; select transfer(1, 2)", true),
        ("begin read write; select transfer(';', 2); commit", true),
        ("commit prepared 'a'", true),
        ("rollback prepared 'a'", true),
        ("declare c cursor with hold for select transfer(a) from t", true),
        ("declare c cursor for select a from t for update", true),
        ("begin; select max(a), ';' from t; commit", false),
        ("set statement_timeout = 5; set search_path = a, b; select 1 /* x */", false),
        ("declare c cursor for select a from t", false),
        ("discard all", false),
        ("begin read write", false),
        ("prepare p as select transfer(1, 2)", false),
        ("set application_name = 'execute'", false),
    ] {
        let mut trace = Trace::default();
        trace.start(1, 0, false);
        trace.query(1, 1, 2, sql, I);
        let plan = trace.plan(&Options::default());
        assert_eq!(plan.sessions[0].units[0].may_write, writes, "{sql}");
        assert_eq!(plan.commits, usize::from(writes), "{sql}");
    }
}

#[test]
fn a_whole_transaction_in_one_query_is_over_when_it_is_answered_and_a_commit_when_it_is_sent() {
    for (sql, waits) in [("begin; select transfer(1, 2); commit", 0), ("commit prepared 'a';", 1)] {
        let mut trace = Trace::default();
        trace.start(1, 0, false);
        trace.start(2, 0, false);
        trace.query(1, 10, 20, sql, I);
        trace.query(2, 15, 16, "select a from t", I);
        let plan = trace.plan(&Options::default());
        assert_eq!(plan.sessions[1].units[0].after_commits, waits, "{sql}");
    }
}

#[test]
fn a_write_whose_answer_was_lost_is_committed_by_what_was_answered_next() {
    let mut trace = Trace::default();
    trace.start(1, 0, false);
    trace.query(1, 1, 2, "begin", T);
    trace.send(1, 3, |out| build::query(out, b"update t set a = 1"));
    trace.query(1, 5, 6, "select 1", T);
    trace.query(1, 7, 8, "commit", I);
    trace.query(1, 9, 10, "select 1", I);
    let plan = trace.plan(&Options::default());
    let commits: Vec<_> = plan.sessions[0].units.iter().map(|unit| unit.commit()).collect();
    assert_eq!(commits, [None, None, None, Some(0), None]);
}

#[test]
fn sessions_that_followed_each_other_still_do() {
    let mut trace = Trace::default();
    for session in 0..10 {
        trace.start(session, 100 * session, false);
        trace.query(session, 100 * session + 1, 100 * session + 2, "select 1", I);
        trace.end(session, 100 * session + 50);
    }
    let plan = trace.plan(&Options::default());
    assert_eq!(plan.sessions_peak, 1);
    assert!(plan.sessions.iter().enumerate().all(|(at, session)| session.after_ended == at));
}

#[test]
fn read_only_drops_the_execution_and_keeps_the_transaction() {
    let mut trace = Trace::default();
    trace.start(1, 0, false);
    trace.query(1, 1, 2, "begin read write", T);
    let sync = trace.send(1, 3, |out| {
        build::parse(out, b"", b"insert into t values (1)", []);
        build::bind(out, b"", b"", [], [], []);
        build::execute(out, b"", 0);
        build::sync(out);
    });
    trace.ready(1, 4, sync, T);
    trace.query(1, 5, 6, "commit", I);
    let plan = trace.plan(&Options { read_only: true, ..Options::default() });
    assert_eq!(omitted(&plan), [None; 3]);
    let mut begin = Vec::new();
    build::query(&mut begin, b"begin");
    assert_eq!(sent(&plan, 0, 0), [begin]);
    assert!(
        !sent(&plan, 0, 1).concat().windows(5).any(|bytes| bytes == b"E\0\0\0\x09"),
        "an Execute is left"
    );
    assert!(sent(&plan, 0, 1).concat().ends_with(b"S\0\0\0\x04"));
    // It is counted, writes nothing, and is not reported as the insert.
    assert_eq!(plan.omitted.units, [(Reason::ReadOnly, 1)].into());
    let unit = &plan.sessions[0].units[1];
    assert!(plan.executes(unit).is_empty() && !unit.may_write);
    assert!(plan.groups[unit.group as usize].key.starts_with("parse "));
}

#[test]
fn a_query_that_is_left_out_ends_and_begins_its_transaction_all_the_same() {
    let mut trace = Trace::default();
    trace.start(1, 0, false);
    trace.query(1, 1, 2, "begin; insert into t values (1)", T);
    let request = trace.send(1, 3, |out| build::query(out, b"insert into t values (2); commit"));
    trace.complete(1, 4, request, "INSERT 0 1");
    trace.complete(1, 4, request, "COMMIT");
    trace.ready(1, 4, request, I);
    trace.query(1, 5, 6, "begin; insert into t values (1); commit", I);
    let plan = trace.plan(&Options { read_only: true, ..Options::default() });
    assert_eq!(omitted(&plan), [None, None, Some(Reason::ReadOnly)]);
    assert_eq!(plan.omitted.units, [(Reason::ReadOnly, 3)].into());
    for (unit, text) in ["begin", "commit"].iter().enumerate() {
        let mut query = Vec::new();
        build::query(&mut query, text.as_bytes());
        assert_eq!(sent(&plan, 0, unit), [query]);
        let group = plan.sessions[0].units[unit].group;
        assert_eq!(plan.groups[group as usize].label, *text);
    }
    // What COMMIT alone is answered, the trace does not have.
    assert!(plan.expected(&plan.sessions[0].units[1]).iter().all(|one| one.end.is_none()));
}

#[test]
fn what_the_server_refuses_to_nobody_is_left_out() {
    let (read_only, always) = (Some(Reason::ReadOnly), Some(Reason::Administration));
    for (sql, without, with) in [
        ("select pg_terminate_backend(4711)", always, always),
        ("select pg_catalog.pg_cancel_backend(pid) from pg_stat_activity", always, always),
        ("select pg_reload_conf()", always, always),
        ("select pg_notify('a', 'b')", None, read_only),
        ("select pg_stat_reset()", None, read_only),
        ("select pg_create_logical_replication_slot('a', 'pgoutput')", None, read_only),
        ("declare c cursor for select lo_create(0)", None, read_only),
        ("select set_config(a, b, false) from settings", None, read_only),
        ("select set_config('search_path', '', false)", None, None),
        ("select 'pg_terminate_backend(1)'", None, None),
    ] {
        let mut trace = Trace::default();
        trace.start(1, 0, false);
        trace.query(1, 1, 2, sql, I);
        let reason = |read_only| omitted(&trace.plan(&Options { read_only, ..Options::default() }))[0];
        assert_eq!((reason(false), reason(true)), (without, with), "{sql}");
    }
}

#[test]
fn units_that_make_the_session_the_login_users_again_are_marked() {
    for (sql, resets) in [
        ("DISCARD ALL", true),
        ("reset session authorization", true),
        ("RESET ALL;", false),
        ("reset role", false),
        ("set session authorization default", true),
        ("set local session authorization default", true),
        ("select 1; set session_authorization to default", true),
        ("discard plans", false),
        ("reset work_mem", false),
        ("set session authorization joe", false),
        ("set session statement_timeout to default", false),
    ] {
        let mut trace = Trace::default();
        trace.start(1, 0, false);
        trace.query(1, 1, 2, "select 1", I);
        trace.query(1, 3, 4, sql, I);
        let sync = trace.send(1, 5, |out| {
            build::parse(out, b"", sql.as_bytes(), []);
            build::bind(out, b"", b"", [], [], []);
            build::execute(out, b"", 0);
            build::sync(out);
        });
        trace.ready(1, 6, sync, I);
        let expected: &[usize] = if resets { &[1, 2] } else { &[] };
        assert!(trace.plan(&Options::default()).sessions[0].resets.iter().eq(expected), "{sql}");
    }
}

#[test]
fn a_fingerprint_that_is_not_wanted_takes_no_begin_with_it() {
    let mut trace = Trace::default();
    trace.start(1, 0, false);
    let mut batch = |time_ns, texts: &[&str], status| {
        let sync = trace.send(1, time_ns, |out| {
            for text in texts {
                build::parse(out, b"", text.as_bytes(), []);
                build::bind(out, b"", b"", [], [], []);
                build::execute(out, b"", 0);
            }
            build::sync(out);
        });
        trace.ready(1, time_ns + 1, sync, status);
    };
    batch(1, &["begin", "insert into t values (1)"], T);
    batch(3, &["insert into t values (2)"], T);
    batch(5, &["select a from t"], T);
    batch(7, &["rollback"], I);
    let whole = trace.plan(&Options::default());
    let wanted = whole.classifier.statements().iter().find(|one| one.label.starts_with("select"));
    let filter = Filter { fingerprints: [wanted.unwrap().fingerprint.clone()].into(), ..Filter::default() };
    let plan = trace.plan(&Options { filter, ..Options::default() });
    assert_eq!(omitted(&plan), [None, Some(Reason::Filter), None, None]);
    assert_eq!(plan.omitted.units, [(Reason::Filter, 2)].into());
    let executes =
        |unit| sent(&plan, 0, unit).concat().windows(5).filter(|bytes| *bytes == b"E\0\0\0\x09").count();
    assert_eq!([executes(0), executes(2), executes(3)], [1, 1, 1]);
}

#[test]
fn what_was_given_up_before_the_wanted_time_is_not_prepared() {
    for (sql, left) in [
        ("discard all", 0),
        ("deallocate all", 0),
        ("deallocate s", 1),
        ("deallocate \"S\"", 1),
        ("select 1", 2),
    ] {
        let mut trace = Trace::default();
        trace.start(1, 0, false);
        let sync = trace.send(1, 1, |out| {
            build::parse(out, b"s", b"select 1", []);
            build::parse(out, b"S", b"select 2", []);
            build::sync(out);
        });
        trace.ready(1, 2, sync, I);
        let mut extended = trace.clone();
        trace.query(1, 3, 4, sql, I);
        let sync = extended.send(1, 3, |out| {
            build::parse(out, b"", sql.as_bytes(), []);
            build::bind(out, b"", b"", [], [], []);
            build::execute(out, b"", 0);
            build::sync(out);
        });
        extended.ready(1, 4, sync, I);
        // The text of another name may stand for it there: what is prepared needlessly does no harm.
        let left_extended = if left == 1 { 2 } else { left };
        for (mut trace, left) in [(trace, left), (extended, left_extended)] {
            trace.query(1, 50, 51, "select 3", I);
            let filter = Filter { from: Some(std::time::Duration::from_nanos(40)), ..Filter::default() };
            let plan = trace.plan(&Options { filter, ..Options::default() });
            assert_eq!(plan.sessions[0].prepared.len(), left, "{sql}");
        }
    }
}

#[test]
fn time_cuts_whole_transactions_and_keeps_what_was_prepared() {
    let mut trace = Trace::default();
    trace.start(1, 0, false);
    let sync = trace.send(1, 1, |out| {
        build::parse(out, b"s", b"select 1", []);
        build::sync(out);
    });
    trace.ready(1, 2, sync, I);
    trace.query(1, 3, 4, "begin", T);
    trace.query(1, 50, 51, "insert into t values (1)", T);
    trace.query(1, 52, 53, "commit", I);
    trace.query(1, 54, 55, "select 1", I);
    trace.query(1, 99, 100, "select 2", I);
    trace.end(1, 1000);
    let filter = Filter {
        from: Some(std::time::Duration::from_nanos(40)),
        to: Some(std::time::Duration::from_nanos(90)),
        ..Filter::default()
    };
    let plan = trace.plan(&Options { filter, ..Options::default() });
    let out = Some(Reason::Filter);
    assert_eq!(omitted(&plan), [out, out, out, out, None, out]);
    assert_eq!(plan.sessions[0].prepared.len(), 1);
    // A timed replay does not wait for what is behind the window.
    assert_eq!((plan.sessions[0].end_ns, plan.end_ns), (Some(90), 90));
}

#[test]
fn sessions_that_are_not_wanted_make_the_trace_no_longer() {
    let mut trace = Trace::default();
    for session in 1..=2 {
        trace.start(session, 0, false);
        trace.query(session, 1, 2, "select 1", I);
        trace.end(session, 10 * session * session);
    }
    let filter = Filter { sessions: [1].into(), ..Filter::default() };
    assert_eq!(trace.plan(&Options { filter, ..Options::default() }).end_ns, 10);
    assert_eq!(trace.plan(&Options::default()).end_ns, 40);
}

/// docs/replay.md says what a statement takes.
#[test]
fn a_unit_is_small_from_plan_to_outcome() {
    let sizes = [size_of::<Unit>(), size_of::<Step>(), size_of::<crate::outcome::UnitOutcome>()];
    assert_eq!(sizes, [64, 16, 24]);
}

#[test]
fn prepared_statements_of_mysql_that_were_asked_for_before_the_first_answer_keep_their_numbers() {
    let mut records = Trace::default().start(1, 0, false).records.clone();
    let session = SessionId(1);
    let mut offset = 0;
    let mut command = |records: &mut Vec<Record<'static>>, time_ns, payload: &[u8]| {
        let mut bytes = Vec::new();
        underpass_mysql::packet::put_message(&mut bytes, 0, payload);
        let at = offset;
        offset += bytes.len() as u64;
        records.push(Record::Frontend(Frontend::new(session, time_ns, at, bytes)));
        at
    };
    let answer = |records: &mut Vec<Record<'static>>, time_ns, request, tag: &str| {
        let outcome = Outcome::Complete { tag: tag.as_bytes().to_vec().into() };
        let (first_ns, last_ns) = (time_ns, time_ns);
        records.push(Record::Response(Response {
            session,
            request,
            offset: 0,
            len: 0,
            first_ns,
            last_ns,
            rows: 0,
            outcome,
        }));
        records.push(Record::Ready(Ready { session, time_ns, request, offset: 0, status: I }));
    };
    let execute = |number: u32| [&[0x17][..], &number.to_le_bytes(), &[0, 1, 0, 0, 0]].concat();
    let texts: [&[u8]; 3] = [b"\x16delete from t", b"\x16select broken", b"\x16select 1"];
    let prepares = texts.map(|text| command(&mut records, 1, text));
    // As MariaDB's connectors do: the last statement, whatever its number will be.
    let last = command(&mut records, 1, &execute(underpass_mysql::command::LAST_PREPARED));
    answer(&mut records, 2, prepares[0], "PREPARE 1 0");
    records.push(Record::Ready(Ready { session, time_ns: 2, request: prepares[1], offset: 0, status: I }));
    answer(&mut records, 2, prepares[2], "PREPARE 3 0");
    answer(&mut records, 2, last, "ROWS 1");
    for (time_ns, number) in [(3, 1), (5, 3)] {
        let request = command(&mut records, time_ns, &execute(number));
        answer(&mut records, time_ns + 1, request, "OK 0");
    }
    // Prepared before the reset, answered behind it: gone.
    let prepare = command(&mut records, 7, b"\x16select 2");
    let reset = command(&mut records, 7, b"\x1f");
    answer(&mut records, 8, prepare, "PREPARE 4 0");
    answer(&mut records, 8, reset, "OK 0");
    let request = command(&mut records, 9, &execute(4));
    answer(&mut records, 10, request, "OK 0");

    let meta = Meta { protocol: underpass_trace::Protocol::Mysql, ..Meta::default() };
    let plan = from_records(meta, records, &Options { read_only: true, ..Options::default() }).unwrap();
    let (kept, dropped) = (None, Some(Reason::ReadOnly));
    assert_eq!(
        omitted(&plan),
        [kept, kept, kept, kept, dropped, kept, kept, kept, Some(Reason::UnknownStatement)]
    );
    let numbers: Vec<_> = plan.sessions[0].prepares.clone().into_iter().collect();
    assert_eq!(numbers, [(0, 1), (2, 3), (6, 4)]);
}

mod missing;
mod mysql;
mod read_only;
