// SPDX-License-Identifier: Apache-2.0
//! SQLSTATE codes: five characters, the first two are the class (PostgreSQL manual, appendix "Error Codes").
//!
//! The constants are generated from PostgreSQL 15's errcodes.txt by `examples/gen_sqlstate.rs`; a test compares
//! them with the installed file.

use std::fmt;

/// A SQLSTATE: five digits or capital ASCII letters.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SqlState([u8; 5]);

macro_rules! codes {
    ($($name:ident = $code:literal, $condition:literal;)*) => {
        impl SqlState {
            $(#[doc = concat!("`", stringify!($code), "` ", $condition)]
            pub const $name: Self = Self(*$code);)*
        }

        /// All codes of PostgreSQL 15 with their condition names, ordered by code.
        const CONDITIONS: &[(SqlState, &str)] = &[$((SqlState::$name, $condition),)*];
    };
}

macro_rules! aliases {
    ($($alias:ident = $name:ident;)*) => {
        impl SqlState {
            $(#[doc = concat!("PostgreSQL's second name of [`Self::", stringify!($name), "`]")]
            pub const $alias: Self = Self::$name;)*
        }
    };
}

include!("sqlstate/codes.rs");

impl SqlState {
    /// The code in `bytes`, when it is five digits or capital letters.
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let code: [u8; 5] = bytes.try_into().ok()?;
        code.iter().all(|b| b.is_ascii_digit() || b.is_ascii_uppercase()).then_some(Self(code))
    }

    /// The five characters.
    pub fn as_str(&self) -> &str {
        // Every constructor admits ASCII only.
        std::str::from_utf8(&self.0).unwrap_or("XX000")
    }

    /// The five bytes.
    pub const fn as_bytes(&self) -> &[u8; 5] {
        &self.0
    }

    /// The class: the first two characters.
    pub const fn class(self) -> [u8; 2] {
        [self.0[0], self.0[1]]
    }

    /// PostgreSQL's condition name, for instance `undefined_table`; `None` for codes that it does not define.
    pub fn condition(self) -> Option<&'static str> {
        let at = CONDITIONS.binary_search_by_key(&self, |&(code, _)| code).ok()?;
        Some(CONDITIONS[at].1)
    }

    /// All codes of PostgreSQL 15, ordered.
    pub fn all() -> impl ExactSizeIterator<Item = Self> {
        CONDITIONS.iter().map(|&(code, _)| code)
    }

    /// Class 00: success.
    pub const fn is_success(self) -> bool {
        matches!(self.class(), [b'0', b'0'])
    }

    /// Class 01 (warning) and 02 (no data, which is a warning class too).
    pub const fn is_warning(self) -> bool {
        matches!(self.class(), [b'0', b'1' | b'2'])
    }

    /// Class 08: the connection or the protocol broke.
    pub const fn is_connection_exception(self) -> bool {
        matches!(self.class(), [b'0', b'8'])
    }

    /// Class 28: who the client is, or its password, was not accepted.
    pub const fn is_invalid_authorization(self) -> bool {
        matches!(self.class(), [b'2', b'8'])
    }

    /// Class 53: the server ran out of something.
    pub const fn is_insufficient_resources(self) -> bool {
        matches!(self.class(), [b'5', b'3'])
    }

    /// Class 57: an operator or a shutdown intervened.
    pub const fn is_operator_intervention(self) -> bool {
        matches!(self.class(), [b'5', b'7'])
    }
}

impl fmt::Display for SqlState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for SqlState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SqlState({})", self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_ordered_and_valid() {
        assert!(CONDITIONS.is_sorted_by(|a, b| a.0 < b.0), "binary search needs it");
        for code in SqlState::all() {
            assert_eq!(SqlState::new(code.as_bytes()), Some(code));
        }
    }

    #[test]
    fn known_codes() {
        assert_eq!(SqlState::PROTOCOL_VIOLATION.as_str(), "08P01");
        assert_eq!(SqlState::INVALID_PASSWORD.to_string(), "28P01");
        assert_eq!(SqlState::UNDEFINED_TABLE.condition(), Some("undefined_table"));
        assert_eq!(SqlState::new(b"ZZZZZ").unwrap().condition(), None);
        assert_eq!(format!("{:?}", SqlState::ADMIN_SHUTDOWN), "SqlState(57P01)");
    }

    #[test]
    fn refused() {
        for bad in [&b""[..], b"0000", b"000000", b"08p01", b"08 01", b"\xc3\xa9\xc3\xa90"] {
            assert_eq!(SqlState::new(bad), None);
        }
    }

    #[test]
    fn classes() {
        assert_eq!(SqlState::TOO_MANY_CONNECTIONS.class(), *b"53");
        assert!(SqlState::SUCCESSFUL_COMPLETION.is_success());
        assert!(SqlState::NO_DATA.is_warning() && SqlState::WARNING.is_warning());
        assert!(SqlState::CONNECTION_FAILURE.is_connection_exception());
        assert!(SqlState::INVALID_PASSWORD.is_invalid_authorization());
        assert!(SqlState::TOO_MANY_CONNECTIONS.is_insufficient_resources());
        assert!(SqlState::ADMIN_SHUTDOWN.is_operator_intervention());
        assert!(!SqlState::SYNTAX_ERROR.is_success());
    }
}
