// SPDX-License-Identifier: Apache-2.0
//! sysbench on MariaDB, which the tracer is measured on: its own scripts, and YCSB by one of ours.

use std::borrow::Cow;
use std::fs;
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
use crate::workloads::zipf_constants;

/// sysbench counts whole seconds, and its first one has the logins in it.
pub const SECONDS_MIN: f64 = 2.0;

/// How long it runs before it is measured.
const WARM_S: f64 = 1.0;

const TABLES: u32 = 4;
const ROWS: u64 = 100_000;

/// YCSB's keys, as many as PostgreSQL's table has at scale 1.
const YCSB_ROWS: u64 = 100_000;
const YCSB_SCRIPT: &str = include_str!("../../../../bench/workloads/ycsb/mariadb.lua");
const YCSB_LOAD: &str = include_str!("../../../../bench/workloads/ycsb/mariadb_load.sql");

/// Which script of sysbench's, or YCSB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Script {
    /// Ten point selects and four ranges in a transaction.
    ReadOnly,
    /// The same with two updates, a delete and an insert.
    ReadWrite,
    /// One read or one update of YCSB a transaction.
    Ycsb {
        /// Reads in a hundred.
        reads: u32,
    },
}

impl Script {
    /// sysbench's name; YCSB's mix.
    #[must_use]
    pub fn name(self) -> Cow<'static, str> {
        match self {
            Self::ReadOnly => "oltp_read_only".into(),
            Self::ReadWrite => "oltp_read_write".into(),
            Self::Ycsb { reads } => format!("ycsb-{reads}-{}", 100 - reads).into(),
        }
    }

    /// The name of its data in a result file, which scripts with the same tables share.
    #[must_use]
    pub fn data(self) -> &'static str {
        match self {
            Self::ReadOnly | Self::ReadWrite => "sysbench",
            Self::Ycsb { .. } => YCSB_DATA,
        }
    }
}

/// The name of YCSB's data on MariaDB in a result file.
pub const YCSB_DATA: &str = "ycsb on MariaDB";

/// What is missing for it, each with what to do.
#[must_use]
pub fn missing() -> Vec<String> {
    let mut missing = Mariadb::missing();
    if find_program("sysbench").is_none() {
        missing.push("sysbench not found: install sysbench".to_owned());
    }
    missing
}

/// Makes the tables of a script and returns their size.
///
/// # Errors
/// When sysbench or the server fails.
pub fn load(place: Place<'_>, mariadb: &Mariadb, script: Script) -> Result<LoadedData> {
    let (tables, rows) = match script {
        Script::Ycsb { .. } => {
            mariadb.sql(&YCSB_LOAD.replace("{{keys}}", &format!("seq_0_to_{}", YCSB_ROWS - 1)))?;
            ("usertable", YCSB_ROWS)
        }
        Script::ReadOnly | Script::ReadWrite => {
            let mut command = command(place, mariadb, script, 4)?;
            command.arg("prepare");
            output(command, "sysbench prepare")?;
            ("sbtest%", u64::from(TABLES) * ROWS)
        }
    };
    let size = mariadb.sql(&format!(
        "select concat(sum(table_rows), '|', sum(data_length + index_length) / 1e6) \
         from information_schema.tables where table_schema = '{DATABASE}' and table_name like '{tables}'"
    ))?;
    // The server only estimates its rows.
    let data = LoadedData::parse(&size).context("no size of sysbench's tables")?;
    Ok(LoadedData { rows, ..data })
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
    let seconds = seconds.max(SECONDS_MIN).ceil();
    let run = |seconds: f64| {
        let mut command = command(place, mariadb, script, clients)?;
        command.args(["--percentile=99", &format!("--time={seconds}"), "run"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        run_program(command, "sysbench", instance, stop)
    };
    mariadb.log_statements(instance.general_log)?;
    // After a time with nothing to do the machine is slower for a while, and before a system with a tracer it had a second of that.
    let done = run(WARM_S).and_then(|_| run(seconds));
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
    match script {
        Script::ReadOnly | Script::ReadWrite => {
            command.arg(&*script.name());
            command.arg(format!("--tables={TABLES}")).arg(format!("--table-size={ROWS}"));
        }
        Script::Ycsb { reads } => {
            let path = place.folder.join("ycsb.lua");
            fs::write(&path, YCSB_SCRIPT)?;
            let (zetan, eta) = zipf_constants(YCSB_ROWS);
            command.arg(path).arg(format!("--reads={reads}")).arg(format!("--rows={YCSB_ROWS}"));
            command.arg(format!("--zetan={zetan}")).arg(format!("--eta={eta}"));
        }
    }
    command
        .args(["--db-driver=mysql", "--mysql-host=127.0.0.1"])
        .arg(format!("--mysql-port={}", mariadb.port))
        .arg(format!("--mysql-user={USER}"))
        .arg(format!("--mysql-password={PASSWORD}"))
        .arg(format!("--mysql-db={DATABASE}"))
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
    fn mixes_have_names_and_tables_of_their_own() {
        let (heavy, light) = (Script::Ycsb { reads: 90 }, Script::Ycsb { reads: 10 });
        assert_eq!((heavy.name().as_ref(), light.name().as_ref()), ("ycsb-90-10", "ycsb-10-90"));
        assert_eq!(heavy.data(), light.data());
        assert_ne!(heavy.data(), Script::ReadOnly.data());
    }

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
