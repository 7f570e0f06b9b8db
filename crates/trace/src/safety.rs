// SPDX-License-Identifier: Apache-2.0
//! What never gets into a trace. The writer passes every record through here, so that no recorder can forget it.
//!
//! Always: login payloads and cancel keys are left out, passwords in statements are overwritten ([`passwords`]).
//! On request: literals and parameters are masked ([`mask`]). All of it keeps the length of a message, so that
//! offsets stay true.

mod connection;
mod covered;
mod fold;
pub(crate) mod lexer;
mod mask;
pub(crate) mod passwords;
mod prepared;
mod strip;

use std::borrow::Cow;

use underpass_mysql::command::{
    self, COM_CHANGE_USER, COM_QUERY, COM_REGISTER_SLAVE, COM_STMT_BULK_EXECUTE, COM_STMT_EXECUTE,
    COM_STMT_PREPARE, COM_STMT_SEND_LONG_DATA,
};
use underpass_mysql::packet;
use underpass_wire::frontend::{Bind, FunctionCall, bind_names};
use underpass_wire::tag::{backend, frontend};

use covered::Covered;
use prepared::{Prepared, Secret};

pub use fold::fold;
pub use mask::{KeyError, Masker};
pub use strip::strip_literals;

use crate::model::*;
use crate::{Protocol, SessionId};

/// Bytes of a statement's number in MySQL's commands.
const STATEMENT_BYTES: usize = 4;

/// What is done to records before they are stored.
#[derive(Debug)]
pub(crate) struct Safety {
    protocol: Protocol,
    masker: Option<Masker>,
    /// Sessions that have said a password, which answers might quote.
    covered: foldhash::HashMap<SessionId, Covered>,
    /// Sessions of MySQL's protocol that have prepared a statement with a password elsewhere than in its text.
    prepared: foldhash::HashMap<SessionId, Prepared>,
    /// Whether the trace tells errors: at level none it does not.
    tells_errors: bool,
    /// Whether it has rows: only at level full.
    tells_rows: bool,
    /// Sessions of MySQL's protocol whose client is sending something that is not a command.
    sending: foldhash::HashMap<SessionId, Sending>,
}

/// What a client of MySQL's protocol sends in answer to its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sending {
    /// A local file. Its packets are numbered on behind the server's, and wrap at 256: one with number 0 is no command.
    File,
    /// What a plugin wants for COM_CHANGE_USER.
    Login,
}

/// What a message of MySQL's protocol is.
enum Part {
    Command(u8),
    Sent(Sending),
}

impl Safety {
    pub(crate) fn new(protocol: Protocol, level: Level, masker: Option<Masker>) -> Self {
        Self {
            protocol,
            masker,
            covered: foldhash::HashMap::default(),
            prepared: foldhash::HashMap::default(),
            tells_errors: level != Level::None,
            tells_rows: level == Level::Full,
            sending: foldhash::HashMap::default(),
        }
    }

    /// The record as it may be stored. Borrowed when there is nothing to hide, which is nearly always.
    pub(crate) fn apply<'r>(&mut self, record: &'r Record<'_>) -> Cow<'r, Record<'r>> {
        let sent = match record {
            Record::Response(r) => Some(r.session),
            Record::Ready(r) => Some(r.session),
            Record::SessionEnd(r) => Some(r.session),
            // Recording goes on at a command.
            Record::Loss(r) => r.session,
            _ => None,
        };
        if let Some(session) = sent {
            self.sending.remove(&session);
        }
        let changed = match record {
            Record::Frontend(r) => self.frontend(r),
            Record::Backend(r) => self.backend(r),
            Record::PreparedFill(r) => self.prepared_fill(r),
            Record::Response(r) => self.response(r),
            Record::SessionStart(r) => session_start(r),
            Record::Ready(r) => {
                if !self.covered.is_empty()
                    && let Some(covered) = self.covered.get_mut(&r.session)
                {
                    if !self.tells_errors {
                        covered.failed(0);
                    }
                    covered.ready(r.request, r.status == TransactionStatus::Idle);
                    if covered.is_empty() {
                        self.covered.remove(&r.session);
                    }
                }
                None
            }
            // What is missing may be an error.
            Record::Loss(Loss { session: Some(session), direction: Direction::Backend, .. }) => {
                if let Some(covered) = self.covered.get_mut(session) {
                    covered.failed(0);
                }
                None
            }
            Record::SessionEnd(r) => {
                self.covered.remove(&r.session);
                self.prepared.remove(&r.session);
                None
            }
            _ => None,
        };
        match changed {
            Some(changed) => Cow::Owned(changed),
            None => Cow::Borrowed(record),
        }
    }

    fn frontend(&mut self, r: &Frontend<'_>) -> Option<Record<'static>> {
        let tag = r.message.first().copied().unwrap_or(0);
        let withhold = |reason| {
            Some(Record::Withheld(Withheld {
                session: r.session,
                time_ns: r.time_ns,
                direction: Direction::Frontend,
                offset: r.offset,
                len: r.wire_len,
                reason,
            }))
        };
        if self.protocol == Protocol::Postgres && tag == frontend::PASSWORD {
            return withhold(WithheldReason::Authentication);
        }
        let mut message = Cow::Borrowed(&r.message[..]);
        let mut redaction = r.redaction;
        let mut command = None;
        if self.protocol == Protocol::Mysql {
            match self.part(r) {
                Part::Sent(Sending::Login) | Part::Command(COM_CHANGE_USER | COM_REGISTER_SLAVE) => {
                    return withhold(WithheldReason::Authentication);
                }
                Part::Sent(Sending::File) if self.masker.is_some() && redaction != Redaction::Masked => {
                    return withhold(WithheldReason::Masking);
                }
                Part::Sent(Sending::File) => return None,
                Part::Command(byte) => command = Some(byte),
            }
            if is_continued(&message) {
                message =
                    Cow::Owned([&message[..packet::HEADER_BYTES], &packet::payload(&r.message)].concat());
            }
        }
        let Ok(text) = self.text_of(&message) else {
            // Attributes that cannot be read: where the text begins, and what in it is a password, is not known.
            return withhold(WithheldReason::Authentication);
        };
        let (mut hides, mut composes) = (false, false);
        if passwords::may_have_password(&message, self.protocol) {
            let mut changed = message.to_vec();
            let mut covered = false;
            if let Some(text) = text.clone() {
                let told = passwords::cover(&mut changed[text], self.protocol);
                (covered, composes) = (told.covered, told.composes);
            }
            for (value, format) in self.values_of(&message) {
                covered |= match format {
                    TEXT_FORMAT => passwords::cover_value(&mut changed[value], self.protocol),
                    _ => passwords::cover_binary(&mut changed[value], self.protocol),
                };
            }
            if command.is_some_and(has_values)
                && let Some(values) = changed.get_mut(HEADER + STATEMENT_BYTES..)
            {
                covered |= passwords::cover_values(values, self.protocol);
            }
            if covered {
                message = Cow::Owned(changed);
            }
            hides |= covered;
        }
        if self.protocol == Protocol::Postgres {
            hides |= self.composed(r, &mut message);
        }
        if let Some(command) = command {
            let secret = self.follow_prepared(r, command, &message, text.clone(), composes);
            if secret.rows || secret.parameters {
                self.covered.entry(r.session).or_default().request(r.offset);
            }
            if secret.parameters && has_values(command) {
                // Which of the bytes are a value is not known without the number of parameters: all of them go.
                return withhold(WithheldReason::Authentication);
            }
        }
        if hides {
            self.covered.entry(r.session).or_default().request(r.offset);
            if redaction == Redaction::None {
                redaction = Redaction::Password;
            }
        }
        if self.protocol == Protocol::Postgres
            && let Some(body) = r.message.get(HEADER..)
        {
            if composes && tag == frontend::PARSE {
                self.covered.entry(r.session).or_default();
            }
            if let Some(covered) = self.covered.get_mut(&r.session) {
                covered.follow(r.offset, tag, body, hides, composes);
            }
        }
        if let Some(masker) = &self.masker
            && redaction != Redaction::Masked
        {
            match (self.protocol, tag) {
                (Protocol::Postgres, frontend::COPY_DATA) => return withhold(WithheldReason::Masking),
                // It says why the client gave up, often with a row.
                (Protocol::Postgres, frontend::COPY_FAIL) => {
                    let end = message.len().saturating_sub(1);
                    masker.value(message.to_mut().get_mut(HEADER..end).unwrap_or_default());
                    redaction = Redaction::Masked;
                }
                (Protocol::Postgres, frontend::BIND) => {
                    mask_bind(masker, message.to_mut());
                    redaction = Redaction::Masked;
                }
                (Protocol::Postgres, frontend::FUNCTION_CALL) => {
                    mask_function_call(masker, message.to_mut());
                    redaction = Redaction::Masked;
                }
                // Parameters of MySQL's binary protocol cannot be told apart without the statement: all of them go.
                (Protocol::Mysql, _) if command.is_some_and(has_values) => {
                    return withhold(WithheldReason::Masking);
                }
                // Where the values of an unknown command are is not known.
                (Protocol::Mysql, _) if command.is_some_and(|byte| !command::is_from_client(byte)) => {
                    return withhold(WithheldReason::Masking);
                }
                _ => {
                    if let Some(text) = text {
                        if self.protocol == Protocol::Mysql && text.start > HEADER {
                            // No attributes in one set, and blanks before the text in their place.
                            message.to_mut()[HEADER..HEADER + 2].copy_from_slice(&[0, 1]);
                            message.to_mut()[HEADER + 2..text.start].fill(b' ');
                        }
                        masker.sql(&mut message.to_mut()[text], self.protocol);
                        redaction = Redaction::Masked;
                    }
                }
            }
        }
        match message {
            Cow::Borrowed(_) => None,
            Cow::Owned(message) => Some(Record::Frontend(Frontend {
                session: r.session,
                time_ns: r.time_ns,
                offset: r.offset,
                wire_len: r.wire_len,
                redaction,
                message: Cow::Owned(if self.protocol == Protocol::Mysql {
                    in_packets(message)
                } else {
                    message
                }),
            })),
        }
    }

    /// What a command of MySQL's protocol has to do with a password besides its text.
    fn follow_prepared(
        &mut self,
        r: &Frontend<'_>,
        command: u8,
        message: &[u8],
        text: Option<std::ops::Range<usize>>,
        composes: bool,
    ) -> Secret {
        let rows = self.tells_rows && text.is_some_and(|text| passwords::shows_passwords(&message[text]));
        let secret = Secret { parameters: composes && command == COM_STMT_PREPARE, rows };
        if secret == Secret::default() && !self.prepared.contains_key(&r.session) {
            return secret;
        }
        let prepared = self.prepared.entry(r.session).or_default();
        let secret = prepared.follow(r.offset, &message[packet::HEADER_BYTES..], secret);
        if prepared.is_empty() {
            self.prepared.remove(&r.session);
        }
        secret
    }

    /// Overwrites all values that a Bind gives to a statement which puts SQL with a password together; `true` if it did.
    fn composed(&self, r: &Frontend<'_>, message: &mut Cow<'_, [u8]>) -> bool {
        let Some(covered) = self.covered.get(&r.session) else { return false };
        let (Some(&frontend::BIND), Some(body)) = (r.message.first(), r.message.get(HEADER..)) else {
            return false;
        };
        if !bind_names(body).is_some_and(|bind| covered.composes(bind.statement)) {
            return false;
        }
        let values = self.values_of(&r.message);
        for (value, _) in values.iter().cloned() {
            message.to_mut()[value].fill(passwords::COVER);
        }
        !values.is_empty()
    }

    /// What a message of MySQL's protocol is: only who knows what came before it can tell.
    fn part(&mut self, r: &Frontend<'_>) -> Part {
        let sending = self.sending.get(&r.session).copied();
        let sent = match (r.message.get(3), sending, r.message.get(packet::HEADER_BYTES)) {
            (Some(0), None | Some(Sending::Login), Some(&byte)) => {
                if byte == COM_CHANGE_USER {
                    self.sending.insert(r.session, Sending::Login);
                } else if sending.is_some() {
                    self.sending.remove(&r.session);
                }
                return Part::Command(byte);
            }
            (_, Some(sending), _) => sending,
            (_, None, _) => Sending::File,
        };
        if sent == Sending::File && r.message.len() <= packet::HEADER_BYTES {
            // An empty packet ends it.
            self.sending.remove(&r.session);
        } else {
            self.sending.insert(r.session, sent);
        }
        Part::Sent(sent)
    }

    /// Where a message has SQL in it; one of MySQL's in several packets is without the headers of all but the first.
    ///
    /// # Errors
    /// The attributes before the text are malformed.
    fn text_of(&self, message: &[u8]) -> Result<Option<std::ops::Range<usize>>, underpass_mysql::Error> {
        if self.protocol == Protocol::Mysql {
            return Ok(match message.get(packet::HEADER_BYTES) {
                Some(&COM_QUERY) => {
                    let text = command::query_text(&message[packet::HEADER_BYTES..])?;
                    Some(message.len() - text.len()..message.len())
                }
                Some(&COM_STMT_PREPARE) => Some(HEADER..message.len()),
                _ => None,
            });
        }
        Ok(Self::text_of_postgres(message))
    }

    fn text_of_postgres(message: &[u8]) -> Option<std::ops::Range<usize>> {
        let to_nul = |from: usize| {
            let len = memchr::memchr(0, &message[from..]).unwrap_or(message.len() - from);
            Some(from..from + len)
        };
        match *message.first()? {
            frontend::QUERY if message.len() > HEADER => to_nul(HEADER),
            frontend::PARSE => {
                let name = memchr::memchr(0, message.get(HEADER..)?)?;
                to_nul(HEADER + name + 1)
            }
            _ => None,
        }
    }

    /// Where a Bind has values, and their formats: connection strings and SQL text come as parameters, too.
    fn values_of(&self, message: &[u8]) -> Vec<(std::ops::Range<usize>, u16)> {
        if self.protocol != Protocol::Postgres || message.first() != Some(&frontend::BIND) {
            return Vec::new();
        }
        let Some(body) = message.get(HEADER..) else { return Vec::new() };
        let Ok(bind) = Bind::decode(body) else { return Vec::new() };
        let formats: Vec<u16> = bind.arguments.param_formats.collect();
        let ranges = ranges(body, bind.arguments.params).into_iter().enumerate();
        ranges.filter_map(|(at, range)| Some((range?, format_of(&formats, at)))).collect()
    }

    fn backend(&self, r: &Backend<'_>) -> Option<Record<'static>> {
        let tag = r.message.first().copied().unwrap_or(0);
        let login = self.protocol == Protocol::Postgres
            && matches!(tag, backend::AUTHENTICATION | backend::BACKEND_KEY_DATA);
        let reason = match (login, &self.masker) {
            (true, _) => WithheldReason::Authentication,
            // What a server sends is data or quotes it; what is left of it are the summaries.
            (false, Some(_)) => WithheldReason::Masking,
            (false, None) => return self.covered_error(r),
        };
        Some(Record::Withheld(Withheld {
            session: r.session,
            time_ns: r.time_ns,
            direction: Direction::Backend,
            offset: r.offset,
            len: r.message.len() as u64,
            reason,
        }))
    }

    /// An error about a statement with a password may quote it, and its rows may be made of it.
    fn covered_error(&self, r: &Backend<'_>) -> Option<Record<'static>> {
        let tag = r.message.first().copied().unwrap_or(0);
        let quotes = match self.protocol {
            Protocol::Postgres => {
                matches!(
                    tag,
                    backend::ERROR_RESPONSE
                        | backend::NOTICE_RESPONSE
                        | backend::DATA_ROW
                        | backend::COPY_DATA
                )
            }
            // What a packet is, only what came before it tells: any may be a row.
            Protocol::Mysql => true,
        };
        (quotes && self.covered.get(&r.session).is_some_and(Covered::is_asked)).then_some(Record::Withheld(
            Withheld {
                session: r.session,
                time_ns: r.time_ns,
                direction: Direction::Backend,
                offset: r.offset,
                len: r.message.len() as u64,
                reason: WithheldReason::Authentication,
            },
        ))
    }

    fn prepared_fill(&mut self, r: &PreparedFill<'_>) -> Option<Record<'static>> {
        let mut query = r.query.to_vec();
        let told = passwords::cover(&mut query, self.protocol);
        let mut redaction = r.redaction;
        if told.covered {
            redaction = Redaction::Password;
        }
        match self.protocol {
            Protocol::Postgres => {
                if told.composes {
                    self.covered.entry(r.session).or_default().composing(&r.name);
                }
                if told.covered {
                    self.covered.entry(r.session).or_default().statement(&r.name);
                }
            }
            Protocol::Mysql => {
                let rows = self.tells_rows && passwords::shows_passwords(&r.query);
                let secret = Secret { parameters: told.composes, rows };
                let number = std::str::from_utf8(&r.name).ok().and_then(|name| name.parse().ok());
                if let (Some(number), true) = (number, secret != Secret::default()) {
                    self.prepared.entry(r.session).or_default().filled(number, secret);
                }
            }
        }
        if let Some(masker) = &self.masker
            && r.redaction != Redaction::Masked
        {
            masker.sql(&mut query, self.protocol);
            redaction = Redaction::Masked;
        }
        (redaction != r.redaction).then(|| {
            Record::PreparedFill(PreparedFill {
                query: Cow::Owned(query),
                redaction,
                ..r.clone().into_owned()
            })
        })
    }

    fn response(&mut self, r: &Response<'_>) -> Option<Record<'static>> {
        if let Some(prepared) = self.prepared.get_mut(&r.session) {
            prepared.answered(r.request, &r.outcome);
        }
        if matches!(r.outcome, Outcome::Error(_) | Outcome::Unknown)
            && let Some(covered) = self.covered.get_mut(&r.session)
        {
            covered.failed(r.request);
        }
        let Outcome::Error(error) = &r.outcome else { return None };
        let covered = || self.covered.get(&r.session).is_some_and(|covered| covered.answers(r.request));
        if error.message.is_empty() || !(self.masker.is_some() || covered()) {
            return None;
        }
        let mut r = r.clone().into_owned();
        if let Outcome::Error(error) = &mut r.outcome {
            error.message = Cow::Borrowed(b"");
        }
        Some(Record::Response(r))
    }
}

/// Bytes of a message's type and length word; in MySQL's protocol, of the packet's header and the command.
const HEADER: usize = 5;

/// The format of a value that is text; the others are binary.
const TEXT_FORMAT: u16 = 0;

/// The format of a value by its number: one code is that of all, and without any all are text (manual, "Bind").
fn format_of(formats: &[u16], at: usize) -> u16 {
    match formats {
        [] => TEXT_FORMAT,
        [one] => *one,
        each => each.get(at).copied().unwrap_or(TEXT_FORMAT),
    }
}

/// Whether a command of MySQL's protocol has parameters of a prepared statement.
const fn has_values(command: u8) -> bool {
    matches!(command, COM_STMT_EXECUTE | COM_STMT_BULK_EXECUTE | COM_STMT_SEND_LONG_DATA)
}

/// Whether a message of MySQL's protocol is in several packets.
fn is_continued(message: &[u8]) -> bool {
    packet::Header::parse(message).is_some_and(packet::Header::is_continued)
}

/// A message of MySQL's protocol, given with its first header only, in its packets.
fn in_packets(message: Vec<u8>) -> Vec<u8> {
    if !is_continued(&message) {
        return message;
    }
    let mut packets = Vec::with_capacity(message.len() + message.len() / packet::PAYLOAD_BYTES_MAX * 4);
    packet::put_message(&mut packets, message[3], &message[packet::HEADER_BYTES..]);
    packets
}

fn session_start(r: &SessionStart<'_>) -> Option<Record<'static>> {
    let secret = |name: &[u8]| name.len() >= 8 && name[name.len() - 8..].eq_ignore_ascii_case(b"password");
    r.parameters.iter().any(|(name, _)| secret(name)).then(|| {
        let mut r = r.clone().into_owned();
        for (name, value) in &mut r.parameters {
            if secret(name) {
                *value = Cow::Owned(vec![passwords::COVER; value.len()]);
            }
        }
        Record::SessionStart(r)
    })
}

/// Masks the parameters where they stand. A Bind that is malformed loses all behind its names.
fn mask_bind(masker: &Masker, message: &mut [u8]) {
    let Some(body) = message.get(HEADER..) else { return };
    let Ok(bind) = Bind::decode(body) else {
        let rest = bind_names(body).map_or(HEADER, |names| HEADER + names.rest);
        return message[rest..].fill(0);
    };
    let formats: Vec<u16> = bind.arguments.param_formats.collect();
    let ranges = ranges(body, bind.arguments.params);
    mask_values(masker, message, &formats, ranges);
}

fn mask_function_call(masker: &Masker, message: &mut [u8]) {
    let Some(body) = message.get(HEADER..) else { return };
    let Ok(call) = FunctionCall::decode(body) else { return message[HEADER..].fill(0) };
    let formats: Vec<u16> = call.arg_formats.collect();
    let ranges = ranges(body, call.args);
    mask_values(masker, message, &formats, ranges);
}

type Ranges = Vec<Option<std::ops::Range<usize>>>;

/// Where in the message the values are.
fn ranges<'a>(body: &'a [u8], values: impl Iterator<Item = Option<&'a [u8]>>) -> Ranges {
    let start = |value: &[u8]| HEADER + (value.as_ptr() as usize - body.as_ptr() as usize);
    values.map(|value| value.map(|value| start(value)..start(value) + value.len())).collect()
}

fn mask_values(masker: &Masker, message: &mut [u8], formats: &[u16], ranges: Ranges) {
    for (at, range) in ranges.into_iter().enumerate() {
        let Some(range) = range else { continue };
        match format_of(formats, at) {
            TEXT_FORMAT => masker.value(&mut message[range]),
            _ => masker.binary(&mut message[range]),
        }
    }
}
