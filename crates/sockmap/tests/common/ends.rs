// SPDX-License-Identifier: Apache-2.0
//! Registered clients and servers with both of their ends in the test's hands.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;

use underpass_sockmap::{
    ClientSlot, Config, Datapath, Event, Give, Lane, LaneChoice, PoolSlot, Reason, ServerSlot, ServerSpec,
    Taken,
};

use super::{eventually, open, pair};

/// A client: the application's end, the pooler's end, the slot.
pub struct Client {
    pub app: TcpStream,
    pub near: TcpStream,
    pub slot: ClientSlot,
}

/// A server: the pooler's end, PostgreSQL's end, the slot.
pub struct Server {
    pub near: TcpStream,
    pub backend: TcpStream,
    pub slot: ServerSlot,
}

/// Open lanes and one pool.
pub struct Rig {
    pub dp: Datapath,
    pub pool: PoolSlot,
    pub lane: Lane,
}

/// Runs a test on each lane that this machine has.
pub fn on_each_lane(config: &Config, test: impl Fn(&Rig)) {
    for lane in [Lane::D, Lane::A, Lane::B] {
        let config = Config { applications: lane == Lane::B, ..config.clone() };
        let Some(dp) = open(&config) else { return };
        let pool = dp.add_pool().unwrap();
        println!("-- lane {lane:?}");
        test(&Rig { dp, pool, lane });
    }
}

impl Rig {
    /// A client in the kernel's hands.
    pub fn client(&self) -> Client {
        let c = self.held_client(self.pool, 1);
        assert_eq!(self.dp.give_client(c.slot, 0).unwrap(), Give::Done);
        c
    }

    /// A fresh client, in user space's hands.
    pub fn held_client(&self, pool: PoolSlot, fingerprint: u32) -> Client {
        let (app, near) = pair();
        let slot = self.dp.register_client(near.as_fd(), pool, fingerprint).unwrap();
        let mut client = Client { app, near, slot };
        if self.lane == Lane::B {
            attach(&self.dp, &client);
            // Bytes by TCP that it reads: nobody sleeps in an old recv().
            client.near.write_all(b"!").unwrap();
            assert_eq!(read_exact(&mut client.app, 1), b"!");
        }
        client
    }

    /// An idle server.
    pub fn server(&self, ordinal: u32) -> Server {
        let s = self.held_server(self.pool, ordinal, 1);
        assert_eq!(self.dp.push_idle(s.slot, 0).unwrap(), Give::Done);
        s
    }

    /// A fresh server, in user space's hands.
    pub fn held_server(&self, pool: PoolSlot, ordinal: u32, fingerprint: u32) -> Server {
        let (near, backend) = pair();
        let backend_pid = Some(std::process::id());
        let lane = match self.lane {
            Lane::D => LaneChoice::Remote,
            Lane::A | Lane::B => LaneChoice::Local { backend_pid },
        };
        let spec = ServerSpec { pool, ordinal, fingerprint, lane };
        let (slot, lane) = self.dp.register_server(near.as_fd(), &spec).unwrap();
        assert_eq!(lane, if self.lane == Lane::D { Lane::D } else { Lane::A });
        Server { near, backend, slot }
    }

    /// The events that are due.
    pub fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        self.dp.drain_events(&mut events).unwrap();
        events
    }

    /// The events that are due, if there are any.
    pub fn events_or_none(&self) -> Option<Vec<Event>> {
        Some(self.events()).filter(|events| !events.is_empty())
    }

    /// Takes, waiting for a running program.
    pub fn take(&self, client: &Client) -> Taken {
        let mut taken = None;
        eventually("taken", || {
            taken = self.dp.take(client.slot).unwrap();
            taken.is_some()
        });
        taken.unwrap()
    }

    /// The client must come up for this reason; its link is taken.
    pub fn expect_up(&self, client: &Client, reason: Reason) -> Taken {
        let mut events = Vec::new();
        eventually("an event", || {
            events.extend(self.events());
            !events.is_empty()
        });
        assert_eq!(events, [Event::ClientUp { client: client.slot, reason }]);
        self.take(client)
    }

    /// The server must come up for this reason.
    pub fn expect_server_up(&self, server: &Server, reason: Reason) {
        let mut events = Vec::new();
        eventually("an event", || {
            events.extend(self.events());
            !events.is_empty()
        });
        assert_eq!(events, [Event::ServerUp { server: server.slot, reason }]);
    }

    /// The server belongs to nobody.
    pub fn expect_released(&self, server: &Server) {
        eventually("the server is released", || self.dp.server_peer(server.slot).unwrap().is_none());
    }
}

/// Lane B: the application's own socket, which need not be looked for here.
pub fn attach(dp: &Datapath, client: &Client) {
    dp.attach_application(client.slot, client.app.as_fd()).unwrap();
}

/// Reads exactly so many bytes.
pub fn read_exact(from: &mut TcpStream, bytes: usize) -> Vec<u8> {
    let mut buffer = vec![0u8; bytes];
    from.read_exact(&mut buffer).unwrap();
    buffer
}
