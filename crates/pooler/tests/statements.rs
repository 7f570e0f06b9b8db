// SPDX-License-Identifier: Apache-2.0
//! What goes wrong with prepared statements, said to PostgreSQL directly and through the pooler: a client hears the same, with its own names,
//! and finds its transaction in the same state.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use underpass_testkit::{Batch, Client, Ini, Pooler, Port, Postgres, Result, Underpass};

/// Types and bodies of what is answered; of errors only what users read.
fn said(client: &mut Client, batch: &Batch) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for response in client.exchange(batch)? {
        for message in response.messages {
            all.push(match message.error() {
                Some(error) => format!("{error}"),
                None => format!("{}{:?}", message.tag as char, message.strings()),
            });
        }
    }
    Ok(all)
}

/// Batches for one session, one after the other.
fn scenes() -> Vec<(&'static str, Batch)> {
    let batch = Batch::new;
    let run = |name: &str| batch().bind("", name, &[Some("1")]).execute("", 0).sync();
    let one = "select $1::int";
    vec![
        ("prepares", batch().parse("plan", one).parse("s", one).parse("twin", one).sync()),
        ("same name, same text", batch().parse("plan", one).sync()),
        ("same name, other text", batch().parse("plan", "select 2").sync()),
        ("a short name", batch().parse("s", "select 2").sync()),
        ("a text as another name's", batch().parse("twin", one).sync()),
        ("a text that does not parse", batch().parse("plan", "selec").sync()),
        ("the first is the one that stays", run("plan")),
        ("the unnamed one may be prepared again", batch().parse("", one).parse("", one).sync()),
        (
            "what is behind it is discarded up to the Sync",
            batch()
                .parse("new", one)
                .parse("plan", "select 2")
                .parse("lost", one)
                .bind("", "plan", &[Some("1")])
                .execute("", 0)
                .sync()
                .bind("", "new", &[Some("1")])
                .execute("", 0)
                .sync(),
        ),
        ("such as this", run("lost")),
        ("twice in one batch", batch().parse("two", one).parse("two", one).sync().parse("two", one).sync()),
        (
            "closed and prepared again",
            batch().close_statement("plan").parse("plan", "select $1::text").sync(),
        ),
        ("and once more", batch().parse("plan", one).sync()),
        ("begin", batch().query("begin")),
        ("in a transaction", batch().parse("plan", one).sync()),
        ("which has failed", batch().parse("plan", one).sync()),
        ("also for others", batch().parse("late", one).sync()),
        ("rollback", batch().query("rollback")),
        ("does not exist", batch().bind("", "nobody", &[]).sync()),
        (
            "looks like one of the pooler's",
            batch().bind("", "~00", &[]).sync().describe_statement("~").sync(),
        ),
        ("is closed without being there", batch().close_statement("nobody").close_statement("~000").sync()),
        ("described without being there", batch().describe_statement("nobody").sync()),
        ("too many values", batch().bind("", "plan", &[Some("1"), Some("2")]).sync()),
        ("too few", batch().bind("", "s", &[]).sync()),
        ("and it is there", run("plan")),
        ("forgotten", batch().query("deallocate all")),
        ("and gone", run("plan")),
    ]
}

/// `ini` may change what pooling does to statements. Servers without names of their own are found under those of clients, so one session it is.
fn compare(server: &Postgres, ini: &Ini) -> Result<()> {
    let pooler = Underpass::start(ini)?;
    let mut direct = Client::connect(&server.superuser())?;
    let mut pooled = Client::connect(&pooler.options("postgres", "postgres"))?;
    for (scene, batch) in scenes() {
        let (expected, heard) = (said(&mut direct, &batch)?, said(&mut pooled, &batch)?);
        assert_eq!(heard, expected, "{scene}");
    }
    Ok(())
}

#[test]
fn errors_are_postgresqls_with_the_clients_names() -> Result<()> {
    let server = Postgres::start()?;
    let ini = Ini::for_server(&server).set("pool_mode", "transaction").set("default_pool_size", "1");
    compare(&server, &ini)?;
    // Eviction and preparing again between and within the batches.
    compare(&server, &ini.clone().set("max_prepared_statements", "1"))?;
    compare(&server, &ini.set("max_prepared_statements", "0"))?;
    compare(&server, &Ini::for_server(&server).set("pool_mode", "session"))
}

/// A server that has lost what the pooler prepared on it, in a way that no CommandComplete tells.
#[test]
fn a_statement_that_the_server_lost_has_the_clients_name() -> Result<()> {
    let server = Postgres::start()?;
    let pooler = Underpass::start(
        &Ini::for_server(&server).set("pool_mode", "transaction").set("default_pool_size", "1"),
    )?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    said(&mut client, &Batch::new().parse("plan", "select 1").sync())?;
    client.query("do $$ begin execute 'deallocate all'; end $$")?.ok()?;
    let heard = said(&mut client, &Batch::new().bind("", "plan", &[]).sync())?;
    assert_eq!(heard[0], "ERROR 26000: prepared statement \"plan\" does not exist");
    Ok(())
}

/// Who does not ask again goes on as it would with a server of its own: the next Bind finds the statement, and a name that is taken does not
/// get another text on a server that has lost it.
#[test]
fn a_statement_that_the_server_lost_is_lost_once() -> Result<()> {
    let server = Postgres::start()?;
    let pooler = Underpass::start(
        &Ini::for_server(&server).set("pool_mode", "transaction").set("default_pool_size", "1"),
    )?;
    let options = pooler.options("postgres", "postgres");
    let (mut one, mut other) = (Client::connect(&options)?, Client::connect(&options)?);
    let run = Batch::new().bind("", "plan", &[]).execute("", 0).sync();
    let prepare = Batch::new().parse("plan", "select 1").sync();
    said(&mut one, &prepare)?;
    said(&mut other, &prepare)?;
    let expected = said(&mut one, &run)?;
    let lose = "do $$ begin execute 'deallocate all'; end $$";
    one.query(lose)?.ok()?;
    let heard = said(&mut other, &run)?;
    assert_eq!(heard[0], "ERROR 26000: prepared statement \"plan\" does not exist");
    assert_eq!(said(&mut other, &run)?, expected);
    assert_eq!(said(&mut one, &run)?, expected);

    one.query(lose)?.ok()?;
    let heard = said(&mut one, &Batch::new().parse("plan", "select 2").sync())?;
    assert_eq!(heard[0], "ERROR 42P05: prepared statement \"plan\" already exists");
    assert_eq!(said(&mut one, &run)?, expected);
    assert_eq!(said(&mut other, &run)?, expected);
    Ok(())
}

/// A session of bytes that has prepared "s", and the messages that close it and prepare it again, which need no server.
fn session_of_pairs(pooler: &Underpass) -> std::io::Result<(TcpStream, Vec<u8>)> {
    let mut raw = TcpStream::connect(("127.0.0.1", pooler.port()))?;
    raw.set_read_timeout(Some(Duration::from_secs(20)))?;
    let startup = Batch::new().startup(0x0003_0000, &[("user", "postgres"), ("database", "postgres")]);
    raw.write_all(startup.as_bytes())?;
    let ready = |raw: &mut TcpStream| -> std::io::Result<()> {
        let (mut last, mut byte) = ([0; 6], [0]);
        while last != *READY {
            raw.read_exact(&mut byte)?;
            last.rotate_left(1);
            last[5] = byte[0];
        }
        Ok(())
    };
    ready(&mut raw)?;
    raw.write_all(Batch::new().parse("s", "select 1").sync().as_bytes())?;
    ready(&mut raw)?;
    Ok((raw, Batch::new().close_statement("s").parse("s", "select 1").as_bytes().to_vec()))
}

const READY: &[u8; 6] = b"Z\0\0\0\x05I";

/// What is answered up to ReadyForQuery.
fn read_to_ready(raw: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let (mut all, mut chunk) = (Vec::new(), vec![0; 65_536]);
    while !all.ends_with(READY) {
        let count = raw.read(&mut chunk)?;
        if count == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        all.extend_from_slice(&chunk[..count]);
    }
    Ok(all)
}

#[test]
fn a_client_that_takes_no_answers_is_not_read_for_ever() -> Result<()> {
    const ACCEPTED_MAX: usize = 48 << 20;
    let server = Postgres::start()?;
    let pooler = Underpass::start(&Ini::for_server(&server).set("pool_mode", "transaction"))?;
    let (mut raw, pair) = session_of_pairs(&pooler).expect("a session");
    raw.set_write_timeout(Some(Duration::from_secs(2))).expect("timeout");
    let (pairs, mut accepted) = (pair.repeat(4096), 0);
    while accepted < ACCEPTED_MAX {
        match raw.write(&pairs[accepted % pair.len()..]) {
            Ok(count) => accepted += count,
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
                break;
            }
        }
    }
    assert!(accepted < ACCEPTED_MAX, "no end of what the pooler takes");
    // As soon as the client reads, all is answered.
    let mut rest = pair[accepted % pair.len()..].to_vec();
    accepted += rest.len();
    rest.extend_from_slice(Batch::new().sync().as_bytes());
    let mut writer = raw.try_clone().expect("clone");
    writer.set_write_timeout(None).expect("timeout");
    let writer = std::thread::spawn(move || writer.write_all(&rest));
    let answers = read_to_ready(&mut raw).expect("answers");
    assert!(answers == [b"3\0\0\0\x041\0\0\0\x04".repeat(accepted / pair.len()), READY.to_vec()].concat());
    writer.join().expect("no panic").expect("written");
    Ok(())
}

/// PostgreSQL keeps the first answer until a Sync or Flush; those behind it are the pooler's.
#[test]
fn a_long_batch_of_made_up_answers_comes_to_its_sync() -> Result<()> {
    const PAIRS: usize = 40_000;
    let server = Postgres::start()?;
    let pooler = Underpass::start(&Ini::for_server(&server).set("pool_mode", "transaction"))?;
    let (mut raw, pair) = session_of_pairs(&pooler).expect("a session");
    let describe = Batch::new().describe_statement("s");
    let batch = [describe.as_bytes(), &pair.repeat(PAIRS), Batch::new().sync().as_bytes()].concat();
    let mut writer = raw.try_clone().expect("clone");
    let writer = std::thread::spawn(move || writer.write_all(&batch));
    let answers = read_to_ready(&mut raw).expect("answers");
    assert!(answers.ends_with(&[b"3\0\0\0\x041\0\0\0\x04".repeat(PAIRS), READY.to_vec()].concat()));
    writer.join().expect("no panic").expect("written");
    Ok(())
}

/// `statement_timeout` finds the server between the messages of a batch, at a Flush, and it goes on at the Sync.
#[test]
fn a_timeout_at_a_flush_is_not_the_end_of_the_server() -> Result<()> {
    let server = Postgres::start()?;
    let pooler = Underpass::start(
        &Ini::for_server(&server).set("pool_mode", "transaction").set("default_pool_size", "1"),
    )?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    let pid = "select pg_backend_pid()";
    client.query("begin; set local statement_timeout = 300")?.ok()?;
    let before = client.query(pid)?.ok()?.value().map(str::to_owned);
    client.send(&Batch::new().parse("", "select 1").flush())?;
    std::thread::sleep(Duration::from_millis(800));
    client.send(&Batch::new().flush())?;
    std::thread::sleep(Duration::from_millis(200));
    let response = &client.exchange(&Batch::new().bind("", "", &[]).execute("", 0).sync())?[0];
    let error = response.messages.iter().find_map(|message| message.error()).expect("timed out");
    assert_eq!(error.sqlstate, "57014");
    client.query("rollback")?.ok()?;
    assert_eq!(client.query(pid)?.ok()?.value().map(str::to_owned), before, "{}", pooler.log());
    Ok(())
}

/// The most memory that it ever had.
fn peak_kib(pooler: &Underpass) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", pooler.pid())).expect("the process runs");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("VmHWM");
    peak.trim().trim_end_matches("kB").trim().parse().expect("a number")
}

/// One error, a line in the log and a count for whoever says it, while another client's transactions go on on the one server that there is.
/// Without lanes: a socket that was in one is not reset when it is closed with input unread, and this client reads only when all is sent.
#[test]
fn names_and_texts_without_measure_end_their_own_client() -> Result<()> {
    const MIB: usize = 1 << 20;
    let server = Postgres::start()?;
    let metrics = Port::reserve()?;
    let pooler = Underpass::start(
        &Ini::for_server(&server).set("pool_mode", "transaction").set("default_pool_size", "1").tail(
            &format!("[underpass]\nkernel_path = off\nmetrics_listen = 127.0.0.1:{}", metrics.number()),
        ),
    )?;
    let options = pooler.options("postgres", "postgres");
    let mut witness = Client::connect(&options)?;
    let home = witness.query("select pg_backend_pid()")?.ok()?.value().map(str::to_owned);
    let long = "n".repeat(10 * MIB);
    let text = format!("select '{}'", "t".repeat(16 * MIB));
    let names = |message: &str| format!("FATAL 54000: names in a {message} message take more than 64 KiB");
    let length =
        |tag: char| format!("FATAL 08P01: invalid message length {} for type {tag:?}", long.len() + 6);
    let cases = [
        ("Parse, name", Batch::new().parse(&long, "select 1"), names("Parse")),
        ("Bind, statement", Batch::new().bind("", &long, &[]), names("Bind")),
        ("Bind, portal", Batch::new().bind(&long, "s", &[]), names("Bind")),
        // PostgreSQL itself takes 10,000 bytes of these.
        ("Close, statement", Batch::new().close_statement(&long), length('C')),
        ("Close, portal", Batch::new().close_portal(&long), length('C')),
        ("Describe, statement", Batch::new().describe_statement(&long), length('D')),
        (
            "Parse, text",
            Batch::new().parse("s", &text),
            format!(
                "FATAL 54000: prepared statement of {} bytes is over max_prepared_statement_bytes",
                // Type and length word, name and text with their ends, number of types.
                5 + 2 + text.len() + 1 + 2
            ),
        ),
    ];
    let before = peak_kib(&pooler);
    for (what, batch, expected) in &cases {
        for is_in_transaction in [false, true] {
            let mut client = Client::connect(&options)?;
            client.exchange(&Batch::new().parse("known", "select 1").sync())?.remove(0).ok()?;
            if is_in_transaction {
                client.query("begin")?.ok()?;
            }
            // The connection may be closed before all is sent.
            let _ = client.send(&Batch::new().raw(batch.as_bytes()).sync());
            let errors: Vec<_> =
                client.until_closed()?.iter().filter_map(|message| message.error()).collect();
            let heard: Vec<_> = errors.iter().map(ToString::to_string).collect();
            assert_eq!(heard, [expected.as_str()], "{what}");
            let pid = witness.query("select pg_backend_pid()")?.ok()?.value().map(str::to_owned);
            assert_eq!(pid, home, "{what}: the server is of use");
        }
        let reason = &expected["FATAL 54000: ".len()..];
        let lines = pooler.log().lines().filter(|line| line.contains(reason)).count();
        assert!(lines >= 2, "{what}: {reason}: {}", pooler.log());
    }
    // A named Parse is taken in whole, up to max_prepared_statement_bytes; of the others no more than a read.
    let grown = peak_kib(&pooler) - before;
    assert!(grown < 16 << 10, "{grown} KiB more for names of 10 MiB and a text of 16");

    let mut scrape = TcpStream::connect(("127.0.0.1", metrics.number())).expect("the metrics' port");
    scrape.write_all(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n").expect("asked");
    let mut page = String::new();
    scrape.read_to_string(&mut page).expect("a page");
    for (sqlstate, count) in [("54000", 8), ("08P01", 6)] {
        let line = format!("underpass_client_errors_total{{sqlstate=\"{sqlstate}\"}} {count}");
        assert!(page.lines().any(|have| have == line), "{line}: {page}");
    }
    Ok(())
}
