// SPDX-License-Identifier: Apache-2.0
//! The set of idle servers of one pool: a bitmap of server ordinals, taken lowest first, those near the client before the others.
//!
//! Lowest first means that a single client sees the same server each time (PgBouncer's LIFO, as far as one client can observe it), that
//! few servers are kept warm and that the others age until `server_idle_timeout`. The words are atomic because a kernel lane takes
//! bits from the same set.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Ordinals held by one word.
const WORD_BITS: usize = u64::BITS as usize;

/// How many idle servers are looked at for one that fits, under the core's lock.
const FITTING_TRIES: usize = 64;

/// Where a pool's idle servers are kept, if not in an [`IdleSet`] of user space alone: kernel lanes keep them where their programs take
/// and return them too. All calls come under the core's lock; the kernel does not wait for it.
pub trait SharedIdle<S>: Send + std::fmt::Debug {
    /// Puts a clean server in, from where a program may take it at once. False: the server has something to say first.
    fn push(&mut self, ordinal: u32, server: &mut S) -> bool;
    /// Takes the lowest one at or above `from`, else the lowest. A set that keeps its own turn, shared with programs, ignores `from`.
    fn pop_from(&mut self, from: u32) -> Option<u32>;
    /// As [`Self::pop_from`], one whose parameters have another fingerprint than this.
    fn pop_unlike(&mut self, fingerprint: u32) -> Option<u32>;
    /// Takes the lowest one that fits the client at `lane`, its place in the lane, and links the two there. The server stays parked:
    /// whoever released it to here releases it again, when what the client is about to say is answered.
    fn link_lowest(&mut self, lane: u64) -> Option<u32>;
    /// Takes this one; false if it is not in.
    fn remove(&mut self, ordinal: u32) -> bool;
    /// Those now in, lowest first.
    fn ordinals(&self) -> Vec<u32>;
    /// How many clients wait: while there are any, programs take nothing.
    fn set_waiters(&self, waiters: u32);
    /// Whether programs may take at all (PAUSE).
    fn set_closed(&self, closed: bool);
    /// How many connections there are, if no more are to be opened, whoever waits: then programs may keep requests until a server is free. User space does
    /// not hear of those, so when this ends they are handed to it.
    fn set_full(&self, connections: Option<u32>);
    /// Brings requests that programs keep to servers that are idle.
    fn serve(&self);
    /// This one must not be put back by a program: its release comes to user space.
    fn retire(&self, ordinal: u32);
    /// Keeps one that is in from programs: user space must look at it (`server_check_delay`) before its next use. It stays in.
    fn set_aside(&mut self, ordinal: u32, server: &mut S);
    /// When a program last returned it, if that was after user space did.
    fn returned_at(&self, ordinal: u32) -> Option<Instant>;
    /// The connection in this place is gone.
    fn forget(&mut self, ordinal: u32);
    /// Whether a connection that is gone has this place still: what its end does to the place must not befall another.
    fn is_occupied(&self, ordinal: u32) -> bool;
}

/// A growable bitmap of idle server ordinals.
#[derive(Debug, Default)]
pub struct IdleSet {
    words: Vec<AtomicU64>,
}

impl IdleSet {
    /// Puts `ordinal` in. Grows as needed.
    pub fn push(&mut self, ordinal: u32) {
        let word = ordinal as usize / WORD_BITS;
        if word >= self.words.len() {
            self.words.resize_with(word + 1, AtomicU64::default);
        }
        self.words[word].fetch_or(bit(ordinal), Ordering::Release);
    }

    /// Takes the lowest idle ordinal at or above `from`, else the lowest of all. `from = 0` is LIFO; a moving `from` is round robin.
    pub fn pop_from(&self, from: u32) -> Option<u32> {
        self.pop_range(from).or_else(|| if from > 0 { self.pop_range(0) } else { None })
    }

    fn pop_range(&self, from: u32) -> Option<u32> {
        let first = from as usize / WORD_BITS;
        for (index, word) in self.words.iter().enumerate().skip(first) {
            let mask = if index == first { !0 << (from as usize % WORD_BITS) } else { !0 };
            let mut seen = word.load(Ordering::Relaxed);
            while seen & mask != 0 {
                let lowest = 1u64 << (seen & mask).trailing_zeros();
                match word.compare_exchange_weak(seen, seen & !lowest, Ordering::Acquire, Ordering::Relaxed) {
                    Ok(_) => return Some((index * WORD_BITS) as u32 + lowest.trailing_zeros()),
                    Err(now) => seen = now,
                }
            }
        }
        None
    }

    /// Takes the lowest idle ordinal that `fits`, of the first 64.
    pub fn pop_fitting(&self, fits: impl Fn(u32) -> bool) -> Option<u32> {
        self.iter().take(FITTING_TRIES).find(|&ordinal| fits(ordinal)).filter(|&ordinal| self.remove(ordinal))
    }

    /// Takes this very ordinal out; false if it was not in, for instance because somebody else took it first.
    pub fn remove(&self, ordinal: u32) -> bool {
        match self.words.get(ordinal as usize / WORD_BITS) {
            Some(word) => word.fetch_and(!bit(ordinal), Ordering::Acquire) & bit(ordinal) != 0,
            None => false,
        }
    }

    /// The ordinals now in the set, lowest first.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.words.iter().enumerate().flat_map(|(index, word)| {
            let mut left = word.load(Ordering::Relaxed);
            std::iter::from_fn(move || {
                let lowest = (left != 0).then(|| left.trailing_zeros())?;
                left &= left - 1;
                Some((index * WORD_BITS) as u32 + lowest)
            })
        })
    }

    /// How many are in.
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.load(Ordering::Relaxed).count_ones() as usize).sum()
    }

    /// Whether none is in.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| word.load(Ordering::Relaxed) == 0)
    }
}

fn bit(ordinal: u32) -> u64 {
    1 << (ordinal as usize % WORD_BITS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_the_lowest_first() {
        let mut set = IdleSet::default();
        for ordinal in [70, 3, 64, 5] {
            set.push(ordinal);
        }
        assert_eq!(set.iter().collect::<Vec<_>>(), [3, 5, 64, 70]);
        assert_eq!(set.pop_from(0), Some(3));
        assert!(set.remove(64));
        assert!(!set.remove(64));
        assert_eq!((set.pop_from(0), set.pop_from(0), set.pop_from(0)), (Some(5), Some(70), None));
        assert!(set.is_empty());
    }

    #[test]
    fn round_robin_wraps() {
        let mut set = IdleSet::default();
        for ordinal in 0..100 {
            set.push(ordinal);
        }
        assert_eq!(set.pop_from(98), Some(98));
        assert_eq!(set.pop_from(99), Some(99));
        assert_eq!(set.pop_from(100), Some(0));
        assert_eq!(set.len(), 97);
    }
}
