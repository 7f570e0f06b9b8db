// SPDX-License-Identifier: Apache-2.0
//! Measurements that are not a run of pgbench alone: idle clients, slow readers, pg_dump.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;

use crate::client::Client;
use crate::counters::{Busy, Reading, Tree, memory_available_mib};
use crate::pgbench::{self, Load, Measured, Protocol};
use crate::procs::{Launch, Running, find_program};
use crate::sample::metric;
use crate::systems::{Instance, Place};

/// Bytes of one row of the slow reader's COPY, its newline included.
const ROW_BYTES: u64 = 1001;
/// Clients of the load beside idle clients.
const ACTIVE_CLIENTS: u32 = 16;

/// One such measurement.
#[derive(Clone, Debug, PartialEq)]
pub enum Task {
    /// Logged-in clients that do nothing, beside a fixed rate of others.
    Idle {
        /// Idle clients.
        clients: u32,
        /// Transactions per second of the others.
        rate: f64,
    },
    /// Clients that ask for a large result, stop reading for a while and then read it all.
    SlowReader {
        /// Readers at once.
        readers: u32,
        /// Size of each result in MB (10^6 bytes), about.
        megabytes: u64,
        /// How long they stop, in seconds.
        pause_s: u64,
    },
    /// pg_dump of tables of integers.
    Dump {
        /// Tables.
        tables: u32,
        /// Rows of each.
        rows: u64,
    },
}

impl Task {
    /// Does it.
    ///
    /// # Errors
    /// When a client or program fails, a result is incomplete, or `stop` is set.
    pub fn run(
        &self,
        seconds: u32,
        instance: &Instance,
        place: Place<'_>,
        stop: &AtomicBool,
    ) -> Result<Measured> {
        match *self {
            Self::Idle { clients, rate } => idle(clients, rate, seconds, instance, place, stop),
            Self::SlowReader { readers, megabytes, pause_s } => {
                slow_reader(readers, megabytes, Duration::from_secs(pause_s), instance, stop)
            }
            Self::Dump { .. } => dump(instance, place, stop),
        }
    }

    /// SQL that makes its data, empty if it needs none.
    #[must_use]
    pub fn preparation(&self) -> String {
        let Self::Dump { tables, rows } = self else { return String::new() };
        (0..*tables)
            .map(|table| {
                format!("create table dump_{table} as select g as value from generate_series(1, {rows}) g;\n")
            })
            .collect()
    }

    /// True when it opens sockets from the bench itself and so needs to be where the clients are.
    #[must_use]
    pub fn connects_itself(&self) -> bool {
        !matches!(self, Self::Dump { .. })
    }

    /// File descriptors that it needs in one process.
    #[must_use]
    pub fn descriptors(&self) -> u64 {
        match self {
            Self::Idle { clients, .. } => u64::from(*clients),
            Self::SlowReader { readers, .. } => u64::from(*readers),
            Self::Dump { .. } => 0,
        }
    }
}

fn idle(
    clients: u32,
    rate: f64,
    seconds: u32,
    instance: &Instance,
    place: Place<'_>,
    stop: &AtomicBool,
) -> Result<Measured> {
    let memory = || -> Result<f64> {
        let Some(pid) = instance.pid() else { return Ok(0.0) };
        Ok(Tree::default().with_memory(pid)?.pss_kib / 1024.0)
    };
    let before = memory()?;
    let mut open = Vec::with_capacity(clients as usize);
    for number in 0..clients {
        if stop.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        open.push(
            Client::connect(&instance.endpoint)
                .with_context(|| format!("client {} of {clients}", number + 1))?,
        );
    }
    // Servers that were opened for logins settle, and so does the allocator.
    thread::sleep(Duration::from_secs(1));
    let after = memory()?;
    let load = Load { rate: Some(rate), ..Load::new(ACTIVE_CLIENTS, Protocol::Simple, "select 1;\n") };
    let (mut metrics, latency) = pgbench::measure(&load, seconds, instance, place, stop)?;
    metrics.insert(metric::MEMORY.to_owned(), after);
    metrics.insert(metric::MEMORY_GROWTH.to_owned(), after - before);
    Ok((metrics, latency))
}

fn slow_reader(
    readers: u32,
    megabytes: u64,
    pause: Duration,
    instance: &Instance,
    stop: &AtomicBool,
) -> Result<Measured> {
    let rows = megabytes * 1_000_000 / ROW_BYTES;
    // A set-returning function in the select list streams; in FROM it would first be stored, which costs memory too.
    let sql = format!(
        "copy (select repeat('x', {}) from (select generate_series(1, {rows})) t) to stdout",
        ROW_BYTES - 1
    );
    let pss = || -> Result<f64> {
        let Some(pid) = instance.pid() else { return Ok(0.0) };
        Ok(Tree::default().with_memory(pid)?.pss_kib / 1024.0)
    };
    let mut clients =
        (0..readers).map(|_| Client::connect(&instance.endpoint)).collect::<std::io::Result<Vec<_>>>()?;
    // A query each first: what a backend allocates for its first query is no queue.
    for client in &mut clients {
        client.send_query("copy (select 1) to stdout")?;
        client.drain_copy()?;
    }
    let (memory_before, available_before) = (pss()?, memory_available_mib()?);
    let reading = Reading::take(instance.pid(), instance.cgroup())?;
    for client in &mut clients {
        client.send_query(&sql)?;
    }
    let (mut growth, mut unavailable) = (f64::MIN, f64::MIN);
    let deadline = Instant::now() + pause;
    while Instant::now() < deadline {
        if stop.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        thread::sleep(Duration::from_millis(500));
        growth = growth.max(pss()? - memory_before);
        unavailable = unavailable.max(available_before - memory_available_mib()?);
    }
    let resumed = Instant::now();
    for result in drain_all(&mut clients) {
        let (messages, bytes) = result?;
        ensure!(
            (messages, bytes) == (rows, rows * ROW_BYTES),
            "a reader got {messages} rows and {bytes} bytes instead of {rows} and {}",
            rows * ROW_BYTES
        );
    }
    let seconds = resumed.elapsed().as_secs_f64();
    let end = Reading::take(instance.pid(), instance.cgroup())?;
    let busy =
        Busy::between(&reading.machine, &end.machine, end.at.duration_since(reading.at).as_secs_f64() * 1e6);
    Ok((
        named([
            (metric::MEMORY_GROWTH, growth),
            (metric::UNAVAILABLE, unavailable),
            (metric::SECONDS, seconds),
            (metric::CPU_SECONDS, busy.total_us / 1e6),
        ]),
        None,
    ))
}

fn drain_all(clients: &mut [Client]) -> Vec<Result<(u64, u64)>> {
    thread::scope(|scope| {
        let threads: Vec<_> = clients.iter_mut().map(|client| scope.spawn(|| client.drain_copy())).collect();
        threads
            .into_iter()
            .map(|thread| match thread.join() {
                Ok(result) => result.context("the copy did not complete after the reader resumed"),
                Err(_) => bail!("a reader panicked"),
            })
            .collect()
    })
}

fn dump(instance: &Instance, place: Place<'_>, stop: &AtomicBool) -> Result<Measured> {
    let program = find_program("pg_dump").context("pg_dump not found: install postgresql-client")?;
    let launch = Launch { netns: place.hosts.client.clone(), cpus: None, keep_user: true };
    let mut command = launch.command(place.account, program);
    command.args(["--data-only", "-t", "dump_*"]);
    instance.endpoint.apply(&mut command);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let before = Reading::take(instance.pid(), instance.cgroup())?;
    let mut running = Running::start(command, "pg_dump", Signal::SIGTERM)?;
    let status = loop {
        if stop.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        if let Some(status) = running.ended()? {
            break status;
        }
        thread::sleep(Duration::from_millis(5));
    };
    let after = Reading::take(instance.pid(), instance.cgroup())?;
    if !status.success() {
        let mut text = String::new();
        if let Some(mut stderr) = running.child().stderr.take() {
            std::io::Read::read_to_string(&mut stderr, &mut text)?;
        }
        bail!("pg_dump failed ({status}): {}", text.lines().next().unwrap_or(""));
    }
    let elapsed = after.at.duration_since(before.at).as_secs_f64();
    let busy = Busy::between(&before.machine, &after.machine, elapsed * 1e6);
    Ok((named([(metric::SECONDS, elapsed), (metric::CPU_SECONDS, busy.total_us / 1e6)]), None))
}

fn named<const N: usize>(metrics: [(&str, f64); N]) -> BTreeMap<String, f64> {
    metrics.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_dump_needs_tables() {
        let dump = Task::Dump { tables: 2, rows: 10 }.preparation();
        assert_eq!(dump.matches("create table").count(), 2);
        assert!(Task::Idle { clients: 1, rate: 1.0 }.preparation().is_empty());
    }
}
