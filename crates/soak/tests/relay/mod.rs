// SPDX-License-Identifier: Apache-2.0
//! A transaction pooler that fits on a page, right or wrong on purpose. The right one shows that the checker does not cry
//! without reason; each wrong one has a fault that poolers have had, and that the checker must find.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use underpass_testkit::{Batch, Message, Reply};

/// What the relay does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Breakage {
    /// Nothing.
    None,
    /// A server is released at the first ReadyForQuery, whatever it says and whatever is outstanding.
    FirstReady,
    /// Outstanding answers are counted, the transaction status is not looked at.
    IgnoresTransaction,
    /// The transaction status is looked at, outstanding answers are not counted.
    IgnoresPipeline,
    /// A server whose client disappeared is used on as it is.
    ReusesDirtyServer,
    /// One row in a thousand is lost.
    LosesRow,
    /// One row in a thousand comes twice.
    DoublesRow,
    /// The application_name of the last client stays.
    ForgetsParameters,
}

struct Server {
    stream: TcpStream,
    buffer: Vec<u8>,
    application_name: String,
}

struct Pool {
    target: u16,
    breakage: Breakage,
    idle: Mutex<Vec<Server>>,
    returned: Condvar,
    rows: AtomicU64,
}

impl Server {
    fn login(target: u16) -> Self {
        let mut stream = TcpStream::connect(("127.0.0.1", target)).unwrap();
        stream.set_nodelay(true).unwrap();
        let startup = Batch::new().startup(0x0003_0000, &[("user", "postgres"), ("database", "postgres")]);
        stream.write_all(startup.as_bytes()).unwrap();
        let mut server = Self { stream, buffer: Vec::new(), application_name: String::new() };
        server.until_ready().unwrap();
        server
    }

    fn until_ready(&mut self) -> Option<()> {
        loop {
            while let Some(message) = Message::take(&mut self.buffer) {
                if message.tag == b'Z' {
                    return Some(());
                }
            }
            fill(&mut self.stream, &mut self.buffer)?;
        }
    }
}

fn fill(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<()> {
    let mut chunk = [0u8; 16 * 1024];
    let length = stream.read(&mut chunk).ok().filter(|length| *length > 0)?;
    buffer.extend_from_slice(&chunk[..length]);
    Some(())
}

/// Starts the relay in front of a PostgreSQL that trusts us; returns its port. Its threads end with their clients.
pub fn start(target: u16, servers: usize, breakage: Breakage) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let pool = Arc::new(Pool {
        target,
        breakage,
        idle: Mutex::new((0..servers).map(|_| Server::login(target)).collect()),
        returned: Condvar::new(),
        rows: AtomicU64::new(0),
    });
    thread::spawn(move || {
        while let Ok((client, _)) = listener.accept() {
            let pool = Arc::clone(&pool);
            thread::spawn(move || serve(&pool, client));
        }
    });
    port
}

fn serve(pool: &Pool, mut client: TcpStream) -> Option<()> {
    client.set_nodelay(true).ok()?;
    let mut buffer = Vec::new();
    let startup = loop {
        let length = buffer.first_chunk::<4>().map(|word| u32::from_be_bytes(*word) as usize);
        match length {
            Some(length) if buffer.len() >= length => break buffer.drain(..length).collect::<Vec<u8>>(),
            _ => fill(&mut client, &mut buffer)?,
        }
    };
    // A CancelRequest is left unanswered: the checker is told not to send any that matter.
    if startup.get(4..8)? != 0x0003_0000u32.to_be_bytes() {
        return None;
    }
    let texts: Vec<String> = startup[8..]
        .split(|byte| *byte == 0)
        .map(|text| String::from_utf8_lossy(text).into_owned())
        .collect();
    let name = texts.windows(2).find(|pair| pair[0] == "application_name").map(|pair| pair[1].clone());
    let name = name.unwrap_or_default();
    client.write_all(Reply::new().authentication_ok().login(1, 1).as_bytes()).ok()?;
    loop {
        if buffer.is_empty() {
            fill(&mut client, &mut buffer)?;
        }
        if buffer[0] == b'X' {
            return None;
        }
        let mut server = pool.take();
        let kept = link(pool, &mut client, &mut buffer, &mut server, &name);
        let dirty = kept.is_none() && pool.breakage != Breakage::ReusesDirtyServer;
        if dirty || server.stream.peer_addr().is_err() {
            server = Server::login(pool.target);
        }
        pool.idle.lock().unwrap().push(server);
        pool.returned.notify_one();
        kept?;
    }
}

impl Pool {
    fn take(&self) -> Server {
        let mut idle = self.idle.lock().unwrap();
        loop {
            // First in, first out: every server comes around, and so does what is wrong with it.
            if !idle.is_empty() {
                return idle.remove(0);
            }
            idle = self.returned.wait(idle).unwrap();
        }
    }

    fn releases(&self, outstanding: i64, status: u8) -> bool {
        match self.breakage {
            Breakage::FirstReady => true,
            Breakage::IgnoresTransaction => outstanding <= 0,
            Breakage::IgnoresPipeline => status == b'I',
            _ => outstanding <= 0 && status == b'I',
        }
    }

    fn forward(&self, client: &mut TcpStream, message: &Message) -> Option<()> {
        let bytes = message.encode();
        let row = message.tag == b'D' && self.rows.fetch_add(1, Ordering::Relaxed) % 1000 == 999;
        let times = match self.breakage {
            Breakage::LosesRow if row => 0,
            Breakage::DoublesRow if row => 2,
            _ => 1,
        };
        (0..times).try_for_each(|_| client.write_all(&bytes)).ok()
    }
}

/// Relays until the server is to be released; `None` if client or server is gone.
fn link(
    pool: &Pool,
    client: &mut TcpStream,
    from_client: &mut Vec<u8>,
    server: &mut Server,
    name: &str,
) -> Option<()> {
    if server.application_name != name && pool.breakage != Breakage::ForgetsParameters {
        let set = Batch::new().query(&format!("set application_name = '{name}'"));
        server.stream.write_all(set.as_bytes()).ok()?;
        server.until_ready()?;
        server.application_name = name.into();
    }
    let mut outstanding = 0i64;
    loop {
        while let Some(message) = Message::take(from_client) {
            if message.tag == b'X' {
                return None;
            }
            outstanding += i64::from(matches!(message.tag, b'Q' | b'S' | b'F'));
            server.stream.write_all(&message.encode()).ok()?;
        }
        while let Some(message) = Message::take(&mut server.buffer) {
            pool.forward(client, &message)?;
            if let Some(status) = message.status() {
                outstanding -= 1;
                if pool.releases(outstanding, status) {
                    return Some(());
                }
            }
        }
        let mut ready = [
            PollFd::from_borrowed_fd(client.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(server.stream.as_fd(), PollFlags::IN),
        ];
        poll(&mut ready, None).ok()?;
        let [client_ready, server_ready] = ready.map(|fd| !fd.revents().is_empty());
        if server_ready {
            fill(&mut server.stream, &mut server.buffer)?;
        }
        if client_ready {
            fill(client, from_client)?;
        }
    }
}
