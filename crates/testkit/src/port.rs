// SPDX-License-Identifier: Apache-2.0
//! A TCP port that no other test gets while it is held, in this process or any other.
//!
//! Asking the kernel for port 0 and closing the socket again leaves a window in which somebody else gets the same port.
//! Here the right to a port is an abstract unix socket named after it: held as long as the value lives, released by the
//! kernel however the process ends, scoped to the network namespace as ports themselves are. Ports are taken below the
//! kernel's default range for outgoing connections (32768-60999), so that no client socket sits on them by chance.

use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::atomic::{AtomicU16, Ordering};

use crate::{Error, Result};

const FIRST: u16 = 20_000;
const COUNT: u16 = 10_000;

/// A reserved TCP port; see the module's head for how.
#[derive(Debug)]
pub struct Port {
    number: u16,
    _claim: UnixListener,
}

impl Port {
    /// Reserves a port that nobody listens on.
    pub fn reserve() -> Result<Self> {
        // Processes start at different places, so that they rarely contend for the same claims.
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let start = (std::process::id().wrapping_mul(131) % u32::from(COUNT)) as u16;
        for _ in 0..COUNT {
            let step = NEXT.fetch_add(1, Ordering::Relaxed) % COUNT;
            let number = FIRST + (start + step) % COUNT;
            if let Some(port) = Self::claim(number) {
                return Ok(port);
            }
        }
        Err(Error::NotFound { program: "free port".into(), hint: format!("{FIRST}..{}", FIRST + COUNT) })
    }

    fn claim(number: u16) -> Option<Self> {
        let name = SocketAddr::from_abstract_name(format!("underpass-testkit-port-{number}")).ok()?;
        let claim = UnixListener::bind_addr(&name).ok()?;
        // Somebody outside the testkit may listen there.
        TcpListener::bind(("0.0.0.0", number)).ok()?;
        Some(Self { number, _claim: claim })
    }

    /// The port's number.
    pub fn number(&self) -> u16 {
        self.number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_port_is_not_given_twice() {
        let ports: Vec<Port> = (0..50).map(|_| Port::reserve().unwrap()).collect();
        let mut numbers: Vec<u16> = ports.iter().map(Port::number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 50);
        assert!(Port::claim(numbers[0]).is_none());
    }

    #[test]
    fn a_port_with_a_listener_is_passed_over() {
        let number = Port::reserve().unwrap().number();
        let _listener = TcpListener::bind(("127.0.0.1", number)).unwrap();
        assert!(Port::claim(number).is_none());
    }
}
