// SPDX-License-Identifier: Apache-2.0
//! How a capture goes, and what it lacks.

use std::time::Duration;

use underpass_trace::{Direction, WriterStats};

use crate::kernel::{Accounts, SourceKind};
use crate::recorder::Totals;

/// State of a capture, for progress and at its end.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// Since the programs were attached.
    pub elapsed: Duration,
    /// What the recorder counted.
    pub totals: Totals,
    /// The programs' accounts: source, direction, accounts. Sources that were not used are left out.
    pub accounts: Vec<(SourceKind, Direction, Accounts)>,
    /// What was written.
    pub writer: WriterStats,
    /// Things that its reader should know. They are in the trace, too.
    pub notes: Vec<String>,
    /// The fullest a ring was, 0.0 to 1.0.
    pub fill_max: f64,
    /// The trace ended before it was told to, and why.
    pub ended_early: Option<String>,
    /// Connections that are not in the trace, though nobody left them out: they use what is not supported, or encryption that could
    /// not be probed.
    pub unrecorded: u64,
    /// Connections that turned to encryption of which the beginning, or all, was not seen: there were no probes yet.
    pub unseen: u64,
    /// Probed sessions that were under way, and whose first request may be missing: the server waited for it inside the probed function
    /// when the probes came.
    pub waited: u64,
    /// Connections that the probes did not understand: another build than those that are supported.
    pub layout: u64,
    /// Times in which sessions may have been missed without a trace of them, a phrase for each kind.
    pub gaps: Vec<&'static str>,
    /// What of the server's traffic is left out from the start, in words: the only kinds that are recorded.
    pub filters: Vec<String>,
    /// It ended, and a server with the same data runs where it is not recorded: in another network namespace.
    pub lost_server: bool,
}

impl Summary {
    /// Whether nothing is missing, and all accounts add up.
    pub fn lossless(&self) -> bool {
        self.shortcomings().is_empty()
    }

    /// What the trace lacks, a phrase for each kind.
    pub fn shortcomings(&self) -> Vec<String> {
        let totals = &self.totals;
        let sum = |what: fn(&Accounts) -> u64| self.accounts.iter().map(|(_, _, a)| what(a)).sum::<u64>();
        let counted = [
            (sum(Accounts::missing), "bytes that the programs saw and could not hand over"),
            (sum(|a| a.unheard.events), "beginnings or ends of connections that were not handed over"),
            (sum(|a| u64::from(!a.add_up())), "accounts of the programs that do not add up"),
            (totals.wrong, "sessions whose accounts do not add up"),
            (totals.not_understood, "connections that were not understood"),
            (self.unrecorded, "connections that could not be recorded"),
            (self.unseen, "encrypted connections whose beginning, or all, was not seen"),
            (self.waited, "probed sessions under way whose first request may be missing"),
            (self.layout, "connections whose ends the probes did not understand"),
            (self.writer.dropped_records, "records not written"),
        ];
        let holes = (totals.lost_bytes > 0)
            .then(|| format!("{} bytes in {} losses", totals.lost_bytes, totals.losses));
        let counted = counted.into_iter().filter(|&(count, _)| count > 0);
        let early = self.ended_early.as_ref().map(|_| "what came after its early end".to_owned());
        let elsewhere =
            self.lost_server.then(|| "what the server did in another network namespace".to_owned());
        holes
            .into_iter()
            .chain(counted.map(|(count, what)| format!("{count} {what}")))
            .chain(self.gaps.iter().map(|&gap| gap.to_owned()))
            .chain(early)
            .chain(elsewhere)
            .collect()
    }
}
