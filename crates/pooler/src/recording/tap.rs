// SPDX-License-Identifier: Apache-2.0
//! Where bytes of a client are copied for the trace: both directions, as the client has them.

use std::sync::Arc;

use underpass_trace::{Count, Direction, EndReason, SessionId};

use super::{EVENT_BYTES, Event, Recording, Room, now_ns};

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

    /// The client said this, or was sent it by a call that began at `time_ns` (see [`now_ns`]).
    #[cold]
    pub fn copy(&mut self, direction: Direction, time_ns: u64, bytes: &[u8]) {
        if bytes.is_empty() || self.recording.is_over() {
            return;
        }
        let counts = &self.recording.counts;
        let count = Count { events: 1, bytes: bytes.len() as u64 };
        let room = self.recording.reserve_to_post(EVENT_BYTES + bytes.len());
        // The stream ends here in the trace, with the trace: what comes is no gap.
        if matches!(room, Room::Over) {
            return;
        }
        let next = match direction {
            Direction::Frontend => &mut self.frontend,
            Direction::Backend => &mut self.backend,
        };
        let at = *next;
        *next += count.bytes;
        if matches!(room, Room::None) {
            return counts.lost.add(count);
        }
        counts.taken.add(count);
        let session = self.session;
        self.recording.post(Event::Bytes { session, direction, time_ns, at, bytes: bytes.into() });
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
        // The client goes on, mostly; and the thread ends all sessions that it has.
        if self.recording.is_over() {
            return;
        }
        let Self { session, reason, frontend, backend, .. } = *self;
        self.recording.post(match self.is_forgotten {
            true => Event::Forget(session),
            false => Event::End { session, time_ns: now_ns(), reason, frontend, backend },
        });
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;
    use crate::recording::{Mask, Wanted};
    use crate::transport::Transport;

    /// `replay --order commit` goes by these times: who has read an answer may depend on it, in whatever session.
    #[test]
    fn an_answer_is_no_later_than_its_reader_has_it() {
        let wanted = Wanted {
            parent: ".".into(),
            level: underpass_config::TraceLevel::Full,
            mask: Mask::AsTheyAre,
            queue_bytes: 1 << 24,
            max_bytes: None,
        };
        let (queue, incoming) = std::sync::mpsc::channel();
        let recording = Arc::new(Recording::new(wanted, ".".into(), queue));
        // A call that returns only when its peer has read: the socket waits for room.
        let (near, mut far) = UnixStream::pair().expect("a pair");
        let mut transport = Transport::new(near.into());
        transport.set_tap(Some(Box::new(Tap::new(recording, SessionId(1)))));
        let reader = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            let read_ns = now_ns();
            far.read_exact(&mut vec![0; 4 << 20]).expect("all of it");
            read_ns
        });
        assert_eq!(transport.write(&vec![0; 4 << 20]).expect("a peer"), 4 << 20);
        let read_ns = reader.join().expect("a reader");
        let Ok(Event::Bytes { time_ns, .. }) = incoming.recv() else { panic!("no bytes") };
        assert!(time_ns <= read_ns, "{} ns after it was read", time_ns - read_ns);
    }
}
