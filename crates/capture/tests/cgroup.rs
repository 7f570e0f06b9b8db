// SPDX-License-Identifier: Apache-2.0
//! Whose sockets are watched: those of the server's own cgroup, and wherever else it turns out to be.
//!
//! One test at a time: this process moves itself, and whatever it starts meanwhile comes along.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, id};
use std::sync::Mutex;
use std::time::Duration;

use common::{Capture, Setup, Trace, skipped};
use underpass_capture::Probes;
use underpass_testkit::{Batch, Client, Postgres};

static ALONE: Mutex<()> = Mutex::new(());

/// A cgroup of version 2; removed with the value.
struct Cgroup(PathBuf);

fn enter(cgroup: &Path, pid: u32) {
    fs::write(cgroup.join("cgroup.procs"), pid.to_string()).expect("to be moved");
}

impl Cgroup {
    fn new(name: &str) -> Self {
        let mount = underpass_capture::cgroup2_mount().expect("a cgroup version 2 hierarchy");
        let path = mount.join(format!("underpass-test-{name}-{}", id()));
        fs::create_dir(&path).expect("a cgroup");
        Self(path)
    }

    /// Calls `start` with this process in there, so that the sockets belong there of what it starts.
    fn start(&self, start: impl FnOnce()) {
        let all = fs::read_to_string("/proc/self/cgroup").expect("our cgroup");
        let own = all.lines().find_map(|line| line.strip_prefix("0::/")).expect("one of version 2");
        enter(&self.0, id());
        start();
        enter(&self.0.parent().expect("the root").join(own), id());
    }

    /// How many of our programs are attached there.
    fn programs(&self) -> usize {
        let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
        let output = Command::new("bpftool").env("PATH", path).args(["cgroup", "show"]).arg(&self.0).output();
        let text = String::from_utf8(output.expect("bpftool").stdout).expect("text");
        text.lines().filter(|line| line.contains("packet_")).count()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Its last processes may be on their way out.
        for _ in 0..100 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

fn capture(postgres: &Postgres) -> Capture {
    Capture::start(postgres, &Setup { probes: Probes::Never, ..Setup::default() })
}

/// A session of so many statements. Returns their bytes.
fn work(postgres: &Postgres, name: &str) -> Vec<u8> {
    let options = postgres.options("postgres", "postgres").parameter("application_name", name);
    let mut client = Client::connect(&options).expect("connect");
    let mut sent = Vec::new();
    for number in 0..20 {
        let query = Batch::new().query(&format!("select {number}, repeat('x', 5000)"));
        client.exchange(&query).expect("an answer");
        sent.extend_from_slice(query.as_bytes());
    }
    client.terminate().expect("terminate");
    sent.extend_from_slice(Batch::new().terminate().as_bytes());
    sent
}

fn assert_has(trace: &Trace, name: &str, sent: &[u8]) {
    assert!(trace.sent(trace.session(name)) == sent, "the bytes of {name} differ");
}

#[test]
fn a_server_is_watched_in_its_own_cgroup_and_wherever_it_is_started_again() {
    if skipped() {
        return;
    }
    let _alone = ALONE.lock();
    let (first, second) = (Cgroup::new("first"), Cgroup::new("second"));
    let mut postgres = Postgres::start().expect("a server");
    postgres.stop().expect("an end");
    first.start(|| postgres.start_again().expect("a start"));
    let capture = capture(&postgres);
    assert_eq!((first.programs(), second.programs()), (2, 0));
    let before = work(&postgres, "before");
    postgres.stop().expect("an end");
    second.start(|| postgres.start_again().expect("a start"));
    // The recorder has not looked for the new server yet.
    let after = work(&postgres, "after");
    assert_eq!((first.programs(), second.programs()), (0, 0));
    let trace = capture.end();
    assert_has(&trace, "before", &before);
    assert_has(&trace, "after", &after);
    trace.assert_lossless();
    drop(postgres);
}

#[test]
fn a_server_that_was_moved_is_watched_where_its_sockets_are() {
    if skipped() {
        return;
    }
    let _alone = ALONE.lock();
    let later = Cgroup::new("later");
    let postgres = Postgres::start().expect("a server");
    enter(&later.0, postgres.pid());
    let capture = capture(&postgres);
    assert_eq!(later.programs(), 0);
    let sent = work(&postgres, "moved");
    let trace = capture.end();
    assert_has(&trace, "moved", &sent);
    trace.assert_lossless();
    drop(postgres);
}
