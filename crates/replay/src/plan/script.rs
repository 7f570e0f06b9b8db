// SPDX-License-Identifier: Apache-2.0
//! One session while its records come in: its messages become units.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use foldhash::{HashMap, HashSet};
use underpass_mysql::command::COM_STMT_PREPARE;
use underpass_trace::{
    Bytes, Frontend, PreparedFill, Protocol, Redaction, Response, SessionStart, Source, Withheld,
    WithheldReason,
};
use underpass_wire::backend::TransactionStatus;
use underpass_wire::frontend::{self, Message, build};
use underpass_wire::tag::frontend as tag;

use super::mysql::Commands;
use super::statements::{self, Instead, execute, give_up, give_up_all, is_wanted, left_out, prepared_by_sql};
use super::{
    Barrier, End, Expected, Group, Messages, Options, Reason, Rows, Says, Session, Step, Unit, type_oids,
};
use crate::Error;
use crate::classify::{Block, Classifier};
use crate::lists::Lists;
use crate::rowhash::RowHash;

/// A step of so many bytes grows no longer: it is in memory while it is sent. A single message may be longer.
const STEP_BYTES_MAX: u32 = 1 << 20;
/// Units of more statements are named by the first ones.
const GROUP_STATEMENTS_MAX: usize = 4;

/// Places where the trace misses bytes of clients: nobody knows which units they were.
#[derive(Clone, Copy, Default)]
pub(super) struct Holes {
    pub(super) count: u64,
    pub(super) bytes: u64,
}

#[derive(Default)]
pub(super) struct Groups {
    pub(super) list: Vec<Group>,
    by_key: HashMap<String, u32>,
}

/// One session while its records come in.
pub(super) struct Script {
    pub(super) session: Session,
    /// Texts of prepared statements and portals, by name.
    statements: HashMap<Vec<u8>, u32>,
    portals: HashMap<Vec<u8>, u32>,
    /// Names of statements whose password was overwritten: what they would do is not what they did.
    redacted: HashSet<Vec<u8>>,
    /// Names that were prepared before recording. They may become known at any later time.
    filled: HashSet<Vec<u8>>,
    /// Units that use a name nobody had prepared when it was used.
    unresolved: Vec<(usize, Vec<u8>)>,
    /// State of the last unit.
    pub(super) open: Open,
    /// Offset behind the last message.
    pub(super) next_offset: Option<u64>,
    pub(super) holes: Holes,
    /// Units before which something is missing.
    torn: Vec<usize>,
    /// Offset behind the last bytes that were lost.
    pub(super) lost_until: u64,
    /// Units before this index are answered.
    pub(super) answered: usize,
    /// Hashes of rows that no response has claimed yet, by offset.
    pub(super) rows: Vec<(u64, u64)>,
    row_hash: Option<RowHash>,
    /// Parse messages of named statements in units that are left out, or perhaps will be, as what is before the wanted time: what
    /// follows may use them.
    prepared: BTreeMap<Vec<u8>, (usize, Vec<u8>)>,
    /// It was joined, and has not been outside of a transaction since.
    pub(super) joining: bool,
    /// The last unit was left out for the time it came, and its transaction with it.
    cut_transaction: bool,
    /// What MySQL's protocol needs to know.
    pub(super) commands: Commands,
    /// How statements ended of units that the server is not yet ready after.
    pub(super) answers: BTreeMap<usize, Vec<Expected>>,
    /// Executes that were left out of a unit that is sent without them.
    pub(super) dropped: HashSet<u64>,
    /// Units whose client did not send the data that their COPY may have wanted.
    without_data: Vec<usize>,
    /// Queries in whose place a shorter text is sent: what that answers the trace does not know.
    pub(super) shortened: HashSet<u64>,
}

/// Where the last unit of a session stands.
#[derive(Default)]
pub(super) struct Open {
    /// It has all its messages, unless data of a COPY follows.
    pub(super) complete: bool,
    in_copy: bool,
    flushed: bool,
    /// Data of the COPY that follows belongs to a statement that was left out.
    pub(super) drop_copy: bool,
    /// How often the server will ask for data that the client has not ended yet.
    pub(super) copies: u32,
    /// Data of a COPY follows whose beginning is missing.
    stray_copy: bool,
    /// A Query executes it, also one behind a Parse without a Sync: no Sync follows the data of its COPY.
    pub(super) simple: bool,
    pub(super) parses: Vec<u32>,
    /// Statements that it executes.
    pub(super) executes: Vec<u32>,
    calls: bool,
    /// It does something that later units may need, or that nobody can tell.
    needed: bool,
}
impl Holes {
    pub(super) fn add(&mut self, bytes: u64) {
        self.count += 1;
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

impl Script {
    /// Of a session that begins.
    pub(super) fn new(start: &SessionStart<'_>, protocol: Protocol, rows: Rows) -> Self {
        let owned = |bytes: &Option<Bytes<'_>>| bytes.as_ref().map(|bytes| bytes.to_vec());
        let session = Session {
            id: start.session,
            start_ns: start.time_ns,
            login_ns: start.ready_ns.unwrap_or(start.time_ns),
            end_ns: None,
            end: None,
            midstream: start.midstream,
            is_imported: start.source == Source::Import,
            user: owned(&start.user),
            database: owned(&start.database),
            application_name: owned(&start.application_name),
            parameters: start
                .parameters
                .iter()
                .map(|(name, value)| (name.to_vec(), value.to_vec()))
                .collect(),
            prepared: Vec::new(),
            statements: BTreeMap::new(),
            units: Vec::new(),
            steps: Vec::new(),
            type_oids: Vec::new(),
            statement_refs: Vec::new(),
            prepares: BTreeMap::new(),
            closes: BTreeMap::new(),
            commands: Vec::new(),
            cancels: BTreeMap::new(),
            resets: BTreeSet::new(),
            after_ended: 0,
            ended: None,
        };
        Self {
            session,
            statements: HashMap::default(),
            portals: HashMap::default(),
            redacted: HashSet::default(),
            filled: HashSet::default(),
            unresolved: Vec::new(),
            open: Open { complete: true, ..Open::default() },
            next_offset: (!start.midstream).then_some(start.frontend_offset),
            holes: Holes::default(),
            torn: Vec::new(),
            lost_until: 0,
            answered: 0,
            rows: Vec::new(),
            row_hash: match rows {
                // Which messages of MySQL's protocol are rows only a look at the whole answer tells: they are compared between servers.
                _ if protocol == Protocol::Mysql => None,
                Rows::Count => None,
                Rows::Ordered => Some(RowHash::ordered()),
                Rows::Unordered => Some(RowHash::unordered()),
            },
            prepared: BTreeMap::new(),
            joining: start.midstream,
            cut_transaction: false,
            commands: Commands::of(start),
            answers: BTreeMap::new(),
            dropped: HashSet::default(),
            without_data: Vec::new(),
            shortened: HashSet::default(),
        }
    }

    /// The text of a statement that was prepared before recording.
    pub(super) fn fill(&mut self, fill: &PreparedFill<'_>, classifier: &mut Classifier, options: &Options) {
        let mut message = Vec::new();
        let text = statements::prepare(&fill.query, classifier, options);
        let text = text.as_deref().unwrap_or(&fill.query);
        build::parse(&mut message, &fill.name, text, fill.param_types.iter().copied());
        self.statements.insert(fill.name.to_vec(), classifier.classify(text));
        self.filled.insert(fill.name.to_vec());
        if fill.redaction == Redaction::Password {
            // A capture learns the text from the first use, so that one is before it.
            for (at, name) in &self.unresolved {
                if name[..] == *fill.name {
                    self.session.units[*at].omitted.get_or_insert(Reason::Password);
                }
            }
            self.redacted.insert(fill.name.to_vec());
        } else {
            self.session.prepared.push(message);
        }
    }

    /// The unit that a request belongs to: one of the last, whatever the pipeline's depth.
    pub(super) fn unit_of(&self, request: u64) -> Option<usize> {
        let units = &self.session.units;
        let after = units.partition_point(|unit| unit.offset <= request);
        let index = after.checked_sub(1)?;
        units[index].has(request).then_some(index)
    }

    /// The answers to a unit are complete.
    pub(super) fn keep_answers(&mut self, index: usize, expected: &mut Lists<Expected>) {
        let Some(mut answers) = self.answers.remove(&index) else { return };
        let unit = &mut self.session.units[index];
        // None, unless the server said so twice.
        answers.splice(0..0, expected.get(unit.expected).iter().cloned());
        unit.expected = expected.add(&answers);
    }

    pub(super) fn claim_rows(&mut self, response: &Response<'_>) -> Option<u64> {
        let mut hash = self.row_hash.clone()?;
        let within = |offset: u64| offset >= response.offset && offset < response.offset + response.len;
        let mut rows = 0;
        self.rows.retain(|&(offset, row)| {
            if within(offset) {
                hash.add(row);
                rows += 1;
            }
            // What is before it belongs to nobody any more.
            offset >= response.offset + response.len
        });
        (rows == response.rows).then(|| hash.value())
    }

    /// Gives up a unit whose end is missing, or the data that the server would wait for.
    pub(super) fn cut(&mut self, reason: Reason) {
        let Some(unit) = self.session.units.last_mut() else { return };
        // Where nothing is missing, the server answers without data when it refuses them.
        let awaits = self.open.copies > 0 && (reason == Reason::Lost || unit.ready_ns().is_none());
        if !self.open.complete || awaits {
            self.open.complete = true;
            self.open.copies = 0;
            unit.omitted.get_or_insert(reason);
        }
    }

    /// Follows the stream to what is here; whether something is missing before it.
    pub(super) fn follow(&mut self, offset: u64, len: u64) -> bool {
        let gap = self.next_offset.is_some_and(|next| next != offset);
        if gap {
            self.miss(offset);
            self.cut(Reason::Lost);
            self.torn.push(self.session.units.len());
        }
        self.next_offset = Some(offset + len);
        gap
    }

    /// What is up to this offset and has not come is missing.
    pub(super) fn miss(&mut self, until: u64) {
        // Where recording joined the session nothing is missing yet.
        let bytes = self.next_offset.map_or(0, |next| until.saturating_sub(next));
        if bytes > 0 {
            self.holes.add(bytes);
        }
    }

    /// A command was withheld, or a part of what a command sends.
    pub(super) fn withheld_command(&mut self, withheld: &Withheld, classifier: &Classifier) {
        let gap = self.follow(withheld.offset, withheld.len);
        match withheld.reason {
            // A COM_CHANGE_USER, or an execution whose parameters may be passwords: its answer tells.
            WithheldReason::Authentication => {
                self.commands.withheld.push((withheld.offset, Reason::Password));
            }
            WithheldReason::Masking => {
                let loads = self.open.executes.last().is_some_and(|&index| {
                    let label = classifier.get(index).label.as_bytes();
                    label.get(..5).is_some_and(|word| word.eq_ignore_ascii_case(b"load "))
                });
                match self.session.units.last_mut() {
                    // Its local file.
                    Some(unit) if loads && !gap && unit.ready_ns().is_none() => {
                        unit.omitted.get_or_insert(Reason::Masked);
                    }
                    _ => self.commands.withheld.push((withheld.offset, Reason::Masked)),
                }
            }
            _ => {}
        }
    }

    /// Data of a COPY was withheld.
    pub(super) fn masked_data(&mut self, withheld: &Withheld) {
        let gap = self.follow(withheld.offset, withheld.len);
        match self.session.units.last_mut() {
            Some(unit) if !gap && !self.open.stray_copy => {
                unit.omitted.get_or_insert(Reason::Masked);
            }
            _ => self.open.stray_copy = true,
        }
    }

    /// Notes a CancelRequest for the unit that was executed then; `false` if there was none that is played.
    pub(super) fn cancel(&mut self, time_ns: u64) -> bool {
        let units = &self.session.units;
        // The server answers in order: before an answer everything is over, also what has lost its own.
        let over = |unit: &Unit| unit.ready_ns().is_some_and(|ready_ns| ready_ns < time_ns);
        let from = units.iter().rposition(over).map_or(0, |last| last + 1);
        let asked = units.partition_point(|unit| unit.sent_ns <= time_ns).max(from);
        let asked = &units[from..asked];
        // One that has lost its answer was over, as a rule, when the next was sent.
        let answered = asked.iter().position(|unit| unit.ready_ns().is_some());
        let executed = answered.or(asked.len().checked_sub(1));
        let Some(at) = executed.filter(|&at| asked[at].omitted.is_none()) else { return false };
        self.session.cancels.entry(from + at).or_insert(time_ns - asked[at].sent_ns);
        true
    }

    /// The last unit is over.
    fn close(&mut self) {
        if self.open.copies > 0
            && let Some(at) = self.session.units.len().checked_sub(1)
        {
            self.without_data.push(at);
        }
        self.open.copies = 0;
    }

    pub(super) fn begin(&mut self, message: &Frontend<'_>, when: Ordering) {
        self.close();
        self.open = Open::default();
        let omitted = match (self.session.units.last(), when) {
            (_, Ordering::Less | Ordering::Greater) => Some(Reason::Filter),
            // A transaction whose beginning is not played is not played at all.
            (Some(last), _) if in_transaction(last.status) && self.cut_transaction => Some(Reason::Filter),
            _ => None,
        };
        self.cut_transaction = omitted.is_some();
        let at = self.session.steps.len();
        let mut unit = Unit::new(message.offset, message.time_ns, self.answered as u32, at);
        unit.omitted = omitted;
        self.session.units.push(unit);
    }

    pub(super) fn frontend(
        &mut self,
        message: &Frontend<'_>,
        classifier: &mut Classifier,
        options: &Options,
        when: Ordering,
        messages: &mut Messages,
    ) -> Result<(), Error> {
        let bytes = &*message.message;
        let (Some(&kind), Some(body)) = (bytes.first(), bytes.get(5..)) else { return Ok(()) };
        let gap = self.follow(message.offset, message.wire_len);
        // Logins are not in the script: they are done anew.
        if matches!(kind, tag::TERMINATE | tag::PASSWORD) {
            return Ok(());
        }
        let copy_data = matches!(kind, tag::COPY_DATA | tag::COPY_DONE | tag::COPY_FAIL);
        if self.open.complete {
            if !copy_data {
                self.begin(message, when);
            } else if gap || self.open.stray_copy || self.session.units.is_empty() {
                self.open.stray_copy = true;
                return Ok(());
            } else {
                // A Sync that came before the data was ignored by the server (manual, "COPY Operations").
                self.open.complete = false;
            }
        }
        let at = self.session.units.len() - 1;
        let unit = &mut self.session.units[at];
        unit.ends_at(message.offset + message.wire_len);
        if message.redaction == Redaction::Password {
            unit.omitted.get_or_insert(Reason::Password);
        }
        let mut keep = !(copy_data && self.open.drop_copy);
        let mut instead = None;
        match Message::decode(kind, body) {
            Ok(Message::Query(query)) => {
                self.open.simple = true;
                instead = statements::query(unit, &mut self.open, query.query, classifier, options);
                if instead.as_ref().is_some_and(|instead| instead.is_shorter) {
                    self.shortened.insert(message.offset);
                }
                if let Some(name) = prepared_by_sql(query.query) {
                    self.filled.insert(name);
                }
                if self.cut_transaction || self.joining {
                    give_up(&mut self.prepared, query.query);
                }
            }
            Ok(Message::Parse(parse)) => {
                let text = statements::prepare(parse.query, classifier, options);
                let index = classifier.classify(text.as_deref().unwrap_or(parse.query));
                if let Some(text) = text {
                    let mut message = Vec::new();
                    build::parse(&mut message, parse.name, &text, parse.param_types);
                    instead = Some(Instead { message, is_shorter: false });
                }
                self.statements.insert(parse.name.to_vec(), index);
                self.open.parses.push(index);
                if message.redaction == Redaction::Password {
                    self.redacted.insert(parse.name.to_vec());
                    self.prepared.remove(parse.name);
                } else {
                    self.redacted.remove(parse.name);
                }
                let sent = instead.as_ref().map_or(bytes, |instead| &instead.message);
                let outlives = when != Ordering::Greater && (self.cut_transaction || self.joining);
                if outlives && !parse.name.is_empty() && !self.redacted.contains(parse.name) {
                    self.prepared.insert(parse.name.to_vec(), (at, sent.to_vec()));
                }
            }
            Ok(Message::Bind(bind)) => {
                if self.redacted.contains(bind.statement) {
                    unit.omitted.get_or_insert(Reason::Password);
                }
                match self.statements.get(bind.statement) {
                    Some(&index) => {
                        self.portals.insert(bind.portal.to_vec(), index);
                    }
                    None => {
                        self.portals.remove(bind.portal);
                        self.unresolved.push((at, bind.statement.to_vec()));
                    }
                }
            }
            Ok(Message::Execute(portal)) => match self.portals.get(portal.portal) {
                Some(&index) => {
                    let statement = classifier.get(index);
                    let reason = left_out(statement, options);
                    if self.cut_transaction || self.joining {
                        give_up_all(&mut self.prepared, statement.sample.as_bytes());
                    }
                    if statement.copies_in > 0 {
                        self.open.drop_copy = reason.is_some();
                    }
                    match reason {
                        Some(reason) => {
                            keep = false;
                            unit.left_out.get_or_insert(reason);
                            self.dropped.insert(message.offset);
                        }
                        None => {
                            execute(unit, &mut self.open, index, classifier);
                            self.open.copies += statement.copies_in;
                        }
                    }
                }
                // A cursor that SQL declared, or a statement whose text is not known.
                None => {
                    unit.may_write = true;
                    self.open.needed = true;
                }
            },
            Ok(Message::Close(close)) if close.target == frontend::Target::Statement => {
                self.open.needed = true;
                self.statements.remove(close.name);
                self.redacted.remove(close.name);
                if self.cut_transaction || self.joining {
                    self.prepared.remove(close.name);
                }
            }
            Ok(Message::FunctionCall(_)) => {
                // What it does, nobody can tell from a number.
                unit.may_write = true;
                self.open.calls = true;
                if options.read_only {
                    unit.omitted.get_or_insert(Reason::ReadOnly);
                }
            }
            Ok(_) => {}
            Err(_) => {
                unit.omitted.get_or_insert(Reason::Protocol);
            }
        }
        if keep {
            let bytes = instead.as_ref().map_or(bytes, |instead| &instead.message);
            self.append(kind, bytes, copy_data, messages)?;
        }
        match kind {
            tag::COPY_DONE => self.open.copies = self.open.copies.saturating_sub(1),
            // What follows in the Query is not executed.
            tag::COPY_FAIL => self.open.copies = 0,
            _ => {}
        }
        self.open.complete = match kind {
            tag::QUERY | tag::SYNC | tag::FUNCTION_CALL => true,
            tag::COPY_DONE | tag::COPY_FAIL => self.open.simple,
            _ => false,
        };
        Ok(())
    }

    /// Adds a message to the last unit.
    fn append(
        &mut self,
        kind: u8,
        bytes: &[u8],
        copy_data: bool,
        messages: &mut Messages,
    ) -> Result<(), Error> {
        let Self { session, open, .. } = self;
        let barrier = match copy_data {
            true if open.in_copy => Barrier::None,
            true => Barrier::CopyIn,
            false if open.flushed => Barrier::Answers,
            false => Barrier::None,
        };
        open.in_copy = kind == tag::COPY_DATA;
        open.flushed = kind == tag::FLUSH;
        let answers =
            u16::from(matches!(kind, tag::PARSE | tag::BIND | tag::DESCRIBE | tag::EXECUTE | tag::CLOSE));
        let says = match kind {
            _ if copy_data => Says::CopyData,
            tag::QUERY | tag::SYNC | tag::FUNCTION_CALL => Says::Asks,
            _ => Says::Part,
        };
        let place = messages.add(bytes)?;
        if kind == tag::PARSE {
            let types = type_oids(bytes).map(|(at, oid)| (place.start + at as u64, oid));
            session.type_oids.extend(types);
        }
        self.add_step(Step::new(place, barrier, says, answers));
        Ok(())
    }

    /// Adds messages to the last unit; to its last step if they can be sent with that.
    pub(super) fn add_step(&mut self, step: Step) {
        let Session { units, steps, .. } = &mut self.session;
        let Some(unit) = units.last_mut() else { return };
        let first = unit.steps().is_empty();
        match steps.last_mut() {
            Some(last)
                if !first
                    && step.barrier == Barrier::None
                    && (step.says == Says::CopyData) == (last.says == Says::CopyData)
                    && step.start == last.bytes().end
                    && last.len < STEP_BYTES_MAX
                    && last.answers < u16::MAX =>
            {
                last.len += step.len;
                last.answers += step.answers;
                if step.says == Says::Asks {
                    last.says = Says::Asks;
                }
            }
            _ => {
                steps.push(step);
                unit.steps.end = steps.len() as u32;
            }
        }
    }

    /// The last unit is complete. It is left out if the filter of fingerprints has left nothing of it that anybody needs.
    pub(super) fn end_unit(&mut self, classifier: &Classifier, options: &Options) {
        let Session { units, resets, .. } = &mut self.session;
        let at = units.len().saturating_sub(1);
        let Some(unit) = units.last_mut() else { return };
        let open = &self.open;
        if open.executes.iter().any(|&index| classifier.get(index).resets_user) {
            resets.insert(at);
        }
        let is_kept = open.needed || open.calls || !open.executes.is_empty();
        let is_parse_wanted = |&index: &u32| is_wanted(classifier.get(index), options);
        if unit.left_out == Some(Reason::Filter) && !is_kept && !open.parses.iter().any(is_parse_wanted) {
            unit.omitted.get_or_insert(Reason::Filter);
        }
    }

    /// Says what a unit, whose statements are in `open`, is reported by.
    pub(super) fn name_group(
        &mut self,
        at: usize,
        groups: &mut Groups,
        classifier: &Classifier,
        executes: &mut Lists<u32>,
    ) {
        let Some(unit) = self.session.units.get_mut(at) else { return };
        unit.executes = executes.add(&self.open.executes);
        let (prefix, list) = match (&self.open.executes[..], &self.open.parses[..]) {
            ([], []) if self.open.calls => ("function call", &[][..]),
            ([], []) => ("no statement", &[][..]),
            ([], parses) => ("parse ", parses),
            (executes, _) => ("", executes),
        };
        let shown = &list[..list.len().min(GROUP_STATEMENTS_MAX)];
        let join = |text: fn(&crate::classify::Statement) -> &str, by: &str| {
            let parts: Vec<&str> = shown.iter().map(|&index| text(classifier.get(index))).collect();
            let more = if list.len() > shown.len() { format!("{by}...") } else { String::new() };
            format!("{prefix}{}{more}", parts.join(by))
        };
        let key = join(|statement| &statement.fingerprint, "+");
        unit.group = *groups.by_key.entry(key).or_insert_with_key(|key| {
            groups.list.push(Group { key: key.clone(), label: join(|statement| &statement.label, "; ") });
            (groups.list.len() - 1) as u32
        });
    }

    /// What can be said only at the end.
    pub(super) fn settle(&mut self, expected: &mut Lists<Expected>) {
        while let Some((&index, _)) = self.answers.first_key_value() {
            self.keep_answers(index, expected);
        }
        self.close();
        let is_imported = self.session.is_imported;
        let units = &mut self.session.units;
        for &at in &self.without_data {
            // Where the server refused the COPY it wanted none. A log has no data, and does not tell whether they were what failed.
            if is_imported || took_data(expected.get(units[at].expected)) {
                units[at].omitted.get_or_insert(Reason::NoCopyData);
            }
        }
        for (at, name) in &self.unresolved {
            // A session that was seen from its beginning can have prepared it in ways that leave no Parse.
            if self.session.midstream && !self.filled.contains(name) {
                units[*at].omitted.get_or_insert(Reason::UnknownStatement);
            }
        }
        // After a unit whose answer was not seen nobody knows how many were outstanding. Then the next waits for it.
        let mut strict = 0;
        for (index, unit) in units.iter_mut().enumerate() {
            unit.after = unit.after.max(strict).min(index as u32);
            if unit.ready_ns().is_none() {
                strict = index as u32 + 1;
            }
        }
    }

    /// Leaves out transactions of which the beginning or the end is not in the trace. No record says that there was one: the first units
    /// behind a hole, or behind the moment when recording joined the session, tell whether they began in one.
    ///
    /// Of a transaction whose end is missing nobody knows whether it was committed. It is left out rather than ended by guess: both ways it would
    /// come out as if it had not been, or as it should not.
    pub(super) fn leave_out_torn(
        &mut self,
        expected: &Lists<Expected>,
        executes: &Lists<u32>,
        classifier: &Classifier,
    ) {
        let units = &self.session.units;
        let idle = |unit: &Unit| unit.status == Some(TransactionStatus::Idle);
        let mut torn = Vec::new();
        let joined = self.session.midstream.then_some((0, Reason::MidstreamTransaction));
        for (from, reason) in joined.into_iter().chain(self.torn.iter().map(|&at| (at, Reason::Lost))) {
            let told = units.iter().enumerate().skip(from).find_map(|(at, unit)| {
                began_within(unit, expected, executes, classifier).map(|within| (at, within))
            });
            let Some((at, within)) = told else { continue };
            let before = &units[..from];
            let was_within = before
                .iter()
                .rev()
                .find_map(|unit| unit.status)
                .is_some_and(|last| in_transaction(Some(last)));
            match (was_within, within) {
                (false, true) => {
                    let end = units[at..].iter().position(idle).map_or(units.len(), |last| at + last + 1);
                    torn.push((from..end, reason));
                }
                (true, false) => {
                    let begin = before.iter().rposition(idle).map_or(0, |last| last + 1);
                    torn.push((begin..from, reason));
                }
                // It began before and goes on, or there is none.
                _ => {}
            }
        }
        let Session { units, commands, .. } = &mut self.session;
        for (range, reason) in torn {
            for index in range {
                // In MySQL's protocol it is no part of the transaction, and what follows may execute it.
                if commands.get(index) != Some(&COM_STMT_PREPARE) {
                    units[index].omitted.get_or_insert(reason);
                }
            }
        }
    }

    /// Statements of units that are left out, without which others could not be played.
    pub(super) fn prepare_what_outlives(&mut self) {
        let Session { units, prepared, .. } = &mut self.session;
        for (unit, parse) in std::mem::take(&mut self.prepared).into_values() {
            if matches!(units[unit].omitted, Some(Reason::Filter | Reason::MidstreamTransaction)) {
                prepared.push(parse);
            }
        }
    }
}

/// Whether a unit began within a transaction; `None` if nothing tells.
fn began_within(
    unit: &Unit,
    expected: &Lists<Expected>,
    executes: &Lists<u32>,
    classifier: &Classifier,
) -> Option<bool> {
    let ended = expected.get(unit.expected).iter().find_map(|expected| match &expected.end {
        Some(End::Complete(tag)) => block_of_tag(tag),
        _ => None,
    });
    let said = || executes.get(unit.executes).iter().find_map(|&index| classifier.get(index).block);
    let failed = |expected: &Expected| matches!(expected.end, Some(End::Error(..)));
    match (ended.or_else(said), unit.status) {
        (Some(block), _) => Some(block == Block::Ends),
        // An error of MySQL's protocol says nothing of the transaction.
        (None, Some(TransactionStatus::Idle)) if expected.get(unit.expected).iter().any(failed) => None,
        (None, Some(status)) => Some(status != TransactionStatus::Idle),
        (None, None) => None,
    }
}

/// Whether a COPY succeeded, and nothing failed that may have been another one.
fn took_data(expected: &[Expected]) -> bool {
    let copied = |one: &Expected| matches!(&one.end, Some(End::Complete(tag)) if tag.starts_with(b"COPY"));
    let failed = |one: &Expected| matches!(one.end, Some(End::Error(..)));
    expected.iter().any(copied) && !expected.iter().any(failed)
}

/// What the statement with this command tag did. It may be known by nothing else.
fn block_of_tag(tag: &[u8]) -> Option<Block> {
    match tag {
        b"BEGIN" | b"START TRANSACTION" => Some(Block::Begins),
        // That of ROLLBACK TO SAVEPOINT as well, which stands in a transaction.
        b"COMMIT" | b"ROLLBACK" | b"PREPARE TRANSACTION" => Some(Block::Ends),
        _ => None,
    }
}
fn in_transaction(status: Option<TransactionStatus>) -> bool {
    matches!(status, Some(TransactionStatus::Transaction | TransactionStatus::Failed))
}
