// SPDX-License-Identifier: Apache-2.0
//! Clients of a contended pool: their requests go through user space, where they queue, their answers through the kernel.
//!
//! Where programs keep no requests for which no server is idle (`LaneIdle::decide`), all come here while many clients share few servers; but the
//! program that forwards an answer releases the server too, and announces it when somebody waits. That leaves one receive and one send
//! for a transaction, of four. A client whose link is *fed* so is in [`Phase::Lane`] with [`ClientLane::fed`](crate::lanes::ClientLane::fed)
//! set; all else that can happen to a client of a lane happens to it as well.

use std::time::Instant;

use underpass_config::PoolMode;
use underpass_console::rows::Replication;
use underpass_pool::ServerId;
use underpass_pool::batch::Batch;
use underpass_pool::core::{ClientRef, Grant};
use underpass_sockmap::{ClientSlot, Fed, Give, LinkState, ServerSlot, StreamState};

use super::{Again, Entry, Farewell, Worker, stats};
use crate::client::{Client, Phase, key_of};
use crate::lanes::Lanes;
use crate::logging::log_socket;
use crate::server::{Server, Work};
use crate::shared::lock;
use crate::table::Key;
use crate::why::{Own, Why};

/// How often a program that is just running is waited for, a few microseconds at most.
const SETTLE_TRIES: u32 = 10_000;

fn fed(batch: &Batch) -> Fed {
    Fed {
        ready: batch.ready,
        extended: batch.extended,
        unnamed: batch.unnamed,
        named: !batch.uses.is_empty(),
    }
}

/// Whether the programs know all statements that `batch` uses on `server`.
fn has_statements(server: &Server, batch: &Batch) -> bool {
    batch.uses.iter().all(|used| server.link.statements.has(used.statement.id))
}

fn scan(lanes: &Lanes, client: &Client, bytes: &[u8]) -> Option<Batch> {
    Batch::scan(bytes, lanes.message_max, client.side.named_statements())
}

impl Worker {
    /// Whether clients of the pool of the client at `key` are fed now.
    pub(super) fn is_fed_pool(&self, key: Key) -> bool {
        let Some(pool) = self.clients.get(key).and_then(|client| client.pool.as_ref()) else { return false };
        pool.carries().is_some_and(|lane| lane.pressure.is_high(self.now))
            && pool.mode() == PoolMode::Transaction
            && !self.draining
            && self.suspension.is_none()
    }

    /// The client's place in its lane, if what it said, all of it in its inbox, can be fed to a server.
    pub(super) fn place_to_feed(&mut self, key: Key) -> Option<u64> {
        if !self.is_fed_pool(key) {
            return None;
        }
        let me = ClientRef { worker: self.index, slot: key.index, generation: key.generation };
        let lanes = self.shared.lanes.clone()?;
        let client = self.clients.get_mut(key)?;
        let pool = client.pool.as_ref()?.lane()?.slot;
        if client.replication != Replication::None
            || client.mirror.is_some()
            || client.ended
            || !client.outbox.is_empty()
            || scan(&lanes, client, &client.inbox).is_none()
            || (client.lane.is_none() && lanes.register_client(client, pool, me).is_err())
        {
            return None;
        }
        let slot = client.lane.as_ref()?.slot;
        lanes.datapath.set_client_fingerprint(slot, client.parameters.fingerprint()).ok()?;
        Some(slot.to_bits())
    }

    /// A grant for a client that can be fed: `server` is linked to it already, and parked.
    pub(crate) fn granted_linked(&mut self, client: ClientRef, server: ServerId, since: Instant) {
        let key = key_of(client);
        if matches!(self.clients.get(key).map(|client| &client.phase), Some(Phase::Waiting { .. }))
            && self.feed_parked(key, server, since)
        {
            return;
        }
        // It has left, or something is in the way: user space takes the server.
        let pool = server.pool;
        match self.unfeed(server) {
            Some(server) => self.granted(client, server, false, since),
            // It had something to say, and is listened to.
            None => self.ask_again(key, pool, since),
        }
    }

    /// The same at once, for a client that has not waited. It may be linked in user space afterwards, ready to forward: then its server.
    pub(super) fn acquired_linked(&mut self, key: Key, id: ServerId, since: Instant) -> Option<Key> {
        if self.feed_parked(key, id, since) {
            return None;
        }
        let Some(server) = self.unfeed(id).and_then(|server| self.take_home(server)) else {
            return self.acquire(key, id.pool, None);
        };
        self.granted_now(key, server, false, since);
        Some(server)
    }

    /// Takes a parked server back that a client was to be fed to.
    fn unfeed(&mut self, id: ServerId) -> Option<Box<Server>> {
        let lanes = self.shared.lanes.clone()?;
        let slot = self.parked_slot(id, |_| true)?;
        for _ in 0..SETTLE_TRIES {
            {
                // Under one lock, as in `lane_server_up`: between the two another worker could claim it and put it back.
                let mut core = lock(&self.shared.core);
                if lanes.datapath.unfeed(slot).unwrap_or(true) {
                    return core.unpark_linked(id);
                }
            }
            std::thread::yield_now();
        }
        // The program has been stopped in the middle of a chunk: until it is through, the server is nobody's.
        self.again_soon.push(Again::Unfed(slot));
        None
    }

    /// See [`Again::Unfed`]. The server is listened to, and then goes back to its pool.
    pub(super) fn unfed(&mut self, slot: ServerSlot) {
        let Some(lanes) = self.shared.lanes.clone() else { return };
        if lanes.datapath.unfeed(slot).unwrap_or(true) {
            self.lane_server_up(slot, None);
        } else {
            self.again_soon.push(Again::Unfed(slot));
        }
    }

    fn parked_slot(&self, id: ServerId, fits: impl FnOnce(&Server) -> bool) -> Option<ServerSlot> {
        let mut core = lock(&self.shared.core);
        let server = core.parked_server(id).filter(|server| fits(server))?;
        server.lane.as_ref().map(|lane| lane.slot)
    }

    /// Feeds what the client has in its inbox to a parked server that is taken for it. False: nothing was done.
    fn feed_parked(&mut self, key: Key, id: ServerId, since: Instant) -> bool {
        let Some(lanes) = self.shared.lanes.clone() else { return false };
        let Some(client) = self.clients.get(key) else { return false };
        // It may have waited through a RELOAD or a SUSPEND, or be in the middle of being told that it waits.
        let may = self.suspension.is_none()
            && client.mirror.is_none()
            && client.outbox.is_empty()
            && client
                .pool
                .as_ref()
                .is_some_and(|pool| pool.lane().is_some() && pool.mode() == PoolMode::Transaction);
        if !may {
            return false;
        }
        let Some(batch) = scan(&lanes, client, &client.inbox) else { return false };
        let Some((slot, wrote)) = client.lane.as_ref().map(|lane| (lane.slot, lane.drained)) else {
            return false;
        };
        // The answer to what it said before must be in its socket: another server's could overtake it.
        if !lanes.datapath.is_clear_to_feed(slot, wrote).unwrap_or(false) {
            return false;
        }
        let server = match batch.uses.is_empty() {
            true => lanes.slot_of(id),
            false => self.parked_slot(id, |server| has_statements(server, &batch)),
        };
        let Some(server) = server else { return false };
        if let Err(error) = lanes.datapath.feed(slot, server, fed(&batch)) {
            log::error!("kernel lanes: feed: {error}");
            return false;
        }
        self.feed_inbox_of(key, server, &batch, Some(since));
        true
    }

    /// The link stands in the kernel: the client's inbox goes to its server. `since`: when it asked, unless its grant has been counted.
    fn feed_inbox_of(&mut self, key: Key, server: ServerSlot, batch: &Batch, since: Option<Instant>) {
        let now = self.now;
        let Some(client) = self.clients.get_mut(key) else { return };
        if let Some(lanes) = &self.shared.lanes {
            lanes.fed.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
        let mut bytes = std::mem::take(&mut client.inbox);
        batch.rename(&mut bytes);
        client.phase = Phase::Lane;
        client.why = Why::default();
        client.query_at = None;
        client.transaction_at = None;
        if let Some(lane) = &mut client.lane {
            lane.fed = true;
            lane.drained = false;
        }
        if let (Some(pool), Some(since)) = (&client.pool, since) {
            let waited = now.saturating_duration_since(since).as_micros() as u64;
            client.wait_us = waited;
            let meter = stats::meter(&mut self.meters, pool.id);
            meter.stats.server_assignment_count += 1;
            meter.stats.wait_time += waited;
            meter.latency.wait.record(waited);
        }
        self.write_fed(key, server, batch, &bytes);
    }

    /// Writes what a fed client said, under the servers' names. What the server's socket does not take at once is user space's.
    fn write_fed(&mut self, key: Key, server: ServerSlot, batch: &Batch, bytes: &[u8]) {
        let now = self.now;
        let Some(lanes) = self.shared.lanes.clone() else { return };
        let Some(client) = self.clients.get_mut(key) else { return };
        client.request_at = now;
        if batch.forgets_unnamed {
            client.side.forget_unnamed();
        }
        if let Some(pool) = &client.pool {
            stats::meter(&mut self.meters, pool.id).stats.received += bytes.len() as u64;
        }
        // Whatever is behind these requests is looked at later.
        if client.readable || client.ended {
            self.again.push(Again::Client(key));
        }
        let count = lanes.datapath.write_fed(server, bytes).unwrap_or(0);
        if count == bytes.len() {
            return;
        }
        // Held, the link neither ends nor takes more, so nothing comes between; how a connection is broken shows when the rest is written.
        client.why = Own::Contended.into();
        let Some(lane) = &mut client.lane else { return };
        lane.owed.extend_from_slice(&bytes[count..]);
        if let Err(error) = lanes.datapath.hold_fed(lane.slot) {
            log::error!("kernel lanes: hold_fed: {error}");
        }
        self.again.push(Again::LaneClient(key));
    }

    /// The rest of what a client was fed to its server, which user space has by now: see [`ClientLane::owed`](crate::lanes::ClientLane::owed).
    pub(super) fn pay_fed(&mut self, key: Key) {
        let Some(client) = self.clients.get_mut(key) else { return };
        let Some(owed) = client.lane.as_mut().map(|lane| std::mem::take(&mut lane.owed)) else { return };
        let Some(server_key) = client.phase_server().filter(|_| !owed.is_empty()) else { return };
        let Some(server) = self.server(server_key) else { return };
        // Sent off when nobody is in the middle of taking the client, which a broken connection would end.
        server.outbox.hold_back_all(owed);
        self.holding_back.push(server_key);
    }

    /// A fed client says more.
    pub(super) fn fed_readable(&mut self, key: Key) {
        let Some(client) = self.clients.get_mut(key) else { return };
        let outcome = match client.transport.read(&mut self.scratch) {
            Ok(outcome) => outcome,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                client.readable = false;
                return;
            }
            Err(error) => return self.client_io_failed(key, &error),
        };
        if outcome.count == 0 {
            return self.close_client(key, Farewell::quiet("client unexpected eof"));
        }
        client.readable = outcome.maybe_more;
        client.count_read(outcome.count);
        let Some((lanes, slot)) = client.lane.as_ref().map(|lane| (lane.lanes.clone(), lane.slot)) else {
            return;
        };
        if lanes.datapath.is_linked(slot).unwrap_or(false) && self.feed_more(key, slot, outcome.count) {
            return;
        }
        let Some(client) = self.clients.get_mut(key) else { return };
        client.inbox.extend_from_slice(&self.scratch[..outcome.count]);
        match lanes.datapath.hold_fed(slot) {
            Ok(false) => {
                self.lane_collect(key);
                if let Some(client) = self.clients.get_mut(key) {
                    client.phase = Phase::Idle;
                    client.why = Own::Contended.into();
                    if let Some(lane) = &mut client.lane {
                        lane.fed = false;
                        lane.owed.clear();
                    }
                }
                self.first_request(key);
            }
            Ok(true) => {
                client.why = Own::Contended.into();
                self.lane_client_up(key);
            }
            Err(error) => log::error!("kernel lanes: hold_fed: {error}"),
        }
    }

    /// More requests for a link that stands: the rest of a transaction or of a pipeline. False: they are not for feeding, or it has just ended.
    fn feed_more(&mut self, key: Key, slot: ClientSlot, count: usize) -> bool {
        let Some(lanes) = self.shared.lanes.clone() else { return false };
        let Some(client) = self.clients.get(key) else { return false };
        let Some(batch) = scan(&lanes, client, &self.scratch[..count]) else { return false };
        if !batch.uses.is_empty() {
            let linked = lanes.datapath.client_info(slot).ok().and_then(|info| info.server);
            let id = linked.and_then(|server| lanes.server_of(server));
            if id.and_then(|id| self.parked_slot(id, |server| has_statements(server, &batch))).is_none() {
                return false;
            }
        }
        match lanes.datapath.feed_more(slot, fed(&batch)) {
            Ok(Some(server)) => {
                let mut scratch = std::mem::take(&mut self.scratch);
                batch.rename(&mut scratch[..count]);
                self.write_fed(key, server, &batch, &scratch[..count]);
                self.scratch = scratch;
                true
            }
            _ => false,
        }
    }

    /// Feeds a client to a server that user space has just granted it, and parks that with the kernel. False: nothing was done.
    pub(super) fn feed_granted(&mut self, key: Key, server_key: Key) -> bool {
        if !self.is_fed_pool(key) || self.place_of_granted(key, server_key).is_none() {
            return false;
        }
        let Some(lanes) = self.shared.lanes.clone() else { return false };
        let (Some(client), Some(Entry::Here(server))) =
            (self.clients.get_mut(key), self.servers.get_mut(server_key))
        else {
            return false;
        };
        let Some(batch) = scan(&lanes, client, &client.inbox).filter(|batch| has_statements(server, batch))
        else {
            return false;
        };
        let fingerprint = server.parameters.fingerprint();
        let Some(client_lane) = &client.lane else { return false };
        let (slot, wrote) = (client_lane.slot, client_lane.drained);
        if !lanes.datapath.is_clear_to_feed(slot, wrote).unwrap_or(false) {
            return false;
        }
        let _ = lanes.datapath.set_client_fingerprint(slot, client.parameters.fingerprint());
        let Some((server_slot, read_total)) = crate::lanes::hand_over(server) else { return false };
        let _ = lanes.datapath.set_server_fingerprint(server_slot, fingerprint);
        let state = LinkState { pending: batch.ready, extended: batch.extended, ..LinkState::default() };
        let outcome = lanes
            .datapath
            .link(slot, server_slot, &state)
            .and_then(|()| lanes.datapath.give_server(server_slot, read_total, &StreamState::BOUNDARY));
        if !matches!(outcome, Ok(Give::Done)) {
            if let Err(error) = outcome {
                log_socket!(Error, server.label(), "lane", "kernel lanes: link: {error}");
            }
            let _ = lanes.datapath.unlink(slot);
            crate::lanes::watch_server(server);
            return false;
        }
        let id = server.id;
        let work = std::mem::replace(&mut server.work, Work::Resting);
        let Some(entry) = self.servers.get_mut(server_key) else { return false };
        let Entry::Here(server) = std::mem::replace(entry, Entry::Parked(id)) else { return false };
        let parked = lock(&self.shared.core).park_linked(id, server);
        if let Err(mut server) = parked {
            // The core has forgotten it. Its place with the kernel is free only when nothing is linked to it.
            let _ = (lanes.datapath.take(slot), lanes.datapath.unlink(slot));
            server.work = work;
            *entry = Entry::Here(server);
            self.close_server(server_key, "not known any more");
            return true;
        }
        if let Err(error) = lanes.datapath.feed_linked(slot, fed(&batch)) {
            log::error!("kernel lanes: feed_linked: {error}");
        }
        self.feed_inbox_of(key, server_slot, &batch, None);
        true
    }

    /// Whether a client and the server that it was granted can go on in the kernel, both at the beginning of a transaction.
    fn place_of_granted(&mut self, key: Key, server_key: Key) -> Option<u64> {
        let Some(Entry::Here(server)) = self.servers.get(server_key) else { return None };
        let rests = server.lane.is_some()
            && matches!(server.work, Work::Client(_))
            && server.link.is_quiescent()
            && server.inbox.is_empty()
            && server.outbox.is_empty()
            && !server.readable
            && !server.ended;
        let parameters = server.parameters.clone();
        let same = self.clients.get(key).is_some_and(|client| {
            !client.inbox.is_empty() && std::sync::Arc::ptr_eq(&client.parameters, &parameters)
        });
        if rests && same { self.place_to_feed(key) } else { None }
    }

    /// Passes a grant of the core on to the worker of its client.
    pub(super) fn pass_grant(&mut self, client: ClientRef, since: Instant, grant: Grant<Box<Server>>) {
        let here = client.worker == self.index;
        match grant {
            Grant::Server { server, check } if here => self.granted(client, server, check, since),
            Grant::Server { server, check } => {
                let pass = move |worker: &mut Self| worker.granted(client, server, check, since);
                self.post(client.worker, Box::new(pass));
            }
            Grant::Linked(id) if here => self.granted_linked(client, id, since),
            Grant::Linked(id) => {
                self.post(client.worker, Box::new(move |worker| worker.granted_linked(client, id, since)));
            }
        }
    }
}
