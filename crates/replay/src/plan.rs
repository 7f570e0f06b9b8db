// SPDX-License-Identifier: Apache-2.0
//! The trace, made ready to be played: one script per session, and what will not be played, with the reason.
//!
//! A *unit* is what a client sends up to the server's ReadyForQuery: a Query, a FunctionCall, or the messages of the
//! extended protocol up to Sync; of MariaDB and MySQL, a command. Units are the steps of time and order; inside one the messages go out as they came.
//!
//! The messages are in a file ([`Messages`]). What is in memory is the plan without them. A trace has millions of units, so a unit is small, and
//! what many have in common is in tables of the plan ([`Lists`]).

mod build;
mod filter;
mod messages;
mod mysql;
mod omitted;
mod order;
mod script;
mod statements;

use std::collections::{BTreeMap, BTreeSet};
use std::num::{NonZeroU32, NonZeroU64};
use std::ops::Range;

use smallvec::SmallVec;
use underpass_trace::{EndReason, Meta, ServerIdentity, SessionId};
use underpass_wire::backend::TransactionStatus;

use crate::classify::Classifier;
use crate::lists::{ListId, Lists};
pub use build::{from_records, read};
pub use filter::Filter;
pub use messages::Messages;
pub(crate) use messages::type_oids;
pub use omitted::{Omitted, Reason};

/// What to take from a trace.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Which sessions and statements.
    pub filter: Filter,
    /// Leave out what writes.
    pub read_only: bool,
    /// Compare rows by hash, if the trace has them.
    pub rows: Rows,
    /// Captured database to database of the target, for sessions that go to another one: MySQL's COM_INIT_DB and USE.
    pub databases: BTreeMap<String, String>,
}

/// How rows are compared beyond their number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rows {
    /// Not.
    #[default]
    Count,
    /// Their contents, in their order.
    Ordered,
    /// Their contents, in any order.
    Unordered,
}

/// A trace to be played.
#[derive(Debug)]
pub struct Plan {
    /// What the trace says about itself.
    pub meta: Meta,
    /// The servers of a trace that a pooler made; none of others, whose server `meta` names.
    pub servers: Vec<ServerIdentity<'static>>,
    /// The sessions, in the order of their start.
    pub sessions: Vec<Session>,
    /// All messages.
    pub messages: Messages,
    /// The distinct statements.
    pub classifier: Classifier,
    /// What units are compared and reported by.
    pub groups: Vec<Group>,
    /// What units execute: lists of statements in `classifier`.
    pub executes: Lists<u32>,
    /// How the statements of units ended at capture.
    pub expected: Lists<Expected>,
    /// What will not be played.
    pub omitted: Omitted,
    /// When the first of the sessions begins, nanoseconds of the recording host's `CLOCK_MONOTONIC`.
    pub origin_ns: u64,
    /// When the last thing happens, same clock.
    pub end_ns: u64,
    /// The most sessions that were open at once.
    pub sessions_peak: usize,
    /// Commits that others may have to wait for.
    pub commits: usize,
    /// Pairs of neighbouring commits so close, and overlapping, that the trace cannot tell which was first; see
    /// docs/replay.md, "Order".
    pub close_commits: usize,
    /// Blocks of the trace that could not be read.
    pub damaged_blocks: u64,
    /// Records that could not be understood. What is left of the block behind each is missing, too.
    pub malformed_records: u64,
    /// The trace has no regular end: what came last may be missing.
    pub is_torn: bool,
    /// Places where messages of clients are missing: which units those were nobody knows.
    pub holes: u64,
    /// Bytes that are missing there.
    pub hole_bytes: u64,
    /// Sessions without a beginning in what could be read: none of their messages are in the plan.
    pub headless_sessions: u64,
}

/// What units are reported by: the same statements, executed together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Fingerprints joined by `+`; `parse ` and a fingerprint for a unit that only prepares.
    pub key: String,
    /// The statement with its literals replaced, cut.
    pub label: String,
}

/// One session's script.
#[derive(Debug)]
pub struct Session {
    /// Its number in the trace.
    pub id: SessionId,
    /// When it began.
    pub start_ns: u64,
    /// When its login was over.
    pub login_ns: u64,
    /// When it ended, if it did within the trace.
    pub end_ns: Option<u64>,
    /// How it ended.
    pub end: Option<EndReason>,
    /// Whether recording joined it in its middle.
    pub midstream: bool,
    /// Whether it is from a log, which tells less than a capture: no data of COPY, no numbers of rows, one outcome for a Query of several statements.
    pub is_imported: bool,
    /// The user; `None` when the trace does not know.
    pub user: Option<Vec<u8>>,
    /// The database; `None` when the trace does not know.
    pub database: Option<Vec<u8>>,
    /// Its application_name at the start.
    pub application_name: Option<Vec<u8>>,
    /// The other parameters of its StartupMessage.
    pub parameters: Vec<(Vec<u8>, Vec<u8>)>,
    /// Parse messages of statements that it had prepared before the first unit, each whole.
    pub prepared: Vec<Vec<u8>>,
    /// In MySQL's protocol: the statements that it had prepared before the first unit, by the number that each had at capture.
    pub statements: BTreeMap<u32, Vec<u8>>,
    /// What it sends.
    pub units: Vec<Unit>,
    /// Parts of units: `Unit::steps` indexes this.
    pub steps: Vec<Step>,
    /// Where in `Plan::messages` a Parse names the OID of a type that PostgreSQL does not define itself.
    pub type_oids: Vec<(u64, u32)>,
    /// In MySQL's protocol: where in `Plan::messages` the number of a prepared statement is, and that number.
    pub statement_refs: Vec<(u64, u32)>,
    /// In MySQL's protocol: the number that a unit's statement got at capture, for units that prepare one.
    pub prepares: BTreeMap<usize, u32>,
    /// In MySQL's protocol: COM_STMT_CLOSEs that were sent with units that are left out, by the unit ahead of which they are sent.
    pub closes: BTreeMap<usize, Vec<Step>>,
    /// In MySQL's protocol: the command of each unit.
    pub commands: Vec<u8>,
    /// Units that the client asked to cancel, and so long after they were sent, nanoseconds.
    pub cancels: BTreeMap<usize, u64>,
    /// Units that make the session the login user's again.
    pub resets: BTreeSet<usize>,
    /// How many of the sessions had ended when it began.
    pub after_ended: usize,
    /// Its place among the sessions by their end; `None` if it does not end within the trace.
    pub ended: Option<usize>,
}

/// See the head of this module.
#[derive(Debug)]
pub struct Unit {
    /// Offset of its first message in the frontend direction, as the trace counts.
    pub offset: u64,
    /// When its first message was seen.
    pub sent_ns: u64,
    /// When the server was ready after it.
    ready: Option<NonZeroU64>,
    /// Bytes from there to the end of its last message; the largest number also stands for all larger ones.
    len: u32,
    /// Its parts, in `Session::steps`.
    steps: Range<u32>,
    /// It was sent when so many of the session's units were answered: fewer than its index in a pipeline.
    pub after: u32,
    /// What it is reported by, in `Plan::groups`.
    pub group: u32,
    /// Statements that it executes, in `Plan::executes`.
    pub executes: ListId,
    /// How they ended at capture, in `Plan::expected`.
    pub expected: ListId,
    /// How many commits must be done before it is sent, with order `commit`.
    pub after_commits: u32,
    /// Its number among the commits, from 1.
    commit: Option<NonZeroU32>,
    /// The transaction status after it.
    pub status: Option<TransactionStatus>,
    /// Whether it can change what others see.
    pub may_write: bool,
    /// Why it is not sent.
    pub omitted: Option<Reason>,
    /// Why it is sent without some of its statements.
    pub left_out: Option<Reason>,
}

impl Unit {
    /// A unit that begins at this place of its session's stream, at this time, when `after` units were answered; without parts, which
    /// follow those that the session has.
    pub(crate) fn new(offset: u64, sent_ns: u64, after: u32, steps: usize) -> Self {
        let steps = steps as u32;
        Self {
            offset,
            len: 0,
            sent_ns,
            ready: None,
            steps: steps..steps,
            after,
            group: 0,
            executes: ListId::default(),
            expected: ListId::default(),
            after_commits: 0,
            commit: None,
            status: None,
            may_write: false,
            omitted: None,
            left_out: None,
        }
    }

    /// Its parts, in `Session::steps`.
    pub fn steps(&self) -> Range<usize> {
        self.steps.start as usize..self.steps.end as usize
    }

    /// Its last message, so far, ends at this offset.
    pub(crate) fn ends_at(&mut self, offset: u64) {
        self.len = u32::try_from(offset.saturating_sub(self.offset)).unwrap_or(u32::MAX);
    }

    /// Whether a message of it begins at this offset, at which no other unit does.
    pub(crate) fn has(&self, offset: u64) -> bool {
        offset >= self.offset && (offset - self.offset < self.len.into() || self.len == u32::MAX)
    }

    /// When the server was ready after it; `None` if that was not seen.
    pub fn ready_ns(&self) -> Option<u64> {
        self.ready.map(NonZeroU64::get)
    }

    /// The server was ready after it.
    pub(crate) fn is_ready(&mut self, time_ns: u64) {
        self.ready = NonZeroU64::new(time_ns);
    }

    /// Its place among the commits of the trace, if it ends a transaction that may have written.
    pub fn commit(&self) -> Option<usize> {
        self.commit.map(|number| number.get() as usize - 1)
    }

    fn is_commit(&mut self, place: usize) {
        self.commit = NonZeroU32::new(place as u32 + 1);
    }
}

/// A part of a unit that can be sent without waiting: messages that are neighbours in the trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Where its messages begin, in `Plan::messages`.
    start: u64,
    /// Their length. A step is not much longer than a message, which has 2 GiB at most.
    len: u32,
    /// How many of its messages the server answers one by one (extended protocol).
    pub answers: u16,
    /// What must have happened before it is sent.
    pub barrier: Barrier,
    /// What it is to the server.
    pub says: Says,
}

impl Step {
    /// Messages at this place of `Plan::messages`.
    pub(crate) fn new(bytes: Range<u64>, barrier: Barrier, says: Says, answers: u16) -> Self {
        Self { start: bytes.start, len: (bytes.end - bytes.start) as u32, answers, barrier, says }
    }

    /// Its messages, in `Plan::messages`.
    pub fn bytes(&self) -> Range<u64> {
        self.start..self.start + u64::from(self.len)
    }
}

/// What the messages of a step are to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Says {
    /// Requests after which it is not ready.
    Part,
    /// They ask for ReadyForQuery: by Query, Sync or FunctionCall.
    Asks,
    /// Data of COPY IN, which is pointless if the server does not want it.
    CopyData,
}

/// What a step waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Barrier {
    /// Nothing.
    None,
    /// CopyInResponse.
    CopyIn,
    /// Answers to all that was sent before: the client had sent Flush to have them.
    Answers,
}

/// How a statement ended at capture.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Expected {
    /// How; `None`: not seen whole.
    pub end: Option<End>,
    /// Rows sent to the client.
    pub rows: u64,
    /// Hash of their contents, if the trace has them and they are wanted.
    pub hash: Option<u64>,
}

/// A command tag.
pub type Tag = SmallVec<[u8; 16]>;

/// How a statement ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// CommandComplete with this tag.
    Complete(Tag),
    /// EmptyQueryResponse.
    Empty,
    /// PortalSuspended.
    Suspended,
    /// ErrorResponse with this SQLSTATE and message.
    Error([u8; 5], Box<str>),
}

impl Plan {
    /// The statements that a unit executes, in `classifier`.
    pub fn executes(&self, unit: &Unit) -> &[u32] {
        self.executes.get(unit.executes)
    }

    /// How the statements of a unit ended at capture.
    pub fn expected(&self, unit: &Unit) -> &[Expected] {
        self.expected.get(unit.expected)
    }

    /// Units that will be sent.
    pub fn units(&self) -> usize {
        self.sessions.iter().flat_map(|session| &session.units).filter(|unit| unit.omitted.is_none()).count()
    }
}

#[cfg(test)]
mod tests;
