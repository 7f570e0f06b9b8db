// SPDX-License-Identifier: Apache-2.0
//! Lanes A and B: a client that is reset, an application that closes its socket, at the moment when the answer is sent. The program has released the
//! server, then the kernel refuses the bytes, and the backend's `send()` fails: PostgreSQL ends. Nobody may be linked to that server any more.
#![allow(clippy::unwrap_used, reason = "a test")]

mod common;

use std::io::Write as _;
use std::net::TcpStream;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use common::ends::{Client, Rig, Server, on_each_lane};
use common::{answer, eventually, expect, message, pair, query, send};
use rustix::net::sockopt::set_socket_linger;
use underpass_sockmap::{Config, Counter, Give, Lane, LaneChoice, Reason, ServerSlot, ServerSpec};

/// As `close()` does with unread bytes or SO_LINGER 0.
fn reset(socket: TcpStream) {
    set_socket_linger(&socket, Some(Duration::ZERO)).unwrap();
    drop(socket);
}

/// The client leaves; the server that is to be closed for it.
fn leave(rig: &Rig, client: &Client) -> Option<ServerSlot> {
    rig.take(client);
    rig.dp.unlink(client.slot).unwrap();
    rig.dp.free_client(client.slot).unwrap()
}

#[test]
fn a_server_whose_answer_was_lost_is_given_to_nobody() {
    on_each_lane(&Config::default(), |rig| {
        if rig.lane != Lane::A {
            return;
        }
        let (mut first, mut second, mut server) = (rig.client(), rig.client(), rig.server(0));
        send(&mut first.app, &query("a"));
        expect(&mut server.backend, &query("a"));
        server.backend.write_all(&answer(b"a", b'I')).unwrap();
        expect(&mut first.app, &answer(b"a", b'I'));
        rig.expect_released(&server);

        // As if the answer had been 10 bytes longer than what the socket took.
        rig.take(&first);
        assert_eq!(rig.dp.give_client_before(first.slot, 0, 10).unwrap(), Give::Done);
        send(&mut second.app, &query("b"));
        expect(&mut server.backend, &query("b"));
        server.backend.write_all(&answer(b"b", b'I')).unwrap();
        expect(&mut second.app, &answer(b"b", b'I'));
        println!("a client that lives may still take its answer: its last server is free");

        rig.expect_released(&server);
        rig.take(&second);
        assert_eq!(rig.dp.give_client_before(second.slot, 0, 10).unwrap(), Give::Done);
        reset(second.app);
        eventually("the reset came", || second.near.take_error().is_ok_and(|error| error.is_some()));
        rig.events();
        rig.take(&first);
        assert_eq!(rig.dp.give_client(first.slot, 0).unwrap(), Give::Done);
        send(&mut first.app, &query("c"));
        let taken = rig.expect_up(&first, Reason::Unfit);
        assert_eq!(taken.server, None, "a program linked a server that ends");
        assert_eq!(rig.dp.pop_idle(rig.pool, None).unwrap(), None, "user space took a server that ends");
    });
}

/// Lane B: its answer lies in the socket of an application that ends without a word. Nobody can tell whether the backend could send it.
#[test]
fn a_server_whose_direct_answer_may_be_lost_is_given_to_nobody() {
    on_each_lane(&Config::default(), |rig| {
        if rig.lane != Lane::B {
            return;
        }
        let asked = |client: &mut Client, server: &mut Server| {
            let before = rig.dp.counter(Counter::ResponsesB);
            send(&mut client.app, &query("a"));
            expect(&mut server.backend, &query("a"));
            server.backend.write_all(&answer(b"a", b'I')).unwrap();
            rig.expect_released(server);
            assert_eq!(rig.dp.counter(Counter::ResponsesB), before + 1, "not straight");
        };
        let mut server = rig.server(0);
        let (mut first, mut other) = (rig.client(), rig.client());
        asked(&mut first, &mut server);
        let Client { app, near, slot } = first;
        let first = Client { app: near.try_clone().unwrap(), near, slot };
        drop(app);
        assert_eq!(rig.dp.pop_idle(rig.pool, None).unwrap(), None, "user space took it");
        rig.events();
        send(&mut other.app, &query("b"));
        assert_eq!(rig.expect_up(&other, Reason::Unfit).server, None, "a program took it");
        assert_eq!(leave(rig, &first), Some(server.slot), "it is to be closed");
        assert!(rig.dp.idle_ordinals(rig.pool).unwrap().is_empty());
        rig.dp.free_server(server.slot).unwrap();
        leave(rig, &other);
        // A socket that is open has its place in the map, and on a busy machine the slot may be due again.
        drop((first, other, server));

        println!("one that took its leave had its answer");
        let (mut server, mut polite) = (rig.server(1), rig.client());
        asked(&mut polite, &mut server);
        rig.events();
        send(&mut polite.app, &message(b'X', b""));
        rig.expect_up(&polite, Reason::Terminate);
        let Client { app, near, slot } = polite;
        drop(app);
        assert_eq!(leave(rig, &Client { app: near.try_clone().unwrap(), near, slot }), None);
        assert_eq!(rig.dp.pop_idle(rig.pool, None).unwrap(), Some(server.slot));
        rig.dp.free_server(server.slot).unwrap();

        println!("a backend that has not ended for a second is alive");
        let (mut server, mut silent) = (rig.server(2), rig.client());
        asked(&mut silent, &mut server);
        let Client { app, near, slot } = silent;
        drop(app);
        eventually("it is trusted again", || rig.dp.pop_idle(rig.pool, None).unwrap() == Some(server.slot));
        assert_eq!(leave(rig, &Client { app: near.try_clone().unwrap(), near, slot }), None);
    });
}

/// A backend that is busy or stopped when the pooler closes its connection: what it sends later is nobody's, whatever lane the next server has.
#[test]
fn a_slot_rests_for_as_long_as_its_backend_has_its_socket() {
    on_each_lane(&Config::default(), |rig| {
        for (old, new, choice) in
            [(0, 1, LaneChoice::Remote), (2, 3, LaneChoice::Local { backend_pid: Some(std::process::id()) })]
        {
            println!("the next one is {choice:?}");
            let Server { near, backend: mut busy, slot } = rig.server(old);
            assert_eq!(rig.dp.pop_idle(rig.pool, None).unwrap(), Some(slot));
            rig.dp.free_server(slot).unwrap();
            drop(near);
            std::thread::sleep(Duration::from_millis(150));
            let (near, mut backend) = pair();
            let spec = ServerSpec { pool: rig.pool, ordinal: new, fingerprint: 1, lane: choice };
            let (slot, _) = rig.dp.register_server(near.as_fd(), &spec).unwrap();
            assert_eq!(rig.dp.push_idle(slot, 0).unwrap(), Give::Done);
            let mut client = rig.client();
            send(&mut client.app, &query("a"));
            expect(&mut backend, &query("a"));
            busy.write_all(&answer(b"late", b'I')).unwrap();
            backend.write_all(&answer(b"a", b'I')).unwrap();
            expect(&mut client.app, &answer(b"a", b'I'));
            eventually("the server is released", || rig.dp.server_peer(slot).unwrap().is_none());
            assert_eq!(rig.dp.pop_idle(rig.pool, None).unwrap(), Some(slot));
            rig.dp.free_server(slot).unwrap();
            leave(rig, &client);
        }
    });
}

/// Resets race with answers until some have hit the moment, which `send()` itself tells. Programs stop there now and then: without that a busy machine
/// may not find it in a minute.
#[test]
fn resets_at_the_moment_of_the_answer() {
    on_each_lane(&Config { stall_rounds: 20_000, ..Config::default() }, |rig| {
        if rig.lane == Lane::D {
            return;
        }
        let (lost, tries) = race(rig);
        println!("{lost} answers lost in {tries} tries");
        assert!(lost > 0, "no reset has hit the moment");
    });
}

/// Hits after which it is enough, and the longest time to wait for them.
const ENOUGH: u32 = 5;
const PATIENCE: Duration = Duration::from_secs(60);

/// A server answers while its client is reset, so many turns of an empty loop later, or sooner. What becomes of the answer.
fn collide(server: &mut Server, app: TcpStream, delay: i32) -> std::io::Result<()> {
    let ready = AtomicU32::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            set_socket_linger(&app, Some(Duration::ZERO)).unwrap();
            ready.store(1, Ordering::SeqCst);
            for _ in 0..delay {
                std::hint::spin_loop();
            }
            drop(app);
        });
        while ready.load(Ordering::SeqCst) == 0 {
            std::hint::spin_loop();
        }
        for _ in 0..-delay {
            std::hint::spin_loop();
        }
        server.backend.write_all(&answer(b"q", b'I'))
    })
}

/// Answers that were lost when the server had been released already, of how many tries.
fn race(rig: &Rig) -> (u32, u32) {
    let begun = Instant::now();
    let (mut lost, mut tries, mut ordinal) = (0, 0u32, 0);
    // By how many turns of an empty loop the reset waits for the answer, or the answer for the reset: goes to and fro over the moment.
    let mut delay = 0i32;
    let mut server = rig.server(ordinal);
    while lost < ENOUGH && begun.elapsed() < PATIENCE {
        tries += 1;
        let mut client = rig.client();
        send(&mut client.app, &query("q"));
        expect(&mut server.backend, &query("q"));
        let outcome = collide(&mut server, client.app, delay);
        client = Client { app: client.near.try_clone().unwrap(), ..client };
        let is_released = rig.dp.server_peer(server.slot).unwrap().is_none();
        let is_idle = !rig.dp.idle_ordinals(rig.pool).unwrap().is_empty();
        let step = (tries % 7 + 1) as i32;
        // The answer was there before the reset, or the reset before it.
        delay += if outcome.is_ok() && is_idle { -step } else { step };
        if outcome.is_err() && is_released && is_idle {
            lost += 1;
            assert_eq!(rig.dp.pop_idle(rig.pool, None).unwrap(), None, "before the client left");
            leave(rig, &client);
            assert_eq!(rig.dp.pop_idle(rig.pool, None).unwrap(), None, "after the client left");
            rig.dp.take_idle(server.slot).unwrap();
        } else {
            // Lane B cannot tell an answer that was delivered from one that was not.
            let is_usable = leave(rig, &client).is_none() && outcome.is_ok() && is_idle;
            assert!(!is_usable || rig.dp.pop_idle(rig.pool, None).unwrap().is_some());
        }
        rig.events();
        // A fresh server for each try: user space may have this one, or half of its answer.
        eventually("it can be claimed", || {
            !matches!(rig.dp.claim_server(server.slot).unwrap(), underpass_sockmap::Claim::Busy)
        });
        rig.dp.free_server(server.slot).unwrap();
        ordinal = (ordinal + 1) % 8;
        server = rig.server(ordinal);
    }
    (lost, tries)
}

/// The same with somebody waiting, whose request goes in front of the answer: a backend whose `send()` failed has not read it, so it is said again to
/// another one; what has been read is not.
#[test]
fn what_was_brought_along_with_a_lost_answer_is_said_again() {
    on_each_lane(&Config { stall_rounds: 20_000, ..Config::default() }, |rig| {
        if rig.lane != Lane::A {
            return;
        }
        rig.dp.set_pool_keeps(rig.pool, true).unwrap();
        let (begun, mut delay, mut tries) = (Instant::now(), 0i32, 0u32);
        // With the client that was reset still there when the other one is taken, and without it.
        let mut hits = [0, 0];
        while hits.iter().any(|&hits| hits < ENOUGH) && begun.elapsed() < PATIENCE {
            tries += 1;
            let (mut server, mut client, mut waits) = (rig.server(tries % 8), rig.client(), rig.client());
            send(&mut client.app, &query("q"));
            expect(&mut server.backend, &query("q"));
            send(&mut waits.app, &query("next"));
            let info = || rig.dp.client_info(waits.slot).unwrap();
            eventually("kept", || info().kept_since_ns.is_some());
            let outcome = collide(&mut server, client.app, delay);
            client.app = client.near.try_clone().unwrap();
            let is_handed = info().server.is_some();
            let step = (tries % 7 + 1) as i32;
            delay += if outcome.is_ok() && is_handed { -step } else { step };
            let is_hit = outcome.is_err() && is_handed;
            if is_handed && outcome.is_ok() {
                expect(&mut server.backend, &query("next"));
            }
            drop(server.backend);
            let stays = hits[1] < hits[0];
            if !stays {
                leave(rig, &client);
            }
            let taken = rig.take(&waits);
            match (is_hit, is_handed) {
                (true, _) => {
                    hits[usize::from(stays)] += 1;
                    assert_eq!(taken.kept.map(|kept| kept.bytes), Some(query("next")), "stays: {stays}");
                    assert_eq!(taken.server, None);
                }
                (false, true) => assert_eq!((taken.kept, taken.server), (None, Some(server.slot))),
                (false, false) => assert_eq!(taken.kept.map(|kept| kept.bytes), Some(query("next"))),
            }
            if stays {
                leave(rig, &client);
            }
            leave(rig, &waits);
            rig.events();
            eventually("it can be claimed", || {
                !matches!(rig.dp.claim_server(server.slot).unwrap(), underpass_sockmap::Claim::Busy)
            });
            rig.dp.free_server(server.slot).unwrap();
        }
        println!("{hits:?} answers lost in {tries} tries");
        assert!(hits.iter().all(|&hits| hits > 0), "no reset has hit the moment");
    });
}
