// SPDX-License-Identifier: Apache-2.0
//! Passwords and stored secrets; they never appear in debug output.

use std::fmt;

/// A password or what is stored in its place.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

/// What a stored secret looks like (PostgreSQL manual, pg_authid.rolpassword).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SecretKind {
    /// The password itself.
    Plain,
    /// `md5` and 32 hexadecimal digits.
    Md5,
    /// `SCRAM-SHA-256$iterations:salt$StoredKey:ServerKey`.
    Scram,
}

impl Secret {
    /// Wraps a secret.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text; be careful where it goes.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// What the text looks like. Whatever is not well formed is a plain password, as PostgreSQL decides.
    pub fn kind(&self) -> SecretKind {
        if let Some(hex) = self.0.strip_prefix("md5")
            && hex.len() == 32
            && hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
        {
            return SecretKind::Md5;
        }
        if self.is_scram() { SecretKind::Scram } else { SecretKind::Plain }
    }

    fn is_scram(&self) -> bool {
        let parts = || {
            let rest = self.0.strip_prefix("SCRAM-SHA-256$")?;
            let (head, keys) = rest.split_once('$')?;
            let (iterations, salt) = head.split_once(':')?;
            let (stored, server) = keys.split_once(':')?;
            Some((iterations, salt, stored, server))
        };
        // A SHA-256 key is 32 bytes: 43 base64 digits and one '='.
        let key = |k: &str| k.len() == 44 && k.ends_with('=') && is_base64(&k[..43]);
        parts().is_some_and(|(iterations, salt, stored, server)| {
            iterations.parse::<u32>().is_ok_and(|n| n > 0)
                && salt.len() % 4 == 0
                && !salt.is_empty()
                && is_base64(salt.trim_end_matches('='))
                && key(stored)
                && key(server)
        })
    }
}

fn is_base64(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'+' || b == b'/')
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret({:?}, hidden)", self.kind())
    }
}
