// SPDX-License-Identifier: Apache-2.0
//! What a record costs in the file: bounds that a change of format or codec would break, and the numbers on request.

mod common;

use std::borrow::Cow;

use underpass_trace::*;
use underpass_wire::frontend::build;

/// A transaction of pgbench, prepared: what a recorder sees most.
fn transaction(writer: &mut Writer, session: u64, at: u64, offset: &mut u64) {
    let session = SessionId(session);
    let now = at * 137_911;
    let account = (at.wrapping_mul(2_654_435_761) % 100_000).to_string();
    let mut send = |writer: &mut Writer, build: &dyn Fn(&mut Vec<u8>)| {
        let mut message = Vec::new();
        build(&mut message);
        let len = message.len() as u64;
        writer.write(&Record::Frontend(Frontend::new(session, now, *offset, message))).unwrap();
        *offset += len;
        *offset - len
    };
    send(writer, &|out| build::bind(out, b"", b"P0_1", [], [Some(account.as_bytes())], []));
    let request = send(writer, &|out| build::execute(out, b"", 0));
    let sync = send(writer, &build::sync);
    let (first_ns, last_ns) = (now + 40_000 + at % 7_919, now + 41_000 + at % 7_919);
    let outcome = Outcome::Complete { tag: Cow::Borrowed(b"SELECT 1") };
    let response =
        Response { session, request, offset: at * 120, len: 114, first_ns, last_ns, rows: 1, outcome };
    writer.write(&Record::Response(response)).unwrap();
    let status = TransactionStatus::Idle;
    writer
        .write(&Record::Ready(Ready {
            session,
            time_ns: last_ns,
            request: sync,
            offset: at * 120 + 114,
            status,
        }))
        .unwrap();
}

#[test]
fn a_transaction_is_small() {
    let parent = tempfile::tempdir().unwrap();
    let count = 100_000;
    let mut sizes = Vec::new();
    for zstd_level in [0, 1, 3] {
        let directory = parent.path().join(zstd_level.to_string());
        let options = Options { zstd_level, ..Options::default() };
        let mut writer = Writer::create(&directory, &Meta::default(), options).unwrap();
        let mut offsets = [0; 8];
        let start = std::time::Instant::now();
        for at in 0..count {
            let session = (at % 8) as usize;
            transaction(&mut writer, session as u64, at, &mut offsets[session]);
        }
        let stats = writer.finish().unwrap();
        let bytes = stats.file_bytes as f64 / count as f64;
        if std::env::var_os("TRACE_SIZES").is_some() {
            let us = start.elapsed().as_secs_f64() * 1e6 / count as f64;
            println!("zstd {zstd_level}: {bytes:.1} bytes and {us:.2} us a transaction of 5 records");
        }
        sizes.push(bytes);
    }
    // 3 messages have 47 bytes on the wire.
    assert!(sizes[0] < 120.0 && sizes[1] < 0.5 * sizes[0], "{sizes:?}");
}
