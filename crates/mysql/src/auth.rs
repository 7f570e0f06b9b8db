// SPDX-License-Identifier: Apache-2.0
//! What a client proves that it knows the password with. The password itself is sent to nobody but over TLS or a Unix socket.
//!
//! Verified on MariaDB 10.11: `mysql_native_password` and `client_ed25519`. `caching_sha2_password` follows the manual ("Caching SHA-2 Pluggable Authentication")
//! and is tested by vectors only.

use ed25519_dalek::VerifyingKey;
use ed25519_dalek::hazmat::{ExpandedSecretKey, raw_sign};
use sha1::{Digest as _, Sha1};
use sha2::{Sha256, Sha512};

use crate::handshake::NATIVE_PASSWORD;

/// The plugin of MySQL 8.
pub const CACHING_SHA2_PASSWORD: &[u8] = b"caching_sha2_password";
/// What MariaDB calls its plugin `ed25519` in front of clients.
pub const CLIENT_ED25519: &[u8] = b"client_ed25519";
/// Bytes of its nonce, behind which there is no zero.
const ED25519_NONCE_BYTES: usize = 32;
/// In more authentication data of [`CACHING_SHA2_PASSWORD`]: the server remembers the password, OK follows.
pub const FAST_AUTH_DONE: u8 = 3;
/// It does not: it wants the password, and a zero byte behind it, over a stream that nobody else can read.
pub const FULL_AUTH_WANTED: u8 = 4;

/// What proves the password to a plugin, whose first data are `data`: a nonce, perhaps with a zero behind it. `None` for a plugin that is not
/// known, and for data that cannot be its.
pub fn proof(plugin: &[u8], password: &[u8], data: &[u8]) -> Option<Vec<u8>> {
    let nonce = data.strip_suffix(&[0]).unwrap_or(data);
    match plugin {
        NATIVE_PASSWORD => Some(native_password(password, nonce)),
        CACHING_SHA2_PASSWORD => Some(caching_sha2_password(password, nonce)),
        CLIENT_ED25519 => data.first_chunk().map(|nonce| ed25519(password, nonce)),
        // Whatever proves that there is no password.
        _ if password.is_empty() => Some(Vec::new()),
        _ => None,
    }
}

/// The proof of `client_ed25519`: the nonce, signed. The key is the SHA-512 of the password, where RFC 8032 has that of a seed. An
/// empty password signs like any other, though MariaDB 10.11 lets in nobody whose password it has made empty (its own shell neither).
pub fn ed25519(password: &[u8], nonce: &[u8; ED25519_NONCE_BYTES]) -> Vec<u8> {
    let key = ExpandedSecretKey::from_bytes(&Sha512::digest(password).into());
    raw_sign::<Sha512>(&key, nonce, &VerifyingKey::from(&key)).to_bytes().to_vec()
}

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

    /// The public key is what MariaDB 10.11 says: `create user eve identified via ed25519 using password('S3cret')`,
    /// `select authentication_string from mysql.user where user = 'eve'`.
    #[test]
    fn an_ed25519_proof_is_a_signature_by_the_key_that_mariadb_stores() {
        use base64::Engine as _;
        use ed25519_dalek::{Signature, Verifier as _};
        // A zero at the end is a part of this nonce.
        let mut nonce = [7; ED25519_NONCE_BYTES];
        nonce[ED25519_NONCE_BYTES - 1] = 0;
        let stored = base64::engine::general_purpose::STANDARD_NO_PAD
            .decode("4aWu0MCXu0+hdy2Hom1kiUkKUI3uBf9Yun8cTCSeOpI")
            .unwrap();
        let key = VerifyingKey::from_bytes(&stored.try_into().unwrap()).unwrap();
        let proof = proof(CLIENT_ED25519, b"S3cret", &nonce).unwrap();
        key.verify(&nonce, &Signature::from_slice(&proof).unwrap()).unwrap();
        assert_eq!(super::proof(CLIENT_ED25519, b"S3cret", b"short"), None);
    }

    #[test]
    fn a_plugin_that_is_not_known_is_proved_nothing_but_that_there_is_no_password() {
        assert_eq!(proof(b"gssapi", b"S3cret", b""), None);
        assert_eq!(proof(b"gssapi", b"", b""), Some(Vec::new()));
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
