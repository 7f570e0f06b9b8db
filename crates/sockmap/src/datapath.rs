// SPDX-License-Identifier: Apache-2.0
//! The handle: opens the lanes, keeps the tables of slots, puts sockets into their maps.
//!
//! Invariants:
//! - A socket enters its map once and stays until it is closed; behaviour is switched by words, never by removal.
//! - A freed slot rests for [`SLOT_REST`] before its next use, so that a program that is still running on a socket
//!   that is being closed cannot touch its successor. One whose socket is still open then rests on.

use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{MapCore, MapFlags, ProgramInput};

use crate::attach;
use crate::error::Error;
use crate::events::Ring;
use crate::holder::{Found, holder_of};
use crate::holders::Holders;
use crate::shared::{Array, KEPT_BYTES, POOL_ORDINALS_MAX, QUEUE_PLACES};
use crate::skel::{LanesSkel, LanesSkelBuilder, types};
use crate::socket;
use crate::taps::TapRing;
use crate::words::{
    DIR_BYTES, DIR_USER, LINK_GEN_SHIFT, LINK_HELD, LINK_LINKED, LOOK_BACKEND, LOOK_CLIENT, LOOK_SERVER,
    SRV_LOCAL,
};

/// How long a freed slot rests. A program runs for microseconds; being preempted in it costs milliseconds.
const SLOT_REST: Duration = Duration::from_millis(100);
/// Clients whose requests can be kept, those with the lowest slots; a request takes 1152 bytes of the kernel's memory, kept or not.
const KEPT_CLIENTS_MAX: u32 = 4096;
/// Bits of the server field in the link word.
const SERVERS_MAX: u32 = 1 << 20;

/// Sizes and limits of the lanes; fixed while they are open.
#[derive(Debug, Clone)]
pub struct Config {
    /// Clients that can be registered at once.
    pub clients_max: u32,
    /// Servers that can be registered at once, at most 1,048,576.
    pub servers_max: u32,
    /// Pools that can exist at once.
    pub pools_max: u32,
    /// Request bytes a client may send through a lane before everything it asked for is answered.
    pub request_budget_bytes: u32,
    /// Redirected bytes that may wait for a slow client outside of its TCP send buffer (lane D).
    pub response_queue_bytes_max: u32,
    /// Response bytes of one link after which user space takes over; 0 means no limit.
    pub response_run_bytes_max: u32,
    /// Largest length field of a message; PostgreSQL's own limit is 1 GiB.
    pub message_length_max: u32,
    /// Names of clients' prepared statements that programs know at once, and statements on servers, likewise.
    pub statements_max: u32,
    /// Size of the event ring, a power of two and a multiple of the page size.
    pub event_ring_bytes: u32,
    /// Size of the tap's ring, likewise; 0 = programs have no tap.
    pub tap_ring_bytes: u32,
    /// Lane B: programs use the own sockets of applications on this host ([`Datapath::attach_application`]).
    pub applications: bool,
    /// Bytes that may wait in such a socket; beyond, responses go up.
    pub application_queue_bytes_max: u32,
    /// Requests of up to so many bytes are kept in the kernel while no server of their pool is idle ([`Datapath::set_pool_keeps`]); at most 1024. 0: none.
    pub kept_bytes_max: u32,
    /// Tests only: programs sometimes stop between their steps, for so many empty rounds of `bpf_loop` (about 2 ns each; at most 2^23). 0: never.
    pub stall_rounds: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            clients_max: 16_384,
            servers_max: 4096,
            pools_max: 256,
            request_budget_bytes: 256 << 10,
            response_queue_bytes_max: 256 << 10,
            response_run_bytes_max: 0,
            message_length_max: 1 << 30,
            statements_max: 65_536,
            event_ring_bytes: 256 << 10,
            tap_ring_bytes: 0,
            applications: false,
            application_queue_bytes_max: 256 << 10,
            kept_bytes_max: 1024,
            stall_rounds: 0,
        }
    }
}

macro_rules! slot_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $name {
            pub(crate) index: u32,
            pub(crate) generation: u32,
        }

        impl $name {
            /// Index below the table's limit; unique among live slots.
            pub fn index(self) -> u32 {
                self.index
            }
        }
    };
}

slot_type!(
    /// A registered client socket.
    ClientSlot
);

impl ClientSlot {
    /// The slot as a number, for those who know no slots.
    pub fn to_bits(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    /// The slot of a number that [`Self::to_bits`] gave.
    pub fn from_bits(bits: u64) -> Self {
        Self { index: bits as u32, generation: (bits >> 32) as u32 }
    }
}

slot_type!(
    /// A registered server connection.
    ServerSlot
);
slot_type!(
    /// A pool: one database, user, server endpoint. Programs never look outside of a slot's own pool.
    PoolSlot
);

/// Which lane carries a server connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lane {
    /// sk_skb on the pooler's own socket to the server.
    D,
    /// PostgreSQL on this host: into and out of the backend's own socket.
    A,
    /// As A, and the application on this host too: into its own socket. Never the lane of a server.
    B,
}

/// Which lane to use for a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaneChoice {
    /// Lane D only.
    Remote,
    /// Lane A if the backend's socket can be found, else lane D.
    Auto {
        /// The process of BackendKeyData, which must hold the socket; `None`: any process may.
        backend_pid: Option<u32>,
    },
    /// Lane A or an error.
    Local {
        /// As for `Auto`.
        backend_pid: Option<u32>,
    },
}

/// What registration needs to know about a server.
#[derive(Debug, Clone, Copy)]
pub struct ServerSpec {
    /// Its pool.
    pub pool: PoolSlot,
    /// Its bit in the pool's idle set, 0 to 511, unused by any other live server of the pool.
    pub ordinal: u32,
    /// Stands for the values of all parameters it reported; equal values, equal fingerprint.
    pub fingerprint: u32,
    /// Lane wanted.
    pub lane: LaneChoice,
}

/// What user space alone knows about a slot.
#[derive(Debug)]
pub(crate) struct Side {
    pub(crate) generation: AtomicU32,
    pub(crate) fd: AtomicI32,
    /// Servers of lane A: position of the backend's stream minus bytes read from the server socket. Clients: the promise
    /// of `give_client_before`, or 0.
    pub(crate) base: AtomicU64,
    /// Sequence number of what user space wrote, as programs see it (`tx_expect`), minus what
    /// [`socket::bytes_enqueued`] tells of the descriptor; modulo 2^32.
    pub(crate) seq_base: AtomicU32,
    /// Clients: bytes of requests that were kept and came to user space after all; programs count them as forwarded.
    pub(crate) returned: AtomicU64,
}

impl Side {
    fn table(len: u32) -> Vec<Self> {
        (0..len)
            .map(|_| Self {
                generation: AtomicU32::new(0),
                fd: AtomicI32::new(-1),
                base: AtomicU64::new(0),
                seq_base: AtomicU32::new(0),
                returned: AtomicU64::new(0),
            })
            .collect()
    }
}

/// Free slots, first in first out.
#[derive(Debug)]
struct FreeList {
    never_used: u32,
    limit: u32,
    resting: VecDeque<(u32, Instant)>,
}

impl FreeList {
    fn new(limit: u32) -> Self {
        Self { never_used: 0, limit, resting: VecDeque::new() }
    }

    fn take(&mut self) -> Option<u32> {
        if self.resting.front().is_some_and(|(_, since)| since.elapsed() >= SLOT_REST) {
            return self.resting.pop_front().map(|(index, _)| index);
        }
        if self.never_used < self.limit {
            self.never_used += 1;
            return Some(self.never_used - 1);
        }
        None
    }

    fn put(&mut self, index: u32) {
        self.resting.push_back((index, Instant::now()));
    }
}

#[derive(Debug)]
struct FreeLists {
    clients: FreeList,
    servers: FreeList,
    pools: FreeList,
}

/// The open lanes. All methods are non-blocking and may be called from any thread.
///
/// Dropping it detaches the programs and takes the sockets out of their maps; bytes that are then still between two
/// sockets are lost, so close the sockets with it.
pub struct Datapath {
    pub(crate) clients: Array<types::client_slot>,
    pub(crate) servers: Array<types::server_slot>,
    pub(crate) pools: Array<types::pool_slot>,
    pub(crate) control: Array<types::lane_control>,
    pub(crate) kept: Array<types::kept_request>,
    pub(crate) client_side: Vec<Side>,
    pub(crate) server_side: Vec<Side>,
    pub(crate) pool_side: Vec<Side>,
    pub(crate) ring: Ring,
    pub(crate) taps: Option<TapRing>,
    free: Mutex<FreeLists>,
    // After everything that refers to its maps.
    pub(crate) skel: LanesSkel<'static>,
    _links: Vec<attach::Attachment>,
    /// Lane A is possible on this kernel.
    pub(crate) local_works: bool,
    /// Programs keep requests.
    pub(crate) keeps: bool,
    /// Says which socket is whose, or why it does not.
    pub(crate) holders: Result<Holders, String>,
    refused: Refused,
    /// Applications' sockets can be [attached](Datapath::attach_application).
    pub(crate) apps_work: bool,
}

/// Backends on this host whose sockets the kernel did not let us have.
#[derive(Debug, Default)]
struct Refused {
    count: AtomicU64,
    first: OnceLock<String>,
}

/// Linux whose verifier walks the function of a loop as often as needed (kernel commit ab5cfac139ab); older ones need help.
const NEW_VERIFIER: (u32, u32) = (6, 7);

/// Whether the running kernel is older; false when its release does not tell.
fn kernel_is_older_than(version: (u32, u32)) -> bool {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    release_of(&release).is_some_and(|running| running < version)
}

/// Major and minor number of a kernel release such as `6.1.0-56-cloud-amd64`.
fn release_of(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

impl std::fmt::Debug for Datapath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Datapath")
            .field("clients_max", &self.client_side.len())
            .field("servers_max", &self.server_side.len())
            .finish_non_exhaustive()
    }
}

impl Datapath {
    /// Loads and attaches the programs. [`crate::selftest::run`] then proves on private sockets what works.
    ///
    /// # Errors
    /// [`Error::Load`] with the end of the verifier's log, [`Error::System`] for a missing privilege, which
    /// [`crate::selftest::Privileges`] names.
    pub fn open(config: &Config) -> Result<Self, Error> {
        if config.servers_max > SERVERS_MAX {
            return Err(Error::State("servers_max is above 1048576"));
        }
        if cfg!(not(target_arch = "x86_64")) {
            return Err(Error::State(
                "kernel lanes are for x86-64: their programs count on its order of memory",
            ));
        }
        let old = kernel_is_older_than(NEW_VERIFIER);
        match Self::load(config, old) {
            // Stable kernels (6.6.15 and later) and those of distributions have the new verifier under an old number. In this order,
            // because a verifier that is really old accepts the first, and would accept the second and cut code away.
            Err(first @ Error::Load { .. }) if old => Self::load(config, false).map_err(|_| first),
            outcome => outcome,
        }
    }

    fn load(config: &Config, old_verifier: bool) -> Result<Self, Error> {
        let log = attach::capture_log();
        // The skeleton borrows this storage for its whole life; it is a pointer in size and opened once.
        let storage = Box::leak(Box::new(MaybeUninit::uninit()));
        let mut open = LanesSkelBuilder::default().open(storage).map_err(|e| log.error(&e))?;
        let rodata =
            open.maps.rodata_data.as_deref_mut().ok_or(Error::State("the object has no settings"))?;
        rodata.request_budget_bytes = config.request_budget_bytes;
        rodata.response_queue_bytes_max = config.response_queue_bytes_max;
        rodata.response_run_bytes_max = config.response_run_bytes_max;
        rodata.message_length_max = config.message_length_max;
        rodata.old_verifier = u32::from(old_verifier);
        let has_tap = config.tap_ring_bytes > 0;
        rodata.tap_works = u32::from(has_tap);
        rodata.tap_wake_bytes = config.tap_ring_bytes / 4;
        rodata.apps_work = u32::from(config.applications);
        rodata.app_queue_bytes_max = config.application_queue_bytes_max;
        rodata.stall_rounds = config.stall_rounds;
        rodata.kept_bytes_max = config.kept_bytes_max.min(KEPT_BYTES as u32);
        let kept = if config.kept_bytes_max > 0 { config.clients_max.clamp(1, KEPT_CLIENTS_MAX) } else { 1 };
        let (clients, servers) = (config.clients_max.max(1), config.servers_max.max(1));
        let pools = config.pools_max.max(1);
        let sized = [
            (&mut open.maps.clients, clients),
            (&mut open.maps.client_socks, clients),
            // Freed slots rest, their successors come before they are gone: room for both.
            (&mut open.maps.client_cookie, clients.saturating_mul(2)),
            // Applications may keep their sockets longer than the pooler has the other ends.
            (&mut open.maps.app_socks, if config.applications { clients.saturating_mul(2) } else { 1 }),
            (&mut open.maps.servers, servers),
            (&mut open.maps.server_socks, servers),
            (&mut open.maps.backend_socks, servers),
            (&mut open.maps.server_cookie, servers.saturating_mul(2)),
            (&mut open.maps.pools, pools),
            (&mut open.maps.kept_requests, kept),
            (&mut open.maps.client_statements, config.statements_max.max(1)),
            (&mut open.maps.server_statements, config.statements_max.max(1)),
            (&mut open.maps.events, config.event_ring_bytes),
        ];
        for (map, entries) in sized {
            map.set_max_entries(entries).map_err(|e| log.error(&e))?;
        }
        if has_tap {
            open.maps.taps.set_max_entries(config.tap_ring_bytes).map_err(|e| log.error(&e))?;
        } else {
            open.maps.taps.set_autocreate(false).map_err(|e| log.error(&e))?;
        }
        let skel = open.load().map_err(|e| log.error(&e))?;
        drop(log);

        let mut links = vec![
            attach::skb_verdict(&skel.progs.request_skb, &skel.maps.client_socks)?,
            attach::skb_verdict(&skel.progs.response_skb, &skel.maps.server_socks)?,
            attach::msg_verdict(&skel.progs.response_entry, &skel.maps.backend_socks)?,
        ];
        if config.applications {
            links.push(attach::msg_verdict(&skel.progs.request_msg, &skel.maps.app_socks)?);
        }
        let mut datapath = Self {
            clients: Array::map(&skel.maps.clients, clients)?,
            servers: Array::map(&skel.maps.servers, servers)?,
            pools: Array::map(&skel.maps.pools, pools)?,
            control: Array::map(&skel.maps.control, 1)?,
            kept: Array::map(&skel.maps.kept_requests, kept)?,
            client_side: Side::table(clients),
            server_side: Side::table(servers),
            pool_side: Side::table(pools),
            ring: Ring::new(&skel.maps.events)?,
            taps: has_tap.then(|| TapRing::new(&skel.maps.taps, clients)).transpose()?,
            free: Mutex::new(FreeLists {
                clients: FreeList::new(clients),
                servers: FreeList::new(servers),
                pools: FreeList::new(pools),
            }),
            skel,
            _links: links,
            local_works: false,
            keeps: config.kept_bytes_max > 0,
            holders: Err("lane A is not possible".into()),
            refused: Refused::default(),
            apps_work: false,
        };
        datapath.local_works = datapath.can_read_sockets()?;
        if datapath.local_works {
            datapath.holders = Holders::open().map_err(|error| error.to_string());
        }
        datapath.apps_work = datapath.local_works && config.applications;
        Ok(datapath)
    }

    fn free_lists(&self) -> MutexGuard<'_, FreeLists> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a pool. It starts open, with an empty idle set.
    ///
    /// # Errors
    /// [`Error::Full`].
    pub fn add_pool(&self) -> Result<PoolSlot, Error> {
        let limit = self.pool_side.len() as u32;
        let index = self.free_lists().pools.take().ok_or(Error::Full { what: "pool", limit })?;
        for word in 0..POOL_ORDINALS_MAX / 64 {
            self.pools.idle(index, word).store(0, Ordering::SeqCst);
        }
        self.pools.waiters(index).store(0, Ordering::SeqCst);
        self.pools.flags(index).store(0, Ordering::SeqCst);
        self.pools.ordinals(index).store(0, Ordering::SeqCst);
        self.pools.rotates(index).store(0, Ordering::SeqCst);
        self.pools.next(index).store(0, Ordering::SeqCst);
        self.pools.announced(index).store(0, Ordering::SeqCst);
        self.pools.keeps(index).store(0, Ordering::SeqCst);
        self.pools.queue_begin(index).store(0, Ordering::SeqCst);
        self.pools.queue_end(index).store(0, Ordering::SeqCst);
        for number in 0..QUEUE_PLACES as u64 {
            self.pools.place(index, number).store(0, Ordering::SeqCst);
        }
        Ok(PoolSlot { index, generation: self.pool_side[index as usize].generation.load(Ordering::Acquire) })
    }

    /// Frees a pool without clients and servers.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn free_pool(&self, pool: PoolSlot) -> Result<(), Error> {
        self.check_pool(pool)?;
        self.pool_side[pool.index as usize].generation.fetch_add(1, Ordering::AcqRel);
        self.free_lists().pools.put(pool.index);
        Ok(())
    }

    /// Registers a client after its login, with user space as the owner of its requests and no server.
    ///
    /// The descriptor must stay open until [`Self::free_client`], and nobody may write to it during the call. Bytes that were
    /// queued before are read as usual; the count of [`Self::give_client`] starts here.
    ///
    /// # Errors
    /// [`Error::Full`]; [`Error::System`] when the kernel refuses the socket (not TCP, not established, a ULP on it).
    pub fn register_client(
        &self,
        fd: BorrowedFd<'_>,
        pool: PoolSlot,
        fingerprint: u32,
    ) -> Result<ClientSlot, Error> {
        self.check_pool(pool)?;
        let cookie = cookie_of(fd)?;
        let index = self.empty_client_slot()?;
        let (c, side) = (&self.clients, &self.client_side[index as usize]);
        // Its links are counted on from those of the slot's last client: what a server remembers of that one must not fit this one.
        let generation =
            (c.link(index).load(Ordering::SeqCst) >> LINK_GEN_SHIFT).wrapping_add(1) << LINK_GEN_SHIFT;
        c.link(index).store(generation | LINK_HELD, Ordering::SeqCst);
        c.req_dir(index).store(DIR_USER, Ordering::SeqCst);
        for word in [
            c.tx_expect(index),
            c.req_fwd(index),
            c.req_passed(index),
            c.clear(index),
            c.next_seq(index),
            c.sk_addr(index),
            c.app_addr(index),
            c.app_cookie(index),
            c.last_addr(index),
            c.last_cookie(index),
            c.decided_seq(index),
            c.active_ns(index),
            c.xact_start_ns(index),
            c.query_start_ns(index),
            c.xacts(index),
            c.queries(index),
            c.resp_bytes(index),
            c.xact_ns(index),
            c.query_ns(index),
        ] {
            word.store(0, Ordering::Relaxed);
        }
        for word in [
            c.flags(index),
            c.cycle_bytes(index),
            c.reason(index),
            c.links(index),
            c.tap(index),
            c.tap_lost(index),
            c.last_server(index),
            c.last_run(index),
            c.app_after(index),
            c.app_flags(index),
            c.app_chunks(index),
            c.app_run(index),
            c.cycle_chunks(index),
            c.sender(index),
        ] {
            word.store(0, Ordering::Relaxed);
        }
        if index < self.kept.len() {
            for word in [self.kept.waits(index), self.kept.wait_ns(index)] {
                word.store(0, Ordering::Relaxed);
            }
            self.kept.handed(index).store(u64::MAX, Ordering::Relaxed);
        }
        c.set_request_state(index, &crate::StreamState::BOUNDARY);
        c.cookie(index).store(cookie, Ordering::Relaxed);
        c.pool(index).store(pool.index, Ordering::Relaxed);
        c.fingerprint(index).store(fingerprint, Ordering::Relaxed);
        c.in_use(index).store(1, Ordering::SeqCst);
        side.fd.store(fd.as_raw_fd(), Ordering::Release);
        side.base.store(0, Ordering::Release);
        side.returned.store(0, Ordering::Release);

        let inserted = insert(&self.skel.maps.client_cookie, &cookie.to_ne_bytes(), &index.to_ne_bytes())
            .and_then(|()| insert_socket(&self.skel.maps.client_socks, index, fd))
            .and_then(|()| self.look(LOOK_CLIENT, index, 0))
            .and_then(|look| {
                let base = look.write_seq.wrapping_sub(enqueued_at_rest(fd)? as u32);
                side.seq_base.store(base, Ordering::Release);
                c.tx_expect(index).store(look.write_seq.into(), Ordering::SeqCst);
                c.sk_addr(index).store(look.sk_addr, Ordering::SeqCst);
                Ok(())
            });
        if let Err(e) = inserted {
            let _ = self.skel.maps.client_cookie.delete(&cookie.to_ne_bytes());
            c.in_use(index).store(0, Ordering::SeqCst);
            self.free_lists().clients.put(index);
            return Err(Error::System { what: "putting a client into its map", source: e });
        }
        socket::kick(fd);
        Ok(ClientSlot { index, generation: side.generation.load(Ordering::Acquire) })
    }

    /// Registers a server connection after its login, with everything read that it sent, user space as the owner
    /// of its responses, not idle.
    ///
    /// The descriptor must stay open until [`Self::free_server`], and nobody may write to it during the call. `read_total` of other calls counts from here.
    ///
    /// # Errors
    /// As [`Self::register_client`]; with [`LaneChoice::Local`] also when the backend's socket cannot be had.
    pub fn register_server(
        &self,
        fd: BorrowedFd<'_>,
        spec: &ServerSpec,
    ) -> Result<(ServerSlot, Lane), Error> {
        self.check_pool(spec.pool)?;
        if spec.ordinal as usize >= POOL_ORDINALS_MAX {
            return Err(Error::State("ordinal above 511"));
        }
        let backend = match spec.lane {
            LaneChoice::Remote => None,
            LaneChoice::Auto { .. } if !self.local_works => None,
            LaneChoice::Local { .. } if !self.local_works => {
                return Err(Error::State(
                    "lane A needs Linux 6.2: programs cannot read a socket by its address",
                ));
            }
            LaneChoice::Auto { backend_pid } => self.local_backend(fd, backend_pid).ok(),
            LaneChoice::Local { backend_pid } => {
                let found = self.local_backend(fd, backend_pid);
                Some(found.map_err(Error::system("finding the backend's socket"))?)
            }
        };
        let watched = backend.as_ref().map_or(fd, |b| b.as_fd());
        let cookie = cookie_of(watched)?;
        let index = self.empty_server_slot()?;
        let (s, side) = (&self.servers, &self.server_side[index as usize]);
        let base = match &backend {
            Some(b) => enqueued_at_rest(b.as_fd()).map_err(Error::system("TCP_INFO"))? & DIR_BYTES,
            None => 0,
        };
        s.peer(index).store(0, Ordering::SeqCst);
        s.dir(index).store(DIR_USER | base, Ordering::SeqCst);
        for word in [
            s.fwd(index),
            s.passed(index),
            s.tx_expect(index),
            s.sk_addr(index),
            s.active_ns(index),
            s.next_seq(index),
            s.answered(index),
            s.owed_cookie(index),
            s.told_cookie(index),
        ] {
            word.store(0, Ordering::Relaxed);
        }
        for word in
            [s.run_bytes(index), s.reason(index), s.runs_begin(index), s.runs_end(index), s.brings(index)]
        {
            word.store(0, Ordering::Relaxed);
        }
        s.set_response_state(index, &crate::StreamState::BOUNDARY);
        s.cookie(index).store(cookie, Ordering::Relaxed);
        s.pool(index).store(spec.pool.index, Ordering::Relaxed);
        s.ordinal(index).store(spec.ordinal, Ordering::Relaxed);
        s.fingerprint(index).store(spec.fingerprint, Ordering::Relaxed);
        s.flags(index).store(if backend.is_some() { SRV_LOCAL } else { 0 }, Ordering::Relaxed);
        s.in_use(index).store(1, Ordering::SeqCst);
        side.fd.store(fd.as_raw_fd(), Ordering::Release);
        side.base.store(base, Ordering::Release);
        let (server, fingerprint) = self.pools.member(spec.pool.index, spec.ordinal);
        server.store(index, Ordering::SeqCst);
        fingerprint.store(spec.fingerprint, Ordering::SeqCst);
        self.pools.ordinals(spec.pool.index).fetch_max(spec.ordinal + 1, Ordering::SeqCst);

        let maps = &self.skel.maps;
        let inserted = match &backend {
            Some(b) => insert(&maps.backend_slot, &b.as_raw_fd().to_ne_bytes(), &index.to_ne_bytes())
                .and_then(|()| insert_socket(&maps.backend_socks, index, b.as_fd())),
            None => insert(&maps.server_cookie, &cookie.to_ne_bytes(), &index.to_ne_bytes())
                .and_then(|()| insert_socket(&maps.server_socks, index, fd)),
        };
        let map = if backend.is_some() { LOOK_BACKEND } else { LOOK_SERVER };
        let inserted = inserted.and_then(|()| self.look(map, index, 0)).and_then(|look| {
            // All that was written is acknowledged (see local_backend), so it is in the backend's receive sequence.
            let seq = if backend.is_some() { look.rcv_nxt } else { look.write_seq };
            side.seq_base.store(seq.wrapping_sub(enqueued_at_rest(fd)? as u32), Ordering::Release);
            s.tx_expect(index).store(seq.into(), Ordering::SeqCst);
            s.sk_addr(index).store(look.sk_addr, Ordering::SeqCst);
            Ok(())
        });
        if let Err(e) = inserted {
            let _ = maps.server_cookie.delete(&cookie.to_ne_bytes());
            s.in_use(index).store(0, Ordering::SeqCst);
            self.free_lists().servers.put(index);
            return Err(Error::System { what: "putting a server into its map", source: e });
        }
        if backend.is_none() {
            socket::kick(fd);
        }
        let lane = if backend.is_some() { Lane::A } else { Lane::D };
        Ok((ServerSlot { index, generation: side.generation.load(Ordering::Acquire) }, lane))
    }

    /// The backend's socket, if all that was ever written to the server is there. What is not acknowledged would make the
    /// two ends' counts differ for ever.
    fn local_backend(&self, server: BorrowedFd<'_>, pid: Option<u32>) -> io::Result<OwnedFd> {
        let found = holder_of(server, pid, self.holders.as_ref().ok())?;
        if let Found::Refused(why) = &found {
            self.refused.count.fetch_add(1, Ordering::Relaxed);
            self.refused.first.get_or_init(|| why.to_string());
        }
        let backend = found.socket()?;
        if !socket::all_acked(server)? {
            return Err(io::Error::other("the server has not acknowledged all that it was sent"));
        }
        Ok(backend)
    }

    /// How many backends on this host stayed out of lane A because the kernel did not let us have their sockets, and why the first did.
    pub fn refused_backends(&self) -> (u64, Option<&str>) {
        (self.refused.count.load(Ordering::Relaxed), self.refused.first.get().map(String::as_str))
    }

    /// The slots of servers that have ever been used are those below.
    pub(crate) fn servers_used(&self) -> u32 {
        self.free_lists().servers.never_used
    }

    /// As [`Self::empty_server_slot`]: a client whose registration failed in the middle may have stayed in its map.
    fn empty_client_slot(&self) -> Result<u32, Error> {
        let limit = self.client_side.len() as u32;
        loop {
            let index = self.free_lists().clients.take().ok_or(Error::Full { what: "client", limit })?;
            if self.look(LOOK_CLIENT, index, 0).is_err() {
                return Ok(index);
            }
            self.free_lists().clients.put(index);
        }
    }

    /// A free slot that no socket has. A backend that is busy or stopped keeps its own for longer than the slot rests; what it sends then would pass for its
    /// successor's, of whatever lane.
    fn empty_server_slot(&self) -> Result<u32, Error> {
        let limit = self.server_side.len() as u32;
        // Ends: each slot that is not empty rests again.
        loop {
            let index = self.free_lists().servers.take().ok_or(Error::Full { what: "server", limit })?;
            if [LOOK_SERVER, LOOK_BACKEND].iter().all(|&map| self.look(map, index, 0).is_err()) {
                return Ok(index);
            }
            self.free_lists().servers.put(index);
        }
    }

    /// What a socket map holds in a slot, or that of the applications under a cookie.
    pub(crate) fn look(&self, map: u32, slot: u32, cookie: u64) -> io::Result<Look> {
        // struct look_packet.
        let mut packet = [0u8; 48];
        packet[16..20].copy_from_slice(&map.to_ne_bytes());
        packet[20..24].copy_from_slice(&slot.to_ne_bytes());
        packet[24..32].copy_from_slice(&cookie.to_ne_bytes());
        let mut answer = packet;
        let input =
            ProgramInput { data_in: Some(&packet), data_out: Some(&mut answer), ..ProgramInput::default() };
        self.skel
            .progs
            .socket_look
            .test_run(input)
            .map_err(|e| io::Error::other(format!("looking a socket up: {e:#}")))?;
        let word =
            |at: usize| u32::from_ne_bytes([answer[at], answer[at + 1], answer[at + 2], answer[at + 3]]);
        let mut address = [0u8; 8];
        address.copy_from_slice(&answer[24..32]);
        let look = Look {
            sk_addr: u64::from_ne_bytes(address),
            write_seq: word(32),
            copied_seq: word(36),
            rcv_nxt: word(40),
        };
        if look.sk_addr == 0 {
            return Err(io::Error::other("the socket left its map"));
        }
        Ok(look)
    }

    /// Frees a client's slot. Call it after [`Self::take`] and [`Self::unlink`], just before closing the socket.
    ///
    /// Returns a server that is to be closed, if there is one, out of the idle set and owned by user space: its last answer went straight to the
    /// client's application (lane B), which may have closed its socket before, and then the backend is ending.
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::State`] while it is linked or a program may forward from it.
    pub fn free_client(&self, client: ClientSlot) -> Result<Option<ServerSlot>, Error> {
        let index = self.check_client(client)?;
        if self.clients.link(index).load(Ordering::SeqCst) & (LINK_LINKED | LINK_HELD) != LINK_HELD {
            return Err(Error::State("free_client before take and unlink"));
        }
        self.note_lost_answers(index);
        let doubted = self.retire_unanswered(index);
        let side = &self.client_side[index as usize];
        side.generation.fetch_add(1, Ordering::AcqRel);
        side.fd.store(-1, Ordering::Release);
        self.clients.in_use(index).store(0, Ordering::SeqCst);
        self.clients.app_addr(index).store(0, Ordering::SeqCst);
        let cookie = self.clients.cookie(index).load(Ordering::Relaxed);
        let _ = self.skel.maps.client_cookie.delete(&cookie.to_ne_bytes());
        self.free_lists().clients.put(index);
        Ok(doubted.map(|s| self.server_slot(s)))
    }

    /// Frees a server's slot, just before closing its socket. It must not be linked nor in the idle set.
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::State`] while it is linked or idle.
    pub fn free_server(&self, server: ServerSlot) -> Result<(), Error> {
        let index = self.check_server(server)?;
        let s = &self.servers;
        let (pool, ordinal) =
            (s.pool(index).load(Ordering::Relaxed), s.ordinal(index).load(Ordering::Relaxed));
        let idle = self.pools.idle(pool, (ordinal / 64) as usize).load(Ordering::SeqCst);
        if s.peer(index).load(Ordering::SeqCst) != 0 || idle & (1 << (ordinal % 64)) != 0 {
            return Err(Error::State("free_server while linked or idle"));
        }
        let side = &self.server_side[index as usize];
        side.generation.fetch_add(1, Ordering::AcqRel);
        side.fd.store(-1, Ordering::Release);
        s.in_use(index).store(0, Ordering::SeqCst);
        s.dir(index).fetch_or(DIR_USER, Ordering::SeqCst);
        let cookie = s.cookie(index).load(Ordering::Relaxed);
        let _ = self.skel.maps.server_cookie.delete(&cookie.to_ne_bytes());
        self.free_lists().servers.put(index);
        Ok(())
    }

    pub(crate) fn check_client(&self, slot: ClientSlot) -> Result<u32, Error> {
        live(&self.client_side, slot.index, slot.generation, "client")
    }

    pub(crate) fn check_server(&self, slot: ServerSlot) -> Result<u32, Error> {
        live(&self.server_side, slot.index, slot.generation, "server")
    }

    pub(crate) fn check_pool(&self, slot: PoolSlot) -> Result<u32, Error> {
        live(&self.pool_side, slot.index, slot.generation, "pool")
    }

    pub(crate) fn client_fd(&self, index: u32) -> RawFd {
        self.client_side[index as usize].fd.load(Ordering::Acquire)
    }

    pub(crate) fn server_fd(&self, index: u32) -> RawFd {
        self.server_side[index as usize].fd.load(Ordering::Acquire)
    }
}

/// What programs see of a registered socket and system calls do not tell.
pub(crate) struct Look {
    pub(crate) sk_addr: u64,
    pub(crate) write_seq: u32,
    pub(crate) copied_seq: u32,
    pub(crate) rcv_nxt: u32,
}

fn live(side: &[Side], index: u32, generation: u32, what: &'static str) -> Result<u32, Error> {
    match side.get(index as usize) {
        Some(s) if s.generation.load(Ordering::Acquire) == generation => Ok(index),
        _ => Err(Error::Stale { what }),
    }
}

/// [`socket::bytes_enqueued`] of a socket to which nobody writes.
pub(crate) fn enqueued_at_rest(fd: BorrowedFd<'_>) -> io::Result<u64> {
    socket::bytes_enqueued(fd)?.ok_or_else(|| io::Error::other("acknowledgements keep coming"))
}

pub(crate) fn cookie_of(fd: BorrowedFd<'_>) -> Result<u64, Error> {
    rustix::net::sockopt::socket_cookie(fd).map_err(|e| Error::System { what: "SO_COOKIE", source: e.into() })
}

pub(crate) fn insert(map: &impl MapCore, key: &[u8], value: &[u8]) -> io::Result<()> {
    map.update(key, value, MapFlags::ANY).map_err(|e| io::Error::other(format!("{e:#}")))
}

/// `NO_EXIST`: a slot whose former socket is still open must not lose it silently.
fn insert_socket(map: &impl MapCore, index: u32, fd: BorrowedFd<'_>) -> io::Result<()> {
    let value = (fd.as_raw_fd() as u64).to_ne_bytes();
    map.update(&index.to_ne_bytes(), &value, MapFlags::NO_EXIST)
        .map_err(|e| io::Error::other(format!("{e:#}")))
}

#[cfg(test)]
mod tests {
    use super::release_of;

    #[test]
    fn a_kernel_release_has_two_numbers_at_least() {
        assert_eq!(release_of("6.1.0-56-cloud-amd64"), Some((6, 1)));
        assert_eq!(release_of("6.18-rc3"), Some((6, 18)));
        assert_eq!(release_of("linux"), None);
        assert!((6, 1) < (6, 7) && (6, 18) > (6, 7));
    }
}
