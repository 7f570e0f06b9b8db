// SPDX-License-Identifier: Apache-2.0
//! `[databases]`: the names clients ask for, and where they lead.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::connstr::{Reader, invalid};
use crate::error::{ErrorKind, Location};
use crate::host::HostList;
use crate::secret::Secret;
use crate::words::{LoadBalanceHosts, PoolMode};

/// One entry of `[databases]`. `None` in an override: the next wider setting applies, see `resolve.rs`.
#[derive(Debug, Clone, PartialEq)]
pub struct Database {
    /// The name clients use.
    pub name: String,
    /// `dbname`: the name at the server; `None`: the same. Use [`server_dbname`](Self::server_dbname).
    pub dbname: Option<String>,
    /// `host`; `None`: a unix socket in `unix_socket_dir`.
    pub host: Option<HostList>,
    /// `port`, default 5432.
    pub port: u16,
    /// `user`: the forced user; all clients share one pool.
    pub user: Option<String>,
    /// `password` of the forced user; `None`: from the auth_file.
    pub password: Option<Secret>,
    /// Overrides `auth_user`.
    pub auth_user: Option<String>,
    /// Overrides `auth_query`.
    pub auth_query: Option<String>,
    /// Overrides `auth_dbname`.
    pub auth_dbname: Option<String>,
    /// Overrides `default_pool_size`.
    pub pool_size: Option<u32>,
    /// Overrides `min_pool_size`.
    pub min_pool_size: Option<u32>,
    /// Overrides `reserve_pool_size`; also spelled `reserve_pool`.
    pub reserve_pool_size: Option<u32>,
    /// SQL to run on each new server connection.
    pub connect_query: Option<String>,
    /// Overrides `pool_mode`.
    pub pool_mode: Option<PoolMode>,
    /// Overrides `query_wait_timeout`.
    pub query_wait_timeout: Option<Duration>,
    /// How a host is chosen from the list.
    pub load_balance_hosts: LoadBalanceHosts,
    /// Overrides `max_db_connections`.
    pub max_db_connections: Option<u32>,
    /// Overrides `max_db_client_connections`.
    pub max_db_client_connections: Option<u32>,
    /// Overrides `server_lifetime`.
    pub server_lifetime: Option<Duration>,
    /// Startup parameter for the server.
    pub client_encoding: Option<String>,
    /// Startup parameter for the server.
    pub datestyle: Option<String>,
    /// Startup parameter for the server.
    pub timezone: Option<String>,
    /// Startup parameter for the server.
    pub application_name: Option<String>,
    /// Where the entry stands.
    pub at: Location,
}

/// Keys of an entry, in the order of the manual.
pub(crate) const DATABASE_KEYS: &[&str] = &[
    "dbname",
    "host",
    "port",
    "user",
    "password",
    "auth_user",
    "auth_query",
    "auth_dbname",
    "pool_size",
    "min_pool_size",
    "reserve_pool_size",
    "reserve_pool",
    "connect_query",
    "pool_mode",
    "query_wait_timeout",
    "load_balance_hosts",
    "max_db_connections",
    "max_db_client_connections",
    "server_lifetime",
    "client_encoding",
    "datestyle",
    "timezone",
    "application_name",
];

/// The console's database, which no entry may be called.
pub const CONSOLE_DATABASE: &str = "pgbouncer";

impl Database {
    /// An entry without settings.
    pub fn new(name: impl Into<String>, at: Location) -> Self {
        Self {
            name: name.into(),
            dbname: None,
            host: None,
            port: 5432,
            user: None,
            password: None,
            auth_user: None,
            auth_query: None,
            auth_dbname: None,
            pool_size: None,
            min_pool_size: None,
            reserve_pool_size: None,
            connect_query: None,
            pool_mode: None,
            query_wait_timeout: None,
            load_balance_hosts: LoadBalanceHosts::RoundRobin,
            max_db_connections: None,
            max_db_client_connections: None,
            server_lifetime: None,
            client_encoding: None,
            datestyle: None,
            timezone: None,
            application_name: None,
            at,
        }
    }

    pub(crate) fn parse(name: &str, text: &str, reader: &mut Reader<'_>) -> Result<Self, ErrorKind> {
        if name == CONSOLE_DATABASE {
            return Err(ErrorKind::Name {
                what: "database name",
                name: name.to_owned(),
                rule: "is reserved for the console",
            });
        }
        let mut db = Self::new(name, reader.at.clone());
        reader.read(name, text, |reader, key, value| db.set(reader, key, value))?;
        Ok(db)
    }

    fn set(&mut self, reader: &mut Reader<'_>, key: &str, value: &str) -> Result<(), ErrorKind> {
        let text = || Some(value.to_owned());
        match key {
            "dbname" => self.dbname = text(),
            "host" => {
                let hosts = HostList::parse(value);
                self.host =
                    Some(hosts.ok_or_else(|| invalid(key, value, "hosts separated by single commas"))?);
            }
            "port" => self.port = reader.port(key, value)?,
            "user" => self.user = text(),
            "password" => self.password = Some(Secret::new(value)),
            "auth_user" => self.auth_user = text(),
            "auth_query" => self.auth_query = text(),
            "auth_dbname" => self.auth_dbname = text(),
            "pool_size" => self.pool_size = reader.count(key, value)?,
            "min_pool_size" => self.min_pool_size = reader.count(key, value)?,
            "reserve_pool_size" | "reserve_pool" => self.reserve_pool_size = reader.count(key, value)?,
            "connect_query" => self.connect_query = text(),
            "pool_mode" => self.pool_mode = Some(reader.word(key, value)?),
            "query_wait_timeout" => self.query_wait_timeout = reader.seconds(key, value)?,
            "load_balance_hosts" => self.load_balance_hosts = reader.word(key, value)?,
            // In PgBouncer a 0 in these three is the same as no override (server.c), unlike the pool sizes.
            "max_db_connections" => self.max_db_connections = reader.count(key, value)?.filter(|n| *n > 0),
            "max_db_client_connections" => {
                self.max_db_client_connections = reader.count(key, value)?.filter(|n| *n > 0);
            }
            "server_lifetime" => {
                self.server_lifetime = reader.seconds(key, value)?.filter(|t| !t.is_zero());
            }
            "client_encoding" => self.client_encoding = text(),
            "datestyle" => self.datestyle = text(),
            "timezone" => self.timezone = text(),
            "application_name" => self.application_name = text(),
            _ => return Err(reader.unknown(key, DATABASE_KEYS)),
        }
        Ok(())
    }

    /// The database's name at the server.
    pub fn server_dbname(&self) -> &str {
        self.dbname.as_deref().unwrap_or(&self.name)
    }

    /// Startup parameters for the server besides user and database, with their protocol names.
    pub fn startup_parameters(&self) -> impl Iterator<Item = (&'static str, &str)> {
        [
            ("client_encoding", &self.client_encoding),
            ("datestyle", &self.datestyle),
            ("timezone", &self.timezone),
            ("application_name", &self.application_name),
        ]
        .into_iter()
        .filter_map(|(name, value)| value.as_deref().map(|v| (name, v)))
    }

    /// Whether connections made under `self` must be closed now that the entry reads `new`: "database configuration
    /// changed". Limits and timeouts apply to existing connections as they are.
    pub fn needs_reconnect(&self, new: &Self) -> bool {
        self.server_dbname() != new.server_dbname()
            || self.host != new.host
            || self.port != new.port
            || self.user != new.user
            || self.password != new.password
            || self.connect_query != new.connect_query
            || self.auth_dbname != new.auth_dbname
            || self.auth_query != new.auth_query
            || self.load_balance_hosts != new.load_balance_hosts
            || !self.startup_parameters().eq(new.startup_parameters())
    }

    /// The same settings, wherever they stand in the file.
    pub fn same_settings(&self, other: &Self) -> bool {
        Self { at: other.at.clone(), ..self.clone() } == *other
    }
}

/// All of `[databases]`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Databases {
    /// Entries by name; SHOW DATABASES lists them in this order.
    pub named: BTreeMap<String, Database>,
    /// `*`: what applies to every other name. Its own name is `*`.
    pub fallback: Option<Database>,
}

impl Databases {
    /// The entry of `name`, or one made from `*` (then the second value is true).
    pub fn lookup(&self, name: &str) -> Option<(Database, bool)> {
        if let Some(db) = self.named.get(name) {
            return Some((db.clone(), false));
        }
        // The console's name is never a fall-back database.
        let fallback = self.fallback.as_ref().filter(|_| name != CONSOLE_DATABASE)?;
        Some((Database { name: name.to_owned(), ..fallback.clone() }, true))
    }

    /// Whether [`lookup`](Self::lookup) finds one, which is cheaper to tell.
    pub fn contains(&self, name: &str) -> bool {
        self.named.contains_key(name) || (self.fallback.is_some() && name != CONSOLE_DATABASE)
    }

    /// Number of named entries.
    pub fn len(&self) -> usize {
        self.named.len()
    }

    /// Whether no client can be served: no entry and no `*`.
    pub fn is_empty(&self) -> bool {
        self.named.is_empty() && self.fallback.is_none()
    }
}
