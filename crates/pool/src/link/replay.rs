// SPDX-License-Identifier: Apache-2.0
//! "cached plan must not change result type": a named statement whose table has changed is prepared again and its batch sent again, where
//! nobody can tell the difference from a server that would have done so itself.
//!
//! That is the case for a batch that stands alone (nothing outstanding before it, nothing behind its Sync), outside a transaction block,
//! and whose first message fails: the server has carried out nothing, and the client has been told nothing. The client must also ask what
//! the rows look like (Describe): one that relies on what it was told before is better served by the error, which is made for it.

use super::{Answer, Effect, Link, OnServer, Op, OpKind, Splice, Status, UNNAMED};

/// Longest batch, in bytes, that is kept to be sent again.
const BATCH_MAX: usize = 16 * 1024;

/// The batch under way, as it went to the server.
#[derive(Debug, Default)]
pub(super) struct Batch {
    bytes: Vec<u8>,
    /// It is kept: none of it has been answered.
    is_kept: bool,
    /// Where it begins in the output of the present call.
    from: usize,
    /// What is to be sent once more.
    again: Option<Vec<u8>>,
}

impl Batch {
    /// Nothing of it can be sent again any more.
    #[inline]
    pub(super) fn forget(&mut self) {
        self.is_kept = false;
    }
}

impl Link {
    /// A Bind or Describe of a named statement is about to be passed on: if it begins a batch of its own, that is kept.
    pub(super) fn keep_batch(&mut self, input: &[u8], out: &Splice<'_>) {
        if !self.is_busy() && !self.in_extended && self.status == Status::Idle {
            self.batch.is_kept = true;
            self.batch.bytes.clear();
            self.batch.from = out.bytes(input).len();
        }
    }

    /// Adds to the batch what was passed on.
    #[inline]
    pub(super) fn kept(&mut self, input: &[u8], out: &Splice<'_>) {
        if self.batch.is_kept {
            let passed = &out.bytes(input)[std::mem::take(&mut self.batch.from)..];
            if self.batch.bytes.len() + passed.len() > BATCH_MAX {
                self.batch.forget();
            } else {
                self.batch.bytes.extend_from_slice(passed);
            }
        }
    }

    /// The server's plan of the statement with this id is of no use. True if the error is not for the client, because its batch is sent
    /// again: see [`Link::take_replay`].
    pub(super) fn plan_changed(&mut self, id: u64) -> bool {
        let Some(statement) = self.statements.get(id).filter(|_| id != UNNAMED && self.is_replayable())
        else {
            self.statements.outdate(id);
            return false;
        };
        let batch = std::mem::take(&mut self.pending);
        self.uncertain = 0;
        let mut again = Vec::with_capacity(self.batch.bytes.len() + statement.body.len() + 64);
        let hidden = |kind, effect| Op { kind, answer: Answer::Hidden, effect, statement: 0 };
        // The server discards all up to the Sync that has been sent, and answers that.
        self.push_op(hidden(OpKind::Sync, None));
        for (kind, on_server) in [(OpKind::Close, OnServer::Removed), (OpKind::Parse, OnServer::Added)] {
            let effect = Effect { server: Some((statement.clone(), on_server)), ..Effect::default() };
            self.push_op(hidden(kind, Some(Box::new(effect))));
        }
        statement.close_message(&mut again);
        statement.parse_message(&mut again);
        again.extend_from_slice(&self.batch.bytes);
        batch.into_iter().for_each(|op| self.push_op(op));
        self.counts.server_parse += 1;
        self.batch.forget();
        self.batch.again = Some(again);
        true
    }

    fn is_replayable(&self) -> bool {
        let Some((sync, before)) = self.pending.back().zip(self.pending.len().checked_sub(1)) else {
            return false;
        };
        let simple = |op: &Op| {
            let kind = matches!(op.kind, OpKind::Bind | OpKind::Describe | OpKind::Execute | OpKind::Close);
            kind && op.answer == Answer::Forward && op.effect.is_none() && op.statement != UNNAMED
        };
        self.batch.is_kept
            && self.status == Status::Idle
            && !self.in_extended
            && self.frontend_left == 0
            && sync.kind == OpKind::Sync
            && sync.answer == Answer::Forward
            && self.pending.iter().take(before).all(simple)
            && self.pending.iter().any(|op| op.kind == OpKind::Describe)
    }

    /// What must be sent to the server now, after [`Link::backend`]: a statement that is prepared again, and the batch that it is for.
    #[inline]
    pub fn take_replay(&mut self) -> Option<Vec<u8>> {
        self.batch.again.take()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Bench, m, ready};
    use super::*;

    /// A server that has the client's statement "abc", and a batch that uses it.
    fn prepared() -> (Bench, Vec<Vec<u8>>) {
        let mut b = Bench::new();
        b.client_sends(&[m(b'P', b"abc\0select *\0\0\0"), m(b'S', b"")]);
        b.server_sends(&[m(b'1', b""), ready(b'I')]);
        let bind = m(b'B', b"\0abc\0\0\0\0\0\0\0");
        (b, vec![bind, m(b'D', b"P\0"), m(b'E', b"\0\0\0\0\0"), m(b'S', b"")])
    }

    fn plan_changed() -> Vec<u8> {
        m(b'E', b"SERROR\0C0A000\0Mcached plan must not change result type\0RRevalidateCachedQuery\0\0")
    }

    #[test]
    fn a_batch_that_stands_alone_is_sent_again() {
        let (mut b, batch) = prepared();
        let (sent, _) = b.client_sends(&batch);
        assert!(b.server_sends(&[plan_changed(), ready(b'I')]).is_empty(), "the client hears nothing of it");
        let again = b.link.take_replay().expect("sent again");
        let expected = [m(b'C', b"S~00\0"), m(b'P', b"~00\0select *\0\0\0"), sent].concat();
        assert_eq!(again, expected);
        let answer = [m(b'2', b""), m(b'T', b"\0\0"), m(b'C', b"SELECT 1\0"), ready(b'I')];
        assert_eq!(
            b.server_sends(&[[m(b'3', b""), m(b'1', b"")].concat(), answer.concat()]),
            answer.concat()
        );
        assert!(b.link.is_quiescent() && b.link.take_replay().is_none());
        assert_eq!(
            b.seen.ready,
            [Status::Idle, Status::Idle],
            "the Sync that was answered for us is not counted"
        );
    }

    #[test]
    fn the_second_failure_is_the_clients() {
        let (mut b, batch) = prepared();
        b.client_sends(&batch);
        b.server_sends(&[plan_changed(), ready(b'I')]);
        b.link.take_replay();
        let gone = m(b'E', b"SERROR\0C42P01\0\0");
        let shown = b.server_sends(&[m(b'3', b""), gone.clone(), ready(b'I')]);
        assert_eq!(shown, [gone, ready(b'I')].concat());
        assert!(b.link.is_quiescent() && b.link.statements.is_empty());
    }

    #[test]
    fn a_batch_whose_beginning_was_answered_or_that_is_followed_is_not() {
        // It does not ask what the rows look like.
        let (mut b, mut batch) = prepared();
        batch.remove(1);
        b.client_sends(&batch);
        assert!(!b.server_sends(&[plan_changed(), ready(b'I')]).is_empty() && b.link.take_replay().is_none());
        // The statement is parsed again when it is used next.
        let (sent, _) = b.client_sends(&batch);
        assert!(sent.starts_with(&[m(b'C', b"S~00\0"), m(b'P', b"~00\0select *\0\0\0")].concat()));

        // In a transaction block.
        let (mut b, batch) = prepared();
        b.client_sends(&[m(b'Q', b"begin\0")]);
        b.server_sends(&[m(b'C', b"BEGIN\0"), ready(b'T')]);
        b.client_sends(&batch);
        assert!(!b.server_sends(&[plan_changed(), ready(b'E')]).is_empty() && b.link.take_replay().is_none());

        // Another statement of the batch has been carried out.
        let (mut b, batch) = prepared();
        b.client_sends(&[&batch[..3], &batch[..]].concat());
        b.server_sends(&[m(b'2', b""), m(b'n', b""), m(b'C', b"SELECT 1\0")]);
        assert!(!b.server_sends(&[plan_changed(), ready(b'I')]).is_empty() && b.link.take_replay().is_none());

        // Something is under way behind it.
        let (mut b, batch) = prepared();
        b.client_sends(&[&batch[..], &[m(b'Q', b"select 1\0")]].concat());
        assert!(!b.server_sends(&[plan_changed(), ready(b'I')]).is_empty() && b.link.take_replay().is_none());

        // It is too long to be kept.
        let (mut b, mut batch) = prepared();
        batch[0] = m(b'B', &[&b"\0abc\0"[..], &[0; BATCH_MAX]].concat());
        b.client_sends(&batch);
        assert!(!b.server_sends(&[plan_changed(), ready(b'I')]).is_empty() && b.link.take_replay().is_none());
    }
}
