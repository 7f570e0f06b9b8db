// SPDX-License-Identifier: Apache-2.0
//! The server while the recording runs: it is started again, elsewhere perhaps, and probes that come late are tried.

use std::net::SocketAddr;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::{GAP_RESTART, GAP_SILENT, GAP_UNPROBED, Run, lookup};
use crate::discover::{Server, servers};
use crate::error::Error;
use crate::{procfs, selftest};

/// How long one waits while the recording runs: nothing waits for it but the end.
const PROOF: Duration = Duration::from_secs(5);

/// Shortcomings that no number tells.
const GAP_PORT: &str = "what the restarted server said by TCP, as it does not listen on the recorded port";
const GAP_UNTRIED: &str = "sessions by the probes, unless these work: it could not be tried";

/// A connection of our own that probes should see which were attached while the recording runs: nothing waits for it.
pub(super) struct Proof {
    /// Hits before.
    before: u64,
    until: Instant,
    connection: Option<JoinHandle<Result<(), Error>>>,
    /// How the last attempt to connect ended.
    failed: Option<Error>,
}

/// The other servers that run now, by process and its start: none of them takes this one's place later.
pub(super) fn others(server: &Server) -> Vec<(u32, Option<u64>)> {
    let others = servers().into_iter().filter(|other| other.pid != server.pid);
    others.map(|other| (other.pid, procfs::start_ticks(other.pid))).collect()
}

impl Run<'_> {
    /// Begins to find out whether probes that have just been attached see anything.
    pub(super) fn prove(&mut self) {
        // One that does not listen yet is tried when it does.
        if self.settling {
            return;
        }
        // Before there is a connection: one that is quick would count itself in.
        let before = self.hits();
        let connection = Some(self.connect_for_proof());
        self.proof = Some(Proof { before, until: Instant::now() + PROOF, connection, failed: None });
    }

    fn connect_for_proof(&self) -> JoinHandle<Result<(), Error>> {
        let (server, port) = (self.server.clone(), self.options.port);
        thread::spawn(move || selftest::by_any(&server, port))
    }

    /// What has come out of it.
    pub(super) fn follow_proof(&mut self) {
        let Some(mut proof) = self.proof.take() else { return };
        if self.hits() > proof.before {
            return;
        }
        if proof.connection.as_ref().is_some_and(JoinHandle::is_finished)
            && let Some(ended) = proof.connection.take()
        {
            proof.failed = ended.join().ok().and_then(Result::err);
            if proof.failed.is_some() {
                // It is being started, perhaps.
                proof.connection = Some(self.connect_for_proof());
            }
        }
        if Instant::now() < proof.until {
            self.proof = Some(proof);
        } else if let Some(error) = proof.failed {
            self.summary.notes.push(format!("whether the probes work could not be tried: {error}"));
            self.gap(GAP_UNTRIED);
        } else {
            self.summary.notes.push(self.silent().to_string());
            self.gap(GAP_SILENT);
        }
    }

    /// The packets of a server that was started again come as before; the probes must know its new postmaster.
    pub(super) fn follow_server(&mut self) {
        if self.has_server() {
            if self.settling {
                self.settle();
            }
            return;
        }
        let old = &self.options.server;
        let is_new = |server: &Server| {
            let start = procfs::start_ticks(server.pid);
            old.is_succeeded_by(server) && !self.others.contains(&(server.pid, start))
        };
        let found: Vec<Server> = servers().into_iter().filter(is_new).collect();
        let Some(server) = found.iter().find(|server| server.netns == old.netns).cloned() else {
            let its = found.iter().find(|server| old.shares_data_with(server));
            return self.server_gone(its.map(|server| server.pid));
        };
        self.recorder.set_lookup(lookup(&server));
        let after = self.started.elapsed().as_secs_f64();
        self.summary
            .notes
            .push(format!("the server was started again, seen after {after:.1} s (pid {})", server.pid));
        self.end_noted = false;
        let pid = server.pid;
        self.server_start = procfs::start_ticks(pid);
        self.server = server;
        self.settling = true;
        // Of the old one.
        self.proof = None;
        let probed = self.kernel.probes_attached();
        self.kernel.detach_probes();
        // Another executable, perhaps: the old probes are on the old inode.
        let result = if probed { self.attach_probes() } else { self.kernel.set_server(pid) };
        if probed {
            self.gap(GAP_RESTART);
        }
        if let Err(error) = result {
            self.gap(GAP_UNPROBED);
            self.summary.notes.push(format!("its functions are not probed any more: {error}"));
        }
    }

    /// A server may be found before it listens. It opens one socket after the other: it has all when there are no more than at the look
    /// before.
    fn settle(&mut self) {
        let before = (self.server.addresses.clone(), self.server.sockets.clone());
        self.server.look_where_it_listens();
        if before == (self.server.addresses.clone(), self.server.sockets.clone()) && self.server.listens() {
            self.settled();
        }
    }

    /// The recording ends: it has all that it will have.
    pub(super) fn settle_at_once(&mut self) {
        if self.settling && self.has_server() {
            self.server.look_where_it_listens();
            if self.server.listens() {
                self.settled();
            }
        }
    }

    fn settled(&mut self) {
        self.settling = false;
        if let Some(port) = self.options.port.filter(|&port| !self.server.is_on(port)) {
            self.gap(GAP_PORT);
            let others: Vec<String> = self.server.addresses.iter().map(SocketAddr::to_string).collect();
            let others = if others.is_empty() { "no TCP address".to_owned() } else { others.join(", ") };
            self.summary.notes.push(format!(
                "the server that was started again listens on {others}, not on TCP port {port}: what clients say there is not recorded; \
                 record it anew"
            ));
        }
        if self.kernel.probes_attached() {
            self.prove();
        }
    }

    /// Nobody serves its data where the packets are watched; `elsewhere`: who does in another network namespace, as when a container is
    /// started again. Each is said once.
    fn server_gone(&mut self, elsewhere: Option<u32>) {
        let after = self.started.elapsed().as_secs_f64();
        match elsewhere {
            None if !self.end_noted => {
                self.end_noted = true;
                self.summary.notes.push(format!("the server ended, seen after {after:.1} s"));
            }
            Some(pid) if !self.summary.lost_server => {
                self.summary.lost_server = true;
                self.summary.notes.push(format!(
                    "a server with the same data runs in another network namespace, seen after {after:.1} s (pid {pid}), and is not recorded: \
                     record it anew if it took this one's place"
                ));
            }
            _ => {}
        }
    }
}
