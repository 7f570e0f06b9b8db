// SPDX-License-Identifier: Apache-2.0
//! The log of a server is imported and played on a copy of it: what a log does not tell is no difference.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::{binary, output, wait};
use underpass_testkit::{Batch, Client, Postgres, PostgresBuilder};

fn server(builder: PostgresBuilder<'_>) -> Postgres {
    let server = builder.start().expect("a server");
    server.sql("create table t (id int primary key, v text); insert into t values (1, 'a')").expect("setup");
    server
}

/// What a client does: results with and without rows, several statements in one, errors, a transaction that fails.
fn work(client: &mut Client) {
    for query in [
        "select * from t",
        "insert into t values (2, 'b'), (3, 'c')",
        "update t set v = v || 'x' where id > 1",
        "begin; select count(*) from t; update t set v = 'y' where id = 2",
        "delete from t where id = 3",
        "commit",
        "select 1 / (id - id) from t",
        "begin",
        "insert into t values (1, 'twice')",
        "select 1",
        "commit",
        "create table made as select * from t",
        "select id into other from made",
        "prepare p as select count(*) from made",
        "execute p",
        "explain select 1",
        "set work_mem = '5MB'",
        "select 1; select 1 / (id - id) from t; select 2",
        "",
    ] {
        client.exchange(&Batch::new().query(query)).expect("an answer");
    }
    client.extended("select v from t where id = $1", &[Some("2")]).expect("a row");
    client.extended("insert into t values ($1, $2)", &[Some("9"), None]).expect("a row");
    // Its data are in no log.
    client.send(&Batch::new().query("copy t from stdin")).expect("copy");
    while client.recv().expect("CopyInResponse").tag != b'G' {}
    client.send(&Batch::new().copy_data(b"7\tcopied\n").copy_done()).expect("data");
    client.response().expect("copied");
    client.query("select 3").expect("a row");
}

fn underpass(folder: &Path, arguments: &[&str]) -> String {
    let output = output(Command::new(binary()).args(arguments).current_dir(folder));
    let (text, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {error}{text}");
    text.into_owned()
}

#[test]
fn a_log_is_played_on_a_copy_and_nothing_differs() {
    let settings = [
        ("logging_collector", "on"),
        ("log_destination", "csvlog"),
        ("log_directory", "log"),
        ("log_filename", "server.log"),
        ("log_min_duration_statement", "0"),
        ("log_connections", "on"),
        ("log_disconnections", "on"),
    ];
    let logs = |builder: PostgresBuilder<'static>, (name, value)| builder.setting(name, value);
    let original = server(settings.into_iter().fold(Postgres::builder(), logs));
    let copy = server(Postgres::builder());
    let options = original.options("postgres", "postgres").parameter("application_name", "logged");
    let mut client = Client::connect(&options).expect("connect");
    work(&mut client);
    client.terminate().expect("terminate");

    let folder = tempfile::tempdir().expect("a directory");
    let log = original.data_dir().join("log/server.csv");
    wait("the end of the session in the log", || {
        let text = fs::read_to_string(&log).unwrap_or_default();
        let mut lines = text.lines().filter(|line| line.contains("\"logged\""));
        lines.any(|line| line.contains("disconnection: ")).then_some(())
    });
    underpass(folder.path(), &["import", log.to_str().expect("a path"), "-o", "trace"]);
    let target = format!("host=127.0.0.1 port={} user=postgres dbname=postgres sslmode=disable", copy.port());
    let arguments = ["replay", "trace", "--pace", "asap", "--application-name", "logged", "--to", &target];
    let report = underpass(folder.path(), &[&arguments[..], &["--require-equal", "--json", "-"]].concat());
    let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
    let counts = &report["counts"];
    assert_eq!(report["omitted"]["units"], serde_json::json!({"no_copy_data": 1}), "{report}");
    assert_eq!((&counts["unknown"], &counts["equal"]), (&0.into(), &counts["units"]), "{report}");
    let rows = "select string_agg(t::text, ' ' order by id) from t where v is distinct from 'copied'";
    assert_eq!(copy.sql_value(rows).expect("rows"), original.sql_value(rows).expect("rows"));
}
