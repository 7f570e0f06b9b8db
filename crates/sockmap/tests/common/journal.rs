// SPDX-License-Identifier: Apache-2.0
//! What happened to each connection lately: when a stream is found broken, the journal says which hand-over did it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Entries kept per connection.
const DEPTH: usize = 80;

/// Last events of each connection, by the port of the far end (client's or backend's).
#[derive(Debug)]
pub struct Journal {
    start: Instant,
    rings: Mutex<HashMap<u16, VecDeque<(u128, String)>>>,
}

impl Default for Journal {
    fn default() -> Self {
        Self { start: Instant::now(), rings: Mutex::default() }
    }
}

impl Journal {
    /// Notes an event of the connection with this port.
    pub fn note(&self, port: u16, event: String) {
        let at = self.start.elapsed().as_micros();
        let mut rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        let ring = rings.entry(port).or_default();
        if ring.len() == DEPTH {
            ring.pop_front();
        }
        ring.push_back((at, event));
    }

    /// The last events of these connections, in the order of time.
    pub fn tell(&self, ports: &[u16]) -> String {
        let rings = self.rings.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = ports
            .iter()
            .flat_map(|port| rings.get(port).into_iter().flatten().map(move |(at, event)| (at, port, event)))
            .collect();
        all.sort_by_key(|&(at, ..)| at);
        all.iter().map(|(at, port, event)| format!("{at:>9} us  :{port} {event}\n")).collect()
    }

    /// The last events of a client and of the servers that its own entries name.
    pub fn tell_with(&self, client: u16) -> String {
        let own = self.tell(&[client]);
        let mut ports: Vec<u16> = own
            .match_indices("[server :")
            .filter_map(|(i, m)| own[i + m.len()..].split(',').next()?.parse().ok())
            .filter(|&port| port != 0)
            .collect();
        ports.push(client);
        ports.sort_unstable();
        ports.dedup();
        self.tell(&ports)
    }
}
