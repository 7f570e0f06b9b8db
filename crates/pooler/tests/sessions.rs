// SPDX-License-Identifier: Apache-2.0
//! What clients live through, with a real PostgreSQL behind the pooler: cancelled, vanished, broken, slow and patient ones.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use underpass_testkit::{
    Batch, Client, Ini, Message, MockServer, Pooler, Postgres, Reply, Result, Signal, Step, Underpass,
};

const PID: &str = "select pg_backend_pid()";

fn transaction(server: &Postgres) -> Ini {
    Ini::for_server(server).set("pool_mode", "transaction")
}

fn sqlstate<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => "no error".into(),
        Err(error) => error.sqlstate().map_or_else(|| error.to_string(), str::to_owned),
    }
}

fn pid(client: &mut Client) -> Result<String> {
    Ok(client.query(PID)?.ok()?.value().unwrap_or_default().to_owned())
}

fn eventually(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let begun = Instant::now();
    while !holds()? {
        assert!(begun.elapsed() < Duration::from_secs(15), "{what}");
        std::thread::sleep(Duration::from_millis(30));
    }
    Ok(())
}

/// With two bytes of a Query to come, the first two of a Terminate would complete it: PostgreSQL would execute what nobody said.
#[test]
fn nothing_is_said_behind_half_a_message() -> Result<()> {
    let server = Postgres::start()?;
    let pooler = Underpass::start(&transaction(&server).set("default_pool_size", "1"))?;
    let options = pooler.options("postgres", "postgres");
    let mut other = Client::connect(&options)?;
    other.query("create table said(n int)")?.ok()?;
    // Longer than what the pooler keeps until it is whole.
    let text = format!("insert into said values (1) -- {}", "long ".repeat(2000));
    let mut message = vec![b'Q'];
    message.extend((text.len() as u32 + 5).to_be_bytes());
    message.extend(text.as_bytes());
    for missing in [2, 300] {
        // In the middle of its life, not of its login: it has had a server before.
        let mut client = Client::connect(&options)?;
        let home = pid(&mut client)?;
        client.send_bytes(&message[..message.len() + 1 - missing])?;
        eventually("PostgreSQL has been sent the beginning", || {
            let servers = pooler.console("show servers")?.ok()?.rows();
            Ok(servers.iter().flatten().flatten().any(|cell| cell == "active"))
        })?;
        drop(client);
        eventually("the server goes with its client", || Ok(pid(&mut other)? != home))?;
    }
    eventually("both backends have ended", || {
        Ok(server.sql_value("select count(*) from pg_stat_activity where query like 'insert%'")? == "0")
    })?;
    assert_eq!(other.query("select count(*) from said")?.ok()?.value(), Some("0"));
    let log = server.log();
    assert!(!log.contains("invalid frontend message type"), "{log}");
    Ok(())
}

#[test]
fn cancel_reaches_the_running_statement_and_nothing_else() -> Result<()> {
    let server = Postgres::start()?;
    let pooler = Underpass::start(&transaction(&server).set("default_pool_size", "1"))?;
    let options = pooler.options("postgres", "postgres");
    let mut client = Client::connect(&options)?;
    let home = pid(&mut client)?;
    // Late: nothing runs any more, and the next statement is not hit.
    client.cancel()?;
    assert_eq!(client.query("select 1")?.ok()?.value(), Some("1"));
    // Running.
    client.send(&Batch::new().query("select pg_sleep(30)"))?;
    eventually("the statement runs", || {
        Ok(server.sql_value(
            "select count(*) from pg_stat_activity where query like 'select pg_sleep%' and state = 'active'",
        )? == "1")
    })?;
    client.cancel()?;
    assert_eq!(sqlstate(client.response()?.ok()), "57014");
    assert_eq!(pid(&mut client)?, home, "the server connection stays");
    // Queued: the one server is taken.
    let mut holder = Client::connect(&options)?;
    holder.query("begin")?.ok()?;
    client.send(&Batch::new().query("select 2"))?;
    std::thread::sleep(Duration::from_millis(200));
    client.cancel()?;
    assert_eq!(sqlstate(client.response()?.ok()), "57014");
    holder.query("commit")?.ok()?;
    assert_eq!(client.query("select 3")?.ok()?.value(), Some("3"));
    // Forged: right process id, wrong secret.
    let (process_id, _) = client.backend_key();
    client.send(&Batch::new().query("select pg_sleep(0.5)"))?;
    let mut forger = Client::open(&options)?;
    forger.send(&Batch::new().cancel_request(process_id, &[1, 2, 3, 4]))?;
    forger.until_closed()?;
    client.response()?.ok()?;
    Ok(())
}

/// The time when a postmaster that hangs gets round to a cancel request is not known. Until then its statement is over, and another runs there.
#[test]
fn a_cancel_request_that_was_given_up_hits_nobody_else() -> Result<()> {
    let server = Postgres::start()?;
    let ini = transaction(&server).set("default_pool_size", "1").set("cancel_wait_timeout", "0.5");
    let pooler = Underpass::start(&ini)?;
    let options = pooler.options("postgres", "postgres");
    let (mut client, mut next) = (Client::connect(&options)?, Client::connect(&options)?);
    let home = pid(&mut client)?;
    client.send(&Batch::new().query("select pg_sleep(2)"))?;
    eventually("the statement runs", || {
        Ok(server.sql_value("select count(*) from pg_stat_activity where query like 'select pg_sleep%'")?
            == "1")
    })?;
    server.signal(Signal::SIGSTOP)?;
    client.cancel()?;
    eventually("it is given up", || Ok(pooler.log().contains("cancel_wait_timeout")))?;
    client.response()?.ok()?;
    // Would be given the same connection at once.
    next.send(&Batch::new().query("select pg_backend_pid()::text from pg_sleep(1)"))?;
    std::thread::sleep(Duration::from_millis(300));
    server.signal(Signal::SIGCONT)?;
    let answer = next.response()?.ok()?;
    assert_ne!(answer.value(), Some(home.as_str()));
    Ok(())
}

#[test]
fn a_client_that_vanishes_leaves_its_server_behind_clean() -> Result<()> {
    let server = Postgres::start()?;
    let pooler = Underpass::start(&transaction(&server).set("default_pool_size", "1"))?;
    let options = pooler.options("postgres", "postgres");
    let mut home = pid(&mut Client::connect(&options)?)?;
    server.sql("create table kept (i int)")?;
    // Mid-statement, in a transaction, in COPY, in a batch without Sync, and while COPY was asked for and not begun.
    let scenes: [Batch; 6] = [
        Batch::new().query("select pg_sleep(600)"),
        Batch::new().query("begin; insert into kept values (1)"),
        Batch::new().query("copy kept from stdin"),
        Batch::new().parse("", "copy kept from stdin").bind("", "", &[]).execute("", 0).sync(),
        Batch::new().parse("", "insert into kept values (2)").bind("", "", &[]).execute("", 0).flush(),
        Batch::new().parse("", "select nonsense").flush(),
    ];
    for (number, scene) in scenes.iter().enumerate() {
        for pause in [0, 150] {
            let mut client = Client::connect(&options)?;
            client.send(scene)?;
            std::thread::sleep(Duration::from_millis(pause));
            client.reset()?;
            let begun = Instant::now();
            let next = Client::connect(&options).and_then(|mut client| pid(&mut client));
            if pause == 0 && pooler.has_lanes() {
                // In lane A a reset in the very moment of an answer ends the backend (docs/lanes.md), and the next client gets another.
                home = next?;
                assert!(!home.is_empty(), "scene {number}: an answer of somebody else\n{}", pooler.log());
                continue;
            }
            assert_eq!(
                next.ok().as_deref(),
                Some(&*home),
                "scene {number} after {pause} ms: the same server goes on\n{}",
                pooler.log()
            );
            assert!(begun.elapsed() < Duration::from_secs(5), "scene {number} after {pause} ms");
        }
    }
    assert_eq!(server.sql_value("select count(*) from kept")?, "0", "all was rolled back");
    Ok(())
}

/// `COPY FROM STDIN` of the extended protocol has its Sync ahead of the data, which the server ignores once it reads data: what fails before
/// that is answered by a ReadyForQuery more.
#[test]
fn a_copy_that_fails_before_it_reads_is_answered_as_directly() -> Result<()> {
    let server = Postgres::start()?;
    server.sql("create table t (i int); create view v as select 1")?;
    let heard = |messages: &[Message]| -> Vec<(u8, Option<String>, Option<u8>)> {
        let code = |m: &Message| m.field(b'C').filter(|_| m.tag == b'E').map(|code| code.to_string());
        messages.iter().map(|m| (m.tag, code(m), m.status())).collect()
    };
    let copy = |table: &str| {
        let sql = format!("copy {table} from stdin");
        Batch::new().parse("", &sql).bind("", "", &[]).execute("", 0).sync()
    };
    let scenes = [
        ("refused", copy("v")),
        ("refused, with its data", copy("v").copy_data(b"1\n").copy_done().sync()),
        ("bad data", copy("t").copy_data(b"nonsense\n").copy_done().sync()),
        ("given up", copy("t").copy_fail("no").sync()),
        ("good", copy("t").copy_data(b"1\n").copy_done().sync()),
    ];
    for mode in ["transaction", "session"] {
        let ini = Ini::for_server(&server).set("pool_mode", mode).set("default_pool_size", "1");
        let pooler = Underpass::start(&ini)?;
        let home = pid(&mut Client::connect(&pooler.options("postgres", "postgres"))?)?;
        for (scene, batch) in &scenes {
            let mut told = Vec::new();
            for options in [server.options("postgres", "postgres"), pooler.options("postgres", "postgres")] {
                let mut client = Client::connect(&options)?;
                // The statement that it has prepared stays, too.
                client.exchange(&Batch::new().parse("mine", "select 7").sync())?.remove(0).ok()?;
                client.send(batch)?;
                // Another has the server next, if it may.
                let mut other = (mode == "transaction").then(|| Client::connect(&options)).transpose()?;
                if let Some(other) = &mut other {
                    assert_eq!(
                        other.query("select 'other'")?.ok()?.value(),
                        Some("other"),
                        "{mode}, {scene}"
                    );
                }
                std::thread::sleep(Duration::from_millis(50));
                client.send(&Batch::new().bind("", "mine", &[]).execute("", 0).sync())?;
                let mut messages = Vec::new();
                while messages.iter().all(|m: &Message| m.tag != b'D') {
                    messages.push(client.recv()?);
                }
                told.push(heard(&messages));
                drop(client);
            }
            assert_eq!(told[0], told[1], "{mode}, {scene}");
        }
        let after = pid(&mut Client::connect(&pooler.options("postgres", "postgres"))?)?;
        assert_eq!(home, after, "{mode}: the same server\n{}", pooler.log());
    }
    Ok(())
}

/// The same when the client has gone: a cancel request may meet the server between CopyInResponse and the Sync. The next client of the server
/// once got the answer that was left over.
#[test]
fn a_client_that_vanishes_as_its_copy_begins_leaves_no_answer_behind() -> Result<()> {
    let begun = || Reply::new().message(b'1', b"").message(b'2', b"").message(b'G', b"\0\0\0");
    let failed = |code: &str| Reply::new().error("ERROR", code, "no").ready_for_query(b'I');
    let mock = MockServer::start(move |index| {
        if index > 0 {
            return vec![Step::Startup, Step::Close];
        }
        vec![
            Step::Login,
            Step::Until(b'S'),
            Step::Send(begun()),
            // CopyFail and its Sync, which come behind an error that the cancel request made: the first Sync was not ignored.
            Step::Expect(b'f'),
            Step::Expect(b'S'),
            Step::Send(failed("57014")),
            Step::Delay(Duration::from_millis(200)),
            Step::Send(Reply::new().ready_for_query(b'I')),
            // The pooler makes sure.
            Step::Until(b'S'),
            Step::Send(failed("26000")),
            Step::Expect(b'C'),
            Step::Expect(b'S'),
            Step::Send(Reply::new().message(b'3', b"").ready_for_query(b'I')),
            Step::Expect(b'Q'),
            Step::Send(Reply::new().single_row("n", "1")),
            Step::WaitClose,
        ]
    })?;
    let pooler = Underpass::start(&Ini::for_mock(&mock))?;
    let options = pooler.options("postgres", "postgres");
    let mut client = Client::connect(&options)?;
    client.send(&Batch::new().parse("", "copy t from stdin").bind("", "", &[]).execute("", 0).sync())?;
    while client.recv()?.tag != b'G' {}
    client.reset()?;
    let mut next = Client::connect(&options)?;
    assert_eq!(next.query("select 1")?.ok()?.value(), Some("1"), "{}", pooler.log());
    drop((next, pooler));
    mock.wait_finished(1)
}

#[test]
fn prepared_statements_outlive_servers_and_each_other() -> Result<()> {
    let server = Postgres::start()?;
    let pooler = Underpass::start(
        &transaction(&server).set("default_pool_size", "2").set("max_prepared_statements", "2"),
    )?;
    let options = pooler.options("postgres", "postgres");
    let (mut one, mut two) = (Client::connect(&options)?, Client::connect(&options)?);
    for client in [&mut one, &mut two] {
        client.exchange(&Batch::new().parse("plan", "select $1::int + 1").sync())?.remove(0).ok()?;
    }
    // The second finds the first's server taken, and gets one that knows nothing yet.
    one.query("begin")?.ok()?;
    let answer =
        two.exchange(&Batch::new().bind("", "plan", &[Some("41")]).execute("", 0).sync())?.remove(0).ok()?;
    assert_eq!(answer.value(), Some("42"));
    // Eviction, also inside one pipeline.
    let mut pipeline = Batch::new();
    for number in 0..6 {
        let (name, sql) = (format!("name_{number}"), format!("select {number}"));
        pipeline = pipeline.parse(&name, &sql).bind("", &name, &[]).execute("", 0);
    }
    assert_eq!(one.exchange(&pipeline.sync())?.remove(0).ok()?.rows().len(), 6);
    let again = Batch::new()
        .bind("", "name_0", &[])
        .execute("", 0)
        .bind("", "plan", &[Some("1")])
        .execute("", 0)
        .sync();
    let rows = one.exchange(&again)?.remove(0).ok()?.rows();
    assert_eq!(rows, [[Some("0".to_owned())], [Some("2".to_owned())]]);
    one.query("rollback")?.ok()?;
    // A name twice, an unknown one, and a failed Parse that leaves nothing.
    assert_eq!(
        sqlstate(one.exchange(&Batch::new().parse("plan", "select 1").sync())?.remove(0).ok()),
        "42P05"
    );
    assert_eq!(sqlstate(one.exchange(&Batch::new().bind("", "nobody", &[]).sync())?.remove(0).ok()), "26000");
    assert_eq!(sqlstate(one.exchange(&Batch::new().parse("bad", "selec").sync())?.remove(0).ok()), "42601");
    assert_eq!(sqlstate(one.exchange(&Batch::new().bind("", "bad", &[]).sync())?.remove(0).ok()), "26000");
    // In a failed transaction a statement that the server has already is refused, and is there afterwards.
    one.query("begin")?.ok()?;
    assert_eq!(sqlstate(one.query("select 1/0")), "22012");
    assert_eq!(
        sqlstate(one.exchange(&Batch::new().parse("late", "select $1::int + 1").sync())?.remove(0).ok()),
        "25P02"
    );
    one.query("rollback")?.ok()?;
    one.exchange(
        &Batch::new()
            .parse("late", "select $1::int + 1")
            .bind("", "late", &[Some("2")])
            .execute("", 0)
            .sync(),
    )?
    .remove(0)
    .ok()?;
    // DEALLOCATE ALL and DISCARD ALL.
    for forget in ["deallocate all", "discard all"] {
        one.exchange(&Batch::new().parse("mine", "select 5").sync())?.remove(0).ok()?;
        one.query(forget)?.ok()?;
        assert_eq!(
            sqlstate(one.exchange(&Batch::new().bind("", "mine", &[]).sync())?.remove(0).ok()),
            "26000"
        );
        two.exchange(&Batch::new().bind("", "plan", &[Some("1")]).execute("", 0).sync())?.remove(0).ok()?;
    }
    Ok(())
}

#[test]
fn a_plan_that_became_useless_is_made_anew() -> Result<()> {
    let server = Postgres::start()?;
    server.sql("create table t (a int); insert into t values (1)")?;
    let pooler = Underpass::start(&transaction(&server).set("default_pool_size", "1"))?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    let run = Batch::new().bind("", "all", &[]).execute("", 0).sync();
    client.exchange(&Batch::new().parse("all", "select * from t").sync())?.remove(0).ok()?;
    client.exchange(&run)?.remove(0).ok()?;
    server.sql("alter table t add b int default 7")?;
    assert_eq!(sqlstate(client.exchange(&run)?.remove(0).ok()), "0A000", "as PostgreSQL says once");
    assert_eq!(client.exchange(&run)?.remove(0).ok()?.rows()[0].len(), 2);
    // Who asks what the rows look like hears nothing of it, unless a transaction block has failed with it.
    let described = Batch::new().bind("", "all", &[]).describe_portal("").execute("", 0).sync();
    server.sql("alter table t add c int default 8")?;
    if !pooler.has_lanes() {
        let response = client.exchange(&described)?.remove(0).ok()?;
        assert_eq!((response.column_names().len(), response.rows()[0].len()), (3, 3));
        server.sql("alter table t add d int default 9")?;
        client.query("begin")?.ok()?;
        assert_eq!(sqlstate(client.exchange(&described)?.remove(0).ok()), "0A000");
        client.query("rollback")?.ok()?;
        assert_eq!(client.exchange(&run)?.remove(0).ok()?.rows()[0].len(), 4);
    }
    Ok(())
}

/// The server answers the name only when it has the request, too; in the end with the name that it made of it, or not at all.
#[test]
fn a_name_goes_ahead_of_the_request_that_needs_it() -> Result<()> {
    let mock = MockServer::start(|_| {
        let name = |name: &str| {
            Reply::new()
                .command_complete("SET")
                .parameter_status("application_name", name)
                .ready_for_query(b'I')
        };
        vec![
            Step::Login,
            Step::Expect(b'Q'),
            Step::Expect(b'Q'),
            Step::Send(name("it's cut")),
            Step::Send(Reply::new().single_row("n", "1")),
            // The name is as the server has it.
            Step::Expect(b'Q'),
            Step::Send(Reply::new().single_row("n", "2")),
            // A cancel request hit the name instead of the request.
            Step::Expect(b'Q'),
            Step::Expect(b'Q'),
            Step::Send(Reply::new().error("ERROR", "57014", "canceled").ready_for_query(b'I')),
            Step::Send(Reply::new().single_row("n", "3")),
            Step::Expect(b'Q'),
            Step::Expect(b'Q'),
            Step::Send(name("other")),
            Step::Send(Reply::new().error("ERROR", "22012", "division by zero").ready_for_query(b'I')),
            Step::WaitClose,
        ]
    })?;
    let pooler = Underpass::start(&Ini::for_mock(&mock))?;
    let options = pooler.options("postgres", "postgres");
    let named = |name: &str| Client::connect(&options.clone().parameter("application_name", name));
    let mut first = named("it's cut off")?;
    assert_eq!(first.query("select 1")?.ok()?.value(), Some("1"));
    assert_eq!(first.query("select 2")?.ok()?.value(), Some("2"));
    let mut other = named("other")?;
    assert_eq!(other.query("select 3")?.ok()?.value(), Some("3"), "in time, if not under its name");
    assert_eq!(sqlstate(other.query("select 4")), "22012");
    drop((first, other, pooler));
    mock.wait_finished(1)?;
    let set = |name: &str| format!("SET \"application_name\" = '{name}';");
    let queries = mock.queries();
    assert_eq!(queries[..4], [set("it''s cut off"), "select 1".into(), "select 2".into(), set("other")]);
    assert_eq!(queries[4..], ["select 3".into(), set("other"), "select 4".to_owned()]);
    Ok(())
}

/// A statement that its server has not got waits for the answer to the name of its client; meanwhile the server is that client's.
#[test]
fn clients_of_many_names_share_a_server_that_keeps_one_statement() -> Result<()> {
    let server = Postgres::start()?;
    let ini = transaction(&server).set("default_pool_size", "1").set("max_prepared_statements", "1");
    let pooler = Underpass::start(&ini)?;
    let options = pooler.options("postgres", "postgres");
    let run = |name: String| {
        let mut client = Client::connect(&options.clone().parameter("application_name", &name))?;
        let text = format!("select current_setting('application_name') -- {name}");
        client.exchange(&Batch::new().parse("s", &text).sync())?.remove(0).ok()?;
        for _ in 0..100 {
            let run = Batch::new().bind("", "s", &[]).execute("", 0).sync();
            assert_eq!(client.exchange(&run)?.remove(0).ok()?.value(), Some(&*name));
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..8).map(|n| scope.spawn(move || run(format!("client {n}")))).collect();
        clients.into_iter().try_for_each(|client| client.join().expect("no panic"))
    })
}

#[test]
fn names_are_right_in_every_protocol_and_pool_mode() -> Result<()> {
    let server = Postgres::start()?;
    let name = "select current_setting('application_name')";
    for mode in ["transaction", "session"] {
        let ini = transaction(&server).set("default_pool_size", "1").set("pool_mode", mode);
        let pooler = Underpass::start(&ini)?;
        let options = pooler.options("postgres", "postgres");
        let long = "n".repeat(100);
        for zone in ["UTC", "Asia/Tokyo"] {
            for asked in ["a", &long, "it's \\ \"x\"", "é"] {
                // PostgreSQL cuts it, and does without what is not ASCII.
                let direct = server.options("postgres", "postgres").parameter("application_name", asked);
                let told = Client::connect(&direct)?.query(name)?.ok()?.value().map(str::to_owned);
                let told = told.as_deref();
                let options =
                    options.clone().parameter("application_name", asked).parameter("TimeZone", zone);
                let mut client = Client::connect(&options)?;
                assert_eq!(client.extended(name, &[])?.ok()?.value(), told, "{mode} {zone}");
                let answers = client.exchange(&Batch::new().query(name).query("select 1/0").query(name))?;
                assert_eq!((answers[0].value(), answers[2].value()), (told, told));
                assert_eq!(client.query("show timezone")?.ok()?.value(), Some(zone));
                client.query("set application_name = 'own'")?.ok()?;
                assert_eq!(client.query(name)?.ok()?.value(), Some("own"));
            }
        }
    }
    Ok(())
}

#[test]
fn every_parameter_that_is_reported_is_its_clients_own() -> Result<()> {
    let server = Postgres::builder().user("joe", "").start()?;
    let pooler = Underpass::start(&transaction(&server).set("default_pool_size", "1"))?;
    let options = pooler.options("postgres", "postgres");
    let (mut one, mut other) = (Client::connect(&options)?, Client::connect(&options)?);
    assert_eq!(one.parameter("session_authorization"), Some("postgres"));
    let reported = [
        ("application_name", "one"),
        ("client_encoding", "LATIN1"),
        ("DateStyle", "German, DMY"),
        ("default_transaction_read_only", "on"),
        ("IntervalStyle", "iso_8601"),
        ("session_authorization", "joe"),
        ("standard_conforming_strings", "off"),
        ("TimeZone", "Asia/Tokyo"),
    ];
    let show = |client: &mut Client, name: &str| -> Result<String> {
        Ok(client.query(&format!("show {name}"))?.ok()?.value().unwrap_or_default().to_owned())
    };
    // All but these are the server's own. A parameter that a later version reports belongs to one of the lists.
    let fixed = ["in_hot_standby", "integer_datetimes", "is_superuser", "server_encoding", "server_version"];
    let newer = ["scram_iterations", "search_path"];
    for name in one.parameters().keys() {
        let known = reported.map(|(name, _)| name).into_iter().chain(fixed).chain(newer);
        assert!(known.into_iter().any(|known| known == name), "{name}");
    }
    for (name, value) in reported {
        let before = show(&mut other, name)?;
        one.query(&format!("set {name} = '{value}'"))?.ok()?;
        assert_eq!((show(&mut other, name)?, show(&mut one, name)?), (before, value.into()), "{name}");
    }
    // And all together, with what follows from them.
    assert_eq!(
        one.query("select session_user, current_setting('is_superuser')")?.ok()?.rows(),
        [[Some("joe".to_owned()), Some("off".to_owned())]]
    );
    assert_eq!(show(&mut other, "is_superuser")?, "on");
    one.query("reset session_authorization")?.ok()?;
    assert_eq!(
        (show(&mut other, "is_superuser")?, show(&mut one, "is_superuser")?),
        ("on".into(), "on".into())
    );
    Ok(())
}

#[test]
fn a_value_that_the_server_refuses_costs_its_client_and_no_server() -> Result<()> {
    let server = Postgres::start()?;
    for mode in ["transaction", "session"] {
        let ini = transaction(&server).set("default_pool_size", "1").set("pool_mode", mode);
        let pooler = Underpass::start(&ini)?;
        let options = pooler.options("postgres", "postgres");
        let mut plain = Client::connect(&options)?;
        let home = pid(&mut plain)?;
        plain.terminate()?;
        for _ in 0..3 {
            // One that is taken goes before it.
            let wrong =
                options.clone().parameter("DateStyle", "German").parameter("TimeZone", "Nowhere/At all");
            let mut client = Client::connect(&wrong)?;
            client.send(&Batch::new().query("select 1"))?;
            assert_eq!(sqlstate(client.response().and_then(|response| response.ok())), "22023", "{mode}");
            let mut next = Client::connect(&options)?;
            assert_eq!(next.query("show datestyle")?.ok()?.value(), Some("ISO, MDY"));
            assert_eq!(pid(&mut next)?, home, "{mode}");
            next.terminate()?;
        }
    }
    Ok(())
}

#[test]
fn each_client_keeps_its_own_parameters() -> Result<()> {
    let server = Postgres::start()?;
    let pooler = Underpass::start(&transaction(&server).set("default_pool_size", "1"))?;
    let options = pooler.options("postgres", "postgres");
    let mut zurich = Client::connect(
        &options.clone().parameter("TimeZone", "Europe/Zurich").parameter("application_name", "z"),
    )?;
    let mut tokyo = Client::connect(&options.clone().parameter("options", "-c datestyle=german"))?;
    assert_eq!(zurich.parameter("TimeZone"), Some("Europe/Zurich"));
    tokyo.query("set timezone = 'Asia/Tokyo'")?.ok()?;
    for _ in 0..3 {
        assert_eq!(zurich.query("show timezone")?.ok()?.value(), Some("Europe/Zurich"));
        assert_eq!(zurich.query("show application_name")?.ok()?.value(), Some("z"));
        assert_eq!(tokyo.query("show timezone")?.ok()?.value(), Some("Asia/Tokyo"));
        assert_eq!(tokyo.query("select date '2001-02-03'")?.ok()?.value(), Some("03.02.2001"));
    }
    let refused = Client::connect(&options.clone().parameter("options", "-c work_mem=1MB"));
    assert!(refused.is_err_and(|error| {
        error.to_string().contains("unsupported startup parameter in options: work_mem")
    }));
    let refused = Client::connect(&options.parameter("extra_float_digits", "3"));
    assert!(
        refused.is_err_and(|error| error
            .to_string()
            .contains("unsupported startup parameter: extra_float_digits"))
    );
    Ok(())
}

#[test]
fn protocol_3_2_is_negotiated_with_a_long_cancel_key() -> Result<()> {
    let server = Postgres::start()?;
    let pooler = Underpass::start(&transaction(&server))?;
    let options = pooler.options("postgres", "postgres");
    let mut client = Client::connect(&options.clone().protocol(0x0003_0002))?;
    assert_eq!(client.backend_key().1.len(), 32);
    client.send(&Batch::new().query("select pg_sleep(30)"))?;
    std::thread::sleep(Duration::from_millis(300));
    // The first four bytes alone are not the key.
    let mut short = Client::open(&options)?;
    let (process_id, secret) = client.backend_key();
    short.send(&Batch::new().cancel_request(process_id, &secret[..4]))?;
    short.until_closed()?;
    client.set_read_timeout(Duration::from_millis(300))?;
    assert!(client.response().is_err(), "still running");
    client.set_read_timeout(Duration::from_secs(10))?;
    client.cancel()?;
    assert_eq!(sqlstate(client.response()?.ok()), "57014");

    // A later minor version and an unknown option are answered before anything else.
    let mut raw = TcpStream::connect(("127.0.0.1", pooler.port())).expect("connect");
    let startup = Batch::new()
        .startup(0x0003_0009, &[("user", "postgres"), ("database", "postgres"), ("_pq_.shiny", "1")]);
    raw.write_all(startup.as_bytes()).expect("write");
    let mut head = [0; 1];
    raw.read_exact(&mut head).expect("answer");
    assert_eq!(head, *b"v");
    Ok(())
}

#[test]
fn bad_input_ends_its_own_connection_only() -> Result<()> {
    let server = Postgres::start()?;
    // One server: whoever holds it lets the witness wait.
    let ini = transaction(&server).set("max_packet_size", "1000000").set("default_pool_size", "1");
    let mut pooler = Underpass::start(&ini)?;
    let options = pooler.options("postgres", "postgres");
    let mut witness = Client::connect(&options)?;
    let home = pid(&mut witness)?;
    let after_login: [&[u8]; 7] = [
        b"Q\0\0\0\x01",
        b"Q\xff\xff\xff\xff",
        b"?\0\0\0\x04",
        b"p\0\0\0\x08aaaa",
        b"Q\x7f\xff\xff\xff",
        b"B\0\0\0\x08aaaa",
        b"R\0\0\0\x08\0\0\0\0",
    ];
    for bytes in after_login {
        let mut client = Client::connect(&options)?;
        client.send_bytes(bytes)?;
        let last = client.until_closed()?;
        assert!(last.iter().any(|message| message.tag == b'E'), "{bytes:?}: {last:?}");
        assert_eq!(pid(&mut witness)?, home, "{bytes:?}");
    }
    let first: [&[u8]; 7] = [
        b"\0\0\0\0",
        b"\xff\xff\xff\xff\0\x03\0\0",
        b"\0\0\0\x08\0\x02\0\0",
        b"\0\0\0\x08\x04\xd2\x16\x2fjunk after SSLRequest",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\0\x05hello",
        b"\0\0\0\x09\0\x03\0\0x",
    ];
    for bytes in first {
        let mut raw = TcpStream::connect(("127.0.0.1", pooler.port())).expect("connect");
        raw.set_read_timeout(Some(Duration::from_secs(10))).expect("timeout");
        raw.write_all(bytes).expect("write");
        let mut answer = Vec::new();
        // Closed in good order or reset: it must end.
        let ended = raw.read_to_end(&mut answer);
        assert!(
            !ended.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock),
            "{bytes:?} was kept"
        );
    }
    // Half a login and half a message stay, and cost nobody anything.
    let mut half = TcpStream::connect(("127.0.0.1", pooler.port())).expect("connect");
    half.write_all(b"\0\0\0\x50\0\x03\0\0us").expect("write");
    for bytes in [&b"Q"[..], b"Q\0\0\0", b"Q\0\0\0\x0e", b"Q\0\0\0\x0eselect 1;"] {
        let mut cut = Client::connect(&options)?;
        cut.send_bytes(bytes)?;
        // A lane forwards what is behind a whole head, and the server waits for the rest, as PgBouncer's does.
        if bytes.len() < 5 || !pooler.has_lanes() {
            assert_eq!(pid(&mut witness)?, home, "{bytes:?} holds no server");
        }
        cut.send_bytes(&b"Q\0\0\0\x0eselect 1;\0"[bytes.len()..])?;
        assert!(
            cut.response()?.ok()?.messages.iter().any(|message| message.tag == b'D'),
            "{bytes:?} goes on"
        );
    }
    assert!(pooler.is_running());
    Ok(())
}

/// A type that nobody sends, or a length that its type cannot have: the head is enough, wherever the client stands and whoever has the servers.
#[test]
fn a_head_that_cannot_be_is_refused_without_its_body() -> Result<()> {
    let server = Postgres::start()?;
    server.sql("create table c (i int)")?;
    for mode in ["transaction", "session"] {
        let ini = Ini::for_server(&server).set("pool_mode", mode).set("default_pool_size", "2");
        let mut pooler = Underpass::start(&ini.set("max_packet_size", "2147483647"))?;
        let options = pooler.options("postgres", "postgres");
        let stands: [(&str, Batch); 4] = [
            ("between transactions", Batch::new().query("select 1")),
            ("in a transaction", Batch::new().query("begin")),
            ("in a batch", Batch::new().parse("", "select 1").flush()),
            ("in COPY", Batch::new().query("copy c from stdin").copy_data(b"1\n")),
        ];
        let heads: [(&[u8], &str); 9] = [
            (b"?\x7f\xff\xff\xff", "invalid frontend message type 63"),
            (b"?\0\0\0\x44", "invalid frontend message type 63"),
            (b"p\0\0\0\x44", "invalid frontend message type 112"),
            (b"S\x40\0\0\0", "invalid message length 1073741824 for type 'S'"),
            (b"H\0\0\x27\x11", "invalid message length 10001 for type 'H'"),
            (b"X\0\0\x27\x11", "invalid message length 10001 for type 'X'"),
            (b"E\0\0\x27\x11", "invalid message length 10001 for type 'E'"),
            (b"f\0\0\x27\x11", "invalid message length 10001 for type 'f'"),
            (b"Q\x3f\xff\xff\xff", "invalid message length 1073741823 for type 'Q'"),
        ];
        for (stand, batch) in &stands {
            for (head, expected) in heads {
                let mut client = Client::connect(&options)?;
                client.send(batch)?;
                while !matches!(client.recv()?.tag, b'Z' | b'1' | b'G') {}
                // In the middle of nothing it gets no server for it, so it waits for none.
                let mut holders = Vec::new();
                while *stand == "between transactions" && mode == "transaction" && holders.len() < 2 {
                    let mut holder = Client::connect(&options)?;
                    holder.query("begin")?.ok()?;
                    holders.push(holder);
                }
                client.send_bytes(head)?;
                let last = client.until_closed()?;
                let told = last.last().and_then(Message::error).map(|error| error.to_string());
                assert_eq!(told, Some(format!("FATAL 08P01: {expected}")), "{mode}, {stand}: {last:?}");
            }
        }
        // What was begun is gone, and the servers are there for others, one of them after another.
        let mut witness = Client::connect(&options)?;
        assert_eq!(witness.query("select count(*) from c")?.ok()?.value(), Some("0"));
        pooler.stop()?;
        let log = pooler.log();
        assert_eq!(log.matches("closing because: unknown pkt from client: '?'").count(), 8, "{log}");
        assert_eq!(log.matches("closing because: invalid message length 10001 for type 'H'").count(), 4);
        pooler.start_again()?;
    }
    // PostgreSQL's own words, where it has any: of a bad length only its log knows.
    let mut direct = Client::connect(&server.superuser())?;
    direct.send_bytes(b"?\0\0\0\x04")?;
    let last = direct.until_closed()?;
    let told = last.last().and_then(Message::error).map(|error| error.to_string());
    assert_eq!(told.as_deref(), Some("FATAL 08P01: invalid frontend message type 63"));
    let mut direct = Client::connect(&server.superuser())?;
    direct.send_bytes(b"S\0\0\x27\x11")?;
    assert_eq!(direct.until_closed()?.len(), 0);
    Ok(())
}

/// What a message means may depend on answers to come: whoever sends it ahead of them hears the same as without a pooler.
#[test]
fn a_batch_that_frees_its_own_names_is_answered_as_directly() -> Result<()> {
    let server = Postgres::start()?;
    let pooler = Underpass::start(&transaction(&server).set("default_pool_size", "1"))?;
    let mut heard = Vec::new();
    for options in [server.options("postgres", "postgres"), pooler.options("postgres", "postgres")] {
        let mut client = Client::connect(&options)?;
        client.exchange(&Batch::new().parse("name", "select 1").sync())?.remove(0).ok()?;
        let run = |batch: Batch, name: &str| batch.bind("", name, &[]).execute("", 0);
        let freed = run(Batch::new().parse("", "deallocate all"), "");
        let made = run(freed.parse("name", "select 2"), "name").sync();
        let taken = run(run(Batch::new(), "name").parse("name", "select 3"), "name").sync();
        // An unnamed statement that was discarded, in a batch that nobody waited for.
        let lost = run(Batch::new().bind("", "nobody", &[]).parse("", "select 4").sync(), "").sync();
        for batch in [lost, made, taken] {
            for response in client.exchange(&batch)? {
                let told = |m: &Message| (m.tag, m.field(b'C').filter(|_| m.tag == b'E'), m.status());
                heard.push(response.messages.iter().map(told).collect::<Vec<_>>());
            }
        }
    }
    let (direct, pooled) = heard.split_at(heard.len() / 2);
    assert_eq!(direct, pooled);
    Ok(())
}

#[test]
fn who_does_not_read_costs_no_memory_and_others_are_answered() -> Result<()> {
    let server = Postgres::start()?;
    let pooler = Underpass::start(&transaction(&server).set("default_pool_size", "3"))?;
    let options = pooler.options("postgres", "postgres");
    let mut clients = (0..6).map(|_| Client::connect(&options)).collect::<Result<Vec<_>>>()?;
    for client in &mut clients {
        client.query("select 1")?.ok()?;
    }
    let mut slow = clients.split_off(4);
    // On whichever worker, and for the servers that are left. Who is answered needs memory, too, once: it is not what this is about.
    let mut answer = |least: usize, time: Duration| -> Result<usize> {
        let (mut answered, began) = (0, Instant::now());
        while answered < least || began.elapsed() < time {
            for client in &mut clients {
                client.send(&Batch::new().query("select repeat('y', 20000)"))?;
            }
            for client in &mut clients {
                let rows = client.response()?.ok()?.rows();
                assert_eq!(rows[0][0].as_ref().map(String::len), Some(20_000));
                answered += 1;
            }
        }
        Ok(answered)
    };
    answer(1000, Duration::ZERO)?;
    let before = pooler.resident_kib()?;
    // 2.4 GB, which it never reads, and 300 MB.
    for (client, rows) in slow.iter_mut().zip([24_000, 3000]) {
        let sql = format!("select repeat('x', 100000) from generate_series(1, {rows})");
        client.send(&Batch::new().query(&sql))?;
    }
    let answered = answer(1000, Duration::from_millis(1500))?;
    let grown = pooler.resident_kib()?.saturating_sub(before);
    assert!(grown < 1024, "{grown} KiB for two clients that do not read, beside {answered} answers");
    slow.remove(0).reset()?;
    slow[0].set_read_timeout(Duration::from_secs(30))?;
    let rows = slow[0].response()?.ok()?.messages.iter().filter(|message| message.tag == b'D').count();
    assert_eq!(rows, 3000);
    Ok(())
}

#[test]
fn copy_both_ways_pipelines_and_calls() -> Result<()> {
    let server = Postgres::start()?;
    server.sql("create table c (i int)")?;
    let pooler = Underpass::start(&transaction(&server).set("default_pool_size", "1"))?;
    let options = pooler.options("postgres", "postgres");
    let mut client = Client::connect(&options)?;
    client.send(&Batch::new().query("copy c from stdin").copy_data(b"1\n").copy_data(b"2\n").copy_done())?;
    assert_eq!(client.response()?.ok()?.commands(), ["COPY 2"]);
    client.send(&Batch::new().query("copy c from stdin").copy_data(b"nonsense\n").copy_done())?;
    assert_eq!(sqlstate(client.response()?.ok()), "22P02");
    let out = client.query("copy c to stdout")?.ok()?;
    assert_eq!(out.messages.iter().filter(|message| message.tag == b'd').count(), 2);
    // The Sync ahead of the data is ignored by the server; the one behind it commits.
    let ahead = Batch::new()
        .parse("", "copy c from stdin")
        .bind("", "", &[])
        .execute("", 0)
        .sync()
        .copy_data(b"3\n")
        .copy_done();
    client.send(&ahead)?;
    std::thread::sleep(Duration::from_millis(200));
    let mut other = Client::connect(&options)?;
    other.send(&Batch::new().query("select count(*) from c"))?;
    std::thread::sleep(Duration::from_millis(200));
    client.send(&Batch::new().sync())?;
    client.response()?.ok()?;
    assert_eq!(other.response()?.ok()?.value(), Some("3"), "not given the server in the middle of that");
    let many = (0..300).fold(Batch::new(), |batch, number| {
        batch.extended("select $1::int", &[Some(&number.to_string())]).sync()
    });
    let answers = client.exchange(&many)?;
    assert!(answers.len() >= 300);
    let abs = server.sql_value("select 'abs(int4)'::regprocedure::oid")?;
    let called =
        client.exchange(&Batch::new().function_call(abs.parse().unwrap_or(0), &[Some("-5")]))?.remove(0);
    called.ok()?;
    Ok(())
}

#[test]
fn replication_goes_through() -> Result<()> {
    let server = Postgres::builder()
        .hba("local all all trust\nhost all all 127.0.0.1/32 trust\nhost replication all 127.0.0.1/32 trust")
        .setting("wal_level", "logical")
        .setting("max_wal_senders", "5")
        .start()?;
    let pooler = Underpass::start(&transaction(&server))?;
    let port = pooler.port().to_string();
    let target = tempfile::tempdir().expect("directory");
    let backup = target.path().join("backup");
    let output = Command::new("/usr/lib/postgresql/15/bin/pg_basebackup")
        .args(["-h", "127.0.0.1", "-p", &port, "-U", "postgres", "-X", "stream", "-c", "fast", "-D"])
        .arg(&backup)
        .output()
        .expect("pg_basebackup");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(backup.join("PG_VERSION").exists());
    // Logical: a session of its own that also answers queries.
    let options = pooler.options("postgres", "postgres");
    let mut logical = Client::connect(&options.clone().parameter("replication", "database"))?;
    assert_eq!(logical.query("IDENTIFY_SYSTEM")?.ok()?.rows().len(), 1);
    // Others are told what sessions of their own kind have.
    let mut plain = Client::connect(&options)?;
    assert_eq!(plain.query("show application_name")?.ok()?.value(), Some(""));
    Ok(())
}

#[test]
fn a_client_is_told_what_login_notify_message_says() -> Result<()> {
    let server = Postgres::start()?;
    let ini = Ini::for_server(&server).set("login_notify_message", "maintenance at noon");
    let pooler = Underpass::start(&ini)?;
    let mut client = Client::open(&pooler.options("postgres", "postgres"))?;
    client.startup()?;
    client.authenticate()?;
    let mut notices = Vec::new();
    loop {
        let message = client.recv()?;
        match message.tag {
            b'N' => notices.push((message.field(b'S'), message.field(b'M'))),
            b'Z' => break,
            _ => {}
        }
    }
    assert_eq!(notices, [(Some("NOTICE".into()), Some("maintenance at noon".into()))]);
    assert_eq!(client.query("select 1")?.ok()?.value(), Some("1"));
    Ok(())
}

/// What a server reports in another `client_encoding` than the pooler reads is put back for its client, and for nobody else; and what is put
/// back is read by a session that has the encoding of the client before.
#[test]
fn parameters_keep_their_characters_among_clients_of_several_encodings() -> Result<()> {
    let server = Postgres::start()?;
    server.sql("create role \"caf\u{e9}\"")?;
    let pooler = Underpass::start(&transaction(&server).set("default_pool_size", "1"))?;
    let options = pooler.options("postgres", "postgres");
    let who = |client: &mut Client| -> Result<String> {
        let sql = "select encode(convert_to(session_user::text, 'UTF8'), 'hex') || pg_client_encoding()";
        Ok(client.query(sql)?.ok()?.value().unwrap_or_default().to_owned())
    };
    let (cafe, plain) = ("636166c3a9", "706f737467726573");
    let mut latin = Client::connect(&options.clone().parameter("client_encoding", "LATIN1"))?;
    let mut other_latin = Client::connect(&options.clone().parameter("client_encoding", "LATIN1"))?;
    let (mut utf, mut other_utf) = (Client::connect(&options)?, Client::connect(&options)?);
    for client in [&mut latin, &mut utf] {
        client.query(r#"set session authorization U&"caf\00e9""#)?.ok()?;
    }
    for _ in 0..2 {
        assert_eq!(who(&mut latin)?, format!("{cafe}LATIN1"));
        assert_eq!(who(&mut other_latin)?, format!("{plain}LATIN1"));
        assert_eq!(who(&mut utf)?, format!("{cafe}UTF8"), "{}", pooler.log());
        assert_eq!(who(&mut latin)?, format!("{cafe}LATIN1"));
        assert_eq!(who(&mut other_utf)?, format!("{plain}UTF8"));
    }
    Ok(())
}
