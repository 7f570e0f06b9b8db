// SPDX-License-Identifier: Apache-2.0
//! What user space may look at while the kernel forwards: links, queues, counters, costs.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use libbpf_rs::{MapCore, MapFlags, ProgramInput};

use crate::datapath::{ClientSlot, Datapath, PoolSlot, ServerSlot};
use crate::error::Error;
use crate::handover::{LinkState, server_of};
use crate::names::{Counter, Reason};
use crate::shared::{Array, POOL_ORDINALS_MAX};
use crate::skel::types;
use crate::words::{DIR_USER, PEER_LINKED};

/// A client as the kernel sees it: for SHOW, timeouts and statistics. Each word is current, together they are not a
/// snapshot of one instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientInfo {
    /// The kernel owns its requests.
    pub in_kernel: bool,
    /// Its server.
    pub server: Option<ServerSlot>,
    /// State of the link; `batch` is only known after a take.
    pub link: LinkState,
    /// CLOCK_MONOTONIC nanoseconds of the last chunk a program forwarded, 0 if none.
    pub active_ns: u64,
    /// Start of the current or last transaction, same clock.
    pub xact_start_ns: u64,
    /// When `pending` last left 0, same clock.
    pub query_start_ns: u64,
    /// Since when a request of its own is kept for want of a server, same clock.
    pub kept_since_ns: Option<u64>,
    /// Counters since registration, of what programs did.
    pub stats: ClientStats,
}

/// A program is over in a microsecond or two, so one of these looks finds it between two chunks.
const STATS_TRIES: u32 = 64;

/// Counters of one client since its registration; only what went through a lane.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ClientStats {
    /// Transactions that ended in a lane: each of a pipeline.
    pub xacts: u64,
    /// Links that programs made, whoever ends them; modulo 2^32.
    pub links: u32,
    /// ReadyForQuery messages forwarded.
    pub queries: u64,
    /// Request bytes forwarded.
    pub request_bytes: u64,
    /// Response bytes forwarded.
    pub response_bytes: u64,
    /// Nanoseconds in a transaction, over `xacts`.
    pub xact_ns: u64,
    /// Nanoseconds with something pending.
    pub query_ns: u64,
    /// Requests that were kept for want of a server, and then had one.
    pub waits: u64,
    /// Nanoseconds that they were kept.
    pub wait_ns: u64,
}

impl ClientStats {
    /// What has been added since the last call: `self` is what was seen so far. A program that has to try again takes back what it had counted, so a look
    /// that is not [settled](Datapath::settled_stats) may be followed by one that finds less; nothing was added then.
    pub fn advance(&mut self, now: Self) -> Self {
        fn grow(seen: &mut u64, now: u64) -> u64 {
            let added = now.saturating_sub(*seen);
            *seen += added;
            added
        }
        Self {
            xacts: grow(&mut self.xacts, now.xacts),
            // Never taken back.
            links: now.links.wrapping_sub(std::mem::replace(&mut self.links, now.links)),
            queries: grow(&mut self.queries, now.queries),
            request_bytes: grow(&mut self.request_bytes, now.request_bytes),
            response_bytes: grow(&mut self.response_bytes, now.response_bytes),
            xact_ns: grow(&mut self.xact_ns, now.xact_ns),
            query_ns: grow(&mut self.query_ns, now.query_ns),
            waits: grow(&mut self.waits, now.waits),
            wait_ns: grow(&mut self.wait_ns, now.wait_ns),
        }
    }
}

/// Run-time statistics of one program; zero unless the kernel measures: `kernel.bpf_stats_enabled`, [`crate::measure_programs`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProgramCost {
    /// Name in the object.
    pub name: &'static str,
    /// Instructions that the verifier walked at load.
    pub verified_instructions: u32,
    /// Times it ran.
    pub runs: u64,
    /// Nanoseconds in all runs.
    pub run_ns: u64,
}

/// What a program tells of a socket by its address.
pub(crate) struct Gauge {
    /// Chunks redirected to it that its worker has not delivered; all ones if there is no such socket.
    pub(crate) queued: u32,
    /// Whether this kernel could tell.
    able: bool,
    /// Users of its psock: 1 when nobody sends, receives or delivers; 0 if there is no such socket.
    pub(crate) refs: u32,
    /// Of the client: bytes that went straight to the application and that it has not read.
    pub(crate) unread: u32,
    /// Of the client: its application has closed its socket, or none is attached.
    pub(crate) gone: bool,
    /// A program reads what comes to the socket.
    pub(crate) has_verdict: bool,
}

impl Datapath {
    /// A look at a client's link.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn client_info(&self, client: ClientSlot) -> Result<ClientInfo, Error> {
        let i = self.check_client(client)?;
        let c = &self.clients;
        let link = c.link(i).load(SeqCst);
        Ok(ClientInfo {
            in_kernel: c.req_dir(i).load(SeqCst) & DIR_USER == 0,
            server: server_of(link).map(|s| self.server_slot(s)),
            link: LinkState::from_word(link),
            active_ns: c.active_ns(i).load(Relaxed),
            xact_start_ns: c.xact_start_ns(i).load(Relaxed),
            query_start_ns: c.query_start_ns(i).load(Relaxed),
            kept_since_ns: self.kept_since(i, link),
            stats: self.stats_now(i),
        })
    }

    fn stats_now(&self, i: u32) -> ClientStats {
        let c = &self.clients;
        let of_kept = |word: &dyn Fn(&Array<types::kept_request>) -> &AtomicU64| {
            if i < self.kept.len() { word(&self.kept).load(SeqCst) } else { 0 }
        };
        ClientStats {
            xacts: c.xacts(i).load(SeqCst),
            links: c.links(i).load(SeqCst),
            queries: c.queries(i).load(SeqCst),
            request_bytes: c.req_fwd(i).load(SeqCst).wrapping_sub(self.not_forwarded(i)),
            waits: of_kept(&|kept| kept.waits(i)),
            wait_ns: of_kept(&|kept| kept.wait_ns(i)),
            response_bytes: c.resp_bytes(i).load(SeqCst),
            xact_ns: c.xact_ns(i).load(SeqCst),
            query_ns: c.query_ns(i).load(SeqCst),
        }
    }

    /// The counters of a client that a lane carries, with nothing in them that may be taken back: a program counts an answer before the swap of the
    /// link word that makes it so. `None`, rarely, while one is at it; ask again later. After [`Self::take`] those of [`Self::client_info`] are final.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn settled_stats(&self, client: ClientSlot) -> Result<Option<ClientStats>, Error> {
        let i = self.check_client(client)?;
        // The link and what its server's program has begun; None while that is between its two ends.
        let look = || {
            let link = self.clients.link(i).load(SeqCst);
            match server_of(link) {
                Some(s) => self.server_settled(s).then(|| (link, self.runs_begun(s))),
                None => Some((link, 0)),
            }
        };
        for _ in 0..STATS_TRIES {
            let before = look();
            let stats = self.stats_now(i);
            if before.is_some() && before == look() {
                return Ok(Some(stats));
            }
            std::hint::spin_loop();
        }
        Ok(None)
    }

    /// The ordinals now in the idle set of a pool, lowest first.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn idle_ordinals(&self, pool: PoolSlot) -> Result<Vec<u32>, Error> {
        let p = self.check_pool(pool)?;
        let mut ordinals = Vec::new();
        for word in 0..POOL_ORDINALS_MAX / 64 {
            let mut bits = self.pools.idle(p, word).load(SeqCst);
            while bits != 0 {
                ordinals.push(word as u32 * 64 + bits.trailing_zeros());
                bits &= bits - 1;
            }
        }
        Ok(ordinals)
    }

    /// When a program last forwarded a server's ReadyForQuery, in nanoseconds of CLOCK_MONOTONIC; 0: never.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn server_active_ns(&self, server: ServerSlot) -> Result<u64, Error> {
        Ok(self.servers.active_ns(self.check_server(server)?).load(Relaxed))
    }

    /// Response bytes that programs redirected and that are not in their clients' TCP send queues yet, over all clients.
    pub fn queued_bytes(&self) -> u64 {
        self.sum_of_clients(|c| {
            let expected = self.clients.tx_expect(c).load(SeqCst) as u32;
            let written = self.client_written(c).ok().flatten();
            written.map_or(0, |written| missing(expected, written))
        })
    }

    /// Request bytes that programs redirected and that are not in the TCP send queues of the pooler's sockets to servers yet, over all
    /// servers of lane D. (In lane A the kernel counts segments, no bytes.)
    pub fn queued_request_bytes(&self) -> u64 {
        let figure = |s: u32| {
            let slot = self.server_slot(s);
            if self.servers.in_use(s).load(SeqCst) == 0 || self.server_fd(s) < 0 || self.is_local(s) {
                return 0;
            }
            let expected = self.servers.tx_expect(s).load(SeqCst) as u32;
            let written = self.server_written(s).ok().flatten();
            let figure = written.map_or(0, |written| missing(expected, written));
            // As in `sum_of_clients`.
            if self.check_server(slot).is_err() { 0 } else { figure.into() }
        };
        (0..self.server_side.len() as u32).map(figure).sum()
    }

    /// Response bytes that went straight into applications' own sockets (lane B) and that these have not read, as the kernel charges them, over
    /// all clients.
    pub fn applications_unread_bytes(&self) -> u64 {
        self.sum_of_clients(|c| match self.clients.app_addr(c).load(SeqCst) {
            0 => 0,
            _ => self.ask(0, 0, c).map_or(0, |gauge| gauge.unread),
        })
    }

    /// Adds a figure up over all clients. Costs system calls for each: for an operator's question, not for an event loop's turn.
    fn sum_of_clients(&self, of: impl Fn(u32) -> u32) -> u64 {
        let figure = |c: u32| {
            let slot = self.client_slot(c);
            if self.clients.in_use(c).load(SeqCst) == 0 || self.client_fd(c) < 0 {
                return 0;
            }
            let figure = of(c);
            // The slot was the client's for the whole look, or the figure is somebody else's.
            if self.check_client(slot).is_err() { 0 } else { figure.into() }
        };
        (0..self.client_side.len() as u32).map(figure).sum()
    }

    /// The client that a server is linked to.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn server_peer(&self, server: ServerSlot) -> Result<Option<ClientSlot>, Error> {
        let peer = self.servers.peer(self.check_server(server)?).load(SeqCst);
        Ok((peer & PEER_LINKED != 0).then(|| self.client_slot(peer as u32)))
    }

    /// Is everything that was redirected to the client's socket in its TCP send queue, and everything that went straight to the
    /// application read? User space may write to it, or close it without losing forwarded bytes, only then.
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::System`] when the socket cannot be asked.
    pub fn client_drained(&self, client: ClientSlot) -> Result<bool, Error> {
        let c = self.check_client(client)?;
        let expected = self.clients.tx_expect(c).load(SeqCst) as u32;
        let written = self.client_written(c).map_err(Error::system("TCP_INFO of a client"))?;
        Ok(written.is_some_and(|written| missing(expected, written) == 0) && self.is_direct_read(c)?)
    }

    /// Is everything that was redirected towards the server written, or readable by the backend (lane A)? User space
    /// may write to the server only then, or its bytes could overtake.
    ///
    /// # Errors
    /// As [`Self::client_drained`].
    pub fn server_drained(&self, server: ServerSlot) -> Result<bool, Error> {
        let s = self.check_server(server)?;
        if self.is_local(s) {
            return self.backend_drained(s);
        }
        let expected = self.servers.tx_expect(s).load(SeqCst) as u32;
        let written = self.server_written(s).map_err(Error::system("TCP_INFO of a server"))?;
        Ok(written.is_some_and(|written| missing(expected, written) == 0))
    }

    fn backend_drained(&self, s: u32) -> Result<bool, Error> {
        let sk_addr = self.servers.sk_addr(s).load(SeqCst);
        let cookie = self.servers.cookie(s).load(Relaxed);
        let queued = self.ask_socket(sk_addr, cookie)?.queued;
        // Unknown (all ones): the backend closed its socket; the caller learns that from the hang-up.
        Ok((queued == 0 || queued == u32::MAX) && self.is_request_settled(s)?)
    }

    /// Whether programs of this kernel can read a socket by its address, as lane A must.
    pub(crate) fn can_read_sockets(&self) -> Result<bool, Error> {
        self.ask_socket(0, 0).map(|gauge| gauge.able)
    }

    pub(crate) fn ask_socket(&self, sk_addr: u64, cookie: u64) -> Result<Gauge, Error> {
        self.ask(sk_addr, cookie, u32::MAX)
    }

    pub(crate) fn ask(&self, sk_addr: u64, cookie: u64, client: u32) -> Result<Gauge, Error> {
        // struct backend_queue_args: sk_addr, cookie, queued, able, refs, client, unread, gone, read.
        let mut args = [0u8; size_of::<types::backend_queue_args>()];
        args[..8].copy_from_slice(&sk_addr.to_ne_bytes());
        args[8..16].copy_from_slice(&cookie.to_ne_bytes());
        args[28..32].copy_from_slice(&client.to_ne_bytes());
        let input = ProgramInput { context_in: Some(&mut args), ..Default::default() };
        self.skel.progs.backend_queue.test_run(input).map_err(|e| Error::System {
            what: "asking a backend's queue",
            source: std::io::Error::other(e.to_string()),
        })?;
        let word = |at: usize| u32::from_ne_bytes([args[at], args[at + 1], args[at + 2], args[at + 3]]);
        Ok(Gauge {
            queued: word(16),
            able: word(20) != 0,
            refs: word(24),
            unread: word(32),
            gone: word(36) != 0,
            has_verdict: word(40) != 0,
        })
    }

    /// Hand-overs by reason, then what else the programs count, as names and values for SHOW KERNEL and metrics.
    pub fn counters(&self) -> Vec<(&'static str, u64)> {
        let reasons = Reason::ALL.iter().map(|r| r.name());
        reasons
            .chain(Counter::ALL.iter().map(|c| c.name()))
            .enumerate()
            .map(|(i, name)| (name, self.count(i)))
            .collect()
    }

    /// One counter.
    pub fn counter(&self, counter: Counter) -> u64 {
        self.count(Reason::ALL.len() + counter as usize)
    }

    /// How often programs handed over for this reason.
    pub fn reason_count(&self, reason: Reason) -> u64 {
        self.count(reason as usize)
    }

    /// Sets all counters to 0.
    ///
    /// # Errors
    /// [`Error::Load`], when the map cannot be written.
    pub(crate) fn reset_counters(&self) -> Result<(), Error> {
        let counters = &self.skel.maps.counters;
        for index in 0..(Reason::ALL.len() + Counter::ALL.len()) as u32 {
            let key = index.to_ne_bytes();
            let zeroes =
                |values: Vec<Vec<u8>>| values.iter().map(|value| vec![0; value.len()]).collect::<Vec<_>>();
            let values = counters.lookup_percpu(&key, MapFlags::ANY).map(Option::unwrap_or_default);
            values
                .and_then(|values| counters.update_percpu(&key, &zeroes(values), MapFlags::ANY))
                .map_err(|e| Error::Load { message: e.to_string() })?;
        }
        Ok(())
    }

    fn count(&self, index: usize) -> u64 {
        let key = (index as u32).to_ne_bytes();
        let Ok(Some(values)) = self.skel.maps.counters.lookup_percpu(&key, MapFlags::ANY) else { return 0 };
        values.iter().filter_map(|v| Some(u64::from_ne_bytes(v.get(..8)?.try_into().ok()?))).sum()
    }

    /// What the programs cost.
    pub fn program_costs(&self) -> Vec<ProgramCost> {
        let progs = &self.skel.progs;
        // The kernel measures the one that is attached, which goes on in the other.
        let (_, runs, run_ns) = crate::attach::cost(&progs.response_entry);
        let response = (crate::attach::cost(&progs.response_msg).0, runs, run_ns);
        [
            ("request_skb", crate::attach::cost(&progs.request_skb)),
            ("response_skb", crate::attach::cost(&progs.response_skb)),
            ("response_msg", response),
            ("request_msg", crate::attach::cost(&progs.request_msg)),
            ("backend_queue", crate::attach::cost(&progs.backend_queue)),
            ("socket_look", crate::attach::cost(&progs.socket_look)),
        ]
        .into_iter()
        .map(|(name, (verified_instructions, runs, run_ns))| ProgramCost {
            name,
            verified_instructions,
            runs,
            run_ns,
        })
        .collect()
    }
}

/// How many bytes a sequence number lacks of what is expected; 0 if it is there or beyond.
fn missing(expected: u32, written: u32) -> u32 {
    let missing = expected.wrapping_sub(written);
    if missing > i32::MAX as u32 { 0 } else { missing }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_links_may_overflow() {
        let look = |links| ClientStats { links, ..ClientStats::default() };
        let mut seen = look(u32::MAX);
        assert_eq!(seen.advance(look(2)), look(3));
        assert_eq!(seen.advance(look(2)), look(0));
    }

    #[test]
    fn what_is_taken_back_is_counted_once() {
        let look = |xacts, xact_ns| ClientStats { xacts, xact_ns, ..ClientStats::default() };
        let mut seen = ClientStats::default();
        assert_eq!(seen.advance(look(2, 700)), look(2, 700));
        // A program had counted a third, and takes it back.
        assert_eq!(seen.advance(look(3, 900)), look(1, 200));
        assert_eq!(seen.advance(look(2, 700)), look(0, 0));
        assert_eq!(seen.advance(look(3, 950)), look(0, 50));
        assert_eq!(seen.advance(look(4, 1000)), look(1, 50));
    }
}
