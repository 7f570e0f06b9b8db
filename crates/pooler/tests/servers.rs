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
    // What ends the server: itself, query_timeout when it falls silent, or the console.
    for end in ["its own", "query_timeout", "KILL"] {
        let mock = MockServer::start({
            let row = row.clone();
            move |_| {
                let ending = if end == "its own" { Step::Close } else { Step::WaitClose };
                vec![Step::Login, Step::Expect(b'Q'), part(&row, ..half), ending]
            }
        })?;
        let mut ini = Ini::for_mock(&mock);
        if end == "query_timeout" {
            ini = ini.set("query_timeout", "1");
        }
        let pooler = Underpass::start(&ini)?;
        let mut raw = raw_session(&pooler, &[]);
        raw.write_all(Batch::new().query("select repeat('x', 100000)").as_bytes()).expect("query");
        let mut answer = vec![0; half];
        raw.read_exact(&mut answer).expect("half of the answer");
        if end == "KILL" {
            pooler.console("KILL")?.ok()?;
        }
        raw.read_to_end(&mut answer).expect("the end of the connection");
        assert!(answer == row.as_bytes()[..half], "{} bytes for {half}, end: {end}", answer.len());
    }
    Ok(())
}

/// One that has logged in and served nobody yet did nothing wrong: the next is not asked for only after `server_login_retry`.
#[test]
fn a_server_that_is_killed_has_not_failed() -> Result<()> {
    let mock = MockServer::start(|index| match index {
        0 => vec![Step::Login, Step::Expect(b'Q'), Step::WaitClose],
        _ => vec![Step::Login, Step::Serve],
    })?;
    let ini = Ini::new()
        .database(
            "postgres",
            &format!("host=127.0.0.1 port={} user=joe connect_query='select 0'", mock.port()),
        )
        .userlist("postgres", "")
        .set("pool_mode", "transaction")
        .set("server_login_retry", "60");
    let pooler = Underpass::start(&ini)?;
    let options = pooler.options("postgres", "postgres");
    let killed = thread::spawn({
        let options = options.clone();
        move || Client::connect(&options).and_then(|mut client| client.query("select 1")?.ok())
    });
    while mock.queries().is_empty() {
        thread::sleep(Duration::from_millis(10));
    }
    pooler.console("KILL")?.ok()?;
    pooler.console("RESUME")?.ok()?;
    assert!(killed.join().expect("no panic").is_err());
    let mut client = Client::connect(&options)?;
    client.set_read_timeout(Duration::from_secs(10))?;
    assert_eq!(client.query("select 1")?.ok()?.value(), Some("1"), "{}", pooler.log());
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

/// In the order of things: an idle server whose path has been cut without a word. Its check finds out, and the request goes to another.
#[test]
fn a_server_that_does_not_answer_its_check_is_left() -> Result<()> {
    let script = |index| match index {
        0 => vec![
            Step::Login,
            Step::Expect(b'Q'),
            Step::Send(Reply::new().single_row("n", "first")),
            Step::Expect(b'Q'),
            Step::WaitClose,
        ],
        _ => vec![Step::Login, Step::Serve],
    };
    for (timeout, answer) in [("server_connect_timeout", Some("1")), ("query_wait_timeout", None)] {
        let mock = MockServer::start(script)?;
        let ini = Ini::for_mock(&mock)
            .set("server_check_delay", "0.2")
            .set("server_check_query", "select 'alive'")
            .set(timeout, "1");
        let pooler = Underpass::start(&ini)?;
        let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
        assert_eq!(client.query("select 1")?.ok()?.value(), Some("first"));
        thread::sleep(Duration::from_millis(500));
        client.set_read_timeout(Duration::from_secs(10))?;
        let told = client.query("select 2").and_then(|response| response.ok());
        match answer {
            Some(answer) => assert_eq!(told?.value(), Some(answer), "{}", pooler.log()),
            None => assert!(told.unwrap_err().to_string().contains(timeout), "{}", pooler.log()),
        }
    }
    Ok(())
}

/// `connect_query` belongs to the login, and has its time.
#[test]
fn a_connect_query_has_the_time_of_a_login() -> Result<()> {
    let mock = MockServer::start(|index| match index {
        0 => vec![Step::Login, Step::Expect(b'Q'), Step::WaitClose],
        _ => vec![Step::Login, Step::Serve],
    })?;
    let database = format!("host=127.0.0.1 port={} user=joe connect_query='select 0'", mock.port());
    let ini = Ini::new()
        .database("postgres", &database)
        .userlist("postgres", "")
        .set("server_connect_timeout", "1")
        .set("server_login_retry", "1");
    let pooler = Underpass::start(&ini)?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    assert_eq!(client.query("select 1")?.ok()?.value(), Some("1"), "{}", pooler.log());
    assert!(pooler.log().contains("connect timeout"), "{}", pooler.log());
    Ok(())
}

/// The client of an auth_query has seen nothing of its answer, and is told when that breaks off.
#[test]
fn an_auth_query_that_breaks_off_is_told() -> Result<()> {
    let row = Reply::new().row_description(&["user", "password"]).data_row(&[Some("joe"), Some("secret")]);
    let half = row.as_bytes().len() - 5;
    let mock =
        MockServer::start(move |_| vec![Step::Login, Step::Until(b'S'), part(&row, ..half), Step::Close])?;
    let ini = Ini::new()
        .database("postgres", &format!("host=127.0.0.1 port={} auth_user=postgres", mock.port()))
        .userlist("postgres", "")
        .set("auth_type", "plain");
    let pooler = Underpass::start(&ini)?;
    let refused = Client::connect(&pooler.options("joe", "postgres").password("secret"));
    let told = refused.err().map(|error| error.to_string()).unwrap_or_default();
    assert!(told.contains("server conn crashed"), "{told}: {}", pooler.log());
    Ok(())
}

/// And the end alone, told in one event with the login.
#[test]
fn the_end_of_a_server_behind_its_login_is_seen() -> Result<()> {
    let mock = MockServer::start(|index| match index {
        0 => vec![Step::Delay(Duration::from_millis(300)), Step::Login, Step::Close],
        _ => vec![Step::Login, Step::Serve],
    })?;
    let ini = Ini::for_mock(&mock).set("server_login_retry", "1");
    let pooler = Underpass::start(&ini)?;
    let options = pooler.options("postgres", "postgres");
    let served = thread::spawn(move || {
        Client::connect(&options).and_then(|mut client| client.query("select 1")?.ok())
    });
    thread::sleep(Duration::from_millis(150));
    pooler.signal(Signal::SIGSTOP)?;
    thread::sleep(Duration::from_millis(400));
    pooler.signal(Signal::SIGCONT)?;
    assert_eq!(served.join().expect("no panic")?.value(), Some("1"), "{}", pooler.log());
    Ok(())
}

/// What a server says behind the answer of `auth_query` is about its end, and the secret is the one it told before.
#[test]
fn an_auth_query_is_answered_by_its_answer() -> Result<()> {
    let answer = Reply::new()
        .message(b'1', b"")
        .message(b'2', b"")
        .row_description(&["user", "password"])
        .data_row(&[Some("joe"), Some("secret")])
        .command_complete("SELECT 1")
        .ready_for_query(b'I')
        .error("FATAL", "57P01", "terminating connection due to administrator command");
    let mock = MockServer::start(move |index| match index {
        0 => vec![Step::Login, Step::Until(b'S'), Step::Send(answer.clone()), Step::Close],
        _ => vec![Step::Login, Step::Serve],
    })?;
    let ini = Ini::new()
        .database("postgres", &format!("host=127.0.0.1 port={} auth_user=postgres", mock.port()))
        .userlist("postgres", "")
        .set("auth_type", "plain")
        .set("pool_mode", "transaction");
    let pooler = Underpass::start(&ini)?;
    let options = pooler.options("joe", "postgres").password("secret");
    let mut client = Client::connect(&options).inspect_err(|_| eprintln!("{}", pooler.log()))?;
    assert_eq!(client.query("select 1")?.ok()?.value(), Some("1"), "{}", pooler.log());
    Ok(())
}

/// And the rest may never come: then it is closed, and the next serves.
#[test]
fn an_idle_server_with_half_a_message_is_given_up() -> Result<()> {
    let notification = Reply::new().message(b'A', &[b"\0\0\0\x01news\0", &[b'x'; 100][..], b"\0"].concat());
    let mock = MockServer::start(move |index| match index {
        0 => vec![
            Step::Login,
            Step::Expect(b'Q'),
            Step::Send(Reply::new().single_row("n", "first")),
            Step::Delay(Duration::from_millis(100)),
            part(&notification, ..40),
            Step::Delay(Duration::from_secs(40)),
        ],
        _ => vec![Step::Login, Step::Serve],
    })?;
    let pooler = Underpass::start(&Ini::for_mock(&mock))?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    assert_eq!(client.query("select 1")?.ok()?.value(), Some("first"));
    thread::sleep(Duration::from_millis(400));
    client.set_read_timeout(Duration::from_secs(50))?;
    assert_eq!(client.query("select 2")?.ok()?.value(), Some("1"), "{}", pooler.log());
    assert!(pooler.log().contains("server did not come to rest"), "{}", pooler.log());
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

/// What a client waits for one request is counted once, though the first server that it is given turns out dead.
#[test]
fn a_wait_that_outlives_a_dead_server_is_counted_once() -> Result<()> {
    const DYING: Duration = Duration::from_millis(300);
    // It is asked whether it lives when the request comes, and dies over it.
    let mock = MockServer::start(|index| match index {
        0 => vec![Step::Login, Step::Expect(b'Q'), Step::Delay(DYING), Step::Close],
        _ => vec![Step::Login, Step::Serve],
    })?;
    let ini = Ini::for_mock(&mock)
        .set("server_check_delay", "0")
        .set("server_check_query", "select 2")
        .tail("[underpass]\nkernel_path = off\nthreads = 1\n");
    let pooler = Underpass::start(&ini)?;
    let figure = |name: &str| -> Result<u64> {
        let shown = pooler.console("SHOW STATS")?.ok()?;
        let names = shown.column_names();
        let column = names.iter().position(|column| column == name).expect("a column");
        let row = shown.rows().into_iter().find(|row| row[0].as_deref() == Some("postgres"));
        Ok(row.and_then(|row| row[column].as_deref()?.parse().ok()).unwrap_or(0))
    };
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    // The server that logged it in rests.
    thread::sleep(Duration::from_millis(100));
    let begun = Instant::now();
    assert_eq!(client.query("select 1")?.ok()?.value(), Some("1"), "{}", pooler.log());
    let waited = u128::from(figure("total_wait_time")?);
    assert!(waited >= DYING.as_micros() && waited <= begun.elapsed().as_micros(), "{waited} us");
    assert_eq!(figure("total_server_assignment_count")?, 1);
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

/// What PostgreSQL refuses to a replication connection is no reason to refuse others, who need neither its role nor its line of pg_hba.conf.
#[test]
fn a_refused_replication_connection_harms_nobody_else() -> Result<()> {
    let server = Postgres::builder().hba("local all all trust\nhost all all 127.0.0.1/32 trust").start()?;
    let ini = Ini::for_server(&server).set("pool_mode", "transaction").set("server_idle_timeout", "0.2");
    let pooler = Underpass::start(&ini)?;
    let options = pooler.options("postgres", "postgres");
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(3) {
        let refused = Client::connect(&options.clone().parameter("replication", "true"));
        let told = refused.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(told.contains("28000"), "{told}");
        let mut client = Client::connect(&options)?;
        client.set_read_timeout(Duration::from_secs(5))?;
        client.query("select 1")?.ok()?;
        drop(client);
        thread::sleep(Duration::from_millis(500));
    }
    Ok(())
}

/// Its client leaves at the moment at which its own connection is ready: that goes too.
#[test]
fn the_connection_of_a_replication_client_goes_with_it() -> Result<()> {
    let mock =
        MockServer::start(|_| vec![Step::Delay(Duration::from_millis(500)), Step::Login, Step::WaitClose])?;
    let pooler = Underpass::start(&Ini::for_mock(&mock))?;
    let mut raw = TcpStream::connect(("127.0.0.1", pooler.port())).expect("connect");
    let parameters = [("user", "postgres"), ("database", "postgres"), ("replication", "database")];
    raw.write_all(Batch::new().startup(0x0003_0000, &parameters).as_bytes()).expect("startup");
    thread::sleep(Duration::from_millis(250));
    pooler.signal(Signal::SIGSTOP)?;
    thread::sleep(Duration::from_millis(500));
    // With a reset, so that what it is told cannot be written.
    rustix::net::sockopt::set_socket_linger(&raw, Some(Duration::ZERO)).expect("linger");
    drop(raw);
    pooler.signal(Signal::SIGCONT)?;
    mock.wait_finished(1)
}

/// Also when it goes from one client straight to the next.
#[test]
fn without_a_check_delay_a_server_is_checked_between_two_clients() -> Result<()> {
    let answer = || Step::Send(Reply::new().single_row("n", "1"));
    let mock = MockServer::start(move |_| {
        let mut steps = vec![Step::Login];
        for _ in 0..8 {
            // The second client queues while the first is served.
            steps.extend([Step::Expect(b'Q'), Step::Delay(Duration::from_millis(300)), answer()]);
        }
        steps
    })?;
    let ini = Ini::for_mock(&mock).set("server_check_delay", "0").set("server_check_query", "select 42");
    let pooler = Underpass::start(&ini)?;
    let options = pooler.options("postgres", "postgres");
    let (mut first, mut second) = (Client::connect(&options)?, Client::connect(&options)?);
    first.send(&Batch::new().query("select 'first'"))?;
    thread::sleep(Duration::from_millis(50));
    second.send(&Batch::new().query("select 'second'"))?;
    first.response()?.ok()?;
    second.response()?.ok()?;
    let asked = mock.queries();
    let asked: Vec<&str> = asked.iter().map(|query| query.trim_end_matches('\0')).collect();
    assert!(asked.ends_with(&["select 'first'", "select 42", "select 'second'"]), "{asked:?}");
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

/// Connections of the database `one` that log in.
fn logins(pooler: &Underpass) -> Result<u32> {
    let pools = pooler.console("SHOW POOLS")?.ok()?;
    let column = pools.column_names().iter().position(|name| name == "sv_login").expect("a column");
    let rows = pools.rows();
    let row = rows.iter().find(|row| row[0].as_deref() == Some("one"));
    Ok(row.and_then(|row| row[column].as_deref()).map_or(0, |value| value.parse().expect("a number")))
}

/// What waits for a name server is no connection that anybody waits for.
#[test]
fn what_closes_servers_does_not_wait_for_a_name() -> Result<()> {
    let mock = MockServer::serving()?;
    let pooler =
        Underpass::start(&with_silent_name("silent.test", &mock).set("server_connect_timeout", "600"))?;
    for (command, back, left) in [
        ("PAUSE", "RESUME", 0),
        ("PAUSE one", "RESUME one", 0),
        ("KILL one", "RESUME one", 0),
        // The client still waits, for another look-up.
        ("RECONNECT one", "RELOAD", 1),
    ] {
        let mut client = Client::open(&pooler.options("anybody", "one"))?;
        client.startup()?;
        let begun = Instant::now();
        while logins(&pooler)? == 0 {
            assert!(begun.elapsed() < Duration::from_secs(15), "nothing is asked for");
            thread::sleep(Duration::from_millis(10));
        }
        let begun = Instant::now();
        pooler.console(command)?.ok()?;
        pooler.console("WAIT_CLOSE")?.ok()?;
        while logins(&pooler)? != left {
            assert!(begun.elapsed() < Duration::from_secs(5), "{command}");
            thread::sleep(Duration::from_millis(10));
        }
        assert!(begun.elapsed() < Duration::from_secs(5), "{command}: {:?}", begun.elapsed());
        pooler.console(back)?.ok()?;
    }
    Ok(())
}
