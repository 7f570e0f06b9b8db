// SPDX-License-Identifier: Apache-2.0
//! Asks a server who it is. The primary and a mirror are asked before the mirror gets anything: the same server must not do everything twice.
//! A name may come to lead to another server at any time (a failover, another record in DNS, one of several hosts), so each new connection to either
//! is asked, too, before it serves anybody.
//! Servers whose workload is recorded are asked so that the trace names them: it must not be replayed on them.

use std::sync::Arc;

use underpass_wire::frontend::build;

use super::Role;
use crate::mirrors::MirrorState;
use crate::pool::{ConnectError, Pool};
use crate::recording::{Identity, Recording};
use crate::server::Work;
use crate::table::Key;
use crate::worker::auth_query::columns;
use crate::worker::{Again, Farewell, Worker};

/// The system identifier alone would take a standby for its primary, and a restored copy for its origin. No two servers share both values.
const IDENTITY: &[u8] = b"select system_identifier || ' ' || extract(epoch from pg_postmaster_start_time()) from pg_control_system()";
/// Of a recorded server. What `underpass replay` compares is `system_identifier`, because copies are to be told from their origin by the user.
const RECORDED: &[u8] =
    b"select system_identifier, current_setting('server_version') from pg_control_system()";
/// Longest answer that is kept, in bytes: it has some hundred.
const ANSWER_MAX: usize = 8192;

/// See the module documentation.
pub(crate) struct Probe {
    asks: Asks,
    answer: Vec<u8>,
}

/// Who wants to know.
enum Asks {
    /// A mirror, about the primary (0) or itself (1).
    Mirror { state: Arc<MirrorState>, attempt: u32, side: usize },
    /// A recording, about the servers of a pool.
    Recording { recording: Arc<Recording>, pool: Arc<Pool> },
}

impl Probe {
    pub(super) fn response(&mut self, bytes: &[u8]) {
        let room = ANSWER_MAX.saturating_sub(self.answer.len());
        self.answer.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }
}

impl Worker {
    /// Asks a server of `pool` who it is, in an attempt to check a mirror.
    pub(super) fn probe(&mut self, state: &Arc<MirrorState>, attempt: u32, side: usize, pool: &Arc<Pool>) {
        self.send_probe(Asks::Mirror { state: state.clone(), attempt, side }, IDENTITY, pool);
    }

    /// Asks a server that has just logged in who it is.
    pub(in crate::worker) fn identify(&mut self, key: Key) {
        let mut request = Vec::new();
        build::query(&mut request, IDENTITY);
        let work = Work::Identifying { answer: Vec::new() };
        self.ask_and_collect(key, work, &request, "server could not be asked who it is");
    }

    /// Something of the answer has come. False if the server has left this worker's hands.
    pub(in crate::worker) fn identify_answered(&mut self, key: Key) -> bool {
        let Some(server) = self.server(key) else { return false };
        let Work::Identifying { answer } = &mut server.work else { return true };
        if answer.len() > ANSWER_MAX {
            self.close_server(key, "the answer to the question who it is does not end");
            return false;
        }
        if !server.link.is_settled() {
            return true;
        }
        let told = first_row(answer).map(|values| values.into_iter().next().unwrap_or_default());
        let pool = server.pool.clone();
        let settings = self.shared.settings.load_full();
        let retry = settings.config.server_login_retry;
        let said = self.shared.mirrors.server_told(&settings.config, &pool.database, &told, retry, self.now);
        if let Err(reason) = said {
            // As a login that failed: whoever waits for it waits in vain.
            let error = ConnectError { message: reason.clone(), refused: None };
            pool.last_error.store(Some(Arc::new(error)));
            self.close_server(key, &reason);
            return false;
        }
        if let Some(server) = self.server(key) {
            server.work = Work::Resting;
        }
        self.begin_serving(key);
        false
    }

    /// Asks a server of `pool` who it is, for a recording.
    pub(in crate::worker) fn probe_for_recording(&mut self, recording: &Arc<Recording>, pool: &Arc<Pool>) {
        self.send_probe(Asks::Recording { recording: recording.clone(), pool: pool.clone() }, RECORDED, pool);
    }

    fn send_probe(&mut self, asks: Asks, question: &[u8], pool: &Arc<Pool>) {
        let key = self.silent_client(pool, None, Role::Probe(Probe { asks, answer: Vec::new() }));
        let mut request = Vec::new();
        build::query(&mut request, question);
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
        self.identified(&probe, first_row(&probe.answer));
        // Its link is being taken apart by the caller.
        self.post(
            self.index,
            Box::new(move |worker| worker.close_client(key, Farewell::quiet("server asked"))),
        );
    }

    /// There will be none.
    pub(super) fn probe_gone(&mut self, probe: &Probe, reason: &str) {
        self.identified(probe, Err(reason.to_owned()));
    }

    fn identified(&mut self, probe: &Probe, answer: Result<Vec<String>, String>) {
        let retry = self.shared.settings.load().config.server_login_retry;
        let answer = answer.map(Vec::into_iter);
        match &probe.asks {
            &Asks::Mirror { ref state, attempt, side } => {
                let identity = answer.map(|mut values| values.next().unwrap_or_default());
                state.identified((attempt, side), identity, retry, self.now);
            }
            Asks::Recording { recording, pool } => {
                let identity = answer.map(|mut values| Identity {
                    system_identifier: values.next(),
                    version: values.next().unwrap_or_default(),
                });
                recording.identified(&pool.database, identity, self.now + retry);
            }
        }
    }
}

/// The values of the first row of an answer.
fn first_row(mut answer: &[u8]) -> Result<Vec<String>, String> {
    while let Some(header) = answer.first_chunk::<5>() {
        let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]) as usize;
        let Some(body) = answer.get(5..length + 1) else { break };
        match header[0] {
            b'D' => {
                let text =
                    |value: Option<&[u8]>| value.map(|value| String::from_utf8_lossy(value).into_owned());
                let values: Option<Vec<String>> =
                    columns(body).and_then(|columns| columns.into_iter().map(text).collect());
                return values.ok_or_else(|| "malformed answer to the question who it is".to_owned());
            }
            b'E' => return Err(format!("cannot tell who it is: {}", crate::error_message(body))),
            _ => {}
        }
        answer = &answer[length + 1..];
    }
    Err("no answer to the question who it is".to_owned())
}
