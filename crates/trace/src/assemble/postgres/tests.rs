// SPDX-License-Identifier: Apache-2.0
//! Whole sessions, cut and damaged in every way.

use proptest::prelude::*;
use underpass_wire::{Header, startup};

use super::*;
use crate::LossReason;
use crate::{Level, Protocol, SessionId, SessionStart, Source, Transport};

#[derive(Debug, Default)]
struct Records(Vec<Record<'static>>);

impl Sink for Records {
    fn record(&mut self, record: Record<'_>) {
        self.0.push(record.into_owned());
    }
}

impl Records {
    fn frontend(&self) -> Vec<u8> {
        let messages = self.0.iter().filter_map(|r| match r {
            Record::Frontend(f) => Some(f.message.to_vec()),
            _ => None,
        });
        messages.collect::<Vec<_>>().concat()
    }

    fn responses(&self) -> Vec<&Response<'static>> {
        self.0.iter().filter_map(|r| if let Record::Response(r) = r { Some(r) } else { None }).collect()
    }

    fn start(&self) -> Option<&SessionStart<'static>> {
        self.0.iter().find_map(|r| if let Record::SessionStart(r) = r { Some(r) } else { None })
    }

    fn end(&self) -> Option<&SessionEnd> {
        self.0.iter().find_map(|r| if let Record::SessionEnd(r) = r { Some(r) } else { None })
    }

    fn losses(&self, direction: Direction) -> Vec<(u64, u64)> {
        let of = |r: &Record<'_>| match r {
            Record::Loss(l) if l.direction == direction => Some((l.offset, l.len)),
            _ => None,
        };
        self.0.iter().filter_map(of).collect()
    }

    fn readies(&self) -> usize {
        self.0.iter().filter(|r| matches!(r, Record::Ready(_))).count()
    }
}

fn origin(level: Level) -> Origin {
    Origin { session: SessionId(7), source: Source::Synthetic, transport: Transport::Tcp, peer: None, level }
}

fn message(tag: u8, body: &[u8]) -> Vec<u8> {
    let mut out = Header::new(tag, body.len()).to_bytes().to_vec();
    out.extend_from_slice(body);
    out
}

fn ready(status: u8) -> Vec<u8> {
    message(b'Z', &[status])
}

fn complete(tag: &str) -> Vec<u8> {
    message(b'C', format!("{tag}\0").as_bytes())
}

fn row(value: &[u8]) -> Vec<u8> {
    let mut body = vec![0, 1];
    body.extend_from_slice(&(value.len() as i32).to_be_bytes());
    body.extend_from_slice(value);
    message(b'D', &body)
}

fn query(text: &str) -> Vec<u8> {
    message(b'Q', format!("{text}\0").as_bytes())
}

fn bind(statement: &str, values: &[&[u8]]) -> Vec<u8> {
    let mut body = format!("\0{statement}\0").into_bytes();
    body.extend_from_slice(&[0, 0]);
    body.extend_from_slice(&(values.len() as u16).to_be_bytes());
    for value in values {
        body.extend_from_slice(&(value.len() as i32).to_be_bytes());
        body.extend_from_slice(value);
    }
    body.extend_from_slice(&[0, 0]);
    message(b'B', &body)
}

fn execute() -> Vec<u8> {
    message(b'E', b"\0\0\0\0\0")
}

fn sync() -> Vec<u8> {
    message(b'S', b"")
}

fn error(code: &str) -> Vec<u8> {
    message(b'E', format!("SERROR\0VERROR\0C{code}\0Mno\0\0").as_bytes())
}

fn login() -> (Vec<u8>, Vec<u8>) {
    let mut front = Vec::new();
    startup::build::startup_message(
        &mut front,
        startup::ProtocolVersion::V3_0,
        [("user", "ann"), ("database", "shop"), ("application_name", "test"), ("DateStyle", "ISO")]
            .map(|(name, value)| (name.as_bytes(), value.as_bytes())),
    );
    front.extend(message(b'p', b"secret\0"));
    let mut back = message(b'R', &[0, 0, 0, 3]);
    back.extend(message(b'R', &[0, 0, 0, 0]));
    back.extend(message(b'S', b"client_encoding\0UTF8\0"));
    back.extend(message(b'K', &[0, 0, 1, 44, 9, 9, 9, 9]));
    back.extend(ready(b'I'));
    (front, back)
}

/// One exchange: what the client sends, what the server answers.
type Exchange = (Vec<u8>, Vec<u8>);

fn feed(
    session: &mut Postgres,
    direction: Direction,
    bytes: &[u8],
    cuts: &mut dyn FnMut() -> usize,
    out: &mut Records,
) {
    let mut rest = bytes;
    while !rest.is_empty() {
        let (now, later) = rest.split_at(cuts().clamp(1, rest.len()));
        session.piece(direction, 1, Piece::Bytes(now), out);
        rest = later;
    }
}

fn run(exchanges: &[Exchange], level: Level, cuts: &mut dyn FnMut() -> usize) -> Records {
    let mut out = Records::default();
    let mut session = Postgres::new(origin(level));
    for (front, back) in exchanges {
        feed(&mut session, Direction::Frontend, front, cuts, &mut out);
        feed(&mut session, Direction::Backend, back, cuts, &mut out);
    }
    let sum = |pick: fn(&Exchange) -> usize| Some(exchanges.iter().map(pick).sum::<usize>() as u64);
    let audit = Audit { frontend: sum(|e| e.0.len()), backend: sum(|e| e.1.len()), is_own: false };
    session.end(9, EndReason::ClientClosed, audit, &mut out);
    out
}

fn exchanges() -> Vec<Exchange> {
    let mut pipeline = message(b'P', b"s1\0select $1\0\0\0");
    pipeline.extend(bind("s1", &[b"one"]));
    pipeline.extend(execute());
    pipeline.extend(bind("s1", &[b"two"]));
    pipeline.extend(execute());
    pipeline.extend(sync());
    let mut answer = [message(b'1', b""), message(b'2', b""), row(b"one"), complete("SELECT 1")].concat();
    answer.extend([message(b'2', b""), row(b"two"), row(b"2"), complete("SELECT 2"), ready(b'T')].concat());
    let failing = [bind("none", &[]), execute(), execute(), sync()].concat();
    vec![
        login(),
        (query("select 1; select 2"), {
            let one = [message(b'T', &[0, 0]), row(b"1"), complete("SELECT 1")].concat();
            [one.clone(), one, ready(b'I')].concat()
        }),
        (pipeline, answer),
        (failing, [error("26000"), ready(b'E')].concat()),
        (query("copy t from stdin"), message(b'G', &[0, 0, 0])),
        (
            [message(b'd', b"1\n"), message(b'd', b"2\n"), message(b'c', b"")].concat(),
            [complete("COPY 2"), ready(b'I')].concat(),
        ),
        (query(""), [message(b'I', b""), ready(b'I')].concat()),
        (message(b'X', b""), Vec::new()),
    ]
}

fn check_whole(out: &Records) {
    let start = out.start().expect("a start");
    assert_eq!(start.user.as_deref(), Some(&b"ann"[..]));
    assert_eq!(start.database.as_deref(), Some(&b"shop"[..]));
    assert_eq!(start.application_name.as_deref(), Some(&b"test"[..]));
    assert_eq!(start.backend_pid, Some(300));
    assert_eq!(start.parameters.len(), 1);
    assert!(!start.midstream);
    let sent: Vec<u8> = exchanges().iter().skip(1).flat_map(|e| e.0.clone()).collect();
    assert_eq!(out.frontend(), sent);
    let outcome = |r: &&Response<'_>| match &r.outcome {
        Outcome::Complete { tag } => (String::from_utf8_lossy(tag).into_owned(), r.rows),
        Outcome::Error(e) => (String::from_utf8_lossy(&e.sqlstate).into_owned(), r.rows),
        other => (format!("{other:?}"), r.rows),
    };
    let told: Vec<_> = out.responses().iter().map(outcome).collect();
    let told: Vec<(&str, u64)> = told.iter().map(|(tag, rows)| (tag.as_str(), *rows)).collect();
    assert_eq!(
        told,
        [
            ("SELECT 1", 1),
            ("SELECT 1", 1),
            ("SELECT 1", 1),
            ("SELECT 2", 2),
            ("26000", 0),
            ("COPY 2", 0),
            ("Empty", 0)
        ]
    );
    assert_eq!(out.readies(), 5);
    let end = out.end().expect("an end");
    assert_eq!(end.reason, EndReason::Terminate);
    assert!(end.frontend.add_up() && end.backend.add_up(), "{end:?}");
    assert_eq!(end.frontend.withheld, 12, "the password message");
    assert!(!format!("{:?}", out.0).contains("secret"));
}

#[test]
fn a_session_is_told_completely_whatever_the_chunks_are() {
    check_whole(&run(&exchanges(), Level::Summary, &mut || usize::MAX));
    check_whole(&run(&exchanges(), Level::Summary, &mut || 1));
    for n in 2..30 {
        check_whole(&run(&exchanges(), Level::Full, &mut || n));
    }
}

#[test]
fn requests_are_named_by_their_offsets() {
    let out = run(&exchanges(), Level::Summary, &mut || usize::MAX);
    for response in out.responses() {
        let named = out.0.iter().find_map(|r| match r {
            Record::Frontend(f) if f.offset == response.request => Some(f.message[0]),
            _ => None,
        });
        assert!(matches!(named, Some(b'Q' | b'E' | b'B')), "{response:?} names {named:?}");
    }
}

/// The server ignores a Sync that comes before the data are over, and clients do send one.
#[test]
fn syncs_that_a_copy_swallows_are_not_waited_for() {
    let start = [message(b'P', b"\0copy t from stdin\0\0\0"), bind("", &[]), execute()].concat();
    let data = [message(b'd', b"1\n"), message(b'c', b"")].concat();
    let (begun, wanted) = ([message(b'1', b""), message(b'2', b"")].concat(), message(b'G', &[0, 0, 0]));
    let ended = [complete("COPY 1"), ready(b'I')].concat();
    let next = (query("select 1"), [row(b"1"), complete("SELECT 1"), ready(b'T')].concat());
    let sent = |parts: &[&[u8]]| parts.concat();
    let ways = [
        // libpq's: a Sync with the Execute, and one behind the data.
        vec![(sent(&[&start, &sync()]), sent(&[&begun, &wanted])), (sent(&[&data, &sync()]), ended.clone())],
        // One comes when the server has already asked for the data.
        vec![
            (start.clone(), sent(&[&begun, &wanted])),
            (sync(), Vec::new()),
            (sent(&[&data, &sync()]), ended.clone()),
        ],
        // Nothing is waited for.
        vec![(sent(&[&start, &sync(), &data, &sync()]), sent(&[&begun, &wanted, &ended]))],
        vec![(sent(&[&start, &data, &sync()]), sent(&[&begun, &wanted, &ended]))],
    ];
    for (number, way) in ways.into_iter().enumerate() {
        let exchanges = [vec![login()], way, vec![next.clone()]].concat();
        for cut in [1, 7, usize::MAX] {
            let out = run(&exchanges, Level::Summary, &mut || cut);
            let answers: Vec<(u64, Vec<u8>)> = out
                .responses()
                .iter()
                .map(|response| match &response.outcome {
                    Outcome::Complete { tag } => (response.rows, tag.to_vec()),
                    other => panic!("way {number}, cut {cut}: {other:?}"),
                })
                .collect();
            let expected = [(0, b"COPY 1".to_vec()), (1, b"SELECT 1".to_vec())];
            assert_eq!(answers, expected, "way {number}, cut {cut}");
            let request = out.responses()[1].request;
            let query = out
                .0
                .iter()
                .any(|r| matches!(r, Record::Frontend(f) if f.offset == request && f.message[0] == b'Q'));
            assert!(query && out.readies() == 2, "way {number}, cut {cut}");
        }
    }
}

/// A trigger for each statement fails before any of the data is read: the Sync ahead of them is still there, and is answered.
#[test]
fn a_sync_that_a_failed_copy_has_not_read_is_answered() {
    let start = [message(b'P', b"\0copy t from stdin\0\0\0"), bind("", &[]), execute()].concat();
    let data = [message(b'd', b"1\n"), message(b'c', b"")].concat();
    let begun = [message(b'1', b""), message(b'2', b"")].concat();
    let failed = [message(b'G', &[0, 0, 0]), error("P0001"), ready(b'I')].concat();
    let batch = [message(b'P', b"\0select 1\0\0\0"), bind("", &[]), execute(), sync()].concat();
    let next = (batch, [&begun[..], &row(b"1"), &complete("SELECT 1"), &ready(b'I')].concat());
    let ways = [
        // The client waits to be asked for its data.
        (3, vec![([&start[..], &sync()].concat(), [&begun[..], &failed].concat())]),
        // It ends the batch anew, because of the error.
        (4, vec![([&start[..], &sync()].concat(), [&begun[..], &failed].concat()), (sync(), ready(b'I'))]),
        // It has sent its data, too, which are ignored.
        (
            4,
            vec![(
                [&start[..], &sync(), &data, &sync()].concat(),
                [&begun[..], &failed, &ready(b'I')].concat(),
            )],
        ),
    ];
    for (number, (readies, way)) in ways.into_iter().enumerate() {
        let exchanges = [vec![login()], way, vec![next.clone(), (query(""), ready(b'I'))]].concat();
        for cut in [1, 7, usize::MAX] {
            let out = run(&exchanges, Level::Summary, &mut || cut);
            let ends: Vec<bool> =
                out.responses().iter().map(|r| matches!(r.outcome, Outcome::Complete { .. })).collect();
            assert_eq!(ends, [false, true], "way {number}, cut {cut}: {:?}", out.responses());
            let executes: Vec<u64> = (out.0.iter())
                .filter_map(|r| match r {
                    Record::Frontend(f) if f.message[0] == b'E' => Some(f.offset),
                    _ => None,
                })
                .collect();
            let answered: Vec<u64> = out.responses().iter().map(|r| r.request).collect();
            assert_eq!(answered, executes, "way {number}, cut {cut}");
            assert_eq!(out.readies(), readies, "way {number}, cut {cut}");
        }
    }
}

#[test]
fn level_full_keeps_every_message_of_the_server() {
    let out = run(&exchanges(), Level::Full, &mut || 3);
    let kept: Vec<u8> = out
        .0
        .iter()
        .filter_map(|r| match r {
            Record::Backend(b) => Some(b.message.to_vec()),
            _ => None,
        })
        .collect::<Vec<_>>()
        .concat();
    let sent: Vec<u8> = exchanges().iter().skip(1).flat_map(|e| e.1.clone()).collect();
    assert!(kept.ends_with(&sent));
}

#[test]
fn a_session_is_joined_at_its_next_request() {
    let mut session = Postgres::new(origin(Level::Summary));
    let mut out = Records::default();
    session.joined(Known { user: Some(b"bob".to_vec()), ..Known::default() });
    // The rest of a message and of its answer, which nobody can place.
    session.piece(Direction::Frontend, 1, Piece::Bytes(b"of a long string'\0"), &mut out);
    session.piece(Direction::Backend, 2, Piece::Bytes(b"\x05hello"), &mut out);
    assert!(out.0.is_empty());
    session.piece(
        Direction::Frontend,
        3,
        Piece::Bytes(&[bind("old", &[b"v"]), execute(), sync()].concat()),
        &mut out,
    );
    assert!(out.start().is_some_and(|s| s.midstream && s.user.as_deref() == Some(b"bob")));
    assert!(session.wants_texts(3));
    session.text(4, b"select 42", &mut out);
    assert!(!session.wants_texts(4));
    let answer = [message(b'2', b""), row(b"42"), complete("SELECT 1"), ready(b'I')].concat();
    session.piece(Direction::Backend, 5, Piece::Bytes(&answer), &mut out);
    assert!(session.end(6, EndReason::RecordingEnded, Audit::default(), &mut out));
    assert_eq!(out.responses().len(), 1);
    let fill = out.0.iter().find_map(|r| if let Record::PreparedFill(f) = r { Some(f) } else { None });
    assert_eq!(fill.map(|f| (&*f.name, &*f.query)), Some((&b"old"[..], &b"select 42"[..])));
    let end = out.end().expect("end");
    assert!(end.frontend.add_up() && end.backend.add_up() && end.frontend.lost == 0);
}

#[test]
fn a_text_that_cannot_be_told_is_not_wanted_for_ever() {
    let mut session = Postgres::new(origin(Level::Summary));
    let mut out = Records::default();
    session.joined(Known::default());
    let second = 1_000_000_000;
    for at in (1..200).map(|at| at * second) {
        // As pgjdbc does: BEGIN is prepared as well, and goes with the first statement of the transaction.
        let batch = [bind("S_1", &[]), execute(), bind("S_2", &[b"v"]), execute(), query("commit")].concat();
        session.piece(Direction::Frontend, at, Piece::Bytes(&batch), &mut out);
        session.text(at, b"BEGIN", &mut out);
        session.text(at, b"select $1", &mut out);
        let one = [message(b'2', b""), complete("SELECT 1")].concat();
        let answer = [&one[..], &one, &complete("COMMIT"), &ready(b'I')].concat();
        session.piece(Direction::Backend, at + 1, Piece::Bytes(&answer), &mut out);
        assert_eq!(session.wants_texts(at + 2), at <= 60 * second, "after {at} ns");
    }
    // Another, that nobody uses again.
    let at = 200 * second;
    session.piece(
        Direction::Frontend,
        at,
        Piece::Bytes(&[bind("S_3", &[]), execute(), sync()].concat()),
        &mut out,
    );
    assert!(session.wants_texts(at + 59 * second) && !session.wants_texts(at + 60 * second));
    // It is still taken when it comes, as others may want theirs.
    session.text(at, b"select 3", &mut out);
    let fill = out.0.iter().find_map(|r| if let Record::PreparedFill(f) = r { Some(&f.query) } else { None });
    assert_eq!(fill.map(|query| &**query), Some(&b"select 3"[..]));
}

#[test]
fn a_session_is_joined_when_the_server_is_ready() {
    let mut session = Postgres::new(origin(Level::Summary));
    let mut out = Records::default();
    session.joined(Known::default());
    session.piece(
        Direction::Backend,
        2,
        Piece::Bytes(&[&b"ghi"[..], &complete("SELECT 9"), &ready(b'T')].concat()),
        &mut out,
    );
    assert!(out.start().is_some());
    // A long statement: its first segment is not a whole message.
    let text = query(&"x".repeat(100));
    session.piece(Direction::Frontend, 3, Piece::Bytes(&text[..50]), &mut out);
    session.piece(Direction::Frontend, 3, Piece::Bytes(&text[50..]), &mut out);
    assert_eq!(out.frontend(), text);
}

#[test]
fn a_long_response_that_was_left_out_still_tells_its_end() {
    let mut session = Postgres::new(origin(Level::Summary));
    let mut out = Records::default();
    let (front, back) = login();
    session.piece(Direction::Frontend, 1, Piece::Bytes(&front), &mut out);
    session.piece(Direction::Backend, 1, Piece::Bytes(&back), &mut out);
    session.piece(Direction::Frontend, 2, Piece::Bytes(&query("select")), &mut out);
    session.piece(Direction::Backend, 3, Piece::Bytes(&[row(b"1"), row(b"2")].concat()), &mut out);
    session.piece(Direction::Backend, 4, Piece::Skipped(100_000), &mut out);
    let tail = [&b"part of a row"[..], &complete("SELECT 5000"), &ready(b'I')].concat();
    session.piece(Direction::Backend, 5, Piece::Bytes(&tail), &mut out);
    session.piece(Direction::Frontend, 6, Piece::Bytes(&query("next")), &mut out);
    session.piece(Direction::Backend, 7, Piece::Bytes(&[complete("SET"), ready(b'I')].concat()), &mut out);
    session.end(8, EndReason::RecordingEnded, Audit::default(), &mut out);
    let rows: Vec<_> = out.responses().iter().map(|r| (r.rows, r.first_ns, r.last_ns)).collect();
    assert_eq!(rows, [(5000, 3, 5), (0, 7, 7)]);
    assert!(out.losses(Direction::Backend).is_empty());
    assert!(out.end().is_some_and(|end| end.backend.add_up() && end.backend.lost == 0));
}

/// What a response with a long part left out says: rows and outcome.
fn left_out(level: Level, request: &[u8], begin: &[u8], tail: &[&[u8]]) -> (u64, Outcome<'static>) {
    let mut session = Postgres::new(origin(level));
    let mut out = Records::default();
    let (front, back) = login();
    session.piece(Direction::Frontend, 1, Piece::Bytes(&front), &mut out);
    session.piece(Direction::Backend, 1, Piece::Bytes(&back), &mut out);
    session.piece(Direction::Frontend, 2, Piece::Bytes(request), &mut out);
    session.piece(Direction::Backend, 3, Piece::Bytes(begin), &mut out);
    let missing = match level {
        Level::Summary => Piece::Skipped(100_000),
        _ => Piece::Lost(100_000, LossReason::Gap),
    };
    session.piece(Direction::Backend, 4, missing, &mut out);
    for (at, bytes) in (5..).zip(tail) {
        session.piece(Direction::Backend, at, Piece::Bytes(bytes), &mut out);
    }
    assert_eq!(out.readies(), 1);
    let [Record::Response(response)] =
        &out.0.iter().filter(|r| matches!(r, Record::Response(_))).collect::<Vec<_>>()[..]
    else {
        panic!("{:?}", out.responses());
    };
    (response.rows, response.outcome.clone())
}

#[test]
fn the_end_of_a_response_that_was_left_out_tells_its_rows() {
    let extended = |rows_max: u32| {
        let execute = message(b'E', &[&b"\0"[..], &rows_max.to_be_bytes()].concat());
        [message(b'P', b"\0x\0\0\0"), message(b'B', b"\0\0\0\0\0\0\0\0"), execute, message(b'S', b"")]
            .concat()
    };
    let begin = [message(b'1', b""), message(b'2', b""), row(b"1"), row(b"2")].concat();
    let suspended = [&b"of a row"[..], &message(b's', b""), &ready(b'T')].concat();
    assert_eq!(left_out(Level::Summary, &extended(500), &begin, &[&suspended]), (500, Outcome::Suspended));

    // The first of its rows is not whole.
    let part = [message(b'1', b""), message(b'2', b""), row(&[b'x'; 50])[..40].to_vec()].concat();
    let inserted = [&b"of a row"[..], &complete("INSERT 0 500"), &ready(b'I')].concat();
    for begin in [&begin, &part] {
        let (rows, outcome) = left_out(Level::Summary, &extended(0), begin, &[&inserted]);
        assert_eq!((rows, outcome), (500, Outcome::Complete { tag: b"INSERT 0 500"[..].into() }));
    }
}

#[test]
fn the_end_of_a_response_that_was_left_out_may_be_in_several_segments() {
    let end = [complete("SELECT 500"), ready(b'I')].concat();
    let tail = [&[b'x'; 3000][..], &end].concat();
    for cut in 1..end.len() {
        let (before, behind) = tail.split_at(tail.len() - cut);
        let (rows, outcome) = left_out(Level::Summary, &query("select"), &row(b"1"), &[before, behind]);
        assert_eq!((rows, outcome), (500, Outcome::Complete { tag: b"SELECT 500"[..].into() }), "{cut}");
    }
}

#[test]
fn what_was_lost_of_several_statements_is_not_guessed() {
    let tail = [&b"part of a row"[..], &complete("SELECT 7"), &ready(b'I')].concat();
    let (_, outcome) = left_out(Level::Full, &query("select 1; select 2"), &row(b"1"), &[&tail]);
    assert_eq!(outcome, Outcome::Unknown);
}

#[test]
fn a_query_behind_an_error_is_skipped_like_the_rest() {
    for together in [true, false] {
        let mut session = Postgres::new(origin(Level::Summary));
        let mut out = Records::default();
        let (front, back) = login();
        session.piece(Direction::Frontend, 1, Piece::Bytes(&front), &mut out);
        session.piece(Direction::Backend, 1, Piece::Bytes(&back), &mut out);
        let error = message(b'E', b"SERROR\0VERROR\0C42601\0Mno\0\0");
        let parse = message(b'P', b"\0selekt\0\0\0");
        session.piece(Direction::Frontend, 2, Piece::Bytes(&parse), &mut out);
        if !together {
            session.piece(Direction::Backend, 3, Piece::Bytes(&error), &mut out);
        }
        session.piece(Direction::Frontend, 4, Piece::Bytes(&query("select 1")), &mut out);
        if together {
            session.piece(Direction::Backend, 5, Piece::Bytes(&error), &mut out);
        }
        session.piece(Direction::Frontend, 6, Piece::Bytes(&message(b'S', b"")), &mut out);
        session.piece(Direction::Backend, 7, Piece::Bytes(&ready(b'I')), &mut out);
        let request = front.len() as u64 + (parse.len() + query("select 1").len()) as u64;
        let ready =
            out.0.iter().rev().find_map(|r| if let Record::Ready(r) = r { Some(r.request) } else { None });
        assert_eq!((out.responses().len(), ready), (1, Some(request)), "{together}: the Sync");
    }
}

#[test]
fn what_was_left_out_of_several_statements_is_not_guessed() {
    for (text, is_certain) in [
        ("select 1; select 2", false),
        ("select ';' -- ; x", true),
        ("select 1; -- the end\n;", true),
        ("select $$;$$; ; select 2;", false),
    ] {
        let mut session = Postgres::new(origin(Level::Summary));
        let mut out = Records::default();
        let (front, back) = login();
        session.piece(Direction::Frontend, 1, Piece::Bytes(&front), &mut out);
        session.piece(Direction::Backend, 1, Piece::Bytes(&back), &mut out);
        session.piece(Direction::Frontend, 2, Piece::Bytes(&query(text)), &mut out);
        session.piece(Direction::Backend, 3, Piece::Bytes(&row(b"1")), &mut out);
        session.piece(Direction::Backend, 4, Piece::Skipped(100_000), &mut out);
        let tail = [&b"part of a row"[..], &complete("SELECT 7"), &ready(b'I')].concat();
        session.piece(Direction::Backend, 5, Piece::Bytes(&tail), &mut out);
        let is_known =
            matches!(out.responses()[..], [Response { rows: 7, outcome: Outcome::Complete { .. }, .. }]);
        let is_unknown = matches!(out.responses()[..], [Response { outcome: Outcome::Unknown, .. }]);
        assert_eq!((is_known, is_unknown), (is_certain, !is_certain), "{text}: {:?}", out.responses());
    }
}

#[test]
fn passwords_of_a_login_that_fails_and_cancel_keys_are_not_stored() {
    let mut session = Postgres::new(origin(Level::Full));
    let mut out = Records::default();
    let (front, _) = login();
    session.piece(Direction::Frontend, 1, Piece::Bytes(&front), &mut out);
    let fatal = message(b'E', b"SFATAL\0VFATAL\0C28P01\0Mno\0\0");
    session.piece(Direction::Backend, 2, Piece::Bytes(&fatal), &mut out);
    session.end(3, EndReason::ServerClosed, Audit::default(), &mut out);
    assert!(out.start().is_some_and(|s| s.ready_ns.is_none()));
    assert!(matches!(&out.responses()[0].outcome, Outcome::Error(e) if e.fatal && &e.sqlstate == b"28P01"));
    assert_eq!(out.responses()[0].request, 0);

    let mut session = Postgres::new(origin(Level::Full));
    let mut cancel = Vec::new();
    startup::build::cancel_request(&mut cancel, 300, b"\x77\x77\x77\x77");
    session.piece(Direction::Frontend, 1, Piece::Bytes(&cancel), &mut out);
    assert!(matches!(out.0.last(), Some(Record::Cancel(c)) if c.backend_pid == 300));
    assert!(!session.end(2, EndReason::ClientClosed, Audit::default(), &mut out));
}

/// Messages of a stream with the ranges they take.
fn boundaries(stream: &[u8]) -> Vec<(usize, usize)> {
    let mut at = 0;
    let mut all = Vec::new();
    while let Ok(Some(header)) = Header::parse(&stream[at..]) {
        all.push((at, at + header.total()));
        at += header.total();
    }
    all
}

/// Where the server's bytes are, recorded or told to be missing; what is recorded was said there.
fn backend_parts(out: &Records, answered: &[u8]) -> Vec<(u64, u64)> {
    let of = |record: &Record<'_>| match record {
        Record::Backend(b) => {
            assert!(answered[b.offset as usize..].starts_with(&b.message), "a message that was not said");
            Some((b.offset, b.message.len() as u64))
        }
        Record::Loss(l) if l.direction == Direction::Backend => Some((l.offset, l.len)),
        Record::Withheld(w) if w.direction == Direction::Backend => Some((w.offset, w.len)),
        _ => None,
    };
    let mut parts: Vec<(u64, u64)> = out.0.iter().filter_map(of).collect();
    parts.sort_unstable();
    parts
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Any bytes are lost anywhere: nothing that is told is false, and every byte is accounted for.
    #[test]
    fn damage_is_told_exactly_and_nothing_false(
        cuts in proptest::collection::vec(1usize..60, 1..40),
        holes in proptest::collection::vec((any::<bool>(), 0usize..900, 1usize..80), 0..5),
        full in any::<bool>(),
        ends in proptest::option::of(120usize..1200),
    ) {
        let mut exchanges = exchanges();
        for n in 0..6 {
            exchanges.insert(3, (query(&format!("select {n}")), [row(b"x"), complete("SELECT 1"), ready(b'I')].concat()));
        }
        let sent: Vec<u8> = exchanges.iter().flat_map(|e| e.0.clone()).collect();
        let mut cut = cuts.iter().cycle();
        let answered: Vec<u8> = exchanges.iter().flat_map(|e| e.1.clone()).collect();
        let mut session = Postgres::new(origin(if full { Level::Full } else { Level::Summary }));
        let mut out = Records::default();
        let mut at = [0usize; 2];
        let mut lost = [0u64; 2];
        for (front, back) in &exchanges {
            for (side, bytes) in [(0, front), (1, back)] {
                let direction = if side == 0 { Direction::Frontend } else { Direction::Backend };
                let mut rest = &bytes[..];
                // It may end in the middle of an answer.
                while !rest.is_empty() && ends.is_none_or(|ends| at[1] < ends) {
                    let (now, later) = rest.split_at((*cut.next().expect("cycle")).min(rest.len()));
                    let hole = holes.iter().any(|&(front, from, len)| {
                        front == (side == 0) && at[side] >= from + 120 && at[side] < from + 120 + len
                    });
                    if hole {
                        session.piece(direction, 1, Piece::Lost(now.len() as u64, LossReason::Gap), &mut out);
                        lost[side] += now.len() as u64;
                    } else {
                        session.piece(direction, 1, Piece::Bytes(now), &mut out);
                    }
                    at[side] += now.len();
                    rest = later;
                }
            }
        }
        session.end(2, EndReason::RecordingEnded, Audit { frontend: Some(at[0] as u64), backend: Some(at[1] as u64), is_own: false }, &mut out);
        let end = out.end().expect("an end");
        prop_assert!(end.frontend.add_up() && end.backend.add_up(), "{:?}", end);
        prop_assert!(end.frontend.lost >= lost[0] && end.backend.lost >= lost[1]);
        let (mut told, mut whole) = (0, 0);
        let (first, _) = login();
        let known: Vec<_> = boundaries(&sent[first.len() - 12..]).iter().map(|(a, _)| a + first.len() - 12).collect();
        for record in &out.0 {
            match record {
                Record::Frontend(f) => {
                    let at = f.offset as usize;
                    prop_assert_eq!(&sent[at..at + f.message.len()], &f.message[..], "a message that was not sent");
                    prop_assert!(known.contains(&at));
                    whole += f.message.len() as u64;
                }
                Record::Loss(l) if l.direction == Direction::Frontend => told += l.len,
                _ => {}
            }
        }
        prop_assert_eq!(told, end.frontend.lost);
        prop_assert_eq!(whole + (first.len() as u64 - 12), end.frontend.recorded);
        if full {
            let parts = backend_parts(&out, &answered);
            // What the login's answers tell is in the start, but for the last of them.
            let mut next = (login().1.len() - ready(b'I').len()) as u64;
            for (from, len) in parts {
                prop_assert_eq!(from, next, "a gap or an overlap");
                next += len;
            }
            prop_assert_eq!(next, at[1] as u64);
        }
    }

    /// Arbitrary bytes in both directions: no panic, and the accounts add up.
    #[test]
    fn arbitrary_bytes_are_survived(
        pieces in proptest::collection::vec((any::<bool>(), 0u8..4, proptest::collection::vec(any::<u8>(), 1..80)), 1..40),
        join in any::<bool>(),
    ) {
        let pieces = pieces.iter().map(|(front, kind, bytes)| (*front, *kind, &bytes[..]));
        crate::assemble::fuzzing::arbitrary(Protocol::Postgres, join, pieces);
    }
}

#[test]
fn a_message_that_is_not_finished_is_withheld() {
    let mut session = Postgres::new(origin(Level::Summary));
    let mut out = Records::default();
    let (front, back) = login();
    session.piece(Direction::Frontend, 1, Piece::Bytes(&front), &mut out);
    session.piece(Direction::Backend, 1, Piece::Bytes(&back), &mut out);
    session.piece(Direction::Frontend, 2, Piece::Bytes(&query("select")[..7]), &mut out);
    session.end(3, EndReason::ClientClosed, Audit::default(), &mut out);
    let withheld = out
        .0
        .iter()
        .any(|r| matches!(r, Record::Withheld(w) if w.reason == WithheldReason::Incomplete && w.len == 7));
    assert!(withheld);
    assert!(out.end().is_some_and(|end| end.frontend.add_up()));
}

#[test]
fn a_pipeline_of_several_syncs_is_followed() {
    let one = [bind("", &[]), execute(), sync()].concat();
    let answer = [message(b'2', b""), complete("INSERT 0 1"), ready(b'I')].concat();
    let exchanges = vec![
        login(),
        ([one.clone(), one.clone(), one].concat(), [answer.clone(), answer.clone(), answer].concat()),
    ];
    let out = run(&exchanges, Level::Summary, &mut || 17);
    assert_eq!((out.responses().len(), out.readies()), (3, 3));
    let requests: std::collections::BTreeSet<_> = out.responses().iter().map(|r| r.request).collect();
    assert_eq!(requests.len(), 3);
}

const SSL_REQUEST: &[u8] = &[0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f];
const GSSENC_REQUEST: &[u8] = &[0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x30];

#[test]
fn as_many_requests_for_encryption_as_a_piece_holds_need_little_stack() {
    for request in [SSL_REQUEST, GSSENC_REQUEST] {
        for joined in [false, true] {
            let bytes = request.repeat(61_440 / request.len());
            let read = move || {
                let (mut session, mut out) = (Postgres::new(origin(Level::Summary)), Records::default());
                if joined {
                    session.joined(Known::default());
                }
                session.piece(Direction::Frontend, 1, Piece::Bytes(&bytes), &mut out);
                (session.phase, out.0.len())
            };
            let thread = std::thread::Builder::new().stack_size(256 << 10).spawn(read).unwrap();
            assert_eq!(thread.join().unwrap(), (Phase::Closed, 0), "the server ends such a connection");
        }
    }
}

#[test]
fn who_is_refused_one_encryption_may_ask_for_the_other() {
    let (front, back) = login();
    let no = Exchange::from((GSSENC_REQUEST.to_vec(), b"N".to_vec()));
    let no_either = (SSL_REQUEST.to_vec(), b"N".to_vec());
    let out = run(&[no, no_either, (front, back)], Level::Summary, &mut || usize::MAX);
    assert_eq!(out.start().and_then(|start| start.user.as_deref()), Some(&b"ann"[..]));
    // The first answer is in no event that came through.
    for piece in [Piece::Lost(1, LossReason::Gap), Piece::Skipped(1)] {
        let (mut session, mut out) = (Postgres::new(origin(Level::Summary)), Records::default());
        session.piece(Direction::Frontend, 1, Piece::Bytes(GSSENC_REQUEST), &mut out);
        session.piece(Direction::Backend, 1, piece, &mut out);
        session.piece(Direction::Frontend, 1, Piece::Bytes(SSL_REQUEST), &mut out);
        session.piece(Direction::Backend, 1, Piece::Bytes(b"N"), &mut out);
        assert_eq!(session.phase, Phase::Startup, "{piece:?}");
    }
}
