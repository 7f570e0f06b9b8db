// SPDX-License-Identifier: Apache-2.0
//! The SHOW commands: names, permissions, columns.

mod columns;

use crate::command::Access;
use crate::table::Column;

/// What SHOW (or its alias SELECT) can be asked for. PgBouncer's 22, and our own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Show {
    /// Clients that are logged in, or wait for a server in their login.
    Clients,
    /// Every key of pgbouncer.ini.
    Config,
    /// Configured and automatic databases.
    Databases,
    /// File descriptors, with cancel keys: admin only.
    Fds,
    /// The commands, as a notice instead of rows.
    Help,
    /// Counts of internal lists.
    Lists,
    /// Peers that cancel requests are forwarded to.
    Peers,
    /// Cancel requests under way to peers.
    PeerPools,
    /// Pools: one for each database and user.
    Pools,
    /// Server connections.
    Servers,
    /// All sockets, with the state of their buffers.
    Sockets,
    /// Sockets whose buffers hold data.
    ActiveSockets,
    /// Statistics for each database, totals and averages.
    Stats,
    /// The totals of `STATS`.
    StatsTotals,
    /// The averages of `STATS`.
    StatsAverages,
    /// Known users.
    Users,
    /// Version of the program.
    Version,
    /// Statistics of all databases together, a row each.
    Totals,
    /// Memory of the internal structures.
    Mem,
    /// Host names in the DNS cache.
    DnsHosts,
    /// Zones in the DNS cache.
    DnsZones,
    /// Active, paused or suspended.
    State,
    /// Kernel lanes: what went through them and why links left them. Ours, not PgBouncer's.
    Kernel,
    /// Mirrors: where they are, what they do, what reached them. Ours.
    Mirrors,
    /// What differs on mirrors, by statement. Ours.
    MirrorDiff,
    /// The recording of clients. Ours.
    Trace,
}

impl Show {
    /// All, in the order of the manual.
    pub const ALL: [Self; 26] = [
        Self::ActiveSockets,
        Self::Clients,
        Self::Config,
        Self::Databases,
        Self::DnsHosts,
        Self::DnsZones,
        Self::Fds,
        Self::Help,
        Self::Kernel,
        Self::Lists,
        Self::Mem,
        Self::MirrorDiff,
        Self::Mirrors,
        Self::PeerPools,
        Self::Peers,
        Self::Pools,
        Self::Servers,
        Self::Sockets,
        Self::State,
        Self::Stats,
        Self::StatsAverages,
        Self::StatsTotals,
        Self::Totals,
        Self::Trace,
        Self::Users,
        Self::Version,
    ];

    /// Name after SHOW, upper case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Clients => "CLIENTS",
            Self::Config => "CONFIG",
            Self::Databases => "DATABASES",
            Self::Fds => "FDS",
            Self::Help => "HELP",
            Self::Lists => "LISTS",
            Self::Peers => "PEERS",
            Self::PeerPools => "PEER_POOLS",
            Self::Pools => "POOLS",
            Self::Servers => "SERVERS",
            Self::Sockets => "SOCKETS",
            Self::ActiveSockets => "ACTIVE_SOCKETS",
            Self::Stats => "STATS",
            Self::StatsTotals => "STATS_TOTALS",
            Self::StatsAverages => "STATS_AVERAGES",
            Self::Users => "USERS",
            Self::Version => "VERSION",
            Self::Totals => "TOTALS",
            Self::Mem => "MEM",
            Self::DnsHosts => "DNS_HOSTS",
            Self::DnsZones => "DNS_ZONES",
            Self::State => "STATE",
            Self::Kernel => "KERNEL",
            Self::Mirrors => "MIRRORS",
            Self::MirrorDiff => "MIRROR_DIFF",
            Self::Trace => "TRACE",
        }
    }

    /// Finds a SHOW by name, whatever its case.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|show| show.name().eq_ignore_ascii_case(name))
    }

    /// Who may ask: everybody on the console, except that SHOW FDS carries cancel keys.
    #[must_use]
    pub const fn access(self) -> Access {
        match self {
            Self::Fds => Access::Admin,
            _ => Access::Stats,
        }
    }

    /// One sentence on what it lists.
    #[must_use]
    pub const fn help(self) -> &'static str {
        match self {
            Self::Clients => "Clients that are logged in, or wait for a server in their login.",
            Self::Config => "Every key of the configuration with its value in force.",
            Self::Databases => "Databases, configured or taken from the `*` entry.",
            Self::Fds => {
                "File descriptors in use, the listening sockets first, with cancel keys; admin users \
                 only. Connections with TLS, those of the console and those that log in are left out."
            }
            Self::Help => "The commands, as a notice; there is no row.",
            Self::Lists => "How many of everything there are.",
            Self::Peers => "Poolers that cancel requests can be forwarded to.",
            Self::PeerPools => "Cancel requests on their way to peers, a row for each peer.",
            Self::Pools => "Pools, a row for each database and user that has connected.",
            Self::Servers => "Connections to PostgreSQL.",
            Self::Sockets => "All sockets with the state of their buffers.",
            Self::ActiveSockets => "As `SOCKETS`, only those whose buffers hold data.",
            Self::Stats => {
                "Statistics, a row for each database: totals since start, averages over `stats_period`."
            }
            Self::StatsTotals => "The totals of `STATS`.",
            Self::StatsAverages => "The averages of `STATS`.",
            Self::Users => "Users known to the pooler.",
            Self::Version => "Version of the program, as `--version` prints it.",
            Self::Totals => "The statistics of all databases together, a row for each.",
            Self::Mem => "Memory taken by the structures that grow with load.",
            Self::DnsHosts => "Host names in the DNS cache.",
            Self::DnsZones => "DNS zones that are checked for changes.",
            Self::State => "Whether the pooler is active, paused or suspended, a row for each.",
            Self::Kernel => {
                "Kernel lanes: what they forwarded, why links left them, what they queue and cost. `refused` of lane `A`: \
                 servers on this host whose own sockets the kernel did not let the pooler have."
            }
            Self::Mirrors => "Mirrors, a row for each database: state, and the account of what reached them.",
            Self::MirrorDiff => "What was answered otherwise or later by mirrors, a row for each statement.",
            Self::Trace => "The recording of clients (`trace_dir`), a row if there is one.",
        }
    }

    /// Columns, in order. HELP has none.
    #[must_use]
    pub const fn columns(self) -> &'static [Column] {
        match self {
            Self::Clients => columns::CLIENTS,
            Self::Servers => columns::SERVERS,
            Self::Sockets | Self::ActiveSockets => columns::SOCKETS,
            Self::Config => columns::CONFIG,
            Self::Databases => columns::DATABASES,
            Self::Fds => columns::FDS,
            Self::Help => &[],
            Self::Lists => columns::LISTS,
            Self::Peers => columns::PEERS,
            Self::PeerPools => columns::PEER_POOLS,
            Self::Pools => columns::POOLS,
            Self::Stats => columns::STATS,
            Self::StatsTotals => columns::STATS_TOTALS,
            Self::StatsAverages => columns::STATS_AVERAGES,
            Self::Users => columns::USERS,
            Self::Version => columns::VERSION,
            Self::Totals => columns::TOTALS,
            Self::Mem => columns::MEM,
            Self::DnsHosts => columns::DNS_HOSTS,
            Self::DnsZones => columns::DNS_ZONES,
            Self::State => columns::STATE,
            Self::Kernel => columns::KERNEL,
            Self::Mirrors => columns::MIRRORS,
            Self::MirrorDiff => columns::MIRROR_DIFF,
            Self::Trace => columns::TRACE,
        }
    }
}
