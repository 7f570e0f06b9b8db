// SPDX-License-Identifier: Apache-2.0
//! What /proc tells of processes and their place in the system, beside `underpass-procfs`.

use std::fs;
use std::io::{self, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use foldhash::{HashMap, HashSet, HashSetExt as _};
use rustix::fs::OFlags;

pub(crate) fn path(pid: u32, name: &str) -> PathBuf {
    Path::new("/proc").join(pid.to_string()).join(name)
}

/// Bytes that are read of a file of another process at most: identifiers and versions are in the first.
const FOREIGN_BYTES_MAX: u64 = 4096;

/// The beginning of a small file below another process's directory. Whoever owns the process chose what stands there, and we may be
/// root: a link is not followed, a pipe not waited for, and what is no regular file, or is endless, not read.
pub(crate) fn foreign(path: &Path) -> Option<Vec<u8>> {
    let file = open_foreign(path).ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut bytes = Vec::new();
    file.take(FOREIGN_BYTES_MAX).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

fn open_foreign(path: &Path) -> io::Result<fs::File> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    fs::OpenOptions::new().read(true).custom_flags(flags).open(path)
}

/// The same as text.
pub(crate) fn foreign_text(path: &Path) -> Option<String> {
    Some(String::from_utf8_lossy(&foreign(path)?).into_owned())
}

/// Whether there may be such a file, and this process may not read it.
pub(crate) fn is_forbidden(path: &Path) -> bool {
    open_foreign(path).is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
}

/// Parent of a process, from the fourth field of its stat; the second, in brackets, may hold anything.
pub(crate) fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(path(pid, "stat")).ok()?;
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// When a process was started, in clock ticks since boot: the 22nd field of its stat. With its number it tells a process from all others.
pub(crate) fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(path(pid, "stat")).ok()?;
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Whether the process that was started then runs still: its number may have been given to another, such as the same server started again.
/// One that has ended and is not yet waited for has no executable.
pub(crate) fn is_alive(pid: u32, start_ticks: Option<u64>) -> bool {
    path(pid, "exe").exists() && self::start_ticks(pid) == start_ticks
}

/// Processes that a process with a single thread has made. All processes are looked at only where the kernel does not tell (it can be
/// built without CONFIG_PROC_CHILDREN).
pub(crate) fn children(pid: u32) -> Vec<u32> {
    match fs::read_to_string(path(pid, &format!("task/{pid}/children"))) {
        Ok(text) => text.split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect(),
        Err(_) => {
            let all = underpass_procfs::pids().into_iter().flatten();
            all.filter(|&child| parent(child) == Some(pid)).collect()
        }
    }
}

/// The command line as one line: servers write their state there.
pub(crate) fn title(pid: u32) -> Option<String> {
    let bytes = fs::read(path(pid, "cmdline")).ok()?;
    let text = String::from_utf8_lossy(&bytes).replace('\0', " ");
    Some(text.trim_end().to_owned())
}

/// Inode of a namespace of a process, for example of `net`.
pub(crate) fn namespace(pid: u32, name: &str) -> Option<u64> {
    Some(fs::metadata(path(pid, "ns").join(name)).ok()?.ino())
}

/// Device and inode of a file, behind links: of what a process has, whatever its name is there.
pub(crate) fn inode(path: &Path) -> Option<(u64, u64)> {
    let metadata = fs::metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// The flag __SO_ACCEPTCON, alone, in the fourth column of /proc/net/unix.
const ACCEPTS: &str = "00010000";

/// Inode and path of the Unix sockets that have a path in the network namespace of a process, those on which something listens or
/// the others.
fn unix_sockets(pid: u32, listens: bool) -> impl Iterator<Item = (u64, PathBuf)> {
    let text = fs::read_to_string(path(pid, "net/unix")).unwrap_or_default();
    let socket = move |line: &str| {
        let columns: Vec<&str> = line.split_ascii_whitespace().collect();
        let (&flags, inode, name) = (columns.get(3)?, columns.get(6)?, columns.get(7)?);
        ((flags == ACCEPTS) == listens).then_some((inode.parse().ok()?, PathBuf::from(name)))
    };
    text.lines().skip(1).filter_map(socket).collect::<Vec<_>>().into_iter()
}

/// Paths of the Unix sockets on which something listens in the network namespace of a process, by inode.
pub(crate) fn unix_listeners(pid: u32) -> HashMap<u64, PathBuf> {
    unix_sockets(pid, true).collect()
}

/// Inodes and paths of those that are connected, at the end that accepted: the other has none.
pub(crate) fn unix_connections(pid: u32) -> Vec<(u64, PathBuf)> {
    unix_sockets(pid, false).collect()
}

/// The same of all other network namespaces that have a process: what a server accepts is made by who connects, in its own.
pub(crate) fn unix_connections_outside(netns: u64) -> Vec<(u64, PathBuf)> {
    let mut known = HashSet::new();
    known.insert(netns);
    let pids = underpass_procfs::pids().into_iter().flatten();
    let others = pids.filter(|&pid| namespace(pid, "net").is_some_and(|netns| known.insert(netns)));
    others.flat_map(|pid| unix_sockets(pid, false)).collect()
}

/// All lines of /proc/PID/cgroup: paths in every hierarchy.
pub(crate) fn cgroups(pid: u32) -> Vec<String> {
    let text = fs::read_to_string(path(pid, "cgroup")).unwrap_or_default();
    text.lines().filter_map(|line| Some(line.splitn(3, ':').nth(2)?.to_owned())).collect()
}

/// Where the version 2 hierarchy of cgroups is mounted.
pub fn cgroup2_mount() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    mounts.lines().find_map(|line| {
        let mut columns = line.split(' ');
        let (path, kind) = (columns.nth(1)?, columns.next()?);
        (kind == "cgroup2").then(|| PathBuf::from(path))
    })
}

/// The cgroup of a process in the hierarchy of version 2 that is mounted at `mount`; `None` for the root, and for one that does not show there.
pub(crate) fn own_cgroup(pid: u32, mount: &Path) -> Option<PathBuf> {
    let text = fs::read_to_string(path(pid, "cgroup")).ok()?;
    let own = text.lines().find_map(|line| line.strip_prefix("0::/")).filter(|own| !own.is_empty())?;
    // Of a process outside our cgroup namespace it begins with "..".
    let is_below = own.split('/').all(|name| name != "..");
    Some(mount.join(own)).filter(|directory| is_below && directory.is_dir())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_foreign_files_only_regular_ones_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name| directory.path().join(name);
        fs::write(at("file"), vec![b'x'; 10_000]).unwrap();
        assert_eq!(foreign_text(&at("file")).map(|text| text.len() as u64), Some(FOREIGN_BYTES_MAX));
        std::os::unix::fs::symlink(at("file"), at("link")).unwrap();
        fs::create_dir(at("directory")).unwrap();
        let mode = rustix::fs::Mode::RUSR;
        rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), rustix::fs::FileType::Fifo, mode, 0).unwrap();
        for name in ["link", "directory", "pipe", "nothing"] {
            assert_eq!(foreign(&at(name)), None, "{name}");
        }
    }

    #[test]
    fn our_parent_is_found() {
        assert_eq!(parent(std::process::id()), Some(std::os::unix::process::parent_id()));
    }

    #[test]
    fn a_process_is_known_by_its_start_as_well() {
        let (ours, parent) = (std::process::id(), std::os::unix::process::parent_id());
        let start = start_ticks(ours);
        assert!(start.is_some() && start >= start_ticks(parent), "{start:?}");
        assert!(is_alive(ours, start));
        assert!(!is_alive(ours, start.map(|ticks| ticks - 1)), "another one had our number");
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        let start = start_ticks(ended.id());
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while is_alive(ended.id(), start) {
            assert!(std::time::Instant::now() < deadline, "one that nobody has waited for is not alive");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        ended.wait().unwrap();
        assert!(!is_alive(ended.id(), start));
    }

    #[test]
    fn children_are_found() {
        // Those of a process with one thread: a shell that waits for two.
        let mut shell = std::process::Command::new("sh")
            .args(["-c", "sleep 60 & sleep 60 & echo $! && wait"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        io::BufRead::read_line(&mut io::BufReader::new(shell.stdout.take().unwrap()), &mut said).unwrap();
        let found = children(shell.id());
        std::process::Command::new("kill").args(found.iter().map(u32::to_string)).status().unwrap();
        shell.wait().unwrap();
        assert_eq!(found.len(), 2);
        assert!(found.contains(&said.trim().parse().unwrap()));
    }
}
