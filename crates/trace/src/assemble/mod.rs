// SPDX-License-Identifier: Apache-2.0
//! From byte streams to records: what every recorder shares, wherever it takes the bytes.
//!
//! ```text
//! TCP segments ──> Reassembly ──┐
//!                               ├─ Piece (bytes, skipped, lost) ──> Assemble ──> Record
//! bytes with positions ─────────┘                            (Postgres, Mysql)
//! ```
//!
//! Sans-IO; time is passed in. Every byte of a stream is accounted for, exactly once, as recorded, withheld or lost, so the
//! totals of a session's end always add up.

mod accounts;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod mysql;
pub mod postgres;
mod reassembly;

pub use mysql::Mysql;
pub use postgres::Postgres;
pub use reassembly::{Order, Reassembly, Segment};

use crate::{Direction, EndReason, Level, LossReason, Protocol, Record, SessionId, Source, Transport};
use std::net::SocketAddr;

/// How long the text of a statement is waited for since its first use, nanoseconds: that costs all sessions of the server, and is of
/// no avail for one that is never alone in its batch (PostgreSQL), does not exist, or is not used again.
const WANTED_NS: u64 = 60_000_000_000;

/// Where records go.
pub trait Sink {
    /// Takes one.
    fn record(&mut self, record: Record<'_>);
}

impl<F: FnMut(Record<'_>)> Sink for F {
    fn record(&mut self, record: Record<'_>) {
        self(record);
    }
}

/// What comes next in one direction of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Bytes.
    Bytes(&'a [u8]),
    /// So many bytes were left out on purpose, because the recording's level does not want them.
    Skipped(u64),
    /// So many bytes are missing.
    Lost(u64, LossReason),
}

impl Piece<'_> {
    /// How far it takes the stream, bytes.
    pub fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Skipped(len) | Self::Lost(len, _) => *len,
        }
    }

    /// Whether it takes it nowhere.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What a recorder knows of a session from the start.
#[derive(Clone, Copy, Debug)]
pub struct Origin {
    /// The session's number.
    pub session: SessionId,
    /// Where its bytes are taken.
    pub source: Source,
    /// How they travel.
    pub transport: Transport,
    /// The client's address.
    pub peer: Option<SocketAddr>,
    /// How much of the responses is wanted.
    pub level: Level,
}

/// What somebody else knows of a session that was joined: the server's statistics, its process titles.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// The server's process.
    pub backend_pid: Option<u32>,
    /// The user.
    pub user: Option<Vec<u8>>,
    /// The database.
    pub database: Option<Vec<u8>>,
    /// `application_name`.
    pub application_name: Option<Vec<u8>>,
}

/// What somebody else counted of the bytes of a connection, from the same first byte as the pieces: the kernel, most of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Audit {
    /// Bytes from the client; `None` when it was not asked.
    pub frontend: Option<u64>,
    /// Bytes to the client.
    pub backend: Option<u64>,
    /// They were counted where the pieces were taken: that tells what was lost on the way here, and audits nothing.
    pub is_own: bool,
}

/// A protocol's machine over both streams of one session.
pub trait Assemble {
    /// The next piece of a direction. Pieces of a direction are contiguous; of the two directions, what causes comes before what
    /// it causes.
    fn piece(&mut self, direction: Direction, time_ns: u64, piece: Piece<'_>, sink: &mut dyn Sink);

    /// What is known of a session that is joined; called before its first piece.
    fn joined(&mut self, known: Known);

    /// The server's process, if it is known.
    fn backend_pid(&self) -> Option<u32>;

    /// Whether the session uses statements of which the text is not known, and it is worth waiting for it still.
    fn wants_texts(&self, now_ns: u64) -> bool;

    /// Whether its start is in the trace.
    fn has_records(&self) -> bool;

    /// Whether it began before its first piece, and nothing has shown yet what its bytes are.
    fn is_joining(&self) -> bool;

    /// The connection turned to encryption, and its plain text goes on from another source, where this session ends. Returns whether
    /// it is this machine that goes on; else its plain text begins with a login of its own.
    fn decrypted(&mut self, _source: Source, _transport: Transport) -> bool {
        false
    }

    /// Why it is not recorded, when the session uses what cannot be read and is not encryption: old protocols, compression.
    fn refused(&self) -> Option<&'static str> {
        None
    }

    /// The server said what this session runs. PostgreSQL: perhaps while it runs something else by now. MariaDB and MySQL: between a command and its answer.
    fn text(&mut self, time_ns: u64, text: &[u8], sink: &mut dyn Sink);

    /// The session, or its recording, is over. Returns whether anything of it is in the trace.
    fn end(&mut self, time_ns: u64, reason: EndReason, audit: Audit, sink: &mut dyn Sink) -> bool;
}

/// The machine of a protocol.
pub fn machine(protocol: Protocol, origin: Origin) -> Box<dyn Assemble + Send> {
    match protocol {
        Protocol::Postgres => Box::new(Postgres::new(origin)),
        Protocol::Mysql => Box::new(Mysql::new(origin)),
    }
}
