// SPDX-License-Identifier: Apache-2.0
//! Requests that a link may be *fed* with: what user space may write to a server whose answers a kernel lane forwards.
//!
//! The program counts ReadyForQuery and nothing else, so a batch is whole messages that end in a Sync, a Query or a FunctionCall, and
//! whose answers nobody has to look at. Everything else is for [`Link::frontend`](crate::link::Link::frontend). The same rules as in
//! `request.bpf.h` of the lanes.

use std::sync::Arc;

use underpass_wire::frontend::{bind_names, first_name, len_max};
use underpass_wire::{Framer, Piece};

use crate::prepared::{ClientStatements, Statement};

/// Requests that can be fed.
#[derive(Debug, Default)]
pub struct Batch {
    /// ReadyForQuery that they ask for, at least 1.
    pub ready: u16,
    /// What is asked for last is a Sync: the answers are those of the extended protocol.
    pub extended: bool,
    /// The unnamed statement is the client's own from here on, or none, and may be bound again on the same link.
    pub unnamed: bool,
    /// The client's unnamed statement, if it had one, is another one now or none.
    pub forgets_unnamed: bool,
    /// Uses of named statements, where a server's name takes the place of the client's.
    pub uses: Vec<Use>,
}

/// A Bind or Describe of a named statement.
#[derive(Debug)]
pub struct Use {
    /// Offset of the name.
    pub at: usize,
    /// What it stands for; its name is as long.
    pub statement: Arc<Statement>,
}

impl Batch {
    /// Judges all of `bytes`, in which the client says what its `statements` stand for; no message may have a length above `message_max`.
    /// `None`: they cannot be fed.
    pub fn scan(bytes: &[u8], message_max: u32, statements: Option<&ClientStatements>) -> Option<Self> {
        let mut batch = Self::default();
        // A Parse behind other messages of its cycle may be discarded, because one of them failed, and then leaves what another client
        // had: it counts up to the Sync. One that comes first is carried out, or drops that.
        let (mut open, mut unbound, mut in_cycle) = (false, false, false);
        let mut framer = Framer::new(message_max);
        let (mut rest, mut body) = (bytes, &[][..]);
        while let Some(piece) = framer.next(&mut rest).ok()? {
            let header = match piece {
                Piece::Header(header) => {
                    len_max(header.tag).filter(|&most| header.len <= most)?;
                    body = &[];
                    continue;
                }
                Piece::Body(all) => {
                    body = all;
                    continue;
                }
                Piece::End(header) => header,
            };
            let body_at = bytes.len() - rest.len() - body.len();
            match header.tag {
                // Behind an error of the batch they are discarded, and no ReadyForQuery answers them.
                b'Q' | b'F' if open => return None,
                b'Q' | b'F' | b'S' => {
                    batch.ready = batch.ready.checked_add(1)?;
                    batch.forgets_unnamed |= header.tag == b'Q';
                    batch.extended &= header.tag == b'S';
                    (open, in_cycle) = (false, false);
                    continue;
                }
                b'P' if first_name(body)?.is_empty() => {
                    batch.unnamed |= !open;
                    (in_cycle, batch.forgets_unnamed, unbound) = (true, true, true);
                }
                b'B' => {
                    let names = bind_names(body)?;
                    if !names.portal.is_empty() {
                        return None;
                    }
                    if names.statement.is_empty() {
                        unbound = false;
                        (batch.unnamed || in_cycle).then_some(())?;
                    } else {
                        batch.note(body_at + 1, names.statement, statements)?;
                    }
                }
                b'D' | b'C' => match (header.tag, body.first()?, first_name(&body[1..])?) {
                    (_, b'P', _) => {}
                    (b'D', b'S', b"") => (batch.unnamed || in_cycle).then_some(())?,
                    (b'D', b'S', name) => batch.note(body_at + 1, name, statements)?,
                    (_, b'S', b"") => (batch.unnamed, in_cycle, batch.forgets_unnamed) = (false, false, true),
                    _ => return None,
                },
                b'E' | b'H' => {}
                _ => return None,
            }
            open = true;
            batch.extended = true;
        }
        (framer.at_boundary() && !open && !unbound && batch.ready > 0).then_some(batch)
    }

    fn note(&mut self, at: usize, name: &[u8], statements: Option<&ClientStatements>) -> Option<()> {
        let statement = statements?.get(name).filter(|statement| statement.name.len() == name.len())?.clone();
        self.uses.push(Use { at, statement });
        Some(())
    }

    /// Writes the servers' names over the client's.
    pub fn rename(&self, bytes: &mut [u8]) {
        for Use { at, statement } in &self.uses {
            bytes[*at..at + statement.name.len()].copy_from_slice(&statement.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use underpass_wire::MAX_MESSAGE_LEN;
    use underpass_wire::frontend::{Target, build};

    use super::*;
    use crate::prepared::Statements;

    fn message(make: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut out = Vec::new();
        make(&mut out);
        out
    }

    fn parse(name: &[u8]) -> Vec<u8> {
        message(|out| build::parse(out, name, b"select 1", []))
    }

    fn bind(portal: &[u8], statement: &[u8]) -> Vec<u8> {
        message(|out| {
            build::bind_head(out, portal, statement, 6);
            out.extend_from_slice(&[0; 6]);
        })
    }

    fn execute() -> Vec<u8> {
        message(|out| build::execute(out, b"", 0))
    }

    fn sync() -> Vec<u8> {
        message(build::sync)
    }

    fn query() -> Vec<u8> {
        message(|out| build::query(out, b"select 1"))
    }

    #[test]
    fn whole_requests_are_fed() {
        let two = [query(), query()].concat();
        assert!(matches!(
            Batch::scan(&two, MAX_MESSAGE_LEN, None),
            Some(Batch { ready: 2, extended: false, .. })
        ));
        let extended = [parse(b""), bind(b"", b""), execute(), sync()].concat();
        let batch =
            Batch::scan(&extended, MAX_MESSAGE_LEN, None).expect("an unnamed statement, bound at once");
        assert!(batch.ready == 1 && batch.extended && batch.unnamed && batch.forgets_unnamed);
        assert!(Batch::scan(&extended, 12, None).is_none(), "longer than the pooler takes");
        // The first of its cycle takes the place of what another client had, even if it fails.
        let twice = [extended.clone(), bind(b"", b""), execute(), sync()].concat();
        assert!(
            Batch::scan(&twice, MAX_MESSAGE_LEN, None).is_some_and(|batch| batch.ready == 2 && batch.unnamed)
        );
        let behind = [execute(), extended.clone()].concat();
        assert!(Batch::scan(&behind, MAX_MESSAGE_LEN, None).is_some_and(|batch| !batch.unnamed));
        // CopyInResponse to the Query would be taken for the extended protocol's.
        let copy = Batch::scan(&[extended, query()].concat(), MAX_MESSAGE_LEN, None).expect("a pipeline");
        assert!(copy.ready == 2 && !copy.extended);
    }

    #[test]
    fn what_needs_a_look_is_not() {
        for refused in [
            vec![],
            query()[..7].to_vec(),
            [query(), sync()[..3].to_vec()].concat(),
            message(build::terminate),
            message(build::copy_done),
            [query(), b"S\0\0\x27\x11".to_vec(), vec![0; 9997]].concat(),
            [parse(b"a"), sync()].concat(),
            [parse(b""), sync()].concat(),
            [bind(b"", b""), execute(), sync()].concat(),
            [parse(b""), bind(b"p", b""), sync()].concat(),
            [parse(b""), bind(b"", b""), execute()].concat(),
            // Discarded, if what came before it fails: what is bound in the next cycle may be another client's.
            [execute(), parse(b""), bind(b"", b""), execute(), sync(), bind(b"", b""), execute(), sync()]
                .concat(),
            // The same of the Query: no ReadyForQuery is for it.
            [parse(b""), bind(b"", b""), execute(), query(), sync()].concat(),
            [bind(b"", b"unknown"), execute(), sync()].concat(),
            [message(|out| build::close(out, Target::Statement, b"a")), sync()].concat(),
        ] {
            assert!(Batch::scan(&refused, MAX_MESSAGE_LEN, None).is_none(), "{refused:?}");
        }
    }

    #[test]
    fn named_statements_get_the_servers_names() {
        let table = Statements::default();
        let mut client = ClientStatements::default();
        client.set(b"name", Some(table.intern(4, b"select 1\0\0\0")));
        let mut bytes = [
            message(|out| build::describe(out, Target::Statement, b"name")),
            bind(b"", b"name"),
            execute(),
            sync(),
        ]
        .concat();
        let batch = Batch::scan(&bytes, MAX_MESSAGE_LEN, Some(&client)).expect("the client has it");
        let server = batch.uses[0].statement.name.clone();
        batch.rename(&mut bytes);
        let expected = [
            message(|out| build::describe(out, Target::Statement, &server)),
            bind(b"", &server),
            execute(),
            sync(),
        ]
        .concat();
        assert_eq!(bytes, expected);
    }
}
