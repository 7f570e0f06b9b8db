// SPDX-License-Identifier: Apache-2.0
//! Statistics: the twelve counters of a pool, their averages over `stats_period`, and the line of `log_stats`.
//!
//! A worker counts for itself; the console merges the workers' copies. Counters only grow. The average is made
//! as PgBouncer makes it: what was added since the snapshot before the last one, divided by the time since then,
//! so it covers between one and two periods; times are divided by the number of what they are times of.

use std::fmt::Write as _;

use crate::histogram::Histogram;
use crate::rows::{StatsRow, TotalsRow};
use crate::show::Show;
use crate::table::Table;
use crate::time::Timestamp;

/// Counters of a pool since start, or their sum over pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolStats {
    /// Times a server was given to a client.
    pub server_assignment_count: u64,
    /// Transactions.
    pub xact_count: u64,
    /// Queries.
    pub query_count: u64,
    /// Bytes received from clients.
    pub received: u64,
    /// Bytes sent to clients.
    pub sent: u64,
    /// Microseconds in transactions, idle ones included.
    pub xact_time: u64,
    /// Microseconds in queries.
    pub query_time: u64,
    /// Microseconds clients waited for a server.
    pub wait_time: u64,
    /// Prepared statements created by clients.
    pub client_parse_count: u64,
    /// Prepared statements created on servers.
    pub server_parse_count: u64,
    /// Bind messages for prepared statements.
    pub bind_count: u64,
    /// Successful client logins.
    pub client_login_count: u64,
}

/// Number of counters.
pub const COUNTERS: usize = 12;

/// Names in SHOW TOTALS, after `total_` and `avg_`, in the order of [`PoolStats::values`]. They are the names of
/// PgBouncer's structure and differ from the columns of SHOW STATS.
pub const TOTALS_NAMES: [&str; COUNTERS] = [
    "server_assignment_count",
    "xact_count",
    "query_count",
    "client_bytes",
    "server_bytes",
    "xact_time",
    "query_time",
    "wait_time",
    "ps_client_parse_count",
    "ps_server_parse_count",
    "ps_bind_count",
    "client_login_count",
];

const US_PER_S: u64 = 1_000_000;

impl PoolStats {
    /// The counters in the order of the columns of SHOW STATS.
    #[must_use]
    pub const fn values(&self) -> [u64; COUNTERS] {
        [
            self.server_assignment_count,
            self.xact_count,
            self.query_count,
            self.received,
            self.sent,
            self.xact_time,
            self.query_time,
            self.wait_time,
            self.client_parse_count,
            self.server_parse_count,
            self.bind_count,
            self.client_login_count,
        ]
    }

    const fn from_values(values: [u64; COUNTERS]) -> Self {
        let [
            server_assignment_count,
            xact_count,
            query_count,
            received,
            sent,
            xact_time,
            query_time,
            wait_time,
            client_parse_count,
            server_parse_count,
            bind_count,
            client_login_count,
        ] = values;
        Self {
            server_assignment_count,
            xact_count,
            query_count,
            received,
            sent,
            xact_time,
            query_time,
            wait_time,
            client_parse_count,
            server_parse_count,
            bind_count,
            client_login_count,
        }
    }

    fn zip(&self, other: &Self, combine: impl Fn(u64, u64) -> u64) -> Self {
        let (left, right) = (self.values(), other.values());
        Self::from_values(std::array::from_fn(|i| combine(left[i], right[i])))
    }

    /// Adds the counters of another thread or pool.
    pub fn merge(&mut self, other: &Self) {
        *self = self.zip(other, u64::saturating_add);
    }

    /// Averages over what was added since `older`, `elapsed_us` microseconds ago. Zero when no time has passed;
    /// a counter that went back, because a pool was dropped in between, counts as not having moved.
    #[must_use]
    pub fn averages_since(&self, older: &Self, elapsed_us: u64) -> Averages {
        if elapsed_us == 0 {
            return Averages::default();
        }
        let delta = self.zip(older, u64::saturating_sub);
        // In 128 bits: 18 TB in a period would overflow 64.
        let per_second = |count: u64| {
            u64::try_from(u128::from(count) * u128::from(US_PER_S) / u128::from(elapsed_us))
                .unwrap_or(u64::MAX)
        };
        let each = |time: u64, count: u64| time.checked_div(count).unwrap_or(0);
        let rates = Self::from_values(delta.values().map(per_second));
        Averages(Self {
            xact_time: each(delta.xact_time, delta.xact_count),
            query_time: each(delta.query_time, delta.query_count),
            wait_time: each(delta.wait_time, delta.server_assignment_count),
            ..rates
        })
    }
}

/// Averages: counts and bytes per second; `xact_time`, `query_time` and `wait_time` in microseconds for each
/// transaction, query and assignment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Averages(pub PoolStats);

impl Averages {
    /// The line of `log_stats`, and with `us` as `μs` the STATUS of systemd.
    #[must_use]
    pub fn log_line(&self) -> String {
        self.line("us")
    }

    /// STATUS for `sd_notify`.
    #[must_use]
    pub fn status_line(&self) -> String {
        format!("STATUS={}", self.line("μs"))
    }

    fn line(&self, us: &str) -> String {
        let PoolStats { xact_count, query_count, received, sent, xact_time, query_time, wait_time, .. } =
            self.0;
        let PoolStats { client_parse_count, server_parse_count, bind_count, client_login_count, .. } = self.0;
        let mut line = format!("stats: {xact_count} xacts/s, {query_count} queries/s");
        for (value, name) in [
            (client_parse_count, "client parses"),
            (server_parse_count, "server parses"),
            (bind_count, "binds"),
            (client_login_count, "client logins"),
        ] {
            write!(line, ", {value} {name}/s").expect("writing to a String");
        }
        write!(
            line,
            ", in {received} B/s, out {sent} B/s, xact {xact_time} {us}, query {query_time} {us}, wait {wait_time} {us}"
        )
        .expect("writing to a String");
        line
    }
}

/// The clock of `stats_period`: when the last two snapshots were taken. One for the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatsClock {
    older: Timestamp,
    newer: Timestamp,
}

impl StatsClock {
    /// Starts at `now`. The first averages cover the time since a second before, as PgBouncer's do.
    #[must_use]
    pub const fn new(now: Timestamp) -> Self {
        Self { older: Timestamp(now.0.saturating_sub(US_PER_S)), newer: now }
    }

    /// A period has ended. Call [`StatsWindow::roll`] for every pool with it.
    pub const fn roll(&mut self, now: Timestamp) {
        self.older = self.newer;
        self.newer = now;
    }

    /// Microseconds that averages asked for at `now` cover.
    #[must_use]
    pub const fn elapsed_us(&self, now: Timestamp) -> u64 {
        now.0.saturating_sub(self.older.0)
    }
}

/// Counters of a pool with the snapshots averages need. Merges like the counters do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StatsWindow {
    /// Counters now.
    pub current: PoolStats,
    newer: PoolStats,
    older: PoolStats,
}

impl StatsWindow {
    /// Takes the snapshot at the end of a period.
    pub const fn roll(&mut self) {
        self.older = self.newer;
        self.newer = self.current;
    }

    /// Adds a pool, to make the figures of a database or of all.
    pub fn merge(&mut self, other: &Self) {
        self.current.merge(&other.current);
        self.newer.merge(&other.newer);
        self.older.merge(&other.older);
    }

    /// Averages over the last one to two periods.
    #[must_use]
    pub fn averages(&self, clock: &StatsClock, now: Timestamp) -> Averages {
        self.current.averages_since(&self.older, clock.elapsed_us(now))
    }

    /// Averages since the end of the last period: at the end of one, over just that one, as PgBouncer logs them.
    #[must_use]
    pub fn latest_averages(&self, clock: &StatsClock, now: Timestamp) -> Averages {
        self.current.averages_since(&self.newer, now.0.saturating_sub(clock.newer.0))
    }

    /// The row of SHOW STATS, STATS_TOTALS and STATS_AVERAGES for a database.
    #[must_use]
    pub fn row<'a>(&self, database: &'a str, clock: &StatsClock, now: Timestamp) -> StatsRow<'a> {
        StatsRow { database, totals: self.current, averages: self.averages(clock, now) }
    }

    /// The table of SHOW TOTALS, `self` being the sum over all pools.
    #[must_use]
    pub fn totals_table(&self, clock: &StatsClock, now: Timestamp) -> Table {
        let mut table = Table::new(Show::Totals.columns());
        let averages = self.averages(clock, now);
        for (prefix, stats) in [("total_", self.current), ("avg_", averages.0)] {
            for (name, value) in TOTALS_NAMES.into_iter().zip(stats.values()) {
                table.push(&TotalsRow { prefix, name, value });
            }
        }
        table
    }
}

/// Latency of a pool, all in microseconds.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PoolLatency {
    /// From a client's request to the server that serves it.
    pub wait: Histogram,
    /// Transactions, first request to the last ReadyForQuery.
    pub xact: Histogram,
    /// Queries.
    pub query: Histogram,
}

impl PoolLatency {
    /// Adds the histograms of another thread or pool.
    pub fn merge(&mut self, other: &Self) {
        self.wait.merge(&other.wait);
        self.xact.merge(&other.xact);
        self.query.merge(&other.query);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATS: PoolStats = PoolStats {
        server_assignment_count: 10,
        xact_count: 20,
        query_count: 40,
        received: 4_000,
        sent: 8_000,
        xact_time: 5_000,
        query_time: 4_100,
        wait_time: 99,
        client_parse_count: 6,
        server_parse_count: 4,
        bind_count: 2,
        client_login_count: 3,
    };

    #[test]
    fn counts_are_per_second_and_times_per_piece() {
        let averages = STATS.averages_since(&PoolStats::default(), 2_000_000).0;
        assert_eq!(averages.values(), [5, 10, 20, 2_000, 4_000, 250, 102, 9, 3, 2, 1, 1]);
    }

    #[test]
    fn nothing_happened_or_no_time_passed() {
        assert_eq!(STATS.averages_since(&STATS, 1), Averages::default());
        assert_eq!(STATS.averages_since(&PoolStats::default(), 0), Averages::default());
        assert_eq!(PoolStats::default().averages_since(&STATS, 1_000_000), Averages::default());
    }

    #[test]
    fn large_counters_do_not_overflow() {
        let stats = PoolStats { received: u64::MAX, sent: 40 << 40, ..PoolStats::default() };
        let averages = stats.averages_since(&PoolStats::default(), 1_000_000).0;
        assert_eq!((averages.received, averages.sent), (u64::MAX, 40 << 40));
        assert_eq!(stats.averages_since(&PoolStats::default(), 1).0.received, u64::MAX);
    }

    #[test]
    fn averages_cover_one_to_two_periods() {
        let second = |s: u64| Timestamp(s * 1_000_000);
        let mut clock = StatsClock::new(second(100));
        let mut window = StatsWindow::default();
        window.current.xact_count = 30;
        // One second before the start is where the first average begins.
        assert_eq!(window.averages(&clock, second(102)).0.xact_count, 10);
        clock.roll(second(160));
        window.roll();
        window.current.xact_count += 60;
        assert_eq!(window.averages(&clock, second(160)).0.xact_count, 90 / 60);
        clock.roll(second(220));
        window.roll();
        assert_eq!(window.averages(&clock, second(220)).0.xact_count, 1);
        assert_eq!(window.averages(&clock, second(340)).0.xact_count, 0);
    }

    #[test]
    fn merging_windows_adds_all_three_snapshots() {
        let mut window = StatsWindow { current: STATS, ..StatsWindow::default() };
        window.roll();
        window.roll();
        let other = window;
        window.merge(&other);
        assert_eq!(window.current.xact_count, 40);
        assert_eq!(window.averages(&StatsClock::new(Timestamp(0)), Timestamp(5)), Averages::default());
    }

    #[test]
    fn the_line_of_log_stats() {
        let line = STATS.averages_since(&PoolStats::default(), 1_000_000).log_line();
        assert_eq!(
            line,
            "stats: 20 xacts/s, 40 queries/s, 6 client parses/s, 4 server parses/s, 2 binds/s, 3 client logins/s, \
             in 4000 B/s, out 8000 B/s, xact 250 us, query 102 us, wait 9 us"
        );
        assert_eq!(Averages::default().status_line().matches("0 μs").count(), 3);
    }

    #[test]
    fn totals_are_24_rows() {
        let window = StatsWindow { current: STATS, ..StatsWindow::default() };
        let clock = StatsClock::new(Timestamp(1_000_000));
        let table = window.totals_table(&clock, Timestamp(1_000_000));
        let rows: Vec<Vec<_>> = table.rows().map(Iterator::collect).collect();
        assert_eq!(rows.len(), 24);
        assert_eq!(rows[1], [Some("total_xact_count"), Some("20")]);
        assert_eq!(rows[3], [Some("total_client_bytes"), Some("4000")]);
        assert_eq!(rows[20], [Some("avg_ps_client_parse_count"), Some("6")]);
    }
}
