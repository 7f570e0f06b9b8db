// SPDX-License-Identifier: Apache-2.0
//! Recording: what clients say and are answered becomes a trace (`trace_dir`), the same that `underpass trace` writes.
//!
//! A client's [`Transport`](crate::transport::Transport) has a [`Tap`], which copies the bytes into a queue. A thread of its own
//! ([`writer`]) lets the protocol's machine read them and writes records. No worker ever waits for it: what the queue has no room for is
//! left out, and because every chunk carries its position in its stream, the thread records exactly which bytes that were.

mod servers;
mod tap;
mod writer;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use anyhow::Context as _;
use arc_swap::ArcSwapOption;
use rustix::time::{ClockId, clock_gettime};
use underpass_config::{Config, TraceLevel};
use underpass_console::rows::TraceRow;
use underpass_console::{Show, Table};
use underpass_pool::prepared::Statement;
use underpass_trace::assemble::{Known, Origin};
use underpass_trace::{
    Clock, Count, Direction, EndReason, Level, Masker, Meta, Options, Server, ServerIdentity, SessionId,
    Source, Transport, Writer,
};

pub(crate) use servers::Identity;
use servers::Servers;
pub(crate) use tap::Tap;

use crate::lanes::monotonic_ns as now_ns;
use crate::shared::lock;

/// What an event takes in memory besides its bytes, about.
const EVENT_BYTES: usize = 128;

/// What workers tell the thread that writes.
enum Event {
    /// A client has connected, or one that was there before is recorded from now on.
    Begin(Box<Begin>),
    /// Its streams begin anew, inside TLS.
    Encrypted(SessionId),
    /// Bytes of a stream. Whatever lies between them and the last ones found no room.
    Bytes { session: SessionId, direction: Direction, time_ns: u64, at: u64, bytes: Box<[u8]> },
    /// It is nobody's workload: the console.
    Forget(SessionId),
    /// It has gone; how long its streams were.
    End { session: SessionId, time_ns: u64, reason: EndReason, frontend: u64, backend: u64 },
    /// Who the server of a database is.
    Server(Box<ServerIdentity<'static>>),
    /// Recording ends.
    Stop,
}

/// A session's beginning.
struct Begin {
    origin: Origin,
    joined: Option<Joined>,
    /// What its statements take of the queue's room until they are written.
    statements_bytes: usize,
}

/// What is known of a session that began before its recording.
#[derive(Debug, Default)]
pub(crate) struct Joined {
    pub known: Known,
    pub is_tls: bool,
    pub statements: Vec<Prepared>,
}

/// What a client has prepared.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub name: Box<[u8]>,
    pub body: Body,
}

/// What is behind the name in a Parse. Texts of named statements are shared with the clients: a thousand of them may have the same.
#[derive(Debug)]
pub(crate) enum Body {
    Shared(Arc<Statement>),
    Own(Box<[u8]>),
}

impl Prepared {
    /// What is here of it alone, in bytes.
    fn cost(&self) -> usize {
        let own = match &self.body {
            Body::Shared(_) => 0,
            Body::Own(body) => body.len(),
        };
        size_of::<Self>() + self.name.len() + own
    }
}

/// What of the configuration a recording depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Wanted {
    parent: PathBuf,
    level: TraceLevel,
    mask: Mask,
    queue_bytes: usize,
    max_bytes: Option<u64>,
}

/// How literals and bind values are recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Mask {
    AsTheyAre,
    /// Masked with a key that nobody knows.
    Random,
    /// Masked with the key in this file.
    Key(PathBuf),
}

impl Mask {
    fn masker(&self) -> anyhow::Result<Option<Masker>> {
        Ok(match self {
            Self::AsTheyAre => None,
            Self::Random => Some(Masker::random().context("no random key for trace_mask")?),
            Self::Key(path) => Some(Masker::read(path)?),
        })
    }
}

impl Wanted {
    fn level(&self) -> Level {
        match self.level {
            TraceLevel::None => Level::None,
            TraceLevel::Summary => Level::Summary,
            TraceLevel::Full => Level::Full,
        }
    }

    fn of(config: &Config) -> Option<Self> {
        let keys = &config.underpass;
        let named = |path: &Option<PathBuf>| path.clone().filter(|path| !path.as_os_str().is_empty());
        let parent = named(&keys.trace_dir)?;
        let mask = match named(&keys.trace_mask_key) {
            Some(path) => Mask::Key(path),
            None if keys.trace_mask => Mask::Random,
            None => Mask::AsTheyAre,
        };
        let queue_bytes = usize::try_from(keys.trace_queue_bytes).unwrap_or(usize::MAX);
        let max_bytes = Some(keys.trace_max_bytes).filter(|&max| max > 0);
        Some(Self { parent, level: keys.trace_level, mask, queue_bytes, max_bytes })
    }
}

/// What SHOW TRACE tells. Written by workers (`taken`, `lost`, `missed`) and the writing thread. What was seen is what was taken and what was lost.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Sessions in the trace.
    pub sessions: AtomicU64,
    /// Connections that are not in it as a whole, because the queue had no room for their beginning.
    pub missed: AtomicU64,
    pub records: AtomicU64,
    pub file_bytes: AtomicU64,
    /// What the queue took.
    taken: Tally,
    /// What it had no room for.
    lost: Tally,
    /// What it took, and still held when the trace ended before its time.
    dropped: Tally,
}

/// Chunks, and their bytes.
#[derive(Debug, Default)]
struct Tally {
    events: AtomicU64,
    bytes: AtomicU64,
}

impl Tally {
    fn add(&self, count: Count) {
        self.events.fetch_add(count.events, Ordering::Relaxed);
        self.bytes.fetch_add(count.bytes, Ordering::Relaxed);
    }

    fn get(&self) -> Count {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Count { events: value(&self.events), bytes: value(&self.bytes) }
    }
}

/// How a recording has ended by itself.
#[derive(Debug, Clone)]
struct Ended {
    why: String,
    /// Something was wrong; else it reached its limit.
    is_failure: bool,
}

/// Which recordings that have ended by themselves begin anew although the configuration wants the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Anew {
    None,
    /// RELOAD, as after what was wrong has been put right. One that has reached `trace_max_bytes` has all that it was to have.
    Failed,
    /// `trace_dir` was SET to what it is.
    All,
}

/// One recording: a directory, a queue and a thread.
pub(crate) struct Recording {
    wanted: Wanted,
    pub directory: PathBuf,
    queue: Sender<Event>,
    /// Memory that the queue takes, bytes.
    held: AtomicUsize,
    /// What of it is what joined sessions have prepared, until they speak: at most half, so that it does not keep out what the others say.
    held_by_names: AtomicUsize,
    next_session: AtomicU64,
    /// The trace takes no more.
    is_over: AtomicBool,
    /// If nobody asked for it. Set before `is_over`.
    ended: Mutex<Option<Ended>>,
    /// Pools have not been told that it has ended by itself.
    is_end_untold: AtomicBool,
    pub counts: Counts,
    servers: Mutex<Servers>,
}

impl Recording {
    fn new(wanted: Wanted, directory: PathBuf, queue: Sender<Event>) -> Self {
        Self {
            wanted,
            directory,
            queue,
            held: AtomicUsize::new(0),
            held_by_names: AtomicUsize::new(0),
            next_session: AtomicU64::new(1),
            is_over: AtomicBool::new(false),
            ended: Mutex::default(),
            is_end_untold: AtomicBool::new(false),
            counts: Counts::default(),
            servers: Mutex::default(),
        }
    }

    fn start(wanted: Wanted, config: &Config) -> anyhow::Result<(Arc<Self>, JoinHandle<()>)> {
        let masker = wanted.mask.masker()?;
        let directory = new_directory(&wanted.parent)?;
        let options = Options { max_bytes: wanted.max_bytes, masker, ..Options::default() };
        let writer = Writer::create(&directory, &meta(&wanted, config), options)?;
        let (queue, incoming) = channel();
        let recording = Arc::new(Self::new(wanted, directory, queue));
        let thread = std::thread::Builder::new().name("trace".into());
        let writing = writer::Writing::new(recording.clone(), writer);
        let watched = Watched(recording.clone());
        let write = move || {
            let _watched = watched;
            writing.run(&incoming);
        };
        let thread = thread.spawn(write).context("cannot start a thread")?;
        Ok((recording, thread))
    }

    /// Records a client from now on: from its first byte, or `joined` where it is. `None` if there is no room.
    pub fn tap(self: &Arc<Self>, peer: Option<SocketAddr>, joined: Option<Joined>) -> Option<Box<Tap>> {
        if self.is_over() {
            return None;
        }
        let session = SessionId(self.next_session.fetch_add(1, Ordering::Relaxed));
        let transport = match peer {
            _ if joined.as_ref().is_some_and(|joined| joined.is_tls) => Transport::Tls,
            Some(_) => Transport::Tcp,
            None => Transport::Unix,
        };
        let level = self.wanted.level();
        let origin = Origin { session, source: Source::Pooler, transport, peer, level };
        let statements = joined.iter().flat_map(|joined| &joined.statements);
        let statements_bytes = statements.map(Prepared::cost).sum();
        // Workers that look at the same time may go over it by what one client has prepared.
        let of_names = self.held_by_names.load(Ordering::Relaxed) + statements_bytes;
        let room = if of_names <= self.wanted.queue_bytes / 2 {
            self.reserve_to_post(EVENT_BYTES + statements_bytes)
        } else {
            Room::None
        };
        match room {
            Room::Taken => {}
            Room::None => {
                self.counts.missed.fetch_add(1, Ordering::Relaxed);
                return None;
            }
            Room::Over => return None,
        }
        self.held_by_names.fetch_add(statements_bytes, Ordering::Relaxed);
        self.post(Event::Begin(Box::new(Begin { origin, joined, statements_bytes })));
        Some(Box::new(Tap::new(self.clone(), session)))
    }

    /// Takes room in the queue; false if there is none.
    fn reserve(&self, bytes: usize) -> bool {
        let max = self.wanted.queue_bytes;
        let add = |held: usize| held.checked_add(bytes).filter(|&held| held <= max);
        self.held.fetch_update(Ordering::SeqCst, Ordering::Relaxed, add).is_ok()
    }

    /// The same for who posts then. Of reserving and looking, and ending and counting what is reserved, one sees the other: nobody posts
    /// behind the back of a writer that has seen the last of what is held.
    fn reserve_to_post(&self, bytes: usize) -> Room {
        if !self.reserve(bytes) {
            return Room::None;
        }
        if self.is_over.load(Ordering::SeqCst) {
            self.release(bytes);
            return Room::Over;
        }
        Room::Taken
    }

    /// What was reserved is free again.
    fn release(&self, bytes: usize) {
        self.held.fetch_sub(bytes, Ordering::SeqCst);
    }

    /// Taps stop, for this reason if nobody asked for it.
    fn end(&self, ended: Option<Ended>) {
        let is_untold = ended.is_some();
        if is_untold {
            *lock(&self.ended) = ended;
        }
        self.is_over.store(true, Ordering::SeqCst);
        self.is_end_untold.store(is_untold, Ordering::Release);
    }

    /// Nobody sleeps in the receiver, so this wakes nobody.
    fn post(&self, event: Event) {
        // Without a receiver the trace has ended; its taps see `is_over`.
        let _ = self.queue.send(event);
    }

    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }
}

/// Whether there was room in the queue.
enum Room {
    Taken,
    None,
    /// The trace takes no more.
    Over,
}

/// Ends a recording whose thread panics.
struct Watched(Arc<Recording>);

impl Drop for Watched {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let why = "the thread that writes it has failed, which is a bug".to_owned();
            log::error!("the recording into {} has ended: {why}", self.0.directory.display());
            self.0.end(Some(Ended { why, is_failure: true }));
        }
    }
}

/// The recording of the process, if it has one.
#[derive(Default)]
pub(crate) struct Recordings {
    current: ArcSwapOption<Recording>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Recordings {
    /// The recording, also one that has ended by itself.
    pub fn current(&self) -> Option<Arc<Recording>> {
        self.current.load_full()
    }

    /// Whether clients are recorded now.
    pub fn is_on(&self) -> bool {
        self.current.load().as_ref().is_some_and(|recording| !recording.is_over())
    }

    /// Whether there is one that has ended by itself.
    pub fn has_ended(&self) -> bool {
        self.current.load().as_ref().is_some_and(|recording| recording.is_over())
    }

    /// Whether it has ended by itself since this was asked last: it keeps nobody out of the kernel lanes any more.
    pub fn has_just_ended(&self) -> bool {
        let current = self.current.load();
        current.as_ref().is_some_and(|recording| recording.is_end_untold.swap(false, Ordering::AcqRel))
    }

    /// Begins and ends recordings, as the configuration wants. What cannot be begun is said in the log; clients do not suffer from it.
    pub fn configure(&self, config: &Config, anew: Anew) {
        let wanted = Wanted::of(config);
        let begins_anew = |recording: &Recording| match (anew, &*lock(&recording.ended)) {
            (Anew::None, _) | (_, None) => false,
            (Anew::Failed, Some(ended)) => ended.is_failure,
            (Anew::All, Some(_)) => true,
        };
        let is_same = match (&*self.current.load(), &wanted) {
            (Some(recording), Some(wanted)) => recording.wanted == *wanted && !begins_anew(recording),
            (None, None) => true,
            _ => false,
        };
        if is_same {
            return;
        }
        self.stop();
        let Some(wanted) = wanted else { return };
        match Recording::start(wanted, config) {
            Ok((recording, thread)) => {
                log::info!("recording into {}", recording.directory.display());
                lock(&self.threads).push(thread);
                self.current.store(Some(recording));
            }
            Err(error) => log::error!("trace_dir: nothing is recorded: {error:#}; correct it and RELOAD"),
        }
    }

    /// SHOW TRACE.
    pub fn table(&self) -> Table {
        let mut table = Table::new(Show::Trace.columns());
        if let Some(recording) = self.current() {
            let (counts, ended) = (&recording.counts, lock(&recording.ended).clone());
            let bytes = |tally: &Tally| tally.get().bytes;
            let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            table.push(&TraceRow {
                directory: &recording.directory.display().to_string(),
                state: if recording.is_over() { "ended" } else { "on" },
                reason: ended.as_ref().map(|ended| &*ended.why),
                level: recording.wanted.level.as_str(),
                sessions: value(&counts.sessions),
                missed: value(&counts.missed),
                records: value(&counts.records),
                file_bytes: value(&counts.file_bytes),
                queued_bytes: recording.held.load(Ordering::Relaxed) as u64,
                seen_bytes: bytes(&counts.taken) + bytes(&counts.lost),
                lost_bytes: bytes(&counts.lost) + bytes(&counts.dropped),
            });
        }
        table
    }

    fn stop(&self) {
        if let Some(recording) = self.current.swap(None) {
            // One that has ended by itself keeps its reason.
            recording.end(None);
            recording.post(Event::Stop);
        }
    }

    /// Ends the recording and waits until all of it is written. For the end of the process.
    pub fn finish(&self) {
        self.stop();
        for thread in std::mem::take(&mut *lock(&self.threads)) {
            // One that panicked has said so.
            let _ = thread.join();
        }
    }
}

/// A name that is free in `parent`: the time, and a number if that is taken.
fn new_directory(parent: &Path) -> anyhow::Result<PathBuf> {
    anyhow::ensure!(parent.is_dir(), "{}: no such directory", parent.display());
    let stamp = jiff::Timestamp::now().strftime("%Y%m%d-%H%M%S").to_string();
    let numbered = (2..1000).map(|number| parent.join(format!("{stamp}-{number}")));
    std::iter::once(parent.join(&stamp))
        .chain(numbered)
        .find(|path| !path.exists())
        .with_context(|| format!("{}: every name is taken", parent.display()))
}

fn meta(wanted: &Wanted, config: &Config) -> Meta {
    let uname = rustix::system::uname();
    let listens = config.listen_addr.iter().map(|address| format!("{address}:{}", config.listen_port));
    Meta {
        level: wanted.level(),
        started: clock(),
        host: uname.nodename().to_string_lossy().into_owned(),
        kernel: uname.release().to_string_lossy().into_owned(),
        server: Server { addresses: listens.collect(), pid: Some(std::process::id()), ..Server::default() },
        sources: vec!["pooler".to_owned()],
        ..Meta::default()
    }
}

fn clock() -> Clock {
    let now = clock_gettime(ClockId::Realtime);
    Clock { monotonic_ns: now_ns(), realtime_ns: now.tv_sec * 1_000_000_000 + now.tv_nsec }
}
