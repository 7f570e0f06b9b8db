// SPDX-License-Identifier: Apache-2.0
//! The table of limits (`bench/limits.toml`) and the verdict on each.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::analysis::View;
use crate::lanes::SHARE_MIN;
use crate::recordings;
use crate::sample::{Point, Results, metric};
use underpass_stats::{Estimate, Summary};

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
    /// Metric, see [`metric`].
    pub metric: String,
    /// System whose value of the same round divides it, of several the largest; without, the value itself is limited.
    pub relative_to: Option<OneOrMany>,
    /// Coordinates of the points at which it holds; a list holds at each.
    #[serde(default, rename = "where")]
    pub at: BTreeMap<String, OneOrMany>,
    /// Upper bound.
    pub at_most: Option<Bound>,
    /// Lower bound.
    pub at_least: Option<Bound>,
    /// What we would like beyond the bound.
    pub aim: Option<Bound>,
    /// What may come on top of `at_most` times the other's value, in the metric's unit.
    #[serde(default)]
    pub plus: f64,
    /// Share by which the bounds are looser for `-M extended` and `-M prepared`.
    pub loosened: Option<f64>,
    /// Rounds that decide, where it is not [`MIN_ROUNDS`]: a size in bytes does not drift with the machine.
    pub min_rounds: Option<usize>,
    /// The pooler may choose user space here, so the lane's share decides nothing.
    #[serde(default)]
    pub any_path: bool,
    /// Redirects without a protocol, whose value is shown beside: what a program could have at most.
    pub floor: Option<OneOrMany>,
}

/// A number, or one for each number of clients.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Bound {
    /// Everywhere.
    One(f64),
    /// By the coordinate `clients`; at others there is no bound.
    ByClients(BTreeMap<String, f64>),
}

impl Bound {
    fn at(&self, point: &Point) -> Option<f64> {
        match self {
            Self::One(bound) => Some(*bound),
            Self::ByClients(bounds) => bounds.get(point.get("clients")).copied(),
        }
    }
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
    fn values(&self) -> &[String] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::Many(many) => many,
        }
    }

    fn has(&self, value: &str) -> bool {
        self.values().iter().any(|one| one == value)
    }
}

/// The bounds of a limit at one point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// Upper bound.
    pub at_most: Option<f64>,
    /// Lower bound.
    pub at_least: Option<f64>,
    /// What we would like.
    pub aim: Option<f64>,
}

impl fmt::Display for Bounds {
    /// `<= 1.00` or `>= 0.95`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.at_most, self.at_least) {
            (Some(most), _) => write!(f, "<= {most:.2}"),
            (None, Some(least)) => write!(f, ">= {least:.2}"),
            (None, None) => Ok(()),
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
        ensure!(
            limit.plus == 0.0 || (limit.at_most.is_some() && limit.relative_to.is_some()),
            "bench/limits.toml: {}: plus belongs to at_most of a ratio",
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
    /// Of a recording whose cost it is, something is missing, or fewer sessions were audited than there were clients.
    NotRecorded,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Met => "met",
            Self::NotMet => "not met",
            Self::Undecided => "undecided",
            Self::NotCarried => "failed: not in the lane",
            Self::NotRecorded => "failed: not recorded as a whole",
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
    /// Its bounds there.
    pub bounds: Bounds,
    /// What was measured.
    pub estimate: Estimate,
    /// The same of the limit's floors, as far as they took part.
    pub floors: Vec<(String, Estimate)>,
    /// The verdict.
    pub verdict: Verdict,
}

impl Limit {
    /// The bounds at a point, `None` where the limit does not hold.
    fn bounds(&self, point: &Point) -> Option<Bounds> {
        if !self.at.iter().all(|(name, values)| values.has(point.get(name))) {
            return None;
        }
        let unnamed = matches!(point.get("mode"), "extended" | "prepared");
        let looser = self.loosened.filter(|_| unnamed).unwrap_or(0.0);
        let of = |bound: &Option<Bound>| bound.as_ref().and_then(|bound| bound.at(point));
        let bounds = Bounds {
            at_most: of(&self.at_most).map(|bound| bound * (1.0 + looser)),
            at_least: of(&self.at_least).map(|bound| bound * (1.0 - looser)),
            aim: of(&self.aim),
        };
        (bounds.at_most.is_some() || bounds.at_least.is_some()).then_some(bounds)
    }

    fn verdict(&self, bounds: &Bounds, estimate: &Estimate) -> Verdict {
        // The width rule is about ratios; of a plain quantity the same share of its size is asked.
        let width = match self.relative_to {
            Some(_) => estimate.half_width(),
            None => estimate.half_width() / estimate.median.abs().max(f64::MIN_POSITIVE),
        };
        // What lies wholly on one side of its bound needs no narrow interval where no ratio of taxes is asked.
        let beyond = |value: f64| bounds.at_most.is_some_and(|most| value > most);
        let one_side = self.min_rounds.is_some() && beyond(estimate.low) == beyond(estimate.high);
        // Written so that a width that is not a number decides nothing either.
        let narrow = width <= MAX_HALF_WIDTH || one_side;
        if estimate.rounds < self.min_rounds.unwrap_or(MIN_ROUNDS) || !narrow {
            return Verdict::Undecided;
        }
        let within = bounds.at_most.is_none_or(|most| estimate.median <= most)
            && bounds.at_least.is_none_or(|least| estimate.median >= least);
        if within { Verdict::Met } else { Verdict::NotMet }
    }

    /// What was measured of it at a point, were it about `system`.
    fn estimate(&self, view: &View<'_>, system: &str, point: &Point) -> Option<Estimate> {
        let Some(others) = &self.relative_to else {
            return Estimate::of(&view.values(system, point, &self.metric));
        };
        if let (0.0, [other]) = (self.plus, others.values()) {
            return view.ratio(system, other, point, &self.metric);
        }
        let each: Vec<BTreeMap<u32, f64>> =
            others.values().iter().map(|other| view.by_round(other, point, &self.metric)).collect();
        // A round counts in which all of them were measured.
        let largest = |round: &u32| {
            each.iter().map(|one| one.get(round).copied()).reduce(|a, b| Some(a?.max(b?))).flatten()
        };
        let rounds = view.by_round(system, point, &self.metric).into_iter();
        let ratios = rounds.filter_map(|(round, value)| {
            let (value, base) = ((value - self.plus).max(0.0), largest(&round)?);
            Some(if value == 0.0 {
                0.0
            } else if base > 0.0 {
                value / base
            } else {
                f64::INFINITY
            })
        });
        Estimate::of(&ratios.collect::<Vec<_>>())
    }
}

/// Judges every limit that the results say something about.
#[must_use]
pub fn judge(limits: &[Limit], results: &Results) -> Vec<Judged> {
    let mut judged = Vec::new();
    for limit in limits {
        let view = View::of(results, &limit.experiment);
        for point in view.points() {
            let Some(bounds) = limit.bounds(point) else { continue };
            let Some(estimate) = limit.estimate(&view, &limit.system, point) else { continue };
            let floors = limit.floor.iter().flat_map(OneOrMany::values);
            let floors = floors
                .filter_map(|floor| Some((floor.clone(), limit.estimate(&view, floor, point)?)))
                .collect();
            let carried = limit.any_path || carried(limits, &view, &limit.system, point) != Some(false);
            let verdict = match (carried, recordings::whole(&view, &limit.system, point)) {
                (false, _) => Verdict::NotCarried,
                (true, Some(false)) => Verdict::NotRecorded,
                (true, _) => limit.verdict(&bounds, &estimate),
            };
            judged.push(Judged {
                limit: limit.clone(),
                point: point.clone(),
                bounds,
                estimate,
                floors,
                verdict,
            });
        }
    }
    judged
}

/// Whether the system's lane carried what it should at a point; `None` for a system without a lane, and where the demand lets
/// user space serve, or where nothing is demanded: clients with several application names, and those that log in for each transaction,
/// of which user space serves the first by design.
#[must_use]
pub fn carried(limits: &[Limit], view: &View<'_>, system: &str, point: &Point) -> Option<bool> {
    let free = |limit: &Limit| {
        limit.any_path
            && (limit.experiment.as_str(), limit.system.as_str()) == (view.experiment(), system)
            && limit.bounds(point).is_some()
    };
    let nothing = ["names", "login"].iter().any(|name| !point.get(name).is_empty());
    if nothing || limits.iter().any(free) {
        return None;
    }
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
            relative_to: Some(OneOrMany::One("pgbouncer".into())),
            at: BTreeMap::new(),
            at_most: Some(Bound::One(1.0)),
            at_least: None,
            aim: None,
            plus: 0.0,
            loosened: None,
            min_rounds: None,
            any_path: false,
            floor: None,
        }
    }

    fn estimate(median: f64, half: f64, rounds: usize) -> Estimate {
        Estimate { median, low: median - half, high: median + half, rounds }
    }

    #[test]
    fn verdicts_follow_median_width_and_rounds() {
        let limit = limit();
        let bounds = limit.bounds(&Point::default()).unwrap();
        let verdict =
            |limit: &Limit, median, half, rounds| limit.verdict(&bounds, &estimate(median, half, rounds));
        assert_eq!(verdict(&limit, 0.99, 0.10, 10), Verdict::Met);
        assert_eq!(verdict(&limit, 1.01, 0.10, 10), Verdict::NotMet);
        assert_eq!(verdict(&limit, 0.50, 0.16, 10), Verdict::Undecided);
        assert_eq!(verdict(&limit, 0.50, 0.01, 9), Verdict::Undecided);
        let size = Limit { min_rounds: Some(3), relative_to: None, ..limit };
        assert_eq!(verdict(&size, 0.02, 0.02, 3), Verdict::Met, "of next to nothing any width is wide");
        assert_eq!(verdict(&size, 0.9, 0.2, 3), Verdict::Undecided);
        assert_eq!(verdict(&size, 9.0, 2.0, 3), Verdict::NotMet);
    }

    #[test]
    fn bounds_differ_by_clients_and_are_looser_for_some_modes() {
        let by_clients = BTreeMap::from([("1".to_owned(), 0.5), ("8".to_owned(), 0.8)]);
        let limit = Limit { at_most: Some(Bound::ByClients(by_clients)), loosened: Some(0.1), ..limit() };
        let bound = |clients: u32, mode: &str| {
            let bounds = limit.bounds(&Point::default().with("clients", clients).with("mode", mode))?;
            bounds.at_most
        };
        assert_eq!(bound(1, "simple"), Some(0.5));
        assert_eq!(bound(8, "simple"), Some(0.8));
        assert_eq!(bound(64, "simple"), None);
        assert!((bound(1, "prepared").unwrap() - 0.55).abs() < 1e-9);
        let least = Limit { at_least: limit.at_most.clone(), at_most: None, ..limit.clone() };
        let point = Point::default().with("clients", 1).with("mode", "extended");
        assert!((least.bounds(&point).unwrap().at_least.unwrap() - 0.45).abs() < 1e-9);
    }

    #[test]
    fn something_may_come_on_top() {
        let point = Point::default().with("clients", 32);
        let mut results = Results::default();
        for (round, ours) in [(0, 0.9), (1, 3.0), (2, 5.0)] {
            let sample = |system, value| crate::analysis::tests::sample(system, round, &point, 0.0, value);
            results.samples.push(sample("direct", 1.0));
            results.samples.push(sample("ours-d", ours));
        }
        let limit = Limit {
            system: "ours-d".into(),
            relative_to: Some(OneOrMany::One("direct".into())),
            metric: "tps".into(),
            plus: 1.0,
            ..limit()
        };
        let estimate = limit.estimate(&View::of(&results, "tax"), "ours-d", &point).unwrap();
        assert_eq!((estimate.median, estimate.rounds), (2.0, 3));
        // Against the larger of two, in the rounds that both have.
        for (round, other) in [(0, 0.5), (1, 2.0)] {
            results.samples.push(crate::analysis::tests::sample("direct-unix", round, &point, 0.0, other));
        }
        let both = OneOrMany::Many(vec!["direct".into(), "direct-unix".into()]);
        let limit = Limit { relative_to: Some(both), plus: 0.0, ..limit };
        let estimate = limit.estimate(&View::of(&results, "tax"), "ours-d", &point).unwrap();
        assert_eq!((estimate.median, estimate.rounds), ((0.9 + 1.5) / 2.0, 2));
    }

    #[test]
    fn the_built_in_table_is_sound_and_names_known_systems_and_experiments() {
        let systems = crate::systems::table(None).unwrap();
        for limit in table().unwrap() {
            assert!(systems.iter().any(|system| system.name == limit.system), "{}", limit.system);
            for other in limit.relative_to.iter().chain(&limit.floor).flat_map(OneOrMany::values) {
                assert!(systems.iter().any(|system| &system.name == other), "{other}");
            }
            assert!(crate::experiments::find(&limit.experiment).is_some(), "{}", limit.experiment);
        }
    }

    #[test]
    fn a_floor_stands_beside_and_decides_nothing() {
        let point = Point::default().with("clients", 8);
        let mut results = Results::default();
        for round in 0..10 {
            for (system, cpu) in
                [("direct", 20.0), ("pgbouncer", 30.0), ("ours-a", 26.0), ("forward-same-host", 24.0)]
            {
                results.samples.push(crate::analysis::tests::sample(system, round, &point, cpu, 1.0));
            }
        }
        let floors = ["forward-same-host", "forward-fed", "forward-kept"].map(String::from).to_vec();
        let limit = Limit {
            system: "ours-a".into(),
            at_most: Some(Bound::One(0.5)),
            floor: Some(OneOrMany::Many(floors)),
            any_path: true,
            ..limit()
        };
        let judged = judge(&[limit], &results);
        let [one] = &judged[..] else { panic!("{judged:?}") };
        assert_eq!((one.estimate.median, one.verdict), (0.6, Verdict::NotMet));
        let [(name, floor)] = &one.floors[..] else { panic!("only what took part: {judged:?}") };
        assert_eq!((name.as_str(), floor.median), ("forward-same-host", 0.4));
        let text = crate::table::of_limits(&judged);
        assert!(
            text.contains("bare redirect") && text.contains("0.40 [0.40, 0.40] forward-same-host"),
            "{text}"
        );
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
    fn a_row_of_which_not_all_was_recorded_fails_whatever_its_numbers() {
        let point = Point::default().with("clients", 8);
        let mut results = Results::default();
        for round in 0..10 {
            results.samples.push(crate::analysis::tests::sample("direct", round, &point, 20.0, 1.0));
            let mut traced = crate::analysis::tests::sample("trace-persist", round, &point, 20.0, 1.0);
            traced.metrics.insert(metric::LOSSLESS.to_owned(), 1.0);
            traced.metrics.insert(metric::AUDITED.to_owned(), 8.0);
            results.samples.push(traced);
        }
        let limit = Limit {
            system: "trace-persist".into(),
            relative_to: Some(OneOrMany::One("direct".into())),
            metric: metric::TPS.into(),
            at_most: None,
            at_least: Some(Bound::One(0.97)),
            ..limit()
        };
        let of = |results: &Results| judge(std::slice::from_ref(&limit), results)[0].verdict;
        assert_eq!(of(&results), Verdict::Met);
        let mut audited = results.clone();
        audited.samples[19].metrics.insert(metric::AUDITED.to_owned(), 7.0);
        assert_eq!(of(&audited), Verdict::NotRecorded);
        results.samples[19].metrics.insert(metric::LOSSLESS.to_owned(), 0.0);
        assert_eq!(of(&results), Verdict::NotRecorded);
    }

    #[test]
    fn a_row_may_rest_its_lane_where_the_demand_lets_it() {
        let limits = table().unwrap();
        let of = |point: Point| {
            let mut results = Results::default();
            for system in ["ours-a", "ours-d"] {
                let mut one = crate::analysis::tests::sample(system, 0, &point, 1.0, 1.0);
                one.metrics.insert(metric::LANE_SHARE.to_owned(), 0.1);
                results.samples.push(one);
            }
            let view = View::of(&results, "tax");
            ["ours-a", "ours-d"].map(|system| carried(&limits, &view, system, &point))
        };
        let at = |clients: u32, pool: u32| {
            of(Point::default().with("clients", clients).with("pool", pool).with("mode", "simple"))
        };
        assert_eq!(at(8, 20), [Some(false), Some(false)]);
        assert_eq!(of(Point::default().with("login", "trust")), [None, None]);
        assert_eq!(at(64, 64), [Some(false), None]);
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
