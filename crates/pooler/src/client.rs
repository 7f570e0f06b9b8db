// SPDX-License-Identifier: Apache-2.0
//! A client connection, as its worker holds it.

use std::sync::Arc;
use std::time::Instant;

use underpass_auth::intake::{Intake, Startup};
use underpass_auth::{ClientAuth, Method, Secret};
use underpass_config::{CONSOLE_DATABASE, Config};
use underpass_console::logline::SocketLabel;
use underpass_console::rows::Replication;
use underpass_console::{Access, Side, SocketId};
use underpass_pool::PoolId;
use underpass_pool::core::{ClientRef, Ticket};
use underpass_pool::link::ClientSide;
use underpass_pool::params::SharedParameters;
use underpass_tls::ClientSide as TlsSide;

use crate::lanes::ClientLane;
use crate::net::Endpoint;
use crate::pool::{ClientTimeouts, DatabaseState, Pool, UserState};
use crate::table::Key;
use crate::transport::{Outbox, Transport};
use crate::why::Why;
use crate::worker::mirror::Role;

/// What a client is doing.
pub(crate) enum Phase {
    /// Up to the end of authentication.
    Login(Box<Login>),
    /// Between transactions.
    Idle,
    /// In the queue of its pool. The ticket finds it there.
    Waiting { ticket: Ticket, since: Instant, notified: bool },
    /// Between transactions or in one, in the hands of a kernel lane.
    Lane,
    /// Has a server, by its key at this worker.
    Linked(Key),
    /// Talks to the admin console.
    Console(Access),
    /// Has been told why it must leave; its last bytes are being written.
    Closing,
}

/// State of a login.
#[derive(Default)]
pub(crate) struct Login {
    pub step: LoginStep,
    pub startup: Option<Startup>,
    /// The login goes to the console, and what it may do there if that is settled already.
    pub is_console: bool,
    pub console_access: Option<Access>,
    /// Its place in a queue, while it waits for a server.
    pub ticket: Option<(PoolId, Ticket)>,
    /// Takes apart what the client says.
    pub intake: Intake,
    pub method: Option<Method>,
    /// Ident map of the HBA rule.
    pub method_map: Option<String>,
    /// The stored secret, which may open servers too.
    pub secret: Option<Arc<Secret>>,
    /// What its TLS was begun with. A RELOAD may have put another certificate in force since.
    pub tls: Option<Arc<TlsSide>>,
    /// It came when a shutdown had closed the listening sockets, by our own unix socket.
    pub is_late: bool,
}

#[derive(Default)]
pub(crate) enum LoginStep {
    /// Waits for SSLRequest, CancelRequest or StartupMessage.
    #[default]
    FirstPacket,
    /// Waits for the answer of `auth_query`.
    AuthQuery {
        /// The number of the database that is asked.
        database: u32,
    },
    /// Exchanges authentication messages.
    Authenticating(Box<ClientAuth>),
    /// Waits for a server to learn what to tell the client.
    Welcome,
    /// Has asked for a cancellation, and waits until it is carried out or `cancel_wait_timeout` is over.
    Cancel,
}

/// A client.
pub(crate) struct Client {
    /// Its place in the kernel lanes. Before the socket: it goes first.
    pub lane: Option<Box<ClientLane>>,
    pub transport: Transport,
    pub id: SocketId,
    pub address: Endpoint,
    pub phase: Phase,
    pub side: ClientSide,
    /// Parameters as this client wants them.
    pub parameters: SharedParameters,
    /// Bytes read and not used yet: while waiting, and incomplete messages.
    pub inbox: Vec<u8>,
    /// Bytes in the inbox with which it is given a server: a link has said that it can do nothing with less.
    pub wants: usize,
    pub outbox: Outbox,
    /// What it is told at last, perhaps nothing, when all that its lane forwarded to it is in its socket.
    pub farewell: Option<Vec<u8>>,
    /// It is let go because it goes on speaking and does not take what it is told.
    pub is_flooding: bool,
    /// Readiness was seen and not used up, because the client waits or its server is full.
    pub readable: bool,
    /// The peer has ended its stream.
    pub ended: bool,
    pub pool: Option<Arc<Pool>>,
    pub database: Option<Arc<DatabaseState>>,
    pub user: Option<Arc<UserState>>,
    /// Counts among the clients of its database and user; of its pool.
    pub counted: bool,
    pub in_pool: bool,
    /// First 8 bytes of the cancel key (process id and secret), 0 = none.
    pub cancel_key: u64,
    pub connected_at: Instant,
    /// Last request, or the login.
    pub request_at: Instant,
    /// Since when its lane kept what is in its inbox, if it was taken out of it for that.
    pub kept_at: Option<Instant>,
    /// The running query's and transaction's start, while linked.
    pub query_at: Option<Instant>,
    pub transaction_at: Option<Instant>,
    /// Wait of the last assignment.
    pub wait_us: u64,
    /// Why its transactions run in user space just now, where there are kernel lanes.
    pub why: Why,
    /// In a replication stream: has a server of its own.
    pub replication: Replication,
    /// Counts among the console's clients.
    pub on_console: bool,
    /// A session with a mirror: it has no socket, is no client of anybody's, and counts nowhere.
    pub is_silent: bool,
    /// The look at which it was last among those that are busy (`worker/moving.rs`).
    pub busy_at: u32,
    /// What it has to do with mirroring; none for nearly all.
    pub mirror: Option<Box<Role>>,
}

impl Client {
    /// One that has said nothing yet.
    pub fn new(transport: Transport, id: SocketId, address: Endpoint, now: Instant) -> Self {
        Self {
            lane: None,
            transport,
            id,
            address,
            phase: Phase::Login(Box::default()),
            side: ClientSide::default(),
            parameters: Arc::default(),
            inbox: Vec::new(),
            wants: 0,
            outbox: Outbox::default(),
            farewell: None,
            is_flooding: false,
            readable: false,
            ended: false,
            pool: None,
            database: None,
            user: None,
            counted: false,
            in_pool: false,
            cancel_key: 0,
            connected_at: now,
            request_at: now,
            kept_at: None,
            query_at: None,
            transaction_at: None,
            wait_us: 0,
            why: Why::default(),
            replication: Replication::None,
            on_console: false,
            is_silent: false,
            busy_at: 0,
            mirror: None,
        }
    }

    pub fn is_login(&self) -> bool {
        matches!(self.phase, Phase::Login(_))
    }

    /// Whether its login is held up until there is a server to ask.
    pub fn waits_in_login(&self) -> bool {
        matches!(&self.phase, Phase::Login(login) if login.ticket.is_some())
    }

    pub fn timeouts(&self, config: &Config) -> ClientTimeouts {
        let global = || ClientTimeouts { query_wait: config.query_wait_timeout, ..ClientTimeouts::default() };
        self.pool.as_ref().map_or_else(global, |pool| pool.timeouts_of(self.user.as_ref(), config))
    }

    /// How log lines name it. Before the login is settled, its names are those that the StartupMessage asked for.
    pub fn label(&self) -> SocketLabel<'_> {
        self.label_in(&self.phase)
    }

    /// The same when `phase` has been taken out.
    pub fn label_in<'a>(&'a self, phase: &'a Phase) -> SocketLabel<'a> {
        let asked = match phase {
            Phase::Login(login) => login.startup.as_ref(),
            _ => None,
        };
        let console = self.on_console.then_some(CONSOLE_DATABASE);
        SocketLabel {
            side: Side::Client,
            id: self.id,
            database: self
                .database
                .as_ref()
                .map(|database| database.name.as_str())
                .or(console)
                .or(asked.map(|asked| asked.database.as_str())),
            user: self
                .user
                .as_ref()
                .map(|user| user.name.as_str())
                .or(asked.map(|asked| asked.user.as_str())),
            peer_id: None,
            address: self.address.peer_address(),
        }
    }
}

/// Where a grant finds its client.
pub(crate) fn key_of(client: ClientRef) -> Key {
    Key { index: client.slot, generation: client.generation }
}
