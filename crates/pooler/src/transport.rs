// SPDX-License-Identifier: Apache-2.0
//! A connected stream socket, plain or with TLS. Non-blocking; reports the need to wait as `WouldBlock`. Or, for sessions with mirrors, no
//! socket at all.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::net::{RecvFlags, SendFlags};
use underpass_trace::{Direction, EndReason};

use crate::lanes::monotonic_ns as now_ns;
use crate::recording::Tap;

/// A stream: a socket, and TLS over it once that was agreed.
pub(crate) struct Transport {
    fd: Descriptor,
    tls: Option<Box<rustls::Connection>>,
    /// Of a client that is recorded.
    tap: Option<Box<Tap>>,
    watch: Watch,
}

/// Who watches a client's socket.
#[derive(Debug, Default)]
enum Watch {
    #[default]
    Nobody,
    /// This epoll instance, for what comes in and not yet for room to write: a new socket has room, and to be told so is a turn of the
    /// worker's loop for nothing. The first time that there is none, it is asked for.
    Input { epoll: Arc<OwnedFd>, token: u64, interest: EventFlags },
    /// Whoever it is asks for all that it wants to know.
    Asked,
}

#[derive(Debug)]
enum Descriptor {
    Socket(OwnedFd),
    Memory(Box<Memory>),
}

/// The peer is this process: what is read was put here, and what is written goes nowhere.
#[derive(Debug)]
struct Memory {
    /// Stands for the socket where one is asked for; it belongs to somebody else.
    descriptor: Arc<OwnedFd>,
    unread: VecDeque<Arc<Vec<u8>>>,
    /// Bytes of the first chunk that were read.
    at: usize,
}

impl Memory {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<ReadOutcome> {
        let mut count = 0;
        while let Some(chunk) = self.unread.front() {
            let part = &chunk[self.at..];
            let length = part.len().min(buffer.len() - count);
            buffer[count..count + length].copy_from_slice(&part[..length]);
            count += length;
            self.at += length;
            if length < part.len() {
                break;
            }
            self.unread.pop_front();
            self.at = 0;
        }
        if count == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(ReadOutcome { count, maybe_more: !self.unread.is_empty() })
    }
}

/// Bytes read, and whether there may be more right now. An edge-triggered socket needs no further read when a plain one came up short.
pub(crate) struct ReadOutcome {
    pub count: usize,
    pub maybe_more: bool,
}

/// The socket as `std::io` sees it, for rustls.
struct Socket<'a> {
    fd: BorrowedFd<'a>,
    /// The last read left room: there is no more now.
    is_drained: bool,
}

impl<'a> Socket<'a> {
    fn new(fd: BorrowedFd<'a>) -> Self {
        Self { fd, is_drained: false }
    }
}

impl Read for Socket<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let (count, _) = rustix::net::recv(self.fd, &mut *buffer, RecvFlags::empty())?;
        self.is_drained = count < buffer.len();
        Ok(count)
    }
}

impl Write for Socket<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(self.fd, data, SendFlags::NOSIGNAL)?)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Socket(fd) => fd.as_fd(),
            Self::Memory(memory) => memory.descriptor.as_fd(),
        }
    }
}

impl Transport {
    pub fn new(fd: OwnedFd) -> Self {
        Self { fd: Descriptor::Socket(fd), tls: None, tap: None, watch: Watch::Nobody }
    }

    /// One without socket: see [`put`](Self::put). `descriptor` is shown where a socket is asked for, and never used.
    pub fn memory(descriptor: Arc<OwnedFd>) -> Self {
        let memory = Memory { descriptor, unread: VecDeque::new(), at: 0 };
        Self { fd: Descriptor::Memory(Box::new(memory)), tls: None, tap: None, watch: Watch::Nobody }
    }

    /// Puts bytes behind what is to be read. Only for one without socket.
    pub fn put(&mut self, bytes: Arc<Vec<u8>>) {
        if let Descriptor::Memory(memory) = &mut self.fd {
            if !bytes.is_empty() {
                memory.unread.push_back(bytes);
            }
        }
    }

    /// Bytes that were put and not read yet.
    pub fn unread(&self) -> usize {
        match &self.fd {
            Descriptor::Socket(_) => 0,
            Descriptor::Memory(memory) => {
                memory.unread.iter().map(|chunk| chunk.len()).sum::<usize>() - memory.at
            }
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub fn tls(&self) -> Option<&rustls::Connection> {
        self.tls.as_deref()
    }

    /// Goes over to TLS on the same socket.
    pub fn upgrade(&mut self, connection: rustls::Connection) {
        if let Some(tap) = &mut self.tap {
            tap.encrypted();
        }
        self.tls = Some(Box::new(connection));
    }

    /// Has `epoll` watch it, for nothing but hang-ups and what comes in: it asks for more when it finds its socket full.
    pub fn watch_input(&mut self, epoll: &Arc<OwnedFd>, token: u64, interest: EventFlags) -> io::Result<()> {
        epoll::add(&**epoll, self.fd(), EventData::new_u64(token), interest.difference(EventFlags::OUT))?;
        self.watch = Watch::Input { epoll: epoll.clone(), token, interest };
        Ok(())
    }

    /// Whether [`Self::watch_input`] has been called.
    pub fn is_watched(&self) -> bool {
        !matches!(self.watch, Watch::Nobody)
    }

    /// Takes the registration with `epoll` back.
    pub fn unwatch(&mut self, epoll: BorrowedFd<'_>) {
        let _ = epoll::delete(epoll, self.fd());
        self.watch = Watch::Nobody;
    }

    /// The caller watches it in another way from now on: that is not to be undone.
    pub fn watched_otherwise(&mut self) {
        self.watch = Watch::Asked;
    }

    /// The socket is full: somebody must say when it is not any more.
    #[cold]
    fn ask_for_room(&mut self) {
        let Watch::Input { epoll, token, interest } = &self.watch else { return };
        // Room that there is by now is told, too.
        if let Err(error) = epoll::modify(&**epoll, self.fd(), EventData::new_u64(*token), *interest) {
            log::error!("epoll: {error}");
        }
        self.watch = Watch::Asked;
    }

    /// Drives a TLS handshake as far as it goes now; true when it is over.
    pub fn handshake(&mut self) -> io::Result<bool> {
        let Some(connection) = &mut self.tls else { return Ok(true) };
        while connection.is_handshaking() {
            if connection.wants_write() && !flush_tls(self.fd.as_fd(), connection)? {
                self.ask_for_room();
                return Ok(false);
            }
            if !connection.is_handshaking() {
                break;
            }
            match connection.read_tls(&mut Socket::new(self.fd.as_fd())) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {
                    let state = connection.process_new_packets();
                    flush_tls(self.fd.as_fd(), connection)?;
                    state.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        self.flush()?;
        Ok(true)
    }

    /// Records what is read and written from now on, or not any more.
    pub fn set_tap(&mut self, tap: Option<Box<Tap>>) {
        self.tap = tap;
    }

    /// What records it.
    pub fn tap(&self) -> Option<&Tap> {
        self.tap.as_deref()
    }

    /// It is not to be in the trace at all.
    pub fn forget_tap(&mut self) {
        if let Some(tap) = self.tap.take() {
            tap.forget();
        }
    }

    /// Who ended it, for the trace.
    pub fn ended_by(&mut self, reason: EndReason) {
        if let Some(tap) = &mut self.tap {
            tap.reason = reason;
        }
    }

    /// Reads what is there. `count` 0 = the peer has ended its stream.
    #[inline]
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<ReadOutcome> {
        let outcome = self.receive(buffer)?;
        if let Some(tap) = &mut self.tap {
            tap.copy(Direction::Frontend, now_ns(), &buffer[..outcome.count]);
        }
        Ok(outcome)
    }

    #[inline]
    fn receive(&mut self, buffer: &mut [u8]) -> io::Result<ReadOutcome> {
        match &mut self.tls {
            None => match &mut self.fd {
                Descriptor::Socket(fd) => {
                    let (count, _) = rustix::net::recv(fd, &mut *buffer, RecvFlags::empty())?;
                    Ok(ReadOutcome { count, maybe_more: count == buffer.len() })
                }
                Descriptor::Memory(memory) => memory.read(buffer),
            },
            Some(connection) => {
                let outcome = read_tls(self.fd.as_fd(), connection, buffer);
                if connection.wants_write() {
                    self.ask_for_room();
                }
                outcome
            }
        }
    }

    /// Reads into the spare room of `buffer`, which grows by at most `max` bytes.
    pub fn read_more(&mut self, buffer: &mut Vec<u8>, max: usize) -> io::Result<ReadOutcome> {
        let start = buffer.len();
        buffer.resize(start + max, 0);
        let outcome = self.read(&mut buffer[start..]);
        buffer.truncate(start + outcome.as_ref().map_or(0, |outcome| outcome.count));
        outcome
    }

    /// Writes as much as goes.
    #[inline]
    pub fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        // Who has read an answer may say something, in whatever session, before the call returns that sent it.
        let began_ns = if self.tap.is_some() { now_ns() } else { 0 };
        let count = self.transmit(data)?;
        if let Some(tap) = &mut self.tap {
            tap.copy(Direction::Backend, began_ns, &data[..count]);
        }
        Ok(count)
    }

    #[inline]
    fn transmit(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.tls.is_some() {
            if !self.flush()? {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let taken = self.tls.as_mut().map_or(Ok(0), |connection| connection.writer().write(data))?;
            self.flush()?;
            return Ok(taken);
        }
        match &self.fd {
            Descriptor::Socket(fd) => match rustix::net::send(fd, data, SendFlags::NOSIGNAL) {
                Ok(count) => Ok(count),
                Err(error) => {
                    if error == rustix::io::Errno::WOULDBLOCK {
                        self.ask_for_room();
                    }
                    Err(error.into())
                }
            },
            Descriptor::Memory(_) => Ok(data.len()),
        }
    }

    /// Sends what TLS holds back; false if the socket is full.
    pub fn flush(&mut self) -> io::Result<bool> {
        let Some(connection) = &mut self.tls else { return Ok(true) };
        let has_room = flush_tls(self.fd.as_fd(), connection)?;
        if !has_room {
            self.ask_for_room();
        }
        Ok(has_room)
    }

    /// Says good-bye as far as the protocol has a word for it, without waiting.
    pub fn close_notify(&mut self) {
        if let Some(connection) = &mut self.tls {
            connection.send_close_notify();
            let _ = flush_tls(self.fd.as_fd(), connection);
        }
    }
}

fn read_tls(
    fd: BorrowedFd<'_>,
    connection: &mut rustls::Connection,
    buffer: &mut [u8],
) -> io::Result<ReadOutcome> {
    let mut socket = Socket::new(fd);
    loop {
        match connection.reader().read(buffer) {
            // A buffer that was filled may have left something behind, and so may a read of the socket.
            Ok(count) => {
                let maybe_more = count > 0 && (count == buffer.len() || !socket.is_drained);
                return Ok(ReadOutcome { count, maybe_more });
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // An end without close_notify: what PostgreSQL clients do all the time.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Ok(ReadOutcome { count: 0, maybe_more: false });
            }
            Err(error) => return Err(error),
        }
        // Also when the last one came up short: epoll tells the end of the stream together with what comes before it, and who has nothing
        // to pass on cannot say that it was not looked for.
        // Records without content do not keep this going: rustls ends whoever sends some of them in a row.
        if connection.read_tls(&mut socket)? == 0 {
            return Ok(ReadOutcome { count: 0, maybe_more: false });
        }
        let state = connection.process_new_packets();
        if connection.wants_write() {
            flush_tls(fd, connection)?;
        }
        state.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    }
}

fn flush_tls(fd: BorrowedFd<'_>, connection: &mut rustls::Connection) -> io::Result<bool> {
    while connection.wants_write() {
        match connection.write_tls(&mut Socket::new(fd)) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// Bytes that could not be written yet, here or inside TLS.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    bytes: Vec<u8>,
    sent: usize,
    /// TLS took bytes that the socket did not: the peer is as full as with bytes held here.
    tls_holds: bool,
    /// What is here was not offered to the socket yet.
    is_held_back: bool,
}

impl Outbox {
    pub fn is_empty(&self) -> bool {
        self.bytes.len() == self.sent && !self.tls_holds
    }

    /// Writes `data` after what is held already, and holds what does not go. True if nothing is held afterwards.
    pub fn send(&mut self, transport: &mut Transport, mut data: &[u8]) -> io::Result<bool> {
        if self.is_held_back {
            // One write for both, and one wake-up of the peer.
            self.bytes.extend_from_slice(data);
            return self.drain(transport);
        }
        if !self.is_empty() && !self.drain(transport)? {
            self.bytes.extend_from_slice(data);
            return Ok(false);
        }
        while !data.is_empty() {
            match transport.write(data) {
                Ok(count) => data = &data[count..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.bytes.extend_from_slice(data);
                    return Ok(false);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.tls_holds = !transport.flush()?;
        Ok(!self.tls_holds)
    }

    /// Writes what is held. True if all went.
    pub fn drain(&mut self, transport: &mut Transport) -> io::Result<bool> {
        self.is_held_back = false;
        while self.sent < self.bytes.len() {
            match transport.write(&self.bytes[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        // Memory is given back: an idle connection has no buffer.
        *self = Self::default();
        self.tls_holds = !transport.flush()?;
        Ok(!self.tls_holds)
    }

    /// Keeps `data` for a [`Self::drain`] or [`Self::send`] that follows at once.
    pub fn hold_back(&mut self, data: &[u8]) {
        // Nothing is sent off: what comes later, and finds the socket full, would pass for held back.
        self.is_held_back |= self.is_empty() && !data.is_empty();
        self.bytes.extend_from_slice(data);
    }

    /// The same of a buffer, which becomes its own if it has none.
    pub fn hold_back_all(&mut self, data: Vec<u8>) {
        if self.is_empty() && !data.is_empty() {
            *self = Self { bytes: data, is_held_back: true, ..Self::default() };
        } else {
            self.hold_back(&data);
        }
    }

    /// Whether the socket has taken everything that it was offered.
    pub fn is_unhindered(&self) -> bool {
        self.is_empty() || self.is_held_back
    }

    /// Whether it has something that its socket was not offered.
    pub fn is_held_back(&self) -> bool {
        self.is_held_back
    }

    pub fn held(&self) -> usize {
        self.bytes.len() - self.sent
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_is_held_back_goes_with_what_follows() {
        // A socket that keeps the bounds of writes.
        let kind = rustix::net::SocketType::SEQPACKET;
        let (near, far) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            kind,
            rustix::net::SocketFlags::NONBLOCK,
            None,
        )
        .expect("a pair");
        let (mut transport, mut outbox) = (Transport::new(near), Outbox::default());
        outbox.hold_back(b"name");
        assert!(outbox.is_held_back() && rustix::io::read(&far, &mut [0; 16]).is_err());
        assert!(outbox.send(&mut transport, b"request").expect("room") && outbox.is_empty());
        let mut read = [0; 16];
        assert_eq!(rustix::io::read(&far, &mut read).expect("a packet"), 11);
        assert!(&read[..11] == b"namerequest" && !outbox.is_held_back());
        assert!(outbox.send(&mut transport, b"next").expect("room"));
        assert_eq!(rustix::io::read(&far, &mut read).expect("a packet"), 4);
        outbox.hold_back(b"one");
        outbox.hold_back_all(b"more".to_vec());
        assert!(outbox.is_held_back() && outbox.drain(&mut transport).expect("room"));
        assert_eq!(rustix::io::read(&far, &mut read).expect("a packet"), 7);
    }

    #[test]
    fn a_socket_is_asked_for_room_when_it_has_none() {
        let (near, mut far) = UnixStream::pair().expect("a pair");
        near.set_nonblocking(true).expect("non-blocking");
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).expect("an epoll instance"));
        let events = || {
            let mut events: Vec<epoll::Event> = Vec::with_capacity(4);
            let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
            epoll::wait(&*epoll, rustix::buffer::spare_capacity(&mut events), Some(&now)).expect("events");
            events.iter().map(|event| (event.data.u64(), event.flags)).collect::<Vec<_>>()
        };
        let (mut transport, mut outbox) = (Transport::new(near.into()), Outbox::default());
        transport.watch_input(&epoll, 7, EventFlags::IN | EventFlags::OUT | EventFlags::ET).expect("watched");
        assert_eq!(events(), [], "the room of a new socket is no news");
        far.write_all(b"in").expect("room");
        assert_eq!(events(), [(7, EventFlags::IN)]);
        let mut sent = 0;
        while outbox.send(&mut transport, &[0; 65_536]).expect("a peer") {
            sent += 65_536;
        }
        sent += 65_536 - outbox.held();
        // What is unread is told again.
        assert_eq!(events(), [(7, EventFlags::IN)]);
        far.read_exact(&mut vec![0; sent]).expect("all of it");
        assert_eq!(events(), [(7, EventFlags::IN | EventFlags::OUT)]);
        assert!(outbox.drain(&mut transport).expect("room"));
    }

    #[test]
    fn what_a_full_socket_refuses_was_not_held_back() {
        let (near, _far) = UnixStream::pair().expect("a pair");
        near.set_nonblocking(true).expect("non-blocking");
        let (mut transport, mut outbox) = (Transport::new(near.into()), Outbox::default());
        outbox.hold_back(b"more");
        assert!(outbox.is_unhindered() && outbox.held() == 4);
        assert!(outbox.drain(&mut transport).expect("room") && outbox.is_unhindered());
        outbox.hold_back(b"");
        while outbox.send(&mut transport, &[0; 65_536]).expect("a peer") {}
        assert!(!outbox.is_unhindered());
    }
}
