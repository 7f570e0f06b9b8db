// SPDX-License-Identifier: Apache-2.0
//! Who must wait for whom: the order of commits, and of the ends of sessions.
//!
//! A commit is a unit that ends a transaction which may have written. A server lets its locks go a little before it says that it is
//! ready, and the one who waited for them may be faster to answer. So a unit that is a COMMIT or ROLLBACK and nothing else is *over* when it
//! was sent: its transaction wants no more locks. Any other, such as an UPDATE without BEGIN, is over when the server was ready again. The
//! commits of a trace are numbered by that. From it follows, for order `commit`:
//!
//! * A unit that only reads waits for the commits that were over when it was *sent*: it must see at least those.
//! * A unit that may write waits for the commits that were over when it was *answered*. It may have waited for a row lock that one
//!   of them held, and then its own effect came after theirs. To wait for the answered ones only is what makes
//!   overlapping updates of one row come out in the same order.
//! * In a transaction that goes on it also waits for those that were sent before it was answered, and were over before the end of the
//!   transaction was sent. They cannot have waited for a lock of this transaction, but it may have waited for theirs.
//! * A COMMIT waits for the commits that were over when it was sent.
//!
//! Nothing waits for a commit that was over later than its own transaction, so the waiting has no cycle; row locks taken in the
//! order of the trace fit in. What remains are overlapping commits of which one at least is no mere COMMIT: if the server was ready after them at
//! nearly the same time, they may have been the other way round. `close_commits` counts them.

use super::{Plan, Session, Unit};
use underpass_sql::Class;
use underpass_wire::backend::TransactionStatus;

/// Overlapping commits that were over within this of each other count as close.
const CLOSE_NS: u64 = 50_000;
/// Longest time in which a server is expected to say that it is ready after it has let its locks go.
const RELEASE_NS_MAX: u64 = 1_000_000_000;

/// A unit that ends a transaction.
struct Commit {
    over_ns: u64,
    sent_ns: u64,
    session: usize,
    unit: usize,
    /// It is COMMIT or ROLLBACK and nothing else.
    pure: bool,
}

/// Numbers the commits and says of each unit how many must come before it.
pub(super) fn commits(plan: &mut Plan) {
    let mut commits = Vec::new();
    for (at, session) in plan.sessions.iter().enumerate() {
        let mut wrote = false;
        for (index, unit) in session.units.iter().enumerate().filter(|(_, unit)| unit.omitted.is_none()) {
            wrote |= unit.may_write;
            // Where no answer was seen the transaction may go on: the next that was answered outside of one is behind the commit.
            if wrote
                && unit.status == Some(TransactionStatus::Idle)
                && let Some(ready_ns) = unit.ready_ns()
            {
                wrote = false;
                let pure = is_pure(plan, unit, index);
                let over_ns = if pure { unit.sent_ns } else { ready_ns };
                commits.push(Commit { over_ns, sent_ns: unit.sent_ns, session: at, unit: index, pure });
            }
        }
    }
    commits.sort_unstable_by_key(|commit| (commit.over_ns, commit.sent_ns, commit.session, commit.unit));
    plan.close_commits = commits
        .windows(2)
        .filter(|pair| {
            let (first, second) = (&pair[0], &pair[1]);
            first.session != second.session
                && !(first.pure && second.pure)
                && second.sent_ns < first.over_ns
                && second.over_ns - first.over_ns < CLOSE_NS
        })
        .count();
    for (number, commit) in commits.iter().enumerate() {
        plan.sessions[commit.session].units[commit.unit].is_commit(number);
    }
    for session in &mut plan.sessions {
        // When the end of the transaction around a unit was sent.
        let mut end_ns = None;
        for unit in session.units.iter_mut().rev() {
            let over_before = |ns| commits.partition_point(|commit| commit.over_ns < ns);
            let after = match (unit.commit(), unit.ready_ns()) {
                (Some(number), _) if commits[number].pure => over_before(unit.sent_ns),
                (Some(_), Some(ready_ns)) => over_before(ready_ns),
                (None, Some(ready_ns)) if unit.may_write => {
                    let known = over_before(ready_ns);
                    let until_ns = end_ns.unwrap_or(0).min(ready_ns.saturating_add(RELEASE_NS_MAX));
                    let overlapping = commits[known..].iter().take_while(|commit| commit.over_ns < until_ns);
                    let last = overlapping.enumerate().filter(|(_, commit)| commit.sent_ns < ready_ns).last();
                    known + last.map_or(0, |(at, _)| at + 1)
                }
                _ => over_before(unit.sent_ns),
            };
            unit.after_commits = after as u32;
            if unit.commit().is_some() {
                end_ns = Some(unit.sent_ns);
            }
        }
    }
    plan.commits = commits.len();
}

/// Whether a unit only ends a transaction, and everything before it was answered when it was sent.
fn is_pure(plan: &Plan, unit: &Unit, index: usize) -> bool {
    let ends = |&statement: &u32| {
        let statement = plan.classifier.get(statement);
        // Of one statement, what may write is COMMIT PREPARED; of several, one is more than an end.
        let alone = !statement.label.trim_end_matches(';').contains(';');
        statement.summary.class == Class::Transaction && (alone || !statement.summary.may_write)
    };
    unit.after as usize == index && !plan.executes(unit).is_empty() && plan.executes(unit).iter().all(ends)
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
