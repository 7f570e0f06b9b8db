// SPDX-License-Identifier: Apache-2.0
//! The kernel lanes as the pooler sees them: which sockets are in them, and the idle set that it shares with their programs.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock, Weak};
use std::time::Instant;

use foldhash::fast::RandomState;
use rustix::event::epoll::{self, EventData, EventFlags};
use underpass_config::{Config, Database, Host, KernelPath, PoolMode, SameHost};
use underpass_pool::core::ClientRef;
use underpass_pool::prepared::{ClientStatements, ServerStatements, Statement};
use underpass_pool::{ServerId, SharedIdle};
use underpass_sockmap::selftest::{self, Report};
use underpass_sockmap::{
    ClientSlot, Connection, Datapath, Holders, Lane, LaneChoice, PoolSlot, STATEMENT_NAME_MAX, ServerSlot,
    ServerSpec, TapStream, TapWaits,
};
use underpass_wire::MAX_MESSAGE_LEN;

use crate::applications::{self, Finder};
use crate::client::Client;
use crate::lane_idle::LaneIdle;
use crate::logging::log_socket;
use crate::net::{self, Endpoint};
use crate::pool::PoolSettings;
use crate::pressure::Pressure;
use crate::server::Server;
use crate::shared::{Shared, lock};
use crate::table::Key;
use crate::why::Own;

/// Interest in a socket that a program reads: hang-ups only. With EPOLLIN every forwarded segment would wake the worker for nothing.
const KERNEL_INTEREST: EventFlags = EventFlags::RDHUP.union(EventFlags::ET);
/// Interest in a socket that user space reads.
pub(crate) const USER_INTEREST: EventFlags =
    EventFlags::IN.union(EventFlags::OUT).union(EventFlags::RDHUP).union(EventFlags::ET);

/// Environment variable for tests only: `UNDERPASS_TEST_FLIP=N` takes one of N clients out of its lane in each turn of a worker's loop, a
/// millisecond or less apart, and gives half of those that are idle back at once; contended
/// pools stay in their lanes. Read once at start.
const FLIP_VARIABLE: &str = "UNDERPASS_TEST_FLIP";

/// Environment variable for tests only: with `UNDERPASS_TEST_STALL=ROUNDS` programs sometimes stop between their steps
/// ([`underpass_sockmap::Config::stall_rounds`]).
const STALL_VARIABLE: &str = "UNDERPASS_TEST_STALL";

/// Environment variable for tests only: with `UNDERPASS_TEST_UNEXPLAINED=1` clients are kept from their lanes, and no reason is given: what
/// looks for such transactions must find them.
const UNEXPLAINED_VARIABLE: &str = "UNDERPASS_TEST_UNEXPLAINED";

/// What has the kernel measure programs, for messages.
pub(crate) const SWITCH_STATISTICS_ON: &str = "sysctl -w kernel.bpf_stats_enabled=1";

/// Transactions in the lane that make up for a refusal, and refusals in a row that nothing made up for before a client is left alone.
const CARRIED_MIN: u64 = 4;
const REFUSALS_MAX: u32 = 8;

/// The idle set of a pool whose servers the programs take too.
type IdleSet = Box<dyn SharedIdle<Box<Server>>>;

/// The open lanes of the process.
pub(crate) struct Lanes {
    pub datapath: Arc<Datapath>,
    local: bool,
    /// Lane D works.
    remote: bool,
    /// Lane B is wanted and works.
    applications: bool,
    /// What its thread needs, until [`Self::start_finder`] takes it.
    holders: Mutex<Option<Holders>>,
    finder: OnceLock<Mutex<Finder>>,
    /// Longest message that programs forward; fixed with the load.
    pub message_max: u32,
    /// Clients taken from and given to the kernel.
    pub taken: AtomicU64,
    pub given: AtomicU64,
    /// Transactions of which user space read the requests and a program forwards the answers.
    pub fed: AtomicU64,
    /// [`Datapath::refused_backends`] was told.
    refused_told: Once,
    /// Nothing is given to the lanes, for no reason. See [`UNEXPLAINED_VARIABLE`].
    pub is_silent: bool,
    /// One in so many clients is taken in each turn of a worker's loop; 0 = none. See [`FLIP_VARIABLE`].
    pub flip: u32,
    /// Programs keep requests for which there is no server.
    keeps: bool,
    /// Clients whose requests were kept and come up.
    called: Arc<Called>,
    clients: Mutex<HashMap<ClientSlot, ClientRef, RandomState>>,
    servers: Mutex<HashMap<ServerSlot, ServerId, RandomState>>,
    slots: Mutex<HashMap<ServerId, ServerSlot, RandomState>>,
    pools: Mutex<HashMap<PoolSlot, underpass_pool::PoolId, RandomState>>,
    /// Places of pools that are gone, and since when: see [`Self::leave_pool`].
    left: Mutex<Vec<(PoolSlot, Instant)>>,
    /// Servers that are to be closed when they are claimed: see [`Datapath::free_client`], and those of a client that could not be taken.
    doubted: Mutex<HashSet<ServerSlot, RandomState>>,
    /// While it is open the kernel measures programs (`lane_statistics`).
    _measuring: Option<OwnedFd>,
}

impl Lanes {
    /// Opens the lanes as configured. `Ok(None)` with a log line where the kernel or a privilege is missing and `kernel_path = auto`.
    ///
    /// # Errors
    /// `kernel_path = require`, and a lane that `same_host` asks for does not work.
    pub fn open(config: &Config) -> anyhow::Result<Option<Self>> {
        let required = match config.underpass.kernel_path {
            KernelPath::Off => return Ok(None),
            KernelPath::Auto => false,
            KernelPath::Require => true,
        };
        let mut sizes = sizes(config);
        let message_max = sizes.message_length_max;
        let same_host = config.underpass.same_host;
        let (mut report, mut tested) = selftest::open(&sizes);
        if sizes.tap_ring_bytes > 0 && !report.works(Lane::D) {
            log::warn!("kernel lanes: mirrored databases stay in user space: {}", report.why_not(Lane::D));
            sizes.tap_ring_bytes = 0;
            (report, tested) = selftest::open(&sizes);
        }
        if same_host != SameHost::Off && sizes.kept_bytes_max > 0 && !report.works(Lane::A) {
            let without = underpass_sockmap::Config { kept_bytes_max: 0, ..sizes.clone() };
            let (again, opened) = selftest::open(&without);
            if again.works(Lane::A) {
                log::warn!("kernel lanes: nothing waits in the kernel: {}", report.why_not(Lane::A));
                (sizes, report, tested) = (without, again, opened);
            }
        }
        if required {
            refuse_unless_all_work(&report, same_host)?;
        }
        if sizes.applications && !report.works(Lane::B) {
            log::warn!("kernel lanes: no lane B: {}", report.why_not(Lane::B));
            sizes.applications = false;
            (report, tested) = selftest::open(&sizes);
        }
        let wants_local = same_host != SameHost::Off;
        let local = wants_local && report.works(Lane::A);
        let usable = report.works(Lane::D) || local;
        let opened = match tested {
            Some(datapath) => Ok(datapath),
            None if usable => Datapath::open(&sizes).map_err(|e| e.to_string()),
            None => Err(why_no_lane_works(&report, same_host)),
        };
        match opened {
            Ok(datapath) => {
                let holders = (local && sizes.applications).then(Holders::open).transpose();
                let holders = match holders {
                    Err(error) if required => anyhow::bail!("{}", refusal(&[Lane::B], &error.to_string())),
                    Err(error) => {
                        log::warn!("kernel lanes: no lane B: {error}");
                        None
                    }
                    Ok(holders) => holders,
                };
                let applications = holders.is_some();
                log::info!(
                    "kernel lanes: {}{}{}",
                    if report.works(Lane::D) { "D on" } else { "no lane D" },
                    if local { ", A for servers on this host" } else { "" },
                    if applications { ", B for applications on this host too" } else { "" }
                );
                for (lane, wanted) in [(Lane::D, true), (Lane::A, wants_local)] {
                    if wanted && !report.works(lane) {
                        log::warn!("kernel lanes: no lane {lane:?}: {}", report.why_not(lane));
                    }
                }
                let measuring = config.underpass.lane_statistics.then(underpass_sockmap::measure_programs);
                let measuring = measuring.transpose().unwrap_or_else(|error| {
                    log::warn!(
                        "lane_statistics: only a pooler that root starts may switch the kernel's statistics on ({error}); `{SWITCH_STATISTICS_ON}` does, \
                         at any time"
                    );
                    None
                });
                if let Some(names) = by_unix_socket(config) {
                    log::info!(
                        "kernel lanes: in user space, because their servers are at a unix socket: {names}; at host = 127.0.0.1 \
                         a lane carries them"
                    );
                }
                Ok(Some(Self {
                    datapath: Arc::new(datapath),
                    local,
                    remote: report.works(Lane::D),
                    applications,
                    holders: Mutex::new(holders),
                    finder: OnceLock::new(),
                    message_max,
                    taken: AtomicU64::new(0),
                    given: AtomicU64::new(0),
                    fed: AtomicU64::new(0),
                    refused_told: Once::new(),
                    is_silent: std::env::var_os(UNEXPLAINED_VARIABLE).is_some(),
                    flip: number_of(FLIP_VARIABLE),
                    keeps: sizes.kept_bytes_max > 0,
                    called: Arc::default(),
                    clients: Mutex::default(),
                    servers: Mutex::default(),
                    slots: Mutex::default(),
                    pools: Mutex::default(),
                    left: Mutex::default(),
                    doubted: Mutex::default(),
                    _measuring: measuring,
                }))
            }
            Err(why) if required => anyhow::bail!("kernel_path = require, but the lanes do not work: {why}"),
            Err(why) => {
                log::warn!("kernel lanes are off, all traffic goes through user space: {why}");
                Ok(None)
            }
        }
    }

    /// Why a pool with these settings cannot be carried: what a program may release, nothing needs to clean. A session is never released
    /// by a program.
    pub fn refuses(&self, settings: &PoolSettings) -> Option<Own> {
        let refusals = [
            (settings.mode == PoolMode::Statement, Own::PoolMode),
            (settings.mode == PoolMode::Transaction && settings.reset_query.is_some(), Own::ResetQuery),
            // A RELOAD may have made it smaller than what the programs know.
            (settings.link.message_max < self.message_max, Own::PacketSize),
            (settings.link.refuse_simple_query, Own::SimpleQuery),
            // Programs run no queries of ours: a check that does more than ask for life is user space's.
            (!settings.checks_life_only, Own::CheckQuery),
        ];
        refusals.into_iter().find_map(|(is_so, own)| is_so.then_some(own))
    }

    /// Says what a RELOAD may change of a pool's place.
    pub fn configure_pool(&self, place: &LanePool, settings: &PoolSettings) {
        let _ = self.datapath.set_pool_rotates(place.slot, settings.round_robin);
    }

    /// Whether lane B is on.
    pub fn has_applications(&self) -> bool {
        self.applications
    }

    /// Starts to look for the sockets of applications on this host, where lane B is on.
    ///
    /// # Errors
    /// No thread to be had.
    pub fn start_finder(&self, shared: Weak<Shared>) -> std::io::Result<()> {
        if let Some(holders) = lock(&self.holders).take() {
            let _ = self.finder.set(Mutex::new(applications::start(holders, shared)?));
        }
        Ok(())
    }

    /// Whether lane D is on.
    pub fn is_remote(&self) -> bool {
        self.remote
    }

    /// Whether lane A is on.
    pub fn is_local(&self) -> bool {
        self.local
    }

    /// Makes a pool of the lanes and the idle set for the core.
    pub fn add_pool(&self, id: underpass_pool::PoolId, now: Instant) -> Option<(LanePool, IdleSet)> {
        let slot = self.datapath.add_pool().map_err(|error| log::warn!("kernel lanes: {error}")).ok()?;
        lock(&self.pools).insert(slot, id);
        let pressure = Arc::new(if self.flip > 0 { Pressure::never(now) } else { Pressure::new(now) });
        let idle = LaneIdle::new(
            self.datapath.clone(),
            slot,
            pressure.clone(),
            self.keeps.then(|| self.called.clone()),
        );
        Some((LanePool { slot, pressure, servers: Arc::default() }, Box::new(idle)))
    }

    /// A pool without clients and servers is gone. Its place waits a second for the next one: a program may be about to say something of a
    /// server that it had, and runs for microseconds.
    pub fn leave_pool(&self, place: &LanePool, now: Instant) {
        lock(&self.pools).remove(&place.slot);
        lock(&self.left).push((place.slot, now));
    }

    /// Makes the places free that have waited.
    pub fn free_pools(&self, now: Instant) {
        let mut left = lock(&self.left);
        for (slot, _) in left.extract_if(.., |(_, at)| now.saturating_duration_since(*at).as_secs() >= 1) {
            if let Err(error) = self.datapath.free_pool(slot) {
                log::error!("kernel lanes: free_pool: {error}");
            }
        }
    }

    /// Clients whose requests programs kept and keep no more: each is to be taken.
    pub fn called(&self) -> Vec<ClientSlot> {
        self.called.any.store(false, Ordering::Release);
        std::mem::take(&mut *lock(&self.called.clients))
    }

    /// Whether there are any.
    pub fn has_called(&self) -> bool {
        self.called.any.load(Ordering::Acquire)
    }

    pub fn client_of(&self, slot: ClientSlot) -> Option<ClientRef> {
        lock(&self.clients).get(&slot).copied()
    }

    pub fn server_of(&self, slot: ServerSlot) -> Option<ServerId> {
        lock(&self.servers).get(&slot).copied()
    }

    /// Servers that may have failed to send their last answer and be ending. They rest until somebody claims them.
    pub fn doubted(&self) -> Vec<ServerSlot> {
        lock(&self.doubted).iter().copied().collect()
    }

    /// A server is ending: whoever claims it closes it.
    pub fn doubt(&self, slot: ServerSlot) {
        lock(&self.doubted).insert(slot);
    }

    /// Whether a server is one of [`Self::doubted`]: the caller has claimed it and closes it.
    pub fn is_doubted(&self, slot: ServerSlot) -> bool {
        lock(&self.doubted).contains(&slot)
    }

    /// A server that is out of its map is not doubted any more.
    pub fn forget_doubted(&self, slot: ServerSlot) {
        lock(&self.doubted).remove(&slot);
    }

    /// The slot of a server that is in its map.
    pub fn slot_of(&self, id: ServerId) -> Option<ServerSlot> {
        lock(&self.slots).get(&id).copied()
    }

    pub fn pool_of(&self, slot: PoolSlot) -> Option<underpass_pool::PoolId> {
        lock(&self.pools).get(&slot).copied()
    }

    /// Puts a client between transactions into its map.
    ///
    /// # Errors
    /// Why it cannot be carried.
    pub fn register_client(
        self: &Arc<Self>,
        client: &mut Client,
        pool: PoolSlot,
        me: ClientRef,
    ) -> Result<(), Own> {
        if client.transport.tls().is_some() {
            return Err(Own::ClientTls);
        }
        if !matches!(client.address, Endpoint::Tcp(_)) {
            return Err(Own::ClientUnix);
        }
        match self.datapath.register_client(client.transport.fd(), pool, client.parameters.fingerprint()) {
            Ok(slot) => {
                // Should this process die, what programs forwarded may end in the middle of a response: no end of stream is to follow it.
                net::reset_on_close(client.transport.fd(), true);
                lock(&self.clients).insert(slot, me);
                client.lane = Some(Box::new(ClientLane {
                    lanes: self.clone(),
                    slot,
                    read_total: 0,
                    drained: true,
                    linked: false,
                    session: false,
                    fed: false,
                    owed: Vec::new(),
                    refusals: 0,
                    refused_after: 0,
                    not_before: None,
                    statements: HashMap::default(),
                    statement_changes: 0,
                    carried_at_give: 0,
                    counted: Default::default(),
                    tap: None,
                    waits: None,
                }));
                let finder = self.finder.get();
                let connection = finder.and_then(|_| Connection::of(client.transport.fd()).ok());
                if let (Some(finder), Some(connection)) = (finder, connection.filter(|c| c.may_be_local())) {
                    let _ = lock(finder).send((connection, me));
                }
                Ok(())
            }
            Err(error) => {
                log_socket!(Debug, client.label(), "lane", "stays in user space: {error}");
                Err(Own::ClientRefused)
            }
        }
    }

    /// Puts a server that has logged in into its map, or leaves it to user space.
    pub fn register_server(self: &Arc<Self>, server: &mut Server, pool: PoolSlot, epoll: Arc<OwnedFd>) {
        server.lane_tried = true;
        let refusals = [
            (server.dedicated, Own::Replication),
            (server.transport.tls().is_some(), Own::ServerTls),
            (!matches!(server.address, Endpoint::Tcp(_)), Own::ServerUnix),
        ];
        server.lane_refused = refusals.into_iter().find_map(|(is_so, own)| is_so.then_some(own));
        if server.lane_refused.is_some() {
            return;
        }
        let backend_pid = Some(server.process_id());
        let lane = match (self.remote, self.local) {
            (true, true) => LaneChoice::Auto { backend_pid },
            (false, true) => LaneChoice::Local { backend_pid },
            (_, false) => LaneChoice::Remote,
        };
        let spec = ServerSpec {
            pool,
            ordinal: server.id.ordinal,
            fingerprint: server.parameters.fingerprint(),
            lane,
        };
        let Some(place) = &server.pool.lane else { return };
        let registered = self.datapath.register_server(server.transport.fd(), &spec);
        self.tell_of_refused();
        match registered {
            Ok((slot, lane)) => {
                place.servers.fetch_add(1, Ordering::Relaxed);
                lock(&self.servers).insert(slot, server.id);
                lock(&self.slots).insert(server.id, slot);
                server.lane = Some(Box::new(ServerLane {
                    lanes: self.clone(),
                    slot,
                    lane,
                    siblings: place.servers.clone(),
                    read_total: 0,
                    drained: true,
                    statements: HashSet::default(),
                    statement_changes: 0,
                    epoll,
                }));
            }
            Err(error) => {
                log_socket!(Debug, server.label(), "lane", "stays in user space: {error}");
                server.lane_refused = Some(Own::ServerRefused);
            }
        }
    }
}

impl Lanes {
    /// Says once that a server on this host is not in lane A. One is like the other: `SHOW KERNEL` counts them.
    fn tell_of_refused(&self) {
        if let (_, Some(why)) = self.datapath.refused_backends() {
            self.refused_told.call_once(|| {
                log::warn!(
                    "kernel lanes: a server on this host is not in lane A, because the kernel does not let us have its socket ({why}): look at \
                     kernel.yama.ptrace_scope, the rules of SELinux or AppArmor, and a system call filter of the service; or set same_host = off"
                );
            });
        }
    }
}

/// Databases with a server at a unix socket, as far as they are named, for a log line.
fn by_unix_socket(config: &Config) -> Option<String> {
    let at_socket = |database: &&Database| {
        database.host.as_ref().is_none_or(|hosts| {
            hosts.hosts().iter().any(|host| matches!(host, Host::Unix(_) | Host::Abstract(_)))
        })
    };
    let databases = config.databases.named.values().chain(&config.databases.fallback);
    let names: Vec<&str> = databases.filter(at_socket).map(|database| database.name.as_str()).collect();
    match names.as_slice() {
        [] => None,
        few @ ([_] | [_, _] | [_, _, _]) => Some(few.join(", ")),
        [first, second, rest @ ..] => Some(format!("{first}, {second} and {} more", rest.len())),
    }
}

/// Size of the ring for what mirrors want to know, if any is configured: a power of two and at least a page.
fn tap_ring_bytes(config: &Config) -> u32 {
    let wanted = config.underpass.mirror_ring_bytes;
    if config.mirrors.is_empty() || wanted == 0 {
        return 0;
    }
    (wanted.clamp(4096, 1 << 30) as u32).next_power_of_two()
}

/// A pool's place in the lanes.
#[derive(Debug)]
pub(crate) struct LanePool {
    pub slot: PoolSlot,
    pub pressure: Arc<Pressure>,
    /// Servers that are in a map. Without one, all requests of a client in a lane would come up again.
    pub servers: Arc<AtomicU32>,
}

/// The value of an environment variable for tests; 0 if there is none.
fn number_of(variable: &str) -> u32 {
    std::env::var(variable).ok().and_then(|value| value.parse().ok()).unwrap_or(0)
}

/// Sizes and limits as configured.
fn sizes(config: &Config) -> underpass_sockmap::Config {
    let keys = &config.underpass;
    underpass_sockmap::Config {
        clients_max: keys.lane_clients_max.0,
        servers_max: keys.lane_servers_max.0,
        pools_max: keys.lane_pools_max.0,
        statements_max: keys.lane_statements_max.0,
        request_budget_bytes: keys.lane_request_bytes.0,
        response_queue_bytes_max: keys.lane_response_bytes.0,
        application_queue_bytes_max: keys.lane_response_bytes.0,
        event_ring_bytes: keys.lane_ring_bytes.0.next_power_of_two(),
        message_length_max: config.max_packet_size.min(MAX_MESSAGE_LEN),
        kept_bytes_max: keys.lane_kept_bytes.0,
        tap_ring_bytes: tap_ring_bytes(config),
        applications: keys.same_host == SameHost::Both,
        stall_rounds: number_of(STALL_VARIABLE),
        ..underpass_sockmap::Config::default()
    }
}

/// `kernel_path = require`: all lanes that `same_host` asks for, or no start.
fn refuse_unless_all_work(report: &Report, same_host: SameHost) -> anyhow::Result<()> {
    let wanted: &[Lane] = match same_host {
        SameHost::Off => &[Lane::D],
        SameHost::Server => &[Lane::D, Lane::A],
        SameHost::Both => &[Lane::D, Lane::A, Lane::B],
    };
    let failing: Vec<Lane> = wanted.iter().copied().filter(|&lane| !report.works(lane)).collect();
    match failing.first() {
        None => Ok(()),
        Some(Lane::D) => anyhow::bail!("{}", refusal(&failing, &why_no_lane_works(report, same_host))),
        Some(&first) => anyhow::bail!("{}", refusal(&failing, &report.why_not(first))),
    }
}

/// Why lane D does not work, and with it none. Of capabilities all that are missing are named, lane A's too if it is wanted.
fn why_no_lane_works(report: &Report, same_host: SameHost) -> String {
    let lacks = !report.privileges.missing_for(Lane::D).is_empty();
    report.why_not(if lacks && same_host != SameHost::Off { Lane::A } else { Lane::D })
}

/// Why `kernel_path = require` refuses to start, and what would start.
fn refusal(failing: &[Lane], why: &str) -> String {
    let names: Vec<String> = failing.iter().map(|lane| format!("{lane:?}")).collect();
    let (noun, verb) = if failing.len() == 1 { ("lane", "does") } else { ("lanes", "do") };
    let remedy = match failing.first() {
        Some(Lane::B) => "same_host = server does without lane B",
        Some(Lane::A) => "same_host = off does without lanes A and B",
        _ => "kernel_path = auto would start without lanes",
    };
    format!("kernel_path = require, but {noun} {} {verb} not work; {remedy}. {why}", names.join(", "))
}

/// A client's place in the lanes. Dropped before its socket is closed.
pub(crate) struct ClientLane {
    pub lanes: Arc<Lanes>,
    pub slot: ClientSlot,
    /// Bytes read from the socket since registration.
    pub read_total: u64,
    /// All that programs forwarded to it is in its send queue: user space may write.
    pub drained: bool,
    /// The datapath holds a link that user space has taken over.
    pub linked: bool,
    /// Session pooling: its links are pinned.
    pub session: bool,
    /// User space reads its requests while a program forwards the answers: see `worker/feed.rs`.
    pub fed: bool,
    /// What the server of a fed link has not taken yet, under its names. The first to be written when user space has the link.
    pub owed: Vec<u8>,
    /// Refusals by its requests' nature with hardly a transaction in the lane between them, and the transactions at the last one.
    refusals: u32,
    refused_after: u64,
    /// It does so again and again: user space keeps it until then.
    pub not_before: Option<Instant>,
    /// What the programs know of its prepared statements, and as of which change.
    statements: HashMap<Box<[u8]>, u32, RandomState>,
    statement_changes: u64,
    /// Bytes that the lane had carried when the client was given to it last.
    pub carried_at_give: u64,
    /// What has been added to the statistics already.
    pub counted: underpass_sockmap::ClientStats,
    /// What the programs tell about it, while they have it and it is mirrored.
    pub tap: Option<TapStream>,
    /// What of it is for user space while its mirrors in `mode = sync` are behind.
    pub waits: Option<TapWaits>,
}

/// The number by which programs know a statement that they can rename from `name`: ids that do not fit, and names of another length
/// than the servers', stay with user space.
fn lane_statement(name: &[u8], statement: &Statement) -> Option<u32> {
    let fits = name.len() <= STATEMENT_NAME_MAX && statement.name.len() == name.len();
    u32::try_from(statement.id).ok().filter(|_| fits)
}

impl ClientLane {
    /// Brings what the programs know of the client's statements up to date. Only while user space holds the client.
    pub fn tell_statements(&mut self, now: &ClientStatements) {
        if self.statement_changes == now.changes() {
            return;
        }
        self.statement_changes = now.changes();
        let (datapath, slot) = (&self.lanes.datapath, self.slot);
        self.statements.retain(|name, number| {
            let same = now.get(name).and_then(|statement| lane_statement(name, statement)) == Some(*number);
            if !same {
                let _ = datapath.forget_client_statement(slot, name);
            }
            same
        });
        for (name, statement) in now.iter() {
            let Some(number) = lane_statement(name, statement) else { continue };
            if !self.statements.contains_key(name)
                && datapath.set_client_statement(slot, name, number).is_ok()
            {
                self.statements.insert(name.into(), number);
            }
        }
    }

    /// Whether user space may write to the client. What cannot be told at this moment is asked again.
    pub fn is_clear(&mut self) -> bool {
        self.drained = self.drained || self.lanes.datapath.client_drained(self.slot).unwrap_or(false);
        self.drained
    }

    /// The lane refused what the client sent, by its nature. True if that is what this client mostly does; a few refusals may be the
    /// first Parse messages of statements that are used for hours.
    pub fn refused(&mut self) -> bool {
        let carried = self.lanes.datapath.client_info(self.slot).map_or(0, |info| info.stats.xacts);
        let worthwhile = carried.saturating_sub(self.refused_after) >= CARRIED_MIN;
        self.refused_after = carried;
        self.refusals = if worthwhile { 0 } else { self.refusals + 1 };
        self.refusals > REFUSALS_MAX
    }

    /// Ends a link that user space took over.
    pub fn unlink(&mut self) {
        if std::mem::take(&mut self.linked) {
            if let Err(error) = self.lanes.datapath.unlink(self.slot) {
                log::error!("kernel lanes: unlink: {error}");
            }
        }
    }
}

impl Drop for ClientLane {
    fn drop(&mut self) {
        // A program runs for microseconds; it cannot keep a slot busy.
        for _ in 0..10_000 {
            match self.lanes.datapath.take(self.slot) {
                Ok(None) => std::thread::yield_now(),
                _ => break,
            }
        }
        if let Ok(Some(server)) = self.lanes.datapath.unlink(self.slot) {
            // It was never taken over, because its client could not be taken: nobody else knows of it.
            lock(&self.lanes.doubted).insert(server);
        }
        for name in self.statements.keys() {
            let _ = self.lanes.datapath.forget_client_statement(self.slot, name);
        }
        match self.lanes.datapath.free_client(self.slot) {
            Ok(doubted) => lock(&self.lanes.doubted).extend(doubted),
            Err(error) => log::error!("kernel lanes: free_client: {error}"),
        }
        lock(&self.lanes.clients).remove(&self.slot);
    }
}

/// A server's place in the lanes. Dropped before its socket is closed.
pub(crate) struct ServerLane {
    lanes: Arc<Lanes>,
    pub slot: ServerSlot,
    lane: Lane,
    /// [`LanePool::servers`] of its pool.
    siblings: Arc<AtomicU32>,
    /// Bytes read from the socket since registration.
    pub read_total: u64,
    /// All that programs forwarded to it has arrived: user space may write.
    pub drained: bool,
    /// What the programs know of its prepared statements, and as of which change.
    statements: HashSet<u32, RandomState>,
    statement_changes: u64,
    /// The home worker's epoll.
    pub epoll: Arc<OwnedFd>,
}

impl ServerLane {
    /// As [`ClientLane::tell_statements`], while user space owns the server.
    fn tell_statements(&mut self, now: &ServerStatements) {
        if self.statement_changes == now.changes() {
            return;
        }
        self.statement_changes = now.changes();
        let (datapath, slot) = (&self.lanes.datapath, self.slot);
        let mut held = HashSet::with_hasher(RandomState::default());
        for statement in now.iter() {
            let Some(number) = lane_statement(&statement.name, statement) else { continue };
            if self.statements.contains(&number)
                || datapath.set_server_statement(slot, number, &statement.name).is_ok()
            {
                held.insert(number);
            }
        }
        for &gone in self.statements.difference(&held) {
            let _ = datapath.forget_server_statement(slot, gone);
        }
        self.statements = held;
    }

    /// Whether user space may write to the server, likewise.
    pub fn is_clear(&mut self) -> bool {
        self.drained = self.drained || self.lanes.datapath.server_drained(self.slot).unwrap_or(false);
        self.drained
    }

    /// Bytes that came for user space and are not read.
    pub fn unread(&self) -> u64 {
        self.lanes.datapath.server_unread(self.slot, self.read_total).unwrap_or(0)
    }

    /// Lane A leaves the pooler's own socket to user space, which nothing wakes while the kernel forwards.
    fn is_watched_apart(&self) -> bool {
        self.lane == Lane::D
    }
}

impl Drop for ServerLane {
    fn drop(&mut self) {
        self.siblings.fetch_sub(1, Ordering::Relaxed);
        let _ = self.lanes.datapath.take_idle(self.slot);
        for &number in &self.statements {
            let _ = self.lanes.datapath.forget_server_statement(self.slot, number);
        }
        if let Err(error) = self.lanes.datapath.free_server(self.slot) {
            log::error!("kernel lanes: free_server: {error}");
        }
        lock(&self.lanes.doubted).remove(&self.slot);
        if let Some(id) = lock(&self.lanes.servers).remove(&self.slot) {
            lock(&self.lanes.slots).remove(&id);
        }
    }
}

/// Prepares a server for the kernel: programs know its statements, and nothing but a hang-up of it wakes its worker. Its slot, and how
/// much of it user space has read.
pub(crate) fn hand_over(server: &mut Server) -> Option<(ServerSlot, u64)> {
    let lane = server.lane.as_mut()?;
    lane.tell_statements(&server.link.statements);
    // First: from the hand-over on a program may be reading.
    leave_server(lane, server.transport.fd(), server.key);
    Some((lane.slot, lane.read_total))
}

/// Watches a client for user space, or for hang-ups only.
pub(crate) fn watch_client(client: &mut Client, epoll: &OwnedFd, token: u64, in_kernel: bool) {
    client.transport.watched_otherwise();
    let interest = if in_kernel { KERNEL_INTEREST } else { USER_INTEREST };
    if let Err(error) = epoll::modify(epoll, client.transport.fd(), EventData::new_u64(token), interest) {
        log_socket!(Error, client.label(), "lane", "epoll: {error}");
    }
}

/// Watches a server for hang-ups only.
pub(crate) fn leave_server(lane: &ServerLane, fd: BorrowedFd<'_>, key: Key) {
    if lane.is_watched_apart() {
        let token = EventData::new_u64(crate::worker::server_token(key));
        let _ = epoll::modify(lane.epoll.as_fd(), fd, token, KERNEL_INTEREST);
    }
}

/// Watches a server for user space again, after a lane had it.
pub(crate) fn watch_server(server: &Server) {
    if let Some(lane) = server.lane.as_ref().filter(|lane| lane.is_watched_apart()) {
        let token = crate::worker::server_token(server.key);
        if let Err(error) =
            epoll::modify(lane.epoll.as_fd(), server.transport.fd(), EventData::new_u64(token), USER_INTEREST)
        {
            log_socket!(Error, server.label(), "lane", "epoll: {error}");
        }
    }
}

/// The programs' clock.
pub(crate) fn monotonic_ns() -> u64 {
    let clock = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    clock.tv_sec as u64 * 1_000_000_000 + clock.tv_nsec as u64
}

/// Clients that workers are to take out of their lanes.
#[derive(Debug, Default)]
pub(crate) struct Called {
    any: AtomicBool,
    clients: Mutex<Vec<ClientSlot>>,
}

impl Called {
    pub fn add(&self, clients: Vec<ClientSlot>) {
        if !clients.is_empty() {
            // Under the lock: who takes them has cleared it before.
            let mut all = lock(&self.clients);
            all.extend(clients);
            self.any.store(true, Ordering::Release);
        }
    }
}
