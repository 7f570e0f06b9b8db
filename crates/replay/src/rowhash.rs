// SPDX-License-Identifier: Apache-2.0
//! A hash of a result: of each row, put together in order or in any order.
//!
//! Good enough to find differences, not to withstand somebody who makes them.

use std::hash::{BuildHasher as _, Hasher as _};

use foldhash::quality::FixedState;

/// The same in every run, so that a capture of yesterday compares with a replay of today.
const STATE: FixedState = FixedState::with_seed(0x0075_6e64_6572_7061);

/// The hash of a result so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RowHash {
    ordered: bool,
    value: u64,
}

impl RowHash {
    /// Rows count in their order.
    pub fn ordered() -> Self {
        Self { ordered: true, value: 0 }
    }

    /// Rows count in any order, but as often as they come.
    pub fn unordered() -> Self {
        Self { ordered: false, value: 0 }
    }

    /// The same kind of hash, of nothing yet.
    pub fn again(self) -> Self {
        Self { value: 0, ..self }
    }

    /// The hash of one row: the body of its DataRow, or of a CopyData.
    pub fn of_row(body: &[u8]) -> u64 {
        let mut hasher = STATE.build_hasher();
        hasher.write(body);
        hasher.finish()
    }

    /// Adds a row.
    pub fn add(&mut self, row: u64) {
        self.value =
            if self.ordered { STATE.hash_one((self.value, row)) } else { self.value.wrapping_add(row) };
    }

    /// The hash.
    pub fn value(&self) -> u64 {
        self.value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(mut of: RowHash, rows: &[&str]) -> u64 {
        rows.iter().for_each(|row| of.add(RowHash::of_row(row.as_bytes())));
        of.value()
    }

    #[test]
    fn order_counts_where_it_should() {
        let (one, two) = (&["a", "b", "c"], &["c", "a", "b"]);
        assert_eq!(hash(RowHash::unordered(), one), hash(RowHash::unordered(), two));
        assert_ne!(hash(RowHash::ordered(), one), hash(RowHash::ordered(), two));
    }

    #[test]
    fn rows_count_as_often_as_they_come() {
        for of in [RowHash::ordered(), RowHash::unordered()] {
            assert_ne!(hash(of.clone(), &["a"]), hash(of.clone(), &["a", "a"]));
            assert_ne!(hash(of.clone(), &["a", "a"]), hash(of.clone(), &["b", "b"]));
            assert_ne!(hash(of.clone(), &["ab", "c"]), hash(of, &["a", "bc"]));
        }
    }
}
