// SPDX-License-Identifier: Apache-2.0
//! The queue that programs keep: who waits for a server, in which order, and who brings the request to it.

mod common;

use common::ends::{Client, Rig, Server};
use common::{answer, eventually, expect, expect_silence, extended, message, open, query, send};
use underpass_sockmap::{Config, Counter, Event, Give, Lane, Reason, TransactionStatus};

/// Runs a test on the lanes whose backends bring requests along.
fn on_each_lane(test: impl Fn(&Rig)) {
    for lane in [Lane::A, Lane::B] {
        let config = Config { applications: lane == Lane::B, ..Config::default() };
        let Some(dp) = open(&config) else { return };
        let pool = dp.add_pool().unwrap();
        dp.set_pool_keeps(pool, true).unwrap();
        println!("-- lane {lane:?}");
        test(&Rig { dp, pool, lane });
    }
}

fn is_kept(rig: &Rig, c: &Client) -> bool {
    rig.dp.client_info(c.slot).unwrap().kept_since_ns.is_some()
}

/// Says something that is kept.
fn wait(rig: &Rig, c: &mut Client, request: &[u8]) {
    send(&mut c.app, request);
    eventually("kept", || is_kept(rig, c));
}

fn text(number: usize) -> String {
    format!("select {number}")
}

fn reply(number: usize) -> Vec<u8> {
    answer(format!("row {number}").as_bytes(), b'I')
}

/// A server that a client has taken.
fn busy(rig: &Rig) -> (Server, Client) {
    let mut s = rig.server(0);
    let mut c = rig.client();
    send(&mut c.app, &query("busy"));
    expect(&mut s.backend, &query("busy"));
    (s, c)
}

fn finish(s: &mut Server, c: &mut Client) {
    send(&mut s.backend, &answer(b"busy", b'I'));
    expect(&mut c.app, &answer(b"busy", b'I'));
}

#[test]
fn a_backend_brings_the_next_request_along() {
    on_each_lane(|rig| {
        let (mut s, mut first) = busy(rig);
        let mut waiting: Vec<Client> = (0..5).map(|_| rig.client()).collect();
        // Of every length from a few bytes on, so that each way to the end of the last word is taken.
        for round in 0..40 {
            let said = |number: usize| query(&format!("{}{}", text(number), "x".repeat(round)));
            for (number, c) in waiting.iter_mut().enumerate() {
                wait(rig, c, &said(number));
            }
            assert_eq!(rig.dp.queue_length(rig.pool).unwrap(), 5);
            finish(&mut s, &mut first);
            for (number, c) in waiting.iter_mut().enumerate() {
                expect(&mut s.backend, &said(number));
                assert!(!is_kept(rig, c));
                assert_eq!(rig.dp.client_info(c.slot).unwrap().server, Some(s.slot));
                send(&mut s.backend, &reply(number));
                expect(&mut c.app, &reply(number));
            }
            rig.expect_released(&s);
            assert_eq!(rig.events(), []);
            send(&mut first.app, &query("busy"));
            expect(&mut s.backend, &query("busy"));
        }
        assert_eq!(rig.dp.counter(Counter::HandedOn), 200);
        assert_eq!(rig.dp.counter(Counter::Kept), 200);
        let stats = rig.dp.client_info(waiting[3].slot).unwrap().stats;
        assert_eq!((stats.waits, stats.xacts, stats.queries), (40, 40, 40));
        assert!(stats.wait_ns > 0);
        expect_silence(&mut s.near);
    });
}

#[test]
fn a_long_request_and_a_whole_pipeline_are_kept_and_what_is_not_whole_is_not() {
    on_each_lane(|rig| {
        let (mut s, mut first) = busy(rig);
        let mut c = rig.client();
        let longest = query(&"y".repeat(1024 - 6));
        assert_eq!(longest.len(), 1024);
        wait(rig, &mut c, &longest);
        let mut other = rig.client();
        let two = [extended("select 1"), message(b'S', b""), query("select 2")].concat();
        wait(rig, &mut other, &two);
        finish(&mut s, &mut first);
        expect(&mut s.backend, &longest);
        send(&mut s.backend, &reply(1));
        expect(&mut c.app, &reply(1));
        expect(&mut s.backend, &two);
        let link = rig.dp.client_info(other.slot).unwrap().link;
        assert_eq!((link.pending, link.status), (2, TransactionStatus::Idle));
        send(&mut s.backend, &answer(b"1", b'T'));
        expect(&mut other.app, &answer(b"1", b'T'));
        // Its transaction goes on, so nobody is next.
        wait(rig, &mut c, &query("next"));
        send(&mut s.backend, &answer(b"2", b'I'));
        expect(&mut other.app, &answer(b"2", b'I'));
        expect(&mut s.backend, &query("next"));
        // Longer by a byte.
        let longer = query(&"y".repeat(1024 - 5));
        send(&mut other.app, &longer);
        let taken = rig.expect_up(&other, Reason::NoServer);
        assert_eq!(taken.kept, None);
        expect(&mut other.near, &longer);
        // Without its end.
        let half = &query("half of it")[..10];
        send(&mut first.app, half);
        let taken = rig.expect_up(&first, Reason::NoServer);
        assert_eq!(taken.kept, None);
        expect(&mut first.near, half);
    });
}

#[test]
fn a_client_that_is_taken_brings_its_request_and_the_next_one_has_its_turn() {
    on_each_lane(|rig| {
        let (mut s, mut first) = busy(rig);
        let (mut a, mut b) = (rig.client(), rig.client());
        wait(rig, &mut a, &query("a"));
        wait(rig, &mut b, &query("b"));
        let taken = rig.take(&a);
        assert_eq!(taken.kept.map(|kept| kept.bytes), Some(query("a")));
        assert_eq!((taken.server, taken.ended), (None, None));
        assert_eq!(rig.take(&a).kept, None, "told once");
        assert_eq!(rig.dp.client_info(a.slot).unwrap().stats.request_bytes, 0, "user space has it");
        // It comes back and waits again, at the end.
        assert_eq!(rig.dp.give_client(a.slot, 0).unwrap(), Give::Done);
        wait(rig, &mut a, &query("again"));
        finish(&mut s, &mut first);
        for (c, said) in [(&mut b, "b"), (&mut a, "again")] {
            expect(&mut s.backend, &query(said));
            send(&mut s.backend, &reply(7));
            expect(&mut c.app, &reply(7));
        }
        rig.expect_released(&s);
        assert_eq!(rig.dp.queue_length(rig.pool).unwrap(), 0);
    });
}

#[test]
fn who_says_more_while_it_waits_goes_up_with_all_of_it() {
    on_each_lane(|rig| {
        let (mut s, mut first) = busy(rig);
        let mut c = rig.client();
        wait(rig, &mut c, &query("one"));
        send(&mut c.app, &query("two"));
        let taken = rig.expect_up(&c, Reason::Waiters);
        assert_eq!(taken.kept.map(|kept| kept.bytes), Some(query("one")));
        expect(&mut c.near, &query("two"));
        finish(&mut s, &mut first);
        rig.expect_released(&s);
        expect_silence(&mut s.backend);
        // The same where a server is idle by then.
        let mut c = rig.client();
        send(&mut first.app, &query("busy"));
        expect(&mut s.backend, &query("busy"));
        wait(rig, &mut c, &query("one"));
        rig.dp.set_waiters(rig.pool, 1).unwrap();
        finish(&mut s, &mut first);
        rig.expect_released(&s);
        rig.dp.set_waiters(rig.pool, 0).unwrap();
        rig.events();
        send(&mut c.app, &query("two"));
        let taken = rig.expect_up(&c, Reason::Waiters);
        assert_eq!(taken.kept.map(|kept| kept.bytes), Some(query("one")));
        expect_silence(&mut s.backend);
    });
}

#[test]
fn names_of_statements_become_the_servers_and_who_lacks_one_goes_up() {
    on_each_lane(|rig| {
        let held = rig.held_server(rig.pool, 0, 1);
        rig.dp.set_server_statement(held.slot, 5, b"XX_5").unwrap();
        assert_eq!(rig.dp.push_idle(held.slot, 0).unwrap(), Give::Done);
        let mut s = held;
        let mut first = rig.client();
        send(&mut first.app, &query("busy"));
        expect(&mut s.backend, &query("busy"));
        let mut prepared: Vec<Client> = [5, 6, 5]
            .into_iter()
            .map(|statement| {
                let c = rig.held_client(rig.pool, 1);
                rig.dp.set_client_statement(c.slot, b"P0_1", statement).unwrap();
                assert_eq!(rig.dp.give_client(c.slot, 0).unwrap(), Give::Done);
                c
            })
            .collect();
        let bind = |name: &[u8]| {
            let bound = message(b'B', &[b"\0", name, b"\0\0\0\0\0\0\0"].concat());
            [bound, message(b'E', b"\0\0\0\0\0"), message(b'S', b"")].concat()
        };
        for c in &mut prepared {
            wait(rig, c, &bind(b"P0_1"));
        }
        finish(&mut s, &mut first);
        expect(&mut s.backend, &bind(b"XX_5"));
        send(&mut s.backend, &reply(0));
        expect(&mut prepared[0].app, &reply(0));
        let taken = rig.dp.take(prepared[1].slot);
        drop(taken);
        rig.expect_released(&s);
        let mut events = rig.events();
        events.sort_by_key(|event| format!("{event:?}"));
        assert!(matches!(
            events[..],
            [Event::PoolIdle { .. }] | [Event::ClientUp { .. }, Event::PoolIdle { .. }]
        ));
        // User space brings the third one to the server.
        assert_eq!(rig.dp.serve_queue(rig.pool).unwrap(), []);
        expect(&mut s.backend, &bind(b"XX_5"));
        send(&mut s.backend, &reply(2));
        expect(&mut prepared[2].app, &reply(2));
        rig.expect_released(&s);
    });
}

#[test]
fn a_server_with_other_parameters_is_not_for_whoever_waits() {
    on_each_lane(|rig| {
        let (mut s, mut first) = busy(rig);
        let mut c = rig.held_client(rig.pool, 2);
        assert_eq!(rig.dp.give_client(c.slot, 0).unwrap(), Give::Done);
        wait(rig, &mut c, &query("mine"));
        finish(&mut s, &mut first);
        rig.expect_released(&s);
        let events = rig.events();
        assert!(events.contains(&Event::ClientUp { client: c.slot, reason: Reason::Unfit }), "{events:?}");
        assert_eq!(rig.take(&c).kept.map(|kept| kept.bytes), Some(query("mine")));
        // The same found by user space.
        assert_eq!(rig.dp.give_client(c.slot, 0).unwrap(), Give::Done);
        send(&mut first.app, &query("busy"));
        expect(&mut s.backend, &query("busy"));
        wait(rig, &mut c, &query("mine"));
        rig.dp.set_waiters(rig.pool, 1).unwrap();
        finish(&mut s, &mut first);
        rig.expect_released(&s);
        rig.dp.set_waiters(rig.pool, 0).unwrap();
        assert_eq!(rig.dp.serve_queue(rig.pool).unwrap(), [c.slot]);
        assert_eq!(rig.take(&c).kept.map(|kept| kept.bytes), Some(query("mine")));
        expect_silence(&mut s.backend);
    });
}

#[test]
fn those_who_wait_in_user_space_go_first() {
    on_each_lane(|rig| {
        let (mut s, mut first) = busy(rig);
        rig.dp.set_waiters(rig.pool, 1).unwrap();
        let (mut a, mut b) = (rig.client(), rig.client());
        wait(rig, &mut a, &query("a"));
        wait(rig, &mut b, &query("b"));
        finish(&mut s, &mut first);
        rig.expect_released(&s);
        assert_eq!(rig.events(), [Event::PoolIdle { pool: rig.pool }]);
        assert_eq!(rig.dp.serve_queue(rig.pool).unwrap(), []);
        expect_silence(&mut s.backend);
        // User space has served its own, and puts the server back.
        rig.dp.set_waiters(rig.pool, 0).unwrap();
        assert_eq!(rig.dp.serve_queue(rig.pool).unwrap(), []);
        expect(&mut s.backend, &query("a"));
        assert_eq!(rig.dp.client_info(a.slot).unwrap().stats.waits, 1);
        send(&mut s.backend, &reply(1));
        expect(&mut a.app, &reply(1));
        expect(&mut s.backend, &query("b"));
        send(&mut s.backend, &reply(2));
        expect(&mut b.app, &reply(2));
        rig.expect_released(&s);
    });
}

#[test]
fn a_pool_that_closes_or_keeps_none_any_more_hands_nothing_on() {
    on_each_lane(|rig| {
        let (mut s, mut first) = busy(rig);
        let (mut a, mut b) = (rig.client(), rig.client());
        wait(rig, &mut a, &query("a"));
        wait(rig, &mut b, &query("b"));
        rig.dp.set_pool_closed(rig.pool, true).unwrap();
        finish(&mut s, &mut first);
        rig.expect_released(&s);
        assert_eq!(rig.events(), [Event::PoolIdle { pool: rig.pool }]);
        expect_silence(&mut s.backend);
        rig.dp.set_pool_keeps(rig.pool, false).unwrap();
        assert_eq!(rig.dp.drain_queue(rig.pool).unwrap(), [a.slot, b.slot]);
        for (c, said) in [(&a, "a"), (&b, "b")] {
            assert_eq!(rig.take(c).kept.map(|kept| kept.bytes), Some(query(said)));
        }
        assert_eq!(rig.dp.queue_length(rig.pool).unwrap(), 0);
        // Open again, without a queue: no server, as ever.
        rig.dp.set_pool_closed(rig.pool, false).unwrap();
        send(&mut first.app, &query("busy"));
        expect(&mut s.backend, &query("busy"));
        let mut c = rig.client();
        send(&mut c.app, &query("c"));
        assert_eq!(rig.expect_up(&c, Reason::NoServer).kept, None);
    });
}

/// Places are known by numbers, which each pool counts for itself, and clients by slots, which are used again.
#[test]
fn the_place_of_one_who_left_is_nobodys() {
    on_each_lane(|rig| {
        let (mut s, mut first) = busy(rig);
        let mut leaves = rig.client();
        wait(rig, &mut leaves, &query("leaves"));
        assert!(rig.take(&leaves).kept.is_some());
        rig.dp.free_client(leaves.slot).unwrap();
        let index = leaves.slot.index();
        drop(leaves);
        let other = rig.dp.add_pool().unwrap();
        rig.dp.set_pool_keeps(other, true).unwrap();
        let start = std::time::Instant::now();
        let mut c = loop {
            let c = rig.held_client(other, 1);
            if c.slot.index() == index {
                break c;
            }
            assert!(start.elapsed() < common::PATIENCE, "the slot is not used again");
            std::thread::sleep(std::time::Duration::from_millis(20));
        };
        assert_eq!(rig.dp.give_client(c.slot, 0).unwrap(), Give::Done);
        wait(rig, &mut c, &query("of another database"));
        finish(&mut s, &mut first);
        rig.expect_released(&s);
        expect_silence(&mut s.backend);
        assert_eq!(rig.dp.serve_queue(rig.pool).unwrap(), []);
        assert_eq!(rig.dp.drain_queue(rig.pool).unwrap(), []);
        expect_silence(&mut s.backend);
        assert!(is_kept(rig, &c));
        assert_eq!(rig.dp.drain_queue(other).unwrap(), [c.slot]);
    });
}
