// SPDX-License-Identifier: Apache-2.0
//! What the console tells of sockets: copied at the workers and, for parked servers, out of the core; printed at the end.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use underpass_console::rows::{
    BufferState, ClientState, FdRow, Replication, ServerState, SocketBuffersRow, SocketRow, SocketState,
};
use underpass_console::{Show, Side, SocketId, Table};
use underpass_pool::ServerId;
use underpass_pool::params::SharedParameters;

use crate::client::{Client, Phase};
use crate::net::{self, Endpoint};
use crate::pool::{DatabaseState, UserState};
use crate::server::{Server, Work};
use crate::shared::{Shared, lock};
use crate::transport::{Outbox, Transport};
use crate::worker::login::CONSOLE;
use crate::worker::{Entry, Listener, Worker};

/// A copy of what is shown of one socket.
pub(super) struct SocketFacts {
    pub id: SocketId,
    state: SocketState,
    database: Option<Arc<DatabaseState>>,
    user: Option<Arc<UserState>>,
    on_console: bool,
    replication: Replication,
    peer: Endpoint,
    local: Option<SocketAddr>,
    connected_at: Instant,
    request_at: Instant,
    wait_us: u64,
    close_needed: bool,
    link: Option<SocketId>,
    remote_pid: u32,
    tls: String,
    parameters: SharedParameters,
    prepared: u32,
    buffer: BufferState,
    fd: u32,
    link_fd: u32,
    cancel: u64,
}

fn buffer(inbox: &[u8], outbox: &Outbox) -> BufferState {
    let received = inbox.len() as u64;
    BufferState {
        recv_pos: received,
        pkt_avail: received,
        send_avail: outbox.held() as u64,
        ..BufferState::default()
    }
}

fn tls(transport: &Transport) -> String {
    transport.tls().and_then(|connection| underpass_tls::describe(connection)).unwrap_or_default()
}

fn fd_number(transport: &Transport) -> u32 {
    transport.fd().as_raw_fd().cast_unsigned()
}

impl Worker {
    /// Clients of this worker.
    pub(super) fn client_facts(&self) -> Vec<SocketFacts> {
        let sockets = self.clients.iter().filter(|(_, client)| !client.is_silent);
        sockets.map(|(_, client)| self.facts_of_client(client)).collect()
    }

    fn facts_of_client(&self, client: &Client) -> SocketFacts {
        let server = match client.phase {
            Phase::Linked(key) => match self.servers.get(key) {
                Some(Entry::Here(server)) => Some(server),
                _ => None,
            },
            _ => None,
        };
        let lane_server =
            client.lane.as_ref().filter(|_| matches!(client.phase, Phase::Lane)).and_then(|lane| {
                let linked = lane.lanes.datapath.client_info(lane.slot).ok()?.server?;
                let id = lane.lanes.server_of(linked)?;
                lock(&self.shared.core)
                    .parked_server(id)
                    .map(|server| (server.socket_id, fd_number(&server.transport)))
            });
        let waits_in_login = client.waits_in_login();
        let kept_since = client.kept_since(self.now);
        let state = match &client.phase {
            Phase::Login(_) if waits_in_login => ClientState::Waiting,
            Phase::Login(_) => ClientState::Login,
            Phase::Waiting { .. } => ClientState::Waiting,
            Phase::Linked(_) | Phase::Console(_) => ClientState::Active,
            Phase::Lane if client.is_linked_in_lane() => ClientState::Active,
            Phase::Lane if kept_since.is_some() => ClientState::Waiting,
            Phase::Idle | Phase::Lane | Phase::Closing => ClientState::Idle,
        };
        let lane_times = self.lane_times(client);
        let running = |since: Option<Instant>| {
            since.map_or(0, |since| self.now.saturating_duration_since(since).as_micros() as u64)
        };
        let wait_us = match client.phase {
            Phase::Waiting { since, .. } => self.now.saturating_duration_since(since).as_micros() as u64,
            Phase::Login(_) if waits_in_login => {
                self.now.saturating_duration_since(client.request_at).as_micros() as u64
            }
            // As in PgBouncer, the age of its query.
            Phase::Linked(_) => running(client.query_at),
            Phase::Lane if kept_since.is_some() => running(kept_since),
            Phase::Lane => running(lane_times.as_ref().and_then(|times| times.query)),
            _ => 0,
        };
        let remote_pid = match client.address {
            Endpoint::Unix(..) => {
                net::peer_credentials(client.transport.fd()).map_or(0, |(_, pid)| pid.cast_unsigned())
            }
            Endpoint::Tcp(_) => 0,
        };
        SocketFacts {
            id: client.id,
            state: SocketState::Client(state),
            database: client.database.clone(),
            user: client.user.clone(),
            on_console: client.on_console,
            replication: client.replication,
            peer: client.address.clone(),
            local: client.address.ip().and_then(|_| net::local_endpoint(client.transport.fd())),
            connected_at: client.connected_at,
            request_at: lane_times.map_or(client.request_at, |times| times.active),
            wait_us,
            close_needed: false,
            link: server.map(|server| server.socket_id).or(lane_server.map(|(id, _)| id)),
            remote_pid,
            tls: tls(&client.transport),
            parameters: client.parameters.clone(),
            prepared: client.side.statement_count() as u32,
            buffer: buffer(&client.inbox, &client.outbox),
            fd: fd_number(&client.transport),
            link_fd: server
                .map(|server| fd_number(&server.transport))
                .or(lane_server.map(|(_, fd)| fd))
                .unwrap_or(0),
            cancel: client.cancel_key,
        }
    }

    /// Servers that work at this worker.
    pub(super) fn server_facts(&self) -> Vec<SocketFacts> {
        let mut all: Vec<(ServerId, SocketFacts)> = Vec::new();
        for (_, entry) in self.servers.iter() {
            let Entry::Here(server) = entry else { continue };
            let state = match server.work {
                Work::Login(_) | Work::Identifying { .. } => ServerState::Login,
                Work::Client(_) | Work::Preparing { .. } | Work::AuthQuery { .. } => ServerState::Active,
                Work::Settling { .. } => ServerState::Tested,
                Work::Resting => ServerState::BeingCanceled,
            };
            let client = server.client().and_then(|key| self.clients.get(key));
            let mut facts = facts_of_server(server, state);
            facts.link = client.map(|client| client.id);
            facts.link_fd = client.map_or(0, |client| fd_number(&client.transport));
            facts.replication = client.map_or(Replication::None, |client| client.replication);
            all.push((server.id, facts));
        }
        let mut core = lock(&self.shared.core);
        for (id, facts) in &mut all {
            facts.close_needed = core.is_close_needed(*id);
        }
        drop(core);
        all.into_iter().map(|(_, facts)| facts).collect()
    }
}

fn facts_of_server(server: &Server, state: ServerState) -> SocketFacts {
    SocketFacts {
        id: server.socket_id,
        state: SocketState::Server(state),
        database: Some(server.pool.database.clone()),
        user: Some(server.pool.user.clone()),
        on_console: false,
        replication: Replication::None,
        peer: server.address.clone(),
        local: server.local,
        connected_at: server.connected_at,
        request_at: server.request_at,
        wait_us: 0,
        close_needed: false,
        link: None,
        remote_pid: server.process_id(),
        tls: tls(&server.transport),
        parameters: server.parameters.clone(),
        prepared: server.link.statements.len() as u32,
        buffer: buffer(&server.inbox, &server.outbox),
        fd: fd_number(&server.transport),
        link_fd: 0,
        cancel: server.cancel_key.first_chunk().map_or(0, |key| u64::from_be_bytes(*key)),
    }
}

/// Servers that are parked. The core is locked for one pool at a time.
pub(super) fn parked_facts(shared: &Shared, now: Instant) -> Vec<SocketFacts> {
    let mut all = Vec::new();
    for pool in shared.pools() {
        let core = lock(&shared.core);
        let limits = core.limits(pool.id);
        for (_, server, idle_since, close_needed) in core.parked(pool.id) {
            let is_due = limits.is_check_due(now.saturating_duration_since(idle_since));
            let state = if is_due { ServerState::Used } else { ServerState::Idle };
            all.push(SocketFacts { close_needed, ..facts_of_server(server, state) });
        }
    }
    all
}

/// A server that a lane has linked is parked all the same: its client tells that they belong together.
pub(super) fn link_lanes(facts: &mut [SocketFacts]) {
    let clients: HashMap<SocketId, (SocketId, u32)> = facts
        .iter()
        .filter(|facts| facts.state.side() == Side::Client)
        .filter_map(|facts| facts.link.map(|server| (server, (facts.id, facts.fd))))
        .collect();
    for server in facts.iter_mut().filter(|facts| facts.state.side() == Side::Server && facts.link.is_none())
    {
        if let Some(&(client, fd)) = clients.get(&server.id) {
            server.link = Some(client);
            server.link_fd = fd;
            server.state = SocketState::Server(ServerState::Active);
        }
    }
}

/// Prints facts as rows of `show`: CLIENTS, SERVERS, SOCKETS, ACTIVE_SOCKETS.
pub(super) fn socket_table(shared: &Shared, show: Show, mut facts: Vec<SocketFacts>) -> Table {
    let mut table = Table::new(show.columns());
    // A server that moved while it was looked for may have been seen twice.
    facts.sort_by_key(|facts| (facts.state.side(), facts.id));
    facts.dedup_by_key(|facts| (facts.state.side(), facts.id));
    for facts in &facts {
        let (peer, own) = (facts.peer.host(), facts.local.map(|local| local.ip().to_string()));
        let row = SocketRow {
            id: facts.id,
            state: facts.state,
            user: facts.user.as_ref().map(|user| user.name.as_str()),
            database: facts.database_name(),
            replication: facts.replication,
            addr: &peer,
            port: facts.peer.port(),
            local_addr: own.as_deref().unwrap_or("unix"),
            local_port: facts.local.map_or(facts.peer.port(), |local| local.port()),
            connect_time: shared.timestamp(facts.connected_at),
            request_time: shared.timestamp(facts.request_at),
            wait_us: facts.wait_us,
            close_needed: facts.close_needed,
            link: facts.link,
            remote_pid: facts.remote_pid,
            tls: &facts.tls,
            application_name: facts.parameters.get("application_name").unwrap_or(""),
            prepared_statements: facts.prepared,
        };
        match show {
            Show::Servers if facts.state.side() == Side::Client => {}
            Show::Clients if facts.state == SocketState::Client(ClientState::Login) => {}
            Show::Clients | Show::Servers => table.push(&row),
            Show::ActiveSockets if !facts.buffer.is_active() => {}
            _ => table.push(&SocketBuffersRow { socket: row, buffer: facts.buffer }),
        }
    }
    table
}

/// Rows of SHOW FDS: first the listening sockets, then connections, without those that log in or are on the console, as in PgBouncer.
/// Descriptors are not handed over, so their secrets, which only a successor could use, are not told either.
pub(super) fn fd_table(listeners: &[Listener], facts: &[SocketFacts]) -> Table {
    let mut table = Table::new(Show::Fds.columns());
    for listener in listeners {
        let address = net::local_endpoint(&*listener.fd);
        let addr = address.map_or("unix".to_owned(), |address| address.ip().to_string());
        table.push(&FdRow {
            fd: listener.fd.as_raw_fd().cast_unsigned(),
            addr: &addr,
            port: address.map_or(listener.unix_port.unwrap_or_default(), |address| address.port()),
            ..FdRow::default()
        });
    }
    let shown = |facts: &&SocketFacts| {
        facts.tls.is_empty() && !facts.on_console && facts.state != SocketState::Client(ClientState::Login)
    };
    for facts in facts.iter().filter(shown) {
        let addr = facts.peer.host();
        table.push(&FdRow {
            fd: facts.fd,
            side: Some(facts.state.side()),
            user: facts.user.as_ref().map(|user| user.name.as_str()),
            database: facts.database_name(),
            addr: &addr,
            port: facts.peer.port(),
            cancel: facts.cancel,
            link: facts.link_fd,
            client_encoding: facts.parameters.get("client_encoding"),
            std_strings: facts.parameters.get("standard_conforming_strings"),
            datestyle: facts.parameters.get("DateStyle"),
            timezone: facts.parameters.get("TimeZone"),
            ..FdRow::default()
        });
    }
    table
}

impl SocketFacts {
    fn database_name(&self) -> Option<&str> {
        if self.on_console {
            Some(CONSOLE)
        } else {
            self.database.as_ref().map(|database| database.name.as_str())
        }
    }
}
