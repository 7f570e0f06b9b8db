// SPDX-License-Identifier: Apache-2.0
//! Authentication of a client: from the chosen method to "let in" or "refused".
//!
//! The caller picks the method (`auth_type` or an HBA line) and finds the credential (userlist or
//! `auth_query`); this machine decides. It writes bodies of Authentication messages and reads bodies of the
//! client's `p` messages.

mod refusal;

use std::sync::Arc;

use crate::context::{AuthContext, Derivation, Derived, MockMethod};
use crate::md5;
use crate::password::Password;
use crate::scram::{MAX_ITERATIONS, ScramKeys, ScramServer, Verifier};
use crate::secret::{ScramSecret, Secret};
use crate::server_auth::code;
pub use refusal::Refusal;

/// The longest SASL message taken, as PostgreSQL's `PG_MAX_SASL_MESSAGE_LENGTH`; in bytes. The caller should
/// refuse a longer `p` message before it has read it all.
const SASL_MESSAGE_MAX: usize = 1024;

/// How a client is authenticated: PgBouncer's `auth_type`, or the method of an HBA line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// No question, but the user must be known.
    Trust,
    /// No question, any user name.
    Any,
    /// Clear-text password (`plain`, in HBA files `password`).
    Plain,
    /// md5; SCRAM for users whose stored secret is a SCRAM verifier.
    Md5,
    /// SCRAM-SHA-256, and with TLS SCRAM-SHA-256-PLUS.
    ScramSha256,
    /// The common name of the verified client certificate is the user, or maps to it.
    Cert,
    /// The operating system user behind the unix socket is the user, or maps to it.
    Peer,
    /// Nobody.
    Reject,
}

impl Method {
    /// The name in `auth_type` and HBA files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Trust => "trust",
            Self::Any => "any",
            Self::Plain => "plain",
            Self::Md5 => "md5",
            Self::ScramSha256 => "scram-sha-256",
            Self::Cert => "cert",
            Self::Peer => "peer",
            Self::Reject => "reject",
        }
    }
}

/// What is known about the password of the user who wants in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Credential {
    /// Neither userlist nor `auth_query` knows the user.
    UnknownUser,
    /// The user exists and has no password: no password lets it in.
    NoPassword,
    /// The stored secret.
    Secret(Secret),
}

/// Who the peer is by means other than a password.
#[derive(Clone, Copy, Default)]
pub struct Identity<'a> {
    /// Method cert: common name of the certificate, *after* the chain was verified. Method peer: name of the
    /// operating system user. `None`: no certificate, not a unix socket.
    pub name: Option<&'a str>,
    /// Whether the ident map lets `name` be the user; `None`: the names must be equal.
    pub map: Option<&'a dyn Fn(&str) -> bool>,
}

/// A client that wants in.
pub struct ClientLogin<'a> {
    /// How to authenticate it.
    pub method: Method,
    /// The user name of its StartupMessage.
    pub user: &'a [u8],
    /// What is stored about it.
    pub credential: Credential,
    /// With TLS: tls-server-end-point hash of the certificate it was shown. Offers SCRAM-SHA-256-PLUS.
    pub channel_binding: Option<Vec<u8>>,
    /// For methods cert and peer.
    pub identity: Identity<'a>,
}

/// What a client has proved, for logins to servers in its name.
#[derive(Debug, Clone, Default)]
pub struct Login {
    /// After SCRAM, or a clear-text password checked against a SCRAM verifier: pass-through keys.
    pub keys: Option<ScramKeys>,
    /// After method plain: the password.
    pub password: Option<Password>,
}

/// What to do next.
#[derive(Debug)]
pub enum ClientStep {
    /// Send an Authentication message (type `R`) with this body, then pass the next `p` message.
    Send(Vec<u8>),
    /// Run this, then pass its result to [`ClientAuth::derived`]. Only with [`AuthOptions::derive_elsewhere`](crate::AuthOptions).
    Derive(Derivation),
    /// The client is in: send an Authentication message with this body, if any, then AuthenticationOk.
    Done {
        /// AuthenticationSASLFinal after SCRAM.
        send: Option<Vec<u8>>,
        /// What was proved.
        login: Login,
    },
    /// Send ErrorResponse (FATAL) with [`Refusal::sqlstate`] and [`Refusal::client_message`], close.
    Failed(Refusal),
}

/// One login of a client.
#[derive(Debug)]
pub struct ClientAuth {
    context: Arc<AuthContext>,
    state: State,
}

#[derive(Debug)]
enum State {
    Plain {
        user: Vec<u8>,
        credential: Credential,
    },
    Md5 {
        stored: [u8; md5::HASH_LEN],
        salt: [u8; 4],
        doom: Option<Refusal>,
    },
    /// The keys of a clear-text password are awaited.
    PlainKeys {
        password: Password,
        secret: ScramSecret,
    },
    /// The keys of the stored password are awaited, to make the verifier of.
    VerifierKeys {
        password: Password,
        channel_binding: Option<Vec<u8>>,
    },
    /// SASLInitialResponse is awaited.
    SaslInitial(Box<Scram>),
    /// The client chose a mechanism without sending client-first-message along.
    SaslFirst(Box<Scram>, String),
    SaslFinal(Box<Scram>),
    Ended,
}

#[derive(Debug)]
struct Scram {
    server: ScramServer,
    /// What the log says if the exchange, which is a mock then, ends in a wrong proof.
    doom: Option<Refusal>,
}

impl ClientAuth {
    /// Begins a login; the step says what the client is asked, if anything.
    pub fn start(context: Arc<AuthContext>, login: ClientLogin<'_>) -> (Self, ClientStep) {
        let (state, step) = match begin(&context, login) {
            Ok(begun) => begun,
            Err(refusal) => (State::Ended, ClientStep::Failed(refusal)),
        };
        (Self { context, state }, step)
    }

    /// Takes the body of a `p` message (PasswordMessage, SASLInitialResponse, SASLResponse).
    pub fn message(&mut self, body: &[u8]) -> ClientStep {
        let state = std::mem::replace(&mut self.state, State::Ended);
        match self.advance(state, body) {
            Ok(step) => step,
            Err(refusal) => ClientStep::Failed(refusal),
        }
    }

    /// Takes the keys that [`ClientStep::Derive`] asked for.
    pub fn derived(&mut self, keys: ScramKeys) -> ClientStep {
        let step = match std::mem::replace(&mut self.state, State::Ended) {
            State::PlainKeys { password, secret } => self.plain_keys(password, &secret, keys),
            State::VerifierKeys { password, channel_binding } => {
                let verifier = self.context.verifier(&password, keys);
                offer_scram(&self.context, verifier, None, channel_binding).map(|(state, step)| {
                    self.state = state;
                    step
                })
            }
            _ => Err(Refusal::UnexpectedMessage),
        };
        step.unwrap_or_else(ClientStep::Failed)
    }

    fn plain_keys(
        &self,
        password: Password,
        secret: &ScramSecret,
        keys: ScramKeys,
    ) -> Result<ClientStep, Refusal> {
        if keys.secret() != *secret {
            return Err(Refusal::WrongPassword);
        }
        self.context.remember(&password, keys.clone());
        Ok(ClientStep::Done { send: None, login: Login { keys: Some(keys), password: Some(password) } })
    }

    fn advance(&mut self, state: State, body: &[u8]) -> Result<ClientStep, Refusal> {
        match state {
            State::Plain { user, credential } => {
                let password = Password::new(password_message(body)?);
                let Some(secret) = check_plain(&user, credential, &password)? else {
                    return Ok(ClientStep::Done {
                        send: None,
                        login: Login { keys: None, password: Some(password) },
                    });
                };
                match self.context.derive(&password, &secret.salt, secret.iterations) {
                    Derived::Keys(keys) => self.plain_keys(password, &secret, keys),
                    Derived::Elsewhere(derivation) => {
                        self.state = State::PlainKeys { password, secret };
                        Ok(ClientStep::Derive(derivation))
                    }
                }
            }
            State::Md5 { stored, salt, doom } => {
                let proved = md5::verify(&stored, salt, password_message(body)?);
                match doom {
                    Some(refusal) => Err(refusal),
                    None if proved => Ok(ClientStep::Done { send: None, login: Login::default() }),
                    None => Err(Refusal::WrongPassword),
                }
            }
            State::SaslInitial(scram) => match sasl_initial_response(body)? {
                (mechanism, Some(payload)) => self.client_first(scram, mechanism, payload),
                (mechanism, None) => {
                    self.state = State::SaslFirst(scram, mechanism.to_owned());
                    Ok(ClientStep::Send(authentication(code::SASL_CONTINUE, b"")))
                }
            },
            State::SaslFirst(scram, mechanism) => self.client_first(scram, &mechanism, bounded(body)?),
            State::SaslFinal(mut scram) => match scram.server.client_final(bounded(body)?) {
                Ok(verified) => Ok(ClientStep::Done {
                    send: Some(authentication(code::SASL_FINAL, &verified.server_final)),
                    login: Login { keys: Some(verified.keys), password: None },
                }),
                Err(crate::scram::ScramServerError::Proof) => {
                    Err(scram.doom.unwrap_or(Refusal::WrongPassword))
                }
                Err(error) => Err(Refusal::Scram(error)),
            },
            State::PlainKeys { .. } | State::VerifierKeys { .. } | State::Ended => {
                Err(Refusal::UnexpectedMessage)
            }
        }
    }

    fn client_first(
        &mut self,
        mut scram: Box<Scram>,
        mechanism: &str,
        payload: &[u8],
    ) -> Result<ClientStep, Refusal> {
        let answer = scram.server.client_first(mechanism, payload).map_err(Refusal::Scram)?;
        self.state = State::SaslFinal(scram);
        Ok(ClientStep::Send(authentication(code::SASL_CONTINUE, &answer)))
    }
}

fn begin(context: &Arc<AuthContext>, login: ClientLogin<'_>) -> Result<(State, ClientStep), Refusal> {
    let ClientLogin { method, user, credential, channel_binding, identity } = login;
    let done = || ClientStep::Done { send: None, login: Login::default() };
    let known = credential != Credential::UnknownUser;
    match method {
        Method::Any => Ok((State::Ended, done())),
        Method::Reject => Err(Refusal::Rejected),
        Method::Trust | Method::Cert | Method::Peer if !known => Err(Refusal::NotPermitted(method)),
        Method::Trust => Ok((State::Ended, done())),
        Method::Cert | Method::Peer => {
            let name = identity.name.ok_or(Refusal::NoIdentity(method))?;
            let permitted = match identity.map {
                Some(map) => map(name),
                None => name.as_bytes() == user,
            };
            if !permitted {
                return Err(Refusal::OtherIdentity { method, name: name.to_owned() });
            }
            Ok((State::Ended, done()))
        }
        Method::Plain => {
            let state = State::Plain { user: user.to_vec(), credential };
            Ok((state, ClientStep::Send(authentication(code::CLEARTEXT_PASSWORD, b""))))
        }
        Method::Md5 => {
            let (stored, doom) = match credential {
                Credential::Secret(Secret::Md5(hash)) => (hash, None),
                Credential::Secret(Secret::Plain(password)) if password.is_empty() => {
                    (context.mock_md5(user), Some(Refusal::NoPassword))
                }
                Credential::Secret(Secret::Plain(password)) => (md5::hash(password.as_bytes(), user), None),
                Credential::Secret(Secret::Scram(_)) => {
                    return begin_scram(context, user, credential, channel_binding);
                }
                _ if context.mock_method() == MockMethod::Scram => {
                    return begin_scram(context, user, credential, channel_binding);
                }
                Credential::NoPassword => (context.mock_md5(user), Some(Refusal::NoPassword)),
                Credential::UnknownUser => (context.mock_md5(user), Some(Refusal::UnknownUser)),
            };
            let salt = context.md5_salt()?;
            let state = State::Md5 { stored, salt, doom };
            Ok((state, ClientStep::Send(authentication(code::MD5_PASSWORD, &salt))))
        }
        Method::ScramSha256 => begin_scram(context, user, credential, channel_binding),
    }
}

fn begin_scram(
    context: &Arc<AuthContext>,
    user: &[u8],
    credential: Credential,
    channel_binding: Option<Vec<u8>>,
) -> Result<(State, ClientStep), Refusal> {
    let doom = match &credential {
        Credential::UnknownUser => Some(Refusal::UnknownUser),
        Credential::NoPassword => Some(Refusal::NoPassword),
        Credential::Secret(Secret::Md5(_)) => Some(Refusal::Md5ForScram),
        Credential::Secret(Secret::Plain(password)) if password.is_empty() => Some(Refusal::NoPassword),
        Credential::Secret(_) => None,
    };
    let verifier = match credential {
        Credential::Secret(Secret::Scram(secret)) => Verifier { secret, doomed: false },
        Credential::Secret(Secret::Plain(password)) if doom.is_none() => {
            match context.keys_of(user, &password) {
                Derived::Keys(keys) => context.verifier(&password, keys),
                Derived::Elsewhere(derivation) => {
                    let state = State::VerifierKeys { password, channel_binding };
                    return Ok((state, ClientStep::Derive(derivation)));
                }
            }
        }
        _ => context.mock_verifier(user),
    };
    offer_scram(context, verifier, doom, channel_binding)
}

/// AuthenticationSASL, with the mechanisms to choose from.
fn offer_scram(
    context: &AuthContext,
    verifier: Verifier,
    doom: Option<Refusal>,
    channel_binding: Option<Vec<u8>>,
) -> Result<(State, ClientStep), Refusal> {
    let server = ScramServer::new(verifier, channel_binding, context.nonce()?);
    let mut list = Vec::with_capacity(40);
    for mechanism in server.mechanisms() {
        list.extend_from_slice(mechanism.as_bytes());
        list.push(0);
    }
    list.push(0);
    let state = State::SaslInitial(Box::new(Scram { server, doom }));
    Ok((state, ClientStep::Send(authentication(code::SASL, &list))))
}

/// Compares a clear-text password with whatever is stored. Returns the SCRAM secret that its keys have yet to be compared with, if it is
/// one.
fn check_plain(
    user: &[u8],
    credential: Credential,
    password: &Password,
) -> Result<Option<ScramSecret>, Refusal> {
    if password.is_empty() {
        return Err(Refusal::EmptyPassword);
    }
    let proved = match credential {
        Credential::UnknownUser => return Err(Refusal::UnknownUser),
        Credential::NoPassword => return Err(Refusal::NoPassword),
        Credential::Secret(Secret::Plain(stored)) if stored.is_empty() => return Err(Refusal::NoPassword),
        Credential::Secret(Secret::Plain(stored)) => stored == *password,
        Credential::Secret(Secret::Md5(stored)) => {
            let hash = md5::hash(password.as_bytes(), user);
            subtle::ConstantTimeEq::ct_eq(&hash[..], &stored[..]).into()
        }
        Credential::Secret(Secret::Scram(secret)) if secret.iterations > MAX_ITERATIONS => {
            return Err(Refusal::Iterations(secret.iterations));
        }
        Credential::Secret(Secret::Scram(secret)) => return Ok(Some(secret)),
    };
    if proved { Ok(None) } else { Err(Refusal::WrongPassword) }
}

/// The body of an Authentication message.
fn authentication(code: i32, data: &[u8]) -> Vec<u8> {
    [&code.to_be_bytes()[..], data].concat()
}

/// The password of a PasswordMessage: one C string that fills the body.
fn password_message(body: &[u8]) -> Result<&[u8], Refusal> {
    match body.split_last() {
        Some((0, password)) if !password.contains(&0) => Ok(password),
        _ => Err(Refusal::Malformed("password message is not one string")),
    }
}

/// Mechanism and, unless its length is -1, the first SASL message.
fn sasl_initial_response(body: &[u8]) -> Result<(&str, Option<&[u8]>), Refusal> {
    let malformed = || Refusal::Malformed("invalid SASLInitialResponse");
    let end = body.iter().position(|&b| b == 0).ok_or_else(malformed)?;
    let mechanism = std::str::from_utf8(&body[..end]).map_err(|_| malformed())?;
    let (length, payload) = body[end + 1..].split_first_chunk().ok_or_else(malformed)?;
    match i32::from_be_bytes(*length) {
        -1 if payload.is_empty() => Ok((mechanism, None)),
        n if usize::try_from(n) == Ok(payload.len()) => Ok((mechanism, Some(bounded(payload)?))),
        _ => Err(malformed()),
    }
}

fn bounded(payload: &[u8]) -> Result<&[u8], Refusal> {
    if payload.len() > SASL_MESSAGE_MAX {
        return Err(Refusal::Malformed("SASL message is too long"));
    }
    Ok(payload)
}

#[cfg(test)]
mod tests;
