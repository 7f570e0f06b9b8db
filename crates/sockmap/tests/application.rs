// SPDX-License-Identifier: Apache-2.0
//! Lane B: what goes straight into an application's socket, and from it straight into a backend's, meets what comes by TCP, sleepers, and readers of
//! every manner.

mod common;

use std::io::Read;
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use common::ends::{Client, Rig, Server, attach};
use common::pooler::application;
use common::{answer, eventually, expect, expect_silence, open, pair, query, send};
use underpass_sockmap::{Config, Counter, Datapath, Error, Give, Lane, LaneChoice, Reason, ServerSpec};

/// A rig of lane B, whose clients have their applications attached and awake.
fn rig() -> Option<Rig> {
    let dp = open(&Config { applications: true, ..Config::default() })?;
    let pool = dp.add_pool().unwrap();
    Some(Rig { dp, pool, lane: Lane::B })
}

/// A client whose application is not attached.
fn unattached(rig: &Rig) -> Client {
    let (app, near) = pair();
    let slot = rig.dp.register_client(near.as_fd(), rig.pool, 1).unwrap();
    Client { app, near, slot }
}

fn ask(c: &mut Client, s: &mut Server) {
    send(&mut c.app, &query("q"));
    expect(&mut s.backend, &query("q"));
}

#[test]
fn a_recv_that_slept_before_hears_the_answer_and_the_next_ones_come_straight() {
    let Some(rig) = rig() else { return };
    for _ in 0..20 {
        let (mut c, mut s) = (unattached(&rig), rig.server(0));
        assert_eq!(rig.dp.give_client(c.slot, 0).unwrap(), Give::Done);
        ask(&mut c, &mut s);
        let mut app = c.app.try_clone().unwrap();
        let wanted = answer(b"row", b'I');
        let length = wanted.len();
        let sleeper = thread::spawn(move || {
            let mut got = vec![0; length];
            app.read_exact(&mut got).map(|()| got)
        });
        thread::sleep(Duration::from_millis(5));
        attach(&rig.dp, &c);
        let before = rig.dp.counter(Counter::ResponsesB);
        send(&mut s.backend, &wanted);
        assert_eq!(sleeper.join().unwrap().expect("it slept on"), wanted);
        rig.expect_released(&s);
        assert_eq!(rig.dp.counter(Counter::ResponsesB), before, "it could have slept since before");

        // Asleep in recv() or not, the next are redirected and heard.
        for _ in 0..3 {
            ask(&mut c, &mut s);
            let mut app = c.app.try_clone().unwrap();
            let sleeper = thread::spawn(move || {
                let mut got = vec![0; length];
                app.read_exact(&mut got).map(|()| got)
            });
            thread::sleep(Duration::from_millis(2));
            send(&mut s.backend, &wanted);
            assert_eq!(sleeper.join().unwrap().expect("it was not woken"), wanted);
            rig.expect_released(&s);
        }
        assert_eq!(rig.dp.counter(Counter::ResponsesB), before + 3);
        rig.take(&c);
        rig.dp.free_client(c.slot).unwrap();
        assert!(rig.dp.take_idle(s.slot).unwrap());
        rig.dp.free_server(s.slot).unwrap();
    }
}

#[test]
fn an_answer_does_not_overtake_bytes_that_came_by_tcp_and_were_not_read() {
    let Some(rig) = rig() else { return };
    let mut c = rig.held_client(rig.pool, 1);
    let mut s = rig.server(0);
    send(&mut c.near, b"unread");
    assert_eq!(rig.dp.give_client(c.slot, 0).unwrap(), Give::Done);
    for i in 0..20 {
        ask(&mut c, &mut s);
        send(&mut s.backend, &answer(format!("{i}").as_bytes(), b'I'));
        rig.expect_released(&s);
    }
    assert_eq!(rig.dp.counter(Counter::ResponsesB), 0);
    expect(&mut c.app, b"unread");
    for i in 0..20 {
        expect(&mut c.app, &answer(format!("{i}").as_bytes(), b'I'));
    }
    ask(&mut c, &mut s);
    send(&mut s.backend, &answer(b"straight", b'I'));
    expect(&mut c.app, &answer(b"straight", b'I'));
    assert_eq!(rig.dp.counter(Counter::ResponsesB), 1);
}

/// While redirected bytes are unread nothing may come by TCP: a recv() returns the former alone, and a reader that waits for edges takes the short
/// read for an empty socket.
#[test]
fn nothing_is_written_beside_unread_answers() {
    let Some(rig) = rig() else { return };
    let (mut c, mut s) = (rig.client(), rig.server(0));
    ask(&mut c, &mut s);
    let piece = common::row(&[b'x'; 8000]);
    let mut sent = 0;
    while rig.events_or_none().is_none() {
        send(&mut s.backend, &piece);
        sent += 1;
        assert!(sent < 1000, "no bound");
    }
    assert_eq!(rig.dp.reason_count(Reason::Room), 1);
    let straight = rig.dp.counter(Counter::ResponsesB);
    assert_eq!((straight, rig.dp.counter(Counter::ResponsesA)), (sent - 1, 0));
    assert!((64..=256 << 10).contains(&rig.dp.application_unread(c.slot).unwrap()));
    rig.take(&c);
    assert!(!rig.dp.client_drained(c.slot).unwrap(), "user space must wait");
    for _ in 0..straight {
        assert!(!rig.dp.client_drained(c.slot).unwrap());
        expect(&mut c.app, &piece);
    }
    eventually("all was read", || rig.dp.client_drained(c.slot).unwrap());
    expect_silence(&mut c.app);
    expect(&mut s.near, &piece);
}

/// Many small answers, each of which costs the kernel far more than its bytes.
#[test]
fn the_number_of_unread_answers_is_bounded_too() {
    let Some(rig) = rig() else { return };
    let (mut c, mut s) = (rig.client(), rig.server(0));
    let syncs: Vec<u8> = (0..2000).flat_map(|_| common::message(b'S', b"")).collect();
    send(&mut c.app, &syncs);
    expect(&mut s.backend, &syncs);
    let mut sent = 0;
    while rig.events_or_none().is_none() {
        send(&mut s.backend, &common::ready(b'I'));
        sent += 1;
        assert!(sent <= 1000, "no bound");
    }
    assert_eq!(rig.dp.counter(Counter::ResponsesB), 256);
}

/// How many chunks of requests went by TCP and the backend's worker, and how many straight.
fn requests(rig: &Rig) -> (u64, u64) {
    (rig.dp.counter(Counter::RequestsA), rig.dp.counter(Counter::RequestsB))
}

#[test]
fn requests_go_straight_when_all_that_went_by_tcp_is_decided() {
    let Some(rig) = rig() else { return };
    let (mut c, mut s) = (rig.client(), rig.server(0));
    for _ in 0..4 {
        ask(&mut c, &mut s);
        send(&mut s.backend, &answer(b"row", b'I'));
        expect(&mut c.app, &answer(b"row", b'I'));
        rig.expect_released(&s);
    }
    assert_eq!(requests(&rig), (1, 3), "the first is the first that programs know");

    // In pieces, and several before an answer.
    let two = [query("one"), query("two")].concat();
    for piece in two.chunks(7) {
        send(&mut c.app, piece);
    }
    expect(&mut s.backend, &two);
    assert_eq!(requests(&rig), (1, 6));
}

#[test]
fn behind_an_unanswered_request_another_thread_sends_by_tcp() {
    let Some(rig) = rig() else { return };
    let (mut c, mut s) = (rig.client(), rig.server(0));
    ask(&mut c, &mut s);
    send(&mut s.backend, &answer(b"row", b'I'));
    expect(&mut c.app, &answer(b"row", b'I'));
    rig.expect_released(&s);
    ask(&mut c, &mut s);
    assert_eq!(requests(&rig), (1, 1));
    let mut app = c.app.try_clone().unwrap();
    thread::spawn(move || send(&mut app, &query("q"))).join().unwrap();
    expect(&mut s.backend, &query("q"));
    assert_eq!(requests(&rig), (2, 1));
    // And what follows is behind that.
    ask(&mut c, &mut s);
    assert_eq!(requests(&rig), (3, 1));
    for _ in 0..3 {
        send(&mut s.backend, &answer(b"row", b'I'));
        expect(&mut c.app, &answer(b"row", b'I'));
    }
    rig.expect_released(&s);
    ask(&mut c, &mut s);
    assert_eq!(requests(&rig), (3, 2));
}

/// Somebody who sleeps in recv() looks like a send that is on its way: user space must not write to the backend until that is ruled out.
#[test]
fn user_space_waits_for_a_request_that_may_be_on_its_way() {
    let Some(rig) = rig() else { return };
    for sleeps in [false, true] {
        for is_answered in [false, true] {
            let (mut c, mut s) = (rig.client(), rig.server(0));
            ask(&mut c, &mut s);
            send(&mut s.backend, &answer(b"row", b'I'));
            expect(&mut c.app, &answer(b"row", b'I'));
            rig.expect_released(&s);
            let before = requests(&rig).1;
            ask(&mut c, &mut s);
            assert_eq!(requests(&rig).1, before + 1);

            let rest = answer(b"in", b'T');
            let mut app = c.app.try_clone().unwrap();
            let length = rest.len() + 1;
            let sleeper = sleeps.then(|| {
                thread::spawn(move || {
                    let mut got = vec![0; length];
                    app.read_exact(&mut got).unwrap();
                })
            });
            thread::sleep(Duration::from_millis(20));
            if is_answered {
                send(&mut s.backend, &rest);
                thread::sleep(Duration::from_millis(20));
            }
            rig.take(&c);
            let is_drained = rig.dp.server_drained(s.slot).unwrap();
            assert_eq!(is_drained, !sleeps || is_answered, "sleeps {sleeps}, answered {is_answered}");
            // The same thread sends again, so the send before is over; this one goes by TCP to user space.
            send(&mut c.app, &query("next"));
            expect(&mut c.near, &query("next"));
            assert!(rig.dp.server_drained(s.slot).unwrap());
            if !is_answered {
                send(&mut c.near, &rest);
            }
            send(&mut c.near, b"!");
            if let Some(sleeper) = sleeper {
                sleeper.join().unwrap();
            }
            drop((c, s));
            let _ = rig.events();
        }
    }
}

#[test]
fn other_sockets_and_those_that_wait_for_acknowledgements_are_refused() {
    let Some(rig) = rig() else { return };
    let (a, b) = (unattached(&rig), unattached(&rig));
    let of_b = application(b.near.as_fd()).unwrap();
    assert!(matches!(rig.dp.attach_application(a.slot, of_b.as_fd()), Err(Error::State(_))));
    a.app.set_nodelay(false).unwrap();
    let of_a = application(a.near.as_fd()).unwrap();
    assert!(matches!(rig.dp.attach_application(a.slot, of_a.as_fd()), Err(Error::State(_))));
    assert!(!rig.dp.has_application(a.slot).unwrap());
    a.app.set_nodelay(true).unwrap();
    rig.dp.attach_application(a.slot, of_a.as_fd()).unwrap();
    assert!(rig.dp.has_application(a.slot).unwrap());
}

/// Makes the application another pooler, whose program reads what comes to its socket to this one.
fn read_by_another_pooler(app: &impl AsFd) -> Datapath {
    let outer = open(&Config::default()).expect("the rig has lanes");
    let pool = outer.add_pool().unwrap();
    let spec = ServerSpec { pool, ordinal: 0, fingerprint: 1, lane: LaneChoice::Remote };
    outer.register_server(app.as_fd(), &spec).unwrap();
    outer
}

#[test]
fn what_a_program_reads_is_no_application() {
    let Some(rig) = rig() else { return };
    let c = unattached(&rig);
    let _outer = read_by_another_pooler(&c.app);
    let of_c = application(c.near.as_fd()).unwrap();
    assert!(matches!(rig.dp.attach_application(c.slot, of_c.as_fd()), Err(Error::State(_))));
    assert!(!rig.dp.has_application(c.slot).unwrap());
}

#[test]
fn answers_go_by_tcp_since_a_program_reads_them() {
    let Some(rig) = rig() else { return };
    let (mut c, mut s) = (rig.client(), rig.server(0));
    let mut exchange = |c: &mut Client| {
        ask(c, &mut s);
        send(&mut s.backend, &answer(b"row", b'I'));
        expect(&mut c.app, &answer(b"row", b'I'));
        rig.expect_released(&s);
        rig.dp.counter(Counter::ResponsesB)
    };
    assert_eq!(exchange(&mut c), 1);
    let _outer = read_by_another_pooler(&c.app);
    for _ in 0..3 {
        assert_eq!(exchange(&mut c), 1);
    }
}
