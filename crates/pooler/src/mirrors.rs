// SPDX-License-Identifier: Apache-2.0
//! Mirrors as all threads share them: where each leads, whether it may be sent to, its account, and the table of differences.
//!
//! What one client says is mirrored by its own worker (`worker/mirror`), over servers of an ordinary pool whose database is the mirror.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};
use underpass_config::{
    CompareRows, Config, Database, HostList, Mirror, MirrorMode, MirrorOverflow, MirrorSend, SyncEach,
};
use underpass_mirror::{
    Answer, Budget, Counters, Differences, DropReason, Row, RowHash, Texts, Times, Transaction,
};

use crate::pool::{DatabaseState, Pool, UserState};
use crate::shared::{Shared, lock};

/// Numbers of databases and users that are mirrors': apart from those of clients, which count from 0.
const FIRST_NUMBER: u32 = 1 << 31;
/// Transactions that wait for their comparison, in batches of a worker. What is over it is not compared, and counted.
const BATCHES_MAX: usize = 64;
/// What they may take, in bytes, likewise: a transaction may be long.
const COMPARED_BYTES_MAX: u64 = 64 << 20;

/// Whether a mirror is sent to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    /// Nobody has needed it yet, or it is worth another attempt.
    Unchecked,
    /// It and the primary are asked who they are.
    Checking,
    /// It gets what clients say.
    On,
    /// It cannot be reached, or refuses; tried again after `server_login_retry`.
    Down,
    /// DISABLE MIRROR.
    Disabled,
    /// Switched off by the pooler, until ENABLE MIRROR.
    Failed,
    /// It is the primary itself.
    Same,
}

/// Servers of a primary or a mirror that are remembered: more than there are hosts behind a name.
const IDENTITIES_MAX: usize = 16;
/// Why a mirror is [`State::Same`].
const SAME_SERVER: &str = "primary and mirror are the same server";
/// Why a mirror is [`State::Disabled`].
const SWITCHED_OFF: &str = "DISABLE MIRROR";
/// The same, of one that clients have left.
const REMOVED: &str = "RELOAD removed it";

impl State {
    const ALL: [Self; 7] =
        [Self::Unchecked, Self::Checking, Self::On, Self::Down, Self::Disabled, Self::Failed, Self::Same];

    /// As SHOW MIRRORS has it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unchecked => "unchecked",
            Self::Checking => "checking",
            Self::On => "on",
            Self::Down => "down",
            Self::Disabled => "disabled",
            Self::Failed => "failed",
            Self::Same => "same_server",
        }
    }
}

/// A mirror of one database.
pub(crate) struct MirrorState {
    pub name: Arc<str>,
    /// The database that is mirrored, as clients name it.
    pub database: Arc<str>,
    /// The database that mirror sessions use.
    pub target: Arc<DatabaseState>,
    /// The database itself, as it was configured when the two were asked who they are.
    primary: ArcSwap<Database>,
    /// Changes whenever one of the two may be another server, or the mirror's sessions are to be others.
    generation: AtomicU32,
    pub settings: ArcSwap<Mirror>,
    pub counters: Counters,
    /// Shared by all databases of the mirror.
    pub budget: Arc<Budget>,
    state: AtomicU8,
    /// Why it is in that state, if there is something to say.
    why: ArcSwapOption<String>,
    /// Whether the log has been told of a session that cannot be had there.
    has_refused: AtomicBool,
    /// When it may be tried again.
    retry_at: Mutex<Option<Instant>>,
    /// Who the primary and the mirror say they are.
    identities: Mutex<Identities>,
    /// Those of this name and database that RELOAD took away before: sessions may still be at what was said to them, and end with this one.
    before: Vec<Weak<MirrorState>>,
}

impl MirrorState {
    pub fn state(&self) -> State {
        State::ALL[usize::from(self.state.load(Ordering::Acquire))]
    }

    pub fn why(&self) -> Option<Arc<String>> {
        self.why.load_full()
    }

    /// Of the two servers: what is queued for those of another generation is for nobody.
    pub fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    pub fn is_sync(&self) -> bool {
        self.settings.load().mode == MirrorMode::Sync
    }

    /// Whether statements go there as they come.
    pub fn takes_statements(&self) -> bool {
        let settings = self.settings.load();
        settings.mode == MirrorMode::Sync && settings.sync_each == SyncEach::Statement
    }

    /// How its rows are compared.
    pub fn row_hash(&self) -> RowHash {
        match self.settings.load().compare_rows {
            CompareRows::Off => RowHash::Off,
            CompareRows::Ordered => RowHash::Ordered,
            CompareRows::Unordered => RowHash::Unordered,
        }
    }

    /// Whether a transaction that begins now goes there.
    pub fn admits(&self) -> Result<(), DropReason> {
        match self.state() {
            State::On => Ok(()),
            State::Unchecked | State::Checking | State::Down => Err(DropReason::NotReady),
            State::Disabled | State::Failed | State::Same => Err(DropReason::Disabled),
        }
    }

    fn set(&self, state: State, why: Option<String>) {
        self.why.store(why.map(Arc::new));
        self.state.store(state as u8, Ordering::Release);
    }

    fn change(&self, from: State, to: State) -> bool {
        self.state.compare_exchange(from as u8, to as u8, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Whether the caller is to find out who the two servers are: at first, and when a mirror that was down is worth another attempt. Then the number
    /// of this attempt.
    pub fn begin_check(&self, now: Instant) -> Option<u32> {
        let is_due = match self.state() {
            State::Unchecked => true,
            State::Down => lock(&self.retry_at).is_none_or(|at| now >= at),
            _ => return None,
        };
        // Whoever answers sees the number of the attempt that is under way.
        let mut identities = lock(&self.identities);
        let begins = is_due
            && (self.change(State::Unchecked, State::Checking) || self.change(State::Down, State::Checking));
        begins.then(|| {
            identities.attempt = identities.attempt.wrapping_add(1);
            identities.told = [None, None];
            identities.attempt
        })
    }

    /// The primary (0) or the mirror (1) has said who it is, or cannot be asked. An answer to an attempt before the last is nobody's: it may be of
    /// a server that was configured then.
    pub fn identified(
        &self,
        (attempt, side): (u32, usize),
        identity: Result<String, String>,
        retry: Duration,
        now: Instant,
    ) {
        let mut identities = lock(&self.identities);
        if identities.attempt != attempt {
            return;
        }
        if let Ok(identity) = &identity {
            identities.note(side, identity);
        }
        identities.told[side] = Some(identity);
        let [Some(here), Some(there)] = &identities.told else { return };
        let (state, why) = match (here, there) {
            (Ok(_), Ok(_)) if identities.are_same() => (State::Same, Some(SAME_SERVER.to_owned())),
            (Ok(_), Ok(_)) => (State::On, None),
            (Err(error), _) => (State::Down, Some(format!("primary: {error}"))),
            (_, Err(error)) => (State::Down, Some(format!("mirror: {error}"))),
        };
        *lock(&self.retry_at) = Some(now + retry);
        // RELOAD or DISABLE may have come in between.
        if !self.change(State::Checking, state) {
            return;
        }
        let (name, database) = (&self.name, &self.database);
        match &why {
            None => log::info!("mirror {name} of {database}: on"),
            Some(_) if state == State::Same => self.log_same(),
            Some(why) => log::warn!("mirror {name} of {database}: down: {why}"),
        }
        self.why.store(why.map(Arc::new));
    }

    fn log_same(&self) {
        log::error!(
            "mirror {} of {}: {SAME_SERVER}: it stays off; correct host or port and RELOAD, or RECONNECT and ENABLE MIRROR {} if a name led there",
            self.name,
            self.database,
            self.name
        );
    }

    /// A connection of the primary (0) or the mirror (1) that nobody has used yet has told who it leads to, or has not: returns why nothing is to
    /// be mirrored.
    fn server_told(
        &self,
        side: usize,
        told: &Result<String, String>,
        retry: Duration,
        now: Instant,
    ) -> Result<(), String> {
        match told {
            Ok(identity) => {
                let mut identities = lock(&self.identities);
                identities.note(side, identity);
                if !identities.are_same() {
                    return Ok(());
                }
                if matches!(self.state(), State::Same | State::Disabled | State::Failed) {
                    return Err(SAME_SERVER.to_owned());
                }
                // What is queued is for nobody, either.
                self.generation.fetch_add(1, Ordering::Release);
                self.set(State::Same, Some(SAME_SERVER.to_owned()));
                self.log_same();
                Err(SAME_SERVER.to_owned())
            }
            Err(error) => {
                let why = format!("{}: {error}", if side == 0 { "primary" } else { "mirror" });
                if self.is_sync() {
                    self.fail(&why);
                } else if self.change(State::On, State::Down) {
                    self.generation.fetch_add(1, Ordering::Release);
                    log::warn!("mirror {} of {}: down: {why}", self.name, self.database);
                    self.why.store(Some(Arc::new(why)));
                    *lock(&self.retry_at) = Some(now + retry);
                }
                Err(error.clone())
            }
        }
    }

    /// A session with the mirror broke. In `mode = sync` that is the end: its data are not the primary's any more.
    pub fn lost(&self, why: &str, retry: Duration, now: Instant) {
        if self.is_sync() {
            return self.fail(why);
        }
        if self.change(State::On, State::Down) {
            log::warn!("mirror {} of {}: down: {why}", self.name, self.database);
            self.why.store(Some(Arc::new(why.to_owned())));
            *lock(&self.retry_at) = Some(now + retry);
        }
    }

    /// Switches it off until somebody switches it on.
    pub fn fail(&self, why: &str) {
        if self.change(State::On, State::Failed) {
            log::error!(
                "mirror {} of {}: switched off: {why}; ENABLE MIRROR {} switches it on",
                self.name,
                self.database,
                self.name
            );
            self.why.store(Some(Arc::new(why.to_owned())));
            for before in self.before.iter().filter_map(Weak::upgrade) {
                before.set(State::Disabled, Some(why.to_owned()));
            }
        }
    }

    /// A session cannot be had there, while others can. Told once: the client may go on for hours, and `session_state` counts.
    pub fn log_refused(&self, why: &str) {
        if !self.has_refused.swap(true, Ordering::Relaxed) {
            log::warn!(
                "mirror {} of {}: a session cannot be had there: {why}; its transactions are dropped (session_state), further ones are not logged",
                self.name,
                self.database
            );
        }
    }

    /// Gives memory back, and obeys `overflow` when there was none.
    pub fn overflowed(&self, reason: DropReason) {
        let settings = self.settings.load();
        if settings.overflow == MirrorOverflow::Disable {
            let limit = match reason {
                DropReason::RingFull => "mirror_ring_bytes is too small".to_owned(),
                _ => format!("queue_bytes = {}", settings.queue_bytes),
            };
            self.fail(&format!("{}: {limit}", reason.name()));
        }
    }
}

/// Who the two servers of a mirror say that they are.
#[derive(Debug, Default)]
struct Identities {
    /// Number of the attempt to find out.
    attempt: u32,
    /// The primary, the mirror.
    told: [Option<Result<String, String>>; 2],
    /// Whoever the connections of either lead to, the latest last: since RELOAD changed where they lead, or RECONNECT.
    known: [VecDeque<String>; 2],
}

impl Identities {
    fn note(&mut self, side: usize, identity: &str) {
        let known = &mut self.known[side];
        if known.iter().any(|one| one == identity) {
            return;
        }
        if known.len() >= IDENTITIES_MAX {
            known.pop_front();
        }
        known.push_back(identity.to_owned());
    }

    /// Whether a server is the primary and the mirror.
    fn are_same(&self) -> bool {
        let [here, there] = &self.known;
        here.iter().any(|one| there.contains(one))
    }
}

/// A transaction that both servers have answered.
pub(crate) struct Compared {
    pub state: Arc<MirrorState>,
    pub transaction: Arc<Transaction>,
    pub there: Vec<Answer>,
    /// What it takes, about, in bytes.
    pub size: u64,
}

/// All mirrors.
#[derive(Default)]
pub(crate) struct Mirrors {
    /// By mirror and database; made when a client first needs them.
    all: Mutex<BTreeMap<(String, String), Arc<MirrorState>>>,
    /// Those that RELOAD took away, as long as somebody has them: what was said to them is still played.
    gone: Mutex<Vec<Weak<MirrorState>>>,
    budgets: Mutex<HashMap<String, Arc<Budget>>>,
    /// Mirrors that DISABLE MIRROR has switched off.
    off: Mutex<HashSet<String>>,
    users: Mutex<HashMap<String, Arc<UserState>>>,
    next_number: AtomicU32,
    /// Whether any is configured.
    is_any: AtomicBool,
    differences: Arc<Mutex<Differences>>,
    texts: Mutex<Texts>,
    comparer: OnceLock<SyncSender<Vec<Compared>>>,
    /// What waits for it takes so many bytes.
    compared_bytes: Arc<AtomicU64>,
}

impl Mirrors {
    /// Whether any is configured.
    pub fn is_any(&self) -> bool {
        self.is_any.load(Ordering::Relaxed)
    }

    /// Notes what is configured, at start and after a RELOAD. Returns the numbers of target databases whose servers are obsolete.
    pub fn configure(&self, config: &Config) -> Vec<u32> {
        self.is_any.store(!config.mirrors.is_empty(), Ordering::Relaxed);
        lock(&self.off).retain(|name| config.mirrors.contains_key(name));
        let mut obsolete = Vec::new();
        // A copy: whoever makes a state locks the budgets behind the states.
        let budgets = lock(&self.budgets).clone();
        for (name, budget) in &budgets {
            // Also one that nobody has now, and somebody may have again.
            if let Some(mirror) = config.mirrors.get(name) {
                budget.set_max(mirror.queue_bytes);
            }
        }
        lock(&self.all).retain(|(name, database), state| {
            let wanted = config.mirrors.get(name).filter(|mirror| mirror.covers(database));
            let (Some(mirror), Some((configured, _))) = (wanted, config.database(database)) else {
                lock(&self.differences).clear(name, Some(database));
                state.target.forgotten.store(true, Ordering::Release);
                obsolete.push(state.target.number);
                self.note_gone(state);
                return false;
            };
            let target = target(mirror, &configured);
            let is_other = state.target.settings.load().needs_reconnect(&target);
            let has_primary_moved = state.primary.load().needs_reconnect(&configured);
            state.target.settings.store(Arc::new(target));
            state.primary.store(Arc::new(configured));
            state.settings.store(Arc::new(mirror.clone()));
            if is_other {
                obsolete.push(state.target.number);
            }
            if is_other || has_primary_moved {
                lock(&state.identities).known = Default::default();
                state.generation.fetch_add(1, Ordering::Release);
            }
            // Whoever they are now has not been asked. The primary may have come to be where the mirror is.
            if (is_other || has_primary_moved) && !matches!(state.state(), State::Disabled | State::Failed) {
                state.set(State::Unchecked, None);
            }
            true
        });
        // Nobody could stop what is still said to a mirror that is not configured any more.
        for state in self.gone().iter().filter(|state| !config.mirrors.contains_key(&*state.name)) {
            let queued = state.counters.queued();
            if queued > 0 && state.state() != State::Disabled {
                log::warn!(
                    "mirror {} of {}: removed; {queued} transactions that wait for it are dropped",
                    state.name,
                    state.database
                );
            }
            state.set(State::Disabled, Some(REMOVED.to_owned()));
        }
        obsolete
    }

    /// RELOAD, or the end of its database, has taken a mirror away.
    fn note_gone(&self, state: &Arc<MirrorState>) {
        let mut gone = lock(&self.gone);
        gone.retain(|state| state.strong_count() > 0);
        gone.push(Arc::downgrade(state));
    }

    /// Those that RELOAD took away and somebody still has.
    fn gone(&self) -> Vec<Arc<MirrorState>> {
        lock(&self.gone).iter().filter_map(Weak::upgrade).collect()
    }

    /// Databases that are not known any more, until somebody asks for them again: what was counted goes with them, as their pools do. Returns the
    /// numbers of their target databases. Anybody can name a database of `*`, so nothing of one may stay.
    pub fn forget(&self, databases: &[Arc<DatabaseState>]) -> Vec<u32> {
        let is_over = |name: &str| databases.iter().any(|database| database.name == name);
        let mut targets = Vec::new();
        lock(&self.all).retain(|(name, database), state| {
            if !is_over(database) {
                return true;
            }
            lock(&self.differences).clear(name, Some(database));
            state.target.forgotten.store(true, Ordering::Release);
            targets.push(state.target.number);
            self.note_gone(state);
            false
        });
        targets
    }

    /// The mirrors of a database, in the order of their names.
    pub fn of(&self, config: &Config, database: &DatabaseState) -> Vec<Arc<MirrorState>> {
        let configured = config.mirrors.values().filter(|mirror| mirror.covers(&database.name));
        configured.map(|mirror| self.state(mirror, database)).collect()
    }

    /// Whether new connections to servers of a database are asked who they lead to: it is mirrored, or a mirror.
    pub fn concern(&self, config: &Config, database: &DatabaseState) -> bool {
        self.is_any()
            && (database.is_mirror || config.mirrors.values().any(|mirror| mirror.covers(&database.name)))
    }

    /// A new connection has told who it leads to, or has not.
    ///
    /// # Errors
    /// It is of a mirror, and is not to be used: somebody may wait for it with what the primary has executed.
    pub fn server_told(
        &self,
        config: &Config,
        database: &DatabaseState,
        told: &Result<String, String>,
        retry: Duration,
        now: Instant,
    ) -> Result<(), String> {
        if !database.is_mirror {
            // The primary serves its clients in any case.
            for state in self.of(config, database) {
                let _ = state.server_told(0, told, retry, now);
            }
            return Ok(());
        }
        let mut all = self.all().into_iter().chain(self.gone());
        let own = all.find(|state| state.target.number == database.number);
        own.map_or(Ok(()), |state| state.server_told(1, told, retry, now))
    }

    /// RECONNECT of a database, or of all with the mirrors: whoever their connections led to, others come.
    pub fn forget_servers(&self, database: Option<&DatabaseState>) {
        for state in self.all() {
            match database {
                Some(database) if *state.database != *database.name => {}
                Some(_) => lock(&state.identities).known[0].clear(),
                None => lock(&state.identities).known = Default::default(),
            }
        }
    }

    /// Whether kernel lanes may carry a database. They tell what they forward if `is_told`.
    pub fn suit_lanes(config: &Config, database: &str, is_told: bool) -> bool {
        is_told || !config.mirrors.values().any(|mirror| mirror.covers(database))
    }

    fn state(&self, mirror: &Mirror, database: &DatabaseState) -> Arc<MirrorState> {
        let key = (mirror.name.clone(), database.name.clone());
        let mut all = lock(&self.all);
        let make = || {
            let budget = lock(&self.budgets)
                .entry(mirror.name.clone())
                .or_insert_with(|| Arc::new(Budget::new(mirror.queue_bytes)))
                .clone();
            let primary = database.settings.load_full();
            let target = target(mirror, &primary);
            let is_off = lock(&self.off).contains(&mirror.name);
            let is_before =
                |one: &&Arc<MirrorState>| *one.name == *mirror.name && *one.database == *database.name;
            let before = self.gone().iter().filter(is_before).map(Arc::downgrade).collect();
            // Of one of before, of the same name.
            lock(&self.differences).clear(&mirror.name, Some(&database.name));
            let state = if is_off { State::Disabled } else { State::Unchecked };
            Arc::new(MirrorState {
                primary: ArcSwap::new(primary),
                generation: AtomicU32::default(),
                name: mirror.name.as_str().into(),
                database: database.name.as_str().into(),
                target: Arc::new(DatabaseState {
                    number: self.number(),
                    name: target.name.clone(),
                    settings: ArcSwap::from_pointee(target),
                    is_auto: AtomicBool::new(false),
                    is_mirror: true,
                    disabled: AtomicBool::new(false),
                    paused: AtomicBool::new(false),
                    killed: AtomicBool::new(false),
                    forgotten: AtomicBool::new(false),
                    clients: AtomicU32::new(0),
                    next_host: Default::default(),
                    tls_failures: Default::default(),
                }),
                settings: ArcSwap::from_pointee(mirror.clone()),
                counters: Counters::default(),
                budget,
                state: AtomicU8::new(state as u8),
                why: ArcSwapOption::new(is_off.then(|| Arc::new(SWITCHED_OFF.to_owned()))),
                has_refused: AtomicBool::new(false),
                retry_at: Mutex::default(),
                identities: Mutex::default(),
                before,
            })
        };
        all.entry(key).or_insert_with(make).clone()
    }

    fn number(&self) -> u32 {
        FIRST_NUMBER + self.next_number.fetch_add(1, Ordering::Relaxed)
    }

    /// All that somebody needed so far.
    pub fn all(&self) -> Vec<Arc<MirrorState>> {
        lock(&self.all).values().cloned().collect()
    }

    /// ENABLE MIRROR, DISABLE MIRROR. False if there is none of this name.
    pub fn switch(&self, config: &Config, name: &str, on: bool) -> bool {
        if !config.mirrors.contains_key(name) {
            return false;
        }
        // For the databases of which no client has come yet.
        if on {
            if lock(&self.off).remove(name) {
                // A new beginning: what was found before has been seen, and is perhaps mended.
                lock(&self.differences).clear(name, None);
            }
        } else {
            lock(&self.off).insert(name.to_owned());
        }
        for state in self.all().iter().filter(|state| &*state.name == name) {
            match on {
                true if matches!(
                    state.state(),
                    State::Disabled | State::Failed | State::Same | State::Down
                ) =>
                {
                    state.set(State::Unchecked, None);
                }
                true => {}
                false => state.set(State::Disabled, Some(SWITCHED_OFF.to_owned())),
            }
        }
        if !on {
            for state in self.gone().iter().filter(|state| &*state.name == name) {
                state.set(State::Disabled, Some(SWITCHED_OFF.to_owned()));
            }
        }
        true
    }

    /// The pool of mirror sessions for the clients of `primary`.
    pub fn pool(&self, shared: &Shared, state: &MirrorState, primary: &Pool, now: Instant) -> Arc<Pool> {
        let settings = state.settings.load();
        let name = settings.user.as_deref().unwrap_or(&primary.user.name);
        let user = lock(&self.users)
            .entry(name.to_owned())
            .or_insert_with(|| {
                Arc::new(UserState {
                    number: self.number(),
                    name: name.to_owned(),
                    clients: AtomicU32::new(0),
                })
            })
            .clone();
        let pool = shared.pool(&state.target, &user, now);
        if settings.user.is_none() {
            // What opens servers of the primary opens those of the mirror. The last that is known: it may be a new password.
            if let Some(secret) = primary.secret.load_full() {
                pool.secret.store(Some(secret));
            }
            if let Some(proved) = primary.proved.load_full() {
                pool.proved.store(Some(proved));
            }
        }
        pool
    }

    /// Whether a transaction only reads, as far as its texts tell.
    pub fn is_read_only(&self, transaction: &Transaction) -> bool {
        let mut texts = lock(&self.texts);
        transaction.is_read_only(|text| texts.statement(text).traits.is_read_only)
    }

    /// Whether something of a transaction may stay in its session, as far as its texts tell.
    pub fn changes_session(&self, transaction: &Transaction) -> bool {
        let mut texts = lock(&self.texts);
        transaction.changes_session(|text| texts.statement(text).traits.keeps_session)
    }

    /// Has transactions compared, on a thread of their own.
    pub fn compare(&self, mut batch: Vec<Compared>) {
        let fits = |one: &mut Compared| {
            let before = self.compared_bytes.fetch_add(one.size, Ordering::Relaxed);
            let fits = before + one.size <= COMPARED_BYTES_MAX;
            if !fits {
                self.compared_bytes.fetch_sub(one.size, Ordering::Relaxed);
                one.state.counters.not_compared.fetch_add(1, Ordering::Relaxed);
            }
            fits
        };
        batch.retain_mut(fits);
        let sender = self.comparer.get_or_init(|| {
            let (sender, incoming) = sync_channel::<Vec<Compared>>(BATCHES_MAX);
            let (differences, taken) = (self.differences.clone(), self.compared_bytes.clone());
            let compare = move || {
                for one in incoming.into_iter().flatten() {
                    let state = &one.state;
                    let show_literals = state.settings.load().show_literals;
                    let cycles = lock(&differences).add(
                        &state.name,
                        &state.database,
                        &one.transaction,
                        &one.there,
                        state.row_hash(),
                        show_literals,
                    );
                    state.counters.compared.fetch_add(cycles, Ordering::Relaxed);
                    taken.fetch_sub(one.size, Ordering::Relaxed);
                }
            };
            if let Err(error) = std::thread::Builder::new().name("mirror compare".into()).spawn(compare) {
                log::error!("cannot start a thread, mirrors are not compared: {error}");
            }
            sender
        });
        let (TrySendError::Full(batch) | TrySendError::Disconnected(batch)) = match sender.try_send(batch) {
            Ok(()) => return,
            Err(error) => error,
        };
        for one in batch {
            self.compared_bytes.fetch_sub(one.size, Ordering::Relaxed);
            one.state.counters.not_compared.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The table of differences.
    pub fn rows(&self) -> Vec<Row> {
        let all: HashSet<_> =
            self.all().into_iter().map(|state| (state.name.clone(), state.database.clone())).collect();
        let mut rows = lock(&self.differences).rows();
        // What a mirror was at when RELOAD removed it may have been compared since.
        rows.retain(|row| all.contains(&(row.mirror.as_str().into(), row.database.as_str().into())));
        rows
    }

    /// What was timed, by mirror and database.
    pub fn times(&self) -> HashMap<(Arc<str>, Arc<str>), Times> {
        lock(&self.differences).times()
    }
}

/// What mirror sessions of a database connect to.
fn target(mirror: &Mirror, database: &Database) -> Database {
    let is_reading = mirror.send == MirrorSend::ReadOnly;
    Database {
        name: format!("{}@{}", database.name, mirror.name),
        dbname: Some(mirror.dbname.clone().unwrap_or_else(|| database.server_dbname().to_owned())),
        host: mirror.host.as_ref().and_then(|host| HostList::parse(&host.to_string())),
        port: mirror.port,
        user: mirror.user.clone().or_else(|| database.user.clone()),
        password: if mirror.user.is_some() { mirror.password.clone() } else { database.password.clone() },
        pool_size: mirror.pool_size.or(database.pool_size),
        min_pool_size: Some(0),
        // What the texts do not tell, a function that writes, fails there.
        connect_query: if is_reading {
            let own = "set default_transaction_read_only = on";
            Some(match &database.connect_query {
                Some(query) if !query.is_empty() => format!("{query}\n;{own}"),
                _ => own.to_owned(),
            })
        } else {
            database.connect_query.clone()
        },
        max_db_connections: None,
        max_db_client_connections: None,
        ..database.clone()
    }
}

/// Time that clients in `mode = sync` were held.
pub(crate) fn count_hold(counters: &Counters, held: Duration) {
    let held_us: u64 = held.as_micros() as u64;
    counters.holds.fetch_add(1, Ordering::Relaxed);
    add(&counters.held_us, held_us);
}

fn add(counter: &AtomicU64, value: u64) {
    counter.fetch_add(value, Ordering::Relaxed);
}
