// SPDX-License-Identifier: Apache-2.0
//! Rows of SHOW MIRRORS and SHOW MIRROR_DIFF.

use crate::table::{Cells, TableRow};

/// How many reasons there are for a dropped transaction.
pub const DROP_REASONS: usize = 8;

/// A row of SHOW MIRRORS: a mirror of one database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MirrorRow<'a> {
    /// Name of the mirror.
    pub mirror: &'a str,
    /// The database that is mirrored.
    pub database: &'a str,
    /// Where it is.
    pub host: &'a str,
    /// Its port.
    pub port: u16,
    /// `async` or `sync`.
    pub mode: &'a str,
    /// `all` or `read_only`.
    pub send: &'a str,
    /// What it is doing.
    pub state: &'a str,
    /// Why, if there is something to say.
    pub reason: Option<&'a str>,
    /// Transactions that were to go there.
    pub transactions: u64,
    /// Those it answered to the end.
    pub executed: u64,
    /// Those that wait or are under way.
    pub queued: u64,
    /// Memory that all queued transactions of the mirror take, in bytes.
    pub queued_bytes: u64,
    /// Left out by `send = read_only`.
    pub filtered: u64,
    /// Dropped, by reason in the order of the columns.
    pub dropped: [u64; DROP_REASONS],
    /// Cycles compared.
    pub compared: u64,
    /// Transactions executed and not compared.
    pub not_compared: u64,
    /// Times a client was held.
    pub holds: u64,
    /// For how long altogether, in microseconds.
    pub held_us: u64,
}

impl TableRow for MirrorRow<'_> {
    fn cells(&self, cells: &mut Cells<'_>) {
        cells
            .text(self.mirror)
            .text(self.database)
            .text(self.host)
            .int4(self.port.into())
            .text(self.mode)
            .text(self.send)
            .text(self.state)
            .text_or_null(self.reason)
            .numeric(self.transactions)
            .numeric(self.executed)
            .numeric(self.queued)
            .numeric(self.queued_bytes)
            .numeric(self.filtered)
            .numeric(self.dropped.iter().sum());
        for dropped in self.dropped {
            cells.numeric(dropped);
        }
        cells.numeric(self.compared).numeric(self.not_compared).numeric(self.holds).numeric(self.held_us);
    }
}

/// A row of SHOW MIRROR_DIFF: a fingerprint on one mirror.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct MirrorDiffRow<'a> {
    /// Name of the mirror.
    pub mirror: &'a str,
    /// The database that is mirrored.
    pub database: &'a str,
    /// Fingerprint of the statement.
    pub fingerprint: &'a str,
    /// The statement without literals.
    pub query: &'a str,
    /// Why its results may vary, separated by commas.
    pub varies: &'a str,
    /// Results compared.
    pub compared: u64,
    /// Results that differ and should not.
    pub differing: u64,
    /// How they differ: `error_there=2,rows=1`.
    pub differences: &'a str,
    /// Results that differ as they may.
    pub expected: u64,
    /// Times it was timed.
    pub timed: u64,
    /// Of them, how often it was slower there.
    pub slower: u64,
    /// Mean time on the primary, in microseconds.
    pub mean_here_us: u64,
    /// Mean time on the mirror, in microseconds.
    pub mean_there_us: u64,
    /// Mean time there over mean time here.
    pub ratio: f64,
    /// Longest time on the primary, in microseconds.
    pub max_here_us: u64,
    /// Longest time on the mirror, in microseconds.
    pub max_there_us: u64,
    /// The first difference, if there is one.
    pub example: Option<&'a str>,
}

impl TableRow for MirrorDiffRow<'_> {
    fn cells(&self, cells: &mut Cells<'_>) {
        cells
            .text(self.mirror)
            .text(self.database)
            .text(self.fingerprint)
            .text(self.query)
            .text(self.varies)
            .numeric(self.compared)
            .numeric(self.differing)
            .text(self.differences)
            .numeric(self.expected)
            .numeric(self.timed)
            .numeric(self.slower)
            .numeric(self.mean_here_us)
            .numeric(self.mean_there_us)
            .display(format_args!("{:.2}", self.ratio))
            .numeric(self.max_here_us)
            .numeric(self.max_there_us)
            .text_or_null(self.example);
    }
}
