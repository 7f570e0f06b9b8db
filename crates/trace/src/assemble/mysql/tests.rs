// SPDX-License-Identifier: Apache-2.0
//! Whole sessions, cut and damaged in every way.

use proptest::prelude::*;
use underpass_mysql::capability::{self, Capabilities};
use underpass_mysql::handshake::Login;
use underpass_mysql::packet::{self, HEADER_BYTES, Header, put_message};

use super::*;
use crate::statements::{Event, Statements};
use crate::{Protocol, SessionId, Source, Transport, codec};

const COLUMN: &[u8] = b"\x03def\0\0\0\x01a\0\x0c\x3f\0\x01\0\0\0\x03\x81\0\0\0\0";
const EOF: &[u8] = b"\xfe\0\0\x03\0";
const OK: &[u8] = b"\0\x02\0\x02\0\0\0";
const GREETING: &[u8] =
    b"\x0a5.5.5-10.11.19-MariaDB\0\x2a\0\0\0abcdefgh\0\xfe\xf7\x2d\x02\0\xff\x81\x15\0\0\0\0\0\0\
    \x1d\0\0\0ijklmnopqrst\0mysql_native_password\0";

/// Bytes of one direction.
type Part = (Direction, Vec<u8>);

fn client(sequence: u8, payloads: &[&[u8]]) -> Part {
    part(Direction::Frontend, sequence, payloads)
}

fn server(sequence: u8, payloads: &[&[u8]]) -> Part {
    part(Direction::Backend, sequence, payloads)
}

fn part(direction: Direction, mut sequence: u8, payloads: &[&[u8]]) -> Part {
    let mut bytes = Vec::new();
    for payload in payloads {
        sequence = put_message(&mut bytes, sequence, payload);
    }
    (direction, bytes)
}

fn login(capabilities: u64) -> Vec<Part> {
    login_to(0x81ff_f7fe, capabilities)
}

/// A login to a server that has these of the lower 32 capabilities.
fn login_to(offered: u64, capabilities: u64) -> Vec<Part> {
    let mut greeting = GREETING.to_vec();
    let at = 9 + greeting.windows(9).position(|bytes| bytes == b"abcdefgh\0").unwrap();
    greeting[at..at + 2].copy_from_slice(&(offered as u16).to_le_bytes());
    greeting[at + 5..at + 7].copy_from_slice(&((offered >> 16) as u16).to_le_bytes());
    let mut message = Vec::new();
    let login = Login {
        capabilities: Capabilities(capabilities),
        collation: 45,
        user: b"ann",
        database: Some(b"shop"),
        plugin: Some(b"mysql_native_password"),
        attributes: vec![(b"program_name", b"till"), (b"_os", b"Linux")],
    };
    login.put(&mut message, 1, b"S3cret-hash");
    vec![server(0, &[&greeting]), (Direction::Frontend, message), server(2, &[OK])]
}

/// What a client of a shop does after its login.
fn work() -> Vec<Part> {
    vec![
        client(0, &[b"\x03select a from t"]),
        server(1, &[b"\x01", COLUMN, EOF, b"\x011", b"\x012", EOF]),
        client(0, &[b"\x16insert into t values (?, ?)"]),
        server(1, &[b"\0\x07\0\0\0\0\0\x02\0\0\0\0", COLUMN, COLUMN, EOF]),
        // The second parameter comes in parts.
        client(0, &[b"\x18\x07\0\0\0\x01\0lo"]),
        client(0, &[b"\x18\x07\0\0\0\x01\0ng"]),
        client(0, &[b"\x17\x07\0\0\0\0\x01\0\0\0\0\x01\x03\0\xfc\0\x2a\0\0\0"]),
        server(1, &[OK]),
        client(0, &[b"\x17\x07\0\0\0\0\x01\0\0\0\x02\0\x2b\0\0\0"]),
        server(1, &[b"\xff\x26\x04#23000Duplicate entry"]),
        client(0, &[b"\x19\x07\0\0\0"]),
        client(0, &[b"\x03load data local infile '/x' into table t"]),
        server(1, &[b"\xfb/x"]),
        client(2, &[b"1\n2\n", b""]),
        server(4, &[OK]),
        client(0, &[b"\x02warehouse"]),
        server(1, &[b"\0\0\0\x02\0\0\0"]),
        client(0, &[b"\x11bob\0\x06S3cretshop\0"]),
        server(1, &[b"\xfemysql_native_password\0abcdefghijklmnopqrst\0"]),
        client(2, &[b"S3cret-hash"]),
        server(3, &[b"\0\0\0\x02\0\0\0"]),
        client(0, &[b"\x01"]),
    ]
}

#[derive(Default)]
struct Records(Vec<Record<'static>>);

impl Sink for Records {
    fn record(&mut self, record: Record<'_>) {
        self.0.push(record.into_owned());
    }
}

impl Records {
    fn outcomes(&self) -> Vec<String> {
        let told = |r: &Record<'_>| match r {
            Record::Response(r) => Some(match &r.outcome {
                Outcome::Complete { tag } => format!("{} {}", String::from_utf8_lossy(tag), r.rows),
                Outcome::Error(error) => String::from_utf8_lossy(&error.sqlstate).into_owned(),
                other => format!("{other:?}"),
            }),
            _ => None,
        };
        self.0.iter().filter_map(told).collect()
    }

    fn statements(&self) -> Vec<(String, Vec<Option<String>>)> {
        let mut statements = Statements::new(Protocol::Mysql);
        let mut found = Vec::new();
        let mut events = Vec::new();
        for record in &self.0 {
            statements.push(record, &mut events);
            for event in &events {
                let Event::Statement(statement) = event else { continue };
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                let values = statement.parameters.values.iter().map(|v| v.as_deref().map(text)).collect();
                found.push((statement.text.as_deref().map_or("?".into(), text), values));
            }
        }
        found
    }

    fn sets(&self) -> Vec<String> {
        let told = |r: &Record<'_>| match r {
            Record::ParameterStatus(r) => {
                Some(format!("{}={}", String::from_utf8_lossy(&r.name), String::from_utf8_lossy(&r.value)))
            }
            _ => None,
        };
        self.0.iter().filter_map(told).collect()
    }

    /// The records' fields as a file has them, without compression: `Debug` shows bytes as numbers.
    fn stored(&self) -> String {
        let (mut state, mut bytes) = (codec::State::default(), Vec::new());
        self.0.iter().for_each(|record| codec::encode(&mut state, record, &mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn end(&self) -> SessionEnd {
        let end = self.0.iter().find_map(|r| if let Record::SessionEnd(r) = r { Some(*r) } else { None });
        let end = end.expect("an end");
        assert!(end.frontend.add_up() && end.backend.add_up(), "{end:?}");
        end
    }
}

fn machine(level: Level) -> Mysql {
    let (source, transport) = (Source::Synthetic, Transport::Tcp);
    Mysql::new(Origin { session: SessionId(7), source, transport, peer: None, level })
}

/// Runs the parts, each cut where `cut` says.
fn run(mut session: Mysql, parts: &[Part], mut cut: impl FnMut(usize) -> usize) -> Records {
    let mut records = Records::default();
    for (direction, bytes) in parts {
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let (piece, after) = rest.split_at(cut(rest.len()).clamp(1, rest.len()));
            session.piece(*direction, 5, Piece::Bytes(piece), &mut records);
            rest = after;
        }
    }
    session.end(9, EndReason::Unknown, Audit::default(), &mut records);
    records
}

fn outcomes() -> [&'static str; 5] {
    ["ROWS 2 2", "PREPARE 7 2 0", "OK 2 0", "23000", "OK 2 0"]
}

#[test]
fn a_session_is_told_wherever_it_is_cut() {
    let parts = [login(capability::PROTOCOL_41), work()].concat();
    for size in [usize::MAX, 1, 3, 7] {
        let records = run(machine(Level::Summary), &parts, |_| size);
        assert_eq!(records.outcomes(), outcomes(), "pieces of {size}");
        let expected = [
            ("select a from t", vec![]),
            ("insert into t values (?, ?)", vec![Some("42"), Some("long")]),
            ("insert into t values (?, ?)", vec![Some("43"), None]),
            ("load data local infile '/x' into table t", vec![]),
        ];
        let expected = expected.map(|(text, values): (_, Vec<Option<&str>>)| {
            (text.to_owned(), values.into_iter().map(|v| v.map(str::to_owned)).collect())
        });
        assert_eq!(records.statements(), expected);
        assert_eq!(
            records.sets(),
            ["version=10.11.19-MariaDB", "database=warehouse", "user=bob", "database=shop"]
        );
        let end = records.end();
        assert_eq!((end.reason, end.frontend.lost, end.backend.lost), (EndReason::Terminate, 0, 0));
        let stored = records.stored();
        assert!(stored.contains("load data local") && !stored.contains("S3cret"), "a password");
        let Some(Record::SessionStart(start)) = records.0.first() else { panic!("{:?}", records.0) };
        assert_eq!(
            (start.user.as_deref(), start.database.as_deref()),
            (Some(&b"ann"[..]), Some(&b"shop"[..]))
        );
        assert_eq!((start.application_name.as_deref(), start.backend_pid), (Some(&b"till"[..]), Some(42)));
    }
}

#[test]
fn a_replica_does_not_tell_its_password() {
    let replica = b"\x15\x07\0\0\0\x04host\x04repl\x06S3cret\xea\x0c\0\0\0\0\0\0\0\0";
    let mut parts = login(capability::PROTOCOL_41);
    parts.extend([client(0, &[replica]), server(1, &[OK]), client(0, &[b"\x01"])]);
    let records = run(machine(Level::Summary), &parts, |_| usize::MAX);
    assert!(!records.stored().contains("S3cret"), "a password");
    assert_eq!((records.end().reason, records.end().frontend.lost), (EndReason::Terminate, 0));
    let is_login = |r: &Record<'_>| matches!(r, Record::Withheld(r) if r.reason == WithheldReason::Authentication && r.len == 4 + replica.len() as u64);
    assert!(records.0.iter().any(is_login), "{:?}", records.0);
}

#[test]
fn the_whole_of_the_answers_is_there_at_level_full() {
    let parts = [login(capability::PROTOCOL_41), work()].concat();
    let records = run(machine(Level::Full), &parts, |_| 11);
    let kept: Vec<u8> = records
        .0
        .iter()
        .filter_map(|r| if let Record::Backend(r) = r { Some(r.message.to_vec()) } else { None })
        .flatten()
        .collect();
    let sent: Vec<u8> = parts[3..]
        .iter()
        .filter(|(way, _)| *way == Direction::Backend)
        .flat_map(|(_, bytes)| bytes.clone())
        .collect();
    assert!(kept == sent);
}

#[test]
fn level_none_keeps_what_texts_need() {
    let parts = [login(capability::PROTOCOL_41), work()].concat();
    let records = run(machine(Level::None), &parts, |_| usize::MAX);
    assert_eq!(records.outcomes(), ["PREPARE 7 2 0", "23000"][..1]);
    assert_eq!(records.statements().len(), 4);
}

#[test]
fn a_session_is_joined_at_a_command() {
    let mut session = machine(Level::Summary);
    session.joined(Known::default());
    let mut parts =
        vec![server(9, &[b"the end of a row"]), (Direction::Frontend, b"a part of something".to_vec())];
    // A statement that was prepared before.
    parts.extend([client(0, &[b"\x17\x03\0\0\0\0\x01\0\0\0"]), server(1, &[OK])]);
    parts.extend(work());
    let records = run(session, &parts, |_| usize::MAX);
    assert_eq!(records.outcomes(), ["OK 2 0"].iter().chain(&outcomes()).copied().collect::<Vec<_>>());
    assert_eq!(records.statements()[0], ("?".to_owned(), vec![]));
    let Some(Record::SessionStart(start)) = records.0.first() else { panic!("{:?}", records.0) };
    assert!(start.midstream && start.user.is_none());
    assert_eq!((records.end().frontend.lost, records.end().backend.lost), (0, 0));
}

/// The other end of a connection that a server has made itself: its source's greeting, answers, and a stream of events whose packets
/// are numbered round.
#[test]
fn what_a_replica_is_sent_is_no_command() {
    let mut session = machine(Level::Summary);
    session.joined(Known::default());
    let mut records = Records::default();
    let mut parts =
        vec![client(0, &[GREETING]), client(2, &[OK]), client(1, &[b"\x01", COLUMN, EOF, b"\x011", EOF])];
    for number in 0..=255 {
        // Behind OK: the time, the kind of the event, its server.
        parts.push(client(number, &[b"\0\x2a\0\0\0\x02\x01\0\0\0insert into t values (1)"]));
    }
    for number in [0x0b, 0x0f, 0x10, 0x13, 0x14, 0x1d] {
        parts.push(client(0, &[&[number, b'x']]));
    }
    for part in [parts.clone(), as_read(&parts)].concat() {
        session.piece(part.0, 5, Piece::Bytes(&part.1), &mut records);
    }
    assert!(records.0.is_empty(), "{:?}", records.0);
    // It can still be joined.
    session.piece(Direction::Frontend, 6, Piece::Bytes(&client(0, &[b"\x0a"]).1), &mut records);
    assert!(session.has_records());
}

/// As a server reads: the header of a packet, then what it announces.
fn as_read(parts: &[Part]) -> Vec<Part> {
    let mut read = Vec::new();
    for (way, bytes) in parts {
        let mut rest = &bytes[..];
        while *way == Direction::Frontend && !rest.is_empty() {
            let (header, after) = rest.split_at(HEADER_BYTES);
            let len = Header::parse(header).unwrap().len;
            read.push((*way, header.to_vec()));
            read.push((*way, after[..len].to_vec()));
            rest = &after[len..];
        }
        read.push((*way, rest.to_vec()));
    }
    read
}

#[test]
fn a_session_is_joined_where_headers_are_read_alone() {
    let mut session = machine(Level::Summary);
    session.joined(Known::default());
    // The probes came between a header and its payload.
    let mut parts = vec![(Direction::Frontend, b"\x03select 0".to_vec()), server(1, &[OK])];
    parts.extend(as_read(&work()));
    let records = run(session, &parts, |_| usize::MAX);
    assert_eq!(records.outcomes(), outcomes());
    assert_eq!((records.end().frontend.lost, records.end().backend.lost), (0, 0));
    let first =
        records.0.iter().find_map(|r| if let Record::Frontend(r) = r { Some(r.offset) } else { None });
    assert_eq!(first, Some(0), "the header is a part of the message");
}

#[test]
fn what_the_probes_show_from_its_greeting_on_is_not_joined() {
    let tls = client(1, &[&[&[0x05, 0xae, 0, 0, 0, 0, 0, 1, 45][..], &[0; 23]].concat()]);
    let mut login = login(capability::PROTOCOL_41);
    login[1].1[3] = 2;
    login[2].1[3] = 3;
    login.insert(1, tls);
    let mut session = machine(Level::Summary);
    session.joined(Known::default());
    session.origin.source = Source::Uprobe;
    let parts = as_read(&[login.clone(), work()].concat());
    let whole = run(session, &parts, |_| usize::MAX);

    // The packets show the first two messages, the probes the others.
    let mut session = machine(Level::Summary);
    let mut records = Records::default();
    for (way, bytes) in &login[..2] {
        session.piece(*way, 5, Piece::Bytes(bytes), &mut records);
    }
    assert!(records.0.is_empty());
    assert!(session.decrypted(Source::Uprobe, Transport::Tls));
    assert!(!session.decrypted(Source::Uprobe, Transport::Tls), "once");
    let parts = as_read(&[login[2..].to_vec(), work()].concat());
    let continued = run(session, &parts, |_| usize::MAX);
    for records in [whole, continued] {
        let Some(Record::SessionStart(start)) = records.0.first() else { panic!("{:?}", records.0) };
        assert_eq!((start.midstream, start.user.as_deref()), (false, Some(&b"ann"[..])));
        assert_eq!((start.source, start.transport), (Source::Uprobe, Transport::Tls));
        assert_eq!(
            (start.backend_pid, records.outcomes()),
            (Some(42), outcomes().map(str::to_owned).to_vec())
        );
        records.end();
    }
}

#[test]
fn a_session_whose_login_by_tls_was_missed_is_joined() {
    let tls = client(1, &[&[&[0x05, 0xae, 0, 0, 0, 0, 0, 1, 45][..], &[0; 23]].concat()]);
    let mut session = machine(Level::Summary);
    for (way, bytes) in [login(capability::PROTOCOL_41).swap_remove(0), tls] {
        session.piece(way, 5, Piece::Bytes(&bytes), &mut Records::default());
    }
    assert!(session.decrypted(Source::Uprobe, Transport::Tls));
    let records = run(session, &as_read(&work()), |_| usize::MAX);
    let Some(Record::SessionStart(start)) = records.0.first() else { panic!("{:?}", records.0) };
    assert_eq!((start.midstream, start.transport), (true, Transport::Tls));
    assert_eq!(records.outcomes(), outcomes());
    records.end();
}

#[test]
fn whatever_is_lost_where_headers_are_read_alone_the_accounts_add_up() {
    let login = login(capability::PROTOCOL_41);
    let parts = as_read(&[login.clone(), work()].concat());
    for lost in as_read(&login).len()..parts.len() {
        let mut session = machine(Level::Full);
        let mut records = Records::default();
        for (at, (way, bytes)) in parts.iter().enumerate() {
            let piece = match at == lost {
                true => Piece::Lost(bytes.len() as u64, LossReason::Gap),
                false => Piece::Bytes(bytes),
            };
            session.piece(*way, 5, piece, &mut records);
        }
        session.end(9, EndReason::Unknown, Audit::default(), &mut records);
        let end = records.end();
        assert!(end.frontend.lost + end.backend.lost >= parts[lost].1.len() as u64, "{lost}: {end:?}");
        let whole = parts.iter().filter(|(way, _)| *way == Direction::Frontend);
        assert_eq!(end.frontend.seen, whole.map(|(_, bytes)| bytes.len() as u64).sum::<u64>());
    }
}

#[test]
fn a_loss_is_counted_and_recording_goes_on_at_the_next_command() {
    for direction in [Direction::Frontend, Direction::Backend] {
        let mut session = machine(Level::Summary);
        let mut records = Records::default();
        let parts = [login(capability::PROTOCOL_41), work()].concat();
        for (at, (way, bytes)) in parts.iter().enumerate() {
            // In the first statement, or in its answer.
            if at == if direction == Direction::Frontend { 3 } else { 4 } {
                session.piece(*way, 5, Piece::Bytes(&bytes[..6]), &mut records);
                session.piece(*way, 5, Piece::Lost(5, LossReason::Gap), &mut records);
                session.piece(*way, 5, Piece::Bytes(&bytes[11..]), &mut records);
            } else {
                session.piece(*way, 5, Piece::Bytes(bytes), &mut records);
            }
        }
        session.end(9, EndReason::Unknown, Audit::default(), &mut records);
        let end = records.end();
        assert!(end.frontend.lost + end.backend.lost >= 5, "{end:?}");
        let outcomes_after = &outcomes()[1..];
        let found = records.outcomes();
        assert!(
            found.ends_with(&outcomes_after.iter().map(|s| s.to_string()).collect::<Vec<_>>()),
            "{found:?}"
        );
        let texts: Vec<String> = records.statements().into_iter().map(|(text, _)| text).collect();
        // The loss is told before the next command, which is known.
        let insert = "insert into t values (?, ?)";
        let after = [insert, insert, "load data local infile '/x' into table t"];
        let before = (direction == Direction::Backend).then_some("select a from t");
        assert_eq!(texts, before.into_iter().chain(after).collect::<Vec<_>>());
        let unknown = found.iter().filter(|outcome| *outcome == "Unknown").count();
        assert_eq!(unknown, usize::from(direction == Direction::Backend), "{found:?}");
    }
}

#[test]
fn what_cannot_be_read_is_refused_by_name() {
    for (capabilities, why) in [
        (capability::COMPRESS, "compress"),
        (capability::ZSTD_COMPRESSION, "compress"),
        (capability::OPTIONAL_RESULTSET_METADATA, "metadata"),
    ] {
        let mut session = machine(Level::Summary);
        let mut records = Records::default();
        for (direction, bytes) in login_to(u64::MAX, capabilities) {
            session.piece(direction, 1, Piece::Bytes(&bytes), &mut records);
        }
        assert!(session.refused().is_some_and(|refused| refused.contains(why)));
        assert!(!session.end(2, EndReason::Unknown, Audit::default(), &mut records) && records.0.is_empty());
    }
}

#[test]
fn what_the_server_does_not_offer_is_not_in_use() {
    // With EOF packets, and texts without attributes, because the server knows of neither.
    let wanted = capability::PROTOCOL_41 | capability::DEPRECATE_EOF | capability::QUERY_ATTRIBUTES;
    let offered = 0x81ff_f7fe & !capability::DEPRECATE_EOF & !capability::QUERY_ATTRIBUTES;
    let records = run(machine(Level::Summary), &[login_to(offered, wanted), work()].concat(), |_| 9);
    assert_eq!(records.outcomes(), outcomes());
    assert_eq!(records.statements()[0].0, "select a from t");
    assert_eq!(records.end().backend.lost, 0);
}

#[test]
fn a_session_without_its_greeting_is_joined() {
    let parts = [login(capability::PROTOCOL_41)[1..].to_vec(), work()].concat();
    let records = run(machine(Level::Summary), &parts, |_| usize::MAX);
    assert_eq!(records.outcomes(), outcomes());
    let Some(Record::SessionStart(start)) = records.0.first() else { panic!("{:?}", records.0) };
    assert_eq!((start.midstream, start.user.as_deref()), (true, Some(&b"ann"[..])));
    records.end();
}

#[test]
fn a_message_that_is_not_in_the_trace_is_not_counted_as_recorded() {
    let row = [&[200_u8][..], &[b'x'; 200]].concat();
    let query = || [login(capability::PROTOCOL_41), vec![client(0, &[b"\x03select a from t"])]].concat();
    let answer = server(1, &[b"\x01", COLUMN, EOF, &row]).1;
    for (cut, lost) in [(100, true), (100, false), (202, false)] {
        let mut session = machine(Level::Full);
        let mut records = Records::default();
        let mut parts = query();
        parts.push((Direction::Backend, answer[..answer.len() - cut].to_vec()));
        for (way, bytes) in &parts {
            session.piece(*way, 5, Piece::Bytes(bytes), &mut records);
        }
        if lost {
            session.piece(Direction::Backend, 5, Piece::Lost(cut as u64, LossReason::Gap), &mut records);
        }
        session.end(9, EndReason::Unknown, Audit::default(), &mut records);
        let kept = |r: &Record<'_>| if let Record::Backend(r) = r { r.message.len() as u64 } else { 0 };
        let kept: u64 = records.0.iter().map(kept).sum();
        let end = records.end().backend;
        assert_eq!(end.recorded, kept, "{cut} {end:?}");
        let whole = if lost { row.len() + 4 } else { 0 };
        assert_eq!(end.lost, whole as u64, "{cut} {end:?}");
    }
}

#[test]
fn a_message_without_end_is_given_up() {
    let mut session = machine(Level::Full);
    let mut records = Records::default();
    for (way, bytes) in [login(capability::PROTOCOL_41), vec![client(0, &[b"\x03select a from t"])]].concat()
    {
        session.piece(way, 5, Piece::Bytes(&bytes), &mut records);
    }
    let answer = server(1, &[b"\x01", COLUMN, EOF]).1;
    session.piece(Direction::Backend, 5, Piece::Bytes(&answer), &mut records);
    let body = vec![b'x'; packet::PAYLOAD_BYTES_MAX];
    for sequence in 4..8 {
        let header = [0xff, 0xff, 0xff, sequence];
        session.piece(Direction::Backend, 5, Piece::Bytes(&header), &mut records);
        session.piece(Direction::Backend, 5, Piece::Bytes(&body), &mut records);
    }
    for (way, bytes) in work() {
        session.piece(way, 6, Piece::Bytes(&bytes), &mut records);
    }
    session.end(9, EndReason::Unknown, Audit::default(), &mut records);
    assert_eq!(records.outcomes(), [&["Unknown"][..], &outcomes()].concat());
    assert_eq!(records.end().backend.lost, 4 * (4 + body.len() as u64));
}

#[test]
fn only_errors_that_end_the_session_are_fatal() {
    for (code, fatal) in [(4031_u16, false), (1927, true)] {
        let [low, high] = code.to_le_bytes();
        let error = [&[0xff, low, high][..], b"#HY000no"].concat();
        let parts = [client(0, &[b"\x03drop trigger t"]), server(1, &[&error])];
        let records =
            run(machine(Level::Summary), &[login(capability::PROTOCOL_41), parts.to_vec()].concat(), |_| 99);
        let told = records.0.iter().find_map(|r| match r {
            Record::Response(Response { outcome: Outcome::Error(error), .. }) => Some(error.fatal),
            _ => None,
        });
        assert_eq!(told, Some(fatal), "{code}");
    }
}

#[test]
fn a_login_that_fails_is_in_the_trace() {
    let mut parts = login(capability::PROTOCOL_41);
    parts[2] = server(2, &[b"\xff\x15\x04#28000Access denied"]);
    let records = run(machine(Level::Summary), &parts, |_| 5);
    assert_eq!(records.outcomes(), ["28000"]);
    let Some(Record::SessionStart(start)) = records.0.first() else { panic!("{:?}", records.0) };
    assert_eq!((start.user.as_deref(), start.ready_ns), (Some(&b"ann"[..]), None));
    records.end();
}

#[test]
fn a_statement_of_many_packets_is_one_message() {
    let mut text = b"\x03insert into t values ('".to_vec();
    text.resize((16 << 20) + 100, b'x');
    text.extend_from_slice(b"')");
    let parts = [login(capability::PROTOCOL_41), vec![client(0, &[&text]), server(2, &[OK])]].concat();
    let records = run(machine(Level::Summary), &parts, |_| 60_000);
    assert_eq!(records.outcomes(), ["OK 2 0"]);
    assert!(records.statements()[0].0.as_bytes() == &text[1..]);
}

/// Answers with these rows, to a query and to a fetch; `end` stands for the last EOF.
fn answers(rows: &[Vec<u8>], end: &[u8]) -> Vec<Part> {
    let rows: Vec<&[u8]> = rows.iter().map(Vec::as_slice).collect();
    let result = [&[b"\x01", COLUMN, EOF][..], &rows, &[end]].concat();
    vec![
        client(0, &[b"\x03select a from t"]),
        server(1, &result),
        client(0, &[b"\x1c\x07\0\0\0\x40\0\0\0"]),
        server(1, &[&rows[..], &[end]].concat()),
        client(0, &[b"\x03select 1"]),
        server(1, &[b"\x01", COLUMN, EOF, b"\x011", EOF]),
    ]
}

/// Runs the parts, the server's in pieces of these sizes; byte by byte, each at the time of its piece, no row is counted without being
/// taken apart.
fn run_pieces(level: Level, parts: &[Part], sizes: &[usize], byte_by_byte: bool) -> Vec<Record<'static>> {
    let (mut session, mut records) = (machine(level), Records::default());
    let mut sizes = sizes.iter().cycle();
    let mut time_ns = 0;
    for (direction, bytes) in parts {
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let is_client = *direction == Direction::Frontend;
            let size = if is_client { rest.len() } else { *sizes.next().unwrap() };
            let (piece, after) = rest.split_at(size.min(rest.len()));
            time_ns += 1;
            for part in piece.chunks(if byte_by_byte && !is_client { 1 } else { piece.len() }) {
                session.piece(*direction, time_ns, Piece::Bytes(part), &mut records);
            }
            rest = after;
        }
    }
    session.end(time_ns + 1, EndReason::Unknown, Audit::default(), &mut records);
    records.0
}

#[test]
fn a_row_of_several_packets_is_one_among_others() {
    let long = vec![b'x'; packet::PAYLOAD_BYTES_MAX + 10];
    let full = vec![b'x'; packet::PAYLOAD_BYTES_MAX];
    let rows = [b"\x011".to_vec(), long, b"\x012".to_vec(), full, b"\xfb".to_vec()];
    let parts = [login(capability::PROTOCOL_41), answers(&rows, EOF)].concat();
    for size in [usize::MAX, 1 << 20] {
        let records = run(machine(Level::Summary), &parts, |_| size);
        assert_eq!(records.outcomes(), ["ROWS 5 5", "ROWS 5 5", "ROWS 1 1"], "pieces of {size}");
        assert_eq!(records.end().backend.lost, 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn cuts_make_no_difference(sizes in proptest::collection::vec(1usize..40, 1..20)) {
        let parts = [login(capability::PROTOCOL_41), work()].concat();
        let mut sizes = sizes.iter().cycle();
        let records = run(machine(Level::Summary), &parts, |_| *sizes.next().unwrap());
        prop_assert_eq!(records.outcomes(), outcomes());
    }

    #[test]
    fn rows_that_are_counted_at_once_are_those_that_are_taken_apart(
        rows in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 1..30), 0..400),
        any_row in any::<bool>(),
        end in prop_oneof![
            Just(EOF),
            Just(&b"\xff\x26\x04#23000Duplicate entry"[..]),
            // A result behind this one, and no end at all.
            Just(&b"\xfe\0\0\x0b\0"[..]),
            Just(&b"\x017"[..]),
        ],
        flip in proptest::option::of((any::<prop::sample::Index>(), 1u8..)),
        sizes in proptest::collection::vec(1usize..3000, 1..20),
        level in prop_oneof![Just(Level::Summary), Just(Level::None), Just(Level::Full)],
    ) {
        let mut rows = rows;
        if !any_row {
            rows.iter_mut().for_each(|row| row[0] = row[0].min(0xfb));
        }
        let mut parts = [login(capability::PROTOCOL_41), answers(&rows, end)].concat();
        if let Some((at, flip)) = flip {
            // The answer to the query, or that to the fetch.
            let part = 4 + 2 * (at.index(2));
            let bytes = &mut parts[part].1;
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
        }
        let (at_once, apart) = (run_pieces(level, &parts, &sizes, false), run_pieces(level, &parts, &sizes, true));
        prop_assert!(at_once == apart, "{at_once:?}\n{apart:?}");
    }
}

/// A session that was joined, and what its server is told to run.
struct Joined {
    session: Mysql,
    records: Records,
    time_ns: u64,
}

impl Joined {
    fn new() -> Self {
        let mut session = machine(Level::Summary);
        session.joined(Known::default());
        Self { session, records: Records::default(), time_ns: 0 }
    }

    fn say(&mut self, (direction, bytes): &Part) {
        self.time_ns += 1;
        self.session.piece(*direction, self.time_ns, Piece::Bytes(bytes), &mut self.records);
    }

    fn text(&mut self, text: &[u8]) {
        self.time_ns += 1;
        self.session.text(self.time_ns, text, &mut self.records);
    }

    fn wants(&self) -> bool {
        self.session.wants_texts(self.time_ns)
    }
}

/// COM_STMT_EXECUTE of a statement with one parameter, an int whose type is told or not.
fn execution(number: u8, told: bool, value: u8) -> Part {
    let types: &[u8] = if told { b"\x01\x03\0" } else { b"\0" };
    client(0, &[&[&[0x17, number][..], b"\0\0\0\0\x01\0\0\0\0", types, &[value, 0, 0, 0]].concat()])
}

#[test]
fn the_text_of_an_older_statement_is_told_while_it_is_executed() {
    let mut joined = Joined::new();
    let text = b"update t set a = ? -- what?";
    joined.say(&client(0, &[b"\x0e"]));
    joined.say(&server(1, &[OK]));
    joined.text(text);
    assert!(!joined.wants());
    // Nobody listens yet, and it is the only time that the client tells the type.
    joined.say(&execution(3, true, 1));
    assert!(joined.wants());
    joined.say(&server(1, &[OK]));
    joined.text(b"select 'of something else'");
    joined.say(&execution(3, false, 2));
    joined.text(text);
    joined.text(b"select 'of what it calls'");
    joined.say(&server(1, &[OK]));
    assert!(!joined.wants());
    joined.say(&execution(3, false, 3));
    joined.text(b"select 'again'");
    joined.say(&server(1, &[OK]));
    let of = |value: &str| (String::from_utf8_lossy(text).into_owned(), vec![Some(value.to_owned())]);
    assert_eq!(joined.records.statements(), [("?".to_owned(), vec![]), of("2"), of("3")]);
}

#[test]
fn a_text_is_not_given_to_one_of_several_commands() {
    let mut joined = Joined::new();
    joined.say(&execution(3, true, 1));
    joined.say(&execution(4, true, 2));
    joined.text(b"select ?");
    assert!(joined.wants());
    joined.say(&server(1, &[OK]));
    joined.say(&server(1, &[OK]));
    assert_eq!(joined.records.statements(), [("?".to_owned(), vec![]), ("?".to_owned(), vec![])]);
}

#[test]
fn a_text_is_not_waited_for_without_end() {
    let mut joined = Joined::new();
    joined.say(&execution(3, true, 1));
    joined.say(&server(1, &[OK]));
    assert!(joined.session.wants_texts(60_000_000_000) && !joined.session.wants_texts(60_000_000_001));
    // Closed, forgotten with all others, prepared anew.
    for what in [&b"\x19\x03\0\0\0"[..], b"\x1f"] {
        joined.say(&execution(3, true, 1));
        joined.say(&server(1, &[OK]));
        assert!(joined.wants());
        joined.say(&client(0, &[what]));
        if what.len() == 1 {
            joined.say(&server(1, &[OK]));
        }
        assert!(!joined.wants(), "{what:?}");
    }
    joined.say(&client(0, &[b"\x16select 1"]));
    joined.say(&server(1, &[b"\0\x05\0\0\0\0\0\0\0\0\0\0"]));
    joined.say(&execution(5, true, 1));
    assert!(!joined.wants());
}

/// Parts of a parameter come before the execution, and that before its text.
#[test]
fn long_data_of_an_older_statement_is_its_parameter() {
    let mut joined = Joined::new();
    for part in [&b"\x18\x03\0\0\0\0\0lo"[..], b"\x18\x03\0\0\0\0\0ng"] {
        joined.say(&client(0, &[part]));
    }
    joined.say(&client(0, &[b"\x17\x03\0\0\0\0\x01\0\0\0\0\x01\xfc\0\x03\0\x2a\0\0\0"]));
    joined.text(b"select ?, /*! ? */ '?' /* ? */");
    joined.say(&server(1, &[OK]));
    let values = vec![Some("long".to_owned()), Some("42".to_owned())];
    assert_eq!(joined.records.statements(), [("select ?, /*! ? */ '?' /* ? */".to_owned(), values)]);
}

/// What was told may be about the command that is missing, or about one that is not known yet.
#[test]
fn a_text_is_not_given_to_a_command_behind_which_something_is_missing() {
    let text = b"select ?";
    for way in [Direction::Backend, Direction::Frontend] {
        let mut joined = Joined::new();
        joined.say(&execution(3, true, 1));
        joined.text(text);
        joined.time_ns += 1;
        joined.session.piece(way, joined.time_ns, Piece::Lost(10, LossReason::Gap), &mut joined.records);
        joined.text(b"select 'lost'");
        joined.say(&execution(4, true, 1));
        joined.text(b"select 4, ?");
        joined.say(&server(1, &[OK]));
        let texts: Vec<_> = joined.records.statements().into_iter().map(|(text, _)| text).collect();
        assert_eq!(texts.last().map(String::as_str), Some("select 4, ?"), "{way:?}");
        assert!(texts[..texts.len() - 1].iter().all(|text| text == "?"), "{way:?}: {texts:?}");
    }
    // An answer that is out of order.
    let mut joined = Joined::new();
    joined.say(&execution(3, true, 1));
    joined.text(text);
    joined.say(&server(5, &[OK]));
    joined.say(&execution(3, true, 1));
    joined.say(&server(1, &[OK]));
    assert!(joined.records.statements().iter().all(|(text, _)| text == "?"));
    // A command that has not come whole.
    let mut joined = Joined::new();
    joined.say(&execution(3, true, 1));
    let (way, bytes) = execution(4, true, 1);
    joined.say(&(way, bytes[..7].to_vec()));
    joined.text(b"select 4, ?");
    joined.say(&(way, bytes[7..].to_vec()));
    joined.say(&server(1, &[OK]));
    assert!(joined.records.statements().iter().all(|(text, _)| text == "?"));
}

#[test]
fn the_types_of_parameters_are_those_told_last() {
    let mut joined = Joined::new();
    for part in [
        execution(3, true, 1),
        client(0, &[b"\x17\x03\0\0\0\0\x01\0\0\0\0\x01\x08\0\x07\0\0\0\0\0\0\0"]),
        client(0, &[b"\x17\x03\0\0\0\0\x01\0\0\0\0\0\x08\0\0\0\0\0\0\0"]),
    ] {
        joined.say(&part);
        if joined.time_ns > 4 {
            joined.text(b"select ?");
        }
        joined.say(&server(1, &[OK]));
    }
    let last = joined.records.statements().pop();
    assert_eq!(last, Some(("select ?".to_owned(), vec![Some("8".to_owned())])));
}

#[test]
fn comments_in_comments_are_counted_to_some_depth() {
    let deep = "/*!".repeat(1_000_000);
    assert_eq!(crate::statements::parameters_of(format!("select ? {deep} ?").as_bytes()), 1);
    assert_eq!(crate::statements::parameters_of(b"select ? /*M!100100 , ? */ /* ? */ -- ?"), 2);
}
