// SPDX-License-Identifier: Apache-2.0
//! The link tracker: follows the bytes of both directions between a client and a server.
//!
//! A [`Link`] belongs to a server connection and lives as long; clients come and go. It holds the responses that are outstanding, in
//! order (`Op`), the transaction status, and where each direction stands inside a message. It decides what passes on unchanged, what is
//! renamed, injected or answered without the server, and when the server may go to another client ([`Link::is_quiescent`]).
//!
//! Rules of PostgreSQL that it relies on (manual, chapter 55 "Frontend/Backend Protocol"):
//! - after an error in the extended protocol the server discards everything up to the next Sync (55.2.3);
//! - during COPY FROM STDIN the server ignores Sync and Flush (55.2.6), so a Sync sent ahead of CopyDone has no answer;
//! - outside COPY, CopyData, CopyDone and CopyFail are ignored.

mod backend;
mod framing;
mod frontend;
mod names;
mod replay;
mod splice;

use std::collections::VecDeque;
use std::sync::Arc;

pub use splice::Splice;
use underpass_wire::{SqlState, frontend as messages};

use crate::prepared::{ClientStatements, ServerStatements, Statement, Statements};

/// What the tracker needs to know of the pool's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkOptions {
    /// Prepared statements are followed and renamed (`max_prepared_statements` above 0, and not session pooling).
    pub rename_statements: bool,
    /// Statements kept on a server (`max_prepared_statements`).
    pub statements_max: u32,
    /// Largest message that is passed on, in bytes (`max_packet_size`).
    pub message_max: u32,
    /// Largest Parse, in bytes, that is held in memory as a whole because it has a name.
    pub statement_bytes_max: u32,
    /// Named statements of one client, in bytes ([`ClientStatements::bytes`](crate::prepared::ClientStatements::bytes)), and those kept on
    /// a server.
    pub client_statement_bytes_max: usize,
    /// The simple query protocol is refused (`disable_pqexec`).
    pub refuse_simple_query: bool,
    /// Clients leave the server when their transaction is over: that it ends then is no more theirs to hear.
    pub serves_transactions: bool,
}

impl Default for LinkOptions {
    fn default() -> Self {
        Self {
            rename_statements: true,
            statements_max: 200,
            message_max: i32::MAX as u32,
            statement_bytes_max: 16 << 20,
            client_statement_bytes_max: 64 << 20,
            refuse_simple_query: false,
            serves_transactions: false,
        }
    }
}

/// Transaction status of the last ReadyForQuery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// `I`: not in a transaction.
    Idle,
    /// `T`: in a transaction block.
    Transaction,
    /// `E`: in a failed transaction block.
    Failed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OpKind {
    Parse,
    Bind,
    Close,
    Describe,
    Execute,
    Sync,
    Query,
    FunctionCall,
    /// CopyDone or CopyFail: no answer of its own, marks where COPY IN ends in the client's stream.
    CopyEnd,
}

impl OpKind {
    /// Errors in answer to it may name a statement.
    fn names_statement(self) -> bool {
        matches!(self, OpKind::Parse | OpKind::Bind | OpKind::Describe)
    }

    fn ends_in_ready(self) -> bool {
        matches!(self, OpKind::Sync | OpKind::Query | OpKind::FunctionCall)
    }

    fn is_uncertain(self) -> bool {
        self.ends_in_ready() || self == OpKind::Execute
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// Goes to the client.
    Forward,
    /// Was asked for by the pooler: swallowed.
    Hidden,
    /// The server was not asked: the pooler makes it up when its turn comes.
    Fake,
}

/// Answers outstanding above which the client is not read.
const PIPELINE_MAX: usize = 32 * 1024;

/// No statement has this id.
const UNNAMED: u64 = u64::MAX;

/// One outstanding response.
#[derive(Debug)]
struct Op {
    kind: OpKind,
    answer: Answer,
    effect: Option<Box<Effect>>,
    /// [`Statement::id`] of the named statement that a Bind or Describe refers to, [`UNNAMED`] for a Parse or Close of the unnamed one,
    /// 0 = none.
    statement: u64,
}

/// A change in a client's table: the name, what it stands for now, what it stood for.
type Renamed = (Box<[u8]>, Option<Arc<Statement>>, Option<Arc<Statement>>);

/// What a Parse or Close did to the tables when it was sent, so that it can be undone if the server never carried it out.
#[derive(Debug, Default)]
struct Effect {
    client: Option<Renamed>,
    server: Option<(Arc<Statement>, OnServer)>,
    /// What an error is to call the statement.
    alias: Option<names::Alias>,
}

/// What becomes of a statement in the server's table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OnServer {
    Added,
    Removed,
}

impl Effect {
    /// Latest first: what it finds in the tables is what it left there.
    fn undo(&self, client: Option<&mut ClientSide>, server: &mut ServerStatements) {
        if let (Some((name, _, before)), Some(client)) = (&self.client, client) {
            client.statements().set(name, before.clone());
        }
        match &self.server {
            Some((statement, OnServer::Added)) => server.remove(statement.id),
            Some((statement, OnServer::Removed)) => server.insert(statement.clone()),
            None => {}
        }
    }

    /// What the tables were when it was done turned out not to be so: done to what they are, and undone to that if it comes to it.
    fn redo(&mut self, client: Option<&mut ClientSide>, server: &mut ServerStatements) {
        if let (Some((name, now, before)), Some(client)) = (&mut self.client, client) {
            *before = client.statements().set(name, now.clone());
        }
        match &self.server {
            // A Parse of a name that is taken fails, a Close of none does nothing.
            Some((statement, OnServer::Added)) if !server.has(statement.id) => {
                server.insert(statement.clone());
            }
            Some((statement, OnServer::Removed)) if server.has(statement.id) => server.remove(statement.id),
            _ => self.server = None,
        }
    }
}

/// The part of a client's state that follows it from server to server.
#[derive(Debug, Default, Clone)]
pub struct ClientSide {
    statements: Option<Box<ClientStatements>>,
    /// Body of the last unnamed Parse (behind its empty name), until a simple query: drivers that prepare, sync and bind later get it
    /// again on whichever server they are given then.
    unnamed: Option<Box<[u8]>>,
}

impl ClientSide {
    fn forget_statements(&mut self) {
        if let Some(statements) = &mut self.statements {
            statements.clear();
        }
    }

    fn statements(&mut self) -> &mut ClientStatements {
        self.statements.get_or_insert_default()
    }

    /// Calls `each` for every statement: the client's name, empty for the unnamed one, and the body of its Parse behind the name.
    pub fn each_statement(&self, mut each: impl FnMut(&[u8], &[u8])) {
        if let Some(body) = &self.unnamed {
            each(b"", body);
        }
        for (name, statement) in self.statements.iter().flat_map(|statements| statements.iter()) {
            each(name, &statement.body);
        }
    }

    /// The client's names for statements, if it ever had any.
    pub fn named_statements(&self) -> Option<&ClientStatements> {
        self.statements.as_deref()
    }

    /// The body of the Parse of its unnamed statement behind the empty name, if there is one.
    pub fn unnamed(&self) -> Option<&[u8]> {
        self.unnamed.as_deref()
    }

    /// The client's unnamed statement is another one now, or gone, and nobody here knows its text.
    pub fn forget_unnamed(&mut self) {
        self.unnamed = None;
    }

    /// How many prepared statements the client has.
    pub fn statement_count(&self) -> usize {
        self.statements.as_ref().map_or(0, |statements| statements.len())
    }
}

/// Why a link cannot go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// A length word that cannot be.
    #[error("invalid message length {1} for type {0:?}")]
    Length(char, u32),
    /// Above `max_packet_size`.
    #[error("message of type {0:?} with {1} bytes is over max_packet_size")]
    TooLarge(char, u32),
    /// A named statement over the limit.
    #[error("prepared statement of {0} bytes is over max_prepared_statement_bytes")]
    StatementTooLarge(u32),
    /// Named statements of one client over their limit.
    #[error(
        "prepared statements of this client take {0} bytes, over max_client_statement_bytes: deallocate some"
    )]
    TooManyStatements(usize),
    /// A type byte that this side never sends here.
    #[error("unknown pkt from {1}: {0:?}")]
    Unexpected(char, Side),
    /// A body that does not hold what its type says.
    #[error("malformed {0} message")]
    Malformed(&'static str),
    /// Statement and portal names that do not end soon enough to be looked at.
    #[error("names in a {0} message take more than 64 KiB")]
    NamesTooLong(&'static str),
    /// An answer that nobody asked for.
    #[error("server sent {0:?}, which answers nothing that was asked")]
    OutOfOrder(char),
    /// A Sync inside COPY IN whose fate cannot be known.
    #[error("Sync inside COPY FROM STDIN ahead of an error: answers can no longer be counted")]
    SyncInCopy,
    /// `disable_pqexec`.
    #[error("PQexec disallowed (disable_pqexec)")]
    SimpleQueryDisabled,
}

/// Where a kernel lane stood when it handed a link over: see [`Link::adopt`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaneState {
    /// ReadyForQuery messages outstanding.
    pub outstanding: u32,
    /// Of the last ReadyForQuery.
    pub status: Status,
    /// The server reads COPY data (of the one Query that is outstanding).
    pub copy_in: bool,
    /// What is outstanding, or its last part, came by the extended protocol.
    pub extended: bool,
    /// The server's unnamed statement is the client's own.
    pub unnamed: bool,
    /// Messages of the extended protocol whose Sync the client has not sent yet went before (session pooling only).
    pub open: bool,
    /// Body bytes of the client's current message that have not come yet.
    pub request_left: u32,
    /// Same for the server's.
    pub response_left: u32,
    /// Bytes of a server message's head that went by already, 0 to 5.
    pub response_head: u8,
}

/// One end of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The application.
    Client,
    /// PostgreSQL.
    Server,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Side::Client => "client",
            Side::Server => "server",
        })
    }
}

impl LinkError {
    /// What the client is told, in PostgreSQL's words where it has them; the log has PgBouncer's.
    pub fn told(self) -> String {
        match self {
            LinkError::Unexpected(tag, Side::Client) => {
                format!("invalid frontend message type {}", u32::from(tag))
            }
            error => error.to_string(),
        }
    }

    /// The code that goes with it.
    pub fn sqlstate(self) -> SqlState {
        match self {
            LinkError::SimpleQueryDisabled => SqlState::FEATURE_NOT_SUPPORTED,
            LinkError::StatementTooLarge(_)
            | LinkError::TooManyStatements(_)
            | LinkError::TooLarge(..)
            | LinkError::NamesTooLong(_) => SqlState::PROGRAM_LIMIT_EXCEEDED,
            LinkError::Length(..)
            | LinkError::Unexpected(..)
            | LinkError::Malformed(_)
            | LinkError::OutOfOrder(_)
            | LinkError::SyncInCopy => SqlState::PROTOCOL_VIOLATION,
        }
    }
}

/// Judges a client's message by its head, so that nobody waits for a body that is not to be had. Returns the length word.
///
/// # Errors
/// A type that no client sends, a length that its type cannot have, one above `message_max` (`max_packet_size`).
#[inline]
pub fn judge_head(&[tag, a, b, c, d]: &[u8; 5], message_max: u32) -> Result<u32, LinkError> {
    let length = u32::from_be_bytes([a, b, c, d]);
    let Some(most) = messages::len_max(tag) else {
        return Err(LinkError::Unexpected(tag as char, Side::Client));
    };
    if length < 4 || length > most {
        return Err(LinkError::Length(tag as char, length));
    }
    if length > message_max {
        return Err(LinkError::TooLarge(tag as char, length));
    }
    Ok(length)
}

/// Where the client's stream left off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrontendEvent {
    /// All that could be passed on was.
    Fed,
    /// The client sent Terminate.
    Terminate,
}

/// What the server's stream told, beyond bytes to pass on.
pub trait BackendObserver {
    /// ParameterStatus. Returns whether the client may see it (false while the pooler itself restores parameters).
    fn parameter_status(&mut self, name: &str, value: &str, hidden: bool);
    /// ReadyForQuery that answers something of the client's.
    fn ready(&mut self, status: Status);
    /// ErrorResponse to something the pooler itself asked: SQLSTATE and message.
    fn hidden_error(&mut self, body: &[u8]);
}

/// Whose the unnamed statement of the server is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unnamed {
    /// Perhaps another client's: it must not be bound.
    Stranger,
    /// The present client's Parse was sent since the last Sync: if it is discarded, so is a Bind behind it.
    InBatch,
    /// The present client's: the server said so.
    Ours,
}

/// The tracker of one server connection.
#[derive(Debug)]
pub struct Link {
    options: LinkOptions,
    pending: VecDeque<Op>,
    /// How many of them may change what the server is able to do: fail a transaction, forget statements.
    uncertain: u32,
    status: Status,
    /// Body bytes of the client's current message that pass unseen.
    frontend_left: u32,
    /// Same for the server's.
    backend_left: u32,
    /// Whether those bytes of the server are swallowed.
    backend_left_hidden: bool,
    /// Extended-protocol messages were passed on since the last Sync: an implicit transaction is open.
    in_extended: bool,
    /// An error was seen whose Sync the client has not sent yet: the server discards all up to it.
    skip_until_sync: bool,
    /// The server reads COPY data, and the client has not sent its end.
    copy_in: bool,
    /// The Query that is answered had COPY data: when the statement that took them is over, so is what marks their end.
    copy_begun: bool,
    /// Syncs passed on during `copy_in`: the server ignores them.
    copy_syncs: u32,
    /// Syncs that went ahead of the data of this COPY: the server ignores them, unless an error meets it before it reads them.
    copy_ahead: u32,
    /// That error has come: for each of those Syncs there may be a ReadyForQuery that nobody counts. [`Link::resync`] ends the doubt.
    doubt: bool,
    resync: Resync,
    /// Replication: both directions pass as they come until the connection ends; only where their messages end is followed.
    copy_both: bool,
    /// Heads of messages that have passed in part during `copy_both`.
    frontend_head: framing::Head,
    backend_head: framing::Head,
    /// The server reported an error outside any command: it is about to end the connection.
    is_ending: bool,
    /// The client's next message is passed on once all answers are there, because it depends on them.
    holds: bool,
    /// ReadyForQuery outstanding of requests that a kernel lane forwarded: their answers pass unseen, one by one.
    foreign: u32,
    /// Whether the last of them ends a batch of the extended protocol.
    foreign_extended: bool,
    /// The Sync of the last of them has still to pass here: what comes before it belongs to the same batch and is answered unseen with it.
    foreign_open: bool,
    /// Head of a server message that the lane has forwarded already: completed by the next bytes, not passed on again.
    forwarded_head: u8,
    unnamed: Unnamed,
    batch: replay::Batch,
    /// Statements the server holds.
    pub statements: ServerStatements,
    /// Bytes of parse messages sent on behalf of clients, and how many (`SHOW STATS`).
    pub counts: LinkCounts,
}

/// How far the question has come by which the number of answers is made certain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Resync {
    None,
    /// Each ReadyForQuery but one is a stray one, which the client would hear without us, too.
    Asked {
        /// Whether there was one.
        ready: bool,
        /// Whether the error is over that ends an open batch.
        failed: bool,
    },
    /// CloseComplete was there: the next ReadyForQuery is the last one.
    Answered,
}

/// Counters of a link since they were last taken.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct LinkCounts {
    /// Named Parse messages of clients.
    pub client_parse: u64,
    /// Named Parse messages passed to or injected into the server.
    pub server_parse: u64,
    /// Bind messages of named statements.
    pub bind: u64,
}

impl Link {
    /// The tracker of a server that has just finished its login.
    pub fn new(options: LinkOptions) -> Self {
        Self {
            options,
            pending: VecDeque::new(),
            uncertain: 0,
            status: Status::Idle,
            frontend_left: 0,
            backend_left: 0,
            backend_left_hidden: false,
            in_extended: false,
            skip_until_sync: false,
            copy_in: false,
            copy_begun: false,
            copy_syncs: 0,
            copy_ahead: 0,
            doubt: false,
            resync: Resync::None,
            copy_both: false,
            frontend_head: framing::Head::default(),
            backend_head: framing::Head::default(),
            is_ending: false,
            holds: false,
            foreign: 0,
            foreign_extended: false,
            foreign_open: false,
            forwarded_head: 0,
            unnamed: Unnamed::Stranger,
            batch: replay::Batch::default(),
            statements: ServerStatements::default(),
            counts: LinkCounts::default(),
        }
    }

    /// New options, after a reload. Only between links.
    pub fn set_options(&mut self, options: LinkOptions) {
        self.options = options;
    }

    /// Called when a client is linked.
    pub fn begin(&mut self) {
        self.unnamed = Unnamed::Stranger;
        self.holds = false;
    }

    /// Nothing is outstanding, no transaction is open, both directions stand between messages: the server may go to another client.
    pub fn is_quiescent(&self) -> bool {
        self.status == Status::Idle && self.is_settled()
    }

    /// The server has got the beginning of a message and waits for its rest.
    pub fn is_cut(&self) -> bool {
        self.frontend_left > 0 || self.frontend_head.is_begun()
    }

    /// The client has got the beginning of a message and waits for its rest: whatever it is told now, it takes for that.
    pub fn is_answer_cut(&self) -> bool {
        self.backend_left > 0 && !self.backend_left_hidden
            || self.forwarded_head > 0
            || self.backend_head.is_begun()
    }

    /// Whether the server has said, unasked, that it ends the connection (`57P01`, `57P05`): it does so when its process gets to it.
    pub fn is_ending(&self) -> bool {
        self.is_ending
    }

    /// Whether an answer that is made up may go to the client now.
    fn may_make_up(&self) -> bool {
        !self.is_busy() && self.backend_left == 0 && self.forwarded_head == 0
    }

    /// Nothing is outstanding and both directions stand between messages; a transaction may be open.
    pub fn is_settled(&self) -> bool {
        self.pending.is_empty()
            && self.foreign == 0
            && self.resync == Resync::None
            && !self.in_extended
            && !self.skip_until_sync
            && self.frontend_left == 0
            && self.backend_left == 0
            && !self.copy_in
            && !self.copy_both
    }

    /// The transaction status of the last ReadyForQuery.
    pub fn status(&self) -> Status {
        self.status
    }

    /// Whether an answer is outstanding, that is, the server has work.
    pub fn is_busy(&self) -> bool {
        self.foreign > 0 || self.resync != Resync::None || !self.pending.is_empty()
    }

    /// Whether a ReadyForQuery may still come that nobody counts. The server must not go to another client before [`Link::resync`] has
    /// ended that.
    pub fn is_doubtful(&self) -> bool {
        self.doubt
    }

    /// How many answers are outstanding.
    pub fn outstanding(&self) -> usize {
        self.pending.len() + self.foreign as usize
    }

    /// Whether [`Link::frontend`] takes no more of the client now: a pipeline is bounded by the memory for its answers. What the client has
    /// begun to say it ends first.
    pub fn is_full(&self) -> bool {
        self.outstanding() > PIPELINE_MAX && self.frontend_left == 0
    }

    /// Whether [`Link::frontend`] uses nothing now: the client's next message means one thing or another by what the server answers to those
    /// before it (a name is taken, or a DEALLOCATE ALL has freed it). Offer it again, with what follows, once this is false.
    pub fn is_holding(&self) -> bool {
        self.holds
    }

    /// Whether the server waits for what only the client can send: the end of COPY data, or the Sync behind an error. [`Link::abandon`]
    /// sends it in place of a client that has gone.
    pub fn awaits_client(&self) -> bool {
        self.copy_in || self.skip_until_sync
    }

    /// Whether the server waits for COPY data or their end.
    pub fn is_copy_in(&self) -> bool {
        self.copy_in
    }

    /// Whether bytes pass unseen because the connection is a replication stream.
    pub fn is_copy_both(&self) -> bool {
        self.copy_both
    }

    /// Takes over a link in the middle of what a kernel lane carried: `outstanding` ReadyForQuery are to come, the last one seen said
    /// `status`. A lane hands over at the head of a request message or inside its body (`request_left` bytes are missing), and anywhere
    /// in the responses: `response_left` body bytes are missing, or `response_head` bytes of a head have been forwarded, which the caller
    /// puts in front of what it reads.
    pub fn adopt(&mut self, lane: LaneState) {
        debug_assert!(self.pending.is_empty());
        debug_assert!(!lane.open || !self.options.rename_statements);
        self.foreign = lane.outstanding + u32::from(lane.open);
        self.foreign_extended = lane.extended;
        self.foreign_open = lane.open;
        self.in_extended = lane.open;
        self.status = lane.status;
        self.copy_in = lane.copy_in && lane.outstanding == 1 && !lane.open;
        if self.copy_in {
            // The one request whose end is known: followed as if it had passed here.
            self.foreign = 0;
            self.copy_begun = true;
            self.push(OpKind::Query, Answer::Forward, None);
        }
        self.frontend_left = lane.request_left;
        self.backend_left = lane.response_left;
        self.backend_left_hidden = false;
        self.forwarded_head = lane.response_head;
        self.unnamed = if lane.unnamed { Unnamed::Ours } else { Unnamed::Stranger };
    }

    /// Asks the server `sql` by the simple protocol; the answer is swallowed, errors in it go to [`BackendObserver::hidden_error`].
    pub fn inject_query(&mut self, sql: &str, out: &mut Vec<u8>) {
        crate::prepared::message(out, b'Q', &[sql.as_bytes(), b"\0"]);
        self.push(OpKind::Query, Answer::Hidden, None);
    }

    /// Ends [`Link::is_doubtful`]: closes a statement that does not exist, which changes nothing (a Query would end the unnamed statement), and
    /// whose CloseComplete no stray answer looks like. Holds the client back until that is there.
    pub fn resync(&mut self, out: &mut Vec<u8>) {
        debug_assert!(self.is_settled());
        // Who pipelined behind such a COPY may have left a batch open without our knowing.
        end_batch(out);
        crate::prepared::message(out, b'C', &[b"S", &crate::prepared::nonexistent(b"gone"), b"\0"]);
        crate::prepared::message(out, b'S', &[]);
        self.resync = Resync::Asked { ready: false, failed: false };
        self.holds = true;
    }

    /// The client has gone: completes what it left half done, so that the server comes to a ReadyForQuery. Returns false where that
    /// cannot be done, because a message was cut in the middle or the connection is a replication stream.
    pub fn abandon(&mut self, out: &mut Vec<u8>) -> bool {
        if self.frontend_left > 0 || self.copy_both || self.copy_syncs > 0 {
            return false;
        }
        self.holds = false;
        self.batch = replay::Batch::default();
        // Answers that were to be made up or passed on have no reader; effects on the server's table stay true.
        for op in &mut self.pending {
            if op.answer == Answer::Forward {
                op.answer = Answer::Hidden;
            }
        }
        let was_copy = self.copy_in;
        if self.copy_in {
            crate::prepared::message(out, b'f', &[b"client disconnected\0"]);
            self.push(OpKind::CopyEnd, Answer::Hidden, None);
            self.copy_in = false;
        }
        if self.in_extended || self.skip_until_sync {
            if !self.skip_until_sync && !was_copy {
                end_batch(out);
                self.push(OpKind::Bind, Answer::Hidden, None);
            } else {
                crate::prepared::message(out, b'S', &[]);
            }
            self.push(OpKind::Sync, Answer::Hidden, None);
            self.in_extended = false;
            self.skip_until_sync = false;
            if std::mem::take(&mut self.foreign_open) {
                // The answers to both are the last of those that pass unseen.
                self.pending.clear();
                self.uncertain = 0;
            }
        }
        true
    }

    fn push(&mut self, kind: OpKind, answer: Answer, effect: Option<Box<Effect>>) {
        self.push_op(Op { kind, answer, effect, statement: 0 });
    }

    fn push_op(&mut self, op: Op) {
        self.uncertain += u32::from(op.kind.is_uncertain());
        self.pending.push_back(op);
    }

    /// The same, as the next to be answered.
    fn push_front_op(&mut self, op: Op) {
        self.uncertain += u32::from(op.kind.is_uncertain());
        self.pending.push_front(op);
    }

    fn pop(&mut self) -> Option<Op> {
        let op = self.pending.pop_front()?;
        self.batch.forget();
        self.uncertain -= u32::from(op.kind.is_uncertain());
        Some(op)
    }

    /// Holds the client back until all that is outstanding is answered. The server keeps answers to itself until a Sync or Flush.
    fn hold(&mut self, input: &[u8], out: &mut Splice<'_>) {
        self.holds = true;
        if self.in_extended {
            crate::prepared::message(out.compose(input), b'H', &[]);
        }
    }

    /// Whether the answers are there that the client was held back for. In COPY FROM STDIN the server waits for it.
    fn let_go(&mut self) {
        if self.holds && (!self.is_busy() || self.copy_in || self.copy_both) {
            self.holds = false;
        }
    }

    /// Whether the server is known to be able to parse, and to have the statements it is thought to have, when it reads what is sent now.
    fn is_certain(&self) -> bool {
        self.status != Status::Failed && self.uncertain == 0 && self.foreign == 0
    }
}

/// A Sync, behind an error: alone it would commit what its client had not.
fn end_batch(out: &mut Vec<u8>) {
    let gone = crate::prepared::nonexistent(b"gone");
    crate::prepared::message(out, b'B', &[b"\0", &gone, b"\0\0\0\0\0\0\0"]);
    crate::prepared::message(out, b'S', &[]);
}

/// What [`Link::frontend`] works with besides the bytes.
#[derive(Debug)]
pub struct FrontendContext<'a> {
    /// The client's own state.
    pub client: &'a mut ClientSide,
    /// The table of all statements.
    pub statements: &'a Statements,
    /// Answers for the client that need no server.
    pub to_client: &'a mut Vec<u8>,
}

#[cfg(test)]
mod tests;
