// SPDX-License-Identifier: Apache-2.0
//! Traffic of our own: a hook that is attached and sees nothing must not pass for a quiet server.
//!
//! The connection asks for TLS and goes away after the one-byte answer. PostgreSQL takes that for a client that changed its
//! mind, and logs nothing. MariaDB and MySQL speak first: their greeting is awaited, and they count an aborted connection.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use underpass_trace::Protocol;

use crate::discover::Server;
use crate::error::Error;
use crate::procfs;

/// Longest wait for the server's answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// SSLRequest.
const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f];

/// Connects by TCP, in the server's network namespace. Returns our end's address.
pub(crate) fn by_tcp(server: &Server, port: u16) -> Result<SocketAddr, Error> {
    let Some(&listens) = server.addresses.iter().find(|address| address.port() == port) else {
        return Err(Error::Silent {
            what: "the packet source",
            why: format!("nobody listens on port {port}"),
        });
    };
    let to = match listens {
        SocketAddr::V4(a) if a.ip().is_unspecified() => SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
        SocketAddr::V6(a) if a.ip().is_unspecified() => SocketAddr::from((Ipv6Addr::LOCALHOST, port)),
        address => address,
    };
    let elsewhere = procfs::namespace(std::process::id(), "net") != Some(server.netns);
    let namespace = procfs::path(server.pid, "ns").join("net");
    let protocol = server.protocol;
    // A namespace belongs to a thread: one that ends with the connection.
    let connection = thread::spawn(move || -> std::io::Result<SocketAddr> {
        if elsewhere {
            let namespace = File::open(namespace)?;
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        }
        let mut stream = TcpStream::connect_timeout(&to, PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        ask(protocol, &mut stream)?;
        stream.local_addr()
    });
    connection
        .join()
        .unwrap_or_else(|_| Err(std::io::Error::other("the thread ended")))
        .map_err(Error::system(format!("connecting to {to} for the self-test")))
}

/// Connects by this Unix socket.
fn by_unix(server: &Server, socket: &Path) -> Result<(), Error> {
    // A name that does not begin at the root begins where the server runs.
    let (from, rest) = match socket.strip_prefix("/") {
        Ok(rest) => ("root", rest),
        Err(_) => ("cwd", socket),
    };
    let path = procfs::path(server.pid, from).join(rest);
    UnixStream::connect(&path)
        .and_then(|mut stream| {
            stream.set_read_timeout(Some(PATIENCE))?;
            ask(server.protocol, &mut stream)
        })
        .map_err(Error::system(format!("connecting to {} for the self-test", socket.display())))
}

/// Connects by the first Unix socket at which the server answers, or else by TCP: a name may be of a socket that was removed, or is in
/// nobody's reach. The error is of the last that was tried.
pub(crate) fn by_any(server: &Server, port: Option<u16>) -> Result<(), Error> {
    let mut tried = Err(Error::Silent {
        what: "the probes",
        why: "the server listens on no socket to try them by".into(),
    });
    for socket in &server.sockets {
        tried = by_unix(server, socket);
        if tried.is_ok() {
            return tried;
        }
    }
    match port.or_else(|| server.port()) {
        Some(port) if server.is_on(port) => by_tcp(server, port).map(drop),
        _ => tried,
    }
}

fn ask(protocol: Protocol, stream: &mut (impl Read + Write)) -> std::io::Result<()> {
    if protocol == Protocol::Postgres {
        stream.write_all(&SSL_REQUEST)?;
    }
    let mut answer = [0; 1];
    stream.read_exact(&mut answer)
}
