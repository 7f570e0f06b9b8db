// SPDX-License-Identifier: Apache-2.0
//! `[peers]`: other poolers behind the same address, to which cancel requests are forwarded.

use crate::connstr::{Reader, invalid};
use crate::error::{ErrorKind, Location};
use crate::host::Host;

/// One entry of `[peers]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Peer {
    /// The peer's `peer_id`, 1 to 65535.
    pub id: u16,
    /// Where it listens.
    pub host: Host,
    /// Its port, default 6432.
    pub port: u16,
    /// Most cancel requests in flight; `None`: `default_pool_size`.
    pub pool_size: Option<u32>,
    /// Where the entry stands.
    pub at: Location,
}

/// Keys of an entry.
pub(crate) const PEER_KEYS: &[&str] = &["host", "port", "pool_size"];

impl Peer {
    pub(crate) fn parse(name: &str, text: &str, reader: &mut Reader<'_>) -> Result<Self, ErrorKind> {
        let id = name.parse().ok().filter(|id| *id != 0).ok_or_else(|| ErrorKind::Name {
            what: "peer",
            name: name.to_owned(),
            rule: "is not a number from 1 to 65535",
        })?;
        let (mut host, mut port, mut pool_size) = (None, 6432, None);
        reader.read(name, text, |reader, key, value| {
            match key {
                "host" => host = Some(Host::parse(value)),
                "port" => port = reader.port(key, value)?,
                "pool_size" => pool_size = reader.count(key, value)?,
                _ => return Err(reader.unknown(key, PEER_KEYS)),
            }
            Ok(())
        })?;
        let host = host.ok_or_else(|| invalid(name, text, "a host=, for example host=/run/pgbouncer2"))?;
        Ok(Self { id, host, port, pool_size, at: reader.at.clone() })
    }

    /// The same settings, wherever they stand in the file.
    pub fn same_settings(&self, other: &Self) -> bool {
        Self { at: other.at.clone(), ..self.clone() } == *other
    }
}
