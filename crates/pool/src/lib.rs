// SPDX-License-Identifier: Apache-2.0
//! The pure state machines of the pooler. No sockets, no clock, no threads: time is passed in, bytes come as slices, decisions go out
//! as values.
//!
//! - [`core`]: pools, limits, the first-in-first-out queue of waiting clients and the set of idle servers. One [`Core`] serves all
//!   threads behind one mutex.
//! - [`link`]: follows both byte streams between a client and a server: framing, outstanding responses, transaction status,
//!   prepared statements. The kernel lanes implement a subset of the same machine in BPF C.
//! - [`batch`]: requests that may go to a server whose answers a kernel lane forwards.
//! - [`prepared`]: the table of prepared statements, by content.

pub mod batch;
pub mod core;
pub mod fuzzing;
mod idle;
pub mod link;
pub mod params;
pub mod prepared;

pub use crate::core::{Core, PoolId, ServerId};
pub use idle::{IdleSet, SharedIdle};
