// SPDX-License-Identifier: Apache-2.0
//! The client's stream: which statements each cycle runs.

use std::collections::HashMap;
use std::sync::Arc;

use foldhash::fast::RandomState;
use underpass_wire::tag::frontend;
use underpass_wire::{Framer, MAX_MESSAGE_LEN, Piece};

/// Longest part of a message that is kept, in bytes: texts beyond it are not parsed anyway.
const KEPT_MAX: usize = underpass_sql::PARSED_BYTES_MAX + 1024;

/// Names of statements that are kept with their texts, in bytes. Beyond it all are forgotten, and what is run by such a name is not known: a client
/// that closes none must not fill the pooler's memory.
const NAMES_BYTES_MAX: usize = 4 << 20;
/// What one takes besides its name and text, about.
const NAME_BYTES: usize = 128;

/// Text of a statement as the client wrote it.
pub type Text = Arc<[u8]>;

type Table = HashMap<Box<[u8]>, Text, RandomState>;

/// Follows what a client says. Lives as long as its session is mirrored: named statements outlive transactions.
#[derive(Debug)]
pub struct Requests {
    framer: Framer,
    /// Body of a message that came in parts.
    kept: Vec<u8>,
    unnamed: Option<Text>,
    statements: Table,
    /// What they take.
    names_bytes: usize,
    unnamed_portal: Option<Text>,
    portals: Table,
    /// Statements of each cycle of the present transaction; the last one is open.
    cycles: Vec<Vec<Text>>,
    /// The open cycle has messages other than COPY data.
    is_open: bool,
    /// It has COPY data.
    has_copy: bool,
    /// And their end, CopyDone or CopyFail.
    has_copy_end: bool,
    /// The cycle before the open one ended with a Sync.
    closed_by_sync: bool,
    /// What it keeps for the present transaction, in bytes.
    kept_bytes: usize,
    /// It has prepared a statement by a name.
    has_named: bool,
    /// Nobody is to have the present transaction.
    is_unwanted: bool,
}

impl Default for Requests {
    fn default() -> Self {
        Self {
            framer: Framer::new(MAX_MESSAGE_LEN),
            kept: Vec::new(),
            unnamed: None,
            statements: Table::default(),
            names_bytes: 0,
            unnamed_portal: None,
            portals: Table::default(),
            cycles: vec![Vec::new()],
            is_open: false,
            has_copy: false,
            has_copy_end: false,
            closed_by_sync: false,
            kept_bytes: 0,
            has_named: false,
            is_unwanted: false,
        }
    }
}

impl Requests {
    /// The client has this statement already, from before it was followed. `body` is that of its Parse behind the name.
    pub fn know(&mut self, name: &[u8], body: &[u8]) {
        let text: Text = until_zero(body).into();
        if name.is_empty() {
            self.unnamed = Some(text);
            return;
        }
        let bytes = name_bytes(name, &text);
        if self.names_bytes + bytes > NAMES_BYTES_MAX {
            self.forget_names();
        }
        self.names_bytes += bytes;
        if let Some(before) = self.statements.insert(name.into(), text) {
            self.names_bytes -= name_bytes(name, &before);
        }
    }

    /// As [`Self::feed`], but nobody is to know what is said: only where messages end is followed. Which statements there are then must be told by
    /// [`Self::forget_statements`] and [`Self::know`]. Tells whether a message ended.
    pub fn pass_over(&mut self, mut bytes: &[u8]) -> bool {
        let mut has_ended = false;
        while let Ok(Some(_)) = self.framer.next(&mut bytes) {
            has_ended |= self.framer.need() == 0;
        }
        has_ended
    }

    /// None of the statements of before is there any more, or nobody knows.
    pub fn forget_statements(&mut self) {
        self.forget_names();
        self.unnamed = None;
    }

    fn forget_names(&mut self) {
        self.statements = Table::default();
        self.names_bytes = 0;
    }

    /// Follows a piece of the stream, cut anywhere.
    pub fn feed(&mut self, mut bytes: &[u8]) {
        loop {
            let start = bytes;
            match self.framer.next(&mut bytes) {
                Ok(Some(Piece::Header(_))) => self.kept.clear(),
                Ok(Some(Piece::Body(part))) => {
                    let header = self.framer.header();
                    let needs_body = header.is_some_and(|header| names_or_text(header.tag));
                    if !needs_body {
                        continue;
                    }
                    // The usual case: the whole body is here, and need not be copied.
                    if self.framer.need() == 0 && self.kept.is_empty() {
                        let Some(header) = header else { continue };
                        if let Ok(Some(Piece::End(_))) = self.framer.next(&mut bytes) {
                            self.message(header.tag, part);
                        }
                        continue;
                    }
                    let room = KEPT_MAX.saturating_sub(self.kept.len());
                    self.kept.extend_from_slice(&part[..part.len().min(room)]);
                }
                Ok(Some(Piece::End(header))) => {
                    let body = std::mem::take(&mut self.kept);
                    self.message(header.tag, &body);
                    self.kept = body;
                    self.kept.clear();
                }
                // The pooler's own tracker refused it before, or this is the end of the bytes.
                Ok(None) | Err(_) => return,
            }
            debug_assert!(bytes.len() <= start.len());
        }
    }

    fn message(&mut self, tag: u8, body: &[u8]) {
        match tag {
            frontend::QUERY => {
                self.unnamed = None;
                if forgets_names(until_zero(body)) {
                    self.forget_names();
                }
                self.run(until_zero(body).into());
                self.close_cycle(false);
            }
            frontend::FUNCTION_CALL => {
                self.run(b"<function call>"[..].into());
                self.close_cycle(false);
            }
            frontend::PARSE => {
                self.is_open = true;
                let (name, rest) = split_zero(body);
                self.has_named |= !name.is_empty();
                self.know(name, rest);
            }
            frontend::BIND => {
                self.is_open = true;
                let (portal, rest) = split_zero(body);
                let (name, _) = split_zero(rest);
                let text = if name.is_empty() { self.unnamed.as_ref() } else { self.statements.get(name) };
                let text = text.cloned();
                if portal.is_empty() {
                    self.unnamed_portal = text;
                } else if let Some(text) = text {
                    self.portals.insert(portal.into(), text);
                }
            }
            frontend::EXECUTE => {
                self.is_open = true;
                let (portal, _) = split_zero(body);
                let text =
                    if portal.is_empty() { self.unnamed_portal.as_ref() } else { self.portals.get(portal) };
                let text = text.cloned().unwrap_or_else(|| b"<unknown statement>"[..].into());
                self.run(text);
            }
            frontend::CLOSE => {
                self.is_open = true;
                if let Some((kind, rest)) = body.split_first() {
                    let (name, _) = split_zero(rest);
                    if *kind != b'S' {
                        self.portals.remove(name);
                    } else if let Some(text) = self.statements.remove(name) {
                        self.names_bytes -= name_bytes(name, &text);
                    }
                }
            }
            // A Sync ahead of or amid COPY data has no answer: the one behind the data ends the cycle that began the COPY. A Query that began it
            // has its answer at the end of the data, and a Sync behind that has one of its own.
            frontend::SYNC
                if self.has_copy
                    && !self.is_open
                    && self.cycles.len() > 1
                    && (self.closed_by_sync || !self.has_copy_end) =>
            {
                (self.has_copy, self.has_copy_end) = (false, false);
            }
            frontend::SYNC => self.close_cycle(true),
            frontend::COPY_DATA => (self.has_copy, self.has_copy_end) = (true, false),
            frontend::COPY_DONE | frontend::COPY_FAIL => (self.has_copy, self.has_copy_end) = (true, true),
            frontend::DESCRIBE => self.is_open = true,
            _ => {}
        }
    }

    fn run(&mut self, text: Text) {
        self.is_open = true;
        if !self.is_unwanted {
            self.kept_bytes += text.len() + size_of::<Text>();
        }
        if let Some(cycle) = self.cycles.last_mut().filter(|cycle| !self.is_unwanted || cycle.is_empty()) {
            cycle.push(text);
        }
    }

    fn close_cycle(&mut self, by_sync: bool) {
        if self.is_unwanted {
            self.cycles.truncate(1);
        } else {
            self.kept_bytes += size_of::<Vec<Text>>();
        }
        self.cycles.push(Vec::new());
        self.closed_by_sync = by_sync;
        self.is_open = false;
        (self.has_copy, self.has_copy_end) = (false, false);
    }

    /// The present transaction is to be forgotten, and the next piece of the stream begins a message.
    pub fn forget(&mut self) {
        self.take();
        self.framer = Framer::new(MAX_MESSAGE_LEN);
        self.kept.clear();
    }

    /// Nobody is to have the present transaction, however long it becomes: of what it runs, nothing is kept but that there is something. Names
    /// of statements are followed as before.
    pub fn keep_nothing(&mut self) {
        if std::mem::replace(&mut self.is_unwanted, true) {
            return;
        }
        let open = self.cycles.pop().unwrap_or_default();
        self.cycles.truncate(1);
        self.cycles.push(open);
        for cycle in &mut self.cycles {
            cycle.truncate(1);
            cycle.shrink_to_fit();
        }
        self.cycles.shrink_to_fit();
        self.kept_bytes = 0;
    }

    /// What is kept for the present transaction, in bytes.
    pub fn kept_bytes(&self) -> usize {
        self.kept_bytes
    }

    /// Whether the present transaction has prepared a statement by a name.
    pub fn has_named(&self) -> bool {
        self.has_named
    }

    /// The transaction is over: takes the statements of its cycles. Portals end with it.
    pub fn take(&mut self) -> Vec<Vec<Text>> {
        let mut cycles = std::mem::replace(&mut self.cycles, vec![Vec::new()]);
        // The last one is open and, at the end of a transaction, empty; that of a client that vanished may hold statements.
        if cycles.last().is_some_and(Vec::is_empty) {
            cycles.pop();
        }
        self.portals.clear();
        self.unnamed_portal = None;
        self.is_open = false;
        (self.has_copy, self.has_copy_end) = (false, false);
        self.kept_bytes = 0;
        self.has_named = false;
        self.is_unwanted = false;
        cycles
    }
}

/// Whether a message's body tells what is run.
fn names_or_text(tag: u8) -> bool {
    matches!(tag, frontend::QUERY | frontend::PARSE | frontend::BIND | frontend::EXECUTE | frontend::CLOSE)
}

fn name_bytes(name: &[u8], text: &Text) -> usize {
    name.len() + text.len() + NAME_BYTES
}

/// Whether a text is, alone, one that ends all named statements of its session.
fn forgets_names(text: &[u8]) -> bool {
    let text = text.trim_ascii();
    let text = text.strip_suffix(b";").unwrap_or(text).trim_ascii_end();
    [&b"deallocate all"[..], b"discard all"].iter().any(|one| text.eq_ignore_ascii_case(one))
}

fn split_zero(bytes: &[u8]) -> (&[u8], &[u8]) {
    match bytes.iter().position(|&byte| byte == 0) {
        Some(end) => (&bytes[..end], &bytes[end + 1..]),
        None => (bytes, &[]),
    }
}

fn until_zero(bytes: &[u8]) -> &[u8] {
    split_zero(bytes).0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use underpass_wire::frontend::Target;
    use underpass_wire::frontend::build;

    use super::*;

    fn texts(cycles: &[Vec<Text>]) -> Vec<Vec<String>> {
        cycles
            .iter()
            .map(|cycle| cycle.iter().map(|t| String::from_utf8_lossy(t).into_owned()).collect())
            .collect()
    }

    fn pipeline() -> Vec<u8> {
        let mut out = Vec::new();
        build::query(&mut out, b"begin");
        build::parse(&mut out, b"s", b"select $1", []);
        build::bind(&mut out, b"", b"s", [], [Some(&b"1"[..])], []);
        build::describe(&mut out, Target::Portal, b"");
        build::execute(&mut out, b"", 0);
        build::bind(&mut out, b"p", b"s", [], [Some(&b"2"[..])], []);
        build::execute(&mut out, b"p", 0);
        build::sync(&mut out);
        build::parse(&mut out, b"", b"copy t from stdin", []);
        build::bind(&mut out, b"", b"", [], [], []);
        build::execute(&mut out, b"", 0);
        build::sync(&mut out);
        build::copy_data(&mut out, b"1\n");
        build::copy_done(&mut out);
        build::sync(&mut out);
        build::query(&mut out, b"commit");
        out
    }

    const EXPECTED: [&[&str]; 4] =
        [&["begin"], &["select $1", "select $1"], &["copy t from stdin"], &["commit"]];

    proptest! {
        /// What is run does not depend on how the stream was cut.
        #[test]
        fn cuts_make_no_difference(cuts in proptest::collection::vec(0usize..200, 0..12)) {
            let bytes = pipeline();
            let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
            cuts.sort_unstable();
            let mut requests = Requests::default();
            let mut at = 0;
            for cut in cuts.into_iter().chain([bytes.len()]) {
                requests.feed(&bytes[at..cut]);
                at = cut;
            }
            prop_assert_eq!(texts(&requests.take()), EXPECTED);
        }
    }

    /// The server reads a Sync amid the data and passes it over; the one behind the end of a Query's COPY it answers.
    #[test]
    fn a_sync_behind_the_copy_of_a_query_is_a_cycle_of_its_own() {
        let copy = |amid: bool, end: fn(&mut Vec<u8>), behind: usize| {
            let mut out = Vec::new();
            build::query(&mut out, b"begin");
            build::query(&mut out, b"copy t from stdin");
            build::copy_data(&mut out, b"1\n");
            if amid {
                build::sync(&mut out);
                build::copy_data(&mut out, b"2\n");
            }
            end(&mut out);
            (0..behind).for_each(|_| build::sync(&mut out));
            build::query(&mut out, b"commit");
            let mut requests = Requests::default();
            requests.feed(&out);
            texts(&requests.take())
        };
        let ends: [fn(&mut Vec<u8>); 2] = [|out| build::copy_done(out), |out| build::copy_fail(out, b"no")];
        let (begin, copied, commit) = (vec!["begin"], vec!["copy t from stdin"], vec!["commit"]);
        for end in ends {
            for amid in [false, true] {
                for behind in 0..3 {
                    let mut expected = vec![begin.clone(), copied.clone()];
                    expected.extend((0..behind).map(|_| Vec::new()));
                    expected.push(commit.clone());
                    assert_eq!(copy(amid, end, behind), expected, "amid: {amid}");
                }
            }
        }
    }

    /// Wherever reading begins again, messages are found.
    #[test]
    fn what_is_passed_over_shifts_nothing() {
        let bytes = pipeline();
        let mut last = Vec::new();
        build::query(&mut last, b"commit");
        for cut in 0..=bytes.len() - last.len() {
            let mut requests = Requests::default();
            requests.pass_over(&bytes[..cut / 2]);
            requests.pass_over(&bytes[cut / 2..cut]);
            requests.feed(&bytes[cut..]);
            assert_eq!(texts(&requests.take()).last().expect("a cycle"), &["commit"], "{cut}");
        }
    }

    #[test]
    fn a_part_of_a_message_is_none() {
        for message in [&b"S\0\0\0\x04"[..], b"Q\0\0\0\x07;;\0"] {
            let (last, rest) = message.split_last().expect("bytes");
            let mut requests = Requests::default();
            assert!(!requests.pass_over(rest));
            assert!(requests.pass_over(&[*last]));
            assert!(!requests.pass_over(&message[..1]));
            assert!(requests.pass_over(&[&message[1..], rest].concat()));
        }
    }

    #[test]
    fn statements_outlive_transactions_and_portals_do_not() {
        let mut requests = Requests::default();
        requests.feed(&pipeline());
        assert!(requests.kept_bytes() > 0);
        requests.take();
        assert_eq!(requests.kept_bytes(), 0);
        let mut out = Vec::new();
        build::execute(&mut out, b"p", 0);
        build::bind(&mut out, b"", b"s", [], [], []);
        build::execute(&mut out, b"", 0);
        build::sync(&mut out);
        requests.feed(&out);
        assert_eq!(texts(&requests.take()), [["<unknown statement>", "select $1"]]);
    }

    #[test]
    fn a_transaction_that_nobody_is_to_have_is_not_kept() {
        let mut requests = Requests::default();
        requests.feed(&pipeline());
        requests.keep_nothing();
        assert_eq!(requests.kept_bytes(), 0);
        for _ in 0..1000 {
            requests.feed(&pipeline());
        }
        assert_eq!(requests.kept_bytes(), 0);
        let kept = requests.take();
        assert!(!kept.is_empty() && kept.iter().map(Vec::len).sum::<usize>() <= 2, "{kept:?}");
        // The next one is kept, and knows the statements.
        let mut out = Vec::new();
        build::bind(&mut out, b"", b"s", [], [], []);
        build::execute(&mut out, b"", 0);
        build::sync(&mut out);
        requests.feed(&out);
        assert_eq!(texts(&requests.take()), [["select $1"]]);
        requests.keep_nothing();
        assert!(requests.take().is_empty());
    }

    fn texts_of_named(requests: &mut Requests, name: &str) -> Vec<Vec<String>> {
        let mut out = Vec::new();
        build::bind(&mut out, b"", name.as_bytes(), [], [], []);
        build::execute(&mut out, b"", 0);
        build::sync(&mut out);
        requests.feed(&out);
        texts(&requests.take())
    }

    #[test]
    fn statements_that_are_never_closed_take_bounded_memory() {
        let mut requests = Requests::default();
        for number in 0..1_000_000 {
            requests.know(format!("s{number}").as_bytes(), b"select 1\0");
            assert!(requests.names_bytes <= NAMES_BYTES_MAX);
        }
        let kept = requests.statements.iter().map(|(name, text)| name_bytes(name, text)).sum::<usize>();
        assert_eq!(requests.names_bytes, kept);
        assert_eq!(texts_of_named(&mut requests, "s999999"), [["select 1"]], "the latest are known");
        // The same name again and again takes no more than once.
        let before = requests.names_bytes;
        (0..1000).for_each(|_| requests.know(b"s999999", b"select 1\0"));
        assert_eq!(requests.names_bytes, before);
    }

    #[test]
    fn what_ends_all_statements_and_what_ends_one() {
        for end in ["DEALLOCATE ALL", " discard all ; "] {
            let mut requests = Requests::default();
            let mut out = Vec::new();
            build::parse(&mut out, b"a", b"select 1", []);
            build::parse(&mut out, b"b", b"select 2", []);
            build::close(&mut out, Target::Statement, b"a");
            build::sync(&mut out);
            requests.feed(&out);
            assert_eq!(requests.names_bytes, name_bytes(b"b", &b"select 2"[..].into()));
            let mut out = Vec::new();
            build::query(&mut out, end.as_bytes());
            requests.feed(&out);
            requests.take();
            assert_eq!(requests.names_bytes, 0);
            assert_eq!(texts_of_named(&mut requests, "b"), [["<unknown statement>"]]);
        }
    }

    #[test]
    fn a_long_text_is_kept_in_part() {
        let mut out = Vec::new();
        build::query(&mut out, &vec![b'x'; KEPT_MAX * 2]);
        let mut requests = Requests::default();
        for part in out.chunks(60_000) {
            requests.feed(part);
        }
        assert_eq!(requests.take()[0][0].len(), KEPT_MAX);
    }
}
