// SPDX-License-Identifier: Apache-2.0
//! What a client proves that it knows the password with. The password itself is sent to nobody but over TLS or a Unix socket.
//!
//! Verified on MariaDB 10.11: `mysql_native_password`. `caching_sha2_password` follows the manual ("Caching SHA-2 Pluggable Authentication")
//! and is tested by vectors only.

use sha1::{Digest as _, Sha1};
use sha2::Sha256;

/// The plugin of MySQL 8.
pub const CACHING_SHA2_PASSWORD: &[u8] = b"caching_sha2_password";
/// In more authentication data of [`CACHING_SHA2_PASSWORD`]: the server remembers the password, OK follows.
pub const FAST_AUTH_DONE: u8 = 3;
/// It does not: it wants the password, and a zero byte behind it, over a stream that nobody else can read.
pub const FULL_AUTH_WANTED: u8 = 4;

/// The proof of `mysql_native_password`: SHA1(password) XOR SHA1(nonce, SHA1(SHA1(password))). Empty for no password.
pub fn native_password(password: &[u8], nonce: &[u8]) -> Vec<u8> {
    if password.is_empty() {
        return Vec::new();
    }
    let once = Sha1::digest(password);
    let stored = Sha1::digest(once);
    let mask = Sha1::new().chain_update(nonce).chain_update(stored).finalize();
    xor(&once, &mask)
}

/// The proof of `caching_sha2_password`: SHA256(password) XOR SHA256(SHA256(SHA256(password)), nonce). Empty for no password.
pub fn caching_sha2_password(password: &[u8], nonce: &[u8]) -> Vec<u8> {
    if password.is_empty() {
        return Vec::new();
    }
    let once = Sha256::digest(password);
    let stored = Sha256::digest(once);
    let mask = Sha256::new().chain_update(stored).chain_update(nonce).finalize();
    xor(&once, &mask)
}

fn xor(one: &[u8], other: &[u8]) -> Vec<u8> {
    one.iter().zip(other).map(|(a, b)| a ^ b).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Computed by another implementation of the two hash functions.
    #[test]
    fn proofs_are_those_of_the_manuals() {
        let nonce: Vec<u8> = (1..=20).collect();
        assert_eq!(hex(&native_password(b"S3cret", &nonce)), "580600cfab5b034fa04df308ddf2b81e1839c867");
        assert_eq!(
            hex(&caching_sha2_password(b"S3cret", &nonce)),
            "2f3e8a021396d5eabc37b576d40a22dbde8057cbc68d162c1dcba692395fde8c"
        );
        assert!(native_password(b"", &nonce).is_empty() && caching_sha2_password(b"", &nonce).is_empty());
    }
}
