// SPDX-License-Identifier: Apache-2.0
//! What the programs' C, run in a process by `case.c`, has to say of a case, from the codec of `underpass-wire`. Shared by the test `framing` and
//! the fuzz target `framing_c`.

use std::fmt::Write as _;

use underpass_wire::{Framer, Piece};

#[path = "lane.rs"]
mod lane;

pub const LENGTH_MAX: u32 = 1 << 30;

/// As in `framing.h`: the first byte of a case.
pub mod kind {
    pub const LANE: u8 = 1;
    pub const PINNED: u8 = 2;
}

/// As in `framing.h`: the first byte of a piece.
pub mod what {
    pub const SERVER: u8 = 1;
    pub const RETIRE: u8 = 2;
    pub const HOLD: u8 = 4;
}

/// A stream cut into pieces, or what a client and a server say to each other through a lane.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Case {
    pub kind: u8,
    pub pieces: Vec<(u8, Vec<u8>)>,
}

impl Case {
    /// A stream in one piece for each chunk.
    pub fn stream(chunks: &[&[u8]]) -> Self {
        Self { kind: 0, pieces: chunks.iter().map(|chunk| (0, chunk.to_vec())).collect() }
    }

    /// From a fuzzer's bytes. Behind [`kind`], for a stream: a count, that many sizes of pieces in a byte each, and the stream. For a lane,
    /// as the target `pool_link` has it: a byte of [`what`], a length in two bytes, big-endian, and that many bytes, again and again.
    pub fn from_input(data: &[u8]) -> Option<Self> {
        let (&kind, mut rest) = data.split_first()?;
        let mut pieces = Vec::new();
        if kind & kind::LANE != 0 {
            while let Some(([what, high, low], tail)) = rest.split_first_chunk() {
                let size = tail.len().min(usize::from(u16::from_be_bytes([*high, *low])));
                let (piece, tail) = tail.split_at(size);
                pieces.push((*what, piece.to_vec()));
                rest = tail;
            }
        } else {
            let (&count, tail) = rest.split_first()?;
            let (sizes, mut stream) = tail.split_at_checked(usize::from(count))?;
            for &size in sizes {
                let (piece, tail) = stream.split_at(stream.len().min(usize::from(size)));
                pieces.push((0, piece.to_vec()));
                stream = tail;
            }
            pieces.push((0, stream.to_vec()));
        }
        Some(Self { kind, pieces })
    }

    /// As `framing_case()` takes it.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![self.kind];
        for (what, piece) in &self.pieces {
            out.push(*what);
            out.extend((piece.len() as u32).to_le_bytes());
            out.extend(piece);
        }
        out
    }

    /// What it has to say. Panics when the codec does not agree with the reference framer.
    pub fn expected(&self) -> String {
        if self.kind & kind::LANE != 0 {
            return lane::expected(self.kind & kind::PINNED != 0, &self.pieces);
        }
        let stream: Vec<u8> = self.pieces.iter().flat_map(|(_, piece)| piece).copied().collect();
        let text = reference(&stream);
        assert_eq!(codec(&stream), text, "{stream:?}");
        text
    }
}

/// The specification: frames a whole stream at once, in the harness' words.
fn reference(stream: &[u8]) -> String {
    let mut out = String::new();
    let mut at = 0;
    loop {
        let rest = &stream[at..];
        let unit = if rest.first() == Some(&b'Z') { 6 } else { 5 };
        if rest.len() < unit {
            let _ = writeln!(out, "end 0 {}", rest.len());
            return out;
        }
        let length = u32::from_be_bytes([rest[1], rest[2], rest[3], rest[4]]);
        if !(4..=LENGTH_MAX).contains(&length) || unit == 6 && length != 5 {
            out.push_str("bad\n");
            return out;
        }
        let (body, status) = if unit == 6 { (0, rest[5]) } else { (length - 4, 0) };
        let _ = writeln!(out, "{} {body} {status}", rest[0]);
        let have = rest.len() - unit;
        if have < body as usize {
            let _ = writeln!(out, "end {} 0", body as usize - have);
            return out;
        }
        at += unit + body as usize;
    }
}

/// What the codec of user space makes of a whole stream, in the same words. It yields a header by itself, where the programs
/// take ReadyForQuery, whose length is always 5, together with its status.
fn codec(stream: &[u8]) -> String {
    let (mut framer, mut rest, mut out) = (Framer::new(LENGTH_MAX), stream, String::new());
    let mut is_ready = false;
    loop {
        let message = rest;
        match framer.next(&mut rest) {
            Ok(Some(Piece::Header(h))) => {
                is_ready = h.tag == b'Z';
                if is_ready && rest.is_empty() {
                    break out.push_str("end 0 5\n");
                }
                if is_ready && h.len != 5 {
                    break out.push_str("bad\n");
                }
                if !is_ready {
                    let _ = writeln!(out, "{} {} 0", h.tag, h.body_len());
                }
            }
            Ok(Some(Piece::Body(body))) => {
                if is_ready {
                    let _ = writeln!(out, "{} 0 {}", b'Z', body[0]);
                }
            }
            Ok(Some(Piece::End(_))) => {}
            Ok(None) => {
                let _ = writeln!(out, "end {} {}", framer.need(), framer.pending_header().len());
                break;
            }
            // The programs judge a ReadyForQuery when its status is there.
            Err(_) if message[0] == b'Z' && message.len() == 5 => break out.push_str("end 0 5\n"),
            Err(_) => break out.push_str("bad\n"),
        }
    }
    out
}
