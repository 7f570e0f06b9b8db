// SPDX-License-Identifier: Apache-2.0
//! Where the messages of a stream end that passes as it comes: its heads may be cut anywhere, for nothing is held back.

/// Bytes of type and length word.
const HEADER: usize = 5;

/// The head of a message of which a part has passed.
#[derive(Debug, Default)]
pub(super) struct Head {
    bytes: [u8; HEADER],
    len: u8,
}

impl Head {
    /// Whether the stream stands inside a head.
    pub(super) fn is_begun(&self) -> bool {
        self.len > 0
    }

    /// Follows `input`, which passes. `left` is what the message under way still lacks of its body.
    pub(super) fn follow(&mut self, left: &mut u32, mut input: &[u8]) {
        loop {
            let body = input.len().min(*left as usize);
            *left -= body as u32;
            input = &input[body..];
            if input.is_empty() {
                return;
            }
            let missing = &mut self.bytes[usize::from(self.len)..];
            let there = input.len().min(missing.len());
            missing[..there].copy_from_slice(&input[..there]);
            input = &input[there..];
            self.len += there as u8;
            if usize::from(self.len) == HEADER {
                let [_, a, b, c, d] = self.bytes;
                // Less than the word itself cannot be: nobody knows where that ends.
                *left = u32::from_be_bytes([a, b, c, d]).checked_sub(4).unwrap_or(u32::MAX);
                self.len = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_end_where_they_end_however_they_are_cut() {
        let stream = b"d\0\0\0\x07abcc\0\0\0\x04d\0\0\0\x05x";
        let ends = [8, 13, 19];
        for cut in 0..=stream.len() {
            let (mut head, mut left) = (Head::default(), 0);
            head.follow(&mut left, &stream[..cut]);
            assert_eq!(left == 0 && !head.is_begun(), cut == 0 || ends.contains(&cut), "cut at {cut}");
            head.follow(&mut left, &stream[cut..]);
            assert!(left == 0 && !head.is_begun());
        }
    }

    #[test]
    fn what_cannot_be_followed_has_no_end() {
        let (mut head, mut left) = (Head::default(), 0);
        head.follow(&mut left, b"d\0\0\0\x03d\0\0\0\x04");
        assert!(left > 0);
    }
}
