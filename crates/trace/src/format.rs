// SPDX-License-Identifier: Apache-2.0
//! The fixed parts of a segment: head, block header, trailer. docs/trace-format.md is the specification.
//!
//! All integers are little-endian.

/// Readers refuse a higher one.
pub const VERSION_MAJOR: u16 = 1;
/// Raised when something is added that readers of the same major version may ignore.
pub const VERSION_MINOR: u16 = 2;
/// The most bytes that a block holds before compression. A stored block is never longer.
pub const BLOCK_RAW_MAX: usize = 1 << 20;
/// The extension of a segment's file name: `000001.upt`.
pub const SEGMENT_EXTENSION: &str = "upt";

pub(crate) const HEAD_MAGIC: [u8; 8] = *b"UPTRACE\n";
pub(crate) const HEAD_LEN: usize = 48;
pub(crate) const BLOCK_MAGIC: [u8; 4] = *b"UPBK";
pub(crate) const BLOCK_HEADER_LEN: usize = 72;
pub(crate) const TRAILER_MAGIC: [u8; 4] = *b"UPEN";
pub(crate) const TRAILER_LEN: usize = 16;

/// The first bytes of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) major: u16,
    pub(crate) minor: u16,
    /// 1 for the first segment of a trace.
    pub(crate) segment: u32,
    /// Random, the same in all segments of a trace.
    pub(crate) trace_id: [u8; 16],
}

/// Why the first bytes are no head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeadError {
    Magic,
    Checksum,
    Newer(u16, u16),
}

impl Head {
    pub(crate) fn encode(&self) -> [u8; HEAD_LEN] {
        let mut bytes = [0; HEAD_LEN];
        bytes[..8].copy_from_slice(&HEAD_MAGIC);
        bytes[8..10].copy_from_slice(&self.major.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.minor.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.segment.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.trace_id);
        let crc = crc32c::crc32c(&bytes[..44]);
        bytes[44..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// The version is looked at before the checksum: a later version may put it elsewhere.
    pub(crate) fn decode(bytes: &[u8; HEAD_LEN]) -> Result<Self, HeadError> {
        if bytes[..8] != HEAD_MAGIC {
            return Err(HeadError::Magic);
        }
        let (major, minor) = (u16_at(bytes, 8), u16_at(bytes, 10));
        if major > VERSION_MAJOR {
            return Err(HeadError::Newer(major, minor));
        }
        if crc32c::crc32c(&bytes[..44]) != u32_at(bytes, 44) {
            return Err(HeadError::Checksum);
        }
        let mut trace_id = [0; 16];
        trace_id.copy_from_slice(&bytes[16..32]);
        Ok(Self { major, minor, segment: u32_at(bytes, 12), trace_id })
    }
}

/// What a block holds.
pub(crate) mod block_kind {
    pub(crate) const RECORDS: u8 = 0;
    pub(crate) const META: u8 = 1;
    pub(crate) const INDEX: u8 = 2;
}

/// How its payload is stored.
pub(crate) mod block_codec {
    pub(crate) const NONE: u8 = 0;
    pub(crate) const ZSTD: u8 = 1;
}

/// Bits of `flags`.
pub(crate) mod block_flags {
    /// The next block goes on where this one's payload ends, in the middle of a record.
    pub(crate) const MORE: u8 = 1;
    /// This block goes on where the one before ended.
    pub(crate) const CONTINUED: u8 = 2;
    /// Of an index: no segment follows, the recorder ended the trace itself.
    pub(crate) const LAST_SEGMENT: u8 = 4;
}

/// The bytes before every block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BlockHeader {
    pub(crate) kind: u8,
    pub(crate) codec: u8,
    pub(crate) flags: u8,
    /// The block's number in its segment, from 0 for META.
    pub(crate) number: u32,
    /// Records that begin in it.
    pub(crate) records: u32,
    /// Bytes of the payload, decompressed.
    pub(crate) raw_len: u32,
    /// Bytes of the payload in the file: at most `raw_len`.
    pub(crate) stored_len: u32,
    /// The kinds of the records that begin in it: bit `n` for kind `n`, bit 31 for all from 31.
    pub(crate) kinds: u32,
    /// The earliest and latest times of those records.
    pub(crate) first_ns: u64,
    pub(crate) last_ns: u64,
    /// Loss records, and the bytes they count, from the start of the trace to the end of this block.
    pub(crate) losses: u64,
    pub(crate) lost_bytes: u64,
    pub(crate) payload_crc: u32,
}

impl BlockHeader {
    pub(crate) fn encode(&self) -> [u8; BLOCK_HEADER_LEN] {
        let mut bytes = [0; BLOCK_HEADER_LEN];
        bytes[..4].copy_from_slice(&BLOCK_MAGIC);
        [bytes[4], bytes[5], bytes[6]] = [self.kind, self.codec, self.flags];
        for (at, word) in [
            (8, self.number),
            (12, self.records),
            (16, self.raw_len),
            (20, self.stored_len),
            (24, self.kinds),
        ] {
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        for (at, word) in [(32, self.first_ns), (40, self.last_ns), (48, self.losses), (56, self.lost_bytes)]
        {
            bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
        bytes[64..68].copy_from_slice(&self.payload_crc.to_le_bytes());
        let crc = crc32c::crc32c(&bytes[..68]);
        bytes[68..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// `None` when these bytes are no intact header, or promise more than a block can hold.
    pub(crate) fn decode(bytes: &[u8; BLOCK_HEADER_LEN]) -> Option<Self> {
        if bytes[..4] != BLOCK_MAGIC || crc32c::crc32c(&bytes[..68]) != u32_at(bytes, 68) {
            return None;
        }
        let header = Self {
            kind: bytes[4],
            codec: bytes[5],
            flags: bytes[6],
            number: u32_at(bytes, 8),
            records: u32_at(bytes, 12),
            raw_len: u32_at(bytes, 16),
            stored_len: u32_at(bytes, 20),
            kinds: u32_at(bytes, 24),
            first_ns: u64_at(bytes, 32),
            last_ns: u64_at(bytes, 40),
            losses: u64_at(bytes, 48),
            lost_bytes: u64_at(bytes, 56),
            payload_crc: u32_at(bytes, 64),
        };
        let bounded = header.raw_len as usize <= BLOCK_RAW_MAX && header.stored_len <= header.raw_len;
        bounded.then_some(header)
    }
}

/// The last bytes of a segment that was ended by its writer: where its index is.
pub(crate) fn encode_trailer(index_offset: u64) -> [u8; TRAILER_LEN] {
    let mut bytes = [0; TRAILER_LEN];
    bytes[..8].copy_from_slice(&index_offset.to_le_bytes());
    let crc = crc32c::crc32c(&bytes[..8]);
    bytes[8..12].copy_from_slice(&crc.to_le_bytes());
    bytes[12..].copy_from_slice(&TRAILER_MAGIC);
    bytes
}

/// The offset of the index.
pub(crate) fn decode_trailer(bytes: &[u8; TRAILER_LEN]) -> Option<u64> {
    let intact = bytes[12..] == TRAILER_MAGIC && crc32c::crc32c(&bytes[..8]) == u32_at(bytes, 8);
    intact.then(|| u64_at(bytes, 0))
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
