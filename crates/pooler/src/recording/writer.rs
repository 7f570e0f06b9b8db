// SPDX-License-Identifier: Apache-2.0
//! The thread that makes a trace of what taps have copied.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use foldhash::{HashMap, HashMapExt as _};
use underpass_trace::assemble::{Assemble as _, Audit, Origin, Piece, Postgres, Sink};
use underpass_trace::{
    Cancel, Count, Counters, Direction, EndReason, Error, LossReason, PreparedFill, Record, Redaction,
    SessionId, Stopped, Transport, Writer,
};
use underpass_wire::frontend::Parse;

use super::{Begin, Body, EVENT_BYTES, Ended, Event, Joined, Prepared, Recording, clock, now_ns};

/// Between two looks into an empty queue. Workers that had to wake the thread would pay a system call for each chunk.
const POLL: Duration = Duration::from_millis(5);
/// Between two reports of the accounts; what is older than this is in the file.
const REPORT: Duration = Duration::from_secs(1);
/// Between two pairs of clocks in the trace.
const CLOCK: Duration = Duration::from_secs(30);
/// Longest wait for a worker between the room that it takes in the queue and what it puts there.
const DRAIN_MAX: Duration = Duration::from_secs(1);

/// A session's machine, and how far its streams have come.
struct Session {
    machine: Postgres,
    origin: Origin,
    frontend: u64,
    backend: u64,
    /// What has come while nothing of the session is in the trace.
    undecided: Count,
}

impl Session {
    fn new(machine: Postgres, origin: Origin) -> Self {
        Self { machine, origin, frontend: 0, backend: 0, undecided: Count::default() }
    }

    /// Moves a stream to position `at`: what is before it and did not come was left out.
    fn catch_up(&mut self, direction: Direction, at: u64, time_ns: u64, sink: &mut dyn Sink) {
        let next = match direction {
            Direction::Frontend => &mut self.frontend,
            Direction::Backend => &mut self.backend,
        };
        let missing = at.saturating_sub(*next);
        *next = at.max(*next);
        self.machine.piece(direction, time_ns, Piece::Lost(missing, LossReason::WriterQueue), sink);
    }

    fn bytes(&mut self, direction: Direction, at: u64, time_ns: u64, bytes: &[u8], sink: &mut dyn Sink) {
        self.catch_up(direction, at, time_ns, sink);
        match direction {
            Direction::Frontend => self.frontend += bytes.len() as u64,
            Direction::Backend => self.backend += bytes.len() as u64,
        }
        self.machine.piece(direction, time_ns, Piece::Bytes(bytes), sink);
    }

    /// Counts what has come as recorded once the session is in the trace.
    fn decide(&mut self, out: &mut Out) {
        if self.machine.has_records() {
            out.account(std::mem::take(&mut self.undecided), true);
        }
    }

    /// The same at its end, or at that of its plain text: what has made no session is none of the trace's.
    fn decide_at_end(&mut self, out: &mut Out) {
        let is_recorded = self.machine.has_records();
        out.account(std::mem::take(&mut self.undecided), is_recorded);
    }
}

/// Where records go, and what has to be known of earlier ones.
struct Out {
    recording: Arc<Recording>,
    /// `None` when the trace has ended by itself.
    writer: Option<Writer>,
    /// Sessions by the process ID that their clients were told, for cancel requests.
    by_pid: HashMap<u32, SessionId>,
    /// What sessions that were joined had prepared before, and the room it takes; written behind their starts.
    prepared: HashMap<SessionId, (Vec<Prepared>, usize)>,
    /// Where the bytes of chunks that have come are: the trace, or nowhere because they are none of its sessions.
    recorded: Count,
    filtered: Count,
}

impl Out {
    fn account(&mut self, count: Count, is_recorded: bool) {
        match (&self.writer, is_recorded) {
            (None, _) => self.recording.counts.dropped.add(count),
            (Some(_), true) => add(&mut self.recorded, count),
            (Some(_), false) => add(&mut self.filtered, count),
        }
    }

    fn write(&mut self, record: &Record<'_>) {
        let Some(writer) = &mut self.writer else { return };
        let Err(error) = writer.write(record) else { return };
        let why = match &error {
            Error::Stopped(stopped) => stopped.to_string(),
            error => error.to_string(),
        };
        log::error!("the recording into {} has ended: {why}", self.recording.directory.display());
        let is_failure = !matches!(error, Error::Stopped(Stopped::SizeLimit));
        self.recording.end(Some(Ended { why, is_failure }));
        self.finish();
    }

    fn finish(&mut self) {
        let Some(writer) = self.writer.take() else { return };
        let stats = writer.stats();
        match writer.finish() {
            Ok(stats) => self.show(stats.records, stats.file_bytes),
            Err(error) => {
                self.show(stats.records, stats.file_bytes);
                log::error!("the end of {} is missing: {error}", self.recording.directory.display());
            }
        }
    }

    fn show(&self, records: u64, file_bytes: u64) {
        let counts = &self.recording.counts;
        counts.records.store(records, Ordering::Relaxed);
        counts.file_bytes.store(file_bytes, Ordering::Relaxed);
    }

    /// `seen` is counted where bytes are taken or come out of the queue, the rest where they go: what a bug drops in between shows.
    fn counters(&mut self, taken: Count) {
        let (recorded, lost, filtered) = (self.recorded, self.recording.counts.lost.get(), self.filtered);
        let mut seen = taken;
        add(&mut seen, lost);
        self.write(&Record::Counters(Counters { time_ns: now_ns(), seen, recorded, lost, filtered }));
    }

    /// Writes what a session had prepared.
    fn fill(&mut self, session: SessionId, time_ns: u64) {
        for Prepared { name, body } in self.forget_prepared(session) {
            let body = match &body {
                Body::Shared(statement) => &statement.body,
                Body::Own(body) => body,
            };
            // A message has its name before it: here an empty one.
            let message = [b"\0", &body[..]].concat();
            let Ok(parse) = Parse::decode(&message) else { continue };
            self.write(&Record::PreparedFill(PreparedFill {
                session,
                time_ns,
                name: name.into_vec().into(),
                query: parse.query.into(),
                param_types: parse.param_types.collect(),
                redaction: Redaction::None,
            }));
        }
    }

    fn forget_prepared(&mut self, session: SessionId) -> Vec<Prepared> {
        let (statements, bytes) = self.prepared.remove(&session).unwrap_or_default();
        self.recording.held_by_names.fetch_sub(bytes, Ordering::Relaxed);
        self.recording.release(bytes);
        statements
    }
}

fn add(sum: &mut Count, count: Count) {
    sum.events += count.events;
    sum.bytes += count.bytes;
}

impl Sink for Out {
    fn record(&mut self, record: Record<'_>) {
        match record {
            Record::SessionStart(ref start) => {
                let (session, time_ns) = (start.session, start.time_ns);
                self.recording.counts.sessions.fetch_add(1, Ordering::Relaxed);
                if let Some(pid) = start.backend_pid {
                    self.by_pid.insert(pid, session);
                }
                self.write(&record);
                self.fill(session, time_ns);
            }
            Record::Cancel(cancel) => {
                let session = self.by_pid.get(&cancel.backend_pid).copied();
                self.write(&Record::Cancel(Cancel { session, ..cancel }));
            }
            record => self.write(&record),
        }
    }
}

/// A recording at work.
pub(super) struct Writing {
    out: Out,
    sessions: HashMap<SessionId, Session>,
    /// Chunks that came out of the queue.
    arrived: Count,
}

impl Writing {
    pub fn new(recording: Arc<Recording>, writer: Writer) -> Self {
        let out = Out {
            recording,
            writer: Some(writer),
            by_pid: HashMap::new(),
            prepared: HashMap::new(),
            recorded: Count::default(),
            filtered: Count::default(),
        };
        Self { out, sessions: HashMap::new(), arrived: Count::default() }
    }

    /// Until it is told to stop, or nothing can be written any more.
    pub fn run(mut self, incoming: &Receiver<Event>) {
        let (mut reported, mut clocked) = (Instant::now(), Instant::now());
        while self.out.writer.is_some() {
            match incoming.try_recv() {
                Ok(Event::Stop) | Err(TryRecvError::Disconnected) => break,
                Ok(event) => self.event(event),
                Err(TryRecvError::Empty) => std::thread::sleep(POLL),
            }
            // Looking at the clock costs less than what an event costs.
            if reported.elapsed() >= REPORT {
                reported = Instant::now();
                self.report();
            }
            if clocked.elapsed() >= CLOCK {
                clocked = Instant::now();
                self.out.write(&Record::Clock(clock()));
            }
        }
        // Whoever asked for its end has done so, too.
        self.out.recording.is_over.store(true, Ordering::SeqCst);
        self.drain(incoming);
        let now_ns = now_ns();
        let mut sessions: Vec<_> = self.sessions.drain().collect();
        sessions.sort_by_key(|(session, _)| *session);
        for (id, mut session) in sessions {
            session.machine.end(now_ns, EndReason::RecordingEnded, Audit::default(), &mut self.out);
            session.decide_at_end(&mut self.out);
            self.out.forget_prepared(id);
            self.out.recording.release(EVENT_BYTES);
        }
        self.out.counters(self.out.recording.counts.taken.get());
        self.out.finish();
    }

    /// Takes what taps have reserved room for before they saw that it is over.
    fn drain(&mut self, incoming: &Receiver<Event>) {
        let mut deadline = None;
        loop {
            while let Ok(event) = incoming.try_recv() {
                self.event(event);
            }
            // What there was took its time; now somebody may be about to post.
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + DRAIN_MAX);
            let prepared: usize = self.out.prepared.values().map(|(_, bytes)| bytes).sum();
            let rest = self.sessions.len() * EVENT_BYTES + prepared;
            let held = self.out.recording.held.load(Ordering::SeqCst);
            if held <= rest || Instant::now() > deadline {
                return;
            }
            std::thread::sleep(POLL);
        }
    }

    fn report(&mut self) {
        // What nobody knows yet where it belongs has not been seen.
        let mut decided = self.arrived;
        for session in self.sessions.values() {
            decided.events -= session.undecided.events;
            decided.bytes -= session.undecided.bytes;
        }
        self.out.counters(decided);
        let Some(writer) = &mut self.out.writer else { return };
        let flushed = writer.flush();
        let stats = writer.stats();
        self.out.show(stats.records, stats.file_bytes);
        if let Err(error) = flushed {
            log::debug!("{}: {error}", self.out.recording.directory.display());
        }
    }

    fn event(&mut self, event: Event) {
        let Self { out, sessions, arrived } = self;
        match event {
            Event::Begin(begin) => {
                let Begin { origin, joined, statements_bytes } = *begin;
                let mut machine = Postgres::new(origin);
                if let Some(Joined { known, statements, .. }) = joined {
                    machine.joined(known);
                    out.prepared.insert(origin.session, (statements, statements_bytes));
                }
                sessions.insert(origin.session, Session::new(machine, origin));
            }
            Event::Encrypted(session) => {
                let Some(session) = sessions.get_mut(&session) else { return };
                session.decide_at_end(out);
                let origin = Origin { transport: Transport::Tls, ..session.origin };
                *session = Session::new(Postgres::new(origin), origin);
            }
            Event::Bytes { session, direction, time_ns, at, bytes } => {
                let count = Count { events: 1, bytes: bytes.len() as u64 };
                add(arrived, count);
                if let Some(session) = sessions.get_mut(&session) {
                    session.bytes(direction, at, time_ns, &bytes, out);
                    add(&mut session.undecided, count);
                    session.decide(out);
                }
                out.recording.release(EVENT_BYTES + bytes.len());
            }
            Event::Forget(session) => {
                if let Some(mut session) = sessions.remove(&session) {
                    session.decide_at_end(out);
                }
                out.forget_prepared(session);
                out.recording.release(EVENT_BYTES);
            }
            Event::End { session, time_ns, reason, frontend, backend } => {
                let Some(mut ended) = sessions.remove(&session) else { return };
                ended.catch_up(Direction::Frontend, frontend, time_ns, out);
                ended.catch_up(Direction::Backend, backend, time_ns, out);
                let audit = Audit { frontend: Some(frontend), backend: Some(backend), is_own: false };
                if let Some(pid) = ended.machine.backend_pid()
                    && out.by_pid.get(&pid) == Some(&session)
                {
                    out.by_pid.remove(&pid);
                }
                out.forget_prepared(session);
                ended.machine.end(time_ns, reason, audit, out);
                ended.decide_at_end(out);
                out.recording.release(EVENT_BYTES);
            }
            Event::Server(server) => out.write(&Record::Server(*server)),
            Event::Stop => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use underpass_trace::{Meta, Options, Reader};

    use super::*;
    use crate::recording::{Mask, Wanted, Watched};

    /// A recording whose thread does not run yet, and its end of the queue.
    fn recording(max_bytes: Option<u64>) -> (tempfile::TempDir, Writing, Receiver<Event>) {
        let directory = tempfile::tempdir().expect("a directory");
        let wanted = Wanted {
            parent: directory.path().into(),
            level: underpass_config::TraceLevel::Full,
            mask: Mask::AsTheyAre,
            queue_bytes: 1 << 24,
            max_bytes,
        };
        let options = Options { max_bytes, block_bytes: 4096, ..Options::default() };
        let writer = Writer::create(&directory.path().join("t"), &Meta::default(), options).expect("a trace");
        let (queue, incoming) = channel();
        let recording = Arc::new(Recording::new(wanted, directory.path().join("t"), queue));
        (directory, Writing::new(recording, writer), incoming)
    }

    fn records(directory: &tempfile::TempDir) -> Vec<Record<'static>> {
        let mut reader = Reader::open(&directory.path().join("t")).expect("a trace");
        let mut records = Vec::new();
        while let Some(record) = reader.next().expect("a record") {
            records.push(record.into_owned());
        }
        records
    }

    const QUERY: &[u8] = b"Q\0\0\0\x0dselect 1\0";

    #[test]
    fn what_is_behind_the_request_to_end_is_recorded_and_the_rest_filtered() {
        let (directory, writing, incoming) = recording(None);
        let recording = writing.out.recording.clone();
        let tap = || recording.tap(None, Some(Joined::default())).expect("room");
        let (mut session, mut console, mut silent) = (tap(), tap(), tap());
        session.copy(Direction::Frontend, 1, QUERY);
        console.copy(Direction::Frontend, 2, &QUERY[..9]);
        console.forget();
        silent.copy(Direction::Frontend, 3, &QUERY[..3]);
        // A worker that has taken its room when the end is asked for, and posts behind it.
        let late = EVENT_BYTES + QUERY.len();
        assert!(recording.reserve(late));
        recording.end(None);
        recording.post(Event::Stop);
        let count = Count { events: 1, bytes: QUERY.len() as u64 };
        let (worker, is_at_work) = (recording.clone(), SessionId(1));
        let posts = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(30));
            worker.counts.taken.add(count);
            let (direction, at) = (Direction::Frontend, count.bytes);
            let bytes = QUERY.into();
            worker.post(Event::Bytes { session: is_at_work, direction, time_ns: 4, at, bytes });
        });
        // It comes too late to be seen.
        session.copy(Direction::Frontend, 5, QUERY);
        drop((session, silent));
        writing.run(&incoming);
        posts.join().expect("it posts");

        let records = records(&directory);
        let queries = records.iter().filter(|record| matches!(record, Record::Frontend(_)));
        assert_eq!(queries.count(), 2);
        let lost = records.iter().any(|record| matches!(record, Record::Loss(_)));
        assert!(!lost, "what was not seen is no gap: {records:?}");
        let accounts = records.iter().rev().find_map(|record| match record {
            Record::Counters(counters) => Some(*counters),
            _ => None,
        });
        let Counters { seen, recorded, lost, filtered, .. } = accounts.expect("accounts");
        let (query, part) = (QUERY.len() as u64, 9 + 3);
        assert_eq!((seen.events, seen.bytes), (4, 2 * query + part));
        assert_eq!((recorded.events, recorded.bytes), (2, 2 * query));
        assert_eq!((filtered.events, filtered.bytes, lost.bytes), (2, part, 0));
        assert_eq!(recording.held.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn what_waits_when_the_trace_is_full_is_lost() {
        let (directory, writing, incoming) = recording(Some(8192));
        let recording = writing.out.recording.clone();
        let mut tap = recording.tap(None, Some(Joined::default())).expect("room");
        let mut seed = 1u32;
        let mut random = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            b'a' + (seed >> 24) as u8 % 26
        };
        for at in 0..100 {
            let mut query = b"Q\0\0\x03\xed".to_vec();
            query.extend((0..1000).map(|_| random()));
            query.push(0);
            tap.copy(Direction::Frontend, at, &query);
        }
        writing.run(&incoming);
        let (taken, lost) = (recording.counts.taken.get(), recording.counts.dropped.get());
        assert_eq!((taken.events, recording.counts.lost.get().events), (100, 0), "nothing is seen twice");
        assert!(lost.events > 50 && lost.bytes == lost.events * 1006, "{lost:?}");
        assert!(recording.is_over() && recording.held.load(Ordering::Relaxed) == 0);
        let ended = crate::shared::lock(&recording.ended).clone();
        assert!(ended.is_some_and(|ended| !ended.is_failure));
        assert!(!records(&directory).is_empty());
    }

    #[test]
    fn a_thread_that_panics_ends_its_recording() {
        let (_directory, writing, _incoming) = recording(None);
        let recording = writing.out.recording.clone();
        let watched = Watched(recording.clone());
        let thread = std::thread::spawn(move || {
            let _watched = watched;
            panic!("as a test wants");
        });
        assert!(thread.join().is_err());
        let ended = crate::shared::lock(&recording.ended).clone();
        assert!(recording.is_over() && ended.is_some_and(|ended| ended.is_failure));
        assert!(recording.tap(None, None).is_none());
    }
}
