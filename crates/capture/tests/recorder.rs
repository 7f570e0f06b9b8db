// SPDX-License-Identifier: Apache-2.0
//! What the recorder makes of events that come in an unlucky order.

use underpass_capture::{Ends, Event, Lookup, Nobody, ProbedId, Recorder, TcpFlags};
use underpass_mysql::packet::put_message;
use underpass_trace::assemble::Known;
use underpass_trace::{Direction, EndReason, Level, Protocol, Record, SessionEnd, SessionId};
use underpass_wire::frontend::build;

const OK: &[u8] = b"\0\0\0\x02\0\0\0";
const SERVER: u32 = 4711;

/// Starts and ends in the order in which they were recorded.
#[derive(Default)]
struct Sessions {
    starts: Vec<SessionId>,
    ends: Vec<SessionEnd>,
}

/// A probed session, and how far its streams have come.
struct Client {
    id: ProbedId,
    ring: usize,
    offsets: [u64; 2],
}

impl Client {
    fn new(number: u64, ring: usize) -> Self {
        Self { id: ProbedId { pid: SERVER, number }, ring, offsets: [0; 2] }
    }

    /// One packet in one call of the server.
    fn call(
        &mut self,
        recorder: &mut Recorder,
        sessions: &mut Sessions,
        direction: Direction,
        packet: &[u8],
    ) {
        let mut payload = Vec::new();
        put_message(&mut payload, (direction == Direction::Backend).into(), packet);
        let offset = &mut self.offsets[usize::from(direction == Direction::Backend)];
        let event = Event::Call {
            time_ns: 1,
            session: self.id,
            decrypted: false,
            ends: None,
            direction,
            offset: *offset,
            skipped: 0,
            payload: &payload,
        };
        *offset += payload.len() as u64;
        take(recorder, sessions, self.ring, event);
    }
}

fn take(recorder: &mut Recorder, sessions: &mut Sessions, ring: usize, event: Event<'_>) {
    recorder.event(ring, event, &mut |record: Record<'_>| match record {
        Record::SessionStart(start) => sessions.starts.push(start.session),
        Record::SessionEnd(end) => sessions.ends.push(end),
        _ => {}
    });
}

/// A client's command in a packet of the socket with this cookie.
fn packet(payload: &[u8], cookie: u64, seq: u32) -> Event<'_> {
    let ends = ends();
    let flags = TcpFlags::default();
    let direction = Direction::Frontend;
    let (skipped, listens) = (0, false);
    Event::Packet { time_ns: 1, cookie, ends, direction, seq, ack: 1, flags, skipped, listens, payload }
}

fn ends() -> Ends {
    Ends { remote: ([127, 0, 0, 1], 50_000).into(), local: ([127, 0, 0, 1], 3306).into() }
}

/// One CPU closes the socket while another has a packet for it in the hook: the packet stands behind the close, and was never received.
#[test]
fn a_packet_behind_its_close_opens_no_session() {
    let mut recorder = Recorder::new(Protocol::Mysql, Level::Summary, Box::new(Nobody));
    let (recorder, mut sessions) = (&mut recorder, Sessions::default());
    let mut command = Vec::new();
    put_message(&mut command, 0, b"\x03select 1");
    let len = command.len() as u32;
    take(recorder, &mut sessions, 0, packet(&command, 7, 100));
    let close = Event::Close {
        time_ns: 2,
        cookie: 7,
        ends: ends(),
        rcv_nxt: 100 + len,
        snd_nxt: 1,
        fin_received: false,
        fin_sent: false,
        bytes_received: u64::from(len),
    };
    take(recorder, &mut sessions, 0, close);
    take(recorder, &mut sessions, 0, packet(&command, 7, 100 + len));
    assert_eq!((sessions.starts.len(), sessions.ends.len()), (1, 1));

    // The next connection between these ends, at once: what is left of the old one is not taken for its own.
    take(recorder, &mut sessions, 0, packet(&command, 8, 5000));
    take(recorder, &mut sessions, 0, packet(&command, 7, 100 + 2 * len));
    take(recorder, &mut sessions, 0, packet(&command, 8, 5000 + len));
    recorder.finish(3, &mut |record: Record<'_>| {
        if let Record::SessionEnd(end) = record {
            sessions.ends.push(end);
        }
    });
    assert_eq!((sessions.starts.len(), sessions.ends.len()), (2, 2));
    for (end, commands) in sessions.ends.iter().zip([1, 2]) {
        assert_eq!(end.frontend.recorded, commands * u64::from(len), "{end:?}");
        assert!(end.frontend.add_up(), "{end:?}");
    }
    let totals = recorder.totals();
    assert_eq!((totals.messages, totals.lost_bytes), (3, 0), "{totals:?}");
}

/// The rings are read one after the other: the end that stands in the first is seen before the last words that stand in the second.
#[test]
fn the_end_of_a_process_waits_for_the_last_words_in_other_rings() {
    let mut recorder = Recorder::new(Protocol::Mysql, Level::Summary, Box::new(Nobody));
    let (recorder, mut sessions) = (&mut recorder, Sessions::default());
    let exit = Event::ProcessExit { time_ns: 2, pid: SERVER };
    let (mut first, mut second) = (Client::new(0, 0), Client::new(1, 1));
    for client in [&mut first, &mut second] {
        client.call(recorder, &mut sessions, Direction::Frontend, b"\x03insert into t values (1)");
    }
    first.call(recorder, &mut sessions, Direction::Backend, OK);
    take(recorder, &mut sessions, 0, exit);
    assert_eq!(sessions.ends.len(), 1, "the session whose ring this is");
    second.call(recorder, &mut sessions, Direction::Backend, OK);
    take(recorder, &mut sessions, 1, exit);
    // The last two threads of a process may both send it.
    take(recorder, &mut sessions, 1, exit);
    recorder.finish(3, &mut |record: Record<'_>| assert!(!matches!(record, Record::SessionEnd(_))));

    assert_eq!(sessions.starts.len(), 2, "{:?}", sessions.starts);
    assert_eq!(sessions.ends.len(), 2, "{:?}", sessions.ends);
    for (end, client) in sessions.ends.iter().zip([&first, &second]) {
        assert_eq!(end.reason, EndReason::ServerClosed);
        assert_eq!([end.frontend.recorded, end.backend.recorded], client.offsets, "{end:?}");
        assert!(end.frontend.add_up() && end.backend.add_up(), "{end:?}");
    }
    let totals = recorder.totals();
    assert_eq!((totals.sessions, totals.messages, totals.lost_bytes), (2, 2, 0), "{totals:?}");
}

/// A statement of before the recording that is always in one batch with another, as BEGIN is for pgjdbc: nothing tells its text, and the
/// probe that waits for it is not wanted for ever.
#[test]
fn texts_that_nothing_tells_are_not_waited_for_for_ever() {
    const SECOND: u64 = 1_000_000_000;
    let mut recorder = Recorder::new(Protocol::Postgres, Level::Summary, Box::new(Nobody));
    let mut batch = Vec::new();
    for statement in [b"S_1", b"S_2"] {
        build::bind(&mut batch, b"", statement, [], [], []);
        build::execute(&mut batch, b"", 0);
    }
    build::sync(&mut batch);
    let mut seq = 100;
    for at in 1..=61 {
        let time = at * SECOND;
        let mut event = packet(&batch, 7, seq);
        if let Event::Packet { time_ns, .. } = &mut event {
            *time_ns = time;
        }
        take(&mut recorder, &mut Sessions::default(), 0, event);
        recorder.tick(time, &mut |_: Record<'_>| {});
        assert_eq!(recorder.wants_texts(), at < 61, "after {} s", at - 1);
        seq += batch.len() as u32;
    }
}

/// Knows of a process that it is a backend.
struct Backends;

impl Lookup for Backends {
    fn connection(&mut self, _: &Ends) -> Known {
        Known::default()
    }

    fn process(&mut self, pid: u32) -> Known {
        Known { backend_pid: Some(pid), ..Known::default() }
    }
}

/// A text that the server says in pieces, between which the ring may be full, or the backend may end and another have its number.
#[test]
fn a_text_of_which_a_piece_is_missing_is_not_told() {
    let text = "select 'a text in three pieces'".as_bytes();
    let piece = |offset: usize, len: usize| Event::Activity {
        time_ns: 1,
        session: ProbedId { pid: SERVER, number: 1 },
        ends: None,
        offset: offset as u64,
        whole: text.len() as u64,
        text: &text[offset..offset + len],
    };
    let last = text.len() - 20;
    let cases: [(&[(usize, usize)], bool); 5] = [
        (&[(0, 10), (10, 10), (20, last)], true),
        (&[(0, 10), (20, last)], false),
        (&[(10, 10), (20, last)], false),
        (&[(0, 10), (0, 10), (10, 10), (20, last)], true),
        (&[(0, 10), (10, 10), (0, 10), (20, last)], false),
    ];
    for (pieces, is_told) in cases {
        let mut recorder = Recorder::new(Protocol::Postgres, Level::Summary, Box::new(Backends));
        let mut payload = Vec::new();
        build::bind(&mut payload, b"", b"S_1", [], [], []);
        build::execute(&mut payload, b"", 0);
        build::sync(&mut payload);
        let session = ProbedId { pid: SERVER, number: 1 };
        let mut fills = Vec::new();
        let mut sink = |record: Record<'_>| {
            if let Record::PreparedFill(fill) = record {
                fills.push((fill.name.to_vec(), fill.query.to_vec()));
            }
        };
        recorder.event(
            0,
            Event::Call {
                time_ns: 1,
                session,
                decrypted: false,
                ends: None,
                direction: Direction::Frontend,
                offset: 100,
                skipped: 0,
                payload: &payload,
            },
            &mut sink,
        );
        for &(offset, len) in pieces {
            recorder.event(0, piece(offset, len), &mut sink);
        }
        recorder.round(&mut sink);
        recorder.round(&mut sink);
        let expected = if is_told { vec![(b"S_1".to_vec(), text.to_vec())] } else { Vec::new() };
        assert_eq!(fills, expected, "{pieces:?}");
    }
}

/// A connection in the middle of one long COPY, of which nothing shows where a message begins.
#[test]
fn a_connection_that_is_never_understood_is_counted() {
    let data = vec![b'x'; 1000];
    let mut recorder = Recorder::new(Protocol::Postgres, Level::Summary, Box::new(Nobody));
    let (recorder, mut sessions) = (&mut recorder, Sessions::default());
    take(recorder, &mut sessions, 0, packet(&data, 7, 100));
    take(recorder, &mut sessions, 0, packet(&data, 7, 1100));
    recorder.finish(3, &mut |record: Record<'_>| panic!("{record:?}"));
    assert_eq!((sessions.starts.len(), recorder.totals().not_understood), (0, 1));
    let (client, what) = recorder.not_understood().expect("one");
    assert_eq!((*client, what.as_str()), (ends().remote, "the letter x of the client's"));
}

#[test]
fn it_is_told_how_a_connection_that_was_not_understood_began() {
    let begins = [(ALERT, "a TLS record of the client's"), (b"\x01\x02", "the byte 0x01 of the client's")];
    for (bytes, expected) in begins {
        let mut recorder = Recorder::new(Protocol::Postgres, Level::Summary, Box::new(Nobody));
        take(&mut recorder, &mut Sessions::default(), 0, packet(bytes, 7, 100));
        recorder.finish(3, &mut |record: Record<'_>| panic!("{record:?}"));
        assert_eq!(recorder.not_understood().map(|(_, what)| what.as_str()), Some(expected));
    }
}

/// The cookie of the socket that listens.
const LISTENER: u64 = 3;

/// The same packet, at the socket that listens; `syn`: it begins a connection.
fn at_listener(payload: &[u8], seq: u32, syn: bool) -> Event<'_> {
    let mut event = packet(payload, LISTENER, seq);
    if let Event::Packet { listens, flags, .. } = &mut event {
        (*listens, flags.syn) = (true, syn);
    }
    event
}

/// The socket with this cookie is closed, behind these bytes that began at 100 with a SYN before them.
fn close(cookie: u64, len: usize) -> Event<'static> {
    Event::Close {
        time_ns: 2,
        cookie,
        ends: ends(),
        rcv_nxt: 100 + len as u32,
        snd_nxt: 1,
        fin_received: false,
        fin_sent: false,
        bytes_received: len as u64,
    }
}

fn startup_message() -> Vec<u8> {
    let mut bytes = Vec::new();
    let version = underpass_wire::startup::ProtocolVersion::V3_0;
    underpass_wire::startup::build::startup_message(&mut bytes, version, [(&b"user"[..], &b"ann"[..])]);
    bytes
}

/// A TLS alert, as a driver sends behind its end.
const ALERT: &[u8] = b"\x15\x03\x03\0\x13 nineteen bytes, so";

/// A client says something more when its connection is gone, or the server was started again meanwhile: TCP answers with RST.
#[test]
fn what_tcp_refuses_opens_no_session() {
    let mut query = Vec::new();
    build::query(&mut query, b"insert into t values (1)");
    for late in [ALERT, &query] {
        let mut recorder = Recorder::new(Protocol::Postgres, Level::Summary, Box::new(Nobody));
        let (recorder, mut sessions) = (&mut recorder, Sessions::default());
        let first = startup_message();
        take(recorder, &mut sessions, 0, at_listener(b"", 99, true));
        take(recorder, &mut sessions, 0, packet(&first, 7, 100));
        take(recorder, &mut sessions, 0, close(7, first.len()));
        let seen = sessions.starts.len();
        take(recorder, &mut sessions, 0, at_listener(late, 100 + first.len() as u32, false));
        recorder.finish(3, &mut |record: Record<'_>| panic!("{record:?}"));
        assert_eq!((seen, sessions.starts.len()), (1, 1));
        let totals = recorder.totals();
        assert_eq!((totals.sessions, totals.messages, totals.not_understood), (1, 0, 0), "{totals:?}");
    }
}

/// The first words overtake the last packet of the handshake, which alone makes a socket of their own for them.
#[test]
fn first_words_that_overtake_the_handshake_are_recorded() {
    let mut recorder = Recorder::new(Protocol::Postgres, Level::Summary, Box::new(Nobody));
    let (recorder, mut sessions) = (&mut recorder, Sessions::default());
    let (first, mut query) = (startup_message(), Vec::new());
    build::query(&mut query, b"select 1");
    let len = first.len() + query.len();
    take(recorder, &mut sessions, 0, at_listener(b"", 99, true));
    take(recorder, &mut sessions, 0, at_listener(&first, 100, false));
    take(recorder, &mut sessions, 0, packet(&query, 7, 100 + first.len() as u32));
    take(recorder, &mut sessions, 0, close(7, len));
    assert_eq!((sessions.starts.len(), sessions.ends.len()), (1, 1));
    let end = sessions.ends[0];
    assert!(end.frontend.recorded == len as u64 && end.frontend.add_up(), "{end:?}");
}

/// Two packets of a client may each make the child of a handshake: the socket that is too late is closed without having had a packet.
#[test]
fn the_socket_that_loses_the_race_for_a_connection_does_not_end_it() {
    let mut recorder = Recorder::new(Protocol::Postgres, Level::Summary, Box::new(Nobody));
    let (recorder, mut sessions) = (&mut recorder, Sessions::default());
    let (first, mut query) = (startup_message(), Vec::new());
    build::query(&mut query, b"select 1");
    let len = first.len() + query.len();
    take(recorder, &mut sessions, 0, at_listener(b"", 99, true));
    take(recorder, &mut sessions, 0, packet(&first, 7, 100));
    take(recorder, &mut sessions, 0, close(0, 0));
    take(recorder, &mut sessions, 0, packet(&query, 7, 100 + first.len() as u32));
    assert_eq!(sessions.ends.len(), 0);
    take(recorder, &mut sessions, 0, close(7, len));
    assert_eq!((sessions.starts.len(), sessions.ends.len()), (1, 1));
    let end = sessions.ends[0];
    assert!(end.frontend.recorded == len as u64 && end.frontend.add_up(), "{end:?}");

    // Of a connection that has said nothing the cookie is not known: it ends.
    take(recorder, &mut sessions, 0, at_listener(b"", 99, true));
    take(recorder, &mut sessions, 0, close(0, 0));
    take(recorder, &mut sessions, 0, packet(&query, 8, 100));
    recorder.finish(3, &mut |_: Record<'_>| {});
    assert_eq!(recorder.totals().midstream, 1);
}

/// It was under way, and silent: the sign of its encryption comes before the first of its packets.
#[test]
fn an_encrypted_connection_that_was_under_way_counts_as_encrypted() {
    let mut recorder = Recorder::new(Protocol::Postgres, Level::Summary, Box::new(Nobody));
    let (recorder, mut sessions) = (&mut recorder, Sessions::default());
    take(recorder, &mut sessions, 0, Event::Encrypted { time_ns: 1, ends: ends() });
    take(recorder, &mut sessions, 0, packet(ALERT, 7, 100));
    recorder.finish(3, &mut |record: Record<'_>| panic!("{record:?}"));
    let totals = recorder.totals();
    assert_eq!((sessions.starts.len(), totals.encrypted, totals.not_understood), (0, 1, 0), "{totals:?}");
}

/// The SYN found its ring full.
#[test]
fn a_cancel_request_is_understood_without_its_handshake() {
    let mut recorder = Recorder::new(Protocol::Postgres, Level::Summary, Box::new(Nobody));
    let mut bytes = Vec::new();
    underpass_wire::startup::build::cancel_request(&mut bytes, 77, &[1, 2, 3, 4]);
    let mut cancelled = Vec::new();
    let mut sink = |record: Record<'_>| match record {
        Record::Cancel(cancel) => cancelled.push(cancel.backend_pid),
        other => panic!("{other:?}"),
    };
    recorder.event(0, packet(&bytes, 7, 100), &mut sink);
    recorder.event(0, close(7, bytes.len()), &mut sink);
    recorder.finish(3, &mut sink);
    assert_eq!((cancelled, recorder.totals().not_understood), (vec![77], 0));
}

/// Nor is a login that ends before the server is ready.
#[test]
fn a_login_without_its_handshake_is_understood() {
    let mut recorder = Recorder::new(Protocol::Postgres, Level::Summary, Box::new(Nobody));
    let (recorder, mut sessions) = (&mut recorder, Sessions::default());
    let first = startup_message();
    take(recorder, &mut sessions, 0, packet(&first, 7, 100));
    take(recorder, &mut sessions, 0, close(7, first.len()));
    assert_eq!((sessions.starts.len(), recorder.totals().not_understood), (1, 0));
}

/// A call of a PostgreSQL's backend, by a Unix socket or for a client by TLS.
fn backend_call(
    time_ns: u64,
    ends: Option<Ends>,
    direction: Direction,
    offset: u64,
    payload: &[u8],
) -> Event<'_> {
    let session = ProbedId { pid: 99, number: 1 };
    let (decrypted, skipped) = (false, 0);
    Event::Call { time_ns, session, decrypted, ends, direction, offset, skipped, payload }
}

/// CommandComplete and ReadyForQuery.
const ANSWER: &[u8] = b"C\0\0\0\x0dSELECT 1\0Z\0\0\0\x05I";

/// The server waited for the client inside the probed function when the probes came: the call that brought the request is not seen.
#[test]
fn a_probed_session_under_way_counts_as_one_of_which_the_next_words_are_missing() {
    let (front, back) = (Direction::Frontend, Direction::Backend);
    let mut query = Vec::new();
    build::query(&mut query, b"select 1");
    let startup = startup_message();
    let unix = |direction, offset, payload| (5, direction, offset, payload);
    for (calls, waited, what) in [
        (vec![unix(back, 0, ANSWER), unix(front, 0, &query[..])], 1, "an answer to nothing"),
        (vec![unix(back, 0, &ANSWER[..9])], 1, "and no more than a part of it"),
        (vec![unix(front, 0, &query[..]), unix(back, 0, ANSWER)], 1, "a request without a login"),
        (vec![unix(front, 0, &startup[..])], 0, "from its first byte"),
        (vec![unix(back, 700, ANSWER), unix(front, 30, &query[..])], 0, "one that was probed before already"),
        (vec![(3, back, 0, ANSWER), unix(front, 0, &query[..])], 0, "answered before the recording began"),
    ] {
        let mut recorder = Recorder::new(Protocol::Postgres, Level::Summary, Box::new(Nobody));
        recorder.begins(4);
        for (time_ns, direction, offset, payload) in calls {
            let call = backend_call(time_ns, None, direction, offset, payload);
            take(&mut recorder, &mut Sessions::default(), 0, call);
        }
        recorder.finish(9, &mut |_: Record<'_>| {});
        assert_eq!(recorder.waited(), waited, "{what}");
    }
    // MariaDB and MySQL speak first: a greeting, or that there are too many connections.
    let refusal = b"\xff\x10\x04Too many connections";
    for (number, waited) in [(1, 1), (0, 0)] {
        let mut recorder = Recorder::new(Protocol::Mysql, Level::Summary, Box::new(Nobody));
        let mut payload = Vec::new();
        put_message(&mut payload, number, refusal);
        let call = backend_call(5, None, back, 0, &payload);
        take(&mut recorder, &mut Sessions::default(), 0, call);
        recorder.finish(9, &mut |_: Record<'_>| {});
        assert_eq!(recorder.waited(), waited, "packet number {number}");
    }
}

/// One that turned long before is noticed at its first answer, when the request has gone by as ciphertext.
#[test]
fn probes_have_all_of_an_encrypted_connection_only_if_its_handshake_was_seen() {
    for (has_syn, begins_ns, unseen) in [(true, 0, 0), (false, 0, 1), (false, 8, 0)] {
        let mut recorder = Recorder::new(Protocol::Postgres, Level::Summary, Box::new(Nobody));
        recorder.begins(begins_ns);
        if has_syn {
            take(&mut recorder, &mut Sessions::default(), 0, at_listener(b"", 99, true));
        }
        take(&mut recorder, &mut Sessions::default(), 0, Event::Encrypted { time_ns: 5, ends: ends() });
        recorder.probed(1, 9);
        assert_eq!(recorder.unseen(), unseen, "SYN {has_syn}, recording from {begins_ns}");
        // Of its session the probes have the second request; it counts once.
        let mut query = Vec::new();
        build::query(&mut query, b"select 1");
        let call = backend_call(10, Some(ends()), Direction::Frontend, 0, &query);
        take(&mut recorder, &mut Sessions::default(), 0, call);
        assert_eq!((recorder.unseen(), recorder.waited()), (unseen, 0));
    }
}
