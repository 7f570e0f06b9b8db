// SPDX-License-Identifier: Apache-2.0
//! The server's stream: answers to commands, of which rows are counted and ends are told.

use underpass_mysql::command::*;
use underpass_mysql::exchange::{End, Step};
use underpass_mysql::packet::{self, HEADER_BYTES, Header};
use underpass_mysql::response::{self, EOF, ERR, status};

use super::{Missing, Mysql};
use crate::assemble::Sink;
use crate::{
    Backend, Direction, ErrorOutcome, Level, LossReason, Outcome, ParameterStatus, Ready, Record, Response,
    TransactionStatus,
};

/// Bytes of a message that are kept to be understood: an error's text, changes of state. Rows are only counted.
const HEAD_BYTES_MAX: usize = 4 << 10;
/// Errors after which the server closes the connection: shutdown, KILL. What it says unasked before it closes is fatal whatever its
/// number, so MySQL's 4031 (idle for too long) is not here: in MariaDB that is a missing trigger.
const FATAL: [u16; 3] = [1053, 1927, 3169];
/// Bytes of a message that are kept at most, where responses are recorded in full: neither server sends a longer one.
const KEPT_BYTES_MAX: usize = if cfg!(test) { 32 << 20 } else { packet::MESSAGE_BYTES_MAX };
/// A deadlock: the one error that ends the transaction.
const DEADLOCK: u16 = 1213;

/// An answer that has begun.
#[derive(Clone, Copy, Debug)]
pub(super) struct Begun {
    pub offset: u64,
    pub first_ns: u64,
    pub rows: u64,
}

/// State of the stream: a message under way.
#[derive(Debug, Default)]
pub(super) struct Back {
    header: [u8; HEADER_BYTES],
    header_len: usize,
    /// Payload bytes of the packet that are still to come.
    left: usize,
    /// Another packet of the same message follows.
    continued: bool,
    /// The beginning of the payload, and the length of all of it so far.
    head: Vec<u8>,
    len: usize,
    /// Position and time of the message's first byte.
    at: u64,
    first_ns: u64,
    /// The whole message, where responses are recorded in full.
    kept: Vec<u8>,
    response: Option<Begun>,
}

impl Back {
    pub(super) fn take_response(&mut self) -> Option<Begun> {
        self.response.take()
    }

    /// Bytes of the message under way, where all of it is kept.
    fn unfinished(&self) -> usize {
        match self.header_len {
            HEADER_BYTES => self.kept.len(),
            part => self.kept.len() + part,
        }
    }

    /// Begins anew, at a boundary.
    pub(super) fn forget(&mut self) {
        *self = Self::default();
    }
}

impl Mysql {
    pub(super) fn answers(&mut self, time_ns: u64, position: u64, bytes: &[u8], sink: &mut dyn Sink) {
        let (mut at, mut rest) = (position, bytes);
        while !rest.is_empty() && !self.lost {
            let taken = match self.whole_rows(time_ns, at, rest) {
                0 => self.part(time_ns, at, rest, sink),
                taken => taken,
            };
            if self.origin.level != Level::Full {
                self.accounts.recorded(Direction::Backend, time_ns, taken as u64, sink);
            }
            at += taken as u64;
            rest = &rest[taken..];
        }
        if self.lost {
            self.settle_unfinished(time_ns, sink);
        }
        let why = Missing::Lost(LossReason::Resync);
        self.accounts.missing(Direction::Backend, time_ns, at, rest.len() as u64, why, sink);
    }

    /// What is left of an answer's message when the stream ends, or is damaged: where whole messages are recorded, it is not.
    pub(super) fn settle_unfinished(&mut self, time_ns: u64, sink: &mut dyn Sink) {
        if self.origin.level != Level::Full {
            return;
        }
        let len = self.back.unfinished() as u64;
        self.back.kept = Vec::new();
        self.back.header_len = 0;
        let why = self.why_unfinished();
        self.accounts.missing(Direction::Backend, time_ns, self.back.at, len, why, sink);
    }

    /// Counts the rows at the beginning of these bytes, where nothing else is wanted of them; returns how many bytes they were. What this
    /// does not know for a whole row, in one packet and in its order, it leaves to [`Self::part`].
    fn whole_rows(&mut self, time_ns: u64, at: u64, bytes: &[u8]) -> usize {
        if self.origin.level == Level::Full || self.back.header_len != 0 || self.back.continued {
            return 0;
        }
        let Some(first) = self.pending.front_mut().filter(|first| first.exchange.in_rows()) else { return 0 };
        let (mut rows, mut sequence, mut rest) = (0, first.sequence, bytes);
        while let [a, b, c, number, byte, ..] = *rest {
            let len = u32::from_le_bytes([a, b, c, 0]) as usize;
            let is_row = len != 0 && len < packet::PAYLOAD_BYTES_MAX && byte != ERR && byte != EOF;
            let Some(after) = rest.get(HEADER_BYTES + len..).filter(|_| is_row && number == sequence) else {
                break;
            };
            rest = after;
            sequence = sequence.wrapping_add(1);
            rows += 1;
        }
        if rows > 0 {
            first.sequence = sequence;
            let begun = Begun { offset: at, first_ns: time_ns, rows: 0 };
            self.back.response.get_or_insert(begun).rows += rows;
        }
        bytes.len() - rest.len()
    }

    /// A part of a packet; returns how many bytes it was.
    fn part(&mut self, time_ns: u64, at: u64, bytes: &[u8], sink: &mut dyn Sink) -> usize {
        let back = &mut self.back;
        let mut taken = 0;
        if back.header_len < HEADER_BYTES {
            if back.header_len == 0 && !back.continued {
                (back.at, back.first_ns, back.len) = (at, time_ns, 0);
                back.head.clear();
                back.kept.clear();
            }
            taken = (HEADER_BYTES - back.header_len).min(bytes.len());
            back.header[back.header_len..back.header_len + taken].copy_from_slice(&bytes[..taken]);
            back.header_len += taken;
            if back.header_len < HEADER_BYTES {
                return taken;
            }
            let Some(header) = Header::parse(&back.header) else { return taken };
            (back.left, back.continued) = (header.len, header.is_continued());
            if self.origin.level == Level::Full {
                back.kept.extend_from_slice(&back.header);
                if back.kept.len() + header.len > KEPT_BYTES_MAX {
                    self.lost = true;
                    return taken;
                }
            }
            if !self.is_next(header.sequence) {
                self.lost = true;
                self.forget_told();
                return taken;
            }
            self.fill(sink);
        }
        let back = &mut self.back;
        let more = back.left.min(bytes.len() - taken);
        let payload = &bytes[taken..taken + more];
        let keep = more.min(HEAD_BYTES_MAX.saturating_sub(back.head.len()));
        back.head.extend_from_slice(&payload[..keep]);
        if self.origin.level == Level::Full {
            back.kept.extend_from_slice(payload);
        }
        back.len += more;
        back.left -= more;
        if back.left == 0 {
            back.header_len = 0;
            if !back.continued {
                self.whole(time_ns, at + (taken + more) as u64, sink);
            }
        }
        taken + more
    }

    /// Whether a packet of this number is due.
    fn is_next(&mut self, sequence: u8) -> bool {
        // What the server says unasked, before it closes, has no place in any order.
        let Some(first) = self.pending.front_mut() else { return true };
        let is_due = first.sequence == sequence;
        first.sequence = sequence.wrapping_add(1);
        is_due
    }

    /// The message under way is complete and ends at `end`.
    fn whole(&mut self, time_ns: u64, end: u64, sink: &mut dyn Sink) {
        let head = std::mem::take(&mut self.back.head);
        let kept = std::mem::take(&mut self.back.kept);
        if self.origin.level == Level::Full {
            self.accounts.recorded(Direction::Backend, time_ns, kept.len() as u64, sink);
            sink.record(Record::Backend(Backend {
                session: self.origin.session,
                time_ns,
                offset: self.accounts.shown(Direction::Backend, self.back.at),
                message: kept.as_slice().into(),
            }));
        }
        let (at, first_ns) = (self.back.at, self.back.first_ns);
        let begun = self.back.response.get_or_insert(Begun { offset: at, first_ns, rows: 0 });
        let Some(first) = self.pending.front_mut() else {
            return self.unasked(time_ns, end, &head, sink);
        };
        match first.exchange.message(&head, self.back.len, &mut self.session) {
            Ok(Step::Row) => begun.rows += 1,
            Ok(Step::Part | Step::WantsFile { .. }) => {}
            Ok(Step::End { end: how, last }) => self.ends(time_ns, end, at, how, last, sink),
            Err(_) => self.lost = true,
        }
        (self.back.head, self.back.kept) = (head, kept);
        // A row of many megabytes does not keep its memory.
        self.back.kept.clear();
        self.back.kept.shrink_to(64 << 10);
    }

    /// The server says why it will close the connection.
    fn unasked(&mut self, time_ns: u64, end: u64, head: &[u8], sink: &mut dyn Sink) {
        let Ok(error) = response::Err::decode(head) else {
            self.lost = true;
            return;
        };
        let outcome = Outcome::Error(ErrorOutcome {
            sqlstate: error.sqlstate,
            fatal: true,
            message: error.message.into(),
        });
        let request = self.frontend_boundary();
        self.respond(request, time_ns, end, outcome, sink);
    }

    /// The next command tells that the answer before it was complete.
    pub(super) fn end_if_complete(&mut self, time_ns: u64, sink: &mut dyn Sink) {
        let Some(how) =
            self.pending.front_mut().and_then(|first| first.exchange.end_if_complete(&mut self.session))
        else {
            return;
        };
        let end = self.accounts.next(Direction::Backend);
        self.ends(time_ns, end, end, how, true, sink);
    }

    /// A result ends at `end`; its last message began at `at`.
    fn ends(&mut self, time_ns: u64, end: u64, at: u64, how: End<'_>, last: bool, sink: &mut dyn Sink) {
        let Some(first) = self.pending.front() else { return };
        let (request, command) = (first.offset, first.exchange.command());
        let rows = self.back.response.map_or(0, |begun| begun.rows);
        let tag;
        let mut schema = None;
        let outcome = match how {
            End::Ok(ok) => {
                self.note_status(ok.status);
                schema = ok.schema;
                tag = format!("OK {}", ok.affected_rows);
                Outcome::Complete { tag: tag.as_bytes().into() }
            }
            End::Rows(ok) => {
                self.note_status(ok.status);
                schema = ok.schema;
                tag = format!("ROWS {rows}");
                Outcome::Complete { tag: tag.as_bytes().into() }
            }
            End::Prepared(answer) => {
                self.texts.prepared(answer.statement);
                tag = format!("PREPARE {} {}", answer.statement, answer.parameters);
                Outcome::Complete { tag: tag.as_bytes().into() }
            }
            End::Text => Outcome::Complete { tag: (&b""[..]).into() },
            End::Err(error) => {
                if error.code == DEADLOCK {
                    self.status = TransactionStatus::Idle;
                }
                let fatal = FATAL.contains(&error.code);
                let message = error.message.into();
                Outcome::Error(ErrorOutcome { sqlstate: error.sqlstate, fatal, message })
            }
        };
        let failed = matches!(outcome, Outcome::Error(_));
        // Without its answer a prepared statement has no number.
        let wanted = self.origin.level != Level::None || command == COM_STMT_PREPARE;
        if wanted && (is_statement(command) || failed) {
            self.respond(request, time_ns, end, outcome, sink);
        }
        self.back.response = None;
        if let Some(schema) = schema {
            self.set(time_ns, b"database", schema, sink);
        }
        if !last {
            return;
        }
        let sets = self.pending.pop_front().map(|done| done.sets).unwrap_or_default();
        for (name, value) in
            sets.iter().filter(|(name, _)| !failed && (schema.is_none() || *name != b"database"))
        {
            self.set(time_ns, name, value, sink);
        }
        sink.record(Record::Ready(Ready {
            session: self.origin.session,
            time_ns,
            request: self.accounts.shown(Direction::Frontend, request),
            offset: self.accounts.shown(Direction::Backend, at),
            status: self.status,
        }));
    }

    pub(super) fn note_status(&mut self, flags: u16) {
        self.status = match flags & status::IN_TRANSACTION {
            0 => TransactionStatus::Idle,
            _ => TransactionStatus::Transaction,
        };
    }

    fn set(&mut self, time_ns: u64, name: &[u8], value: &[u8], sink: &mut dyn Sink) {
        let session = self.origin.session;
        sink.record(Record::ParameterStatus(ParameterStatus {
            session,
            time_ns,
            name: name.into(),
            value: value.into(),
        }));
    }

    fn respond(&mut self, request: u64, time_ns: u64, end: u64, outcome: Outcome<'_>, sink: &mut dyn Sink) {
        let begun = self.back.response.take().unwrap_or(Begun { offset: end, first_ns: time_ns, rows: 0 });
        sink.record(Record::Response(Response {
            session: self.origin.session,
            request: self.accounts.shown(Direction::Frontend, request),
            offset: self.accounts.shown(Direction::Backend, begun.offset),
            len: end.saturating_sub(begun.offset),
            first_ns: begun.first_ns,
            last_ns: time_ns,
            rows: begun.rows,
            outcome,
        }));
    }
}
