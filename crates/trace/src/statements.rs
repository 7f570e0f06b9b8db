// SPDX-License-Identifier: Apache-2.0
//! Records put together to what a reader wants to know: statements with their text, parameters and outcome, and
//! transactions.
//!
//! The server decides what a message did, not the client: what a Parse or Bind defines counts from the answer on that
//! proves it was processed, and after an error everything up to the next Sync was skipped. So the text of an
//! Execute is the text that ran. Memory is bounded by what clients have outstanding and prepared.

mod mysql;

pub(crate) use mysql::prepared_tag;
pub use mysql::{LocalFiles, parameters_of};

use std::collections::VecDeque;
use std::sync::Arc;

use underpass_wire::Header;
use underpass_wire::frontend::{Message, Target};

use crate::Protocol;
use crate::model::*;

/// The parameter of a MySQL session's start that holds the capabilities of its login, in decimal: what its messages are decoded with.
pub const CAPABILITIES: &[u8] = b"_capabilities";

/// The parameter of a MySQL session's start that holds the number of the collation that its client asked for, in decimal.
pub const COLLATION: &[u8] = b"_collation";

/// How a statement was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Request {
    /// Query: one text, perhaps of several statements. MySQL: COM_QUERY.
    Simple,
    /// Execute, with what Parse and Bind said before. MySQL: COM_STMT_EXECUTE.
    Extended,
    /// FunctionCall.
    Function,
    /// Parse, Bind, Describe or Close that failed, and MySQL's COM_STMT_PREPARE: nothing ran. One that works is no statement.
    Prepare,
    /// Sync that failed: the commit of a transaction without a block, such as a deferred constraint. What ran in it is another statement.
    Commit,
}

/// One answered request.
#[derive(Clone, Debug)]
pub struct Statement {
    /// The session.
    pub session: SessionId,
    /// Offset of the request's message.
    pub request: u64,
    /// How it was asked for.
    pub kind: Request,
    /// Its text; `None` when it was prepared before recording began and not recovered, and for what has none.
    pub text: Option<Arc<[u8]>>,
    /// The statement's name, of an Execute.
    pub name: Arc<[u8]>,
    /// Parameters and their formats, of an Execute.
    pub parameters: Arc<Parameters>,
    /// The most rows that the Execute asked for; 0 for all.
    pub max_rows: i32,
    /// When the client's message was complete.
    pub time_ns: u64,
    /// When the first byte of an answer was seen; equal to `end_ns` where summaries are not recorded.
    pub first_ns: u64,
    /// When the answer was complete.
    pub end_ns: u64,
    /// Rows of all answers.
    pub rows: u64,
    /// Bytes of all answers.
    pub bytes: u64,
    /// Statements that ended: more than one for a Query with several; 0 where summaries are not recorded.
    pub answers: u32,
    /// How the last of them ended.
    pub outcome: Outcome<'static>,
    /// Whether a part of it was redacted.
    pub redaction: Redaction,
}

/// What a Bind said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parameters {
    /// The values in their formats; `None` is null. Those of MySQL's binary protocol are here as text.
    pub values: Vec<Option<Vec<u8>>>,
    /// None (all text), one (for all), or one for each.
    pub formats: Vec<u16>,
    /// Types that Parse named; 0 where it left one to the server, and for MySQL.
    pub types: Vec<u32>,
}

impl Parameters {
    /// The format of a value: 0 text, 1 binary.
    pub fn format(&self, at: usize) -> u16 {
        match self.formats[..] {
            [] => 0,
            [one] => one,
            _ => self.formats.get(at).copied().unwrap_or(0),
        }
    }
}

/// A transaction block that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transaction {
    /// The session.
    pub session: SessionId,
    /// When its first request was complete.
    pub start_ns: u64,
    /// When the server was outside of it again.
    pub end_ns: u64,
    /// Requests in it, BEGIN and COMMIT included.
    pub requests: u64,
    /// Whether it failed: a statement in it did.
    pub failed: bool,
}

/// What [`Statements::push`] found.
#[derive(Clone, Debug)]
pub enum Event {
    /// A request was answered.
    Statement(Box<Statement>),
    /// A transaction block ended.
    Transaction(Transaction),
}

/// Puts the records of a trace together.
#[derive(Debug)]
pub struct Statements {
    protocol: Protocol,
    sessions: foldhash::HashMap<SessionId, Session>,
    files: LocalFiles,
}

#[derive(Debug, Default)]
struct Session {
    prepared: foldhash::HashMap<Arc<[u8]>, Prepared>,
    portals: foldhash::HashMap<Arc<[u8]>, Portal>,
    /// Messages that the server is not known to have processed.
    pending: VecDeque<Pending>,
    in_transaction: bool,
    start_ns: u64,
    requests: u64,
    failed: bool,
    mysql: mysql::Statements,
}

#[derive(Clone, Debug)]
struct Prepared {
    text: Option<Arc<[u8]>>,
    types: Vec<u32>,
    redaction: Redaction,
}

#[derive(Clone, Debug)]
struct Portal {
    text: Option<Arc<[u8]>>,
    name: Arc<[u8]>,
    parameters: Arc<Parameters>,
    redaction: Redaction,
}

#[derive(Debug)]
struct Pending {
    offset: u64,
    time_ns: u64,
    what: What,
    answer: Option<Answer>,
    /// When something was lost before it was answered: it may have ended then.
    doubted_ns: Option<u64>,
}

#[derive(Debug)]
enum What {
    Query {
        text: Arc<[u8]>,
        redaction: Redaction,
    },
    Function,
    Parse {
        name: Arc<[u8]>,
        prepared: Prepared,
    },
    Bind {
        portal: Arc<[u8]>,
        statement: Arc<[u8]>,
        values: Vec<Option<Vec<u8>>>,
        formats: Vec<u16>,
        redaction: Redaction,
    },
    Execute {
        portal: Arc<[u8]>,
        max_rows: i32,
    },
    /// An Execute before a loss.
    Ran(Box<Ran>),
    DescribeStatement(Arc<[u8]>),
    DescribePortal(Arc<[u8]>),
    CloseStatement(Arc<[u8]>),
    ClosePortal(Arc<[u8]>),
    Sync,
    Mysql(mysql::What),
}

/// What an Execute ran.
#[derive(Debug, Default)]
struct Ran {
    text: Option<Arc<[u8]>>,
    name: Arc<[u8]>,
    parameters: Arc<Parameters>,
    max_rows: i32,
    redaction: Redaction,
}

/// A request, and what it ran or would have.
struct Asked {
    offset: u64,
    time_ns: u64,
    kind: Request,
    ran: Ran,
}

/// What was said to a request so far.
#[derive(Clone, Debug)]
struct Answer {
    first_ns: u64,
    last_ns: u64,
    rows: u64,
    bytes: u64,
    answers: u32,
    outcome: Outcome<'static>,
}

impl Statements {
    /// For a trace of this protocol.
    pub fn new(protocol: Protocol) -> Self {
        Self { protocol, sessions: foldhash::HashMap::default(), files: LocalFiles::default() }
    }

    /// Takes the next record of the trace, and tells what it completes. `out` is emptied first.
    pub fn push(&mut self, record: &Record<'_>, out: &mut Vec<Event>) {
        out.clear();
        let in_file = self.protocol == Protocol::Mysql && self.files.push(record);
        match record {
            Record::SessionStart(r) => {
                let mysql = mysql::Statements::of(r);
                self.sessions.insert(r.session, Session { mysql, ..Session::default() });
            }
            Record::Frontend(r) => {
                let session = self.sessions.entry(r.session).or_default();
                let what = match self.protocol {
                    Protocol::Postgres => postgres(r),
                    Protocol::Mysql if in_file => None,
                    Protocol::Mysql => session.mysql.what(r),
                };
                if let Some(what) = what {
                    // It has no answer that would end it: with nothing before it, it has been done.
                    let what = match what {
                        What::Mysql(close @ mysql::What::Close(_)) if session.pending.is_empty() => {
                            session.mysql.end(close, None);
                            return;
                        }
                        what => what,
                    };
                    if session.pending.is_empty() && !session.in_transaction {
                        session.start_ns = r.time_ns;
                    }
                    session.pending.push_back(Pending {
                        offset: r.offset,
                        time_ns: r.time_ns,
                        what,
                        answer: None,
                        doubted_ns: None,
                    });
                }
            }
            Record::PreparedFill(r) => {
                let session = self.sessions.entry(r.session).or_default();
                if self.protocol == Protocol::Mysql {
                    session.mysql.fill(r);
                    return;
                }
                let types = r.param_types.clone();
                let prepared = Prepared { text: Some(r.query[..].into()), types, redaction: r.redaction };
                session.prepared.entry(r.name[..].into()).or_insert(prepared);
            }
            Record::Response(r) => {
                if let Some(session) = self.sessions.get_mut(&r.session) {
                    session.response(r, out);
                }
            }
            Record::Ready(r) => {
                if let Some(session) = self.sessions.get_mut(&r.session) {
                    session.ready(r, out);
                }
            }
            Record::Loss(r) => {
                if let Some(session) = r.session.and_then(|session| self.sessions.get_mut(&session)) {
                    session.doubt(r.time_ns);
                }
            }
            Record::SessionEnd(r) => {
                if let Some(mut session) = self.sessions.remove(&r.session) {
                    session.process_until(r.session, u64::MAX, r.time_ns, out);
                }
            }
            _ => {}
        }
    }
}

impl Session {
    fn response(&mut self, r: &Response<'_>, out: &mut Vec<Event>) {
        self.process_until(r.session, r.request, r.first_ns, out);
        let Some(front) = self.pending.front_mut().filter(|front| front.offset == r.request) else { return };
        let answer = front.answer.get_or_insert(Answer {
            first_ns: r.first_ns,
            last_ns: r.last_ns,
            rows: 0,
            bytes: 0,
            answers: 0,
            outcome: Outcome::Unknown,
        });
        answer.last_ns = r.last_ns;
        answer.rows = answer.rows.saturating_add(r.rows);
        answer.bytes = answer.bytes.saturating_add(r.len);
        answer.answers = answer.answers.saturating_add(1);
        answer.outcome = r.outcome.clone().into_owned();
        let failed = matches!(r.outcome, Outcome::Error(_));
        // What was sent behind it up to Sync was skipped, a Query too.
        let skips = failed
            && !matches!(front.what, What::Query { .. } | What::Function | What::Mysql(_) | What::Sync);
        match front.what {
            // More may follow; Ready ends them.
            What::Query { .. } | What::Function | What::Mysql(_) => {}
            What::Execute { .. } | What::Ran(_) => {
                if let Some(pending) = self.pending.pop_front() {
                    self.end(r.session, pending, r.last_ns, out);
                }
            }
            // An error of the commit itself: it is what the server skips to.
            What::Sync => {}
            // Defined nothing, as it failed.
            _ if failed => {
                if let Some(pending) = self.pending.pop_front() {
                    self.refused(r.session, pending, out);
                }
            }
            _ => {}
        }
        if skips {
            while self.pending.front().is_some_and(|front| !matches!(front.what, What::Sync)) {
                self.pending.pop_front();
            }
        }
    }

    fn ready(&mut self, r: &Ready, out: &mut Vec<Event>) {
        self.process_until(r.session, r.request.saturating_add(1), r.time_ns, out);
        let was = self.in_transaction;
        self.in_transaction = r.status != TransactionStatus::Idle;
        self.failed |= r.status == TransactionStatus::Failed;
        if was && !self.in_transaction {
            out.push(Event::Transaction(Transaction {
                session: r.session,
                start_ns: self.start_ns,
                end_ns: r.time_ns,
                requests: self.requests,
                failed: self.failed,
            }));
        }
        if !self.in_transaction {
            (self.requests, self.failed) = (0, false);
            self.portals.clear();
        }
    }

    /// Something was lost. What is under way may have been done or not, and is told with whatever outcome is told of it; names that it may
    /// have given are not known any more. MySQL's have numbers that only an answer gives.
    fn doubt(&mut self, now_ns: u64) {
        let (mut statements, mut portals) = (Vec::new(), Vec::new());
        for mut pending in std::mem::take(&mut self.pending) {
            pending.doubted_ns.get_or_insert(now_ns);
            match pending.what {
                What::Parse { name, prepared } => {
                    self.prepared.insert(Arc::clone(&name), prepared);
                    statements.push(name);
                    continue;
                }
                What::Bind { portal, statement, values, formats, redaction } => {
                    self.bind(Arc::clone(&portal), statement, values, formats, redaction);
                    portals.push(portal);
                    continue;
                }
                What::CloseStatement(_)
                | What::ClosePortal(_)
                | What::DescribeStatement(_)
                | What::DescribePortal(_) => continue,
                What::Execute { portal, max_rows } => {
                    pending.what = What::Ran(Box::new(self.ran(&portal, max_rows)));
                }
                _ => {}
            }
            self.pending.push_back(pending);
        }
        for name in statements {
            self.prepared.remove(&name);
        }
        for name in portals {
            self.portals.remove(&name);
        }
    }

    fn ran(&self, portal: &[u8], max_rows: i32) -> Ran {
        let Some(portal) = self.portals.get(portal) else { return Ran { max_rows, ..Ran::default() } };
        Ran {
            text: portal.text.clone(),
            name: Arc::clone(&portal.name),
            parameters: Arc::clone(&portal.parameters),
            max_rows,
            redaction: portal.redaction,
        }
    }

    /// The server has processed everything before this offset.
    fn process_until(&mut self, session: SessionId, offset: u64, now_ns: u64, out: &mut Vec<Event>) {
        while self.pending.front().is_some_and(|front| front.offset < offset) {
            if let Some(pending) = self.pending.pop_front() {
                self.end(session, pending, now_ns, out);
            }
        }
    }

    fn end(&mut self, session: SessionId, pending: Pending, now_ns: u64, out: &mut Vec<Event>) {
        let Pending { offset, time_ns, what, answer, doubted_ns } = pending;
        let now_ns = doubted_ns.map_or(now_ns, |doubted_ns| doubted_ns.clamp(time_ns, now_ns.max(time_ns)));
        let failed = answer.as_ref().is_some_and(|answer| matches!(answer.outcome, Outcome::Error(_)));
        let (kind, ran) = match what {
            What::Parse { name, prepared } => return drop(self.prepared.insert(name, prepared)),
            What::Bind { portal, statement, values, formats, redaction } => {
                return self.bind(portal, statement, values, formats, redaction);
            }
            What::CloseStatement(name) => return drop(self.prepared.remove(&name)),
            What::ClosePortal(name) => return drop(self.portals.remove(&name)),
            What::Sync if failed => (Request::Commit, Ran::default()),
            What::Sync | What::DescribeStatement(_) | What::DescribePortal(_) => return,
            What::Mysql(what) => {
                let refused = what.prepares().filter(|_| failed);
                match (self.mysql.end(what, answer.as_ref().map(|answer| &answer.outcome)), refused) {
                    (Some(ran), _) => (Request::Extended, ran),
                    (None, Some(refused)) => (Request::Prepare, refused),
                    (None, None) => return,
                }
            }
            What::Query { text, redaction } => {
                // The simple protocol replaces the unnamed statement and portal.
                self.portals.remove(&b""[..]);
                (Request::Simple, Ran { text: Some(text), redaction, ..Ran::default() })
            }
            What::Function => (Request::Function, Ran::default()),
            What::Execute { portal, max_rows } => (Request::Extended, self.ran(&portal, max_rows)),
            What::Ran(ran) => (Request::Extended, *ran),
        };
        self.tell(session, Asked { offset, time_ns, kind, ran }, answer, now_ns, out);
    }

    /// What only defines something failed: nothing ran.
    fn refused(&mut self, session: SessionId, pending: Pending, out: &mut Vec<Event>) {
        let Pending { offset, time_ns, what, answer, .. } = pending;
        let of = |prepared: Option<&Prepared>, name: &Arc<[u8]>| Ran {
            text: prepared.and_then(|prepared| prepared.text.clone()),
            name: Arc::clone(name),
            redaction: prepared.map_or(Redaction::None, |prepared| prepared.redaction),
            ..Ran::default()
        };
        let ran = match what {
            What::Parse { name, prepared } => of(Some(&prepared), &name),
            What::Bind { portal, statement, values, formats, redaction } => {
                // As it would have been; the portal of that name goes away before the new one fails.
                self.bind(Arc::clone(&portal), statement, values, formats, redaction);
                let ran = self.ran(&portal, 0);
                self.portals.remove(&portal);
                ran
            }
            What::DescribeStatement(name) | What::CloseStatement(name) => of(self.prepared.get(&name), &name),
            What::DescribePortal(portal) | What::ClosePortal(portal) => self.ran(&portal, 0),
            _ => return,
        };
        let now_ns = time_ns;
        self.tell(session, Asked { offset, time_ns, kind: Request::Prepare, ran }, answer, now_ns, out);
    }

    fn tell(
        &mut self,
        session: SessionId,
        asked: Asked,
        answer: Option<Answer>,
        now_ns: u64,
        out: &mut Vec<Event>,
    ) {
        let Asked { offset, time_ns, kind, ran } = asked;
        let Ran { text, name, parameters, max_rows, redaction } = ran;
        // The commit of what a Sync ends is no request of its own.
        self.requests += u64::from(kind != Request::Commit);
        let answer = answer.unwrap_or(Answer {
            first_ns: now_ns,
            last_ns: now_ns,
            rows: 0,
            bytes: 0,
            answers: 0,
            outcome: Outcome::Unknown,
        });
        // A Query ends with its last answer; when the server is ready a moment later is no work for it.
        let (first_ns, end_ns) = (answer.first_ns, answer.last_ns);
        let Answer { rows, bytes, answers, outcome, .. } = answer;
        out.push(Event::Statement(Box::new(Statement {
            session,
            request: offset,
            kind,
            text,
            name,
            parameters,
            max_rows,
            time_ns,
            first_ns,
            end_ns,
            rows,
            bytes,
            answers,
            outcome,
            redaction,
        })));
    }

    fn bind(
        &mut self,
        portal: Arc<[u8]>,
        statement: Arc<[u8]>,
        values: Vec<Option<Vec<u8>>>,
        formats: Vec<u16>,
        redaction: Redaction,
    ) {
        let prepared = self.prepared.get(&statement);
        let types = prepared.map(|prepared| prepared.types.clone()).unwrap_or_default();
        let text = prepared.and_then(|prepared| prepared.text.clone());
        let redaction = match redaction {
            Redaction::None => prepared.map_or(Redaction::None, |prepared| prepared.redaction),
            other => other,
        };
        let parameters = Arc::new(Parameters { values, formats, types });
        self.portals.insert(portal, Portal { text, name: statement, parameters, redaction });
    }
}

fn postgres(r: &Frontend<'_>) -> Option<What> {
    let header = Header::parse(&r.message).ok()??;
    let redaction = r.redaction;
    Some(match Message::decode(header.tag, &r.message[Header::SIZE..]).ok()? {
        Message::Query(query) => What::Query { text: query.query.into(), redaction },
        Message::FunctionCall(_) => What::Function,
        Message::Parse(parse) => What::Parse {
            name: parse.name.into(),
            prepared: Prepared {
                text: Some(parse.query.into()),
                types: parse.param_types.collect(),
                redaction,
            },
        },
        Message::Bind(bind) => What::Bind {
            portal: bind.portal.into(),
            statement: bind.statement.into(),
            values: bind.arguments.params.map(|value| value.map(<[u8]>::to_vec)).collect(),
            formats: bind.arguments.param_formats.collect(),
            redaction,
        },
        Message::Execute(execute) => {
            What::Execute { portal: execute.portal.into(), max_rows: execute.max_rows.max(0) }
        }
        Message::Close(close) => match close.target {
            Target::Statement => What::CloseStatement(close.name.into()),
            Target::Portal => What::ClosePortal(close.name.into()),
        },
        Message::Describe(describe) => match describe.target {
            Target::Statement => What::DescribeStatement(describe.name.into()),
            Target::Portal => What::DescribePortal(describe.name.into()),
        },
        Message::Sync => What::Sync,
        _ => return None,
    })
}
