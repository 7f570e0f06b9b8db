// SPDX-License-Identifier: Apache-2.0
//! Who owns a direction of a link, and how it changes hands without losing, doubling or reordering a byte.
//!
//! Taking sets bits first and waits for programs that were already running to finish; giving is one
//! compare-and-swap from "user space owns, and everything that ever arrived was either forwarded or read" to "the
//! kernel owns". A segment that slips in changes the word and makes the swap fail.

use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use crate::datapath::{ClientSlot, Datapath, PoolSlot, ServerSlot};
use crate::error::Error;
use crate::events::reason;
use crate::names::Reason;
use crate::shared::{POOL_ORDINALS_MAX, StreamState};
use crate::socket;
use crate::words::{
    CLEAR_KNOWN, CLI_BATCH, CLI_UNNAMED, DIR_BYTES, DIR_USER, DOUBT_NS, LINK_COPY, LINK_EXTENDED,
    LINK_GEN_SHIFT, LINK_HELD, LINK_LINKED, LINK_OPEN, LINK_PENDING_MASK, LINK_PINNED, LINK_SERVER_MASK,
    LINK_SERVER_SHIFT, LINK_STATUS_MASK, LINK_STATUS_SHIFT, PEER_LINKED, SENT_GEN_MASK, SENT_GEN_SHIFT,
    SENT_KNOWN, SRV_LOCAL, SRV_RETIRE,
};

/// How often a take looks again for a program that is just running before it asks to be called later.
const SETTLE_SPINS: u32 = 200;

/// In [`crate::datapath::Side::base`] of a client: it was given before its last response was written; with the
/// generation of its link word at that time.
const PROMISED: u64 = 1 << 63;

/// Transaction status of the last ReadyForQuery.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TransactionStatus {
    /// 'I'.
    #[default]
    Idle,
    /// 'T'.
    InTransaction,
    /// 'E'.
    Failed,
}

/// What both directions of a link have agreed on so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LinkState {
    /// ReadyForQuery messages outstanding: one for each Query, Sync and FunctionCall that began.
    pub pending: u16,
    /// The last ReadyForQuery's status.
    pub status: TransactionStatus,
    /// The request stream is inside a message, or extended-protocol messages lack their Sync.
    pub open: bool,
    /// Of `open`: extended-protocol messages lack their Sync.
    pub batch: bool,
    /// CopyInResponse came: requests are CopyData until ReadyForQuery.
    pub copy_in: bool,
    /// Extended protocol was used since nothing was pending.
    pub extended: bool,
    /// The server's unnamed statement is the client's own, or none. Known after a take; a program does not need to be told.
    pub unnamed: bool,
    /// Session pooling: the kernel never releases this link. Of a client without a server: the link that a program makes.
    pub pinned: bool,
}

impl LinkState {
    /// Nothing outstanding, not in a transaction: the server may go to another client.
    pub fn is_idle(&self) -> bool {
        self.pending == 0 && self.status == TransactionStatus::Idle && !self.open
    }

    pub(crate) fn from_word(word: u64) -> Self {
        Self {
            pending: (word & LINK_PENDING_MASK) as u16,
            status: match (word & LINK_STATUS_MASK) >> LINK_STATUS_SHIFT {
                0 => TransactionStatus::Idle,
                1 => TransactionStatus::InTransaction,
                _ => TransactionStatus::Failed,
            },
            open: word & LINK_OPEN != 0,
            batch: false,
            copy_in: word & LINK_COPY != 0,
            extended: word & LINK_EXTENDED != 0,
            unnamed: false,
            pinned: word & LINK_PINNED != 0,
        }
    }

    fn word(&self) -> u64 {
        let status: u64 = match self.status {
            TransactionStatus::Idle => 0,
            TransactionStatus::InTransaction => 1,
            TransactionStatus::Failed => 2,
        };
        let bit = |set: bool, bit: u64| if set { bit } else { 0 };
        u64::from(self.pending)
            | status << LINK_STATUS_SHIFT
            | bit(self.open, LINK_OPEN)
            | bit(self.copy_in, LINK_COPY)
            | bit(self.extended, LINK_EXTENDED)
            | bit(self.pinned, LINK_PINNED)
    }
}

/// A link in the hands of user space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Taken {
    /// The linked server, if any; its responses are with user space too.
    pub server: Option<ServerSlot>,
    /// State of the link, final until user space changes it.
    pub link: LinkState,
    /// Where the program left the request stream; a boundary if user space had the requests since the link was made.
    pub request: StreamState,
    /// Where the program left the response stream, likewise.
    pub response: StreamState,
    /// Why the client or its server came up, if a program decided it.
    pub reason: Option<Reason>,
    /// What it said last, if that was kept: the next bytes of its requests, ahead of what is still in its socket. Told once.
    pub kept: Option<Kept>,
    /// A server that ended before it could read what was kept for it. User space owns it, and claims it ([`Datapath::claim_server`]).
    pub ended: Option<ServerSlot>,
}

/// A request that programs kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// Whole messages.
    pub bytes: Vec<u8>,
    /// When it came, in nanoseconds of CLOCK_MONOTONIC.
    pub at_ns: u64,
}

/// Outcome of giving a direction to the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Give {
    /// The kernel owns it from now on.
    Done,
    /// More bytes came: read until `read_total` reaches this, handle them, try again.
    Unread {
        /// Bytes that were passed to user space since registration.
        passed_total: u64,
    },
    /// A program is running on the socket right now, or acknowledgements come too fast to tell what was written; try again.
    Busy,
    /// The link's transaction ended meanwhile: [`Datapath::take`], [`Datapath::unlink`], then give.
    Ended,
}

/// Outcome of claiming a server that spoke out of turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// It is nobody's, out of the idle set, and user space owns it.
    Owned,
    /// It is linked: take that client.
    Linked(ClientSlot),
    /// A program is between two steps; try again.
    Busy,
}

impl Datapath {
    /// Takes both directions of a client's link to user space: hand-over by event, PAUSE, KILL, timeouts, cancel.
    ///
    /// `None`: a program was in the middle of a chunk; the bits are set, call again. Idempotent. From the first
    /// call on, no program links, extends or releases this client.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn take(&self, client: ClientSlot) -> Result<Option<Taken>, Error> {
        let c = self.check_client(client)?;
        self.clients.req_dir(c).fetch_or(DIR_USER, SeqCst);
        let mut link = self.clients.link(c).fetch_or(LINK_HELD, SeqCst);
        for _ in 0..SETTLE_SPINS {
            let server = server_of(link);
            if let Some(s) = server {
                self.servers.dir(s).fetch_or(DIR_USER, SeqCst);
            }
            if self.client_settled(c) && server.is_none_or(|s| self.server_settled(s)) {
                let now = self.clients.link(c).load(SeqCst);
                if server_of(now) == server {
                    if server.is_some_and(|s| self.is_local(s)) {
                        // The program is through, but the kernel puts the chunk into the backend's queue only after
                        // that, still under the client's lock. From here on backend_drained sees it.
                        socket::wait_for_lock(socket::borrow(self.client_fd(c)));
                    }
                    // A promise of give_client_before that nobody has linked on: perhaps it was not kept, and nothing
                    // but user space's own bytes is missing.
                    let promise = &self.client_side[c as usize].base;
                    if promise.load(SeqCst) == PROMISED | now >> LINK_GEN_SHIFT
                        && !self.rebase_client(c, 0)?
                    {
                        return Ok(None);
                    }
                    promise.store(0, SeqCst);
                    if now & (LINK_PENDING_MASK | LINK_OPEN) == 0 {
                        // All is answered, so no send can be on its way.
                        self.clients.sender(c).store(0, SeqCst);
                    }
                    return Ok(Some(self.taken(c, now)));
                }
            }
            link = self.clients.link(c).load(SeqCst);
            std::hint::spin_loop();
        }
        if let Some(s) = server_of(link) {
            self.end_broken_run(s);
        }
        Ok(None)
    }

    fn taken(&self, c: u32, link: u64) -> Taken {
        let kept = self.take_kept(c, link);
        let ended = kept.as_ref().and_then(|_| server_of(link));
        let link = if kept.is_some() { self.clients.link(c).load(SeqCst) } else { link };
        let mut state = LinkState::from_word(link);
        let server = server_of(link);
        let mut response = StreamState::BOUNDARY;
        let mut why = self.clients.reason(c).swap(0, SeqCst);
        let flags = self.clients.flags(c).load(Acquire);
        state.batch = flags & CLI_BATCH != 0;
        state.unnamed = server.is_some() && flags & CLI_UNNAMED != 0;
        if let Some(s) = server {
            response = self.servers.response_state(s);
            let of_server = self.servers.reason(s).swap(0, SeqCst);
            why = if why == 0 { of_server } else { why };
        }
        Taken {
            server: server.map(|index| self.server_slot(index)),
            link: state,
            request: self.clients.request_state(c),
            response,
            reason: reason(why),
            kept,
            ended: ended.map(|s| self.server_slot(s)),
        }
    }

    /// Every byte that arrived was either forwarded or passed: no program is inside a chunk.
    fn client_settled(&self, c: u32) -> bool {
        let seen = self.clients.req_dir(c).load(SeqCst) & DIR_BYTES;
        seen == self.clients.req_fwd(c).load(SeqCst).wrapping_add(self.clients.req_passed(c).load(SeqCst))
    }

    pub(crate) fn server_settled(&self, s: u32) -> bool {
        if self.is_local(s) {
            return self.servers.runs_begin(s).load(SeqCst) == self.servers.runs_end(s).load(SeqCst);
        }
        let seen = self.servers.dir(s).load(SeqCst) & DIR_BYTES;
        seen == self.servers.fwd(s).load(SeqCst).wrapping_add(self.servers.passed(s).load(SeqCst))
    }

    /// Changes whenever a program begins with a chunk of this server.
    pub(crate) fn runs_begun(&self, s: u32) -> u64 {
        if self.is_local(s) {
            return u64::from(self.servers.runs_begin(s).load(SeqCst));
        }
        self.servers.dir(s).load(SeqCst)
    }

    /// Links a taken, unlinked client to a server that user space owns. The kernel forwards nothing yet: follow with
    /// [`Self::give_server`], write the requests, then [`Self::give_client`].
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::State`] when one of the two is not in user space's hands.
    pub fn link(&self, client: ClientSlot, server: ServerSlot, state: &LinkState) -> Result<(), Error> {
        let (c, s) = (self.check_client(client)?, self.check_server(server)?);
        let old = self.clients.link(c).load(SeqCst);
        if old & (LINK_HELD | LINK_LINKED) != LINK_HELD {
            return Err(Error::State("link: the client is not held or has a server"));
        }
        if self.servers.peer(s).load(SeqCst) != 0 || self.servers.dir(s).load(SeqCst) & DIR_USER == 0 {
            return Err(Error::State("link: the server is not owned by user space"));
        }
        self.servers.run_bytes(s).store(0, Relaxed);
        self.clients.flags(c).store(if state.batch { CLI_BATCH } else { 0 }, Relaxed);
        self.clients.cycle_bytes(c).store(0, Relaxed);
        self.clients.sender(c).store(0, SeqCst);
        self.forget_streams(c, s);
        let now = monotonic_ns();
        self.clients.xact_start_ns(c).store(now, Relaxed);
        self.clients.query_start_ns(c).store(now, Relaxed);
        self.servers.peer(s).store(PEER_LINKED | u64::from(c), SeqCst);
        let generation = (old >> LINK_GEN_SHIFT).wrapping_add(1) << LINK_GEN_SHIFT;
        let new = generation | LINK_HELD | LINK_LINKED | u64::from(s) << LINK_SERVER_SHIFT | state.word();
        self.clients.link(c).store(new, SeqCst);
        Ok(())
    }

    /// Where programs left the streams of a link is history: a take before the next give must not report it.
    fn forget_streams(&self, c: u32, s: u32) {
        self.clients.set_request_state(c, &StreamState::BOUNDARY);
        self.servers.set_response_state(s, &StreamState::BOUNDARY);
    }

    /// Corrects the state of a taken link after user space forwarded some of it. A take that comes before the next give reports both streams
    /// at a boundary.
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::State`] when the client is not held and linked.
    pub fn set_link_state(&self, client: ClientSlot, state: &LinkState) -> Result<(), Error> {
        let c = self.check_client(client)?;
        let old = self.clients.link(c).load(SeqCst);
        let Some(s) = server_of(old).filter(|_| old & LINK_HELD != 0) else {
            return Err(Error::State("set_link_state: the client is not held and linked"));
        };
        if self.servers.dir(s).load(SeqCst) & DIR_USER == 0 {
            return Err(Error::State("set_link_state: a program may be counting this link's responses"));
        }
        self.clients.flags(c).store(if state.batch { CLI_BATCH } else { 0 }, Relaxed);
        self.forget_streams(c, s);
        let keep = old & !((1 << LINK_GEN_SHIFT) - 1) | LINK_HELD | LINK_LINKED | old & LINK_SERVER_MASK;
        self.clients.link(c).store(keep | state.word(), SeqCst);
        Ok(())
    }

    /// Ends a taken link. The server stays with user space: clean it, then [`Self::push_idle`] or [`Self::link`].
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::State`] when the client is not held.
    pub fn unlink(&self, client: ClientSlot) -> Result<Option<ServerSlot>, Error> {
        let c = self.check_client(client)?;
        let old = self.clients.link(c).load(SeqCst);
        if old & LINK_HELD == 0 {
            return Err(Error::State("unlink: the client is not held"));
        }
        let Some(s) = server_of(old) else { return Ok(None) };
        if self.servers.dir(s).load(SeqCst) & DIR_USER == 0 {
            return Err(Error::State("unlink: the server's responses are with the kernel"));
        }
        self.clients.link(c).store(old & !((1 << LINK_GEN_SHIFT) - 1) | LINK_HELD, SeqCst);
        self.clients.flags(c).store(0, Relaxed);
        self.clients.cycle_bytes(c).store(0, Relaxed);
        self.clients.set_request_state(c, &StreamState::BOUNDARY);
        self.servers.peer(s).store(0, SeqCst);
        Ok(Some(self.server_slot(s)))
    }

    /// Whether bytes of the client wait in its socket for user space, which has read `read_total` since registration: two loads.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn has_unread(&self, client: ClientSlot, read_total: u64) -> Result<bool, Error> {
        Ok(self.unread(client, read_total)? != 0)
    }

    /// How many bytes of the client wait for user space, likewise. Behind what a lane redirected to the client's socket and that does not take,
    /// they wait where nothing charges them to it: user space has to bound them.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn unread(&self, client: ClientSlot, read_total: u64) -> Result<u64, Error> {
        let c = self.check_client(client)?;
        Ok(self.clients.req_passed(c).load(SeqCst).wrapping_sub(read_total))
    }

    /// The same of a server. In lane A its bytes come by TCP, which bounds them: 0.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn server_unread(&self, server: ServerSlot, read_total: u64) -> Result<u64, Error> {
        let s = self.check_server(server)?;
        if self.is_local(s) {
            return Ok(0);
        }
        Ok(self.servers.passed(s).load(SeqCst).wrapping_sub(read_total))
    }

    /// Gives a client's requests to the kernel. Call it at a message boundary, after everything read was forwarded;
    /// an unlinked client must have all its responses written.
    ///
    /// `read_total`: bytes that user space has read from the socket since registration.
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::System`] when the socket cannot be asked.
    pub fn give_client(&self, client: ClientSlot, read_total: u64) -> Result<Give, Error> {
        self.give_client_before(client, read_total, 0)
    }

    /// As [`Self::give_client`], for an unlinked client to which user space is about to write `unwritten` bytes, the rest of its
    /// last response. A request that comes before they are in the socket goes to user space ([`Reason::Behind`]), one that answers them
    /// is the kernel's. If they do not all go into the socket, [`Self::take`] the client back; nothing was forwarded then.
    ///
    /// # Errors
    /// As [`Self::give_client`].
    pub fn give_client_before(
        &self,
        client: ClientSlot,
        read_total: u64,
        unwritten: u64,
    ) -> Result<Give, Error> {
        let c = self.check_client(client)?;
        let link = self.clients.link(c).load(SeqCst);
        let seen = self.clients.req_dir(c).load(SeqCst) & DIR_BYTES;
        let passed = self.clients.req_passed(c).load(SeqCst);
        if seen != self.clients.req_fwd(c).load(SeqCst).wrapping_add(passed) {
            return Ok(Give::Busy);
        }
        if passed != read_total {
            return Ok(Give::Unread { passed_total: passed });
        }
        match server_of(link) {
            None => {
                if !self.rebase_client(c, unwritten)? {
                    return Ok(Give::Busy);
                }
                let promise = if unwritten == 0 { 0 } else { PROMISED | link >> LINK_GEN_SHIFT };
                self.client_side[c as usize].base.store(promise, SeqCst);
            }
            Some(_) if link & LINK_PINNED == 0 && LinkState::from_word(link).is_idle() => {
                return Ok(Give::Ended);
            }
            Some(s) => {
                if !self.rebase_server(s)? {
                    return Ok(Give::Busy);
                }
            }
        }
        self.clients.set_request_state(c, &StreamState::BOUNDARY);
        self.clients.cycle_bytes(c).store(0, Relaxed);
        if self.clients.req_dir(c).compare_exchange(DIR_USER | seen, seen, SeqCst, SeqCst).is_err() {
            return Ok(Give::Busy);
        }
        let given = self.clients.link(c).fetch_update(SeqCst, SeqCst, |now| {
            let ended =
                now & (LINK_LINKED | LINK_PINNED) == LINK_LINKED && LinkState::from_word(now).is_idle();
            (!ended).then_some(now & !LINK_HELD)
        });
        if given.is_err() {
            // The transaction ended since we looked: the hold stays until the link is taken.
            self.clients.req_dir(c).fetch_or(DIR_USER, SeqCst);
            return Ok(Give::Ended);
        }
        Ok(Give::Done)
    }

    /// Gives a linked server's responses to the kernel. Everything read from it must be written to the client, whose requests may be
    /// the kernel's already.
    ///
    /// `read_total` as in [`Self::give_client`], of the server's socket; `state`: where its stream stands.
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::State`] when it is not linked; [`Error::System`].
    pub fn give_server(
        &self,
        server: ServerSlot,
        read_total: u64,
        state: &StreamState,
    ) -> Result<Give, Error> {
        let s = self.check_server(server)?;
        let peer = self.servers.peer(s).load(SeqCst);
        if peer & PEER_LINKED == 0 {
            return Err(Error::State("give_server: not linked"));
        }
        let c = peer as u32;
        // If the client's requests are the kernel's, a program may be adding to it, and give_client has done this.
        let is_users = self.clients.req_dir(c).load(SeqCst) & DIR_USER != 0;
        if !self.rebase_client(c, 0)? || is_users && !self.rebase_server(s)? {
            return Ok(Give::Busy);
        }
        self.give_responses(s, read_total, state)
    }

    fn give_responses(&self, s: u32, read_total: u64, state: &StreamState) -> Result<Give, Error> {
        let dir = self.servers.dir(s).load(SeqCst) & DIR_BYTES;
        if !self.server_settled(s) {
            return Ok(Give::Busy);
        }
        let passed = if self.is_local(s) {
            dir.wrapping_sub(self.server_side[s as usize].base.load(Acquire)) & DIR_BYTES
        } else {
            self.servers.passed(s).load(SeqCst)
        };
        if passed != read_total {
            return Ok(Give::Unread { passed_total: passed });
        }
        self.servers.set_response_state(s, state);
        match self.servers.dir(s).compare_exchange(DIR_USER | dir, dir, SeqCst, SeqCst) {
            Ok(_) => Ok(Give::Done),
            Err(_) => Ok(Give::Busy),
        }
    }

    /// The kernel starts to write to the client: what user space wrote so far, and will have written, is the base of its count. False: that cannot
    /// be told just now.
    fn rebase_client(&self, c: u32, unwritten: u64) -> Result<bool, Error> {
        let written = self.client_written(c).map_err(Error::system("TCP_INFO of a client"))?;
        if let Some(written) = written {
            self.clients.tx_expect(c).store(written.wrapping_add(unwritten as u32).into(), SeqCst);
        }
        Ok(written.is_some())
    }

    /// Likewise for a server. In lane A: what the backend must have read before a program may redirect requests to it.
    fn rebase_server(&self, s: u32) -> Result<bool, Error> {
        let written = self.server_written(s).map_err(Error::system("TCP_INFO of a server"))?;
        if let Some(written) = written {
            self.servers.tx_expect(s).store(written.into(), SeqCst);
        }
        Ok(written.is_some())
    }

    /// What is in the client's TCP send queue or beyond, as a sequence number; `None` if that changes too fast to be told.
    pub(crate) fn client_written(&self, c: u32) -> std::io::Result<Option<u32>> {
        let enqueued = socket::bytes_enqueued(socket::borrow(self.client_fd(c)))?;
        let base = self.client_side[c as usize].seq_base.load(Acquire);
        Ok(enqueued.map(|enqueued| base.wrapping_add(enqueued as u32)))
    }

    /// As [`Self::client_written`], of the pooler's socket to a server.
    pub(crate) fn server_written(&self, s: u32) -> std::io::Result<Option<u32>> {
        let enqueued = socket::bytes_enqueued(socket::borrow(self.server_fd(s)))?;
        let base = self.server_side[s as usize].seq_base.load(Acquire);
        Ok(enqueued.map(|enqueued| base.wrapping_add(enqueued as u32)))
    }

    /// Puts a clean server that user space owns into the idle set and gives its responses to the kernel.
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::State`] when it is linked or marked to be retired; [`Error::System`].
    pub fn push_idle(&self, server: ServerSlot, read_total: u64) -> Result<Give, Error> {
        let s = self.check_server(server)?;
        if self.servers.peer(s).load(SeqCst) != 0 {
            return Err(Error::State("push_idle: linked"));
        }
        if self.servers.flags(s).load(SeqCst) & SRV_RETIRE != 0 {
            return Err(Error::State("push_idle: marked to be retired"));
        }
        if !self.rebase_server(s)? {
            return Ok(Give::Busy);
        }
        match self.give_responses(s, read_total, &StreamState::BOUNDARY)? {
            Give::Done => {}
            other => return Ok(other),
        }
        self.show_idle(s);
        Ok(Give::Done)
    }

    /// A server whose responses are the kernel's into the idle set.
    pub(crate) fn show_idle(&self, s: u32) {
        let (pool, word, bit) = self.idle_bit(s);
        self.pools.idle(pool, word).fetch_or(bit, SeqCst);
        // A server that spoke since the give cleared a bit that was not set yet: take the bit back.
        if self.servers.dir(s).load(SeqCst) & DIR_USER != 0 && self.servers.peer(s).load(SeqCst) == 0 {
            self.pools.idle(pool, word).fetch_and(!bit, SeqCst);
        }
    }

    /// Takes the lowest idle server for user space, or the next in turn ([`Self::set_pool_rotates`]), one with this fingerprint if given.
    /// Its responses come to user space from now on. One that is marked to be retired stays, for [`Self::take_idle`]: a program may have put it
    /// back while it was being marked.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn pop_idle(&self, pool: PoolSlot, fingerprint: Option<u32>) -> Result<Option<ServerSlot>, Error> {
        self.pop_idle_that(pool, |print| fingerprint.is_none_or(|wanted| wanted == print))
    }

    /// The same, one with another fingerprint than this.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn pop_idle_unlike(&self, pool: PoolSlot, fingerprint: u32) -> Result<Option<ServerSlot>, Error> {
        self.pop_idle_that(pool, |print| print != fingerprint)
    }

    fn pop_idle_that(&self, pool: PoolSlot, fits: impl Fn(u32) -> bool) -> Result<Option<ServerSlot>, Error> {
        let p = self.check_pool(pool)?;
        // A bit whose server is linked or user space's is stale: a program that gives back what it had taken sets it after the peer is cleared, and the
        // server may have been claimed in between.
        let taken = self.take_first(p, fits, |s| {
            self.servers.peer(s).load(SeqCst) == 0
                && self.servers.dir(s).fetch_or(DIR_USER, SeqCst) & DIR_USER == 0
        });
        Ok(taken.map(|s| self.server_slot(s)))
    }

    /// As `answer_lost()` of `bpf/lanes.bpf.h`: the client that this server answered last was gone before it had the answer, or may have been, so the
    /// backend's `send()` failed and PostgreSQL ends.
    fn answer_lost(&self, s: u32) -> bool {
        let sent = self.servers.answered(s).load(SeqCst);
        let c = sent as u32;
        if sent == 0 || self.clients.in_use(c).load(SeqCst) == 0 {
            return false;
        }
        let generation = self.clients.link(c).load(SeqCst) >> LINK_GEN_SHIFT;
        // It has been linked again, or asked again: then it had all its answers.
        if (generation ^ sent >> SENT_GEN_SHIFT) & SENT_GEN_MASK != 0
            || self.clients.clear(c).load(SeqCst) == CLEAR_KNOWN | generation
        {
            return false;
        }
        let client = self.client_slot(c);
        // The client may be another worker's, which just closes it: what another socket says counts for nothing.
        (self.lost(c) || self.is_doubtful(c, s)) && self.check_client(client).is_ok()
    }

    /// Whether what a server sent last, a moment ago, went straight to the application of this client, which has closed its socket since.
    fn is_doubtful(&self, c: u32, s: u32) -> bool {
        self.apps_work
            && self.clients.last_addr(c).load(SeqCst) == self.servers.sk_addr(s).load(SeqCst)
            && self.clients.last_run(c).load(SeqCst) == self.servers.runs_begin(s).load(SeqCst)
            && monotonic_ns().saturating_sub(self.servers.active_ns(s).load(SeqCst)) <= DOUBT_NS
            && self.ask(0, 0, c).is_ok_and(|gauge| gauge.gone)
    }

    /// Whether a client's connection is over and its socket has not taken all that was forwarded to it.
    fn lost(&self, c: u32) -> bool {
        let written = socket::bytes_enqueued_at_end(socket::borrow(self.client_fd(c)));
        let base = self.client_side[c as usize].seq_base.load(Acquire);
        let expected = self.clients.tx_expect(c).load(SeqCst) as u32;
        matches!(written, Ok(Some(written))
            if expected.wrapping_sub(base.wrapping_add(written as u32)).cast_signed() > 0)
    }

    /// A client leaves: servers whose answer it has not taken are marked to be retired, for they end by themselves. One that only
    /// [may have lost it](Self::is_doubtful) is taken out of the idle set and returned.
    pub(crate) fn retire_unanswered(&self, c: u32) -> Option<u32> {
        let last = self.clients.last_server(c).load(SeqCst);
        let link = self.clients.link(c).load(SeqCst) >> LINK_GEN_SHIFT;
        let answered = SENT_KNOWN | (link & SENT_GEN_MASK) << SENT_GEN_SHIFT | u64::from(c);
        let is_of = |s: u32| {
            self.servers.in_use(s).load(SeqCst) != 0 && self.servers.answered(s).load(SeqCst) == answered
        };
        if self.lost(c) {
            for s in (0..self.server_side.len() as u32).filter(|&s| is_of(s)) {
                self.servers.flags(s).fetch_or(SRV_RETIRE, SeqCst);
            }
            return None;
        }
        let is_known = self.clients.clear(c).load(SeqCst) == CLEAR_KNOWN | link;
        let doubted =
            (last < self.server_side.len() as u32 && is_of(last) && !is_known && self.is_doubtful(c, last))
                .then_some(last)?;
        self.take_idle(self.server_slot(doubted)).unwrap_or(false).then_some(doubted)
    }

    /// Takes the first idle server of a pool whose fingerprint `fits`, that is not marked to be retired, did not lose its last answer, and
    /// that `take` agrees to when it has left the set.
    pub(crate) fn take_first(
        &self,
        p: u32,
        fits: impl Fn(u32) -> bool,
        take: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        let words = POOL_ORDINALS_MAX / 64;
        let rotates = self.pools.rotates(p).load(Relaxed) != 0;
        let next = if rotates { self.pools.next(p).load(Relaxed) as usize % POOL_ORDINALS_MAX } else { 0 };
        // The word with `next` comes first and last: the ordinals from there on, then those below.
        for step in 0..=words {
            let word = (next / 64 + step) % words;
            let above = !0 << (next % 64);
            let mut bits = self.pools.idle(p, word).load(SeqCst)
                & match step {
                    0 => above,
                    _ if step == words => !above,
                    _ => !0,
                };
            while bits != 0 {
                let bit = bits & bits.wrapping_neg();
                bits &= !bit;
                let ordinal = word as u32 * 64 + bit.trailing_zeros();
                let (member, print) = self.pools.member(p, ordinal);
                if !fits(print.load(SeqCst)) {
                    continue;
                }
                let s = member.load(SeqCst);
                if self.servers.flags(s).load(SeqCst) & SRV_RETIRE != 0 || self.answer_lost(s) {
                    continue;
                }
                if self.pools.idle(p, word).fetch_and(!bit, SeqCst) & bit == 0 {
                    continue;
                }
                if !take(s) {
                    continue;
                }
                if rotates {
                    self.pools.next(p).store(ordinal + 1, Relaxed);
                }
                return Some(s);
            }
        }
        None
    }

    /// Whether a pool's idle servers are taken in turn (`server_round_robin`), by programs and by [`Self::pop_idle`], instead of the
    /// lowest first. Takes that come at the same time may take the same turn, not the same server.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn set_pool_rotates(&self, pool: PoolSlot, rotates: bool) -> Result<(), Error> {
        self.pools.rotates(self.check_pool(pool)?).store(rotates.into(), SeqCst);
        Ok(())
    }

    /// Takes one particular server out of the idle set, for closing or checking it. False: it is not there.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn take_idle(&self, server: ServerSlot) -> Result<bool, Error> {
        let s = self.check_server(server)?;
        let (pool, word, bit) = self.idle_bit(s);
        let won = self.pools.idle(pool, word).fetch_and(!bit, SeqCst) & bit != 0;
        // A bit whose server is linked is stale, as in `pop_idle_that`: the responses are that link's.
        let mine = won && self.servers.peer(s).load(SeqCst) == 0;
        if mine {
            self.servers.dir(s).fetch_or(DIR_USER, SeqCst);
        }
        Ok(mine)
    }

    /// After [`crate::Event::ServerUp`], or when a server's socket hung up: whose is it?
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn claim_server(&self, server: ServerSlot) -> Result<Claim, Error> {
        let s = self.check_server(server)?;
        self.servers.dir(s).fetch_or(DIR_USER, SeqCst);
        let (pool, word, bit) = self.idle_bit(s);
        self.pools.idle(pool, word).fetch_and(!bit, SeqCst);
        let peer = self.servers.peer(s).load(SeqCst);
        if peer & PEER_LINKED == 0 {
            self.end_broken_run(s);
            return Ok(if self.server_settled(s) { Claim::Owned } else { Claim::Busy });
        }
        let c = peer as u32;
        if server_of(self.clients.link(c).load(SeqCst)) == Some(s) {
            return Ok(Claim::Linked(self.client_slot(c)));
        }
        Ok(Claim::Busy)
    }

    /// Number of queued clients of a pool. While it is not 0, no program takes a server, and each server that
    /// becomes idle is announced. Raise it *before* the last look with [`Self::pop_idle`].
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn set_waiters(&self, pool: PoolSlot, waiters: u32) -> Result<(), Error> {
        self.pools.waiters(self.check_pool(pool)?).store(waiters, SeqCst);
        Ok(())
    }

    /// Closes (PAUSE, DISABLE, lanes off) or opens a pool: while closed, no program takes a server; links that stand
    /// go on to the end of their transaction, and each server that becomes idle is announced.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn set_pool_closed(&self, pool: PoolSlot, closed: bool) -> Result<(), Error> {
        let p = self.check_pool(pool)?;
        self.pools.flags(p).store(if closed { crate::words::POOL_CLOSED } else { 0 }, SeqCst);
        Ok(())
    }

    /// Marks a server that must not return to the idle set (server_lifetime, RECONNECT, server_check_delay): its next
    /// release goes to user space. An idle one is still to be taken with [`Self::take_idle`].
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn set_server_retire(&self, server: ServerSlot, retire: bool) -> Result<(), Error> {
        let s = self.check_server(server)?;
        if retire {
            self.servers.flags(s).fetch_or(SRV_RETIRE, SeqCst);
        } else {
            self.servers.flags(s).fetch_and(!SRV_RETIRE, SeqCst);
        }
        Ok(())
    }

    /// Says of a client that user space holds unlinked whether the link that a program makes is to last ([`LinkState::pinned`]).
    /// Not for one with a tap, whose records tell transactions by their links.
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::State`] when it is not held, or linked.
    pub fn set_client_pinned(&self, client: ClientSlot, pinned: bool) -> Result<(), Error> {
        let c = self.check_client(client)?;
        let old = self.clients.link(c).load(SeqCst);
        if old & (LINK_HELD | LINK_LINKED) != LINK_HELD {
            return Err(Error::State("set_client_pinned: not held, or linked"));
        }
        let word = if pinned { old | LINK_PINNED } else { old & !LINK_PINNED };
        self.clients.link(c).store(word, SeqCst);
        Ok(())
    }

    /// Changes the fingerprint of a client that user space holds unlinked.
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::State`] when it is not held.
    pub fn set_client_fingerprint(&self, client: ClientSlot, fingerprint: u32) -> Result<(), Error> {
        let c = self.check_client(client)?;
        if self.clients.link(c).load(SeqCst) & LINK_HELD == 0 {
            return Err(Error::State("set_client_fingerprint: not held"));
        }
        self.clients.fingerprint(c).store(fingerprint, SeqCst);
        Ok(())
    }

    /// Changes the fingerprint of a server that user space owns.
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::State`] when a program may use it.
    pub fn set_server_fingerprint(&self, server: ServerSlot, fingerprint: u32) -> Result<(), Error> {
        let s = self.check_server(server)?;
        if self.servers.dir(s).load(SeqCst) & DIR_USER == 0 {
            return Err(Error::State("set_server_fingerprint: not owned by user space"));
        }
        self.servers.fingerprint(s).store(fingerprint, SeqCst);
        let ordinal = self.servers.ordinal(s).load(Relaxed);
        self.pools.member(self.servers.pool(s).load(Relaxed), ordinal).1.store(fingerprint, SeqCst);
        Ok(())
    }

    /// Switches every lane off, or on: programs pass all they would forward. Links that stand come up one by one.
    pub fn set_off(&self, off: bool) {
        self.control.off(0).store(u64::from(off), SeqCst);
    }

    pub(crate) fn is_local(&self, s: u32) -> bool {
        self.servers.flags(s).load(SeqCst) & SRV_LOCAL != 0
    }

    /// The server with this ordinal in a pool, if it has one in its map.
    pub fn server_at(&self, pool: PoolSlot, ordinal: u32) -> Option<ServerSlot> {
        let p = self.check_pool(pool).ok().filter(|_| (ordinal as usize) < POOL_ORDINALS_MAX)?;
        let index = self.pools.member(p, ordinal).0.load(SeqCst);
        let s = &self.servers;
        // A member is not erased when its server goes, and its slot may be another's by now.
        let is_it = s.in_use(index).load(SeqCst) != 0
            && s.pool(index).load(Relaxed) == p
            && s.ordinal(index).load(Relaxed) == ordinal;
        is_it.then(|| self.server_slot(index))
    }

    /// A server's bit in its pool's idle set.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn ordinal_of(&self, server: ServerSlot) -> Result<u32, Error> {
        Ok(self.servers.ordinal(self.check_server(server)?).load(Relaxed))
    }

    fn idle_bit(&self, s: u32) -> (u32, usize, u64) {
        let ordinal = self.servers.ordinal(s).load(Relaxed);
        (self.servers.pool(s).load(Relaxed), (ordinal / 64) as usize, 1 << (ordinal % 64))
    }

    pub(crate) fn server_slot(&self, index: u32) -> ServerSlot {
        ServerSlot { index, generation: self.server_side[index as usize].generation.load(Acquire) }
    }

    pub(crate) fn client_slot(&self, index: u32) -> ClientSlot {
        ClientSlot { index, generation: self.client_side[index as usize].generation.load(Acquire) }
    }
}

/// The server that a link word names.
pub(crate) fn server_of(link: u64) -> Option<u32> {
    (link & LINK_LINKED != 0).then_some(((link & LINK_SERVER_MASK) >> LINK_SERVER_SHIFT) as u32)
}

/// The programs' clock, bpf_ktime_get_ns().
pub(crate) fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
