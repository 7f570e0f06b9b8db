// SPDX-License-Identifier: Apache-2.0
//! The tap: copies of what programs forward for marked clients, from their ring into a queue for each reader.
//!
//! One ring serves all clients. Whoever drains it sorts the records into queues, under one lock: a reader that has drained the ring finds
//! everything about its clients in its own queue. What a record means is [`crate::TapStream`]'s.
#![allow(unsafe_code)]

use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use libbpf_rs::libbpf_sys::{ring__consumer_pos, ring__producer_pos, ring_buffer__ring};
use libbpf_rs::{AsRawLibbpf, MapCore, RingBuffer, RingBufferBuilder};

use crate::datapath::{ClientSlot, Datapath};
use crate::error::Error;
use crate::handover::server_of;
use crate::socket;
use crate::tap_stream::{HEAD_BYTES, TapMark, TapRecord};
use crate::words::{LINK_GEN_SHIFT, LINK_HELD, TAP_AT_SHIFT, TAP_STEPS, TAP_TELL, TAP_WAITS};

/// Bytes that may wait in one reader's queue. What is over it is lost as if the ring had been full.
const QUEUE_BYTES_MAX: usize = 16 << 20;

/// Records for one reader, in their order: each its length (u32) and what the ring held.
#[derive(Default)]
struct Queue {
    bytes: Vec<u8>,
    /// Something came since it was last asked.
    is_new: bool,
}

pub(crate) struct TapRing {
    buffer: Mutex<RingBuffer<'static>>,
    queues: Arc<Mutex<Vec<Queue>>>,
    /// Reader of each client, plus 1.
    readers: Arc<[AtomicU32]>,
    fd: RawFd,
}

impl TapRing {
    pub(crate) fn new(map: &impl MapCore, clients: u32) -> Result<Self, Error> {
        let failed = |e: libbpf_rs::Error| Error::Load { message: format!("tap ring: {e:#}") };
        let queues: Arc<Mutex<Vec<Queue>>> = Arc::default();
        let readers: Arc<[AtomicU32]> = (0..clients).map(|_| AtomicU32::new(0)).collect();
        let (sink, of) = (Arc::clone(&queues), Arc::clone(&readers));
        let mut builder = RingBufferBuilder::new();
        builder
            .add(map, move |bytes: &[u8]| {
                sort(&mut sink.lock().unwrap_or_else(PoisonError::into_inner), &of, bytes);
                0
            })
            .map_err(failed)?;
        let buffer = builder.build().map_err(failed)?;
        let fd = buffer.epoll_fd();
        Ok(Self { buffer: Mutex::new(buffer), queues, readers, fd })
    }

    fn queues(&self) -> MutexGuard<'_, Vec<Queue>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sorts all that is in the ring. False: it ends in a record that a program is still writing.
    fn consume(&self) -> Result<bool, Error> {
        let buffer = self.buffer.lock().unwrap_or_else(PoisonError::into_inner);
        let raw = buffer.as_libbpf_object().as_ptr();
        // SAFETY: the manager lives as long as `buffer` and has one ring, which `new` added; the calls only read its positions.
        let produced = unsafe { ring__producer_pos(ring_buffer__ring(raw, 0)) };
        buffer.consume().map_err(|e| Error::System {
            what: "reading the tap ring",
            source: std::io::Error::other(e.to_string()),
        })?;
        // SAFETY: as above.
        let consumed = unsafe { ring__consumer_pos(ring_buffer__ring(raw, 0)) };
        Ok((consumed.wrapping_sub(produced) as i64) >= 0)
    }
}

fn sort(queues: &mut Vec<Queue>, readers: &[AtomicU32], bytes: &[u8]) {
    let Some(client) = bytes.get(..4).map(|b| u32::from_ne_bytes(b.try_into().unwrap_or_default())) else {
        return;
    };
    let reader = readers.get(client as usize).map_or(0, |reader| reader.load(Ordering::Acquire));
    let Some(length) = record_length(bytes).filter(|_| reader > 0) else { return };
    let index = reader as usize - 1;
    if index >= queues.len() {
        queues.resize_with(index + 1, Queue::default);
    }
    let queue = &mut queues[index];
    if queue.bytes.len() + length < QUEUE_BYTES_MAX {
        queue.bytes.extend_from_slice(&(length as u32).to_ne_bytes());
        queue.bytes.extend_from_slice(&bytes[..length]);
    }
    queue.is_new = true;
}

/// Bytes of a record that say something: the space behind them is not copied.
fn record_length(bytes: &[u8]) -> Option<usize> {
    let length = HEAD_BYTES + TapRecord::parse(bytes)?.bytes.len();
    (length <= bytes.len()).then_some(length)
}

/// What one reader took from its queue.
#[derive(Debug, Default)]
pub struct TapBatch {
    bytes: Vec<u8>,
}

impl TapBatch {
    /// Its records in their order.
    pub fn iter(&self) -> impl Iterator<Item = TapRecord<'_>> {
        let mut left = &self.bytes[..];
        std::iter::from_fn(move || {
            let (length, rest) = left.split_first_chunk::<4>()?;
            let (record, rest) = rest.split_at_checked(u32::from_ne_bytes(*length) as usize)?;
            left = rest;
            TapRecord::parse(record)
        })
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

/// What of a client waits for its mirrors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TapWaits {
    /// What begins a transaction. All of one is told when it is over.
    Transactions,
    /// Each statement. Requests are told as they come.
    Statements,
}

impl Datapath {
    /// Whether clients can be tapped: [`crate::Config::tap_ring_bytes`] is not 0.
    pub fn has_tap(&self) -> bool {
        self.taps.is_some()
    }

    /// Readable when a tapped transaction ended, or the ring is a quarter full. Register it with EPOLLIN.
    pub fn tap_fd(&self) -> Option<BorrowedFd<'_>> {
        // The descriptor belongs to self.taps, which lives as long as self.
        self.taps.as_ref().map(|taps| socket::borrow(taps.fd))
    }

    /// From the next [`Self::give_client`] on, what programs forward for this client is told to `reader`, a small number of the caller's
    /// choice; `None` ends it. Answers where its stream begins.
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::State`] when user space does not hold it unlinked, or there is no tap.
    pub fn set_client_tap(&self, client: ClientSlot, reader: Option<u32>) -> Result<TapMark, Error> {
        let c = self.check_client(client)?;
        let Some(taps) = self.taps.as_ref() else {
            return Err(Error::State("set_client_tap: the lanes were opened without a tap"));
        };
        let link = self.clients.link(c).load(Ordering::SeqCst);
        if link & LINK_HELD == 0 || server_of(link).is_some() {
            return Err(Error::State("set_client_tap: not held, or linked"));
        }
        if let Some(reader) = reader {
            taps.readers[c as usize].store(reader + 1, Ordering::Release);
        }
        let tap = if reader.is_some() { TAP_TELL } else { 0 };
        self.clients.tap(c).store(tap, Ordering::SeqCst);
        Ok(self.tap_mark(c))
    }

    /// The mirrors of a client that waits for them have answered its requests up to here ([`crate::TapStream::position`]). The first call, between
    /// [`Self::set_client_tap`] and [`Self::give_client`], makes it such a client, `None` with mirrors that have not answered all: a request of
    /// the kind that `waits`, and comes when nothing is outstanding, is for user space ([`crate::Reason::Mirror`]) if not all before it was answered
    /// by them.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn set_mirrored(
        &self,
        client: ClientSlot,
        position: Option<u64>,
        waits: TapWaits,
    ) -> Result<(), Error> {
        let c = self.check_client(client)?;
        // Of bits that cannot be the position's.
        let position = position.unwrap_or_else(|| !self.clients.req_fwd(c).load(Ordering::SeqCst));
        let steps = if waits == TapWaits::Statements { TAP_STEPS } else { 0 };
        let tap = TAP_TELL | TAP_WAITS | steps | (position as u32) << TAP_AT_SHIFT;
        self.clients.tap(c).store(tap, Ordering::SeqCst);
        Ok(())
    }

    /// Sorts what is in the ring into the readers' queues, and appends the readers to `out` that have something new.
    ///
    /// # Errors
    /// [`Error::System`] when the ring cannot be read.
    pub fn drain_taps(&self, out: &mut Vec<u32>) -> Result<(), Error> {
        self.sort_taps()?;
        let Some(taps) = &self.taps else { return Ok(()) };
        for (reader, queue) in taps.queues().iter_mut().enumerate() {
            if std::mem::take(&mut queue.is_new) {
                out.push(reader as u32);
            }
        }
        Ok(())
    }

    /// Takes what waits for a reader. The bytes of an earlier batch are used again.
    pub fn take_taps(&self, reader: u32, batch: &mut TapBatch) {
        batch.bytes.clear();
        if let Some(queue) =
            self.taps.as_ref().and_then(|taps| taps.queues().get_mut(reader as usize).map(std::mem::take))
        {
            batch.bytes = queue.bytes;
        }
    }

    /// Sorts what is in the ring, all of what programs told until now. False: one is still writing a record; ask again.
    ///
    /// # Errors
    /// [`Error::System`] when the ring cannot be read.
    pub fn sort_taps(&self) -> Result<bool, Error> {
        self.taps.as_ref().map_or(Ok(true), TapRing::consume)
    }

    /// How far programs have come with a client, told or not. Each number is current, together they are a snapshot of a taken client only.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn tap_mark_of(&self, client: ClientSlot) -> Result<TapMark, Error> {
        Ok(self.tap_mark(self.check_client(client)?))
    }

    fn tap_mark(&self, c: u32) -> TapMark {
        let link = self.clients.link(c).load(Ordering::SeqCst);
        let server = server_of(link);
        TapMark {
            link: (link >> LINK_GEN_SHIFT) as u32,
            is_linked: server.is_some(),
            requests: self.clients.req_fwd(c).load(Ordering::SeqCst),
            responses: server.map_or(0, |s| self.servers.run_bytes(s).load(Ordering::SeqCst)),
        }
    }
}
