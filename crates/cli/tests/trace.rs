// SPDX-License-Identifier: Apache-2.0
//! `underpass trace` as a process: its refusals, its end by signals, and what is left when it is killed.

mod common;

use std::process::{Command, Output};
use std::time::Duration;

use common::{binary, output, skipped, start_recorder, wait};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use underpass_testkit::{Client, Port, Postgres};
use underpass_trace::{Reader, Record};

fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = output(Command::new(binary()).arg("trace").args(arguments));
    (
        status.code(),
        String::from_utf8_lossy(&stdout).into_owned(),
        String::from_utf8_lossy(&stderr).into_owned(),
    )
}

fn messages(directory: &std::path::Path) -> usize {
    let mut reader = Reader::open(directory).expect("a trace");
    let mut messages = 0;
    while let Some(record) = reader.next().expect("a record") {
        messages += usize::from(matches!(record, Record::Frontend(_)));
    }
    messages
}

#[test]
fn refusals_say_what_is_wrong() {
    let free = Port::reserve().expect("a port");
    let (code, _, text) = run(&["-p", &free.number().to_string(), "-d", "1"]);
    assert_eq!(code, Some(1));
    assert!(text.contains("listens on TCP port") || text.contains("not permitted"), "{text}");
    if skipped() {
        return;
    }
    let (code, _, text) = run(&["--pid", "4194300"]);
    assert!(code == Some(1) && text.contains("no process 4194300"), "{text}");
    let own = std::process::id().to_string();
    let (code, _, text) = run(&["--pid", &own]);
    assert!(code == Some(1) && text.contains("has the process"), "{text}");
    let (code, _, text) = run(&["--unit", "nothing-like-it"]);
    assert!(code == Some(1) && text.contains("is in the unit nothing-like-it.service"), "{text}");
    let (code, _, text) = run(&["--pid", "1", "--port", "1"]);
    assert!(code == Some(2) && text.contains("cannot be used with"), "{text}");
}

#[test]
fn the_list_shows_a_server_and_how_it_can_be_recorded() {
    let postgres = Postgres::start().expect("a server");
    let (code, text, _) = run(&["--list"]);
    assert_eq!(code, Some(0));
    if skipped() {
        return;
    }
    let at = text.find(&format!("pid {} ", postgres.pid())).expect("the server");
    let block: String = text[at..].lines().take(4).collect::<Vec<_>>().join("\n");
    assert!(block.contains(&format!("127.0.0.1:{}", postgres.port())), "{block}");
    assert!(block.contains("by packets") && block.contains("by probes"), "{block}");
}

#[test]
fn a_trace_is_new_complete_and_ends_by_a_signal() {
    if skipped() {
        return;
    }
    let postgres = Postgres::start().expect("a server");
    let parent = tempfile::tempdir().expect("a directory");
    let directory = parent.path().join("trace");
    let (port, path) = (postgres.port().to_string(), directory.display().to_string());
    let mut child = start_recorder(&["-p", &port, "-o", &path, "--require-lossless"]);
    let mut client = Client::connect(&postgres.options("postgres", "postgres")).expect("connect");
    for _ in 0..10 {
        client.query("select 1").expect("an answer");
    }
    client.terminate().expect("terminate");
    std::thread::sleep(Duration::from_millis(300));
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).expect("kill");
    assert_eq!(child.wait().expect("an end").code(), Some(0));
    assert_eq!(messages(&directory), 11);
    let (code, _, text) = run(&["-p", &port, "-o", &path, "-d", "1"]);
    assert!(code == Some(1) && text.contains("never written over"), "{text}");
}

#[test]
fn masked_values_are_in_no_trace_and_equal_ones_stay_equal() {
    if skipped() {
        return;
    }
    let postgres = Postgres::start().expect("a server");
    let parent = tempfile::tempdir().expect("a directory");
    let (port, key) = (postgres.port().to_string(), parent.path().join("key"));
    std::fs::write(&key, "short").expect("a file");
    let (code, _, text) = run(&["-p", &port, "--mask-key", &key.display().to_string(), "-d", "1"]);
    assert!(code == Some(1) && text.contains("a key of 5 bytes can be guessed"), "{text}");
    std::fs::write(&key, [7; 32]).expect("a file");
    let texts = |number: u8, how: &[&str]| {
        let directory = parent.path().join(number.to_string());
        let path = directory.display().to_string();
        let mut child = start_recorder(
            &[&["-p", &port, "-o", &path, "--level", "full", "--require-lossless"], how].concat(),
        );
        let mut client = Client::connect(&postgres.options("postgres", "postgres")).expect("connect");
        client.query("select 'Smith', 4711").expect("an answer");
        client.extended("select $1", &[Some("Smith")]).expect("an answer");
        client.terminate().expect("terminate");
        wait("the session's end", || {
            let sessions = "select count(*) from pg_stat_activity where client_port > 0";
            (postgres.sql_value(sessions).expect("a count") == "0").then_some(())
        });
        kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).expect("kill");
        assert_eq!(child.wait().expect("an end").code(), Some(0));
        let mut reader = Reader::open(&directory).expect("a trace");
        assert_eq!(reader.meta().redaction.literals, !how.is_empty());
        let mut texts = Vec::new();
        while let Some(record) = reader.next().expect("a record") {
            match record {
                Record::Frontend(message) => {
                    texts.push(String::from_utf8_lossy(&message.message).into_owned());
                }
                Record::Backend(message) => assert!(how.is_empty(), "{message:?}"),
                _ => {}
            }
        }
        texts.concat()
    };
    let clear = texts(1, &[]);
    assert!(clear.matches("Smith").count() == 2 && clear.contains("4711"), "{clear}");
    let key = key.display().to_string();
    let masked = [texts(2, &["--mask"]), texts(3, &["--mask-key", &key]), texts(4, &["--mask-key", &key])];
    for text in &masked {
        assert!(!text.contains("Smith") && !text.contains("4711"), "{text}");
        let literal = text.split('\'').nth(1).expect("a literal");
        assert!(literal.len() == 5 && text.matches(literal).count() == 2, "{text}");
    }
    assert!(masked[0] != masked[1] && masked[1] == masked[2], "one key masks alike, another does not");
}

#[test]
fn a_killed_recorder_leaves_a_readable_trace_and_a_healthy_server() {
    if skipped() {
        return;
    }
    let postgres = Postgres::start().expect("a server");
    let parent = tempfile::tempdir().expect("a directory");
    let directory = parent.path().join("trace");
    let (port, path) = (postgres.port().to_string(), directory.display().to_string());
    let mut child = start_recorder(&["-p", &port, "-o", &path, "--probes", "always"]);
    let mut tcp = Client::connect(&postgres.options("postgres", "postgres")).expect("connect");
    let mut unix = Client::connect(&postgres.superuser()).expect("connect");
    let until = std::time::Instant::now() + Duration::from_millis(2500);
    let mut asked = 0;
    while std::time::Instant::now() < until {
        tcp.query("select 1").expect("an answer");
        unix.query("select 2").expect("an answer");
        asked += 2;
    }
    child.kill().expect("kill");
    child.wait().expect("an end");
    for client in [&mut tcp, &mut unix] {
        assert_eq!(client.query("select 3").expect("the server goes on").value(), Some("3"));
    }
    // Blocks end after a second: what was before is there.
    let found = messages(&directory);
    assert!(found > asked / 10 && found <= asked, "{found} of {asked}");
    // Nothing of it stays in the kernel: the next recorder begins as if it were the first.
    let again = parent.path().join("again").display().to_string();
    let mut child = start_recorder(&["-p", &port, "-o", &again, "-d", "1", "--require-lossless"]);
    assert_eq!(child.wait().expect("an end").code(), Some(0));
}

#[test]
fn the_early_stages_write_nothing() {
    if skipped() {
        return;
    }
    let postgres = Postgres::start().expect("a server");
    let parent = tempfile::tempdir().expect("a directory");
    let path = parent.path().join("trace").display().to_string();
    let port = postgres.port().to_string();
    for (stage, messages) in
        [("attach", "messages      0 of clients"), ("process", "messages      2 of clients")]
    {
        let child = start_recorder(&["-p", &port, "-o", &path, "--stage", stage]);
        let mut client = Client::connect(&postgres.options("postgres", "postgres")).expect("connect");
        client.query("select 1").expect("an answer");
        client.terminate().expect("terminate");
        // Closed sockets tell their totals a moment after the client has gone.
        std::thread::sleep(Duration::from_millis(300));
        kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).expect("kill");
        let output = child.wait_with_output().expect("an end");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains(messages), "{stage}: {text}");
        assert!(text.contains("packets to the server: seen"), "{stage}: {text}");
        assert_eq!(std::fs::read_dir(&parent).expect("a directory").count(), 0, "{stage}");
    }
}

#[test]
fn a_lossy_recording_says_so_and_fails_where_that_is_asked() {
    if skipped() {
        return;
    }
    let postgres = Postgres::start().expect("a server");
    let parent = tempfile::tempdir().expect("a directory");
    let path = parent.path().join("trace").display().to_string();
    let port = postgres.port().to_string();
    let child = start_recorder(&["-p", &port, "-o", &path, "--ring-size", "0", "--require-lossless"]);
    let mut client = Client::connect(&postgres.options("postgres", "postgres")).expect("connect");
    // Many times the smallest rings, faster than they are read.
    for _ in 0..5 {
        client.query(&format!("select length('{}')", "x".repeat(8 << 20))).expect("the server goes on");
    }
    client.terminate().expect("terminate");
    std::thread::sleep(Duration::from_millis(300));
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).expect("kill");
    let output = child.wait_with_output().expect("an end");
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(3), "{text}");
    assert!(text.contains(" losses, ") && !text.contains("nothing is missing"), "{text}");
}

/// A cgroup without processes, which goes with the value.
struct Cgroup(std::path::PathBuf);

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn a_hook_that_sees_nothing_is_an_error() {
    if skipped() {
        return;
    }
    let postgres = Postgres::start().expect("a server");
    let mount = underpass_capture::cgroup2_mount().expect("a mount");
    let cgroup = Cgroup(mount.join(format!("underpass-test-{}", std::process::id())));
    if let Err(error) = std::fs::create_dir(&cgroup.0) {
        return eprintln!("skipped: no cgroup can be made here: {error}");
    }
    let (port, at) = (postgres.port().to_string(), cgroup.0.display().to_string());
    let parent = tempfile::tempdir().expect("a directory");
    let path = parent.path().join("trace");
    let (code, _, text) = run(&["-p", &port, "--cgroup", &at, "-o", &path.display().to_string()]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("attached but silent") && text.contains(&at), "{text}");
    assert!(!path.exists(), "nothing is left behind");
}
