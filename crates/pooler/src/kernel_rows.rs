// SPDX-License-Identifier: Apache-2.0
//! SHOW KERNEL: how much goes through the lanes, why links leave them, what is queued, what the programs cost.

use std::sync::atomic::Ordering;

use underpass_config::KernelPath;
use underpass_console::rows::{KernelKind, KernelRow};
use underpass_console::{Show, Table};
use underpass_sockmap::{Counter, Reason};

use crate::lanes::SWITCH_STATISTICS_ON;
use crate::shared::Shared;
use crate::why::Tally;

/// The table. Share of transactions in the lanes: `xacts` of `B`, `A` and `D` over those and `user`. The four add up to the transactions of
/// SHOW TOTALS, and the rows of kind `user` to that of `user`.
pub(crate) fn kernel_rows(shared: &Shared) -> Table {
    let mut table = Table::new(Show::Kernel.columns());
    let mut row = |kind, name: &str, item: &str, value, unit: &str| {
        table.push(&KernelRow { kind, name, item, value, unit });
    };
    let Some(lanes) = &shared.lanes else {
        let why = match shared.settings.load().config.underpass.kernel_path {
            KernelPath::Off => "kernel_path = off",
            _ => "self-test failed: underpass check",
        };
        row(KernelKind::Lane, "off", why, 0, "count");
        return table;
    };
    let path = &lanes.datapath;
    row(KernelKind::Lane, "D", "on", lanes.is_remote().into(), "count");
    row(KernelKind::Lane, "A", "on", lanes.is_local().into(), "count");
    row(KernelKind::Lane, "A", "refused", path.refused_backends().0, "count");
    row(KernelKind::Lane, "B", "on", lanes.has_applications().into(), "count");
    for (name, xacts, requests, responses) in [
        ("D", Counter::XactsD, Counter::RequestsD, Counter::ResponsesD),
        ("A", Counter::XactsA, Counter::RequestsA, Counter::ResponsesA),
        // Those of its clients that went by TCP are among lane A's.
        ("B", Counter::XactsB, Counter::RequestsB, Counter::ResponsesB),
    ] {
        row(KernelKind::Lane, name, "xacts", path.counter(xacts), "count");
        row(KernelKind::Lane, name, "requests", path.counter(requests), "count");
        row(KernelKind::Lane, name, "responses", path.counter(responses), "count");
    }
    let user = user_xacts(shared);
    row(KernelKind::Lane, "user", "xacts", total(&user), "count");
    row(KernelKind::Lane, "all", "taken", lanes.taken.load(Ordering::Relaxed), "count");
    row(KernelKind::Lane, "all", "given", lanes.given.load(Ordering::Relaxed), "count");
    row(KernelKind::Lane, "all", "fed", lanes.fed.load(Ordering::Relaxed), "count");
    row(KernelKind::Lane, "all", "kept", path.counter(Counter::Kept), "count");
    row(KernelKind::Lane, "all", "handed_on", path.counter(Counter::HandedOn), "count");
    row(KernelKind::Lane, "all", "events_lost", path.counter(Counter::EventsLost), "count");
    row(KernelKind::Lane, "all", "overlaps", path.counter(Counter::Overlaps), "count");
    if path.has_tap() {
        row(KernelKind::Lane, "mirrors", "chunks_told", path.counter(Counter::Taps), "count");
        row(KernelKind::Lane, "mirrors", "chunks_lost", path.counter(Counter::TapsLost), "count");
    }
    for (why, xacts) in user {
        row(KernelKind::User, why, "xacts", xacts, "count");
    }
    for (reason, times) in exits(shared) {
        row(KernelKind::Exit, reason, "count", times, "count");
    }
    for (queue, bytes) in queued(shared) {
        row(KernelKind::Queue, queue, "queued", bytes, "bytes");
    }
    let costs = path.program_costs();
    // A kernel that does not measure counts no runs.
    if costs.iter().all(|program| program.runs == 0) {
        let how = format!("off; {SWITCH_STATISTICS_ON}");
        row(KernelKind::Program, "statistics", &how, 0, "count");
    }
    for program in costs {
        row(KernelKind::Program, program.name, "runs", program.runs, "count");
        row(KernelKind::Program, program.name, "time", program.run_ns, "ns");
        row(KernelKind::Program, program.name, "verified", program.verified_instructions.into(), "count");
    }
    table
}

/// Transactions by lane, and those that ended in user space.
pub(crate) fn xacts(shared: &Shared) -> Vec<(&'static str, u64)> {
    let Some(lanes) = &shared.lanes else { return Vec::new() };
    vec![
        ("D", lanes.datapath.counter(Counter::XactsD)),
        ("A", lanes.datapath.counter(Counter::XactsA)),
        ("B", lanes.datapath.counter(Counter::XactsB)),
        ("user", total(&user_xacts(shared))),
    ]
}

/// Transactions in user space by reason.
pub(crate) fn user_xacts(shared: &Shared) -> Vec<(&'static str, u64)> {
    Tally::sum(&shared.user_xacts)
}

fn total(counts: &[(&str, u64)]) -> u64 {
    counts.iter().map(|(_, count)| count).sum()
}

/// What programs forwarded and slow readers have not taken, by where it waits, and what they keep for want of a server, in bytes.
pub(crate) fn queued(shared: &Shared) -> Vec<(&'static str, u64)> {
    let Some(lanes) = &shared.lanes else { return Vec::new() };
    let path = &lanes.datapath;
    let mut queues = vec![("responses", path.queued_bytes()), ("requests", path.queued_request_bytes())];
    queues.push(("kept", path.kept_bytes()));
    if lanes.has_applications() {
        queues.push(("applications", path.applications_unread_bytes()));
    }
    queues
}

/// What programs cost so far: name, runs, seconds in them. Zeros while the kernel does not measure.
pub(crate) fn costs(shared: &Shared) -> Vec<(&'static str, u64, f64)> {
    let Some(lanes) = &shared.lanes else { return Vec::new() };
    let costs = lanes.datapath.program_costs();
    costs.iter().map(|program| (program.name, program.runs, program.run_ns as f64 / 1e9)).collect()
}

/// What lanes carried in one `stats_period` after the other.
#[derive(Debug, Default)]
pub(crate) struct Periodic {
    seen: Vec<(&'static str, u64)>,
}

impl Periodic {
    /// The line of `log_stats` for a period that ends now, if a lane carried anything in it.
    pub fn line(&mut self, shared: &Shared) -> Option<String> {
        let now = xacts(shared);
        let before = std::mem::replace(&mut self.seen, now.clone());
        let queued: u64 = queued(shared).iter().map(|(_, bytes)| bytes).sum();
        share_line(&before, &now, queued)
    }
}

/// What is new in counts of transactions by lane, the last of them user space's.
fn share_line(before: &[(&str, u64)], now: &[(&str, u64)], queued: u64) -> Option<String> {
    let then = |name: &str| before.iter().find(|(its, _)| *its == name).map_or(0, |(_, count)| *count);
    let new: Vec<(&str, u64)> =
        now.iter().map(|(name, count)| (*name, count - then(name).min(*count))).collect();
    let all = total(&new);
    let carried = all - new.last().map_or(0, |(_, count)| *count);
    let words: Vec<String> = new.iter().map(|(name, count)| format!("{name} {count}")).collect();
    (carried > 0).then(|| {
        let share = 100.0 * carried as f64 / all as f64;
        format!("kernel lanes: xacts {}, {share:.1} % in lanes, {queued} B queued", words.join(", "))
    })
}

/// How often links left the kernel, by reason; those that never happened are left out.
pub(crate) fn exits(shared: &Shared) -> Vec<(&'static str, u64)> {
    let Some(lanes) = &shared.lanes else { return Vec::new() };
    let count = |&reason: &Reason| (reason.name(), lanes.datapath.reason_count(reason));
    Reason::ALL
        .iter()
        .filter(|&&reason| reason != Reason::None)
        .map(count)
        .filter(|&(_, times)| times > 0)
        .collect()
}

/// The same in one line, for the log at the end of the process.
pub(crate) fn summary(shared: &Shared) -> Option<String> {
    let lanes = shared.lanes.as_ref()?;
    let words = |counts: Vec<(&str, u64)>| {
        let words: Vec<String> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
        words.join(", ")
    };
    let (user, exits) = (words(user_xacts(shared)), words(exits(shared)));
    Some(format!(
        "kernel lanes: transactions: {}; in user space: {}; {} taken, {} given; exits: {}",
        words(xacts(shared)),
        if user.is_empty() { "none" } else { &user },
        lanes.taken.load(Ordering::Relaxed),
        lanes.given.load(Ordering::Relaxed),
        if exits.is_empty() { "none" } else { &exits },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_periodic_line_tells_what_is_new() {
        let line = share_line(&[("D", 5), ("A", 0), ("user", 3)], &[("D", 8), ("A", 0), ("user", 4)], 7);
        assert_eq!(line.unwrap(), "kernel lanes: xacts D 3, A 0, user 1, 75.0 % in lanes, 7 B queued");
        assert!(share_line(&[], &[("D", 0), ("user", 4)], 0).is_none(), "nothing in lanes, no line");
        assert!(share_line(&[], &[], 0).is_none(), "no lanes");
    }
}
