// SPDX-License-Identifier: Apache-2.0
//! pg_dump, as the Tigger paper has it.

use std::process::Stdio;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};

use super::{named, run_program};
use crate::pgbench::Measured;
use crate::procs::{Launch, find_program};
use crate::sample::metric;
use crate::systems::{Instance, Place};

/// SQL of the tables that are dumped.
pub(super) fn preparation(tables: u32, rows: u64) -> String {
    (0..tables)
        .map(|table| {
            format!("create table dump_{table} as select g as value from generate_series(1, {rows}) g;\n")
        })
        .collect()
}

/// Runs pg_dump through the system into nothing.
pub(super) fn run(instance: &Instance, place: Place<'_>, stop: &AtomicBool) -> Result<Measured> {
    let program = find_program("pg_dump").context("pg_dump not found: install postgresql-client")?;
    let launch = Launch { netns: place.hosts.client.clone(), keep_user: true, ..Launch::default() };
    let mut command = launch.command(place.account, program);
    command.args(["--data-only", "-t", "dump_*"]);
    instance.endpoint.apply(&mut command);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let (_, window) = run_program(command, "pg_dump", instance, stop)?;
    let cpu_s = window.busy().total_us / 1e6;
    Ok((named([(metric::SECONDS, window.seconds()), (metric::CPU_SECONDS, cpu_s)]), None))
}
