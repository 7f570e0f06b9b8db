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

use std::collections::{HashSet, VecDeque};

use super::{Assemble, Audit, Known, Origin, Piece, Sink};
use crate::{
    ByteTotals, Direction, EndReason, Loss, LossReason, Outcome, Record, Response, SessionEnd, Withheld,
    WithheldReason,
};

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
}

/// COPY from the client by the extended protocol. A Sync that comes before its data are over is ignored by the server (manual, "COPY
/// Operations"), and clients do send one; whether it was before, only the client's stream tells.
#[derive(Clone, Copy, Debug, Default)]
struct CopyIn {
    /// CopyInResponse was seen for an Execute, its end was not.
    running: bool,
    /// CopyDone or CopyFail was sent since the last Execute.
    sent: bool,
}

/// Accounts of one direction, and the stretch of it that is being lost or withheld.
#[derive(Debug, Default)]
struct Account {
    totals: ByteTotals,
    /// Bytes of the connection before recording of it began (a joined session).
    base: u64,
    /// Position of the next byte in the connection.
    next: u64,
    /// Bytes that are not recorded, not reported yet: from, to, why.
    open: Option<(u64, u64, Missing)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Missing {
    Lost(LossReason),
    Withheld(WithheldReason),
}

/// One session.
#[derive(Debug)]
pub struct Postgres {
    origin: Origin,
    phase: Phase,
    start_ns: u64,
    front: frontend::Front,
    back: backend::Back,
    front_account: Account,
    back_account: Account,
    login: startup::Login,
    known: Known,
    /// SessionStart has been written.
    announced: bool,
    pending: VecDeque<Pending>,
    /// After an error the server skips everything up to the next Sync.
    skip_to_sync: bool,
    copy_in: CopyIn,
    /// After an ambiguous end of a long response: the rest may have been answered too.
    uncertain: bool,
    terminated: bool,
    /// Names of statements whose text is in the trace; used by joined sessions only.
    statements: HashSet<Vec<u8>>,
    /// Names of statements of a joined session that were used without.
    unknown: HashSet<Vec<u8>>,
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
            front_account: Account::default(),
            back_account: Account::default(),
            login: startup::Login::default(),
            known: Known::default(),
            announced: false,
            pending: VecDeque::new(),
            skip_to_sync: false,
            copy_in: CopyIn::default(),
            uncertain: false,
            terminated: false,
            statements: HashSet::new(),
            unknown: HashSet::new(),
        }
    }

    fn account(&mut self, direction: Direction) -> &mut Account {
        match direction {
            Direction::Frontend => &mut self.front_account,
            Direction::Backend => &mut self.back_account,
        }
    }

    /// Position that records show: from where recording began.
    fn shown(&self, direction: Direction, position: u64) -> u64 {
        match direction {
            Direction::Frontend => position.saturating_sub(self.front_account.base),
            Direction::Backend => position.saturating_sub(self.back_account.base),
        }
    }

    /// Counts bytes that are in the trace.
    fn recorded(&mut self, direction: Direction, len: u64) {
        self.account(direction).totals.recorded += len;
    }

    /// Counts bytes that are not, and reports them when the stretch ends.
    fn missing(
        &mut self,
        direction: Direction,
        time_ns: u64,
        from: u64,
        len: u64,
        why: Missing,
        sink: &mut dyn Sink,
    ) {
        if len == 0 {
            return;
        }
        let account = self.account(direction);
        match why {
            Missing::Lost(_) => account.totals.lost += len,
            Missing::Withheld(_) => account.totals.withheld += len,
        }
        if let Some((_, to, reason)) = &mut account.open
            && *to == from
            && *reason == why
        {
            *to += len;
            return;
        }
        self.report(direction, time_ns, sink);
        self.account(direction).open = Some((from, from + len, why));
    }

    /// Writes the stretch that has ended.
    fn report(&mut self, direction: Direction, time_ns: u64, sink: &mut dyn Sink) {
        // Records of a session come after its start.
        if !self.announced {
            return;
        }
        let Some((from, to, why)) = self.account(direction).open.take() else { return };
        let (session, offset, len) = (self.origin.session, self.shown(direction, from), to - from);
        sink.record(match why {
            Missing::Lost(reason) => {
                Record::Loss(Loss { session: Some(session), time_ns, direction, offset, len, reason })
            }
            Missing::Withheld(reason) => {
                Record::Withheld(Withheld { session, time_ns, direction, offset, len, reason })
            }
        });
    }

    fn start_if_needed(&mut self, time_ns: u64) {
        if self.start_ns == 0 {
            self.start_ns = time_ns;
        }
    }

    /// All that is outstanding will not be answered in a way that we can tell.
    fn give_up_pending(&mut self, time_ns: u64, sink: &mut dyn Sink) {
        let at = self.shown(Direction::Backend, self.back_account.next);
        let response = self.back.take_response();
        let mut first = response;
        while let Some(request) = self.pending.pop_front() {
            if !matches!(request.tag, b'Q' | b'E' | b'F') || self.origin.level == crate::Level::None {
                continue;
            }
            let begun = first.take();
            sink.record(Record::Response(Response {
                session: self.origin.session,
                request: self.shown(Direction::Frontend, request.offset),
                offset: begun.map_or(at, |r| self.shown(Direction::Backend, r.offset)),
                len: begun.map_or(0, |r| self.back_account.next.saturating_sub(r.offset)),
                first_ns: begun.map_or(time_ns, |r| r.first_ns),
                last_ns: time_ns,
                rows: begun.map_or(0, |r| r.rows),
                outcome: Outcome::Unknown,
            }));
        }
        self.skip_to_sync = false;
        self.copy_in.running = false;
        self.uncertain = false;
    }
}

impl Assemble for Postgres {
    fn piece(&mut self, direction: Direction, time_ns: u64, piece: Piece<'_>, sink: &mut dyn Sink) {
        if piece.is_empty() {
            return;
        }
        self.start_if_needed(time_ns);
        let position = self.account(direction).next;
        self.account(direction).next += piece.len();
        if self.phase == Phase::Closed {
            return;
        }
        self.account(direction).totals.seen += piece.len();
        if self.phase == Phase::Replication {
            let why = match piece {
                Piece::Lost(_, reason) => Missing::Lost(reason),
                _ => Missing::Withheld(WithheldReason::Replication),
            };
            self.missing(direction, time_ns, position, piece.len(), why, sink);
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

    fn wants_texts(&self) -> bool {
        !self.unknown.is_empty()
    }

    fn has_records(&self) -> bool {
        self.announced
    }

    fn text(&mut self, time_ns: u64, text: &[u8], sink: &mut dyn Sink) {
        self.fill(time_ns, text, sink);
    }

    fn end(&mut self, time_ns: u64, reason: EndReason, audit: Audit, sink: &mut dyn Sink) -> bool {
        if matches!(self.phase, Phase::Startup | Phase::Joining)
            || !self.announced && self.phase == Phase::Closed
        {
            return false;
        }
        if self.phase == Phase::Login {
            self.announce(time_ns, None, sink);
            self.send_early(sink);
        }
        self.settle_partial(time_ns, sink);
        self.give_up_pending(time_ns, sink);
        for (direction, audited) in
            [(Direction::Frontend, audit.frontend), (Direction::Backend, audit.backend)]
        {
            self.audit(direction, time_ns, audited, sink);
            self.report(direction, time_ns, sink);
        }
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
            frontend: self.front_account.totals,
            backend: self.back_account.totals,
        }));
        self.phase = Phase::Closed;
        true
    }
}

impl Postgres {
    /// Compares what was seen with what the kernel counted.
    fn audit(&mut self, direction: Direction, time_ns: u64, audited: Option<u64>, sink: &mut dyn Sink) {
        let account = self.account(direction);
        let Some(audited) = audited.and_then(|bytes| bytes.checked_sub(account.base)) else { return };
        let seen = account.totals.seen;
        account.totals.audited = Some(audited);
        if audited > seen {
            let next = account.next;
            self.account(direction).totals.seen = audited;
            self.account(direction).next += audited - seen;
            self.missing(direction, time_ns, next, audited - seen, Missing::Lost(LossReason::Audit), sink);
        }
    }
}

#[cfg(test)]
mod tests;
