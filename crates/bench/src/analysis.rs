// SPDX-License-Identifier: Apache-2.0
//! From samples to per-round values, taxes and ratios.

use std::collections::{BTreeMap, BTreeSet};

use crate::experiments::find;
use crate::sample::{Point, Results, Sample, metric};
use underpass_stats::Estimate;

/// The system that every tax is taken from.
pub const DIRECT: &str = "direct";
/// The one in its place in experiments that have it of themselves, at points where it was measured: a thousand direct connections cost more than a
/// pooler does.
pub const DIRECT_FEW: &str = "direct-few";
/// The system that every ratio is taken to.
pub const BASELINE: &str = "pgbouncer";

/// A view of results that answers questions about one experiment.
#[derive(Debug)]
pub struct View<'a> {
    experiment: String,
    without: &'a BTreeMap<String, String>,
    samples: BTreeMap<&'a str, BTreeMap<&'a Point, Vec<&'a Sample>>>,
}

impl<'a> View<'a> {
    /// Takes the good samples of one experiment.
    #[must_use]
    pub fn of(results: &'a Results, experiment: &str) -> Self {
        let mut samples: BTreeMap<&str, BTreeMap<&Point, Vec<&Sample>>> = BTreeMap::new();
        for sample in results.samples.iter().filter(|s| s.experiment == experiment && s.error.is_none()) {
            samples.entry(&sample.system).or_default().entry(&sample.point).or_default().push(sample);
        }
        Self { experiment: experiment.to_owned(), without: &results.meta.without, samples }
    }

    /// The experiment's name.
    #[must_use]
    pub fn experiment(&self) -> &str {
        &self.experiment
    }

    /// The same system without its mirror, where it has one.
    #[must_use]
    pub fn without(&self, system: &str) -> Option<&'a str> {
        self.without.get(system).map(String::as_str)
    }

    /// Points in reading order.
    #[must_use]
    pub fn points(&self) -> Vec<&'a Point> {
        let set: BTreeSet<&Point> = self.samples.values().flat_map(BTreeMap::keys).copied().collect();
        let mut points: Vec<&Point> = set.into_iter().collect();
        points.sort_by_key(|point| point.sort_key());
        points
    }

    /// Systems that have samples at a point.
    #[must_use]
    pub fn systems_at(&self, point: &Point) -> Vec<&'a str> {
        self.samples
            .iter()
            .filter(|(_, points)| points.contains_key(point))
            .map(|(system, _)| *system)
            .collect()
    }

    /// All good samples of a system at a point.
    #[must_use]
    pub fn samples(&self, system: &str, point: &Point) -> &[&'a Sample] {
        self.samples.get(system).and_then(|points| points.get(point)).map_or(&[], Vec::as_slice)
    }

    /// The system that the tax is taken from.
    fn tax_base(&self, point: &Point) -> &'static str {
        let has_few = find(&self.experiment).is_some_and(|found| found.systems.contains(&DIRECT_FEW));
        if has_few && !self.samples(DIRECT_FEW, point).is_empty() { DIRECT_FEW } else { DIRECT }
    }

    /// A metric by round. The tax is the CPU above the direct connection's of the same round, at a fixed rate of as few connections as the pool
    /// has where that was measured; what a mirror adds is above the same system without it.
    #[must_use]
    pub fn by_round(&self, system: &str, point: &Point, name: &str) -> BTreeMap<u32, f64> {
        let plain = |system: &str, name: &str| -> BTreeMap<u32, f64> {
            self.samples(system, point)
                .iter()
                .filter_map(|sample| Some((sample.round, *sample.metrics.get(name)?)))
                .collect()
        };
        let without = self.without(system);
        let (name, base) = match name {
            metric::TAX => (metric::CPU, Some(self.tax_base(point))),
            metric::ADDED_CPU => (metric::CPU, without),
            metric::ADDED_LATENCY => (metric::LATENCY_MEAN, without),
            stored => return plain(system, stored),
        };
        let base = base.map(|base| plain(base, name)).unwrap_or_default();
        plain(system, name)
            .into_iter()
            .filter_map(|(round, value)| Some((round, value - base.get(&round)?)))
            .collect()
    }

    /// Values of a metric over rounds.
    #[must_use]
    pub fn values(&self, system: &str, point: &Point, name: &str) -> Vec<f64> {
        self.by_round(system, point, name).into_values().collect()
    }

    /// The point at which a system that lacks named statements is compared: its own extended one.
    #[must_use]
    pub fn comparable(&self, system: &str, point: &Point) -> Point {
        if point.get("mode") == "prepared" && self.samples(system, point).is_empty() {
            return point.clone().with("mode", "extended");
        }
        point.clone()
    }

    /// Per-round ratios of a metric to another system's, in round order.
    #[must_use]
    pub fn ratios(&self, system: &str, to: &str, point: &Point, name: &str) -> Vec<f64> {
        let base = self.by_round(to, &self.comparable(to, point), name);
        self.by_round(system, point, name)
            .into_iter()
            .filter_map(|(round, value)| {
                let base = *base.get(&round)?;
                // A tax of nothing or less divides nothing. To drop such rounds would keep those in which noise made
                // the other's tax large: they count as beyond every bound instead.
                Some(if base > 0.0 { value / base } else { f64::INFINITY })
            })
            .collect()
    }

    /// The bootstrapped median of [`View::ratios`].
    #[must_use]
    pub fn ratio(&self, system: &str, to: &str, point: &Point, name: &str) -> Option<Estimate> {
        Estimate::of(&self.ratios(system, to, point, name))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A sample of the tax experiment with a CPU figure and a rate.
    pub(crate) fn sample(system: &str, round: u32, point: &Point, cpu: f64, tps: f64) -> Sample {
        Sample {
            experiment: "tax".into(),
            system: system.into(),
            round,
            order: 0,
            at_s: 0.0,
            point: point.clone(),
            metrics: BTreeMap::from([(metric::CPU.to_owned(), cpu), (metric::TPS.to_owned(), tps)]),
            latency_ms: None,
            error: None,
        }
    }

    #[test]
    fn the_tax_is_taken_within_a_round() {
        let point = Point::default().with("clients", 1);
        let mut results = Results::default();
        // The machine drifts by half between the rounds; the tax ratio does not.
        for (round, drift) in [(0, 1.0), (1, 1.5)] {
            results.samples.push(sample("direct", round, &point, 20.0 * drift, 1.0));
            results.samples.push(sample("pgbouncer", round, &point, 30.0 * drift, 1.0));
            results.samples.push(sample("ours-off", round, &point, 28.0 * drift, 1.0));
        }
        let view = View::of(&results, "tax");
        assert_eq!(view.values("pgbouncer", &point, metric::TAX), vec![10.0, 15.0]);
        let ratio = view.ratio("ours-off", "pgbouncer", &point, metric::TAX).unwrap();
        assert!((ratio.median - 0.8).abs() < 1e-9 && ratio.half_width() < 1e-9);
    }

    #[test]
    fn the_tax_is_taken_from_few_direct_connections_at_a_fixed_rate() {
        let point = Point::default().with("clients", 1000);
        let mut results = Results::default();
        for (system, cpu) in [("direct", 90.0), ("direct-few", 60.0), ("pgbouncer", 106.0)] {
            for experiment in ["many", "tax"] {
                let one = sample(system, 0, &point, cpu, 1.0);
                results.samples.push(Sample { experiment: experiment.into(), ..one });
            }
        }
        let tax = |experiment| View::of(&results, experiment).values("pgbouncer", &point, metric::TAX);
        assert_eq!(tax("many"), vec![46.0]);
        // Not where it is only shown beside the others.
        assert_eq!(tax("tax"), vec![16.0]);
    }

    #[test]
    fn what_a_mirror_adds_is_above_the_same_system_without_it() {
        let point = Point::default();
        let mut results = Results::default();
        results.meta.without.insert("pgpool-mirror".into(), "pgpool".into());
        results.samples.push(sample("pgpool", 0, &point, 30.0, 1.0));
        results.samples.push(sample("pgpool-mirror", 0, &point, 130.0, 1.0));
        let view = View::of(&results, "tax");
        assert_eq!(view.values("pgpool-mirror", &point, metric::ADDED_CPU), vec![100.0]);
        assert!(view.values("pgpool", &point, metric::ADDED_CPU).is_empty());
    }

    #[test]
    fn prepared_is_compared_with_extended_where_the_other_has_no_named_statements() {
        let extended = Point::default().with("clients", 8).with("mode", "extended");
        let prepared = Point::default().with("clients", 8).with("mode", "prepared");
        let mut results = Results::default();
        for point in [&extended, &prepared] {
            results.samples.push(sample("direct", 0, point, 20.0, 1.0));
            results.samples.push(sample("ours-off", 0, point, 25.0, 1.0));
        }
        results.samples.push(sample("pgbouncer", 0, &extended, 30.0, 1.0));
        let view = View::of(&results, "tax");
        assert_eq!(view.ratios("ours-off", "pgbouncer", &prepared, metric::TAX), vec![0.5]);
    }

    #[test]
    fn a_failed_sample_and_a_round_without_direct_do_not_count() {
        let point = Point::default().with("clients", 1);
        let mut results = Results::default();
        results.samples.push(sample("pgbouncer", 0, &point, 30.0, 1.0));
        let mut failed = sample("direct", 0, &point, 1.0, 1.0);
        failed.error = Some("broken".into());
        results.samples.push(failed);
        let view = View::of(&results, "tax");
        assert!(view.values("pgbouncer", &point, metric::TAX).is_empty());
        assert_eq!(view.ratio("pgbouncer", "pgbouncer", &point, metric::TAX), None);
    }
}
