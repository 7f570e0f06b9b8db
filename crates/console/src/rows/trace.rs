// SPDX-License-Identifier: Apache-2.0
//! The row of SHOW TRACE.

use crate::table::{Cells, TableRow};

/// The recording of clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TraceRow<'a> {
    /// Where it is.
    pub directory: &'a str,
    /// `on` or `ended`.
    pub state: &'a str,
    /// Why it has ended.
    pub reason: Option<&'a str>,
    /// How much of the responses is in it.
    pub level: &'a str,
    /// Sessions in it.
    pub sessions: u64,
    /// Connections that are not.
    pub missed: u64,
    /// Records written.
    pub records: u64,
    /// Bytes of its files.
    pub file_bytes: u64,
    /// Memory of what is not written yet, bytes.
    pub queued_bytes: u64,
    /// Bytes of clients.
    pub seen_bytes: u64,
    /// Of them, those that found no room.
    pub lost_bytes: u64,
}

impl TableRow for TraceRow<'_> {
    fn cells(&self, cells: &mut Cells<'_>) {
        cells
            .text(self.directory)
            .text(self.state)
            .text_or_null(self.reason)
            .text(self.level)
            .numeric(self.sessions)
            .numeric(self.missed)
            .numeric(self.records)
            .numeric(self.file_bytes)
            .numeric(self.queued_bytes)
            .numeric(self.seen_bytes)
            .numeric(self.lost_bytes);
    }
}
