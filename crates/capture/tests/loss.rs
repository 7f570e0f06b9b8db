// SPDX-License-Identifier: Apache-2.0
//! A ring that is far too small: what is missing is said exactly, what is there is true, and the server does not notice.

mod common;

use std::time::{Duration, Instant};

use common::{Capture, Setup, assert_tiles, lacking, skipped};
use underpass_capture::{Accounts, Probes};
use underpass_testkit::{Batch, Client, Options, Postgres};
use underpass_trace::{Direction, Level, LossReason};

#[test]
fn losses_of_a_full_ring_are_the_holes_of_the_trace_exactly() {
    if skipped() {
        return;
    }
    let postgres = Postgres::start().expect("a server");
    let setup = Setup { level: Level::Full, ring_bytes: 1, ..Setup::default() };
    overflow(&postgres, &postgres.options("postgres", "postgres"), &setup);
}

/// What the probes of `secure_read` and `secure_write` count is what these returned.
#[test]
fn losses_of_a_full_ring_of_the_probes_are_the_holes_exactly() {
    if skipped() {
        return;
    }
    let postgres = Postgres::start().expect("a server");
    // Reading in small pieces, the server is slower than the recorder, but for its pauses.
    let stall = Duration::from_millis(700);
    let (level, probes, packets) = (Level::Full, Probes::Always, false);
    let setup = Setup { level, probes, packets, ring_bytes: 1, stall };
    overflow(&postgres, &postgres.superuser(), &setup);
}

fn overflow(postgres: &Postgres, options: &Options, setup: &Setup) {
    let capture = Capture::start(postgres, setup);
    let options = options.clone().parameter("application_name", "burst");
    let mut client = Client::connect(&options).expect("connect");
    let mut sent = Vec::new();
    let mut said = Vec::new();
    let mut answered = 0;
    // As long as it takes for a pause of the recorder to be among it, if it makes pauses.
    let shortest = if setup.stall.is_zero() { Duration::ZERO } else { Duration::from_millis(2500) };
    let begun = Instant::now();
    let mut round = 0;
    while round < 40 || begun.elapsed() < shortest {
        round += 1;
        let small = Batch::new().query(&format!("select {round}"));
        let large = Batch::new().query(&format!("select length('{}')", "z".repeat(2_000_000 + round)));
        let rows = Batch::new().query("select repeat('y', 1000) from generate_series(1, 2000)");
        for batch in [&small, &large, &rows, &small] {
            client.send(batch).expect("send");
            sent.extend_from_slice(batch.as_bytes());
            for message in client.response().expect("the server answers").messages {
                said.push(message.tag);
                said.extend_from_slice(&(message.body.len() as u32 + 4).to_be_bytes());
                said.extend_from_slice(&message.body);
            }
            answered += 1;
        }
    }
    client.terminate().expect("terminate");
    sent.extend_from_slice(Batch::new().terminate().as_bytes());
    let trace = capture.end();
    let session = trace.session("burst");
    assert!(!trace.summary.lossless());
    let notes = &trace.summary.notes;
    assert!(notes.iter().any(|note| note.contains("--ring-size")), "why, and what helps: {notes:?}");

    // What is in the trace was sent, at that place.
    let starts = trace.starts();
    let start = starts.iter().find(|s| s.session == session).expect("start");
    let (login, greeted) = (start.frontend_offset, start.backend_offset);
    for message in trace.frontends(session) {
        let at = (message.offset - login) as usize;
        assert!(sent[at..].starts_with(&message.message), "a message that was not sent at {at}");
    }
    // Recorded and missing together are everything, once.
    let mut parts: Vec<(u64, u64)> =
        trace.frontends(session).iter().map(|f| (f.offset, f.wire_len)).collect();
    parts.extend(lacking(&trace, session, Direction::Frontend));
    assert_tiles(parts, login, login + sent.len() as u64);
    // The same of what the server said, behind the login.
    let mut parts: Vec<(u64, u64)> = lacking(&trace, session, Direction::Backend);
    for message in trace.backends(session).iter().filter(|message| message.offset >= greeted) {
        let at = (message.offset - greeted) as usize;
        assert!(said[at..].starts_with(&message.message), "a message that was not said at {at}");
        parts.push((message.offset, message.message.len() as u64));
    }
    assert_tiles(parts, greeted, greeted + said.len() as u64);
    // The holes are what the kernel counted as lost, but for what passed the hook twice: a client that sends faster than the server
    // reads has its segments refused by the socket behind the hook, and sends them again. One of the two may have been recorded.
    let accounts = trace.summary.accounts.clone();
    for direction in [Direction::Frontend, Direction::Backend] {
        let sum = |what: fn(&Accounts) -> u64| -> u64 {
            accounts.iter().filter(|(_, way, _)| *way == direction).map(|(_, _, a)| what(a)).sum()
        };
        let (counted, again) = (sum(Accounts::missing), sum(|a| a.again.bytes));
        let told: u64 = trace
            .losses()
            .iter()
            .filter(|l| l.direction == direction && l.reason != LossReason::Resync)
            .map(|l| l.len)
            .sum();
        assert!(counted > 0, "the ring was large enough: {accounts:?}");
        assert!(told <= counted && counted - told <= again, "{direction:?}: {told}, {counted}, {again}");
        assert!(setup.packets || again == 0, "nothing is sent again by calls: {again}");
    }
    for end in trace.ends() {
        assert!(end.frontend.add_up() && end.backend.add_up(), "{end:?}");
    }
    // Every request is answered in the trace or not at all, never by another's answer.
    let outcomes = trace.outcomes(session);
    assert!(outcomes.len() <= answered);
    for (told, rows) in outcomes {
        assert!(
            told == "Unknown" || told == "SELECT 1" && rows <= 1 || told == "SELECT 2000",
            "{told} {rows}"
        );
    }
}

/// Answers of which only the tails are taken: when such an event is lost, what it left out is a part of the hole.
#[test]
fn losses_are_the_holes_of_a_summary_too() {
    if skipped() {
        return;
    }
    let postgres = Postgres::start().expect("a server");
    // However fast it reads otherwise.
    let stall = Duration::from_millis(700);
    let capture = Capture::start(&postgres, &Setup { ring_bytes: 1, stall, ..Setup::default() });
    let mut clients: Vec<Client> = (0..8)
        .map(|_| Client::connect(&postgres.options("postgres", "postgres")).expect("connect"))
        .collect();
    let batch = Batch::new().query("select repeat('y', 1000) from generate_series(1, 20000)");
    for _ in 0..5 {
        for client in &mut clients {
            client.send(&batch).expect("send");
        }
        for client in &mut clients {
            client.response().expect("the server answers");
        }
    }
    drop(clients);
    let trace = capture.end();
    let mut missing = 0;
    let mut again = 0;
    for (_, direction, accounts) in &trace.summary.accounts {
        assert!(accounts.add_up(), "{accounts:?}");
        if *direction == Direction::Backend {
            missing += accounts.missing();
            again += accounts.again.bytes;
        }
    }
    let told: u64 = trace
        .losses()
        .iter()
        .filter(|l| l.direction == Direction::Backend && l.reason != LossReason::Resync)
        .map(|l| l.len)
        .sum();
    assert!(missing > 0, "the ring was large enough");
    assert!(told <= missing && missing - told <= again, "told {told}, counted {missing}, again {again}");
}

#[test]
fn many_sessions_at_full_load_are_complete() {
    if skipped() {
        return;
    }
    let postgres = Postgres::start().expect("a server");
    let capture = Capture::start(&postgres, &Setup::default());
    let threads: Vec<_> = (0..8)
        .map(|n| {
            let options = postgres
                .options("postgres", "postgres")
                .parameter("application_name", &format!("client {n}"));
            std::thread::spawn(move || {
                let mut client = Client::connect(&options).expect("connect");
                let mut sent = Vec::new();
                for round in 0..1500 {
                    let batch = if round % 2 == 0 {
                        Batch::new().query(&format!("select {n}, {round}"))
                    } else {
                        Batch::new().extended("select $1::int + $2::int", &[Some("1"), Some("2")]).sync()
                    };
                    client.send(&batch).expect("send");
                    sent.extend_from_slice(batch.as_bytes());
                    client.response().expect("an answer");
                }
                client.terminate().expect("terminate");
                sent.extend_from_slice(Batch::new().terminate().as_bytes());
                sent
            })
        })
        .collect();
    let sent: Vec<Vec<u8>> = threads.into_iter().map(|t| t.join().expect("a client")).collect();
    let trace = capture.end();
    trace.assert_lossless();
    // The kernel's own counts at the close of each socket, which know nothing of the hooks, are the same.
    assert!(trace.ends().len() >= 8);
    for end in trace.ends() {
        assert_eq!(
            (end.frontend.audited, end.backend.audited),
            (Some(end.frontend.seen), Some(end.backend.seen))
        );
    }
    for (n, sent) in sent.iter().enumerate() {
        let session = trace.session(&format!("client {n}"));
        assert!(trace.sent(session) == *sent, "client {n}");
        assert_eq!(trace.outcomes(session).len(), 1500);
    }
}
