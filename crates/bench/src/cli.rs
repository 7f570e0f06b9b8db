// SPDX-License-Identifier: Apache-2.0
//! The command line.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};

use crate::experiments::EXPERIMENTS;
use crate::hosts::Topology;
use crate::pgbench::Protocol;
use crate::sample::Results;
use crate::systems::LoginKind;
use crate::terminal::say;
use crate::{
    forward, limits, markdown, profiles, proof, recordings, report, run, systems, table, terminal, workloads,
};

#[derive(Parser)]
#[command(version, about, max_term_width = 110)]
/// Measures PostgreSQL poolers side by side: direct, PgBouncer, Pgpool-II, Underpass.
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure and report.
    Run(Box<RunArgs>),
    /// Make tables and the page again from result files.
    Report {
        /// Result files; those of several runs make one page.
        #[arg(required = true)]
        results: Vec<PathBuf>,
        /// Where the page goes; next to the first result file without this.
        #[arg(long)]
        html: Option<PathBuf>,
    },
    /// Print rows of a Markdown table for the documents: medians with their 90 % intervals.
    Rows(markdown::RowsArgs),
    /// Say which experiments, systems and workloads there are.
    List,
    /// A forwarder without a protocol: what the experiment `forward` measures.
    #[command(hide = true)]
    Forward {
        /// Where clients connect, an address or the folder and port of a unix socket; as often as wanted.
        #[arg(long, required = true)]
        listen: Vec<forward::Place>,
        /// Where they get to, likewise.
        #[arg(long)]
        to: forward::Place,
        /// By what; after the login of a PostgreSQL client, if on this host.
        #[arg(long, value_enum, default_value_t)]
        by: forward::By,
        /// Servers that kept clients share: those of the first that log in.
        #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=64))]
        servers: u32,
    },
}

/// What to measure.
#[derive(Args, Debug, Clone)]
pub struct RunArgs {
    /// Experiments; see `list`. Without it: all of them, or those of the profile.
    #[arg(short, long, value_delimiter = ',')]
    pub experiment: Vec<String>,
    /// Systems. Without it: the experiment's own, as far as installed.
    #[arg(short, long, value_delimiter = ',')]
    pub systems: Vec<String>,
    /// Clients, a list. Without it: the experiment's own.
    #[arg(short, long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=50_000))]
    pub clients: Vec<u32>,
    /// Protocols, a list.
    #[arg(short, long, value_delimiter = ',')]
    pub modes: Vec<Protocol>,
    /// Workloads, a list, where an experiment has several.
    #[arg(short, long, value_delimiter = ',')]
    pub workloads: Vec<String>,
    /// Logins of the experiment `logins`, a list. Without it: all.
    #[arg(long, value_delimiter = ',')]
    pub logins: Vec<LoginKind>,
    /// Seconds of one measurement; without it 1, or what the profile says.
    #[arg(long, value_parser = seconds)]
    pub seconds: Option<f64>,
    /// Rounds; without it 10, or what the profile says. Below 10 no limit is decided.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: Option<u32>,
    /// Server connections per pool, a list: the first everywhere, further ones where clients exceed it. Without it 20, or what the profile says.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub pool_size: Vec<u32>,
    /// Transactions per second of the experiments with a fixed rate.
    #[arg(long, default_value_t = 2000.0)]
    pub rate: f64,
    /// Size of the workloads as a multiple of the default.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub scale: u32,
    /// Seconds for which receivers of copies stop; without it 10, or what the profile says.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub pause: Option<u64>,
    /// Where client, pooler and server are.
    #[arg(long, value_enum, default_value_t)]
    pub topology: Topology,
    /// A selection with its times: see `list`.
    #[arg(long, conflicts_with = "quick")]
    pub profile: Option<String>,
    /// The profile `quick`: some minutes.
    #[arg(short, long)]
    pub quick: bool,
    /// Only say what would be measured and how long it would take.
    #[arg(long)]
    pub plan: bool,
    /// Result file; the page gets the same name with .html.
    #[arg(short, long, default_value = "target/bench/results.json")]
    pub output: PathBuf,
    /// Table of systems in place of the built-in one.
    #[arg(long)]
    pub systems_file: Option<PathBuf>,
}

/// A time that a measurement can have.
fn seconds(text: &str) -> std::result::Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.2..=3600.0).contains(&seconds) { Ok(seconds) } else { Err("must be 0.2 to 3600".to_owned()) }
}

/// Parses the command line and does what it says.
///
/// # Errors
/// Whatever went wrong, for the user.
pub fn run() -> Result<ExitCode> {
    match Cli::parse().command {
        Command::Run(arguments) => run::run(&arguments),
        Command::Report { results, html } => {
            let page = html.unwrap_or_else(|| results[0].with_extension("html"));
            report(&Results::read_all(&results)?, &page)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Rows(arguments) => {
            terminal::write(format_args!("{}", markdown::rows(&arguments)?));
            Ok(ExitCode::SUCCESS)
        }
        Command::Forward { listen, to, by, servers } => {
            forward::run(&listen, &to, by, servers)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::List => {
            list()?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Prints tables and verdicts and writes the page.
///
/// # Errors
/// When the page cannot be written.
pub fn report(results: &Results, page: &Path) -> Result<()> {
    let limits = limits::table()?;
    for experiment in EXPERIMENTS.iter().filter(|e| results.samples.iter().any(|s| s.experiment == e.name)) {
        terminal::write(format_args!("{}", table::of_experiment(experiment, results, &limits)));
    }
    let systems = systems::table(None)?;
    let mut findings = proof::findings(results, &systems);
    findings.extend(recordings::findings(results, &systems));
    terminal::write(format_args!("{}", table::of_proof(&findings)));
    let judged = limits::judge(&limits, results);
    terminal::write(format_args!("{}", table::of_limits(&judged)));
    report::write(results, &limits, &judged, &findings, page)?;
    say!("\npage: {}", page.display());
    Ok(())
}

fn list() -> Result<()> {
    say!("Experiments");
    for experiment in EXPERIMENTS {
        say!("  {:12} {} ({})", experiment.name, experiment.title, experiment.paper);
    }
    say!("\nProfiles");
    for profile in profiles::table()? {
        say!("  {:12} {}", profile.name, profile.title);
    }
    say!("\nSystems");
    for system in systems::table(None)? {
        let state = if system.is_pooler() {
            system.version_line().unwrap_or_else(|error| format!("missing: {error}"))
        } else {
            "no pooler".to_owned()
        };
        say!("  {:18} {} ({state})", system.name, system.title);
    }
    say!("\nWorkloads");
    for workload in workloads::WORKLOADS {
        let of_benchbase = match workload.benchbase_rows {
            0 => String::new(),
            rows => format!(", {} times BenchBase's scale factor 1", workload.rows as f64 / rows as f64),
        };
        let names: Vec<&str> = workload.transactions.iter().map(|transaction| transaction.name).collect();
        say!(
            "  {:12} rows = {} at --scale 1{of_benchbase}: {}",
            workload.name,
            workload.rows,
            names.join(", ")
        );
    }
    Ok(())
}
