// SPDX-License-Identifier: Apache-2.0
//! PostgreSQL authentication as state machines over message payloads, for both sides of a pooler.
//!
//! [`ClientAuth`] plays the server towards a client; [`ServerAuth`] plays the client towards PostgreSQL.
//! Both take the *body* of a message (without type byte and length) and answer what to send next. They do
//! no IO and keep no clock. What all logins share (iterations, the key of the mock exchange, the cache of
//! derived keys) lives in one [`AuthContext`]. What a client says from its first byte on, these messages
//! among it, is taken apart by [`intake`].
//!
//! Invariants:
//! * a doomed exchange (unknown user, no usable secret) is never won, whatever the client sends;
//! * what depends on a secret is compared in constant time;
//! * the client is told the same for every wrong credential; the exact reason ([`Refusal`]) is for the log;
//! * an input of a peer never panics and never costs more than its length, except PBKDF2, which is bounded
//!   by [`MAX_ITERATIONS`].

#![forbid(unsafe_code)]

mod auth_query;
mod client_auth;
mod context;
pub mod fuzzing;
pub mod intake;
pub mod md5;
mod password;
mod saslprep;
pub mod scram;
mod secret;
mod server_auth;

pub use auth_query::{AuthQueryError, auth_query_row};
pub use client_auth::{ClientAuth, ClientLogin, ClientStep, Credential, Identity, Login, Method, Refusal};
pub use context::{AuthContext, AuthOptions, Derivation, EntropyError, MockMethod};
pub use password::Password;
pub use saslprep::saslprep;
pub use scram::{MAX_ITERATIONS, ScramKeys};
pub use secret::{ScramSecret, Secret};
pub use server_auth::{ServerAuth, ServerAuthError, ServerLogin, ServerStep};
