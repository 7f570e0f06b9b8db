// SPDX-License-Identifier: Apache-2.0
//! The kernel lanes: BPF programs that forward linked clients and servers, and the handle on them.

mod attach;
mod backend;
mod datapath;
mod error;
mod events;
mod handover;
mod names;
mod shared;
mod skel;
mod socket;
mod view;
mod words;

pub use datapath::{ClientSlot, Config, Datapath, Lane, LaneChoice, PoolSlot, ServerSlot, ServerSpec};
pub use error::Error;
pub use events::Event;
pub use handover::{Claim, Give, LinkState, Taken, TransactionStatus};
pub use names::{Counter, Reason};
pub use shared::StreamState;
pub use view::{ClientInfo, ClientStats, ProgramCost};
