// SPDX-License-Identifier: Apache-2.0
//! Cancel requests on their way to other poolers: at most `pool_size` of a `[peers]` entry at the same time, over all workers; the others
//! wait for their turn in the order in which they came.

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use foldhash::fast::RandomState;
use underpass_pool::core::ClientRef;

use crate::shared::lock;

/// A cancel request for a peer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PeerCancel {
    /// The whole CancelRequest.
    pub request: Vec<u8>,
    /// The client connection that asked.
    pub asker: ClientRef,
    pub since: Instant,
}

/// What [`PeerQueues::enter`] says.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Send it; say [`PeerQueues::leave`] when that is done or has failed.
    Now(PeerCancel),
    /// Another one's [`PeerQueues::leave`] hands it out.
    Later,
    /// Too many wait.
    Refused(PeerCancel),
}

/// The requests for all peers.
#[derive(Default)]
pub(crate) struct PeerQueues(Mutex<HashMap<u16, Queue, RandomState>>);

#[derive(Default)]
struct Queue {
    in_flight: u32,
    waiting: VecDeque<PeerCancel>,
}

impl PeerQueues {
    /// Asks whether `cancel` may be sent to `peer` now. `limit`: most in flight; `waiting_max`: most that wait.
    pub fn enter(&self, peer: u16, limit: u32, waiting_max: u32, cancel: PeerCancel) -> Turn {
        let mut queues = lock(&self.0);
        let queue = queues.entry(peer).or_default();
        if queue.waiting.is_empty() && queue.in_flight < limit.max(1) {
            queue.in_flight += 1;
            return Turn::Now(cancel);
        }
        if queue.waiting.len() >= waiting_max as usize {
            return Turn::Refused(cancel);
        }
        queue.waiting.push_back(cancel);
        Turn::Later
    }

    /// A request is done with: those that may be sent instead. After a RELOAD with another limit that may be several, or none.
    pub fn leave(&self, peer: u16, limit: u32) -> Vec<PeerCancel> {
        let mut queues = lock(&self.0);
        let Some(queue) = queues.get_mut(&peer) else { return Vec::new() };
        queue.in_flight = queue.in_flight.saturating_sub(1);
        let free = limit.max(1).saturating_sub(queue.in_flight) as usize;
        let next: Vec<_> = queue.waiting.drain(..free.min(queue.waiting.len())).collect();
        queue.in_flight += next.len() as u32;
        next
    }

    /// Those that have waited for `limit` or longer.
    pub fn expire(&self, limit: Duration, now: Instant) -> Vec<PeerCancel> {
        let mut expired = Vec::new();
        for queue in lock(&self.0).values_mut() {
            while queue
                .waiting
                .front()
                .is_some_and(|first| now.saturating_duration_since(first.since) >= limit)
            {
                expired.extend(queue.waiting.pop_front());
            }
        }
        expired
    }

    /// How many requests wait for `peer`.
    pub fn waiting(&self, peer: u16) -> usize {
        lock(&self.0).get(&peer).map_or(0, |queue| queue.waiting.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cancel(slot: u32, since: Instant) -> PeerCancel {
        PeerCancel { request: vec![slot as u8], asker: ClientRef { worker: 0, slot, generation: 1 }, since }
    }

    #[test]
    fn as_many_as_allowed_are_in_flight_and_the_first_to_wait_is_the_next() {
        let (queues, now) = (PeerQueues::default(), Instant::now());
        let enter = |slot| queues.enter(7, 2, 2, cancel(slot, now));
        assert_eq!(enter(1), Turn::Now(cancel(1, now)));
        assert_eq!(enter(2), Turn::Now(cancel(2, now)));
        assert_eq!((enter(3), enter(4)), (Turn::Later, Turn::Later));
        assert_eq!(enter(5), Turn::Refused(cancel(5, now)));
        assert_eq!(queues.enter(8, 2, 2, cancel(6, now)), Turn::Now(cancel(6, now)), "each peer has its own");
        assert_eq!(queues.waiting(7), 2);
        assert_eq!(queues.leave(7, 2), [cancel(3, now)]);
        assert_eq!(queues.leave(7, 1), [], "the limit has been lowered");
        assert_eq!(queues.leave(7, 1), [cancel(4, now)]);
        assert_eq!(queues.leave(7, 1), []);
        assert_eq!(enter(9), Turn::Now(cancel(9, now)));
    }

    #[test]
    fn waiting_has_an_end() {
        let (queues, now) = (PeerQueues::default(), Instant::now());
        let limit = Duration::from_secs(10);
        queues.enter(7, 1, 9, cancel(1, now));
        queues.enter(7, 1, 9, cancel(2, now));
        queues.enter(7, 1, 9, cancel(3, now + limit));
        assert_eq!(queues.expire(limit, now + limit), [cancel(2, now)]);
        assert_eq!(queues.leave(7, 1), [cancel(3, now + limit)]);
    }
}
