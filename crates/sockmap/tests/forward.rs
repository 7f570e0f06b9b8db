// SPDX-License-Identifier: Apache-2.0
//! The naive forwarder, and the naive pool, over real sockets.

#![allow(unsafe_code)]

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use underpass_sockmap::{Forwarder, Keeper, Local};

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

fn expect(stream: &mut TcpStream, wanted: &[u8], what: &str) {
    let mut got = vec![0; wanted.len()];
    stream.read_exact(&mut got).unwrap();
    assert_eq!(got, wanted, "{what}");
}

/// Says something that a program has seen when this returns: TCP's count is told under the lock under which the program runs.
fn say(client: &mut TcpStream, inner: &TcpStream, said: &[u8]) {
    let before = tcp_bytes(inner).1;
    client.write_all(said).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while tcp_bytes(inner).1 < before + said.len() as u64 {
        assert!(Instant::now() < deadline, "nothing has come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whoever finds the one server busy waits in the kernel, and its send brings the next request along.
#[test]
fn root_kept_requests_come_to_their_server_in_order() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    for both in [false, true] {
        let mut keeper = Keeper::open(both).unwrap();
        let (outer, mut server) = pair();
        keeper.add_server(&outer).unwrap();
        let mut first = pair();
        let mut waiting = [pair(), pair(), pair()];
        for (_, inner) in std::iter::once(&first).chain(&waiting) {
            keeper.add_client(inner).unwrap();
        }
        // Of each length, so that each way to the end of the last word is taken, and the longest.
        for length in (1..40).chain([1023, 1024]) {
            let what = format!("both: {both}, {length} bytes");
            let said = |number: usize| vec![number as u8; length];
            first.0.write_all(&said(0)).unwrap();
            expect(&mut server, &said(0), &what);
            for (number, (client, inner)) in (1..).zip(&mut waiting) {
                say(client, inner, &said(number));
            }
            // Terminate is nobody's request, and does not wait.
            say(&mut first.0, &first.1, b"X\0\0\0\x04");
            server.write_all(&[0, 1]).unwrap();
            expect(&mut first.0, &[0, 1], &what);
            for (number, (client, _)) in (1..).zip(&mut waiting) {
                expect(&mut server, &said(number), &what);
                server.write_all(&[number as u8, 1]).unwrap();
                expect(client, &[number as u8, 1], &what);
            }
        }
        server.set_nonblocking(true).unwrap();
        let more = server.read(&mut [0]).map_err(|error| error.kind());
        assert_eq!(more, Err(ErrorKind::WouldBlock), "both: {both}");
    }
}

#[test]
fn root_more_clients_come_and_go_than_there_are_places() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    for both in [false, true] {
        let mut keeper = Keeper::open(both).unwrap();
        let (outer, mut server) = pair();
        keeper.add_server(&outer).unwrap();
        for _ in 0..300 {
            let (mut client, inner) = pair();
            let place = keeper.add_client(&inner).unwrap();
            client.write_all(&[1, 2]).unwrap();
            expect(&mut server, &[1, 2], "request");
            server.write_all(&[3]).unwrap();
            expect(&mut client, &[3], "answer");
            drop((client, inner));
            keeper.remove_client(place);
        }
    }
}
