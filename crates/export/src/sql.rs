// SPDX-License-Identifier: Apache-2.0
//! SQL scripts for psql, and for the shell of MariaDB and MySQL: one file a session, because the statements of two sessions in one connection would share a
//! transaction.
//!
//! A statement with parameters becomes PREPARE and EXECUTE; several in one Query stay in one, with `\;` between them. What a script
//! cannot say is left out with a comment that says why: binary parameters of a type that the client did not name, parameters
//! of what PREPARE does not take, texts that are not known, FunctionCall, COPY data that is not in the trace or beyond 16 MiB,
//! a COPY that failed, what the shell would take for a command of its own. Pipelines and portals are gone: `underpass replay` keeps them.
//!
//! A script commits no transaction block that was rolled back. Where a session's transaction block is other than what the script has written
//! makes it, because a statement is left out (be it that Parse or Bind failed), BEGIN, COMMIT, ROLLBACK or a
//! statement that fails stands in its place; and ROLLBACK in that of a COMMIT that rolled back.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use underpass_trace::block::{self, Effect};
use underpass_trace::statements::{Event, Parameters, Request, Statement, Statements};
use underpass_trace::{
    Direction, Loss, Outcome, Protocol, Reader, Record, Redaction, SessionId, SessionStart,
    TransactionStatus, strip_literals,
};
use underpass_wire::Header;
use underpass_wire::tag::frontend;

use crate::{Error, Utc, mysql, shell, shown, text_of};

/// COPY data of one statement that is kept, bytes.
const COPY_BYTES_MAX: usize = 16 << 20;
/// Files that are open at a time; others are opened again to append.
const FILES_MAX: usize = 200;

/// What was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Scripts, which is sessions that sent a statement.
    pub files: u64,
    /// Statements in them.
    pub statements: u64,
    /// Statements that only a comment tells of.
    pub left_out: u64,
    /// Records of the trace that were malformed and passed over.
    pub malformed: u64,
}

/// Writes a trace as SQL scripts into a new directory: `session-000001.sql`.
///
/// # Errors
/// The directory exists, a file cannot be written, or the trace cannot be read.
pub fn export(reader: &mut Reader, directory: &Path) -> Result<Summary, Error> {
    crate::new_directory(directory)?;
    let mut assembler = Statements::new(reader.meta().protocol);
    let mut scripts = Scripts {
        protocol: reader.meta().protocol,
        directory: directory.to_owned(),
        utc: Utc::default(),
        starts: BTreeMap::new(),
        copies: BTreeMap::new(),
        blocks: BTreeMap::new(),
        suspended: BTreeMap::new(),
        files: BTreeMap::new(),
        summary: Summary::default(),
    };
    let mut events = Vec::new();
    loop {
        match reader.next() {
            Ok(Some(record)) => {
                scripts.record(&record);
                assembler.push(&record, &mut events);
                for event in &events {
                    if let Event::Statement(statement) = event {
                        scripts.statement(statement)?;
                    }
                }
                match record {
                    Record::Ready(ready) => scripts.ready(ready.session, ready.status)?,
                    Record::SessionEnd(end) => scripts.end(end.session)?,
                    _ => {}
                }
            }
            Ok(None) => return scripts.finish(),
            Err(underpass_trace::Error::Record { .. }) => scripts.summary.malformed += 1,
            Err(error) => return Err(error.into()),
        }
    }
}

struct Scripts {
    protocol: Protocol,
    directory: PathBuf,
    utc: Utc,
    starts: BTreeMap<SessionId, SessionStart<'static>>,
    copies: BTreeMap<SessionId, Copy>,
    /// Transaction blocks of PostgreSQL's sessions.
    blocks: BTreeMap<SessionId, Block>,
    /// Parameters of portals that had more rows: what executes one again has the same. They are gone when their portal is.
    suspended: BTreeMap<SessionId, Vec<Weak<Parameters>>>,
    files: BTreeMap<SessionId, BufWriter<File>>,
    summary: Summary,
}

#[derive(Default)]
struct Copy {
    data: Vec<u8>,
    len: u64,
    /// The client broke it off with CopyFail.
    given_up: bool,
    /// The client said that it was over.
    is_over: bool,
    /// Some of it is lost.
    is_lost: bool,
}

/// The transaction block that a script is in.
struct Block {
    status: TransactionStatus,
    /// Since the server was ready last, a statement that failed was written. Where in its text is not known.
    failed: bool,
    /// Since then something was left out.
    left_out: bool,
    /// What was left out ended a block: whether by a COMMIT that was done.
    ended: Option<bool>,
}

impl Default for Block {
    fn default() -> Self {
        Self { status: TransactionStatus::Idle, failed: false, left_out: false, ended: None }
    }
}

impl Block {
    fn written(&mut self, text: &[u8], outcome: &Outcome<'_>) {
        if matches!(outcome, Outcome::Error(_)) {
            self.failed = true;
            self.status = Effect::Nothing.failed(self.status);
        } else {
            self.status = block::after(self.status, &block::steps(text));
        }
    }

    /// What stands in the place of a statement that is left out before the server says what became of the block.
    fn left_out(&mut self, text: &[u8], outcome: &Outcome<'_>) -> &'static str {
        self.left_out = true;
        if let Outcome::Error(_) = outcome {
            let failing = if self.status == TransactionStatus::Transaction { FAIL } else { "" };
            self.status = Effect::Nothing.failed(self.status);
            return failing;
        }
        for step in block::steps(text) {
            if let Effect::Ends { commits } | Effect::Chains { commits } = step.effect {
                let done = !matches!(outcome, Outcome::Unknown) && !rolled_back(outcome);
                self.ended = Some(commits && done && step.verb != "prepare");
            }
        }
        ""
    }

    /// What takes the script to the status that the server has told.
    fn ready(&mut self, status: TransactionStatus) -> String {
        use TransactionStatus::{Failed, Idle, Transaction};
        let Self { status: mut now, failed, left_out, ended } =
            std::mem::replace(self, Self { status, ..Self::default() });
        let mut text = String::new();
        // What failed in the middle of a text fails there in the script, too.
        if failed && !left_out {
            return text;
        }
        if now != Idle && (status == Idle || ended.is_some()) {
            text += if now == Transaction && ended == Some(true) { COMMIT } else { ROLLBACK };
            now = Idle;
        }
        if now == Idle && status != Idle {
            text += BEGIN;
            now = Transaction;
        }
        // Of one that had failed and goes on, the savepoint is not known: it is rolled back as a whole.
        if now == Transaction && status == Failed {
            text += FAIL;
        }
        self.status = if now == Failed && status == Transaction { Failed } else { status };
        text
    }
}

const BEGIN: &str = "BEGIN; -- in the place of what is not in the script\n";
const COMMIT: &str = "COMMIT; -- in the place of what is not in the script\n";
const ROLLBACK: &str = "ROLLBACK; -- in the place of what is not in the script\n";
/// Makes a transaction block fail.
const FAIL: &str = "SELECT 1 / 0; -- fails in its place, and the transaction with it\n";

/// Whether the server answered ROLLBACK, as it does to COMMIT, too, where the block has failed.
fn rolled_back(outcome: &Outcome<'_>) -> bool {
    matches!(outcome, Outcome::Complete { tag } if **tag == *b"ROLLBACK")
}

impl Scripts {
    fn record(&mut self, record: &Record<'_>) {
        match record {
            Record::Clock(clock) => self.utc.clock = Some(*clock),
            Record::SessionStart(start) => {
                self.starts.insert(start.session, start.clone().into_owned());
            }
            Record::Frontend(r)
                if self.protocol == Protocol::Postgres && r.message.first() == Some(&frontend::COPY_DATA) =>
            {
                let copy = self.copies.entry(r.session).or_default();
                let data = &r.message[Header::SIZE.min(r.message.len())..];
                copy.len += data.len() as u64;
                if copy.data.len() + data.len() <= COPY_BYTES_MAX {
                    copy.data.extend_from_slice(data);
                }
            }
            Record::Frontend(r)
                if self.protocol == Protocol::Postgres && r.message.first() == Some(&frontend::COPY_FAIL) =>
            {
                self.copies.entry(r.session).or_default().given_up = true;
            }
            Record::Frontend(r)
                if self.protocol == Protocol::Postgres && r.message.first() == Some(&frontend::COPY_DONE) =>
            {
                self.copies.entry(r.session).or_default().is_over = true;
            }
            Record::Loss(Loss { session: Some(session), direction: Direction::Frontend, .. }) => {
                self.copies.entry(*session).or_default().is_lost = true;
            }
            _ => {}
        }
    }

    /// The server waits for the next request.
    fn ready(&mut self, session: SessionId, status: TransactionStatus) -> Result<(), Error> {
        // Data of a COPY that was lost itself is no other statement's.
        self.copies.remove(&session);
        if self.protocol == Protocol::Postgres {
            let text = self.blocks.entry(session).or_default().ready(status);
            if !text.is_empty() {
                self.file(session)?.write_all(text.as_bytes())?;
            }
        }
        Ok(())
    }

    fn statement(&mut self, statement: &Statement) -> Result<(), Error> {
        let copy = self.copies.remove(&statement.session);
        let mut text = format!(
            "-- {}, {:.3} ms",
            self.utc.timestamp(statement.time_ns),
            statement.end_ns.saturating_sub(statement.time_ns) as f64 / 1e6
        );
        if let Outcome::Error(error) = &statement.outcome {
            text += &format!(", failed with {}", shell::comment(&shown(&error.sqlstate)));
        }
        if statement.outcome == Outcome::Unknown {
            text += ", outcome not known";
        }
        match statement.redaction {
            Redaction::None => {}
            Redaction::Password => text += ", redacted",
            Redaction::Masked => text += ", masked",
        }
        text.push('\n');
        let script = if self.goes_on(statement) {
            Err("more rows of a portal before".into())
        } else {
            script(self.protocol, statement, copy.as_ref())
        };
        let sent = statement.text.as_deref().unwrap_or_default();
        let block = match self.protocol {
            Protocol::Postgres => Some(self.blocks.entry(statement.session).or_default()),
            Protocol::Mysql => None,
        };
        match script {
            Ok(sql) => {
                text += &sql;
                self.summary.statements += 1;
                if let Some(block) = block {
                    block.written(sent, &statement.outcome);
                }
            }
            Err(why) => {
                text += &format!("-- left out: {}\n", shell::comment(&why));
                self.summary.left_out += 1;
                if let Some(block) = block {
                    text += block.left_out(sent, &statement.outcome);
                }
            }
        }
        let file = self.file(statement.session)?;
        file.write_all(text.as_bytes())?;
        Ok(())
    }

    /// Whether it asks a portal for further rows. A client may have several, and do other things between.
    fn goes_on(&mut self, statement: &Statement) -> bool {
        let portals = self.suspended.entry(statement.session).or_default();
        portals.retain(|portal| portal.strong_count() > 0);
        let parameters = Arc::as_ptr(&statement.parameters);
        let known = portals.iter().any(|portal| std::ptr::eq(portal.as_ptr(), parameters));
        if !known && matches!(statement.outcome, Outcome::Suspended) {
            portals.push(Arc::downgrade(&statement.parameters));
        }
        known
    }

    fn file(&mut self, session: SessionId) -> Result<&mut BufWriter<File>, Error> {
        if self.files.len() >= FILES_MAX
            && !self.files.contains_key(&session)
            && let Some((_, mut file)) = self.files.pop_first()
        {
            file.flush()?;
        }
        match self.files.entry(session) {
            std::collections::btree_map::Entry::Occupied(file) => Ok(file.into_mut()),
            std::collections::btree_map::Entry::Vacant(place) => {
                let path = self.directory.join(format!("session-{:06}.sql", session.0));
                let is_new = !path.exists();
                let mut options = crate::private();
                let file = options.create(true).append(true).open(&path).map_err(Error::io(&path))?;
                let mut file = BufWriter::new(file);
                if is_new {
                    self.summary.files += 1;
                    file.write_all(head(self.starts.get(&session)).as_bytes())?;
                }
                Ok(place.insert(file))
            }
        }
    }

    fn end(&mut self, session: SessionId) -> Result<(), Error> {
        self.starts.remove(&session);
        self.copies.remove(&session);
        self.blocks.remove(&session);
        self.suspended.remove(&session);
        if let Some(mut file) = self.files.remove(&session) {
            file.flush()?;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Summary, Error> {
        for file in self.files.values_mut() {
            file.flush()?;
        }
        Ok(self.summary)
    }
}

/// Who it was. A name may hold anything, also a line end.
fn head(start: Option<&SessionStart<'_>>) -> String {
    let Some(start) = start else { return "-- a session whose start is not in the trace\n".to_owned() };
    let name = |bytes: &Option<underpass_trace::Bytes<'_>>| {
        bytes.as_ref().map_or_else(|| "unknown".to_owned(), |bytes| shell::comment(&shown(bytes)))
    };
    let joined = if start.midstream { ", joined in its middle" } else { "" };
    format!(
        "-- database {}, user {}, application {}{joined}\n",
        name(&start.database),
        name(&start.user),
        name(&start.application_name)
    )
}

/// The statement for psql or its like, or why there is none.
fn script(protocol: Protocol, statement: &Statement, copy: Option<&Copy>) -> Result<String, String> {
    match statement.kind {
        Request::Simple | Request::Extended => {}
        Request::Function => return Err("FunctionCall has no SQL".into()),
        Request::Prepare => {
            return Err("it was refused before it ran, as it was parsed, bound or described".into());
        }
        Request::Commit => return Err("the commit at the end of a transaction without a block".into()),
    }
    if statement.redaction == Redaction::Password {
        return Err("a password in it was overwritten, and would be set to that".into());
    }
    let bytes = statement.text.as_deref().ok_or("its text is not known: prepared before recording began")?;
    let text = std::str::from_utf8(bytes).map_err(|_| "its text is not UTF-8")?;
    let text = text.trim_end().trim_end_matches(';');
    if text.trim().is_empty() {
        return Err("an empty statement".into());
    }
    if protocol == Protocol::Mysql {
        return mysql::script(statement, text);
    }
    let shell::Safe { text, several } = shell::psql(text)?;
    if several && statement.kind == Request::Extended {
        return Err("several statements in one that is prepared, which the server refuses".into());
    }
    if rolled_back(&statement.outcome)
        && let [step] = &block::steps(text.as_bytes())[..]
    {
        match step.effect {
            Effect::Ends { commits: true } => return Ok("ROLLBACK; -- that is what it did\n".into()),
            Effect::Chains { commits: true } => {
                return Ok("ROLLBACK AND CHAIN; -- that is what it did\n".into());
            }
            _ => {}
        }
    }
    let shape = strip_literals(text.as_bytes(), protocol);
    if shape.split(|&byte| byte == b';').any(copies_in) {
        // Without its data, psql would take the rest of the script for it.
        return match (copy, &statement.outcome) {
            _ if shape.contains(&b';') => Err("a COPY in a text of several statements".into()),
            (Some(Copy { given_up: true, .. }), _) => Err("a COPY that its client gave up".into()),
            (Some(_), Outcome::Error(error)) => {
                Err(format!("a COPY that failed with {}", shown(&error.sqlstate)))
            }
            (Some(Copy { is_lost: true, .. }), _) => Err("a COPY of whose data some may be lost".into()),
            (Some(Copy { is_over: false, .. }), Outcome::Unknown) => {
                Err("a COPY whose end is not in the trace".into())
            }
            (Some(copy), _) => copy_script(&text, copy),
            (None, Outcome::Complete { tag }) if **tag == *b"COPY 0" => copy_script(&text, &Copy::default()),
            (None, Outcome::Complete { .. }) => Err("a COPY whose data is not in the trace".into()),
            (None, Outcome::Unknown) => Err("a COPY whose data and end are not in the trace".into()),
            (None, _) => Err("a COPY that failed before it got its data".into()),
        };
    }
    let parameters = &statement.parameters;
    if parameters.values.is_empty() {
        // On a line of its own: the text may end in a comment.
        return Ok(format!("{text}\n;\n"));
    }
    if !is_preparable(&shape) {
        return Err("a statement with parameters that PREPARE does not take".into());
    }
    let mut values = Vec::new();
    for (at, value) in parameters.values.iter().enumerate() {
        let type_oid = parameters.types.get(at).copied().unwrap_or(0);
        values.push(match value {
            None => "NULL".to_owned(),
            Some(bytes) => {
                let value = text_of(bytes, parameters.format(at), type_oid).ok_or_else(|| {
                    format!("parameter ${} is binary, of a type that the client did not name", at + 1)
                })?;
                if value.contains('\0') {
                    return Err(format!("parameter ${} has a NUL", at + 1));
                }
                literal(&value)
            }
        });
    }
    let types: Vec<String> = (0..parameters.values.len())
        .map(|at| type_name(parameters.types.get(at).copied().unwrap_or(0)))
        .collect();
    // A name of its own: DEALLOCATE fails in a transaction that has failed, and the next statement must not execute this one.
    let name = format!("underpass_{}", statement.request);
    Ok(format!(
        "PREPARE {name} ({}) AS {text}\n;\nEXECUTE {name} ({});\nDEALLOCATE {name};\n",
        types.join(", "),
        values.join(", ")
    ))
}

/// What may follow `PREPARE ... AS` (manual, PREPARE): first words of queries and of changes to rows.
const PREPARABLE: &[&[u8]] =
    &[b"select", b"insert", b"update", b"delete", b"merge", b"values", b"with", b"table"];

/// Whether SQL's PREPARE takes a statement without literals and comments. Parse takes more: CALL, EXPLAIN, DECLARE.
fn is_preparable(shape: &[u8]) -> bool {
    let shape = shape.trim_ascii();
    let word = shape.split(|&byte| !is_in_name(byte)).next().unwrap_or_default();
    shape.starts_with(b"(") || PREPARABLE.iter().any(|verb| word.eq_ignore_ascii_case(verb))
}

/// Whether a statement without literals and comments is `COPY ... FROM STDIN`.
fn copies_in(shape: &[u8]) -> bool {
    let Some((verb, rest)) = shape.trim_ascii().split_at_checked(b"copy".len()) else { return false };
    // What a bracket follows is a query, and goes out.
    let is_table = rest.first().is_some_and(u8::is_ascii_whitespace) && !rest.trim_ascii().starts_with(b"(");
    if !verb.eq_ignore_ascii_case(b"copy") || !is_table {
        return false;
    }
    let words: Vec<&[u8]> = rest.split(|&byte| !is_in_name(byte)).filter(|word| !word.is_empty()).collect();
    words.windows(2).any(|two| two[0].eq_ignore_ascii_case(b"from") && two[1].eq_ignore_ascii_case(b"stdin"))
}

fn is_in_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

fn copy_script(text: &str, copy: &Copy) -> Result<String, String> {
    if copy.len > copy.data.len() as u64 {
        return Err(format!("COPY of {} bytes", copy.len));
    }
    let data = std::str::from_utf8(&copy.data).map_err(|_| "COPY of binary data")?;
    let data = shell::copy_data(data)?;
    let end = if data.is_empty() || data.ends_with('\n') { "" } else { "\n" };
    // Of a COPY that the server refuses, psql would run the data as commands.
    Ok(format!(
        "\\set underpass_stop :ON_ERROR_STOP\n\\set ON_ERROR_STOP on\n{text}\n;\n{data}{end}\\.\n\
         \\set ON_ERROR_STOP :underpass_stop\n"
    ))
}

/// A literal that means the same whatever `standard_conforming_strings` says.
fn literal(text: &str) -> String {
    let quoted = text.replace('\'', "''");
    if quoted.contains('\\') { format!("E'{}'", quoted.replace('\\', "\\\\")) } else { format!("'{quoted}'") }
}

/// A type by its OID. `unknown` lets the server find out, as OID 0 did.
fn type_name(oid: u32) -> String {
    match oid {
        16 => "boolean",
        17 => "bytea",
        20 => "bigint",
        21 => "smallint",
        23 => "integer",
        25 => "text",
        700 => "real",
        701 => "double precision",
        1042 => "character",
        1043 => "character varying",
        1082 => "date",
        1114 => "timestamp",
        1184 => "timestamptz",
        1700 => "numeric",
        2950 => "uuid",
        114 => "json",
        3802 => "jsonb",
        _ => "unknown",
    }
    .to_owned()
}
