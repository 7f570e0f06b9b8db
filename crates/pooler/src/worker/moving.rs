// SPDX-License-Identifier: Apache-2.0
//! Busy clients that change their worker, between two transactions.
//!
//! Where a client is was settled when it was accepted, before anybody knew what it would do. So one worker may have all that is busy while
//! others rest, or several may share what one of them would do with fewer wake-ups. [`crate::balance`] says which it is; here clients are
//! chosen and handed over. One that has a lane, a mirror or a replication stream stays: more than its socket belongs to its worker.
//! Servers go to whichever worker has the client that they are granted to.

use std::sync::atomic::Ordering;

use rustix::event::epoll;
use underpass_console::rows::Replication;
use underpass_pool::core::ClientRef;

use super::{Entry, Source, Worker};
use crate::balance::{self, Advice};
use crate::client::{Client, Phase};
use crate::server::Server;
use crate::shared::{CancelTarget, lock, phase};
use crate::table::Key;

/// Environment variable for tests only: `UNDERPASS_TEST_MOVE=N` sends one of N clients to another worker at the end of a transaction,
/// whatever the load.
const MOVE_VARIABLE: &str = "UNDERPASS_TEST_MOVE";

/// What a worker knows of it.
#[derive(Debug)]
pub(super) struct Moving {
    advice: Advice,
    /// Looks at the load, ten a second. The first is 1: [`Client::busy_at`] begins with 0.
    look: u32,
    /// Clients whose transactions ended since the last look, while there is advice.
    busy: u32,
    /// So many may still leave before the next look.
    may_leave: u32,
    /// Those that leave when this turn of the loop is over, and whereto.
    leaving: Vec<(Key, u16)>,
    /// See [`MOVE_VARIABLE`]; 0 = by load only.
    one_in: u32,
}

impl Default for Moving {
    fn default() -> Self {
        let one_in = std::env::var(MOVE_VARIABLE).ok().and_then(|value| value.parse().ok()).unwrap_or(0);
        Self { advice: Advice::Stay, look: 1, busy: 0, may_leave: 0, leaving: Vec::new(), one_in }
    }
}

impl Worker {
    /// A transaction of the client is over. Called for each, so it does next to nothing while all may stay.
    #[inline]
    pub(super) fn was_busy(&mut self, key: Key) {
        if self.moving.advice != Advice::Stay || self.moving.one_in > 0 {
            self.may_leave(key);
        }
    }

    #[cold]
    fn may_leave(&mut self, key: Key) {
        let Some(client) = self.clients.get_mut(key) else { return };
        let moving = &mut self.moving;
        if moving.one_in > 0 {
            let others = self.shared.mailboxes.len() as u16 - 1;
            moving.busy = moving.busy.wrapping_add(1);
            if others > 0 && moving.busy.is_multiple_of(moving.one_in) {
                let other = (moving.busy / moving.one_in) as u16 % others;
                moving.leaving.push((key, if other < self.index { other } else { other + 1 }));
            }
            return;
        }
        if client.busy_at != moving.look {
            client.busy_at = moving.look;
            moving.busy += 1;
        }
        if moving.may_leave > 0 {
            moving.may_leave -= 1;
            let (Advice::GoTo { worker } | Advice::Share { worker, .. }) = moving.advice else { return };
            moving.leaving.push((key, worker));
        }
    }

    /// Decides how many clients leave, and whereto, by what the workers did since the last look.
    pub(super) fn balance(&mut self) {
        let moving = &mut self.moving;
        if moving.one_in > 0 {
            return;
        }
        let advice = balance::advise(self.index, &self.shared.acceptors.loads());
        let before = std::mem::replace(&mut moving.advice, advice);
        let busy = std::mem::take(&mut moving.busy);
        moving.look = moving.look.wrapping_add(1).max(1);
        // What lasts for one look may be chance, and who is busy was not counted before.
        moving.may_leave = match advice {
            Advice::Stay => 0,
            _ if before == Advice::Stay => 0,
            Advice::GoTo { .. } => busy,
            Advice::Share { thousandths, .. } => (u64::from(busy) * u64::from(thousandths) / 1000) as u32,
        };
    }

    /// At the end of a turn of the loop, when nobody works with them.
    pub(super) fn send_leaving(&mut self) {
        if self.moving.leaving.is_empty() {
            return;
        }
        let mut leaving = std::mem::take(&mut self.moving.leaving);
        for (key, to) in leaving.drain(..) {
            self.move_client(key, to);
        }
        self.moving.leaving = leaving;
    }

    fn move_client(&mut self, key: Key, to: u16) {
        if self.suspension.is_some()
            || self.draining
            || self.shared.phase.load(Ordering::Relaxed) != phase::RUNNING
            || !self.clients.get(key).is_some_and(|client| may_move(client))
        {
            return;
        }
        let shared = self.shared.clone();
        let given = lock(&shared.broadcasts);
        // A task that all workers have been given and that is not done here yet must find the client, and must not find it twice.
        if *given != self.broadcasts_done {
            return;
        }
        let Some(mut client) = self.clients.remove(key) else { return };
        // Readiness that is there by now shows up again with the new registration.
        client.transport.unwatch(self.epoll());
        log::trace!("{} goes from worker {} to {to}", client.label(), self.index);
        // A cancel request that comes meanwhile follows it, and waits there.
        let there = ClientRef { worker: to, slot: CancelTarget::ON_ITS_WAY, generation: 0 };
        self.cancel_key_leads(client.cancel_key, there);
        self.post(to, Box::new(move |worker| worker.arrive(client)));
    }

    /// A client comes from another worker.
    fn arrive(&mut self, client: Box<Client>) {
        let cancel_key = client.cancel_key;
        let key = self.clients.insert(|_| client);
        self.cancel_key_leads(cancel_key, self.me(key));
        self.watch_client(key);
    }

    fn cancel_key_leads(&self, cancel_key: u64, to: ClientRef) {
        if let Some(target) = lock(&self.shared.cancel_keys).targets.get_mut(&cancel_key) {
            target.client = to;
        }
    }
}

/// Whether nothing but its socket and its own state belongs to it.
fn may_move(client: &Client) -> bool {
    matches!(client.phase, Phase::Idle)
        && !client.readable
        && !client.ended
        && client.inbox.is_empty()
        && client.outbox.is_empty()
        && client.transport.tls().is_none_or(|tls| !tls.wants_write())
        && client.lane.is_none()
        && client.mirror.is_none()
        && !client.on_console
        && !client.is_silent
        && client.replication == Replication::None
}

impl Worker {
    /// Puts a server that was granted under this worker's epoll.
    pub(super) fn take_home(&mut self, mut server: Box<Server>) -> Option<Key> {
        if server.home == self.index {
            let key = server.key;
            crate::lanes::watch_server(&server);
            if let Some(entry) = self.servers.get_mut(key) {
                *entry = Entry::Here(server);
                return Some(key);
            }
            debug_assert!(false, "a parked server has its place");
            return None;
        }
        let (old_home, old_key) = (server.home, server.key);
        let old_epoll = &self.shared.mailboxes[old_home as usize].epoll;
        // The registration goes along. Readiness that was there before shows up again with the new one.
        let _ = epoll::delete(old_epoll, server.transport.fd());
        self.post(old_home, Box::new(move |worker| drop(worker.servers.remove(old_key))));
        let index = self.index;
        if let Some(lane) = &mut server.lane {
            lane.epoll = self.shared.mailboxes[index as usize].epoll.clone();
        }
        let key = self.servers.insert(|key| {
            server.home = index;
            server.key = key;
            Entry::Here(server)
        });
        let Some(Entry::Here(server)) = self.servers.get(key) else { return None };
        if let Err(error) = self.watch(server.transport.fd(), Source::Server, key) {
            self.close_server(key, &format!("cannot watch socket: {error}"));
            return None;
        }
        Some(key)
    }
}
