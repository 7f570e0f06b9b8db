// SPDX-License-Identifier: Apache-2.0
//! Identity of a socket: the `id` and `ptr` of SHOW CLIENTS, the prefix of log lines.

use std::fmt;

/// Which side of the pooler a socket is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Side {
    /// An application's connection to the pooler.
    Client,
    /// The pooler's connection to PostgreSQL.
    Server,
}

impl Side {
    /// `C` or `S`: column `type`, and the log prefix.
    #[must_use]
    pub const fn letter(self) -> char {
        match self {
            Self::Client => 'C',
            Self::Server => 'S',
        }
    }

    /// `client` or `server`: JSON log lines and SHOW FDS.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Server => "server",
        }
    }
}

/// Identifier of a live socket, client or server: 1 to 2147483647, because column `id` is an int4.
///
/// It is printed in two ways: as a number in column `id`, and as something that looks like PgBouncer's address of
/// the socket's structure in columns `ptr` and `link` and in the log. Both forms name one socket, in both
/// directions, so a log line can be found in a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SocketId(u32);

impl SocketId {
    /// The first identifier.
    pub const FIRST: Self = Self(1);

    /// Base of the pointer form: where Linux puts the heap of a position-independent program, twelve digits.
    const POINTER_BASE: u64 = 0x5500_0000_0000;
    /// Distance of two pointers; allocations are aligned to 16 bytes.
    const POINTER_STEP: u64 = 16;

    /// An identifier from a number, `None` out of range.
    #[must_use]
    pub const fn new(id: u64) -> Option<Self> {
        if id >= 1 && id <= i32::MAX as u64 { Some(Self(id as u32)) } else { None }
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The following identifier; after the last comes the first, so an allocator must skip live ones.
    #[must_use]
    pub const fn next(self) -> Self {
        if self.0 == i32::MAX as u32 { Self::FIRST } else { Self(self.0 + 1) }
    }

    /// The pointer form.
    #[must_use]
    pub const fn pointer(self) -> Pointer {
        Pointer(Self::POINTER_BASE + self.0 as u64 * Self::POINTER_STEP)
    }
}

/// Prints as `0x550000000010`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pointer(u64);

impl Pointer {
    /// Reads the printed form back, e.g. to follow a log line; `None` when no socket is printed so.
    #[must_use]
    pub fn parse(text: &str) -> Option<SocketId> {
        let address = u64::from_str_radix(text.strip_prefix("0x")?, 16).ok()?;
        let distance = address.checked_sub(SocketId::POINTER_BASE)?;
        if distance % SocketId::POINTER_STEP != 0 {
            return None;
        }
        SocketId::new(distance / SocketId::POINTER_STEP)
    }
}

impl fmt::Display for Pointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointers_are_unique_and_come_back() {
        for id in [1, 2, 4096, i32::MAX as u64] {
            let id = SocketId::new(id).unwrap();
            assert_eq!(Pointer::parse(&id.pointer().to_string()), Some(id));
        }
        assert_eq!(SocketId::FIRST.pointer().to_string(), "0x550000000010");
        for text in ["", "0x", "550000000010", "0x550000000011", "0x550000000000", "0xffffffffffffffff"] {
            assert_eq!(Pointer::parse(text), None, "{text}");
        }
    }

    #[test]
    fn identifiers_fit_an_int4_and_wrap() {
        assert_eq!(SocketId::new(0), None);
        assert_eq!(SocketId::new(1 << 31), None);
        let last = SocketId::new((1 << 31) - 1).unwrap();
        assert_eq!(last.next(), SocketId::FIRST);
        assert_eq!(SocketId::FIRST.next().get(), 2);
    }
}
