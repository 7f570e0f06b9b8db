// SPDX-License-Identifier: Apache-2.0
//! How many files the process may have open, and how many it may come to need.

use std::collections::BTreeSet;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use underpass_config::{Config, Database};

use crate::settings::Settings;

/// Log, listeners, epoll instances, DNS, metrics, and the connections that carry cancel requests.
const OTHERS: u64 = 200;

/// What a configuration may need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Need {
    /// Descriptors for all that the files name.
    pub descriptors: u64,
    /// They do not name all databases and users: `*` stands for any number of databases, `auth_query` knows any number of users.
    pub is_open: bool,
}

impl Need {
    /// Of these settings: `max_client_conn`, and as many servers as pools may be opened for the databases and users that are named, within
    /// `max_db_connections` and `max_user_connections`. `*` counts as one database.
    pub fn of(settings: &Settings) -> Self {
        Self::with_users(&settings.config, settings.users.keys().map(String::as_str))
    }

    fn with_users<'a>(config: &'a Config, listed: impl Iterator<Item = &'a str>) -> Self {
        // Users with settings of their own, and how many there are without: those are all alike.
        let special: BTreeSet<&str> = config.users.keys().map(String::as_str).collect();
        let plain = listed.filter(|user| !special.contains(user)).count() as u64;
        let plain = if special.is_empty() { plain.max(1) } else { plain };
        let users = || special.iter().map(|user| (*user, 1)).chain([("", plain)]);
        let databases = || config.databases.named.values().chain(&config.databases.fallback);
        // A mirror has a pool for each of the database's.
        let copies = |database: &Database| {
            1 + config.mirrors.values().filter(|mirror| mirror.covers(&database.name)).count() as u64
        };
        let pool = |database: &Database, user: &str| {
            let size = match config.pool_size(database, user) {
                // No limit; but a pool opens no more than clients may wait for at once.
                0 => u64::from(config.max_client_conn),
                size => u64::from(size) + u64::from(config.reserve_pool_size(database, user)),
            };
            within(size, config.max_user_connections(user))
        };
        let of_database = |database: &Database| match &database.user {
            Some(forced) => pool(database, forced),
            None => users().map(|(user, count)| pool(database, user).saturating_mul(count)).fold(0, add),
        };
        let by_database = databases()
            .map(|database| {
                let servers = within(of_database(database), config.max_db_connections(database));
                servers.saturating_mul(copies(database))
            })
            .fold(0, add);
        // The same, added up by users, whom max_user_connections bounds over all databases.
        let of_user = |user: &str| {
            let own = databases().filter(|database| database.user.is_none());
            let servers = own.map(|database| pool(database, user).saturating_mul(copies(database)));
            let copies = databases().map(copies).max().unwrap_or(1);
            let servers = servers.fold(0, add);
            servers.min(within(u64::MAX, config.max_user_connections(user)).saturating_mul(copies))
        };
        let forced = databases()
            .filter_map(|database| {
                let servers = pool(database, database.user.as_deref()?);
                Some(servers.saturating_mul(copies(database)))
            })
            .fold(0, add);
        let by_user = users().map(|(user, count)| of_user(user).saturating_mul(count)).fold(forced, add);
        let asks = |database: &Database| {
            database.user.is_none() && database.auth_user.as_ref().or(config.auth_user.as_ref()).is_some()
        };
        Self {
            descriptors: [u64::from(config.max_client_conn), by_database.min(by_user), OTHERS]
                .into_iter()
                .fold(0, add),
            is_open: config.databases.fallback.is_some() || databases().any(asks),
        }
    }
}

fn add(a: u64, b: u64) -> u64 {
    a.saturating_add(b)
}

/// `count`, if a limit (0: none) allows it.
fn within(count: u64, limit: u32) -> u64 {
    if limit == 0 { count } else { count.min(limit.into()) }
}

/// Raises the limit of open files if these settings may need more: as far as it goes, for what is asked of it costs nothing. Says so,
/// and what is missing if the hard limit is too low.
pub(crate) fn raise_limit(settings: &Settings) {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return };
    let Need { descriptors: needed, is_open } = Need::of(settings);
    let is_short = needed > soft || is_open;
    let is_raised = is_short && hard > soft && setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok();
    let allowed = if is_raised { hard } else { soft };
    log::info!(
        "kernel file descriptor limit: {allowed} (hard: {hard}); max_client_conn: {}, max expected fd use: {needed}",
        settings.config.max_client_conn
    );
    if allowed < needed {
        log::warn!(
            "{needed} file descriptors may be needed, {allowed} are allowed: raise LimitNOFILE (ulimit -n)"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needed(ini: &str, users: &[&str]) -> Need {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pgbouncer.ini");
        std::fs::write(&path, ini).unwrap();
        let config = Config::load(&[&path]).unwrap().config;
        let need = Need::with_users(&config, users.iter().copied());
        let others = OTHERS + u64::from(config.max_client_conn);
        Need { descriptors: need.descriptors - others, ..need }
    }

    fn servers(databases: &str, keys: &str, users: &[&str]) -> u64 {
        let ini = format!("[databases]\n{databases}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n{keys}");
        needed(&ini, users).descriptors
    }

    #[test]
    fn servers_are_counted_by_database_and_user() {
        let pools = "default_pool_size = 10\nreserve_pool_size = 2";
        assert_eq!(servers("a = host=x", pools, &[]), 12, "somebody comes");
        assert_eq!(servers("a = host=x\nb = host=x", pools, &["u", "v", "w"]), 72);
        assert_eq!(servers("a = host=x pool_size=100 reserve_pool_size=0", pools, &["u", "v"]), 200);
        assert_eq!(servers("a = host=x user=f pool_size=7", pools, &["u", "v", "w"]), 9, "one user");
        let sizes = format!("{pools}\n[users]\nu = pool_size=50\nnew = pool_size=1");
        assert_eq!(servers("a = host=x", &sizes, &["u", "v"]), 52 + 12 + 3);
    }

    #[test]
    fn limits_of_databases_and_users_bound_them() {
        let pools = "default_pool_size = 10";
        assert_eq!(servers("a = host=x max_db_connections=15\nb = host=x", pools, &["u", "v"]), 15 + 20);
        let by_user = "default_pool_size = 10\nmax_user_connections = 12";
        assert_eq!(servers("a = host=x\nb = host=x", by_user, &["u", "v", "w"]), 36);
        assert_eq!(servers("a = host=x\nb = host=x user=f", by_user, &["u"]), 20);
    }

    #[test]
    fn a_pool_without_a_limit_has_its_clients_its_databases_and_its_users() {
        let pools = "default_pool_size = 0\nreserve_pool_size = 2\nmax_client_conn = 50";
        assert_eq!(servers("a = host=x\nb = host=x pool_size=3", pools, &["u", "v"]), 2 * 50 + 2 * 5);
        assert_eq!(servers("a = host=x max_db_connections=7", pools, &["u", "v"]), 7);
        let by_user = format!("{pools}\nmax_user_connections = 4");
        assert_eq!(servers("a = host=x", &by_user, &["u", "v"]), 8);
    }

    #[test]
    fn a_star_and_an_auth_query_are_open_ends() {
        let of = |databases: &str, keys: &str| {
            needed(&format!("[databases]\n{databases}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n{keys}"), &["u"])
        };
        assert_eq!(of("a = host=x", ""), Need { descriptors: 20, is_open: false });
        assert_eq!(of("* = host=x", ""), Need { descriptors: 20, is_open: true });
        assert!(of("a = host=x", "auth_user = asker").is_open);
        assert!(!of("a = host=x user=f", "auth_user = asker").is_open, "one user is all it has");
    }
}
