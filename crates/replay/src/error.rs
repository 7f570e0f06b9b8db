// SPDX-License-Identifier: Apache-2.0
//! Why a replay cannot be made.

use std::path::PathBuf;

use thiserror::Error;

/// Why a replay did not take place. What happens to statements during one is no error but a result.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] underpass_trace::Error),
    /// The target speaks another protocol than the captured server.
    #[error(
        "the trace is of {trace}, and {target} names another kind of server: use {scheme}://user@host/database"
    )]
    Protocol {
        /// What the trace is of.
        trace: &'static str,
        /// The target.
        target: String,
        /// How its connection string would begin.
        scheme: &'static str,
    },
    /// A connection string that means nothing.
    #[error("connection string: {0}")]
    Dsn(#[from] underpass_config::ErrorKind),
    /// A file of credentials that cannot be read.
    #[error("{0}")]
    Credentials(String),
    /// TLS as it was asked for cannot be had.
    #[error(transparent)]
    Tls(#[from] underpass_tls::TlsError),
    /// No connection to the target.
    #[error("cannot log in to {target}: {source}")]
    Connect {
        /// Host and port.
        target: String,
        /// Why.
        source: ConnectError,
    },
    /// The system has no random numbers.
    #[error(transparent)]
    Entropy(#[from] underpass_auth::EntropyError),
    /// Checks of the target that failed; `--force` passes over them.
    #[error("the target does not fit the trace (--force plays it all the same):\n  {}", .0.join("\n  "))]
    Unfit(Vec<String>),
    /// The messages of the trace have no place.
    #[error(
        "cannot keep the messages of the trace in {}: {source}; TMPDIR may name another directory, with room for them",
        directory.display()
    )]
    Messages {
        /// Where they should be.
        directory: PathBuf,
        /// Why they cannot.
        source: std::io::Error,
    },
    /// There is nothing to play.
    #[error("nothing of the trace is left to play; {0}")]
    Nothing(String),
    /// The system refuses threads.
    #[error("cannot start threads: {0}")]
    Threads(std::io::Error),
}

/// Why one connection was not made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The socket.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The host name.
    #[error("no address for {0}")]
    Resolve(String),
    /// TLS was demanded and the server has none.
    #[error("the server does not support TLS, and sslmode demands it")]
    NoTls,
    /// The authentication failed on our side.
    #[error("{0}")]
    Auth(#[from] underpass_auth::ServerAuthError),
    /// The server said no.
    #[error("{message} (SQLSTATE {sqlstate})")]
    Server {
        /// SQLSTATE of its ErrorResponse.
        sqlstate: String,
        /// Its message.
        message: String,
    },
    /// Something that is not the protocol.
    #[error("the server does not speak the protocol of the trace: {0}")]
    Protocol(String),
    /// A way to log in that is not built.
    #[error(
        "the server wants the authentication plugin {0}, which is not built; give the user one of mysql_native_password, or play as another (--map-user, --credentials)"
    )]
    Plugin(String),
    /// The server wants the password itself, and the connection is not encrypted.
    #[error(
        "the server wants the password over an encrypted connection: add ?sslmode=require, or connect by its Unix socket"
    )]
    PasswordInClear,
    /// The sessions of the trace use something that the server does not have.
    #[error("the server does not have {0}, which the session used")]
    Capability(&'static str),
    /// The server closed the connection.
    #[error("the server closed the connection")]
    Closed,
    /// A setting the connection needs was refused.
    #[error("{0}")]
    Tls(#[from] underpass_tls::TlsError),
}
