// SPDX-License-Identifier: Apache-2.0
//! What became of a unit on the target. One is kept for each of millions of units, so it has what is compared and reported, and no more.

use std::time::Duration;

use underpass_wire::backend::TransactionStatus;

use crate::lists::{ListId, Lists};
use crate::plan::End;

/// How one statement ended on the target.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Actual {
    /// How.
    pub end: End,
    /// Rows sent to the client.
    pub rows: u64,
    /// Hash of their contents; 0 unless it was asked for.
    pub hash: u64,
}

/// What became of one unit.
#[derive(Clone, Debug, Default)]
pub enum UnitOutcome {
    /// Not sent: it was left out of the plan, or the replay was stopped before.
    #[default]
    NotSent,
    /// Not sent, because its session had lost its connection or never got one.
    NoConnection,
    /// Sent, and the connection ended before the server was ready again.
    Broken,
    /// Answered.
    Answered(Answered),
}

/// A unit that was sent and answered. A duration of 32 bits is exact to 60 ns in a second, which is less than its measurement.
#[derive(Clone, Debug, Default)]
pub struct Answered {
    /// From sending to the moment at which the server was ready again, seconds.
    pub latency_s: f32,
    /// How long after its moment it could not be sent because earlier units of its session were not answered, seconds.
    pub server_busy_s: f32,
    /// How long it waited for commits of other sessions, and for nothing else, seconds.
    pub order_wait_s: f32,
    /// How long it was not sent although it waited for nothing, seconds.
    pub replayer_late_s: f32,
    /// How its statements ended, in the session's `statements`.
    pub statements: ListId,
    /// The transaction status after it.
    pub status: Option<TransactionStatus>,
    /// It was sent although commits it had to wait for had not happened: nothing moved any more.
    pub released: bool,
}

/// A unit on its way. Times count from the beginning of the replay.
#[derive(Debug, Default)]
pub(crate) struct Sending {
    /// When it should have been sent.
    pub due: Duration,
    /// When everything was there that it had to wait for: its moment, the answers of earlier units, commits.
    pub free: Duration,
    /// When its first byte was sent.
    pub sent: Duration,
    /// How long it waited for commits of other sessions, and for nothing else.
    pub order_wait: Duration,
    /// See [`Answered::released`].
    pub released: bool,
    /// How its statements ended.
    pub statements: Vec<Actual>,
}

impl Sending {
    /// The server is ready again.
    pub fn answered(
        self,
        ready: Duration,
        status: TransactionStatus,
        statements: &mut Lists<Actual>,
    ) -> Answered {
        let waited = self.free.saturating_sub(self.due);
        Answered {
            latency_s: ready.saturating_sub(self.sent).as_secs_f32(),
            server_busy_s: waited.saturating_sub(self.order_wait).as_secs_f32(),
            order_wait_s: self.order_wait.as_secs_f32(),
            replayer_late_s: self.sent.saturating_sub(self.free).as_secs_f32(),
            statements: statements.add(&self.statements),
            status: Some(status),
            released: self.released,
        }
    }
}

/// What became of one session.
#[derive(Clone, Debug, Default)]
pub struct SessionOutcome {
    /// Of each unit of the plan.
    pub units: Vec<UnitOutcome>,
    /// How statements of units ended.
    pub statements: Lists<Actual>,
    /// Why there was no connection, or no longer one.
    pub broken: Option<String>,
    /// CancelRequests that were sent for it.
    pub cancels: u64,
    /// Statements prepared before recording that the target refused.
    pub prepare_errors: Vec<String>,
}

impl SessionOutcome {
    /// How the statements of a unit of it ended.
    pub fn statements(&self, unit: &Answered) -> &[Actual] {
        self.statements.get(unit.statements)
    }
}
