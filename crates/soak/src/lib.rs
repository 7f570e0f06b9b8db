// SPDX-License-Identifier: Apache-2.0
//! The leak checker: proves that a pooler gives every client its own rows, all of them, once, in order, and nobody else's.
//!
//! - [`owner`]: the token in each row, and what a wrong one means.
//! - `traffic`: the shapes of the protocol, each checked message by message.
//! - `faults`: the ways a client can misbehave or disappear; none of them may be felt by another client.
//! - `ledger`: what was committed is there, what was rolled back is not.
//! - `monitor`: looks at the pooler's console, so that a run says how hard the pool was pressed.
//!
//! Clients are tasks on one thread by default: on a small machine the checker must leave the processors to its victim.

mod batch;
mod client;
mod config;
mod connection;
mod faults;
mod ledger;
mod monitor;
pub mod owner;
mod report;
mod run;
mod traffic;

pub use config::{Config, PoolMode};
pub use connection::{Lost, Target};
pub use faults::FaultKind;
pub use owner::{Kind, Owner, Violation};
pub use report::{Observed, Report};
pub use run::run;
pub use traffic::TrafficKind;
