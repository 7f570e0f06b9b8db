// SPDX-License-Identifier: Apache-2.0
//! Facts that live at several workers, brought together: for the console, the metrics and the log's statistics.
//!
//! Nobody waits while workers are asked, unless he has a thread of his own ([`wait`]): each worker does its part between two events and
//! the last one goes on with all parts.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use foldhash::fast::RandomState;
use underpass_console::rows::{Lists, PoolCounts};
use underpass_console::stats::PoolLatency;
use underpass_console::{Averages, PoolStats, StatsClock, StatsWindow, Timestamp};

use underpass_pool::PoolId;
use underpass_pool::core::PoolLimits;

use crate::client::Phase;
use crate::pool::Pool;
use crate::shared::{Shared, lock};
use crate::worker::{PoolMeter, Worker};

/// Has every worker make its part; the last one to do so calls `then` with all parts in the order of workers.
///
/// `then` runs on a worker and must be short: post what takes long to somebody else. It is never called once a worker has ended.
pub(crate) fn gather<T: Send + 'static>(
    shared: &Shared,
    part: impl Fn(&mut Worker) -> T + Send + Sync + 'static,
    then: impl FnOnce(Vec<T>) + Send + 'static,
) {
    let parts: Mutex<Vec<Option<T>>> = Mutex::new(shared.mailboxes.iter().map(|_| None).collect());
    let missing = AtomicUsize::new(shared.mailboxes.len());
    let then = Mutex::new(Some(then));
    shared.broadcast(move |worker| {
        let made = part(worker);
        lock(&parts)[worker.index as usize] = Some(made);
        if missing.fetch_sub(1, Ordering::AcqRel) == 1 {
            let all = std::mem::take(&mut *lock(&parts)).into_iter().flatten().collect();
            if let Some(then) = lock(&then).take() {
                then(all);
            }
        }
    });
}

/// The same for a thread that may wait, which a worker may not. `None` if a worker does not answer within `limit`.
pub(crate) fn wait<T: Send + 'static>(
    shared: &Shared,
    limit: Duration,
    part: impl Fn(&mut Worker) -> T + Send + Sync + 'static,
) -> Option<Vec<T>> {
    let (answer, answered) = std::sync::mpsc::sync_channel(1);
    gather(shared, part, move |parts| {
        // The asker may have lost patience.
        let _ = answer.try_send(parts);
    });
    answered.recv_timeout(limit).ok()
}

/// What one worker knows of one pool.
#[derive(Debug, Default, Clone)]
struct PoolPart {
    meter: PoolMeter,
    /// Clients with a server, and clients between transactions.
    clients_active: u64,
    /// Clients in the queue.
    clients_waiting: u64,
    /// Clients whose requests the kernel keeps, and how long the longest has waited.
    clients_kept: u64,
    kept_max: Duration,
    /// Connections that carry a cancel request to the server, and those that are to.
    cancels: u64,
    cancels_waiting: u64,
}

/// What one worker knows: its pools and its sockets.
#[derive(Debug, Default)]
pub(crate) struct Part {
    pools: HashMap<PoolId, PoolPart, RandomState>,
    clients: u64,
    login_clients: u64,
}

impl Part {
    /// The part of `worker`, for [`gather`].
    pub fn of(worker: &mut Worker) -> Self {
        worker.lanes_collect();
        let now = Instant::now();
        let mut part = Self::default();
        part.pools.reserve(worker.meters.len());
        for (pool, meter) in &worker.meters {
            if let Some(pool) = *pool {
                part.pool(pool).meter = meter.clone();
            }
        }
        for (_, client) in worker.clients.iter() {
            part.clients += u64::from(!client.is_silent);
            part.login_clients += u64::from(client.is_login());
            let Some(pool) = &client.pool else { continue };
            let pool = part.pool(pool.id);
            match client.phase {
                Phase::Lane if let Some(since) = client.kept_since(now) => {
                    pool.clients_kept += 1;
                    pool.kept_max = pool.kept_max.max(now.saturating_duration_since(since));
                }
                Phase::Idle | Phase::Lane | Phase::Linked(_) => pool.clients_active += 1,
                Phase::Waiting { .. } => pool.clients_waiting += 1,
                Phase::Login(_) | Phase::Console(_) | Phase::Closing => {}
            }
        }
        for (_, cancel) in worker.cancels.iter() {
            if let Some(pool) = cancel.pool() {
                let pool = part.pool(pool);
                *if cancel.is_sent() { &mut pool.cancels } else { &mut pool.cancels_waiting } += 1;
            }
        }
        part
    }

    fn pool(&mut self, id: PoolId) -> &mut PoolPart {
        self.pools.entry(id).or_default()
    }
}

/// A pool, all workers merged.
pub(crate) struct PoolFacts {
    pub pool: Arc<Pool>,
    /// Counters since start.
    pub stats: PoolStats,
    pub latency: PoolLatency,
    pub counts: PoolCounts,
    /// `pool_size`; 0: no limit.
    pub size: u32,
}

/// All pools in the order of their places, and the counts of SHOW LISTS.
pub(crate) struct Facts {
    pub pools: Vec<PoolFacts>,
    pub lists: Lists,
}

impl Facts {
    /// Brings the parts of all workers and the core's own knowledge together.
    pub fn merge(shared: &Shared, parts: &[Part], now: Instant) -> Self {
        let mut servers = 0;
        let pools: Vec<PoolFacts> = shared
            .pools()
            .into_iter()
            .map(|pool| {
                let (core, size) = {
                    let core = lock(&shared.core);
                    servers += u64::from(core.connections(pool.id));
                    (core.counts(pool.id, now), core.limits(pool.id).size)
                };
                let size = if size == PoolLimits::UNLIMITED { 0 } else { size };
                let mut facts = PoolFacts {
                    stats: PoolStats::default(),
                    latency: PoolLatency::default(),
                    counts: PoolCounts {
                        cl_waiting: core.clients_waiting.into(),
                        sv_active: core.active.into(),
                        sv_being_canceled: core.being_canceled.into(),
                        sv_idle: core.idle.into(),
                        sv_used: core.used.into(),
                        sv_tested: core.tested.into(),
                        sv_login: core.login.into(),
                        maxwait_us: core.max_wait.as_micros() as u64,
                        ..PoolCounts::default()
                    },
                    size,
                    pool,
                };
                for part in parts.iter().filter_map(|part| part.pools.get(&facts.pool.id)) {
                    facts.stats.merge(&part.meter.stats);
                    facts.latency.merge(&part.meter.latency);
                    facts.counts.cl_active += part.clients_active;
                    facts.counts.cl_waiting += part.clients_kept;
                    let kept_us = part.kept_max.as_micros() as u64;
                    facts.counts.maxwait_us = facts.counts.maxwait_us.max(kept_us);
                    facts.counts.cl_active_cancel_req += part.cancels;
                    facts.counts.cl_waiting_cancel_req += part.cancels_waiting;
                    facts.counts.sv_active_cancel += part.cancels;
                }
                facts
            })
            .collect();
        let names = shared.resolver.entries().len() as u64;
        let settings = shared.settings.load();
        let shown = |facts: &&PoolFacts| !facts.pool.forgotten.load(Ordering::Relaxed);
        let peers = settings.config.peers.len() as u64;
        let lists = Lists {
            // The console has a database, a pool and a user.
            databases: shared.shown_databases().len() as u64 + 1,
            users: shared.user_count() as u64,
            peers,
            pools: pools.iter().filter(shown).count() as u64 + 1,
            peer_pools: peers,
            used_clients: parts.iter().map(|part| part.clients).sum(),
            login_clients: parts.iter().map(|part| part.login_clients).sum(),
            used_servers: servers,
            dns_names: names,
            ..Lists::default()
        };
        Self { pools, lists }
    }
}

/// The windows of `stats_period`: one for each pool, and the clock they share.
#[derive(Debug)]
pub(crate) struct Periods {
    pub clock: StatsClock,
    windows: HashMap<PoolId, StatsWindow, RandomState>,
}

impl Periods {
    /// Begins at `now`.
    pub fn new(now: Timestamp) -> Self {
        Self { clock: StatsClock::new(now), windows: HashMap::default() }
    }

    /// The window of a pool with `current` counters, for SHOW STATS. Sum over pools with [`StatsWindow::merge`].
    pub fn window(&self, pool: PoolId, current: PoolStats) -> StatsWindow {
        let mut window = self.windows.get(&pool).copied().unwrap_or_default();
        window.current = current;
        window
    }

    /// A period ends with these counters; the answer is its averages, of all pools together. Those that are gone have no part in it.
    pub fn roll(&mut self, facts: &Facts, now: Timestamp) -> Averages {
        let pools = facts.pools.iter();
        self.roll_pools(pools.map(|facts| (facts.pool.id, facts.stats, facts.pool.database.is_mirror)), now)
    }

    fn roll_pools(
        &mut self,
        pools: impl Iterator<Item = (PoolId, PoolStats, bool)>,
        now: Timestamp,
    ) -> Averages {
        let mut total = StatsWindow::default();
        let mut windows = HashMap::default();
        for (id, stats, is_mirror) in pools {
            let mut window = self.window(id, stats);
            if !is_mirror {
                total.merge(&window);
            }
            window.roll();
            windows.insert(id, window);
        }
        let averages = total.latest_averages(&self.clock, now);
        self.windows = windows;
        self.clock.roll(now);
        averages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_that_is_new_in_a_period_starts_from_zero() {
        let second = |s: u64| Timestamp(s * 1_000_000);
        let mut periods = Periods::new(second(10));
        periods.clock.roll(second(20));
        let pool = underpass_pool::Core::<()>::default().pool(1, 1, || PoolLimits::NONE);
        let window = periods.window(pool, PoolStats { xact_count: 50, ..PoolStats::default() });
        assert_eq!(window.averages(&periods.clock, second(20)).0.xact_count, 5);
    }

    #[test]
    fn the_line_of_the_log_is_about_one_period_and_the_console_about_two() {
        let second = |s: u64| Timestamp(s * 1_000_000);
        let mut periods = Periods::new(second(0));
        let id = underpass_pool::Core::<()>::default().pool(1, 1, || PoolLimits::NONE);
        let stats = |xact_count| PoolStats { xact_count, ..PoolStats::default() };
        let mut roll = |count, at| {
            let averages = periods.roll_pools([(id, stats(count), false)].into_iter(), second(at));
            let shown = periods.window(id, stats(count)).averages(&periods.clock, second(at + 60));
            (averages.0.xact_count, shown.0.xact_count)
        };
        assert_eq!(roll(600, 60), (10, 5));
        assert_eq!(roll(1800, 120), (20, 10));
        assert_eq!(roll(1800, 180), (0, 0));
    }
}
