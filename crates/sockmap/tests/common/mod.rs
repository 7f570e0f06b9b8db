// SPDX-License-Identifier: Apache-2.0
//! Shared by the lane tests: private socket pairs, protocol messages, a small user-space half of a pooler.
#![allow(dead_code, reason = "each test binary uses its part")]

pub mod ends;
pub mod forge;
pub mod journal;
pub mod pooler;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use underpass_sockmap::{Config, Datapath, Error};

/// Longest that a test waits for bytes that should come.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// The lanes, or `None` with the reason printed when this kernel or user cannot have them.
pub fn open(config: &Config) -> Option<Datapath> {
    match Datapath::open(config) {
        Ok(datapath) => Some(datapath),
        Err(Error::Load { message }) if !rustix::process::geteuid().is_root() => {
            eprintln!(
                "skipped: the lanes need CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON: {}",
                first_line(&message)
            );
            None
        }
        Err(e) => panic!("{e}"),
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or("")
}

/// Two ends of a TCP connection on loopback: who connected, who accepted.
pub fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    for s in [&near, &far] {
        s.set_nodelay(true).unwrap();
        s.set_read_timeout(Some(PATIENCE)).unwrap();
        s.set_write_timeout(Some(PATIENCE)).unwrap();
    }
    (near, far)
}

/// A message: type, length, body.
pub fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut out = vec![kind];
    out.extend_from_slice(&(body.len() as u32 + 4).to_be_bytes());
    out.extend_from_slice(body);
    out
}

/// Query.
pub fn query(text: &str) -> Vec<u8> {
    message(b'Q', &[text.as_bytes(), b"\0"].concat())
}

/// Parse, Bind, Describe, Execute of the unnamed statement; add `message(b'S', b"")`.
pub fn extended(text: &str) -> Vec<u8> {
    [
        message(b'P', &[b"\0", text.as_bytes(), b"\0\0\0"].concat()),
        message(b'B', b"\0\0\0\0\0\0\0\0"),
        message(b'D', b"P\0"),
        message(b'E', b"\0\0\0\0\0"),
    ]
    .concat()
}

/// ReadyForQuery.
pub fn ready(status: u8) -> Vec<u8> {
    message(b'Z', &[status])
}

/// One row of one text column.
pub fn row(text: &[u8]) -> Vec<u8> {
    message(b'D', &[&1u16.to_be_bytes()[..], &(text.len() as u32).to_be_bytes(), text].concat())
}

/// A whole answer to a query that returns `text`.
pub fn answer(text: &[u8], status: u8) -> Vec<u8> {
    [message(b'T', &[0u8; 24]), row(text), message(b'C', b"SELECT 1\0"), ready(status)].concat()
}

/// Writes all and reads exactly the same number of bytes at the other end.
pub fn expect(from: &mut TcpStream, want: &[u8]) {
    let mut got = vec![0u8; want.len()];
    if let Err(e) = from.read_exact(&mut got) {
        panic!("waited for {} bytes: {e}", want.len());
    }
    assert!(got == want, "other bytes: got {:?}, want {:?}", head(&got), head(want));
}

fn head(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(200)]).into_owned()
}

/// Reads one message.
pub fn read_message(from: &mut impl Read) -> std::io::Result<(u8, Vec<u8>)> {
    let mut head = [0u8; 5];
    from.read_exact(&mut head)?;
    let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
    let mut body = vec![0u8; length - 4];
    from.read_exact(&mut body)?;
    Ok((head[0], body))
}

/// Sends.
pub fn send(to: &mut TcpStream, bytes: &[u8]) {
    to.write_all(bytes).unwrap();
}

/// Waits until `done`, which must come true.
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "never came true: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Nothing may arrive here.
pub fn expect_silence(from: &mut TcpStream) {
    from.set_nonblocking(true).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    let mut byte = [0u8; 1];
    assert!(from.peek(&mut byte).is_err(), "unexpected bytes");
    from.set_nonblocking(false).unwrap();
}
