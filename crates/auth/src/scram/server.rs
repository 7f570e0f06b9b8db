// SPDX-License-Identifier: Apache-2.0
//! The server role: proves a client against a verifier, or plays the same to the end for one who cannot win.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use thiserror::Error;

use super::message::{BindingFlag, ClientFinal, ClientFirst};
use super::{BINDING_TYPE, MECHANISM, MECHANISM_PLUS, ScramKeys, hmac, xor};
use crate::secret::ScramSecret;

/// What a client is proved against.
#[derive(Debug, Clone)]
pub struct Verifier {
    /// Salt, rounds and keys shown to the client.
    pub secret: ScramSecret,
    /// The exchange is a mock: it looks like every other and always ends with a wrong proof.
    pub doomed: bool,
}

/// A client that proved the password.
#[derive(Debug, Clone)]
pub struct Verified {
    /// server-final-message, the body of AuthenticationSASLFinal after its code.
    pub server_final: Vec<u8>,
    /// For pass-through: logs in to a server that stores the same verifier.
    pub keys: ScramKeys,
}

/// Why an exchange ended. The text is for the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ScramServerError {
    /// Not a SCRAM message.
    #[error("malformed SCRAM message: {0}")]
    Malformed(&'static str),
    /// The client chose a mechanism that was not offered.
    #[error("client selected a SASL mechanism that was not offered")]
    Mechanism,
    /// The client wants to act as somebody else (`a=`).
    #[error("client uses an authorization identity, which is not supported")]
    AuthorizationIdentity,
    /// The client chose the mechanism with channel binding but sends no binding, or the reverse.
    #[error("channel binding flag of the client does not fit the SASL mechanism it selected")]
    BindingFlag,
    /// The client names another type than tls-server-end-point.
    #[error("client uses a channel binding type other than tls-server-end-point")]
    BindingType,
    /// The client supports channel binding and did not see our offer: somebody changed the list.
    #[error("SCRAM channel binding negotiation error: the client did not see that it is offered")]
    Downgrade,
    /// The client is connected to another certificate than ours: somebody is in between.
    #[error("SCRAM channel binding check failed: the client sees another certificate")]
    Binding,
    /// The nonce is not the one of this exchange.
    #[error("nonce of the client does not match")]
    Nonce,
    /// The password is wrong, or the exchange was doomed.
    #[error("SCRAM proof does not match")]
    Proof,
    /// A message came after the end, or before its turn.
    #[error("SCRAM message out of order")]
    OutOfOrder,
}

/// One exchange in the server role.
#[derive(Debug)]
pub struct ScramServer {
    verifier: Verifier,
    /// tls-server-end-point hash of our certificate; `None` without TLS.
    binding: Option<Vec<u8>>,
    server_nonce: String,
    state: State,
}

#[derive(Debug)]
enum State {
    First,
    Final {
        /// `gs2-header ‖ channel binding data` in base64, what `c=` must be.
        binding: String,
        nonce: String,
        /// client-first-message-bare `,` server-first-message `,`
        transcript: String,
    },
    Ended,
}

impl ScramServer {
    /// `binding` is the tls-server-end-point hash of the certificate this client was shown, `server_nonce`
    /// fresh randomness of printable characters without a comma.
    pub fn new(verifier: Verifier, binding: Option<Vec<u8>>, server_nonce: String) -> Self {
        Self { verifier, binding, server_nonce, state: State::First }
    }

    /// The mechanisms to offer, the preferred one first.
    pub fn mechanisms(&self) -> &'static [&'static str] {
        if self.binding.is_some() { &[MECHANISM_PLUS, MECHANISM] } else { &[MECHANISM] }
    }

    /// Takes client-first-message and answers with server-first-message.
    pub fn client_first(&mut self, mechanism: &str, payload: &[u8]) -> Result<Vec<u8>, ScramServerError> {
        use ScramServerError as E;
        if !matches!(std::mem::replace(&mut self.state, State::Ended), State::First) {
            return Err(E::OutOfOrder);
        }
        if !self.mechanisms().contains(&mechanism) {
            return Err(E::Mechanism);
        }
        let first = ClientFirst::parse(payload).map_err(E::Malformed)?;
        match (first.flag, mechanism == MECHANISM_PLUS) {
            (BindingFlag::Used(BINDING_TYPE), true) | (BindingFlag::No, false) => {}
            (BindingFlag::Used(_), true) => return Err(E::BindingType),
            (BindingFlag::ServerLacks, false) if self.binding.is_none() => {}
            (BindingFlag::ServerLacks, false) => return Err(E::Downgrade),
            _ => return Err(E::BindingFlag),
        }
        if first.authzid {
            return Err(E::AuthorizationIdentity);
        }
        let mut binding = first.gs2_header.as_bytes().to_vec();
        if let (BindingFlag::Used(_), Some(data)) = (first.flag, &self.binding) {
            binding.extend_from_slice(data);
        }
        let nonce = format!("{}{}", first.nonce, self.server_nonce);
        let secret = &self.verifier.secret;
        let answer = format!("r={nonce},s={},i={}", BASE64.encode(&secret.salt), secret.iterations);
        let transcript = format!("{},{answer},", first.bare);
        self.state = State::Final { binding: BASE64.encode(binding), nonce, transcript };
        Ok(answer.into_bytes())
    }

    /// Takes client-final-message. Every check runs in the same order for doomed exchanges.
    pub fn client_final(&mut self, payload: &[u8]) -> Result<Verified, ScramServerError> {
        use ScramServerError as E;
        let State::Final { binding, nonce, transcript } = std::mem::replace(&mut self.state, State::Ended)
        else {
            return Err(E::OutOfOrder);
        };
        let message = ClientFinal::parse(payload).map_err(E::Malformed)?;
        if message.binding != binding {
            return Err(E::Binding);
        }
        if message.nonce != nonce {
            return Err(E::Nonce);
        }
        let secret = &self.verifier.secret;
        let auth_message = [transcript.as_bytes(), message.without_proof.as_bytes()];
        let client_key = xor(hmac(&secret.stored_key, &auth_message), &message.proof);
        let proved = Sha256::digest(client_key).as_slice().ct_eq(&secret.stored_key);
        if !bool::from(proved) | self.verifier.doomed {
            return Err(E::Proof);
        }
        let signature = BASE64.encode(hmac(&secret.server_key, &auth_message));
        let keys = ScramKeys {
            client_key,
            server_key: secret.server_key,
            salt: secret.salt.clone(),
            iterations: secret.iterations,
        };
        Ok(Verified { server_final: format!("v={signature}").into_bytes(), keys })
    }
}
