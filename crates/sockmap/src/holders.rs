// SPDX-License-Identifier: Apache-2.0
//! Lanes A and B: who holds the other ends of connections. Asked of the kernel by an iterator over open files, because
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
        for (inode, pid, number) in holders_in(&records) {
            let Some(&at) = inodes.get(&inode).filter(|&&at| found[at].is_none()) else { continue };
            let Ok(socket) = duplicate(pid, number) else { continue };
            // The process may have ended, or closed and reused the number, since the look.
            if is_the_one(&socket, inode, ends[at]).unwrap_or(false) {
                found[at] = Some(socket);
            }
        }
        Ok(found)
    }

    /// The descriptor by which a process holds a socket. Walks the files of that process only, so it may be called from an event loop.
    ///
    /// # Errors
    /// The kernel refuses the walk.
    pub(crate) fn descriptor_in(&self, pid: u32, inode: u64) -> io::Result<Option<i32>> {
        let records = self.told_of(&[inode], || attach::iterate(&self.skel.progs.socket_holders, pid))?;
        // Another thread may be looking for another socket, and its process may have both.
        Ok(holders_in(&records).find(|&(its, ..)| its == inode).map(|(_, _, number)| number))
    }

    /// Adds what the iterator tells of these sockets, no more than its map has room for.
    fn walk(&self, inodes: &[u64], records: &mut Vec<u8>) -> io::Result<()> {
        self.told_of(inodes, || Iter::new(&self.link).map_err(io::Error::other)?.read_to_end(records))
            .map(drop)
    }

    /// Has the iterator look for these sockets during a walk.
    fn told_of<T>(&self, inodes: &[u64], walk: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let wanted = &self.skel.maps.wanted;
        let told =
            inodes.iter().try_for_each(|inode| insert(wanted, &inode.to_ne_bytes(), &0u32.to_ne_bytes()));
        let outcome = told.and_then(|()| walk());
        for inode in inodes {
            let _ = wanted.delete(&inode.to_ne_bytes());
        }
        outcome
    }
}

/// Sockets by inode, and who holds each: process and descriptor.
fn holders_in(records: &[u8]) -> impl Iterator<Item = (u64, u32, i32)> {
    records.chunks_exact(RECORD).map(|record| {
        let word =
            |at: usize| u32::from_ne_bytes([record[at], record[at + 1], record[at + 2], record[at + 3]]);
        (u64::from(word(0)) | u64::from(word(4)) << 32, word(8), word(12).cast_signed())
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::{SocketAddr, TcpListener, TcpStream};
    use std::os::fd::{AsFd, AsRawFd};

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

    /// Without a look into `/proc/PID/fd`, and without other processes.
    #[test]
    fn one_process_is_asked_alone() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: the iterator needs CAP_BPF and CAP_PERFMON");
        }
        let holders = Holders::open().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let inode = fstat(&listener).unwrap().st_ino;
        let own = std::process::id();
        assert_eq!(holders.descriptor_in(own, inode).unwrap(), Some(listener.as_raw_fd()));
        assert_eq!(holders.descriptor_in(own, 1).unwrap(), None);
        let piped = std::process::Stdio::piped;
        let mut other = std::process::Command::new("cat").stdin(piped()).stdout(piped()).spawn().unwrap();
        // It has closed what it inherited when it answers.
        other.stdin.as_mut().unwrap().write_all(b"!").unwrap();
        other.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        assert_eq!(holders.descriptor_in(other.id(), inode).unwrap(), None);
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(holders.descriptor_in(other.id(), inode).unwrap_or(None), None, "a process that is gone");
    }
}
