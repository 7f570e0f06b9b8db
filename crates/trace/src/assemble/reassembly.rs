// SPDX-License-Identifier: Apache-2.0
//! One direction of a TCP connection, put together from its segments.
//!
//! Segments come in the order in which a hook saw them: late, twice, overlapping, or not at all. What is wanted is each byte
//! once, in order, and each missing range once, exactly.
//!
//! A hole is one of three things: it will be filled (reordering on the way), or it never will because the hook saw the segment
//! and its record was lost, or nobody can know yet. [`Order`] says what the hook guarantees.

use std::collections::BTreeMap;

use super::Piece;
use crate::LossReason;

/// Held back at most while waiting for a hole to be filled, bytes. A sender may have more in flight, but only if the hole is
/// the first of a window that large; then the hole is given up.
const HELD_BYTES_MAX: usize = 8 << 20;
/// Longest wait for a hole to be filled, nanoseconds: longer than the first retransmissions of TCP.
const HELD_TIME_NS: u64 = 3_000_000_000;

/// What is certain about the order of segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The hook is at the sender: every byte passes it first in order, so a hole is a loss at once.
    Sent,
    /// The hook is at the receiver, before TCP: a hole is a loss when TCP acknowledges what is in it.
    Received,
}

/// A segment, or a part of one.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    /// Sequence number of the first of `bytes`.
    pub seq: u32,
    /// Bytes before them that were left out on purpose.
    pub skipped: u32,
    /// Payload.
    pub bytes: &'a [u8],
    /// When it was seen, nanoseconds.
    pub time_ns: u64,
}

#[derive(Debug)]
struct Held {
    time_ns: u64,
    skipped: u64,
    bytes: Vec<u8>,
}

/// The state of one direction.
#[derive(Debug)]
pub struct Reassembly {
    order: Order,
    /// Sequence number at position `next`; `None` before the first segment.
    seq: Option<u32>,
    /// Bytes delivered, skipped and lost so far.
    next: u64,
    held: BTreeMap<u64, Held>,
    held_bytes: usize,
}

impl Reassembly {
    /// Nothing seen yet. Position 0 is the first byte after [`Self::start`], or of the first segment.
    pub fn new(order: Order) -> Self {
        Self { order, seq: None, next: 0, held: BTreeMap::new(), held_bytes: 0 }
    }

    /// The connection begins: `seq` is of the first data byte, the one behind the SYN.
    pub fn start(&mut self, seq: u32) {
        if self.seq.is_none() {
            self.seq = Some(seq);
        }
    }

    /// Whether position 0 is known.
    pub fn started(&self) -> bool {
        self.seq.is_some()
    }

    /// Bytes delivered, skipped and lost so far.
    pub fn position(&self) -> u64 {
        self.next
    }

    /// How far `seq` is from the start; `None` before the start, or when it is before it.
    pub fn position_of(&self, seq: u32) -> Option<u64> {
        // Right as long as the two are less than 2 GiB apart, and no TCP window is that large.
        let distance = seq.wrapping_sub(self.seq?) as i32;
        self.next.checked_add_signed(i64::from(distance))
    }

    /// Takes a segment; gives what is contiguous now to `out`.
    pub fn segment(&mut self, segment: Segment<'_>, out: &mut impl FnMut(u64, Piece<'_>)) {
        self.start(segment.seq.wrapping_sub(segment.skipped));
        let Some(begin) = self.position_of(segment.seq.wrapping_sub(segment.skipped)) else {
            // Before the start: a retransmission. What of it is new begins at the position we are at.
            let late = segment.seq.wrapping_add(segment.bytes.len() as u32);
            if let Some(end) = self.position_of(late)
                && end > self.next
            {
                let new = (end - self.next) as usize;
                let from = segment.bytes.len() - new;
                self.deliver(self.next, 0, &segment.bytes[from..], segment.time_ns, out);
            }
            return;
        };
        if begin > self.next {
            if self.order == Order::Sent {
                self.lose_until(begin, segment.time_ns, out);
            } else {
                self.hold(begin, segment);
                self.limit(segment.time_ns, out);
                return;
            }
        }
        self.deliver(begin, u64::from(segment.skipped), segment.bytes, segment.time_ns, out);
        self.release(out);
    }

    /// The receiver expects `ack` next: whatever is missing below was received and not recorded.
    pub fn acknowledged(&mut self, ack: u32, time_ns: u64, out: &mut impl FnMut(u64, Piece<'_>)) {
        let Some(position) = self.position_of(ack) else { return };
        while let Some((&begin, _)) = self.held.first_key_value() {
            if begin > position {
                break;
            }
            self.lose_until(begin, time_ns, out);
            self.release(out);
        }
        self.lose_until(position, time_ns, out);
    }

    /// Gives up holes that nobody filled in time. To be called now and then.
    pub fn tick(&mut self, now_ns: u64, out: &mut impl FnMut(u64, Piece<'_>)) {
        while let Some((&begin, held)) = self.held.first_key_value() {
            if held.time_ns.saturating_add(HELD_TIME_NS) > now_ns {
                break;
            }
            self.lose_until(begin, now_ns, out);
            self.release(out);
        }
    }

    /// No more segments will come: delivers what is held, with the holes before it as lost.
    pub fn finish(&mut self, time_ns: u64, out: &mut impl FnMut(u64, Piece<'_>)) {
        while let Some((&begin, _)) = self.held.first_key_value() {
            self.lose_until(begin, time_ns, out);
            self.release(out);
        }
    }

    /// Everything up to `position` that has not come is lost.
    fn lose_until(&mut self, position: u64, time_ns: u64, out: &mut impl FnMut(u64, Piece<'_>)) {
        if position > self.next {
            out(time_ns, Piece::Lost(position - self.next, LossReason::Gap));
            self.advance(position);
        }
    }

    fn advance(&mut self, position: u64) {
        let by = position - self.next;
        self.seq = self.seq.map(|seq| seq.wrapping_add(by as u32));
        self.next = position;
    }

    /// Bytes from position `begin`, which is not behind a hole: first `skipped` that are not there, then `bytes`.
    fn deliver(
        &mut self,
        begin: u64,
        skipped: u64,
        bytes: &[u8],
        time_ns: u64,
        out: &mut impl FnMut(u64, Piece<'_>),
    ) {
        let first = begin + skipped;
        if first > self.next {
            out(time_ns, Piece::Skipped(first - self.next));
            self.advance(first);
        }
        let end = first + bytes.len() as u64;
        if end > self.next {
            let new = &bytes[(self.next - first) as usize..];
            out(time_ns, Piece::Bytes(new));
            self.advance(end);
        }
    }

    fn hold(&mut self, begin: u64, segment: Segment<'_>) {
        let len = u64::from(segment.skipped) + segment.bytes.len() as u64;
        let longer = |held: &Held| held.skipped + held.bytes.len() as u64 >= len;
        if self.held.get(&begin).is_some_and(longer) {
            return;
        }
        let held = Held {
            time_ns: segment.time_ns,
            skipped: u64::from(segment.skipped),
            bytes: segment.bytes.to_vec(),
        };
        self.held_bytes += held.bytes.len();
        if let Some(old) = self.held.insert(begin, held) {
            self.held_bytes -= old.bytes.len();
        }
    }

    fn limit(&mut self, time_ns: u64, out: &mut impl FnMut(u64, Piece<'_>)) {
        while self.held_bytes > HELD_BYTES_MAX {
            let Some((&begin, _)) = self.held.first_key_value() else { return };
            self.lose_until(begin, time_ns, out);
            self.release(out);
        }
    }

    /// Delivers what is held and no longer behind a hole.
    fn release(&mut self, out: &mut impl FnMut(u64, Piece<'_>)) {
        while let Some(entry) = self.held.first_entry() {
            if *entry.key() > self.next {
                return;
            }
            let (begin, held) = entry.remove_entry();
            self.held_bytes -= held.bytes.len();
            self.deliver(begin, held.skipped, &held.bytes, held.time_ns, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What came out: bytes with their positions, and ranges that did not come.
    #[derive(Debug, Default)]
    struct Out {
        next: u64,
        bytes: Vec<(u64, u8)>,
        lost: Vec<(u64, u64)>,
        skipped: u64,
    }

    impl Out {
        fn take(&mut self, piece: Piece<'_>) {
            match piece {
                Piece::Bytes(bytes) => {
                    assert!(!bytes.is_empty());
                    self.bytes.extend(bytes.iter().zip(self.next..).map(|(&byte, at)| (at, byte)));
                }
                Piece::Skipped(len) => self.skipped += len,
                Piece::Lost(len, _) => self.lost.push((self.next, self.next + len)),
            }
            assert!(!piece.is_empty());
            self.next += piece.len();
        }

        fn lost_bytes(&self) -> u64 {
            self.lost.iter().map(|(from, to)| to - from).sum()
        }
    }

    fn segment(seq: u32, bytes: &[u8]) -> Segment<'_> {
        Segment { seq, skipped: 0, bytes, time_ns: 0 }
    }

    #[test]
    fn retransmissions_and_overlaps_are_delivered_once_across_the_wrap() {
        let mut stream = Reassembly::new(Order::Received);
        let mut out = Out::default();
        let base = u32::MAX - 2;
        for (at, bytes) in [(0, &b"abcd"[..]), (0, b"abcd"), (2, b"cdef"), (8, b"ij"), (6, b"gh"), (3, b"d")]
        {
            stream.segment(segment(base.wrapping_add(at), bytes), &mut |_, piece| out.take(piece));
        }
        assert_eq!(out.bytes.iter().map(|&(_, byte)| byte).collect::<Vec<_>>(), b"abcdefghij");
        assert_eq!((out.lost_bytes(), stream.position()), (0, 10));
    }

    #[test]
    fn an_acknowledged_hole_is_a_loss_of_its_exact_length() {
        let mut stream = Reassembly::new(Order::Received);
        let mut out = Out::default();
        stream.start(100);
        stream.segment(segment(110, b"after"), &mut |_, piece| out.take(piece));
        assert!(out.bytes.is_empty(), "it may still come");
        stream.acknowledged(115, 1, &mut |_, piece| out.take(piece));
        assert_eq!(out.lost, [(0, 10)]);
        assert_eq!(out.bytes.len(), 5);
    }

    #[test]
    fn a_hole_at_the_sender_is_a_loss_at_once() {
        let mut stream = Reassembly::new(Order::Sent);
        let mut out = Out::default();
        stream.start(0);
        stream.segment(segment(4, b"ef"), &mut |_, piece| out.take(piece));
        assert_eq!((out.lost.as_slice(), out.bytes.len()), (&[(0, 4)][..], 2));
    }

    #[test]
    fn what_was_left_out_is_not_a_loss() {
        let mut stream = Reassembly::new(Order::Sent);
        let mut out = Out::default();
        stream.segment(segment(1, b"head"), &mut |_, piece| out.take(piece));
        let tail = Segment { seq: 105, skipped: 100, bytes: b"tail", time_ns: 0 };
        stream.segment(tail, &mut |_, piece| out.take(piece));
        stream.segment(tail, &mut |_, piece| out.take(piece));
        assert_eq!((out.skipped, out.lost_bytes(), out.bytes.len()), (100, 0, 8));
    }

    #[test]
    fn a_hole_is_given_up_in_time() {
        let mut stream = Reassembly::new(Order::Received);
        let mut out = Out::default();
        stream.start(0);
        stream.segment(segment(4, b"ef"), &mut |_, piece| out.take(piece));
        stream.tick(HELD_TIME_NS - 1, &mut |_, piece| out.take(piece));
        assert_eq!(out.next, 0);
        stream.tick(HELD_TIME_NS, &mut |_, piece| out.take(piece));
        assert_eq!((out.lost.as_slice(), out.next), (&[(0, 4)][..], 6));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        /// A stream cut anyhow, segments lost, repeated, overlapping and out of order: every byte is delivered once with its
        /// own position, or is in exactly one loss.
        #[test]
        fn every_byte_comes_once_or_is_lost_once(
            len in 1usize..400,
            base in any::<u32>(),
            sent in any::<bool>(),
            cuts in proptest::collection::vec((0usize..400, 1usize..60, any::<bool>(), 0usize..6), 1..60),
        ) {
            let data: Vec<u8> = (0..len).map(|i| (i * 7 + i / 251) as u8).collect();
            let order = if sent { Order::Sent } else { Order::Received };
            let mut stream = Reassembly::new(order);
            let mut out = Out::default();
            stream.start(base);
            // In order for a sender's hook; nearly in order for a receiver's.
            let mut segments: Vec<(usize, usize, bool, usize)> =
                cuts.into_iter().filter(|&(from, ..)| from < len).collect();
            segments.sort_by_key(|&(from, _, _, late)| from + if sent { 0 } else { late * 20 });
            let mut present = vec![false; len];
            let mut furthest = 0;
            for (from, size, dropped, _) in segments {
                let to = (from + size).min(len);
                if dropped {
                    continue;
                }
                if !sent || from >= furthest {
                    present[from..to].fill(true);
                } else {
                    // A sender's hook sees old bytes again only as a retransmission: those that were new are lost already.
                    present[furthest.min(to)..to].fill(true);
                }
                furthest = furthest.max(to);
                stream.segment(segment(base.wrapping_add(from as u32), &data[from..to]), &mut |_, piece| out.take(piece));
            }
            stream.acknowledged(base.wrapping_add(len as u32), 1, &mut |_, piece| out.take(piece));
            stream.finish(1, &mut |_, piece| out.take(piece));
            prop_assert_eq!(out.next, len as u64);
            for &(at, byte) in &out.bytes {
                prop_assert_eq!(byte, data[at as usize]);
            }
            prop_assert_eq!(out.bytes.len() as u64 + out.lost_bytes(), len as u64);
            prop_assert_eq!(out.bytes.len(), present.iter().filter(|&&p| p).count());
        }
    }
}
