// SPDX-License-Identifier: Apache-2.0
//! Who must wait for whom: the order of commits, and of the ends of sessions.
//!
//! A commit is a unit that ends a transaction which may have written. The commits of a trace are numbered by the time
//! at which the server said it was ready again. From that follows, for order `commit`:
//!
//! * A unit that only reads waits for the commits that were over when it was *sent*: it must see at least those.
//! * A unit that may write waits for the commits that were over when it was *answered*. It may have waited for a row lock that one
//!   of them held, and then its own effect came after theirs. To wait for the answered ones only is what makes
//!   overlapping updates of one row come out in the same order.
//!
//! Nothing waits for a commit that was later than its own end, so the waiting has no cycle; row locks taken in the
//! order of the trace fit in. What remains is the time the server takes from letting its locks go to saying that it is
//! ready: two overlapping commits that are closer than that may have been the other way round. `close_commits` counts them.

use super::{Plan, Session};
use underpass_wire::backend::TransactionStatus;

/// Overlapping commits that were over within this of each other count as close.
const CLOSE_NS: u64 = 50_000;

/// Numbers the commits and says of each unit how many must come before it.
pub(super) fn commits(plan: &mut Plan) {
    // (over, sent, session, unit)
    let mut commits: Vec<(u64, u64, usize, usize)> = Vec::new();
    for (at, session) in plan.sessions.iter().enumerate() {
        let mut wrote = false;
        for (index, unit) in session.units.iter().enumerate().filter(|(_, unit)| unit.omitted.is_none()) {
            wrote |= unit.may_write;
            // Not seen to stay open counts as over: waiting for it too often is safe.
            let over =
                !matches!(unit.status, Some(TransactionStatus::Transaction | TransactionStatus::Failed));
            if over && std::mem::take(&mut wrote) {
                if let Some(ready_ns) = unit.ready_ns {
                    commits.push((ready_ns, unit.sent_ns, at, index));
                }
            }
        }
    }
    commits.sort_unstable();
    plan.close_commits = commits
        .windows(2)
        .filter(|pair| {
            let ((first, ..), (second, sent, ..)) = (pair[0], pair[1]);
            pair[0].2 != pair[1].2 && sent < first && second - first < CLOSE_NS
        })
        .count();
    for (number, &(_, _, at, index)) in commits.iter().enumerate() {
        plan.sessions[at].units[index].commit = Some(number);
    }
    for session in &mut plan.sessions {
        for unit in &mut session.units {
            let seen_ns = match unit.ready_ns {
                Some(ready_ns) if unit.may_write || unit.commit.is_some() => ready_ns,
                _ => unit.sent_ns,
            };
            unit.after_commits = commits.partition_point(|commit| commit.0 < seen_ns);
        }
    }
    plan.commits = commits.len();
}

/// Numbers the ends of sessions and says of each session how many must come before it: a client that logs in anew for
/// each request must not become thousands of clients when it is played without pauses.
pub(super) fn ends(sessions: &mut [Session]) -> usize {
    let mut ends: Vec<(u64, usize)> =
        sessions.iter().enumerate().filter_map(|(at, session)| Some((session.end_ns?, at))).collect();
    ends.sort_unstable();
    for (number, &(_, at)) in ends.iter().enumerate() {
        sessions[at].ended = Some(number);
    }
    let mut peak = 0;
    for (at, session) in sessions.iter_mut().enumerate() {
        session.after_ended = ends.partition_point(|end| end.0 < session.start_ns);
        // Sessions are sorted by their start.
        peak = peak.max(at + 1 - session.after_ended.min(at));
    }
    peak
}
