// SPDX-License-Identifier: Apache-2.0
//! The machine of MariaDB's and MySQL's protocol: two byte streams in, records out.
//!
//! ```text
//! Login ── OK ──> Running ── COM_BINLOG_DUMP ──> Replication
//!   │ compression, a protocol from before 4.1 ──> Closed
//!   │ TLS, where packets are read ──> Closed ── the probes go on ──> Login
//! Joining ── a greeting ──> Login
//!   │ a command ──> Running
//! ```
//!
//! * The protocol is half-duplex: a client that sends a command has had the whole answer to the one before. So a command, which its
//!   packet number 0 tells, is a boundary of both directions. A session is joined there, and a lost boundary found again.
//! * The numbers of packets go on through request and answer: one that is out of order proves that something is wrong.
//! * Answers of a damaged stretch are recorded as unknown. Rows are counted, so all bytes of the answers are wanted: pieces that
//!   were left out on purpose are losses here.

mod backend;
mod frontend;
mod login;
mod texts;

use std::collections::VecDeque;

use underpass_mysql::command::is_statement;
use underpass_mysql::exchange::{Exchange, Session};

use super::accounts::{Accounts, Missing};
use super::{Assemble, Audit, Known, Origin, Piece, Sink};
use crate::{
    Direction, EndReason, Level, LossReason, Outcome, PreparedFill, Record, Redaction, Response, SessionEnd,
    Source, TransactionStatus, Transport, WithheldReason,
};

/// What the session is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Before OK.
    Login,
    /// Began before we did, or its login was damaged: no command seen yet.
    Joining,
    Running,
    /// A replication stream: counted, not recorded.
    Replication,
    /// Nothing to record.
    Closed,
}

/// A command of the client that has not been answered.
#[derive(Debug)]
struct Pending {
    offset: u64,
    exchange: Exchange,
    /// Number of the next packet, whoever sends it.
    sequence: u8,
    /// What the answer OK makes true: parameters by name.
    sets: Vec<(&'static [u8], Vec<u8>)>,
    /// The statement that it executes, of which the text is to be told.
    executes: Option<u32>,
    /// What was told for it, and when. Kept until its answer begins: then nothing is missing between the two.
    told: Option<(u64, Vec<u8>)>,
}

/// One session.
#[derive(Debug)]
pub struct Mysql {
    origin: Origin,
    phase: Phase,
    start_ns: u64,
    accounts: Accounts,
    session: Session,
    login: login::Login,
    known: Known,
    connection_id: Option<u32>,
    front: frontend::Front,
    back: backend::Back,
    pending: VecDeque<Pending>,
    texts: texts::Texts,
    /// The boundaries are not known.
    lost: bool,
    status: TransactionStatus,
    terminated: bool,
    refused: Option<&'static str>,
}

impl Mysql {
    /// A session from its first byte, or from wherever its first piece is.
    pub fn new(origin: Origin) -> Self {
        Self {
            origin,
            phase: Phase::Login,
            start_ns: 0,
            accounts: Accounts::new(origin.session),
            session: Session::joined(),
            login: login::Login::default(),
            known: Known::default(),
            connection_id: None,
            front: frontend::Front::default(),
            back: backend::Back::default(),
            pending: VecDeque::new(),
            texts: texts::Texts::default(),
            lost: false,
            status: TransactionStatus::Idle,
            terminated: false,
            refused: None,
        }
    }

    /// The rest of this session cannot be read.
    fn close(&mut self, why: Option<&'static str>) {
        self.phase = Phase::Closed;
        self.refused = why;
    }

    /// A boundary is not known any more. What is outstanding is settled when the next command comes.
    fn lose(
        &mut self,
        direction: Direction,
        time_ns: u64,
        from: u64,
        len: u64,
        why: LossReason,
        sink: &mut dyn Sink,
    ) {
        self.lost = true;
        self.forget_told();
        if direction == Direction::Frontend {
            self.settle_partial(time_ns, sink);
        }
        self.settle_unfinished(time_ns, sink);
        self.accounts.missing(direction, time_ns, from, len, Missing::Lost(why), sink);
    }

    /// Something is missing: what was told may be about that.
    fn forget_told(&mut self) {
        for request in &mut self.pending {
            (request.executes, request.told) = (None, None);
        }
    }

    /// The answer to the first command begins.
    fn fill(&mut self, sink: &mut dyn Sink) {
        let Some(first) = self.pending.front_mut() else { return };
        let (Some((time_ns, text)), Some(number)) = (first.told.take(), first.executes.take()) else {
            return;
        };
        self.texts.prepared(number);
        sink.record(Record::PreparedFill(PreparedFill {
            session: self.origin.session,
            time_ns,
            name: number.to_string().into_bytes().into(),
            query: text.into(),
            param_types: Vec::new(),
            redaction: Redaction::None,
        }));
    }

    /// All that is outstanding will not be answered in a way that we can tell.
    fn give_up_pending(&mut self, time_ns: u64, sink: &mut dyn Sink) {
        let at = self.accounts.next(Direction::Backend);
        let mut begun = self.back.take_response();
        while let Some(request) = self.pending.pop_front() {
            if !is_statement(request.exchange.command()) || self.origin.level == Level::None {
                continue;
            }
            let begun = begun.take();
            sink.record(Record::Response(Response {
                session: self.origin.session,
                request: self.accounts.shown(Direction::Frontend, request.offset),
                offset: self.accounts.shown(Direction::Backend, begun.map_or(at, |r| r.offset)),
                len: begun.map_or(0, |r| at.saturating_sub(r.offset)),
                first_ns: begun.map_or(time_ns, |r| r.first_ns),
                last_ns: time_ns,
                rows: begun.map_or(0, |r| r.rows),
                outcome: Outcome::Unknown,
            }));
        }
    }
}

impl Assemble for Mysql {
    fn piece(&mut self, direction: Direction, time_ns: u64, piece: Piece<'_>, sink: &mut dyn Sink) {
        if piece.is_empty() {
            return;
        }
        if self.start_ns == 0 {
            self.start_ns = time_ns;
        }
        let position = self.accounts.advance(direction, piece.len());
        if self.phase == Phase::Closed {
            return;
        }
        self.accounts.seen(direction, piece.len());
        if direction == Direction::Frontend && !self.goes_on_with_login(piece) {
            self.phase = Phase::Joining;
        }
        match (self.phase, piece) {
            (Phase::Login, Piece::Bytes(bytes)) => {
                self.login_bytes(direction, time_ns, position, bytes, sink)
            }
            // Without the whole of its login a session can only be joined.
            (Phase::Login, _) => self.phase = Phase::Joining,
            (Phase::Joining, Piece::Bytes(bytes)) if direction == Direction::Frontend => {
                self.join(time_ns, position, bytes, sink);
            }
            (Phase::Joining, Piece::Bytes(bytes)) if position == 0 && login::is_greeting(bytes) => {
                self.phase = Phase::Login;
                self.login_bytes(direction, time_ns, position, bytes, sink);
            }
            (Phase::Joining, _) => self.front.forget(),
            (Phase::Replication, Piece::Bytes(bytes)) => {
                let why = Missing::Withheld(WithheldReason::Replication);
                self.accounts.missing(direction, time_ns, position, bytes.len() as u64, why, sink);
            }
            (_, Piece::Bytes(bytes)) if direction == Direction::Frontend => {
                self.commands(time_ns, position, bytes, sink);
            }
            (_, Piece::Bytes(bytes)) => self.answers(time_ns, position, bytes, sink),
            (_, Piece::Lost(len, reason)) => self.lose(direction, time_ns, position, len, reason, sink),
            (_, Piece::Skipped(len)) => self.lose(direction, time_ns, position, len, LossReason::Gap, sink),
        }
    }

    fn joined(&mut self, known: Known) {
        self.known = known;
        self.phase = Phase::Joining;
    }

    fn backend_pid(&self) -> Option<u32> {
        self.connection_id.or(self.known.backend_pid)
    }

    fn wants_texts(&self, now_ns: u64) -> bool {
        self.texts.is_wanted(now_ns)
    }

    fn has_records(&self) -> bool {
        self.accounts.announced
    }

    fn is_joining(&self) -> bool {
        self.phase == Phase::Joining
    }

    fn text(&mut self, time_ns: u64, text: &[u8], _: &mut dyn Sink) {
        // Of several commands, or while one may be missing, nobody knows which it is that runs.
        if self.lost || self.pending.len() > 1 || !self.front.is_at_boundary() {
            return;
        }
        if let Some(only) = self.pending.front_mut().filter(|only| only.executes.is_some()) {
            only.told.get_or_insert_with(|| (time_ns, text.to_vec()));
        }
    }

    fn decrypted(&mut self, source: Source, transport: Transport) -> bool {
        let goes_on = self.phase == Phase::Closed && self.login.turned_to_tls;
        if goes_on {
            (self.origin.source, self.origin.transport) = (source, transport);
            self.phase = Phase::Login;
        }
        goes_on
    }

    fn refused(&self) -> Option<&'static str> {
        self.refused
    }

    fn end(&mut self, time_ns: u64, reason: EndReason, audit: Audit, sink: &mut dyn Sink) -> bool {
        if self.phase == Phase::Login && self.login.was_seen() {
            self.announce(time_ns, None, sink);
        }
        if !self.accounts.announced {
            return false;
        }
        self.settle_partial(time_ns, sink);
        self.settle_unfinished(time_ns, sink);
        self.end_if_complete(time_ns, sink);
        self.give_up_pending(time_ns, sink);
        let (frontend, backend) = self.accounts.finish(time_ns, audit, sink);
        let reason = match reason {
            EndReason::ClientClosed | EndReason::ServerClosed | EndReason::Unknown if self.terminated => {
                EndReason::Terminate
            }
            reason => reason,
        };
        let session = self.origin.session;
        sink.record(Record::SessionEnd(SessionEnd { session, time_ns, reason, frontend, backend }));
        self.phase = Phase::Closed;
        true
    }
}

#[cfg(test)]
mod tests;
