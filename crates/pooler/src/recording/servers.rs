// SPDX-License-Identifier: Apache-2.0
//! Which servers a recording is of: each database that a recorded client uses is asked once, by a query of the pooler's own
//! (`worker/mirror/probe.rs`), and again when RELOAD has given it another address, or when nobody could be asked.

use std::time::Instant;

use foldhash::HashMap;
use underpass_config::Database;
use underpass_trace::ServerIdentity;

use super::{Event, Recording, now_ns};
use crate::pool::DatabaseState;
use crate::shared::lock;

/// What a server says about itself.
#[derive(Debug)]
pub(crate) struct Identity {
    pub system_identifier: Option<String>,
    pub version: String,
}

/// What has been asked, by the database's number.
#[derive(Debug, Default)]
pub(super) struct Servers(HashMap<u32, Asked>);

#[derive(Debug)]
struct Asked {
    /// Where it was to be found then.
    address: String,
    /// Nobody answered: when it may be asked again.
    again_at: Option<Instant>,
}

impl Recording {
    /// Whether the caller is to find out who the server of a database is.
    pub fn begin_identify(&self, database: &DatabaseState, now: Instant) -> bool {
        if self.is_over() {
            return false;
        }
        let address = address(&database.settings.load());
        let mut servers = lock(&self.servers);
        let known = servers.0.get(&database.number);
        if known.is_some_and(|asked| {
            asked.address == address && asked.again_at.is_none_or(|again_at| now < again_at)
        }) {
            return false;
        }
        servers.0.insert(database.number, Asked { address, again_at: None });
        true
    }

    /// The server of a database has said who it is, or cannot be asked before `again_at`.
    pub fn identified(
        &self,
        database: &DatabaseState,
        identity: Result<Identity, String>,
        again_at: Instant,
    ) {
        let mut servers = lock(&self.servers);
        let Some(asked) = servers.0.get_mut(&database.number) else { return };
        match identity {
            Ok(identity) => self.post(Event::Server(Box::new(ServerIdentity {
                time_ns: now_ns(),
                database: database.name.clone().into_bytes().into(),
                address: asked.address.clone().into_bytes().into(),
                version: identity.version.into_bytes().into(),
                system_identifier: identity.system_identifier.map(|text| text.into_bytes().into()),
            }))),
            Err(error) => {
                log::debug!("recording: the server of {} is not known: {error}", database.name);
                asked.again_at = Some(again_at);
            }
        }
    }
}

/// Where the configuration has the servers of a database: `host:port`, several with commas; the directory of a socket in a host's place.
fn address(database: &Database) -> String {
    let port = database.port;
    let Some(hosts) = &database.host else { return format!("unix:{port}") };
    let each = hosts.as_str().split(',').map(str::trim).map(|host| match host.contains(':') {
        true => format!("[{host}]:{port}"),
        false => format!("{host}:{port}"),
    });
    each.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use underpass_config::{HostList, Location};

    use super::*;

    #[test]
    fn an_address_has_every_host_with_its_port() {
        let mut database = Database { port: 6000, ..Database::new("shop", Location::new(&"test".into(), 1)) };
        assert_eq!(address(&database), "unix:6000");
        database.host = HostList::parse("10.0.0.1, ::1");
        assert_eq!(address(&database), "10.0.0.1:6000,[::1]:6000");
    }
}
