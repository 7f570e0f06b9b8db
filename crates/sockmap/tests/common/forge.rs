// SPDX-License-Identifier: Apache-2.0
//! Segments that TCP of this machine would send only after a loss, forged on a connection of the test's own.
#![allow(unsafe_code)]

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;

use rustix::net::{AddressFamily, SendFlags, SocketType, ipproto, sendto, socket};

/// linux/tcp.h: which queue TCP_QUEUE_SEQ asks for.
const TCP_RECV_QUEUE: i32 = 1;
const TCP_SEND_QUEUE: i32 = 2;
/// linux/tcp.h: leave repair mode without a window probe.
const TCP_REPAIR_OFF_NO_WP: i32 = -1;

/// Flags byte of a TCP header: PSH and ACK.
const PSH_ACK: u8 = 0x18;

/// Sends to the other end of `from` a segment that begins `back` bytes before the end of what `from` has sent. `bytes`: what it holds, the bytes that
/// went before included. `from` knows nothing of it: let it send the new ones too.
pub fn retransmit(from: &TcpStream, back: usize, bytes: &[u8]) {
    let (SocketAddr::V4(source), SocketAddr::V4(target)) =
        (from.local_addr().unwrap(), from.peer_addr().unwrap())
    else {
        panic!("the test's connections are IPv4");
    };
    let (sent, received) = sequences(from).unwrap();
    let mut segment = Vec::new();
    segment.extend_from_slice(&source.port().to_be_bytes());
    segment.extend_from_slice(&target.port().to_be_bytes());
    segment.extend_from_slice(&sent.wrapping_sub(back as u32).to_be_bytes());
    segment.extend_from_slice(&received.to_be_bytes());
    // Header of five words, window, checksum, urgent pointer.
    segment.extend_from_slice(&[5 << 4, PSH_ACK, 0xff, 0xff, 0, 0, 0, 0]);
    segment.extend_from_slice(bytes);
    let pseudo = [
        &source.ip().octets()[..],
        &target.ip().octets(),
        &[0, libc::IPPROTO_TCP as u8],
        &(segment.len() as u16).to_be_bytes(),
    ]
    .concat();
    let sum = checksum(&[pseudo, segment.clone()].concat());
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
    let raw = socket(AddressFamily::INET, SocketType::RAW, Some(ipproto::TCP)).unwrap();
    sendto(&raw, &segment, SendFlags::empty(), &SocketAddr::V4(target)).unwrap();
}

/// RFC 1071.
fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// The sequence numbers behind the last byte that a socket has sent and received.
fn sequences(of: &TcpStream) -> io::Result<(u32, u32)> {
    set(of, libc::TCP_REPAIR, 1)?;
    set(of, libc::TCP_REPAIR_QUEUE, TCP_SEND_QUEUE)?;
    let sent = get(of, libc::TCP_QUEUE_SEQ)?;
    set(of, libc::TCP_REPAIR_QUEUE, TCP_RECV_QUEUE)?;
    let received = get(of, libc::TCP_QUEUE_SEQ)?;
    set(of, libc::TCP_REPAIR, TCP_REPAIR_OFF_NO_WP)?;
    Ok((sent, received))
}

fn set(of: &TcpStream, option: i32, value: i32) -> io::Result<()> {
    // SAFETY: the kernel reads one int.
    let rc =
        unsafe { libc::setsockopt(of.as_raw_fd(), libc::IPPROTO_TCP, option, (&raw const value).cast(), 4) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn get(of: &TcpStream, option: i32) -> io::Result<u32> {
    let (mut value, mut length) = (0u32, 4);
    // SAFETY: the kernel writes at most `length` bytes, the size of the value.
    let rc = unsafe {
        libc::getsockopt(of.as_raw_fd(), libc::IPPROTO_TCP, option, (&raw mut value).cast(), &raw mut length)
    };
    if rc == 0 { Ok(value) } else { Err(io::Error::last_os_error()) }
}
