// SPDX-License-Identifier: Apache-2.0
//! How many connections and clients there are, for limits, the console and metrics.

use std::time::{Duration, Instant};

use super::{Core, PoolId, State, count};

/// Counters of a pool, as `SHOW POOLS` has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolCounts {
    /// Clients in the queue.
    pub clients_waiting: u32,
    /// Linked servers.
    pub active: u32,
    /// Idle servers, used within the check delay.
    pub idle: u32,
    /// Idle servers, due for a check.
    pub used: u32,
    /// Servers being reset or checked.
    pub tested: u32,
    /// Servers logging in.
    pub login: u32,
    /// Servers held back for a cancel request.
    pub being_canceled: u32,
    /// Longest present wait.
    pub max_wait: Duration,
}

impl<S> Core<S> {
    /// Connections of the pool in any state.
    pub fn connections(&self, pool: PoolId) -> u32 {
        self.get(pool).connections
    }

    /// Whether the pool has connections that are past their login.
    pub fn has_servers(&self, pool: PoolId) -> bool {
        let pool = self.get(pool);
        pool.connections > pool.logins
    }

    /// Connections of a database over all its pools.
    pub fn database_connections(&self, database: u32) -> u32 {
        count(&self.database_connections, database)
    }

    /// Connections of a user over all its pools.
    pub fn user_connections(&self, user: u32) -> u32 {
        count(&self.user_connections, user)
    }

    /// Whether clients wait in the pool.
    pub fn has_waiting(&self, pool: PoolId) -> bool {
        !self.get(pool).waiting.is_empty()
    }

    /// Counters for `SHOW POOLS`.
    pub fn counts(&self, pool: PoolId, now: Instant) -> PoolCounts {
        let pool = self.get(pool);
        let mut counts = PoolCounts {
            clients_waiting: pool.waiting.len() as u32,
            max_wait: pool
                .waiting
                .values()
                .next()
                .map_or(Duration::ZERO, |w| now.saturating_duration_since(w.since)),
            ..PoolCounts::default()
        };
        let in_set = pool.idle.is_shared().then(|| pool.idle.ordinals());
        for (ordinal, slot) in pool.slots.iter().enumerate() {
            match slot.state {
                // Parked, but linked by a lane.
                State::Idle if in_set.as_ref().is_some_and(|set| !set.contains(&(ordinal as u32))) => {
                    counts.active += 1
                }
                State::Free => {}
                State::Login => counts.login += 1,
                State::Active => counts.active += 1,
                State::Tested => counts.tested += 1,
                State::BeingCanceled => counts.being_canceled += 1,
                State::Idle => {
                    let since = pool.idle.since(ordinal as u32, slot.idle_since);
                    let due = pool.limits.is_check_due(now.saturating_duration_since(since));
                    *(if due { &mut counts.used } else { &mut counts.idle }) += 1;
                }
            }
        }
        counts
    }
}
