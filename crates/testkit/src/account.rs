// SPDX-License-Identifier: Apache-2.0
//! Where a pooler's transactions were: in which kernel lane, or in user space and why.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use crate::{Pooler, Result};

/// The reasons that are documented, in its tables.
const MANUAL: &str = include_str!("../../../docs/lanes.md");

/// Reasons that are documented as mistakes.
const MISTAKES: [&str; 2] = ["unexplained", "failed"];

/// Reasons that are the pooler's own doing, and no property of what clients, servers, operators or tests do: a lane could have carried these.
const MISSES: [&str; 9] = [
    "unread",
    "unwritten",
    "behind_lane",
    "server_unread",
    "busy",
    "tap",
    "link_race",
    "behind",
    "idle_link",
];

/// Lanes must carry so much of what they can, as soon as there are enough transactions to tell.
const SHARE_MIN: f64 = 0.95;
const TELLING_MIN: u64 = 200;

/// Counts of three commands belong together only when nothing ends between them. Under a load that does not pause, bounds must do after this.
const SETTLE_LIMIT: Duration = Duration::from_secs(10);

/// The transactions of a pooler with kernel lanes, since its start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Account {
    /// By name of the lane.
    pub lanes: BTreeMap<String, u64>,
    /// In user space, by reason.
    pub user: BTreeMap<String, u64>,
    /// What SHOW KERNEL gives as the sum of `user`.
    pub user_total: u64,
    /// All, by SHOW TOTALS, which counts by another way.
    pub total: u64,
    /// How many of `lanes` and `user` may have ended after `total` was read.
    pub later: u64,
    /// Pools have gone: SHOW TOTALS adds up those that are there, as PgBouncer's does, so `total` may lack theirs.
    pub forgets: bool,
}

impl Account {
    /// Asks a running pooler. `None` if it has no lanes.
    ///
    /// # Errors
    /// The console cannot be reached.
    pub fn of(pooler: &(impl Pooler + ?Sized)) -> Result<Option<Self>> {
        let deadline = Instant::now() + SETTLE_LIMIT;
        loop {
            let before = pooler.console("SHOW KERNEL")?.rows();
            let totals = pooler.console("SHOW TOTALS")?.rows();
            let after = pooler.console("SHOW KERNEL")?.rows();
            let (earlier, account) = (Self::from_rows(&before, &totals), Self::from_rows(&after, &totals));
            if earlier == account {
                return Ok(account);
            }
            if Instant::now() > deadline {
                let ended = |account: &Self| account.carried() + account.user_total;
                let then = earlier.as_ref().map_or(0, ended);
                return Ok(account.map(|now| Self { later: ended(&now).saturating_sub(then), ..now }));
            }
        }
    }

    fn from_rows(kernel: &[Vec<Option<String>>], totals: &[Vec<Option<String>>]) -> Option<Self> {
        let mut account = Self::default();
        for row in kernel {
            let [Some(kind), Some(name), Some(item), Some(value), ..] = row.as_slice() else { continue };
            let count = value.parse().unwrap_or(0);
            match (kind.as_str(), name.as_str(), item.as_str()) {
                ("lane", "user", "xacts") => account.user_total = count,
                ("lane", lane, "xacts") => drop(account.lanes.insert(lane.to_owned(), count)),
                ("user", why, "xacts") => drop(account.user.insert(why.to_owned(), count)),
                _ => {}
            }
        }
        let total = totals.iter().find(|row| row.first() == Some(&Some("total_xact_count".to_owned())));
        account.total = total.and_then(|row| row.get(1)?.as_deref()?.parse().ok()).unwrap_or(0);
        (!account.lanes.is_empty()).then_some(account)
    }

    /// Transactions in lanes.
    pub fn carried(&self) -> u64 {
        self.lanes.values().sum()
    }

    /// Their share of those that a lane could carry, from 0 to 1; 1 if there were none.
    pub fn share(&self) -> f64 {
        let could = self.carried() + self.missed();
        if could == 0 { 1.0 } else { self.carried() as f64 / could as f64 }
    }

    /// Transactions that a lane could have carried and did not.
    fn missed(&self) -> u64 {
        MISSES.iter().filter_map(|why| self.user.get(*why)).sum()
    }

    /// What is wrong with it: a transaction in user space for which there is no documented reason, numbers that do not add up, a share below
    /// 95 %. `flips`: clients were taken from their lanes at random, so that the share says nothing.
    pub fn mistakes(&self, flips: bool) -> Vec<String> {
        let mut mistakes = Vec::new();
        if !flips && self.carried() + self.missed() >= TELLING_MIN && self.share() < SHARE_MIN {
            mistakes.push(format!("lanes carried only {:.1} % of what they could", 100.0 * self.share()));
        }
        for (why, count) in &self.user {
            if MISTAKES.contains(&why.as_str()) {
                mistakes.push(format!("{count} transactions in user space are {why}"));
            } else if !MANUAL.contains(&format!("\n| {why} |")) {
                mistakes.push(format!("docs/lanes.md lacks {why}, the reason of {count} transactions"));
            }
        }
        let explained: u64 = self.user.values().sum();
        if explained != self.user_total {
            mistakes.push(format!(
                "{} transactions in user space, but {explained} with a reason",
                self.user_total
            ));
        }
        let ended = self.carried() + explained;
        let least = if self.forgets { 0 } else { ended.saturating_sub(self.later) };
        if !(least..=ended).contains(&self.total) {
            mistakes.push(format!(
                "{} transactions, but {} in lanes and {explained} in user space",
                self.total,
                self.carried()
            ));
        }
        mistakes
    }
}

impl fmt::Display for Account {
    /// `account: 120 transactions, D 100, A 0, user 20 (no_server 17, unread 3), lanes carried 97.1 % of what they could`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "account: {} transactions", self.total)?;
        for (lane, count) in &self.lanes {
            write!(f, ", {lane} {count}")?;
        }
        let reasons: Vec<String> = self.user.iter().map(|(why, count)| format!("{why} {count}")).collect();
        write!(f, ", user {}", self.user_total)?;
        if !reasons.is_empty() {
            write!(f, " ({})", reasons.join(", "))?;
        }
        write!(f, ", lanes carried {:.1} % of what they could", 100.0 * self.share())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(lines: &[&str]) -> Vec<Vec<Option<String>>> {
        lines.iter().map(|line| line.split('|').map(|cell| Some(cell.to_owned())).collect()).collect()
    }

    fn account(user: &[&str], total: u64) -> Account {
        let mut kernel = rows(&["lane|D|on|1|count", "lane|D|xacts|7|count", "lane|user|xacts|3|count"]);
        kernel.extend(rows(user));
        Account::from_rows(&kernel, &rows(&[&format!("total_xact_count|{total}")])).expect("lanes")
    }

    #[test]
    fn an_account_that_balances_has_no_mistakes() {
        let account = account(&["user|no_server|xacts|2|count", "user|client_tls|xacts|1|count"], 10);
        assert_eq!(account.mistakes(false), Vec::<String>::new());
        let text = "account: 10 transactions, D 7, user 3 (client_tls 1, no_server 2), lanes carried 100.0 % of what they could";
        assert_eq!(account.to_string(), text);
    }

    #[test]
    fn what_nobody_explained_is_found() {
        for (user, total, mistake) in [
            ("user|unexplained|xacts|3|count", 10, "3 transactions in user space are unexplained"),
            ("user|failed|xacts|3|count", 10, "3 transactions in user space are failed"),
            ("user|moonlight|xacts|3|count", 10, "docs/lanes.md lacks moonlight"),
            ("user|no_server|xacts|3|count", 11, "11 transactions, but 7 in lanes and 3 in user space"),
        ] {
            let mistakes = account(&[user], total).mistakes(false);
            assert!(mistakes.len() == 1 && mistakes[0].contains(mistake), "{mistakes:?}");
        }
        let mistakes = account(&["user|no_server|xacts|2|count"], 9).mistakes(false);
        assert_eq!(mistakes, ["3 transactions in user space, but 2 with a reason"]);
    }

    #[test]
    fn under_a_load_the_total_lies_between_two_readings() {
        let of =
            |total| Account { later: 4, ..account(&["user|no_server|xacts|3|count"], total) }.mistakes(false);
        assert_eq!((of(6), of(10)), (Vec::new(), Vec::new()));
        assert_eq!(of(5), ["5 transactions, but 7 in lanes and 3 in user space"]);
        assert_eq!(of(11), ["11 transactions, but 7 in lanes and 3 in user space"]);
    }

    #[test]
    fn transactions_of_pools_that_have_gone_are_not_in_the_total() {
        let of = |total| {
            Account { forgets: true, ..account(&["user|no_server|xacts|3|count"], total) }.mistakes(false)
        };
        assert_eq!(of(4), Vec::<String>::new());
        assert_eq!(of(11), ["11 transactions, but 7 in lanes and 3 in user space"]);
    }

    #[test]
    fn what_lanes_could_have_carried_counts_against_them() {
        let of = |lane: u64, missed: u64| Account {
            lanes: [("D".to_owned(), lane)].into(),
            user: [("unread".to_owned(), missed), ("named_statement".to_owned(), 1000)].into(),
            user_total: missed + 1000,
            total: lane + missed + 1000,
            ..Account::default()
        };
        assert_eq!(of(190, 10).mistakes(false), Vec::<String>::new());
        assert_eq!(of(189, 11).mistakes(false), ["lanes carried only 94.5 % of what they could"]);
        assert_eq!(of(189, 11).mistakes(true), Vec::<String>::new());
        // Too few to tell.
        assert_eq!(of(1, 8).mistakes(false), Vec::<String>::new());
    }

    #[test]
    fn a_pooler_without_lanes_has_no_account() {
        let kernel = rows(&["lane|off|kernel_path = off|0|count"]);
        assert_eq!(Account::from_rows(&kernel, &rows(&["total_xact_count|4"])), None);
    }
}
