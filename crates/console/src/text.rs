// SPDX-License-Identifier: Apache-2.0
//! Texts that scripts look for in the log, each written once.
//!
//! They are PgBouncer's, letter for letter. A [`Phrase`] also has a level and, for JSON, an event that names it
//! without its values. Reasons of closed connections, which are the messages clients get too, are in [`reason`].

pub mod reason;

use std::fmt;
use std::net::SocketAddr;

use crate::logline::Level;
use crate::rows::Replication;

/// Notice to a client that has waited for longer than `query_wait_notify`.
pub const QUEUED_NOTICE: &str = "No server connection available in postgres backend, client being queued";

/// One line for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Phrase {
    /// Level.
    pub level: Level,
    /// Name of what happened, stable over versions, for JSON.
    pub event: &'static str,
    /// Text.
    pub text: String,
}

impl fmt::Display for Phrase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

const fn phrase(level: Level, event: &'static str, text: String) -> Phrase {
    Phrase { level, event, text }
}

/// A connection is closed (`log_disconnections`). `age_s` is its age in seconds.
#[must_use]
pub fn closing(reason: &str, age_s: u64) -> Phrase {
    phrase(Level::Log, "close", format!("closing because: {reason} (age={age_s}s)"))
}

/// A client has sent its startup message (`log_connections`). `tls` is `TLSv1.3/<suite>`, `None` without TLS.
#[must_use]
pub fn login_attempt(database: &str, user: &str, tls: Option<&str>, replication: Replication) -> Phrase {
    let (tls, replication) = (tls.unwrap_or("no"), replication.parameter());
    let text = format!("login attempt: db={database} user={user} tls={tls} replication={replication}");
    phrase(Level::Log, "login_attempt", text)
}

/// A login was refused.
#[must_use]
pub fn login_failed(database: &str, user: Option<&str>) -> Phrase {
    let text = match user {
        Some(user) => format!("login failed: db={database} user={user}"),
        None => format!("login failed: db={database}"),
    };
    phrase(Level::Log, "login_failed", text)
}

/// The peer-UID login of user `pgbouncer` on a unix socket.
#[must_use]
pub fn unix_console_access() -> Phrase {
    phrase(Level::Log, "console_access", "pgbouncer access from unix socket".to_owned())
}

/// A connection to a server has been made (`log_connections`); `local` is our end, `None` for a unix socket.
#[must_use]
pub fn new_server_connection(local: Option<SocketAddr>) -> Phrase {
    let text = match local {
        Some(local) => format!("new connection to server (from {local})"),
        None => "new connection to server".to_owned(),
    };
    phrase(Level::Log, "server_connect", text)
}

/// TLS with a server is up. `tls` is `TLSv1.3/<suite>`.
#[must_use]
pub fn tls_established(tls: &str) -> Phrase {
    phrase(Level::Log, "tls_established", format!("SSL established: {tls}"))
}

/// TLS could not be set up from the configuration.
#[must_use]
pub fn tls_setup_failed(error: &dyn fmt::Display) -> Phrase {
    phrase(Level::Error, "tls_setup_failed", format!("TLS setup failed: {error}"))
}

/// A console command was refused. [`pooler_error`] follows with the client's name.
#[must_use]
pub fn console_error(message: &str) -> Phrase {
    phrase(Level::Error, "console_error", message.to_owned())
}

/// An error was sent to a client (`log_pooler_errors`).
#[must_use]
pub fn pooler_error(message: &str) -> Phrase {
    phrase(Level::Warning, "pooler_error", format!("pooler error: {message}"))
}

/// A client that waited for `reserve_pool_timeout` gets a server beyond the pool size.
#[must_use]
pub fn reserve_pool(database: &str, user: &str) -> Phrase {
    phrase(Level::Warning, "reserve_pool", format!("taking connection from reserve_pool: {database}/{user}"))
}

/// A database was made from the `*` entry.
#[must_use]
pub fn auto_database(name: &str) -> Phrase {
    phrase(Level::Log, "auto_database", format!("registered new auto-database: {name}"))
}

/// A database is forgotten: no longer configured, or an automatic one after `autodb_idle_timeout`.
#[must_use]
pub fn database_dropped(name: &str) -> Phrase {
    let text = format!("dropping database '{name}' as it does not exist anymore or inactive auto-database");
    phrase(Level::Warning, "database_dropped", text)
}

/// A pool is emptied after `pool_idle_timeout`. The blank after `age=` is PgBouncer's.
#[must_use]
pub fn pool_idle(user: &str, database: &str, age_s: u64) -> Phrase {
    let text = format!(
        "cleaning up idle pool for user {user} on db {database} because: pool idle timeout (age= {age_s}s)"
    );
    phrase(Level::Log, "pool_idle", text)
}

/// PostgreSQL refused a login. `error` is severity and message of its ErrorResponse.
#[must_use]
pub fn server_login_failed(error: Option<(&str, &str)>) -> Phrase {
    let text = match error {
        Some((severity, message)) => format!("server login failed: {severity} {message}"),
        None => "server login failed".to_owned(),
    };
    phrase(Level::Warning, "server_login_failed", text)
}

/// A console command changes the pooler. `command` is its word, `database` its argument.
#[must_use]
pub fn console_command(command: &str, database: Option<&str>) -> Phrase {
    let text = match database {
        Some(database) => format!("{command} '{database}' command issued"),
        None => format!("{command} command issued"),
    };
    phrase(Level::Log, "console_command", text)
}

/// A listening socket is open; `address` is `127.0.0.1:6432` or `unix:<path>`.
#[must_use]
pub fn listening(address: &dyn fmt::Display) -> Phrase {
    phrase(Level::Log, "listening", format!("listening on {address}"))
}

/// The pooler serves. `version` is what SHOW VERSION says, `details` the libraries used.
#[must_use]
pub fn process_up(version: &str, details: &str) -> Phrase {
    phrase(Level::Log, "process_up", format!("process up: {version}, {details}"))
}

/// What a signal does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignalAction {
    /// SIGHUP
    Reload,
    /// SIGINT, the first
    WaitForServers,
    /// SIGINT during a shutdown
    InterruptAgain,
    /// SIGTERM, the first
    WaitForClients,
    /// SIGTERM during a shutdown
    TerminateAgain,
    /// SIGQUIT
    Quit,
    /// SIGUSR1
    Pause,
    /// SIGUSR1 while paused or suspended
    AlreadyPaused,
    /// SIGUSR2 while paused
    ResumePause,
    /// SIGUSR2 while suspended
    ResumeSuspend,
    /// SIGUSR2 while neither
    NotPaused,
    /// SIGUSR2 during a shutdown
    ResumeRefused,
}

/// A signal has come.
#[must_use]
pub fn signal(action: SignalAction) -> Phrase {
    let text = match action {
        SignalAction::Reload => "got SIGHUP, re-reading config",
        SignalAction::WaitForServers => {
            "got SIGINT, shutting down, waiting for all servers connections to be released"
        }
        SignalAction::InterruptAgain => "got SIGINT while shutting down, fast exit",
        SignalAction::WaitForClients => "got SIGTERM, shutting down, waiting for all clients disconnect",
        SignalAction::TerminateAgain => "got SIGTERM while shutting down, fast exit",
        SignalAction::Quit => "got SIGQUIT, fast exit",
        SignalAction::Pause => "got SIGUSR1, pausing all activity",
        SignalAction::AlreadyPaused => "got SIGUSR1, but already paused/suspended",
        SignalAction::ResumePause => "got SIGUSR2, continuing from PAUSE",
        SignalAction::ResumeSuspend => "got SIGUSR2, continuing from SUSPEND",
        SignalAction::NotPaused => "got SIGUSR2, but not paused/suspended",
        SignalAction::ResumeRefused => "got SIGUSR2 while shutting down, ignoring",
    };
    phrase(Level::Log, "signal", text.to_owned())
}

/// The last client has left (`true`) or the last server was released, and the process ends.
#[must_use]
pub fn drained(clients: bool) -> Phrase {
    let whose = if clients { "client" } else { "server" };
    phrase(Level::Log, "drained", format!("{whose} connections dropped, exiting"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phrases_read_as_scripts_expect() {
        let local = |text: &str| new_server_connection(Some(text.parse().unwrap())).text;
        let cases = [
            (closing(reason::EVICTED, 7).text, "closing because: evicted (age=7s)"),
            (
                login_attempt("db", "u", None, Replication::None).text,
                "login attempt: db=db user=u tls=no replication=no",
            ),
            (
                login_attempt("db", "u", Some("TLSv1.3/TLS_AES_256_GCM_SHA384"), Replication::Logical).text,
                "login attempt: db=db user=u tls=TLSv1.3/TLS_AES_256_GCM_SHA384 replication=database",
            ),
            (login_failed("db", Some("u")).text, "login failed: db=db user=u"),
            (login_failed("db", None).text, "login failed: db=db"),
            (local("127.0.0.1:5000"), "new connection to server (from 127.0.0.1:5000)"),
            (local("[::1]:5000"), "new connection to server (from [::1]:5000)"),
            (new_server_connection(None).text, "new connection to server"),
            (pooler_error("x").to_string(), "pooler error: x"),
            (
                pool_idle("u", "db", 3).text,
                "cleaning up idle pool for user u on db db because: pool idle timeout (age= 3s)",
            ),
            (console_command("PAUSE", Some("db")).text, "PAUSE 'db' command issued"),
            (console_command("RELOAD", None).text, "RELOAD command issued"),
            (server_login_failed(Some(("FATAL", "no"))).text, "server login failed: FATAL no"),
            (drained(true).text, "client connections dropped, exiting"),
            (signal(SignalAction::ResumeRefused).text, "got SIGUSR2 while shutting down, ignoring"),
        ];
        for (text, expected) in cases {
            assert_eq!(text, expected);
        }
    }
}
