// SPDX-License-Identifier: Apache-2.0
//! Forwarding between two sockets without a protocol, by the smallest program that can: for benchmarks, no lane.

use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};

use crate::attach::{self, Attachment};
use crate::datapath::{self, cookie_of};
use crate::error::Error;
use crate::holder::{Found, holder_of};
use crate::skel::forward::{ForwardSkel, ForwardSkelBuilder};

/// linux/bpf.h: a redirect into the receive queue of its target.
const BPF_F_INGRESS: u64 = 1;

/// Pairs of TCP or unix stream sockets between which the kernel forwards. Everything ends with the value.
pub struct Forwarder {
    // Before the programs: what is attached goes first.
    _attachments: Vec<Attachment>,
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
        Self::load(0, false)
    }

    /// As [`Self::open`], but what arrives at one socket of a pair becomes readable at the other.
    ///
    /// # Errors
    /// As of [`Self::open`].
    pub fn open_inward() -> Result<Self, Error> {
        Self::load(BPF_F_INGRESS, false)
    }

    /// For [`Self::join_local`]: the two ways of lane A.
    ///
    /// # Errors
    /// As of [`Self::open`].
    pub fn open_same_host() -> Result<Self, Error> {
        Self::load(0, true)
    }

    fn load(redirect_flags: u64, same_host: bool) -> Result<Self, Error> {
        let log = attach::capture_log();
        // The skeleton borrows this storage for its whole life; it is a pointer in size and opened once.
        let storage = Box::leak(Box::new(MaybeUninit::uninit()));
        let mut open = ForwardSkelBuilder::default().open(storage).map_err(|e| log.error(&e))?;
        let rodata =
            open.maps.rodata_data.as_deref_mut().ok_or(Error::State("the object has no settings"))?;
        rodata.redirect_flags = redirect_flags;
        rodata.same_host = same_host.into();
        let skel = open.load().map_err(|e| log.error(&e))?;
        drop(log);
        let mut attachments = vec![attach::skb_verdict(&skel.progs.forward_skb, &skel.maps.peers)?];
        if same_host {
            attachments.push(attach::msg_verdict(&skel.progs.forward_msg, &skel.maps.backends)?);
        }
        Ok(Self { _attachments: attachments, skel })
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

    /// Joins a client with the process on this host that `server` leads to: what arrives at the client becomes readable in that process, and what
    /// that sends is sent to the client. Nothing may be under way, and the process must not be asleep in `recv()`: a backend that has said
    /// ReadyForQuery is asleep in epoll.
    ///
    /// # Errors
    /// As of [`Self::join`]; when no process on this host is found at the other end.
    pub fn join_local(&self, client: impl AsFd, server: impl AsFd) -> Result<(), Error> {
        let client = client.as_fd();
        let backend = holder_of(server.as_fd(), None, None).and_then(Found::socket);
        let backend = backend.map_err(Error::system("looking for the backend's socket"))?;
        let key = cookie_of(client)?.to_ne_bytes();
        datapath::insert(&self.skel.maps.backends, &key, &value_of(backend.as_fd()))
            .map_err(Error::system("putting a backend's socket into the map"))?;
        self.insert(cookie_of(backend.as_fd())?, client)
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
}

fn value_of(socket: BorrowedFd<'_>) -> [u8; 8] {
    u64::try_from(socket.as_raw_fd()).expect("a descriptor is not negative").to_ne_bytes()
}
