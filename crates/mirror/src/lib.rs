// SPDX-License-Identifier: Apache-2.0
//! Mirroring, without IO: the same transactions on a second server, and what differs there.
//!
//! The pooler feeds both byte streams of a mirrored client to [`Requests`] and [`Answers`], as the client sees them: its own names of
//! statements, no answer to what the pooler itself asked. A [`Transaction`] is what was said and answered between two points at which no
//! transaction was open. It goes to a mirror as a whole or not at all: [`Counters`] keeps the account, in which every transaction is
//! executed, queued or dropped for a [`DropReason`]. The mirror's answers come back through [`Answers`] of their own, and
//! [`Differences`] keeps per fingerprint what they differ in.
//!
//! Cycles are the unit of comparison: all that is answered by one ReadyForQuery.

mod account;
mod answer;
mod compare;
mod request;
mod snapshot;
mod table;
mod transaction;

pub use account::{Budget, Counters, DropReason};
pub use answer::{Answer, Answers, CommandResult, RowHash, RowHashes};
pub use compare::{Difference, compare};
pub use request::{Requests, Text};
pub use snapshot::{Account, Snapshot};
pub use table::{Differences, Example, Row, Texts, Times};
pub use transaction::{Cancel, Transaction, statements_of};
