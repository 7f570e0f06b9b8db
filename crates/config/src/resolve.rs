// SPDX-License-Identifier: Apache-2.0
//! Which setting wins where several apply.
//!
//! The order is PgBouncer's: the user's entry, then the database's, then the global key. `user` is the pool's user:
//! the forced user of the database if it has one, else the client's; for `query_wait_timeout`, `client_idle_timeout` and
//! `max_user_client_connections` it is whom the client has logged in as. These functions look up a map by name; a pooler
//! calls them when a pool or client is made and after RELOAD, not per transaction.

use std::time::Duration;

use crate::config::Config;
use crate::database::Database;
use crate::user::User;
use crate::words::PoolMode;

impl Config {
    fn by_user<T>(&self, user: &str, setting: impl Fn(&User) -> Option<T>) -> Option<T> {
        self.users.get(user).and_then(setting)
    }

    /// `pool_mode`: user, database, global. Replication connections are always in session mode, whatever this says.
    pub fn pool_mode(&self, db: &Database, user: &str) -> PoolMode {
        self.by_user(user, |u| u.pool_mode).or(db.pool_mode).unwrap_or(self.pool_mode)
    }

    /// `pool_size`: user, database, `default_pool_size`.
    pub fn pool_size(&self, db: &Database, user: &str) -> u32 {
        self.by_user(user, |u| u.pool_size).or(db.pool_size).unwrap_or(self.default_pool_size)
    }

    /// `min_pool_size`: database, global.
    pub fn min_pool_size(&self, db: &Database) -> u32 {
        db.min_pool_size.unwrap_or(self.min_pool_size)
    }

    /// `reserve_pool_size`: user, database, global.
    pub fn reserve_pool_size(&self, db: &Database, user: &str) -> u32 {
        self.by_user(user, |u| u.reserve_pool_size).or(db.reserve_pool_size).unwrap_or(self.reserve_pool_size)
    }

    /// `server_lifetime`: database, global. 0: use a connection once.
    pub fn server_lifetime(&self, db: &Database) -> Duration {
        db.server_lifetime.unwrap_or(self.server_lifetime)
    }

    /// `max_db_connections`: database, global. 0: no limit.
    pub fn max_db_connections(&self, db: &Database) -> u32 {
        db.max_db_connections.unwrap_or(self.max_db_connections)
    }

    /// `max_db_client_connections`: database, global. 0: no limit.
    pub fn max_db_client_connections(&self, db: &Database) -> u32 {
        db.max_db_client_connections.unwrap_or(self.max_db_client_connections)
    }

    /// `max_user_connections`: user, global. 0: no limit.
    pub fn max_user_connections(&self, user: &str) -> u32 {
        self.by_user(user, |u| u.max_user_connections).unwrap_or(self.max_user_connections)
    }

    /// `max_user_client_connections`: user, global. 0: no limit.
    pub fn max_user_client_connections(&self, user: &str) -> u32 {
        self.by_user(user, |u| u.max_user_client_connections).unwrap_or(self.max_user_client_connections)
    }

    /// `query_timeout`: user, global. 0: off.
    pub fn query_timeout(&self, user: &str) -> Duration {
        self.by_user(user, |u| u.query_timeout).unwrap_or(self.query_timeout)
    }

    /// `query_wait_timeout`: user, database, global. 0: off.
    pub fn query_wait_timeout(&self, db: &Database, user: &str) -> Duration {
        self.by_user(user, |u| u.query_wait_timeout)
            .or(db.query_wait_timeout)
            .unwrap_or(self.query_wait_timeout)
    }

    /// `idle_transaction_timeout`: user, global. 0: off.
    pub fn idle_transaction_timeout(&self, user: &str) -> Duration {
        self.by_user(user, |u| u.idle_transaction_timeout).unwrap_or(self.idle_transaction_timeout)
    }

    /// `transaction_timeout`: user, global. 0: off.
    pub fn transaction_timeout(&self, user: &str) -> Duration {
        self.by_user(user, |u| u.transaction_timeout).unwrap_or(self.transaction_timeout)
    }

    /// `client_idle_timeout`: user, global. 0: off.
    pub fn client_idle_timeout(&self, user: &str) -> Duration {
        self.by_user(user, |u| u.client_idle_timeout).unwrap_or(self.client_idle_timeout)
    }

    /// `auth_user`: database, global. `None`: users are not looked up at the server.
    pub fn auth_user<'a>(&'a self, db: &'a Database) -> Option<&'a str> {
        db.auth_user.as_deref().or(self.auth_user.as_deref())
    }

    /// `auth_query`: database, global.
    pub fn auth_query<'a>(&'a self, db: &'a Database) -> &'a str {
        db.auth_query.as_deref().unwrap_or(&self.auth_query)
    }

    /// `auth_dbname`: database, global. `None`: the client's own database.
    pub fn auth_dbname<'a>(&'a self, db: &'a Database) -> Option<&'a str> {
        db.auth_dbname.as_deref().or(self.auth_dbname.as_deref())
    }
}
