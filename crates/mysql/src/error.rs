// SPDX-License-Identifier: Apache-2.0
//! What bytes may be instead of the protocol.

/// Why bytes are not what they should be. "Need more bytes" is none of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A field reaches over the end of its message.
    #[error("the message ends inside of {0}")]
    Truncated(&'static str),
    /// Packets of a message have consecutive sequence numbers.
    #[error("a packet has sequence number {found} where {expected} was due")]
    Sequence {
        /// What was due.
        expected: u8,
        /// What came.
        found: u8,
    },
    /// No server takes more: `max_allowed_packet` ends at 1 GiB.
    #[error("a message of more than 1 GiB")]
    TooLong,
    /// A greeting of another protocol than 10, or a login without `CLIENT_PROTOCOL_41`.
    #[error("protocol {0}, which was replaced by MySQL 4.1 in 2004, is not supported")]
    OldProtocol(u8),
    /// A first byte that no message of this place has.
    #[error("{what} begins with byte {byte:#04x}")]
    Unexpected {
        /// What was expected.
        what: &'static str,
        /// What was there.
        byte: u8,
    },
    /// A type of the binary protocol that is not known here.
    #[error("a parameter of type {0}, which is not known")]
    Type(u8),
}
