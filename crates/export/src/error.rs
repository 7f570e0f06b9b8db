// SPDX-License-Identifier: Apache-2.0
//! Why an export or an import ends early.

use std::io;
use std::path::PathBuf;

/// Why an export or an import ends early.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The trace cannot be read or written.
    #[error(transparent)]
    Trace(#[from] underpass_trace::Error),
    /// A file cannot be written or read.
    #[error("{path}: {source}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The place for the result is taken.
    #[error("{0} exists; an export is never written over something")]
    Exists(PathBuf),
    /// The stream of the result failed.
    #[error("cannot write: {0}")]
    Write(#[from] io::Error),
    /// The Parquet library failed.
    #[error("{path}: {source}")]
    Parquet {
        /// The file.
        path: PathBuf,
        /// Its answer.
        source: parquet::errors::ParquetError,
    },
    /// The input is not what it should be.
    #[error("line {line}: {why}")]
    Input {
        /// The line, from 1.
        line: u64,
        /// What is wrong with it.
        why: String,
    },
}

impl Error {
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }
}
