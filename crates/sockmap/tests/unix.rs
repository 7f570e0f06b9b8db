// SPDX-License-Identifier: Apache-2.0
//! What this kernel does with unix stream sockets in a socket map: the facts that lane decisions rest on.
//!
//! `docs/lanes.md`, "Unix sockets", draws the conclusions. Names: the *pooler* has `inner`, a TCP socket to a client, and `outer`, a
//! unix socket to a server.
#![allow(unsafe_code)]

mod common;

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use common::{PATIENCE, eventually};
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec};
use underpass_sockmap::Forwarder;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// A sender that got nothing away for so long is stopped.
const STALL: Duration = Duration::from_millis(300);

/// How long a race is looked for.
const RACE: Duration = Duration::from_secs(5);

/// A pooler between a client on TCP and a server on a unix socket.
struct Rig {
    client: TcpStream,
    inner: TcpStream,
    outer: UnixStream,
    server: UnixStream,
}

impl Rig {
    fn new() -> Self {
        let (client, inner) = common::pair();
        let (outer, server) = unix_pair();
        Self { client, inner, outer, server }
    }
}

fn unix_pair() -> (UnixStream, UnixStream) {
    let (near, far) = UnixStream::pair().unwrap();
    for stream in [&near, &far] {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
    }
    (near, far)
}

/// Without privilege there is nothing to try.
fn forwarder(inward: bool) -> Option<Forwarder> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return None;
    }
    Some(if inward { Forwarder::open_inward() } else { Forwarder::open() }.unwrap())
}

/// Bytes whose positions differ.
fn numbered(length: usize) -> Vec<u8> {
    (0u32..).flat_map(u32::to_be_bytes).take(length).collect()
}

/// Writes without waiting until nothing is accepted any more.
fn write_until_stalled<S: Write + AsFd>(to: &mut S, bytes: &[u8]) -> usize {
    rustix::io::ioctl_fionbio(&*to, true).unwrap();
    let (mut done, mut last) = (0, Instant::now());
    while done < bytes.len() && last.elapsed() < STALL {
        match to.write(&bytes[done..bytes.len().min(done + 8 * KIB)]) {
            Ok(n) => {
                done += n;
                last = Instant::now();
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => thread::sleep(Duration::from_millis(1)),
            Err(e) => panic!("{e}"),
        }
    }
    rustix::io::ioctl_fionbio(&*to, false).unwrap();
    done
}

/// All of `bytes` from one end to the other, in sends of `step` bytes.
fn carry(from: &mut (impl Write + Send), to: &mut (impl Read + Send), bytes: &[u8], step: usize) {
    let mut got = vec![0; bytes.len()];
    thread::scope(|scope| {
        scope.spawn(|| bytes.chunks(step).for_each(|chunk| from.write_all(chunk).unwrap()));
        to.read_exact(&mut got).unwrap();
    });
    assert!(got == bytes, "other bytes came out, in sends of {step}");
}

/// What the peer has not read, with its overhead (`sk_wmem_alloc`).
fn charged_to_sender(socket: &impl AsFd) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: SIOCOUTQ (= TIOCOUTQ) writes one int.
    let rc = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    assert_eq!(rc, 0, "{}", io::Error::last_os_error());
    usize::try_from(bytes).unwrap()
}

/// In the socket's own receive queue (SIOCINQ).
fn queued(socket: &impl AsFd) -> usize {
    rustix::io::ioctl_fionread(socket).unwrap() as usize
}

fn ready(socket: &impl AsFd, flags: PollFlags) -> bool {
    let mut fds = [PollFd::new(socket, flags)];
    rustix::event::poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
}

fn is_empty(socket: &mut (impl Read + AsFd)) -> bool {
    rustix::io::ioctl_fionbio(&*socket, true).unwrap();
    let got = socket.read(&mut [0]);
    rustix::io::ioctl_fionbio(&*socket, false).unwrap();
    matches!(got, Err(e) if e.kind() == ErrorKind::WouldBlock)
}

/// So many bytes of a socket that does not block.
fn read_by_polling(from: &mut impl Read, length: usize) -> Vec<u8> {
    let (mut got, mut at) = (vec![0; length], 0);
    eventually("all of it has come", || {
        while at < length {
            match from.read(&mut got[at..]) {
                Ok(n) => at += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return false,
                Err(e) => panic!("{e}"),
            }
        }
        true
    });
    got
}

// ---- a server at a unix socket: its answers -------------------------------------------------------------------

#[test]
fn answers_come_exact_and_in_order_whatever_their_pieces() {
    let Some(forwarder) = forwarder(false) else { return };
    let mut rig = Rig::new();
    forwarder.join(&rig.inner, &rig.outer).unwrap();
    let bytes = numbered(4 * MIB);
    for step in [8 * KIB, 64 * KIB, MIB, 777] {
        carry(&mut rig.server, &mut rig.client, &bytes, step);
    }
    carry(&mut rig.server, &mut rig.client, &bytes[..20_000], 1);
}

#[test]
fn the_program_runs_inside_the_servers_send() {
    let Some(forwarder) = forwarder(false) else { return };
    let mut rig = Rig::new();
    forwarder.join(&rig.inner, &rig.outer).unwrap();
    for _ in 0..1000 {
        rig.server.write_all(b"answer").unwrap();
        // Nobody else has run on behalf of the pooler's socket, and its queue is empty.
        assert_eq!(queued(&rig.outer), 0);
    }
    let mut got = vec![0; 6000];
    rig.client.read_exact(&mut got).unwrap();
    assert_eq!(got, b"answer".repeat(1000));
}

#[test]
fn a_reader_that_stops_holds_the_server_back_as_without_a_program() {
    let Some(forwarder) = forwarder(false) else { return };
    let bytes = numbered(48 * MIB);
    let (mut tcp, _far) = common::pair();
    let by_tcp = write_until_stalled(&mut tcp, &bytes);
    let (mut unix, _far) = unix_pair();
    let by_unix = write_until_stalled(&mut unix, &bytes);

    let mut rig = Rig::new();
    forwarder.join(&rig.inner, &rig.outer).unwrap();
    let done = write_until_stalled(&mut rig.server, &bytes);
    println!(
        "{} KiB for a reader that stopped; a TCP connection holds {} KiB, a unix socket {} KiB",
        done / KIB,
        by_tcp / KIB,
        by_unix / KIB
    );
    assert!(done <= by_tcp + by_unix + MIB, "{done} bytes: not bounded");
    // What waits for the client's socket is still the server's, in its own send buffer: so it waits, and by poll.
    assert!(charged_to_sender(&rig.server) > 0);
    assert!(!ready(&rig.server, PollFlags::OUT));

    let rest = bytes[done..].to_vec();
    let mut server = rig.server.try_clone().unwrap();
    let writer = thread::spawn(move || server.write_all(&rest).unwrap());
    let mut got = vec![0; bytes.len()];
    rig.client.read_exact(&mut got).unwrap();
    writer.join().unwrap();
    assert!(got == bytes, "other bytes came out");
    eventually("the charge is given back", || charged_to_sender(&rig.server) == 0);
    assert!(ready(&rig.server, PollFlags::OUT));
}

#[test]
fn the_last_answer_arrives_and_the_end_is_the_poolers_to_tell() {
    let Some(forwarder) = forwarder(false) else { return };
    let mut rig = Rig::new();
    forwarder.join(&rig.inner, &rig.outer).unwrap();
    rig.server.write_all(b"last").unwrap();
    drop(rig.server);
    let mut got = [0; 4];
    rig.client.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"last");
    assert!(ready(&rig.outer, PollFlags::RDHUP));
    assert_eq!(rig.outer.read(&mut got).unwrap(), 0);
    assert!(is_empty(&mut rig.client), "the end was forwarded");
}

#[test]
fn a_server_that_dies_with_requests_unread_resets_the_poolers_socket() {
    let Some(forwarder) = forwarder(false) else { return };
    let mut rig = Rig::new();
    forwarder.join(&rig.inner, &rig.outer).unwrap();
    rig.client.write_all(b"request").unwrap();
    eventually("the request is there", || queued(&rig.server) == 7);
    drop(rig.server);
    let error = rig.outer.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert_eq!(rig.outer.read(&mut [0]).unwrap(), 0);
}

// ---- a server at a unix socket: its requests ------------------------------------------------------------------

#[test]
fn requests_come_exact_and_in_order_also_into_a_full_buffer() {
    let Some(forwarder) = forwarder(false) else { return };
    let mut rig = Rig::new();
    forwarder.join(&rig.inner, &rig.outer).unwrap();
    let bytes = numbered(4 * MIB);
    for step in [8 * KIB, MIB, 777] {
        carry(&mut rig.client, &mut rig.server, &bytes, step);
    }
    // The worker meets a full buffer and sends in parts; nothing comes twice.
    let mut late = rig.client.try_clone().unwrap();
    let sent = bytes.clone();
    let writer = thread::spawn(move || late.write_all(&sent).unwrap());
    let mut got = vec![0; bytes.len()];
    for part in got.chunks_mut(256 * KIB) {
        thread::sleep(Duration::from_millis(5));
        rig.server.read_exact(part).unwrap();
    }
    writer.join().unwrap();
    assert!(got == bytes, "other bytes came out");
}

#[test]
fn requests_are_bounded_by_nothing_but_a_budget() {
    let Some(forwarder) = forwarder(false) else { return };
    let mut rig = Rig::new();
    forwarder.join(&rig.inner, &rig.outer).unwrap();
    let bytes = numbered(16 * MIB);
    // As with lane D: what a redirect takes from TCP is no one's any more. So programs count the bytes of a cycle.
    rig.client.write_all(&bytes).unwrap();
    // And the unix socket's own gauge does not see what its worker has not sent.
    assert!(charged_to_sender(&rig.outer) < MIB);
    let mut got = vec![0; bytes.len()];
    rig.server.read_exact(&mut got).unwrap();
    assert!(got == bytes, "other bytes came out");
}

// ---- hand-over --------------------------------------------------------------------------------------------

#[test]
fn what_a_program_passes_is_readable_and_wakes_an_edge() {
    let Some(forwarder) = forwarder(false) else { return };
    let (mut outer, mut server) = unix_pair();
    forwarder.watch(&outer).unwrap();
    let poll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    epoll::add(&poll, &outer, EventData::new_u64(1), EventFlags::IN | EventFlags::RDHUP | EventFlags::ET)
        .unwrap();
    let mut events = Vec::with_capacity(4);
    for round in 0..100u8 {
        server.write_all(&[round; 100]).unwrap();
        let timeout = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        events.clear();
        epoll::wait(&poll, rustix::buffer::spare_capacity(&mut events), Some(&timeout)).unwrap();
        assert_eq!(events.len(), 1, "round {round}");
        let mut got = [0; 100];
        outer.read_exact(&mut got).unwrap();
        assert_eq!(got, [round; 100]);
    }
}

#[test]
fn neither_a_redirect_nor_a_pass_wakes_who_waits_for_the_end() {
    let Some(forwarder) = forwarder(false) else { return };
    for redirects in [true, false] {
        let mut rig = Rig::new();
        if redirects {
            forwarder.join(&rig.inner, &rig.outer).unwrap();
        } else {
            forwarder.watch(&rig.outer).unwrap();
        }
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        epoll::add(&poll, &rig.outer, EventData::new_u64(1), EventFlags::RDHUP | EventFlags::ET).unwrap();
        let woken = || {
            let mut events = Vec::with_capacity(4);
            epoll::wait(&poll, rustix::buffer::spare_capacity(&mut events), Some(&Timespec::default()))
                .unwrap();
            !events.is_empty()
        };
        for _ in 0..100 {
            rig.server.write_all(b"x").unwrap();
            assert!(!woken());
        }
        drop(rig.server);
        assert!(woken());
    }
}

/// The first hole. On TCP what is passed keeps the sender's window closed until it is read; here the program's pass gives the sender its
/// charge back, and nothing stops it.
#[test]
fn what_is_passed_is_bounded_by_nothing() {
    let Some(forwarder) = forwarder(false) else { return };
    let (mut outer, mut server) = unix_pair();
    forwarder.watch(&outer).unwrap();
    let bytes = numbered(16 * MIB);
    assert_eq!(
        write_until_stalled(&mut server, &bytes),
        bytes.len(),
        "has the kernel learnt to hold it back?"
    );
    assert_eq!(charged_to_sender(&server), 0);
    assert!(ready(&server, PollFlags::OUT));
    let mut got = vec![0; bytes.len()];
    outer.read_exact(&mut got).unwrap();
    assert!(got == bytes, "other bytes came out");
}

/// A way around the first hole: by the worker, into the socket's own queue. It costs a wake-up that a pass does not, and makes the second
/// hole worse: a chunk that a receive call takes past the program overtakes those that wait for the worker. So here nobody sends meanwhile.
#[test]
fn what_goes_to_its_own_queue_by_a_redirect_is_bounded_by_the_two_buffers() {
    let Some(forwarder) = forwarder(true) else { return };
    let (mut outer, mut server) = unix_pair();
    forwarder.join(&outer, &outer).unwrap();
    let bytes = numbered(16 * MIB);
    let done = write_until_stalled(&mut server, &bytes);
    println!("{} KiB for a pooler that does not read", done / KIB);
    assert!(done < MIB, "{done} bytes");
    assert!(!ready(&server, PollFlags::OUT));
    outer.set_nonblocking(true).unwrap();
    assert!(read_by_polling(&mut outer, done) == bytes[..done], "other bytes came out");
    eventually("the server may send again", || ready(&server, PollFlags::OUT));
}

#[test]
fn chunks_from_before_the_map_are_never_caught_up_with() {
    let Some(forwarder) = forwarder(false) else { return };
    let mut rig = Rig::new();
    for early in [b"1", b"2", b"3"] {
        rig.server.write_all(early).unwrap();
    }
    forwarder.join(&rig.inner, &rig.outer).unwrap();
    assert_eq!(queued(&rig.outer), 3, "the program has not run");
    // Each send makes the kernel look at one chunk, the oldest: the last three stay behind for ever.
    let mut got = [0];
    for (sent, comes) in [(b"4", b"1"), (b"5", b"2")] {
        rig.server.write_all(sent).unwrap();
        rig.client.read_exact(&mut got).unwrap();
        assert_eq!(&got, comes);
        assert_eq!(queued(&rig.outer), 3);
    }
    // And a receive call takes them past the program, which on TCP would run.
    let mut rest = [0; 3];
    rig.outer.read_exact(&mut rest).unwrap();
    assert_eq!(&rest, b"345");
    assert!(is_empty(&mut rig.client));
}

#[test]
fn a_chunk_that_was_read_in_part_is_forwarded_whole() {
    let Some(forwarder) = forwarder(false) else { return };
    let mut rig = Rig::new();
    rig.server.write_all(b"0123456789").unwrap();
    let mut head = [0; 4];
    rig.outer.read_exact(&mut head).unwrap();
    forwarder.join(&rig.inner, &rig.outer).unwrap();
    rig.server.write_all(b"x").unwrap();
    let mut got = [0; 10];
    rig.client.read_exact(&mut got).unwrap();
    // So a socket may enter the map only with an empty queue, and no call may read while a send is under way.
    assert_eq!(&got, b"0123456789");
}

/// The second hole: the window between a send and its program, which the two tests before hold open. It is short; this one looks for it in a
/// stream whose reader never sleeps, and accepts no other difference.
#[test]
fn a_receive_call_that_races_with_a_send_may_get_bytes_twice() {
    let Some(forwarder) = forwarder(false) else { return };
    let start = Instant::now();
    let mut sends = 0;
    while start.elapsed() < RACE {
        let (mut outer, mut server) = unix_pair();
        forwarder.watch(&outer).unwrap();
        outer.set_nonblocking(true).unwrap();
        let bytes = numbered(16 * MIB);
        let met = thread::scope(|scope| {
            scope.spawn(|| bytes.chunks(100).try_for_each(|chunk| server.write_all(chunk)));
            let (mut at, mut buffer) = (0, [0; 10]);
            while at < bytes.len() {
                match outer.read(&mut buffer) {
                    Ok(n) if buffer[..n] == bytes[at..at + n] => at += n,
                    Ok(n) => {
                        // The send that was just read in part, from its beginning.
                        assert_eq!(buffer[..n], bytes[at / 100 * 100..][..n], "at {at}");
                        drop(outer);
                        return true;
                    }
                    Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock),
                }
                sends = sends.max(at / 100);
            }
            false
        });
        if met {
            return println!("met after {sends} sends or more");
        }
    }
    println!("not met in {RACE:?}");
}

// ---- a client at a unix socket --------------------------------------------------------------------------------

#[test]
fn requests_of_a_unix_client_reach_the_queue_of_a_backend_on_tcp() {
    let Some(forwarder) = forwarder(true) else { return };
    let (mut client, inner) = unix_pair();
    let (_outer, mut backend) = common::pair();
    forwarder.join(&inner, &backend).unwrap();
    // As PostgreSQL: a reader that sleeps in recv() does not wake for redirected bytes.
    backend.set_nonblocking(true).unwrap();
    let bytes = numbered(MIB);
    let mut got = Vec::new();
    thread::scope(|scope| {
        scope.spawn(|| client.write_all(&bytes).unwrap());
        got = read_by_polling(&mut backend, bytes.len());
    });
    assert!(got == bytes, "other bytes came out");
}

/// Answers to a client on a unix socket, whether they are sent to it or put into its own queue: no `write_seq` tells what waits, so the bound of
/// lane D has nothing to go by.
#[test]
fn answers_to_a_unix_client_come_exact_and_are_bounded_by_nothing() {
    for inward in [false, true] {
        let Some(forwarder) = forwarder(inward) else { return };
        let (mut client, inner) = unix_pair();
        let (outer, mut server) = common::pair();
        forwarder.join(if inward { &client } else { &inner }, &outer).unwrap();
        let bytes = numbered(16 * MIB);
        server.write_all(&bytes).unwrap();
        assert!(charged_to_sender(&inner) < MIB, "its own gauge does not see them");
        // Inward, a blocking receive call fails with EAGAIN now and then, although bytes are there: no application expects that.
        client.set_nonblocking(true).unwrap();
        assert!(read_by_polling(&mut client, bytes.len()) == bytes, "other bytes came out, inward: {inward}");
    }
}
