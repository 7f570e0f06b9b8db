// SPDX-License-Identifier: Apache-2.0
//! Large copies, with and without a receiver that stops.
//!
//! Every line carries its number and is checked against it where it arrives: by the client on the way out, by the
//! server on the way in, where a line that is not the next one is stored and so counted in the tag.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{memory_mib, named};
use crate::client::Client;
use crate::counters::{Reading, Window, memory_available_mib};
use crate::pgbench::Measured;
use crate::postgres::DATABASE;
use crate::sample::{Latency, metric};
use crate::systems::{Instance, Place};

/// Bytes of one line, its newline included.
const LINE_BYTES: u64 = 1001;

/// Where the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyDirection {
    /// COPY ... TO STDOUT.
    Out,
    /// COPY ... FROM STDIN.
    In,
}

impl CopyDirection {
    /// `out` or `in`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Out => "out",
            Self::In => "in",
        }
    }
}

/// SQL of what copies in need: a table for wrong lines, and the next line's number for each client.
pub(super) fn preparation(clients: u32) -> String {
    let sequences =
        (0..clients).map(|client| format!("create sequence if not exists copy_lines_{client};\n"));
    "create table if not exists copy_wrong (line text);\n".to_owned() + &sequences.collect::<String>()
}

/// One client of a copy.
struct Copier {
    client: Client,
    number: u32,
    direction: CopyDirection,
    lines: u64,
}

impl Copier {
    fn connect(number: u32, direction: CopyDirection, megabytes: u64, instance: &Instance) -> Result<Self> {
        let mut client = Client::connect(&instance.endpoint)?;
        // A query first: what a backend allocates for its first one is no queue.
        client.query("copy (select 1) to stdout")?;
        Ok(Self { client, number, direction, lines: megabytes * 1_000_000 / LINE_BYTES })
    }

    /// Begins the transaction that the copy is in and returns its backend's process id.
    fn begin(&mut self) -> Result<i32> {
        if self.direction == CopyDirection::In {
            self.client.query(&format!("select setval('copy_lines_{}', 1, false)", self.number))?;
        }
        self.client.query("begin")?;
        let pid = self.client.query("select pg_backend_pid()")?;
        pid.first().and_then(|row| row.parse().ok()).context("pg_backend_pid() gave no number")
    }

    /// Asks for the copy without reading its result.
    fn start(&mut self) -> Result<()> {
        let lines = self.lines;
        match self.direction {
            // A set-returning function in the select list streams; in FROM it would first be stored, which costs memory.
            CopyDirection::Out => self.client.send_query(&format!(
                "copy (select lpad(n::text, 1000, 'x') from (select generate_series(1, {lines}) n) t) to stdout"
            ))?,
            CopyDirection::In => self.client.send_query(&format!(
                "copy copy_wrong from stdin where line <> lpad(nextval('copy_lines_{}')::text, 1000, 'x')",
                self.number
            ))?,
        }
        Ok(())
    }

    /// Reads the whole result, or sends all lines, and ends the transaction.
    fn complete(&mut self, place: Place<'_>) -> Result<()> {
        let mut next = Line::first();
        match self.direction {
            CopyDirection::Out => {
                let mut wrong = None;
                let lines = self.client.drain_copy(|body| {
                    if wrong.is_none() && body != next.text() {
                        wrong = Some(String::from_utf8_lossy(body).into_owned());
                    }
                    next.advance();
                })?;
                ensure!(
                    wrong.is_none(),
                    "a line that is not the next one arrived: {}",
                    wrong.unwrap_or_default()
                );
                ensure!(lines == self.lines, "{lines} lines arrived of {}", self.lines);
            }
            CopyDirection::In => {
                let tag = self.client.send_copy(self.lines, |line| {
                    line.extend_from_slice(next.text());
                    next.advance();
                })?;
                ensure!(tag == "COPY 0", "lines arrived that are not the next one: {tag}");
                let sql = format!("select last_value from copy_lines_{}", self.number);
                let arrived = place.server.psql(DATABASE, &sql)?;
                ensure!(
                    arrived.trim() == self.lines.to_string(),
                    "{} lines arrived of {}",
                    arrived.trim(),
                    self.lines
                );
            }
        }
        self.client.query("commit")?;
        Ok(())
    }
}

/// The text of line n: its number, filled up with x to 1000 characters.
struct Line {
    number: u64,
    text: Vec<u8>,
}

impl Line {
    fn first() -> Self {
        let mut line = Self { number: 0, text: vec![b'x'; LINE_BYTES as usize] };
        line.text[LINE_BYTES as usize - 1] = b'\n';
        line.advance();
        line
    }

    fn advance(&mut self) {
        self.number += 1;
        let digits = self.number.to_string();
        let end = self.text.len() - 1;
        self.text[end - digits.len()..end].copy_from_slice(digits.as_bytes());
    }

    fn text(&self) -> &[u8] {
        &self.text
    }
}

/// Server processes that are stopped until the value goes.
struct Stopped(Vec<Pid>);

impl Stopped {
    fn stop(pids: &[i32]) -> Result<Self> {
        let stopped = Self(pids.iter().map(|pid| Pid::from_raw(*pid)).collect());
        for pid in &stopped.0 {
            kill(*pid, Signal::SIGSTOP).context("cannot stop a server process")?;
        }
        Ok(stopped)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        for pid in &self.0 {
            // One that has ended needs nothing.
            let _ = kill(*pid, Signal::SIGCONT);
        }
    }
}

/// Another client, which asks for little while receivers stand.
struct Witness {
    client: Client,
    latencies: Vec<f64>,
}

impl Witness {
    /// Between two of its transactions: often enough to tell a stall, too seldom to load the machine.
    const PAUSE: Duration = Duration::from_millis(1);

    fn connect(instance: &Instance) -> Result<Self> {
        let mut client = Client::connect(&instance.endpoint)?;
        client.query("select 1")?;
        Ok(Self { client, latencies: Vec::new() })
    }

    /// Goes on for `time`, and calls `look` every half second.
    fn watch(
        &mut self,
        time: Duration,
        stop: &AtomicBool,
        mut look: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let (began, mut looks) = (Instant::now(), 0);
        while began.elapsed() < time && !stop.load(Ordering::Relaxed) {
            let sent = Instant::now();
            self.client.query("select 1").context("the client beside those that stand")?;
            self.latencies.push(sent.elapsed().as_secs_f64() * 1e3);
            if began.elapsed() >= Duration::from_millis(500) * (looks + 1) {
                look()?;
                looks += 1;
            }
            thread::sleep(Self::PAUSE);
        }
        Ok(())
    }

    /// What it has seen since this was asked last.
    fn told(&mut self) -> Latency {
        Latency::of(std::mem::take(&mut self.latencies)).unwrap_or_default()
    }
}

/// For how long the witness is watched before receivers stop.
const WATCH_BEFORE: Duration = Duration::from_secs(3);

/// Copies whose receiver stops for `pause_s` seconds, what is held for them meanwhile, and whether all arrives after.
pub(super) fn stalled(
    clients: u32,
    direction: CopyDirection,
    megabytes: u64,
    pause_s: u64,
    instance: &Instance,
    place: Place<'_>,
    stop: &AtomicBool,
) -> Result<Measured> {
    let mut copiers = (0..clients)
        .map(|number| Copier::connect(number, direction, megabytes, instance))
        .collect::<Result<Vec<_>>>()?;
    let sockets = copiers.iter().map(|copier| copier.client.socket()).collect::<io::Result<Vec<_>>>()?;
    let pids = copiers.iter_mut().map(Copier::begin).collect::<Result<Vec<_>>>()?;
    let mut witness = Witness::connect(instance)?;
    witness.watch(WATCH_BEFORE, stop, || memory_mib(instance).map(drop))?;
    let calm = witness.told();
    let from = Reading::take(instance.pid(), instance.cgroup())?;
    let memory_before = memory_mib(instance)?;
    let available_before = memory_available_mib()?;
    for copier in &mut copiers {
        copier.start()?;
    }
    thread::sleep(Duration::from_millis(200));
    let stopped = match direction {
        CopyDirection::Out => None,
        CopyDirection::In => Some(Stopped::stop(&pids)?),
    };
    let each = |mib: f64| mib / f64::from(clients);
    let (mut growth, mut unavailable, mut early) = (f64::MIN, f64::MIN, None);
    let (seconds, window) = thread::scope(|scope| -> Result<(f64, Window)> {
        // Senders run into the stopped server at once; readers begin to read when the pause is over.
        let spawn = |copier| scope.spawn(|| Copier::complete(copier, place));
        let (mut senders, mut readers) = (Vec::new(), copiers.iter_mut().collect::<Vec<_>>());
        if direction == CopyDirection::In {
            senders = readers.drain(..).map(spawn).collect();
        }
        let began = Instant::now();
        let pause = Duration::from_secs(pause_s);
        witness.watch(pause, stop, || {
            growth = growth.max(memory_mib(instance)? - memory_before);
            let now = available_before - memory_available_mib()?;
            unavailable = unavailable.max(now);
            if early.is_none() && began.elapsed() > pause / 3 {
                early = Some(now);
            }
            Ok(())
        })?;
        let late = available_before - memory_available_mib()?;
        early = early.map(|early| late - early);
        drop(stopped);
        let resumed = Instant::now();
        senders.extend(readers.into_iter().map(spawn));
        join_all(senders, &sockets, stop).context("a copy did not complete after the pause")?;
        let to = Reading::take(instance.pid(), instance.cgroup())?;
        Ok((resumed.elapsed().as_secs_f64(), Window { from, to }))
    })?;
    let beside = witness.told();
    Ok((
        named([
            (metric::OTHERS_MEAN, beside.mean / calm.mean),
            (metric::OTHERS_P99, beside.p99 / calm.p99),
            (metric::MEMORY_GROWTH, each(growth)),
            (metric::UNAVAILABLE, each(unavailable)),
            (metric::CREEP, each(early.unwrap_or_default())),
            (metric::SECONDS, seconds),
            (metric::CPU_SECONDS, window.busy().total_us / 1e6),
        ]),
        None,
    ))
}

/// Waits for copies; when `stop` is set meanwhile, their connections are shut down, so that this takes no longer.
fn join_all(
    copies: Vec<ScopedJoinHandle<'_, Result<()>>>,
    sockets: &[TcpStream],
    stop: &AtomicBool,
) -> Result<()> {
    while copies.iter().any(|copy| !copy.is_finished()) && !stop.load(Ordering::Relaxed) {
        thread::sleep(Duration::from_millis(2));
    }
    let interrupted = stop.load(Ordering::Relaxed);
    if interrupted {
        for socket in sockets {
            // One that has been closed by its peer needs nothing.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
    for copy in copies {
        match copy.join() {
            Ok(result) if !interrupted => result?,
            // It failed because it was told to.
            Ok(_) => {}
            Err(_) => bail!("a copier panicked"),
        }
    }
    ensure!(!interrupted, "interrupted");
    Ok(())
}

/// One copy from beginning to end.
pub(super) fn whole(
    direction: CopyDirection,
    megabytes: u64,
    instance: &Instance,
    place: Place<'_>,
    stop: &AtomicBool,
) -> Result<Measured> {
    let mut copier = Copier::connect(0, direction, megabytes, instance)?;
    copier.begin()?;
    let from = Reading::take(instance.pid(), instance.cgroup())?;
    copier.start()?;
    let sockets = [copier.client.socket()?];
    thread::scope(|scope| join_all(vec![scope.spawn(|| copier.complete(place))], &sockets, stop))?;
    let window = Window { from, to: Reading::take(instance.pid(), instance.cgroup())? };
    let cpu_s = window.busy().total_us / 1e6;
    Ok((named([(metric::SECONDS, window.seconds()), (metric::CPU_SECONDS, cpu_s)]), None))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stalled_copy_ends_when_it_is_told_to() {
        use std::io::Read as _;
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut reader = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        // The other end is open and says nothing.
        let _silent = listener.accept().unwrap();
        let sockets = [reader.try_clone().unwrap()];
        let stop = AtomicBool::new(false);
        let error = thread::scope(|scope| {
            let copy = scope.spawn(|| Ok(reader.read_exact(&mut [0])?));
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(50));
                stop.store(true, Ordering::Relaxed);
            });
            join_all(vec![copy], &sockets, &stop).unwrap_err().to_string()
        });
        assert_eq!(error, "interrupted");
    }

    #[test]
    fn lines_are_numbered_and_of_one_length() {
        let mut line = Line::first();
        assert!(line.text().ends_with(b"xx1\n"));
        for _ in 0..99 {
            line.advance();
        }
        assert!(line.text().ends_with(b"x100\n"));
        assert_eq!(line.text().len() as u64, LINE_BYTES);
    }
}
