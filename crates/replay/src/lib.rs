// SPDX-License-Identifier: Apache-2.0
//! Plays a recorded workload against a PostgreSQL, MariaDB or MySQL, message by message, and says what came out differently.
//!
//! ```text
//! trace -> plan::read -> Plan -> preflight::check -> run::play -> Played -> report::Report
//! ```
//!
//! One connection per captured session sends the bytes that were captured: Parse, Bind, pipelines, portals, COPY data. `mysql` has what is
//! otherwise with the other protocol.
//! Each session is a task of tokio on several threads: sessions number in thousands and mostly wait, a server that cannot get rid of its
//! answers must be read while it is written to, and every wait (timer, commits of others, Ctrl-C) can end
//! another. Time is kept by a timer of microseconds.
#![forbid(unsafe_code)]

mod calls;
mod classify;
pub mod compare;
mod connection;
mod error;
pub mod latency;
pub mod lists;
mod mysql;
pub mod outcome;
pub mod page;
pub mod plan;
pub mod preflight;
pub mod report;
mod rowhash;
pub mod run;
mod session;
mod target;
mod timer;
mod watermark;

pub use classify::{Classifier, Statement};
pub use error::{ConnectError, Error};
pub use target::{Identities, Target};
