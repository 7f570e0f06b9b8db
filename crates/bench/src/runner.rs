// SPDX-License-Identifier: Apache-2.0
//! Runs planned work so that what is compared is measured at the same time under the same conditions.
//!
//! - The systems of a group take *turns*; a *round* gives one sample of each. It has several passes, and a turn of each system in
//!   each pass is one slice of its sample: what drifts within seconds, and the luck of where the scheduler puts a process
//!   when it goes on, are averaged within the sample. The order is random; each pass has the reverse order of the one before,
//!   and all begin a pass at the same place ([`Pattern`]).
//! - Several times in a run all systems are started anew. What is the luck of one process (addresses, hash
//!   seeds, which backends it got) is then part of the spread between rounds and cannot pass for a difference.
//! - While a load connects and warms up, all others are held: no two loads run at once.
//! - Groups come in random order, once per start; those that want the same settings share the systems of a start.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::seq::SliceRandom;

use crate::counters::Window;
use crate::experiments::{Experiment, Step, Work};
use crate::lanes::{self, Lanes};
use crate::mirrors::{self, Mirrored};
use crate::pgbench::{self, Driver, Load};
use crate::placement::Pattern;
use crate::roundtrips::RoundTrips;
use crate::sample::{Latency, Results, Sample, metric};
use crate::systems::{Beside, Instance, Place, Setup, System};
use crate::tasks::Task;

/// Rounds between two starts of the systems, at least.
const ROUNDS_PER_START: u32 = 2;

/// How long a load goes on before its window once a program beside it has begun.
///
/// In a group with such programs no load is held between turns, and beside a system without one is a program that works for as long as the
/// others take to begin, and then sleeps. Where nothing began beside it, a held load of eight clients was 12 % faster than with such a
/// program while the machine had nothing to do for that second, and 5 % if it went on: whatever begins makes the scheduler move the
/// processes of the load, and until it does they stay in the good places that a draw gave them.
const SETTLE_BESIDE: Duration = Duration::from_millis(200);

/// How long a lane has to take up its load, how often it is looked at, and the share from which on it has.
const LANE_PATIENCE: Duration = Duration::from_millis(1500);
const LANE_LOOK: Duration = Duration::from_millis(150);
const LANE_SETTLED: f64 = 0.98;

/// Starts of the systems in a long run, about: more would show no more.
const STARTS: u32 = 10;

/// One system at one step.
#[derive(Clone, Copy, Debug)]
pub struct Cell<'a> {
    /// Experiment.
    pub experiment: &'a Experiment,
    /// Step.
    pub step: &'a Step,
    /// System.
    pub system: &'a System,
}

impl Cell<'_> {
    fn rounds(&self, asked: u32) -> u32 {
        self.step.rounds.of(asked)
    }
}

/// What the user is told while it runs.
#[derive(Debug)]
pub enum Event<'a> {
    /// A turn begins.
    Turn {
        /// Turns that are over.
        done: usize,
        /// Turns in all.
        total: usize,
        /// Round, from 0.
        round: u32,
        /// Whose turn.
        cell: Cell<'a>,
    },
    /// Samples of a group are there.
    Samples(&'a [Sample]),
}

/// Period of the pauses of a slowed system. Short against a measurement, long against the precision of a sleep.
const PAUSE_PERIOD: Duration = Duration::from_millis(20);

/// Seconds that a program beside a system takes to begin and to end, about.
const BESIDE_S: f64 = 1.5;

/// About how many seconds one sample of a system takes, its share of starts included.
#[must_use]
pub fn seconds_of(step: &Step, system: &System, seconds: f64) -> f64 {
    let sample_s = match &step.work {
        Work::Pgbench { load, .. } => seconds + load.overhead_s(seconds),
        Work::Task(task) => task.seconds(seconds),
    };
    sample_s + if system.beside.is_empty() { 0.0 } else { BESIDE_S }
}

/// Under what a running system is kept: its name, its settings, and which of several with both it is. Each load of a group has
/// one of its own: a held load may hold all server connections of a pool.
type Key<'a> = (&'a str, &'a Setup, usize);

/// Runs cells and keeps what they yield.
#[derive(Debug)]
pub struct Runner<'a> {
    place: Place<'a>,
    stop: &'a AtomicBool,
    seconds: f64,
    began: Instant,
    instances: BTreeMap<Key<'a>, Instance>,
    /// How long the last program beside a system took to begin, in a group that has some.
    beside_took: Option<Duration>,
}

/// A cell within its group: its load, ready to go on, and what its turns gave.
struct Stand<'a> {
    cell: Cell<'a>,
    key: Key<'a>,
    /// `None` for work that is not held between turns.
    driver: Option<Driver>,
    /// Why it takes part no more.
    broken: Option<String>,
    /// What is being gathered in this round.
    sample: Option<Gathering>,
    /// What its rounds gave.
    done: Vec<Gathering>,
}

/// What a pooler's own console says that decides whether a sample is about what it should be about.
#[derive(Clone, Debug, Default)]
struct Console {
    lanes: Option<Lanes>,
    mirror: Option<Mirrored>,
}

impl Console {
    /// Asks what the system has something to say about; `None` where that is nothing.
    fn read(cell: &Cell<'_>, instance: &Instance, place: Place<'_>) -> Result<Option<Self>> {
        let lanes = lane_of(cell).map(|_| lanes::read(instance, place)).transpose()?;
        let is_down = cell.system.mirror_is_down;
        let mirror = cell.system.mirrors().then(|| mirrors::read(instance, place, is_down)).transpose()?;
        Ok((lanes.is_some() || mirror.is_some()).then_some(Self { lanes, mirror }))
    }

    /// What has happened since `before`, as metrics.
    fn since(&self, before: &Self, cell: &Cell<'_>) -> BTreeMap<String, f64> {
        let mut metrics = match (&self.lanes, &before.lanes, lane_of(cell)) {
            (Some(after), Some(before), Some(lane)) => after.shares_since(before, lane),
            _ => BTreeMap::new(),
        };
        if let (Some(after), Some(before)) = (&self.mirror, &before.mirror)
            && let Some(share) = after.share_since(before)
        {
            metrics.insert(metric::MIRRORED.to_owned(), share);
        }
        metrics
    }
}

/// A sample while it is gathered: its place in the run, and windows of the driver's log or what its work measured.
struct Gathering {
    round: u32,
    at_s: f64,
    windows: Vec<Window>,
    /// What is known without the log.
    metrics: BTreeMap<String, f64>,
    latency: Option<Latency>,
    before: Option<Console>,
    trips: Option<RoundTrips>,
    error: Option<String>,
}

impl<'a> Runner<'a> {
    /// A runner that starts systems at `place`, measures for `seconds` a sample and ends early when `stop` is set.
    #[must_use]
    pub fn new(place: Place<'a>, stop: &'a AtomicBool, seconds: f64) -> Self {
        Self { place, stop, seconds, began: Instant::now(), instances: BTreeMap::new(), beside_took: None }
    }

    /// Runs all cells of one experiment `rounds` times, or as often as their steps say, and adds their samples.
    ///
    /// A cell that fails, or whose system does not start, gives samples with an error: the others go on. `progress` is told of
    /// each step, with all samples so far.
    ///
    /// # Errors
    /// Those of `progress`.
    pub fn run(
        &mut self,
        cells: &[Cell<'a>],
        rounds: u32,
        results: &mut Results,
        mut progress: impl FnMut(Event<'_>, &Results) -> Result<()>,
    ) -> Result<()> {
        let mut rng = rand::rng();
        let total = cells.iter().map(|cell| cell.rounds(rounds) as usize).sum();
        let most = cells.iter().map(|cell| cell.rounds(rounds)).max().unwrap_or(0);
        let per_start = ROUNDS_PER_START.max(most / STARTS);
        let mut done = 0;
        for first in (0..most).step_by(per_start as usize) {
            for group in shuffled_groups(cells, &mut rng) {
                let part: Vec<Cell<'a>> =
                    group.into_iter().filter(|cell| first < cell.rounds(rounds)).collect();
                if part.is_empty() || self.stop.load(Ordering::Relaxed) {
                    continue;
                }
                let span = first..(first + per_start).min(most);
                let order = results.samples.len();
                let samples = self.group(&part, span, rounds, order, |round, cell| {
                    done += 1;
                    progress(Event::Turn { done: done - 1, total, round, cell }, results)
                })?;
                results.samples.extend(samples.iter().cloned());
                progress(Event::Samples(&samples), results)?;
            }
            self.stop_all_but(&[]);
        }
        results.interrupted |= self.stop.load(Ordering::Relaxed);
        Ok(())
    }

    /// Starts the systems of a group and lets them take their turns.
    fn group(
        &mut self,
        cells: &[Cell<'a>],
        rounds: Range<u32>,
        asked: u32,
        order: usize,
        mut turn_begins: impl FnMut(u32, Cell<'a>) -> Result<()>,
    ) -> Result<Vec<Sample>> {
        let keys = keys_of(cells);
        self.stop_all_but(&keys);
        let has_company = cells.iter().any(|cell| !cell.system.beside.is_empty());
        self.beside_took = has_company.then(|| self.beside_took.unwrap_or(Duration::from_secs(1)));
        // All systems first: a load that runs would slow their start, and a start disturb a load.
        let starts: Vec<Result<()>> =
            cells.iter().zip(&keys).map(|(cell, key)| self.start(*cell, *key)).collect();
        let mut stands: Vec<Stand<'a>> = cells
            .iter()
            .zip(keys)
            .zip(starts)
            .map(|((cell, key), start)| self.stand(*cell, key, start))
            .collect();
        let passes = self.passes(cells);
        let mut order_of_turns: Vec<usize> = (0..stands.len()).collect();
        order_of_turns.shuffle(&mut rand::rng());
        for round in rounds {
            let pattern = Pattern::draw(&mut rand::rng());
            for pass in 0..passes {
                for &index in &order_of_turns {
                    let stand = &mut stands[index];
                    if self.stop.load(Ordering::Relaxed) || round >= stand.cell.rounds(asked) {
                        continue;
                    }
                    if pass == 0 {
                        turn_begins(round, stand.cell)?;
                        self.begin(stand, round);
                    }
                    self.turn(stand, self.seconds / f64::from(passes), pattern.at(pass));
                    if pass + 1 == passes {
                        self.end(stand);
                    }
                }
                order_of_turns.reverse();
            }
        }
        let mut samples: Vec<Sample> = stands.into_iter().flat_map(Stand::samples).collect();
        if self.stop.load(Ordering::Relaxed) {
            // What was under way failed because it was told to.
            samples.retain(|sample| sample.error.is_none());
        }
        samples.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
        for (index, sample) in samples.iter_mut().enumerate() {
            sample.order = (order + index) as u32;
        }
        Ok(samples)
    }

    /// Passes of a round, the same for all systems of a group.
    fn passes(&self, cells: &[Cell<'a>]) -> u32 {
        let passes = cells.iter().map(|cell| match &cell.step.work {
            Work::Pgbench { load, .. } if self.is_held(load) => load.slices(self.seconds),
            _ => 1,
        });
        passes.min().unwrap_or(1)
    }

    /// Whether a load of the group is held between its turns.
    fn is_held(&self, load: &Load) -> bool {
        load.can_be_held() && self.beside_took.is_none()
    }

    /// Stops all systems but these: idle ones should not share the machine with those that are measured.
    fn stop_all_but(&mut self, keys: &[Key<'a>]) {
        let unused: Vec<_> = self.instances.keys().filter(|key| !keys.contains(key)).copied().collect();
        let unused: Vec<Instance> = unused.iter().filter_map(|key| self.instances.remove(key)).collect();
        // All are told to before any is waited for.
        unused.iter().for_each(Instance::ask_to_end);
    }

    /// Starts the cell's system if it does not run.
    fn start(&mut self, cell: Cell<'a>, key: Key<'a>) -> Result<()> {
        if !self.instances.contains_key(&key) {
            let start = || Instance::start(cell.system, &cell.step.setup, self.place);
            // Once more: a port may have been taken since it was chosen, or a self-test have met a busy moment.
            let instance = start().or_else(|error| start().map_err(|_| error))?;
            self.instances.insert(key, instance);
        }
        Ok(())
    }

    /// Starts the cell's load, lets it warm up and holds it.
    fn stand(&mut self, cell: Cell<'a>, key: Key<'a>, start: Result<()>) -> Stand<'a> {
        let driver = start.and_then(|()| match &cell.step.work {
            Work::Pgbench { load, .. } if self.is_held(load) => {
                let load = load_of(load, cell);
                let mut driver = Driver::start(&load, &self.instances[&key], self.place)?;
                driver.wait_until_warm(self.stop)?;
                wait_for_lane(&cell, &self.instances[&key], self.place)?;
                driver.hold();
                Ok(Some(driver))
            }
            _ => Ok(None),
        });
        let (driver, broken) = match driver {
            Ok(driver) => (driver, None),
            Err(error) => (None, Some(format!("{error:#}"))),
        };
        Stand { cell, key, driver, broken, sample: None, done: Vec::new() }
    }

    /// Begins a sample: what is read here is read while the load is held, when nothing happens.
    fn begin(&mut self, stand: &mut Stand<'a>, round: u32) {
        let mut sample = Gathering {
            round,
            at_s: self.began.elapsed().as_secs_f64(),
            windows: Vec::new(),
            metrics: BTreeMap::new(),
            latency: None,
            before: None,
            trips: None,
            error: stand.broken.clone(),
        };
        if sample.error.is_none()
            && let Some(instance) = self.instances.get(&stand.key)
        {
            let step = stand.cell.step;
            sample.trips = step.round_trips.then(|| RoundTrips::new(instance, self.place));
            // A load that is started for the sample is looked at when it is warm.
            if stand.driver.is_some() {
                match Console::read(&stand.cell, instance, self.place) {
                    Ok(console) => sample.before = console,
                    Err(error) => sample.error = Some(format!("{error:#}")),
                }
            }
        }
        stand.sample = Some(sample);
    }

    /// One turn: a slice of the sample, or all of work that is not divided.
    fn turn(&mut self, stand: &mut Stand<'a>, seconds: f64, pattern: Pattern) {
        let Some(sample) = stand.sample.as_mut().filter(|sample| sample.error.is_none()) else { return };
        if let Err(error) = self.slice(stand.cell, stand.key, stand.driver.as_mut(), sample, seconds, pattern)
        {
            sample.error = Some(format!("{error:#}"));
        }
    }

    fn slice(
        &mut self,
        cell: Cell<'a>,
        key: Key<'a>,
        driver: Option<&mut Driver>,
        sample: &mut Gathering,
        seconds: f64,
        pattern: Pattern,
    ) -> Result<()> {
        let second_load = self.second_load(cell)?;
        let instance = self.instances.get_mut(&key).context("its system was not started")?;
        instance.check_alive()?;
        let _pauser = instance
            .pid()
            .filter(|_| cell.system.paused_percent > 0.0)
            .map(|pid| Pauser::start(pid, cell.system.paused_percent / 100.0));
        let port = match (&cell.step.work, self.place.mariadb) {
            (Work::Task(Task::Sysbench { .. }), Some(mariadb)) => mariadb.port,
            _ => self.place.server.port,
        };
        let mut beside = None;
        let mut bring = || {
            let Some(took) = &mut self.beside_took else { return Ok(()) };
            let began = Instant::now();
            beside = Some(Beside::start(cell.system, self.place, port, *took)?);
            if !cell.system.beside.is_empty() {
                *took = began.elapsed();
            }
            thread::sleep(SETTLE_BESIDE);
            Ok(())
        };
        match (&cell.step.work, driver) {
            (Work::Pgbench { load, .. }, driver) => {
                let trips = &mut sample.trips;
                let look = || trips.iter_mut().for_each(RoundTrips::look);
                match driver {
                    Some(driver) => {
                        let server = self.place.server.pid();
                        let window = driver.slice(seconds, pattern, instance, server, self.stop, look)?;
                        sample.windows.push(window);
                    }
                    None => {
                        let before = &mut sample.before;
                        let when_warm = || {
                            wait_for_lane(&cell, instance, self.place)?;
                            *before = Console::read(&cell, instance, self.place)?;
                            bring()
                        };
                        let load = load_of(load, cell);
                        (sample.metrics, sample.latency) = pgbench::measure(
                            &load, seconds, instance, self.place, self.stop, when_warm, look,
                        )?;
                    }
                }
            }
            (Work::Task(task), _) => {
                sample.before = Console::read(&cell, instance, self.place)?;
                bring()?;
                (sample.metrics, sample.latency) = task.run(seconds, instance, self.place, self.stop)?;
            }
        }
        if let Some(driver) = second_load {
            driver.finish().context("the load on the second server")?;
        }
        if let Some(beside) = beside {
            // What is audited is the end of a connection.
            self.place.wait_until_left(port);
            if let Some(told) = beside.finish()? {
                told.add_to(&mut sample.metrics, cell.system.audits());
            }
        }
        Ok(())
    }

    /// The same load on the second server, warm, where the system is measured beside one.
    fn second_load(&self, cell: Cell<'a>) -> Result<Option<Driver>> {
        let (true, Work::Pgbench { load, .. }) = (cell.system.second_load, &cell.step.work) else {
            return Ok(None);
        };
        let server = Instance::second_server(self.place)?;
        let mut driver = Driver::start(&load_of(load, cell), &server, self.place)?;
        driver.wait_until_warm(self.stop)?;
        Ok(Some(driver))
    }

    /// Ends a sample.
    fn end(&mut self, stand: &mut Stand<'a>) {
        let Some(mut sample) = stand.sample.take() else { return };
        if let (None, Some(before), Some(instance)) =
            (&sample.error, &sample.before, self.instances.get(&stand.key))
        {
            match Console::read(&stand.cell, instance, self.place) {
                Ok(after) => {
                    sample.metrics.extend(after.map(|a| a.since(before, &stand.cell)).unwrap_or_default());
                }
                Err(error) => sample.error = Some(format!("{error:#}")),
            }
        }
        sample.metrics.extend(sample.trips.take().map(|trips| trips.metrics()).unwrap_or_default());
        stand.done.push(sample);
    }
}

/// The keys of the systems of a group, cell by cell.
fn keys_of<'a>(cells: &[Cell<'a>]) -> Vec<Key<'a>> {
    let mut keys: Vec<Key<'a>> = Vec::new();
    for cell in cells {
        let (name, setup) = (cell.system.name.as_str(), &cell.step.setup);
        let before = keys.iter().filter(|key| (key.0, key.1) == (name, setup)).count();
        keys.push((name, setup, before));
    }
    keys
}

/// The load of a cell: a system may stand for clients that share the pool's connections among themselves.
fn load_of(load: &Load, cell: Cell<'_>) -> Load {
    let mut load = load.clone();
    if cell.system.clients_of_pool {
        load.clients = load.clients.min(cell.step.setup.pool_size);
    }
    load
}

/// Waits until a lane carries what it will carry, while its load runs: at the start of a pool there is a queue, and clients come to
/// their lane one by one. Where it carries less for good, its share says so.
fn wait_for_lane(cell: &Cell<'_>, instance: &Instance, place: Place<'_>) -> Result<()> {
    let Some(lane) = lane_of(cell) else { return Ok(()) };
    let began = Instant::now();
    let mut before = lanes::read(instance, place)?;
    while began.elapsed() < LANE_PATIENCE {
        thread::sleep(LANE_LOOK);
        let now = lanes::read(instance, place)?;
        if now.shares_since(&before, lane).get(metric::LANE_SHARE).is_some_and(|share| *share > LANE_SETTLED)
        {
            break;
        }
        before = now;
    }
    Ok(())
}

/// The lane whose share a sample shows. Of a large copy, which is one transaction and leaves its lane by design once it has passed the
/// lane's budget, the limits let it decide nothing.
fn lane_of<'a>(cell: &Cell<'a>) -> Option<&'a str> {
    let is_mariadb = matches!(cell.step.work, Work::Task(Task::Sysbench { .. }));
    cell.system.lane.as_deref().filter(|_| !is_mariadb)
}

impl Stand<'_> {
    /// Ends the load and turns windows into samples.
    fn samples(self) -> Vec<Sample> {
        let log = self.driver.map(Driver::finish).transpose();
        let cell = self.cell;
        let sample = |mut gathered: Gathering| {
            if gathered.error.is_none() && !gathered.windows.is_empty() {
                let measured = match &log {
                    Ok(Some(log)) => log.measured(&gathered.windows).map_err(|error| format!("{error:#}")),
                    Ok(None) => Err("a window without a log".to_owned()),
                    Err(error) => Err(format!("{error:#}")),
                };
                match measured {
                    Ok((metrics, latency)) => {
                        gathered.metrics.extend(metrics);
                        gathered.latency = latency;
                    }
                    Err(error) => gathered.error = Some(error),
                }
            }
            let failed = gathered.error.is_some();
            Sample {
                experiment: cell.experiment.name.to_owned(),
                system: cell.system.name.clone(),
                round: gathered.round,
                order: 0,
                at_s: gathered.at_s,
                point: cell.step.point.clone(),
                metrics: if failed { BTreeMap::new() } else { gathered.metrics },
                latency_ms: gathered.latency.filter(|_| !failed),
                error: gathered.error,
            }
        };
        self.done.into_iter().map(sample).collect()
    }
}

/// The cells by group, groups in random order, but those that share their settings one after the other.
fn shuffled_groups<'a>(cells: &[Cell<'a>], rng: &mut impl rand::Rng) -> Vec<Vec<Cell<'a>>> {
    let mut groups: BTreeMap<u32, Vec<Cell<'a>>> = BTreeMap::new();
    for cell in cells {
        groups.entry(cell.step.group).or_default().push(*cell);
    }
    let mut groups: Vec<Vec<Cell<'a>>> = groups.into_values().collect();
    groups.shuffle(rng);
    let setups: Vec<&Setup> = groups.iter().map(|group| &group[0].step.setup).collect();
    groups.sort_by_key(|group| setups.iter().position(|setup| *setup == &group[0].step.setup));
    groups
}

/// Stops a process for a share of the time, to slow it by a known amount.
struct Pauser {
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Pauser {
    fn start(pid: u32, share: f64) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&stop);
        let pid = Pid::from_raw(i32::try_from(pid).expect("a pid fits i32"));
        let thread = thread::spawn(move || {
            // Sleeps overrun, so the debt is kept by the clock and not by what was asked for.
            let began = Instant::now();
            let mut paused = Duration::ZERO;
            while !flag.load(Ordering::Relaxed) {
                thread::sleep(PAUSE_PERIOD);
                let owed = began.elapsed().mul_f64(share).saturating_sub(paused);
                let pause = Instant::now();
                if kill(pid, Signal::SIGSTOP).is_err() {
                    return;
                }
                thread::sleep(owed);
                if kill(pid, Signal::SIGCONT).is_err() {
                    return;
                }
                paused += pause.elapsed();
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Pauser {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It only sleeps and signals; there is nothing to learn from how it ended.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::EXPERIMENTS;

    #[test]
    fn every_cell_is_in_one_group_with_those_it_is_compared_with() {
        let systems = crate::systems::table(None).unwrap();
        let options = crate::experiments::tests::options(false);
        let steps = (EXPERIMENTS[0].plan)(&options);
        let cells: Vec<Cell<'_>> = steps
            .iter()
            .flat_map(|step| {
                systems[..3].iter().map(move |system| Cell { experiment: &EXPERIMENTS[0], step, system })
            })
            .collect();
        let groups = shuffled_groups(&cells, &mut rand::rng());
        assert_eq!(groups.iter().map(Vec::len).sum::<usize>(), cells.len());
        assert!(groups.iter().all(|group| group.len() % 3 == 0), "a point was split");
        let setups: Vec<_> = groups.iter().map(|group| &group[0].step.setup).collect();
        let changes = setups.windows(2).filter(|pair| pair[0] != pair[1]).count();
        let distinct: std::collections::BTreeSet<_> = setups.iter().collect();
        assert_eq!(changes + 1, distinct.len(), "systems with the same settings would be started twice");
    }

    #[test]
    fn loads_of_a_group_do_not_share_a_system() {
        let systems = crate::systems::table(None).unwrap();
        let experiment = crate::experiments::find("extended").unwrap();
        let steps = (experiment.plan)(&crate::experiments::tests::options(true));
        let cell = |step, system| Cell { experiment, step, system };
        let cells =
            [cell(&steps[0], &systems[0]), cell(&steps[1], &systems[0]), cell(&steps[0], &systems[1])];
        let keys: Vec<usize> = keys_of(&cells).iter().map(|key| key.2).collect();
        assert_eq!(keys, [0, 1, 0]);
    }

    #[test]
    fn the_pauser_stops_a_process_and_lets_it_go_on() {
        let mut child = std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let pauser = Pauser::start(child.id(), 0.5);
        let stat = || std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        // A busy machine lets it stop and go on late, so its share is none of a test's business.
        let began = Instant::now();
        let (mut stopped, mut running) = (0, 0);
        while (stopped < 20 || running < 20) && began.elapsed() < Duration::from_secs(60) {
            thread::sleep(Duration::from_millis(3));
            *(if stat().contains(") T ") { &mut stopped } else { &mut running }) += 1;
        }
        drop(pauser);
        assert!(!stat().contains(") T "), "left stopped");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(stopped >= 20 && running >= 20, "{stopped} times stopped, {running} times not");
    }
}
