// SPDX-License-Identifier: Apache-2.0
//! A clear-text password: bytes that are wiped when dropped and never printed by accident.

use std::fmt;

use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

/// A clear-text password. Bytes, not text: PostgreSQL takes any encoding.
///
/// Equality takes time that depends on the lengths only.
#[derive(Clone)]
pub struct Password(Zeroizing<Vec<u8>>);

impl Password {
    /// Takes the bytes over; the copy inside is wiped when dropped.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(Zeroizing::new(bytes.into()))
    }

    /// The bytes as they were given.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// An empty password lets nobody in, as in PostgreSQL and PgBouncer.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl PartialEq for Password {
    fn eq(&self, other: &Self) -> bool {
        self.0.ct_eq(other.0.as_slice()).into()
    }
}

impl Eq for Password {}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Password(..)")
    }
}
