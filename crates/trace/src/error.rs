// SPDX-License-Identifier: Apache-2.0
//! What can go wrong with a trace, by who is to blame.

use std::io;
use std::path::PathBuf;

/// Why a trace cannot be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file operation failed.
    #[error("{path}: {what}: {source}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// The place for a new trace is taken.
    #[error("{0} exists and is not an empty directory; a trace is never written over something")]
    Exists(PathBuf),
    /// The writer has ended the trace, and takes no more records.
    #[error("the trace has ended: {0}")]
    Stopped(Stopped),
    /// There is no segment of a trace.
    #[error("{0}: no trace here: neither a segment (*.upt) nor a directory of them")]
    NotFound(PathBuf),
    /// Not a trace at all.
    #[error("{0}: not a trace")]
    NotATrace(PathBuf),
    /// The trace's format has a higher major version.
    #[error(
        "{path}: written in trace format {major}.{minor}; this program reads up to {}.x: use a newer one",
        crate::format::VERSION_MAJOR
    )]
    Newer {
        /// The segment.
        path: PathBuf,
        /// Its major version.
        major: u16,
        /// Its minor version.
        minor: u16,
    },
    /// The head of a segment is damaged: nothing in it can be read.
    #[error("{0}: the head of the segment is damaged")]
    Head(PathBuf),
    /// A segment belongs to another trace than the first one.
    #[error("{0}: a segment of another trace")]
    Foreign(PathBuf),
    /// A record whose checksum is right and whose contents are not. Reading goes on behind its block.
    #[error("{path}: a malformed record in block {block}")]
    Record {
        /// The segment.
        path: PathBuf,
        /// The block's number in it.
        block: u32,
    },
}

impl Error {
    pub(crate) fn io(path: impl Into<PathBuf>, what: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, what, source }
    }
}

/// Why a writer ended its trace. What was written before is complete and readable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stopped {
    /// No space is left on the device, or in the quota.
    DiskFull,
    /// The size limit of [`Options::max_bytes`](crate::Options::max_bytes) is reached.
    SizeLimit,
    /// [`Writer::finish`](crate::Writer::finish) was called.
    Finished,
    /// Writing failed in another way.
    Failed,
}

impl std::fmt::Display for Stopped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::DiskFull => "no space left on the device",
            Self::SizeLimit => "the size limit is reached",
            Self::Finished => "it was finished",
            Self::Failed => "writing failed",
        })
    }
}
