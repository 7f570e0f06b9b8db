// SPDX-License-Identifier: Apache-2.0
//! A forwarder without a protocol, in its two forms: a copy in user space and a redirect in the kernel. The experiment
//! `forward` compares them.
//!
//! One thread and one epoll instance, as a pooler of one thread has. Sockets block: a write to a full
//! socket waits, which is enough for requests and answers of a few bytes and nothing for copies.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;

use anyhow::{Context, Result};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::net::RecvFlags;
use underpass_sockmap::Forwarder;

/// What is read at once.
const BUFFER_BYTES: usize = 64 * 1024;

/// Events that are taken at once.
const EVENTS: usize = 256;

/// The key of the listener among the events; connections count from 0.
const LISTENER: u64 = u64::MAX;

/// Both sockets of a pair by the keys 2n (client) and 2n + 1 (server).
struct Pairs {
    epoll: rustix::fd::OwnedFd,
    sockets: BTreeMap<u64, TcpStream>,
    next: u64,
    kernel: Option<Forwarder>,
}

/// Forwards between whoever connects to `listen` and `to`, until it is killed.
///
/// # Errors
/// When it cannot listen, or the kernel refuses the program.
pub fn run(listen: SocketAddr, to: SocketAddr, kernel: bool) -> Result<()> {
    let listener = TcpListener::bind(listen).with_context(|| format!("cannot listen on {listen}"))?;
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
    let kernel = kernel.then(Forwarder::open).transpose()?;
    let mut pairs = Pairs { epoll, sockets: BTreeMap::new(), next: 0, kernel };
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
            if key == LISTENER {
                let client = listener.accept()?.0;
                // A client whose server is not there is told by its end.
                if let Ok(server) = TcpStream::connect(to) {
                    pairs.join(client, server, &mut buffer)?;
                }
            } else if pairs.copy(key, &mut buffer).is_err() {
                pairs.close(key);
            }
        }
    }
}

impl Pairs {
    fn join(&mut self, client: TcpStream, server: TcpStream, buffer: &mut [u8]) -> Result<()> {
        let first = self.next;
        self.next += 2;
        for stream in [&client, &server] {
            stream.set_nodelay(true)?;
        }
        // A reader that waits would be woken by each redirect, so in the kernel's form only the end is waited for.
        let flags = match &self.kernel {
            Some(forwarder) => {
                forwarder.join(&client, &server)?;
                EventFlags::RDHUP
            }
            None => EventFlags::IN | EventFlags::RDHUP,
        };
        for (key, stream) in [(first, &client), (first + 1, &server)] {
            epoll::add(&self.epoll, stream.as_fd(), EventData::new_u64(key), flags)?;
        }
        self.sockets.insert(first, client);
        self.sockets.insert(first + 1, server);
        // The client speaks first and may have done so before the program saw its socket; then it waits for an answer.
        if self.kernel.is_some() && self.copy(first, buffer).is_err() {
            self.close(first);
        }
        Ok(())
    }

    /// Copies what there is. At the end of the stream, or without it, an error: the pair is over.
    fn copy(&mut self, key: u64, buffer: &mut [u8]) -> io::Result<()> {
        let (Some(from), Some(to)) = (self.sockets.get(&key), self.sockets.get(&(key ^ 1))) else {
            return Ok(());
        };
        match rustix::net::recv(from, &mut *buffer, RecvFlags::DONTWAIT) {
            Ok((0, _)) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((read, _)) => (&mut &*to).write_all(&buffer[..read]),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn close(&mut self, key: u64) {
        // Closing takes them out of the epoll instance and out of the program's map.
        self.sockets.remove(&key);
        self.sockets.remove(&(key ^ 1));
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    /// A server that answers each byte by its successor, behind a forwarder.
    fn answers(kernel: bool) {
        let server = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let to = server.local_addr().unwrap();
        std::thread::spawn(move || {
            for stream in server.incoming() {
                let mut stream = stream.unwrap();
                let mut byte = [0];
                while stream.read(&mut byte).unwrap() == 1 {
                    byte[0] += 1;
                    stream.write_all(&byte).unwrap();
                }
            }
        });
        let listen = crate::postgres::free_port().unwrap();
        let listen = SocketAddr::from(([127, 0, 0, 1], listen));
        std::thread::spawn(move || run(listen, to, kernel).unwrap());
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(30);
        let mut client = loop {
            match TcpStream::connect(listen) {
                Ok(client) => break client,
                Err(error) => assert!(std::time::Instant::now() < deadline, "{error}"),
            }
        };
        client.set_read_timeout(Some(std::time::Duration::from_secs(30))).unwrap();
        for sent in 0..100 {
            client.write_all(&[sent]).unwrap();
            let mut got = [0];
            client.read_exact(&mut got).unwrap();
            assert_eq!(got[0], sent + 1);
        }
    }

    #[test]
    fn user_space_forwards() {
        answers(false);
    }

    #[test]
    fn root_the_kernel_forwards() {
        if !nix::unistd::Uid::effective().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        answers(true);
    }
}
