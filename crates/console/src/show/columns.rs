// SPDX-License-Identifier: Apache-2.0
//! Columns of every SHOW: names, order and types as PgBouncer 1.26 sends them (manual: "Show commands").
//! Exporters find columns by name and sometimes by position, so nothing here changes on its own.

use crate::table::Column;

/// One line for a column: name, type, help.
macro_rules! columns {
    ($($name:literal $kind:ident $help:expr;)*) => {
        &[$(Column { name: $name, column_type: crate::table::ColumnType::$kind, help: $help }),*]
    };
}

/// The columns that clients, servers and sockets share, and those that follow.
macro_rules! socket_columns {
    ($($name:literal $kind:ident $help:expr;)*) => {
        columns! {
            "type" Text "`C` for a client, `S` for a server.";
            "user" Text "User of the connection, `(nouser)` before it is known.";
            "database" Text "Database of the connection, `(nodb)` before it is known.";
            "replication" Text "`none`, `logical` or `physical`.";
            "state" Text "State of the connection.";
            "addr" Text "Address of the other end; `unix` for a unix socket.";
            "port" Int4 "Port of the other end.";
            "local_addr" Text "Address of our end.";
            "local_port" Int4 "Port of our end.";
            "connect_time" Text "When the connection was made.";
            "request_time" Text "When the latest request was made.";
            "wait" Int4 "How long the client has waited for a server, or its query has run, whole seconds.";
            "wait_us" Int4 "Rest of that time, in microseconds.";
            "close_needed" Int4 "1 when the connection is closed as soon as it is free.";
            "ptr" Text "Name of this connection, as in the log.";
            "link" Text "`ptr` of the connection it is linked with, empty when there is none.";
            "remote_pid" Int4 "Process at the other end: the backend of a server, the peer of a unix socket; else 0.";
            "tls" Text "TLS version and cipher, empty without TLS.";
            "application_name" Text "`application_name` of the client.";
            "prepared_statements" Int4 "Prepared statements that this connection has.";
            "id" Int4 "Number of this connection, for KILL_CLIENT.";
            $($name $kind $help;)*
        }
    };
}

/// SHOW CLIENTS.
pub(super) const CLIENTS: &[Column] = socket_columns! {};
/// SHOW SERVERS.
pub(super) const SERVERS: &[Column] = CLIENTS;
/// SHOW SOCKETS and ACTIVE_SOCKETS.
pub(super) const SOCKETS: &[Column] = socket_columns! {
    "recv_pos" Int4 "Buffer: end of the bytes received.";
    "pkt_pos" Int4 "Buffer: end of the bytes parsed.";
    "pkt_remain" Int4 "Bytes of the current message still to come.";
    "send_pos" Int4 "Buffer: end of the bytes sent.";
    "send_remain" Int4 "Always 0.";
    "pkt_avail" Int4 "Bytes received and not parsed.";
    "send_avail" Int4 "Bytes parsed and not sent.";
};

pub(super) const CONFIG: &[Column] = columns! {
    "key" Text "Name of the key.";
    "value" Text "Value in force.";
    "default" Text "Value when the key is not set.";
    "changeable" Text "`yes` when RELOAD or SET can change it, `no` when it needs a restart.";
};

pub(super) const DATABASES: &[Column] = columns! {
    "name" Text "Name clients connect to.";
    "host" Text "Host of the server; NULL for the default unix socket.";
    "port" Int4 "Port of the server.";
    "database" Text "Name of the database on the server.";
    "force_user" Text "User that all its server connections log in as, if set.";
    "pool_size" Int4 "Most server connections for each user; 0 is no limit.";
    "min_pool_size" Int4 "Server connections that are kept open.";
    "reserve_pool_size" Int4 "Further server connections when clients wait too long.";
    "server_lifetime" Int4 "Seconds after which a server connection is replaced.";
    "pool_mode" Text "Pool mode set for this database, else NULL.";
    "load_balance_hosts" Text "How hosts are chosen, when `host` is a list; else NULL.";
    "max_connections" Int4 "Most server connections of all its users; 0 is no limit.";
    "current_connections" Int4 "Server connections it has.";
    "max_client_connections" Int4 "Most client connections; 0 is no limit.";
    "current_client_connections" Int4 "Client connections it has.";
    "paused" Int4 "1 when paused by name, or by KILL.";
    "disabled" Int4 "1 when disabled.";
};

pub(super) const FDS: &[Column] = columns! {
    "fd" Int4 "File descriptor.";
    "task" Text "`pooler` for a listening socket, `client` or `server`.";
    "user" Text "User of the connection.";
    "database" Text "Database of the connection.";
    "addr" Text "Address of the other end, or of the listening socket.";
    "port" Int4 "Port of it.";
    "cancel" Int8 "Cancel key.";
    "link" Int4 "File descriptor of the linked connection, else 0.";
    "client_encoding" Text "Parameter of the session.";
    "std_strings" Text "Parameter `standard_conforming_strings` of the session.";
    "datestyle" Text "Parameter of the session.";
    "timezone" Text "Parameter of the session.";
    "password" Text "Always NULL: descriptors are not handed over, so no secrets are told.";
    "scram_client_key" Bytea "Always NULL.";
    "scram_server_key" Bytea "Always NULL.";
};

pub(super) const LISTS: &[Column] = columns! {
    "list" Text "Name of the list.";
    "items" Int4 "How many it has.";
};

pub(super) const PEERS: &[Column] = columns! {
    "peer_id" Int4 "Number of the peer.";
    "host" Text "Host of the peer.";
    "port" Int4 "Port of the peer.";
    "pool_size" Int4 "Most cancel requests under way to it.";
};

pub(super) const PEER_POOLS: &[Column] = columns! {
    "peer_id" Int4 "Number of the peer.";
    "cl_active_cancel_req" Int4 "Cancel requests that were forwarded and have no answer yet.";
    "cl_waiting_cancel_req" Int4 "Cancel requests that wait for a connection.";
    "sv_active_cancel" Int4 "Connections that forward a cancel request.";
    "sv_login" Int4 "Connections being made.";
};

pub(super) const POOLS: &[Column] = columns! {
    "database" Text "Database.";
    "user" Text "User.";
    "cl_active" Int4 "Clients that are linked to a server, or idle.";
    "cl_waiting" Int4 "Clients that have asked for a server and wait.";
    "cl_active_cancel_req" Int4 "Cancel requests that were forwarded and have no answer yet.";
    "cl_waiting_cancel_req" Int4 "Cancel requests that wait for a connection.";
    "sv_active" Int4 "Servers that are linked to a client.";
    "sv_active_cancel" Int4 "Server connections that forward a cancel request.";
    "sv_being_canceled" Int4 "Servers that are free but for a cancel request under way to them.";
    "sv_idle" Int4 "Servers that can be used at once.";
    "sv_used" Int4 "Servers that have idled for longer than `server_check_delay` and are checked before use.";
    "sv_tested" Int4 "Servers that run the reset query or the check query.";
    "sv_login" Int4 "Servers that are logging in.";
    "maxwait" Int4 "How long the first client of the queue has waited, whole seconds.";
    "maxwait_us" Int4 "Rest of that time, in microseconds.";
    "pool_mode" Text "Pool mode.";
    "load_balance_hosts" Text "How hosts are chosen, when the database has a list of them; else NULL.";
};

/// Help of the twelve counters, as totals and as averages.
macro_rules! totals_help {
    (server_assignment) => {
        "Times a server was given to a client."
    };
    (xact) => {
        "Transactions."
    };
    (query) => {
        "Queries."
    };
    (received) => {
        "Bytes received from clients."
    };
    (sent) => {
        "Bytes sent to clients."
    };
    (xact_time) => {
        "Microseconds in transactions, idle ones included."
    };
    (query_time) => {
        "Microseconds in queries."
    };
    (wait_time) => {
        "Microseconds that clients waited for a server."
    };
    (client_parse) => {
        "Prepared statements that clients created."
    };
    (server_parse) => {
        "Prepared statements that were created on servers."
    };
    (bind) => {
        "Prepared statements that were bound."
    };
    (client_login) => {
        "Successful logins of clients."
    };
}
macro_rules! averages_help {
    (server_assignment) => {
        "Times a server was given to a client, per second."
    };
    (xact) => {
        "Transactions per second."
    };
    (query) => {
        "Queries per second."
    };
    (received) => {
        "Bytes received from clients, per second."
    };
    (sent) => {
        "Bytes sent to clients, per second."
    };
    (xact_time) => {
        "Microseconds of a transaction."
    };
    (query_time) => {
        "Microseconds of a query."
    };
    (wait_time) => {
        "Microseconds that a client waited, for each time a server was given."
    };
    (client_parse) => {
        "Prepared statements that clients created, per second."
    };
    (server_parse) => {
        "Prepared statements that were created on servers, per second."
    };
    (bind) => {
        "Prepared statements that were bound, per second."
    };
    (client_login) => {
        "Successful logins of clients, per second."
    };
}

pub(super) const STATS: &[Column] = columns! {
    "database" Text "Database.";
    "total_server_assignment_count" Numeric totals_help!(server_assignment);
    "total_xact_count" Numeric totals_help!(xact);
    "total_query_count" Numeric totals_help!(query);
    "total_received" Numeric totals_help!(received);
    "total_sent" Numeric totals_help!(sent);
    "total_xact_time" Numeric totals_help!(xact_time);
    "total_query_time" Numeric totals_help!(query_time);
    "total_wait_time" Numeric totals_help!(wait_time);
    "total_client_parse_count" Numeric totals_help!(client_parse);
    "total_server_parse_count" Numeric totals_help!(server_parse);
    "total_bind_count" Numeric totals_help!(bind);
    "total_client_login_count" Numeric totals_help!(client_login);
    "avg_server_assignment_count" Numeric averages_help!(server_assignment);
    "avg_xact_count" Numeric averages_help!(xact);
    "avg_query_count" Numeric averages_help!(query);
    "avg_recv" Numeric averages_help!(received);
    "avg_sent" Numeric averages_help!(sent);
    "avg_xact_time" Numeric averages_help!(xact_time);
    "avg_query_time" Numeric averages_help!(query_time);
    "avg_wait_time" Numeric averages_help!(wait_time);
    "avg_client_parse_count" Numeric averages_help!(client_parse);
    "avg_server_parse_count" Numeric averages_help!(server_parse);
    "avg_bind_count" Numeric averages_help!(bind);
    "avg_client_login_count" Numeric averages_help!(client_login);
};

pub(super) const STATS_TOTALS: &[Column] = columns! {
    "database" Text "Database.";
    "server_assignment_count" Numeric totals_help!(server_assignment);
    "xact_count" Numeric totals_help!(xact);
    "query_count" Numeric totals_help!(query);
    "bytes_received" Numeric totals_help!(received);
    "bytes_sent" Numeric totals_help!(sent);
    "xact_time" Numeric totals_help!(xact_time);
    "query_time" Numeric totals_help!(query_time);
    "wait_time" Numeric totals_help!(wait_time);
    "client_parse_count" Numeric totals_help!(client_parse);
    "server_parse_count" Numeric totals_help!(server_parse);
    "bind_count" Numeric totals_help!(bind);
    "client_login_count" Numeric totals_help!(client_login);
};

/// Only the last four carry the prefix `avg_`: so PgBouncer sends them.
pub(super) const STATS_AVERAGES: &[Column] = columns! {
    "database" Text "Database.";
    "server_assignment_count" Numeric averages_help!(server_assignment);
    "xact_count" Numeric averages_help!(xact);
    "query_count" Numeric averages_help!(query);
    "bytes_received" Numeric averages_help!(received);
    "bytes_sent" Numeric averages_help!(sent);
    "xact_time" Numeric averages_help!(xact_time);
    "query_time" Numeric averages_help!(query_time);
    "wait_time" Numeric averages_help!(wait_time);
    "avg_client_parse_count" Numeric averages_help!(client_parse);
    "avg_server_parse_count" Numeric averages_help!(server_parse);
    "avg_bind_count" Numeric averages_help!(bind);
    "avg_client_login_count" Numeric averages_help!(client_login);
};

pub(super) const TOTALS: &[Column] = columns! {
    "name" Text "Name of the figure.";
    "value" Numeric "Its value.";
};

pub(super) const USERS: &[Column] = columns! {
    "name" Text "Name.";
    "pool_size" Text "Pool size set for this user, else empty.";
    "reserve_pool_size" Text "Reserve pool size set for this user, else empty.";
    "pool_mode" Text "Pool mode set for this user, else NULL.";
    "max_user_connections" Int4 "Most server connections of this user; 0 is no limit.";
    "current_connections" Int4 "Server connections the user has.";
    "max_user_client_connections" Int4 "Most client connections of this user; 0 is no limit.";
    "current_client_connections" Int4 "Client connections the user has.";
};

pub(super) const VERSION: &[Column] = columns! {
    "version" Text "Name and version.";
};

pub(super) const MEM: &[Column] = columns! {
    "name" Text "Name of the structure.";
    "size" Int4 "Bytes of one.";
    "used" Int4 "How many are in use.";
    "free" Int4 "How many are kept for later use.";
    "memtotal" Int4 "Bytes of all.";
};

pub(super) const DNS_HOSTS: &[Column] = columns! {
    "hostname" Text "Host name.";
    "ttl" Int8 "Seconds until it is looked up again.";
    "addrs" Text "Addresses, separated by commas.";
};

pub(super) const DNS_ZONES: &[Column] = columns! {
    "zonename" Text "Zone.";
    "serial" Int8 "Serial number of its SOA record.";
    "count" Int4 "Host names of the cache that belong to it.";
};

pub(super) const STATE: &[Column] = columns! {
    "key" Text "`active`, `paused` or `suspended`.";
    "value" Text "`yes` or `no`.";
};

pub(super) const KERNEL: &[Column] = columns! {
    "kind" Text "What the row is about: `lane`, `user` (why transactions were in user space), `exit`, `queue` or `program`.";
    "name" Text "Lane, reason, queue or program.";
    "item" Text "What is counted.";
    "value" Numeric "The figure.";
    "unit" Text "`count`, `bytes` or `ns`.";
};

pub(super) const MIRRORS: &[Column] = columns! {
    "mirror" Text "Name of the mirror.";
    "database" Text "Database that is mirrored. A mirror has a row here once a client of the database has come.";
    "host" Text "Where the mirror is.";
    "port" Int4 "Its port.";
    "mode" Text "`async` or `sync`.";
    "send" Text "`all` or `read_only`.";
    "state" Text "`on`, `checking` (it is asked who it is), `unchecked`, `down` (tried again by itself), `disabled`, `failed` (until ENABLE MIRROR) or `same_server` (refused).";
    "reason" Text "Why it is in that state, if there is something to say.";
    "transactions" Numeric "Transactions that were to go there. Always `executed` + `queued` + `dropped`.";
    "executed" Numeric "Transactions that the mirror answered to the end.";
    "queued" Numeric "Transactions that wait or are under way.";
    "queued_bytes" Numeric "Memory taken for transactions of this mirror, of all its databases.";
    "filtered" Numeric "Transactions left out by `send = read_only`.";
    "dropped" Numeric "Transactions dropped, as a whole each: the sum of the next eight.";
    "queue_full" Numeric "Dropped: no room in `queue_bytes`.";
    "too_large" Numeric "Dropped: larger by itself than `queue_bytes`.";
    "not_ready" Numeric "Dropped: the mirror could not be reached, refused logins, or had not been checked.";
    "disabled" Numeric "Dropped: the mirror was switched off.";
    "connection_lost" Numeric "Under way when the connection ended: whether the mirror executed it is not known.";
    "session_lost" Numeric "Dropped: waited behind one whose connection was lost.";
    "session_state" Numeric "Dropped: the session (in session pooling) has a state that the mirror does not have.";
    "ring_full" Numeric "Dropped: no room in `mirror_ring_bytes`, with kernel lanes.";
    "compared" Numeric "Cycles, up to a ReadyForQuery each, whose answers were compared.";
    "not_compared" Numeric "Transactions executed there and not compared, because comparing could not keep up.";
    "holds" Numeric "Times a client in `mode = sync` waited for the mirror.";
    "held_us" Numeric "For how long altogether, in microseconds.";
};

pub(super) const MIRROR_DIFF: &[Column] = columns! {
    "mirror" Text "Name of the mirror.";
    "database" Text "Database that is mirrored.";
    "fingerprint" Text "libpg_query's fingerprint of the statement; zeros for what is not in PostgreSQL's grammar.";
    "query" Text "The statement without its literals.";
    "varies" Text "Why its results may vary with nothing being wrong: `clock`, `random`, `sequence`, `server`, `sessions`, `unordered`, `any_rows`, `statistics`.";
    "compared" Numeric "Results compared.";
    "differing" Numeric "Results that differ and should not.";
    "differences" Text "How: `error_there`, `error_here`, `sqlstate`, `cascade` (in a transaction that had failed there), `tag`, `row_count`, `rows`, `result_count`, each with its number.";
    "expected" Numeric "Results that differ as `varies` lets expect.";
    "timed" Numeric "Executions that were timed: those alone in their cycle, without an error.";
    "slower" Numeric "Of them, those that took twice as long on the mirror, and a millisecond longer.";
    "mean_here_us" Numeric "Mean time on the primary, in microseconds.";
    "mean_there_us" Numeric "Mean time on the mirror, in microseconds.";
    "ratio" Text "Mean time there over mean time here.";
    "max_here_us" Numeric "Longest time on the primary, in microseconds.";
    "max_there_us" Numeric "Longest time on the mirror, in microseconds.";
    "example" Text "The first difference that should not be. Literals and messages are shown with `show_literals` only.";
};

pub(super) const TRACE: &[Column] = columns! {
    "directory" Text "Where the trace is.";
    "state" Text "`on`, or `ended`: it takes nothing more until `trace_dir` is SET anew, another `trace_` key changes, or RELOAD if it has failed.";
    "reason" Text "Why it has ended.";
    "level" Text "How much of the responses is recorded: `none`, `summary`, `full`.";
    "sessions" Numeric "Sessions in the trace.";
    "missed" Numeric "Connections that are not in it, because there was no room for their beginning.";
    "records" Numeric "Records written.";
    "file_bytes" Numeric "Size of its files, in bytes.";
    "queued_bytes" Numeric "Memory taken by what is not written yet; at most `trace_queue_bytes`.";
    "seen_bytes" Numeric "Bytes that recorded clients said and were answered.";
    "lost_bytes" Numeric "Of them, bytes for which there was no room. The trace says which.";
};
