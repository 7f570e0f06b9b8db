// SPDX-License-Identifier: Apache-2.0
//! Which requests of a session have to do with a password, so that what is answered to them may quote it.

use underpass_wire::frontend::{Close, Target, bind_names, first_name};
use underpass_wire::tag::frontend;

/// What a session has said with a password in it, and what may still be asked of that.
#[derive(Debug, Default)]
pub(super) struct Covered {
    /// Offsets of messages whose answers may quote a password; Ready ends them.
    requests: Vec<u64>,
    /// PostgreSQL: prepared statements with a password in their text.
    statements: foldhash::HashSet<Vec<u8>>,
    /// PostgreSQL: portals of these, or with a password among their values, and where they were bound. They outlive Sync in a transaction.
    portals: foldhash::HashMap<Vec<u8>, u64>,
}

impl Covered {
    /// A message had a password in it.
    pub(super) fn request(&mut self, offset: u64) {
        self.requests.push(offset);
    }

    /// A statement of this name was prepared before, with a password in its text.
    pub(super) fn statement(&mut self, name: &[u8]) {
        self.statements.insert(name.to_vec());
    }

    /// Follows the names of statements and portals in a message of PostgreSQL's protocol; `hides`: it had a password in it.
    pub(super) fn follow(&mut self, offset: u64, tag: u8, body: &[u8], hides: bool) {
        match tag {
            frontend::PARSE => match first_name(body) {
                Some(name) if hides => self.statement(name),
                Some(name) => _ = self.statements.remove(name),
                None => {}
            },
            frontend::BIND => {
                let Some(bind) = bind_names(body) else { return };
                if hides || self.statements.contains(bind.statement) {
                    self.portals.insert(bind.portal.to_vec(), offset);
                } else {
                    self.portals.remove(bind.portal);
                }
            }
            frontend::EXECUTE if first_name(body).is_some_and(|portal| self.portals.contains_key(portal)) => {
                self.request(offset);
            }
            frontend::CLOSE => match Close::decode(body) {
                Ok(Close { target: Target::Statement, name }) => _ = self.statements.remove(name),
                Ok(Close { target: Target::Portal, name }) => _ = self.portals.remove(name),
                Err(_) => {}
            },
            _ => {}
        }
    }

    /// The server has answered everything up to this request; outside of a transaction block it has no portals any more.
    pub(super) fn ready(&mut self, request: u64, idle: bool) {
        self.requests.retain(|&covered| covered > request);
        if idle {
            self.portals.retain(|_, &mut bound| bound > request);
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
        self.requests.is_empty() && self.statements.is_empty() && self.portals.is_empty()
    }
}
