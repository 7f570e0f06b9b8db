// SPDX-License-Identifier: Apache-2.0
//! Lane B: who holds the applications' ends of client connections. Asked of the kernel by an iterator over open files, because
//! `/proc/PID/fd` of another user's process is closed to the pooler (CAP_SYS_PTRACE lets it look into a process, not into that directory).

use std::fmt;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Iter, Link, MapCore};

use crate::attach;
use crate::datapath::insert;
use crate::error::Error;
use crate::holder::{Connection, duplicate, inodes_of, is_the_one};
use crate::skel::holders::{HoldersSkel, HoldersSkelBuilder};

/// `struct holder`: inode, process, descriptor.
const RECORD: usize = 16;

/// Finds the sockets at the other ends of connections.
pub struct Holders {
    link: Link,
    skel: HoldersSkel<'static>,
}

impl fmt::Debug for Holders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Holders").finish_non_exhaustive()
    }
}

impl Holders {
    /// Loads the iterator: CAP_BPF and CAP_PERFMON.
    ///
    /// # Errors
    /// [`Error::Load`] with the end of the verifier's log.
    pub fn open() -> Result<Self, Error> {
        let log = attach::capture_log();
        // The skeleton borrows this storage for its whole life; it is a pointer in size and opened once.
        let storage = Box::leak(Box::new(MaybeUninit::uninit()));
        let open = HoldersSkelBuilder::default().open(storage).map_err(|e| log.error(&e))?;
        let skel = open.load().map_err(|e| log.error(&e))?;
        let link = skel.progs.socket_holders.attach().map_err(|e| log.error(&e))?;
        Ok(Self { link, skel })
    }

    /// Duplicates the sockets at the other ends of client connections; `None` where one does not begin in our network namespace, is over, or
    /// belongs to a process that we may not look into (CAP_SYS_PTRACE). Walks all open files of the host: not for an event loop. The
    /// duplicates must be closed at once after use: while one is open, the application's death does not close its connection.
    ///
    /// # Errors
    /// The table of sockets cannot be read, or the kernel refuses the walk.
    pub fn find(&self, clients: &[Connection]) -> io::Result<Vec<Option<OwnedFd>>> {
        let ends: Vec<Connection> = clients.iter().map(|c| c.reversed()).collect();
        let mut found: Vec<Option<OwnedFd>> = ends.iter().map(|_| None).collect();
        let inodes = inodes_of(&ends)?;
        let wanted: Vec<u64> = inodes.keys().copied().collect();
        let mut records = Vec::new();
        for part in wanted.chunks(self.skel.maps.wanted.max_entries() as usize) {
            self.walk(part, &mut records)?;
        }
        for record in records.chunks_exact(RECORD) {
            let word =
                |at: usize| u32::from_ne_bytes([record[at], record[at + 1], record[at + 2], record[at + 3]]);
            let inode = u64::from(word(0)) | u64::from(word(4)) << 32;
            let (pid, number) = (word(8), word(12));
            let Some(&at) = inodes.get(&inode).filter(|&&at| found[at].is_none()) else { continue };
            let Ok(socket) = duplicate(pid, number.cast_signed()) else { continue };
            // The process may have ended, or closed and reused the number, since the look.
            if is_the_one(&socket, inode, ends[at]).unwrap_or(false) {
                found[at] = Some(socket);
            }
        }
        Ok(found)
    }

    /// Adds what the iterator tells of these sockets, no more than its map has room for.
    fn walk(&self, inodes: &[u64], records: &mut Vec<u8>) -> io::Result<()> {
        let wanted = &self.skel.maps.wanted;
        let told =
            inodes.iter().try_for_each(|inode| insert(wanted, &inode.to_ne_bytes(), &0u32.to_ne_bytes()));
        let outcome = told.and_then(|()| {
            let mut walk = Iter::new(&self.link).map_err(io::Error::other)?;
            walk.read_to_end(records)
        });
        for inode in inodes {
            let _ = wanted.delete(&inode.to_ne_bytes());
        }
        outcome.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use rustix::fs::fstat;

    use super::*;

    #[test]
    fn several_are_found_at_once_and_one_that_nobody_holds_is_not() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: the iterator needs CAP_BPF, CAP_PERFMON and CAP_SYS_PTRACE");
        }
        let holders = Holders::open().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let pairs: Vec<(TcpStream, TcpStream)> = (0..3)
            .map(|_| {
                let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                (near, listener.accept().unwrap().0)
            })
            .collect();
        let mut asked: Vec<Connection> =
            pairs.iter().map(|(near, _)| Connection::of(near.as_fd()).unwrap()).collect();
        assert!(asked[0].may_be_local());
        asked.push(Connection { local: SocketAddr::new(asked[0].local.ip(), 1), ..asked[0] });
        let found = holders.find(&asked).unwrap();
        for ((_, far), found) in pairs.iter().zip(&found) {
            assert_eq!(fstat(found.as_ref().unwrap()).unwrap().st_ino, fstat(far).unwrap().st_ino);
        }
        assert!(found[3].is_none());
    }
}
