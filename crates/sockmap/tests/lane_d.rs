// SPDX-License-Identifier: Apache-2.0
//! Lane D on real sockets: links, releases, and everything that must go up instead.

mod common;

use std::io::Read;
use std::net::TcpStream;
use std::os::fd::AsFd;

use common::{
    answer, eventually, expect, expect_silence, extended, message, open, pair, query, ready, row, send,
};
use underpass_sockmap::{
    ClientSlot, Config, Counter, Datapath, Event, Give, Lane, LaneChoice, PoolSlot, Reason, ServerSlot,
    ServerSpec,
};

/// A client: the application's end, the pooler's end, the slot.
struct Client {
    app: TcpStream,
    near: TcpStream,
    slot: ClientSlot,
}

/// A server: the pooler's end, PostgreSQL's end, the slot.
struct Server {
    near: TcpStream,
    backend: TcpStream,
    slot: ServerSlot,
}

fn client(dp: &Datapath, pool: PoolSlot, fingerprint: u32) -> Client {
    let (app, near) = pair();
    let slot = dp.register_client(near.as_fd(), pool, fingerprint).unwrap();
    assert_eq!(dp.give_client(slot, 0).unwrap(), Give::Done);
    Client { app, near, slot }
}

fn server(dp: &Datapath, pool: PoolSlot, ordinal: u32, fingerprint: u32) -> Server {
    let (near, backend) = pair();
    let spec = ServerSpec { pool, ordinal, fingerprint, lane: LaneChoice::Remote };
    let (slot, lane) = dp.register_server(near.as_fd(), &spec).unwrap();
    assert_eq!(lane, Lane::D);
    assert_eq!(dp.push_idle(slot, 0).unwrap(), Give::Done);
    Server { near, backend, slot }
}

fn up(dp: &Datapath) -> Vec<Event> {
    let mut events = Vec::new();
    dp.drain_events(&mut events).unwrap();
    events
}

fn read_some(from: &mut TcpStream, bytes: usize) -> Vec<u8> {
    let mut buffer = vec![0u8; bytes];
    from.read_exact(&mut buffer).unwrap();
    buffer
}

#[test]
fn a_transaction_links_forwards_and_releases() {
    let Some(dp) = open(&Config::default()) else { return };
    let pool = dp.add_pool().unwrap();
    let (mut c, mut s) = (client(&dp, pool, 7), server(&dp, pool, 0, 7));
    for i in 0..100 {
        let q = query(&format!("select {i}"));
        send(&mut c.app, &q);
        expect(&mut s.backend, &q);
        let info = dp.client_info(c.slot).unwrap();
        assert_eq!((info.server, info.link.pending), (Some(s.slot), 1));
        assert_eq!(dp.server_peer(s.slot).unwrap(), Some(c.slot));
        let a = answer(format!("row {i}").as_bytes(), b'I');
        send(&mut s.backend, &a);
        expect(&mut c.app, &a);
        eventually("the server is released", || dp.server_peer(s.slot).unwrap().is_none());
        assert_eq!(dp.client_info(c.slot).unwrap().server, None);
    }
    let stats = dp.client_info(c.slot).unwrap().stats;
    assert_eq!((stats.xacts, stats.queries), (100, 100));
    assert!(stats.xact_ns > 0 && stats.xact_ns >= stats.query_ns);
    assert_eq!(dp.counter(Counter::Links), 100);
    assert_eq!(dp.counter(Counter::Releases), 100);
    assert!(up(&dp).is_empty());
    expect_silence(&mut c.near);
    expect_silence(&mut s.near);
}
