// SPDX-License-Identifier: Apache-2.0
//! Mirroring at a worker. Three kinds of clients have a [`Role`]:
//!
//! - a *source* is a client of a mirrored database. What it says and hears is noted while it passes;
//! - a *shadow* is a session with one mirror on behalf of one source. It is a client without a socket ([`Transport::memory`]): what its source
//!   said is put into its transport and goes the way of any client's requests, over servers of the mirror's pool, statements renamed and
//!   parameters restored; what it is answered is noted and goes nowhere;
//! - a *probe*, a client without a socket too, asks a server who it is: the primary and the mirror, and for recordings any other.
//!
//! In `mode = async` a transaction is noted until it is over on the primary, then queued as a whole at the shadow, which plays one after the
//! other. In `mode = sync` a shadow gets the bytes as they come, or with `sync_each = transaction` as in `mode = async`, and the source is not read
//! while a shadow of it is behind.

mod probe;
mod shadow;
mod source;
mod tap;

use std::sync::Arc;
use std::time::Instant;

use underpass_pool::link::ClientSide;
use underpass_pool::params::SharedParameters;

pub(crate) use probe::Probe;
pub(crate) use shadow::Shadow;
pub(crate) use source::Source;

use super::Worker;
use crate::client::{Client, Phase};
use crate::mirrors::Compared;
use crate::net::Endpoint;
use crate::pool::Pool;
use crate::shared::lock;
use crate::table::Key;
use crate::transport::Transport;

/// Comparisons that a worker collects before it wakes the thread that makes them.
const BATCH: usize = 64;

/// What a client has to do with mirroring.
#[expect(
    clippy::large_enum_variant,
    reason = "a client has it behind a box of its own, and nearly all are sources or shadows"
)]
pub(crate) enum Role {
    Source(Source),
    Shadow(Shadow),
    Probe(Probe),
}

/// State of a session, to begin with on a server that has not seen it.
pub(crate) struct Restore {
    side: ClientSide,
    parameters: SharedParameters,
}

impl Restore {
    /// As a session is now; one that may only read begins its transactions so.
    pub fn of(side: &ClientSide, parameters: &SharedParameters, is_read_only: bool) -> Self {
        let mut parameters = parameters.clone();
        if is_read_only {
            // Before 14 it is not reported, and stays what `connect_query` of the pool made it.
            Arc::make_mut(&mut parameters).set("default_transaction_read_only", "on");
        }
        Self { side: side.clone(), parameters }
    }
}

impl Role {
    /// Called before the tracker sees a request: a transaction may begin. `comes_now`: nothing else of its client is forwarded before mirrors
    /// in `mode = sync` have this; a lane tells of others when they are over.
    pub fn before_request(&mut self, side: &ClientSide, parameters: &SharedParameters, comes_now: bool) {
        if let Self::Source(source) = self {
            source.before_request(side, parameters, comes_now);
        }
    }

    /// `bytes` of the client went to its server, which `was_busy` before.
    pub fn request(&mut self, bytes: &[u8], was_busy: bool, now: Instant) {
        match self {
            Self::Source(source) => source.request(bytes, was_busy, now),
            Self::Shadow(shadow) if !was_busy => shadow.answers.begin(now),
            Self::Shadow(_) | Self::Probe(_) => {}
        }
    }

    /// `bytes` came back, as the client sees them.
    pub fn response(&mut self, bytes: &[u8], now: Instant) {
        match self {
            Self::Source(source) => source.response(bytes, now),
            Self::Shadow(shadow) => shadow.answers.feed(bytes, now),
            Self::Probe(probe) => probe.response(bytes),
        }
    }
}

impl Client {
    /// Whether it rests of its own will: a session at a mirror does for as long as its client's transaction goes on here, and one that waits for its
    /// mirrors may have said something.
    pub(in crate::worker) fn is_idle(&self) -> bool {
        !self.is_silent && !matches!(self.mirror.as_deref(), Some(Role::Source(source)) if source.is_held())
    }

    /// Whether it asks a server who it is, and so whether there is one.
    pub(in crate::worker) fn is_probe(&self) -> bool {
        matches!(self.mirror.as_deref(), Some(Role::Probe(_)))
    }
}

impl Worker {
    /// A client without a socket, between transactions, of `pool`.
    fn silent_client(&mut self, pool: &Arc<Pool>, restore: Option<Restore>, role: Role) -> Key {
        let (now, id) = (self.now, self.shared.next_socket_id());
        let descriptor = self.shared.mailboxes[self.index as usize].epoll.clone();
        let (side, parameters) = match restore {
            Some(restore) => (restore.side, restore.parameters),
            None => (ClientSide::default(), pool.welcome().unwrap_or_default()),
        };
        self.silent_clients += 1;
        self.clients.insert(|_| {
            Box::new(Client {
                phase: Phase::Idle,
                side,
                parameters,
                pool: Some(pool.clone()),
                database: Some(pool.database.clone()),
                user: Some(pool.user.clone()),
                is_silent: true,
                mirror: Some(Box::new(role)),
                ..Client::new(Transport::memory(descriptor), id, Endpoint::Unix(Default::default(), 0), now)
            })
        })
    }

    fn source(&mut self, key: Key) -> Option<&mut Source> {
        match self.clients.get_mut(key)?.mirror.as_deref_mut() {
            Some(Role::Source(source)) => Some(source),
            _ => None,
        }
    }

    fn shadow(&mut self, key: Key) -> Option<&mut Shadow> {
        match self.clients.get_mut(key)?.mirror.as_deref_mut() {
            Some(Role::Shadow(shadow)) => Some(shadow),
            _ => None,
        }
    }

    /// A client with a role has no transaction open and nothing outstanding.
    pub(super) fn mirror_boundary(&mut self, key: Key) {
        match self.clients.get(key).and_then(|client| client.mirror.as_deref()) {
            Some(Role::Source(_)) => self.source_boundary(key),
            Some(Role::Shadow(_)) => self.shadow_boundary(key),
            Some(Role::Probe(_)) => self.probe_done(key),
            None => {}
        }
    }

    /// A client with a role is about to close, for this reason.
    pub(super) fn mirror_closing(&mut self, key: Key, reason: &str) {
        let Some(client) = self.clients.get_mut(key) else { return };
        let is_linked = matches!(client.phase, Phase::Linked(_));
        let running = match client.phase {
            Phase::Linked(server) => self.servers.get(server),
            _ => None,
        };
        let is_busy = matches!(running, Some(super::Entry::Here(server)) if server.link.is_busy());
        let Some(client) = self.clients.get_mut(key) else { return };
        match client.mirror.take().map(|role| *role) {
            Some(Role::Source(source)) => self.source_gone(key, source, is_busy),
            Some(Role::Shadow(shadow)) => self.shadow_gone(key, shadow, is_linked, reason),
            Some(Role::Probe(probe)) => self.probe_gone(&probe, reason),
            None => {}
        }
    }

    /// The client asked for its statement to be cancelled.
    pub(super) fn mirror_cancel(&mut self, key: Key) {
        let now = self.now;
        let Some(client) = self.clients.get(key) else { return };
        let is_under_way = match client.phase {
            Phase::Waiting { .. } => true,
            Phase::Linked(server) => {
                matches!(self.servers.get(server), Some(super::Entry::Here(server)) if server.link.is_busy())
            }
            _ => false,
        };
        if let Some(source) = self.source(key).filter(|_| is_under_way) {
            source.cancel(now);
        }
    }

    /// `mode = sync`: cancels on mirrors what was cancelled on the primary, and only that. A request may find the primary at its last bytes, and
    /// what that has done is not undone where it takes longer.
    fn mirror_cancelled(&mut self, key: Key) {
        let shadows = self.source(key).map(|source| source.cancelling()).unwrap_or_default();
        for shadow in shadows {
            let cycle = self.shadow(shadow).and_then(|shadow| shadow.open_cycle());
            if self.source(key).zip(cycle).is_some_and(|(source, cycle)| source.was_cancelled(cycle)) {
                self.shadow_cancel(shadow);
            }
        }
    }

    /// What time brings: cancels that are due, mirrors that keep clients waiting, comparisons that were collected.
    pub(super) fn sweep_mirrors(&mut self) {
        let is_any = self.shared.mirrors.is_any() || self.shared.recordings.is_on();
        // What a mirror that is gone was at, when RELOAD removed it, ends here.
        if !is_any && self.compared.is_empty() && self.silent_clients == 0 {
            return;
        }
        for key in self.clients.keys() {
            if self.silent_waits_in_vain(key) {
                continue;
            }
            match self.clients.get(key).and_then(|client| client.mirror.as_deref()) {
                Some(Role::Source(_)) => {
                    self.tap_sweep(key);
                    self.tap_late(key);
                    self.source_sweep(key);
                }
                Some(Role::Shadow(_)) => self.shadow_sweep(key),
                Some(Role::Probe(_)) | None => {}
            }
        }
        self.flush_compared();
    }

    /// Closes a shadow or probe in a queue that nothing moves: a mirror that cannot be reached is tried again later, by another one. What
    /// a probe asks is whether the next attempt succeeds: it waits for that one, or a pause of its own would be added to the pool's.
    fn silent_waits_in_vain(&mut self, key: Key) -> bool {
        let Some(client) = self.clients.get(key).filter(|client| client.is_silent) else { return false };
        let (Phase::Waiting { since, .. }, Some(pool)) = (&client.phase, &client.pool) else { return false };
        if client.is_probe() && !lock(&self.shared.core).has_failed_since(pool.id, *since) {
            return false;
        }
        let waited = self.now.saturating_duration_since(*since);
        let Some(farewell) = self.failing_fast(pool.id, waited) else { return false };
        self.close_client(key, farewell);
        true
    }

    fn collect_compared(&mut self, compared: Compared) {
        self.compared.push(compared);
        if self.compared.len() >= BATCH {
            self.flush_compared();
        }
    }

    fn flush_compared(&mut self) {
        if !self.compared.is_empty() {
            let batch = std::mem::take(&mut self.compared);
            self.shared.mirrors.compare(batch);
        }
    }
}
