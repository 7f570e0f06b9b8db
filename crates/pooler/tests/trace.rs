// SPDX-License-Identifier: Apache-2.0
//! Recording by the pooler: what clients said and were answered is what the trace holds, whatever happens to either.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use underpass_testkit::{
    AuthMethod, Authority, Batch, Client, Ini, Options, Pooler, Postgres, Result, SmallDisk, Tls, Underpass,
    service_user,
};
use underpass_trace::{
    Direction, Frontend, LossReason, Outcome, PreparedFill, Reader, Record, ServerIdentity, SessionEnd,
    SessionId, SessionStart, Transport,
};

/// Longest wait for anything, on a loaded machine.
const LIMIT: Duration = Duration::from_secs(60);

/// Lines of `[underpass]`. The process's working directory is its own.
fn recorded(server: &Postgres, lines: &str) -> Ini {
    let section = format!("[underpass]\nkernel_path = off\ntrace_dir = .\n{lines}");
    Ini::for_server(server).set("pool_mode", "transaction").tail(&section)
}

fn eventually(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    while !holds()? {
        assert!(Instant::now() < deadline, "waited too long: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// A column of SHOW TRACE; `None` if nothing is recorded.
fn shown(pooler: &Underpass, column: &str) -> Result<Option<String>> {
    let answer = pooler.console("SHOW TRACE")?.ok()?;
    let index = answer.column_names().iter().position(|name| name == column).expect("a column");
    Ok(answer.rows().first().and_then(|row| row[index].clone()))
}

fn number(pooler: &Underpass, column: &str) -> Result<u64> {
    Ok(shown(pooler, column)?.and_then(|value| value.parse().ok()).unwrap_or(0))
}

/// Transactions that the lane has carried that `same_host` has.
fn carried(pooler: &Underpass, same_host: &str) -> Result<u64> {
    let rows = pooler.console("SHOW KERNEL")?.rows();
    let lane = if same_host == "off" { "D" } else { "A" };
    let row = rows.iter().find(|row| row[1].as_deref() == Some(lane) && row[2].as_deref() == Some("xacts"));
    Ok(row.and_then(|row| row[3].as_deref()?.parse().ok()).unwrap_or(0))
}

/// Sends what does not compress well until the recording has ended.
fn exhaust(pooler: &Underpass, client: &mut Client) -> Result<()> {
    let mut round = 0;
    eventually("the recording ends", || {
        for _ in 0..500 {
            round += 1;
            let part = |i: u32| format!("{:x}", round * 7_919_u64.pow(i % 4) + u64::from(i) * 104_729);
            let text: String = (0..50).map(part).collect();
            client.query(&format!("select '{text}'"))?.ok()?;
        }
        Ok(shown(pooler, "state")?.as_deref() == Some("ended"))
    })
}

/// Directories of recordings, the oldest first.
fn recordings(parent: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(parent)
        .expect("the pooler's directory")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.join("000001.upt").exists())
        .collect();
    found.sort();
    found
}

struct Trace(Vec<Record<'static>>);

impl Trace {
    fn read(directory: &Path) -> Self {
        let (trace, is_whole) = Self::so_far(directory);
        assert!(is_whole);
        trace
    }

    /// Also of a recording at work; whether the trace has ended in good order.
    fn so_far(directory: &Path) -> (Self, bool) {
        let mut reader = Reader::open(directory).expect("a trace");
        let mut records = Vec::new();
        while let Some(record) = reader.next().expect("a record") {
            records.push(record.into_owned());
        }
        let is_whole = reader.damage().none();
        (Self(records), is_whole)
    }

    /// Ends the pooler, and reads what it has recorded.
    fn of(pooler: &mut Underpass) -> Result<Self> {
        pooler.stop()?;
        let all = recordings(pooler.directory());
        assert_eq!(all.len(), 1, "{}", pooler.log());
        Ok(Self::read(&all[0]))
    }

    fn starts(&self) -> impl Iterator<Item = &SessionStart<'static>> {
        self.0.iter().filter_map(|record| match record {
            Record::SessionStart(start) => Some(start),
            _ => None,
        })
    }

    fn only(&self) -> &SessionStart<'static> {
        let starts: Vec<_> = self.starts().collect();
        assert_eq!(starts.len(), 1, "{starts:?}");
        starts[0]
    }

    fn messages(&self, session: SessionId) -> impl Iterator<Item = &Frontend<'static>> {
        self.0.iter().filter_map(move |record| match record {
            Record::Frontend(message) if message.session == session => Some(message),
            _ => None,
        })
    }

    fn sent(&self, session: SessionId) -> Vec<u8> {
        self.messages(session).flat_map(|message| message.message.to_vec()).collect()
    }

    fn outcomes(&self, session: SessionId) -> Vec<(String, u64)> {
        let told = |outcome: &Outcome<'_>| match outcome {
            Outcome::Complete { tag } => String::from_utf8_lossy(tag).into_owned(),
            Outcome::Error(error) => String::from_utf8_lossy(&error.sqlstate).into_owned(),
            other => format!("{other:?}"),
        };
        let of = |record: &Record<'_>| match record {
            Record::Response(response) if response.session == session => {
                Some((told(&response.outcome), response.rows))
            }
            _ => None,
        };
        self.0.iter().filter_map(of).collect()
    }

    fn end(&self, session: SessionId) -> SessionEnd {
        let found = self.0.iter().find_map(|record| match record {
            Record::SessionEnd(end) if end.session == session => Some(*end),
            _ => None,
        });
        found.expect("an end")
    }

    fn servers(&self) -> impl Iterator<Item = &ServerIdentity<'static>> {
        self.0.iter().filter_map(|record| match record {
            Record::Server(server) => Some(server),
            _ => None,
        })
    }

    fn prepared(&self) -> impl Iterator<Item = &PreparedFill<'static>> {
        self.0.iter().filter_map(|record| match record {
            Record::PreparedFill(fill) => Some(fill),
            _ => None,
        })
    }
}

/// A bit of everything; returns all bytes that were sent after the login.
fn work(options: &Options) -> Result<Vec<u8>> {
    let long = "x".repeat(200_000);
    let batches = [
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
        (Batch::new().query("begin").query("select 1").query("commit"), 3),
        (Batch::new().extended("select $1", &[Some(&long)]).sync(), 1),
        (Batch::new().query("select repeat('y', 1000) from generate_series(1, 3000)"), 1),
    ];
    let mut client = Client::connect(options)?;
    let mut sent = Vec::new();
    for (batch, answers) in batches {
        client.send(&batch)?;
        sent.extend_from_slice(batch.as_bytes());
        for _ in 0..answers {
            client.response()?;
        }
    }
    client.terminate()?;
    sent.extend_from_slice(Batch::new().terminate().as_bytes());
    Ok(sent)
}

const OUTCOMES: [(&str, u64); 11] = [
    ("SELECT 1", 1),
    ("SELECT 1", 1),
    ("22012", 0),
    ("Empty", 0),
    ("SELECT 1", 1),
    ("SELECT 1", 1),
    ("BEGIN", 0),
    ("SELECT 1", 1),
    ("COMMIT", 0),
    ("SELECT 1", 1),
    ("SELECT 3000", 3000),
];

#[test]
fn every_byte_is_recorded_whatever_the_transport() -> Result<()> {
    let server = Postgres::start()?;
    let authority = Authority::new("test")?;
    let directory = server.socket_dir();
    let (certificate, key) = authority.server(&["127.0.0.1"])?.write(directory, "pooler")?;
    for (level, transport) in [
        ("summary", Transport::Tcp),
        ("full", Transport::Tcp),
        ("none", Transport::Unix),
        ("summary", Transport::Tls),
    ] {
        let ini = recorded(&server, &format!("trace_level = {level}"))
            .set("client_tls_sslmode", "allow")
            .set("client_tls_cert_file", &certificate.display().to_string())
            .set("client_tls_key_file", &key.display().to_string());
        let mut pooler = Underpass::start(&ini)?;
        let options = pooler.options("postgres", "postgres").parameter("application_name", "worker");
        let sent = work(&match transport {
            Transport::Unix => options.unix(pooler.directory()),
            Transport::Tls => options.tls(Tls::new(&authority, None)?),
            _ => options,
        })?;
        let trace = Trace::of(&mut pooler)?;
        let start = trace.only();
        assert_eq!((start.transport, start.midstream), (transport, false));
        assert_eq!(start.peer.is_some(), transport != Transport::Unix);
        assert_eq!(start.user.as_deref(), Some(&b"postgres"[..]));
        assert_eq!(start.database.as_deref(), Some(&b"postgres"[..]));
        assert_eq!(start.application_name.as_deref(), Some(&b"worker"[..]));
        assert!(trace.sent(start.session) == sent, "{level}: other bytes");
        if level != "none" {
            let outcomes = trace.outcomes(start.session);
            assert_eq!(outcomes, OUTCOMES.map(|(tag, rows)| (tag.to_owned(), rows)), "{level}");
        }
        let end = trace.end(start.session);
        for totals in [end.frontend, end.backend] {
            assert!(totals.add_up() && totals.audited.is_some() && totals.lost == 0, "{end:?}");
        }
    }
    Ok(())
}

#[test]
fn values_are_masked_by_a_key_of_ones_own_or_nobodys() -> Result<()> {
    const VALUE: &str = "a value that nobody may know";
    let server = Postgres::start()?;
    let key = server.socket_dir().join("mask.key");
    fs::write(&key, "thirty-two bytes, or rather more than that").expect("a key");
    let by_key = format!("trace_mask_key = {}", key.display());
    let mut masked = Vec::new();
    for lines in ["trace_mask = 1", &by_key, &by_key] {
        let mut pooler = Underpass::start(&recorded(&server, lines))?;
        let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
        let shown = client.query(&format!("select '{VALUE}'"))?.ok()?;
        assert_eq!(shown.value(), Some(VALUE), "its own client sees it");
        let bound = Batch::new().parse("", "select $1::text").bind("", "", &[Some(VALUE)]);
        client.exchange(&bound.execute("", 0).sync())?;
        client.terminate()?;
        let trace = Trace::of(&mut pooler)?;
        let sent = trace.sent(trace.only().session);
        let text = String::from_utf8_lossy(&sent);
        assert!(text.contains("select '") && !text.contains(VALUE), "{text}");
        masked.push(sent);
    }
    assert!(masked[0] != masked[1] && masked[1] == masked[2]);
    // A key that is none: nothing is recorded, and that is said.
    fs::write(&key, "short").expect("a key");
    let pooler = Underpass::start(&recorded(&server, &by_key))?;
    assert!(shown(&pooler, "directory")?.is_none() && recordings(pooler.directory()).is_empty());
    assert!(pooler.log().contains("a key of 5 bytes can be guessed"), "{}", pooler.log());
    Ok(())
}

#[test]
fn passwords_and_the_console_are_not_in_the_trace() -> Result<()> {
    const SECRET: &str = "a-secret-that-nobody-else-has";
    let server = Postgres::builder().auth(AuthMethod::Trust).start()?;
    for auth in ["plain", "md5", "scram-sha-256"] {
        let ini = recorded(&server, "trace_level = full").set("auth_type", auth).userlist("postgres", SECRET);
        let mut pooler = Underpass::start(&ini)?;
        let mut client = Client::connect(&pooler.options("postgres", "postgres").password(SECRET))?;
        client.query(&format!("create role r_{} password '{SECRET}'", auth.replace('-', "_")))?.ok()?;
        client.terminate()?;
        let refused = Client::connect(&pooler.options("postgres", "postgres").password("no"));
        assert!(refused.is_err(), "{auth}");
        pooler.console("SHOW VERSION")?.ok()?;
        let trace = Trace::of(&mut pooler)?;
        for start in trace.starts() {
            assert_eq!(start.database.as_deref(), Some(&b"postgres"[..]), "not the console");
        }
        let sent: Vec<u8> = trace.starts().flat_map(|start| trace.sent(start.session)).collect();
        let text = String::from_utf8_lossy(&sent);
        assert!(text.contains("create role r_") && !text.contains(SECRET), "{auth}: {text}");
        assert!(!trace.0.iter().any(|record| matches!(record, Record::Frontend(m) if m.message[0] == b'p')));
    }
    Ok(())
}

#[test]
fn a_reload_begins_and_ends_a_recording_among_sessions() -> Result<()> {
    let server = Postgres::start()?;
    let off = || Ini::for_server(&server).set("pool_mode", "transaction");
    let mut pooler = Underpass::start(&off().tail("[underpass]\nkernel_path = off"))?;
    let mut old =
        Client::connect(&pooler.options("postgres", "postgres").parameter("application_name", "old"))?;
    let prepare = Batch::new().parse("s", "select 40 + $1::int").sync();
    old.exchange(&prepare)?;
    assert_eq!(shown(&pooler, "state")?, None);

    pooler.rewrite(&recorded(&server, ""))?;
    pooler.console("RELOAD")?.ok()?;
    assert_eq!(shown(&pooler, "state")?.as_deref(), Some("on"), "{}", pooler.log());
    let used = Batch::new().bind("", "s", &[Some("2")]).execute("", 0).sync();
    // Workers learn of the recording one by one.
    eventually("the session is in the trace", || {
        old.exchange(&used)?;
        Ok(number(&pooler, "sessions")? == 1)
    })?;
    drop(Client::connect(&pooler.options("postgres", "postgres"))?);

    pooler.rewrite(&off().tail("[underpass]\nkernel_path = off"))?;
    pooler.console("RELOAD")?.ok()?;
    assert_eq!(shown(&pooler, "state")?, None);
    assert_eq!(old.query("select 7")?.ok()?.value(), Some("7"), "clients are not disturbed");

    let trace = Trace::of(&mut pooler)?;
    let start = trace.starts().find(|start| start.midstream).expect("a session that was joined");
    assert_eq!(start.application_name.as_deref(), Some(&b"old"[..]));
    assert_eq!(start.user.as_deref(), Some(&b"postgres"[..]));
    let statement = trace.prepared().find(|fill| fill.session == start.session).expect("its statement");
    assert_eq!((&statement.name[..], &statement.query[..]), (&b"s"[..], &b"select 40 + $1::int"[..]));
    let sent = trace.sent(start.session);
    assert!(!sent.is_empty() && sent.chunks(used.as_bytes().len()).all(|batch| batch == used.as_bytes()));
    assert_eq!(trace.starts().count(), 2);
    Ok(())
}

#[test]
fn sessions_that_are_joined_have_their_transport_and_their_names() -> Result<()> {
    const SECRET: &str = "a-secret-that-nobody-else-has";
    let server = Postgres::builder().auth(AuthMethod::Trust).start()?;
    server.sql("create role joe login")?;
    let authority = Authority::new("test")?;
    let (certificate, key) = authority.server(&["127.0.0.1"])?.write(server.socket_dir(), "pooler")?;
    let base = |section: &str| {
        let ini = Ini::for_server(&server).set("pool_mode", "transaction").set("auth_type", "plain");
        ini.userlist("joe", SECRET)
            .set("client_tls_sslmode", "allow")
            .set("client_tls_cert_file", &certificate.display().to_string())
            .set("client_tls_key_file", &key.display().to_string())
            .tail(&format!("[underpass]\nkernel_path = off\n{section}"))
    };
    let mut pooler = Underpass::start(&base(""))?;
    let options = || pooler.options("joe", "postgres").password(SECRET);
    let mut encrypted = Client::connect(&options().tls(Tls::new(&authority, None)?))?;
    // One that has been asked for its password.
    let mut comes = Client::open(&options())?;
    comes.startup()?;
    assert_eq!(comes.recv()?.tag, b'R');
    pooler.rewrite(&base("trace_dir = ."))?;
    pooler.console("RELOAD")?.ok()?;
    comes.send(&Batch::new().message(b'p', format!("{SECRET}\0").as_bytes()))?;
    assert_eq!(comes.recv()?.body, [0; 4]);
    comes.finish_login()?;
    eventually("both are in the trace", || {
        encrypted.query("select 1")?.ok()?;
        comes.query("select 2")?.ok()?;
        Ok(number(&pooler, "sessions")? == 2)
    })?;
    let trace = Trace::of(&mut pooler)?;
    let mut found = Vec::new();
    for start in trace.starts() {
        assert_eq!(start.user.as_deref(), Some(&b"joe"[..]));
        assert_eq!(start.database.as_deref(), Some(&b"postgres"[..]));
        assert!(!String::from_utf8_lossy(&trace.sent(start.session)).contains(SECRET));
        found.push(start.transport);
    }
    assert!(found.contains(&Transport::Tls) && found.contains(&Transport::Tcp), "{found:?}");
    Ok(())
}

#[test]
fn what_joined_sessions_have_prepared_takes_no_more_than_the_queue_may() -> Result<()> {
    const LEN: usize = 50_000;
    let server = Postgres::start()?;
    let base = |section: &str| {
        let ini = Ini::for_server(&server).set("pool_mode", "transaction");
        ini.tail(&format!("[underpass]\nkernel_path = off\ntrace_queue_bytes = 32768\n{section}"))
    };
    let mut pooler = Underpass::start(&base(""))?;
    let text = |i: usize| format!("select {i} /* {} */", "x".repeat(LEN));
    // Texts that are shared with the client, and one that the client alone has.
    let mut shared = Client::connect(&pooler.options("postgres", "postgres"))?;
    for i in 0..20 {
        shared.exchange(&Batch::new().parse(&format!("s{i}"), &text(i)).sync())?;
    }
    let mut alone = Client::connect(&pooler.options("postgres", "postgres"))?;
    alone.exchange(&Batch::new().parse("", &text(20)).sync())?;
    pooler.rewrite(&base("trace_dir = ."))?;
    pooler.console("RELOAD")?.ok()?;
    eventually("one finds no room", || Ok(number(&pooler, "missed")? == 1))?;
    eventually("the other is in the trace", || {
        alone.query("select 1")?.ok()?;
        shared.query("select 1")?.ok()?;
        Ok(number(&pooler, "sessions")? == 1)
    })?;
    eventually("nothing is held", || Ok(number(&pooler, "queued_bytes")? < 1024))?;
    let trace = Trace::of(&mut pooler)?;
    let mut lengths: Vec<_> =
        trace.prepared().map(|fill| (fill.name.len(), fill.query.len() > LEN)).collect();
    lengths.sort_unstable();
    lengths.dedup();
    assert_eq!((trace.prepared().count(), lengths), (20, vec![(2, true), (3, true)]));
    Ok(())
}

#[test]
fn the_server_of_each_database_is_asked_once() -> Result<()> {
    let server = Postgres::start()?;
    let at_server = |extra: &str| format!("host=127.0.0.1 port={} dbname=postgres {extra}", server.port());
    let off = || {
        Ini::for_server(&server)
            .set("pool_mode", "session")
            .database("shop", &at_server("pool_size=1"))
            .database("old", &at_server(""))
    };
    let mut pooler = Underpass::start(&off().tail("[underpass]\nkernel_path = off"))?;
    // A session that is there already, and holds its server.
    let mut old = Client::connect(&pooler.options("postgres", "old"))?;
    old.query("select 1")?.ok()?;
    pooler.rewrite(&off().tail("[underpass]\nkernel_path = off\ntrace_dir = ."))?;
    pooler.console("RELOAD")?.ok()?;
    for _ in 0..3 {
        let mut client = Client::connect(&pooler.options("postgres", "shop"))?;
        assert_eq!(client.query("select 7")?.ok()?.value(), Some("7"), "the only server of the pool is free");
        client.terminate()?;
    }
    pooler.console("RELOAD")?.ok()?;
    eventually("both are in the trace", || {
        Ok(Trace::so_far(&recordings(pooler.directory())[0]).0.servers().count() == 2)
    })?;
    drop(old);
    let identifier = server.sql_value("select system_identifier from pg_control_system()")?;
    let version = server.sql_value("show server_version")?;
    let trace = Trace::of(&mut pooler)?;
    let mut found: Vec<_> = trace.servers().collect();
    found.sort_by_key(|server| server.database.clone());
    let names: Vec<_> = found.iter().map(|server| String::from_utf8_lossy(&server.database)).collect();
    assert_eq!(names, ["old", "shop"], "{}", pooler.log());
    for one in found {
        assert_eq!(one.address, format!("127.0.0.1:{}", server.port()).as_bytes());
        assert_eq!(one.version, version.as_bytes());
        assert_eq!(one.system_identifier.as_deref(), Some(identifier.as_bytes()));
    }
    Ok(())
}

#[test]
fn what_the_queue_has_no_room_for_is_a_gap_of_exactly_that() -> Result<()> {
    let server = Postgres::start()?;
    // A worker reads 64 KiB at a time at most: such a chunk finds no room, and a small one does.
    let mut pooler = Underpass::start(&recorded(&server, "trace_queue_bytes = 32768\nthreads = 1"))?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    let small = Batch::new().query("select 1");
    let large = Batch::new().query(&format!("select length('{}')", "x".repeat(1 << 20)));
    // The queue empties in between.
    let settled =
        |pooler: &Underpass| eventually("an empty queue", || Ok(number(pooler, "queued_bytes")? < 1024));
    settled(&pooler)?;
    client.exchange(&small)?;
    settled(&pooler)?;
    client.exchange(&large)?;
    settled(&pooler)?;
    for _ in 0..3 {
        client.exchange(&small)?;
        settled(&pooler)?;
    }
    let lost = number(&pooler, "lost_bytes")?;
    assert!(lost > 0 && lost <= large.as_bytes().len() as u64);
    client.terminate()?;
    let trace = Trace::of(&mut pooler)?;
    let session = trace.only().session;
    let end = trace.end(session);
    assert!(end.frontend.add_up() && end.backend.add_up(), "{end:?}");
    let queue: u64 = trace
        .0
        .iter()
        .filter_map(|record| match record {
            Record::Loss(loss) if loss.reason == LossReason::WriterQueue => {
                assert_eq!((loss.session, loss.direction), (Some(session), Direction::Frontend));
                Some(loss.len)
            }
            _ => None,
        })
        .sum();
    assert_eq!(queue, lost, "the gaps are what was counted");
    assert!(end.frontend.lost >= lost);
    let queries: Vec<_> = trace.messages(session).filter(|message| message.message[0] == b'Q').collect();
    assert_eq!(queries.len(), 4, "what came behind the gap is recorded again");
    Ok(())
}

#[test]
fn a_cancel_request_is_recorded_with_the_session_that_it_is_for() -> Result<()> {
    let server = Postgres::start()?;
    let mut pooler = Underpass::start(&recorded(&server, ""))?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    client.send(&Batch::new().query("select pg_sleep(600)"))?;
    eventually("the statement runs", || {
        let sql = "select count(*) from pg_stat_activity where wait_event = 'PgSleep'";
        Ok(server.sql_value(sql)? == "1")
    })?;
    client.cancel()?;
    assert!(client.response()?.ok().is_err());
    client.terminate()?;
    let trace = Trace::of(&mut pooler)?;
    let session = trace.only().session;
    let cancels: Vec<_> = trace.0.iter().filter(|record| matches!(record, Record::Cancel(_))).collect();
    assert!(
        matches!(cancels[..], [Record::Cancel(cancel)] if cancel.session == Some(session)),
        "{cancels:?}"
    );
    Ok(())
}

#[test]
fn a_recording_that_cannot_go_on_does_not_disturb_clients() -> Result<()> {
    let server = Postgres::start()?;
    let mut pooler = Underpass::start(&recorded(&server, "trace_max_bytes = 524288"))?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    exhaust(&pooler, &mut client)?;
    assert_eq!(shown(&pooler, "reason")?.as_deref(), Some("the size limit is reached"));
    assert!(pooler.log().contains("has ended: the size limit is reached"), "{}", pooler.log());
    assert_eq!(client.query("select 1")?.ok()?.value(), Some("1"));
    drop(Client::connect(&pooler.options("postgres", "postgres"))?);

    // It has all that it was to have: what the configuration says anew is no wish for another one, unless it is said of the place.
    pooler.console("RELOAD")?.ok()?;
    pooler.console("SET log_pooler_errors = 0")?.ok()?;
    assert_eq!(shown(&pooler, "state")?.as_deref(), Some("ended"));
    pooler.console(r#"SET "underpass.trace_dir" = '.'"#)?.ok()?;
    assert_eq!(shown(&pooler, "state")?.as_deref(), Some("on"));

    // A place that is none: said, and nothing else.
    pooler.console(r#"SET "underpass.trace_dir" = '/nowhere/at/all'"#)?.ok()?;
    assert!(pooler.log().contains("/nowhere/at/all: no such directory"), "{}", pooler.log());
    assert_eq!((client.query("select 1")?.ok()?.value(), shown(&pooler, "state")?), (Some("1"), None));
    pooler.console(r#"SET "underpass.trace_dir" = '.'"#)?.ok()?;
    assert_eq!(shown(&pooler, "state")?.as_deref(), Some("on"));
    let trace = Trace::read(&recordings(pooler.directory())[0]);
    assert!(trace.messages(trace.only().session).count() > 10, "what came before the limit is there");
    pooler.stop()
}

#[test]
fn a_recording_that_has_failed_begins_anew_with_reload() -> Result<()> {
    let server = Postgres::start()?;
    let Some(disk) = SmallDisk::mount(2048, service_user().map_or(0, |user| user.uid.as_raw()))? else {
        return Ok(());
    };
    let ini = recorded(&server, "").tail(&format!("trace_dir = {}", disk.path().display()));
    let mut pooler = Underpass::start(&ini)?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    exhaust(&pooler, &mut client)?;
    assert_eq!(shown(&pooler, "reason")?.as_deref(), Some("no space left on the device"));
    let (seen, queued) = (number(&pooler, "seen_bytes")?, number(&pooler, "queued_bytes")?);
    client.query("select 1")?.ok()?;
    assert_eq!(number(&pooler, "seen_bytes")?, seen, "nobody looks any more");
    assert!(queued < 1024, "{queued} bytes are held for nobody");
    fs::remove_dir_all(&recordings(disk.path())[0]).expect("its removal");
    pooler.console("SET log_pooler_errors = 0")?.ok()?;
    assert_eq!(shown(&pooler, "state")?.as_deref(), Some("ended"));
    pooler.console("RELOAD")?.ok()?;
    assert_eq!(shown(&pooler, "state")?.as_deref(), Some("on"), "{}", pooler.log());
    client.query("select 1")?.ok()?;
    pooler.stop()
}

#[test]
fn a_recording_that_ends_by_itself_lets_clients_into_their_lanes() -> Result<()> {
    let server = Postgres::start()?;
    let base = Ini::for_server(&server).set("pool_mode", "transaction");
    let Some(ini) = base.lanes("off", 1) else { return Ok(()) };
    let mut pooler = Underpass::start(&ini.tail("trace_dir = .\ntrace_max_bytes = 524288"))?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    exhaust(&pooler, &mut client)?;
    eventually("the client is in its lane", || {
        let before = carried(&pooler, "off")?;
        for _ in 0..100 {
            client.query("select 1")?.ok()?;
        }
        Ok(carried(&pooler, "off")? - before > 50)
    })?;
    pooler.stop()
}

#[test]
fn the_accounts_of_a_trace_are_of_what_is_in_it() -> Result<()> {
    let server = Postgres::start()?;
    let mut pooler = Underpass::start(&recorded(&server, ""))?;
    // None of it is of a session: the console, and one that says nothing that could be understood.
    for _ in 0..10 {
        pooler.console("SHOW VERSION")?.ok()?;
    }
    let filtered = number(&pooler, "seen_bytes")?;
    let sent = work(&pooler.options("postgres", "postgres"))?;
    let seen = number(&pooler, "seen_bytes")?;
    let trace = Trace::of(&mut pooler)?;
    let counters = trace.0.iter().rev().find_map(|record| match record {
        Record::Counters(counters) => Some(*counters),
        _ => None,
    });
    let counters = counters.expect("accounts");
    assert_eq!(counters.seen.bytes, counters.recorded.bytes + counters.filtered.bytes, "{counters:?}");
    assert_eq!(counters.seen.events, counters.recorded.events + counters.filtered.events, "{counters:?}");
    let end = trace.end(trace.only().session);
    assert_eq!(counters.recorded.bytes, end.frontend.seen + end.backend.seen, "{counters:?} {end:?}");
    assert!(counters.filtered.bytes > filtered / 2 && counters.seen.bytes >= seen, "{counters:?}");
    assert!(counters.recorded.bytes > sent.len() as u64);
    Ok(())
}

#[test]
fn recorded_clients_leave_the_kernel_lanes_and_return() -> Result<()> {
    for same_host in ["off", "server"] {
        let server = Postgres::start()?;
        let base = Ini::for_server(&server).set("pool_mode", "transaction");
        let Some(ini) = base.lanes(same_host, 1) else { return Ok(()) };
        let mut pooler = Underpass::start(&ini)?;
        let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
        let mut rounds = |pooler: &Underpass, count: u32| -> Result<u64> {
            let before = carried(pooler, same_host)?;
            for round in 0..count {
                assert_eq!(
                    client.query(&format!("select {round}"))?.ok()?.value(),
                    Some(&*round.to_string())
                );
            }
            Ok(carried(pooler, same_host)? - before)
        };
        assert!(rounds(&pooler, 100)? > 50, "in its lane");
        pooler.console(r#"SET "underpass.trace_dir" = '.'"#)?.ok()?;
        assert_eq!(shown(&pooler, "state")?.as_deref(), Some("on"), "{}", pooler.log());
        eventually("the client is in user space", || Ok(rounds(&pooler, 10)? == 0))?;
        assert_eq!(rounds(&pooler, 100)?, 0, "recorded clients are");
        pooler.console(r#"SET "underpass.trace_dir" = ''"#)?.ok()?;
        eventually("the client is in its lane again", || Ok(rounds(&pooler, 100)? > 50))?;
        pooler.stop()?;
        let traces = recordings(pooler.directory());
        let trace = Trace::read(&traces[0]);
        let start = trace.only();
        let queries = trace.messages(start.session).count();
        assert!(start.midstream && queries >= 100, "{queries} queries");
    }
    Ok(())
}
