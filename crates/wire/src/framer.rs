// SPDX-License-Identifier: Apache-2.0
//! A streaming cursor that finds message boundaries in arbitrary chunks, copying at most 4 header bytes.
//!
//! It is also the reference model of the framing in BPF C, so its state is spelled out and complete:
//!
//! | field | meaning |
//! |---|---|
//! | `hdr_len: u8` | header bytes seen of the current message, 0..=5; 0 = at a message boundary |
//! | `hdr: [u8; 5]` | those bytes; what is behind `hdr_len` is meaningless |
//! | `need: u64` | body bytes of the current message not seen yet; 0 while `hdr_len < 5` |
//!
//! Steps, until neither applies (`c` = bytes of the chunk that are not consumed):
//!
//! 1. `hdr_len < 5`: move `min(5 - hdr_len, c)` bytes to `hdr`. When that makes 5: check the length word,
//!    set `need = len - 4`, yield Header. A bad length consumes nothing of this chunk: the position stays known.
//! 2. `hdr_len == 5`: `need == 0` yields End and sets `hdr_len = 0`, with no byte consumed; otherwise
//!    `min(need, c)` bytes, if any, are yielded as Body and subtracted from `need`.
//!
//! So, once a chunk is used up: `hdr_len == 5` implies `need > 0`, and End is always seen in the chunk with
//! the message's last byte. The frames do not depend on how the stream was cut.

use crate::{FrameError, Header};

/// What [`Framer::next`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// A message begins; its header is complete. If it was split, its first bytes were in earlier chunks.
    Header(Header),
    /// A part of the current message's body, never empty.
    Body(&'a [u8]),
    /// The current message, whose header is repeated, is complete.
    End(Header),
}

/// The cursor over one direction of one connection, after the untyped first packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Framer {
    need: u64,
    max_len: u32,
    hdr: [u8; 5],
    hdr_len: u8,
}

impl Framer {
    /// A cursor at a message boundary. `max_len` limits the length word: bytes, body plus 4
    /// (`max_packet_size` of PgBouncer, [`MAX_MESSAGE_LEN`](crate::MAX_MESSAGE_LEN) of PostgreSQL).
    pub const fn new(max_len: u32) -> Self {
        Self { need: 0, max_len, hdr: [0; 5], hdr_len: 0 }
    }

    /// A cursor inside a message, for taking a direction over from the kernel. Returns `None` for a state that
    /// the rules above cannot produce once a chunk is used up.
    pub fn from_parts(max_len: u32, need: u64, hdr: [u8; 5], hdr_len: u8) -> Option<Self> {
        let valid = match hdr_len {
            0..=4 => need == 0,
            5 => Header::decode(&hdr, max_len).is_ok_and(|h| 0 < need && need <= h.body_len() as u64),
            _ => false,
        };
        valid.then_some(Self { need, max_len, hdr, hdr_len })
    }

    /// The state of the table above, for handing a direction over: `need`, `hdr`, `hdr_len`. Meant for the time
    /// between two chunks, when [`from_parts`](Self::from_parts) takes whatever this returns.
    pub const fn parts(&self) -> (u64, [u8; 5], u8) {
        (self.need, self.hdr, self.hdr_len)
    }

    /// Takes the next piece from the front of `chunk`; `None` when more bytes are needed, with `chunk` used up.
    ///
    /// After an error `chunk` is where it was before the call; the message at fault begins
    /// [`pending_header`](Self::pending_header)`.len()` bytes before that point. The stream is lost.
    #[inline]
    pub fn next<'a>(&mut self, chunk: &mut &'a [u8]) -> Result<Option<Piece<'a>>, FrameError> {
        if self.hdr_len < 5 {
            return Ok(self.take_header(chunk)?.map(Piece::Header));
        }
        if self.need == 0 {
            self.hdr_len = 0;
            return Ok(Some(Piece::End(self.decoded())));
        }
        if chunk.is_empty() {
            return Ok(None);
        }
        let n = usize::try_from(self.need).map_or(chunk.len(), |need| need.min(chunk.len()));
        let (body, rest) = chunk.split_at(n);
        *chunk = rest;
        self.need -= n as u64;
        Ok(Some(Piece::Body(body)))
    }

    #[inline]
    fn take_header(&mut self, chunk: &mut &[u8]) -> Result<Option<Header>, FrameError> {
        let have = usize::from(self.hdr_len);
        let want = 5 - have;
        if chunk.len() < want {
            self.hdr[have..have + chunk.len()].copy_from_slice(chunk);
            self.hdr_len += chunk.len() as u8; // below 5
            *chunk = &[];
            return Ok(None);
        }
        let (head, rest) = chunk.split_at(want);
        self.hdr[have..].copy_from_slice(head);
        let header = Header::decode(&self.hdr, self.max_len)?;
        *chunk = rest;
        self.hdr_len = 5;
        self.need = header.body_len() as u64;
        Ok(Some(header))
    }

    /// The header in `hdr`, which was checked when it was completed.
    #[inline]
    fn decoded(&self) -> Header {
        let [tag, a, b, c, d] = self.hdr;
        Header { tag, len: u32::from_be_bytes([a, b, c, d]) }
    }

    /// Whether the next byte begins a message (once a chunk is used up).
    #[inline]
    pub const fn at_boundary(&self) -> bool {
        self.hdr_len == 0
    }

    /// The current message's header, when it is complete.
    #[inline]
    pub fn header(&self) -> Option<Header> {
        (self.hdr_len == 5).then(|| self.decoded())
    }

    /// Body bytes of the current message that have not been seen.
    #[inline]
    pub const fn need(&self) -> u64 {
        self.need
    }

    /// The bytes of a header that is not complete: 0 to 4 of them, already consumed from earlier chunks.
    #[inline]
    pub fn pending_header(&self) -> &[u8] {
        if self.hdr_len < 5 { &self.hdr[..usize::from(self.hdr_len)] } else { &[] }
    }
}
