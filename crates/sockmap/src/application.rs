// SPDX-License-Identifier: Apache-2.0
//! Lane B: the own socket of an application on this host, into which programs put responses, and out of which they take requests, without a detour
//! through TCP.
//!
//! The application's socket is found as a backend's is, see `holder.rs` and `holders.rs`. Nothing else changes for user space: a client with an
//! attached application is taken, given and written to as any other; [`Datapath::client_drained`] knows of both ways.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};

use rustix::net::sockopt::tcp_nodelay;

use crate::datapath::{ClientSlot, Datapath, cookie_of, insert};
use crate::error::Error;
use crate::holder::Connection;
use crate::socket;
use crate::words::{LOOK_APP, LOOK_CLIENT, PEER_LINKED};

/// Bytes that may be on their way between two ends of a connection: more is another connection, or one whose sequence numbers are translated.
const FLIGHT_MAX: u32 = 64 << 20;

impl Datapath {
    /// Lane B for this client: responses may go straight into the application's socket, which [`crate::Holders`] found, and requests straight out
    /// of it. At any time, whoever owns the client's directions. Close the duplicate afterwards.
    ///
    /// # Errors
    /// [`Error::Stale`]; [`Error::State`] when these lanes were opened without [`crate::Config::applications`], the kernel cannot have lane B, the
    /// socket is not the other end of the client's, or is one without TCP_NODELAY or with a program that reads it; [`Error::System`] when the kernel refuses it.
    pub fn attach_application(&self, client: ClientSlot, application: BorrowedFd<'_>) -> Result<(), Error> {
        let c = self.check_client(client)?;
        if !self.apps_work {
            return Err(Error::State("lane B is off, or needs Linux 6.2"));
        }
        let near = socket::borrow(self.client_fd(c));
        let addresses = |fd| Connection::of(fd).map_err(Error::system("the addresses of a client"));
        if addresses(near)?.reversed() != addresses(application)? {
            return Err(Error::State("the socket is not the client's other end"));
        }
        // The pooler's end acknowledges requests late when no response goes the same way, and Nagle's algorithm would wait for that.
        if !tcp_nodelay(application).map_err(|e| Error::System { what: "TCP_NODELAY", source: e.into() })? {
            return Err(Error::State("the application has not set TCP_NODELAY"));
        }
        let cookie = cookie_of(application)?;
        let refused = |source| Error::System { what: "putting an application into its map", source };
        let descriptor = application.as_raw_fd();
        insert(&self.skel.maps.app_slot, &descriptor.to_ne_bytes(), &c.to_ne_bytes()).map_err(refused)?;
        let value = (descriptor as u64).to_ne_bytes();
        insert(&self.skel.maps.app_socks, &cookie.to_ne_bytes(), &value).map_err(refused)?;
        let app = self.look(LOOK_APP, 0, cookie).map_err(refused)?;
        if self.ask_socket(app.sk_addr, cookie)?.has_verdict {
            return Err(Error::State(
                "a program reads what comes to the application, as another pooler's does",
            ));
        }
        let near = self.look(LOOK_CLIENT, c, 0).map_err(refused)?;
        // Programs compare the sequence numbers of the two ends: something between them must not have changed them.
        // The two looks are not of one instant: either may be ahead.
        let apart = |one: u32, other: u32| one.wrapping_sub(other).cast_signed().unsigned_abs();
        if apart(near.write_seq, app.copied_seq) > FLIGHT_MAX
            || apart(app.write_seq, near.copied_seq) > FLIGHT_MAX
        {
            return Err(Error::State("the two ends of the connection count differently"));
        }
        let slot = &self.clients;
        slot.app_after(c).store(app.rcv_nxt, Relaxed);
        slot.app_flags(c).store(0, Relaxed);
        slot.app_cookie(c).store(cookie, SeqCst);
        // Last: from here on a program may use it.
        slot.app_addr(c).store(app.sk_addr, SeqCst);
        Ok(())
    }

    /// Whether a program may put responses into the application's own socket.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn has_application(&self, client: ClientSlot) -> Result<bool, Error> {
        Ok(self.clients.app_addr(self.check_client(client)?).load(SeqCst) != 0)
    }

    /// Bytes that went straight to an application and that it has not read, as the kernel charges them.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn application_unread(&self, client: ClientSlot) -> Result<u32, Error> {
        Ok(self.ask(0, 0, self.check_client(client)?)?.unread)
    }

    /// Has the application read all that went straight to it? Until then nothing may be written to the client's socket: see
    /// direct_unread() in lanes.bpf.h.
    pub(crate) fn is_direct_read(&self, c: u32) -> Result<bool, Error> {
        if !self.apps_work || self.clients.last_addr(c).load(SeqCst) == 0 {
            return Ok(true);
        }
        // In this order: what is not in the queue yet is not unread.
        Ok(self.is_direct_settled(c)? && self.ask(0, 0, c)?.unread == 0)
    }

    /// Is the request that last went straight from an application in its backend's queue? Programs count it before the kernel puts it there. As
    /// [`Self::is_direct_settled`], but somebody may sleep in recv() on that socket, who holds a reference too: then another send of the same thread tells.
    pub(crate) fn is_request_settled(&self, s: u32) -> Result<bool, Error> {
        let peer = self.servers.peer(s).load(SeqCst);
        let c = peer as u32;
        // What is not linked has answered everything.
        if peer & PEER_LINKED == 0 || self.clients.sender(c).load(SeqCst) == 0 {
            return Ok(true);
        }
        let (address, cookie) =
            (self.clients.app_addr(c).load(SeqCst), self.clients.app_cookie(c).load(SeqCst));
        Ok(self.ask_socket(address, cookie)?.refs <= 1)
    }

    /// Is the response that last went straight to an application in its queue? The user-space half of direct_settled() in lanes.bpf.h.
    pub(crate) fn is_direct_settled(&self, c: u32) -> Result<bool, Error> {
        let (address, cookie) =
            (self.clients.last_addr(c).load(SeqCst), self.clients.last_cookie(c).load(SeqCst));
        if address == 0 || self.ask_socket(address, cookie)?.refs <= 1 {
            return Ok(true);
        }
        let s = self.clients.last_server(c).load(Acquire);
        let sent_since = self.servers.runs_begin(s).load(SeqCst) != self.clients.last_run(c).load(Acquire);
        Ok(sent_since && self.servers.cookie(s).load(SeqCst) == cookie)
    }
}
