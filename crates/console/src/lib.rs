// SPDX-License-Identifier: Apache-2.0
//! The admin console of the pooler, as values.
//!
//! Everything an operator reads or types is defined here once: the grammar of the console ([`command`]), the
//! columns of every `SHOW` ([`show`], [`rows`]), counters and averages ([`stats`]), latency histograms
//! ([`histogram`]), OpenMetrics ([`metrics`]), log lines and their texts ([`logline`], [`text`]).
//!
//! Invariants: no IO, no clock, no threads; time comes in as [`time::Timestamp`]. Rows are written as text
//! cells into a [`table::Table`]; the caller turns cells into DataRow messages. Bytes that come from a peer
//! never make a function here panic.
#![forbid(unsafe_code)]

pub mod command;
pub mod error;
pub mod help;
pub mod histogram;
pub mod ident;
pub mod logline;
pub mod metrics;
pub mod rows;
pub mod session;
pub mod show;
pub mod stats;
pub mod table;
pub mod text;
pub mod time;

pub use command::{Access, Command, ShutdownMode, parse};
pub use error::ConsoleError;
pub use histogram::Histogram;
pub use ident::{Side, SocketId};
pub use show::Show;
pub use stats::{Averages, PoolStats, StatsClock, StatsWindow};
pub use table::{Column, ColumnType, Table};
pub use time::{Timestamp, Zone};
