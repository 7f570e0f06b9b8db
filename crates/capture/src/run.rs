// SPDX-License-Identifier: Apache-2.0
//! A capture from its start to its end.

mod follow;

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::{ClockId, Timespec, clock_gettime};
use underpass_trace::{
    Clock, Count, Counters, Direction, Level, Meta, Note, Options as WriterOptions, Protocol, Record, Writer,
};

use crate::discover::{Backends, Nobody, Server};
use crate::error::Error;
use crate::event::Event;
use crate::kernel::{Accounts, Kernel, ResponseLevel, Settings, SourceKind};
use crate::privileges;
use crate::procfs;
use crate::recorder::{Lookup, Recorder};
use crate::selftest;
use crate::summary::Summary;
use follow::Proof;

/// Between two looks into the rings. A ring holds what comes in this time many times over.
const POLL: Duration = Duration::from_millis(5);
/// The longest while little comes: each look takes a processor from the server.
const POLL_CALM: Duration = Duration::from_millis(20);
/// So little: a ring no fuller than this would hold fifty times as much.
const FILL_CALM: f64 = 0.02;
/// Bytes that may come in a millisecond after any calm: a long statement arrives as fast as memory is copied.
const BURST: u64 = 3 << 20;
/// A ring as full as this is looked into again at once.
const FILL_BUSY: f64 = 0.1;
/// From here on compression gives way to reading: what does not fit into a ring is lost, what is not compressed is only large.
const FILL_HURRY: f64 = 0.25;
/// Housekeeping: holes, statistics, probes that have become necessary.
const TICK: Duration = Duration::from_millis(200);
/// Between two reports of progress and accounts.
const REPORT: Duration = Duration::from_secs(1);
/// Between two pairs of clocks in the trace.
const CLOCK: Duration = Duration::from_secs(30);
/// How long a self-test waits for its own traffic.
const SELFTEST: Duration = Duration::from_secs(2);

/// Shortcomings that no number tells.
const GAP_LOCAL: &str = "sessions by Unix sockets, or what they said before the probes came";
const GAP_RESTART: &str = "what probed sessions said before the restarted server was known";
const GAP_UNPROBED: &str = "probed sessions since the probes were lost";
const GAP_SILENT: &str = "sessions by the probes, which were attached but silent";
const GAP_CGROUP: &str = "what a restarted server said, if it was started in another cgroup";

/// How far events go: to measure what each stage costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stage {
    /// The programs run, events are thrown away.
    Attach,
    /// Events become records, records are thrown away.
    Process,
    /// Records are written.
    #[default]
    Persist,
}

/// When functions of the server are probed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Probes {
    /// As soon as there is a session that needs it.
    #[default]
    Auto,
    /// From the start.
    Always,
    /// Not at all: sessions by TLS and Unix sockets are left out.
    Never,
}

/// What to capture and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// Whose traffic.
    pub server: Server,
    /// Which port of it; `None`: no packets.
    pub port: Option<u16>,
    /// How much of the responses.
    pub level: Level,
    /// How far.
    pub stage: Stage,
    /// Whether functions of the server are probed.
    pub probes: Probes,
    /// The cgroup (version 2) whose packets are watched. By default the server's own, and the root from when the server ends: whoever starts
    /// it again may put it elsewhere.
    pub cgroup: Option<PathBuf>,
    /// The trace's directory, which must not exist or be empty.
    pub directory: PathBuf,
    /// All rings together, bytes.
    pub ring_bytes: u64,
    /// Ends the capture after so long.
    pub duration: Option<Duration>,
    /// Limits and segments of the trace.
    pub writer: WriterOptions,
}

struct Run<'a> {
    options: &'a Options,
    kernel: Kernel,
    recorder: Recorder,
    writer: Option<Writer>,
    /// Why nothing is written any more.
    stopped: Option<String>,
    summary: Summary,
    started: Instant,
    activity_useless: bool,
    /// A client was connected by a Unix socket.
    local_seen: bool,
    /// So many notes are in the trace.
    told: usize,
    /// The server as it is now: it may have been started again.
    server: Server,
    /// When its process was started.
    server_start: Option<u64>,
    /// It has ended, and a note says so.
    end_noted: bool,
    /// Since when the probes are attached to it, CLOCK_MONOTONIC nanoseconds.
    probed_ns: u64,
    /// Whether they see anything is being found out.
    proof: Option<Proof>,
    /// It was started again, and where it listens is not known yet.
    settling: bool,
    /// The servers that ran beside it when the capture began, by process and its start.
    others: Vec<(u32, Option<u64>)>,
    /// Packets are watched in the server's own cgroup.
    own_cgroup: Option<OwnCgroup>,
}

/// Watching the sockets of the server's own cgroup spares all others of the machine the programs' run for each of their packets.
struct OwnCgroup {
    /// Where it is left for.
    root: PathBuf,
    /// The server's process, as a descriptor that tells its end.
    server: OwnedFd,
}

impl OwnCgroup {
    /// Attaches the packet source there, if the server has one of its own.
    fn attach(kernel: &mut Kernel, server: u32, root: &Path) -> Option<Self> {
        let directory = procfs::own_cgroup(server, root)?;
        let server = pidfd_open(Pid::from_raw(server as i32)?, PidfdFlags::empty()).ok()?;
        kernel.attach_packets(&directory).ok()?;
        Some(Self { root: root.to_owned(), server })
    }

    /// Whether the server ends within `time`.
    fn ends_within(&self, time: Duration) -> bool {
        let timeout = Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
        poll(&mut [PollFd::new(&self.server, PollFlags::IN)], Some(&timeout)).is_ok_and(|ready| ready > 0)
    }
}

/// Captures until `stop`, the duration, or a limit of the trace. `ready` is told when the first byte would be seen; `progress`,
/// every second, how it goes.
///
/// # Errors
/// Everything that keeps a capture from starting. What happens later ends it in good order and is in the summary's notes.
pub fn run(
    options: &Options,
    stop: &AtomicBool,
    ready: &mut dyn FnMut(&Summary),
    progress: &mut dyn FnMut(&Summary),
) -> Result<Summary, Error> {
    if options.port.is_none() && options.probes == Probes::Never {
        return Err(Error::NothingToRecord);
    }
    privileges::check()?;
    privileges::check_for(&options.server, options.port.is_some())?;
    let protocol = options.server.protocol;
    let level = match (protocol, options.level) {
        // Rows are counted by reading them: the end of a result does not tell their number.
        (Protocol::Mysql, _) | (_, Level::Full) => ResponseLevel::FULL,
        (_, Level::None) => ResponseLevel::NONE,
        (_, Level::Summary) => ResponseLevel::SUMMARY,
    };
    let rings = thread::available_parallelism().map_or(1, |n| n.get().min(8) as u32);
    let settings = Settings {
        port: options.port,
        netns: Some(options.server.netns as u32),
        protocol,
        level,
        ring_bytes: options.ring_bytes,
        rings,
    };
    let cgroup = match (&options.cgroup, options.port) {
        (_, None) => None,
        (Some(path), _) => Some(path.clone()),
        (None, _) => Some(procfs::cgroup2_mount().ok_or(Error::NoCgroup2)?),
    };
    let mut kernel = Kernel::open(&settings)?;
    let root = cgroup.as_ref().filter(|_| options.cgroup.is_none());
    let own_cgroup = root.and_then(|root| OwnCgroup::attach(&mut kernel, options.server.pid, root));
    if let (Some(cgroup), None) = (&cgroup, &own_cgroup) {
        kernel.attach_packets(cgroup)?;
    }
    let mut run = Run {
        recorder: Recorder::new(protocol, options.level, lookup(&options.server)),
        writer: None,
        stopped: None,
        summary: Summary::default(),
        started: Instant::now(),
        activity_useless: false,
        local_seen: false,
        told: 0,
        server: options.server.clone(),
        server_start: procfs::start_ticks(options.server.pid),
        end_noted: false,
        probed_ns: 0,
        proof: None,
        settling: false,
        others: follow::others(&options.server),
        own_cgroup,
        options,
        kernel,
    };
    run.recorder.begins(u64::MAX);
    if options.port.is_none() {
        run.recorder.without_packets();
    }
    if options.probes == Probes::Always || options.port.is_none() {
        run.attach_probes()?;
    } else if options.probes == Probes::Auto
        && (options.server.has_local() || options.server.has_local_elsewhere())
    {
        run.local_seen = true;
        if !run.probes_if_possible("a client is connected by a Unix socket") {
            run.gap(GAP_LOCAL);
        }
    }
    // The place is made before traffic is waited for, and only when everything else has worked.
    run.selftest()?;
    if options.stage == Stage::Persist {
        run.writer = Some(run.create()?);
    }
    run.recorder.begins(now_ns());
    run.summary.filters = run.filters();
    run.tell_notes();
    run.update();
    ready(&run.summary);
    run.poll(stop, progress);
    Ok(run.finish())
}

impl Run<'_> {
    fn create(&self) -> Result<Writer, Error> {
        let options = self.options;
        let server = &options.server;
        let uname = rustix::system::uname();
        let mut sources = Vec::new();
        if options.port.is_some() {
            sources.push("cgroup_skb".to_owned());
        }
        if self.options.probes != Probes::Never {
            sources.push("uprobe".to_owned());
        }
        let meta = Meta {
            protocol: server.protocol,
            level: options.level,
            started: clock(),
            host: uname.nodename().to_string_lossy().into_owned(),
            kernel: uname.release().to_string_lossy().into_owned(),
            server: underpass_trace::Server {
                version: server.version.clone(),
                system_identifier: server.system_identifier.clone(),
                addresses: server
                    .addresses
                    .iter()
                    .map(ToString::to_string)
                    .chain(server.sockets.iter().map(|path| path.display().to_string()))
                    .collect(),
                data_directory: Some(server.data_directory.display().to_string()),
                pid: Some(server.pid),
                build_id: None,
            },
            filters: self.filters(),
            sources,
            ..Meta::default()
        };
        Writer::create(&options.directory, &meta, options.writer.clone())
            .map_err(|error| Error::Trace { message: error.to_string() })
    }

    /// What of the server's traffic is left out from the start, in words.
    fn filters(&self) -> Vec<String> {
        let options = self.options;
        let ports = options.server.addresses.iter().map(|address| address.port());
        let one_of_many = options.port.filter(|&port| ports.clone().any(|other| other != port));
        let cgroup = options.cgroup.as_ref().filter(|_| options.port.is_some());
        let never = options.probes == Probes::Never && options.port.is_some();
        [
            one_of_many.map(|port| format!("TCP port {port}")),
            cgroup.map(|path| format!("sockets made in the cgroup {}", path.display())),
            never.then(|| "TCP connections without encryption (--probes never)".to_owned()),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// Puts the notes that are new into the trace.
    fn tell_notes(&mut self) {
        if self.writer.is_none() {
            return;
        }
        for text in &self.summary.notes[self.told..] {
            let note = Note { time_ns: now_ns(), text: text.as_bytes().into() };
            write(&mut self.writer, &mut self.stopped, &Record::Note(note));
        }
        self.told = self.summary.notes.len();
    }

    fn attach_probes(&mut self) -> Result<(), Error> {
        self.kernel.attach_probes(&procfs::path(self.server.pid, "exe"), self.server.pid)?;
        self.probed_ns = now_ns();
        Ok(())
    }

    /// When it is needed, be it in the middle of a capture: what does not work is noted. Returns whether the probes are there.
    fn probes_if_possible(&mut self, why: &str) -> bool {
        if self.options.probes != Probes::Auto || self.kernel.probes_attached() {
            return true;
        }
        let attached = self.attach_probes();
        let is_attached = attached.is_ok();
        let note = match attached {
            Ok(()) => format!("probes attached after {:.1} s: {why}", self.started.elapsed().as_secs_f64()),
            Err(error) => format!("{why}, and its traffic is not recorded: {error}"),
        };
        // It is tried again and again, and fails for the same reason.
        if !self.summary.notes.contains(&note) {
            self.summary.notes.push(note);
        }
        is_attached
    }

    /// Something may be missing that nothing counts.
    fn gap(&mut self, what: &'static str) {
        if !self.summary.gaps.contains(&what) {
            self.summary.gaps.push(what);
        }
    }

    /// Makes packets and waits until the programs have seen them. Returns our end of their connection if they have not.
    fn unseen_packets(&mut self, port: u16) -> Result<Option<SocketAddr>, Error> {
        let ours = selftest::by_tcp(&self.options.server, port)?;
        self.recorder.ignore(ours);
        let mut seen = false;
        let deadline = Instant::now() + SELFTEST;
        while !seen && Instant::now() < deadline {
            let recorder = &mut self.recorder;
            self.kernel.drain(|ring, event| {
                seen |= matches!(event, Event::Packet { ends, .. } if ends.remote.port() == ours.port());
                // There is no trace yet. A session must not begin before it: its start would be in none, and nothing of it
                // could be played. What speaks now is joined when it speaks again.
                if !matches!(event, Event::Packet { .. } | Event::Call { .. } | Event::Activity { .. }) {
                    recorder.event(ring, event, &mut |_: Record<'_>| {});
                }
            });
            thread::sleep(POLL);
        }
        Ok((!seen).then_some(ours))
    }

    /// Watches packets in the root cgroup from now on.
    fn leave_own_cgroup(&mut self) -> Result<(), Error> {
        match self.own_cgroup.take() {
            Some(OwnCgroup { root, .. }) => self.kernel.attach_packets(&root),
            None => Ok(()),
        }
    }

    /// Waits for `time`, or until the server ends. The next one speaks when it has started, which takes longer than to be ready for it.
    fn rest(&mut self, time: Duration) {
        let Some(own) = &self.own_cgroup else { return thread::sleep(time) };
        if own.ends_within(time) {
            if let Err(error) = self.leave_own_cgroup() {
                self.gap(GAP_CGROUP);
                self.summary
                    .notes
                    .push(format!("packets are not watched outside the server's old cgroup: {error}"));
            }
        }
    }

    /// Makes traffic and waits until each source has seen it.
    fn selftest(&mut self) -> Result<(), Error> {
        let server = &self.options.server;
        if let Some(port) = self.options.port {
            let mut unseen = self.unseen_packets(port)?;
            if unseen.is_some() && self.own_cgroup.is_some() {
                // It has been moved there since it began to listen, or others made its sockets.
                self.leave_own_cgroup()?;
                unseen = self.unseen_packets(port)?;
            }
            if let Some(ours) = unseen {
                return Err(Error::Silent {
                    what: "the packet source",
                    why: format!(
                        "a connection from {ours} was not seen; the server's sockets may belong to another cgroup than {}",
                        self.options
                            .cgroup
                            .as_ref()
                            .map_or("the root".into(), |path| path.display().to_string())
                    ),
                });
            }
        }
        if self.kernel.probes_attached() {
            let before = self.hits();
            selftest::by_any(server, self.options.port)?;
            let deadline = Instant::now() + SELFTEST;
            while self.hits() == before && Instant::now() < deadline {
                thread::sleep(POLL);
            }
            if self.hits() == before {
                return Err(self.silent());
            }
        }
        Ok(())
    }

    /// How often the probes were reached by the server's connections, in the function that a self-test runs into: PostgreSQL waits for
    /// the client's first word, MariaDB and MySQL speak first.
    fn hits(&self) -> u64 {
        let hits = self.kernel.hits();
        match self.server.protocol {
            Protocol::Postgres => hits.read,
            Protocol::Mysql => hits.write,
        }
    }

    /// They were not.
    fn silent(&self) -> Error {
        let what = match self.server.protocol {
            Protocol::Postgres => "the probe of secure_read",
            Protocol::Mysql => "the probe of vio_write",
        };
        let why = if self.kernel.hits().layout > 0 {
            "where this build keeps the ends of its connections is not known; sessions over TCP without TLS can be recorded with --probes never"
        } else {
            "a connection of our own did not reach it; does the process run another executable?"
        };
        Error::Silent { what, why: why.into() }
    }

    /// One look into the rings.
    fn drain(&mut self) -> usize {
        let Self { options, kernel, recorder, writer, stopped, .. } = self;
        if options.stage == Stage::Attach {
            return kernel.drain(|_, _| {});
        }
        let mut sink = |record: Record<'_>| write(writer, stopped, &record);
        let events = kernel.drain(|ring, event| recorder.event(ring, event, &mut sink));
        recorder.round(&mut sink);
        events
    }

    fn poll(&mut self, stop: &AtomicBool, progress: &mut dyn FnMut(&Summary)) {
        let (mut ticked, mut reported, mut clocked) = (Instant::now(), Instant::now(), Instant::now());
        while !stop.load(Ordering::Relaxed) && self.stopped.is_none() {
            if self.options.duration.is_some_and(|limit| self.started.elapsed() >= limit) {
                break;
            }
            let fill = self.kernel.fill();
            self.summary.fill_max = self.summary.fill_max.max(fill);
            if let Some(writer) = &mut self.writer {
                // Between the two it stays as it is.
                match fill {
                    FILL_HURRY.. => writer.hurry(true),
                    ..FILL_BUSY => writer.hurry(false),
                    _ => {}
                }
            }
            self.drain();
            if ticked.elapsed() >= TICK {
                ticked = Instant::now();
                self.tick();
                self.tell_notes();
            }
            if reported.elapsed() >= REPORT {
                reported = Instant::now();
                self.follow_server();
                self.look_for_local(Server::has_local_elsewhere);
                self.tell_probed();
                self.update();
                let counters = counters(&self.summary);
                write(&mut self.writer, &mut self.stopped, &Record::Counters(counters));
                progress(&self.summary);
            }
            if clocked.elapsed() >= CLOCK {
                clocked = Instant::now();
                write(&mut self.writer, &mut self.stopped, &Record::Clock(clock()));
            }
            self.rest(match fill {
                ..FILL_CALM => calm(self.kernel.ring_bytes()),
                ..FILL_BUSY => POLL,
                _ => Duration::ZERO,
            });
        }
    }

    fn tick(&mut self) {
        let Self { recorder, writer, stopped, .. } = self;
        recorder.tick(now_ns(), &mut |record: Record<'_>| write(writer, stopped, &record));
        let sources = [SourceKind::Packets, SourceKind::Calls];
        let lost = sources.iter().any(|&source| {
            [Direction::Frontend, Direction::Backend]
                .iter()
                .any(|&direction| self.kernel.accounts(source, direction).is_ok_and(|a| a.lost.events > 0))
        });
        if lost {
            self.recorder.ring_was_full();
        }
        if self.recorder.totals().encrypted > 0 {
            self.probes_come("a client turned to encryption");
        }
        self.look_for_local(Server::has_local);
        self.follow_proof();
        self.follow_texts();
    }

    /// Whether a client by a Unix socket has come, for whom there are no probes.
    fn look_for_local(&mut self, has_local: fn(&Server) -> bool) {
        if self.options.probes == Probes::Auto && !self.kernel.probes_attached() && has_local(&self.server) {
            self.local_seen = true;
            self.gap(GAP_LOCAL);
            self.probes_come("a client is connected by a Unix socket");
        }
    }

    /// While everything runs.
    fn probes_come(&mut self, why: &str) {
        if !self.kernel.probes_attached() && self.probes_if_possible(why) && self.kernel.probes_attached() {
            if self.server.has_local() {
                self.gap(GAP_LOCAL);
            }
            self.prove();
        }
    }

    fn has_server(&self) -> bool {
        procfs::is_alive(self.server.pid, self.server_start)
    }

    /// The probes were there until now, if their server was.
    fn tell_probed(&mut self) {
        if self.kernel.probes_attached() && self.has_server() {
            self.recorder.probed(self.probed_ns, now_ns());
        }
    }

    /// The probe that tells texts costs a trap for each statement: it is there only while it is needed.
    fn follow_texts(&mut self) {
        let wanted = self.recorder.wants_texts() && self.options.probes != Probes::Never;
        if !wanted {
            self.kernel.detach_activity();
        } else if !self.kernel.activity_attached() && !self.activity_useless {
            let executable = procfs::path(self.server.pid, "exe");
            if let Err(error) = self.kernel.attach_activity(&executable, self.server.pid) {
                self.activity_useless = true;
                self.summary.notes.push(format!("texts of older prepared statements cannot be had: {error}"));
            }
        }
    }

    fn update(&mut self) {
        self.summary.elapsed = self.started.elapsed();
        self.summary.totals = self.recorder.totals();
        // Without probes on purpose they are left out.
        self.summary.unseen = if self.options.probes == Probes::Never { 0 } else { self.recorder.unseen() };
        self.summary.waited = self.recorder.waited();
        self.summary.layout = self.kernel.hits().layout;
        self.summary.accounts.clear();
        for source in [SourceKind::Packets, SourceKind::Calls] {
            for direction in [Direction::Frontend, Direction::Backend] {
                if let Ok(accounts) = self.kernel.accounts(source, direction)
                    && accounts != Accounts::default()
                {
                    self.summary.accounts.push((source, direction, accounts));
                }
            }
        }
        if let Some(writer) = &self.writer {
            self.summary.writer = writer.stats();
        }
    }

    fn finish(mut self) -> Summary {
        self.settle_at_once();
        while self.proof.is_some() {
            self.drain();
            self.follow_proof();
            thread::sleep(POLL_CALM);
        }
        let probed = self.kernel.probes_attached();
        let has_server = self.has_server();
        self.kernel.detach();
        let detached_ns = now_ns();
        while self.drain() > 0 {}
        let Self { recorder, writer, stopped, .. } = &mut self;
        recorder.finish(now_ns(), &mut |record: Record<'_>| write(writer, stopped, &record));
        if probed && has_server {
            self.recorder.probed(self.probed_ns, detached_ns);
        }
        self.update();
        let counters = counters(&self.summary);
        write(&mut self.writer, &mut self.stopped, &Record::Counters(counters));
        if let Some(why) = self.recorder.refused() {
            let count = self.summary.totals.refused;
            self.summary.notes.push(format!("{count} connections are not recorded, because they use {why}"));
        }
        let not_understood = self.summary.totals.not_understood;
        if not_understood > 0 {
            let first = self.recorder.not_understood();
            let first = first.map_or(String::new(), |(client, what)| {
                format!("; the first, of {client}, began with {what}")
            });
            self.summary.notes.push(format!(
                "{not_understood} connections that were under way are not recorded: nothing showed where a message of theirs begins \
                 (one long COPY, or TLS that began before the recording){first}"
            ));
        }
        let lost: u64 = self.summary.accounts.iter().map(|(_, _, accounts)| accounts.lost.events).sum();
        if lost > 0 {
            self.summary.notes.push(format!(
                "the rings between kernel and recorder were full for {lost} events: the server was faster than the recorder's share \
                 of the processors. More --ring-size survives longer bursts, a lower --level or an idle core more load"
            ));
        }
        let unheard: u64 = self.summary.accounts.iter().map(|(_, _, accounts)| accounts.unheard.events).sum();
        if unheard > 0 {
            self.summary.notes.push(format!(
                "{unheard} beginnings or ends of connections were lost: what their sessions lack at the end is not known"
            ));
        }
        self.summary.unrecorded = self.summary.totals.refused;
        let encrypted = self.summary.totals.encrypted;
        if encrypted > 0 && !probed {
            // Without probes on purpose they are left out, and the trace's filters say so.
            if self.options.probes != Probes::Never {
                self.summary.unrecorded += encrypted;
                self.summary.unseen = 0;
            }
            self.summary.notes.push(format!(
                "{encrypted} connections are not recorded, because they turned to TLS or GSSAPI"
            ));
        }
        if self.summary.unseen > 0 {
            self.summary.notes.push(format!(
                "of {} connections that turned to TLS or GSSAPI the beginning, or all, is not recorded: the probes came later",
                self.summary.unseen
            ));
        }
        if self.summary.waited > 0 {
            self.summary.notes.push(format!(
                "of {} probed sessions one request may be missing: they were under way when the probes came, and the server waited for it \
                 inside the probed function",
                self.summary.waited
            ));
        }
        if self.summary.layout > 0 {
            self.summary.notes.push(format!(
                "{} connections are not recorded, because the probes did not understand where this build keeps their ends",
                self.summary.layout
            ));
        }
        if self.options.probes == Probes::Auto
            && !probed
            && !self.local_seen
            && !self.server.sockets.is_empty()
        {
            self.summary.notes.push(
                "no session by a Unix socket was seen; those that were over within 0.2 s, or 1 s if the client was in another network namespace, \
                 would be missing (--probes always)"
                    .into(),
            );
        }
        self.tell_notes();
        if let Some(writer) = self.writer.take() {
            let stats = writer.stats();
            self.summary.writer = match writer.finish() {
                Ok(stats) => stats,
                Err(error) => {
                    self.stopped.get_or_insert(error.to_string());
                    stats
                }
            };
        }
        if let Some(why) = self.stopped {
            self.summary.notes.push(format!("the trace ended early: {why}"));
            self.summary.ended_early = Some(why);
        }
        self.summary
    }
}

/// Who knows about sessions that were there before.
fn lookup(server: &Server) -> Box<dyn Lookup> {
    match server.protocol {
        Protocol::Postgres => Box::new(Backends::new(server.pid)),
        Protocol::Mysql => Box::new(Nobody),
    }
}

fn write(writer: &mut Option<Writer>, stopped: &mut Option<String>, record: &Record<'_>) {
    if let Some(writer) = writer
        && let Err(error) = writer.write(record)
    {
        stopped.get_or_insert_with(|| match error {
            // That it ended is said anyway.
            underpass_trace::Error::Stopped(why) => why.to_string(),
            error => error.to_string(),
        });
    }
}

fn counters(summary: &Summary) -> Counters {
    let mut counters = Counters { time_ns: now_ns(), ..Counters::default() };
    let add = |to: &mut Count, from: crate::kernel::Count| {
        to.events += from.events;
        to.bytes += from.bytes;
    };
    for (_, _, accounts) in &summary.accounts {
        add(&mut counters.seen, accounts.seen);
        add(&mut counters.recorded, accounts.recorded);
        add(&mut counters.lost, accounts.lost);
        add(&mut counters.lost, accounts.fault);
        add(&mut counters.filtered, accounts.filtered);
    }
    counters
}

/// Pause while little comes: a ring of this size takes a burst of that length.
fn calm(ring_bytes: u64) -> Duration {
    Duration::from_millis(ring_bytes / BURST).clamp(POLL, POLL_CALM)
}

fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn clock() -> Clock {
    let monotonic_ns = now_ns();
    let now = clock_gettime(ClockId::Realtime);
    Clock { monotonic_ns, realtime_ns: now.tv_sec * 1_000_000_000 + now.tv_nsec }
}
