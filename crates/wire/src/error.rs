// SPDX-License-Identifier: Apache-2.0
//! The rules that input can break, one variant each. `Copy`, so that hot paths return them freely.
//!
//! "Needs more bytes" is never an error: parsers of streams say `Ok(None)`.

use crate::SqlState;

/// A length word that cannot be right. The stream has no known position any more: close it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The length counts itself, so it is 4 at least.
    #[error("invalid message length: smaller than 4")]
    LengthTooSmall,
    /// The length is above the caller's limit, or negative.
    #[error("invalid message length: above the limit")]
    LengthTooLarge,
    /// A first packet outside 8..=[`MAX_LEN`](crate::startup::MAX_LEN) bytes.
    #[error("invalid length of startup packet")]
    StartupLength,
}

impl FrameError {
    /// The code to report to the peer.
    pub const fn sqlstate(self) -> SqlState {
        match self {
            Self::LengthTooSmall | Self::LengthTooLarge | Self::StartupLength => SqlState::PROTOCOL_VIOLATION,
        }
    }
}

/// A message whose frame was right and whose body is not. The next message can still be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The length word of the packet is wrong.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The body ends inside a field.
    #[error("insufficient data left in message")]
    Truncated,
    /// A string runs to the end of the body without its NUL.
    #[error("invalid string in message: no terminator")]
    MissingTerminator,
    /// Bytes follow the last field.
    #[error("invalid message format: bytes after the last field")]
    TrailingBytes,
    /// The length of a value is negative and not -1 (null).
    #[error("invalid length of a value")]
    ValueLength,
    /// A format code other than 0 (text) and 1 (binary).
    #[error("unsupported format code")]
    FormatCode,
    /// The number of parameter formats is neither 0, 1 nor the number of parameters.
    #[error("number of parameter formats does not match the parameters")]
    FormatCount,
    /// Describe and Close name a statement (`S`) or a portal (`P`), nothing else.
    #[error("invalid subtype of Describe or Close")]
    Target,
    /// A message type that this direction does not have.
    #[error("invalid message type")]
    UnknownType,
    /// An AuthenticationXXX code that the manual does not list.
    #[error("unknown authentication request")]
    UnknownAuthentication,
    /// A ReadyForQuery status other than `I`, `T`, `E`.
    #[error("invalid transaction status")]
    TransactionStatus,
    /// The secret key of a cancel request or of BackendKeyData is not 4..=256 bytes.
    #[error("invalid length of cancel key")]
    CancelKeyLength,
    /// SSLRequest or GSSENCRequest of a length other than 8.
    #[error("invalid encryption request")]
    EncryptionRequest,
    /// The parameters of a StartupMessage do not end exactly at the packet's last byte.
    #[error("invalid startup packet layout: expected terminator as last byte")]
    StartupLayout,
    /// A word in the startup `options` that is neither `-c name=value` nor `--name=value`.
    #[error("unsupported switch in startup options")]
    OptionSwitch,
    /// A setting in the startup `options` without `=value`.
    #[error("startup option requires a value")]
    OptionValue,
}

impl MessageError {
    /// The code to report to the peer, the one PostgreSQL itself uses where it has the same check.
    pub const fn sqlstate(self) -> SqlState {
        match self {
            Self::Frame(e) => e.sqlstate(),
            Self::Truncated
            | Self::MissingTerminator
            | Self::TrailingBytes
            | Self::ValueLength
            | Self::FormatCount
            | Self::Target
            | Self::UnknownType
            | Self::UnknownAuthentication
            | Self::TransactionStatus
            | Self::CancelKeyLength
            | Self::EncryptionRequest
            | Self::StartupLayout => SqlState::PROTOCOL_VIOLATION,
            Self::FormatCode => SqlState::INVALID_PARAMETER_VALUE,
            Self::OptionSwitch | Self::OptionValue => SqlState::SYNTAX_ERROR,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sqlstates() {
        assert_eq!(FrameError::LengthTooLarge.sqlstate().as_str(), "08P01");
        assert_eq!(MessageError::from(FrameError::StartupLength).sqlstate().as_str(), "08P01");
        assert_eq!(MessageError::FormatCode.sqlstate().as_str(), "22023");
        assert_eq!(MessageError::OptionValue.sqlstate().as_str(), "42601");
    }

    #[test]
    fn errors_are_small() {
        assert!(size_of::<Result<(), MessageError>>() <= 2);
        assert!(size_of::<FrameError>() == 1);
    }
}
