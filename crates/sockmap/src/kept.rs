// SPDX-License-Identifier: Apache-2.0
//! Pooling without a protocol, whose clients wait in the kernel: for benchmarks, no lane.

use std::collections::VecDeque;
use std::fmt;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use libbpf_rs::MapCore;
use libbpf_rs::skel::{OpenSkel, SkelBuilder};

use crate::attach::{self, Attachment};
use crate::datapath::{self, cookie_of};
use crate::error::Error;
use crate::forward::far_end;
use crate::skel::kept::{KeptSkel, KeptSkelBuilder};

/// As in `bpf/kept.bpf.c`: places of clients.
const CLIENTS_MAX: u32 = 256;
/// Likewise: places of servers, a bit of a word each.
const SERVERS_MAX: u32 = 64;

/// Clients and the servers that they share. Everything ends with the value.
pub struct Keeper {
    // Before the programs: what is attached goes first.
    _attachments: Vec<Attachment>,
    both: bool,
    /// How many there are: they have the first places.
    servers: u32,
    /// Places of no client. The next is the one that was left longest ago, so that an answer that comes late finds nobody.
    free: VecDeque<u32>,
    /// Cookies of the sockets of the client at each place.
    cookies: Vec<Vec<u64>>,
    skel: KeptSkel<'static>,
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper").finish_non_exhaustive()
    }
}

impl Keeper {
    /// Loads the programs; needs root. `both`: the applications are on this host too, and answers go into their own sockets.
    ///
    /// # Errors
    /// When the kernel refuses a program; carries the verifier's log.
    pub fn open(both: bool) -> Result<Self, Error> {
        let log = attach::capture_log();
        // The skeleton borrows this storage for its whole life; it is a pointer in size and opened once.
        let storage = Box::leak(Box::new(MaybeUninit::uninit()));
        let mut open = KeptSkelBuilder::default().open(storage).map_err(|e| log.error(&e))?;
        let rodata =
            open.maps.rodata_data.as_deref_mut().ok_or(Error::State("the object has no settings"))?;
        rodata.both_ways = both.into();
        let skel = open.load().map_err(|e| log.error(&e))?;
        drop(log);
        let mut attachments = vec![
            attach::skb_verdict(&skel.progs.keep_skb, &skel.maps.kept_clients)?,
            attach::msg_verdict(&skel.progs.keep_msg, &skel.maps.kept_backends)?,
        ];
        if both {
            attachments.push(attach::msg_verdict(&skel.progs.keep_msg, &skel.maps.kept_apps)?);
        }
        let cookies = vec![Vec::new(); CLIENTS_MAX as usize];
        Ok(Self {
            _attachments: attachments,
            both,
            servers: 0,
            free: (0..CLIENTS_MAX).collect(),
            cookies,
            skel,
        })
    }

    /// A server that all clients share, by the connection that leads to it. It is idle: what [`crate::Forwarder::join_local`] asks of its process
    /// holds here too.
    ///
    /// # Errors
    /// When no process on this host has the other end, or there are too many.
    pub fn add_server(&mut self, server: impl AsFd) -> Result<(), Error> {
        let place = self.servers;
        if place == SERVERS_MAX {
            return Err(Error::Full { what: "server", limit: SERVERS_MAX });
        }
        let backend = far_end(server.as_fd())?;
        self.place(backend.as_fd(), place)?;
        self.insert(&self.skel.maps.kept_backends, place, backend.as_fd())?;
        self.servers += 1;
        // From here on clients take it.
        let joined = u64::MAX >> (SERVERS_MAX - self.servers);
        datapath::insert(&self.skel.maps.kept_joined, &0u32.to_ne_bytes(), &joined.to_ne_bytes())
            .map_err(Error::system("adding a server"))
    }

    /// A client, by its connection here; the place that it has until [`Self::remove_client`].
    ///
    /// # Errors
    /// As of [`Self::add_server`]; the process is the application where answers go into its own socket.
    pub fn add_client(&mut self, client: impl AsFd) -> Result<u32, Error> {
        let client = client.as_fd();
        let application = self.both.then(|| far_end(client)).transpose()?;
        let place = self.free.pop_front().ok_or(Error::Full { what: "client", limit: CLIENTS_MAX })?;
        let mut cookies = Vec::new();
        if let Some(application) = &application {
            cookies.push(self.place(application.as_fd(), SERVERS_MAX + place)?);
            self.insert(&self.skel.maps.kept_apps, place, application.as_fd())?;
        }
        cookies.push(self.place(client, place)?);
        self.insert(&self.skel.maps.kept_clients, place, client)?;
        self.cookies[place as usize] = cookies;
        Ok(place)
    }

    /// The client at a place has left, and its connection is closed. One that left while it waited for an answer ends its server, whose send fails.
    pub fn remove_client(&mut self, place: u32) {
        for cookie in self.cookies[place as usize].drain(..) {
            // It is there, and nothing would be lost if it were not.
            let _ = self.skel.maps.kept_places.delete(&cookie.to_ne_bytes());
        }
        self.free.push_back(place);
    }

    /// Tells the programs where a socket stands, before they see anything of it; its cookie.
    fn place(&self, socket: BorrowedFd<'_>, place: u32) -> Result<u64, Error> {
        let cookie = cookie_of(socket)?;
        datapath::insert(&self.skel.maps.kept_places, &cookie.to_ne_bytes(), &place.to_ne_bytes())
            .map_err(Error::system("placing a socket"))?;
        Ok(cookie)
    }

    fn insert(&self, map: &impl MapCore, place: u32, socket: BorrowedFd<'_>) -> Result<(), Error> {
        let value = (socket.as_raw_fd() as u64).to_ne_bytes();
        datapath::insert(map, &place.to_ne_bytes(), &value)
            .map_err(Error::system("putting a socket into the map"))
    }
}
