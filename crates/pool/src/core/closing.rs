// SPDX-License-Identifier: Apache-2.0
//! How connections end: why, and which are due.

use std::collections::hash_map::Entry;
use std::fmt;
use std::time::Instant;

use super::parked::Idle;
use super::{Core, Pool, PoolId, PoolLimits, ServerId, Slot, State};

/// Why the core has a server closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseReason {
    /// `server_lifetime`.
    Lifetime,
    /// `server_idle_timeout`.
    IdleTimeout,
    /// RECONNECT, RELOAD with other settings, DNS change.
    CloseNeeded,
    /// More connections than `pool_size` and `reserve_pool_size` allow after a reload.
    PoolShrunk,
    /// Another pool of the same database or user needs the place.
    Evicted,
    /// KILL, PAUSE or shutdown.
    Stopped,
}

impl CloseReason {
    /// PgBouncer's words.
    pub fn text(self) -> &'static str {
        match self {
            CloseReason::Lifetime => "server lifetime over",
            CloseReason::IdleTimeout => "server idle timeout",
            CloseReason::CloseNeeded => "obsolete connection",
            CloseReason::PoolShrunk => "too many servers in the pool",
            CloseReason::Evicted => "evicted",
            CloseReason::Stopped => "server shutting down",
        }
    }
}

/// Which connections are old, for those that somebody uses when it is found out: see [`Core::retire_old`].
pub(super) struct Old<S> {
    opened_until: Instant,
    is_old: Box<dyn Fn(&S) -> bool + Send>,
}

impl<S> Old<S> {
    pub(super) fn has(&self, connected_at: Instant, server: &S) -> bool {
        connected_at <= self.opened_until && (self.is_old)(server)
    }
}

impl<S> fmt::Debug for Old<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Old").field("opened_until", &self.opened_until).finish_non_exhaustive()
    }
}

impl<S> Core<S> {
    /// Whether the slot belongs to a connection that must not be used again.
    pub fn is_close_needed(&mut self, id: ServerId) -> bool {
        self.slot(id).is_none_or(|slot| slot.close_needed)
    }

    /// The connection is gone, or never came to be.
    pub fn closed(&mut self, id: ServerId, failed_login: bool, now: Instant) {
        let Some(slot) = self.slot(id) else { return };
        let was_login = slot.state == State::Login;
        let pool = self.at(id.pool);
        if was_login {
            pool.logins -= 1;
            if failed_login {
                (pool.failed_at, pool.failed_before_pause) = (Some(now), pool.paused);
            }
        }
        self.free(id);
    }

    pub(super) fn free(&mut self, id: ServerId) {
        let pool = self.at(id.pool);
        let slot = &mut pool.slots[id.ordinal as usize];
        slot.state = State::Free;
        slot.parked = None;
        if let Idle::Shared(idle) = &mut pool.idle {
            idle.forget(id.ordinal);
        }
        pool.connections -= 1;
        pool.tell_full();
        let (database, user) = (pool.database, pool.user);
        for (counts, key) in [(&mut self.database_connections, database), (&mut self.user_connections, user)]
        {
            if let Entry::Occupied(mut count) = counts.entry(key) {
                *count.get_mut() -= 1;
                // Databases and users come and go.
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
    }

    /// Marks every connection of the pool as obsolete (RECONNECT, changed settings): idle ones are handed out for closing now, the others
    /// close when they are released.
    pub fn obsolete(&mut self, pool: PoolId) -> Vec<(ServerId, S)> {
        let p = self.at(pool);
        for (ordinal, slot) in p.slots.iter_mut().enumerate() {
            slot.close_needed = slot.state != State::Free;
            if let (Idle::Shared(idle), State::Idle) = (&p.idle, slot.state) {
                idle.retire(ordinal as u32);
            }
        }
        self.take_all_idle(pool)
    }

    /// Marks the connections opened until now that are old by this rule: idle ones are handed out for closing, the others close when they
    /// are released, wherever they are now.
    pub fn retire_old(
        &mut self,
        pool: PoolId,
        now: Instant,
        is_old: impl Fn(&S) -> bool + Send + 'static,
    ) -> Vec<(ServerId, S)> {
        let p = self.at(pool);
        for (ordinal, slot) in p.slots.iter_mut().enumerate() {
            if slot.parked.as_ref().is_some_and(&is_old) {
                slot.close_needed = true;
                if let Idle::Shared(idle) = &p.idle {
                    idle.retire(ordinal as u32);
                }
            }
        }
        p.old = Some(Old { opened_until: now, is_old: Box::new(is_old) });
        let mut taken = Vec::new();
        for ordinal in p.idle.ordinals() {
            let p = self.at(pool);
            let slot = &mut p.slots[ordinal as usize];
            let id = ServerId { pool, ordinal, generation: slot.generation };
            if slot.close_needed
                && p.idle.remove(ordinal)
                && let Some(server) = slot.parked.take()
            {
                self.free(id);
                taken.push((id, server));
            }
        }
        taken
    }

    /// Marks a server that somebody uses.
    pub fn retire(&mut self, id: ServerId) {
        if let Some(slot) = self.slot(id) {
            slot.close_needed = true;
        }
    }

    /// Hands out all idle servers for closing.
    pub fn take_all_idle(&mut self, pool: PoolId) -> Vec<(ServerId, S)> {
        let mut taken = Vec::new();
        while let Some((ordinal, server)) = self.at(pool).take_oldest_idle() {
            let id = ServerId { pool, ordinal, generation: self.at(pool).slots[ordinal as usize].generation };
            self.free(id);
            taken.push((id, server));
        }
        taken
    }

    /// Connections that are obsolete and still there, for WAIT_CLOSE.
    pub fn close_needed(&self, pool: PoolId) -> u32 {
        let slots = &self.get(pool).slots;
        slots.iter().filter(|slot| slot.state != State::Free && slot.close_needed).count() as u32
    }

    /// Idle servers that are due to be closed: over their lifetime, or idle for too long above the minimum.
    pub fn expire(&mut self, pool: PoolId, now: Instant) -> Vec<(ServerId, S, CloseReason)> {
        let mut expired = Vec::new();
        let p = self.at(pool);
        p.set_aside_unchecked(now);
        p.mark_over(now);
        if let Idle::Shared(shared) = &p.idle {
            // One that a lane has linked cannot be taken now: it comes up when its transaction is over.
            for (ordinal, slot) in p.slots.iter().enumerate() {
                if slot.state == State::Idle && (slot.close_needed || slot.is_due) {
                    shared.retire(ordinal as u32);
                }
            }
        }
        for ordinal in p.idle.ordinals() {
            let p = self.at(pool);
            let (limits, slot) = (&p.limits, &p.slots[ordinal as usize]);
            let idle_for = now.saturating_duration_since(p.idle.since(ordinal, slot.idle_since));
            let reason = if slot.close_needed {
                CloseReason::CloseNeeded
            } else if p.connections > limits.size.saturating_add(limits.reserve) {
                CloseReason::PoolShrunk
            } else if slot.is_due {
                CloseReason::Lifetime
            } else if !limits.idle_timeout.is_zero()
                && idle_for >= limits.idle_timeout
                && p.connections > limits.size_min
            {
                CloseReason::IdleTimeout
            } else {
                continue;
            };
            let id = ServerId { pool, ordinal, generation: slot.generation };
            if !p.idle.remove(ordinal) {
                continue;
            }
            if let Some(server) = p.slots[ordinal as usize].parked.take() {
                self.free(id);
                expired.push((id, server, reason));
            }
        }
        self.at(pool).mark_surplus();
        expired
    }
}

impl<S> Pool<S> {
    /// Whether a connection made then is to go now for its age. Connections that were made together do not go together, which would
    /// have all of them made anew at once: there is a pause between two of `lifetime` / `size`, as in PgBouncer (objects.c, `life_over`).
    pub(super) fn is_over(&self, connected_at: Instant, now: Instant) -> bool {
        let PoolLimits { lifetime, size, .. } = self.limits;
        let age = now.saturating_duration_since(connected_at);
        let pause = if size == PoolLimits::UNLIMITED { None } else { lifetime.checked_div(size) };
        let has_paused = |last| now.saturating_duration_since(last) >= pause.unwrap_or_default();
        age >= lifetime && self.last_over.is_none_or(has_paused)
    }

    /// Marks the idle connections that are to go for their age, the oldest first.
    fn mark_over(&mut self, now: Instant) {
        let is_candidate = |slot: &Slot<S>| slot.state == State::Idle && !slot.is_due;
        loop {
            let candidates = self.slots.iter().enumerate().filter(|(_, slot)| is_candidate(slot));
            let Some((oldest, slot)) = candidates.min_by_key(|(_, slot)| slot.connected_at) else { return };
            if !self.is_over(slot.connected_at, now) {
                return;
            }
            self.slots[oldest].is_due = true;
            self.last_over = Some(now);
        }
    }

    /// Marks as many of the parked connections as there are too many, after a RELOAD: those that programs pass from client to client come to
    /// user space, where they are counted, no other way.
    fn mark_surplus(&mut self) {
        let Idle::Shared(shared) = &self.idle else { return };
        let is_leaving = |slot: &Slot<S>| slot.state != State::Free && (slot.close_needed || slot.is_due);
        let leaving = self.slots.iter().filter(|slot| is_leaving(slot)).count() as u32;
        let surplus = self
            .connections
            .saturating_sub(self.limits.size.saturating_add(self.limits.reserve).saturating_add(leaving));
        let parked = self.slots.iter_mut().enumerate();
        let staying = parked.filter(|(_, slot)| slot.state == State::Idle && !is_leaving(slot));
        for (ordinal, slot) in staying.take(surplus as usize) {
            slot.is_due = true;
            shared.retire(ordinal as u32);
        }
    }
}
