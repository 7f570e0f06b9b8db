// SPDX-License-Identifier: Apache-2.0
//! Stopped at once, a replay ends soon, also with a target that does not listen any more.

mod recorder;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use recorder::Recorder;
use underpass_replay::Identities;
use underpass_replay::plan;
use underpass_replay::run::{self, Options, Pace, Played, Progress, Stopper};
use underpass_testkit::{Client, Options as ClientOptions, Postgres};
use underpass_trace::{Level, Record};

/// So soon a replay that is stopped at once is over, on a busy machine.
const STOP_LIMIT: Duration = Duration::from_secs(8);
/// More than what sockets take without a reader.
const LONG: usize = 32 << 20;
/// AuthenticationOk, BackendKeyData, ReadyForQuery.
const WELCOME: &[u8] = b"R\0\0\0\x08\0\0\0\0K\0\0\0\x0c\0\0\0\x01\0\0\0\x02Z\0\0\0\x05I";
/// CommandComplete, ReadyForQuery.
const ANSWER: &[u8] = b"C\0\0\0\x0dSELECT 1\0Z\0\0\0\x05I";

/// How far a target goes before it neither reads nor accepts.
#[derive(Clone, Copy, Debug)]
enum Until {
    Accepted,
    LoggedIn,
    Answered,
}

/// Reads a message without a type byte, or with one.
fn read_message(stream: &mut TcpStream, typed: bool) {
    let mut head = vec![0; if typed { 5 } else { 4 }];
    stream.read_exact(&mut head).expect("a message");
    let len = u32::from_be_bytes(head[head.len() - 4..].try_into().expect("a length"));
    stream.read_exact(&mut vec![0; len as usize - 4]).expect("a message");
}

/// A target on this port that lets one session in and falls silent.
fn silent_target(until: Until) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let port = listener.local_addr().expect("address").port();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a session");
        if !matches!(until, Until::Accepted) {
            read_message(&mut stream, false);
            stream.write_all(WELCOME).expect("a welcome");
        }
        if matches!(until, Until::Answered) {
            read_message(&mut stream, true);
            stream.write_all(ANSWER).expect("an answer");
        }
        // The sockets stay open as long as the test runs.
        let _open = (listener, stream);
        thread::park();
    });
    port
}

/// A target that answers one statement and reads on only after so long; what it has read by then of the rest, to its end.
fn late_target(pause: Duration) -> (u16, thread::JoinHandle<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
    let port = listener.local_addr().expect("address").port();
    let rest = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a session");
        read_message(&mut stream, false);
        stream.write_all(WELCOME).expect("a welcome");
        read_message(&mut stream, true);
        stream.write_all(ANSWER).expect("an answer");
        thread::sleep(pause);
        let mut rest = Vec::new();
        // A reset ends it as well.
        let _ = stream.read_to_end(&mut rest);
        rest
    });
    (port, rest)
}

/// Plays on a target that falls silent, and stops the replay at once when it has; how long that took.
fn stop_at_once(records: &[Record<'static>], port: u16, one_user: bool) -> (Played, Duration) {
    let meta = underpass_trace::Meta::default();
    let plan = Arc::new(recorder::plan(&meta, records, &plan::Options::default()));
    let identities = Identities { one_user, ..Identities::default() };
    let target = recorder::target(port, identities);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("runtime");
    let stopper = Stopper::default();
    let options = Options { pace: Pace::Asap, ..Options::default() };
    runtime.block_on(async {
        let stop = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            stopper.stop();
            stopper.stop();
            Instant::now()
        };
        let play = run::play(plan, target, options, Arc::new(Progress::default()), &stopper);
        let play = tokio::time::timeout(Duration::from_secs(20), play);
        let (played, asked) = tokio::join!(play, stop);
        (played.expect("the replay goes on").expect("play"), asked.elapsed())
    })
}

/// Records a session of two statements.
fn record(server: &Postgres, second: &str) -> Vec<Record<'static>> {
    let recorder = Recorder::start(server.port(), Level::Summary);
    let mut client =
        Client::connect(&ClientOptions::new(recorder.port(), "joe", "postgres")).expect("connect");
    client.query("select 1").expect("an answer");
    client.query(second).expect("an answer");
    client.terminate().expect("terminate");
    recorder.records()
}

fn server() -> Postgres {
    let server = Postgres::start().expect("PostgreSQL");
    server.sql("create role joe superuser login").expect("a role");
    server
}

fn long_statement() -> String {
    format!("select '{}'", "x".repeat(LONG))
}

#[test]
fn a_target_that_does_not_listen_cannot_hold_a_replay_up() {
    let original = server();
    let (short, long) = (record(&original, "select 2"), record(&original, &long_statement()));
    for (what, records, until, one_user, answered) in [
        ("the login", &short, Until::Accepted, true, 0),
        ("a statement of ours", &short, Until::LoggedIn, false, 0),
        ("an answer, and the request to cancel", &short, Until::Answered, true, 1),
        ("a write", &long, Until::Answered, true, 1),
    ] {
        let (played, took) = stop_at_once(records, silent_target(until), one_user);
        assert!(took < STOP_LIMIT, "{what}: {took:?}");
        assert!(played.stopped);
        assert_eq!(recorder::answered(&played), answered, "{what}");
    }
}

/// Terminate in the middle of a statement would be taken for a part of it.
#[test]
fn nothing_is_said_behind_half_a_message() {
    let long = record(&server(), &long_statement());
    // When it reads again, the request to cancel has been given up, and Terminate would find room.
    let (port, rest) = late_target(Duration::from_millis(4200));
    let (played, _) = stop_at_once(&long, port, true);
    assert!(played.stopped);
    let rest = rest.join().expect("a target");
    assert!(rest.first() == Some(&b'Q') && rest.len() < LONG, "{} bytes", rest.len());
    assert!(rest.ends_with(b"xxxxx"), "{:?}", &rest[rest.len() - 5..]);
}
