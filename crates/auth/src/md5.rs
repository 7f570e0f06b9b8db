// SPDX-License-Identifier: Apache-2.0
//! md5 authentication: PostgreSQL's `md5` + 32 hexadecimal digits (src/common/md5_common.c).

use md5::{Digest, Md5};
use subtle::ConstantTimeEq;

/// Length of the hash, in bytes.
pub const HASH_LEN: usize = 16;

/// Length of the text `md5` + hexadecimal digits, in bytes.
pub const TEXT_LEN: usize = 3 + 2 * HASH_LEN;

/// The stored form: md5(password ‖ user). The user name is the salt, so a renamed user loses its password.
pub fn hash(password: &[u8], user: &[u8]) -> [u8; HASH_LEN] {
    Md5::new().chain_update(password).chain_update(user).finalize().into()
}

/// The answer to AuthenticationMD5Password: `md5` + hex(md5(hex(stored) ‖ salt)), without the closing NUL.
pub fn response(stored: &[u8; HASH_LEN], salt: [u8; 4]) -> [u8; TEXT_LEN] {
    let inner = text(stored);
    text(&Md5::new().chain_update(&inner[3..]).chain_update(salt).finalize().into())
}

/// Whether `answer` (without the closing NUL) answers `salt`. Constant time for answers of the right length.
pub fn verify(stored: &[u8; HASH_LEN], salt: [u8; 4], answer: &[u8]) -> bool {
    response(stored, salt).ct_eq(answer).into()
}

/// `md5` + lower-case hexadecimal digits.
pub fn text(hash: &[u8; HASH_LEN]) -> [u8; TEXT_LEN] {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    let mut out = [0; TEXT_LEN];
    out[..3].copy_from_slice(b"md5");
    for (pair, byte) in out[3..].chunks_exact_mut(2).zip(hash) {
        pair[0] = HEX[usize::from(byte >> 4)];
        pair[1] = HEX[usize::from(byte & 15)];
    }
    out
}

/// Reads `md5` + 32 hexadecimal digits; anything else is not an md5 secret.
pub fn parse(text: &[u8]) -> Option<[u8; HASH_LEN]> {
    let digits = text.strip_prefix(b"md5")?;
    if digits.len() != 2 * HASH_LEN {
        return None;
    }
    let mut out = [0; HASH_LEN];
    for (byte, pair) in out.iter_mut().zip(digits.chunks_exact(2)) {
        let high = char::from(pair[0]).to_digit(16)?;
        let low = char::from(pair[1]).to_digit(16)?;
        *byte = (high << 4 | low) as u8;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_postgresql() {
        // "md5" || md5("secret" || "joe"), and that digest hashed again with the salt 01 02 03 04.
        let stored = hash(b"secret", b"joe");
        assert_eq!(text(&stored), *b"md5c59ec932d911ffdf487595b5a2adf973");
        let answer = response(&stored, [1, 2, 3, 4]);
        assert_eq!(answer, *b"md5850be429f1fe77df3f603ac424abb440");
        assert!(verify(&stored, [1, 2, 3, 4], &answer));
        assert!(!verify(&stored, [1, 2, 3, 5], &answer));
        assert!(!verify(&stored, [1, 2, 3, 4], &answer[..34]));
        assert!(!verify(&stored, [1, 2, 3, 4], b""));
    }

    #[test]
    fn parses_only_the_exact_form() {
        let stored = hash(b"secret", b"joe");
        assert_eq!(parse(&text(&stored)), Some(stored));
        assert_eq!(parse(&text(&stored).to_ascii_uppercase()), None);
        assert_eq!(parse(b"md5abc"), None);
        assert_eq!(parse(b"md5zz9ec932d911ffdf487595b5a2adf973"), None);
    }
}
