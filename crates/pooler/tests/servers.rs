// SPDX-License-Identifier: Apache-2.0
//! Servers that break off in the middle of a message, that speak while nobody asks, and that die without the pooler's knowing yet.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use underpass_testkit::{
    Batch, Client, Ini, MockServer, Pooler, Postgres, Reply, Result, Signal, Step, Underpass,
};

/// Bytes to send, from `range` of those of `reply`.
fn part(reply: &Reply, range: impl std::slice::SliceIndex<[u8], Output = [u8]>) -> Step {
    Step::Send(Reply::new().raw(&reply.as_bytes()[range]))
}

/// A session of bytes, logged in with these parameters too.
fn raw_session(pooler: &Underpass, more: &[(&str, &str)]) -> TcpStream {
    let mut raw = TcpStream::connect(("127.0.0.1", pooler.port())).expect("connect");
    raw.set_read_timeout(Some(Duration::from_secs(15))).expect("timeout");
    let parameters = [&[("user", "postgres"), ("database", "postgres")], more].concat();
    let startup = Batch::new().startup(0x0003_0000, &parameters);
    raw.write_all(startup.as_bytes()).expect("startup");
    let mut greeting = Vec::new();
    while !greeting.ends_with(b"Z\0\0\0\x05I") {
        let mut byte = [0];
        raw.read_exact(&mut byte).expect("greeting");
        greeting.extend(byte);
    }
    raw
}

/// Whatever the pooler said behind half a row, the client would take it for the other half.
#[test]
fn nothing_is_said_into_the_middle_of_a_message() -> Result<()> {
    let row = Reply::new().row_description(&["n"]).data_row(&[Some(&"x".repeat(100_000))]);
    let half = row.as_bytes().len() - 50_000;
    // The server goes, or it falls silent and query_timeout ends it.
    for ending in [Step::Close, Step::WaitClose] {
        let is_silent = matches!(ending, Step::WaitClose);
        let ending = std::sync::Mutex::new(Some(ending));
        let mock = MockServer::start({
            let row = row.clone();
            move |_| {
                let ending = ending.lock().expect("not poisoned").take().unwrap_or(Step::Close);
                vec![Step::Login, Step::Expect(b'Q'), part(&row, ..half), ending]
            }
        })?;
        let mut ini = Ini::for_mock(&mock);
        if is_silent {
            ini = ini.set("query_timeout", "1");
        }
        let pooler = Underpass::start(&ini)?;
        let mut raw = raw_session(&pooler, &[]);
        raw.write_all(Batch::new().query("select repeat('x', 100000)").as_bytes()).expect("query");
        let mut answer = Vec::new();
        raw.read_to_end(&mut answer).expect("the end of the connection");
        assert!(answer == row.as_bytes()[..half], "{} bytes for {half}, silent: {is_silent}", answer.len());
    }
    Ok(())
}

/// `idle_session_timeout` and the like: the server says so, and its process ends when it gets to it. What is asked in between is lost.
#[test]
fn a_server_that_is_about_to_end_is_given_to_nobody() -> Result<()> {
    let mock = MockServer::start(|index| {
        if index > 0 {
            return vec![Step::Login, Step::Serve];
        }
        let farewell =
            Reply::new().error("FATAL", "57P05", "terminating connection due to idle-session timeout");
        vec![
            Step::Login,
            Step::Expect(b'Q'),
            Step::Send(Reply::new().single_row("n", "first")),
            Step::Delay(Duration::from_millis(100)),
            Step::Send(farewell),
            Step::WaitClose,
        ]
    })?;
    let pooler = Underpass::start(&Ini::for_mock(&mock))?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    assert_eq!(client.query("select 1")?.ok()?.value(), Some("first"));
    thread::sleep(Duration::from_millis(500));
    assert_eq!(client.query("select 1")?.ok()?.value(), Some("1"), "{}", pooler.log());
    drop((client, pooler));
    mock.wait_finished(1)
}

/// The same in one read with the end of an answer, or its end with that. The pooler sleeps while it comes, so that it is one read.
#[test]
fn a_server_that_ends_with_its_answer_is_given_to_nobody() -> Result<()> {
    let row = Reply::new().single_row("n", "first");
    let farewell =
        Reply::new().error("FATAL", "57P01", "terminating connection due to administrator command");
    let both = row.clone().raw(farewell.as_bytes());
    for (said, is_told, ends) in [(&both, true, false), (&both, true, true), (&row, false, true)] {
        let said = said.clone();
        let mock = MockServer::start(move |index| {
            if index > 0 {
                return vec![Step::Login, Step::Serve];
            }
            vec![
                Step::Login,
                Step::Expect(b'Q'),
                Step::Delay(Duration::from_millis(300)),
                Step::Send(said.clone()),
                if ends { Step::Close } else { Step::WaitClose },
            ]
        })?;
        let pooler = Underpass::start(&Ini::for_mock(&mock))?;
        if !is_told && pooler.has_lanes() {
            // While the pooler sleeps, the programs give it to the next, and an end of stream is not theirs to see.
            continue;
        }
        let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
        // The next is there already, and waits for the only server.
        let mut next = Client::connect(&pooler.options("postgres", "postgres"))?;
        client.send(&Batch::new().query("select 1"))?;
        thread::sleep(Duration::from_millis(100));
        pooler.signal(Signal::SIGSTOP)?;
        next.send(&Batch::new().query("select 1"))?;
        thread::sleep(Duration::from_millis(500));
        pooler.signal(Signal::SIGCONT)?;
        assert_eq!(client.response()?.ok()?.value(), Some("first"));
        for client in [&mut next, &mut client] {
            client.set_read_timeout(Duration::from_secs(10))?;
        }
        assert_eq!(next.response()?.ok()?.value(), Some("1"), "ends: {ends}: {}", pooler.log());
        assert_eq!(client.query("select 1")?.ok()?.value(), Some("1"), "ends: {ends}: {}", pooler.log());
        drop((client, next, pooler));
        mock.wait_finished(1)?;
    }
    Ok(())
}

/// Who ends behind every login is not asked again and again without a pause.
#[test]
fn a_server_that_ends_with_its_login_has_failed() -> Result<()> {
    let farewell =
        Reply::new().error("FATAL", "57P01", "terminating connection due to administrator command");
    let mock = MockServer::start(move |_| vec![Step::Login, Step::Send(farewell.clone()), Step::Close])?;
    let pooler = Underpass::start(&Ini::for_mock(&mock).set("query_wait_timeout", "2"))?;
    let told = Client::connect(&pooler.options("postgres", "postgres"))
        .and_then(|mut client| client.query("select 1")?.ok());
    assert!(told.is_err());
    let logins = mock.received().iter().filter(|(_, message)| message.tag == 0).count();
    assert!(logins < 10, "{logins} logins: {}", pooler.log());
    Ok(())
}

/// The rest of what it says to nobody is not for whom it is given next.
#[test]
fn an_idle_server_is_given_to_nobody_in_the_middle_of_a_message() -> Result<()> {
    let notification = Reply::new().message(b'A', &[b"\0\0\0\x01news\0", &[b'x'; 100][..], b"\0"].concat());
    let mock = MockServer::start(move |_| {
        vec![
            Step::Login,
            Step::Expect(b'Q'),
            Step::Send(Reply::new().single_row("n", "first")),
            Step::Delay(Duration::from_millis(100)),
            part(&notification, ..40),
            Step::Delay(Duration::from_millis(600)),
            part(&notification, 40..),
            Step::Expect(b'Q'),
            Step::Send(Reply::new().single_row("n", "second")),
            Step::WaitClose,
        ]
    })?;
    let pooler = Underpass::start(&Ini::for_mock(&mock))?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    assert_eq!(client.query("select 1")?.ok()?.value(), Some("first"));
    thread::sleep(Duration::from_millis(400));
    assert_eq!(client.query("select 2")?.ok()?.value(), Some("second"), "{}", pooler.log());
    drop((client, pooler));
    mock.wait_finished(1)
}

/// The client's request waits while its parameters are put back on the server it is given first. That one is dead, which shows as soon as
/// it is asked, on a unix socket: the request goes to the next.
#[test]
fn a_request_outlives_the_server_that_is_prepared_for_it() -> Result<()> {
    let server = Postgres::start()?;
    let directory = server.socket_dir().display().to_string();
    let ini = Ini::new()
        .database("postgres", &format!("host={directory} port={} user=postgres pool_size=2", server.port()))
        .userlist("postgres", "")
        .set("pool_mode", "transaction")
        .tail("[underpass]\nthreads = 1\n");
    let pooler = Underpass::start(&ini)?;
    let options = pooler.options("postgres", "postgres");
    for _ in 0..5 {
        let mut plain = Client::connect(&options)?;
        let mut tokyo = Client::connect(&options.clone().parameter("TimeZone", "Asia/Tokyo"))?;
        let begin = |client: &mut Client| -> Result<String> {
            client.query("begin")?.ok()?;
            Ok(client.query("select pg_backend_pid()")?.ok()?.value().unwrap_or_default().to_owned())
        };
        let (first, second) = (begin(&mut plain)?, begin(&mut tokyo)?);
        for client in [&mut tokyo, &mut plain] {
            client.query("commit")?.ok()?;
        }
        pooler.signal(Signal::SIGSTOP)?;
        tokyo.send(&Batch::new().query("show timezone"))?;
        server.sql(&format!("select pg_terminate_backend({first}, 10000)"))?;
        pooler.signal(Signal::SIGCONT)?;
        assert_eq!(tokyo.response()?.ok()?.value(), Some("Asia/Tokyo"), "{second}: {}", pooler.log());
    }
    Ok(())
}

/// The same of a stream that passes as it comes: half a CopyData is half a message.
#[test]
fn nothing_is_said_into_the_middle_of_replicated_data() -> Result<()> {
    let stream = Reply::new().message(b'W', b"\0\0\0").message(b'd', &[b'w'; 100_000]);
    let whole = stream.as_bytes().len();
    for cut in [whole - 50_000, 8 + 3, whole] {
        let mock = MockServer::start({
            let stream = stream.clone();
            move |_| vec![Step::Login, Step::Expect(b'Q'), part(&stream, ..cut), Step::Close]
        })?;
        let pooler = Underpass::start(&Ini::for_mock(&mock))?;
        let mut raw = raw_session(&pooler, &[("replication", "database")]);
        raw.write_all(Batch::new().query("START_REPLICATION 0/0").as_bytes()).expect("query");
        let mut answer = Vec::new();
        raw.read_to_end(&mut answer).expect("the end of the connection");
        assert!(answer.starts_with(&stream.as_bytes()[..cut]), "{} bytes for {cut}", answer.len());
        let told = &answer[cut..];
        assert_eq!(told.first() == Some(&b'E'), cut == whole, "{:?}", String::from_utf8_lossy(told));
        assert!(cut == whole || told.is_empty());
    }
    Ok(())
}

/// The name server of `silent.test` says nothing.
fn with_silent_name(hosts: &str, mock: &MockServer) -> Ini {
    Ini::new()
        .database("*", &format!("host={hosts} port={} user=postgres", mock.port()))
        .set("auth_type", "any")
        .set("server_tls_sslmode", "disable")
        .environment("UNDERPASS_TEST_HOSTS", "silent.test")
}

#[test]
fn a_name_without_an_answer_is_given_up_for_the_next_host() -> Result<()> {
    let mock = MockServer::serving()?;
    let ini = with_silent_name("silent.test,127.0.0.1", &mock).set("server_connect_timeout", "1");
    let pooler = Underpass::start(&ini)?;
    let begun = Instant::now();
    let mut client = Client::connect(&pooler.options("anybody", "one"))?;
    assert_eq!(client.query("select 1")?.ok()?.value(), Some("0"));
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(900) && took < Duration::from_secs(8), "{took:?}");
    assert!(pooler.log().contains("connect timeout"), "{}", pooler.log());
    Ok(())
}

/// Waits until somebody waits for a server of the database `one`.
fn until_asked(pooler: &Underpass) -> Result<()> {
    let begun = Instant::now();
    while pooler.console("SHOW POOLS")?.ok()?.rows().iter().all(|row| row[0].as_deref() != Some("one")) {
        assert!(begun.elapsed() < Duration::from_secs(15), "no pool");
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// What waits for a name server is no connection that anybody waits for.
#[test]
fn pause_and_kill_do_not_wait_for_a_name() -> Result<()> {
    let mock = MockServer::serving()?;
    let pooler =
        Underpass::start(&with_silent_name("silent.test", &mock).set("server_connect_timeout", "600"))?;
    for (command, back) in [("PAUSE", "RESUME"), ("PAUSE one", "RESUME one"), ("KILL one", "RESUME one")] {
        let mut client = Client::open(&pooler.options("anybody", "one"))?;
        client.startup()?;
        until_asked(&pooler)?;
        let begun = Instant::now();
        pooler.console(command)?.ok()?;
        pooler.console("WAIT_CLOSE")?.ok()?;
        assert!(begun.elapsed() < Duration::from_secs(5), "{command}: {:?}", begun.elapsed());
        pooler.console(back)?.ok()?;
    }
    Ok(())
}
