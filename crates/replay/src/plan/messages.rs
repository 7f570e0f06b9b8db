// SPDX-License-Identifier: Apache-2.0
//! The messages of a plan, in a file instead of in memory: they are most of a trace, which may be longer than memory.
//!
//! The file has no name: nobody else can open it, and it goes with the process. The messages lie in it in the order of the trace, which is
//! nearly that of a replay, so that the system reads ahead of it and keeps what it has memory for.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use underpass_wire::frontend::Parse;

use crate::Error;

/// So much is written at once, bytes.
const WRITE_BYTES: usize = 1 << 20;
/// Where it is, unless `TMPDIR` says otherwise. Not /tmp, which is memory on many systems.
const DIRECTORY: &str = "/var/tmp";

/// OIDs below are PostgreSQL's own and the same in every cluster (`FirstNormalObjectId`).
const FIRST_NORMAL_OID: u32 = 16_384;

/// Where a Parse message names the OID of a type that PostgreSQL does not define itself, and that OID.
pub(crate) fn type_oids(parse: &[u8]) -> impl Iterator<Item = (usize, u32)> {
    let body = parse.get(5..).unwrap_or_default();
    let types = Parse::decode(body).map(|parse| parse.param_types).into_iter().flatten();
    let count = types.clone().count();
    let len = parse.len();
    let places = types.enumerate().map(move |(at, oid)| (len - 4 * (count - at), oid));
    places.filter(|&(_, oid)| oid >= FIRST_NORMAL_OID)
}

/// Messages, one behind the other.
#[derive(Debug)]
pub struct Messages {
    file: File,
    directory: PathBuf,
    /// What is not in the file yet.
    pending: Vec<u8>,
    /// Bytes in the file.
    written: u64,
}

impl Messages {
    /// None yet.
    pub(super) fn create() -> Result<Self, Error> {
        Self::create_in(std::env::var_os("TMPDIR").filter(|name| !name.is_empty()))
    }

    fn create_in(directory: Option<OsString>) -> Result<Self, Error> {
        let directory = PathBuf::from(directory.unwrap_or_else(|| DIRECTORY.into()));
        match tempfile::tempfile_in(&directory) {
            Ok(file) => Ok(Self { file, directory, pending: Vec::new(), written: 0 }),
            Err(source) => Err(Error::Messages { directory, source }),
        }
    }

    /// Adds a message, or a part of one. Returns where it is.
    pub(super) fn add(&mut self, bytes: &[u8]) -> Result<Range<u64>, Error> {
        let at = self.written + self.pending.len() as u64;
        self.pending.extend_from_slice(bytes);
        if self.pending.len() >= WRITE_BYTES {
            self.write()?;
        }
        Ok(at..at + bytes.len() as u64)
    }

    /// There are no more.
    pub(super) fn finish(&mut self) -> Result<(), Error> {
        self.write()?;
        self.pending = Vec::new();
        Ok(())
    }

    fn write(&mut self) -> Result<(), Error> {
        let written = self.file.write_all_at(&self.pending, self.written);
        written.map_err(|source| Error::Messages { directory: self.directory.clone(), source })?;
        self.written += self.pending.len() as u64;
        self.pending.clear();
        Ok(())
    }

    /// The bytes of a finished plan at a place.
    ///
    /// # Errors
    /// The disk's.
    pub fn read(&self, at: &Range<u64>) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; (at.end - at.start) as usize];
        self.file.read_exact_at(&mut bytes, at.start)?;
        Ok(bytes)
    }

    /// Writes over bytes of a finished plan.
    pub(crate) fn replace(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_added_is_read() {
        let mut messages = Messages::create().unwrap();
        let long = vec![7; WRITE_BYTES + 1];
        let places: Vec<_> = [b"one", &long[..], b"", b"three"]
            .map(|part| (messages.add(part).unwrap(), part.to_vec()))
            .into();
        messages.finish().unwrap();
        for (at, part) in &places {
            assert_eq!(messages.read(at).unwrap(), *part);
        }
        messages.replace(places[3].0.start + 1, b"w").unwrap();
        assert_eq!(messages.read(&places[3].0).unwrap(), b"twree");
        assert!(messages.read(&(places[3].0.start..places[3].0.end + 1)).is_err());
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let error = Messages::create_in(Some("/nonexistent".into())).unwrap_err().to_string();
        assert!(error.contains("/nonexistent") && error.contains("TMPDIR"), "{error}");
    }
}
