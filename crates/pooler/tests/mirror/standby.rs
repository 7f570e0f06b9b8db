// SPDX-License-Identifier: Apache-2.0
//! A mirror that is a physical standby of the primary: the same system identifier, another server.

use underpass_testkit::{Batch, Client, Ini, Pooler, Postgres, Result, Underpass};

use crate::pair::{Row, eventually, table};

#[test]
fn a_standby_is_warmed_with_what_reads() -> Result<()> {
    let here = Postgres::start()?;
    here.sql("create table t (id int primary key, v text); insert into t select i, 'row ' || i from generate_series(1, 100) i")?;
    let there = here.standby()?;
    let identifier = "select system_identifier::text from pg_control_system()";
    assert_eq!(here.sql_value(identifier)?, there.sql_value(identifier)?);
    assert_eq!(there.sql_value("select pg_is_in_recovery()")?, "t");
    let tail = format!(
        "[underpass:mirror:replica]\ndatabases = *\nhost = 127.0.0.1\nport = {}\nsend = read_only\ncompare_rows = ordered",
        there.port()
    );
    let ini = Ini::for_server(&here).set("pool_mode", "transaction").set("server_login_retry", "1");
    let pooler = Underpass::start(&ini.tail(&tail))?;
    let mut client = Client::connect(&pooler.options("postgres", "postgres"))?;
    let mirror = || -> Result<Row> { Ok(table(&pooler, "SHOW MIRRORS")?.remove(0)) };
    eventually(&format!("it is on\n{}", pooler.log()), || Ok(mirror()?["state"] == "on"))?;
    client.query("insert into t values (101, 'new')")?.ok()?;
    client.query("begin; update t set v = 'changed' where id = 7; commit")?.ok()?;
    // By replication, and by nothing else: it would be refused.
    let changed = "select count(*) from t where id = 101 or v = 'changed'";
    eventually("it has followed", || Ok(there.sql_value(changed)? == "2"))?;
    let before = mirror()?;
    for id in [7, 101, 50] {
        let read = Batch::new().extended("select v from t where id = $1", &[Some(&id.to_string())]);
        client.exchange(&read.sync())?;
    }
    client.query("select count(*), max(v) from t")?.ok()?;
    let executed = |row: &Row| row["executed"].parse::<u64>().unwrap();
    eventually("all are executed there", || Ok(executed(&mirror()?) == executed(&before) + 4))?;
    let row = mirror()?;
    assert_eq!((&*row["filtered"], &*row["state"]), ("2", "on"), "{row:?}");
    let mut rows = Vec::new();
    eventually("all are compared", || {
        rows = table(&pooler, "SHOW MIRROR_DIFF")?;
        let compared = |part: &str| {
            rows.iter().find(|row| row["query"].contains(part)).map(|row| row["compared"].clone())
        };
        Ok(compared("where id = $1").as_deref() == Some("3") && compared("max(v)").as_deref() == Some("1"))
    })?;
    assert!(rows.iter().all(|row| row["differing"] == "0" && row["expected"] == "0"), "{rows:?}");
    Ok(())
}
