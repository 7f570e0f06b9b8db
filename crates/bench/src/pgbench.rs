// SPDX-License-Identifier: Apache-2.0
//! pgbench as the load, and what its log and the kernel say about a window of it.
//!
//! A [`Driver`] is a pgbench that goes on until it is ended. Between its turns it is held by SIGSTOP: the drivers of all
//! systems stand ready, and systems take turns of about a second each, which no drift of the machine can get between.
//! A turn costs no start, no connection set-up and no warm-up of PostgreSQL's caches.
//!
//! pgbench logs every transaction with the microsecond of its end. A window is any stretch of time whose ends were
//! read from the kernel's counters; its transactions are those that ended in it. So rate, latency and CPU
//! belong to the same time. Logging costs about a microsecond of CPU per transaction, the same for every system:
//! it is in the direct connection's figures too and not in any tax.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use nix::unistd::{AccessFlags, access};
use serde::Deserialize;

use crate::counters::{Reading, Window};
use crate::procs::{Launch, Running, find_program};
use crate::sample::{Latency, metric};
use crate::systems::{Instance, Place};

/// Seconds between the first transaction and the earliest window, in which caches, pools and the scheduler settle:
/// pgbench's first progress line ends them.
const WARM_UP_S: u32 = 1;

/// How long a driver runs after it was held before its window begins.
pub const SETTLE: Duration = Duration::from_millis(300);

/// Seconds that a load that is not ended by us runs on after its window: what is read at its ends takes time too.
const TAIL_S: f64 = 1.0;

/// How a line of `-P` begins.
const PROGRESS: &str = "progress: ";

/// What `-T` says where we end the run by pgbench's own timer signal.
const UNTIL_ENDED_S: u32 = 1_000_000;

/// How pgbench submits statements; its option `-M`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
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
    /// How many values of `application_name` the clients share; each makes a pgbench of its own.
    pub application_names: u32,
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
            application_names: 1,
        }
    }
}

/// Metrics and the latency distribution of one run.
pub type Measured = (BTreeMap<String, f64>, Option<Latency>);

/// pgbench, running until it is ended; one process for each application name.
#[derive(Debug)]
pub struct Driver {
    processes: Vec<Running>,
    folder: tempfile::TempDir,
    lines: Receiver<(usize, String)>,
    messages: Vec<String>,
    patience: Duration,
    held: bool,
    ends_itself: bool,
}

impl Driver {
    /// Starts pgbench against `instance`; [`Driver::wait_until_warm`] says when transactions flow.
    ///
    /// With a fixed rate it runs for the warm-up and `seconds` and ends by itself: only so do clients that wait for
    /// their next turn end at once. Without, it runs until [`Driver::finish`].
    ///
    /// # Errors
    /// When pgbench is missing or cannot be started.
    pub fn start(load: &Load, seconds: f64, instance: &Instance, place: Place<'_>) -> Result<Self> {
        let folder = log_folder(place.folder)?;
        let limit = match load.rate {
            Some(_) => (f64::from(warm_up_s(load)) + seconds + TAIL_S).ceil() as u32,
            None => UNTIL_ENDED_S,
        };
        let (sender, lines) = mpsc::channel();
        let mut processes = Vec::new();
        for index in 0..load.application_names as usize {
            let mut command = command(load, limit, instance, place, folder.path())?;
            command.env("PGAPPNAME", format!("pgbench-{index}"));
            let mut pgbench = Running::start(command, "pgbench", Signal::SIGTERM)?;
            let stderr = pgbench.child().stderr.take().context("pgbench has no standard error")?;
            let sender = sender.clone();
            thread::spawn(move || {
                for line in BufReader::new(stderr).lines().map_while(std::result::Result::ok) {
                    if sender.send((index, line)).is_err() {
                        return;
                    }
                }
            });
            processes.push(pgbench);
        }
        // Logins of many clients through a slow system take their time.
        let patience = Duration::from_secs(60 + u64::from(load.clients / 50));
        let (messages, ends_itself) = (Vec::new(), load.rate.is_some());
        Ok(Self { processes, folder, lines, messages, patience, held: false, ends_itself })
    }

    /// Waits until all clients are connected and the first second of transactions is over.
    ///
    /// # Errors
    /// When pgbench fails or hangs, or `stop` is set.
    pub fn wait_until_warm(&mut self, stop: &AtomicBool) -> Result<()> {
        let started = Instant::now();
        let mut warm = BTreeSet::new();
        while warm.len() < self.processes.len() {
            match self.lines.recv_timeout(Duration::from_millis(20)) {
                Ok((index, line)) if line.starts_with(PROGRESS) => drop(warm.insert(index)),
                Ok((_, line)) => self.messages.push(line),
                Err(RecvTimeoutError::Disconnected) => return Err(self.failure()),
                Err(RecvTimeoutError::Timeout) if stop.load(Ordering::Relaxed) => bail!("interrupted"),
                Err(RecvTimeoutError::Timeout) if started.elapsed() > self.patience => {
                    let patience = self.patience.as_secs();
                    bail!("pgbench hangs: no transaction after {patience} s; {}", self.words())
                }
                Err(RecvTimeoutError::Timeout) => self.check_running()?,
            }
        }
        Ok(())
    }

    /// Stops it where it stands; what its clients have asked for is answered meanwhile and read when it goes on.
    pub fn hold(&mut self) {
        self.signal(Signal::SIGSTOP);
        self.held = true;
    }

    /// Lets it go on.
    pub fn go_on(&mut self) {
        self.signal(Signal::SIGCONT);
        self.held = false;
    }

    /// Fails when pgbench has ended, with what it said.
    ///
    /// # Errors
    /// As said.
    pub fn check_running(&mut self) -> Result<()> {
        for process in &mut self.processes {
            if process.ended()?.is_some() {
                return Err(self.failure());
            }
        }
        Ok(())
    }

    /// Lets it end as its own timer would, so that it writes the rest of its log, and reads that log.
    ///
    /// # Errors
    /// When a client was aborted, or pgbench does not end.
    pub fn finish(mut self) -> Result<Log> {
        if self.held {
            self.go_on();
        }
        if !self.ends_itself {
            // pgbench's -T is an alarm(2); its handler tells every client that this transaction is the last.
            self.signal(Signal::SIGALRM);
        }
        let deadline = Instant::now() + Duration::from_secs(30);
        for index in 0..self.processes.len() {
            let status = loop {
                if let Some(status) = self.processes[index].ended()? {
                    break status;
                }
                if Instant::now() > deadline {
                    bail!("pgbench does not end; {}", self.words());
                }
                thread::sleep(Duration::from_millis(5));
            };
            if !status.success() {
                return Err(self.failure());
            }
        }
        Log::read(self.folder.path())
    }

    fn signal(&self, signal: Signal) {
        for process in &self.processes {
            process.signal(signal);
        }
    }

    fn words(&mut self) -> String {
        let lines = self.lines.try_iter().map(|(_, line)| line);
        self.messages.extend(lines.filter(|line| !line.starts_with(PROGRESS)));
        self.messages.iter().take(3).cloned().collect::<Vec<_>>().join("; ")
    }

    fn failure(&mut self) -> anyhow::Error {
        // Its last words may still be on their way through the thread that reads them.
        thread::sleep(Duration::from_millis(50));
        let ends = self.processes.iter_mut().filter_map(|process| process.ended().ok().flatten());
        let status = ends.map(|status| status.to_string()).collect::<Vec<_>>().join(", ");
        anyhow::anyhow!("pgbench failed ({status}): {}", self.words())
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // A stopped process would not see its end coming.
        if self.held {
            self.go_on();
        }
    }
}

/// Every transaction of a run, in the order in which each thread of pgbench finished them.
#[derive(Debug, Default)]
pub struct Log {
    /// End in microseconds since 1970, and latency in microseconds; `None` where it failed or was skipped.
    entries: Vec<(u64, Option<u32>)>,
}

impl Log {
    fn read(folder: &Path) -> Result<Self> {
        let mut log = Self::default();
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("log")) {
                let text = fs::read_to_string(&path)?;
                log.entries.extend(text.lines().filter_map(parse_log));
            }
        }
        Ok(log)
    }

    /// What happened within a window.
    ///
    /// # Errors
    /// When no transaction ended in it.
    pub fn measured(&self, window: &Window) -> Result<Measured> {
        let within = window.from.wall_us..window.to.wall_us;
        let ended = self.entries.iter().filter(|(end_us, _)| within.contains(end_us));
        let (mut latencies_ms, mut failed) = (Vec::new(), 0);
        for (_, latency_us) in ended {
            match latency_us {
                Some(us) => latencies_ms.push(f64::from(*us) / 1e3),
                None => failed += 1,
            }
        }
        let Some(latency) = Latency::of(latencies_ms) else { bail!("no transaction ended in the window") };
        let transactions = latency.count as f64;
        let busy = window.busy();
        let pooler = window.to.pooler.since(&window.from.pooler);
        let each = |value: f64| value / transactions;
        let metrics = [
            (metric::TPS, transactions / window.seconds()),
            (metric::LATENCY_MEAN, latency.mean),
            (metric::LATENCY_P99, latency.p99),
            (metric::CPU, each(busy.total_us)),
            (metric::CPU_USER, each(busy.user_us)),
            (metric::CPU_SYSTEM, each(busy.system_us)),
            (metric::CPU_SOFTIRQ, each(busy.softirq_us + busy.irq_us)),
            (metric::CPU_STEAL, each(busy.steal_us)),
            (metric::POOLER_CPU, each(pooler.user_us + pooler.system_us)),
            (metric::POOLER_USER, each(pooler.user_us)),
            (metric::SWITCHES, each(busy.context_switches)),
            (metric::POOLER_SWITCHES, each(pooler.context_switches)),
            (metric::FAILED, f64::from(failed)),
        ];
        Ok((metrics.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(), Some(latency)))
    }
}

/// Runs a load of its own start and end for `seconds`, for what cannot be held between turns.
///
/// # Errors
/// When pgbench fails or hangs, or `stop` is set.
pub fn measure(
    load: &Load,
    seconds: f64,
    instance: &Instance,
    place: Place<'_>,
    stop: &AtomicBool,
    mut look: impl FnMut(Moment) -> Result<()>,
) -> Result<Measured> {
    let mut driver = Driver::start(load, seconds, instance, place)?;
    driver.wait_until_warm(stop)?;
    thread::sleep(Duration::from_secs(u64::from(warm_up_s(load) - WARM_UP_S)));
    look(Moment::Begins)?;
    let window = window(seconds, instance, stop, || look(Moment::During))?;
    look(Moment::Ends)?;
    driver.finish()?.measured(&window)
}

/// When somebody looks in on a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Right before it.
    Begins,
    /// Within it, five times a second.
    During,
    /// Right after it.
    Ends,
}

/// Waits for `seconds` between two readings, and looks in on `during` five times a second.
///
/// # Errors
/// When the counters cannot be read or `stop` is set.
pub fn window(
    seconds: f64,
    instance: &Instance,
    stop: &AtomicBool,
    mut during: impl FnMut() -> Result<()>,
) -> Result<Window> {
    let from = Reading::take(instance.pid(), instance.cgroup())?;
    let end = from.at + Duration::from_secs_f64(seconds);
    loop {
        let left = end.saturating_duration_since(Instant::now());
        thread::sleep(left.min(Duration::from_millis(200)));
        if stop.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        if Instant::now() >= end {
            break;
        }
        during()?;
    }
    let to = Reading::take(instance.pid(), instance.cgroup())?;
    Ok(Window { from, to })
}

/// With a fixed rate every client should have had its turn: a direct connection's first query fills its backend's
/// caches, which takes milliseconds of CPU. After two mean intervals 86 % have, and 98 % after four.
#[must_use]
pub fn warm_up_s(load: &Load) -> u32 {
    let interval = load.rate.map_or(0.0, |rate| f64::from(load.clients) / rate);
    WARM_UP_S.max((3.0 * interval).ceil() as u32)
}

/// A folder for logs in memory where there is one: writing them back to a disk would be CPU in somebody else's turn.
fn log_folder(otherwise: &Path) -> Result<tempfile::TempDir> {
    let memory = Path::new("/dev/shm");
    let parent = if access(memory, AccessFlags::W_OK).is_ok() { memory } else { otherwise };
    Ok(tempfile::Builder::new().prefix("underpass-bench-log-").tempdir_in(parent)?)
}

fn command(
    load: &Load,
    limit_s: u32,
    instance: &Instance,
    place: Place<'_>,
    folder: &Path,
) -> Result<std::process::Command> {
    let program = find_program("pgbench").context("pgbench not found: install postgresql-contrib")?;
    let cpus = thread::available_parallelism().map_or(1, usize::from) as u32;
    let launch = Launch { netns: place.hosts.client.clone(), cpus: None, keep_user: true };
    let mut command = launch.command(place.account, program);
    let clients = (load.clients / load.application_names).max(1);
    command
        .args(["-n", "-P", "1", "-l", "--log-prefix"])
        .arg(folder.join("log"))
        .args(["-c", &clients.to_string(), "-j", &clients.min(cpus).to_string()])
        .args(["-M", load.protocol.name(), "-T", &limit_s.to_string()]);
    if let Some(rate) = load.rate {
        command.args(["-R", &(rate / f64::from(load.application_names)).to_string()]);
    }
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

/// End and latency of `client transaction latency_us script seconds microseconds [...]`. A skipped or failed transaction
/// has a word in place of its latency.
fn parse_log(line: &str) -> Option<(u64, Option<u32>)> {
    let mut words = line.split(' ');
    let latency_us = words.nth(2)?.parse::<f64>().ok().map(|us| us as u32);
    let seconds: u64 = words.nth(1)?.parse().ok()?;
    let micros: u64 = words.next()?.parse().ok()?;
    Some((seconds * 1_000_000 + micros, latency_us))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_lines_are_read_and_garbage_is_not() {
        assert_eq!(parse_log("0 7 1500 0 11 5"), Some((11_000_005, Some(1500))));
        assert_eq!(parse_log("0 7 1500 0 11 5 250"), Some((11_000_005, Some(1500))), "with a schedule lag");
        assert_eq!(parse_log("0 7 skipped 0 11 5"), Some((11_000_005, None)));
        assert_eq!(parse_log("garbage"), None);
        assert_eq!(parse_log("0 7 1500 0 11"), None, "the end of a torn file");
    }

    #[test]
    fn only_what_ended_in_the_window_counts() {
        let mut from = Reading::take(None, None).unwrap();
        let mut to = from;
        (from.wall_us, to.wall_us) = (1_000, 2_001_000);
        to.at = from.at + Duration::from_secs(2);
        let log = Log {
            entries: vec![
                (999, Some(9000)),
                (1_000, Some(100)),
                (2_000_000, Some(300)),
                (5_000, None),
                (2_001_000, Some(9000)),
            ],
        };
        let (metrics, latency) = log.measured(&Window { from, to }).unwrap();
        assert!((metrics[metric::TPS] - 1.0).abs() < 1e-9);
        assert!((metrics[metric::LATENCY_MEAN] - 0.2).abs() < 1e-9);
        assert_eq!((metrics[metric::FAILED], latency.unwrap().count), (1.0, 2));
        assert!(Log::default().measured(&Window { from, to }).is_err());
    }

    #[test]
    fn a_fixed_rate_over_many_clients_warms_up_longer() {
        let mut load = Load::new(1000, Protocol::Simple, ";");
        assert_eq!(warm_up_s(&load), 1);
        load.rate = Some(2000.0);
        assert_eq!(warm_up_s(&load), 2);
        load.clients = 10_000;
        assert_eq!(warm_up_s(&load), 15);
    }
}
