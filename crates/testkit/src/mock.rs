// SPDX-License-Identifier: Apache-2.0
//! A PostgreSQL that follows a script: for servers that are slow, silent, wrong or malicious at an exact point.
//!
//! Every accepted connection runs its own script in a thread. What it receives is kept for the test to look at.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::process::POLL;
use crate::{Error, Message, Reply, Result};

/// Longest time that a step waits for the peer.
const STEP_LIMIT: Duration = Duration::from_secs(10);

/// One step of a script.
pub enum Step {
    /// Reads an untagged message (StartupMessage, SSLRequest, CancelRequest).
    Startup,
    /// Reads a StartupMessage, refusing SSLRequest and GSSENCRequest before it, and logs the peer in without password.
    Login,
    /// Reads one message, which must have this type byte.
    Expect(u8),
    /// Reads messages up to and with the first of this type byte.
    Until(u8),
    /// Sends messages.
    Send(Reply),
    /// Sends the bytes one by one, each in a segment of its own.
    SendSplit(Reply),
    /// Does nothing for a while.
    Delay(Duration),
    /// Answers every Query and every Sync until the peer goes: one row that names the connection's index.
    Serve,
    /// Waits for the peer's end of stream.
    WaitClose,
    /// Closes with FIN and ends the script.
    Close,
    /// Closes with RST and ends the script.
    Reset,
    /// Calls the test, with the last message received; what it returns is sent.
    Call(StepCall),
}

/// What [`Step::Call`] calls.
pub type StepCall = Box<dyn FnMut(Option<&Message>) -> Reply + Send>;

impl fmt::Debug for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Startup => f.write_str("Startup"),
            Self::Login => f.write_str("Login"),
            Self::Expect(tag) => write!(f, "Expect({})", char::from(*tag)),
            Self::Until(tag) => write!(f, "Until({})", char::from(*tag)),
            Self::Send(_) => f.write_str("Send"),
            Self::SendSplit(_) => f.write_str("SendSplit"),
            Self::Delay(time) => write!(f, "Delay({time:?})"),
            Self::Serve => f.write_str("Serve"),
            Self::WaitClose => f.write_str("WaitClose"),
            Self::Close => f.write_str("Close"),
            Self::Reset => f.write_str("Reset"),
            Self::Call(_) => f.write_str("Call"),
        }
    }
}

#[derive(Default)]
struct Shared {
    received: Mutex<Vec<(usize, Message)>>,
    failures: Mutex<Vec<String>>,
    stopping: AtomicBool,
    finished: Mutex<usize>,
    sockets: Mutex<Vec<TcpStream>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The mock; ends with the value.
pub struct MockServer {
    port: u16,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

impl MockServer {
    /// Listens on a free port of 127.0.0.1; `script` is asked for the steps of each connection by its index, from 0.
    pub fn start(script: impl Fn(usize) -> Vec<Step> + Send + 'static) -> Result<Self> {
        Self::start_at(0, script)
    }

    /// The same on this port, of which another server has another address.
    pub fn start_at(port: u16, script: impl Fn(usize) -> Vec<Step> + Send + 'static) -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", port)).map_err(Error::io("listen"))?;
        let port = listener.local_addr().map_err(Error::io("local address"))?.port();
        let shared = Arc::new(Shared::default());
        let acceptor = thread::spawn({
            let shared = Arc::clone(&shared);
            move || accept(&listener, &shared, &script)
        });
        Ok(Self { port, shared, acceptor: Some(acceptor) })
    }

    /// A server that logs everyone in and answers every query with the connection's index.
    pub fn serving() -> Result<Self> {
        Self::start(|_| vec![Step::Login, Step::Serve])
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// All messages received so far with the index of their connection; start-up messages have tag 0.
    pub fn received(&self) -> Vec<(usize, Message)> {
        lock(&self.shared.received).clone()
    }

    /// The texts of all Query messages so far.
    pub fn queries(&self) -> Vec<String> {
        self.received().iter().filter(|(_, m)| m.tag == b'Q').flat_map(|(_, m)| m.strings()).collect()
    }

    /// Waits until `count` scripts have come to their end; the first failed step is an error.
    pub fn wait_finished(&self, count: usize) -> Result<()> {
        let deadline = Instant::now() + STEP_LIMIT;
        while *lock(&self.shared.finished) < count {
            if Instant::now() > deadline {
                let log = format!("received: {:?}", self.received());
                return Err(Error::Timeout { what: "end of mock scripts".into(), limit: STEP_LIMIT, log });
            }
            thread::sleep(POLL);
        }
        self.check()
    }

    /// The first failed step as an error.
    pub fn check(&self) -> Result<()> {
        match lock(&self.shared.failures).first() {
            None => Ok(()),
            Some(failure) => {
                Err(Error::Unexpected { wanted: "script followed".into(), got: failure.clone() })
            }
        }
    }
}

impl Drop for MockServer {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        // Wakes the acceptor.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        for socket in lock(&self.shared.sockets).drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>, script: &dyn Fn(usize) -> Vec<Step>) {
    for index in 0.. {
        let Ok((stream, _)) = listener.accept() else { return };
        if shared.stopping.load(Ordering::Acquire) {
            return;
        }
        if let Ok(copy) = stream.try_clone() {
            lock(&shared.sockets).push(copy);
        }
        let steps = script(index);
        let shared = Arc::clone(shared);
        thread::spawn(move || {
            let mut connection =
                Connection { stream, buffer: Vec::new(), index, shared: &shared, last: None, reset: false };
            for (number, step) in steps.into_iter().enumerate() {
                let name = format!("connection {index}, step {number} {step:?}");
                match connection.run(step) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) => {
                        lock(&shared.failures).push(format!("{name}: {error}"));
                        break;
                    }
                }
            }
            // The copy for the end of the mock must not keep the connection open.
            let own = connection.stream.peer_addr().ok();
            lock(&shared.sockets).retain(|socket| socket.peer_addr().ok() != own);
            // A shutdown sends FIN, which a reset must not do.
            if !connection.reset {
                let _ = connection.stream.shutdown(Shutdown::Both);
            }
            drop(connection);
            *lock(&shared.finished) += 1;
        });
    }
}

struct Connection<'a> {
    stream: TcpStream,
    buffer: Vec<u8>,
    index: usize,
    shared: &'a Shared,
    last: Option<Message>,
    reset: bool,
}

impl Connection<'_> {
    /// Runs a step; `false` ends the script.
    fn run(&mut self, step: Step) -> Result<bool> {
        self.stream.set_nodelay(true).map_err(Error::io("TCP_NODELAY"))?;
        self.stream.set_read_timeout(Some(STEP_LIMIT)).map_err(Error::io("read timeout"))?;
        match step {
            Step::Startup => self.read_startup().map(drop)?,
            Step::Login => self.login()?,
            Step::Expect(tag) => {
                let message = self.read()?.ok_or(Error::Closed)?;
                if message.tag != tag {
                    return Err(Error::Unexpected {
                        wanted: char::from(tag).to_string(),
                        got: format!("{message:?}"),
                    });
                }
            }
            Step::Until(tag) => while self.read()?.ok_or(Error::Closed)?.tag != tag {},
            Step::Send(reply) => self.send(reply.as_bytes())?,
            Step::SendSplit(reply) => {
                for byte in reply.as_bytes() {
                    self.send(&[*byte])?;
                    thread::sleep(Duration::from_micros(200));
                }
            }
            Step::Delay(time) => thread::sleep(time),
            Step::Serve => return self.serve(),
            Step::WaitClose => while self.read()?.is_some() {},
            Step::Close => return Ok(false),
            Step::Reset => {
                rustix::net::sockopt::set_socket_linger(&self.stream, Some(Duration::ZERO))
                    .map_err(|errno| Error::Io { what: "SO_LINGER".into(), source: errno.into() })?;
                self.reset = true;
                return Ok(false);
            }
            Step::Call(mut call) => {
                let reply = call(self.last.as_ref());
                self.send(reply.as_bytes())?;
            }
        }
        Ok(true)
    }

    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes).map_err(Error::io("send"))
    }

    fn login(&mut self) -> Result<()> {
        loop {
            let message = self.read_startup()?;
            match message.body.first_chunk::<4>().map(|word| u32::from_be_bytes(*word)) {
                Some(80_877_103 | 80_877_104) => self.send(b"N")?,
                _ => break,
            }
        }
        let id = self.index as u32 + 1;
        self.send(Reply::new().authentication_ok().login(id, id ^ 0x5a5a_5a5a).as_bytes())
    }

    fn serve(&mut self) -> Result<bool> {
        let index = self.index.to_string();
        while let Some(message) = self.read()? {
            match message.tag {
                b'Q' => self.send(Reply::new().single_row("connection", &index).as_bytes())?,
                b'S' => self.send(Reply::new().ready_for_query(b'I').as_bytes())?,
                b'X' => return Ok(false),
                _ => {}
            }
        }
        Ok(false)
    }

    fn keep(&mut self, message: Message) -> Message {
        lock(&self.shared.received).push((self.index, message.clone()));
        self.last = Some(message.clone());
        message
    }

    /// Untagged message: length word and body.
    fn read_startup(&mut self) -> Result<Message> {
        loop {
            if let Some(head) = self.buffer.first_chunk::<4>() {
                let end = (u32::from_be_bytes(*head) as usize).max(4);
                if self.buffer.len() >= end {
                    let body = self.buffer[4..end].to_vec();
                    self.buffer.drain(..end);
                    return Ok(self.keep(Message { tag: 0, body }));
                }
            }
            if !self.fill()? {
                return Err(Error::Closed);
            }
        }
    }

    fn read(&mut self) -> Result<Option<Message>> {
        loop {
            if let Some(message) = Message::take(&mut self.buffer) {
                return Ok(Some(self.keep(message)));
            }
            if !self.fill()? {
                return Ok(None);
            }
        }
    }

    /// Reads more; `false` at the end of the stream, for which a reset counts too.
    fn fill(&mut self) -> Result<bool> {
        let mut chunk = [0u8; 8192];
        match self.stream.read(&mut chunk) {
            Ok(0) => Ok(false),
            Ok(length) => {
                self.buffer.extend_from_slice(&chunk[..length]);
                Ok(true)
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(false),
            Err(source) => Err(Error::Io { what: "read".into(), source }),
        }
    }
}
