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
use crate::model::*;

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
}

#[derive(Debug)]
struct Prepared {
    text: Arc<[u8]>,
    redaction: Redaction,
    parameters: u16,
    /// Of the last execution.
    types: Vec<u16>,
    /// Parameters that were sent before the execution.
    long: foldhash::HashMap<u16, Vec<u8>>,
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
                let prepared = self.prepared.get_mut(&part.statement)?;
                prepared.long.entry(part.parameter).or_default().extend_from_slice(part.data);
                return None;
            }
            COM_STMT_RESET => {
                let prepared = self.prepared.get_mut(&command::statement_number(&payload)?)?;
                prepared.long.clear();
                return None;
            }
            COM_RESET_CONNECTION | COM_CHANGE_USER => {
                self.prepared.clear();
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

    fn run(&mut self, number: u32, payload: &[u8]) -> Ran {
        let name = number.to_string().into_bytes().into();
        let max_rows = match payload {
            [COM_STMT_FETCH, _, _, _, _, a, b, c, d, ..] => i32::from_le_bytes([*a, *b, *c, *d]).max(0),
            _ => 0,
        };
        let Some(prepared) = self.prepared.get_mut(&number) else {
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

/// Number and parameters in the tag `PREPARE 1 2`.
pub(crate) fn prepared_tag(tag: &[u8]) -> Option<(u32, u16)> {
    let mut words = std::str::from_utf8(tag).ok()?.strip_prefix("PREPARE ")?.split(' ');
    Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
}
