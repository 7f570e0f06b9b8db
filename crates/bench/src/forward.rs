// SPDX-License-Identifier: Apache-2.0
//! A forwarder without a protocol: a copy in user space, a redirect in the kernel between its own two sockets, as lane D does, and redirects into and
//! out of the sockets of the processes at its ends, as lanes A and B do. The experiment `forward` compares them, and `tax` has them beside the lanes:
//! what a program can have at most. Where clients are more than servers, a pool without a protocol, too, whose clients wait in the kernel.
//!
//! One thread and one epoll instance, as a pooler of one thread has. Sockets block: a write to a full
//! socket waits, which is enough for requests and answers of a few bytes and nothing for copies.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, Result};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::{RecvFlags, SendFlags};
use underpass_sockmap::{Forwarder, Keeper, Local};

/// What is read at once.
const BUFFER_BYTES: usize = 64 * 1024;

/// Events that are taken at once.
const EVENTS: usize = 256;

/// ReadyForQuery outside of a transaction.
const READY: &[u8] = b"Z\0\0\0\x05I";

/// Who forwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum By {
    /// A copy in user space.
    #[default]
    User,
    /// A program in the kernel, between the forwarder's two sockets.
    Kernel,
    /// Programs in the kernel, between the client's connection and the backend's socket on this host; the login by a copy.
    SameHost,
    /// A program in the kernel, between the client's own socket and the backend's, both on this host; the login by a copy.
    Both,
    /// Answers as in [`By::SameHost`], requests by a copy, as where clients that wait for a server are read by user space.
    Fed,
    /// Answers as in [`By::Both`], requests by a copy.
    FedBoth,
    /// As [`By::SameHost`], but clients share servers and wait for them in the kernel.
    Kept,
    /// As [`By::Both`], likewise.
    KeptBoth,
}

impl By {
    /// Between which processes' sockets, where it is not between the forwarder's own.
    fn local(self) -> Option<Local> {
        match self {
            Self::User | Self::Kernel | Self::Kept | Self::KeptBoth => None,
            Self::SameHost => Some(Local::Server),
            Self::Both => Some(Local::Both),
            Self::Fed => Some(Local::ServerAnswers),
            Self::FedBoth => Some(Local::BothAnswers),
        }
    }

    /// Whether what a client says still comes to the forwarder once its session is joined.
    fn copies_requests(self) -> bool {
        matches!(self, Self::User | Self::Fed | Self::FedBoth)
    }
}

/// The key of the first listener among the events, the others follow; connections count from 0.
const LISTENERS: u64 = u64::MAX / 2;

/// An end of a hop: an address or, as `/folder:port`, a unix socket named as PostgreSQL's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// An address.
    Tcp(SocketAddr),
    /// The path of a socket.
    Unix(PathBuf),
}

impl FromStr for Place {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.rsplit_once(':') {
            Some((folder, port)) if folder.starts_with('/') => {
                Ok(Self::Unix(PathBuf::from(folder).join(format!(".s.PGSQL.{port}"))))
            }
            _ => text
                .parse()
                .map(Self::Tcp)
                .map_err(|e| format!("{text}: neither address:port nor /folder:port: {e}")),
        }
    }
}

impl Place {
    fn connect(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Tcp(address) => {
                let stream = TcpStream::connect(address)?;
                stream.set_nodelay(true)?;
                Ok(stream.into())
            }
            Self::Unix(path) => Ok(UnixStream::connect(path)?.into()),
        }
    }

    fn listen(&self) -> io::Result<Listener> {
        match self {
            Self::Tcp(address) => TcpListener::bind(address).map(Listener::Tcp),
            Self::Unix(path) => {
                let listener = UnixListener::bind(path)?;
                // The load generator may be another user.
                std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777))?;
                Ok(Listener::Unix(listener))
            }
        }
    }
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    fn accept(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Tcp(listener) => {
                let stream = listener.accept()?.0;
                stream.set_nodelay(true)?;
                Ok(stream.into())
            }
            Self::Unix(listener) => Ok(listener.accept()?.0.into()),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(listener) => listener.as_fd(),
        }
    }
}

/// Both sockets of a pair by the keys 2n (client) and 2n + 1 (server).
struct Pairs {
    epoll: OwnedFd,
    sockets: BTreeMap<u64, OwnedFd>,
    next: u64,
    by: By,
    kernel: Option<Forwarder>,
    keeper: Option<Keeper>,
    /// How many servers kept clients share.
    servers: usize,
    /// Keys of those servers.
    pooled: BTreeSet<u64>,
    /// By the keys of kept clients their places in the keeper.
    kept: BTreeMap<u64, u32>,
}

/// Forwards between whoever connects to one of `listen` and `to`, until it is killed. The first `servers` connections are those that kept clients share.
///
/// # Errors
/// When it cannot listen, or the kernel refuses the program.
pub fn run(listen: &[Place], to: &Place, by: By, servers: u32) -> Result<()> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let mut listeners = Vec::new();
    for (key, place) in (LISTENERS..).zip(listen) {
        let listener = place.listen().with_context(|| format!("cannot listen on {place:?}"))?;
        epoll::add(&epoll, &listener, EventData::new_u64(key), EventFlags::IN)?;
        listeners.push(listener);
    }
    let (kernel, keeper) = match (by, by.local()) {
        (By::User, _) => (None, None),
        (By::Kept | By::KeptBoth, _) => (None, Some(Keeper::open(by == By::KeptBoth)?)),
        (_, Some(local)) => (Some(Forwarder::open_local(local)?), None),
        (_, None) => (Some(Forwarder::open()?), None),
    };
    let mut pairs = Pairs {
        epoll,
        sockets: BTreeMap::new(),
        next: 0,
        by,
        kernel,
        keeper,
        servers: servers as usize,
        pooled: BTreeSet::new(),
        kept: BTreeMap::new(),
    };
    let mut events = Vec::with_capacity(EVENTS);
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        events.clear();
        match epoll::wait(&pairs.epoll, spare_capacity(&mut events), None) {
            Err(rustix::io::Errno::INTR) => continue,
            other => other?,
        };
        for event in &events {
            let key = event.data.u64();
            if let Some(listener) = key.checked_sub(LISTENERS) {
                let client = listeners[listener as usize].accept()?;
                // A client whose server is not there is told by its end.
                if let Ok(server) = to.connect() {
                    pairs.join(client, server, &mut buffer)?;
                }
            } else if pairs.copy(key, &mut buffer).is_err() {
                pairs.close(key);
            }
        }
    }
}

impl Pairs {
    fn join(&mut self, client: OwnedFd, server: OwnedFd, buffer: &mut [u8]) -> Result<()> {
        let first = self.next;
        self.next += 2;
        // A reader that waits would be woken by each redirect, so in the kernel's form only the end is waited for.
        let flags = match &self.kernel {
            Some(forwarder) if self.by == By::Kernel => {
                forwarder.join(&client, &server)?;
                EventFlags::RDHUP
            }
            _ => EventFlags::IN | EventFlags::RDHUP,
        };
        for (key, stream) in [(first, &client), (first + 1, &server)] {
            epoll::add(&self.epoll, stream, EventData::new_u64(key), flags)?;
        }
        self.sockets.insert(first, client);
        self.sockets.insert(first + 1, server);
        // The client speaks first and may have done so before the program saw its socket; then it waits for an answer.
        if self.by == By::Kernel && self.copy(first, buffer).is_err() {
            self.close(first);
        }
        Ok(())
    }

    /// Copies what there is. At the end of the stream, or without it, an error: the pair is over.
    fn copy(&mut self, key: u64, buffer: &mut [u8]) -> io::Result<()> {
        let Some(from) = self.sockets.get(&key) else { return Ok(()) };
        match rustix::net::recv(from, &mut *buffer, RecvFlags::DONTWAIT) {
            Ok((0, _)) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((read, _)) => self.send(key ^ 1, &buffer[..read]),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Says to one socket of a pair what the other has said.
    fn send(&mut self, key: u64, mut rest: &[u8]) -> io::Result<()> {
        // What programs could not keep goes nowhere: the server is all clients'.
        if self.kept.contains_key(&(key ^ 1)) || self.pooled.contains(&(key ^ 1)) {
            return Ok(());
        }
        // Before the client hears of it: it speaks next.
        if rest.ends_with(READY) {
            if self.by.local().is_some() {
                self.join_local(key)?;
            } else if self.keeper.is_some() {
                self.join_kept(key)?;
            }
        }
        let Some(to) = self.sockets.get(&key) else { return Ok(()) };
        while !rest.is_empty() {
            rest = &rest[rustix::net::send(to, rest, SendFlags::NOSIGNAL)?..];
        }
        Ok(())
    }

    /// The session of this client goes on without the forwarder, or its answers do.
    fn join_local(&self, client: u64) -> io::Result<()> {
        let (Some(near), Some(server), Some(forwarder)) =
            (self.sockets.get(&client), self.sockets.get(&(client ^ 1)), &self.kernel)
        else {
            return Ok(());
        };
        forwarder.join_local(near, server).map_err(io::Error::other)?;
        let of_client = if self.by.copies_requests() { EventFlags::IN } else { EventFlags::empty() };
        for (key, socket, wanted) in [(client, near, of_client), (client ^ 1, server, EventFlags::empty())] {
            epoll::modify(&self.epoll, socket, EventData::new_u64(key), wanted | EventFlags::RDHUP)?;
        }
        Ok(())
    }

    /// The session of this client goes on without the forwarder, on whatever server is idle. Its own becomes one of those, or is not needed any more.
    fn join_kept(&mut self, client: u64) -> io::Result<()> {
        let server = client ^ 1;
        let (Some(near), Some(far), Some(keeper)) =
            (self.sockets.get(&client), self.sockets.get(&server), &mut self.keeper)
        else {
            return Ok(());
        };
        self.kept.insert(client, keeper.add_client(near).map_err(io::Error::other)?);
        epoll::modify(&self.epoll, near, EventData::new_u64(client), EventFlags::RDHUP)?;
        if self.pooled.len() < self.servers {
            keeper.add_server(far).map_err(io::Error::other)?;
            epoll::modify(&self.epoll, far, EventData::new_u64(server), EventFlags::RDHUP)?;
            self.pooled.insert(server);
        } else {
            self.sockets.remove(&server);
        }
        Ok(())
    }

    /// Closing takes sockets out of the epoll instance and out of the programs' maps. Of a kept session each end goes alone.
    fn close(&mut self, key: u64) {
        self.sockets.remove(&key);
        if let Some(place) = self.kept.remove(&key) {
            if let Some(keeper) = &mut self.keeper {
                keeper.remove_client(place);
            }
        } else if !self.pooled.contains(&key) {
            self.sockets.remove(&(key ^ 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    /// Answers each byte by its successor.
    fn answer(mut stream: impl Read + Write) {
        let mut byte = [0];
        while stream.read(&mut byte).unwrap() == 1 {
            byte[0] += 1;
            stream.write_all(&byte).unwrap();
        }
    }

    /// A server at an address and one at a unix socket, each behind a forwarder.
    fn answers(by: By) {
        let server = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let to = Place::Tcp(server.local_addr().unwrap());
        std::thread::spawn(move || server.incoming().for_each(|stream| answer(stream.unwrap())));
        exchange(to, by);

        let folder = tempfile::tempdir().unwrap();
        let to: Place = format!("{}:5432", folder.path().display()).parse().unwrap();
        assert_eq!(to, Place::Unix(folder.path().join(".s.PGSQL.5432")));
        let server = UnixListener::bind(folder.path().join(".s.PGSQL.5432")).unwrap();
        std::thread::spawn(move || server.incoming().for_each(|stream| answer(stream.unwrap())));
        exchange(to, by);
    }

    /// To a forwarder that may not listen yet.
    fn connect(place: &Place) -> OwnedFd {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
        loop {
            match place.connect() {
                Ok(client) => return client,
                Err(error) => assert!(std::time::Instant::now() < deadline, "{error}"),
            }
        }
    }

    /// Bytes through a forwarder of its own, there and back, of a client by TCP and of one by unix socket.
    fn exchange(to: Place, by: By) {
        let folder = tempfile::tempdir().unwrap();
        let port = crate::postgres::free_port().unwrap();
        let listen = [
            Place::Tcp(SocketAddr::from(([127, 0, 0, 1], port))),
            Place::Unix(folder.path().join(".s.PGSQL.1")),
        ];
        let places = listen.clone();
        std::thread::spawn(move || run(&places, &to, by, 1).unwrap());
        for place in listen {
            // A stream of any kind: nothing but reads and writes follow.
            let mut client = UnixStream::from(connect(&place));
            client.set_read_timeout(Some(std::time::Duration::from_secs(30))).unwrap();
            for sent in 0..100 {
                client.write_all(&[sent]).unwrap();
                let mut got = [0];
                client.read_exact(&mut got).unwrap();
                assert_eq!(got[0], sent + 1);
            }
        }
    }

    #[test]
    fn user_space_forwards() {
        answers(By::User);
    }

    #[test]
    fn root_the_kernel_forwards() {
        if !nix::unistd::Uid::effective().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        answers(By::Kernel);
    }

    /// As a backend does: it says that it is ready, and waits for what comes without being asleep in a read.
    fn answer_as_backend(mut stream: TcpStream) {
        stream.write_all(READY).unwrap();
        stream.set_nonblocking(true).unwrap();
        let mut byte = [0];
        loop {
            let mut wanted = [rustix::event::PollFd::new(&stream, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut wanted, None).unwrap();
            match stream.read(&mut byte) {
                Ok(0) => return,
                Ok(_) => stream.write_all(&[byte[0] + 1]).unwrap(),
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
    }

    #[test]
    fn root_the_kernel_forwards_into_a_backend() {
        if !nix::unistd::Uid::effective().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        for by in [By::SameHost, By::Both, By::Fed, By::FedBoth] {
            exchange_with_backend(by, 1);
        }
    }

    #[test]
    fn root_clients_wait_in_the_kernel_for_a_backend() {
        if !nix::unistd::Uid::effective().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        for (by, servers) in [(By::Kept, 1), (By::Kept, 2), (By::KeptBoth, 1), (By::KeptBoth, 2)] {
            exchange_with_backend(by, servers);
        }
    }

    /// Three clients, all of which ask before one of them looks for its answer.
    fn exchange_with_backend(by: By, servers: u32) {
        let server = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let to = Place::Tcp(server.local_addr().unwrap());
        std::thread::spawn(move || {
            for stream in server.incoming() {
                std::thread::spawn(|| answer_as_backend(stream.unwrap()));
            }
        });
        let port = crate::postgres::free_port().unwrap();
        let listen = [Place::Tcp(SocketAddr::from(([127, 0, 0, 1], port)))];
        let place = listen[0].clone();
        std::thread::spawn(move || run(&listen, &to, by, servers).unwrap());
        let mut clients: Vec<TcpStream> = (0..3).map(|_| TcpStream::from(connect(&place))).collect();
        for client in &mut clients {
            client.set_read_timeout(Some(std::time::Duration::from_secs(30))).unwrap();
            let mut ready = [0; READY.len()];
            client.read_exact(&mut ready).unwrap();
            assert_eq!(ready, READY, "{by:?}");
        }
        // Below 'X', which begins a Terminate.
        for sent in 0..80 {
            for (number, client) in (0u8..).zip(&mut clients) {
                client.write_all(&[sent + number]).unwrap();
            }
            for (number, client) in (0u8..).zip(&mut clients) {
                let mut got = [0];
                client.read_exact(&mut got).unwrap();
                assert_eq!(got[0], sent + number + 1, "{by:?}, {servers} servers");
            }
        }
        // The server stays that came with a client which leaves.
        drop(clients.remove(0));
        for client in &mut clients {
            client.write_all(&[0]).unwrap();
            let mut got = [0];
            client.read_exact(&mut got).unwrap();
            assert_eq!(got[0], 1, "{by:?}, {servers} servers");
        }
    }
}
