// SPDX-License-Identifier: Apache-2.0
//! The SHOW commands. Those about sockets and counters collect from all workers.

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Instant;

use underpass_config::Config;
use underpass_console::rows::{
    self, ConfigRow, DatabaseRow, DnsHostRow, MemRow, PauseState, PeerPoolRow, PeerRow, PoolRow, UserRow,
    VersionRow, mem_names,
};
use underpass_console::{Show, StatsWindow, Table};

use super::Reply;
use super::commands::Progress;
use super::sockets::{SocketFacts, fd_table, link_lanes, parked_facts, socket_table};
use crate::client::{Client, Phase};
use crate::gather::{Facts, Part, PoolFacts};
use crate::pool::{DatabaseState, Pool, UserState};
use crate::server::Server;
use crate::shared::{Shared, lock, phase};
use crate::table::Key;
use crate::worker::login::CONSOLE;
use crate::worker::{SCRATCH_BYTES, Worker};

/// PgBouncer's size of the console's pool.
const CONSOLE_POOL_SIZE: u64 = 2;

impl Worker {
    pub(super) fn show(&mut self, key: Key, show: Show) -> Progress {
        let shared = self.shared.clone();
        let table = match show {
            Show::Help => return Progress::Now(Ok(Reply::Help)),
            Show::Clients | Show::Servers | Show::Sockets | Show::ActiveSockets | Show::Fds => {
                return self.show_sockets(key, show);
            }
            Show::Stats
            | Show::StatsTotals
            | Show::StatsAverages
            | Show::Totals
            | Show::Pools
            | Show::Lists => {
                let now = self.now;
                return self.collect(key, Part::of, move |parts| {
                    let facts = Facts::merge(&shared, &parts, now);
                    Ok(Reply::Rows(match show {
                        Show::Pools => pools_table(&shared, facts.pools),
                        Show::Lists => facts.lists.table(),
                        _ => stats_table(&shared, &facts, show, now),
                    }))
                });
            }
            Show::Mem => {
                return self.collect(key, Worker::buffer_count, move |parts| {
                    Ok(Reply::Rows(mem_table(&shared, parts.iter().sum())))
                });
            }
            Show::Config => config_table(&shared.settings.load().config),
            Show::Databases => databases_table(&shared),
            Show::Users => users_table(&shared),
            Show::Peers => peers_table(&shared.settings.load().config),
            Show::PeerPools => {
                let part = |worker: &mut Worker| -> Vec<(u16, bool)> {
                    worker.cancels.iter().filter_map(|(_, request)| request.peer()).collect()
                };
                return self.collect(key, part, move |parts| {
                    Ok(Reply::Rows(peer_pools_table(&shared, &parts.concat())))
                });
            }
            Show::DnsHosts => dns_hosts_table(&shared),
            // Zones are not polled (dns_zone_check_period).
            Show::DnsZones => Table::new(show.columns()),
            Show::State => match shared.phase.load(Ordering::Acquire) {
                phase::SUSPENDED => PauseState::Suspended.table(),
                phase::WAIT_FOR_SERVERS => PauseState::Paused.table(),
                _ if shared.paused.load(Ordering::Acquire) => PauseState::Paused.table(),
                _ => PauseState::Active.table(),
            },
            Show::Version => {
                let mut table = Table::new(show.columns());
                table.push(&VersionRow(crate::VERSION));
                table
            }
            Show::Kernel => crate::kernel_rows::kernel_rows(&shared),
            Show::Mirrors => crate::mirror_rows::mirrors_table(&shared),
            Show::MirrorDiff => crate::mirror_rows::differences_table(&shared),
            Show::Trace => shared.recordings.table(),
        };
        Progress::Now(Ok(Reply::Rows(table)))
    }

    fn show_sockets(&self, key: Key, show: Show) -> Progress {
        // Servers that a lane has linked are told apart by their clients.
        let with_clients = show != Show::Servers || self.shared.lanes.is_some();
        let with_servers = show != Show::Clients;
        let part = move |worker: &mut Self| {
            let mut facts = if with_clients { worker.client_facts() } else { Vec::new() };
            if with_servers {
                facts.extend(worker.server_facts());
            }
            facts
        };
        let (shared, now) = (self.shared.clone(), self.now);
        let listeners = self.listeners.clone();
        self.collect(key, part, move |parts| {
            let mut facts: Vec<SocketFacts> = parts.into_iter().flatten().collect();
            if with_servers {
                facts.extend(parked_facts(&shared, now));
            }
            link_lanes(&mut facts);
            Ok(Reply::Rows(if show == Show::Fds {
                fd_table(&listeners, &facts)
            } else {
                socket_table(&shared, show, facts)
            }))
        })
    }

    /// Buffers in use: this worker's own, and those of connections that hold something.
    fn buffer_count(&mut self) -> u64 {
        let holds = |client: &Client| {
            !client.outbox.is_empty() || !client.inbox.is_empty() || matches!(client.phase, Phase::Login(_))
        };
        1 + self.clients.iter().filter(|(_, client)| holds(client)).count() as u64
    }
}

/// Pools that are shown, sorted by database and user.
fn shown_pools(mut pools: Vec<PoolFacts>) -> Vec<PoolFacts> {
    pools.retain(|facts| !facts.pool.forgotten.load(Ordering::Relaxed));
    let name = |facts: &PoolFacts| (facts.pool.database.name.clone(), facts.pool.user.name.clone());
    pools.sort_by_cached_key(name);
    pools
}

fn stats_table(shared: &Shared, facts: &Facts, show: Show, now: Instant) -> Table {
    let at = shared.timestamp(now);
    let periods = lock(&shared.periods);
    let clock = &periods.clock;
    let mut total = StatsWindow::default();
    let mut by_database: BTreeMap<&str, StatsWindow> = BTreeMap::from([(CONSOLE, StatsWindow::default())]);
    for facts in &facts.pools {
        let window = periods.window(facts.pool.id, facts.stats);
        // What mirrors do is shown, but is nothing that clients asked for.
        if !facts.pool.database.is_mirror {
            total.merge(&window);
        }
        if !facts.pool.forgotten.load(Ordering::Relaxed) {
            by_database.entry(&facts.pool.database.name).or_default().merge(&window);
        }
    }
    if show == Show::Totals {
        return total.totals_table(clock, at);
    }
    let mut table = Table::new(show.columns());
    for (database, window) in &by_database {
        let row = window.row(database, clock, at);
        match show {
            Show::StatsTotals => table.push(&rows::StatsTotalsRow(row)),
            Show::StatsAverages => table.push(&rows::StatsAveragesRow(row)),
            _ => table.push(&row),
        }
    }
    table
}

fn pools_table(shared: &Shared, pools: Vec<PoolFacts>) -> Table {
    let mut table = Table::new(Show::Pools.columns());
    let cl_active = shared.control.consoles.load(Ordering::Relaxed).into();
    let mut console = Some(PoolRow {
        database: CONSOLE,
        user: CONSOLE,
        counts: rows::PoolCounts { cl_active, ..rows::PoolCounts::default() },
        pool_mode: "statement",
        load_balance_hosts: None,
    });
    for PoolFacts { pool, counts, .. } in shown_pools(pools) {
        if pool.database.name.as_str() > CONSOLE {
            console.take().iter().for_each(|row| table.push(row));
        }
        table.push(&PoolRow {
            database: &pool.database.name,
            user: &pool.user.name,
            counts,
            pool_mode: pool.settings.load().mode.as_str(),
            load_balance_hosts: load_balancing(&pool.database.settings.load()),
        });
    }
    console.iter().for_each(|row| table.push(row));
    table
}

/// Shown only where there is a list to choose from.
fn load_balancing(database: &underpass_config::Database) -> Option<&'static str> {
    database
        .host
        .as_ref()
        .filter(|hosts| hosts.hosts().len() > 1)
        .map(|_| database.load_balance_hosts.as_str())
}

fn databases_table(shared: &Shared) -> Table {
    let settings = shared.settings.load();
    let config = &settings.config;
    let mut table = Table::new(Show::Databases.columns());
    let mut console = Some(DatabaseRow {
        name: CONSOLE,
        port: config.listen_port,
        database: Some(CONSOLE),
        force_user: Some(CONSOLE),
        pool_size: CONSOLE_POOL_SIZE,
        pool_mode: Some("statement"),
        server_lifetime: config.server_lifetime.as_secs(),
        current_client_connections: shared.control.consoles.load(Ordering::Relaxed).into(),
        ..DatabaseRow::default()
    });
    for database in shared.shown_databases() {
        if database.name.as_str() > CONSOLE {
            console.take().iter().for_each(|row| table.push(row));
        }
        let configured = database.settings.load();
        table.push(&DatabaseRow {
            name: &database.name,
            host: configured.host.as_ref().map(|hosts| hosts.as_str()),
            port: configured.port,
            database: Some(configured.server_dbname()),
            force_user: configured.user.as_deref(),
            pool_size: configured.pool_size.unwrap_or(config.default_pool_size).into(),
            min_pool_size: config.min_pool_size(&configured).into(),
            reserve_pool_size: configured.reserve_pool_size.unwrap_or(config.reserve_pool_size).into(),
            server_lifetime: config.server_lifetime(&configured).as_secs(),
            pool_mode: configured.pool_mode.map(|mode| mode.as_str()),
            load_balance_hosts: load_balancing(&configured),
            max_connections: config.max_db_connections(&configured).into(),
            current_connections: lock(&shared.core).database_connections(database.number).into(),
            max_client_connections: config.max_db_client_connections(&configured).into(),
            current_client_connections: database.clients.load(Ordering::Relaxed).into(),
            paused: database.paused.load(Ordering::Relaxed),
            disabled: database.disabled.load(Ordering::Relaxed),
        });
    }
    console.iter().for_each(|row| table.push(row));
    table
}

fn users_table(shared: &Shared) -> Table {
    let settings = shared.settings.load();
    let config = &settings.config;
    let mut table = Table::new(Show::Users.columns());
    let known: BTreeMap<String, std::sync::Arc<UserState>> =
        shared.users().into_iter().map(|user| (user.name.clone(), user)).collect();
    for name in shared.user_names() {
        let configured = config.users.get(&name);
        let state = known.get(&name);
        table.push(&UserRow {
            name: &name,
            pool_size: configured.and_then(|user| user.pool_size).map(u64::from),
            reserve_pool_size: configured.and_then(|user| user.reserve_pool_size).map(u64::from),
            pool_mode: configured.and_then(|user| user.pool_mode).map(|mode| mode.as_str()),
            max_user_connections: config.max_user_connections(&name).into(),
            current_connections: state
                .map_or(0, |user| lock(&shared.core).user_connections(user.number).into()),
            max_user_client_connections: config.max_user_client_connections(&name).into(),
            current_client_connections: state.map_or(0, |user| user.clients.load(Ordering::Relaxed).into()),
        });
    }
    table
}

fn config_table(config: &Config) -> Table {
    let mut table = Table::new(Show::Config.columns());
    for row in config.show() {
        table.push(&ConfigRow {
            key: &row.key,
            value: row.value.as_deref(),
            default: row.default,
            changeable: row.changeable,
        });
    }
    table
}

fn peers_table(config: &Config) -> Table {
    let mut table = Table::new(Show::Peers.columns());
    for peer in config.peers.values() {
        table.push(&PeerRow {
            peer_id: peer.id.into(),
            host: &peer.host.to_string(),
            port: peer.port,
            pool_size: peer.pool_size.unwrap_or(config.default_pool_size).into(),
        });
    }
    table
}

/// `requests`: peers that cancel requests go to just now, and whether they have them.
fn peer_pools_table(shared: &Shared, requests: &[(u16, bool)]) -> Table {
    let mut table = Table::new(Show::PeerPools.columns());
    for peer in shared.settings.load().config.peers.values() {
        let count =
            |sent: bool| requests.iter().filter(|request| **request == (peer.id, sent)).count() as u64;
        let (sent, connecting) = (count(true), count(false));
        table.push(&PeerPoolRow {
            peer_id: peer.id.into(),
            cl_active_cancel_req: sent,
            cl_waiting_cancel_req: connecting + shared.peers.waiting(peer.id) as u64,
            sv_active_cancel: sent,
            sv_login: connecting,
        });
    }
    table
}

fn dns_hosts_table(shared: &Shared) -> Table {
    let settings = shared.settings.load();
    let mut table = Table::new(Show::DnsHosts.columns());
    for (name, entry) in shared.resolver.entries() {
        let (addrs, max_age) = match &entry.answer {
            Ok(addresses) => {
                let texts: Vec<String> = addresses.iter().map(ToString::to_string).collect();
                (texts.join(","), settings.config.dns_max_ttl)
            }
            Err(_) => (String::new(), settings.config.dns_nxdomain_ttl),
        };
        let ttl_s = max_age.saturating_sub(entry.asked_at.elapsed()).as_secs();
        table.push(&DnsHostRow { hostname: &name, ttl_s, addrs: &addrs });
    }
    table
}

fn server_count(shared: &Shared) -> u64 {
    let pools = shared.pools();
    let core = lock(&shared.core);
    pools.iter().map(|pool| u64::from(core.connections(pool.id))).sum()
}

fn mem_table(shared: &Shared, buffers: u64) -> Table {
    let (users, databases, pools) = {
        let names = shared.names.read().unwrap_or_else(PoisonError::into_inner);
        (names.users.len(), names.databases.len(), names.pools().count())
    };
    let peers = shared.settings.load().config.peers.len();
    let mut table = Table::new(Show::Mem.columns());
    let size = |bytes: usize| bytes as u64;
    for (name, size, used) in [
        (mem_names::USER, size(size_of::<UserState>()), users as u64),
        (mem_names::DATABASE, size(size_of::<DatabaseState>()), databases as u64),
        (mem_names::PEER, size(size_of::<underpass_config::Peer>()), peers as u64),
        (mem_names::POOL, size(size_of::<Pool>()), pools as u64),
        (mem_names::SERVER, size(size_of::<Server>()), server_count(shared)),
        (mem_names::CLIENT, size(size_of::<Client>()), shared.clients.load(Ordering::Relaxed).into()),
        (mem_names::BUFFER, size(SCRATCH_BYTES), buffers),
        (
            mem_names::PREPARED_STATEMENT,
            size(size_of::<underpass_pool::prepared::Statement>()),
            shared.statements.len() as u64,
        ),
    ] {
        table.push(&MemRow { name, size, used, free: 0 });
    }
    table
}
