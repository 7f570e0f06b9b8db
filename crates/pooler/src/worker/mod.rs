// SPDX-License-Identifier: Apache-2.0
//! A worker: a thread with an epoll instance that owns clients and the servers linked to them.
//!
//! Every socket is registered once, edge-triggered, for both directions. A handler therefore either uses readiness up (reads until a
//! read comes up short) or notes it (`readable`) and comes back when what kept it from reading has gone. Nothing here blocks; work
//! that may is given to other threads, whose answers come as tasks through the mailbox.

mod auth_query;
mod cancel;
pub(crate) mod console;
mod feed;
mod forward;
mod lane;
mod lifecycle;
mod listen;
pub(crate) mod login;
mod lookups;
pub(crate) mod mirror;
mod moving;
mod peer;
mod recording;
mod server_login;
mod stats;
mod suspend;
mod sweep;
mod upkeep;

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use foldhash::fast::RandomState;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::time::Timespec;
use underpass_pool::ServerId;
use underpass_sockmap::{Reason, ServerSlot};

use crate::client::Client;
use crate::lanes::USER_INTEREST;
use crate::mirrors::Compared;
use crate::server::Server;
use crate::shared::{Shared, Task};
use crate::table::{Key, Table};

pub(crate) use cancel::CancelConnection;
pub(crate) use listen::Listener;
pub(crate) use stats::{Meters, Observed, PoolMeter};

/// Bytes read at a time. A read that fills it is followed by another one.
const SCRATCH_BYTES: usize = 64 * 1024;
/// Reads of one socket in a row; then others have their turn.
const READS_PER_TURN: usize = 8;
/// How often timeouts are looked at.
const TICK: Duration = Duration::from_millis(100);
/// The peer has ended its stream. It is told once, possibly together with bytes that come before the end: whoever stops reading at a
/// short read must know that an end follows.
const GONE: EventFlags = EventFlags::RDHUP.union(EventFlags::HUP).union(EventFlags::ERR);
/// Events taken from epoll at a time.
const EVENTS_MAX: usize = 512;

/// What a token means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Bell,
    Listener,
    Client,
    Server,
    Cancel,
    Lanes,
    Taps,
    Tick,
}

/// A server's place at its home worker.
pub(crate) enum Entry {
    /// It works here.
    Here(Box<Server>),
    /// It is parked in the core, watched by this worker's epoll.
    Parked(ServerId),
}

/// Sockets whose noted readiness can be used now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Again {
    Client(Key),
    Server(Key),
    /// To be taken from a lane, which was busy.
    LaneClient(Key),
    LaneServer(ServerSlot, Option<Reason>),
    /// A server that was taken to be fed and was not, when a program was just running.
    Unfed(ServerSlot),
    /// A client that leaves, to which a lane has still something on its way.
    Farewell(Key),
    /// A server to which a lane had still something on its way when its transaction was over or its client left.
    Unclear(Key),
}

/// See the module documentation.
pub(crate) struct Worker {
    pub index: u16,
    pub shared: Arc<Shared>,
    pub clients: Table<Box<Client>>,
    pub servers: Table<Entry>,
    pub cancels: Table<CancelConnection>,
    /// Connections whose server's name is being asked for.
    lookups: Table<server_login::Plan>,
    listeners: Vec<Listener>,
    /// Whether it takes connections from them, or leaves them to the first worker (`acceptors.rs`).
    accepts: bool,
    /// Processor time of this thread at its last look at who accepts, and when that was.
    busy_until: (Duration, Instant),
    /// Time at the start of this round.
    pub now: Instant,
    /// Rounds of the loop, and the one in which connections came last.
    round: u64,
    accepted_round: u64,
    scratch: Box<[u8]>,
    /// Where changed output is composed.
    compose: Vec<u8>,
    to_client: Vec<u8>,
    observed: Observed,
    again: Vec<Again>,
    /// The same, but not before a millisecond has passed: what they wait for is the kernel's to do.
    again_soon: Vec<Again>,
    /// Clients whose lane tells what it forwards, by the index of their slot.
    tapped: HashMap<u32, Key, RandomState>,
    pub meters: Meters,
    /// Transactions that mirrors have answered, not passed on for comparison yet.
    compared: Vec<Compared>,
    pub stopping: bool,
    /// Its listening sockets are closed, but for our own unix socket.
    pub has_closed: bool,
    /// SHUTDOWN WAIT_FOR_SERVERS: clients leave when their transaction is over.
    pub draining: bool,
    /// SUSPEND: nothing is read but what the console says.
    suspension: Option<Box<suspend::Suspension>>,
    /// When accepting failed for lack of descriptors, until when not to try. Meanwhile the listeners are not watched.
    accept_paused_until: Option<Instant>,
    /// State of the generator behind forced flips.
    flips: u64,
    /// Sweeps, counted in turns, and the generation of each client that rested at the last look (`sweep.rs`).
    sweeps: u32,
    resting: Vec<Option<u32>>,
    moving: moving::Moving,
    /// Tasks for every worker that were done here.
    pub broadcasts_done: u64,
    /// Servers whose outbox may hold something back since this turn of the loop.
    holding_back: Vec<Key>,
    /// Clients without a socket: shadows and probes.
    silent_clients: usize,
    /// Calls of `granted` on the stack that `give_back` made.
    grants_nested: u32,
    /// Console clients that wait for an event (PAUSE, WAIT_CLOSE, ...).
    pub console_waits: Vec<console::Wait>,
}

fn token(source: Source, key: Key) -> u64 {
    (source as u64) << 56 | u64::from(key.generation) << 32 | u64::from(key.index)
}

/// The token of a server's socket.
pub(crate) fn server_token(key: Key) -> u64 {
    token(Source::Server, key)
}

impl Worker {
    pub fn new(index: u16, shared: Arc<Shared>, listeners: Vec<Listener>) -> Self {
        Self {
            index,
            shared,
            clients: Table::default(),
            servers: Table::default(),
            cancels: Table::default(),
            lookups: Table::default(),
            listeners,
            accepts: true,
            busy_until: (Duration::ZERO, Instant::now()),
            now: Instant::now(),
            round: 0,
            accepted_round: 0,
            has_closed: false,
            scratch: vec![0; SCRATCH_BYTES].into(),
            compose: Vec::new(),
            to_client: Vec::new(),
            observed: Observed::default(),
            again: Vec::new(),
            again_soon: Vec::new(),
            tapped: HashMap::default(),
            meters: Vec::new(),
            compared: Vec::new(),
            stopping: false,
            draining: false,
            suspension: None,
            accept_paused_until: None,
            silent_clients: 0,
            grants_nested: 0,
            flips: u64::from(index),
            sweeps: 0,
            resting: Vec::new(),
            moving: moving::Moving::default(),
            broadcasts_done: 0,
            holding_back: Vec::new(),
            console_waits: Vec::new(),
        }
    }

    fn epoll(&self) -> BorrowedFd<'_> {
        self.shared.mailboxes[self.index as usize].epoll.as_fd()
    }

    /// Watches a socket for its life.
    fn watch(&self, fd: BorrowedFd<'_>, source: Source, key: Key) -> rustix::io::Result<()> {
        epoll::add(self.epoll(), fd, EventData::new_u64(token(source, key)), USER_INTEREST)
    }

    /// Unless others accept, or accepting has failed a moment ago.
    fn watch_listeners(&self) -> rustix::io::Result<()> {
        if !self.accepts || self.accept_paused_until.is_some() {
            return Ok(());
        }
        for (index, listener) in self.listeners.iter().enumerate() {
            let key = Key { index: index as u32, generation: 0 };
            // Level-triggered and exclusive: one worker wakes for a connection, and what it leaves others take.
            let flags = EventFlags::IN | EventFlags::EXCLUSIVE;
            epoll::add(self.epoll(), &*listener.fd, EventData::new_u64(token(Source::Listener, key)), flags)?;
        }
        Ok(())
    }

    fn unwatch_listeners(&self) {
        for listener in &self.listeners {
            let _ = epoll::delete(self.epoll(), &*listener.fd);
        }
    }

    /// Takes no more connections, for good, but those by our own unix socket: the console is there till the end, as with PgBouncer, and
    /// tells others that it ends.
    pub(crate) fn stop_listening(&mut self) {
        // Those that the kernel let in already are served, or told, instead of being reset. A service manager's socket stays open: the next process
        // finds them in its queue.
        for index in 0..self.listeners.len() {
            if !self.listeners[index].is_handed_over {
                self.accept(index, listen::ACCEPTS_AT_END);
            }
        }
        self.has_closed = true;
        self.count_logins();
        self.unwatch_listeners();
        self.listeners.retain(|listener| listener.unix_port.is_some() && !listener.is_handed_over);
        // Their numbers may be others now. A suspended worker watches them when it goes on.
        if self.suspension.is_none() {
            self.watch_listeners_again();
        }
    }

    /// Gives another worker (or this one, later) something to do.
    pub fn post(&self, worker: u16, task: Task) {
        self.shared.mailboxes[worker as usize].post(task);
    }

    /// Runs until told to stop.
    ///
    /// # Errors
    /// epoll itself fails, which does not happen in a working process.
    pub fn run(mut self) -> anyhow::Result<()> {
        let shared = self.shared.clone();
        let mailbox = &shared.mailboxes[self.index as usize];
        epoll::add(
            &mailbox.epoll,
            &mailbox.bell,
            EventData::new_u64(token(Source::Bell, Key { index: 0, generation: 0 })),
            EventFlags::IN | EventFlags::ET,
        )?;
        self.watch_listeners()?;
        if let (Some(lanes), 0) = (&shared.lanes, self.index) {
            let key = Key { index: 0, generation: 0 };
            epoll::add(
                self.epoll(),
                lanes.datapath.event_fd(),
                EventData::new_u64(token(Source::Lanes, key)),
                EventFlags::IN,
            )?;
            if let Some(fd) = lanes.datapath.tap_fd() {
                epoll::add(self.epoll(), fd, EventData::new_u64(token(Source::Taps, key)), EventFlags::IN)?;
            }
        }
        // One timer for the life of the worker: a timeout would be set and cancelled in the kernel at every wait.
        let timer = ticker()?;
        let key = Key { index: 0, generation: 0 };
        epoll::add(self.epoll(), &timer, EventData::new_u64(token(Source::Tick, key)), EventFlags::IN)?;
        let mut events: Vec<epoll::Event> = Vec::with_capacity(EVENTS_MAX);
        let is_flipping = shared.lanes.as_ref().is_some_and(|lanes| lanes.flip > 0);
        while !self.stopping {
            let timeout = if self.suspension.is_some() {
                None
            } else if !self.again.is_empty() {
                Some(Timespec { tv_sec: 0, tv_nsec: 0 })
            } else if !self.again_soon.is_empty() || is_flipping {
                Some(Timespec { tv_sec: 0, tv_nsec: 1_000_000 })
            } else {
                None
            };
            events.clear();
            let room = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&mailbox.epoll, room, timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            self.now = Instant::now();
            self.round += 1;
            let mut is_sweep_due = false;
            for event in &events {
                if event.data.u64() >> 56 == Source::Tick as u64 {
                    // The kernel winds the timer up again when it is read.
                    let _ = rustix::io::read(&timer, &mut [0; 8]);
                    is_sweep_due = true;
                } else {
                    self.dispatch(event.data.u64(), event.flags);
                }
            }
            let (again, soon) = if self.suspension.is_none() {
                (std::mem::take(&mut self.again), std::mem::take(&mut self.again_soon))
            } else {
                Default::default()
            };
            for again in again.into_iter().chain(soon) {
                match again {
                    Again::Client(key) => self.client_readable(key, EventFlags::empty()),
                    Again::Server(key) => {
                        self.server_readable(key, false);
                        // The core may have refused to park it until it was listened to.
                        self.rest_again(key);
                    }
                    Again::LaneClient(key) => self.lane_client_up(key),
                    Again::LaneServer(slot, reason) => self.lane_server_up(slot, reason),
                    Again::Unfed(slot) => self.unfed(slot),
                    Again::Farewell(key) => self.farewell(key),
                    Again::Unclear(key) => self.lane_unclear(key),
                }
            }
            self.lane_flip();
            if is_sweep_due {
                self.sweep();
            }
            self.send_all_held_back();
            self.lanes_called();
            self.send_leaving();
        }
        self.close_all();
        Ok(())
    }

    fn dispatch(&mut self, token: u64, flags: EventFlags) {
        let key = Key { index: token as u32, generation: (token >> 32) as u32 & 0x00ff_ffff };
        const CLIENT: u64 = Source::Client as u64;
        const SERVER: u64 = Source::Server as u64;
        const CANCEL: u64 = Source::Cancel as u64;
        const LISTENER: u64 = Source::Listener as u64;
        const LANES: u64 = Source::Lanes as u64;
        const TAPS: u64 = Source::Taps as u64;
        if self.suspension.is_some() && self.hold_back(token, flags) {
            return;
        }
        let incoming = flags.intersects(EventFlags::IN | GONE);
        match token >> 56 {
            CLIENT => {
                self.stirred(key);
                if flags.contains(EventFlags::OUT) {
                    self.client_writable(key);
                }
                if incoming {
                    self.client_readable(key, flags);
                }
            }
            SERVER => {
                if flags.contains(EventFlags::OUT) {
                    self.server_writable(key);
                }
                if incoming {
                    self.server_readable(key, flags.intersects(GONE));
                }
            }
            CANCEL => self.cancel_event(key),
            LISTENER => self.accept_some(key.index as usize),
            LANES => self.lane_events(),
            TAPS => self.tap_events(),
            _ => {
                for task in self.shared.clone().mailboxes[self.index as usize].take() {
                    task(self);
                }
            }
        }
    }

    /// The server at `key`, if it works here.
    fn server(&mut self, key: Key) -> Option<&mut Box<Server>> {
        match self.servers.get_mut(key) {
            Some(Entry::Here(server)) => Some(server),
            _ => None,
        }
    }
}

/// A timer that fires every [`TICK`].
fn ticker() -> rustix::io::Result<OwnedFd> {
    use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};
    let timer = rustix::time::timerfd_create(
        TimerfdClockId::Monotonic,
        TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC,
    )?;
    let tick = Timespec { tv_sec: 0, tv_nsec: i64::from(TICK.subsec_nanos()) };
    let each = Itimerspec { it_interval: tick, it_value: tick };
    rustix::time::timerfd_settime(&timer, TimerfdTimerFlags::empty(), &each)?;
    Ok(timer)
}

/// Why a client or server connection ends, for the log and for the peer.
#[derive(Debug)]
pub(crate) struct Farewell {
    /// SQLSTATE and message for the client; `None` = it hears nothing.
    pub report: Option<(underpass_wire::SqlState, String)>,
    /// What the log says.
    pub reason: String,
    /// Whether the pooler's own rules or errors are the cause (`log_pooler_errors`), not the peer's wish.
    pub is_error: bool,
}

impl Farewell {
    /// The peer left.
    pub fn quiet(reason: &str) -> Self {
        Self { report: None, reason: reason.to_owned(), is_error: false }
    }

    /// The client broke the rules where nothing can be said to it.
    pub fn untold(reason: impl Into<String>) -> Self {
        Self { report: None, reason: reason.into(), is_error: true }
    }

    /// The client is told why.
    pub fn told(sqlstate: underpass_wire::SqlState, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { report: Some((sqlstate, message.clone())), reason: message, is_error: true }
    }
}
