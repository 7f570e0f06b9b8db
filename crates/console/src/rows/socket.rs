// SPDX-License-Identifier: Apache-2.0
//! Rows of SHOW CLIENTS, SERVERS, SOCKETS and ACTIVE_SOCKETS, which share their columns.

use crate::ident::{Side, SocketId};
use crate::table::{Cells, TableRow};
use crate::time::Timestamp;

/// State of a client. In PgBouncer an active client without a server is shown as `idle`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientState {
    /// Logging in; SHOW SOCKETS only.
    Login,
    /// Linked to a server.
    Active,
    /// Logged in, nothing asked.
    Idle,
    /// Waits for a server.
    Waiting,
    /// A cancel request that was forwarded.
    ActiveCancelReq,
    /// A cancel request that waits for a connection.
    WaitingCancelReq,
}

/// State of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerState {
    /// Logging in.
    Login,
    /// Linked to a client.
    Active,
    /// Can be used at once.
    Idle,
    /// Has idled for longer than `server_check_delay`.
    Used,
    /// Runs the reset or the check query.
    Tested,
    /// Forwards a cancel request.
    ActiveCancel,
    /// Free but for a cancel request under way to it.
    BeingCanceled,
}

/// State of a socket, and with it the side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketState {
    /// Of a client.
    Client(ClientState),
    /// Of a server.
    Server(ServerState),
}

impl SocketState {
    /// Side of the socket.
    #[must_use]
    pub const fn side(self) -> Side {
        match self {
            Self::Client(_) => Side::Client,
            Self::Server(_) => Side::Server,
        }
    }

    /// Word in SHOW CLIENTS and SHOW SERVERS. `login` of a client is never listed there.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Client(ClientState::Login) => "login",
            Self::Client(ClientState::Active) => "active",
            Self::Client(ClientState::Idle) => "idle",
            Self::Client(ClientState::Waiting) => "waiting",
            Self::Client(ClientState::ActiveCancelReq) => "active_cancel_req",
            Self::Client(ClientState::WaitingCancelReq) => "waiting_cancel_req",
            Self::Server(ServerState::Login) => "new",
            Self::Server(ServerState::Active) => "active",
            Self::Server(ServerState::Idle) => "idle",
            Self::Server(ServerState::Used) => "used",
            Self::Server(ServerState::Tested) => "tested",
            Self::Server(ServerState::ActiveCancel) => "active_cancel",
            Self::Server(ServerState::BeingCanceled) => "being_canceled",
        }
    }

    /// Word in SHOW SOCKETS and ACTIVE_SOCKETS. An idle client is on PgBouncer's list of active clients.
    #[must_use]
    pub const fn socket_name(self) -> &'static str {
        match self {
            Self::Client(ClientState::Login) => "cl_login",
            Self::Client(ClientState::Active | ClientState::Idle) => "cl_active",
            Self::Client(ClientState::Waiting) => "cl_waiting",
            Self::Client(ClientState::ActiveCancelReq) => "cl_active_cancel_req",
            Self::Client(ClientState::WaitingCancelReq) => "cl_waiting_cancel_req",
            Self::Server(ServerState::Login) => "sv_login",
            Self::Server(ServerState::Active) => "sv_active",
            Self::Server(ServerState::Idle) => "sv_idle",
            Self::Server(ServerState::Used) => "sv_used",
            Self::Server(ServerState::Tested) => "sv_tested",
            Self::Server(ServerState::ActiveCancel) => "sv_active_cancel",
            Self::Server(ServerState::BeingCanceled) => "sv_being_canceled",
        }
    }
}

/// Startup parameter `replication`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Replication {
    /// An ordinary connection.
    #[default]
    None,
    /// `database`: logical.
    Logical,
    /// `yes`: physical.
    Physical,
}

impl Replication {
    /// Word in the tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Logical => "logical",
            Self::Physical => "physical",
        }
    }

    /// Value of the startup parameter, as in the line of a login attempt.
    #[must_use]
    pub const fn parameter(self) -> &'static str {
        match self {
            Self::None => "no",
            Self::Logical => "database",
            Self::Physical => "yes",
        }
    }
}

/// A row of SHOW CLIENTS or SHOW SERVERS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketRow<'a> {
    /// Number of the socket, from which `ptr` is made too.
    pub id: SocketId,
    /// State, and with it the side.
    pub state: SocketState,
    /// User; `None` shows `(nouser)`.
    pub user: Option<&'a str>,
    /// Database; `None` shows `(nodb)`.
    pub database: Option<&'a str>,
    /// Kind of replication.
    pub replication: Replication,
    /// Address of the other end, `unix` for a unix socket.
    pub addr: &'a str,
    /// Port of the other end; of a unix socket the configured port.
    pub port: u16,
    /// Address of our end.
    pub local_addr: &'a str,
    /// Port of our end.
    pub local_port: u16,
    /// When the connection was made.
    pub connect_time: Timestamp,
    /// When the latest request was made.
    pub request_time: Timestamp,
    /// How long the client has waited for a server, in microseconds; 0 for servers.
    pub wait_us: u64,
    /// Closed as soon as it is free.
    pub close_needed: bool,
    /// The connection it is linked with.
    pub link: Option<SocketId>,
    /// Peer of a unix socket, or the backend's process id from BackendKeyData; else 0.
    pub remote_pid: u32,
    /// `TLSv1.3/TLS_AES_256_GCM_SHA384`, empty without TLS.
    pub tls: &'a str,
    /// `application_name` of the client.
    pub application_name: &'a str,
    /// Prepared statements that this connection has.
    pub prepared_statements: u32,
}

const US_PER_S: u64 = 1_000_000;

impl SocketRow<'_> {
    fn write(&self, state: &str, cells: &mut Cells<'_>) {
        cells
            .display(self.state.side().letter())
            .text(self.user.unwrap_or("(nouser)"))
            .text(self.database.unwrap_or("(nodb)"))
            .text(self.replication.name())
            .text(state)
            .text(self.addr)
            .int4(self.port.into())
            .text(self.local_addr)
            .int4(self.local_port.into())
            .time(self.connect_time)
            .time(self.request_time)
            .int4(self.wait_us / US_PER_S)
            .int4(self.wait_us % US_PER_S)
            .flag(self.close_needed)
            .display(self.id.pointer());
        match self.link {
            Some(link) => cells.display(link.pointer()),
            None => cells.text(""),
        };
        cells
            .int4(self.remote_pid.into())
            .text(self.tls)
            .text(self.application_name)
            .int4(self.prepared_statements.into())
            .int4(self.id.get().into());
    }
}

impl TableRow for SocketRow<'_> {
    fn cells(&self, cells: &mut Cells<'_>) {
        self.write(self.state.name(), cells);
    }
}

/// State of the buffer of a socket, in bytes; all 0 when it has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BufferState {
    /// End of the bytes received.
    pub recv_pos: u64,
    /// End of the bytes parsed.
    pub pkt_pos: u64,
    /// Bytes of the current message still to come.
    pub pkt_remain: u64,
    /// End of the bytes sent.
    pub send_pos: u64,
    /// Bytes received and not parsed.
    pub pkt_avail: u64,
    /// Bytes parsed and not sent.
    pub send_avail: u64,
}

impl BufferState {
    /// True when SHOW ACTIVE_SOCKETS lists the socket.
    #[must_use]
    pub const fn is_active(&self) -> bool {
        self.pkt_remain > 0 || self.pkt_avail > 0 || self.send_avail > 0
    }
}

/// A row of SHOW SOCKETS or ACTIVE_SOCKETS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketBuffersRow<'a> {
    /// What SHOW CLIENTS or SHOW SERVERS says.
    pub socket: SocketRow<'a>,
    /// The buffer.
    pub buffer: BufferState,
}

impl TableRow for SocketBuffersRow<'_> {
    fn cells(&self, cells: &mut Cells<'_>) {
        self.socket.write(self.socket.state.socket_name(), cells);
        let BufferState { recv_pos, pkt_pos, pkt_remain, send_pos, pkt_avail, send_avail } = self.buffer;
        cells.int4(recv_pos).int4(pkt_pos).int4(pkt_remain).int4(send_pos);
        cells.int4(0).int4(pkt_avail).int4(send_avail);
    }
}
