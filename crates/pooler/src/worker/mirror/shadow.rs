// SPDX-License-Identifier: Apache-2.0
//! A session with one mirror on behalf of one client.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use underpass_mirror::{Answer, Answers, DropReason, Transaction};
use underpass_pool::link::Status;
use underpass_sockmap::LinkState;
use underpass_wire::frontend::build;

use super::{Restore, Role};
use crate::client::Phase;
use crate::mirrors::{Compared, MirrorState, State};
use crate::server::Work;
use crate::shared::{lock, phase};
use crate::table::Key;
use crate::worker::{Again, Entry, Farewell, Worker};

/// What a mirror is told that is at a COPY which the primary refused; its error says so in SHOW MIRROR_DIFF.
const COPY_REFUSED: &[u8] = b"the primary did not take this COPY";

/// A transaction for a mirror.
pub(crate) struct Unit {
    pub bytes: Arc<Vec<u8>>,
    pub transaction: Arc<Transaction>,
    /// Memory taken for it.
    pub charged: u64,
    /// ROLLBACKs that were said there behind it, see [`Worker::shadow_roll_back`].
    pub rolled_back: usize,
    /// The state of the session at its beginning, if it may have been lost there.
    pub restore: Option<Restore>,
    /// Of one that goes there as a whole: tells its tap that it is not over.
    pub queued: Option<Arc<()>>,
}

/// See the module documentation.
pub(crate) struct Shadow {
    state: Arc<MirrorState>,
    /// [`MirrorState::generation`] that it is for.
    generation: u32,
    owner: Key,
    pub answers: Answers,
    /// Lives as long as the shadow: what the owner says to a further one waits for that.
    pub alive: Arc<()>,
    /// Of shadows that its owner left behind at the same mirror: nothing begins while they are at something.
    before: Vec<Weak<()>>,
    /// Waiting.
    queue: VecDeque<Unit>,
    /// Under way: one in `mode = async`; those that are over on the primary in `mode = sync`.
    running: VecDeque<Unit>,
    /// The owner is gone: what is queued is the end.
    is_left: bool,
    /// The cycle of the running transaction that was cancelled last.
    cancelled: Option<usize>,
    /// It is closed on purpose: what is left is dropped for this reason, if anything is.
    ending: Option<DropReason>,
}

impl Shadow {
    pub fn new(state: Arc<MirrorState>, owner: Key, before: Vec<Weak<()>>, now: Instant) -> Self {
        let hashes = [state.row_hash()].into_iter().collect();
        Self {
            generation: state.generation(),
            state,
            owner,
            answers: Answers::new(hashes, now),
            alive: Arc::default(),
            before,
            queue: VecDeque::new(),
            running: VecDeque::new(),
            is_left: false,
            cancelled: None,
            ending: None,
        }
    }

    /// Answers of a transaction that is over on the primary.
    fn answers_of(unit: &Unit) -> usize {
        unit.transaction.answers.len() + unit.rolled_back
    }

    /// `mode = sync`: which cycle of the transaction that its client is at it is at. `None`: it is at one before.
    pub fn open_cycle(&self) -> Option<usize> {
        let before: usize = self.running.iter().map(Self::answers_of).sum();
        self.answers.len().checked_sub(before)
    }
}

impl Worker {
    /// Gives a shadow something to say, after the events of this round: the primary's part is done first.
    pub(super) fn shadow_put(&mut self, key: Key, bytes: Arc<Vec<u8>>) {
        self.shadow_fill(key, bytes);
        self.again.push(Again::Client(key));
    }

    /// Gives a shadow something that it will be told to say.
    fn shadow_fill(&mut self, key: Key, bytes: Arc<Vec<u8>>) {
        if let Some(client) = self.clients.get_mut(key) {
            client.transport.put(bytes);
            client.readable = true;
        }
    }

    /// Queues a transaction. One that could begin at once has a moment: its client is just being woken by the primary's answer,
    /// and the mirror would take a processor from it. Where others have something to do meanwhile, the moment is as short as that.
    pub(super) fn shadow_enqueue(&mut self, key: Key, unit: Unit) {
        match self.shadow(key) {
            Some(shadow) => shadow.queue.push_back(unit),
            None => return,
        }
        if self.shadow_start(key) {
            self.again_soon.push(Again::Client(key));
        }
    }

    /// Puts the next transaction into its shadow, if none is under way. Tells whether it did: then somebody must make the shadow say it.
    fn shadow_start(&mut self, key: Key) -> bool {
        let Some(shadow) = self.shadow(key) else { return false };
        if !shadow.running.is_empty() {
            return false;
        }
        if shadow.generation != shadow.state.generation() {
            self.shadow_outdated(key);
            return false;
        }
        shadow.before.retain(|other| other.strong_count() > 0);
        if !shadow.before.is_empty() {
            // The sweep looks again.
            return false;
        }
        let Some(mut unit) = shadow.queue.pop_front() else { return false };
        shadow.cancelled = None;
        // Of a session that answers more often than it was asked to, nothing is carried over.
        shadow.answers.take(usize::MAX);
        let (bytes, restore) = (unit.bytes.clone(), unit.restore.take());
        shadow.running.push_back(unit);
        if let (Some(restore), Some(client)) = (restore, self.clients.get_mut(key)) {
            (client.side, client.parameters) = (restore.side, restore.parameters);
        }
        self.shadow_fill(key, bytes);
        true
    }

    /// `mode = sync`: a transaction whose bytes the shadow has got is over on the primary.
    pub(super) fn shadow_expect(&mut self, key: Key, unit: Unit) {
        match self.shadow(key) {
            Some(shadow) => shadow.running.push_back(unit),
            None => return,
        }
        if self.shadow_roll_back(key) {
            return;
        }
        if !self.shadow_is_behind(key) {
            return self.shadow_finish(key);
        }
        self.shadow_finish_answered(key);
    }

    /// Everything that it got was answered, and no transaction is open.
    pub(super) fn shadow_boundary(&mut self, key: Key) {
        let Some(client) = self.clients.get(key) else { return };
        if client.transport.unread() > 0 || !client.inbox.is_empty() {
            return;
        }
        let Some(shadow) = self.shadow(key) else { return };
        let (owner, is_sync) = (shadow.owner, shadow.state.is_sync());
        if is_sync {
            // Before anybody can see that it has been executed.
            self.mirror_lets_on(owner);
        }
        self.shadow_finish(key);
        let Some(shadow) = self.shadow(key) else { return };
        let is_over = shadow.is_left && shadow.queue.is_empty() && shadow.running.is_empty();
        if is_over {
            // Not here: its link is being taken apart by the caller.
            return self.again.push(Again::Client(key));
        }
        if self.shadow_start(key) {
            self.again.push(Again::Client(key));
        }
        if is_sync {
            self.shadow_wakes(owner);
        }
    }

    /// `mode = sync`: a shadow has caught up, and its owner goes on. One that has said nothing meanwhile is not read in vain.
    fn shadow_wakes(&mut self, owner: Key) {
        let Some(client) = self.clients.get(owner) else { return };
        let is_quiet = !client.readable && !client.ended && client.inbox.is_empty();
        match client.phase {
            // Not with the next round: it may say something sooner.
            Phase::Lane => self.mirror_lets_on(owner),
            Phase::Idle | Phase::Linked(_) if is_quiet => {}
            _ => self.again.push(Again::Client(owner)),
        }
    }

    /// The transactions under way are over there.
    fn shadow_finish(&mut self, key: Key) {
        while self.shadow(key).is_some_and(|shadow| !shadow.running.is_empty()) {
            self.shadow_finish_one(key);
        }
    }

    /// `mode = sync`: a transaction begins. What the shadow answered more often than it was asked to, in those before, is not this one's: its
    /// client was held until the shadow was done.
    pub(super) fn shadow_forget_surplus(&mut self, key: Key) {
        if let Some(shadow) = self.shadow(key).filter(|shadow| shadow.running.is_empty()) {
            shadow.answers.take(usize::MAX);
        }
    }

    /// `mode = sync`: of the transactions under way, those are over whose last answer has come. One that its client left is not over by that.
    fn shadow_finish_answered(&mut self, key: Key) {
        while let Some(shadow) = self.shadow(key) {
            let is_answered = shadow.running.front().is_some_and(|unit| {
                let is_answered = Shadow::answers_of(unit) <= shadow.answers.len();
                // Of one that goes there as a whole the boundary tells.
                unit.queued.is_none() && unit.transaction.abandoned.is_none() && is_answered
            });
            if !is_answered {
                return;
            }
            self.shadow_finish_one(key);
        }
    }

    fn shadow_finish_one(&mut self, key: Key) {
        let Some(shadow) = self.shadow(key) else { return };
        let Some(unit) = shadow.running.pop_front() else { return };
        shadow.cancelled = None;
        // The last ones are those of ROLLBACKs, which nothing on the primary answers.
        let there = shadow.answers.take(Shadow::answers_of(&unit));
        let (owner, state) = (shadow.owner, shadow.state.clone());
        let has_error = |answer: &Answer| answer.results.iter().any(|result| result.sqlstate.is_some());
        if unit
            .transaction
            .answers
            .iter()
            .zip(&there)
            .any(|(here, there)| has_error(here) != has_error(there))
        {
            self.source_differs(owner, key);
        }
        state.counters.executed.fetch_add(1, Ordering::Relaxed);
        state.budget.give_back(unit.charged);
        if unit.transaction.abandoned.is_none() {
            let size = unit.charged;
            self.collect_compared(Compared { state, transaction: unit.transaction, there, size });
        }
    }

    /// Whether a shadow still has something to do of what it got.
    pub(super) fn shadow_is_behind(&self, key: Key) -> bool {
        let Some(client) = self.clients.get(key) else { return false };
        if client.transport.unread() > 0 || !client.inbox.is_empty() {
            return true;
        }
        match client.phase {
            Phase::Linked(server) => match self.servers.get(server) {
                Some(Entry::Here(server)) => {
                    !matches!(server.work, Work::Client(_))
                        || server.link.is_busy()
                        || !server.outbox.is_empty()
                }
                _ => false,
            },
            Phase::Waiting { .. } => true,
            _ => false,
        }
    }

    /// Whether a client in `mode = sync` has to wait for its shadow, which may itself wait for another that its client left behind.
    pub(super) fn shadow_keeps_waiting(&self, key: Key) -> bool {
        let role = self.clients.get(key).and_then(|client| client.mirror.as_deref());
        let has_queue = matches!(role, Some(Role::Shadow(shadow)) if !shadow.queue.is_empty());
        has_queue || self.shadow_is_behind(key)
    }

    /// How long the primary took for the transactions that a shadow has as a whole: the mirror began with them when they were over.
    pub(super) fn shadow_time_here(&self, key: Key) -> Duration {
        let role = self.clients.get(key).and_then(|client| client.mirror.as_deref());
        let Some(Role::Shadow(shadow)) = role else { return Duration::ZERO };
        let whole = shadow.running.iter().chain(&shadow.queue).filter(|unit| unit.queued.is_some());
        whole.flat_map(|unit| &unit.transaction.answers).map(|answer| answer.took).sum()
    }

    /// Whether a shadow waits for a server of a pool that is paused, or has let one in less than `patience` ago.
    pub(super) fn shadow_nears_server(&self, key: Key, patience: Duration) -> bool {
        let Some(client) = self.clients.get(key) else { return false };
        let (Phase::Waiting { .. }, Some(pool)) = (&client.phase, &client.pool) else { return false };
        if self.shared.is_paused(&pool.database) {
            return true;
        }
        let logged_in = Duration::from_millis(pool.logged_in_ms.load(Ordering::Relaxed));
        let now = self.now.saturating_duration_since(self.shared.started);
        !logged_in.is_zero() && now.saturating_sub(logged_in) < patience
    }

    /// Ends what is open on the mirror alone: a Query or pipeline that holds its own COMMIT fails there before that, and leaves a transaction
    /// block that has failed. Nobody else would end it, and what comes next would be said into it. Its answer is one more than it was asked
    /// for.
    fn shadow_roll_back(&mut self, key: Key) -> bool {
        let is_left_open = self.shadow_is_left_open(key);
        if is_left_open {
            let mut rollback = Vec::new();
            build::query(&mut rollback, b"rollback");
            if let Some(unit) = self.shadow(key).and_then(|shadow| shadow.running.front_mut()) {
                unit.rolled_back += 1;
            }
            self.shadow_put(key, Arc::new(rollback));
        }
        is_left_open
    }

    /// Whether a transaction that is over on the primary was answered here, and is not over. What is open when there is a part of the next one is that: a
    /// program lets its client on when all is answered, the one before may not have been known to be over then, and its ROLLBACK and this came at once.
    fn shadow_is_left_open(&self, key: Key) -> bool {
        let Some(client) = self.clients.get(key) else { return false };
        let (Phase::Linked(server), Some(Role::Shadow(shadow))) = (&client.phase, client.mirror.as_deref())
        else {
            return false;
        };
        let is_answered = shadow.running.front().is_some_and(|unit| {
            let transaction = &unit.transaction;
            transaction.abandoned.is_none() && transaction.answers.len() <= shadow.answers.len()
        });
        let has_said_all = client.transport.unread() == 0 && client.inbox.is_empty();
        let is_over = is_answered && has_said_all && !self.source_is_at(shadow.owner, key);
        let Some(Entry::Here(server)) = self.servers.get(*server).filter(|_| is_over) else { return false };
        matches!(server.work, Work::Client(_))
            && server.link.is_settled()
            && server.link.status() != Status::Idle
    }

    /// Something came from a mirror: in `mode = sync` its owner may have waited for it.
    pub(in crate::worker) fn shadow_answered(&mut self, key: Key) {
        if self.shadow_roll_back(key) {
            return;
        }
        let Some(shadow) = self.shadow(key).filter(|shadow| shadow.state.is_sync()) else { return };
        let owner = shadow.owner;
        if !self.shadow_is_behind(key) {
            self.shadow_wakes(owner);
        }
    }

    /// Cancels what the mirror runs for this shadow.
    pub(super) fn shadow_cancel(&mut self, key: Key) {
        let Some(Phase::Linked(server)) = self.clients.get(key).map(|client| &client.phase) else { return };
        let server = *server;
        let Some(Entry::Here(busy)) = self.servers.get(server) else { return };
        if busy.link.is_busy() && !lock(&self.shared.core).is_canceling(busy.id) {
            self.cancel_server(server, None);
        }
    }

    /// The owner is gone. What is queued is played to the end.
    pub(super) fn shadow_leave(&mut self, key: Key) {
        let Some(shadow) = self.shadow(key) else { return };
        shadow.is_left = true;
        if shadow.queue.is_empty() && shadow.running.is_empty() {
            self.close_client(key, Farewell::quiet("mirrored client left"));
        } else {
            // Who comes behind this client may rely on what it did: no moment before it begins there.
            self.again.push(Again::Client(key));
        }
    }

    /// The mirror is not wanted any more: what is left for it is dropped.
    pub(super) fn shadow_give_up(&mut self, key: Key) {
        if let Some(shadow) = self.shadow(key) {
            shadow.ending = Some(DropReason::Disabled);
            self.close_client(key, Farewell::quiet("mirror switched off"));
        }
    }

    /// The rest of what it is at will not come: what is open there is rolled back.
    pub(super) fn shadow_cut(&mut self, key: Key, reason: DropReason) {
        if let Some(shadow) = self.shadow(key) {
            shadow.ending = Some(reason);
            self.close_client(key, Farewell::quiet("mirrored transaction dropped"));
        }
    }

    /// The pooler is about to close this session as it closes clients, for what it said or because its settings cannot be had: if it is a shadow,
    /// that is no fault of the mirror, which stays on for others.
    pub(in crate::worker) fn shadow_refused(&mut self, key: Key, why: &str) {
        if let Some(shadow) = self.shadow(key) {
            shadow.ending = Some(DropReason::SessionState);
            shadow.state.log_refused(why);
        }
    }

    /// Ends all shadows that are for servers of before a RELOAD.
    pub(super) fn end_outdated_shadows(&mut self) {
        for key in self.clients.keys() {
            if self.shadow(key).is_some_and(|shadow| shadow.generation != shadow.state.generation()) {
                if let Some(shadow) = self.shadow(key) {
                    shadow.ending = Some(DropReason::NotReady);
                }
                self.close_client(key, Farewell::quiet("mirror changed"));
            }
        }
    }

    /// RELOAD has changed one of the two servers, and nobody has asked whether what is queued may go there.
    fn shadow_outdated(&mut self, key: Key) {
        if let Some(shadow) = self.shadow(key) {
            shadow.ending = Some(DropReason::NotReady);
        }
        // Not at once: its link may be being taken apart by the caller.
        let index = self.index;
        self.post(index, Box::new(move |worker| worker.close_client(key, Farewell::quiet("mirror changed"))));
    }

    /// What the mirror waits for and will not be told: the primary refused a COPY FROM STDIN, or ended it with an error, and here it goes on. Then it
    /// is said in the client's place, CopyFail first, and the Sync that PostgreSQL wants behind an error when that has come. Without
    /// it the shadow would be at this transaction for ever.
    fn shadow_owed(&self, key: Key) -> Option<Vec<u8>> {
        let client = self.clients.get(key)?;
        let Phase::Linked(server) = client.phase else { return None };
        let Some(Entry::Here(server)) = self.servers.get(server) else { return None };
        let is_asked = matches!(server.work, Work::Client(_)) && server.link.awaits_client();
        if !is_asked || client.transport.unread() > 0 || !client.inbox.is_empty() {
            return None;
        }
        let Some(Role::Shadow(shadow)) = client.mirror.as_deref() else { return None };
        let is_copy = server.link.is_copy_in();
        let goes_on = match shadow.running.front() {
            // Its client has left it in the middle, and so will the shadow.
            Some(unit) if unit.transaction.abandoned.is_some() => {
                shadow.answers.len() >= unit.transaction.answers.len()
            }
            Some(_) => false,
            // `mode = sync`: the transaction goes on, and the client may still be about to say it.
            None => self.is_under_way(shadow.owner, is_copy),
        };
        if goes_on {
            return None;
        }
        let mut out = Vec::new();
        if is_copy {
            build::copy_fail(&mut out, COPY_REFUSED);
        } else {
            build::sync(&mut out);
        }
        Some(out)
    }

    /// Whether the primary is at something that this client said, a COPY or messages without their Sync.
    fn is_under_way(&self, key: Key, is_copy: bool) -> bool {
        let Some(client) = self.clients.get(key) else { return false };
        if let (Phase::Lane, Some(lane)) = (&client.phase, &client.lane) {
            let (path, stream) = (&lane.lanes.datapath, lane.tap.as_ref());
            let info = path.client_info(lane.slot);
            // What it has said may be on its way.
            if stream
                .is_none_or(|stream| path.tap_mark_of(lane.slot).is_ok_and(|mark| !stream.has_told(&mark)))
            {
                return true;
            }
            let is_at_it = |link: &LinkState| link.pending > 0 || link.open && !is_copy;
            return info.is_ok_and(|info| info.server.is_some() && is_at_it(&info.link));
        }
        let Some(Entry::Here(primary)) = client.phase_server().and_then(|server| self.servers.get(server))
        else {
            return false;
        };
        if is_copy { primary.link.is_busy() } else { !primary.link.is_settled() }
    }

    /// Cancels that are due, transactions that their client left, mirrors that were switched off.
    pub(super) fn shadow_sweep(&mut self, key: Key) {
        let now = self.now;
        let Some(client) = self.clients.get(key) else { return };
        let has_said_all = client.transport.unread() == 0 && client.inbox.is_empty();
        let is_behind = self.shadow_is_behind(key);
        let Some(shadow) = self.shadow(key) else { return };
        if matches!(shadow.state.state(), State::Disabled | State::Failed | State::Same) {
            return self.shadow_give_up(key);
        }
        if shadow.generation != shadow.state.generation() {
            return self.shadow_outdated(key);
        }
        if shadow.state.is_sync() {
            self.shadow_finish_answered(key);
        }
        if let Some(owed) = self.shadow_owed(key) {
            return self.shadow_put(key, Arc::new(owed));
        }
        let Some(shadow) = self.shadow(key) else { return };
        let ran = shadow.answers.running_for(now);
        let cycle = shadow.answers.len();
        let Some(unit) = shadow.running.front() else {
            if shadow.is_left && shadow.queue.is_empty() {
                self.close_client(key, Farewell::quiet("mirrored client left"));
            } else if !shadow.before.is_empty() && self.shadow_start(key) {
                self.again.push(Again::Client(key));
            }
            return;
        };
        // What the primary answered is answered here too, before anything is cut off.
        let is_at_the_last = cycle >= unit.transaction.answers.len();
        let is_abandoned = unit
            .transaction
            .abandoned
            .is_some_and(|after| has_said_all && (!is_behind || (is_at_the_last && ran >= after)));
        let is_cancelled = has_said_all
            && shadow.cancelled != Some(cycle)
            && unit.transaction.cancels.iter().any(|cancel| cancel.cycle == cycle && ran >= cancel.after);
        if is_abandoned {
            // Closing it does what its client's closing did: cancel, roll back.
            self.shadow_finish(key);
            self.shadow_leave(key);
        } else if is_cancelled && is_behind {
            shadow.cancelled = Some(cycle);
            self.shadow_cancel(key);
        }
    }

    /// A shadow closes.
    pub(super) fn shadow_gone(&mut self, key: Key, shadow: Shadow, is_linked: bool, reason: &str) {
        let Shadow { state, owner, queue, mut running, is_left, ending, answers, .. } = shadow;
        let fatal = answers.last_error();
        if let (Some(unit), true) = (running.front(), ending.is_none() && fatal.is_some()) {
            if unit.transaction.ended == fatal && answers.len() >= unit.transaction.answers.len() {
                // The session ended there as it did on the primary.
                state.counters.executed.fetch_add(1, Ordering::Relaxed);
                state.budget.give_back(unit.charged);
                running.pop_front();
            }
        }
        let is_over = is_left && queue.is_empty() && running.is_empty();
        let is_awaited = !is_left
            && ending.is_none()
            && running.is_empty()
            && self.source_awaits_end(owner, key, fatal, reason);
        let (first, further) = match (ending, is_linked) {
            (Some(reason), _) => (reason, reason),
            (None, true) => (DropReason::ConnectionLost, DropReason::SessionLost),
            (None, false) => (DropReason::NotReady, DropReason::NotReady),
        };
        for unit in running {
            state.counters.drop_one(first);
            state.budget.give_back(unit.charged);
        }
        for unit in queue {
            state.counters.drop_one(further);
            state.budget.give_back(unit.charged);
        }
        let is_ending = self.shared.phase.load(Ordering::Relaxed) >= phase::WAIT_FOR_SERVERS;
        if ending.is_none() && !is_over && !is_ending && !is_awaited {
            let settings = self.shared.settings.load();
            state.lost(reason, settings.config.server_login_retry, self.now);
        }
        if !is_left {
            self.source_lost_shadow(owner, key, first);
        }
    }
}
