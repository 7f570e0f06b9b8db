// SPDX-License-Identifier: Apache-2.0
//! `mode = sync` and bad mirrors: clients wait for a bounded time and notice nothing else.

use std::time::{Duration, Instant};

use underpass_testkit::{AuthMethod, Batch, Client, Ini, Pooler, Postgres, Result, Underpass};

use crate::pair::{MODES, Pair, Row, eventually, garbage, garbage_at_first, server, table};

const SYNC: &str = "mode = sync\nsync_timeout = 2";

fn mirror(name: &str, port: u16, lines: &str) -> String {
    format!("[underpass:mirror:{name}]\ndatabases = *\nhost = 127.0.0.1\nport = {port}\n{lines}\n")
}

fn row(pooler: &Underpass, name: &str) -> Result<Row> {
    Ok(table(pooler, "SHOW MIRRORS")?.into_iter().find(|row| row["mirror"] == name).expect("a mirror"))
}

fn wait_state(pooler: &Underpass, name: &str, state: &str) -> Result<()> {
    eventually(&format!("{name} is {state}\n{}", pooler.log()), || {
        Ok(table(pooler, "SHOW MIRRORS")?.iter().any(|row| row["mirror"] == name && row["state"] == state))
    })
}

/// What clients wait is bounded by `sync_timeout`, on a loaded machine by some more.
fn assert_bounded(begun: Instant) {
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

fn number(row: &Row, column: &str) -> u64 {
    row[column].parse().expect("a number")
}

#[test]
fn a_mirror_that_refuses_logins() -> Result<()> {
    let here = Postgres::start()?;
    let there = Postgres::builder().hba("host all all all reject").start()?;
    let ini = Ini::for_server(&here).set("pool_mode", "transaction");
    let pooler = Underpass::start(&ini.tail(&mirror("m", there.port(), SYNC)))?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    wait_state(&pooler, "m", "down")?;
    let begun = Instant::now();
    for id in 0..100 {
        assert_eq!(client.query(&format!("select {id}"))?.value(), Some(&*id.to_string()));
    }
    assert_bounded(begun);
    eventually("all are counted", || {
        let row = row(&pooler, "m")?;
        Ok(number(&row, "transactions") >= 100 && row["not_ready"] == row["transactions"])
    })
}

/// It refuses those that come later: the client that waits for its session there waits no longer than `sync_timeout`.
#[test]
fn a_mirror_that_refuses_logins_later() -> Result<()> {
    let pair = Pair::start(SYNC)?;
    pair.both("create table t (id int)")?;
    pair.wait_on()?;
    let hba = pair.there.data_dir().join("pg_hba.conf");
    std::fs::write(&hba, "local all all trust\nhost all all all reject\n").expect("written");
    pair.there.sql("select pg_reload_conf()")?;
    let sql = "select pg_terminate_backend(pid) from pg_stat_activity where client_port > 0 and pid <> pg_backend_pid()";
    eventually("it refuses", || {
        pair.there.sql(sql)?;
        Ok(Client::connect(&pair.there.options("postgres", "postgres")).is_err())
    })?;
    let mut client = pair.client()?;
    let begun = Instant::now();
    for id in 0..20 {
        client.query(&format!("insert into t values ({id})"))?.ok()?;
    }
    assert_bounded(begun);
    assert_eq!(pair.here.sql_value("select count(*) from t")?, "20");
    let account = pair.settled()?;
    assert_ne!(account.0["state"], "on", "{account:?}");
    assert_eq!(account.get("dropped") + account.get("executed"), account.get("transactions"));
    Ok(())
}

#[test]
fn a_mirror_that_restarts() -> Result<()> {
    let mut pair = Pair::start(SYNC)?;
    pair.both("create table t (id int)")?;
    pair.wait_on()?;
    let mut client = pair.client()?;
    let insert =
        |client: &mut Client, id: u32| client.query(&format!("insert into t values ({id})"))?.ok().map(drop);
    for id in 0..10 {
        insert(&mut client, id)?;
    }
    // In the middle of a transaction: its session there is lost.
    client.query("begin")?.ok()?;
    insert(&mut client, 10)?;
    pair.there.restart()?;
    let begun = Instant::now();
    insert(&mut client, 11)?;
    client.query("commit")?.ok()?;
    for id in 12..40 {
        insert(&mut client, id)?;
    }
    assert_bounded(begun);
    assert_eq!(pair.here.sql_value("select count(*) from t")?, "40");
    pair.wait_state("failed")?;
    let account = pair.settled()?;
    assert!(account.get("disabled") > 0, "{account:?}");
    pair.pooler.console("ENABLE MIRROR next")?.ok()?;
    pair.wait_on()?;
    insert(&mut client, 100)?;
    insert(&mut client, 101)?;
    pair.settled()?;
    assert_eq!(pair.there.sql_value("select count(*) from t where id >= 100")?, "2");
    Ok(())
}

#[test]
fn garbage_from_a_mirror() -> Result<()> {
    let here = Postgres::start()?;
    let mock = garbage()?;
    let ini = Ini::for_server(&here).set("pool_mode", "transaction").set("server_tls_sslmode", "disable");
    let ini = ini.set("server_check_query", "").tail(&mirror("m", mock.port(), SYNC));
    let pooler = Underpass::start(&ini)?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    wait_state(&pooler, "m", "on")?;
    let begun = Instant::now();
    for id in 0..20 {
        assert_eq!(client.query(&format!("select {id}"))?.value(), Some(&*id.to_string()));
    }
    assert_bounded(begun);
    wait_state(&pooler, "m", "failed")?;
    let row = row(&pooler, "m")?;
    assert!(row["reason"].contains("bad packet"), "{row:?}");
    Ok(())
}

/// Before it has said who it is: it is never on.
#[test]
fn garbage_from_a_mirror_that_logs_in() -> Result<()> {
    let here = Postgres::start()?;
    for lines in ["mode = async", SYNC] {
        for mock in garbage_at_first()? {
            let ini = Ini::for_server(&here).set("pool_mode", "transaction");
            let ini = ini.set("server_tls_sslmode", "disable").set("server_check_query", "");
            let pooler = Underpass::start(&ini.tail(&mirror("m", mock.port(), lines)))?;
            let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
            for _ in 0..2 {
                let begun = Instant::now();
                for id in 0..20 {
                    assert_eq!(client.query(&format!("select {id}"))?.value(), Some(&*id.to_string()));
                }
                assert_bounded(begun);
                wait_state(&pooler, "m", "down")?;
            }
            eventually("all are counted", || {
                let row = row(&pooler, "m")?;
                Ok(number(&row, "transactions") >= 40 && row["not_ready"] == row["transactions"])
            })?;
            let row = row(&pooler, "m")?;
            assert!(row["reason"].starts_with("mirror: "), "{lines}: {row:?}");
            assert!(!mock.received().is_empty(), "it was asked");
        }
    }
    Ok(())
}

/// One is dropped from the set, the other stays; the time that the client waited is that of the one which was behind.
#[test]
fn of_two_mirrors_one_fails() -> Result<()> {
    let (here, good, slow) = (server()?, server()?, server()?);
    for server in [&here, &good, &slow] {
        server.sql("create table t (id int)")?;
    }
    let tail = mirror("a", good.port(), "mode = sync\nsync_timeout = 60") + &mirror("z", slow.port(), SYNC);
    let pooler = Underpass::start(&Ini::for_server(&here).set("pool_mode", "transaction").tail(&tail))?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    wait_state(&pooler, "a", "on")?;
    wait_state(&pooler, "z", "on")?;
    client.query("insert into t values (1)")?.ok()?;
    client.query("insert into t values (2)")?.ok()?;
    let mut blocker = Client::connect(&slow.superuser())?;
    blocker.query("begin; lock table t")?.ok()?;
    let held = |name| -> Result<u64> { Ok(number(&row(&pooler, name)?, "held_us")) };
    let before = (held("a")?, held("z")?);
    for id in 3..40 {
        client.query(&format!("insert into t values ({id})"))?.ok()?;
    }
    wait_state(&pooler, "z", "failed")?;
    let after = (held("a")?, held("z")?);
    assert!(after.1 - before.1 > 1_500_000, "{before:?} {after:?}");
    assert!(after.0 - before.0 < after.1 - before.1, "{before:?} {after:?}");
    assert_eq!(row(&pooler, "a")?["state"], "on");
    client.query("select 1")?.ok()?;
    eventually("the other holds the same", || {
        Ok(good.sql_value("select count(*) from t")? == "39"
            && here.sql_value("select count(*) from t")? == "39")
    })?;
    assert_eq!(row(&pooler, "a")?["dropped"], "0", "{}", pooler.log());
    Ok(())
}

/// The mirror wants a password, of another user, for another database.
#[test]
fn a_mirror_with_credentials_of_its_own() -> Result<()> {
    for lines in [SYNC, "mode = async"] {
        let here = Postgres::start()?;
        let there = Postgres::builder().auth(AuthMethod::Scram).user("mirror", "a secret").start()?;
        there.sql("create database copy owner mirror")?;
        here.sql("create table t (id int, who text default current_user)")?;
        let mut superuser = Client::connect(&there.superuser().database("copy"))?;
        superuser
            .query("create table t (id int, who text default current_user); alter table t owner to mirror")?
            .ok()?;
        let lines = format!("{lines}\nuser = mirror\npassword = a secret\ndbname = copy");
        let ini = Ini::for_server(&here).set("pool_mode", "transaction");
        let pooler = Underpass::start(&ini.tail(&mirror("m", there.port(), &lines)))?;
        let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
        wait_state(&pooler, "m", "on")?;
        client.query("insert into t values (1)")?.ok()?;
        eventually("it arrives", || {
            Ok(superuser.query("select string_agg(who, ',') from t")?.value() == Some("mirror"))
        })?;
        assert_eq!(here.sql_value("select string_agg(who, ',') from t")?, "postgres");
        drop(client);
        // The wrong one is refused, and told of.
        let lines = lines.replace("a secret", "another");
        let ini = Ini::for_server(&here).set("pool_mode", "transaction");
        pooler_refused(&ini.tail(&mirror("m", there.port(), &lines)))?;
    }
    Ok(())
}

fn pooler_refused(ini: &Ini) -> Result<()> {
    let pooler = Underpass::start(ini)?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    wait_state(&pooler, "m", "down")?;
    let begun = Instant::now();
    client.query("select 1")?.ok()?;
    assert!(begun.elapsed() < Duration::from_secs(30));
    let row = row(&pooler, "m")?;
    assert!(row["reason"].contains("password authentication failed"), "{row:?}");
    Ok(())
}

/// What a client said while the mirror was asynchronous comes before what it says then, also when it waits for a server meanwhile.
#[test]
fn a_reload_from_async_to_sync_keeps_the_order_of_a_session() -> Result<()> {
    let settings = [("pool_mode", "transaction"), ("default_pool_size", "1")];
    let mut pair = Pair::start_with(&settings, "pool_size = 4")?;
    pair.both("create table t (id int); create table seen (rows int)")?;
    pair.there.sql(
        "create function slow() returns trigger language plpgsql as 'begin perform pg_sleep(0.1); return new; end';
         create trigger slow before insert on t for each row execute function slow()",
    )?;
    pair.wait_on()?;
    let (mut holder, mut client) = (pair.client()?, pair.client()?);
    for id in 0..20 {
        client.query(&format!("insert into t values ({id})"))?.ok()?;
    }
    holder.query("begin")?.ok()?;
    client.send(&Batch::new().query("insert into seen select count(*) from t"))?;
    eventually("it waits for a server", || {
        let pools = table(&pair.pooler, "SHOW POOLS")?;
        Ok(pools.iter().any(|pool| pool["database"] == "postgres" && pool["cl_waiting"] == "1"))
    })?;
    pair.reload(Some("pool_size = 4\nmode = sync\nsync_timeout = 30"))?;
    assert!(pair.account()?.get("queued") > 5, "the mirror is not that fast");
    holder.query("commit")?.ok()?;
    client.response()?.ok()?;
    client.query("insert into seen select count(*) from t")?.ok()?;
    let account = pair.settled()?;
    // A holder who was in its lane already is told of when it is over, which is too late.
    let late = account.get("not_ready");
    assert!(account.get("dropped") == late && late <= 1, "{account:?}");
    assert_eq!(account.0["state"], "on", "{account:?}");
    assert_eq!(pair.here.sql_value("select string_agg(rows::text, ',') from seen")?, "20,20");
    pair.assert_same("select rows from seen")
}

/// A mirror is cancelled where the primary was, not where the request came too late to strike that.
#[test]
fn a_cancel_strikes_where_it_struck_the_primary() -> Result<()> {
    let pair = Pair::start("mode = sync\nsync_timeout = 30")?;
    let work = |end: &str| {
        format!(
            "create function work() returns int language plpgsql as 'begin perform pg_sleep(2); return 1; {end} end'"
        )
    };
    // As if it were at its last bytes.
    pair.here.sql(&work("exception when query_canceled then return 1;"))?;
    pair.there.sql(&work(""))?;
    pair.both("create table t (id int)")?;
    pair.wait_on()?;
    let mut client = pair.client()?;
    let begun = Instant::now();
    for (statement, is_cancelled) in [("select work()", false), ("select pg_sleep(40)", true)] {
        let active =
            format!("select count(*) from pg_stat_activity where query = '{statement}' and state = 'active'");
        for in_block in [false, true] {
            if in_block {
                client.query("begin")?.ok()?;
            }
            client.send(&Batch::new().query(statement))?;
            eventually("both are at it", || {
                Ok(pair.here.sql_value(&active)? == "1" && pair.there.sql_value(&active)? == "1")
            })?;
            client.cancel()?;
            let error = client.response()?.ok().err();
            let code = error.as_ref().and_then(|error| error.sqlstate());
            assert_eq!(code, is_cancelled.then_some("57014"));
            if in_block && is_cancelled {
                client.query("rollback")?.ok()?;
            }
            client.query("insert into t values (1)")?.ok()?;
            if in_block && !is_cancelled {
                client.query("commit")?.ok()?;
            }
        }
    }
    assert!(begun.elapsed() < Duration::from_secs(30), "it ran to its end there: {:?}", begun.elapsed());
    let rows = pair.differences()?;
    assert!(rows.iter().all(|row| row["differing"] == "0"), "{rows:?}");
    assert_eq!(pair.there.sql_value("select count(*) from t")?, "4");
    let account = pair.settled()?;
    assert_eq!((&*account.0["state"], account.get("dropped")), ("on", 0), "{account:?}");
    Ok(())
}

/// What a mirror answers more often than the primary is not carried over to the session's next transactions.
#[test]
fn a_surplus_answer_shifts_nothing() -> Result<()> {
    let pair = Pair::start("mode = sync\nsync_timeout = 30")?;
    pair.here.sql("create table gone (id int)")?;
    pair.wait_on()?;
    let mut client = pair.client()?;
    let copy = Batch::new().parse("", "copy gone from stdin").bind("", "", &[]);
    client.send(&copy.describe_portal("").execute("", 0).sync())?;
    client.send(&Batch::new().copy_data(b"1\n").copy_done().sync())?;
    client.response()?.ok()?;
    for n in 1..=5 {
        let rows = (0..n).map(|n| format!("({n})")).collect::<Vec<_>>().join(",");
        client.query(&format!("select * from (values {rows}) v{n}"))?.ok()?;
    }
    let rows = pair.differences()?;
    assert!(rows.iter().any(|row| row["query"].contains("copy gone") && row["differing"] == "1"), "{rows:?}");
    let shifted: Vec<_> =
        rows.iter().filter(|row| row["query"].contains("select") && row["differing"] != "0").collect();
    assert!(shifted.is_empty(), "{shifted:?}");
    Ok(())
}

/// With `sync_each = transaction` statements of a block do not wait for the mirror, and what comes behind the block does.
#[test]
fn a_block_waits_when_it_is_over() -> Result<()> {
    let pair = Pair::start(MODES[2])?;
    pair.both("create table t (id int)")?;
    pair.wait_on()?;
    let mut client = pair.client()?;
    client.query("insert into t values (0)")?.ok()?;
    pair.settled()?;
    let mut blocker = Client::connect(&pair.there.superuser())?;
    blocker.query("begin")?;
    blocker.query("lock table t")?;
    for statement in ["begin", "insert into t values (1)", "insert into t values (2)", "commit"] {
        client.query(statement)?.ok()?;
    }
    client.send(&Batch::new().query("insert into t values (3)"))?;
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(pair.here.sql_value("select count(*) from t")?, "3", "the next one waits");
    blocker.query("rollback")?;
    client.response()?.ok()?;
    let account = pair.settled()?;
    assert_eq!((&*account.0["state"], account.get("dropped")), ("on", 0), "{account:?}");
    pair.assert_same("select id from t order by id")
}

/// Clients that wait for each other's rows meet them in another order there at times. Where statements wait, two of them may then wait
/// for each other over both servers until `sync_timeout`; where transactions do, what is said there waits for nobody's next statement.
#[test]
fn writers_that_wait_for_each_other_do_not_wait_for_ever() -> Result<()> {
    let pair = Pair::start(&format!("{}\npool_size = 8", MODES[2]))?;
    pair.both(
        "create table t (id int primary key, n int); insert into t select i, 0 from generate_series(1, 2) i",
    )?;
    pair.wait_on()?;
    std::thread::scope(|scope| {
        let writers = (0..8).map(|_| {
            scope.spawn(|| -> Result<()> {
                let mut client = pair.client()?;
                for _ in 0..100 {
                    for statement in [
                        "begin",
                        "update t set n = n + 1 where id = 1",
                        "update t set n = n + 1 where id = 2",
                        "commit",
                    ] {
                        client.query(statement)?.ok()?;
                    }
                }
                Ok(())
            })
        });
        writers.collect::<Vec<_>>().into_iter().try_for_each(|writer| writer.join().expect("no panic"))
    })?;
    let account = pair.settled()?;
    assert_eq!((&*account.0["state"], account.get("dropped")), ("on", 0), "{account:?}");
    assert_eq!(pair.there.sql_value("select string_agg(n::text, ',') from t")?, "800,800");
    pair.assert_same("select id, n from t order by id")
}

/// A mirror that begins with a transaction when it is over here may take as long as that took here, and `sync_timeout` more.
#[test]
fn a_long_transaction_is_no_delay_of_the_mirror_s() -> Result<()> {
    let pair = Pair::start("mode = sync\nsync_each = transaction\nsync_timeout = 0.5")?;
    pair.both("create table t (id int)")?;
    pair.wait_on()?;
    let mut client = pair.client()?;
    for statements in
        [&["select pg_sleep(1.2)"][..], &["begin", "insert into t select 1 from pg_sleep(1.2)", "commit"]]
    {
        for statement in statements {
            client.query(statement)?.ok()?;
        }
        client.query("insert into t values (2)")?.ok()?;
    }
    let account = pair.settled()?;
    assert_eq!((&*account.0["state"], account.get("dropped")), ("on", 0), "{account:?}");
    pair.assert_same("select id from t order by id")?;
    // It is its fault where it takes longer than that.
    pair.there.sql(
        "create function slow() returns trigger language plpgsql as 'begin perform pg_sleep(4); return new; end';
         create trigger slow before insert on t for each row execute function slow()",
    )?;
    client.query("insert into t values (3)")?.ok()?;
    let begun = Instant::now();
    client.query("select 1")?.ok()?;
    assert!(begun.elapsed() < Duration::from_secs(3), "{:?}", begun.elapsed());
    pair.wait_state("failed")
}

/// PAUSE and SUSPEND keep a mirror from what its clients wait for: that is not its fault, nor is what rests there while a transaction goes on.
#[test]
fn what_the_pooler_itself_keeps_from_a_mirror_is_not_its_delay() -> Result<()> {
    for mode in ["sync_each = statement", "sync_each = transaction"] {
        let settings =
            [("pool_mode", "transaction"), ("client_idle_timeout", "1.5"), ("query_wait_timeout", "2")];
        let pair = Pair::start_with(&settings, &format!("mode = sync\nsync_timeout = 0.5\n{mode}"))?;
        pair.both("create table t (id int)")?;
        pair.wait_on()?;
        let mut client = pair.client()?;
        client.query("insert into t values (0)")?.ok()?;
        pair.settled()?;
        client.query("begin")?.ok()?;
        for _ in 0..6 {
            client.query("insert into t values (1)")?.ok()?;
            std::thread::sleep(Duration::from_millis(400));
        }
        let pausing = std::thread::scope(|scope| -> Result<()> {
            let pausing = scope.spawn(|| pair.pooler.console("PAUSE")?.ok().map(drop));
            std::thread::sleep(Duration::from_millis(200));
            client.query("commit")?.ok()?;
            pausing.join().expect("no panic")
        });
        pausing?;
        client.send(&Batch::new().query("insert into t values (2)"))?;
        // As long as `query_wait_timeout` lets it.
        std::thread::sleep(Duration::from_millis(1200));
        pair.pooler.console("RESUME")?.ok()?;
        client.response()?.ok()?;
        let state = |when: &str| -> Result<()> {
            let account = pair.settled()?;
            assert_eq!(
                (&*account.0["state"], account.get("dropped")),
                ("on", 0),
                "{mode}, {when}: {account:?}"
            );
            Ok(())
        };
        state("PAUSE")?;
        client.query("insert into t values (3)")?.ok()?;
        let mut console = pair.pooler.admin()?;
        console.query("SUSPEND")?.ok()?;
        client.send(&Batch::new().query("insert into t values (4)"))?;
        std::thread::sleep(Duration::from_millis(1000));
        console.query("RESUME")?.ok()?;
        client.response()?.ok()?;
        state("SUSPEND")?;
        pair.assert_same("select id from t order by id")?;
        // And the client may rest for too long.
        std::thread::sleep(Duration::from_millis(3000));
        assert!(client.query("select 1").is_err(), "client_idle_timeout");
        let mut client = pair.client()?;
        client.query("select 1")?.ok()?;
        state("client_idle_timeout")?;
    }
    Ok(())
}

/// A client that is held when SUSPEND comes is held on behind it. The time between is not the mirror's.
#[test]
fn a_client_that_suspend_found_held_is_held_on() -> Result<()> {
    for mode in ["sync_each = statement", "sync_each = transaction"] {
        let settings = [("pool_mode", "transaction")];
        let pair = Pair::start_with(&settings, &format!("mode = sync\nsync_timeout = 3\n{mode}"))?;
        pair.both("create table t (id int)")?;
        pair.wait_on()?;
        let mut client = pair.client()?;
        client.query("insert into t values (0)")?.ok()?;
        pair.settled()?;
        let mut locker = Client::connect(&pair.there.superuser())?;
        locker.query("begin")?.ok()?;
        locker.query("lock table t in access exclusive mode")?.ok()?;
        client.query("insert into t values (1)")?.ok()?;
        client.send(&Batch::new().query("insert into t values (2)"))?;
        std::thread::sleep(Duration::from_millis(200));
        let mut console = pair.pooler.admin()?;
        console.query("SUSPEND")?.ok()?;
        std::thread::sleep(Duration::from_millis(4000));
        console.query("RESUME")?.ok()?;
        // Longer than what was left of its time, and shorter than all of it.
        std::thread::sleep(Duration::from_millis(700));
        locker.query("commit")?.ok()?;
        client.response()?.ok()?;
        let account = pair.settled()?;
        assert_eq!((&*account.0["state"], account.get("dropped")), ("on", 0), "{mode}: {account:?}");
        pair.assert_same("select id from t order by id")?;
    }
    Ok(())
}

/// `query_wait_timeout` is for clients, whoever a mirror's sessions log in as. What cannot begin because its pool is paused waits for RESUME.
#[test]
fn a_mirror_in_a_paused_pool_may_wait_for_longer_than_clients_may() -> Result<()> {
    // With each statement sent there as it comes, the session has its connection before the pool is paused.
    for (mode, user) in [(MODES[0], "user = shadow"), (MODES[2], "")] {
        let settings = [("pool_mode", "transaction"), ("query_wait_timeout", "1")];
        let (here, there) = (Postgres::start()?, Postgres::start()?);
        for server in [&here, &there] {
            server.sql("create table t (id int); create role shadow superuser login")?;
        }
        let ini = settings.iter().fold(Ini::for_server(&here), |ini, (key, value)| ini.set(key, value));
        let pooler = Underpass::start(&ini.tail(&mirror("m", there.port(), &format!("{mode}\n{user}"))))?;
        let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
        wait_state(&pooler, "m", "on")?;
        let arrives = |what: &str, count: &str| {
            eventually(what, || Ok(there.sql_value("select count(*) from t")? == count))
        };
        client.query("insert into t values (0)")?.ok()?;
        arrives("the first", "1")?;
        client.query("begin")?.ok()?;
        client.query("insert into t values (1)")?.ok()?;
        let paused = std::thread::scope(|scope| -> Result<()> {
            let pausing = scope.spawn(|| pooler.console("PAUSE")?.ok().map(drop));
            std::thread::sleep(Duration::from_millis(300));
            client.query("commit")?.ok()?;
            pausing.join().expect("no panic")
        });
        paused?;
        // Whoever has rested is looked at every few seconds.
        std::thread::sleep(Duration::from_secs(6));
        pooler.console("RESUME")?.ok()?;
        arrives("what waited", "2")?;
        client.query("insert into t values (2)")?.ok()?;
        arrives("what comes after it", "3")?;
        let account = row(&pooler, "m")?;
        assert_eq!(
            (&*account["state"], number(&account, "dropped")),
            ("on", 0),
            "{mode} {user}: {account:?}"
        );
    }
    Ok(())
}

/// In session pooling a session has one of its own there. If both end, the mirror has not failed, though nothing of the block has gone there.
#[test]
fn a_session_that_rests_there_ends_with_that_of_the_primary() -> Result<()> {
    let pair = Pair::start_with(&[("pool_mode", "session")], MODES[2])?;
    pair.both("create table t (id int)")?;
    pair.wait_on()?;
    let mut client = pair.client()?;
    client.query("insert into t values (1)")?.ok()?;
    pair.settled()?;
    client.query("begin")?.ok()?;
    client.query("insert into t values (2)")?.ok()?;
    for server in [&pair.there, &pair.here] {
        let end = "select count(pg_terminate_backend(pid)) from pg_stat_activity where query ilike 'insert into t%'";
        eventually("its session ends", || Ok(server.sql_value(end)? == "1"))?;
        std::thread::sleep(Duration::from_millis(200));
    }
    assert!(client.query("select 1").is_err());
    let mut client = pair.client()?;
    client.query("insert into t values (3)")?.ok()?;
    client.query("select 1")?.ok()?;
    let account = pair.settled()?;
    assert_eq!((&*account.0["state"], account.get("dropped")), ("on", 1), "{account:?}");
    pair.assert_same("select id from t order by id")
}
