// SPDX-License-Identifier: Apache-2.0
//! What the tests of the trace file share.
#![allow(dead_code, reason = "every test uses a part")]

pub mod arbitrary;
pub mod session;

use std::path::{Path, PathBuf};

use underpass_trace::{Damage, Reader, Record};

/// All records of a trace, and what was damaged.
pub fn read_all(path: &Path) -> (Vec<Record<'static>>, Damage) {
    let mut reader = Reader::open(path).expect("the trace opens");
    let mut records = Vec::new();
    while let Some(record) = reader.next().expect("no record is malformed") {
        records.push(record.into_owned());
    }
    (records, reader.damage())
}

/// The segments in their order.
pub fn segments(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).expect("a directory");
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("entry").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "upt"));
    paths.sort();
    paths
}
