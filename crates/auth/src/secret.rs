// SPDX-License-Identifier: Apache-2.0
//! What is stored about a user's password: the text of PgBouncer's userlist and of `pg_authid.rolpassword`.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use subtle::ConstantTimeEq;

use crate::md5;
use crate::password::Password;
use crate::scram::KEY_LEN;

/// A stored secret. Its `Debug` form shows the kind only; `Display` writes the userlist text.
#[derive(Clone, PartialEq, Eq)]
pub enum Secret {
    /// The password itself.
    Plain(Password),
    /// md5(password ‖ user), written `md5` + 32 hexadecimal digits.
    Md5([u8; md5::HASH_LEN]),
    /// A SCRAM verifier, written `SCRAM-SHA-256$iterations:salt$StoredKey:ServerKey`.
    Scram(ScramSecret),
}

/// A SCRAM verifier (RFC 5803 form, PostgreSQL's `parse_scram_secret`).
#[derive(Clone)]
pub struct ScramSecret {
    /// PBKDF2 rounds, at least 1.
    pub iterations: u32,
    /// Salt, not encoded; any length, PostgreSQL makes 16 bytes.
    pub salt: Vec<u8>,
    /// H(ClientKey): proves a client.
    pub stored_key: [u8; KEY_LEN],
    /// Signs what the server says.
    pub server_key: [u8; KEY_LEN],
}

impl Secret {
    /// Recognises the kind by its form, as PgBouncer's `get_password_type` does; whatever is neither md5
    /// nor SCRAM is a plain password.
    pub fn parse(text: impl AsRef<[u8]>) -> Self {
        let text = text.as_ref();
        if let Some(hash) = md5::parse(text) {
            Self::Md5(hash)
        } else if let Some(secret) = ScramSecret::parse(text) {
            Self::Scram(secret)
        } else {
            Self::Plain(Password::new(text))
        }
    }

    /// The name of the kind for log lines: `plain`, `md5` or `SCRAM-SHA-256`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Plain(_) => "plain",
            Self::Md5(_) => "md5",
            Self::Scram(_) => "SCRAM-SHA-256",
        }
    }
}

impl ScramSecret {
    /// Reads `SCRAM-SHA-256$iterations:salt$StoredKey:ServerKey`; `None` for every other form.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok()?;
        let rest = text.strip_prefix("SCRAM-SHA-256$")?;
        let (head, keys) = rest.split_once('$')?;
        let (iterations, salt) = head.split_once(':')?;
        let (stored_key, server_key) = keys.split_once(':')?;
        let iterations = iterations.parse().ok().filter(|&n| n > 0)?;
        let key = |text: &str| <[u8; KEY_LEN]>::try_from(BASE64.decode(text).ok()?).ok();
        Some(Self {
            iterations,
            salt: BASE64.decode(salt).ok()?,
            stored_key: key(stored_key)?,
            server_key: key(server_key)?,
        })
    }
}

impl PartialEq for ScramSecret {
    fn eq(&self, other: &Self) -> bool {
        self.iterations == other.iterations
            && self.salt == other.salt
            && bool::from(self.stored_key.ct_eq(&other.stored_key) & self.server_key.ct_eq(&other.server_key))
    }
}

impl Eq for ScramSecret {}

impl fmt::Display for ScramSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (salt, stored, server) =
            (BASE64.encode(&self.salt), BASE64.encode(self.stored_key), BASE64.encode(self.server_key));
        write!(f, "SCRAM-SHA-256${}:{salt}${stored}:{server}", self.iterations)
    }
}

impl fmt::Debug for ScramSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ScramSecret").field("iterations", &self.iterations).finish_non_exhaustive()
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(password) => f.write_str(&String::from_utf8_lossy(password.as_bytes())),
            Self::Md5(hash) => f.write_str(&String::from_utf8_lossy(&md5::text(hash))),
            Self::Scram(secret) => secret.fmt(f),
        }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secret({})", self.kind())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SCRAM: &str = "SCRAM-SHA-256$4096:W22ZaJ0SNY7soEsUEjb6gQ==$\
        WG5d8oPm3OtcPnkdi4Uo7BkeZkBFzpcXkuLmtbsT4qY=:wfPLwcE6nTWhTAmQ7tl2KeoiWGPlZqQxSrmfPwDl2dU=";

    #[test]
    fn tells_the_kinds_apart() {
        assert_eq!(Secret::parse(SCRAM).kind(), "SCRAM-SHA-256");
        assert_eq!(Secret::parse("md59f7a8b47e6f14a5e0fbf26cd8d4c86b8").kind(), "md5");
        assert_eq!(Secret::parse("md5").kind(), "plain");
        assert_eq!(Secret::parse("").kind(), "plain");
        // One character short of a key: a plain password, as PgBouncer takes it.
        assert_eq!(Secret::parse(&SCRAM[..SCRAM.len() - 1]).kind(), "plain");
        assert_eq!(Secret::parse(SCRAM.replace("4096", "0")).kind(), "plain");
        assert_eq!(Secret::parse(SCRAM.replace("4096", "99999999999")).kind(), "plain");
    }

    #[test]
    fn debug_shows_no_secret() {
        for text in ["hunter2", SCRAM, "md59f7a8b47e6f14a5e0fbf26cd8d4c86b8"] {
            let shown = format!("{:?}", Secret::parse(text));
            assert!(
                !shown.contains("hunter2") && !shown.contains("W22Z") && !shown.contains("9f7a"),
                "{shown}"
            );
        }
    }

    proptest! {
        #[test]
        fn text_survives_a_round_trip(
            iterations in 1u32.., salt in proptest::collection::vec(any::<u8>(), 0..40),
            stored_key: [u8; 32], server_key: [u8; 32], hash: [u8; 16], plain in "[ -~]{0,40}",
        ) {
            let scram = Secret::Scram(ScramSecret { iterations, salt, stored_key, server_key });
            for secret in [scram, Secret::Md5(hash), Secret::Plain(Password::new(plain))] {
                prop_assert_eq!(&Secret::parse(secret.to_string()), &secret);
            }
        }
    }
}
