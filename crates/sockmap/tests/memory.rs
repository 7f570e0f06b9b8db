// SPDX-License-Identifier: Apache-2.0
//! A client or a server that stops reading costs a fixed amount, and gets everything when it reads on.

mod common;

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::ends::{Client, Rig, Server, on_each_lane};
use common::{eventually, expect, message, query, ready, row};
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};
use underpass_sockmap::{Config, Event, Lane, Reason};

const READERS: usize = 4;
const ROWS: usize = 6000;
const ROW_BYTES: usize = 8000;

fn result() -> Vec<u8> {
    let mut out = Vec::with_capacity(ROWS * (ROW_BYTES + 20));
    for i in 0..ROWS {
        out.extend(row(&vec![i as u8; ROW_BYTES]));
    }
    out.extend(ready(b'I'));
    out
}

/// Writes without blocking until nothing moves for a while; returns how much went in.
fn write_until_stalled(to: &mut TcpStream, bytes: &[u8]) -> usize {
    to.set_nonblocking(true).unwrap();
    let (mut done, mut last) = (0, Instant::now());
    while done < bytes.len() && last.elapsed() < Duration::from_millis(300) {
        match to.write(&bytes[done..bytes.len().min(done + 8192)]) {
            Ok(n) => {
                done += n;
                last = Instant::now();
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => thread::sleep(Duration::from_millis(1)),
            Err(e) => panic!("{e}"),
        }
    }
    to.set_nonblocking(false).unwrap();
    done
}

/// What each of the four sockets of a link may hold either way: SO_SNDBUF and SO_RCVBUF, which the kernel doubles. Fixed, as the pooler's own are
/// towards this host, so that what a link holds does not depend on how the kernel sizes buffers by itself.
const BUFFER: usize = 256 << 10;

fn fix_buffers(c: &Client, s: &Server) {
    for socket in [&c.app, &c.near, &s.near, &s.backend] {
        set_socket_send_buffer_size(socket, BUFFER).unwrap();
        set_socket_recv_buffer_size(socket, BUFFER).unwrap();
    }
}

/// The most that one link may take from its sender while its receiver stands still: four buffers on its way, the lane's own budget, and a chunk, which
/// loopback merges up to 512 KiB, behind it.
fn limit(budget: u32) -> usize {
    4 * 2 * BUFFER + budget as usize + (512 << 10)
}

#[test]
fn readers_that_stop_are_bounded_and_complete_when_they_resume() {
    let (everything, config) = (result(), Config::default());
    on_each_lane(&config, |rig| {
        let mut links: Vec<_> = (0..READERS as u32).map(|i| (rig.client(), rig.server(i))).collect();
        let mut written = Vec::new();
        for (c, s) in &mut links {
            fix_buffers(c, s);
            c.app.write_all(&query("copy")).unwrap();
            expect(&mut s.backend, &query("copy"));
            let done = write_until_stalled(&mut s.backend, &everything);
            assert!(done < everything.len(), "it never stalled");
            written.push(done);
        }
        println!("written {:?} KiB", written.iter().map(|w| w / 1024).collect::<Vec<_>>());
        for &done in &written {
            assert!(done <= limit(config.response_queue_bytes_max), "{done} bytes for one reader");
        }
        thread::sleep(Duration::from_millis(500));
        for (_, s) in &mut links {
            s.backend.set_nonblocking(true).unwrap();
            assert!(s.backend.write(&[0]).is_err(), "flat: it takes no more");
            s.backend.set_nonblocking(false).unwrap();
        }
        let expected = if rig.lane == Lane::D { Reason::ResponseQueue } else { Reason::Room };
        let events = rig.events();
        for (_, s) in &links {
            assert!(events.contains(&Event::ServerUp { server: s.slot, reason: expected }), "{events:?}");
        }

        for ((c, s), done) in links.into_iter().zip(written) {
            finish(rig, c, s, &everything, done);
        }
    });
}

/// The reader reads on; user space forwards the rest; every byte must come, in order.
fn finish(rig: &Rig, c: Client, s: Server, everything: &[u8], done: usize) {
    let taken = rig.take(&c);
    assert_eq!(taken.server, Some(s.slot));
    let (mut app, mut backend, rest) = (c.app, s.backend, everything[done..].to_vec());
    let length = everything.len();
    let writer = thread::spawn(move || {
        backend.write_all(&rest).unwrap();
        backend
    });
    let reader = thread::spawn(move || {
        let mut got = vec![0u8; length];
        app.read_exact(&mut got).unwrap();
        got
    });
    eventually("the client is drained", || rig.dp.client_drained(c.slot).unwrap());
    let info = rig.dp.client_info(c.slot).unwrap();
    let mut left = everything.len() as u64 - info.stats.response_bytes;
    let (mut from, mut to) = (s.near, c.near);
    let mut buffer = vec![0u8; 64 << 10];
    while left > 0 {
        let n = from.read(&mut buffer).unwrap();
        to.write_all(&buffer[..n]).unwrap();
        left -= n as u64;
    }
    assert!(reader.join().unwrap() == everything, "other bytes came out");
    drop(writer.join());
}

#[test]
fn a_copy_in_to_a_server_that_stops_is_bounded_and_completes_when_it_resumes() {
    let everything: Vec<u8> =
        (0..ROWS).flat_map(|i| message(b'd', &vec![i as u8; ROW_BYTES])).chain(message(b'c', b"")).collect();
    let config = Config::default();
    on_each_lane(&config, |rig| {
        let mut links: Vec<_> = (0..READERS as u32).map(|i| (rig.client(), rig.server(i))).collect();
        let mut written = Vec::new();
        for (c, s) in &mut links {
            fix_buffers(c, s);
            c.app.write_all(&query("copy")).unwrap();
            expect(&mut s.backend, &query("copy"));
            s.backend.write_all(&message(b'G', b"\0\0\0")).unwrap();
            expect(&mut c.app, &message(b'G', b"\0\0\0"));
            let done = write_until_stalled(&mut c.app, &everything);
            assert!(done < everything.len(), "it never stalled");
            assert!(done <= limit(config.request_budget_bytes), "{done} bytes to one server");
            written.push(done);
        }
        println!("written {:?} KiB", written.iter().map(|w| w / 1024).collect::<Vec<_>>());
        let events = rig.events();
        for ((c, s), done) in links.into_iter().zip(written) {
            let up = Event::ClientUp { client: c.slot, reason: Reason::RequestBudget };
            assert!(events.contains(&up), "{events:?}");
            let taken = rig.take(&c);
            assert_eq!(taken.server, Some(s.slot));
            assert!(taken.link.copy_in);
            let forwarded =
                rig.dp.client_info(c.slot).unwrap().stats.request_bytes as usize - query("copy").len();
            assert!(forwarded <= 256 << 10, "{forwarded} bytes through the lane");

            let (mut app, mut backend) = (c.app, s.backend);
            let (rest, length) = (everything[done..].to_vec(), everything.len());
            let writer = thread::spawn(move || {
                app.write_all(&rest).unwrap();
                app
            });
            let reader = thread::spawn(move || {
                let mut got = vec![0u8; length];
                // As PostgreSQL: a reader that sleeps in recv() does not wake for redirected bytes.
                backend.set_nonblocking(true).unwrap();
                let mut at = 0;
                while at < length {
                    match backend.read(&mut got[at..]) {
                        Ok(0) => panic!("the end after {at} bytes"),
                        Ok(n) => at += n,
                        Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                            thread::sleep(Duration::from_micros(100));
                        }
                        Err(e) => panic!("{e}"),
                    }
                }
                got
            });
            eventually("the server is drained", || rig.dp.server_drained(s.slot).unwrap());
            let (mut from, mut to) = (c.near, s.near);
            let mut left = length - forwarded;
            let mut buffer = vec![0u8; 64 << 10];
            while left > 0 {
                let n = from.read(&mut buffer).unwrap();
                to.write_all(&buffer[..n]).unwrap();
                left -= n;
            }
            assert!(reader.join().unwrap() == everything, "other bytes came out");
            drop(writer.join());
        }
    });
}

#[test]
fn a_fast_reader_gets_a_long_result_through_the_lane() {
    let everything = result();
    on_each_lane(&Config::default(), |rig| {
        let (mut c, mut s) = (rig.client(), rig.server(0));
        c.app.write_all(&query("copy")).unwrap();
        expect(&mut s.backend, &query("copy"));
        let mut app = c.app.try_clone().unwrap();
        let (length, progress) = (everything.len(), Arc::new(AtomicUsize::new(0)));
        let seen = Arc::clone(&progress);
        let reader = thread::spawn(move || -> io::Result<Vec<u8>> {
            let mut got = vec![0u8; length];
            let mut at = 0;
            while at < length {
                match app.read(&mut got[at..])? {
                    0 => break,
                    n => at += n,
                }
                seen.store(at, Ordering::Relaxed);
            }
            Ok(got)
        });
        let start = Instant::now();
        let mut done = 0;
        // At the reader's pace: never so far ahead of it that a limit is reached, nor its receive buffer full, which begins with 64 KiB.
        while done < everything.len() {
            let chunk = &everything[done..everything.len().min(done + 8192)];
            s.backend.write_all(chunk).unwrap();
            done += chunk.len();
            eventually("the reader catches up", || done - progress.load(Ordering::Relaxed) < 32 << 10);
        }
        assert!(reader.join().unwrap().unwrap() == everything, "other bytes came out");
        println!("{} MiB in {:?}", length >> 20, start.elapsed());
        rig.expect_released(&s);
        assert!(rig.events().is_empty());
    });
}
