// SPDX-License-Identifier: Apache-2.0
//! Whether a pool has more clients than servers just now.
//!
//! Where programs keep no requests, only user space grants servers to a queue. While clients queue all the time, a client in a lane comes up at nearly every
//! request, which costs more than the lane saves. So the requests of a contended pool are left to user space, and only its answers to the kernel
//! (`worker/feed.rs`), until its queue has been quiet for [`QUIET`].

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

// First guesses that no measurement has confirmed.

/// Clients are counted that queued within so long.
const WINDOW: Duration = Duration::from_millis(100);
/// So many of them in a window are a contended pool. Fewer cost less than a change of sides.
const QUEUED_MAX: u64 = 64;
/// A queue as long as this is one, however slowly it moves.
const WAITERS_MAX: u32 = 8;
/// How long a contended pool stays with user space after the last full window.
const QUIET: Duration = Duration::from_millis(100);

/// The pressure on one pool. Written under the core's lock, read by any worker.
#[derive(Debug)]
pub(crate) struct Pressure {
    base: Instant,
    /// Start of the window, in microseconds since `base`.
    window_us: AtomicU64,
    queued: AtomicU64,
    until_us: AtomicU64,
    /// Clients in the queue.
    waiters: AtomicU32,
    /// Clients in a window that make a contended pool.
    queued_max: u64,
    /// Programs keep what waits: there is no need to go up.
    is_kept: AtomicBool,
}

impl Pressure {
    /// None yet.
    pub fn new(now: Instant) -> Self {
        Self::with_limit(now, QUEUED_MAX)
    }

    /// That never rises: for tests that want contended lanes.
    pub fn never(now: Instant) -> Self {
        Self::with_limit(now, u64::MAX)
    }

    fn with_limit(now: Instant, queued_max: u64) -> Self {
        Self {
            base: now,
            window_us: AtomicU64::new(0),
            queued: AtomicU64::new(0),
            until_us: AtomicU64::new(0),
            waiters: AtomicU32::new(0),
            queued_max,
            is_kept: AtomicBool::new(false),
        }
    }

    /// Whether programs keep the requests of clients for which there is no server.
    pub fn set_kept(&self, is_kept: bool) {
        self.is_kept.store(is_kept, Ordering::Relaxed);
    }

    /// A client joined the queue, which is `waiters` long now.
    pub fn note(&self, now: Instant, waiters: u32) {
        let now_us = self.since_base(now);
        if now_us.saturating_sub(self.window_us.load(Ordering::Relaxed)) > WINDOW.as_micros() as u64 {
            self.window_us.store(now_us, Ordering::Relaxed);
            self.queued.store(0, Ordering::Relaxed);
        }
        let queued = self.queued.load(Ordering::Relaxed) + 1;
        self.queued.store(queued, Ordering::Relaxed);
        if queued >= self.queued_max || (waiters >= WAITERS_MAX && self.queued_max < u64::MAX) {
            self.until_us.store(now_us + QUIET.as_micros() as u64, Ordering::Relaxed);
        }
    }

    /// Whether user space keeps the pool.
    pub fn is_high(&self, now: Instant) -> bool {
        let until = self.until_us.load(Ordering::Relaxed);
        until > 0 && self.since_base(now) < until && !self.is_kept.load(Ordering::Relaxed)
    }

    /// The queue's length changed.
    pub fn set_waiters(&self, waiters: u32) {
        self.waiters.store(waiters, Ordering::Relaxed);
    }

    /// Whether a lane would carry a client's next transaction: nobody queues, or in the lane.
    pub fn is_calm(&self, now: Instant) -> bool {
        self.is_kept.load(Ordering::Relaxed)
            || self.waiters.load(Ordering::Relaxed) == 0 && !self.is_high(now)
    }

    fn since_base(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.base).as_micros() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manual_names_the_numbers() {
        let numbers =
            format!("{QUEUED_MAX} clients within {} ms or {WAITERS_MAX} at once", WINDOW.as_millis());
        assert!(crate::why::Own::Contended.meaning().contains(&numbers), "{numbers}");
    }

    #[test]
    fn many_in_a_window_raise_it_and_quiet_ends_it() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let pressure = Pressure::new(start);
        for i in 0..QUEUED_MAX - 1 {
            pressure.note(at(1 + i / 10), 1);
        }
        assert!(!pressure.is_high(at(10)));
        pressure.note(at(10), 1);
        assert!(pressure.is_high(at(10)) && pressure.is_high(at(109)));
        assert!(!pressure.is_high(at(111)));
    }

    #[test]
    fn a_few_now_and_then_do_not() {
        let start = Instant::now();
        let pressure = Pressure::new(start);
        for ms in 0..5000 {
            let now = start + Duration::from_millis(ms * 2);
            pressure.note(now, WAITERS_MAX - 1);
            assert!(!pressure.is_high(now));
        }
    }

    #[test]
    fn a_long_queue_raises_it_at_once() {
        let now = Instant::now();
        let pressure = Pressure::new(now);
        pressure.note(now + QUIET, WAITERS_MAX);
        assert!(pressure.is_high(now + QUIET) && !pressure.is_high(now + QUIET * 2));
    }
}
