// SPDX-License-Identifier: Apache-2.0
//! Which prepared statements of a session have their texts in the trace. Those of before the recording have not: somebody else has to tell them.

use foldhash::{HashMap, HashSet};
use underpass_mysql::command::LAST_PREPARED;

use crate::assemble::WANTED_NS;

/// Statements without text that are remembered: a client may execute numbers that no statement has.
const UNKNOWN_MAX: usize = 1024;

/// The statements of a session, by number.
#[derive(Debug, Default)]
pub(super) struct Texts {
    known: HashSet<u32>,
    /// Those without, and when each was used first, nanoseconds.
    unknown: HashMap<u32, u64>,
}

impl Texts {
    /// The server gave a statement this number; its text was in the request.
    pub(super) fn prepared(&mut self, number: u32) {
        self.unknown.remove(&number);
        self.known.insert(number);
    }

    /// A statement is executed. Returns whether its text is to be told.
    pub(super) fn executed(&mut self, number: u32, time_ns: u64) -> bool {
        if number == LAST_PREPARED || self.known.contains(&number) {
            return false;
        }
        if self.unknown.len() < UNKNOWN_MAX {
            self.unknown.entry(number).or_insert(time_ns);
        }
        self.unknown.contains_key(&number)
    }

    /// It is no more.
    pub(super) fn closed(&mut self, number: u32) {
        self.unknown.remove(&number);
        self.known.remove(&number);
    }

    /// None are any more.
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Whether it is still worth waiting for one.
    pub(super) fn is_wanted(&self, now_ns: u64) -> bool {
        self.unknown.values().any(|&from_ns| now_ns < from_ns.saturating_add(WANTED_NS))
    }
}
