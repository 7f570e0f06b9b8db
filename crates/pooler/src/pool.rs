// SPDX-License-Identifier: Apache-2.0
//! A pool as the service sees it: names, settings, and what new clients are told. Its servers and queue are the core's.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use underpass_config::{CheckQuery, Config, Database, PoolMode};
use underpass_console::text::{self, reason};
use underpass_pool::link::LinkOptions;
use underpass_pool::params::ParameterSet;
use underpass_pool::{PoolId, params::SharedParameters};

use underpass_wire::SqlState;

use crate::hosts::Round;
use crate::lanes::LanePool;
use crate::settings::Settings;
use crate::why::Own;
use crate::worker::Farewell;

/// A database as clients name it.
pub(crate) struct DatabaseState {
    pub number: u32,
    pub name: String,
    pub settings: ArcSwap<Database>,
    /// Made by the `*` entry.
    pub is_auto: AtomicBool,
    /// Not one of clients: where a mirror is.
    pub is_mirror: bool,
    pub disabled: AtomicBool,
    pub paused: AtomicBool,
    /// By a KILL of everything, which a RESUME of everything ends.
    pub killed: AtomicBool,
    /// Not configured any more, or automatic and unused for `autodb_idle_timeout`: not shown, new again when a client asks for it.
    /// The entry stays while something of it is left, a busy server for instance.
    pub forgotten: AtomicBool,
    /// Logged-in clients and those logging in.
    pub clients: AtomicU32,
    /// Turn of the next connection: see [`crate::hosts`].
    pub next_host: AtomicUsize,
    /// Hosts whose TLS handshake failed under `server_tls_sslmode` prefer, and the cause that was told last.
    pub tls_failures: Mutex<HashMap<String, String>>,
}

/// A user name that clients log in with, or that servers are logged in with.
pub(crate) struct UserState {
    pub number: u32,
    pub name: String,
    pub clients: AtomicU32,
}

/// What is fixed for a pool between reloads.
#[derive(Debug, Clone)]
pub(crate) struct PoolSettings {
    pub mode: PoolMode,
    pub link: LinkOptions,
    pub reset_query: Option<Arc<str>>,
    /// `server_check_query` only finds out whether the server lives, which its socket tells too.
    pub checks_life_only: bool,
    /// `server_round_robin`
    pub round_robin: bool,
    pub check_query: Arc<str>,
    /// Of clients that have logged in as the pool's user.
    pub of_clients: ClientTimeouts,
    pub query_timeout: Duration,
    pub idle_transaction_timeout: Duration,
    pub transaction_timeout: Duration,
}

/// What goes by the user that the client has logged in as, whoever its servers are logged in as (PgBouncer: `login_user_credentials` in
/// `pool_client_maint`).
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ClientTimeouts {
    pub query_wait: Duration,
    pub client_idle: Duration,
}

impl ClientTimeouts {
    pub fn new(config: &Config, database: &Database, user: &str) -> Self {
        Self {
            query_wait: config.query_wait_timeout(database, user),
            client_idle: config.client_idle_timeout(user),
        }
    }
}

/// A pool: one database as one user.
pub(crate) struct Pool {
    pub id: PoolId,
    pub database: Arc<DatabaseState>,
    /// The user servers are logged in with.
    pub user: Arc<UserState>,
    pub settings: ArcSwap<PoolSettings>,
    /// What every transaction asks of them, at the price of a load: see [`Pool::mode`] and [`Pool::resets`].
    brief: AtomicU8,
    /// What a server of this pool reports at login: new clients are told the same.
    pub welcome: ArcSwapOption<ParameterSet>,
    /// Whom its servers have logged in as, by their own word.
    pub authorization: ArcSwapOption<Arc<str>>,
    /// Logged-in clients.
    pub clients: AtomicU32,
    /// The pool's place in the kernel lanes, if they carry it.
    pub lane: Option<LanePool>,
    /// Why they may not just now: a place in [`Own::ALL`], or [`CARRIED`].
    lane_refused: AtomicU8,
    /// A credential to log servers in with, when no list has one: the keys or password that a client proved.
    pub proved: ArcSwapOption<underpass_auth::Login>,
    /// The secret that the list or `auth_query` gave for the pool's user.
    pub secret: ArcSwapOption<underpass_auth::Secret>,
    /// Why the last attempt to get a server failed; none since one succeeded. For clients that wait.
    pub last_error: ArcSwapOption<ConnectError>,
    /// When a server logged in last, milliseconds after [`Shared::started`](crate::shared::Shared); 0: never.
    pub logged_in_ms: AtomicU64,
    /// Hosts that failed since one worked.
    pub round: Mutex<Round>,
    /// What the last client was given that asked for parameters: the next one usually asks for the same.
    pub wanted: ArcSwapOption<Wanted>,
    /// Its clients were given this user by `user=`, and did not name it.
    pub is_forced: AtomicBool,
    /// Unused for `pool_idle_timeout`, or of a forgotten database: not shown, until a client comes, and let go with its last server.
    pub forgotten: AtomicBool,
    /// RELOAD removed its database: nothing is opened for those who wait, until a client comes. Changes under the lock of the core.
    pub removed: AtomicBool,
}

/// The parameters of a session, and all that they follow from.
pub(crate) struct Wanted {
    /// Of the StartupMessage.
    pub asked: Vec<(String, String)>,
    /// By the servers of the pool.
    pub reported: SharedParameters,
    /// [`Pool::authorization`]
    pub own: Option<Arc<Arc<str>>>,
    pub settings: Arc<Settings>,
    pub parameters: SharedParameters,
    /// The ParameterStatus messages that tell of them.
    pub told: Vec<u8>,
}

impl Wanted {
    /// Whether a client that asks this now has the same parameters.
    pub fn fits(
        &self,
        asked: &[(String, String)],
        reported: &SharedParameters,
        own: &Option<Arc<Arc<str>>>,
        settings: &Arc<Settings>,
    ) -> bool {
        Arc::ptr_eq(&self.reported, reported)
            && Arc::ptr_eq(&self.settings, settings)
            && self.own == *own
            && self.asked == asked
    }
}

/// A server could not be reached, or did not let the pool in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConnectError {
    pub message: String,
    /// SQLSTATE of PostgreSQL's refusal. Trying again does not help before somebody has changed something, so clients are told at once.
    /// `None` for a server that is down or starting, which is worth waiting for.
    pub refused: Option<SqlState>,
}

impl ConnectError {
    /// From the ErrorResponse with which a login ended.
    pub fn refused(body: &[u8]) -> Self {
        let sqlstate = SqlState::new(crate::error_field(body, b'C').as_bytes());
        let message = text::server_login_failed(Some((
            &crate::error_field(body, b'S'),
            &crate::error_field(body, b'M'),
        )))
        .text;
        Self { message, refused: sqlstate.filter(|state| *state != SqlState::CANNOT_CONNECT_NOW) }
    }

    /// What a client is told that would have to wait for a server of this pool.
    pub fn farewell(&self) -> Farewell {
        let sqlstate = self.refused.unwrap_or(SqlState::SQLCLIENT_UNABLE_TO_ESTABLISH_SQLCONNECTION);
        Farewell::told(sqlstate, reason::server_login_failing(&self.message))
    }
}

impl PoolSettings {
    pub fn new(settings: &Settings, database: &Database, user: &str) -> Self {
        let config = &settings.config;
        let mode = config.pool_mode(database, user);
        let reset = mode == PoolMode::Session || config.server_reset_query_always;
        Self {
            mode,
            link: settings.link_options(mode),
            reset_query: config.server_reset_query.as_deref().filter(|_| reset).map(Arc::from),
            checks_life_only: match &config.server_check_query {
                CheckQuery::Off | CheckQuery::Empty => true,
                CheckQuery::Sql(sql) => is_life_check(sql),
            },
            round_robin: config.server_round_robin,
            check_query: match &config.server_check_query {
                CheckQuery::Off | CheckQuery::Empty => "".into(),
                CheckQuery::Sql(sql) => sql.as_str().into(),
            },
            of_clients: ClientTimeouts::new(config, database, user),
            query_timeout: config.query_timeout(user),
            idle_transaction_timeout: config.idle_transaction_timeout(user),
            transaction_timeout: config.transaction_timeout(user),
        }
    }
}

impl PoolSettings {
    /// Adapted to its database: sessions with mirrors end when the client does, not by timeouts of their own.
    pub fn of(self, database: &DatabaseState) -> Self {
        if !database.is_mirror {
            return self;
        }
        Self {
            of_clients: ClientTimeouts::default(),
            query_timeout: Duration::ZERO,
            idle_transaction_timeout: Duration::ZERO,
            transaction_timeout: Duration::ZERO,
            ..self
        }
    }
}

/// Whether `sql` is PgBouncer's default check before 1.26, which many files still spell out.
fn is_life_check(sql: &str) -> bool {
    sql.trim().trim_end_matches(';').trim_end().eq_ignore_ascii_case("select 1")
}

/// Bits of [`Pool::brief`].
const SESSION: u8 = 1;
const STATEMENT: u8 = 2;
const RESETS: u8 = 4;

/// Of [`Pool::lane_refused`]: not refused.
const CARRIED: u8 = u8::MAX;

fn brief(settings: &PoolSettings) -> u8 {
    let mode = match settings.mode {
        PoolMode::Session => SESSION,
        PoolMode::Transaction => 0,
        PoolMode::Statement => STATEMENT,
    };
    mode | if settings.reset_query.is_some() { RESETS } else { 0 }
}

impl Pool {
    /// A pool without servers or clients.
    pub fn new(
        id: PoolId,
        lane: Option<LanePool>,
        database: Arc<DatabaseState>,
        user: Arc<UserState>,
        settings: PoolSettings,
    ) -> Self {
        Self {
            id,
            lane,
            lane_refused: AtomicU8::new(CARRIED),
            database,
            user,
            brief: AtomicU8::new(brief(&settings)),
            settings: ArcSwap::from_pointee(settings),
            welcome: ArcSwapOption::empty(),
            authorization: ArcSwapOption::empty(),
            clients: AtomicU32::new(0),
            proved: ArcSwapOption::empty(),
            secret: ArcSwapOption::empty(),
            last_error: ArcSwapOption::empty(),
            logged_in_ms: AtomicU64::new(0),
            round: Mutex::default(),
            wanted: ArcSwapOption::empty(),
            is_forced: AtomicBool::new(false),
            forgotten: AtomicBool::new(false),
            removed: AtomicBool::new(false),
        }
    }

    /// Gives it the settings of a RELOAD.
    pub fn set_settings(&self, settings: PoolSettings) {
        self.brief.store(brief(&settings), Ordering::Release);
        self.settings.store(Arc::new(settings));
    }

    /// Whether `min_pool_size` connections are kept open: for clients that are here, and for a forced user, of whom any client may come.
    pub fn keeps_minimum(&self) -> bool {
        !self.forgotten.load(Ordering::Acquire)
            && (self.clients.load(Ordering::Relaxed) > 0
                || self.database.is_mirror
                || self.is_of_forced_user())
    }

    /// Whether the file names this user for this database. Not with `*`: nobody may come to such a database again.
    pub fn is_of_forced_user(&self) -> bool {
        !self.database.is_auto.load(Ordering::Relaxed)
            && self.database.settings.load().user.as_ref() == Some(&self.user.name)
    }

    /// Whether a server of it has ever logged in.
    pub fn has_logged_in(&self) -> bool {
        self.logged_in_ms.load(Ordering::Relaxed) > 0
    }

    /// `pool_mode`
    pub fn mode(&self) -> PoolMode {
        match self.brief.load(Ordering::Relaxed) & (SESSION | STATEMENT) {
            SESSION => PoolMode::Session,
            STATEMENT => PoolMode::Statement,
            _ => PoolMode::Transaction,
        }
    }

    /// The timeouts of a client that has logged in as `user`.
    pub fn timeouts_of(&self, user: Option<&Arc<UserState>>, config: &Config) -> ClientTimeouts {
        match user {
            Some(user) if user.number != self.user.number => {
                ClientTimeouts::new(config, &self.database.settings.load(), &user.name)
            }
            _ => self.settings.load().of_clients,
        }
    }

    /// Whether a client keeps its server until it leaves.
    pub fn is_session(&self) -> bool {
        self.mode() == PoolMode::Session
    }

    /// Whether servers are reset between clients.
    pub fn resets(&self) -> bool {
        self.brief.load(Ordering::Relaxed) & RESETS != 0
    }

    /// The pool's place in the kernel lanes, unless a RELOAD gave it settings that they cannot carry out.
    pub fn lane(&self) -> Option<&LanePool> {
        self.lane.as_ref().filter(|_| self.lane_refused.load(Ordering::Relaxed) == CARRIED)
    }

    /// Why [`Self::lane`] is none.
    pub fn lane_refused(&self) -> Own {
        let refused = Own::ALL.get(usize::from(self.lane_refused.load(Ordering::Relaxed)));
        refused.copied().unwrap_or(Own::NoPlace)
    }

    /// Keeps the pool from the lanes for this reason, or lets it in.
    pub fn set_lane_refused(&self, why: Option<Own>) {
        self.lane_refused.store(why.map_or(CARRIED, |own| own as u8), Ordering::Release);
    }

    /// As [`lane`](Self::lane), if a lane has a server of it: those at unix sockets or with TLS are in none.
    pub fn carries(&self) -> Option<&LanePool> {
        self.lane().filter(|lane| lane.servers.load(Ordering::Relaxed) > 0)
    }

    pub fn welcome(&self) -> Option<SharedParameters> {
        self.welcome.load_full()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn life_checks_are_told_from_others() {
        assert!(["select 1", " SELECT 1 ; ", "Select 1;"].iter().all(|sql| is_life_check(sql)));
        assert!(
            !["select 1, 2", "select set_config('a', 'b', false)", ""].iter().any(|sql| is_life_check(sql))
        );
    }

    #[test]
    fn a_refusal_is_told_and_a_start_waited_for() {
        let refused = ConnectError::refused(b"SFATAL\0VFATAL\0C28P01\0Mno entry\0\0");
        assert_eq!(refused.message, "server login failed: FATAL no entry");
        assert_eq!(refused.refused, SqlState::new(b"28P01"));
        let starting = ConnectError::refused(b"SFATAL\0C57P03\0Mthe database system is starting up\0\0");
        assert_eq!(starting.refused, None);
        let (sqlstate, text) = refused.farewell().report.expect("the client is told");
        assert_eq!(Some(sqlstate), SqlState::new(b"28P01"));
        assert!(text.contains("no entry") && text.contains("server_login_retry"), "{text}");
    }
}
