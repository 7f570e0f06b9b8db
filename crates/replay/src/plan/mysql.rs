// SPDX-License-Identifier: Apache-2.0
//! Sessions of MariaDB and MySQL. A unit is a command that is answered, with the COM_STMT_CLOSEs before it and its COM_STMT_SEND_LONG_DATAs, which are
//! not, and the local file that it made the server ask for.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::ops::Range;

use foldhash::{HashMap, HashSet};
use underpass_mysql::capability::{self, Capabilities};
use underpass_mysql::command::{
    self, COM_INIT_DB, COM_QUERY, COM_QUIT, COM_REGISTER_SLAVE, COM_RESET_CONNECTION, COM_STMT_BULK_EXECUTE,
    COM_STMT_CLOSE, COM_STMT_EXECUTE, COM_STMT_FETCH, COM_STMT_PREPARE, COM_STMT_RESET, LAST_PREPARED,
};
use underpass_mysql::packet::{self, HEADER_BYTES};
use underpass_sql::Class;
use underpass_trace::statements::{CAPABILITIES, parameters_of};
use underpass_trace::{Frontend, PreparedFill, Protocol, Redaction, SessionStart, strip_literals};

use super::script::Script;
use super::statements::{begin, execute, left_out};
use super::{Barrier, Messages, Options, Reason, Says, Step};
use crate::Error;
use crate::classify::{Block, Classifier, statements};

/// COM_REFRESH, COM_SHUTDOWN, COM_PROCESS_KILL, COM_DEBUG.
const ADMINISTRATION: [u8; 4] = [0x07, 0x08, 0x0c, 0x0d];

/// COM_CREATE_DB, COM_DROP_DB.
const DATABASES: [u8; 2] = [0x05, 0x06];
/// Where the parameters of a COM_STMT_EXECUTE begin: behind the command, the statement's number, flags and the number of iterations.
const PARAMETERS_AT: usize = 10;
/// Flag of COM_STMT_EXECUTE: the number of parameters is told.
const PARAMETER_COUNT_AVAILABLE: u8 = 8;
/// Flag of COM_STMT_BULK_EXECUTE, in two bytes: the types of parameters are told.
const SENDS_TYPES: u8 = 128;
/// Largest length that is one byte.
const SHORT_LEN_MAX: u8 = 250;
/// Where the types of the most parameters end, with room for names: what of an execution is kept.
const TYPES_END_MAX: usize = 256 << 10;
/// Memory for executions of a session's statements that are not known, bytes: those in the moment until a capture is told a text. More of them are
/// left out, whatever their statements turn out to be.
const UNRESOLVED_BYTES_MAX: usize = 512 << 10;
/// From here on the numbers of units that there are not: they stand for statements that were prepared before recording.
const BEFORE: usize = 1 << 31;

/// A prepared statement.
#[derive(Debug)]
struct Prepared {
    /// In the classifier.
    statement: u32,
    /// How many parameters it has, when the server has told.
    parameters: Option<u16>,
    types: Option<Types>,
    /// A password in its text was overwritten.
    redacted: bool,
    /// The unit that executed it last: a COM_STMT_FETCH is about that.
    run: Option<usize>,
}

/// An execution of a statement that nobody had prepared.
#[derive(Debug)]
struct Unresolved {
    at: usize,
    kind: u8,
    /// Its beginning, with the types of its parameters if they are in it.
    payload: Vec<u8>,
}

impl Unresolved {
    /// What it takes.
    fn bytes(&self) -> usize {
        size_of::<Self>() + self.payload.len()
    }
}

/// A unit whose statement came to be known.
#[derive(Debug)]
pub(super) struct Resolved {
    pub(super) at: usize,
    pub(super) statement: u32,
}

/// The types of parameters, which a client tells once, and the server keeps.
#[derive(Clone, Debug)]
struct Types {
    /// The unit that told them.
    unit: usize,
    /// As they were told; `None` where another command has them in another form.
    bytes: Option<Vec<u8>>,
}

/// A COM_STMT_CLOSE.
#[derive(Debug)]
struct Close {
    unit: u32,
    /// The unit that prepared the statement.
    prepared: u32,
    step: Step,
}

/// Parts of parameters.
#[derive(Debug)]
struct LongData {
    /// Their statement.
    number: u32,
    /// The unit that prepared it, if that is known.
    prepared: Option<usize>,
    step: Step,
    /// Some of them may be missing.
    torn: bool,
}

/// What is known of a session's commands so far.
#[derive(Debug, Default)]
pub(super) struct Commands {
    /// Prepared statements by the unit that prepared them; those of before recording are numbered from `BEFORE` on.
    prepared: HashMap<usize, Prepared>,
    /// The numbers of those at capture.
    filled: Vec<u32>,
    /// Executions that may come to be known, by statement, and how much memory they take, bytes.
    unresolved: HashMap<u32, Vec<Unresolved>>,
    unresolved_bytes: usize,
    /// Statements of which some were too much.
    torn: HashSet<u32>,
    /// The same unit by the statement's number at capture.
    numbers: HashMap<u32, usize>,
    /// The unit of the last COM_STMT_PREPARE.
    last: Option<usize>,
    /// COM_STMT_PREPAREs whose number has not been told: a client may send several before the first answer.
    unanswered: HashSet<usize>,
    /// COM_STMT_PREPAREs of before the wanted time, or of a transaction that began before it.
    early: Vec<usize>,
    /// Units that cannot be played without an earlier one: that which prepared their statement, or told the types of its parameters.
    needs: Vec<(u32, u32)>,
    /// Offsets of what was withheld, and why: executions, long data, which has no answer, and COM_CHANGE_USER.
    pub withheld: Vec<(u64, Reason)>,
    /// Query attributes were agreed on: they are among the parameters.
    attributes: bool,
    /// COM_STMT_CLOSEs that wait for the next command with an answer: the unit that prepared their statement, and they.
    held: Vec<(Option<usize>, Step)>,
    /// COM_STMT_CLOSEs of statements that the server has, and with which unit they are sent.
    closes: Vec<Close>,
    /// Long data that wait for the execution of their statement.
    long_data: Vec<LongData>,
    /// A COM_CHANGE_USER succeeded: as whom the session goes on cannot be had.
    pub changed_user: bool,
    /// Replication began.
    is_replica: bool,
}

impl Commands {
    /// Of a session that begins.
    pub(super) fn of(start: &SessionStart<'_>) -> Self {
        // The last: the client may have sent an attribute of that name, and what the recorder adds comes behind.
        let told = start.parameters.iter().rev().find(|(name, _)| **name == *CAPABILITIES);
        let flags = told.and_then(|(_, value)| std::str::from_utf8(value).ok()?.parse().ok());
        let attributes = Capabilities(flags.unwrap_or(0)).has(capability::QUERY_ATTRIBUTES);
        Self { attributes, ..Self::default() }
    }

    /// Why what was answered was withheld, if it is a command that was.
    pub(super) fn why_withheld(&mut self, request: u64) -> Option<Reason> {
        let why = self.withheld.iter().find(|(offset, _)| *offset == request).map(|(_, reason)| *reason);
        // The server answers in order.
        self.withheld.retain(|&(offset, _)| offset > request);
        why
    }

    /// The server told who the user is: what was withheld for its password was a COM_CHANGE_USER, which is what is left out behind it.
    pub(super) fn change_user(&mut self) {
        self.changed_user = true;
        self.withheld.retain(|(_, reason)| *reason != Reason::Password);
    }

    /// Takes out the long data of a statement.
    fn forget_long_data(&mut self, number: u32) -> Vec<LongData> {
        let prepared = self.unit_of(number);
        let is_its = |data: &mut LongData| {
            data.number == number || data.prepared.is_some() && data.prepared == prepared
        };
        self.long_data.extract_if(.., is_its).collect()
    }

    /// Keeps an execution for when its statement is known.
    fn keep_unresolved(&mut self, at: usize, number: u32, kind: u8, payload: &[u8]) {
        let payload = payload[..payload.len().min(TYPES_END_MAX)].to_vec();
        let one = Unresolved { at, kind, payload };
        if self.unresolved_bytes + one.bytes() > UNRESOLVED_BYTES_MAX || self.torn.contains(&number) {
            self.torn.insert(number);
        } else {
            self.unresolved_bytes += one.bytes();
            self.unresolved.entry(number).or_default().push(one);
        }
    }

    /// Those of a statement, and whether there were more.
    fn take_unresolved(&mut self, number: u32) -> (Vec<Unresolved>, bool) {
        let taken = self.unresolved.remove(&number).unwrap_or_default();
        self.unresolved_bytes -= taken.iter().map(Unresolved::bytes).sum::<usize>();
        (taken, self.torn.remove(&number))
    }

    /// The unit that prepared the statement of this number.
    fn unit_of(&self, number: u32) -> Option<usize> {
        match number {
            LAST_PREPARED => self.last,
            number => self.numbers.get(&number).copied(),
        }
    }
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
        let gap = self.follow(message.offset, message.wire_len);
        if gap {
            self.commands.long_data.iter_mut().for_each(|data| data.torn = true);
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
            self.hold(kind, &payload, &message.message, messages)?;
            return Ok(());
        }
        self.begin(message, when);
        self.session.commands.push(kind);
        let at = self.session.units.len() - 1;
        self.take_held(at, kind, &payload);
        let other = begin_that_reads(kind, &payload, classifier, options)
            .or_else(|| to_database_there(kind, &payload, options));
        let is_other = other.is_some();
        let payload = other.map_or(payload, Cow::Owned);
        let told = self.with_types(at, kind, &payload);
        match &told {
            Cow::Borrowed(_) if !is_other => self.append_command(&message.message, messages)?,
            payload => {
                let mut message = Vec::new();
                packet::put_message(&mut message, 0, payload);
                self.append_command(&message, messages)?;
            }
        }
        let unit = &mut self.session.units[at];
        if kind == COM_STMT_PREPARE && when != Ordering::Greater && unit.omitted == Some(Reason::Filter) {
            // It is no part of a transaction, and what is wanted may execute it.
            unit.omitted = None;
            self.commands.early.push(at);
        }
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
                execute(unit, &mut self.open, index, classifier);
                if let Some(reason) = left_out(classifier.get(index), options) {
                    unit.omitted.get_or_insert(reason);
                }
            }
            COM_STMT_PREPARE => {
                let index = classifier.classify(&payload[1..]);
                self.open.parses.push(index);
                self.commands.last = Some(at);
                self.commands.unanswered.insert(at);
                let prepared =
                    Prepared { statement: index, parameters: None, types: None, redacted: false, run: None };
                self.commands.prepared.insert(at, prepared);
            }
            COM_RESET_CONNECTION => {
                self.commands.prepared.clear();
                self.commands.numbers.clear();
                self.commands.unanswered.clear();
                self.commands.last = None;
                self.commands.unresolved.clear();
                self.commands.unresolved_bytes = 0;
                self.commands.torn.clear();
            }
            kind if DATABASES.contains(&kind) => {
                unit.may_write = true;
                if options.read_only {
                    unit.omitted.get_or_insert(Reason::ReadOnly);
                }
            }
            _ => {
                let Some(number) = command::statement_number(&payload) else { return Ok(()) };
                if self
                    .commands
                    .unit_of(number)
                    .is_some_and(|unit| self.commands.prepared.contains_key(&unit))
                {
                    self.execute_prepared(at, number, classifier, options);
                } else {
                    unit.may_write = true;
                    unit.omitted.get_or_insert(Reason::UnknownStatement);
                    self.commands.keep_unresolved(at, number, kind, &payload);
                }
            }
        }
        Ok(())
    }

    /// The answer to a COM_STMT_PREPARE said its number, and how many parameters it has.
    pub(super) fn prepared_as(&mut self, unit: usize, number: u32, parameters: u16) {
        if self.commands.unanswered.remove(&unit) {
            self.commands.numbers.insert(number, unit);
            if let Some(prepared) = self.commands.prepared.get_mut(&unit) {
                prepared.parameters = Some(parameters);
            }
        }
        self.session.prepares.insert(unit, number);
    }

    /// A unit executes a statement that is known.
    fn execute_prepared(&mut self, at: usize, number: u32, classifier: &Classifier, options: &Options) {
        let prepared = self.commands.unit_of(number).and_then(|unit| self.commands.prepared.get(&unit));
        let Some(prepared) = prepared else { return };
        let unit = &mut self.session.units[at];
        execute(unit, &mut self.open, prepared.statement, classifier);
        if let Some(reason) = left_out(classifier.get(prepared.statement), options) {
            unit.omitted.get_or_insert(reason);
        }
        if prepared.redacted {
            unit.omitted.get_or_insert(Reason::Password);
        }
    }

    /// The text of a statement that was prepared before recording. A capture learns it while it is executed, and not for the first time. Returns the units
    /// that have executed it, the last one last.
    pub(super) fn fill_mysql(
        &mut self,
        fill: &PreparedFill<'_>,
        classifier: &mut Classifier,
        options: &Options,
    ) -> Vec<Resolved> {
        let number = std::str::from_utf8(&fill.name).ok().and_then(|name| name.parse().ok());
        let is_new = |number: &u32| *number != LAST_PREPARED && self.commands.unit_of(*number).is_none();
        let Some(number) = number.filter(is_new) else {
            return Vec::new();
        };
        let asked = [&[COM_STMT_PREPARE], &fill.query[..]].concat();
        let asked = begin_that_reads(COM_STMT_PREPARE, &asked, classifier, options)
            .or_else(|| to_database_there(COM_STMT_PREPARE, &asked, options))
            .unwrap_or(asked);
        let text = &asked[1..];
        let redacted = fill.redaction == Redaction::Password;
        if self.session.statements.get(&number).is_some_and(|known| known != text) {
            // Another one had this number, and it is that which will be prepared.
            return Vec::new();
        }
        if !redacted {
            self.session.statements.entry(number).or_insert_with(|| text.to_vec());
        }
        let commands = &mut self.commands;
        let key = BEFORE + commands.filled.len();
        commands.filled.push(number);
        commands.numbers.insert(number, key);
        let statement = classifier.classify(text);
        let parameters = Some(parameters_of(&fill.query));
        let prepared = Prepared { statement, parameters, types: None, redacted, run: None };
        commands.prepared.insert(key, prepared);
        let (unresolved, torn) = commands.take_unresolved(number);
        let mut resolved = Vec::new();
        for Unresolved { at, kind, payload } in unresolved {
            let unit = &mut self.session.units[at];
            unit.may_write = false;
            unit.omitted = unit.omitted.filter(|reason| *reason != Reason::UnknownStatement);
            self.execute_prepared(at, number, classifier, options);
            if let Cow::Owned(_) = self.with_types(at, kind, &payload) {
                // They would have to be in its message, which is made already.
                self.session.units[at].omitted.get_or_insert(Reason::UnknownTypes);
            }
            resolved.push(Resolved { at, statement });
        }
        if torn && let Some(prepared) = self.commands.prepared.get_mut(&key) {
            // One of the others may have told other types.
            prepared.types = None;
        }
        resolved
    }

    /// Notes what a command about a prepared statement needs. If it is an execution whose types were told by one that is left out, and the server
    /// therefore does not know, its payload with them.
    fn with_types<'m>(&mut self, at: usize, kind: u8, payload: &'m [u8]) -> Cow<'m, [u8]> {
        let commands = &mut self.commands;
        let number = command::statement_number(payload);
        let Some(unit) = number.and_then(|number| commands.unit_of(number)) else {
            return Cow::Borrowed(payload);
        };
        let Some(prepared) = commands.prepared.get_mut(&unit) else { return Cow::Borrowed(payload) };
        let omitted = |unit: usize| self.session.units[unit].omitted.is_some();
        let mut needed = unit;
        let mut with = Cow::Borrowed(payload);
        let mark = match kind {
            COM_STMT_EXECUTE => {
                prepared.parameters.and_then(|count| mark_of_types(payload, count, commands.attributes))
            }
            _ => None,
        };
        match (mark, &prepared.types) {
            (Some((mark, count)), _) if payload[mark] != 0 => {
                let bytes = types(payload, mark + 1, count, commands.attributes);
                let bytes = bytes.map(|range| payload[range].to_vec());
                prepared.types = Some(Types { unit: at, bytes });
            }
            (Some((mark, _)), Some(Types { unit: teller, bytes: Some(bytes) }))
                if omitted(*teller) && !omitted(at) =>
            {
                with = Cow::Owned([&payload[..mark], &[1], bytes, &payload[mark + 1..]].concat());
                prepared.types = Some(Types { unit: at, bytes: Some(bytes.clone()) });
            }
            (Some(_), Some(types)) => needed = types.unit,
            (None, Some(types)) if kind == COM_STMT_BULK_EXECUTE && !bulk_tells_types(payload) => {
                needed = types.unit;
            }
            (Some(_), None) if unit >= BEFORE => {
                self.session.units[at].omitted.get_or_insert(Reason::UnknownTypes);
            }
            (None, None) if unit >= BEFORE && kind == COM_STMT_BULK_EXECUTE && !bulk_tells_types(payload) => {
                self.session.units[at].omitted.get_or_insert(Reason::UnknownTypes);
            }
            (None, _) if kind == COM_STMT_BULK_EXECUTE => {
                prepared.types = Some(Types { unit: at, bytes: None });
            }
            _ => {}
        }
        match (kind, prepared.run) {
            (COM_STMT_EXECUTE | COM_STMT_BULK_EXECUTE, _) => prepared.run = Some(at),
            (COM_STMT_FETCH, Some(run)) => commands.needs.push((at as u32, run as u32)),
            // Its cursor is of before recording.
            (COM_STMT_FETCH, None) if unit >= BEFORE => {
                self.session.units[at].omitted.get_or_insert(Reason::UnknownStatement);
            }
            _ => {}
        }
        if needed != unit && unit >= BEFORE {
            commands.needs.push((at as u32, unit as u32));
        }
        commands.needs.push((at as u32, needed as u32));
        with
    }

    /// Leaves out commands without those that they need, and COM_STMT_PREPAREs of before the wanted time that nobody needs. What these had
    /// closed is closed by later ones.
    pub(super) fn settle_commands(&mut self) {
        let needs = std::mem::take(&mut self.commands.needs);
        let units = &mut self.session.units;
        let mut needed = HashSet::default();
        for (unit, earlier) in needs {
            if let Some(reason) = units.get(earlier as usize).and_then(|earlier| earlier.omitted) {
                units[unit as usize].omitted.get_or_insert(reason);
            }
            if units[unit as usize].omitted.is_none() {
                needed.insert(earlier as usize);
            }
        }
        for at in std::mem::take(&mut self.commands.early) {
            if !needed.contains(&at) {
                units[at].omitted.get_or_insert(Reason::Filter);
            }
        }
        // Nor is a statement of before recording prepared for nobody.
        let filled = self.commands.filled.iter().enumerate();
        let used: HashSet<u32> =
            filled.filter(|(at, _)| needed.contains(&(BEFORE + at))).map(|(_, number)| *number).collect();
        self.session.statements.retain(|number, _| used.contains(number));
        let is_played = |unit: usize| unit >= BEFORE || units[unit].omitted.is_none();
        let mut next = 0;
        for close in std::mem::take(&mut self.commands.closes) {
            let at = close.unit as usize;
            if is_played(at) || !is_played(close.prepared as usize) {
                continue;
            }
            // They are in the order of their units.
            next = (next.max(at)..units.len()).find(|&unit| is_played(unit)).unwrap_or(units.len());
            if next < units.len() {
                self.session.closes.entry(next).or_default().push(close.step);
            }
        }
    }

    /// Keeps a command that is not answered for the one that it goes with.
    fn hold(
        &mut self,
        kind: u8,
        payload: &[u8],
        message: &[u8],
        messages: &mut Messages,
    ) -> Result<(), Error> {
        let Some(number) = command::statement_number(payload) else { return Ok(()) };
        let step = self.add_command(message, Says::Part, messages)?;
        let commands = &mut self.commands;
        if kind == COM_STMT_CLOSE {
            commands.forget_long_data(number);
            commands.take_unresolved(number);
            let prepared = commands.numbers.remove(&number);
            prepared.map(|unit| commands.prepared.remove(&unit));
            commands.held.push((prepared, step));
        } else {
            let prepared = commands.unit_of(number);
            commands.long_data.push(LongData { number, prepared, step, torn: false });
        }
        Ok(())
    }

    /// Appends to the last unit, which has nothing yet, what was kept for its command.
    fn take_held(&mut self, at: usize, kind: u8, payload: &[u8]) {
        for (prepared, step) in std::mem::take(&mut self.commands.held) {
            if let Some(prepared) = prepared {
                let step = step.clone();
                self.commands.closes.push(Close { unit: at as u32, prepared: prepared as u32, step });
            }
            self.add_step(step);
        }
        let number = command::statement_number(payload);
        match (kind, number) {
            (COM_RESET_CONNECTION, _) => self.commands.long_data.clear(),
            // The server forgets them.
            (COM_STMT_RESET, Some(number)) => drop(self.commands.forget_long_data(number)),
            (COM_STMT_EXECUTE | COM_STMT_BULK_EXECUTE, Some(number)) => {
                for data in self.commands.forget_long_data(number) {
                    if data.torn {
                        self.session.units[at].omitted.get_or_insert(Reason::Lost);
                    }
                    self.add_step(data.step);
                }
            }
            _ => {}
        }
    }

    /// Adds a command to the messages.
    fn add_command(&mut self, message: &[u8], says: Says, messages: &mut Messages) -> Result<Step, Error> {
        let bytes = messages.add(message)?;
        // The number of a statement is in the first packet, behind the command.
        let payload = message.get(HEADER_BYTES..).unwrap_or_default();
        if let Some(number) = command::statement_number(payload).filter(|number| *number != LAST_PREPARED) {
            self.session.statement_refs.push((bytes.start + HEADER_BYTES as u64 + 1, number));
        }
        Ok(Step::new(bytes, Barrier::None, says, 0))
    }

    /// Appends the command that is answered to the last unit.
    fn append_command(&mut self, message: &[u8], messages: &mut Messages) -> Result<(), Error> {
        let step = self.add_command(message, Says::Asks, messages)?;
        self.add_step(step);
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

/// In the place of a command that begins a transaction which may write, one with the other modes of its own.
fn begin_that_reads(
    kind: u8,
    payload: &[u8],
    classifier: &mut Classifier,
    options: &Options,
) -> Option<Vec<u8>> {
    let text = match kind {
        _ if !options.read_only => return None,
        COM_QUERY => command::query_text(payload).ok()?,
        COM_STMT_PREPARE => &payload[1..],
        _ => return None,
    };
    let index = classifier.classify(text);
    let statement = classifier.get(index);
    let lifts = statement.summary.class == Class::LiftsReadOnly && statement.block == Some(Block::Begins);
    let words = statements(&statement.label, Protocol::Mysql).next().filter(|_| lifts)?;
    Some([&payload[..payload.len() - text.len()], begin(&words).as_bytes()].concat())
}

/// In the place of a command that goes to a database which has another name on the target, one that goes there.
fn to_database_there(kind: u8, payload: &[u8], options: &Options) -> Option<Vec<u8>> {
    let renamed = |name: &[u8]| options.databases.get(std::str::from_utf8(name).ok()?);
    let text = match kind {
        _ if options.databases.is_empty() => return None,
        COM_INIT_DB => return Some([&[COM_INIT_DB], renamed(&payload[1..])?.as_bytes()].concat()),
        COM_QUERY => command::query_text(payload).ok()?,
        COM_STMT_PREPARE => &payload[1..],
        _ => return None,
    };
    // Without comments and quotes.
    let words = strip_literals(text, Protocol::Mysql);
    let (verb, name) = words.split_first_chunk::<4>()?;
    let name = verb.eq_ignore_ascii_case(b"use ").then_some(name)?;
    let name = renamed(name.strip_suffix(b";").unwrap_or(name).trim_ascii())?;
    let text_there = format!("use `{}`", name.replace('`', "``"));
    Some([&payload[..payload.len() - text.len()], text_there.as_bytes()].concat())
}

/// Where a COM_STMT_EXECUTE says whether types of parameters follow, and how many those are; `None` without parameters.
fn mark_of_types(payload: &[u8], count: u16, attributes: bool) -> Option<(usize, usize)> {
    let (mut at, mut count) = (PARAMETERS_AT, usize::from(count));
    if attributes && (count > 0 || payload.get(5)? & PARAMETER_COUNT_AVAILABLE != 0) {
        count = (*payload.get(at).filter(|&&told| told <= SHORT_LEN_MAX)?).into();
        at += 1;
    }
    let mark = at + count.div_ceil(8);
    (count > 0 && mark < payload.len()).then_some((mark, count))
}

/// Where the types are: two bytes each, and with query attributes a name.
fn types(payload: &[u8], start: usize, count: usize, attributes: bool) -> Option<Range<usize>> {
    let mut end = start;
    for _ in 0..count {
        end += 2;
        if attributes {
            let len = *payload.get(end).filter(|&&len| len <= SHORT_LEN_MAX)?;
            end += 1 + usize::from(len);
        }
    }
    (end <= payload.len()).then_some(start..end)
}

/// Whether a COM_STMT_BULK_EXECUTE tells the types of its parameters.
fn bulk_tells_types(payload: &[u8]) -> bool {
    payload.get(5).is_some_and(|flags| flags & SENDS_TYPES != 0)
}
