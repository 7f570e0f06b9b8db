// SPDX-License-Identifier: Apache-2.0
//! SASLprep (RFC 4013) with PostgreSQL's rule: what cannot be prepared is used as it is.

use std::borrow::Cow;

/// Prepares a password for SCRAM.
///
/// Falls back to the raw bytes if they are not UTF-8, hold a prohibited or unassigned character, or would
/// become empty, as `pg_saslprep` and its callers do (src/common/saslprep.c): such a password still works
/// with itself.
pub fn saslprep(password: &[u8]) -> Cow<'_, [u8]> {
    if password.is_ascii() {
        return Cow::Borrowed(password);
    }
    let Ok(text) = std::str::from_utf8(password) else {
        return Cow::Borrowed(password);
    };
    match stringprep::saslprep(text) {
        Ok(prepared) if !prepared.is_empty() => Cow::Owned(prepared.into_owned().into_bytes()),
        _ => Cow::Borrowed(password),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn follows_the_examples_of_rfc_4013() {
        assert_eq!(&*saslprep("I\u{ad}X".as_bytes()), b"IX");
        assert_eq!(&*saslprep("\u{aa}".as_bytes()), b"a");
        assert_eq!(&*saslprep("\u{2168}".as_bytes()), b"IX");
        assert_eq!(&*saslprep(b"USER"), b"USER");
    }

    #[test]
    fn keeps_what_cannot_be_prepared() {
        for raw in [&b"\x07bell"[..], b"\xff\xfe", "\u{627}1".as_bytes(), "\u{ad}".as_bytes(), b""] {
            assert_eq!(&*saslprep(raw), raw);
        }
    }
}
