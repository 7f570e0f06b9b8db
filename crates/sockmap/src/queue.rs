// SPDX-License-Identifier: Apache-2.0
//! The queue of a pool that programs keep (`bpf/queue.bpf.h`), as user space sees it.
//!
//! A request that is kept is the queue's until its place is emptied and the client's link word changes, by one compare-and-swap each. User space
//! takes it back with its client ([`Datapath::take`]), all of them when the pool is to keep none any more ([`Datapath::drain_queue`]), and brings one to a server
//! that is idle without a program having released it ([`Datapath::serve_queue`]).

use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use rustix::net::{SendFlags, Shutdown};

use crate::datapath::{ClientSlot, Datapath, PoolSlot};
use crate::error::Error;
use crate::handover::{Kept, monotonic_ns, server_of};
use crate::shared::{POOL_ORDINALS_MAX, QUEUE_PLACES};
use crate::socket;
use crate::words::{
    LINK_EXTENDED, LINK_GEN_SHIFT, LINK_HELD, LINK_KEPT, LINK_LINKED, LINK_PENDING_MASK, LINK_SERVER_SHIFT,
    LINK_STATUS_MASK, QUEUE_NUMBER_MASK, QUEUE_NUMBER_SHIFT, QUEUE_TAKEN, SRV_LOST, SRV_RETIRE,
};

/// How often a place is looked at that a program is just writing to.
const PLACE_SPINS: u32 = 200;

impl Datapath {
    /// Whether programs can keep requests at all ([`crate::Config::kept_bytes_max`], and lane A).
    pub fn can_keep(&self) -> bool {
        self.local_works && self.keeps
    }

    /// Whether programs may keep requests of this pool for which no server is idle. User space says so when no more servers are to be opened: what is kept
    /// is not heard of. When it takes that back it [drains](Self::drain_queue) the queue.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn set_pool_keeps(&self, pool: PoolSlot, keeps: bool) -> Result<(), Error> {
        self.pools.keeps(self.check_pool(pool)?).store(keeps.into(), SeqCst);
        Ok(())
    }

    /// How many servers of a pool are in lane A: those fetch what is kept themselves.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn local_servers(&self, pool: PoolSlot) -> Result<u32, Error> {
        let p = self.check_pool(pool)?;
        let local = (0..self.pools.ordinals(p).load(SeqCst))
            .filter_map(|ordinal| self.server_at(pool, ordinal))
            .filter(|server| self.is_local(server.index));
        Ok(local.count() as u32)
    }

    /// Places of a pool's queue that are taken, among them those of clients that have been taken to user space since.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn queue_length(&self, pool: PoolSlot) -> Result<u64, Error> {
        Ok(self.queue_length_of(self.check_pool(pool)?))
    }

    pub(crate) fn queue_length_of(&self, p: u32) -> u64 {
        let begin = self.pools.queue_begin(p).load(SeqCst);
        self.pools.queue_end(p).load(SeqCst).saturating_sub(begin)
    }

    /// Bytes of all requests that are kept now.
    pub fn kept_bytes(&self) -> u64 {
        let bytes = |c: u32| {
            let link = self.clients.link(c).load(SeqCst);
            let is_kept = self.kept_since(c, link).is_some() && self.clients.in_use(c).load(SeqCst) != 0;
            if is_kept { self.kept.length(c).load(Relaxed).into() } else { 0u64 }
        };
        (0..self.kept.len()).map(bytes).sum()
    }

    /// Empties a pool's queue and returns its clients, first come first: [`Self::take`] each. A program that is just keeping another one announces the pool
    /// afterwards, if it may not keep it any more.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn drain_queue(&self, pool: PoolSlot) -> Result<Vec<ClientSlot>, Error> {
        let p = self.check_pool(pool)?;
        let mut clients = Vec::new();
        for _ in 0..2 * QUEUE_PLACES {
            let Some((number, c)) = self.queue_head(p) else { break };
            if self.empty_place(p, number, c) && self.is_kept_at(p, c, number) {
                clients.push(self.client_slot(c));
            }
        }
        Ok(clients)
    }

    /// Links clients of the queue to idle servers and writes their requests, until one of the two lacks. Returns clients that no idle server fits, out of the
    /// queue: [`Self::take`] each. Nothing while clients wait in user space, or the pool is closed.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn serve_queue(&self, pool: PoolSlot) -> Result<Vec<ClientSlot>, Error> {
        let p = self.check_pool(pool)?;
        let mut unfit = Vec::new();
        for _ in 0..2 * QUEUE_PLACES {
            if self.pools.waiters(p).load(SeqCst) != 0 || self.pools.flags(p).load(SeqCst) != 0 {
                break;
            }
            let Some((number, c)) = self.queue_head(p) else { break };
            if !self.is_kept_at(p, c, number) {
                self.empty_place(p, number, c);
                continue;
            }
            // A server of lane D is not for them: another one than the program would write the request beside what the client says next.
            let Some(s) = self.take_for(p, c, true) else {
                // No more than there are servers: others that become idle may fit those behind.
                let idle = (0..POOL_ORDINALS_MAX / 64)
                    .map(|word| self.pools.idle(p, word).load(SeqCst).count_ones() as usize);
                if unfit.len() >= idle.sum() {
                    break;
                }
                if self.empty_place(p, number, c) && self.is_kept_at(p, c, number) {
                    unfit.push(self.client_slot(c));
                }
                continue;
            };
            let request = self.named_for(c, s);
            if !self.empty_place(p, number, c) {
                self.put_back(s);
                continue;
            }
            let Some(request) = request else {
                self.put_back(s);
                if self.is_kept_at(p, c, number) {
                    unfit.push(self.client_slot(c));
                }
                continue;
            };
            // Before there is a link: what the client says next waits for the backend to have read this.
            self.servers.tx_expect(s).fetch_add(request.len() as u64, SeqCst);
            if !self.link_kept(p, c, s, number) {
                self.servers.tx_expect(s).fetch_sub(request.len() as u64, SeqCst);
                self.put_back(s);
                continue;
            }
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            let written = rustix::net::send(socket::borrow(self.server_fd(s)), &request, flags);
            if written != Ok(request.len()) {
                // A connection on which nothing is under way takes as much as that, or is broken.
                let _ = rustix::net::shutdown(socket::borrow(self.server_fd(s)), Shutdown::Both);
            }
        }
        Ok(unfit)
    }

    /// The number of the first place and whose it is; `None` if the queue is empty, or a program is about to write there.
    fn queue_head(&self, p: u32) -> Option<(u64, u32)> {
        for _ in 0..PLACE_SPINS {
            let begin = self.pools.queue_begin(p).load(SeqCst);
            if begin == self.pools.queue_end(p).load(SeqCst) {
                return None;
            }
            let word = self.pools.place(p, begin).load(SeqCst);
            if word == place_word(begin, word as u32) {
                return Some((begin, word as u32));
            }
            std::hint::spin_loop();
        }
        None
    }

    /// Empties the first place, if it still is this client's.
    fn empty_place(&self, p: u32, number: u64, c: u32) -> bool {
        let place = self.pools.place(p, number);
        if place.compare_exchange(place_word(number, c), 0, SeqCst, SeqCst).is_err() {
            return false;
        }
        self.pools.queue_begin(p).store(number + 1, SeqCst);
        true
    }

    /// Whether the request that waits at this place is the client's still. One that was kept under another number of its own is not it.
    fn is_kept_at(&self, p: u32, c: u32, number: u64) -> bool {
        c < self.kept.len()
            && self.clients.pool(c).load(SeqCst) == p
            && self.clients.link(c).load(SeqCst) & (LINK_KEPT | LINK_LINKED | LINK_HELD) == LINK_KEPT
            && self.kept.place(c).load(SeqCst) == number
    }

    /// What a client said, with the names that a server has for its statements; `None` if it lacks one.
    fn named_for(&self, c: u32, s: u32) -> Option<Vec<u8>> {
        let mut bytes = self.kept.bytes(c);
        for (at, statement) in self.kept.uses(c) {
            let name = self.statement_name(s, statement)?;
            bytes.get_mut(at as usize..at as usize + name.len())?.copy_from_slice(&name);
        }
        Some(bytes)
    }

    /// As a program does that hands on.
    fn link_kept(&self, p: u32, c: u32, s: u32, number: u64) -> bool {
        let old = self.clients.link(c).load(SeqCst);
        if !self.is_kept_at(p, c, number) {
            return false;
        }
        let (now, kept) = (monotonic_ns(), &self.kept);
        self.servers.run_bytes(s).store(0, Relaxed);
        let at_ns = kept.at_ns(c).load(Relaxed);
        let extended = if kept.extended(c).load(Relaxed) != 0 { LINK_EXTENDED } else { 0 };
        let pending = u64::from(kept.syncs(c).load(Relaxed)) & LINK_PENDING_MASK;
        let new =
            (old >> LINK_GEN_SHIFT).wrapping_add(1) << LINK_GEN_SHIFT | LINK_LINKED | extended | pending;
        let new = new | u64::from(s) << LINK_SERVER_SHIFT;
        if self.clients.link(c).compare_exchange(old, new, SeqCst, SeqCst).is_err() {
            return false;
        }
        for word in [self.clients.xact_start_ns(c), self.clients.query_start_ns(c), self.clients.active_ns(c)]
        {
            word.store(now, Relaxed);
        }
        kept.handed(c).store(u64::MAX, SeqCst);
        self.clients.links(c).fetch_add(1, SeqCst);
        kept.waits(c).fetch_add(1, SeqCst);
        kept.wait_ns(c).fetch_add(now.saturating_sub(at_ns), SeqCst);
        true
    }

    /// A server that was taken for a client goes back.
    fn put_back(&self, s: u32) {
        self.servers.peer(s).store(0, SeqCst);
        self.show_idle(s);
    }

    /// Of a client that user space holds: its kept request, if it has one or had one that the server never read. Its link is none then.
    pub(crate) fn take_kept(&self, c: u32, link: u64) -> Option<Kept> {
        if c >= self.kept.len() {
            return None;
        }
        match server_of(link) {
            None if link & LINK_KEPT == 0 => return None,
            None => {
                self.clients.link(c).fetch_and(!LINK_KEPT, SeqCst);
            }
            Some(s) if !self.is_unread(c, s, link) => return None,
            Some(s) => {
                self.clients.link(c).store(link >> LINK_GEN_SHIFT << LINK_GEN_SHIFT | LINK_HELD, SeqCst);
                self.clients.flags(c).store(0, Relaxed);
                self.clients.set_request_state(c, &crate::StreamState::BOUNDARY);
                self.servers.peer(s).store(0, SeqCst);
            }
        }
        let bytes = self.kept.bytes(c);
        self.clients.cycle_bytes(c).store(0, Relaxed);
        self.client_side[c as usize].returned.fetch_add(bytes.len() as u64, SeqCst);
        Some(Kept { bytes, at_ns: self.kept.at_ns(c).load(Relaxed) })
    }

    /// A backend whose `send()` fails ends, and what that send had brought along is not read: the answer that it had for another client is not in
    /// that one's socket, and nothing has come since.
    fn is_unread(&self, c: u32, s: u32, link: u64) -> bool {
        self.is_local(s)
            && self.kept.handed(c).load(SeqCst) == link >> LINK_GEN_SHIFT
            && link & LINK_STATUS_MASK == 0
            && link & LINK_PENDING_MASK == u64::from(self.kept.syncs(c).load(SeqCst))
            && self.servers.run_bytes(s).load(SeqCst) == 0
            // In this order: whoever frees the client sets the flag before.
            && (self.owes_dead(s) || self.servers.flags(s).load(SeqCst) & SRV_LOST != 0)
    }

    /// The client to which a server owes the answer that it sent last, behind a request, is gone and has not all of it.
    fn owes_dead(&self, s: u32) -> bool {
        let (c, cookie) =
            (self.servers.owed_client(s).load(SeqCst), self.servers.owed_cookie(s).load(SeqCst));
        if cookie == 0 || self.clients.cookie(c).load(SeqCst) != cookie {
            return false;
        }
        let (client, fd) = (self.client_slot(c), self.client_fd(c));
        if fd < 0 {
            // Freed. What it lacked then is in SRV_LOST.
            return false;
        }
        let written = socket::bytes_enqueued_at_end(socket::borrow(fd));
        let base = self.client_side[c as usize].seq_base.load(Acquire);
        let missing = |written: u64| {
            self.servers
                .owed_seq(s)
                .load(SeqCst)
                .wrapping_sub(base.wrapping_add(written as u32))
                .cast_signed()
                > 0
        };
        // The client may be another worker's, which just closes it: what another socket says counts for nothing.
        matches!(written, Ok(Some(written)) if missing(written)) && self.check_client(client).is_ok()
    }

    /// A client leaves that is owed answers: the backends that could not send them end, and have not read what those sends brought along.
    pub(crate) fn note_lost_answers(&self, c: u32) {
        let over = socket::bytes_enqueued_at_end(socket::borrow(self.client_fd(c)));
        if c >= self.kept.len() || !matches!(over, Ok(Some(_))) {
            return;
        }
        let owes = |s: &u32| {
            self.servers.in_use(*s).load(SeqCst) != 0
                && self.servers.owed_client(*s).load(SeqCst) == c
                && self.owes_dead(*s)
        };
        for s in (0..self.servers_used()).filter(owes) {
            self.servers.flags(s).fetch_or(SRV_RETIRE | SRV_LOST, SeqCst);
        }
    }

    /// A send whose first part the kernel could not bring where it was told (it lacks memory) does not go on to the second: its run is over when the backend has
    /// closed its socket.
    pub(crate) fn end_broken_run(&self, s: u32) {
        if self.servers.brings(s).load(SeqCst) == 0 || self.server_settled(s) {
            return;
        }
        let (sk_addr, cookie) = (self.servers.sk_addr(s).load(SeqCst), self.servers.cookie(s).load(Relaxed));
        if self.ask_socket(sk_addr, cookie).is_ok_and(|gauge| gauge.queued == u32::MAX) {
            self.servers.brings(s).store(0, SeqCst);
            self.servers.runs_end(s).store(self.servers.runs_begin(s).load(SeqCst), SeqCst);
        }
    }

    /// Bytes of a client's requests that programs count as forwarded and that are not: one that is kept, and those that came back.
    pub(crate) fn not_forwarded(&self, c: u32) -> u64 {
        let returned = self.client_side[c as usize].returned.load(SeqCst);
        let kept = self.kept_since(c, self.clients.link(c).load(SeqCst));
        returned + kept.map_or(0, |_| self.kept.length(c).load(Relaxed).into())
    }

    /// Since when a request of the client is kept.
    pub(crate) fn kept_since(&self, c: u32, link: u64) -> Option<u64> {
        (link & LINK_KEPT != 0 && server_of(link).is_none() && c < self.kept.len())
            .then(|| self.kept.at_ns(c).load(Relaxed))
    }
}

fn place_word(number: u64, client: u32) -> u64 {
    QUEUE_TAKEN | (number & QUEUE_NUMBER_MASK) << QUEUE_NUMBER_SHIFT | u64::from(client)
}
