// SPDX-License-Identifier: Apache-2.0
//! Where the bytes of a session went: totals of both directions, and the stretches that are not in the trace.

use super::{Audit, Sink};
use crate::{ByteTotals, Direction, Loss, LossReason, Record, SessionId, Withheld, WithheldReason};

/// Why bytes are not in the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Missing {
    Lost(LossReason),
    Withheld(WithheldReason),
}

/// One direction.
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

/// Both directions of a session. Positions are those of the connection; records show them from where recording began.
#[derive(Debug)]
pub(super) struct Accounts {
    session: SessionId,
    front: Account,
    back: Account,
    /// The session's start is in the trace: what is missing may be reported.
    pub announced: bool,
}

impl Accounts {
    pub(super) fn new(session: SessionId) -> Self {
        Self { session, front: Account::default(), back: Account::default(), announced: false }
    }

    fn of(&mut self, direction: Direction) -> &mut Account {
        match direction {
            Direction::Frontend => &mut self.front,
            Direction::Backend => &mut self.back,
        }
    }

    /// Position of the next byte.
    pub(super) fn next(&self, direction: Direction) -> u64 {
        match direction {
            Direction::Frontend => self.front.next,
            Direction::Backend => self.back.next,
        }
    }

    /// Moves on; returns where the bytes begin.
    pub(super) fn advance(&mut self, direction: Direction, len: u64) -> u64 {
        let account = self.of(direction);
        account.next += len;
        account.next - len
    }

    /// Counts bytes as seen.
    pub(super) fn seen(&mut self, direction: Direction, len: u64) {
        self.of(direction).totals.seen += len;
    }

    /// Counts bytes that are in the trace.
    pub(super) fn count_recorded(&mut self, direction: Direction, len: u64) {
        self.of(direction).totals.recorded += len;
    }

    /// All from the beginning of the connection to this position counts as in the trace.
    pub(super) fn recorded_up_to(&mut self, direction: Direction, position: u64) {
        self.of(direction).totals.recorded = position;
    }

    /// As [`Self::count_recorded`], and reports the stretch before them.
    pub(super) fn recorded(&mut self, direction: Direction, time_ns: u64, len: u64, sink: &mut dyn Sink) {
        self.count_recorded(direction, len);
        self.report(direction, time_ns, sink);
    }

    /// Whether anything of this direction is in the trace.
    pub(super) fn has_recorded(&self, direction: Direction) -> bool {
        match direction {
            Direction::Frontend => self.front.totals.recorded > 0,
            Direction::Backend => self.back.totals.recorded > 0,
        }
    }

    /// The session is seen from its first packet, which has this length; only the handshake of its connection was not.
    pub(super) fn begin_by_first_packet(&mut self, len: u64) {
        let back = self.back.next;
        self.front = Account { next: len, ..Account::default() };
        self.front.totals.seen = len;
        self.back = Account { next: back, base: back, ..Account::default() };
    }

    /// Recording begins at these positions.
    pub(super) fn begin(&mut self, front: u64, back: u64) {
        for (account, base) in [(&mut self.front, front), (&mut self.back, back)] {
            (account.base, account.totals, account.open) = (base, ByteTotals::default(), None);
        }
    }

    /// Where recording of a direction began.
    pub(super) fn base(&self, direction: Direction) -> u64 {
        match direction {
            Direction::Frontend => self.front.base,
            Direction::Backend => self.back.base,
        }
    }

    /// Position that records show.
    pub(super) fn shown(&self, direction: Direction, position: u64) -> u64 {
        position.saturating_sub(self.base(direction))
    }

    /// Counts bytes that are not in the trace; reports them when the stretch ends.
    pub(super) fn missing(
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
        let account = self.of(direction);
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
        self.of(direction).open = Some((from, from + len, why));
    }

    /// Writes the stretch that has ended. Records of a session come after its start.
    pub(super) fn report(&mut self, direction: Direction, time_ns: u64, sink: &mut dyn Sink) {
        if !self.announced {
            return;
        }
        let Some((from, to, why)) = self.of(direction).open.take() else { return };
        let (offset, len) = (self.shown(direction, from), to - from);
        let session = self.session;
        sink.record(match why {
            Missing::Lost(reason) => {
                Record::Loss(Loss { session: Some(session), time_ns, direction, offset, len, reason })
            }
            Missing::Withheld(reason) => {
                Record::Withheld(Withheld { session, time_ns, direction, offset, len, reason })
            }
        });
    }

    /// The end: compares what was seen with what the kernel counted, and returns the totals.
    pub(super) fn finish(
        &mut self,
        time_ns: u64,
        audit: Audit,
        sink: &mut dyn Sink,
    ) -> (ByteTotals, ByteTotals) {
        for (direction, audited) in
            [(Direction::Frontend, audit.frontend), (Direction::Backend, audit.backend)]
        {
            let account = self.of(direction);
            if let Some(audited) = audited.and_then(|bytes| bytes.checked_sub(account.base)) {
                account.totals.audited = Some(audited).filter(|_| !audit.is_own);
                if let Some(more) = audited.checked_sub(account.totals.seen).filter(|&more| more > 0) {
                    account.totals.seen = audited;
                    let from = self.advance(direction, more);
                    let why = Missing::Lost(LossReason::Audit);
                    self.missing(direction, time_ns, from, more, why, sink);
                }
            }
            self.report(direction, time_ns, sink);
        }
        (self.front.totals, self.back.totals)
    }
}
