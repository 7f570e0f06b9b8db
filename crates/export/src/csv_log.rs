// SPDX-License-Identifier: Apache-2.0
//! A trace from PostgreSQL's CSV log (`log_destination = csvlog`), PostgreSQL 9.0 to 18.
//!
//! A log is less than a capture: parameters are text, the protocol's messages are not known, nor rows, nor bytes.
//! It needs `log_statement = all` or `log_min_duration_statement = 0`; durations come from the latter, or from
//! `log_duration`. Sessions have [`Source::Import`], so that reports say so.
//!
//! A session begins where a line about its connection says so (`log_connections`); else by the column `session_start_time`, in
//! whole seconds. One that is older than the logs was joined in its middle when they begin, as one that a recorder joins:
//! before that, nobody knows what it did. It ends where a line says so (`log_disconnections`) or with a FATAL error; else with its
//! last line, so that sessions are not all open until the logs end.
//!
//! The server logs the text of a statement that failed, but not whether it was a Query. One with parameters was not; its values are known
//! from the line about its execution (`log_statement`) or its Bind (`log_min_duration_statement = 0`), if there is one. Without them
//! Bind has none, and a replay fails there, if with another error.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::Read;

use csv::{ByteRecord, StringRecord};
use underpass_trace::*;
use underpass_wire::frontend::build;

use crate::Error;
use underpass_trace::block::{self, Effect, Step};

/// What was read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Lines of the log, which is CSV records.
    pub lines: u64,
    /// Sessions.
    pub sessions: u64,
    /// Statements.
    pub statements: u64,
    /// Errors of statements.
    pub errors: u64,
    /// Statements that failed whose parameters are not in the log.
    pub unknown_parameters: u64,
    /// Sessions whose end is not in the log.
    pub unknown_ends: u64,
    /// Lines that say nothing about a statement or session, and those with more parameters than a message can have.
    pub others: u64,
    /// Lines whose time zone is an abbreviation other than UTC and GMT, which was taken for UTC.
    pub zones_taken_for_utc: u64,
    /// Lines with bytes that are not UTF-8, which became U+FFFD: the server writes each in its database's encoding.
    pub not_utf8: u64,
    /// Logs whose last line is cut off, and left out.
    pub torn: u64,
}

/// Columns of the log; manual, "Using CSV-Format Log Output".
mod column {
    pub(super) const LOG_TIME: usize = 0;
    pub(super) const USER_NAME: usize = 1;
    pub(super) const DATABASE_NAME: usize = 2;
    pub(super) const PROCESS_ID: usize = 3;
    pub(super) const CONNECTION_FROM: usize = 4;
    pub(super) const SESSION_ID: usize = 5;
    pub(super) const COMMAND_TAG: usize = 7;
    pub(super) const SESSION_START_TIME: usize = 8;
    pub(super) const ERROR_SEVERITY: usize = 11;
    pub(super) const SQL_STATE_CODE: usize = 12;
    pub(super) const MESSAGE: usize = 13;
    pub(super) const DETAIL: usize = 14;
    pub(super) const QUERY: usize = 19;
    pub(super) const APPLICATION_NAME: usize = 22;
    /// Columns of the oldest format with all of these.
    pub(super) const COUNT_MIN: usize = 23;
}

/// Parameters of one Bind: their count is 16 bits.
const PARAMETERS_MAX: usize = 65_535;

/// The unit of `session_start_time`, which has no fraction.
const SECOND_NS: u64 = 1_000_000_000;

/// What META of an imported trace says.
pub fn meta() -> Meta {
    Meta { sources: vec!["PostgreSQL CSV log".into()], ..Meta::default() }
}

enum Fault {
    Error(Error),
    Line(&'static str),
}

impl From<underpass_trace::Error> for Fault {
    fn from(error: underpass_trace::Error) -> Self {
        Self::Error(error.into())
    }
}

/// Reads logs, one after the other: what is open at the end of one goes on in the next.
pub struct Import {
    sessions: BTreeMap<String, Session>,
    /// The last sessions of processes: a number that comes back is a new process.
    processes: BTreeMap<String, String>,
    /// When connections were authorized that have not said anything yet.
    connected: BTreeMap<String, u64>,
    next: u64,
    /// The time of the first line.
    first_ns: Option<u64>,
    summary: Summary,
}

struct Session {
    id: SessionId,
    frontend: u64,
    backend: u64,
    status: TransactionStatus,
    /// A statement whose end has not been seen.
    running: Option<Running>,
    /// Text and parameters of the last Bind, until something else comes.
    bound: Option<(String, String)>,
    process: String,
    /// The time of its last line.
    last_ns: u64,
}

struct Running {
    text: String,
    /// Offset of its Query or Execute, and of the message that Ready answers.
    request: u64,
    sync: u64,
    start_ns: u64,
}

/// A line about a statement.
struct Logged<'a> {
    /// Its name, for the extended protocol.
    name: Option<&'a str>,
    text: &'a str,
}

impl std::fmt::Debug for Import {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Import").field("summary", &self.summary).finish_non_exhaustive()
    }
}

impl Default for Import {
    fn default() -> Self {
        Self {
            sessions: BTreeMap::new(),
            processes: BTreeMap::new(),
            connected: BTreeMap::new(),
            next: 1,
            first_ns: None,
            summary: Summary::default(),
        }
    }
}

impl Import {
    /// Reads the next log and writes its statements.
    ///
    /// # Errors
    /// The log is not in CSV format or has too few columns; the trace cannot be written.
    pub fn log(&mut self, log: impl Read, writer: &mut Writer) -> Result<(), Error> {
        let mut lines = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(log);
        let mut read = |line: &mut ByteRecord| {
            let at = lines.position().line();
            let more = lines.read_byte_record(line);
            more.map_err(|error| Error::Input { line: at, why: error.to_string() })
        };
        let (mut next, mut bytes) = (ByteRecord::new(), ByteRecord::new());
        let mut more = read(&mut next)?;
        while more {
            std::mem::swap(&mut next, &mut bytes);
            more = read(&mut next)?;
            let at = bytes.position().map_or(0, csv::Position::line);
            let line = StringRecord::from_byte_record_lossy(bytes.clone());
            // A server that is at work, or was killed, leaves a line without its end; a file of another kind has no time.
            let begun = line.get(column::LOG_TIME).and_then(time).is_some()
                || self.summary.lines > 0 && is_cut_time(&line);
            if !more && line.len() < column::COUNT_MIN && begun {
                self.summary.torn += 1;
                break;
            }
            self.summary.not_utf8 += u64::from(line.as_byte_record() != &bytes);
            self.line(&line, writer).map_err(|fault| match fault {
                Fault::Error(error) => error,
                Fault::Line(why) => Error::Input { line: at, why: why.to_owned() },
            })?;
        }
        Ok(())
    }

    fn line(&mut self, line: &StringRecord, writer: &mut Writer) -> Result<(), Fault> {
        if line.len() < column::COUNT_MIN {
            return Err(Fault::Line("too few columns: not PostgreSQL's CSV log"));
        }
        self.summary.lines += 1;
        let get = |at: usize| line.get(at).unwrap_or("");
        let (now, assumed) = time(get(column::LOG_TIME)).ok_or(Fault::Line("the first column is no time"))?;
        self.summary.zones_taken_for_utc += u64::from(assumed);
        if self.first_ns.is_none() {
            self.first_ns = Some(now);
            writer.write(&Record::Clock(Clock { monotonic_ns: now, realtime_ns: now as i64 }))?;
        }
        let key = get(column::SESSION_ID);
        let message = get(column::MESSAGE);
        // Without a database it is a process of the server's own, or a connection before its login.
        if key.is_empty() || get(column::DATABASE_NAME).is_empty() {
            self.summary.others += 1;
            return Ok(());
        }
        if message.starts_with("disconnection: ") {
            self.connected.remove(key);
            return self.end(key, now, EndReason::Unknown, writer);
        }
        let (duration_ns, rest) = duration(message);
        let start_ns = now.saturating_sub(duration_ns.unwrap_or(0));
        // The name of the application is known later than the connection: a session is told with its first statement.
        if !self.sessions.contains_key(key) {
            if message.starts_with("connection ") {
                self.summary.others += 1;
                self.connected.entry(key.to_owned()).or_insert(now);
                return Ok(());
            }
            let process = get(column::PROCESS_ID);
            if !process.is_empty()
                && let Some(before) = self.processes.insert(process.to_owned(), key.to_owned())
            {
                self.end_unlogged(&before, writer)?;
            }
            let session = self.start(line, start_ns, writer)?;
            self.sessions.insert(key.to_owned(), session);
        }
        let Some(session) = self.sessions.get_mut(key) else { return Ok(()) };
        session.last_ns = session.last_ns.max(now);
        let bound = session.bound.take();
        let severity = get(column::ERROR_SEVERITY);
        if matches!(severity, "ERROR" | "FATAL" | "PANIC") {
            let query = get(column::QUERY);
            let sqlstate = get(column::SQL_STATE_CODE).as_bytes();
            let outcome = Outcome::Error(ErrorOutcome {
                sqlstate: sqlstate.try_into().unwrap_or(*b"XX000"),
                fatal: severity != "ERROR",
                message: Cow::Borrowed(message.as_bytes()),
            });
            self.summary.errors += 1;
            let known =
                session.running.as_ref().is_some_and(|running| query.is_empty() || running.text == query);
            if !known && !query.is_empty() {
                let (name, detail) = match &bound {
                    Some((text, detail)) if text == query => (Some(""), detail.as_str()),
                    // That of a Query that has parameters, which no Query may have.
                    _ if sqlstate != b"42P02" && has_parameters(query) => {
                        self.summary.unknown_parameters += 1;
                        (Some(""), "")
                    }
                    _ => (None, ""),
                };
                session.begin(&Logged { name, text: query }, detail, now, &mut self.summary, writer)?;
            }
            session.end(now, outcome, get(column::COMMAND_TAG), writer)?;
            if severity == "ERROR" {
                return Ok(());
            }
            return self.end(key, now, EndReason::ServerClosed, writer);
        }
        match (logged(rest), duration_ns) {
            (Some(statement), duration_ns) => {
                session.begin(&statement, get(column::DETAIL), start_ns, &mut self.summary, writer)?;
                if duration_ns.is_some() {
                    session.complete(now, get(column::COMMAND_TAG), writer)?;
                }
            }
            // `log_duration`: the end of the statement that was logged before.
            (None, Some(_)) if rest.is_empty() => session.complete(now, get(column::COMMAND_TAG), writer)?,
            _ => {
                session.bound =
                    bound_text(rest).map(|text| (text.to_owned(), get(column::DETAIL).to_owned()));
                self.summary.others += 1;
            }
        }
        Ok(())
    }

    /// Begins the session of a line, which does not begin later than what the line tells of.
    fn start(&mut self, line: &StringRecord, line_ns: u64, writer: &mut Writer) -> Result<Session, Fault> {
        let get = |at: usize| line.get(at).unwrap_or("");
        let logs_ns = self.first_ns.unwrap_or(line_ns);
        let (began_ns, midstream) = match self.connected.remove(get(column::SESSION_ID)) {
            Some(connected_ns) => (connected_ns, false),
            None => {
                let start_ns =
                    time(get(column::SESSION_START_TIME)).map_or(line_ns, |(start_ns, _)| start_ns);
                (start_ns.max(logs_ns), start_ns < logs_ns - logs_ns % SECOND_NS)
            }
        };
        let began_ns = began_ns.min(line_ns);
        let name = |at: usize| {
            Some(get(at)).filter(|name| !name.is_empty()).map(|name| Cow::Borrowed(name.as_bytes()))
        };
        let id = SessionId(self.next);
        self.next += 1;
        self.summary.sessions += 1;
        let from = get(column::CONNECTION_FROM);
        writer.write(&Record::SessionStart(SessionStart {
            session: id,
            time_ns: began_ns,
            ready_ns: (!midstream).then_some(began_ns),
            source: Source::Import,
            transport: if from.starts_with("[local]") { Transport::Unix } else { Transport::Unknown },
            peer: from.parse().ok(),
            backend_pid: get(column::PROCESS_ID).parse().ok(),
            midstream,
            protocol_version: 0,
            database: name(column::DATABASE_NAME),
            user: name(column::USER_NAME),
            application_name: name(column::APPLICATION_NAME),
            parameters: Vec::new(),
            frontend_offset: 0,
            backend_offset: 0,
        }))?;
        Ok(Session {
            id,
            frontend: 0,
            backend: 0,
            status: TransactionStatus::Idle,
            running: None,
            bound: None,
            process: get(column::PROCESS_ID).to_owned(),
            last_ns: began_ns,
        })
    }

    fn end(&mut self, key: &str, now: u64, reason: EndReason, writer: &mut Writer) -> Result<(), Fault> {
        let Some(mut session) = self.sessions.remove(key) else { return Ok(()) };
        self.processes.remove(&session.process);
        end_session(&mut session, now, reason, writer)
    }

    /// Ends a session of whose end no line tells with its last line.
    fn end_unlogged(&mut self, key: &str, writer: &mut Writer) -> Result<(), Fault> {
        let Some(mut session) = self.sessions.remove(key) else { return Ok(()) };
        self.summary.unknown_ends += 1;
        let last_ns = session.last_ns;
        end_session(&mut session, last_ns, EndReason::Unknown, writer)
    }

    /// All logs are read: sessions that are open end.
    ///
    /// # Errors
    /// The trace cannot be written.
    pub fn finish(mut self, writer: &mut Writer) -> Result<Summary, Error> {
        let mut open: Vec<_> =
            self.sessions.iter().map(|(key, session)| (session.last_ns, key.clone())).collect();
        open.sort_unstable();
        for (_, key) in open {
            self.end_unlogged(&key, writer).map_err(|fault| match fault {
                Fault::Error(error) => error,
                Fault::Line(why) => Error::Input { line: 0, why: why.to_owned() },
            })?;
        }
        Ok(self.summary)
    }
}

/// Nanoseconds since 1970 of `2026-03-01 13:14:15.123 UTC`, and whether its zone was taken for UTC.
fn time(text: &str) -> Option<(u64, bool)> {
    let (stamp, zone) = text.rsplit_once(' ')?;
    let civil: jiff::civil::DateTime = stamp.parse().ok()?;
    let known =
        if matches!(zone, "UTC" | "GMT") { Some(jiff::tz::Offset::UTC) } else { numeric_offset(zone) };
    let time = known.unwrap_or(jiff::tz::Offset::UTC).to_timestamp(civil).ok()?;
    Some((u64::try_from(time.as_nanosecond()).ok()?, known.is_none()))
}

/// Whether a line ends before its time does.
fn is_cut_time(line: &StringRecord) -> bool {
    let of_time = |byte: u8| byte.is_ascii_digit() || matches!(byte, b'-' | b':' | b'.' | b' ');
    line.len() == 1 && line.iter().all(|column| column.bytes().all(of_time))
}

/// `+02`, `-0330`, `+05:45`: abbreviations of zones that have no letters.
fn numeric_offset(zone: &str) -> Option<jiff::tz::Offset> {
    static PARSER: jiff::fmt::temporal::DateTimeParser = jiff::fmt::temporal::DateTimeParser::new();
    // Letters it would look up as names of zones, which abbreviations are not.
    if !zone.starts_with(['+', '-']) {
        return None;
    }
    PARSER.parse_time_zone(zone).ok()?.to_fixed_offset().ok()
}

/// `duration: 0.123 ms  statement: ...` as nanoseconds and what follows.
fn duration(message: &str) -> (Option<u64>, &str) {
    let Some((number, rest)) = message.strip_prefix("duration: ").and_then(|rest| rest.split_once(" ms"))
    else {
        return (None, message);
    };
    match number.parse::<f64>() {
        Ok(ms) if ms >= 0.0 => (Some((ms * 1e6) as u64), rest.trim_start()),
        _ => (None, message),
    }
}

/// `statement: ...` and `execute name: ...`; parse and bind are parts of an execute that is logged, too.
fn logged(message: &str) -> Option<Logged<'_>> {
    if let Some(text) = message.strip_prefix("statement: ") {
        return Some(Logged { name: None, text });
    }
    // What a portal goes on with is logged with the whole text, as if it began.
    let rest = message.strip_prefix("execute ").filter(|rest| !rest.starts_with("fetch from "))?;
    let (name, text) = rest.split_once(": ")?;
    let name = name.split('/').next().unwrap_or(name);
    Some(Logged { name: Some(if name == "<unnamed>" { "" } else { name }), text })
}

/// The text of `bind name: ...`.
fn bound_text(message: &str) -> Option<&str> {
    Some(message.strip_prefix("bind ")?.split_once(": ")?.1)
}

/// Whether a text has parameters that Bind gave it; those in PREPARE and CREATE are its own.
fn has_parameters(text: &str) -> bool {
    let shape = strip_literals(text.as_bytes(), Protocol::Postgres);
    let numbered = |two: &[u8]| two[0] == b'$' && two[1].is_ascii_digit();
    shape.windows(2).any(numbered)
        && matches!(&block::steps(text.as_bytes())[..], [step] if step.verb != "prepare" && step.verb != "create")
}

/// `parameters: $1 = 'it''s', $2 = NULL`.
fn parameters(detail: &str) -> Vec<Option<String>> {
    let Some((head, mut rest)) = detail.split_once(": ") else { return Vec::new() };
    if !head.eq_ignore_ascii_case("parameters") {
        return Vec::new();
    }
    let mut values = Vec::new();
    while let Some((_, value)) = rest.strip_prefix('$').and_then(|rest| rest.split_once(" = ")) {
        let after = if let Some(quoted) = value.strip_prefix('\'') {
            let (text, after) = unquoted(quoted);
            values.push(Some(text));
            after
        } else {
            values.push(None);
            value.strip_prefix("NULL").unwrap_or("")
        };
        rest = after.strip_prefix(", ").unwrap_or("");
    }
    values
}

/// The text up to the closing quote, and what is behind it.
fn unquoted(quoted: &str) -> (String, &str) {
    let mut text = String::new();
    let mut rest = quoted;
    while let Some((part, after)) = rest.split_once('\'') {
        text.push_str(part);
        match after.strip_prefix('\'') {
            Some(after) => {
                text.push('\'');
                rest = after;
            }
            None => return (text, after),
        }
    }
    (text + rest, "")
}

impl Session {
    fn begin(
        &mut self,
        statement: &Logged<'_>,
        detail: &str,
        start_ns: u64,
        summary: &mut Summary,
        writer: &mut Writer,
    ) -> Result<(), Fault> {
        // No server logs this, and no message can say it.
        let values = if statement.name.is_some() { parameters(detail) } else { Vec::new() };
        if values.len() > PARAMETERS_MAX {
            summary.others += 1;
            return self.end(start_ns, Outcome::Unknown, "", writer);
        }
        // The log does not say how the last one ended.
        self.end(start_ns, Outcome::Unknown, "", writer)?;
        summary.statements += 1;
        let text = statement.text;
        let mut messages = Vec::new();
        let message = |build: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = Vec::new();
            build(&mut bytes);
            bytes
        };
        if statement.name.is_some() {
            // Under no name: a log does not tell when a name is given up, and Parse would then fail.
            let params = || values.iter().map(|value| value.as_ref().map(String::as_bytes));
            messages.push(message(&|out| build::parse(out, b"", text.as_bytes(), [])));
            messages.push(message(&|out| build::bind(out, b"", b"", [], params(), [])));
            messages.push(message(&|out| build::execute(out, b"", 0)));
            messages.push(message(&build::sync));
        } else {
            messages.push(message(&|out| build::query(out, text.as_bytes())));
        }
        let first = messages.len().saturating_sub(2);
        let mut offsets = Vec::new();
        for bytes in messages {
            offsets.push(self.frontend);
            let len = bytes.len() as u64;
            writer.write(&Record::Frontend(Frontend::new(self.id, start_ns, self.frontend, bytes)))?;
            self.frontend += len;
        }
        let sync = offsets.last().copied().unwrap_or(0);
        let request = offsets.get(first).copied().unwrap_or(sync);
        self.running = Some(Running { text: text.to_owned(), request, sync, start_ns });
        Ok(())
    }

    fn complete(&mut self, now: u64, tag: &str, writer: &mut Writer) -> Result<(), Fault> {
        self.end(now, Outcome::Complete { tag: Cow::Borrowed(tag.as_bytes()) }, tag, writer)
    }

    /// The statement that runs has ended; the server was at one with this tag.
    fn end(
        &mut self,
        now: u64,
        mut outcome: Outcome<'_>,
        tag: &str,
        writer: &mut Writer,
    ) -> Result<(), Fault> {
        let Some(running) = self.running.take() else { return Ok(()) };
        let now = now.max(running.start_ns);
        let steps = block::steps(running.text.as_bytes());
        // The log has the command; what the client was told is that it had failed.
        if let (Outcome::Complete { tag }, TransactionStatus::Failed, [step]) =
            (&mut outcome, self.status, &steps[..])
            && matches!(step.effect, Effect::Ends { commits: true } | Effect::Chains { commits: true })
        {
            *tag = Cow::Borrowed(b"ROLLBACK");
        }
        self.status = match outcome {
            Outcome::Error(_) => status_failed(self.status, &steps, tag),
            _ => block::after(self.status, &steps),
        };
        writer.write(&Record::Response(Response {
            session: self.id,
            request: running.request,
            offset: self.backend,
            len: 0,
            first_ns: now,
            last_ns: now,
            rows: 0,
            outcome,
        }))?;
        let (request, status) = (running.sync, self.status);
        writer.write(&Record::Ready(Ready {
            session: self.id,
            time_ns: now,
            request,
            offset: self.backend,
            status,
        }))?;
        Ok(())
    }
}

/// The transaction status after a text one of whose statements failed: the first that has the tag. What came before it was done.
fn status_failed(before: TransactionStatus, steps: &[Step], tag: &str) -> TransactionStatus {
    // The server had not begun with any: it could not read the text.
    if tag.is_empty() || tag == "idle" || tag.starts_with("idle ") {
        return Effect::Nothing.failed(before);
    }
    let verb = tag.split(' ').next().unwrap_or(tag);
    // Of WITH and others the tag is another word.
    let at = steps
        .iter()
        .position(|step| step.verb.eq_ignore_ascii_case(verb))
        .or_else(|| steps.iter().rposition(|step| step.effect == Effect::Nothing));
    let Some(at) = at else { return Effect::Nothing.failed(before) };
    steps[at].effect.failed(block::after(before, &steps[..at]))
}

fn end_session(session: &mut Session, now: u64, reason: EndReason, writer: &mut Writer) -> Result<(), Fault> {
    session.end(now, Outcome::Unknown, "", writer)?;
    let of = |bytes| ByteTotals { seen: bytes, recorded: bytes, ..ByteTotals::default() };
    writer.write(&Record::SessionEnd(SessionEnd {
        session: session.id,
        time_ns: now,
        reason,
        frontend: of(session.frontend),
        backend: of(session.backend),
    }))?;
    Ok(())
}
