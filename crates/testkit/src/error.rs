// SPDX-License-Identifier: Apache-2.0
//! What can go wrong in a fixture. Messages carry the end of the process's log, because that is what one looks for first.

use std::io;
use std::time::Duration;

/// A fixture's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A fixture could not do what the test asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused.
    #[error("{what}: {source}")]
    Io {
        /// What was attempted.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
    /// A program is not installed or not built.
    #[error("{program} not found: {hint}")]
    NotFound {
        /// Name of the program.
        program: String,
        /// How to get it.
        hint: String,
    },
    /// Something did not happen in time.
    #[error("{what} not within {limit:?}\n{log}")]
    Timeout {
        /// What was waited for.
        what: String,
        /// How long.
        limit: Duration,
        /// End of the log of the process, if there is one.
        log: String,
    },
    /// A process ended when it should not have.
    #[error("{program} ended: {status}\n{log}")]
    Exited {
        /// Name of the program.
        program: String,
        /// Exit status in words.
        status: String,
        /// End of its log.
        log: String,
    },
    /// The server (or pooler) answered with an ErrorResponse.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The peer sent something else than the protocol allows here.
    #[error("expected {wanted}, got {got}")]
    Unexpected {
        /// What would have been right.
        wanted: String,
        /// What came.
        got: String,
    },
    /// The peer closed the connection.
    #[error("connection closed by peer")]
    Closed,
    /// A certificate or the TLS handshake.
    #[error("TLS: {0}")]
    Tls(String),
}

/// An ErrorResponse (PostgreSQL manual, "Error and Notice Message Fields").
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{severity} {sqlstate}: {message}")]
pub struct ServerError {
    /// ERROR, FATAL or PANIC, never translated (field V).
    pub severity: String,
    /// Five characters (field C).
    pub sqlstate: String,
    /// Primary message (field M).
    pub message: String,
}

impl Error {
    /// Wraps an error of the operating system with what was attempted.
    pub fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }

    /// SQLSTATE, if the server answered with an error.
    pub fn sqlstate(&self) -> Option<&str> {
        match self {
            Self::Server(error) => Some(&error.sqlstate),
            _ => None,
        }
    }

    /// Whether the peer is gone: closed or reset the connection.
    pub fn is_closed(&self) -> bool {
        match self {
            Self::Closed => true,
            Self::Io { source, .. } => matches!(
                source.kind(),
                io::ErrorKind::ConnectionReset
                    | io::ErrorKind::BrokenPipe
                    | io::ErrorKind::UnexpectedEof
                    | io::ErrorKind::ConnectionAborted
            ),
            _ => false,
        }
    }
}
