// SPDX-License-Identifier: Apache-2.0
//! What goes into a trace comes out of it: every kind of record with any contents, however blocks and segments are cut.

mod common;

use std::borrow::Cow;

use common::{arbitrary, read_all};
use proptest::prelude::*;
use underpass_trace::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_records(
        records in prop::collection::vec(arbitrary::record(), 0..60),
        block_bytes in 1..2000usize,
        segment_bytes in 200..20_000u64,
        zstd_level in 0..3i32,
    ) {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("trace");
        let options = Options { block_bytes, segment_bytes, segment_time: None, zstd_level, ..Options::default() };
        let mut writer = Writer::create(&directory, &Meta::default(), options).unwrap();
        let mut clocks = Vec::new();
        for record in &records {
            writer.write(record).unwrap();
            if matches!(record, Record::Clock(_)) { clocks.push(record.clone()) }
        }
        let stats = writer.finish().unwrap();
        prop_assert_eq!(stats.stopped, Some(Stopped::Finished));

        let (read, damage) = read_all(&directory);
        prop_assert!(damage.none(), "{damage:?}");
        prop_assert_eq!(read.len() as u64, stats.records);
        // The last clock is repeated at the head of every segment.
        let without = |records: &[Record<'static>]| -> Vec<_> {
            records.iter().filter(|record| !matches!(record, Record::Clock(_))).cloned().collect()
        };
        prop_assert_eq!(without(&read), without(&records));
        let read_clocks = read.iter().filter(|record| matches!(record, Record::Clock(_)));
        prop_assert!(read_clocks.clone().count() >= clocks.len());
        prop_assert!(read_clocks.into_iter().all(|clock| clocks.contains(clock)));
        let bytes: u64 = common::segments(&directory).iter().map(|path| path.metadata().unwrap().len()).sum();
        prop_assert_eq!(bytes, stats.file_bytes);
        prop_assert_eq!(common::segments(&directory).len() as u32, stats.segments);
    }
}

#[test]
fn blocks_that_are_written_in_a_hurry_are_larger_and_say_the_same() {
    let parent = tempfile::tempdir().unwrap();
    let write = |name: &str, hurry: fn(u64) -> bool| {
        let directory = parent.path().join(name);
        let mut writer = Writer::create(&directory, &Meta::default(), Options::default()).unwrap();
        for at in 1..=20_000 {
            writer.hurry(hurry(at));
            let text = format!("select {} from accounts where aid = {}\0", at % 7, at * 7919 % 100_000);
            let frontend = Frontend::new(SessionId(at % 8), at, at * 50, text.into_bytes());
            writer.write(&Record::Frontend(frontend)).unwrap();
        }
        (directory, writer.finish().unwrap().file_bytes)
    };
    let (calm, small) = write("calm", |_| false);
    let (mixed, between) = write("mixed", |at| at / 7000 % 2 == 1);
    let (hurried, large) = write("hurried", |_| true);
    assert!(small < between && between < large, "{small} {between} {large}");
    let expected = read_all(&calm).0;
    assert!(expected.len() == 20_000 && read_all(&mixed).0 == expected && read_all(&hurried).0 == expected);
}

#[test]
fn a_message_longer_than_many_blocks() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("trace");
    // Does not compress, so that its blocks are stored as they are.
    let mut state = 1u64;
    let message: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    })
    .take(16 << 20)
    .collect();
    let mut writer = Writer::create(&directory, &Meta::default(), Options::default()).unwrap();
    for time_ns in 1..=3 {
        let frontend = Frontend::new(SessionId(7), time_ns, time_ns << 30, Cow::Borrowed(&message[..]));
        writer.write(&Record::Frontend(frontend)).unwrap();
        let ready = Ready {
            session: SessionId(7),
            time_ns,
            request: time_ns << 30,
            offset: 6 * time_ns,
            status: TransactionStatus::Idle,
        };
        writer.write(&Record::Ready(ready)).unwrap();
    }
    let stats = writer.finish().unwrap();
    assert!(stats.blocks > 48, "{stats:?}");
    let (read, damage) = read_all(&directory);
    assert!(damage.none(), "{damage:?}");
    assert_eq!(read.len(), 6);
    for (at, record) in read.iter().step_by(2).enumerate() {
        let Record::Frontend(frontend) = record else { panic!("{record:?}") };
        assert_eq!(frontend.offset, (at as u64 + 1) << 30);
        assert!(frontend.message == message, "the message of record {at} differs");
    }
}

#[test]
fn meta_is_kept() {
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("trace");
    let meta = Meta {
        protocol: Protocol::Mysql,
        level: Level::Full,
        host: "db1".into(),
        server: Server { system_identifier: Some("7301234567890123456".into()), ..Server::default() },
        filters: vec!["--database shop".into()],
        started: Clock { monotonic_ns: 17, realtime_ns: -4 },
        ..Meta::default()
    };
    Writer::create(&directory, &meta, Options::default()).unwrap().finish().unwrap();
    let mut reader = Reader::open(&directory).unwrap();
    assert_eq!(reader.meta(), &meta);
    assert_eq!(reader.next().unwrap(), Some(Record::Clock(meta.started)));
    assert_eq!(reader.next().unwrap(), None);
    assert!(reader.damage().none());
}
