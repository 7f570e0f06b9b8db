// SPDX-License-Identifier: Apache-2.0
//! The framer: its pieces, its state, and that no split of a stream changes the frames.

use proptest::prelude::*;
use underpass_wire::{FrameError, Framer, Header, MAX_MESSAGE_LEN, Piece};

fn pieces<'a>(framer: &mut Framer, mut chunk: &'a [u8]) -> Vec<Piece<'a>> {
    let mut all = Vec::new();
    while let Some(piece) = framer.next(&mut chunk).unwrap() {
        all.push(piece);
    }
    assert!(chunk.is_empty());
    all
}

const QUERY: Header = Header { tag: b'Q', len: 7 };
const SYNC: Header = Header { tag: b'S', len: 4 };

#[test]
fn whole_messages() {
    let mut framer = Framer::new(MAX_MESSAGE_LEN);
    let found = pieces(&mut framer, b"Q\0\0\0\x07ab\0S\0\0\0\x04");
    let end = |header| Piece::End(header);
    assert_eq!(
        found,
        [Piece::Header(QUERY), Piece::Body(b"ab\0"), end(QUERY), Piece::Header(SYNC), end(SYNC)]
    );
    assert!(framer.at_boundary());
}

#[test]
fn split_in_header_and_body() {
    let mut framer = Framer::new(MAX_MESSAGE_LEN);
    assert_eq!(pieces(&mut framer, b"Q\0\0"), []);
    assert_eq!((framer.pending_header(), framer.at_boundary()), (&b"Q\0\0"[..], false));
    assert_eq!(framer.header(), None);
    assert_eq!(pieces(&mut framer, b""), []);
    assert_eq!(pieces(&mut framer, b"\0\x07"), [Piece::Header(QUERY)]);
    assert_eq!((framer.header(), framer.need(), framer.pending_header()), (Some(QUERY), 3, &b""[..]));
    assert_eq!(pieces(&mut framer, b"a"), [Piece::Body(b"a")]);
    assert_eq!(framer.parts(), (2, *b"Q\0\0\0\x07", 5));
    assert_eq!(pieces(&mut framer, b"b\0S"), [Piece::Body(b"b\0"), Piece::End(QUERY)]);
    assert_eq!(framer.pending_header(), b"S");
}

/// The end of a message without body is seen in the chunk of its header's last byte.
#[test]
fn empty_body_ends_at_once() {
    let mut framer = Framer::new(MAX_MESSAGE_LEN);
    assert_eq!(pieces(&mut framer, b"S\0\0\0"), []);
    assert_eq!(pieces(&mut framer, b"\x04"), [Piece::Header(SYNC), Piece::End(SYNC)]);
    assert!(framer.at_boundary());
}

#[test]
fn errors_keep_the_position() {
    for (word, error) in [
        (b"\0\0\0\x03", FrameError::LengthTooSmall),
        (b"\0\0\0\x65", FrameError::LengthTooLarge),
        (b"\xff\xff\xff\xff", FrameError::LengthTooLarge),
    ] {
        let mut framer = Framer::new(100);
        assert_eq!(pieces(&mut framer, &[&b"S\0\0\0\x04Q"[..], &word[..2]].concat()).len(), 2);
        let mut chunk = &[&word[2..], b"tail"].concat()[..];
        for _ in 0..2 {
            assert_eq!(framer.next(&mut chunk), Err(error));
            assert_eq!((chunk.len(), framer.pending_header().len()), (6, 3));
        }
    }
}

/// The largest message that PostgreSQL takes passes through without memory of its size.
#[test]
fn huge_message_in_small_chunks() {
    let mut framer = Framer::new(MAX_MESSAGE_LEN);
    let header = Header { tag: b'd', len: MAX_MESSAGE_LEN };
    assert_eq!(pieces(&mut framer, &header.to_bytes()), [Piece::Header(header)]);
    let chunk = vec![0; 1 << 20];
    let mut left = header.body_len();
    while left > chunk.len() {
        assert_eq!(pieces(&mut framer, &chunk).len(), 1);
        left -= chunk.len();
        assert_eq!(framer.need(), left as u64);
    }
    assert_eq!(pieces(&mut framer, &chunk[..left]).last(), Some(&Piece::End(header)));
}

#[test]
fn takes_over_only_possible_states() {
    let hdr = *b"Q\0\0\0\x07";
    let from = |need, hdr, hdr_len| Framer::from_parts(100, need, hdr, hdr_len).is_some();
    assert!(from(0, hdr, 0) && from(0, hdr, 4) && from(1, hdr, 5) && from(3, hdr, 5));
    assert!(!from(0, hdr, 5), "a message without a missing byte has ended");
    assert!(!from(4, hdr, 5), "more than the body");
    assert!(!from(1, hdr, 0), "a body without a header");
    assert!(!from(0, hdr, 6));
    assert!(!from(1, *b"Q\0\0\x01\0", 5), "above the limit");
}

proptest! {
    /// Frames are those of the unsplit stream, and the pieces are exactly the stream's bytes in order.
    #[test]
    fn split_invariance(
        messages in prop::collection::vec((any::<u8>(), prop::collection::vec(any::<u8>(), 0..40)), 0..20),
        cuts in prop::collection::vec(0usize..20, 1..60),
    ) {
        let mut stream = Vec::new();
        for (tag, body) in &messages {
            stream.extend_from_slice(&Header::new(*tag, body.len()).to_bytes());
            stream.extend_from_slice(body);
        }
        let mut framer = Framer::new(MAX_MESSAGE_LEN);
        let mut found: Vec<(u8, Vec<u8>)> = Vec::new();
        let mut ends = 0;
        let mut rest = &stream[..];
        let mut cuts = cuts.iter().cycle();
        let mut rounds = 0;
        while !rest.is_empty() {
            rounds += 1;
            let size = if rounds > 5000 { rest.len() } else { (*cuts.next().unwrap()).min(rest.len()) };
            let (chunk, later) = rest.split_at(size);
            for piece in pieces(&mut framer, chunk) {
                match piece {
                    Piece::Header(header) => found.push((header.tag, Vec::new())),
                    Piece::Body(part) => found.last_mut().unwrap().1.extend_from_slice(part),
                    Piece::End(_) => ends += 1,
                }
            }
            rest = later;
        }
        prop_assert_eq!(ends, messages.len());
        prop_assert_eq!(found, messages);
        prop_assert!(framer.at_boundary());
    }
}
