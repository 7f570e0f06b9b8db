// SPDX-License-Identifier: Apache-2.0
//! From the records of a trace to a plan.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::path::Path;

use foldhash::HashSet;
use underpass_trace::{
    Direction, Frontend, Meta, Outcome, Protocol, Reader, Ready, Record, Response, ServerIdentity,
    SessionEnd, SessionId, SessionStart, WithheldReason, statements::LocalFiles,
};
use underpass_wire::backend::TransactionStatus;
use underpass_wire::tag::backend as backend_tag;

use super::mysql::prepare_tag;
use super::order;
use super::script::{Groups, Holes, Script};
use super::{End, Expected, Messages, Omitted, Options, Plan, Reason, Rows, Session, Unit};
use crate::Error;
use crate::classify::Classifier;
use crate::lists::Lists;
use crate::rowhash::RowHash;
use crate::session::MESSAGE_CHARS_MAX;

/// Reads a trace and makes the plan.
pub fn read(path: &Path, options: &Options) -> Result<Plan, Error> {
    let mut reader = Reader::open(path)?;
    let meta = reader.meta().clone();
    let mut builder = Builder::new(options, meta.protocol)?;
    let mut malformed = 0;
    loop {
        match reader.next() {
            Ok(Some(record)) => builder.record(&record)?,
            Ok(None) => break,
            // What is missing for that shows by the offsets of what follows.
            Err(underpass_trace::Error::Record { .. }) => malformed += 1,
            Err(error) => return Err(error.into()),
        }
    }
    let damage = reader.damage();
    let mut plan = builder.finish(meta, damage.blocks + damage.segments)?;
    plan.is_torn = damage.torn;
    plan.malformed_records = malformed;
    Ok(plan)
}

/// Makes the plan from records that are at hand.
pub fn from_records<'a>(
    meta: Meta,
    records: impl IntoIterator<Item = Record<'a>>,
    options: &Options,
) -> Result<Plan, Error> {
    let mut builder = Builder::new(options, meta.protocol)?;
    for record in records {
        builder.record(&record)?;
    }
    builder.finish(meta, 0)
}

struct Builder<'o> {
    options: &'o Options,
    protocol: Protocol,
    /// Which sessions send local files, of MySQL's protocol.
    files: LocalFiles,
    messages: Messages,
    classifier: Classifier,
    groups: Groups,
    executes: Lists<u32>,
    expected: Lists<Expected>,
    sessions: BTreeMap<SessionId, Script>,
    refused: HashSet<SessionId>,
    omitted: Omitted,
    /// What is missing before the messages of clients.
    holes: Holes,
    /// Sessions with messages and without a beginning.
    headless: HashSet<SessionId>,
    /// CancelRequests: session and time.
    cancels: Vec<(Option<SessionId>, u64)>,
    servers: Vec<ServerIdentity<'static>>,
    origin_ns: Option<u64>,
}
impl<'o> Builder<'o> {
    fn new(options: &'o Options, protocol: Protocol) -> Result<Self, Error> {
        Ok(Self {
            options,
            protocol,
            files: LocalFiles::default(),
            messages: Messages::create()?,
            classifier: Classifier::new(protocol),
            groups: Groups::default(),
            executes: Lists::default(),
            expected: Lists::default(),
            sessions: BTreeMap::new(),
            refused: HashSet::default(),
            omitted: Omitted::default(),
            holes: Holes::default(),
            headless: HashSet::default(),
            cancels: Vec::new(),
            servers: Vec::new(),
            origin_ns: None,
        })
    }

    fn record(&mut self, record: &Record<'_>) -> Result<(), Error> {
        let is_file = self.protocol == Protocol::Mysql && self.files.push(record);
        match record {
            Record::SessionStart(start) => self.start(start),
            Record::Frontend(message) => self.frontend(message, is_file)?,
            Record::Response(response) => self.response(response),
            Record::Ready(ready) => self.ready(ready),
            Record::Backend(message)
                if self.options.rows != Rows::Count && self.protocol == Protocol::Postgres =>
            {
                let Some(script) = self.sessions.get_mut(&message.session) else { return Ok(()) };
                if let Some((&kind, body)) = message.message.split_first() {
                    if matches!(kind, backend_tag::DATA_ROW | backend_tag::COPY_DATA) && body.len() >= 4 {
                        script.rows.push((message.offset, RowHash::of_row(&body[4..])));
                    }
                }
            }
            Record::ParameterStatus(status)
                if self.protocol == Protocol::Mysql && *status.name == *b"user" =>
            {
                if let Some(script) = self.sessions.get_mut(&status.session) {
                    script.commands.change_user();
                }
            }
            Record::PreparedFill(fill) => {
                let Some(script) = self.sessions.get_mut(&fill.session) else { return Ok(()) };
                match self.protocol {
                    Protocol::Postgres => script.fill(fill, &mut self.classifier, self.options),
                    Protocol::Mysql => {
                        for unit in script.fill_mysql(fill, &mut self.classifier, self.options) {
                            script.open.executes = vec![unit.statement];
                            script.name_group(
                                unit.at,
                                &mut self.groups,
                                &self.classifier,
                                &mut self.executes,
                            );
                        }
                    }
                }
            }
            Record::Server(server) => self.servers.push(server.clone().into_owned()),
            Record::Cancel(cancel) => self.cancels.push((cancel.session, cancel.time_ns)),
            Record::Loss(loss) if loss.direction == Direction::Frontend => {
                // What follows shows the gap by its offset. A unit that misses its end never gets one.
                match loss.session {
                    None => self.holes.add(loss.len),
                    Some(session) => {
                        if let Some(script) = self.sessions.get_mut(&session) {
                            script.cut(Reason::Lost);
                            script.lost_until = script.lost_until.max(loss.offset.saturating_add(loss.len));
                        }
                    }
                }
            }
            Record::Withheld(withheld)
                if self.protocol == Protocol::Mysql && withheld.direction == Direction::Frontend =>
            {
                if let Some(script) = self.sessions.get_mut(&withheld.session)
                    && script.next_offset.is_none_or(|next| next <= withheld.offset)
                {
                    script.withheld_command(withheld, &self.classifier);
                }
            }
            Record::Withheld(withheld)
                if self.protocol == Protocol::Postgres
                    && withheld.direction == Direction::Frontend
                    && withheld.reason == WithheldReason::Masking =>
            {
                if let Some(script) = self.sessions.get_mut(&withheld.session) {
                    script.masked_data(withheld);
                }
            }
            Record::SessionEnd(end) => self.end(end),
            _ => {}
        }
        Ok(())
    }

    fn start(&mut self, start: &SessionStart<'_>) {
        let origin_ns = *self.origin_ns.get_or_insert(start.time_ns);
        let replication = start.parameters.iter().any(|(name, value)| {
            **name == *b"replication" && !matches!(&**value, b"false" | b"off" | b"0" | b"no")
        });
        let reason = if !self.options.filter.session(start)
            || self.options.filter.time(start.time_ns.saturating_sub(origin_ns)) == Ordering::Greater
        {
            Some(Reason::Filter)
        } else if replication {
            Some(Reason::Replication)
        } else if start.ready_ns.is_none() && !start.midstream {
            Some(Reason::LoginFailed)
        } else {
            None
        };
        if let Some(reason) = reason {
            self.omitted.session(reason);
            self.refused.insert(start.session);
            return;
        }
        let script = Script::new(start, self.protocol, self.options.rows);
        self.sessions.insert(start.session, script);
    }

    fn frontend(&mut self, message: &Frontend<'_>, is_file: bool) -> Result<(), Error> {
        let Some(script) = self.sessions.get_mut(&message.session) else {
            if !self.refused.contains(&message.session) {
                self.headless.insert(message.session);
            }
            return Ok(());
        };
        let origin_ns = self.origin_ns.unwrap_or(message.time_ns);
        let when = self.options.filter.time(message.time_ns.saturating_sub(origin_ns));
        let (classifier, messages) = (&mut self.classifier, &mut self.messages);
        match self.protocol {
            Protocol::Postgres => script.frontend(message, classifier, self.options, when, messages)?,
            Protocol::Mysql => script.command(message, is_file, classifier, self.options, when, messages)?,
        }
        if script.open.complete {
            script.end_unit(&self.classifier, self.options);
            // None yet, where the first messages have no unit.
            let last = script.session.units.len().saturating_sub(1);
            script.name_group(last, &mut self.groups, &self.classifier, &mut self.executes);
        }
        Ok(())
    }

    fn response(&mut self, response: &Response<'_>) {
        let Some(script) = self.sessions.get_mut(&response.session) else { return };
        let hash = script.claim_rows(response);
        if script.dropped.contains(&response.request) {
            return;
        }
        let Some(index) = script.unit_of(response.request) else { return };
        let end = match &response.outcome {
            Outcome::Complete { tag } => {
                match prepare_tag(tag).filter(|_| self.protocol == Protocol::Mysql) {
                    Some((number, parameters)) => {
                        script.prepared_as(index, number, parameters);
                        // The target gives a number of its own.
                        Some(End::Complete(format!("PREPARE {parameters}").as_bytes().into()))
                    }
                    None => Some(End::Complete((**tag).into())),
                }
            }
            Outcome::Empty => Some(End::Empty),
            Outcome::Suspended => Some(End::Suspended),
            Outcome::Error(error) => {
                let message = String::from_utf8_lossy(&error.message);
                let message: String = message.chars().take(MESSAGE_CHARS_MAX).collect();
                Some(End::Error(error.sqlstate, message.into()))
            }
            _ => None,
        };
        let end = end.filter(|_| !script.shortened.contains(&response.request));
        let hash = hash.filter(|_| end.is_some());
        script.answers.entry(index).or_default().push(Expected { end, rows: response.rows, hash });
    }

    fn ready(&mut self, ready: &Ready) {
        let Some(script) = self.sessions.get_mut(&ready.session) else { return };
        script.joining &= ready.status != TransactionStatus::Idle;
        let Some(index) = script.unit_of(ready.request) else {
            if let Some(reason) = script.commands.why_withheld(ready.request) {
                self.omitted.unit(reason);
            }
            return;
        };
        let unit = &mut script.session.units[index];
        unit.is_ready(ready.time_ns);
        unit.status = Some(ready.status);
        script.keep_answers(index, &mut self.expected);
        script.answered = script.answered.max(index + 1);
    }

    fn end(&mut self, end: &SessionEnd) {
        let Some(script) = self.sessions.get_mut(&end.session) else { return };
        // What comes behind the wanted time is not waited for.
        let wanted_ns = self.options.filter.to.map(|to| {
            self.origin_ns
                .unwrap_or(end.time_ns)
                .saturating_add(u64::try_from(to.as_nanos()).unwrap_or(u64::MAX))
        });
        script.session.end_ns = Some(end.time_ns.min(wanted_ns.unwrap_or(u64::MAX)));
        script.session.end = Some(end.reason);
        script.cut(Reason::Incomplete);
    }

    fn finish(mut self, meta: Meta, damaged_blocks: u64) -> Result<Plan, Error> {
        self.messages.finish()?;
        let mut sessions = Vec::new();
        self.sessions.values_mut().for_each(|script| script.cut(Reason::Incomplete));
        for (session, time_ns) in std::mem::take(&mut self.cancels) {
            let script = session.and_then(|session| self.sessions.get_mut(&session));
            if !script.is_some_and(|script| script.cancel(time_ns)) {
                self.omitted.unit(Reason::Cancel);
            }
        }
        for (_, mut script) in std::mem::take(&mut self.sessions) {
            script.settle(&mut self.expected);
            script.leave_out_torn(&self.expected, &self.executes, &self.classifier);
            script.prepare_what_outlives();
            script.settle_commands();
            script.miss(script.lost_until);
            self.holes.count += script.holes.count;
            self.holes.bytes += script.holes.bytes;
            for unit in &script.session.units {
                if let Some(reason) = unit.omitted.or(unit.left_out) {
                    self.omitted.unit(reason);
                }
            }
            let mut session = script.session;
            session.units.shrink_to_fit();
            session.steps.shrink_to_fit();
            // Nothing of it is in the wanted time.
            let emptied = |unit: &Unit| unit.omitted == Some(Reason::Filter);
            if !session.units.is_empty() && session.units.iter().all(emptied) {
                self.omitted.session(Reason::Filter);
                continue;
            }
            sessions.push(session);
        }
        sessions.sort_by_key(|session| (session.start_ns, session.id));
        let sessions_peak = order::ends(&mut sessions);
        let origin_ns = match self.options.filter.from {
            Some(from) => self.origin_ns.unwrap_or(0).saturating_add(from.as_nanos() as u64),
            None => sessions.first().map_or(0, |session| session.start_ns),
        };
        let end_ns = sessions.iter().map(last_ns).max().unwrap_or(0).max(origin_ns);
        let mut plan = Plan {
            servers: self.servers,
            meta,
            sessions,
            messages: self.messages,
            classifier: self.classifier,
            groups: self.groups.list,
            executes: self.executes,
            expected: self.expected,
            omitted: self.omitted,
            origin_ns,
            end_ns,
            sessions_peak,
            commits: 0,
            close_commits: 0,
            damaged_blocks,
            malformed_records: 0,
            is_torn: false,
            holes: self.holes.count,
            hole_bytes: self.holes.bytes,
            headless_sessions: self.headless.len() as u64,
        };
        order::commits(&mut plan);
        Ok(plan)
    }
}
/// When the last of a session happens that is played.
fn last_ns(session: &Session) -> u64 {
    let played = session.units.iter().filter(|unit| unit.omitted.is_none());
    let units = played.map(|unit| unit.ready_ns().unwrap_or(unit.sent_ns));
    units.chain(session.end_ns).max().unwrap_or(session.login_ns)
}
