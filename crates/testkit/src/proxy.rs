// SPDX-License-Identifier: Apache-2.0
//! A TCP relay that misbehaves on command: splits, delays, stalls, cuts, resets.
//!
//! Put it between client and pooler, or pooler and server. Faults are set per direction, act on all connections, and can be
//! changed while connections are open: they take effect with the next chunk read.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::{Error, Result};

/// How often a stalled direction looks whether it may go on.
const STALL_POLL: Duration = Duration::from_millis(2);

/// Which way the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the side that connected.
    ToServer,
    /// Back to it.
    ToClient,
}

/// What happens to the bytes of a direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fault {
    /// They pass.
    #[default]
    None,
    /// Chunks of at most so many bytes, each in a segment of its own; 1 splits every byte.
    Split(usize),
    /// Each chunk waits so long before it passes.
    Delay(Duration),
    /// Nothing is read until the fault changes: the sender's buffers fill up.
    Stall,
    /// After so many further bytes of the direction, over all connections, both sides get FIN.
    CloseAfter(u64),
    /// As `CloseAfter`, with RST.
    ResetAfter(u64),
    /// Everything is read and thrown away.
    Discard,
}

#[derive(Debug, Default)]
struct Way {
    fault: Mutex<Fault>,
    bytes: AtomicU64,
}

#[derive(Debug, Default)]
struct Shared {
    ways: [Way; 2],
    /// Port that connections lead to.
    target: AtomicU16,
    stopping: AtomicBool,
    refusing: AtomicBool,
    accepted: AtomicUsize,
    /// Only the two relaying threads own a link: its sockets close when both are done.
    links: Mutex<Vec<Weak<Link>>>,
}

#[derive(Debug)]
struct Link {
    client: TcpStream,
    server: TcpStream,
    over: AtomicBool,
}

impl Link {
    fn close(&self) {
        self.over.store(true, Ordering::Release);
        let _ = self.client.shutdown(Shutdown::Both);
        let _ = self.server.shutdown(Shutdown::Both);
    }

    /// RST to both sides: sockets that do not linger send it when they are closed, which the relaying threads do as soon
    /// as they see that the link is over. A shutdown of the writing side would send FIN first.
    fn reset(&self) {
        self.over.store(true, Ordering::Release);
        for socket in [&self.client, &self.server] {
            let _ = rustix::net::sockopt::set_socket_linger(socket, Some(Duration::ZERO));
            let _ = socket.shutdown(Shutdown::Read);
        }
    }

    /// Sends everything unless the link ends meanwhile.
    fn send(&self, mut to: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() && !self.over.load(Ordering::Acquire) {
            match to.write(bytes) {
                Ok(length) => bytes = &bytes[length..],
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
                    ) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The relay; ends with the value.
#[derive(Debug)]
pub struct FaultProxy {
    port: u16,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

impl FaultProxy {
    /// Listens on a free port of 127.0.0.1 and connects every client on to `target`, a port of 127.0.0.1.
    pub fn start(target: u16) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").map_err(Error::io("listen"))?;
        let port = listener.local_addr().map_err(Error::io("local address"))?.port();
        let shared = Arc::new(Shared { target: target.into(), ..Shared::default() });
        let acceptor = thread::spawn({
            let shared = Arc::clone(&shared);
            move || accept(&listener, &shared)
        });
        Ok(Self { port, shared, acceptor: Some(acceptor) })
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// New connections lead to another port of 127.0.0.1, as after a failover.
    pub fn lead_to(&self, target: u16) {
        self.shared.target.store(target, Ordering::Release);
    }

    /// Sets the fault of one direction.
    pub fn set(&self, direction: Direction, fault: Fault) {
        *lock(&self.shared.ways[direction as usize].fault) = fault;
    }

    /// Sets the fault of both directions.
    pub fn set_both(&self, fault: Fault) {
        self.set(Direction::ToServer, fault);
        self.set(Direction::ToClient, fault);
    }

    /// Whether new connections are closed at once.
    pub fn refuse(&self, refuse: bool) {
        self.shared.refusing.store(refuse, Ordering::Release);
    }

    /// Closes all open connections with FIN.
    pub fn close_all(&self) {
        lock(&self.shared.links).drain(..).filter_map(|link| link.upgrade()).for_each(|link| link.close());
    }

    /// Closes all open connections with RST.
    pub fn reset_all(&self) {
        lock(&self.shared.links).drain(..).filter_map(|link| link.upgrade()).for_each(|link| link.reset());
    }

    /// Connections accepted so far.
    pub fn accepted(&self) -> usize {
        self.shared.accepted.load(Ordering::Acquire)
    }

    /// Bytes passed on so far.
    pub fn bytes(&self, direction: Direction) -> u64 {
        self.shared.ways[direction as usize].bytes.load(Ordering::Acquire)
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.close_all();
        // Wakes the acceptor.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    while let Ok((client, _)) = listener.accept() {
        if shared.stopping.load(Ordering::Acquire) {
            return;
        }
        shared.accepted.fetch_add(1, Ordering::AcqRel);
        if shared.refusing.load(Ordering::Acquire) {
            continue;
        }
        let target = shared.target.load(Ordering::Acquire);
        let Ok(server) = TcpStream::connect(("127.0.0.1", target)) else { continue };
        for socket in [&client, &server] {
            let _ = socket.set_nodelay(true);
            // A blocked write looks now and then whether the link is over.
            let _ = socket.set_write_timeout(Some(Duration::from_millis(20)));
        }
        let link = Arc::new(Link { client, server, over: AtomicBool::new(false) });
        let mut links = lock(&shared.links);
        links.retain(|link| link.strong_count() > 0);
        links.push(Arc::downgrade(&link));
        drop(links);
        for direction in [Direction::ToServer, Direction::ToClient] {
            let (shared, link) = (Arc::clone(shared), Arc::clone(&link));
            thread::spawn(move || relay(&shared, &link, direction));
        }
    }
}

fn relay(shared: &Shared, link: &Link, direction: Direction) {
    let (mut from, to) = match direction {
        Direction::ToServer => (&link.client, &link.server),
        Direction::ToClient => (&link.server, &link.client),
    };
    let way = &shared.ways[direction as usize];
    let mut buffer = vec![0u8; 64 * 1024];
    loop {
        let mut fault = *lock(&way.fault);
        while fault == Fault::Stall {
            if link.over.load(Ordering::Acquire) || shared.stopping.load(Ordering::Acquire) {
                return;
            }
            thread::sleep(STALL_POLL);
            fault = *lock(&way.fault);
        }
        let length = match from.read(&mut buffer) {
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => {
                // A reset of one side becomes a reset of the other.
                link.reset();
                return;
            }
        };
        if link.over.load(Ordering::Acquire) {
            return;
        }
        if length == 0 {
            let _ = to.shutdown(Shutdown::Write);
            return;
        }
        // The fault may have changed while we waited for bytes.
        fault = *lock(&way.fault);
        if pass(way, fault, link, to, &buffer[..length]).is_err() {
            link.close();
            return;
        }
    }
}

fn pass(way: &Way, fault: Fault, link: &Link, to: &TcpStream, bytes: &[u8]) -> io::Result<()> {
    let send = |part: &[u8]| {
        way.bytes.fetch_add(part.len() as u64, Ordering::AcqRel);
        link.send(to, part)
    };
    match fault {
        Fault::None | Fault::Stall => send(bytes),
        Fault::Discard => Ok(()),
        Fault::Split(size) => bytes.chunks(size.max(1)).try_for_each(|part| {
            send(part)?;
            // Gives the receiver a chance to see this chunk alone.
            thread::yield_now();
            Ok(())
        }),
        Fault::Delay(time) => {
            thread::sleep(time);
            send(bytes)
        }
        Fault::CloseAfter(left) | Fault::ResetAfter(left) => {
            let count = left.min(bytes.len() as u64) as usize;
            send(&bytes[..count])?;
            let left = left - count as u64;
            let reset = matches!(fault, Fault::ResetAfter(_));
            *lock(&way.fault) = if reset { Fault::ResetAfter(left) } else { Fault::CloseAfter(left) };
            if left == 0 {
                if reset {
                    link.reset();
                } else {
                    link.close();
                }
            }
            Ok(())
        }
    }
}
