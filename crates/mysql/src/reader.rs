// SPDX-License-Identifier: Apache-2.0
//! A look at the fields of a message, one after the other. Integers are little-endian.

use crate::Error;

/// The rest of a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn rest(self) -> &'a [u8] {
        self.0
    }

    pub(crate) fn take(&mut self, len: usize, what: &'static str) -> Result<&'a [u8], Error> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(Error::Truncated(what))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Error> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(Error::Truncated(what))?;
        self.0 = rest;
        Ok(*taken)
    }

    pub(crate) fn u8(&mut self, what: &'static str) -> Result<u8, Error> {
        self.array::<1>(what).map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self, what: &'static str) -> Result<u16, Error> {
        self.array(what).map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self, what: &'static str) -> Result<u32, Error> {
        self.array(what).map(u32::from_le_bytes)
    }

    /// A length-encoded integer. 0xfb (NULL) and 0xff (an error) are none.
    pub(crate) fn integer(&mut self, what: &'static str) -> Result<u64, Error> {
        Ok(match self.u8(what)? {
            0xfc => self.u16(what)?.into(),
            0xfd => {
                let [a, b, c] = self.array(what)?;
                u32::from_le_bytes([a, b, c, 0]).into()
            }
            0xfe => u64::from_le_bytes(self.array(what)?),
            byte @ (0xfb | 0xff) => return Err(Error::Unexpected { what, byte }),
            small => small.into(),
        })
    }

    /// A string with its length before it.
    pub(crate) fn string(&mut self, what: &'static str) -> Result<&'a [u8], Error> {
        let len = self.integer(what)?;
        self.take(usize::try_from(len).map_err(|_| Error::Truncated(what))?, what)
    }

    /// A string with a zero byte behind it.
    pub(crate) fn string_nul(&mut self, what: &'static str) -> Result<&'a [u8], Error> {
        let len = self.0.iter().position(|&byte| byte == 0).ok_or(Error::Truncated(what))?;
        let text = self.take(len, what)?;
        self.take(1, what)?;
        Ok(text)
    }
}

/// Appends a length-encoded integer.
pub(crate) fn put_integer(out: &mut Vec<u8>, value: u64) {
    match value {
        0..=0xfa => out.push(value as u8),
        0xfb..=0xffff => {
            out.push(0xfc);
            out.extend_from_slice(&(value as u16).to_le_bytes());
        }
        0x1_0000..=0xff_ffff => {
            out.push(0xfd);
            out.extend_from_slice(&(value as u32).to_le_bytes()[..3]);
        }
        _ => {
            out.push(0xfe);
            out.extend_from_slice(&value.to_le_bytes());
        }
    }
}

/// Appends a string with its length before it.
pub(crate) fn put_string(out: &mut Vec<u8>, text: &[u8]) {
    put_integer(out, text.len() as u64);
    out.extend_from_slice(text);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn integers_have_the_documented_lengths() {
        for (value, len) in [
            (0, 1),
            (250, 1),
            (251, 3),
            (65_535, 3),
            (65_536, 4),
            (0xff_ffff, 4),
            (0x100_0000, 9),
            (u64::MAX, 9),
        ] {
            let mut out = Vec::new();
            put_integer(&mut out, value);
            assert_eq!(out.len(), len, "{value}");
        }
    }

    proptest! {
        #[test]
        fn integers_come_back(value: u64, bits in 0u32..64) {
            let value = value >> bits;
            let mut out = Vec::new();
            put_integer(&mut out, value);
            let mut reader = Reader::new(&out);
            prop_assert_eq!(reader.integer("a number"), Ok(value));
            prop_assert!(reader.is_empty());
        }
    }
}
