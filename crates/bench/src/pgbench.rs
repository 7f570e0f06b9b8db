// SPDX-License-Identifier: Apache-2.0
//! pgbench as the load, and what its log and the kernel say about windows of it.
//!
//! A [`Driver`] is a pgbench that goes on until it is ended. Between its turns it is held by SIGSTOP: the drivers of all
//! systems stand ready, and systems take turns of a fraction of a second, which no drift of the machine can get between.
//! A turn costs no start, no connection set-up and no warm-up of PostgreSQL's caches.
//!
//! pgbench logs every transaction with the microsecond of its end. A window is any stretch of time whose ends were
//! read from the kernel's counters; its transactions are those that ended in it. So rate, latency and CPU
//! belong to the same time. Logging costs about a microsecond of CPU per transaction, the same for every system:
//! it is in the direct connection's figures too and not in any tax.
//!
//! A load with a fixed rate is not held: what fell due meanwhile would come in one burst when it goes on, and the latency of an
//! open loop counts from the moment at which a transaction should have begun. It is started for each sample, like one that
//! writes, and pgbench's schedule begins when all clients are connected.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use nix::unistd::{AccessFlags, access};
use serde::Deserialize;

use crate::counters::{Busy, Reading, Tree, Window};
use crate::placement::{Pattern, Placement};
use crate::procs::{Launch, Running, find_program};
use crate::sample::{Latency, metric};
use crate::systems::{Instance, Place};

/// Length of one slice of a sample, about. A sample is gathered from slices in several passes over all systems: where the
/// scheduler puts client, pooler and server at the beginning of a slice decides much of its speed (a factor of 1.8
/// has been seen with eight direct clients), so a sample needs several draws of that and not one long look at a single one.
const SLICE_S: f64 = 0.12;

/// How long a driver runs after it was held before its window begins: some half-lives (32 ms) of the scheduler's load
/// tracking, and thousands of transactions.
const SETTLE: Duration = Duration::from_millis(60);

/// How long threads stay where a draw put them; the rest of [`SETTLE`] is the scheduler's.
const PLACED: Duration = Duration::from_millis(10);

/// How long before a window the console may be asked: the few milliseconds of psql are over then.
const SETTLE_AFTER_A_LOOK: Duration = Duration::from_millis(100);

/// Share of transactions that waited while the load was held above which a sample says nothing about latency: they are the
/// slow ones, and how long they would have waited is not known.
const WAITED_MAX: f64 = 0.01;

/// By how many standard deviations fewer transactions than due may end in a window of an open loop, whose moments are random.
const MISSED_DEVIATIONS_MAX: f64 = 5.0;

/// Transactions of each client before the first window, which fill the caches of its server process.
const WARM_TRANSACTIONS: u64 = 50;

/// The same with a fixed rate, where clients take turns: with the first a client gets to know its pooler, or its lane gets the
/// client, the second is like all others.
const WARM_TRANSACTIONS_AT_A_RATE: u64 = 2;

/// The same where each is a login of milliseconds.
const WARM_SLOW_LOGINS: u64 = 10;

/// How long a load goes on after that before it is first held. Poolers react to a load by time too: a lane keeps clients in user
/// space for a tenth of a second after a queue, and at the start of a pool there is one.
const WARM_REST: Duration = Duration::from_millis(200);

/// Bytes of a line of the log, at least.
const LOG_LINE_BYTES: u64 = 28;

/// What `-T` says: we end the run, by pgbench's own timer signal.
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
    /// A login takes milliseconds. Then each client has a thread of pgbench, which logs in one client at a time.
    pub slow_logins: bool,
    /// How many values of `application_name` the clients share; each makes a pgbench of its own.
    pub application_names: u32,
    /// With what the metrics of each script begin, in the scripts' order, where their latencies are told apart; else empty.
    pub types: Vec<&'static str>,
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
            slow_logins: false,
            application_names: 1,
            types: Vec::new(),
        }
    }

    /// Into how many slices a sample of `seconds` is divided.
    #[must_use]
    pub fn slices(&self, seconds: f64) -> u32 {
        if !self.can_be_held() { 1 } else { ((seconds / SLICE_S).round() as u32).max(1) }
    }

    /// Whether it may be stopped wherever it stands. One that writes may hold locks there, for which the loads of all other
    /// systems would wait; one with a rate falls behind. Where each transaction logs in, a pooler would go on with the logins that are
    /// under way, and go by what came lately, which is nothing after a pause. Such a load is started for each sample. Nothing is lost
    /// by its one slice at a rate: the machine idles between transactions, so the scheduler places them anew all the time.
    #[must_use]
    pub fn can_be_held(&self) -> bool {
        let writes = |script: &str| {
            let mut words = script.split(|c: char| !c.is_ascii_alphabetic());
            words
                .any(|word| ["insert", "update", "delete"].iter().any(|verb| word.eq_ignore_ascii_case(verb)))
        };
        self.rate.is_none() && !self.reconnect && !self.scripts.iter().any(|(script, _)| writes(script))
    }

    /// About how many seconds a sample of `seconds` takes besides: what it needs to get going.
    #[must_use]
    pub fn overhead_s(&self, seconds: f64) -> f64 {
        // A thousand logins a second through the slowest system.
        let logins_s = f64::from(self.clients) / 1000.0;
        match self.rate {
            Some(rate) => {
                let turns_s = (WARM_TRANSACTIONS_AT_A_RATE * u64::from(self.clients)) as f64 / rate;
                0.8 + logins_s / 2.0 + turns_s
            }
            None if self.can_be_held() => 0.3 + SETTLE.as_secs_f64() * f64::from(self.slices(seconds)),
            None => 0.8 + logins_s,
        }
    }

    /// Bytes of log from which on it counts as warm.
    fn warm_bytes(&self) -> u64 {
        let each = match (self.rate, self.slow_logins) {
            (Some(_), _) => WARM_TRANSACTIONS_AT_A_RATE,
            (None, true) => WARM_SLOW_LOGINS,
            (None, false) => WARM_TRANSACTIONS,
        };
        u64::from(self.clients) * each * LOG_LINE_BYTES
    }
}

/// Metrics and the latency distribution of one run.
pub type Measured = (BTreeMap<String, f64>, Option<Latency>);

/// pgbench, running until it is ended; one process for each application name.
#[derive(Debug)]
pub struct Driver {
    processes: Vec<Running>,
    folder: tempfile::TempDir,
    lines: Receiver<String>,
    messages: Vec<String>,
    warm_bytes: u64,
    patience: Duration,
    rate: Option<f64>,
    types: Vec<&'static str>,
    held: bool,
    was_held: bool,
}

impl Driver {
    /// Starts pgbench against `instance`; [`Driver::wait_until_warm`] says when transactions flow. It runs until
    /// [`Driver::finish`].
    ///
    /// # Errors
    /// When pgbench is missing or cannot be started.
    pub fn start(load: &Load, instance: &Instance, place: Place<'_>) -> Result<Self> {
        let folder = log_folder(place.folder)?;
        let (sender, lines) = mpsc::channel();
        let mut processes = Vec::new();
        for index in 0..load.application_names as usize {
            let mut command = command(load, instance, place, folder.path())?;
            command.env("PGAPPNAME", format!("pgbench-{index}"));
            let mut pgbench = Running::start(command, "pgbench", Signal::SIGTERM)?;
            let stderr = pgbench.child().stderr.take().context("pgbench has no standard error")?;
            let sender = sender.clone();
            thread::spawn(move || {
                for line in BufReader::new(stderr).lines().map_while(std::result::Result::ok) {
                    if sender.send(line).is_err() {
                        return;
                    }
                }
            });
            processes.push(pgbench);
        }
        Ok(Self {
            processes,
            folder,
            lines,
            messages: Vec::new(),
            warm_bytes: load.warm_bytes(),
            // Logins of many clients through a slow system take their time.
            patience: Duration::from_secs(60 + u64::from(load.clients / 50)),
            rate: load.rate,
            types: load.types.clone(),
            held: false,
            was_held: false,
        })
    }

    /// Waits until all clients are connected and each has had its transactions to warm up, on average.
    ///
    /// # Errors
    /// When pgbench fails or hangs, or `stop` is set.
    pub fn wait_until_warm(&mut self, stop: &AtomicBool) -> Result<()> {
        let started = Instant::now();
        // pgbench connects all clients before the first transaction, and writes its log as its buffer fills.
        while log_bytes(self.folder.path())? < self.warm_bytes {
            self.check_running()?;
            if stop.load(Ordering::Relaxed) {
                bail!("interrupted");
            }
            if started.elapsed() > self.patience {
                let patience = self.patience.as_secs();
                bail!("pgbench hangs: too few transactions after {patience} s; {}", self.words());
            }
            thread::sleep(Duration::from_millis(5));
        }
        thread::sleep(WARM_REST);
        Ok(())
    }

    /// Goes on for one window of `seconds`, and is held again.
    ///
    /// # Errors
    /// When pgbench has ended, the counters cannot be read or `stop` is set.
    pub fn slice(
        &mut self,
        seconds: f64,
        place: Pattern,
        instance: &Instance,
        server: u32,
        stop: &AtomicBool,
        during: impl FnMut(),
    ) -> Result<Window> {
        self.check_running()?;
        let clients: Vec<u32> = self.processes.iter().map(Running::pid).collect();
        let placement = Placement::take(place, &clients, instance.pid(), server);
        self.go_on();
        thread::sleep(PLACED);
        drop(placement);
        thread::sleep(SETTLE.saturating_sub(PLACED));
        let window = window(seconds, instance, stop, during);
        self.hold();
        window
    }

    /// Stops it where it stands; what its clients have asked for is answered meanwhile and read when it goes on.
    pub fn hold(&mut self) {
        self.signal(Signal::SIGSTOP);
        (self.held, self.was_held) = (true, true);
    }

    /// Lets it go on.
    fn go_on(&mut self) {
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
        // pgbench's -T is an alarm(2); its handler tells every client that this transaction is the last.
        self.signal(Signal::SIGALRM);
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
        let mut log = Log { held_until: self.was_held.then_some(SETTLE), ..Log::read(self.folder.path())? };
        (log.rate, log.types) = (self.rate, std::mem::take(&mut self.types));
        Ok(log)
    }

    fn signal(&self, signal: Signal) {
        for process in &self.processes {
            process.signal(signal);
        }
    }

    fn words(&mut self) -> String {
        self.messages.extend(self.lines.try_iter());
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

/// One transaction of pgbench's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    /// Its end in microseconds since 1970.
    end_us: u64,
    /// Its latency in microseconds; `None` where it failed or was skipped.
    latency_us: Option<u32>,
    /// Its script, from 0.
    script: usize,
}

/// Every transaction of a run, in the order in which each thread of pgbench finished them.
#[derive(Debug, Default)]
pub struct Log {
    entries: Vec<Entry>,
    /// With what the metrics of each script begin, where they are told apart.
    types: Vec<&'static str>,
    /// At which rate transactions were due.
    rate: Option<f64>,
    /// How long before each window it went on, if it had been held: what began before that waited for us.
    held_until: Option<Duration>,
}

impl Log {
    fn read(folder: &Path) -> Result<Self> {
        let mut log = Self::default();
        for path in log_files(folder)? {
            let text = fs::read_to_string(&path)?;
            log.entries.extend(text.lines().filter_map(parse_log));
        }
        Ok(log)
    }

    /// What happened within the windows of one sample, which do not overlap.
    ///
    /// A transaction that began before its load was last held counts from the moment it went on, which is less than it would
    /// have waited; more than a few of them, and the sample has no latency.
    ///
    /// # Errors
    /// When no transaction ended in them, or the rate was not kept.
    pub fn measured(&self, windows: &[Window]) -> Result<Measured> {
        let (mut latencies_ms, mut failed, mut waited) = (Vec::new(), 0, 0);
        let mut by_script: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        for Entry { end_us, latency_us, script } in &self.entries {
            let within = |window: &&Window| (window.from.wall_us..window.to.wall_us).contains(end_us);
            let Some(window) = windows.iter().find(within) else { continue };
            let Some(latency_us) = latency_us else {
                failed += 1;
                continue;
            };
            let began_us = end_us.saturating_sub(u64::from(*latency_us));
            let went_on_us = self
                .held_until
                .map_or(0, |before| window.from.wall_us.saturating_sub(before.as_micros() as u64));
            waited += u32::from(began_us < went_on_us);
            let latency_ms = (end_us - began_us.max(went_on_us)) as f64 / 1e3;
            latencies_ms.push(latency_ms);
            if !self.types.is_empty() {
                by_script.entry(*script).or_default().push(latency_ms);
            }
        }
        let transactions = latencies_ms.len() as f64;
        let Some(latency) = Latency::of(latencies_ms) else { bail!("no transaction ended in the window") };
        let latency = (f64::from(waited) <= WAITED_MAX * transactions).then_some(latency);
        let seconds: f64 = windows.iter().map(Window::seconds).sum();
        if let Some(due) = self.rate.map(|rate| rate * seconds)
            && transactions < due - MISSED_DEVIATIONS_MAX * due.sqrt()
        {
            bail!("the rate was not kept: {transactions} transactions ended and {due:.0} were due");
        }
        let busy: Busy = windows.iter().map(Window::busy).sum();
        let pooler: Tree = windows.iter().map(|window| window.to.pooler.since(&window.from.pooler)).sum();
        let each = |value: f64| value / transactions;
        let metrics = [
            (metric::TPS, transactions / seconds),
            (metric::BUSY, busy.total_us / windows.iter().map(Window::capacity_us).sum::<f64>()),
            (metric::CPU, each(busy.total_us)),
            (metric::CPU_USER, each(busy.user_us)),
            (metric::CPU_SYSTEM, each(busy.system_us)),
            (metric::CPU_SOFTIRQ, each(busy.softirq_us + busy.irq_us)),
            (metric::CPU_STEAL, each(busy.steal_us)),
            (metric::POOLER_CPU, each(pooler.user_us + pooler.system_us)),
            (metric::POOLER_USER, each(pooler.user_us)),
            (metric::POOLER_SYSTEM, each(pooler.system_us)),
            (metric::SWITCHES, each(busy.context_switches)),
            (metric::POOLER_SWITCHES, each(pooler.context_switches)),
            (metric::FAILED, f64::from(failed)),
            (metric::WINDOW, seconds),
        ];
        let times = latency.map(|l| [(metric::LATENCY_MEAN, l.mean), (metric::LATENCY_P99, l.p99)]);
        let all = metrics.into_iter().chain(times.into_iter().flatten());
        let mut metrics: BTreeMap<String, f64> = all.map(|(name, value)| (name.to_owned(), value)).collect();
        for (script, latencies_ms) in by_script {
            if let (Some(name), Some(latency)) = (self.types.get(script), Latency::of(latencies_ms)) {
                metrics.insert(format!("{name}_mean_ms"), latency.mean);
                metrics.insert(format!("{name}_p99_ms"), latency.p99);
            }
        }
        Ok((metrics, latency))
    }
}

/// Runs a load of its own start and end for `seconds`: one that cannot be held, or stands beside something that is measured.
/// `when_warm` may look at the system just before the window.
///
/// # Errors
/// When pgbench fails or hangs, or `stop` is set.
pub fn measure(
    load: &Load,
    seconds: f64,
    instance: &Instance,
    place: Place<'_>,
    stop: &AtomicBool,
    when_warm: impl FnOnce() -> Result<()>,
    during: impl FnMut(),
) -> Result<Measured> {
    let mut driver = Driver::start(load, instance, place)?;
    driver.wait_until_warm(stop)?;
    when_warm()?;
    thread::sleep(SETTLE_AFTER_A_LOOK);
    let window = window(seconds, instance, stop, during)?;
    driver.finish()?.measured(&[window])
}

/// Waits for `seconds` between two readings, and looks in on `during` in the middle, and five times a second if it is long.
///
/// # Errors
/// When the counters cannot be read or `stop` is set.
fn window(seconds: f64, instance: &Instance, stop: &AtomicBool, mut during: impl FnMut()) -> Result<Window> {
    let from = Reading::take(instance.pid(), instance.cgroup())?;
    let end = from.at + Duration::from_secs_f64(seconds);
    let step = Duration::from_secs_f64((seconds / 2.0).min(0.2));
    loop {
        let left = end.saturating_duration_since(Instant::now());
        thread::sleep(left.min(step));
        if stop.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        if Instant::now() >= end {
            break;
        }
        during();
    }
    let to = Reading::take(instance.pid(), instance.cgroup())?;
    Ok(Window { from, to })
}

/// The log files of a folder: one for each thread of pgbench.
fn log_files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("log")) {
            files.push(path);
        }
    }
    Ok(files)
}

fn log_bytes(folder: &Path) -> io::Result<u64> {
    log_files(folder)?.iter().map(|path| Ok(fs::metadata(path)?.len())).sum()
}

/// A folder for logs in memory where there is one: writing them back to a disk would be CPU in somebody else's turn.
fn log_folder(otherwise: &Path) -> Result<tempfile::TempDir> {
    let memory = Path::new("/dev/shm");
    let parent = if access(memory, AccessFlags::W_OK).is_ok() { memory } else { otherwise };
    Ok(tempfile::Builder::new().prefix("underpass-bench-log-").tempdir_in(parent)?)
}

fn command(
    load: &Load,
    instance: &Instance,
    place: Place<'_>,
    folder: &Path,
) -> Result<std::process::Command> {
    let program = find_program("pgbench").context("pgbench not found: install postgresql-contrib")?;
    let cpus = thread::available_parallelism().map_or(1, usize::from) as u32;
    let launch = Launch { netns: place.hosts.client.clone(), keep_user: true, ..Launch::default() };
    let mut command = launch.command(place.account, program);
    let clients = (load.clients / load.application_names).max(1);
    command
        .args(["-n", "-l", "--log-prefix"])
        .arg(folder.join("log"))
        .args(["-c", &clients.to_string()])
        .args(["-j", &threads(load, clients, cpus).to_string()])
        .args(["-M", load.protocol.name(), "-T", &UNTIL_ENDED_S.to_string()]);
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

/// Threads of pgbench. Each waits for all of its clients at once, whether they have anything to say or not. At a fixed rate each wait
/// ends with one answer or none, so with 500 clients most of it would be for nothing: such clients get more threads.
fn threads(load: &Load, clients: u32, cpus: u32) -> u32 {
    const CLIENTS_MAX: u32 = 20;
    const THREADS_MAX: u32 = 100;
    let threads = match (load.slow_logins, load.rate) {
        (true, _) => clients,
        (false, Some(_)) => clients.div_ceil(CLIENTS_MAX).min(THREADS_MAX).max(cpus),
        (false, None) => cpus,
    };
    threads.min(clients)
}

/// Reads `client transaction latency_us script seconds microseconds [...]`. A skipped or failed transaction has a word in place of
/// its latency.
fn parse_log(line: &str) -> Option<Entry> {
    let mut words = line.split(' ').skip(2);
    let latency_us = words.next()?.parse::<f64>().ok().map(|us| us as u32);
    let script = words.next()?.parse().ok()?;
    let seconds: u64 = words.next()?.parse().ok()?;
    let micros: u64 = words.next()?.parse().ok()?;
    Some(Entry { end_us: seconds * 1_000_000 + micros, latency_us, script })
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    #[test]
    fn log_lines_are_read_and_garbage_is_not() {
        let entry = Entry { end_us: 11_000_005, latency_us: Some(1500), script: 3 };
        assert_eq!(parse_log("0 7 1500 3 11 5"), Some(entry));
        assert_eq!(parse_log("0 7 1500 3 11 5 250"), Some(entry), "with a schedule lag");
        assert_eq!(parse_log("0 7 skipped 3 11 5"), Some(Entry { latency_us: None, ..entry }));
        assert_eq!(parse_log("garbage"), None);
        assert_eq!(parse_log("0 7 1500 0 11"), None, "the end of a torn file");
    }

    #[test]
    fn many_clients_at_a_fixed_rate_have_threads_of_their_own() {
        let at_rate = Load { rate: Some(2000.0), ..Load::new(1, Protocol::Simple, "") };
        let full_speed = Load::new(1, Protocol::Simple, "");
        for (load, clients, expected) in [
            (&at_rate, 1, 1),
            (&at_rate, 20, 2),
            (&at_rate, 1000, 50),
            (&at_rate, 10_000, 100),
            (&full_speed, 1000, 2),
            (&Load { slow_logins: true, ..at_rate.clone() }, 30, 30),
        ] {
            assert_eq!(threads(load, clients, 2), expected, "{clients}");
        }
    }

    #[test]
    fn only_what_ended_in_the_window_counts() {
        let mut from = Reading::take(None, None).unwrap();
        let mut to = from;
        (from.wall_us, to.wall_us) = (1_000, 2_001_000);
        to.at = from.at + Duration::from_secs(2);
        let entry = |end_us, latency_us, script| Entry { end_us, latency_us, script };
        let mut log = Log {
            entries: vec![
                entry(999, Some(9000), 0),
                entry(1_000, Some(100), 0),
                entry(2_000_000, Some(300), 1),
                entry(5_000, None, 0),
                entry(2_001_000, Some(9000), 0),
            ],
            ..Log::default()
        };
        let (metrics, latency) = log.measured(&[Window { from, to }]).unwrap();
        assert!((metrics[metric::TPS] - 1.0).abs() < 1e-9);
        assert!((metrics[metric::LATENCY_MEAN] - 0.2).abs() < 1e-9);
        assert_eq!((metrics[metric::FAILED], latency.unwrap().count), (1.0, 2));
        log.types = vec!["payment", "delivery"];
        let (metrics, _) = log.measured(&[Window { from, to }]).unwrap();
        assert_eq!((metrics["payment_mean_ms"], metrics["delivery_p99_ms"]), (0.1, 0.3), "types apart");
        assert!(Log::default().measured(&[Window { from, to }]).is_err());
        log.rate = Some(1.0);
        assert!(log.measured(&[Window { from, to }]).is_ok());
        log.rate = Some(50.0);
        let error = log.measured(&[Window { from, to }]).unwrap_err().to_string();
        assert!(error.contains("rate was not kept"), "{error}");
    }

    #[test]
    fn windows_of_a_sample_add_up() {
        let at = |wall_us, at| Reading { wall_us, at, ..Reading::take(None, None).unwrap() };
        let start = Instant::now();
        let window = |from_ms: u64, to_ms: u64| Window {
            from: at(from_ms * 1000, start + Duration::from_millis(from_ms)),
            to: at(to_ms * 1000, start + Duration::from_millis(to_ms)),
        };
        // These began before the load went on, 50 ms before a window: they count from there.
        let log = |waited: Range<u64>| Log {
            held_until: Some(Duration::from_millis(50)),
            entries: (0..1000)
                .map(|ms| Entry {
                    end_us: ms * 1000,
                    latency_us: Some(if waited.contains(&ms) { 300_000 } else { 100 }),
                    script: 0,
                })
                .collect(),
            ..Log::default()
        };
        let windows = [window(100, 200), window(700, 800)];
        let (metrics, latency) = log(710..712).measured(&windows).unwrap();
        assert_eq!(latency.map(|latency| (latency.count, latency.max)), Some((200, 61.0)));
        assert!((metrics[metric::TPS] - 1000.0).abs() < 1e-6);
        let (metrics, latency) = log(710..713).measured(&windows).unwrap();
        assert!(latency.is_none() && !metrics.contains_key(metric::LATENCY_P99), "more than 1 % waited");
        assert!((metrics[metric::TPS] - 1000.0).abs() < 1e-6);
    }

    #[test]
    fn what_may_hold_locks_is_not_held() {
        let held = |script: &str| Load::new(1, Protocol::Simple, script).can_be_held();
        assert!(held("begin;\nselect 1;\ncommit;\n"));
        assert!(held("select updated from deletes;\n"));
        assert!(!held("BEGIN;\nUPDATE t SET a = 1;\nEND;\n"));
        let by_name = |name: &str| {
            let workload = crate::workloads::find(name).unwrap();
            Load { scripts: workload.scripts(), ..Load::new(1, Protocol::Simple, "") }.can_be_held()
        };
        assert!(by_name("ycsb") && by_name("noop"));
        assert!(!by_name("tpcb") && !by_name("smallbank") && !by_name("ycsb-10-90"));
    }

    #[test]
    fn a_sample_has_several_slices_but_not_at_a_fixed_rate() {
        let mut load = Load::new(1000, Protocol::Simple, ";");
        assert_eq!((load.slices(0.6), load.slices(0.05)), (5, 1));
        assert!(load.warm_bytes() > 1000 * 1000);
        load.rate = Some(2000.0);
        assert_eq!(load.slices(0.6), 1);
        assert!(load.warm_bytes() < 100 * 1000 && !load.can_be_held());
        let logins = Load { reconnect: true, ..Load::new(4, Protocol::Simple, ";") };
        assert_eq!(logins.slices(0.6), 1);
    }
}
