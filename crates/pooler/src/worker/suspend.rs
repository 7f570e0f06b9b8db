// SPDX-License-Identifier: Apache-2.0
//! SUSPEND: buffers are written out, and nothing is read but what console clients say.
//!
//! Sockets are edge-triggered: an event that is not used does not come again. While suspended, events are kept and played back by RESUME.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::Instant;

use foldhash::fast::RandomState;
use rustix::event::epoll::EventFlags;
use underpass_console::text::reason;
use underpass_wire::SqlState;

use super::{Again, Entry, Farewell, Source, Worker};
use crate::client::Phase;
use crate::control;
use crate::server::Work;
use crate::shared::phase;
use crate::table::Key;

/// State of a suspended worker.
pub(super) struct Suspension {
    since: Instant,
    /// All buffers have been written.
    flushed: bool,
    /// Events that came meanwhile, by token.
    held: HashMap<u64, EventFlags, RandomState>,
}

impl Worker {
    /// Stops reading and accepting.
    pub(crate) fn suspend(&mut self) {
        if self.suspension.is_none() {
            self.unwatch_listeners();
            self.suspension =
                Some(Box::new(Suspension { since: self.now, flushed: false, held: HashMap::default() }));
        }
        self.sweep_suspended();
    }

    /// Goes on where SUSPEND stopped.
    pub(crate) fn unsuspend(&mut self) {
        let Some(suspension) = self.suspension.take() else { return };
        self.sources_excused();
        self.watch_listeners_again();
        // A program may have held a link at the end of its transaction; then no byte comes that would tell, and what the client said since is not for
        // this server.
        let is_over = |entry: &Entry| match entry {
            Entry::Here(server) => {
                server.lane.is_some()
                    && !server.pool.is_session()
                    && matches!(server.work, Work::Client(_))
                    && server.link.is_quiescent()
            }
            Entry::Parked(_) => false,
        };
        let over: Vec<Key> =
            self.servers.iter().filter(|(_, entry)| is_over(entry)).map(|(key, _)| key).collect();
        for key in over {
            if let Some(Entry::Here(server)) = self.servers.get_mut(key) {
                server.ending = true;
            }
            self.again_soon.push(Again::Unclear(key));
        }
        for (token, flags) in suspension.held {
            self.dispatch(token, flags);
        }
        // What had to wait for buffers that have been written meanwhile.
        for (key, client) in self.clients.iter() {
            if client.readable || client.ended || !client.inbox.is_empty() {
                self.again.push(Again::Client(key));
            }
        }
        for (key, entry) in self.servers.iter() {
            let Entry::Here(server) = entry else { continue };
            if server.readable {
                self.again.push(Again::Server(key));
            }
        }
    }

    /// Keeps an event for later. False for those that are served even now.
    pub(super) fn hold_back(&mut self, token: u64, flags: EventFlags) -> bool {
        let key = Key { index: token as u32, generation: (token >> 32) as u32 & 0x00ff_ffff };
        const CLIENT: u64 = Source::Client as u64;
        const SERVER: u64 = Source::Server as u64;
        match token >> 56 {
            CLIENT if self.clients.get(key).is_some_and(|client| client.on_console) => return false,
            CLIENT | SERVER => {}
            _ => return false,
        }
        if let Some(suspension) = &mut self.suspension {
            let held = suspension.held.entry(token).or_insert(EventFlags::empty());
            *held |= flags;
        }
        true
    }

    /// Writes what is held. What cannot be written within `suspend_timeout` is closed.
    pub(super) fn sweep_suspended(&mut self) {
        let limit = self.shared.settings.load().config.suspend_timeout;
        let Some(suspension) = &self.suspension else { return };
        let is_late = !limit.is_zero() && self.now.saturating_duration_since(suspension.since) >= limit;
        if self.index == 0 {
            self.resume_if_alone();
        }
        if self.suspension.as_ref().is_none_or(|suspension| suspension.flushed) {
            return;
        }
        let mut is_flushed = true;
        for key in self.clients.keys() {
            if matches!(self.clients.get(key).map(|client| &client.phase), Some(Phase::Lane))
                && !self.lane_take(key)
            {
                is_flushed = false;
                continue;
            }
            let Some(client) = self.clients.get_mut(key).filter(|client| !client.outbox.is_empty()) else {
                continue;
            };
            match client.outbox.drain(&mut client.transport) {
                Ok(true) => {}
                Ok(false) if client.on_console || !is_late => is_flushed &= client.on_console,
                Ok(false) => {
                    self.close_client(key, Farewell::told(SqlState::ADMIN_SHUTDOWN, reason::SUSPEND_TIMEOUT));
                }
                Err(error) => self.client_io_failed(key, &error),
            }
        }
        for key in self.servers.keys() {
            let Some(server) = self.server(key).filter(|server| !server.outbox.is_empty()) else { continue };
            match server.outbox.drain(&mut server.transport) {
                Ok(true) => {}
                Ok(false) if !is_late => is_flushed = false,
                Ok(false) => self.close_server(key, reason::SUSPEND_TIMEOUT),
                Err(error) => self.close_server(key, &format!("server write failed: {error}")),
            }
        }
        if let Some(suspension) = self.suspension.as_mut().filter(|_| is_flushed) {
            suspension.flushed = true;
            self.shared.control.flushed.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Without a console nobody could end the suspension.
    fn resume_if_alone(&self) {
        let shared = &self.shared;
        if shared.phase.load(Ordering::Acquire) == phase::SUSPENDED
            && shared.control.consoles.load(Ordering::Acquire) == 0
        {
            log::info!("admin disappeared when suspended, doing RESUME");
            // Somebody else may have resumed meanwhile.
            let _ = control::resume(shared);
        }
    }
}
