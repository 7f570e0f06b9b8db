// SPDX-License-Identifier: Apache-2.0
//! Messages about the session: its status, parameters, keys, notifications.

use crate::MessageError;
use crate::reader::Reader;
use crate::startup::{CANCEL_KEY_LEN, ProtocolVersion};

/// The status byte of ReadyForQuery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransactionStatus {
    /// `I`: not in a transaction block.
    Idle,
    /// `T`: in a transaction block.
    Transaction,
    /// `E`: in a failed one; all but its end is refused.
    Failed,
}

impl TransactionStatus {
    /// Decodes the body of a ReadyForQuery.
    #[inline]
    pub const fn decode(body: &[u8]) -> Result<Self, MessageError> {
        match body {
            [] => Err(MessageError::Truncated),
            [byte] => match Self::from_byte(*byte) {
                Some(status) => Ok(status),
                None => Err(MessageError::TransactionStatus),
            },
            _ => Err(MessageError::TrailingBytes),
        }
    }

    /// The status of a byte on the wire.
    #[inline]
    pub const fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            b'I' => Some(Self::Idle),
            b'T' => Some(Self::Transaction),
            b'E' => Some(Self::Failed),
            _ => None,
        }
    }

    /// The byte on the wire.
    #[inline]
    pub const fn to_byte(self) -> u8 {
        match self {
            Self::Idle => b'I',
            Self::Transaction => b'T',
            Self::Failed => b'E',
        }
    }
}

/// The value of a reported parameter (`GUC_REPORT`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParameterStatus<'a> {
    /// For instance `client_encoding`.
    pub name: &'a [u8],
    /// Its value now.
    pub value: &'a [u8],
}

impl<'a> ParameterStatus<'a> {
    /// Decodes a whole body.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        let mut r = Reader::new(body);
        let status = Self { name: r.cstr()?, value: r.cstr()? };
        r.end()?;
        Ok(status)
    }
}

/// What a CancelRequest for this session must carry.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct BackendKeyData<'a> {
    /// The process ID; a pooler's may be any number.
    pub process_id: u32,
    /// The secret key: 4 bytes in protocol 3.0, 4..=256 in 3.2.
    pub secret_key: &'a [u8],
}

impl<'a> BackendKeyData<'a> {
    /// Decodes a whole body.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        let mut r = Reader::new(body);
        let process_id = r.u32()?;
        if !CANCEL_KEY_LEN.contains(&r.rest.len()) {
            return Err(MessageError::CancelKeyLength);
        }
        Ok(Self { process_id, secret_key: r.rest })
    }
}

/// The key is a secret: logs see its length only.
impl std::fmt::Debug for BackendKeyData<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BackendKeyData({}, key of {} bytes)", self.process_id, self.secret_key.len())
    }
}

/// The end of one statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandComplete<'a> {
    /// The command tag: `SELECT 5`, `INSERT 0 1`, `BEGIN`.
    pub tag: &'a [u8],
}

impl<'a> CommandComplete<'a> {
    /// Decodes a whole body.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        let mut r = Reader::new(body);
        let tag = r.cstr()?;
        r.end()?;
        Ok(Self { tag })
    }

    /// Rows retrieved or affected: the number at the tag's end. `None` for commands that do not count,
    /// and for a number above 2^64-1, which no server sends.
    pub fn rows(&self) -> Option<u64> {
        let at = memchr::memrchr(b' ', self.tag)?;
        let digits = &self.tag[at + 1..];
        if digits.is_empty() {
            return None;
        }
        digits.iter().try_fold(0u64, |n, &byte| {
            let digit = char::from(byte).to_digit(10)?;
            n.checked_mul(10)?.checked_add(digit.into())
        })
    }
}

/// The server speaks a lower minor version than asked, or does not know some `_pq_.` options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NegotiateProtocolVersion<'a> {
    /// The word on the wire. The manual calls it the newest minor version; PostgreSQL sends, and
    /// libpq reads, the whole version. [`minor`](Self::minor) is right for both.
    pub newest: ProtocolVersion,
    count: u32,
    options: &'a [u8],
}

impl<'a> NegotiateProtocolVersion<'a> {
    /// Decodes a whole body.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        let mut r = Reader::new(body);
        let newest = ProtocolVersion::from_word(r.u32()?);
        let count = r.u32()?;
        let options = r.rest;
        for _ in 0..count {
            r.cstr()?; // each takes a byte at least, so a false count ends with the body
        }
        r.end()?;
        Ok(Self { newest, count, options })
    }

    /// The newest minor version of protocol 3 that the server speaks.
    pub const fn minor(&self) -> u16 {
        self.newest.minor
    }

    /// The options that the server does not know.
    pub fn options(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let mut r = Reader::new(self.options);
        (0..self.count).map_while(move |_| r.cstr().ok())
    }
}

/// NOTIFY of some session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotificationResponse<'a> {
    /// Of the session that sent it.
    pub process_id: u32,
    /// The channel's name.
    pub channel: &'a [u8],
    /// May be empty.
    pub payload: &'a [u8],
}

impl<'a> NotificationResponse<'a> {
    /// Decodes a whole body.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        let mut r = Reader::new(body);
        let notification = Self { process_id: r.u32()?, channel: r.cstr()?, payload: r.cstr()? };
        r.end()?;
        Ok(notification)
    }
}
