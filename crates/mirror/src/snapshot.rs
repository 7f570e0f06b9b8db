// SPDX-License-Identifier: Apache-2.0
//! What a pooler tells programs of its mirrors: the JSON of `/mirror_diff`, which `underpass report --mirrors` shows.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::table::Row;

/// Accounts and differences of all mirrors at a moment.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Snapshot {
    /// A mirror of a database each.
    pub mirrors: Vec<Account>,
    /// SHOW MIRROR_DIFF: those with differences first, then by how much slower they are there.
    pub statements: Vec<Row>,
}

/// A row of SHOW MIRRORS, as far as it tells what the differences are made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Account {
    /// The mirror.
    pub mirror: String,
    /// The database of the pooler.
    pub database: String,
    /// `async` or `sync`.
    pub mode: String,
    /// `on`, `down`, `failed`, ...
    pub state: String,
    /// Why it is in that state, if there is something to say.
    pub reason: Option<String>,
    /// How rows are compared: `off`, `ordered`, `unordered`.
    pub compare_rows: String,
    /// Whether examples show literals.
    pub show_literals: bool,
    /// Transactions that were to go there; executed + queued + dropped.
    pub transactions: u64,
    /// Of them, those that the mirror answered to the end.
    pub executed: u64,
    /// Of them, those that wait or are under way.
    pub queued: u64,
    /// Of them, those that did not get there, by reason; reasons that did not occur are left out.
    pub dropped: Vec<(Cow<'static, str>, u64)>,
    /// Left out by `send = read_only`.
    pub filtered: u64,
    /// Cycles that were compared.
    pub compared: u64,
    /// Transactions that were executed and not compared, because the comparison could not keep up.
    pub not_compared: u64,
}

impl Account {
    /// Transactions that did not get there.
    pub fn all_dropped(&self) -> u64 {
        self.dropped.iter().map(|(_, count)| count).sum()
    }
}
