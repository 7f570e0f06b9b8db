// SPDX-License-Identifier: Apache-2.0
//! The user-space half of a pooler in its smallest complete form: one pool, one thread, level-triggered epoll.
//!
//! It follows the contract on the crate's main page literally, so it is also that page's test. Used by the tests
//! with mock servers and by `examples/lane_bench.rs` with PostgreSQL.

use std::collections::{HashMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::journal::Journal;
use rustix::event::{Timespec, epoll};
use underpass_sockmap::{
    Claim, ClientSlot, Connection, Datapath, Event, Give, Holders, Lane, LaneChoice, LinkState, PoolSlot,
    ServerSlot, ServerSpec, StreamState, TransactionStatus,
};

/// User space stops reading one side while so much of it waits for the other.
const BUFFER_MAX: usize = 64 << 10;
const EVENTS: u64 = 0;
const LISTENER: u64 = 1;
const FIRST_ID: u64 = 2;

/// How a connection to a server begins: connected, logged in, everything read; the backend's process if known.
pub type Connect = Box<dyn Fn() -> io::Result<(TcpStream, Option<u32>)> + Send>;
/// How a client is logged in, blocking.
pub type Login = Box<dyn Fn(&mut TcpStream) -> io::Result<()> + Send>;

/// What to run.
pub struct Options {
    pub datapath: Arc<Datapath>,
    pub pool_size: u32,
    pub lane: LaneChoice,
    /// Lane B: clients' own sockets are attached; they must be this process's.
    pub applications: bool,
    pub pinned: bool,
    pub connect: Connect,
    pub login: Login,
    pub stop: Arc<AtomicBool>,
    pub stats: Arc<Stats>,
    /// One in so many loop turns takes a random client; 0: never.
    pub flip_one_in: u32,
    /// Where each hand-over is noted, for tests that must tell which one broke a stream.
    pub journal: Option<Arc<Journal>>,
}

/// What it did.
#[derive(Debug, Default)]
pub struct Stats {
    pub lane_a_servers: AtomicU64,
    pub taken: AtomicU64,
    pub given: AtomicU64,
    pub grants: AtomicU64,
    pub user_xacts: AtomicU64,
    pub wakeups: AtomicU64,
    pub broken: AtomicU64,
}

fn bump(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Frames one stream; calls back at each head (ReadyForQuery with its status).
#[derive(Debug, Default, Clone, Copy)]
struct Framer {
    state: StreamState,
}

impl Framer {
    fn feed(&mut self, mut bytes: &[u8], mut head: impl FnMut(u8, u8)) {
        let st = &mut self.state;
        while !bytes.is_empty() {
            if st.need > 0 {
                let n = bytes.len().min(st.need as usize);
                st.need -= n as u32;
                bytes = &bytes[n..];
                continue;
            }
            st.head[st.head_len as usize] = bytes[0];
            st.head_len += 1;
            bytes = &bytes[1..];
            let unit = if st.head[0] == b'Z' { 6 } else { 5 };
            if st.head_len == unit {
                let length = u32::from_be_bytes([st.head[1], st.head[2], st.head[3], st.head[4]]);
                let status = st.head[5];
                st.head_len = 0;
                st.need = if unit == 6 { 0 } else { length.saturating_sub(4) };
                head(st.head[0], status);
            }
        }
    }
}

struct Client {
    socket: TcpStream,
    port: u16,
    slot: ClientSlot,
    read: u64,
    /// Read, not yet forwarded.
    pending: Vec<u8>,
    /// For the client, not yet written.
    out: Vec<u8>,
    user: bool,
    untaken: bool,
    server: Option<u64>,
    link: LinkState,
    requests: Framer,
    waiting: bool,
    drained: bool,
    eof: bool,
    closing: bool,
}

struct Server {
    socket: TcpStream,
    /// Of the backend's end: what its peer is bound to.
    port: u16,
    /// Bytes that user space ever wrote to it.
    written: u64,
    slot: ServerSlot,
    ordinal: u32,
    read: u64,
    out: Vec<u8>,
    responses: Framer,
    drained: bool,
    eof: bool,
}

pub struct Pooler {
    o: Options,
    pool: PoolSlot,
    epoll: OwnedFd,
    listener: TcpListener,
    clients: HashMap<u64, Client>,
    servers: HashMap<u64, Server>,
    client_ids: HashMap<ClientSlot, u64>,
    server_ids: HashMap<ServerSlot, u64>,
    queue: VecDeque<u64>,
    /// Clients and servers to look at again soon.
    retry: Vec<u64>,
    claims: Vec<u64>,
    next_id: u64,
    scratch: Vec<u8>,
    random: u64,
}

fn kernel_interest() -> epoll::EventFlags {
    epoll::EventFlags::RDHUP
}

fn user_interest() -> epoll::EventFlags {
    epoll::EventFlags::RDHUP | epoll::EventFlags::IN
}

impl Pooler {
    pub fn new(o: Options, listener: TcpListener) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let pool = o.datapath.add_pool().map_err(io::Error::other)?;
        listener.set_nonblocking(true)?;
        let data = |id| epoll::EventData::new_u64(id);
        epoll::add(&epoll, o.datapath.event_fd(), data(EVENTS), epoll::EventFlags::IN)?;
        epoll::add(&epoll, &listener, data(LISTENER), epoll::EventFlags::IN)?;
        let mut pooler = Self {
            o,
            pool,
            epoll,
            listener,
            clients: HashMap::new(),
            servers: HashMap::new(),
            client_ids: HashMap::new(),
            server_ids: HashMap::new(),
            queue: VecDeque::new(),
            retry: Vec::new(),
            claims: Vec::new(),
            next_id: FIRST_ID,
            scratch: vec![0; 64 << 10],
            random: 0x9e37_79b9_7f4a_7c15,
        };
        for ordinal in 0..pooler.o.pool_size {
            pooler.add_server(ordinal)?;
        }
        Ok(pooler)
    }

    /// Notes an event of a client, with its server's port, when there is a journal.
    fn note(&self, id: u64, event: impl FnOnce() -> String) {
        let (Some(journal), Some(c)) = (&self.o.journal, self.clients.get(&id)) else { return };
        let server = c.server.and_then(|sid| self.servers.get(&sid)).map_or(0, |s| s.port);
        let forwarded = self.o.datapath.client_info(c.slot).map_or(0, |i| i.stats.request_bytes);
        let offsets = format!("requests {forwarded}+{}", c.read);
        journal.note(c.port, format!("[server :{server}, {offsets}] {}", event()));
    }

    fn watch(&self, fd: BorrowedFd<'_>, id: u64, flags: epoll::EventFlags) {
        epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(id), flags).unwrap();
    }

    fn add_server(&mut self, ordinal: u32) -> io::Result<()> {
        let (socket, backend_pid) = (self.o.connect)()?;
        socket.set_nodelay(true)?;
        socket.set_nonblocking(true)?;
        let lane = match self.o.lane {
            LaneChoice::Remote => LaneChoice::Remote,
            LaneChoice::Auto { .. } => LaneChoice::Auto { backend_pid },
            LaneChoice::Local { .. } => LaneChoice::Local { backend_pid },
        };
        let spec = ServerSpec { pool: self.pool, ordinal, fingerprint: 1, lane };
        let (slot, lane) =
            self.o.datapath.register_server(socket.as_fd(), &spec).map_err(io::Error::other)?;
        if lane == Lane::A {
            bump(&self.o.stats.lane_a_servers);
        }
        let id = self.next_id;
        self.next_id += 1;
        epoll::add(&self.epoll, &socket, epoll::EventData::new_u64(id), kernel_interest())?;
        let server = Server {
            port: socket.local_addr()?.port(),
            written: 0,
            socket,
            slot,
            ordinal,
            read: 0,
            out: Vec::new(),
            responses: Framer::default(),
            drained: false,
            eof: false,
        };
        self.servers.insert(id, server);
        self.server_ids.insert(slot, id);
        self.offer_server(id);
        Ok(())
    }

    fn add_client(&mut self) -> io::Result<()> {
        let (mut socket, _) = self.listener.accept()?;
        socket.set_nodelay(true)?;
        socket.set_nonblocking(false)?;
        (self.o.login)(&mut socket)?;
        socket.set_nonblocking(true)?;
        let slot = self.o.datapath.register_client(socket.as_fd(), self.pool, 1).map_err(io::Error::other)?;
        if self.o.applications {
            // One that is gone already is not found.
            if let Some(found) = application(socket.as_fd()) {
                let _ = self.o.datapath.attach_application(slot, found.as_fd());
            }
        }
        let id = self.next_id;
        self.next_id += 1;
        epoll::add(&self.epoll, &socket, epoll::EventData::new_u64(id), user_interest())?;
        let client = Client {
            port: socket.peer_addr().map_or(0, |a| a.port()),
            socket,
            slot,
            read: 0,
            pending: Vec::new(),
            out: Vec::new(),
            user: true,
            untaken: false,
            server: None,
            link: LinkState { pinned: self.o.pinned, ..LinkState::default() },
            requests: Framer::default(),
            waiting: false,
            drained: true,
            eof: false,
            closing: false,
        };
        self.clients.insert(id, client);
        self.client_ids.insert(slot, id);
        if self.o.pinned {
            let server = self.o.datapath.pop_idle(self.pool, None).map_err(io::Error::other)?;
            let sid = self.server_ids[&server.ok_or_else(|| io::Error::other("no server for a session"))?];
            let (c, s) = (self.clients.get_mut(&id).unwrap(), self.servers.get_mut(&sid).unwrap());
            c.server = Some(sid);
            self.o.datapath.link(c.slot, s.slot, &c.link).map_err(io::Error::other)?;
            self.release(id, sid);
        }
        self.pump(id);
        Ok(())
    }

    /// Runs until told to stop.
    pub fn run(&mut self) {
        let mut events = Vec::with_capacity(256);
        let mut lane_events = Vec::new();
        while !self.o.stop.load(Ordering::Relaxed) {
            events.clear();
            let wait = if self.retry.is_empty() && self.claims.is_empty() { 20_000_000 } else { 100_000 };
            let timeout = Timespec { tv_sec: 0, tv_nsec: wait };
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => panic!("epoll: {e}"),
            }
            if !events.is_empty() {
                bump(&self.o.stats.wakeups);
            }
            lane_events.clear();
            self.o.datapath.drain_events(&mut lane_events).unwrap();
            for event in lane_events.drain(..) {
                self.lane_event(event);
            }
            for event in &events {
                let (id, flags) = (event.data.u64(), event.flags);
                match id {
                    EVENTS => {}
                    LISTENER => {
                        let _ = self.add_client();
                    }
                    id if self.clients.contains_key(&id) => {
                        if flags.intersects(
                            epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR,
                        ) {
                            self.take_soon(id);
                        }
                        self.pump(id);
                    }
                    id => self.server_ready(id, flags),
                }
            }
            for id in std::mem::take(&mut self.retry) {
                self.pump(id);
            }
            for id in std::mem::take(&mut self.claims) {
                self.claim(id);
            }
            self.flip();
        }
    }

    fn flip(&mut self) {
        if self.o.flip_one_in == 0 {
            return;
        }
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        if !self.random.is_multiple_of(u64::from(self.o.flip_one_in)) || self.clients.is_empty() {
            return;
        }
        let nth = (self.random >> 32) as usize % self.clients.len();
        let id = *self.clients.keys().nth(nth).unwrap();
        self.take_soon(id);
        self.pump(id);
    }

    fn take_soon(&mut self, id: u64) {
        if let Some(c) = self.clients.get_mut(&id).filter(|c| !c.user) {
            c.untaken = true;
        }
    }

    fn lane_event(&mut self, event: Event) {
        match event {
            Event::ClientUp { client, .. } => {
                if let Some(&id) = self.client_ids.get(&client) {
                    self.take_soon(id);
                    self.pump(id);
                }
            }
            Event::ServerUp { server, .. } => {
                if let Some(&id) = self.server_ids.get(&server) {
                    self.claim(id);
                }
            }
            Event::PoolIdle { .. } => self.serve_queue(),
        }
    }

    fn server_ready(&mut self, id: u64, flags: epoll::EventFlags) {
        let Some(s) = self.servers.get_mut(&id) else { return };
        if flags.intersects(epoll::EventFlags::RDHUP | epoll::EventFlags::HUP | epoll::EventFlags::ERR) {
            s.eof = true;
        }
        match self.clients.iter().find(|(_, c)| c.server == Some(id)).map(|(&cid, _)| cid) {
            Some(cid) => self.pump(cid),
            None => self.claim(id),
        }
    }

    /// A server spoke or hung up outside of what user space runs.
    fn claim(&mut self, id: u64) {
        let Some(s) = self.servers.get(&id) else { return };
        match self.o.datapath.claim_server(s.slot).unwrap() {
            Claim::Busy => self.claims.push(id),
            Claim::Linked(client) => {
                if let Some(&cid) = self.client_ids.get(&client) {
                    self.take_soon(cid);
                    self.pump(cid);
                }
            }
            Claim::Owned => {
                self.watch(s.socket.as_fd(), id, user_interest());
                self.offer_server(id);
            }
        }
    }

    /// Drives a client that user space owns as far as it goes.
    fn pump(&mut self, id: u64) {
        let Some(c) = self.clients.get_mut(&id) else { return };
        if c.untaken {
            let Some(taken) = self.o.datapath.take(c.slot).unwrap() else { return self.retry.push(id) };
            bump(&self.o.stats.taken);
            c.untaken = false;
            c.user = true;
            c.drained = false;
            c.requests.state = taken.request;
            c.link = LinkState { pinned: self.o.pinned, ..taken.link };
            c.server = taken.server.map(|slot| self.server_ids[&slot]);
            let (fd, server) = (c.socket.as_fd(), c.server);
            epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(id), user_interest()).unwrap();
            if let Some(sid) = server {
                let s = self.servers.get_mut(&sid).unwrap();
                s.drained = false;
                s.responses.state = taken.response;
                self.watch(self.servers[&sid].socket.as_fd(), sid, user_interest());
            }
            self.note(id, || format!("take: {taken:?}"));
        }
        if !self.clients[&id].user {
            return;
        }
        self.read_client(id);
        if self.clients[&id].server.is_some() {
            self.run_link(id);
        } else {
            self.run_alone(id);
        }
    }

    fn read_client(&mut self, id: u64) {
        let c = self.clients.get_mut(&id).unwrap();
        while !c.eof && c.pending.len() < BUFFER_MAX {
            match c.socket.read(&mut self.scratch) {
                Ok(0) => c.eof = true,
                Ok(n) => {
                    c.read += n as u64;
                    c.pending.extend_from_slice(&self.scratch[..n]);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => c.eof = true,
            }
        }
    }

    /// Forwards both directions of a taken link; at its end gives everything back.
    fn run_link(&mut self, id: u64) {
        let dp = Arc::clone(&self.o.datapath);
        let c = self.clients.get_mut(&id).unwrap();
        let sid = c.server.unwrap();
        let s = self.servers.get_mut(&sid).unwrap();

        c.drained = c.drained || dp.client_drained(c.slot).unwrap();
        s.drained = s.drained || dp.server_drained(s.slot).unwrap();
        if s.out.is_empty() && !c.pending.is_empty() {
            let link = &mut c.link;
            // Part of a Terminate may have been forwarded before its head was whole: then the server is spoilt.
            let split = !c.requests.state.is_boundary();
            let mut terminate = false;
            c.requests.feed(&c.pending, |kind, _| match kind {
                b'Q' | b'S' | b'F' => {
                    link.pending += 1;
                    link.batch = false;
                }
                b'P' | b'B' | b'D' | b'E' | b'C' | b'H' => link.batch = true,
                b'X' => terminate = true,
                _ => {}
            });
            link.open = link.batch || !c.requests.state.is_boundary();
            if terminate {
                c.eof = true;
                s.eof |= split;
            } else {
                s.out.append(&mut c.pending);
            }
            c.pending.clear();
        }
        let (waiting, before) = (s.drained, s.out.len());
        if s.drained && flush(&mut s.socket, &mut s.out).is_err() {
            s.eof = true;
        }
        let written = before - s.out.len();
        s.written += written as u64;
        let mut read = 0;
        loop {
            if c.out.len() >= BUFFER_MAX {
                break;
            }
            match s.socket.read(&mut self.scratch) {
                Ok(0) => {
                    s.eof = true;
                    break;
                }
                Ok(n) => {
                    s.read += n as u64;
                    read += n;
                    let link = &mut c.link;
                    s.responses.feed(&self.scratch[..n], |kind, status| {
                        if kind == b'Z' {
                            link.pending = link.pending.saturating_sub(1);
                            link.copy_in = false;
                            link.status = match status {
                                b'I' => TransactionStatus::Idle,
                                b'T' => TransactionStatus::InTransaction,
                                _ => TransactionStatus::Failed,
                            };
                        }
                    });
                    c.out.extend_from_slice(&self.scratch[..n]);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    s.eof = true;
                    break;
                }
            }
        }
        let to_client = c.out.len();
        if c.drained && flush(&mut c.socket, &mut c.out).is_err() {
            c.eof = true;
        }
        let to_client = to_client - c.out.len();
        if before + read + to_client > 0 {
            let event = format!(
                "by user space: {written} of {before} to the server (drained {waiting}), {read} read, {to_client} to the client (drained {}), {:?}",
                c.drained, c.link
            );
            self.note(id, || event);
        }
        let c = self.clients.get_mut(&id).unwrap();
        let s = self.servers.get_mut(&sid).unwrap();
        let quiet = c.pending.is_empty() && c.out.is_empty() && s.out.is_empty();
        let idle = quiet && c.drained && s.drained && c.link.is_idle() && s.responses.state.is_boundary();
        if c.eof || s.eof && c.out.is_empty() && c.drained {
            return self.end_link(id, idle);
        }
        if idle {
            return self.release(id, sid);
        }
        if !c.drained || !s.drained || !c.out.is_empty() || !s.out.is_empty() {
            self.retry.push(id);
        }
    }

    /// A transaction that user space carried has ended.
    fn release(&mut self, id: u64, sid: u64) {
        bump(&self.o.stats.user_xacts);
        let c = self.clients.get_mut(&id).unwrap();
        if self.o.pinned {
            self.o.datapath.set_link_state(c.slot, &c.link).unwrap();
            self.watch(self.servers[&sid].socket.as_fd(), sid, kernel_interest());
            let s_read = self.servers[&sid].read;
            let slot = self.servers[&sid].slot;
            match self.o.datapath.give_server(slot, s_read, &StreamState::BOUNDARY).unwrap() {
                Give::Done => self.give(id),
                _ => {
                    self.watch(self.servers[&sid].socket.as_fd(), sid, user_interest());
                    self.retry.push(id);
                }
            }
            return;
        }
        self.o.datapath.unlink(c.slot).unwrap();
        c.server = None;
        c.link = LinkState::default();
        self.offer_server(sid);
        self.give(id);
    }

    /// Gives an unlinked (or pinned) quiet client to the kernel.
    fn give(&mut self, id: u64) {
        let c = &self.clients[&id];
        if c.eof || !c.out.is_empty() || !c.pending.is_empty() {
            let linked = c.server.is_some();
            let c = self.clients.get_mut(&id).unwrap();
            (c.user, c.untaken) = (!linked, linked);
            return self.retry.push(id);
        }
        self.watch(c.socket.as_fd(), id, kernel_interest());
        let outcome = self.o.datapath.give_client(c.slot, c.read).unwrap();
        self.note(id, || format!("give_client: {outcome:?}"));
        let c = self.clients.get_mut(&id).unwrap();
        match outcome {
            Give::Done => {
                bump(&self.o.stats.given);
                c.user = false;
            }
            Give::Ended => {
                c.user = false;
                c.untaken = true;
                self.retry.push(id);
            }
            Give::Unread { .. } | Give::Busy => {
                if c.server.is_some() {
                    // Responses are with the kernel: take the whole link again.
                    c.user = false;
                    c.untaken = true;
                }
                let fd = self.clients[&id].socket.as_fd();
                self.watch(fd, id, user_interest());
                self.retry.push(id);
            }
        }
    }

    /// A client without a server: forwardable requests need one, anything else ends it.
    fn run_alone(&mut self, id: u64) {
        let dp = Arc::clone(&self.o.datapath);
        let c = self.clients.get_mut(&id).unwrap();
        c.drained = c.drained || dp.client_drained(c.slot).unwrap();
        if c.drained && flush(&mut c.socket, &mut c.out).is_err() {
            c.eof = true;
        }
        if c.eof && c.pending.is_empty() || c.pending.first() == Some(&b'X') {
            return self.close_client(id);
        }
        if !c.drained || !c.out.is_empty() {
            return self.retry.push(id);
        }
        if c.pending.is_empty() {
            return self.give(id);
        }
        if c.waiting {
            return;
        }
        c.waiting = true;
        self.queue.push_back(id);
        self.serve_queue();
    }

    /// Grants idle servers to queued clients, in order.
    fn serve_queue(&mut self) {
        let dp = Arc::clone(&self.o.datapath);
        dp.set_waiters(self.pool, self.queue.len() as u32).unwrap();
        while let Some(&id) = self.queue.front() {
            if !self.clients.contains_key(&id) {
                self.queue.pop_front();
                continue;
            }
            let Some(slot) = dp.pop_idle(self.pool, None).unwrap() else { break };
            self.queue.pop_front();
            let sid = self.server_ids[&slot];
            self.clients.get_mut(&id).unwrap().waiting = false;
            self.grant(id, sid);
        }
        dp.set_waiters(self.pool, self.queue.len() as u32).unwrap();
    }

    /// Links; if the requests are whole and written at once, the kernel takes the rest of the transaction.
    fn grant(&mut self, id: u64, sid: u64) {
        bump(&self.o.stats.grants);
        let dp = Arc::clone(&self.o.datapath);
        let c = self.clients.get_mut(&id).unwrap();
        let s = self.servers.get_mut(&sid).unwrap();
        let mut link = LinkState { pinned: self.o.pinned, ..LinkState::default() };
        let mut plain = true;
        let mut framer = c.requests;
        framer.feed(&c.pending, |kind, _| match kind {
            b'Q' | b'S' | b'F' => {
                link.pending += 1;
                link.batch = false;
            }
            b'P' | b'B' | b'D' | b'E' | b'C' | b'H' => {
                link.batch = true;
                link.extended = true;
            }
            _ => plain = false,
        });
        plain &=
            framer.state.is_boundary() && !link.batch && link.pending > 0 && c.pending.len() < BUFFER_MAX;
        c.server = Some(sid);
        if !plain {
            c.link = LinkState { pinned: self.o.pinned, ..LinkState::default() };
            dp.link(c.slot, s.slot, &c.link).unwrap();
            s.drained = false;
            s.responses = Framer::default();
            self.watch(self.servers[&sid].socket.as_fd(), sid, user_interest());
            return self.run_link(id);
        }
        dp.link(c.slot, s.slot, &link).unwrap();
        c.link = link;
        let given = dp.give_server(s.slot, s.read, &StreamState::BOUNDARY).unwrap();
        s.drained = dp.server_drained(s.slot).unwrap();
        s.out = std::mem::take(&mut c.pending);
        c.requests = framer;
        let whole =
            given == Give::Done && s.drained && flush(&mut s.socket, &mut s.out).is_ok() && s.out.is_empty();
        let left = s.out.len();
        self.note(id, || format!("grant: give_server {given:?}, {left} bytes unwritten, {link:?}"));
        if whole {
            return self.give(id);
        }
        let c = self.clients.get_mut(&id).unwrap();
        c.user = false;
        c.untaken = true;
        self.retry.push(id);
    }

    /// A server that user space owns and nobody is linked to: to the idle set, or replaced when it is gone.
    fn offer_server(&mut self, sid: u64) {
        let s = self.servers.get_mut(&sid).unwrap();
        while let Ok(n) = s.socket.read(&mut self.scratch) {
            if n == 0 {
                s.eof = true;
                break;
            }
            s.read += n as u64; // a notice outside of any link: not for anybody
        }
        if s.eof || !s.out.is_empty() {
            return self.replace_server(sid);
        }
        let s = &self.servers[&sid];
        self.watch(s.socket.as_fd(), sid, kernel_interest());
        match self.o.datapath.push_idle(s.slot, s.read).unwrap() {
            Give::Done => {
                if !self.queue.is_empty() {
                    self.serve_queue();
                }
            }
            _ => self.claims.push(sid),
        }
    }

    fn replace_server(&mut self, sid: u64) {
        bump(&self.o.stats.broken);
        let s = self.servers.remove(&sid).unwrap();
        self.server_ids.remove(&s.slot);
        self.o.datapath.free_server(s.slot).unwrap();
        drop(s.socket);
        let _ = self.add_server(s.ordinal);
    }

    /// The client or the server of a taken link is gone.
    fn end_link(&mut self, id: u64, idle: bool) {
        let c = self.clients.get_mut(&id).unwrap();
        let sid = c.server.take().unwrap();
        self.o.datapath.unlink(c.slot).unwrap();
        if idle && !self.servers[&sid].eof {
            self.offer_server(sid);
        } else {
            self.replace_server(sid);
        }
        self.close_client(id);
    }

    fn close_client(&mut self, id: u64) {
        let c = self.clients.remove(&id).unwrap();
        self.client_ids.remove(&c.slot);
        // A fresh or given-back client is not held any more: hold it before freeing.
        while self.o.datapath.take(c.slot).unwrap().is_none() {}
        let doubted = self.o.datapath.free_client(c.slot).unwrap();
        if let Some(sid) = doubted.and_then(|slot| self.server_ids.get(&slot).copied()) {
            self.replace_server(sid);
        }
    }
}

/// The other end of a client's connection, if it is this process's.
pub fn application(near: BorrowedFd<'_>) -> Option<OwnedFd> {
    static HOLDERS: OnceLock<Holders> = OnceLock::new();
    HOLDERS
        .get_or_init(|| Holders::open().unwrap())
        .find(&[Connection::of(near).ok()?])
        .unwrap()
        .pop()
        .unwrap()
}

/// Writes what the socket takes now; keeps the rest.
fn flush(socket: &mut TcpStream, out: &mut Vec<u8>) -> io::Result<()> {
    while !out.is_empty() {
        match socket.write(out) {
            Ok(n) => drop(out.drain(..n)),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
