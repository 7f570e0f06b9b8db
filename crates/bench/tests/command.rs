// SPDX-License-Identifier: Apache-2.0
//! The command as a user meets it: bad input, a small run against a real PostgreSQL, Ctrl-C in the middle of one.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

// Of the fixtures this is all that these tests need.
#[path = "../../testkit/src/browser.rs"]
mod browser;

fn bench(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_underpass-bench"));
    command.args(arguments).stdin(Stdio::null());
    command
}

fn output(arguments: &[&str]) -> Output {
    bench(arguments).output().expect("the program runs")
}

/// True when PostgreSQL's server programs are installed; says so when they are not.
fn have_postgres() -> bool {
    let found = Path::new("/usr/lib/postgresql").exists();
    if !found {
        eprintln!("skipped: no PostgreSQL server in /usr/lib/postgresql");
    }
    found
}

fn results(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).expect("a result file")).expect("it is JSON")
}

#[test]
fn bad_input_is_said_before_anything_starts() {
    for (arguments, expected) in [
        (&["run", "-e", "nope"][..], "unknown experiment nope"),
        (&["run", "-e", "tax", "-s", "nope"], "unknown system nope"),
        (&["run", "-e", "workloads", "-w", "nope"], "unknown workload nope"),
        (&["run", "-e", "tax", "-c", "0"], "invalid value '0'"),
        (&["run", "--rate=-5", "-e", "many"], "--rate"),
        (&["run", "-e", "tax", "-s", "direct", "-o", "/"], "is a folder"),
        (&["run", "-e", "tax", "-s", "direct", "-o", "/proc/no/results.json"], "another --output"),
        // 50,000 processes of the server are more than any machine of a test has memory for.
        (&["run", "-e", "tax", "-s", "direct", "-c", "50000"], "MiB of memory are needed"),
        (&["report", "/nonexistent.json"], "cannot read"),
        (&["report"], "required"),
    ] {
        let output = output(arguments);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(expected), "{arguments:?}: {text}");
        assert!(!text.contains("RUST_BACKTRACE"), "{text}");
    }
}

/// A table with one pooler whose program is started by `command`, words in TOML's quotes.
fn table_of(folder: &Path, command: &str) -> std::path::PathBuf {
    let path = folder.join("systems.toml");
    let entry = format!(
        "[[system]]\nname = 'mine'\ntitle = 'mine'\nkind = 'other'\ncommand = [{command}]\n\
         pool_modes = ['session', 'transaction']\nprepared = []\n"
    );
    std::fs::write(&path, entry).unwrap();
    path
}

#[test]
fn a_missing_program_is_said_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    let table = table_of(folder.path(), "'no-such-pooler'");
    let output = output(&["run", "-e", "tax", "-s", "mine", "--systems-file", table.to_str().unwrap()]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && text.contains("install no-such-pooler or leave the system out"),
        "{text}"
    );
}

#[test]
fn a_pooler_whose_port_is_in_use_is_said_before_anything_is_measured() {
    if !have_postgres() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let command = format!(
        "'underpass-bench', 'forward', '--listen', '{}', '--to', '{{{{server_host}}}}:{{{{server_port}}}}'",
        taken.local_addr().unwrap()
    );
    let table = table_of(folder.path(), &command);
    let file = folder.path().join("results.json");
    let output = bench(&["run", "-e", "tax", "-s", "mine", "-c", "1", "-m", "simple", "--systems-file"])
        .arg(&table)
        .arg("-o")
        .arg(&file)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("system mine does not start"), "{text}");
    assert!(text.contains("Address already in use"), "{text}");
    assert!(!file.exists(), "something was measured");
}

#[test]
fn a_pooler_that_nobody_named_is_left_out_with_the_end_of_its_log() {
    if !have_postgres() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // The experiment's own systems: one that ends at once, the others not installed.
    let broken = "command = ['sh', '-c', 'echo a first line; echo the cause of it; exit 3', '{{config}}']";
    let table = include_str!("../../../bench/systems.toml")
        .replace("command = [\"odyssey\", \"{{config}}\"]", broken)
        .replace("command = [\"", "command = [\"no-such-");
    assert!(table.contains(broken));
    let path = folder.path().join("systems.toml");
    std::fs::write(&path, table).unwrap();
    let output = bench(&["run", "-e", "tax", "-c", "1", "-m", "simple", "--rounds", "1", "--seconds", "0.2"])
        .arg("--systems-file")
        .arg(&path)
        .arg("-o")
        .arg(folder.path().join("results.json"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("left out: odyssey: system odyssey does not start"), "{text}");
    assert!(text.contains("the cause of it"), "{text}");
    let results = results(&folder.path().join("results.json"));
    assert!(results["meta"]["skipped"].to_string().contains("the cause of it"), "{}", results["meta"]);
}

#[test]
fn too_few_descriptors_are_said_with_how_to_get_more() {
    // Root may raise any limit unless the capability to do so is taken away; others lack it anyway.
    let mut command = if nix::unistd::Uid::effective().is_root() {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", "-sys_resource", "prlimit"]);
        command
    } else {
        Command::new("prlimit")
    };
    let output = command
        .arg("--nofile=300:300")
        .arg(env!("CARGO_BIN_EXE_underpass-bench"))
        .args(["run", "-e", "idle", "-s", "pgbouncer", "-c", "2000"])
        .output()
        .expect("util-linux is there");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && text.contains("file descriptors are needed and the limit is 300"),
        "{text}"
    );
    assert!(text.contains("ulimit -Hn"), "{text}");
}

#[test]
fn a_reader_that_has_seen_enough_breaks_nothing() {
    let mut list = bench(&["list"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(list.stdout.take());
    let output = list.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.is_empty(), "{}: {text}", output.status);
}

#[test]
fn a_run_whose_reader_goes_ends_and_keeps_what_it_has() {
    if !have_postgres() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("results.json");
    let mut run = bench(&["run", "-e", "tax", "-s", "direct", "-c", "2", "-m", "simple", "--seconds", "0.2"])
        .args(["--rounds", "100", "-o"])
        .arg(&file)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(run.stdout.take());
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(results(&file)["interrupted"], true);
}

#[test]
fn a_small_run_measures_and_reports() {
    if !have_postgres() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("results.json");
    let path = file.to_str().unwrap();
    let output = output(&[
        "run",
        "-e",
        "tax",
        "-s",
        "direct",
        "-c",
        "2",
        "-m",
        "simple",
        "--seconds",
        "1",
        "--rounds",
        "2",
        "-o",
        path,
    ]);
    // A plan starts nothing.
    let plan = bench(&["run", "--profile", "reference", "--plan"]).output().unwrap();
    assert!(String::from_utf8_lossy(&plan.stdout).contains("min in all"), "{plan:?}");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let results = results(&file);
    let samples = results["samples"].as_array().unwrap();
    assert_eq!(samples.len(), 2);
    for sample in samples {
        let metric = |name: &str| sample["metrics"][name].as_f64().unwrap_or(0.0);
        assert!(
            metric("tps") > 100.0 && metric("cpu_us") > 1.0 && metric("latency_p99_ms") > 0.0,
            "{sample}"
        );
    }
    let meta = |path: &str| results.pointer(&format!("/meta/{path}")).and_then(|value| value.as_str());
    for path in ["kernel", "cpu", "began", "command", "versions/postgres", "versions/pgbench"] {
        assert!(meta(path).is_some_and(|value| !value.is_empty()), "{path}: {}", results["meta"]);
    }
    assert!(meta("revision").is_some(), "empty only outside of a git tree");
    let page = std::fs::read_to_string(file.with_extension("html")).unwrap();
    assert!(page.contains("clients=2 mode=simple"));
    browser::assert_every_plot_is_drawn(&file.with_extension("html"));
}

#[test]
fn ctrl_c_keeps_what_was_measured_and_leaves_nothing_running() {
    if !have_postgres() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("results.json");
    let mut run =
        bench(&["run", "-e", "tax", "-s", "direct", "-c", "2", "-m", "simple", "--seconds", "1", "-o"])
            .arg(&file)
            .env("TMPDIR", folder.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
    std::thread::sleep(Duration::from_secs(10));
    kill(Pid::from_raw(run.id() as i32), Signal::SIGINT).unwrap();
    assert_eq!(run.wait().unwrap().code(), Some(130));
    let results = results(&file);
    assert_eq!(results["interrupted"], true);
    assert!(results["samples"].as_array().unwrap().iter().all(|sample| sample["error"].is_null()));
    let left: Vec<_> = std::fs::read_dir(folder.path())
        .unwrap()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("underpass-bench-"))
        .collect();
    assert!(left.is_empty(), "the private server's folder is still there: {left:?}");
}
