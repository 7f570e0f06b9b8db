// SPDX-License-Identifier: Apache-2.0
//! Rows about the process: configuration, descriptors, lists, memory, DNS, peers, state, kernel lanes.

use crate::ident::Side;
use crate::show::Show;
use crate::table::{Cells, Table, TableRow};

/// A row of SHOW CONFIG.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConfigRow<'a> {
    /// Name of the key.
    pub key: &'a str,
    /// Value in force; NULL when unset.
    pub value: Option<&'a str>,
    /// Default; NULL when there is none.
    pub default: Option<&'a str>,
    /// RELOAD and SET can change it.
    pub changeable: bool,
}

impl TableRow for ConfigRow<'_> {
    fn cells(&self, cells: &mut Cells<'_>) {
        cells
            .text(self.key)
            .text_or_null(self.value)
            .text_or_null(self.default)
            .text(yes_or_no(self.changeable));
    }
}

const fn yes_or_no(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}

/// A row of SHOW FDS. It holds secrets: for admin users only, and never for a connection with TLS.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct FdRow<'a> {
    /// File descriptor.
    pub fd: u32,
    /// Side of the connection; `None` for a listening socket.
    pub side: Option<Side>,
    /// User.
    pub user: Option<&'a str>,
    /// Database.
    pub database: Option<&'a str>,
    /// Address of the other end, or of the listening socket.
    pub addr: &'a str,
    /// Port of it.
    pub port: u16,
    /// Cancel key, process id and secret as one big-endian number.
    pub cancel: u64,
    /// Descriptor of the linked connection, 0 when there is none.
    pub link: u32,
    /// Session parameter.
    pub client_encoding: Option<&'a str>,
    /// Session parameter `standard_conforming_strings`.
    pub std_strings: Option<&'a str>,
    /// Session parameter.
    pub datestyle: Option<&'a str>,
    /// Session parameter.
    pub timezone: Option<&'a str>,
    /// Secret of a user that came from `auth_query`.
    pub password: Option<&'a str>,
    /// SCRAM ClientKey.
    pub scram_client_key: Option<&'a [u8]>,
    /// SCRAM ServerKey.
    pub scram_server_key: Option<&'a [u8]>,
}

/// Leaves the secrets out, so that no log gets them.
impl std::fmt::Debug for FdRow<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FdRow").field("fd", &self.fd).field("side", &self.side).finish_non_exhaustive()
    }
}

impl TableRow for FdRow<'_> {
    fn cells(&self, cells: &mut Cells<'_>) {
        cells
            .int4(self.fd.into())
            .text(self.side.map_or("pooler", Side::name))
            .text_or_null(self.user)
            .text_or_null(self.database)
            .text(self.addr)
            .int4(self.port.into());
        // PgBouncer prints the key unsigned although the column is an int8, which no client can read: the same
        // 64 bits as a signed number are what the type means.
        cells.int8_bits(self.cancel);
        cells
            .int4(self.link.into())
            .text_or_null(self.client_encoding)
            .text_or_null(self.std_strings)
            .text_or_null(self.datestyle)
            .text_or_null(self.timezone)
            .text_or_null(self.password)
            .bytea_or_null(self.scram_client_key)
            .bytea_or_null(self.scram_server_key);
    }
}

/// What SHOW LISTS counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Lists {
    /// Databases, the console's own included.
    pub databases: u64,
    /// Users.
    pub users: u64,
    /// Peers.
    pub peers: u64,
    /// Pools.
    pub pools: u64,
    /// Pools of peers.
    pub peer_pools: u64,
    /// Client structures kept for later use.
    pub free_clients: u64,
    /// Clients.
    pub used_clients: u64,
    /// Clients that are logging in.
    pub login_clients: u64,
    /// Server structures kept for later use.
    pub free_servers: u64,
    /// Servers.
    pub used_servers: u64,
    /// Names in the DNS cache.
    pub dns_names: u64,
    /// Zones in the DNS cache.
    pub dns_zones: u64,
    /// DNS queries under way.
    pub dns_queries: u64,
    /// DNS queries that wait.
    pub dns_pending: u64,
}

impl Lists {
    /// Names and numbers, in the order of SHOW LISTS.
    #[must_use]
    pub const fn items(&self) -> [(&'static str, u64); 14] {
        [
            ("databases", self.databases),
            ("users", self.users),
            ("peers", self.peers),
            ("pools", self.pools),
            ("peer_pools", self.peer_pools),
            ("free_clients", self.free_clients),
            ("used_clients", self.used_clients),
            ("login_clients", self.login_clients),
            ("free_servers", self.free_servers),
            ("used_servers", self.used_servers),
            ("dns_names", self.dns_names),
            ("dns_zones", self.dns_zones),
            ("dns_queries", self.dns_queries),
            ("dns_pending", self.dns_pending),
        ]
    }

    /// The table of SHOW LISTS.
    #[must_use]
    pub fn table(&self) -> Table {
        let mut table = Table::new(Show::Lists.columns());
        for (list, items) in self.items() {
            table.push(&ListRow { list, items });
        }
        table
    }
}

struct ListRow {
    list: &'static str,
    items: u64,
}

impl TableRow for ListRow {
    fn cells(&self, cells: &mut Cells<'_>) {
        cells.text(self.list).int4(self.items);
    }
}

/// A row of SHOW PEERS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerRow<'a> {
    /// Number of the peer.
    pub peer_id: u32,
    /// Host, or directory of a unix socket.
    pub host: &'a str,
    /// Port.
    pub port: u16,
    /// Pool size in force.
    pub pool_size: u64,
}

impl TableRow for PeerRow<'_> {
    fn cells(&self, cells: &mut Cells<'_>) {
        cells.int4(self.peer_id.into()).text(self.host).int4(self.port.into()).int4(self.pool_size);
    }
}

/// A row of SHOW TOTALS; [`crate::stats::StatsWindow::totals_table`] makes them all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TotalsRow {
    /// `total_` or `avg_`.
    pub prefix: &'static str,
    /// Name of the counter.
    pub name: &'static str,
    /// Figure.
    pub value: u64,
}

impl TableRow for TotalsRow {
    fn cells(&self, cells: &mut Cells<'_>) {
        cells.display(format_args!("{}{}", self.prefix, self.name)).numeric(self.value);
    }
}

/// Names of SHOW MEM: PgBouncer's where we have the structure, and ours.
pub mod mem_names {
    /// Users.
    pub const USER: &str = "user_cache";
    /// Databases.
    pub const DATABASE: &str = "db_cache";
    /// Peers.
    pub const PEER: &str = "peer_cache";
    /// Pools of peers.
    pub const PEER_POOL: &str = "peer_pool_cache";
    /// Pools.
    pub const POOL: &str = "pool_cache";
    /// Servers.
    pub const SERVER: &str = "server_cache";
    /// Clients.
    pub const CLIENT: &str = "client_cache";
    /// Buffers: a worker's scratch buffer, and those that hold what a peer has not taken yet.
    pub const BUFFER: &str = "iobuf_cache";
    /// Prepared statements, by content. Ours.
    pub const PREPARED_STATEMENT: &str = "prepared_statement_cache";
    /// Responses that links wait for. Ours.
    pub const OUTSTANDING: &str = "outstanding_request_cache";
}

/// A row of SHOW MEM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemRow<'a> {
    /// One of [`mem_names`].
    pub name: &'a str,
    /// Bytes of one, what hangs on it included where that is bounded.
    pub size: u64,
    /// How many are in use.
    pub used: u64,
    /// How many are kept for later use.
    pub free: u64,
}

impl TableRow for MemRow<'_> {
    fn cells(&self, cells: &mut Cells<'_>) {
        let total = self.size.saturating_mul(self.used.saturating_add(self.free));
        cells.text(self.name).int4(self.size).int4(self.used).int4(self.free).int4(total);
    }
}

/// A row of SHOW DNS_HOSTS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DnsHostRow<'a> {
    /// Host name.
    pub hostname: &'a str,
    /// Seconds until it is looked up again, 0 when that is due.
    pub ttl_s: u64,
    /// Addresses, separated by commas.
    pub addrs: &'a str,
}

impl TableRow for DnsHostRow<'_> {
    fn cells(&self, cells: &mut Cells<'_>) {
        cells.text(self.hostname).int8(self.ttl_s).text(self.addrs);
    }
}

/// A row of SHOW DNS_ZONES.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DnsZoneRow<'a> {
    /// Zone.
    pub zonename: &'a str,
    /// Serial number of its SOA record.
    pub serial: u32,
    /// Host names that belong to it.
    pub count: u64,
}

impl TableRow for DnsZoneRow<'_> {
    fn cells(&self, cells: &mut Cells<'_>) {
        cells.text(self.zonename).int8(self.serial.into()).int4(self.count);
    }
}

/// What SHOW STATE tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PauseState {
    /// Serving.
    Active,
    /// Paused by PAUSE without a database.
    Paused,
    /// Suspended by SUSPEND.
    Suspended,
}

impl PauseState {
    /// The table of SHOW STATE.
    #[must_use]
    pub fn table(self) -> Table {
        let mut table = Table::new(Show::State.columns());
        for (key, state) in
            [("active", Self::Active), ("paused", Self::Paused), ("suspended", Self::Suspended)]
        {
            table.push(&StateRow { key, value: self == state });
        }
        table
    }
}

struct StateRow {
    key: &'static str,
    value: bool,
}

impl TableRow for StateRow {
    fn cells(&self, cells: &mut Cells<'_>) {
        cells.text(self.key).text(yes_or_no(self.value));
    }
}

/// The row of SHOW VERSION.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VersionRow<'a>(pub &'a str);

impl TableRow for VersionRow<'_> {
    fn cells(&self, cells: &mut Cells<'_>) {
        cells.text(self.0);
    }
}

/// What a row of SHOW KERNEL is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelKind {
    /// What a lane forwarded.
    Lane,
    /// Why transactions were in user space.
    User,
    /// Why links left the kernel.
    Exit,
    /// What is queued for slow readers.
    Queue,
    /// What a BPF program costs.
    Program,
}

impl KernelKind {
    /// Word in the table.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lane => "lane",
            Self::User => "user",
            Self::Exit => "exit",
            Self::Queue => "queue",
            Self::Program => "program",
        }
    }
}

/// A row of SHOW KERNEL: lanes, reasons and programs come and go with versions, columns do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelRow<'a> {
    /// What the row is about.
    pub kind: KernelKind,
    /// Lane, reason, queue or program.
    pub name: &'a str,
    /// What is counted.
    pub item: &'a str,
    /// The figure.
    pub value: u64,
    /// `count`, `bytes` or `ns`.
    pub unit: &'a str,
}

impl TableRow for KernelRow<'_> {
    fn cells(&self, cells: &mut Cells<'_>) {
        cells.text(self.kind.name()).text(self.name).text(self.item).numeric(self.value).text(self.unit);
    }
}
