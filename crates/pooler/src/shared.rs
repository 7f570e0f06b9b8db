// SPDX-License-Identifier: Apache-2.0
//! What all workers share.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Instant, SystemTime};

use arc_swap::ArcSwap;
use foldhash::fast::RandomState;
use underpass_config::{CONSOLE_DATABASE, Database, Host, PoolMode};
use underpass_console::{SocketId, Timestamp, text};
use underpass_pool::core::ClientRef;
use underpass_pool::params::{ParameterSet, ParameterTable, SharedParameters};
use underpass_pool::prepared::Statements;
use underpass_pool::{Core, PoolId};

use crate::acceptors::Acceptors;
use crate::control::Control;
use crate::deriver::Deriver;
use crate::gather::Periods;
use crate::lanes::Lanes;
use crate::logging;
use crate::metrics::Told;
use crate::mirrors::Mirrors;
use crate::peers::PeerQueues;
use crate::pool::{DatabaseState, Pool, PoolSettings, UserState};
use crate::recording::Recordings;
use crate::resolver::Resolver;
use crate::server::Server;
use crate::settings::Settings;
use crate::why::{Own, Tally};
use crate::worker::Worker;

/// Work that one worker gives another.
pub(crate) type Task = Box<dyn FnOnce(&mut Worker) + Send>;

/// How far a shutdown has come.
pub(crate) mod phase {
    /// Business as usual.
    pub const RUNNING: u8 = 0;
    /// SUSPEND.
    pub const SUSPENDED: u8 = 1;
    /// SHUTDOWN WAIT_FOR_SERVERS, SIGINT.
    pub const WAIT_FOR_SERVERS: u8 = 2;
    /// SHUTDOWN WAIT_FOR_CLIENTS, SIGTERM.
    pub const WAIT_FOR_CLIENTS: u8 = 3;
    /// At once.
    pub const IMMEDIATE: u8 = 4;
}

/// A worker's letter box.
pub(crate) struct Mailbox {
    tasks: Mutex<Vec<Task>>,
    /// Whether the worker was woken and has not looked yet.
    rung: AtomicBool,
    pub bell: OwnedFd,
    /// The worker's epoll instance: a server that moves takes its registration along.
    pub epoll: Arc<OwnedFd>,
}

impl Mailbox {
    pub fn new(epoll: OwnedFd) -> rustix::io::Result<Self> {
        let bell = rustix::event::eventfd(
            0,
            rustix::event::EventfdFlags::NONBLOCK | rustix::event::EventfdFlags::CLOEXEC,
        )?;
        Ok(Self { tasks: Mutex::default(), rung: AtomicBool::new(false), bell, epoll: Arc::new(epoll) })
    }

    pub fn post(&self, task: Task) {
        lock(&self.tasks).push(task);
        if !self.rung.swap(true, Ordering::AcqRel) {
            // It only fails when the counter is full, and then the worker wakes anyway.
            let _ = rustix::io::write(self.bell.as_fd(), &1u64.to_ne_bytes());
        }
    }

    pub fn take(&self) -> Vec<Task> {
        let _ = rustix::io::read(self.bell.as_fd(), &mut [0u8; 8]);
        self.rung.store(false, Ordering::Release);
        std::mem::take(&mut lock(&self.tasks))
    }
}

/// A poisoned lock means that a thread panicked, which ends the process; until then its data is as good as any.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Who is meant by a cancel key.
pub(crate) struct CancelTarget {
    pub client: ClientRef,
    /// What the request must carry beyond the first four secret bytes.
    pub tail: Box<[u8]>,
}

impl CancelTarget {
    /// `client.slot` of one that goes to another worker and is not there yet.
    pub const ON_ITS_WAY: u32 = u32::MAX;
}

/// The cancel keys of all clients, and what new ones are made of.
#[derive(Default)]
pub(crate) struct CancelKeys {
    pub targets: HashMap<u64, CancelTarget, RandomState>,
    pub random: Random,
}

/// Random bytes of the kernel, asked for in quantities. Each is given out once and kept no longer.
pub(crate) struct Random {
    bytes: [u8; Self::LEN],
    /// Bytes that were given out.
    used: usize,
}

impl Random {
    /// As many as getrandom(2) gives without interruption.
    const LEN: usize = 256;

    /// Fills `out` with bytes that nobody else gets.
    ///
    /// # Errors
    /// The kernel has none.
    pub fn fill(&mut self, out: &mut [u8]) -> Result<(), getrandom::Error> {
        for part in out.chunks_mut(Self::LEN) {
            if Self::LEN - self.used < part.len() {
                getrandom::fill(&mut self.bytes)?;
                self.used = 0;
            }
            let next = &mut self.bytes[self.used..self.used + part.len()];
            part.copy_from_slice(next);
            next.fill(0);
            self.used += part.len();
        }
        Ok(())
    }
}

impl Default for Random {
    fn default() -> Self {
        Self { bytes: [0; Self::LEN], used: Self::LEN }
    }
}

/// The state of the process.
pub(crate) struct Shared {
    pub settings: ArcSwap<Settings>,
    /// Whoever needs `names` too takes those first.
    pub core: Mutex<Core<Box<Server>>>,
    pub statements: Statements,
    pub parameters: Mutex<ParameterTable>,
    pub names: RwLock<Names>,
    pub mailboxes: Vec<Mailbox>,
    pub cancel_keys: Mutex<CancelKeys>,
    /// Cancel requests whose key was nobody's.
    pub cancel_keys_unknown: AtomicU64,
    /// Clients that were closed for an error, by what they were told.
    pub client_errors: Mutex<BTreeMap<Told, u64>>,
    pub clients: AtomicU32,
    /// Logins at each worker that a shutdown waits for; `u32::MAX` until the worker has closed its listening sockets and counted.
    pub logins: Vec<AtomicU32>,
    /// Tasks that every worker was given. Held while they are given one, and while a client goes from one to another.
    pub broadcasts: Mutex<u64>,
    /// Who takes the next one.
    pub acceptors: Acceptors,
    pub next_socket: AtomicU32,
    pub phase: AtomicU8,
    /// PAUSE of everything, which a shutdown that waits for clients leaves in force.
    pub paused: AtomicBool,
    /// Counts RECONNECT, RELOAD and other events after which servers are obsolete, for WAIT_CLOSE.
    pub epoch: AtomicU64,
    /// Cancel requests for other poolers.
    pub peers: PeerQueues,
    pub resolver: Resolver,
    pub deriver: Deriver,
    /// Kernel lanes, where they work and are wanted.
    pub lanes: Option<Arc<Lanes>>,
    /// Transactions that ended in user space where there are lanes, by worker.
    pub user_xacts: Vec<Tally>,
    pub control: Control,
    pub mirrors: Mirrors,
    pub recordings: Recordings,
    pub started: Instant,
    pub started_wall: SystemTime,
    /// Snapshots of the counters at the ends of `stats_period`. The main thread rolls them.
    pub periods: Mutex<Periods>,
}

/// Databases, users and pools by name. What nobody uses any more is let go, because anybody can say a name: a pool when it is forgotten
/// ([`Shared::release_pools`]), names that no pool and no client has when there are many.
#[derive(Default)]
pub(crate) struct Names {
    pub databases: HashMap<String, Arc<DatabaseState>, RandomState>,
    pub users: HashMap<String, Arc<UserState>, RandomState>,
    /// By place.
    pools: Vec<Option<Arc<Pool>>>,
    pub pool_of: HashMap<(u32, u32), PoolId, RandomState>,
    /// Numbers given to users and databases. None is given twice.
    numbered: u32,
    /// Users and databases when the unused ones were dropped last.
    kept: usize,
}

/// Names that were said since the unused ones were dropped last, and may be kept for now.
const UNUSED_NAMES_MAX: usize = 64;

impl Names {
    fn number(&mut self) -> u32 {
        let number = self.numbered;
        self.numbered = number.checked_add(1).expect("4 billion names of users and databases");
        number
    }

    /// The pool, if it exists.
    pub fn pool(&self, id: PoolId) -> Option<&Arc<Pool>> {
        self.pools.get(id.index())?.as_ref().filter(|pool| pool.id == id)
    }

    pub fn pools(&self) -> impl Iterator<Item = &Arc<Pool>> {
        self.pools.iter().flatten()
    }

    /// The pool that a database and a user have.
    fn pool_of(&self, database: &DatabaseState, user: &UserState) -> Option<&Arc<Pool>> {
        self.pool_of.get(&(database.number, user.number)).and_then(|id| self.pool(*id))
    }

    /// Whether there may be so many unused names that looking for them pays.
    fn has_many_unused(&self) -> bool {
        self.users.len() + self.databases.len() > self.kept + self.kept / 8 + UNUSED_NAMES_MAX
    }
}

impl Shared {
    pub fn next_socket_id(&self) -> SocketId {
        let number = self.next_socket.fetch_add(1, Ordering::Relaxed) % (i32::MAX as u32) + 1;
        SocketId::new(number.into()).unwrap_or(SocketId::FIRST)
    }

    /// Wall-clock time of an instant of this process.
    pub fn timestamp(&self, at: Instant) -> Timestamp {
        let since_start = at.saturating_duration_since(self.started);
        let since_epoch =
            self.started_wall.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default() + since_start;
        Timestamp(since_epoch.as_micros() as u64)
    }

    /// All addresses that the hosts of `pool` are known to have, if `name` is one of them.
    pub fn addresses(&self, pool: &Pool, name: &str) -> Option<Vec<IpAddr>> {
        let database = pool.database.settings.load();
        let hosts = database.host.as_ref()?.hosts();
        hosts.iter().any(|host| matches!(host, Host::Name(other) if other == name)).then(|| {
            let of = |host: &Host| match host {
                Host::Ip(address) => [*address].into(),
                Host::Name(name) => self.resolver.last_known(name),
                Host::Unix(_) | Host::Abstract(_) => Arc::default(),
            };
            hosts.iter().flat_map(|host| of(host).to_vec()).collect()
        })
    }

    /// The database `name` as a client may use it now; `None` if there is none.
    pub fn database(&self, name: &str) -> Option<Arc<DatabaseState>> {
        let settings = self.settings.load();
        if settings.config.databases.contains(name) {
            let names = self.names.read().unwrap_or_else(PoisonError::into_inner);
            let known = names.databases.get(name).filter(|known| !known.forgotten.load(Ordering::Relaxed));
            if let Some(known) = known {
                return Some(known.clone());
            }
        }
        let (configured, is_auto) = settings.config.database(name)?;
        Some(self.database_state(configured, is_auto))
    }

    pub fn database_state(&self, configured: Database, is_auto: bool) -> Arc<DatabaseState> {
        let known = self
            .names
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .databases
            .get(&configured.name)
            .cloned();
        if let Some(state) = known {
            self.revive(&state, configured, is_auto);
            return state;
        }
        let mut names = self.names.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(state) = names.databases.get(&configured.name) {
            return state.clone();
        }
        if is_auto {
            logging::phrase(None, &text::auto_database(&configured.name));
        }
        let state = Arc::new(DatabaseState {
            number: names.number(),
            name: configured.name.clone(),
            settings: ArcSwap::from_pointee(configured),
            is_auto: AtomicBool::new(is_auto),
            is_mirror: false,
            disabled: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            killed: AtomicBool::new(false),
            forgotten: AtomicBool::new(false),
            clients: AtomicU32::new(0),
            next_host: Default::default(),
            tls_failures: Default::default(),
        });
        names.databases.insert(state.name.clone(), state.clone());
        state
    }

    /// Drops the users and automatic databases that nobody holds: no client that is here, no pool. Whoever gets one of them holds it, and gets it
    /// under the lock, so that no name has two states.
    pub fn drop_unused_names(&self) {
        if !self.names.read().unwrap_or_else(PoisonError::into_inner).has_many_unused() {
            return;
        }
        let mut names = self.names.write().unwrap_or_else(PoisonError::into_inner);
        names.users.retain(|_, user| Arc::strong_count(user) > 1);
        names.databases.retain(|_, database| {
            let is_gone = |it: &AtomicBool| it.load(Ordering::Relaxed);
            Arc::strong_count(database) > 1
                || !(is_gone(&database.is_auto) || is_gone(&database.forgotten))
                || database.paused.load(Ordering::Relaxed)
                || database.disabled.load(Ordering::Relaxed)
        });
        names.kept = names.users.len() + names.databases.len();
        let Names { users, databases, .. } = &mut *names;
        users.shrink_to(2 * users.len());
        databases.shrink_to(2 * databases.len());
    }

    /// A forgotten database is asked for again: it is a new one, apart from its number.
    fn revive(&self, state: &DatabaseState, configured: Database, is_auto: bool) {
        if state.forgotten.load(Ordering::Relaxed) {
            state.settings.store(Arc::new(configured));
            state.is_auto.store(is_auto, Ordering::Relaxed);
            if state.forgotten.swap(false, Ordering::AcqRel) && is_auto {
                logging::phrase(None, &text::auto_database(&state.name));
            }
        }
    }

    pub fn user(&self, name: &str) -> Arc<UserState> {
        if let Some(state) = self.names.read().unwrap_or_else(PoisonError::into_inner).users.get(name) {
            return state.clone();
        }
        let mut names = self.names.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(state) = names.users.get(name) {
            return state.clone();
        }
        let (number, name) = (names.number(), name.to_owned());
        let state = Arc::new(UserState { number, name: name.clone(), clients: AtomicU32::new(0) });
        names.users.insert(name, state.clone());
        state
    }

    /// The pool of `user` on `database`, made if there is none.
    pub fn pool(&self, database: &Arc<DatabaseState>, user: &Arc<UserState>, now: Instant) -> Arc<Pool> {
        {
            let names = self.names.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(pool) = names.pool_of(database, user) {
                let pool = pool.clone();
                if pool.forgotten.swap(false, Ordering::AcqRel) {
                    self.refresh(&pool);
                    let mut core = lock(&self.core);
                    core.keep_minimum(pool.id, true);
                    pool.removed.store(false, Ordering::Release);
                    core.set_paused(pool.id, self.is_held(database));
                }
                return pool;
            }
        }
        let mut names = self.names.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(pool) = names.pool_of(database, user) {
            return pool.clone();
        }
        let settings = self.settings.load();
        let configured = database.settings.load();
        let id = {
            let mut core = lock(&self.core);
            let limits = || settings.pool_limits(&configured, &user.name);
            let id = core.pool(database.number, user.number, limits);
            core.set_paused(id, self.is_held(database));
            id
        };
        let pool_settings = PoolSettings::new(&settings, &configured, &user.name).of(database);
        // It keeps its place while a recording or a mirror keeps it out.
        let may = |lanes: &&Arc<Lanes>| lanes.refuses(&pool_settings).is_none() && !database.is_mirror;
        let lane = self.lanes.as_ref().filter(may).and_then(|lanes| {
            let (place, idle) = lanes.add_pool(id, now)?;
            lanes.configure_pool(&place, &pool_settings);
            lock(&self.core).share_idle(id, idle);
            Some(place)
        });
        let refused = self.lanes_refuse(&settings, database, &pool_settings);
        let pool = Arc::new(Pool::new(id, lane, database.clone(), user.clone(), pool_settings));
        pool.set_lane_refused(refused);
        if id.index() >= names.pools.len() {
            names.pools.resize(id.index() + 1, None);
        }
        names.pools[id.index()] = Some(pool.clone());
        names.pool_of.insert((database.number, user.number), id);
        pool
    }

    /// Whether PAUSE, KILL or a shutdown keeps the database's clients waiting.
    pub fn is_paused(&self, database: &DatabaseState) -> bool {
        self.paused.load(Ordering::Acquire)
            || self.phase.load(Ordering::Acquire) == phase::WAIT_FOR_SERVERS
            || database.paused.load(Ordering::Acquire)
    }

    /// The same, or SUSPEND: whether servers of the database's pools are granted and opened at all.
    pub fn is_held(&self, database: &DatabaseState) -> bool {
        self.is_paused(database) || self.phase.load(Ordering::Acquire) == phase::SUSPENDED
    }

    /// Why kernel lanes may not carry a pool. What is recorded must be seen here, and what goes to a mirror comes from here.
    fn lanes_refuse(
        &self,
        settings: &Settings,
        database: &DatabaseState,
        pool: &PoolSettings,
    ) -> Option<Own> {
        let Some(lanes) = &self.lanes else { return Some(Own::NoPlace) };
        // Links of a session are not its transactions, which is what a tap tells.
        let is_told = pool.mode == PoolMode::Transaction && lanes.datapath.has_tap();
        if database.is_mirror || !Mirrors::suit_lanes(&settings.config, &database.name, is_told) {
            return Some(Own::Mirrored);
        }
        lanes.refuses(pool).or(self.recordings.is_on().then_some(Own::Recorded))
    }

    /// Gives a pool the settings now in force. True if its links must be made anew to have them.
    pub fn refresh(&self, pool: &Pool) -> bool {
        let settings = self.settings.load();
        let configured = pool.database.settings.load();
        let fresh = PoolSettings::new(&settings, &configured, &pool.user.name).of(&pool.database);
        let old = pool.settings.load();
        // What a session has left on a server is not to be met by who comes between its transactions.
        let is_other_mode = old.mode == PoolMode::Session && fresh.mode != PoolMode::Session;
        let is_other_link = fresh.link != old.link || is_other_mode;
        pool.set_lane_refused(self.lanes_refuse(&settings, &pool.database, &fresh));
        if let (Some(lanes), Some(place)) = (&self.lanes, &pool.lane) {
            lanes.configure_pool(place, &fresh);
        }
        pool.set_settings(fresh);
        lock(&self.core).set_limits(pool.id, settings.pool_limits(&configured, &pool.user.name));
        is_other_link
    }

    pub fn pools(&self) -> Vec<Arc<Pool>> {
        self.names.read().unwrap_or_else(PoisonError::into_inner).pools().cloned().collect()
    }

    /// Lets go of forgotten pools that nobody has: no client, no server, no message on its way. Whoever gets a pool gets it under the lock
    /// of the names and keeps it while it has to do with it, so that a pool is let go as a whole or not at all, and its name leads to a new
    /// one. What knows a pool by its number alone finds nothing then: see [`PoolId`].
    pub fn release_pools(&self, now: Instant) {
        if let Some(lanes) = &self.lanes {
            lanes.free_pools(now);
        }
        let is_over = |pool: &Arc<Pool>| {
            let is_forgotten = |forgotten: &AtomicBool| forgotten.load(Ordering::Acquire);
            (is_forgotten(&pool.forgotten) || is_forgotten(&pool.database.forgotten))
                && Arc::strong_count(pool) == 1
        };
        if !self.names.read().unwrap_or_else(PoisonError::into_inner).pools().any(is_over) {
            return;
        }
        let mut names = self.names.write().unwrap_or_else(PoisonError::into_inner);
        let Names { pools, pool_of, .. } = &mut *names;
        for place in pools {
            let Some(pool) = place.take_if(|pool| is_over(pool) && lock(&self.core).remove(pool.id)) else {
                continue;
            };
            pool_of.remove(&(pool.database.number, pool.user.number));
            lock(&self.control.idle_pools).remove(&pool.id);
            if let (Some(lanes), Some(place)) = (&self.lanes, &pool.lane) {
                lanes.leave_pool(place, now);
            }
        }
        pool_of.shrink_to(2 * pool_of.len());
    }

    pub fn databases(&self) -> Vec<Arc<DatabaseState>> {
        let names = self.names.read().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = names.databases.values().cloned().collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// Those that SHOW DATABASES shows.
    pub fn shown_databases(&self) -> Vec<Arc<DatabaseState>> {
        let mut databases = self.databases();
        databases.retain(|database| !database.forgotten.load(Ordering::Relaxed));
        databases
    }

    /// How many [`Shared::user_names`] are. Without a list of them: each scrape of the metrics asks.
    pub fn user_count(&self) -> usize {
        let settings = self.settings.load();
        let (listed, configured) = (&settings.users, &settings.config.users);
        let names = self.names.read().unwrap_or_else(PoisonError::into_inner);
        let is_listed = |name: &str| listed.contains_key(name) || configured.contains_key(name);
        let only_configured = configured.keys().filter(|name| !listed.contains_key(*name)).count();
        let others = names.users.values().filter(|user| !is_listed(&user.name)).count();
        let console =
            !is_listed(CONSOLE_DATABASE) && names.users.values().all(|user| user.name != CONSOLE_DATABASE);
        listed.len() + only_configured + others + usize::from(console)
    }

    /// The names that SHOW USERS shows: of `auth_file`, of `[users]`, and of those who have been here.
    pub fn user_names(&self) -> BTreeSet<String> {
        let settings = self.settings.load();
        let mut names: BTreeSet<String> =
            settings.users.keys().chain(settings.config.users.keys()).cloned().collect();
        names.extend(self.users().iter().map(|user| user.name.clone()));
        names.insert(CONSOLE_DATABASE.to_owned());
        names
    }

    pub fn users(&self) -> Vec<Arc<UserState>> {
        let names = self.names.read().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = names.users.values().cloned().collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// The one shared copy of a set of parameters: thousands of clients have the same.
    pub fn intern_parameters(&self, set: ParameterSet) -> SharedParameters {
        lock(&self.parameters).intern(set)
    }

    /// Whether a shutdown leaves clients in peace until they go by themselves.
    pub fn waits_for_clients(&self) -> bool {
        self.phase.load(Ordering::Relaxed) == phase::WAIT_FOR_CLIENTS
    }

    /// Gives every worker a task.
    pub fn broadcast(&self, task: impl Fn(&mut Worker) + Send + Sync + 'static) {
        let task = Arc::new(task);
        let mut broadcasts = lock(&self.broadcasts);
        *broadcasts += 1;
        for mailbox in &self.mailboxes {
            let task = task.clone();
            mailbox.post(Box::new(move |worker| {
                worker.broadcasts_done += 1;
                task(worker);
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_bytes_are_given_out_once() {
        let mut random = Random::default();
        let mut seen = BTreeSet::new();
        for _ in 0..1000 {
            let mut bytes = [0; 8];
            random.fill(&mut bytes).expect("random bytes");
            assert!(seen.insert(bytes), "twice");
            assert!(random.bytes[..random.used].iter().all(|byte| *byte == 0), "kept");
        }
        // More than is asked for at a time.
        let mut long = [0; 3 * Random::LEN];
        random.fill(&mut long).expect("random bytes");
        assert!(long.chunks(16).all(|part| part.iter().any(|byte| *byte != 0)));
    }
}
