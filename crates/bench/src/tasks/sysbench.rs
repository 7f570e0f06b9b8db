// SPDX-License-Identifier: Apache-2.0
//! sysbench on MariaDB, which the tracer is measured on.

use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};

use super::{named, run_program};
use crate::mariadb::Mariadb;
use crate::pgbench::Measured;
use crate::postgres::{DATABASE, PASSWORD, USER};
use crate::procs::{Launch, find_program, output};
use crate::sample::{LoadedData, metric};
use crate::systems::{Instance, Place};

/// sysbench counts whole seconds, and its first one has the logins in it.
pub const SECONDS_MIN: f64 = 2.0;

const TABLES: u32 = 4;
const ROWS: u64 = 100_000;

/// Which of sysbench's scripts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Script {
    /// Ten point selects and four ranges in a transaction.
    ReadOnly,
    /// The same with two updates, a delete and an insert.
    ReadWrite,
}

impl Script {
    /// sysbench's name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ReadOnly => "oltp_read_only",
            Self::ReadWrite => "oltp_read_write",
        }
    }
}

/// What is missing for it, each with what to do.
#[must_use]
pub fn missing() -> Vec<String> {
    let mut missing = Mariadb::missing();
    if find_program("sysbench").is_none() {
        missing.push("sysbench not found: install sysbench".to_owned());
    }
    missing
}

/// Makes the tables, which all scripts share, and returns their size.
///
/// # Errors
/// When sysbench fails.
pub fn load(place: Place<'_>, mariadb: &Mariadb) -> Result<LoadedData> {
    let mut command = command(place, mariadb, Script::ReadOnly, 4)?;
    command.arg("prepare");
    output(command, "sysbench prepare")?;
    let size = mariadb.sql(&format!(
        "select concat(sum(table_rows), '|', sum(data_length + index_length) / 1e6) \
         from information_schema.tables where table_schema = '{DATABASE}'"
    ))?;
    // The server only estimates its rows.
    let data = LoadedData::parse(&size).context("no size of sysbench's tables")?;
    Ok(LoadedData { rows: u64::from(TABLES) * ROWS, ..data })
}

/// Runs a script as fast as it goes.
pub(super) fn run(
    clients: u32,
    script: Script,
    seconds: f64,
    instance: &Instance,
    place: Place<'_>,
    stop: &AtomicBool,
) -> Result<Measured> {
    let mariadb = place.mariadb.context("no MariaDB was started")?;
    let mut command = command(place, mariadb, script, clients)?;
    let seconds = seconds.max(SECONDS_MIN).ceil();
    command.args(["--percentile=99", &format!("--time={seconds}"), "run"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    mariadb.log_statements(instance.general_log)?;
    let done = run_program(command, "sysbench", instance, stop);
    if instance.general_log {
        mariadb.log_statements(false)?;
    }
    let (text, window) = done?;
    let summary = parse(&text).context("sysbench printed no summary")?;
    let busy = window.busy();
    let each = |us: f64| us / summary.transactions;
    let metrics = named([
        (metric::TPS, summary.tps),
        (metric::LATENCY_MEAN, summary.mean_ms),
        (metric::LATENCY_P99, summary.p99_ms),
        (metric::BUSY, busy.total_us / window.capacity_us()),
        (metric::CPU, each(busy.total_us)),
        (metric::CPU_USER, each(busy.user_us)),
        (metric::CPU_SYSTEM, each(busy.system_us)),
        (metric::CPU_SOFTIRQ, each(busy.softirq_us + busy.irq_us)),
        (metric::WINDOW, seconds),
    ]);
    Ok((metrics, None))
}

fn command(place: Place<'_>, mariadb: &Mariadb, script: Script, clients: u32) -> Result<Command> {
    let program = find_program("sysbench").context("sysbench not found: install sysbench")?;
    let launch = Launch { keep_user: true, ..Launch::default() };
    let mut command = launch.command(place.account, program);
    command
        .args([script.name(), "--db-driver=mysql", "--mysql-host=127.0.0.1"])
        .arg(format!("--mysql-port={}", mariadb.port))
        .arg(format!("--mysql-user={USER}"))
        .arg(format!("--mysql-password={PASSWORD}"))
        .arg(format!("--mysql-db={DATABASE}"))
        .arg(format!("--tables={TABLES}"))
        .arg(format!("--table-size={ROWS}"))
        .arg(format!("--threads={clients}"));
    Ok(command)
}

#[derive(Debug, PartialEq)]
struct Summary {
    transactions: f64,
    tps: f64,
    mean_ms: f64,
    p99_ms: f64,
}

/// Reads what sysbench prints at its end.
fn parse(text: &str) -> Option<Summary> {
    let words_after = |name: &str| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(name))?;
        let numbers = line.split([' ', '(']).filter_map(|word| word.parse::<f64>().ok());
        Some(numbers.collect::<Vec<f64>>())
    };
    let transactions = words_after("transactions:")?;
    Some(Summary {
        transactions: *transactions.first()?,
        tps: *transactions.get(1)?,
        mean_ms: *words_after("avg:")?.first()?,
        p99_ms: *words_after("99th percentile:")?.first()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_is_read() {
        let text = "SQL statistics:\n    transactions:                        1234   (616.79 per sec.)\n\
                    Latency (ms):\n         min:      3.1\n         avg:          12.96\n         max:    30.0\n\
                    \u{20}        99th percentile:            17.01\n";
        let summary = Summary { transactions: 1234.0, tps: 616.79, mean_ms: 12.96, p99_ms: 17.01 };
        assert_eq!(parse(text), Some(summary));
        assert_eq!(parse("FATAL: unable to connect\n"), None);
    }
}
