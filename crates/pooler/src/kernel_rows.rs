// SPDX-License-Identifier: Apache-2.0
//! SHOW KERNEL: how much goes through the lanes, why links leave them, what is queued, what the programs cost.

use std::sync::atomic::Ordering;

use underpass_config::KernelPath;
use underpass_console::rows::{KernelKind, KernelRow};
use underpass_console::{Show, Table};
use underpass_sockmap::{Counter, Reason};

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
    row(KernelKind::Lane, "D", "on", 1, "count");
    row(KernelKind::Lane, "A", "on", lanes.is_local().into(), "count");
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
    for program in path.program_costs() {
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

/// What programs forwarded and slow readers have not taken, by where it waits, in bytes.
pub(crate) fn queued(shared: &Shared) -> Vec<(&'static str, u64)> {
    let Some(lanes) = &shared.lanes else { return Vec::new() };
    let mut queues = vec![("responses", lanes.datapath.queued_bytes())];
    if lanes.has_applications() {
        queues.push(("applications", lanes.datapath.applications_unread_bytes()));
    }
    queues
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
