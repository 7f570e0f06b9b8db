// SPDX-License-Identifier: Apache-2.0
//! `underpass-bench run`: from the command line to a result file.

use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::cli::{self, RunArgs};
use crate::experiments::{Step, Work};
use crate::hosts::{Hosts, Topology};
use crate::mariadb::Mariadb;
use crate::postgres::{DATABASE, Server};
use crate::procs::Account;
use crate::profiles::Entry;
use crate::runner::{self, Cell, Event, Runner};
use crate::sample::{Results, Sample, metric};
use crate::systems::{Instance, Place, System};
use crate::tasks::{self, Task};
use crate::terminal::{self, say};
use crate::workloads::TPCC;
use crate::{lanes, machine, preflight, profiles, systems, workloads};

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
    let mut plans = plan(arguments, &table)?;
    if arguments.plan {
        announce(&plans);
        return Ok(ExitCode::SUCCESS);
    }
    let by_experiment = cells_of(&plans);
    let needs = preflight::server_needs(&by_experiment);
    let planned = by_experiment.concat();
    preflight::check(&planned, needs, arguments.topology)?;
    check_output(&arguments.output)?;

    let account = Account::for_servers()?;
    let folder =
        tempfile::Builder::new().prefix("underpass-bench-").tempdir().context("no temporary folder")?;
    open_to_all(folder.path())?;
    let hosts = Hosts::make(arguments.topology)?;
    let start = |name| Server::start(folder.path(), name, &account, &hosts, needs);
    let server = start("postgres")?;
    let needs_second = |(_, system): &(&Step, &System)| system.mirrored || system.second_load;
    let mirror = planned.iter().any(needs_second).then(|| start("mirror")).transpose()?;
    let about_mariadb = |(step, _): &(&Step, &System)| matches!(step.work, Work::Task(Task::Sysbench { .. }));
    let mariadb = planned
        .iter()
        .any(about_mariadb)
        .then(|| Mariadb::start(folder.path(), &account, needs.shared_buffers_mib / 4))
        .transpose()?;
    let place = Place {
        folder: folder.path(),
        account: &account,
        hosts: &hosts,
        server: &server,
        mirror: mirror.as_ref(),
        mariadb: mariadb.as_ref(),
    };

    let absent = absent(&planned, place, &stop)?;
    if let (false, Some((name, why))) = (arguments.systems.is_empty(), absent.first_key_value()) {
        bail!("{name}: {why}");
    }
    leave_out(&absent, &mut plans)?;
    let planned = cells_of(&plans).concat();
    let total_s = announce(&plans);

    let used: BTreeSet<&str> = planned.iter().map(|(_, system)| system.name.as_str()).collect();
    let used: Vec<&System> = table.iter().filter(|system| used.contains(system.name.as_str())).collect();
    let topology = if arguments.topology == Topology::Netns { "netns" } else { "loopback" };
    let mut results = Results { meta: machine::describe(&server, &used, topology), ..Results::default() };
    results.meta.command = command_line();
    results.meta.versions.extend(machine::versions_beside(&planned));
    results.meta.skipped = plans.iter().flat_map(|plan| plan.skipped.iter().cloned()).collect();
    load_data(&planned, arguments.scale, place, &mut results, &stop)?;

    let mut progress = Progress::new(total_s);
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
        runner.run(&cells, plan.entry.rounds, &mut results, |event, results| {
            progress.show(&event, plan.entry.seconds);
            if terminal::closed() {
                stop.store(true, Ordering::Relaxed);
            }
            // What was measured is kept, whatever happens after it.
            match event {
                Event::Samples(_) => results.write(&arguments.output),
                Event::Turn { .. } => Ok(()),
            }
        })?;
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
    progress.end();
    results.interrupted |= stop.load(Ordering::Relaxed);
    results.write(&arguments.output)?;
    cli::report(&results, &arguments.output.with_extension("html"))?;
    say!("\nresults: {}", arguments.output.display());
    if results.interrupted {
        say!("interrupted: the results hold what was measured until then");
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

/// Steps with their systems, experiment by experiment.
fn cells_of<'a>(plans: &'a [Plan<'_>]) -> Vec<Vec<(&'a Step, &'a System)>> {
    let cells =
        |plan: &'a Plan<'_>| plan.cells.iter().map(|(step, system)| (&plan.steps[*step], *system)).collect();
    plans.iter().map(cells).collect()
}

fn plan<'a>(arguments: &RunArgs, table: &'a [System]) -> Result<Vec<Plan<'a>>> {
    let mut plans = Vec::new();
    for entry in profiles::entries(arguments)? {
        // What the command line names must be there; what a profile or an experiment names is left out if it is not.
        let (chosen, mut skipped) = choose(&entry, !arguments.systems.is_empty(), table)?;
        let mut steps = (entry.experiment.plan)(&entry.options);
        // A plan installs nothing.
        if arguments.experiment.is_empty()
            && !arguments.plan
            && steps.iter().any(Step::needs_go_tpc)
            && let Err(error) = tasks::tpcc::program()
        {
            skipped.push(format!("{}, TPC-C: {error:#}", entry.experiment.name));
            steps.retain(|step| !step.needs_go_tpc());
        }
        let by_sysbench = |step: &Step| matches!(step.work, Work::Task(Task::Sysbench { .. }));
        if arguments.experiment.is_empty() && steps.iter().any(by_sysbench) {
            let missing = tasks::sysbench::missing();
            skipped.extend(missing.iter().map(|what| format!("{}: {what}", entry.experiment.name)));
            steps.retain(|step| missing.is_empty() || !by_sysbench(step));
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
        if workloads::find(name).is_none() {
            let known: Vec<&str> = workloads::WORKLOADS.iter().map(|workload| workload.name).collect();
            bail!("unknown workload {name}: one of {}", known.join(", "));
        }
    }
    if !arguments.rate.is_finite() || arguments.rate <= 0.0 {
        bail!("--rate must be a positive number");
    }
    Ok(())
}

/// Starts each pooler once: those that do not answer here, or have no such lane, with the reason.
fn absent(
    planned: &[(&Step, &System)],
    place: Place<'_>,
    stop: &AtomicBool,
) -> Result<BTreeMap<String, String>> {
    let mut absent = BTreeMap::new();
    let mut tried = BTreeSet::new();
    for (step, system) in planned.iter().filter(|(_, system)| system.is_pooler()) {
        if !tried.insert(system.name.as_str()) {
            continue;
        }
        if stop.load(Ordering::Relaxed) {
            bail!("interrupted before anything was measured");
        }
        let trial = Instance::start(system, &step.setup, place).and_then(|instance| {
            let Some(lane) = &system.lane else { return Ok(()) };
            ensure!(
                lanes::read(&instance, place)?.has(lane),
                "this {} has no lane {lane}",
                system.command[0]
            );
            Ok(())
        });
        if let Err(error) = trial {
            absent.insert(system.name.clone(), format!("{error:#}"));
        }
    }
    Ok(absent)
}

/// Takes systems out of the plans.
fn leave_out(absent: &BTreeMap<String, String>, plans: &mut [Plan<'_>]) -> Result<()> {
    for plan in plans.iter_mut() {
        plan.cells.retain(|(_, system)| !absent.contains_key(&system.name));
    }
    // All of it: the cause is in the end of its log.
    let lines = absent.iter().map(|(name, why)| format!("{name}: {}", why.trim_end()));
    plans[0].skipped.extend(lines);
    ensure!(
        plans.iter().any(|plan| !plan.cells.is_empty()),
        "nothing to measure: {}",
        plans[0].skipped.join("; ")
    );
    Ok(())
}

/// The result file can be written: found out now and not after the run.
fn check_output(path: &Path) -> Result<()> {
    if path.is_dir() {
        bail!("{} is a folder: name a file with --output", path.display());
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)
        .and_then(|()| tempfile::tempfile_in(folder).map(drop))
        .with_context(|| format!("cannot write to {}: choose another --output", folder.display()))
}

/// Says what is to come and returns how many seconds it will take, about.
fn announce(plans: &[Plan<'_>]) -> f64 {
    for line in plans.iter().flat_map(|plan| &plan.skipped) {
        say!("left out: {line}");
    }
    let mut total_s = 0.0;
    for plan in plans {
        let seconds: f64 = plan
            .cells
            .iter()
            .map(|(step, system)| {
                let step = &plan.steps[*step];
                runner::seconds_of(step, system, plan.entry.seconds)
                    * f64::from(step.rounds.of(plan.entry.rounds))
            })
            .sum();
        say!(
            "{:12} {:3} points, {} rounds of {} s: about {:.1} min",
            plan.entry.experiment.name,
            plan.cells.len(),
            plan.entry.rounds,
            plan.entry.seconds,
            seconds / 60.0
        );
        total_s += seconds;
    }
    say!("about {:.0} min in all; Ctrl-C keeps what was measured until then", total_s / 60.0);
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
                let load = |server: &Server| match found.name {
                    TPCC => tasks::tpcc::load(server, place, found.rows as u32 * scale),
                    _ => found.load(server, scale),
                };
                let began = Instant::now();
                let data = load(server).with_context(|| format!("loading {workload}"))?;
                if data.rows > 0 {
                    let seconds = began.elapsed().as_secs_f64();
                    say!("loaded {workload}: {} rows, {:.0} MB in {seconds:.1} s", data.rows, data.mb);
                }
                if let Some(mirror) = place.mirror {
                    load(mirror).with_context(|| format!("loading {workload} on the mirror"))?;
                }
                results.meta.data.insert(workload.clone(), data);
            }
            Work::Task(Task::Tpcc { warehouses, .. }) => {
                if loaded.insert(TPCC.to_owned()) {
                    let began = Instant::now();
                    let data = tasks::tpcc::load(server, place, *warehouses).context("loading TPC-C")?;
                    let seconds = began.elapsed().as_secs_f64();
                    say!("loaded TPC-C: {} rows, {:.0} MB in {seconds:.1} s", data.rows, data.mb);
                    results.meta.data.insert(TPCC.to_owned(), data);
                }
            }
            Work::Task(Task::Sysbench { script, .. }) => {
                let name = script.data();
                if let Some(mariadb) = place.mariadb.filter(|_| loaded.insert(name.to_owned())) {
                    let data = tasks::sysbench::load(place, mariadb, *script)
                        .with_context(|| format!("loading {name}"))?;
                    results.meta.data.insert(name.to_owned(), data);
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
    /// What all turns were thought to take, and those that have begun.
    total_s: f64,
    begun_s: f64,
    terminal: bool,
}

impl Progress {
    fn new(total_s: f64) -> Self {
        Self { began: Instant::now(), total_s, begun_s: 0.0, terminal: std::io::stdout().is_terminal() }
    }

    fn show(&mut self, event: &Event<'_>, seconds: f64) {
        match event {
            Event::Turn { done, total, round, cell } => {
                self.begun_s += runner::seconds_of(cell.step, cell.system, seconds);
                if self.terminal {
                    terminal::write(format_args!(
                        "\r\x1b[K[{}/{total}, about {:.0} min left in all] {} {} round {}: {}",
                        done + 1,
                        self.left_s() / 60.0,
                        cell.experiment.name,
                        cell.step.point.label(),
                        round + 1,
                        cell.system.name
                    ));
                }
            }
            Event::Samples(samples) => self.samples(samples),
        }
    }

    /// About how long it will go on: what is still to be done, by how the first part kept its estimate.
    fn left_s(&self) -> f64 {
        let elapsed_s = self.began.elapsed().as_secs_f64();
        let pace = if elapsed_s > 60.0 { (elapsed_s / self.begun_s.max(1.0)).clamp(0.3, 3.0) } else { 1.0 };
        (self.total_s - self.begun_s).max(0.0) * pace
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
            say!(
                "{:5.0} s {} {} round {} {}: {outcome}",
                self.began.elapsed().as_secs_f64(),
                sample.experiment,
                sample.point.label(),
                sample.round + 1,
                sample.system,
            );
        }
        say!("        about {:.0} min left", (self.left_s() / 60.0).ceil());
    }

    /// Leaves the line that changes.
    fn end(&self) {
        if self.terminal {
            terminal::write(format_args!("\r\x1b[K"));
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
fn open_to_all(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))
        .context("cannot open the temporary folder")
}
