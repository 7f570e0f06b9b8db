// SPDX-License-Identifier: Apache-2.0
//! A private PostgreSQL, a blocking login to it, a blocking fake server, and certificates.

#![allow(dead_code, missing_docs, reason = "each test file uses a part of it")]

pub mod certificates;
pub mod fake_server;
pub mod login;
pub mod postgres;

use std::io::{self, Read, Write};

/// A byte stream, with or without TLS.
pub trait Stream: Read + Write {}
impl<T: Read + Write> Stream for T {}

/// Reads one message: type and body.
pub fn read_message(stream: &mut dyn Stream) -> io::Result<(u8, Vec<u8>)> {
    let mut head = [0; 5];
    stream.read_exact(&mut head)?;
    Ok((head[0], read_rest(stream, head[1..].try_into().expect("4 bytes"))?))
}

/// Reads what follows a length that counts itself.
pub fn read_rest(stream: &mut dyn Stream, length: [u8; 4]) -> io::Result<Vec<u8>> {
    let length = u32::from_be_bytes(length);
    assert!((4..100_000).contains(&length), "a length that makes sense: {length}");
    let mut body = vec![0; length as usize - 4];
    stream.read_exact(&mut body)?;
    Ok(body)
}

/// Writes one message; without a type it is a start-up packet.
pub fn write_message(stream: &mut dyn Stream, kind: Option<u8>, body: &[u8]) -> io::Result<()> {
    let mut message: Vec<u8> = kind.into_iter().collect();
    message.extend_from_slice(&(body.len() as u32 + 4).to_be_bytes());
    message.extend_from_slice(body);
    stream.write_all(&message)?;
    stream.flush()
}
