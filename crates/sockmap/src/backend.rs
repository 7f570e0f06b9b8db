// SPDX-License-Identifier: Apache-2.0
//! Lane A: finds the socket of the PostgreSQL backend at the other end of a server connection on this host.
//!
//! The connection's tuple, reversed, must be in the socket table of *our* network namespace; its inode is unique on
//! the system and names the socket, whatever process holds it. A server behind a balancer or NAT, or in another
//! namespace, has no such entry and is not taken for local. Process identifiers are only where to look first.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::fstat;
use rustix::net::{getpeername, getsockname};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// State column of an established connection in /proc/net/tcp.
const TCP_ESTABLISHED: &str = "01";

/// Duplicates the backend's socket, or says why lane A does not apply.
///
/// `pid_hint`: the process of BackendKeyData, looked at first. The duplicate must be closed at once after use: while
/// it is open, the backend's death does not close the connection.
pub(crate) fn backend_socket(server: BorrowedFd<'_>, pid_hint: Option<u32>) -> io::Result<OwnedFd> {
    let ours = tuple(server)?;
    let inode = inode_of(ours.1, ours.0)?.ok_or_else(|| {
        io::Error::other("the server's end of the connection is not in this network namespace")
    })?;
    let wanted = format!("socket:[{inode}]");
    for pid in pid_hint.into_iter().chain(processes()?) {
        let Some(number) = fd_of(pid, &wanted) else { continue };
        let Some(pid) = Pid::from_raw(pid as i32) else { continue };
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        let socket = pidfd_getfd(process.as_fd(), number, PidfdGetfdFlags::empty())
            .map_err(|e| io::Error::other(format!("pidfd_getfd (needs CAP_SYS_PTRACE): {e}")))?;
        // The process may have ended, or closed and reused the number, since the look.
        if fstat(&socket)?.st_ino == inode && tuple(socket.as_fd())? == (ours.1, ours.0) {
            return Ok(socket);
        }
    }
    Err(io::Error::other("no process that we may look into holds the server's end of the connection"))
}

/// Local and remote address, IPv4-mapped addresses as IPv4.
fn tuple(fd: BorrowedFd<'_>) -> io::Result<(SocketAddr, SocketAddr)> {
    let local = SocketAddr::try_from(getsockname(fd)?).map_err(|_| io::Error::other("not a TCP socket"))?;
    let remote = getpeername(fd)?
        .and_then(|a| SocketAddr::try_from(a).ok())
        .ok_or_else(|| io::Error::other("not a connected TCP socket"))?;
    Ok((canonical(local), canonical(remote)))
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Inode of the established socket with these addresses in our network namespace.
fn inode_of(local: SocketAddr, remote: SocketAddr) -> io::Result<Option<u64>> {
    for file in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        let text = match fs::read_to_string(file) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) => return Err(e),
        };
        for line in text.lines().skip(1) {
            let columns: Vec<&str> = line.split_ascii_whitespace().collect();
            if columns.len() < 10 || columns[3] != TCP_ESTABLISHED {
                continue;
            }
            if parse_address(columns[1]) == Some(local) && parse_address(columns[2]) == Some(remote) {
                return Ok(columns[9].parse().ok().filter(|&inode| inode != 0));
            }
        }
    }
    Ok(None)
}

/// `0100007F:1538`: words of the address in the machine's byte order, then the port.
fn parse_address(text: &str) -> Option<SocketAddr> {
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

fn comm(pid: u32) -> Option<String> {
    fs::read_to_string(format!("/proc/{pid}/comm")).ok()
}

/// Processes called postgres first (PostgreSQL retitles its backends but keeps the name), then all others.
fn processes() -> io::Result<impl Iterator<Item = u32>> {
    let all = fs::read_dir("/proc")?.filter_map(|e| e.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let (mut likely, others): (Vec<u32>, Vec<u32>) =
        all.partition(|&pid| comm(pid).is_some_and(|c| c.starts_with("postgres")));
    // The youngest backend has most likely the highest number.
    likely.reverse();
    Ok(likely.into_iter().chain(others))
}

fn fd_of(pid: u32, wanted: &str) -> Option<i32> {
    fs::read_dir(format!("/proc/{pid}/fd")).ok()?.find_map(|entry| {
        let entry = entry.ok()?;
        let target = fs::read_link(entry.path()).ok()?;
        (target.as_os_str() == wanted).then(|| entry.file_name().to_str()?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn addresses_of_the_socket_table_are_read() {
        assert_eq!(parse_address("0100007F:1538"), Some("127.0.0.1:5432".parse().unwrap()));
        assert_eq!(
            parse_address("0000000000000000FFFF00000100007F:0050"),
            Some("127.0.0.1:80".parse().unwrap()),
            "IPv4-mapped"
        );
        assert_eq!(parse_address("junk"), None);
    }

    #[test]
    fn the_other_end_of_a_local_connection_is_found_and_is_the_right_one() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (server, _) = listener.accept().unwrap();
            let found = match backend_socket(client.as_fd(), Some(std::process::id())) {
                Ok(found) => found,
                Err(e) if e.to_string().contains("CAP_SYS_PTRACE") => return eprintln!("skipped: {e}"),
                Err(e) => panic!("{e}"),
            };
            assert_eq!(fstat(&found).unwrap().st_ino, fstat(&server).unwrap().st_ino);
        }
    }
}
