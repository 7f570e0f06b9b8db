// SPDX-License-Identifier: Apache-2.0
//! The client role: logs in with a password or with keys, and makes the server prove that it knows them too.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use subtle::ConstantTimeEq;
use thiserror::Error;

use super::message::{self, ServerFirst};
use super::{BINDING_TYPE, MAX_ITERATIONS, MECHANISM, MECHANISM_PLUS, ScramKeys, hmac, xor};
use crate::context::{AuthContext, Derivation, Derived};
use crate::password::Password;

/// What a login to a server is made with.
#[derive(Debug, Clone)]
pub enum ClientSecret {
    /// The password; works with every salt.
    Password(Password),
    /// Keys a client proved ([`Verified::keys`](super::Verified)); works with their salt only.
    Keys(ScramKeys),
}

/// Why an exchange with a server ended. The text is for the log.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ScramClientError {
    /// Not a SCRAM message.
    #[error("malformed SCRAM message from the server: {0}")]
    Malformed(&'static str),
    /// The server offers neither SCRAM-SHA-256 nor, with TLS, SCRAM-SHA-256-PLUS.
    #[error("server offers no SASL mechanism that is supported (offered: {0})")]
    Mechanism(String),
    /// The server's nonce does not begin with ours.
    #[error("server sent a SCRAM nonce of another exchange")]
    Nonce,
    /// More PBKDF2 rounds than [`MAX_ITERATIONS`].
    #[error("server demands {0} SCRAM iterations, more than the limit of {MAX_ITERATIONS}")]
    Iterations(u32),
    /// Pass-through keys belong to another verifier than the server's.
    #[error(
        "SCRAM keys of the client do not fit the server: its secret has another salt or iteration count; \
         store the same SCRAM secret on both sides or the plain password in auth_file"
    )]
    OtherVerifier,
    /// The server does not know the password either.
    #[error("SCRAM signature of the server does not match: it does not know the user's password")]
    Signature,
    /// The server ended the exchange with an error of its own.
    #[error("server reported a SCRAM error: {0}")]
    Server(String),
    /// A message came after the end, or before its turn.
    #[error("SCRAM message out of order")]
    OutOfOrder,
}

/// One exchange in the client role.
#[derive(Debug)]
pub struct ScramClient {
    context: Arc<AuthContext>,
    secret: ClientSecret,
    mechanism: &'static str,
    gs2_header: String,
    /// Channel binding data, used with SCRAM-SHA-256-PLUS only.
    binding: Vec<u8>,
    nonce: String,
    state: State,
}

/// What [`ScramClient::server_first`] comes to.
#[derive(Debug, PartialEq, Eq)]
pub enum Proof {
    /// client-final-message.
    Ready(Vec<u8>),
    /// Run this, then pass its result to [`ScramClient::derived`]. Only with [`AuthOptions::derive_elsewhere`](crate::AuthOptions).
    Derive(Derivation),
}

#[derive(Debug)]
enum State {
    First,
    /// The keys are awaited: server-first-message, and the nonce in it.
    Keys {
        server_first: String,
        nonce: String,
    },
    Final {
        keys: ScramKeys,
        auth_message: String,
    },
    Ended,
}

impl ScramClient {
    /// Chooses the mechanism among those `offered`: SCRAM-SHA-256-PLUS when `binding`, the
    /// tls-server-end-point hash of the server's certificate, is at hand. `nonce` is fresh randomness of
    /// printable characters without a comma.
    pub fn new<'a>(
        context: Arc<AuthContext>,
        secret: ClientSecret,
        offered: impl IntoIterator<Item = &'a str>,
        binding: Option<Vec<u8>>,
        nonce: String,
    ) -> Result<Self, ScramClientError> {
        let offered: Vec<&str> = offered.into_iter().collect();
        let (mechanism, gs2_header, binding) = match binding {
            Some(data) if offered.contains(&MECHANISM_PLUS) => {
                (MECHANISM_PLUS, format!("p={BINDING_TYPE},,"), data)
            }
            _ if !offered.contains(&MECHANISM) => {
                return Err(ScramClientError::Mechanism(offered.join(", ")));
            }
            // `y` lets a server that did offer it notice that somebody removed the offer.
            Some(_) => (MECHANISM, "y,,".to_owned(), Vec::new()),
            None => (MECHANISM, "n,,".to_owned(), Vec::new()),
        };
        Ok(Self { context, secret, mechanism, gs2_header, binding, nonce, state: State::First })
    }

    /// The mechanism chosen.
    pub fn mechanism(&self) -> &'static str {
        self.mechanism
    }

    /// client-first-message. The user name stays empty: PostgreSQL takes it from the StartupMessage.
    pub fn client_first(&self) -> Vec<u8> {
        format!("{}n=,r={}", self.gs2_header, self.nonce).into_bytes()
    }

    /// Takes server-first-message and answers with client-final-message. A password whose keys are not in the cache needs PBKDF2 for
    /// that.
    pub fn server_first(&mut self, payload: &[u8]) -> Result<Proof, ScramClientError> {
        use ScramClientError as E;
        if !matches!(std::mem::replace(&mut self.state, State::Ended), State::First) {
            return Err(E::OutOfOrder);
        }
        let text = message::text(payload).map_err(E::Malformed)?;
        let first = ServerFirst::parse(text).map_err(E::Malformed)?;
        // A server that adds nothing of its own could replay.
        if first.nonce.strip_prefix(self.nonce.as_str()).is_none_or(str::is_empty) {
            return Err(E::Nonce);
        }
        let keys = match &self.secret {
            ClientSecret::Password(_) if first.iterations > MAX_ITERATIONS => {
                return Err(E::Iterations(first.iterations));
            }
            ClientSecret::Password(password) => {
                match self.context.derive(password, &first.salt, first.iterations) {
                    Derived::Keys(keys) => keys,
                    Derived::Elsewhere(derivation) => {
                        self.state =
                            State::Keys { server_first: text.to_owned(), nonce: first.nonce.to_owned() };
                        return Ok(Proof::Derive(derivation));
                    }
                }
            }
            ClientSecret::Keys(keys) if keys.salt != first.salt || keys.iterations != first.iterations => {
                return Err(E::OtherVerifier);
            }
            ClientSecret::Keys(keys) => keys.clone(),
        };
        Ok(Proof::Ready(self.client_final(text, first.nonce, keys)))
    }

    /// Takes the keys that [`Proof::Derive`] asked for, and answers with client-final-message.
    pub fn derived(&mut self, keys: ScramKeys) -> Result<Vec<u8>, ScramClientError> {
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Keys { server_first, nonce } => Ok(self.client_final(&server_first, &nonce, keys)),
            _ => Err(ScramClientError::OutOfOrder),
        }
    }

    fn client_final(&mut self, server_first: &str, nonce: &str, keys: ScramKeys) -> Vec<u8> {
        let mut binding = self.gs2_header.clone().into_bytes();
        binding.extend_from_slice(&self.binding);
        let without_proof = format!("c={},r={nonce}", BASE64.encode(binding));
        let auth_message = format!("n=,r={},{server_first},{without_proof}", self.nonce);
        let signature = hmac(&keys.stored_key(), &[auth_message.as_bytes()]);
        let proof = BASE64.encode(xor(signature, &keys.client_key));
        self.state = State::Final { keys, auth_message };
        format!("{without_proof},p={proof}").into_bytes()
    }

    /// Takes server-final-message. `Ok` means that the server knows the verifier.
    pub fn server_final(&mut self, payload: &[u8]) -> Result<(), ScramClientError> {
        use ScramClientError as E;
        let State::Final { keys, auth_message } = std::mem::replace(&mut self.state, State::Ended) else {
            return Err(E::OutOfOrder);
        };
        let signature = match message::server_final(payload).map_err(E::Malformed)? {
            Ok(signature) => signature,
            Err(error) => return Err(E::Server(error.chars().take(100).collect())),
        };
        if !bool::from(hmac(&keys.server_key, &[auth_message.as_bytes()]).ct_eq(&signature)) {
            return Err(E::Signature);
        }
        // Only a proven server may fill the cache.
        if let ClientSecret::Password(password) = &self.secret {
            self.context.remember(password, keys);
        }
        Ok(())
    }
}
