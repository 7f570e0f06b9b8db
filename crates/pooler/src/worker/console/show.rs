// SPDX-License-Identifier: Apache-2.0
//! The SHOW commands. Those about sockets and counters collect from all workers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Instant;

use underpass_config::Config;
use underpass_console::rows::{
    self, ConfigRow, DatabaseRow, DnsHostRow, Lists, MemRow, PauseState, PeerPoolRow, PeerRow, PoolRow, UserRow,
    VersionRow, mem_names,
};
use underpass_console::{Show, StatsWindow, Table};
use underpass_pool::PoolId;

use super::commands::Progress;
use super::sockets::{Facts, fd_table, parked_facts, socket_table};
use super::{Event, Reply};
use crate::client::{Client, Phase};
use crate::control::{self, StatsBook};
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
            Show::Stats | Show::StatsTotals | Show::StatsAverages | Show::Totals => {
                return self.show_collected(key, Worker::stats_part, move |worker, parts| {
                    let mut book = lock(&worker.shared.control.stats);
                    book.update(&parts);
                    stats_table(&worker.shared, &book, show, worker.now)
                });
            }
            Show::Pools => {
                return self.show_collected(key, Worker::cancels_by_pool, |worker, parts| {
                    pools_table(&worker.shared, &parts, worker.now)
                });
            }
            Show::Lists => {
                return self.show_collected(key, Worker::login_count, |worker, parts| {
                    lists_table(&worker.shared, parts.iter().sum())
                });
            }
            Show::Mem => {
                return self.show_collected(key, Worker::buffer_count, |worker, parts| {
                    mem_table(&worker.shared, parts.iter().sum())
                });
            }
            Show::Config => config_table(&shared.settings.load().config),
            Show::Databases => databases_table(&shared),
            Show::Users => users_table(&shared),
            Show::Peers => peers_table(&shared.settings.load().config),
            Show::PeerPools => peer_pools_table(&shared.settings.load().config),
            Show::DnsHosts => dns_hosts_table(&shared),
            // Zones are not polled (dns_zone_check_period).
            Show::DnsZones => Table::new(show.columns()),
            Show::State => match shared.phase.load(Ordering::Acquire) {
                phase::PAUSED | phase::WAIT_FOR_SERVERS => PauseState::Paused.table(),
                phase::SUSPENDED => PauseState::Suspended.table(),
                _ => PauseState::Active.table(),
            },
            Show::Version => {
                let mut table = Table::new(show.columns());
                table.push(&VersionRow(crate::VERSION));
                table
            }
            Show::Kernel => kernel_table(),
        };
        Progress::Now(Ok(Reply::Rows(table)))
    }

    /// Collects a part from every worker, makes a table of them at any one, and answers at this one.
    fn show_collected<T: Send + 'static>(
        &self,
        key: Key,
        part: impl Fn(&mut Self) -> T + Send + Sync + 'static,
        table: impl FnOnce(&mut Self, Vec<T>) -> Table + Send + 'static,
    ) -> Progress {
        let home = self.index;
        control::gather(&self.shared, part, move |worker, parts| {
            let rows = Reply::Rows(table(worker, parts));
            worker.post(home, Box::new(move |worker| worker.console_answer(key, Ok(rows))));
        });
        Progress::Later(Event::Answer)
    }

    fn show_sockets(&self, key: Key, show: Show) -> Progress {
        let with_clients = show != Show::Servers;
        let with_servers = show != Show::Clients;
        let part = move |worker: &mut Self| {
            let mut facts = if with_clients { worker.client_facts() } else { Vec::new() };
            if with_servers {
                facts.extend(worker.server_facts());
            }
            facts
        };
        self.show_collected(key, part, move |worker, parts| {
            let mut facts: Vec<Facts> = parts.into_iter().flatten().collect();
            if with_servers {
                facts.extend(parked_facts(&worker.shared, worker.now));
            }
            match show {
                Show::Fds => fd_table(&facts),
                _ => socket_table(&worker.shared, show, facts),
            }
        })
    }

    /// Cancel requests on their way, by the pool of the server they are for.
    fn cancels_by_pool(&mut self) -> BTreeMap<PoolId, u64> {
        let mut counts = BTreeMap::new();
        for (_, cancel) in self.cancels.iter() {
            *counts.entry(cancel.id.pool).or_default() += 1;
        }
        counts
    }

    fn login_count(&mut self) -> u64 {
        self.clients.iter().filter(|(_, client)| client.is_login()).count() as u64
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
fn shown_pools(shared: &Shared) -> Vec<std::sync::Arc<Pool>> {
    let mut pools = shared.pools();
    pools.retain(|pool| !pool.forgotten.load(Ordering::Relaxed));
    pools.sort_by(|a, b| (&a.database.name, &a.user.name).cmp(&(&b.database.name, &b.user.name)));
    pools
}

fn shown_databases(shared: &Shared) -> Vec<std::sync::Arc<DatabaseState>> {
    let mut databases = shared.databases();
    databases.retain(|database| !database.forgotten.load(Ordering::Relaxed));
    databases
}

fn stats_table(shared: &Shared, book: &StatsBook, show: Show, now: Instant) -> Table {
    let at = shared.timestamp(now);
    if show == Show::Totals {
        return book.total().totals_table(&book.clock, at);
    }
    let mut by_database: BTreeMap<String, StatsWindow> = BTreeMap::new();
    by_database.insert(CONSOLE.to_owned(), StatsWindow::default());
    for pool in shown_pools(shared) {
        let window = by_database.entry(pool.database.name.clone()).or_default();
        if let Some(of_pool) = book.windows.get(pool.id.0 as usize) {
            window.merge(of_pool);
        }
    }
    let mut table = Table::new(show.columns());
    for (database, window) in &by_database {
        let row = window.row(database, &book.clock, at);
        match show {
            Show::StatsTotals => table.push(&rows::StatsTotalsRow(row)),
            Show::StatsAverages => table.push(&rows::StatsAveragesRow(row)),
            _ => table.push(&row),
        }
    }
    table
}

fn pools_table(shared: &Shared, cancels: &[BTreeMap<PoolId, u64>], now: Instant) -> Table {
    let mut table = Table::new(Show::Pools.columns());
    let console = || PoolRow {
        database: CONSOLE,
        user: CONSOLE,
        counts: rows::PoolCounts {
            cl_active: shared.control.consoles.load(Ordering::Relaxed).into(),
            ..rows::PoolCounts::default()
        },
        pool_mode: "statement",
        load_balance_hosts: None,
    };
    let mut console = Some(console());
    for pool in shown_pools(shared) {
        if pool.database.name.as_str() > CONSOLE {
            console.take().iter().for_each(|row| table.push(row));
        }
        let counts = lock(&shared.core).counts(pool.id, now);
        let cancels = cancels.iter().filter_map(|part| part.get(&pool.id)).sum();
        let configured = pool.database.settings.load();
        table.push(&PoolRow {
            database: &pool.database.name,
            user: &pool.user.name,
            counts: rows::PoolCounts {
                cl_active: u64::from(
                    pool.clients.load(Ordering::Relaxed).saturating_sub(counts.clients_waiting),
                ),
                cl_waiting: counts.clients_waiting.into(),
                cl_active_cancel_req: cancels,
                cl_waiting_cancel_req: 0,
                sv_active: counts.active.into(),
                sv_active_cancel: cancels,
                sv_being_canceled: counts.being_canceled.into(),
                sv_idle: counts.idle.into(),
                sv_used: counts.used.into(),
                sv_tested: counts.tested.into(),
                sv_login: counts.login.into(),
                maxwait_us: counts.max_wait.as_micros() as u64,
            },
            pool_mode: pool.settings.load().mode.as_str(),
            load_balance_hosts: load_balancing(&configured),
        });
    }
    console.iter().for_each(|row| table.push(row));
    table
}

/// Shown only where there is a list to choose from.
fn load_balancing(database: &underpass_config::Database) -> Option<&'static str> {
    database.host.as_ref().filter(|hosts| hosts.hosts().len() > 1).map(|_| database.load_balance_hosts.as_str())
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
    for database in shown_databases(shared) {
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

/// Names of `auth_file`, of `[users]`, and of those who have been here.
fn user_names(shared: &Shared) -> BTreeSet<String> {
    let settings = shared.settings.load();
    let mut names: BTreeSet<String> = settings.users.keys().chain(settings.config.users.keys()).cloned().collect();
    names.extend(shared.users().iter().map(|user| user.name.clone()));
    names.insert(CONSOLE.to_owned());
    names
}

fn users_table(shared: &Shared) -> Table {
    let settings = shared.settings.load();
    let config = &settings.config;
    let mut table = Table::new(Show::Users.columns());
    let known: BTreeMap<String, std::sync::Arc<UserState>> =
        shared.users().into_iter().map(|user| (user.name.clone(), user)).collect();
    for name in user_names(shared) {
        let configured = config.users.get(&name);
        let state = known.get(&name);
        table.push(&UserRow {
            name: &name,
            pool_size: configured.and_then(|user| user.pool_size).map(u64::from),
            reserve_pool_size: configured.and_then(|user| user.reserve_pool_size).map(u64::from),
            pool_mode: configured.and_then(|user| user.pool_mode).map(|mode| mode.as_str()),
            max_user_connections: config.max_user_connections(&name).into(),
            current_connections: state.map_or(0, |user| lock(&shared.core).user_connections(user.number).into()),
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

fn peer_pools_table(config: &Config) -> Table {
    let mut table = Table::new(Show::PeerPools.columns());
    for peer in config.peers.values() {
        table.push(&PeerPoolRow { peer_id: peer.id.into(), ..PeerPoolRow::default() });
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

fn lists_table(shared: &Shared, login_clients: u64) -> Table {
    let settings = shared.settings.load();
    let peers = settings.config.peers.len() as u64;
    Lists {
        // The console has a database, a pool and a user.
        databases: shown_databases(shared).len() as u64 + 1,
        users: user_names(shared).len() as u64,
        peers,
        pools: shown_pools(shared).len() as u64 + 1,
        peer_pools: peers,
        used_clients: shared.clients.load(Ordering::Relaxed).into(),
        login_clients,
        used_servers: server_count(shared),
        dns_names: shared.resolver.entries().len() as u64,
        ..Lists::default()
    }
    .table()
}

fn mem_table(shared: &Shared, buffers: u64) -> Table {
    let (users, databases, pools) = {
        let names = shared.names.read().unwrap_or_else(PoisonError::into_inner);
        (names.users.len(), names.databases.len(), names.pools.len())
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

/// Kernel lanes: none are in this build, so there is nothing to count.
fn kernel_table() -> Table {
    Table::new(Show::Kernel.columns())
}
