// SPDX-License-Identifier: Apache-2.0
//! Entry point of the fuzz target `pool_link` in `/fuzz`, which `cargo test` replays over its corpus. Takes any bytes and panics when an
//! invariant breaks. What the answers *mean* is the business of `tests/link_model.rs`; here both peers may be malicious.

use underpass_wire::{Framer, Piece};

use crate::link::{
    BackendObserver, ClientSide, FrontendContext, FrontendEvent, Link, LinkError, LinkOptions, Splice, Status,
};
use crate::prepared::Statements;

/// Direction of a piece, and what is done ahead of it.
mod op {
    pub(super) const FROM_SERVER: u8 = 1;
    pub(super) const NEXT_CLIENT: u8 = 2;
    pub(super) const INJECT: u8 = 4;
    pub(super) const ABANDON: u8 = 8;
}

struct Deaf;

impl BackendObserver for Deaf {
    fn parameter_status(&mut self, _: &str, _: &str, _: bool) {}
    fn ready(&mut self, _: Status) {}
    fn hidden_error(&mut self, _: &[u8]) {}
}

/// What came out: bytes for the server, bytes for the client, and how it ended.
#[derive(Debug, Default, PartialEq, Eq)]
struct Outcome {
    to_server: Vec<u8>,
    to_client: Vec<u8>,
    end: Option<End>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Terminate,
    Broken(LinkError),
}

struct Run {
    link: Link,
    client: ClientSide,
    statements: Statements,
    outcome: Outcome,
    /// Bytes that were not used yet, which the pooler offers again together with more.
    left: [Vec<u8>; 2],
}

impl Run {
    fn new() -> Self {
        // Small limits, so that they are met.
        let options = LinkOptions {
            statements_max: 3,
            message_max: 1 << 12,
            statement_bytes_max: 1 << 10,
            client_statement_bytes_max: 1 << 12,
            ..LinkOptions::default()
        };
        Self {
            link: Link::new(options),
            client: ClientSide::default(),
            statements: Statements::default(),
            outcome: Outcome::default(),
            left: Default::default(),
        }
    }

    fn ahead(&mut self, what: u8) {
        if what & op::ABANDON != 0 && self.link.abandon(&mut self.outcome.to_server) {
            self.client = ClientSide::default();
            self.left[0].clear();
        }
        if what & op::NEXT_CLIENT != 0 && self.link.is_quiescent() {
            self.client = ClientSide::default();
            self.left[0].clear();
            self.link.begin();
        }
        if what & op::INJECT != 0 && self.link.is_quiescent() {
            self.link.inject_query("select 1", &mut self.outcome.to_server);
        }
    }

    /// What was held back for answers that are there now. A server cannot have answered it before.
    fn go_on(&mut self) {
        if !self.link.is_holding() && !self.left[0].is_empty() {
            self.feed(false, &[]);
        }
    }

    fn feed(&mut self, from_server: bool, bytes: &[u8]) {
        if self.outcome.end.is_some() {
            return;
        }
        let left = &mut self.left[usize::from(from_server)];
        left.extend_from_slice(bytes);
        let input = std::mem::take(left);
        let (mut buffer, mut to_client) = (Vec::new(), Vec::new());
        let mut out = Splice::new(&mut buffer);
        let fed = if from_server {
            self.link
                .backend(&input, Some(&mut self.client), &mut Deaf, &mut out)
                .map(|used| (used, FrontendEvent::Fed))
        } else {
            let mut context = FrontendContext {
                client: &mut self.client,
                statements: &self.statements,
                to_client: &mut to_client,
            };
            self.link.frontend(&input, &mut context, &mut out)
        };
        match fed {
            Ok((used, event)) => {
                assert!(used <= input.len());
                let passed = out.bytes(&input).to_vec();
                if from_server { &mut self.outcome.to_client } else { &mut self.outcome.to_server }
                    .extend(passed);
                self.outcome.to_client.extend(to_client);
                self.left[usize::from(from_server)] = input[used..].to_vec();
                self.outcome.to_server.extend(self.link.take_replay().unwrap_or_default());
                if event == FrontendEvent::Terminate {
                    self.outcome.end = Some(End::Terminate);
                }
            }
            Err(error) => self.outcome.end = Some(End::Broken(error)),
        }
    }

    fn check(&self, fed: usize) {
        if !self.link.is_copy_both() {
            assert_framed(&self.outcome.to_server);
            assert_framed(&self.outcome.to_client);
        }
        // A message asks for one answer at most; a Bind may bring a Close and a Parse along, at first and when it is sent again.
        assert!(self.link.outstanding() <= fed + 4, "{} outstanding", self.link.outstanding());
        if self.link.is_quiescent() {
            assert_eq!(self.link.outstanding(), 0);
            assert_eq!(self.link.status(), Status::Idle);
        }
    }
}

/// Nobody may be sent what is not a stream of messages, whatever the other side says.
fn assert_framed(mut stream: &[u8]) {
    let mut framer = Framer::new(i32::MAX as u32);
    while !stream.is_empty() {
        match framer.next(&mut stream) {
            Ok(Some(Piece::Header(_) | Piece::Body(_) | Piece::End(_))) => {}
            Ok(None) => break,
            Err(error) => panic!("a broken stream was passed on: {error}"),
        }
    }
}

/// Splits an input into operations: a byte of [`op`], a length in two bytes, big-endian, and that many bytes.
fn pieces(mut data: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    std::iter::from_fn(move || {
        let ([what, high, low], rest) = data.split_first_chunk()?;
        let (piece, rest) = rest.split_at(rest.len().min(usize::from(u16::from_be_bytes([*high, *low]))));
        data = rest;
        Some((*what, piece))
    })
}

/// Target `pool_link`: a link, fed by two peers that may say anything, in pieces of any size. However a piece is cut, the same passes on.
pub fn link(data: &[u8]) {
    let (mut whole, mut cut) = (Run::new(), Run::new());
    let mut fed = 0;
    for (what, piece) in pieces(data) {
        let from_server = what & op::FROM_SERVER != 0;
        whole.ahead(what);
        cut.ahead(what);
        whole.feed(from_server, piece);
        piece.chunks(1).for_each(|byte| cut.feed(from_server, byte));
        whole.go_on();
        cut.go_on();
        fed += piece.len();
        whole.check(fed);
        cut.check(fed);
        let (one, other) = (&whole.outcome.end, &cut.outcome.end);
        assert_eq!(one.is_some(), other.is_some(), "how a piece is cut decides nothing: {one:?}, {other:?}");
        if whole.outcome.end.is_some() {
            return;
        }
        assert_eq!(whole.outcome, cut.outcome, "the same passes on");
        assert_eq!(whole.link.is_quiescent(), cut.link.is_quiescent());
    }
}
