// SPDX-License-Identifier: Apache-2.0
//! A server connection. It lives at a worker while it works and is parked in the core while it is idle.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use underpass_auth::ServerAuth;
use underpass_console::logline::SocketLabel;
use underpass_console::{Side, SocketId};
use underpass_pool::ServerId;
use underpass_pool::link::Link;
use underpass_pool::params::{ParameterSet, SharedParameters};

use crate::hosts::Turn;
use crate::lanes::ServerLane;
use crate::net::Endpoint;
use crate::pool::Pool;
use crate::table::Key;
use crate::transport::{Outbox, Transport};
use crate::why::Own;

/// What a server is doing.
pub(crate) enum Work {
    /// Connecting, TLS, authentication, parameters.
    Login(Box<ServerLogin>),
    /// Serves a client of this worker.
    Client(Key),
    /// Checked or given the client's parameters first; then serves it.
    Preparing { client: Key, step: PrepareStep },
    /// Runs `auth_query` for a client that logs in; the answer is collected.
    AuthQuery { client: Key, answer: Vec<u8> },
    /// Has logged in, and tells who it is because mirrors are concerned; the answer is collected.
    Identifying { answer: Vec<u8> },
    /// Has no client: comes to rest, then rolls back, resets, and goes back to the pool.
    Settling { step: SettleStep, since: Instant },
    /// Idle in the core, or held for a cancel request.
    Resting,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PrepareStep {
    Check,
    Restore,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SettleStep {
    /// What a lane forwarded for the client that left is still on its way to the server: nothing may be written before that.
    Leaving,
    /// Answers of the client that left are still outstanding.
    Draining,
    RollingBack,
    Resetting,
    /// `connect_query` after login.
    Connecting,
}

/// State of a login to PostgreSQL.
pub(crate) struct ServerLogin {
    pub step: ServerLoginStep,
    pub auth: Option<ServerAuth>,
    pub parameters: ParameterSet,
    /// Which of the hosts it is.
    pub turn: Turn,
    /// With TLS or without, after the other way has failed: see `server_tls_sslmode`.
    pub second_try: Option<Encryption>,
    /// Host name as configured, for certificate verification.
    pub host: String,
    /// The replication client that this connection is made for, and its startup parameters.
    pub replication: Option<(Key, Vec<(String, String)>)>,
}

/// Whether a connection asks for TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encryption {
    Plain,
    Tls,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ServerLoginStep {
    Connecting,
    /// SSLRequest sent, waits for `S` or `N`.
    TlsAnswer,
    TlsHandshake,
    /// StartupMessage sent.
    Startup,
}

/// A server connection.
pub(crate) struct Server {
    /// Its place in the kernel lanes. Before the socket: it goes first.
    pub lane: Option<Box<ServerLane>>,
    /// It has been put into a lane, or cannot be.
    pub lane_tried: bool,
    /// Why not, then.
    pub lane_refused: Option<Own>,
    pub transport: Transport,
    pub id: ServerId,
    pub socket_id: SocketId,
    pub key: Key,
    /// Worker whose epoll watches it.
    pub home: u16,
    pub pool: Arc<Pool>,
    pub address: Endpoint,
    /// Our end of it; `None` for a unix socket.
    pub local: Option<SocketAddr>,
    pub work: Work,
    pub link: Link,
    pub parameters: SharedParameters,
    /// Whom it has logged in as, by its own word; [`SESSION_AUTHORIZATION`](underpass_pool::params::SESSION_AUTHORIZATION).
    pub authorization: Option<Arc<str>>,
    pub inbox: Vec<u8>,
    pub outbox: Outbox,
    /// Readiness was seen and not used up, because the client is full.
    pub readable: bool,
    /// The peer has ended its stream; bytes may come before the end.
    pub ended: bool,
    /// Body of the ErrorResponse to the pooler's own question, until the ReadyForQuery behind it arrives.
    pub refusal: Option<Vec<u8>>,
    pub cancel_key: Vec<u8>,
    pub connected_at: Instant,
    pub request_at: Instant,
    /// Serves one client until it leaves, and is never pooled.
    pub dedicated: bool,
    /// Its client's transaction is over, but it has not read all that a lane forwarded to it. Until then it is the client's, who is not heard: what
    /// that says next is for whatever server its turn brings.
    pub ending: bool,
}

/// Terminate, as it is on the wire.
const TERMINATE: &[u8] = b"X\0\0\0\x04";

impl Server {
    /// Whether it is reached by TCP at none of `addresses`.
    pub fn has_moved(&self, addresses: &[IpAddr]) -> bool {
        self.address.ip().is_some_and(|ip| !addresses.contains(&ip))
    }

    /// How log lines name it.
    pub fn label(&self) -> SocketLabel<'_> {
        SocketLabel {
            side: Side::Server,
            id: self.socket_id,
            database: Some(&self.pool.database.name),
            user: Some(&self.pool.user.name),
            peer_id: None,
            address: self.address.peer_address(),
        }
    }

    /// Ends the conversation, before the socket is closed. In the middle of a message Terminate would be a part of it, and PostgreSQL
    /// would log the byte that follows as an "invalid frontend message type": there the end of the stream has to do, as it has
    /// for one that has not logged in.
    pub fn say_goodbye(&mut self) {
        let may_speak = !matches!(self.work, Work::Login(_))
            && self.outbox.is_empty()
            && !self.link.is_cut()
            && self.is_clear();
        if may_speak {
            let _ = self.transport.write(TERMINATE);
        }
        self.transport.close_notify();
    }

    pub fn process_id(&self) -> u32 {
        self.cancel_key.first_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes))
    }

    /// Whether it logs in for a replication client.
    pub fn is_replication_login(&self) -> bool {
        matches!(&self.work, Work::Login(login) if login.replication.is_some())
    }

    /// Whether it is a client's between transactions too.
    pub fn keeps_client(&self) -> bool {
        self.dedicated || self.pool.is_session()
    }

    /// The client at this worker that it belongs to, if any.
    pub fn client(&self) -> Option<Key> {
        match &self.work {
            Work::Client(client) | Work::Preparing { client, .. } => Some(*client),
            _ => None,
        }
    }
}
