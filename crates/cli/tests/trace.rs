// SPDX-License-Identifier: Apache-2.0
//! `underpass trace` as a process: its refusals, its end by signals, and what is left when it is killed.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::time::Duration;

use common::{binary, ended, output, skipped, start_recorder, start_recorder_in, stop_recorder, wait_gone};
use underpass_capture::Server;
use underpass_testkit::{Authority, Client, Port, Postgres, SmallDisk, service_user};
use underpass_trace::{Damage, Reader, Record};

fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = output(Command::new(binary()).arg("trace").args(arguments));
    (
        status.code(),
        String::from_utf8_lossy(&stdout).into_owned(),
        String::from_utf8_lossy(&stderr).into_owned(),
    )
}

/// The program without the privileges of a recorder, also as root: what a container's root lacks.
fn unprivileged() -> Command {
    if service_user().is_none() {
        return Command::new(binary());
    }
    let lacks = "-bpf,-net_admin,-perfmon,-sys_ptrace,-sys_admin";
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", lacks, "--inh-caps", lacks]).arg(binary());
    command
}

/// Messages of clients in a trace that is whole.
fn messages(directory: &Path) -> usize {
    let (messages, damage) = read(directory);
    assert!(damage.none(), "{damage:?}");
    messages
}

/// Messages of clients in a trace, and what it lacks.
fn read(directory: &Path) -> (usize, Damage) {
    let mut reader = Reader::open(directory).expect("a trace");
    let mut messages = 0;
    while let Some(record) = reader.next().expect("a record") {
        messages += usize::from(matches!(record, Record::Frontend(_)));
    }
    (messages, reader.damage())
}

/// A server, and a directory for traces of it.
struct Site {
    postgres: Postgres,
    parent: tempfile::TempDir,
}

impl Site {
    fn new() -> Self {
        Self {
            postgres: Postgres::start().expect("a server"),
            parent: tempfile::tempdir().expect("a directory"),
        }
    }

    fn port(&self) -> String {
        self.postgres.port().to_string()
    }

    /// Where a trace of this name goes.
    fn path(&self, name: &str) -> PathBuf {
        self.parent.path().join(name)
    }

    fn connect(&self) -> Client {
        Client::connect(&self.postgres.options("postgres", "postgres")).expect("connect")
    }

    /// A recorder of the server, with further arguments.
    fn record(&self, into: &Path, arguments: &[&str]) -> Child {
        let (port, path) = (self.port(), into.display().to_string());
        start_recorder(&[&["-p", &port, "-o", &path], arguments].concat())
    }
}

#[test]
fn refusals_say_what_is_wrong() {
    let free = Port::reserve().expect("a port");
    let port = free.number().to_string();
    let refused = output(unprivileged().args(["trace", "-p", &port, "-d", "1"]));
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{text}");
    assert!(text.contains("not permitted: this process lacks CAP_BPF, CAP_NET_ADMIN"), "{text}");
    if skipped() {
        return;
    }
    let (code, _, text) = run(&["-p", &port, "-d", "1"]);
    assert!(code == Some(1) && text.contains("listens on TCP port"), "{text}");
    let (code, _, text) = run(&["--pid", "4194300"]);
    assert!(code == Some(1) && text.contains("no process 4194300"), "{text}");
    let own = std::process::id().to_string();
    let (code, _, text) = run(&["--pid", &own]);
    assert!(code == Some(1) && text.contains("has the process"), "{text}");
    let (code, _, text) = run(&["--unit", "nothing-like-it"]);
    assert!(code == Some(1) && text.contains("is in the unit nothing-like-it.service"), "{text}");
    let (code, _, text) = run(&["--pid", "1", "--port", "1"]);
    assert!(code == Some(1) && text.contains("listens on TCP port 1 and has the process 1"), "{text}");
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

/// What it lacks is said where it would be needed, and no more is promised.
#[test]
fn the_list_says_what_is_missing_for_a_recording() {
    let postgres = Postgres::start().expect("a server");
    let list = |command: &mut Command| {
        let listed = output(command);
        assert!(listed.status.success(), "{listed:?}");
        String::from_utf8_lossy(&listed.stdout).into_owned()
    };
    let text = list(unprivileged().args(["trace", "--list"]));
    assert!(text.contains("not permitted yet: this process lacks CAP_BPF, CAP_NET_ADMIN"), "{text}");
    if skipped() {
        return;
    }
    let text = list(Command::new(binary()).args(["trace", "--list"]));
    assert!(!text.contains("not permitted yet") && text.contains("% of throughput"), "{text}");

    // Root without the right to read what is not its own.
    let lacks = "-dac_read_search,-dac_override";
    let text = list(
        Command::new("setpriv")
            .args(["--bounding-set", lacks, "--inh-caps", lacks])
            .arg(binary())
            .args(["trace", "--list"]),
    );
    let at = text.find(&format!("pid {} ", postgres.pid())).expect("the server");
    let block: String = text[at..].lines().take(3).collect::<Vec<_>>().join("\n");
    assert!(block.contains("this process lacks CAP_DAC_READ_SEARCH for it"), "{text}");

    let bare = "umount -l -a -t cgroup2 && exec \"$@\"";
    let without = |arguments: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", bare, "sh"]).arg(binary()).arg("trace").args(arguments);
        command
    };
    let text = list(&mut without(&["--list"]));
    assert!(text.contains("packets need a mounted cgroup version 2 hierarchy"), "{text}");
    let refused = output(&mut without(&["-p", &postgres.port().to_string(), "-d", "1"]));
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{text}");
    assert!(text.contains("no cgroup version 2 is mounted"), "{text}");
}

/// A kernel that lacks something, as far as one can be made to: directories of it under an empty one.
#[test]
fn what_the_kernel_lacks_is_named_in_front_of_its_own_words() {
    if skipped() {
        return;
    }
    let postgres = Postgres::start().expect("a server");
    let without = |directory: &str, arguments: &[&str]| {
        let script = format!("mount -t tmpfs none {directory} && exec \"$@\"");
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", &script, "sh"]).arg(binary()).arg("trace").args(arguments);
        let Output { status, stdout, stderr } = output(&mut command);
        let text = [stdout, stderr].concat();
        (status.code(), String::from_utf8_lossy(&text).into_owned())
    };
    let types = "lacks type information about itself (/sys/kernel/btf/vmlinux, CONFIG_DEBUG_INFO_BTF, from Linux 5.4)";
    let (code, text) = without("/sys/kernel/btf", &["--list"]);
    assert!(code == Some(0) && text.contains("nothing can be recorded: the kernel refused"), "{text}");
    assert!(text.find(types) < text.find("in its own words") && text.contains(types), "{text}");
    let (code, text) = without("/sys/kernel/btf", &["-p", &postgres.port().to_string(), "-d", "1"]);
    assert!(code == Some(1) && text.contains(types), "{text}");

    let (code, text) = without("/sys/bus/event_source/devices", &["--list"]);
    assert!(code == Some(0) && text.contains("no probes, so neither TLS nor Unix sockets"), "{text}");
    assert!(text.contains("lacks uprobes (the event source uprobe, CONFIG_UPROBE_EVENTS"), "{text}");
}

#[test]
fn a_trace_is_new_complete_and_ends_by_a_signal() {
    if skipped() {
        return;
    }
    let site = Site::new();
    let directory = site.path("trace");
    // Without probes: `wait_gone` asks by a Unix socket.
    let recorder = site.record(&directory, &["--require-lossless", "--probes", "never"]);
    let mut client = site.connect();
    for _ in 0..10 {
        client.query("select 1").expect("an answer");
    }
    client.terminate().expect("terminate");
    wait_gone(&site.postgres);
    let (code, text) = stop_recorder(recorder);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains(&format!("packets       of TCP port {}\n", site.port())), "{text}");
    assert!(text.contains("only          TCP connections without encryption (--probes never)\n"), "{text}");
    assert_eq!(messages(&directory), 11);
    let (code, _, text) = run(&["-p", &site.port(), "-o", &directory.display().to_string(), "-d", "1"]);
    assert!(code == Some(1) && text.contains("never written over"), "{text}");
}

/// A window that is closed takes the reader of both outputs with it.
#[test]
fn a_recording_ends_in_good_order_with_its_terminal() {
    if skipped() {
        return;
    }
    let site = Site::new();
    let work = || {
        let mut client = site.connect();
        client.query("select 1").expect("an answer");
        client.terminate().expect("terminate");
        wait_gone(&site.postgres);
    };
    let hang_up = |recorder: &Child| {
        let pid = nix::unistd::Pid::from_raw(recorder.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGHUP).expect("kill");
    };
    let directory = site.path("closed");
    let mut recorder = site.record(&directory, &["--probes", "never"]);
    drop(recorder.stdout.take());
    work();
    hang_up(&recorder);
    assert_eq!(ended(recorder).0, Some(0));
    assert_eq!(messages(&directory), 2);

    // Not with nohup.
    let directory = site.path("nohup");
    let mut recorder = Command::new("sh");
    recorder
        .args(["-c", "trap '' HUP; exec \"$@\"", "sh"])
        .arg(binary())
        .args(["trace", "-q", "--probes", "never"]);
    recorder.args(["-p", &site.port(), "-o"]).arg(&directory).stdout(std::process::Stdio::piped());
    let recorder = recorder.spawn().expect("underpass");
    common::wait("the trace", || directory.exists().then_some(()));
    hang_up(&recorder);
    std::thread::sleep(Duration::from_millis(500));
    work();
    let (code, text) = stop_recorder(recorder);
    assert_eq!(code, Some(0), "{text}");
    assert_eq!(messages(&directory), 2);
}

/// Who reads a trace did not see what its recorder said at the end.
#[test]
fn a_trace_says_what_was_left_out() {
    if skipped() {
        return;
    }
    let authority = Authority::new("test").expect("an authority");
    let postgres = Postgres::builder().tls(&authority).start().expect("a server");
    let site = Site { postgres, parent: tempfile::tempdir().expect("a directory") };
    let directory = site.path("trace");
    let recorder = site.record(&directory, &["--probes", "never"]);
    let mut psql = Command::new("psql");
    psql.args(["-h", "127.0.0.1", "-p", &site.port(), "-U", "postgres", "-c", "select 1"]);
    let said = output(psql.env("PGSSLMODE", "require"));
    assert!(said.status.success(), "{said:?}");
    wait_gone(&site.postgres);
    let (code, text) = stop_recorder(recorder);
    assert_eq!(code, Some(0), "{text}");
    let report = output(Command::new(binary()).args(["report", "--no-page"]).arg(&directory));
    let report = String::from_utf8_lossy(&report.stdout).into_owned();
    for sentence in
        ["without encryption (--probes never)", "1 connections are not recorded, because they turned to TLS"]
    {
        assert!(report.contains(sentence), "{sentence}\n{report}");
    }
    assert!(!report.contains("Nothing is known to be missing"), "{report}");
}

/// Without this demand the probes come when they are needed, which is too late for sessions as short as these.
#[test]
fn what_must_be_lossless_is_probed_from_the_start() {
    if skipped() {
        return;
    }
    let authority = Authority::new("test").expect("an authority");
    let postgres = Postgres::builder().tls(&authority).start().expect("a server");
    let site = Site { postgres, parent: tempfile::tempdir().expect("a directory") };
    let psql = |mode: &str, host: &str, name: &str| {
        let mut psql = Command::new("psql");
        psql.args(["-h", host, "-p", &site.port(), "-U", "postgres", "-c", &format!("select '{name}'")]);
        let said = output(psql.env("PGSSLMODE", mode).env("PGAPPNAME", name));
        assert!(said.status.success(), "{said:?}");
    };
    let sockets = Server::of_process(site.postgres.pid()).expect("a server").sockets;
    let socket = sockets[0].parent().expect("a directory").display().to_string();
    let directory = site.path("trace");
    let recorder = site.record(&directory, &["--require-lossless"]);
    psql("require", "127.0.0.1", "by TLS");
    psql("disable", &socket, "by a socket");
    wait_gone(&site.postgres);
    let (code, text) = stop_recorder(recorder);
    assert_eq!(code, Some(0), "{text}");
    let mut reader = Reader::open(&directory).expect("a trace");
    let mut starts = Vec::new();
    while let Some(record) = reader.next().expect("a record") {
        if let Record::SessionStart(start) = record {
            let name =
                start.application_name.as_deref().map(|name| String::from_utf8_lossy(name).into_owned());
            starts.push((name, start.midstream));
        }
    }
    for name in ["by TLS", "by a socket"] {
        assert!(starts.contains(&(Some(name.to_owned()), false)), "{starts:?}");
    }
}

#[test]
fn masked_values_are_in_no_trace_and_equal_ones_stay_equal() {
    if skipped() {
        return;
    }
    let site = Site::new();
    let key = site.path("key");
    std::fs::write(&key, "short").expect("a file");
    let (code, _, text) = run(&["-p", &site.port(), "--mask-key", &key.display().to_string(), "-d", "1"]);
    assert!(code == Some(1) && text.contains("a key of 5 bytes can be guessed"), "{text}");
    std::fs::write(&key, [7; 32]).expect("a file");
    let texts = |number: u8, how: &[&str]| {
        let directory = site.path(&number.to_string());
        let recorder = site.record(&directory, &[&["--level", "full", "--require-lossless"], how].concat());
        let mut client = site.connect();
        client.query("select 'Smith', 4711").expect("an answer");
        client.extended("select $1", &[Some("Smith")]).expect("an answer");
        client.terminate().expect("terminate");
        wait_gone(&site.postgres);
        let (code, text) = stop_recorder(recorder);
        assert_eq!(code, Some(0), "{text}");
        let mut reader = Reader::open(&directory).expect("a trace");
        assert_eq!(reader.meta().redaction.literals, !how.is_empty());
        // Whose session is written first is open: the client's, or that of wait_gone(), which comes by another source.
        let mut texts = std::collections::BTreeMap::<_, String>::new();
        while let Some(record) = reader.next().expect("a record") {
            match record {
                Record::Frontend(message) => {
                    *texts.entry(message.session).or_default() += &String::from_utf8_lossy(&message.message);
                }
                Record::Backend(message) => assert!(how.is_empty(), "{message:?}"),
                _ => {}
            }
        }
        texts.into_values().find(|text| text.contains("$1")).expect("the client's session")
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
    let site = Site::new();
    let directory = site.path("trace");
    let mut child = site.record(&directory, &["--probes", "always"]);
    let mut tcp = site.connect();
    let mut unix = Client::connect(&site.postgres.superuser()).expect("connect");
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
    let (found, damage) = read(&directory);
    assert!(damage.torn && damage.blocks == 0, "{damage:?}");
    assert!(found > asked / 10 && found <= asked, "{found} of {asked}");
    // Who plays it is told that its end is missing.
    let copy = Postgres::start().expect("another server");
    let target = format!("postgres://postgres@127.0.0.1:{}/postgres", copy.port());
    let mut replay = Command::new(binary());
    replay.args(["replay", "--pace", "asap", "--to", &target]).arg(&directory);
    let played = output(&mut replay);
    let text = String::from_utf8_lossy(&played.stdout).into_owned();
    assert!(played.status.success(), "{played:?}");
    assert!(text.contains("the trace has no regular end"), "{text}");
    // Nothing of it stays in the kernel: the next recorder begins as if it were the first.
    let (code, text) = ended(site.record(&site.path("again"), &["-d", "1", "--require-lossless"]));
    assert_eq!(code, Some(0), "{text}");
}

#[test]
fn the_early_stages_write_nothing() {
    if skipped() {
        return;
    }
    let site = Site::new();
    for (stage, messages) in
        [("attach", "messages      0 of clients"), ("process", "messages      2 of clients")]
    {
        let recorder = site.record(&site.path("trace"), &["--stage", stage]);
        let mut client = site.connect();
        client.query("select 1").expect("an answer");
        client.terminate().expect("terminate");
        wait_gone(&site.postgres);
        let (code, text) = stop_recorder(recorder);
        assert!(code == Some(0) && text.contains(messages), "{stage}: {text}");
        assert!(text.contains("packets to the server: seen"), "{stage}: {text}");
        assert_eq!(std::fs::read_dir(&site.parent).expect("a directory").count(), 0, "{stage}");
    }
}

#[test]
fn a_lossy_recording_says_so_and_fails_where_that_is_asked() {
    if skipped() {
        return;
    }
    let site = Site::new();
    let recorder = site.record(&site.path("trace"), &["--ring-size", "0", "--require-lossless"]);
    let mut client = site.connect();
    // Many times the smallest rings, faster than they are read.
    for _ in 0..5 {
        client.query(&format!("select length('{}')", "x".repeat(8 << 20))).expect("the server goes on");
    }
    client.terminate().expect("terminate");
    wait_gone(&site.postgres);
    let (code, text) = stop_recorder(recorder);
    assert_eq!(code, Some(3), "{text}");
    assert!(text.contains(" losses, ") && !text.contains("nothing is missing"), "{text}");
}

/// Says so many statements of 64 KiB of random digits, of which zstd makes no less than half.
fn say_digits(site: &Site, statements: usize) {
    let mut client = site.connect();
    let mut state = 88_172_645_463_325_252_u64;
    let mut digits = || {
        // Marsaglia's xorshift64.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        format!("{state:016x}")
    };
    for _ in 0..statements {
        let text: String = (0..4096).map(|_| digits()).collect();
        let response = client.query(&format!("select length('{text}')")).expect("the server goes on");
        assert_eq!(response.value(), Some("65536"));
    }
}

/// Chosen by its process, and into a directory that is named by its port and the time.
#[test]
fn a_trace_without_a_name_gets_one_and_ends_at_its_size() {
    if skipped() {
        return;
    }
    let site = Site::new();
    let pid = site.postgres.pid().to_string();
    let arguments = ["--pid", &pid, "--max-size", "1", "--require-lossless", "--probes", "never"];
    let recorder = start_recorder_in(site.parent.path(), &arguments);
    // Three times its size at least.
    say_digits(&site, 100);
    // It has ended by itself.
    let (code, text) = ended(recorder);
    assert_eq!(code, Some(3), "{text}");
    assert!(text.contains("what came after its early end") && text.contains("size"), "{text}");
    let made: Vec<_> = std::fs::read_dir(&site.parent).expect("a directory").collect();
    assert_eq!(made.len(), 1, "{made:?}");
    let directory = made[0].as_ref().expect("an entry").path();
    let name = directory.file_name().expect("a name").to_string_lossy().into_owned();
    let time = name.strip_prefix(&format!("trace-{}-", site.port())).expect("the port");
    let form: String = time.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    assert_eq!(form, "00000000-000000", "{name}");
    let files = std::fs::read_dir(&directory).expect("a directory");
    let bytes: u64 = files.map(|file| file.expect("a file").metadata().expect("a size").len()).sum();
    assert!((512 << 10..=1 << 20).contains(&bytes), "{bytes}");
    let told = messages(&directory);
    assert!((10..=60).contains(&told), "{told}");
}

#[test]
fn a_full_disk_ends_the_trace_in_good_order_and_the_server_goes_on() {
    if skipped() {
        return;
    }
    let Some(disk) = SmallDisk::mount(2048, 0).expect("a small disk") else { return };
    let site = Site::new();
    let directory = disk.path().join("trace");
    let recorder = site.record(&directory, &["--require-lossless"]);
    // Several times the disk.
    say_digits(&site, 200);
    let (code, text) = ended(recorder);
    assert_eq!(code, Some(3), "{text}");
    assert!(text.contains("the trace ended early: no space left on the device"), "{text}");
    assert!(text.contains(" records not written") && !text.contains(" 0 records not written"), "{text}");
    assert!(messages(&directory) > 5);
}

/// A cgroup, which goes with the value; by then it must be empty.
struct Cgroup(PathBuf);

impl Cgroup {
    /// Makes one; without it the test is skipped, and has said so.
    fn make(name: &str) -> Option<Self> {
        let path = underpass_capture::cgroup2_mount().expect("a mount").join(name);
        match std::fs::create_dir(&path) {
            Ok(()) => Some(Self(path)),
            Err(error) => {
                eprintln!("skipped: no cgroup can be made here: {error}");
                None
            }
        }
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn a_server_is_chosen_by_its_container_or_unit() {
    if skipped() {
        return;
    }
    let number = format!("{:016x}", std::process::id());
    let id = number.repeat(4);
    let other = Postgres::start().expect("another server");
    for (name, option, choice, none) in [
        (format!("docker-{id}.scope"), "--container", &id[..20], "is in a container"),
        (format!("underpass-{number}.service"), "--unit", &format!("underpass-{number}"), "is in the unit"),
    ] {
        let (code, _, text) = run(&[option, choice, "-d", "1"]);
        assert!(code == Some(1) && text.contains(none), "{text}");
        let Some(cgroup) = Cgroup::make(&name) else { return };
        let site = Site::new();
        std::fs::write(cgroup.0.join("cgroup.procs"), site.postgres.pid().to_string()).expect("a move");
        let (_, text, _) = run(&["--list"]);
        assert!(text.contains(choice), "{text}");
        let directory = site.path("trace");
        let into = directory.display().to_string();
        let recorder =
            start_recorder(&[option, choice, "-o", &into, "--require-lossless", "--probes", "never"]);
        let mut client = site.connect();
        client.query("select 1").expect("an answer");
        client.terminate().expect("terminate");
        other.sql_value("select 2").expect("an answer");
        wait_gone(&site.postgres);
        let (code, text) = stop_recorder(recorder);
        assert_eq!(code, Some(0), "{text}");
        assert_eq!(messages(&directory), 2, "{text}");
    }
}

#[test]
fn a_hook_that_sees_nothing_is_an_error() {
    if skipped() {
        return;
    }
    let site = Site::new();
    let Some(cgroup) = Cgroup::make(&format!("underpass-test-{}", std::process::id())) else { return };
    let (at, path) = (cgroup.0.display().to_string(), site.path("trace"));
    let (code, _, text) = run(&["-p", &site.port(), "--cgroup", &at, "-o", &path.display().to_string()]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("attached but silent") && text.contains(&at), "{text}");
    assert!(!path.exists(), "nothing is left behind");
}
