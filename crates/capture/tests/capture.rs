// SPDX-License-Identifier: Apache-2.0
//! Real servers: what clients sent is what the trace holds, by whichever source.

#![allow(unsafe_code)] // a socket option that no crate has

mod common;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use common::{Capture, Setup, eventually, skipped};
use underpass_capture::{Error, Kernel, Probes, ResponseLevel, Server, Settings};
use underpass_testkit::{AuthMethod, Authority, Batch, Client, Netns, Options, Postgres, Tls};
use underpass_trace::{Level, Protocol, Record, Source, Transport};

/// Sends each batch, waits for its answers, and returns all bytes that were sent after the login.
fn work(options: &Options, batches: &[(Batch, usize)]) -> Vec<u8> {
    let mut client = Client::connect(options).expect("connect");
    let mut sent = Vec::new();
    for (batch, answers) in batches {
        client.send(batch).expect("send");
        sent.extend_from_slice(batch.as_bytes());
        for _ in 0..*answers {
            client.response().expect("an answer");
        }
    }
    client.terminate().expect("terminate");
    sent.extend_from_slice(Batch::new().terminate().as_bytes());
    sent
}

/// Statements that a function and a trigger run are no client's: the trace has those that called them, and no more.
const INSIDE: &str = "create function pg_temp.asks() returns int language plpgsql as $$ begin \
                      perform count(*) from t; insert into t values ('inside'); return 1; end $$; \
                      create function pg_temp.fires() returns trigger language plpgsql as $$ begin \
                      perform pg_temp.asks() where new.a <> 'inside'; return new; end $$; \
                      create trigger fires before insert on t for each row execute function pg_temp.fires()";

/// A bit of everything, and the number of ReadyForQuery that answer each batch.
fn batches() -> Vec<(Batch, usize)> {
    let long = "x".repeat(100_000);
    vec![
        (Batch::new().query("create temp table t (a text)"), 1),
        (Batch::new().query(INSIDE), 1),
        (Batch::new().query("select pg_temp.asks()"), 1),
        (Batch::new().query("insert into t values ('z')"), 1),
        (Batch::new().query("select 1; select 2; select 1/0"), 1),
        (Batch::new().query(""), 1),
        (
            Batch::new()
                .parse("s", "select $1::text")
                .describe_statement("s")
                .bind("", "s", &[Some("v1")])
                .execute("", 0)
                .sync()
                .bind("", "s", &[None])
                .execute("", 0)
                .sync(),
            2,
        ),
        (Batch::new().query("begin").query("insert into t values ('a'), ('b')").query("commit"), 3),
        (Batch::new().extended("select $1", &[Some(&long)]).sync(), 1),
        (
            Batch::new()
                .parse("p", "select * from generate_series(1, 10)")
                .bind("c", "p", &[])
                .execute("c", 3)
                .execute("c", 0)
                .sync(),
            1,
        ),
        (Batch::new().query("select repeat('y', 1000) from generate_series(1, 3000)"), 1),
    ]
}

fn expected() -> Vec<(&'static str, u64)> {
    vec![
        ("CREATE TABLE", 0),
        ("CREATE FUNCTION", 0),
        ("CREATE FUNCTION", 0),
        ("CREATE TRIGGER", 0),
        ("SELECT 1", 1),
        ("INSERT 0 1", 0),
        ("SELECT 1", 1),
        ("SELECT 1", 1),
        ("22012", 0),
        ("Empty", 0),
        ("SELECT 1", 1),
        ("SELECT 1", 1),
        ("BEGIN", 0),
        ("INSERT 0 2", 0),
        ("COMMIT", 0),
        ("SELECT 1", 1),
        ("Suspended", 3),
        ("SELECT 7", 7),
        ("SELECT 3000", 3000),
    ]
}

fn check(
    postgres: &Postgres,
    options: Options,
    setup: &Setup,
    source: Source,
    transport: Transport,
) -> Vec<u8> {
    let capture = Capture::start(postgres, setup);
    let sent = work(&options.parameter("application_name", "worker"), &batches());
    let trace = capture.end();
    let session = trace.session("worker");
    assert!(trace.sent(session) == sent, "the bytes differ");
    let outcomes = trace.outcomes(session);
    let outcomes: Vec<(&str, u64)> = outcomes.iter().map(|(tag, rows)| (tag.as_str(), *rows)).collect();
    let none = setup.level == Level::None;
    assert_eq!(outcomes, if none { Vec::new() } else { expected() });
    let ready = |r: &&Record<'_>| matches!(r, Record::Ready(ready) if ready.session == session);
    let answers: usize = batches().iter().map(|(_, answers)| answers).sum();
    assert_eq!(trace.records.iter().filter(ready).count(), answers);
    assert_eq!(trace.backends(session).is_empty(), setup.level != Level::Full);
    trace.assert_lossless();
    let starts = trace.starts();
    let start = starts.iter().find(|s| s.session == session).expect("start");
    assert_eq!((start.source, start.transport, start.midstream), (source, transport, false));
    assert_eq!(start.user.as_deref(), Some(&b"postgres"[..]));
    assert!(start.backend_pid.is_some());
    let ends = trace.ends();
    let end = ends.iter().find(|e| e.session == session).expect("end");
    // The kernel's own count is of TCP without encryption; what the probes count is no audit of theirs.
    let is_audited = source == Source::CgroupSkb;
    assert_eq!([end.frontend.audited.is_some(), end.backend.audited.is_some()], [is_audited; 2], "{end:?}");
    sent
}

#[test]
fn a_session_over_tcp_is_recorded_exactly() {
    if skipped() {
        return;
    }
    let postgres = Postgres::start().expect("a server");
    for level in [Level::None, Level::Summary, Level::Full] {
        let setup = Setup { level, ..Setup::default() };
        check(&postgres, postgres.options("postgres", "postgres"), &setup, Source::CgroupSkb, Transport::Tcp);
    }
}

#[test]
fn a_session_over_a_unix_socket_is_recorded_exactly() {
    if skipped() {
        return;
    }
    let postgres = Postgres::start().expect("a server");
    let setup = Setup { probes: Probes::Always, ..Setup::default() };
    check(&postgres, postgres.superuser(), &setup, Source::Uprobe, Transport::Unix);
}

#[test]
fn a_session_over_tls_is_recorded_exactly() {
    if skipped() {
        return;
    }
    let authority = Authority::new("authority").expect("an authority");
    let postgres = Postgres::builder().auth(AuthMethod::Trust).tls(&authority).start().expect("a server");
    let setup = Setup { probes: Probes::Always, ..Setup::default() };
    let options = postgres
        .options("postgres", "postgres")
        .host("localhost")
        .tls(Tls::new(&authority, None).expect("tls"));
    let tls = check(&postgres, options, &setup, Source::Uprobe, Transport::Tls);
    let plain =
        check(&postgres, postgres.options("postgres", "postgres"), &setup, Source::CgroupSkb, Transport::Tcp);
    assert!(tls == plain, "the same workload is the same trace");
}

/// IPV6_DSTOPTS, linux/in6.h: a header that every packet of the socket has from then on.
const IPV6_DSTOPTS: libc::c_int = 59;

/// Has a socket's packets carry a header of 8 bytes between IPv6 and TCP, filled by the option PadN. Needs CAP_NET_RAW.
fn add_destination_options(socket: &TcpStream) {
    let header = [0u8, 0, 1, 4, 0, 0, 0, 0];
    // SAFETY: the kernel reads as many bytes as it is told, from an array of this length.
    let rc = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_IPV6,
            IPV6_DSTOPTS,
            header.as_ptr().cast(),
            header.len() as libc::socklen_t,
        )
    };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn extension_headers_of_ipv6_are_passed_over() {
    if skipped() {
        return;
    }
    let postgres = Postgres::builder().setting("listen_addresses", "::1").start().expect("a server");
    let capture = Capture::start(&postgres, &Setup::default());
    let mut socket = TcpStream::connect(("::1", postgres.port())).expect("connect");
    add_destination_options(&socket);
    let login = [("user", "postgres"), ("database", "postgres"), ("application_name", "extended")];
    let said = Batch::new().query("select 'behind a header'").terminate();
    let bytes = [Batch::new().startup(3 << 16, &login).as_bytes(), said.as_bytes()].concat();
    socket.write_all(&bytes).expect("send");
    // Until the server closes.
    socket.read_to_end(&mut Vec::new()).expect("answers");
    let trace = capture.end();
    trace.assert_lossless();
    let session = trace.session("extended");
    assert!(trace.sent(session) == said.as_bytes());
    assert_eq!(trace.outcomes(session), [("SELECT 1".to_owned(), 1)]);
    assert!(trace.starts()[0].peer.is_some_and(|peer| peer.is_ipv6()));
}

/// Bind with values of eight bytes in binary format, which hold every byte there is.
fn bind_binary(values: u16) -> Batch {
    let mut body = b"\0\0\0\x01\0\x01".to_vec();
    body.extend_from_slice(&values.to_be_bytes());
    for number in 0..u64::from(values) {
        body.extend_from_slice(&8_i32.to_be_bytes());
        body.extend_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
    }
    body.extend_from_slice(&[0, 0]);
    Batch::new().message(b'B', &body)
}

/// The same by packets, and by what the server reads of TLS.
#[test]
fn a_statement_of_16_mib_and_60000_bind_values_are_bit_exact() {
    if skipped() {
        return;
    }
    let authority = Authority::new("authority").expect("an authority");
    let postgres = Postgres::builder().auth(AuthMethod::Trust).tls(&authority).start().expect("a server");
    let mut text = String::with_capacity(17 << 20);
    text.push_str("select length('");
    let mut state = 1u32;
    while text.len() < 16 << 20 {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        text.push(char::from(b'a' + (state >> 24) as u8 % 26));
    }
    text.push_str("')");
    let values: Vec<String> = (0..60_000).map(|n| format!("value {n}")).collect();
    let values: Vec<Option<&str>> = values.iter().map(|v| Some(v.as_str())).collect();
    let asks = |kind: &str| {
        let places: Vec<String> = (1..=60_000).map(|n| format!("${n}::{kind}")).collect();
        format!("select cardinality(array[{}])", places.join(","))
    };
    let binary = [
        Batch::new().parse("", &asks("int8")).as_bytes(),
        bind_binary(60_000).as_bytes(),
        Batch::new().execute("", 0).sync().as_bytes(),
    ]
    .concat();
    let batches = [
        (Batch::new().query(&text), 1),
        (Batch::new().extended(&asks("text"), &values).sync(), 1),
        (Batch::new().raw(&binary), 1),
        (Batch::new().query("select 1"), 1),
    ];
    let plain = postgres.options("postgres", "postgres");
    let tls = plain.clone().host("localhost").tls(Tls::new(&authority, None).expect("tls"));
    for (options, probes, transport) in
        [(plain, Probes::Never, Transport::Tcp), (tls, Probes::Always, Transport::Tls)]
    {
        // Each ring holds all of it: how soon it is looked into is another matter.
        let setup = Setup { ring_bytes: 64 << 20, probes, ..Setup::default() };
        let capture = Capture::start(&postgres, &setup);
        let options = options.parameter("application_name", "large").read_timeout(Duration::from_secs(60));
        let sent = work(&options, &batches);
        let trace = capture.end();
        let session = trace.session("large");
        trace.assert_lossless();
        let start = trace.starts().into_iter().find(|start| start.session == session).expect("start");
        assert_eq!(start.transport, transport);
        assert!(trace.sent(session) == sent, "the bytes differ");
        assert_eq!(trace.outcomes(session), vec![("SELECT 1".to_owned(), 1); 4]);
    }
}

#[test]
fn copy_in_is_recorded_exactly_and_copy_out_told() {
    if skipped() {
        return;
    }
    let postgres = Postgres::start().expect("a server");
    postgres.sql("create table t (a int)").expect("a table");
    let capture = Capture::start(&postgres, &Setup::default());
    let mut client =
        Client::connect(&postgres.options("postgres", "postgres").parameter("application_name", "copy"))
            .expect("connect");
    let begin = Batch::new().query("copy t from stdin");
    client.send(&begin).expect("send");
    let mut data = Batch::new();
    for n in 0..2000 {
        data = data.copy_data(format!("{n}\n").as_bytes());
    }
    let data = data.copy_done();
    client.send(&data).expect("send");
    client.response().expect("copied");
    assert_eq!(client.query("copy t to stdout").expect("copied").tags().chars().next(), Some('H'));
    drop(client);
    let trace = capture.end();
    let session = trace.session("copy");
    let out = Batch::new().query("copy t to stdout");
    assert!(trace.sent(session).starts_with(&[begin.as_bytes(), data.as_bytes(), out.as_bytes()].concat()));
    assert_eq!(trace.outcomes(session), [("COPY 2000".to_owned(), 0), ("COPY 2000".to_owned(), 2000)]);
    trace.assert_lossless();
}

#[test]
fn a_running_session_is_joined_with_its_names_and_the_texts_of_its_statements() {
    if skipped() {
        return;
    }
    let postgres = Postgres::start().expect("a server");
    let mut old = Client::connect(&postgres.options("postgres", "postgres")).expect("connect");
    old.exchange(&Batch::new().parse("old", "select $1::int + 41").sync()).expect("prepared");
    let setup = Setup { probes: Probes::Auto, ..Setup::default() };
    let capture = Capture::start(&postgres, &setup);
    let using = Batch::new().bind("", "old", &[Some("1")]).execute("", 0).sync();
    // The first use shows that the text is wanted, a later one shows the text.
    for _ in 0..20 {
        let answer = old.exchange(&using).expect("an answer");
        assert_eq!(answer[0].value(), Some("42"));
        thread::sleep(Duration::from_millis(50));
    }
    let trace = capture.end();
    let starts = trace.starts();
    let start = starts.iter().find(|s| s.midstream).expect("joined");
    assert_eq!(
        (start.user.as_deref(), start.database.as_deref()),
        (Some(&b"postgres"[..]), Some(&b"postgres"[..]))
    );
    assert!(start.backend_pid.is_some());
    assert!(trace.sent(start.session) == using.as_bytes().repeat(20), "from its first message on");
    let fills = trace.fills();
    assert_eq!(fills.len(), 1);
    assert_eq!((&*fills[0].name, &*fills[0].query), (&b"old"[..], &b"select $1::int + 41"[..]));
    trace.assert_lossless();
}

#[test]
fn passwords_of_logins_are_not_in_the_trace() {
    if skipped() {
        return;
    }
    let postgres = Postgres::builder()
        .auth(AuthMethod::Password)
        .user("ann", "correct horse")
        .start()
        .expect("a server");
    let capture = Capture::start(&postgres, &Setup::default());
    let options = postgres.options("ann", "postgres").password("correct horse");
    Client::connect(&options).expect("connect").query("select 1").expect("an answer");
    let trace = capture.end();
    assert!(trace.ends().iter().any(|end| end.frontend.withheld > 0));
    let everything = format!("{:?}", trace.records);
    assert!(!everything.contains("correct horse"));
    trace.assert_lossless();
}

#[test]
fn a_server_that_is_started_again_is_followed() {
    if skipped() {
        return;
    }
    let mut postgres = Postgres::start().expect("a server");
    let capture = Capture::start(&postgres, &Setup { probes: Probes::Always, ..Setup::default() });
    let mut client = Client::connect(&postgres.options("postgres", "postgres")).expect("connect");
    client.query("select 1").expect("an answer");
    postgres.restart().expect("a restart");
    // It is there before the recorder knows of the new postmaster.
    let mut early = Client::connect(&postgres.superuser()).expect("connect");
    early.query("select 'too early'").expect("an answer");
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while !capture.notes().iter().any(|note| note.contains("started again")) {
        assert!(std::time::Instant::now() < deadline, "{:?}", capture.notes());
        thread::sleep(Duration::from_millis(100));
    }
    // The first of them ends a call that began when nobody wanted it.
    let late = Batch::new().query("select 'early'");
    for _ in 0..2 {
        early.exchange(&late).expect("an answer");
    }
    drop(early);
    for (name, options) in
        [("tcp again", postgres.options("postgres", "postgres")), ("unix again", postgres.superuser())]
    {
        let sent = work(&options.parameter("application_name", name), &[(Batch::new().query("select 2"), 1)]);
        assert!(!sent.is_empty());
    }
    let trace = capture.end();
    assert!(
        trace.summary.notes.iter().any(|note| note.contains("started again")),
        "{:?}",
        trace.summary.notes
    );
    for name in ["tcp again", "unix again"] {
        let session = trace.session(name);
        assert_eq!(trace.outcomes(session), [("SELECT 1".to_owned(), 1)]);
    }
    let has_early = |sent: Vec<u8>| sent.windows(late.as_bytes().len()).any(|part| part == late.as_bytes());
    let sessions: Vec<_> = trace.starts().iter().map(|start| start.session).collect();
    let told = sessions.into_iter().filter(|&session| has_early(trace.sent(session))).count();
    assert_eq!(told, 1, "a session that began before the recorder knew");
    let gap = "what probed sessions said before the restarted server was known";
    // The early one waited in the probed function when that was known.
    let waited = "1 probed sessions under way whose first request may be missing";
    let was_early = trace.starts().iter().any(|start| start.midstream && start.transport == Transport::Unix);
    trace.assert_lacks(&[waited, gap][usize::from(!was_early)..]);
}

#[test]
fn a_server_that_ends_is_told_and_one_that_goes_elsewhere_is_missing() {
    if skipped() {
        return;
    }
    let mut postgres = Postgres::start().expect("a server");
    let elsewhere = Netns::new().expect("a network namespace");
    let capture = Capture::start(&postgres, &Setup::default());
    postgres.stop().expect("an end");
    thread::sleep(Duration::from_secs(3));
    let trace = capture.end();
    let notes = &trace.summary.notes;
    assert!(notes.iter().any(|note| note.starts_with("the server ended, seen after")), "{notes:?}");
    trace.assert_lossless();

    postgres.start_again().expect("a start");
    let capture = Capture::start(&postgres, &Setup::default());
    postgres.stop().expect("an end");
    elsewhere.run(|| postgres.start_again()).expect("a thread inside").expect("a start");
    thread::sleep(Duration::from_secs(3));
    let trace = capture.end();
    let notes = &trace.summary.notes;
    let told = notes.iter().filter(|note| note.contains("runs in another network namespace")).count();
    assert_eq!(told, 1, "{notes:?}");
    assert_eq!(trace.summary.shortcomings(), ["what the server did in another network namespace"]);
}

/// While the recorder tries whether its sources work, nothing is written yet.
#[test]
fn sessions_that_speak_while_the_capture_begins_are_joined_behind_it() {
    if skipped() {
        return;
    }
    let postgres = Postgres::start().expect("a server");
    let over = Arc::new(AtomicBool::new(false));
    let busy: Vec<_> = (0..4)
        .map(|n| {
            let mut client = Client::connect(&postgres.options("postgres", "postgres")).expect("connect");
            let over = Arc::clone(&over);
            thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    client.query(&format!("select 'client {n}'")).expect("an answer");
                    thread::sleep(Duration::from_millis(1));
                }
            })
        })
        .collect();
    let capture = Capture::start(&postgres, &Setup::default());
    thread::sleep(Duration::from_millis(500));
    over.store(true, Ordering::Relaxed);
    for client in busy {
        client.join().expect("a client");
    }
    let trace = capture.end();
    let mut seen: Vec<String> = trace
        .starts()
        .iter()
        .map(|start| String::from_utf8_lossy(&trace.frontends(start.session)[0].message[5..]).into_owned())
        .collect();
    seen.sort();
    let expected: Vec<String> = (0..4).map(|n| format!("select 'client {n}'\0")).collect();
    assert_eq!(seen, expected);
    trace.assert_lossless();
}

/// A long text comes in pieces. The program measures it in steps and gives up at the last one: what it had till then is not the statement.
#[test]
fn a_long_text_is_told_whole_or_not_at_all() {
    if skipped() {
        return;
    }
    let postgres = Postgres::start().expect("a server");
    let mut old = Client::connect(&postgres.options("postgres", "postgres")).expect("connect");
    let text_of = |len: usize| {
        let mut text = "select $1::int /*".to_owned();
        text.push_str(&"x".repeat(len - text.len() - 2));
        text.push_str("*/");
        text
    };
    // One piece, more than one, the longest that is told, the shortest that is not, and one of more steps than there are.
    // Steps are of 255 bytes, pieces of 61,440.
    let lengths = [61_200, 61_440, 61_441, 122_880, 1_966_079, 1_966_080, 2_500_000];
    for len in lengths {
        old.exchange(&Batch::new().parse(&format!("s{len}"), &text_of(len)).sync()).expect("prepared");
    }
    let capture = Capture::start(&postgres, &Setup { probes: Probes::Auto, ..Setup::default() });
    for _ in 0..20 {
        for len in lengths {
            let using = Batch::new().bind("", &format!("s{len}"), &[Some("1")]).execute("", 0).sync();
            old.exchange(&using).expect("an answer");
        }
        thread::sleep(Duration::from_millis(50));
    }
    let trace = capture.end();
    let mut told: Vec<usize> = Vec::new();
    for fill in trace.fills() {
        assert_eq!(*fill.name, *format!("s{}", fill.query.len()).as_bytes());
        assert_eq!(*fill.query, *text_of(fill.query.len()).as_bytes(), "bit-exact");
        told.push(fill.query.len());
    }
    told.sort();
    assert_eq!(told, lengths[..5]);
}

#[test]
fn probes_come_when_a_session_needs_them() {
    if skipped() {
        return;
    }
    let authority = Authority::new("authority").expect("an authority");
    let postgres = Postgres::builder().auth(AuthMethod::Trust).tls(&authority).start().expect("a server");
    let capture = Capture::start(&postgres, &Setup { probes: Probes::Auto, ..Setup::default() });
    let options = postgres
        .options("postgres", "postgres")
        .host("localhost")
        .tls(Tls::new(&authority, None).expect("tls"));
    let mut first = Client::connect(&options).expect("connect");
    for _ in 0..30 {
        first.query("select 1").expect("an answer");
        thread::sleep(Duration::from_millis(50));
    }
    let sent = work(&options.parameter("application_name", "second"), &[(Batch::new().query("select 2"), 1)]);
    drop(first);
    let trace = capture.end();
    assert_eq!(trace.summary.totals.encrypted, 2);
    assert!(trace.summary.notes.iter().any(|note| note.starts_with("probes attached after")));
    let starts = trace.starts();
    let first = starts.iter().find(|s| s.midstream).expect("joined");
    assert_eq!((first.source, first.transport), (Source::Uprobe, Transport::Tls));
    assert!((1..30).contains(&trace.frontends(first.session).len()));
    assert!(trace.sent(trace.session("second")) == sent, "from its first byte");
    trace.assert_lacks(&["1 encrypted connections whose beginning, or all, was not seen"]);
}

/// One that is over before the probes come is in no session.
#[test]
fn what_ends_before_the_probes_come_is_missing() {
    if skipped() {
        return;
    }
    let authority = Authority::new("authority").expect("an authority");
    let postgres = Postgres::builder().auth(AuthMethod::Trust).tls(&authority).start().expect("a server");
    let capture = Capture::start(&postgres, &Setup { probes: Probes::Auto, ..Setup::default() });
    // It turns to encryption and says no more, where the probes cannot know that.
    let mut short = TcpStream::connect(("127.0.0.1", postgres.port())).expect("connect");
    short.write_all(&[0, 0, 0, 8, 4, 210, 22, 47]).expect("SSLRequest");
    short.read_exact(&mut [0; 1]).expect("an answer");
    drop(short);
    eventually("the probes", || capture.notes().iter().any(|note| note.starts_with("probes attached")));
    // Now they are there, and would see what it said.
    let mut late = TcpStream::connect(("127.0.0.1", postgres.port())).expect("connect");
    late.write_all(&[0, 0, 0, 8, 4, 210, 22, 47]).expect("SSLRequest");
    late.read_exact(&mut [0; 1]).expect("an answer");
    drop(late);
    let trace = capture.end();
    assert_eq!((trace.summary.totals.encrypted, trace.summary.unseen), (2, 1));
    let notes = &trace.summary.notes;
    assert!(notes.iter().any(|note| note.starts_with("of 1 connections that turned to TLS")), "{notes:?}");
    trace.assert_lacks(&["1 encrypted connections whose beginning, or all, was not seen"]);

    // One that is there from the start is a reason for probes from the start.
    let local = Client::connect(&postgres.superuser()).expect("connect");
    let capture = Capture::start(&postgres, &Setup { probes: Probes::Auto, ..Setup::default() });
    drop(local);
    capture.end().assert_lossless();

    eventually("the session is gone", || !common::server(&postgres).has_local());
    let capture = Capture::start(&postgres, &Setup { probes: Probes::Auto, ..Setup::default() });
    let local = Client::connect(&postgres.superuser()).expect("connect");
    eventually("the probes", || capture.notes().iter().any(|note| note.starts_with("probes attached")));
    drop(local);
    capture.end().assert_lacks(&["sessions by Unix sockets, or what they said before the probes came"]);
}

/// The probes are in every process of the executable: what reaches them must be of the wanted server.
#[test]
fn another_cluster_of_the_same_executable_does_not_prove_the_probes() {
    if skipped() {
        return;
    }
    let authority = Authority::new("authority").expect("an authority");
    let postgres = Postgres::builder().auth(AuthMethod::Trust).tls(&authority).start().expect("a server");
    let other = Postgres::start().expect("another server");
    let (own, of_other) = (common::server(&postgres), common::server(&other));
    assert_eq!(own.executable, of_other.executable);
    let mixed = Server { sockets: of_other.sockets, ..own };
    let setup = |probes| Setup { probes, ..Setup::default() };
    let error = Capture::try_of(mixed.clone(), postgres.port(), &setup(Probes::Always)).err();
    let told = error.expect("an error").to_string();
    assert!(told.starts_with("the probe of secure_read is attached but silent"), "{told}");

    // The same for probes that come later.
    let capture = Capture::of(mixed, postgres.port(), &setup(Probes::Auto));
    let mut client = TcpStream::connect(("127.0.0.1", postgres.port())).expect("connect");
    client.write_all(&[0, 0, 0, 8, 4, 210, 22, 47]).expect("SSLRequest");
    client.read_exact(&mut [0; 1]).expect("an answer");
    eventually("the probes", || capture.notes().iter().any(|note| note.starts_with("probes attached")));
    let trace = capture.end();
    let lacks = trace.summary.shortcomings();
    assert!(lacks.iter().any(|what| what.contains("attached but silent")), "{lacks:?}");
    let notes = &trace.summary.notes;
    assert!(
        notes.iter().any(|note| note.contains("the probe of secure_read is attached but silent")),
        "{notes:?}"
    );
}

/// Not every build exports what the probes need. `cat` is stripped, and exports nothing of the kind.
#[test]
fn an_executable_without_the_functions_is_named() {
    if skipped() {
        return;
    }
    let settings = Settings {
        protocol: Protocol::Postgres,
        port: None,
        netns: None,
        level: ResponseLevel::SUMMARY,
        ring_bytes: 1 << 20,
        rings: 1,
    };
    for (protocol, symbol) in [(Protocol::Postgres, "secure_write"), (Protocol::Mysql, "vio_delete")] {
        let mut kernel = Kernel::open(&Settings { protocol, ..settings.clone() }).expect("programs");
        let error = kernel.attach_probes(Path::new("/bin/cat"), std::process::id()).expect_err("an error");
        assert!(matches!(&error, Error::NoSymbol { symbol: lacks, .. } if *lacks == symbol), "{error:?}");
        assert!(error.to_string().contains("this build cannot be probed"), "{error}");
    }
}

#[test]
fn a_session_over_tcp_is_recorded_by_probes_alone() {
    if skipped() {
        return;
    }
    let postgres = Postgres::start().expect("a server");
    let setup = |probes| Setup { packets: false, probes, ..Setup::default() };
    let refused = Capture::try_of(common::server(&postgres), postgres.port(), &setup(Probes::Never)).err();
    let told = refused.expect("an error").to_string();
    assert!(told.starts_with("nothing to record"), "{told}");
    let setup = setup(Probes::Always);
    check(&postgres, postgres.options("postgres", "postgres"), &setup, Source::Uprobe, Transport::Unknown);
}

#[test]
fn a_server_without_tcp_is_recorded_by_probes_alone() {
    if skipped() {
        return;
    }
    let postgres = Postgres::builder().setting("listen_addresses", "").start().expect("a server");
    assert_eq!(common::server(&postgres).port(), None);
    let setup = Setup { probes: Probes::Auto, packets: false, ..Setup::default() };
    check(&postgres, postgres.superuser(), &setup, Source::Uprobe, Transport::Unix);
}

/// `replay --order commit` goes by these times: who has read an answer may depend on it, in whatever session.
#[test]
fn an_answer_is_no_later_than_what_its_reader_says_next() {
    if skipped() {
        return;
    }
    const ROUNDS: usize = 1500;
    let postgres = Postgres::start().expect("a server");
    let setup = Setup { probes: Probes::Always, ..Setup::default() };
    let capture = Capture::start(&postgres, &setup);
    let busy = AtomicBool::new(true);
    thread::scope(|scope| {
        // Without a free processor the backend does not return from its call until somebody gives way.
        for _ in 0..thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                while busy.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let talk = || {
            let connect = |name| Client::connect(&postgres.superuser().parameter("application_name", name));
            let mut clients = [connect("one")?, connect("other")?];
            for _ in 0..ROUNDS {
                for client in &mut clients {
                    client.query("select 1")?.ok()?;
                }
            }
            Ok::<(), underpass_testkit::Error>(())
        };
        let talked = talk();
        busy.store(false, Ordering::Relaxed);
        talked.expect("answers");
    });
    let trace = capture.end();
    let [one, other] = ["one", "other"].map(|name| {
        let session = trace.session(name);
        let asked = trace.frontends(session).into_iter().filter(|f| f.message.first() == Some(&b'Q'));
        let asked: Vec<u64> = asked.map(|f| f.time_ns).collect();
        let answered: Vec<u64> = trace.responses(session).iter().map(|r| r.last_ns).collect();
        assert_eq!((asked.len(), answered.len()), (ROUNDS, ROUNDS));
        asked.into_iter().zip(answered).collect::<Vec<_>>()
    });
    let turns: Vec<(u64, u64)> = one.into_iter().zip(other).flat_map(|(one, other)| [one, other]).collect();
    let late = turns.windows(2).filter(|turn| turn[0].1 > turn[1].0).count();
    assert_eq!(late, 0, "of {} answers these came after what was said when they had been read", turns.len());
}
