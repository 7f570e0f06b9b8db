// SPDX-License-Identifier: Apache-2.0
//! How many transactions a lane carried: a row about a lane that user space served says nothing about the lane.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

use crate::sample::metric;
use crate::systems::{Instance, Place};

/// Share of transactions that a lane must carry for a row to count as one about that lane.
pub const SHARE_MIN: f64 = 0.95;

/// Transactions by lane since the pooler began, from `SHOW KERNEL`; `user` are those that user space served.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lanes(BTreeMap<String, u64>);

/// Asks the console of `instance`.
///
/// # Errors
/// When it does not answer or the answer has no transactions in it.
pub fn read(instance: &Instance, place: Place<'_>) -> Result<Lanes> {
    let text = instance.ask(place, "pgbouncer", "SHOW KERNEL")?;
    parse(&text).context("SHOW KERNEL has no transactions by lane: are the lanes off?")
}

/// Reads the rows `lane|NAME|xacts|COUNT|count`.
fn parse(text: &str) -> Option<Lanes> {
    let rows = text.lines().filter_map(|line| {
        let words: Vec<&str> = line.split('|').collect();
        match words[..] {
            ["lane", name, "xacts", count, _] => Some((name.to_owned(), count.parse().ok()?)),
            _ => None,
        }
    });
    let lanes = Lanes(rows.collect());
    (lanes.0.len() > 1).then_some(lanes)
}

impl Lanes {
    /// True when that lane is among them, though it may have carried nothing.
    #[must_use]
    pub fn has(&self, lane: &str) -> bool {
        self.0.contains_key(lane)
    }

    /// The share of each lane in what ended since `before`, 0 to 1, by metric: that of `lane` also as the one that decides
    /// whether a row counts. Empty when nothing ended.
    #[must_use]
    pub fn shares_since(&self, before: &Self, lane: &str) -> BTreeMap<String, f64> {
        let count = |name: &str| {
            let at = |lanes: &Self| lanes.0.get(name).copied().unwrap_or(0);
            at(self).saturating_sub(at(before)) as f64
        };
        let all: f64 = self.0.keys().map(|name| count(name)).sum();
        if all == 0.0 {
            return BTreeMap::new();
        }
        let own = (metric::LANE_SHARE.to_owned(), count(lane) / all);
        let each = self.0.keys().map(|name| (metric::share(name), count(name) / all));
        each.chain([own]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_of_what_ended_between_two_answers() {
        let text = |d: u64, user: u64| {
            format!(
                "lane|D|on|1|count\nlane|D|xacts|{d}|count\nlane|user|xacts|{user}|count\nexit|off|count|3|count\n"
            )
        };
        let (before, after) = (parse(&text(100, 50)).unwrap(), parse(&text(190, 60)).unwrap());
        let shares = after.shares_since(&before, "D");
        assert_eq!((shares["share_d"], shares["share_user"], shares[metric::LANE_SHARE]), (0.9, 0.1, 0.9));
        assert_eq!(after.shares_since(&before, "A")[metric::LANE_SHARE], 0.0);
        assert!(before.shares_since(&before, "D").is_empty());
        assert_eq!(parse("lane|off|kernel_path = off|0|count\n"), None);
    }
}
