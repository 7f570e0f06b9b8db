// SPDX-License-Identifier: Apache-2.0
//! Runs planned work so that what is compared is measured at the same time under the same conditions.
//!
//! - The systems of a group take *turns* of about a second: a round is one turn of each. The order of a round is random,
//!   and the next round has the reverse order, so a steady drift of the machine cancels within the two.
//! - Every second round all systems of the group are started anew. What is the luck of one process (addresses, hash
//!   seeds, which backends it got) is then part of the spread between rounds and cannot pass for a difference.
//! - Groups come in random order, once per start.

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
use crate::lanes;
use crate::pgbench::{self, Driver, Measured, Moment, SETTLE};
use crate::roundtrips::RoundTrips;
use crate::sample::{Results, Sample, metric};
use crate::systems::{Beside, Instance, Place, Setup, System};

/// Rounds between two starts of the systems: one order and its reverse.
const ROUNDS_PER_START: u32 = 2;

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

/// About how many seconds one turn of a step takes, its share of starts included.
#[must_use]
pub fn seconds_of(step: &Step, seconds: f64) -> f64 {
    match &step.work {
        // 0.6 s: a half of the start of one system and of its load's connections and first second, which overlap.
        Work::Pgbench { load, .. } if load.rate.is_none() => seconds + SETTLE.as_secs_f64() + 0.6,
        Work::Pgbench { load, .. } => f64::from(pgbench::warm_up_s(load)) + seconds + 1.0,
        Work::Task(task) => task.seconds(seconds),
    }
}

/// Runs cells and keeps what they yield.
#[derive(Debug)]
pub struct Runner<'a> {
    place: Place<'a>,
    stop: &'a AtomicBool,
    seconds: f64,
    began: Instant,
    instances: BTreeMap<(&'a str, &'a Setup), Instance>,
}

/// A cell within its group: its load, ready to go on, and what its turns gave.
struct Stand<'a> {
    cell: Cell<'a>,
    /// `None` for work that is not held between turns.
    driver: Option<Driver>,
    /// Why it takes part no more.
    broken: Option<String>,
    turns: Vec<Turn>,
}

/// One turn: its place in the run, and a window of the driver's log or what its work measured.
struct Turn {
    round: u32,
    at_s: f64,
    outcome: Result<(Outcome, BTreeMap<String, f64>)>,
}

enum Outcome {
    Window(Box<Window>),
    Measured(Measured),
}

impl<'a> Runner<'a> {
    /// A runner that starts systems at `place`, measures for `seconds` a turn and ends early when `stop` is set.
    #[must_use]
    pub fn new(place: Place<'a>, stop: &'a AtomicBool, seconds: f64) -> Self {
        Self { place, stop, seconds, began: Instant::now(), instances: BTreeMap::new() }
    }

    /// Runs all cells of one experiment `rounds` times, or as often as their steps say, and adds their samples.
    ///
    /// A cell that fails, or whose system does not start, gives samples with an error: the others go on.
    pub fn run(
        &mut self,
        cells: &[Cell<'a>],
        rounds: u32,
        results: &mut Results,
        mut progress: impl FnMut(Event<'_>),
    ) {
        let mut rng = rand::rng();
        let total = cells.iter().map(|cell| cell.rounds(rounds) as usize).sum();
        let most = cells.iter().map(|cell| cell.rounds(rounds)).max().unwrap_or(0);
        let mut done = 0;
        for first in (0..most).step_by(ROUNDS_PER_START as usize) {
            for group in shuffled_groups(cells, &mut rng) {
                let part: Vec<Cell<'a>> =
                    group.into_iter().filter(|cell| first < cell.rounds(rounds)).collect();
                if part.is_empty() || self.stop.load(Ordering::Relaxed) {
                    continue;
                }
                let span = first..(first + ROUNDS_PER_START).min(most);
                let samples = self.group(&part, span, rounds, results.samples.len(), |round, cell| {
                    progress(Event::Turn { done, total, round, cell });
                    done += 1;
                });
                progress(Event::Samples(&samples));
                results.samples.extend(samples);
            }
        }
        results.interrupted |= self.stop.load(Ordering::Relaxed);
    }

    /// Starts the systems of a group, lets them take their turns and stops them.
    fn group(
        &mut self,
        cells: &[Cell<'a>],
        rounds: Range<u32>,
        asked: u32,
        order: usize,
        mut turn_begins: impl FnMut(u32, Cell<'a>),
    ) -> Vec<Sample> {
        let mut stands: Vec<Stand<'a>> = cells.iter().map(|cell| self.stand(*cell)).collect();
        for stand in &mut stands {
            stand.hold_when_warm(self.stop);
        }
        let mut turns: Vec<usize> = (0..stands.len()).collect();
        turns.shuffle(&mut rand::rng());
        for round in rounds {
            for &index in &turns {
                let stand = &mut stands[index];
                if self.stop.load(Ordering::Relaxed) || round >= stand.cell.rounds(asked) {
                    continue;
                }
                turn_begins(round, stand.cell);
                let at_s = self.began.elapsed().as_secs_f64();
                let outcome = match &stand.broken {
                    Some(error) => Err(anyhow::anyhow!(error.clone())),
                    None => self.turn(stand.cell, stand.driver.as_mut()),
                };
                stand.turns.push(Turn { round, at_s, outcome });
            }
            turns.reverse();
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
        // The next group has other settings; its systems should not share the machine with idle ones.
        self.instances.clear();
        samples
    }

    fn stand(&mut self, cell: Cell<'a>) -> Stand<'a> {
        let driver = self.instance(cell).and_then(|instance| match &cell.step.work {
            Work::Pgbench { load, .. } if load.rate.is_none() => {
                Driver::start(load, self.seconds, &self.instances[&instance], self.place).map(Some)
            }
            _ => Ok(None),
        });
        let (driver, broken) = match driver {
            Ok(driver) => (driver, None),
            Err(error) => (None, Some(format!("{error:#}"))),
        };
        Stand { cell, driver, broken, turns: Vec::new() }
    }

    /// The key of the cell's running instance, started if need be.
    fn instance(&mut self, cell: Cell<'a>) -> Result<(&'a str, &'a Setup)> {
        let key = (cell.system.name.as_str(), &cell.step.setup);
        if !self.instances.contains_key(&key) {
            let start = || Instance::start(cell.system, &cell.step.setup, self.place);
            // Once more: a port may have been taken since it was chosen, or a self-test have met a busy moment.
            let instance = start().or_else(|error| start().map_err(|_| error))?;
            self.instances.insert(key, instance);
        }
        Ok(key)
    }

    fn turn(
        &mut self,
        cell: Cell<'a>,
        driver: Option<&mut Driver>,
    ) -> Result<(Outcome, BTreeMap<String, f64>)> {
        let key = (cell.system.name.as_str(), &cell.step.setup);
        let instance = self.instances.get_mut(&key).context("its system was not started")?;
        instance.check_alive()?;
        // A copy leaves its lane by design once it has passed the lane's budget, and is one transaction.
        let lane = cell.system.lane.as_deref().filter(|_| matches!(cell.step.work, Work::Pgbench { .. }));
        let mut trips = RoundTrips::new(cell.step.round_trips, instance, self.place);
        let mut carried = Vec::new();
        let mut look = |instance: &Instance, moment: Moment| -> Result<()> {
            match moment {
                Moment::During => trips.look(),
                _ if lane.is_some() => carried.push(lanes::read(instance, self.place)?),
                _ => {}
            }
            Ok(())
        };
        let _pauser = instance
            .pid()
            .filter(|_| cell.system.paused_percent > 0.0)
            .map(|pid| Pauser::start(pid, cell.system.paused_percent / 100.0));
        let mut beside = Beside::start(cell.system, self.place)?;
        let outcome = match (&cell.step.work, driver) {
            (Work::Pgbench { .. }, Some(driver)) => {
                driver.check_running()?;
                // While it is held nothing happens, so there is no hurry between these and the window.
                look(instance, Moment::Begins)?;
                driver.go_on();
                thread::sleep(SETTLE);
                let window =
                    pgbench::window(self.seconds, instance, self.stop, || look(instance, Moment::During));
                driver.hold();
                look(instance, Moment::Ends)?;
                Outcome::Window(Box::new(window?))
            }
            (Work::Pgbench { load, .. }, None) => {
                let look = |moment| look(instance, moment);
                Outcome::Measured(pgbench::measure(
                    load,
                    self.seconds,
                    instance,
                    self.place,
                    self.stop,
                    look,
                )?)
            }
            (Work::Task(task), _) => {
                Outcome::Measured(task.run(self.seconds, instance, self.place, self.stop)?)
            }
        };
        if let Some(beside) = &mut beside {
            beside.check_running()?;
        }
        let share = match (lane, &carried[..]) {
            (Some(lane), [before, after]) => after.share_since(before, lane),
            _ => None,
        };
        let mut metrics = trips.metrics();
        metrics.extend(share.map(|share| (metric::LANE_SHARE.to_owned(), share)));
        Ok((outcome, metrics))
    }
}

impl Stand<'_> {
    fn hold_when_warm(&mut self, stop: &AtomicBool) {
        let Some(driver) = &mut self.driver else { return };
        match driver.wait_until_warm(stop) {
            Ok(()) => driver.hold(),
            Err(error) => {
                self.broken = Some(format!("{error:#}"));
                self.driver = None;
            }
        }
    }

    /// Ends the load and turns windows into samples.
    fn samples(self) -> Vec<Sample> {
        let log = self.driver.map(Driver::finish).transpose();
        let cell = self.cell;
        let sample = |turn: Turn| {
            let measured = turn.outcome.and_then(|(outcome, extra)| {
                let (mut metrics, latency) = match (outcome, &log) {
                    (Outcome::Measured(measured), _) => measured,
                    (Outcome::Window(window), Ok(Some(log))) => log.measured(&window)?,
                    (Outcome::Window(_), Err(error)) => anyhow::bail!("{error:#}"),
                    (Outcome::Window(_), Ok(None)) => anyhow::bail!("a window without a log"),
                };
                metrics.extend(extra);
                Ok((metrics, latency))
            });
            let (metrics, latency_ms, error) = match measured {
                Ok((metrics, latency)) => (metrics, latency, None),
                Err(error) => (BTreeMap::new(), None, Some(format!("{error:#}"))),
            };
            Sample {
                experiment: cell.experiment.name.to_owned(),
                system: cell.system.name.clone(),
                round: turn.round,
                order: 0,
                at_s: turn.at_s,
                point: cell.step.point.clone(),
                metrics,
                latency_ms,
                error,
            }
        };
        self.turns.into_iter().map(sample).collect()
    }
}

/// The cells by group, groups in random order.
fn shuffled_groups<'a>(cells: &[Cell<'a>], rng: &mut impl rand::Rng) -> Vec<Vec<Cell<'a>>> {
    let mut groups: BTreeMap<u32, Vec<Cell<'a>>> = BTreeMap::new();
    for cell in cells {
        groups.entry(cell.step.group).or_default().push(*cell);
    }
    let mut groups: Vec<Vec<Cell<'a>>> = groups.into_values().collect();
    groups.shuffle(rng);
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
    use crate::experiments::{EXPERIMENTS, Options};

    #[test]
    fn every_cell_is_in_one_group_with_those_it_is_compared_with() {
        let systems = crate::systems::table(None).unwrap();
        let options = Options {
            clients: None,
            modes: None,
            pool_sizes: vec![20],
            workloads: None,
            rate: 1.0,
            scale: 1,
            quick: false,
        };
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
    }

    #[test]
    fn the_pauser_stops_a_process_for_about_its_share() {
        let mut child = std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let pauser = Pauser::start(child.id(), 0.5);
        let stat = || std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let stopped = (0..200)
            .filter(|_| {
                thread::sleep(Duration::from_millis(3));
                stat().contains(") T ")
            })
            .count();
        drop(pauser);
        assert!(!stat().contains(") T "), "left stopped");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!((50..=150).contains(&stopped), "{stopped} of 200");
    }
}
