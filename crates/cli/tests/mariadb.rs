// SPDX-License-Identifier: Apache-2.0
//! MariaDB from end to end: `underpass trace` records its shells, by packets and, with TLS and by the Unix socket, by probes; `underpass report`
//! and `underpass export` read the trace, and `underpass replay` plays it on another server. Skipped where MariaDB is not installed.

mod common;

use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use common::{binary, output, skipped, start_recorder, stop_recorder, wait};
use underpass_testkit::{Authority, Mariadb};

/// Shells that work at the same time, and transactions of each.
const SHELLS: usize = 4;
const TRANSACTIONS: usize = 15;
const SETUP: &str = "use shop; create table account (id int primary key, n int); \
                     create table moved (shell int, number int, n int)";
/// What shows whether two servers have the same data.
const STATES: [&str; 3] = [
    "select group_concat(id, ':', n order by id) from shop.account",
    "select group_concat(shell, ':', number, ':', n order by shell, number) from shop.moved",
    "select group_concat(a, ':', b order by a) from shop.made",
];

fn missing() -> bool {
    if Mariadb::is_missing() {
        eprintln!("skipped: mariadbd is not installed");
        return true;
    }
    if Mariadb::is_mysql() {
        eprintln!("skipped: this MySQL has no TLS");
        return true;
    }
    skipped()
}

fn server(authority: &Authority) -> Mariadb {
    let server = Mariadb::start_tls(authority).expect("MariaDB");
    server.sql(SETUP).expect("tables");
    let rows: Vec<String> = (0..10).map(|id| format!("({id}, 0)")).collect();
    server.sql(&format!("insert into shop.account values {}", rows.join(", "))).expect("rows");
    server
}

fn shell(mut command: Command, ssl: &str, script: &str) -> std::process::Child {
    command.args(["--force", ssl, "--local-infile=1"]).stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the shell");
    child.stdin.take().expect("its input").write_all(script.as_bytes()).expect("a script");
    child
}

/// Transactions that meet at the same rows, in the same order in each, then what one shell says alone: errors, a rollback, a prepared statement,
/// a file.
fn workload(server: &Mariadb, directory: &Path) {
    let shells: Vec<_> = (0..SHELLS)
        .map(|number| {
            let mut script = String::new();
            for turn in 0..TRANSACTIONS {
                let id = turn % 10;
                let _ = writeln!(
                    script,
                    "begin;\nupdate account set n = n + {turn} where id = {id};\n\
                     insert into moved values ({number}, {turn}, {turn});\ncommit;"
                );
            }
            // By each way there is.
            match number % 3 {
                0 => shell(server.shell().expect("the shell"), "--skip-ssl", &script),
                1 => shell(server.shell().expect("the shell"), "--ssl", &script),
                _ => shell(server.shell_by_socket().expect("the shell"), "--skip-ssl", &script),
            }
        })
        .collect();
    for mut shell in shells {
        assert!(shell.wait().expect("the shell").success());
    }
    let file = directory.join("rows.csv");
    fs::write(&file, "7\tseven\n8\teight\n").expect("a file");
    let script = format!(
        "create table made (a int primary key, b text);\ninsert into made values (1, 'one'), (2, 'two');\n\
         insert into made values (1, 'again');\nselect * from nowhere;\nbegin;\ndelete from made;\nrollback;\n\
         prepare p from 'update made set b = ? where a = ?';\nset @b = 'zwei', @a = 2;\nexecute p using @b, @a;\n\
         load data local infile '{}' into table made;\nselect * from made;\n",
        file.display()
    );
    // The shell's own status tells its last error.
    shell(server.shell().expect("the shell"), "--skip-ssl", &script).wait().expect("the shell");
}

fn state(server: &Mariadb) -> Vec<String> {
    STATES.iter().map(|query| server.sql(query).expect("a state")).collect()
}

fn underpass(arguments: &[&str], trace: &Path) -> (String, String) {
    let done = output(Command::new(binary()).args(arguments).arg(trace));
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{arguments:?}: {err}{out}");
    (out.into_owned(), err.into_owned())
}

#[test]
fn a_recorded_workload_is_reported_exported_and_makes_the_same_data_on_another_server() {
    if missing() {
        return;
    }
    let authority = Authority::new("test").expect("an authority");
    let original = server(&authority);
    let parent = tempfile::tempdir().expect("a directory");
    let trace = parent.path().join("trace");
    let (port, path) = (original.port().to_string(), trace.display().to_string());
    let recorder = start_recorder(&["-p", &port, "-o", &path, "--require-lossless"]);
    workload(&original, parent.path());
    let clients = "select count(*) from information_schema.processlist where user = 'ann'";
    wait("the last client to go", || (original.sql(clients).expect("a number") == "0").then_some(()));
    let (code, text) = stop_recorder(recorder);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("nothing is missing"), "{text}");

    // BEGIN, UPDATE, INSERT and COMMIT of each transaction.
    let said = SHELLS * TRANSACTIONS;
    let (report, _) = underpass(&["report", "--no-page"], &trace);
    for word in ["MariaDB", "update account set n = n + ? where id = ?", "42S02", "23000"] {
        assert!(report.contains(word), "{word}\n{report}");
    }
    let tables = parent.path().join("tables");
    let (_, told) = underpass(&["export", "-f", "parquet", "-o", tables.to_str().expect("a path")], &trace);
    let statements: usize = told.split(' ').next().expect("a number").parse().expect("a number");
    assert!(statements >= 4 * said && told.contains(" 0 losses in "), "{told}");
    assert!(tables.join("sessions/part-00000.parquet").exists(), "{told}");

    let copy = server(&authority);
    let credentials = parent.path().join("users");
    fs::write(&credentials, "\"ann\" \"S3cret\"\n").expect("credentials");
    let to = format!("mysql://bob@127.0.0.1:{}/?sslmode=require", copy.port());
    let (json, _) = underpass(
        &[
            "replay",
            "--pace",
            "asap",
            "--order",
            "commit",
            "--user",
            "ann",
            "--require-equal",
            "--credentials",
            credentials.to_str().expect("a path"),
            "--json",
            "-",
            "--to",
            &to,
        ],
        &trace,
    );
    let report: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let counts = &report["counts"];
    assert_eq!(counts["sessions"], SHELLS + 1, "{report}");
    assert_eq!((&counts["units"], &counts["released"]), (&counts["equal"], &0.into()), "{report}");
    assert!(counts["equal"].as_u64().is_some_and(|equal| equal as usize > 4 * said), "{report}");
    assert_eq!(state(&copy), state(&original));

    // Again: what was made is there.
    let to = format!("mysql://ann@127.0.0.1:{}/?sslmode=disable", copy.port());
    let mut again = Command::new(binary());
    again.env("MYSQL_PWD", "S3cret").args(["replay", "--pace", "asap", "--one-user", "--user", "ann"]);
    let done = output(again.args(["--require-equal", "--to", &to]).arg(&trace));
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    assert_eq!(done.status.code(), Some(3), "{text}");
    assert!(text.contains("42S01") && text.contains("23000"), "{text}");
}
