// SPDX-License-Identifier: Apache-2.0
//! Everything that can be wrong is said before the run starts, with what to do about it.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use crate::counters::memory_available_mib;
use crate::experiments::{Step, Work};
use crate::hosts::Topology;
use crate::pgbench::Protocol;
use crate::postgres::ServerNeeds;
use crate::procs::find_program;
use crate::systems::{Kind, Login, Setup, System};
use crate::tasks::{self, Task};

/// Memory of one PostgreSQL backend in MiB that is not shared, once it has run a few statements. Measured on
/// PostgreSQL 15: 2 to 4 with small catalogs.
const BACKEND_MIB: f64 = 4.0;
/// Memory of one client with its sockets in a pooler and in the load generator, in MiB.
const CLIENT_MIB: f64 = 0.1;
/// Memory of one child process of Pgpool-II in MiB.
const PGPOOL_CHILD_MIB: f64 = 2.0;
/// Descriptors for logs, libraries and event loops beside those for connections.
const SPARE_DESCRIPTORS: u64 = 200;

/// Connections for the harness itself, and for processes of the server that are about to end.
const SPARE_CONNECTIONS: u32 = 30;

/// A step for a system.
pub type Planned<'a> = (&'a Step, &'a System);

/// Why a system does not take part in a step, or `None` if it does.
#[must_use]
pub fn reason_to_skip(step: &Step, system: &System, topology: Topology) -> Option<String> {
    let setup = &step.setup;
    if system.is_pooler() && !system.pool_modes.contains(&setup.pool_mode) {
        return Some(format!("{} has no {} pooling", system.title, setup.pool_mode.name()));
    }
    if system.tcp_only && setup.client_unix {
        return Some(format!("{}: clients by TCP only", system.title));
    }
    if setup.rsa && !system.is_pooler() {
        return Some(format!("{}: the server itself has no RSA key", system.title));
    }
    if system.kind == Kind::Other {
        if setup.client_tls || setup.client_unix || setup.server_unix {
            return Some(format!("{}: its template has no TLS or unix sockets", system.title));
        }
        if setup.login == Login::Scram && !system.scram {
            return Some(format!("{} has no SCRAM for clients, or its template none", system.title));
        }
    }
    if let Some(lane) = &system.lane
        && (setup.client_unix || setup.server_unix)
    {
        return Some(format!("{}: unix sockets have no lane {lane}", system.title));
    }
    if topology == Topology::Netns && matches!(system.lane.as_deref(), Some("A" | "B")) {
        return Some(format!("{}: its lane needs the server on the pooler's host", system.title));
    }
    let names_statements = match &step.work {
        Work::Pgbench { load, .. } => load.protocol == Protocol::Prepared,
        Work::Task(task) => task.names_statements(),
    };
    if let (true, Work::Pgbench { load, .. }) = (system.second_load, &step.work)
        && load.rate.is_none()
    {
        return Some(format!("{}: at full speed the two loads would only share the machine", system.title));
    }
    if names_statements && !system.prepared.contains(&setup.pool_mode) {
        return Some(format!(
            "{} has no named statements in {} pooling",
            system.title,
            setup.pool_mode.name()
        ));
    }
    if topology == Topology::Netns && (setup.server_unix || system.server_unix || setup.client_unix) {
        return Some(format!("{}: a unix socket does not reach another host", system.title));
    }
    if let (Work::Task(task), Topology::Netns) = (&step.work, topology)
        && task.connects_itself()
    {
        return Some("this measurement runs on loopback only".to_owned());
    }
    None
}

/// What the private PostgreSQL must carry for the planned work of each experiment.
///
/// The systems of a group stand ready at once, each load with one of its own.
#[must_use]
pub fn server_needs(experiments: &[Vec<Planned<'_>>]) -> ServerNeeds {
    let mut connections = 0;
    for planned in experiments {
        let mut pools: BTreeMap<(&str, &Setup), u32> = BTreeMap::new();
        let mut direct: BTreeMap<u32, u32> = BTreeMap::new();
        for group in planned.iter().map(|(step, _)| step.group).collect::<BTreeSet<u32>>() {
            let mut instances: BTreeMap<(&str, &Setup), u32> = BTreeMap::new();
            for (step, system) in planned.iter().filter(|(step, _)| step.group == group) {
                if system.is_pooler() {
                    *instances.entry((&system.name, &step.setup)).or_default() += 1;
                } else {
                    *direct.entry(group).or_default() += direct_connections(step, system);
                }
            }
            for (key, count) in instances {
                let most = pools.entry(key).or_default();
                *most = count.max(*most);
            }
        }
        let pooled: u32 =
            pools.iter().map(|((name, setup), count)| count * server_connections(name, setup)).sum();
        connections = connections.max(pooled + direct.into_values().max().unwrap_or(0));
    }
    let available = memory_available_mib().unwrap_or(4096.0);
    // Data of the quick and default scales fits; a quarter of what is free leaves the rest to backends.
    let shared_buffers_mib = (available / 4.0).clamp(128.0, 4096.0) as u32;
    let rsa = experiments.iter().flatten().any(|(step, _)| step.setup.rsa);
    ServerNeeds { connections: connections + SPARE_CONNECTIONS, shared_buffers_mib, rsa }
}

fn server_connections(system: &str, setup: &Setup) -> u32 {
    if system == "pgpool" { setup.max_clients } else { setup.pool_size }
}

/// Connections that a system without a pool makes to the server.
fn direct_connections(step: &Step, system: &System) -> u32 {
    if system.clients_of_pool { clients_of(step).min(step.setup.pool_size) } else { clients_of(step) }
}

fn clients_of(step: &Step) -> u32 {
    match &step.work {
        Work::Pgbench { load, .. } => load.clients,
        Work::Task(task) => task.connections(),
    }
}

/// Checks programs, descriptors and memory, and raises the limit of descriptors as far as needed.
///
/// # Errors
/// A list of everything that is missing.
pub fn check(planned: &[Planned<'_>], needs: ServerNeeds, topology: Topology) -> Result<()> {
    let mut problems = Vec::new();
    for (program, package) in [
        ("initdb", "postgresql"),
        ("postgres", "postgresql"),
        ("psql", "postgresql-client"),
        ("pgbench", "postgresql-contrib or postgresql"),
        ("setpriv", "util-linux"),
    ] {
        if find_program(program).is_none() {
            problems.push(format!("{program} not found: install {package}"));
        }
    }
    if needs.rsa && find_program("openssl").is_none() {
        problems.push("openssl not found, which makes the RSA key for logins: install openssl".to_owned());
    }
    if topology == Topology::Netns {
        for (program, package) in [("ip", "iproute2"), ("nsenter", "util-linux")] {
            if find_program(program).is_none() {
                problems.push(format!("{program} not found: install {package}, or use --topology loopback"));
            }
        }
    }
    if planned.iter().any(|(step, _)| step.needs_go_tpc())
        && let Err(error) = tasks::tpcc::program()
    {
        problems.push(format!("{error:#}"));
    }
    if planned.iter().any(|(step, _)| matches!(step.work, Work::Task(Task::Sysbench { .. }))) {
        problems.extend(tasks::sysbench::missing());
    }
    let mut named = BTreeSet::new();
    for (_, system) in planned {
        if system.is_pooler()
            && named.insert(&system.name)
            && let Err(error) = system.program()
        {
            problems.push(format!("{error:#}"));
        }
    }
    problems.extend(descriptor_problem(planned));
    problems.extend(memory_problem(planned, needs));
    problems.extend(disk_problem(planned));
    if problems.is_empty() {
        return Ok(());
    }
    bail!("cannot run:\n  {}", problems.join("\n  "))
}

fn descriptor_problem(planned: &[Planned<'_>]) -> Option<String> {
    let most = planned
        .iter()
        .map(|(step, _)| {
            u64::from(clients_of(step) + step.setup.pool_size).max(u64::from(step.setup.max_clients))
        })
        .max()
        .unwrap_or(0);
    let needed = most + SPARE_DESCRIPTORS;
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    if soft >= needed {
        return None;
    }
    let raised = setrlimit(Resource::RLIMIT_NOFILE, needed, hard.max(needed))
        .or_else(|_| setrlimit(Resource::RLIMIT_NOFILE, needed.min(hard), hard));
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    (raised.is_err() || soft < needed).then(|| {
        format!(
            "{needed} file descriptors are needed and the limit is {hard}: raise it (ulimit -Hn {needed} as root) or \
             use fewer --clients"
        )
    })
}

/// The private server writes where temporary files are: its own files, and with data its write-ahead log, which may grow to 8 GB.
fn disk_problem(planned: &[Planned<'_>]) -> Option<String> {
    let with_data = |(step, _): &Planned<'_>| match &step.work {
        Work::Pgbench { workload, .. } => !matches!(workload.as_str(), "" | "noop" | "select1"),
        Work::Task(_) => true,
    };
    let needed_gb = if planned.iter().any(with_data) { 10.0 } else { 1.0 };
    let folder = std::env::temp_dir();
    let disk = rustix::fs::statvfs(&folder).ok()?;
    let free_gb = disk.f_bavail as f64 * disk.f_frsize as f64 / 1e9;
    (free_gb < needed_gb).then(|| {
        format!(
            "{needed_gb} GB of disk are needed in {} and {free_gb:.1} are free: make room, or name another folder by TMPDIR",
            folder.display()
        )
    })
}

fn memory_problem(planned: &[Planned<'_>], needs: ServerNeeds) -> Option<String> {
    let clients = planned.iter().map(|(step, _)| clients_of(step)).max().unwrap_or(0);
    let children: u32 = planned
        .iter()
        .filter(|(_, system)| system.name == "pgpool")
        .map(|(step, _)| step.setup.max_clients)
        .max()
        .unwrap_or(0);
    let servers = if planned.iter().any(|(_, system)| system.mirrored) { 2.0 } else { 1.0 };
    let mib = f64::from(needs.connections) * BACKEND_MIB
        + f64::from(needs.shared_buffers_mib) * servers
        + f64::from(clients) * CLIENT_MIB
        + f64::from(children) * PGPOOL_CHILD_MIB;
    let available = memory_available_mib().ok()?;
    (mib > available).then(|| {
        format!(
            "about {mib:.0} MiB of memory are needed ({} connections of PostgreSQL) and {available:.0} are free: use \
             fewer --clients, or leave out the system direct",
            needs.connections
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pgbench::Load;
    use crate::sample::Point;
    use crate::systems::table;

    fn step(clients: u32, protocol: Protocol) -> Step {
        let load = Load::new(clients, protocol, "select 1;");
        let work = Work::Pgbench { load, workload: String::new() };
        Step::new(0, Point::default(), Setup::plain(20, clients + 20), work)
    }

    fn system(name: &str) -> System {
        table(None).unwrap().into_iter().find(|system| system.name == name).unwrap()
    }

    #[test]
    fn systems_are_left_out_of_what_they_cannot_do() {
        let simple = step(1, Protocol::Simple);
        let prepared = step(1, Protocol::Prepared);
        let skip = |step: &Step, name: &str| reason_to_skip(step, &system(name), Topology::Loopback);
        assert_eq!(skip(&simple, "pgbouncer"), None);
        assert!(skip(&prepared, "pgbouncer").unwrap().contains("named statements"));
        assert_eq!(skip(&prepared, "ours-off"), None);
        assert!(skip(&simple, "pgpool").unwrap().contains("transaction pooling"));
        assert!(reason_to_skip(&simple, &system("pgbouncer-unix"), Topology::Netns).is_some());
        let mut unix = step(1, Protocol::Simple);
        unix.setup.server_unix = true;
        assert_eq!(skip(&unix, "ours-off"), None);
        assert!(skip(&unix, "ours-d").unwrap().contains("no lane D"));
        let mut scram = step(1, Protocol::Simple);
        scram.setup.login = Login::Scram;
        assert_eq!(skip(&scram, "odyssey"), None);
        assert!(skip(&scram, "pgcat").unwrap().contains("no SCRAM"));
        assert!(skip(&unix, "odyssey").unwrap().contains("unix sockets"));
        for name in ["odyssey", "pgdog", "pgcat"] {
            assert_eq!(skip(&prepared, name), None);
        }
        for name in ["forward-kept", "forward-kept-both"] {
            assert_eq!(skip(&step(64, Protocol::Extended), name), None);
            assert!(skip(&prepared, name).unwrap().contains("named statements"));
        }
        let apart = |name: &str| reason_to_skip(&simple, &system(name), Topology::Netns);
        assert!(apart("ours-d").is_none() && apart("ours-a").unwrap().contains("on the pooler's host"));
    }

    #[test]
    fn the_server_gets_room_for_every_pool_and_the_direct_clients() {
        let step = step(64, Protocol::Simple);
        let (direct, pgbouncer) = (system("direct"), system("pgbouncer"));
        let needs = server_needs(&[vec![(&step, &direct), (&step, &pgbouncer)]]);
        assert_eq!(needs.connections, 20 + 64 + 30);
        let twice = server_needs(&[vec![
            (&step, &direct),
            (&step, &direct),
            (&step, &pgbouncer),
            (&step, &pgbouncer),
        ]]);
        assert_eq!(twice.connections, 2 * (20 + 64) + 30, "loads that stand ready at the same time");
        let after = server_needs(&[vec![(&step, &direct)], vec![(&step, &pgbouncer)]]);
        assert_eq!(after.connections, 64 + 30, "experiments that follow each other");
    }

    #[test]
    fn missing_programs_and_memory_are_named_together() {
        let step = step(10_000_000, Protocol::Simple);
        let mut missing = system("pgbouncer");
        missing.command[0] = "no-such-pooler".into();
        let direct = system("direct");
        let planned = [(&step, &direct), (&step, &missing)];
        let error =
            check(&planned, server_needs(&[planned.to_vec()]), Topology::Loopback).unwrap_err().to_string();
        assert!(error.contains("no-such-pooler") && error.contains("memory"), "{error}");
    }
}
