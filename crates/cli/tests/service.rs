// SPDX-License-Identifier: Apache-2.0
//! Life under a service manager: sd_notify, sockets handed over, what is left of root.

mod common;

use std::os::fd::AsRawFd as _;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use common::{LIMIT, Running, Site, output, wait};
use nix::sys::signal::Signal;
use underpass_testkit::{Client, Options, Postgres, service_user};

fn next(socket: &UnixDatagram) -> String {
    let mut buffer = [0; 4096];
    let count = socket.recv(&mut buffer).expect("a notification");
    String::from_utf8(buffer[..count].to_vec()).unwrap()
}

/// Reads up to one that begins with `start`.
fn until(socket: &UnixDatagram, start: &str) -> String {
    loop {
        let text = next(socket);
        if text.starts_with(start) {
            return text;
        }
    }
}

#[test]
fn the_service_manager_is_told() {
    let site = Site::new("stats_period = 1");
    let socket = UnixDatagram::bind(site.path("notify")).unwrap();
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    if let Some(user) = service_user() {
        std::os::unix::fs::chown(site.path("notify"), Some(user.uid.as_raw()), None).unwrap();
    }
    let mut command = site.command(&["-q"]);
    let mut pooler = Running(command.env("NOTIFY_SOCKET", site.path("notify")).spawn().unwrap());
    assert_eq!(next(&socket).trim(), "READY=1");
    // Ready means ready.
    let _ = site.console("SHOW VERSION");
    let status = until(&socket, "STATUS=");
    assert!(status.contains("stats: 0 xacts/s"), "{status}");
    pooler.signal(Signal::SIGHUP);
    let reloading = until(&socket, "RELOADING=1");
    assert!(reloading.contains("MONOTONIC_USEC="), "{reloading}");
    assert_eq!(until(&socket, "READY=1").trim(), "READY=1");
    // SIGTERM waits for clients; the last one's end is the end.
    let client = Client::connect(&Options::new(site.port(), "admin", "pgbouncer")).unwrap();
    pooler.signal(Signal::SIGTERM);
    assert_eq!(until(&socket, "STOPPING=1").trim(), "STOPPING=1");
    drop(client);
    assert_eq!(pooler.wait(), Some(0));
}

/// Starts the pooler with descriptor 3 and up being these sockets, as systemd does. LISTEN_PID must be the pooler's own number, which
/// only a shell in between knows.
fn activated(site: &Site, sockets: &[std::os::fd::RawFd], arguments: &[&str]) -> Command {
    let pooler = site.command(arguments);
    let redirections: String =
        sockets.iter().enumerate().map(|(at, fd)| format!("{}<&{} {fd}<&- ", at + 3, fd)).collect();
    let script = format!("export LISTEN_PID=$$ LISTEN_FDS={}; exec \"$@\" {redirections}", sockets.len());
    let mut command = Command::new("/bin/bash");
    command.args(["-c", &script, "activation"]).arg(pooler.get_program()).args(pooler.get_args());
    command.env("TZ", "UTC").current_dir(site.path("")).stdin(Stdio::null());
    command
}

/// A copy of a descriptor that a child inherits, with a number above those that activation uses.
fn inheritable(socket: &impl std::os::fd::AsFd) -> std::os::fd::OwnedFd {
    let copy = rustix::io::fcntl_dupfd_cloexec(socket, 20).unwrap();
    rustix::io::fcntl_setfd(&copy, rustix::io::FdFlags::empty()).unwrap();
    copy
}

#[test]
fn sockets_that_were_handed_over_are_served() {
    let site = Site::new("logfile = {dir}/log");
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let path = site.path(".s.PGSQL.7777");
    let unix = UnixListener::bind(&path).unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let (tcp_fd, unix_fd) = (inheritable(&tcp), inheritable(&unix));
    let mut command = activated(&site, &[tcp_fd.as_raw_fd(), unix_fd.as_raw_fd()], &["-q"]);
    let mut pooler = Running(command.process_group(0).spawn().unwrap());
    let port = tcp.local_addr().unwrap().port();
    // The socket listens already: this waits in its queue until the pooler serves.
    let mut client = Client::connect(&Options::new(port, "admin", "pgbouncer").read_timeout(LIMIT)).unwrap();
    assert_eq!(client.query("SHOW VERSION").unwrap().value(), Some(underpass_pooler::VERSION));
    let options = Options::new(7777, "admin", "pgbouncer").unix(site.path(""));
    let mut client = Client::connect(&options).unwrap();
    assert_eq!(client.query("SHOW VERSION").unwrap().value(), Some(underpass_pooler::VERSION));
    let log = site.read("log");
    assert!(log.contains(&format!("listening on 127.0.0.1:{port} (socket activation)")), "{log}");
    // They are all there is.
    assert!(std::net::TcpStream::connect(("127.0.0.1", site.port())).is_err());
    pooler.signal(Signal::SIGQUIT);
    assert_eq!(pooler.wait(), Some(0));
    assert!(path.exists(), "the service manager's file stays");
}

/// The next process finds them where they wait, as systemd restarts it.
#[test]
fn clients_that_wait_at_a_handed_over_socket_are_not_told_of_a_restart() {
    let server = Postgres::start().unwrap();
    let database = format!("* = host=127.0.0.1 port={} user=postgres", server.port());
    let site = Site::with_database(&database, "logfile = {dir}/log", "kernel_path = off\nthreads = 2");
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let fd = inheritable(&tcp);
    let start = || {
        let mut command = activated(&site, &[fd.as_raw_fd()], &["-q"]);
        Running(command.process_group(0).spawn().unwrap())
    };
    let options = Options::new(tcp.local_addr().unwrap().port(), "postgres", "postgres").read_timeout(LIMIT);
    let serve = || {
        let mut client = Client::connect(&options).unwrap();
        assert_eq!(client.query("select 1").unwrap().value(), Some("1"));
        client.terminate().unwrap();
    };
    let mut pooler = start();
    for _ in 0..5 {
        // It is up.
        serve();
        // It finds both when it goes on, the signal and the clients, in whatever order.
        pooler.signal(Signal::SIGSTOP);
        std::thread::scope(|scope| {
            let clients: Vec<_> = (0..20).map(|_| scope.spawn(serve)).collect();
            std::thread::sleep(std::time::Duration::from_millis(100));
            pooler.signal(Signal::SIGTERM);
            pooler.signal(Signal::SIGCONT);
            assert_eq!(pooler.wait(), Some(0));
            pooler = start();
            clients.into_iter().for_each(|client| client.join().expect("served"));
        });
    }
}

#[test]
fn a_descriptor_that_is_no_listener_is_refused() {
    let site = Site::new("logfile = {dir}/log");
    let socket = UnixDatagram::unbound().unwrap();
    let fd = inheritable(&socket);
    let ended = output(&mut activated(&site, &[fd.as_raw_fd()], &["-q"]));
    let err = String::from_utf8(ended.stderr).unwrap();
    assert!(
        ended.status.code() == Some(1) && err.contains("descriptor 3 is not a listening stream socket"),
        "{err}"
    );
}

#[test]
fn two_processes_share_a_port() {
    let site = Site::new("so_reuseport = 1");
    let first = site.start(&["-q"]);
    site.wait_serving();
    let other = Site::with_database(
        "* = host=127.0.0.1 port=1 user=postgres",
        &format!("so_reuseport = 1\nlisten_port = {}", site.port()),
        "kernel_path = off",
    );
    let second = other.start(&["-q"]);
    let socket = other.path(&format!(".s.PGSQL.{}", site.port()));
    wait("the second pooler", || socket.exists().then_some(()));
    // The new one goes on when the old one ends.
    drop(first);
    let _ = site.console("SHOW VERSION");
    drop(second);
}

#[test]
fn abstract_sockets() {
    let site = Site::new("");
    let name = format!("underpass-test-{}", site.port());
    let site = Site::new(&format!("unix_socket_dir = @{name}\nlogfile = {{dir}}/log"));
    let _pooler = site.start(&["-q"]);
    site.wait_serving();
    let address = <std::os::unix::net::SocketAddr as std::os::linux::net::SocketAddrExt>::from_abstract_name(
        format!("{name}/.s.PGSQL.{}", site.port()),
    );
    assert!(std::os::unix::net::UnixStream::connect_addr(&address.unwrap()).is_ok());
}

/// A line of /proc/PID/status.
fn status(pid: u32, key: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    line.trim_start_matches(':').trim().to_owned()
}

/// What is left of root with lanes, and its numbers in linux/capability.h.
const LANES: [(&str, u32); 4] =
    [("CAP_BPF", 39), ("CAP_NET_ADMIN", 12), ("CAP_PERFMON", 38), ("CAP_SYS_PTRACE", 19)];

#[test]
fn the_unit_gives_what_lanes_need_and_no_more() {
    let unit = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/underpass.service");
    let unit = std::fs::read_to_string(unit).unwrap();
    for key in ["AmbientCapabilities=", "CapabilityBoundingSet="] {
        let lines: Vec<&str> = unit.lines().filter_map(|line| line.strip_prefix(key)).collect();
        let [line] = lines[..] else { panic!("{key} {lines:?}") };
        let mut given: Vec<&str> = line.split(' ').collect();
        given.sort_unstable();
        assert_eq!(given, LANES.map(|(name, _)| name), "{key}");
    }

    // Installed, its program is another.
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("underpass.service");
    let program = common::binary().to_str().unwrap();
    assert!(unit.contains("\nExecStart=/usr/bin/underpass "));
    std::fs::write(&path, unit.replace("/usr/bin/underpass", program)).unwrap();
    let mut verify = Command::new("systemd-analyze");
    verify.args(["verify", "--man=no"]).arg(&path).stdin(Stdio::null());
    let verified = match verify.output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("skipped: no systemd-analyze");
            return;
        }
        verified => verified.unwrap(),
    };
    // It speaks of the machine's other units, too; an unknown key is no failure to it.
    let said = String::from_utf8_lossy(&verified.stderr);
    assert!(verified.status.success() && !said.contains("underpass.service"), "{said}");
}

#[test]
fn of_root_only_the_capabilities_of_lanes_are_left() {
    let Some(user) = service_user() else {
        println!("skipped: not root");
        return;
    };
    let lanes = LANES.iter().fold(0u64, |lanes, (_, number)| lanes | 1 << number);
    let permitted = u64::from_str_radix(&status(std::process::id(), "CapPrm"), 16).unwrap();
    for (path, expected) in [("off", 0), ("auto", lanes & permitted)] {
        let site = Site::with_database("x = host=127.0.0.1", "", &format!("kernel_path = {path}"));
        let pooler = site.start(&["-q"]);
        site.wait_serving();
        let pid = pooler.0.id();
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        for task in tasks {
            let task: u32 = task.unwrap().file_name().to_str().unwrap().parse().unwrap();
            for set in ["CapPrm", "CapEff"] {
                let found = u64::from_str_radix(&status(task, set), 16).unwrap();
                assert_eq!(found, expected, "{set} of {task} with kernel_path = {path}");
            }
            assert_eq!(u64::from_str_radix(&status(task, "CapAmb"), 16), Ok(0));
            assert_eq!(u64::from_str_radix(&status(task, "CapInh"), 16), Ok(0));
            assert_eq!(status(task, "NoNewPrivs"), "1");
            assert!(status(task, "Uid").split('\t').all(|uid| uid == user.uid.to_string()));
        }
    }
}

/// The pooler as root without some capabilities, as a container's; SYS_ADMIN would stand for others.
fn lacking(site: &Site, lacks: &str) -> Command {
    let pooler = site.command(&[]);
    let mut command = if service_user().is_some() {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", lacks, "--inh-caps", lacks]).arg(pooler.get_program());
        command
    } else {
        Command::new(pooler.get_program())
    };
    command.args(pooler.get_args()).current_dir(site.path("")).stdin(Stdio::null());
    command
}

/// A pooler with these lines in its section `[underpass]`.
fn with_lanes(keys: &str) -> Site {
    Site::with_database("x = host=127.0.0.1", "logfile = {dir}/log", keys)
}

#[test]
fn without_the_privilege_for_lanes_user_space_serves_and_require_refuses() {
    let lacks = "-bpf,-net_admin,-perfmon,-sys_ptrace,-sys_admin";
    let serves = with_lanes("kernel_path = auto");
    let _pooler = Running(lacking(&serves, lacks).stderr(Stdio::null()).spawn().unwrap());
    serves.wait_serving();
    let log = serves.read("log");
    assert!(
        log.contains("kernel lanes are off, all traffic goes through user space: missing CAP_BPF"),
        "{log}"
    );

    let refuses = output(&mut lacking(&with_lanes("kernel_path = require"), lacks));
    let text = String::from_utf8(refuses.stderr).unwrap();
    assert_eq!(refuses.status.code(), Some(1), "{text}");
    assert!(text.contains("kernel_path = require, but lanes D, A do not work"), "{text}");
    assert!(text.contains("missing CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON, CAP_SYS_PTRACE; see"), "{text}");
}

#[test]
fn each_capability_that_is_missing_is_named_alone() {
    if service_user().is_none() {
        println!("skipped: not root");
        return;
    }
    for capability in ["bpf", "net_admin", "perfmon", "sys_ptrace"] {
        let (lacks, name) =
            (format!("-{capability},-sys_admin"), format!("CAP_{}", capability.to_uppercase()));
        let is_local = capability == "sys_ptrace";
        let serves = with_lanes("kernel_path = auto");
        let _pooler = Running(lacking(&serves, &lacks).stderr(Stdio::null()).spawn().unwrap());
        serves.wait_serving();
        let log = serves.read("log");
        let told = if is_local {
            assert!(log.contains("kernel lanes: D on\n"), "{log}");
            format!("kernel lanes: no lane A: missing {name}; see `underpass check`")
        } else {
            format!("all traffic goes through user space: missing {name}; see `underpass check`")
        };
        assert_eq!(log.matches(&told).count(), 1, "{log}");

        let refuses = output(&mut lacking(&with_lanes("kernel_path = require"), &lacks));
        let text = String::from_utf8(refuses.stderr).unwrap();
        assert_eq!(refuses.status.code(), Some(1), "{text}");
        let (lanes, remedy) = if is_local {
            ("lane A does not work", "same_host = off does without")
        } else {
            ("lanes D, A do not work", "kernel_path = auto")
        };
        assert!(text.contains(lanes) && text.contains(remedy), "{text}");
        assert!(text.contains(&format!("missing {name}; see")), "{text}");

        // What nobody asks for need not work.
        if is_local {
            let serves = with_lanes("kernel_path = require\nsame_host = off");
            let _pooler = Running(lacking(&serves, &lacks).stderr(Stdio::null()).spawn().unwrap());
            serves.wait_serving();
            let log = serves.read("log");
            assert!(log.contains("kernel lanes: D on\n") && !log.contains("no lane"), "{log}");
        }
    }
}

/// `underpass check` without these capabilities, in the form of `setpriv`, or with all: whether it succeeds, and what it prints.
fn check(lacks: &str) -> (bool, String) {
    let mut command = if lacks.is_empty() { Command::new(common::binary()) } else { Command::new("setpriv") };
    if !lacks.is_empty() {
        command.args(["--bounding-set", lacks, "--inh-caps", lacks]).arg(common::binary());
    }
    let ended = output(command.arg("check"));
    (ended.status.success(), String::from_utf8(ended.stdout).unwrap())
}

/// What `underpass check` says of a lane.
fn verdict<'a>(text: &'a str, lane: &str) -> &'a str {
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("lane {lane}        ")));
    line.unwrap_or_else(|| panic!("nothing of lane {lane}: {text}"))
}

/// What a line of `underpass check` says that a round trip takes, in microseconds.
fn cost(verdict: &str) -> f64 {
    let cost = verdict.strip_prefix("works, ").and_then(|text| text.strip_suffix(" us a round trip"));
    cost.and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("no cost: {verdict}"))
}

#[test]
fn check_tells_what_this_kernel_does() {
    if service_user().is_none() {
        println!("skipped: not root");
        return;
    }
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split('.').map(|part| part.parse().unwrap_or(0));
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let (works, text) = check("");
    assert!(works && text.starts_with(&format!("kernel        {}", release)), "{text}");
    assert!(text.contains("\ncapabilities  complete\n"), "{text}");
    assert!((0.1..1e6).contains(&cost(verdict(&text, "D"))), "{text}");
    assert!(text.contains("\nlanes         D for any server"), "{text}");
    // docs/lanes.md, "Older kernels".
    if version >= (6, 2) {
        assert!((0.1..1e6).contains(&cost(verdict(&text, "A"))), "{text}");
        assert!(text.contains(", A for servers on this host (same_host = server)"), "{text}");
        assert!(text.contains("at host = 127.0.0.1 has lane A\n"), "{text}");
    }
    if version >= (6, 18) {
        assert!((0.1..1e6).contains(&cost(verdict(&text, "B"))), "{text}");
        assert!(text.contains(", B for applications on this host too (same_host = both)\n"), "{text}");
    }

    // Lane D is left.
    let (works, text) = check("-sys_ptrace,-sys_admin");
    assert!(works && text.contains("\ncapabilities  missing CAP_SYS_PTRACE\n"), "{text}");
    assert!(cost(verdict(&text, "D")) > 0.0 && verdict(&text, "A").starts_with("fails: "), "{text}");
    assert!(text.contains("\nlanes         D for any server\n"), "{text}");

    let (works, text) = check("-bpf,-net_admin,-perfmon,-sys_ptrace,-sys_admin");
    let missing = "\ncapabilities  missing CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON, CAP_SYS_PTRACE\n";
    assert!(!works && text.contains(missing), "{text}");
    assert!(!text.contains(" works"), "{text}");
    assert!(text.ends_with("lanes         none: all traffic goes through user space\n"), "{text}");
}

#[test]
fn descriptors_are_raised_to_what_may_be_needed() {
    let site = Site::new("max_client_conn = 700\nlogfile = {dir}/log");
    let pooler = site.command(&["-q"]);
    let mut command = Command::new("/bin/bash");
    command.args(["-c", "ulimit -S -n 256; ulimit -H -n 800; exec \"$@\"", "limits"]);
    command.arg(pooler.get_program()).args(pooler.get_args()).current_dir(site.path(""));
    let pooler = Running(command.spawn().unwrap());
    site.wait_serving();
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", pooler.0.id())).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    assert_eq!(line.split_whitespace().nth(3), Some("800"), "{line}");
    let log = wait("the log", || Some(site.read("log")).filter(|log| log.contains("process up")));
    assert!(log.contains("kernel file descriptor limit: 800 (hard: 800); max_client_conn: 700"), "{log}");
    assert!(log.contains("raise LimitNOFILE"), "{log}");
}

#[test]
fn descriptors_are_raised_for_the_pools_that_are_named_and_at_reload() {
    let pools = |size: u32| format!("x = host=127.0.0.1 user=a pool_size={size}\ny = host=127.0.0.1 user=b");
    let keys = "max_client_conn = 20\ndefault_pool_size = 5\nlogfile = {dir}/log";
    let site = Site::with_database(&pools(10), keys, "");
    let pooler = site.command(&["-q"]);
    let mut command = Command::new("/bin/bash");
    command.args(["-c", "ulimit -S -n 256; ulimit -H -n 2000; exec \"$@\"", "limits"]);
    command.arg(pooler.get_program()).args(pooler.get_args()).current_dir(site.path(""));
    let pooler = Running(command.spawn().unwrap());
    site.wait_serving();
    let allowed = || {
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", pooler.0.id())).unwrap();
        let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap().to_owned();
        line.split_whitespace().nth(3).unwrap().to_owned()
    };
    // 20 clients, 10 and 5 servers, and some more of its own.
    let said = |phrase: &str| {
        wait(phrase, || Some(site.read("log")).filter(|log| log.contains(phrase)));
    };
    said("kernel file descriptor limit: 256 (hard: 2000); max_client_conn: 20, max expected fd use: 235");
    assert_eq!(allowed(), "256");

    let ini = site.read("pgbouncer.ini").replace("pool_size=10", "pool_size=100");
    std::fs::write(site.path("pgbouncer.ini"), ini).unwrap();
    site.console("RELOAD");
    said("kernel file descriptor limit: 2000 (hard: 2000); max_client_conn: 20, max expected fd use: 325");
    assert_eq!(allowed(), "2000");

    site.console("SET max_client_conn = 3000");
    said("3305 file descriptors may be needed, 2000 are allowed: raise LimitNOFILE (ulimit -n)");
}
