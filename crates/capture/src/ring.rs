// SPDX-License-Identifier: Apache-2.0
//! The consumer's side of one BPF ring buffer, read in place.
//!
//! Why not libbpf's: its callback is bound when the ring is opened, so every event would be copied once more to reach what
//! processes it; and it does not tell how full the ring is, which decides when to look again.
//!
//! Layout (kernel/bpf/ringbuf.c): a page with the consumer's position, a page with the producers', then the data, mapped
//! twice in a row so that a record that wraps is contiguous. A record is a header of 8 bytes (length with two flag bits,
//! page offset) and its bytes, padded to 8.
#![allow(unsafe_code)]

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// The producer has not committed the record yet.
const BUSY_BIT: u32 = 1 << 31;
/// The producer gave the record up.
const DISCARD_BIT: u32 = 1 << 30;
const HEADER_BYTES: u64 = 8;
/// Room is given back to producers at least so often, bytes: they read the position on another processor.
const GIVE_BACK_BYTES: u64 = 16 << 10;

/// A mapped ring buffer.
#[derive(Debug)]
pub(crate) struct Ring {
    consumer: Mapping,
    producer: Mapping,
    page: usize,
    size: u64,
}

#[derive(Debug)]
struct Mapping {
    start: *mut u8,
    len: usize,
}

// SAFETY: the mapping is shared memory that lives as long as the value; positions are only touched by atomics, and the data
// is only read between the two positions, by the one who has `&mut Ring`.
unsafe impl Send for Mapping {}

impl Mapping {
    fn new(fd: BorrowedFd<'_>, offset: u64, len: usize, protection: ProtFlags) -> io::Result<Self> {
        let len = NonZeroUsize::new(len).ok_or(io::ErrorKind::InvalidInput)?.get();
        // SAFETY: a new mapping at a place of the kernel's choice.
        let start = unsafe { mmap(ptr::null_mut(), len, protection, MapFlags::SHARED, fd, offset)? };
        Ok(Self { start: start.cast(), len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing borrowed from it outlives it.
        let _ = unsafe { munmap(self.start.cast(), self.len) };
    }
}

impl Ring {
    /// Maps the ring `fd` of `size` bytes, its `max_entries`.
    pub(crate) fn new(fd: &impl AsFd, size: u32) -> io::Result<Self> {
        let page = rustix::param::page_size();
        let consumer = Mapping::new(fd.as_fd(), 0, page, ProtFlags::READ | ProtFlags::WRITE)?;
        let producer = Mapping::new(fd.as_fd(), page as u64, page + 2 * size as usize, ProtFlags::READ)?;
        Ok(Self { consumer, producer, page, size: u64::from(size) })
    }

    fn consumer_position(&self) -> &AtomicU64 {
        // SAFETY: the first word of the consumer's page, aligned, alive as long as self.
        unsafe { AtomicU64::from_ptr(self.consumer.start.cast()) }
    }

    fn producer_position(&self) -> u64 {
        // SAFETY: the first word of the producers' page, aligned, alive as long as self; it is only loaded.
        unsafe { AtomicU64::from_ptr(self.producer.start.cast()) }.load(Ordering::Acquire)
    }

    /// Bytes that wait, and the ring's size.
    pub(crate) fn fill(&self) -> (u64, u64) {
        (self.producer_position().saturating_sub(self.consumer_position().load(Ordering::Relaxed)), self.size)
    }

    /// Gives every event that is complete to `sink`, in order, and frees its place. At most the events that were there
    /// when it began, so that one busy ring does not keep the others waiting. Returns how many.
    pub(crate) fn drain(&mut self, mut sink: impl FnMut(&[u8])) -> usize {
        let end = self.producer_position();
        let mut position = self.consumer_position().load(Ordering::Relaxed);
        let mut given_back = position;
        let mut events = 0;
        while position < end {
            let at = self.page + (position & (self.size - 1)) as usize;
            // SAFETY: `at` is within the data area and a multiple of 8; the word is shared with producers, hence atomic.
            let header = unsafe { AtomicU32::from_ptr(self.producer.start.add(at).cast()) };
            let header = header.load(Ordering::Acquire);
            if header & BUSY_BIT != 0 {
                break;
            }
            let len = u64::from(header & !(BUSY_BIT | DISCARD_BIT));
            if header & DISCARD_BIT == 0 {
                // SAFETY: a committed record: `len` bytes behind the header, contiguous because the data is mapped twice. No
                // producer writes there before the consumer's position passes it.
                let bytes = unsafe {
                    std::slice::from_raw_parts(
                        self.producer.start.add(at + HEADER_BYTES as usize),
                        len as usize,
                    )
                };
                sink(bytes);
                events += 1;
            }
            position += HEADER_BYTES + len.next_multiple_of(8);
            if position - given_back >= GIVE_BACK_BYTES {
                given_back = position;
                self.consumer_position().store(position, Ordering::Release);
            }
        }
        self.consumer_position().store(position, Ordering::Release);
        events
    }
}
