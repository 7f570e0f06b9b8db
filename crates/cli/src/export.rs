// SPDX-License-Identifier: Apache-2.0
//! `underpass export` and `underpass import`: traces and other formats.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args, ValueEnum};
use underpass_export::{csv_log, json_lines, parquet, sql};
use underpass_trace::{Options, Reader, Writer};

/// `underpass export`.
#[derive(Debug, Args)]
pub(crate) struct Export {
    /// The trace: its directory, or one segment of it.
    pub trace: PathBuf,
    /// What to write.
    #[arg(short, long, value_enum)]
    pub format: Format,
    /// Where it goes: a new directory for parquet and sql, a new file for jsonl (`-`, the default: standard output).
    #[arg(short, long, value_name = "PLACE")]
    pub output: Option<PathBuf>,
}

/// What a trace can be exported as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Tables for DuckDB, Spark and DataFusion: statements by day and hour, sessions, losses.
    Parquet,
    /// Every record as a line of JSON; nothing is left out.
    Jsonl,
    /// A script for psql for each session.
    Sql,
}

pub(crate) const EXPORT_HELP: &str = "\
Examples:
  underpass export monday -f parquet -o monday.parquet
  duckdb -c \"select text, count(*), avg(latency_ns) / 1e6 as ms
             from read_parquet('monday.parquet/statements/**/*.parquet') group by text order by 2 desc limit 10\"
  underpass export monday -f jsonl | jq -r 'select(.type == \"Query\") | .query'
  underpass export monday -f sql -o monday.sql && psql -X -f monday.sql/session-000001.sql

Nothing is written over an existing place. Scripts lose what SQL cannot say (pipelines, portals, some binary
parameters; comments tell); `underpass replay` keeps it.";

/// `underpass import`.
#[derive(Debug, Args)]
pub(crate) struct Import {
    /// PostgreSQL CSV logs, oldest first.
    #[arg(required = true, value_name = "LOG")]
    pub logs: Vec<PathBuf>,
    /// The new trace's directory.
    #[arg(short, long, value_name = "DIRECTORY")]
    pub output: PathBuf,
}

pub(crate) const IMPORT_HELP: &str = "\
Example:
  underpass import /var/log/postgresql/postgresql-Mon.csv -o monday && underpass report monday

The server needs log_destination = 'csvlog', lc_messages = 'C' (or other English), and log_min_duration_statement = 0 or
log_statement = 'all' (durations with log_duration = on). With log_disconnections = on sessions have their end, else
they end with their last line. A log is less than a capture: parameters are text, rows and bytes are not known.";

/// Writes the export and says on standard error what it has.
pub(crate) fn export(arguments: &Export) -> anyhow::Result<ExitCode> {
    let mut reader = Reader::open(&arguments.trace)?;
    let place = arguments.output.as_deref();
    let (said, malformed) = match arguments.format {
        Format::Parquet => {
            let done = parquet::export(&mut reader, needed(place)?)?;
            let parquet::Summary { statements, sessions, losses, files, malformed } = done;
            (
                format!("{statements} statements, {sessions} sessions, {losses} losses in {files} files"),
                malformed,
            )
        }
        Format::Sql => {
            let sql::Summary { files, statements, left_out, malformed } =
                sql::export(&mut reader, needed(place)?)?;
            (format!("{statements} statements in {files} scripts, {left_out} left out"), malformed)
        }
        Format::Jsonl => {
            let done = match place.filter(|place| *place != Path::new("-")) {
                None => json_lines::export(&mut reader, &mut BufWriter::new(std::io::stdout().lock())),
                Some(path) => {
                    let mut options = underpass_export::private();
                    let file = options
                        .write(true)
                        .create_new(true)
                        .open(path)
                        .with_context(|| format!("cannot make {}", path.display()))?;
                    json_lines::export(&mut reader, &mut BufWriter::new(file))
                }
            };
            match done {
                // Who reads has seen enough: `| head`.
                Err(underpass_export::Error::Write(error))
                    if error.kind() == std::io::ErrorKind::BrokenPipe =>
                {
                    return Ok(ExitCode::SUCCESS);
                }
                done => done.map(|json_lines::Summary { records, malformed }| {
                    (format!("{records} records"), malformed)
                })?,
            }
        }
    };
    tell(&said);
    if malformed > 0 {
        tell(&format!("underpass: {malformed} malformed records were passed over"));
    }
    let damage = reader.damage();
    if damage.torn {
        tell("underpass: the trace has no regular end: the recorder was killed, or is still at work");
    }
    if damage.blocks > 0 || damage.segments > 0 {
        tell(&format!(
            "underpass: {} damaged blocks and {} missing segments are not in it",
            damage.blocks, damage.segments
        ));
    }
    Ok(ExitCode::SUCCESS)
}

fn needed(place: Option<&Path>) -> anyhow::Result<&Path> {
    place.context("this format makes a directory: say which with -o")
}

/// Makes a trace of logs.
pub(crate) fn import(arguments: &Import) -> anyhow::Result<ExitCode> {
    let logs = arguments.logs.iter().map(|path| {
        File::open(path).with_context(|| format!("cannot open {}", path.display())).map(|file| (path, file))
    });
    // All of them are there before anything is made.
    let logs: Vec<_> = logs.collect::<anyhow::Result<_>>()?;
    let mut writer = Writer::create(&arguments.output, &csv_log::meta(), Options::default())?;
    let sum = match read(&logs, &mut writer) {
        Ok(sum) => sum,
        Err(error) => {
            if matches!(error.downcast_ref(), Some(underpass_export::Error::Input { .. })) {
                writer.discard();
            }
            return Err(error);
        }
    };
    let csv_log::Summary { lines, sessions, statements, errors, others, .. } = sum;
    let is_understood = statements > 0 || lines == 0;
    if is_understood {
        writer.finish()?;
    } else {
        writer.discard();
    }
    tell(&format!(
        "{statements} statements of {sessions} sessions, {errors} errors, from {lines} lines, of which {others} say nothing of a statement"
    ));
    let warn = |count: u64, what: &str| {
        if count > 0 {
            tell(&format!("underpass: {count} {what}"));
        }
    };
    warn(sum.not_utf8, "lines are not UTF-8; what cannot be read of them is U+FFFD in the trace");
    warn(sum.torn, "logs end in the middle of a line, which was left out");
    warn(sum.zones_taken_for_utc, "lines name a time zone by an abbreviation, which was taken for UTC");
    warn(
        sum.unknown_ends,
        "sessions have no line about their end (log_disconnections = on writes them): each ends with its last line",
    );
    warn(
        sum.unknown_parameters,
        "statements that failed have parameters which are not in the log (log_statement = 'all' writes them): \
         a replay of them fails, but not as they did",
    );
    anyhow::ensure!(
        is_understood,
        "no statement was found in {lines} lines: the server has to write them in English (lc_messages = 'C') and to log \
         statements (log_statement = 'all' or log_min_duration_statement = 0)"
    );
    Ok(ExitCode::SUCCESS)
}

/// Reads logs into a trace.
fn read(logs: &[(&PathBuf, File)], writer: &mut Writer) -> anyhow::Result<csv_log::Summary> {
    let mut import = csv_log::Import::default();
    for (path, file) in logs {
        import.log(file, writer).with_context(|| path.display().to_string())?;
    }
    Ok(import.finish(writer)?)
}

/// A line on standard error. If nobody reads it (`2>&1 | head`), that is no reason to fail.
pub(crate) fn tell(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
