// SPDX-License-Identifier: Apache-2.0
//! Mirrors that are slow, absent, broken or wrong: clients notice nothing (`async`) or a bounded wait (`sync`), and every drop is counted.

use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, Instant};

use underpass_testkit::{
    Client, Direction, Fault, FaultProxy, Ini, Pooler, Postgres, Result, Signal, SmallDisk, Underpass,
};

use crate::pair::{MODES, Pair, eventually, garbage, table};

fn insert(client: &mut Client, id: u32) -> Result<()> {
    client.query(&format!("insert into t values ({id})")).map(drop)
}

#[test]
fn a_queue_that_is_full_drops_whole_transactions_and_counts_them() -> Result<()> {
    let pair = Pair::start("queue_bytes = 30000")?;
    pair.both("create table t (id int, part int)")?;
    // What the mirror does takes longer there.
    pair.there.sql(
        "create function slow() returns trigger language plpgsql as 'begin perform pg_sleep(0.01); return new; end';
         create trigger slow before insert on t for each row execute function slow()",
    )?;
    pair.wait_on()?;
    let mut client = pair.client()?;
    for id in 0..200 {
        client.query("begin")?;
        client.query(&format!("insert into t values ({id}, 1)"))?;
        client.query(&format!("insert into t values ({id}, 2)"))?;
        client.query("commit")?;
    }
    // Larger by itself than the queue.
    client.query(&format!("insert into t values (7777, length('{}'))", "x".repeat(40_000)))?;
    let account = pair.settled()?;
    assert!(account.get("queue_full") > 0 && account.get("too_large") == 1, "{account:?}");
    assert_eq!(account.get("dropped"), account.get("queue_full") + 1, "{account:?}");
    // No half of a transaction, and as many as were counted: by the mirror's own account too.
    assert_eq!(
        pair.there.sql_value("select count(*) from (select from t group by id having count(*) <> 2) x")?,
        "0"
    );
    let executed = account.get("executed");
    assert_eq!(pair.there.sql_value("select count(distinct id) from t")?, executed.to_string());
    assert_eq!(Pair::calls(&pair.there, "insert into t%")?, executed * 2);
    assert_eq!(Pair::calls(&pair.there, "commit")?, executed);
    Ok(())
}

/// What is refused in the middle is not there in part, neither for later statements to run in nor for a later COMMIT.
#[test]
fn a_transaction_that_is_refused_in_the_middle_in_sync_leaves_nothing_open_there() -> Result<()> {
    let pair = Pair::start("mode = sync\nsync_timeout = 30\nqueue_bytes = 100000")?;
    pair.both("create table t (id int)")?;
    pair.wait_on()?;
    let mut client = pair.client()?;
    client.query("begin")?.ok()?;
    for id in 0..1000 {
        insert(&mut client, id)?;
    }
    let open = "select count(*) from pg_stat_activity where state like 'idle in transaction%'";
    eventually("nothing is open there", || Ok(pair.there.sql_value(open)? == "0"))?;
    client.query("commit")?.ok()?;
    insert(&mut client, 2001)?;
    client.query("begin")?.ok()?;
    insert(&mut client, 2002)?;
    client.query("commit")?.ok()?;
    let account = pair.settled()?;
    assert_eq!((account.get("too_large"), account.get("dropped")), (1, 1), "{account:?}");
    assert_eq!(account.0["state"], "on", "{account:?}");
    assert_eq!(pair.there.sql_value("select string_agg(id::text, ',' order by id) from t")?, "2001,2002");
    assert_eq!(pair.there.sql_value(open)?, "0");
    Ok(())
}

/// The pooler closes the mirror's session as it closes the client's own: that is no fault of the mirror.
#[test]
fn a_begin_in_statement_pooling_switches_no_mirror_off() -> Result<()> {
    for mode in MODES {
        let pair = Pair::start_with(&[("pool_mode", "statement")], mode)?;
        pair.both("create table t (id int)")?;
        pair.wait_on()?;
        let mut other = pair.client()?;
        insert(&mut other, 1)?;
        for _ in 0..2 {
            assert!(pair.client()?.query("begin").and_then(underpass_testkit::Response::ok).is_err());
        }
        // Once the shadow has heard its answer.
        std::thread::sleep(Duration::from_millis(300));
        insert(&mut other, 2)?;
        let account = pair.settled()?;
        assert_eq!(account.0["state"], "on", "{mode}: {account:?}\n{}", pair.pooler.log());
        assert_eq!(account.get("dropped"), account.get("session_state"), "{mode}: {account:?}");
        assert_eq!(pair.there.sql_value("select string_agg(id::text, ',' order by id) from t")?, "1,2");
    }
    Ok(())
}

/// Nor is a session whose settings cannot be had there the mirror's end for others.
#[test]
fn a_session_that_cannot_be_restored_there_is_left_out_alone() -> Result<()> {
    for mode in MODES {
        let settings = [("pool_mode", "transaction"), ("track_extra_parameters", "session_authorization")];
        let pair = Pair::start_with(&settings, mode)?;
        pair.both("create table t (id int); grant all on t to public")?;
        pair.here.sql("create role joe")?;
        pair.wait_on()?;
        let mut other = pair.client()?;
        let mut client = pair.client()?;
        client.query("set session authorization joe")?.ok()?;
        pair.settled()?;
        pair.pooler.console("DISABLE MIRROR next")?.ok()?;
        pair.pooler.console("ENABLE MIRROR next")?.ok()?;
        pair.wait_on()?;
        for id in [1, 3] {
            client.query("select 1")?.ok()?;
            client.query("select 1")?.ok()?;
            pair.settled()?;
            insert(&mut other, id)?;
            insert(&mut other, id + 1)?;
        }
        let account = pair.settled()?;
        assert_eq!(account.0["state"], "on", "{mode}: {account:?}\n{}", pair.pooler.log());
        assert!(account.get("session_state") > 0, "{mode}: {account:?}");
        let state = "select string_agg(id::text, ',' order by id) from t";
        assert_eq!(pair.there.sql_value(state)?, "1,2,3,4", "{mode}: {account:?}");
        let told = pair.pooler.log().matches("restoring session parameters failed").count();
        assert_eq!(told, 1, "{}", pair.pooler.log());
    }
    Ok(())
}

#[test]
fn overflow_may_disable_the_mirror() -> Result<()> {
    let pair = Pair::start("queue_bytes = 2000\noverflow = disable")?;
    pair.both("create table t (id text)")?;
    pair.wait_on()?;
    let mut client = pair.client()?;
    client.query(&format!("insert into t values ('{}')", "x".repeat(5000)))?;
    client.query("insert into t values ('y')")?;
    let account = pair.settled()?;
    assert_eq!((account.get("too_large"), account.get("disabled")), (1, 1), "{account:?}");
    assert_eq!(account.0["state"], "failed");
    assert!(account.0["reason"].contains("queue_bytes"), "{account:?}");
    pair.pooler.console("ENABLE MIRROR next")?;
    pair.wait_on()?;
    client.query("insert into t values ('z')")?;
    pair.settled()?;
    assert_eq!(pair.there.sql_value("select string_agg(id, '') from t")?, "z");
    Ok(())
}

/// Its pool pauses after a login that failed, and so does the mirror: the two are the same pause.
#[test]
fn a_mirror_that_is_back_is_taken_up_after_one_pause() -> Result<()> {
    const PAUSE: Duration = Duration::from_secs(4);
    let settings = [("pool_mode", "transaction"), ("server_login_retry", "4")];
    let mut pair = Pair::start_with(&settings, "")?;
    pair.both("create table t (id int)")?;
    pair.there.stop()?;
    let mut client = pair.client()?;
    insert(&mut client, 0)?;
    pair.wait_state("down")?;
    let down = Instant::now();
    pair.there.start_again()?;
    eventually("the mirror is back", || {
        insert(&mut client, 1)?;
        Ok(pair.mirrors()?[0]["state"] == "on")
    })?;
    assert!(down.elapsed() < PAUSE * 2 - PAUSE / 4, "{:?}", down.elapsed());
    Ok(())
}

#[test]
fn a_mirror_that_is_down_costs_nothing_and_comes_back() -> Result<()> {
    let mut pair = Pair::start("")?;
    pair.both("create table t (id int)")?;
    pair.there.stop()?;
    let mut client = pair.client()?;
    let begun = Instant::now();
    for id in 0..50 {
        insert(&mut client, id)?;
    }
    assert!(begun.elapsed() < Duration::from_secs(5), "while it is tried: {:?}", begun.elapsed());
    pair.wait_state("down")?;
    insert(&mut client, 50)?;
    // The client has its answer a moment before the account does.
    eventually("all are counted", || Ok(pair.settled()?.get("not_ready") == 51))?;
    assert!(!pair.settled()?.0["reason"].is_empty());
    pair.there.start_again()?;
    // Tried again after server_login_retry, when somebody has something to send.
    let mut next = 100;
    eventually("the mirror is back", || {
        next += 1;
        insert(&mut client, next)?;
        Ok(pair.mirrors()?[0]["state"] == "on")
    })?;
    insert(&mut client, 10_000)?;
    pair.settled()?;
    assert_eq!(pair.there.sql_value("select max(id) from t")?, "10000");
    // In the middle: what is under way is lost and counted, the rest of the clients' lives goes on.
    pair.there.restart()?;
    let begun = Instant::now();
    for id in 20_000..20_020 {
        insert(&mut client, id)?;
    }
    assert!(begun.elapsed() < Duration::from_secs(5), "while it is lost: {:?}", begun.elapsed());
    eventually("the mirror is back", || {
        next += 1;
        insert(&mut client, next)?;
        Ok(pair.mirrors()?[0]["state"] == "on")
    })?;
    insert(&mut client, 30_000)?;
    let account = pair.settled()?;
    let there: u64 = pair.there.sql_value("select count(*) from t")?.parse().expect("a number");
    let lost = account.get("connection_lost");
    assert!(
        (account.get("executed")..=account.get("executed") + lost).contains(&there),
        "{there}: {account:?}"
    );
    Ok(())
}

/// The transaction that a session was at when it broke, and those that waited for it, are lost for reasons of their own.
#[test]
fn what_waits_behind_a_lost_transaction_is_lost_with_its_session() -> Result<()> {
    let pair = Pair::start("")?;
    pair.both("create table t (id int)")?;
    pair.wait_on()?;
    let mut blocker = Client::connect(&pair.there.superuser())?;
    blocker.query("begin; lock table t")?.ok()?;
    let mut client = pair.client()?;
    for id in 0..3 {
        insert(&mut client, id)?;
    }
    eventually("they are queued", || Ok(pair.account()?.get("queued") == 3))?;
    let end = "select count(pg_terminate_backend(pid)) from pg_stat_activity where wait_event_type = 'Lock'";
    eventually("the first runs, and its session ends", || Ok(pair.there.sql_value(end)? == "1"))?;
    let account = pair.settled()?;
    let lost = (account.get("connection_lost"), account.get("session_lost"), account.get("dropped"));
    assert_eq!(lost, (1, 2, 3), "{account:?}");
    blocker.query("rollback")?.ok()?;
    let mut id = 10;
    eventually("it is back", || {
        id += 1;
        insert(&mut client, id)?;
        pair.settled()?;
        Ok(pair.there.sql_value("select count(*) from t where id > 10")? != "0")
    })?;
    assert_eq!(pair.there.sql_value("select count(*) from t where id < 10")?, "0");
    Ok(())
}

#[test]
fn a_mirror_that_refuses_logins_is_told_of() -> Result<()> {
    let here = Postgres::start()?;
    let there = Postgres::builder().hba("host all all all reject").start()?;
    let tail = format!("[underpass:mirror:m]\ndatabases = *\nhost = 127.0.0.1\nport = {}", there.port());
    let pooler = Underpass::start(&Ini::for_server(&here).set("pool_mode", "transaction").tail(&tail))?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    eventually("it is down", || Ok(table(&pooler, "SHOW MIRRORS")?[0]["state"] == "down"))?;
    let begun = Instant::now();
    for _ in 0..100 {
        client.query("select 1")?;
    }
    assert!(begun.elapsed() < Duration::from_secs(5));
    let row = table(&pooler, "SHOW MIRRORS")?.remove(0);
    assert!(row["reason"].contains("pg_hba.conf rejects"), "{row:?}");
    assert_eq!(row["not_ready"], row["transactions"], "{row:?}");
    Ok(())
}

#[test]
fn garbage_from_a_mirror_is_no_client_s_business() -> Result<()> {
    let here = Postgres::start()?;
    let mock = garbage()?;
    let tail = format!("[underpass:mirror:m]\ndatabases = *\nhost = 127.0.0.1\nport = {}", mock.port());
    let ini = Ini::for_server(&here).set("pool_mode", "transaction").set("server_tls_sslmode", "disable");
    let pooler = Underpass::start(&ini.set("server_check_query", "").tail(&tail))?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    eventually("it is on", || Ok(table(&pooler, "SHOW MIRRORS")?[0]["state"] == "on"))?;
    for id in 0..20 {
        assert_eq!(client.query(&format!("select {id}"))?.value(), Some(&*id.to_string()));
    }
    eventually("it is down", || Ok(table(&pooler, "SHOW MIRRORS")?[0]["state"] == "down"))?;
    let row = table(&pooler, "SHOW MIRRORS")?.remove(0);
    assert_ne!(row["connection_lost"], "0", "{row:?}\n{}", pooler.log());
    assert!(row["reason"].contains("bad packet"), "{row:?}");
    Ok(())
}

#[test]
fn the_primary_itself_is_refused() -> Result<()> {
    let here = Postgres::start()?;
    // By another name, so that --check does not see it.
    let tail = format!("[underpass:mirror:m]\ndatabases = *\nhost = localhost\nport = {}", here.port());
    let pooler = Underpass::start(&Ini::for_server(&here).set("pool_mode", "transaction").tail(&tail))?;
    here.sql("create table t (id int)")?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    eventually("it is refused", || Ok(table(&pooler, "SHOW MIRRORS")?[0]["state"] == "same_server"))?;
    insert(&mut client, 1)?;
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(here.sql_value("select count(*) from t")?, "1");
    assert!(pooler.log().contains("primary and mirror are the same server"), "{}", pooler.log());
    Ok(())
}

/// Eight sessions begin at once, and each login there takes a third of the time that a client may be kept waiting.
#[test]
fn a_mirror_in_sync_that_lets_in_one_after_the_other_is_waited_for() -> Result<()> {
    let mut pair = Pair::start_with(&[("pool_mode", "session")], "mode = sync\nsync_timeout = 0.9")?;
    pair.both("create table t (id int)")?;
    let proxy = FaultProxy::start(pair.there.port())?;
    pair.reload_at(proxy.port(), Some("mode = sync\nsync_timeout = 0.9"))?;
    pair.wait_on()?;
    proxy.set(Direction::ToClient, Fault::Delay(Duration::from_millis(300)));
    let mut clients = (0..8).map(|_| pair.client()).collect::<Result<Vec<_>>>()?;
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let inserts: Vec<_> = clients
            .iter_mut()
            .map(|client| scope.spawn(|| (0..2).try_for_each(|id| insert(client, id))))
            .collect();
        inserts.into_iter().try_for_each(|insert| insert.join().expect("no panic"))
    })?;
    assert!(begun.elapsed() > Duration::from_millis(1200), "{:?}: nobody waited long", begun.elapsed());
    proxy.set(Direction::ToClient, Fault::None);
    let account = pair.settled()?;
    assert_eq!((account.0["state"].as_str(), account.get("dropped")), ("on", 0), "{account:?}");
    pair.assert_same("select count(*) from t")
}

#[test]
fn a_silent_mirror_in_sync_is_dropped_after_a_bounded_wait() -> Result<()> {
    let pair = Pair::start("mode = sync\nsync_timeout = 0.7")?;
    pair.both("create table t (id int)")?;
    pair.wait_on()?;
    let mut client = pair.client()?;
    insert(&mut client, 1)?;
    insert(&mut client, 2)?;
    pair.settled()?;
    let mut blocker = Client::connect(&pair.there.superuser())?;
    blocker.query("begin")?;
    blocker.query("lock table t")?;
    let begun = Instant::now();
    insert(&mut client, 3)?;
    assert!(
        begun.elapsed() < Duration::from_millis(600),
        "its own answer does not wait: {:?}",
        begun.elapsed()
    );
    insert(&mut client, 4)?;
    let waited = begun.elapsed();
    assert!(waited >= Duration::from_millis(600) && waited < Duration::from_secs(5), "{waited:?}");
    let begun = Instant::now();
    for id in 5..50 {
        insert(&mut client, id)?;
    }
    assert!(begun.elapsed() < Duration::from_secs(2), "nobody waits for it any more");
    let account = pair.settled()?;
    assert_eq!(account.0["state"], "failed");
    assert!(account.0["reason"].contains("sync_timeout"), "{account:?}");
    assert!(account.get("disabled") >= 45, "{account:?}");
    assert!(
        pair.pooler.log().contains("ERROR") && pair.pooler.log().contains("switched off"),
        "{}",
        pair.pooler.log()
    );
    blocker.query("rollback")?;
    pair.pooler.console("ENABLE MIRROR next")?;
    pair.wait_on()?;
    insert(&mut client, 100)?;
    insert(&mut client, 101)?;
    pair.settled()?;
    assert_eq!(pair.there.sql_value("select count(*) from t where id >= 100")?, "2");
    Ok(())
}

#[test]
fn a_stopped_mirror_holds_no_client_in_async() -> Result<()> {
    // A stopped server lets nobody in, which is not to be found out meanwhile.
    let settings = [("pool_mode", "transaction"), ("server_connect_timeout", "120")];
    let pair = Pair::start_with(&settings, "queue_bytes = 100000")?;
    pair.both("create table t (id int)")?;
    pair.wait_on()?;
    let mut blocker = Client::connect(&pair.there.superuser())?;
    blocker.query("begin")?;
    blocker.query("lock table t")?;
    pair.there.signal(Signal::SIGSTOP)?;
    let mut client = pair.client()?;
    let begun = Instant::now();
    for id in 0..2000 {
        insert(&mut client, id)?;
    }
    assert!(begun.elapsed() < Duration::from_secs(20));
    let account = pair.account()?;
    assert!(account.get("queue_full") > 1000 && account.get("queued_bytes") <= 100_000, "{account:?}");
    pair.pooler.console("PAUSE")?.ok()?;
    pair.pooler.console("RESUME")?.ok()?;
    pair.there.signal(Signal::SIGCONT)?;
    blocker.query("rollback")?;
    let account = pair.settled()?;
    assert_eq!(pair.there.sql_value("select count(*) from t")?, account.get("executed").to_string());
    Ok(())
}

#[test]
fn disable_and_enable() -> Result<()> {
    let pair = Pair::start("")?;
    pair.both("create table t (id int)")?;
    pair.wait_on()?;
    let mut client = pair.client()?;
    insert(&mut client, 1)?;
    pair.settled()?;
    pair.pooler.console("DISABLE MIRROR next")?;
    insert(&mut client, 2)?;
    assert_eq!(pair.settled()?.get("disabled"), 1);
    pair.pooler.console("ENABLE MIRROR next")?;
    pair.wait_on()?;
    insert(&mut client, 3)?;
    pair.settled()?;
    assert_eq!(pair.there.sql_value("select string_agg(id::text, ',' order by id) from t")?, "1,3");
    let refused = pair.pooler.console("ENABLE MIRROR nobody").expect_err("no such mirror").to_string();
    assert!(refused.contains("no such mirror: nobody"), "{refused}");
    Ok(())
}

#[test]
fn a_long_transaction_that_no_mirror_takes_is_not_kept() -> Result<()> {
    let pair = Pair::start("queue_bytes = 100000")?;
    pair.wait_on()?;
    let mut client = pair.client()?;
    let text = format!("select 1 /* {} */", "x".repeat(20_000));
    for state in ["too large", "off"] {
        let before = pair.pooler.resident_kib()?;
        client.query("begin")?.ok()?;
        for _ in 0..6_000 {
            client.query(&text)?.ok()?;
        }
        let grown = pair.pooler.resident_kib()?.saturating_sub(before);
        // In a lane what the programs tell waits in their ring of 4 MiB, mapped twice, in a queue of at most 16 MiB, and in the batch, once
        // that queue, that is just being read.
        assert!(grown < 48_000, "{state}: {grown} KiB of 120 MB");
        client.query("commit")?.ok()?;
        pair.pooler.console("DISABLE MIRROR next")?.ok()?;
    }
    let account = pair.settled()?;
    assert_eq!((account.get("too_large"), account.get("disabled")), (1, 1), "{account:?}");
    Ok(())
}

/// What a mirror is at when RELOAD removes it ends with it, and leaves no session there.
#[test]
fn a_mirror_that_is_removed_is_left() -> Result<()> {
    let mut pair = Pair::start_with(&[("pool_mode", "session")], "")?;
    pair.wait_on()?;
    let mut client = pair.client()?;
    client.query("select 1")?.ok()?;
    pair.settled()?;
    let mut blocker = Client::connect(&pair.there.superuser())?;
    pair.both("create table t (id int)")?;
    blocker.query("begin; lock table t")?.ok()?;
    insert(&mut client, 1)?;
    eventually("it waits there", || {
        Ok(pair.there.sql_value("select count(*) from pg_stat_activity where wait_event_type = 'Lock'")?
            == "1")
    })?;
    pair.reload(None)?;
    blocker.query("rollback")?.ok()?;
    blocker.terminate()?;
    eventually("nobody is there any more", || {
        let others =
            "select count(*) from pg_stat_activity where client_port >= 0 and pid <> pg_backend_pid()";
        Ok(pair.there.sql_value(others)? == "0")
    })
}

#[test]
fn a_mirror_that_is_switched_off_stays_so() -> Result<()> {
    let mut pair = Pair::start("")?;
    pair.both("create table t (id int)")?;
    // Before any client has come, and so before anything of the database is known.
    pair.pooler.console("DISABLE MIRROR next")?;
    let mut client = pair.client()?;
    insert(&mut client, 1)?;
    assert_eq!(pair.settled()?.get("disabled"), 1);
    // Others connect there from now on.
    pair.reload(Some("user = postgres"))?;
    insert(&mut client, 2)?;
    assert_eq!(pair.settled()?.get("disabled"), 2);
    assert_eq!(pair.there.sql_value("select count(*) from t")?, "0");
    pair.pooler.console("ENABLE MIRROR next")?;
    pair.wait_on()?;
    insert(&mut client, 3)?;
    pair.settled()?;
    assert_eq!(pair.there.sql_value("select string_agg(id::text, ',') from t")?, "3");
    Ok(())
}

/// The mirror is warmed up, and then made the primary.
#[test]
fn a_primary_that_moves_to_its_mirror_does_nothing_twice() -> Result<()> {
    let mut pair = Pair::start("")?;
    pair.both("create table t (id int)")?;
    pair.wait_on()?;
    let mut client = pair.client()?;
    insert(&mut client, 1)?;
    pair.settled()?;
    std::mem::swap(&mut pair.here, &mut pair.there);
    // The mirror's port stays what it was.
    let port = pair.here.port();
    pair.reload_at(port, Some(""))?;
    drop(pair.client()?);
    pair.wait_state("same_server")?;
    for id in 2..12 {
        insert(&mut client, id)?;
    }
    pair.settled()?;
    assert_eq!(pair.here.sql_value("select count(*) from t")?, "11");
    Ok(())
}

/// Twenty rows of table `t`, which the mirror's `blocker` keeps from it.
fn twenty_queued(pair: &Pair) -> Result<(Client, Vec<Client>)> {
    let mut blocker = Client::connect(&pair.there.superuser())?;
    blocker.query("begin; lock table t")?.ok()?;
    let mut clients = (0..4).map(|_| pair.client()).collect::<Result<Vec<_>>>()?;
    for client in &mut clients {
        for id in 0..5 {
            insert(client, id)?;
        }
    }
    eventually("they are queued", || Ok(pair.account()?.get("queued") == 20))?;
    Ok((blocker, clients))
}

/// What is queued for one server is not for another, of which nobody has found out who it is.
#[test]
fn what_is_queued_does_not_go_to_a_mirror_that_is_configured_later() -> Result<()> {
    let mut pair = Pair::start("pool_size = 1")?;
    pair.both("create table t (id int)")?;
    pair.wait_on()?;
    let (mut blocker, _clients) = twenty_queued(&pair)?;
    // Which is the primary.
    pair.reload_at(pair.here.port(), Some("pool_size = 1"))?;
    blocker.query("rollback")?.ok()?;
    drop(pair.client()?);
    pair.wait_state("same_server")?;
    pair.settled()?;
    assert_eq!(pair.here.sql_value("select count(*) from t")?, "20", "nothing is done twice");
    Ok(())
}

/// A database that RELOAD removes leaves its mirror nothing owing: what was queued is played.
#[test]
fn what_is_queued_is_played_though_the_database_goes() -> Result<()> {
    let mut pair = Pair::start("pool_size = 1")?;
    pair.pooler = pair.pooler.forgets_pools();
    pair.both("create table t (id int)")?;
    pair.wait_on()?;
    let (mut blocker, _clients) = twenty_queued(&pair)?;
    let other = format!("host=127.0.0.1 port={}", pair.here.port());
    let mirror = format!(
        "[underpass:mirror:next]\ndatabases = *\nhost = 127.0.0.1\nport = {}\npool_size = 1",
        pair.there.port()
    );
    pair.pooler.rewrite(&Ini::new().database("other", &other).userlist("postgres", "").tail(&mirror))?;
    pair.pooler.console("RELOAD")?.ok()?;
    blocker.query("rollback")?.ok()?;
    eventually("they are there", || Ok(pair.there.sql_value("select count(*) from t")? == "20"))?;
    Ok(())
}

/// Nor does what was begun before.
#[test]
fn what_is_under_way_does_not_go_to_a_mirror_that_is_configured_later() -> Result<()> {
    let mut pair = Pair::start("")?;
    pair.both("create table t (id int)")?;
    pair.wait_on()?;
    let mut client = pair.client()?;
    client.query("begin")?.ok()?;
    insert(&mut client, 1)?;
    pair.reload_at(pair.here.port(), Some(""))?;
    client.query("commit")?.ok()?;
    drop(pair.client()?);
    pair.wait_state("same_server")?;
    let account = pair.settled()?;
    assert_eq!(account.get("not_ready"), 1, "{account:?}");
    assert_eq!(pair.here.sql_value("select count(*) from t")?, "1", "nothing is done twice");
    Ok(())
}

#[test]
fn a_full_disk_of_the_mirror_is_found_and_harms_nobody() -> Result<()> {
    for mode in MODES {
        let pair = Pair::start(mode)?;
        let owner = pair.there.data_dir().metadata().expect("the server's directory").uid();
        let Some(disk) = SmallDisk::mount(4096, owner)? else { return Ok(()) };
        pair.here.sql("create table t (id int, v text)")?;
        pair.there.sql(&format!("create tablespace small location '{}'", disk.path().display()))?;
        pair.there.sql("create table t (id int, v text) tablespace small")?;
        pair.both("create table other (id int)")?;
        pair.wait_on()?;
        let mut client = pair.client()?;
        // Of what cannot be compressed.
        let fill = "insert into t select i, md5(i::text) || md5((-i)::text) from generate_series(1, 10000) i";
        for id in 0..20 {
            client.query(fill)?;
            client.query(&format!("insert into other values ({id})"))?;
        }
        assert_eq!(pair.here.sql_value("select count(*) from t")?, "200000", "{mode}");
        let rows = pair.differences()?;
        let row = rows.iter().find(|row| row["query"].starts_with("insert into t ")).expect("compared");
        assert!(row["differences"].starts_with("error_there="), "{mode}: {row:?}");
        assert!(row["example"].contains("53100"), "{mode}: {row:?}");
        // What has room goes on.
        pair.assert_same("select id from other order by id")?;
        let account = pair.settled()?;
        assert_eq!((&*account.0["state"], account.get("dropped")), ("on", 0), "{mode}: {account:?}");
    }
    Ok(())
}
