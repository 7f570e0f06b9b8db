// SPDX-License-Identifier: Apache-2.0
//! Whatever happens to a trace: what is left of it is read, and what is not is counted.

mod common;

use std::borrow::Cow;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use common::{read_all, segments};
use underpass_testkit::SmallDisk;
use underpass_trace::*;

fn message(at: u64) -> Record<'static> {
    let text = format!("select {at} -- {}", "x".repeat((at % 50) as usize));
    let mut bytes = vec![b'Q'];
    bytes.extend_from_slice(&(text.len() as u32 + 5).to_be_bytes());
    bytes.extend_from_slice(text.as_bytes());
    bytes.push(0);
    Record::Frontend(Frontend::new(SessionId(at % 3), at * 1_000, at * 100, Cow::Owned(bytes)))
}

fn small_blocks() -> Options {
    Options { block_bytes: 200, segment_time: None, ..Options::default() }
}

/// A trace of this many messages in blocks of some, and its records.
fn write(directory: &Path, count: u64, options: Options) -> Vec<Record<'static>> {
    let mut writer = Writer::create(directory, &Meta::default(), options).unwrap();
    let records: Vec<_> = (0..count).map(message).collect();
    records.iter().for_each(|record| writer.write(record).unwrap());
    writer.finish().unwrap();
    records
}

/// All records that can be read, as long as the head is intact.
fn read_bytes(bytes: &[u8]) -> Result<(Vec<Record<'static>>, Damage, u64), Error> {
    let mut reader = Reader::from_bytes(bytes.to_vec())?;
    let (mut records, mut malformed) = (Vec::new(), 0);
    loop {
        match reader.next() {
            Ok(Some(record)) => records.push(record.into_owned()),
            Ok(None) => return Ok((records, reader.damage(), malformed)),
            Err(Error::Record { .. }) => malformed += 1,
            Err(error) => return Err(error),
        }
    }
}

/// Whether `part` is `whole` without some of its elements.
fn is_subsequence(part: &[Record<'_>], whole: &[Record<'_>]) -> bool {
    let mut rest = whole.iter();
    part.iter().all(|record| rest.any(|other| other == record))
}

#[test]
fn a_torn_tail_loses_one_block_at_most() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("trace");
    let records = write(&directory, 60, small_blocks());
    let bytes = fs::read(&segments(&directory)[0]).unwrap();
    // Where blocks begin: what is before is safe.
    let starts: Vec<usize> = (0..bytes.len()).filter(|&at| bytes[at..].starts_with(b"UPBK")).collect();
    assert!(starts.len() > 10);
    let mut before = 0;
    for cut in starts[1]..bytes.len() {
        let (read, damage, malformed) = read_bytes(&bytes[..cut]).unwrap();
        assert_eq!(read, records[..read.len()], "cut at {cut}");
        assert!(read.len() >= before && malformed == 0, "cut at {cut}");
        assert!(damage.torn, "cut at {cut}");
        before = read.len();
    }
    assert_eq!(before, records.len());
    // A cut between two blocks costs nothing.
    let last_records = starts[starts.len() - 1];
    let (read, damage, _) = read_bytes(&bytes[..last_records]).unwrap();
    assert_eq!((read.len(), damage), (60, Damage { torn: true, ..Damage::default() }));
}

#[test]
fn every_flipped_byte_is_noticed_and_costs_its_block_only() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("trace");
    let records = write(&directory, 30, small_blocks());
    let bytes = fs::read(&segments(&directory)[0]).unwrap();
    let blocks = (0..bytes.len()).filter(|&at| bytes[at..].starts_with(b"UPBK")).count();
    let most = records.len().div_ceil(blocks - 2) + 4;
    for at in 0..bytes.len() {
        for flip in [1, 0x80, 0xff] {
            let mut damaged = bytes.clone();
            damaged[at] ^= flip;
            let Ok((read, damage, malformed)) = read_bytes(&damaged) else { continue };
            assert!(!damage.none(), "byte {at}: {damage:?}");
            assert_eq!(malformed, 0, "byte {at}");
            assert!(is_subsequence(&read, &records), "byte {at}");
            assert!(
                read.len() + most >= records.len(),
                "byte {at}: {} of {} records",
                read.len(),
                records.len()
            );
        }
    }
}

#[test]
fn a_killed_writer_leaves_what_it_flushed() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("trace");
    let mut writer = Writer::create(&directory, &Meta::default(), Options::default()).unwrap();
    for at in 0..100 {
        writer.write(&message(at)).unwrap();
    }
    writer.flush().unwrap();
    writer.write(&message(100)).unwrap();
    std::mem::forget(writer); // as SIGKILL does: no destructor runs
    let (read, damage) = read_all(&directory);
    assert_eq!(read.len(), 100);
    assert_eq!(damage, Damage { torn: true, ..Damage::default() });
}

#[test]
fn a_block_ends_after_a_second_of_records() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("trace");
    let mut writer = Writer::create(&directory, &Meta::default(), Options::default()).unwrap();
    for at in [0, 1_000, 2_000_000] {
        writer.write(&message(at)).unwrap(); // 2 s, as messages are a microsecond apart
    }
    std::mem::forget(writer);
    assert_eq!(read_all(&directory).0.len(), 2);
}

#[test]
fn segments_end_by_size_and_by_age() {
    let parent = tempfile::tempdir().unwrap();
    let by_size = parent.path().join("size");
    write(&by_size, 200, Options { segment_bytes: 2_000, ..small_blocks() });
    let lengths: Vec<u64> = segments(&by_size).iter().map(|path| path.metadata().unwrap().len()).collect();
    assert!(lengths.len() > 3 && lengths.iter().all(|&len| len < 4_000), "{lengths:?}");
    assert_eq!(read_all(&by_size).0.len(), 200);
    let by_age = parent.path().join("age");
    write(&by_age, 200, Options { segment_time: Some(Duration::from_micros(50)), ..small_blocks() });
    assert!((3..=5).contains(&segments(&by_age).len()));
    assert_eq!(read_all(&by_age).0.len(), 200);
    // Each stands for itself.
    let alone: usize = segments(&by_age).iter().map(|segment| read_all(segment).0.len()).sum();
    assert_eq!(alone, 200);
}

#[test]
fn missing_and_foreign_segments_are_told() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("trace");
    write(&directory, 200, Options { segment_bytes: 2_000, ..small_blocks() });
    let all = segments(&directory);
    fs::remove_file(&all[1]).unwrap();
    assert_eq!(read_all(&directory).1, Damage { segments: 1, ..Damage::default() });
    fs::remove_file(all.last().unwrap()).unwrap();
    assert_eq!(read_all(&directory).1, Damage { segments: 1, torn: true, ..Damage::default() });

    let other = parent.path().join("other");
    write(&other, 200, Options { segment_bytes: 2_000, ..small_blocks() });
    fs::copy(&segments(&other)[1], &all[1]).unwrap();
    let mut reader = Reader::open(&directory).unwrap();
    let error = loop {
        match reader.next() {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the foreign segment was read"),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::Foreign(_)), "{error}");
}

#[test]
fn what_is_no_trace_is_refused_plainly() {
    let parent = tempfile::tempdir().unwrap();
    let open = |path: &Path| Reader::open(path).unwrap_err().to_string();
    assert!(open(&parent.path().join("nothing")).contains("no trace here"));
    assert!(open(parent.path()).contains("no trace here"));
    let text = parent.path().join("x.upt");
    for contents in [&b""[..], b"short", &[b'x'; 5_000]] {
        fs::write(&text, contents).unwrap();
        assert!(open(&text).ends_with("not a trace"), "{}", open(&text));
    }
    let directory = parent.path().join("trace");
    write(&directory, 1, Options::default());
    let mut bytes = fs::read(&segments(&directory)[0]).unwrap();
    (bytes[8], bytes[10]) = (9, 3);
    fs::write(&text, &bytes).unwrap();
    assert!(
        open(&text).contains("trace format 9.3; this program reads up to 1.x: use a newer one"),
        "{}",
        open(&text)
    );
}

#[test]
fn nothing_is_written_over() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("trace");
    write(&directory, 1, Options::default());
    let create = |path: &Path| Writer::create(path, &Meta::default(), Options::default());
    assert!(matches!(create(&directory), Err(Error::Exists(_))));
    let file = parent.path().join("file");
    fs::write(&file, "mine").unwrap();
    assert!(matches!(create(&file), Err(Error::Exists(_))));
    assert_eq!(fs::read(&file).unwrap(), b"mine");
}

#[test]
fn only_the_owner_may_read() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("trace");
    write(&directory, 1, Options::default());
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&directory), 0o700);
    assert_eq!(mode(&segments(&directory)[0]), 0o600);
    let names: Vec<_> = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["000001.upt"], "nothing else stays");
}

/// Writes until the writer says that the trace has ended.
fn write_until_stopped(writer: &mut Writer) -> (u64, Stopped) {
    for at in 0..1_000_000 {
        match writer.write(&message(at)) {
            Ok(()) => {}
            Err(Error::Stopped(reason)) => return (at, reason),
            Err(error) => panic!("{error}"),
        }
    }
    panic!("never stopped");
}

/// All records of a trace that ended early but the last, which says so.
fn read_to_early_end(directory: &Path, reason: Stopped) -> Vec<Record<'static>> {
    let (mut read, damage) = read_all(directory);
    assert!(damage.none(), "{damage:?}");
    let Some(Record::Note(note)) = read.pop() else { panic!("no note at the end") };
    let text = String::from_utf8_lossy(&note.text).into_owned();
    assert_eq!(text, format!("the recording ended early, and has nothing of what came after: {reason}"));
    let last = read.iter().map(Record::time_ns).max();
    assert!(last.is_none_or(|last| note.time_ns >= last), "{note:?}");
    read
}

#[test]
fn the_size_limit_ends_a_trace_in_good_order() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("trace");
    let options = Options { max_bytes: Some(10_000), zstd_level: 0, ..small_blocks() };
    let mut writer = Writer::create(&directory, &Meta::default(), options).unwrap();
    let (offered, reason) = write_until_stopped(&mut writer);
    assert_eq!(reason, Stopped::SizeLimit);
    assert!(matches!(writer.write(&message(0)), Err(Error::Stopped(Stopped::SizeLimit))));
    let stats = writer.finish().unwrap();
    let read = read_to_early_end(&directory, reason);
    assert_eq!(read.len() as u64 + 1, stats.records);
    // The one whose write failed, and the one after.
    assert_eq!(read.len() as u64 + stats.dropped_records, offered + 2);
    assert!(stats.file_bytes < 15_000, "{stats:?}");
}

/// A message of this many bytes that do not compress.
fn long_message(len: usize) -> Record<'static> {
    let mut bytes = vec![b'd'];
    bytes.extend_from_slice(&(len as u32 + 4).to_be_bytes());
    let mut random = 1u64;
    let next = std::iter::repeat_with(|| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 56) as u8
    });
    bytes.extend(next.take(len));
    Record::Frontend(Frontend::new(SessionId(1), 1_000, 0, Cow::Owned(bytes)))
}

#[test]
fn the_size_limit_within_a_long_record_leaves_nothing_of_it() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("trace");
    // Room for one part of three.
    let options = Options { max_bytes: Some(3 << 19), ..small_blocks() };
    let mut writer = Writer::create(&directory, &Meta::default(), options).unwrap();
    let records: Vec<_> = (0..20).map(message).collect();
    records.iter().for_each(|record| writer.write(record).unwrap());
    writer.flush().unwrap();
    let error = writer.write(&long_message(5 << 19)).unwrap_err();
    assert!(matches!(error, Error::Stopped(Stopped::SizeLimit)), "{error}");
    let stats = writer.finish().unwrap();
    let read = read_to_early_end(&directory, Stopped::SizeLimit);
    assert_eq!((read, stats.records, stats.dropped_records), (records, 21, 1));
    let files = segments(&directory);
    let bytes = fs::read(&files[0]).unwrap();
    assert_eq!((files.len(), stats.file_bytes), (1, bytes.len() as u64), "{stats:?}");
    let blocks = (0..bytes.len()).filter(|&at| bytes[at..].starts_with(b"UPBK")).count() as u64;
    assert_eq!(stats.blocks, blocks);
}

#[test]
fn a_full_disk_within_a_long_record_leaves_nothing_of_it() {
    let Some(disk) = SmallDisk::mount(4096, 0).unwrap() else { return };
    let directory = disk.path().join("trace");
    let mut writer = Writer::create(&directory, &Meta::default(), Options::default()).unwrap();
    writer.write(&message(0)).unwrap();
    writer.flush().unwrap();
    let error = writer.write(&long_message(6 << 20)).unwrap_err();
    assert!(matches!(error, Error::Stopped(Stopped::DiskFull)), "{error}");
    let stats = writer.finish().unwrap();
    let read = read_to_early_end(&directory, Stopped::DiskFull);
    assert_eq!((read, stats.records, stats.dropped_records), (vec![message(0)], 2, 1));
}

#[test]
fn a_long_record_whose_end_was_not_written_is_damage() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("trace");
    let mut writer = Writer::create(&directory, &Meta::default(), small_blocks()).unwrap();
    writer.write(&message(0)).unwrap();
    writer.flush().unwrap();
    writer.write(&long_message(5 << 19)).unwrap();
    writer.finish().unwrap();
    let bytes = fs::read(&segments(&directory)[0]).unwrap();
    let starts: Vec<usize> = (0..bytes.len()).filter(|&at| bytes[at..].starts_with(b"UPBK")).collect();
    // META, the first record, three parts of the second, the index.
    assert_eq!(starts.len(), 6);
    let (first, second, third) = (starts[2], starts[3], starts[4]);
    for (cut, blocks) in [(first, 0), (second, 1), (third, 1), (third + 1, 1), (third + 100, 1)] {
        let (read, damage, malformed) = read_bytes(&bytes[..cut]).unwrap();
        assert_eq!((read.len(), damage.blocks, damage.torn, malformed), (1, blocks, true, 0), "cut at {cut}");
    }
}

#[test]
fn a_full_disk_ends_a_trace_in_good_order() {
    let Some(disk) = SmallDisk::mount(1024, 0).unwrap() else { return };
    let directory = disk.path().join("trace");
    let options = Options { zstd_level: 0, ..Options::default() };
    let mut writer = Writer::create(&directory, &Meta::default(), options).unwrap();
    let (offered, reason) = write_until_stopped(&mut writer);
    assert_eq!(reason, Stopped::DiskFull);
    let stats = writer.finish().unwrap();
    let read = read_to_early_end(&directory, reason);
    assert!(read.len() > 1_000);
    assert_eq!(read.len() as u64 + 1, stats.records);
    assert_eq!(read.len() as u64 + stats.dropped_records, offered + 1);
}

#[test]
fn a_full_disk_at_the_change_of_segments_ends_a_trace_in_good_order() {
    let Some(disk) = SmallDisk::mount(512, 0).unwrap() else { return };
    let directory = disk.path().join("trace");
    // Each block has a segment of its own, which needs a page of the disk.
    let options = Options { segment_bytes: 1, zstd_level: 0, ..small_blocks() };
    let mut writer = Writer::create(&directory, &Meta::default(), options).unwrap();
    let (offered, reason) = write_until_stopped(&mut writer);
    assert_eq!(reason, Stopped::DiskFull);
    let stats = writer.finish().unwrap();
    let read = read_to_early_end(&directory, reason);
    assert_eq!((read.len() as u64 + 1, segments(&directory).len() as u32), (stats.records, stats.segments));
    assert_eq!(read.len() as u64 + stats.dropped_records, offered + 1);
    let bytes: u64 = segments(&directory).iter().map(|path| fs::metadata(path).unwrap().len()).sum();
    assert_eq!(stats.file_bytes, bytes);
}

#[test]
fn a_trace_whose_index_is_too_long_ends_in_good_order() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("trace");
    let options = Options {
        block_bytes: 1,
        block_time: Duration::MAX,
        segment_time: None,
        zstd_level: 0,
        ..Options::default()
    };
    let mut writer = Writer::create(&directory, &Meta::default(), options).unwrap();
    // An entry of the index has 15 bytes at least.
    for at in 0..80_000 {
        let mut record = message(at);
        if let Record::Frontend(frontend) = &mut record {
            frontend.time_ns += 1 << 60;
        }
        writer.write(&record).unwrap();
    }
    assert_eq!(writer.finish().unwrap().blocks, 80_002);
    let (read, damage) = read_all(&directory);
    assert!(damage.none(), "{damage:?}");
    assert_eq!(read.len(), 80_000);
}
