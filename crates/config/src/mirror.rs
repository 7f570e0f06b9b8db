// SPDX-License-Identifier: Apache-2.0
//! `[underpass:mirror:NAME]`: a further server that gets what the clients of some databases say.
//!
//! A section of its own, like `[underpass]`: PgBouncer refuses it, so it belongs into an overlay. The databases are named here and not in
//! `[databases]`, so that the file that PgBouncer reads stays one that PgBouncer can read.

use std::time::Duration;

use crate::error::{ErrorKind, Location};
use crate::host::Host;
use crate::secret::Secret;
use crate::value::Value;
use crate::words::{CompareRows, MirrorMode, MirrorOverflow, MirrorSend, SyncEach};

/// What comes before the name in the section's header.
pub(crate) const SECTION_PREFIX: &str = "underpass:mirror:";

/// One mirror.
#[derive(Debug, Clone, PartialEq)]
pub struct Mirror {
    /// The name in the section's header.
    pub name: String,
    /// `databases`: entries of `[databases]` that are mirrored; `*` is all of them.
    pub databases: Vec<String>,
    /// `host`; needed.
    pub host: Option<Host>,
    /// `port`, default 5432.
    pub port: u16,
    /// `dbname` there; `None`: that of the mirrored database.
    pub dbname: Option<String>,
    /// `user` there; `None`: that of the mirrored pool.
    pub user: Option<String>,
    /// `password` of `user`; `None`: from the auth_file.
    pub password: Option<Secret>,
    /// `pool_size`: most connections for each user; `None`: that of the mirrored pool.
    pub pool_size: Option<u32>,
    /// `mode`.
    pub mode: MirrorMode,
    /// `sync_each`: of `mode = sync`.
    pub sync_each: SyncEach,
    /// `send`.
    pub send: MirrorSend,
    /// `sample`: share of the client connections that are mirrored, in percent, 1 to 100.
    pub sample_percent: u8,
    /// `queue_bytes`: most bytes of transactions that wait for this mirror or run there, of all databases and clients.
    pub queue_bytes: u64,
    /// `overflow`.
    pub overflow: MirrorOverflow,
    /// `sync_timeout`: longest time that `mode = sync` keeps a client waiting before the mirror is switched off.
    pub sync_timeout: Duration,
    /// `compare_rows`.
    pub compare_rows: CompareRows,
    /// `show_literals`: examples in SHOW MIRROR_DIFF keep their literals.
    pub show_literals: bool,
    /// Where the section stands.
    pub at: Location,
}

/// A key of the section, for its documents.
pub(crate) struct MirrorKey {
    pub name: &'static str,
    pub value_type: &'static str,
    pub default: &'static str,
    pub doc: &'static str,
}

const fn key(
    name: &'static str,
    value_type: &'static str,
    default: &'static str,
    doc: &'static str,
) -> MirrorKey {
    MirrorKey { name, value_type, default, doc }
}

/// Keys of the section, in the order of the manual.
pub(crate) const MIRROR_KEYS: &[MirrorKey] = &[
    key("databases", "list", "needed", "Entries of `[databases]` to mirror, separated by commas; `*`: all."),
    key(
        "host",
        "host",
        "needed",
        "Where the mirror is: a name, an address, `/directory` or `@name` of a unix socket.",
    ),
    key("port", "port", "`5432`", "Its port."),
    key("dbname", "text", "that of the database", "Database there."),
    key("user", "text", "that of the pool", "User there, for all clients."),
    key("password", "text", "from the auth_file", "Its password."),
    key("pool_size", "integer", "that of the pool", "Most connections to the mirror for each user."),
    key(
        "mode",
        "async, sync",
        "`async`",
        "`async`: clients never wait for the mirror. `sync`: a client is held until the mirror is ready for what it says next.",
    ),
    key(
        "sync_each",
        "statement, transaction",
        "`statement`",
        "With `mode = sync`: each statement goes there as it comes, and the client's next one waits for its answer; or whole transactions go there when they are over, and the client's next one waits for that.",
    ),
    key(
        "send",
        "all, read_only",
        "`all`",
        "`read_only`: only transactions whose statements only read, in read-only transactions (for a standby). Not with `mode = sync`.",
    ),
    key("sample", "percent", "`100`", "Share of the client connections that are mirrored, 1 to 100."),
    key(
        "queue_bytes",
        "bytes",
        "`67108864`",
        "Most memory for transactions that wait for the mirror. One transaction may take all of it.",
    ),
    key(
        "overflow",
        "drop, disable",
        "`drop`",
        "A transaction that the queue has no room for is dropped, or the mirror is disabled.",
    ),
    key(
        "sync_timeout",
        "seconds",
        "`1`",
        "A mirror in `mode = sync` that keeps a client waiting this long is disabled until `ENABLE MIRROR`. With `sync_each = transaction`: this much longer than the transaction took on the primary.",
    ),
    key(
        "compare_rows",
        "off, unordered, ordered",
        "`off`",
        "Compare the rows too, by a hash; `unordered`: whatever their order.",
    ),
    key(
        "show_literals",
        "0 or 1",
        "`0`",
        "Examples in `SHOW MIRROR_DIFF` have the statement as it was sent, literals included.",
    ),
];

impl Mirror {
    pub(crate) fn new(name: &str, at: Location) -> Result<Self, ErrorKind> {
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        if name.is_empty() || name.len() > 63 || !name.chars().all(is_word) {
            return Err(ErrorKind::Name {
                what: "mirror",
                name: name.to_owned(),
                rule: "is not 1 to 63 letters, digits, _ and -",
            });
        }
        Ok(Self {
            name: name.to_owned(),
            databases: Vec::new(),
            host: None,
            port: 5432,
            dbname: None,
            user: None,
            password: None,
            pool_size: None,
            mode: MirrorMode::Async,
            sync_each: SyncEach::Statement,
            send: MirrorSend::All,
            sample_percent: 100,
            queue_bytes: 64 << 20,
            overflow: MirrorOverflow::Drop,
            sync_timeout: Duration::from_secs(1),
            compare_rows: CompareRows::Off,
            show_literals: false,
            at,
        })
    }

    pub(crate) fn set(&mut self, key: &str, value: &str) -> Result<(), ErrorKind> {
        let text = || Some(value.to_owned()).filter(|value| !value.is_empty());
        match key {
            "databases" => {
                let names = value.split(',').map(str::trim).filter(|name| !name.is_empty());
                self.databases = names.map(str::to_owned).collect();
            }
            "host" => self.host = text().map(|host| Host::parse(&host)),
            "port" => {
                self.port = self.read::<u16>(key, value)?;
                if self.port == 0 {
                    return Err(self.invalid(key, value, "a port from 1 to 65535"));
                }
            }
            "dbname" => self.dbname = text(),
            "user" => self.user = text(),
            "password" => self.password = text().map(Secret::new),
            "pool_size" => {
                let size = self.read::<u32>(key, value)?;
                if size == 0 {
                    return Err(self.invalid(key, value, "an integer of at least 1"));
                }
                self.pool_size = Some(size);
            }
            "mode" => self.mode = self.read(key, value)?,
            "sync_each" => self.sync_each = self.read(key, value)?,
            "send" => self.send = self.read(key, value)?,
            "sample" => {
                self.sample_percent = match self.read::<u32>(key, value)? {
                    percent @ 1..=100 => percent as u8,
                    _ => return Err(self.invalid(key, value, "percent from 1 to 100")),
                };
            }
            "queue_bytes" => self.queue_bytes = self.read(key, value)?,
            "overflow" => self.overflow = self.read(key, value)?,
            "sync_timeout" => {
                self.sync_timeout = self.read(key, value)?;
                if self.sync_timeout.is_zero() {
                    return Err(self.invalid(key, value, "seconds above 0: the wait must be bounded"));
                }
            }
            "compare_rows" => self.compare_rows = self.read(key, value)?,
            "show_literals" => self.show_literals = self.read(key, value)?,
            _ => {
                let nearest = crate::key::nearest(key, MIRROR_KEYS.iter().map(|key| key.name));
                let section = "underpass:mirror:NAME";
                return Err(ErrorKind::UnknownKey { section, key: key.to_owned(), nearest });
            }
        }
        Ok(())
    }

    fn read<T: Value>(&self, key: &str, value: &str) -> Result<T, ErrorKind> {
        T::parse(value).map_err(|expected| self.invalid(key, value, &expected))
    }

    fn invalid(&self, key: &str, value: &str, expected: &str) -> ErrorKind {
        crate::connstr::invalid(&format!("{SECTION_PREFIX}{}.{key}", self.name), value, expected)
    }

    /// Whether clients of `database` are mirrored to it.
    pub fn covers(&self, database: &str) -> bool {
        self.databases.iter().any(|name| name == "*" || name == database)
    }

    /// The same settings, wherever they stand in the file.
    pub fn same_settings(&self, other: &Self) -> bool {
        Self { at: other.at.clone(), ..self.clone() } == *other
    }
}
