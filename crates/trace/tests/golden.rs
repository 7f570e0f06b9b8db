// SPDX-License-Identifier: Apache-2.0
//! The golden vectors of docs/trace-format.md: these bytes mean these records, in this and every later version.
//!
//! `UNDERPASS_BLESS=1 cargo test -p underpass-trace --test golden` writes them anew. They change with the major version
//! of the format only.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{read_all, segments};
use underpass_trace::*;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn meta() -> Meta {
    Meta {
        started: Clock { monotonic_ns: 1_000_000, realtime_ns: 1_767_225_600_000_000_000 },
        writer: "golden".into(),
        host: "db1".into(),
        kernel: "6.18.0".into(),
        server: Server { version: "17.2".into(), system_identifier: Some("7".into()), ..Server::default() },
        ..Meta::default()
    }
}

/// One of each kind, in an order that makes sense.
fn records() -> Vec<Record<'static>> {
    let session = SessionId(1);
    let frontend = |time_ns, offset, message: &'static [u8]| {
        Record::Frontend(Frontend::new(session, time_ns, offset, message))
    };
    let totals = |seen| ByteTotals { seen, recorded: seen - 60, lost: 10, withheld: 50, audited: Some(seen) };
    let count = |events| Count { events, bytes: events * 100 };
    vec![
        Record::Clock(meta().started),
        Record::SessionStart(SessionStart {
            session,
            time_ns: 2_000_000,
            ready_ns: Some(3_000_000),
            source: Source::CgroupSkb,
            transport: Transport::Tcp,
            peer: Some(([192, 0, 2, 1], 40_000).into()),
            backend_pid: Some(4711),
            midstream: false,
            protocol_version: 3 << 16,
            database: Some(b"shop"[..].into()),
            user: Some(b"app"[..].into()),
            application_name: None,
            parameters: vec![(b"client_encoding"[..].into(), b"UTF8"[..].into())],
            frontend_offset: 85,
            backend_offset: 400,
        }),
        Record::Withheld(Withheld {
            session,
            time_ns: 2_500_000,
            direction: Direction::Frontend,
            offset: 35,
            len: 50,
            reason: WithheldReason::Authentication,
        }),
        Record::ParameterStatus(ParameterStatus {
            session,
            time_ns: 2_900_000,
            name: b"TimeZone"[..].into(),
            value: b"UTC"[..].into(),
        }),
        Record::PreparedFill(PreparedFill {
            session,
            time_ns: 3_000_001,
            name: b"s1"[..].into(),
            query: b"select $1"[..].into(),
            param_types: vec![23, 0],
            redaction: Redaction::None,
        }),
        frontend(4_000_000, 85, b"Q\0\0\0\x0dselect 1\0"),
        Record::Backend(Backend {
            session,
            time_ns: 4_200_000,
            offset: 400,
            message: b"C\0\0\0\x0dSELECT 1\0"[..].into(),
        }),
        Record::Response(Response {
            session,
            request: 85,
            offset: 400,
            len: 60,
            first_ns: 4_100_000,
            last_ns: 4_200_000,
            rows: 1,
            outcome: Outcome::Complete { tag: b"SELECT 1"[..].into() },
        }),
        Record::Ready(Ready {
            session,
            time_ns: 4_200_000,
            request: 85,
            offset: 460,
            status: TransactionStatus::Idle,
        }),
        frontend(5_000_000, 99, b"Q\0\0\0\x09oops\0"),
        Record::Response(Response {
            session,
            request: 99,
            offset: 466,
            len: 90,
            first_ns: 5_100_000,
            last_ns: 5_100_000,
            rows: 0,
            outcome: Outcome::Error(ErrorOutcome {
                sqlstate: *b"42601",
                fatal: false,
                message: b"syntax error at or near \"oops\""[..].into(),
            }),
        }),
        Record::Cancel(Cancel { time_ns: 5_500_000, session: Some(session), backend_pid: 4711 }),
        Record::Loss(Loss {
            session: Some(session),
            time_ns: 6_000_000,
            direction: Direction::Frontend,
            offset: 109,
            len: 10,
            reason: LossReason::RingFull,
        }),
        Record::SessionEnd(SessionEnd {
            session,
            time_ns: 7_000_000,
            reason: EndReason::Terminate,
            frontend: totals(124),
            backend: totals(562),
        }),
        Record::Counters(Counters {
            time_ns: 8_000_000,
            seen: count(20),
            recorded: count(19),
            lost: count(1),
            filtered: count(0),
        }),
        Record::Server(ServerIdentity {
            time_ns: 8_500_000,
            database: b"shop"[..].into(),
            address: b"10.0.0.5:5432"[..].into(),
            version: b"17.2"[..].into(),
            system_identifier: Some(b"7421931650231287733"[..].into()),
        }),
        Record::Note(Note { time_ns: 8_600_000, text: b"the server was started again"[..].into() }),
    ]
}

fn write(directory: &Path, zstd_level: i32) -> Vec<u8> {
    let options = Options { zstd_level, trace_id: Some(*b"golden vector 1\n"), ..Options::default() };
    let mut writer = Writer::create(directory, &meta(), options).unwrap();
    records()[1..].iter().for_each(|record| writer.write(record).unwrap()); // META brings the clock
    writer.finish().unwrap();
    fs::read(&segments(directory)[0]).unwrap()
}

#[test]
fn these_bytes_mean_these_records() {
    let parent = tempfile::tempdir().unwrap();
    let plain = write(&parent.path().join("plain"), 0);
    let compressed = write(&parent.path().join("zstd"), 1);
    if std::env::var_os("UNDERPASS_BLESS").is_some() {
        fs::write(data("golden.upt"), &plain).unwrap();
        fs::write(data("golden-zstd.upt"), &compressed).unwrap();
    }
    for name in ["golden.upt", "golden-zstd.upt"] {
        let (read, damage) = read_all(&data(name));
        assert!(damage.none(), "{name}: {damage:?}");
        assert_eq!(read, records(), "{name}");
        assert_eq!(Reader::open(&data(name)).unwrap().meta(), &meta(), "{name}");
    }
    // Compressed bytes may change with the library; those that are not do not change.
    assert_eq!(plain, fs::read(data("golden.upt")).unwrap(), "the writer writes other bytes than it did");
}
