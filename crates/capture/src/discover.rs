// SPDX-License-Identifier: Apache-2.0
//! The database servers of this machine, and what is known of their sessions without asking them.

mod mysql;

use std::fs;
use std::iter;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use foldhash::{HashMap, HashMapExt as _, HashSet};
use underpass_procfs::{TcpSocket, TcpState};
use underpass_trace::Protocol;
use underpass_trace::assemble::Known;

use crate::event::Ends;
use crate::procfs;
use crate::recorder::Lookup;

/// `pg_control`: the system identifier is its first word.
const PG_CONTROL: &str = "global/pg_control";

pub use mysql::Nobody;

/// A running server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// What it speaks.
    pub protocol: Protocol,
    /// The postmaster; mysqld.
    pub pid: u32,
    /// Its executable, as it sees it.
    pub executable: PathBuf,
    /// Its data directory, as it sees it.
    pub data_directory: PathBuf,
    /// Device and inode of the data directory: its name may mean another one in another container.
    pub data_inode: Option<(u64, u64)>,
    /// Major version, from `PG_VERSION`; of MariaDB and MySQL the whole one, where a file tells it, or else empty.
    pub version: String,
    /// `system_identifier` of `pg_controldata`; MySQL's `server_uuid`.
    pub system_identifier: Option<String>,
    /// TCP addresses on which it listens.
    pub addresses: Vec<SocketAddr>,
    /// Unix sockets on which it listens.
    pub sockets: Vec<PathBuf>,
    /// Inode of its network namespace.
    pub netns: u64,
    /// The systemd unit, if it is in one.
    pub unit: Option<String>,
    /// The container, if it is in one: its 64-digit identifier.
    pub container: Option<String>,
    /// Whether its executable exports what the probes need.
    pub probes: bool,
    /// Its data directory may not be read: what it is, and where it listens, is not known.
    pub is_unreadable: bool,
}

impl Server {
    /// The port of its TCP addresses.
    pub fn port(&self) -> Option<u16> {
        self.addresses.first().map(SocketAddr::port)
    }

    /// Whether it listens on this TCP port.
    pub fn is_on(&self, port: u16) -> bool {
        self.addresses.iter().any(|address| address.port() == port)
    }

    /// Whether it listens at all: one that is being started does not yet.
    pub(crate) fn listens(&self) -> bool {
        !self.addresses.is_empty() || !self.sockets.is_empty()
    }

    /// Looks again at where it listens.
    pub(crate) fn look_where_it_listens(&mut self) {
        (self.addresses, self.sockets) = listeners(self.pid);
    }

    /// Whether a client of the server's own network namespace is connected by a Unix socket now.
    pub fn has_local(&self) -> bool {
        // What it accepted has the name of the socket on which it listens. One table tells, however many processes there are.
        procfs::unix_connections(self.pid).iter().any(|(_, path)| self.sockets.contains(path))
    }

    /// The same of clients of other network namespaces, in whose tables the sockets are that it accepted. That takes a look at every process.
    pub fn has_local_elsewhere(&self) -> bool {
        if self.sockets.is_empty() {
            return false;
        }
        let connected = procfs::unix_connections_outside(self.netns).into_iter();
        let named: HashSet<u64> =
            connected.filter(|(_, path)| self.sockets.contains(path)).map(|(inode, _)| inode).collect();
        if named.is_empty() {
            return false;
        }
        // Each container may have a server with a socket of this name: it is our server that holds it.
        let children = match self.protocol {
            Protocol::Postgres => procfs::children(self.pid),
            Protocol::Mysql => Vec::new(),
        };
        iter::once(self.pid)
            .chain(children)
            .any(|pid| underpass_procfs::sockets(pid).any(|(_, inode)| named.contains(&inode)))
    }

    /// Whether another process, once this one has ended, is this server started again: by its data directory, whatever its name, or else by the
    /// name, which must be of the same container, or of none, and not of another cluster.
    pub(crate) fn is_succeeded_by(&self, other: &Self) -> bool {
        let both = |one: &Option<String>, two: &Option<String>| one.is_some() && two.is_some();
        let is_other_cluster = both(&self.system_identifier, &other.system_identifier)
            && self.system_identifier != other.system_identifier;
        self.has_directory_of(other)
            || self.data_directory == other.data_directory
                && self.container == other.container
                && !is_other_cluster
    }

    /// Whether the data of another one are this one's for certain.
    pub(crate) fn shares_data_with(&self, other: &Self) -> bool {
        let same = |one: &Option<String>, two: &Option<String>| one.is_some() && one == two;
        self.has_directory_of(other)
            || same(&self.system_identifier, &other.system_identifier)
            || same(&self.container, &other.container)
    }

    fn has_directory_of(&self, other: &Self) -> bool {
        self.data_inode.is_some() && self.data_inode == other.data_inode
    }

    /// What it is called.
    pub fn product(&self) -> &'static str {
        match self.protocol {
            Protocol::Postgres => "PostgreSQL",
            Protocol::Mysql if mysql::is_mariadb(&self.executable) => "MariaDB",
            Protocol::Mysql => "MySQL",
        }
    }

    /// What the server with this process looks like; `None` when it is none, or a PostgreSQL's child.
    pub fn of_process(pid: u32) -> Option<Self> {
        Self::of_postmaster(pid).or_else(|| Self::of_mysqld(pid))
    }

    fn of_postmaster(pid: u32) -> Option<Self> {
        let executable = fs::read_link(procfs::path(pid, "exe")).ok()?;
        let name = executable.file_name()?.to_str()?.trim_end_matches(" (deleted)");
        if !matches!(name, "postgres" | "postmaster") {
            return None;
        }
        let is_child = procfs::parent(pid)
            .and_then(|parent| fs::read_link(procfs::path(parent, "exe")).ok())
            .is_some_and(|parent| parent == executable);
        // A server runs in its data directory.
        let inside = procfs::path(pid, "cwd");
        let is_unreadable = procfs::is_forbidden(&inside.join("PG_VERSION"));
        let version = procfs::foreign_text(&inside.join("PG_VERSION")).or(is_unreadable.then(String::new))?;
        if is_child || !is_unreadable && !inside.join("postmaster.pid").exists() {
            return None;
        }
        Some(Self {
            version: version.trim().to_owned(),
            is_unreadable,
            system_identifier: system_identifier(&inside),
            probes: exports(&procfs::path(pid, "exe"), b"secure_read"),
            ..Self::at(pid, Protocol::Postgres, executable)
        })
    }

    /// What is told of any process that serves.
    fn at(pid: u32, protocol: Protocol, executable: PathBuf) -> Self {
        let (addresses, sockets) = listeners(pid);
        let cgroups = procfs::cgroups(pid);
        Self {
            protocol,
            pid,
            executable,
            data_directory: fs::read_link(procfs::path(pid, "cwd")).unwrap_or_default(),
            data_inode: procfs::inode(&procfs::path(pid, "cwd")),
            version: String::new(),
            system_identifier: None,
            addresses,
            sockets,
            netns: procfs::namespace(pid, "net").unwrap_or(0),
            unit: cgroups.iter().find_map(|path| unit(path)),
            container: cgroups.iter().find_map(|path| container(path)),
            probes: false,
            is_unreadable: false,
        }
    }
}

/// TCP addresses and Unix sockets on which a process listens.
fn listeners(pid: u32) -> (Vec<SocketAddr>, Vec<PathBuf>) {
    let held: Vec<u64> = underpass_procfs::sockets(pid).map(|(_, inode)| inode).collect();
    let all = underpass_procfs::tcp_sockets(Some(pid)).unwrap_or_default();
    let is_own = |s: &&TcpSocket| s.state == TcpState::Listens && held.contains(&s.inode);
    let mut addresses: Vec<SocketAddr> = all.iter().filter(is_own).map(|s| s.local).collect();
    addresses.sort();
    let unix = procfs::unix_listeners(pid);
    let mut sockets: Vec<PathBuf> = held.iter().filter_map(|inode| unix.get(inode).cloned()).collect();
    sockets.sort();
    (addresses, sockets)
}

/// All servers that this process may look at, by process.
pub fn servers() -> Vec<Server> {
    let mut found: Vec<Server> =
        underpass_procfs::pids().into_iter().flatten().filter_map(Server::of_process).collect();
    found.sort_by_key(|server| server.pid);
    found
}

fn system_identifier(data: &Path) -> Option<String> {
    let control = procfs::foreign(&data.join(PG_CONTROL))?;
    Some(u64::from_ne_bytes(*control.first_chunk()?).to_string())
}

/// The last part of a cgroup's path that names a service.
fn unit(path: &str) -> Option<String> {
    path.rsplit('/').find(|part| part.ends_with(".service")).map(str::to_owned)
}

/// Container engines put the identifier, 64 hexadecimal digits, into the path with or without a prefix.
fn container(path: &str) -> Option<String> {
    path.rsplit('/').find_map(|part| {
        let part = part.trim_end_matches(".scope");
        let id = part.rsplit('-').next()?;
        (id.len() == 64 && id.bytes().all(|b| b.is_ascii_hexdigit())).then(|| id.to_owned())
    })
}

/// Whether a name stands in a string table of the file. Attaching is what decides; this is for the overview.
fn exports(path: &Path, name: &[u8]) -> bool {
    let Ok(bytes) = fs::read(path) else { return false };
    let mut wanted = vec![0];
    wanted.extend_from_slice(name);
    wanted.push(0);
    memchr::memmem::find(&bytes, &wanted).is_some()
}

/// Sessions of a PostgreSQL that were there before, from process titles and socket tables.
#[derive(Debug)]
pub struct Backends {
    postmaster: u32,
    by_remote: HashMap<SocketAddr, u32>,
    read: Option<Instant>,
}

/// The tables are read again for an unknown session at most so often.
const REREAD: Duration = Duration::from_secs(1);

impl Backends {
    /// Of the server with this postmaster.
    pub fn new(postmaster: u32) -> Self {
        Self { postmaster, by_remote: HashMap::new(), read: None }
    }

    fn read(&mut self) {
        self.read = Some(Instant::now());
        self.by_remote.clear();
        let mut owner = HashMap::new();
        for pid in procfs::children(self.postmaster) {
            for (_, inode) in underpass_procfs::sockets(pid) {
                owner.insert(inode, pid);
            }
        }
        for socket in underpass_procfs::tcp_sockets(Some(self.postmaster)).unwrap_or_default() {
            let listens = socket.state == TcpState::Listens;
            if let Some(&pid) = owner.get(&socket.inode).filter(|_| !listens) {
                self.by_remote.insert(socket.remote, pid);
            }
        }
    }
}

impl Lookup for Backends {
    fn connection(&mut self, ends: &Ends) -> Known {
        if !self.by_remote.contains_key(&ends.remote) && self.read.is_none_or(|at| at.elapsed() > REREAD) {
            self.read();
        }
        match self.by_remote.get(&ends.remote) {
            Some(&pid) => self.process(pid),
            None => Known::default(),
        }
    }

    fn process(&mut self, pid: u32) -> Known {
        let (user, database) = procfs::title(pid).and_then(|title| names(&title)).unzip();
        Known {
            backend_pid: Some(pid),
            user: user.map(String::into_bytes),
            database: database.map(String::into_bytes),
            application_name: None,
        }
    }
}

/// User and database of a backend's title, `postgres: [CLUSTER: ]USER DATABASE HOST(PORT) ACTIVITY`. Names with blanks cannot be
/// told apart, and give nothing.
fn names(title: &str) -> Option<(String, String)> {
    let rest = title.strip_prefix("postgres: ")?;
    let words: Vec<&str> = rest.split(' ').collect();
    let host = words.iter().position(|w| *w == "[local]" || w.ends_with(')') && w.contains('('))?;
    let before = &words[..host];
    let names = match before {
        [user, database] => [user, database],
        [cluster, user, database] if cluster.ends_with(':') => [user, database],
        _ => return None,
    };
    Some((names[0].to_string(), names[1].to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(directory: &str, inode: u64, container: Option<&str>, cluster: Option<&str>) -> Server {
        let text = |text: Option<&str>| text.map(str::to_owned);
        Server {
            protocol: Protocol::Postgres,
            pid: 1,
            executable: "/bin/postgres".into(),
            data_directory: directory.into(),
            data_inode: Some((7, inode)),
            version: String::new(),
            system_identifier: text(cluster),
            addresses: Vec::new(),
            sockets: Vec::new(),
            netns: 1,
            unit: None,
            container: text(container),
            probes: true,
            is_unreadable: false,
        }
    }

    #[test]
    fn a_server_that_is_started_again_is_known_by_its_data() {
        let own = server("/data", 1, Some("a"), Some("1"));
        for (other, succeeds, shares, what) in [
            (server("/data", 1, Some("a"), Some("1")), true, true, "it"),
            (server("/moved", 1, Some("b"), None), true, true, "its volume in a new container"),
            (server("/data", 2, Some("a"), None), true, true, "its container, on a new mount"),
            (server("/data", 2, Some("b"), None), false, false, "another container with the same names"),
            (
                server("/data", 2, Some("a"), Some("2")),
                false,
                true,
                "another cluster, which this container has had restored",
            ),
            (server("/copy", 2, None, Some("1")), false, true, "a standby of it"),
        ] {
            assert_eq!(
                (own.is_succeeded_by(&other), own.shares_data_with(&other)),
                (succeeds, shares),
                "{what}"
            );
        }
        // MariaDB has no identifier, and outside of containers a name is a name.
        let own = server("/data", 1, None, None);
        assert!(own.is_succeeded_by(&server("/data", 2, None, None)), "restored in its place");
        assert!(!own.shares_data_with(&server("/data", 2, None, None)));
    }

    #[test]
    fn titles_of_backends_are_read() {
        let told = |title| names(title).map(|(user, database)| format!("{user}/{database}"));
        assert_eq!(told("postgres: ann shop 127.0.0.1(40112) idle"), Some("ann/shop".into()));
        assert_eq!(told("postgres: 15/main: ann shop [local] SELECT"), Some("ann/shop".into()));
        assert_eq!(told("postgres: ann b shop [local] idle"), None, "a blank in a name");
        assert_eq!(told("postgres: checkpointer "), None);
    }

    #[test]
    fn units_and_containers_are_read_from_cgroups() {
        assert_eq!(
            unit("/system.slice/system-postgresql.slice/postgresql@15-main.service"),
            Some("postgresql@15-main.service".into())
        );
        let id = "0123456789abcdef".repeat(4);
        assert_eq!(container(&format!("/system.slice/docker-{id}.scope")), Some(id.clone()));
        assert_eq!(container(&format!("/kubepods/pod1/{id}")), Some(id));
        assert_eq!(container("/user.slice"), None);
    }
}
