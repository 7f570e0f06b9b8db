// SPDX-License-Identifier: Apache-2.0
//! What the packet programs tell, before anybody makes records of it.
#![allow(unsafe_code)]

mod common;

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{Ipv6Addr, SocketAddr, SocketAddrV6, TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::thread;

use common::skipped;
use rustix::net::{AddressFamily, SendFlags, SocketType, ipproto, sendto, socket};
use underpass_capture::{
    Event, Kernel, Nobody, Recorder, ResponseLevel, Settings, SourceKind, Totals, cgroup2_mount,
};
use underpass_trace::{Direction, Level, Protocol, Record};

/// Flags of a TCP header.
const SYN: u8 = 0x02;
const ACK_PSH: u8 = 0x18;
/// Where a TCP header has its checksum.
static CHECKSUM_AT: i32 = 16;

/// Watches a listener of the test's own.
fn watch() -> (Kernel, TcpListener) {
    watch_at(ResponseLevel::SUMMARY)
}

fn watch_at(level: ResponseLevel) -> (Kernel, TcpListener) {
    let listener = TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).expect("listen");
    let mut kernel = Kernel::open(&Settings {
        protocol: Protocol::Postgres,
        port: Some(listener.local_addr().expect("address").port()),
        netns: None,
        level,
        ring_bytes: 1 << 20,
        rings: 2,
    })
    .expect("programs");
    kernel.attach_packets(&cgroup2_mount().expect("a cgroup")).expect("attach");
    (kernel, listener)
}

/// A client says something, and the server has heard it.
fn say(client: &mut TcpStream, server: &mut TcpStream, what: &[u8]) {
    client.write_all(what).expect("write");
    server.read_exact(&mut vec![0; what.len()]).expect("read");
}

#[test]
fn connections_are_spread_over_the_rings() {
    if skipped() {
        return;
    }
    let (mut kernel, listener) = watch();
    // The kernel's own choice of ports: nearly all of them are even or nearly all are odd.
    let clients: Vec<_> = (0..16)
        .map(|_| {
            let mut client = TcpStream::connect(listener.local_addr().expect("address")).expect("connect");
            let (mut server, _) = listener.accept().expect("accept");
            say(&mut client, &mut server, b"hello");
            (client, server)
        })
        .collect();
    let mut rings = BTreeSet::new();
    let events = kernel.drain(|ring, _| {
        rings.insert(ring);
    });
    assert!(events >= 2 * clients.len());
    assert_eq!(rings.into_iter().collect::<Vec<_>>(), [0, 1]);
}

/// A segment from one port of this machine to another, with any sequence number; the kernel fills in the checksum.
fn forge(source: u16, target: u16, flags: u8, payload: &[u8]) {
    let ports = [source.to_be_bytes(), target.to_be_bytes()].concat();
    // Sequence number and acknowledgement; header of five words, window, checksum, urgent pointer.
    let rest = [1, 2, 3, 4, 0, 0, 0, 0, 5 << 4, flags, 0xff, 0xff, 0, 0, 0, 0];
    let raw = socket(AddressFamily::INET6, SocketType::RAW, Some(ipproto::TCP)).expect("a raw socket");
    // SAFETY: the kernel reads one int.
    let set = unsafe {
        libc::setsockopt(
            raw.as_raw_fd(),
            libc::IPPROTO_IPV6,
            libc::IPV6_CHECKSUM,
            (&raw const CHECKSUM_AT).cast(),
            4,
        )
    };
    assert_eq!(set, 0);
    // A raw socket takes no port.
    let target = SocketAddr::V6(SocketAddrV6::new(Ipv6Addr::LOCALHOST, 0, 0, 0));
    sendto(&raw, &[&ports[..], &rest, payload].concat(), SendFlags::empty(), &target).expect("send");
}

#[test]
fn a_syn_that_tcp_refuses_is_not_told() {
    if skipped() {
        return;
    }
    let (mut kernel, listener) = watch();
    let mut client = TcpStream::connect(listener.local_addr().expect("address")).expect("connect");
    let (mut server, _) = listener.accept().expect("accept");
    say(&mut client, &mut server, b"before");
    let port = |address: std::io::Result<SocketAddr>| address.expect("address").port();
    forge(port(client.local_addr()), port(client.peer_addr()), SYN, b"");
    say(&mut client, &mut server, b"behind");
    let (mut syns, mut said) = (0, Vec::new());
    kernel.drain(|_, event| {
        if let Event::Packet { direction: Direction::Frontend, flags, payload, .. } = event {
            syns += u32::from(flags.syn);
            said.extend_from_slice(payload);
        }
    });
    assert_eq!((syns, said.as_slice()), (1, &b"beforebehind"[..]));
}

/// Without a handshake: it is late, of before a restart, or forged.
#[test]
fn what_comes_to_the_socket_that_listens_is_told_as_such() {
    if skipped() {
        return;
    }
    let (mut kernel, listener) = watch();
    let address = listener.local_addr().expect("address");
    // A port that nobody uses any more.
    let unused =
        TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).expect("bind").local_addr().expect("address").port();
    forge(unused, address.port(), ACK_PSH, b"forged");
    let mut client = TcpStream::connect(address).expect("connect");
    let (mut server, _) = listener.accept().expect("accept");
    say(&mut client, &mut server, b"heard");
    let (mut told, mut cookies) = (Vec::new(), BTreeSet::new());
    kernel.drain(|_, event| {
        if let Event::Packet { direction: Direction::Frontend, cookie, flags, listens, payload, .. } = event
            && (flags.syn || !payload.is_empty())
        {
            told.push((listens, flags.syn, payload.to_vec()));
            cookies.insert((listens, cookie));
        }
    });
    told.sort();
    let expected = [(false, false, &b"heard"[..]), (true, false, b"forged"), (true, true, b"")];
    assert_eq!(told, expected.map(|(listens, syn, payload)| (listens, syn, payload.to_vec())));
    assert_eq!(cookies.len(), 2, "{cookies:?}");
    let accounts = kernel.accounts(SourceKind::Packets, Direction::Frontend).expect("accounts");
    assert!(accounts.seen.bytes == 11 && accounts.add_up(), "{accounts:?}");

    // What the recorder makes of it: nothing.
    let mut recorder = Recorder::new(Protocol::Postgres, Level::Summary, Box::new(Nobody));
    let mut query = Vec::new();
    underpass_wire::frontend::build::query(&mut query, b"insert into t values (1)");
    forge(unused, address.port(), ACK_PSH, &query);
    let mut heard = 0;
    kernel.drain(|ring, event| {
        if let Event::Packet { listens: true, payload, .. } = event {
            heard += payload.len();
        }
        recorder.event(ring, event, &mut |record: Record<'_>| panic!("{record:?}"));
    });
    recorder.finish(1, &mut |record: Record<'_>| panic!("{record:?}"));
    assert_eq!((heard, recorder.totals()), (query.len(), Totals::default()));
}

/// More than 32 bits count. Nobody reads the rings: nearly all of it is lost, and none of it is left out on purpose.
#[test]
fn a_response_of_more_than_4_gib_is_never_left_out_at_level_full() {
    if skipped() {
        return;
    }
    let (kernel, listener) = watch_at(ResponseLevel::FULL);
    let mut client = TcpStream::connect(listener.local_addr().expect("address")).expect("connect");
    let (mut server, _) = listener.accept().expect("accept");
    say(&mut client, &mut server, b"all of it");
    let total = (4u64 << 30) + (64 << 20);
    let answer = thread::spawn(move || {
        let bytes = vec![b'x'; 4 << 20];
        for _ in 0..total / bytes.len() as u64 {
            server.write_all(&bytes).expect("write");
        }
    });
    let (mut bytes, mut heard) = (vec![0; 4 << 20], 0);
    loop {
        match client.read(&mut bytes).expect("read") as u64 {
            0 => break,
            n => heard += n,
        }
    }
    answer.join().expect("the server");
    assert_eq!(heard, total);
    let accounts = kernel.accounts(SourceKind::Packets, Direction::Backend).expect("accounts");
    assert!(accounts.seen.bytes >= total && accounts.add_up(), "{accounts:?}");
    assert_eq!(accounts.filtered.bytes, 0, "{accounts:?}");
}
