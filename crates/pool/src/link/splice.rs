// SPDX-License-Identifier: Apache-2.0
//! Output of the tracker: in the usual case one range of the input, which is sent from where it lies; composed in a buffer only when
//! something is inserted, left out or rewritten.

use std::ops::Range;

/// Collects what passes on. Bytes are kept from one input; see [`Splice::bytes`].
#[derive(Debug)]
pub struct Splice<'b> {
    composed: &'b mut Vec<u8>,
    is_composed: bool,
    range: Range<usize>,
}

impl<'b> Splice<'b> {
    /// A splice that composes in `buffer`, which is emptied.
    pub fn new(buffer: &'b mut Vec<u8>) -> Self {
        buffer.clear();
        Self { composed: buffer, is_composed: false, range: 0..0 }
    }

    /// Passes `range` of `input` on.
    pub fn keep(&mut self, input: &[u8], range: Range<usize>) {
        if range.is_empty() {
        } else if self.is_composed {
            self.composed.extend_from_slice(&input[range]);
        } else if self.range.is_empty() {
            self.range = range;
        } else if self.range.end == range.start {
            self.range.end = range.end;
        } else {
            self.compose(input).extend_from_slice(&input[range]);
        }
    }

    /// The buffer to append to, with all that was kept so far in it.
    pub fn compose(&mut self, input: &[u8]) -> &mut Vec<u8> {
        if !self.is_composed {
            self.composed.extend_from_slice(&input[self.range.clone()]);
            self.is_composed = true;
        }
        self.composed
    }

    /// Bytes in the buffer.
    pub fn composed(&self) -> usize {
        self.composed.len()
    }

    /// All that passes on.
    pub fn bytes<'a>(&'a self, input: &'a [u8]) -> &'a [u8] {
        if self.is_composed { self.composed } else { &input[self.range.clone()] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_not_copied() {
        let (input, mut buffer) = (b"abcdef", Vec::new());
        let mut splice = Splice::new(&mut buffer);
        splice.keep(input, 1..3);
        splice.keep(input, 3..5);
        assert_eq!(splice.bytes(input).as_ptr(), input[1..].as_ptr());
        assert_eq!(splice.bytes(input), b"bcde");
    }

    #[test]
    fn gaps_and_insertions_are_composed() {
        let (input, mut buffer) = (b"abcdef", Vec::new());
        let mut splice = Splice::new(&mut buffer);
        splice.keep(input, 0..1);
        splice.keep(input, 3..4);
        splice.compose(input).extend_from_slice(b"--");
        splice.keep(input, 5..6);
        assert_eq!(splice.bytes(input), b"ad--f");
    }
}
