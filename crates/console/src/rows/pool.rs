// SPDX-License-Identifier: Apache-2.0
//! Rows about pools, databases, users and their statistics.

use crate::stats::{Averages, PoolStats};
use crate::table::{Cells, TableRow};

/// Connections of a pool by state, for SHOW POOLS and the metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PoolCounts {
    /// Clients linked to a server, or idle.
    pub cl_active: u64,
    /// Clients that wait for a server.
    pub cl_waiting: u64,
    /// Cancel requests that were forwarded.
    pub cl_active_cancel_req: u64,
    /// Cancel requests that wait for a connection.
    pub cl_waiting_cancel_req: u64,
    /// Servers linked to a client.
    pub sv_active: u64,
    /// Server connections that forward a cancel request.
    pub sv_active_cancel: u64,
    /// Servers kept back by a cancel request under way.
    pub sv_being_canceled: u64,
    /// Servers that can be used at once.
    pub sv_idle: u64,
    /// Servers to be checked before use.
    pub sv_used: u64,
    /// Servers that run the reset or check query.
    pub sv_tested: u64,
    /// Servers that are logging in.
    pub sv_login: u64,
    /// How long the first client of the queue has waited, in microseconds.
    pub maxwait_us: u64,
}

/// A row of SHOW POOLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolRow<'a> {
    /// Database.
    pub database: &'a str,
    /// User.
    pub user: &'a str,
    /// Connections by state.
    pub counts: PoolCounts,
    /// `session`, `transaction` or `statement`.
    pub pool_mode: &'a str,
    /// `round-robin` or `disable`, when the database has a list of hosts.
    pub load_balance_hosts: Option<&'a str>,
}

impl TableRow for PoolRow<'_> {
    fn cells(&self, cells: &mut Cells<'_>) {
        let counts = &self.counts;
        cells
            .text(self.database)
            .text(self.user)
            .int4(counts.cl_active)
            .int4(counts.cl_waiting)
            .int4(counts.cl_active_cancel_req)
            .int4(counts.cl_waiting_cancel_req)
            .int4(counts.sv_active)
            .int4(counts.sv_active_cancel)
            .int4(counts.sv_being_canceled)
            .int4(counts.sv_idle)
            .int4(counts.sv_used)
            .int4(counts.sv_tested)
            .int4(counts.sv_login)
            .int4(counts.maxwait_us / 1_000_000)
            .int4(counts.maxwait_us % 1_000_000)
            .text(self.pool_mode)
            .text_or_null(self.load_balance_hosts);
    }
}

/// A row of SHOW PEER_POOLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PeerPoolRow {
    /// Number of the peer.
    pub peer_id: u64,
    /// Cancel requests that were forwarded.
    pub cl_active_cancel_req: u64,
    /// Cancel requests that wait for a connection.
    pub cl_waiting_cancel_req: u64,
    /// Connections that forward a cancel request.
    pub sv_active_cancel: u64,
    /// Connections being made.
    pub sv_login: u64,
}

impl TableRow for PeerPoolRow {
    fn cells(&self, cells: &mut Cells<'_>) {
        cells
            .int4(self.peer_id)
            .int4(self.cl_active_cancel_req)
            .int4(self.cl_waiting_cancel_req)
            .int4(self.sv_active_cancel)
            .int4(self.sv_login);
    }
}

/// A row of SHOW DATABASES. Limits are those in force: a default stands where the database sets none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DatabaseRow<'a> {
    /// Name clients connect to.
    pub name: &'a str,
    /// `host` of the connection string.
    pub host: Option<&'a str>,
    /// Port of the server.
    pub port: u16,
    /// Name on the server; `None` for the `*` entry.
    pub database: Option<&'a str>,
    /// `user` of the connection string.
    pub force_user: Option<&'a str>,
    /// Pool size.
    pub pool_size: u64,
    /// Minimal pool size.
    pub min_pool_size: u64,
    /// Reserve pool size.
    pub reserve_pool_size: u64,
    /// Server lifetime, in seconds.
    pub server_lifetime: u64,
    /// Pool mode, if the database sets one.
    pub pool_mode: Option<&'a str>,
    /// `round-robin` or `disable`, when `host` is a list.
    pub load_balance_hosts: Option<&'a str>,
    /// `max_db_connections`; 0 is no limit.
    pub max_connections: u64,
    /// Server connections.
    pub current_connections: u64,
    /// `max_db_client_connections`; 0 is no limit.
    pub max_client_connections: u64,
    /// Client connections.
    pub current_client_connections: u64,
    /// Paused by PAUSE or KILL of this database.
    pub paused: bool,
    /// Disabled.
    pub disabled: bool,
}

impl TableRow for DatabaseRow<'_> {
    fn cells(&self, cells: &mut Cells<'_>) {
        cells
            .text(self.name)
            .text_or_null(self.host)
            .int4(self.port.into())
            .text_or_null(self.database)
            .text_or_null(self.force_user)
            .int4(self.pool_size)
            .int4(self.min_pool_size)
            .int4(self.reserve_pool_size)
            .int4(self.server_lifetime)
            .text_or_null(self.pool_mode)
            .text_or_null(self.load_balance_hosts)
            .int4(self.max_connections)
            .int4(self.current_connections)
            .int4(self.max_client_connections)
            .int4(self.current_client_connections)
            .flag(self.paused)
            .flag(self.disabled);
    }
}

/// A row of SHOW USERS.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UserRow<'a> {
    /// Name.
    pub name: &'a str,
    /// Pool size, if the user sets one. PgBouncer pads it with blanks, which numbers cannot be read from: we do not.
    pub pool_size: Option<u64>,
    /// Reserve pool size, if the user sets one.
    pub reserve_pool_size: Option<u64>,
    /// Pool mode, if the user sets one.
    pub pool_mode: Option<&'a str>,
    /// Limit of server connections in force; 0 is none.
    pub max_user_connections: u64,
    /// Server connections.
    pub current_connections: u64,
    /// Limit of client connections in force; 0 is none.
    pub max_user_client_connections: u64,
    /// Client connections.
    pub current_client_connections: u64,
}

impl TableRow for UserRow<'_> {
    fn cells(&self, cells: &mut Cells<'_>) {
        cells.text(self.name);
        for size in [self.pool_size, self.reserve_pool_size] {
            match size {
                Some(size) => cells.display(size),
                None => cells.text(""),
            };
        }
        cells
            .text_or_null(self.pool_mode)
            .int4(self.max_user_connections)
            .int4(self.current_connections)
            .int4(self.max_user_client_connections)
            .int4(self.current_client_connections);
    }
}

/// A row of SHOW STATS; [`StatsTotalsRow`] and [`StatsAveragesRow`] are its halves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatsRow<'a> {
    /// Database.
    pub database: &'a str,
    /// Since start.
    pub totals: PoolStats,
    /// Over the last one to two periods.
    pub averages: Averages,
}

impl TableRow for StatsRow<'_> {
    fn cells(&self, cells: &mut Cells<'_>) {
        cells.text(self.database);
        for value in self.totals.values().into_iter().chain(self.averages.0.values()) {
            cells.numeric(value);
        }
    }
}

/// A row of SHOW STATS_TOTALS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatsTotalsRow<'a>(pub StatsRow<'a>);

impl TableRow for StatsTotalsRow<'_> {
    fn cells(&self, cells: &mut Cells<'_>) {
        cells.text(self.0.database);
        for value in self.0.totals.values() {
            cells.numeric(value);
        }
    }
}

/// A row of SHOW STATS_AVERAGES.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatsAveragesRow<'a>(pub StatsRow<'a>);

impl TableRow for StatsAveragesRow<'_> {
    fn cells(&self, cells: &mut Cells<'_>) {
        cells.text(self.0.database);
        for value in self.0.averages.0.values() {
            cells.numeric(value);
        }
    }
}
