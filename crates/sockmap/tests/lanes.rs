// SPDX-License-Identifier: Apache-2.0
//! Both lanes on real sockets: links, releases, and everything that must go up instead.

mod common;

use std::io::Write;
use std::os::fd::AsFd;

use common::ends::{Client, Rig, Server, on_each_lane, read_exact};
use common::{answer, eventually, expect, expect_silence, extended, message, pair, query, ready, send};
use underpass_sockmap::{
    Claim, Config, Counter, Error, Event, Give, Lane, LaneChoice, LinkState, Reason, ServerSpec, StreamState,
    TransactionStatus,
};

#[test]
fn a_transaction_links_forwards_and_releases() {
    on_each_lane(&Config::default(), |rig| {
        let (mut c, mut s) = (rig.client(), rig.server(0));
        for i in 0..100 {
            let q = query(&format!("select {i}"));
            send(&mut c.app, &q);
            expect(&mut s.backend, &q);
            let info = rig.dp.client_info(c.slot).unwrap();
            assert_eq!((info.server, info.link.pending), (Some(s.slot), 1));
            assert_eq!(rig.dp.server_peer(s.slot).unwrap(), Some(c.slot));
            let a = answer(format!("row {i}").as_bytes(), b'I');
            send(&mut s.backend, &a);
            expect(&mut c.app, &a);
            rig.expect_released(&s);
            assert_eq!(rig.dp.client_info(c.slot).unwrap().server, None);
        }
        let stats = rig.dp.client_info(c.slot).unwrap().stats;
        assert_eq!((stats.xacts, stats.queries, stats.links), (100, 100, 100));
        assert!(stats.xact_ns > 0 && stats.xact_ns >= stats.query_ns);
        assert_eq!(rig.dp.counter(Counter::Links), 100);
        assert_eq!(rig.dp.counter(Counter::Releases), 100);
        assert!(rig.events().is_empty());
        expect_silence(&mut c.near);
        expect_silence(&mut s.near);
    });
}

#[test]
fn a_transaction_block_keeps_its_server_until_it_ends() {
    on_each_lane(&Config::default(), |rig| {
        let (mut a, mut b) = (rig.client(), rig.client());
        let (mut s0, mut s1) = (rig.server(0), rig.server(1));
        for status in [b'T', b'T', b'E'] {
            send(&mut a.app, &query("in block"));
            expect(&mut s0.backend, &query("in block"));
            send(&mut s0.backend, &answer(b"a", status));
            expect(&mut a.app, &answer(b"a", status));
            // Between its statements, another client gets the other server.
            send(&mut b.app, &query("other"));
            expect(&mut s1.backend, &query("other"));
            send(&mut s1.backend, &answer(b"b", b'I'));
            expect(&mut b.app, &answer(b"b", b'I'));
            rig.expect_released(&s1);
            assert_eq!(rig.dp.server_peer(s0.slot).unwrap(), Some(a.slot));
        }
        let state = rig.dp.client_info(a.slot).unwrap().link;
        assert_eq!((state.status, state.pending), (TransactionStatus::Failed, 0));
        send(&mut a.app, &query("rollback"));
        expect(&mut s0.backend, &query("rollback"));
        send(&mut s0.backend, &answer(b"", b'I'));
        expect(&mut a.app, &answer(b"", b'I'));
        rig.expect_released(&s0);
    });
}

#[test]
fn a_pipeline_keeps_its_server_until_the_last_ready_for_query() {
    on_each_lane(&Config::default(), |rig| {
        let (mut c, mut s) = (rig.client(), rig.server(0));
        let sync = message(b'S', b"");
        let batch = [extended("one"), sync.clone(), extended("two"), sync.clone(), query("three")].concat();
        send(&mut c.app, &batch);
        expect(&mut s.backend, &batch);
        assert_eq!(rig.dp.client_info(c.slot).unwrap().link.pending, 3);
        for left in [2, 1] {
            send(&mut s.backend, &answer(b"x", b'I'));
            expect(&mut c.app, &answer(b"x", b'I'));
            let info = rig.dp.client_info(c.slot).unwrap();
            assert_eq!((info.server, info.link.pending), (Some(s.slot), left));
        }
        // A request appended while one is pending extends the link.
        send(&mut c.app, &query("four"));
        expect(&mut s.backend, &query("four"));
        send(&mut s.backend, &[answer(b"x", b'I'), answer(b"y", b'I')].concat());
        expect(&mut c.app, &[answer(b"x", b'I'), answer(b"y", b'I')].concat());
        rig.expect_released(&s);
    });
}

#[test]
fn an_extended_batch_without_sync_goes_up() {
    on_each_lane(&Config::default(), |rig| {
        let (mut c, _s) = (rig.client(), rig.server(0));
        let flush = [query("simple"), extended("one"), message(b'H', b"")].concat();
        send(&mut c.app, &flush);
        rig.expect_up(&c, Reason::Batch);
        let taken = rig.take(&c);
        assert_eq!((taken.server, taken.link.pending), (None, 0), "nothing of the chunk was forwarded");
        expect(&mut c.near, &flush);
    });
}

#[test]
fn responses_may_be_split_anywhere() {
    on_each_lane(&Config::default(), |rig| {
        let (mut c, mut s) = (rig.client(), rig.server(0));
        let a = answer(b"some row", b'I');
        for cut in 1..a.len() {
            send(&mut c.app, &query("q"));
            expect(&mut s.backend, &query("q"));
            send(&mut s.backend, &a[..cut]);
            expect(&mut c.app, &a[..cut]);
            assert_eq!(rig.dp.server_peer(s.slot).unwrap(), Some(c.slot), "cut at {cut}");
            send(&mut s.backend, &a[cut..]);
            expect(&mut c.app, &a[cut..]);
            rig.expect_released(&s);
        }
        // Every byte its own segment.
        send(&mut c.app, &query("q"));
        expect(&mut s.backend, &query("q"));
        for byte in &a {
            send(&mut s.backend, std::slice::from_ref(byte));
        }
        expect(&mut c.app, &a);
        rig.expect_released(&s);
        assert!(rig.events().is_empty());
    });
}

#[test]
fn requests_are_forwarded_in_the_middle_of_a_body_and_go_up_in_the_middle_of_a_head() {
    on_each_lane(&Config::default(), |rig| {
        let (mut c, mut s) = (rig.client(), rig.server(0));
        let q = query("select 'a body that is cut'");
        for cut in 5..q.len() {
            send(&mut c.app, &q[..cut]);
            expect(&mut s.backend, &q[..cut]);
            let info = rig.dp.client_info(c.slot).unwrap();
            assert_eq!((info.link.pending, info.link.open), (1, true));
            send(&mut c.app, &q[cut..]);
            expect(&mut s.backend, &q[cut..]);
            send(&mut s.backend, &answer(b"", b'I'));
            expect(&mut c.app, &answer(b"", b'I'));
            rig.expect_released(&s);
        }
        send(&mut c.app, &q[..3]);
        let taken = rig.expect_up(&c, Reason::Split);
        assert_eq!((taken.server, taken.request), (None, StreamState::BOUNDARY));
        expect(&mut c.near, &q[..3]);
    });
}

#[test]
fn thousands_of_messages_in_one_segment() {
    on_each_lane(&Config::default(), |rig| {
        let (mut c, mut s) = (rig.client(), rig.server(0));
        let many: Vec<u8> = (0..3000).flat_map(|_| message(b'S', b"")).collect();
        send(&mut c.app, &many);
        expect(&mut s.backend, &many);
        let answers: Vec<u8> = (0..3000).flat_map(|_| ready(b'I')).collect();
        // As many as fit into the largest chunk: 13,000 of five bytes.
        let rows: Vec<u8> = (0..13_000).flat_map(|_| message(b'3', b"")).collect();
        send(&mut s.backend, &rows);
        expect(&mut c.app, &rows);
        send(&mut s.backend, &answers);
        expect(&mut c.app, &answers);
        rig.expect_released(&s);
        assert!(rig.events().is_empty());
    });
}

#[test]
fn a_request_never_overtakes_what_user_space_wrote_and_the_server_has_not_read() {
    on_each_lane(&Config::default(), |rig| {
        let c = rig.held_client(rig.pool, 1);
        let mut s = rig.held_server(rig.pool, 0, 1);
        let mut app = c.app.try_clone().unwrap();
        let (first, second) = (query("select 1"), query("select 2"));
        rig.dp.link(c.slot, s.slot, &LinkState { pending: 1, ..LinkState::default() }).unwrap();
        assert_eq!(rig.dp.give_server(s.slot, 0, &StreamState::BOUNDARY).unwrap(), Give::Done);
        send(&mut s.near, &first);
        assert_eq!(rig.dp.give_client(c.slot, 0).unwrap(), Give::Done);

        send(&mut app, &second);
        if rig.lane != Lane::D {
            // Redirected, the backend would read it before the first.
            rig.expect_up(&c, Reason::Behind);
            assert!(rig.dp.server_drained(s.slot).unwrap());
            let mut near = c.near.try_clone().unwrap();
            expect(&mut near, &second);
            send(&mut s.near, &second);
        }
        expect(&mut s.backend, &[first, second].concat());
    });
}

#[test]
fn a_client_that_is_gone_does_not_end_its_server() {
    on_each_lane(&Config::default(), |rig| {
        let (mut c, mut s) = (rig.client(), rig.server(0));
        send(&mut c.app, &query("q"));
        expect(&mut s.backend, &query("q"));
        // A reset: unread bytes at close.
        send(&mut c.near, b"unread");
        eventually("the bytes are there", || c.app.peek(&mut [0u8; 6]).is_ok_and(|n| n == 6));
        drop(c.app);
        eventually("the reset came", || c.near.take_error().is_ok_and(|e| e.is_some()));

        for _ in 0..3 {
            s.backend
                .write_all(&answer(b"row", b'I'))
                .expect("the server's send fails for a client that is gone");
        }
        if rig.lane != Lane::D {
            rig.expect_server_up(&s, Reason::Target);
        }
    });
}

#[test]
fn a_give_before_the_last_response_is_written_can_be_taken_back() {
    on_each_lane(&Config::default(), |rig| {
        let c = rig.held_client(rig.pool, 1);
        let mut s = rig.server(0);
        let mut app = c.app.try_clone().unwrap();
        assert_eq!(rig.dp.give_client_before(c.slot, 0, 6).unwrap(), Give::Done);
        rig.take(&c);
        assert!(rig.dp.client_drained(c.slot).unwrap(), "only user space's own bytes are missing");

        assert_eq!(rig.dp.give_client_before(c.slot, 0, 6).unwrap(), Give::Done);
        send(&mut c.near.try_clone().unwrap(), &ready(b'I'));
        expect(&mut app, &ready(b'I'));
        send(&mut app, &query("q"));
        expect(&mut s.backend, &query("q"));
        send(&mut s.backend, &answer(b"row", b'I'));
        expect(&mut app, &answer(b"row", b'I'));
        rig.expect_released(&s);
        assert!(rig.events().is_empty());
    });
}

#[test]
fn full_tables_refuse_and_give_way_again() {
    let config = Config { clients_max: 2, servers_max: 2, pools_max: 1, ..Config::default() };
    on_each_lane(&config, |rig| {
        assert!(matches!(rig.dp.add_pool(), Err(Error::Full { what: "pool", limit: 1 })));
        let (a, b) = (rig.held_client(rig.pool, 1), rig.client());
        let (_app, near) = pair();
        let full = rig.dp.register_client(near.as_fd(), rig.pool, 1);
        assert!(matches!(full, Err(Error::Full { what: "client", limit: 2 })), "{full:?}");
        let (_x, y) = (rig.held_server(rig.pool, 0, 1), rig.held_server(rig.pool, 1, 1));
        let (near_server, _far) = pair();
        let spec = ServerSpec { pool: rig.pool, ordinal: 2, fingerprint: 1, lane: LaneChoice::Remote };
        let full = rig.dp.register_server(near_server.as_fd(), &spec);
        assert!(matches!(full, Err(Error::Full { what: "server", limit: 2 })), "{full:?}");

        // Who is in is not disturbed, and whoever leaves makes room for another.
        let mut b = b;
        send(&mut b.app, &query("q"));
        rig.expect_up(&b, Reason::NoServer);
        rig.dp.free_client(a.slot).unwrap();
        drop(a);
        rig.dp.free_server(y.slot).unwrap();
        drop(y);
        eventually("a slot is free again", || rig.dp.register_client(near.as_fd(), rig.pool, 1).is_ok());
        eventually("a server's, too", || rig.dp.register_server(near_server.as_fd(), &spec).is_ok());
    });
}

#[test]
fn what_a_lane_does_not_forward_goes_up_whole_with_its_reason() {
    let named = |kind, body: &[u8]| message(kind, body);
    let huge = [&b"Q"[..], &0x7fff_ffffu32.to_be_bytes(), b"select"].concat();
    let tiny = [&b"Q"[..], &3u32.to_be_bytes(), b"sele"].concat();
    let cases: Vec<(Vec<u8>, Reason)> = vec![
        (message(b'X', b""), Reason::Terminate),
        ([query("select 1"), message(b'X', b"")].concat(), Reason::Terminate),
        (message(b'p', b"password\0"), Reason::Type),
        (message(b'z', b""), Reason::Type),
        (message(0, b""), Reason::Type),
        (huge, Reason::Length),
        (tiny, Reason::Length),
        ([&b"S"[..], &10_001u32.to_be_bytes(), b"endless"].concat(), Reason::Length),
        ([&b"E"[..], &0x3fff_ffffu32.to_be_bytes(), b"endless"].concat(), Reason::Length),
        (message(b'd', b"stray"), Reason::CopyStray),
        (message(b'c', b""), Reason::CopyStray),
        (named(b'P', b"s1\0select 1\0\0\0"), Reason::NamedStatement),
        (named(b'B', b"\0s1\0\0\0\0\0\0\0"), Reason::NamedStatement),
        (named(b'B', b"c1\0\0\0\0\0\0\0\0"), Reason::NamedPortal),
        (named(b'B', b"\0\0\0\0\0\0\0\0"), Reason::UnnamedBind),
        (named(b'D', b"Ss1\0"), Reason::NamedStatement),
        (named(b'D', b"S\0"), Reason::UnnamedBind),
        (named(b'C', b"Ss1\0"), Reason::NamedStatement),
        (message(b'P', b""), Reason::Length),
        ([query("a"), b"P\0\0\0\x20".to_vec()].concat(), Reason::Split),
    ];
    on_each_lane(&Config::default(), |rig| {
        let _s = rig.server(0);
        for (bytes, reason) in &cases {
            let mut c = rig.client();
            send(&mut c.app, bytes);
            let taken = rig.expect_up(&c, *reason);
            assert_eq!((taken.server, taken.request), (None, StreamState::BOUNDARY), "{reason:?}");
            expect(&mut c.near, bytes);
            assert_eq!(rig.dp.unlink(c.slot).unwrap(), None);
            rig.dp.free_client(c.slot).unwrap();
        }
        assert_eq!(rig.dp.counter(Counter::Links), 0);
    });
}

#[test]
fn a_refused_message_in_a_transaction_leaves_the_link_to_user_space() {
    on_each_lane(&Config::default(), |rig| {
        let (mut c, mut s) = (rig.client(), rig.server(0));
        send(&mut c.app, &query("begin"));
        expect(&mut s.backend, &query("begin"));
        send(&mut s.backend, &answer(b"", b'T'));
        expect(&mut c.app, &answer(b"", b'T'));
        send(&mut c.app, &message(b'X', b""));
        let taken = rig.expect_up(&c, Reason::Terminate);
        assert_eq!(taken.server, Some(s.slot));
        assert_eq!(taken.link.status, TransactionStatus::InTransaction);
        expect(&mut c.near, &message(b'X', b""));
        // User space rolls back: the server's answer is its own now.
        assert!(rig.dp.server_drained(s.slot).unwrap());
        send(&mut s.near, &query("rollback"));
        expect(&mut s.backend, &query("rollback"));
        send(&mut s.backend, &answer(b"", b'I'));
        let bytes = answer(b"", b'I').len();
        expect(&mut s.near, &answer(b"", b'I'));
        assert_eq!(rig.dp.unlink(c.slot).unwrap(), Some(s.slot));
        assert_eq!(rig.dp.push_idle(s.slot, bytes as u64).unwrap(), Give::Done);
        expect_silence(&mut c.app);
    });
}

#[test]
fn fingerprints_and_pools_are_kept_apart() {
    on_each_lane(&Config::default(), |rig| {
        let other_pool = rig.dp.add_pool().unwrap();
        let _other = {
            let s = rig.held_server(other_pool, 0, 1);
            rig.dp.push_idle(s.slot, 0).unwrap();
            s
        };
        let s_two = rig.held_server(rig.pool, 0, 2);
        rig.dp.push_idle(s_two.slot, 0).unwrap();
        let mut c = rig.client();
        send(&mut c.app, &query("q"));
        rig.expect_up(&c, Reason::Unfit);
        expect(&mut c.near, &query("q"));

        // With a server of its fingerprint behind others, it finds that one.
        let mut s_one = rig.server(70);
        assert_eq!(rig.dp.give_client(c.slot, query("q").len() as u64).unwrap(), Give::Done);
        send(&mut c.app, &query("r"));
        expect(&mut s_one.backend, &query("r"));
        assert_eq!(rig.dp.pop_idle(rig.pool, Some(1)).unwrap(), None);
        // User space can ask for either kind, too.
        assert_eq!(rig.dp.pop_idle_unlike(rig.pool, 2).unwrap(), None);
        assert_eq!(rig.dp.pop_idle_unlike(rig.pool, 1).unwrap(), Some(s_two.slot));
        assert_eq!(rig.dp.push_idle(s_two.slot, 0).unwrap(), Give::Done);
        assert_eq!(rig.dp.pop_idle(rig.pool, None).unwrap(), Some(s_two.slot));
        rig.dp.set_server_fingerprint(s_two.slot, 1).unwrap();
        assert_eq!(rig.dp.push_idle(s_two.slot, 0).unwrap(), Give::Done);
        assert_eq!(rig.dp.pop_idle(rig.pool, Some(1)).unwrap(), Some(s_two.slot));
    });
}

#[test]
fn the_lowest_ordinal_is_used_first() {
    on_each_lane(&Config::default(), |rig| {
        let mut servers: Vec<_> = [3, 130, 1, 64].into_iter().map(|o| (o, rig.server(o))).collect();
        servers.sort_by_key(|&(ordinal, _)| ordinal);
        for (_, s) in &mut servers {
            let mut c = rig.client();
            send(&mut c.app, &query("hold"));
            expect(&mut s.backend, &query("hold"));
        }
    });
}

/// A transaction of a client, on whichever of the servers the lane gives it: that one's place among them.
fn transaction(rig: &Rig, c: &mut Client, servers: &mut [Server]) -> usize {
    send(&mut c.app, &query("q"));
    let mut found = None;
    eventually("a link", || {
        found = rig.dp.client_info(c.slot).unwrap().server;
        found.is_some()
    });
    let at = servers.iter().position(|s| Some(s.slot) == found).unwrap();
    expect(&mut servers[at].backend, &query("q"));
    send(&mut servers[at].backend, &answer(b"x", b'I'));
    expect(&mut c.app, &answer(b"x", b'I'));
    rig.expect_released(&servers[at]);
    at
}

#[test]
fn a_client_that_comes_back_at_once_gets_the_server_that_it_had() {
    on_each_lane(&Config::default(), |rig| {
        let (mut other, mut c) = (rig.client(), rig.client());
        // Two words of the idle set, so that a search must go back.
        let mut servers = [rig.server(0), rig.server(130)];
        let mut comes_back = |c: &mut Client, servers: &mut [Server; 2]| {
            send(&mut other.app, &query("hold"));
            expect(&mut servers[0].backend, &query("hold"));
            assert_eq!(transaction(rig, c, servers), 1, "all that is idle");
            send(&mut servers[0].backend, &answer(b"x", b'I'));
            expect(&mut other.app, &answer(b"x", b'I'));
            rig.expect_released(&servers[0]);
            transaction(rig, c, servers)
        };
        // "At once" is two milliseconds, which a test may miss, but not each time.
        eventually("its server again", || comes_back(&mut c, &mut servers) == 1);
        // One that was away gets the lowest, so that the others can rest.
        std::thread::sleep(std::time::Duration::from_millis(3));
        assert_eq!(transaction(rig, &mut c, &mut servers), 0);
        // And one whose server has other parameters now does.
        eventually("its server again", || comes_back(&mut c, &mut servers) == 1);
        assert!(rig.dp.take_idle(servers[1].slot).unwrap());
        rig.dp.set_server_fingerprint(servers[1].slot, 2).unwrap();
        assert_eq!(rig.dp.push_idle(servers[1].slot, 0).unwrap(), Give::Done);
        assert_eq!(transaction(rig, &mut c, &mut servers), 0);
    });
}

#[test]
fn waiters_and_closed_pools_stop_the_programs_from_taking() {
    on_each_lane(&Config::default(), |rig| {
        let (mut a, mut b, mut s) = (rig.client(), rig.client(), rig.server(0));
        send(&mut a.app, &query("a"));
        expect(&mut s.backend, &query("a"));
        send(&mut b.app, &query("b"));
        rig.expect_up(&b, Reason::NoServer);
        rig.dp.set_waiters(rig.pool, 1).unwrap();
        assert_eq!(rig.dp.pop_idle(rig.pool, None).unwrap(), None);
        send(&mut s.backend, &answer(b"a", b'I'));
        expect(&mut a.app, &answer(b"a", b'I'));
        rig.expect_released(&s);
        assert_eq!(rig.events(), [Event::PoolIdle { pool: rig.pool }]);
        // The first client must not overtake.
        send(&mut a.app, &query("again"));
        rig.expect_up(&a, Reason::Waiters);

        // The grant: responses by the kernel at once.
        expect(&mut b.near, &query("b"));
        assert_eq!(rig.dp.pop_idle(rig.pool, None).unwrap(), Some(s.slot));
        rig.dp.set_waiters(rig.pool, 0).unwrap();
        rig.dp.link(b.slot, s.slot, &LinkState { pending: 1, ..LinkState::default() }).unwrap();
        assert_eq!(rig.dp.give_server(s.slot, 0, &StreamState::BOUNDARY).unwrap(), Give::Done);
        send(&mut s.near, &query("b"));
        assert_eq!(rig.dp.give_client(b.slot, query("b").len() as u64).unwrap(), Give::Done);
        expect(&mut s.backend, &query("b"));
        send(&mut s.backend, &answer(b"b", b'I'));
        expect(&mut b.app, &answer(b"b", b'I'));
        rig.expect_released(&s);

        rig.dp.set_pool_closed(rig.pool, true).unwrap();
        send(&mut b.app, &query("paused"));
        rig.expect_up(&b, Reason::PoolClosed);
    });
}

#[test]
fn a_changed_parameter_and_dropped_statements_go_up_before_they_are_forwarded() {
    on_each_lane(&Config::default(), |rig| {
        for odd in [
            message(b'S', b"TimeZone\0UTC\0"),
            message(b'C', b"DISCARD ALL\0"),
            message(b'C', b"DEALLOCATE ALL\0"),
        ] {
            let (mut c, mut s) = (rig.client(), rig.server(0));
            let a = [odd.clone(), answer(b"x", b'I')].concat();
            send(&mut c.app, &query("set"));
            expect(&mut s.backend, &query("set"));
            send(&mut s.backend, &a);
            // User space reads it before anybody else hears of it.
            rig.expect_server_up(&s, Reason::Dirty);
            assert_eq!(rig.dp.claim_server(s.slot).unwrap(), Claim::Linked(c.slot));
            let taken = rig.take(&c);
            assert_eq!((taken.server, taken.link.pending), (Some(s.slot), 1));
            expect(&mut s.near, &a);
            rig.dp.unlink(c.slot).unwrap();
            rig.dp.free_server(s.slot).unwrap();
        }
        // A notification belongs to whoever is linked.
        let (mut c, mut s) = (rig.client(), rig.server(0));
        let a = [message(b'A', b"\0\0\0\x01channel\0\0"), answer(b"x", b'I')].concat();
        send(&mut c.app, &query("q"));
        expect(&mut s.backend, &query("q"));
        send(&mut s.backend, &a);
        expect(&mut c.app, &a);
        rig.expect_released(&s);
        assert!(rig.dp.take_idle(s.slot).unwrap());
        rig.dp.free_server(s.slot).unwrap();
        // DELETE with a count of the same length is nothing special.
        let (mut c, mut s) = (rig.client(), rig.server(0));
        let a = [message(b'C', b"DELETE 1234567\0"), ready(b'I')].concat();
        send(&mut c.app, &query("delete"));
        expect(&mut s.backend, &query("delete"));
        send(&mut s.backend, &a);
        expect(&mut c.app, &a);
        rig.expect_released(&s);
    });
}

/// Whoever has used a statement of the pooler's does not hear of an error what user space has not seen: a plan may be outdated.
#[test]
fn an_error_after_a_named_statement_goes_up_wherever_it_is_split() {
    on_each_lane(&Config::default(), |rig| {
        let error = message(b'E', b"SERROR\0C0A000\0Mcached plan must not change result type\0\0");
        // Behind the head, in its body, nowhere.
        for split in [5, 6, error.len()] {
            let (mut c, mut s) = (rig.held_client(rig.pool, 1), rig.held_server(rig.pool, 0, 1));
            rig.dp.set_client_statement(c.slot, b"name_1", 7).unwrap();
            rig.dp.set_server_statement(s.slot, 7, b"plan_7").unwrap();
            assert_eq!(rig.dp.give_client(c.slot, 0).unwrap(), Give::Done);
            assert_eq!(rig.dp.push_idle(s.slot, 0).unwrap(), Give::Done);
            let batch = |name: &[u8]| {
                let bind = message(b'B', &[b"\0", name, b"\0\0\0\0\0\0\0"].concat());
                [bind, message(b'E', b"\0\0\0\0\0"), message(b'S', b"")].concat()
            };
            send(&mut c.app, &batch(b"name_1"));
            expect(&mut s.backend, &batch(b"plan_7"));
            let (first, rest) = error.split_at(split);
            let first = [message(b'2', b""), first.to_vec()].concat();
            send(&mut s.backend, &first);
            rig.expect_server_up(&s, Reason::Error);
            send(&mut s.backend, &[rest, &ready(b'I')].concat());
            assert_eq!(rig.dp.claim_server(s.slot).unwrap(), Claim::Linked(c.slot), "split at {split}");
            assert_eq!(rig.take(&c).server, Some(s.slot));
            expect(&mut s.near, &[first.as_slice(), rest, &ready(b'I')].concat());
            expect_silence(&mut c.app);
            rig.dp.unlink(c.slot).unwrap();
            rig.dp.free_server(s.slot).unwrap();
            rig.dp.free_client(c.slot).unwrap();
        }
    });
}

#[test]
fn retired_held_and_unexpected_releases_go_up() {
    on_each_lane(&Config::default(), |rig| {
        let (mut c, mut s) = (rig.client(), rig.server(0));
        rig.dp.set_server_retire(s.slot, true).unwrap();
        send(&mut c.app, &query("q"));
        rig.expect_up(&c, Reason::Unfit);
        expect(&mut c.near, &query("q"));
        assert_eq!(rig.dp.pop_idle(rig.pool, None).unwrap(), None, "user space grants it to nobody either");
        assert_eq!(rig.dp.claim_server(s.slot).unwrap(), Claim::Owned);
        rig.dp.set_server_retire(s.slot, false).unwrap();
        assert_eq!(rig.dp.push_idle(s.slot, 0).unwrap(), Give::Done);
        let read = query("q").len() as u64;
        assert_eq!(rig.dp.give_client(c.slot, read).unwrap(), Give::Done);

        send(&mut c.app, &query("q"));
        expect(&mut s.backend, &query("q"));
        rig.dp.set_server_retire(s.slot, true).unwrap();
        send(&mut s.backend, &answer(b"x", b'I'));
        expect(&mut c.app, &answer(b"x", b'I'));
        rig.expect_server_up(&s, Reason::Retire);
        // The next request is not added to the link that waits for user space.
        send(&mut c.app, &query("next"));
        rig.expect_up(&c, Reason::Held);
        expect_silence(&mut s.backend);
        expect(&mut c.near, &query("next"));
        let read = read + query("next").len() as u64;
        rig.dp.unlink(c.slot).unwrap();
        rig.dp.set_server_retire(s.slot, false).unwrap();
        assert_eq!(rig.dp.push_idle(s.slot, 0).unwrap(), Give::Done);
        assert_eq!(rig.dp.give_client(c.slot, read).unwrap(), Give::Done);

        // More ReadyForQuery than requests: nobody's, up it goes.
        send(&mut c.app, &query("q"));
        expect(&mut s.backend, &query("q"));
        let two = [ready(b'I'), ready(b'I')].concat();
        send(&mut s.backend, &two);
        rig.expect_server_up(&s, Reason::RfqUnexpected);
        let taken = rig.take(&c);
        assert_eq!((taken.link.pending, taken.response), (1, StreamState::BOUNDARY));
        expect(&mut s.near, &two);
        expect_silence(&mut c.app);
    });
}

#[test]
fn messages_behind_the_last_ready_for_query_and_from_an_unlinked_server_go_up() {
    on_each_lane(&Config::default(), |rig| {
        let (mut c, mut s) = (rig.client(), rig.server(0));
        send(&mut c.app, &query("q"));
        expect(&mut s.backend, &query("q"));
        let a = [answer(b"x", b'I'), message(b'N', b"SWARNING\0\0")].concat();
        send(&mut s.backend, &a);
        rig.expect_server_up(&s, Reason::AfterRfq);
        let taken = rig.take(&c);
        assert_eq!((taken.server, taken.link.pending), (Some(s.slot), 1));
        expect(&mut s.near, &a);
        rig.dp.unlink(c.slot).unwrap();

        assert_eq!(rig.dp.push_idle(s.slot, a.len() as u64).unwrap(), Give::Done);
        let notice = message(b'N', b"SWARNING\0\0");
        send(&mut s.backend, &notice);
        rig.expect_server_up(&s, Reason::NoClient);
        assert_eq!(rig.dp.claim_server(s.slot).unwrap(), Claim::Owned);
        assert_eq!(rig.dp.pop_idle(rig.pool, None).unwrap(), None, "it left the idle set");
        expect(&mut s.near, &notice);
        let read = (a.len() + notice.len()) as u64;
        assert_eq!(
            rig.dp.push_idle(s.slot, read - 1).unwrap(),
            Give::Unread { passed_total: read },
            "a byte short"
        );
        assert_eq!(rig.dp.push_idle(s.slot, read).unwrap(), Give::Done);
    });
}

#[test]
fn copy_from_stdin_in_the_lane_and_its_strays() {
    on_each_lane(&Config::default(), |rig| {
        let (mut c, mut s) = (rig.client(), rig.server(0));
        send(&mut c.app, &query("copy t from stdin"));
        expect(&mut s.backend, &query("copy t from stdin"));
        let copy_in = message(b'G', b"\0\0\x01\0\0");
        send(&mut s.backend, &copy_in);
        expect(&mut c.app, &copy_in);
        assert!(rig.dp.client_info(c.slot).unwrap().link.copy_in);
        let data = [message(b'd', b"1\n"), message(b'd', b"2\n")].concat();
        send(&mut c.app, &data);
        expect(&mut s.backend, &data);
        // User space gives the server back, when none of the data can be on its way to it any more.
        let back = |c: &Client, s: &Server| {
            rig.expect_server_up(s, Reason::CopyEnd);
            let taken = rig.take(c);
            assert!(taken.server == Some(s.slot) && taken.link.is_idle());
            eventually("the server has it all", || rig.dp.server_drained(s.slot).unwrap());
            rig.dp.unlink(c.slot).unwrap();
            assert_eq!(rig.dp.push_idle(s.slot, 0).unwrap(), Give::Done);
            assert_eq!(rig.dp.give_client(c.slot, 0).unwrap(), Give::Done);
        };
        // An error ends the COPY; what the client still sends is not for another server.
        let failed = [message(b'E', b"SERROR\0\0"), ready(b'I')].concat();
        send(&mut s.backend, &failed);
        expect(&mut c.app, &failed);
        back(&c, &s);
        send(&mut c.app, &message(b'd', b"y"));
        assert_eq!(rig.expect_up(&c, Reason::CopyStray).server, None);
        expect(&mut c.near, &message(b'd', b"y"));

        // Behind a pipeline of the extended protocol, a Query's COPY is the Query's.
        let mut c = rig.client();
        let batch = [extended("one"), message(b'S', b""), query("copy t from stdin")].concat();
        send(&mut c.app, &batch);
        expect(&mut s.backend, &batch);
        let answers = [answer(b"one", b'I'), copy_in.clone()].concat();
        send(&mut s.backend, &answers);
        expect(&mut c.app, &answers);
        assert!(rig.dp.client_info(c.slot).unwrap().link.copy_in);
        // What follows its end is no COPY's: user space sees it through.
        send(&mut c.app, &message(b'c', b""));
        assert!(rig.expect_up(&c, Reason::CopyEnd).link.copy_in);
        expect(&mut c.near, &message(b'c', b""));
        send(&mut s.near, &message(b'c', b""));
        expect(&mut s.backend, &message(b'c', b""));
        let done = [message(b'C', b"COPY 2\0"), ready(b'I')].concat();
        send(&mut s.backend, &done);
        expect(&mut s.near, &done);
        rig.dp.unlink(c.slot).unwrap();
        assert_eq!(rig.dp.push_idle(s.slot, done.len() as u64).unwrap(), Give::Done);

        // A Sync during COPY would not be answered.
        let mut c = rig.client();
        send(&mut c.app, &[extended("copy"), message(b'S', b"")].concat());
        read_exact(&mut s.backend, extended("copy").len() + 5);
        send(&mut s.backend, &copy_in);
        rig.expect_server_up(&s, Reason::CopyPipeline);
    });
}

#[test]
fn data_of_a_copy_that_failed_is_not_overtaken() {
    let config = Config { request_budget_bytes: 64 << 20, ..Config::default() };
    on_each_lane(&config, |rig| {
        // In lane A whatever is redirected is readable at once, in a test that stops no worker.
        if rig.lane != Lane::D {
            return;
        }
        let (mut c, mut s) = (rig.client(), rig.server(0));
        send(&mut c.app, &query("copy t from stdin"));
        expect(&mut s.backend, &query("copy t from stdin"));
        send(&mut s.backend, &message(b'G', b"\0\0\x01\0\0"));
        expect(&mut c.app, &message(b'G', b"\0\0\x01\0\0"));
        // The backend fails without reading, as one that is out of space, and the data stands in the queues.
        let data = message(b'd', &vec![b'x'; 64 << 10]);
        (0..320).for_each(|_| send(&mut c.app, &data));
        send(&mut s.backend, &[message(b'E', b"SERROR\0\0"), ready(b'I')].concat());
        rig.expect_server_up(&s, Reason::CopyEnd);
        let taken = rig.take(&c);
        assert_eq!(taken.server, Some(s.slot), "not for the next client yet");
        assert!(!rig.dp.server_drained(s.slot).unwrap(), "the test did not fill the queue");
        // It reads on, and ignores what it reads.
        let reader = std::thread::spawn(move || std::io::copy(&mut s.backend, &mut std::io::sink()));
        eventually("the server has it all", || rig.dp.server_drained(s.slot).unwrap());
        drop((c, s.near));
        reader.join().unwrap().unwrap();
    });
}

#[test]
fn a_give_fails_when_bytes_slipped_in() {
    on_each_lane(&Config::default(), |rig| {
        let mut c = rig.held_client(rig.pool, 1);
        send(&mut c.app, &query("early"));
        let length = query("early").len() as u64;
        eventually("the bytes are seen", || {
            rig.dp.give_client(c.slot, 0).unwrap() == Give::Unread { passed_total: length }
        });
        expect(&mut c.near, &query("early"));
        assert_eq!(rig.dp.give_client(c.slot, length).unwrap(), Give::Done);
        assert!(rig.dp.client_info(c.slot).unwrap().in_kernel);
    });
}

#[test]
fn requests_over_the_budget_go_up() {
    let config = Config { request_budget_bytes: 1000, ..Config::default() };
    on_each_lane(&config, |rig| {
        let (mut c, mut s) = (rig.client(), rig.server(0));
        let q = query(&"x".repeat(600));
        send(&mut c.app, &q);
        expect(&mut s.backend, &q);
        send(&mut c.app, &q);
        let taken = rig.expect_up(&c, Reason::RequestBudget);
        assert_eq!((taken.server, taken.link.pending), (Some(s.slot), 1));
        expect(&mut c.near, &q);
    });
}

#[test]
fn servers_are_taken_in_turn_where_the_pool_rotates() {
    on_each_lane(&Config::default(), |rig| {
        let mut c = rig.client();
        // Two words of the idle set, with gaps.
        let mut servers: Vec<_> = [1, 2, 63, 64, 70].into_iter().map(|ordinal| rig.server(ordinal)).collect();
        let mut next = |servers: &mut [Server]| transaction(rig, &mut c, servers);
        assert_eq!((0..3).map(|_| next(&mut servers)).collect::<Vec<_>>(), [0, 0, 0], "lowest first");
        rig.dp.set_pool_rotates(rig.pool, true).unwrap();
        let turns: Vec<_> = (0..12).map(|_| next(&mut servers)).collect();
        assert_eq!(turns, [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]);
        // User space takes its turn, and programs go on behind it.
        let taken = rig.dp.pop_idle(rig.pool, None).unwrap();
        assert_eq!(taken, Some(servers[2].slot));
        assert_eq!((0..3).map(|_| next(&mut servers)).collect::<Vec<_>>(), [3, 4, 0]);
        assert_eq!(rig.dp.push_idle(servers[2].slot, 0).unwrap(), Give::Done);
        assert!(rig.dp.take_idle(servers[1].slot).unwrap());
        assert_eq!(rig.dp.pop_idle(rig.pool, None).unwrap(), Some(servers[2].slot));
        rig.dp.set_pool_rotates(rig.pool, false).unwrap();
        assert_eq!(next(&mut servers), 0);
        // All that are left, each once, whoever begins.
        rig.dp.set_pool_rotates(rig.pool, true).unwrap();
        let rest: Vec<_> = std::iter::from_fn(|| rig.dp.pop_idle(rig.pool, None).unwrap()).collect();
        assert_eq!(rest, [servers[3].slot, servers[4].slot, servers[0].slot]);
        assert!(rig.events().is_empty());
    });
}

#[test]
fn session_pooling_pins_the_link() {
    on_each_lane(&Config::default(), |rig| {
        // By user space, and by the program that meets the first request.
        for by_user in [true, false] {
            let mut c = rig.held_client(rig.pool, 1);
            let mut s = if by_user { rig.held_server(rig.pool, 0, 9) } else { rig.server(1) };
            if by_user {
                let pinned = LinkState { pinned: true, ..LinkState::default() };
                rig.dp.link(c.slot, s.slot, &pinned).unwrap();
                // In the order for a client that asks at once.
                assert_eq!(rig.dp.give_client(c.slot, 0).unwrap(), Give::Done);
                let boundary = StreamState::BOUNDARY;
                assert_eq!(rig.dp.give_server(s.slot, 0, &boundary).unwrap(), Give::Done);
            } else {
                rig.dp.set_client_pinned(c.slot, true).unwrap();
                assert_eq!(rig.dp.give_client(c.slot, 0).unwrap(), Give::Done);
            }
            for _ in 0..20 {
                send(&mut c.app, &query("q"));
                expect(&mut s.backend, &query("q"));
                send(&mut s.backend, &answer(b"x", b'I'));
                expect(&mut c.app, &answer(b"x", b'I'));
                assert_eq!(rig.dp.server_peer(s.slot).unwrap(), Some(c.slot));
            }
            let stats = rig.dp.client_info(c.slot).unwrap().stats;
            assert_eq!((stats.xacts, stats.links), (20, u32::from(!by_user)));
            assert!(rig.events().is_empty());
            let taken = rig.take(&c);
            assert!(taken.link.pinned && taken.link.is_idle());
            rig.dp.unlink(c.slot).unwrap();
            assert!(!rig.dp.client_info(c.slot).unwrap().link.pinned);
        }
    });
}

#[test]
fn a_session_carries_what_is_its_servers_own() {
    on_each_lane(&Config::default(), |rig| {
        let (mut c, mut s) = (rig.held_client(rig.pool, 1), rig.server(0));
        rig.dp.set_client_pinned(c.slot, true).unwrap();
        assert_eq!(rig.dp.give_client(c.slot, 0).unwrap(), Give::Done);
        let sync = message(b'S', b"");
        let named = [
            message(b'P', b"name\0select 1\0\0\0"),
            message(b'D', b"Sname\0"),
            message(b'B', b"portal\0name\0\0\0\0\0\0\0"),
            message(b'C', b"Sname\0"),
            sync.clone(),
            message(b'P', b"\0unbound\0\0\0"),
            sync.clone(),
        ]
        .concat();
        send(&mut c.app, &named);
        expect(&mut s.backend, &named);
        let answers = [ready(b'I'), message(b'C', b"DISCARD ALL\0"), ready(b'I')].concat();
        send(&mut s.backend, &answers);
        expect(&mut c.app, &answers);

        // A batch in two parts, and a notification in the middle of it, behind its end, and when nothing is asked.
        let (first, second) = (message(b'P', b"\0q\0\0\0"), [message(b'H', b""), sync.clone()].concat());
        let news = message(b'A', b"\0\0\0\0news\0\0");
        send(&mut c.app, &first);
        expect(&mut s.backend, &first);
        assert!(rig.dp.client_info(c.slot).unwrap().link.open);
        send(&mut s.backend, &news);
        expect(&mut c.app, &news);
        send(&mut c.app, &second);
        expect(&mut s.backend, &second);
        let answers = [message(b'1', b""), ready(b'I'), news.clone()].concat();
        send(&mut s.backend, &answers);
        expect(&mut c.app, &answers);
        send(&mut s.backend, &news);
        expect(&mut c.app, &news);

        // Each ReadyForQuery outside of a transaction block ended a transaction.
        let stats = rig.dp.client_info(c.slot).unwrap().stats;
        assert_eq!((stats.xacts, stats.queries), (3, 3));
        assert!(rig.events().is_empty());

        // User space takes over in the middle of a batch, at a known position.
        send(&mut c.app, &first);
        expect(&mut s.backend, &first);
        let taken = rig.take(&c);
        assert_eq!((taken.link.pending, taken.link.open, taken.link.batch), (0, true, true));
        assert!(taken.request.is_boundary());
    });
}

#[test]
fn ends_of_connections_are_seen_and_slots_are_reused_under_a_new_generation() {
    let config = Config { clients_max: 2, servers_max: 2, ..Config::default() };
    on_each_lane(&config, |rig| {
        let mut old = None;
        for round in 0..5 {
            let (mut c, mut s) = (rig.client(), rig.server(0));
            assert_ne!(Some(c.slot), old);
            send(&mut c.app, &query("q"));
            expect(&mut s.backend, &query("q"));
            c.app.flush().unwrap();
            drop(c.app);
            let taken = rig.take(&underpass_client(&c.slot, &c.near));
            assert_eq!(taken.server, Some(s.slot), "round {round}");
            assert!(rig.dp.free_client(c.slot).is_err(), "linked");
            rig.dp.unlink(c.slot).unwrap();
            rig.dp.free_client(c.slot).unwrap();
            assert!(rig.dp.take(c.slot).is_err(), "stale");
            drop(c.near);
            rig.dp.free_server(s.slot).unwrap();
            old = Some(c.slot);
            std::thread::sleep(std::time::Duration::from_millis(110));
        }
    });
}

/// A client whose application end is gone.
fn underpass_client(slot: &underpass_sockmap::ClientSlot, near: &std::net::TcpStream) -> Client {
    Client { app: near.try_clone().unwrap(), near: near.try_clone().unwrap(), slot: *slot }
}

#[test]
fn a_full_event_ring_loses_nothing() {
    let config = Config { event_ring_bytes: 4096, clients_max: 600, ..Config::default() };
    on_each_lane(&config, |rig| {
        let mut clients: Vec<_> = (0..300).map(|_| rig.client()).collect();
        for c in &mut clients {
            send(&mut c.app, &message(b'X', b""));
        }
        eventually("all were passed", || rig.dp.counter(Counter::PassedClient) >= 300);
        assert!(rig.dp.counter(Counter::EventsLost) > 0, "the ring was to overflow");
        let up = rig.events();
        for c in &clients {
            assert!(up.contains(&Event::ClientUp { client: c.slot, reason: Reason::Terminate }));
        }
        assert!(rig.events().is_empty(), "each once");
    });
}

/// Somebody else may hold the client's socket, too: it stays in its map.
#[test]
fn a_place_whose_socket_is_still_open_is_not_given_to_another_client() {
    let Some(dp) = common::open(&Config { clients_max: 2, ..Config::default() }) else { return };
    let pool = dp.add_pool().unwrap();
    let (_app, kept) = pair();
    let first = dp.register_client(kept.as_fd(), pool, 1).unwrap();
    dp.free_client(first).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(150));
    let (_other_app, other) = pair();
    let second = dp.register_client(other.as_fd(), pool, 1).unwrap();
    assert_ne!(first.index(), second.index());
    drop(kept);
    std::thread::sleep(std::time::Duration::from_millis(150));
    let (_third_app, third) = pair();
    assert_eq!(dp.register_client(third.as_fd(), pool, 1).unwrap().index(), first.index());
}
