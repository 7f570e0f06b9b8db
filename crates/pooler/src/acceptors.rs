// SPDX-License-Identifier: Apache-2.0
//! Which workers accept connections: all of them, or the first one alone.
//!
//! A client that connects for one transaction and leaves wakes its worker up to four times: for its login, its request, the answer and its
//! end. One worker that has several such clients finds the next event waiting more often than not; spread over workers, each event finds
//! its worker asleep. So while clients come and go at once and one worker has time for them all, it takes them all.
//!
//! A client leaves its worker only when `balance.rs` sends it, one that has turned out to be busy. So nothing is gathered that might stay:
//! one long-lived client in ten ends it, and so does a first worker that gets busy (TLS handshakes make it so within a look).

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::time::Duration;

/// A client that has left after less than this came for a moment.
pub(crate) const BRIEF: Duration = Duration::from_millis(250);
/// Connections between two looks (100 ms) that are worth gathering.
const ACCEPTED_MIN: u32 = 20;
/// Of this many connections all but one are brief.
const BRIEF_OF: u32 = 10;
/// The load of all workers, in thousandths of a core, that the first one may take over.
const TOTAL_MAX: u32 = 700;
/// The load at which the first one wants help: above [`TOTAL_MAX`], so that one does not follow from the other.
const FIRST_MAX: u32 = 850;

/// What all workers know of it.
#[derive(Debug)]
pub(crate) struct Acceptors {
    /// Processor time of each worker between its last two looks, in thousandths of what passed.
    loads: Vec<AtomicU32>,
    /// Connections since the first worker's last look.
    accepted: AtomicU32,
    /// Clients that left since then, less than [`BRIEF`] after they came.
    brief: AtomicU32,
    is_alone: AtomicBool,
}

impl Acceptors {
    /// All of `workers` accept.
    pub fn new(workers: usize) -> Self {
        Self {
            loads: std::iter::repeat_with(AtomicU32::default).take(workers).collect(),
            accepted: AtomicU32::new(0),
            brief: AtomicU32::new(0),
            is_alone: AtomicBool::new(false),
        }
    }

    /// A connection was accepted.
    pub fn came(&self) {
        self.accepted.fetch_add(1, Relaxed);
    }

    /// A client left that had been here for `stay`.
    pub fn left(&self, stay: Duration) {
        if stay < BRIEF {
            self.brief.fetch_add(1, Relaxed);
        }
    }

    /// Of each worker at its last look, in thousandths of a core.
    pub fn loads(&self) -> Vec<u32> {
        self.loads.iter().map(|load| load.load(Relaxed)).collect()
    }

    /// Notes what `worker` did with its time, in thousandths; the first one decides. Tells whether `worker` is to accept connections.
    pub fn look(&self, worker: u16, load: u32) -> bool {
        self.loads[usize::from(worker)].store(load, Relaxed);
        if worker > 0 {
            return !self.is_alone.load(Relaxed);
        }
        let (accepted, brief) = (self.accepted.swap(0, Relaxed), self.brief.swap(0, Relaxed));
        let total = self.loads.iter().map(|load| load.load(Relaxed)).sum();
        let was_alone = self.is_alone.load(Relaxed);
        let is_alone = self.loads.len() > 1 && decide(was_alone, accepted, brief, load, total);
        if is_alone != was_alone {
            self.is_alone.store(is_alone, Relaxed);
            let who = if is_alone { "the first worker accepts alone" } else { "all workers accept" };
            log::debug!("{who}: {accepted} connections in a tenth of a second, {brief} brief ones left");
        }
        true
    }
}

/// Whether the first worker is to accept alone, see the constants.
fn decide(was_alone: bool, accepted: u32, brief: u32, first: u32, total: u32) -> bool {
    let are_brief = accepted >= ACCEPTED_MIN && brief >= accepted - accepted.div_ceil(BRIEF_OF);
    are_brief && if was_alone { first <= FIRST_MAX } else { total <= TOTAL_MAX }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_for_a_moment_is_gathered() {
        assert!(decide(false, 1000, 1000, 300, 600));
        assert!(decide(true, 1000, 1000, 700, 700));
        // All but one of ten.
        assert!(decide(false, 20, 18, 0, 0));
        assert!(!decide(false, 20, 17, 0, 0));
        // Those that came before may leave now.
        assert!(decide(true, 20, 25, 0, 0));
    }

    #[test]
    fn who_stays_is_spread() {
        assert!(!decide(false, 1000, 0, 0, 0));
        assert!(!decide(true, 1000, 500, 0, 0));
    }

    #[test]
    fn a_few_are_not_worth_it() {
        assert!(!decide(false, 0, 0, 0, 0));
        assert!(!decide(true, 19, 19, 0, 0));
    }

    #[test]
    fn a_busy_first_worker_gets_help_and_keeps_it() {
        assert!(!decide(true, 1000, 1000, 851, 851));
        assert!(!decide(false, 1000, 1000, 430, 860));
    }

    #[test]
    fn the_first_worker_decides_for_all() {
        let acceptors = Acceptors::new(2);
        for _ in 0..100 {
            acceptors.came();
            acceptors.left(Duration::from_millis(1));
        }
        assert!(acceptors.look(1, 300) && acceptors.look(0, 300));
        assert!(!acceptors.look(1, 0) && acceptors.is_alone.load(Relaxed));
        // Nobody came since.
        assert!(acceptors.look(0, 0) && acceptors.look(1, 0));
        // They came, and stay.
        for _ in 0..100 {
            acceptors.came();
            acceptors.left(BRIEF);
        }
        assert!(acceptors.look(0, 0) && acceptors.look(1, 0));
    }

    #[test]
    fn one_worker_is_always_alone_and_never_told_so() {
        let acceptors = Acceptors::new(1);
        for _ in 0..100 {
            acceptors.came();
            acceptors.left(Duration::ZERO);
        }
        assert!(acceptors.look(0, 0));
        assert!(!acceptors.is_alone.load(Relaxed));
    }
}
