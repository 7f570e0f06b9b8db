// SPDX-License-Identifier: Apache-2.0
//! TPC-C by go-tpc: its data, and its mix as fast as it goes with named statements. go-tpc knows no rate; the experiments with one
//! have pgbench scripts (bench/workloads/tpcc) on the same data.
//!
//! go-tpc is installed when a run first needs it, by `go` from the module proxy at the version below; nothing of it is
//! in this repository.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::{named, run_program};
use crate::pgbench::Measured;
use crate::postgres::{DATABASE, PASSWORD, Server, USER};
use crate::procs::{Launch, find_program, output};
use crate::sample::{LoadedData, metric};
use crate::systems::{Instance, Place};
use crate::terminal::say;

const MODULE: &str = "github.com/pingcap/go-tpc";
/// Its version.
pub const VERSION: &str = "v1.0.12";
/// Where it is installed, relative to the working directory: beside the results.
const FOLDER: &str = "target/bench/tools";

/// Shorter runs hold too few of the rare types: 4 % of some hundred a second.
pub const SECONDS_MIN: f64 = 5.0;

/// The types in the order of the Tigger paper's table 3: go-tpc's name, metrics of mean and p99.
pub const TYPES: [(&str, &str, &str); 5] = [
    ("DELIVERY", "delivery_mean_ms", "delivery_p99_ms"),
    ("NEW_ORDER", "new_order_mean_ms", "new_order_p99_ms"),
    ("ORDER_STATUS", "order_status_mean_ms", "order_status_p99_ms"),
    ("PAYMENT", "payment_mean_ms", "payment_p99_ms"),
    ("STOCK_LEVEL", "stock_level_mean_ms", "stock_level_p99_ms"),
];

/// What pgbench's scripts need beside the data.
const BESIDE_DATA: &str = include_str!("../../../../bench/workloads/tpcc/load.sql");

/// Tables of TPC-C, for the size of the data.
const TABLES: &str =
    "'warehouse', 'district', 'customer', 'history', 'new_order', 'orders', 'order_line', 'stock', 'item'";

/// The program, installed if need be.
///
/// # Errors
/// When it is neither installed nor can be, with what to do.
pub fn program() -> Result<PathBuf> {
    let own = Path::new(FOLDER).join(format!("go-tpc-{VERSION}"));
    if let Some(found) = find_program("go-tpc").or_else(|| find_program(&own.display().to_string())) {
        return Ok(found);
    }
    let advice = "install go-tpc or leave the experiment tpcc out";
    let go = find_program("go").with_context(|| format!("neither go-tpc nor go found: {advice}"))?;
    say!("installing {MODULE} {VERSION} with go");
    fs::create_dir_all(FOLDER)?;
    let module = tempfile::tempdir()?;
    // `go install MODULE@VERSION` also asks the proxy for the list of versions, which not every proxy has.
    for arguments in [
        &["mod", "init", "tools"][..],
        &["mod", "edit", "-require", &format!("{MODULE}@{VERSION}")],
        &[
            "build",
            "-mod=mod",
            "-o",
            &std::path::absolute(&own)?.display().to_string(),
            &format!("{MODULE}/cmd/go-tpc"),
        ],
    ] {
        let mut command = Command::new(&go);
        command.args(arguments).current_dir(module.path());
        output(command, "go").with_context(|| advice.to_owned())?;
    }
    find_program(&own.display().to_string()).context("go built no go-tpc")
}

/// Makes the data and returns its size.
///
/// # Errors
/// When go-tpc fails.
pub fn load(server: &Server, place: Place<'_>, warehouses: u32) -> Result<LoadedData> {
    let mut command = command(place, place.hosts.server_from_client, server.port, USER, warehouses)?;
    command.args(["prepare", "--no-check", "-T", "4"]);
    output(command, "go-tpc prepare")?;
    server.psql_script(DATABASE, BESIDE_DATA, &[])?;
    server.psql(DATABASE, "vacuum analyze")?;
    let answer = server.psql(
        DATABASE,
        &format!(
            "select sum(greatest(reltuples, 0))::bigint, sum(pg_total_relation_size(oid)) / 1e6 \
             from pg_class where relkind = 'r' and relname in ({TABLES})"
        ),
    )?;
    LoadedData::parse(&answer).context("no size of TPC-C's tables")
}

/// Runs the mix as fast as it goes.
pub(super) fn run(
    clients: u32,
    warehouses: u32,
    seconds: f64,
    instance: &Instance,
    place: Place<'_>,
    stop: &AtomicBool,
) -> Result<Measured> {
    let endpoint = &instance.endpoint;
    let seconds = seconds.max(SECONDS_MIN);
    let mut command = command(place, &endpoint.host, endpoint.port, endpoint.user, warehouses)?;
    command.args(["run", "-T", &clients.to_string(), "--time", &format!("{seconds}s"), "--output", "json"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let (text, window) = run_program(command, "go-tpc", instance, stop)?;
    let types = parse(&text)?;
    let transactions: f64 = types.iter().map(|one| one.count).sum();
    let took_s = types.iter().map(|one| one.seconds).fold(0.0, f64::max);
    let busy = window.busy();
    let mut metrics = named([
        (metric::TPS, transactions / took_s),
        (metric::WINDOW, took_s),
        (metric::CPU, busy.total_us / transactions),
        (metric::CPU_USER, busy.user_us / transactions),
        (metric::CPU_SYSTEM, busy.system_us / transactions),
        (metric::CPU_SOFTIRQ, (busy.softirq_us + busy.irq_us) / transactions),
    ]);
    for (name, mean, p99) in TYPES {
        let one =
            types.iter().find(|one| one.name == name).with_context(|| format!("no {name} in the run"))?;
        metrics.insert(mean.to_owned(), one.mean_ms);
        metrics.insert(p99.to_owned(), one.p99_ms);
    }
    Ok((metrics, None))
}

fn command(place: Place<'_>, host: &str, port: u16, user: &str, warehouses: u32) -> Result<Command> {
    let launch = Launch { netns: place.hosts.client.clone(), keep_user: true, ..Launch::default() };
    let mut command = launch.command(place.account, program()?);
    command
        .args(["tpcc", "-d", "postgres", "--conn-params", "sslmode=disable", "-D", DATABASE])
        .args(["-H", host, "-P", &port.to_string(), "-U", user, "-p", PASSWORD])
        .args(["--warehouses", &warehouses.to_string()]);
    Ok(command)
}

/// One type of transaction in go-tpc's summary.
#[derive(Debug, PartialEq)]
struct Type {
    name: String,
    count: f64,
    seconds: f64,
    mean_ms: f64,
    p99_ms: f64,
}

/// Its JSON has text for numbers.
#[derive(Deserialize)]
struct Row {
    #[serde(rename = "Prefix")]
    prefix: String,
    #[serde(rename = "Operation")]
    operation: String,
    #[serde(rename = "Count")]
    count: String,
    #[serde(rename = "Takes(s)")]
    takes_s: String,
    #[serde(rename = "Avg(ms)")]
    avg_ms: String,
    #[serde(rename = "99th(ms)")]
    p99_ms: String,
}

/// Reads the summary, which is one line of JSON among others.
fn parse(text: &str) -> Result<Vec<Type>> {
    let rows = text
        .lines()
        .filter(|line| line.starts_with('['))
        .filter_map(|line| serde_json::from_str::<Vec<Row>>(line).ok())
        .flatten()
        // A failed transaction is an operation of its own, NEW_ORDER_ERR: it must not pass for one that was done.
        .filter(|row| row.prefix.contains("Summary"));
    let mut types = Vec::new();
    for row in rows {
        ensure!(!row.operation.ends_with("_ERR"), "{} transactions failed: {}", row.count, row.operation);
        types.push(Type {
            name: row.operation,
            count: row.count.parse()?,
            seconds: row.takes_s.parse()?,
            mean_ms: row.avg_ms.parse()?,
            p99_ms: row.p99_ms.parse()?,
        });
    }
    ensure!(!types.is_empty(), "go-tpc printed no summary");
    Ok(types)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: &str = r#"{"50th(ms)":"1.0","99th(ms)":"16.8","Avg(ms)":"2.3","Count":"1132","Operation":"PAYMENT","Prefix":"[Summary] ","Takes(s)":"2.0","TPM":"34167.7"}"#;

    #[test]
    fn the_summary_is_read_and_errors_are_not_hidden() {
        let text = format!("Finished\n[{ROW}]\n[{{\"efficiency\":\"1%\",\"tpmC\":\"2\"}}]\n");
        let types = parse(&text).unwrap();
        let payment =
            Type { name: "PAYMENT".into(), count: 1132.0, seconds: 2.0, mean_ms: 2.3, p99_ms: 16.8 };
        assert_eq!(types, [payment]);
        assert!(parse(&text.replace("PAYMENT", "PAYMENT_ERR")).unwrap_err().to_string().contains("failed"));
        assert!(parse("Finished\n").is_err());
        let interval = ROW.replace("[Summary] ", "[Current] ");
        assert!(parse(&format!("[{interval}]\n")).is_err(), "an interval is no summary");
    }
}
