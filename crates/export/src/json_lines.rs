// SPDX-License-Identifier: Apache-2.0
//! JSON lines: first what the trace says about itself, then every record as one object, nothing left out.
//!
//! Byte strings are JSON strings where they are UTF-8; otherwise their key ends in `_base64`. Messages of the PostgreSQL
//! protocol are taken apart, of MySQL's only texts, so that `jq 'select(.type == "Query") | .query'` works.

use std::io::Write;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};
use underpass_trace::statements::LocalFiles;
use underpass_trace::{ByteTotals, Outcome, Protocol, Reader, Record, SessionStart, TransactionStatus};
use underpass_wire::frontend::{Message, Target};
use underpass_wire::{Header, tag};

use crate::{Error, Utc, mysql};

/// What was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Records.
    pub records: u64,
    /// Records of the trace that were malformed and passed over.
    pub malformed: u64,
}

/// Writes a trace as JSON lines.
///
/// # Errors
/// The trace cannot be read, or the stream not written.
pub fn export(reader: &mut Reader, out: &mut dyn Write) -> Result<Summary, Error> {
    let protocol = reader.meta().protocol;
    let meta = json!({ "kind": "meta", "meta": reader.meta() });
    writeln!(out, "{meta}")?;
    let mut utc = Utc::default();
    let mut files = LocalFiles::default();
    let mut summary = Summary::default();
    loop {
        match reader.next() {
            Ok(Some(record)) => {
                if let Record::Clock(clock) = record {
                    utc.clock = Some(clock);
                }
                let says = match protocol {
                    Protocol::Postgres => Says::Postgres,
                    Protocol::Mysql if files.push(&record) => Says::File,
                    Protocol::Mysql => Says::Mysql,
                };
                serde_json::to_writer(&mut *out, &object(&record, utc, says))
                    .map_err(std::io::Error::from)?;
                out.write_all(b"\n")?;
                summary.records += 1;
            }
            Ok(None) => {
                // What a buffer still holds may find the disk full, and its drop would not tell.
                out.flush()?;
                return Ok(summary);
            }
            Err(underpass_trace::Error::Record { .. }) => summary.malformed += 1,
            Err(error) => return Err(error.into()),
        }
    }
}

/// What a message of a record is to be read as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Says {
    Postgres,
    Mysql,
    /// A part of a local file, in MySQL's protocol.
    File,
}

/// An object that is put together.
struct Object(Map<String, Value>);

impl Object {
    fn put(&mut self, key: &str, value: impl Into<Value>) -> &mut Self {
        self.0.insert(key.to_owned(), value.into());
        self
    }

    fn bytes(&mut self, key: &str, bytes: &[u8]) -> &mut Self {
        match std::str::from_utf8(bytes) {
            Ok(text) => self.put(key, text),
            Err(_) => self.put(&format!("{key}_base64"), STANDARD.encode(bytes)),
        }
    }

    fn optional_bytes(&mut self, key: &str, bytes: Option<&[u8]>) -> &mut Self {
        match bytes {
            Some(bytes) => self.bytes(key, bytes),
            None => self.put(key, Value::Null),
        }
    }

    /// One of the model's words, as it is in META.
    fn word(&mut self, key: &str, word: impl serde::Serialize) -> &mut Self {
        self.put(key, serde_json::to_value(word).unwrap_or(Value::Null))
    }
}

fn object(record: &Record<'_>, utc: Utc, says: Says) -> Value {
    let mut o = Object(Map::new());
    o.put("kind", kind(record));
    if let Some(session) = record.session() {
        o.put("session", session.0);
    }
    o.put("time_ns", record.time_ns()).put("time", utc.timestamp(record.time_ns()).to_string());
    match record {
        Record::SessionStart(r) => session_start(&mut o, r),
        Record::Frontend(r) => {
            o.put("offset", r.offset).put("len", r.wire_len);
            if r.redaction != underpass_trace::Redaction::None {
                o.word("redaction", r.redaction);
            }
            message(&mut o, &r.message, says, true);
        }
        Record::Response(r) => {
            o.put("request", r.request).put("offset", r.offset).put("len", r.len);
            o.put("first_ns", r.first_ns).put("rows", r.rows);
            match &r.outcome {
                Outcome::Complete { tag } => o.put("outcome", "complete").bytes("tag", tag),
                Outcome::Empty => o.put("outcome", "empty"),
                Outcome::Suspended => o.put("outcome", "suspended"),
                Outcome::Error(error) => o
                    .put("outcome", "error")
                    .bytes("sqlstate", &error.sqlstate)
                    .put("fatal", error.fatal)
                    .bytes("message", &error.message),
                _ => o.put("outcome", "unknown"),
            };
        }
        Record::Ready(r) => {
            o.put("request", r.request).put("offset", r.offset);
            o.put(
                "status",
                match r.status {
                    TransactionStatus::Idle => "idle",
                    TransactionStatus::Transaction => "transaction",
                    TransactionStatus::Failed => "failed",
                },
            );
        }
        Record::Backend(r) => {
            o.put("offset", r.offset);
            message(&mut o, &r.message, says, false);
        }
        Record::ParameterStatus(r) => {
            o.bytes("name", &r.name).bytes("value", &r.value);
        }
        Record::PreparedFill(r) => {
            o.bytes("name", &r.name).bytes("query", &r.query).put("param_types", r.param_types.clone());
        }
        Record::Cancel(r) => {
            o.put("backend_pid", r.backend_pid);
        }
        Record::Withheld(r) => {
            o.word("direction", r.direction)
                .put("offset", r.offset)
                .put("len", r.len)
                .word("reason", r.reason);
        }
        Record::Loss(r) => {
            o.word("direction", r.direction)
                .put("offset", r.offset)
                .put("len", r.len)
                .word("reason", r.reason);
        }
        Record::SessionEnd(r) => {
            let totals = |totals: ByteTotals| serde_json::to_value(totals).unwrap_or(Value::Null);
            o.word("reason", r.reason).put("frontend", totals(r.frontend)).put("backend", totals(r.backend));
        }
        Record::Clock(r) => {
            o.put("realtime_ns", r.realtime_ns);
        }
        Record::Counters(r) => {
            o.word("seen", r.seen)
                .word("recorded", r.recorded)
                .word("lost", r.lost)
                .word("filtered", r.filtered);
        }
        Record::Server(r) => {
            o.bytes("database", &r.database).bytes("address", &r.address).bytes("version", &r.version);
            o.optional_bytes("system_identifier", r.system_identifier.as_deref());
        }
        Record::Note(r) => {
            o.bytes("text", &r.text);
        }
        _ => {}
    }
    Value::Object(o.0)
}

fn kind(record: &Record<'_>) -> &'static str {
    match record {
        Record::SessionStart(_) => "session_start",
        Record::Frontend(_) => "frontend",
        Record::Response(_) => "response",
        Record::Ready(_) => "ready",
        Record::Backend(_) => "backend",
        Record::ParameterStatus(_) => "parameter_status",
        Record::PreparedFill(_) => "prepared_fill",
        Record::Cancel(_) => "cancel",
        Record::Withheld(_) => "withheld",
        Record::Loss(_) => "loss",
        Record::SessionEnd(_) => "session_end",
        Record::Clock(_) => "clock",
        Record::Counters(_) => "counters",
        Record::Server(_) => "server",
        Record::Note(_) => "note",
        _ => "unknown",
    }
}

fn session_start(o: &mut Object, r: &SessionStart<'_>) {
    o.put("ready_ns", r.ready_ns).word("source", r.source).word("transport", r.transport);
    o.put("peer", r.peer.map(|peer| peer.to_string()));
    o.put("backend_pid", r.backend_pid).put("midstream", r.midstream);
    o.put("protocol", format!("{}.{}", r.protocol_version >> 16, r.protocol_version & 0xffff));
    o.optional_bytes("database", r.database.as_deref());
    o.optional_bytes("user", r.user.as_deref());
    o.optional_bytes("application_name", r.application_name.as_deref());
    let mut parameters = Object(Map::new());
    for (name, value) in &r.parameters {
        parameters.bytes(&String::from_utf8_lossy(name), value);
    }
    o.put("parameters", parameters.0);
    o.put("frontend_offset", r.frontend_offset).put("backend_offset", r.backend_offset);
}

/// The fields of a message that this program takes apart, the body of any other.
fn message(o: &mut Object, bytes: &[u8], says: Says, frontend: bool) {
    if says == Says::File {
        o.put("type", "file");
    } else if says == Says::Mysql && frontend {
        match mysql::told(bytes) {
            Some(mysql::Told::Text { name, text }) => {
                o.put("type", name).bytes("query", text);
                return;
            }
            Some(mysql::Told::Command { name, statement }) => {
                o.put("type", name);
                if let Some(number) = statement {
                    o.put("statement", number);
                }
            }
            None => {}
        }
    }
    let header = match (says, Header::parse(bytes)) {
        (Says::Postgres, Ok(Some(header))) if header.total() == bytes.len() => header,
        _ => {
            o.put("message_base64", STANDARD.encode(bytes));
            return;
        }
    };
    let body = &bytes[Header::SIZE..];
    let name = if frontend { tag::frontend::name(header.tag) } else { tag::backend::name(header.tag) };
    o.put("type", name);
    let decoded = if frontend { Message::decode(header.tag, body).ok() } else { None };
    match decoded {
        Some(Message::Query(query)) => o.bytes("query", query.query),
        Some(Message::Parse(parse)) => o
            .bytes("statement", parse.name)
            .bytes("query", parse.query)
            .put("param_types", parse.param_types.collect::<Vec<u32>>()),
        Some(Message::Bind(bind)) => {
            let a = bind.arguments;
            o.bytes("portal", bind.portal).bytes("statement", bind.statement);
            o.put("param_formats", a.param_formats.collect::<Vec<u16>>());
            let values = a.params.map(|value| match value.map(|value| (value, std::str::from_utf8(value))) {
                None => Value::Null,
                Some((_, Ok(text))) => text.into(),
                Some((bytes, Err(_))) => json!({ "base64": STANDARD.encode(bytes) }),
            });
            o.put("params", values.collect::<Vec<Value>>());
            o.put("result_formats", a.result_formats.collect::<Vec<u16>>())
        }
        Some(Message::Execute(execute)) => {
            o.bytes("portal", execute.portal).put("max_rows", execute.max_rows)
        }
        Some(Message::Describe(describe)) => {
            o.put("target", target(describe.target)).bytes("name", describe.name)
        }
        Some(Message::Close(close)) => o.put("target", target(close.target)).bytes("name", close.name),
        Some(Message::CopyData(data)) => o.bytes("data", data.data),
        Some(Message::CopyFail(fail)) => o.bytes("message", fail.message),
        Some(Message::Sync | Message::Flush | Message::Terminate | Message::CopyDone) => o,
        _ => o.put("body_base64", STANDARD.encode(body)),
    };
}

fn target(target: Target) -> &'static str {
    match target {
        Target::Statement => "statement",
        Target::Portal => "portal",
    }
}
