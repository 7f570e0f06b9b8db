// SPDX-License-Identifier: Apache-2.0
//! `underpass-bench run`: from the command line to a result file.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{IsTerminal as _, Write as _};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::cli::{self, RunArgs};
use crate::experiments::{Step, Work};
use crate::hosts::{Hosts, Topology};
use crate::postgres::{DATABASE, Server};
use crate::procs::Account;
use crate::profiles::Entry;
use crate::runner::{self, Cell, Event, Runner};
use crate::sample::{Results, Sample, metric};
use crate::systems::{Place, System};
use crate::tasks::{self, Task};
use crate::{machine, preflight, profiles, systems, workloads};

/// Measures what the command line asks for.
///
/// # Errors
/// Bad input before anything is started; later, what made the run impossible.
pub fn run(arguments: &RunArgs) -> Result<ExitCode> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    check_input(arguments)?;
    let table = systems::table(arguments.systems_file.as_deref())?;
    let plans = plan(arguments, &table)?;
    let by_experiment: Vec<Vec<(&Step, &System)>> = plans
        .iter()
        .map(|plan| plan.cells.iter().map(|(step, system)| (&plan.steps[*step], *system)).collect())
        .collect();
    let needs = preflight::server_needs(&by_experiment);
    let planned = by_experiment.concat();
    preflight::check(&planned, needs, arguments.topology)?;
    let total_s = announce(&plans);

    let account = Account::for_servers()?;
    let folder =
        tempfile::Builder::new().prefix("underpass-bench-").tempdir().context("no temporary folder")?;
    open_to_all(folder.path())?;
    let hosts = Hosts::make(arguments.topology)?;
    let start = |name| Server::start(folder.path(), name, &account, &hosts, needs);
    let server = start("postgres")?;
    let mirror = planned.iter().any(|(_, system)| system.mirrored).then(|| start("mirror")).transpose()?;
    let place = Place {
        folder: folder.path(),
        account: &account,
        hosts: &hosts,
        server: &server,
        mirror: mirror.as_ref(),
    };

    let used: BTreeSet<&str> = planned.iter().map(|(_, system)| system.name.as_str()).collect();
    let used: Vec<&System> = table.iter().filter(|system| used.contains(system.name.as_str())).collect();
    let topology = if arguments.topology == Topology::Netns { "netns" } else { "loopback" };
    let mut results = Results { meta: machine::describe(&server, &used, topology), ..Results::default() };
    results.meta.command = command_line();
    results.meta.skipped = plans.iter().flat_map(|plan| plan.skipped.iter().cloned()).collect();
    load_data(&planned, arguments.scale, place, &mut results, &stop)?;

    let progress = Progress::new(total_s);
    for plan in &plans {
        let cells: Vec<Cell<'_>> = plan
            .cells
            .iter()
            .map(|(step, system)| Cell {
                experiment: plan.entry.experiment,
                step: &plan.steps[*step],
                system,
            })
            .collect();
        let mut runner = Runner::new(place, &stop, plan.entry.seconds);
        runner.run(&cells, plan.entry.rounds, &mut results, |event| progress.show(&event));
        // What was measured is kept, whatever happens after it.
        results.write(&arguments.output)?;
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
    progress.end();
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
    entry: Entry,
    steps: Vec<Step>,
    cells: Vec<(usize, &'a System)>,
    skipped: Vec<String>,
}

fn plan<'a>(arguments: &RunArgs, table: &'a [System]) -> Result<Vec<Plan<'a>>> {
    let mut plans = Vec::new();
    for entry in profiles::entries(arguments)? {
        // What the command line names must be there; what a profile or an experiment names is left out if it is not.
        let (chosen, mut skipped) = choose(&entry, !arguments.systems.is_empty(), table)?;
        let mut steps = (entry.experiment.plan)(&entry.options);
        let by_go_tpc = |step: &Step| matches!(step.work, Work::Task(Task::Tpcc { .. }));
        if arguments.experiment.is_empty()
            && steps.iter().any(by_go_tpc)
            && let Err(error) = tasks::tpcc::program()
        {
            skipped.push(format!("{}, TPC-C: {error:#}", entry.experiment.name));
            steps.retain(|step| !by_go_tpc(step));
        }
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
            format!("{}: {reason}: {points} of {} points left out", entry.experiment.name, steps.len())
        }));
        plans.push(Plan { entry, steps, cells, skipped });
    }
    if plans.iter().all(|plan| plan.cells.is_empty()) {
        let why: Vec<String> = plans.iter().flat_map(|plan| plan.skipped.clone()).collect();
        bail!("nothing to measure: {}", why.join("; "));
    }
    Ok(plans)
}

/// The systems of an experiment: as asked, else its own that are installed.
fn choose<'a>(entry: &Entry, must: bool, table: &'a [System]) -> Result<(Vec<&'a System>, Vec<String>)> {
    let find = |name: &str| {
        table.iter().find(|system| system.name == name).ok_or_else(|| {
            let known: Vec<&str> = table.iter().map(|system| system.name.as_str()).collect();
            anyhow::anyhow!("unknown system {name}: one of {}", known.join(", "))
        })
    };
    let own = entry.experiment.systems.iter().map(|name| (*name).to_owned()).collect();
    let names = if entry.systems.is_empty() { own } else { entry.systems.clone() };
    let (mut chosen, mut skipped) = (Vec::new(), Vec::new());
    for name in &names {
        let system = find(name)?;
        match system.ready() {
            Err(error) if !must => skipped.push(format!("{}: {error:#}", entry.experiment.name)),
            // A missing program is reported by the preflight, with all else that is missing.
            _ => chosen.push(system),
        }
    }
    Ok((chosen, skipped))
}

fn check_input(arguments: &RunArgs) -> Result<()> {
    for name in &arguments.workloads {
        // TPC-C is no script of pgbench: two experiments know it.
        let tpcc =
            name == "tpcc" && arguments.experiment.iter().all(|name| name == "cores" || name == "tpcc");
        if workloads::find(name).is_none() && (!tpcc || arguments.experiment.is_empty()) {
            let known: Vec<&str> = workloads::WORKLOADS.iter().map(|workload| workload.name).collect();
            bail!("unknown workload {name}: one of {}; tpcc with -e cores", known.join(", "));
        }
    }
    if !arguments.rate.is_finite() || arguments.rate <= 0.0 {
        bail!("--rate must be a positive number");
    }
    Ok(())
}

/// Says what is to come and returns how many seconds it will take, about.
fn announce(plans: &[Plan<'_>]) -> f64 {
    for line in plans.iter().flat_map(|plan| &plan.skipped) {
        println!("left out: {line}");
    }
    let mut total_s = 0.0;
    for plan in plans {
        let seconds: f64 = plan
            .cells
            .iter()
            .map(|(step, _)| {
                let step = &plan.steps[*step];
                runner::seconds_of(step, plan.entry.seconds) * f64::from(step.rounds.of(plan.entry.rounds))
            })
            .sum();
        println!(
            "{:12} {:3} points, {} rounds of {} s: about {:.1} min",
            plan.entry.experiment.name,
            plan.cells.len(),
            plan.entry.rounds,
            plan.entry.seconds,
            seconds / 60.0
        );
        total_s += seconds;
    }
    println!("about {:.0} min in all; Ctrl-C keeps what was measured until then", total_s / 60.0);
    total_s
}

fn load_data(
    planned: &[(&Step, &System)],
    scale: u32,
    place: Place<'_>,
    results: &mut Results,
    stop: &AtomicBool,
) -> Result<()> {
    let server = place.server;
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
                let data = found.load(server, scale).with_context(|| format!("loading {workload}"))?;
                if data.rows > 0 {
                    let seconds = began.elapsed().as_secs_f64();
                    println!("loaded {workload}: {} rows, {:.0} MB in {seconds:.1} s", data.rows, data.mb);
                }
                if let Some(mirror) = place.mirror {
                    found.load(mirror, scale).with_context(|| format!("loading {workload} on the mirror"))?;
                }
                results.meta.data.insert(workload.clone(), data);
            }
            Work::Task(Task::Tpcc { warehouses, .. }) => {
                if loaded.insert("tpcc".to_owned()) {
                    let began = Instant::now();
                    let data = tasks::tpcc::load(server, place, *warehouses).context("loading TPC-C")?;
                    let seconds = began.elapsed().as_secs_f64();
                    println!("loaded TPC-C: {} rows, {:.0} MB in {seconds:.1} s", data.rows, data.mb);
                    results.meta.data.insert("tpcc".to_owned(), data);
                }
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

/// What the terminal shows while it runs: one line that changes, and a line for each group of samples.
struct Progress {
    began: Instant,
    total_s: f64,
    terminal: bool,
}

impl Progress {
    fn new(total_s: f64) -> Self {
        Self { began: Instant::now(), total_s, terminal: std::io::stdout().is_terminal() }
    }

    fn show(&self, event: &Event<'_>) {
        match event {
            Event::Turn { done, total, round, cell } if self.terminal => {
                let left = (self.total_s - self.began.elapsed().as_secs_f64()).max(0.0) / 60.0;
                print!(
                    "\r\x1b[K[{}/{total}, about {left:.0} min left] {} {} round {}: {}",
                    done + 1,
                    cell.experiment.name,
                    cell.step.point.label(),
                    round + 1,
                    cell.system.name
                );
            }
            Event::Turn { .. } => {}
            Event::Samples(samples) => self.samples(samples),
        }
        // A log that is followed should not lag; a closed terminal is noticed by the signal.
        let _ = std::io::stdout().flush();
    }

    fn samples(&self, samples: &[Sample]) {
        self.end();
        for sample in samples {
            let outcome = match &sample.error {
                Some(error) => format!("FAILED: {}", error.lines().next().unwrap_or("")),
                None => SHOWN
                    .iter()
                    .filter_map(|(name, unit)| Some(format!("{:.1} {unit}", sample.metrics.get(*name)?)))
                    .collect::<Vec<_>>()
                    .join(", "),
            };
            println!(
                "{:5.0} s {} {} round {} {}: {outcome}",
                self.began.elapsed().as_secs_f64(),
                sample.experiment,
                sample.point.label(),
                sample.round + 1,
                sample.system,
            );
        }
    }

    /// Leaves the line that changes.
    fn end(&self) {
        if self.terminal {
            print!("\r\x1b[K");
        }
    }
}

/// What a line about a sample says of it, as far as it has it.
const SHOWN: [(&str, &str); 4] =
    [(metric::TPS, "tps"), (metric::CPU, "us CPU"), (metric::SECONDS, "s"), (metric::MEMORY_GROWTH, "MiB")];

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
