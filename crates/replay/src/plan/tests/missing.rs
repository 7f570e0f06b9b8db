// SPDX-License-Identifier: Apache-2.0
//! What is not in the trace, and what must not be played for that.

use std::fs;

use underpass_trace::{ErrorOutcome, Options as WriterOptions, Withheld, WithheldReason, Writer};

use super::*;

/// A client's message, or several.
type Build = fn(&mut Vec<u8>);

impl Trace {
    /// Bytes that should be here.
    fn lose(&mut self, session: u64, time_ns: u64, len: u64) {
        let offset = self.pass(session, len);
        let (session, direction) = (Some(SessionId(session)), Direction::Frontend);
        let reason = LossReason::RingFull;
        self.records.push(Record::Loss(Loss { session, time_ns, direction, offset, len, reason }));
    }

    /// Data that masking left out.
    fn withhold(&mut self, session: u64, time_ns: u64, len: u64) {
        let offset = self.pass(session, len);
        let (session, direction) = (SessionId(session), Direction::Frontend);
        let reason = WithheldReason::Masking;
        self.records.push(Record::Withheld(Withheld { session, time_ns, direction, offset, len, reason }));
    }

    fn pass(&mut self, session: u64, len: u64) -> u64 {
        let next = self.offsets.entry(session).or_default();
        let offset = *next;
        *next += len;
        offset
    }
}

fn copy(out: &mut Vec<u8>) {
    build::query(out, b"begin; /* all */ COPY t(a) FROM STDIN");
}

fn copy_extended(out: &mut Vec<u8>) {
    build::parse(out, b"", b"copy t from stdin", []);
    build::bind(out, b"", b"", [], [], []);
    build::execute(out, b"", 0);
    build::sync(out);
}

fn done(out: &mut Vec<u8>) {
    build::copy_done(out);
}

fn done_extended(out: &mut Vec<u8>) {
    build::copy_done(out);
    build::sync(out);
}

/// It would wait for them for ever.
#[test]
fn a_copy_without_its_data_is_not_played() {
    let protocols: [(Build, Build); 2] = [(copy, done), (copy_extended, done_extended)];
    for (copy, done) in protocols {
        let mut trace = Trace::default();
        trace.start(1, 0, false);
        trace.send(1, 1, copy);
        trace.lose(1, 2, 100);
        let last = trace.send(1, 3, done);
        trace.ready(1, 4, last, I);
        trace.query(1, 5, 6, "select 1", I);
        let plan = trace.plan(&Options::default());
        assert_eq!(omitted(&plan)[0], Some(Reason::Lost));
        assert_eq!(omitted(&plan).last(), Some(&None));

        // Also if nothing of it is left, not even its end.
        let mut trace = Trace::default();
        trace.start(1, 0, false);
        trace.send(1, 1, copy);
        trace.lose(1, 2, 100);
        trace.query(1, 5, 6, "select 1", I);
        assert_eq!(omitted(&trace.plan(&Options::default())), [Some(Reason::Lost), None]);

        let mut trace = Trace::default();
        trace.start(1, 0, false);
        trace.send(1, 1, copy);
        trace.withhold(1, 2, 100);
        trace.withhold(1, 2, 100);
        let last = trace.send(1, 3, done);
        trace.ready(1, 4, last, I);
        trace.query(1, 5, 6, "select 1", I);
        let plan = trace.plan(&Options::default());
        assert_eq!(format!("{:?}", omitted(&plan)), "[Some(Masked), None]");

        for ends in [true, false] {
            let mut trace = Trace::default();
            trace.start(1, 0, false);
            trace.query(1, 1, 2, "select 1", I);
            trace.send(1, 3, copy);
            if ends {
                trace.end(1, 5);
            }
            assert_eq!(omitted(&trace.plan(&Options::default())), [None, Some(Reason::Incomplete)]);
        }
    }
}

#[test]
fn a_copy_that_the_server_refused_needs_no_data() {
    let mut trace = Trace::default();
    trace.start(1, 0, false);
    let request = trace.send(1, 1, copy);
    let message = [b'x'; 5_000].to_vec().into();
    let error = ErrorOutcome { sqlstate: *b"42P01", fatal: false, message };
    trace.complete(1, 2, request, "");
    if let Some(Record::Response(response)) = trace.records.last_mut() {
        response.outcome = Outcome::Error(error);
    }
    trace.ready(1, 2, request, I);
    trace.query(1, 3, 4, "select 1", I);
    trace.end(1, 5);
    let plan = trace.plan(&Options::default());
    assert_eq!(omitted(&plan), [None, None]);
    // Millions of them may differ, and all are in memory.
    let end = plan.expected(&plan.sessions[0].units[0])[0].end.as_ref();
    assert!(matches!(end, Some(End::Error(_, message)) if message.len() == 300));
}

/// The server would begin it and wait.
#[test]
fn a_copy_whose_data_the_trace_never_had_is_not_played() {
    let reason = Some(Reason::NoCopyData);
    let cases: [(Build, bool, &str, Option<Reason>); 5] = [
        (copy, false, "COPY 5", reason),
        (copy_extended, false, "COPY 5", reason),
        (copy, true, "COPY", reason),
        // Of a log nobody knows whether it was refused, or its data.
        (copy, true, "", reason),
        (copy, false, "", None),
    ];
    for (send, imported, outcome, omitted_for) in cases {
        let mut trace = Trace::default();
        trace.start(1, 0, false);
        if let Some(Record::SessionStart(start)) = trace.records.last_mut() {
            start.source = if imported { Source::Import } else { Source::Synthetic };
        }
        let request = trace.send(1, 1, send);
        trace.complete(1, 2, request, outcome);
        if let Some(Record::Response(response)) = trace.records.last_mut().filter(|_| outcome.is_empty()) {
            let error = ErrorOutcome { sqlstate: *b"42P01", fatal: false, message: b""[..].into() };
            response.outcome = Outcome::Error(error);
        }
        trace.ready(1, 2, request, I);
        trace.query(1, 3, 4, "select 1", I);
        // Also as the last of its session.
        let request = trace.send(1, 5, send);
        trace.complete(1, 6, request, "COPY 5");
        trace.ready(1, 6, request, I);
        let plan = trace.plan(&Options::default());
        assert_eq!(omitted(&plan), [omitted_for, None, reason], "{outcome} {imported}");
    }
}

/// Nor do they keep that unit open, so that the next query would become a part of it.
#[test]
fn data_of_a_copy_that_was_lost_belong_to_no_other_unit() {
    let mut trace = Trace::default();
    trace.start(1, 0, false);
    let sync = trace.send(1, 1, |out| {
        build::parse(out, b"", b"select 1", []);
        build::sync(out);
    });
    trace.ready(1, 2, sync, I);
    trace.lose(1, 3, 100);
    trace.send(1, 4, |out| {
        build::copy_data(out, b"1\n");
        build::copy_data(out, b"2\n");
        build::copy_done(out);
    });
    trace.query(1, 5, 6, "select 2", I);
    let plan = trace.plan(&Options::default());
    assert_eq!(omitted(&plan), [None, None]);
    assert_eq!(sent(&plan, 0, 0).len(), 1);
}

/// Whether it was COMMIT or ROLLBACK nobody knows, and open it would keep its locks from all who come later.
#[test]
fn a_transaction_whose_end_was_lost_is_not_played() {
    let mut trace = Trace::default();
    trace.start(1, 0, false);
    trace.query(1, 1, 2, "select 1", I);
    trace.query(1, 3, 4, "begin", T);
    trace.query(1, 5, 6, "update t set a = 1", T);
    trace.lose(1, 7, 12);
    trace.query(1, 9, 10, "select 2", I);
    trace.query(1, 11, 12, "begin", T);
    let lost = Some(Reason::Lost);
    assert_eq!(omitted(&trace.plan(&Options::default())), [None, lost, lost, None, None]);
}

#[test]
fn a_transaction_whose_beginning_was_lost_is_not_played_without_it() {
    let mut trace = Trace::default();
    trace.start(1, 0, false);
    trace.query(1, 1, 2, "select 1", I);
    trace.lose(1, 3, 12);
    trace.query(1, 5, 6, "update t set a = 1", T);
    trace.query(1, 7, 8, "rollback", I);
    trace.query(1, 9, 10, "select 2", I);
    let lost = Some(Reason::Lost);
    assert_eq!(omitted(&trace.plan(&Options::default())), [None, lost, lost, None]);

    // In the middle it is played as far as it is there.
    let mut trace = Trace::default();
    trace.start(1, 0, false);
    trace.query(1, 1, 2, "begin", T);
    trace.lose(1, 3, 12);
    trace.query(1, 5, 6, "update t set a = 1", T);
    trace.query(1, 7, 8, "rollback", I);
    assert_eq!(omitted(&trace.plan(&Options::default())), [None; 3]);
}

#[test]
fn what_is_missing_is_counted() {
    let mut trace = Trace::default();
    trace.start(1, 0, false);
    trace.query(1, 1, 2, "select 1", I);
    trace.lose(1, 3, 100);
    trace.query(1, 4, 5, "select 2", I);
    // Also without a record that says so, and behind the last message.
    trace.pass(1, 10);
    trace.query(1, 6, 7, "select 3", I);
    trace.lose(1, 8, 1000);
    trace.end(1, 9);
    // Its beginning was in a block that cannot be read.
    trace.query(2, 5, 6, "select 4", I);
    trace.query(2, 7, 8, "select 5", I);
    // This one is not wanted.
    trace.start(3, 5, false);
    trace.query(3, 6, 7, "select 6", I);
    let filter = Filter { sessions: [1].into(), ..Filter::default() };
    let plan = trace.plan(&Options { filter, ..Options::default() });
    assert_eq!(omitted(&plan), [None; 3]);
    assert_eq!((plan.holes, plan.hole_bytes, plan.headless_sessions), (3, 1110, 1));

    // What was sent before recording joined the session is not missing.
    let mut trace = Trace::default();
    trace.start(1, 0, true);
    trace.pass(1, 100);
    trace.query(1, 1, 2, "select 1", I);
    assert_eq!(trace.plan(&Options::default()).holes, 0);
}

/// Castagnoli's, by which the trace checks its blocks.
fn crc32c(bytes: &[u8]) -> [u8; 4] {
    let bit = |crc: u32| (crc >> 1) ^ (0x82f6_3b78 * (crc & 1));
    let crc = bytes.iter().fold(u32::MAX, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| bit(crc)));
    (!crc).to_le_bytes()
}

/// Reports and exports read such a trace, too.
#[test]
fn a_record_that_cannot_be_understood_is_counted() {
    let mut trace = Trace::default();
    trace.start(1, 0, false);
    trace.query(1, 1, 2, "select 1", I);
    trace.query(1, 3, 4, "select 2", I);
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("trace");
    // A block for each record.
    let options = WriterOptions { block_bytes: 1, zstd_level: 0, ..WriterOptions::default() };
    let mut writer = Writer::create(&directory, &Meta::default(), options).unwrap();
    trace.records.iter().for_each(|record| writer.write(record).unwrap());
    writer.finish().unwrap();
    let whole = read(&directory, &Options::default()).unwrap();
    assert_eq!((whole.units(), whole.malformed_records), (2, 0));

    let segment = fs::read_dir(&directory).unwrap().next().unwrap().unwrap().path();
    let mut bytes = fs::read(&segment).unwrap();
    let word = |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    // The first block with a Ready (kind 4), whose last byte is the status.
    let is_block = |at: &usize| bytes[*at..].starts_with(b"UPBK") && word(&bytes, at + 24) == 1 << 4;
    let header = (0..bytes.len()).find(is_block).unwrap();
    let payload = header + 72..header + 72 + word(&bytes, header + 20) as usize;
    assert_eq!(bytes[payload.end - 1], b'I');
    bytes[payload.end - 1] = b'?';
    let crc = crc32c(&bytes[payload]);
    bytes[header + 64..header + 68].copy_from_slice(&crc);
    let crc = crc32c(&bytes[header..header + 68]);
    bytes[header + 68..header + 72].copy_from_slice(&crc);
    fs::write(&segment, bytes).unwrap();
    let plan = read(&directory, &Options::default()).unwrap();
    assert_eq!((plan.units(), plan.malformed_records, plan.damaged_blocks), (2, 1, 0));
}
