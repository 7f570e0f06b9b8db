// SPDX-License-Identifier: Apache-2.0
//! Parquet: a directory with the tables `statements`, `sessions` and `losses`.
//!
//! `statements` is partitioned by day and hour (`statements/date=2026-03-01/hour=13/part-00000.parquet`), the way
//! that Hive, DuckDB, Spark and DataFusion understand; so a capture of any size can be asked with what fits in
//! memory:
//!
//! ```sql
//! select text, count(*), avg(latency_ns) / 1e6 as ms
//! from read_parquet('export/statements/**/*.parquet', hive_partitioning = true)
//! where date = '2026-03-01' group by text order by 2 desc limit 10;
//! ```

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::builder::{
    BooleanBuilder, Int32Builder, Int64Builder, ListBuilder, StringBuilder, TimestampMicrosecondBuilder,
};
use arrow_array::{ArrayRef, RecordBatch};
use arrow_schema::{DataType, Field, Schema, SchemaRef, TimeUnit};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use underpass_trace::statements::{Event, Request, Statement, Statements};
use underpass_trace::{Loss, Outcome, Reader, Record, Redaction, SessionEnd, SessionId, SessionStart};

use crate::{Error, Utc, shown, text_of, value};

/// Rows that are collected before they are given to the library.
const BATCH_ROWS: usize = 8_192;
/// Bytes of text in such a batch, at most: one statement may have megabytes.
const BATCH_BYTES: usize = 32 << 20;
/// Bytes of a row group, about: the library keeps them in memory until the group is whole, up to a million rows.
const ROW_GROUP_BYTES: usize = 64 << 20;
/// Rows of a file. Parts of a day stay of a size that many workers can share.
const FILE_ROWS: u64 = 5_000_000;
/// Hours whose files are open at a time: a statement that began before the hour ended later.
const OPEN_HOURS_MAX: usize = 4;

/// What was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Rows of `statements`.
    pub statements: u64,
    /// Rows of `sessions`.
    pub sessions: u64,
    /// Rows of `losses`.
    pub losses: u64,
    /// Parquet files.
    pub files: u64,
    /// Records of the trace that were malformed and passed over.
    pub malformed: u64,
}

/// Writes a trace as Parquet into a new directory.
///
/// # Errors
/// The directory exists, a file cannot be written, or the trace cannot be read.
pub fn export(reader: &mut Reader, directory: &Path) -> Result<Summary, Error> {
    crate::new_directory(directory)?;
    let mut export = Export::new(directory, reader.meta().protocol);
    let mut events = Vec::new();
    loop {
        match reader.next() {
            Ok(Some(record)) => export.record(&record, &mut events)?,
            Ok(None) => break,
            Err(underpass_trace::Error::Record { .. }) => export.summary.malformed += 1,
            Err(error) => return Err(error.into()),
        }
    }
    export.finish()
}

struct Export {
    directory: PathBuf,
    utc: Utc,
    assembler: Statements,
    open: BTreeMap<SessionId, SessionStart<'static>>,
    hours: BTreeMap<(String, i8), Table<StatementRows>>,
    parts: BTreeMap<(String, i8), u32>,
    sessions: Option<Table<SessionRows>>,
    losses: Option<Table<LossRows>>,
    summary: Summary,
}

impl Export {
    fn new(directory: &Path, protocol: underpass_trace::Protocol) -> Self {
        Self {
            directory: directory.to_owned(),
            utc: Utc::default(),
            assembler: Statements::new(protocol),
            open: BTreeMap::new(),
            hours: BTreeMap::new(),
            parts: BTreeMap::new(),
            sessions: None,
            losses: None,
            summary: Summary::default(),
        }
    }

    fn record(&mut self, record: &Record<'_>, events: &mut Vec<Event>) -> Result<(), Error> {
        self.assembler.push(record, events);
        for event in &*events {
            if let Event::Statement(statement) = event {
                self.statement(statement)?;
            }
        }
        match record {
            Record::Clock(clock) => self.utc.clock = Some(*clock),
            Record::SessionStart(start) => {
                self.open.insert(start.session, start.clone().into_owned());
            }
            Record::SessionEnd(end) => {
                if let Some(start) = self.open.remove(&end.session) {
                    self.session(&start, Some(end))?;
                }
            }
            Record::Loss(loss) => {
                if self.losses.is_none() {
                    self.losses = Some(self.table("losses", 0)?);
                }
                let utc = self.utc;
                if let Some(losses) = &mut self.losses {
                    losses.rows.push(loss, utc);
                    losses.flush_if_full()?;
                    self.summary.losses += 1;
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn statement(&mut self, statement: &Statement) -> Result<(), Error> {
        let time = self.utc.timestamp(statement.time_ns).to_zoned(jiff::tz::TimeZone::UTC);
        let hour = (time.strftime("%Y-%m-%d").to_string(), time.hour());
        if !self.hours.contains_key(&hour) {
            if self.hours.len() >= OPEN_HOURS_MAX
                && let Some((_, oldest)) = self.hours.pop_first()
            {
                oldest.close(&mut self.summary)?;
            }
            let folder = format!("statements/date={}/hour={:02}", hour.0, hour.1);
            let part = self.parts.entry(hour.clone()).or_default();
            let number = *part;
            *part += 1;
            let table = self.table(&folder, number)?;
            self.hours.insert(hour.clone(), table);
        }
        let session = self.open.get(&statement.session);
        let utc = self.utc;
        let Some(table) = self.hours.get_mut(&hour) else { return Ok(()) };
        table.rows.push(statement, session, utc);
        table.flush_if_full()?;
        self.summary.statements += 1;
        if table.written >= FILE_ROWS
            && let Some(full) = self.hours.remove(&hour)
        {
            full.close(&mut self.summary)?;
        }
        Ok(())
    }

    fn session(&mut self, start: &SessionStart<'_>, end: Option<&SessionEnd>) -> Result<(), Error> {
        if self.sessions.is_none() {
            self.sessions = Some(self.table("sessions", 0)?);
        }
        let utc = self.utc;
        let Some(sessions) = &mut self.sessions else { return Ok(()) };
        sessions.rows.push(start, end, utc);
        sessions.flush_if_full()?;
        self.summary.sessions += 1;
        Ok(())
    }

    fn table<R: Rows>(&self, folder: &str, part: u32) -> Result<Table<R>, Error> {
        let folder = self.directory.join(folder);
        std::fs::create_dir_all(&folder).map_err(Error::io(&folder))?;
        Table::create(folder.join(format!("part-{part:05}.parquet")))
    }

    fn finish(mut self) -> Result<Summary, Error> {
        for start in std::mem::take(&mut self.open).into_values() {
            self.session(&start, None)?;
        }
        let mut summary = self.summary;
        for table in self.hours.into_values() {
            table.close(&mut summary)?;
        }
        if let Some(sessions) = self.sessions {
            sessions.close(&mut summary)?;
        }
        if let Some(losses) = self.losses {
            losses.close(&mut summary)?;
        }
        Ok(summary)
    }
}

/// Rows that are collected column by column.
trait Rows {
    fn new() -> Self;
    fn schema() -> SchemaRef;
    /// Rows so far, and bytes of text in them.
    fn size(&self) -> (usize, usize);
    fn take(&mut self) -> Vec<ArrayRef>;
}

/// One Parquet file.
struct Table<R> {
    path: PathBuf,
    writer: ArrowWriter<File>,
    rows: R,
    written: u64,
}

impl<R: Rows> Table<R> {
    fn create(path: PathBuf) -> Result<Self, Error> {
        let mut options = crate::private();
        let file = options.write(true).create_new(true).open(&path).map_err(Error::io(&path))?;
        let failed = |source| Error::Parquet { path: path.clone(), source };
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::try_new(3).map_err(failed)?))
            .set_max_row_group_bytes(Some(ROW_GROUP_BYTES))
            .build();
        let writer = ArrowWriter::try_new(file, R::schema(), Some(properties)).map_err(failed)?;
        Ok(Self { path, writer, rows: R::new(), written: 0 })
    }

    fn flush_if_full(&mut self) -> Result<(), Error> {
        let (rows, bytes) = self.rows.size();
        if rows >= BATCH_ROWS || bytes >= BATCH_BYTES { self.flush() } else { Ok(()) }
    }

    fn flush(&mut self) -> Result<(), Error> {
        let rows = self.rows.size().0;
        let failed = |source: ParquetError| Error::Parquet { path: self.path.clone(), source };
        let batch = RecordBatch::try_new(R::schema(), self.rows.take())
            .map_err(|error| failed(ParquetError::from(error)))?;
        self.writer.write(&batch).map_err(failed)?;
        self.written += rows as u64;
        Ok(())
    }

    fn close(mut self, summary: &mut Summary) -> Result<(), Error> {
        self.flush()?;
        let path = self.path;
        self.writer.close().map_err(|source| Error::Parquet { path, source })?;
        summary.files += 1;
        Ok(())
    }
}

fn schema(fields: &[(&str, DataType, bool)]) -> SchemaRef {
    let fields =
        fields.iter().map(|(name, data_type, nullable)| Field::new(*name, data_type.clone(), *nullable));
    Arc::new(Schema::new(fields.collect::<Vec<_>>()))
}

fn timestamp() -> DataType {
    DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()))
}

fn timestamps() -> TimestampMicrosecondBuilder {
    TimestampMicrosecondBuilder::new().with_timezone("UTC")
}

/// Numbers of a trace are below 2^63 wherever they are real; Spark has no unsigned ones.
fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

struct StatementRows {
    session: Int64Builder,
    request: Int64Builder,
    time: TimestampMicrosecondBuilder,
    latency_ns: Int64Builder,
    first_byte_ns: Int64Builder,
    kind: StringBuilder,
    name: StringBuilder,
    text: StringBuilder,
    parameters: ListBuilder<StringBuilder>,
    rows: Int64Builder,
    bytes: Int64Builder,
    answers: Int32Builder,
    tag: StringBuilder,
    sqlstate: StringBuilder,
    error: StringBuilder,
    redaction: StringBuilder,
    database: StringBuilder,
    user: StringBuilder,
    application_name: StringBuilder,
}

impl StatementRows {
    fn push(&mut self, statement: &Statement, session: Option<&SessionStart<'_>>, utc: Utc) {
        self.session.append_value(signed(statement.session.0));
        self.request.append_value(signed(statement.request));
        self.time.append_value(utc.ns(statement.time_ns) / 1_000);
        self.latency_ns.append_value(signed(statement.end_ns.saturating_sub(statement.time_ns)));
        self.first_byte_ns.append_value(signed(statement.first_ns.saturating_sub(statement.time_ns)));
        self.kind.append_value(match statement.kind {
            Request::Simple => "simple",
            Request::Extended => "extended",
            Request::Function => "function",
            Request::Prepare => "prepare",
            Request::Commit => "commit",
        });
        self.name.append_value(shown(&statement.name));
        self.text.append_option(statement.text.as_deref().map(shown));
        let parameters = &statement.parameters;
        for (at, parameter) in parameters.values.iter().enumerate() {
            let type_oid = parameters.types.get(at).copied().unwrap_or(0);
            let text = parameter.as_ref().map(|bytes| {
                text_of(bytes, parameters.format(at), type_oid).unwrap_or_else(|| value::hex(bytes))
            });
            self.parameters.values().append_option(text);
        }
        self.parameters.append(true);
        self.rows.append_value(signed(statement.rows));
        self.bytes.append_value(signed(statement.bytes));
        self.answers.append_value(i32::try_from(statement.answers).unwrap_or(i32::MAX));
        let (mut tag, mut error) = (None, None);
        match &statement.outcome {
            Outcome::Complete { tag: text } => tag = Some(shown(text)),
            Outcome::Empty => tag = Some(String::new()),
            Outcome::Error(outcome) => error = Some(outcome),
            _ => {}
        }
        self.tag.append_option(tag);
        self.sqlstate.append_option(error.map(|error| shown(&error.sqlstate)));
        self.error.append_option(error.map(|error| shown(&error.message)));
        self.redaction.append_value(match statement.redaction {
            Redaction::None => "none",
            Redaction::Password => "password",
            Redaction::Masked => "masked",
        });
        let text = |bytes: Option<&underpass_trace::Bytes<'_>>| bytes.map(|bytes| shown(bytes));
        self.database.append_option(text(session.and_then(|s| s.database.as_ref())));
        self.user.append_option(text(session.and_then(|s| s.user.as_ref())));
        self.application_name.append_option(text(session.and_then(|s| s.application_name.as_ref())));
    }
}

impl Rows for StatementRows {
    fn new() -> Self {
        Self {
            session: Int64Builder::new(),
            request: Int64Builder::new(),
            time: timestamps(),
            latency_ns: Int64Builder::new(),
            first_byte_ns: Int64Builder::new(),
            kind: StringBuilder::new(),
            name: StringBuilder::new(),
            text: StringBuilder::new(),
            parameters: ListBuilder::new(StringBuilder::new()),
            rows: Int64Builder::new(),
            bytes: Int64Builder::new(),
            answers: Int32Builder::new(),
            tag: StringBuilder::new(),
            sqlstate: StringBuilder::new(),
            error: StringBuilder::new(),
            redaction: StringBuilder::new(),
            database: StringBuilder::new(),
            user: StringBuilder::new(),
            application_name: StringBuilder::new(),
        }
    }

    fn schema() -> SchemaRef {
        let list = DataType::List(Arc::new(Field::new("item", DataType::Utf8, true)));
        schema(&[
            ("session", DataType::Int64, false),
            ("request", DataType::Int64, false),
            ("time", timestamp(), false),
            ("latency_ns", DataType::Int64, false),
            ("first_byte_ns", DataType::Int64, false),
            ("kind", DataType::Utf8, false),
            ("name", DataType::Utf8, false),
            ("text", DataType::Utf8, true),
            ("parameters", list, false),
            ("rows", DataType::Int64, false),
            ("bytes", DataType::Int64, false),
            ("answers", DataType::Int32, false),
            ("tag", DataType::Utf8, true),
            ("sqlstate", DataType::Utf8, true),
            ("error", DataType::Utf8, true),
            ("redaction", DataType::Utf8, false),
            ("database", DataType::Utf8, true),
            ("user", DataType::Utf8, true),
            ("application_name", DataType::Utf8, true),
        ])
    }

    fn size(&self) -> (usize, usize) {
        use arrow_array::builder::ArrayBuilder as _;
        let texts = [
            &self.name,
            &self.text,
            self.parameters.values_ref(),
            &self.tag,
            &self.error,
            &self.database,
            &self.user,
            &self.application_name,
        ];
        (self.session.len(), texts.iter().map(|text| text.values_slice().len()).sum())
    }

    fn take(&mut self) -> Vec<ArrayRef> {
        vec![
            Arc::new(self.session.finish()),
            Arc::new(self.request.finish()),
            Arc::new(self.time.finish()),
            Arc::new(self.latency_ns.finish()),
            Arc::new(self.first_byte_ns.finish()),
            Arc::new(self.kind.finish()),
            Arc::new(self.name.finish()),
            Arc::new(self.text.finish()),
            Arc::new(self.parameters.finish()),
            Arc::new(self.rows.finish()),
            Arc::new(self.bytes.finish()),
            Arc::new(self.answers.finish()),
            Arc::new(self.tag.finish()),
            Arc::new(self.sqlstate.finish()),
            Arc::new(self.error.finish()),
            Arc::new(self.redaction.finish()),
            Arc::new(self.database.finish()),
            Arc::new(self.user.finish()),
            Arc::new(self.application_name.finish()),
        ]
    }
}

struct SessionRows {
    session: Int64Builder,
    times: [TimestampMicrosecondBuilder; 2],
    texts: [StringBuilder; 7],
    backend_pid: Int64Builder,
    midstream: BooleanBuilder,
    login_failed: BooleanBuilder,
    /// seen, recorded, lost, withheld; frontend then backend.
    bytes: [Int64Builder; 8],
}

impl SessionRows {
    fn push(&mut self, start: &SessionStart<'_>, end: Option<&SessionEnd>, utc: Utc) {
        self.session.append_value(signed(start.session.0));
        self.times[0].append_value(utc.ns(start.time_ns) / 1_000);
        self.times[1].append_option(end.map(|end| utc.ns(end.time_ns) / 1_000));
        let text = |bytes: &Option<underpass_trace::Bytes<'_>>| bytes.as_ref().map(|bytes| shown(bytes));
        let word = |word: Option<serde_json::Value>| word.and_then(|word| word.as_str().map(str::to_owned));
        let texts = [
            text(&start.database),
            text(&start.user),
            text(&start.application_name),
            start.peer.map(|peer| peer.to_string()),
            word(serde_json::to_value(start.transport).ok()),
            word(serde_json::to_value(start.source).ok()),
            word(end.and_then(|end| serde_json::to_value(end.reason).ok())),
        ];
        for (builder, text) in self.texts.iter_mut().zip(texts) {
            builder.append_option(text);
        }
        self.backend_pid.append_option(start.backend_pid.map(i64::from));
        self.midstream.append_value(start.midstream);
        self.login_failed.append_value(!start.midstream && start.ready_ns.is_none());
        let totals = end.map(|end| {
            let of = |totals: underpass_trace::ByteTotals| {
                [totals.seen, totals.recorded, totals.lost, totals.withheld]
            };
            [of(end.frontend), of(end.backend)].concat()
        });
        for (at, builder) in self.bytes.iter_mut().enumerate() {
            builder.append_option(totals.as_ref().map(|totals| signed(totals[at])));
        }
    }
}

impl Rows for SessionRows {
    fn new() -> Self {
        Self {
            session: Int64Builder::new(),
            times: std::array::from_fn(|_| timestamps()),
            texts: std::array::from_fn(|_| StringBuilder::new()),
            backend_pid: Int64Builder::new(),
            midstream: BooleanBuilder::new(),
            login_failed: BooleanBuilder::new(),
            bytes: std::array::from_fn(|_| Int64Builder::new()),
        }
    }

    fn schema() -> SchemaRef {
        let mut fields = vec![
            ("session", DataType::Int64, false),
            ("start", timestamp(), false),
            ("end", timestamp(), true),
        ];
        for name in ["database", "user", "application_name", "peer", "transport", "source", "end_reason"] {
            fields.push((name, DataType::Utf8, true));
        }
        fields.push(("backend_pid", DataType::Int64, true));
        fields.push(("midstream", DataType::Boolean, false));
        fields.push(("login_failed", DataType::Boolean, false));
        for name in [
            "frontend_seen",
            "frontend_recorded",
            "frontend_lost",
            "frontend_withheld",
            "backend_seen",
            "backend_recorded",
            "backend_lost",
            "backend_withheld",
        ] {
            fields.push((name, DataType::Int64, true));
        }
        schema(&fields)
    }

    fn size(&self) -> (usize, usize) {
        use arrow_array::builder::ArrayBuilder as _;
        (self.session.len(), self.texts.iter().map(|text| text.values_slice().len()).sum())
    }

    fn take(&mut self) -> Vec<ArrayRef> {
        let mut columns: Vec<ArrayRef> = vec![Arc::new(self.session.finish())];
        columns.extend(self.times.iter_mut().map(|times| Arc::new(times.finish()) as ArrayRef));
        columns.extend(self.texts.iter_mut().map(|texts| Arc::new(texts.finish()) as ArrayRef));
        columns.push(Arc::new(self.backend_pid.finish()));
        columns.push(Arc::new(self.midstream.finish()));
        columns.push(Arc::new(self.login_failed.finish()));
        columns.extend(self.bytes.iter_mut().map(|bytes| Arc::new(bytes.finish()) as ArrayRef));
        columns
    }
}

struct LossRows {
    session: Int64Builder,
    time: TimestampMicrosecondBuilder,
    direction: StringBuilder,
    offset: Int64Builder,
    len: Int64Builder,
    reason: StringBuilder,
}

impl LossRows {
    fn push(&mut self, loss: &Loss, utc: Utc) {
        let word = |word: Result<serde_json::Value, _>| {
            word.ok().and_then(|word: serde_json::Value| word.as_str().map(str::to_owned)).unwrap_or_default()
        };
        self.session.append_option(loss.session.map(|session| signed(session.0)));
        self.time.append_value(utc.ns(loss.time_ns) / 1_000);
        self.direction.append_value(word(serde_json::to_value(loss.direction)));
        self.offset.append_value(signed(loss.offset));
        self.len.append_value(signed(loss.len));
        self.reason.append_value(word(serde_json::to_value(loss.reason)));
    }
}

impl Rows for LossRows {
    fn new() -> Self {
        Self {
            session: Int64Builder::new(),
            time: timestamps(),
            direction: StringBuilder::new(),
            offset: Int64Builder::new(),
            len: Int64Builder::new(),
            reason: StringBuilder::new(),
        }
    }

    fn schema() -> SchemaRef {
        schema(&[
            ("session", DataType::Int64, true),
            ("time", timestamp(), false),
            ("direction", DataType::Utf8, false),
            ("offset", DataType::Int64, false),
            ("len", DataType::Int64, false),
            ("reason", DataType::Utf8, false),
        ])
    }

    fn size(&self) -> (usize, usize) {
        use arrow_array::builder::ArrayBuilder as _;
        (self.session.len(), 0)
    }

    fn take(&mut self) -> Vec<ArrayRef> {
        vec![
            Arc::new(self.session.finish()),
            Arc::new(self.time.finish()),
            Arc::new(self.direction.finish()),
            Arc::new(self.offset.finish()),
            Arc::new(self.len.finish()),
            Arc::new(self.reason.finish()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn statement(text: String, outcome: Outcome<'static>) -> Statement {
        Statement {
            session: SessionId(1),
            request: 0,
            kind: Request::Simple,
            text: Some(text.into_bytes().into()),
            name: Arc::default(),
            parameters: Arc::default(),
            max_rows: 0,
            time_ns: 0,
            first_ns: 0,
            end_ns: 0,
            rows: 0,
            bytes: 0,
            answers: 1,
            outcome,
            redaction: Redaction::None,
        }
    }

    /// Letters that no compression makes much shorter.
    fn noise(len: usize) -> String {
        const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let letter = |_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            char::from(LETTERS[(state >> 58) as usize])
        };
        (0..len).map(letter).collect()
    }

    #[test]
    fn long_texts_are_written_before_a_million_of_them_are_in_memory() {
        let folder = tempfile::tempdir().unwrap();
        let mut table = Table::<StatementRows>::create(folder.path().join("part.parquet")).unwrap();
        let noise = noise(4 << 20);
        let mut most = 0;
        for number in 0..48 {
            // Each begins elsewhere, so that no two are equal.
            let text = [&noise[number..], &noise[..number]].concat();
            table.rows.push(&statement(text, Outcome::Empty), None, Utc::default());
            table.flush_if_full().unwrap();
            most = most.max(table.writer.memory_size());
        }
        assert!(most <= ROW_GROUP_BYTES + BATCH_BYTES, "{most} bytes in memory");
        table.flush().unwrap();
        let groups = table.writer.flushed_row_groups();
        let rows: i64 = groups.iter().map(|group| group.num_rows()).sum();
        assert!(groups.len() >= 2, "{} groups", groups.len());
        assert_eq!(rows + table.writer.in_progress_rows() as i64, 48);
        table.close(&mut Summary::default()).unwrap();
    }

    #[test]
    fn every_long_text_of_a_row_fills_its_batch() {
        let folder = tempfile::tempdir().unwrap();
        let mut table = Table::<StatementRows>::create(folder.path().join("part.parquet")).unwrap();
        let message = vec![b'x'; BATCH_BYTES / 2];
        for rows in [0, 2] {
            let failed = underpass_trace::ErrorOutcome {
                sqlstate: *b"P0001",
                fatal: false,
                message: message.clone().into(),
            };
            table.rows.push(&statement("do $$ $$".to_owned(), Outcome::Error(failed)), None, Utc::default());
            table.flush_if_full().unwrap();
            assert_eq!(table.writer.in_progress_rows(), rows);
        }
    }
}
