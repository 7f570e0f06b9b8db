// SPDX-License-Identifier: Apache-2.0
//! Errors of the library. None of them is a client's fault: the caller falls back to user space.

use std::io;

/// What went wrong at the kernel edge.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel refused the programs; the text is the end of the verifier's log.
    #[error("the kernel refused the lane programs: {message}")]
    Load {
        /// libbpf's error and the tail of the verifier log.
        message: String,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// All slots of a table are in use.
    #[error("all {limit} {what} slots are in use")]
    Full {
        /// Which table.
        what: &'static str,
        /// Its size.
        limit: u32,
    },
    /// The slot was freed, and perhaps given to another socket, since the caller got it.
    #[error("stale {what} slot")]
    Stale {
        /// Which table.
        what: &'static str,
    },
    /// The operation does not fit the state of the slot; a bug of the caller.
    #[error("{0}")]
    State(&'static str),
}

impl Error {
    pub(crate) fn system(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}
