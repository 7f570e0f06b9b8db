// SPDX-License-Identifier: Apache-2.0
//! `underpass pooler --check`: contradictions and traps that single keys do not show.

use std::fmt;
use std::path::Path;

use crate::config::Config;
use crate::error::Location;
use crate::files::Files;
use crate::hba::{Hba, HbaMethod};
use crate::ident::IdentMaps;
use crate::userlist::Userlist;
use crate::value::{TlsProtocols, UnixSocketDir};
use crate::words::{AuthType, MirrorMode, MirrorSend, PoolMode, SslMode};

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The pooler must not start with it, or could not serve anybody.
    Error,
    /// It works, but hardly as meant.
    Warning,
}

/// One contradiction or trap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// Where, if a line of a file is to blame.
    pub at: Option<Location>,
    /// The key, `databases/name` or `users/name` it is about.
    pub key: String,
    /// What is wrong and what to do.
    pub text: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(at) = &self.at {
            write!(f, "{at}: ")?;
        }
        let severity = if self.severity == Severity::Error { "error" } else { "warning" };
        write!(f, "{severity}: {}: {}", self.key, self.text)
    }
}

/// Looks for contradictions in `config`; `files` reads the files it names (auth_file, HBA, ident, keys).
///
/// Errors come first. A pooler starts if there is none.
pub fn check(config: &Config, files: &dyn Files) -> Vec<Finding> {
    let mut check = Check { config, files, findings: Vec::new() };
    check.listening();
    check.tls();
    let users = check.auth_file();
    check.auth(users.as_ref());
    check.console(users.as_ref());
    check.pools();
    check.databases(users.as_ref());
    check.peers();
    check.mirrors();
    check.timeouts();
    check.findings.sort_by_key(|f| f.severity);
    check.findings
}

const SYSTEM_AUTHORITIES: &str =
    "empty, so certificates of any authority the system trusts are accepted; name your own authority's file";

struct Check<'a> {
    config: &'a Config,
    files: &'a dyn Files,
    findings: Vec<Finding>,
}

impl Check<'_> {
    fn add(&mut self, severity: Severity, key: &str, text: impl Into<String>) {
        let at = self.config.origins.get(key).cloned();
        self.findings.push(Finding { severity, at, key: key.to_owned(), text: text.into() });
    }

    fn error(&mut self, key: &str, text: impl Into<String>) {
        self.add(Severity::Error, key, text);
    }

    fn warn(&mut self, key: &str, text: impl Into<String>) {
        self.add(Severity::Warning, key, text);
    }

    fn warn_at(&mut self, at: &Location, key: String, text: impl Into<String>) {
        let finding = Finding { severity: Severity::Warning, at: Some(at.clone()), key, text: text.into() };
        self.findings.push(finding);
    }

    fn readable(&mut self, key: &str, path: Option<&Path>) {
        let Some(path) = path else { return };
        if let Err(e) = self.files.read(path) {
            self.error(key, format!("cannot read {}: {e}; check path and permissions", path.display()));
        }
    }

    fn listening(&mut self) {
        if self.config.listen_addr.is_empty() && self.config.unix_socket_dir == UnixSocketDir::Off {
            self.error("listen_addr", "nothing to listen on: set listen_addr or unix_socket_dir");
        }
        if self.config.listen_port == 0 {
            self.error("listen_port", "0 is no port clients can connect to; the default is 6432");
        }
        if self.config.unix_socket_mode > 0o777 {
            self.warn("unix_socket_mode", "more than 0777: write the mode in octal with a leading 0");
        } else if self.config.is_set("unix_socket_mode") && self.config.unix_socket_mode & 0o600 != 0o600 {
            self.warn(
                "unix_socket_mode",
                "not even the owner can connect: write the mode in octal with a leading 0",
            );
        }
    }

    fn tls(&mut self) {
        let c = self.config;
        if c.client_tls_sslmode != SslMode::Disable {
            for (key, path) in [
                ("client_tls_key_file", &c.client_tls_key_file),
                ("client_tls_cert_file", &c.client_tls_cert_file),
            ] {
                if path.is_none() {
                    self.error(key, format!("needed because client_tls_sslmode = {}", c.client_tls_sslmode));
                }
                self.readable(key, path.as_deref());
            }
            if c.client_tls_ca_file.is_none() {
                // PgBouncer starts with verify-ca and no file, and then trusts the system's authorities.
                match c.client_tls_sslmode {
                    SslMode::VerifyFull => {
                        self.error("client_tls_ca_file", "needed because client_tls_sslmode = verify-full");
                    }
                    SslMode::VerifyCa => self.warn("client_tls_ca_file", SYSTEM_AUTHORITIES),
                    _ => {}
                }
            }
            self.readable("client_tls_ca_file", c.client_tls_ca_file.as_deref());
            self.protocols("client_tls_protocols", &c.client_tls_protocols);
        }
        if c.server_tls_sslmode != SslMode::Disable {
            let verifies = matches!(c.server_tls_sslmode, SslMode::VerifyCa | SslMode::VerifyFull);
            if verifies && c.server_tls_ca_file.is_none() {
                self.warn("server_tls_ca_file", SYSTEM_AUTHORITIES);
            }
            self.readable("server_tls_ca_file", c.server_tls_ca_file.as_deref());
            self.readable("server_tls_key_file", c.server_tls_key_file.as_deref());
            self.readable("server_tls_cert_file", c.server_tls_cert_file.as_deref());
            if c.server_tls_key_file.is_some() != c.server_tls_cert_file.is_some() {
                self.error(
                    "server_tls_cert_file",
                    "server_tls_key_file and server_tls_cert_file go together: set both or none",
                );
            }
            self.protocols("server_tls_protocols", &c.server_tls_protocols);
        }
    }

    fn protocols(&mut self, key: &str, p: &TlsProtocols) {
        if !p.v1_2 && !p.v1_3 {
            self.error(key, "TLS 1.0 and 1.1 are not spoken: add tlsv1.2 or tlsv1.3");
        } else if p.v1_0 || p.v1_1 {
            self.warn(
                key,
                "TLS 1.0 and 1.1 are not spoken, whatever the list says; secure says what happens",
            );
        }
    }

    fn auth_file(&mut self) -> Option<Userlist> {
        let path = self.config.auth_file.as_deref()?;
        match Userlist::load(self.files, path) {
            Err(e) => {
                self.error("auth_file", e.to_string());
                None
            }
            Ok(parsed) => {
                for error in parsed.errors {
                    self.error("auth_file", error.to_string());
                }
                Some(parsed.value)
            }
        }
    }

    fn auth(&mut self, users: Option<&Userlist>) {
        let c = self.config;
        if c.auth_type == AuthType::Hba {
            self.hba();
        } else if c.auth_hba_file.is_some() {
            self.warn(
                "auth_hba_file",
                format!("not read because auth_type = {}; set auth_type = hba", c.auth_type),
            );
        }
        if c.auth_type == AuthType::Cert
            && !matches!(c.client_tls_sslmode, SslMode::VerifyCa | SslMode::VerifyFull)
        {
            self.error(
                "auth_type",
                "cert needs client_tls_sslmode = verify-full, so that certificates are verified",
            );
        }
        if c.auth_type == AuthType::Cert && c.client_tls_ca_file.is_none() {
            self.error("client_tls_ca_file", "needed because auth_type = cert");
        }
        let looked_up = c.auth_user.is_some() || self.all_databases().any(|d| d.auth_user.is_some());
        if c.auth_file.is_none() && !looked_up && c.auth_type != AuthType::Any {
            self.warn(
                "auth_file",
                format!("auth_type = {} and neither auth_file nor auth_user: nobody can log in", c.auth_type),
            );
        }
        if c.auth_type == AuthType::Any {
            let free: Vec<_> =
                self.all_databases().filter(|d| d.user.is_none()).map(|d| d.name.clone()).collect();
            if !free.is_empty() {
                self.warn(
                    "auth_type",
                    format!(
                        "any needs user= in every database, else its clients are refused; missing in {}",
                        free.join(", ")
                    ),
                );
            }
            self.warn(
                "auth_type",
                "any lets everybody look into the console, and whoever gives a name of admin_users administer it",
            );
        }
        if c.auth_type == AuthType::ScramSha256
            && let Some(users) = users
        {
            let md5: Vec<_> =
                users.iter().filter(|(_, s)| s.kind() == crate::SecretKind::Md5).map(|(u, _)| u).collect();
            if !md5.is_empty() {
                let some = md5[..md5.len().min(5)].join(", ");
                self.warn(
                    "auth_type",
                    format!(
                        "scram-sha-256 cannot check md5 secrets; {} users of auth_file have one: {some}",
                        md5.len()
                    ),
                );
            }
        }
        if c.scram_iterations == 0 {
            self.error("scram_iterations", "at least 1; the default is 4096");
        }
        if let Some(name) = c.auth_dbname.as_deref()
            && c.database(name).is_none()
        {
            let told = format!("no such database: {name}; add it to [databases]");
            // Nobody asks there without an auth_user, and PgBouncer starts.
            if looked_up {
                self.error("auth_dbname", told);
            } else {
                self.warn("auth_dbname", told);
            }
        }
    }

    fn hba(&mut self) {
        let c = self.config;
        let mut ident = IdentMaps::default();
        if let Some(path) = c.auth_ident_file.as_deref() {
            match IdentMaps::load(self.files, path) {
                Err(e) => self.error("auth_ident_file", e.to_string()),
                Ok(parsed) => {
                    for error in parsed.errors {
                        self.error("auth_ident_file", error.to_string());
                    }
                    ident = parsed.value;
                }
            }
        }
        let Some(path) = c.auth_hba_file.as_deref() else {
            return self.error("auth_hba_file", "needed because auth_type = hba");
        };
        let hba = match Hba::load(self.files, path, &ident) {
            Err(e) => return self.error("auth_hba_file", e.to_string()),
            Ok(parsed) => {
                for error in parsed.errors {
                    self.error("auth_hba_file", error.to_string());
                }
                for warning in parsed.warnings {
                    self.warn("auth_hba_file", warning.to_string());
                }
                parsed.value
            }
        };
        if hba.rules.is_empty() {
            self.error("auth_hba_file", "no rule: nobody can log in");
        }
        let ca = c.client_tls_ca_file.is_some() && c.client_tls_sslmode != SslMode::Disable;
        if !ca && let Some(rule) = hba.rules.iter().find(|r| r.method == HbaMethod::Cert) {
            // The rule refuses whom it is for, and other rules work: PgBouncer starts.
            self.warn(
                "auth_hba_file",
                format!(
                    "line {}: cert needs client_tls_sslmode and client_tls_ca_file; it refuses everybody",
                    rule.line
                ),
            );
        }
    }

    fn console(&mut self, users: Option<&Userlist>) {
        let c = self.config;
        if c.auth_type == AuthType::Any {
            return;
        }
        for (key, list) in [("admin_users", &c.admin_users), ("stats_users", &c.stats_users)] {
            let Some(users) = users else { continue };
            let missing: Vec<&str> = list.iter().filter(|u| users.get(u).is_none()).collect();
            // The console has no server to ask, so auth_query finds them only by the auth_dbname that holds for all.
            if !missing.is_empty() && (c.auth_user.is_none() || c.auth_dbname.as_deref().is_none()) {
                self.warn(
                    key,
                    format!("not in auth_file, so they cannot log in to the console: {}", missing.join(", ")),
                );
            }
        }
    }

    fn pools(&mut self) {
        let c = self.config;
        if c.max_client_conn == 0 {
            self.warn("max_client_conn", "0 lets no client in");
        }
        if c.reserve_pool_size > 0 && c.reserve_pool_timeout.is_zero() {
            self.warn(
                "reserve_pool_timeout",
                "0 switches the reserve pool off, so reserve_pool_size has no effect",
            );
        }
        if c.pool_mode != PoolMode::Session && c.server_reset_query_always {
            self.warn("server_reset_query_always", "a reset query after every transaction costs one more round trip each; needed only by applications that leave session state behind");
        }
        if c.server_fast_close && c.pool_mode != PoolMode::Session {
            self.warn("server_fast_close", format!("no effect with pool_mode = {}", c.pool_mode));
        }
        if c.server_lifetime.is_zero() {
            self.warn("server_lifetime", "0 means that a server connection is used once and closed");
        }
    }

    fn databases(&mut self, users: Option<&Userlist>) {
        let c = self.config;
        if c.databases.is_empty() {
            self.warn("databases", "empty: only the console can be reached");
        }
        for db in c.databases.named.values().chain(&c.databases.fallback) {
            let key = || format!("databases/{}", db.name);
            let pool = c.pool_size(db, db.user.as_deref().unwrap_or_default());
            let limit = c.max_db_connections(db);
            if limit > 0 && pool > limit {
                let text = format!(
                    "pool_size {pool} is more than max_db_connections {limit}: one pool can take all and never reaches its size"
                );
                self.warn_at(&db.at, key(), text);
            }
            let min = c.min_pool_size(db);
            if min > pool {
                let text = match pool {
                    0 => format!("min_pool_size {min} has no effect on a pool without a limit (pool_size 0)"),
                    _ => format!("min_pool_size {min} is more than pool_size {pool}, which is kept"),
                };
                self.warn_at(&db.at, key(), text);
            }
            if db.password.is_some() && db.user.is_none() {
                self.warn_at(&db.at, key(), "password without user has no effect; add user=");
            }
            if db.host.is_none() && c.unix_socket_dir == UnixSocketDir::Off {
                self.warn_at(
                    &db.at,
                    key(),
                    "no host, and unix_socket_dir is empty: the server cannot be reached; add host=",
                );
            }
            if let (Some(user), None, Some(users)) = (&db.user, &db.password, users)
                && users.get(user).is_none()
            {
                let text = format!(
                    "no password for user={user}: neither password= nor auth_file has one; fine if the server asks for none"
                );
                self.warn_at(&db.at, key(), text);
            }
            if let Some(name) = db.auth_dbname.as_deref()
                && c.database(name).is_none()
            {
                self.warn_at(&db.at, key(), format!("auth_dbname={name} is not in [databases]"));
            }
        }
    }

    fn peers(&mut self) {
        let c = self.config;
        if c.peer_id.0 == 0 && !c.peers.is_empty() {
            self.warn("peer_id", "[peers] has entries but peer_id is 0, which switches peering off");
        }
        if c.peer_id.0 != 0 && c.peers.keys().all(|id| *id == c.peer_id.0) {
            self.warn("peer_id", "set, but [peers] names no other process");
        }
        for peer in c.peers.values().filter(|p| p.id > 16383) {
            self.warn_at(
                &peer.at,
                format!("peers/{}", peer.id),
                "no process can have this peer_id; the most is 16383",
            );
        }
    }

    fn mirrors(&mut self) {
        let c = self.config;
        for mirror in c.mirrors.values() {
            let key = format!("{}{}", crate::mirror::SECTION_PREFIX, mirror.name);
            let mut found = Vec::new();
            if mirror.mode == MirrorMode::Sync && mirror.send == MirrorSend::ReadOnly {
                found.push((
                    Severity::Error,
                    "send = read_only needs mode = async: whether a transaction only reads is known when it is over"
                        .to_owned(),
                ));
            }
            if mirror.password.is_some() && mirror.user.is_none() {
                found.push((Severity::Warning, "password without user is not used".to_owned()));
            }
            for name in mirror.databases.iter().filter(|name| *name != "*") {
                if c.databases.lookup(name).is_none() {
                    found.push((Severity::Warning, format!("no database {name:?} in [databases]")));
                }
            }
            for database in c.databases.named.values().filter(|database| mirror.covers(&database.name)) {
                let same_host =
                    database.host.as_ref().zip(mirror.host.as_ref()).is_some_and(|(list, host)| {
                        database.port == mirror.port && list.hosts().contains(host)
                    });
                if same_host {
                    let text = format!(
                        "mirrors database {:?} to the server it is on, which would do everything twice; correct host or port",
                        database.name
                    );
                    found.push((Severity::Error, text));
                }
            }
            for (severity, text) in found {
                self.findings.push(Finding { severity, at: Some(mirror.at.clone()), key: key.clone(), text });
            }
        }
    }

    fn timeouts(&mut self) {
        let c = self.config;
        let (idle, whole) = (c.idle_transaction_timeout, c.transaction_timeout);
        if !whole.is_zero() && idle > whole {
            self.warn(
                "idle_transaction_timeout",
                "longer than transaction_timeout, so it never strikes first",
            );
        }
        if !c.query_wait_timeout.is_zero() && c.query_wait_notify > c.query_wait_timeout {
            self.warn("query_wait_notify", "longer than query_wait_timeout, so clients are never notified");
        }
        if c.stats_period.is_zero() {
            self.error("stats_period", "0 is no period; the default is 60");
        }
        let keepalive = [
            ("tcp_keepcnt", c.tcp_keepcnt),
            ("tcp_keepidle", c.tcp_keepidle),
            ("tcp_keepintvl", c.tcp_keepintvl),
        ];
        for (key, value) in keepalive {
            if value > 0 && !c.tcp_keepalive {
                self.warn(key, "no effect without tcp_keepalive = 1");
            }
        }
        const FACILITIES: [&str; 12] = [
            "auth", "authpriv", "daemon", "user", "local0", "local1", "local2", "local3", "local4", "local5",
            "local6", "local7",
        ];
        if !FACILITIES.contains(&c.syslog_facility.as_str()) {
            self.warn(
                "syslog_facility",
                format!("unknown, daemon is used; known: {}", FACILITIES.join(", ")),
            );
        }
    }

    fn all_databases(&self) -> impl Iterator<Item = &crate::Database> {
        let databases = &self.config.databases;
        databases.named.values().chain(&databases.fallback)
    }
}
