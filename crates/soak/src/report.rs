// SPDX-License-Identifier: Apache-2.0
//! What a run has seen, and whether that is enough.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::config::Config;
use crate::faults::FaultKind;
use crate::owner::{Kind, Violation};
use crate::traffic::TrafficKind;

/// What the console showed while clients were running.
#[derive(Debug, Clone, Default)]
pub struct Observed {
    /// How often it was looked at.
    pub looks: u64,
    /// How often clients were found waiting for a server.
    pub looks_with_queue: u64,
    /// Sum over all looks of the clients waiting.
    pub waiting_sum: u64,
    /// Most clients waiting at a time.
    pub waiting_max: u64,
    /// Most server connections at a time.
    pub servers_max: u64,
}

/// The result of a run.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Transactions whose every message was checked.
    pub transactions: u64,
    /// Duration, without set-up and audit.
    pub elapsed: Duration,
    /// Scenarios per shape of the protocol, in the order of [`TrafficKind::ALL`].
    pub traffic: Vec<u64>,
    /// Faults per kind, in the order of [`FaultKind::ALL`].
    pub faults: Vec<u64>,
    /// Logins, the first ones and those after faults.
    pub logins: u64,
    /// Logins that were refused and tried again.
    pub refusals: u64,
    /// Late cancels that hit the client's own next statement.
    pub late_cancels: u64,
    /// Entries compared in the audit.
    pub audited: u64,
    /// From the console, if it was asked for.
    pub observed: Option<Observed>,
    /// Everything found wrong; a run stops after a few.
    pub violations: Vec<Violation>,
    /// Requirements that were not met.
    pub unmet: Vec<String>,
}

impl Report {
    /// Notes which requirements of the configuration were not met.
    pub(crate) fn judge(&mut self, config: &Config) {
        for (kind, count) in FaultKind::ALL.iter().zip(&self.faults) {
            if *count < config.require_faults && kind.possible(config) {
                self.unmet.push(format!("fault `{}`: {count} of {}", kind.name(), config.require_faults));
            }
        }
        let observed = self.observed.clone().unwrap_or_default();
        let required = config.require_clients_per_server;
        if required > 0 && observed.servers_max.max(1) * required > u64::from(config.clients) {
            let detail = format!("{} clients on {} servers", config.clients, observed.servers_max);
            self.unmet.push(format!("{required} clients per server: {detail}"));
        }
        if (required > 0 || config.require_queueing) && observed.looks == 0 {
            self.unmet.push("the console was never looked at".into());
        }
        if config.require_queueing && observed.looks_with_queue < observed.looks {
            let (some, all) = (observed.looks_with_queue, observed.looks);
            self.unmet.push(format!("clients waiting in {some} of {all} looks"));
        }
    }

    /// 0, 1 for violations, 3 for unmet requirements.
    pub fn exit_code(&self) -> u8 {
        match (self.violations.is_empty(), self.unmet.is_empty()) {
            (false, _) => 1,
            (true, false) => 3,
            (true, true) => 0,
        }
    }

    /// How often a fault was made.
    pub fn fault(&self, kind: FaultKind) -> u64 {
        self.faults.get(kind as usize).copied().unwrap_or(0)
    }

    /// How often a shape of the protocol was used.
    pub fn traffic(&self, kind: TrafficKind) -> u64 {
        self.traffic.get(kind as usize).copied().unwrap_or(0)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.elapsed.as_secs_f64();
        let rate = self.transactions as f64 / seconds.max(0.001);
        writeln!(f, "{} transactions in {seconds:.1} s, {rate:.0}/s", self.transactions)?;
        writeln!(f, "\nscenarios")?;
        for (kind, count) in TrafficKind::ALL.iter().zip(&self.traffic) {
            writeln!(f, "  {:<28} {count:>10}", kind.name())?;
        }
        writeln!(f, "faults made")?;
        for (kind, count) in FaultKind::ALL.iter().zip(&self.faults) {
            writeln!(f, "  {:<28} {count:>10}", kind.name())?;
        }
        writeln!(f, "clients")?;
        writeln!(f, "  {:<28} {:>10}", "logins", self.logins)?;
        writeln!(f, "  {:<28} {:>10}", "logins refused, retried", self.refusals)?;
        writeln!(f, "  {:<28} {:>10}", "own late cancels", self.late_cancels)?;
        writeln!(f, "  {:<28} {:>10}", "ledger entries audited", self.audited)?;
        if let Some(seen) = &self.observed {
            let mean = seen.waiting_sum as f64 / seen.looks.max(1) as f64;
            writeln!(f, "pool, from {} looks at the console", seen.looks)?;
            writeln!(f, "  {:<28} {:>10}", "most servers", seen.servers_max)?;
            writeln!(f, "  {:<28} {:>10}", "most clients waiting", seen.waiting_max)?;
            writeln!(f, "  {:<28} {mean:>10.1}", "clients waiting, mean")?;
            writeln!(f, "  {:<28} {:>10}", "looks with clients waiting", seen.looks_with_queue)?;
        }
        let mut kinds: BTreeMap<Kind, u64> = BTreeMap::new();
        for violation in &self.violations {
            *kinds.entry(violation.kind).or_default() += 1;
        }
        writeln!(f, "violations")?;
        for (kind, count) in &kinds {
            writeln!(f, "  {:<28} {count:>10}", format!("{kind:?}"))?;
        }
        writeln!(f, "  {:<28} {:>10}", "all", self.violations.len())?;
        for violation in self.violations.iter().take(10) {
            writeln!(f, "  {violation}")?;
        }
        for unmet in &self.unmet {
            writeln!(f, "not met: {unmet}")?;
        }
        write!(f, "{}", if self.exit_code() == 0 { "PASSED" } else { "FAILED" })
    }
}
