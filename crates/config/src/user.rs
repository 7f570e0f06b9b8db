// SPDX-License-Identifier: Apache-2.0
//! `[users]`: settings of single users.

use std::time::Duration;

use crate::connstr::Reader;
use crate::error::{ErrorKind, Location};
use crate::words::PoolMode;

/// One entry of `[users]`. `None`: the next wider setting applies, see `resolve.rs`.
#[derive(Debug, Clone, PartialEq)]
pub struct User {
    /// The user's name.
    pub name: String,
    /// Overrides the database's `pool_size` and `default_pool_size`.
    pub pool_size: Option<u32>,
    /// Overrides `reserve_pool_size`.
    pub reserve_pool_size: Option<u32>,
    /// Overrides `pool_mode`.
    pub pool_mode: Option<PoolMode>,
    /// Overrides `max_user_connections`.
    pub max_user_connections: Option<u32>,
    /// Overrides `max_user_client_connections`.
    pub max_user_client_connections: Option<u32>,
    /// Overrides `query_timeout`.
    pub query_timeout: Option<Duration>,
    /// Overrides `query_wait_timeout`; 0 switches it off for the user.
    pub query_wait_timeout: Option<Duration>,
    /// Overrides `idle_transaction_timeout`.
    pub idle_transaction_timeout: Option<Duration>,
    /// Overrides `transaction_timeout`.
    pub transaction_timeout: Option<Duration>,
    /// Overrides `client_idle_timeout`.
    pub client_idle_timeout: Option<Duration>,
    /// Where the entry stands.
    pub at: Location,
}

/// Keys of an entry, in the order of the manual.
pub(crate) const USER_KEYS: &[&str] = &[
    "pool_size",
    "reserve_pool_size",
    "pool_mode",
    "max_user_connections",
    "max_user_client_connections",
    "query_timeout",
    "query_wait_timeout",
    "idle_transaction_timeout",
    "transaction_timeout",
    "client_idle_timeout",
];

impl User {
    /// An entry without settings.
    pub fn new(name: impl Into<String>, at: Location) -> Self {
        Self {
            name: name.into(),
            pool_size: None,
            reserve_pool_size: None,
            pool_mode: None,
            max_user_connections: None,
            max_user_client_connections: None,
            query_timeout: None,
            query_wait_timeout: None,
            idle_transaction_timeout: None,
            transaction_timeout: None,
            client_idle_timeout: None,
            at,
        }
    }

    pub(crate) fn parse(name: &str, text: &str, reader: &mut Reader<'_>) -> Result<Self, ErrorKind> {
        let mut user = Self::new(name, reader.at.clone());
        reader.read(name, text, |reader, key, value| user.set(reader, key, value))?;
        Ok(user)
    }

    fn set(&mut self, reader: &mut Reader<'_>, key: &str, value: &str) -> Result<(), ErrorKind> {
        // A 0 in these is the same as no override in PgBouncer (server.c, janitor.c): a user cannot be exempt from a
        // global limit or timeout, except from query_wait_timeout.
        let limit = |n: Option<u32>| n.filter(|n| *n > 0);
        let timeout = |t: Option<Duration>| t.filter(|t| !t.is_zero());
        match key {
            "pool_size" => self.pool_size = reader.count(key, value)?,
            "reserve_pool_size" => self.reserve_pool_size = reader.count(key, value)?,
            "pool_mode" => self.pool_mode = Some(reader.word(key, value)?),
            "max_user_connections" => self.max_user_connections = limit(reader.count(key, value)?),
            "max_user_client_connections" => {
                self.max_user_client_connections = limit(reader.count(key, value)?);
            }
            "query_timeout" => self.query_timeout = timeout(reader.seconds(key, value)?),
            "query_wait_timeout" => self.query_wait_timeout = reader.seconds(key, value)?,
            "idle_transaction_timeout" => {
                self.idle_transaction_timeout = timeout(reader.seconds(key, value)?);
            }
            "transaction_timeout" => self.transaction_timeout = timeout(reader.seconds(key, value)?),
            "client_idle_timeout" => self.client_idle_timeout = timeout(reader.seconds(key, value)?),
            _ => return Err(reader.unknown(key, USER_KEYS)),
        }
        Ok(())
    }

    /// The same settings, wherever they stand in the file.
    pub fn same_settings(&self, other: &Self) -> bool {
        Self { at: other.at.clone(), ..self.clone() } == *other
    }
}
