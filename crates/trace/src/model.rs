// SPDX-License-Identifier: Apache-2.0
//! What a trace is made of: records in the order in which the recorder learned of them.
//!
//! Records borrow or own their bytes, so that a recorder writes without copying and a reader may keep them
//! ([`Record::into_owned`]).
//!
//! * **Time** is `CLOCK_MONOTONIC` of the recording host in nanoseconds. [`Clock`] records tie it to UTC.
//! * **Offsets** count the bytes of one direction of one session, from 0 at the first byte of the connection
//!   (inside TLS: of the plain text), also those that are not in the trace. They say exactly what is missing.
//!   A session that was joined in its middle counts from where recording began.
//! * A request is named by the offset of its frontend message. So a response tells what it answers, whatever
//!   the client pipelined.
//!
//! ```text
//! frontend  0          85       120      131      144   149            (offsets)
//!           | startup  | Parse  | Bind   | Execute| Sync|
//! backend   SessionStart         Response{request: 131, rows: 1, "SELECT 1"}  Ready{request: 144, Idle}
//! ```

use std::borrow::Cow;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
pub use underpass_wire::backend::TransactionStatus;

/// Bytes that a record borrows or owns. Their encoding is the session's `client_encoding`.
pub type Bytes<'a> = Cow<'a, [u8]>;

/// A session's number within its trace: never used twice in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SessionId(pub u64);

/// Which of the two byte streams of a session, named as the PostgreSQL manual names messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From client to server.
    Frontend,
    /// From server to client.
    Backend,
}

/// One entry of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Record<'a> {
    /// A session begins, or is joined.
    SessionStart(SessionStart<'a>),
    /// A client's message.
    Frontend(Frontend<'a>),
    /// How a request ended.
    Response(Response<'a>),
    /// The server waits for the next request.
    Ready(Ready),
    /// A server's message; only at level [`Level::Full`].
    Backend(Backend<'a>),
    /// The server told a parameter's value.
    ParameterStatus(ParameterStatus<'a>),
    /// A statement that was prepared before recording began.
    PreparedFill(PreparedFill<'a>),
    /// A request to cancel what a session does.
    Cancel(Cancel),
    /// Bytes that were left out on purpose.
    Withheld(Withheld),
    /// Something that was not recorded and should have been.
    Loss(Loss),
    /// A session ends, or recording does.
    SessionEnd(SessionEnd),
    /// What the monotonic clock means.
    Clock(Clock),
    /// The recorder's own accounts so far.
    Counters(Counters),
    /// Which server a database is, of a trace that a pooler made.
    Server(ServerIdentity<'a>),
    /// What the recorder has to say to the trace's reader: what it could not record, and why.
    Note(Note<'a>),
}

/// A session begins. Written when the login is over, so that all of it is known; also for a login that failed,
/// whose ErrorResponse follows as a [`Response`] to request 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionStart<'a> {
    /// The session.
    pub session: SessionId,
    /// When the connection's first byte was seen; when it was joined, for a `midstream` session.
    pub time_ns: u64,
    /// When the server was first ready for a query; `None` for a login that failed, and for `midstream`.
    pub ready_ns: Option<u64>,
    /// Where its bytes were taken.
    pub source: Source,
    /// How they travelled.
    pub transport: Transport,
    /// The client's address; `None` for Unix sockets and when it is not known.
    pub peer: Option<SocketAddr>,
    /// The server's process ID (BackendKeyData; MySQL: the connection id). The cancel key is never recorded.
    pub backend_pid: Option<u32>,
    /// Whether recording began when the session was already under way. Then the login was not seen, and
    /// `user`, `database` and `parameters` may have come from the server's statistics, or be missing.
    pub midstream: bool,
    /// The protocol version asked for: major in the upper half, as in a StartupMessage; 0 when not known.
    pub protocol_version: u32,
    /// The database; `None` when it is not known.
    pub database: Option<Bytes<'a>>,
    /// The user; `None` when it is not known.
    pub user: Option<Bytes<'a>>,
    /// `application_name` as the client gave it at the start.
    pub application_name: Option<Bytes<'a>>,
    /// All other parameters of the StartupMessage, in the client's order.
    pub parameters: Vec<(Bytes<'a>, Bytes<'a>)>,
    /// Bytes of the login in the frontend direction: the offset of the first message after it.
    pub frontend_offset: u64,
    /// Bytes of the login in the backend direction, its ReadyForQuery included.
    pub backend_offset: u64,
}

/// Where a session's bytes were taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Packets of a plain TCP connection, at the cgroup of the server.
    CgroupSkb,
    /// `secure_read` and `secure_write` of PostgreSQL, or their like, in the server's process.
    Uprobe,
    /// The pooler.
    Pooler,
    /// A server log.
    Import,
    /// Made by a program: tests, generators.
    Synthetic,
}

/// How a session's bytes travelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Transport {
    /// TCP, not encrypted.
    Tcp,
    /// TCP under TLS.
    Tls,
    /// TCP under GSSAPI encryption.
    Gss,
    /// A Unix socket.
    Unix,
    /// Not known: the record comes from a log.
    Unknown,
}

/// A message of the client, one record each. First packets, passwords and other login payloads never are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frontend<'a> {
    /// The session.
    pub session: SessionId,
    /// When its last byte was seen.
    pub time_ns: u64,
    /// Offset of its first byte.
    pub offset: u64,
    /// Bytes it had on the wire. Equal to `message.len()` unless redaction changed that.
    pub wire_len: u64,
    /// What was done to it.
    pub redaction: Redaction,
    /// The whole message, with type byte and length word (MySQL: with the packet headers).
    pub message: Bytes<'a>,
}

impl<'a> Frontend<'a> {
    /// A message as it was on the wire.
    pub fn new(session: SessionId, time_ns: u64, offset: u64, message: impl Into<Bytes<'a>>) -> Self {
        let message = message.into();
        let wire_len = message.len() as u64;
        Self { session, time_ns, offset, wire_len, redaction: Redaction::None, message }
    }
}

/// What was done to a message before it was stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Redaction {
    /// Nothing.
    #[default]
    None,
    /// A password in it was overwritten.
    Password,
    /// Its literals and parameters were replaced by keyed hashes (and passwords overwritten).
    Masked,
}

/// How one statement ended. A Query with several statements has several, all with the same `request`, in order.
/// Parse, Bind, Describe and Close have one only when they fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response<'a> {
    /// The session.
    pub session: SessionId,
    /// Offset of the Query, Execute or FunctionCall that it answers; of the message that failed, for an error.
    pub request: u64,
    /// Offset of its first byte in the backend direction.
    pub offset: u64,
    /// Its bytes, from the first message that belongs to it to its last.
    pub len: u64,
    /// When its first byte was seen.
    pub first_ns: u64,
    /// When its last byte was seen.
    pub last_ns: u64,
    /// Rows that were sent to the client: DataRow messages; CopyData messages of COPY OUT.
    pub rows: u64,
    /// How it ended.
    pub outcome: Outcome<'a>,
}

/// How a statement ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome<'a> {
    /// CommandComplete, FunctionCallResponse (with an empty tag), or MySQL's OK.
    Complete {
        /// The command tag: `INSERT 0 5`.
        tag: Bytes<'a>,
    },
    /// EmptyQueryResponse.
    Empty,
    /// PortalSuspended: the portal has more rows than Execute asked for.
    Suspended,
    /// ErrorResponse.
    Error(ErrorOutcome<'a>),
    /// The response was not seen whole, because bytes were lost or the session ended.
    Unknown,
}

/// An ErrorResponse.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorOutcome<'a> {
    /// The SQLSTATE.
    pub sqlstate: [u8; 5],
    /// Whether the server ended the session with it (FATAL, PANIC).
    pub fatal: bool,
    /// The primary message; empty when literals are masked, because it may quote one.
    pub message: Bytes<'a>,
}

/// The server is ready for the next request (ReadyForQuery).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The session.
    pub session: SessionId,
    /// When its last byte was seen.
    pub time_ns: u64,
    /// Offset of the Query, Sync or FunctionCall that it answers.
    pub request: u64,
    /// Offset of its first byte in the backend direction.
    pub offset: u64,
    /// The transaction status.
    pub status: TransactionStatus,
}

/// A message of the server, one record each, in addition to what summarises it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backend<'a> {
    /// The session.
    pub session: SessionId,
    /// When its last byte was seen.
    pub time_ns: u64,
    /// Offset of its first byte.
    pub offset: u64,
    /// The whole message, with type byte and length word.
    pub message: Bytes<'a>,
}

/// The server told a parameter's value. Those of the login belong to it as well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterStatus<'a> {
    /// The session.
    pub session: SessionId,
    /// When it was seen.
    pub time_ns: u64,
    /// The parameter.
    pub name: Bytes<'a>,
    /// Its value.
    pub value: Bytes<'a>,
}

/// A statement that the session prepared before recording began, as the server later showed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreparedFill<'a> {
    /// The session.
    pub session: SessionId,
    /// When it was learned.
    pub time_ns: u64,
    /// The statement's name; empty for the unnamed one.
    pub name: Bytes<'a>,
    /// Its text.
    pub query: Bytes<'a>,
    /// Type OIDs of its parameters, as far as they are known; 0 leaves one to the server.
    pub param_types: Vec<u32>,
    /// What was done to the text.
    pub redaction: Redaction,
}

/// A CancelRequest. Its key is never recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cancel {
    /// When it was seen.
    pub time_ns: u64,
    /// The session that it names, when that is in the trace.
    pub session: Option<SessionId>,
    /// The process ID that it names.
    pub backend_pid: u32,
}

/// Bytes of a session that are not in the trace on purpose: login payloads, statements that a filter left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Withheld {
    /// The session.
    pub session: SessionId,
    /// When the last of them was seen.
    pub time_ns: u64,
    /// Which way they went.
    pub direction: Direction,
    /// Offset of the first of them.
    pub offset: u64,
    /// How many.
    pub len: u64,
    /// Why.
    pub reason: WithheldReason,
}

/// Why bytes were left out on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WithheldReason {
    /// Passwords, SASL and GSSAPI payloads.
    Authentication,
    /// A filter.
    Filter,
    /// A replication stream.
    Replication,
    /// Data that masking cannot keep the shape of: COPY data, rows.
    Masking,
    /// The beginning of a message whose rest never came, because the session or its recording ended.
    Incomplete,
}

/// Something that should be in the trace and is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss {
    /// The session; `None` when it is not known which.
    pub session: Option<SessionId>,
    /// When the loss was noticed.
    pub time_ns: u64,
    /// Which way the bytes went.
    pub direction: Direction,
    /// Offset of the first byte that is missing; 0 without a session.
    pub offset: u64,
    /// How many are missing, bytes.
    pub len: u64,
    /// Why.
    pub reason: LossReason,
}

/// Why something is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LossReason {
    /// The ring buffer between kernel and recorder was full.
    RingFull,
    /// The bytes could not be read in the kernel (a page fault).
    Fault,
    /// A gap in the sequence numbers that nothing else explains.
    Gap,
    /// The recorder could not keep up.
    WriterQueue,
    /// The bytes are there, but after an earlier loss the message boundary was not known.
    Resync,
    /// The bytes did not follow the protocol.
    Protocol,
    /// The independent audit at the end of the connection counted more than was seen.
    Audit,
}

/// A session ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionEnd {
    /// The session.
    pub session: SessionId,
    /// When.
    pub time_ns: u64,
    /// Why.
    pub reason: EndReason,
    /// Accounts of the frontend direction.
    pub frontend: ByteTotals,
    /// Accounts of the backend direction.
    pub backend: ByteTotals,
}

/// Why a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EndReason {
    /// The client said Terminate (MySQL: COM_QUIT).
    Terminate,
    /// The client's end closed without it.
    ClientClosed,
    /// The server closed the connection.
    ServerClosed,
    /// The connection was reset.
    Reset,
    /// Recording ended first; the session goes on.
    RecordingEnded,
    /// Not known.
    Unknown,
}

/// Where the bytes of one direction of a session went: `seen = recorded + lost + withheld`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByteTotals {
    /// Bytes that passed, as the source counted them.
    pub seen: u64,
    /// Bytes that are in the trace: in messages, or counted in a response's summary.
    pub recorded: u64,
    /// Bytes that are in [`Loss`] records.
    pub lost: u64,
    /// Bytes that are in [`Withheld`] records.
    pub withheld: u64,
    /// What somebody else counted: the kernel for the socket, the pooler's workers. `None` where only the source itself counts, as the
    /// probes do, and where the end was not seen.
    pub audited: Option<u64>,
}

impl ByteTotals {
    /// Whether the accounts add up, and agree with the kernel's if it was asked.
    pub fn add_up(&self) -> bool {
        let sum = self.recorded.checked_add(self.lost).and_then(|sum| sum.checked_add(self.withheld));
        sum == Some(self.seen) && self.audited.is_none_or(|audited| audited == self.seen)
    }
}

/// One moment on two clocks. Written at the start of every segment, and whenever they may have drifted apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clock {
    /// `CLOCK_MONOTONIC`, nanoseconds.
    pub monotonic_ns: u64,
    /// UTC, nanoseconds since 1970.
    pub realtime_ns: i64,
}

/// Accounts of the whole recording up to now, over all sessions: `seen = recorded + lost + filtered`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// When they were read.
    pub time_ns: u64,
    /// Events (packets, calls) and their bytes that the source saw.
    pub seen: Count,
    /// Those that reached the recorder.
    pub recorded: Count,
    /// Those that did not.
    pub lost: Count,
    /// Those that a filter left out.
    pub filtered: Count,
}

/// Which server stands behind a database of a pooler that records: a trace of such has as many as the pooler leads to. The last of
/// a database counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerIdentity<'a> {
    /// When it was asked.
    pub time_ns: u64,
    /// The database, as clients name it.
    pub database: Bytes<'a>,
    /// Where the pooler's configuration has it: `host:port` or the directory of a socket and its port, several with commas.
    pub address: Bytes<'a>,
    /// Its `server_version`; empty if it did not say.
    pub version: Bytes<'a>,
    /// Its `system_identifier` in decimal, if it said so.
    pub system_identifier: Option<Bytes<'a>>,
}

/// What the recorder has to say to the trace's reader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note<'a> {
    /// When it was said.
    pub time_ns: u64,
    /// A sentence.
    pub text: Bytes<'a>,
}

/// A number of events and of their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Count {
    /// Events.
    pub events: u64,
    /// Bytes.
    pub bytes: u64,
}

/// How much of the responses is recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Only [`Ready`] records.
    None,
    /// [`Response`] and [`Ready`] records.
    #[default]
    Summary,
    /// These, and all messages of the server.
    Full,
}

impl Record<'_> {
    /// The record's place in time: when it was complete.
    pub fn time_ns(&self) -> u64 {
        match self {
            Self::SessionStart(r) => r.time_ns,
            Self::Frontend(r) => r.time_ns,
            Self::Response(r) => r.last_ns,
            Self::Ready(r) => r.time_ns,
            Self::Backend(r) => r.time_ns,
            Self::ParameterStatus(r) => r.time_ns,
            Self::PreparedFill(r) => r.time_ns,
            Self::Cancel(r) => r.time_ns,
            Self::Withheld(r) => r.time_ns,
            Self::Loss(r) => r.time_ns,
            Self::SessionEnd(r) => r.time_ns,
            Self::Clock(r) => r.monotonic_ns,
            Self::Counters(r) => r.time_ns,
            Self::Server(r) => r.time_ns,
            Self::Note(r) => r.time_ns,
        }
    }

    /// The session it belongs to, if one.
    pub fn session(&self) -> Option<SessionId> {
        match self {
            Self::SessionStart(r) => Some(r.session),
            Self::Frontend(r) => Some(r.session),
            Self::Response(r) => Some(r.session),
            Self::Ready(r) => Some(r.session),
            Self::Backend(r) => Some(r.session),
            Self::ParameterStatus(r) => Some(r.session),
            Self::PreparedFill(r) => Some(r.session),
            Self::Cancel(r) => r.session,
            Self::Withheld(r) => Some(r.session),
            Self::Loss(r) => r.session,
            Self::SessionEnd(r) => Some(r.session),
            Self::Clock(_) | Self::Counters(_) | Self::Server(_) | Self::Note(_) => None,
        }
    }

    /// The same record with bytes of its own.
    pub fn into_owned(self) -> Record<'static> {
        match self {
            Self::SessionStart(r) => Record::SessionStart(r.into_owned()),
            Self::Frontend(r) => Record::Frontend(r.into_owned()),
            Self::Response(r) => Record::Response(r.into_owned()),
            Self::Ready(r) => Record::Ready(r),
            Self::Backend(Backend { session, time_ns, offset, message }) => {
                Record::Backend(Backend { session, time_ns, offset, message: own(message) })
            }
            Self::ParameterStatus(ParameterStatus { session, time_ns, name, value }) => {
                Record::ParameterStatus(ParameterStatus {
                    session,
                    time_ns,
                    name: own(name),
                    value: own(value),
                })
            }
            Self::PreparedFill(r) => Record::PreparedFill(r.into_owned()),
            Self::Cancel(r) => Record::Cancel(r),
            Self::Withheld(r) => Record::Withheld(r),
            Self::Loss(r) => Record::Loss(r),
            Self::SessionEnd(r) => Record::SessionEnd(r),
            Self::Clock(r) => Record::Clock(r),
            Self::Counters(r) => Record::Counters(r),
            Self::Server(r) => Record::Server(r.into_owned()),
            Self::Note(Note { time_ns, text }) => Record::Note(Note { time_ns, text: own(text) }),
        }
    }
}

impl SessionStart<'_> {
    /// The same with bytes of its own.
    pub fn into_owned(self) -> SessionStart<'static> {
        SessionStart {
            session: self.session,
            time_ns: self.time_ns,
            ready_ns: self.ready_ns,
            source: self.source,
            transport: self.transport,
            peer: self.peer,
            backend_pid: self.backend_pid,
            midstream: self.midstream,
            protocol_version: self.protocol_version,
            database: self.database.map(own),
            user: self.user.map(own),
            application_name: self.application_name.map(own),
            parameters: self.parameters.into_iter().map(|(name, value)| (own(name), own(value))).collect(),
            frontend_offset: self.frontend_offset,
            backend_offset: self.backend_offset,
        }
    }
}

impl Frontend<'_> {
    /// The same with bytes of its own.
    pub fn into_owned(self) -> Frontend<'static> {
        Frontend {
            session: self.session,
            time_ns: self.time_ns,
            offset: self.offset,
            wire_len: self.wire_len,
            redaction: self.redaction,
            message: own(self.message),
        }
    }
}

impl Response<'_> {
    /// The same with bytes of its own.
    pub fn into_owned(self) -> Response<'static> {
        Response {
            session: self.session,
            request: self.request,
            offset: self.offset,
            len: self.len,
            first_ns: self.first_ns,
            last_ns: self.last_ns,
            rows: self.rows,
            outcome: self.outcome.into_owned(),
        }
    }
}

impl Outcome<'_> {
    /// The same with bytes of its own.
    pub fn into_owned(self) -> Outcome<'static> {
        match self {
            Self::Complete { tag } => Outcome::Complete { tag: own(tag) },
            Self::Empty => Outcome::Empty,
            Self::Suspended => Outcome::Suspended,
            Self::Error(ErrorOutcome { sqlstate, fatal, message }) => {
                Outcome::Error(ErrorOutcome { sqlstate, fatal, message: own(message) })
            }
            Self::Unknown => Outcome::Unknown,
        }
    }
}

impl PreparedFill<'_> {
    /// The same with bytes of its own.
    pub fn into_owned(self) -> PreparedFill<'static> {
        PreparedFill {
            session: self.session,
            time_ns: self.time_ns,
            name: own(self.name),
            query: own(self.query),
            param_types: self.param_types,
            redaction: self.redaction,
        }
    }
}

impl ServerIdentity<'_> {
    /// The same with bytes of its own.
    pub fn into_owned(self) -> ServerIdentity<'static> {
        ServerIdentity {
            time_ns: self.time_ns,
            database: own(self.database),
            address: own(self.address),
            version: own(self.version),
            system_identifier: self.system_identifier.map(own),
        }
    }
}

fn own(bytes: Bytes<'_>) -> Bytes<'static> {
    Cow::Owned(bytes.into_owned())
}
