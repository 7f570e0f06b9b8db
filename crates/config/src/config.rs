// SPDX-License-Identifier: Apache-2.0
//! The table of PgBouncer's keys, and [`Config`], the struct it makes.
//!
//! Names, defaults and meanings are those of PgBouncer's manual, pgbouncer.ini(5).

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use crate::database::{Database, Databases};
use crate::error::Location;
use crate::key::keys;
use crate::mirror::Mirror;
use crate::peer::Peer;
use crate::underpass::UnderpassConfig;
use crate::user::User;
use crate::value::{CheckQuery, NameList, PeerId, ReservedName, TlsProtocols, UnixSocketDir};
use crate::words::{AuthType, PoolMode, SslMode};

keys! {
    /// A whole configuration: every key of `[pgbouncer]` as a field of its type, and the other sections.
    ///
    /// Keys that take a database or user override are resolved by the functions of `resolve.rs`, such as
    /// [`Config::pool_size`]; do not read the global field alone.
    struct Config, rows PGBOUNCER_KEYS, section Pgbouncer, access (whole, whole_mut);
    also {
        /// `[databases]`.
        databases: Databases,
        /// `[users]`, by name.
        users: BTreeMap<String, User>,
        /// `[peers]`, by peer id.
        peers: BTreeMap<u16, Peer>,
        /// `[underpass]`.
        underpass: UnderpassConfig,
        /// `[underpass:mirror:NAME]`, by name.
        mirrors: BTreeMap<String, Mirror>,
        /// Where each key was set last, by full name; keys not in it have their default.
        origins: BTreeMap<&'static str, Location>,
    }
    group "Process and log" {
        /// Log file, kept open; SIGHUP and RELOAD open it again. Empty: none.
        logfile: Option<PathBuf> = Some(""), Reload;
        /// PID file. Needed for `-d`. Empty: none.
        pidfile: Option<PathBuf> = Some(""), Restart;
        /// Unix user to become after start as root. Unset: stay, which root may not.
        user: Option<String> = None, Restart;
        /// Name of the process.
        job_name: String = Some("pgbouncer"), Restart,
            no_effect = "neither the process nor its log lines carry the name; syslog_ident names them in syslog";
        /// Windows alias of `job_name`.
        service_name: Option<String> = None, Restart,
            hidden = "a service name exists on Windows only; PgBouncer on Linux refuses the key";
        /// The configuration file; a value set by SET is read at the next RELOAD.
        conffile: Option<PathBuf> = None, Reload;
        /// Log to syslog.
        syslog: bool = Some("0"), Reload;
        /// Name in syslog.
        syslog_ident: String = Some("pgbouncer"), Reload;
        /// Syslog facility: `auth`, `authpriv`, `daemon`, `user`, `local0` to `local7`.
        syslog_facility: String = Some("daemon"), Reload;
        /// Verbosity, as `-v`: 0, 1 (debug) or 2 (noise). Unset: as often as `-v` was given.
        verbose: u32 = None, Reload;
        /// Log successful logins.
        log_connections: bool = Some("1"), Reload;
        /// Log disconnections with their reasons.
        log_disconnections: bool = Some("1"), Reload;
        /// Log errors that the pooler sends to clients.
        log_pooler_errors: bool = Some("1"), Reload;
        /// Write statistics to the log every `stats_period`.
        log_stats: bool = Some("1"), Reload;
        /// How often averages are computed and statistics logged. \[seconds\]
        stats_period: Duration = Some("60"), Reload;
    }
    group "Listening" {
        /// Addresses or names to listen on, separated by commas; `*` is all. Empty: unix sockets only.
        listen_addr: NameList = Some(""), Restart;
        /// Port for TCP and unix sockets.
        listen_port: u16 = Some("6432"), Restart;
        /// Length of the queue of connections not yet accepted, listen(2).
        listen_backlog: u32 = Some("128"), Restart;
        /// Directory of unix sockets, also for servers without `host`. `@name`: abstract namespace. Empty: no unix
        /// sockets.
        unix_socket_dir: UnixSocketDir = Some("/tmp"), Restart;
        /// File mode of the unix socket, octal with a leading 0; SHOW CONFIG prints it in decimal, as PgBouncer.
        unix_socket_mode: u32 = Some("0777"), Restart;
        /// Group of the unix socket. Empty: the process' own.
        unix_socket_group: Option<String> = Some(""), Restart;
        /// Set SO_REUSEPORT, so that several processes share the port. Not needed to use several cores: see
        /// `threads`.
        so_reuseport: bool = Some("0"), Restart;
        /// This process' id among `[peers]`; 0: no peering.
        peer_id: PeerId = Some("0"), Reload;
    }
    group "Pools and limits" {
        /// When a server connection can be used by other clients: `session`, `transaction`, `statement`. Per database and
        /// user.
        pool_mode: PoolMode = Some("session"), Reload;
        /// Most client connections.
        max_client_conn: u32 = Some("100"), Reload;
        /// Most server connections of a pool (pair of user and database). 0: no limit but those of the database and the
        /// user. Per database and user: `pool_size`.
        default_pool_size: u32 = Some("20"), Reload;
        /// Server connections to keep open in a pool that has clients or a forced user, unless its size is 0. Per
        /// database.
        min_pool_size: u32 = Some("0"), Reload;
        /// Further connections of a pool for clients that waited longer than `reserve_pool_timeout`. Per database and
        /// user.
        reserve_pool_size: u32 = Some("0"), Reload;
        /// See `reserve_pool_size`. 0: no reserve. \[seconds\]
        reserve_pool_timeout: Duration = Some("5"), Reload;
        /// Most server connections of a database. 0: no limit. Per database.
        max_db_connections: u32 = Some("0"), Reload;
        /// Most client connections of a database. 0: no limit. Per database.
        max_db_client_connections: u32 = Some("0"), Reload;
        /// Most server connections of a user. 0: no limit. Per user.
        max_user_connections: u32 = Some("0"), Reload;
        /// Most client connections of a user. 0: no limit. Per user.
        max_user_client_connections: u32 = Some("0"), Reload;
        /// Use server connections in turn instead of the same few first: of those at rest the one that the client had less than 2 ms ago, else the one
        /// with the lowest number, the client's own thread's before others', and of these one with the client's parameters before one that must be set.
        server_round_robin: bool = Some("0"), Reload;
        /// Prepared statements kept on each server connection in transaction and statement pooling. 0: not tracked.
        max_prepared_statements: u32 = Some("200"), Reload;
    }
    group "Client parameters" {
        /// Startup parameters to accept besides those that the server reports. Whatever the server reports is kept per client and restored
        /// on its server, named here or not; what it does not report can not be.
        track_extra_parameters: NameList = Some("IntervalStyle"), Restart;
        /// Startup parameters to accept and ignore.
        ignore_startup_parameters: NameList = Some(""), Reload;
        /// Add the client's address and port to `application_name` at login.
        application_name_add_host: bool = Some("0"), Reload;
        /// Refuse the simple query protocol.
        disable_pqexec: bool = Some("0"), Restart;
        /// Notice sent to each client after login. Empty: none.
        login_notify_message: Option<String> = Some(""), Reload;
    }
    group "Authentication" {
        /// How clients log in: `any`, `trust`, `plain`, `md5`, `cert`, `hba`, `scram-sha-256`.
        auth_type: AuthType = Some("md5"), Reload,
            differs = "ldap and pam are refused with an error that says so";
        /// File of user names and secrets, userlist.txt.
        auth_file: Option<PathBuf> = None, Reload;
        /// Rules for `auth_type = hba`, in the format of pg_hba.conf.
        auth_hba_file: Option<PathBuf> = Some(""), Reload;
        /// Maps for `map=` in the rules, in the format of pg_ident.conf.
        auth_ident_file: Option<PathBuf> = None, Reload;
        /// LDAP options.
        auth_ldap_options: Option<String> = None, Reload,
            unsupported = "use auth_query, scram-sha-256 or cert and remove the line";
        /// User for `auth_query`, asked for users that are not in `auth_file`. Per database.
        auth_user: Option<String> = None, Reload;
        /// Query for a user's secret; `$1` is the user. Two columns: name and secret; of several rows the last is
        /// taken. A query that fails, or answers more than 64 KiB, ends the login with 08P01, `bouncer config error`;
        /// the log says why. Per database.
        auth_query: String = Some("SELECT rolname, CASE WHEN rolvaliduntil < now() THEN NULL ELSE rolpassword END \
            FROM pg_authid WHERE rolname=$1 AND rolcanlogin"), Reload;
        /// Database of `[databases]` where `auth_query` runs; unset: the client's. Per database.
        auth_dbname: ReservedName = None, Reload;
        /// Iterations of SCRAM secrets that are made from plain-text passwords.
        scram_iterations: u32 = Some("4096"), Reload;
    }
    group "Console" {
        /// Users who may run every command of the console.
        admin_users: NameList = Some(""), Reload;
        /// Users who may run SHOW, without SHOW FDS.
        stats_users: NameList = Some(""), Reload;
    }
    group "Server connections" {
        /// Query at the release of a server connection in session pooling. Empty: none.
        server_reset_query: Option<String> = Some("DISCARD ALL"), Reload;
        /// Also in transaction and statement pooling.
        server_reset_query_always: bool = Some("0"), Reload;
        /// A connection used more recently than this is not checked. 0: always check; kernel lanes pass servers on without, unless `server_check_query` does more than ask for life. \[seconds\]
        server_check_delay: Duration = Some("30"), Reload;
        /// Query that checks a connection. Empty: no check. `<empty>`: an empty query.
        server_check_query: CheckQuery = Some("<empty>"), Reload;
        /// In session pooling, close connections that must be closed as soon as no transaction is open, client
        /// included.
        server_fast_close: bool = Some("0"), Reload;
        /// Close a connection this long after it was made, when no client uses it; those of a pool one by one,
        /// `server_lifetime` / `pool_size` apart. 0: use it once. Per database. \[seconds\]
        server_lifetime: Duration = Some("3600"), Reload;
        /// Close a connection that was idle this long. 0: never. \[seconds\]
        server_idle_timeout: Duration = Some("600"), Reload;
        /// Longest time for connecting and login. \[seconds\]
        server_connect_timeout: Duration = Some("15"), Reload;
        /// Wait this long after a failed connection or login; clients get the error meanwhile. \[seconds\]
        server_login_retry: Duration = Some("15"), Reload;
    }
    group "Timeouts" {
        /// Longest time for a client's login. \[seconds\]
        client_login_timeout: Duration = Some("60"), Reload;
        /// Forget a database made from `*` that was unused this long. One that no server has let anybody into yet: after `server_login_retry`. \[seconds\]
        autodb_idle_timeout: Duration = Some("3600"), Reload;
        /// Forget a pool that was empty this long. 0: never. \[seconds\]
        pool_idle_timeout: Duration = Some("0"), Reload;
        /// Cancel queries that take longer, their wait for a server included, since the client last said something.
        /// 0: off. Per user. \[seconds\]
        query_timeout: Duration = Some("0"), Reload;
        /// Disconnect clients that wait longer for a server, at login too. 0: off. Per database and user. \[seconds\]
        query_wait_timeout: Duration = Some("120"), Reload;
        /// Tell a client by a notice that it is queued this long. 0: off. \[seconds\]
        query_wait_notify: Duration = Some("5"), Reload;
        /// Longest time that a cancel request may take. One that was sent by then closes its server connection after the statement, for it may
        /// still arrive there. 0: off. \[seconds\]
        cancel_wait_timeout: Duration = Some("10"), Reload;
        /// Disconnect clients that do nothing this long and have no server: in session pooling, those that have asked
        /// nothing yet. 0: off. Per user. \[seconds\]
        client_idle_timeout: Duration = Some("0"), Reload;
        /// Disconnect clients idle in a transaction this long. 0: off. Per user. \[seconds\]
        idle_transaction_timeout: Duration = Some("0"), Reload;
        /// Disconnect clients whose transaction is open this long. 0: off. Per user. \[seconds\]
        transaction_timeout: Duration = Some("0"), Reload;
        /// Longest wait of SUSPEND for buffers to drain. \[seconds\]
        suspend_timeout: Duration = Some("10"), Reload;
    }
    group "DNS" {
        /// Longest time a DNS answer is used. \[seconds\]
        dns_max_ttl: Duration = Some("15"), Reload;
        /// Longest time a failed look-up is remembered. \[seconds\]
        dns_nxdomain_ttl: Duration = Some("15"), Reload;
        /// Period for polling the serial numbers of zones. \[seconds\]
        dns_zone_check_period: Duration = Some("0"), Reload,
            no_effect = "zone serials are not polled; a changed address is noticed by the first new connection after dns_max_ttl";
        /// File to use instead of /etc/resolv.conf.
        resolv_conf: Option<PathBuf> = Some(""), Restart,
            no_effect = "names are looked up by the system's own resolver, which reads /etc/resolv.conf";
    }
    group "TLS towards clients" {
        /// `disable`, `allow`, `prefer`, `require`, `verify-ca`, `verify-full` (as verify-ca).
        client_tls_sslmode: SslMode = Some("disable"), Reload;
        /// Private key, PEM.
        client_tls_key_file: Option<PathBuf> = Some(""), Reload;
        /// Certificate chain, PEM.
        client_tls_cert_file: Option<PathBuf> = Some(""), Reload;
        /// Authorities for client certificates, PEM. With it TLS clients are asked for one; `verify-ca` and `verify-full` demand it.
        client_tls_ca_file: Option<PathBuf> = Some(""), Reload;
        /// Versions: `secure` (1.2 and 1.3), or a list.
        client_tls_protocols: TlsProtocols = Some("secure"), Reload,
            differs = "TLS 1.0 and 1.1 are accepted in the list but never spoken";
        /// TLS 1.2 ciphers, OpenSSL names.
        client_tls_ciphers: String = Some("default"), Reload,
            differs = "names are matched with the AEAD suites of rustls; OpenSSL's set operations and other suites are not available";
        /// TLS 1.3 ciphers.
        client_tls13_ciphers: Option<String> = None, Reload,
            differs = "the CCM suites are not available";
        /// Key exchange group: `auto`, or a curve's name.
        client_tls_ecdhcurve: String = Some("auto"), Reload,
            differs = "X25519, prime256v1 (P-256) and secp384r1 (P-384) are available";
        /// Finite-field key exchange.
        client_tls_dheparams: String = Some("auto"), Reload,
            no_effect = "rustls has no finite-field Diffie-Hellman; clients use elliptic curves";
    }
    group "TLS towards servers" {
        /// `disable`, `allow`, `prefer`, `require`, `verify-ca`, `verify-full`. With `prefer` a connection whose handshake fails is made without
        /// TLS; the log warns of it, once for each host and cause.
        server_tls_sslmode: SslMode = Some("prefer"), Reload;
        /// Authorities for server certificates, PEM.
        server_tls_ca_file: Option<PathBuf> = Some(""), Reload;
        /// Private key for client certificate login, PEM.
        server_tls_key_file: Option<PathBuf> = Some(""), Reload;
        /// Certificate for it, PEM.
        server_tls_cert_file: Option<PathBuf> = Some(""), Reload;
        /// Versions: `secure` (1.2 and 1.3), or a list.
        server_tls_protocols: TlsProtocols = Some("secure"), Reload,
            differs = "TLS 1.0 and 1.1 are accepted in the list but never spoken";
        /// TLS 1.2 ciphers, OpenSSL names.
        server_tls_ciphers: String = Some("default"), Reload,
            differs = "names are matched with the AEAD suites of rustls; OpenSSL's set operations and other suites are not available";
        /// TLS 1.3 ciphers.
        server_tls13_ciphers: Option<String> = None, Reload,
            differs = "the CCM suites are not available";
    }
    group "Network" {
        /// PgBouncer's buffer per connection. \[bytes\]
        pkt_buf: u32 = Some("4096"), Restart,
            no_effect = "connections have no buffer of their own; each thread reads into one";
        /// Longest message let through. \[bytes\]
        max_packet_size: u32 = Some("2147483647"), Reload;
        /// PgBouncer's reads per connection before the next.
        sbuf_loopcnt: u32 = Some("5"), Reload,
            no_effect = "a worker takes turns between its connections by itself";
        /// TCP_DEFER_ACCEPT: wake up for a connection when its first bytes are there.
        tcp_defer_accept: bool = Some("1"), Reload;
        /// SO_SNDBUF and SO_RCVBUF. 0: the kernel's own. \[bytes\]
        tcp_socket_buffer: u32 = Some("0"), Reload;
        /// SO_KEEPALIVE.
        tcp_keepalive: bool = Some("1"), Reload;
        /// TCP_KEEPCNT. 0: the kernel's own.
        tcp_keepcnt: u32 = Some("0"), Reload;
        /// TCP_KEEPIDLE. 0: the kernel's own. \[seconds\]
        tcp_keepidle: u32 = Some("0"), Reload;
        /// TCP_KEEPINTVL. 0: the kernel's own. \[seconds\]
        tcp_keepintvl: u32 = Some("0"), Reload;
        /// TCP_USER_TIMEOUT. 0: the kernel's own. \[milliseconds\]
        tcp_user_timeout: u32 = Some("0"), Reload;
    }
}

fn whole(config: &Config) -> &Config {
    config
}

fn whole_mut(config: &mut Config) -> &mut Config {
    config
}

impl Config {
    /// Whether the file set the key (full name, `underpass.threads` for ours) rather than its default.
    pub fn is_set(&self, key: &str) -> bool {
        self.origins.contains_key(key)
    }

    /// The settings for a client's database name: its own entry, or one made from `*`. `None`: no such database.
    ///
    /// The second value is true for one made from `*` (log: "registered new auto-database").
    pub fn database(&self, name: &str) -> Option<(Database, bool)> {
        self.databases.lookup(name)
    }
}
