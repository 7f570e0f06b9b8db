// SPDX-License-Identifier: Apache-2.0
//! Where file contents come from. The only IO of the crate stands behind this trait, so tests need no files.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, ErrorKind};

/// Reads a file whole.
pub trait Files {
    /// The bytes of the file at `path`; a relative path is relative to the working directory, as in PgBouncer.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;
}

/// The real file system.
#[derive(Debug, Clone, Copy, Default)]
pub struct OsFiles;

impl Files for OsFiles {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        std::fs::read(path)
    }
}

/// Files in memory, for tests and fuzzing.
#[derive(Debug, Clone, Default)]
pub struct MemFiles(pub BTreeMap<PathBuf, Vec<u8>>);

impl MemFiles {
    /// From `(path, text)` pairs.
    pub fn new<const N: usize>(files: [(&str, &str); N]) -> Self {
        Self(files.into_iter().map(|(p, t)| (PathBuf::from(p), t.as_bytes().to_vec())).collect())
    }
}

impl Files for MemFiles {
    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        self.0.get(path).cloned().ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
    }
}

/// Reads `path` as text. Comment lines may hold any bytes (old files have Latin-1 comments); other lines must be UTF-8.
pub(crate) fn read_text(files: &dyn Files, path: &Path, name: &Arc<str>) -> Result<String, Error> {
    let bytes =
        files.read(path).map_err(|e| Error::new(name, 0, ErrorKind::Unreadable { reason: e.to_string() }))?;
    decode(bytes, name)
}

/// See [`read_text`].
pub(crate) fn decode(bytes: Vec<u8>, name: &Arc<str>) -> Result<String, Error> {
    let bytes = match String::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => return Ok(text),
        Ok(text) => text.into_bytes(),
        Err(e) => e.into_bytes(),
    };
    let mut text = String::with_capacity(bytes.len());
    for (i, line) in bytes.split_inclusive(|&b| b == b'\n').enumerate() {
        let comment = matches!(line.trim_ascii_start().first(), Some(b';' | b'#'));
        match std::str::from_utf8(line) {
            Ok(l) if comment || !l.contains('\0') => text.push_str(l),
            _ if comment => text.push_str(&String::from_utf8_lossy(line)),
            _ => return Err(Error::new(name, i as u32 + 1, ErrorKind::NotText)),
        }
    }
    Ok(text)
}
