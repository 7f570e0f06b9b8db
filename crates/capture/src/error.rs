// SPDX-License-Identifier: Apache-2.0
//! Errors of the capture. Each says what to do, where something can be done.

use std::io;
use std::path::PathBuf;

/// Why a capture did not start, or ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Capabilities are missing.
    #[error(
        "not permitted: this process lacks {missing}; run as root, or give the program these capabilities"
    )]
    Privileges {
        /// Names of the missing capabilities.
        missing: String,
    },
    /// The kernel refused the programs, or what they need.
    #[error("the kernel refused the capture programs: {lacks}\nin its own words: {message}")]
    Load {
        /// What is missing, in words.
        lacks: String,
        /// libbpf's error and the tail of the verifier log.
        message: String,
    },
    /// A program could not be attached.
    #[error("attaching {what}: {lacks}\nin its own words: {message}")]
    Attach {
        /// Which hook.
        what: String,
        /// What is missing, in words.
        lacks: String,
        /// The cause.
        message: String,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// The cause.
        source: io::Error,
    },
    /// The version 2 hierarchy of cgroups is not mounted.
    #[error(
        "no cgroup version 2 is mounted (mount -t cgroup2 none /sys/fs/cgroup/unified): packets cannot be captured"
    )]
    NoCgroup2,
    /// Neither packets nor probes are wanted.
    #[error(
        "nothing to record: without packets (--no-packets, or a server without TCP) all comes from the probes, and --probes never keeps them away; \
         leave that out"
    )]
    NothingToRecord,
    /// The executable lacks a function that the probes need.
    #[error(
        "{path} has no symbol {symbol}: this build cannot be probed; connections over TCP without TLS can still be captured"
    )]
    NoSymbol {
        /// The executable, as the process sees it.
        path: PathBuf,
        /// The function.
        symbol: &'static str,
    },
    /// The trace could not be begun.
    #[error("{message}")]
    Trace {
        /// The writer's error.
        message: String,
    },
    /// A hook was attached and a connection made, but nothing was seen.
    #[error("{what} is attached but silent: {why}")]
    Silent {
        /// Which source.
        what: &'static str,
        /// What this may mean.
        why: String,
    },
}

impl Error {
    pub(crate) fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::System { what, source }
    }
}
