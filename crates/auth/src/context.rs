// SPDX-License-Identifier: Apache-2.0
//! What all logins of a pooler share: settings, the key of mock exchanges, the cache of derived keys.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use thiserror::Error;

use crate::md5;
use crate::password::Password;
use crate::scram::{KEY_LEN, KeyCache, ScramKeys, Verifier, hmac};
use crate::secret::ScramSecret;

/// What an unknown user is asked for under method md5. Known users are asked by the kind of their secret,
/// so this should be the kind most of them have (PostgreSQL uses `password_encryption`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MockMethod {
    /// As a user with a plain or md5 secret.
    Md5,
    /// As a user with a SCRAM secret.
    #[default]
    Scram,
}

/// Settings of an [`AuthContext`].
#[derive(Debug, Clone)]
pub struct AuthOptions {
    /// PBKDF2 rounds for verifiers made from plain passwords (`scram_iterations`, 4096), 1 and up.
    pub scram_iterations: u32,
    /// How unknown users are treated under method md5.
    pub mock_method: MockMethod,
    /// Entries of the cache of derived keys, about 150 bytes each.
    pub cache_capacity: usize,
    /// PBKDF2 is left to the caller, who gets a [`Derivation`] to run where it holds nobody up. Otherwise it runs in place.
    pub derive_elsewhere: bool,
    /// Key of the salts shown to unknown users and to users with a plain password. `None` draws one, then
    /// these salts change with every start, which tells them from stored ones; give bytes that survive a
    /// restart to hide that too.
    pub mock_key: Option<[u8; KEY_LEN]>,
}

impl Default for AuthOptions {
    fn default() -> Self {
        Self {
            scram_iterations: 4096,
            mock_method: MockMethod::default(),
            cache_capacity: 4096,
            derive_elsewhere: false,
            mock_key: None,
        }
    }
}

/// A password whose keys are in no cache: PBKDF2, about half a millisecond for 4096 rounds and up to seconds for
/// [`MAX_ITERATIONS`](crate::MAX_ITERATIONS).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Derivation {
    password: Password,
    salt: Vec<u8>,
    iterations: u32,
}

impl Derivation {
    /// Computes the keys, for [`ClientAuth::derived`](crate::ClientAuth::derived) or
    /// [`ServerAuth::derived`](crate::ServerAuth::derived).
    pub fn run(&self) -> ScramKeys {
        ScramKeys::derive(self.password.as_bytes(), &self.salt, self.iterations)
    }
}

/// What [`AuthContext::derive`] has.
pub(crate) enum Derived {
    Keys(ScramKeys),
    Elsewhere(Derivation),
}

/// The system gave no random bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("no random bytes from the system")]
pub struct EntropyError;

/// Shared by all logins; threads share it behind an `Arc`. For a RELOAD see [`reload`](Self::reload).
pub struct AuthContext {
    iterations: u32,
    mock_method: MockMethod,
    mock_key: [u8; KEY_LEN],
    derive_elsewhere: bool,
    cache: Arc<KeyCache>,
    entropy: Entropy,
}

enum Entropy {
    System,
    /// For tests and fuzzing only: the same nonces in every run.
    Counter(AtomicU64),
}

impl Entropy {
    fn fill(&self, buffer: &mut [u8]) -> Result<(), EntropyError> {
        match self {
            Self::System => getrandom::fill(buffer).map_err(|_| EntropyError),
            Self::Counter(counter) => {
                let block = hmac(b"not random", &[&counter.fetch_add(1, Ordering::Relaxed).to_be_bytes()]);
                buffer.iter_mut().zip(block.iter().cycle()).for_each(|(to, from)| *to = *from);
                Ok(())
            }
        }
    }
}

impl AuthContext {
    /// Draws the keys of this process.
    pub fn new(options: &AuthOptions) -> Result<Self, EntropyError> {
        Self::with_entropy(options, Entropy::System)
    }

    /// A context with new options after a RELOAD. The cache, with its capacity, is shared with the old one,
    /// and unless `options` names a mock key, the old one stays: salts must not change under a user's eyes.
    pub fn reload(&self, options: &AuthOptions) -> Result<Self, EntropyError> {
        let mock_key = options.mock_key.or(Some(self.mock_key));
        let context = Self::new(&AuthOptions { mock_key, cache_capacity: 0, ..options.clone() })?;
        Ok(Self { cache: Arc::clone(&self.cache), ..context })
    }

    /// Nonces, salts and keys that repeat in every run: for fuzzing, where an input must mean the same
    /// tomorrow. Never for a service.
    pub(crate) fn repeatable(options: &AuthOptions) -> Self {
        Self::with_entropy(options, Entropy::Counter(AtomicU64::new(0))).expect("a counter does not fail")
    }

    fn with_entropy(options: &AuthOptions, entropy: Entropy) -> Result<Self, EntropyError> {
        let mut keys = [[0; KEY_LEN]; 2];
        for key in &mut keys {
            entropy.fill(key)?;
        }
        Ok(Self {
            iterations: options.scram_iterations.clamp(1, crate::MAX_ITERATIONS),
            mock_method: options.mock_method,
            mock_key: options.mock_key.unwrap_or(keys[0]),
            derive_elsewhere: options.derive_elsewhere,
            cache: Arc::new(KeyCache::new(keys[1], options.cache_capacity)),
            entropy,
        })
    }

    /// A nonce as PostgreSQL makes it: 18 random bytes as 24 characters of base64.
    pub(crate) fn nonce(&self) -> Result<String, EntropyError> {
        let mut bytes = [0; 18];
        self.entropy.fill(&mut bytes)?;
        Ok(BASE64.encode(bytes))
    }

    /// The salt of AuthenticationMD5Password.
    pub(crate) fn md5_salt(&self) -> Result<[u8; 4], EntropyError> {
        let mut salt = [0; 4];
        self.entropy.fill(&mut salt)?;
        Ok(salt)
    }

    pub(crate) fn mock_method(&self) -> MockMethod {
        self.mock_method
    }

    /// The keys of a user whose plain password is stored, for [`verifier`](Self::verifier). The first login of a password costs PBKDF2
    /// (half a millisecond for 4096 rounds), later ones find it in the cache. So the very first login of such
    /// a user is slower than one of an unknown user; users with a stored verifier never are.
    pub(crate) fn keys_of(&self, user: &[u8], password: &Password) -> Derived {
        self.derive(password, &self.salt(user), self.iterations)
    }

    /// The verifier that these keys of a stored password make; they are kept for the next login.
    pub(crate) fn verifier(&self, password: &Password, keys: ScramKeys) -> Verifier {
        let secret = keys.secret();
        self.remember(password, keys);
        Verifier { secret, doomed: false }
    }

    /// The verifier of a user who cannot log in: always the same salt for the same name, as a stored one.
    pub(crate) fn mock_verifier(&self, user: &[u8]) -> Verifier {
        let secret = ScramSecret {
            iterations: self.iterations,
            salt: self.salt(user),
            stored_key: hmac(&self.mock_key, &[b"stored", user]),
            server_key: hmac(&self.mock_key, &[b"server", user]),
        };
        Verifier { secret, doomed: true }
    }

    /// The md5 secret of a user who cannot log in.
    pub(crate) fn mock_md5(&self, user: &[u8]) -> [u8; md5::HASH_LEN] {
        md5::hash(&self.mock_key, user)
    }

    fn salt(&self, user: &[u8]) -> Vec<u8> {
        hmac(&self.mock_key, &[b"salt", user])[..16].to_vec()
    }

    /// Keys of a password, from the cache or by PBKDF2. Does not fill the cache: a caller does so by
    /// [`remember`](Self::remember) once the peer has proved itself, or strangers could empty it of others.
    pub(crate) fn derive(&self, password: &Password, salt: &[u8], iterations: u32) -> Derived {
        if let Some(keys) = self.cache.get(password.as_bytes(), salt, iterations) {
            return Derived::Keys(keys);
        }
        let derivation = Derivation { password: password.clone(), salt: salt.to_vec(), iterations };
        if self.derive_elsewhere { Derived::Elsewhere(derivation) } else { Derived::Keys(derivation.run()) }
    }

    #[cfg(test)]
    pub(crate) fn is_remembered(&self, password: &Password, salt: &[u8], iterations: u32) -> bool {
        self.cache.get(password.as_bytes(), salt, iterations).is_some()
    }

    pub(crate) fn remember(&self, password: &Password, keys: ScramKeys) {
        self.cache.insert(password.as_bytes(), keys);
    }
}

impl fmt::Debug for AuthContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AuthContext").field("iterations", &self.iterations).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reload_keeps_salts_and_cache() {
        let password = Password::new("pw");
        let old = AuthContext::new(&AuthOptions { scram_iterations: 3, ..AuthOptions::default() }).unwrap();
        let verifier = |context: &AuthContext| match context.keys_of(b"joe", &password) {
            Derived::Keys(keys) => context.verifier(&password, keys).secret,
            Derived::Elsewhere(_) => panic!("not asked for"),
        };
        let before = verifier(&old);
        let same = old.reload(&AuthOptions { scram_iterations: 3, ..AuthOptions::default() }).unwrap();
        assert!(same.is_remembered(&password, &before.salt, 3));
        assert_eq!(verifier(&same), before);
        assert_eq!(same.mock_verifier(b"jim").secret, old.mock_verifier(b"jim").secret);
        let more = old.reload(&AuthOptions { scram_iterations: 0, ..AuthOptions::default() }).unwrap();
        assert_eq!(more.mock_verifier(b"jim").secret.iterations, 1);
        assert_ne!(AuthContext::new(&AuthOptions::default()).unwrap().salt(b"joe"), before.salt);
    }

    #[test]
    fn nonces_are_fresh_and_fit_the_grammar() {
        let context = AuthContext::new(&AuthOptions::default()).unwrap();
        let (one, two) = (context.nonce().unwrap(), context.nonce().unwrap());
        assert_ne!(one, two);
        assert!(one.len() == 24 && one.bytes().all(|b| b.is_ascii_graphic() && b != b','));
    }
}
