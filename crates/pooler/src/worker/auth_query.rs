// SPDX-License-Identifier: Apache-2.0
//! `auth_query`: a client's secret is asked from PostgreSQL, as `auth_user`, over a pool of that user.
//!
//! Of several rows the last is taken, as PgBouncer does. An answer without end is nobody's secret: it is cut off, and its server closed.
//! A query that fails is the configuration's fault and not the password's: the client hears PgBouncer's `bouncer config error`, and
//! the log why.

use std::sync::atomic::Ordering;

use underpass_auth::{Credential, auth_query_row};
use underpass_config::{Config, Database};
use underpass_console::text::reason;
use underpass_pool::link::{ClientSide, FrontendContext, Splice};
use underpass_wire::SqlState;
use underpass_wire::frontend::Target;
use underpass_wire::frontend::build;

use super::{Entry, Farewell, Worker, login};
use crate::client::{LoginStep, Phase};
use crate::pool::DatabaseState;
use crate::server::Work;
use crate::table::Key;

/// Longest answer that is collected, in bytes: a name and a secret take some hundreds, and a query may raise notices.
const ANSWER_MAX: usize = 64 * 1024;

impl Worker {
    /// The client's name is in no list: a server of the auth_user's pool is asked.
    pub(super) fn auth_query_start(&mut self, key: Key) {
        let settings = self.shared.settings.load_full();
        let Some(client) = self.clients.get_mut(key) else { return };
        let own = client.database.clone();
        let configured = own.as_ref().map(|database| database.settings.load_full());
        let place = Place::of(&settings.config, configured.as_deref());
        let Some(auth_user) = place.user else { return };
        let database = match place.database {
            Some(name) => match self.shared.database(name) {
                Some(database) if database.disabled.load(Ordering::Relaxed) => {
                    let reason = format!("auth_dbname \"{name}\" is disabled: ENABLE it");
                    return self.auth_query_failed(key, &reason);
                }
                Some(database) => database,
                None => {
                    let reason = format!("auth_dbname \"{name}\" is not configured: add it to [databases]");
                    return self.auth_query_failed(key, &reason);
                }
            },
            None => match own {
                Some(own) if own.disabled.load(Ordering::Relaxed) => {
                    return self.close_client(key, login::disabled(&own.name));
                }
                Some(own) => own,
                None => return,
            },
        };
        let auth_user = self.shared.user(auth_user);
        let pool = self.shared.pool(&database, &auth_user, self.now);
        let Some(client) = self.clients.get_mut(key) else { return };
        if let Phase::Login(login) = &mut client.phase {
            login.step = LoginStep::AuthQuery { database: database.number };
        }
        self.acquire(key, pool.id, None);
    }

    /// The server is here: asks.
    pub(super) fn auth_query_begin(&mut self, key: Key, server_key: Key) {
        let settings = self.shared.settings.load_full();
        let Some(client) = self.clients.get(key) else { return };
        let Phase::Login(login) = &client.phase else { return };
        let Some(startup) = &login.startup else { return };
        let configured = client.database.as_ref().map(|database| database.settings.load_full());
        let query = Place::of(&settings.config, configured.as_deref()).query;
        let mut request = Vec::new();
        build::parse(&mut request, b"", query.as_bytes(), []);
        build::bind(&mut request, b"", b"", [], [Some(startup.user.as_bytes())], []);
        build::describe(&mut request, Target::Portal, b"");
        build::execute(&mut request, b"", 0);
        build::sync(&mut request);
        let work = Work::AuthQuery { client: key, answer: Vec::new() };
        self.ask_and_collect(server_key, work, &request, "auth_query could not be sent");
    }

    /// Asks a server for itself, so that `work` collects what it answers; `failure`: why it is closed if that cannot be sent.
    pub(super) fn ask_and_collect(&mut self, key: Key, work: Work, request: &[u8], failure: &str) {
        let shared = self.shared.clone();
        let Some(server) = self.server(key) else { return };
        server.work = work;
        server.link.begin();
        let (mut side, mut to_client, mut composed) = (ClientSide::default(), Vec::new(), Vec::new());
        let mut out = Splice::new(&mut composed);
        let mut context =
            FrontendContext { client: &mut side, statements: &shared.statements, to_client: &mut to_client };
        let fed = server.link.frontend(request, &mut context, &mut out);
        let sent = server.outbox.send(&mut server.transport, out.bytes(request));
        if fed.is_err() || sent.is_err() {
            self.close_server(key, failure);
        }
    }

    /// Something of the answer has come: looks whether it is complete, or too much. False if the server has left this worker's hands.
    pub(super) fn auth_query_answered(&mut self, server_key: Key) -> bool {
        let Some(server) = self.server(server_key) else { return false };
        let Work::AuthQuery { client, answer } = &server.work else { return true };
        let (client, length) = (*client, answer.len());
        if length > ANSWER_MAX {
            server.work = Work::Resting;
            let reason = format!(
                "the answer is longer than {ANSWER_MAX} bytes: let auth_query select one row of two columns, user name and secret"
            );
            self.close_server(server_key, &format!("auth_query: {reason}"));
            self.auth_query_failed(client, &reason);
            return false;
        }
        if server.link.is_settled() {
            self.auth_query_done(server_key);
            return false;
        }
        true
    }

    /// The answer is complete.
    fn auth_query_done(&mut self, server_key: Key) {
        let Some(server) = self.server(server_key) else { return };
        let Work::AuthQuery { client, answer } = std::mem::replace(&mut server.work, Work::Resting) else {
            return;
        };
        self.give_back(server_key);
        match read_answer(&answer) {
            Ok(credential) => {
                self.authenticate(client, credential);
                self.login_goes_on(client);
            }
            Err(reason) => self.auth_query_failed(client, &reason),
        }
    }

    /// The client left before its answer came. Nobody waits for that, and it may never come, so the server goes too, as PgBouncer has it
    /// (objects.c, `disconnect_client`): a pool of servers that ask in vain would let nobody in any more.
    pub(super) fn auth_query_left(&mut self, client: Key) {
        let is_asked = |entry: &Entry| matches!(entry, Entry::Here(server) if matches!(server.work, Work::AuthQuery { client: of, .. } if of == client));
        let asked = self.servers.iter().find(|(_, entry)| is_asked(entry)).map(|(key, _)| key);
        let Some(key) = asked else { return };
        if let Some(server) = self.server(key) {
            server.work = Work::Resting;
        }
        self.close_server(key, "client disconnect while server was not ready");
    }

    fn auth_query_failed(&mut self, client: Key, reason: &str) {
        let mut farewell = Farewell::told(SqlState::PROTOCOL_VIOLATION, reason::CONFIG_ERROR);
        farewell.reason = format!("auth_query failed: {reason}");
        self.close_client(client, farewell);
    }
}

/// Where the secret of a client's user is asked.
struct Place<'a> {
    user: Option<&'a str>,
    /// `None`: in the client's own database.
    database: Option<&'a str>,
    query: &'a str,
}

impl<'a> Place<'a> {
    /// For clients of `database`. The console is none of `[databases]`, nor is one that does not exist: what holds for all is theirs.
    fn of(config: &'a Config, database: Option<&'a Database>) -> Self {
        match database {
            Some(database) => Self {
                user: config.auth_user(database),
                database: config.auth_dbname(database),
                query: config.auth_query(database),
            },
            None => Self {
                user: config.auth_user.as_deref(),
                database: config.auth_dbname.as_deref(),
                query: &config.auth_query,
            },
        }
    }
}

/// Whether there is somebody to ask for the users of a database, or without one for those of the console.
pub(super) fn can_ask(config: &Config, database: Option<&DatabaseState>) -> bool {
    let configured = database.map(|database| database.settings.load_full());
    let place = Place::of(config, configured.as_deref());
    place.user.is_some() && (place.database.is_some() || database.is_some())
}

/// The credential in the answer's last row; no row = no such user.
fn read_answer(mut answer: &[u8]) -> Result<Credential, String> {
    let mut credential = Credential::UnknownUser;
    while let Some(header) = answer.first_chunk::<5>() {
        let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]) as usize;
        let Some(body) = answer.get(5..length + 1) else { break };
        match header[0] {
            b'D' => {
                let columns = columns(body).ok_or("malformed row")?;
                credential = auth_query_row(&columns).map_err(|error| error.to_string())?;
            }
            b'E' => return Err(crate::error_message(body)),
            // What is behind it is of the server's end, not of the answer.
            b'Z' => break,
            _ => {}
        }
        answer = &answer[length + 1..];
    }
    Ok(credential)
}

pub(super) fn columns(body: &[u8]) -> Option<Vec<Option<&[u8]>>> {
    let (count, mut rest) = body.split_first_chunk::<2>()?;
    let mut columns = Vec::new();
    for _ in 0..u16::from_be_bytes(*count) {
        let (length, tail) = rest.split_first_chunk::<4>()?;
        match usize::try_from(i32::from_be_bytes(*length)) {
            Ok(length) => {
                let (value, tail) = tail.split_at_checked(length)?;
                columns.push(Some(value));
                rest = tail;
            }
            Err(_) => {
                columns.push(None);
                rest = tail;
            }
        }
    }
    Some(columns)
}
