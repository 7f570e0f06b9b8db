// SPDX-License-Identifier: Apache-2.0
//! The `host` of databases and peers: a name, an address, a unix socket, or for databases a list of them.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// One place to connect to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Host {
    /// A numeric IPv4 or IPv6 address.
    Ip(IpAddr),
    /// A name for DNS.
    Name(String),
    /// `/dir`: the socket is `dir/.s.PGSQL.port`.
    Unix(PathBuf),
    /// `@prefix`: the abstract socket `prefix/.s.PGSQL.port`; the prefix without `@`.
    Abstract(String),
}

impl Host {
    /// Reads one host. Any text that is neither path, `@` nor address is a name.
    pub fn parse(text: &str) -> Self {
        match text.as_bytes().first() {
            Some(b'/') => Self::Unix(text.into()),
            Some(b'@') => Self::Abstract(text[1..].to_owned()),
            _ => text.parse().map_or_else(|_| Self::Name(text.to_owned()), Self::Ip),
        }
    }

    /// Whether it is a unix socket of either kind.
    pub fn is_unix(&self) -> bool {
        matches!(self, Self::Unix(_) | Self::Abstract(_))
    }

    /// The socket's file for `port`; an abstract name keeps its `@`. `None` for TCP.
    pub fn socket_path(&self, port: u16) -> Option<PathBuf> {
        match self {
            Self::Unix(dir) => Some(dir.join(format!(".s.PGSQL.{port}"))),
            Self::Abstract(name) => Some(Path::new(&format!("@{name}")).join(format!(".s.PGSQL.{port}"))),
            _ => None,
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(ip) => ip.fmt(f),
            Self::Name(name) => f.write_str(name),
            Self::Unix(path) => path.display().fmt(f),
            Self::Abstract(name) => write!(f, "@{name}"),
        }
    }
}

/// The hosts of a database, at least one, in the order of the file.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HostList {
    text: String,
    hosts: Vec<Host>,
}

impl HostList {
    /// Splits at commas. `None` if an entry is empty.
    pub fn parse(text: &str) -> Option<Self> {
        let hosts: Option<Vec<Host>> = text
            .split(',')
            .map(|h| Some(h.trim_ascii()).filter(|h| !h.is_empty()).map(Host::parse))
            .collect();
        Some(Self { text: text.to_owned(), hosts: hosts? })
    }

    /// The hosts.
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// The text of the file, as SHOW DATABASES prints it.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}
