// SPDX-License-Identifier: Apache-2.0
//! Facts about the machine and the revision that go into a result file.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::thread;

use crate::cpuset::Cpuset;
use crate::experiments::{Step, Work};
use crate::postgres::Server;
use crate::sample::{FORMAT, Meta};
use crate::systems::System;
use crate::tasks::{self, Task};

/// Facts about this machine, the programs and the working tree.
#[must_use]
pub fn describe(server: &Server, systems: &[&System], topology: &str) -> Meta {
    let mut versions = BTreeMap::from([("postgres".to_owned(), server.version.clone())]);
    if let Some(line) = line_of("pgbench", &["--version"]) {
        versions.insert("pgbench".to_owned(), line);
    }
    for system in systems.iter().filter(|system| system.is_pooler()) {
        versions.insert(system.name.clone(), system.version_line().unwrap_or_default());
    }
    Meta {
        format: FORMAT,
        began: line_of("date", &["-u", "+%Y-%m-%dT%H:%M:%SZ"]).unwrap_or_default(),
        revision: revision(),
        kernel: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned(),
        cpu: field_of("/proc/cpuinfo", "model name"),
        cpus: thread::available_parallelism().map_or(0, usize::from),
        memory_mib: field_of("/proc/meminfo", "MemTotal")
            .split(' ')
            .next()
            .and_then(|kib| kib.parse::<u64>().ok())
            .unwrap_or(0)
            / 1024,
        versions,
        topology: topology.to_owned(),
        without: systems
            .iter()
            .filter_map(|system| Some((system.name.clone(), system.without.clone()?)))
            .collect(),
        titles: systems.iter().map(|system| (system.name.clone(), system.title.clone())).collect(),
        ..Meta::default()
    }
}

/// Versions of the programs that work beside the systems, and by what a pooler is kept on its CPUs, as far as the work has them.
#[must_use]
pub fn versions_beside(planned: &[(&Step, &System)]) -> BTreeMap<String, String> {
    let any = |wanted: fn(&Step) -> bool| planned.iter().any(|(step, _)| wanted(step));
    let mut versions = BTreeMap::new();
    let mut add = |name: &str, version: Option<String>| {
        versions.extend(version.map(|version| (name.to_owned(), version)));
    };
    if any(|step| matches!(step.work, Work::Task(Task::Sysbench { .. }))) {
        for name in ["mariadbd", "sysbench"] {
            add(name, line_of(name, &["--version"]));
        }
    }
    if any(Step::needs_go_tpc) {
        add("go-tpc", Some(tasks::tpcc::VERSION.to_owned()));
    }
    for (_, system) in planned {
        if let [name, command, ..] = &system.beside[..] {
            add(&format!("{name} {command}"), line_of(name, &["--version"]));
        }
    }
    if any(|step| step.setup.cpus.is_some()) {
        add("CPUs of the pooler by", Some(Cpuset::means().to_owned()));
    }
    versions
}

fn revision() -> String {
    let Some(revision) = line_of("git", &["rev-parse", "--short=12", "HEAD"]) else { return String::new() };
    // Untracked files such as logs do not change what was built.
    let changed = line_of("git", &["status", "--porcelain", "--untracked-files=no"])
        .is_some_and(|line| !line.is_empty());
    if changed { format!("{revision}-dirty") } else { revision }
}

fn line_of(program: &str, arguments: &[&str]) -> Option<String> {
    let program = crate::procs::find_program(program)?;
    let output = Command::new(program).args(arguments).output().ok()?;
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or("").to_owned())
}

fn field_of(path: &str, name: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix(name)?.split_once(':'))
        .map_or_else(String::new, |(_, value)| value.trim().to_owned())
}
