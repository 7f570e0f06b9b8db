// SPDX-License-Identifier: Apache-2.0
//! The account of a mirror: every transaction is executed, queued, or dropped for a reason; and the memory that queued ones take.

use std::sync::atomic::{AtomicU64, Ordering};

/// Why a transaction did not reach a mirror, or is not known to have been executed there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DropReason {
    /// No room in the queue (`queue_bytes`).
    QueueFull,
    /// Larger by itself than `queue_bytes`.
    TooLarge,
    /// The mirror cannot be reached, refuses logins, or has not been checked yet.
    NotReady,
    /// Switched off: by DISABLE MIRROR, by `overflow = disable`, or after `sync_timeout`.
    Disabled,
    /// It was under way when its connection ended: whether the mirror executed it is not known.
    ConnectionLost,
    /// It waited behind one whose connection was lost.
    SessionLost,
    /// The session's state cannot be had there: it is in session pooling and a transaction before was dropped.
    SessionState,
    /// The ring in which the kernel lanes tell what they forward had no room (`mirror_ring_bytes`).
    RingFull,
}

impl DropReason {
    /// All, in the order in which they are told.
    pub const ALL: [Self; 8] = [
        Self::QueueFull,
        Self::TooLarge,
        Self::NotReady,
        Self::Disabled,
        Self::ConnectionLost,
        Self::SessionLost,
        Self::SessionState,
        Self::RingFull,
    ];

    /// The word for columns and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::TooLarge => "too_large",
            Self::NotReady => "not_ready",
            Self::Disabled => "disabled",
            Self::ConnectionLost => "connection_lost",
            Self::SessionLost => "session_lost",
            Self::SessionState => "session_state",
            Self::RingFull => "ring_full",
        }
    }
}

/// Counters of one mirror of one database, since it was configured. Shared by all threads.
#[derive(Debug, Default)]
pub struct Counters {
    /// Transactions that ended on the primary in sessions that are mirrored, but for the filtered ones. Always
    /// `executed` + all of `dropped` + those queued or under way.
    pub transactions: AtomicU64,
    /// Of them, those that the mirror answered to the end.
    pub executed: AtomicU64,
    /// Left out by `send = read_only`.
    pub filtered: AtomicU64,
    dropped: [AtomicU64; DropReason::ALL.len()],
    /// Cycles whose answers were compared.
    pub compared: AtomicU64,
    /// Executed, but not compared because the comparison could not keep up.
    pub not_compared: AtomicU64,
    /// Times a client in `mode = sync` was held, and for how long altogether, in microseconds.
    pub holds: AtomicU64,
    /// See `holds`.
    pub held_us: AtomicU64,
}

impl Counters {
    /// Counts a dropped transaction.
    pub fn drop_one(&self, reason: DropReason) {
        self.dropped[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// How many were dropped for `reason`.
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.dropped[reason as usize].load(Ordering::Relaxed)
    }

    /// How many were dropped.
    pub fn all_dropped(&self) -> u64 {
        DropReason::ALL.into_iter().map(|reason| self.dropped(reason)).sum()
    }

    /// How many wait or are under way.
    pub fn queued(&self) -> u64 {
        let gone = self.executed.load(Ordering::Relaxed) + self.all_dropped();
        self.transactions.load(Ordering::Relaxed).saturating_sub(gone)
    }
}

/// Memory for the transactions of one mirror, of all its databases and clients.
#[derive(Debug, Default)]
pub struct Budget {
    used: AtomicU64,
    max: AtomicU64,
}

impl Budget {
    /// `max` bytes.
    pub fn new(max: u64) -> Self {
        Self { used: AtomicU64::new(0), max: AtomicU64::new(max) }
    }

    /// Changes the limit. What is over it already stays.
    pub fn set_max(&self, max: u64) {
        self.max.store(max, Ordering::Relaxed);
    }

    /// Takes `bytes` for a transaction that has `own` already.
    ///
    /// # Errors
    /// There is no room, because of others or because it is too large by itself. Nothing was taken.
    pub fn take(&self, bytes: u64, own: u64) -> Result<(), DropReason> {
        let max = self.max.load(Ordering::Relaxed);
        if own.saturating_add(bytes) > max {
            return Err(DropReason::TooLarge);
        }
        let before = self.used.fetch_add(bytes, Ordering::Relaxed);
        if before + bytes > max {
            self.give_back(bytes);
            return Err(DropReason::QueueFull);
        }
        Ok(())
    }

    /// Gives `bytes` back.
    pub fn give_back(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Bytes taken.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_never_overdrawn() {
        let budget = Budget::new(100);
        assert_eq!(budget.take(60, 0), Ok(()));
        assert_eq!(budget.take(50, 0), Err(DropReason::QueueFull));
        assert_eq!(budget.take(41, 60), Err(DropReason::TooLarge));
        assert_eq!(budget.take(40, 60), Ok(()));
        assert_eq!(budget.used(), 100);
        budget.give_back(100);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn the_account_balances() {
        let counters = Counters::default();
        counters.transactions.fetch_add(5, Ordering::Relaxed);
        counters.executed.fetch_add(2, Ordering::Relaxed);
        counters.drop_one(DropReason::QueueFull);
        counters.drop_one(DropReason::NotReady);
        assert_eq!((counters.all_dropped(), counters.queued()), (2, 1));
        assert_eq!(DropReason::ALL.map(|reason| reason as usize), [0, 1, 2, 3, 4, 5, 6, 7]);
    }
}
