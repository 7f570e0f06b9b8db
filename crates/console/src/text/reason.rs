// SPDX-License-Identifier: Apache-2.0
//! Why a connection was closed: what follows `closing because:`, and the message of the FATAL a client gets.

// --- clients: limits and timeouts
/// Above `query_wait_timeout` in the queue.
pub const QUERY_WAIT_TIMEOUT: &str = "query_wait_timeout";
/// Above `query_timeout`, as the client is told.
pub const CLIENT_QUERY_TIMEOUT: &str = "query_timeout";
/// Above `client_idle_timeout`.
pub const CLIENT_IDLE_TIMEOUT: &str = "client_idle_timeout";
/// Above `client_login_timeout`.
pub const CLIENT_LOGIN_TIMEOUT: &str = "client_login_timeout";
/// Above `client_login_timeout`, because no server could be asked.
pub const CLIENT_LOGIN_TIMEOUT_SERVER_DOWN: &str = "client_login_timeout (server down)";
/// Above `cancel_wait_timeout`; client and server.
pub const CANCEL_WAIT_TIMEOUT: &str = "cancel_wait_timeout";
/// Above `suspend_timeout`; client and server.
pub const SUSPEND_TIMEOUT: &str = "suspend_timeout";
/// More than `max_client_conn`.
pub const MAX_CLIENT_CONN: &str = "no more connections allowed (max_client_conn)";
/// More than `max_db_client_connections`.
pub const MAX_DB_CLIENT_CONNECTIONS: &str = "client connections exceeded (max_db_client_connections)";
/// More than `max_user_client_connections`.
pub const MAX_USER_CLIENT_CONNECTIONS: &str = "client connections exceeded (max_user_client_connections)";

// --- clients: login
/// No such user, where that may be told.
pub const NO_SUCH_USER: &str = "no such user";
/// Startup message without a user.
pub const NO_USERNAME: &str = "no username supplied";
/// User name too long.
pub const USERNAME_TOO_LONG: &str = "username too long";
/// Wrong password.
pub const PASSWORD_FAILED: &str = "password authentication failed";
/// Empty password.
pub const EMPTY_PASSWORD: &str = "empty password returned by client";
/// SCRAM failed.
pub const SASL_FAILED: &str = "SASL authentication failed";
/// Mechanism that was not offered.
pub const SASL_MECHANISM: &str = "client selected an invalid SASL authentication mechanism";
/// HBA method `trust` for a user that does not exist.
pub const TRUST_FAILED: &str = "\"trust\" authentication failed";
/// Certificate does not match.
pub const CERTIFICATE_FAILED: &str = "certificate authentication failed";
/// Peer of the unix socket does not match.
pub const UNIX_LOGIN_REJECTED: &str = "unix socket login rejected";
/// HBA method `reject`, or no line matches.
pub const LOGIN_REJECTED: &str = "login rejected";
/// `client_tls_sslmode` asks for TLS.
pub const SSL_REQUIRED: &str = "SSL required";
/// The console is for `admin_users` and `stats_users`.
pub const NOT_ALLOWED: &str = "not allowed";
/// Configuration does not allow an answer, such as no `auth_file`.
pub const CONFIG_ERROR: &str = "bouncer config error";
/// Second SSLRequest.
pub const SSL_INSIDE_SSL: &str = "SSL req inside SSL";
/// Bytes before the answer to SSLRequest: somebody may have put them there.
pub const DATA_AFTER_SSL_REQUEST: &str = "received unencrypted data after SSL request";
/// The same for GSSENCRequest.
pub const DATA_AFTER_GSS_REQUEST: &str = "received unencrypted data after GSSAPI encryption request";
/// Protocol 2.
pub const PROTOCOL_2: &str = "old V2 protocol not supported";
/// Second startup message.
pub const STARTUP_AGAIN: &str = "client re-sent startup pkt";
/// Password before the startup message.
pub const PASSWORD_FIRST: &str = "client password pkt before startup packet";
/// Startup message does not end in a zero.
pub const STARTUP_LAYOUT: &str = "invalid startup packet layout: expected terminator as last byte";
/// Startup `options` in another form than `-c`.
pub const OPTIONS_LAYOUT: &str =
    "unsupported options startup parameter: only '-c config=val' and '--config=val' are allowed";

// --- clients: in service
/// Terminate.
pub const CLIENT_CLOSE: &str = "client close request";
/// Connection ended without Terminate.
pub const CLIENT_EOF: &str = "client unexpected eof";
/// A message that cannot be read.
pub const BAD_PACKET: &str = "bad packet";
/// A message that cannot be parsed.
pub const PARSE_FAILED: &str = "failed to parse packet";
/// Message type unknown; client and server.
pub const UNKNOWN_PACKET: &str = "unknown pkt";
/// A Query with `disable_pqexec`.
pub const PQEXEC_DISALLOWED: &str = "PQexec disallowed";
/// Bind, Describe or Close names a statement the client never prepared.
pub const STATEMENT_MISSING: &str = "prepared statement did not exist";
/// KILL_CLIENT.
pub const ADMIN_DISCONNECT: &str = "admin forced disconnect";
/// New client during a shutdown.
pub const SHUTTING_DOWN: &str = "pooler is shutting down";
/// The server goes, and its client with it; also KILL and shutdown at a transaction boundary.
pub const SERVER_SHUTTING_DOWN: &str = "server shutting down";
/// The linked server ended without a word.
pub const UNEXPECTED_EOF: &str = "unexpected eof";

// --- cancel requests
/// Forwarded and answered.
pub const CANCEL_SENT: &str = "successfully sent cancel request";
/// Key is not known here, and there is no peer to ask.
pub const CANCEL_FAILED: &str = "failed cancel request";
/// The client with that key has no statement under way.
pub const CANCEL_IDLE: &str = "cancel request for idle client";
/// The client with that key is on the console.
pub const CANCEL_CONSOLE: &str = "cancel request for console client";
/// The statement ended before the request could go out.
pub const CANCEL_TOO_LATE: &str = "not sending cancel request for client that is now idle";
/// No peer has the number in the key.
pub const CANCEL_NO_PEER: &str = "could not find peer to forward request to";
/// Forwarded too often.
pub const CANCEL_TTL: &str = "failed to forward cancel request because its TTL was exhausted";

// --- servers
/// Above `server_connect_timeout`.
pub const CONNECT_TIMEOUT: &str = "connect timeout";
/// `connect()` failed.
pub const CONNECT_FAILED: &str = "connect failed";
/// Name could not be resolved.
pub const DNS_FAILED: &str = "server DNS lookup failed";
/// The server ended without a word.
pub const SERVER_CRASHED: &str = "server conn crashed?";
/// The server refused the login.
pub const LOGIN_FAILED: &str = "login failed";
/// `server_tls_sslmode` asks for TLS and the server has none.
pub const SERVER_REFUSED_SSL: &str = "server refused SSL";
/// `connect_query` failed.
pub const CONNECT_QUERY_FAILED: &str = "exec_on_connect query failed";
/// `server_check_query` failed.
pub const CHECK_QUERY_FAILED: &str = "test query failed";
/// `server_reset_query` failed.
pub const RESET_QUERY_FAILED: &str = "reset query failed";
/// Above `server_lifetime`.
pub const SERVER_LIFETIME: &str = "server lifetime over";
/// Above `server_idle_timeout`.
pub const SERVER_IDLE_TIMEOUT: &str = "server idle timeout";
/// Above `query_timeout`.
pub const QUERY_TIMEOUT: &str = "query timeout";
/// Above `transaction_timeout`.
pub const TRANSACTION_TIMEOUT: &str = "transaction timeout";
/// Above `idle_transaction_timeout`.
pub const IDLE_TRANSACTION_TIMEOUT: &str = "idle transaction timeout";
/// Makes room for another pool of the same database or user.
pub const EVICTED: &str = "evicted";
/// RELOAD changed the database.
pub const DATABASE_CHANGED: &str = "database configuration changed";
/// RECONNECT, or DNS changed.
pub const OBSOLETE: &str = "obsolete connection";
/// Pool size was lowered.
pub const TOO_MANY_SERVERS: &str = "too many servers in the pool";
/// Marked to be closed when free.
pub const CLOSE_NEEDED: &str = "close_needed";
/// PAUSE.
pub const PAUSE: &str = "pause mode";
/// An idle server sent something.
pub const IDLE_DIRTY: &str = "idle server got dirty";
/// A transaction block in statement pooling.
pub const STATEMENT_POOLING: &str = "transaction blocks not allowed in statement pooling mode";
/// The client left in a query.
pub const CLIENT_LEFT_IN_QUERY: &str = "client disconnected with query in progress";
/// The client left in a transaction, or before the server was ready.
pub const CLIENT_LEFT: &str = "client disconnect while server was not ready";
/// The client left with a message half sent.
pub const CLIENT_LEFT_IN_MESSAGE: &str = "client disconnect before everything was sent to the server";
/// The replication client is gone.
pub const REPLICATION_CLIENT_LEFT: &str = "replication client was closed";
/// A parameter could not be restored.
pub const VARIABLE_FAILED: &str = "var change failed";

/// The database is neither configured nor covered by a `*` entry.
#[must_use]
pub fn no_such_database(name: &str) -> String {
    format!("no such database: {name}")
}

/// The database was disabled on the console.
#[must_use]
pub fn database_disabled(name: &str) -> String {
    format!("database \"{name}\" is disabled")
}

/// A startup parameter that is neither tracked nor ignored.
#[must_use]
pub fn unsupported_parameter(name: &str) -> String {
    format!("unsupported startup parameter: {name}")
}

/// The same in startup `options`.
#[must_use]
pub fn unsupported_option(name: &str) -> String {
    format!("unsupported startup parameter in options: {name}")
}

/// The server has refused logins, and `server_login_retry` has not passed; `error` is what it said.
#[must_use]
pub fn server_login_failing(error: &str) -> String {
    format!("server login has been failing, cached error: {error} (server_login_retry)")
}
