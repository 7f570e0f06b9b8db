// SPDX-License-Identifier: Apache-2.0
//! SHOW MIRRORS, SHOW MIRROR_DIFF, and the same for metrics and reports.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use underpass_console::metrics::MirrorMetrics;
use underpass_console::rows::{DROP_REASONS, MirrorDiffRow, MirrorRow};
use underpass_console::{Show, Table};
use underpass_mirror::{Account, DropReason, Row, Snapshot};

use crate::mirrors::{MirrorState, State};
use crate::shared::Shared;

const _: () = assert!(DropReason::ALL.len() == DROP_REASONS, "a column for each reason");

fn value(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

pub(crate) fn mirrors_table(shared: &Shared) -> Table {
    let mut table = Table::new(Show::Mirrors.columns());
    for state in shared.mirrors.all() {
        let settings = state.settings.load();
        let counters = &state.counters;
        let why = state.why();
        let host = settings.host.as_ref().map(ToString::to_string).unwrap_or_default();
        // Before the others: what ends meanwhile is not counted twice.
        let queued = counters.queued();
        table.push(&MirrorRow {
            mirror: &state.name,
            database: &state.database,
            host: &host,
            port: settings.port,
            mode: settings.mode.as_str(),
            send: settings.send.as_str(),
            state: state.state().name(),
            reason: why.as_ref().map(|why| why.as_str()),
            transactions: value(&counters.transactions),
            executed: value(&counters.executed),
            queued,
            queued_bytes: state.budget.used(),
            filtered: value(&counters.filtered),
            dropped: DropReason::ALL.map(|reason| counters.dropped(reason)),
            compared: value(&counters.compared),
            not_compared: value(&counters.not_compared),
            holds: value(&counters.holds),
            held_us: value(&counters.held_us),
        });
    }
    table
}

pub(crate) fn differences_table(shared: &Shared) -> Table {
    let mut table = Table::new(Show::MirrorDiff.columns());
    for row in shared.mirrors.rows() {
        let differences: Vec<String> =
            row.differences.iter().map(|(difference, count)| format!("{difference}={count}")).collect();
        let example = row.example.as_ref().map(|example| {
            format!("{} -- here: {}; there: {}", example.statement, example.here, example.there)
        });
        table.push(&MirrorDiffRow {
            mirror: &row.mirror,
            database: &row.database,
            fingerprint: &row.fingerprint,
            query: &row.query,
            varies: &row.varies.join(","),
            compared: row.compared,
            differing: row.differing(),
            differences: &differences.join(","),
            expected: row.expected,
            timed: row.timed,
            slower: row.slower,
            mean_here_us: row.mean_here_us,
            mean_there_us: row.mean_there_us,
            ratio: row.ratio(),
            max_here_us: row.max_here_us,
            max_there_us: row.max_there_us,
            example: example.as_deref(),
        });
    }
    table
}

/// Accounts and differences for programs: a [`Snapshot`] as JSON.
pub(crate) fn snapshot_json(shared: &Shared) -> String {
    let account = |state: &Arc<MirrorState>| {
        let settings = state.settings.load();
        let counters = &state.counters;
        let queued = counters.queued();
        Account {
            mirror: state.name.to_string(),
            database: state.database.to_string(),
            mode: settings.mode.as_str().to_owned(),
            state: state.state().name().to_owned(),
            reason: state.why().map(|why| why.to_string()),
            compare_rows: settings.compare_rows.as_str().to_owned(),
            show_literals: settings.show_literals,
            transactions: value(&counters.transactions),
            executed: value(&counters.executed),
            queued,
            dropped: DropReason::ALL
                .into_iter()
                .map(|reason| (reason.name().into(), counters.dropped(reason)))
                .filter(|(_, count)| *count > 0)
                .collect(),
            filtered: value(&counters.filtered),
            compared: value(&counters.compared),
            not_compared: value(&counters.not_compared),
        }
    };
    let mirrors = shared.mirrors.all().iter().map(account).collect();
    let snapshot = Snapshot { mirrors, statements: shared.mirrors.rows() };
    // Numbers and texts: nothing that JSON cannot hold.
    serde_json::to_string(&snapshot).unwrap_or_default()
}

pub(crate) fn metrics(shared: &Shared) -> Vec<MirrorMetrics> {
    let states = shared.mirrors.all();
    if states.is_empty() {
        return Vec::new();
    }
    let (rows, times) = (shared.mirrors.rows(), shared.mirrors.times());
    let metrics = |state: &Arc<MirrorState>| {
        let own = |row: &&Row| row.mirror == *state.name && row.database == *state.database;
        let counters = &state.counters;
        let times = times.get(&(state.name.clone(), state.database.clone())).copied().unwrap_or_default();
        let mut transactions =
            vec![("executed", value(&counters.executed)), ("filtered", value(&counters.filtered))];
        transactions.extend(DropReason::ALL.map(|reason| (reason.name(), counters.dropped(reason))));
        MirrorMetrics {
            mirror: state.name.to_string(),
            database: state.database.to_string(),
            is_on: state.state() == State::On,
            transactions,
            queued: counters.queued(),
            queued_bytes: state.budget.used(),
            differing: rows.iter().filter(own).map(Row::differing).sum(),
            slower: rows.iter().filter(own).map(|row| row.slower).sum(),
            compared: value(&counters.compared),
            not_compared: value(&counters.not_compared),
            timed: times.timed,
            here_us: times.here.as_micros() as u64,
            there_us: times.there.as_micros() as u64,
            holds: value(&counters.holds),
            held_us: value(&counters.held_us),
        }
    };
    states.iter().map(metrics).collect()
}
