// SPDX-License-Identifier: Apache-2.0
//! What clients say arrives whole, in order, with the state of their sessions.

use std::thread;
use std::time::{Duration, Instant};

use underpass_testkit::{Batch, Client, Pooler, Result};

use crate::pair::{MODES, Pair, eventually, eventually_or_not, pgbench};

pub const T: &str = "create table t (id int primary key, v text)";
pub const ALL: &str = "select id, v from t order by id";

/// Everything that a session can say, in an order that needs each part to have arrived.
pub fn say_everything(client: &mut Client) -> Result<()> {
    client.query("insert into t values (1, 'simple')")?;
    // Named statements, parameters, a pipeline of two transactions in one batch of bytes.
    client.exchange(&Batch::new().parse("ins", "insert into t values ($1, $2)").sync())?;
    for id in 2..5 {
        let bind = Batch::new().bind("", "ins", &[Some(&id.to_string()), Some("named")]);
        client.exchange(&bind.execute("", 0).sync())?;
    }
    let pipeline = Batch::new()
        .bind("", "ins", &[Some("5"), None])
        .execute("", 0)
        .sync()
        .extended("insert into t values ($1, $2)", &[Some("6"), Some("unnamed")])
        .sync();
    client.exchange(&pipeline)?;
    // Transactions, a failing one, savepoints.
    client.query("begin")?;
    client.query("insert into t values (7, 'block')")?;
    client.query("savepoint s")?;
    assert!(client.query("insert into t values (7, 'twice')").is_err());
    client.query("rollback to s")?;
    client.query("commit")?;
    client.query("begin; insert into t values (8, 'gone'); rollback")?.ok()?;
    assert!(client.query("select nonsense").is_err());
    // COPY by both protocols.
    client.send(&Batch::new().query("copy t from stdin"))?;
    while client.recv()?.tag != b'G' {}
    client.send(&Batch::new().copy_data(b"10\tcopied\n11\tcop").copy_data(b"ied\n").copy_done())?;
    client.response()?.ok()?;
    client.send(&Batch::new().parse("", "copy t from stdin").bind("", "", &[]).execute("", 0).sync())?;
    while client.recv()?.tag != b'G' {}
    client.send(&Batch::new().copy_data(b"12\tcopied\n").copy_done().sync())?;
    client.response()?.ok()?;
    // State of the session.
    client.query("set timezone = 'Asia/Tokyo'")?;
    client.query("insert into t values (20, timestamptz '2000-01-01 00:00:00+00'::text)")?;
    client.query("set datestyle = 'German'")?;
    client.query("insert into t values (21, date '2000-01-31'::text)")?;
    // A message of several reads.
    let long = "x".repeat(300_000);
    client.query(&format!("insert into t values (22, '{long}')"))?;
    client.exchange(&Batch::new().close_statement("ins").sync())?;
    Ok(())
}

#[test]
fn everything_arrives() -> Result<()> {
    for mode in ["mode = async", "mode = sync"] {
        let pair = Pair::start(&format!("{mode}\ncompare_rows = ordered"))?;
        pair.both(T)?;
        pair.wait_on()?;
        let before = pair.account()?.get("transactions");
        let mut client = pair.client()?;
        say_everything(&mut client)?;
        if mode == "mode = sync" {
            // The client's next statement waits for the mirror.
            client.query("select 1")?;
            client.query("select 1")?;
            pair.assert_same(ALL)?;
        }
        let account = pair.settled()?;
        pair.assert_same(ALL)?;
        assert_eq!(account.get("dropped"), 0, "{mode}: {account:?}");
        assert!(account.get("transactions") >= before + 15, "{mode}: {account:?}");
        assert_eq!(Pair::calls(&pair.there, "insert into t %")?, Pair::calls(&pair.here, "insert into t %")?);
        let rows = pair.differences()?;
        let differing: Vec<_> = rows.iter().filter(|row| row["differing"] != "0").collect();
        assert!(differing.is_empty(), "{mode}: {differing:?}");
        let compared: u64 = rows.iter().map(|row| row["compared"].parse::<u64>().unwrap()).sum();
        assert!(compared >= 20, "{mode}: {compared}");
    }
    Ok(())
}

#[test]
fn session_pooling_keeps_its_sessions() -> Result<()> {
    let pair = Pair::start_with(&[("pool_mode", "session")], "")?;
    pair.both(T)?;
    pair.wait_on()?;
    let mut client = pair.client()?;
    client.query("create temp table mine (id int)")?;
    client.query("set work_mem = '7MB'")?;
    client.query("insert into mine values (4)")?;
    client.query("insert into t select id, current_setting('work_mem') from mine")?;
    say_everything(&mut client)?;
    let account = pair.settled()?;
    assert_eq!(account.get("dropped"), 0, "{account:?}");
    pair.assert_same(ALL)?;
    assert_eq!(pair.there.sql_value("select v from t where id = 4")?, "7MB");
    drop(client);
    // Its server there goes back as well.
    eventually("the session there ends", || {
        let sql = "select count(*) from pg_stat_activity where pid <> pg_backend_pid() and query ilike '%from mine%'";
        Ok(pair.there.sql_value(sql)? == "0")
    })
}

#[test]
fn pgbench_leaves_equal_data() -> Result<()> {
    let pair = Pair::start_with(&[("pool_mode", "transaction"), ("default_pool_size", "8")], "")?;
    for server in [&pair.here, &pair.there] {
        pgbench(server.port(), &["-i", "-s", "1", "-I", "dtgp", "-q"]);
    }
    pair.wait_on()?;
    for protocol in ["simple", "extended", "prepared"] {
        pgbench(pair.pooler.port(), &["-n", "-c", "8", "-j", "2", "-t", "100", "-M", protocol]);
    }
    let account = pair.settled()?;
    assert_eq!(account.get("dropped"), 0, "{account:?}");
    for sql in [
        "select aid, bid, abalance from pgbench_accounts order by aid",
        "select tid, bid, tbalance from pgbench_tellers order by tid",
        "select bid, bbalance from pgbench_branches order by bid",
        // mtime is the time of the insert.
        "select tid, bid, aid, delta, count(*) from pgbench_history group by 1, 2, 3, 4 order by 1, 2, 3, 4",
    ] {
        pair.assert_same(sql)?;
    }
    assert_eq!(pair.there.sql_value("select count(*) from pgbench_history")?, "2400");
    assert_eq!(
        Pair::calls(&pair.there, "insert into pgbench_history%")?,
        Pair::calls(&pair.here, "insert into pgbench_history%")?
    );
    let rows = pair.differences()?;
    let history = rows
        .iter()
        .find(|row| row["query"].to_lowercase().contains("into pgbench_history"))
        .expect("history");
    assert_eq!((&*history["varies"], &*history["differing"]), ("clock", "0"));
    Ok(())
}

/// Each row has one writer, and what it writes depends on what was there: any loss, repetition or reordering within a session shows.
#[test]
fn writers_that_do_not_commute_agree_in_sync() -> Result<()> {
    MODES[1..].iter().try_for_each(|mode| writers_agree(mode))
}

fn writers_agree(mode: &str) -> Result<()> {
    let pair = Pair::start_with(&[("pool_mode", "transaction"), ("default_pool_size", "4")], mode)?;
    pair.both("create table chain (id int primary key, v text); insert into chain select i, '' from generate_series(1, 12) i")?;
    pair.wait_on()?;
    thread::scope(|scope| {
        for id in 1..=12 {
            let pair = &pair;
            scope.spawn(move || -> Result<()> {
                let mut client = pair.client()?;
                for n in 0..60 {
                    if n % 3 == 0 {
                        client.query("begin")?;
                    }
                    client.query(&format!("update chain set v = md5(v || '{n}') where id = {id}"))?;
                    if n % 3 == 2 {
                        client.query(if n % 5 == 0 { "rollback" } else { "commit" })?;
                    }
                }
                // Held until the mirror has done all before.
                client.query("select 1").map(drop)
            });
        }
    });
    pair.assert_same("select id, v from chain order by id")?;
    let account = pair.settled()?;
    assert_eq!(account.get("dropped"), 0, "{account:?}");
    assert_eq!(Pair::calls(&pair.there, "update chain%")?, 12 * 60);
    Ok(())
}

#[test]
fn a_mirror_that_comes_in_mid_session_gets_the_session_as_it_is() -> Result<()> {
    for mode in MODES {
        comes_in_mid_session(mode)?;
    }
    Ok(())
}

fn comes_in_mid_session(mode: &str) -> Result<()> {
    let mut pair = Pair::start("")?;
    pair.both(T)?;
    pair.reload(None)?;
    assert!(pair.mirrors()?.is_empty());
    let mut client = pair.client()?;
    let prepare = Batch::new()
        .parse("ins", "insert into t values ($1, now()::timestamp::text || current_setting('timezone'))");
    client.exchange(&prepare.sync())?;
    client.query("set timezone = 'Asia/Tokyo'")?;
    client.query("begin")?;
    pair.reload(Some(&format!("{mode}\ncompare_rows = ordered")))?;
    pair.wait_on()?;
    // The transaction that is under way is left alone; the next one is whole.
    client.query("insert into t values (1, 'before')")?;
    client.query("commit")?;
    client.exchange(&Batch::new().bind("", "ins", &[Some("2")]).execute("", 0).sync())?;
    let account = pair.settled()?;
    assert_eq!(account.0["state"], "on", "{mode}: {account:?}");
    assert_eq!(pair.there.sql_value("select id || right(v, 10) from t")?, "2Asia/Tokyo", "{mode}");
    assert_eq!(pair.there.sql_value("select count(*) from t")?, "1");
    // And goes when it is taken away.
    pair.reload(None)?;
    client.query("insert into t values (3, 'after')")?;
    assert_eq!(pair.there.sql_value("select count(*) from t")?, "1");
    Ok(())
}

#[test]
fn cancels_and_vanished_clients_reach_the_mirror() -> Result<()> {
    for mode in MODES {
        cancels_and_vanishes(&Pair::start(mode)?)?;
    }
    Ok(())
}

/// A client cancels a statement; others vanish in the middle of a transaction, and while a statement runs.
pub fn cancels_and_vanishes(pair: &Pair) -> Result<()> {
    pair.both(T)?;
    pair.wait_on()?;
    let begun = Instant::now();
    let mut client = pair.client()?;
    client.send(&Batch::new().query("select pg_sleep(40)"))?;
    let runs =
        "select count(*) from pg_stat_activity where query = 'select pg_sleep(40)' and state = 'active'";
    eventually("the statement runs", || Ok(pair.here.sql_value(runs)? == "1"))?;
    thread::sleep(Duration::from_millis(200));
    client.cancel()?;
    assert_eq!(client.response()?.ok().unwrap_err().sqlstate(), Some("57014"));
    client.query("insert into t values (1, 'behind it')")?;
    let rows = pair.differences()?;
    assert!(begun.elapsed() < Duration::from_secs(20), "it ran to its end there: {:?}", begun.elapsed());
    let slept = rows.iter().find(|row| row["query"].contains("pg_sleep")).expect("compared");
    assert_eq!((&*slept["compared"], &*slept["differing"]), ("1", "0"), "{slept:?}");
    pair.assert_same(ALL)?;
    // In the middle of a transaction; and while a statement runs.
    let begun = Instant::now();
    client.query("begin")?;
    client.query("insert into t values (2, 'never')")?;
    client.reset()?;
    let mut client = pair.client()?;
    client.send(
        &Batch::new().query("begin").query("insert into t values (3, 'never')").query("select pg_sleep(40)"),
    )?;
    eventually("the statement runs", || Ok(pair.here.sql_value(runs)? == "1"))?;
    client.reset()?;
    let account = pair.settled()?;
    assert_eq!(account.get("dropped"), 0, "{account:?}");
    assert!(begun.elapsed() < Duration::from_secs(20), "it ran to its end there: {:?}", begun.elapsed());
    for server in [&pair.here, &pair.there] {
        eventually("nothing is left behind", || {
            let sql = "select count(*) from pg_stat_activity where state <> 'idle' and pid <> pg_backend_pid() \
                       and backend_type = 'client backend'";
            Ok(server.sql_value(sql)? == "0")
        })?;
    }
    pair.assert_same(ALL)?;
    assert_eq!(Pair::calls(&pair.there, "insert into t%")?, 3, "they were said there");
    Ok(())
}

/// A cancel that comes when the primary has answered cancels nothing there, and so nothing on a mirror that is behind.
#[test]
fn a_cancel_that_comes_late_strikes_no_mirror() -> Result<()> {
    for mode in MODES {
        let pair = Pair::start(mode)?;
        pair.both(T)?;
        pair.there.sql(
            "create function slow() returns trigger language plpgsql as 'begin perform pg_sleep(0.7); return new; end';
             create trigger slow before insert on t for each row execute function slow()",
        )?;
        pair.wait_on()?;
        let mut client = pair.client()?;
        let active =
            "select count(*) from pg_stat_activity where query ilike 'insert into t%' and state = 'active'";
        let cancel = |client: &Client| {
            // Where whole transactions go there, what is in a block is not there yet.
            eventually_or_not(|| Ok(mode != MODES[1] || pair.there.sql_value(active)? == "1"))?;
            client.cancel()
        };
        client.query("insert into t values (1, 'alone')")?.ok()?;
        eventually("it runs there", || Ok(pair.there.sql_value(active)? == "1"))?;
        client.cancel()?;
        client.query("begin")?.ok()?;
        client.query("insert into t values (2, 'in a block')")?.ok()?;
        cancel(&client)?;
        client.query("insert into t values (3, 'in a block')")?.ok()?;
        cancel(&client)?;
        client.query("commit")?.ok()?;
        let account = pair.settled()?;
        assert_eq!((&*account.0["state"], account.get("dropped")), ("on", 0), "{mode}: {account:?}");
        assert_eq!(pair.there.sql_value("select count(*) from t")?, "3", "{mode}");
        pair.assert_same(ALL)?;
        let rows = pair.differences()?;
        assert!(rows.iter().all(|row| row["differing"] == "0"), "{mode}: {rows:?}");
    }
    Ok(())
}

/// A transaction goes as it began to go, whole; the session's next ones do not pass those that wait.
#[test]
fn the_mode_may_change_in_the_middle_of_a_transaction() -> Result<()> {
    let orders = MODES.iter().flat_map(|from| MODES.iter().map(move |to| [*from, *to]));
    for modes in orders.filter(|[from, to]| from != to) {
        let mut pair = Pair::start(modes[0])?;
        pair.both("create table chain (v text); insert into chain values ('')")?;
        // What the mirror does takes longer there, so that it is behind.
        pair.there.sql(
            "create function slow() returns trigger language plpgsql as 'begin perform pg_sleep(0.02); return new; end';
             create trigger slow before update on chain for each row execute function slow()",
        )?;
        pair.wait_on()?;
        let mut client = pair.client()?;
        let mut say = |text: &str| client.query(text).map(drop);
        for round in 0..6 {
            for n in 0..5 {
                say(&format!("update chain set v = md5(v || '{round} {n}')"))?;
            }
            say("begin")?;
            say(&format!("update chain set v = md5(v || '{round} before')"))?;
            pair.reload(Some(modes[(round + 1) % 2]))?;
            say(&format!("update chain set v = md5(v || '{round} behind')"))?;
            say("commit")?;
        }
        let account = pair.settled()?;
        assert_eq!((&*account.0["state"], account.get("dropped")), ("on", 0), "{modes:?}: {account:?}");
        pair.assert_same("select v from chain")?;
        assert_eq!(Pair::calls(&pair.there, "update chain%")?, 6 * 7, "{modes:?}");
    }
    Ok(())
}

/// What ends the session of the primary ends that of the mirror, or is meant to: that is no failure of the mirror.
#[test]
fn a_session_that_ends_on_both_is_no_loss() -> Result<()> {
    for mode in MODES {
        let pair = Pair::start(mode)?;
        pair.both(T)?;
        pair.wait_on()?;
        let mut client = pair.client()?;
        client.query("insert into t values (1, 'before')")?;
        client.query("begin")?;
        client.query("insert into t values (2, 'never')")?;
        // The connection ends, with or without the error before it.
        let ended = client.query("select pg_terminate_backend(pg_backend_pid())");
        assert!(ended.is_err() || client.query("select 1").is_err(), "{mode}");
        let mut client = pair.client()?;
        client.query("begin")?;
        client.query("set local idle_in_transaction_session_timeout = 10")?;
        eventually("the idle session ends", || Ok(client.query("select pg_sleep(0)").is_err()))?;
        let mut client = pair.client()?;
        client.query("insert into t values (3, 'behind')")?;
        client.query("select 1")?;
        let account = pair.settled()?;
        assert_eq!((&*account.0["state"], account.get("dropped")), ("on", 0), "{mode}: {account:?}");
        pair.assert_same(ALL)?;
        // One that ends there only is a loss.
        client.query("begin")?;
        client.query("insert into t values (4, 'here')")?;
        if mode == MODES[1] {
            let end = "select count(pg_terminate_backend(pid)) from pg_stat_activity where state = 'idle in transaction'";
            eventually("its session there ends", || Ok(pair.there.sql_value(end)? == "1"))?;
            client.query("insert into t values (5, 'here')")?;
            client.query("commit")?;
            pair.wait_state("failed")?;
            let account = pair.settled()?;
            assert_eq!(account.get("dropped"), account.get("connection_lost"), "{account:?}");
        }
    }
    Ok(())
}

#[test]
fn only_what_reads_is_sent_where_that_is_asked() -> Result<()> {
    let pair = Pair::start("send = read_only")?;
    pair.both(T)?;
    pair.both(
        "create function sly() returns int language sql as 'insert into t values (99, null) returning id'",
    )?;
    pair.wait_on()?;
    let mut client = pair.client()?;
    client.query("insert into t values (1, 'here only')")?;
    client.query("select count(*) from t")?;
    client.query("begin; select 1; update t set v = 'x'; commit")?.ok()?;
    client.exchange(&Batch::new().extended("select v from t where id = $1", &[Some("1")]).sync())?;
    client.query("select sly()")?;
    let account = pair.settled()?;
    assert_eq!((account.get("filtered"), account.get("executed")), (2, 3), "{account:?}");
    assert_eq!(pair.there.sql_value("select count(*) from t")?, "0", "a function that writes fails there");
    let rows = pair.differences()?;
    let sly = rows.iter().find(|row| row["query"] == "select sly()").expect("compared");
    assert_eq!(sly["differences"], "error_there=1");
    assert!(sly["example"].contains("25006"), "{sly:?}");
    Ok(())
}

/// In session pooling nothing brings what it left in the session to the mirror: rather nothing than something else.
#[test]
fn a_session_of_which_something_was_not_sent_is_out_if_that_matters() -> Result<()> {
    let pair = Pair::start_with(&[("pool_mode", "session")], "send = read_only")?;
    pair.both(T)?;
    pair.wait_on()?;
    let mut client = pair.client()?;
    let before = pair.settled()?;
    client.query("insert into t values (1, 'set here; discard all')")?.ok()?;
    client.query("select count(*) from t where id > 7")?.ok()?;
    let account = pair.settled()?;
    assert_eq!(account.get("executed") - before.get("executed"), 1, "{account:?}");
    client.query("begin")?.ok()?;
    client.query("insert into t values (2, null)")?.ok()?;
    client.exchange(&Batch::new().parse("get", "select v from t where id = $1").sync())?;
    client.query("commit")?.ok()?;
    client.exchange(&Batch::new().bind("", "get", &[Some("9")]).execute("", 0).sync())?;
    let after = pair.settled()?;
    assert_eq!((after.get("session_state"), after.get("filtered")), (1, 2), "{after:?}");
    assert_eq!(after.get("executed"), account.get("executed"), "{after:?}");
    let rows = pair.differences()?;
    assert!(rows.iter().all(|row| row["differing"] == "0"), "{rows:?}");
    Ok(())
}

/// What lets a session write is no less the primary's alone than what it then writes.
#[test]
fn a_session_may_not_be_made_to_write() -> Result<()> {
    let pair = Pair::start("send = read_only")?;
    pair.both(T)?;
    pair.both(
        "create function sly() returns int language sql as 'insert into t select count(*), null from t returning id'",
    )?;
    pair.wait_on()?;
    let mut client = pair.client()?;
    for lifts in [
        "set default_transaction_read_only = off",
        "select set_config('default_transaction_read_only', 'off', false)",
        "set \"default_transaction_read_only\" to off",
        "reset default_transaction_read_only",
        "set session characteristics as transaction read write",
        "reset all",
        "discard all",
    ] {
        client.query("select 1")?.ok()?;
        client.query(lifts)?.ok()?;
        client.query("select sly()")?.ok()?;
        pair.settled()?;
        assert_eq!(pair.there.sql_value("select count(*) from t")?, "0", "{lifts}");
    }
    client.query("begin")?.ok()?;
    client.query("set transaction_read_only = off")?.ok()?;
    client.query("select sly()")?.ok()?;
    client.query("commit")?.ok()?;
    pair.settled()?;
    assert_eq!(pair.there.sql_value("select count(*) from t")?, "0");
    Ok(())
}

#[test]
fn a_sample_is_a_share_of_the_clients() -> Result<()> {
    let pair = Pair::start("sample = 50")?;
    eventually("somebody is in the sample", || {
        drop(pair.client()?);
        Ok(pair.mirrors()?.first().is_some_and(|row| row["state"] == "on"))
    })?;
    let before = pair.account()?.get("transactions");
    for _ in 0..60 {
        pair.client()?.query("select 1")?;
    }
    let seen = pair.settled()?.get("transactions") - before;
    assert!((10..=50).contains(&seen), "{seen} of 60");
    Ok(())
}
