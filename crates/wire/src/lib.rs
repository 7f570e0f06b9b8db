// SPDX-License-Identifier: Apache-2.0
//! The one codec of the PostgreSQL wire protocol, versions 3.0 and 3.2, in both directions.
//!
//! Sans-IO: bytes in, values out. A pooler forwards bytes and re-encodes nothing, so there are three
//! separate tools here, cheap to expensive:
//!
//! 1. [`Framer`] finds where messages begin and end in a stream, whatever its chunks are.
//! 2. Views ([`frontend`], [`backend`], [`startup`]) borrow the fields of one message from its body.
//! 3. Builders ([`frontend::build`], [`backend::build`], [`startup::build`]) append whole messages to a
//!    `Vec<u8>`, for what the pooler says itself.
//!
//! Invariants: no unsafe code, no panic on any input of a parser, no allocation in framing and views.
//! A view that was decoded has been checked to its last byte, so its iterators cannot fail.
//! Strings of the protocol are `&[u8]` without their NUL: their encoding is not known at this level.
//!
//! Sources: PostgreSQL manual, "Frontend/Backend Protocol", sections "Message Flow" and "Message Formats".
#![forbid(unsafe_code)]

pub mod backend;
mod builder;
mod error;
mod framer;
pub mod frontend;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod header;
mod reader;
pub mod sqlstate;
pub mod startup;
pub mod tag;

pub use error::{FrameError, MessageError};
pub use framer::{Framer, Piece};
pub use header::{Header, MAX_MESSAGE_LEN, MAX_SMALL_MESSAGE_LEN};
pub use reader::{Formats, Oids, Values};
pub use sqlstate::SqlState;
