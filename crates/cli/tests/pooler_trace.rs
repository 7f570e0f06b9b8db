// SPDX-License-Identifier: Apache-2.0
//! The pooler as a source of traces: what it records of a workload is what `underpass trace` takes from the packets between its clients
//! and itself, and can be replayed.

mod common;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use common::{binary, skipped, wait};
use underpass_capture::{Options, Probes, Server, Stage};
use underpass_testkit::{Batch, Client, Ini, Pooler, Postgres, Underpass};
use underpass_trace::{Level, Protocol, Reader, Record, SessionEnd};

/// Runs a program of PostgreSQL against a port of this machine.
fn run(program: &str, port: u16, arguments: &[&str]) {
    let port = port.to_string();
    let mut command = Command::new(program);
    command
        .args(["-h", "127.0.0.1", "-p", &port, "-U", "postgres"])
        .args(arguments)
        .env("PGSSLMODE", "disable");
    let output = command.stdin(Stdio::null()).output().expect("a program");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// What a command of ours about a trace says.
fn output(arguments: &[&str], trace: &Path) -> Output {
    Command::new(binary()).args(arguments).arg(trace).output().expect("a command")
}

fn told(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat()
}

/// Packets of the pooler's port, recorded while `work` runs.
fn by_packets(pooler: &Underpass, directory: &Path, level: Level, work: impl FnOnce()) {
    let netns = std::fs::metadata(format!("/proc/{}/ns/net", pooler.pid())).expect("a process").ino();
    let server = Server {
        protocol: Protocol::Postgres,
        pid: pooler.pid(),
        executable: PathBuf::new(),
        data_directory: PathBuf::new(),
        data_inode: None,
        version: String::new(),
        system_identifier: None,
        addresses: vec![SocketAddr::from(([127, 0, 0, 1], pooler.port()))],
        sockets: Vec::new(),
        netns,
        unit: None,
        container: None,
        probes: false,
        is_unreadable: false,
    };
    let options = Options {
        server,
        port: Some(pooler.port()),
        level,
        stage: Stage::Persist,
        probes: Probes::Never,
        cgroup: None,
        directory: directory.to_owned(),
        ring_bytes: 64 << 20,
        duration: None,
        writer: underpass_trace::Options::default(),
    };
    let stop = Arc::new(AtomicBool::new(false));
    let (sender, ready) = mpsc::channel();
    let flag = Arc::clone(&stop);
    let capture = std::thread::spawn(move || {
        underpass_capture::run(
            &options,
            &flag,
            &mut |_| sender.send(()).expect("somebody waits"),
            &mut |_| {},
        )
    });
    ready.recv().unwrap_or_else(|_| panic!("the capture did not start"));
    work();
    // Closed sockets tell their totals a moment after the client has gone.
    std::thread::sleep(std::time::Duration::from_millis(500));
    stop.store(true, Ordering::Relaxed);
    let summary = capture.join().expect("the thread").expect("a capture");
    assert!(summary.lossless(), "{summary:?}");
}

/// Every session of a trace, by its client's port: all that was recorded of it, without times and without the source.
fn sessions(trace: &Path, level: Level) -> BTreeMap<u16, Vec<String>> {
    let mut reader = Reader::open(trace).expect("a trace");
    let (mut ports, mut sessions) = (BTreeMap::new(), BTreeMap::<u16, Vec<String>>::new());
    while let Some(record) = reader.next().expect("a record") {
        if let Record::SessionStart(start) = &record {
            ports.insert(start.session, start.peer.expect("a client over TCP").port());
        }
        let session = match &record {
            Record::Cancel(cancel) => cancel.session,
            record => record.session(),
        };
        let Some(&port) = session.and_then(|session| ports.get(&session)) else { continue };
        let text = match record {
            Record::SessionStart(start) => format!(
                "start {:?} {:?} {:?} {:?} {:?} {} {} {} {} {:?}",
                start.user,
                start.database,
                start.application_name,
                start.parameters,
                start.backend_pid,
                start.protocol_version,
                start.frontend_offset,
                start.backend_offset,
                start.midstream,
                start.transport,
            ),
            Record::Frontend(it) => {
                format!("frontend {} {} {:?} {:?}", it.offset, it.wire_len, it.redaction, it.message)
            }
            // Of a long response the packets' summary has the end only; the pooler's knows where it began.
            Record::Response(it) if level == Level::Summary => {
                format!("response {} {} {:?}", it.request, it.rows, it.outcome)
            }
            Record::Response(it) => {
                format!("response {} {} {} {} {:?}", it.request, it.offset, it.len, it.rows, it.outcome)
            }
            Record::Ready(it) => format!("ready {} {} {:?}", it.request, it.offset, it.status),
            Record::Backend(it) => format!("backend {} {:?}", it.offset, it.message),
            Record::ParameterStatus(it) => format!("status {:?} {:?}", it.name, it.value),
            Record::Withheld(it) => {
                format!("withheld {:?} {} {} {:?}", it.direction, it.offset, it.len, it.reason)
            }
            Record::SessionEnd(SessionEnd { reason, frontend, backend, .. }) => {
                format!("end {reason:?} {frontend:?} {backend:?}")
            }
            Record::Cancel(it) => format!("cancel {}", it.backend_pid),
            other => panic!("{other:?}"),
        };
        sessions.entry(port).or_default().push(text);
    }
    assert!(reader.damage().none());
    // The two directions of a session are two streams: which of two records was first may be seen otherwise at the other end.
    sessions.values_mut().for_each(|records| records.sort());
    sessions
}

/// Everything by every protocol, with an error, a COPY, a password and a cancel request in it.
fn workload(pooler: &Underpass, secret: &str) {
    for protocol in ["simple", "extended", "prepared"] {
        run("pgbench", pooler.port(), &["-n", "-c", "4", "-j", "2", "-t", "25", "-M", protocol, "postgres"]);
    }
    let connect = || {
        let options = pooler.options("postgres", "postgres").parameter("application_name", "tester");
        Client::connect(&options).expect("connect")
    };
    let mut client = connect();
    let long = "z".repeat(300_000);
    for (batch, answers) in [
        (Batch::new().query("create table c (a text)").query("select 1; select 1/0"), 2),
        (Batch::new().query(&format!("create role r password '{secret}'")), 1),
        (Batch::new().extended("select $1::text", &[Some(&long)]).sync(), 1),
        (Batch::new().query("select repeat('y', 1000) from generate_series(1, 2000)"), 1),
        (Batch::new().query("begin").query("select 1").query("rollback"), 3),
        (
            Batch::new()
                .parse("s", "select $1::int")
                .sync()
                .bind("", "s", &[Some("x")])
                .execute("", 0)
                .sync(),
            2,
        ),
    ] {
        client.send(&batch).expect("send");
        (0..answers).for_each(|_| drop(client.response().expect("an answer")));
    }
    client.send(&Batch::new().query("copy c from stdin")).expect("send");
    while client.recv().expect("a message").tag != b'G' {}
    client.send(&Batch::new().copy_data(b"one\ntwo\n").copy_done()).expect("send");
    client.response().expect("an answer").ok().expect("a copy");
    client.terminate().expect("terminate");

    let mut cancelled = connect();
    cancelled.send(&Batch::new().query("select pg_sleep(600)")).expect("send");
    wait("the statement", || {
        let sleeping = "select count(*) from pg_stat_activity where wait_event = 'PgSleep'";
        (connect().query(sleeping).ok()?.value() == Some("1")).then_some(())
    });
    cancelled.cancel().expect("cancel");
    assert!(cancelled.response().expect("an answer").ok().is_err());
    // Without a word.
    drop(cancelled);
}

#[test]
fn a_trace_by_the_pooler_is_the_trace_by_packets_and_can_be_replayed() {
    if skipped() {
        return;
    }
    for level in [Level::Summary, Level::Full] {
        let server = Postgres::start().expect("a server");
        run("pgbench", server.port(), &["-i", "-q", "-s", "1", "-I", "dtgp", "postgres"]);
        let word = if level == Level::Full { "full" } else { "summary" };
        let section = format!("[underpass]\nkernel_path = off\ntrace_dir = .\ntrace_level = {word}");
        let mut pooler =
            Underpass::start(&Ini::for_server(&server).set("pool_mode", "transaction").tail(&section))
                .expect("a pooler");
        let parent = tempfile::tempdir().expect("a directory");
        let packets = parent.path().join("packets");
        let secret = "nobody-may-read-this";
        by_packets(&pooler, &packets, level, || workload(&pooler, secret));
        pooler.stop().expect("the end");
        let own = std::fs::read_dir(pooler.directory()).expect("a directory").find_map(|entry| {
            let path = entry.expect("an entry").path();
            path.join("000001.upt").exists().then_some(path)
        });
        let own = own.expect("a trace");
        let mut ours = sessions(&own, level);
        let theirs = sessions(&packets, level);
        // The fixture asked whether the pooler was ready before the capture began: those are clients of the console, not in the trace.
        assert_eq!(
            ours.keys().collect::<Vec<_>>(),
            theirs.keys().collect::<Vec<_>>(),
            "{word}: the same sessions"
        );
        for (port, expected) in &theirs {
            let found = ours.remove(port).expect("a session");
            for (one, other) in found.iter().zip(expected) {
                assert_eq!(one, other, "{word}: of the client at port {port}");
            }
            assert_eq!(found.len(), expected.len());
            assert!(!found.iter().any(|text| text.contains(secret)));
        }
        // The trace names the server behind the pooler: a replay there is refused, and the report tells it.
        let identifier =
            server.sql_value("select system_identifier from pg_control_system()").expect("a number");
        let report = output(&["report"], &own);
        let place = format!("at 127.0.0.1:{}, system identifier {identifier}: postgres", server.port());
        assert!(report.status.success() && told(&report).contains(&place), "{}", told(&report));
        let there =
            format!("host=127.0.0.1 port={} user=postgres dbname=postgres sslmode=disable", server.port());
        let refused = output(&["replay", "--dry-run", "--to", &there], &own);
        let why = told(&refused);
        let expected = format!("captured server of database postgres at 127.0.0.1:{} itself", server.port());
        assert!(!refused.status.success() && why.contains(&expected), "{why}");
        if level == Level::Full {
            continue;
        }
        let copy = Postgres::start().expect("a server");
        run("pgbench", copy.port(), &["-i", "-q", "-s", "1", "-I", "dtgp", "postgres"]);
        let target =
            format!("host=127.0.0.1 port={} user=postgres dbname=postgres sslmode=disable", copy.port());
        let mut command = Command::new(binary());
        command.args(["replay", "--pace", "asap", "--application-name", "pgbench", "--order", "commit"]);
        let output = command.args(["--require-equal", "--to", &target]).arg(&own).output().expect("a replay");
        assert!(
            output.status.success(),
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        for sum in
            ["select sum(abalance) from pgbench_accounts", "select count(*), sum(delta) from pgbench_history"]
        {
            assert_eq!(copy.sql(sum).expect("sums"), server.sql(sum).expect("sums"), "{sum}");
        }
    }
}
