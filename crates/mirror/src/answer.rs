// SPDX-License-Identifier: Apache-2.0
//! A server's stream, as a client sees it: what each cycle was answered, in little.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hasher};
use std::time::{Duration, Instant};

use underpass_wire::tag::backend;
use underpass_wire::{Framer, MAX_MESSAGE_LEN, Piece};

/// Longest tag or part of an error that is kept, in bytes.
const KEPT_MAX: usize = 8 * 1024;
/// Longest text of an error that is kept for examples, in bytes.
const MESSAGE_MAX: usize = 200;
/// Results of a cycle that are kept. A script of more statements is compared by its first ones.
const RESULTS_MAX: usize = 1000;

/// Whether and how the rows of two servers are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RowHash {
    /// Not at all.
    #[default]
    Off,
    /// In their order.
    Ordered,
    /// Whatever their order: equal rows count as often as they come.
    Unordered,
}

/// The hashes that are taken of the rows of one stream: what any of its mirrors wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RowHashes {
    ordered: bool,
    unordered: bool,
}

impl FromIterator<RowHash> for RowHashes {
    fn from_iter<I: IntoIterator<Item = RowHash>>(wanted: I) -> Self {
        let mut all = Self::default();
        for hash in wanted {
            match hash {
                RowHash::Off => {}
                RowHash::Ordered => all.ordered = true,
                RowHash::Unordered => all.unordered = true,
            }
        }
        all
    }
}

/// How one command ended.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CommandResult {
    /// Tag of CommandComplete (`INSERT 0 1`); empty for an error, an empty query, or a portal that was suspended.
    pub tag: Box<str>,
    /// Rows and lines of COPY TO.
    pub rows: u64,
    /// Hash of the rows in their order, if it was taken. Rows of one server only are comparable with those of another if both send the
    /// same formats, which they do when they got the same Bind.
    pub ordered: Option<u64>,
    /// Hash of the rows whatever their order, if it was taken.
    pub unordered: Option<u64>,
    /// SQLSTATE of the ErrorResponse that ended it.
    pub sqlstate: Option<[u8; 5]>,
    /// The error's message, in part.
    pub message: Box<str>,
}

impl CommandResult {
    fn new(hashes: RowHashes) -> Self {
        Self {
            ordered: hashes.ordered.then_some(0),
            unordered: hashes.unordered.then_some(0),
            ..Self::default()
        }
    }

    /// The hash of the rows that `how` compares, if it was taken.
    pub fn row_hash(&self, how: RowHash) -> Option<u64> {
        match how {
            RowHash::Off => None,
            RowHash::Ordered => self.ordered,
            RowHash::Unordered => self.unordered,
        }
    }

    fn is_hashed(&self) -> bool {
        self.ordered.is_some() || self.unordered.is_some()
    }
}

/// What one cycle, up to a ReadyForQuery, was answered.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Answer {
    /// In order.
    pub results: Vec<CommandResult>,
    /// Transaction status of the ReadyForQuery: `I`, `T`, `E`.
    pub status: u8,
    /// From when the server could begin until ReadyForQuery.
    pub took: Duration,
}

/// Follows what a server answers.
#[derive(Debug)]
pub struct Answers {
    framer: Framer,
    hashes: RowHashes,
    kept: Vec<u8>,
    row: DefaultHasher,
    /// The cycle that is under way.
    open: Answer,
    current: CommandResult,
    done: VecDeque<Answer>,
    /// When the server could begin with the open cycle.
    since: Instant,
    /// Nobody is to have the present transaction.
    is_unwanted: bool,
}

impl Answers {
    /// From a message boundary on; `now` is when the server may begin.
    pub fn new(hashes: RowHashes, now: Instant) -> Self {
        Self {
            framer: Framer::new(MAX_MESSAGE_LEN),
            hashes,
            kept: Vec::new(),
            row: DefaultHasher::new(),
            open: Answer::default(),
            current: CommandResult::new(hashes),
            done: VecDeque::new(),
            since: now,
            is_unwanted: false,
        }
    }

    /// Other hashes are wanted, from the next result on of which no row has come.
    pub fn hash_by(&mut self, hashes: RowHashes) {
        self.hashes = hashes;
        if self.current.rows == 0 && !self.framer.header().is_some_and(|header| is_row(header.tag)) {
            self.current = CommandResult::new(hashes);
        }
    }

    /// The present transaction is to be forgotten, and the next piece of the stream begins a message.
    pub fn forget(&mut self, now: Instant) {
        *self = Self::new(self.hashes, now);
    }

    /// The server gets something to do now. Matters only if it had nothing: behind a ReadyForQuery it goes on with what it has.
    pub fn begin(&mut self, now: Instant) {
        self.since = now;
    }

    /// Follows a piece of the stream, cut anywhere, that came at `now`.
    pub fn feed(&mut self, mut bytes: &[u8], now: Instant) {
        loop {
            match self.framer.next(&mut bytes) {
                Ok(Some(Piece::Header(header))) => {
                    self.kept.clear();
                    if self.current.is_hashed() && is_row(header.tag) {
                        self.row = DefaultHasher::new();
                    }
                }
                Ok(Some(Piece::Body(part))) => match self.framer.header().map(|header| header.tag) {
                    Some(tag) if is_row(tag) => {
                        if self.current.is_hashed() {
                            // Equal however the row was cut: see the test.
                            self.row.write(part);
                        }
                    }
                    Some(backend::COMMAND_COMPLETE | backend::ERROR_RESPONSE | backend::READY_FOR_QUERY) => {
                        let room = KEPT_MAX.saturating_sub(self.kept.len());
                        self.kept.extend_from_slice(&part[..part.len().min(room)]);
                    }
                    _ => {}
                },
                Ok(Some(Piece::End(header))) => self.message(header.tag, now),
                // The pooler's own tracker refused it before, or this is the end of the bytes.
                Ok(None) | Err(_) => return,
            }
        }
    }

    /// As [`Self::feed`], but nobody is to know what is answered: only where messages end is followed.
    pub fn pass_over(&mut self, mut bytes: &[u8]) {
        while let Ok(Some(_)) = self.framer.next(&mut bytes) {}
    }

    /// What was passed over is over: [`Self::hash_by`] may have come in the middle of its rows.
    pub fn renew(&mut self) {
        self.current = CommandResult::new(self.hashes);
    }

    fn message(&mut self, tag: u8, now: Instant) {
        match tag {
            backend::DATA_ROW | backend::COPY_DATA => {
                self.current.rows += 1;
                let row = self.row.finish();
                // A sum does not depend on the order, and unlike XOR tells two equal rows from none.
                self.current.unordered = self.current.unordered.map(|sum| sum.wrapping_add(row));
                self.current.ordered = self.current.ordered.map(|before| {
                    let mut all = DefaultHasher::new();
                    all.write_u64(before);
                    all.write_u64(row);
                    all.finish()
                });
            }
            backend::COMMAND_COMPLETE => {
                self.current.tag =
                    String::from_utf8_lossy(self.kept.split(|&b| b == 0).next().unwrap_or_default()).into();
                self.end_command();
            }
            backend::EMPTY_QUERY_RESPONSE | backend::PORTAL_SUSPENDED | backend::FUNCTION_CALL_RESPONSE => {
                self.end_command();
            }
            backend::ERROR_RESPONSE => {
                let field = |wanted: u8| {
                    self.kept.split(|&byte| byte == 0).find_map(|field| match field.split_first() {
                        Some((&kind, value)) if kind == wanted => Some(value),
                        _ => None,
                    })
                };
                self.current.sqlstate =
                    Some(field(b'C').and_then(|code| code.try_into().ok()).unwrap_or(*b"XX000"));
                let text = String::from_utf8_lossy(field(b'M').unwrap_or_default());
                self.current.message = text.chars().take(MESSAGE_MAX).collect::<String>().into();
                self.end_command();
            }
            backend::READY_FOR_QUERY => {
                self.open.status = self.kept.first().copied().unwrap_or(0);
                self.open.took = now.saturating_duration_since(self.since);
                self.since = now;
                self.current = CommandResult::new(self.hashes);
                let open = std::mem::take(&mut self.open);
                if !self.is_unwanted || self.done.is_empty() {
                    self.done.push_back(open);
                }
            }
            _ => {}
        }
    }

    fn end_command(&mut self) {
        let result = std::mem::replace(&mut self.current, CommandResult::new(self.hashes));
        if self.open.results.len() < RESULTS_MAX {
            self.open.results.push(result);
        }
    }

    /// Cycles answered and not taken yet.
    pub fn len(&self) -> usize {
        self.done.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.done.is_empty()
    }

    /// What cycle `index` of them was answered.
    pub fn get(&self, index: usize) -> Option<&Answer> {
        self.done.get(index)
    }

    /// As [`crate::Requests::keep_nothing`], until the next [`Self::take`].
    pub fn keep_nothing(&mut self) {
        if !std::mem::replace(&mut self.is_unwanted, true) {
            self.done.truncate(1);
            self.done.shrink_to_fit();
        }
    }

    /// Takes the first `count` cycles, or as many as there are.
    pub fn take(&mut self, count: usize) -> Vec<Answer> {
        self.is_unwanted = false;
        self.done.drain(..count.min(self.done.len())).collect()
    }

    /// SQLSTATE of the error behind which nothing has come: if the connection ends now, it was fatal.
    pub fn last_error(&self) -> Option<[u8; 5]> {
        self.open.results.last().and_then(|result| result.sqlstate)
    }

    /// For how long the server has been at the open cycle.
    pub fn running_for(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.since)
    }
}

fn is_row(tag: u8) -> bool {
    matches!(tag, backend::DATA_ROW | backend::COPY_DATA)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(out: &mut Vec<u8>, tag: u8, body: &[u8]) {
        out.push(tag);
        out.extend_from_slice(&(body.len() as u32 + 4).to_be_bytes());
        out.extend_from_slice(body);
    }

    fn stream(rows: &[&[u8]]) -> Vec<u8> {
        let mut out = Vec::new();
        message(&mut out, b'T', b"\0\0");
        rows.iter().for_each(|row| message(&mut out, b'D', row));
        message(&mut out, b'C', format!("SELECT {}\0", rows.len()).as_bytes());
        message(&mut out, b'E', b"SERROR\0VERROR\0C42P01\0Mno table\0\0");
        message(&mut out, b'Z', b"E");
        message(&mut out, b'I', b"");
        message(&mut out, b'Z', b"I");
        out
    }

    fn answers(rows: &[&[u8]], hashes: &[RowHash], cuts: &[usize]) -> Vec<Answer> {
        let now = Instant::now();
        let mut answers = Answers::new(hashes.iter().copied().collect(), now);
        let bytes = stream(rows);
        let mut at = 0;
        let mut cuts: Vec<_> = cuts.iter().map(|&cut| cut.min(bytes.len())).collect();
        cuts.sort_unstable();
        for cut in cuts.into_iter().chain([bytes.len()]) {
            answers.feed(&bytes[at..cut], now);
            at = cut;
        }
        assert_eq!(answers.len(), 2);
        answers.take(9)
    }

    /// Wherever reading begins again, messages are found.
    #[test]
    fn what_is_passed_over_shifts_nothing() {
        let now = Instant::now();
        let bytes = stream(&[b"one row", b"", b"another one, which is longer"]);
        let ready = bytes.len() - 6;
        for cut in 0..=ready {
            let mut answers = Answers::new([RowHash::Ordered].into_iter().collect(), now);
            answers.pass_over(&bytes[..cut / 2]);
            answers.pass_over(&bytes[cut / 2..cut]);
            answers.feed(&bytes[cut..], now);
            assert_eq!(answers.take(9).last().map(|answer| answer.status), Some(b'I'), "{cut}");
        }
    }

    proptest! {
        /// What is told, hashes included, does not depend on how the stream was cut.
        #[test]
        fn cuts_make_no_difference(cuts in proptest::collection::vec(0usize..120, 0..12)) {
            let rows: [&[u8]; 3] = [b"one row", b"", b"another one, which is longer"];
            prop_assert_eq!(
                answers(&rows, &[RowHash::Ordered], &cuts),
                answers(&rows, &[RowHash::Ordered], &[])
            );
        }
    }

    #[test]
    fn a_cycle_in_little() {
        let all = answers(&[b"x", b"y"], &[], &[]);
        assert_eq!((&*all[0].results[0].tag, all[0].results[0].rows), ("SELECT 2", 2));
        assert_eq!(all[0].results[1].sqlstate, Some(*b"42P01"));
        assert_eq!(&*all[0].results[1].message, "no table");
        assert_eq!((all[0].status, all[1].status, all[1].results.len()), (b'E', b'I', 1));
    }

    #[test]
    fn what_a_session_ends_with() {
        let now = Instant::now();
        let mut answers = Answers::new(RowHashes::default(), now);
        answers.feed(&stream(&[]), now);
        assert_eq!(answers.last_error(), None, "a ReadyForQuery came behind it");
        let mut end = Vec::new();
        message(&mut end, b'E', b"SFATAL\0VFATAL\0C57P01\0Mterminated\0\0");
        answers.feed(&end, now);
        assert_eq!(answers.last_error(), Some(*b"57P01"));
    }

    #[test]
    fn order_counts_only_where_asked() {
        let both = [RowHash::Unordered, RowHash::Ordered];
        let hash = |rows: &[&[u8]], how| answers(rows, &both, &[])[0].results[0].row_hash(how).unwrap();
        let (ab, ba): ([&[u8]; 2], [&[u8]; 2]) = ([b"a", b"b"], [b"b", b"a"]);
        assert_eq!(hash(&ab, RowHash::Unordered), hash(&ba, RowHash::Unordered));
        assert_ne!(hash(&ab, RowHash::Ordered), hash(&ba, RowHash::Ordered));
        assert_ne!(hash(&[b"a", b"a"], RowHash::Unordered), hash(&[b"b", b"b"], RowHash::Unordered));
        for how in both {
            let alone = &answers(&ab, &[how], &[])[0].results[0];
            assert_eq!(alone.row_hash(how), Some(hash(&ab, how)), "the same beside another");
            assert_eq!([alone.ordered, alone.unordered].iter().flatten().count(), 1);
        }
        assert_eq!(answers(&ab, &[RowHash::Off], &[])[0].results[0].row_hash(RowHash::Off), None);
    }

    #[test]
    fn other_hashes_begin_with_a_whole_result() {
        let now = Instant::now();
        let mut answers = Answers::new(RowHashes::default(), now);
        let bytes = stream(&[b"a", b"b"]);
        // Behind the first row: its result has no hash, the next one has.
        answers.feed(&bytes[..14], now);
        answers.hash_by([RowHash::Ordered].into_iter().collect());
        answers.feed(&bytes[14..], now);
        answers.feed(&bytes, now);
        let all = answers.take(9);
        assert_eq!((all[0].results[0].rows, all[0].results[0].ordered), (2, None));
        assert!(all[2].results[0].ordered.is_some_and(|hash| hash != 0));
        // Nobody reads that answer.
        let mut answers = Answers::new([RowHash::Off].into_iter().collect(), now);
        answers.pass_over(&bytes[..14]);
        answers.hash_by([RowHash::Ordered].into_iter().collect());
        answers.pass_over(&bytes[14..]);
        answers.renew();
        answers.feed(&bytes, now);
        assert!(answers.take(9)[0].results[0].ordered.is_some_and(|hash| hash != 0));
    }
}
