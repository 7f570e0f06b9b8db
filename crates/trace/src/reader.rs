// SPDX-License-Identifier: Apache-2.0
//! Reads a trace: a directory of segments in their order, or one segment.
//!
//! Damage costs the blocks that it hits and is counted, never hidden and never an error: a torn tail, a flipped
//! bit, a missing segment. Memory is bounded by one block plus the longest record.

use std::fs::File;
use std::io::{self, BufReader, Cursor, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use crate::codec::{self, State, kind};
use crate::format::{
    BLOCK_HEADER_LEN, BLOCK_MAGIC, BLOCK_RAW_MAX, BlockHeader, HEAD_LEN, Head, HeadError, SEGMENT_EXTENSION,
    TRAILER_LEN, block_codec, block_flags, block_kind, decode_trailer,
};
use crate::model::Record;
use crate::varint::Fields;
use crate::{Error, Meta};

/// The longest record that is put together from several blocks, bytes: the longest message and its fields.
const RECORD_MAX: usize = (1 << 31) + (1 << 20);

/// Bytes that are read at once behind damage: at first, and at most.
const SEARCH_BYTES_MIN: usize = 4 * BLOCK_HEADER_LEN;
const SEARCH_BYTES_MAX: usize = 64 << 10;

/// What could not be read so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Damage {
    /// Blocks that are known to be missing or damaged.
    pub blocks: u64,
    /// Bytes of files that belong to no intact block.
    pub bytes: u64,
    /// Segments that are missing between those that are there, or whose head is damaged.
    pub segments: u64,
    /// Whether the last segment has no regular end: the recorder was killed, or is still at work.
    pub torn: bool,
}

impl Damage {
    /// Whether the whole trace was there, up to its regular end.
    pub fn none(&self) -> bool {
        *self == Self::default()
    }
}

/// Reads the records of a trace in their order.
#[derive(Debug)]
pub struct Reader {
    meta: Meta,
    trace_id: [u8; 16],
    segments: std::vec::IntoIter<PathBuf>,
    segment: Option<Segment>,
    last_segment: u32,
    /// The raw bytes of the current chain, and how far they are read.
    chain: Vec<u8>,
    at: usize,
    state: State,
    payload: Vec<u8>,
    damage: Damage,
    regular_end: bool,
}

/// Where a segment's bytes are: a file, or memory.
trait Input: Read + Seek + Send + std::fmt::Debug {}
impl Input for File {}
impl Input for Cursor<Vec<u8>> {}

#[derive(Debug)]
struct Segment {
    path: PathBuf,
    file: BufReader<Box<dyn Input>>,
    /// Offset of the next block, and of the file's end.
    offset: u64,
    end: u64,
    next_block: u32,
    has_trailer: bool,
}

impl Reader {
    /// Opens a trace's directory, or one segment of it. Nothing but its first block is read.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let mut segments = segments(path)?;
        segments.reverse();
        let first = segments.pop().ok_or_else(|| Error::NotFound(path.to_owned()))?;
        segments.reverse();
        let (head, segment) = Segment::open(first)?;
        Self::begin(head, segment, segments)
    }

    /// Reads a segment that is in memory.
    pub fn from_bytes(segment: Vec<u8>) -> Result<Self, Error> {
        let end = segment.len() as u64;
        let (head, segment) = Segment::new(PathBuf::from("(memory)"), Box::new(Cursor::new(segment)), end)?;
        Self::begin(head, segment, Vec::new())
    }

    fn begin(head: Head, mut segment: Segment, more: Vec<PathBuf>) -> Result<Self, Error> {
        let mut reader = Self {
            meta: Meta::default(),
            trace_id: head.trace_id,
            segments: more.into_iter(),
            segment: None,
            last_segment: head.segment,
            chain: Vec::new(),
            at: 0,
            state: State::default(),
            payload: Vec::new(),
            damage: Damage::default(),
            regular_end: false,
        };
        let meta = segment.next_block(&mut reader.damage)?;
        let meta = meta.filter(|header| header.kind == block_kind::META);
        let payload = match meta {
            Some(header) => segment.payload(&header, &mut reader.payload, &mut reader.chain)?,
            None => false,
        };
        reader.meta = payload
            .then(|| serde_json::from_slice(&reader.chain).ok())
            .flatten()
            .ok_or_else(|| Error::Head(segment.path.clone()))?;
        reader.chain.clear();
        reader.segment = Some(segment);
        Ok(reader)
    }

    /// What the trace says about itself.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// What could not be read so far; complete when [`next`](Self::next) has returned `None`.
    pub fn damage(&self) -> Damage {
        self.damage
    }

    /// Random bytes that name the trace; the same in all its segments.
    pub fn trace_id(&self) -> [u8; 16] {
        self.trace_id
    }

    /// The next record; `None` at the end of the trace. It borrows from the reader until the next call.
    ///
    /// After [`Error::Record`] the next call goes on behind the damage.
    #[expect(clippy::should_implement_trait, reason = "an Iterator cannot lend")]
    pub fn next(&mut self) -> Result<Option<Record<'_>>, Error> {
        let (kind, start, end) = loop {
            if self.at == self.chain.len() && !self.next_chain()? {
                return Ok(None);
            }
            let Some((kind, start, end)) = frame(&self.chain, self.at) else { return Err(self.malformed()) };
            self.at = end;
            if kind::is_known(kind) {
                break (kind, start, end);
            }
        };
        match codec::decode(&mut self.state, kind, &self.chain[start..end]) {
            Ok(record) => Ok(Some(record)),
            Err(codec::Malformed) => {
                self.at = self.chain.len();
                Err(record_error(self.segment.as_ref()))
            }
        }
    }

    fn malformed(&mut self) -> Error {
        self.at = self.chain.len();
        record_error(self.segment.as_ref())
    }

    /// Fills `chain` with the next block, and those that continue it. `false` at the end of the trace.
    fn next_chain(&mut self) -> Result<bool, Error> {
        self.at = 0;
        self.state.reset();
        self.chain.clear();
        self.chain.shrink_to(2 * BLOCK_RAW_MAX);
        let mut wants_more = false;
        loop {
            if self.segment.is_none() && !self.next_segment()? {
                self.damage.torn = !self.regular_end;
                return Ok(false);
            }
            let Some(segment) = &mut self.segment else { return Ok(false) };
            let (damage_before, number) = (self.damage, segment.next_block);
            let Some(header) = segment.next_block(&mut self.damage)? else {
                // A chain never spans segments: what is left of one is lost.
                self.damage.blocks += u64::from(wants_more && self.damage == damage_before);
                self.chain.clear();
                wants_more = false;
                self.regular_end &= segment.has_trailer;
                self.segment = None;
                continue;
            };
            let in_order = header.number == number && self.damage == damage_before;
            let continued = header.flags & block_flags::CONTINUED != 0;
            // No number tells what a chain lacks whose rest was never written.
            let goes_on = continued && header.kind == block_kind::RECORDS;
            self.damage.blocks += u64::from(wants_more && in_order && !goes_on);
            if header.kind != block_kind::RECORDS {
                // A chain does not go on behind it. What it says is not needed here, but damage is told.
                self.chain.clear();
                wants_more = false;
                let intact = segment.payload(&header, &mut self.payload, &mut self.chain)?;
                self.chain.clear();
                if intact {
                    let last = header.flags & block_flags::LAST_SEGMENT != 0;
                    self.regular_end = header.kind == block_kind::INDEX && last;
                } else {
                    self.damage.blocks += 1;
                    self.damage.bytes += BLOCK_HEADER_LEN as u64 + u64::from(header.stored_len);
                    segment.skip(&header);
                }
                continue;
            }
            if continued && !(wants_more && in_order) {
                // Its beginning is lost.
                self.damage.blocks += 1;
                self.chain.clear();
                wants_more = false;
                segment.skip(&header);
                continue;
            }
            if !continued {
                self.chain.clear(); // an unfinished chain, whose rest is lost and counted
            }
            let fits = self.chain.len() + header.raw_len as usize <= RECORD_MAX;
            if !fits || !segment.payload(&header, &mut self.payload, &mut self.chain)? {
                self.damage.blocks += 1;
                self.damage.bytes += BLOCK_HEADER_LEN as u64 + u64::from(header.stored_len);
                self.chain.clear();
                wants_more = false;
                segment.skip(&header);
                continue;
            }
            wants_more = header.flags & block_flags::MORE != 0;
            if !wants_more && !self.chain.is_empty() {
                return Ok(true);
            }
        }
    }

    fn next_segment(&mut self) -> Result<bool, Error> {
        for path in self.segments.by_ref() {
            self.regular_end = false;
            let (head, segment) = match Segment::open(path) {
                Ok(opened) => opened,
                Err(Error::Head(_) | Error::NotATrace(_)) => {
                    self.damage.segments += 1;
                    continue;
                }
                Err(error) => return Err(error),
            };
            if head.trace_id != self.trace_id {
                return Err(Error::Foreign(segment.path));
            }
            let missing = u64::from(head.segment.saturating_sub(self.last_segment)).saturating_sub(1);
            self.damage.segments += missing;
            self.last_segment = head.segment;
            self.segment = Some(segment);
            return Ok(true);
        }
        Ok(false)
    }
}

fn record_error(segment: Option<&Segment>) -> Error {
    let (path, block) =
        segment.map_or_else(Default::default, |s| (s.path.clone(), s.next_block.saturating_sub(1)));
    Error::Record { path, block }
}

/// Kind, first and last byte of the fields of the record at `at`.
fn frame(chain: &[u8], at: usize) -> Option<(u8, usize, usize)> {
    let mut fields = Fields { rest: &chain[at..] };
    let kind = fields.byte()?;
    let len = fields.u64()?;
    let start = chain.len() - fields.rest.len();
    fields.take(len)?;
    Some((kind, start, chain.len() - fields.rest.len()))
}

impl Segment {
    fn open(path: PathBuf) -> Result<(Head, Self), Error> {
        let file = File::open(&path).map_err(Error::io(&path, "open"))?;
        let end = file.metadata().map_err(Error::io(&path, "stat"))?.len();
        Self::new(path, Box::new(file), end)
    }

    fn new(path: PathBuf, input: Box<dyn Input>, end: u64) -> Result<(Head, Self), Error> {
        let mut file = BufReader::new(input);
        let mut bytes = [0; HEAD_LEN];
        if let Err(error) = file.read_exact(&mut bytes) {
            return Err(match error.kind() {
                io::ErrorKind::UnexpectedEof => Error::NotATrace(path),
                _ => Error::io(path, "read")(error),
            });
        }
        match Head::decode(&bytes) {
            Ok(head) => Ok((
                head,
                Self { path, file, offset: HEAD_LEN as u64, end, next_block: 0, has_trailer: false },
            )),
            Err(HeadError::Magic) => Err(Error::NotATrace(path)),
            Err(HeadError::Checksum) => Err(Error::Head(path)),
            Err(HeadError::Newer(major, minor)) => Err(Error::Newer { path, major, minor }),
        }
    }

    /// The header of the next intact block; the file stands at its payload. What is between is counted.
    fn next_block(&mut self, damage: &mut Damage) -> Result<Option<BlockHeader>, Error> {
        let mut skipped = 0;
        let header = loop {
            let left = self.end.saturating_sub(self.offset);
            if left < BLOCK_HEADER_LEN as u64 {
                skipped += self.tail(left)?;
                damage.bytes += skipped;
                if skipped > 0 {
                    damage.blocks += 1;
                }
                return Ok(None);
            }
            let mut bytes = [0; BLOCK_HEADER_LEN];
            self.read_at(self.offset, &mut bytes)?;
            if let Some(header) = self.header(self.offset, &bytes) {
                break header;
            }
            let next = self.find_header(self.offset + 1)?;
            skipped += next - self.offset;
            self.offset = next;
        };
        if skipped > 0 || header.number != self.next_block {
            damage.bytes += skipped;
            // Numbers tell how many are missing; a number that goes back tells nothing.
            damage.blocks += u64::from(header.number.saturating_sub(self.next_block)).max(1);
        }
        self.next_block = header.number.saturating_add(1);
        self.offset += BLOCK_HEADER_LEN as u64;
        Ok(Some(header))
    }

    /// Bytes at the end that are neither block nor trailer.
    fn tail(&mut self, left: u64) -> Result<u64, Error> {
        let offset = self.offset;
        self.offset = self.end;
        if left != TRAILER_LEN as u64 {
            return Ok(left);
        }
        let mut bytes = [0; TRAILER_LEN];
        self.read_at(offset, &mut bytes)?;
        self.has_trailer = decode_trailer(&bytes).is_some();
        Ok(if self.has_trailer { 0 } else { left })
    }

    fn skip(&mut self, header: &BlockHeader) {
        self.offset += u64::from(header.stored_len);
    }

    /// Appends the payload to `raw`; `false`, with nothing appended and nothing consumed, when it is damaged.
    fn payload(
        &mut self,
        header: &BlockHeader,
        stored: &mut Vec<u8>,
        raw: &mut Vec<u8>,
    ) -> Result<bool, Error> {
        stored.resize(header.stored_len as usize, 0);
        self.read_at(self.offset, stored)?;
        if crc32c::crc32c(stored) != header.payload_crc {
            return Ok(false);
        }
        let before = raw.len();
        let raw_len = header.raw_len as usize;
        match header.codec {
            block_codec::NONE => raw.extend_from_slice(stored),
            block_codec::ZSTD => {
                raw.resize(before + raw_len, 0);
                let done = zstd::bulk::decompress_to_buffer(stored, &mut raw[before..]);
                raw.truncate(before + done.unwrap_or(0));
            }
            _ => {}
        }
        let whole = raw.len() - before == raw_len;
        if whole {
            self.skip(header);
        } else {
            raw.truncate(before);
        }
        Ok(whole)
    }

    /// The offset of the next intact header from `from` on, or where the trailer may be. Each byte is looked at a few times at most,
    /// whatever the file holds: what is no header is passed over without reading it again, and a header that is near is found
    /// without reading far.
    fn find_header(&mut self, from: u64) -> Result<u64, Error> {
        let mut window = Vec::new();
        let mut offset = from;
        while self.end.saturating_sub(offset) >= BLOCK_HEADER_LEN as u64 {
            let size = (2 * window.len()).clamp(SEARCH_BYTES_MIN, SEARCH_BYTES_MAX);
            window.resize(size.min((self.end - offset) as usize), 0);
            self.read_at(offset, &mut window)?;
            for at in memchr::memmem::find_iter(&window, &BLOCK_MAGIC) {
                // One that is cut off here begins the next window.
                let Some(bytes) = window[at..].first_chunk() else { break };
                if self.header(offset + at as u64, bytes).is_some() {
                    return Ok(offset + at as u64);
                }
            }
            offset += (window.len() - BLOCK_HEADER_LEN + 1) as u64;
        }
        // The trailer of a damaged segment is still its trailer.
        Ok(self.end.saturating_sub(TRAILER_LEN as u64).max(from).min(self.end))
    }

    /// The header in the bytes at `offset`, if it is intact and its block fits into the file.
    fn header(&self, offset: u64, bytes: &[u8; BLOCK_HEADER_LEN]) -> Option<BlockHeader> {
        let left = self.end - offset - BLOCK_HEADER_LEN as u64;
        BlockHeader::decode(bytes).filter(|header| u64::from(header.stored_len) <= left)
    }

    fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        let now = self.file.stream_position().map_err(Error::io(&self.path, "seek"))?;
        let done = match i64::try_from(i128::from(offset) - i128::from(now)) {
            Ok(0) => Ok(()),
            Ok(difference) => self.file.seek_relative(difference),
            Err(_) => self.file.seek(SeekFrom::Start(offset)).map(drop),
        };
        done.and_then(|()| self.file.read_exact(bytes)).map_err(Error::io(&self.path, "read"))
    }
}

/// The segments of a trace in their order: one file, or what a directory holds.
fn segments(path: &Path) -> Result<Vec<PathBuf>, Error> {
    let metadata = match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(Error::NotFound(path.to_owned()));
        }
        other => other.map_err(Error::io(path, "stat"))?,
    };
    if !metadata.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let entries = std::fs::read_dir(path).map_err(Error::io(path, "list"))?;
    let mut segments = Vec::new();
    for entry in entries {
        let file = entry.map_err(Error::io(path, "list"))?.path();
        if file.extension().is_some_and(|extension| extension == SEGMENT_EXTENSION) {
            segments.push(file);
        }
    }
    segments.sort();
    Ok(segments)
}

#[cfg(test)]
mod tests;
