// SPDX-License-Identifier: Apache-2.0
//! Links come and go: acquiring a server, preparing it for a client, giving it back clean, closing either side.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use underpass_config::PoolMode;
use underpass_console::text::{self, reason};
use underpass_pool::core::{Acquired, ClientRef, Launch, Released, Ticket};
use underpass_pool::link::Status;
use underpass_pool::{PoolId, ServerId};
use underpass_sockmap::Reason;
use underpass_trace::EndReason;
use underpass_wire::SqlState;
use underpass_wire::backend::build::error_response;
use underpass_wire::backend::{Report, Severity};

use super::{Again, Entry, Farewell, Worker};
use crate::client::{Client, LoginStep, Phase, key_of};
use crate::logging::{self, log_socket};
use crate::metrics::Told;
use crate::net;
use crate::pool::{ConnectError, Pool};
use crate::server::{PrepareStep, Server, SettleStep, Work};
use crate::shared::lock;
use crate::table::Key;
use crate::why::Why;

/// Grants within each other on a worker's stack: one that is given back at once goes to the next client right away.
const GRANTS_NESTED_MAX: u32 = 16;

/// Why a server is closed that answers more than the kernel may hold for requests that it does not read.
pub(super) const FLOODING: &str = "server answers on without reading what it is asked";

impl Client {
    /// The server it is linked to.
    pub(crate) fn phase_server(&self) -> Option<Key> {
        match self.phase {
            Phase::Linked(server) => Some(server),
            _ => None,
        }
    }
}

impl Server {
    pub(crate) fn pool_mode(&self) -> PoolMode {
        self.pool.mode()
    }
}

impl Worker {
    pub(super) fn me(&self, key: Key) -> ClientRef {
        ClientRef { worker: self.index, slot: key.index, generation: key.generation }
    }

    /// Asks for a server of `pool` for the client at `key`. Returns it if there is one; else the client waits. The server may still have
    /// to be prepared: see [`Work`]. With `lane`, the client's place in its lane, it may also be fed at once: then there is nothing left
    /// to do.
    pub(super) fn acquire(&mut self, key: Key, pool: PoolId, lane: Option<u64>) -> Option<Key> {
        let kept_at = self.clients.get_mut(key).and_then(|client| client.kept_at.take());
        let since = kept_at.unwrap_or(self.now);
        let client = self.clients.get(key);
        let learns = client.is_some_and(|client| client.is_probe());
        let unfit = client.filter(|client| lane.is_none() && client.why == Why::Program(Reason::Unfit));
        let unlike = unfit.map(|client| client.parameters.fingerprint());
        let parameters = client.map(|client| client.parameters.fingerprint());
        let acquired = {
            let mut core = lock(&self.shared.core);
            match core.is_failing(pool) {
                _ if learns => Some(core.acquire_to_learn(pool, self.me(key), self.now)),
                true => None,
                false => Some(match unlike {
                    Some(fingerprint) => core.acquire_unlike(pool, self.me(key), fingerprint, self.now),
                    None => core.acquire_fitting(
                        pool,
                        self.me(key),
                        lane,
                        |server| Some(server.parameters.fingerprint()) == parameters,
                        self.now,
                    ),
                }),
            }
        };
        let Some(acquired) = acquired else {
            self.fail_fast(key, pool);
            return None;
        };
        match acquired {
            Acquired::Granted { id: _, server, check } => match self.take_home(server) {
                Some(server) => {
                    self.granted_now(key, server, check, since);
                    Some(server)
                }
                // That one was closed instead; there are others.
                None => {
                    if let Some(client) = self.clients.get_mut(key) {
                        client.kept_at = kept_at;
                    }
                    self.acquire(key, pool, lane)
                }
            },
            Acquired::Linked(id) => self.acquired_linked(key, id, since),
            Acquired::Queued(ticket) => {
                if let Some(client) = self.clients.get_mut(key) {
                    match &mut client.phase {
                        Phase::Login(login) => login.ticket = Some((pool, ticket)),
                        phase => *phase = Phase::Waiting { ticket, since, notified: false },
                    }
                    if kept_at.is_some() {
                        lock(&self.shared.core).waited_since(pool, ticket, since);
                    }
                }
                // Launch in any case: the next client finds out whether the refusal still stands.
                if !learns {
                    self.refuse_waiting(key, pool);
                }
                self.launch(pool);
                None
            }
        }
    }

    /// A grant arrives for a client of this worker, from wherever the server was released.
    pub(crate) fn granted(&mut self, client: ClientRef, server: Box<Server>, check: bool, since: Instant) {
        let key = key_of(client);
        let pool = server.pool.id;
        let Some(server) = self.take_home(server) else { return self.ask_again(key, pool, since) };
        let waits = match self.clients.get(key).map(|client| &client.phase) {
            Some(Phase::Waiting { .. }) => true,
            Some(Phase::Login(login)) => login.ticket.is_some(),
            _ => false,
        };
        if !waits {
            // It left while the grant was under way.
            if let Some(server) = self.server(server) {
                server.work = Work::Resting;
            }
            return self.give_back(server);
        }
        self.granted_now(key, server, check, since);
        self.begin_if_prepared(key, server);
    }

    /// Passes on what the client said while it waited, once its server is ready for it.
    pub(super) fn begin_if_prepared(&mut self, key: Key, server: Key) {
        if self.clients.get(key).is_some_and(|client| client.phase_server() == Some(server))
            && self.is_client_work(server)
        {
            self.start_forwarding(key, server);
        }
    }

    /// A client that was owed a server which turned out dead: another idle one, or the head of the queue.
    pub(super) fn ask_again(&mut self, key: Key, pool: PoolId, since: Instant) {
        let reference = self.me(key);
        let Some(client) = self.clients.get_mut(key) else { return };
        match &client.phase {
            Phase::Waiting { .. } | Phase::Linked(_) => client.phase = Phase::Idle,
            Phase::Login(_) => {}
            Phase::Idle | Phase::Lane | Phase::Console(_) | Phase::Closing => return,
        }
        let acquired = lock(&self.shared.core).requeue(pool, reference, since, self.now);
        match acquired {
            Acquired::Granted { id: _, server, check } => match self.take_home(server) {
                Some(server) => {
                    self.granted_now(key, server, check, since);
                    self.begin_if_prepared(key, server);
                }
                None => self.ask_again(key, pool, since),
            },
            // It did not offer to be fed.
            Acquired::Linked(_) => {}
            Acquired::Queued(ticket) => {
                if let Some(client) = self.clients.get_mut(key) {
                    match &mut client.phase {
                        Phase::Login(login) => login.ticket = Some((pool, ticket)),
                        phase => *phase = Phase::Waiting { ticket, since, notified: false },
                    }
                }
                self.launch(pool);
            }
        }
    }

    fn is_client_work(&mut self, server: Key) -> bool {
        self.server(server).is_some_and(|server| matches!(server.work, Work::Client(_)))
    }

    /// Links client and server, or begins to prepare the server.
    pub(super) fn granted_now(&mut self, key: Key, server_key: Key, check: bool, since: Instant) {
        let Some(client) = self.clients.get_mut(key) else { return };
        if let Phase::Login(login) = &mut client.phase {
            login.ticket = None;
            return match login.step {
                LoginStep::AuthQuery { .. } => self.auth_query_begin(key, server_key),
                _ => {
                    let Some(server) = self.server(server_key) else { return };
                    server.work = Work::Resting;
                    let pool = server.pool.clone();
                    self.give_back(server_key);
                    match pool.welcome() {
                        Some(_) => self.welcome(key),
                        // RECONNECT has come since: what a new server says is waited for.
                        None => drop(self.acquire(key, pool.id, None)),
                    }
                }
            };
        }
        client.phase = Phase::Linked(server_key);
        let waited = self.now.saturating_duration_since(since).as_micros() as u64;
        client.wait_us = waited;
        let Some(Entry::Here(server)) = self.servers.get_mut(server_key) else { return };
        server.link.begin();
        server.ending = false;
        server.request_at = self.now;
        let pool = server.pool.id;
        let same = Arc::ptr_eq(&server.parameters, &client.parameters);
        if !check && same {
            server.work = Work::Client(key);
            self.count_assignment(key, pool);
        } else {
            server.work = Work::Preparing { client: key, step: PrepareStep::Check };
        }
        if check {
            self.ask(server_key, |server| server.pool.settings.load().check_query.to_string());
        } else if !same {
            self.prepared(server_key, key, PrepareStep::Check, None);
        }
    }

    /// The client has its server, and its wait is over. Not before that is ready for it: if it turns out dead, the client waits on.
    fn count_assignment(&mut self, key: Key, pool: PoolId) {
        let Some(waited) = self.clients.get(key).map(|client| client.wait_us) else { return };
        let meter = self.meter(pool);
        meter.stats.server_assignment_count += 1;
        meter.stats.wait_time += waited;
        meter.latency.wait.record(waited);
    }

    /// Sends a query of the pooler's own.
    fn ask(&mut self, key: Key, sql: impl FnOnce(&Server) -> String) {
        let Some(server) = self.server(key) else { return };
        let sql = sql(server);
        let mut out = Vec::new();
        server.refusal = None;
        server.link.inject_query(&sql, &mut out);
        if let Err(error) = server.outbox.send(&mut server.transport, &out) {
            // Not at once: the caller may hold what the client said, which goes to the server that the client is given then.
            let reason = format!("server write failed: {error}");
            self.post(self.index, Box::new(move |worker| worker.close_server(key, &reason)));
        }
    }

    /// One step of the preparation of a server for a client is done. Forwards nothing: the caller may hold a request in the scratch buffer.
    pub(super) fn prepared(&mut self, key: Key, client_key: Key, step: PrepareStep, failed: Option<Vec<u8>>) {
        let Some(Entry::Here(server)) = self.servers.get_mut(key) else { return };
        if let Some(error) = failed {
            let message = crate::error_message(&error);
            if step == PrepareStep::Restore {
                let pool = server.pool.id;
                // The client's own settings cannot be had on this server. It has rolled back those that came before the one it refuses.
                if server.link.is_quiescent() {
                    server.work = Work::Client(client_key);
                } else {
                    server.work = Work::Resting;
                    self.close_server(key, &format!("restoring parameters failed: {message}"));
                }
                let why = format!("restoring session parameters failed: {message}");
                self.count_assignment(client_key, pool);
                self.shadow_refused(client_key, &why);
                return self.close_client(client_key, Farewell::told(SqlState::INVALID_PARAMETER_VALUE, why));
            }
            return self.close_server(key, &format!("check query failed: {message}"));
        }
        let Some(client) = self.clients.get_mut(client_key) else { return };
        if step == PrepareStep::Check {
            if let Some(restore) = server.parameters.restore_query(&client.parameters) {
                server.work = Work::Preparing { client: client_key, step: PrepareStep::Restore };
                // What its client says goes behind at once, if it is not to be told to mirrors, which measure from the first request on, and the
                // kernel is not to forward the answers: it can only where nothing else is outstanding.
                let is_mirrored = client.mirror.is_some();
                let goes_ahead = restore.cannot_fail && !is_mirrored && !self.is_fed_pool(client_key);
                if !goes_ahead {
                    return self.ask(key, |_| restore.query);
                }
                let Some(server) = self.server(key) else { return };
                let mut out = Vec::new();
                server.work = Work::Client(client_key);
                server.refusal = None;
                server.link.inject_query(&restore.query, &mut out);
                // The two go in one write. If nothing of the request can go yet, the end of this turn sends what there is.
                server.outbox.hold_back(&out);
                let pool = server.pool.id;
                self.holding_back.push(key);
                return self.count_assignment(client_key, pool);
            }
        }
        if step == PrepareStep::Restore && !Arc::ptr_eq(&client.parameters, &server.parameters) {
            // What the server made of the client's values is what the client has: it may spell them its own way.
            let mut set = (*client.parameters).clone();
            for (name, value) in server.parameters.iter() {
                if set.get(name).is_some() {
                    set.set(name, value);
                }
            }
            client.parameters = if set == *server.parameters {
                server.parameters.clone()
            } else {
                self.shared.intern_parameters(set)
            };
        }
        server.work = Work::Client(client_key);
        // Equal in all that can be compared: from now on one pointer tells it.
        if !Arc::ptr_eq(&client.parameters, &server.parameters)
            && client.parameters.is_settled_by(&server.parameters)
        {
            client.parameters = server.parameters.clone();
        }
        if client.readable || client.ended {
            self.again.push(Again::Client(client_key));
        }
        let pool = server.pool.id;
        self.count_assignment(client_key, pool);
    }

    /// The server of a link is at rest between transactions.
    pub(super) fn transaction_over(&mut self, key: Key) {
        let Some(Entry::Here(server)) = self.servers.get_mut(key) else { return };
        let leaves = self.draining && !server.keeps_client() && !self.shared.waits_for_clients();
        if let (true, Some(client)) = (leaves, server.client()) {
            return self.close_client(
                client,
                Farewell::told(SqlState::ADMIN_SHUTDOWN, reason::SERVER_SHUTTING_DOWN),
            );
        }
        let Some(client_key) = server.client() else { return };
        // Before the look at what is on its way, because the client may leave or ask on meanwhile. A second call for one boundary does nothing.
        if self.clients.get(client_key).is_some_and(|client| client.mirror.is_some()) {
            self.mirror_boundary(client_key);
        }
        let Some(Entry::Here(server)) = self.servers.get_mut(key) else { return };
        server.ending = !server.is_clear();
        if server.ending {
            // A COPY that failed ends before the server has read what it ignores: the next client's requests must not overtake that.
            return self.again_soon.push(Again::Unclear(key));
        }
        if server.link.is_doubtful() {
            // The client stays: what still comes is its own. This comes back here.
            return self.resync(key);
        }
        if server.dedicated || server.pool_mode() == PoolMode::Session {
            let Some(client) = self.clients.get_mut(client_key) else { return };
            client.why = Why::default();
            // There is room again for a client that was not read because too many answers were outstanding.
            if client.readable || client.ended {
                self.again.push(Again::Client(client_key));
            }
            return self.lane_offer_session(client_key, key);
        }
        if let Some(client) = self.clients.get_mut(client_key) {
            client.phase = Phase::Idle;
            client.why = Why::default();
            client.query_at = None;
            client.transaction_at = None;
            // What is left in the inbox is half a message: its rest will be announced.
            if client.readable || client.ended {
                self.again.push(Again::Client(client_key));
            }
        }
        self.lane_unlink(client_key);
        self.clean(key);
        self.lane_offer(client_key);
        self.was_busy(client_key);
    }

    /// See [`Again::Unclear`].
    pub(super) fn lane_unclear(&mut self, key: Key) {
        let Some(server) = self.server(key) else { return };
        server.ending = false;
        let is_clear = server.is_clear();
        if !is_clear && server.is_flooding() {
            return self.close_server(key, FLOODING);
        }
        match server.work {
            Work::Client(_) if server.link.is_quiescent() => self.transaction_over(key),
            Work::Settling { step: SettleStep::Leaving, .. } if is_clear => self.abandon(key),
            Work::Settling { step: SettleStep::Leaving, .. } => self.again_soon.push(Again::Unclear(key)),
            // The server has spoken unasked, which goes on as ever; the client is heard again.
            Work::Client(client) => {
                if self.clients.get(client).is_some_and(|client| client.readable || client.ended) {
                    self.again.push(Again::Client(client));
                }
            }
            _ => {}
        }
    }

    /// A COPY has failed in a way that leaves open how many answers are still to come. The server is of use when that is known.
    fn resync(&mut self, key: Key) {
        let Some(server) = self.server(key) else { return };
        let mut out = Vec::new();
        server.link.resync(&mut out);
        if let Err(error) = server.outbox.send(&mut server.transport, &out) {
            self.close_server(key, &format!("server write failed: {error}"));
        }
    }

    /// The same for one without client: `settled` goes on.
    fn resync_alone(&mut self, key: Key) {
        let now = self.now;
        let Some(server) = self.server(key) else { return };
        let id = server.id;
        server.work = Work::Settling { step: SettleStep::Draining, since: now };
        let is_canceling = {
            let mut core = lock(&self.shared.core);
            core.testing(id);
            core.is_canceling(id)
        };
        // A cancel request could hit the question: `cancel_released` comes back here.
        if !is_canceling {
            self.resync(key);
        }
    }

    /// A server without client, at rest: resets it if the pool wants that, then gives it back.
    fn clean(&mut self, key: Key) {
        let now = self.now;
        let Some(server) = self.server(key) else { return };
        if server.link.is_doubtful() {
            return self.resync_alone(key);
        }
        let reset = if server.pool.resets() { server.pool.settings.load().reset_query.clone() } else { None };
        let id = server.id;
        match reset {
            // A cancel request must not hit the reset query: `cancel_finished` comes back here.
            Some(_) if lock(&self.shared.core).is_canceling(id) => {
                if let Some(server) = self.server(key) {
                    server.work = Work::Settling { step: SettleStep::Draining, since: now };
                }
            }
            Some(query) => {
                let Some(server) = self.server(key) else { return };
                server.work = Work::Settling { step: SettleStep::Resetting, since: now };
                lock(&self.shared.core).testing(id);
                self.ask(key, |_| query.to_string());
            }
            None => {
                if let Some(server) = self.server(key) {
                    server.work = Work::Resting;
                }
                self.give_back(key);
            }
        }
    }

    /// A server that came to rest without client goes on: rolls back, resets, returns.
    pub(super) fn settled(&mut self, key: Key) {
        let now = self.now;
        let Some(server) = self.server(key) else { return };
        let failed = server.refusal.take();
        let Work::Settling { step, .. } = server.work else { return };
        let (id, status) = (server.id, server.link.status());
        // The same for a ROLLBACK.
        if step == SettleStep::Draining && lock(&self.shared.core).is_canceling(id) {
            return;
        }
        let Some(server) = self.server(key) else { return };
        if step == SettleStep::Draining && server.link.is_doubtful() {
            return self.resync_alone(key);
        }
        match (step, status) {
            (SettleStep::Draining, Status::Idle) => self.clean(key),
            (SettleStep::Draining, _) => {
                server.work = Work::Settling { step: SettleStep::RollingBack, since: now };
                self.ask(key, |_| "ROLLBACK".to_owned());
            }
            (SettleStep::RollingBack, Status::Idle) if failed.is_none() => self.clean(key),
            (SettleStep::Connecting, Status::Idle) => {
                // PgBouncer goes on too. Closing it would only have the next connection fail the same way, without an end.
                if let Some(error) = failed {
                    let message = crate::error_message(&error);
                    log_socket!(
                        Error,
                        server.label(),
                        "connect_query_failed",
                        "connect_query failed: {message}"
                    );
                }
                self.serves(key);
            }
            (SettleStep::Connecting, _) => {
                let reason = "connect_query left a transaction open: let it end with COMMIT";
                let error = ConnectError { message: reason.to_owned(), refused: None };
                server.pool.last_error.store(Some(Arc::new(error)));
                // As a login that failed, so that the next attempt waits for `server_login_retry`.
                lock(&self.shared.core).closed(id, true, now);
                self.close_server(key, reason);
            }
            (SettleStep::Resetting, Status::Idle) if failed.is_none() => {
                server.work = Work::Resting;
                self.give_back(key);
            }
            _ => {
                let message = failed.as_deref().map(crate::error_message).unwrap_or_default();
                self.close_server(key, &format!("reset of the connection failed: {message}"));
            }
        }
    }

    /// A server of nobody that had something to say: back to rest when all of it was said, if it stays alive.
    pub(super) fn rest_again(&mut self, key: Key) {
        let Some(server) = self.server(key).filter(|server| matches!(server.work, Work::Resting)) else {
            return;
        };
        if server.link.is_ending() {
            return self.close_server(key, reason::SERVER_ENDS);
        }
        // With more to read, it has its turn again.
        if server.link.is_quiescent() && !server.readable {
            self.give_back(key);
        }
    }

    /// Hands a clean server to the core, which parks it or grants it on.
    pub(crate) fn give_back(&mut self, key: Key) {
        let Some(Entry::Here(server)) = self.servers.get_mut(key) else { return };
        if server.dedicated {
            return self.close_server(key, "replication client left");
        }
        if server.link.is_ending() {
            return self.close_server(key, reason::SERVER_ENDS);
        }
        let id = server.id;
        // What it said last may not be all: its end, say, was told with that. And the rest of a message that was cut on its way would go to
        // the next client. `rest_again` comes back here.
        if server.readable || !server.inbox.is_empty() {
            if server.readable || super::forward::holds_message(&server.inbox) {
                server.readable = true;
                self.again.push(Again::Server(key));
            } else {
                // The sweep waits so long for the rest, and no longer.
                server.request_at = self.now;
            }
            let mut core = lock(&self.shared.core);
            // One that has just logged in is not ready before it is released.
            if !core.is_login(id) {
                core.testing(id);
            }
            return;
        }
        if !server.lane_tried && server.pool.lane().is_some() {
            self.lane_register_server(key);
        }
        let Some(entry) = self.servers.get_mut(key) else { return };
        let Entry::Here(server) = std::mem::replace(entry, Entry::Parked(id)) else { return };
        let released = lock(&self.shared.core).release(id, server, self.now);
        match released {
            Released::Parked => {}
            Released::Grant { client, since, server, check } => {
                // Whoever gets it may give it back at once, to the next of thousands that wait.
                if client.worker == self.index && self.grants_nested < GRANTS_NESTED_MAX {
                    self.grants_nested += 1;
                    self.granted(client, server, check, since);
                    self.grants_nested -= 1;
                } else {
                    let pass = move |worker: &mut Worker| worker.granted(client, server, check, since);
                    self.post(client.worker, Box::new(pass));
                }
            }
            Released::Unready(server) => {
                if let Some(entry) = self.servers.get_mut(key) {
                    *entry = Entry::Here(server);
                }
                if let Some(server) = self.server(key) {
                    server.readable = true;
                }
                self.again.push(Again::Server(key));
            }
            Released::Held(server) => {
                if let Some(entry) = self.servers.get_mut(key) {
                    *entry = Entry::Here(server);
                }
            }
            Released::Close(server, reason) => {
                let pool = id.pool;
                self.bury(server, reason.text());
                self.launch(pool);
            }
        }
    }

    /// Opens a connection although nobody waits, because those who would are refused while connecting fails.
    pub(super) fn relaunch(&mut self, pool: PoolId) {
        let id = lock(&self.shared.core).retry(pool, self.now);
        if let Some(id) = id {
            self.open_server(id, false);
        }
    }

    /// Opens connections as the pool needs and may have.
    pub(crate) fn launch(&mut self, pool: PoolId) {
        loop {
            let launch = lock(&self.shared.core).launch(pool, self.now);
            match launch {
                Launch::Open { id, from_reserve } => self.open_server(id, from_reserve),
                Launch::Evict(_, server) => self.bury(server, reason::EVICTED),
                Launch::Refuse(clients) => {
                    for (client, ticket) in clients {
                        self.post(
                            client.worker,
                            Box::new(move |worker| worker.refuse(key_of(client), pool, ticket)),
                        );
                    }
                }
                Launch::Not => return,
            }
        }
    }

    /// Closes a server that the core has let go.
    pub(crate) fn bury(&mut self, mut server: Box<Server>, reason: &str) {
        if self.shared.settings.load().config.log_disconnections {
            let age = self.now.saturating_duration_since(server.connected_at).as_secs();
            logging::phrase(Some(server.label()), &text::closing(reason, age));
        }
        server.say_goodbye();
        let key = server.key;
        if server.home == self.index {
            self.servers.remove(key);
        } else {
            self.post(server.home, Box::new(move |worker| drop(worker.servers.remove(key))));
        }
    }

    /// A server that works here has failed or is not wanted any more.
    pub(crate) fn close_server(&mut self, key: Key, reason: &str) {
        let Some(Entry::Here(mut server)) = self.servers.remove(key) else { return };
        let id = server.id;
        let pool = server.pool.clone();
        let turn = match &server.work {
            // One that the core has forgotten was given up, and did not fail.
            Work::Login(login) if lock(&self.shared.core).is_login(id) => Some(login.turn),
            _ => None,
        };
        let error = turn.map(|turn| match &server.refusal {
            Some(body) => (turn, ConnectError::refused(body)),
            None => (turn, ConnectError { message: reason.to_owned(), refused: None }),
        });
        // A host that refuses the user is there: the others are not asked now, as libpq does, and stay where they are. But a round that came here
        // because another host was away goes on with the next attempt, or the pool would not leave the host that refuses it.
        let moves_on = error.as_ref().is_some_and(|(turn, error)| {
            let goes_on = error.refused.is_none() || lock(&pool.round).next().is_some();
            goes_on && self.tries_next_host(&pool, *turn)
        });
        // What PostgreSQL refuses to a replication connection, which needs a role and lines of pg_hba.conf of its own, says nothing of others
        // (PgBouncer: `handle_server_startup`). Its client has heard it.
        let is_told = server.refusal.is_some() && server.is_replication_login();
        let error = error.filter(|_| !is_told);
        let tries_next = moves_on && matches!(&error, Some((_, ConnectError { refused: None, .. })));
        // It has logged in, and ended before it served anybody: at once it would only be the same again.
        let served_nobody = !matches!(server.work, Work::Login(_)) && lock(&self.shared.core).is_login(id);
        let has_failed = (error.is_some() && !tries_next) || served_nobody;
        let is_refused = matches!(&error, Some((_, error)) if error.refused.is_some());
        // Whoever sees the failure can tell what it was. Who waits for a mirror does nothing but look, and would do so for ever; clients of others wait
        // for the next attempt.
        if let Some((_, error)) = error {
            pool.last_error.store(Some(Arc::new(error)));
        } else if served_nobody && pool.database.is_mirror {
            let error = ConnectError { message: reason.to_owned(), refused: None };
            pool.last_error.store(Some(Arc::new(error)));
        }
        lock(&self.shared.core).closed(id, has_failed, self.now);
        if is_refused {
            let pool = pool.clone();
            self.shared.broadcast(move |worker| worker.refuse_logins(&pool));
        }
        let affected = match &server.work {
            Work::Client(client) => Some((*client, false)),
            Work::Preparing { client, .. } => Some((*client, true)),
            // Without a word of an answer it was dead before it was asked.
            Work::AuthQuery { client, answer } => Some((*client, answer.is_empty())),
            Work::Login(login) if !tries_next => {
                login.replication.as_ref().map(|(client, _)| (*client, false))
            }
            Work::Login(_) | Work::Identifying { .. } | Work::Settling { .. } | Work::Resting => None,
        };
        if let Some((client, _)) = affected {
            self.lane_unlink(client);
        }
        // What is collected from a server has not been passed on.
        let is_collected = matches!(server.work, Work::AuthQuery { .. });
        let is_cut = server.link.is_answer_cut() && !is_collected;
        self.log_close(&mut server, reason);
        if let Some((client_key, retry)) = affected {
            match self.clients.get(client_key) {
                // The client has not been served yet.
                Some(client) if retry && (client.is_login() || client.phase_server() == Some(key)) => {
                    let since = client.request_at;
                    self.ask_again(client_key, pool.id, since);
                }
                Some(_) => self.close_client(
                    client_key,
                    Farewell {
                        report: (!is_cut && !is_told)
                            .then(|| (SqlState::CONNECTION_FAILURE, reason.to_owned())),
                        reason: reason.to_owned(),
                        is_error: true,
                    },
                ),
                None => {}
            }
        }
        if tries_next {
            if let Work::Login(login) = &mut server.work
                && let Some(replication) = login.replication.take()
            {
                self.open_replication(pool.clone(), replication);
            }
            return self.try_next_host(&pool);
        }
        self.launch(pool.id);
    }

    /// Clients that log in and would have to wait for a server of `pool`, which PostgreSQL refuses, learn it at once.
    fn refuse_logins(&mut self, pool: &Pool) {
        let Some(error) = pool.last_error.load_full() else { return };
        for key in self.clients.keys() {
            let waits = matches!(self.clients.get(key).map(|client| &client.phase),
                Some(Phase::Login(login)) if login.ticket.is_some_and(|(waits_for, _)| waits_for == pool.id));
            if waits {
                self.close_client(key, error.farewell());
            }
        }
    }

    /// Whether the client at `key`, which has just queued, is told that no server of `pool` will come (PgBouncer: `check_fast_fail`).
    fn refuse_waiting(&mut self, key: Key, pool: PoolId) -> bool {
        let error = {
            let names = self.shared.names.read().unwrap_or_else(std::sync::PoisonError::into_inner);
            names.pool(pool).and_then(|pool| pool.last_error.load_full())
        };
        let Some(error) = error.filter(|error| error.refused.is_some()) else { return false };
        {
            let core = lock(&self.shared.core);
            if core.has_servers(pool) || core.is_paused(pool) {
                return false;
            }
        }
        self.close_client(key, error.farewell());
        true
    }

    /// Ends a client that the core has taken out of the queue of `pool`.
    fn refuse(&mut self, key: Key, pool: PoolId, taken: Ticket) {
        let waits = match self.clients.get(key).map(|client| &client.phase) {
            Some(&Phase::Waiting { ticket, .. }) => ticket == taken,
            Some(Phase::Login(login)) => login.ticket == Some((pool, taken)),
            _ => false,
        };
        if waits {
            self.close_client(key, self.login_failing(pool));
        }
    }

    pub(super) fn log_close(&self, server: &mut Server, reason: &str) {
        let config = &self.shared.settings.load().config;
        let age = self.now.saturating_duration_since(server.connected_at).as_secs();
        if config.log_disconnections {
            logging::phrase(Some(server.label()), &text::closing(reason, age));
        }
        server.say_goodbye();
    }

    /// Ends a client: tells it why if that is wanted, takes it out of the queue, brings its server to rest.
    pub(crate) fn close_client(&mut self, key: Key, farewell: Farewell) {
        let Some(client) = self.clients.get_mut(key) else { return };
        if matches!(client.phase, Phase::Closing) {
            return;
        }
        if matches!(client.phase, Phase::Lane) && !self.lane_take(key) {
            return self.close_client_later(key, farewell);
        }
        if self.clients.get(key).is_some_and(|client| client.mirror.is_some()) {
            self.mirror_closing(key, &farewell.reason);
        }
        let Some(client) = self.clients.get_mut(key) else { return };
        let phase = std::mem::replace(&mut client.phase, Phase::Closing);
        // From now on it has some seconds to take what it is owed.
        client.request_at = self.now;
        if !client.is_silent {
            if farewell.is_error {
                let told = Told::of(farewell.report.as_ref().map(|(sqlstate, _)| *sqlstate));
                *lock(&self.shared.client_errors).entry(told).or_default() += 1;
            }
            let config = &self.shared.settings.load().config;
            // The phase has moved on already; names that only the login knew are still wanted.
            let label = client.label_in(&phase);
            if let (Phase::Login(login), true, true) =
                (&phase, farewell.report.is_some(), config.log_connections)
            {
                if let Some(startup) = &login.startup {
                    logging::phrase(Some(label), &text::login_failed(&startup.database, Some(&startup.user)));
                }
            }
            if config.log_disconnections {
                let age = self.now.saturating_duration_since(client.connected_at).as_secs();
                logging::phrase(Some(label), &text::closing(&farewell.reason, age));
            }
            if farewell.is_error && config.log_pooler_errors {
                logging::phrase(Some(label), &text::pooler_error(&farewell.reason));
            }
        }
        // In the middle of an answer it would be taken for a part of that.
        let is_cut = matches!(phase, Phase::Linked(server)
            if matches!(self.servers.get(server), Some(Entry::Here(server)) if server.link.is_answer_cut()));
        let mut out = Vec::new();
        if let (Some((sqlstate, message)), false) = (&farewell.report, is_cut) {
            error_response(&mut out, &Report::new(Severity::Fatal, *sqlstate, message));
        }
        if client.is_clear() {
            if !out.is_empty() {
                let _ = client.outbox.send(&mut client.transport, &out);
            }
        } else if !client.ended && !client.is_flooding {
            // Closed at once, its socket would lose the answer of a transaction that may be committed.
            client.farewell = Some(out);
            self.again_soon.push(Again::Farewell(key));
        }
        let pool = client.pool.clone();
        match phase {
            Phase::Waiting { ticket, .. } => {
                if let Some(pool) = pool {
                    lock(&self.shared.core).cancel_wait(pool.id, ticket, self.me(key));
                }
            }
            Phase::Login(login) => {
                if let Some((pool, ticket)) = login.ticket {
                    lock(&self.shared.core).cancel_wait(pool, ticket, self.me(key));
                }
                if matches!(login.step, LoginStep::AuthQuery { .. }) {
                    self.auth_query_left(key);
                }
            }
            Phase::Linked(server) => self.detach(server, key),
            Phase::Idle | Phase::Lane | Phase::Console(_) | Phase::Closing => {}
        }
        let Some(client) = self.clients.get_mut(key) else { return };
        if client.farewell.is_none() && client.outbox.is_empty() || client.ended || client.is_flooding {
            self.drop_client(key);
        }
    }

    /// See [`Again::Farewell`]. The sweep ends the wait.
    pub(super) fn farewell(&mut self, key: Key) {
        let Some(client) = self.clients.get_mut(key) else { return };
        if client.farewell.is_none() {
            return;
        }
        if !client.is_clear() {
            if client.is_flooding() {
                client.is_flooding = true;
                return self.drop_client(key);
            }
            return self.again_soon.push(Again::Farewell(key));
        }
        let last = client.farewell.take().unwrap_or_default();
        let sent = last.is_empty() || client.outbox.send(&mut client.transport, &last).is_ok();
        if !sent || client.outbox.is_empty() {
            self.drop_client(key);
        }
    }

    /// Ends a client that goes on speaking and does not take what it is told.
    pub(super) fn close_flooding(&mut self, key: Key) {
        let Some(client) = self.clients.get_mut(key) else { return };
        client.is_flooding = true;
        self.close_client(key, Farewell::untold("client sends on without reading what it is told"));
    }

    /// The client of a link is gone: its server comes to rest, or is closed if that is impossible.
    fn detach(&mut self, key: Key, client: Key) {
        let now = self.now;
        self.lane_unlink(client);
        let Some(server) = self.server(key) else { return };
        if server.client() != Some(client) {
            return;
        }
        if server.dedicated {
            server.work = Work::Resting;
            return self.close_server(key, "client left");
        }
        if !server.is_clear() {
            server.work = Work::Settling { step: SettleStep::Leaving, since: now };
            let id = server.id;
            lock(&self.shared.core).testing(id);
            return self.again_soon.push(Again::Unclear(key));
        }
        self.abandon(key);
    }

    /// The client of a link has left, and everything that it said has gone to the server: the rest is said in its place.
    fn abandon(&mut self, key: Key) {
        let now = self.now;
        let Some(server) = self.server(key) else { return };
        if server.link.is_quiescent() {
            return self.clean(key);
        }
        let mut out = Vec::new();
        if !server.link.abandon(&mut out) {
            server.work = Work::Resting;
            return self.close_server(key, "client disconnected in the middle of a message");
        }
        let (busy, settled) = (server.link.outstanding() > 0, server.link.is_settled());
        server.request_at = now;
        server.work = Work::Settling { step: SettleStep::Draining, since: now };
        let id = server.id;
        if let Err(error) = server.outbox.send(&mut server.transport, &out) {
            return self.close_server(key, &format!("server write failed: {error}"));
        }
        lock(&self.shared.core).testing(id);
        if busy {
            // What it asked for is wanted by nobody any more.
            self.cancel_server(key, None);
            self.again.push(Again::Server(key));
        } else if settled {
            self.settled(key);
        }
    }

    /// Forgets a client whose last bytes are written or cannot be.
    pub(super) fn drop_client(&mut self, key: Key) {
        let Some(mut client) = self.clients.remove(key) else { return };
        self.shared.acceptors.left(self.now.saturating_duration_since(client.connected_at));
        client.transport.close_notify();
        if client.lane.is_some() {
            net::reset_on_close(client.transport.fd(), client.is_flooding);
        }
        client.transport.ended_by(if client.ended {
            EndReason::ClientClosed
        } else {
            EndReason::ServerClosed
        });
        if client.is_silent {
            self.silent_clients -= 1;
        } else {
            self.shared.clients.fetch_sub(1, Ordering::Relaxed);
        }
        if client.on_console {
            self.shared.control.consoles.fetch_sub(1, Ordering::Relaxed);
        }
        if client.cancel_key != 0 {
            lock(&self.shared.cancel_keys).targets.remove(&client.cancel_key);
        }
        for counted in [
            client.database.as_ref().filter(|_| client.counted).map(|database| &database.clients),
            client.user.as_ref().filter(|_| client.counted).map(|user| &user.clients),
            client.pool.as_ref().filter(|_| client.in_pool).map(|pool| &pool.clients),
        ]
        .into_iter()
        .flatten()
        {
            counted.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Ends everything at once.
    pub(super) fn close_all(&mut self) {
        for key in self.clients.keys() {
            self.close_client(
                key,
                Farewell {
                    report: Some((SqlState::ADMIN_SHUTDOWN, "pooler is shutting down".into())),
                    reason: "shutdown".into(),
                    is_error: false,
                },
            );
        }
        for key in self.servers.keys() {
            if let Some(Entry::Here(mut server)) = self.servers.remove(key) {
                server.say_goodbye();
            }
        }
    }

    /// Id of a server here, for those who only have its key.
    pub(super) fn server_id(&mut self, key: Key) -> Option<ServerId> {
        self.server(key).map(|server| server.id)
    }
}
