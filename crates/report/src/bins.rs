// SPDX-License-Identifier: Apache-2.0
//! What happened when: equal intervals over the time of a trace, of unknown length, in bounded memory.

use hdrhistogram::Histogram;

/// More intervals than this are merged in pairs.
const BINS_MAX: usize = 600;
/// The first width: 10 ms, in nanoseconds.
const WIDTH_MIN_NS: u64 = 10_000_000;
/// Intervals that a plot should at least have to be one; wider ones are no use.
pub(crate) const BINS_SHOWN: usize = 300;

/// One interval.
#[derive(Clone, Debug)]
pub(crate) struct Bin {
    pub(crate) statements: u64,
    pub(crate) errors: u64,
    pub(crate) lost_bytes: u64,
    /// Net change of open sessions, and of statements under way.
    pub(crate) sessions: i64,
    pub(crate) latency: Histogram<u32>,
}

/// The intervals.
#[derive(Clone, Debug)]
pub(crate) struct Bins {
    pub(crate) width_ns: u64,
    pub(crate) first_ns: Option<u64>,
    pub(crate) bins: Vec<Bin>,
}

impl Bin {
    fn new() -> Self {
        Self { statements: 0, errors: 0, lost_bytes: 0, sessions: 0, latency: histogram(2) }
    }

    fn merge(&mut self, other: &Self) {
        self.statements += other.statements;
        self.errors += other.errors;
        self.lost_bytes += other.lost_bytes;
        self.sessions += other.sessions;
        // Both grow by themselves; adding cannot fail.
        let _ = self.latency.add(&other.latency);
    }
}

/// A histogram of nanoseconds with this many significant digits, which grows with its values.
pub(crate) fn histogram<C: hdrhistogram::Counter>(digits: u8) -> Histogram<C> {
    Histogram::new(digits).unwrap_or_else(|_| unreachable!("1 to 5 digits are valid"))
}

/// Counts a value; histograms of [`histogram`] grow for it.
pub(crate) fn count<C: hdrhistogram::Counter>(histogram: &mut Histogram<C>, value: u64) {
    if histogram.record(value).is_err() {
        histogram.saturating_record(value);
    }
}

impl Bins {
    pub(crate) const fn new() -> Self {
        Self { width_ns: WIDTH_MIN_NS, first_ns: None, bins: Vec::new() }
    }

    /// The interval of a time. What is before the first goes into the first.
    pub(crate) fn at(&mut self, time_ns: u64) -> &mut Bin {
        let first = *self.first_ns.get_or_insert(time_ns);
        let after = time_ns.saturating_sub(first);
        while after / self.width_ns >= BINS_MAX as u64 {
            self.widen();
        }
        let index = (after / self.width_ns) as usize; // below BINS_MAX
        if index >= self.bins.len() {
            self.bins.resize_with(index + 1, Bin::new);
        }
        &mut self.bins[index]
    }

    fn widen(&mut self) {
        let mut merged = Vec::with_capacity(self.bins.len().div_ceil(2));
        for pair in self.bins.chunks(2) {
            let mut bin = pair[0].clone();
            if let [_, second] = pair {
                bin.merge(second);
            }
            merged.push(bin);
        }
        self.bins = merged;
        self.width_ns *= 2;
    }

    /// For showing: wider intervals, until there are few.
    pub(crate) fn shown(&self) -> Self {
        let mut shown = self.clone();
        while shown.bins.len() > BINS_SHOWN {
            shown.widen();
        }
        shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_lost_when_intervals_grow() {
        let mut bins = Bins::new();
        for at in 0..10_000u64 {
            let bin = bins.at(1_000 + at * 7_000_000);
            bin.statements += 1;
            count(&mut bin.latency, at);
        }
        assert!(bins.bins.len() <= BINS_MAX && bins.width_ns > WIDTH_MIN_NS);
        let shown = bins.shown();
        assert!(shown.bins.len() <= BINS_SHOWN);
        for bins in [&bins, &shown] {
            assert_eq!(bins.bins.iter().map(|bin| bin.statements).sum::<u64>(), 10_000);
            assert_eq!(bins.bins.iter().map(|bin| bin.latency.len()).sum::<u64>(), 10_000);
        }
        // Equal load stays equal but for the last interval.
        let (_, whole) = shown.bins.split_last().unwrap();
        let (min, max) =
            (whole.iter().map(|bin| bin.statements).min(), whole.iter().map(|bin| bin.statements).max());
        assert!(max.unwrap() - min.unwrap() <= 1);
    }

    #[test]
    fn a_far_time_costs_no_memory() {
        let mut bins = Bins::new();
        bins.at(0).statements = 1;
        bins.at(u64::MAX).statements = 1;
        assert!(bins.bins.len() <= BINS_MAX);
    }
}
