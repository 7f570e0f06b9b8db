// SPDX-License-Identifier: Apache-2.0
//! The table of limits (`bench/limits.toml`) and the verdict on each.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::analysis::View;
use crate::lanes::SHARE_MIN;
use crate::sample::{Point, Results, metric};
use crate::stats::{Estimate, Summary};

const TABLE: &str = include_str!("../../../bench/limits.toml");

/// Rounds below which nothing is decided.
pub const MIN_ROUNDS: usize = 10;
/// Half width of a ratio's 90 % interval above which nothing is decided.
pub const MAX_HALF_WIDTH: f64 = 0.15;

/// One limit.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Limit {
    /// Where it is demanded, for a reader of the table.
    pub source: String,
    /// Experiment.
    pub experiment: String,
    /// System.
    pub system: String,
    /// Metric, see [`crate::sample::metric`].
    pub metric: String,
    /// System whose value of the same round divides it; without, the value itself is limited.
    pub relative_to: Option<String>,
    /// Coordinates of the points at which it holds; a list holds at each.
    #[serde(default, rename = "where")]
    pub at: BTreeMap<String, OneOrMany>,
    /// Upper bound.
    pub at_most: Option<f64>,
    /// Lower bound.
    pub at_least: Option<f64>,
    /// What we would like beyond the bound.
    pub aim: Option<f64>,
    /// Rounds that decide, where it is not [`MIN_ROUNDS`]: a size in bytes does not drift with the machine.
    pub min_rounds: Option<usize>,
    /// The pooler may choose user space here, so the lane's share decides nothing.
    #[serde(default)]
    pub any_path: bool,
}

/// A value or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum OneOrMany {
    /// One.
    One(String),
    /// Several.
    Many(Vec<String>),
}

impl OneOrMany {
    fn has(&self, value: &str) -> bool {
        match self {
            Self::One(one) => one == value,
            Self::Many(many) => many.iter().any(|one| one == value),
        }
    }
}

#[derive(Deserialize)]
struct Table {
    limit: Vec<Limit>,
}

/// All limits.
///
/// # Errors
/// When the table is broken.
pub fn table() -> Result<Vec<Limit>> {
    let limits = toml::from_str::<Table>(TABLE).context("bench/limits.toml")?.limit;
    for limit in &limits {
        ensure!(
            limit.at_most.is_some() != limit.at_least.is_some(),
            "bench/limits.toml: {}: exactly one of at_most and at_least",
            limit.source
        );
    }
    Ok(limits)
}

/// What the measurement says about a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The median is within the limit.
    Met,
    /// The median is beyond it.
    NotMet,
    /// Too few rounds or too wide an interval.
    Undecided,
    /// User space served more than a few of the transactions that a lane should have carried.
    NotCarried,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Met => "met",
            Self::NotMet => "not met",
            Self::Undecided => "undecided",
            Self::NotCarried => "failed: not in the lane",
        })
    }
}

/// A limit at one point with its measurement.
#[derive(Clone, Debug)]
pub struct Judged {
    /// The limit.
    pub limit: Limit,
    /// The point.
    pub point: Point,
    /// What was measured.
    pub estimate: Estimate,
    /// The verdict.
    pub verdict: Verdict,
}

impl Limit {
    /// The verdict on an estimate.
    #[must_use]
    pub fn judge(&self, estimate: &Estimate) -> Verdict {
        // The width rule is about ratios; of a plain quantity the same share of its size is asked.
        let width = match self.relative_to {
            Some(_) => estimate.half_width(),
            None => estimate.half_width() / estimate.median.abs().max(f64::MIN_POSITIVE),
        };
        // Written so that a width that is not a number decides nothing either.
        let narrow = width <= MAX_HALF_WIDTH;
        if estimate.rounds < self.min_rounds.unwrap_or(MIN_ROUNDS) || !narrow {
            return Verdict::Undecided;
        }
        let within = self.at_most.is_none_or(|most| estimate.median <= most)
            && self.at_least.is_none_or(|least| estimate.median >= least);
        if within { Verdict::Met } else { Verdict::NotMet }
    }

    /// `<= 1.00` or `>= 0.95`.
    #[must_use]
    pub fn bound(&self) -> String {
        match (self.at_most, self.at_least) {
            (Some(most), _) => format!("<= {most:.2}"),
            (None, Some(least)) => format!(">= {least:.2}"),
            (None, None) => String::new(),
        }
    }
}

/// Judges every limit that the results say something about.
#[must_use]
pub fn judge(limits: &[Limit], results: &Results) -> Vec<Judged> {
    let mut judged = Vec::new();
    for limit in limits {
        let view = View::of(results, &limit.experiment);
        for point in view.points() {
            if !limit.at.iter().all(|(name, values)| values.has(point.get(name))) {
                continue;
            }
            let estimate = match &limit.relative_to {
                Some(other) => view.ratio(&limit.system, other, point, &limit.metric),
                None => Estimate::of(&view.values(&limit.system, point, &limit.metric)),
            };
            if let Some(estimate) = estimate {
                let carried = limit.any_path || carried(&view, &limit.system, point) != Some(false);
                let verdict = if carried { limit.judge(&estimate) } else { Verdict::NotCarried };
                judged.push(Judged { limit: limit.clone(), point: point.clone(), estimate, verdict });
            }
        }
    }
    judged
}

/// Whether the system's lane carried what it should at a point; `None` for a system without a lane.
#[must_use]
pub fn carried(view: &View<'_>, system: &str, point: &Point) -> Option<bool> {
    let share = Summary::of(&view.values(system, point, metric::LANE_SHARE))?;
    Some(share.median >= SHARE_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit() -> Limit {
        Limit {
            source: "test".into(),
            experiment: "tax".into(),
            system: "ours-off".into(),
            metric: "tax_us".into(),
            relative_to: Some("pgbouncer".into()),
            at: BTreeMap::new(),
            at_most: Some(1.0),
            at_least: None,
            aim: None,
            min_rounds: None,
            any_path: false,
        }
    }

    fn estimate(median: f64, half: f64, rounds: usize) -> Estimate {
        Estimate { median, low: median - half, high: median + half, rounds }
    }

    #[test]
    fn verdicts_follow_median_width_and_rounds() {
        assert_eq!(limit().judge(&estimate(0.99, 0.10, 10)), Verdict::Met);
        assert_eq!(limit().judge(&estimate(1.01, 0.10, 10)), Verdict::NotMet);
        assert_eq!(limit().judge(&estimate(0.50, 0.16, 10)), Verdict::Undecided);
        assert_eq!(limit().judge(&estimate(0.50, 0.01, 9)), Verdict::Undecided);
    }

    #[test]
    fn the_built_in_table_is_sound_and_names_known_systems_and_experiments() {
        let systems = crate::systems::table(None).unwrap();
        for limit in table().unwrap() {
            assert!(systems.iter().any(|system| system.name == limit.system), "{}", limit.system);
            if let Some(other) = &limit.relative_to {
                assert!(systems.iter().any(|system| &system.name == other), "{other}");
            }
            assert!(crate::experiments::find(&limit.experiment).is_some(), "{}", limit.experiment);
        }
    }

    #[test]
    fn a_row_that_its_lane_did_not_carry_fails_whatever_its_numbers() {
        let point = Point::default().with("clients", 8);
        let mut results = Results::default();
        for round in 0..10 {
            let sample = crate::analysis::tests::sample;
            results.samples.push(sample("direct", round, &point, 20.0, 1.0));
            results.samples.push(sample("pgbouncer", round, &point, 30.0, 1.0));
            let mut lane = sample("ours-d", round, &point, 22.0, 1.0);
            lane.metrics.insert(metric::LANE_SHARE.to_owned(), 0.94);
            results.samples.push(lane);
        }
        let of = |limit: Limit| judge(&[limit], &results)[0].verdict;
        let limit = Limit { system: "ours-d".into(), ..limit() };
        assert_eq!(of(Limit { any_path: true, ..limit.clone() }), Verdict::Met);
        assert_eq!(of(limit.clone()), Verdict::NotCarried);
        for sample in &mut results.samples {
            sample.metrics.insert(metric::LANE_SHARE.to_owned(), 0.96);
        }
        assert_eq!(judge(&[limit], &results)[0].verdict, Verdict::Met);
    }

    #[test]
    fn a_limit_holds_only_where_it_says() {
        let at = |clients: u32| Point::default().with("clients", clients);
        let mut results = Results::default();
        for round in 0..10 {
            for clients in [1, 8] {
                let point = at(clients);
                let sample = crate::analysis::tests::sample;
                results.samples.push(sample("direct", round, &point, 20.0, 1.0));
                results.samples.push(sample("pgbouncer", round, &point, 30.0, 1.0));
                results.samples.push(sample("ours-off", round, &point, 28.0, 1.0));
            }
        }
        let mut limit = limit();
        limit.at.insert("clients".into(), OneOrMany::Many(vec!["8".into(), "64".into()]));
        let judged = judge(&[limit], &results);
        assert_eq!(judged.len(), 1);
        assert_eq!(judged[0].point, at(8));
        assert_eq!(judged[0].verdict, Verdict::Met);
    }
}
