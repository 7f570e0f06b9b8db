// SPDX-License-Identifier: Apache-2.0
//! Live capture.

mod error;
mod event;
mod kernel;
mod log;
mod privileges;
mod ring;
mod skel;

pub use error::Error;
pub use event::{Direction, Ends, Event, ProcessId, TcpFlags};
pub use kernel::{Accounts, Count, Hits, Kernel, ResponseLevel, Settings, SourceKind};
pub use privileges::missing_capabilities;
