// SPDX-License-Identifier: Apache-2.0
//! What of a trace is not played, and why: counted, with the first few named.

use std::collections::BTreeMap;

use serde::Serialize;

/// Why something is not played.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// A filter of the command line left it out.
    Filter,
    /// Read-only mode: it writes, or lifts the mode.
    ReadOnly,
    /// The session was in a transaction when recording joined it; its beginning is not in the trace.
    MidstreamTransaction,
    /// Messages of it are missing in the trace.
    Lost,
    /// The trace is masked, and data of it were withheld for that.
    Masked,
    /// Data of a COPY that its trace does not have at all: imported from a log, for one.
    NoCopyData,
    /// It uses a statement or portal that was made before recording, and its text is not known.
    UnknownStatement,
    /// It executes a statement of MySQL's protocol whose parameters' types were told before recording, and are not known.
    UnknownTypes,
    /// A password in it was overwritten when it was recorded.
    Password,
    /// It says KILL or SHUTDOWN, calls `pg_terminate_backend`, or does something else to the server itself: its connections have other numbers on the
    /// target.
    Administration,
    /// It comes after COM_CHANGE_USER, whose password is not in the trace.
    ChangedUser,
    /// A replication connection.
    Replication,
    /// The login failed at capture.
    LoginFailed,
    /// A CancelRequest that came when its session, if that is known, ran nothing that is played.
    Cancel,
    /// Recording ended before the client had sent all of it.
    Incomplete,
    /// A message that no client may send there.
    Protocol,
}

impl Reason {
    /// The reason in words, after "not played: 5 units, ".
    pub fn text(self) -> &'static str {
        match self {
            Self::Filter => "left out by a filter",
            Self::ReadOnly => "they write, and the replay is read-only",
            Self::MidstreamTransaction => {
                "in a transaction that was under way when recording joined the session"
            }
            Self::Lost => "bytes of them are missing in the trace",
            Self::Masked => "their data are not in the trace, because it is masked",
            Self::NoCopyData => "they copy data in that the trace does not have",
            Self::UnknownStatement => {
                "they use a statement prepared before recording, whose text is not known"
            }
            Self::UnknownTypes => "the types of their parameters were told before recording",
            Self::Password => "a password in them was overwritten in the trace",
            Self::Administration => {
                "they are about the captured server itself (KILL, SHUTDOWN, pg_terminate_backend)"
            }
            Self::ChangedUser => {
                "their session had become another user's, whose password is not in the trace"
            }
            Self::Replication => "replication connections",
            Self::LoginFailed => "the login failed at capture",
            Self::Cancel => "cancel requests for sessions that ran nothing which is played",
            Self::Incomplete => "recording ended before they were sent whole",
            Self::Protocol => "not the protocol",
        }
    }
}

/// Units and sessions that are not played.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Omitted {
    /// Units (for [`Reason::Cancel`]: requests) of sessions that are otherwise played.
    pub units: BTreeMap<Reason, u64>,
    /// Whole sessions.
    pub sessions: BTreeMap<Reason, u64>,
}

impl Omitted {
    /// Counts one unit.
    pub fn unit(&mut self, reason: Reason) {
        *self.units.entry(reason).or_default() += 1;
    }

    /// Counts one session.
    pub fn session(&mut self, reason: Reason) {
        *self.sessions.entry(reason).or_default() += 1;
    }
}
