// SPDX-License-Identifier: Apache-2.0
//! Probes that come while sessions are under way, and servers that are started again: what is missing is said.

mod common;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use common::{Capture, Setup, Trace, eventually, server, skipped};
use underpass_capture::{Probes, Server};
use underpass_testkit::{AuthMethod, Authority, Batch, Client, Netns, Postgres, Signal, Tls};

const WAITED: &str = "1 probed sessions under way whose first request may be missing";
const TURNED: &str = "1 encrypted connections whose beginning, or all, was not seen";
const RESTARTED: &str = "what probed sessions said before the restarted server was known";
const BEFORE_PROBES: &str = "sessions by Unix sockets, or what they said before the probes came";

fn setup(probes: Probes) -> Setup {
    Setup { probes, ..Setup::default() }
}

fn has_note(notes: &[String], what: &str) -> bool {
    notes.iter().any(|note| note.contains(what))
}

/// Asks three things on a session that was there before, and ends the capture.
fn ask(mut client: Client, capture: Capture) -> Trace {
    for query in ["select 'first'", "select 'second'", "select 'third'"] {
        client.query(query).expect("an answer");
    }
    client.terminate().expect("terminate");
    capture.end()
}

fn has_said(trace: &Trace, what: &str) -> bool {
    let starts = trace.starts();
    let said = starts.iter().map(|start| String::from_utf8_lossy(&trace.sent(start.session)).into_owned());
    said.collect::<String>().contains(what)
}

/// The server waits for its next request inside the probed function, as every pooled session does.
#[test]
fn what_a_session_says_that_was_waited_for_is_missing_and_said_to_be() {
    if skipped() {
        return;
    }
    let authority = Authority::new("authority").expect("an authority");
    let postgres = Postgres::builder().auth(AuthMethod::Trust).tls(&authority).start().expect("a server");
    // With the probes at once, be it that they are wanted or that this client is there.
    for probes in [Probes::Always, Probes::Auto] {
        let client = Client::connect(&postgres.superuser()).expect("connect");
        let trace = ask(client, Capture::start(&postgres, &setup(probes)));
        assert!(!has_said(&trace, "first") && has_said(&trace, "second"), "{probes:?}");
        assert!(has_note(&trace.summary.notes, "of 1 probed sessions one request may be missing"));
        trace.assert_lacks(&[WAITED]);
        eventually("the session is gone", || !server(&postgres).has_local());
    }
    let by_tls = postgres
        .options("postgres", "postgres")
        .host("localhost")
        .tls(Tls::new(&authority, None).expect("tls"));
    let client = Client::connect(&by_tls).expect("connect");
    let trace = ask(client, Capture::start(&postgres, &setup(Probes::Always)));
    assert!(!has_said(&trace, "first") && has_said(&trace, "second"));
    trace.assert_lacks(&[TURNED]);
    // By packets nothing of it is missing.
    let client = Client::connect(&postgres.options("postgres", "postgres")).expect("connect");
    let trace = ask(client, Capture::start(&postgres, &setup(Probes::Always)));
    assert!(has_said(&trace, "first"));
    trace.assert_lossless();
}

#[test]
fn a_client_by_a_unix_socket_of_another_network_namespace_brings_the_probes() {
    if skipped() {
        return;
    }
    let postgres = Postgres::start().expect("a server");
    let elsewhere = Netns::new().expect("a network namespace");
    let capture = Capture::start(&postgres, &setup(Probes::Auto));
    assert!(!server(&postgres).has_local_elsewhere());
    let mut psql = elsewhere.command("psql");
    psql.args(["-h", postgres.socket_dir().to_str().expect("text"), "-p", &postgres.port().to_string()]);
    psql.args(["-U", "postgres", "postgres"]).stdin(Stdio::piped()).stdout(Stdio::null());
    let mut psql = psql.spawn().expect("psql");
    eventually("it is seen", || server(&postgres).has_local_elsewhere());
    assert!(!server(&postgres).has_local(), "not by the server's own table");
    eventually("the probes", || has_note(&capture.notes(), "probes attached"));
    drop(psql.stdin.take());
    psql.wait().expect("psql");
    let trace = capture.end();
    assert!(trace.summary.shortcomings().contains(&BEFORE_PROBES.to_owned()), "{:?}", trace.summary);
}

/// A socket that was removed, or that nobody can reach, is not the last word.
#[test]
fn probes_are_tried_by_whatever_the_server_listens_on() {
    if skipped() {
        return;
    }
    let postgres = Postgres::start().expect("a server");
    let own = server(&postgres);
    let gone = own.sockets[0].with_file_name("gone");
    for sockets in [vec![gone.clone(), own.sockets[0].clone()], vec![gone]] {
        let mixed = Server { sockets, ..own.clone() };
        Capture::of(mixed, postgres.port(), &setup(Probes::Always)).end().assert_lossless();
    }
}

/// Probes that came while the capture runs, of a server that lets nobody in.
#[test]
fn probes_that_could_not_be_tried_are_not_proven() {
    if skipped() {
        return;
    }
    let authority = Authority::new("authority").expect("an authority");
    let postgres = Postgres::builder().auth(AuthMethod::Trust).tls(&authority).start().expect("a server");
    let capture = Capture::start(&postgres, &setup(Probes::Auto));
    let mut short = TcpStream::connect(("127.0.0.1", postgres.port())).expect("connect");
    short.write_all(&[0, 0, 0, 8, 4, 210, 22, 47]).expect("SSLRequest");
    short.read_exact(&mut [0; 1]).expect("an answer");
    postgres.signal(Signal::SIGSTOP).expect("stopped");
    drop(short);
    eventually("it is given up", || has_note(&capture.notes(), "whether the probes work could not be tried"));
    postgres.signal(Signal::SIGCONT).expect("it goes on");
    capture.end().assert_lacks(&[TURNED, "sessions by the probes, unless these work: it could not be tried"]);
}

/// Starts a server again that is there for a while before it listens: it reads its certificate from a pipe that is empty so long.
fn start_slowly(postgres: &mut Postgres, meanwhile: impl FnOnce()) {
    let pipe = postgres.socket_dir().join("certificate");
    let certificate = fs::read(postgres.data_dir().join("server.crt")).expect("a certificate");
    let made = Command::new("mkfifo").args(["-m", "644"]).arg(&pipe).status().expect("mkfifo");
    assert!(made.success());
    let configuration = postgres.data_dir().join("postgresql.conf");
    let mut file = fs::OpenOptions::new().append(true).open(configuration).expect("its configuration");
    writeln!(file, "ssl_cert_file = '{}'", pipe.display()).expect("a setting");
    thread::scope(|scope| {
        let start = scope.spawn(|| postgres.start_again());
        meanwhile();
        fs::write(&pipe, certificate).expect("somebody reads");
        start.join().expect("a thread").expect("a start");
    });
    fs::remove_file(&pipe).expect("removed");
}

fn with_tls(authority: &Authority) -> Postgres {
    Postgres::builder().auth(AuthMethod::Trust).tls(authority).start().expect("a server")
}

#[test]
fn a_server_that_is_found_before_it_listens_is_looked_at_again() {
    if skipped() {
        return;
    }
    let authority = Authority::new("authority").expect("an authority");
    let mut postgres = with_tls(&authority);
    let capture = Capture::start(&postgres, &setup(Probes::Always));
    postgres.stop().expect("an end");
    start_slowly(&mut postgres, || {
        eventually("it is found", || has_note(&capture.notes(), "started again"));
        // Longer than what is tried is waited for.
        thread::sleep(Duration::from_secs(6));
    });
    let mut client =
        Client::connect(&postgres.superuser().parameter("application_name", "again")).expect("connect");
    let said = Batch::new().query("select 1");
    client.exchange(&said).expect("an answer");
    drop(client);
    let trace = capture.end();
    let sent = trace.sent(trace.session("again"));
    assert!(sent.starts_with(said.as_bytes()), "{:?}: {:?}", sent, trace.summary);
    let notes = &trace.summary.notes;
    assert!(!has_note(notes, "could not be tried") && !has_note(notes, "silent"), "{notes:?}");
    trace.assert_lacks(&[RESTARTED]);
}

#[test]
fn a_client_by_a_unix_socket_of_a_server_that_was_started_again_brings_the_probes() {
    if skipped() {
        return;
    }
    let authority = Authority::new("authority").expect("an authority");
    let mut postgres = with_tls(&authority);
    let capture = Capture::start(&postgres, &setup(Probes::Auto));
    postgres.stop().expect("an end");
    start_slowly(&mut postgres, || {
        eventually("it is found", || has_note(&capture.notes(), "started again"));
    });
    let local = Client::connect(&postgres.superuser()).expect("connect");
    eventually("the probes", || has_note(&capture.notes(), "probes attached"));
    drop(local);
    let lacks = capture.end().summary.shortcomings();
    assert!(lacks.contains(&BEFORE_PROBES.to_owned()), "{lacks:?}");
}

#[test]
fn a_server_that_no_longer_listens_on_the_recorded_port_is_said_to() {
    if skipped() {
        return;
    }
    let mut postgres = Postgres::start().expect("a server");
    let capture = Capture::start(&postgres, &setup(Probes::Never));
    postgres.set(&[("listen_addresses", "")]).expect("set");
    postgres.restart().expect("a restart");
    let told = format!("listens on no TCP address, not on TCP port {}", postgres.port());
    eventually("it is said", || has_note(&capture.notes(), &told));
    capture
        .end()
        .assert_lacks(&["what the restarted server said by TCP, as it does not listen on the recorded port"]);
}

/// What MariaDB has: no identifier of its data. Its directory is known all the same.
#[test]
fn a_server_without_an_identifier_that_goes_elsewhere_is_missing() {
    if skipped() {
        return;
    }
    let mut postgres = Postgres::start().expect("a server");
    let elsewhere = Netns::new().expect("a network namespace");
    let nameless = Server { system_identifier: None, ..server(&postgres) };
    let capture = Capture::of(nameless, postgres.port(), &setup(Probes::Never));
    postgres.stop().expect("an end");
    elsewhere.run(|| postgres.start_again()).expect("a thread inside").expect("a start");
    eventually("it is said", || has_note(&capture.notes(), "runs in another network namespace"));
    capture.end().assert_lacks(&["what the server did in another network namespace"]);
}
