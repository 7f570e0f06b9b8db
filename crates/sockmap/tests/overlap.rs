// SPDX-License-Identifier: Apache-2.0
//! Retransmissions that begin with bytes that have come already: no end may see those twice.

mod common;

use std::os::fd::AsFd;

use common::ends::on_each_lane;
use common::forge::retransmit;
use common::{answer, expect, expect_silence, pair, query, send};
use underpass_sockmap::{Config, Counter, Lane};

/// How much of the segment has come before, in bytes; a program cuts off at most 4,095 at a time.
const OVERLAPS: [usize; 5] = [1, 4095, 4096, 9000, 60_000];

#[test]
fn requests_that_come_again_are_cut_to_what_is_new() {
    on_each_lane(&Config::default(), |rig| {
        let (mut c, mut s) = (rig.client(), rig.server(0));
        for (i, overlap) in OVERLAPS.into_iter().enumerate() {
            let (first, second) = (query(&"x".repeat(overlap + 10)), query(&format!("second {i}")));
            send(&mut c.app, &first);
            expect(&mut s.backend, &first);
            retransmit(&c.app, overlap, &[&first[first.len() - overlap..], &second].concat());
            expect(&mut s.backend, &second);
            // Now its sender sends it too, all of which has come.
            send(&mut c.app, &second);
            send(&mut s.backend, &[answer(b"first", b'I'), answer(b"second", b'I')].concat());
            expect(&mut c.app, &[answer(b"first", b'I'), answer(b"second", b'I')].concat());
            rig.expect_released(&s);
            assert_eq!(rig.dp.counter(Counter::Overlaps), i as u64 + 1);
        }
        expect_silence(&mut s.backend);
        assert!(rig.events().is_empty());
    });
}

#[test]
fn responses_that_come_again_are_cut_to_what_is_new() {
    on_each_lane(&Config::default(), |rig| {
        // In lane A no segment carries them.
        if rig.lane != Lane::D {
            return;
        }
        let (mut c, mut s) = (rig.client(), rig.server(0));
        for (i, overlap) in OVERLAPS.into_iter().enumerate() {
            send(&mut c.app, &query("select"));
            expect(&mut s.backend, &query("select"));
            let all = answer(&vec![b'y'; overlap + 20], b'I');
            let (first, second) = all.split_at(all.len() - 10);
            send(&mut s.backend, first);
            expect(&mut c.app, first);
            retransmit(&s.backend, overlap, &[&first[first.len() - overlap..], second].concat());
            expect(&mut c.app, second);
            send(&mut s.backend, second);
            rig.expect_released(&s);
            assert_eq!(rig.dp.counter(Counter::Overlaps), i as u64 + 1);
        }
        expect_silence(&mut c.app);
    });
}

#[test]
fn user_space_does_not_read_them_twice_either() {
    on_each_lane(&Config::default(), |rig| {
        let mut c = rig.held_client(rig.pool, 1);
        send(&mut c.app, b"first");
        expect(&mut c.near, b"first");
        retransmit(&c.app, 3, b"rstsecond");
        expect(&mut c.near, b"second");
        send(&mut c.app, b"second");
        expect_silence(&mut c.near);
    });
}

#[test]
fn what_was_read_before_the_socket_was_registered_comes_no_more() {
    on_each_lane(&Config::default(), |rig| {
        let (mut app, mut near) = pair();
        send(&mut app, b"first");
        expect(&mut near, b"first");
        rig.dp.register_client(near.as_fd(), rig.pool, 1).unwrap();
        retransmit(&app, 3, b"rstsecond");
        expect(&mut near, b"second");
        assert_eq!(rig.dp.counter(Counter::Overlaps), 1);
    });
}
