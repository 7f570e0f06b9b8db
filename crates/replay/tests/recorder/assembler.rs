// SPDX-License-Identifier: Apache-2.0
//! From the bytes of one connection to records: as much of the protocol as these tests speak. It shares no code with what
//! live captures use, so that a misunderstanding would have to be made twice.

use std::collections::VecDeque;

use underpass_testkit::Message;
use underpass_trace::{
    Backend, ByteTotals, Direction, EndReason, ErrorOutcome, Frontend, Level, Outcome, Ready, Record,
    Response, SessionEnd, SessionId, SessionStart, Source, TransactionStatus, Transport,
};

/// One connection.
pub struct Assembler {
    session: SessionId,
    level: Level,
    /// Bytes of incomplete messages, and the offset of the first of them.
    frontend: (Vec<u8>, u64),
    backend: (Vec<u8>, u64),
    start: Option<SessionStart<'static>>,
    running: bool,
    /// Requests without an answer: type and offset.
    pending: VecDeque<(u8, u64)>,
    /// Offset, time and rows of the response under way.
    response: Option<(u64, u64)>,
    rows: u64,
    in_copy: bool,
}

impl Assembler {
    pub fn new(session: SessionId, level: Level) -> Self {
        Self {
            session,
            level,
            frontend: (Vec::new(), 0),
            backend: (Vec::new(), 0),
            start: None,
            running: false,
            pending: VecDeque::new(),
            response: None,
            rows: 0,
            in_copy: false,
        }
    }

    pub fn bytes(
        &mut self,
        direction: Direction,
        time_ns: u64,
        bytes: &[u8],
        out: &mut Vec<Record<'static>>,
    ) {
        match direction {
            Direction::Frontend => {
                self.frontend.0.extend_from_slice(bytes);
                if self.start.is_none() && !self.running {
                    self.startup(time_ns);
                }
                while let Some((offset, message)) =
                    take(&mut self.frontend, self.start.is_some() || self.running)
                {
                    self.request(offset, time_ns, &message, out);
                }
            }
            Direction::Backend => {
                self.backend.0.extend_from_slice(bytes);
                while let Some((offset, message)) = take(&mut self.backend, true) {
                    self.answer(offset, time_ns, &message, out);
                }
            }
        }
    }

    fn startup(&mut self, time_ns: u64) {
        let (bytes, offset) = &mut self.frontend;
        let Some(len) = bytes.first_chunk().map(|len| u32::from_be_bytes(*len) as usize) else { return };
        if bytes.len() < len {
            return;
        }
        let rest = bytes.split_off(len);
        let packet = std::mem::replace(bytes, rest);
        *offset += len as u64;
        let mut words = packet[8..].split(|byte| *byte == 0);
        let mut start = SessionStart {
            session: self.session,
            time_ns,
            ready_ns: None,
            source: Source::Synthetic,
            transport: Transport::Tcp,
            peer: None,
            backend_pid: None,
            midstream: false,
            protocol_version: 3 << 16,
            database: None,
            user: None,
            application_name: None,
            parameters: Vec::new(),
            frontend_offset: 0,
            backend_offset: 0,
        };
        while let (Some(name @ [_, ..]), Some(value)) = (words.next(), words.next()) {
            let value = value.to_vec().into();
            match name {
                b"user" => start.user = Some(value),
                b"database" => start.database = Some(value),
                b"application_name" => start.application_name = Some(value),
                name => start.parameters.push((name.to_vec().into(), value)),
            }
        }
        self.start = Some(start);
    }

    fn request(&mut self, offset: u64, time_ns: u64, message: &Message, out: &mut Vec<Record<'static>>) {
        if message.tag == b'p' {
            return;
        }
        out.push(Record::Frontend(Frontend::new(self.session, time_ns, offset, message.encode())));
        match message.tag {
            // In COPY the server ignores Sync.
            b'S' if self.in_copy => {}
            b'Q' | b'S' | b'F' | b'P' | b'B' | b'D' | b'E' | b'C' => {
                self.pending.push_back((message.tag, offset))
            }
            b'c' | b'f' => self.in_copy = false,
            _ => {}
        }
    }

    fn answer(&mut self, offset: u64, time_ns: u64, message: &Message, out: &mut Vec<Record<'static>>) {
        if !self.running {
            if message.tag == b'Z' {
                let mut start = self.start.take().expect("a StartupMessage");
                start.ready_ns = Some(time_ns);
                self.running = true;
                out.push(Record::SessionStart(start));
            }
            return;
        }
        if matches!(message.tag, b'N' | b'S' | b'A') {
            return;
        }
        let session = self.session;
        let raw = message.encode();
        let len = raw.len() as u64;
        if self.level == Level::Full {
            out.push(Record::Backend(Backend { session, time_ns, offset, message: raw.into() }));
        }
        let (first_offset, first_ns) = *self.response.get_or_insert((offset, time_ns));
        let outcome = match message.tag {
            b'D' | b'd' => {
                self.rows += 1;
                return;
            }
            b'C' => Outcome::Complete { tag: message.strings()[0].clone().into_bytes().into() },
            b'I' => Outcome::Empty,
            b's' => Outcome::Suspended,
            b'E' => {
                let error = message.error().expect("an error");
                let sqlstate = error.sqlstate.as_bytes().try_into().expect("five");
                Outcome::Error(ErrorOutcome {
                    sqlstate,
                    fatal: false,
                    message: error.message.into_bytes().into(),
                })
            }
            b'Z' => {
                let status = match message.status() {
                    Some(b'T') => TransactionStatus::Transaction,
                    Some(b'E') => TransactionStatus::Failed,
                    _ => TransactionStatus::Idle,
                };
                // Whatever was skipped after an error is answered by this as well.
                while let Some((tag, request)) = self.pending.pop_front() {
                    if matches!(tag, b'Q' | b'S' | b'F') {
                        out.push(Record::Ready(Ready { session, time_ns, request, offset, status }));
                        break;
                    }
                }
                self.response = None;
                return;
            }
            b'G' => {
                self.in_copy = true;
                // A Sync that was sent already is ignored as well.
                if self.pending.front().is_some_and(|(tag, _)| *tag != b'Q') {
                    self.pending.retain(|(tag, _)| *tag != b'S');
                }
                return;
            }
            b'1' | b'2' | b'3' | b'n' | b'T' => {
                if self.pending.front().is_some_and(|(tag, _)| *tag != b'Q') {
                    self.pending.pop_front();
                    self.response = None;
                }
                return;
            }
            _ => return,
        };
        let request = self.pending.front().expect("a request").1;
        if self.pending.front().is_some_and(|(tag, _)| *tag != b'Q') && message.tag != b'E' {
            self.pending.pop_front();
        }
        self.response = None;
        out.push(Record::Response(Response {
            session,
            request,
            offset: first_offset,
            len: offset + len - first_offset,
            first_ns,
            last_ns: time_ns,
            rows: std::mem::take(&mut self.rows),
            outcome,
        }));
    }

    pub fn end(self, time_ns: u64, out: &mut Vec<Record<'static>>) {
        let (frontend, backend) = (ByteTotals::default(), ByteTotals::default());
        let reason = EndReason::Terminate;
        out.push(Record::SessionEnd(SessionEnd {
            session: self.session,
            time_ns,
            reason,
            frontend,
            backend,
        }));
    }
}

/// The next whole message and its offset.
fn take((bytes, offset): &mut (Vec<u8>, u64), begun: bool) -> Option<(u64, Message)> {
    if !begun {
        return None;
    }
    let before = bytes.len();
    let message = Message::take(bytes)?;
    let at = *offset;
    *offset += (before - bytes.len()) as u64;
    Some((at, message))
}
