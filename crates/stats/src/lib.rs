// SPDX-License-Identifier: Apache-2.0
//! Medians, quantiles and bootstrap intervals, as the benchmarks and the replayer report them.
//!
//! Values come one per round of a benchmark, or one per statement of a replay. No IO.
#![forbid(unsafe_code)]

use rand::{Rng, SeedableRng, rngs::StdRng};
use serde::{Deserialize, Serialize};

/// Resamples of one bootstrap; the interval's ends then move by well under a percent between seeds.
const RESAMPLES: usize = 5_000;

/// Seed of every bootstrap, so that the same samples give the same report.
const SEED: u64 = 0x0075_6e64_6572_7061;

/// A median with its spread over rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Median over rounds.
    pub median: f64,
    /// 25th percentile over rounds.
    pub low: f64,
    /// 75th percentile over rounds.
    pub high: f64,
    /// How many rounds have a value.
    pub rounds: usize,
}

impl Summary {
    /// Summarises values of one quantity, one per round; `None` without any value.
    #[must_use]
    pub fn of(values: &[f64]) -> Option<Self> {
        let sorted = sorted(values);
        Some(Self {
            median: quantile_sorted(&sorted, 0.5)?,
            low: quantile_sorted(&sorted, 0.25)?,
            high: quantile_sorted(&sorted, 0.75)?,
            rounds: sorted.len(),
        })
    }
}

/// A median with a 90 % bootstrap interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// Median over rounds.
    pub median: f64,
    /// 5 % point of the bootstrapped median.
    pub low: f64,
    /// 95 % point of the bootstrapped median.
    pub high: f64,
    /// Rounds that went in.
    pub rounds: usize,
}

impl Estimate {
    /// Bootstraps the median of per-round values over rounds; `None` without any value. An infinite value is one that was
    /// measured and is beyond every bound.
    #[must_use]
    pub fn of(values: &[f64]) -> Option<Self> {
        let sorted = sorted(values);
        let median = quantile_sorted(&sorted, 0.5)?;
        let mut rng = StdRng::seed_from_u64(SEED);
        let mut draw = vec![0.0; sorted.len()];
        let mut medians: Vec<f64> = (0..RESAMPLES)
            .map(|_| {
                for slot in &mut draw {
                    *slot = sorted[rng.random_range(0..sorted.len())];
                }
                draw.sort_by(f64::total_cmp);
                quantile_sorted(&draw, 0.5).unwrap_or(median)
            })
            .collect();
        medians.sort_by(f64::total_cmp);
        Some(Self {
            median,
            low: quantile_sorted(&medians, 0.05)?,
            high: quantile_sorted(&medians, 0.95)?,
            rounds: sorted.len(),
        })
    }

    /// Half the width of the interval.
    #[must_use]
    pub fn half_width(&self) -> f64 {
        (self.high - self.low) / 2.0
    }
}

/// The `q` quantile (0 to 1) of ascending values, interpolated between neighbours.
#[must_use]
pub fn quantile_sorted<T: Copy + Into<f64>>(sorted: &[T], q: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    let at = q.clamp(0.0, 1.0) * last as f64;
    let below = at.floor() as usize;
    let above = (below + 1).min(last);
    let part = at - below as f64;
    let (below, above): (f64, f64) = (sorted[below].into(), sorted[above].into());
    // No arithmetic between equals: infinity minus infinity is not a number.
    if part == 0.0 || below == above {
        return Some(below);
    }
    Some(below * (1.0 - part) + above * part)
}

fn sorted(values: &[f64]) -> Vec<f64> {
    let mut sorted: Vec<f64> = values.iter().copied().filter(|value| !value.is_nan()).collect();
    sorted.sort_by(f64::total_cmp);
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_interpolate() {
        let values = [1.0, 2.0, 3.0, 4.0];
        assert_eq!(quantile_sorted(&values, 0.0), Some(1.0));
        assert_eq!(quantile_sorted(&values, 0.5), Some(2.5));
        assert_eq!(quantile_sorted(&values, 1.0), Some(4.0));
        assert_eq!(quantile_sorted::<f64>(&[], 0.5), None);
    }

    #[test]
    fn the_interval_holds_the_median_and_shrinks_with_rounds() {
        let mut rng = StdRng::seed_from_u64(1);
        let noisy = |rounds: usize, rng: &mut StdRng| -> Vec<f64> {
            (0..rounds).map(|_| 1.0 + rng.random_range(-0.1..0.1)).collect()
        };
        let few = Estimate::of(&noisy(10, &mut rng)).unwrap();
        let many = Estimate::of(&noisy(200, &mut rng)).unwrap();
        assert!(few.low <= few.median && few.median <= few.high);
        assert!(many.half_width() < few.half_width());
    }

    /// How often of 200 times the interval of `rounds` values with a long tail to one side holds the true median.
    fn coverage(rounds: usize) -> usize {
        let mut rng = StdRng::seed_from_u64(2);
        let covered = |_: &u32| {
            let values: Vec<f64> = (0..rounds).map(|_| -rng.random_range(f64::EPSILON..1.0).ln()).collect();
            let estimate = Estimate::of(&values).unwrap();
            let truth = std::f64::consts::LN_2;
            estimate.low <= truth && truth <= estimate.high
        };
        (0..200).filter(covered).count()
    }

    #[test]
    fn the_interval_covers_the_truth_about_nine_times_in_ten_from_ten_rounds_on() {
        for rounds in [10, 30] {
            let covered = coverage(rounds);
            assert!((166..=195).contains(&covered), "{covered} of 200 with {rounds} rounds");
        }
    }

    #[test]
    fn what_is_no_number_is_left_out_and_what_is_beyond_every_bound_is_not() {
        let estimate = Estimate::of(&[1.0, f64::NAN, 1.0, f64::INFINITY, 1.0]).unwrap();
        assert_eq!((estimate.rounds, estimate.median, estimate.low), (4, 1.0, 1.0));
        let hopeless = Estimate::of(&[f64::INFINITY; 4]).unwrap();
        assert!(hopeless.median.is_infinite() && hopeless.half_width().is_nan());
        assert_eq!(Estimate::of(&[f64::NAN]), None);
        assert_eq!(Summary::of(&[]), None);
    }
}
