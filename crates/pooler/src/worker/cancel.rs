// SPDX-License-Identifier: Apache-2.0
//! Cancel requests: from clients to the server that works for them, and from the pooler when a client vanished.
//!
//! The window in which a cancel request could hit the wrong statement is closed by the core: while a request is under way, its server is
//! not given to anybody (`Core::cancel_begun`). PostgreSQL closes the connection of a CancelRequest after it has sent the signal (manual,
//! 55.2.9 "Canceling Requests in Progress"), so the end of that connection is the end of the window.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, SendFlags};
use underpass_config::{Config, Host, Peer};
use underpass_pool::core::ClientRef;
use underpass_pool::{PoolId, ServerId};
use underpass_wire::SqlState;
use underpass_wire::backend::build::{error_response, ready_for_query};
use underpass_wire::backend::{Report, Severity, TransactionStatus};

use super::{Again, Entry, Source, Worker, peer};
use crate::client::{LoginStep, Phase, key_of};
use crate::net::{self, Endpoint};
use crate::peers::{PeerCancel, Turn};
use crate::resolver::Answer;
use crate::server::{SettleStep, Work};
use crate::shared::{CancelTarget, lock};
use crate::table::Key;

/// A connection that carries a CancelRequest to PostgreSQL.
pub(crate) struct CancelConnection {
    fd: OwnedFd,
    request: Vec<u8>,
    /// The server that is held back meanwhile, and where it lives; none if the request goes to a peer.
    held: Option<(ServerId, Key)>,
    /// The pooler of `[peers]` that the request goes to, and the addresses at which it may be if it is not at this one.
    peer: Option<(u16, Vec<Endpoint>)>,
    /// The client connection that asked, closed when this is done.
    asker: Option<ClientRef>,
    pub since: Instant,
}

impl CancelConnection {
    /// The server that is meant.
    pub fn server(&self) -> Option<ServerId> {
        self.held.map(|(id, _)| id)
    }

    /// The peer that is meant, and whether it has the request already.
    pub fn peer(&self) -> Option<(u16, bool)> {
        self.peer.as_ref().map(|(peer, _)| (*peer, self.is_sent()))
    }

    /// Whether PostgreSQL has the request; else it is connected to.
    pub fn is_sent(&self) -> bool {
        self.request.is_empty()
    }

    /// Its pool.
    pub fn pool(&self) -> Option<PoolId> {
        self.server().map(|id| id.pool)
    }
}

impl Worker {
    /// A client sent a CancelRequest. Its connection stays open until the request has been carried out, as PostgreSQL's would.
    pub(super) fn cancel_requested(&mut self, asker: Key, process_id: u32, secret: &[u8]) {
        if let Some(Phase::Login(login)) = self.clients.get_mut(asker).map(|client| &mut client.phase) {
            login.step = LoginStep::Cancel;
        }
        let (key, tail) = secret.split_first_chunk::<4>().map_or((0, secret), |(head, tail)| {
            (u64::from(process_id) << 32 | u64::from(u32::from_be_bytes(*head)), tail)
        });
        let settings = self.shared.settings.load_full();
        if let Some(peer) =
            peer::other(key, settings.config.peer_id.0).and_then(|id| settings.config.peers.get(&id))
        {
            return match peer::forwarded(key) {
                Some(key) => self.cancel_at_peer(asker, peer, key, tail),
                None => {
                    log::warn!("cancel request went in circles among [peers]");
                    self.drop_client(asker);
                }
            };
        }
        let own = peer::own(key, settings.config.peer_id.0);
        let target = lock(&self.shared.cancel_keys)
            .targets
            .get(&own)
            .filter(|target| equal_in_constant_time(&target.tail, tail))
            .map(|target| target.client.worker);
        let asker = ClientRef { worker: self.index, slot: asker.index, generation: asker.generation };
        match target {
            None => {
                self.shared.cancel_keys_unknown.fetch_add(1, Ordering::Relaxed);
                log::info!("cancel request with an unknown key");
                self.cancel_answered(asker);
            }
            Some(worker) => self.cancel_at(worker, own, asker, false),
        }
    }

    /// Another pooler of `[peers]` gave this key away: it gets the request as it came, when fewer than `pool_size` are under way to it.
    fn cancel_at_peer(&mut self, asker: Key, peer: &Peer, key: u64, tail: &[u8]) {
        let mut request = Vec::new();
        let secret = [&(key as u32).to_be_bytes()[..], tail].concat();
        underpass_wire::startup::build::cancel_request(&mut request, (key >> 32) as u32, &secret);
        let asker = ClientRef { worker: self.index, slot: asker.index, generation: asker.generation };
        let cancel = PeerCancel { request, asker, since: self.now };
        let config = &self.shared.settings.load().config;
        match self.shared.peers.enter(peer.id, in_flight_max(config, peer), config.max_client_conn, cancel) {
            Turn::Now(cancel) => self.cancel_through(peer, cancel),
            Turn::Later => {}
            Turn::Refused(cancel) => {
                log::warn!("too many cancel requests for peer {}", peer.id);
                self.cancel_answered(cancel.asker);
            }
        }
    }

    /// Sends a request whose turn has come to `peer`.
    fn cancel_through(&mut self, peer: &Peer, cancel: PeerCancel) {
        let (peer_id, port) = (peer.id, peer.port);
        let name = match &peer.host {
            Host::Ip(address) => {
                let address = Endpoint::Tcp(SocketAddr::new(*address, port));
                return self.cancel_to(vec![address], peer_id, cancel);
            }
            Host::Name(name) => name.clone(),
            host @ (Host::Unix(_) | Host::Abstract(_)) => {
                let path = host.socket_path(port).unwrap_or_default();
                return self.cancel_to(vec![Endpoint::Unix(path, port)], peer_id, cancel);
            }
        };
        let settings = self.shared.settings.load();
        let (max_age, max_age_failed) = (settings.config.dns_max_ttl, settings.config.dns_nxdomain_ttl);
        if let Some(answer) = self.shared.resolver.cached(&name, max_age, max_age_failed) {
            return self.cancel_to_any(answer, port, peer_id, cancel);
        }
        let (shared, index) = (self.shared.clone(), self.index);
        self.shared.resolver.resolve(name, move |answer| {
            shared.mailboxes[index as usize]
                .post(Box::new(move |worker| worker.cancel_to_any(answer, port, peer_id, cancel)));
        });
    }

    fn cancel_to_any(&mut self, answer: Answer, port: u16, peer: u16, cancel: PeerCancel) {
        match answer {
            Ok(addresses) => {
                let endpoint = |address: &IpAddr| Endpoint::Tcp(SocketAddr::new(*address, port));
                self.cancel_to(addresses.iter().map(endpoint).collect(), peer, cancel);
            }
            Err(error) => {
                log::warn!("cancel request for a peer: {error}");
                self.cancel_answered(cancel.asker);
                self.peer_left(peer);
            }
        }
    }

    /// Sends a request to a peer at the first of `addresses` that can be reached; the asker is answered when that is done, or cannot be.
    fn cancel_to(&mut self, addresses: Vec<Endpoint>, peer: u16, cancel: PeerCancel) {
        let PeerCancel { request, asker, since } = cancel;
        let mut addresses = addresses.into_iter();
        while let Some(address) = addresses.next() {
            match net::connect(&address) {
                Ok(fd) => {
                    let peer = Some((peer, addresses.collect()));
                    let (held, asker) = (None, Some(asker));
                    return self.cancel_open(CancelConnection { fd, request, held, peer, asker, since });
                }
                Err(error) => log::warn!("cannot connect to {address} for a cancel request: {error}"),
            }
        }
        self.cancel_answered(asker);
        self.peer_left(peer);
    }

    /// A request could not be sent: a peer has the next of its addresses, if any, tried.
    fn cancel_failed(&mut self, key: Key) {
        let is_last = |c: &CancelConnection| c.peer.as_ref().is_none_or(|(_, others)| others.is_empty());
        if self.cancels.get(key).is_none_or(is_last) {
            return self.cancel_finished(key);
        }
        let Some(CancelConnection { request, peer, asker, since, .. }) = self.cancels.remove(key) else {
            return;
        };
        if let (Some((peer, others)), Some(asker)) = (peer, asker) {
            self.cancel_to(others, peer, PeerCancel { request, asker, since });
        }
    }

    /// One request fewer is under way to `peer`. Posted, so that a long queue for a peer that is down is no deep recursion.
    fn peer_left(&self, peer: u16) {
        self.post(self.index, Box::new(move |worker| worker.peer_next(peer)));
    }

    fn peer_next(&mut self, peer: u16) {
        let settings = self.shared.settings.load_full();
        let known = settings.config.peers.get(&peer);
        let limit = known.map_or(u32::MAX, |known| in_flight_max(&settings.config, known));
        for cancel in self.shared.peers.leave(peer, limit) {
            match known {
                Some(known) => self.cancel_through(known, cancel),
                // RELOAD has removed it.
                None => {
                    self.cancel_answered(cancel.asker);
                    self.peer_left(peer);
                }
            }
        }
    }

    /// Requests that have waited too long for their turn.
    pub(super) fn sweep_peers(&mut self, limit: Duration) {
        for cancel in self.shared.peers.expire(limit, self.now) {
            log::warn!("cancel_wait_timeout");
            self.cancel_answered(cancel.asker);
        }
    }

    fn cancel_open(&mut self, connection: CancelConnection) {
        let connection = self.cancels.insert(|_| connection);
        let watched =
            self.cancels.get(connection).map(|c| self.watch(c.fd.as_fd(), Source::Cancel, connection));
        if !matches!(watched, Some(Ok(()))) {
            self.cancel_finished(connection);
        }
    }

    /// The asker's connection has served its purpose.
    fn cancel_answered(&mut self, asker: ClientRef) {
        if asker.worker == self.index {
            self.drop_client(key_of(asker));
        } else {
            self.post(asker.worker, Box::new(move |worker| worker.drop_client(key_of(asker))));
        }
    }

    fn cancel_at(&self, worker: u16, own: u64, asker: ClientRef, has_looked: bool) {
        self.post(worker, Box::new(move |worker| worker.cancel_client(own, asker, has_looked)));
    }

    /// A cancel request with the key `own`. The key alone leads to the client, which may have changed its worker while the request was on its way.
    fn cancel_client(&mut self, own: u64, asker: ClientRef, has_looked: bool) {
        let target = lock(&self.shared.cancel_keys).targets.get(&own).map(|target| target.client);
        let Some(target) = target else { return self.cancel_answered(asker) };
        if target.worker != self.index {
            return self.cancel_at(target.worker, own, asker, false);
        }
        let key = key_of(target);
        // Which server a lane's client is linked to is known once user space has the link; it keeps it until the answer is out.
        self.lane_client_up(key);
        let is_in_lane = self.clients.get(key).is_some_and(|client| matches!(client.phase, Phase::Lane));
        // It is on its way here; or a program was just running.
        if target.slot == CancelTarget::ON_ITS_WAY || is_in_lane {
            return self.cancel_at(self.index, own, asker, has_looked);
        }
        let Some(client) = self.clients.get(key) else { return self.cancel_answered(asker) };
        if client.on_console {
            self.console_cancelled(key);
            return self.cancel_answered(asker);
        }
        let is_mirrored = client.mirror.is_some();
        if is_mirrored {
            self.mirror_cancel(key);
        }
        let Some(client) = self.clients.get(key) else { return self.cancel_answered(asker) };
        let (linked, waits) = (client.phase_server(), matches!(client.phase, Phase::Waiting { .. }));
        if waits && !self.cancel_waiting(key, has_looked) {
            return self.cancel_at(self.index, own, asker, true);
        }
        let working = linked.filter(|&key| {
            self.server(key).is_some_and(|s| matches!(s.work, Work::Client(_)) && s.link.is_busy())
        });
        if working.is_none() && !waits && !is_mirrored && !has_looked {
            // Of one that has just arrived nothing was read yet: what it said before it asked for this is read within a turn of the loop.
            return self.cancel_at(self.index, own, asker, true);
        }
        // Where nothing is running there is nothing to cancel.
        let sent = working.is_some_and(|server| self.cancel_server(server, Some(asker)));
        if !sent {
            self.cancel_answered(asker);
        }
    }

    /// Sends PostgreSQL a CancelRequest for the server at `key`. False if that is impossible.
    pub(super) fn cancel_server(&mut self, key: Key, asker: Option<ClientRef>) -> bool {
        let now = self.now;
        let Some(server) = self.server(key) else { return false };
        server.request_at = now;
        let Some((process_id, secret)) = server.cancel_key.split_first_chunk::<4>() else { return false };
        let mut request = Vec::new();
        underpass_wire::startup::build::cancel_request(&mut request, u32::from_be_bytes(*process_id), secret);
        let (id, address) = (server.id, server.address.clone());
        let fd = match net::connect(&address) {
            Ok(fd) => fd,
            Err(error) => {
                log::warn!("cannot connect to {address} for a cancel request: {error}");
                return false;
            }
        };
        if !lock(&self.shared.core).cancel_begun(id) {
            return false;
        }
        let held = Some((id, key));
        self.cancel_open(CancelConnection { fd, request, held, peer: None, asker, since: now });
        true
    }

    pub(super) fn cancel_event(&mut self, key: Key) {
        let Some(connection) = self.cancels.get_mut(key) else { return };
        if !connection.request.is_empty() {
            match rustix::net::send(&connection.fd, &connection.request, SendFlags::NOSIGNAL) {
                // A request of some tens of bytes goes whole into an empty buffer.
                Ok(_) => connection.request.clear(),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::NOTCONN) => return,
                Err(error) => {
                    log::warn!("cancel request failed: {error}");
                    return self.cancel_failed(key);
                }
            }
        }
        match rustix::net::recv(&connection.fd, &mut [0u8; 64], RecvFlags::empty()) {
            Err(rustix::io::Errno::AGAIN) => {}
            // PostgreSQL closes without an answer.
            _ => self.cancel_finished(key),
        }
    }

    /// Nobody waits any longer for PostgreSQL to take the request in. If it has been sent it stays in a socket from which a server that was stopped or
    /// overloaded reads it some time, so whatever runs in that connection then is cancelled: nobody else is to get it.
    pub(super) fn cancel_late(&mut self, key: Key) {
        let sent = self.cancels.get(key).filter(|connection| connection.request.is_empty());
        if let Some((id, _)) = sent.and_then(|connection| connection.held) {
            lock(&self.shared.core).retire(id);
        }
        self.cancel_finished(key);
    }

    /// The request was carried out or failed: its server may serve others again.
    pub(super) fn cancel_finished(&mut self, key: Key) {
        let Some(connection) = self.cancels.remove(key) else { return };
        if let Some((id, server)) = connection.held {
            self.cancel_released(id, server);
        }
        if let Some(asker) = connection.asker {
            self.cancel_answered(asker);
        }
        if let Some((peer, _)) = connection.peer {
            self.peer_left(peer);
        }
    }

    fn cancel_released(&mut self, id: ServerId, server: Key) {
        let (released, pending) = {
            let mut core = lock(&self.shared.core);
            (core.cancel_done(id), core.is_canceling(id))
        };
        match self.servers.get(server) {
            Some(Entry::Here(s)) if s.id == id => match s.work {
                Work::Resting if released => self.give_back(server),
                // It came to rest and waited for this.
                Work::Settling { step: SettleStep::Draining, .. } if !pending && s.link.is_settled() => {
                    self.settled(server);
                }
                _ => {}
            },
            _ => {}
        }
    }

    /// A client in the queue gives up its request: it is answered as PostgreSQL answers a cancelled statement, and may go on. False if that must
    /// be looked at again, because its server is on its way.
    fn cancel_waiting(&mut self, key: Key, has_looked: bool) -> bool {
        let me = ClientRef { worker: self.index, slot: key.index, generation: key.generation };
        let Some(client) = self.clients.get_mut(key) else { return true };
        let Phase::Waiting { ticket, .. } = client.phase else { return true };
        // Only a request that is here as a whole can be answered without the server.
        let Some(length) = first_request(&client.inbox) else { return true };
        // Behind what a lane forwarded before, which is microseconds from its socket; who does not read is not waited for.
        if !client.is_clear() {
            return has_looked;
        }
        let Some(pool) = &client.pool else { return true };
        if !lock(&self.shared.core).cancel_wait(pool.id, ticket, me) {
            return false;
        }
        client.inbox.drain(..length);
        client.phase = Phase::Idle;
        let mut out = Vec::new();
        error_response(
            &mut out,
            &Report::new(
                Severity::Error,
                SqlState::QUERY_CANCELED,
                "canceling statement due to user request",
            ),
        );
        ready_for_query(&mut out, TransactionStatus::Idle);
        if let Err(error) = client.outbox.send(&mut client.transport, &out) {
            self.client_io_failed(key, &error);
            return true;
        }
        // What it said behind that, and what it has said while it waited, which was announced once.
        if !client.inbox.is_empty() || client.readable || client.ended {
            self.again.push(Again::Client(key));
        }
        true
    }
}

/// Bytes of the messages up to the first that asks for a ReadyForQuery; `None` if that has not come as a whole.
fn first_request(bytes: &[u8]) -> Option<usize> {
    let mut at = 0;
    loop {
        let header = bytes[at..].first_chunk::<5>()?;
        let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]) as usize;
        at += length + 1;
        if at > bytes.len() {
            return None;
        }
        if matches!(header[0], b'Q' | b'S' | b'F') {
            return Some(at);
        }
    }
}

/// Most cancel requests under way to `peer` at the same time.
fn in_flight_max(config: &Config, peer: &Peer) -> u32 {
    peer.pool_size.unwrap_or(config.default_pool_size)
}

/// Whether two secrets are the same, in a time that does not tell where they differ.
fn equal_in_constant_time(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}
