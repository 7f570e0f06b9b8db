// SPDX-License-Identifier: Apache-2.0
//! Requests of MySQL's protocol: prepared statements have numbers, which the server gives, and parameters whose types a client
//! tells once.

use std::sync::Arc;

use underpass_mysql::capability::Capabilities;
use underpass_mysql::command::{
    self, COM_CHANGE_USER, COM_QUERY, COM_RESET_CONNECTION, COM_STMT_BULK_EXECUTE, COM_STMT_CLOSE,
    COM_STMT_EXECUTE, COM_STMT_FETCH, COM_STMT_PREPARE, COM_STMT_RESET, COM_STMT_SEND_LONG_DATA, Execute,
    LAST_PREPARED, LongData,
};
use underpass_mysql::packet;
use underpass_mysql::value::Parameter;

use super::{CAPABILITIES, Parameters, Ran, What as Any};
use crate::Protocol;
use crate::model::*;
use crate::safety::lexer::{Kind, Lexer, Token};
use crate::safety::passwords::is_run;

/// Where the types of the most parameters end, with room for names: what of an execution is kept.
const TYPES_END_MAX: usize = 256 << 10;

/// Statements without text that are remembered: a client may execute numbers that no statement has.
const EARLY_MAX: usize = 1024;
/// Memory for the beginnings of a session's executions of such statements, bytes: those in the moment until a capture is told a text.
const EARLY_BYTES_MAX: usize = 512 << 10;
/// How deep comments that are run may be in each other.
const DEPTH_MAX: u32 = 4;

/// Which sessions of a trace are sending a local file. The first packet of a file has a number other than 0, which no command has;
/// but numbers wrap at 256, so in a file of many packets 0 comes again, and only the answer tells where the file ends.
#[derive(Debug, Default)]
pub struct LocalFiles(foldhash::HashSet<SessionId>);

impl LocalFiles {
    /// Takes the next record of a trace of MySQL's protocol. Returns whether it is a part of a file.
    pub fn push(&mut self, record: &Record<'_>) -> bool {
        match record {
            Record::Frontend(r) => {
                let is_numbered = packet::Header::parse(&r.message).is_some_and(|header| header.sequence != 0);
                if is_numbered {
                    self.0.insert(r.session);
                }
                return is_numbered || self.0.contains(&r.session);
            }
            Record::Response(Response { session, .. })
            | Record::Ready(Ready { session, .. })
            | Record::SessionStart(SessionStart { session, .. })
            | Record::SessionEnd(SessionEnd { session, .. })
            // Recording goes on at a command.
            | Record::Loss(Loss { session: Some(session), .. }) => {
                self.0.remove(session);
            }
            // Of sessions that nobody knows: a file that goes on tells so by its next number.
            Record::Loss(_) => self.0.clear(),
            _ => {}
        }
        false
    }
}

/// A request that is not a text.
#[derive(Debug)]
pub(super) enum What {
    Prepare {
        text: Arc<[u8]>,
        redaction: Redaction,
    },
    /// The payload of a COM_STMT_EXECUTE, COM_STMT_BULK_EXECUTE or COM_STMT_FETCH.
    Run(Vec<u8>),
    Close(u32),
}

impl What {
    /// What a COM_STMT_PREPARE asks for.
    pub(super) fn prepares(&self) -> Option<Ran> {
        let Self::Prepare { text, redaction } = self else { return None };
        Some(Ran { text: Some(Arc::clone(text)), redaction: *redaction, ..Ran::default() })
    }
}

/// The prepared statements of a session.
#[derive(Debug, Default)]
pub(super) struct Statements {
    capabilities: Capabilities,
    prepared: foldhash::HashMap<u32, Prepared>,
    last: u32,
    /// What is known of statements whose text is not, yet.
    early: foldhash::HashMap<u32, Early>,
    /// Bytes of their executions.
    early_bytes: usize,
}

/// A statement whose text is not known.
#[derive(Debug, Default)]
struct Early {
    long: Long,
    /// The beginnings of its executions: a client may tell the types of parameters there, and never again.
    runs: Vec<Vec<u8>>,
    /// Some of them were too much.
    torn: bool,
}

/// Parameters that were sent in parts, by their place.
type Long = foldhash::HashMap<u16, Vec<u8>>;

#[derive(Debug)]
struct Prepared {
    text: Arc<[u8]>,
    redaction: Redaction,
    parameters: u16,
    /// Of the last execution.
    types: Vec<u16>,
    /// Parameters that were sent before the execution.
    long: Long,
}

impl Statements {
    /// Of a session that begins.
    pub(super) fn of(start: &SessionStart<'_>) -> Self {
        // The last: the client may have sent an attribute of that name, and what the recorder adds comes behind.
        let flags = start.parameters.iter().rev().find(|(name, _)| **name == *CAPABILITIES);
        let flags = flags.and_then(|(_, value)| std::str::from_utf8(value).ok()?.parse().ok());
        Self { capabilities: Capabilities(flags.unwrap_or(0)), ..Self::default() }
    }

    /// What a message asks for that is not a part of a local file ([`LocalFiles`]). Commands that are no statements ask for nothing.
    pub(super) fn what(&mut self, r: &Frontend<'_>) -> Option<Any> {
        let payload = packet::payload(&r.message);
        let redaction = r.redaction;
        Some(match *payload.first()? {
            COM_QUERY => {
                let text = command::query_text(&payload).unwrap_or(&payload[1..]);
                Any::Query { text: text.into(), redaction }
            }
            COM_STMT_PREPARE => Any::Mysql(What::Prepare { text: payload[1..].into(), redaction }),
            COM_STMT_EXECUTE | COM_STMT_BULK_EXECUTE | COM_STMT_FETCH => {
                Any::Mysql(What::Run(payload.into_owned()))
            }
            COM_STMT_CLOSE => Any::Mysql(What::Close(command::statement_number(&payload)?)),
            COM_STMT_SEND_LONG_DATA => {
                let part = LongData::decode(&payload).ok()?;
                let long = match self.prepared.get_mut(&part.statement) {
                    Some(prepared) => &mut prepared.long,
                    None if part.statement == LAST_PREPARED => return None,
                    None => &mut self.early(part.statement)?.long,
                };
                long.entry(part.parameter).or_default().extend_from_slice(part.data);
                return None;
            }
            COM_STMT_RESET => {
                let number = command::statement_number(&payload)?;
                if let Some(early) = self.early.get_mut(&number) {
                    early.long.clear();
                }
                self.prepared.get_mut(&number)?.long.clear();
                return None;
            }
            COM_RESET_CONNECTION | COM_CHANGE_USER => {
                self.prepared.clear();
                self.early.clear();
                self.early_bytes = 0;
                return None;
            }
            _ => return None,
        })
    }

    /// A request was answered. Returns what was run, if anything was.
    pub(super) fn end(&mut self, what: What, outcome: Option<&Outcome<'_>>) -> Option<Ran> {
        match what {
            What::Prepare { text, redaction } => {
                let told = match outcome {
                    Some(Outcome::Complete { tag }) => prepared_tag(tag),
                    _ => None,
                };
                // One that failed has no number, but an execution of the last statement may have been sent behind it: of this text, not of
                // the one before.
                let (number, parameters) = told.unwrap_or((LAST_PREPARED, 0));
                let (types, long) = Default::default();
                self.prepared.insert(number, Prepared { text, redaction, parameters, types, long });
                self.last = number;
                None
            }
            What::Close(number) => {
                self.prepared.remove(&number);
                self.take_early(number);
                None
            }
            What::Run(payload) => {
                let number = match command::statement_number(&payload)? {
                    LAST_PREPARED => self.last,
                    number => number,
                };
                Some(self.run(number, &payload))
            }
        }
    }

    /// The text of a statement came to be known, which was prepared before the recording.
    pub(super) fn fill(&mut self, r: &PreparedFill<'_>) {
        let Some(number) = std::str::from_utf8(&r.name).ok().and_then(|name| name.parse().ok()) else {
            return;
        };
        let Early { long, runs, torn } = self.take_early(number);
        let parameters = parameters_of(&r.query);
        let mut types = Vec::new();
        for run in runs {
            // Its values may not be there whole, and are of no interest: the types come before them.
            let _ = Execute::decode(&run, parameters, self.capabilities, &mut types, |_| false);
        }
        if torn {
            types.clear();
        }
        let (text, redaction) = (r.query[..].into(), r.redaction);
        self.prepared.entry(number).or_insert(Prepared { text, redaction, parameters, types, long });
    }

    /// A statement without text is executed, for all that is known.
    fn keep_early(&mut self, number: u32, payload: &[u8]) {
        let has_room = self.early_bytes + payload.len() <= EARLY_BYTES_MAX;
        let Some(early) = self.early(number) else { return };
        early.long.clear();
        if early.torn || !has_room {
            early.torn = true;
        } else {
            early.runs.push(payload.to_vec());
            self.early_bytes += payload.len();
        }
    }

    fn take_early(&mut self, number: u32) -> Early {
        let early = self.early.remove(&number).unwrap_or_default();
        self.early_bytes -= early.runs.iter().map(Vec::len).sum::<usize>();
        early
    }

    /// What is known of a statement without text, unless there are too many.
    fn early(&mut self, number: u32) -> Option<&mut Early> {
        if self.early.len() >= EARLY_MAX && !self.early.contains_key(&number) {
            return None;
        }
        Some(self.early.entry(number).or_default())
    }

    fn run(&mut self, number: u32, payload: &[u8]) -> Ran {
        let name = number.to_string().into_bytes().into();
        let max_rows = match payload {
            [COM_STMT_FETCH, _, _, _, _, a, b, c, d, ..] => i32::from_le_bytes([*a, *b, *c, *d]).max(0),
            _ => 0,
        };
        let Some(prepared) = self.prepared.get_mut(&number) else {
            if payload.first() == Some(&COM_STMT_EXECUTE) {
                self.keep_early(number, &payload[..payload.len().min(TYPES_END_MAX)]);
            }
            let (parameters, redaction) = (Arc::default(), Redaction::None);
            return Ran { text: None, name, parameters, max_rows, redaction };
        };
        let mut parameters = Parameters::default();
        let Prepared { parameters: count, types, long, .. } = prepared;
        let is_long = |at: usize| u16::try_from(at).is_ok_and(|at| long.contains_key(&at));
        if let Ok(execute) = Execute::decode(payload, *count, self.capabilities, types, is_long) {
            // Attributes come behind the parameters, and are none.
            let values = execute.parameters.iter().take((*count).into()).enumerate();
            parameters.values = values
                .map(|(at, value)| match value {
                    Parameter::Long => long.get(&(at as u16)).cloned(),
                    value => value.text(),
                })
                .collect();
        }
        if payload.first() != Some(&COM_STMT_FETCH) {
            long.clear();
        }
        Ran {
            text: Some(Arc::clone(&prepared.text)),
            name,
            parameters: Arc::new(parameters),
            max_rows,
            redaction: prepared.redaction,
        }
    }
}

/// How many parameters a text has. Those in `/*! .. */` and `/*M! .. */` count, as if no version in them were too high for the server.
pub fn parameters_of(text: &[u8]) -> u16 {
    parameters_within(text, 0)
}

fn parameters_within(text: &[u8], depth: u32) -> u16 {
    let of_token = |token: Token| match token.kind {
        Kind::Symbol(b'?') => 1,
        Kind::Comment if depth < DEPTH_MAX && is_run(&text[token.inner.clone()], Protocol::Mysql) => {
            parameters_within(&text[token.inner], depth + 1)
        }
        _ => 0,
    };
    Lexer::new(text, Protocol::Mysql).map(of_token).fold(0, u16::saturating_add)
}

/// Number and parameters in the tag `PREPARE 1 2`.
pub(crate) fn prepared_tag(tag: &[u8]) -> Option<(u32, u16)> {
    let mut words = std::str::from_utf8(tag).ok()?.strip_prefix("PREPARE ")?.split(' ');
    Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
}
