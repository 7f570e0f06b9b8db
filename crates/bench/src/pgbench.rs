// SPDX-License-Identifier: Apache-2.0
//! One run of pgbench and what it and the kernel say about it.
//!
//! The measured window lies between two progress lines of pgbench: connection set-up, the first second and the end
//! are outside. CPU is read when such a line arrives, so rate and CPU belong to the same time to within a
//! millisecond. Latencies come from pgbench's own log of single transactions.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;

use crate::counters::{Busy, Reading};
use crate::procs::{Launch, Running, find_program};
use crate::sample::{Latency, metric};
use crate::systems::{Instance, Place};

/// Seconds before the window, in which caches, pools and the scheduler settle.
const WARM_UP_S: u32 = 1;

/// Clients for which the warm-up grows by a second: a direct connection's first query fills its backend's caches, which
/// takes a millisecond or two of CPU, and with a fixed rate every client must have had its turn.
const CLIENTS_PER_WARM_UP_S: u32 = 250;

/// Seconds after the window: pgbench prints no progress line at its very end.
const TAIL_S: u32 = 1;

/// Share of transactions that are logged when nothing limits the rate; a full log would cost about a microsecond each.
const LOG_SHARE: &str = "0.1";

/// How pgbench submits statements; its option `-M`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, clap::ValueEnum)]
pub enum Protocol {
    /// Query messages.
    Simple,
    /// Parse, Bind, Describe, Execute, Sync each time, with the unnamed statement.
    Extended,
    /// Named statements, parsed once per connection.
    Prepared,
}

impl Protocol {
    /// pgbench's spelling.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Simple => "simple",
            Self::Extended => "extended",
            Self::Prepared => "prepared",
        }
    }
}

/// What pgbench is to do.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Clients.
    pub clients: u32,
    /// How statements are submitted.
    pub protocol: Protocol,
    /// Scripts with their weights.
    pub scripts: Vec<(String, u32)>,
    /// Variables of the scripts.
    pub variables: Vec<(String, String)>,
    /// Transactions per second over all clients at random times, or as fast as they go.
    pub rate: Option<f64>,
    /// Connect for each transaction.
    pub reconnect: bool,
}

impl Load {
    /// Runs one script as fast as it goes.
    #[must_use]
    pub fn new(clients: u32, protocol: Protocol, script: &str) -> Self {
        Self {
            clients,
            protocol,
            scripts: vec![(script.to_owned(), 1)],
            variables: Vec::new(),
            rate: None,
            reconnect: false,
        }
    }
}

/// Metrics and the latency distribution of one run.
pub type Measured = (BTreeMap<String, f64>, Option<Latency>);

/// One progress line and the readings that were taken when it came.
struct Progress {
    tps: f64,
    latency_ms: f64,
    failed: f64,
    reading: Reading,
    wall: SystemTime,
}

/// Runs pgbench against `instance` for `seconds` plus warm-up and tail.
///
/// # Errors
/// When pgbench fails, hangs or is interrupted by `stop`.
pub fn measure(
    load: &Load,
    seconds: u32,
    instance: &Instance,
    place: Place<'_>,
    stop: &AtomicBool,
) -> Result<Measured> {
    let folder = tempfile::Builder::new().prefix("pgbench-").tempdir_in(place.folder)?;
    let command = command(load, seconds, instance, place, folder.path())?;
    let mut pgbench = Running::start(command, "pgbench", Signal::SIGTERM)?;
    let stderr = pgbench.child().stderr.take().context("pgbench has no standard error")?;
    let (sender, receiver) = mpsc::channel();
    let (pid, cgroup) = (instance.pid(), instance.cgroup().map(Path::to_path_buf));
    let reader = thread::spawn(move || read_lines(BufReader::new(stderr), pid, cgroup, &sender));

    // Logins of many clients through a slow system come on top of the run itself.
    let patience = Duration::from_secs(
        u64::from(seconds + warm_up_s(load) + TAIL_S) + 60 + u64::from(load.clients / 50),
    );
    let began = std::time::Instant::now();
    let (mut lines, mut messages) = (Vec::new(), Vec::new());
    loop {
        match receiver.recv_timeout(Duration::from_millis(100)) {
            Ok(Ok(progress)) => lines.push(progress),
            Ok(Err(message)) => messages.push(message),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) if stop.load(Ordering::Relaxed) => bail!("interrupted"),
            Err(RecvTimeoutError::Timeout) if began.elapsed() > patience => {
                bail!("pgbench hangs: no end after {} s; {}", patience.as_secs(), messages.join("; "))
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
    let status = pgbench.child().wait()?;
    // The channel is closed, so the reader has ended.
    let _ = reader.join();
    if stop.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    if !status.success() {
        let first = messages.iter().take(3).cloned().collect::<Vec<_>>().join("; ");
        bail!("pgbench failed ({status}): {first}");
    }
    // The first line ends the first second.
    let lines = lines.split_off(lines.len().min(warm_up_s(load) as usize - 1));
    let (Some(first), Some(last), true) = (lines.first(), lines.last(), lines.len() > 1) else {
        bail!("pgbench printed {} progress lines, too few for a window", lines.len());
    };
    let mut metrics = evaluate(first, last, &lines[1..])?;
    let log = read_logs(folder.path(), epoch_us(first.wall)..epoch_us(last.wall))?;
    let latency = Latency::of(log);
    if let Some(latency) = latency {
        metrics.insert(metric::LATENCY_P99.to_owned(), latency.p99);
    }
    Ok((metrics, latency))
}

fn warm_up_s(load: &Load) -> u32 {
    WARM_UP_S + load.clients / CLIENTS_PER_WARM_UP_S
}

fn command(
    load: &Load,
    seconds: u32,
    instance: &Instance,
    place: Place<'_>,
    folder: &Path,
) -> Result<std::process::Command> {
    let program = find_program("pgbench").context("pgbench not found: install postgresql-contrib")?;
    let cpus = thread::available_parallelism().map_or(1, usize::from) as u32;
    let launch = Launch { netns: place.hosts.client.clone(), cpus: None, keep_user: true };
    let mut command = launch.command(place.account, program);
    command
        .args(["-n", "-P", "1", "-l", "--log-prefix"])
        .arg(folder.join("log"))
        .args(["-c", &load.clients.to_string(), "-j", &load.clients.min(cpus).to_string()])
        .args(["-M", load.protocol.name(), "-T", &(seconds + warm_up_s(load) + TAIL_S).to_string()]);
    match load.rate {
        Some(rate) => command.args(["-R", &rate.to_string()]),
        None if load.reconnect => &mut command,
        None => command.args(["--sampling-rate", LOG_SHARE]),
    };
    if load.reconnect {
        command.arg("-C");
    }
    for (name, value) in &load.variables {
        command.arg("-D").arg(format!("{name}={value}"));
    }
    for (index, (script, weight)) in load.scripts.iter().enumerate() {
        let path = folder.join(format!("{index}.sql"));
        fs::write(&path, script)?;
        command.arg("-f").arg(format!("{}@{weight}", path.display()));
    }
    instance.endpoint.apply(&mut command);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    Ok(command)
}

fn read_lines(
    stderr: impl BufRead,
    pid: Option<u32>,
    cgroup: Option<PathBuf>,
    sender: &mpsc::Sender<std::result::Result<Progress, String>>,
) {
    for line in stderr.lines().map_while(std::result::Result::ok) {
        let reading = Reading::take(pid, cgroup.as_deref());
        let wall = SystemTime::now();
        let sent = match (parse_progress(&line), reading) {
            (Some((tps, latency_ms, failed)), Ok(reading)) => {
                sender.send(Ok(Progress { tps, latency_ms, failed, reading, wall }))
            }
            (Some(_), Err(error)) => sender.send(Err(format!("cannot read counters: {error}"))),
            (None, _) => sender.send(Err(line)),
        };
        if sent.is_err() {
            return;
        }
    }
}

/// Rate, mean latency and failures of `progress: 1.0 s, 33512.9 tps, lat 0.030 ms stddev 0.009, 0 failed`.
fn parse_progress(line: &str) -> Option<(f64, f64, f64)> {
    let rest = line.strip_prefix("progress: ")?;
    let (mut tps, mut latency, mut failed) = (None, 0.0, 0.0);
    for part in rest.split(", ") {
        let words: Vec<&str> = part.split(' ').collect();
        match words[..] {
            [value, "tps"] => tps = value.parse().ok(),
            // pgbench prints NaN for a second without a transaction.
            ["lat", value, ..] => latency = value.parse().unwrap_or(f64::NAN),
            [value, "failed"] => failed = value.parse().ok()?,
            _ => {}
        }
    }
    Some((tps?, latency, failed))
}

fn evaluate(first: &Progress, last: &Progress, lines: &[Progress]) -> Result<BTreeMap<String, f64>> {
    let mut transactions = 0.0;
    let mut latency_sum = 0.0;
    let mut before = first.reading.at;
    for line in lines {
        let count = line.tps * line.reading.at.duration_since(before).as_secs_f64();
        before = line.reading.at;
        transactions += count;
        latency_sum += if line.latency_ms.is_finite() { line.latency_ms * count } else { 0.0 };
    }
    if transactions < 1.0 {
        bail!("no transaction finished in the window");
    }
    let elapsed = last.reading.at.duration_since(first.reading.at).as_secs_f64();
    let busy = Busy::between(&first.reading.machine, &last.reading.machine, elapsed * 1e6);
    let pooler = last.reading.pooler.since(&first.reading.pooler);
    let each = |value: f64| value / transactions;
    Ok([
        (metric::TPS, transactions / elapsed),
        (metric::LATENCY_MEAN, latency_sum / transactions),
        (metric::CPU, each(busy.total_us)),
        (metric::CPU_USER, each(busy.user_us)),
        (metric::CPU_SYSTEM, each(busy.system_us)),
        (metric::CPU_SOFTIRQ, each(busy.softirq_us + busy.irq_us)),
        (metric::CPU_STEAL, each(busy.steal_us)),
        (metric::POOLER_CPU, each(pooler.user_us + pooler.system_us)),
        (metric::POOLER_USER, each(pooler.user_us)),
        (metric::SWITCHES, each(busy.context_switches)),
        (metric::POOLER_SWITCHES, each(pooler.context_switches)),
        (metric::FAILED, lines.iter().map(|line| line.failed).sum()),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value))
    .collect())
}

fn epoch_us(wall: SystemTime) -> u128 {
    wall.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros()
}

/// Latencies in milliseconds of logged transactions that ended within `window` (microseconds since 1970).
fn read_logs(folder: &Path, window: std::ops::Range<u128>) -> Result<Vec<f64>> {
    let mut latencies = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("log")) {
            let text = fs::read_to_string(&path)?;
            latencies.extend(text.lines().filter_map(|line| parse_log(line, &window)));
        }
    }
    Ok(latencies)
}

/// The latency of `client transaction latency_us script seconds microseconds [...]`, if it ended in the window.
/// A skipped or failed transaction has a word in place of its latency and is left out.
fn parse_log(line: &str, window: &std::ops::Range<u128>) -> Option<f64> {
    let mut words = line.split(' ');
    let latency_us: f64 = words.nth(2)?.parse().ok()?;
    let seconds: u128 = words.nth(1)?.parse().ok()?;
    let micros: u128 = words.next()?.parse().ok()?;
    window.contains(&(seconds * 1_000_000 + micros)).then_some(latency_us / 1_000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_lines_of_both_kinds_are_read() {
        let plain = "progress: 2.0 s, 33512.9 tps, lat 0.030 ms stddev 0.009, 0 failed";
        assert_eq!(parse_progress(plain), Some((33512.9, 0.03, 0.0)));
        let limited = "progress: 1.0 s, 2001.1 tps, lat 0.4 ms stddev 0.2, 3 failed, lag 0.10 ms";
        assert_eq!(parse_progress(limited), Some((2001.1, 0.4, 3.0)));
        let empty = "progress: 1.0 s, 0.0 tps, lat NaN ms stddev NaN, 0 failed";
        assert!(parse_progress(empty).unwrap().1.is_nan());
        assert_eq!(parse_progress("pgbench: error: client 1 aborted"), None);
    }

    #[test]
    fn log_lines_count_only_inside_the_window() {
        let window = 10_000_000..12_000_000;
        assert_eq!(parse_log("0 7 1500 0 11 5", &window), Some(1.5));
        assert_eq!(parse_log("0 7 1500 0 12 5", &window), None);
        assert_eq!(parse_log("0 7 1500 0 11 5 250", &window), Some(1.5));
        assert_eq!(parse_log("0 7 skipped 0 11 5", &window), None);
        assert_eq!(parse_log("garbage", &window), None);
    }
}
