// SPDX-License-Identifier: Apache-2.0
//! One structure for each kind of row, with typed fields in the order of the columns.
//!
//! Rows borrow their texts: they live only until they are written into a [`Table`](crate::table::Table). What a
//! column means is said once, in [`crate::show`]; the fields here add units and where PgBouncer takes a value from.

mod mirror;
mod other;
mod pool;
mod socket;
mod trace;

pub use mirror::{DROP_REASONS, MirrorDiffRow, MirrorRow};
pub use other::{
    ConfigRow, DnsHostRow, DnsZoneRow, FdRow, KernelKind, KernelRow, Lists, MemRow, PauseState, PeerRow,
    TotalsRow, VersionRow, mem_names,
};
pub use pool::{
    DatabaseRow, PeerPoolRow, PoolCounts, PoolRow, StatsAveragesRow, StatsRow, StatsTotalsRow, UserRow,
};
pub use socket::{
    BufferState, ClientState, Replication, ServerState, SocketBuffersRow, SocketRow, SocketState,
};
pub use trace::TraceRow;
