// SPDX-License-Identifier: Apache-2.0
//! What became of a unit on the target.

use std::time::Duration;

use smallvec::SmallVec;
use underpass_wire::backend::TransactionStatus;

use crate::plan::End;

/// How one statement ended on the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Actual {
    /// How.
    pub end: End,
    /// Rows sent to the client.
    pub rows: u64,
    /// Hash of their contents; 0 unless it was asked for.
    pub hash: u64,
}

/// What became of one unit. Times count from the beginning of the replay.
#[derive(Clone, Debug, Default)]
pub enum UnitOutcome {
    /// Not sent: it was left out of the plan, or the replay was stopped before.
    #[default]
    NotSent,
    /// Not sent, because its session had lost its connection or never got one.
    NoConnection,
    /// Sent, and the connection ended before the server was ready again.
    Broken(Answered),
    /// Answered.
    Answered(Answered),
}

/// A unit that was sent.
#[derive(Clone, Debug, Default)]
pub struct Answered {
    /// When it should have been sent.
    pub due: Duration,
    /// When everything was there that it had to wait for: its moment, the answers of earlier units, commits.
    pub free: Duration,
    /// When its first byte was sent.
    pub sent: Duration,
    /// When its first answer was seen.
    pub first: Duration,
    /// When the server was ready again (or the connection ended).
    pub ready: Duration,
    /// How long it waited for commits of other sessions, and for nothing else.
    pub order_wait: Duration,
    /// It was sent although commits it had to wait for had not happened: nothing moved any more.
    pub released: bool,
    /// How its statements ended.
    pub statements: SmallVec<[Actual; 1]>,
    /// The transaction status after it.
    pub status: Option<TransactionStatus>,
}

/// What became of one session.
#[derive(Clone, Debug, Default)]
pub struct SessionOutcome {
    /// Of each unit of the plan.
    pub units: Vec<UnitOutcome>,
    /// Why there was no connection, or no longer one.
    pub broken: Option<String>,
    /// CancelRequests that were sent for it.
    pub cancels: u64,
    /// Statements prepared before recording that the target refused.
    pub prepare_errors: Vec<String>,
}
