// SPDX-License-Identifier: Apache-2.0
//! COPY FROM STDIN that the primary refuses, or ends with an error, and that the mirror would take: its data never end for the mirror.

use underpass_testkit::{Batch, Client, Message, Result};

use crate::pair::{MODES, Pair, eventually};

/// Here a table is missing and another has a constraint; on the mirror everything is taken.
fn pair(mode: &str, further: &str) -> Result<Pair> {
    let pair = Pair::start(&format!("{mode}\n{further}"))?;
    pair.both("create table t (id int)")?;
    pair.there.sql("create table missing (id int); create table small (id int)")?;
    pair.here.sql("create table small (id int check (id < 10))")?;
    pair.wait_on()?;
    Ok(pair)
}

fn sqlstate(client: &mut Client) -> Result<String> {
    let response = client.response()?;
    Ok(response.messages.iter().find_map(Message::error).expect("it fails").sqlstate)
}

/// What the primary does not take: by the simple protocol, by the extended one, and in the middle.
fn refused(client: &mut Client) -> Result<()> {
    client.send(&Batch::new().query("copy missing from stdin"))?;
    assert_eq!(sqlstate(client)?, "42P01");
    let copy = |sql| Batch::new().parse("", sql).bind("", "", &[]).execute("", 0).sync();
    client.send(&copy("copy missing from stdin"))?;
    assert_eq!(sqlstate(client)?, "42P01");
    let simple = Batch::new().query("copy small from stdin");
    for (start, is_extended) in [(simple, false), (copy("copy small from stdin"), true)] {
        client.send(&start)?;
        while client.recv()?.tag != b'G' {}
        client.send(&Batch::new().copy_data(b"1\n").copy_data(b"77\n"))?;
        while client.recv()?.tag != b'E' {}
        if is_extended {
            client.send(&Batch::new().sync())?;
        }
        while client.recv()?.tag != b'Z' {}
    }
    Ok(())
}

#[test]
fn what_only_the_mirror_would_take_ends_there_too() -> Result<()> {
    for mode in MODES {
        let pair = pair(mode, "show_literals = 1")?;
        let mut client = pair.client()?;
        for round in 0..3 {
            refused(&mut client)?;
            client.query(&format!("insert into t values ({round})"))?.ok()?;
        }
        let account = pair.settled()?;
        assert_eq!((account.get("dropped"), &*account.0["state"]), (0, "on"), "{mode}: {account:?}");
        assert_eq!(account.get("executed"), account.get("transactions"), "{mode}: {account:?}");
        pair.assert_same("select count(*) from t")?;
        assert_eq!(pair.there.sql_value("select count(*) from (table missing union table small) x")?, "0");
        let rows = pair.differences()?;
        let row = rows.iter().find(|row| row["query"].contains("small")).expect("compared");
        assert!(row["example"].contains("the primary did not take this COPY"), "{mode}: {row:?}");
    }
    Ok(())
}

/// Where statements go there as they come, the block goes on there as here; else what the client said next is there already, and ends the session,
/// and with `mode = sync` the mirror.
#[test]
fn a_block_in_which_a_copy_was_refused() -> Result<()> {
    for mode in MODES {
        let pair = pair(mode, "")?;
        let mut client = pair.client()?;
        client.query("begin; savepoint s")?.ok()?;
        client.send(&Batch::new().query("copy missing from stdin"))?;
        assert_eq!(sqlstate(&mut client)?, "42P01");
        client.query("rollback to s")?.ok()?;
        client.query("insert into t values (1)")?.ok()?;
        client.query("commit")?.ok()?;
        let account = pair.settled()?;
        let lost = account.get("connection_lost");
        if mode == MODES[2] {
            assert_eq!((&*account.0["state"], lost), ("failed", 1), "{account:?}");
            continue;
        }
        if mode == MODES[1] {
            assert_eq!(lost, 0, "{account:?}");
            pair.assert_same("select count(*) from t")?;
        }
        assert_eq!(account.get("dropped"), lost, "{mode}: {account:?}");
        eventually("it goes on", || {
            client.query("insert into t values (2)")?.ok()?;
            Ok(pair.there.sql_value("select count(*) > 0 from t where id = 2")? == "t")
        })?;
    }
    Ok(())
}

/// Each is compared with its own answer, also behind the Sync that some clients send when the COPY of a Query is over.
#[test]
fn a_sync_behind_a_simple_copy_shifts_nothing() -> Result<()> {
    for mode in MODES {
        let pair = pair(mode, "")?;
        pair.both("create table u (id int)")?;
        pair.there.sql("alter table u add check (id < 10)")?;
        let mut client = pair.client()?;
        client.query("begin")?.ok()?;
        client.send(&Batch::new().query("copy t from stdin"))?;
        while client.recv()?.tag != b'G' {}
        client.send(&Batch::new().copy_data(b"1\n").copy_done().sync())?;
        client.response()?.ok()?;
        client.response()?.ok()?;
        client.query("select count(*) from t")?.ok()?;
        client.query("savepoint s")?.ok()?;
        client.query("insert into u values (77)")?.ok()?;
        client.query("rollback to s")?.ok()?;
        client.query("commit")?.ok()?;
        let rows = pair.differences()?;
        pair.assert_same("select count(*) from t")?;
        for row in &rows {
            let differs = if row["query"].contains("into u") { "error_there=1" } else { "" };
            assert_eq!(row["differences"], differs, "{mode}: {rows:?}");
        }
        assert!(rows.iter().any(|row| row["differing"] == "1"), "{mode}: {rows:?}");
    }
    Ok(())
}

/// Its client leaves right behind it, too: no connection of the mirror stays with it.
#[test]
fn a_client_that_leaves_behind_a_refused_copy() -> Result<()> {
    for mode in MODES {
        let pair = pair(mode, "pool_size = 2")?;
        for in_block in [false, true, false, true, false] {
            let mut client = pair.client()?;
            if in_block {
                client.query("begin")?.ok()?;
            }
            client.send(&Batch::new().query("copy missing from stdin"))?;
            assert_eq!(sqlstate(&mut client)?, "42P01");
            drop(client);
        }
        pair.settled()?;
        pair.client()?.query("insert into t values (1)")?.ok()?;
        let account = pair.settled()?;
        assert_eq!(account.get("dropped"), 0, "{mode}: {account:?}");
        pair.assert_same("select count(*) from t")?;
    }
    Ok(())
}

/// A COPY whose data take their time is not ended.
#[test]
fn a_slow_copy_is_left_alone() -> Result<()> {
    for mode in MODES {
        let pair = pair(mode, "")?;
        let mut client = pair.client()?;
        client.send(&Batch::new().query("copy t from stdin"))?;
        while client.recv()?.tag != b'G' {}
        for _ in 0..2 {
            client.send(&Batch::new().copy_data(b"1\n"))?;
            std::thread::sleep(std::time::Duration::from_millis(500));
        }
        client.send(&Batch::new().copy_done())?;
        client.response()?.ok()?;
        assert_eq!(pair.settled()?.get("dropped"), 0, "{mode}");
        pair.assert_same("select count(*) from t")?;
    }
    Ok(())
}
