// SPDX-License-Identifier: Apache-2.0
//! A pool whose logins fail: who is told so, who waits, and when the next attempt is due.
//!
//! Clients that queued before the first failure wait, as with PgBouncer: a server that restarts is back soon. Those that ask later are
//! refused at once if nothing but logins stands ([`Core::is_failing`]); if a connection still stands they queue for it, and are refused
//! when the last one closes ([`Launch::Refuse`](super::Launch::Refuse)), as if they had asked then.
//!
//! PAUSE is there to have clients wait until the server is back, or another is in its place: who waits through it is refused for no failure
//! before it.
//!
//! A login that PostgreSQL has refused may have a second try (`server_tls_sslmode` prefer and allow), and fails when that one does. Who
//! asks in between waits for its outcome, and counts as one who asked after the failure ([`Core::refused`]).

use std::time::Instant;

use super::{ClientRef, Core, Pool, PoolId, ServerId, State, Ticket, count};

impl<S> Core<S> {
    /// Whether the last attempt to connect failed, and nothing has succeeded since. Not during a pause, nor after it before the next attempt.
    pub fn last_connect_failed(&self, pool: PoolId) -> bool {
        let pool = self.get(pool);
        pool.failed_at.is_some() && !pool.paused && !pool.failed_before_pause
    }

    /// Whether an attempt to connect has failed after `since`, and nothing has succeeded after that.
    pub fn has_failed_since(&self, pool: PoolId, since: Instant) -> bool {
        self.get(pool).failed_at.is_some_and(|at| at > since)
    }

    /// PostgreSQL has refused this login, before that is told or logged: [`Core::closed`] follows, or a second try.
    pub fn refused(&mut self, id: ServerId) {
        if let Some(slot) = self.slot(id) {
            slot.is_refused = true;
        }
    }

    /// Whether connecting fails and the pool has no connection: a client that asks now would wait for nothing.
    pub fn is_failing(&self, pool: PoolId) -> bool {
        let pool = self.get(pool);
        pool.failed_at.is_some() && pool.connections == pool.logins && !pool.paused
    }

    /// Whether no connection of the pool is opened now because one has failed within `login_retry`.
    pub fn pauses(&self, pool: PoolId, now: Instant) -> bool {
        let pool = self.get(pool);
        pool.failed_at.is_some_and(|at| now.saturating_duration_since(at) < pool.limits.login_retry)
    }

    /// A slot for the next attempt of a pool that [is failing](Core::is_failing), if `login_retry` has passed since the last one.
    pub fn retry(&mut self, pool: PoolId, now: Instant) -> Option<ServerId> {
        let p = self.get(pool);
        let failed_at = p.failed_at?;
        let full = |max: u32, have: u32| max > 0 && have >= max;
        if p.paused
            || p.logins > 0
            || now.saturating_duration_since(failed_at) < p.limits.login_retry
            || p.connections >= p.limits.size
            || full(p.limits.database_max, count(&self.database_connections, p.database))
            || full(p.limits.user_max, count(&self.user_connections, p.user))
        {
            return None;
        }
        Some(self.open(pool, now))
    }

    /// Takes those out of the queue who came after the failure for the sake of a connection that stands no more.
    pub(super) fn take_stranded(&mut self, pool: PoolId) -> Vec<(ClientRef, Ticket)> {
        if !self.is_failing(pool) {
            return Vec::new();
        }
        let pool = self.at(pool);
        let stranded: Vec<_> = pool
            .waiting
            .extract_if(.., |_, waiter| waiter.after_failure)
            .map(|(ticket, waiter)| (waiter.client, ticket))
            .collect();
        if !stranded.is_empty() {
            pool.tell_waiters();
        }
        stranded
    }
}

impl<S> Pool<S> {
    /// Whether PostgreSQL has refused a login that is still under way.
    pub(super) fn is_refused(&self) -> bool {
        self.logins > 0 && self.slots.iter().any(|slot| slot.state == State::Login && slot.is_refused)
    }
}
