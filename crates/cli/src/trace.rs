// SPDX-License-Identifier: Apache-2.0
//! `underpass trace`: records the workload of a running PostgreSQL, MariaDB or MySQL.

use std::fmt::Write as _;
use std::io::{IsTerminal as _, Write as _};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::{Args, ValueEnum};
use underpass_capture::{Options, Probes, Server, SourceKind, Stage, Summary};
use underpass_trace::{Direction, Level, Masker, Protocol};

/// Exit status when `--require-lossless` was given and something is missing.
const LOSSY: u8 = 3;

/// `underpass trace`.
#[derive(Debug, Args)]
pub(crate) struct Trace {
    /// Shows the servers of this machine, how each can be recorded, and what that costs; records nothing.
    #[arg(short, long)]
    list: bool,
    /// The server that listens on this TCP port, and of its ports this one. Without a choice: the only server there is.
    #[arg(short, long, value_name = "PORT")]
    port: Option<u16>,
    /// The server with this process: PostgreSQL's postmaster, mariadbd, mysqld.
    #[arg(long, value_name = "PID", conflicts_with_all = ["unit", "container"])]
    pid: Option<u32>,
    /// The server in this systemd unit, with or without `.service`.
    #[arg(long, value_name = "UNIT", conflicts_with = "container")]
    unit: Option<String>,
    /// The server in this container, by the beginning of its identifier.
    #[arg(long, value_name = "ID")]
    container: Option<String>,
    /// Directory of the trace: a new one, or empty. Default: `trace-PORT-DATE-TIME` (UTC) in the current directory.
    #[arg(short, long, value_name = "DIRECTORY")]
    output: Option<PathBuf>,
    /// How much of the server's responses is recorded.
    #[arg(long, value_enum, default_value_t = LevelArg::Summary)]
    level: LevelArg,
    /// Stops early on the way of each event, to measure what a stage costs. Only `persist` writes a trace.
    #[arg(long, value_enum, default_value_t = StageArg::Persist)]
    stage: StageArg,
    /// Whether functions of the server are probed, for sessions by TLS and Unix sockets.
    #[arg(long, value_enum, default_value_t = ProbesArg::Auto)]
    probes: ProbesArg,
    /// Records no packets: every session comes from the probes.
    #[arg(long, conflicts_with = "cgroup")]
    no_packets: bool,
    /// Watches the packets of this cgroup only (version 2). The server must have been in it when it began to listen. Without it: the server's
    /// own, and from the end of that server on all.
    #[arg(long, value_name = "PATH")]
    cgroup: Option<PathBuf>,
    /// Replaces literals and bind values by others of the same length and look, by a keyed hash: equal values stay equal. Answers, COPY data and
    /// error messages are left out. The key is random and kept nowhere.
    #[arg(long)]
    mask: bool,
    /// Masks with the key in this file, of 16 bytes or more: equal values are equal in all traces that were masked with it.
    #[arg(long, value_name = "FILE", conflicts_with = "mask")]
    mask_key: Option<PathBuf>,
    /// Ends after so many seconds; else Ctrl-C, SIGTERM or the end of the terminal does (not that one with nohup).
    #[arg(short, long, value_name = "SECONDS")]
    duration: Option<f64>,
    /// Ends the trace at this size, MiB.
    #[arg(long, value_name = "MIB")]
    max_size: Option<u64>,
    /// Memory between kernel and recorder, MiB; 64, or 256 with `--level full` and with MariaDB and MySQL. More of it survives longer bursts.
    #[arg(long, value_name = "MIB")]
    ring_size: Option<u64>,
    /// Exits with status 3 if anything is missing from the trace, or its accounts do not add up. Where the server can be probed,
    /// `--probes auto` is then `always`.
    #[arg(long)]
    require_lossless: bool,
    /// No line of progress.
    #[arg(short, long)]
    quiet: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LevelArg {
    /// Only when the server was ready again.
    None,
    /// Tags, rows, SQLSTATE, latencies.
    Summary,
    /// All bytes of the server.
    Full,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum StageArg {
    /// The programs run; what they send is thrown away.
    Attach,
    /// Streams are put together and read; records are thrown away.
    Process,
    /// Records are written.
    Persist,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ProbesArg {
    /// As soon as a session needs them.
    Auto,
    /// From the start.
    Always,
    /// Never.
    Never,
}

/// Runs the command.
pub(crate) fn run(arguments: &Trace) -> anyhow::Result<ExitCode> {
    let servers = underpass_capture::servers();
    if arguments.list {
        return crate::print(format!("{}{}", list(&servers), lacking()).as_bytes());
    }
    let missing = underpass_capture::missing_capabilities();
    ensure!(missing.is_empty(), "not permitted: this process lacks {}; run as root", missing.join(", "));
    let (server, port) = choose(&servers, arguments)?;
    let directory = match &arguments.output {
        Some(path) => path.clone(),
        None => PathBuf::from(format!(
            "trace-{}-{}",
            port.unwrap_or(0),
            jiff::Timestamp::now().strftime("%Y%m%d-%H%M%S")
        )),
    };
    let duration = match arguments.duration {
        Some(seconds) => {
            Some(Duration::try_from_secs_f64(seconds).context("--duration must be a positive number")?)
        }
        None => None,
    };
    let options = Options {
        server: server.clone(),
        port: port.filter(|_| !arguments.no_packets),
        level: match arguments.level {
            LevelArg::None => Level::None,
            LevelArg::Summary => Level::Summary,
            LevelArg::Full => Level::Full,
        },
        stage: match arguments.stage {
            StageArg::Attach => Stage::Attach,
            StageArg::Process => Stage::Process,
            StageArg::Persist => Stage::Persist,
        },
        probes: match arguments.probes {
            // What is over before the probes come would be missing, by Unix sockets without a trace of it.
            ProbesArg::Auto if arguments.require_lossless && server.probes => Probes::Always,
            ProbesArg::Auto => Probes::Auto,
            ProbesArg::Always => Probes::Always,
            ProbesArg::Never => Probes::Never,
        },
        cgroup: arguments.cgroup.clone(),
        directory: directory.clone(),
        ring_bytes: arguments.ring_size.unwrap_or_else(|| ring_mib(server.protocol, arguments.level)) << 20,
        duration,
        writer: underpass_trace::Options {
            max_bytes: arguments.max_size.map(|mib| mib << 20),
            masker: masker(arguments)?,
            ..underpass_trace::Options::default()
        },
    };

    let stop = Arc::new(AtomicBool::new(false));
    let hangup = (!ignores_hangup()).then_some(signal_hook::consts::SIGHUP);
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM].into_iter().chain(hangup) {
        signal_hook::flag::register(signal, Arc::clone(&stop)).context("catching signals")?;
    }
    let live = !arguments.quiet && std::io::stderr().is_terminal();
    let persist = matches!(arguments.stage, StageArg::Persist);
    let mut ready = |summary: &Summary| {
        if !arguments.quiet {
            let by = options.port.map_or(", by probes alone".into(), |port| format!(", TCP port {port}"));
            let to = if persist { format!(" into {}", directory.display()) } else { String::new() };
            tell(&format!("recording {} (pid {}{by}){to}; Ctrl-C ends it\n", name(server), server.pid));
            for filter in &summary.filters {
                tell(&format!("only {filter}\n"));
            }
        }
    };
    let mut progress = |summary: &Summary| {
        if live {
            tell(&format!("\r\x1b[K{}", progress_line(summary)));
        }
    };
    let summary = underpass_capture::run(&options, &stop, &mut ready, &mut progress)?;
    if live {
        tell("\r\x1b[K");
    }
    let text = report(&summary, options.port, persist.then_some(&directory));
    let printed = crate::print(text.as_bytes());
    if let Err(error) = &printed {
        // The terminal is gone, or the disk is full; the trace has all of it.
        tell(&format!("underpass: the report could not be written: {error}\n"));
    }
    Ok(match (arguments.require_lossless && !summary.lossless(), printed) {
        (true, _) => ExitCode::from(LOSSY),
        (false, Ok(code)) => code,
        (false, Err(_)) => ExitCode::FAILURE,
    })
}

/// To standard error, if there is still anybody: nothing that is told there ends a recording.
fn tell(text: &str) {
    let mut to = std::io::stderr().lock();
    let _ = to.write_all(text.as_bytes()).and_then(|()| to.flush());
}

/// Whether SIGHUP was ignored when this process was started, as by nohup: then it goes on without its terminal.
fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    ignored >> (signal_hook::consts::SIGHUP - 1) & 1 == 1
}

/// Memory of the rings if nothing is said, MiB. Whole responses are many times what clients send; MariaDB's and MySQL's are always
/// handed over whole.
fn ring_mib(protocol: Protocol, level: LevelArg) -> u64 {
    match (protocol, level) {
        (Protocol::Mysql, _) | (_, LevelArg::Full) => 256,
        _ => 64,
    }
}

/// What hides values, if it is wanted.
fn masker(arguments: &Trace) -> anyhow::Result<Option<Masker>> {
    match &arguments.mask_key {
        Some(path) => Ok(Some(Masker::read(path)?)),
        None => arguments.mask.then(Masker::random).transpose().context("no random key for --mask"),
    }
}

/// The server that the arguments name, and its port.
fn choose<'a>(servers: &'a [Server], arguments: &Trace) -> anyhow::Result<(&'a Server, Option<u16>)> {
    let mut found: Vec<&Server> = servers.iter().collect();
    let mut what = Vec::new();
    if let Some(port) = arguments.port {
        found.retain(|server| server.is_on(port));
        what.push(format!("listens on TCP port {port}"));
    }
    if let Some(pid) = arguments.pid {
        ensure!(PathBuf::from(format!("/proc/{pid}")).exists(), "there is no process {pid}");
        found.retain(|server| server.pid == pid);
        what.push(format!("has the process {pid} (of PostgreSQL the postmaster is wanted, not a backend)"));
    }
    if let Some(unit) = &arguments.unit {
        let unit = if unit.ends_with(".service") { unit.clone() } else { format!("{unit}.service") };
        found.retain(|server| server.unit.as_ref() == Some(&unit));
        what.push(format!("is in the unit {unit}"));
    }
    if let Some(id) = &arguments.container {
        found.retain(|server| server.container.as_ref().is_some_and(|own| own.starts_with(id.as_str())));
        what.push(format!("is in a container {id}"));
    }
    if what.is_empty() {
        what.push("was found on this machine".to_owned());
    }
    match found[..] {
        [server] => Ok((server, port_of(server, arguments)?)),
        [] => {
            let mut message = format!("no PostgreSQL, MariaDB or MySQL {}", what.join(" and "));
            if !servers.is_empty() {
                let _ = write!(message, "; these run:\n{}", list(servers));
            }
            bail!(message)
        }
        _ => bail!("several servers; choose one by --port or --pid:\n{}", list(servers)),
    }
}

/// The port whose packets are recorded. Nobody is to find out later that it was the one that nobody uses.
fn port_of(server: &Server, arguments: &Trace) -> anyhow::Result<Option<u16>> {
    let mut ports: Vec<u16> = server.addresses.iter().map(SocketAddr::port).collect();
    ports.sort_unstable();
    ports.dedup();
    if arguments.port.is_some() || arguments.no_packets || ports.len() < 2 {
        return Ok(arguments.port.or_else(|| server.port()));
    }
    let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
    bail!(
        "{} (pid {}) listens on the TCP ports {}, and packets are recorded of one: choose it by --port, which can be given with --pid, --unit and \
         --container",
        name(server),
        server.pid,
        ports.join(", ")
    )
}

/// What keeps this process from recording them; empty when nothing does.
fn lacking() -> String {
    let mut text = String::new();
    let missing = underpass_capture::missing_capabilities();
    if !missing.is_empty() {
        let _ = writeln!(text, "not permitted yet: this process lacks {}; run as root", missing.join(", "));
    } else {
        match underpass_capture::trial() {
            Ok(None) => {}
            Ok(Some(lacks)) => {
                let _ = writeln!(text, "no probes, so neither TLS nor Unix sockets: {lacks}");
            }
            Err(error) => {
                let _ = writeln!(text, "nothing can be recorded: {error}");
            }
        }
    }
    if underpass_capture::cgroup2_mount().is_none() {
        let _ = writeln!(
            text,
            "packets need a mounted cgroup version 2 hierarchy (mount -t cgroup2 none /sys/fs/cgroup/unified); \
             without one, --no-packets records by probes alone"
        );
    }
    text
}

/// What each way has cost on two busy processors, docs/tracing.md: the best and the worst of its tables.
const fn cost(protocol: Protocol) -> (&'static str, &'static str) {
    match protocol {
        Protocol::Postgres => ("3 to 7 % of throughput where no processor is idle", "7 to 15 %"),
        Protocol::Mysql => ("1 to 8 % of throughput where no processor is idle", "5 to 14 %"),
    }
}

/// One block for each server.
fn list(servers: &[Server]) -> String {
    if servers.is_empty() {
        return "no PostgreSQL, MariaDB or MySQL server that this user may look at was found\n".into();
    }
    let mut text = String::new();
    for server in servers {
        let _ = writeln!(text, "{}  pid {}  {}", name(server), server.pid, server.data_directory.display());
        for (name, value) in [("unit", &server.unit), ("container", &server.container)] {
            if let Some(value) = value {
                let _ = writeln!(text, "  {name:<14}{value}");
            }
        }
        let missing = server.missing_capabilities();
        if !missing.is_empty() {
            let _ = writeln!(
                text,
                "  not permitted yet: this process lacks {} for it; run as root",
                missing.join(", ")
            );
        }
        let tcp = if server.is_unreadable {
            "not known: its files may not be read".to_owned()
        } else if server.addresses.is_empty() {
            "none: does not listen on TCP".to_owned()
        } else {
            let names: Vec<String> = server.addresses.iter().map(ToString::to_string).collect();
            format!("by packets, no traps in the server: {}  ({})", cost(server.protocol).0, names.join(", "))
        };
        let _ = writeln!(text, "  {:<14}{tcp}", "TCP");
        let probed = match (server.protocol, server.probes) {
            (Protocol::Postgres, true) => {
                "by probes of secure_read and secure_write, three traps a round trip"
            }
            (Protocol::Postgres, false) => "not possible: the executable does not export secure_read",
            (Protocol::Mysql, true) => {
                "by probes of vio_read, vio_write and their like, six traps a round trip"
            }
            (Protocol::Mysql, false) => "not possible: the executable does not export vio_read",
        };
        let probed = match server.probes {
            true => format!("{probed}: {}", cost(server.protocol).1),
            false => probed.to_owned(),
        };
        let _ = writeln!(text, "  {:<14}{probed}", "TCP with TLS");
        if !server.sockets.is_empty() {
            let names: Vec<String> = server.sockets.iter().map(|path| path.display().to_string()).collect();
            let _ = writeln!(text, "  {:<14}{probed}  ({})", "Unix sockets", names.join(", "));
        }
    }
    text
}

/// `MariaDB 10.11.19`.
fn name(server: &Server) -> String {
    format!("{} {}", server.product(), server.version).trim_end().to_owned()
}

fn progress_line(summary: &Summary) -> String {
    let totals = summary.totals;
    let (_, recorded, lost) = bytes(summary);
    format!(
        "{:>4.0} s  {} sessions  {} messages  {} answered  {:.1} MiB seen by the recorder  {:.1} MiB written  {lost} bytes lost",
        summary.elapsed.as_secs_f64(),
        totals.sessions,
        totals.messages,
        totals.answered,
        mib(recorded),
        mib(summary.writer.file_bytes),
    )
}

/// Bytes seen, recorded and lost over all sources.
fn bytes(summary: &Summary) -> (u64, u64, u64) {
    summary.accounts.iter().fold((0, 0, 0), |(seen, recorded, lost), (_, _, accounts)| {
        (seen + accounts.seen.bytes, recorded + accounts.recorded.bytes, lost + accounts.missing())
    })
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn report(summary: &Summary, port: Option<u16>, directory: Option<&PathBuf>) -> String {
    let totals = summary.totals;
    let mut text = String::new();
    if let Some(directory) = directory {
        let _ = writeln!(
            text,
            "trace         {}  ({:.1} MiB in {} segments, {} records)",
            directory.display(),
            mib(summary.writer.file_bytes),
            summary.writer.segments,
            summary.writer.records
        );
    }
    if let Some(port) = port {
        let _ = writeln!(text, "packets       of TCP port {port}");
    }
    for filter in &summary.filters {
        let _ = writeln!(text, "only          {filter}");
    }
    let _ = writeln!(
        text,
        "time          {:.1} s, fullest ring {:.0} %",
        summary.elapsed.as_secs_f64(),
        summary.fill_max * 100.0
    );
    let _ = writeln!(
        text,
        "sessions      {} ({} joined while under way), {} ended, {} of these audited against the kernel's own count",
        totals.sessions, totals.midstream, totals.ended, totals.audited
    );
    let _ = writeln!(text, "messages      {} of clients, {} times ready", totals.messages, totals.answered);
    for (source, direction, accounts) in &summary.accounts {
        let source = match source {
            SourceKind::Packets => "packets",
            SourceKind::Calls => "calls",
        };
        let way = match direction {
            Direction::Frontend => "to the server",
            Direction::Backend => "to clients",
        };
        let again = match accounts.again.bytes {
            0 => String::new(),
            bytes => format!(", of these {bytes} sent again or out of order"),
        };
        let _ = writeln!(
            text,
            "bytes         {source} {way}: seen {} = recorded {} + lost {} + filtered {}{again}{}",
            accounts.seen.bytes,
            accounts.recorded.bytes,
            accounts.missing(),
            accounts.filtered.bytes,
            if accounts.add_up() { "" } else { "  (does not add up)" }
        );
    }
    if totals.encrypted > 0 {
        let _ = writeln!(text, "encrypted     {} connections turned to TLS or GSSAPI", totals.encrypted);
    }
    for note in &summary.notes {
        let _ = writeln!(text, "note          {note}");
    }
    let lacks = summary.shortcomings();
    let verdict = if lacks.is_empty() { "nothing is missing".to_owned() } else { lacks.join(", ") };
    let _ = writeln!(text, "losses        {verdict}");
    text
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        trace: Trace,
    }

    /// MySQL 8 has a port for its X protocol, MariaDB may have `extra_port`.
    #[test]
    fn of_several_ports_one_is_chosen() {
        let server = Server {
            protocol: Protocol::Mysql,
            pid: 1,
            executable: "/usr/sbin/mysqld".into(),
            data_directory: "/var/lib/mysql".into(),
            data_inode: None,
            version: "8.0".into(),
            system_identifier: None,
            addresses: vec!["127.0.0.1:33060".parse().unwrap(), "[::]:3306".parse().unwrap()],
            sockets: Vec::new(),
            netns: 1,
            unit: None,
            container: None,
            probes: true,
            is_unreadable: false,
        };
        let one = Server { addresses: vec!["[::]:3307".parse().unwrap()], pid: 2, ..server.clone() };
        let servers = [server, one];
        let chosen = |words: &str| {
            let line = Line::parse_from(["trace"].into_iter().chain(words.split_ascii_whitespace()));
            let chosen = choose(&servers, &line.trace).map(|(server, port)| (server.pid, port));
            chosen.map_err(|error| error.to_string())
        };
        let refused = chosen("--pid 1").unwrap_err();
        assert!(refused.contains("listens on the TCP ports 3306, 33060, and"), "{refused}");
        assert_eq!(chosen("--pid 1 --port 3306"), Ok((1, Some(3306))));
        assert_eq!(chosen("-p 33060"), Ok((1, Some(33060))));
        assert_eq!(chosen("-p 3307"), Ok((2, Some(3307))));
        assert_eq!(chosen("--pid 1 --no-packets").map(|(pid, _)| pid), Ok(1));
        let refused = chosen("--pid 2 --port 3306").unwrap_err();
        assert!(refused.contains("listens on TCP port 3306 and has the process 2"), "{refused}");
    }

    #[test]
    fn a_report_says_whether_anything_is_missing() {
        let mut summary = Summary::default();
        assert!(report(&summary, None, None).contains("nothing is missing"));
        summary.totals.lost_bytes = 5;
        summary.totals.losses = 1;
        assert!(report(&summary, None, None).contains("5 bytes in 1 losses\n"));
        summary.totals.lost_bytes = 0;
        summary.unrecorded = 2;
        summary.ended_early = Some("the limit of its size is reached".into());
        let told = report(&summary, None, None);
        assert!(
            told.contains("2 connections that could not be recorded, what came after its early end"),
            "{told}"
        );
    }
}
