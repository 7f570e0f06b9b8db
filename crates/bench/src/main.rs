// SPDX-License-Identifier: Apache-2.0
//! `underpass-bench`: measures Underpass and every pooler beside it on the same work in the same run, and says, with
//! its uncertainty, who wins.
//!
//! `run` starts a private PostgreSQL and each system with equal settings, interleaves them and writes one JSON file
//! and one HTML page; `report` makes the page and the tables again; `list` says what can be measured.
#![forbid(unsafe_code)]

mod analysis;
mod cli;
mod client;
mod counters;
mod cpuset;
mod experiments;
mod forward;
mod hosts;
mod lanes;
mod limits;
mod machine;
mod mariadb;
mod markdown;
mod mirrors;
mod pgbench;
mod placement;
mod plans;
mod postgres;
mod preflight;
mod procs;
mod profiles;
mod proof;
mod recordings;
mod report;
mod roundtrips;
mod run;
mod runner;
mod sample;
mod systems;
mod table;
mod tasks;
mod template;
mod terminal;
mod workloads;

use std::process::ExitCode;

fn main() -> ExitCode {
    match cli::run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("underpass-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
