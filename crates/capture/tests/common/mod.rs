// SPDX-License-Identifier: Apache-2.0
//! A capture of a private server in a thread, and a look at what it recorded.
#![allow(dead_code)] // each test file uses its part

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use underpass_capture::{Error, Options, Probes, Server, Stage, Summary};
use underpass_testkit::Postgres;
use underpass_trace::{
    Backend, Direction, Frontend, Level, Loss, Outcome, PreparedFill, Reader, Record, Response, SessionEnd,
    SessionId, SessionStart, WithheldReason,
};

/// A running capture.
pub struct Capture {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Summary, Error>>,
    notes: Arc<Mutex<Vec<String>>>,
    pub directory: PathBuf,
    _parent: tempfile::TempDir,
}

/// How the capture differs from the usual one.
pub struct Setup {
    pub level: Level,
    pub probes: Probes,
    pub packets: bool,
    pub ring_bytes: u64,
    /// For how long the recorder reads nothing, once a second.
    pub stall: Duration,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            level: Level::Summary,
            probes: Probes::Never,
            packets: true,
            ring_bytes: 32 << 20,
            stall: Duration::ZERO,
        }
    }
}

/// What `underpass trace` would find.
pub fn server(postgres: &Postgres) -> Server {
    Server::of_process(postgres.pid()).expect("a postmaster")
}

/// Says why tests of this file cannot run here.
pub fn skipped() -> bool {
    let missing = underpass_capture::missing_capabilities();
    if !missing.is_empty() {
        eprintln!("skipped: needs {}", missing.join(", "));
        return true;
    }
    if underpass_capture::cgroup2_mount().is_none() {
        eprintln!("skipped: no cgroup version 2 is mounted");
        return true;
    }
    false
}

impl Capture {
    /// Returns when the first byte would be seen.
    pub fn start(postgres: &Postgres, setup: &Setup) -> Self {
        Self::of(server(postgres), postgres.port(), setup)
    }

    /// The same of any server.
    pub fn of(server: Server, port: u16, setup: &Setup) -> Self {
        Self::try_of(server, port, setup).unwrap_or_else(|why| panic!("the capture did not start: {why:?}"))
    }

    /// The same, or why it does not start.
    pub fn try_of(server: Server, port: u16, setup: &Setup) -> Result<Self, Error> {
        let parent = tempfile::tempdir().expect("a directory");
        let directory = parent.path().join("trace");
        let options = Options {
            server,
            port: setup.packets.then_some(port),
            level: setup.level,
            stage: Stage::Persist,
            probes: setup.probes,
            cgroup: None,
            directory: directory.clone(),
            ring_bytes: setup.ring_bytes,
            duration: None,
            writer: underpass_trace::Options::default(),
        };
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = mpsc::channel();
        let flag = Arc::clone(&stop);
        let notes = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&notes);
        let stall = setup.stall;
        let thread = thread::spawn(move || {
            let mut ready = |_: &Summary| sender.send(()).expect("somebody waits");
            underpass_capture::run(&options, &flag, &mut ready, &mut |summary| {
                told.lock().expect("a lock").clone_from(&summary.notes);
                thread::sleep(stall);
            })
        });
        if receiver.recv_timeout(Duration::from_secs(20)).is_err() {
            return Err(thread.join().expect("the thread").expect_err("an error"));
        }
        Ok(Self { stop, thread, notes, directory, _parent: parent })
    }

    /// What it has noted so far.
    pub fn notes(&self) -> Vec<String> {
        self.notes.lock().expect("a lock").clone()
    }

    /// Ends it and reads the trace.
    pub fn end(self) -> Trace {
        // Closed sockets tell their totals a moment after the client has gone.
        thread::sleep(Duration::from_millis(300));
        self.stop.store(true, Ordering::Relaxed);
        let summary = self.thread.join().expect("the thread").expect("a capture");
        Trace { records: read(&self.directory), summary }
    }
}

/// All records of a trace.
pub fn read(directory: &Path) -> Vec<Record<'static>> {
    let mut reader = Reader::open(directory).expect("a trace");
    let mut records = Vec::new();
    while let Some(record) = reader.next().expect("a record") {
        records.push(record.into_owned());
    }
    records
}

/// What was recorded.
pub struct Trace {
    pub records: Vec<Record<'static>>,
    pub summary: Summary,
}

impl Trace {
    pub fn starts(&self) -> Vec<&SessionStart<'static>> {
        self.records
            .iter()
            .filter_map(|r| if let Record::SessionStart(r) = r { Some(r) } else { None })
            .collect()
    }

    pub fn ends(&self) -> Vec<&SessionEnd> {
        self.records
            .iter()
            .filter_map(|r| if let Record::SessionEnd(r) = r { Some(r) } else { None })
            .collect()
    }

    pub fn losses(&self) -> Vec<&Loss> {
        self.records.iter().filter_map(|r| if let Record::Loss(r) = r { Some(r) } else { None }).collect()
    }

    pub fn fills(&self) -> Vec<&PreparedFill<'static>> {
        self.records
            .iter()
            .filter_map(|r| if let Record::PreparedFill(r) = r { Some(r) } else { None })
            .collect()
    }

    pub fn frontends(&self, session: SessionId) -> Vec<&Frontend<'static>> {
        let of = |r: &'_ Record<'static>| matches!(r, Record::Frontend(f) if f.session == session);
        self.records
            .iter()
            .filter(|r| of(r))
            .filter_map(|r| if let Record::Frontend(f) = r { Some(f) } else { None })
            .collect()
    }

    pub fn backends(&self, session: SessionId) -> Vec<&Backend<'static>> {
        self.records
            .iter()
            .filter_map(|r| if let Record::Backend(b) = r { Some(b) } else { None })
            .filter(|b| b.session == session)
            .collect()
    }

    /// The session of an `application_name`.
    pub fn session(&self, application_name: &str) -> SessionId {
        let named: Vec<_> = self
            .starts()
            .iter()
            .filter(|s| s.application_name.as_deref() == Some(application_name.as_bytes()))
            .map(|s| s.session)
            .collect();
        assert_eq!(named.len(), 1, "sessions of {application_name}: {:?}", self.starts());
        named[0]
    }

    /// Everything that its client sent after the login.
    pub fn sent(&self, session: SessionId) -> Vec<u8> {
        self.frontends(session).iter().flat_map(|f| f.message.to_vec()).collect()
    }

    pub fn responses(&self, session: SessionId) -> Vec<&Response<'static>> {
        self.records
            .iter()
            .filter_map(|r| if let Record::Response(r) = r { Some(r) } else { None })
            .filter(|r| r.session == session)
            .collect()
    }

    /// Tag or SQLSTATE and rows of each response.
    pub fn outcomes(&self, session: SessionId) -> Vec<(String, u64)> {
        self.responses(session).iter().map(|r| (told(&r.outcome), r.rows)).collect()
    }

    /// The totals of all sessions that have ended add up and agree with the kernel's; nothing is missing.
    pub fn assert_lossless(&self) {
        self.assert_lacks(&[]);
    }

    /// The same, but for what its summary says is missing.
    pub fn assert_lacks(&self, what: &[&str]) {
        assert_eq!(self.summary.shortcomings(), what, "{:?} {:?}", self.summary, self.losses());
        for end in self.ends() {
            assert!(end.frontend.add_up() && end.backend.add_up(), "{end:?}");
        }
    }
}

fn told(outcome: &Outcome<'_>) -> String {
    match outcome {
        Outcome::Complete { tag } => String::from_utf8_lossy(tag).into_owned(),
        Outcome::Error(error) => String::from_utf8_lossy(&error.sqlstate).into_owned(),
        other => format!("{other:?}"),
    }
}

/// What the trace says that it lacks of a session: what was lost, and the beginning of a message when all behind it was.
pub fn lacking(trace: &Trace, session: SessionId, direction: Direction) -> Vec<(u64, u64)> {
    let is_lost = |loss: &&&Loss| loss.session == Some(session) && loss.direction == direction;
    let losses = trace.losses();
    let mut all: Vec<_> = losses.iter().filter(is_lost).map(|loss| (loss.offset, loss.len)).collect();
    for record in &trace.records {
        let Record::Withheld(w) = record else { continue };
        if (w.session, w.direction, w.reason) == (session, direction, WithheldReason::Incomplete) {
            let end = w.offset + w.len;
            assert!(all.iter().any(|&(from, _)| from == end), "no loss at {end}, where a message breaks off");
            all.push((w.offset, w.len));
        }
    }
    all
}

/// Pieces of a stream, by offset and length, are all of it between two offsets, once.
pub fn assert_tiles(mut parts: Vec<(u64, u64)>, from: u64, to: u64) {
    parts.sort_unstable();
    let mut next = from;
    for (offset, len) in parts {
        assert_eq!(offset, next, "a gap or an overlap");
        next += len;
    }
    assert_eq!(next, to);
}

/// Waits until a condition holds.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        thread::sleep(Duration::from_millis(20));
    }
}
