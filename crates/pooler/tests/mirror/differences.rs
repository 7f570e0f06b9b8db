// SPDX-License-Identifier: Apache-2.0
//! What is wrong on a mirror is found, and what may vary is not called wrong.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;

use underpass_testkit::{Batch, Pooler as _, Port, Result, Underpass};

use crate::pair::{MODES, Pair, Row, eventually, table};

fn find<'a>(rows: &'a [Row], part: &str) -> &'a Row {
    rows.iter().find(|row| row["query"].contains(part)).unwrap_or_else(|| panic!("{part}: {rows:?}"))
}

/// What becomes of a transaction, by columns of SHOW MIRRORS.
const OUTCOMES: [&str; 10] = [
    "executed",
    "filtered",
    "queue_full",
    "too_large",
    "not_ready",
    "disabled",
    "connection_lost",
    "session_lost",
    "session_state",
    "ring_full",
];

/// The body of what the metrics endpoint answers.
fn get(port: u16, path: &str) -> String {
    let mut http = TcpStream::connect(("127.0.0.1", port)).expect("the metrics endpoint");
    http.write_all(format!("GET {path} HTTP/1.1\r\n\r\n").as_bytes()).expect("write");
    let mut text = String::new();
    http.read_to_string(&mut text).expect("read");
    text.split_once("\r\n\r\n").expect("a body").1.to_owned()
}

/// SHOW MIRROR_DIFF begins anew with ENABLE MIRROR behind DISABLE MIRROR, and holds nothing of a mirror that is removed.
#[test]
fn differences_are_forgotten() -> Result<()> {
    let mut pair = Pair::start("")?;
    pair.here.sql("create table t (id int)")?;
    let find = |pair: &Pair| -> Result<()> {
        pair.wait_on()?;
        pair.client()?.query("insert into t values (1)")?.ok()?;
        pair.settled()?;
        eventually("it is found", || {
            Ok(table(&pair.pooler, "SHOW MIRROR_DIFF")?.iter().any(|row| row["differing"] == "1"))
        })
    };
    find(&pair)?;
    pair.pooler.console("ENABLE MIRROR next")?.ok()?;
    assert!(!table(&pair.pooler, "SHOW MIRROR_DIFF")?.is_empty(), "it was on");
    pair.pooler.console("DISABLE MIRROR next")?.ok()?;
    assert!(!table(&pair.pooler, "SHOW MIRROR_DIFF")?.is_empty(), "to be looked at");
    pair.pooler.console("ENABLE MIRROR next")?.ok()?;
    assert!(table(&pair.pooler, "SHOW MIRROR_DIFF")?.is_empty(), "a new beginning");
    find(&pair)?;
    pair.reload(None)?;
    assert!(table(&pair.pooler, "SHOW MIRROR_DIFF")?.is_empty(), "there is no mirror");
    pair.reload(Some(""))?;
    pair.wait_on()?;
    assert!(table(&pair.pooler, "SHOW MIRROR_DIFF")?.iter().all(|row| row["differing"] == "0"));
    Ok(())
}

/// A statement that was prepared in a transaction that failed there alone is there all the same when it is used next.
#[test]
fn a_failure_there_takes_nothing_else_from_the_session() -> Result<()> {
    for mode in MODES {
        let pair = Pair::start(mode)?;
        pair.both("create table t (id int)")?;
        pair.there.sql("alter table t add check (id < 100)")?;
        pair.wait_on()?;
        let mut client = pair.client()?;
        client.query("begin")?.ok()?;
        client.query("insert into t values (1000)")?.ok()?;
        let insert = Batch::new().parse("ins", "insert into t values ($1)").bind("", "ins", &[Some("1")]);
        client.exchange(&insert.execute("", 0).sync())?;
        client.query("set application_name = 'inside'")?.ok()?;
        client.query("commit")?.ok()?;
        pair.settled()?;
        client.exchange(&Batch::new().bind("", "ins", &[Some("2")]).execute("", 0).sync())?;
        client.query("insert into t select 3 where current_setting('application_name') = 'inside'")?.ok()?;
        let account = pair.settled()?;
        assert_eq!(account.get("dropped"), 0, "{mode}: {account:?}");
        let there = pair.there.sql_value("select string_agg(id::text, ',' order by id) from t")?;
        assert_eq!(there, "2,3", "{mode}");
        let rows = pair.differences()?;
        assert!(!format!("{rows:?}").contains("26000"), "{mode}: {rows:?}");
    }
    Ok(())
}

/// What ends its own transaction block fails there before the end: the block is not left open for what comes next.
#[test]
fn a_block_that_fails_there_alone_is_ended_there() -> Result<()> {
    for mode in MODES {
        let pair = Pair::start(mode)?;
        pair.both("create table t (id int)")?;
        pair.there.sql("alter table t add check (id < 100)")?;
        pair.wait_on()?;
        let mut client = pair.client()?;
        client.query("begin; insert into t values (1000); commit")?.ok()?;
        client.query("insert into t values (1)")?.ok()?;
        let pipeline = Batch::new().extended("begin", &[]).extended("insert into t values (2000)", &[]);
        client.exchange(&pipeline.extended("commit", &[]).sync())?;
        client.query("begin; insert into t values (2)")?.ok()?;
        client.query("insert into t values (3); commit")?.ok()?;
        client.terminate()?;
        let account = pair.settled()?;
        assert_eq!((&*account.0["state"], account.get("dropped")), ("on", 0), "{mode}: {account:?}");
        let there = pair.there.sql_value("select string_agg(id::text, ',' order by id) from t")?;
        assert_eq!(there, "1,2,3", "{mode}");
        let open = "select count(*) from pg_stat_activity where state like 'idle in transaction%'";
        assert_eq!(pair.there.sql_value(open)?, "0", "{mode}");
    }
    Ok(())
}

/// Errors that come with no result of their own: at the Sync that commits, and at a Parse.
#[test]
fn errors_behind_the_results_are_found() -> Result<()> {
    for mode in MODES {
        let pair = Pair::start(mode)?;
        pair.both("create table t (id int)")?;
        pair.here.sql("create table gone (id int)")?;
        pair.there
            .sql("alter table t add unique (id) deferrable initially deferred; insert into t values (1)")?;
        pair.wait_on()?;
        let mut client = pair.client()?;
        client.extended("insert into t values (1)", &[])?.ok()?;
        client.exchange(&Batch::new().parse("", "select * from gone").sync())?;
        let rows = pair.differences()?;
        let row = find(&rows, "insert into t");
        assert_eq!((&*row["differing"], &*row["differences"]), ("1", "error_there=1"), "{mode}: {row:?}");
        assert!(row["example"].contains("23505"), "{mode}: {row:?}");
        let row = rows.iter().find(|row| row["example"].contains("42P01")).expect("the Parse that failed");
        assert_eq!(row["differences"], "error_there=1", "{mode}: {row:?}");
    }
    Ok(())
}

#[test]
fn a_wrong_row_a_missing_table_and_a_missing_index_are_found() -> Result<()> {
    let metrics = Port::reserve()?;
    let overlay =
        format!("compare_rows = unordered\n[underpass]\nmetrics_listen = 127.0.0.1:{}", metrics.number());
    let pair = Pair::start(&overlay)?;
    pair.both(
        "create table t (id int, v text); insert into t select i, 'row ' || i from generate_series(1, 300000) i;
         create table gone (id int); create table other (id int primary key); create sequence s",
    )?;
    pair.here.sql("create index on t (id); analyze t")?;
    pair.there.sql(
        "update t set v = 'wrong' where id = 77; drop table gone; insert into other values (5); analyze t",
    )?;
    pair.pooler.console("DISABLE MIRROR next")?.ok()?;
    let mut client = pair.client()?;
    client.query("select 'dropped'")?.ok()?;
    eventually("it is counted", || Ok(pair.account()?.get("disabled") == 1))?;
    pair.pooler.console("ENABLE MIRROR next")?.ok()?;
    pair.wait_on()?;
    for id in 1..=100 {
        let by_id = Batch::new().extended("select v from t where id = $1", &[Some(&id.to_string())]);
        client.exchange(&by_id.sync())?;
    }
    client.query("begin")?;
    client.query("insert into gone values (12345)")?;
    client.query("select count(*) from t where id < 10")?;
    client.query("commit")?;
    client.query("insert into other values (5) on conflict do nothing")?;
    client.query("select now(), random()")?;
    client.query("select id from t where id in (3, 5) order by v")?;
    client.query("select nextval('s')")?;
    pair.settled()?;
    pair.there.sql("select nextval('s')")?;
    client.query("select nextval('s')")?;

    let rows = pair.differences()?;
    let by_id = find(&rows, "where id = $1");
    // Hashed as a set, so that the missing ORDER BY is no excuse.
    assert_eq!(by_id["compared"], "100");
    assert_eq!(by_id["differing"], "1", "{by_id:?}");
    assert!(by_id["slower"].parse::<u64>().unwrap() > 50, "a scan in the place of an index: {by_id:?}");
    assert!(by_id["ratio"].parse::<f64>().unwrap() > 3.0, "{by_id:?}");
    let gone = find(&rows, "into gone");
    assert_eq!(gone["differences"], "error_there=1");
    assert!(gone["example"].contains("42P01") && !gone["example"].contains("12345"), "{gone:?}");
    let after = find(&rows, "where id < $1");
    assert_eq!(after["differences"], "cascade=1");
    assert_eq!(find(&rows, "into other")["differences"], "tag=1");
    let random = find(&rows, "random()");
    assert_eq!(
        (&*random["differing"], &*random["expected"], &*random["varies"]),
        ("0", "1", "clock,random,unordered")
    );
    let sorted = find(&rows, "order by v");
    assert_eq!(sorted["differing"], "0", "{sorted:?}");
    let sequence = find(&rows, "nextval");
    assert_eq!((&*sequence["differing"], &*sequence["expected"]), ("0", "1"), "{sequence:?}");

    // The same for programs.
    let counted: u64 = rows.iter().map(|row| row["differing"].parse::<u64>().unwrap()).sum();
    let slower: u64 = rows.iter().map(|row| row["slower"].parse::<u64>().unwrap()).sum();
    let account = pair.account()?;
    let text = get(metrics.number(), "/metrics");
    let value = |name: &str, further: &str| -> u64 {
        let start = format!("underpass_mirror_{name}{{mirror=\"next\",database=\"postgres\"{further}}} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&start));
        let value: f64 = line.unwrap_or_else(|| panic!("{start}: {text}")).parse().expect("a number");
        value as u64
    };
    for (outcome, expected) in account.0.iter().filter(|(name, _)| OUTCOMES.contains(&name.as_str())) {
        let told = value("transactions_total", &format!(",outcome=\"{outcome}\""));
        assert_eq!(told.to_string(), *expected, "{outcome}");
    }
    assert!(account.get("executed") > 100 && counted > 3, "{account:?}");
    assert_eq!(account.get("dropped"), 1, "{account:?}");
    assert_eq!(value("differences_total", ""), counted);
    assert_eq!(value("slower_total", ""), slower);
    assert_eq!(value("compared_total", ""), account.get("compared"));
    assert_eq!((value("on", ""), value("queued", "")), (1, 0));

    let text = get(metrics.number(), "/mirror_diff");
    let body = text.as_str();
    let json: serde_json::Value = serde_json::from_str(body).expect("JSON");
    let rows = json["statements"].as_array().expect("rows");
    let gone = rows.iter().find(|row| row["query"] == "insert into gone values ($1)");
    assert_eq!(gone.expect("a row")["differences"][0][0], "error_there");
    assert_eq!((&json["mirrors"][0]["mirror"], &json["mirrors"][0]["queued"]), (&"next".into(), &0.into()));

    // And as a page.
    let folder = tempfile::tempdir().expect("a directory");
    let (file, page) = (folder.path().join("diff.json"), folder.path().join("page.html"));
    std::fs::write(&file, body).expect("write");
    let mut report = Command::new(Underpass::binary()?);
    let report =
        report.args(["report", "--mirrors"]).arg(&file).arg("-o").arg(&page).output().expect("report");
    assert!(report.status.success(), "{}", String::from_utf8_lossy(&report.stderr));
    let page = std::fs::read_to_string(page).expect("a page");
    let (failed, rest) = page.split_once("Answered otherwise").expect("a section");
    let (_, slower) = rest.split_once("<h2>Slower there").expect("a section");
    assert!(failed.contains("insert into gone") && failed.contains("ERROR 42P01"), "what failed there");
    assert!(slower.contains("select v from t where id = $1"), "what got slower");
    assert!(!page.contains("12345"), "literals are hidden");
    Ok(())
}

/// Both have the index; the mirror's planner does not use it.
#[test]
fn a_plan_that_is_slower_there_is_found() -> Result<()> {
    let pair = Pair::start("")?;
    pair.both(
        "create table t (id int primary key, v text); insert into t select i, 'row ' || i from generate_series(1, 300000) i;
         analyze t",
    )?;
    for scan in ["enable_indexscan", "enable_indexonlyscan", "enable_bitmapscan"] {
        pair.there.sql(&format!("alter database postgres set {scan} = off"))?;
    }
    pair.wait_on()?;
    let mut client = pair.client()?;
    for id in 1..=50 {
        client.query(&format!("select v from t where id = {id}"))?;
        client.query(&format!("select {id}"))?;
    }
    let rows = pair.differences()?;
    let by_id = find(&rows, "from t where id = $1");
    assert_eq!((&*by_id["compared"], &*by_id["differing"]), ("50", "0"), "{by_id:?}");
    let slower = |row: &Row| row["slower"].parse::<u64>().unwrap();
    assert!(slower(by_id) > 25, "{by_id:?}");
    let other = rows.iter().find(|row| row["query"] == "select $1").expect("compared");
    assert!(slower(other) < slower(by_id), "{other:?}");
    Ok(())
}

#[test]
fn literals_are_shown_only_if_asked_for() -> Result<()> {
    for (lines, shown) in [("", false), ("show_literals = 1", true)] {
        let pair = Pair::start(lines)?;
        pair.here.sql("create table here_only (v text)")?;
        pair.wait_on()?;
        pair.client()?.query("insert into here_only values ('a secret')")?;
        let rows = pair.differences()?;
        let example = &find(&rows, "here_only")["example"];
        assert_eq!(example.contains("a secret"), shown, "{example}");
    }
    Ok(())
}

#[test]
fn each_mirror_of_a_database_compares_rows_in_its_own_way() -> Result<()> {
    let mut pair = Pair::start("")?;
    // The same rows in another order, and one that is wrong.
    pair.here.sql("create table t (id int, v text); insert into t values (1, 'a'), (2, 'a'), (3, 'b')")?;
    pair.there.sql("create table t (id int, v text); insert into t values (2, 'a'), (1, 'a'), (4, 'b')")?;
    let port = pair.there.port();
    let further = |name: &str, how: &str| {
        format!(
            "[underpass:mirror:{name}]\ndatabases = *\nhost = 127.0.0.1\nport = {port}\ncompare_rows = {how}\n"
        )
    };
    let mut client = pair.client()?;
    // The session is there before the second and the third mirror, and with the first already.
    pair.wait_on()?;
    client.query("select 1")?;
    pair.settled()?;
    pair.reload(Some(&format!(
        "compare_rows = ordered\n{}{}",
        further("set", "unordered"),
        further("unseen", "off")
    )))?;
    eventually("all mirrors are on", || {
        drop(pair.client()?);
        let mirrors = pair.mirrors()?;
        Ok(mirrors.len() == 3 && mirrors.iter().all(|row| row["state"] == "on"))
    })?;
    client.query("select id from t where v = 'a' order by v")?;
    client.query("select id from t where v = 'b' order by v")?;
    let mut rows = Vec::new();
    eventually("each has compared both", || {
        rows = pair.differences()?;
        Ok(rows
            .iter()
            .filter(|row| row["query"].contains("from t"))
            .map(|row| &*row["compared"])
            .eq(["2"; 3]))
    })?;
    for (mirror, differing) in [("next", "2"), ("set", "1"), ("unseen", "0")] {
        let row = rows.iter().find(|row| row["mirror"] == mirror && row["query"].contains("from t"));
        assert_eq!(row.expect("a row")["differing"], differing, "{mirror}: {rows:?}");
    }
    Ok(())
}
