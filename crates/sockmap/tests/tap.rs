// SPDX-License-Identifier: Apache-2.0
//! The tap tells what the lanes forward, byte for byte, in whole transactions, and knows what it did not tell.

mod common;

use std::io::{Read, Write};

use common::ends::{Client, Rig, Server, on_each_lane};
use common::{answer, eventually, expect, message, query, ready, row, send};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use underpass_sockmap::{Config, Give, Reason, TapBatch, TapMark, TapStream, TapTaken, TapWaits, Tapped};

const READER: u32 = 3;

fn config(ring: u32) -> Config {
    Config { tap_ring_bytes: ring, ..Config::default() }
}

/// One transaction as it was told, or as it was.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Transaction {
    requests: Vec<u8>,
    responses: Vec<u8>,
}

/// What came of one client, with `None` for each transaction that was lost.
struct Told {
    stream: TapStream,
    batch: TapBatch,
    open: Transaction,
    all: Vec<Option<Transaction>>,
}

impl Told {
    fn new(mark: TapMark) -> Self {
        Self {
            stream: TapStream::new(mark),
            batch: TapBatch::default(),
            open: Transaction::default(),
            all: Vec::new(),
        }
    }

    fn event(open: &mut Transaction, all: &mut Vec<Option<Transaction>>, event: Tapped<'_>) {
        match event {
            Tapped::Lost(count) => all.extend((0..count).map(|_| None)),
            Tapped::Begin => *open = Transaction::default(),
            Tapped::Request { bytes, .. } => open.requests.extend_from_slice(bytes),
            Tapped::Response { bytes, .. } => open.responses.extend_from_slice(bytes),
            Tapped::End => all.push(Some(std::mem::take(open))),
            Tapped::Broken => all.push(None),
        }
    }

    fn read(&mut self, rig: &Rig) {
        rig.dp.drain_taps(&mut Vec::new()).unwrap();
        rig.dp.take_taps(READER, &mut self.batch);
        let Self { stream, batch, open, all } = self;
        for record in batch.iter() {
            stream.record(&record, |event| Self::event(open, all, event));
        }
    }

    /// Takes the client, and says where the tap left it.
    fn take(&mut self, rig: &Rig, client: &Client) -> TapTaken {
        rig.take(client);
        eventually("the ring is read", || rig.dp.sort_taps().unwrap());
        self.read(rig);
        let mark = rig.dp.tap_mark_of(client.slot).unwrap();
        let Self { stream, open, all, .. } = self;
        stream.taken(mark, |event| Self::event(open, all, event))
    }
}

/// A client in the kernel's hands whose traffic is told.
fn tapped_client(rig: &Rig) -> (Client, Told) {
    let c = rig.held_client(rig.pool, 1);
    let told = Told::new(rig.dp.set_client_tap(c.slot, Some(READER)).unwrap());
    assert_eq!(rig.dp.give_client(c.slot, 0).unwrap(), Give::Done);
    (c, told)
}

/// One request and its answer, both through the lane.
fn ask(c: &mut Client, s: &mut Server, request: &[u8], response: &[u8]) {
    send(&mut c.app, request);
    expect(&mut s.backend, request);
    send(&mut s.backend, response);
    expect(&mut c.app, response);
}

#[test]
fn what_is_told_is_what_was_forwarded() {
    on_each_lane(&config(4 << 20), |rig| {
        let ((mut c, mut told), mut s) = (tapped_client(rig), rig.server(0));
        let mut was = Vec::new();
        // Lengths around those of records: the end of a chunk, and a piece of its front.
        for length in [1, 200, 255, 256, 257, 2047, 2048, 2049, 2300, 2304, 2305, 9_000, 60_000] {
            let request = query(&"q".repeat(length));
            let response = [row(&vec![b'r'; length]), message(b'C', b"SELECT 1\0"), ready(b'I')].concat();
            ask(&mut c, &mut s, &request, &response);
            rig.expect_released(&s);
            was.push(Some(Transaction { requests: request, responses: response }));
            told.read(rig);
        }
        assert!(told.all == was, "{} transactions were told", told.all.len());
        assert_eq!(told.take(rig, &c), TapTaken::Boundary);
        assert_eq!(told.all.len(), was.len(), "nothing is lost or told twice");
    });
}

#[test]
fn a_client_that_is_taken_in_a_transaction_was_told_up_to_that_byte() {
    on_each_lane(&config(1 << 20), |rig| {
        let ((mut c, mut told), mut s) = (tapped_client(rig), rig.server(0));
        ask(&mut c, &mut s, &query("begin"), &answer(b"", b'T'));
        ask(&mut c, &mut s, &query("select 1"), &answer(b"one", b'T'));
        assert_eq!(told.take(rig, &c), TapTaken::Open);
        assert_eq!(told.open.requests, [query("begin"), query("select 1")].concat());
        assert_eq!(told.open.responses, [answer(b"", b'T'), answer(b"one", b'T')].concat());
        assert!(told.all.is_empty());
    });
}

#[test]
fn a_ring_without_room_loses_whole_transactions_and_counts_them() {
    on_each_lane(&config(4096), |rig| {
        let ((mut c, mut told), mut s) = (tapped_client(rig), rig.server(0));
        let blocks = 40;
        for i in 0..blocks {
            ask(&mut c, &mut s, &query("begin"), &answer(b"", b'T'));
            ask(&mut c, &mut s, &query(&format!("select {i}")), &answer(b"one", b'T'));
            ask(&mut c, &mut s, &query("commit"), &answer(b"", b'I'));
            rig.expect_released(&s);
            // Now and then somebody reads: what comes then has room again.
            if i % 7 == 6 {
                told.read(rig);
            }
        }
        // The last ones, of which nothing was told, are known without a take.
        let mark = rig.dp.tap_mark_of(c.slot).unwrap();
        assert!(rig.dp.sort_taps().unwrap());
        told.read(rig);
        let Told { stream, open, all, .. } = &mut told;
        stream.settle(&mark, |event| Told::event(open, all, event));
        assert_eq!(told.all.len(), blocks);
        assert_eq!(told.take(rig, &c), TapTaken::Boundary);
        assert_eq!(told.all.len(), blocks, "told and lost together are all");
        let whole: Vec<&Transaction> = told.all.iter().flatten().collect();
        assert!(!whole.is_empty() && whole.len() < blocks, "{} are whole", whole.len());
        for (i, transaction) in told.all.iter().enumerate() {
            let Some(transaction) = transaction else { continue };
            let text = format!("select {i}");
            assert_eq!(transaction.requests, [query("begin"), query(&text), query("commit")].concat());
            let responses = [answer(b"", b'T'), answer(b"one", b'T'), answer(b"", b'I')].concat();
            assert_eq!(transaction.responses, responses);
        }
    });
}

/// What is said when nothing is outstanding waits for mirrors that have not answered all before it; requests are told at once.
#[test]
fn a_request_waits_for_mirrors() {
    on_each_lane(&config(1 << 20), |rig| {
        for is_answered in [true, false] {
            let (mut c, mut s) = (rig.held_client(rig.pool, 1), rig.server(u32::from(is_answered)));
            let mut told = Told::new(rig.dp.set_client_tap(c.slot, Some(READER)).unwrap());
            rig.dp.set_mirrored(c.slot, Some(told.stream.position()), TapWaits::Statements).unwrap();
            assert_eq!(rig.dp.give_client(c.slot, 0).unwrap(), Give::Done);
            told.read(rig);
            assert!(!is_called(rig));
            send(&mut c.app, &query("begin"));
            expect(&mut s.backend, &query("begin"));
            eventually("the reader is called before the answer", || is_called(rig));
            told.read(rig);
            assert_eq!(told.open.requests, query("begin"));
            let first = told.stream.position();
            // Something is outstanding.
            send(&mut c.app, &query("select 1"));
            expect(&mut s.backend, &query("select 1"));
            told.read(rig);
            let answers = [answer(b"", b'T'), answer(b"one", b'T')].concat();
            send(&mut s.backend, &answers);
            expect(&mut c.app, &answers);
            let answered = if is_answered { told.stream.position() } else { first };
            rig.dp.set_mirrored(c.slot, Some(answered), TapWaits::Statements).unwrap();
            send(&mut c.app, &query("commit"));
            if is_answered {
                expect(&mut s.backend, &query("commit"));
                send(&mut s.backend, &answer(b"", b'I'));
                expect(&mut c.app, &answer(b"", b'I'));
                rig.expect_released(&s);
                assert_eq!(told.take(rig, &c), TapTaken::Boundary);
                assert_eq!(told.all.len(), 1);
            } else {
                assert!(rig.expect_up(&c, Reason::Mirror).server.is_some());
                assert_eq!(told.take(rig, &c), TapTaken::Open);
            }
        }
    });
}

/// Where transactions wait, what is said in one does not, and its reader is called at its end.
#[test]
fn a_transaction_waits_for_mirrors() {
    on_each_lane(&config(1 << 20), |rig| {
        for is_answered in [true, false] {
            let (mut c, mut s) = (rig.held_client(rig.pool, 1), rig.server(u32::from(is_answered)));
            let mut told = Told::new(rig.dp.set_client_tap(c.slot, Some(READER)).unwrap());
            rig.dp.set_mirrored(c.slot, Some(told.stream.position()), TapWaits::Transactions).unwrap();
            assert_eq!(rig.dp.give_client(c.slot, 0).unwrap(), Give::Done);
            told.read(rig);
            assert!(!is_called(rig));
            ask(&mut c, &mut s, &query("begin"), &answer(b"", b'T'));
            ask(&mut c, &mut s, &query("select 1"), &answer(b"one", b'T'));
            assert!(!is_called(rig), "not before its end");
            ask(&mut c, &mut s, &query("commit"), &answer(b"", b'I'));
            rig.expect_released(&s);
            eventually("the reader is called", || is_called(rig));
            told.read(rig);
            assert_eq!(told.all.len(), 1);
            if is_answered {
                let position = Some(told.stream.position());
                rig.dp.set_mirrored(c.slot, position, TapWaits::Transactions).unwrap();
                ask(&mut c, &mut s, &query("select 2"), &answer(b"two", b'I'));
                rig.expect_released(&s);
                assert_eq!(told.take(rig, &c), TapTaken::Boundary);
                assert_eq!(told.all.len(), 2);
            } else {
                send(&mut c.app, &query("select 2"));
                assert!(rig.expect_up(&c, Reason::Mirror).server.is_none());
            }
        }
    });
}

/// One that is given while its mirrors are behind is let on when they are not.
#[test]
fn a_client_may_be_given_before_its_mirrors_have_answered() {
    for waits in [TapWaits::Statements, TapWaits::Transactions] {
        on_each_lane(&config(1 << 20), |rig| {
            for is_let_on in [true, false] {
                let (mut c, mut s) = (rig.held_client(rig.pool, 1), rig.server(u32::from(is_let_on)));
                let told = Told::new(rig.dp.set_client_tap(c.slot, Some(READER)).unwrap());
                rig.dp.set_mirrored(c.slot, None, waits).unwrap();
                assert_eq!(rig.dp.give_client(c.slot, 0).unwrap(), Give::Done);
                if is_let_on {
                    rig.dp.set_mirrored(c.slot, Some(told.stream.position()), waits).unwrap();
                    ask(&mut c, &mut s, &query("select 1"), &answer(b"one", b'I'));
                    rig.expect_released(&s);
                } else {
                    send(&mut c.app, &query("select 1"));
                    assert!(rig.expect_up(&c, Reason::Mirror).server.is_none());
                }
            }
        });
    }
}

/// Whether the tap's reader is called. The record of what was just read may still be being written.
fn is_called(rig: &Rig) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(rig.dp.tap_fd().unwrap(), PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
}

#[test]
fn lanes_without_a_tap_have_none() {
    on_each_lane(&Config::default(), |rig| {
        let c = rig.held_client(rig.pool, 1);
        assert!(!rig.dp.has_tap() && rig.dp.tap_fd().is_none());
        assert!(rig.dp.set_client_tap(c.slot, Some(READER)).is_err());
    });
}

/// Writes in pieces of random lengths, so that chunks come cut anywhere but inside a request's head.
fn send_cut(to: &mut impl Write, bytes: &[u8], random: &mut StdRng) {
    let mut left = bytes;
    while !left.is_empty() {
        let cut = random.random_range(1..=left.len().min(3000));
        to.write_all(&left[..cut]).unwrap();
        left = &left[cut..];
    }
}

/// Transactions of random shape, with takes at random moments: what the lane told and what user space saw are, put together, what
/// passed between the two ends.
#[test]
fn hand_overs_lose_and_double_nothing() {
    on_each_lane(&config(1 << 20), |rig| {
        let seed = rand::random();
        println!("seed {seed}");
        let mut random = StdRng::seed_from_u64(seed);
        let ((mut c, mut told), mut s) = (tapped_client(rig), rig.server(0));
        let (mut c_read, mut s_read) = (0u64, 0u64);
        let (mut in_lane, mut taken_open) = (0, 0);
        for round in 0..300 {
            let mut was = Transaction::default();
            let statements = random.random_range(1..5);
            let take_before = random.random_bool(0.3).then(|| random.random_range(0..=statements));
            // With user space, which then runs the rest of the transaction.
            let mut up = false;
            for statement in 0..statements {
                if take_before == Some(statement) {
                    let taken = told.take(rig, &c);
                    assert_eq!(taken == TapTaken::Open, statement > 0, "round {round}: {taken:?}");
                    taken_open += usize::from(statement > 0);
                    up = true;
                }
                let status = if statement + 1 < statements { b'T' } else { b'I' };
                let request = query(&"x".repeat(random.random_range(0..4000)));
                let response = answer(&vec![b'y'; random.random_range(0..9000)], status);
                send(&mut c.app, &request);
                if up {
                    let mut bytes = vec![0; request.len()];
                    c.near.read_exact(&mut bytes).unwrap();
                    c_read += bytes.len() as u64;
                    told.open.requests.extend_from_slice(&bytes);
                    eventually("the server may be written to", || rig.dp.server_drained(s.slot).unwrap());
                    s.near.write_all(&bytes).unwrap();
                }
                expect(&mut s.backend, &request);
                if up && statement == 0 {
                    // Nobody has linked the two: user space has the server, too.
                    s.backend.write_all(&response).unwrap();
                } else {
                    send_cut(&mut s.backend, &response, &mut random);
                }
                if up {
                    let mut bytes = vec![0; response.len()];
                    s.near.read_exact(&mut bytes).unwrap();
                    s_read += bytes.len() as u64;
                    told.open.responses.extend_from_slice(&bytes);
                    eventually("the client may be written to", || rig.dp.client_drained(c.slot).unwrap());
                    c.near.write_all(&bytes).unwrap();
                }
                expect(&mut c.app, &response);
                was.requests.extend(request);
                was.responses.extend(response);
            }
            if up {
                told.all.push(Some(std::mem::take(&mut told.open)));
                rig.dp.unlink(c.slot).unwrap();
            } else {
                rig.expect_released(&s);
                in_lane += 1;
                if take_before.is_some() {
                    assert_eq!(told.take(rig, &c), TapTaken::Boundary);
                    up = true;
                }
            }
            told.read(rig);
            assert_eq!(told.all.len(), round + 1);
            assert!(told.all[round].as_ref() == Some(&was), "round {round} was told otherwise");
            if up {
                rig.events();
                eventually("the server is put back", || {
                    let _ = rig.dp.claim_server(s.slot).unwrap();
                    rig.dp.push_idle(s.slot, s_read).unwrap() == Give::Done
                });
                told.stream = TapStream::new(rig.dp.set_client_tap(c.slot, Some(READER)).unwrap());
                eventually("the client is given", || {
                    rig.dp.give_client(c.slot, c_read).unwrap() == Give::Done
                });
            }
        }
        // A tenth of the rounds, by chance: a quarter of that is never missed.
        assert!(in_lane > 100 && taken_open > 7, "{in_lane} in the lane, {taken_open} taken in the middle");
    });
}
