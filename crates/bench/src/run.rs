// SPDX-License-Identifier: Apache-2.0
//! `underpass-bench run`: from the command line to a result file.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::cli::{self, RunArgs};
use crate::experiments::{Experiment, Options, Step, Work};
use crate::hosts::{Hosts, Topology};
use crate::postgres::{DATABASE, Server};
use crate::procs::Account;
use crate::runner::{Cell, Runner};
use crate::sample::{Results, Sample, metric};
use crate::systems::{Place, System};
use crate::{machine, preflight, systems, workloads};

/// Rounds and seconds of `--quick` unless the command line gives fewer.
const QUICK_ROUNDS: u32 = 3;
const QUICK_SECONDS: u32 = 2;

/// Measures what the command line asks for.
///
/// # Errors
/// Bad input before anything is started; later, what made the run impossible.
pub fn run(arguments: &RunArgs) -> Result<ExitCode> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let (rounds, seconds) = if arguments.quick {
        (arguments.rounds.min(QUICK_ROUNDS), arguments.seconds.min(QUICK_SECONDS))
    } else {
        (arguments.rounds, arguments.seconds)
    };
    let options = arguments.options();
    check_workloads(&options)?;
    let table = systems::table(arguments.systems_file.as_deref())?;
    let plans = plan(arguments, &options, &table)?;
    let planned: Vec<(&Step, &System)> = plans
        .iter()
        .flat_map(|plan| plan.cells.iter().map(|(step, system)| (&plan.steps[*step], *system)))
        .collect();
    let needs = preflight::server_needs(&planned);
    preflight::check(&planned, needs, arguments.topology)?;
    announce(&plans, rounds, seconds);

    let account = Account::for_servers()?;
    let folder =
        tempfile::Builder::new().prefix("underpass-bench-").tempdir().context("no temporary folder")?;
    open_to_all(folder.path())?;
    let hosts = Hosts::make(arguments.topology)?;
    let server = Server::start(folder.path(), &account, &hosts, needs)?;
    let place = Place { folder: folder.path(), account: &account, hosts: &hosts, server: &server };

    let used: BTreeSet<&str> = planned.iter().map(|(_, system)| system.name.as_str()).collect();
    let used: Vec<&System> = table.iter().filter(|system| used.contains(system.name.as_str())).collect();
    let topology = if arguments.topology == Topology::Netns { "netns" } else { "loopback" };
    let mut results = Results { meta: machine::describe(&server, &used, topology), ..Results::default() };
    results.meta.command = command_line();
    (results.meta.rounds, results.meta.seconds) = (rounds, seconds);
    results.meta.skipped = plans.iter().flat_map(|plan| plan.skipped.iter().cloned()).collect();
    load_data(&planned, &options, &server, &mut results, &stop)?;

    for plan in &plans {
        let cells: Vec<Cell<'_>> = plan
            .cells
            .iter()
            .map(|(step, system)| Cell { experiment: plan.experiment, step: &plan.steps[*step], system })
            .collect();
        let began = Instant::now();
        let outcome =
            Runner::new(place, &stop, seconds).run(&cells, rounds, &mut results, |sample, done, total| {
                show_progress(sample, done, total, began);
            });
        // What was measured is kept, whatever happened after it.
        results.write(&arguments.output)?;
        outcome.with_context(|| format!("experiment {}", plan.experiment.name))?;
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
    results.interrupted |= stop.load(Ordering::Relaxed);
    results.write(&arguments.output)?;
    cli::report(&results, &arguments.output.with_extension("html"))?;
    println!("\nresults: {}", arguments.output.display());
    if results.interrupted {
        println!("interrupted: the results hold what was measured until then");
        return Ok(ExitCode::from(130));
    }
    Ok(ExitCode::SUCCESS)
}

/// An experiment with its steps and the systems that take part in each.
struct Plan<'a> {
    experiment: &'static Experiment,
    steps: Vec<Step>,
    cells: Vec<(usize, &'a System)>,
    skipped: Vec<String>,
}

fn plan<'a>(arguments: &RunArgs, options: &Options, table: &'a [System]) -> Result<Vec<Plan<'a>>> {
    let mut plans = Vec::new();
    for experiment in cli::selected(arguments)? {
        let (chosen, mut skipped) = choose(arguments, experiment, table)?;
        let steps = (experiment.plan)(options);
        let mut cells = Vec::new();
        let mut reasons = BTreeMap::new();
        for (index, step) in steps.iter().enumerate() {
            for system in &chosen {
                match preflight::reason_to_skip(step, system, arguments.topology) {
                    Some(reason) => *reasons.entry(reason).or_insert(0) += 1,
                    None => cells.push((index, *system)),
                }
            }
        }
        skipped.extend(reasons.into_iter().map(|(reason, points)| {
            format!("{}: {reason}: {points} of {} points left out", experiment.name, steps.len())
        }));
        plans.push(Plan { experiment, steps, cells, skipped });
    }
    if plans.iter().all(|plan| plan.cells.is_empty()) {
        let why: Vec<String> = plans.iter().flat_map(|plan| plan.skipped.clone()).collect();
        bail!("nothing to measure: {}", why.join("; "));
    }
    Ok(plans)
}

/// The systems of an experiment: as asked, else its own that are installed.
fn choose<'a>(
    arguments: &RunArgs,
    experiment: &Experiment,
    table: &'a [System],
) -> Result<(Vec<&'a System>, Vec<String>)> {
    let find = |name: &str| {
        table.iter().find(|system| system.name == name).ok_or_else(|| {
            let known: Vec<&str> = table.iter().map(|system| system.name.as_str()).collect();
            anyhow::anyhow!("unknown system {name}: one of {}", known.join(", "))
        })
    };
    if !arguments.systems.is_empty() {
        let chosen = arguments.systems.iter().map(|name| find(name)).collect::<Result<Vec<_>>>()?;
        return Ok((chosen, Vec::new()));
    }
    let (mut chosen, mut skipped) = (Vec::new(), Vec::new());
    for name in experiment.systems {
        let system = find(name)?;
        match system.is_pooler().then(|| system.program()).transpose() {
            Ok(_) => chosen.push(system),
            Err(error) => skipped.push(format!("{}: {error:#}", experiment.name)),
        }
    }
    Ok((chosen, skipped))
}

fn check_workloads(options: &Options) -> Result<()> {
    for name in options.workloads.iter().flatten() {
        if workloads::find(name).is_none() {
            bail!("unknown workload {name}: one of {}", workloads::NAMES.join(", "));
        }
    }
    if !options.rate.is_finite() || options.rate <= 0.0 {
        bail!("--rate must be a positive number");
    }
    Ok(())
}

fn announce(plans: &[Plan<'_>], rounds: u32, seconds: u32) {
    for line in plans.iter().flat_map(|plan| &plan.skipped) {
        println!("left out: {line}");
    }
    let cells: usize = plans.iter().map(|plan| plan.cells.len()).sum();
    // Warm-up, tail and start of a measurement take about 2.5 s beside its window.
    let minutes = cells as f64 * f64::from(rounds) * (f64::from(seconds) + 2.5) / 60.0;
    println!(
        "{cells} points, {rounds} rounds of {seconds} s: about {minutes:.0} min; Ctrl-C keeps what was measured until then"
    );
}

fn load_data(
    planned: &[(&Step, &System)],
    options: &Options,
    server: &Server,
    results: &mut Results,
    stop: &AtomicBool,
) -> Result<()> {
    let mut loaded = BTreeSet::new();
    for (step, _) in planned {
        if stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        match &step.work {
            Work::Pgbench { workload, .. } => {
                let Some(found) = workloads::find(workload).filter(|_| loaded.insert(workload.clone()))
                else {
                    continue;
                };
                let began = Instant::now();
                let data =
                    found.load(server, options.scale).with_context(|| format!("loading {workload}"))?;
                if data.rows > 0 {
                    let seconds = began.elapsed().as_secs_f64();
                    println!("loaded {workload}: {} rows, {:.0} MB in {seconds:.1} s", data.rows, data.mb);
                }
                results.meta.data.insert(workload.clone(), data);
            }
            Work::Task(task) => {
                let sql = task.preparation();
                if !sql.is_empty() && loaded.insert(sql.clone()) {
                    server.psql_script(DATABASE, &sql, &[]).context("making the tables")?;
                }
            }
        }
    }
    Ok(())
}

fn show_progress(sample: &Sample, done: usize, total: usize, began: Instant) {
    let left = began.elapsed().as_secs_f64() / done as f64 * (total - done) as f64;
    let outcome = match &sample.error {
        Some(error) => format!("FAILED: {}", error.lines().next().unwrap_or("")),
        None => [
            (metric::TPS, "tps"),
            (metric::CPU, "us CPU"),
            (metric::SECONDS, "s"),
            (metric::MEMORY_GROWTH, "MiB"),
        ]
        .iter()
        .filter_map(|(name, unit)| Some(format!("{:.1} {unit}", sample.metrics.get(*name)?)))
        .collect::<Vec<_>>()
        .join(", "),
    };
    println!(
        "[{done}/{total}, {:.0} s left] round {} {} {} {}: {outcome}",
        left,
        sample.round + 1,
        sample.experiment,
        sample.point.label(),
        sample.system,
    );
    // A log that is followed should not lag; a closed terminal is noticed by the signal.
    let _ = std::io::stdout().flush();
}

/// The command line without the folder of the program.
fn command_line() -> String {
    let mut words = std::env::args();
    let program = words.next().unwrap_or_default();
    let name = program.rsplit('/').next().unwrap_or("underpass-bench").to_owned();
    [name].into_iter().chain(words).collect::<Vec<_>>().join(" ")
}

/// The server account must get through the run's folder; everything in it has an owner of its own.
fn open_to_all(path: &std::path::Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))
        .context("cannot open the temporary folder")
}
