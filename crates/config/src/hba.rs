// SPDX-License-Identifier: Apache-2.0
//! The rules of `auth_hba_file` and how they match (PostgreSQL manual, "The pg_hba.conf File").
//!
//! The first rule that matches decides; where none matches the client is refused. Reading is in `hba_parse.rs`.

use std::collections::BTreeSet;
use std::net::IpAddr;

/// All rules in the order of the file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Hba {
    /// The rules.
    pub rules: Vec<HbaRule>,
}

/// First column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HbaType {
    /// `local`: unix sockets.
    Local,
    /// `host`: TCP, with or without TLS.
    Host,
    /// `hostssl`: TCP with TLS.
    HostSsl,
    /// `hostnossl`: TCP without TLS.
    HostNoSsl,
}

/// Last column: what the client must do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HbaMethod {
    /// Nothing.
    Trust,
    /// It is refused.
    Reject,
    /// MD5, or SCRAM where the stored secret is SCRAM.
    Md5,
    /// `password`: clear text.
    Plain,
    /// SCRAM-SHA-256.
    ScramSha256,
    /// TLS client certificate.
    Cert,
    /// The unix socket's peer.
    Peer,
}

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HbaRule {
    /// Line of the file, from 1, for log messages.
    pub line: u32,
    /// First column.
    pub rule_type: HbaType,
    /// Second column.
    pub databases: HbaNames,
    /// Third column.
    pub users: HbaNames,
    /// Fourth column; `local` rules have [`HbaAddress::All`].
    pub address: HbaAddress,
    /// Last column.
    pub method: HbaMethod,
    /// `map=`: a map that the ident file has.
    pub map: Option<String>,
}

/// A set of database or user names.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HbaNames {
    /// `all`
    pub all: bool,
    /// `sameuser` (databases only)
    pub same_user: bool,
    /// `replication` (databases only)
    pub replication: bool,
    /// Names, from the line and from `@file`s.
    pub names: BTreeSet<String>,
}

/// Which client addresses a rule is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HbaAddress {
    /// `all`
    All,
    /// Those of a network.
    Net {
        /// The address written in the file. If it has bits outside the mask, nothing matches, as in PgBouncer.
        base: IpAddr,
        /// The mask, of the same family.
        mask: IpAddr,
    },
}

/// What a client is, for matching.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HbaClient<'a> {
    /// The database it asks for.
    pub database: &'a str,
    /// The user it says it is.
    pub user: &'a str,
    /// Its address; `None` on a unix socket.
    pub address: Option<IpAddr>,
    /// Whether the connection is inside TLS.
    pub tls: bool,
    /// Whether it asks for physical replication (`replication=true`); logical replication names a database.
    pub physical_replication: bool,
}

impl Hba {
    /// The first rule that matches. `None`: refuse.
    pub fn find(&self, client: &HbaClient<'_>) -> Option<&HbaRule> {
        self.rules.iter().find(|rule| rule.matches(client))
    }
}

impl HbaRule {
    /// Whether the rule is for this client.
    pub fn matches(&self, client: &HbaClient<'_>) -> bool {
        let connection = match (self.rule_type, client.address) {
            (HbaType::Local, address) => address.is_none(),
            (_, None) => false,
            (HbaType::HostSsl, Some(address)) => client.tls && self.address.contains(address),
            (HbaType::HostNoSsl, Some(address)) => !client.tls && self.address.contains(address),
            (HbaType::Host, Some(address)) => self.address.contains(address),
        };
        connection && self.databases.matches_database(client) && self.users.matches_user(client.user)
    }
}

impl HbaNames {
    fn matches_database(&self, client: &HbaClient<'_>) -> bool {
        // `all` does not include replication; physical replication has no database.
        if client.physical_replication {
            return self.replication;
        }
        self.all || (self.same_user && client.database == client.user) || self.names.contains(client.database)
    }

    fn matches_user(&self, user: &str) -> bool {
        self.all || self.names.contains(user)
    }
}

impl HbaAddress {
    /// Whether `address` is in the network. An IPv4 address that came in by an IPv6 socket counts as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (*self, address.to_canonical()) {
            (Self::All, _) => true,
            (Self::Net { base: IpAddr::V4(base), mask: IpAddr::V4(mask) }, IpAddr::V4(address)) => {
                address.to_bits() & mask.to_bits() == base.to_bits()
            }
            (Self::Net { base: IpAddr::V6(base), mask: IpAddr::V6(mask) }, IpAddr::V6(address)) => {
                address.to_bits() & mask.to_bits() == base.to_bits()
            }
            _ => false,
        }
    }

    /// Whether these are IPv4 addresses in IPv6 notation, `::ffff:a.b.c.d`. Clients with IPv4 addresses match rules in IPv4 notation only, as
    /// with PostgreSQL and PgBouncer.
    pub fn is_mapped(&self) -> bool {
        matches!(self, Self::Net { base: base @ IpAddr::V6(_), .. } if base.to_canonical().is_ipv4())
    }

    /// Whether the base has bits outside the mask, so that nothing can match.
    pub fn is_void(&self) -> bool {
        matches!(self, Self::Net { base, .. } if !self.contains(base.to_canonical()))
    }
}
