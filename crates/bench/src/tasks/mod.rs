// SPDX-License-Identifier: Apache-2.0
//! Measurements that are not a run of pgbench alone.

mod copy;
mod dump;
mod idle;
pub mod sysbench;
pub mod tpcc;

use std::collections::BTreeMap;
use std::io::Read as _;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use nix::sys::signal::Signal;

pub use self::copy::CopyDirection;
pub use self::sysbench::Script;
use crate::counters::{Reading, Tree, Window};
use crate::pgbench::Measured;
use crate::procs::Running;
use crate::systems::{Instance, Place};

/// What PostgreSQL sends of rows of a kilobyte in a second, about.
const COPY_MB_PER_S: f64 = 240.0;

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
    /// Large copies whose receiver stops for a while: the clients, or the server's processes.
    Stalled {
        /// Clients at once.
        clients: u32,
        /// Who stops.
        direction: CopyDirection,
        /// Size of each copy in MB (10^6 bytes), about.
        megabytes: u64,
        /// How long it stops, in seconds.
        pause_s: u64,
    },
    /// One large copy without a pause.
    Copy {
        /// Its direction.
        direction: CopyDirection,
        /// Its size in MB (10^6 bytes), about.
        megabytes: u64,
    },
    /// pg_dump of tables of integers.
    Dump {
        /// Tables.
        tables: u32,
        /// Rows of each.
        rows: u64,
    },
    /// sysbench on MariaDB.
    Sysbench {
        /// Clients.
        clients: u32,
        /// What they do.
        script: Script,
    },
    /// TPC-C by go-tpc, its five types apart.
    Tpcc {
        /// Clients.
        clients: u32,
        /// Warehouses.
        warehouses: u32,
    },
}

impl Task {
    /// Does it.
    ///
    /// # Errors
    /// When a client or program fails, a result is incomplete, or `stop` is set.
    pub fn run(
        &self,
        seconds: f64,
        instance: &Instance,
        place: Place<'_>,
        stop: &AtomicBool,
    ) -> Result<Measured> {
        match *self {
            Self::Idle { clients, rate } => idle::run(clients, rate, seconds, instance, place, stop),
            Self::Stalled { clients, direction, megabytes, pause_s } => {
                copy::stalled(clients, direction, megabytes, pause_s, instance, place, stop)
            }
            Self::Copy { direction, megabytes } => copy::whole(direction, megabytes, instance, place, stop),
            Self::Dump { .. } => dump::run(instance, place, stop),
            Self::Sysbench { clients, script } => {
                sysbench::run(clients, script, seconds, instance, place, stop)
            }
            Self::Tpcc { clients, warehouses } => {
                tpcc::run(clients, warehouses, seconds, instance, place, stop)
            }
        }
    }

    /// About how many seconds it takes with a measured time of `seconds`.
    #[must_use]
    pub fn seconds(&self, seconds: f64) -> f64 {
        match *self {
            // Logins, a second to settle, warm-up.
            Self::Idle { clients, .. } => seconds + 3.0 + f64::from(clients) / 4000.0,
            Self::Stalled { clients, megabytes, pause_s, .. } => {
                pause_s as f64 + 4.0 + f64::from(clients) * megabytes as f64 / COPY_MB_PER_S
            }
            Self::Copy { megabytes, .. } => 1.0 + megabytes as f64 / COPY_MB_PER_S,
            // pg_dump of a few million integers a second.
            Self::Dump { tables, rows } => f64::from(tables) * rows as f64 / 3e6,
            Self::Tpcc { .. } => seconds.max(tpcc::SECONDS_MIN) + 1.0,
            Self::Sysbench { .. } => seconds.max(sysbench::SECONDS_MIN) + 1.0,
        }
    }

    /// SQL that makes its data, empty if it needs none.
    #[must_use]
    pub fn preparation(&self) -> String {
        match *self {
            Self::Dump { tables, rows } => dump::preparation(tables, rows),
            Self::Stalled { clients, direction: CopyDirection::In, .. } => copy::preparation(clients),
            Self::Copy { direction: CopyDirection::In, .. } => copy::preparation(1),
            _ => String::new(),
        }
    }

    /// True when it opens sockets from the bench itself, or to MariaDB, which is on loopback, and so has no hosts apart.
    #[must_use]
    pub fn connects_itself(&self) -> bool {
        matches!(self, Self::Idle { .. } | Self::Stalled { .. } | Self::Copy { .. } | Self::Sysbench { .. })
    }

    /// True when its clients use named statements.
    #[must_use]
    pub fn names_statements(&self) -> bool {
        matches!(self, Self::Tpcc { .. })
    }

    /// File descriptors that it needs in one process, and connections.
    #[must_use]
    pub fn connections(&self) -> u32 {
        match *self {
            Self::Idle { clients, .. } | Self::Stalled { clients, .. } | Self::Tpcc { clients, .. } => {
                clients
            }
            // Sysbench's are MariaDB's.
            Self::Copy { .. } | Self::Dump { .. } | Self::Sysbench { .. } => 2,
        }
    }
}

/// Runs a client program to its end and returns what it wrote into its pipes, which must be little, and its time.
fn run_program(
    command: Command,
    what: &str,
    instance: &Instance,
    stop: &AtomicBool,
) -> Result<(String, Window)> {
    let from = Reading::take(instance.pid(), instance.cgroup())?;
    let mut running = Running::start(command, what, Signal::SIGTERM)?;
    let status = loop {
        if stop.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        if let Some(status) = running.ended()? {
            break status;
        }
        thread::sleep(Duration::from_millis(5));
    };
    let window = Window { from, to: Reading::take(instance.pid(), instance.cgroup())? };
    let mut text = String::new();
    let child = running.child();
    if let Some(stdout) = &mut child.stdout {
        stdout.read_to_string(&mut text)?;
    }
    if let Some(stderr) = &mut child.stderr {
        stderr.read_to_string(&mut text)?;
    }
    ensure!(status.success(), "{what} failed ({status}): {}", text.lines().last().unwrap_or(""));
    Ok((text, window))
}

/// Resident memory of the pooler in MiB, shared libraries included; 0 for a direct connection.
fn resident_mib(instance: &Instance) -> Result<f64> {
    let Some(pid) = instance.pid() else { return Ok(0.0) };
    Ok(Tree::default().with_memory(pid)?.rss_kib / 1024.0)
}

/// Memory of the pooler (Pss) in MiB; 0 for a direct connection.
fn memory_mib(instance: &Instance) -> Result<f64> {
    let Some(pid) = instance.pid() else { return Ok(0.0) };
    Ok(Tree::default().with_memory(pid)?.pss_kib / 1024.0)
}

fn named<const N: usize>(metrics: [(&str, f64); N]) -> BTreeMap<String, f64> {
    metrics.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_dumps_and_copies_in_need_tables() {
        let dump = Task::Dump { tables: 2, rows: 10 }.preparation();
        assert_eq!(dump.matches("create table").count(), 2);
        let copy = Task::Stalled { clients: 3, direction: CopyDirection::In, megabytes: 1, pause_s: 1 };
        assert_eq!(copy.preparation().matches("create sequence").count(), 3);
        assert!(Task::Idle { clients: 1, rate: 1.0 }.preparation().is_empty());
    }
}
