// SPDX-License-Identifier: Apache-2.0
//! Hand-over between this worker and the kernel lanes. The contract is the sockmap crate's page; the order of the calls here is its.
//!
//! A client that rests between transactions is *offered* to its lane; what the lane cannot or must not carry comes *up* again, at the head
//! of a request or in the middle of a transaction, and user space goes on where the lane stood.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use underpass_console::rows::Replication;
use underpass_pool::ServerId;
use underpass_pool::core::ClientRef;
use underpass_pool::link::{LaneState, Status};
use underpass_sockmap::{
    Claim, ClientStats, Event, Give, LinkState, Reason, ServerSlot, StreamState, Taken, TransactionStatus,
};

use super::{Again, Entry, Farewell, Source, Worker, stats, token};
use crate::client::{Client, Phase, key_of};
use crate::lanes::{ClientLane, Lanes, leave_server, monotonic_ns, watch_client};
use crate::logging::log_socket;
use crate::server::{Server, Work};
use crate::shared::lock;
use crate::table::Key;
use crate::why::{Own, Why};

/// A client whose requests a lane refuses by their nature again and again is not offered again for this long.
const REFUSED_PAUSE: Duration = Duration::from_millis(500);

/// Bytes that may wait to be read behind what lane D redirected to the same socket and that does not take. There the kernel charges them to
/// nobody, and flow control does not see them.
const STUCK_MAX: u64 = 4 << 20;

/// What the programs know of the times of a client that a lane carries.
pub(super) struct LaneTimes {
    /// When it was last active.
    pub active: Instant,
    /// Since when its query runs.
    pub query: Option<Instant>,
    /// The same for its transaction.
    pub transaction: Option<Instant>,
    /// Whether it has a server.
    pub is_linked: bool,
}

impl Client {
    /// Notes bytes read from the socket.
    #[inline]
    pub(crate) fn count_read(&mut self, count: usize) {
        if let Some(lane) = &mut self.lane {
            lane.read_total += count as u64;
        }
    }

    /// Whether the lane that carries it has given it a server at this moment.
    pub(crate) fn is_linked_in_lane(&self) -> bool {
        self.lane.as_ref().is_some_and(|lane| {
            lane.lanes.datapath.client_info(lane.slot).is_ok_and(|info| info.server.is_some())
        })
    }

    /// Since when its lane keeps what it said, for want of a server.
    pub(crate) fn kept_since(&self, now: Instant) -> Option<Instant> {
        let lane = self.lane.as_ref().filter(|_| matches!(self.phase, Phase::Lane))?;
        let since_ns = lane.lanes.datapath.client_info(lane.slot).ok()?.kept_since_ns?;
        Some(now.checked_sub(Duration::from_nanos(monotonic_ns().saturating_sub(since_ns))).unwrap_or(now))
    }

    /// Whether it may have said something that nobody has read. What woke the worker may have been read since; of a socket in its map the
    /// programs have counted every byte.
    fn has_unread(&self) -> bool {
        let counted = |lane: &ClientLane| lane.lanes.datapath.has_unread(lane.slot, lane.read_total);
        self.readable && self.lane.as_deref().is_none_or(|lane| counted(lane).unwrap_or(true))
    }

    /// Whether user space may write to it now: nothing that a lane forwarded is still on its way.
    #[inline]
    pub(crate) fn is_clear(&mut self) -> bool {
        self.lane.as_mut().is_none_or(|lane| lane.is_clear())
    }

    /// Whether more than [`STUCK_MAX`] bytes of a client that is not clear wait to be read.
    pub(crate) fn is_flooding(&self) -> bool {
        self.lane.as_ref().is_some_and(|lane| {
            lane.lanes.datapath.unread(lane.slot, lane.read_total).is_ok_and(|unread| unread > STUCK_MAX)
        })
    }
}

impl Server {
    /// As [`Client::is_flooding`].
    pub(crate) fn is_flooding(&self) -> bool {
        self.lane.as_ref().is_some_and(|lane| lane.unread() > STUCK_MAX)
    }

    /// As [`Client::is_clear`].
    #[inline]
    pub(crate) fn is_clear(&mut self) -> bool {
        self.lane.as_mut().is_none_or(|lane| lane.is_clear())
    }
}

impl Worker {
    /// A server that is clean, into its map, if its pool is carried: after its login.
    pub(super) fn lane_register_server(&mut self, key: Key) {
        let Some(lanes) = self.shared.lanes.clone() else { return };
        let epoll = self.shared.mailboxes[self.index as usize].epoll.clone();
        let Some(server) = self.server(key) else { return };
        let pool = server.pool.clone();
        if let (Some(pool), true) = (pool.lane(), server.inbox.is_empty()) {
            lanes.register_server(server, pool.slot, epoll);
        }
    }

    /// Offers a client that rests between transactions to its lane. What its outbox holds back goes to the socket right afterwards
    /// ([`Self::send_held_back`]): a client that answers at once finds its lane open.
    pub(super) fn lane_offer(&mut self, key: Key) {
        if self.shared.lanes.is_none() {
            return;
        }
        let outcome = match self.clients.get(key).map(|client| &client.phase) {
            Some(&Phase::Linked(server)) => return self.lane_offer_session(key, server),
            Some(Phase::Idle) => self.lane_give(key),
            _ => return,
        };
        if let (Err(own), Some(client)) = (outcome, self.clients.get_mut(key)) {
            client.why = own.into();
        }
    }

    /// Gives an idle client to its lane, or says why not.
    fn lane_give(&mut self, key: Key) -> Result<(), Own> {
        let (Some(lanes), Some(client)) = (&self.shared.lanes, self.clients.get_mut(key)) else {
            return Ok(());
        };
        if lanes.is_silent {
            return Err(Own::Unexplained);
        }
        let Some(of_client) = &client.pool else { return Err(Own::NoPlace) };
        if of_client.lane().is_none() {
            return Err(of_client.lane_refused());
        }
        let Some(pool) = of_client.carries() else { return Err(Own::ServerNone) };
        let session = of_client.is_session();
        let now = self.now;
        let rests = |lane: &ClientLane| lane.not_before.is_some_and(|until| now < until);
        // A replication client is about to be linked to a server of its own.
        let refusals = [
            (client.replication != Replication::None, Own::Replication),
            (pool.pressure.is_high(self.now), Own::Contended),
            (client.ended, Own::HangUp),
            // Before what follows, which comes of it: the answer of a client that rests is not held back for an offer, so the next request may be here.
            (client.lane.as_deref().is_some_and(rests), Own::Rest),
            (client.has_unread() || !client.inbox.is_empty(), Own::Unread),
            (!client.outbox.is_unhindered(), Own::Unwritten),
        ];
        if let Some((_, own)) = refusals.into_iter().find(|(is_so, _)| *is_so) {
            return Err(own);
        }
        let (lanes, pool) = (lanes.clone(), pool.slot);
        let me = ClientRef { worker: self.index, slot: key.index, generation: key.generation };
        if client.lane.is_none() {
            lanes.register_client(client, pool, me)?;
        }
        let fingerprint = client.parameters.fingerprint();
        let Some(lane) = &mut client.lane else { return Err(Own::ClientRefused) };
        if let Some(statements) = client.side.named_statements() {
            lane.tell_statements(statements);
        }
        // What was forwarded to it must be in its socket, or its count would be wrong for ever.
        if !lane.is_clear() {
            return Err(Own::BehindLane);
        }
        lane.carried_at_give =
            lanes.datapath.client_info(lane.slot).map_or(0, |info| info.stats.request_bytes);
        let (slot, read_total) = (lane.slot, lane.read_total);
        lane.session = session;
        let _ = lanes.datapath.set_client_fingerprint(slot, fingerprint);
        let _ = lanes.datapath.set_client_pinned(slot, session);
        if !self.tap_begin(key) {
            return Err(Own::Tap);
        }
        let Some(client) = self.clients.get_mut(key) else { return Ok(()) };
        let epoll = &self.shared.mailboxes[self.index as usize].epoll;
        watch_client(client, epoll, token(Source::Client, key), true);
        let unwritten = client.outbox.held() as u64;
        let own = match lanes.datapath.give_client_before(slot, read_total, unwritten) {
            Ok(Give::Done) => {
                client.phase = Phase::Lane;
                client.why = Why::default();
                lanes.given.fetch_add(1, Ordering::Relaxed);
                return Ok(());
            }
            Ok(Give::Unread { .. }) => Own::Unread,
            Ok(Give::Busy | Give::Ended) => Own::Busy,
            Err(error) => {
                log_socket!(Error, client.label(), "lane", "kernel lanes: give_client: {error}");
                Own::Failed
            }
        };
        if let Some(lane) = &mut client.lane {
            lane.tap = None;
        }
        // Something came in meanwhile; watching it again announces it.
        watch_client(client, epoll, token(Source::Client, key), false);
        Err(own)
    }

    /// Gives a session that rests between two transactions to its lane, both directions and the link. The end of its response, which its
    /// outbox holds back, is written in between: the client that answers at once finds its lane open.
    pub(super) fn lane_offer_session(&mut self, key: Key, server_key: Key) {
        let Some(lanes) = self.shared.lanes.clone() else { return };
        let outcome = self.lane_give_session(key, server_key, &lanes);
        if let (Err(own), Some(client)) = (outcome, self.clients.get_mut(key)) {
            client.why = own.into();
        }
    }

    /// As [`Self::lane_give`], for a session.
    fn lane_give_session(&mut self, key: Key, server_key: Key, lanes: &Arc<Lanes>) -> Result<(), Own> {
        let me = ClientRef { worker: self.index, slot: key.index, generation: key.generation };
        let is_suspended = self.suspension.is_some();
        let epoll = &self.shared.mailboxes[self.index as usize].epoll;
        let (Some(client), Some(Entry::Here(server))) =
            (self.clients.get_mut(key), self.servers.get_mut(server_key))
        else {
            return Ok(());
        };
        if lanes.is_silent {
            return Err(Own::Unexplained);
        }
        if server.dedicated {
            return Err(Own::Replication);
        }
        let is_between = matches!(client.phase, Phase::Linked(linked) if linked == server_key)
            && matches!(server.work, Work::Client(_))
            && server.link.is_quiescent();
        if !server.pool.is_session() || !is_between {
            // Its transaction goes on, for the reason that it has.
            return Ok(());
        }
        let Some(pool) = server.pool.lane().map(|pool| pool.slot) else {
            return Err(server.pool.lane_refused());
        };
        let refusals = [
            (is_suspended, Own::Suspended),
            (client.ended, Own::HangUp),
            (client.has_unread() || !client.inbox.is_empty(), Own::Unread),
            (!client.outbox.is_unhindered(), Own::Unwritten),
            (server.readable || server.ended || !server.inbox.is_empty(), Own::ServerUnread),
            (!server.outbox.is_empty(), Own::BehindLane),
        ];
        if let Some((_, own)) = refusals.into_iter().find(|(is_so, _)| *is_so) {
            return Err(own);
        }
        if server.lane.is_none() && !server.lane_tried {
            lanes.register_server(server, pool, epoll.clone());
        }
        if server.lane.is_none() {
            return Err(server.lane_refused.unwrap_or(Own::ServerRefused));
        }
        if client.lane.is_none() {
            lanes.register_client(client, pool, me)?;
        }
        if !client.is_clear() || !server.is_clear() {
            return Err(Own::BehindLane);
        }
        let (Some(of_client), Some(of_server)) = (&mut client.lane, &server.lane) else { return Ok(()) };
        let (slot, server_slot) = (of_client.slot, of_server.slot);
        let state = LinkState { pinned: true, ..LinkState::default() };
        let linked = if of_client.linked {
            lanes.datapath.set_link_state(slot, &state)
        } else {
            lanes.datapath.link(slot, server_slot, &state)
        };
        if let Err(error) = linked {
            log_socket!(Error, client.label(), "lane", "kernel lanes: link: {error}");
            return Err(Own::Failed);
        }
        (of_client.linked, of_client.session) = (true, true);
        let (requests_read, responses_read) = (of_client.read_total, of_server.read_total);
        watch_client(client, epoll, token(Source::Client, key), true);
        leave_server(of_server, server.transport.fd(), server_key);
        // From here on it is as if a program had made the link.
        client.phase = Phase::Lane;
        client.why = Why::default();
        let id = server.id;
        let Some(entry) = self.servers.get_mut(server_key) else { return Ok(()) };
        let Entry::Here(server) = std::mem::replace(entry, Entry::Parked(id)) else { return Ok(()) };
        let parked = lock(&self.shared.core).park_linked(id, server);
        if let Err(server) = parked {
            log::error!("kernel lanes: a linked server cannot be parked");
            *entry = Entry::Here(server);
            self.close_server(server_key, "not known any more");
            return Err(Own::Failed);
        }
        let Some(client) = self.clients.get_mut(key) else { return Ok(()) };
        let mut given = lanes.datapath.give_client(slot, requests_read);
        let written = client.outbox.drain(&mut client.transport);
        if let (Ok(Give::Done), Ok(true)) = (&given, &written) {
            given = lanes.datapath.give_server(server_slot, responses_read, &StreamState::BOUNDARY);
        }
        match (given, written) {
            (Ok(Give::Done), Ok(true)) => {
                lanes.given.fetch_add(1, Ordering::Relaxed);
            }
            (_, Err(error)) => self.client_io_failed(key, &error),
            // One of the two has said something meanwhile, or the client is full.
            (outcome, _) => {
                client.why = match outcome {
                    Err(error) => {
                        log::error!("kernel lanes: giving a session: {error}");
                        Own::Failed.into()
                    }
                    Ok(_) => Own::Unread.into(),
                };
                self.again.push(Again::LaneClient(key));
            }
        }
        Ok(())
    }

    /// Whether the end of a transaction should wait for the client to be offered before it is told.
    pub(super) fn is_for_lane(client: &Client, now: Instant) -> bool {
        client.lane.as_ref().is_some_and(|lane| lane.not_before.is_none_or(|until| now >= until))
            && client
                .pool
                .as_ref()
                .and_then(|pool| Some((pool.carries()?, pool.is_session())))
                .is_some_and(|(pool, session)| session || pool.pressure.is_calm(now))
            && client.outbox.is_empty()
    }

    /// Sends what was held back until the client was in its lane, or what was to go with it was known.
    pub(super) fn send_held_back(&mut self, key: Key) {
        let Some(client) = self.clients.get_mut(key) else { return };
        if client.outbox.is_empty() {
            return;
        }
        match client.outbox.drain(&mut client.transport) {
            Ok(true) => {}
            // Until the rest is written, too, the program links nothing; but nobody watches for the socket to have room.
            Ok(false) if matches!(client.phase, Phase::Lane) => {
                if !self.lane_take(key) {
                    self.again_soon.push(Again::LaneClient(key));
                }
            }
            Ok(false) => {}
            Err(error) => self.client_io_failed(key, &error),
        }
    }

    /// Events of the programs, for clients and servers of all workers.
    pub(super) fn lane_events(&mut self) {
        let Some(lanes) = self.shared.lanes.clone() else { return };
        let mut events = Vec::new();
        if let Err(error) = lanes.datapath.drain_events(&mut events) {
            log::error!("kernel lanes: {error}");
        }
        for event in events {
            match event {
                Event::ClientUp { client, reason } => {
                    let Some(client) = lanes.client_of(client) else { continue };
                    if client.worker == self.index {
                        self.lane_client_refused(key_of(client), reason);
                    } else {
                        self.post(
                            client.worker,
                            Box::new(move |worker| worker.lane_client_refused(key_of(client), reason)),
                        );
                    }
                }
                Event::ServerUp { server, reason } => self.lane_server_up(server, Some(reason)),
                Event::PoolIdle { pool } => {
                    if let Some(pool) = lanes.pool_of(pool) {
                        self.grant_idle(pool);
                    }
                }
            }
        }
    }

    /// Takes the clients out of their lanes whose requests are kept there no more.
    pub(super) fn lanes_called(&mut self) {
        while self.shared.lanes.as_ref().is_some_and(|lanes| lanes.has_called()) {
            let Some(lanes) = self.shared.lanes.clone() else { return };
            for slot in lanes.called() {
                let Some(client) = lanes.client_of(slot) else { continue };
                if client.worker == self.index {
                    self.lane_client_up(key_of(client));
                } else {
                    self.post(client.worker, Box::new(move |worker| worker.lane_client_up(key_of(client))));
                }
            }
        }
    }

    /// Grants idle servers to those who wait, in their order.
    pub(crate) fn grant_idle(&mut self, pool: underpass_pool::PoolId) {
        loop {
            let granted = lock(&self.shared.core).grant_next(pool, self.now);
            let Some((client, since, grant)) = granted else { return };
            self.pass_grant(client, since, grant);
        }
    }

    /// A program has given a client to user space.
    fn lane_client_refused(&mut self, key: Key, reason: Reason) {
        // What a lane refuses by its nature comes again: going up each time costs more than the lane saves. So does a client that is faster than
        // its mirrors.
        let refused = matches!(
            reason,
            Reason::NamedStatement
                | Reason::UnnamedBind
                | Reason::UnnamedParse
                | Reason::NamedPortal
                | Reason::Statements
                | Reason::Batch
                | Reason::Mirror
        );
        if let (true, Some(lane)) =
            (refused, self.clients.get_mut(key).and_then(|client| client.lane.as_mut()))
        {
            let pause = lane.refused();
            lane.not_before = pause.then(|| self.now + REFUSED_PAUSE);
        }
        self.lane_client_called(key, Some(reason));
    }

    /// A client comes up from its lane for a reason that a program told.
    fn lane_client_called(&mut self, key: Key, reason: Option<Reason>) {
        if let (Some(reason), Some(client)) = (reason, self.clients.get_mut(key)) {
            if matches!(client.phase, Phase::Lane) {
                client.why = Why::Program(reason);
            }
        }
        self.lane_client_up(key);
        if reason == Some(Reason::NoServer)
            && let Some(pool) =
                self.clients.get(key).and_then(|client| client.pool.as_ref()).map(|pool| pool.id)
        {
            lock(&self.shared.core).found_none(pool);
            self.launch(pool);
        }
    }

    /// For tests: takes some clients out of their lanes, at moments that nothing else would choose.
    pub(super) fn lane_flip(&mut self) {
        let Some(one_in) = self.shared.lanes.as_ref().map(|lanes| lanes.flip).filter(|&one_in| one_in > 0)
        else {
            return;
        };
        for key in self.clients.keys() {
            // A linear congruential generator is random enough to miss no order of events for long.
            self.flips =
                self.flips.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let dice = (self.flips >> 33) as u32;
            if !dice.is_multiple_of(one_in)
                || !matches!(self.clients.get(key).map(|client| &client.phase), Some(Phase::Lane))
            {
                continue;
            }
            self.lane_client_up(key);
            if (dice / one_in).is_multiple_of(2) {
                self.lane_offer(key);
            }
        }
    }

    /// A client comes up from its lane: user space goes on.
    pub(super) fn lane_client_up(&mut self, key: Key) {
        if !matches!(self.clients.get(key).map(|client| &client.phase), Some(Phase::Lane)) {
            return;
        }
        if !self.lane_take(key) {
            self.again_soon.push(Again::LaneClient(key));
            return;
        }
        self.lane_resume(key);
    }

    /// User space goes on with a client that it has taken.
    pub(super) fn lane_resume(&mut self, key: Key) {
        if self.suspension.is_some() {
            return;
        }
        match self.clients.get(key).map(|client| &client.phase) {
            Some(Phase::Idle) => self.first_request(key),
            Some(&Phase::Linked(server)) => {
                // The link of a session has not ended: one of the two has something to say.
                if self.server(server).is_some_and(|s| s.link.is_quiescent() && !s.pool.is_session()) {
                    return self.transaction_over(server);
                }
                self.forward_requests(key, server);
                if let Some(Entry::Here(_)) = self.servers.get(server) {
                    self.forward_responses(server);
                }
            }
            _ => {}
        }
    }

    /// Takes a client out of the kernel's hands: it is idle or linked afterwards. False if a program was just running.
    pub(super) fn lane_take(&mut self, key: Key) -> bool {
        let since = self.clients.get(key).and_then(|client| self.lane_times(client));
        let Some(client) = self.clients.get_mut(key) else { return true };
        let Some(lane) = &mut client.lane else { return true };
        let lanes = lane.lanes.clone();
        let mut taken = match lanes.datapath.take(lane.slot) {
            Ok(Some(taken)) => taken,
            Ok(None) => return false,
            Err(error) => {
                log_socket!(Error, client.label(), "lane", "kernel lanes: take: {error}");
                return true;
            }
        };
        let kept = taken.kept.take();
        if let Some(client) = self.clients.get_mut(key) {
            client.kept_at = kept.as_ref().and_then(|kept| {
                self.now.checked_sub(Duration::from_nanos(monotonic_ns().saturating_sub(kept.at_ns)))
            });
            client.inbox.extend_from_slice(kept.as_ref().map_or(&[], |kept| &kept.bytes));
        }
        if let Some(server) = taken.ended {
            lanes.doubt(server);
            self.again_soon.push(Again::LaneServer(server, None));
        }
        // Not sooner: a transaction may have ended until then, and a client that leaves is not asked again.
        self.lane_collect(key);
        if !self.tap_taken(key) {
            return false;
        }
        let Some(client) = self.clients.get_mut(key) else { return true };
        let Some(lane) = &mut client.lane else { return true };
        // The lane has carried requests: one of them may have been a Parse of the unnamed statement, whose text nobody here knows.
        let carried = lanes.datapath.client_info(lane.slot).map_or(u64::MAX, |info| info.stats.request_bytes);
        if std::mem::replace(&mut lane.carried_at_give, carried) != carried {
            client.side.forget_unnamed();
        }
        lane.drained = false;
        lane.fed = false;
        lanes.taken.fetch_add(1, Ordering::Relaxed);
        client.why = match taken.reason {
            Some(reason) => Why::Program(reason),
            // An event has brought the reason already.
            None if client.why != Why::default() => client.why,
            None if client.ended => Own::HangUp.into(),
            None => Own::Taken.into(),
        };
        client.phase = Phase::Idle;
        client.readable = true;
        lane.linked = taken.server.is_some();
        watch_client(
            client,
            &self.shared.mailboxes[self.index as usize].epoll,
            token(Source::Client, key),
            false,
        );
        if let Some(slot) = taken.server {
            self.lane_adopt(key, slot, &taken, since);
            self.pay_fed(key);
        } else if let Some(lane) = self.clients.get_mut(key).and_then(|client| client.lane.as_mut()) {
            // Only a server that answers more often than it was asked to can have ended the link before it had all.
            lane.owed.clear();
        }
        true
    }

    /// A link that the lane made and user space continues. `since`: see [`Self::lane_times`].
    fn lane_adopt(&mut self, key: Key, slot: ServerSlot, taken: &Taken, since: Option<LaneTimes>) {
        let Some(lanes) = self.shared.lanes.clone() else { return };
        let server = lanes.server_of(slot).and_then(|id| lock(&self.shared.core).unpark_linked(id));
        let Some(server_key) = server.and_then(|server| self.take_home(server)) else {
            log::error!("kernel lanes: a linked server is not parked");
            return;
        };
        let now = self.now;
        let (Some(client), Some(Entry::Here(server))) =
            (self.clients.get_mut(key), self.servers.get_mut(server_key))
        else {
            return;
        };
        server.link.begin();
        server.ending = false;
        server.link.adopt(LaneState {
            outstanding: taken.link.pending.into(),
            status: match taken.link.status {
                TransactionStatus::Idle => Status::Idle,
                TransactionStatus::InTransaction => Status::Transaction,
                TransactionStatus::Failed => Status::Failed,
            },
            copy_in: taken.link.copy_in,
            extended: taken.link.extended,
            unnamed: taken.link.unnamed,
            open: taken.link.batch,
            request_left: taken.request.need,
            response_left: taken.response.need,
            response_head: taken.response.head_len,
        });
        server.inbox = taken.response.head[..usize::from(taken.response.head_len)].to_vec();
        server.work = Work::Client(key);
        server.readable = true;
        server.request_at = now;
        if let Some(lane) = &mut server.lane {
            lane.drained = false;
        }
        client.phase = Phase::Linked(server_key);
        let (query, transaction) = since.map_or((None, None), |since| (since.query, since.transaction));
        client.transaction_at = (!taken.link.is_idle()).then(|| transaction.unwrap_or(now));
        client.query_at = server.link.is_busy().then(|| query.unwrap_or(now));
    }

    /// A server that a lane may be using hangs up.
    pub(super) fn lane_server_gone(&mut self, id: ServerId) {
        let slot = lock(&self.shared.core).parked_server(id).and_then(|server| {
            server.ended = true;
            server.lane.as_ref().map(|lane| lane.slot)
        });
        if let Some(slot) = slot {
            self.lane_server_up(slot, None);
        }
    }

    /// A server comes up, for `reason` if a program told one: whose is it?
    pub(super) fn lane_server_up(&mut self, slot: ServerSlot, reason: Option<Reason>) {
        let Some(lanes) = self.shared.lanes.clone() else { return };
        let id = lanes.server_of(slot);
        // Under one lock: between the two, another worker could put it back and a program link it.
        let (claim, owned) = {
            let mut core = lock(&self.shared.core);
            let claim = lanes.datapath.claim_server(slot);
            let owned =
                id.filter(|_| matches!(claim, Ok(Claim::Owned))).and_then(|id| core.unpark_claimed(id));
            (claim, owned)
        };
        match claim {
            Ok(Claim::Busy) => self.again_soon.push(Again::LaneServer(slot, reason)),
            Ok(Claim::Linked(client)) => {
                if let Some(client) = lanes.client_of(client) {
                    if client.worker == self.index {
                        self.lane_client_called(key_of(client), reason);
                    } else {
                        self.post(
                            client.worker,
                            Box::new(move |worker| worker.lane_client_called(key_of(client), reason)),
                        );
                    }
                }
            }
            Ok(Claim::Owned) => {
                // Nobody's: it is listened to at whatever worker this is.
                if let Some(key) = owned.and_then(|server| self.take_home(server)) {
                    if lanes.is_doubted(slot) {
                        return self.close_server(key, "its client left without its last answer, perhaps");
                    }
                    let now = self.now;
                    if let Some(server) = self.server(key) {
                        // As of one that speaks in user space.
                        server.request_at = now;
                    }
                    self.forward_responses(key);
                    self.rest_again(key);
                }
            }
            Err(error) => {
                // It left its map between the client's end and the note of the doubt.
                lanes.forget_doubted(slot);
                log::debug!("kernel lanes: claim_server: {error}");
            }
        }
    }

    /// The link of a client that user space took over is at its end.
    pub(super) fn lane_unlink(&mut self, key: Key) {
        if let Some(lane) = self.clients.get_mut(key).and_then(|client| client.lane.as_mut()) {
            lane.unlink();
        }
    }

    /// Adds what a lane did for a client to the statistics, when it is in user space's hands or has no link any more.
    pub(super) fn lane_collect(&mut self, key: Key) {
        let Some(lane) = self.clients.get(key).and_then(|client| client.lane.as_ref()) else { return };
        if let Ok(info) = lane.lanes.datapath.client_info(lane.slot) {
            self.lane_count(key, info.stats);
        }
    }

    /// The same of a client that a lane carries: what is certain by now.
    pub(super) fn lane_collect_carried(&mut self, key: Key) {
        let Some(lane) = self.clients.get(key).and_then(|client| client.lane.as_ref()) else { return };
        if let Ok(Some(stats)) = lane.lanes.datapath.settled_stats(lane.slot) {
            self.lane_count(key, stats);
        }
    }

    fn lane_count(&mut self, key: Key, now: ClientStats) {
        let Some(client) = self.clients.get_mut(key) else { return };
        let (Some(lane), Some(pool)) = (&mut client.lane, &client.pool) else { return };
        let added = lane.counted.advance(now);
        let meter = stats::meter(&mut self.meters, pool.id);
        meter.stats.xact_count += added.xacts;
        meter.stats.server_assignment_count += u64::from(added.links);
        meter.stats.query_count += added.queries;
        meter.stats.received += added.request_bytes;
        meter.stats.sent += added.response_bytes;
        meter.stats.xact_time += added.xact_ns / 1000;
        meter.stats.query_time += added.query_ns / 1000;
        meter.stats.wait_time += added.wait_ns / 1000;
        // Of several since the last look only their sum is known.
        for _ in 0..added.waits {
            meter.latency.wait.record(added.wait_ns / 1000 / added.waits);
        }
    }

    /// The same for all clients that lanes carry now.
    pub(crate) fn lanes_collect(&mut self) {
        let carried: Vec<Key> = self
            .clients
            .iter()
            .filter(|(_, client)| matches!(client.phase, Phase::Lane))
            .map(|(key, _)| key)
            .collect();
        carried.into_iter().for_each(|key| self.lane_collect_carried(key));
    }

    /// A client could not be taken just now.
    pub(super) fn close_client_later(&mut self, key: Key, farewell: Farewell) {
        let index = self.index;
        self.post(index, Box::new(move |worker| worker.close_client(key, farewell)));
    }

    /// Times of a client that a lane carries.
    pub(super) fn lane_times(&self, client: &Client) -> Option<LaneTimes> {
        let lane = client.lane.as_ref()?;
        let info = lane.lanes.datapath.client_info(lane.slot).ok()?;
        let now_ns = monotonic_ns();
        let at = |ns: u64| self.now.checked_sub(Duration::from_nanos(now_ns.saturating_sub(ns)));
        // What is fed to a server passes no program.
        let active = at(info.active_ns).map_or(client.request_at, |at| at.max(client.request_at));
        let is_linked = info.server.is_some();
        let in_transaction = is_linked && !(info.link.pinned && info.link.is_idle());
        Some(LaneTimes {
            active,
            query: (is_linked && info.link.pending > 0).then(|| at(info.query_start_ns)).flatten(),
            transaction: in_transaction.then(|| at(info.xact_start_ns)).flatten(),
            is_linked,
        })
    }
}
