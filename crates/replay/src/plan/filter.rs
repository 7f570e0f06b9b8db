// SPDX-License-Identifier: Apache-2.0
//! Which sessions and statements of a trace are wanted.

use std::collections::BTreeSet;
use std::time::Duration;

use underpass_trace::SessionStart;

/// Empty sets and `None` let everything pass; several conditions must all hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Databases.
    pub databases: BTreeSet<String>,
    /// Users.
    pub users: BTreeSet<String>,
    /// Values of `application_name` at the start of a session.
    pub application_names: BTreeSet<String>,
    /// Numbers of sessions in the trace.
    pub sessions: BTreeSet<u64>,
    /// Fingerprints of statements, 16 hexadecimal digits. Transaction control and SET are always kept.
    pub fingerprints: BTreeSet<String>,
    /// Only units sent so long after the beginning of the trace, or later.
    pub from: Option<Duration>,
    /// Only units sent less than this after the beginning of the trace.
    pub to: Option<Duration>,
}

impl Filter {
    /// Whether a session is wanted.
    pub fn session(&self, start: &SessionStart<'_>) -> bool {
        let named = |set: &BTreeSet<String>, value: &Option<underpass_trace::Bytes<'_>>| {
            set.is_empty()
                || value.as_ref().is_some_and(|value| set.contains(String::from_utf8_lossy(value).as_ref()))
        };
        named(&self.databases, &start.database)
            && named(&self.users, &start.user)
            && named(&self.application_names, &start.application_name)
            && (self.sessions.is_empty() || self.sessions.contains(&start.session.0))
    }

    /// Whether a moment is before, in (`Equal`) or after the wanted time; nanoseconds since the trace began.
    pub fn time(&self, since_start_ns: u64) -> std::cmp::Ordering {
        let ns = u128::from(since_start_ns);
        if self.from.is_some_and(|from| ns < from.as_nanos()) {
            std::cmp::Ordering::Less
        } else if self.to.is_some_and(|to| ns >= to.as_nanos()) {
            std::cmp::Ordering::Greater
        } else {
            std::cmp::Ordering::Equal
        }
    }

    /// Whether a statement is wanted.
    pub fn fingerprint(&self, fingerprint: &str) -> bool {
        self.fingerprints.is_empty() || self.fingerprints.contains(fingerprint)
    }
}
