// SPDX-License-Identifier: Apache-2.0
//! A client's login: first packets, TLS, who it is, and what it is told when it is in.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use underpass_auth::intake::{Event, MESSAGE_MAX, Offence, Startup};
use underpass_auth::{ClientAuth, ClientLogin, ClientStep, Credential, Identity, Method, ScramKeys, Secret};
use underpass_config::{AuthType, Config, HbaClient, HbaMethod, NameList};
use underpass_console::Access;
use underpass_console::logline::SocketLabel;
use underpass_console::rows::Replication;
use underpass_console::text::{self, reason};
use underpass_pool::core::ClientRef;
use underpass_pool::params::{ParameterSet, SESSION_AUTHORIZATION, SharedParameters, to_wire};
use underpass_tls::{ClientSide, SslMode};
use underpass_wire::SqlState;
use underpass_wire::backend::{Report, Severity, TransactionStatus, build};
use underpass_wire::startup::{self, ProtocolVersion};

use super::{Again, Farewell, Worker, auth_query, peer};
use crate::client::{Client, LoginStep, Phase};
use crate::logging::{self, log_socket};
use crate::net::{self, Endpoint};
use crate::pool::Wanted;
use crate::settings::Settings;
use crate::shared::{CancelTarget, lock, phase};
use crate::table::Key;
use crate::why::Own;

/// The console's database.
pub(crate) const CONSOLE: &str = "pgbouncer";
/// Bytes that are read of a client at a time before it is in.
const READ_MAX: usize = 4096;
/// Parameters that clients may set whatever the server reports.
const ALWAYS_TRACKED: [&str; 5] =
    ["client_encoding", "DateStyle", "TimeZone", "standard_conforming_strings", "application_name"];

impl Worker {
    pub(super) fn login_readable(&mut self, key: Key, gone: bool) {
        loop {
            let Some(client) = self.clients.get_mut(key) else { return };
            if !client.is_login() {
                // It got in, and what follows is a request.
                if client.readable || !client.inbox.is_empty() || gone {
                    self.again.push(Again::Client(key));
                }
                return;
            }
            // A client that waits for a server has nothing to say; what it sends anyway is not read.
            if matches!(&client.phase, Phase::Login(login) if login.ticket.is_some()) && !gone {
                client.readable = true;
                return;
            }
            match client.transport.read(&mut self.scratch[..READ_MAX]) {
                Ok(outcome) if outcome.count == 0 => {
                    return self.close_client(key, Farewell::quiet("client unexpected eof"));
                }
                Ok(outcome) => {
                    client.inbox.extend_from_slice(&self.scratch[..outcome.count]);
                    client.readable = outcome.maybe_more;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    client.readable = false;
                    return;
                }
                Err(error) => return self.client_io_failed(key, &error),
            }
            if client.inbox.len() > MESSAGE_MAX + READ_MAX {
                return self.close_client(
                    key,
                    Farewell::told(SqlState::PROTOCOL_VIOLATION, "too much data before the login is over"),
                );
            }
            // A new client that asks for encryption has its answer before its socket is watched: what it says next is then mostly there.
            if client.inbox.len() != startup::ENCRYPTION_REQUEST_LEN && !self.watch_client(key) {
                return;
            }
            self.login_step(key);
            match self.clients.get(key) {
                Some(client) if client.is_login() && (client.readable || gone) => {}
                Some(client) if !client.is_login() => {}
                _ => return,
            }
        }
    }

    /// What the client has to prove is known now. It may have sent its password long ago, without waiting to be asked.
    pub(super) fn login_goes_on(&mut self, key: Key) {
        self.login_step(key);
        if self.clients.get(key).is_some_and(|client| client.is_login() && client.readable) {
            self.again.push(Again::Client(key));
        }
    }

    /// Uses what has been read as far as it goes.
    fn login_step(&mut self, key: Key) {
        loop {
            let Some(client) = self.clients.get_mut(key) else { return };
            let before = client.inbox.len();
            let Phase::Login(login) = &client.phase else { return };
            match login.step {
                LoginStep::FirstPacket | LoginStep::Authenticating(_) => self.take_in(key),
                LoginStep::AuthQuery { .. } | LoginStep::Welcome | LoginStep::Cancel => return,
            }
            match self.clients.get(key) {
                Some(client) if client.inbox.len() < before && !client.inbox.is_empty() => {}
                _ => return,
            }
        }
    }

    /// Takes one message and does what it wants.
    fn take_in(&mut self, key: Key) {
        let settings = self.shared.settings.load();
        let Some(client) = self.clients.get_mut(key) else { return };
        let Phase::Login(login) = &mut client.phase else { return };
        let tls = settings.client_tls.as_ref().filter(|_| client.address.ip().is_some());
        let Some(event) = login.intake.next(&mut client.inbox, tls.is_some()) else { return };
        match event {
            Event::NoEncryption => {
                if let Err(error) = client.transport.write(b"N") {
                    self.client_io_failed(key, &error);
                }
            }
            Event::Tls => {
                if let Err(error) = client.transport.write(b"S") {
                    return self.client_io_failed(key, &error);
                }
                if let Some(tls) = tls {
                    self.begin_tls(key, tls.clone());
                }
            }
            Event::DirectTls(hello) => {
                if let Some(tls) = tls {
                    self.begin_direct_tls(key, tls.clone(), &hello);
                }
            }
            Event::Cancel { process_id, secret_key } => self.cancel_requested(key, process_id, &secret_key),
            Event::Startup(startup) => self.started(key, startup, &settings),
            Event::Proof(body) => {
                let LoginStep::Authenticating(machine) = &mut login.step else { return };
                let step = machine.message(&body);
                self.auth_step(key, step);
            }
            Event::Terminate => self.close_client(key, Farewell::quiet("client close request")),
            Event::Refused(offence) => self.close_client(key, offended(&offence)),
        }
    }

    fn begin_tls(&mut self, key: Key, side: Arc<ClientSide>) {
        let Some(client) = self.clients.get_mut(key) else { return };
        let config = side.config.clone();
        if let Phase::Login(login) = &mut client.phase {
            login.tls = Some(side);
        }
        match rustls::ServerConnection::new(config) {
            Ok(connection) => client.transport.upgrade(connection.into()),
            Err(error) => self.close_client(key, Farewell::untold(format!("TLS setup failed: {error}"))),
        }
    }

    fn begin_direct_tls(&mut self, key: Key, side: Arc<ClientSide>, mut hello: &[u8]) {
        let Some(client) = self.clients.get_mut(key) else { return };
        let config = side.config.clone();
        if let Phase::Login(login) = &mut client.phase {
            login.tls = Some(side);
        }
        let mut connection = match rustls::ServerConnection::new(config) {
            Ok(connection) => connection,
            Err(error) => {
                return self.close_client(key, Farewell::untold(format!("TLS setup failed: {error}")));
            }
        };
        let mut taken_in = Ok(());
        while !hello.is_empty() && taken_in.is_ok() {
            taken_in = connection
                .read_tls(&mut hello)
                .map_err(|error| error.to_string())
                .and_then(|_| connection.process_new_packets().map(drop).map_err(|error| error.to_string()));
        }
        client.transport.upgrade(connection.into());
        // The alert, too, if the handshake has failed already: without it the client cannot tell why.
        let flushed = client.transport.flush();
        match (taken_in, flushed) {
            (Ok(()), Ok(_)) => client.readable = true,
            (Ok(()), Err(error)) => self.client_io_failed(key, &error),
            (Err(error), _) => {
                self.close_client(key, Farewell::untold(format!("TLS setup failed: {error}")));
            }
        }
    }

    /// The StartupMessage is here: finds database and user and how the client must prove itself.
    fn started(&mut self, key: Key, startup: Startup, settings: &Settings) {
        let Some(client) = self.clients.get_mut(key) else { return };
        let config = &settings.config;
        if let Phase::Login(login) = &client.phase {
            let direct_ok = match client.transport.tls() {
                Some(rustls::Connection::Server(connection)) => ClientSide::direct_tls_allowed(connection),
                _ => true,
            };
            if login.intake.is_direct_tls() && !direct_ok {
                return self.close_client(
                    key,
                    Farewell::told(SqlState::PROTOCOL_VIOLATION, "direct TLS without ALPN \"postgresql\""),
                );
            }
        }
        let requires_tls = settings.client_tls.as_ref().is_some_and(|tls| tls.sslmode >= SslMode::Require);
        if requires_tls && client.transport.tls().is_none() && client.address.ip().is_some() {
            return self.close_client(
                key,
                Farewell::told(SqlState::INVALID_AUTHORIZATION_SPECIFICATION, reason::SSL_REQUIRED),
            );
        }
        let is_console = startup.database == CONSOLE;
        let user = self.shared.user(&startup.user);
        client.user = Some(user.clone());
        if config.log_connections {
            let tls = client.transport.tls().map(|tls| underpass_tls::describe(tls).unwrap_or_default());
            let replication = match startup.replication.as_deref() {
                None => Replication::None,
                Some("database") => Replication::Logical,
                Some(_) => Replication::Physical,
            };
            let line = text::login_attempt(&startup.database, &startup.user, tls.as_deref(), replication);
            // The database is not settled yet: the line names the one that was asked for.
            let label = SocketLabel { database: Some(&startup.database), ..client.label() };
            logging::phrase(Some(label), &line);
        }
        // What is wrong with the database, or too much of the user, is told when the client has proved who it is.
        let refusal = if is_console {
            None
        } else {
            client.database = self.shared.database(&startup.database);
            let is_late = matches!(&client.phase, Phase::Login(login) if login.is_late);
            self.refuses_all(config, is_late)
        };
        let Some(client) = self.clients.get_mut(key) else { return };
        let Phase::Login(login) = &mut client.phase else { return };
        login.is_console = is_console;
        // Said before anything else, where PostgreSQL says it.
        let mut negotiation = Vec::new();
        if startup.minor > 2 || !startup.unknown_options.is_empty() {
            let version = if startup.minor >= 2 { ProtocolVersion::V3_2 } else { ProtocolVersion::V3_0 };
            build::negotiate_protocol_version(
                &mut negotiation,
                version,
                startup.unknown_options.iter().map(String::as_bytes),
            );
        }
        login.startup = Some(startup);
        if let Some(farewell) = refusal {
            return self.close_client(key, farewell);
        }
        if !negotiation.is_empty() {
            if let Err(error) = client.outbox.send(&mut client.transport, &negotiation) {
                return self.client_io_failed(key, &error);
            }
        }
        self.choose_method(key, settings);
    }

    /// What is told to any client, whatever it asks for.
    fn refuses_all(&self, config: &Config, is_late: bool) -> Option<Farewell> {
        let is_ending = match self.shared.phase.load(Ordering::Relaxed) {
            // Who was let in before is one of the present clients: there is nobody else whom it could ask.
            phase::WAIT_FOR_CLIENTS => is_late,
            phase => phase >= phase::WAIT_FOR_SERVERS,
        };
        if is_ending {
            return Some(Farewell::told(SqlState::ADMIN_SHUTDOWN, "pooler is shutting down"));
        }
        let is_full = self.shared.clients.load(Ordering::Relaxed) > config.max_client_conn;
        is_full.then(|| Farewell::told(SqlState::TOO_MANY_CONNECTIONS, reason::MAX_CLIENT_CONN))
    }

    /// What is told to a client that has proved who it is: before that, anybody could ask which databases there are, and use up a
    /// user's connections. The client counts from here on.
    fn refuses_known(&mut self, key: Key, config: &Config) -> Option<Farewell> {
        let client = self.clients.get_mut(key)?;
        let Some(database) = client.database.clone() else {
            let Phase::Login(login) = &client.phase else { return None };
            let asked = login.startup.as_ref().map_or("", |startup| &startup.database);
            return Some(Farewell::told(
                SqlState::INVALID_CATALOG_NAME,
                format!("no such database: {asked}"),
            ));
        };
        if database.disabled.load(Ordering::Relaxed) {
            return Some(disabled(&database.name));
        }
        let user = client.user.clone()?;
        let told = |what: &str| Some(Farewell::told(SqlState::TOO_MANY_CONNECTIONS, what));
        client.counted = true;
        let of_database = database.clients.fetch_add(1, Ordering::Relaxed) + 1;
        let of_user = user.clients.fetch_add(1, Ordering::Relaxed) + 1;
        let database_max = config.max_db_client_connections(&database.settings.load());
        if database_max > 0 && of_database > database_max {
            return told(reason::MAX_DB_CLIENT_CONNECTIONS);
        }
        let user_max = config.max_user_client_connections(&user.name);
        if user_max > 0 && of_user > user_max {
            return told(reason::MAX_USER_CLIENT_CONNECTIONS);
        }
        None
    }

    fn choose_method(&mut self, key: Key, settings: &Settings) {
        let Some(client) = self.clients.get_mut(key) else { return };
        let Phase::Login(login) = &mut client.phase else { return };
        let Some(startup) = &login.startup else { return };
        let config = &settings.config;
        let is_unix = client.address.ip().is_none();

        // PgBouncer's rule: who runs the pooler may administer it through the unix socket.
        if login.is_console && is_unix && startup.user == CONSOLE {
            let own = rustix::process::getuid().as_raw();
            if net::peer_credentials(client.transport.fd()).is_some_and(|(uid, _)| uid == own) {
                login.console_access = Some(Access::Admin);
                log::info!("{}", text::unix_console_access());
                return self.logged_in(key, underpass_auth::Login::default());
            }
        }
        let mut map = None;
        let method = match config.auth_type {
            AuthType::Any => Method::Any,
            AuthType::Trust => Method::Trust,
            AuthType::Plain => Method::Plain,
            AuthType::Md5 => Method::Md5,
            AuthType::ScramSha256 => Method::ScramSha256,
            // Refuses everybody on a unix socket, where there is no certificate.
            AuthType::Cert => Method::Cert,
            AuthType::Hba => {
                let rule = settings.hba.as_ref().and_then(|hba| {
                    hba.find(&HbaClient {
                        address: client.address.ip(),
                        tls: client.transport.tls().is_some(),
                        database: &startup.database,
                        user: &startup.user,
                        physical_replication: startup
                            .replication
                            .as_deref()
                            .is_some_and(|mode| mode != "database"),
                    })
                });
                map = rule.and_then(|rule| rule.map.clone());
                match rule.map(|rule| rule.method) {
                    Some(HbaMethod::Trust) => Method::Trust,
                    Some(HbaMethod::Md5) => Method::Md5,
                    Some(HbaMethod::Plain) => Method::Plain,
                    Some(HbaMethod::ScramSha256) => Method::ScramSha256,
                    Some(HbaMethod::Cert) => Method::Cert,
                    Some(HbaMethod::Peer) => Method::Peer,
                    Some(HbaMethod::Reject) | None => Method::Reject,
                }
            }
        };
        if let (Method::Any, Some(database)) = (method, &client.database) {
            let Some(forced) = database.settings.load().user.clone() else {
                log_socket!(Error, client.label(), "config_error", "auth_type=any requires forced user");
                return self
                    .close_client(key, Farewell::told(SqlState::CONFIG_FILE_ERROR, reason::CONFIG_ERROR));
            };
            // The name that it gave proves nothing, and is nobody's.
            client.user = Some(self.shared.user(&forced));
        }
        login.method = Some(method);
        login.method_map = map;
        let user = startup.user.clone();
        // A forced user's name and password are the database's; any client name passes with auth_type any.
        let credential = match settings.users.get(&user) {
            Some(Secret::Plain(password)) if password.is_empty() => Some(Credential::NoPassword),
            Some(secret) => Some(Credential::Secret(secret.clone())),
            None => None,
        };
        let may_ask = method != Method::Any && method != Method::Reject;
        match credential {
            Some(credential) => self.authenticate(key, credential),
            None if may_ask && auth_query::can_ask(config, client.database.as_deref()) => {
                self.auth_query_start(key);
            }
            None => self.authenticate(key, Credential::UnknownUser),
        }
    }

    /// The credential is known: the exchange begins.
    pub(super) fn authenticate(&mut self, key: Key, credential: Credential) {
        let settings = self.shared.settings.load();
        let Some(client) = self.clients.get_mut(key) else { return };
        let Phase::Login(login) = &mut client.phase else { return };
        let (Some(startup), Some(method)) = (&login.startup, login.method) else { return };
        if let Credential::Secret(secret) = &credential {
            login.secret = Some(Arc::new(secret.clone()));
        }
        let name = match method {
            Method::Peer => net::peer_credentials(client.transport.fd()).and_then(|(uid, _)| user_name(uid)),
            Method::Cert => match (client.transport.tls(), &login.tls) {
                (Some(rustls::Connection::Server(connection)), Some(tls)) => tls.peer_common_name(connection),
                _ => None,
            },
            _ => None,
        };
        let map_name = login.method_map.clone();
        let user = startup.user.clone();
        let mapped = |system: &str| {
            map_name.as_deref().is_some_and(|map| settings.ident.allows(map, &user, |name| name == system))
        };
        let channel_binding = login.tls.as_ref().and_then(|tls| tls.end_point_hash.clone());
        let login_in = ClientLogin {
            method,
            user: startup.user.as_bytes(),
            credential,
            channel_binding,
            identity: Identity {
                name: name.as_deref(),
                map: map_name.is_some().then_some(&mapped as &dyn Fn(&str) -> bool),
            },
        };
        let (machine, step) = ClientAuth::start(settings.auth.clone(), login_in);
        login.step = LoginStep::Authenticating(Box::new(machine));
        self.auth_step(key, step);
    }

    fn auth_step(&mut self, key: Key, step: ClientStep) {
        let Some(client) = self.clients.get_mut(key) else { return };
        let mut out = Vec::new();
        match step {
            ClientStep::Send(body) => crate::message(&mut out, b'R', &body),
            ClientStep::Derive(derivation) => {
                let (shared, index) = (self.shared.clone(), self.index);
                return self.shared.deriver.run(derivation, move |keys| {
                    shared.mailboxes[index as usize]
                        .post(Box::new(move |worker| worker.client_derived(key, keys)));
                });
            }
            ClientStep::Done { send, login } => {
                if let Some(body) = send {
                    crate::message(&mut out, b'R', &body);
                }
                // With what tells it that it is in, where that is known: in one packet.
                client.outbox.hold_back(&out);
                self.logged_in(key, login);
                if self.clients.get(key).is_some_and(|client| client.outbox.is_held_back()) {
                    self.send_held_back(key);
                }
                return;
            }
            ClientStep::Failed(refusal) => {
                let user = client.user.as_ref().map_or("", |user| &user.name);
                let message = refusal.client_message(user);
                let sqlstate =
                    SqlState::new(refusal.sqlstate().as_bytes()).unwrap_or(SqlState::INVALID_PASSWORD);
                let reason = format!("{message}: {refusal}");
                return self.close_client(
                    key,
                    Farewell { report: Some((sqlstate, message)), reason, is_error: true },
                );
            }
        }
        if let Err(error) = client.outbox.send(&mut client.transport, &out) {
            self.client_io_failed(key, &error);
        }
    }

    /// The keys of a password that the client gave, or that is stored for it.
    fn client_derived(&mut self, key: Key, keys: ScramKeys) {
        let Some(client) = self.clients.get_mut(key) else { return };
        let Phase::Login(login) = &mut client.phase else { return };
        let LoginStep::Authenticating(machine) = &mut login.step else { return };
        let step = machine.derived(keys);
        self.auth_step(key, step);
        // What it said meanwhile is in the inbox, and was announced already.
        let client = self.clients.get(key).filter(|client| client.is_login());
        if client.is_some_and(|client| client.readable || !client.inbox.is_empty()) {
            self.again.push(Again::Client(key));
        }
    }

    /// The client is who it says: to the console, or to its pool.
    pub(super) fn logged_in(&mut self, key: Key, proved: underpass_auth::Login) {
        let settings = self.shared.settings.load();
        let config = &settings.config;
        let Some(client) = self.clients.get_mut(key) else { return };
        let Phase::Login(login) = &mut client.phase else { return };
        let Some(startup) = &login.startup else { return };
        if login.is_console {
            let listed = |list: &NameList| list.contains(&startup.user);
            let any = config.auth_type == AuthType::Any;
            let access = login.console_access.or(if listed(&config.admin_users) {
                Some(Access::Admin)
            } else if listed(&config.stats_users) || any {
                // With `any` whoever comes may look, as with PgBouncer. A name is not proved there, but one that is not listed does not
                // even claim to be an administrator's.
                Some(Access::Stats)
            } else {
                None
            });
            return match access {
                Some(access) => self.console_open(key, access),
                None => self.close_client(
                    key,
                    Farewell::told(SqlState::INVALID_AUTHORIZATION_SPECIFICATION, "not allowed"),
                ),
            };
        }
        if let Some(farewell) = self.refuses_known(key, config) {
            return self.close_client(key, farewell);
        }
        let Some(client) = self.clients.get_mut(key) else { return };
        let Phase::Login(login) = &mut client.phase else { return };
        let Some(startup) = &login.startup else { return };
        let Some(database) = client.database.clone() else { return };
        let configured = database.settings.load();
        let user = match &configured.user {
            Some(forced) => self.shared.user(forced),
            None if config.auth_type == AuthType::Any => {
                return self.close_client(
                    key,
                    Farewell {
                        report: Some((SqlState::PROTOCOL_VIOLATION, "bouncer config error".into())),
                        reason: "auth_type=any requires forced user".into(),
                        is_error: true,
                    },
                );
            }
            None => self.shared.user(&startup.user),
        };
        let pool = self.shared.pool(&database, &user, self.now);
        pool.is_forced.store(configured.user.is_some(), Ordering::Relaxed);
        // What a client proved opens servers for its own name only, never for a forced user's.
        if user.name == startup.user {
            if proved.keys.is_some() || proved.password.is_some() {
                pool.proved.store(Some(Arc::new(proved)));
            }
            if let Some(secret) = login.secret.clone() {
                pool.secret.store(Some(secret));
            }
        }
        pool.clients.fetch_add(1, Ordering::Relaxed);
        client.in_pool = true;
        client.pool = Some(pool.clone());
        client.replication = match startup.replication.as_deref() {
            None => Replication::None,
            Some("database") => Replication::Logical,
            Some(_) => Replication::Physical,
        };
        if client.replication != Replication::None {
            return self.replication_login(key);
        }
        if pool.welcome().is_some() {
            return self.welcome(key);
        }
        // What to tell the client is not known before a server of the pool has logged in.
        login.step = LoginStep::Welcome;
        if let Some(server) = self.acquire(key, pool.id, None) {
            // Granted at once: `acquire` went through `welcome` already.
            let _ = server;
        }
    }

    /// Tells the client that it is in.
    pub(super) fn welcome(&mut self, key: Key) {
        let settings = self.shared.settings.load();
        let Some(client) = self.clients.get_mut(key) else { return };
        let Some(pool) = client.pool.clone() else { return };
        let Some(reported) = pool.welcome() else {
            return self
                .close_client(key, Farewell::told(SqlState::CONNECTION_FAILURE, "server login failed"));
        };
        let Phase::Login(login) = &client.phase else { return };
        let Some(startup) = &login.startup else { return };
        let own = pool.authorization.load_full();
        let known = pool.wanted.load();
        if let Some(known) =
            known.as_ref().filter(|known| known.fits(&startup.parameters, &reported, &own, &settings))
        {
            return self.welcome_with(key, known.parameters.clone(), &known.told);
        }
        match requested_parameters(startup, &reported, &settings, client) {
            Ok(wanted) => {
                // One shared copy, if the client wants what every session has.
                let is_as_reported = wanted == *reported;
                let parameters =
                    if is_as_reported { reported.clone() } else { self.shared.intern_parameters(wanted) };
                let told = parameter_statuses(&parameters, own.as_ref());
                // With the client's address in its application_name, no two want the same.
                if !settings.config.application_name_add_host {
                    let asked = startup.parameters.clone();
                    let (parameters, told) = (parameters.clone(), told.clone());
                    let settings = settings.clone();
                    let known = Wanted { asked, reported, own, settings, parameters, told };
                    pool.wanted.store(Some(Arc::new(known)));
                }
                self.welcome_with(key, parameters, &told);
            }
            Err(message) => self.close_client(key, Farewell::told(SqlState::PROTOCOL_VIOLATION, message)),
        }
    }

    /// The same, with the parameters that its session has, and as it is told of them.
    pub(super) fn welcome_with(&mut self, key: Key, wanted: SharedParameters, told: &[u8]) {
        let settings = self.shared.settings.load();
        let Some(client) = self.clients.get_mut(key) else { return };
        let Some(pool) = client.pool.clone() else { return };
        let Phase::Login(login) = &client.phase else { return };
        let minor = login.startup.as_ref().map_or(0, |startup| startup.minor);
        let mut out = Vec::with_capacity(told.len() + 64);
        build::authentication_ok(&mut out);
        out.extend_from_slice(told);
        client.parameters = wanted;
        let me = ClientRef { worker: self.index, slot: key.index, generation: key.generation };
        let (cancel_key, tail) = self.shared.new_cancel_key(me, minor >= 2);
        client.cancel_key = cancel_key;
        let secret = [&(cancel_key as u32).to_be_bytes()[..], &tail].concat();
        build::backend_key_data(&mut out, (cancel_key >> 32) as u32, &secret);
        if let Some(text) = settings.config.login_notify_message.as_deref().filter(|text| !text.is_empty()) {
            build::notice_response(
                &mut out,
                &Report::new(Severity::Notice, SqlState::SUCCESSFUL_COMPLETION, text),
            );
        }
        build::ready_for_query(&mut out, TransactionStatus::Idle);
        client.phase = Phase::Idle;
        client.request_at = self.now;
        self.meter(pool.id).stats.client_login_count += 1;
        if self.shared.mirrors.is_any() {
            self.mirror_attach(key);
        }
        if self.shared.recordings.is_on() {
            self.recording_identify(key);
        }
        let Some(client) = self.clients.get_mut(key) else { return };
        if client.inbox.is_empty() {
            // The buffer of its login: ten thousand idle clients would keep 40 MB.
            client.inbox = Vec::new();
        }
        // Unless it is offered.
        client.why = Own::Unread.into();
        if client.readable || client.ended || !client.inbox.is_empty() {
            self.again.push(Again::Client(key));
        } else if client.outbox.is_unhindered() {
            // Offered before it is told that it is in: a client that asks at once finds its lane open.
            client.outbox.hold_back_all(out);
            self.lane_offer(key);
            return self.send_held_back(key);
        }
        if let Err(error) = client.outbox.send(&mut client.transport, &out) {
            self.client_io_failed(key, &error);
        }
    }
}

/// The parameters of a session as its client is told of them. Where they name nobody, the session is that of `own`.
pub(super) fn parameter_statuses(parameters: &ParameterSet, own: Option<&Arc<Arc<str>>>) -> Vec<u8> {
    let mut out = Vec::with_capacity(512);
    for (name, value) in parameters.iter() {
        let is_own = value.is_empty() && name.eq_ignore_ascii_case(SESSION_AUTHORIZATION);
        let value = own.filter(|_| is_own).map_or(value, |own| &***own);
        build::parameter_status(&mut out, name.as_bytes(), &to_wire(value));
    }
    out
}

/// What a client is told that said something impossible before it was in.
fn offended(offence: &Offence) -> Farewell {
    match offence {
        Offence::NoTls => Farewell::untold(offence.to_string()),
        Offence::Protocol(version) if version.major == 2 => {
            Farewell::told(SqlState::FEATURE_NOT_SUPPORTED, reason::PROTOCOL_2)
        }
        Offence::Protocol(_) => Farewell::told(SqlState::FEATURE_NOT_SUPPORTED, offence.to_string()),
        Offence::NoUser => Farewell::told(SqlState::INVALID_AUTHORIZATION_SPECIFICATION, reason::NO_USERNAME),
        Offence::NotUtf8 => {
            Farewell::told(SqlState::INVALID_AUTHORIZATION_SPECIFICATION, offence.to_string())
        }
        _ => Farewell::told(SqlState::PROTOCOL_VIOLATION, offence.to_string()),
    }
}

/// What a client of a database is told after DISABLE.
pub(super) fn disabled(database: &str) -> Farewell {
    Farewell::told(SqlState::CANNOT_CONNECT_NOW, format!("database \"{database}\" is disabled"))
}

fn user_name(uid: u32) -> Option<String> {
    nix::unistd::User::from_uid(uid.into()).ok().flatten().map(|user| user.name)
}

/// The parameters a client starts with: what servers report, changed by its StartupMessage.
fn requested_parameters(
    startup: &Startup,
    reported: &ParameterSet,
    settings: &Settings,
    client: &Client,
) -> Result<ParameterSet, String> {
    let config = &settings.config;
    let mut wanted = reported.clone();
    let tracked = |name: &str| {
        ALWAYS_TRACKED.iter().any(|known| known.eq_ignore_ascii_case(name))
            || config.track_extra_parameters.contains_ignore_case(name)
            || reported.get(name).is_some()
    };
    let ignored = |name: &str| config.ignore_startup_parameters.contains_ignore_case(name);
    for (name, value) in &startup.parameters {
        match name.as_str() {
            "user" | "database" | "replication" => {}
            "options" => {
                for (name, value) in option_settings(value).ok_or("unsupported options startup parameter: only '-c config=val' and '--config=val' are allowed")? {
                    if tracked(&name) {
                        wanted.set(&name, &value);
                    } else if !ignored(&name) && !ignored("options") {
                        return Err(format!("unsupported startup parameter in options: {name}"));
                    }
                }
            }
            name if tracked(name) => {
                wanted.set(name, value);
            }
            name if ignored(name) => {}
            name => return Err(format!("unsupported startup parameter: {name}")),
        }
    }
    if config.application_name_add_host {
        let name = wanted.get("application_name").unwrap_or("app").to_owned();
        let name = if name.is_empty() { "app" } else { &name };
        let with_host = match &client.address {
            Endpoint::Tcp(address) => format!("{name} - {}:{}", address.ip(), address.port()),
            Endpoint::Unix(..) => {
                let pid = net::peer_credentials(client.transport.fd()).map_or(0, |(_, pid)| pid);
                format!("{name} - unix({pid})")
            }
        };
        wanted.set("application_name", &with_host);
    }
    Ok(wanted)
}

fn option_settings(options: &str) -> Option<Vec<(String, String)>> {
    let mut all = Vec::new();
    for setting in startup::options::settings(options.as_bytes()) {
        let (name, value) = setting.ok()?;
        all.push((String::from_utf8(name.to_vec()).ok()?, String::from_utf8(value.to_vec()).ok()?));
    }
    Some(all)
}

/// Secret bytes that clients of protocol 3.2 get beyond the four that all get.
const LONG_KEY_TAIL: usize = 28;

impl crate::shared::Shared {
    /// A fresh cancel key for a client, entered into the table: process id and the first four secret bytes, and the further ones that a
    /// client of protocol 3.2 gets (manual, 55.7 "Message Formats": BackendKeyData).
    pub(crate) fn new_cancel_key(&self, client: ClientRef, long: bool) -> (u64, Vec<u8>) {
        let peer_id = self.settings.load().config.peer_id.0;
        let mut keys = lock(&self.cancel_keys);
        loop {
            let (mut bytes, mut tail) = ([0; 8], vec![0; if long { LONG_KEY_TAIL } else { 0 }]);
            if keys.random.fill(&mut bytes).is_err() || keys.random.fill(&mut tail).is_err() {
                return (0, tail);
            }
            let key = peer::mark(u64::from_ne_bytes(bytes), peer_id);
            if key >> 32 != 0 && !keys.targets.contains_key(&key) {
                keys.targets.insert(key, CancelTarget { client, tail: tail.clone().into() });
                return (key, tail);
            }
        }
    }
}
