// SPDX-License-Identifier: Apache-2.0
//! What the handle asks of single sockets: how much was enqueued, the cookie, the kick after insertion.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

/// Offset of `tcpi_bytes_acked` in `struct tcp_info` (linux/tcp.h, since 4.1; the layout only grows).
const TCP_INFO_BYTES_ACKED: usize = 120;

/// Borrows the socket of a slot.
pub(crate) fn borrow<'a>(fd: RawFd) -> BorrowedFd<'a> {
    // SAFETY: the caller of register_client/register_server promised to keep the descriptor open until the slot
    // is freed. Breaking the promise asks the wrong socket, it does not touch memory.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// Bytes that were ever enqueued for sending on a TCP socket, up to a constant of the socket.
///
/// `tcpi_bytes_acked` grows by exactly what `snd_una` grows, and `SIOCOUTQ` is `write_seq - snd_una`. Read in this
/// order the sum is never larger than the truth, so "equal to what was expected" cannot be concluded too early.
pub(crate) fn bytes_enqueued(fd: BorrowedFd<'_>) -> io::Result<u64> {
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
    let end = TCP_INFO_BYTES_ACKED + 8;
    if (len as usize) < end {
        return Err(io::Error::other("this kernel's tcp_info has no bytes_acked"));
    }
    let mut word = [0u8; 8];
    word.copy_from_slice(&info[TCP_INFO_BYTES_ACKED..end]);
    let acked = u64::from_ne_bytes(word);

    let mut queued: libc::c_int = 0;
    // SAFETY: SIOCOUTQ (= TIOCOUTQ) writes one int.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TIOCOUTQ, &raw mut queued) };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(acked.wrapping_add(queued as u64))
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
