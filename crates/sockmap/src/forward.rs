// SPDX-License-Identifier: Apache-2.0
//! Forwarding between two sockets without a protocol, by the smallest program that can: for benchmarks, no lane.

use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};

use crate::attach::{self, Attachment};
use crate::datapath::{self, cookie_of};
use crate::error::Error;
use crate::holder::{Found, holder_of};
use crate::skel::forward::{ForwardSkel, ForwardSkelBuilder};

/// linux/bpf.h: a redirect into the receive queue of its target.
const BPF_F_INGRESS: u64 = 1;

/// Between which sockets [`Forwarder::join_local`] forwards, by the names of their processes: the client at one end, the backend at the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Local {
    /// Requests from the client's connection here into the backend's socket, answers out of that to the connection here: lane A's ways.
    Server,
    /// Requests out of the client's own socket into the backend's and answers back: lane B's ways.
    Both,
    /// Answers as of [`Local::Server`]; requests are the caller's to forward, as of clients that wait for a server.
    ServerAnswers,
    /// Answers as of [`Local::Both`]; requests are the caller's.
    BothAnswers,
}

/// Pairs of TCP or unix stream sockets between which the kernel forwards. Everything ends with the value.
pub struct Forwarder {
    // Before the programs: what is attached goes first.
    _attachments: Vec<Attachment>,
    local: Option<Local>,
    skel: ForwardSkel<'static>,
}

impl fmt::Debug for Forwarder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Forwarder").finish_non_exhaustive()
    }
}

impl Forwarder {
    /// Loads the program; needs root. What arrives at one socket of a pair is sent by the other.
    ///
    /// # Errors
    /// When the kernel refuses it; carries the verifier's log.
    pub fn open() -> Result<Self, Error> {
        Self::load(0, None)
    }

    /// As [`Self::open`], but what arrives at one socket of a pair becomes readable at the other.
    ///
    /// # Errors
    /// As of [`Self::open`].
    pub fn open_inward() -> Result<Self, Error> {
        Self::load(BPF_F_INGRESS, None)
    }

    /// For [`Self::join_local`].
    ///
    /// # Errors
    /// As of [`Self::open`].
    pub fn open_local(local: Local) -> Result<Self, Error> {
        let inward = matches!(local, Local::Both | Local::BothAnswers);
        Self::load(if inward { BPF_F_INGRESS } else { 0 }, Some(local))
    }

    fn load(redirect_flags: u64, local: Option<Local>) -> Result<Self, Error> {
        let log = attach::capture_log();
        // The skeleton borrows this storage for its whole life; it is a pointer in size and opened once.
        let storage = Box::leak(Box::new(MaybeUninit::uninit()));
        let mut open = ForwardSkelBuilder::default().open(storage).map_err(|e| log.error(&e))?;
        let rodata =
            open.maps.rodata_data.as_deref_mut().ok_or(Error::State("the object has no settings"))?;
        rodata.redirect_flags = redirect_flags;
        rodata.same_host = (local == Some(Local::Server)).into();
        let by_skb = matches!(local, None | Some(Local::Server));
        rodata.among_senders = (!by_skb).into();
        let skel = open.load().map_err(|e| log.error(&e))?;
        drop(log);
        let mut attachments = Vec::new();
        if by_skb {
            attachments.push(attach::skb_verdict(&skel.progs.forward_skb, &skel.maps.peers)?);
        }
        if local.is_some() {
            attachments.push(attach::msg_verdict(&skel.progs.forward_msg, &skel.maps.senders)?);
        }
        Ok(Self { _attachments: attachments, local, skel })
    }

    /// Joins two connected sockets: what arrives at one from now on is forwarded to the other. What arrived before stays
    /// for the caller to read. A pair ends when either socket is closed. A socket may be its own peer.
    ///
    /// # Errors
    /// When a socket has no cookie, is not connected, or there are too many.
    pub fn join(&self, a: impl AsFd, b: impl AsFd) -> Result<(), Error> {
        let (a, b) = (a.as_fd(), b.as_fd());
        let (of_a, of_b) = (cookie_of(a)?, cookie_of(b)?);
        self.insert(of_b, a)?;
        if of_a == of_b { Ok(()) } else { self.insert(of_a, b) }
    }

    /// Joins a client with the process on this host that `server` leads to, as [`Self::open_local`] was told. Nothing may be under way, and no process
    /// may be asleep in `recv()`: a backend that has said ReadyForQuery is asleep in epoll, and libpq in poll.
    ///
    /// # Errors
    /// As of [`Self::join`]; when a process that takes part is not found on this host; on a forwarder that was opened otherwise.
    pub fn join_local(&self, client: impl AsFd, server: impl AsFd) -> Result<(), Error> {
        let local = self.local.ok_or(Error::State("opened for pairs of its own sockets"))?;
        let client = client.as_fd();
        let backend = far_end(server.as_fd())?;
        let backend = backend.as_fd();
        let of_backend = cookie_of(backend)?;
        // Where the backend's own bytes go; it is in its map before, by whatever key.
        match local {
            Local::Server => {
                self.insert_sender(cookie_of(client)?, backend)?;
                self.insert(of_backend, client)
            }
            Local::Both => {
                let application = far_end(client)?;
                self.insert_sender(cookie_of(application.as_fd())?, backend)?;
                self.insert_sender(of_backend, application.as_fd())
            }
            Local::ServerAnswers => {
                self.insert_sender(!of_backend, backend)?;
                self.insert_sender(of_backend, client)
            }
            Local::BothAnswers => {
                let application = far_end(client)?;
                self.insert_sender(!of_backend, backend)?;
                self.insert_sender(of_backend, application.as_fd())
            }
        }
    }

    /// Runs the program on what arrives at a connected socket, without a peer: it all goes to user space.
    ///
    /// # Errors
    /// As of [`Self::join`].
    pub fn watch(&self, socket: impl AsFd) -> Result<(), Error> {
        let socket = socket.as_fd();
        // No socket has such a cookie, so nobody's peer.
        self.insert(!cookie_of(socket)?, socket)
    }

    fn insert(&self, key: u64, socket: BorrowedFd<'_>) -> Result<(), Error> {
        let inserted = datapath::insert(&self.skel.maps.peers, &key.to_ne_bytes(), &value_of(socket));
        inserted.map_err(Error::system("putting a socket into the map"))
    }

    fn insert_sender(&self, key: u64, socket: BorrowedFd<'_>) -> Result<(), Error> {
        let inserted = datapath::insert(&self.skel.maps.senders, &key.to_ne_bytes(), &value_of(socket));
        inserted.map_err(Error::system("putting a process's socket into the map"))
    }
}

/// The socket at the other end, of a process on this host; to be closed at once after use.
pub(crate) fn far_end(near: BorrowedFd<'_>) -> Result<OwnedFd, Error> {
    let found = holder_of(near, None, None).and_then(Found::socket);
    found.map_err(Error::system("looking for a process's socket"))
}

fn value_of(socket: BorrowedFd<'_>) -> [u8; 8] {
    u64::try_from(socket.as_raw_fd()).expect("a descriptor is not negative").to_ne_bytes()
}
