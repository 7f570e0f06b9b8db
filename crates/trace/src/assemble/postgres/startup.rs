// SPDX-License-Identifier: Apache-2.0
//! The login: what the client asks for, and what becomes known until the server is ready.

use std::borrow::Cow;

use underpass_wire::startup::{self, FirstPacket, StartupMessage};

use super::{Phase, Postgres};
use crate::assemble::Sink;
use crate::{Cancel, Direction, ParameterStatus, Record, SessionStart};

/// What is known from the login.
#[derive(Debug, Default)]
pub(super) struct Login {
    version: u32,
    user: Option<Vec<u8>>,
    database: Option<Vec<u8>>,
    application_name: Option<Vec<u8>>,
    parameters: Vec<(Vec<u8>, Vec<u8>)>,
    /// ParameterStatus before SessionStart: time, name, value.
    pub statuses: Vec<(u64, Vec<u8>, Vec<u8>)>,
    pub backend_pid: Option<u32>,
    /// Encryption was asked for, and the server has not answered.
    pub asked: bool,
    /// It was not seen: the session was joined.
    pub joined: bool,
    /// Messages that the client sent before the server was ready: time, position, message.
    pub early: Vec<(u64, u64, Vec<u8>)>,
}

/// What a first packet asks for, without borrowing it.
enum First {
    Session,
    Encryption,
    Cancel { backend_pid: u32 },
    Nothing,
}

impl Postgres {
    /// Bytes of the client before its StartupMessage is whole.
    pub(super) fn first_packets(&mut self, time_ns: u64, position: u64, bytes: &[u8], sink: &mut dyn Sink) {
        let mut next = Some((position, Cow::Borrowed(bytes)));
        // A client chooses how many there are in one piece.
        while let Some((position, bytes)) = next {
            next = self.first_packet(time_ns, position, &bytes, sink).map(|(at, rest)| (at, rest.into()));
        }
    }

    /// Takes one of them, if it is whole; returns the position of what is behind it, and the bytes, if another may be there.
    fn first_packet(
        &mut self,
        time_ns: u64,
        position: u64,
        bytes: &[u8],
        sink: &mut dyn Sink,
    ) -> Option<(u64, Vec<u8>)> {
        let mut login = std::mem::take(&mut self.login);
        let taken = self.take_first_packet(position, bytes, |bytes| match startup::parse(bytes) {
            Ok(Some((packet, len))) => Some((Ok(login.first_packet(&packet)), len)),
            Ok(None) => None,
            // Not a first packet: the session began before we did.
            Err(_) => Some((Err(()), 0)),
        });
        self.login = login;
        match taken {
            None => {}
            Some((Ok(First::Session), at, rest)) => {
                self.accounts.recorded_up_to(Direction::Frontend, at);
                self.phase = Phase::Login;
                if !rest.is_empty() {
                    self.requests(time_ns, at, &rest, sink);
                }
            }
            // The server ends it: a client has to wait for the answer to the first.
            Some((Ok(First::Encryption), ..)) if self.login.asked => self.phase = Phase::Closed,
            Some((Ok(First::Encryption), at, rest)) => {
                self.accounts.recorded_up_to(Direction::Frontend, at);
                self.login.asked = true;
                return Some((at, rest)).filter(|(_, rest)| !rest.is_empty());
            }
            Some((Ok(First::Cancel { backend_pid }), ..)) => {
                sink.record(Record::Cancel(Cancel { time_ns, session: None, backend_pid }));
                self.phase = Phase::Closed;
            }
            Some((Ok(First::Nothing), ..)) => self.phase = Phase::Closed,
            Some((Err(()), at, rest)) => {
                self.phase = Phase::Joining;
                self.join_by_request(time_ns, at, &rest, sink);
            }
        }
        None
    }

    /// Bytes of the server before the StartupMessage.
    pub(super) fn first_answer(&mut self, bytes: &[u8]) {
        self.accounts.count_recorded(Direction::Backend, bytes.len() as u64);
        if self.login.asked {
            self.login.asked = false;
            // `N`: the client may go on without. `S`, `G`: encrypted from here on. An ErrorResponse ends it.
            if bytes != b"N" {
                self.phase = Phase::Closed;
            }
        }
    }

    /// Writes SessionStart, and what had to wait for it.
    pub(super) fn announce(&mut self, time_ns: u64, ready_ns: Option<u64>, sink: &mut dyn Sink) {
        if self.accounts.announced {
            return;
        }
        self.accounts.announced = true;
        let joined = self.phase == Phase::Running && ready_ns.is_none();
        self.login.joined = joined;
        let login = std::mem::take(&mut self.login);
        let known = &self.known;
        let early = login.early.first().map(|&(_, at, _)| at);
        sink.record(Record::SessionStart(SessionStart {
            session: self.origin.session,
            time_ns: self.start_ns,
            ready_ns,
            source: self.origin.source,
            transport: self.origin.transport,
            peer: self.origin.peer,
            backend_pid: login.backend_pid.or(known.backend_pid),
            midstream: joined,
            protocol_version: login.version,
            database: login.database.as_deref().or(known.database.as_deref()).map(Into::into),
            user: login.user.as_deref().or(known.user.as_deref()).map(Into::into),
            application_name: login
                .application_name
                .as_deref()
                .or(known.application_name.as_deref())
                .map(Into::into),
            parameters: login
                .parameters
                .iter()
                .map(|(name, value)| (name.as_slice().into(), value.as_slice().into()))
                .collect(),
            frontend_offset: if joined { 0 } else { early.unwrap_or_else(|| self.frontend_boundary()) },
            backend_offset: if joined { 0 } else { self.back.position() },
        }));
        for (time_ns, name, value) in &login.statuses {
            sink.record(Record::ParameterStatus(ParameterStatus {
                session: self.origin.session,
                time_ns: *time_ns,
                name: name.as_slice().into(),
                value: value.as_slice().into(),
            }));
        }
        self.login = Login { backend_pid: login.backend_pid, joined, early: login.early, ..Login::default() };
        self.accounts.report(Direction::Frontend, time_ns, sink);
        self.accounts.report(Direction::Backend, time_ns, sink);
        if self.phase == Phase::Login {
            self.phase = Phase::Running;
        }
    }

    /// Messages that came before the login was over, after its start has been written.
    pub(super) fn send_early(&mut self, sink: &mut dyn Sink) {
        for (time_ns, at, message) in std::mem::take(&mut self.login.early) {
            self.request(time_ns, at, &message, sink);
        }
    }
}

impl Login {
    fn first_packet(&mut self, packet: &FirstPacket<'_>) -> First {
        match packet {
            FirstPacket::Startup(message) => {
                self.take(message);
                First::Session
            }
            FirstPacket::SslRequest | FirstPacket::GssencRequest => First::Encryption,
            FirstPacket::Cancel(request) => First::Cancel { backend_pid: request.process_id },
            FirstPacket::DirectTls | FirstPacket::UnsupportedProtocol(_) => First::Nothing,
        }
    }

    fn take(&mut self, message: &StartupMessage<'_>) {
        self.version = message.version.to_word();
        self.user = message.user().map(<[u8]>::to_vec);
        self.database = message.database().map(<[u8]>::to_vec);
        for (name, value) in message.parameters().chain(message.protocol_options()) {
            match name {
                b"user" | b"database" => {}
                b"application_name" => self.application_name = Some(value.to_vec()),
                _ => self.parameters.push((name.to_vec(), value.to_vec())),
            }
        }
    }
}
