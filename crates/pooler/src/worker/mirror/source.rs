// SPDX-License-Identifier: Apache-2.0
//! A client of a mirrored database: what it says and hears, and to whom that goes.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use underpass_config::{MirrorSend, PoolMode};
use underpass_console::rows::Replication;
use underpass_mirror::{Answer, Answers, Cancel, DropReason, Requests, Transaction};
use underpass_pool::link::ClientSide;
use underpass_pool::params::SharedParameters;
use underpass_sockmap::TapWaits;

use super::shadow::Unit;
use super::{Restore, Role};
use crate::client::Phase;
use crate::mirrors::{MirrorState, State, count_hold};
use crate::pool::Pool;
use crate::table::Key;
use crate::worker::{Again, Entry, Worker};

/// A shadow in `mode = sync` may be this many bytes behind within one statement (COPY data, a pipeline) before its source is held.
const AHEAD_MAX: usize = 256 * 1024;
/// What a transaction takes besides its bytes, for each piece of them: results and their places.
const PIECE_BYTES: u64 = 256;
/// SQLSTATE of a statement that was cancelled.
const QUERY_CANCELED: [u8; 5] = *b"57014";

/// What a source has to do with one mirror.
pub(crate) struct Tap {
    pub state: Arc<MirrorState>,
    pub shadow: Option<Key>,
    /// Of the shadow, [`super::Shadow::alive`].
    alive: Weak<()>,
    /// Of shadows that are still at what was said before it left the mirror and came back.
    before: Vec<Weak<()>>,
    /// Whether the present transaction goes there as it comes (`mode = sync`, `sync_each = statement`). RELOAD may change the mode in its middle, and what the lane of a
    /// client that does not wait there carries is told too late for that.
    is_stream: bool,
    /// Each of its transactions that is queued or played has a clone. Until the last has gone, what begins is queued as well, or it would pass those.
    queued: Arc<()>,
    /// Something of the present transaction has gone there as it came.
    has_part: bool,
    /// Whether the present transaction goes there, or why not.
    fate: Result<(), DropReason>,
    /// [`MirrorState::generation`] when it began.
    generation: u32,
    /// Memory taken for it.
    charged: u64,
    /// A transaction has not gone there, or there has been none: the next one begins with the state of the session.
    pub resync: bool,
    restore: Option<Restore>,
    /// Out for the rest of the session: its state cannot be had.
    pub is_out: bool,
    /// Its session in `mode = sync` ended with this SQLSTATE and for this reason, and that of the primary may be about to.
    ended: Option<([u8; 5], String)>,
}

/// A transaction that began while no mirror was on: it is dropped and counted, so nobody reads it. That cost 7 % of a TPC-B transaction.
#[derive(Default)]
struct Unread {
    has_request: bool,
    has_answer: bool,
}

/// See the module documentation.
pub(crate) struct Source {
    requests: Requests,
    answers: Answers,
    pub taps: Vec<Tap>,
    /// Mirrors that RELOAD took away, and the shadows that play what is queued there: another session there may not pass them.
    left: Vec<(Arc<MirrorState>, Weak<()>)>,
    /// No transaction is under way.
    at_boundary: bool,
    /// It was under way when mirroring began: it is left alone.
    is_partial: bool,
    /// The present transaction, if nobody reads it.
    unread: Option<Unread>,
    /// There was such a one, and `requests` does not know which statements it prepared or closed.
    has_missed: bool,
    /// Of the present transaction, if a mirror in `mode = async` is to have it.
    bytes: Vec<u8>,
    /// Not passed on yet to mirrors in `mode = sync`.
    stream: Vec<u8>,
    cancels: Vec<Cancel>,
    held_since: Option<Instant>,
    /// Whom it waited for, at the last look.
    held_by: Vec<Arc<MirrorState>>,
    /// Until then a mirror was only letting in others before the source's own session.
    excused_until: Instant,
    is_session_pooling: bool,
    has_sync: bool,
}

impl Source {
    fn new(
        mirrors: Vec<Arc<MirrorState>>,
        is_session_pooling: bool,
        at_boundary: bool,
        now: Instant,
    ) -> Self {
        let hashes = mirrors.iter().map(|state| state.row_hash()).collect();
        let taps: Vec<_> = mirrors.into_iter().map(Tap::new).collect();
        let has_sync = taps.iter().any(|tap| tap.state.is_sync());
        Self {
            requests: Requests::default(),
            answers: Answers::new(hashes, now),
            taps,
            left: Vec::new(),
            at_boundary,
            is_partial: !at_boundary,
            unread: None,
            has_missed: false,
            bytes: Vec::new(),
            stream: Vec::new(),
            cancels: Vec::new(),
            held_since: None,
            held_by: Vec::new(),
            excused_until: now,
            is_session_pooling,
            has_sync,
        }
    }

    /// The shadows that are still at what was said to a mirror before it went, if it is back at the same place: as itself (`sample`) or as another
    /// of its name.
    fn left_at(&mut self, state: &MirrorState) -> Vec<Weak<()>> {
        self.left.retain(|(_, shadow)| shadow.strong_count() > 0);
        let there = state.target.settings.load();
        let is_same = |other: &MirrorState| {
            let other_there = other.target.settings.load();
            let place =
                |at: &underpass_config::Database| (at.server_dbname().to_owned(), at.host.clone(), at.port);
            other.name == state.name && place(&other_there) == place(&there)
        };
        self.left.iter().filter(|(other, _)| is_same(other)).map(|(_, shadow)| shadow.clone()).collect()
    }

    /// What of its client may have to wait for a mirror: for one that is not on yet, too, or what is said first when it is would be told too late.
    pub(super) fn awaits_mirrors(&self) -> Option<TapWaits> {
        if !self.has_sync {
            return None;
        }
        let is_off = |tap: &Tap| matches!(tap.state.state(), State::Disabled | State::Failed | State::Same);
        let waits = |tap: &Tap| match tap.state.takes_statements() {
            true => TapWaits::Statements,
            false => TapWaits::Transactions,
        };
        self.taps.iter().filter(|tap| tap.state.is_sync() && !is_off(tap)).map(waits).max()
    }

    /// Whether what its mirrors in `mode = sync` have answered is all that it said: a transaction that is queued for one goes there when it is over.
    pub(super) fn is_streamed(&self) -> bool {
        let is_streamed = |tap: &Tap| tap.is_stream || tap.fate.is_err() || !tap.is_sync_on();
        self.at_boundary || self.taps.iter().all(is_streamed)
    }

    /// Whether its client waits for a mirror.
    pub(super) fn is_held(&self) -> bool {
        self.held_since.is_some()
    }

    /// Its client waits for no mirror any more, or is in its lane, which has nothing of it that waits.
    pub(super) fn let_go(&mut self, now: Instant) {
        if let Some(since) = self.held_since.take() {
            let held = now.saturating_duration_since(since);
            self.held_by.drain(..).for_each(|state| count_hold(&state.counters, held));
        }
    }

    /// See [`Role::before_request`].
    pub(super) fn before_request(
        &mut self,
        side: &ClientSide,
        parameters: &SharedParameters,
        comes_now: bool,
    ) {
        if !self.at_boundary {
            return;
        }
        self.at_boundary = false;
        for tap in &mut self.taps {
            tap.charged = 0;
            tap.has_part = false;
            tap.generation = tap.state.generation();
            tap.before.retain(|shadow| shadow.strong_count() > 0);
            let is_first = tap.before.is_empty() && Arc::strong_count(&tap.queued) == 1;
            tap.is_stream = tap.state.takes_statements() && comes_now && is_first;
            tap.fate = if tap.is_out { Err(DropReason::SessionState) } else { tap.state.admits() };
            if tap.state.takes_statements() && !comes_now && tap.resync && tap.fate.is_ok() {
                // It came on while the client rested in its lane. What others say goes there at once, and this would come behind it.
                tap.fate = Err(DropReason::NotReady);
            }
            let is_read_only = tap.state.settings.load().send == MirrorSend::ReadOnly;
            // From here on: a difference that is found while it is under way is for the next one.
            let restores = tap.fate.is_ok() && std::mem::take(&mut tap.resync);
            tap.restore = restores.then(|| Restore::of(side, parameters, is_read_only));
        }
        // Of one that is on, and that this session is out of, a shadow may still end as the primary does.
        let is_for_nobody = self.taps.iter().all(|tap| tap.fate.is_err() && tap.state.state() != State::On);
        self.unread = is_for_nobody.then(Unread::default);
        if is_for_nobody {
            self.has_missed = true;
        } else if std::mem::take(&mut self.has_missed) {
            self.requests.forget_statements();
            side.each_statement(|name, body| self.requests.know(name, body));
        }
    }

    pub(super) fn request(&mut self, bytes: &[u8], was_busy: bool, now: Instant) {
        if self.is_partial {
            return;
        }
        if let Some(unread) = &mut self.unread {
            unread.has_request |= self.requests.pass_over(bytes);
            return;
        }
        if !was_busy {
            self.answers.begin(now);
        }
        let before = self.requests.kept_bytes();
        self.requests.feed(bytes);
        let texts = (self.requests.kept_bytes() - before) as u64;
        let (mut wants_bytes, mut wants_stream) = (false, false);
        for tap in &mut self.taps {
            tap.expire();
            if tap.fate.is_err() {
                continue;
            }
            let is_sync = tap.is_stream;
            // A stream is not kept; how far it may be behind is limited by the hold.
            let cost = texts + PIECE_BYTES + if is_sync { 0 } else { bytes.len() as u64 };
            match tap.state.budget.take(cost, tap.charged) {
                Ok(()) => tap.charged += cost,
                Err(reason) => {
                    tap.refuse(reason);
                    continue;
                }
            }
            wants_bytes |= !is_sync;
            wants_stream |= is_sync;
        }
        if !wants_bytes && !wants_stream {
            // However long it becomes: nothing limits what would be kept of it.
            self.requests.keep_nothing();
            self.answers.keep_nothing();
        }
        if wants_bytes {
            self.bytes.extend_from_slice(bytes);
        } else {
            self.bytes = Vec::new();
        }
        if wants_stream {
            self.stream.extend_from_slice(bytes);
        }
    }

    pub(super) fn response(&mut self, bytes: &[u8], now: Instant) {
        if let Some(unread) = &mut self.unread {
            unread.has_answer |= !bytes.is_empty();
            self.answers.pass_over(bytes);
        } else if !self.is_partial {
            // What was under way when mirroring began may have been in the middle of a message.
            self.answers.feed(bytes, now);
        }
    }

    /// Notes a cancel. Whether mirrors get it is known when the primary has answered.
    pub(super) fn cancel(&mut self, now: Instant) {
        if !self.at_boundary && !self.is_partial && self.unread.is_none() {
            self.cancels.push(Cancel { cycle: self.answers.len(), after: self.answers.running_for(now) });
        }
    }

    /// The shadows that have the present transaction already, if its client asked for a cancel.
    pub(super) fn cancelling(&self) -> Vec<Key> {
        let streams = self.taps.iter().filter(|tap| tap.is_stream && !self.cancels.is_empty());
        streams.filter_map(|tap| tap.shadow).collect()
    }

    /// Whether the primary has been cancelled at this cycle of the present transaction. A request may strike the cycle behind the one that it found.
    pub(super) fn was_cancelled(&self, cycle: usize) -> bool {
        self.cancels.iter().any(|cancel| cancel.cycle <= cycle)
            && self.answers.get(cycle).is_some_and(is_cancelled)
    }

    /// What is known of the transaction that ends.
    fn take_transaction(&mut self, abandoned: Option<Duration>) -> Transaction {
        let ended = abandoned.and_then(|_| self.answers.last_error());
        let has_named = self.requests.has_named();
        let statements = self.requests.take();
        let answers = self.answers.take(usize::MAX);
        let mut cancels = std::mem::take(&mut self.cancels);
        // Those that came too late there shall not strike here, or strike what they struck there.
        cancels.retain_mut(|cancel| {
            let struck = (cancel.cycle..answers.len()).find(|&cycle| is_cancelled(&answers[cycle]));
            match struck {
                Some(cycle) if cycle > cancel.cycle => {
                    *cancel = Cancel { cycle, after: answers[cycle].took };
                    true
                }
                Some(_) => true,
                None => cancel.cycle >= answers.len() && abandoned.is_some(),
            }
        });
        Transaction { statements, has_named, answers, cancels, abandoned, ended }
    }
}

fn is_cancelled(answer: &Answer) -> bool {
    answer.results.iter().any(|result| result.sqlstate == Some(QUERY_CANCELED))
}

impl Tap {
    fn new(state: Arc<MirrorState>) -> Self {
        Self {
            state,
            shadow: None,
            alive: Weak::new(),
            before: Vec::new(),
            is_stream: false,
            queued: Arc::default(),
            has_part: false,
            fate: Err(DropReason::NotReady),
            generation: 0,
            charged: 0,
            resync: true,
            restore: None,
            is_out: false,
            ended: None,
        }
    }

    /// For a transaction that goes there as a whole.
    fn is_queued(&self) -> Option<Arc<()>> {
        (!self.is_stream).then(|| self.queued.clone())
    }

    /// Whether the client may have to wait for it.
    fn is_sync_on(&self) -> bool {
        self.state.is_sync() && self.state.state() == State::On
    }

    /// RELOAD has changed one of the two servers since the present transaction began, and nobody has asked whether it may go there.
    fn expire(&mut self) {
        if self.fate.is_ok() && self.generation != self.state.generation() {
            self.refuse(DropReason::NotReady);
        }
    }

    /// A transaction that is over does not go there.
    fn drop_transaction(&mut self, reason: DropReason, is_session_pooling: bool) {
        self.state.counters.transactions.fetch_add(1, Ordering::Relaxed);
        self.state.counters.drop_one(reason);
        self.state.budget.give_back(std::mem::take(&mut self.charged));
        self.resync = true;
        self.is_out |= is_session_pooling;
    }

    /// The present transaction does not go there, after all.
    pub(super) fn refuse(&mut self, reason: DropReason) {
        self.state.budget.give_back(std::mem::take(&mut self.charged));
        if self.fate.is_ok() {
            self.fate = Err(reason);
            if matches!(reason, DropReason::QueueFull | DropReason::TooLarge | DropReason::RingFull) {
                self.state.overflowed(reason);
            }
        }
    }
}

impl Worker {
    /// Gives a client its mirrors: at login, and after a RELOAD.
    pub(crate) fn mirror_attach(&mut self, key: Key) {
        let shared = self.shared.clone();
        let Some(client) = self.clients.get_mut(key) else { return };
        let (Some(database), Some(pool)) = (&client.database, &client.pool) else { return };
        if client.is_silent
            || client.on_console
            || client.replication != Replication::None
            || client.is_login()
            || matches!(client.phase, Phase::Closing)
        {
            return;
        }
        let settings = shared.settings.load();
        let mut mirrors = shared.mirrors.of(&settings.config, database);
        // The same client is in the sample or not, however often it is asked.
        let share = u64::from(client.id.get()).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        mirrors.retain(|state| share % 100 < u64::from(state.settings.load().sample_percent));
        let is_session_pooling = pool.settings.load().mode == PoolMode::Session;
        let at_boundary = match client.phase {
            Phase::Idle | Phase::Waiting { .. } => true,
            Phase::Linked(server) => {
                is_session_pooling
                    && matches!(self.servers.get(server), Some(Entry::Here(server)) if server.link.is_quiescent())
            }
            _ => false,
        };
        // What a session in session pooling has done already cannot be had elsewhere.
        let is_late = is_session_pooling && client.phase_server().is_some();
        let now = self.now;
        let (mut left, mut hashes) = (Vec::new(), Vec::new());
        match client.mirror.as_deref_mut() {
            Some(Role::Source(source)) => {
                let (kept, gone): (Vec<_>, Vec<_>) = std::mem::take(&mut source.taps)
                    .into_iter()
                    .partition(|tap| mirrors.iter().any(|state| Arc::ptr_eq(state, &tap.state)));
                source.taps = kept;
                source.left.retain(|(_, shadow)| shadow.strong_count() > 0);
                source.left.extend(gone.iter().map(|tap| (tap.state.clone(), tap.alive.clone())));
                left = gone;
                for state in mirrors {
                    if !source.taps.iter().any(|tap| Arc::ptr_eq(&tap.state, &state)) {
                        let before = source.left_at(&state);
                        source.taps.push(Tap { is_out: is_late, before, ..Tap::new(state) });
                    }
                }
                if !std::mem::replace(&mut source.is_session_pooling, is_session_pooling)
                    && is_session_pooling
                {
                    // RELOAD has changed it. What did not go there cannot be had any more.
                    source.taps.iter_mut().for_each(|tap| tap.is_out |= tap.resync);
                }
                source.answers.hash_by(source.taps.iter().map(|tap| tap.state.row_hash()).collect());
                source.has_sync = source.taps.iter().any(|tap| tap.state.is_sync());
                hashes.extend(source.taps.iter().filter_map(|tap| Some((tap.shadow?, tap.state.row_hash()))));
            }
            _ if mirrors.is_empty() => return,
            _ => {
                let mut source = Source::new(mirrors, is_session_pooling, at_boundary, now);
                client.side.each_statement(|name, body| source.requests.know(name, body));
                source.taps.iter_mut().for_each(|tap| tap.is_out = is_late);
                client.mirror = Some(Box::new(Role::Source(source)));
            }
        }
        self.mirror_leaves_out(key);
        for (shadow, how) in hashes {
            if let Some(shadow) = self.shadow(shadow) {
                shadow.answers.hash_by([how].into_iter().collect());
            }
        }
        for mut tap in left {
            tap.refuse(DropReason::Disabled);
            if let Some(shadow) = tap.shadow {
                self.shadow_leave(shadow);
            }
        }
        self.mirror_checks(key);
        self.again.push(Again::Client(key));
    }

    /// A mirror with a `user` of its own may have another `pool_mode` by that user: state that this session keeps would be lost there, or that of
    /// others be found.
    fn mirror_leaves_out(&mut self, key: Key) {
        let settings = self.shared.settings.load();
        let Some(client) = self.clients.get_mut(key) else { return };
        let (Some(pool), Some(Role::Source(source))) = (&client.pool, client.mirror.as_deref_mut()) else {
            return;
        };
        let here = pool.settings.load().mode;
        for tap in &mut source.taps {
            let user = tap.state.settings.load().user.clone();
            let user = user.as_deref().unwrap_or(&pool.user.name);
            let there = settings.config.pool_mode(&tap.state.target.settings.load(), user);
            if there != here {
                tap.state.log_refused(&format!("its user {user} has another pool_mode"));
                tap.is_out = true;
            }
        }
    }

    /// After a RELOAD.
    pub(crate) fn mirrors_changed(&mut self) {
        // Before one that waits for a server gets another than it was meant for.
        self.end_outdated_shadows();
        for key in self.clients.keys() {
            self.mirror_attach_anew(key);
        }
    }

    /// As [`Self::mirror_attach`], for a client that a lane may have: what it is told there is for the mirrors that it had.
    fn mirror_attach_anew(&mut self, key: Key) {
        let Some(client) = self.clients.get(key) else { return };
        let is_concerned = client.mirror.is_some() || self.shared.mirrors.is_any();
        if !matches!(client.phase, Phase::Lane) || !is_concerned {
            return self.mirror_attach(key);
        }
        if !self.lane_take(key) {
            // A program runs for microseconds.
            return self.post(self.index, Box::new(move |worker| worker.mirror_attach_anew(key)));
        }
        self.mirror_attach(key);
        self.lane_resume(key);
    }

    /// Begins to find out who a mirror is, if that is due.
    fn mirror_checks(&mut self, key: Key) {
        let now = self.now;
        let Some(source) = self.source(key) else { return };
        let due: Vec<_> = source
            .taps
            .iter()
            .filter_map(|tap| Some((tap.state.begin_check(now)?, tap.state.clone())))
            .collect();
        if due.is_empty() {
            return;
        }
        let Some(pool) = self.clients.get(key).and_then(|client| client.pool.clone()) else { return };
        if due.iter().any(|(_, state)| state.is_sync()) {
            // Before it is on: who rests in a lane is to wait for it.
            for worker in 0..self.shared.mailboxes.len() as u16 {
                self.post(worker, Box::new(|worker| worker.taps_late()));
            }
        }
        for (attempt, state) in due {
            let there = self.shared.mirrors.pool(&self.shared, &state, &pool, now);
            self.probe(&state, attempt, 0, &pool);
            self.probe(&state, attempt, 1, &there);
        }
    }

    /// Whether a client is not to be read now, because a mirror in `mode = sync` is behind. It is taken up again when that has changed.
    #[inline]
    pub(in crate::worker) fn is_held_by_mirror(&mut self, key: Key) -> bool {
        self.clients.get(key).is_some_and(|client| client.mirror.is_some()) && self.mirror_holds(key)
    }

    fn mirror_holds(&mut self, key: Key) -> bool {
        let now = self.now;
        let server = self.clients.get(key).and_then(|client| client.phase_server());
        let server = server.and_then(|server| self.servers.get(server));
        let is_primary_busy = matches!(server, Some(Entry::Here(server)) if server.link.is_busy());
        let Some(source) = self.source(key) else { return false };
        if !source.has_sync {
            return false;
        }
        let behind = self.mirrors_behind(key, is_primary_busy);
        let holds = !behind.is_empty();
        if let Some(client) = self.clients.get_mut(key) {
            client.readable |= holds;
        }
        let Some(source) = self.source(key) else { return false };
        if holds {
            source.held_by = behind;
        }
        match (holds, source.held_since) {
            (true, None) => {
                source.held_since = Some(now);
                // A transaction that has a moment before it begins there (`shadow_enqueue`) does not need it any more: its client waits.
                let waited_for = source.taps.iter().filter(|tap| tap.state.is_sync());
                let shadows = waited_for.filter_map(|tap| tap.shadow).collect::<Vec<_>>();
                let clients = &self.clients;
                let has_unsaid =
                    |key: &Key| clients.get(*key).is_some_and(|client| client.transport.unread() > 0);
                self.again.extend(shadows.into_iter().filter(has_unsaid).map(Again::Client));
                self.mirror_cancelled(key);
            }
            (false, Some(_)) => source.let_go(now),
            _ => {}
        }
        holds
    }

    /// The mirrors in `mode = sync` that a client has to wait for.
    pub(super) fn mirrors_behind(&self, key: Key, is_primary_busy: bool) -> Vec<Arc<MirrorState>> {
        let Some(Role::Source(source)) = self.clients.get(key).and_then(|client| client.mirror.as_deref())
        else {
            return Vec::new();
        };
        // A client that does not wait for its answers is stopped by what lies ahead of the mirror only.
        let is_behind = |shadow: Key| match self.clients.get(shadow) {
            Some(client) if is_primary_busy => client.transport.unread() + client.inbox.len() > AHEAD_MAX,
            Some(_) => self.shadow_keeps_waiting(shadow),
            None => false,
        };
        let is_waited_for = |tap: &&Tap| tap.is_sync_on() && tap.shadow.is_some_and(is_behind);
        source.taps.iter().filter(is_waited_for).map(|tap| tap.state.clone()).collect()
    }

    /// Passes on what a source said to its shadows in `mode = sync`.
    pub(in crate::worker) fn mirror_stream(&mut self, key: Key) {
        self.end_cut_streams(key);
        let Some(source) = self.source(key) else { return };
        if source.stream.is_empty() {
            return;
        }
        let stream = Arc::new(std::mem::take(&mut source.stream));
        for index in 0..source.taps.len() {
            let Some(tap) = self.source(key).and_then(|source| source.taps.get_mut(index)) else { return };
            if tap.fate.is_err() || !tap.is_stream {
                continue;
            }
            let restore = tap.restore.take();
            let is_first = !std::mem::replace(&mut tap.has_part, true);
            if let Some(shadow) = self.shadow_of(key, index, restore) {
                if is_first {
                    self.shadow_forget_surplus(shadow);
                }
                self.shadow_put(shadow, stream.clone());
            }
        }
    }

    /// Ends the shadows that have a part of a transaction and will not have its rest: nothing stays open there, and nothing that comes later commits it.
    fn end_cut_streams(&mut self, key: Key) {
        let Some(source) = self.source(key) else { return };
        let is_cut = |tap: &Tap| Some((tap.shadow.filter(|_| tap.has_part)?, tap.fate.err()?));
        let cut: Vec<_> = source.taps.iter().filter_map(is_cut).collect();
        for (shadow, reason) in cut {
            self.shadow_cut(shadow, reason);
        }
    }

    /// The transaction of a source is over on the primary.
    pub(super) fn source_boundary(&mut self, key: Key) {
        self.mirror_cancelled(key);
        let Some(source) = self.source(key) else { return };
        let was_partial = std::mem::replace(&mut source.is_partial, false);
        source.at_boundary = true;
        let unread = source.unread.take();
        if unread.is_some() {
            source.answers.renew();
        }
        // The primary went on.
        let lost: Vec<_> =
            source.taps.iter_mut().filter_map(|tap| Some((tap.state.clone(), tap.ended.take()?.1))).collect();
        let transaction = source.take_transaction(None);
        let bytes = Arc::new(std::mem::take(&mut source.bytes));
        let is_nothing = transaction.answers.is_empty() && transaction.statements.is_empty();
        if !lost.is_empty() {
            let retry = self.shared.settings.load().config.server_login_retry;
            lost.iter().for_each(|(state, reason)| state.lost(reason, retry, self.now));
        }
        if let Some(unread) = unread {
            if unread.has_answer {
                self.source_unread(key);
            }
            return self.mirror_checks(key);
        }
        if was_partial
            && let Some(client) = self.clients.get_mut(key)
            && let Some(Role::Source(source)) = client.mirror.as_deref_mut()
        {
            // What was prepared meanwhile.
            client.side.each_statement(|name, body| source.requests.know(name, body));
        }
        let Some(source) = self.source(key) else { return };
        if was_partial || is_nothing {
            for tap in &mut source.taps {
                tap.state.budget.give_back(std::mem::take(&mut tap.charged));
                tap.resync |= tap.restore.take().is_some();
            }
            return self.mirror_checks(key);
        }
        self.source_send(key, transaction, bytes);
        self.mirror_checks(key);
    }

    /// A transaction that nobody has read is over.
    fn source_unread(&mut self, key: Key) {
        let Some(source) = self.source(key) else { return };
        for tap in &mut source.taps {
            // None is admitted in its middle, not one that RELOAD brings, either.
            if let Err(reason) = tap.fate {
                tap.drop_transaction(reason, source.is_session_pooling);
            }
        }
    }

    /// Transactions of which nothing is known: the lane's ring had no room for them.
    pub(super) fn source_lost(&mut self, key: Key, count: u32) {
        let Some(source) = self.source(key) else { return };
        for tap in &mut source.taps {
            let reason = match tap.state.admits() {
                _ if tap.is_out => DropReason::SessionState,
                Ok(()) => DropReason::RingFull,
                Err(reason) => reason,
            };
            tap.state.counters.transactions.fetch_add(count.into(), Ordering::Relaxed);
            (0..count).for_each(|_| tap.state.counters.drop_one(reason));
            if reason == DropReason::RingFull {
                tap.state.overflowed(reason);
            }
            tap.resync = true;
        }
    }

    /// The transaction that began is not known as a whole, for the same reason: it is dropped. `goes_on`: the rest of it will be seen here.
    pub(super) fn source_broken(&mut self, key: Key, goes_on: bool) {
        let now = self.now;
        let Some(source) = self.source(key) else { return };
        source.requests.forget();
        source.answers.forget(now);
        source.bytes = Vec::new();
        source.cancels.clear();
        source.is_partial = goes_on;
        source.unread = None;
        if source.at_boundary {
            // Lost from its beginning, and counted.
            source.at_boundary = !goes_on;
            return;
        }
        source.at_boundary = !goes_on;
        for tap in &mut source.taps {
            tap.refuse(DropReason::RingFull);
            tap.state.counters.transactions.fetch_add(1, Ordering::Relaxed);
            if let Err(reason) = tap.fate {
                tap.state.counters.drop_one(reason);
            }
            tap.restore = None;
            tap.resync = true;
        }
        self.end_cut_streams(key);
    }

    /// Sends a transaction to all mirrors that are to have it, and accounts for it.
    fn source_send(&mut self, key: Key, transaction: Transaction, bytes: Arc<Vec<u8>>) {
        let transaction = Arc::new(transaction);
        let mut reads = None;
        if let Some(source) = self.source(key) {
            source.taps.iter_mut().for_each(Tap::expire);
        }
        self.end_cut_streams(key);
        let count = self.source(key).map_or(0, |source| source.taps.len());
        for index in 0..count {
            let shared = self.shared.clone();
            let Some(source) = self.source(key) else { return };
            let is_session_pooling = source.is_session_pooling;
            let Some(tap) = source.taps.get_mut(index) else { return };
            let state = tap.state.clone();
            let restore = tap.restore.take();
            if tap.fate.is_ok() && state.settings.load().send == MirrorSend::ReadOnly {
                let reads = *reads.get_or_insert_with(|| shared.mirrors.is_read_only(&transaction));
                if !reads {
                    state.counters.filtered.fetch_add(1, Ordering::Relaxed);
                    state.budget.give_back(std::mem::take(&mut tap.charged));
                    // It may have changed the session as well, which session pooling cannot have anew.
                    tap.resync = true;
                    tap.is_out |= is_session_pooling && shared.mirrors.changes_session(&transaction);
                    continue;
                }
            }
            if let Err(reason) = tap.fate {
                tap.drop_transaction(reason, is_session_pooling);
                continue;
            }
            state.counters.transactions.fetch_add(1, Ordering::Relaxed);
            let unit = Unit {
                bytes: bytes.clone(),
                transaction: transaction.clone(),
                charged: std::mem::take(&mut tap.charged),
                rolled_back: 0,
                restore: None,
                queued: tap.is_queued(),
            };
            if tap.is_stream {
                match tap.shadow {
                    Some(shadow) => self.shadow_expect(shadow, unit),
                    None => {
                        state.counters.drop_one(DropReason::ConnectionLost);
                        state.budget.give_back(unit.charged);
                    }
                }
                continue;
            }
            if let Some(shadow) = self.shadow_of(key, index, None) {
                self.shadow_enqueue(shadow, Unit { restore, ..unit });
            }
        }
    }

    /// The shadow of a tap, made if there is none.
    fn shadow_of(&mut self, key: Key, index: usize, restore: Option<Restore>) -> Option<Key> {
        let primary = self.clients.get(key)?.pool.clone()?;
        let source = self.source(key)?;
        let tap = source.taps.get(index)?;
        if let Some(shadow) = tap.shadow {
            if let (Some(restore), Some(client)) = (restore, self.clients.get_mut(shadow)) {
                (client.side, client.parameters) = (restore.side, restore.parameters);
            }
            return Some(shadow);
        }
        let (state, before) = (tap.state.clone(), tap.before.clone());
        let shadow = self.new_shadow(key, (state, before), &primary, restore);
        let alive = self.shadow(shadow).map(|shadow| Arc::downgrade(&shadow.alive));
        let tap = self.source(key)?.taps.get_mut(index)?;
        (tap.shadow, tap.alive) = (Some(shadow), alive.unwrap_or_default());
        Some(shadow)
    }

    fn new_shadow(
        &mut self,
        owner: Key,
        (state, before): (Arc<MirrorState>, Vec<Weak<()>>),
        primary: &Pool,
        restore: Option<Restore>,
    ) -> Key {
        let pool = self.shared.mirrors.pool(&self.shared, &state, primary, self.now);
        let shadow = super::Shadow::new(state, owner, before, self.now);
        self.silent_client(&pool, restore, Role::Shadow(shadow))
    }

    /// A source closes; its server is `busy` with what it said.
    pub(super) fn source_gone(&mut self, key: Key, mut source: Source, is_busy: bool) {
        let primary = self.clients.get(key).and_then(|client| client.pool.clone());
        let is_under_way = !source.at_boundary && !source.is_partial;
        let ran = if is_busy { source.answers.running_for(self.now) } else { Duration::ZERO };
        let transaction = Arc::new(source.take_transaction(Some(ran)));
        let bytes = Arc::new(std::mem::take(&mut source.bytes));
        let is_something = is_under_way
            && match &source.unread {
                Some(unread) => unread.has_request || unread.has_answer,
                None => !transaction.statements.is_empty() || !transaction.answers.is_empty(),
            };
        let retry = self.shared.settings.load().config.server_login_retry;
        for mut tap in source.taps {
            tap.expire();
            let state = &tap.state;
            let charged = std::mem::take(&mut tap.charged);
            let is_wanted = state.settings.load().send == MirrorSend::All;
            let has_ended_alike =
                tap.ended.as_ref().is_some_and(|(fatal, _)| transaction.ended == Some(*fatal));
            if let (Some((_, reason)), false) = (&tap.ended, has_ended_alike) {
                state.lost(reason, retry, self.now);
            }
            if is_something && !is_wanted {
                state.counters.filtered.fetch_add(1, Ordering::Relaxed);
            }
            let is_sent = is_something && is_wanted && tap.fate.is_ok();
            if is_something && is_wanted {
                state.counters.transactions.fetch_add(1, Ordering::Relaxed);
                match tap.fate {
                    Err(_) if has_ended_alike && tap.is_stream => {
                        state.counters.executed.fetch_add(1, Ordering::Relaxed);
                    }
                    Err(reason) => state.counters.drop_one(reason),
                    Ok(()) => {}
                }
            }
            let unit = Unit {
                bytes: bytes.clone(),
                transaction: transaction.clone(),
                charged,
                rolled_back: 0,
                restore: tap.restore.take(),
                queued: tap.is_queued(),
            };
            if let (None, Some(primary), true) = (tap.shadow, &primary, is_sent && !tap.is_stream) {
                // It is the first that goes there.
                let place = (state.clone(), tap.before.clone());
                tap.shadow = Some(self.new_shadow(key, place, primary, None));
            }
            match tap.shadow {
                Some(shadow) if is_sent && tap.is_stream => {
                    self.shadow_expect(shadow, unit);
                    self.shadow_leave(shadow);
                }
                Some(shadow) if is_sent => {
                    self.shadow_enqueue(shadow, unit);
                    self.shadow_leave(shadow);
                }
                Some(shadow) => {
                    state.budget.give_back(charged);
                    self.shadow_leave(shadow);
                }
                None => {
                    state.budget.give_back(charged);
                    if is_sent {
                        state.counters.drop_one(DropReason::SessionLost);
                    }
                }
            }
        }
    }

    /// A mirror in `mode = sync` that keeps its source waiting for too long is switched off. Sessions that come all at once wait for
    /// each other's connections, which are opened one by one: that is no fault of a mirror that lets one in after the other.
    pub(super) fn source_sweep(&mut self, key: Key) {
        let now = self.now;
        self.mirror_cancelled(key);
        let Some(source) = self.source(key) else { return };
        let Some(since) = source.held_since else { return };
        let held = now.saturating_duration_since(since.max(source.excused_until));
        let waited_for: Vec<_> = source
            .taps
            .iter()
            .filter(|tap| tap.state.is_sync())
            .filter_map(|tap| Some((tap.state.clone(), tap.shadow?)))
            .collect();
        for (state, shadow) in waited_for {
            let timeout = state.settings.load().sync_timeout;
            if !self.shadow_keeps_waiting(shadow) {
                continue;
            }
            let limit = timeout + self.shadow_time_here(shadow);
            if self.shadow_nears_server(shadow, timeout) {
                if let Some(source) = self.source(key) {
                    source.excused_until = now;
                }
            } else if held >= limit {
                state.fail(&format!("it kept a client waiting for {} ms (sync_timeout)", held.as_millis()));
                self.shadow_give_up(shadow);
            }
        }
        self.again.push(Again::Client(key));
    }

    /// Nothing was played while the pooler was suspended.
    pub(in crate::worker) fn sources_excused(&mut self) {
        let now = self.now;
        for key in self.clients.keys() {
            if let Some(source) = self.source(key) {
                source.excused_until = now;
            }
        }
    }

    /// A shadow in `mode = sync` ended with an error that may be about to end the session of the primary as well (`pg_terminate_backend`,
    /// `idle_in_transaction_session_timeout`). If so, the mirror is not lost; that is known when the transaction is over.
    pub(super) fn source_awaits_end(
        &mut self,
        key: Key,
        shadow: Key,
        fatal: Option<[u8; 5]>,
        reason: &str,
    ) -> bool {
        let (Some(fatal), Some(source)) = (fatal, self.source(key)) else { return false };
        let under_way = !source.at_boundary && !source.is_partial;
        // A session of its own ends with that of the client, whether or not anything of the present transaction has gone there.
        let is_paired = source.is_session_pooling;
        let is_awaited = |tap: &Tap| tap.is_stream || is_paired && tap.state.is_sync();
        let tap = source.taps.iter_mut().find(|tap| tap.shadow == Some(shadow) && is_awaited(tap));
        let Some(tap) = tap.filter(|_| under_way) else { return false };
        tap.ended = Some((fatal, reason.to_owned()));
        true
    }

    /// Whether a source is at a transaction of which this shadow has a part.
    pub(super) fn source_is_at(&self, key: Key, shadow: Key) -> bool {
        match self.clients.get(key).and_then(|client| client.mirror.as_deref()) {
            Some(Role::Source(source)) => {
                !source.at_boundary
                    && source.taps.iter().any(|tap| tap.shadow == Some(shadow) && tap.has_part)
            }
            _ => false,
        }
    }

    /// A transaction of this source failed on one of the two servers alone: what it did to the session (Parse, SET) is not the same there.
    pub(super) fn source_differs(&mut self, key: Key, shadow: Key) {
        // In session pooling there is no state to begin with anew but that of the session itself.
        let Some(source) = self.source(key).filter(|source| !source.is_session_pooling) else { return };
        for tap in source.taps.iter_mut().filter(|tap| tap.shadow == Some(shadow)) {
            tap.resync = true;
        }
    }

    /// A shadow of this source is gone.
    pub(super) fn source_lost_shadow(&mut self, key: Key, shadow: Key, reason: DropReason) {
        let Some(source) = self.source(key) else { return };
        let is_session_pooling = source.is_session_pooling;
        let under_way = !source.at_boundary;
        for tap in source.taps.iter_mut().filter(|tap| tap.shadow == Some(shadow)) {
            tap.shadow = None;
            tap.resync = true;
            tap.is_out |= is_session_pooling;
            if under_way && tap.fate.is_ok() && (tap.is_stream || is_session_pooling) {
                tap.refuse(reason);
            } else if under_way && tap.fate.is_ok() {
                // What it has noted so far builds on a state that the next shadow does not have.
                tap.refuse(DropReason::SessionLost);
            }
        }
        self.again.push(Again::Client(key));
    }
}
