// SPDX-License-Identifier: Apache-2.0
//! Lanes A and B: find the socket at the other end of a connection on this host, of a PostgreSQL backend or an application.
//!
//! The connection's tuple, reversed, must be in the socket table of *our* network namespace; its inode is unique on
//! the system and names the socket, whatever process holds it. A peer behind a NAT, or in another
//! namespace, has no such entry and is not taken for local. Nor is a relay or a balancer on this host, which has: what
//! the server calls its process must be the holder's number, as the holder itself sees it (in a container, another than ours).

use std::collections::HashMap;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::fstat;
use rustix::net::{getpeername, getsockname};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use underpass_procfs::{TcpSocket, TcpState, pids, sockets, tcp_sockets};

use crate::holders::Holders;

/// The two addresses of a TCP connection, as the socket that was asked for them has them. IPv4-mapped addresses are IPv4.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Connection {
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
}

impl Connection {
    /// Of a connected TCP socket.
    ///
    /// # Errors
    /// It is not one.
    pub fn of(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let local =
            SocketAddr::try_from(getsockname(fd)?).map_err(|_| io::Error::other("not a TCP socket"))?;
        let remote = getpeername(fd)?
            .and_then(|a| SocketAddr::try_from(a).ok())
            .ok_or_else(|| io::Error::other("not a connected TCP socket"))?;
        Ok(Self { local: canonical(local), remote: canonical(remote) })
    }

    /// Whether the addresses allow that both ends are on this host: who connects to an address of the own host has it for his own.
    pub fn may_be_local(&self) -> bool {
        self.local.ip() == self.remote.ip() || self.remote.ip().is_loopback()
    }

    /// As the other end has it.
    pub(crate) fn reversed(self) -> Self {
        Self { local: self.remote, remote: self.local }
    }
}

/// What a search for the holder of a socket came to.
#[derive(Debug)]
pub(crate) enum Found {
    /// A duplicate. It must be closed at once after use: while it is open, the death of its owner does not close the connection.
    Socket(OwnedFd),
    /// It is not on this host, in our network namespace and in the hands of the process that was named.
    Elsewhere(&'static str),
    /// It may be, but the kernel does not let us have it.
    Refused(io::Error),
}

impl Found {
    pub(crate) fn socket(self) -> io::Result<OwnedFd> {
        match self {
            Self::Socket(socket) => Ok(socket),
            Self::Elsewhere(why) => Err(io::Error::other(why)),
            Self::Refused(why) => Err(why),
        }
    }
}

/// Looks for the socket at the other end of a connection and duplicates it.
///
/// `pid`: what the process at the other end calls itself; `None`: any process. `holders` says what a process holds whose directory in /proc is closed to us,
/// as another user's is; with `None`, or for any process, it is not asked.
///
/// # Errors
/// The connection is over, or the table of sockets cannot be read.
pub(crate) fn holder_of(
    near: BorrowedFd<'_>,
    pid: Option<u32>,
    holders: Option<&Holders>,
) -> io::Result<Found> {
    let wanted = Connection::of(near)?.reversed();
    let Some(inode) = inodes_of(&[wanted])?.into_keys().next() else {
        return Ok(Found::Elsewhere("the other end of the connection is not in this network namespace"));
    };
    // The list of processes is made only if the number alone does not help.
    let others = std::iter::once_with(processes).flatten().flatten();
    let is_meant = |&other: &u32| pid.is_none_or(|pid| own_number(other) == Some(pid));
    let mut refused = None;
    for process in pid.into_iter().chain(others).filter(is_meant) {
        let listed = sockets(process).find(|&(_, its)| its == inode).map(|(number, _)| number);
        let told = || holders.filter(|_| pid.is_some())?.descriptor_in(process, inode).transpose();
        let socket = match listed.map(Ok).or_else(told) {
            None => continue,
            Some(Ok(number)) => duplicate(process, number),
            Some(Err(why)) => {
                refused = Some(why);
                continue;
            }
        };
        match socket {
            // The process may have ended, or closed and reused the number, since the look.
            Ok(socket) if is_the_one(&socket, inode, wanted).unwrap_or(false) => {
                return Ok(Found::Socket(socket));
            }
            Ok(_) => {}
            // Of the process that holds it; any other would have inherited it. To look on costs a walk through all of /proc.
            Err(why) if is_refusal(&why) => return Ok(Found::Refused(why)),
            Err(_) => {}
        }
    }
    Ok(refused.map_or(
        Found::Elsewhere("no process that we may look into holds the other end of the connection"),
        Found::Refused,
    ))
}

/// The number of a process in its own, innermost, namespace of processes.
fn own_number(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    numbers.split_ascii_whitespace().next_back()?.parse().ok()
}

pub(crate) fn duplicate(pid: u32, number: i32) -> io::Result<OwnedFd> {
    let process = Pid::from_raw(pid as i32).ok_or_else(|| io::Error::other("not a process"))?;
    let process = pidfd_open(process, PidfdFlags::empty())?;
    pidfd_getfd(process.as_fd(), number, PidfdGetfdFlags::empty()).map_err(|error| {
        let error = io::Error::from(error);
        io::Error::new(error.kind(), format!("pidfd_getfd (needs CAP_SYS_PTRACE): {error}"))
    })
}

/// Whether the kernel does not let us have it; else the process has ended, or closed it.
fn is_refusal(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported)
}

pub(crate) fn is_the_one(socket: &OwnedFd, inode: u64, wanted: Connection) -> io::Result<bool> {
    Ok(fstat(socket)?.st_ino == inode && Connection::of(socket.as_fd())? == wanted)
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Inodes of the established sockets with these addresses in our network namespace, each with its place in the list.
pub(crate) fn inodes_of(wanted: &[Connection]) -> io::Result<HashMap<u64, usize>> {
    let places: HashMap<Connection, usize> = wanted.iter().enumerate().map(|(at, &c)| (c, at)).collect();
    let sockets = tcp_sockets(None)?.into_iter().filter(|s| s.state == TcpState::Established && s.inode != 0);
    let place = |s: TcpSocket| {
        let &at = places.get(&Connection { local: s.local, remote: s.remote })?;
        Some((s.inode, at))
    };
    Ok(sockets.filter_map(place).collect())
}

fn comm(pid: u32) -> Option<String> {
    fs::read_to_string(format!("/proc/{pid}/comm")).ok()
}

/// Processes called postgres first (PostgreSQL retitles its backends but keeps the name), then all others.
fn processes() -> io::Result<impl Iterator<Item = u32>> {
    let (mut likely, others): (Vec<u32>, Vec<u32>) =
        pids()?.partition(|&pid| comm(pid).is_some_and(|c| c.starts_with("postgres")));
    // The youngest backend has most likely the highest number.
    likely.reverse();
    Ok(likely.into_iter().chain(others))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn the_other_end_of_a_local_connection_is_found_and_is_the_right_one() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (server, _) = listener.accept().unwrap();
            let found = match holder_of(client.as_fd(), Some(std::process::id()), None).unwrap() {
                Found::Socket(found) => found,
                Found::Refused(e) => return eprintln!("skipped: {e}"),
                Found::Elsewhere(why) => panic!("{why}"),
            };
            assert_eq!(fstat(&found).unwrap().st_ino, fstat(&server).unwrap().st_ino);
        }
    }
}
