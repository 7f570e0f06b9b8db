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
    SessionId, Transport, Writer,
};

use super::{Begin, EVENT_BYTES, Event, Joined, Recording, Statement, clock, now_ns};
use crate::shared::lock;

/// Between two looks into an empty queue. Workers that had to wake the thread would pay a system call for each chunk.
const POLL: Duration = Duration::from_millis(5);
/// Between two reports of the accounts; what is older than this is in the file.
const REPORT: Duration = Duration::from_secs(1);
/// Between two pairs of clocks in the trace.
const CLOCK: Duration = Duration::from_secs(30);

/// A session's machine, and how far its streams have come.
struct Session {
    machine: Postgres,
    origin: Origin,
    frontend: u64,
    backend: u64,
}

impl Session {
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
}

/// Where records go, and what has to be known of earlier ones.
struct Out {
    recording: Arc<Recording>,
    /// `None` when the trace has ended by itself.
    writer: Option<Writer>,
    /// Sessions by the process ID that their clients were told, for cancel requests.
    by_pid: HashMap<u32, SessionId>,
    /// What sessions that were joined had prepared before; written behind their starts.
    prepared: HashMap<SessionId, Vec<Statement>>,
}

impl Out {
    fn write(&mut self, record: &Record<'_>) {
        let Some(writer) = &mut self.writer else { return };
        let Err(error) = writer.write(record) else { return };
        let why = match &error {
            Error::Stopped(stopped) => stopped.to_string(),
            error => error.to_string(),
        };
        log::error!("the recording into {} has ended: {why}", self.recording.directory.display());
        *lock(&self.recording.why) = Some(why);
        self.recording.is_over.store(true, Ordering::Relaxed);
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

    fn counters(&mut self) {
        let counts = &self.recording.counts;
        let count = |events: &std::sync::atomic::AtomicU64, bytes: &std::sync::atomic::AtomicU64| Count {
            events: events.load(Ordering::Relaxed),
            bytes: bytes.load(Ordering::Relaxed),
        };
        // What was lost first: seen is never less.
        let lost = count(&counts.lost_chunks, &counts.lost_bytes);
        let seen = count(&counts.seen_chunks, &counts.seen_bytes);
        let recorded = Count {
            events: seen.events.saturating_sub(lost.events),
            bytes: seen.bytes.saturating_sub(lost.bytes),
        };
        let filtered = Count::default();
        self.write(&Record::Counters(Counters { time_ns: now_ns(), seen, recorded, lost, filtered }));
    }
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
                for statement in self.prepared.remove(&session).unwrap_or_default() {
                    self.write(&Record::PreparedFill(PreparedFill {
                        session,
                        time_ns,
                        name: statement.name.into(),
                        query: statement.query.into(),
                        param_types: statement.param_types,
                        redaction: Redaction::None,
                    }));
                }
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
}

impl Writing {
    pub fn new(recording: Arc<Recording>, writer: Writer) -> Self {
        let out = Out { recording, writer: Some(writer), by_pid: HashMap::new(), prepared: HashMap::new() };
        Self { out, sessions: HashMap::new() }
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
        self.out.recording.is_over.store(true, Ordering::Relaxed);
        let now_ns = now_ns();
        let mut sessions: Vec<_> = self.sessions.drain().collect();
        sessions.sort_by_key(|(session, _)| *session);
        for (_, mut session) in sessions {
            session.machine.end(now_ns, EndReason::RecordingEnded, Audit::default(), &mut self.out);
        }
        self.out.counters();
        self.out.finish();
    }

    fn report(&mut self) {
        self.out.counters();
        let Some(writer) = &mut self.out.writer else { return };
        let flushed = writer.flush();
        let stats = writer.stats();
        self.out.show(stats.records, stats.file_bytes);
        if let Err(error) = flushed {
            log::debug!("{}: {error}", self.out.recording.directory.display());
        }
    }

    fn event(&mut self, event: Event) {
        let Self { out, sessions } = self;
        match event {
            Event::Begin(begin) => {
                let Begin { origin, joined } = *begin;
                let mut machine = Postgres::new(origin);
                if let Some(Joined { known, statements }) = joined {
                    machine.joined(known);
                    out.prepared.insert(origin.session, statements);
                }
                sessions.insert(origin.session, Session { machine, origin, frontend: 0, backend: 0 });
            }
            Event::Encrypted(session) => {
                let Some(session) = sessions.get_mut(&session) else { return };
                let origin = Origin { transport: Transport::Tls, ..session.origin };
                *session = Session { machine: Postgres::new(origin), origin, frontend: 0, backend: 0 };
            }
            Event::Bytes { session, direction, time_ns, at, bytes } => {
                if let Some(session) = sessions.get_mut(&session) {
                    session.bytes(direction, at, time_ns, &bytes, out);
                }
                out.recording.release(EVENT_BYTES + bytes.len());
            }
            Event::Forget(session) => {
                sessions.remove(&session);
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
                out.prepared.remove(&session);
                ended.machine.end(time_ns, reason, audit, out);
                out.recording.release(EVENT_BYTES);
            }
            Event::Server(server) => out.write(&Record::Server(*server)),
            Event::Stop => {}
        }
    }
}
