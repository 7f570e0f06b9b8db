// SPDX-License-Identifier: Apache-2.0
//! A recorded database workload: the model of its records, and the file that keeps them.
//!
//! A recorder makes [`Record`]s and gives them to a [`Writer`]; everybody else asks a [`Reader`] for them.
//!
//! ```
//! use underpass_trace::{Frontend, Meta, Options, Reader, Record, SessionId, Writer};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let parent = tempfile::tempdir()?;
//! let directory = parent.path().join("monday");
//! let mut writer = Writer::create(&directory, &Meta::default(), Options::default())?;
//! writer.write(&Record::Frontend(Frontend::new(SessionId(1), 5_000, 85, &b"Q\0\0\0\x0dselect 1\0"[..])))?;
//! writer.finish()?;
//!
//! let mut reader = Reader::open(&directory)?;
//! while let Some(record) = reader.next()? {
//!     println!("{:?}", record);
//! }
//! assert!(reader.damage().none());
//! # Ok(())
//! # }
//! ```
//!
//! The file is specified in docs/trace-format.md. In short: a directory of segments, which are sequences of
//! blocks with checksums; nothing is ever rewritten, so a recorder that is killed loses its last block at most.
#![forbid(unsafe_code)]

pub mod assemble;
pub mod block;
mod codec;
mod error;
mod format;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod meta;
mod model;
mod reader;
mod safety;
pub mod statements;
mod syncer;
mod varint;
mod writer;

pub use error::{Error, Stopped};
pub use format::{BLOCK_RAW_MAX, SEGMENT_EXTENSION, VERSION_MAJOR, VERSION_MINOR};
pub use meta::{Meta, Protocol, RedactionPolicy, Server};
pub use model::*;
pub use reader::{Damage, Reader};
pub use safety::{KeyError, Masker, fold, strip_literals};
pub use writer::{Options, Writer, WriterStats};
