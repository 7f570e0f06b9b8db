// SPDX-License-Identifier: Apache-2.0
//! Which host of a list, and which address of a name, a connection goes to.
//!
//! Connections are numbered by *turns*. A turn names a host of the list (`turn` modulo its length) and, each time round the list, the next
//! address of a host that has several. A connection that fails takes the pool to the next turn at once, until every place has been
//! tried: only then does `server_login_retry` pause it, as it does for a database with a single host.

/// Where one connection went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Turn {
    pub number: usize,
    /// How many places there are to try: hosts of the list times addresses of this one.
    pub places: usize,
}

/// The failures of a pool in a row.
#[derive(Debug, Default)]
pub(crate) struct Round(Option<UnderWay>);

#[derive(Debug)]
struct UnderWay {
    next: usize,
    tried: usize,
    places: usize,
}

impl Round {
    /// The turn that the next connection takes because the one before failed; `None` if nothing did.
    pub fn next(&self) -> Option<usize> {
        self.0.as_ref().map(|round| round.next)
    }

    /// A connection failed. True if there is a place that was not tried since the last success or the last whole round.
    pub fn failed(&mut self, turn: Turn) -> bool {
        let round = self.0.get_or_insert(UnderWay { next: turn.number, tried: 0, places: turn.places });
        if turn.number != round.next {
            // One of several that set out at once: the round goes on without counting the same place twice.
            return true;
        }
        round.next = turn.number.wrapping_add(1);
        round.tried += 1;
        round.places = round.places.max(turn.places);
        if round.tried < round.places {
            return true;
        }
        self.0 = None;
        false
    }

    /// A connection succeeded.
    pub fn succeeded(&mut self) {
        self.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(number: usize, places: usize) -> Turn {
        Turn { number, places }
    }

    #[test]
    fn every_place_is_tried_once_before_the_pause() {
        let mut round = Round::default();
        assert_eq!(round.next(), None);
        assert!(round.failed(turn(7, 3)));
        assert_eq!(round.next(), Some(8));
        assert!(round.failed(turn(8, 3)));
        assert!(!round.failed(turn(9, 3)), "all three failed");
        assert_eq!(round.next(), None);
        assert!(!Round::default().failed(turn(0, 1)), "a single host has no other");
    }

    #[test]
    fn connections_that_fail_together_count_their_place_once() {
        let mut round = Round::default();
        assert!(round.failed(turn(0, 2)));
        assert!(round.failed(turn(0, 2)), "the same place");
        assert_eq!(round.next(), Some(1));
        assert!(!round.failed(turn(1, 2)));
    }

    #[test]
    fn a_name_with_more_addresses_lengthens_the_round() {
        let mut round = Round::default();
        assert!(round.failed(turn(0, 2)));
        assert!(round.failed(turn(1, 4)), "the second host has two addresses");
        assert!(round.failed(turn(2, 2)));
        assert!(!round.failed(turn(3, 4)));
    }

    #[test]
    fn success_ends_the_round() {
        let mut round = Round::default();
        assert!(round.failed(turn(4, 2)));
        round.succeeded();
        assert_eq!(round.next(), None);
        assert!(round.failed(turn(9, 2)), "a new round");
    }
}
