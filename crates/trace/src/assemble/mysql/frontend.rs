// SPDX-License-Identifier: Apache-2.0
//! The client's stream: commands, local files, and what plugins want for COM_CHANGE_USER.

use underpass_mysql::command::{
    self, COM_CHANGE_USER, COM_INIT_DB, COM_PROCESS_INFO, COM_QUERY, COM_QUIT, COM_REGISTER_SLAVE,
    COM_RESET_CONNECTION, COM_STATISTICS, COM_STMT_BULK_EXECUTE, COM_STMT_CLOSE, COM_STMT_EXECUTE,
    COM_STMT_FETCH, COM_STMT_PREPARE, COM_STMT_RESET,
};
use underpass_mysql::exchange::Exchange;
use underpass_mysql::packet::{self, HEADER_BYTES, Header};

use super::{Missing, Mysql, Pending, Phase};
use crate::assemble::Sink;
use crate::{Direction, Frontend, LossReason, Record, Redaction, WithheldReason};

/// Bytes of a text that are looked at to tell a command from data.
const LOOK_BYTES: usize = 16;

/// State of the stream.
#[derive(Debug, Default)]
pub(super) struct Front {
    /// The beginning of a message.
    partial: Vec<u8>,
    /// Its position.
    partial_at: u64,
}

/// Whether bytes are commands: whole ones, or the beginning of one with a text. Data of a local file or a part of a long parameter
/// would have to look so by chance, with a length that fits. What servers say to each other must not: a greeting begins like
/// COM_PROCESS_INFO.
pub(super) fn is_command(bytes: &[u8]) -> bool {
    let mut rest = bytes;
    loop {
        let Some(header) = Header::parse(rest) else { return false };
        let Some(&byte) = rest.get(HEADER_BYTES) else { return false };
        let fits = match byte {
            COM_QUIT | COM_STATISTICS | COM_PROCESS_INFO | COM_RESET_CONNECTION | 0x0e => header.len == 1,
            COM_STMT_CLOSE | COM_STMT_RESET => header.len == 5,
            COM_STMT_FETCH => header.len == 9,
            COM_STMT_EXECUTE => header.len >= 10,
            _ => true,
        };
        if header.sequence != 0 || header.len == 0 || !fits || !command::is_from_client(byte) {
            return false;
        }
        match packet::message_len(rest) {
            Ok(Some(len)) if len == rest.len() => return true,
            Ok(Some(len)) => rest = &rest[len..],
            Ok(None) => {
                let text = &rest[HEADER_BYTES + 1..];
                let is_text = |byte: &u8| byte.is_ascii_graphic() || byte.is_ascii_whitespace();
                return matches!(byte, COM_QUERY | COM_STMT_PREPARE)
                    && text.len() >= LOOK_BYTES
                    && text[..LOOK_BYTES].iter().all(is_text);
            }
            Err(_) => return false,
        }
    }
}

impl Front {
    /// Where the stream can be entered: the position of a command that is, or ends, these bytes. A server reads a header and then what
    /// it announces, and so do its probes: a header alone is kept until then.
    pub(super) fn begins_command(&mut self, position: u64, bytes: &[u8]) -> Option<u64> {
        if is_command(bytes) {
            self.forget();
            return Some(position);
        }
        if self.is_header() && is_command(&[&self.partial, bytes].concat()) {
            return Some(self.partial_at);
        }
        self.forget();
        if bytes.len() == HEADER_BYTES && Header::parse(bytes).is_some_and(|header| header.sequence == 0) {
            self.partial.extend_from_slice(bytes);
            self.partial_at = position;
        }
        None
    }

    /// Whether no message is under way.
    pub(super) fn is_at_boundary(&self) -> bool {
        self.partial.is_empty()
    }

    fn is_header(&self) -> bool {
        self.partial.len() == HEADER_BYTES
    }

    /// Forgets what has begun.
    pub(super) fn forget(&mut self) {
        self.partial.clear();
    }
}

impl Mysql {
    pub(super) fn commands(&mut self, time_ns: u64, position: u64, bytes: &[u8], sink: &mut dyn Sink) {
        if self.lost {
            if !self.front.is_header() {
                self.settle_partial(time_ns, sink);
            }
            let why = Missing::Lost(LossReason::Resync);
            let from = if self.front.partial.is_empty() { position } else { self.front.partial_at };
            let begins = self.front.begins_command(position, bytes);
            let kept = if self.front.partial.is_empty() {
                position + bytes.len() as u64
            } else {
                self.front.partial_at
            };
            let way = Direction::Frontend;
            self.accounts.missing(way, time_ns, from, begins.unwrap_or(kept) - from, why, sink);
            if begins.is_none() {
                return;
            }
            self.lost = false;
            self.give_up_pending(time_ns, sink);
            self.back.forget();
            // What is missing is before this command, and its record as well.
            for way in [Direction::Frontend, Direction::Backend] {
                self.accounts.report(way, time_ns, sink);
            }
        }
        if self.front.partial.is_empty() {
            let taken = self.whole_messages(time_ns, position, bytes, sink);
            self.front.partial_at = position + taken as u64;
            self.front.partial.extend_from_slice(&bytes[taken..]);
        } else {
            let mut kept = std::mem::take(&mut self.front.partial);
            kept.extend_from_slice(bytes);
            let taken = self.whole_messages(time_ns, self.front.partial_at, &kept, sink);
            self.front.partial_at += taken as u64;
            kept.drain(..taken);
            if kept.is_empty() {
                // A statement of many megabytes does not keep its memory.
                kept.shrink_to(64 << 10);
            }
            self.front.partial = kept;
        }
    }

    /// Takes the messages at the beginning of `bytes`; returns how many bytes need not be kept.
    fn whole_messages(&mut self, time_ns: u64, position: u64, bytes: &[u8], sink: &mut dyn Sink) -> usize {
        let (mut at, mut rest) = (position, bytes);
        while let Some(header) = Header::parse(rest) {
            let in_file = self.pending.front().is_some_and(|first| first.exchange.wants_file());
            // A file is sent in packets, each of them on its own.
            let len = match packet::message_len(rest) {
                _ if in_file && header.total() <= rest.len() => header.total(),
                _ if in_file => break,
                Ok(Some(len)) => len,
                Ok(None) if header.sequence == 0 || self.is_changing_user() => break,
                _ => {
                    self.violation(time_ns, at, rest.len(), sink);
                    return bytes.len();
                }
            };
            let (message, after) = rest.split_at(len);
            if !self.take(time_ns, at, message, in_file, sink) {
                self.violation(time_ns, at, rest.len(), sink);
                return bytes.len();
            }
            at += len as u64;
            rest = after;
        }
        if self.phase == Phase::Replication && !rest.is_empty() {
            let why = Missing::Withheld(WithheldReason::Replication);
            self.accounts.missing(Direction::Frontend, time_ns, at, rest.len() as u64, why, sink);
            return bytes.len();
        }
        bytes.len() - rest.len()
    }

    fn violation(&mut self, time_ns: u64, at: u64, len: usize, sink: &mut dyn Sink) {
        self.lose(Direction::Frontend, time_ns, at, len as u64, LossReason::Protocol, sink);
    }

    fn is_changing_user(&self) -> bool {
        self.pending.front().is_some_and(|first| first.exchange.command() == COM_CHANGE_USER)
    }

    /// One whole message; `false` when it has no meaning here.
    fn take(&mut self, time_ns: u64, at: u64, message: &[u8], in_file: bool, sink: &mut dyn Sink) -> bool {
        let next = message[3].wrapping_add(1);
        if in_file {
            if let Some(first) = self.pending.front_mut() {
                first.sequence = next;
            }
            self.record(time_ns, at, message, sink);
            return true;
        }
        if message[3] != 0 && self.is_changing_user() {
            if let Some(first) = self.pending.front_mut() {
                first.sequence = next;
            }
            self.withhold(time_ns, at, message, sink);
            return true;
        }
        let Some(&byte) = message.get(HEADER_BYTES) else { return false };
        if message[3] != 0 || command::name(byte).is_none() {
            return false;
        }
        self.end_if_complete(time_ns, sink);
        let sets = match byte {
            COM_INIT_DB => vec![(&b"database"[..], packet::payload(message)[1..].to_vec())],
            COM_CHANGE_USER => match command::change_user(&packet::payload(message)) {
                Ok((user, database)) => vec![(&b"user"[..], user.to_vec()), (b"database", database.to_vec())],
                Err(_) => Vec::new(),
            },
            _ => Vec::new(),
        };
        if matches!(byte, COM_CHANGE_USER | COM_REGISTER_SLAVE) {
            self.withhold(time_ns, at, message, sink);
        } else {
            self.record(time_ns, at, message, sink);
        }
        let executes = self.follow_statements(time_ns, byte, &message[HEADER_BYTES..]);
        self.terminated = byte == COM_QUIT;
        if command::is_replication(byte) {
            self.phase = Phase::Replication;
        } else if command::is_answered(byte) {
            // The packets of a long command are numbered, too.
            let packets = (message.len() - HEADER_BYTES) / (packet::PAYLOAD_BYTES_MAX + HEADER_BYTES);
            let sequence = (packets as u8).wrapping_add(1);
            let exchange = Exchange::new(byte);
            self.pending.push_back(Pending { offset: at, exchange, sequence, sets, executes, told: None });
        }
        true
    }

    /// Which statements have texts in the trace. Returns the one that is executed and has none.
    fn follow_statements(&mut self, time_ns: u64, command: u8, payload: &[u8]) -> Option<u32> {
        let number = command::statement_number(payload);
        match (command, number) {
            (COM_RESET_CONNECTION | COM_CHANGE_USER, _) => self.texts.reset(),
            (COM_STMT_CLOSE, Some(number)) => self.texts.closed(number),
            (COM_STMT_EXECUTE | COM_STMT_BULK_EXECUTE, Some(number)) => {
                return self.texts.executed(number, time_ns).then_some(number);
            }
            _ => {}
        }
        None
    }

    fn record(&mut self, time_ns: u64, at: u64, message: &[u8], sink: &mut dyn Sink) {
        self.accounts.recorded(Direction::Frontend, time_ns, message.len() as u64, sink);
        sink.record(Record::Frontend(Frontend {
            session: self.origin.session,
            time_ns,
            offset: self.accounts.shown(Direction::Frontend, at),
            wire_len: message.len() as u64,
            redaction: Redaction::None,
            message: message.into(),
        }));
    }

    fn withhold(&mut self, time_ns: u64, at: u64, message: &[u8], sink: &mut dyn Sink) {
        let why = Missing::Withheld(WithheldReason::Authentication);
        self.accounts.missing(Direction::Frontend, time_ns, at, message.len() as u64, why, sink);
    }

    /// What is left of a message when the stream ends, or is damaged.
    pub(super) fn settle_partial(&mut self, time_ns: u64, sink: &mut dyn Sink) {
        let len = self.front.partial.len() as u64;
        self.front.partial.clear();
        let why = self.why_unfinished();
        self.accounts.missing(Direction::Frontend, time_ns, self.front.partial_at, len, why, sink);
    }

    /// Why a message that has begun is not in the trace.
    pub(super) fn why_unfinished(&self) -> Missing {
        match self.lost {
            true => Missing::Lost(LossReason::Resync),
            false => Missing::Withheld(WithheldReason::Incomplete),
        }
    }

    /// Position of the first byte that is not part of a whole message.
    pub(super) fn frontend_boundary(&self) -> u64 {
        self.accounts.next(Direction::Frontend) - self.front.partial.len() as u64
    }
}
