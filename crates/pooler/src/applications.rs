// SPDX-License-Identifier: Apache-2.0
//! Lane B: finds the own sockets of applications on this host, on a thread of its own. It goes through the processes of the host for
//! that, all their open files, which is nothing for an event loop, once for all clients that have come meanwhile.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Weak;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use underpass_pool::core::ClientRef;
use underpass_sockmap::{Connection, Holders};

use crate::client::key_of;
use crate::logging::log_socket;
use crate::shared::Shared;
use crate::table::Key;
use crate::worker::Worker;

/// A client is looked for when it has been there for so long: who leaves after a transaction has no use of it.
const SETTLED: Duration = Duration::from_millis(200);
/// Pause behind a search, in times of what it took: a host with very many processes pays at most a tenth of a core.
const PAUSE: u32 = 9;

/// A client connection that may begin on this host.
type Asked = (Connection, ClientRef);

/// Where clients are told to the thread.
pub(crate) type Finder = Sender<Asked>;

/// Starts the thread, which ends with the last [`Finder`].
///
/// # Errors
/// No thread to be had.
pub(crate) fn start(holders: Holders, shared: Weak<Shared>) -> std::io::Result<Finder> {
    let (asks, asked) = channel();
    std::thread::Builder::new()
        .name("applications".into())
        .spawn(move || serve(&holders, &asked, &shared))?;
    Ok(asks)
}

fn serve(holders: &Holders, asked: &Receiver<Asked>, shared: &Weak<Shared>) {
    while let Ok(first) = asked.recv() {
        std::thread::sleep(SETTLED);
        let (connections, clients): (Vec<Connection>, Vec<ClientRef>) =
            std::iter::once(first).chain(asked.try_iter()).unzip();
        let start = Instant::now();
        let found = holders.find(&connections).unwrap_or_else(|error| {
            log::debug!("kernel lanes: looking for applications: {error}");
            Vec::new()
        });
        let took = start.elapsed();
        let Some(shared) = shared.upgrade() else { return };
        for (socket, client) in found.into_iter().zip(clients) {
            let (Some(socket), Some(mailbox)) = (socket, shared.mailboxes.get(client.worker as usize)) else {
                continue;
            };
            mailbox.post(Box::new(move |worker| worker.attach_application(key_of(client), &socket)));
        }
        drop(shared);
        std::thread::sleep(took * PAUSE);
    }
}

impl Worker {
    /// The other end of a client's connection, to be closed at once.
    fn attach_application(&mut self, key: Key, application: &OwnedFd) {
        let Some(client) = self.clients.get_mut(key) else { return };
        let Some(lane) = &client.lane else { return };
        if let Err(error) = lane.lanes.datapath.attach_application(lane.slot, application.as_fd()) {
            log_socket!(Debug, client.label(), "lane", "not in lane B: {error}");
        }
    }
}
