// SPDX-License-Identifier: Apache-2.0
//! Entry points of the fuzz targets `assemble_session` and `assemble_segments`. Each takes any bytes and panics when an
//! invariant breaks.

use super::{Audit, Known, Order, Origin, Piece, Reassembly, Segment, machine};
use crate::{Direction, EndReason, Level, LossReason, Protocol, Record, SessionId, Source, Transport};

/// One session. The first byte says whether it is joined (lowest bit) and whether its protocol is MySQL's; then pieces: a byte of direction (lowest bit) and kind (next two: 0
/// skipped, 1 lost, else bytes), a byte of length, and so many bytes.
pub fn session(data: &[u8]) {
    let Some((&first, mut rest)) = data.split_first() else { return };
    let mut pieces = Vec::new();
    while let [how, len, more @ ..] = rest {
        let (bytes, after) = more.split_at(usize::from(*len).min(more.len()));
        pieces.push((how & 1 != 0, how >> 1 & 3, bytes));
        rest = after;
    }
    let protocol = if first & 2 == 0 { Protocol::Postgres } else { Protocol::Mysql };
    arbitrary(protocol, first & 1 != 0, pieces.into_iter());
}

/// A session of arbitrary pieces: direction, kind (0 skipped, 1 lost, else bytes), bytes. Panics when the accounts of its end do
/// not add up.
pub(super) fn arbitrary<'a>(
    protocol: Protocol,
    join: bool,
    pieces: impl Iterator<Item = (bool, u8, &'a [u8])>,
) {
    let mut session = machine(
        protocol,
        Origin {
            session: SessionId(1),
            source: Source::Synthetic,
            transport: Transport::Unknown,
            peer: None,
            level: Level::Full,
        },
    );
    if join {
        session.joined(Known::default());
    }
    let mut sink = |record: Record<'_>| {
        if let Record::SessionEnd(end) = record {
            assert!(end.frontend.add_up() && end.backend.add_up(), "{end:?}");
        }
    };
    for (front, kind, bytes) in pieces {
        let direction = if front { Direction::Frontend } else { Direction::Backend };
        let piece = match kind {
            0 => Piece::Skipped(bytes.len() as u64),
            1 => Piece::Lost(bytes.len() as u64, LossReason::Gap),
            _ => Piece::Bytes(bytes),
        };
        session.piece(direction, 1, piece, &mut sink);
        session.text(1, bytes, &mut sink);
    }
    session.end(2, EndReason::Unknown, Audit::default(), &mut sink);
}

/// One direction of a connection. The first byte is the order; then segments: two bytes of distance from the start, a byte of
/// bytes left out before, one of length, one of what else happens (an acknowledgement, time). What comes out must be what was
/// sent at that place, and the positions must not go back.
pub fn segments(data: &[u8]) {
    let Some((&order, mut rest)) = data.split_first() else { return };
    let order = if order & 1 == 0 { Order::Sent } else { Order::Received };
    let sent: Vec<u8> = (0..0x1_0200u32).map(|at| (at ^ at >> 8) as u8).collect();
    let base = u32::MAX - 0x4000;
    let mut stream = Reassembly::new(order);
    stream.start(base);
    let mut next = 0;
    let mut take = |_: u64, piece: Piece<'_>| {
        assert!(!piece.is_empty());
        if let Piece::Bytes(bytes) = piece {
            assert!(sent[next as usize..].starts_with(bytes), "other bytes at {next}");
        }
        next += piece.len();
    };
    while let [high, low, skipped, len, what, after @ ..] = rest {
        let at = u32::from(u16::from_be_bytes([*high, *low]));
        let segment = Segment {
            seq: base.wrapping_add(at),
            skipped: u32::from(*skipped).min(at),
            bytes: &sent[at as usize..at as usize + usize::from(*len)],
            time_ns: at.into(),
        };
        stream.segment(segment, &mut take);
        match what & 3 {
            0 => stream.acknowledged(base.wrapping_add(at), 1, &mut take),
            1 => stream.tick(u64::from(*what) << 32, &mut take),
            _ => {}
        }
        rest = after;
    }
    stream.finish(2, &mut take);
    assert_eq!(next, stream.position());
}

#[cfg(test)]
mod tests {
    use underpass_wire::fuzzing::over_corpus;

    #[test]
    fn corpus_of_sessions() {
        over_corpus("assemble_session", 2, 800, super::session);
    }

    #[test]
    fn corpus_of_segments() {
        over_corpus("assemble_segments", 2, 800, super::segments);
    }
}
