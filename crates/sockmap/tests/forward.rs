// SPDX-License-Identifier: Apache-2.0
//! The naive forwarder over real sockets.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use underpass_sockmap::Forwarder;

/// Two connected sockets on loopback.
fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    for stream in [&near, &far] {
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    }
    (near, far)
}

#[test]
fn root_bytes_pass_both_ways_in_order_and_only_between_the_two() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let forwarder = Forwarder::open().unwrap();
    let pairs: Vec<_> = (0..3)
        .map(|_| {
            let ((client, inner), (outer, server)) = (pair(), pair());
            forwarder.join(&inner, &outer).unwrap();
            (client, inner, outer, server)
        })
        .collect();
    for (number, (client, _inner, _outer, server)) in pairs.iter().enumerate() {
        let sent: Vec<u8> = (0..100_000_u32).map(|i| (i % 251) as u8 ^ number as u8).collect();
        for (mut from, mut to) in [(client, server), (server, client)] {
            let mut got = vec![0; sent.len()];
            std::thread::scope(|scope| {
                scope.spawn(|| from.write_all(&sent).unwrap());
                to.read_exact(&mut got).unwrap();
            });
            assert!(got == sent, "pair {number}");
        }
    }
}
