// SPDX-License-Identifier: Apache-2.0
//! Why a connection was closed: what follows `closing because:`, and the message of the FATAL a client gets.

// --- clients: limits and timeouts
/// Above `query_wait_timeout` in the queue.
pub const QUERY_WAIT_TIMEOUT: &str = "query_wait_timeout";
/// Above `query_timeout`, as the client is told.
pub const CLIENT_QUERY_TIMEOUT: &str = "query_timeout";
/// Above `suspend_timeout`; client and server.
pub const SUSPEND_TIMEOUT: &str = "suspend_timeout";
/// More than `max_client_conn`.
pub const MAX_CLIENT_CONN: &str = "no more connections allowed (max_client_conn)";
/// More than `max_db_client_connections`.
pub const MAX_DB_CLIENT_CONNECTIONS: &str = "client connections exceeded (max_db_client_connections)";
/// More than `max_user_client_connections`.
pub const MAX_USER_CLIENT_CONNECTIONS: &str = "client connections exceeded (max_user_client_connections)";

// --- clients: login
/// Startup message without a user.
pub const NO_USERNAME: &str = "no username supplied";
/// `client_tls_sslmode` asks for TLS.
pub const SSL_REQUIRED: &str = "SSL required";
/// Configuration does not allow an answer, such as no `auth_file`.
pub const CONFIG_ERROR: &str = "bouncer config error";
/// Protocol 2.
pub const PROTOCOL_2: &str = "old V2 protocol not supported";

// --- clients: in service
/// Terminate.
pub const CLIENT_CLOSE: &str = "client close request";
/// Connection ended without Terminate.
pub const CLIENT_EOF: &str = "client unexpected eof";
/// A message that cannot be read.
pub const BAD_PACKET: &str = "bad packet";
/// KILL_CLIENT.
pub const ADMIN_DISCONNECT: &str = "admin forced disconnect";
/// The server goes, and its client with it; also KILL and shutdown at a transaction boundary.
pub const SERVER_SHUTTING_DOWN: &str = "server shutting down";

// --- servers
/// Above `server_idle_timeout`.
pub const SERVER_IDLE_TIMEOUT: &str = "server idle timeout";
/// Makes room for another pool of the same database or user.
pub const EVICTED: &str = "evicted";
/// A server that rests has said that it is about to end the connection. Begins as PgBouncer has it for every end of a server.
pub const SERVER_ENDS: &str = "server conn crashed? (it said that it ends the connection)";
/// RELOAD removed the database; clients and servers.
pub const DATABASE_REMOVED: &str = "database removed";
/// RELOAD changed the database.
pub const DATABASE_CHANGED: &str = "database configuration changed";
/// RECONNECT, or DNS changed.
pub const OBSOLETE: &str = "obsolete connection";
/// PAUSE.
pub const PAUSE: &str = "pause mode";

/// The server has refused logins, and `server_login_retry` has not passed; `error` is what it said.
#[must_use]
pub fn server_login_failing(error: &str) -> String {
    format!("server login has been failing, cached error: {error} (server_login_retry)")
}
