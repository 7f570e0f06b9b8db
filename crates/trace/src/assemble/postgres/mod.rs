// SPDX-License-Identifier: Apache-2.0
//! The PostgreSQL protocol's machine: two byte streams in, records out.
//!
//! The phases of a session, and what leads from one to the next:
//!
//! ```text
//! Startup ── StartupMessage ──> Login ── ReadyForQuery ──> Running ── CopyBothResponse ──> Closed (replication)
//!    │ SSLRequest answered 'S', CancelRequest ──> Closed
//! Joining ── at a message boundary in both directions ──> Running
//! ```
//!
//! * A session is *joined* when its first bytes are not a first packet. The boundary is proven by the bytes: a chunk of whole
//!   messages that ends where a client waits for its answer, or a server's chunk that ends in ReadyForQuery.
//! * A lost boundary is found again in the same way. Until then bytes are counted as lost with the reason `Resync`.
//! * The responses of a damaged stretch are recorded as unknown, never guessed. What is left out by level `summary` is not
//!   damage: the end of a long response is found by its CommandComplete or ErrorResponse before the ReadyForQuery that ends a
//!   segment. If a pipeline makes it uncertain which request that answers, the response says unknown.

mod backend;
mod frontend;
mod shape;
mod startup;

use std::collections::{HashMap, HashSet, VecDeque};

use super::accounts::{Accounts, Missing};
use super::{Assemble, Audit, Known, Origin, Piece, Sink, WANTED_NS};
use crate::{Direction, EndReason, Outcome, Record, Response, SessionEnd, WithheldReason};

/// What the session is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Before the StartupMessage.
    Startup,
    /// After it.
    Login,
    /// Began before we did; no boundary found yet.
    Joining,
    /// After the first ReadyForQuery, or joined.
    Running,
    /// A replication stream: counted, not recorded.
    Replication,
    /// Nothing more to record: encrypted from here on, or a cancel request.
    Closed,
}

/// A request of the client that has not been answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pending {
    offset: u64,
    /// Its message type.
    tag: u8,
    /// A CopyDone or CopyFail was sent between the last Execute and this.
    after_copy: bool,
    /// A Query with more than one statement, each of which is answered.
    several: bool,
    /// Of an Execute: the most rows that it asks for; 0 for all.
    rows_max: u64,
}

impl Pending {
    fn new(offset: u64, tag: u8) -> Self {
        Self { offset, tag, after_copy: false, several: false, rows_max: 0 }
    }
}

/// COPY from the client by the extended protocol. A Sync that comes before its data are over is ignored by the server (manual, "COPY
/// Operations"), and clients do send one; whether it was before, only the client's stream tells. A COPY that fails before it reads (by a
/// trigger for each statement) leaves that Sync in its input, and it is answered after all.
#[derive(Debug, Default)]
struct CopyIn {
    /// CopyInResponse was seen for an Execute, its end was not.
    running: bool,
    /// CopyDone or CopyFail was sent since the last Execute.
    sent: bool,
    /// Syncs that came before the end of the data, [`AHEAD_MAX`] at most: ignored, unless the COPY fails before it reads them.
    ahead: VecDeque<Pending>,
}

/// Nobody sends more; one who does loses the times of their answers.
const AHEAD_MAX: usize = 16;

impl CopyIn {
    fn sync_ahead(&mut self, sync: Pending) {
        if self.ahead.len() < AHEAD_MAX {
            self.ahead.push_back(sync);
        }
    }
}

/// One session.
#[derive(Debug)]
pub struct Postgres {
    origin: Origin,
    phase: Phase,
    start_ns: u64,
    front: frontend::Front,
    back: backend::Back,
    accounts: Accounts,
    login: startup::Login,
    known: Known,
    pending: VecDeque<Pending>,
    /// After an error the server skips everything up to the next Sync.
    skip_to_sync: bool,
    copy_in: CopyIn,
    /// After an ambiguous end of a long response: the rest may have been answered too.
    uncertain: bool,
    terminated: bool,
    /// Names of statements whose text is in the trace; used by joined sessions only.
    statements: HashSet<Vec<u8>>,
    /// Names of statements of a joined session that were used without, and when they first were.
    unknown: HashMap<Vec<u8>, u64>,
}

impl Postgres {
    /// A session from its first byte, or from wherever its first piece is.
    pub fn new(origin: Origin) -> Self {
        Self {
            origin,
            phase: Phase::Startup,
            start_ns: 0,
            front: frontend::Front::default(),
            back: backend::Back::default(),
            accounts: Accounts::new(origin.session),
            login: startup::Login::default(),
            known: Known::default(),
            pending: VecDeque::new(),
            skip_to_sync: false,
            copy_in: CopyIn::default(),
            uncertain: false,
            terminated: false,
            statements: HashSet::new(),
            unknown: HashMap::new(),
        }
    }

    fn start_if_needed(&mut self, time_ns: u64) {
        if self.start_ns == 0 {
            self.start_ns = time_ns;
        }
    }

    /// All that is outstanding will not be answered in a way that we can tell.
    fn give_up_pending(&mut self, time_ns: u64, sink: &mut dyn Sink) {
        let at = self.accounts.shown(Direction::Backend, self.accounts.next(Direction::Backend));
        let response = self.back.take_response();
        let mut first = response;
        while let Some(request) = self.pending.pop_front() {
            if !matches!(request.tag, b'Q' | b'E' | b'F') || self.origin.level == crate::Level::None {
                continue;
            }
            let begun = first.take();
            sink.record(Record::Response(Response {
                session: self.origin.session,
                request: self.accounts.shown(Direction::Frontend, request.offset),
                offset: begun.map_or(at, |r| self.accounts.shown(Direction::Backend, r.offset)),
                len: begun.map_or(0, |r| self.accounts.next(Direction::Backend).saturating_sub(r.offset)),
                first_ns: begun.map_or(time_ns, |r| r.first_ns),
                last_ns: time_ns,
                rows: begun.map_or(0, |r| r.rows),
                outcome: Outcome::Unknown,
            }));
        }
        self.skip_to_sync = false;
        self.copy_in.running = false;
        self.copy_in.ahead.clear();
        self.uncertain = false;
    }
}

impl Assemble for Postgres {
    fn piece(&mut self, direction: Direction, time_ns: u64, piece: Piece<'_>, sink: &mut dyn Sink) {
        if piece.is_empty() {
            return;
        }
        self.start_if_needed(time_ns);
        let position = self.accounts.advance(direction, piece.len());
        if self.phase == Phase::Closed {
            return;
        }
        self.accounts.seen(direction, piece.len());
        if self.phase == Phase::Replication {
            let why = match piece {
                Piece::Lost(_, reason) => Missing::Lost(reason),
                _ => Missing::Withheld(WithheldReason::Replication),
            };
            self.accounts.missing(direction, time_ns, position, piece.len(), why, sink);
            return;
        }
        match direction {
            Direction::Frontend => self.frontend(time_ns, position, piece, sink),
            Direction::Backend => self.backend(time_ns, position, piece, sink),
        }
    }

    fn joined(&mut self, known: Known) {
        self.known = known;
        self.phase = Phase::Joining;
    }

    fn backend_pid(&self) -> Option<u32> {
        self.login.backend_pid.or(self.known.backend_pid)
    }

    fn wants_texts(&self, now_ns: u64) -> bool {
        self.unknown.values().any(|&from_ns| now_ns < from_ns.saturating_add(WANTED_NS))
    }

    fn has_records(&self) -> bool {
        self.accounts.announced
    }

    fn is_joining(&self) -> bool {
        self.phase == Phase::Joining
    }

    fn text(&mut self, time_ns: u64, text: &[u8], sink: &mut dyn Sink) {
        self.fill(time_ns, text, sink);
    }

    fn end(&mut self, time_ns: u64, reason: EndReason, audit: Audit, sink: &mut dyn Sink) -> bool {
        if matches!(self.phase, Phase::Startup | Phase::Joining)
            || !self.accounts.announced && self.phase == Phase::Closed
        {
            return false;
        }
        if self.phase == Phase::Login {
            self.announce(time_ns, None, sink);
            self.send_early(sink);
        }
        self.settle_partial(time_ns, sink);
        self.settle_unfinished(time_ns, sink);
        self.give_up_pending(time_ns, sink);
        let (frontend, backend) = self.accounts.finish(time_ns, audit, sink);
        let reason = match reason {
            EndReason::ClientClosed | EndReason::ServerClosed | EndReason::Unknown if self.terminated => {
                EndReason::Terminate
            }
            reason => reason,
        };
        sink.record(Record::SessionEnd(SessionEnd {
            session: self.origin.session,
            time_ns,
            reason,
            frontend,
            backend,
        }));
        self.phase = Phase::Closed;
        true
    }
}

#[cfg(test)]
mod tests;
