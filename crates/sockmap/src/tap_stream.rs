// SPDX-License-Identifier: Apache-2.0
//! What the records of one tapped client mean: transactions, whole or lost.
//!
//! A transaction of a lane is a link; links of a client are numbered. The stream tells the bytes of a transaction as they come, and says of
//! each in the end that it is over, or that something of it is missing, which positions and numbers show.

use crate::words::{TAP_BEGIN, TAP_BUSY, TAP_END, TAP_PIECE, TAP_REQUEST, TAP_RESPONSE};

/// Numbers of links, modulo.
const LINKS: u32 = 1 << 20;
/// Bytes of `struct tap_head`.
pub(crate) const HEAD_BYTES: usize = 48;

/// One record of the ring.
#[derive(Debug, Clone, Copy)]
pub struct TapRecord<'a> {
    /// Index of the client's slot.
    pub client: u32,
    kind: u16,
    flags: u16,
    chunk: u32,
    link: u32,
    position: u64,
    requests: u64,
    at_ns: u64,
    pub(crate) bytes: &'a [u8],
}

impl<'a> TapRecord<'a> {
    /// `struct tap_head` and its bytes.
    pub(crate) fn parse(raw: &'a [u8]) -> Option<Self> {
        let head = raw.first_chunk::<HEAD_BYTES>()?;
        let half = |at: usize| u16::from_ne_bytes([head[at], head[at + 1]]);
        let word = |at: usize| u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let long = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&head[at..at + 8]);
            u64::from_ne_bytes(bytes)
        };
        Some(Self {
            client: word(0),
            kind: half(4),
            flags: half(6),
            chunk: word(12),
            link: word(16),
            position: long(24),
            requests: long(32),
            at_ns: long(40),
            bytes: raw.get(HEAD_BYTES..HEAD_BYTES + word(8) as usize)?,
        })
    }

    fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// How far the programs have come with a client.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TapMark {
    /// Number of the last link.
    pub(crate) link: u32,
    /// It stands.
    pub(crate) is_linked: bool,
    /// Request bytes forwarded since registration.
    pub(crate) requests: u64,
    /// Response bytes forwarded on this link, modulo 2^32.
    pub(crate) responses: u32,
}

impl TapMark {
    /// Number of the last link that has ended.
    fn done(&self) -> u32 {
        if self.is_linked { self.link.wrapping_sub(1) % LINKS } else { self.link }
    }
}

/// What a client said and heard in its lane.
#[derive(Debug, PartialEq, Eq)]
pub enum Tapped<'a> {
    /// So many transactions of which nothing is told: the ring had no room.
    Lost(u32),
    /// A transaction begins.
    Begin,
    /// The client said this.
    Request {
        /// A part of its stream, cut anywhere.
        bytes: &'a [u8],
        /// Earlier requests were not answered yet.
        was_busy: bool,
        /// CLOCK_MONOTONIC, in nanoseconds.
        at_ns: u64,
    },
    /// It was answered this.
    Response {
        /// A part of its server's stream, cut anywhere.
        bytes: &'a [u8],
        /// CLOCK_MONOTONIC, in nanoseconds.
        at_ns: u64,
    },
    /// The transaction is over; all of it was told.
    End,
    /// The ring had no room for all of the transaction that began: what was told of it is to be forgotten. It counts as one.
    Broken,
}

/// Where a client is that user space has taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TapTaken {
    /// Between two transactions.
    Boundary,
    /// In a transaction of which everything was told.
    Open,
    /// In one that was reported as [`Tapped::Lost`] or [`Tapped::Broken`].
    Broken,
}

/// A transaction that has begun.
#[derive(Debug, Clone, Copy)]
struct Open {
    link: u32,
    requests: u64,
    responses: u32,
}

/// Puts the records of one client together.
#[derive(Debug, Default)]
pub struct TapStream {
    /// The last link that is accounted for.
    closed: u32,
    open: Option<Open>,
    /// Fronts of chunks whose end has not come: of a request, of a response.
    fronts: [Vec<u8>; 2],
    /// A front has a hole.
    torn: [bool; 2],
    /// Behind the last request that was told.
    position: u64,
}

impl TapStream {
    /// Of a client that was tapped from here on.
    pub fn new(mark: TapMark) -> Self {
        Self { closed: mark.link, position: mark.requests, ..Self::default() }
    }

    /// Where the client's requests stand that were told, as a position in all that programs ever forwarded of it.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Whether all requests that programs had forwarded at `mark` are told.
    pub fn has_told(&self, mark: &TapMark) -> bool {
        self.position >= mark.requests
    }

    /// Takes the client's next record.
    pub fn record(&mut self, record: &TapRecord<'_>, mut tell: impl FnMut(Tapped<'_>)) {
        let side = usize::from(record.kind == TAP_RESPONSE);
        if record.kind != TAP_REQUEST && record.kind != TAP_RESPONSE {
            return;
        }
        if record.has(TAP_PIECE) {
            if record.position == 0 {
                self.fronts[side].clear();
                self.torn[side] = false;
            }
            self.torn[side] |= self.fronts[side].len() as u64 != record.position;
            self.fronts[side].extend_from_slice(record.bytes);
            return;
        }
        let front_length = (record.chunk as usize).saturating_sub(record.bytes.len());
        let mut front = std::mem::take(&mut self.fronts[side]);
        let torn = std::mem::take(&mut self.torn[side]);
        if front_length == 0 {
            front.clear();
        }
        let whole = front.len() == front_length && !(torn && front_length > 0);
        if record.has(TAP_BEGIN) {
            self.begin(record, &mut tell);
        }
        let Some(open) = self.open.as_mut().filter(|open| open.link == record.link) else { return };
        let follows = match record.kind {
            TAP_REQUEST => {
                let follows = open.requests == record.position;
                open.requests += u64::from(record.chunk);
                self.position = open.requests;
                follows
            }
            _ => {
                let follows = open.responses == record.position as u32;
                open.responses = open.responses.wrapping_add(record.chunk);
                follows
            }
        };
        let ends = record.has(TAP_END);
        if !whole || !follows || ends && open.requests < record.requests {
            return self.close(false, &mut tell);
        }
        for bytes in [&front[..], record.bytes].into_iter().filter(|bytes| !bytes.is_empty()) {
            tell(match record.kind {
                TAP_REQUEST => Tapped::Request { bytes, was_busy: record.has(TAP_BUSY), at_ns: record.at_ns },
                _ => Tapped::Response { bytes, at_ns: record.at_ns },
            });
        }
        if ends {
            self.close(true, &mut tell);
        }
    }

    /// User space has taken the client, which programs left at `mark`, and all its records were given to [`Self::record`].
    pub fn taken(&mut self, mark: TapMark, mut tell: impl FnMut(Tapped<'_>)) -> TapTaken {
        let is_whole = self.open.is_some_and(|open| {
            mark.is_linked
                && open.link == mark.link
                && open.requests == mark.requests
                && open.responses == mark.responses
        });
        if self.open.is_some() && !is_whole {
            self.close(false, &mut tell);
        }
        let before = if is_whole { mark.link.wrapping_sub(1) % LINKS } else { mark.link };
        let lost = distance(self.closed, before);
        if lost > 0 {
            tell(Tapped::Lost(lost));
        }
        *self = Self::new(mark);
        match (mark.is_linked, is_whole) {
            (false, _) => TapTaken::Boundary,
            (true, true) => TapTaken::Open,
            (true, false) => TapTaken::Broken,
        }
    }

    /// Whether programs have ended transactions that are not accounted for here: told and not read yet, or lost.
    pub fn lags(&self, mark: &TapMark) -> bool {
        (1..LINKS / 2).contains(&distance(self.closed, mark.done()))
    }

    /// Accounts for what is lost of a client that may be in its lane: `mark` was asked for before the ring was sorted, and all its records
    /// were given to [`Self::record`] since.
    pub fn settle(&mut self, mark: &TapMark, mut tell: impl FnMut(Tapped<'_>)) {
        if self.open.is_some_and(|open| distance(open.link, mark.done()) < LINKS / 2) {
            self.close(false, &mut tell);
        }
        if self.lags(mark) {
            tell(Tapped::Lost(distance(self.closed, mark.done())));
            self.closed = mark.done();
        }
    }

    fn begin(&mut self, record: &TapRecord<'_>, tell: &mut impl FnMut(Tapped<'_>)) {
        if self.open.is_some() {
            self.close(false, tell);
        }
        // The front of the request that begins is taken already: what is left is of a transaction whose end is lost.
        self.forget_fronts();
        let lost = distance(self.closed, record.link).saturating_sub(1);
        if lost > 0 {
            tell(Tapped::Lost(lost));
            self.closed = record.link.wrapping_sub(1) % LINKS;
        }
        self.open = Some(Open { link: record.link, requests: record.position, responses: 0 });
        tell(Tapped::Begin);
    }

    fn forget_fronts(&mut self) {
        self.fronts.iter_mut().for_each(Vec::clear);
        self.torn = [false; 2];
    }

    fn close(&mut self, whole: bool, tell: &mut impl FnMut(Tapped<'_>)) {
        self.forget_fronts();
        if let Some(open) = self.open.take() {
            self.closed = open.link;
            tell(if whole { Tapped::End } else { Tapped::Broken });
        }
    }
}

/// How many links lie behind `from` up to `to`.
fn distance(from: u32, to: u32) -> u32 {
    to.wrapping_sub(from) % LINKS
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: TapMark = TapMark { link: 7, is_linked: false, requests: 100, responses: 0 };

    fn last(kind: u16, flags: u16, link: u32, position: u64, bytes: &[u8]) -> TapRecord<'_> {
        let (chunk, requests) = (bytes.len() as u32, 0);
        TapRecord { client: 0, kind, flags, chunk, link, position, requests, at_ns: 0, bytes }
    }

    /// A transaction of one request of 3 bytes and one answer of 2.
    fn transaction(link: u32, at: u64) -> [TapRecord<'static>; 2] {
        let end = last(TAP_RESPONSE, TAP_END, link, 0, b"ok");
        [last(TAP_REQUEST, TAP_BEGIN, link, at, b"ask"), TapRecord { requests: at + 3, ..end }]
    }

    fn told(stream: &mut TapStream, records: &[TapRecord<'_>]) -> Vec<String> {
        let mut told = Vec::new();
        for record in records {
            stream.record(record, |event| told.push(word(&event)));
        }
        told
    }

    fn word(event: &Tapped<'_>) -> String {
        match event {
            Tapped::Request { bytes, .. } => format!(">{}", String::from_utf8_lossy(bytes)),
            Tapped::Response { bytes, .. } => format!("<{}", String::from_utf8_lossy(bytes)),
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn whole_transactions_are_told_and_missing_ones_counted() {
        let mut stream = TapStream::new(FIRST);
        assert_eq!(told(&mut stream, &transaction(8, 100)), ["Begin", ">ask", "<ok", "End"]);
        // 9 and 10 are missing.
        assert_eq!(told(&mut stream, &transaction(11, 109)), ["Lost(2)", "Begin", ">ask", "<ok", "End"]);
        let mut rest = Vec::new();
        let mark = TapMark { link: 13, ..FIRST };
        assert_eq!(stream.taken(mark, |event| rest.push(word(&event))), TapTaken::Boundary);
        assert_eq!(rest, ["Lost(2)"]);
    }

    #[test]
    fn a_hole_breaks_its_transaction_only() {
        for missing in 0..4 {
            let mut stream = TapStream::new(FIRST);
            let records = [
                last(TAP_REQUEST, TAP_BEGIN, 8, 100, b"begin"),
                last(TAP_RESPONSE, 0, 8, 0, b"ok"),
                last(TAP_REQUEST, 0, 8, 105, b"commit"),
                TapRecord { requests: 111, ..last(TAP_RESPONSE, TAP_END, 8, 2, b"done") },
            ];
            let mut left = records.to_vec();
            left.remove(missing);
            left.extend(transaction(9, 111));
            let told = told(&mut stream, &left);
            assert_eq!(told[told.len() - 4..], ["Begin", ">ask", "<ok", "End"], "without {missing}");
            let first = &told[..told.len() - 4];
            assert!(!first.contains(&"End".to_owned()), "without {missing}: {first:?}");
            let lost = first.iter().filter(|word| *word == "Broken" || *word == "Lost(1)").count();
            assert_eq!(lost, 1, "without {missing}: {first:?}");
        }
    }

    #[test]
    fn user_space_goes_on_with_a_transaction_only_if_it_has_all_of_it() {
        let begin = [last(TAP_REQUEST, TAP_BEGIN, 8, 100, b"begin")];
        let mark = TapMark { link: 8, is_linked: true, requests: 105, responses: 0 };
        for (mark, taken) in [
            (mark, TapTaken::Open),
            (TapMark { requests: 106, ..mark }, TapTaken::Broken),
            (TapMark { responses: 1, ..mark }, TapTaken::Broken),
            (TapMark { is_linked: false, ..mark }, TapTaken::Boundary),
        ] {
            let mut stream = TapStream::new(FIRST);
            told(&mut stream, &begin);
            let mut rest = Vec::new();
            assert_eq!(stream.taken(mark, |event| rest.push(word(&event))), taken);
            assert_eq!(rest.is_empty(), taken == TapTaken::Open, "{rest:?}");
        }
    }

    #[test]
    fn a_client_at_rest_is_accounted_for() {
        let mut stream = TapStream::new(FIRST);
        told(&mut stream, &[last(TAP_REQUEST, TAP_BEGIN, 8, 100, b"ask")]);
        let settle = |stream: &mut TapStream, mark: TapMark| {
            let mut told = Vec::new();
            stream.settle(&mark, |event| told.push(word(&event)));
            told
        };
        let under_way = TapMark { link: 8, is_linked: true, ..FIRST };
        assert!(!stream.lags(&under_way) && settle(&mut stream, under_way).is_empty());
        let ended = TapMark { link: 10, ..FIRST };
        assert!(stream.lags(&ended));
        assert_eq!(settle(&mut stream, ended), ["Broken", "Lost(2)"]);
        // What was read since the mark was asked for is ahead of it.
        told(&mut stream, &transaction(11, 100));
        assert!(!stream.lags(&ended) && settle(&mut stream, ended).is_empty());
    }

    #[test]
    fn numbers_of_links_wrap() {
        let mut stream = TapStream::new(TapMark { link: LINKS - 1, ..FIRST });
        assert_eq!(told(&mut stream, &transaction(0, 100)), ["Begin", ">ask", "<ok", "End"]);
        assert_eq!(told(&mut stream, &transaction(2, 110))[0], "Lost(1)");
    }

    #[test]
    fn a_front_belongs_to_the_end_behind_it() {
        let mut stream = TapStream::new(FIRST);
        let piece = |position, bytes| last(TAP_REQUEST, TAP_PIECE, 0, position, bytes);
        // A chunk that went up after all left its front behind.
        let begin = TapRecord { chunk: 6, ..last(TAP_REQUEST, TAP_BEGIN, 8, 100, b"ef") };
        let records = [piece(0, b"zz"), piece(0, b"ab"), piece(2, b"cd"), begin];
        assert_eq!(told(&mut stream, &records), ["Begin", ">abcd", ">ef"]);
        let more = TapRecord { chunk: 6, ..last(TAP_REQUEST, 0, 8, 106, b"ef") };
        assert_eq!(told(&mut stream, &[piece(2, b"cd"), more]), ["Broken"]);
    }

    #[test]
    fn a_front_whose_end_is_lost_is_not_the_next_transactions() {
        let mut stream = TapStream::new(FIRST);
        let piece = |position, bytes| last(TAP_RESPONSE, TAP_PIECE, 0, position, bytes);
        let begin = |link, at| last(TAP_REQUEST, TAP_BEGIN, link, at, b"ask");
        assert_eq!(told(&mut stream, &[begin(8, 100), piece(0, b"ab")]), ["Begin", ">ask"]);
        // The first piece of the answer is lost, too: its second has the place where the old front ends.
        let end = TapRecord { chunk: 6, requests: 106, ..last(TAP_RESPONSE, TAP_END, 9, 0, b"ef") };
        let records = [begin(9, 103), piece(2, b"cd"), end];
        assert_eq!(told(&mut stream, &records), ["Broken", "Begin", ">ask", "Broken"]);
    }
}
