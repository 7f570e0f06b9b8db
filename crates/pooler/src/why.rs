// SPDX-License-Identifier: Apache-2.0
//! Why a transaction ran in user space although the process has kernel lanes. Each has one reason; `SHOW KERNEL` counts them, `docs/lanes.md`
//! tells what they mean, and the tests of the lanes fail for one that nobody gave.
//!
//! A client carries the reason of its transactions in [`Client::why`](crate::client::Client::why): what sent it up, or what kept it from being
//! offered. It loses it when a transaction is over, just before it is offered to its lane again, so that a way back to user space that gives
//! no reason shows.

use std::sync::atomic::{AtomicU64, Ordering};

use underpass_sockmap::Reason;

macro_rules! reasons {
    ($($name:literal $variant:ident $meaning:literal,)*) => {
        /// What only user space knows; what programs say is a [`Reason`].
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Own { $(#[doc = $meaning] $variant,)* }

        impl Own {
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// As in docs/lanes.md, which a test compares.
            #[cfg(test)]
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$variant => $meaning),* }
            }
        }
    };
}

reasons! {
    "unexplained" Unexplained "Nobody said why: a bug.",
    "failed" Failed "The kernel refused a call that should work; the log says which. A bug, or another program's hand in our sockets.",
    "pool_mode" PoolMode "`pool_mode = statement`.",
    "reset_query" ResetQuery "`server_reset_query_always` in transaction pooling.",
    "simple_query" SimpleQuery "`disable_pqexec`.",
    "check_query" CheckQuery "A `server_check_query` that does more than ask for life.",
    "packet_size" PacketSize "RELOAD made `max_packet_size` smaller than it was at the start.",
    "mirrored" Mirrored "The database is mirrored in a way that lanes do not carry.",
    "probe" Probe "The pooler's own question who a server is, for a mirror or a recording.",
    "recorded" Recorded "The pooler records (`trace_dir`).",
    "no_place" NoPlace "The pool has no place in the lanes: they were full, or could not carry it when it was made.",
    "replication" Replication "A replication connection.",
    "client_tls" ClientTls "The client has TLS.",
    "client_unix" ClientUnix "The client came by a unix socket.",
    "client_refused" ClientRefused "The client could not be put into its map: all slots are taken, or it is about to close.",
    "server_tls" ServerTls "The server has TLS.",
    "server_unix" ServerUnix "The server is reached by a unix socket.",
    "server_none" ServerNone "No server of the pool is in a map: there was none when the client was to be offered, or they are of a kind that lanes do not carry.",
    "server_refused" ServerRefused "The server could not be put into its map.",
    "contended" Contended "The pool's queue was long, 64 clients within 100 ms or 8 at once: user space forwarded the requests, and what cannot be fed whole.",
    "rest" Rest "A client that mostly sends what a lane refuses: half a second apart from it.",
    "unread" Unread "The client had more to say, or could have had, when it was to be offered.",
    "unwritten" Unwritten "The client had not taken its answers when it was to be offered.",
    "behind_lane" BehindLane "What a lane had forwarded was still on its way when the client was to be offered.",
    "server_unread" ServerUnread "The server of a session had more to say when the link was to be given to its lane.",
    "busy" Busy "A program was just running when the client was to be offered.",
    "suspended" Suspended "SUSPEND.",
    "tap" Tap "The tap for mirrors could not be set.",
    "hang_up" HangUp "The client closed its end, perhaps with requests outstanding.",
    "taken" Taken "User space took the client from its lane: a cancel request, RELOAD, SUSPEND, shutdown, a timeout, a mirror, a full socket, or a test.",
}

/// Why the transactions of a client run in user space just now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    Own(Own),
    /// A program gave it up.
    Program(Reason),
}

impl Default for Why {
    fn default() -> Self {
        Self::Own(Own::Unexplained)
    }
}

impl From<Own> for Why {
    fn from(own: Own) -> Self {
        Self::Own(own)
    }
}

const COUNT: usize = Own::ALL.len() + Reason::ALL.len();

impl Why {
    fn index(self) -> usize {
        match self {
            Self::Own(own) => own as usize,
            Self::Program(reason) => Own::ALL.len() + reason as usize,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Own(own) => own.name(),
            Self::Program(reason) => reason.name(),
        }
    }

    fn all() -> impl Iterator<Item = Self> {
        let programs = Reason::ALL.iter().map(|&reason| Self::Program(reason));
        Own::ALL.iter().map(|&own| Self::Own(own)).chain(programs)
    }
}

/// Transactions of one worker in user space, by reason. Only that worker writes, so nothing is locked; cache lines of its own keep readers
/// of the others' counts away.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Tally([AtomicU64; COUNT]);

impl Default for Tally {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; COUNT])
    }
}

impl Tally {
    /// Counts transactions that ended. Only for the worker whose tally it is.
    pub fn add(&self, why: Why, transactions: u32) {
        let count = &self.0[why.index()];
        count.store(count.load(Ordering::Relaxed) + u64::from(transactions), Ordering::Relaxed);
    }

    /// The counts of all workers by name; those that never happened are left out.
    pub fn sum(tallies: &[Self]) -> Vec<(&'static str, u64)> {
        let total = |why: Why| {
            let counts = tallies.iter().map(|tally| tally.0[why.index()].load(Ordering::Relaxed));
            (why.name(), counts.sum())
        };
        Why::all().map(total).filter(|&(_, count)| count > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manual_lists_every_reason() {
        let manual = include_str!("../../../docs/lanes.md");
        for own in Own::ALL {
            let line = format!("| {} | {} |", own.name(), own.meaning());
            assert!(manual.contains(&line), "docs/lanes.md lacks {line}");
        }
    }

    #[test]
    fn names_and_counters_are_different() {
        let mut names: Vec<&str> = Why::all().map(Why::name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), COUNT);
        assert!(Why::all().map(Why::index).eq(0..COUNT));
    }

    #[test]
    fn workers_are_added_up() {
        let tallies = [Tally::default(), Tally::default()];
        tallies[0].add(Why::Program(Reason::NoServer), 2);
        tallies[1].add(Why::Program(Reason::NoServer), 1);
        tallies[1].add(Own::ClientTls.into(), 4);
        tallies[1].add(Why::default(), 0);
        assert_eq!(Tally::sum(&tallies), [("client_tls", 4), ("no_server", 3)]);
    }
}
