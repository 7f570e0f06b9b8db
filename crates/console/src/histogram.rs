// SPDX-License-Identifier: Apache-2.0
//! Latency histograms with fixed log-linear buckets, in microseconds.
//!
//! Each power of two is cut into four equal steps, so a bucket is at most a quarter of its lower bound wide:
//! a quantile is off by less than 25 %, in the middle by 12.5 %. Memory is constant (1.1 KiB), a record is one
//! shift and one increment, two histograms are merged by adding them.

/// Steps in each power of two.
const STEPS: usize = 4;
const STEP_BITS: u32 = STEPS.trailing_zeros();
/// Values from 2^36 us (19 hours) on share the last bucket.
const VALUE_BITS: u32 = 36;
/// Values below [`STEPS`] have a bucket each, then come [`STEPS`] for each power of two, then the last.
const BUCKETS: usize = STEPS + STEPS * (VALUE_BITS - STEP_BITS) as usize + 1;

/// Counts of durations in microseconds.
#[derive(Clone, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; BUCKETS],
    sum_us: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: [0; BUCKETS], sum_us: 0 }
    }
}

impl std::fmt::Debug for Histogram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Histogram").field("count", &self.count()).field("sum_us", &self.sum_us).finish()
    }
}

/// Bucket of a value.
const fn bucket(value_us: u64) -> usize {
    if value_us < STEPS as u64 {
        return value_us as usize;
    }
    let power = value_us.ilog2();
    if power >= VALUE_BITS {
        return BUCKETS - 1;
    }
    let step = (value_us >> (power - STEP_BITS)) as usize - STEPS;
    STEPS + (power - STEP_BITS) as usize * STEPS + step
}

/// Smallest value of a bucket. That of the one after the last finite bucket is 2^36.
const fn lower_bound(bucket: usize) -> u64 {
    if bucket < STEPS {
        return bucket as u64;
    }
    let power = (bucket - STEPS) / STEPS;
    let step = (bucket - STEPS) % STEPS;
    ((STEPS + step) as u64) << power
}

impl Histogram {
    /// Counts one duration.
    #[inline]
    pub fn record(&mut self, value_us: u64) {
        self.counts[bucket(value_us)] += 1;
        self.sum_us = self.sum_us.saturating_add(value_us);
    }

    /// Adds the counts of another thread or pool.
    pub fn merge(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.sum_us = self.sum_us.saturating_add(other.sum_us);
    }

    /// Number of durations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Sum of all durations, in microseconds, saturating.
    #[must_use]
    pub const fn sum_us(&self) -> u64 {
        self.sum_us
    }

    /// The duration that the share `quantile` (0 to 1, cut to it) of all stays at or below, in microseconds; the
    /// place inside a bucket is interpolated. `None` when nothing was counted. Durations of 2^36 us and more are
    /// reported as 2^36.
    #[must_use]
    pub fn quantile(&self, quantile: f64) -> Option<u64> {
        let count = self.count();
        if count == 0 {
            return None;
        }
        // A NaN becomes 0 by the cast, the smallest duration.
        let rank = ((quantile.clamp(0.0, 1.0) * count as f64).ceil() as u64).clamp(1, count);
        let mut below = 0;
        for (bucket, &in_bucket) in self.counts.iter().enumerate() {
            if below + in_bucket < rank {
                below += in_bucket;
                continue;
            }
            let lower = lower_bound(bucket);
            if bucket == BUCKETS - 1 {
                return Some(lower);
            }
            let last_value = lower_bound(bucket + 1) - 1;
            let share = (rank - below) as f64 / in_bucket as f64;
            return Some(lower + ((last_value - lower) as f64 * share) as u64);
        }
        None
    }

    /// Buckets for OpenMetrics: upper bound in seconds and durations at or below it that are above the bound
    /// before, the last bound being infinite. Bounds are powers of two microseconds from 16 us to 67 s.
    #[must_use]
    pub fn export(&self) -> Vec<(f64, u64)> {
        let mut buckets = Vec::with_capacity(EXPORT_POWERS.count() + 1);
        let mut from = 0;
        for power in EXPORT_POWERS {
            // A value is a whole number of microseconds, cut off: what is below the bound was at or below it.
            let to = bucket(1 << power);
            buckets.push(((1_u64 << power) as f64 / 1e6, self.counts[from..to].iter().sum()));
            from = to;
        }
        buckets.push((f64::INFINITY, self.counts[from..].iter().sum()));
        buckets
    }
}

/// Powers of two that [`Histogram::export`] has bounds at: 16 us, where a round trip through the kernel begins,
/// to 67 s, in steps that keep a pool at 24 series.
const EXPORT_POWERS: std::ops::Range<u32> = 4..27;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn buckets_follow_each_other_without_gap() {
        for index in 0..BUCKETS {
            assert_eq!(bucket(lower_bound(index)), index);
            if index + 1 < BUCKETS {
                assert_eq!(bucket(lower_bound(index + 1) - 1), index);
            }
        }
        assert_eq!(lower_bound(BUCKETS - 1), 1 << VALUE_BITS);
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn the_size_is_fixed_and_small() {
        assert_eq!(size_of::<Histogram>(), 1136);
    }

    #[test]
    fn an_empty_histogram_has_no_quantile() {
        assert_eq!(Histogram::default().quantile(0.5), None);
        assert_eq!(Histogram::default().export().iter().map(|bucket| bucket.1).sum::<u64>(), 0);
    }

    #[test]
    fn quantiles_of_one_value_and_of_extremes() {
        let mut histogram = Histogram::default();
        histogram.record(u64::MAX);
        assert_eq!(histogram.quantile(0.0), Some(1 << VALUE_BITS));
        histogram.record(u64::MAX);
        assert_eq!(histogram.sum_us(), u64::MAX);
        let mut histogram = Histogram::default();
        for value in [0, 1, 2, 3] {
            histogram.record(value);
        }
        assert_eq!(
            [0.25, 0.5, 0.75, 1.0].map(|q| histogram.quantile(q)),
            [Some(0), Some(1), Some(2), Some(3)]
        );
        assert_eq!([-1.0, 7.0, f64::NAN].map(|q| histogram.quantile(q)), [Some(0), Some(3), Some(0)]);
    }

    #[test]
    fn exported_bounds_are_exact_edges() {
        let mut histogram = Histogram::default();
        for value in [0, 15, 16, 31, 32, 1 << 26, (1 << 26) - 1] {
            histogram.record(value);
        }
        let export = histogram.export();
        assert_eq!(export.len(), 24);
        assert_eq!(&export[..3], &[(16e-6, 2), (32e-6, 2), (64e-6, 1)]);
        assert_eq!(export[22], (67.108864, 1));
        assert_eq!(export[23], (f64::INFINITY, 1));
    }

    proptest! {
        #[test]
        fn quantiles_are_within_a_quarter(mut values in prop::collection::vec(0_u64..1 << 34, 1..300), q in 0.0..=1.0_f64) {
            let mut histogram = Histogram::default();
            values.iter().for_each(|&value| histogram.record(value));
            values.sort_unstable();
            let rank = ((q * values.len() as f64).ceil() as usize).clamp(1, values.len());
            let exact = values[rank - 1];
            let near = histogram.quantile(q).unwrap();
            prop_assert!(near.abs_diff(exact) * 4 <= exact, "{near} for {exact}");
        }

        #[test]
        fn merging_is_recording_both(left in prop::collection::vec(any::<u64>(), 0..50), right in prop::collection::vec(any::<u64>(), 0..50)) {
            let (mut a, mut b, mut both) = (Histogram::default(), Histogram::default(), Histogram::default());
            left.iter().for_each(|&v| { a.record(v); both.record(v) });
            right.iter().for_each(|&v| { b.record(v); both.record(v) });
            a.merge(&b);
            prop_assert_eq!(a.count(), (left.len() + right.len()) as u64);
            prop_assert_eq!(a, both);
        }
    }
}
