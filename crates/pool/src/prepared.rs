// SPDX-License-Identifier: Apache-2.0
//! Prepared statements in transaction pooling: one entry for each distinct content, a server-side name for each entry, and per server the
//! set of those it has, least recently used first out.
//!
//! A server-side name depends on the content *and* on the length of the client's name, so that replacing one by the other keeps a
//! message's length. That is what lets a kernel lane rewrite names in place (an sk_skb program must not change an skb's length).

use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, Weak};

use foldhash::fast::RandomState;

/// First byte of every server-side name. Clients' own names that begin with it are never passed on, so that no client can name a
/// statement which another one prepared.
pub const NAME_MARK: u8 = b'~';
/// Digits of a server-side name. `!` is not among them: a name of mark and `!` never exists.
const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
/// A shorter name has no room for a digit. One digit makes names for 62 statements, enough for most whose driver counts from `s0` on
/// (tokio-postgres); the others of that length get a canonical one, as any length would that has run out of numbers.
const LENGTH_MIN: usize = 2;
/// Longer names are shortened to a canonical one.
const LENGTH_MAX: usize = 63;
/// Length of a name that is not chosen by the client's: the mark and 14 digits hold any 64-bit number that is ever counted to.
const LENGTH_CANONICAL: usize = 15;

/// One statement content under one server-side name.
#[derive(Debug)]
pub struct Statement {
    /// Distinct for each entry, never used again.
    pub id: u64,
    /// The name it has on every server that holds it.
    pub name: Box<[u8]>,
    /// Body of the Parse message behind the name: query text, its NUL, parameter type count and OIDs.
    pub body: Box<[u8]>,
    length_class: usize,
}

impl Statement {
    /// Appends the Parse message that creates this statement on a server.
    pub fn parse_message(&self, out: &mut Vec<u8>) {
        message(out, b'P', &[&self.name, b"\0", &self.body]);
    }

    /// What it takes of a server's share.
    fn cost(&self) -> usize {
        cost(&self.name, self)
    }

    /// Appends the Close message that removes it from a server.
    pub fn close_message(&self, out: &mut Vec<u8>) {
        message(out, b'C', &[b"S", &self.name, b"\0"]);
    }
}

/// Appends a message of `tag` whose body is `parts` joined.
pub(crate) fn message(out: &mut Vec<u8>, tag: u8, parts: &[&[u8]]) {
    let length = 4 + parts.iter().map(|part| part.len()).sum::<usize>();
    out.push(tag);
    out.extend_from_slice(&(length as u32).to_be_bytes());
    for part in parts {
        out.extend_from_slice(part);
    }
}

/// All statements that any client or server refers to, shared by all threads.
#[derive(Debug, Default)]
pub struct Statements {
    inner: Mutex<Table>,
    hasher: RandomState,
}

#[derive(Debug, Default)]
struct Table {
    by_content: HashMap<u64, Vec<Weak<Statement>>, RandomState>,
    next_id: u64,
    /// The next number for each length of name.
    next_number: HashMap<usize, u64, RandomState>,
    /// Entries at which dead ones are swept out.
    sweep_at: usize,
}

impl Statements {
    /// The entry for this content and length of client name, made if there is none.
    pub fn intern(&self, client_name_length: usize, body: &[u8]) -> Arc<Statement> {
        let class = length_class(client_name_length);
        let hash = self.hasher.hash_one((class, body));
        let mut table = self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(found) = table.by_content.get(&hash).and_then(|entries| {
            entries.iter().filter_map(Weak::upgrade).find(|s| s.length_class == class && *s.body == *body)
        }) {
            return found;
        }
        let (length_class, name) = table.name(class);
        table.next_id += 1;
        let statement = Arc::new(Statement { id: table.next_id, name, body: body.into(), length_class });
        table.by_content.entry(hash).or_default().push(Arc::downgrade(&statement));
        table.sweep();
        statement
    }

    /// Distinct statements in use.
    pub fn len(&self) -> usize {
        let table = self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        table.by_content.values().flatten().filter(|entry| entry.strong_count() > 0).count()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn length_class(client_name_length: usize) -> usize {
    if (LENGTH_MIN..=LENGTH_MAX).contains(&client_name_length) { client_name_length } else { 0 }
}

impl Table {
    /// A name that was never given before, of the class's length while that has numbers left.
    fn name(&mut self, class: usize) -> (usize, Box<[u8]>) {
        let length = if class == 0 { LENGTH_CANONICAL } else { class };
        let number = self.next_number.entry(length).or_default();
        let capacity =
            u32::try_from(length - 1).ok().and_then(|digits| 62u64.checked_pow(digits)).unwrap_or(u64::MAX);
        if *number < capacity {
            let name = encode(*number, length);
            *number += 1;
            (class, name)
        } else {
            let number = self.next_number.entry(LENGTH_CANONICAL).or_default();
            *number += 1;
            (class, encode(*number - 1, LENGTH_CANONICAL))
        }
    }

    fn sweep(&mut self) {
        if self.by_content.len() < self.sweep_at.max(1024) {
            return;
        }
        self.by_content.retain(|_, entries| {
            entries.retain(|entry| entry.strong_count() > 0);
            !entries.is_empty()
        });
        self.sweep_at = self.by_content.len() * 2;
    }
}

fn encode(mut number: u64, length: usize) -> Box<[u8]> {
    let mut name = vec![NAME_MARK; length];
    for digit in name[1..].iter_mut().rev() {
        *digit = DIGITS[(number % 62) as usize];
        number /= 62;
    }
    name.into()
}

/// Whether a client's own name must be kept from servers.
pub fn is_reserved(name: &[u8]) -> bool {
    name.first() == Some(&NAME_MARK)
}

/// Whether a name that the pooler gives, or [`nonexistent`], may go on with `byte` behind its mark.
pub(crate) fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'!'
}

/// A name as long as `name` that no server has.
pub fn nonexistent(name: &[u8]) -> Vec<u8> {
    let mut other = vec![b'!'; name.len()];
    other[0] = NAME_MARK;
    other
}

/// A client's statements: its own names, each with the content it stands for.
#[derive(Debug, Default, Clone)]
pub struct ClientStatements {
    names: HashMap<Box<[u8]>, Arc<Statement>, RandomState>,
    changes: u64,
    bytes: usize,
}

/// What a statement takes of its client's share: name, Parse message, and about what the tables need for it. Clients may share the text; each
/// pays for it.
fn cost(name: &[u8], statement: &Statement) -> usize {
    const TABLES: usize = 160;
    name.len() + statement.body.len() + TABLES
}

impl ClientStatements {
    /// What `name` stands for.
    pub fn get(&self, name: &[u8]) -> Option<&Arc<Statement>> {
        self.names.get(name)
    }

    /// Gives `name` a meaning, or takes it away; returns the one before.
    pub fn set(&mut self, name: &[u8], statement: Option<Arc<Statement>>) -> Option<Arc<Statement>> {
        self.changes += 1;
        self.bytes += statement.as_ref().map_or(0, |statement| cost(name, statement));
        let before = match statement {
            Some(statement) => self.names.insert(name.into(), statement),
            None => self.names.remove(name),
        };
        self.bytes -= before.as_ref().map_or(0, |statement| cost(name, statement));
        before
    }

    /// Memory that they take, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.changes += 1;
        self.bytes = 0;
        self.names.clear();
    }

    /// How often a name got another meaning: who keeps a copy learns from it that the copy is old.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// All names, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], &Arc<Statement>)> {
        self.names.iter().map(|(name, statement)| (&**name, statement))
    }

    /// How many names there are.
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }
}

/// The statements that one server connection has, by [`Statement::id`].
#[derive(Debug, Default)]
pub struct ServerStatements {
    held: HashMap<u64, (Arc<Statement>, u64), RandomState>,
    changes: u64,
    uses: u64,
    /// On the server, but to be closed before they are parsed again. They count as absent.
    outdated: Vec<Arc<Statement>>,
    /// What all of them take, outdated ones too: each keeps its text in our memory and in the server's.
    bytes: usize,
}

impl ServerStatements {
    /// Whether the server has it; counts as a use.
    pub fn touch(&mut self, id: u64) -> bool {
        self.uses += 1;
        let uses = self.uses;
        self.held.get_mut(&id).map(|entry| entry.1 = uses).is_some()
    }

    /// The statement with this id, if the server has it.
    pub fn get(&self, id: u64) -> Option<Arc<Statement>> {
        self.held.get(&id).map(|(statement, _)| statement.clone())
    }

    /// Whether the server has it.
    pub fn has(&self, id: u64) -> bool {
        self.held.contains_key(&id)
    }

    /// Notes that the server has it.
    pub fn insert(&mut self, statement: Arc<Statement>) {
        self.take_outdated(statement.id);
        self.uses += 1;
        self.changes += 1;
        self.bytes += statement.cost();
        if let Some((before, _)) = self.held.insert(statement.id, (statement, self.uses)) {
            self.bytes -= before.cost();
        }
    }

    /// Notes that the server has it no more.
    pub fn remove(&mut self, id: u64) {
        self.changes += 1;
        if let Some((statement, _)) = self.held.remove(&id) {
            self.bytes -= statement.cost();
        }
    }

    /// Takes out one that is outdated, or else the least recently used, while with `more` there are more than `max` or they take more than
    /// `bytes_max`.
    pub fn evict(&mut self, more: &Statement, max: usize, bytes_max: usize) -> Option<Arc<Statement>> {
        let count = self.held.len() + self.outdated.len();
        if count < max.max(1) && self.bytes + more.cost() <= bytes_max {
            return None;
        }
        self.changes += 1;
        let evicted = self.outdated.pop().or_else(|| {
            let oldest = self.held.iter().min_by_key(|(_, (_, used))| *used).map(|(id, _)| *id)?;
            self.held.remove(&oldest).map(|(statement, _)| statement)
        })?;
        self.bytes -= evicted.cost();
        Some(evicted)
    }

    /// The server's plan of it is of no use any more.
    pub fn outdate(&mut self, id: u64) {
        self.changes += 1;
        if let Some((statement, _)) = self.held.remove(&id) {
            self.outdated.push(statement);
        }
    }

    /// The same of the one that has this name on the server, if it is held.
    pub fn outdate_named(&mut self, name: &[u8]) {
        let id = self.iter().find(|statement| *statement.name == *name).map(|statement| statement.id);
        if let Some(id) = id {
            self.outdate(id);
        }
    }

    /// The same of all: one of them is outdated, and nobody knows which.
    pub fn outdate_all(&mut self) {
        self.changes += 1;
        self.outdated.extend(self.held.drain().map(|(_, (statement, _))| statement));
    }

    /// Whether it is on the server with an outdated plan; the caller closes it.
    pub fn take_outdated(&mut self, id: u64) -> bool {
        let Some(at) = self.outdated.iter().position(|statement| statement.id == id) else { return false };
        self.bytes -= self.outdated.swap_remove(at).cost();
        true
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.changes += 1;
        self.held.clear();
        self.outdated.clear();
        self.bytes = 0;
    }

    /// As [`ClientStatements::changes`].
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// All that the server has, in no order.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Statement>> {
        self.held.values().map(|(statement, _)| statement)
    }

    /// Memory that they take, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// How many the server has.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_entry_for_each_content_and_length() {
        let table = Statements::default();
        let first = table.intern(3, b"select 1\0\0\0");
        assert!(Arc::ptr_eq(&first, &table.intern(3, b"select 1\0\0\0")));
        let longer = table.intern(4, b"select 1\0\0\0");
        assert_ne!(first.id, longer.id);
        assert_eq!((first.name.len(), longer.name.len()), (3, 4));
        assert_eq!(table.intern(2, b"x\0\0\0").name.len(), 2);
        assert_eq!(table.intern(1, b"x\0\0\0").name.len(), LENGTH_CANONICAL);
        assert_eq!(table.intern(400, b"x\0\0\0").name.len(), LENGTH_CANONICAL);
    }

    #[test]
    fn names_are_never_given_twice() {
        let table = Statements::default();
        let mut seen = std::collections::HashSet::new();
        for (length, numbers) in [(2, 62), (3, 62 * 62)] {
            for n in 0..8000u32 {
                let statement = table.intern(length, &n.to_be_bytes());
                let expected = if n < numbers { length } else { LENGTH_CANONICAL };
                assert_eq!(statement.name.len(), expected, "statement {n} of length {length}");
                assert!(seen.insert(statement.name.clone()), "{:?}", statement.name);
                assert!(is_reserved(&statement.name));
            }
        }
        assert!(!seen.contains(&*nonexistent(b"ab")) && !seen.contains(&*nonexistent(b"abc")));
    }

    #[test]
    fn evicts_the_least_recently_used() {
        let table = Statements::default();
        let mut server = ServerStatements::default();
        let all: Vec<_> = (0..3u32).map(|n| table.intern(5, &n.to_be_bytes())).collect();
        all.iter().for_each(|s| server.insert(s.clone()));
        assert!(server.touch(all[0].id));
        let evict = |server: &mut ServerStatements| server.evict(&all[0], 3, usize::MAX).map(|s| s.id);
        assert_eq!(evict(&mut server), Some(all[1].id));
        assert!(evict(&mut server).is_none());
        // What is of no use any more goes first, and takes room until then.
        server.insert(all[1].clone());
        server.outdate(all[0].id);
        assert_eq!(evict(&mut server), Some(all[0].id));
        assert!(evict(&mut server).is_none() && server.len() == 2);
    }

    #[test]
    fn a_server_keeps_no_more_bytes_than_it_may() {
        let table = Statements::default();
        let mut server = ServerStatements::default();
        let [small, large, other] = [100, 5000, 5001].map(|size| table.intern(5, &vec![b'x'; size]));
        server.insert(small.clone());
        server.insert(large.clone());
        server.insert(large.clone());
        assert!(server.evict(&small, 200, 6000).is_none());
        assert_eq!(server.evict(&other, 200, 6000).map(|s| s.id), Some(small.id));
        assert_eq!(server.evict(&other, 200, 6000).map(|s| s.id), Some(large.id));
        assert!(server.evict(&other, 200, 6000).is_none() && server.bytes() == 0);
        // One that is larger than all may be is kept alone.
        server.insert(other.clone());
        assert_eq!(server.evict(&large, 200, 100).map(|s| s.id), Some(other.id));
        assert!(server.evict(&large, 200, 100).is_none());
        // Whatever way they go.
        server.insert(large.clone());
        server.outdate(large.id);
        assert!(server.bytes() > 5000 && server.take_outdated(large.id) && server.bytes() == 0);
        server.insert(large.clone());
        server.outdate(large.id);
        server.insert(large.clone());
        server.remove(large.id);
        assert!(server.bytes() == 0 && server.evict(&small, 1, 6000).is_none());
    }
}
