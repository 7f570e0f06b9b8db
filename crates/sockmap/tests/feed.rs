// SPDX-License-Identifier: Apache-2.0
//! Fed links: user space writes the requests, programs forward the answers and release the server.

mod common;

use common::ends::{Client, Rig, Server, on_each_lane};
use common::{answer, eventually, expect, expect_silence, message, query, send};
use underpass_sockmap::{Config, Event, Fed, Give, Reason, ServerSlot, TransactionStatus};

const ONE: Fed = Fed { ready: 1, extended: false, unnamed: false, named: false };

/// What a pooler does with a request that it has read: a server for it, or none.
fn feed(rig: &Rig, c: &Client, request: &[u8]) -> Option<ServerSlot> {
    eventually("all former answers are in the socket", || rig.dp.is_clear_to_feed(c.slot, false).unwrap());
    let server = rig.dp.take_to_feed(c.slot).unwrap()?;
    rig.dp.feed(c.slot, server, ONE).unwrap();
    assert_eq!(rig.dp.write_fed(server, request).unwrap(), request.len());
    Some(server)
}

/// A client whose first request came up, read.
fn fed_client(rig: &Rig, request: &[u8]) -> Client {
    let mut c = rig.held_client(rig.pool, 1);
    send(&mut c.app, request);
    expect(&mut c.near, request);
    c
}

fn serve(s: &mut Server, request: &[u8], reply: &[u8]) {
    expect(&mut s.backend, request);
    send(&mut s.backend, reply);
}

#[test]
fn answers_come_by_the_kernel_and_the_server_goes_back() {
    on_each_lane(&Config::default(), |rig| {
        let mut s = rig.server(0);
        let mut c = fed_client(rig, &query("first"));
        assert_eq!(feed(rig, &c, &query("first")), Some(s.slot));
        serve(&mut s, &query("first"), &answer(b"1", b'I'));
        expect(&mut c.app, &answer(b"1", b'I'));
        rig.expect_released(&s);
        for i in 0..50 {
            let (q, a) = (query(&format!("select {i}")), answer(format!("row {i}").as_bytes(), b'I'));
            send(&mut c.app, &q);
            expect(&mut c.near, &q);
            assert!(!rig.dp.hold_fed(c.slot).unwrap(), "its link has ended");
            assert_eq!(feed(rig, &c, &q), Some(s.slot));
            serve(&mut s, &q, &a);
            expect(&mut c.app, &a);
            rig.expect_released(&s);
        }
        let info = rig.dp.client_info(c.slot).unwrap();
        assert_eq!((info.stats.xacts, info.stats.queries, info.server), (51, 51, None));
        expect_silence(&mut s.near);
        // From here on by the program alone.
        rig.dp.hold_fed(c.slot).unwrap();
        eventually("all answers are in the socket", || rig.dp.client_drained(c.slot).unwrap());
        let read = rig.dp.give_client(
            c.slot,
            (query("first").len() + (0..50).map(|i| query(&format!("select {i}")).len()).sum::<usize>())
                as u64,
        );
        assert_eq!(read.unwrap(), Give::Done);
        send(&mut c.app, &query("lane"));
        serve(&mut s, &query("lane"), &answer(b"x", b'I'));
        expect(&mut c.app, &answer(b"x", b'I'));
    });
}

#[test]
fn a_transaction_and_a_pipeline_keep_the_link() {
    on_each_lane(&Config::default(), |rig| {
        let mut s = rig.server(0);
        let mut c = fed_client(rig, &query("begin"));
        feed(rig, &c, &query("begin"));
        serve(&mut s, &query("begin"), &answer(b"", b'T'));
        expect(&mut c.app, &answer(b"", b'T'));
        let link = || rig.dp.client_info(c.slot).unwrap().link;
        eventually("in a transaction", || link().status == TransactionStatus::InTransaction);
        // Two at once, as of a pipeline.
        for _ in 0..2 {
            assert_eq!(rig.dp.feed_more(c.slot, ONE).unwrap(), Some(s.slot));
            rig.dp.write_fed(s.slot, &query("more")).unwrap();
        }
        assert_eq!(link().pending, 2);
        for _ in 0..2 {
            serve(&mut s, &query("more"), &answer(b"m", b'T'));
            expect(&mut c.app, &answer(b"m", b'T'));
        }
        rig.dp.feed_more(c.slot, ONE).unwrap();
        rig.dp.write_fed(s.slot, &query("commit")).unwrap();
        serve(&mut s, &query("commit"), &answer(b"", b'I'));
        expect(&mut c.app, &answer(b"", b'I'));
        rig.expect_released(&s);
        assert_eq!(rig.dp.feed_more(c.slot, ONE).unwrap(), None, "there is no link to add to");
    });
}

#[test]
fn whoever_waits_hears_of_the_released_server_once() {
    on_each_lane(&Config::default(), |rig| {
        let mut s = rig.server(0);
        let mut c = fed_client(rig, &query("a"));
        let waiting = fed_client(rig, &query("b"));
        feed(rig, &c, &query("a"));
        rig.dp.set_waiters(rig.pool, 1).unwrap();
        assert_eq!(rig.dp.take_to_feed(waiting.slot).unwrap(), None);
        serve(&mut s, &query("a"), &answer(b"a", b'I'));
        expect(&mut c.app, &answer(b"a", b'I'));
        rig.expect_released(&s);
        assert_eq!(rig.events(), [Event::PoolIdle { pool: rig.pool }]);
        assert_eq!(feed(rig, &waiting, &query("b")), Some(s.slot));
        serve(&mut s, &query("b"), &answer(b"b", b'I'));
        rig.expect_released(&s);
        // Announced again after it was heard.
        assert_eq!(rig.events(), [Event::PoolIdle { pool: rig.pool }]);
    });
}

#[test]
fn a_server_with_other_parameters_or_to_be_retired_is_not_taken() {
    on_each_lane(&Config::default(), |rig| {
        let other = rig.held_server(rig.pool, 0, 7);
        rig.dp.push_idle(other.slot, 0).unwrap();
        let c = fed_client(rig, &query("q"));
        assert_eq!(rig.dp.take_to_feed(c.slot).unwrap(), None);
        let s = rig.server(1);
        rig.dp.set_server_retire(s.slot, true).unwrap();
        assert_eq!(rig.dp.take_to_feed(c.slot).unwrap(), None);
        rig.dp.set_server_retire(s.slot, false).unwrap();
        assert_eq!(rig.dp.take_to_feed(c.slot).unwrap(), Some(s.slot));
        // It comes to nothing: the server is user space's, and serves others.
        assert!(rig.dp.unfeed(s.slot).unwrap());
        assert_eq!(rig.dp.push_idle(s.slot, 0).unwrap(), Give::Done);
        assert_eq!(feed(rig, &c, &query("q")), Some(s.slot));
    });
}

#[test]
fn user_space_takes_a_fed_link_over() {
    on_each_lane(&Config::default(), |rig| {
        let mut s = rig.server(0);
        let mut c = fed_client(rig, &query("set"));
        feed(rig, &c, &query("set"));
        expect(&mut s.backend, &query("set"));
        // A parameter is reported: the chunk goes up before the client sees it.
        let reply = [message(b'S', b"a\0b\0"), answer(b"", b'I')].concat();
        send(&mut s.backend, &reply);
        rig.expect_server_up(&s, Reason::Dirty);
        let taken = rig.take(&c);
        assert_eq!((taken.server, taken.link.pending), (Some(s.slot), 1));
        assert!(taken.request.is_boundary() && taken.response.is_boundary());
        expect(&mut s.near, &reply);
        expect_silence(&mut c.app);
        assert_eq!(rig.dp.unlink(c.slot).unwrap(), Some(s.slot));
        rig.dp.push_idle(s.slot, reply.len() as u64).unwrap();
    });
}

#[test]
fn an_answer_under_way_is_not_overtaken() {
    on_each_lane(&Config::default(), |rig| {
        let mut s = rig.server(0);
        let mut c = fed_client(rig, &query("q"));
        for i in 0..200 {
            assert_eq!(feed(rig, &c, &query("q")), Some(s.slot));
            serve(&mut s, &query("q"), &answer(format!("{i}").as_bytes(), b'I'));
            // The next request does not wait for the answer, as in a pipeline.
            send(&mut c.app, &query("q"));
            expect(&mut c.near, &query("q"));
            rig.expect_released(&s);
            assert!(!rig.dp.hold_fed(c.slot).unwrap());
            eventually("clear", || rig.dp.is_clear_to_feed(c.slot, false).unwrap());
            // In lane B it is in the application's own queue, unread.
            let unread = rig.dp.application_unread(c.slot).unwrap();
            assert!(
                unread > 0 || rig.dp.client_drained(c.slot).unwrap(),
                "clear means that the answer is in the socket"
            );
            expect(&mut c.app, &answer(format!("{i}").as_bytes(), b'I'));
        }
    });
}
