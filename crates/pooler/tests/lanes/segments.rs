// SPDX-License-Identifier: Apache-2.0
//! Thousands of small requests in one segment: as many as a program counts, and more.

use underpass_testkit::{Netns, service_user};

use super::*;

/// Transactions that PostgreSQL ends for so many Syncs or Queries in one segment.
const DEPTH_MAX: usize = 4096;
/// Messages that a program looks at.
const MESSAGES_MAX: usize = 16_384;

/// A client in its lane, whose requests may come in segments as long as any: the kernel sends half of the peer's window at most, which opens
/// with what comes.
fn wide_client(pooler: &Underpass) -> Result<Client> {
    let mut client = client(pooler)?;
    let long = "y".repeat(60_000);
    for _ in 0..20 {
        assert_eq!(value(&mut client, &format!("select '{long}'"))?, long);
    }
    settle(&mut client)?;
    Ok(client)
}

/// The first may find its client on its way back to the lane.
fn settle(client: &mut Client) -> Result<()> {
    (0..3).try_for_each(|_| value(client, "select 1").map(drop))
}

/// The types of all messages of so many answers.
fn tags(client: &mut Client, answers: usize) -> Result<String> {
    (0..answers).map(|_| Ok(client.response()?.ok()?.tags())).collect()
}

#[test]
fn ten_thousand_requests_in_one_segment() -> Result<()> {
    each_lane(
        |ini| ini,
        |_, pooler, lane| {
            let mut a = wide_client(pooler)?;
            // As many as the link word counts, each with its own answer. The lane's, but for those that a client which is slow to read has no room
            // for.
            let ended = || {
                let slow = kernel(pooler, "room", "xacts")? + kernel(pooler, "response_queue", "xacts")?;
                Ok::<_, underpass_testkit::Error>(carried(pooler, lane)? + slow)
            };
            let (before, in_lane) = (ended()?, carried(pooler, lane)?);
            let few = DEPTH_MAX - 596;
            a.send(&(0..few).fold(Batch::new(), |batch, n| batch.query(&format!("select {n}"))))?;
            for n in 0..few {
                assert_eq!(a.response()?.ok()?.value(), Some(&*n.to_string()), "lane {lane}");
            }
            assert_eq!(ended()? - before, few as u64, "lane {lane}");
            assert!(carried(pooler, lane)? > in_lane, "lane {lane}");

            // More messages, and one answer.
            settle(&mut a)?;
            let before = carried(pooler, lane)?;
            a.send(&(0..10_000).fold(Batch::new(), |batch, _| batch.flush()).sync())?;
            assert_eq!(tags(&mut a, 1)?, "Z", "lane {lane}");
            assert_eq!(carried(pooler, lane)? - before, 1, "lane {lane}");

            // More answers than it counts: Syncs, and Queries without a statement.
            let syncs = (0..10_000).fold(Batch::new(), |batch, _| batch.sync());
            let queries = (0..10_000).fold(Batch::new(), |batch, _| batch.query(""));
            for (batch, answer) in [(syncs, "Z"), (queries, "IZ")] {
                settle(&mut a)?;
                let counted = || {
                    Ok::<_, underpass_testkit::Error>((
                        kernel(pooler, "depth", "count")?,
                        kernel(pooler, "depth", "xacts")?,
                    ))
                };
                let before = counted()?;
                a.send(&batch)?;
                assert_eq!(tags(&mut a, 10_000)?, answer.repeat(10_000), "lane {lane}");
                let now = counted()?;
                assert_eq!(now.0 - before.0, 1, "lane {lane}, {answer}");
                // What went before it of the same pipeline, if it came in more than one segment, is the lane's.
                assert!(now.1 - before.1 > 10_000 - DEPTH_MAX as u64, "lane {lane}, {answer}: {now:?}");
            }
            assert_eq!(value(&mut a, "select 9")?, "9");
            Ok(())
        },
    )
}

/// A segment with more messages than a program looks at is longer than the 64 KiB that a segment has by default; where the device
/// may have longer ones (BIG TCP), it comes.
#[test]
fn more_messages_than_a_program_looks_at() -> Result<()> {
    if service_user().is_none() {
        eprintln!("skipped: network namespaces need root");
        return Ok(());
    }
    let here = Netns::new()?;
    if let Err(error) = here.set_longest_segment(256 << 10) {
        eprintln!("skipped: no segments above 64 KiB: {error}");
        return Ok(());
    }
    here.run(|| {
        each_lane(
            |ini| ini,
            |_, pooler, lane| {
                let mut a = wide_client(pooler)?;
                let flood = (0..MESSAGES_MAX + 600).fold(Batch::new(), |batch, _| batch.flush()).sync();
                let begun = Instant::now();
                // As long as the peer's window lets it come in one.
                while kernel(pooler, "messages", "count")? == 0 {
                    settle(&mut a)?;
                    a.send(&flood)?;
                    assert_eq!(tags(&mut a, 1)?, "Z", "lane {lane}");
                    assert!(begun.elapsed() < Duration::from_secs(20), "lane {lane}: never in one segment");
                }
                // Where its Sync was read by itself, the client had been about to go back.
                let outside = kernel(pooler, "messages", "xacts")? + kernel(pooler, "unread", "xacts")?;
                assert!(outside >= 1, "lane {lane}");
                assert_eq!(value(&mut a, "select 9")?, "9");
                Ok(())
            },
        )
    })?
}
