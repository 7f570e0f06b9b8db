// SPDX-License-Identifier: Apache-2.0
//! Sockets: listening, accepting, connecting, and their options.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

// The macro names these without a path.
use nix::{getsockopt_impl, libc, setsockopt_impl, sockopt_impl};
use rustix::net::{AddressFamily, SocketAddrAny, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use underpass_config::Config;
use underpass_console::logline::PeerAddress;

/// Where a peer is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Endpoint {
    Tcp(SocketAddr),
    /// A path, or `@name` for the abstract namespace. The port is part of PostgreSQL's socket name and shown by the console.
    Unix(PathBuf, u16),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Endpoint::Tcp(address) => address.fmt(f),
            Endpoint::Unix(_, port) => write!(f, "unix:{port}"),
        }
    }
}

impl Endpoint {
    /// Address as the log shows it.
    pub fn peer_address(&self) -> PeerAddress {
        match self {
            Endpoint::Tcp(address) => PeerAddress::Tcp(*address),
            Endpoint::Unix(_, port) => PeerAddress::Unix { pid: None, port: *port },
        }
    }

    /// Address as the console shows it.
    pub fn host(&self) -> String {
        match self {
            Endpoint::Tcp(address) => address.ip().to_string(),
            Endpoint::Unix(..) => "unix".to_owned(),
        }
    }

    pub fn port(&self) -> u16 {
        match self {
            Endpoint::Tcp(address) => address.port(),
            Endpoint::Unix(_, port) => *port,
        }
    }

    pub fn ip(&self) -> Option<IpAddr> {
        self.socket_address().map(|address| address.ip())
    }

    /// Where it is, if that is over TCP.
    pub fn socket_address(&self) -> Option<SocketAddr> {
        match self {
            Endpoint::Tcp(address) => Some(*address),
            Endpoint::Unix(..) => None,
        }
    }
}

fn unix_address(path: &Path) -> io::Result<SocketAddrUnix> {
    let bytes = path.as_os_str().as_encoded_bytes();
    Ok(match bytes.strip_prefix(b"@") {
        Some(name) => SocketAddrUnix::new_abstract_name(name)?,
        None => SocketAddrUnix::new(bytes)?,
    })
}

const STREAM_FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

sockopt_impl!(
    /// Whether the buffers have a fixed size, a bit for each (socket(7)): 0 gives them back to the kernel.
    BufferLock,
    Both,
    libc::SOL_SOCKET,
    libc::SO_BUF_LOCK,
    u32
);

sockopt_impl!(
    /// Largest window that is ever offered to the sender (tcp(7)).
    TcpWindowClamp,
    Both,
    libc::IPPROTO_TCP,
    libc::TCP_WINDOW_CLAMP,
    u32
);

/// Options of TCP connections (`tcp_*` keys, `local_socket_buffer`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TcpOptions {
    keepalive: bool,
    count: u32,
    idle_s: u32,
    interval_s: u32,
    user_timeout_ms: u32,
    buffer_bytes: u32,
    local_buffer_bytes: u32,
}

impl TcpOptions {
    pub fn from_config(config: &Config) -> Self {
        Self {
            keepalive: config.tcp_keepalive,
            count: config.tcp_keepcnt,
            idle_s: config.tcp_keepidle,
            interval_s: config.tcp_keepintvl,
            user_timeout_ms: config.tcp_user_timeout,
            buffer_bytes: config.tcp_socket_buffer,
            local_buffer_bytes: config.underpass.local_socket_buffer,
        }
    }

    /// Applies them to a connection with `peer`, which has `inherited` from the socket that it came by.
    pub fn apply(&self, fd: impl AsFd, peer: SocketAddr, inherited: Inherited) -> io::Result<()> {
        let fd = fd.as_fd();
        if !inherited.nodelay {
            // A pooler forwards small messages at once.
            sockopt::set_tcp_nodelay(fd, true)?;
        }
        if self.keepalive != inherited.keepalive {
            sockopt::set_socket_keepalive(fd, self.keepalive)?;
        }
        if self.keepalive {
            if self.count > 0 {
                sockopt::set_tcp_keepcnt(fd, self.count)?;
            }
            if self.idle_s > 0 {
                sockopt::set_tcp_keepidle(fd, Duration::from_secs(self.idle_s.into()))?;
            }
            if self.interval_s > 0 {
                sockopt::set_tcp_keepintvl(fd, Duration::from_secs(self.interval_s.into()))?;
            }
        }
        if self.user_timeout_ms > 0 {
            sockopt::set_tcp_user_timeout(fd, self.user_timeout_ms)?;
        }
        let is_to_be_small = self.buffer_bytes == 0 && self.local_buffer_bytes > 0 && is_local(fd, peer);
        let buffer_bytes = if is_to_be_small { self.local_buffer_bytes } else { self.buffer_bytes };
        if buffer_bytes == inherited.buffer_bytes {
            return Ok(());
        }
        if buffer_bytes == 0 {
            nix::sys::socket::setsockopt(&fd, BufferLock, &0)?;
            return Ok(());
        }
        set_buffers(fd, buffer_bytes)?;
        if is_to_be_small {
            // The connection is made, and its window is limited to half of the buffer that it had then.
            nix::sys::socket::setsockopt(&fd, TcpWindowClamp, &buffer_bytes)?;
        }
        Ok(())
    }

    /// Applies to a listening socket what all its connections need. They inherit it, which costs a login nothing, and a
    /// client that connects for one transaction is mostly its login.
    pub fn prepare(&self, listener: impl AsFd) -> io::Result<Inherited> {
        let fd = listener.as_fd();
        sockopt::set_tcp_nodelay(fd, true)?;
        sockopt::set_socket_keepalive(fd, self.keepalive)?;
        let is_loopback = local_endpoint(fd).is_some_and(|local| local.ip().is_loopback());
        let buffer_bytes = match self.buffer_bytes {
            0 if is_loopback => self.local_buffer_bytes,
            bytes => bytes,
        };
        if buffer_bytes > 0 {
            set_buffers(fd, buffer_bytes)?;
        }
        if is_loopback {
            spare_congestion_control(fd);
        }
        Ok(Inherited { nodelay: true, keepalive: self.keepalive, buffer_bytes })
    }
}

/// Makes the next close send RST, or FIN as usual (socket(7), SO_LINGER of zero).
pub(crate) fn reset_on_close(fd: BorrowedFd<'_>, is_wanted: bool) {
    let linger = is_wanted.then_some(Duration::ZERO);
    if let Err(error) = sockopt::set_socket_linger(fd, linger) {
        log::debug!("SO_LINGER: {error}");
    }
}

/// Chooses Reno for a socket of loopback addresses, before it connects or has its first connection: no path is congested there, and BBR,
/// where it is the system's default, models one at every acknowledgement and paces what is sent. Once BBR has begun, its
/// pacing stays (`sk_pacing_status` in the kernel is never taken back).
fn spare_congestion_control(fd: BorrowedFd<'_>) {
    // Any process may choose it (`tcp_allowed_congestion_control`), unlike CUBIC.
    if let Err(error) = sockopt::set_tcp_congestion(fd, "reno") {
        log::debug!("TCP_CONGESTION: {error}");
    }
}

fn set_buffers(fd: BorrowedFd<'_>, bytes: u32) -> io::Result<()> {
    sockopt::set_socket_send_buffer_size(fd, bytes as usize)?;
    sockopt::set_socket_recv_buffer_size(fd, bytes as usize)?;
    Ok(())
}

/// What a connection has from its listening socket ([`TcpOptions::prepare`]); by default nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Inherited {
    nodelay: bool,
    keepalive: bool,
    /// Size of its buffers, 0: the kernel's own.
    buffer_bytes: u32,
}

/// Opens a listening TCP socket.
pub(crate) fn listen_tcp(address: SocketAddr, backlog: i32, reuse_port: bool) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let fd = rustix::net::socket_with(family, SocketType::STREAM, STREAM_FLAGS, None)?;
    sockopt::set_socket_reuseaddr(&fd, true)?;
    if reuse_port {
        sockopt::set_socket_reuseport(&fd, true)?;
    }
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&fd, true)?;
    }
    rustix::net::bind(&fd, &address)?;
    rustix::net::listen(&fd, backlog)?;
    Ok(fd)
}

/// Opens a listening unix socket; a file that a dead process left is removed, a live one is an error.
pub(crate) fn listen_unix(path: &Path, backlog: i32) -> io::Result<OwnedFd> {
    let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, STREAM_FLAGS, None)?;
    let address = unix_address(path)?;
    let is_file = !path.as_os_str().as_encoded_bytes().starts_with(b"@");
    if is_file && path.exists() {
        let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, STREAM_FLAGS, None)?;
        match rustix::net::connect(&probe, &address) {
            Err(rustix::io::Errno::CONNREFUSED) => std::fs::remove_file(path)?,
            // A full queue is a listener's, too.
            Ok(()) | Err(rustix::io::Errno::AGAIN) => {
                return Err(io::Error::new(
                    io::ErrorKind::AddrInUse,
                    "another process listens on this unix socket",
                ));
            }
            Err(error) => {
                let text =
                    format!("its file exists, and whether somebody listens there cannot be told: {error}");
                return Err(io::Error::new(io::Error::from(error).kind(), text));
            }
        }
    }
    rustix::net::bind(&fd, &address)?;
    rustix::net::listen(&fd, backlog)?;
    Ok(fd)
}

/// Takes a connection; `Ok(None)` when there is none, or it has gone again.
pub(crate) fn accept(listener: impl AsFd, unix_port: Option<u16>) -> io::Result<Option<(OwnedFd, Endpoint)>> {
    match rustix::net::acceptfrom_with(listener, STREAM_FLAGS) {
        Ok((fd, address)) => {
            let endpoint = match (unix_port, address.map(SocketAddr::try_from)) {
                (Some(port), _) => Endpoint::Unix(PathBuf::new(), port),
                (None, Some(Ok(address))) => Endpoint::Tcp(canonical(address)),
                (None, _) => return Ok(None),
            };
            Ok(Some((fd, endpoint)))
        }
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::CONNABORTED | rustix::io::Errno::INTR) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Begins to connect. The socket becomes writable when that has succeeded or failed.
pub(crate) fn connect(endpoint: &Endpoint) -> io::Result<OwnedFd> {
    let (fd, result) = match endpoint {
        Endpoint::Tcp(address) => {
            let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
            let fd = rustix::net::socket_with(family, SocketType::STREAM, STREAM_FLAGS, None)?;
            if address.ip().is_loopback() {
                spare_congestion_control(fd.as_fd());
            }
            let result = rustix::net::connect(&fd, address);
            (fd, result)
        }
        Endpoint::Unix(path, _) => {
            let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, STREAM_FLAGS, None)?;
            let result = rustix::net::connect(&fd, &unix_address(path)?);
            (fd, result)
        }
    };
    match result {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(fd),
        Err(error) => Err(error.into()),
    }
}

/// The result of a connect that was begun.
pub(crate) fn connect_result(fd: impl AsFd) -> io::Result<()> {
    Ok(sockopt::socket_error(fd)??)
}

/// Whether the other end is on this host: at a loopback address, or at the one that this end has.
fn is_local(fd: impl AsFd, peer: SocketAddr) -> bool {
    peer.ip().is_loopback() || local_endpoint(fd).is_some_and(|local| local.ip() == peer.ip())
}

/// The local end of a connection.
pub(crate) fn local_endpoint(fd: impl AsFd) -> Option<SocketAddr> {
    let address: SocketAddrAny = rustix::net::getsockname(fd).ok()?;
    SocketAddr::try_from(address).ok().map(canonical)
}

/// User id and process id at the other end of a unix socket.
pub(crate) fn peer_credentials(fd: impl AsFd) -> Option<(u32, i32)> {
    let credentials = nix::sys::socket::getsockopt(&fd, nix::sys::socket::sockopt::PeerCredentials).ok()?;
    Some((credentials.uid(), credentials.pid()))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn buffers_of(socket: &TcpStream) -> (usize, usize, u32) {
        (
            sockopt::socket_send_buffer_size(socket).unwrap(),
            sockopt::socket_recv_buffer_size(socket).unwrap(),
            nix::sys::socket::getsockopt(socket, TcpWindowClamp).unwrap(),
        )
    }

    fn buffers(options: TcpOptions, peer: Option<SocketAddr>) -> (usize, usize, u32) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let socket = TcpStream::connect(address).unwrap();
        options.apply(&socket, peer.unwrap_or(address), Inherited::default()).unwrap();
        buffers_of(&socket)
    }

    /// The kernel doubles what it is told.
    #[test]
    fn only_connections_on_this_host_get_small_buffers() {
        let local = TcpOptions::from_config(&Config::default());
        let own = buffers(TcpOptions { local_buffer_bytes: 0, ..local }, None);
        assert_eq!(buffers(local, None), (512 << 10, 512 << 10, 256 << 10));
        let elsewhere = "192.0.2.1:5432".parse().unwrap();
        let remote = buffers(local, Some(elsewhere));
        assert_eq!((remote.1, remote.2), (own.1, own.2));
        let both = TcpOptions { buffer_bytes: 64 << 10, ..local };
        let (send, receive, _) = buffers(both, None);
        assert_eq!((send, receive), (128 << 10, 128 << 10));
    }

    #[test]
    fn keepalive_and_user_timeout_are_set_where_they_are_configured() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let of = |options: TcpOptions| {
            let socket = TcpStream::connect(address).unwrap();
            options.apply(&socket, address, Inherited::default()).unwrap();
            (
                sockopt::socket_keepalive(&socket).unwrap(),
                sockopt::tcp_keepcnt(&socket).unwrap(),
                sockopt::tcp_keepidle(&socket).unwrap().as_secs(),
                sockopt::tcp_keepintvl(&socket).unwrap().as_secs(),
                sockopt::tcp_user_timeout(&socket).unwrap(),
            )
        };
        let default = TcpOptions::from_config(&Config::default());
        let (_, count, idle, interval, timeout) = of(default);
        let config = Config {
            tcp_keepcnt: count + 1,
            tcp_keepidle: idle as u32 + 2,
            tcp_keepintvl: interval as u32 + 3,
            tcp_user_timeout: timeout + 4000,
            ..Config::default()
        };
        let all = TcpOptions::from_config(&config);
        assert_eq!(of(all), (true, count + 1, idle + 2, interval + 3, timeout + 4000));
        // Without keep-alive its times mean nothing.
        let off = TcpOptions { keepalive: false, ..all };
        assert_eq!(of(off), (false, count, idle, interval, timeout + 4000));
    }

    /// A connection to a socket that was prepared with `first`, when `then` is in force.
    fn accepted(first: TcpOptions, then: TcpOptions) -> (TcpStream, Inherited) {
        let listener = listen_tcp("127.0.0.1:0".parse().unwrap(), 16, false).unwrap();
        let inherited = first.prepare(&listener).unwrap();
        let client = TcpStream::connect(local_endpoint(&listener).unwrap()).unwrap();
        let (socket, peer) = loop {
            if let Some((fd, Endpoint::Tcp(peer))) = accept(&listener, None).unwrap() {
                break (TcpStream::from(fd), peer);
            }
        };
        then.apply(&socket, peer, inherited).unwrap();
        drop(client);
        (socket, inherited)
    }

    #[test]
    fn connections_inherit_what_all_of_them_need() {
        let options = TcpOptions::from_config(&Config::default());
        let (socket, inherited) = accepted(options, options);
        assert_eq!(inherited, Inherited { nodelay: true, keepalive: true, buffer_bytes: 256 << 10 });
        assert!(sockopt::tcp_nodelay(&socket).unwrap() && sockopt::socket_keepalive(&socket).unwrap());
        let (send, receive, window) = buffers_of(&socket);
        assert_eq!((send, receive), (512 << 10, 512 << 10));
        assert!(window <= 256 << 10, "{window}");
    }

    #[test]
    fn loopback_needs_no_model_of_its_path() {
        let options = TcpOptions::from_config(&Config::default());
        let (accepted, _) = accepted(options, options);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connected = connect(&Endpoint::Tcp(listener.local_addr().unwrap())).unwrap();
        assert_eq!(sockopt::tcp_congestion(&accepted).unwrap(), "reno");
        assert_eq!(sockopt::tcp_congestion(&connected).unwrap(), "reno");
    }

    #[test]
    fn reload_changes_what_was_inherited() {
        let options = TcpOptions::from_config(&Config::default());
        let without = TcpOptions { keepalive: false, local_buffer_bytes: 0, ..options };
        let (socket, _) = accepted(options, without);
        assert!(!sockopt::socket_keepalive(&socket).unwrap());
        assert_eq!(nix::sys::socket::getsockopt(&socket, BufferLock).unwrap(), 0, "the kernel's own again");
        let (socket, _) = accepted(without, options);
        assert!(sockopt::socket_keepalive(&socket).unwrap());
        assert_eq!(buffers_of(&socket), (512 << 10, 512 << 10, 256 << 10));
    }
}
