// SPDX-License-Identifier: Apache-2.0
//! import, report and export as a user types them: texts, files, exit codes.

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};

use common::{binary, output};
use underpass_testkit::assert_every_plot_is_drawn;

const LOG: &str = r#"2026-01-01 10:00:01.000 CET,"app","shop",100,"[local]",65950000.64,3,"SELECT",2026-01-01 10:00:00 CET,3/2,0,LOG,00000,"duration: 250.500 ms  statement: select 1",,,,,,,,,"psql","client backend",,0
2026-01-01 10:00:03.000 CET,"app","shop",100,"[local]",65950000.64,7,"SELECT",2026-01-01 10:00:00 CET,3/3,0,ERROR,22012,"division by zero",,,,,,"select 1/0",,,"psql","client backend",,0
"#;

fn run(folder: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(binary());
    let Output { status, stdout, stderr } = output(command.args(arguments).current_dir(folder));
    (status.code(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

#[test]
fn what_differs_on_mirrors_becomes_a_page() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let row = r#"{"mirror":"next","database":"shop","fingerprint":"1","query":"insert into gone values ($1)","varies":[],
        "compared":9,"differences":[["error_there",3]],"expected":0,"timed":0,"slower":0,"mean_here_us":0,"mean_there_us":0,
        "max_here_us":0,"max_there_us":0,"example":null}"#;
    fs::write(folder.join("diff.json"), format!(r#"{{"mirrors":[],"statements":[{row}]}}"#)).unwrap();
    let (code, out, err) = run(folder, &["report", "--mirrors", "diff.json"]);
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains("error_there 3 of 9: insert into gone"), "{out}");
    assert!(err.contains("page: mirrors.html"), "{err}");
    assert!(fs::read_to_string(folder.join("mirrors.html")).unwrap().contains("Failed there, worked here"));
    fs::write(folder.join("other.json"), "[]").unwrap();
    let (code, _, err) = run(folder, &["report", "--mirrors", "other.json"]);
    assert!(code == Some(1) && err.contains("/mirror_diff"), "{err}");
    assert_eq!(run(folder, &["report", "--mirrors", "diff.json", "trace"]).0, Some(2));
}

#[test]
fn a_log_becomes_a_trace_a_report_and_exports() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(folder.join("log.csv"), LOG).unwrap();
    let (code, _, err) = run(folder, &["import", "log.csv", "-o", "monday"]);
    assert_eq!(code, Some(0), "{err}");
    assert!(err.contains("2 statements of 1 sessions, 1 errors, from 2 lines"), "{err}");
    assert!(err.contains("from 2 lines, of which 0 say nothing of a statement"), "{err}");
    assert!(err.contains("2 lines name a time zone by an abbreviation"), "{err}");
    assert!(err.contains("1 sessions have no line about their end (log_disconnections = on"), "{err}");

    let (code, out, err) = run(folder, &["report", "monday"]);
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains("select $1") && out.contains("22012  division by zero"), "{out}");
    assert!(err.contains("page: monday/report.html"), "{err}");
    let page = folder.join("monday/report.html");
    assert!(fs::read_to_string(&page).unwrap().contains("What this trace does not know"));
    assert_eq!(page.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert_every_plot_is_drawn(&page);
    // Again: a report is made anew, and a page in the trace's directory is no segment.
    assert_eq!(run(folder, &["report", "monday", "--top", "1"]).0, Some(0));

    // Before it connects: a log has no rows that could be compared.
    let nowhere = "postgres://app@127.0.0.1:1/shop";
    let (code, _, err) = run(folder, &["replay", "monday", "--to", nowhere, "--rows", "ordered"]);
    assert!(code == Some(1) && err.contains("which --rows would compare"), "{code:?}: {err}");

    let (code, out, _) = run(folder, &["export", "monday", "-f", "jsonl"]);
    assert!(
        code == Some(0) && out.lines().all(|line| line.starts_with('{')) && out.contains("select 1/0"),
        "{out}"
    );
    for (format, place, file) in [
        ("parquet", "tables", "tables/statements/date=2026-01-01/hour=10/part-00000.parquet"),
        ("sql", "scripts", "scripts/session-000001.sql"),
        ("jsonl", "lines.jsonl", "lines.jsonl"),
    ] {
        let (code, _, err) = run(folder, &["export", "monday", "-f", format, "-o", place]);
        assert_eq!(code, Some(0), "{err}");
        assert!(folder.join(file).exists(), "{file}: {err}");
        let (code, _, err) = run(folder, &["export", "monday", "-f", format, "-o", place]);
        assert!(code == Some(1) && err.contains("exists"), "{format}: {err}");
    }
}

/// What nothing was understood of is no workload of nothing.
#[test]
fn a_log_in_another_language_is_refused_with_the_settings_to_change() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let log = LOG
        .replace("duration: 250.500 ms  statement: ", "Dauer: 250.500 ms  Anweisung: ")
        .replace("ERROR", "FEHLER")
        .replace("division by zero", "Division durch Null");
    fs::write(folder.join("log.csv"), log).unwrap();
    let (code, _, err) = run(folder, &["import", "log.csv", "-o", "monday"]);
    assert_eq!(code, Some(1), "{err}");
    for word in ["of which 2 say nothing", "lc_messages", "log_statement", "log_min_duration_statement"] {
        assert!(err.contains(word), "{word}: {err}");
    }
    assert!(!folder.join("monday").exists(), "nothing is made of it");
    // Nor of what is no log, though there is one before it; a directory that was there stays.
    fs::write(folder.join("good.csv"), LOG).unwrap();
    fs::write(folder.join("text"), "no log\n").unwrap();
    fs::create_dir(folder.join("monday")).unwrap();
    let (code, _, err) = run(folder, &["import", "good.csv", "text", "-o", "monday"]);
    assert!(code == Some(1) && err.contains("text: line 1"), "{err}");
    assert_eq!(fs::read_dir(folder.join("monday")).unwrap().count(), 0);
    assert_eq!(run(folder, &["import", "good.csv", "-o", "monday"]).0, Some(0));
    // In an empty one there is nothing to misunderstand.
    fs::write(folder.join("empty.csv"), "").unwrap();
    assert_eq!(run(folder, &["import", "empty.csv", "-o", "tuesday"]).0, Some(0));
}

/// `2>&1 | head`: who reads has seen enough.
#[test]
fn nobody_has_to_read_what_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(folder.join("log.csv"), LOG).unwrap();
    for arguments in [
        &["import", "log.csv", "-o", "monday"][..],
        &["export", "monday", "-f", "sql", "-o", "scripts"],
        &["report", "monday"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(binary());
        let out = writer.try_clone().unwrap();
        let status = command.args(arguments).current_dir(folder).stdout(out).stderr(writer).status().unwrap();
        assert_eq!(status.code(), Some(0), "{arguments:?}");
    }
}

#[test]
fn mistakes_are_said_plainly() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    fs::write(folder.join("text"), "no trace and no log\n").unwrap();
    for (arguments, text) in [
        (&["report", "nothing"][..], "no trace here"),
        (&["report", "text"], "text: not a trace"),
        (&["export", "nothing", "-f", "jsonl"], "no trace here"),
        (&["import", "nothing.csv", "-o", "new"], "cannot open nothing.csv"),
        (&["import", "text", "-o", "new2"], "text: line 1: too few columns: not PostgreSQL's CSV log"),
        (&["import", "text", "-o", "text"], "never written over"),
    ] {
        let (code, _, err) = run(folder, arguments);
        assert!(code == Some(1) && err.contains(text), "{arguments:?}: {err}");
    }
    assert!(!folder.join("new").exists(), "nothing is made when a log is missing");
    assert!(!folder.join("new2").exists(), "nor when it is none");
    for arguments in [&["report"][..], &["export", "x"], &["export", "x", "-f", "xml"], &["import", "x"]] {
        assert_eq!(run(folder, arguments).0, Some(2), "{arguments:?}");
    }
}

#[test]
fn help_teaches_by_examples() {
    for command in ["report", "export", "import"] {
        let (code, out, _) = run(Path::new("/"), &[command, "--help"]);
        assert!(code == Some(0) && out.contains("Example") && out.contains("underpass "), "{out}");
        let settings = ["lc_messages", "log_disconnections"].iter().all(|name| out.contains(name));
        assert_eq!(settings, command == "import", "{out}");
    }
    let (_, page, _) = run(Path::new("/"), &["man"]);
    for word in ["UNDERPASS REPORT", "UNDERPASS EXPORT", "UNDERPASS POOLER", "parquet"] {
        assert!(page.contains(word), "{word}");
    }
}
