// SPDX-License-Identifier: Apache-2.0
//! The server's stream: how each request ended.

use underpass_wire::backend::{
    BackendKeyData, CommandComplete, Fields, ParameterStatus as StatusView, Severity, TransactionStatus,
};
use underpass_wire::{Header, tag};

use super::shape::{self, Closing, Tail};
use super::{Missing, Pending, Phase, Postgres};
use crate::assemble::{Piece, Sink};
use crate::{
    Backend, Direction, ErrorOutcome, Level, LossReason, Outcome, ParameterStatus, Ready, Record, Response,
    WithheldReason,
};

/// Bytes of a body that are kept for summaries; ErrorResponses with longer texts lose the end of the text.
const BODY_BYTES_MAX: usize = 1 << 20;
/// Bytes of what was passed over that are kept, so that the end of a response is found in more than one chunk: a CommandComplete or an
/// ErrorResponse of usual length.
const PASSED_BYTES_MAX: usize = 512;

/// A response that has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Begun {
    /// Position of its first byte.
    pub offset: u64,
    pub first_ns: u64,
    pub rows: u64,
}

/// What is known of the message boundary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Boundary {
    #[default]
    Known,
    /// Bytes were left out by choice; what follows is still part of a response.
    Skipped,
    /// Bytes were lost.
    Lost,
}

/// State of the stream.
#[derive(Debug, Default)]
pub(super) struct Back {
    boundary: Boundary,
    /// Header bytes of the message under way, and how many.
    head: [u8; Header::SIZE],
    head_len: usize,
    /// Body bytes that are still to come.
    need: u64,
    /// Its position, and when its first byte was seen.
    at: u64,
    first_ns: u64,
    /// What is kept of it: the whole message at level full, else the body of types that matter.
    kept: Vec<u8>,
    /// Some of it is missing.
    damaged: bool,
    /// The last bytes that were looked at while the boundary was not known.
    passed: Vec<u8>,
    response: Option<Begun>,
    /// The last thing the server said was that it is ready.
    idle: bool,
    /// It has said so at least once.
    ready: bool,
    position: u64,
}

impl Back {
    pub(super) fn idle(&self) -> bool {
        self.idle
    }

    pub(super) fn lost(&self) -> bool {
        self.boundary != Boundary::Known
    }

    /// Position behind the last whole message.
    pub(super) fn position(&self) -> u64 {
        self.position
    }

    pub(super) fn request_seen(&mut self) {
        self.idle = false;
    }

    pub(super) fn take_response(&mut self) -> Option<Begun> {
        self.response.take()
    }

    /// Bytes of the message under way that are kept, where all of it is.
    fn unfinished(&self) -> usize {
        match self.head_len {
            Header::SIZE => self.kept.len(),
            part => part,
        }
    }

    fn header(&self) -> Option<Header> {
        if self.head_len < Header::SIZE {
            return None;
        }
        Header::parse(&self.head).ok().flatten()
    }
}

/// Whether the body matters at level summary.
const fn matters(tag: u8) -> bool {
    matches!(tag, b'C' | b'E' | b'K' | b'S' | b'Z')
}

impl Postgres {
    pub(super) fn backend(&mut self, time_ns: u64, position: u64, piece: Piece<'_>, sink: &mut dyn Sink) {
        match (self.phase, piece) {
            (Phase::Startup, Piece::Bytes(bytes)) => self.first_answer(bytes),
            (Phase::Startup, Piece::Skipped(len)) => {
                self.login.asked = false;
                self.accounts.count_recorded(Direction::Backend, len);
            }
            (Phase::Startup, Piece::Lost(len, reason)) => {
                self.login.asked = false;
                self.lost_backend(time_ns, position, len, reason, sink);
            }
            (Phase::Joining, Piece::Bytes(bytes)) => {
                self.back.idle = false;
                if shape::backend_tail(bytes).is_some() {
                    let (front, back) =
                        (self.accounts.next(Direction::Frontend), self.accounts.next(Direction::Backend));
                    self.join(time_ns, front, back, sink);
                    self.back.idle = true;
                }
            }
            (Phase::Joining, _) => self.back.idle = false,
            (_, Piece::Bytes(bytes)) => {
                self.uncertain = false;
                self.back.idle = false;
                self.responses(time_ns, position, bytes, sink);
            }
            (_, Piece::Skipped(len)) => {
                self.settle_unfinished(time_ns, sink);
                self.accounts.count_recorded(Direction::Backend, len);
                self.pass_over(time_ns, position, len, Boundary::Skipped, sink);
            }
            (_, Piece::Lost(len, reason)) => {
                self.back.damaged = true;
                self.settle_unfinished(time_ns, sink);
                self.lost_backend(time_ns, position, len, reason, sink);
                self.pass_over(time_ns, position, len, Boundary::Lost, sink);
            }
        }
    }

    /// Bytes that we do not have. If they are within one message, the boundary behind it is still known.
    fn pass_over(&mut self, time_ns: u64, position: u64, len: u64, why: Boundary, sink: &mut dyn Sink) {
        self.uncertain = false;
        self.back.idle = false;
        self.back.passed.clear();
        if self.back.boundary != Boundary::Known {
            // A loss among what was left out makes it a loss.
            if why == Boundary::Lost {
                self.back.boundary = why;
            }
            return;
        }
        if self.back.head_len == Header::SIZE && self.back.need >= len {
            self.back.need -= len;
            self.back.damaged = true;
            if self.back.need == 0 {
                self.whole(time_ns, position + len, sink);
            }
            return;
        }
        if why == Boundary::Skipped && self.back.head_len == Header::SIZE && self.back.head[0] == b'D' {
            // It is a row whatever is in it.
            let (at, first_ns) = (self.back.at, self.back.first_ns);
            self.begin(at, first_ns).rows += 1;
        }
        self.back.boundary = why;
        self.back.head_len = 0;
        self.back.need = 0;
        self.back.kept.clear();
    }

    /// What is kept of a message when the stream ends, or is damaged: where whole messages are recorded, it is not.
    pub(super) fn settle_unfinished(&mut self, time_ns: u64, sink: &mut dyn Sink) {
        if self.origin.level != Level::Full {
            return;
        }
        let len = self.back.unfinished() as u64;
        self.back.kept = Vec::new();
        let why = match self.back.damaged {
            true => Missing::Lost(LossReason::Resync),
            false => Missing::Withheld(WithheldReason::Incomplete),
        };
        self.accounts.missing(Direction::Backend, time_ns, self.back.at, len, why, sink);
    }

    fn responses(&mut self, time_ns: u64, position: u64, bytes: &[u8], sink: &mut dyn Sink) {
        let (mut at, mut rest) = (position, bytes);
        while !rest.is_empty() {
            if self.back.boundary != Boundary::Known {
                return self.resynchronise(time_ns, at, rest, sink);
            }
            let taken = if self.back.head_len == 0 && self.origin.level != Level::Full {
                self.quick(time_ns, at, rest, sink)
            } else {
                None
            };
            let taken = match taken {
                Some(taken) => taken,
                None => match self.slow(time_ns, at, rest, sink) {
                    Some(taken) => taken,
                    None => {
                        self.back.boundary = Boundary::Lost;
                        let len = rest.len() as u64;
                        return self.lost_backend(time_ns, at, len, LossReason::Protocol, sink);
                    }
                },
            };
            if self.origin.level != Level::Full {
                self.recorded_backend(time_ns, taken as u64, sink);
            }
            at += taken as u64;
            rest = &rest[taken..];
            if self.phase != Phase::Running && self.phase != Phase::Login {
                // A replication stream began.
                let why = Missing::Withheld(WithheldReason::Replication);
                return self.accounts.missing(Direction::Backend, time_ns, at, rest.len() as u64, why, sink);
            }
        }
    }

    fn lost_backend(&mut self, time_ns: u64, from: u64, len: u64, why: LossReason, sink: &mut dyn Sink) {
        self.accounts.missing(Direction::Backend, time_ns, from, len, Missing::Lost(why), sink);
    }

    fn recorded_backend(&mut self, time_ns: u64, len: u64, sink: &mut dyn Sink) {
        self.accounts.recorded(Direction::Backend, time_ns, len, sink);
    }

    /// A message that is whole in the chunk, without copying it. Returns its length.
    fn quick(&mut self, time_ns: u64, at: u64, bytes: &[u8], sink: &mut dyn Sink) -> Option<usize> {
        let header = Header::parse(bytes).ok().flatten()?;
        let body = bytes.get(Header::SIZE..header.total())?;
        if !tag::backend::ALL.contains(&header.tag) {
            return None;
        }
        self.back.position = at + header.total() as u64;
        self.message(header.tag, body, at, time_ns, time_ns, false, sink);
        Some(header.total())
    }

    /// A part of a message. Returns how many bytes it took; `None` when they are not a message.
    fn slow(&mut self, time_ns: u64, at: u64, bytes: &[u8], sink: &mut dyn Sink) -> Option<usize> {
        let back = &mut self.back;
        if back.head_len == 0 {
            back.at = at;
            back.first_ns = time_ns;
            back.damaged = false;
            back.kept.clear();
        }
        if back.head_len < Header::SIZE {
            let taken = (Header::SIZE - back.head_len).min(bytes.len());
            back.head[back.head_len..back.head_len + taken].copy_from_slice(&bytes[..taken]);
            back.head_len += taken;
            if back.head_len == Header::SIZE {
                let header = match Header::parse(&back.head) {
                    Ok(Some(header)) if tag::backend::ALL.contains(&header.tag) => header,
                    _ => {
                        back.head_len = 0;
                        if self.origin.level == Level::Full {
                            let (from, before) = (back.at, (Header::SIZE - taken) as u64);
                            self.lost_backend(time_ns, from, before, LossReason::Protocol, sink);
                        }
                        return None;
                    }
                };
                back.need = header.body_len() as u64;
                if self.origin.level == Level::Full {
                    back.kept.extend_from_slice(&back.head);
                }
                if back.need == 0 {
                    self.whole(time_ns, at + taken as u64, sink);
                }
            }
            return Some(taken);
        }
        let taken = usize::try_from(back.need).map_or(bytes.len(), |need| need.min(bytes.len()));
        let keep = match self.origin.level {
            Level::Full if back.damaged => 0,
            Level::Full => taken,
            _ if matters(back.head[0]) => taken.min(BODY_BYTES_MAX.saturating_sub(back.kept.len())),
            _ => 0,
        };
        back.kept.extend_from_slice(&bytes[..keep]);
        back.damaged |= keep < taken && matters(back.head[0]);
        back.need -= taken as u64;
        let is_whole = back.need == 0;
        if self.origin.level == Level::Full && keep < taken {
            // Of a message without its beginning nothing is recorded.
            self.lost_backend(time_ns, at, taken as u64, LossReason::Resync, sink);
        }
        if is_whole {
            self.whole(time_ns, at + taken as u64, sink);
        }
        Some(taken)
    }

    /// The message under way is complete and ends at `end`.
    fn whole(&mut self, time_ns: u64, end: u64, sink: &mut dyn Sink) {
        let Some(header) = self.back.header() else { return };
        let kept = std::mem::take(&mut self.back.kept);
        let (at, first_ns, damaged) = (self.back.at, self.back.first_ns, self.back.damaged);
        if self.origin.level == Level::Full && !damaged {
            self.recorded_backend(time_ns, kept.len() as u64, sink);
        }
        self.back.head_len = 0;
        self.back.position = end;
        let body =
            if self.origin.level == Level::Full { &kept[Header::SIZE.min(kept.len())..] } else { &kept[..] };
        self.message(header.tag, body, at, first_ns, time_ns, damaged, sink);
        if self.origin.level == Level::Full
            && !damaged
            && self.accounts.announced
            && header.tag != b'K'
            && header.tag != b'R'
        {
            sink.record(Record::Backend(Backend {
                session: self.origin.session,
                time_ns,
                offset: self.accounts.shown(Direction::Backend, at),
                message: kept.as_slice().into(),
            }));
        }
        self.back.kept = kept;
        self.back.kept.clear();
        self.back.kept.shrink_to(64 << 10);
    }

    #[allow(clippy::too_many_arguments)] // the parts of one message: a structure for one call would say no more
    fn message(
        &mut self,
        tag: u8,
        body: &[u8],
        at: u64,
        first_ns: u64,
        last_ns: u64,
        damaged: bool,
        sink: &mut dyn Sink,
    ) {
        if self.phase == Phase::Login {
            return self.login_message(tag, body, at, last_ns, sink);
        }
        match tag {
            b'D' | b'd' => self.begin(at, first_ns).rows += 1,
            b'C' => {
                let outcome = match CommandComplete::decode(body) {
                    Ok(complete) if !damaged => Outcome::Complete { tag: complete.tag.into() },
                    _ => Outcome::Unknown,
                };
                self.statement_ends(at, first_ns, last_ns, outcome, sink);
            }
            b'I' => self.statement_ends(at, first_ns, last_ns, Outcome::Empty, sink),
            b's' => self.statement_ends(at, first_ns, last_ns, Outcome::Suspended, sink),
            b'V' => {
                let outcome = Outcome::Complete { tag: (&b""[..]).into() };
                self.statement_ends(at, first_ns, last_ns, outcome, sink);
            }
            b'E' => self.error(body, damaged, at, first_ns, last_ns, sink),
            b'Z' => match TransactionStatus::decode(body) {
                Ok(status) => self.ready(at, last_ns, status, sink),
                Err(_) => self.back.boundary = Boundary::Lost,
            },
            b'1' => self.answered(b'P'),
            b'2' => self.answered(b'B'),
            b'3' => self.answered(b'C'),
            b'n' => self.answered(b'D'),
            b'T' => {
                if self.pending.front().is_some_and(|request| request.tag == b'D') {
                    self.answered(b'D');
                } else {
                    self.begin(at, first_ns);
                }
            }
            b'G' => {
                self.begin(at, first_ns);
                self.copy_in_begins();
            }
            b'H' => {
                self.begin(at, first_ns);
            }
            b'W' => self.phase = Phase::Replication,
            b'S' => {
                if let (Ok(status), false) = (StatusView::decode(body), damaged) {
                    sink.record(Record::ParameterStatus(ParameterStatus {
                        session: self.origin.session,
                        time_ns: last_ns,
                        name: status.name.into(),
                        value: status.value.into(),
                    }));
                }
            }
            _ => {}
        }
    }

    fn login_message(&mut self, tag: u8, body: &[u8], at: u64, time_ns: u64, sink: &mut dyn Sink) {
        match tag {
            b'S' => {
                if let Ok(status) = StatusView::decode(body) {
                    let (name, value) = (status.name.to_vec(), status.value.to_vec());
                    self.login.statuses.push((time_ns, name, value));
                }
            }
            b'K' => {
                if let Ok(key) = BackendKeyData::decode(body) {
                    self.login.backend_pid = Some(key.process_id);
                }
            }
            b'E' => {
                self.announce(time_ns, None, sink);
                self.error(body, false, at, time_ns, time_ns, sink);
                self.send_early(sink);
            }
            b'Z' => {
                self.announce(time_ns, Some(time_ns), sink);
                self.send_early(sink);
                self.back.ready = true;
                self.back.idle = self.pending.is_empty();
            }
            _ => {}
        }
    }

    fn begin(&mut self, at: u64, first_ns: u64) -> &mut Begun {
        self.back.response.get_or_insert(Begun { offset: at, first_ns, rows: 0 })
    }

    /// A message of the extended protocol did what it should.
    fn answered(&mut self, tag: u8) {
        if self.pending.front().is_some_and(|request| request.tag == tag) {
            self.pending.pop_front();
        }
    }

    /// Expects no answer to the Syncs that the server will ignore: see [`CopyIn`](super::CopyIn).
    fn copy_in_begins(&mut self) {
        if self.pending.front().is_none_or(|request| request.tag != b'E') {
            return;
        }
        self.copy_in.ahead.clear();
        while let Some(&sync) = self.pending.get(1)
            && sync.tag == b'S'
            && !sync.after_copy
        {
            self.pending.remove(1);
            self.copy_in.sync_ahead(sync);
        }
        self.copy_in.running = true;
    }

    fn statement_ends(
        &mut self,
        at: u64,
        first_ns: u64,
        last_ns: u64,
        outcome: Outcome<'_>,
        sink: &mut dyn Sink,
    ) {
        let begun = *self.begin(at, first_ns);
        self.back.response = None;
        self.copy_in.running = false;
        // What ends well has read all that came before the end of its data.
        self.copy_in.ahead.clear();
        let Some(&request) = self.pending.front() else { return };
        match request.tag {
            // Several statements may be in one Query: it ends at ReadyForQuery.
            b'Q' | b'F' => {}
            b'E' => {
                self.pending.pop_front();
            }
            _ => return,
        }
        self.respond(request, begun, self.back.position, last_ns, outcome, sink);
    }

    fn error(
        &mut self,
        body: &[u8],
        damaged: bool,
        at: u64,
        first_ns: u64,
        last_ns: u64,
        sink: &mut dyn Sink,
    ) {
        let begun = *self.begin(at, first_ns);
        self.back.response = None;
        self.copy_in.running = false;
        let outcome = if damaged { Outcome::Unknown } else { error_outcome(body) };
        let request = match self.pending.front() {
            Some(&request) => {
                if !matches!(request.tag, b'Q' | b'F' | b'S') {
                    self.skip_until_sync();
                }
                request
            }
            // Nobody asked: an administrator ends the session; or the login failed, which is request 0.
            None => {
                let offset = if !self.accounts.has_recorded(Direction::Frontend) || !self.back_was_ready() {
                    self.accounts.base(Direction::Frontend)
                } else {
                    self.frontend_boundary()
                };
                Pending::new(offset, 0)
            }
        };
        self.respond(request, begun, self.back.position, last_ns, outcome, sink);
    }

    fn back_was_ready(&self) -> bool {
        self.login.joined || self.back.ready
    }

    /// After an error the server ignores what was sent before the next Sync.
    fn skip_until_sync(&mut self) {
        while self.pending.front().is_some_and(|request| request.tag != b'S') {
            self.pending.pop_front();
        }
        self.skip_to_sync = self.pending.is_empty();
    }

    fn respond(
        &mut self,
        request: Pending,
        begun: Begun,
        end: u64,
        last_ns: u64,
        outcome: Outcome<'_>,
        sink: &mut dyn Sink,
    ) {
        if self.origin.level == Level::None {
            return;
        }
        sink.record(Record::Response(Response {
            session: self.origin.session,
            request: self.accounts.shown(Direction::Frontend, request.offset),
            offset: self.accounts.shown(Direction::Backend, begun.offset),
            len: end.saturating_sub(begun.offset),
            first_ns: begun.first_ns,
            last_ns,
            rows: begun.rows,
            outcome,
        }));
    }

    fn ready(&mut self, at: u64, time_ns: u64, status: TransactionStatus, sink: &mut dyn Sink) {
        self.back.response = None;
        self.back.ready = true;
        self.uses_answered(time_ns);
        let mut answered = None;
        while answered.is_none()
            && let Some(request) = self.pending.pop_front()
        {
            answered = matches!(request.tag, b'Q' | b'S' | b'F').then_some(request);
        }
        // A Sync of which nobody else knows was not ignored after all.
        if let Some(request) = answered.or_else(|| self.copy_in.ahead.pop_front()) {
            sink.record(Record::Ready(Ready {
                session: self.origin.session,
                time_ns,
                request: self.accounts.shown(Direction::Frontend, request.offset),
                offset: self.accounts.shown(Direction::Backend, at),
                status,
            }));
        }
        self.skip_to_sync = false;
        self.back.idle = self.pending.is_empty();
    }

    /// The boundary is not known: only the end of a response in this chunk can tell it.
    fn resynchronise(&mut self, time_ns: u64, position: u64, bytes: &[u8], sink: &mut dyn Sink) {
        let end = position + bytes.len() as u64;
        match self.back.boundary {
            Boundary::Skipped if self.origin.level != Level::Full => {
                self.recorded_backend(time_ns, bytes.len() as u64, sink);
            }
            _ => {
                let why = Missing::Lost(LossReason::Resync);
                self.accounts.missing(Direction::Backend, time_ns, position, bytes.len() as u64, why, sink);
            }
        }
        let mut passed = std::mem::take(&mut self.back.passed);
        let position = position - passed.len() as u64;
        let from = passed.len();
        passed.extend_from_slice(bytes);
        let Some((tail, position)) = shape::backend_tail(&passed)
            .map(|tail| (tail, position))
            .or_else(|| Some((shape::backend_tail(bytes)?, position + from as u64)))
        else {
            passed.drain(..passed.len().saturating_sub(PASSED_BYTES_MAX));
            self.back.passed = passed;
            return;
        };
        self.back.boundary = Boundary::Known;
        self.back.head_len = 0;
        self.back.position = end;
        if self.phase == Phase::Login {
            self.announce(time_ns, Some(time_ns), sink);
            return self.send_early(sink);
        }
        let ends = |request: &&Pending| matches!(request.tag, b'Q' | b'S' | b'F');
        let batches = self.pending.iter().filter(ends).count();
        self.batch_ends(time_ns, position, &tail, batches <= 1, sink);
        self.ready(position + tail.ready_at as u64, time_ns, tail.status, sink);
        self.uncertain = batches > 1;
    }

    /// Answers what is outstanding up to the end of the first batch, from what is known of the last response alone.
    fn batch_ends(
        &mut self,
        time_ns: u64,
        position: u64,
        tail: &Tail<'_>,
        certain: bool,
        sink: &mut dyn Sink,
    ) {
        let statements =
            self.pending.iter().take_while(|request| request.tag != b'S').filter(|r| r.tag == b'E').count();
        // Several statements of one Query have a result each, of which only the last one's end is seen.
        let certain =
            certain && statements <= 1 && !self.pending.front().is_some_and(|request| request.several);
        let end = position + tail.ready_at as u64;
        let mut begun = self.back.response.take();
        while let Some(&request) = self.pending.front() {
            if matches!(request.tag, b'Q' | b'F' | b'E') {
                let mut this = begun.take().unwrap_or(Begun { offset: position, first_ns: time_ns, rows: 0 });
                let outcome = match certain {
                    true => outcome(tail.closing, request, &mut this.rows),
                    false => Outcome::Unknown,
                };
                self.respond(request, this, end, time_ns, outcome, sink);
            }
            if matches!(request.tag, b'Q' | b'S' | b'F') {
                return;
            }
            self.pending.pop_front();
        }
    }
}

/// The outcome that the last message tells, and its own count of rows, since not all of them were seen.
fn outcome<'a>(closing: Closing<'a>, request: Pending, rows: &mut u64) -> Outcome<'a> {
    match closing {
        Closing::Complete(tag) => {
            let sends_rows = [&b"SELECT"[..], b"FETCH", b"COPY"].iter().any(|verb| tag.starts_with(verb));
            // INSERT and its like send as many rows as they count, if any: by RETURNING.
            if let (true, Some(count)) = (sends_rows || *rows > 0, (CommandComplete { tag }).rows()) {
                *rows = count;
            }
            Outcome::Complete { tag: tag.into() }
        }
        Closing::Empty => Outcome::Empty,
        Closing::Suspended => {
            // It has sent all that were asked for.
            *rows = request.rows_max.max(*rows);
            Outcome::Suspended
        }
        Closing::Error(body) => error_outcome(body),
        Closing::Other => Outcome::Unknown,
    }
}

fn error_outcome(body: &[u8]) -> Outcome<'_> {
    let Ok(fields) = Fields::decode(body) else { return Outcome::Unknown };
    let Some(sqlstate) = fields.sqlstate() else { return Outcome::Unknown };
    let fatal = fields.severity().is_some_and(|text| {
        [Severity::Fatal, Severity::Panic].iter().any(|severity| severity.as_str().as_bytes() == text)
    });
    Outcome::Error(ErrorOutcome {
        sqlstate: *sqlstate.as_bytes(),
        fatal,
        message: fields.message().unwrap_or_default().into(),
    })
}
