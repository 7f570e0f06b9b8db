// SPDX-License-Identifier: Apache-2.0
//! MariaDB and MySQL: one process, which runs in its data directory.

use std::fs;
use std::path::Path;

use underpass_trace::Protocol;
use underpass_trace::assemble::Known;

use super::Server;
use crate::event::Ends;
use crate::procfs;
use crate::recorder::Lookup;

/// Where a data directory says which version it was last upgraded to: in MariaDB 11, before it, and in MySQL.
const VERSION_FILES: [&str; 3] = ["mariadb_upgrade_info", "mysql_upgrade_info", "mysql_upgrade_history"];
/// MySQL's identifier, `server-uuid=...`.
const AUTO_CNF: &str = "auto.cnf";

impl Server {
    pub(super) fn of_mysqld(pid: u32) -> Option<Self> {
        let executable = fs::read_link(procfs::path(pid, "exe")).ok()?;
        let name = executable.file_name()?.to_str()?.trim_end_matches(" (deleted)");
        let inside = procfs::path(pid, "cwd");
        // The system tables: the process may be one that makes a data directory, and has none yet.
        let system_tables = inside.join("mysql");
        let is_unreadable = !system_tables.is_dir() && procfs::is_forbidden(&system_tables);
        if !matches!(name, "mariadbd" | "mysqld") || !system_tables.is_dir() && !is_unreadable {
            return None;
        }
        let uuid = procfs::foreign_text(&inside.join(AUTO_CNF));
        let uuid = uuid.and_then(|text| {
            text.lines().find_map(|line| line.strip_prefix("server-uuid=").map(|uuid| uuid.trim().to_owned()))
        });
        Some(Self {
            version: version(&inside),
            is_unreadable,
            system_identifier: uuid,
            probes: super::exports(&procfs::path(pid, "exe"), b"vio_read"),
            ..Self::at(pid, Protocol::Mysql, executable)
        })
    }
}

/// Whether the executable calls itself so. An old MariaDB is a `mysqld`; its version tells, once a session is recorded.
pub(super) fn is_mariadb(executable: &Path) -> bool {
    executable.file_name().is_some_and(|name| name.to_string_lossy().starts_with("mariadbd"))
}

fn version(data: &Path) -> String {
    let text =
        VERSION_FILES.iter().find_map(|name| procfs::foreign_text(&data.join(name))).unwrap_or_default();
    text.split(|c: char| c.is_whitespace() || c == '\0').next().unwrap_or_default().to_owned()
}

/// Nothing is known of a session that was there before: no file of the system tells a thread's user.
#[derive(Clone, Copy, Debug, Default)]
pub struct Nobody;

impl Lookup for Nobody {
    fn connection(&mut self, _: &Ends) -> Known {
        Known::default()
    }

    fn process(&mut self, _: u32) -> Known {
        Known::default()
    }
}
