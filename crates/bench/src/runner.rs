// SPDX-License-Identifier: Apache-2.0
//! Runs planned work: rounds, groups and systems in random order, so that drift of the machine hits all alike.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::seq::SliceRandom;

use crate::experiments::{Experiment, Step, Work};
use crate::pgbench::{self, Measured};
use crate::sample::{Results, Sample};
use crate::systems::{Instance, Place, Setup, System};

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

/// Period of the pauses of a slowed system. Short against a measurement, long against the precision of a sleep.
const PAUSE_PERIOD: Duration = Duration::from_millis(20);

/// Runs cells and keeps what they yield.
#[derive(Debug)]
pub struct Runner<'a> {
    place: Place<'a>,
    stop: &'a AtomicBool,
    seconds: u32,
    began: Instant,
    instances: BTreeMap<(&'a str, &'a Setup), Instance>,
}

impl<'a> Runner<'a> {
    /// A runner that starts systems at `place` and ends early when `stop` is set.
    #[must_use]
    pub fn new(place: Place<'a>, stop: &'a AtomicBool, seconds: u32) -> Self {
        Self { place, stop, seconds, began: Instant::now(), instances: BTreeMap::new() }
    }

    /// Runs all cells of one experiment `rounds` times and adds their samples to `results`.
    ///
    /// A cell that fails is a sample with an error: the others go on.
    ///
    /// # Errors
    /// When a system does not start.
    pub fn run(
        &mut self,
        cells: &[Cell<'a>],
        rounds: u32,
        results: &mut Results,
        mut progress: impl FnMut(&Sample, usize, usize),
    ) -> Result<()> {
        self.start_all(cells)?;
        let mut rng = rand::rng();
        let total = cells.len() * rounds as usize;
        let mut done = 0;
        for round in 0..rounds {
            for cell in shuffled(cells, &mut rng) {
                if self.stop.load(Ordering::Relaxed) {
                    results.interrupted = true;
                    self.instances.clear();
                    return Ok(());
                }
                let outcome = self.measure(cell);
                if self.stop.load(Ordering::Relaxed) {
                    continue;
                }
                done += 1;
                let (metrics, latency_ms, error) = match outcome {
                    Ok((metrics, latency)) => (metrics, latency, None),
                    Err(error) => (BTreeMap::new(), None, Some(format!("{error:#}"))),
                };
                let sample = Sample {
                    experiment: cell.experiment.name.to_owned(),
                    system: cell.system.name.clone(),
                    round,
                    order: results.samples.len() as u32,
                    at_s: self.began.elapsed().as_secs_f64(),
                    point: cell.step.point.clone(),
                    metrics,
                    latency_ms,
                    error,
                };
                progress(&sample, done, total);
                results.samples.push(sample);
            }
        }
        results.interrupted |= self.stop.load(Ordering::Relaxed);
        // The next experiment has other settings; its systems should not share the machine with idle ones.
        self.instances.clear();
        Ok(())
    }

    fn start_all(&mut self, cells: &[Cell<'a>]) -> Result<()> {
        for cell in cells {
            let key = (cell.system.name.as_str(), &cell.step.setup);
            if !self.instances.contains_key(&key) {
                let instance = Instance::start(cell.system, &cell.step.setup, self.place)?;
                self.instances.insert(key, instance);
            }
        }
        Ok(())
    }

    fn measure(&mut self, cell: Cell<'a>) -> Result<Measured> {
        let instance = self
            .instances
            .get_mut(&(cell.system.name.as_str(), &cell.step.setup))
            .expect("every cell's instance was started");
        instance.check_alive()?;
        let _pauser = instance
            .pid()
            .filter(|_| cell.system.paused_percent > 0.0)
            .map(|pid| Pauser::start(pid, cell.system.paused_percent / 100.0));
        match &cell.step.work {
            Work::Pgbench { load, .. } => {
                pgbench::measure(load, self.seconds, instance, self.place, self.stop)
            }
            Work::Task(task) => task.run(self.seconds, instance, self.place, self.stop),
        }
    }
}

/// The cells of one round: groups in random order, and the cells of a group in random order.
fn shuffled<'a>(cells: &[Cell<'a>], rng: &mut impl rand::Rng) -> Vec<Cell<'a>> {
    let mut groups: BTreeMap<u32, Vec<Cell<'a>>> = BTreeMap::new();
    for cell in cells {
        groups.entry(cell.step.group).or_default().push(*cell);
    }
    let mut groups: Vec<Vec<Cell<'a>>> = groups.into_values().collect();
    groups.shuffle(rng);
    for group in &mut groups {
        group.shuffle(rng);
    }
    groups.concat()
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
    fn a_round_holds_every_cell_once_and_groups_stay_together() {
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
        let round = shuffled(&cells, &mut rand::rng());
        assert_eq!(round.len(), cells.len());
        let groups: Vec<u32> = round.iter().map(|cell| cell.step.group).collect();
        let mut seen = groups.clone();
        seen.dedup();
        let changes = seen.len();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(changes, seen.len(), "a group was split: {groups:?}");
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
