// SPDX-License-Identifier: Apache-2.0
//! Connecting and logging in to PostgreSQL.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use underpass_auth::{ScramKeys, Secret, ServerAuth, ServerLogin as Credentials, ServerStep};
use underpass_config::{Host, LoadBalanceHosts, UnixSocketDir};
use underpass_console::text::{self, reason};
use underpass_pool::ServerId;
use underpass_pool::core::Launch;
use underpass_pool::link::Link;
use underpass_pool::params::{ParameterSet, SESSION_AUTHORIZATION, from_wire};
use underpass_tls::SslMode;
use underpass_wire::startup::ProtocolVersion;
use underpass_wire::startup::build as startup_build;
use underpass_wire::{Header, SqlState};

use super::{Entry, Farewell, Source, Worker, login};
use crate::client::Phase;
use crate::control::say;
use crate::hosts::Turn;
use crate::logging::{self, log_socket};
use crate::net::{self, Endpoint, Inherited, TcpOptions};
use crate::pool::{ConnectError, Pool};
use crate::resolver::Answer;
use crate::server::{Encryption, Server, ServerLogin, ServerLoginStep, SettleStep, Work};
use crate::settings::Settings;
use crate::shared::lock;
use crate::table::Key;
use crate::transport::{Outbox, Transport};

/// Longest message of a login that is taken from a server, in bytes.
const LOGIN_MESSAGE_MAX: usize = 1 << 20;
/// Where PostgreSQL's own socket is when neither `host` nor `unix_socket_dir` says.
const SOCKET_DIRECTORY: &str = "/tmp";

/// A connection to be opened.
pub(super) struct Plan {
    pub id: ServerId,
    pub pool: Arc<Pool>,
    pub turn: Turn,
    pub second_try: Option<Encryption>,
    pub host: String,
    pub port: u16,
    /// Since when it is being opened.
    pub since: Instant,
    /// Startup parameters of a replication client, and the client.
    pub replication: Option<(Key, Vec<(String, String)>)>,
}

impl Worker {
    /// The core wants a connection for this slot.
    pub(super) fn open_server(&mut self, id: ServerId, from_reserve: bool) {
        let names = self.shared.names.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        // With a connection, which it has in the core since this one was asked for, a pool is not let go.
        let Some(pool) = names.pool(id.pool).cloned() else { return };
        drop(names);
        if from_reserve {
            say(&text::reserve_pool(&pool.database.name, &pool.user.name));
        }
        self.open(id, pool, None);
    }

    pub(super) fn open(
        &mut self,
        id: ServerId,
        pool: Arc<Pool>,
        replication: Option<(Key, Vec<(String, String)>)>,
    ) {
        let settings = self.shared.settings.load_full();
        let configured = pool.database.settings.load_full();
        let hosts = configured.host.as_ref().map(|list| list.hosts()).unwrap_or_default();
        let places = hosts.len().max(1);
        let going_on = lock(&pool.round).next();
        let number = going_on.unwrap_or_else(|| match configured.load_balance_hosts {
            // The one that worked last. The addresses of one name are taken in turn in any case.
            LoadBalanceHosts::Disable if places > 1 => pool.database.next_host.load(Ordering::Relaxed),
            _ => pool.database.next_host.fetch_add(1, Ordering::Relaxed),
        });
        let (turn, since) = (Turn { number, places }, self.now);
        let port = configured.port;
        let host =
            hosts.get(number % places).cloned().unwrap_or_else(|| match &settings.config.unix_socket_dir {
                UnixSocketDir::Path(path) => Host::Unix(path.clone()),
                UnixSocketDir::Abstract(prefix) => Host::Abstract(prefix.clone()),
                UnixSocketDir::Off => Host::Unix(PathBuf::from(SOCKET_DIRECTORY)),
            });
        if let Some(path) = host.socket_path(port) {
            let plan =
                Plan { id, pool, turn, second_try: None, host: String::new(), port, since, replication };
            return self.connect(plan, Ok(Endpoint::Unix(path, port)));
        }
        let name = match host {
            Host::Ip(address) => address.to_string(),
            Host::Name(name) => name,
            Host::Unix(_) | Host::Abstract(_) => unreachable!("a socket path was found for these"),
        };
        let plan = Plan { id, pool, turn, second_try: None, host: name.clone(), port, since, replication };
        let config = &settings.config;
        match self.shared.resolver.cached(&name, config.dns_max_ttl, config.dns_nxdomain_ttl) {
            Some(answer) => self.connect_to_any(plan, answer),
            None => self.look_up(plan, name),
        }
    }

    pub(super) fn connect_to_any(&mut self, mut plan: Plan, answer: Answer) {
        let endpoint = answer
            .map(|addresses| {
                // Each time round the hosts, a name's next address.
                let address = addresses[plan.turn.number / plan.turn.places % addresses.len()];
                plan.turn.places *= addresses.len();
                Endpoint::Tcp(SocketAddr::new(address, plan.port))
            })
            .map_err(|error| format!("server DNS lookup failed: {}: {error}", plan.host));
        self.connect(plan, endpoint);
    }

    fn connect(&mut self, plan: Plan, endpoint: Result<Endpoint, String>) {
        let settings = self.shared.settings.load_full();
        let opened = endpoint.and_then(|endpoint| {
            net::connect(&endpoint)
                .map(|fd| (fd, endpoint.clone()))
                .map_err(|error| format!("connect failed: {endpoint}: {error}"))
        });
        let (fd, address) = match opened {
            Ok(opened) => opened,
            Err(message) => {
                return self.connect_failed(plan, message);
            }
        };
        if let Some(peer) = address.socket_address() {
            if let Err(error) =
                TcpOptions::from_config(&settings.config).apply(&fd, peer, Inherited::default())
            {
                log::debug!("socket options: {error}");
            }
        }
        let mode = plan.pool.settings.load();
        let (index, now, socket_id) = (self.index, self.now, self.shared.next_socket_id());
        let dedicated = plan.replication.is_some();
        let local = net::local_endpoint(&fd);
        let key = self.servers.insert(|key| {
            Entry::Here(Box::new(Server {
                lane: None,
                lane_tried: false,
                lane_refused: None,
                transport: Transport::new(fd),
                id: plan.id,
                socket_id,
                key,
                home: index,
                pool: plan.pool.clone(),
                address,
                local,
                work: Work::Login(Box::new(ServerLogin {
                    step: ServerLoginStep::Connecting,
                    auth: None,
                    parameters: ParameterSet::default(),
                    turn: plan.turn,
                    second_try: plan.second_try,
                    host: plan.host,
                    replication: plan.replication,
                })),
                link: Link::new(mode.link),
                parameters: Arc::default(),
                authorization: None,
                inbox: Vec::new(),
                outbox: Outbox::default(),
                readable: false,
                ended: false,
                refusal: None,
                cancel_key: Vec::new(),
                connected_at: plan.since,
                request_at: now,
                dedicated,
                ending: false,
            }))
        });
        let Some(Entry::Here(server)) = self.servers.get(key) else { return };
        if let Err(error) = self.watch(server.transport.fd(), Source::Server, key) {
            self.close_server(key, &format!("cannot watch socket: {error}"));
        }
    }

    /// There is not even a socket.
    pub(super) fn connect_failed(&mut self, plan: Plan, message: String) {
        let Plan { id, pool, turn, replication, .. } = plan;
        pool.last_error.store(Some(Arc::new(ConnectError { message: message.clone(), refused: None })));
        let tries_next = self.tries_next_host(&pool, turn);
        lock(&self.shared.core).closed(id, !tries_next, self.now);
        log::warn!("S: {}/{} {message}", pool.database.name, pool.user.name);
        match replication {
            Some(replication) if tries_next => self.open_replication(pool.clone(), replication),
            Some((client, _)) => {
                self.close_client(client, Farewell::told(SqlState::CONNECTION_FAILURE, message));
            }
            None => {}
        }
        if tries_next {
            self.try_next_host(&pool);
        }
    }

    /// A connection could not be made, or the server is not ready for one. Whether there is another host to be tried at once.
    pub(super) fn tries_next_host(&self, pool: &Pool, turn: Turn) -> bool {
        let database = &pool.database;
        if database.settings.load().load_balance_hosts == LoadBalanceHosts::Disable {
            // Unless another failure has moved on already.
            let (from, to) = (turn.number, turn.number.wrapping_add(1));
            let _ = database.next_host.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed);
        }
        let pauses = lock(&self.shared.core).pauses(pool.id, self.now);
        !pauses && lock(&pool.round).failed(turn)
    }

    /// Opens the connection that failed at one host again, at the next one.
    pub(super) fn try_next_host(&mut self, pool: &Pool) {
        self.launch(pool.id);
        // Those who would wait are refused while connecting fails.
        self.relaunch(pool.id);
    }

    /// A connection for one replication client, which has none.
    pub(super) fn open_replication(&mut self, pool: Arc<Pool>, replication: (Key, Vec<(String, String)>)) {
        loop {
            let launch = {
                let mut core = lock(&self.shared.core);
                // Nothing of a paused pool may be connected, and this one would not end by itself.
                let is_paused = core.is_paused(pool.id);
                (!is_paused).then(|| core.open_dedicated(pool.id, self.now))
            };
            let farewell = match launch {
                Some(Launch::Open { id, .. }) => return self.open(id, pool, Some(replication)),
                Some(Launch::Evict(_, server)) => {
                    self.bury(server, reason::EVICTED);
                    continue;
                }
                Some(Launch::Not | Launch::Refuse(_)) => Farewell::told(
                    SqlState::TOO_MANY_CONNECTIONS,
                    "no server connection left for replication (pool_size)",
                ),
                None => Farewell::told(
                    SqlState::CANNOT_CONNECT_NOW,
                    "no connection for replication while the database is paused: try again after RESUME",
                ),
            };
            return self.close_client(replication.0, farewell);
        }
    }

    /// Something happened on the socket of a server that logs in.
    pub(super) fn server_login_event(&mut self, key: Key) {
        if let Err(reason) = self.server_login_step(key) {
            self.login_broke(key, &reason);
        }
    }

    pub(super) fn login_broke(&mut self, key: Key, reason: &str) {
        match self.second_try(key, reason) {
            Some((plan, address)) => self.connect(plan, Ok(address)),
            None => {
                self.tell_replication_client(key);
                self.close_server(key, reason);
            }
        }
    }

    /// A replication client hears the refusal of its own connection in PostgreSQL's words.
    fn tell_replication_client(&mut self, key: Key) {
        let Some(Entry::Here(server)) = self.servers.get(key) else { return };
        let (Work::Login(login), Some(refusal)) = (&server.work, &server.refusal) else { return };
        let Some((client, _)) = &login.replication else { return };
        if let Some(client) = self.clients.get_mut(*client) {
            let mut out = Vec::new();
            crate::message(&mut out, b'E', refusal);
            let _ = client.outbox.send(&mut client.transport, &out);
        }
    }

    /// `server_tls_sslmode` allow and prefer: the other way of the two, once, at the same address. As in libpq, that is when the server
    /// does not let this connection in (its pg_hba.conf may want the other kind) or the handshake fails, and not for a wrong password.
    fn second_try(&mut self, key: Key, reason: &str) -> Option<(Plan, Endpoint)> {
        let settings = self.shared.settings.load_full();
        let Some(Entry::Here(server)) = self.servers.get_mut(key) else { return None };
        let sslmode = settings.server_tls.as_ref()?.sslmode;
        let first = encryption(server, &settings);
        let Work::Login(login) = &server.work else { return None };
        let is_let_in = || {
            let code = server.refusal.as_ref().map(|body| crate::error_field(body, b'C'));
            code.and_then(|code| SqlState::new(code.as_bytes()))
                != Some(SqlState::INVALID_AUTHORIZATION_SPECIFICATION)
        };
        let second = match (sslmode, first, login.step) {
            _ if login.second_try.is_some() || !matches!(server.address, Endpoint::Tcp(_)) => return None,
            (SslMode::Allow, Encryption::Plain, _) if !is_let_in() => Encryption::Tls,
            (SslMode::Prefer, Encryption::Tls, ServerLoginStep::TlsHandshake) => Encryption::Plain,
            (SslMode::Prefer, Encryption::Tls, _) if server.transport.tls().is_some() && !is_let_in() => {
                Encryption::Plain
            }
            _ => return None,
        };
        if sslmode == SslMode::Prefer && login.step == ServerLoginStep::TlsHandshake {
            warn_of_plain(&server.pool, &login.host, reason);
        }
        // Its slot in the core stays: only the socket is a new one.
        let Some(Entry::Here(mut server)) = self.servers.remove(key) else { return None };
        self.log_close(&mut server, reason);
        let Work::Login(login) = server.work else { return None };
        let Endpoint::Tcp(address) = server.address else { return None };
        let plan = Plan {
            id: server.id,
            pool: server.pool,
            turn: login.turn,
            second_try: Some(second),
            host: login.host,
            port: address.port(),
            since: self.now,
            replication: login.replication,
        };
        Some((plan, Endpoint::Tcp(address)))
    }

    fn server_login_step(&mut self, key: Key) -> Result<(), String> {
        let settings = self.shared.settings.load_full();
        let Some(Entry::Here(server)) = self.servers.get_mut(key) else { return Ok(()) };
        let Work::Login(login) = &mut server.work else { return Ok(()) };
        if login.step == ServerLoginStep::Connecting {
            net::connect_result(server.transport.fd()).map_err(|error| format!("connect failed: {error}"))?;
            if rustix::net::getpeername(server.transport.fd()).is_err() {
                return Ok(());
            }
            if settings.config.log_connections {
                let local = net::local_endpoint(server.transport.fd());
                logging::phrase(Some(server.label()), &text::new_server_connection(local));
            }
            if encryption(server, &settings) == Encryption::Tls {
                let mut out = Vec::new();
                startup_build::ssl_request(&mut out);
                send(server, &out)?;
                login_of(server).step = ServerLoginStep::TlsAnswer;
            } else {
                send_startup(server, &settings)?;
            }
        }
        loop {
            let server = match self.servers.get_mut(key) {
                Some(Entry::Here(server)) if matches!(server.work, Work::Login(_)) => server,
                _ => return Ok(()),
            };
            if login_of(server).step == ServerLoginStep::TlsHandshake {
                drive_handshake(server, &settings)?;
                if login_of(server).step == ServerLoginStep::TlsHandshake {
                    return Ok(());
                }
            }
            let room = if login_of(server).step == ServerLoginStep::TlsAnswer { 1 } else { 4096 };
            let outcome = match server.transport.read_more(&mut server.inbox, room) {
                Ok(outcome) => outcome,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(format!("server login failed: {error}")),
            };
            if outcome.count == 0 {
                return Err("server conn crashed? (closed during login)".to_owned());
            }
            // Its end may have been told together with what this is: it is told once.
            server.readable = outcome.maybe_more || server.ended;
            if login_of(server).step == ServerLoginStep::TlsAnswer {
                tls_answer(server, &settings)?;
                continue;
            }
            while self.login_message(key, &settings)? {}
        }
    }

    /// Uses one message of the server, if there is a whole one and the login is not over.
    fn login_message(&mut self, key: Key, settings: &Settings) -> Result<bool, String> {
        let server = match self.servers.get_mut(key) {
            Some(Entry::Here(server)) if matches!(server.work, Work::Login(_)) => server,
            _ => return Ok(false),
        };
        let header =
            match Header::parse(&server.inbox).map_err(|error| format!("bad packet from server: {error}"))? {
                Some(header) if header.total() > LOGIN_MESSAGE_MAX => {
                    return Err("bad packet from server: too long for a login".to_owned());
                }
                Some(header) if server.inbox.len() >= header.total() => header,
                _ => return Ok(false),
            };
        let message: Vec<u8> = server.inbox.drain(..header.total()).collect();
        let body = &message[5..];
        match header.tag {
            b'R' => {
                let step = match &mut login_of(server).auth {
                    Some(auth) => auth.message(body),
                    None => return Err("server sent authentication out of order".to_owned()),
                };
                self.server_auth_step(key, step)?;
                return Ok(true);
            }
            b'S' => {
                let mut parts = body.split(|&byte| byte == 0);
                let (name, value) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
                login_of(server).parameters.set(&String::from_utf8_lossy(name), &from_wire(value));
            }
            b'K' => server.cancel_key = body.to_vec(),
            b'N' | b'v' => {}
            b'E' => {
                let (severity, text) = (crate::error_field(body, b'S'), crate::error_field(body, b'M'));
                let failed = text::server_login_failed(Some((&severity, &text)));
                // Whoever reads the line, and asks then, asks after the failure.
                if !server.is_replication_login() {
                    lock(&self.shared.core).refused(server.id);
                }
                logging::phrase(Some(server.label()), &failed);
                server.refusal = Some(body.to_vec());
                return Err(failed.text);
            }
            b'Z' => {
                self.server_logged_in(key, settings);
                return Ok(false);
            }
            other => return Err(format!("unexpected message {:?} during login", other as char)),
        }
        Ok(true)
    }

    fn server_auth_step(&mut self, key: Key, step: ServerStep) -> Result<(), String> {
        match step {
            ServerStep::Send(body) => {
                let Some(server) = self.server(key) else { return Ok(()) };
                let mut out = Vec::new();
                crate::message(&mut out, b'p', &body);
                send(server, &out)
            }
            ServerStep::Derive(derivation) => {
                let (shared, index) = (self.shared.clone(), self.index);
                self.shared.deriver.run(derivation, move |keys| {
                    shared.mailboxes[index as usize]
                        .post(Box::new(move |worker| worker.server_derived(key, keys)));
                });
                Ok(())
            }
            ServerStep::Wait | ServerStep::Done => Ok(()),
            ServerStep::Failed(error) => Err(format!("server login failed: {error}")),
        }
    }

    /// The keys of the password that the server wants proved.
    fn server_derived(&mut self, key: Key, keys: ScramKeys) {
        let Some(Entry::Here(server)) = self.servers.get_mut(key) else { return };
        let Work::Login(login) = &mut server.work else { return };
        let Some(auth) = &mut login.auth else { return };
        let step = auth.derived(keys);
        if let Err(reason) = self.server_auth_step(key, step) {
            self.login_broke(key, &reason);
        }
    }

    fn server_logged_in(&mut self, key: Key, settings: &Settings) {
        let Some(Entry::Here(server)) = self.servers.get_mut(key) else { return };
        let Work::Login(mut login) = std::mem::replace(&mut server.work, Work::Resting) else { return };
        server.authorization = login.parameters.get(SESSION_AUTHORIZATION).map(Arc::from);
        if server.authorization.is_some() {
            login.parameters.set(SESSION_AUTHORIZATION, "");
        }
        server.pool.authorization.store(server.authorization.clone().map(Arc::new));
        server.parameters = self.shared.intern_parameters(login.parameters);
        let pool = server.pool.clone();
        pool.last_error.store(None);
        let since_start = self.now.saturating_duration_since(self.shared.started);
        pool.logged_in_ms.store(since_start.as_millis().max(1) as u64, Ordering::Relaxed);
        lock(&pool.round).succeeded();
        if let Some((client, _)) = login.replication {
            return self.replication_ready(key, client);
        }
        if settings.config.log_connections {
            log_socket!(Debug, server.label(), "login_finished", "login finished");
        }
        if self.shared.mirrors.concern(&self.shared.settings.load().config, &pool.database) {
            self.identify(key);
        } else {
            self.begin_serving(key);
        }
        self.launch(pool.id);
    }

    /// A server that has logged in goes into its pool, behind `connect_query`.
    pub(super) fn begin_serving(&mut self, key: Key) {
        let Some(server) = self.server(key) else { return };
        let pool = server.pool.clone();
        let connect_query = pool.database.settings.load().connect_query.clone().filter(|sql| !sql.is_empty());
        match connect_query {
            Some(query) => {
                let now = self.now;
                let Some(server) = self.server(key) else { return };
                server.work = Work::Settling { step: SettleStep::Connecting, since: now };
                let mut out = Vec::new();
                server.link.inject_query(&query, &mut out);
                if let Err(reason) = send(server, &out) {
                    self.close_server(key, &reason);
                }
            }
            None => self.serves(key),
        }
    }

    /// A server is ready for its first client. What it reports now, behind `connect_query`, is what clients are told: what that has set would be
    /// put back for them otherwise.
    pub(super) fn serves(&mut self, key: Key) {
        let Some(server) = self.server(key) else { return };
        server.work = Work::Resting;
        let (id, pool, parameters) = (server.id, server.pool.clone(), server.parameters.clone());
        {
            // Not what one says that RECONNECT has come for meanwhile.
            let mut core = lock(&self.shared.core);
            if !core.is_close_needed(id) {
                pool.welcome.store(Some(parameters));
            }
        }
        self.give_back(key);
    }

    /// A replication client gets a connection of its own, which counts as one of its pool but serves nobody else.
    pub(super) fn replication_login(&mut self, key: Key) {
        let Some(client) = self.clients.get_mut(key) else { return };
        let Some(pool) = client.pool.clone() else { return };
        let Phase::Login(login) = &client.phase else { return };
        let Some(startup) = &login.startup else { return };
        let parameters: Vec<_> = startup
            .parameters
            .iter()
            .filter(|(name, _)| name != "user" && name != "database")
            .cloned()
            .collect();
        if let Phase::Login(login) = &mut client.phase {
            login.step = crate::client::LoginStep::Welcome;
        }
        self.open_replication(pool, (key, parameters));
    }

    fn replication_ready(&mut self, key: Key, client: Key) {
        let Some(Entry::Here(server)) = self.servers.get_mut(key) else { return };
        let pool = server.pool.clone();
        let reported = server.parameters.clone();
        lock(&self.shared.core).dedicated_ready(server.id);
        server.work = Work::Client(client);
        server.link.set_options(underpass_pool::link::LinkOptions {
            rename_statements: false,
            serves_transactions: false,
            ..pool.settings.load().link
        });
        server.link.begin();
        if !self.clients.get(client).is_some_and(|client| client.is_login()) {
            // It may still be there to take its last bytes, but it is on its way out.
            return self.replication_left(key);
        }
        // Its parameters were the server's startup parameters: what that reports is what the client has.
        let told = login::parameter_statuses(&reported, pool.authorization.load_full().as_ref());
        self.welcome_with(client, reported, &told);
        // It may have gone while that was written.
        let welcomed = self.clients.get_mut(client).filter(|state| matches!(state.phase, Phase::Idle));
        let Some(state) = welcomed else { return self.replication_left(key) };
        state.phase = Phase::Linked(key);
        if state.readable || state.ended || !state.inbox.is_empty() {
            self.start_forwarding(client, key);
        }
    }

    /// Nobody else is served by the connection of a replication client.
    fn replication_left(&mut self, key: Key) {
        if let Some(server) = self.server(key) {
            server.work = Work::Resting;
        }
        self.close_server(key, "replication client left");
    }
}

/// Nobody would know that connections which could be encrypted are not. Once for each host, unless the cause changes.
fn warn_of_plain(pool: &Pool, host: &str, cause: &str) {
    let mut told = lock(&pool.database.tls_failures);
    if told.get(host).is_none_or(|before| before != cause) {
        told.insert(host.to_owned(), cause.to_owned());
        let database = &pool.database.name;
        log::warn!(
            "{database}: {cause}: connections to host {host} are not encrypted (server_tls_sslmode = prefer)"
        );
    }
}

fn login_of(server: &mut Server) -> &mut ServerLogin {
    match &mut server.work {
        Work::Login(login) => login,
        _ => unreachable!("only called while the server logs in"),
    }
}

fn send(server: &mut Server, bytes: &[u8]) -> Result<(), String> {
    server
        .outbox
        .send(&mut server.transport, bytes)
        .map(drop)
        .map_err(|error| format!("server write failed: {error}"))
}

/// Whether a server that logs in asks for TLS.
fn encryption(server: &Server, settings: &Settings) -> Encryption {
    let Work::Login(login) = &server.work else { return Encryption::Plain };
    match &settings.server_tls {
        Some(tls) if matches!(server.address, Endpoint::Tcp(_)) => {
            let first = if tls.sslmode == SslMode::Allow { Encryption::Plain } else { Encryption::Tls };
            login.second_try.unwrap_or(first)
        }
        _ => Encryption::Plain,
    }
}

fn tls_answer(server: &mut Server, settings: &Settings) -> Result<(), String> {
    let answer = server.inbox.pop();
    let Some(tls) = &settings.server_tls else {
        return Err("TLS was switched off during a login".to_owned());
    };
    match answer {
        Some(b'S') => {
            let host = login_of(server).host.clone();
            let name = underpass_tls::ServerSide::server_name(&host)
                .map_err(|error| format!("TLS handshake failed: {error}"))?;
            let connection = rustls::ClientConnection::new(tls.config.clone(), name)
                .map_err(|error| format!("TLS handshake failed: {error}"))?;
            server.transport.upgrade(connection.into());
            login_of(server).step = ServerLoginStep::TlsHandshake;
            Ok(())
        }
        Some(b'N') if !tls.sslmode.requires_tls() => send_startup(server, settings),
        Some(b'N') => Err("server refused TLS (server_tls_sslmode)".to_owned()),
        Some(b'E') => Err("server refused SSLRequest with an error".to_owned()),
        _ => Err("unexpected answer to SSLRequest".to_owned()),
    }
}

fn drive_handshake(server: &mut Server, settings: &Settings) -> Result<(), String> {
    let result = server.transport.handshake().map_err(|error| format!("TLS handshake failed: {error}"))?;
    if result {
        let tls = server.transport.tls().and_then(|tls| underpass_tls::describe(tls));
        if let Some(tls) = tls.filter(|_| settings.config.log_connections) {
            logging::phrase(Some(server.label()), &text::tls_established(&tls));
        }
        send_startup(server, settings)?;
    }
    Ok(())
}

fn send_startup(server: &mut Server, settings: &Settings) -> Result<(), String> {
    let pool = server.pool.clone();
    let configured = pool.database.settings.load_full();
    // The clients of a forced user are served as the one that the file names now, though the pool keeps its name.
    let forced = configured.user.as_ref().filter(|_| pool.is_forced.load(Ordering::Relaxed));
    let user = forced.unwrap_or(&pool.user.name);
    let is_pools = *user == pool.user.name;
    // `password` is that of `user`, and of nobody else: the pool of an auth_user, or of a client's own name, does not show it to the server.
    let own = configured.password.as_ref().filter(|_| configured.user.as_ref() == Some(user));
    let secret = match own {
        Some(password) => Some(Secret::parse(password.expose())),
        None => settings
            .users
            .get(user)
            .cloned()
            .or_else(|| pool.secret.load_full().filter(|_| is_pools).map(|secret| (*secret).clone())),
    };
    let proved = pool.proved.load_full().filter(|_| is_pools);
    // A password that a client gave (auth_type plain with a verifier, or any) serves like a stored one.
    let secret = match (secret, proved.as_ref().and_then(|proved| proved.password.as_ref())) {
        (Some(Secret::Plain(password)), _) => Some(Secret::Plain(password)),
        (_, Some(password)) => Some(Secret::Plain(password.clone())),
        (secret, None) => secret,
    };
    let channel_binding = match server.transport.tls() {
        Some(rustls::Connection::Client(connection)) => underpass_tls::ServerSide::end_point_hash(connection),
        _ => None,
    };
    let credentials = Credentials {
        user: user.as_bytes().to_vec(),
        secret,
        keys: proved.and_then(|proved| proved.keys.clone()),
        channel_binding,
    };
    let login = login_of(server);
    login.auth = Some(ServerAuth::new(settings.auth.clone(), credentials));
    login.step = ServerLoginStep::Startup;
    let replication = login.replication.clone();
    let mut parameters: Vec<(&str, &str)> = vec![("user", user), ("database", configured.server_dbname())];
    for (name, value) in configured.startup_parameters() {
        parameters.push((name, value));
    }
    if let Some((_, extra)) = &replication {
        parameters.extend(extra.iter().map(|(name, value)| (name.as_str(), value.as_str())));
    }
    let mut out = Vec::new();
    startup_build::startup_message(
        &mut out,
        ProtocolVersion::V3_0,
        parameters.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes())),
    );
    send(server, &out)
}
