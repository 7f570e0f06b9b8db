// SPDX-License-Identifier: Apache-2.0
//! Finds out who the primary and a mirror are, before the mirror gets anything: the same server must not do everything twice.

use std::sync::Arc;

use underpass_wire::frontend::build;

use super::Role;
use crate::mirrors::MirrorState;
use crate::pool::Pool;
use crate::table::Key;
use crate::worker::auth_query::columns;
use crate::worker::{Again, Farewell, Worker};

/// The system identifier alone would take a standby for its primary, and a restored copy for its origin. No two servers share both values.
const IDENTITY: &[u8] = b"select system_identifier || ' ' || extract(epoch from pg_postmaster_start_time()) from pg_control_system()";
/// Longest answer that is kept, in bytes: it has some hundred.
const ANSWER_MAX: usize = 8192;

/// See the module documentation.
pub(crate) struct Probe {
    state: Arc<MirrorState>,
    /// 0 = the primary, 1 = the mirror.
    side: usize,
    answer: Vec<u8>,
}

impl Probe {
    pub(super) fn response(&mut self, bytes: &[u8]) {
        let room = ANSWER_MAX.saturating_sub(self.answer.len());
        self.answer.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }
}

impl Worker {
    /// Asks a server of `pool` who it is.
    pub(super) fn probe(&mut self, state: &Arc<MirrorState>, side: usize, pool: &Arc<Pool>) {
        let role = Role::Probe(Probe { state: state.clone(), side, answer: Vec::new() });
        let key = self.silent_client(pool, None, role);
        let mut request = Vec::new();
        build::query(&mut request, IDENTITY);
        if let Some(client) = self.clients.get_mut(key) {
            client.transport.put(Arc::new(request));
            client.readable = true;
        }
        self.again.push(Again::Client(key));
    }

    /// The answer is complete.
    pub(super) fn probe_done(&mut self, key: Key) {
        let Some(client) = self.clients.get_mut(key) else { return };
        let Some(Role::Probe(probe)) = client.mirror.take().map(|role| *role) else { return };
        self.identified(&probe, identity(&probe.answer));
        // Its link is being taken apart by the caller.
        self.post(
            self.index,
            Box::new(move |worker| worker.close_client(key, Farewell::quiet("mirror checked"))),
        );
    }

    /// There will be none.
    pub(super) fn probe_gone(&mut self, probe: &Probe, reason: &str) {
        self.identified(probe, Err(reason.to_owned()));
    }

    fn identified(&mut self, probe: &Probe, identity: Result<String, String>) {
        let retry = self.shared.settings.load().config.server_login_retry;
        probe.state.identified(probe.side, identity, retry, self.now);
    }
}

fn identity(mut answer: &[u8]) -> Result<String, String> {
    while let Some(header) = answer.first_chunk::<5>() {
        let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]) as usize;
        let Some(body) = answer.get(5..length + 1) else { break };
        match header[0] {
            b'D' => {
                let value =
                    columns(body).and_then(|columns| columns.first().copied().flatten().map(<[u8]>::to_vec));
                return value
                    .map(|value| String::from_utf8_lossy(&value).into_owned())
                    .ok_or_else(|| "malformed answer to the question who it is".to_owned());
            }
            b'E' => return Err(format!("cannot tell who it is: {}", crate::error_message(body))),
            _ => {}
        }
        answer = &answer[length + 1..];
    }
    Err("no answer to the question who it is".to_owned())
}
