// SPDX-License-Identifier: Apache-2.0
//! Live capture of a database server's workload, without touching the server.
//!
//! ```text
//! kernel   cgroup_skb: packets ────┐ ring buffers, no wake-ups      the server's functions: calls
//!                                  v                                v
//! Kernel::drain ────────────> Event ──> Recorder ──> trace::assemble ──> Record ──> trace::Writer
//! ```
//!
//! * [`Kernel`] loads and attaches the BPF programs of `src/bpf` and reads their rings and accounts.
//! * [`Recorder`] finds the session of each event and makes records of it. It has no unsafe code and no IO.
//! * [`servers`] finds what can be captured; [`run`] is a capture from start to end.
//!
//! Two sources see the same bytes at different places. Packets cost next to nothing, but show neither TLS nor Unix sockets. Calls
//! show everything, for three traps a round trip. So calls are probed only when a session needs them, and the programs leave
//! to each source what the other does not have.

mod discover;
mod error;
mod event;
mod kernel;
mod lacks;
mod log;
mod privileges;
mod procfs;
mod recorder;
mod ring;
mod run;
mod selftest;
mod skel;
mod summary;

pub use discover::{Backends, Nobody, Server, servers};
pub use error::Error;
pub use event::{Ends, Event, ProbedId, TcpFlags};
pub use kernel::{Accounts, Count, Hits, Kernel, ResponseLevel, Settings, SourceKind};
pub use lacks::trial;
pub use privileges::missing_capabilities;
pub use procfs::cgroup2_mount;
pub use recorder::{Lookup, Recorder, Totals};
pub use run::{Options, Probes, Stage, run};
pub use summary::Summary;
