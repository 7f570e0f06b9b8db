// SPDX-License-Identifier: Apache-2.0
//! The login: who it is, and what both ends agree on. None of its bytes is recorded.

use underpass_mysql::capability::{self, Capabilities};
use underpass_mysql::exchange::Session;
use underpass_mysql::handshake::{First, Greeting};
use underpass_mysql::{packet, response};

use super::{Missing, Mysql, Phase};
use crate::assemble::{Piece, Sink};
use crate::{
    Direction, ErrorOutcome, Outcome, ParameterStatus, Record, Response, SessionStart, Source, Transport,
    WithheldReason,
};

/// The protocol's version, 10, where PostgreSQL has its major one.
const PROTOCOL_VERSION: u32 = 10 << 16;
/// Bytes of a login message that are kept: attributes may have 64 KiB, plugins send certificates.
const LOGIN_BYTES_MAX: usize = 1 << 20;

/// What is known so far.
#[derive(Debug, Default)]
pub(super) struct Login {
    /// Bytes of messages that are not whole, by direction.
    front: Vec<u8>,
    back: Vec<u8>,
    /// What the server can do, from its greeting.
    server: Option<Capabilities>,
    server_version: Vec<u8>,
    /// The client has asked for TLS: what follows is encrypted.
    pub(super) turned_to_tls: bool,
    session: Option<Session>,
    user: Option<Vec<u8>>,
    database: Option<Vec<u8>>,
    attributes: Vec<(Vec<u8>, Vec<u8>)>,
    collation: u8,
}

impl Login {
    /// Whether a client has said who it is.
    pub(super) fn was_seen(&self) -> bool {
        self.user.is_some()
    }
}

/// Whether what a server says first is its greeting: in an answer no packet has the number 0.
pub(super) fn is_greeting(bytes: &[u8]) -> bool {
    let header = packet::Header::parse(bytes);
    header.is_some_and(|header| header.sequence == 0)
        && Greeting::decode(&bytes[packet::HEADER_BYTES..]).is_ok()
}

/// Number of the login message behind a greeting and a request for TLS.
const LOGIN_BY_TLS: u8 = 2;

impl Mysql {
    /// Whether the client's next bytes can be its login. Where the probes came later than it turned to TLS, they are of a command.
    pub(super) fn goes_on_with_login(&self, piece: Piece<'_>) -> bool {
        let begins = self.phase == Phase::Login
            && self.login.turned_to_tls
            && self.login.session.is_none()
            && self.login.front.is_empty();
        let Piece::Bytes(bytes) = piece else { return true };
        !begins || packet::Header::parse(bytes).is_none_or(|header| header.sequence == LOGIN_BY_TLS)
    }

    pub(super) fn login_bytes(
        &mut self,
        direction: Direction,
        time_ns: u64,
        position: u64,
        bytes: &[u8],
        sink: &mut dyn Sink,
    ) {
        let why = Missing::Withheld(WithheldReason::Authentication);
        self.accounts.missing(direction, time_ns, position, bytes.len() as u64, why, sink);
        let buffer = match direction {
            Direction::Frontend => &mut self.login.front,
            Direction::Backend => &mut self.login.back,
        };
        buffer.extend_from_slice(bytes);
        if buffer.len() > LOGIN_BYTES_MAX {
            return self.close(Some("a login that is not of this protocol"));
        }
        let mut buffer = std::mem::take(buffer);
        let mut at = 0;
        while self.phase == Phase::Login
            && let Ok(Some(len)) = packet::message_len(&buffer[at..])
        {
            let payload = packet::payload(&buffer[at..at + len]);
            match direction {
                Direction::Frontend => self.login_of_client(&payload),
                Direction::Backend => self.login_of_server(time_ns, position, &payload, sink),
            }
            at += len;
        }
        buffer.drain(..at);
        match direction {
            Direction::Frontend => self.login.front = buffer,
            Direction::Backend => self.login.back = buffer,
        }
    }

    fn login_of_client(&mut self, payload: &[u8]) {
        if self.login.session.is_some() {
            return; // what the plugin wants
        }
        match First::decode(payload) {
            Ok(First::SslRequest) => {
                self.login.turned_to_tls = true;
                match self.origin.source {
                    // They show what is behind the encryption.
                    Source::Uprobe => self.origin.transport = Transport::Tls,
                    _ => self.close(None),
                }
            }
            Ok(First::Login(login)) => {
                // A client may ask for what the server does not offer: in use is what both have.
                let server = self.login.server.map_or(u64::MAX, |server| server.0);
                self.login.session = Some(Session::new(Capabilities(login.capabilities.0 & server)));
                self.login.user = Some(login.user.to_vec());
                self.login.collation = login.collation;
                self.login.database = login.database.map(<[u8]>::to_vec);
                let owned = |(name, value): &(&[u8], &[u8])| (name.to_vec(), value.to_vec());
                self.login.attributes = login.attributes.iter().map(owned).collect();
            }
            Err(_) => self.close(Some("a login of before MySQL 4.1, or of another protocol")),
        }
    }

    fn login_of_server(&mut self, time_ns: u64, position: u64, payload: &[u8], sink: &mut dyn Sink) {
        if self.login.server.is_none() {
            match Greeting::decode(payload) {
                Ok(greeting) => {
                    self.login.server = Some(greeting.capabilities);
                    self.login.server_version = greeting.server_version().to_vec();
                    self.connection_id = Some(greeting.connection_id);
                }
                // The greeting was before the first byte that we saw, so nobody knows what is in use.
                Err(_) if self.login.session.is_some() => self.phase = Phase::Joining,
                // Too many connections: nobody has said who it is, so there is no session.
                Err(_) => self.close(None),
            }
            return;
        }
        let Some(session) = self.login.session else { return };
        match payload.first() {
            Some(&response::OK) if session.capabilities.compressed() => {
                self.close(Some("the compressed protocol"));
            }
            Some(&response::OK) if session.capabilities.has(capability::OPTIONAL_RESULTSET_METADATA) => {
                self.close(Some("results without metadata"));
            }
            Some(&response::OK) => {
                self.session = session;
                if let Ok(ok) = response::Ok::decode(payload) {
                    self.note_status(ok.status);
                }
                self.announce(time_ns, Some(time_ns), sink);
            }
            Some(&response::ERR) => {
                self.announce(time_ns, None, sink);
                self.login_failed(time_ns, position, payload, sink);
            }
            _ => {}
        }
    }

    fn login_failed(&mut self, time_ns: u64, position: u64, payload: &[u8], sink: &mut dyn Sink) {
        let Ok(error) = response::Err::decode(payload) else { return };
        sink.record(Record::Response(Response {
            session: self.origin.session,
            request: 0,
            offset: position,
            len: payload.len() as u64,
            first_ns: time_ns,
            last_ns: time_ns,
            rows: 0,
            outcome: Outcome::Error(ErrorOutcome {
                sqlstate: error.sqlstate,
                fatal: true,
                message: error.message.into(),
            }),
        }));
    }

    /// Recording of a session that was under way begins, if these bytes are a command.
    pub(super) fn join(&mut self, time_ns: u64, position: u64, bytes: &[u8], sink: &mut dyn Sink) {
        let Some(begins) = self.front.begins_command(position, bytes) else { return };
        self.start_ns = time_ns;
        self.accounts.begin(begins, self.accounts.next(Direction::Backend));
        self.accounts.seen(Direction::Frontend, position - begins + bytes.len() as u64);
        self.announce(time_ns, None, sink);
        self.commands(time_ns, position, bytes, sink);
    }

    /// Writes the session's start.
    pub(super) fn announce(&mut self, time_ns: u64, ready_ns: Option<u64>, sink: &mut dyn Sink) {
        let midstream = self.phase == Phase::Joining;
        let login = std::mem::take(&mut self.login);
        let session = self.origin.session;
        let known = &self.known;
        let program = login.attributes.iter().find(|(name, _)| name == b"program_name");
        let application_name = program.map(|(_, value)| value).or(known.application_name.as_ref());
        let capabilities = login.session.map(|session| session.capabilities.0.to_string());
        let mut parameters: Vec<_> = login.attributes.iter().collect();
        parameters.retain(|(name, _)| name != b"program_name");
        let mut parameters: Vec<_> = parameters
            .into_iter()
            .map(|(name, value)| (name.as_slice().into(), value.as_slice().into()))
            .collect();
        let collation = login.collation.to_string();
        if let Some(flags) = &capabilities {
            // What a reader needs to decode the messages, and to send them again; the client did not send it as an attribute.
            parameters.push((crate::statements::COLLATION.into(), collation.as_bytes().into()));
            parameters.push((crate::statements::CAPABILITIES.into(), flags.as_bytes().into()));
        }
        let at = |direction| if midstream { 0 } else { self.accounts.next(direction) };
        sink.record(Record::SessionStart(SessionStart {
            session,
            time_ns: self.start_ns,
            ready_ns,
            source: self.origin.source,
            transport: self.origin.transport,
            peer: self.origin.peer,
            backend_pid: self.connection_id.or(known.backend_pid),
            midstream,
            protocol_version: PROTOCOL_VERSION,
            database: login.database.as_deref().or(known.database.as_deref()).map(Into::into),
            user: login.user.as_deref().or(known.user.as_deref()).map(Into::into),
            application_name: application_name.map(|name| name.as_slice().into()),
            parameters,
            frontend_offset: at(Direction::Frontend),
            backend_offset: at(Direction::Backend),
        }));
        if login.server.is_some() {
            sink.record(Record::ParameterStatus(ParameterStatus {
                session,
                time_ns,
                name: b"version".into(),
                value: login.server_version.as_slice().into(),
            }));
        }
        self.accounts.announced = true;
        for direction in [Direction::Frontend, Direction::Backend] {
            self.accounts.report(direction, time_ns, sink);
        }
        self.phase = Phase::Running;
    }
}
