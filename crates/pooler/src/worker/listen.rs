// SPDX-License-Identifier: Apache-2.0
//! Accepting clients.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::epoll::EventFlags;

use super::{Farewell, Source, Worker, token};
use crate::client::{Client, Phase};
use crate::lanes::USER_INTEREST;
use crate::listeners;
use crate::net::{self, Endpoint, Inherited, TcpOptions};
use crate::shared::phase;
use crate::table::Key;
use crate::transport::Transport;
use underpass_wire::SqlState;

/// A listening socket, shared by all workers.
#[derive(Debug, Clone)]
pub(crate) struct Listener {
    pub fd: Arc<OwnedFd>,
    /// Port in the name of a unix socket; `None` for TCP.
    pub unix_port: Option<u16>,
    /// The service manager opened it, and lets who connects wait for the next process.
    pub is_handed_over: bool,
    /// What its connections have from it.
    pub inherited: Inherited,
}

/// Connections taken at a time before others have their turn.
pub(super) const ACCEPTS_PER_TURN: usize = 16;
/// When a socket is to be closed: as many as may wait at one (`net.core.somaxconn`), and some who come meanwhile.
pub(super) const ACCEPTS_AT_END: usize = 2 * 4096;
/// Pause of accepting when there are no descriptors or no memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

impl Worker {
    /// The listening socket is readable. Mostly one connection waits there, and to ask for a second costs as much as to be told of
    /// it: that is done only when there was one in the round before, too.
    pub(super) fn accept_some(&mut self, index: usize) {
        let last = std::mem::replace(&mut self.accepted_round, self.round);
        let is_busy = self.round.wrapping_sub(last) <= 1;
        self.accept(index, if is_busy { ACCEPTS_PER_TURN } else { 1 });
    }

    /// Takes as many connections at most.
    pub(super) fn accept(&mut self, index: usize, count: usize) {
        // Told in the same round as the failure.
        if self.accept_paused_until.is_some_and(|until| self.now < until) {
            return;
        }
        for _ in 0..count {
            let Some(listener) = self.listeners.get(index) else { return };
            let inherited = listener.inherited;
            match net::accept(&*listener.fd, listener.unix_port) {
                Ok(Some((fd, address))) => {
                    self.shared.acceptors.came();
                    self.greet(fd, address, inherited);
                }
                Ok(None) => return,
                Err(error) => {
                    log::warn!(
                        "accept failed: {error}; raise LimitNOFILE (ulimit -n) if descriptors are short"
                    );
                    // Who waits there would be told of in every round, and cost those who are here their time.
                    self.unwatch_listeners();
                    self.accept_paused_until = Some(self.now + ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    /// The pause of accepting may be over: descriptors may be free again.
    pub(super) fn sweep_accepting(&mut self) {
        if self.accept_paused_until.is_some_and(|until| until <= self.now) {
            self.accept_paused_until = None;
            self.watch_listeners_again();
        }
    }

    pub(super) fn watch_listeners_again(&self) {
        if let Err(error) = self.watch_listeners() {
            log::error!("cannot listen again: {error}");
        }
    }

    /// After a RELOAD.
    pub(crate) fn listeners_changed(&mut self) {
        let settings = self.shared.settings.load();
        for listener in self.listeners.iter().filter(|listener| listener.unix_port.is_none()) {
            listeners::defer_accept(&listener.fd, &settings.config);
        }
    }

    fn greet(&mut self, fd: OwnedFd, address: Endpoint, inherited: Inherited) {
        let settings = self.shared.settings.load();
        let is_tcp = address.socket_address().is_some();
        if let Some(peer) = address.socket_address() {
            if let Err(error) = TcpOptions::from_config(&settings.config).apply(&fd, peer, inherited) {
                log::debug!("socket options: {error}");
            }
        }
        let connected = self.shared.clients.fetch_add(1, Ordering::Relaxed) + 1;
        let now = self.now;
        let id = self.shared.next_socket_id();
        let mut transport = Transport::new(fd);
        if let Some(recording) = self.shared.recordings.current() {
            transport.set_tap(recording.tap(address.socket_address(), None));
        }
        let mut client = Box::new(Client::new(transport, id, address, now));
        if let Phase::Login(login) = &mut client.phase {
            login.is_late = self.has_closed;
        }
        let key = self.clients.insert(|_| client);
        // Room for the console and for cancel requests, which must get in when the pooler is full.
        let full = connected > settings.config.max_client_conn.saturating_add(CONSOLE_RESERVE);
        let farewell = if full {
            let message = "no more connections allowed (max_client_conn)";
            Farewell::told(SqlState::TOO_MANY_CONNECTIONS, message)
        } else if self.shared.phase.load(Ordering::Relaxed) == phase::IMMEDIATE {
            Farewell::told(SqlState::ADMIN_SHUTDOWN, "pooler is shutting down")
        } else {
            if is_tcp && settings.config.tcp_defer_accept && self.suspension.is_none() {
                // The kernel has shown the connection because the first bytes are there.
                self.client_readable(key, EventFlags::empty());
            }
            self.watch_client(key);
            return;
        };
        if self.watch_client(key) {
            self.close_client(key, farewell);
        }
    }

    /// Watches a client, if it is still there and that was not done yet. False if it is not there afterwards.
    pub(super) fn watch_client(&mut self, key: Key) -> bool {
        let epoll = &self.shared.mailboxes[self.index as usize].epoll;
        let Some(client) = self.clients.get_mut(key) else { return false };
        if client.transport.is_watched() {
            return true;
        }
        let Err(error) = client.transport.watch_input(epoll, token(Source::Client, key), USER_INTEREST)
        else {
            return true;
        };
        self.close_client(key, Farewell::quiet(&format!("cannot watch socket: {error}")));
        false
    }

    /// Tells the others how busy this worker is, and learns whether it is to accept connections.
    pub(super) fn share_accepting(&mut self) {
        let clock = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        let busy = Duration::new(clock.tv_sec as u64, clock.tv_nsec as u32);
        let (busy_before, before) = std::mem::replace(&mut self.busy_until, (busy, self.now));
        let passed = self.now.saturating_duration_since(before).as_micros().max(1);
        let load = busy.saturating_sub(busy_before).as_micros() * 1000 / passed;
        let accepts = self.shared.acceptors.look(self.index, load as u32);
        self.balance();
        if accepts == self.accepts {
            return;
        }
        self.accepts = accepts;
        if accepts {
            self.watch_listeners_again();
        } else {
            self.unwatch_listeners();
        }
    }
}

/// Connections above `max_client_conn` that may say who they are, so that the console and cancel requests get in.
const CONSOLE_RESERVE: u32 = 100;
