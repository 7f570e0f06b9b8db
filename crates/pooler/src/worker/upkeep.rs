// SPDX-License-Identifier: Apache-2.0
//! What workers do for the control plane: pauses, kills, drains, statistics periods, forgetting what nobody uses.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use underpass_config::PoolMode;
use underpass_console::text::{self, reason};
use underpass_pool::PoolId;
use underpass_wire::SqlState;

use super::{Again, Entry, Farewell, Worker};
use crate::client::{Client, LoginStep, Phase};
use crate::control::{self, say};
use crate::pool::Pool;
use crate::server::Work;
use crate::settings::Settings;
use crate::shared::{lock, phase};
use crate::table::Key;

impl Worker {
    /// Closes servers of paused pools that serve nobody: idle ones, and those that log in here.
    pub(crate) fn close_paused(&mut self) {
        for pool in self.shared.pools() {
            let idle = {
                let mut core = lock(&self.shared.core);
                if core.is_paused(pool.id) { core.take_all_idle(pool.id) } else { Vec::new() }
            };
            for (_, server) in idle {
                self.bury(server, reason::PAUSE);
            }
        }
        for key in self.servers.keys() {
            let Some(Entry::Here(server)) = self.servers.get(key) else { continue };
            let (id, pool) = (server.id, server.pool.clone());
            let is_login = matches!(server.work, Work::Login(_));
            if is_login && lock(&self.shared.core).is_paused(id.pool) {
                self.give_up_login(key);
                pool.last_error.store(None);
            }
        }
        self.give_up_lookups(reason::PAUSE, |worker, pool| {
            let is_paused = lock(&worker.shared.core).is_paused(pool.id);
            if is_paused {
                pool.last_error.store(None);
            }
            is_paused
        });
    }

    /// Closes a server that logs in, without blame: the next attempt need not wait for `server_login_retry`.
    fn give_up_login(&mut self, key: Key) {
        if let Some(id) = self.server_id(key) {
            lock(&self.shared.core).closed(id, false, self.now);
        }
        self.close_server(key, reason::PAUSE);
    }

    /// Gives servers to clients that queued during a pause.
    pub(crate) fn serve_queues(&mut self) {
        for pool in self.shared.pools() {
            self.grant_idle(pool.id);
            self.launch(pool.id);
        }
    }

    /// Drops clients and servers of a database, or of all, at once.
    pub(crate) fn kill(&mut self, database: Option<u32>, reason: &'static str) {
        for key in self.clients.keys() {
            let Some(client) = self.clients.get_mut(key).filter(|client| !client.on_console) else {
                continue;
            };
            // One that logs in may be asked for at another database, its `auth_dbname`.
            let asks = match &client.phase {
                Phase::Login(login) => match login.step {
                    LoginStep::AuthQuery { database } => Some(database),
                    _ => None,
                },
                _ => None,
            };
            let own = client.database.as_ref().map(|database| database.number);
            let is_meant = match database {
                Some(number) => own == Some(number) || asks == Some(number),
                None => own.is_some() || asks.is_some(),
            };
            if !is_meant {
                continue;
            }
            if matches!(client.phase, Phase::Lane) && !self.lane_take(key) {
                self.close_client_later(key, Farewell::told(SqlState::ADMIN_SHUTDOWN, reason));
                continue;
            }
            let Some(client) = self.clients.get_mut(key) else { continue };
            let mut farewell = Farewell::told(SqlState::ADMIN_SHUTDOWN, reason);
            if let Phase::Linked(server) = client.phase {
                // The server goes too: it need not come to rest for the next client.
                client.phase = Phase::Idle;
                if let Some(server) = self.server(server) {
                    server.work = Work::Resting;
                    if server.link.is_answer_cut() {
                        farewell.report = None;
                    }
                }
                self.lane_unlink(key);
                self.close_server(server, reason);
            }
            self.close_client(key, farewell);
        }
        for key in self.servers.keys() {
            let Some(Entry::Here(server)) = self.servers.get(key) else { continue };
            if database.is_some_and(|number| server.pool.database.number != number) {
                continue;
            }
            // Nor is one blamed that has logged in and served nobody yet.
            if matches!(server.work, Work::Login(_) | Work::Identifying { .. })
                || lock(&self.shared.core).is_login(server.id)
            {
                self.give_up_login(key);
            } else {
                self.close_server(key, reason);
            }
        }
        self.give_up_lookups(reason, |_, pool| database.is_none_or(|number| pool.database.number == number));
        for pool in self.shared.pools() {
            if database.is_none_or(|number| pool.database.number == number) {
                let idle = lock(&self.shared.core).take_all_idle(pool.id);
                idle.into_iter().for_each(|(_, server)| self.bury(server, reason));
            }
        }
    }

    /// Drops the client with this number. False if it is not here.
    pub(crate) fn kill_client(&mut self, id: u64) -> bool {
        let key =
            self.clients.iter().find(|(_, client)| u64::from(client.id.get()) == id).map(|(key, _)| key);
        if let Some(key) = key {
            self.close_client(key, Farewell::told(SqlState::ADMIN_SHUTDOWN, reason::ADMIN_DISCONNECT));
        }
        key.is_some()
    }

    /// SHUTDOWN WAIT_FOR_SERVERS: from now on clients go when they are between transactions, those that are so now at once.
    pub(crate) fn drain(&mut self) {
        if self.shared.waits_for_clients() {
            // It has become that since; the word is on its way to `draining`.
            return;
        }
        self.draining = true;
        for key in self.clients.keys() {
            // Of sessions in a lane the sweep brings up those that have no server.
            let is_in_lane = |client: &&Client| {
                matches!(client.phase, Phase::Lane)
                    && !client.pool.as_ref().is_some_and(|pool| pool.is_session())
            };
            if self.clients.get(key).map(|client| &**client).filter(is_in_lane).is_some() {
                // User space sees its transaction through, and finds it here again if it has none.
                self.lane_client_up(key);
            }
            let Some(client) = self.clients.get(key) else { continue };
            let at_boundary = match client.phase {
                Phase::Idle | Phase::Waiting { .. } => true,
                Phase::Login(_) => !client.on_console && client.database.is_some(),
                Phase::Linked(server) => {
                    matches!(self.servers.get(server), Some(Entry::Here(server)) if server.link.is_quiescent()
                        && matches!(server.work, Work::Client(_)) && !server.keeps_client())
                }
                Phase::Lane | Phase::Console(_) | Phase::Closing => false,
            };
            if at_boundary {
                self.close_client(
                    key,
                    Farewell::told(SqlState::ADMIN_SHUTDOWN, reason::SERVER_SHUTTING_DOWN),
                );
            }
        }
    }

    /// Counts those who were let in before the listening sockets were closed and are not logged in yet: a shutdown waits for them as well.
    pub(super) fn count_logins(&self) {
        let is_awaited = |client: &Client| match &client.phase {
            Phase::Login(login) => {
                !login.is_late && !login.is_console && !matches!(login.step, LoginStep::Cancel)
            }
            _ => false,
        };
        let count = self.clients.iter().filter(|(_, client)| is_awaited(client)).count();
        self.shared.logins[self.index as usize].store(count as u32, Ordering::Release);
    }

    /// What the first worker looks after for all.
    pub(super) fn upkeep(&mut self, settings: &Settings) {
        match self.shared.phase.load(Ordering::Acquire) {
            phase::WAIT_FOR_SERVERS | phase::WAIT_FOR_CLIENTS => self.end_if_drained(),
            _ => {}
        }
        let is_anything_paused =
            self.shared.databases().iter().any(|database| self.shared.is_paused(database));
        if is_anything_paused {
            self.close_paused();
        }
        self.forget_unused(settings);
        self.shared.release_pools(self.now);
        self.shared.drop_unused_names();
        self.make_forced_pools(settings);
        for name in self.shared.resolver.take_moved() {
            log::info!("{name} has another address now: connections to the old one are obsolete");
            self.retire_moved(&name);
        }
    }

    /// Servers at an address that their pool's hosts, `name` among them, do not have any more close when they come to rest.
    fn retire_moved(&mut self, name: &str) {
        for pool in self.shared.pools() {
            let Some(addresses) = self.shared.addresses(&pool, name) else { continue };
            let addresses: Arc<[IpAddr]> = addresses.into();
            let known = addresses.clone();
            let idle =
                lock(&self.shared.core).retire_old(pool.id, self.now, move |server| server.has_moved(&known));
            idle.into_iter().for_each(|(_, server)| self.bury(server, reason::OBSOLETE));
            // The core sees the others when they come back. Until then they are shown, waited for and closed early as obsolete ones are.
            let (id, now) = (pool.id, self.now);
            self.shared.broadcast(move |worker| worker.mark_moved(id, now, &addresses));
        }
    }

    fn mark_moved(&mut self, pool: PoolId, opened_until: Instant, addresses: &[IpAddr]) {
        for key in self.servers.keys() {
            let Some(Entry::Here(server)) = self.servers.get(key) else { continue };
            let is_old = server.connected_at <= opened_until && server.has_moved(addresses);
            if server.pool.id == pool && is_old {
                lock(&self.shared.core).retire(server.id);
            }
        }
    }

    /// Ends the process when a shutdown has nothing left to wait for.
    fn end_if_drained(&mut self) {
        let waits_for_clients = self.shared.waits_for_clients();
        // Before the clients of pools, among whom they are when they are no logins any more.
        let logins = || self.shared.logins.iter().map(|count| count.load(Ordering::Acquire));
        if waits_for_clients && logins().any(|count| count > 0) {
            return;
        }
        let pools = self.shared.pools();
        // A client counts until it has taken its last bytes.
        if pools.iter().any(|pool| pool.clients.load(Ordering::Acquire) > 0) {
            return;
        }
        // A mirror that hangs keeps nobody waiting, the end neither.
        let is_busy = pools.iter().filter(|pool| !pool.database.is_mirror).any(|pool| {
            let counts = lock(&self.shared.core).counts(pool.id, self.now);
            counts.active + counts.tested + counts.being_canceled > 0
        });
        if waits_for_clients || !is_busy {
            say(&text::drained(waits_for_clients));
            control::end(&self.shared);
        }
    }

    /// After a RELOAD: clients whose pool no lane may carry any more, or in another mode, come up.
    pub(crate) fn leave_unfit_lanes(&mut self) {
        for key in self.clients.keys() {
            let Some(client) = self.clients.get(key) else { continue };
            let session = client.lane.as_ref().is_some_and(|lane| lane.session);
            let is_unfit = client
                .pool
                .as_ref()
                .is_some_and(|pool| pool.lane().is_none() || pool.is_session() != session);
            if is_unfit && matches!(client.phase, Phase::Lane) {
                self.lane_client_up(key);
            }
        }
    }

    /// `pool_idle_timeout` and `autodb_idle_timeout`.
    fn forget_unused(&mut self, settings: &Settings) {
        let (now, config) = (self.now, &settings.config);
        let is_over = |since: Instant, limit: Duration| {
            !limit.is_zero() && now.saturating_duration_since(since) >= limit
        };
        let shared = self.shared.clone();
        let mut idle_pools = lock(&shared.control.idle_pools);
        let pools = shared.pools();
        let of_database = |pool: &Arc<Pool>| pool.database.number;
        for pool in &pools {
            let is_used = pool.clients.load(Ordering::Acquire) > 0 || {
                let core = lock(&shared.core);
                let counts = core.counts(pool.id, now);
                let servers = counts.active + counts.tested + counts.login + counts.being_canceled;
                let is_kept = core.limits(pool.id).size_min > 0 && pool.is_of_forced_user();
                servers + counts.clients_waiting > 0 || is_kept
            };
            if is_used || pool.forgotten.load(Ordering::Relaxed) {
                idle_pools.remove(&pool.id);
                continue;
            }
            let since = *idle_pools.entry(pool.id).or_insert(now);
            if is_over(since, config.pool_idle_timeout) {
                let age = now.saturating_duration_since(since).as_secs();
                say(&text::pool_idle(&pool.user.name, &pool.database.name, age));
                self.forget_pool(pool);
            }
        }
        drop(idle_pools);
        let mut idle_databases = lock(&shared.control.idle_databases);
        let databases = shared.databases();
        if idle_databases.len() > databases.len() {
            idle_databases.retain(|number, _| databases.iter().any(|database| database.number == *number));
        }
        // Anybody can name a database: what no server has let in yet is kept for no longer than its failure counts.
        let known: HashSet<u32> = pools.iter().filter(|pool| pool.has_logged_in()).map(of_database).collect();
        let mut over = Vec::new();
        for database in databases {
            let is_candidate =
                database.is_auto.load(Ordering::Relaxed) && !database.forgotten.load(Ordering::Relaxed);
            let is_used = database.clients.load(Ordering::Acquire) > 0
                || lock(&shared.core).database_connections(database.number) > 0
                || database.paused.load(Ordering::Relaxed)
                || database.disabled.load(Ordering::Relaxed);
            if !is_candidate || is_used {
                idle_databases.remove(&database.number);
                continue;
            }
            let since = *idle_databases.entry(database.number).or_insert(now);
            let is_stillborn = !known.contains(&database.number)
                && now.saturating_duration_since(since) >= config.server_login_retry;
            if is_stillborn || is_over(since, config.autodb_idle_timeout) {
                say(&text::database_dropped(&database.name));
                over.push(database);
            }
        }
        control::forget(&shared, &over, false);
    }

    /// A forced user's `min_pool_size` needs no client: the pool is made when the database is known.
    fn make_forced_pools(&mut self, settings: &Settings) {
        if settings.config.min_pool_size == 0
            && settings.config.databases.named.values().all(|database| database.min_pool_size.is_none())
        {
            return;
        }
        for database in self.shared.databases() {
            let configured = database.settings.load();
            let Some(user) = &configured.user else { continue };
            let is_named = !database.is_auto.load(Ordering::Relaxed)
                && !database.forgotten.load(Ordering::Relaxed)
                && !database.is_mirror;
            if is_named && settings.config.min_pool_size(&configured) > 0 {
                let user = self.shared.user(user);
                let pool = self.shared.pool(&database, &user, self.now);
                pool.is_forced.store(true, Ordering::Relaxed);
            }
        }
    }

    fn forget_pool(&mut self, pool: &Pool) {
        pool.forgotten.store(true, Ordering::Release);
        let idle = {
            let mut core = lock(&self.shared.core);
            core.keep_minimum(pool.id, pool.keeps_minimum());
            core.take_all_idle(pool.id)
        };
        idle.into_iter().for_each(|(_, server)| self.bury(server, reason::SERVER_IDLE_TIMEOUT));
    }

    /// `server_fast_close`: an obsolete connection in session pooling does not wait for its client to leave.
    pub(super) fn fast_close(&mut self) {
        for key in self.clients.keys() {
            let Some(client) = self.clients.get(key) else { continue };
            let Some(lane) = client.lane.as_ref().filter(|lane| lane.session) else { continue };
            let linked = lane.lanes.datapath.client_info(lane.slot).ok().and_then(|info| info.server);
            let id = linked.and_then(|slot| lane.lanes.server_of(slot));
            let is_obsolete = id.is_some_and(|id| lock(&self.shared.core).is_close_needed(id));
            let is_drained = lane.lanes.datapath.client_drained(lane.slot).unwrap_or(false);
            if is_obsolete && is_drained && matches!(client.phase, Phase::Lane) {
                // Found below, if it is between transactions. If not, what it or its server has said already is announced by nobody.
                if self.lane_take(key) {
                    self.again.push(Again::Client(key));
                    let server = self.clients.get(key).and_then(|client| client.phase_server());
                    self.again.extend(server.map(Again::Server));
                }
            }
        }
        for key in self.servers.keys() {
            let Some(Entry::Here(server)) = self.servers.get(key) else { continue };
            let is_between =
                matches!(server.work, Work::Client(_)) && server.link.is_quiescent() && !server.dedicated;
            let id = server.id;
            if is_between
                && server.pool_mode() == PoolMode::Session
                && lock(&self.shared.core).is_close_needed(id)
            {
                self.close_server(key, reason::DATABASE_CHANGED);
            }
        }
    }
}
