// SPDX-License-Identifier: Apache-2.0
//! Our login to a PostgreSQL server: answers its Authentication messages until it says AuthenticationOk.

use std::sync::Arc;

use thiserror::Error;

use crate::context::{AuthContext, Derivation, EntropyError};
use crate::md5;
use crate::scram::{ClientSecret, Proof, ScramClient, ScramClientError, ScramKeys};
use crate::secret::Secret;

/// Codes of Authentication messages (PostgreSQL manual, "Message Formats").
pub(crate) mod code {
    pub(crate) const OK: i32 = 0;
    pub(crate) const KERBEROS_V5: i32 = 2;
    pub(crate) const CLEARTEXT_PASSWORD: i32 = 3;
    pub(crate) const MD5_PASSWORD: i32 = 5;
    pub(crate) const SCM_CREDENTIAL: i32 = 6;
    pub(crate) const GSS: i32 = 7;
    pub(crate) const GSS_CONTINUE: i32 = 8;
    pub(crate) const SSPI: i32 = 9;
    pub(crate) const SASL: i32 = 10;
    pub(crate) const SASL_CONTINUE: i32 = 11;
    pub(crate) const SASL_FINAL: i32 = 12;
}

/// What we log in with.
#[derive(Debug, Clone, Default)]
pub struct ServerLogin {
    /// The user name of our StartupMessage.
    pub user: Vec<u8>,
    /// The stored secret, if any. A plain password serves every request, an md5 hash md5 only; a SCRAM
    /// verifier serves nothing by itself.
    pub secret: Option<Secret>,
    /// Keys that the client proved when it logged in; used for SCRAM when there is no plain password.
    pub keys: Option<ScramKeys>,
    /// With TLS: tls-server-end-point hash of the server's certificate.
    pub channel_binding: Option<Vec<u8>>,
}

/// What to do next.
#[derive(Debug, PartialEq, Eq)]
pub enum ServerStep {
    /// Send a `p` message with this body, then pass the next Authentication message.
    Send(Vec<u8>),
    /// Nothing to send: pass the next Authentication message.
    Wait,
    /// Run this, then pass its result to [`ServerAuth::derived`]. Only with [`AuthOptions::derive_elsewhere`](crate::AuthOptions).
    Derive(Derivation),
    /// AuthenticationOk: we are in.
    Done,
    /// Close the connection. An ErrorResponse of the server is the caller's business.
    Failed(ServerAuthError),
}

/// Why a login to a server failed on our side. The text is for the log.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ServerAuthError {
    /// Nothing we have answers what the server asks.
    #[error("server asks for {asked}, but {have}; {}", remedy(.asked))]
    NoUsableSecret {
        /// `a clear-text password`, `md5` or `SCRAM-SHA-256`.
        asked: &'static str,
        /// What is stored instead.
        have: &'static str,
    },
    /// A method that no pooler can pass on.
    #[error(
        "server asks for {0} authentication, which is not supported; change its pg_hba.conf for this host"
    )]
    Unsupported(&'static str),
    /// An authentication request this version does not know.
    #[error("server asks for an unknown authentication method, code {0}")]
    Unknown(i32),
    /// The SCRAM exchange failed.
    #[error("SASL authentication failed: {0}")]
    Scram(#[from] ScramClientError),
    /// The server let us in without showing that it knows the password.
    #[error("server ended the SCRAM exchange before it proved itself")]
    Unproven,
    /// A message that does not belong here.
    #[error("server sent an authentication message out of order, code {0}")]
    OutOfOrder(i32),
    /// A body of the wrong form.
    #[error("malformed authentication message from the server: {0}")]
    Malformed(&'static str),
    /// The system has no random bytes for a nonce.
    #[error(transparent)]
    Entropy(#[from] EntropyError),
}

fn remedy(asked: &str) -> &'static str {
    match asked {
        "SCRAM-SHA-256" => {
            "store the plain password in auth_file, or let clients log in by SCRAM with the server's own SCRAM secret"
        }
        "md5" => "store the plain password or its md5 hash in auth_file",
        _ => "store the plain password in auth_file",
    }
}

/// One login to a server.
#[derive(Debug)]
pub struct ServerAuth {
    context: Arc<AuthContext>,
    login: ServerLogin,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Nothing was asked yet.
    Start,
    /// The password was sent; only AuthenticationOk may follow.
    Answered,
    SaslFirst(Box<ScramClient>),
    /// The keys are awaited.
    SaslKeys(Box<ScramClient>),
    SaslFinal(Box<ScramClient>),
    Ended,
}

impl ServerAuth {
    /// Waits for the server's first Authentication message.
    pub fn new(context: Arc<AuthContext>, login: ServerLogin) -> Self {
        Self { context, login, state: State::Start }
    }

    /// Takes the body of an Authentication message (type `R`).
    pub fn message(&mut self, body: &[u8]) -> ServerStep {
        let state = std::mem::replace(&mut self.state, State::Ended);
        self.advance(state, body).unwrap_or_else(ServerStep::Failed)
    }

    /// Takes the keys that [`ServerStep::Derive`] asked for.
    pub fn derived(&mut self, keys: ScramKeys) -> ServerStep {
        let State::SaslKeys(mut scram) = std::mem::replace(&mut self.state, State::Ended) else {
            return ServerStep::Failed(ScramClientError::OutOfOrder.into());
        };
        match scram.derived(keys) {
            Ok(answer) => {
                self.state = State::SaslFinal(scram);
                ServerStep::Send(answer)
            }
            Err(error) => ServerStep::Failed(error.into()),
        }
    }

    fn advance(&mut self, state: State, body: &[u8]) -> Result<ServerStep, ServerAuthError> {
        use ServerAuthError as E;
        let (code, data) = body.split_first_chunk().ok_or(E::Malformed("no code"))?;
        let code = i32::from_be_bytes(*code);
        match (state, code) {
            (State::Start | State::Answered, code::OK) if data.is_empty() => Ok(ServerStep::Done),
            (State::SaslFirst(_) | State::SaslKeys(_) | State::SaslFinal(_), code::OK) => Err(E::Unproven),
            (State::Start, code::CLEARTEXT_PASSWORD) => {
                let answer = self.cleartext()?;
                self.state = State::Answered;
                Ok(ServerStep::Send(answer))
            }
            (State::Start, code::MD5_PASSWORD) => {
                let salt = data.try_into().map_err(|_| E::Malformed("md5 salt is not 4 bytes"))?;
                let answer = self.md5(salt)?;
                self.state = State::Answered;
                Ok(ServerStep::Send(answer))
            }
            (State::Start, code::SASL) => self.sasl(data),
            (State::SaslFirst(mut scram), code::SASL_CONTINUE) => {
                let (step, state) = match scram.server_first(data)? {
                    Proof::Ready(answer) => (ServerStep::Send(answer), State::SaslFinal(scram)),
                    Proof::Derive(derivation) => (ServerStep::Derive(derivation), State::SaslKeys(scram)),
                };
                self.state = state;
                Ok(step)
            }
            (State::SaslFinal(mut scram), code::SASL_FINAL) => {
                scram.server_final(data)?;
                self.state = State::Answered;
                Ok(ServerStep::Wait)
            }
            (_, code::KERBEROS_V5) => Err(E::Unsupported("Kerberos V5")),
            (_, code::SCM_CREDENTIAL) => Err(E::Unsupported("SCM credential")),
            (_, code::GSS | code::GSS_CONTINUE) => Err(E::Unsupported("GSSAPI")),
            (_, code::SSPI) => Err(E::Unsupported("SSPI")),
            (_, code::OK..=code::SASL_FINAL) => Err(E::OutOfOrder(code)),
            _ => Err(E::Unknown(code)),
        }
    }

    fn cleartext(&self) -> Result<Vec<u8>, ServerAuthError> {
        match &self.login.secret {
            Some(Secret::Plain(password)) if !password.is_empty() => {
                Ok([password.as_bytes(), b"\0"].concat())
            }
            _ => Err(self.no_usable_secret("a clear-text password")),
        }
    }

    fn md5(&self, salt: [u8; 4]) -> Result<Vec<u8>, ServerAuthError> {
        let stored = match &self.login.secret {
            Some(Secret::Md5(hash)) => *hash,
            Some(Secret::Plain(password)) if !password.is_empty() => {
                md5::hash(password.as_bytes(), &self.login.user)
            }
            _ => return Err(self.no_usable_secret("md5")),
        };
        Ok([&md5::response(&stored, salt)[..], b"\0"].concat())
    }

    fn sasl(&mut self, list: &[u8]) -> Result<ServerStep, ServerAuthError> {
        const MALFORMED: ServerAuthError = ServerAuthError::Malformed("list of SASL mechanisms");
        // Names, each closed by NUL, then an empty one.
        let list = list.strip_suffix(b"\0").ok_or(MALFORMED)?;
        let list = std::str::from_utf8(list).map_err(|_| MALFORMED)?;
        let names = list.split_terminator('\0');
        let secret = match (&self.login.secret, &self.login.keys) {
            (Some(Secret::Plain(password)), _) if !password.is_empty() => {
                ClientSecret::Password(password.clone())
            }
            (_, Some(keys)) => ClientSecret::Keys(keys.clone()),
            _ => return Err(self.no_usable_secret("SCRAM-SHA-256")),
        };
        let binding = self.login.channel_binding.take();
        let nonce = self.context.nonce()?;
        let scram = ScramClient::new(self.context.clone(), secret, names, binding, nonce)?;
        let first = scram.client_first();
        let length = i32::try_from(first.len()).map_err(|_| MALFORMED)?;
        let answer = [scram.mechanism().as_bytes(), b"\0", &length.to_be_bytes(), &first].concat();
        self.state = State::SaslFirst(Box::new(scram));
        Ok(ServerStep::Send(answer))
    }

    fn no_usable_secret(&self, asked: &'static str) -> ServerAuthError {
        let have = match (&self.login.secret, &self.login.keys) {
            (Some(Secret::Plain(password)), _) if password.is_empty() => "the stored password is empty",
            (Some(Secret::Md5(_)), _) => "only an md5 hash is stored",
            (Some(Secret::Scram(_)), None) => "only a SCRAM secret is stored",
            (_, Some(_)) => "only the client's SCRAM keys are known",
            _ => "no password is stored",
        };
        ServerAuthError::NoUsableSecret { asked, have }
    }
}

#[cfg(test)]
mod tests;
