// SPDX-License-Identifier: Apache-2.0
//! Profiles (`bench/profiles.toml`): which experiments a run has, and how long each.

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::cli::RunArgs;
use crate::experiments::{self, EXPERIMENTS, Experiment, Options};
use crate::pgbench::Protocol;

const TABLE: &str = include_str!("../../../bench/profiles.toml");

/// Seconds of one measurement and rounds without a profile.
const SECONDS: f64 = 1.0;
const ROUNDS: u32 = 10;
/// Server connections per pool without a profile: PgBouncer's `default_pool_size`.
pub const POOL_SIZE: u32 = 20;
/// Seconds of a stop without a profile: queues fill within one.
const PAUSE_S: u64 = 10;

/// A named run.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// What `--profile` takes.
    pub name: String,
    /// What it is for.
    pub title: String,
    /// Its experiments in order; one may appear more than once.
    part: Vec<Part>,
}

/// One experiment of a profile.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    experiment: String,
    /// Empty lists mean the experiment's own.
    #[serde(default)]
    systems: Vec<String>,
    #[serde(default)]
    clients: Vec<u32>,
    #[serde(default)]
    modes: Vec<Protocol>,
    #[serde(default)]
    pool_sizes: Vec<u32>,
    #[serde(default)]
    workloads: Vec<String>,
    seconds: f64,
    rounds: u32,
    /// Seconds for which receivers of copies stop.
    pause: Option<u64>,
    /// The short form of the experiment.
    #[serde(default)]
    small: bool,
}

/// One experiment of a run, ready to be planned.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The experiment.
    pub experiment: &'static Experiment,
    /// Systems; empty for the experiment's own.
    pub systems: Vec<String>,
    /// What shapes its points.
    pub options: Options,
    /// Seconds of one measurement.
    pub seconds: f64,
    /// Rounds.
    pub rounds: u32,
}

#[derive(Deserialize)]
struct Table {
    profile: Vec<Profile>,
}

/// All profiles.
///
/// # Errors
/// When the table is broken or names an unknown experiment.
pub fn table() -> Result<Vec<Profile>> {
    let profiles = toml::from_str::<Table>(TABLE).context("bench/profiles.toml")?.profile;
    for part in profiles.iter().flat_map(|profile| &profile.part) {
        find_experiment(&part.experiment).context("bench/profiles.toml")?;
    }
    Ok(profiles)
}

/// What the command line asks for, experiment by experiment. What it says itself goes before what a profile says.
///
/// # Errors
/// When an experiment or profile is unknown; lists the known ones.
pub fn entries(arguments: &RunArgs) -> Result<Vec<Entry>> {
    let name = if arguments.quick { Some("quick") } else { arguments.profile.as_deref() };
    let Some(name) = name else {
        let chosen: Vec<&'static Experiment> = if arguments.experiment.is_empty() {
            EXPERIMENTS.iter().collect()
        } else {
            arguments.experiment.iter().map(|name| find_experiment(name)).collect::<Result<_>>()?
        };
        return Ok(chosen.into_iter().map(|experiment| entry(experiment, arguments, None)).collect());
    };
    let profiles = table()?;
    let Some(profile) = profiles.iter().find(|profile| profile.name == name) else {
        let known: Vec<&str> = profiles.iter().map(|profile| profile.name.as_str()).collect();
        bail!("unknown profile {name}: one of {}", known.join(", "));
    };
    for name in &arguments.experiment {
        find_experiment(name)?;
        if !profile.part.iter().any(|part| &part.experiment == name) {
            bail!("profile {} has no experiment {name}", profile.name);
        }
    }
    let wanted =
        |part: &&Part| arguments.experiment.is_empty() || arguments.experiment.contains(&part.experiment);
    let parts = profile.part.iter().filter(wanted);
    parts.map(|part| Ok(entry(find_experiment(&part.experiment)?, arguments, Some(part)))).collect()
}

fn entry(experiment: &'static Experiment, arguments: &RunArgs, part: Option<&Part>) -> Entry {
    fn first<T: Clone>(own: &[T], profile: Option<&Vec<T>>) -> Vec<T> {
        if own.is_empty() { profile.cloned().unwrap_or_default() } else { own.to_vec() }
    }
    fn some<T>(list: Vec<T>) -> Option<Vec<T>> {
        (!list.is_empty()).then_some(list)
    }
    Entry {
        experiment,
        systems: first(&arguments.systems, part.map(|p| &p.systems)),
        options: Options {
            clients: some(first(&arguments.clients, part.map(|p| &p.clients))),
            modes: some(first(&arguments.modes, part.map(|p| &p.modes))),
            pool_sizes: some(first(&arguments.pool_size, part.map(|part| &part.pool_sizes)))
                .unwrap_or_else(|| vec![POOL_SIZE]),
            workloads: some(first(&arguments.workloads, part.map(|p| &p.workloads))),
            logins: some(arguments.logins.clone()),
            rate: arguments.rate,
            scale: arguments.scale,
            pause_s: arguments.pause.or(part.and_then(|p| p.pause)).unwrap_or(PAUSE_S),
            quick: part.is_some_and(|p| p.small),
        },
        seconds: arguments.seconds.or(part.map(|p| p.seconds)).unwrap_or(SECONDS),
        rounds: arguments.rounds.or(part.map(|p| p.rounds)).unwrap_or(ROUNDS),
    }
}

fn find_experiment(name: &str) -> Result<&'static Experiment> {
    experiments::find(name).ok_or_else(|| {
        let known: Vec<&str> = EXPERIMENTS.iter().map(|e| e.name).collect();
        anyhow::anyhow!("unknown experiment {name}: one of {}", known.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::experiments::Work;
    use crate::limits::MIN_ROUNDS;
    use crate::tasks::Task;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: RunArgs,
    }

    fn of(words: &[&str]) -> Result<Vec<Entry>> {
        entries(&Line::parse_from([&["bench"], words].concat()).arguments)
    }

    #[test]
    fn every_profile_has_known_systems_and_workloads() {
        let systems = crate::systems::table(None).unwrap();
        for part in table().unwrap().iter().flat_map(|profile| &profile.part) {
            assert!(part.systems.iter().all(|name| systems.iter().any(|s| &s.name == name)), "{part:?}");
            assert!(part.workloads.iter().all(|name| crate::workloads::find(name).is_some()), "{part:?}");
        }
    }

    #[test]
    fn the_command_line_goes_before_the_profile() {
        let entries = of(&["--profile", "reference", "-e", "tax", "--rounds", "3", "-s", "direct"]).unwrap();
        assert!(!entries.is_empty());
        assert!(
            entries.iter().all(|e| e.experiment.name == "tax" && e.rounds == 3 && e.systems == ["direct"])
        );
        let all = of(&[]).unwrap();
        assert_eq!(all.len(), EXPERIMENTS.len());
        for entry in all {
            assert!(!(entry.experiment.plan)(&entry.options).is_empty(), "{}", entry.experiment.name);
        }
        assert!(of(&["--profile", "nope"]).unwrap_err().to_string().contains("reference"));
        assert!(of(&["--quick", "-e", "dump"]).unwrap_err().to_string().contains("no experiment dump"));
    }

    #[test]
    fn the_reference_decides_limits() {
        for entry in of(&["--profile", "reference"]).unwrap() {
            let steps = (entry.experiment.plan)(&entry.options);
            for step in steps {
                if entry.experiment.name == "names" {
                    // Shows a share; nothing is demanded of it.
                    continue;
                }
                let rounds = step.rounds.of(entry.rounds) as usize;
                let enough = match step.work {
                    Work::Pgbench { .. } | Work::Task(Task::Idle { .. } | Task::Copy { .. }) => MIN_ROUNDS,
                    Work::Task(_) => 3,
                };
                assert!(
                    rounds >= enough,
                    "{} {}: {rounds} rounds",
                    entry.experiment.name,
                    step.point.label()
                );
            }
        }
    }
}
