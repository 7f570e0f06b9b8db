// SPDX-License-Identifier: Apache-2.0
//! The naive forwarder over real sockets.

#![allow(unsafe_code)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::Duration;

use underpass_sockmap::{Forwarder, Local};

/// Two connected sockets on loopback.
fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    for stream in [&near, &far] {
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        // Requests whose answers come another way are acknowledged late.
        stream.set_nodelay(true).unwrap();
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

/// Bytes of a connection that TCP has sent and seen acknowledged, and those that it has received.
fn tcp_bytes(stream: &TcpStream) -> (u64, u64) {
    // struct tcp_info (linux/tcp.h; the layout only grows): tcpi_bytes_acked, tcpi_bytes_received.
    const ACKED: usize = 120;
    let mut info = [0u64; 32];
    let mut length = size_of_val(&info) as libc::socklen_t;
    // SAFETY: the buffer is as long as length says.
    let rc = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    assert_eq!(rc, 0);
    (info[ACKED / 8], info[ACKED / 8 + 1])
}

/// Each way that is to pass TCP by does so, and each other does not.
#[test]
fn root_bytes_pass_between_the_sockets_of_processes() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    for local in [Local::Server, Local::Both, Local::ServerAnswers, Local::BothAnswers] {
        let forwarder = Forwarder::open_local(local).unwrap();
        let ((mut client, mut inner), (mut outer, mut server)) = (pair(), pair());
        forwarder.join_local(&inner, &outer).unwrap();
        let is_copied = matches!(local, Local::ServerAnswers | Local::BothAnswers);
        for sent in 0..100u8 {
            let mut got = [0; 2];
            client.write_all(&[sent, 1]).unwrap();
            if is_copied {
                inner.read_exact(&mut got).unwrap();
                outer.write_all(&got).unwrap();
            }
            server.read_exact(&mut got).unwrap();
            assert_eq!(got, [sent, 1], "{local:?}");
            server.write_all(&[sent, 2]).unwrap();
            client.read_exact(&mut got).unwrap();
            assert_eq!(got, [sent, 2], "{local:?}");
        }
        let (requested, answered) = tcp_bytes(&client);
        let by_tcp = [requested > 100, answered > 100, tcp_bytes(&outer).0 > 100, tcp_bytes(&outer).1 > 100];
        let expected = match local {
            Local::Server => [true, true, false, false],
            Local::Both => [false, false, false, false],
            Local::ServerAnswers => [true, true, true, false],
            Local::BothAnswers => [true, false, true, false],
        };
        assert_eq!(by_tcp, expected, "{local:?}");
    }
}
