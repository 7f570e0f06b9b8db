// SPDX-License-Identifier: Apache-2.0
//! Fed links: user space reads a client's requests and writes them to a server; programs forward the responses and release the server.
//!
//! It is what a queue in user space needs: what programs do not keep (`queue.rs`), and all that waits for a server of lane D. While clients queue there their
//! requests are with user space in any case. But the answer needs no second wake-up of the process: the program that sees the end of the
//! transaction returns the server to the idle set and announces it.
//!
//! A fed client's request direction stays with user space; it is held except while a fed link stands.

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use rustix::io::Errno;
use rustix::net::SendFlags;

use crate::datapath::{ClientSlot, Datapath, ServerSlot};
use crate::error::Error;
use crate::handover::{monotonic_ns, server_of};
use crate::socket;
use crate::words::{
    CLEAR_KNOWN, CLI_NAMED, CLI_UNNAMED, DIR_USER, LINK_EXTENDED, LINK_GEN_SHIFT, LINK_HELD, LINK_LINKED,
    LINK_OPEN, LINK_PENDING_MASK, LINK_SERVER_SHIFT, PEER_LINKED,
};

/// What user space is about to write to the server of a fed link: whole messages, the last one of which asks for a ReadyForQuery.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fed {
    /// ReadyForQuery that it asks for, at least 1.
    pub ready: u16,
    /// It ends in a Sync, and not in a Query.
    pub extended: bool,
    /// Behind it the server's unnamed statement is the client's own, or none.
    pub unnamed: bool,
    /// It uses named statements, under the server's names: errors are user space's to read.
    pub named: bool,
}

impl Fed {
    fn flags(self) -> u32 {
        (if self.unnamed { CLI_UNNAMED } else { 0 }) | (if self.named { CLI_NAMED } else { 0 })
    }

    fn word_bits(self) -> u64 {
        if self.extended { LINK_EXTENDED } else { 0 }
    }
}

impl Datapath {
    /// Whether all that was ever forwarded to an unlinked client is in its socket, so that the next server's answer cannot overtake it.
    ///
    /// `wrote`: user space has written to the client since its last fed link, after [`Self::client_drained`]. Without it, the program that
    /// saw the client's last request arrive has nearly always left the answer in memory.
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::System`] when the socket cannot be asked.
    pub fn is_clear_to_feed(&self, client: ClientSlot, wrote: bool) -> Result<bool, Error> {
        let c = self.check_client(client)?;
        let generation = self.clients.link(c).load(SeqCst) >> LINK_GEN_SHIFT;
        if !wrote && self.clients.clear(c).load(SeqCst) == CLEAR_KNOWN | generation {
            return Ok(true);
        }
        let written = self.client_written(c).map_err(Error::system("TCP_INFO of a client"))?;
        let Some(written) = written else { return Ok(false) };
        let missing = (self.clients.tx_expect(c).load(SeqCst) as u32).wrapping_sub(written).cast_signed();
        if !wrote && missing > 0 || !self.is_direct_settled(c)? {
            return Ok(false);
        }
        self.clients.tx_expect(c).store(written.into(), SeqCst);
        Ok(true)
    }

    /// Takes the first idle server of the client's pool with the client's parameters for a fed link, as a program would: its responses
    /// stay with the kernel. Follow with [`Self::feed`] or [`Self::unfeed`].
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn take_to_feed(&self, client: ClientSlot) -> Result<Option<ServerSlot>, Error> {
        let c = self.check_client(client)?;
        // A server of lane D would write its answer beside one of lane B that the application has not read.
        let only_local = !self.is_direct_read(c)?;
        let taken = self.take_for(self.clients.pool(c).load(Relaxed), c, only_local);
        Ok(taken.map(|s| self.server_slot(s)))
    }

    /// An idle server of this pool for a client: one with its parameters, whose peer it is from now on.
    pub(crate) fn take_for(&self, p: u32, c: u32, only_local: bool) -> Option<u32> {
        let wanted = self.clients.fingerprint(c).load(SeqCst);
        let mine = PEER_LINKED | u64::from(c);
        self.take_first(
            p,
            |print| print == wanted,
            |s| {
                if only_local && !self.is_local(s) {
                    self.show_idle(s);
                    return false;
                }
                // User space claims by setting DIR_USER, then reading peer: one of the two sees the other.
                // What is not 0 is a link that was made meanwhile.
                let peer = self.servers.peer(s);
                if peer.compare_exchange(0, mine, SeqCst, SeqCst).is_err() {
                    return false;
                }
                let free = self.servers.dir(s).load(SeqCst) & DIR_USER == 0;
                if !free {
                    let _ = peer.compare_exchange(mine, 0, SeqCst, SeqCst);
                }
                free
            },
        )
    }

    /// Links a held, unlinked client that [is clear](Self::is_clear_to_feed) to the server that was [taken](Self::take_to_feed) for it.
    /// [`Self::write_fed`] the requests next.
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::State`] when the two are not in that state.
    pub fn feed(&self, client: ClientSlot, server: ServerSlot, fed: Fed) -> Result<(), Error> {
        let (c, s) = (self.check_client(client)?, self.check_server(server)?);
        let old = self.clients.link(c).load(SeqCst);
        if old & (LINK_HELD | LINK_LINKED) != LINK_HELD
            || self.servers.peer(s).load(SeqCst) != PEER_LINKED | u64::from(c)
        {
            return Err(Error::State("feed: the client is not held and unlinked, or the server not its"));
        }
        self.servers.run_bytes(s).store(0, Relaxed);
        self.begin_fed(c, s, old, fed);
        Ok(())
    }

    /// Begins to feed a link that [`Self::link`] has made and whose responses [`Self::give_server`] has given to the kernel.
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::State`] when the client is not held and linked.
    pub fn feed_linked(&self, client: ClientSlot, fed: Fed) -> Result<(), Error> {
        let c = self.check_client(client)?;
        let old = self.clients.link(c).load(SeqCst);
        let Some(s) = server_of(old).filter(|_| old & LINK_HELD != 0) else {
            return Err(Error::State("feed_linked: the client is not held and linked"));
        };
        self.begin_fed(c, s, old, fed);
        Ok(())
    }

    fn begin_fed(&self, c: u32, s: u32, old: u64, fed: Fed) {
        self.clients.flags(c).store(fed.flags(), Relaxed);
        self.clients.set_request_state(c, &crate::StreamState::BOUNDARY);
        let now = monotonic_ns();
        for word in [self.clients.xact_start_ns(c), self.clients.query_start_ns(c), self.clients.active_ns(c)]
        {
            word.store(now, Relaxed);
        }
        let generation = (old >> LINK_GEN_SHIFT).wrapping_add(1) << LINK_GEN_SHIFT;
        let new = generation | LINK_LINKED | u64::from(s) << LINK_SERVER_SHIFT;
        let new = new | fed.word_bits() | u64::from(fed.ready);
        self.clients.link(c).store(new, SeqCst);
    }

    /// Adds requests to a fed link that stands: in a transaction, or behind others of a pipeline. `None`: it has just ended, or user space
    /// is to take it.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn feed_more(&self, client: ClientSlot, fed: Fed) -> Result<Option<ServerSlot>, Error> {
        let c = self.check_client(client)?;
        let mut old = self.clients.link(c).load(SeqCst);
        loop {
            let pending = old & LINK_PENDING_MASK;
            let Some(s) = server_of(old) else { return Ok(None) };
            // In COPY the meaning of a request depends on what the server says; more than a quarter of the counter is a flood.
            if old & (LINK_HELD | LINK_OPEN | crate::words::LINK_COPY) != 0
                || pending + u64::from(fed.ready) > LINK_PENDING_MASK / 4
            {
                return Ok(None);
            }
            if pending == 0 {
                self.clients.query_start_ns(c).store(monotonic_ns(), Relaxed);
            }
            // Whether an answer is the extended protocol's is said of what was asked last.
            let new = (old & !LINK_EXTENDED | fed.word_bits()) + u64::from(fed.ready);
            match self.clients.link(c).compare_exchange(old, new, SeqCst, SeqCst) {
                Ok(_) => {
                    self.clients.flags(c).fetch_or(fed.flags(), SeqCst);
                    return Ok(Some(self.server_slot(s)));
                }
                Err(now) => old = now,
            }
        }
    }

    /// Writes requests to the server of a fed link, from whatever thread has the client. Returns how many bytes its socket took.
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::System`] when the connection is broken.
    pub fn write_fed(&self, server: ServerSlot, bytes: &[u8]) -> Result<usize, Error> {
        let s = self.check_server(server)?;
        // Before the bytes are there: whoever compares the two later must not find fewer expected.
        self.servers.tx_expect(s).fetch_add(bytes.len() as u64, SeqCst);
        let fd = socket::borrow(self.server_fd(s));
        let sent = loop {
            match rustix::net::send(fd, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break Ok(0),
                outcome => break outcome,
            }
        };
        let taken = *sent.as_ref().unwrap_or(&0);
        self.servers.tx_expect(s).fetch_sub((bytes.len() - taken) as u64, SeqCst);
        sent.map_err(|error| Error::System { what: "writing to a server", source: error.into() })
    }

    /// Holds a fed client. True if its link stands: [`Self::take`] it; else user space has both of its directions.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn hold_fed(&self, client: ClientSlot) -> Result<bool, Error> {
        let c = self.check_client(client)?;
        Ok(self.clients.link(c).fetch_or(LINK_HELD, SeqCst) & LINK_LINKED != 0)
    }

    /// Whether a fed client's link stands.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn is_linked(&self, client: ClientSlot) -> Result<bool, Error> {
        Ok(self.clients.link(self.check_client(client)?).load(SeqCst) & LINK_LINKED != 0)
    }

    /// A server that was [taken to be fed](Self::take_to_feed), and was not, is user space's. False: it speaks at this moment, try again.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn unfeed(&self, server: ServerSlot) -> Result<bool, Error> {
        let s = self.check_server(server)?;
        self.servers.dir(s).fetch_or(DIR_USER, SeqCst);
        if !self.server_settled(s) {
            return Ok(false);
        }
        self.servers.peer(s).store(0, SeqCst);
        Ok(true)
    }
}
