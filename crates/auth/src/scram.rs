// SPDX-License-Identifier: Apache-2.0
//! SCRAM-SHA-256 (RFC 5802, RFC 7677), with and without channel binding, in both roles.
//!
//! The server role is [`ScramServer`], the client role [`ScramClient`]; both take and give SASL payloads.
//! PostgreSQL's rules apply where they narrow the RFC: the user name in the exchange is ignored (the
//! StartupMessage names the user), no authorization identity, no extensions, and tls-server-end-point is the
//! only channel binding (PostgreSQL manual, "SASL Authentication").

mod cache;
mod client;
mod message;
mod server;

use std::fmt;

use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

use crate::saslprep::saslprep;
use crate::secret::ScramSecret;

pub(crate) use cache::KeyCache;
pub use client::{ClientSecret, Proof, ScramClient, ScramClientError};
pub use server::{ScramServer, ScramServerError, Verified, Verifier};

/// Length of every SCRAM-SHA-256 key and signature, in bytes.
pub const KEY_LEN: usize = 32;

/// The most PBKDF2 rounds we compute: more than a second of one core. A hostile server could otherwise name two
/// billion and stop a thread for minutes.
pub const MAX_ITERATIONS: u32 = 10_000_000;

/// The name of the mechanism without channel binding.
pub const MECHANISM: &str = "SCRAM-SHA-256";

/// The name of the mechanism with channel binding.
pub const MECHANISM_PLUS: &str = "SCRAM-SHA-256-PLUS";

/// The only channel binding type PostgreSQL knows.
pub(crate) const BINDING_TYPE: &str = "tls-server-end-point";

/// ClientKey and ServerKey of one (password, salt, iterations): enough to log in to every server that
/// stores the same verifier, without the password. Wiped when dropped.
#[derive(Clone, Zeroize, ZeroizeOnDrop)]
pub struct ScramKeys {
    /// Proves the client; as good as the password for verifiers with this salt.
    pub client_key: [u8; KEY_LEN],
    /// Checks the signature of the server.
    pub server_key: [u8; KEY_LEN],
    /// The salt the keys were derived with: a server with another salt stores another verifier.
    #[zeroize(skip)]
    pub salt: Vec<u8>,
    /// The rounds the keys were derived with.
    #[zeroize(skip)]
    pub iterations: u32,
}

impl ScramKeys {
    /// Runs PBKDF2: about 0.5 ms for 4096 rounds, so callers go through the cache of
    /// [`AuthContext`](crate::AuthContext) where a login may repeat. The caller bounds `iterations`.
    pub fn derive(password: &[u8], salt: &[u8], iterations: u32) -> Self {
        let mut salted = Zeroizing::new([0; KEY_LEN]);
        pbkdf2::pbkdf2_hmac::<Sha256>(&saslprep(password), salt, iterations, salted.as_mut());
        Self {
            client_key: hmac(salted.as_ref(), &[b"Client Key"]),
            server_key: hmac(salted.as_ref(), &[b"Server Key"]),
            salt: salt.to_vec(),
            iterations,
        }
    }

    /// H(ClientKey), what a server stores.
    pub fn stored_key(&self) -> [u8; KEY_LEN] {
        Sha256::digest(self.client_key).into()
    }

    /// The verifier a server would store.
    pub fn secret(&self) -> ScramSecret {
        ScramSecret {
            iterations: self.iterations,
            salt: self.salt.clone(),
            stored_key: self.stored_key(),
            server_key: self.server_key,
        }
    }
}

impl fmt::Debug for ScramKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScramKeys").field("iterations", &self.iterations).finish_non_exhaustive()
    }
}

/// HMAC-SHA-256 over the concatenated parts.
pub(crate) fn hmac(key: &[u8], parts: &[&[u8]]) -> [u8; KEY_LEN] {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    for part in parts {
        mac.update(part);
    }
    mac.finalize().into_bytes().into()
}

pub(crate) fn xor(mut a: [u8; KEY_LEN], b: &[u8; KEY_LEN]) -> [u8; KEY_LEN] {
    a.iter_mut().zip(b).for_each(|(x, y)| *x ^= y);
    a
}

#[cfg(test)]
mod tests;
