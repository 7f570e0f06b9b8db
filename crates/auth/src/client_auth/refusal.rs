// SPDX-License-Identifier: Apache-2.0
//! Why a client is refused: the exact reason for the log, one and the same answer for the client.

use thiserror::Error;

use super::Method;
use crate::context::EntropyError;
use crate::scram::{MAX_ITERATIONS, ScramServerError};

/// Why a client was refused. `Display` is for the log and must not reach the client, who learns no more
/// than [`client_message`](Self::client_message).
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Wrong password, md5 answer or SCRAM proof.
    #[error("password authentication failed: wrong password")]
    WrongPassword,
    /// The client sent an empty password.
    #[error("password authentication failed: empty password")]
    EmptyPassword,
    /// Neither userlist nor `auth_query` knows the user.
    #[error("password authentication failed: no such user")]
    UnknownUser,
    /// The user has no password, or an empty one.
    #[error("password authentication failed: user has no password")]
    NoPassword,
    /// SCRAM is asked for and an md5 hash is stored.
    #[error(
        "password authentication failed: the stored secret is md5, SCRAM needs a SCRAM secret or a plain password"
    )]
    Md5ForScram,
    /// The stored SCRAM secret has more rounds than we compute for a clear-text password.
    #[error(
        "password authentication failed: stored SCRAM secret has {0} iterations, limit is {MAX_ITERATIONS}"
    )]
    Iterations(u32),
    /// The exchange broke off before the proof, or was no SCRAM.
    #[error("SASL authentication failed: {0}")]
    Scram(ScramServerError),
    /// Method reject.
    #[error("login rejected")]
    Rejected,
    /// A method without a password, and the user is not known.
    #[error("\"{}\" authentication failed: no such user", .0.name())]
    NotPermitted(Method),
    /// No verified certificate, or not a unix socket.
    #[error("{}", match .0 {
        Method::Cert => "cert authentication failed: TLS client certificate required",
        _ => "peer authentication failed: login by unix socket required",
    })]
    NoIdentity(Method),
    /// Certificate or operating system user belong to somebody else.
    #[error("{} authentication failed: \"{name}\" may not log in as this user", .method.name())]
    OtherIdentity {
        /// cert or peer.
        method: Method,
        /// Common name or operating system user.
        name: String,
    },
    /// Not the message the protocol wants here.
    #[error("bad authentication packet: {0}")]
    Malformed(&'static str),
    /// An authentication message after the end of the exchange.
    #[error("bad authentication packet: none was expected")]
    UnexpectedMessage,
    /// The system has no random bytes for a salt or nonce.
    #[error(transparent)]
    Entropy(#[from] EntropyError),
}

impl Refusal {
    /// SQLSTATE of the ErrorResponse: 28P01 for everything about passwords, 28000 for other methods, 08P01
    /// for a client that does not speak the protocol, 58000 for trouble of our own.
    pub fn sqlstate(&self) -> &'static str {
        match self {
            Self::WrongPassword
            | Self::EmptyPassword
            | Self::UnknownUser
            | Self::NoPassword
            | Self::Md5ForScram
            | Self::Iterations(_)
            | Self::Scram(ScramServerError::Proof) => "28P01",
            Self::Rejected | Self::NotPermitted(_) | Self::NoIdentity(_) | Self::OtherIdentity { .. } => {
                "28000"
            }
            Self::Scram(
                ScramServerError::Downgrade
                | ScramServerError::Binding
                | ScramServerError::AuthorizationIdentity,
            ) => "28000",
            Self::Scram(_) | Self::Malformed(_) | Self::UnexpectedMessage => "08P01",
            Self::Entropy(_) => "58000",
        }
    }

    /// The text for the client. All wrong credentials read alike; a client that breaks the protocol learns
    /// what it did, which depends on nothing secret.
    pub fn client_message(&self, user: &str) -> String {
        match (self, self.sqlstate()) {
            (_, "28P01") => format!("password authentication failed for user \"{user}\""),
            (Self::Rejected, _) => "login rejected".to_owned(),
            (
                Self::NotPermitted(method) | Self::NoIdentity(method) | Self::OtherIdentity { method, .. },
                _,
            ) => match method {
                Method::Peer => format!("unix socket login rejected for user \"{user}\""),
                Method::Cert => format!("certificate authentication failed for user \"{user}\""),
                other => format!("\"{}\" authentication failed for user \"{user}\"", other.name()),
            },
            _ => self.to_string(),
        }
    }
}
