// SPDX-License-Identifier: Apache-2.0
//! Which requests of a session have to do with a password, so that what is answered to them may quote it.
//!
//! After an error the server skips messages until the next Sync (manual, "Extended Query"), so a Parse or Close that should end what a
//! name stands for may never have been done. A name that is ended so counts as ended for the rest of its batch, whose messages are
//! skipped with it; behind the Sync it stays covered until Ready has told that there was no error.

use underpass_wire::frontend::{Close, Target, bind_names, first_name};
use underpass_wire::tag::frontend;

/// What a session has said with a password in it, and what may still be asked of that. Names are of PostgreSQL's protocol.
#[derive(Debug, Default)]
pub(super) struct Covered {
    /// Offsets of messages whose answers may quote a password; Ready ends them.
    requests: Vec<u64>,
    /// Prepared statements with a password in their text.
    statements: Names,
    /// Portals of these, or with a password among their values. They outlive Sync in a transaction.
    portals: Names,
    /// Prepared statements that put together SQL which sets a password: it is in one of their parameters.
    composing: Names,
    /// The client's last Sync.
    sync: u64,
    /// Messages of the extended protocol came behind it: what follows may be skipped.
    has_begun: bool,
    /// The first request since the last Ready that failed, or may have.
    failed: Option<u64>,
}

/// Names that are covered, by the offsets of the messages that gave them and that ended them.
#[derive(Debug, Default)]
struct Names(foldhash::HashMap<Vec<u8>, Name>);

#[derive(Debug)]
struct Name {
    begun: u64,
    /// The last message that ends it, unless the server skipped it.
    ended: Option<u64>,
}

impl Names {
    fn begin(&mut self, name: &[u8], offset: u64) {
        self.0.insert(name.to_vec(), Name { begun: offset, ended: None });
    }

    fn end(&mut self, name: &[u8], offset: u64, is_certain: bool) {
        if is_certain {
            self.0.remove(name);
        } else if let Some(covered) = self.0.get_mut(name) {
            covered.ended = Some(offset);
        }
    }

    /// Whether the name is covered in the batch behind this Sync.
    fn has(&self, name: &[u8], sync: u64) -> bool {
        self.0.get(name).is_some_and(|covered| covered.ended.is_none_or(|ended| ended < sync))
    }

    /// All up to `request` is answered; from `failed` on it may have been skipped.
    fn settle(&mut self, request: u64, failed: Option<u64>) {
        self.0.retain(|_, covered| match covered.ended {
            Some(ended) if ended <= request => {
                covered.ended = None;
                failed.is_some_and(|failed| failed <= ended)
            }
            _ => true,
        });
    }
}

impl Covered {
    /// A message had a password in it.
    pub(super) fn request(&mut self, offset: u64) {
        self.requests.push(offset);
    }

    /// A statement of this name was prepared before, with a password in its text.
    pub(super) fn statement(&mut self, name: &[u8]) {
        self.statements.begin(name, 0);
    }

    /// A statement of this name was prepared before that puts SQL with a password together.
    pub(super) fn composing(&mut self, name: &[u8]) {
        self.composing.begin(name, 0);
    }

    /// Whether a Bind of this statement has a password among its values.
    pub(super) fn composes(&self, statement: &[u8]) -> bool {
        self.composing.has(statement, self.sync)
    }

    /// Follows the names of statements and portals in a message of PostgreSQL's protocol; `hides`: it had a password in it, `composes`: its
    /// text puts SQL with one together.
    pub(super) fn follow(&mut self, offset: u64, tag: u8, body: &[u8], hides: bool, composes: bool) {
        match tag {
            frontend::PARSE => {
                let Some(name) = first_name(body) else { return };
                // One that has a name cannot be replaced: this Parse fails, unless it was closed before.
                let is_certain = name.is_empty() && !self.has_begun;
                for (names, covers) in [(&mut self.statements, hides), (&mut self.composing, composes)] {
                    if covers {
                        names.begin(name, offset);
                    } else {
                        names.end(name, offset, is_certain);
                    }
                }
            }
            frontend::BIND => {
                let Some(bind) = bind_names(body) else { return };
                if hides || self.statements.has(bind.statement, self.sync) {
                    self.portals.begin(bind.portal, offset);
                } else {
                    self.portals.end(bind.portal, offset, false);
                }
            }
            frontend::EXECUTE
                if first_name(body).is_some_and(|portal| self.portals.has(portal, self.sync)) =>
            {
                self.request(offset);
            }
            frontend::CLOSE => match Close::decode(body) {
                Ok(Close { target: Target::Statement, name }) => {
                    self.statements.end(name, offset, !self.has_begun);
                    self.composing.end(name, offset, !self.has_begun);
                }
                Ok(Close { target: Target::Portal, name }) => {
                    self.portals.end(name, offset, !self.has_begun);
                }
                Err(_) => {}
            },
            _ => {}
        }
        match tag {
            frontend::SYNC => (self.sync, self.has_begun) = (offset, false),
            // Their errors skip nothing, unless they stand behind others.
            frontend::QUERY | frontend::FUNCTION_CALL => {}
            _ => self.has_begun = true,
        }
    }

    /// This request failed, or may have: what was sent behind it may have been skipped.
    pub(super) fn failed(&mut self, request: u64) {
        let first = self.failed.map_or(request, |failed| failed.min(request));
        self.failed = Some(first);
    }

    /// The server has answered everything up to this request; outside of a transaction block it has no portals any more.
    pub(super) fn ready(&mut self, request: u64, idle: bool) {
        self.requests.retain(|&covered| covered > request);
        let failed = self.failed.take();
        for names in [&mut self.statements, &mut self.portals, &mut self.composing] {
            names.settle(request, failed);
        }
        if idle {
            self.portals.0.retain(|_, portal| portal.begun > request);
        }
    }

    /// Whether a password may be in what the server says now.
    pub(super) fn is_asked(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Whether a password may be in the answer to this request: it is the Execute behind a Bind with one, or a later one of the same portal.
    pub(super) fn answers(&self, request: u64) -> bool {
        self.requests.iter().any(|&covered| covered <= request)
    }

    /// Whether nothing is to be remembered.
    pub(super) fn is_empty(&self) -> bool {
        let has_names =
            [&self.statements, &self.portals, &self.composing].iter().any(|names| !names.0.is_empty());
        self.requests.is_empty() && !has_names
    }
}
