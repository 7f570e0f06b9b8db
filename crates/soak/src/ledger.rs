// SPDX-License-Identifier: Apache-2.0
//! What clients have committed, kept on both sides and compared at the end.
//!
//! A client that disappears during `commit` cannot know the outcome: such entries are *uncertain* and may be there or not,
//! but not twice.

use std::collections::BTreeMap;

use crate::batch::Batch;
use crate::connection::{Connection, Lost, Target};
use crate::owner::{Kind, Owner, Violation};

/// Sequences of a client's entries.
#[derive(Debug, Default)]
pub(crate) struct Entries {
    pub(crate) committed: Vec<u64>,
    pub(crate) uncertain: Vec<u64>,
}

/// The table of one run.
#[derive(Debug)]
pub(crate) struct Ledger {
    table: String,
    /// It is the caller's: there before the run, and after it.
    is_given: bool,
}

impl Ledger {
    pub(crate) fn new(given: Option<&str>) -> Self {
        // Two checkers may share a database.
        let own = || format!("underpass_soak_{}", std::process::id());
        Self { table: given.map_or_else(own, str::to_owned), is_given: given.is_some() }
    }

    pub(crate) fn insert(&self, owner: Owner) -> String {
        format!("insert into {} values ({}, {}, '{owner}')", self.table, owner.client, owner.sequence)
    }

    /// An entry whose commit nobody waits for: marked, because servers that run the same may decide it differently, and another statement, so
    /// that it is counted apart.
    pub(crate) fn insert_uncertain(&self, owner: Owner) -> String {
        let Owner { client, sequence, .. } = owner;
        format!("insert into {} select {client}, {sequence}, '{owner} uncertain'", self.table)
    }

    pub(crate) fn copy_in(&self) -> String {
        format!("copy {} from stdin", self.table)
    }

    pub(crate) fn copy_line(&self, owner: Owner) -> String {
        format!("{}\t{}\t{owner}\n", owner.client, owner.sequence)
    }

    pub(crate) fn select_between(&self, first: Owner, last: Owner) -> String {
        format!(
            "select token from {} where client = {} and sequence between {} and {} order by sequence",
            self.table, first.client, first.sequence, last.sequence
        )
    }

    pub(crate) async fn create(&self, target: &Target) -> Result<(), Lost> {
        if self.is_given {
            return Ok(());
        }
        let table = &self.table;
        // No unique index: a doubled row shall be found by the audit, not turned into an error of one client.
        execute(
            target,
            &format!(
                "drop table if exists {table}; \
                 create unlogged table {table} (client int, sequence bigint, token text); \
                 create index on {table} (client, sequence)"
            ),
        )
        .await
        .map(drop)
    }

    pub(crate) async fn remove(&self, target: &Target) -> Result<(), Lost> {
        if self.is_given {
            return Ok(());
        }
        execute(target, &format!("drop table {}", self.table)).await.map(drop)
    }

    /// Compares the table with what the clients say; `entries[i]` are those of client `i`.
    pub(crate) async fn audit(
        &self,
        target: &Target,
        seed: u64,
        entries: &BTreeMap<u32, Entries>,
    ) -> Result<Vec<Violation>, Lost> {
        let rows = execute(target, &format!("select token from {}", self.table)).await?;
        let mut found: BTreeMap<(u32, u64), u32> = BTreeMap::new();
        let mut violations = Vec::new();
        for row in rows {
            match Owner::find(seed, row.as_bytes()) {
                Some(owner) => *found.entry((owner.client, owner.sequence)).or_default() += 1,
                None => violations.push(Violation {
                    kind: Kind::Ledger,
                    client: 0,
                    detail: format!("stray row {row}"),
                }),
            }
        }
        let mut wrong = |client, detail| violations.push(Violation { kind: Kind::Ledger, client, detail });
        for (&client, entries) in entries {
            for &sequence in &entries.committed {
                match found.remove(&(client, sequence)) {
                    Some(1) => {}
                    Some(count) => wrong(client, format!("{sequence} committed once, found {count} times")),
                    None => wrong(client, format!("{sequence} committed and not there")),
                }
            }
            for &sequence in &entries.uncertain {
                if let Some(count @ 2..) = found.remove(&(client, sequence)) {
                    wrong(client, format!("{sequence} committed at most once, found {count} times"));
                }
            }
        }
        for (client, sequence) in found.into_keys() {
            wrong(client, format!("{sequence} rolled back or cut off, and there"));
        }
        Ok(violations)
    }
}

/// Runs SQL on a connection of its own; returns the first column of all rows.
pub(crate) async fn execute(target: &Target, sql: &str) -> Result<Vec<String>, Lost> {
    let mut connection = Connection::connect(target, "soak-control").await?;
    connection.send(&Batch::new().query(sql)).await?;
    let mut rows = Vec::new();
    loop {
        match connection.next().await? {
            b'D' => {
                let value = connection.column().unwrap_or_default();
                rows.push(String::from_utf8_lossy(value).into_owned());
            }
            b'E' => {
                let (sqlstate, message) = (connection.field(b'C'), connection.field(b'M'));
                return Err(Lost::Refused { sqlstate, message });
            }
            b'Z' => break,
            _ => {}
        }
    }
    connection.terminate().await;
    Ok(rows)
}
