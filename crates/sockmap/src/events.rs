// SPDX-License-Identifier: Apache-2.0
//! Hand-overs as events: a ring buffer whose descriptor goes into the caller's epoll.
//!
//! An event is a hint that a slot wants attention; the slot's `reason` word is the truth. So a full ring loses
//! nothing: the programs raise a counter, and the next drain looks at every slot in use.

use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use libbpf_rs::{MapCore, RingBuffer, RingBufferBuilder};

use crate::datapath::{ClientSlot, Datapath, PoolSlot, ServerSlot, Side};
use crate::error::Error;
use crate::names::Reason;
use crate::socket;

/// `enum lane_event_kind`.
const EVENT_CLIENT_UP: u32 = 1;
const EVENT_SERVER_UP: u32 = 2;
const EVENT_POOL_IDLE: u32 = 3;

/// Something that only user space can go on with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The client's requests are with user space: the chunk that caused it waits in the socket. Call
    /// [`Datapath::take`], then read.
    ClientUp {
        /// Which client.
        client: ClientSlot,
        /// Why.
        reason: Reason,
    },
    /// The server's responses are with user space. [`Datapath::server_peer`] says who is linked, if anybody.
    ServerUp {
        /// Which server.
        server: ServerSlot,
        /// Why.
        reason: Reason,
    },
    /// A server of the pool went to the idle set while clients wait or the pool is closed.
    PoolIdle {
        /// Which pool.
        pool: PoolSlot,
    },
}

type Raw = [u32; 3];

pub(crate) struct Ring {
    buffer: Mutex<RingBuffer<'static>>,
    seen: Arc<Mutex<Vec<Raw>>>,
    fd: RawFd,
    lost_handled: AtomicU64,
}

impl Ring {
    pub(crate) fn new(map: &impl MapCore) -> Result<Self, Error> {
        let seen: Arc<Mutex<Vec<Raw>>> = Arc::default();
        let sink = Arc::clone(&seen);
        let failed = |e: libbpf_rs::Error| Error::Load { message: format!("event ring: {e:#}") };
        let mut builder = RingBufferBuilder::new();
        builder
            .add(map, move |bytes: &[u8]| {
                let word = |i: usize| {
                    bytes
                        .get(i * 4..i * 4 + 4)
                        .map_or(0, |b| u32::from_ne_bytes(b.try_into().unwrap_or_default()))
                };
                sink.lock().unwrap_or_else(PoisonError::into_inner).push([word(0), word(1), word(2)]);
                0
            })
            .map_err(failed)?;
        let buffer = builder.build().map_err(failed)?;
        let fd = buffer.epoll_fd();
        Ok(Self { buffer: Mutex::new(buffer), seen, fd, lost_handled: AtomicU64::new(0) })
    }
}

impl Datapath {
    /// Readable when events wait. Register it with EPOLLIN.
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        // The descriptor belongs to self.ring, which lives as long as self.
        socket::borrow(self.ring.fd)
    }

    /// Appends the events that are due to `out`. One thread at a time does the work; others wait for it.
    ///
    /// Events about slots that were taken or freed in the meantime are left out.
    ///
    /// # Errors
    /// [`Error::System`] when the ring cannot be read.
    pub fn drain_events(&self, out: &mut Vec<Event>) -> Result<(), Error> {
        let buffer = self.ring.buffer.lock().unwrap_or_else(PoisonError::into_inner);
        buffer.consume().map_err(|e| Error::System {
            what: "reading events",
            source: std::io::Error::other(e.to_string()),
        })?;
        // After the ring was emptied: what is lost from here on finds room, and is heard of next time.
        let lost = self.control.events_lost(0).load(Ordering::SeqCst);
        let raw = std::mem::take(&mut *self.ring.seen.lock().unwrap_or_else(PoisonError::into_inner));
        for [kind, slot, _] in raw {
            let event = match kind {
                EVENT_CLIENT_UP => self.client_event(slot),
                EVENT_SERVER_UP => self.server_event(slot),
                EVENT_POOL_IDLE => self.pool_event(slot),
                _ => None,
            };
            out.extend(event);
        }
        if lost != self.ring.lost_handled.swap(lost, Ordering::SeqCst) {
            self.scan_slots(out);
        }
        Ok(())
    }

    /// Every slot whose reason is set, and every pool that somebody waits for.
    fn scan_slots(&self, out: &mut Vec<Event>) {
        out.extend((0..self.client_side.len() as u32).filter_map(|slot| self.client_event(slot)));
        out.extend((0..self.server_side.len() as u32).filter_map(|slot| self.server_event(slot)));
        for index in 0..self.pool_side.len() as u32 {
            let wanted = self.pools.waiters(index).load(Ordering::SeqCst)
                | self.pools.flags(index).load(Ordering::SeqCst);
            if wanted != 0 || self.queue_length_of(index) > 0 {
                out.extend(self.pool_event(index));
            }
        }
    }

    fn pool_event(&self, index: u32) -> Option<Event> {
        let generation = generation(&self.pool_side, index)?;
        // Before the caller looks at the idle set: what comes into it from here on is announced anew.
        self.pools.announced(index).store(0, Ordering::SeqCst);
        Some(Event::PoolIdle { pool: PoolSlot { index, generation } })
    }

    fn client_event(&self, index: u32) -> Option<Event> {
        let generation = generation(&self.client_side, index)?;
        let reason = reason(self.clients.reason(index).swap(0, Ordering::SeqCst))?;
        (self.clients.in_use(index).load(Ordering::SeqCst) != 0)
            .then_some(Event::ClientUp { client: ClientSlot { index, generation }, reason })
    }

    fn server_event(&self, index: u32) -> Option<Event> {
        let generation = generation(&self.server_side, index)?;
        let reason = reason(self.servers.reason(index).swap(0, Ordering::SeqCst))?;
        (self.servers.in_use(index).load(Ordering::SeqCst) != 0)
            .then_some(Event::ServerUp { server: ServerSlot { index, generation }, reason })
    }
}

fn generation(side: &[Side], index: u32) -> Option<u32> {
    side.get(index as usize).map(|s| s.generation.load(Ordering::Acquire))
}

/// The reason of a raw word; 0 means nothing to report.
pub(crate) fn reason(raw: u32) -> Option<Reason> {
    Reason::ALL.get(raw as usize).copied().filter(|&reason| reason != Reason::None)
}
