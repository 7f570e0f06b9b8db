// SPDX-License-Identifier: Apache-2.0
//! The client's stream: whole messages become records, and requests that the server will answer.

use underpass_wire::frontend::{Bind, Close, Execute, Parse, Target, bind_names};
use underpass_wire::startup::{self, FirstPacket};
use underpass_wire::{Header, MAX_MESSAGE_LEN, tag};

use super::backend::Back;
use super::{Missing, Pending, Phase, Postgres, shape};
use crate::assemble::{Piece, Sink};
use crate::safety::lexer::{Kind, Lexer};
use crate::{
    Direction, Frontend, Level, LossReason, PreparedFill, Protocol, Record, Redaction, WithheldReason,
};

/// Uses of unknown statements that are remembered, so that their texts can still be told: entries, and nanoseconds.
const USES_MAX: usize = 64;
const USE_TIME_NS: u64 = 2_000_000_000;

/// State of the stream.
#[derive(Debug, Default)]
pub(super) struct Front {
    /// The beginning of a message.
    partial: Vec<u8>,
    /// Its position.
    partial_at: u64,
    /// Bytes of a damaged message that are still to come.
    damaged: u64,
    /// The message boundary is not known.
    pub lost: bool,
    /// Messages of the current batch that make the server say what it runs.
    batch_uses: u32,
    /// Uses of unknown statements.
    uses: Vec<Use>,
}

/// A Bind of a statement without text.
#[derive(Debug)]
struct Use {
    name: Vec<u8>,
    from_ns: u64,
    /// When its batch was answered.
    to_ns: Option<u64>,
    /// Whether nothing else in the batch makes the server say what it runs.
    alone: bool,
}

impl Postgres {
    pub(super) fn frontend(&mut self, time_ns: u64, position: u64, piece: Piece<'_>, sink: &mut dyn Sink) {
        match piece {
            Piece::Bytes(bytes) => match self.phase {
                Phase::Startup => self.first_packets(time_ns, position, bytes, sink),
                Phase::Joining => self.join_by_request(time_ns, position, bytes, sink),
                _ => self.requests(time_ns, position, bytes, sink),
            },
            Piece::Skipped(len) => self.frontend_loss(time_ns, position, len, LossReason::Gap, sink),
            Piece::Lost(len, reason) => self.frontend_loss(time_ns, position, len, reason, sink),
        }
    }

    fn frontend_loss(
        &mut self,
        time_ns: u64,
        position: u64,
        len: u64,
        reason: LossReason,
        sink: &mut dyn Sink,
    ) {
        if matches!(self.phase, Phase::Startup | Phase::Joining) {
            // Without its first packet a session can only be joined.
            self.phase = Phase::Joining;
            self.front.partial.clear();
            return;
        }
        let front = &mut self.front;
        let (partial_at, partial_len) = (front.partial_at, front.partial.len() as u64);
        // The rest of the message that is under way, if its length is known.
        let rest = match Header::parse_max(&front.partial, MAX_MESSAGE_LEN) {
            Ok(Some(header)) => {
                let rest = header.total() as u64 - partial_len;
                // It will be answered, even though it is not in the trace.
                let pending = Some((partial_at, header.tag));
                rest.checked_sub(len).map(|rest| (rest, pending))
            }
            _ => front.damaged.checked_sub(len).filter(|_| front.damaged > 0).map(|rest| (rest, None)),
        };
        front.partial.clear();
        match rest {
            Some((damaged, pending)) => {
                front.damaged = damaged;
                if let Some((offset, tag)) = pending {
                    self.expect(offset, tag);
                }
            }
            None => {
                front.damaged = 0;
                front.lost = true;
            }
        }
        let resync = Missing::Lost(LossReason::Resync);
        self.accounts.missing(Direction::Frontend, time_ns, partial_at, partial_len, resync, sink);
        self.accounts.missing(Direction::Frontend, time_ns, position, len, Missing::Lost(reason), sink);
    }

    /// The first bytes that we see of a session's requests: whole messages prove a boundary.
    pub(super) fn join_by_request(&mut self, time_ns: u64, position: u64, bytes: &[u8], sink: &mut dyn Sink) {
        let first = startup::parse(bytes);
        if matches!(
            first,
            Ok(Some((
                FirstPacket::Startup(_)
                    | FirstPacket::SslRequest
                    | FirstPacket::GssencRequest
                    | FirstPacket::Cancel(_),
                _
            )))
        ) {
            // It is a beginning: only the handshake of the connection was not seen.
            self.accounts.begin_by_first_packet(bytes.len() as u64);
            self.back = Back::default();
            self.phase = Phase::Startup;
            return self.first_packets(time_ns, 0, bytes, sink);
        }
        if !shape::frontend_chain(bytes) {
            return;
        }
        let back = self.accounts.next(Direction::Backend);
        self.join(time_ns, position, back, sink);
        self.accounts.seen(Direction::Frontend, bytes.len() as u64);
        self.requests(time_ns, position, bytes, sink);
    }

    /// Recording begins: from here in either direction.
    pub(super) fn join(&mut self, time_ns: u64, front: u64, back: u64, sink: &mut dyn Sink) {
        self.phase = Phase::Running;
        self.start_ns = time_ns;
        self.accounts.begin(front, back);
        self.announce(time_ns, None, sink);
    }

    pub(super) fn requests(&mut self, time_ns: u64, position: u64, bytes: &[u8], sink: &mut dyn Sink) {
        let resync = Missing::Lost(LossReason::Resync);
        let (mut at, mut rest) = (position, bytes);
        if self.front.lost {
            let idle = self.back.idle() && shape::frontend_begin(bytes);
            if !(idle || self.back.lost() && shape::frontend_chain(bytes)) {
                return self.accounts.missing(
                    Direction::Frontend,
                    time_ns,
                    at,
                    bytes.len() as u64,
                    resync,
                    sink,
                );
            }
            self.front.lost = false;
            self.give_up_pending(time_ns, sink);
        }
        if self.front.damaged > 0 {
            let drop = self.front.damaged.min(rest.len() as u64);
            self.front.damaged -= drop;
            self.accounts.missing(Direction::Frontend, time_ns, at, drop, resync, sink);
            at += drop;
            rest = &rest[drop as usize..];
        }
        if self.uncertain {
            // The server said nothing more before this: what was asked before has been answered.
            self.give_up_pending(time_ns, sink);
        }
        self.back.request_seen();
        if !self.front.partial.is_empty() {
            let Some(taken) = self.complete_partial(time_ns, rest, sink) else { return };
            at += taken as u64;
            rest = &rest[taken..];
        }
        loop {
            match Header::parse_max(rest, MAX_MESSAGE_LEN) {
                Ok(Some(header)) if !tag::frontend::ALL.contains(&header.tag) => break,
                Ok(Some(header)) if header.total() <= rest.len() => {
                    let (message, after) = rest.split_at(header.total());
                    self.request(time_ns, at, message, sink);
                    if self.phase == Phase::Closed {
                        return;
                    }
                    at += message.len() as u64;
                    rest = after;
                }
                Ok(_) => {
                    self.front.partial_at = at;
                    self.front.partial.extend_from_slice(rest);
                    return;
                }
                Err(_) => break,
            }
        }
        self.protocol_violation(time_ns, at, rest.len() as u64, sink);
    }

    fn protocol_violation(&mut self, time_ns: u64, at: u64, len: u64, sink: &mut dyn Sink) {
        self.front.lost = true;
        let why = Missing::Lost(LossReason::Protocol);
        self.accounts.missing(Direction::Frontend, time_ns, at, len, why, sink);
    }

    /// Adds to the message under way; returns how many bytes it took, `None` when all and it is not whole.
    fn complete_partial(&mut self, time_ns: u64, bytes: &[u8], sink: &mut dyn Sink) -> Option<usize> {
        let mut partial = std::mem::take(&mut self.front.partial);
        let mut taken = 0;
        if partial.len() < Header::SIZE {
            taken = (Header::SIZE - partial.len()).min(bytes.len());
            partial.extend_from_slice(&bytes[..taken]);
        }
        let at = self.front.partial_at;
        let header = match Header::parse_max(&partial, MAX_MESSAGE_LEN) {
            Ok(Some(header)) if tag::frontend::ALL.contains(&header.tag) => header,
            Ok(None) => {
                self.front.partial = partial;
                return None;
            }
            _ => {
                let len = (partial.len() + bytes.len() - taken) as u64;
                self.protocol_violation(time_ns, at, len, sink);
                return None;
            }
        };
        let more = (header.total() - partial.len()).min(bytes.len() - taken);
        partial.extend_from_slice(&bytes[taken..taken + more]);
        taken += more;
        if partial.len() < header.total() {
            self.front.partial = partial;
            return None;
        }
        self.request(time_ns, at, &partial, sink);
        partial.clear();
        // A statement of many megabytes does not keep its memory.
        partial.shrink_to(64 << 10);
        self.front.partial = partial;
        Some(taken)
    }

    /// One whole message.
    pub(super) fn request(&mut self, time_ns: u64, at: u64, message: &[u8], sink: &mut dyn Sink) {
        let len = message.len() as u64;
        let tag = message[0];
        if tag == tag::frontend::PASSWORD {
            let why = Missing::Withheld(WithheldReason::Authentication);
            return self.accounts.missing(Direction::Frontend, time_ns, at, len, why, sink);
        }
        if self.phase == Phase::Login {
            self.terminated |= tag == tag::frontend::TERMINATE;
            self.login.early.push((time_ns, at, message.to_vec()));
            return;
        }
        self.accounts.recorded(Direction::Frontend, time_ns, len, sink);
        sink.record(Record::Frontend(Frontend {
            session: self.origin.session,
            time_ns,
            offset: self.accounts.shown(Direction::Frontend, at),
            wire_len: len,
            redaction: Redaction::None,
            message: message.into(),
        }));
        self.terminated = tag == tag::frontend::TERMINATE;
        if self.login.joined {
            self.follow_statements(time_ns, tag, &message[Header::SIZE..]);
        }
        self.expect(at, tag);
        self.look_closer(at, tag, &message[Header::SIZE..]);
    }

    /// Notes of a request that will be answered what tells its answer where only the end of that is known.
    fn look_closer(&mut self, at: u64, tag: u8, body: &[u8]) {
        let Some(request) = self.pending.back_mut().filter(|request| request.offset == at) else { return };
        match tag {
            tag::frontend::QUERY if self.origin.level != Level::None => {
                request.several = has_several_statements(body);
            }
            tag::frontend::EXECUTE => {
                let rows_max = Execute::decode(body).map_or(0, |execute| execute.max_rows);
                request.rows_max = u64::try_from(rows_max).unwrap_or(0);
            }
            _ => {}
        }
    }

    /// Notes that the server will answer.
    pub(super) fn expect(&mut self, offset: u64, tag: u8) {
        let request = Pending { after_copy: self.copy_in.sent, ..Pending::new(offset, tag) };
        match tag {
            b'c' | b'f' => self.copy_in.sent = true,
            b'S' if self.copy_in.running && !self.copy_in.sent => self.copy_in.sync_ahead(request),
            b'S' => {
                self.skip_to_sync = false;
                self.pending.push_back(request);
            }
            // A Query is skipped like the others.
            b'Q' | b'F' if !self.skip_to_sync => self.pending.push_back(request),
            b'P' | b'B' | b'D' | b'E' | b'C' if !self.skip_to_sync => {
                self.copy_in.sent &= tag != b'E';
                self.pending.push_back(request);
            }
            _ => {}
        }
    }

    /// Which statements of a joined session have a text.
    fn follow_statements(&mut self, time_ns: u64, tag: u8, body: &[u8]) {
        match tag {
            b'P' => {
                self.front.batch_uses += 1;
                if let Ok(parse) = Parse::decode(body) {
                    self.statements.insert(parse.name.to_vec());
                    self.unknown.remove(parse.name);
                }
            }
            b'B' => {
                self.front.batch_uses += 1;
                let name = match Bind::decode(body) {
                    Ok(bind) => bind.statement,
                    Err(_) => bind_names(body).map_or(&b""[..], |names| names.statement),
                };
                if !self.statements.contains(name) {
                    if !self.unknown.contains_key(name) {
                        self.unknown.insert(name.to_vec(), time_ns);
                    }
                    let uses = &mut self.front.uses;
                    uses.retain(|r#use| r#use.from_ns.saturating_add(USE_TIME_NS) > time_ns);
                    if uses.len() < USES_MAX {
                        uses.push(Use { name: name.to_vec(), from_ns: time_ns, to_ns: None, alone: true });
                    }
                }
            }
            b'C' => {
                if let Ok(Close { target: Target::Statement, name }) = Close::decode(body) {
                    self.unknown.remove(name);
                }
            }
            b'S' | b'Q' => {
                let alone = tag == b'S' && self.front.batch_uses == 1;
                self.front.batch_uses = 0;
                for open in self.front.uses.iter_mut().filter(|r#use| r#use.to_ns.is_none()) {
                    open.alone &= alone;
                }
            }
            _ => {}
        }
    }

    /// The batch has been answered.
    pub(super) fn uses_answered(&mut self, time_ns: u64) {
        for open in &mut self.front.uses {
            open.to_ns.get_or_insert(time_ns);
        }
    }

    /// A text that the server said it runs. It belongs to the one statement that was bound then, if it was one.
    pub(super) fn fill(&mut self, time_ns: u64, text: &[u8], sink: &mut dyn Sink) {
        let fits = |r#use: &Use| {
            r#use.alone && r#use.from_ns <= time_ns && r#use.to_ns.is_none_or(|to_ns| time_ns <= to_ns)
        };
        let Some(index) = self.front.uses.iter().position(fits) else { return };
        let name = self.front.uses.remove(index).name;
        if self.unknown.remove(&name).is_none() {
            return;
        }
        sink.record(Record::PreparedFill(PreparedFill {
            session: self.origin.session,
            time_ns,
            name: name.as_slice().into(),
            query: text.into(),
            param_types: Vec::new(),
            redaction: Redaction::None,
        }));
        self.front.uses.retain(|r#use| r#use.name != name);
        self.statements.insert(name);
    }

    /// What is left of a message when the stream ends.
    pub(super) fn settle_partial(&mut self, time_ns: u64, sink: &mut dyn Sink) {
        let len = self.front.partial.len() as u64;
        let why = Missing::Withheld(WithheldReason::Incomplete);
        self.front.partial.clear();
        self.accounts.missing(Direction::Frontend, time_ns, self.front.partial_at, len, why, sink);
    }

    /// Position of the first byte that is not part of a whole message.
    pub(super) fn frontend_boundary(&self) -> u64 {
        self.accounts.next(Direction::Frontend) - self.front.partial.len() as u64
    }

    /// First packets: not typed, so not messages like the others.
    pub(super) fn take_first_packet<R>(
        &mut self,
        position: u64,
        bytes: &[u8],
        parse: impl FnOnce(&[u8]) -> Option<(R, usize)>,
    ) -> Option<(R, u64, Vec<u8>)> {
        if self.front.partial.is_empty() {
            self.front.partial_at = position;
        }
        self.front.partial.extend_from_slice(bytes);
        let (packet, len) = parse(&self.front.partial)?;
        let rest = self.front.partial.split_off(len);
        let at = self.front.partial_at + len as u64;
        self.front.partial.clear();
        Some((packet, at, rest))
    }
}

/// Whether an SQL text, which a NUL ends, has more than one statement.
fn has_several_statements(text: &[u8]) -> bool {
    let text = text.strip_suffix(b"\0").unwrap_or(text);
    let Some(first) = memchr::memchr(b';', text) else { return false };
    if text[first + 1..].iter().all(|&byte| byte == b';' || byte.is_ascii_whitespace()) {
        return false;
    }
    let mut tokens = Lexer::new(text, Protocol::Postgres).filter(|token| token.kind != Kind::Comment);
    let is_end = |kind| matches!(kind, Kind::Symbol(b';'));
    tokens.any(|token| is_end(token.kind)) && tokens.any(|token| !is_end(token.kind))
}
