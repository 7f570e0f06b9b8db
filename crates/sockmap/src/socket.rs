// SPDX-License-Identifier: Apache-2.0
//! What the handle asks of single sockets: how much was enqueued, the cookie, the kick after insertion.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

/// Offsets in `struct tcp_info` (linux/tcp.h; the layout only grows): `tcpi_state`, `tcpi_unacked` (segments), `tcpi_bytes_acked`
/// (4.1), `tcpi_notsent_bytes` (4.6).
const TCP_INFO_STATE: usize = 0;
const TCP_INFO_UNACKED: usize = 24;
const TCP_INFO_BYTES_ACKED: usize = 120;
const TCP_INFO_NOTSENT_BYTES: usize = 144;

/// `TCP_CLOSE` (net/tcp_states.h): reset, timed out, or closed by both.
const TCP_CLOSE: u8 = 7;

/// How often [`bytes_enqueued`] looks again when an acknowledgement came in between.
const STEADY_TRIES: u32 = 64;

/// Borrows the socket of a slot.
pub(crate) fn borrow<'a>(fd: RawFd) -> BorrowedFd<'a> {
    // SAFETY: the caller of register_client/register_server promised to keep the descriptor open until the slot
    // is freed. Breaking the promise asks the wrong socket, it does not touch memory.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// What TCP_INFO tells of one instant: the kernel fills it in under the socket's lock.
struct SendQueue {
    /// Bytes acknowledged since the connection began, up to a constant.
    acked: u64,
    /// Everything that was ever enqueued is acknowledged.
    empty: bool,
    /// There is no connection any more.
    over: bool,
}

fn send_queue(fd: BorrowedFd<'_>) -> io::Result<SendQueue> {
    let mut info = [0u8; 256];
    let mut len = info.len() as libc::socklen_t;
    // SAFETY: the buffer is as long as len says; the kernel writes at most that and updates len.
    let rc = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    if (len as usize) < TCP_INFO_NOTSENT_BYTES + 4 {
        return Err(io::Error::other("this kernel's tcp_info has no notsent_bytes"));
    }
    let word = |at: usize| u32::from_ne_bytes([info[at], info[at + 1], info[at + 2], info[at + 3]]);
    let mut acked = [0u8; 8];
    acked.copy_from_slice(&info[TCP_INFO_BYTES_ACKED..TCP_INFO_BYTES_ACKED + 8]);
    Ok(SendQueue {
        acked: u64::from_ne_bytes(acked),
        empty: word(TCP_INFO_UNACKED) == 0 && word(TCP_INFO_NOTSENT_BYTES) == 0,
        over: info[TCP_INFO_STATE] == TCP_CLOSE,
    })
}

/// Bytes that were ever enqueued for sending on a TCP socket, up to a constant of the socket.
///
/// `tcpi_bytes_acked` grows by exactly what `snd_una` grows, and `SIOCOUTQ` is `write_seq - snd_una`, but no call tells
/// both: their sum is taken only if no acknowledgement came in between. Too small a sum would make a program believe that a send was lost, too
/// large a one would let user space write before a redirected answer. `None`: acknowledgements keep coming, ask later.
pub(crate) fn bytes_enqueued(fd: BorrowedFd<'_>) -> io::Result<Option<u64>> {
    let mut before = send_queue(fd)?;
    for _ in 0..STEADY_TRIES {
        if before.empty {
            return Ok(Some(before.acked));
        }
        let queued = unacknowledged(fd)?;
        let after = send_queue(fd)?;
        if after.acked == before.acked {
            return Ok(Some(before.acked.wrapping_add(queued)));
        }
        before = after;
    }
    Ok(None)
}

/// As [`bytes_enqueued`], of a connection that is over; `None` for one that is not. A reset forgets what was under way, but not how much that was.
pub(crate) fn bytes_enqueued_at_end(fd: BorrowedFd<'_>) -> io::Result<Option<u64>> {
    let queue = send_queue(fd)?;
    if !queue.over {
        return Ok(None);
    }
    Ok(Some(queue.acked.wrapping_add(unacknowledged(fd)?)))
}

/// `write_seq - snd_una`.
fn unacknowledged(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let mut queued: libc::c_int = 0;
    // SAFETY: SIOCOUTQ (= TIOCOUTQ) writes one int.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCOUTQ, &raw mut queued) };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(queued as u64)
}

/// Whether the peer has received, and acknowledged, all that was ever enqueued.
pub(crate) fn all_acked(fd: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(send_queue(fd)?.empty)
}

/// Waits until whoever holds the socket's lock at this moment has released it: the kernel's receive path, and with it a
/// verdict program and what the kernel does with its verdict.
pub(crate) fn wait_for_lock(fd: BorrowedFd<'_>) {
    // TCP_INFO takes the lock. An error means that there is no connection any more, thus nobody to wait for.
    let _ = send_queue(fd);
}

/// Makes the kernel run the verdict on bytes that were queued before the socket entered its map: the program sees
/// them at the next segment or at the next receive call, whichever comes first.
pub(crate) fn kick(fd: BorrowedFd<'_>) {
    let mut byte = [0u8; 1];
    // SAFETY: a buffer of one byte. MSG_PEEK takes nothing; any result is fine.
    unsafe {
        libc::recv(fd.as_raw_fd(), byte.as_mut_ptr().cast(), 1, libc::MSG_PEEK | libc::MSG_DONTWAIT);
    }
}
