// SPDX-License-Identifier: Apache-2.0
//! What a trace says about itself, once, at the head of every segment.

use serde::{Deserialize, Serialize};

use crate::{Clock, Level};

/// Where and how a trace was recorded. Stored as JSON, so that `strings` shows it; unknown keys are ignored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Meta {
    /// The protocol of all its sessions.
    pub protocol: Protocol,
    /// How much of the responses is in it.
    pub level: Level,
    /// What was done to secrets.
    pub redaction: RedactionPolicy,
    /// When recording began.
    pub started: Clock,
    /// The program that wrote it, and its version.
    pub writer: String,
    /// The recording host's name.
    pub host: String,
    /// Its kernel, as `uname -r` says.
    pub kernel: String,
    /// The server.
    pub server: Server,
    /// What was recorded of the traffic, in the words of the command line; empty if all of it.
    pub filters: Vec<String>,
    /// The sources in use: see [`Source`](crate::Source).
    pub sources: Vec<String>,
    /// Whole sessions that were recorded, in parts per million. 1000000 unless sampling was asked for.
    pub sample_ppm: u32,
}

/// The server whose workload it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Server {
    /// `server_version`, or the MySQL handshake's version string; empty when it is not known.
    pub version: String,
    /// `system_identifier` of `pg_controldata`, in decimal; replay refuses a target that has the same. MySQL: `server_uuid`.
    pub system_identifier: Option<String>,
    /// Addresses on which it listens: `127.0.0.1:5432`, `/run/postgresql/.s.PGSQL.5432`.
    pub addresses: Vec<String>,
    /// Its data directory, when it is known.
    pub data_directory: Option<String>,
    /// Process ID of the postmaster (of mysqld) when recording began.
    pub pid: Option<u32>,
    /// GNU build ID of its executable, hexadecimal.
    pub build_id: Option<String>,
}

/// A client/server protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// PostgreSQL, protocol 3.
    #[default]
    Postgres,
    /// MariaDB and MySQL.
    Mysql,
}

/// What is done to secrets before they are stored. Login payloads are never stored, whatever this says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RedactionPolicy {
    /// Passwords in statements are overwritten.
    pub passwords: bool,
    /// Literals and parameters are replaced by keyed hashes.
    pub literals: bool,
}

impl Default for RedactionPolicy {
    fn default() -> Self {
        Self { passwords: true, literals: false }
    }
}

impl Default for Meta {
    fn default() -> Self {
        Self {
            protocol: Protocol::default(),
            level: Level::default(),
            redaction: RedactionPolicy::default(),
            started: Clock { monotonic_ns: 0, realtime_ns: 0 },
            writer: format!("underpass {}", env!("CARGO_PKG_VERSION")),
            host: String::new(),
            kernel: String::new(),
            server: Server::default(),
            filters: Vec::new(),
            sources: Vec::new(),
            sample_ppm: 1_000_000,
        }
    }
}
