// SPDX-License-Identifier: Apache-2.0
//! PgBouncer's configuration files as typed values: pgbouncer.ini, userlist.txt, HBA and ident map.
//!
//! Text in, values out. [`Config::load`] reads the ini files; one table of keys ([`key::all`]) drives parsing,
//! defaults, SET, RELOAD, SHOW CONFIG and docs/config.md. [`check()`] finds contradictions before start.
//!
//! Whatever PgBouncer accepts is accepted with the same meaning; what cannot mean the same gives a warning or an
//! error that names file, line and the next step.

mod check;
mod config;
mod connstr;
mod database;
mod docs;
mod error;
mod files;
pub mod fuzzing;
mod hba;
mod hba_parse;
mod host;
mod ident;
mod ini;
pub mod key;
mod load;
mod mirror;
mod peer;
mod reload;
mod resolve;
mod secret;
mod tokens;
mod underpass;
mod url;
mod user;
mod userlist;
mod value;
mod words;

pub use check::{Finding, Severity, check};
pub use config::Config;
pub use database::{CONSOLE_DATABASE, Database, Databases};
pub use docs::{config_md, full_ini};
pub use error::{Error, ErrorKind, Errors, Location, Warning};
pub use files::{Files, MemFiles, OsFiles};
pub use hba::{Hba, HbaAddress, HbaClient, HbaMethod, HbaNames, HbaRule, HbaType};
pub use host::{Host, HostList};
pub use ident::{IdentLine, IdentMaps};
pub use load::Loaded;
pub use mirror::Mirror;
pub use peer::Peer;
pub use reload::{ChangedKey, ConfigRow, NamesDiff, ReloadDiff, SetOutcome, kept_warning};
pub use secret::{Secret, SecretKind};
pub use underpass::UnderpassConfig;
pub use url::Upstream;
pub use user::User;
pub use userlist::{Parsed, Userlist};
pub use value::{
    CheckQuery, KeptBytes, LaneBytes, LanePlaces, NameList, PeerId, ReservedName, TlsProtocols, UnixSocketDir,
};
pub use words::{
    AuthType, CompareRows, KernelPath, LoadBalanceHosts, LogFormat, MirrorMode, MirrorOverflow, MirrorSend,
    PoolMode, SameHost, SslMode, SyncEach, TraceLevel,
};
