// SPDX-License-Identifier: Apache-2.0
//! What a search behind damage costs, and a chain that ends early.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::format::{VERSION_MAJOR, encode_trailer};

/// Counts the bytes that are read of it.
#[derive(Debug)]
struct Counted(Cursor<Vec<u8>>, Arc<AtomicU64>);

impl Read for Counted {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let len = self.0.read(bytes)?;
        self.1.fetch_add(len as u64, Ordering::Relaxed);
        Ok(len)
    }
}

impl Seek for Counted {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.0.seek(to)
    }
}

impl Input for Counted {}

fn header(number: u32, stored_len: u32) -> [u8; BLOCK_HEADER_LEN] {
    let (kind, codec, raw_len) = (block_kind::RECORDS, block_codec::NONE, stored_len);
    let header = BlockHeader {
        kind,
        codec,
        flags: 0,
        number,
        records: 0,
        raw_len,
        stored_len,
        kinds: 0,
        first_ns: 0,
        last_ns: 0,
        losses: 0,
        lost_bytes: 0,
        payload_crc: crc32c::crc32c(b""),
    };
    header.encode()
}

/// A segment's head with these bytes behind it: its blocks, what is damaged, and how many bytes were read for one of the file.
fn search(body: &[u8]) -> (u64, Damage, u64) {
    let (major, minor, segment, trace_id) = (VERSION_MAJOR, 0, 1, [7; 16]);
    let mut bytes = Head { major, minor, segment, trace_id }.encode().to_vec();
    bytes.extend_from_slice(body);
    let (end, count) = (bytes.len() as u64, Arc::new(AtomicU64::new(0)));
    let input = Box::new(Counted(Cursor::new(bytes), Arc::clone(&count)));
    let (_, mut segment) = Segment::new(PathBuf::from("(test)"), input, end).unwrap();
    let (mut blocks, mut damage) = (0, Damage::default());
    while let Some(header) = segment.next_block(&mut damage).unwrap() {
        segment.skip(&header);
        blocks += 1;
    }
    (blocks, damage, count.load(Ordering::Relaxed) / end)
}

#[test]
fn damage_is_searched_once_whatever_looks_like_a_block_in_it() {
    // Nothing but beginnings of blocks.
    let body = BLOCK_MAGIC.repeat(64 << 10);
    let (blocks, damage, reads) = search(&body);
    assert_eq!((blocks, damage.bytes), (0, body.len() as u64));
    assert!(reads <= 8, "{reads} bytes were read for one");

    // Intact headers whose blocks are longer than the file.
    let body = header(0, 1 << 20).repeat(4 << 10);
    let (blocks, damage, reads) = search(&body);
    assert_eq!((blocks, damage.bytes), (0, body.len() as u64));
    assert!(reads <= 8, "{reads} bytes were read for one");

    // A byte too many between any two blocks.
    let body: Vec<u8> = (0..4 << 10).flat_map(|number| [&header(number, 0)[..], b"x"].concat()).collect();
    let (blocks, damage, reads) = search(&body);
    assert_eq!((blocks, damage.bytes), (4 << 10, 4 << 10));
    assert!(reads <= 8, "{reads} bytes were read for one");
}

#[test]
fn a_header_is_found_wherever_the_windows_of_the_search_end() {
    for gap in (0..3 * SEARCH_BYTES_MAX).step_by(1021).chain(SEARCH_BYTES_MIN - 80..SEARCH_BYTES_MIN + 80) {
        let body = [&vec![b'U'; gap][..], &header(0, 0)].concat();
        let (blocks, damage, _) = search(&body);
        assert_eq!((blocks, damage.bytes), (1, gap as u64), "behind {gap} bytes");
    }
}

#[test]
fn a_trailer_is_found_behind_what_looks_like_a_block() {
    let damaged = [&[b'x'; 100][..], &BLOCK_MAGIC, &[b'x'; 20]].concat();
    let (blocks, damage, _) = search(&[&damaged[..], &encode_trailer(9)].concat());
    assert_eq!((blocks, damage.bytes), (0, damaged.len() as u64));
}

/// As traces were once left by a limit that came within a long record: index and trailer behind a part of it.
#[test]
fn a_chain_that_ends_early_is_damage_in_a_trace_with_a_regular_end_too() {
    let meta = serde_json::to_vec(&Meta::default()).unwrap();
    let block = |kind, flags, number, payload: &[u8]| {
        let len = payload.len() as u32;
        let header = BlockHeader {
            kind,
            flags,
            number,
            raw_len: len,
            stored_len: len,
            payload_crc: crc32c::crc32c(payload),
            ..BlockHeader::default()
        };
        [&header.encode()[..], payload].concat()
    };
    for (flags, blocks) in [(0, 0), (block_flags::MORE, 1)] {
        let (major, minor, segment, trace_id) = (VERSION_MAJOR, 0, 1, [7; 16]);
        let mut bytes = Head { major, minor, segment, trace_id }.encode().to_vec();
        bytes.extend(block(block_kind::META, 0, 0, &meta));
        // A kind of record that is not known, without fields.
        bytes.extend(block(block_kind::RECORDS, flags, 1, &[200, 0]));
        let index_at = bytes.len() as u64;
        bytes.extend(block(block_kind::INDEX, block_flags::LAST_SEGMENT, 2, b""));
        bytes.extend(encode_trailer(index_at));
        let mut reader = Reader::from_bytes(bytes).unwrap();
        assert!(reader.next().unwrap().is_none());
        assert_eq!(reader.damage(), Damage { blocks, ..Damage::default() });
    }
}
