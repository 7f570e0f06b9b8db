// SPDX-License-Identifier: Apache-2.0
//! Forwarding between two sockets without a protocol, by the smallest program that can: for benchmarks, no lane.

use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{MapCore, MapFlags};

use crate::attach::{self, Attachment};
use crate::error::Error;
use crate::skel::forward::{ForwardSkel, ForwardSkelBuilder};

/// Pairs of TCP sockets between which the kernel forwards. Everything ends with the value.
pub struct Forwarder {
    // Before the programs: what is attached goes first.
    _attachment: Attachment,
    skel: ForwardSkel<'static>,
}

impl fmt::Debug for Forwarder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Forwarder").finish_non_exhaustive()
    }
}

impl Forwarder {
    /// Loads the program; needs root.
    ///
    /// # Errors
    /// When the kernel refuses it; carries the verifier's log.
    pub fn open() -> Result<Self, Error> {
        let log = attach::capture_log();
        // The skeleton borrows this storage for its whole life; it is a pointer in size and opened once.
        let storage = Box::leak(Box::new(MaybeUninit::uninit()));
        let open = ForwardSkelBuilder::default().open(storage).map_err(|e| log.error(&e))?;
        let skel = open.load().map_err(|e| log.error(&e))?;
        drop(log);
        let attachment = attach::skb_verdict(&skel.progs.forward_skb, &skel.maps.peers)?;
        Ok(Self { _attachment: attachment, skel })
    }

    /// Joins two connected TCP sockets: what arrives at one from now on leaves by the other. What arrived before stays
    /// for the caller to read. A pair ends when either socket is closed.
    ///
    /// # Errors
    /// When a socket has no cookie, is not connected, or there are too many.
    pub fn join(&self, a: impl AsFd, b: impl AsFd) -> Result<(), Error> {
        let (a, b) = (a.as_fd(), b.as_fd());
        for (socket, other) in [(a, b), (b, a)] {
            let cookie = rustix::net::sockopt::socket_cookie(other)
                .map_err(|error| Error::system("asking for the cookie of a socket")(error.into()))?;
            let value = u64::try_from(socket.as_raw_fd()).expect("a descriptor is not negative");
            self.skel.maps.peers.update(&cookie.to_ne_bytes(), &value.to_ne_bytes(), MapFlags::ANY).map_err(
                |error| Error::system("putting a socket into the map")(std::io::Error::other(error)),
            )?;
        }
        Ok(())
    }
}
