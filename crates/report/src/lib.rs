// SPDX-License-Identifier: Apache-2.0
//! What a recorded workload was: load over time, latencies, statements by fingerprint, errors, sessions,
//! transactions; and what the trace does not know.
//!
//! [`Analysis`] reads a trace once, in bounded memory. [`text`] and [`page`] show it. [`mirrors`] shows what differs on mirrors.
#![forbid(unsafe_code)]

mod analysis;
mod bins;
mod charts;
mod fingerprint;
pub mod mirrors;
mod page;
mod text;

pub use analysis::{Analysis, ErrorClass, Group, KnownServer, Statement};
pub use fingerprint::Fingerprints;
pub use page::page;
pub use text::text;
pub use underpass_charts::Section;
