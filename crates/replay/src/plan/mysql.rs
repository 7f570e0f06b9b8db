// SPDX-License-Identifier: Apache-2.0
//! Sessions of MariaDB and MySQL. A unit is a command that is answered, with those before it that are not (COM_STMT_SEND_LONG_DATA,
//! COM_STMT_CLOSE), and the local file that it made the server ask for.

use std::cmp::Ordering;

use foldhash::HashMap;
use underpass_mysql::command::{
    self, COM_QUERY, COM_QUIT, COM_REGISTER_SLAVE, COM_RESET_CONNECTION, COM_STMT_CLOSE, COM_STMT_PREPARE,
    LAST_PREPARED,
};
use underpass_mysql::packet::{self, HEADER_BYTES};
use underpass_trace::{Frontend, Redaction};

use super::build::{Script, execute};
use super::{Barrier, Messages, Options, Reason, Says, Step};
use crate::Error;
use crate::classify::Classifier;

/// COM_REFRESH, COM_SHUTDOWN, COM_PROCESS_KILL, COM_DEBUG.
const ADMINISTRATION: [u8; 4] = [0x07, 0x08, 0x0c, 0x0d];

/// What is known of a session's commands so far.
#[derive(Debug, Default)]
pub(super) struct Commands {
    /// Prepared statements by their number at capture.
    statements: HashMap<u32, u32>,
    /// The statement of the last COM_STMT_PREPARE.
    last: Option<u32>,
    /// Statements of the COM_STMT_PREPAREs whose number has not been told, by unit: a client may send several before the first answer.
    unanswered: HashMap<usize, u32>,
    /// Commands without an answer that wait for the next one with an answer.
    held: Vec<Vec<u8>>,
    /// COM_CHANGE_USER was seen: as whom the session goes on cannot be had.
    pub changed_user: bool,
    /// Replication began.
    is_replica: bool,
}

impl Script {
    /// A command, or a part of a local file.
    pub(super) fn command(
        &mut self,
        message: &Frontend<'_>,
        is_file: bool,
        classifier: &mut Classifier,
        options: &Options,
        when: Ordering,
        messages: &mut Messages,
    ) -> Result<(), Error> {
        let gap = self.next_offset.is_some_and(|next| next != message.offset);
        self.next_offset = Some(message.offset + message.wire_len);
        if gap {
            self.commands.held.clear();
        }
        if is_file {
            if !gap && let Some(unit) = self.session.units.last_mut() {
                unit.ends_at(message.offset + message.wire_len);
                self.append_file(&message.message, messages)?;
            }
            return Ok(());
        }
        let payload = packet::payload(&message.message);
        let Some(&kind) = payload.first() else { return Ok(()) };
        if kind == COM_QUIT {
            return Ok(());
        }
        if !command::is_answered(kind) {
            if kind == COM_STMT_CLOSE
                && let Some(number) = command::statement_number(&payload)
            {
                self.commands.statements.remove(&number);
            }
            self.commands.held.push(message.message.to_vec());
            return Ok(());
        }
        self.begin(message, when);
        self.session.commands.push(kind);
        for held in std::mem::take(&mut self.commands.held) {
            self.append_command(&held, false, messages)?;
        }
        self.append_command(&message.message, true, messages)?;
        let at = self.session.units.len() - 1;
        let unit = &mut self.session.units[at];
        unit.ends_at(message.offset + message.wire_len);
        self.open.simple = true;
        self.open.complete = true;
        if message.redaction == Redaction::Password {
            unit.omitted.get_or_insert(Reason::Password);
        }
        if self.commands.changed_user {
            unit.omitted.get_or_insert(Reason::ChangedUser);
        }
        self.commands.is_replica |= command::is_replication(kind) || kind == COM_REGISTER_SLAVE;
        if self.commands.is_replica {
            unit.omitted.get_or_insert(Reason::Replication);
        }
        if ADMINISTRATION.contains(&kind) {
            unit.omitted.get_or_insert(Reason::Administration);
        }
        match kind {
            COM_QUERY => {
                let text = command::query_text(&payload).unwrap_or(&payload[1..]);
                let index = classifier.classify(text);
                if execute(unit, &mut self.open, index, classifier, options) {
                    unit.omitted.get_or_insert(Reason::ReadOnly);
                }
                let first = text.trim_ascii_start().split(|byte| !byte.is_ascii_alphabetic()).next();
                if first.is_some_and(|word| {
                    [&b"kill"[..], b"shutdown"].iter().any(|one| word.eq_ignore_ascii_case(one))
                }) {
                    unit.omitted.get_or_insert(Reason::Administration);
                }
            }
            COM_STMT_PREPARE => {
                let index = classifier.classify(&payload[1..]);
                self.open.parses.push(index);
                self.commands.last = Some(index);
                self.commands.unanswered.insert(at, index);
            }
            COM_RESET_CONNECTION => {
                self.commands.statements.clear();
                self.commands.unanswered.clear();
                self.commands.last = None;
            }
            _ => {
                let Some(number) = command::statement_number(&payload) else { return Ok(()) };
                let known = match number {
                    LAST_PREPARED => self.commands.last,
                    number => self.commands.statements.get(&number).copied(),
                };
                match known {
                    Some(index) => {
                        if execute(unit, &mut self.open, index, classifier, options) {
                            unit.omitted.get_or_insert(Reason::ReadOnly);
                        }
                    }
                    None => {
                        unit.may_write = true;
                        unit.omitted.get_or_insert(Reason::UnknownStatement);
                    }
                }
            }
        }
        Ok(())
    }

    /// The answer to a COM_STMT_PREPARE said its number.
    pub(super) fn prepared_as(&mut self, unit: usize, number: u32) {
        if let Some(index) = self.commands.unanswered.remove(&unit) {
            self.commands.statements.insert(number, index);
        }
        self.session.prepares.insert(unit, number);
    }

    /// Appends a command to the last unit; whether it is the one that is answered.
    fn append_command(&mut self, message: &[u8], asks: bool, messages: &mut Messages) -> Result<(), Error> {
        let bytes = messages.add(message)?;
        // The number of a statement is in the first packet, behind the command.
        let payload = message.get(HEADER_BYTES..).unwrap_or_default();
        if let Some(number) = command::statement_number(payload).filter(|number| *number != LAST_PREPARED) {
            self.session.statement_refs.push((bytes.start + HEADER_BYTES as u64 + 1, number));
        }
        let says = if asks { Says::Asks } else { Says::Part };
        self.add_step(Step::new(bytes, Barrier::None, says, 0));
        Ok(())
    }

    /// Appends a part of a local file to the last unit.
    fn append_file(&mut self, message: &[u8], messages: &mut Messages) -> Result<(), Error> {
        let goes_on = self.session.steps.last().is_some_and(|step| step.says == Says::CopyData);
        let barrier = if goes_on { Barrier::None } else { Barrier::CopyIn };
        let bytes = messages.add(message)?;
        self.add_step(Step::new(bytes, barrier, Says::CopyData, 0));
        Ok(())
    }
}

/// The number and the parameters in the tag `PREPARE 1 2`.
pub(super) fn prepare_tag(tag: &[u8]) -> Option<(u32, u16)> {
    let mut words = std::str::from_utf8(tag).ok()?.strip_prefix("PREPARE ")?.split(' ');
    Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
}
