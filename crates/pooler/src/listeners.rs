// SPDX-License-Identifier: Apache-2.0
//! The listening sockets: opened by ourselves, or handed over by the service manager.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
// The macro names these without a path.
use nix::{getsockopt_impl, libc, setsockopt_impl, sockopt_impl};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, sockopt};
use underpass_config::{Config, UnixSocketDir};
use underpass_console::text;

use crate::net::{Inherited, TcpOptions};
use crate::worker::Listener;
use crate::{logging, net, process};

sockopt_impl!(
    /// Wakes an accepting thread when the client's first bytes are there (tcp(7)); the value is in seconds.
    TcpDeferAccept,
    Both,
    libc::IPPROTO_TCP,
    libc::TCP_DEFER_ACCEPT,
    u32
);

/// How long the kernel waits for a client's first bytes before it shows the connection all the same. PgBouncer's value.
const DEFER_ACCEPT_S: u32 = 45;

/// The file of a unix socket, removed at the end if it is still this one.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    identity: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path) == Some(self.identity) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    std::fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()))
}

/// Sockets that the service manager opened (LISTEN_FDS, sd_listen_fds(3)). If there are any, they are all there is: `listen_addr` and
/// `unix_socket_dir` do not open more.
///
/// # Errors
/// A descriptor is not a listening stream socket.
pub(crate) fn inherited(config: &Config) -> anyhow::Result<Vec<Listener>> {
    let mut listeners = Vec::new();
    let numbers = sd_notify::listen_fds().context("socket activation")?;
    if numbers.len() == 0 {
        return Ok(listeners);
    }
    // A number becomes an owned descriptor by asking the kernel for one's own: no promise about who else holds it is needed.
    let own = rustix::process::pidfd_open(rustix::process::getpid(), rustix::process::PidfdFlags::empty())?;
    for number in numbers {
        let fd = rustix::process::pidfd_getfd(&own, number, rustix::process::PidfdGetfdFlags::empty())
            .with_context(|| format!("socket activation: descriptor {number}"))?;
        let listens = sockopt::socket_acceptconn(&fd) == Ok(true)
            && sockopt::socket_type(&fd) == Ok(SocketType::STREAM);
        anyhow::ensure!(
            listens,
            "socket activation: descriptor {number} is not a listening stream socket; see Accept= and ListenStream="
        );
        rustix::io::ioctl_fionbio(&fd, true)?;
        let address = rustix::net::getsockname(&fd)?;
        let mut inherited = Inherited::default();
        let (shown, unix_port) = if sockopt::socket_domain(&fd)? == AddressFamily::UNIX {
            let address = SocketAddrUnix::try_from(address)?;
            (unix_name(&address), Some(unix_port(&address).unwrap_or(config.listen_port)))
        } else {
            defer_accept(&fd, config);
            inherited = prepare(&fd, config);
            (SocketAddr::try_from(address)?.to_string(), None)
        };
        logging::phrase(None, &text::listening(&format_args!("{shown} (socket activation)")));
        listeners.push(Listener { fd: Arc::new(fd), unix_port, is_handed_over: true, inherited });
    }
    Ok(listeners)
}

fn unix_name(address: &SocketAddrUnix) -> String {
    match (address.path(), address.abstract_name()) {
        (Some(path), _) => format!("unix:{}", path.to_string_lossy()),
        (None, Some(name)) => format!("unix:@{}", String::from_utf8_lossy(name)),
        (None, None) => "unix".to_owned(),
    }
}

/// The port in PostgreSQL's name of a socket, `.s.PGSQL.6432`.
fn unix_port(address: &SocketAddrUnix) -> Option<u16> {
    let path = address.path()?;
    path.to_str().ok()?.rsplit_once(".s.PGSQL.")?.1.parse().ok()
}

/// Opens the TCP sockets of `listen_addr`. Root may take ports below 1024, so this comes before the change of user.
///
/// # Errors
/// An address cannot be resolved or is in use.
pub(crate) fn tcp(config: &Config) -> anyhow::Result<Vec<Listener>> {
    let (mut sockets, port) = (TcpSockets::default(), config.listen_port);
    // `*` first: what it has is not opened again under another name.
    let (all, named): (Vec<_>, Vec<_>) = config.listen_addr.iter().partition(|name| *name == "*");
    for name in all.into_iter().chain(named) {
        let addresses: Vec<SocketAddr> = if name == "*" {
            vec![
                (IpAddr::V4(Ipv4Addr::UNSPECIFIED), port).into(),
                (IpAddr::V6(Ipv6Addr::UNSPECIFIED), port).into(),
            ]
        } else {
            let resolved = (name, port)
                .to_socket_addrs()
                .with_context(|| format!("listen_addr: cannot resolve {name}"))?;
            resolved.collect()
        };
        sockets.open(name, addresses, config)?;
    }
    Ok(sockets.listeners)
}

/// TCP sockets that are open, and their addresses.
#[derive(Default)]
struct TcpSockets {
    listeners: Vec<Listener>,
    opened: Vec<SocketAddr>,
}

impl TcpSockets {
    /// Opens the addresses of one name of `listen_addr`.
    fn open(&mut self, name: &str, addresses: Vec<SocketAddr>, config: &Config) -> anyhow::Result<()> {
        let is_name = name != "*" && name.parse::<IpAddr>().is_err();
        let (mut absent, mut is_served) = (Vec::new(), false);
        for address in addresses {
            // Two names may be one address, as `localhost` and `127.0.0.1` are.
            let is_same = |open: &SocketAddr| {
                *open == address || (open.ip().is_unspecified() && open.is_ipv4() == address.is_ipv4())
            };
            if self.opened.iter().any(is_same) {
                is_served = true;
                continue;
            }
            match net::listen_tcp(address, config.listen_backlog as i32, config.so_reuseport) {
                Ok(fd) => {
                    defer_accept(&fd, config);
                    let inherited = prepare(&fd, config);
                    logging::phrase(None, &text::listening(&address));
                    self.listeners.push(Listener {
                        fd: Arc::new(fd),
                        unix_port: None,
                        is_handed_over: false,
                        inherited,
                    });
                    self.opened.push(address);
                    is_served = true;
                }
                // A machine without IPv6 is served on IPv4.
                Err(error) if name == "*" && address.is_ipv6() => {
                    log::debug!("cannot listen on {address}: {error}");
                }
                Err(error) if is_name && is_absent(&error) => absent.push((address, error)),
                Err(error) => return Err(cannot_listen(address, &error, config)),
            }
        }
        // `localhost` has an IPv6 address whether the machine has IPv6 or not.
        for (address, error) in absent {
            if !is_served {
                return Err(cannot_listen(address, &error, config));
            }
            log::warn!("cannot listen on {address}, one of the addresses of {name}: {error}");
        }
        Ok(())
    }
}

/// Whether this machine does not have the address, or addresses of its kind.
fn is_absent(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::AddrNotAvailable || error.raw_os_error() == Some(libc::EAFNOSUPPORT)
}

fn cannot_listen(address: SocketAddr, error: &std::io::Error, config: &Config) -> anyhow::Error {
    anyhow::anyhow!("cannot listen on {address}: {error}; {}", advice(error, config))
}

fn advice(error: &std::io::Error, config: &Config) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::AddrInUse if config.so_reuseport => {
            "the process that listens there has no so_reuseport or another user: stop it or change listen_port"
        }
        std::io::ErrorKind::AddrInUse => "is another pooler running? stop it or change listen_port",
        std::io::ErrorKind::AddrNotAvailable => "this host does not have that address: change listen_addr",
        std::io::ErrorKind::PermissionDenied => {
            "ports below 1024 need root or CAP_NET_BIND_SERVICE: change listen_port"
        }
        _ => "change listen_addr or listen_port",
    }
}

/// Sets `tcp_defer_accept` as `config` has it.
pub(crate) fn defer_accept(fd: impl AsFd, config: &Config) {
    let seconds = if config.tcp_defer_accept { DEFER_ACCEPT_S } else { 0 };
    if let Err(error) = nix::sys::socket::setsockopt(&fd, TcpDeferAccept, &seconds) {
        log::debug!("tcp_defer_accept: {error}");
    }
}

/// Options that connections are to inherit. One that fails is set for each connection, and says why there.
fn prepare(fd: impl AsFd, config: &Config) -> Inherited {
    TcpOptions::from_config(config).prepare(fd).unwrap_or_default()
}

/// Opens the unix socket of `unix_socket_dir`, owned by the user that serves.
///
/// # Errors
/// The directory does not exist or is closed to us, another process listens there, `unix_socket_group` does not exist.
pub(crate) fn unix(config: &Config) -> anyhow::Result<Option<(Listener, Option<SocketFile>)>> {
    let (port, backlog) = (config.listen_port, config.listen_backlog as i32);
    let listen = |path: &Path| -> anyhow::Result<OwnedFd> {
        net::listen_unix(path, backlog).with_context(|| {
            format!(
                "cannot listen on unix socket {}: change unix_socket_dir or stop the other process",
                path.display()
            )
        })
    };
    let (fd, path, file) = match &config.unix_socket_dir {
        UnixSocketDir::Off => return Ok(None),
        UnixSocketDir::Abstract(prefix) => {
            let name = PathBuf::from(format!("@{prefix}/.s.PGSQL.{port}"));
            (listen(&name)?, name, None)
        }
        UnixSocketDir::Path(directory) => {
            let path = directory.join(format!(".s.PGSQL.{port}"));
            // Nobody gets in before group and mode are what they should be.
            let umask = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o777));
            let fd = listen(&path);
            rustix::process::umask(umask);
            let fd = fd?;
            let identity = identity(&path).with_context(|| format!("{} has vanished", path.display()))?;
            let file = SocketFile { path: path.clone(), identity };
            process::share_socket(&path, config)?;
            (fd, path, Some(file))
        }
    };
    logging::phrase(None, &text::listening(&format_args!("unix:{}", path.display())));
    let inherited = Inherited::default();
    let listener = Listener { fd: Arc::new(fd), unix_port: Some(port), is_handed_over: false, inherited };
    Ok(Some((listener, file)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_of_a_unix_socket_is_in_its_name() {
        let port = |path: &str| unix_port(&SocketAddrUnix::new(path).unwrap());
        assert_eq!(port("/run/postgresql/.s.PGSQL.5432"), Some(5432));
        assert_eq!(port("/run/underpass.sock"), None);
        assert_eq!(port("/run/.s.PGSQL.99999"), None);
    }

    /// 192.0.2.1 is nobody's (RFC 5737), as `::1` is where IPv6 is off.
    #[test]
    fn a_name_is_served_at_those_of_its_addresses_that_there_are() {
        let [here, absent] = ["127.0.0.1:0", "192.0.2.1:0"].map(|text| text.parse::<SocketAddr>().unwrap());
        let open = |name: &str, addresses: &[SocketAddr]| {
            let mut sockets = TcpSockets::default();
            sockets.open(name, addresses.to_vec(), &Config::default()).map(|()| sockets.listeners.len())
        };
        assert_eq!(open("both", &[absent, here]).unwrap(), 1);
        assert_eq!(open("both", &[here, absent]).unwrap(), 1);
        assert!(open("gone", &[absent]).is_err());
        assert!(open("192.0.2.1", &[absent]).is_err());
        // In use is in use, whatever else the name has.
        let taken = std::net::TcpListener::bind(here).unwrap();
        assert!(open("both", &[here, taken.local_addr().unwrap()]).is_err());
        // Another name has opened the address that is there.
        let mut sockets = TcpSockets::default();
        sockets.open("127.0.0.1", vec![here], &Config::default()).unwrap();
        sockets.open("both", vec![here, absent], &Config::default()).unwrap();
        assert_eq!(sockets.listeners.len(), 1);
    }

    #[test]
    fn deferred_accept_is_set() {
        let fd = net::listen_tcp((Ipv4Addr::LOCALHOST, 0).into(), 16, false).unwrap();
        defer_accept(&fd, &Config::default());
        assert!(nix::sys::socket::getsockopt(&fd, TcpDeferAccept).unwrap() > 0);
        defer_accept(&fd, &Config { tcp_defer_accept: false, ..Config::default() });
        assert_eq!(nix::sys::socket::getsockopt(&fd, TcpDeferAccept), Ok(0));
    }

    #[test]
    fn a_unix_socket_has_the_mode_it_should_and_goes_away() {
        let directory = tempfile::tempdir().unwrap();
        let config = Config {
            unix_socket_dir: UnixSocketDir::Path(directory.path().to_owned()),
            unix_socket_mode: 0o640,
            ..Config::default()
        };
        let (_listener, file) = unix(&config).unwrap().unwrap();
        let path = directory.path().join(".s.PGSQL.6432");
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
        let second = unix(&config).unwrap_err().to_string();
        assert!(second.contains("stop the other process"), "{second}");
        drop(file);
        assert!(!path.exists());
    }
}
