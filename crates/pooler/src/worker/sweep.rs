// SPDX-License-Identifier: Apache-2.0
//! Timeouts and upkeep, ten times a second.

use std::sync::Arc;
use std::time::{Duration, Instant};

use underpass_config::{Config, PoolMode};
use underpass_console::text::{QUEUED_NOTICE, reason};
use underpass_pool::link::Status;
use underpass_wire::SqlState;
use underpass_wire::backend::build::notice_response;
use underpass_wire::backend::{Report, Severity};

use super::lane::LaneTimes;
use super::{Again, Entry, Farewell, Worker};
use crate::client::{Client, LoginStep, Phase};
use crate::control;
use crate::server::{PrepareStep, SettleStep, Work};
use crate::settings::Settings;
use crate::shared::{lock, phase};
use crate::table::Key;

/// Longest time that a server may take to come to rest after its client left.
const SETTLE_MAX: Duration = Duration::from_secs(30);

/// Sweeps in which every client that rests or is in a lane is looked at once: 0.4 s, by which `client_idle_timeout`, and the other timeouts in a
/// lane, may be late.
const RESTING_TURNS: u32 = 4;

/// Pause between cancel requests for the statement of a client that left.
const CANCEL_AGAIN: Duration = Duration::from_millis(300);

impl Worker {
    pub(super) fn sweep(&mut self) {
        if self.suspension.is_some() {
            self.sweep_suspended();
            return self.console_waits_check();
        }
        let settings = self.shared.settings.load_full();
        self.sweep_clients(&settings);
        if self.has_closed {
            self.count_logins();
        }
        if self.draining {
            self.drain();
        }
        self.sweep_servers(&settings);
        self.sweep_lookups(settings.config.server_connect_timeout);
        if settings.config.server_fast_close {
            self.fast_close();
        }
        self.sweep_cancels(&settings);
        self.sweep_mirrors();
        // Pools belong to no worker: the first one looks after them.
        if self.index == 0 {
            self.sweep_doubted();
            self.sweep_pools();
            control::tell_of_recording(&self.shared);
            self.upkeep(&settings);
        }
        self.console_waits_check();
        self.share_accepting();
        self.sweep_accepting();
    }

    /// All clients but those that may rest. Of ten thousand nearly everyone rests, and whoever comes meanwhile waits for a look at each,
    /// which is not in the cache: so those that rested at the last look are looked at in turns, unless they have stirred
    /// ([`Worker::stirred`]). Those in lanes have their turns too.
    fn clients_to_sweep(&mut self, config: &Config, draining: bool) -> Vec<Key> {
        self.sweeps = (self.sweeps + 1) % RESTING_TURNS;
        // Nearly all have the pool of the one before, and its user.
        let mut known = (std::ptr::null(), None, Duration::ZERO);
        let mut may_rest = |client: &Client| {
            if !matches!(client.phase, Phase::Idle) {
                return false;
            }
            let Some(pool) = &client.pool else { return true };
            let user = client.user.as_ref().map(|user| user.number);
            if (known.0, known.1) != (Arc::as_ptr(pool), user) {
                let timeouts = pool.timeouts_of(client.user.as_ref(), config);
                known = (Arc::as_ptr(pool), user, timeouts.client_idle);
            }
            known.2.is_zero() || self.now.saturating_duration_since(client.request_at) < known.2
        };
        let mut keys = Vec::new();
        for (key, client) in self.clients.iter() {
            let index = key.index as usize;
            if index >= self.resting.len() {
                self.resting.resize(index + 1, None);
            }
            let rested = self.resting[index] == Some(key.generation);
            if rested && key.index % RESTING_TURNS != self.sweeps && !draining {
                continue;
            }
            // What a lane's client does is seen by looking only, and looking at its slot costs more.
            let is_carried = matches!(client.phase, Phase::Lane);
            let rests = !draining && (is_carried || may_rest(client));
            self.resting[index] = rests.then_some(key.generation);
            if !rests || is_carried {
                keys.push(key);
            }
        }
        keys
    }

    /// Something has come from a client, so the next sweep looks at it.
    pub(super) fn stirred(&mut self, key: Key) {
        if let Some(resting) = self.resting.get_mut(key.index as usize) {
            *resting = None;
        }
    }

    fn sweep_clients(&mut self, settings: &Settings) {
        let now = self.now;
        let over = |since: Instant, limit: Duration| {
            !limit.is_zero() && now.saturating_duration_since(since) >= limit
        };
        let config = &settings.config;
        let draining =
            self.shared.phase.load(std::sync::atomic::Ordering::Relaxed) >= phase::WAIT_FOR_SERVERS;
        for key in self.clients_to_sweep(config, draining) {
            if matches!(self.clients.get(key).map(|client| &client.phase), Some(Phase::Lane)) {
                self.sweep_lane_client(key, config, draining);
                continue;
            }
            let Some(client) = self.clients.get_mut(key) else { continue };
            let pool = client.pool.as_ref().map(|pool| pool.settings.load_full());
            let timeouts = client.timeouts(config);
            let farewell = match &mut client.phase {
                Phase::Login(login) if matches!(login.step, LoginStep::Cancel) => None,
                Phase::Login(_) if over(client.connected_at, config.client_login_timeout) => {
                    Some(Farewell::told(SqlState::QUERY_CANCELED, "client_login_timeout"))
                }
                Phase::Login(login) => {
                    let (ticket, since) = (login.ticket, client.request_at);
                    let query = pool.as_ref().map_or(config.query_timeout, |pool| pool.query_timeout);
                    let limits = (timeouts.query_wait, query);
                    ticket.and_then(|(pool, _)| {
                        waited_too_long(now.saturating_duration_since(since), limits)
                            .or_else(|| self.failing_fast(pool, now.saturating_duration_since(since)))
                    })
                }
                Phase::Closing if over(client.request_at, Duration::from_secs(10)) => {
                    self.drop_client(key);
                    continue;
                }
                Phase::Waiting { since, notified, .. } => {
                    let since = *since;
                    let query = pool.as_ref().map_or(Duration::ZERO, |pool| pool.query_timeout);
                    let limits = (timeouts.query_wait, query);
                    let late = waited_too_long(now.saturating_duration_since(since), limits);
                    if late.is_some() {
                        late
                    } else {
                        // What a lane forwarded before must be in the socket first: else at the next look.
                        let is_due = !*notified && over(since, config.query_wait_notify);
                        if is_due && client.lane.as_mut().is_none_or(|lane| lane.is_clear()) {
                            *notified = true;
                            let why = client.pool.as_ref().and_then(|pool| pool.last_error.load_full());
                            let mut text = QUEUED_NOTICE.to_owned();
                            if let Some(why) = why {
                                text = format!("{text} (last connection attempt: {})", why.message);
                            }
                            let mut out = Vec::new();
                            notice_response(
                                &mut out,
                                &Report::new(Severity::Notice, SqlState::TOO_MANY_CONNECTIONS, &text),
                            );
                            let _ = client.outbox.send(&mut client.transport, &out);
                        }
                        None
                    }
                }
                Phase::Idle => {
                    if client.is_idle() && over(client.request_at, timeouts.client_idle) {
                        Some(Farewell::told(SqlState::IDLE_SESSION_TIMEOUT, "client_idle_timeout"))
                    } else if draining && !self.shared.waits_for_clients() {
                        Some(Farewell::told(SqlState::ADMIN_SHUTDOWN, reason::SERVER_SHUTTING_DOWN))
                    } else {
                        None
                    }
                }
                Phase::Linked(server) => {
                    let server = *server;
                    let (Some(pool), Some(Entry::Here(linked))) = (pool, self.servers.get(server)) else {
                        continue;
                    };
                    let Some(client) = self.clients.get(key) else { continue };
                    // Since the client last said something: COPY data that keeps coming is no query that hangs. A message without its end and a
                    // batch without its Sync keep the server just so.
                    let is_asked = !linked.link.is_settled() || !client.inbox.is_empty();
                    let is_checked = matches!(linked.work, Work::Preparing { step: PrepareStep::Check, .. });
                    let keeps_server = linked.keeps_client();
                    if is_checked {
                        // It still waits for a server, of which it is not known yet whether it lives.
                        waited_too_long(
                            now.saturating_duration_since(client.request_at),
                            (timeouts.query_wait, pool.query_timeout),
                        )
                    } else if is_asked && over(client.request_at, pool.query_timeout) {
                        Some(Farewell::told(SqlState::QUERY_CANCELED, "query timeout"))
                    } else if client.transaction_at.is_some_and(|since| over(since, pool.transaction_timeout))
                    {
                        Some(Farewell::told(SqlState::QUERY_CANCELED, "transaction timeout"))
                    } else if linked.link.status() != Status::Idle
                        && !linked.link.is_busy()
                        && over(client.request_at, pool.idle_transaction_timeout)
                    {
                        Some(Farewell::told(
                            SqlState::IDLE_IN_TRANSACTION_SESSION_TIMEOUT,
                            "idle transaction timeout",
                        ))
                    } else if linked.link.is_quiescent()
                        && !keeps_server
                        && draining
                        && !self.shared.waits_for_clients()
                    {
                        Some(Farewell::told(SqlState::ADMIN_SHUTDOWN, reason::SERVER_SHUTTING_DOWN))
                    } else {
                        None
                    }
                }
                _ => None,
            };
            if let Some(farewell) = farewell {
                self.close_client(key, farewell);
            }
        }
    }

    /// A client that asks for a server when connecting has failed and there is none: it is told so at once, and not kept in a queue
    /// that nothing moves. Its asking makes the next attempt, not before `server_login_retry`.
    pub(super) fn fail_fast(&mut self, key: Key, pool: underpass_pool::PoolId) {
        self.relaunch(pool);
        self.close_client(key, self.login_failing(pool));
    }

    /// What a client is told when connecting for `pool` has failed.
    pub(super) fn login_failing(&self, pool: underpass_pool::PoolId) -> Farewell {
        let names = self.shared.names.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let error = names.pool(pool).and_then(|pool| pool.last_error.load_full());
        error.map_or_else(
            || {
                let message = "server login has been failing, try again later (server_login_retry)";
                Farewell::told(SqlState::SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION, message)
            },
            |error| error.farewell(),
        )
    }

    /// A login that waits for a server is told at once when connecting fails: what it waits for will not come soon.
    pub(super) fn failing_fast(&self, pool: underpass_pool::PoolId, waited: Duration) -> Option<Farewell> {
        if waited < Duration::from_millis(200) {
            return None;
        }
        let names = self.shared.names.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let pool = names.pool(pool)?;
        let error = pool.last_error.load_full()?;
        lock(&self.shared.core).last_connect_failed(pool.id).then(|| error.farewell())
    }

    /// A client that a lane carries: its times are in the lane's slot. One that is late comes up, and is dealt with as any other then.
    fn sweep_lane_client(&mut self, key: Key, config: &Config, draining: bool) {
        self.lane_collect_carried(key);
        let Some(client) = self.clients.get(key) else { return };
        let Some(pool) = client.pool.as_ref().map(|pool| pool.settings.load()) else { return };
        let timeouts = client.timeouts(config);
        if let Some(since) = client.kept_since(self.now) {
            // From here on it waits as everybody does.
            let limits = [timeouts.query_wait, pool.query_timeout, config.query_wait_notify];
            let waited = self.now.saturating_duration_since(since);
            if draining && !self.shared.waits_for_clients()
                || limits.iter().any(|limit| !limit.is_zero() && waited >= *limit)
            {
                drop(pool);
                self.stirred(key);
                self.lane_client_up(key);
            }
            return;
        }
        let client_idle = timeouts.client_idle;
        let Some(times) = self.lane_times(client) else { return };
        let LaneTimes { active, query, transaction, is_linked } = times;
        let over = |since: Option<Instant>, limit: Duration| {
            !limit.is_zero() && since.is_some_and(|since| self.now.saturating_duration_since(since) >= limit)
        };
        let is_quiet = |limit: Duration| over(Some(active), limit);
        let keeps_server = is_linked && pool.mode == PoolMode::Session;
        let late = (query.is_some() && is_quiet(pool.query_timeout))
            || over(transaction, pool.transaction_timeout)
            || (transaction.is_some() && query.is_none() && is_quiet(pool.idle_transaction_timeout))
            || (!is_linked && is_quiet(client_idle))
            || (transaction.is_none() && !keeps_server && draining && !self.shared.waits_for_clients());
        if !late {
            return;
        }
        if !self.lane_take(key) {
            self.again_soon.push(Again::LaneClient(key));
            return;
        }
        // It may have spoken between the look and the taking, which a program links at once.
        let active =
            self.clients.get(key).and_then(|client| self.lane_times(client)).map_or(active, |t| t.active);
        if let Some(client) = self.clients.get_mut(key) {
            client.request_at = active;
            client.query_at = query.or(client.query_at);
            client.transaction_at = transaction.or(client.transaction_at);
        }
        // A program may have held the link at the end of its transaction; nobody comes for it any more.
        if let Some(&Phase::Linked(server)) = self.clients.get(key).map(|client| &client.phase)
            && self.server(server).is_some_and(|s| s.link.is_quiescent() && !s.pool.is_session())
        {
            self.transaction_over(server);
        }
    }

    fn sweep_servers(&mut self, settings: &Settings) {
        let config = &settings.config;
        for key in self.servers.keys() {
            let Some(Entry::Here(server)) = self.servers.get(key) else { continue };
            let due = self.now.saturating_duration_since(server.request_at) >= CANCEL_AGAIN;
            if matches!(server.work, Work::Settling { step: SettleStep::Draining, .. })
                && server.link.is_busy()
                && due
            {
                self.cancel_again(key);
            }
            let Some(Entry::Here(server)) = self.servers.get(key) else { continue };
            let elapsed = |since: Instant| self.now.saturating_duration_since(since);
            let over = |since: Instant, limit: Duration| !limit.is_zero() && elapsed(since) >= limit;
            let reason = match &server.work {
                Work::Login(_)
                | Work::Identifying { .. }
                | Work::Settling { step: SettleStep::Connecting, .. } => {
                    over(server.connected_at, config.server_connect_timeout).then_some("connect timeout")
                }
                // Its path may have been cut without a word. The client asks another.
                Work::Preparing { step: PrepareStep::Check, .. } => {
                    over(server.request_at, config.server_connect_timeout)
                        .then_some("server check: no answer within server_connect_timeout")
                }
                // `server_reset_query` takes what time it takes, as in PgBouncer.
                Work::Settling { step: SettleStep::Resetting, since } => (elapsed(*since) >= SETTLE_MAX
                    && over(*since, config.server_idle_timeout))
                .then_some("server did not come to rest"),
                Work::Settling { since, .. } if elapsed(*since) >= SETTLE_MAX => {
                    Some("server did not come to rest")
                }
                // Half a message of something that nobody asked for.
                Work::Resting
                    if !(server.inbox.is_empty() && server.link.is_quiescent())
                        && elapsed(server.request_at) >= SETTLE_MAX =>
                {
                    Some("server did not come to rest")
                }
                // A replication stream may never end by itself, so RECONNECT and RELOAD do not wait for that.
                Work::Client(_) if server.dedicated => {
                    let id = server.id;
                    lock(&self.shared.core).is_close_needed(id).then_some(reason::DATABASE_CHANGED)
                }
                _ => None,
            };
            if let Some(reason) = reason {
                self.close_server(key, reason);
            }
        }
    }

    /// PostgreSQL forgets a cancel request that comes before the statement it is meant for: a client that vanishes right after its
    /// request needs more than one.
    fn cancel_again(&mut self, key: Key) {
        let now = self.now;
        let Some(server) = self.server(key) else { return };
        server.request_at = now;
        let id = server.id;
        if !lock(&self.shared.core).is_canceling(id) {
            self.cancel_server(key, None);
        }
    }

    fn sweep_cancels(&mut self, settings: &Settings) {
        let limit = settings.config.cancel_wait_timeout;
        for key in self.cancels.keys() {
            let late = self.cancels.get(key).is_some_and(|cancel| {
                !limit.is_zero() && self.now.saturating_duration_since(cancel.since) >= limit
            });
            if late {
                log::warn!("cancel_wait_timeout");
                self.cancel_late(key);
            }
        }
        if self.index == 0 && !limit.is_zero() {
            self.sweep_peers(limit);
        }
    }

    /// Closes servers that lane B may have broken.
    fn sweep_doubted(&mut self) {
        let doubted = self.shared.lanes.as_ref().map(|lanes| lanes.doubted()).unwrap_or_default();
        doubted.into_iter().for_each(|slot| self.lane_server_up(slot, None));
    }

    fn sweep_pools(&mut self) {
        for pool in self.shared.pools() {
            let expired = {
                let keeps = pool.keeps_minimum();
                let mut core = lock(&self.shared.core);
                core.keep_minimum(pool.id, keeps);
                core.expire(pool.id, self.now)
            };
            for (_, server, reason) in expired {
                self.bury(server, reason.text());
            }
            self.launch(pool.id);
            // A server that was doubted and is not any more is announced by nobody.
            if self.shared.lanes.as_ref().is_some_and(|lanes| lanes.has_applications()) {
                self.grant_idle(pool.id);
            }
        }
    }
}

/// What a client is told that has `waited` for a server longer than one of its limits, `query_wait_timeout` and `query_timeout`, allows.
/// Waiting counts as a part of the query, as in PgBouncer (janitor.c, `pool_client_maint`).
fn waited_too_long(waited: Duration, (wait, query): (Duration, Duration)) -> Option<Farewell> {
    let over = |limit: Duration| !limit.is_zero() && waited >= limit;
    if over(query) {
        Some(Farewell::told(SqlState::QUERY_CANCELED, reason::CLIENT_QUERY_TIMEOUT))
    } else if over(wait) {
        Some(Farewell::told(SqlState::TOO_MANY_CONNECTIONS, reason::QUERY_WAIT_TIMEOUT))
    } else {
        None
    }
}
