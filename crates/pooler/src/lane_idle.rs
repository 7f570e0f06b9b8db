// SPDX-License-Identifier: Apache-2.0
//! The idle set of a pool whose servers programs take and return too, and when they keep requests for which there is none.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use underpass_pool::SharedIdle;
use underpass_sockmap::{ClientSlot, Datapath, Give, PoolSlot, ServerSlot};

use crate::lanes::{Called, hand_over, monotonic_ns, watch_server};
use crate::pressure::Pressure;
use crate::server::Server;

/// Who waits in user space goes first. After so long in which somebody always does, all wait there.
const MIXED_MAX: Duration = Duration::from_millis(100);
/// When requests are kept no more, they are not for so long: to hand over all who wait costs more than a moment without. Four times as long each time that
/// somebody always waited, up to a bound.
const REST: Duration = Duration::from_millis(250);
const REST_MAX: Duration = Duration::from_secs(30);

/// The idle set that programs draw from too. Servers that no lane carries are kept beside it.
#[derive(Debug)]
pub(crate) struct LaneIdle {
    datapath: Arc<Datapath>,
    pool: PoolSlot,
    pressure: Arc<Pressure>,
    /// As last told.
    waiters: Cell<u32>,
    /// Those that no lane carries, and those that a lane must not take.
    own: BTreeSet<u32>,
    /// No more connections are to be opened: so many there are.
    full: Cell<Option<u32>>,
    /// Programs keep requests.
    is_kept: Cell<bool>,
    /// Since when somebody has always been waiting in user space, while programs keep requests.
    waits_since: Cell<Option<Instant>>,
    /// Since when they keep none any more.
    rests_since: Cell<Option<Instant>>,
    /// For how long.
    rest: Cell<Duration>,
    /// Those whose requests are kept no more; `None` where none are.
    called: Option<Arc<Called>>,
}

impl LaneIdle {
    /// Without a server. Programs keep requests if there is somebody to tell of those that they keep no more.
    pub fn new(
        datapath: Arc<Datapath>,
        pool: PoolSlot,
        pressure: Arc<Pressure>,
        called: Option<Arc<Called>>,
    ) -> Self {
        Self {
            datapath,
            pool,
            pressure,
            waiters: Cell::new(0),
            own: BTreeSet::new(),
            full: Cell::new(None),
            is_kept: Cell::new(false),
            waits_since: Cell::new(None),
            rests_since: Cell::new(None),
            rest: Cell::new(REST),
            called,
        }
    }

    fn call(&self, clients: Vec<ClientSlot>) {
        if let Some(called) = &self.called {
            called.add(clients);
        }
    }

    /// Has programs keep requests, or not any more.
    fn decide(&self) {
        let full = self.full.get().filter(|_| self.called.is_some() && self.own.is_empty());
        let now = Instant::now();
        let since = |at: Option<Instant>| at.map(|at| now.saturating_duration_since(at));
        let keeps = if full.is_none() {
            if self.is_kept.get() {
                self.rests_since.set(Some(now));
            }
            false
        } else if self.is_kept.get() {
            let waits_long = since(self.waits_since.get()).is_some_and(|waited| waited > MIXED_MAX);
            if waits_long {
                self.rests_since.set(Some(now));
                self.rest.set((self.rest.get() * 4).min(REST_MAX));
            } else if self.waiters.get() == 0 {
                self.rest.set(REST);
            }
            !waits_long
        } else {
            // Those who wait in user space then are served before those who come, who wait in the kernel: soon there are none.
            let is_rested = since(self.rests_since.get()).is_none_or(|rested| rested > self.rest.get());
            let keeps = is_rested && self.datapath.local_servers(self.pool).ok() == full;
            if keeps {
                self.waits_since.set((self.waiters.get() > 0).then_some(now));
            }
            keeps
        };
        if keeps == self.is_kept.replace(keeps) {
            return;
        }
        self.pressure.set_kept(keeps);
        let _ = self.datapath.set_pool_keeps(self.pool, keeps);
        if !keeps {
            self.call(self.datapath.drain_queue(self.pool).unwrap_or_default());
        }
    }

    fn slot(&self, ordinal: u32) -> Option<ServerSlot> {
        self.datapath.server_at(self.pool, ordinal)
    }
}

impl SharedIdle<Box<Server>> for LaneIdle {
    fn push(&mut self, ordinal: u32, server: &mut Box<Server>) -> bool {
        if server.lane.is_none() || self.pressure.is_high(Instant::now()) {
            self.own.insert(ordinal);
            self.decide();
            return true;
        }
        let Some((slot, read_total)) = hand_over(server) else { return false };
        let _ = self.datapath.set_server_fingerprint(slot, server.parameters.fingerprint());
        match self.datapath.push_idle(slot, read_total) {
            Ok(Give::Done) => {
                self.decide();
                self.serve();
                true
            }
            other => {
                if let Err(error) = other {
                    log::error!("kernel lanes: push_idle: {error}");
                }
                watch_server(server);
                false
            }
        }
    }

    fn link_lowest(&mut self, lane: u64) -> Option<u32> {
        let slot = self.datapath.take_to_feed(ClientSlot::from_bits(lane)).ok()??;
        self.datapath.ordinal_of(slot).ok()
    }

    fn pop_from(&mut self, _from: u32) -> Option<u32> {
        // While clients are fed, those that are not leave the programs' servers alone.
        if self.pressure.is_high(Instant::now()) {
            if let Some(ordinal) = self.own.pop_first() {
                return Some(ordinal);
            }
        }
        match self.datapath.pop_idle(self.pool, None) {
            Ok(Some(slot)) => self.datapath.ordinal_of(slot).ok(),
            _ => self.own.pop_first(),
        }
    }

    fn pop_unlike(&mut self, fingerprint: u32) -> Option<u32> {
        let slot = self.datapath.pop_idle_unlike(self.pool, fingerprint).ok()??;
        self.datapath.ordinal_of(slot).ok()
    }

    fn remove(&mut self, ordinal: u32) -> bool {
        self.own.remove(&ordinal)
            || self.slot(ordinal).is_some_and(|slot| self.datapath.take_idle(slot).unwrap_or(false))
    }

    fn ordinals(&self) -> Vec<u32> {
        let mut all = self.datapath.idle_ordinals(self.pool).unwrap_or_default();
        all.extend(&self.own);
        all.sort_unstable();
        all
    }

    fn set_waiters(&self, waiters: u32) {
        if waiters > self.waiters.replace(waiters) {
            self.pressure.note(Instant::now(), waiters);
        }
        self.pressure.set_waiters(waiters);
        let _ = self.datapath.set_waiters(self.pool, waiters);
        if waiters == 0 {
            self.waits_since.set(None);
        } else if self.waits_since.get().is_none() {
            self.waits_since.set(Some(Instant::now()));
        }
        self.decide();
        if waiters == 0 {
            self.serve();
        }
    }

    fn set_closed(&self, closed: bool) {
        let _ = self.datapath.set_pool_closed(self.pool, closed);
    }

    fn set_full(&self, connections: Option<u32>) {
        self.full.set(connections);
        self.decide();
    }

    fn serve(&self) {
        if !self.is_kept.get() {
            // A program may have kept one just when the queue was emptied.
            self.call(self.datapath.drain_queue(self.pool).unwrap_or_default());
        } else if self.datapath.queue_length(self.pool).is_ok_and(|length| length > 0) {
            self.call(self.datapath.serve_queue(self.pool).unwrap_or_default());
        }
    }

    fn retire(&self, ordinal: u32) {
        if let Some(slot) = self.slot(ordinal) {
            let _ = self.datapath.set_server_retire(slot, true);
        }
    }

    fn set_aside(&mut self, ordinal: u32, server: &mut Box<Server>) {
        if self.slot(ordinal).is_some_and(|slot| self.datapath.take_idle(slot).unwrap_or(false)) {
            watch_server(server);
            self.own.insert(ordinal);
            self.decide();
        }
    }

    fn returned_at(&self, ordinal: u32) -> Option<Instant> {
        let at = self.datapath.server_active_ns(self.slot(ordinal)?).ok().filter(|&at| at > 0)?;
        Instant::now().checked_sub(Duration::from_nanos(monotonic_ns().saturating_sub(at)))
    }

    fn forget(&mut self, ordinal: u32) {
        self.own.remove(&ordinal);
    }

    fn is_occupied(&self, ordinal: u32) -> bool {
        self.slot(ordinal).is_some()
    }
}
