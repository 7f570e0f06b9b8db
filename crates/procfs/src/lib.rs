// SPDX-License-Identifier: Apache-2.0
//! What /proc tells of processes, the sockets that they hold, and the TCP sockets of a network namespace: proc(5), proc_pid_net(5).
//!
//! All of it is of a moment that has passed: a process may have ended, a descriptor may be another file by now.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// State columns of /proc/net/tcp (net/tcp_states.h).
const ESTABLISHED: &str = "01";
const LISTEN: &str = "0A";

/// All processes, by the numbers that they have where /proc is mounted.
///
/// # Errors
/// There is no /proc.
pub fn pids() -> io::Result<impl Iterator<Item = u32>> {
    Ok(fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()))
}

/// The sockets that a process holds, descriptor and inode; none of one that we may not look into.
pub fn sockets(pid: u32) -> impl Iterator<Item = (i32, u64)> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten();
    entries.filter_map(|entry| {
        let entry = entry.ok()?;
        let target = fs::read_link(entry.path()).ok()?;
        let inode = target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
        Some((entry.file_name().to_str()?.parse().ok()?, inode.parse().ok()?))
    })
}

/// What a TCP socket is doing, as far as anybody here asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpState {
    /// Both ends are open.
    Established,
    /// It waits for connections.
    Listens,
    /// Anything else.
    Other,
}

/// A TCP socket of a network namespace. IPv4-mapped addresses are IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TcpSocket {
    /// Its own address.
    pub local: SocketAddr,
    /// The other end's; port 0 of one that listens.
    pub remote: SocketAddr,
    /// Its state.
    pub state: TcpState,
    /// Names it on the whole system; 0 of one that no process holds any more.
    pub inode: u64,
}

/// The TCP sockets of the network namespace that a process is in; `None`: of our own.
///
/// # Errors
/// The tables cannot be read: the process has ended, or may not be looked into. A kernel without IPv6 has one table only.
pub fn tcp_sockets(pid: Option<u32>) -> io::Result<Vec<TcpSocket>> {
    let process = pid.map_or_else(|| "self".to_owned(), |pid| pid.to_string());
    let mut found = read_table(&format!("/proc/{process}/net/tcp"))?;
    match read_table(&format!("/proc/{process}/net/tcp6")) {
        Ok(more) => found.extend(more),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    Ok(found)
}

fn read_table(path: &str) -> io::Result<Vec<TcpSocket>> {
    Ok(fs::read_to_string(path)?.lines().skip(1).filter_map(tcp_socket).collect())
}

fn tcp_socket(line: &str) -> Option<TcpSocket> {
    let mut columns = line.split_ascii_whitespace().skip(1);
    Some(TcpSocket {
        local: address(columns.next()?)?,
        remote: address(columns.next()?)?,
        state: match columns.next()? {
            ESTABLISHED => TcpState::Established,
            LISTEN => TcpState::Listens,
            _ => TcpState::Other,
        },
        inode: columns.nth(5)?.parse().ok()?,
    })
}

/// `0100007F:1538`: words of the address in the machine's byte order, then the port.
fn address(text: &str) -> Option<SocketAddr> {
    let (address, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |i: usize| u32::from_str_radix(address.get(i * 8..i * 8 + 8)?, 16).ok().map(u32::to_ne_bytes);
    let ip = match address.len() {
        8 => IpAddr::V4(Ipv4Addr::from(word(0)?)),
        32 => {
            let mut bytes = [0u8; 16];
            for i in 0..4 {
                bytes[i * 4..i * 4 + 4].copy_from_slice(&word(i)?);
            }
            IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn addresses_of_the_socket_table_are_read() {
        let line = "   1: 0100007F:1538 0100007F:C001 01 00000000:00000000 00:00000000 00000000  105 0 4711 1 0 20 4";
        let socket = tcp_socket(line).expect("a line");
        assert_eq!(socket.local, "127.0.0.1:5432".parse().expect("address"));
        assert_eq!((socket.state, socket.inode), (TcpState::Established, 4711));
        assert_eq!(
            address("0000000000000000FFFF00000100007F:0050"),
            Some("127.0.0.1:80".parse().expect("address")),
            "IPv4-mapped"
        );
        assert_eq!(address("junk"), None);
        assert_eq!(tcp_socket("  sl  local_address"), None);
    }

    #[test]
    fn our_own_sockets_are_found() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let pid = std::process::id();
        assert!(pids().expect("/proc").any(|other| other == pid));
        let held: Vec<u64> = sockets(pid).map(|(_, inode)| inode).collect();
        let wanted = listener.local_addr().expect("address");
        for of in [None, Some(pid)] {
            let found = tcp_sockets(of).expect("the tables");
            let ours = found.iter().find(|s| s.state == TcpState::Listens && s.local == wanted);
            assert!(ours.is_some_and(|socket| held.contains(&socket.inode)));
        }
    }
}
