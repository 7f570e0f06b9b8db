// SPDX-License-Identifier: Apache-2.0
//! Sources in kernel lanes. Their programs tell in a ring what they forward; here it goes the way of what user space forwards itself.
//!
//! Worker 0 is woken by the ring and calls the others. Whoever takes a client from its lane reads the ring first, so a source is always
//! known up to the byte that user space handles next, or known to have a hole.
//!
//! A client of a mirror in `mode = sync` *waits* in its lane: programs tell each request as it comes, it goes on to the mirror, and
//! when that has answered, and no sooner, the lane takes the next one. What comes earlier comes up, and is held here as ever. With
//! `sync_each = transaction` the same is true of transactions.
//!
//! For others, and for those, the ring is read when a transaction ends. Whether a mirror is on is judged then: one that was switched on in the meantime gets the
//! transaction, from its beginning.

use std::time::{Duration, Instant};

use underpass_sockmap::{TapBatch, TapStream, TapTaken, TapWaits, Tapped};

use super::Role;
use crate::client::Phase;
use crate::lanes::monotonic_ns;
use crate::table::Key;
use crate::worker::{Again, Worker};

/// The programs' clock and ours, read together.
#[derive(Clone, Copy)]
struct Clock {
    now: Instant,
    now_ns: u64,
}

impl Clock {
    fn read() -> Self {
        Self { now: Instant::now(), now_ns: monotonic_ns() }
    }

    fn at(self, ns: u64) -> Instant {
        let ago = Duration::from_nanos(self.now_ns.saturating_sub(ns));
        self.now.checked_sub(ago).unwrap_or(self.now)
    }
}

impl Worker {
    /// A client is about to be given to its lane. False: it must not be, because its mirrors would not hear of it.
    pub(in crate::worker) fn tap_begin(&mut self, key: Key) -> bool {
        let reader = u32::from(self.index);
        let waits = self.source(key).and_then(|source| source.awaits_mirrors());
        let is_behind = waits.is_some() && !self.mirrors_behind(key, false).is_empty();
        let Some(client) = self.clients.get_mut(key) else { return false };
        let is_source =
            matches!(client.mirror.as_deref(), Some(Role::Source(source)) if !source.taps.is_empty());
        let Some(lane) = &mut client.lane else { return false };
        let datapath = &lane.lanes.datapath;
        if !datapath.has_tap() {
            return !is_source;
        }
        let mark = datapath.set_client_tap(lane.slot, is_source.then_some(reader)).and_then(|mark| {
            let stream = TapStream::new(mark);
            if let Some(waits) = waits {
                datapath.set_mirrored(lane.slot, (!is_behind).then_some(stream.position()), waits)?;
            }
            Ok(stream)
        });
        match mark {
            Ok(stream) => {
                lane.tap = is_source.then_some(stream);
                lane.waits = waits;
                if is_source {
                    self.tapped.insert(lane.slot.index(), key);
                }
                let now = self.now;
                if let Some(source) = self.source(key) {
                    source.let_go(now);
                }
                true
            }
            Err(error) => {
                log::error!("kernel lanes: set_client_tap: {error}");
                false
            }
        }
    }

    /// A client has been taken from its lane: its source hears the rest. False if the ring must be looked at again.
    pub(in crate::worker) fn tap_taken(&mut self, key: Key) -> bool {
        let Some(lane) = self.clients.get(key).and_then(|client| client.lane.as_ref()) else { return true };
        if lane.tap.is_none() {
            return true;
        }
        let (lanes, slot) = (lane.lanes.clone(), lane.slot);
        match lanes.datapath.sort_taps() {
            Ok(true) => self.read_taps(),
            Ok(false) => return false,
            // What is missing counts as lost.
            Err(error) => log::error!("kernel lanes: {error}"),
        }
        let Ok(mark) = lanes.datapath.tap_mark_of(slot) else { return true };
        let taken = self.with_tap(key, |worker, stream| {
            let clock = Clock::read();
            stream.taken(mark, |event| worker.told(key, clock, &event))
        });
        if taken == Some(TapTaken::Broken) {
            self.source_broken(key, true);
        }
        if let Some(lane) = self.clients.get_mut(key).and_then(|client| client.lane.as_mut()) {
            lane.tap = None;
        }
        true
    }

    /// The ring has something: sorted by workers, and each is told.
    pub(in crate::worker) fn tap_events(&mut self) {
        let Some(lanes) = self.shared.lanes.clone() else { return };
        let mut readers = Vec::new();
        if let Err(error) = lanes.datapath.drain_taps(&mut readers) {
            log::error!("kernel lanes: {error}");
        }
        for reader in readers {
            match u16::try_from(reader) {
                Ok(reader) if reader == self.index => self.read_taps(),
                Ok(reader) => self.post(reader, Box::new(|worker| worker.read_taps())),
                Err(_) => {}
            }
        }
    }

    /// Passes what waits for this worker to the sources.
    fn read_taps(&mut self) {
        let Some(lanes) = self.shared.lanes.clone() else { return };
        let mut batch = TapBatch::default();
        lanes.datapath.take_taps(self.index.into(), &mut batch);
        let clock = Clock::read();
        for record in batch.iter() {
            let Some(&key) = self.tapped.get(&record.client) else { continue };
            self.with_tap(key, |worker, stream| {
                stream.record(&record, |event| worker.told(key, clock, &event));
            });
        }
    }

    /// A client that waits in its lane: if its mirrors have answered all that was told of it, the lane takes what it says next.
    pub(in crate::worker) fn mirror_lets_on(&mut self, key: Key) {
        let Some(client) = self.clients.get(key).filter(|client| matches!(client.phase, Phase::Lane)) else {
            return;
        };
        let Some(lane) = client.lane.as_ref() else { return };
        let Some(waits) = lane.waits else { return };
        let Some(position) = lane.tap.as_ref().map(TapStream::position) else { return };
        let Some(Role::Source(source)) = client.mirror.as_deref() else { return };
        if source.is_streamed()
            && self.mirrors_behind(key, false).is_empty()
            && let Err(error) = lane.lanes.datapath.set_mirrored(lane.slot, Some(position), waits)
        {
            log::error!("kernel lanes: set_mirrored: {error}");
        }
    }

    /// A mirror came on, or is about to, since this client was given to its lane: it is to wait for it there.
    pub(super) fn tap_late(&mut self, key: Key) {
        let Some(client) = self.clients.get(key).filter(|client| matches!(client.phase, Phase::Lane)) else {
            return;
        };
        let (Some(lane), Some(Role::Source(source))) = (&client.lane, client.mirror.as_deref()) else {
            return;
        };
        if source.awaits_mirrors() > lane.waits {
            self.again.push(Again::LaneClient(key));
        }
    }

    /// The same for all that rest in lanes.
    pub(super) fn taps_late(&mut self) {
        for key in self.clients.keys() {
            self.tap_late(key);
        }
    }

    /// A client that rests in its lane may have transactions that nothing tells of: the last ones before the ring had no room.
    pub(super) fn tap_sweep(&mut self, key: Key) {
        let Some(client) = self.clients.get(key).filter(|client| matches!(client.phase, Phase::Lane)) else {
            return;
        };
        let Some(lane) = client.lane.as_ref() else { return };
        let (lanes, slot) = (lane.lanes.clone(), lane.slot);
        let Some(stream) = &lane.tap else { return };
        let Ok(mark) = lanes.datapath.tap_mark_of(slot) else { return };
        if !stream.lags(&mark) || !lanes.datapath.sort_taps().unwrap_or(false) {
            return;
        }
        self.read_taps();
        self.with_tap(key, |worker, stream| {
            let clock = Clock::read();
            stream.settle(&mark, |event| worker.told(key, clock, &event));
        });
    }

    /// Lends a client's stream, which cannot stay in the client meanwhile.
    fn with_tap<T>(&mut self, key: Key, run: impl FnOnce(&mut Self, &mut TapStream) -> T) -> Option<T> {
        let mut stream = self.clients.get_mut(key)?.lane.as_mut()?.tap.take()?;
        let result = run(self, &mut stream);
        if let Some(lane) = self.clients.get_mut(key).and_then(|client| client.lane.as_mut()) {
            lane.tap = Some(stream);
        }
        Some(result)
    }

    /// What a source said or heard in its lane.
    fn told(&mut self, key: Key, clock: Clock, event: &Tapped<'_>) {
        match *event {
            Tapped::Lost(count) => return self.source_lost(key, count),
            Tapped::Broken => return self.source_broken(key, false),
            Tapped::End => {
                self.mirror_boundary(key);
                let lane = self.clients.get(key).and_then(|client| client.lane.as_ref());
                if lane.is_some_and(|lane| lane.waits.is_some()) {
                    // If it did not go to a mirror, none will say that it has been executed.
                    self.again.push(Again::Client(key));
                }
                return self.tap_late(key);
            }
            _ => {}
        }
        let Some(client) = self.clients.get_mut(key) else { return };
        let waits = client.lane.as_ref().and_then(|lane| lane.waits);
        let comes_now = waits == Some(TapWaits::Statements);
        let Some(role) = client.mirror.as_deref_mut() else { return };
        match *event {
            Tapped::Begin => role.before_request(&client.side, &client.parameters, comes_now),
            Tapped::Request { bytes, was_busy, at_ns } => {
                role.request(bytes, was_busy, clock.at(at_ns));
                if comes_now {
                    self.mirror_stream(key);
                    self.again.push(Again::Client(key));
                }
            }
            Tapped::Response { bytes, at_ns } => role.response(bytes, clock.at(at_ns)),
            _ => {}
        }
    }
}
