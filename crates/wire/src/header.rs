// SPDX-License-Identifier: Apache-2.0
//! The five bytes before every typed message: type, then a big-endian Int32 that counts itself and the body.

use crate::FrameError;

/// The largest length word that PostgreSQL accepts from a client: `PQ_LARGE_MESSAGE_LIMIT`, bytes.
pub const MAX_MESSAGE_LEN: u32 = 0x3fff_fffe;

/// The largest length word that PostgreSQL accepts of a client's message that has no user's data in it: `PQ_SMALL_MESSAGE_LIMIT`, bytes.
pub const MAX_SMALL_MESSAGE_LEN: u32 = 10_000;

/// A message's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Header {
    /// The type byte; see [`tag`](crate::tag).
    pub tag: u8,
    /// The length word: body plus 4, bytes, 4..=2^31-1.
    pub len: u32,
}

impl Header {
    /// Bytes of a header on the wire.
    pub const SIZE: usize = 5;

    /// The header of a message with this much body. Panics above 2^31-5 bytes, which no message can have.
    pub const fn new(tag: u8, body_len: usize) -> Self {
        assert!(body_len <= i32::MAX as usize - 4, "message body above 2 GiB");
        Self { tag, len: body_len as u32 + 4 }
    }

    /// Parses the header at the start of `bytes`; `None` when there are fewer than 5.
    #[inline]
    pub const fn parse(bytes: &[u8]) -> Result<Option<Self>, FrameError> {
        Self::parse_max(bytes, i32::MAX as u32)
    }

    /// As [`parse`](Self::parse), and refuses a length word above `max_len` (bytes, body plus 4).
    #[inline]
    pub const fn parse_max(bytes: &[u8], max_len: u32) -> Result<Option<Self>, FrameError> {
        let Some(head) = bytes.first_chunk() else { return Ok(None) };
        match Self::decode(head, max_len) {
            Ok(header) => Ok(Some(header)),
            Err(error) => Err(error),
        }
    }

    /// Parses a whole header. The length word is signed in the manual: a negative one is too large.
    #[inline]
    pub const fn decode(&[tag, a, b, c, d]: &[u8; 5], max_len: u32) -> Result<Self, FrameError> {
        let len = u32::from_be_bytes([a, b, c, d]);
        if len < 4 {
            Err(FrameError::LengthTooSmall)
        } else if len > max_len || len > i32::MAX as u32 {
            Err(FrameError::LengthTooLarge)
        } else {
            Ok(Self { tag, len })
        }
    }

    /// The header as it is on the wire.
    #[inline]
    pub const fn to_bytes(self) -> [u8; 5] {
        let [a, b, c, d] = self.len.to_be_bytes();
        [self.tag, a, b, c, d]
    }

    /// Bytes of the whole message, type byte included: 5..=2^31.
    #[inline]
    pub const fn total(self) -> usize {
        self.len as usize + 1
    }

    /// Bytes of the body: 0..=2^31-5.
    #[inline]
    pub const fn body_len(self) -> usize {
        self.len as usize - 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden() {
        let sync = Header::parse(b"S\0\0\0\x04more").unwrap().unwrap();
        assert_eq!(sync, Header { tag: b'S', len: 4 });
        assert_eq!((sync.total(), sync.body_len()), (5, 0));
        assert_eq!(sync.to_bytes(), *b"S\0\0\0\x04");
        assert_eq!(Header::new(b'S', 0), sync);
    }

    #[test]
    fn needs_five_bytes() {
        for n in 0..5 {
            assert_eq!(Header::parse(&b"Q\0\0\0\x05"[..n]), Ok(None));
        }
    }

    #[test]
    fn limits() {
        for len in 0..4 {
            assert_eq!(Header::parse(&[b'Q', 0, 0, 0, len]), Err(FrameError::LengthTooSmall));
        }
        assert_eq!(Header::parse(b"Q\x80\0\0\0"), Err(FrameError::LengthTooLarge));
        assert_eq!(Header::parse(b"Q\xff\xff\xff\xff"), Err(FrameError::LengthTooLarge));
        let largest = Header::parse(b"Q\x7f\xff\xff\xff").unwrap().unwrap();
        assert_eq!(largest.total(), 1 << 31);
        assert!(Header::parse_max(b"Q\0\0\0\x64", 100).is_ok());
        assert_eq!(Header::parse_max(b"Q\0\0\0\x65", 100), Err(FrameError::LengthTooLarge));
    }
}
