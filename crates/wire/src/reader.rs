// SPDX-License-Identifier: Apache-2.0
//! A cursor over one message's body, and the arrays that several messages share.

use crate::MessageError;

/// Reads fields from the front of a body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a> {
    pub(crate) rest: &'a [u8],
}

impl<'a> Reader<'a> {
    #[inline]
    pub(crate) const fn new(rest: &'a [u8]) -> Self {
        Self { rest }
    }

    #[inline]
    fn array<const N: usize>(&mut self) -> Result<[u8; N], MessageError> {
        let (head, rest) = self.rest.split_first_chunk().ok_or(MessageError::Truncated)?;
        self.rest = rest;
        Ok(*head)
    }

    #[inline]
    pub(crate) fn u8(&mut self) -> Result<u8, MessageError> {
        self.array().map(|[b]| b)
    }

    #[inline]
    pub(crate) fn u16(&mut self) -> Result<u16, MessageError> {
        self.array().map(u16::from_be_bytes)
    }

    #[inline]
    pub(crate) fn i16(&mut self) -> Result<i16, MessageError> {
        self.array().map(i16::from_be_bytes)
    }

    #[inline]
    pub(crate) fn u32(&mut self) -> Result<u32, MessageError> {
        self.array().map(u32::from_be_bytes)
    }

    #[inline]
    pub(crate) fn i32(&mut self) -> Result<i32, MessageError> {
        self.array().map(i32::from_be_bytes)
    }

    #[inline]
    pub(crate) fn bytes4(&mut self) -> Result<[u8; 4], MessageError> {
        self.array()
    }

    #[inline]
    pub(crate) fn take(&mut self, n: usize) -> Result<&'a [u8], MessageError> {
        let (head, rest) = self.rest.split_at_checked(n).ok_or(MessageError::Truncated)?;
        self.rest = rest;
        Ok(head)
    }

    /// A string up to its NUL, which is consumed too.
    #[inline]
    pub(crate) fn cstr(&mut self) -> Result<&'a [u8], MessageError> {
        let nul = memchr::memchr(0, self.rest).ok_or(MessageError::MissingTerminator)?;
        let text = &self.rest[..nul];
        self.rest = &self.rest[nul + 1..];
        Ok(text)
    }

    /// An Int32 length and that many bytes; -1 is null.
    #[inline]
    pub(crate) fn value(&mut self) -> Result<Option<&'a [u8]>, MessageError> {
        match self.i32()? {
            -1 => Ok(None),
            n => self.take(usize::try_from(n).map_err(|_| MessageError::ValueLength)?).map(Some),
        }
    }

    pub(crate) fn formats(&mut self) -> Result<Formats<'a>, MessageError> {
        let count = self.u16()?;
        let raw = self.take(usize::from(count) * 2)?;
        if raw.chunks_exact(2).any(|c| !matches!(c, [0, 0 | 1])) {
            return Err(MessageError::FormatCode);
        }
        Ok(Formats { raw })
    }

    pub(crate) fn oids(&mut self) -> Result<Oids<'a>, MessageError> {
        let count = self.u16()?;
        Ok(Oids { raw: self.take(usize::from(count) * 4)? })
    }

    pub(crate) fn values(&mut self) -> Result<Values<'a>, MessageError> {
        let left = self.u16()?;
        let start = self.rest;
        for _ in 0..left {
            self.value()?;
        }
        let used = start.len() - self.rest.len();
        Ok(Values { left, reader: Reader::new(&start[..used]) })
    }

    /// Nothing may follow the last field.
    #[inline]
    pub(crate) fn end(self) -> Result<(), MessageError> {
        if self.rest.is_empty() { Ok(()) } else { Err(MessageError::TrailingBytes) }
    }
}

/// Format codes: an iterator over 0 (text) and 1 (binary), 0..=65535 of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Formats<'a> {
    raw: &'a [u8],
}

impl Iterator for Formats<'_> {
    type Item = u16;

    fn next(&mut self) -> Option<u16> {
        let (head, rest) = self.raw.split_first_chunk()?;
        self.raw = rest;
        Some(u16::from_be_bytes(*head))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.raw.len() / 2, Some(self.raw.len() / 2))
    }
}

impl ExactSizeIterator for Formats<'_> {}

/// Object identifiers of types: an iterator, 0..=65535 of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Oids<'a> {
    raw: &'a [u8],
}

impl Iterator for Oids<'_> {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        let (head, rest) = self.raw.split_first_chunk()?;
        self.raw = rest;
        Some(u32::from_be_bytes(*head))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.raw.len() / 4, Some(self.raw.len() / 4))
    }
}

impl ExactSizeIterator for Oids<'_> {}

/// Values of a row or of a Bind: an iterator over `None` (null) or the bytes, 0..=65535 of them.
#[derive(Clone, Copy, Debug)]
pub struct Values<'a> {
    left: u16,
    reader: Reader<'a>,
}

impl<'a> Iterator for Values<'a> {
    type Item = Option<&'a [u8]>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        self.reader.value().ok() // checked when the view was made
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (usize::from(self.left), Some(usize::from(self.left)))
    }
}

impl ExactSizeIterator for Values<'_> {}
