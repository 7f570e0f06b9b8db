// SPDX-License-Identifier: Apache-2.0
//! Pools, limits, the queue of waiting clients and the idle servers: who may have which server connection.
//!
//! One [`Core`] serves all threads, behind one mutex. It knows identifiers and parks idle servers (`S`, whatever the caller's server
//! object is); it never touches a socket and never blocks. Time is passed in as [`Instant`].
//!
//! Invariants:
//! - a slot is in exactly one [`State`]; only `Idle` slots have a parked server and a bit in the idle set;
//! - while a client waits in a pool, the pool has no idle server that it could have: releases go to the head of the queue;
//! - connections of a pool, of a database and of a user never exceed their limits, whatever thread asks.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use foldhash::fast::RandomState;

use crate::idle::IdleSet;

mod closing;
mod counts;
mod failing;
mod parked;

pub use closing::CloseReason;
use closing::Old;
pub use counts::PoolCounts;
use parked::Idle;

/// A pool, by its place. The generation tells the pools apart that had one place one after the other: who still names one that is gone
/// ([`Core::remove`]) names an empty pool that grants nothing and opens nothing, never its successor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PoolId {
    index: u32,
    generation: u32,
}

impl PoolId {
    /// The pool's place. No two pools that exist have the same; a later one may have it again.
    #[must_use]
    pub const fn index(self) -> usize {
        self.index as usize
    }
}

/// A server connection of a pool. The generation tells successive connections in one slot apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ServerId {
    /// The pool.
    pub pool: PoolId,
    /// Slot within the pool; the idle set's ordinal.
    pub ordinal: u32,
    /// Counts the connections that used the slot.
    pub generation: u32,
}

/// A client as the core knows it: where to find it. The generation keeps a late grant from reaching a successor in the same slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ClientRef {
    /// Worker thread that owns the client.
    pub worker: u16,
    /// Slot at that worker.
    pub slot: u32,
    /// Generation of the slot.
    pub generation: u32,
}

/// Place in a queue; smaller came earlier.
pub type Ticket = u64;

/// Limits and times of one pool, as configured.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolLimits {
    /// Connections (`pool_size`), or [`PoolLimits::UNLIMITED`].
    pub size: u32,
    /// Connections kept open (`min_pool_size`).
    pub size_min: u32,
    /// Extra connections once somebody waited for `reserve_timeout` (`reserve_pool_size`).
    pub reserve: u32,
    /// `reserve_pool_timeout`.
    pub reserve_timeout: Duration,
    /// `max_db_connections`; 0 = no limit.
    pub database_max: u32,
    /// `max_user_connections`; 0 = no limit.
    pub user_max: u32,
    /// `server_lifetime`; zero = a connection serves once.
    pub lifetime: Duration,
    /// `server_idle_timeout`; zero = no limit.
    pub idle_timeout: Duration,
    /// `server_check_delay`: idle for longer = checked before use, and shown as `used`. Zero = always checked, `None` = never.
    pub check_delay: Option<Duration>,
    /// `server_round_robin`.
    pub round_robin: bool,
    /// `server_login_retry`: pause after a failed connection.
    pub login_retry: Duration,
}

impl PoolLimits {
    /// The `size` of a pool that is limited by its database and its user only. It keeps no minimum, as in PgBouncer (janitor.c,
    /// `check_pool_size`).
    pub const UNLIMITED: u32 = u32::MAX;

    /// Whether a server that was idle for so long is to be checked before it is used.
    #[must_use]
    pub fn is_check_due(&self, idle_for: Duration) -> bool {
        self.check_delay.is_some_and(|delay| delay.is_zero() || idle_for > delay)
    }

    /// Of a pool that has nothing.
    pub const NONE: Self = Self {
        size: 0,
        size_min: 0,
        reserve: 0,
        reserve_timeout: Duration::ZERO,
        database_max: 0,
        user_max: 0,
        lifetime: Duration::ZERO,
        idle_timeout: Duration::ZERO,
        check_delay: None,
        round_robin: false,
        login_retry: Duration::ZERO,
    };
}

/// What a slot is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// No connection.
    Free,
    /// Connecting or logging in.
    Login,
    /// Linked to a client.
    Active,
    /// In the idle set.
    Idle,
    /// Checked, reset or rolled back before it may be idle again.
    Tested,
    /// Held back because a cancel request for it is under way.
    BeingCanceled,
}

#[derive(Debug)]
struct Slot<S> {
    state: State,
    generation: u32,
    /// The idle server itself.
    parked: Option<S>,
    connected_at: Instant,
    idle_since: Instant,
    /// Close instead of using again (RECONNECT, changed configuration, ...).
    close_needed: bool,
    /// It is to go when it comes to rest: its lifetime is over, or there are too many. See [`Pool::mark_over`] and [`Pool::mark_surplus`].
    is_due: bool,
    /// PostgreSQL has refused this login. It may go on: see [`Core::refused`].
    is_refused: bool,
    /// Cancel requests under way for it.
    cancels: u32,
    /// The client that had it last, at whose worker it is at home.
    client: Option<ClientRef>,
}

#[derive(Debug, Clone, Copy)]
struct Waiter {
    client: ClientRef,
    since: Instant,
    /// Connecting had failed, or was just failing, when it queued: it hopes for a connection that stood then, and for nothing else.
    after_failure: bool,
    /// Its place in a lane, if its request can be fed.
    lane: Option<u64>,
}

#[derive(Debug)]
struct Pool<S> {
    /// Of the [`PoolId`].
    generation: u32,
    database: u32,
    user: u32,
    limits: PoolLimits,
    slots: Vec<Slot<S>>,
    idle: Idle<S>,
    waiting: BTreeMap<Ticket, Waiter>,
    /// Slots that are not Free.
    connections: u32,
    logins: u32,
    next_round: u32,
    paused: bool,
    /// Whether `min_pool_size` means this pool now: see [`Core::keep_minimum`].
    keeps_minimum: bool,
    /// A program found no idle server: see [`Core::found_none`].
    found_none: bool,
    /// Last failed connection, for `server_login_retry`.
    failed_at: Option<Instant>,
    /// There was a pause since then: the failure tells those who waited through it nothing.
    failed_before_pause: bool,
    /// Connections that are to close when they come to rest.
    old: Option<Old<S>>,
    /// When the last connection was given up because its lifetime was over.
    last_over: Option<Instant>,
}

/// Answer to [`Core::acquire`].
#[derive(Debug)]
pub enum Acquired<S> {
    /// Here is one. `check` says that it was idle past `server_check_delay`.
    Granted {
        /// Its identity.
        id: ServerId,
        /// The server.
        server: S,
        /// Whether it must be checked first.
        check: bool,
    },
    /// This parked server is linked to the client, which can be fed: see [`crate::SharedIdle::link_lowest`].
    Linked(ServerId),
    /// The client is in the queue. Call [`Core::launch`] to see whether a connection should be opened.
    Queued(Ticket),
}

/// What the client at the head of the queue gets: see [`Core::grant_next`].
#[derive(Debug)]
pub enum Grant<S> {
    /// The server itself.
    Server {
        /// It.
        server: S,
        /// Whether it must be checked first, as in [`Acquired::Granted`].
        check: bool,
    },
    /// As [`Acquired::Linked`].
    Linked(ServerId),
}

/// Answer to [`Core::release`].
#[derive(Debug)]
pub enum Released<S> {
    /// The longest-waiting client gets it.
    Grant {
        /// The client.
        client: ClientRef,
        /// Since when it waited.
        since: Instant,
        /// The server, still at the releasing worker's hands.
        server: S,
        /// Whether it must be checked first: with a `server_check_delay` of zero, unless it has just logged in.
        check: bool,
    },
    /// It is parked.
    Parked,
    /// It must be closed; its slot is free already.
    Close(S, CloseReason),
    /// A cancel request is under way: keep it until [`Core::cancel_done`].
    Held(S),
    /// It has something to say (lanes only): listen, then release again.
    Unready(S),
}

/// What [`Core::launch`] says.
#[derive(Debug)]
pub enum Launch<S> {
    /// Open a connection for this slot; tell [`Core::release`] when it is ready, [`Core::closed`] if it fails.
    Open {
        /// The slot.
        id: ServerId,
        /// It comes out of the reserve.
        from_reserve: bool,
    },
    /// First close this idle server of another pool, then ask again.
    Evict(ServerId, S),
    /// Refuse these, which wait no more: the last connection that they queued for has closed, and logins fail. Then ask again.
    Refuse(Vec<(ClientRef, Ticket)>),
    /// Nothing to do now.
    Not,
}

/// The one set of pools.
#[derive(Debug)]
pub struct Core<S> {
    pools: Vec<Pool<S>>,
    /// Places in `pools` of those that were removed.
    free: Vec<u32>,
    /// What a removed pool is to those who still name it.
    gone: Pool<S>,
    by_name: HashMap<(u32, u32), PoolId, RandomState>,
    next_ticket: Ticket,
    database_connections: HashMap<u32, u32, RandomState>,
    user_connections: HashMap<u32, u32, RandomState>,
}

/// Logins of one pool that may be under way at a time while connections succeed.
const LOGINS_MAX: u32 = 4;

impl<S> Default for Core<S> {
    fn default() -> Self {
        Self {
            pools: Vec::new(),
            free: Vec::new(),
            gone: Pool::gone(0),
            by_name: HashMap::default(),
            next_ticket: 1 << 32, // room below for those put back to the head
            database_connections: HashMap::default(),
            user_connections: HashMap::default(),
        }
    }
}

impl<S> Core<S> {
    /// The pool of a database and user (numbers given by the caller), made if there is none.
    pub fn pool(&mut self, database: u32, user: u32, limits: impl FnOnce() -> PoolLimits) -> PoolId {
        if let Some(&id) = self.by_name.get(&(database, user)) {
            return id;
        }
        let index = self.free.pop().unwrap_or(self.pools.len() as u32);
        if index as usize == self.pools.len() {
            self.pools.push(Pool::gone(0));
        }
        let place = &mut self.pools[index as usize];
        let id = PoolId { index, generation: place.generation };
        *place = Pool {
            database,
            user,
            limits: limits(),
            paused: false,
            keeps_minimum: true,
            ..Pool::gone(id.generation)
        };
        self.by_name.insert((database, user), id);
        id
    }

    /// Forgets a pool that has no connection and no queue; another one may have its place then. False if it has any.
    pub fn remove(&mut self, id: PoolId) -> bool {
        let Some(place) = self.existing(id) else { return true };
        if place.connections > 0 || !place.waiting.is_empty() {
            return false;
        }
        let name = (place.database, place.user);
        // After four billion pools a place is given up rather than let a number mean two.
        let next = place.generation.checked_add(1);
        *place = Pool::gone(next.unwrap_or(u32::MAX));
        self.by_name.remove(&name);
        self.free.extend(next.map(|_| id.index));
        true
    }

    /// New limits after a reload.
    pub fn set_limits(&mut self, pool: PoolId, limits: PoolLimits) {
        if let Some(pool) = self.existing(pool) {
            pool.limits = limits;
            pool.tell_full();
        }
    }

    /// Whether connections are opened for `min_pool_size`: not for a pool that nobody would use them of.
    pub fn keep_minimum(&mut self, pool: PoolId, keeps: bool) {
        if let Some(pool) = self.existing(pool) {
            pool.keeps_minimum = keeps;
        }
    }

    /// The limits of a pool.
    pub fn limits(&self, pool: PoolId) -> &PoolLimits {
        &self.get(pool).limits
    }

    fn get(&self, pool: PoolId) -> &Pool<S> {
        let place = self.pools.get(pool.index());
        place.filter(|place| place.generation == pool.generation).unwrap_or(&self.gone)
    }

    fn at(&mut self, pool: PoolId) -> &mut Pool<S> {
        match self.pools.get_mut(pool.index()) {
            Some(place) if place.generation == pool.generation => place,
            _ => &mut self.gone,
        }
    }

    /// For what would change the pool that stands for those that are gone.
    fn existing(&mut self, pool: PoolId) -> Option<&mut Pool<S>> {
        self.pools.get_mut(pool.index()).filter(|place| place.generation == pool.generation)
    }

    /// Asks for a server for `client`; with `lane`, its place in a kernel lane, for one that it can be fed to.
    pub fn acquire(
        &mut self,
        pool: PoolId,
        client: ClientRef,
        lane: Option<u64>,
        now: Instant,
    ) -> Acquired<S> {
        self.acquire_fitting(pool, client, lane, |_| true, now)
    }

    /// The same, and of the idle servers rather one that `fits`: has the client's parameters, which else must be set first. In a pool with a lane
    /// the programs' set has its own order.
    pub fn acquire_fitting(
        &mut self,
        pool: PoolId,
        client: ClientRef,
        lane: Option<u64>,
        fits: impl Fn(&S) -> bool,
        now: Instant,
    ) -> Acquired<S> {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let pool_id = pool;
        let pool = self.at(pool);
        if !pool.paused && pool.waiting.is_empty() {
            if let Some(granted) = pool.grant_idle(pool_id, client, lane, fits, now) {
                return granted;
            }
        }
        // Who asks during a pause waits for what comes after it, as with PgBouncer.
        let after_failure = !pool.paused && (pool.failed_at.is_some() || pool.is_refused());
        pool.waiting.insert(ticket, Waiter { client, since: now, after_failure, lane });
        pool.tell_waiters();
        pool.look_again(pool_id, now).unwrap_or(Acquired::Queued(ticket))
    }

    /// The same for a client that came up from its lane because a program found idle servers, and none with its parameters, which have this
    /// `fingerprint`. It gets one of those, if one is left, although one like it may have come back since: which clients can have in their lane.
    /// So the servers come to have the parameters that are asked for; else one that has just been opened would have its own until no
    /// other is idle.
    pub fn acquire_unlike(
        &mut self,
        pool: PoolId,
        client: ClientRef,
        fingerprint: u32,
        now: Instant,
    ) -> Acquired<S> {
        let pool_id = pool;
        let pool = self.at(pool);
        if !pool.paused && pool.waiting.is_empty() {
            if let Some(granted) = pool.grant_unlike(pool_id, client, fingerprint, now) {
                return granted;
            }
        }
        self.acquire(pool_id, client, None, now)
    }

    /// The same for one who asks whether there is a server at all: where connecting has failed, it waits for the next attempt, and is not
    /// refused for the last one.
    pub fn acquire_to_learn(&mut self, pool: PoolId, client: ClientRef, now: Instant) -> Acquired<S> {
        let acquired = self.acquire(pool, client, None, now);
        if let Acquired::Queued(ticket) = acquired
            && let Some(waiter) = self.at(pool).waiting.get_mut(&ticket)
        {
            waiter.after_failure = false;
        }
        acquired
    }

    /// Gives the longest-waiting client an idle server, if there are both: after a program put one back, or after RESUME.
    pub fn grant_next(&mut self, pool: PoolId, now: Instant) -> Option<(ClientRef, Instant, Grant<S>)> {
        let p = self.at(pool);
        if let Idle::Shared(idle) = &p.idle {
            idle.serve();
        }
        if p.paused {
            return None;
        }
        let first = *p.waiting.first_key_value()?.1;
        let grant = match first.lane.and_then(|lane| p.link_idle(pool, lane)) {
            Some(id) => Grant::Linked(id),
            None => {
                let (ordinal, server) = p.take_idle(first.client, |_| true, now)?;
                p.slots[ordinal as usize].state = State::Active;
                Grant::Server { server, check: p.is_check_due(ordinal, now) }
            }
        };
        p.waiting.pop_first();
        p.tell_waiters();
        Some((first.client, first.since, grant))
    }

    /// Asks again for a client whose server turned out dead: another idle one if there is any, else the head of the queue.
    pub fn requeue(&mut self, pool: PoolId, client: ClientRef, since: Instant, now: Instant) -> Acquired<S> {
        let pool_id = pool;
        let fresh = self.next_ticket;
        let pool = self.at(pool);
        // Whoever waits already has found no idle server either: the invariant holds for this client too.
        if !pool.paused && pool.waiting.is_empty() {
            if let Some(granted) = pool.grant_idle(pool_id, client, None, |_| true, now) {
                return granted;
            }
        }
        let ticket = match pool.waiting.first_key_value() {
            Some((first, _)) => first - 1,
            None => fresh,
        };
        pool.waiting.insert(ticket, Waiter { client, since, after_failure: false, lane: None });
        pool.tell_waiters();
        // Two waiters never share a ticket: the head counts down from where the tail counts up.
        self.next_ticket = self.next_ticket.max(ticket + 1);
        self.at(pool_id).look_again(pool_id, now).unwrap_or(Acquired::Queued(ticket))
    }

    /// The client has waited since then, and not in this queue.
    pub fn waited_since(&mut self, pool: PoolId, ticket: Ticket, since: Instant) {
        if let Some(waiter) = self.at(pool).waiting.get_mut(&ticket) {
            waiter.since = since;
        }
    }

    /// The client waits no more. False if it was not in the queue: then a grant is on its way to it.
    pub fn cancel_wait(&mut self, pool: PoolId, ticket: Ticket, client: ClientRef) -> bool {
        let pool = self.at(pool);
        let waits = pool.waiting.get(&ticket).is_some_and(|waiter| waiter.client == client);
        if waits {
            pool.waiting.remove(&ticket);
            pool.tell_waiters();
        }
        waits
    }

    /// A program has found no idle server for a client. Until user space looked, another came back, so nobody waits; but without a lane
    /// the client would have waited, and a connection been opened. The next [`Core::launch`] opens one, if `pool_size` allows it and
    /// nobody loses one for it: else the pool would stay short of its peaks, and each of them be served by user space.
    pub fn found_none(&mut self, pool: PoolId) {
        if let Some(pool) = self.existing(pool) {
            pool.found_none = true;
        }
    }

    /// Whether the pool should open a connection now: somebody waits or the minimum is not reached, and every limit allows it.
    pub fn launch(&mut self, pool: PoolId, now: Instant) -> Launch<S> {
        let stranded = self.take_stranded(pool);
        if !stranded.is_empty() {
            return Launch::Refuse(stranded);
        }
        let found_none = self.existing(pool).is_some_and(|pool| std::mem::take(&mut pool.found_none));
        let p = self.get(pool);
        let limits = &p.limits;
        let is_waited_for = p.waiting.len() as u32 > p.logins;
        let keeps_minimum = p.keeps_minimum && limits.size != PoolLimits::UNLIMITED;
        let lacks = p.logins == 0 && (found_none || keeps_minimum && p.connections < limits.size_min);
        if !(is_waited_for || lacks) || p.paused {
            return Launch::Not;
        }
        if let Some(failed_at) = p.failed_at {
            // After a failure one attempt at a time, and not before server_login_retry.
            if p.logins > 0 || now.saturating_duration_since(failed_at) < limits.login_retry {
                return Launch::Not;
            }
        }
        if p.logins >= LOGINS_MAX {
            return Launch::Not;
        }
        let mut from_reserve = false;
        if p.connections >= limits.size {
            let waited =
                p.waiting.values().next().map_or(Duration::ZERO, |w| now.saturating_duration_since(w.since));
            if !is_waited_for
                || limits.reserve == 0
                || waited < limits.reserve_timeout
                || p.connections >= limits.size.saturating_add(limits.reserve)
            {
                return Launch::Not;
            }
            from_reserve = true;
        }
        let (database, user) = (p.database, p.user);
        let (database_max, user_max) = (limits.database_max, limits.user_max);
        // A minimum, or one to spare, does not take the room that was made for somebody who waits.
        if !is_waited_for
            && self.pools.iter().any(|other| {
                let shares =
                    (database_max > 0 && other.database == database) || (user_max > 0 && other.user == user);
                shares
                    && other.waiting.len() as u32 > other.logins
                    && other.connections < other.limits.size
                    && !other.paused
            })
        {
            return Launch::Not;
        }
        let database_full = database_max > 0 && count(&self.database_connections, database) >= database_max;
        let user_full = user_max > 0 && count(&self.user_connections, user) >= user_max;
        if database_full || user_full {
            // The minimum of one pool takes nothing from another: both would go on for ever.
            if !is_waited_for {
                return Launch::Not;
            }
            let of = |for_database: bool, for_user: bool| {
                self.by_idleness(|index, other| {
                    index != pool.index()
                        && (!for_database || other.database == database)
                        && (!for_user || other.user == user)
                })
            };
            let mut victims = of(database_full, user_full);
            // If no one connection counts for both limits, two go, one after the other.
            if victims.is_empty() && !of(false, true).is_empty() {
                victims = of(true, false);
            }
            return self.evict(victims);
        }
        Launch::Open { id: self.open(pool, now), from_reserve }
    }

    /// The indices of the pools that `may` lose an idle connection and have one, that with the longest idle one first.
    fn by_idleness(&self, may: impl Fn(usize, &Pool<S>) -> bool) -> Vec<usize> {
        let pools = self.pools.iter().enumerate();
        let losers = pools.filter(|&(index, pool)| pool.waiting.is_empty() && may(index, pool));
        let mut dated: Vec<_> =
            losers.filter_map(|(index, pool)| Some((pool.longest_idle_since()?, index))).collect();
        dated.sort_unstable();
        dated.into_iter().map(|(_, index)| index).collect()
    }

    /// Takes the idle connection that was used longest ago, to be closed, from the first of these pools (by their indices) that has one still:
    /// a program may have been faster.
    fn evict(&mut self, victims: Vec<usize>) -> Launch<S> {
        for index in victims {
            let Some((ordinal, server)) = self.pools[index].take_oldest_idle() else { continue };
            let pool = PoolId { index: index as u32, generation: self.pools[index].generation };
            let generation = self.pools[index].slots[ordinal as usize].generation;
            let id = ServerId { pool, ordinal, generation };
            self.free(id);
            return Launch::Evict(id, server);
        }
        Launch::Not
    }

    /// Takes a free slot for a new connection.
    fn open(&mut self, pool: PoolId, now: Instant) -> ServerId {
        let (database, user) = (self.at(pool).database, self.at(pool).user);
        *self.database_connections.entry(database).or_default() += 1;
        *self.user_connections.entry(user).or_default() += 1;
        let p = self.at(pool);
        let is_free = |(ordinal, slot): (usize, &Slot<S>)| {
            slot.state == State::Free && !p.idle.is_occupied(ordinal as u32)
        };
        let ordinal = p.slots.iter().enumerate().position(is_free).unwrap_or(p.slots.len());
        if ordinal == p.slots.len() {
            p.slots.push(Slot {
                state: State::Free,
                generation: 0,
                parked: None,
                connected_at: now,
                idle_since: now,
                close_needed: false,
                is_due: false,
                is_refused: false,
                cancels: 0,
                client: None,
            });
        }
        let slot = &mut p.slots[ordinal];
        slot.state = State::Login;
        slot.generation += 1;
        slot.connected_at = now;
        slot.close_needed = false;
        slot.is_due = false;
        slot.is_refused = false;
        slot.cancels = 0;
        slot.client = None;
        let id = ServerId { pool, ordinal: ordinal as u32, generation: slot.generation };
        p.connections += 1;
        p.logins += 1;
        p.tell_full();
        id
    }

    /// A slot for a connection that serves one client only and is never pooled (replication). [`Launch::Not`] if the limits allow no more and no
    /// idle connection can make room.
    pub fn open_dedicated(&mut self, pool: PoolId, now: Instant) -> Launch<S> {
        let p = self.get(pool);
        let full = |max: u32, have: u32| max > 0 && have >= max;
        let pool_full = p.connections >= p.limits.size.saturating_add(p.limits.reserve);
        let database_full = full(p.limits.database_max, count(&self.database_connections, p.database));
        let user_full = full(p.limits.user_max, count(&self.user_connections, p.user));
        if !(pool_full || database_full || user_full) {
            return Launch::Open { id: self.open(pool, now), from_reserve: false };
        }
        let victims = self.by_idleness(|index, other| {
            (!pool_full || index == pool.index())
                && (!database_full || other.database == p.database)
                && (!user_full || other.user == p.user)
        });
        self.evict(victims)
    }

    /// A dedicated connection has logged in.
    pub fn dedicated_ready(&mut self, id: ServerId) {
        let Some(slot) = self.slot(id) else { return };
        if slot.state == State::Login {
            slot.state = State::Active;
            self.at(id.pool).logins -= 1;
        }
    }

    fn slot(&mut self, id: ServerId) -> Option<&mut Slot<S>> {
        let slot = self.at(id.pool).slots.get_mut(id.ordinal as usize)?;
        (slot.generation == id.generation && slot.state != State::Free).then_some(slot)
    }

    /// A server that was linked, tested or logging in is clean and free.
    pub fn release(&mut self, id: ServerId, server: S, now: Instant) -> Released<S> {
        let Some(slot) = self.slot(id) else { return Released::Close(server, CloseReason::CloseNeeded) };
        let was_login = slot.state == State::Login;
        if slot.cancels > 0 {
            slot.state = State::BeingCanceled;
            return Released::Held(server);
        }
        let (connected_at, close_needed, is_due) = (slot.connected_at, slot.close_needed, slot.is_due);
        let pool = self.at(id.pool);
        if was_login {
            pool.logins -= 1;
            // Connecting works again: who queued after a failure queues before the next one.
            pool.failed_at = None;
            pool.waiting.values_mut().for_each(|waiter| waiter.after_failure = false);
        }
        let close_needed =
            close_needed || pool.old.as_ref().is_some_and(|old| old.has(connected_at, &server));
        let reason = if close_needed {
            Some(CloseReason::CloseNeeded)
        } else if pool.connections > pool.limits.size.saturating_add(pool.limits.reserve) {
            Some(CloseReason::PoolShrunk)
        } else if !was_login && (is_due || pool.is_over(connected_at, now)) {
            pool.last_over = Some(now);
            Some(CloseReason::Lifetime)
        } else {
            None
        };
        if let Some(reason) = reason {
            self.free(id);
            return Released::Close(server, reason);
        }
        if !pool.paused {
            if let Some((_, waiter)) = pool.waiting.pop_first() {
                pool.tell_waiters();
                let slot = &mut pool.slots[id.ordinal as usize];
                (slot.state, slot.client) = (State::Active, Some(waiter.client));
                let check = !was_login && pool.limits.is_check_due(Duration::ZERO);
                return Released::Grant { client: waiter.client, since: waiter.since, server, check };
            }
        }
        let slot = &mut pool.slots[id.ordinal as usize];
        slot.state = State::Idle;
        slot.idle_since = now;
        let server = slot.parked.insert(server);
        if pool.idle.push(id.ordinal, server) {
            return Released::Parked;
        }
        slot.state = State::Tested;
        match slot.parked.take() {
            Some(server) => Released::Unready(server),
            None => Released::Parked,
        }
    }

    /// The server is being checked, reset or rolled back.
    pub fn testing(&mut self, id: ServerId) {
        if let Some(slot) = self.slot(id) {
            slot.state = State::Tested;
        }
    }

    /// The server that was tested on behalf of a client is the client's.
    pub fn tested_for_client(&mut self, id: ServerId) {
        if let Some(slot) = self.slot(id) {
            slot.state = State::Active;
        }
    }

    /// A cancel request for this server sets out: it must not go to another client before [`Core::cancel_done`].
    pub fn cancel_begun(&mut self, id: ServerId) -> bool {
        self.slot(id).map(|slot| slot.cancels += 1).is_some()
    }

    /// The cancel request has been taken in by PostgreSQL, or failed. True if the server was held back and can be released now.
    pub fn cancel_done(&mut self, id: ServerId) -> bool {
        let Some(slot) = self.slot(id) else { return false };
        slot.cancels = slot.cancels.saturating_sub(1);
        if slot.cancels == 0 && slot.state == State::BeingCanceled {
            slot.state = State::Tested;
            return true;
        }
        false
    }

    /// Whether a cancel request for this server is under way: what it is asked now could be cancelled by it.
    pub fn is_canceling(&mut self, id: ServerId) -> bool {
        self.slot(id).is_some_and(|slot| slot.cancels > 0)
    }

    /// Stops or starts granting. Clients queue meanwhile.
    pub fn set_paused(&mut self, pool: PoolId, paused: bool) {
        let Some(pool) = self.existing(pool) else { return };
        pool.paused = paused;
        if paused {
            // What stood when they queued goes, so RESUME is what they wait for.
            pool.failed_before_pause = true;
            pool.waiting.values_mut().for_each(|waiter| waiter.after_failure = false);
        }
        if let Idle::Shared(idle) = &pool.idle {
            idle.set_closed(paused);
        }
        pool.tell_full();
    }

    /// Whether the pool is paused.
    pub fn is_paused(&self, pool: PoolId) -> bool {
        self.get(pool).paused
    }

    /// Whether this connection is still counted as logging in.
    pub fn is_login(&mut self, id: ServerId) -> bool {
        self.slot(id).is_some_and(|slot| slot.state == State::Login)
    }
}

fn count(counts: &HashMap<u32, u32, RandomState>, key: u32) -> u32 {
    counts.get(&key).copied().unwrap_or(0)
}

impl<S> Pool<S> {
    /// A pool of nothing for nobody, which it stays: it is paused, and keeps no minimum.
    fn gone(generation: u32) -> Self {
        Self {
            generation,
            database: u32::MAX,
            user: u32::MAX,
            limits: PoolLimits::NONE,
            slots: Vec::new(),
            idle: Idle::Own(IdleSet::default()),
            waiting: BTreeMap::new(),
            connections: 0,
            logins: 0,
            next_round: 0,
            paused: true,
            keeps_minimum: false,
            found_none: false,
            failed_at: None,
            failed_before_pause: false,
            old: None,
            last_over: None,
        }
    }

    /// See [`crate::SharedIdle::set_full`]. What another pool has of `max_db_connections` or `max_user_connections` may come free without this one.
    fn tell_full(&self) {
        if let Idle::Shared(idle) = &self.idle {
            let size = self.limits.size.saturating_add(self.limits.reserve);
            let is_full =
                !self.paused && self.limits.size != PoolLimits::UNLIMITED && self.connections >= size;
            idle.set_full(is_full.then_some(self.connections));
        }
    }

    /// Programs take nothing while somebody waits.
    fn tell_waiters(&self) {
        if let Idle::Shared(idle) = &self.idle {
            idle.set_waiters(self.waiting.len() as u32);
        }
    }
}

#[cfg(test)]
mod tests;
