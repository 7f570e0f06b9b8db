// SPDX-License-Identifier: Apache-2.0
//! Where bytes of a client are copied for the trace: both directions, as the client has them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use underpass_trace::{Direction, EndReason, SessionId};

use super::{EVENT_BYTES, Event, Recording, now_ns};

/// A client that is recorded. Its session ends in the trace when this is dropped.
pub(crate) struct Tap {
    recording: Arc<Recording>,
    session: SessionId,
    /// Bytes seen since the session's beginning, or since its encryption's.
    frontend: u64,
    backend: u64,
    /// How it ended, once that is known.
    pub reason: EndReason,
    is_forgotten: bool,
}

impl Tap {
    pub(super) fn new(recording: Arc<Recording>, session: SessionId) -> Self {
        let reason = EndReason::Unknown;
        Self { recording, session, frontend: 0, backend: 0, reason, is_forgotten: false }
    }

    /// Whether it belongs to this recording.
    pub fn is_of(&self, recording: &Arc<Recording>) -> bool {
        Arc::ptr_eq(&self.recording, recording)
    }

    /// The client said this, or was sent it.
    #[cold]
    pub fn copy(&mut self, direction: Direction, bytes: &[u8]) {
        let next = match direction {
            Direction::Frontend => &mut self.frontend,
            Direction::Backend => &mut self.backend,
        };
        let at = *next;
        *next += bytes.len() as u64;
        if bytes.is_empty() || self.recording.is_over() {
            return;
        }
        let counts = &self.recording.counts;
        counts.seen_chunks.fetch_add(1, Ordering::Relaxed);
        counts.seen_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        if !self.recording.reserve(EVENT_BYTES + bytes.len()) {
            counts.lost_chunks.fetch_add(1, Ordering::Relaxed);
            counts.lost_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            return;
        }
        let session = self.session;
        self.recording.post(Event::Bytes { session, direction, time_ns: now_ns(), at, bytes: bytes.into() });
    }

    /// What was said until now was about encryption. The streams begin anew inside it.
    pub fn encrypted(&mut self) {
        (self.frontend, self.backend) = (0, 0);
        self.recording.post(Event::Encrypted(self.session));
    }

    /// The client turned out to be on the console.
    pub fn forget(mut self) {
        self.is_forgotten = true;
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        let Self { session, reason, frontend, backend, .. } = *self;
        self.recording.post(match self.is_forgotten {
            true => Event::Forget(session),
            false => Event::End { session, time_ns: now_ns(), reason, frontend, backend },
        });
    }
}
