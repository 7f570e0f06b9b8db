// SPDX-License-Identifier: Apache-2.0
//! What can be wrong with TLS settings: each message names the key, the file and the next step.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why a TLS configuration cannot be built.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read.
    #[error("{key}: cannot read {}: {source}; check the path and that the pooler's user may read it", .path.display())]
    Read {
        /// PgBouncer's key that names the file.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file does not hold what its key wants.
    #[error("{key}: {} {problem}", .path.display())]
    File {
        /// PgBouncer's key that names the file.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        problem: String,
    },
    /// A key that another one needs is not set.
    #[error("{key} must be set: {because}")]
    Missing {
        /// The key to set.
        key: &'static str,
        /// Who needs it.
        because: String,
    },
    /// A value that cannot be used.
    #[error("{key} = {value}: {problem}")]
    Value {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What is wrong and what is possible.
        problem: String,
    },
    /// rustls refused the combination.
    #[error("{key}: {source}")]
    Rustls {
        /// The key closest to the problem.
        key: &'static str,
        /// What rustls said.
        source: rustls::Error,
    },
    /// A server's host is no name a certificate could hold.
    #[error("host \"{0}\" is neither a DNS name nor an IP address, so TLS to it is impossible")]
    Host(String),
}
