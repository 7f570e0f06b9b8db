// SPDX-License-Identifier: Apache-2.0
//! The servers that a pool has at rest, in the pool's own idle set or in one that a lane's programs take from too.

use std::time::{Duration, Instant};

use super::{Acquired, ClientRef, Core, Pool, PoolId, ServerId, State};
use crate::idle::{IdleSet, SharedIdle};

/// How long after it gave its server back a client gets that one again: as long as one that asks without a pause needs. Who asks less often gets
/// the lowest, so that servers of high ordinals rest and can be closed.
pub(super) const OWN_FOR: Duration = Duration::from_millis(2);

/// The idle servers of a pool.
#[derive(Debug)]
pub(super) enum Idle<S> {
    Own(IdleSet),
    Shared(Box<dyn SharedIdle<S>>),
}

impl<S> Idle<S> {
    pub(super) fn push(&mut self, ordinal: u32, server: &mut S) -> bool {
        match self {
            Idle::Own(set) => {
                set.push(ordinal);
                true
            }
            Idle::Shared(shared) => shared.push(ordinal, server),
        }
    }

    pub(super) fn pop_from(&mut self, from: u32) -> Option<u32> {
        match self {
            Idle::Own(set) => set.pop_from(from),
            Idle::Shared(shared) => shared.pop_from(from),
        }
    }

    /// See [`SharedIdle::pop_unlike`]; none where no program takes any.
    pub(super) fn pop_unlike(&mut self, fingerprint: u32) -> Option<u32> {
        match self {
            Idle::Own(_) => None,
            Idle::Shared(shared) => shared.pop_unlike(fingerprint),
        }
    }

    /// Takes the lowest that `fits`; none where programs take servers, too, which know no workers.
    pub(super) fn pop_fitting(&mut self, fits: impl Fn(u32) -> bool) -> Option<u32> {
        match self {
            Idle::Own(set) => set.pop_fitting(fits),
            Idle::Shared(_) => None,
        }
    }

    pub(super) fn remove(&mut self, ordinal: u32) -> bool {
        match self {
            Idle::Own(set) => set.remove(ordinal),
            Idle::Shared(shared) => shared.remove(ordinal),
        }
    }

    pub(super) fn ordinals(&self) -> Vec<u32> {
        match self {
            Idle::Own(set) => set.iter().collect(),
            Idle::Shared(shared) => shared.ordinals(),
        }
    }

    /// See [`SharedIdle::is_occupied`].
    pub(super) fn is_occupied(&self, ordinal: u32) -> bool {
        match self {
            Idle::Own(_) => false,
            Idle::Shared(shared) => shared.is_occupied(ordinal),
        }
    }

    pub(super) fn is_shared(&self) -> bool {
        matches!(self, Idle::Shared(_))
    }

    /// Since when a server is idle that user space put in at `pushed`.
    pub(super) fn since(&self, ordinal: u32, pushed: Instant) -> Instant {
        match self {
            Idle::Own(_) => pushed,
            Idle::Shared(shared) => shared.returned_at(ordinal).map_or(pushed, |at| at.max(pushed)),
        }
    }
}

impl<S> Core<S> {
    /// Keeps the pool's idle servers elsewhere from now on. Only while it has no connections.
    pub fn share_idle(&mut self, pool: PoolId, idle: Box<dyn SharedIdle<S>>) {
        let pool = self.at(pool);
        debug_assert_eq!(pool.connections, 0);
        pool.idle = Idle::Shared(idle);
    }

    /// Takes a parked server out that the caller has claimed from a lane: it speaks without being linked.
    pub fn unpark_claimed(&mut self, id: ServerId) -> Option<S> {
        let slot = self.slot(id).filter(|slot| slot.state == State::Idle)?;
        slot.state = State::Tested;
        let server = slot.parked.take();
        self.at(id.pool).idle.remove(id.ordinal);
        server
    }

    /// Takes a parked server out that a lane has linked to a client, whose link user space takes over.
    pub fn unpark_linked(&mut self, id: ServerId) -> Option<S> {
        let slot = self.slot(id).filter(|slot| slot.state == State::Idle)?;
        slot.state = State::Active;
        slot.parked.take()
    }

    /// Keeps a linked server while a lane carries its link: [`Core::unpark_linked`] gives it back. Not idle, and counted as active.
    ///
    /// # Errors
    /// The server, if the core does not know it any more, or without [`Core::share_idle`]: only there, what is parked and not in the
    /// set is linked.
    pub fn park_linked(&mut self, id: ServerId, server: S) -> Result<(), S> {
        if !self.get(id.pool).idle.is_shared() {
            return Err(server);
        }
        let Some(slot) = self.slot(id) else { return Err(server) };
        slot.state = State::Idle;
        slot.parked = Some(server);
        let is_leaving = slot.close_needed || slot.is_due;
        if let (true, Idle::Shared(idle)) = (is_leaving, &self.at(id.pool).idle) {
            idle.retire(id.ordinal);
        }
        Ok(())
    }

    /// The parked server itself, to note something in it.
    pub fn parked_server(&mut self, id: ServerId) -> Option<&mut S> {
        self.slot(id)?.parked.as_mut()
    }

    /// Takes a parked server out because its socket has something to say, if it is still the caller's.
    pub fn unpark(&mut self, id: ServerId, is_mine: impl FnOnce(&S) -> bool) -> Option<S> {
        let pool = self.at(id.pool);
        let slot = pool.slots.get_mut(id.ordinal as usize)?;
        if slot.generation != id.generation
            || slot.state != State::Idle
            || !slot.parked.as_ref().is_some_and(is_mine)
        {
            return None;
        }
        if !pool.idle.remove(id.ordinal) {
            return None;
        }
        slot.state = State::Tested;
        slot.parked.take()
    }

    /// The parked servers of a pool, for `SHOW SERVERS`.
    ///
    /// With each: since when it is idle, and whether it is obsolete. Obsolete ones are parked only while a lane has them linked.
    pub fn parked(&self, pool: PoolId) -> impl Iterator<Item = (ServerId, &S, Instant, bool)> {
        self.get(pool).slots.iter().enumerate().filter_map(move |(ordinal, slot)| {
            let id = ServerId { pool, ordinal: ordinal as u32, generation: slot.generation };
            slot.parked.as_ref().map(|server| (id, server, slot.idle_since, slot.close_needed))
        })
    }
}

impl<S> Pool<S> {
    /// A server for a client, or for its place in a `lane`.
    pub(super) fn grant_idle(
        &mut self,
        pool: PoolId,
        client: ClientRef,
        lane: Option<u64>,
        fits: impl Fn(&S) -> bool,
        now: Instant,
    ) -> Option<Acquired<S>> {
        if let Some(id) = lane.and_then(|lane| self.link_idle(pool, lane)) {
            return Some(Acquired::Linked(id));
        }
        let (ordinal, server) = self.take_idle(client, fits, now)?;
        Some(self.granted(pool, ordinal, server, now))
    }

    /// A server for a client that has other parameters than the client.
    pub(super) fn grant_unlike(
        &mut self,
        pool: PoolId,
        client: ClientRef,
        fingerprint: u32,
        now: Instant,
    ) -> Option<Acquired<S>> {
        let ordinal = self.idle.pop_unlike(fingerprint)?;
        let (ordinal, server) = self.unpark(ordinal, client)?;
        Some(self.granted(pool, ordinal, server, now))
    }

    fn granted(&mut self, pool: PoolId, ordinal: u32, server: S, now: Instant) -> Acquired<S> {
        let slot = &mut self.slots[ordinal as usize];
        slot.state = State::Active;
        let id = ServerId { pool, ordinal, generation: slot.generation };
        Acquired::Granted { id, server, check: self.is_check_due(ordinal, now) }
    }

    /// Whether a server that was idle until now was so past `server_check_delay`.
    pub(super) fn is_check_due(&self, ordinal: u32, now: Instant) -> bool {
        let since = self.idle.since(ordinal, self.slots[ordinal as usize].idle_since);
        self.limits.is_check_due(now.saturating_duration_since(since))
    }

    /// A program may have put a server back before it saw the queue: whoever is first in it looks once more.
    pub(super) fn look_again(&mut self, pool: PoolId, now: Instant) -> Option<Acquired<S>> {
        if !self.idle.is_shared() || self.waiting.len() != 1 || self.paused {
            return None;
        }
        let waiter = *self.waiting.first_key_value()?.1;
        let granted = self.grant_idle(pool, waiter.client, waiter.lane, |_| true, now)?;
        self.waiting.clear();
        self.tell_waiters();
        Some(granted)
    }

    /// Links the lowest idle server to a client that can be fed. It stays parked.
    pub(super) fn link_idle(&mut self, pool: PoolId, lane: u64) -> Option<ServerId> {
        let Idle::Shared(shared) = &mut self.idle else { return None };
        let ordinal = shared.link_lowest(lane)?;
        Some(ServerId { pool, ordinal, generation: self.slots[ordinal as usize].generation })
    }

    /// Programs check nothing: servers that are due for `server_check_delay` wait for user space.
    pub(super) fn set_aside_unchecked(&mut self, now: Instant) {
        let Idle::Shared(shared) = &mut self.idle else { return };
        for ordinal in shared.ordinals() {
            let slot = &mut self.slots[ordinal as usize];
            let since = shared.returned_at(ordinal).map_or(slot.idle_since, |at| at.max(slot.idle_since));
            if self.limits.is_check_due(now.saturating_duration_since(since)) {
                if let Some(server) = &mut slot.parked {
                    shared.set_aside(ordinal, server);
                }
            }
        }
    }

    /// Takes an idle server for a client: the next in turn, or the one that it has just given back, or the lowest that `fits`, or the lowest. Of
    /// the last two, one that is at home at the client's worker goes first: to move it costs system calls, and a wake-up of the worker that it leaves.
    pub(super) fn take_idle(
        &mut self,
        client: ClientRef,
        fits: impl Fn(&S) -> bool,
        now: Instant,
    ) -> Option<(u32, S)> {
        let ordinal = if self.limits.round_robin {
            self.idle.pop_from(self.next_round)?
        } else {
            let slot = |ordinal: u32| &self.slots[ordinal as usize];
            let is_own = |ordinal| {
                slot(ordinal).client == Some(client)
                    && now.saturating_duration_since(slot(ordinal).idle_since) < OWN_FOR
            };
            let is_near = |ordinal| slot(ordinal).client.is_none_or(|last| last.worker == client.worker);
            let suits = |ordinal| is_near(ordinal) && slot(ordinal).parked.as_ref().is_some_and(&fits);
            self.idle
                .pop_fitting(is_own)
                .or_else(|| self.idle.pop_fitting(suits))
                .or_else(|| self.idle.pop_fitting(is_near))
                .or_else(|| self.idle.pop_from(0))?
        };
        self.unpark(ordinal, client)
    }

    /// One that has left the idle set goes to a client.
    fn unpark(&mut self, ordinal: u32, client: ClientRef) -> Option<(u32, S)> {
        self.next_round = ordinal + 1;
        let slot = &mut self.slots[ordinal as usize];
        slot.client = Some(client);
        slot.parked.take().map(|server| (ordinal, server))
    }

    /// Since when the server is idle that has been so for longest.
    pub(super) fn longest_idle_since(&self) -> Option<Instant> {
        let since = |ordinal: u32| {
            // Bits that a program sets late stay.
            let slot = self.slots.get(ordinal as usize).filter(|slot| slot.state == State::Idle)?;
            Some(self.idle.since(ordinal, slot.idle_since))
        };
        self.idle.ordinals().into_iter().filter_map(since).min()
    }

    pub(super) fn take_oldest_idle(&mut self) -> Option<(u32, S)> {
        let mut ordinals = self.idle.ordinals();
        ordinals
            .sort_by_cached_key(|&ordinal| self.idle.since(ordinal, self.slots[ordinal as usize].idle_since));
        // A program may have taken one meanwhile; there are others. Each is tried once: a bit that a program sets late, of a server that
        // is gone or that user space has, stays.
        ordinals.into_iter().find_map(|ordinal| {
            let server =
                if self.idle.remove(ordinal) { self.slots[ordinal as usize].parked.take() } else { None };
            server.map(|server| (ordinal, server))
        })
    }
}
