// SPDX-License-Identifier: Apache-2.0
//! Why a replay cannot be made.

use thiserror::Error;

/// Why a replay did not take place. What happens to statements during one is no error but a result.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] underpass_trace::Error),
    /// A trace of another server than PostgreSQL.
    #[error("the trace is of the MySQL protocol; replay plays PostgreSQL only")]
    Protocol,
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
    #[error("the server does not speak the PostgreSQL protocol: {0}")]
    Protocol(String),
    /// The server closed the connection.
    #[error("the server closed the connection")]
    Closed,
    /// A setting the connection needs was refused.
    #[error("{0}")]
    Tls(#[from] underpass_tls::TlsError),
}
