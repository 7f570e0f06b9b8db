// SPDX-License-Identifier: Apache-2.0
//! What RELOAD changes under clients that stay: mirrors that leave and come back, databases that are mirrored, how long sessions last.

use std::thread;
use std::time::{Duration, Instant};

use underpass_testkit::{Batch, Client, Ini, Pooler, Postgres, Result, Underpass};

use crate::pair::{MODES, Pair, Row, eventually, table};

/// RELOADs by which the clients of a mirror leave it: it is for another database, so that one that comes back is another of the same name; or it is
/// the same one, and one client in a hundred stays.
const LEAVES: [(&str, &str); 2] = [("another", "pool_size = 4"), ("*", "pool_size = 4\nsample = 1")];

/// A client's worker hears of a RELOAD so much later at most.
fn moment() {
    thread::sleep(Duration::from_millis(500));
}

/// Holds up who writes to table `t` on the mirror; it may be read.
fn blocker(pair: &Pair) -> Result<Client> {
    let mut blocker = Client::connect(&pair.there.superuser())?;
    blocker.query("begin; lock table t in share row exclusive mode")?.ok()?;
    Ok(blocker)
}

fn insert(client: &mut Client, id: u32) -> Result<()> {
    client.query(&format!("insert into t values ({id})"))?.ok().map(drop)
}

/// What was said to a mirror before it left is said there before what comes when it is back, though it is another session that says it.
#[test]
fn a_mirror_that_leaves_and_comes_back_is_told_things_in_their_order() -> Result<()> {
    for (databases, lines) in LEAVES {
        for mode in MODES {
            let mut pair = Pair::start("pool_size = 4")?;
            pair.both("create table t (id int); create table seen (rows int)")?;
            pair.wait_on()?;
            let mut client = pair.client()?;
            let mut blocker = blocker(&pair)?;
            for id in 0..5 {
                insert(&mut client, id)?;
            }
            eventually("they wait", || Ok(pair.account()?.get("queued") == 5))?;
            pair.reload_for(databases, lines)?;
            moment();
            client.query("select 'not there'")?.ok()?;
            pair.reload(Some(&format!("pool_size = 4\n{mode}")))?;
            pair.wait_on()?;
            moment();
            let look = Batch::new().query("insert into seen select count(*) from t");
            client.send(&look)?;
            client.response()?.ok()?;
            client.send(&look)?;
            // Time enough for a session that does not wait.
            moment();
            assert_eq!(pair.there.sql_value("select count(*) from seen")?, "0", "{lines}, {mode}");
            // The client is held by what it said first, as by any session that is behind.
            let passed = if mode != MODES[0] { "1" } else { "2" };
            assert_eq!(pair.here.sql_value("select count(*) from seen")?, passed, "{lines}, {mode}");
            blocker.query("rollback")?.ok()?;
            client.response()?.ok()?;
            client.send(&look)?;
            client.response()?.ok()?;
            let account = pair.settled()?;
            assert_eq!((&*account.0["state"], account.get("dropped")), ("on", 0), "{mode}: {account:?}");
            assert_eq!(pair.there.sql_value("select string_agg(rows::text, ',') from seen")?, "5,5,5");
            // And it goes on, in its mode.
            client.query("insert into seen values (6)")?.ok()?;
            client.query("select 1")?.ok()?;
            if mode != MODES[0] {
                pair.assert_same("select count(*) from seen")?;
            }
            pair.settled()?;
            pair.assert_same("select count(*) from seen")?;
            pair.assert_same("select count(*) from t")?;
        }
    }
    Ok(())
}

/// Its client may leave while its second session waits for the first: all of it is played.
#[test]
fn a_client_that_leaves_behind_a_mirror_that_came_back() -> Result<()> {
    for mode in MODES {
        let mut pair = Pair::start("pool_size = 4")?;
        pair.both("create table t (id int); create table seen (rows int)")?;
        pair.wait_on()?;
        let mut client = pair.client()?;
        let mut blocker = blocker(&pair)?;
        insert(&mut client, 1)?;
        eventually("it waits", || Ok(pair.account()?.get("queued") == 1))?;
        pair.reload_for(LEAVES[0].0, LEAVES[0].1)?;
        pair.reload(Some(&format!("pool_size = 4\n{mode}")))?;
        pair.wait_on()?;
        client.query("insert into seen select count(*) from t")?.ok()?;
        client.terminate()?;
        thread::sleep(Duration::from_millis(300));
        blocker.query("rollback")?.ok()?;
        let account = pair.settled()?;
        assert_eq!((&*account.0["state"], account.get("dropped")), ("on", 0), "{mode}: {account:?}");
        assert_eq!(pair.there.sql_value("select string_agg(rows::text, ',') from seen")?, "1", "{mode}");
    }
    Ok(())
}

/// What clients left at a mirror is the mirror's all the same: it ends with DISABLE MIRROR, and when RELOAD removes the mirror.
#[test]
fn what_was_left_at_a_mirror_ends_with_it() -> Result<()> {
    for (leaves, is_removed) in
        [(Some(LEAVES[0]), false), (Some(LEAVES[1]), false), (Some(LEAVES[0]), true), (None, true)]
    {
        let mut pair = Pair::start("pool_size = 4")?;
        pair.both("create table t (id int)")?;
        pair.wait_on()?;
        let mut client = pair.client()?;
        let mut blocker = blocker(&pair)?;
        for id in 0..3 {
            insert(&mut client, id)?;
        }
        eventually("it waits there", || pair.waits_there())?;
        if let Some((databases, lines)) = leaves {
            pair.reload_for(databases, lines)?;
            moment();
            assert!(pair.waits_there()?, "{leaves:?}: it is played to the end");
        }
        if is_removed {
            pair.reload(None)?;
        } else {
            pair.pooler.console("DISABLE MIRROR next")?.ok()?;
        }
        eventually("nothing is said there any more", || Ok(!pair.waits_there()?))?;
        blocker.query("rollback")?.ok()?;
        moment();
        assert_eq!(pair.there.sql_value("select count(*) from t")?, "0", "{leaves:?}, {is_removed}");
        if is_removed {
            assert_eq!(
                pair.pooler.log().matches("removed; 3 transactions that wait for it are dropped").count(),
                1
            );
        }
        // One that comes back is another matter.
        pair.reload(Some("pool_size = 4"))?;
        pair.pooler.console("ENABLE MIRROR next")?.ok()?;
        pair.wait_on()?;
        insert(&mut client, 9)?;
        let there = "select string_agg(id::text, ',') from t";
        eventually("it is there", || Ok(pair.there.sql_value(there)? == "9"))?;
    }
    Ok(())
}

/// A session that waits for one which its client left there holds it, as the mirror itself does: for `sync_timeout`. Then both end.
#[test]
fn waiting_for_what_was_left_at_a_mirror_is_bounded() -> Result<()> {
    for (databases, lines) in LEAVES {
        let mut pair = Pair::start("pool_size = 4")?;
        pair.both("create table t (id int); create table seen (id int)")?;
        pair.wait_on()?;
        let mut client = pair.client()?;
        let mut blocker = blocker(&pair)?;
        insert(&mut client, 1)?;
        eventually("it waits there", || pair.waits_there())?;
        pair.reload_for(databases, lines)?;
        moment();
        pair.reload(Some("pool_size = 4\nmode = sync\nsync_timeout = 2"))?;
        pair.wait_on()?;
        moment();
        let begun = Instant::now();
        for id in 0..20 {
            client.query(&format!("insert into seen values ({id})"))?.ok()?;
        }
        let took = begun.elapsed();
        assert!(took > Duration::from_millis(1500) && took < Duration::from_secs(10), "{lines}: {took:?}");
        let account = pair.settled()?;
        assert_eq!(account.0["state"], "failed", "{lines}: {account:?}");
        assert!(account.0["reason"].contains("sync_timeout"), "{lines}: {account:?}");
        assert_eq!(
            account.get("disabled"),
            account.get("transactions") - account.get("executed"),
            "{lines}: {account:?}"
        );
        eventually("nothing is said there any more", || Ok(!pair.waits_there()?))?;
        blocker.query("rollback")?.ok()?;
        pair.pooler.console("ENABLE MIRROR next")?.ok()?;
        pair.wait_on()?;
        insert(&mut client, 2)?;
        pair.settled()?;
        assert_eq!(pair.there.sql_value("select string_agg(id::text, ',') from t")?, "2", "{lines}");
        assert_eq!(pair.there.sql_value("select count(*) from seen")?, "0", "{lines}");
    }
    Ok(())
}

#[test]
fn only_the_databases_that_are_named_are_mirrored() -> Result<()> {
    let (here, there) = (Postgres::start()?, Postgres::start()?);
    for server in [&here, &there] {
        for name in ["one", "two", "three"] {
            server.sql(&format!("create database {name}"))?;
            let mut own = Client::connect(&server.superuser().database(name))?;
            own.query("create table t (id int)")?.ok()?;
        }
    }
    let rows = |server: &Postgres, name: &str| -> Result<String> {
        let mut own = Client::connect(&server.superuser().database(name))?;
        let answer = own.query("select coalesce(string_agg(id::text, ',' order by id), '') from t")?;
        Ok(answer.value().unwrap_or_default().to_owned())
    };
    let ini = |names: &str| {
        Ini::for_server(&here).set("pool_mode", "transaction").tail(&format!(
            "[underpass:mirror:m]\ndatabases = {names}\nhost = 127.0.0.1\nport = {}",
            there.port()
        ))
    };
    let mut pooler = Underpass::start(&ini("one, three"))?;
    let connect = |name| Client::connect(&pooler.options("postgres", name));
    let mut clients = [connect("one")?, connect("two")?, connect("three")?];
    let mirrored = |pooler: &Underpass| -> Result<Vec<String>> {
        let mirrors = table(pooler, "SHOW MIRRORS")?;
        let on = mirrors.into_iter().filter(|row| row["state"] == "on");
        Ok(on.map(|row| row["database"].clone()).collect())
    };
    eventually("they are on", || Ok(mirrored(&pooler)? == ["one", "three"]))?;
    clients.iter_mut().try_for_each(|client| insert(client, 1))?;
    eventually("they are there", || Ok(rows(&there, "one")? == "1" && rows(&there, "three")? == "1"))?;
    pooler.rewrite(&ini("two,one"))?;
    pooler.console("RELOAD")?.ok()?;
    eventually("the list has changed", || {
        clients.iter_mut().try_for_each(|client| client.query("select 1")?.ok().map(drop))?;
        Ok(mirrored(&pooler)? == ["one", "two"])
    })?;
    clients.iter_mut().try_for_each(|client| insert(client, 2))?;
    eventually("they are there", || Ok(rows(&there, "one")? == "1,2" && rows(&there, "two")? == "2"))?;
    thread::sleep(Duration::from_millis(300));
    assert_eq!(rows(&there, "three")?, "1", "it is in the list no more");
    assert_eq!(table(&pooler, "SHOW MIRRORS")?.len(), 2);
    assert!(["one", "two", "three"].iter().all(|name| rows(&here, name).is_ok_and(|ids| ids == "1,2")));
    Ok(())
}

/// State that a session keeps would be lost there, or that of others be found.
#[test]
fn a_mirror_s_user_with_another_pool_mode_gets_nothing_and_is_told_of_once() -> Result<()> {
    for mode in MODES {
        let (here, there) = (Postgres::start()?, Postgres::start()?);
        for server in [&here, &there] {
            server.sql("create table t (id int)")?;
        }
        there.sql("create role mirror superuser login")?;
        let tail = format!(
            "[underpass:mirror:m]\ndatabases = *\nhost = 127.0.0.1\nport = {}\nuser = mirror\n{mode}",
            there.port()
        );
        let ini = Ini::for_server(&here).set("pool_mode", "transaction").tail(&tail);
        let mut pooler = Underpass::start(&ini.clone().user("mirror", "pool_mode=session"))?;
        let connect = |pooler: &Underpass| Client::connect(&pooler.options("postgres", "postgres"));
        let mut clients = [connect(&pooler)?, connect(&pooler)?];
        let mirror = |pooler: &Underpass| -> Result<Row> { Ok(table(pooler, "SHOW MIRRORS")?.remove(0)) };
        eventually("it is on", || Ok(mirror(&pooler)?["state"] == "on"))?;
        for id in 0..3 {
            clients.iter_mut().try_for_each(|client| insert(client, id))?;
        }
        eventually("all are counted", || Ok(mirror(&pooler)?["session_state"] == "6"))?;
        let row = mirror(&pooler)?;
        assert_eq!((&*row["executed"], &*row["dropped"], &*row["state"]), ("0", "6", "on"), "{row:?}");
        assert_eq!(there.sql_value("select count(*) from t")?, "0");
        assert_eq!(pooler.log().matches("its user mirror has another pool_mode").count(), 1);
        // Those that come when it is the same are sent.
        pooler.rewrite(&ini)?;
        pooler.console("RELOAD")?.ok()?;
        insert(&mut connect(&pooler)?, 9)?;
        eventually("it is there", || Ok(there.sql_value("select string_agg(id::text, ',') from t")? == "9"))?;
    }
    Ok(())
}

/// What did not go there while sessions could be had anew cannot be had any more when they last.
#[test]
fn a_reload_to_session_pooling_leaves_out_whom_something_is_missing_of() -> Result<()> {
    for mode in MODES {
        let mut pair = Pair::start(mode)?;
        pair.both("create table t (id int)")?;
        pair.wait_on()?;
        let (mut lacking, mut whole) = (pair.client()?, pair.client()?);
        insert(&mut whole, 1)?;
        insert(&mut lacking, 2)?;
        pair.settled()?;
        pair.pooler.console("DISABLE MIRROR next")?.ok()?;
        lacking.query("set datestyle = 'German'")?.ok()?;
        eventually("it is counted", || Ok(pair.settled()?.get("disabled") == 1))?;
        pair.pooler.console("ENABLE MIRROR next")?.ok()?;
        pair.wait_on()?;
        insert(&mut whole, 3)?;
        pair.settled()?;
        pair.set("pool_mode", "session");
        pair.reload(Some(mode))?;
        insert(&mut lacking, 4)?;
        insert(&mut whole, 5)?;
        insert(&mut pair.client()?, 6)?;
        let account = pair.settled()?;
        let dropped = (account.get("session_state"), account.get("dropped"), &*account.0["state"]);
        assert_eq!(dropped, (1, 2, "on"), "{mode}: {account:?}");
        let there = pair.there.sql_value("select string_agg(id::text, ',' order by id) from t")?;
        assert_eq!(there, "1,2,3,5,6", "{mode}");
    }
    Ok(())
}

#[test]
fn a_mirror_that_comes_back_has_the_queue_that_it_is_given_then() -> Result<()> {
    let mut pair = Pair::start("queue_bytes = 1000000")?;
    pair.both("create table t (v text)")?;
    pair.wait_on()?;
    let mut client = pair.client()?;
    let long = format!("insert into t values ('{}')", "x".repeat(5000));
    client.query(&long)?.ok()?;
    assert_eq!(pair.settled()?.get("dropped"), 0);
    for (queue, too_large) in [("queue_bytes = 2000", 1), ("queue_bytes = 1000000", 0)] {
        pair.reload(None)?;
        client.query("select 1")?.ok()?;
        pair.reload(Some(queue))?;
        pair.wait_on()?;
        let before = pair.settled()?.get("too_large");
        client.query(&long)?.ok()?;
        let account = pair.settled()?;
        assert_eq!(account.get("too_large") - before, too_large, "{queue}: {account:?}");
    }
    assert_eq!(pair.there.sql_value("select count(*) from t")?, "2");
    Ok(())
}

/// Its text is known when it is used, though nobody listened when it was prepared.
#[test]
fn a_statement_that_was_prepared_while_the_mirror_came_is_known() -> Result<()> {
    for mode in MODES {
        let mut pair = Pair::start("")?;
        pair.both("create table t (id int)")?;
        pair.reload(None)?;
        let mut client = pair.client()?;
        client.query("begin")?.ok()?;
        pair.reload(Some(mode))?;
        pair.wait_on()?;
        client.exchange(&Batch::new().parse("ins", "insert into t values ($1)").sync())?;
        client.query("commit")?.ok()?;
        for id in ["1", "2"] {
            client.exchange(&Batch::new().bind("", "ins", &[Some(id)]).execute("", 0).sync())?;
        }
        let rows = pair.differences()?;
        pair.assert_same("select id from t order by id")?;
        assert!(!rows.iter().any(|row| row["query"].contains("cannot be parsed")), "{mode}: {rows:?}");
        let row = rows.iter().find(|row| row["query"] == "insert into t values ($1)").expect("compared");
        assert_eq!((&*row["compared"], &*row["differing"]), ("2", "0"), "{mode}: {row:?}");
    }
    Ok(())
}

/// Nobody reads what is said while no mirror is on: what it prepared and closed is known all the same, and it is counted, to the transaction.
#[test]
fn what_was_prepared_while_the_mirror_was_off_is_known() -> Result<()> {
    for mode in MODES {
        let pair = Pair::start(mode)?;
        pair.both("create table t (id int)")?;
        pair.wait_on()?;
        let mut client = pair.client()?;
        let named = |name, id| Batch::new().bind("", name, &[Some(id)]).execute("", 0).sync();
        let texts =
            ["insert into t values ($1)", "insert into t values ($1 + 10)", "insert into t values ($1 + 20)"];
        client.exchange(&Batch::new().parse("stays", texts[0]).parse("changes", texts[0]).sync())?;
        client.exchange(&named("changes", "1"))?;
        let before = pair.settled()?;
        pair.pooler.console("DISABLE MIRROR next")?.ok()?;
        client.exchange(&Batch::new().close_statement("changes").parse("changes", texts[1]).sync())?;
        client.query("begin")?.ok()?;
        client.exchange(&Batch::new().parse("new", texts[2]).sync())?;
        client.query("commit")?.ok()?;
        client.exchange(&named("new", "1"))?;
        let pipeline = Batch::new().extended("select 1", &[]).sync();
        client.exchange(&pipeline)?;
        let account = pair.settled()?;
        assert_eq!(account.get("disabled") - before.get("disabled"), 4, "{mode}: {account:?}");
        assert_eq!(account.get("executed"), before.get("executed"), "{mode}: {account:?}");
        pair.pooler.console("ENABLE MIRROR next")?.ok()?;
        pair.wait_on()?;
        // What was not sent is not there.
        pair.both("delete from t")?;
        for name in ["stays", "changes", "new"] {
            client.exchange(&named(name, "2"))?;
        }
        let rows = pair.differences()?;
        pair.assert_same("select id from t order by id")?;
        let mut compared: Vec<_> =
            rows.iter().map(|row| (&*row["query"], &*row["compared"], &*row["differing"])).collect();
        compared.sort();
        let expected =
            [("insert into t values ($1 + $2)", "2", "0"), ("insert into t values ($1)", "1", "0")];
        assert_eq!(compared, expected, "{mode}: {rows:?}");
        let dropped = pair.settled()?.get("dropped") - before.get("dropped");
        assert_eq!(dropped, 4, "{mode}");
    }
    Ok(())
}
