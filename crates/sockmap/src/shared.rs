// SPDX-License-Identifier: Apache-2.0
//! The arrays that programs and user space share, mapped into this process.
//!
//! Invariant: every access is an atomic access to one word. Who may write a field is said in `bpf/lanes.h`.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use libbpf_rs::MapCore;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::error::Error;
use crate::skel::types;

const _: () = assert!(size_of::<types::client_slot>() == 256);
const _: () = assert!(size_of::<types::server_slot>() == 192);
const _: () = assert!(size_of::<types::pool_slot>() == 128 + 8 * POOL_ORDINALS_MAX + 8 * QUEUE_PLACES);
const _: () = assert!(size_of::<types::kept_request>() == 128 + KEPT_BYTES);
const _: () = assert!(size_of::<types::wire_state>() == 12);

pub(crate) const POOL_ORDINALS_MAX: usize = 512;
/// Requests of one pool that can be kept.
pub(crate) const QUEUE_PLACES: usize = 512;
/// Uses of named statements in one request that a program can rename.
const STATEMENT_USES_MAX: usize = 8;
/// Bytes of a request that can be kept.
pub(crate) const KEPT_BYTES: usize = 1024;

/// A `BPF_F_MMAPABLE` array, mapped for as long as this value lives.
#[derive(Debug)]
pub(crate) struct Array<T> {
    base: *mut T,
    len: u32,
    bytes: usize,
}

// SAFETY: the mapping is shared memory that is only accessed through atomics (see the accessors below), from any
// thread; it is not tied to the thread that made it.
unsafe impl<T> Send for Array<T> {}
// SAFETY: as for Send.
unsafe impl<T> Sync for Array<T> {}

impl<T> Array<T> {
    pub(crate) fn map(map: &impl MapCore, len: u32) -> Result<Self, Error> {
        let bytes = (size_of::<T>() * len as usize).next_multiple_of(rustix::param::page_size());
        // SAFETY: a fresh mapping at an address of the kernel's choice; the kernel checks that the map has as many
        // bytes, and nobody else in this process knows the address.
        let base = unsafe {
            mmap(ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, map.as_fd(), 0)
        }
        .map_err(|e| Error::System { what: "mapping a BPF array", source: e.into() })?;
        Ok(Self { base: base.cast(), len, bytes })
    }

    fn at(&self, index: u32) -> *mut T {
        assert!(index < self.len, "slot {index} of {}", self.len);
        // SAFETY: the index is inside the array that was mapped.
        unsafe { self.base.add(index as usize) }
    }
}

impl<T> Drop for Array<T> {
    fn drop(&mut self) {
        // SAFETY: base and bytes are those of the mapping; no reference outlives self (they borrow it).
        let _ = unsafe { munmap(self.base.cast(), self.bytes) };
    }
}

macro_rules! words {
    ($owner:ty, $($field:ident: $atomic:ident),* $(,)?) => {
        impl Array<$owner> {
            $(
                #[allow(dead_code, reason = "every field of the shared layout has its accessor")]
                pub(crate) fn $field(&self, index: u32) -> &$atomic {
                    let slot = self.at(index);
                    // SAFETY: the field is inside the mapping, naturally aligned (size asserts above), lives as long
                    // as self, and every other access to it, here and in the programs, is of the same width.
                    unsafe { $atomic::from_ptr(&raw mut (*slot).$field) }
                }
            )*
        }
    };
}

words!(
    types::client_slot,
    link: AtomicU64, tx_expect: AtomicU64, req_dir: AtomicU64, req_fwd: AtomicU64, req_passed: AtomicU64,
    sk_addr: AtomicU64, cookie: AtomicU64, pool: AtomicU32, fingerprint: AtomicU32, flags: AtomicU32,
    cycle_bytes: AtomicU32, reason: AtomicU32, active_ns: AtomicU64, xact_start_ns: AtomicU64,
    query_start_ns: AtomicU64, xacts: AtomicU64, queries: AtomicU64, resp_bytes: AtomicU64, xact_ns: AtomicU64,
    query_ns: AtomicU64, in_use: AtomicU32, links: AtomicU32, tap: AtomicU32, tap_lost: AtomicU32, clear: AtomicU64,
    next_seq: AtomicU64, app_addr: AtomicU64, app_cookie: AtomicU64, last_addr: AtomicU64, last_cookie: AtomicU64,
    last_server: AtomicU32, last_run: AtomicU32, app_after: AtomicU32, app_flags: AtomicU32, app_chunks: AtomicU32,
    app_run: AtomicU32, decided_seq: AtomicU64, cycle_chunks: AtomicU32, sender: AtomicU32,
);
words!(
    types::server_slot,
    peer: AtomicU64, dir: AtomicU64, fwd: AtomicU64, passed: AtomicU64, tx_expect: AtomicU64, cookie: AtomicU64,
    pool: AtomicU32, ordinal: AtomicU32, fingerprint: AtomicU32, flags: AtomicU32, run_bytes: AtomicU32,
    reason: AtomicU32, runs_begin: AtomicU32, runs_end: AtomicU32, in_use: AtomicU32, sk_addr: AtomicU64, active_ns: AtomicU64,
    next_seq: AtomicU64, answered: AtomicU64,
    brings: AtomicU32, owed_cookie: AtomicU64, told_cookie: AtomicU64, owed_client: AtomicU32, owed_seq: AtomicU32,
);
words!(
    types::pool_slot,
    waiters: AtomicU32, flags: AtomicU32, ordinals: AtomicU32, rotates: AtomicU32, next: AtomicU32, announced: AtomicU32,
    queue_begin: AtomicU64, queue_end: AtomicU64, keeps: AtomicU32,
);
words!(
    types::kept_request,
    place: AtomicU64, at_ns: AtomicU64, handed: AtomicU64, waits: AtomicU64, wait_ns: AtomicU64, length: AtomicU32,
    syncs: AtomicU32, extended: AtomicU32,
);
words!(types::lane_control, off: AtomicU64, events_lost: AtomicU64);

impl Array<types::pool_slot> {
    /// Word `word` of the idle set.
    pub(crate) fn idle(&self, index: u32, word: usize) -> &AtomicU64 {
        assert!(word < POOL_ORDINALS_MAX / 64);
        // SAFETY: as in `words!`; the array index was checked.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.at(index)).idle[word]) }
    }

    /// A place of the queue, by its number.
    pub(crate) fn place(&self, index: u32, number: u64) -> &AtomicU64 {
        let place = number as usize % QUEUE_PLACES;
        // SAFETY: as in `words!`; the place is inside the array.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.at(index)).place[place]) }
    }

    /// Server slot and fingerprint of an ordinal, each a word of its own.
    pub(crate) fn member(&self, index: u32, ordinal: u32) -> (&AtomicU32, &AtomicU32) {
        let ordinal = ordinal as usize;
        assert!(ordinal < POOL_ORDINALS_MAX);
        let slot = self.at(index);
        // SAFETY: as in `words!`; the ordinal was checked.
        unsafe {
            (
                AtomicU32::from_ptr(&raw mut (*slot).member[ordinal].server),
                AtomicU32::from_ptr(&raw mut (*slot).member[ordinal].fingerprint),
            )
        }
    }
}

impl Array<types::kept_request> {
    /// How many clients can have a request kept: those with the lowest slots.
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// The bytes of a kept request. Nobody writes to them while its link word says that it is kept.
    pub(crate) fn bytes(&self, index: u32) -> Vec<u8> {
        let length = (self.length(index).load(Ordering::Acquire) as usize).min(KEPT_BYTES);
        let slot = self.at(index);
        let word = |i: usize| {
            // SAFETY: as in `words!`; the index is below the number of words.
            unsafe { AtomicU64::from_ptr(&raw mut (*slot).words[i]) }.load(Ordering::Relaxed)
        };
        let mut bytes: Vec<u8> = (0..length.div_ceil(8)).flat_map(|i| word(i).to_ne_bytes()).collect();
        bytes.truncate(length);
        bytes
    }

    /// Where the request uses which named statements.
    pub(crate) fn uses(&self, index: u32) -> Vec<(u32, u32)> {
        let slot = self.at(index);
        // SAFETY: as in `words!`; all indices are below the number of uses.
        let word = |field: *mut u32| unsafe { AtomicU32::from_ptr(field) }.load(Ordering::Acquire);
        // SAFETY: likewise.
        let uses = unsafe { &raw mut (*slot).uses };
        // SAFETY: likewise.
        let (count, at, of) = unsafe { (&raw mut (*uses).count, &raw mut (*uses).at, &raw mut (*uses).of) };
        let count = (word(count) as usize).min(STATEMENT_USES_MAX);
        // SAFETY: likewise.
        (0..count)
            .map(|i| unsafe { (word(at.cast::<u32>().add(i)), word(of.cast::<u32>().add(i))) })
            .collect()
    }
}

/// The parser state of one direction, as its owner left it (`struct wire_state`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamState {
    /// Body bytes of the current message that have not come yet.
    pub need: u32,
    /// Head bytes of the next message that have already gone by.
    pub head: [u8; 6],
    /// How many of them are valid, 0 to 5.
    pub head_len: u8,
}

impl StreamState {
    /// The state between two messages.
    pub const BOUNDARY: Self = Self { need: 0, head: [0; 6], head_len: 0 };

    /// Is the stream between two messages?
    pub fn is_boundary(&self) -> bool {
        self.need == 0 && self.head_len == 0
    }
}

/// Reads a parser state; the owner does not change it at the same time.
unsafe fn load_state(state: *mut types::wire_state) -> StreamState {
    let mut out = StreamState::default();
    // SAFETY: the caller passes a valid pointer into a mapping.
    unsafe {
        out.need = AtomicU32::from_ptr(&raw mut (*state).need).load(Ordering::Acquire);
        out.head_len = AtomicU8::from_ptr(&raw mut (*state).hdr_len).load(Ordering::Acquire);
        for (i, byte) in out.head.iter_mut().enumerate().take(out.head_len.into()) {
            *byte = AtomicU8::from_ptr(&raw mut (*state).hdr[i]).load(Ordering::Acquire);
        }
    }
    out
}

unsafe fn store_state(state: *mut types::wire_state, value: &StreamState) {
    // SAFETY: the caller passes a valid pointer into a mapping.
    unsafe {
        AtomicU32::from_ptr(&raw mut (*state).need).store(value.need, Ordering::Release);
        AtomicU8::from_ptr(&raw mut (*state).hdr_len).store(value.head_len, Ordering::Release);
        for (i, byte) in value.head.iter().enumerate() {
            AtomicU8::from_ptr(&raw mut (*state).hdr[i]).store(*byte, Ordering::Release);
        }
    }
}

impl Array<types::client_slot> {
    pub(crate) fn request_state(&self, index: u32) -> StreamState {
        // SAFETY: the pointer is inside the mapping.
        unsafe { load_state(&raw mut (*self.at(index)).req) }
    }

    pub(crate) fn set_request_state(&self, index: u32, state: &StreamState) {
        // SAFETY: the pointer is inside the mapping.
        unsafe { store_state(&raw mut (*self.at(index)).req, state) }
    }
}

impl Array<types::server_slot> {
    pub(crate) fn response_state(&self, index: u32) -> StreamState {
        // SAFETY: the pointer is inside the mapping.
        unsafe { load_state(&raw mut (*self.at(index)).resp) }
    }

    pub(crate) fn set_response_state(&self, index: u32, state: &StreamState) {
        // SAFETY: the pointer is inside the mapping.
        unsafe { store_state(&raw mut (*self.at(index)).resp, state) }
    }
}
