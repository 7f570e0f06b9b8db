// SPDX-License-Identifier: Apache-2.0
//! Clients that are there when a recording begins or ends.

use underpass_console::rows::Replication;
use underpass_trace::assemble::Known;

use super::Worker;
use crate::client::{Client, Phase};
use crate::recording::{Body, Joined, Prepared};
use crate::table::Key;

impl Worker {
    /// After a RELOAD: every client belongs to the present recording, or to none.
    pub(crate) fn recording_changed(&mut self) {
        let current = self.shared.recordings.current().filter(|recording| !recording.is_over());
        for key in self.clients.keys() {
            let Some(client) = self.clients.get_mut(key) else { continue };
            let is_as_wanted = match (client.transport.tap(), &current) {
                (Some(tap), Some(recording)) => tap.is_of(recording),
                (None, None) => true,
                _ => false,
            };
            if is_as_wanted {
                self.recording_identify(key);
                continue;
            }
            if client.is_silent || matches!(client.phase, Phase::Console(_) | Phase::Closing) {
                continue;
            }
            let tap = current
                .as_ref()
                .and_then(|recording| recording.tap(client.address.socket_address(), Some(joined(client))));
            client.transport.set_tap(tap);
            self.recording_identify(key);
        }
    }

    /// Has the server behind a recorded client asked who it is, unless the recording knows or is about to.
    pub(super) fn recording_identify(&mut self, key: Key) {
        let Some(recording) = self.shared.recordings.current() else { return };
        let Some(client) = self.clients.get(key) else { return };
        let Some(pool) = client.pool.clone().filter(|_| {
            let is_recorded = client.transport.tap().is_some_and(|tap| tap.is_of(&recording));
            is_recorded && client.replication == Replication::None
        }) else {
            return;
        };
        if recording.begin_identify(&pool.database, self.now) {
            self.probe_for_recording(&recording, &pool);
        }
    }
}

/// What is known of a client that a recording joins.
fn joined(client: &Client) -> Joined {
    let name = |name: &str| Some(name.as_bytes().to_vec());
    // In its login a client has the names that it asked for.
    let label = client.label();
    let known = Known {
        backend_pid: Some((client.cancel_key >> 32) as u32).filter(|&pid| pid != 0),
        user: label.user.and_then(name),
        database: label.database.and_then(name),
        application_name: client.parameters.get("application_name").and_then(name),
    };
    let unnamed =
        client.side.unnamed().map(|body| Prepared { name: Box::default(), body: Body::Own(body.into()) });
    let named = client.side.named_statements().into_iter().flat_map(|statements| statements.iter());
    let named =
        named.map(|(name, statement)| Prepared { name: name.into(), body: Body::Shared(statement.clone()) });
    let statements = unnamed.into_iter().chain(named).collect();
    Joined { known, is_tls: client.transport.tls().is_some(), statements }
}
