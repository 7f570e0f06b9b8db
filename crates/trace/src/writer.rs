// SPDX-License-Identifier: Apache-2.0
//! Writes a trace: records into blocks, blocks into segments, segments into a new directory.
//!
//! What is on disk is readable at every moment up to the last whole block, whatever kills the process. A full
//! disk or the size limit end the trace in good order: index, trailer, and a count of what did not get in.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::codec::{self, State};
use crate::error::Stopped;
use crate::format::{
    self, BLOCK_HEADER_LEN, BLOCK_RAW_MAX, BlockHeader, HEAD_LEN, Head, SEGMENT_EXTENSION, TRAILER_LEN,
    block_codec, block_flags, block_kind,
};
use crate::model::{Clock, Note, Record};
use crate::safety::{Masker, Safety};
use crate::syncer::Syncer;
use crate::varint::{self, put};
use crate::{Error, Meta, RedactionPolicy};

/// How a trace is cut and limited.
#[derive(Clone, Debug)]
pub struct Options {
    /// A segment ends at this size, bytes; it may be longer by one block, its index, or one record.
    pub segment_bytes: u64,
    /// A segment ends at this age, by the records' times.
    pub segment_time: Option<Duration>,
    /// The trace ends at this size of all segments, bytes.
    pub max_bytes: Option<u64>,
    /// A block ends at this size before compression, bytes: at most [`BLOCK_RAW_MAX`](crate::BLOCK_RAW_MAX).
    pub block_bytes: usize,
    /// A block ends at this age, by the records' times: what a killed recorder loses at most.
    pub block_time: Duration,
    /// zstd's level; 0 stores without compression.
    pub zstd_level: i32,
    /// Replaces literals and parameters by keyed hashes. The trace says so in its META.
    pub masker: Option<Masker>,
    /// Names the trace in the head of its segments; random if it is `None`, as it should be but for tests.
    pub trace_id: Option<[u8; 16]>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            segment_bytes: 256 << 20,
            segment_time: Some(Duration::from_secs(3600)),
            max_bytes: None,
            block_bytes: 256 << 10,
            block_time: Duration::from_secs(1),
            zstd_level: 1,
            masker: None,
            trace_id: None,
        }
    }
}

/// What a writer has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriterStats {
    /// Records in the trace, META not counted.
    pub records: u64,
    /// Bytes of these records before compression.
    pub raw_bytes: u64,
    /// Bytes of all segments.
    pub file_bytes: u64,
    /// Blocks, META and index blocks included.
    pub blocks: u64,
    /// Segments.
    pub segments: u32,
    /// Records that were offered and are not in the trace, because it had ended.
    pub dropped_records: u64,
    /// Loss records written.
    pub losses: u64,
    /// Bytes counted in them.
    pub lost_bytes: u64,
    /// Why the trace ended, if it has.
    pub stopped: Option<Stopped>,
}

/// zstd's level of blocks that are written in a hurry: three to five times as fast as level 1, and hardly smaller than what it is given
/// (`zstd -b --fast=50` on records of sysbench's rows: 636 MB/s to level 1's 116).
const HURRIED_LEVEL: i32 = -50;

/// Kept free for index and trailer, so that a full disk does not take them: bytes.
const RESERVE_BYTES: usize = 256 << 10;
const RESERVE_NAME: &str = "reserve";
/// The longest index that is written.
const INDEX_BYTES_MAX: usize = BLOCK_RAW_MAX;

/// Writes one trace.
#[derive(Debug)]
pub struct Writer {
    directory: PathBuf,
    /// The directory was not there before.
    made: bool,
    options: Options,
    meta: Vec<u8>,
    trace_id: [u8; 16],
    clock: Option<Clock>,
    /// The time of the latest record.
    last_ns: u64,
    safety: Safety,
    state: State,
    /// Records of the current block.
    raw: Vec<u8>,
    pending: BlockHeader,
    /// Records in `raw` that have not been written.
    fields: Vec<u8>,
    compressor: Compressor,
    segment: Option<Segment>,
    /// Where the block under way began, while there may be a part of it in the segment.
    begun: Option<Mark>,
    syncer: Syncer,
    stats: WriterStats,
}

/// A place in the segment that can be returned to.
#[derive(Clone, Copy, Debug)]
struct Mark {
    len: u64,
    blocks: u32,
    index_bytes: usize,
}

#[derive(Debug)]
struct Segment {
    path: PathBuf,
    file: File,
    len: u64,
    blocks: u32,
    first_ns: Option<u64>,
    index: Vec<u8>,
}

struct Compressor {
    zstd: Option<zstd::bulk::Compressor<'static>>,
    /// The level that it was made for, and the one that it is set to.
    level: i32,
    current: i32,
    out: Vec<u8>,
}

impl std::fmt::Debug for Compressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compressor").field("compresses", &self.zstd.is_some()).finish()
    }
}

impl Writer {
    /// Begins a trace in `directory`, which is made (mode 0700) or must be empty. Segments have mode 0600.
    pub fn create(directory: &Path, meta: &Meta, options: Options) -> Result<Self, Error> {
        let made = make_directory(directory)?;
        let redaction = RedactionPolicy { passwords: true, literals: options.masker.is_some() };
        let meta = &Meta { redaction, ..meta.clone() };
        let trace_id = match options.trace_id {
            Some(trace_id) => trace_id,
            None => random_id(directory)?,
        };
        let mut writer = Self {
            directory: directory.to_owned(),
            made,
            meta: serde_json::to_vec(meta)
                .map_err(|error| Error::io(directory, "describe")(io::Error::other(error)))?,
            trace_id,
            clock: None,
            last_ns: 0,
            safety: Safety::new(meta.protocol, meta.level, options.masker.clone()),
            state: State::default(),
            raw: Vec::new(),
            pending: BlockHeader::default(),
            fields: Vec::new(),
            compressor: Compressor::new(options.zstd_level)
                .map_err(Error::io(directory, "start compression"))?,
            segment: None,
            begun: None,
            syncer: Syncer::default(),
            stats: WriterStats::default(),
            options,
        };
        let reserve = directory.join(RESERVE_NAME);
        let mut file = create_file(&reserve)?;
        file.write_all(&vec![0; RESERVE_BYTES]).map_err(Error::io(&reserve, "write"))?;
        writer.begin_segment()?;
        if meta.started != (Clock { monotonic_ns: 0, realtime_ns: 0 }) {
            writer.write(&Record::Clock(meta.started))?;
        }
        Ok(writer)
    }

    /// The directory of the trace.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// What was done so far.
    pub fn stats(&self) -> WriterStats {
        self.stats
    }

    /// Appends a record, after passwords, and what else must not be stored, have been taken out of it. After [`Error::Stopped`] the trace is complete, and the record counts as dropped.
    pub fn write(&mut self, record: &Record<'_>) -> Result<(), Error> {
        if let Some(stopped) = self.stats.stopped {
            self.stats.dropped_records += 1;
            return Err(Error::Stopped(stopped));
        }
        let safe = self.safety.apply(record);
        self.write_safe(&safe)
    }

    fn write_safe(&mut self, record: &Record<'_>) -> Result<(), Error> {
        let time_ns = record.time_ns();
        self.end_what_is_old(time_ns).inspect_err(|_| self.stats.dropped_records += 1)?;
        if let Record::Clock(clock) = record {
            self.clock = Some(*clock);
        }
        self.append(record, time_ns);
        if self.raw.len() >= self.options.block_bytes.min(BLOCK_RAW_MAX) { self.end_block() } else { Ok(()) }
    }

    fn append(&mut self, record: &Record<'_>, time_ns: u64) {
        if self.pending.records == 0 {
            self.state.reset();
            (self.pending.first_ns, self.pending.last_ns) = (time_ns, time_ns);
        }
        if let Record::Loss(loss) = record {
            self.stats.losses += 1;
            self.stats.lost_bytes = self.stats.lost_bytes.saturating_add(loss.len);
        }
        let kind = codec::kind_of(record);
        self.fields.clear();
        codec::encode(&mut self.state, record, &mut self.fields);
        self.raw.push(kind);
        put(&mut self.raw, self.fields.len() as u64);
        self.raw.extend_from_slice(&self.fields);
        self.fields.shrink_to(BLOCK_RAW_MAX);
        self.pending.records += 1;
        self.pending.kinds |= 1 << kind.min(31);
        self.pending.first_ns = self.pending.first_ns.min(time_ns);
        self.pending.last_ns = self.pending.last_ns.max(time_ns);
        self.last_ns = self.last_ns.max(time_ns);
    }

    /// A block and a segment also end by age; what arrives late does not make them older.
    fn end_what_is_old(&mut self, time_ns: u64) -> Result<(), Error> {
        let older =
            |since: u64, limit: Duration| u128::from(time_ns.saturating_sub(since)) > limit.as_nanos();
        if self.pending.records > 0 && older(self.pending.first_ns, self.options.block_time) {
            self.end_block()?;
        }
        let Some(segment) = &self.segment else { return Ok(()) };
        let old = self
            .options
            .segment_time
            .is_some_and(|limit| segment.first_ns.is_some_and(|ns| older(ns, limit)));
        if old || segment.len >= self.options.segment_bytes {
            self.end_block()?;
            // While there is a segment in which the trace can end in good order.
            self.syncer.failure().or_else(|(path, error)| self.stop(error, &path))?;
            self.change_segment()?;
            if let Some(clock) = self.clock {
                self.append(&Record::Clock(clock), clock.monotonic_ns);
            }
        }
        Ok(())
    }

    /// From now on blocks cost little time and much room, or no longer: for a recorder whose source is faster than its compression.
    pub fn hurry(&mut self, hurried: bool) {
        self.compressor.hurry(hurried);
    }

    /// Ends the current block, so that it is in the file, though not necessarily on the disk.
    pub fn flush(&mut self) -> Result<(), Error> {
        if self.stats.stopped.is_some() { Ok(()) } else { self.end_block() }
    }

    /// Ends the trace. An error here, as everywhere, leaves what was written before readable.
    pub fn finish(mut self) -> Result<WriterStats, Error> {
        if self.stats.stopped.is_none() {
            self.end_block()?;
            self.end_segment(true)?;
            self.stats.stopped = Some(Stopped::Finished);
            self.free_reserve();
        }
        Ok(self.stats)
    }

    /// Ends the trace and removes what was made for it, as far as that can be: one that turned out to be of nothing is not in the way of the
    /// next, which needs a new directory or an empty one.
    pub fn discard(mut self) {
        self.stats.stopped = Some(Stopped::Finished);
        self.free_reserve();
        for number in 1..=self.stats.segments {
            discard(&segment_path(&self.directory, number));
        }
        if self.made {
            let _ = std::fs::remove_dir(&self.directory);
        }
    }

    fn free_reserve(&self) {
        // Nothing depends on it: a reserve that stays is 256 KiB in a directory of traces.
        let _ = std::fs::remove_file(self.directory.join(RESERVE_NAME));
    }

    fn begin_segment(&mut self) -> Result<(), Error> {
        let segment = self.new_segment().or_else(|(path, error)| self.stop(error, &path).map(|()| None))?;
        self.enter(segment);
        Ok(())
    }

    /// The next segment is on the disk before the old one ends: if there is no room for it, the old one is the last.
    fn change_segment(&mut self) -> Result<(), Error> {
        let next = self.new_segment().or_else(|(path, error)| self.stop(error, &path).map(|()| None))?;
        let ended = self.end_segment(false);
        match (&ended, &next) {
            (Ok(()), _) => self.enter(next),
            (Err(_), Some(next)) => discard(&next.path),
            (Err(_), None) => {}
        }
        ended
    }

    /// Makes the file of the next segment, with its head and META; an error leaves nothing of it.
    fn new_segment(&self) -> Result<Option<Segment>, (PathBuf, io::Error)> {
        let number = self.stats.segments + 1;
        let path = segment_path(&self.directory, number);
        let head = Head {
            major: format::VERSION_MAJOR,
            minor: format::VERSION_MINOR,
            segment: number,
            trace_id: self.trace_id,
        };
        let header = BlockHeader { kind: block_kind::META, ..BlockHeader::default() };
        let header = about(header, &self.meta, &self.meta, &self.stats);
        let mut file = match open_new(&path) {
            Ok(file) => file,
            Err(error) => return Err((path, error)),
        };
        let begun = [&head.encode()[..], &header.encode()].concat();
        if let Err(error) = write_both(&mut file, &begun, &self.meta) {
            discard(&path);
            return Err((path, error));
        }
        let mut index = Vec::new();
        index_entry(&mut index, HEAD_LEN as u64, &header);
        let len = (begun.len() + self.meta.len()) as u64;
        Ok(Some(Segment { path, file, len, blocks: 1, first_ns: None, index }))
    }

    fn enter(&mut self, segment: Option<Segment>) {
        let Some(segment) = segment else { return };
        self.stats.segments += 1;
        self.stats.file_bytes += segment.len;
        self.stats.blocks += u64::from(segment.blocks);
        self.segment = Some(segment);
    }

    fn end_block(&mut self) -> Result<(), Error> {
        if self.pending.records == 0 {
            return Ok(());
        }
        let raw = std::mem::take(&mut self.raw);
        let pending = std::mem::take(&mut self.pending);
        let parts = raw.chunks(BLOCK_RAW_MAX).count();
        let mut written = Ok(());
        self.begun = self.segment.as_ref().map(Segment::mark);
        for (at, part) in raw.chunks(BLOCK_RAW_MAX).enumerate() {
            let mut flags = 0;
            if at > 0 {
                flags |= block_flags::CONTINUED;
            }
            if at + 1 < parts {
                flags |= block_flags::MORE;
            }
            let records = if at == 0 { pending.records } else { 0 };
            let kinds = if at == 0 { pending.kinds } else { 0 };
            written = self.write_block(BlockHeader { flags, records, kinds, ..pending }, part, true);
            if written.is_err() {
                self.stats.dropped_records += u64::from(pending.records);
                break;
            }
        }
        self.begun = None;
        if written.is_ok() {
            self.stats.records += u64::from(pending.records);
            self.stats.raw_bytes += raw.len() as u64;
        }
        self.raw = raw;
        self.raw.clear();
        self.raw.shrink_to(2 * BLOCK_RAW_MAX);
        written
    }

    fn write_block(&mut self, header: BlockHeader, raw: &[u8], compress: bool) -> Result<(), Error> {
        let Some(segment) = &mut self.segment else { return Err(Error::Stopped(Stopped::Failed)) };
        let (codec, payload) = if compress { self.compressor.block(raw) } else { (block_codec::NONE, raw) };
        let header = BlockHeader { codec, number: segment.blocks, ..header };
        let header = about(header, raw, payload, &self.stats);
        let len = (BLOCK_HEADER_LEN + payload.len()) as u64;
        let limit = self.options.max_bytes.unwrap_or(u64::MAX);
        if compress && self.stats.file_bytes.saturating_add(len) > limit {
            return self.stop_for(Stopped::SizeLimit);
        }
        let encoded = header.encode();
        let written = write_both(&mut segment.file, &encoded, payload);
        if let Err(error) = written {
            let path = segment.path.clone();
            return self.stop(error, &path);
        }
        if header.kind == block_kind::RECORDS {
            segment.first_ns.get_or_insert(header.first_ns);
        }
        index_entry(&mut segment.index, segment.len, &header);
        segment.len += len;
        segment.blocks += 1;
        self.stats.file_bytes += len;
        self.stats.blocks += 1;
        Ok(())
    }

    /// Writes index and trailer.
    fn end_segment(&mut self, last: bool) -> Result<(), Error> {
        let Some(segment) = &mut self.segment else { return Ok(()) };
        let index_offset = segment.len;
        // An index that is longer than a block (hundreds of thousands of blocks) is left empty: readers scan. It stays as it is until
        // it is written: if that fails, the end of the trace needs it.
        let index = if segment.index.len() <= INDEX_BYTES_MAX { segment.index.clone() } else { Vec::new() };
        let flags = if last { block_flags::LAST_SEGMENT } else { 0 };
        let header = BlockHeader { kind: block_kind::INDEX, flags, ..BlockHeader::default() };
        self.write_block(header, &index, false)?;
        let Some(segment) = &mut self.segment else { return Ok(()) };
        let trailer = format::encode_trailer(index_offset);
        if let Err(error) = segment.file.write_all(&trailer) {
            let path = segment.path.clone();
            return self.stop(error, &path);
        }
        self.stats.file_bytes += TRAILER_LEN as u64;
        let Some(Segment { path, file, .. }) = self.segment.take() else { return Ok(()) };
        self.syncer.begin(path, move || file.sync_data());
        if last {
            return self.syncer.finish().or_else(|(path, error)| self.stop(error, &path));
        }
        Ok(())
    }

    /// Ends the trace because of an error of the file system.
    fn stop(&mut self, error: io::Error, path: &Path) -> Result<(), Error> {
        let full = matches!(
            error.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
        );
        if full {
            return self.stop_for(Stopped::DiskFull);
        }
        self.stats.stopped = Some(Stopped::Failed);
        Err(Error::io(path, "write")(error))
    }

    /// Ends the trace in good order: the block that did not get in is cut off, with all the parts of a long one; a note that says why, index and
    /// trailer take its place.
    fn stop_for(&mut self, reason: Stopped) -> Result<(), Error> {
        if self.stats.stopped.replace(reason).is_some() {
            return Err(Error::Stopped(reason)); // not even the index got in: readers scan
        }
        self.free_reserve();
        let begun = self.begun.take();
        // The reason for stopping is what the caller must hear, not that the note or the index is missing too.
        if self.cut(begun).is_ok() {
            let before = self.segment.as_ref().map(Segment::mark);
            if self.note_end(reason).is_ok() || self.cut(before).is_ok() {
                let _ = self.end_segment(true);
            }
        }
        Err(Error::Stopped(reason))
    }

    /// Cuts off what is behind this place, or behind the last whole block.
    fn cut(&mut self, mark: Option<Mark>) -> io::Result<()> {
        use std::io::Seek as _;
        let Some(segment) = &mut self.segment else { return Ok(()) };
        if let Some(mark) = mark {
            self.stats.file_bytes -= segment.len - mark.len;
            self.stats.blocks -= u64::from(segment.blocks - mark.blocks);
            segment.return_to(mark);
        }
        let len = segment.len;
        segment.file.set_len(len)?;
        segment.file.seek(io::SeekFrom::Start(len)).map(drop)
    }

    /// Who reads the trace alone must learn that it is not all.
    fn note_end(&mut self, reason: Stopped) -> Result<(), Error> {
        let text = format!("the recording ended early, and has nothing of what came after: {reason}");
        let note = Note { time_ns: self.last_ns, text: text.as_bytes().into() };
        self.raw.clear();
        self.pending = BlockHeader::default();
        self.append(&Record::Note(note), self.last_ns);
        let raw = std::mem::take(&mut self.raw);
        let pending = std::mem::take(&mut self.pending);
        self.write_block(pending, &raw, false)?;
        self.stats.records += 1;
        self.stats.raw_bytes += raw.len() as u64;
        Ok(())
    }
}

impl Segment {
    fn mark(&self) -> Mark {
        Mark { len: self.len, blocks: self.blocks, index_bytes: self.index.len() }
    }

    /// The file itself is still to be cut.
    fn return_to(&mut self, mark: Mark) {
        (self.len, self.blocks) = (mark.len, mark.blocks);
        self.index.truncate(mark.index_bytes);
    }
}

/// A writer that is dropped keeps what it was given, but its trace has no regular end.
impl Drop for Writer {
    fn drop(&mut self) {
        if self.stats.stopped.is_none() {
            let _ = self.end_block();
        }
    }
}

impl Compressor {
    fn new(level: i32) -> io::Result<Self> {
        let zstd = if level == 0 { None } else { Some(zstd::bulk::Compressor::new(level)?) };
        Ok(Self { zstd, level, current: level, out: Vec::new() })
    }

    fn hurry(&mut self, hurried: bool) {
        let level = if hurried { HURRIED_LEVEL } else { self.level };
        let Some(zstd) = self.zstd.as_mut().filter(|_| level != self.current) else { return };
        // One that refuses goes on as it was: the block is as good.
        if zstd.set_compression_level(level).is_ok() {
            self.current = level;
        }
    }

    /// The codec and the payload; not compressed if that saves nothing.
    fn block<'a>(&'a mut self, raw: &'a [u8]) -> (u8, &'a [u8]) {
        let Some(zstd) = &mut self.zstd else { return (block_codec::NONE, raw) };
        self.out.resize(zstd::zstd_safe::compress_bound(raw.len()), 0);
        match zstd.compress_to_buffer(raw, &mut self.out[..]) {
            Ok(len) if len < raw.len() => (block_codec::ZSTD, &self.out[..len]),
            _ => (block_codec::NONE, raw),
        }
    }
}

/// The header of a block with what it tells about its contents.
fn about(header: BlockHeader, raw: &[u8], payload: &[u8], stats: &WriterStats) -> BlockHeader {
    BlockHeader {
        raw_len: raw.len() as u32, // at most BLOCK_RAW_MAX
        stored_len: payload.len() as u32,
        losses: stats.losses,
        lost_bytes: stats.lost_bytes,
        payload_crc: crc32c::crc32c(payload),
        ..header
    }
}

/// One entry of the index: where a block is and what it holds.
fn index_entry(out: &mut Vec<u8>, offset: u64, header: &BlockHeader) {
    put(out, offset);
    out.push(header.kind);
    out.push(header.flags);
    put(out, header.records.into());
    put(out, header.kinds.into());
    put(out, header.first_ns);
    varint::put_delta(out, header.first_ns, header.last_ns);
}

fn write_both(file: &mut File, head: &[u8], body: &[u8]) -> io::Result<()> {
    let mut slices = [io::IoSlice::new(head), io::IoSlice::new(body)];
    let mut slices = &mut slices[..];
    while !slices.is_empty() {
        match file.write_vectored(slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => io::IoSlice::advance_slices(&mut slices, n),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        while slices.first().is_some_and(|slice| slice.is_empty()) {
            slices = &mut slices[1..];
        }
    }
    Ok(())
}

fn segment_path(directory: &Path, number: u32) -> PathBuf {
    directory.join(format!("{number:06}.{SEGMENT_EXTENSION}"))
}

/// Returns whether it was made; an empty one may be there.
fn make_directory(directory: &Path) -> Result<bool, Error> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let mut entries = match std::fs::read_dir(directory) {
                Ok(entries) => entries,
                Err(_) => return Err(Error::Exists(directory.to_owned())),
            };
            if entries.next().is_some() { Err(Error::Exists(directory.to_owned())) } else { Ok(false) }
        }
        Err(error) => Err(Error::io(directory, "make the directory")(error)),
    }
}

fn random_id(directory: &Path) -> Result<[u8; 16], Error> {
    let mut id = [0; 16];
    let failed = |error: getrandom::Error| io::Error::other(error.to_string());
    getrandom::fill(&mut id).map_err(failed).map_err(Error::io(directory, "get a random trace id"))?;
    Ok(id)
}

fn create_file(path: &Path) -> Result<File, Error> {
    open_new(path).map_err(Error::io(path, "create"))
}

fn open_new(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// Removes a segment that nobody needs. If that fails, it is one: nothing depends on it but the length of the trace.
fn discard(path: &Path) {
    let _ = std::fs::remove_file(path);
}
