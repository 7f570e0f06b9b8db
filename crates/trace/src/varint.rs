// SPDX-License-Identifier: Apache-2.0
//! Integers in as few bytes as they need (LEB128), signed ones zigzag-coded first.

/// The longest varint: ceil(64 / 7) bytes.
pub(crate) const MAX_LEN: usize = 10;

/// Appends `value`.
#[inline]
pub(crate) fn put(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Appends `to - from` in wrapping arithmetic: small for neighbours, and defined for all values.
#[inline]
pub(crate) fn put_delta(out: &mut Vec<u8>, from: u64, to: u64) {
    let delta = to.wrapping_sub(from) as i64;
    put(out, ((delta << 1) ^ (delta >> 63)) as u64);
}

/// Takes fields from the front of a record. `None` means that the record is malformed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fields<'a> {
    pub(crate) rest: &'a [u8],
}

impl<'a> Fields<'a> {
    #[inline]
    pub(crate) fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(*first)
    }

    /// A varint; none of more than 64 bits.
    #[inline]
    pub(crate) fn u64(&mut self) -> Option<u64> {
        let mut value = 0;
        for (at, &byte) in self.rest.iter().take(MAX_LEN).enumerate() {
            let bits = u64::from(byte & 0x7f);
            if at == MAX_LEN - 1 && byte > 1 {
                return None;
            }
            value |= bits << (7 * at);
            if byte < 0x80 {
                self.rest = &self.rest[at + 1..];
                return Some(value);
            }
        }
        None
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.u64()?.try_into().ok()
    }

    #[inline]
    pub(crate) fn delta(&mut self, from: u64) -> Option<u64> {
        let coded = self.u64()?;
        let delta = (coded >> 1) ^ (coded & 1).wrapping_neg();
        Some(from.wrapping_add(delta))
    }

    #[inline]
    pub(crate) fn take(&mut self, len: u64) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(usize::try_from(len).ok()?)?;
        self.rest = rest;
        Some(taken)
    }

    /// Bytes behind their length.
    #[inline]
    pub(crate) fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = self.u64()?;
        self.take(len)
    }

    #[inline]
    pub(crate) fn all(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }
}

/// Appends a length and as many bytes.
#[inline]
pub(crate) fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn golden() {
        for (value, bytes) in [
            (0, &[0][..]),
            (127, &[127]),
            (128, &[0x80, 1]),
            (u64::MAX, &[255, 255, 255, 255, 255, 255, 255, 255, 255, 1]),
        ] {
            let mut out = Vec::new();
            put(&mut out, value);
            assert_eq!(out, bytes);
        }
    }

    #[test]
    fn more_than_64_bits_are_refused() {
        assert_eq!(Fields { rest: &[0xff; 10] }.u64(), None);
        assert_eq!(Fields { rest: &[255, 255, 255, 255, 255, 255, 255, 255, 255, 2] }.u64(), None);
        assert_eq!(Fields { rest: &[0x80] }.u64(), None);
    }

    proptest! {
        #[test]
        fn round_trip(value: u64, from: u64) {
            let mut out = Vec::new();
            put(&mut out, value);
            put_delta(&mut out, from, value);
            let mut fields = Fields { rest: &out };
            prop_assert_eq!(fields.u64(), Some(value));
            prop_assert_eq!(fields.delta(from), Some(value));
            prop_assert!(fields.rest.is_empty());
        }
    }
}
