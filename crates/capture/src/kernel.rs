// SPDX-License-Identifier: Apache-2.0
//! The handle on the programs: loads them, attaches each source, reads rings and accounts.
//!
//! Everything is held by links and maps of this process that are not pinned: whatever way it ends, nothing stays behind.
#![allow(unsafe_code)]

use std::fmt;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::thread;

use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, MapType, ProgramAttachType, UprobeOpts, libbpf_sys};
use underpass_trace::{Direction, Protocol};

use crate::error::Error;
use crate::event::Event;
use crate::lacks::{self, Part};
use crate::log::capture_log;
use crate::privileges;
use crate::ring::Ring;
use crate::skel::{CaptureSkel, CaptureSkelBuilder, OpenCaptureProgs, types};

/// What the probes need of PostgreSQL's executable. Exported for extensions by 14 to 18.
const SECURE_READ: &str = "secure_read";
const SECURE_WRITE: &str = "secure_write";
const REPORT_ACTIVITY: &str = "pgstat_report_activity";
/// What they need of MariaDB's and MySQL's. Exported for plugins by MySQL 5.6 and MariaDB 10.11.
const VIO_READ: &str = "vio_read";
const VIO_WRITE: &str = "vio_write";
const VIO_DELETE: &str = "vio_delete";
/// Of builds with TLS.
const VIO_SSL_READ: &str = "vio_ssl_read";
const VIO_SSL_WRITE: &str = "vio_ssl_write";
/// `Statement::set_n_backup_statement(Statement *, Statement *)`.
const STATEMENT_BEGINS: &str = "_ZN9Statement22set_n_backup_statementEPS_S0_";

/// The part of a ring that is kept for events without payload: of the smallest ring room for about 70.
const RING_HEADS_SHARE: u32 = 16;
/// Most rings; `RINGS_MAX` of `capture.h`.
const RINGS_MAX: u32 = 64;
/// Bytes of a backend message tail that a summary needs: CommandComplete and ReadyForQuery, or an ErrorResponse of usual length.
const SUMMARY_TAIL_BYTES: u32 = 512;

/// How much of the server's responses the programs take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResponseLevel {
    /// Bytes of one response that are taken whole. A response begins with the first bytes after a request.
    /// `u32::MAX`: however long it is.
    pub whole_bytes: u32,
    /// Bytes at the end of each later segment, or call, that are still taken.
    pub tail_bytes: u32,
}

impl ResponseLevel {
    /// Everything.
    pub const FULL: Self = Self { whole_bytes: u32::MAX, tail_bytes: 0 };
    /// Enough to frame responses of up to 16 KiB exactly, and to find the end of longer ones.
    pub const SUMMARY: Self = Self { whole_bytes: 16 << 10, tail_bytes: SUMMARY_TAIL_BYTES };
    /// Enough for the login and for ReadyForQuery.
    pub const NONE: Self = Self { whole_bytes: 1 << 10, tail_bytes: 64 };
}

/// What is fixed while the programs are loaded.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What the server speaks: how encryption shows.
    pub protocol: Protocol,
    /// The server's TCP port; `None` when no packets are wanted.
    pub port: Option<u16>,
    /// Inode of the server's network namespace (`/proc/PID/ns/net`); `None` for any.
    pub netns: Option<u32>,
    /// How much of the responses is taken.
    pub level: ResponseLevel,
    /// Size of all rings together, bytes; each is a power of two of at least 128 KiB.
    pub ring_bytes: u64,
    /// Number of rings; rounded up to a power of two, at most 64.
    pub rings: u32,
}

/// Events and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Packets or calls; in `recorded` and `lost`, events.
    pub events: u64,
    /// Payload bytes.
    pub bytes: u64,
}

impl Count {
    fn add(&mut self, other: &types::capture_count) {
        self.events += other.events;
        self.bytes += other.bytes;
    }
}

/// Accounts of the programs for one source and direction: `seen = recorded + lost + fault + filtered`, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accounts {
    /// What passed.
    pub seen: Count,
    /// What is, or was, in a ring.
    pub recorded: Count,
    /// The ring was full.
    pub lost: Count,
    /// Could not be read, or was more than the events of one packet or call hold.
    pub fault: Count,
    /// Left out by the response level, or because the other source has it.
    pub filtered: Count,
    /// Events without payload for which the ring had no room: ends of connections, and their kernel's totals.
    pub unheard: Count,
    /// Of all these, what had passed before: TCP sent it again, or it came out of order.
    pub again: Count,
}

impl Accounts {
    /// Whether every byte that was seen is in one of the others.
    pub fn add_up(&self) -> bool {
        self.seen.bytes == self.recorded.bytes + self.lost.bytes + self.fault.bytes + self.filtered.bytes
    }

    /// Bytes that should have come and did not.
    pub fn missing(&self) -> u64 {
        self.lost.bytes + self.fault.bytes
    }
}

/// Which hooks saw the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceKind {
    /// cgroup_skb.
    Packets,
    /// Functions of the server: `secure_read` and `secure_write`, or `vio_read`, `vio_write` and their like.
    Calls,
}

/// How often each probe ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hits {
    /// Functions that read from clients.
    pub read: u64,
    /// Functions that write to them.
    pub write: u64,
    /// `pgstat_report_activity`, or of MariaDB and MySQL what a prepared statement begins with.
    pub activity: u64,
    /// Connections of which the ends were not understood.
    pub layout: u64,
}

/// The loaded programs.
pub struct Kernel {
    protocol: Protocol,
    // Order matters: programs are detached before their rings go.
    packets: Vec<Link>,
    audit: Option<Link>,
    probes: Vec<Link>,
    activity: Vec<Link>,
    /// How often that was attached; `texts` of the programs' `struct control`.
    texts: u32,
    rings: Vec<Ring>,
    _ring_maps: Vec<MapHandle>,
    skel: CaptureSkel<'static>,
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel")
            .field("packets", &self.packets.len())
            .field("probes", &self.probes.len())
            .field("rings", &self.rings.len())
            .finish_non_exhaustive()
    }
}

impl Kernel {
    /// Loads the programs; attaches nothing.
    ///
    /// # Errors
    /// [`Error::Privileges`], [`Error::Load`], [`Error::System`] when the rings cannot be made.
    pub fn open(settings: &Settings) -> Result<Self, Error> {
        privileges::check()?;
        let log = capture_log();
        // The skeleton borrows this storage for its whole life; it is a pointer in size and opened once.
        let storage = Box::leak(Box::new(MaybeUninit::uninit()));
        let mut open = CaptureSkelBuilder::default().open(storage).map_err(|e| log.error(&e))?;
        let count = settings.rings.clamp(1, RINGS_MAX).next_power_of_two();
        let size = (settings.ring_bytes / u64::from(count)).clamp(128 << 10, 1 << 30) as u32;
        let size = if size.is_power_of_two() { size } else { size.next_power_of_two() / 2 };
        if let Some(rodata) = open.maps.rodata_data.as_deref_mut() {
            rodata.server_port = settings.port.unwrap_or(0);
            rodata.server_netns = settings.netns.unwrap_or(0);
            rodata.server_mysql = u8::from(settings.protocol == Protocol::Mysql);
            rodata.rings_mask = count - 1;
            rodata.ring_payload_bytes = size - size / RING_HEADS_SHARE;
            rodata.response_whole_bytes = settings.level.whole_bytes;
            rodata.response_tail_bytes = settings.level.tail_bytes;
        }
        expect_multi(&mut open.progs);
        let skel = open.load().map_err(|e| log.error(&e))?;
        drop(log);

        let mut rings = Vec::new();
        let mut maps = Vec::new();
        for index in 0..count {
            let map = ring_map(size)?;
            rings.push(Ring::new(&map.as_fd(), size).map_err(Error::system("mapping a ring"))?);
            skel.maps
                .rings
                .update(&index.to_ne_bytes(), &map.as_fd().as_raw_fd().to_ne_bytes(), MapFlags::ANY)
                .map_err(|e| refused(&format!("ring {index}"), &e))?;
            maps.push(map);
        }
        Ok(Self {
            protocol: settings.protocol,
            packets: Vec::new(),
            audit: None,
            probes: Vec::new(),
            activity: Vec::new(),
            texts: 0,
            rings,
            _ring_maps: maps,
            skel,
        })
    }

    /// Attaches the packet source to a cgroup of the version 2 hierarchy, in place of the one where it was, and the audit of closed sockets.
    ///
    /// A socket belongs to the cgroup of the process that made it, and what a listener accepted to the listener's: the server must
    /// have been below this cgroup when it began to listen.
    ///
    /// # Errors
    /// [`Error::Attach`].
    pub fn attach_packets(&mut self, cgroup: &Path) -> Result<(), Error> {
        let what = || format!("the packet source to {}", cgroup.display());
        let failed = |e: libbpf_rs::Error| not_attached(what(), Part::PacketPrograms, &e);
        let directory = File::open(cgroup).map_err(Error::system(what()))?;
        let fd = directory.as_raw_fd();
        if self.audit.is_none() {
            self.audit = Some(self.attach_audit()?);
        }
        let progs = &self.skel.progs;
        // Responses first: a request that is seen without its answer would wait for it. Those of another cgroup go when these are there.
        self.packets = vec![
            progs.packet_out.attach_cgroup(fd).map_err(failed)?,
            progs.packet_in.attach_cgroup(fd).map_err(failed)?,
        ];
        Ok(())
    }

    fn attach_audit(&self) -> Result<Link, Error> {
        let program = &self.skel.progs.socket_state;
        program.attach_raw_tracepoint("inet_sock_set_state").map_err(|e| {
            not_attached("the audit to the tracepoint inet_sock_set_state", Part::SocketState, &e)
        })
    }

    /// Loads the programs and attaches the one that needs no server, for no longer than that takes.
    pub(crate) fn trial() -> Result<(), Error> {
        let settings = Settings {
            protocol: Protocol::Postgres,
            port: None,
            netns: None,
            level: ResponseLevel::SUMMARY,
            ring_bytes: 0,
            rings: 1,
        };
        Self::open(&settings)?.attach_audit().map(drop)
    }

    /// Attaches the probes to an executable, by its inode: to every process that runs it, now and later. Those that are not
    /// `server` (MariaDB, MySQL) or its children (PostgreSQL) only pay for the trap and a look at who they are.
    ///
    /// # Errors
    /// [`Error::NoSymbol`], [`Error::Attach`].
    pub fn attach_probes(&mut self, executable: &Path, server: u32) -> Result<(), Error> {
        self.set_server(server)?;
        let links = match self.protocol {
            Protocol::Postgres => self.postgres_probes(executable)?,
            Protocol::Mysql => self.mysql_probes(executable)?,
        };
        self.probes.extend(links);
        Ok(())
    }

    /// Of each function the return first: an entry that is noted without its return would be taken for the next one's.
    fn postgres_probes(&self, executable: &Path) -> Result<Vec<Link>, Error> {
        let progs = &self.skel.progs;
        Ok(vec![
            attach_exit(&progs.process_exit)?,
            attach_probe(&progs.write_exit, executable, SECURE_WRITE, true)?,
            attach_probe(&progs.write_enter, executable, SECURE_WRITE, false)?,
            attach_probe(&progs.read_exit, executable, SECURE_READ, true)?,
            attach_probe(&progs.read_enter, executable, SECURE_READ, false)?,
        ])
    }

    fn mysql_probes(&self, executable: &Path) -> Result<Vec<Link>, Error> {
        let progs = &self.skel.progs;
        let mut links = vec![
            attach_exit(&progs.vio_process_exit)?,
            attach_probe(&progs.vio_delete, executable, VIO_DELETE, false)?,
        ];
        let tls = [
            (&progs.vio_ssl_write_exit, VIO_SSL_WRITE, true),
            (&progs.vio_ssl_write_enter, VIO_SSL_WRITE, false),
            (&progs.vio_ssl_read_exit, VIO_SSL_READ, true),
            (&progs.vio_ssl_read_enter, VIO_SSL_READ, false),
        ];
        for (program, symbol, at_return) in tls {
            match attach_probe(program, executable, symbol, at_return) {
                Ok(link) => links.push(link),
                Err(Error::NoSymbol { .. }) => break,
                Err(error) => return Err(error),
            }
        }
        links.extend([
            attach_probe(&progs.vio_write_exit, executable, VIO_WRITE, true)?,
            attach_probe(&progs.vio_write_enter, executable, VIO_WRITE, false)?,
            attach_probe(&progs.vio_read_exit, executable, VIO_READ, true)?,
            attach_probe(&progs.vio_read_enter, executable, VIO_READ, false)?,
        ]);
        Ok(links)
    }

    /// Takes all probes away.
    pub fn detach_probes(&mut self) {
        drop_at_once(self.probes.drain(..).chain(self.activity.drain(..)));
    }

    /// Whether the probes are attached.
    pub fn probes_attached(&self) -> bool {
        !self.probes.is_empty()
    }

    /// Attaches the probes that tell what sessions run: one trap for each message that runs something, and with MariaDB and MySQL one for each
    /// read, too.
    ///
    /// # Errors
    /// As [`Self::attach_probes`].
    pub fn attach_activity(&mut self, executable: &Path, server: u32) -> Result<(), Error> {
        self.texts += 1;
        self.set_server(server)?;
        let progs = &self.skel.progs;
        self.activity = match self.protocol {
            Protocol::Postgres => vec![attach_probe(&progs.activity, executable, REPORT_ACTIVITY, false)?],
            Protocol::Mysql => {
                let mut links = vec![attach_probe(&progs.text_read, executable, VIO_READ, false)?];
                match attach_probe(&progs.text_read, executable, VIO_SSL_READ, false) {
                    Ok(link) => links.push(link),
                    Err(Error::NoSymbol { .. }) => {}
                    Err(error) => return Err(error),
                }
                links.push(attach_probe(&progs.statement, executable, STATEMENT_BEGINS, false)?);
                links
            }
        };
        Ok(())
    }

    /// Takes them away again.
    pub fn detach_activity(&mut self) {
        drop_at_once(self.activity.drain(..));
    }

    /// Whether they are there.
    pub fn activity_attached(&self) -> bool {
        !self.activity.is_empty()
    }

    /// The process that is probed, or whose children are; after a restart of the server it is another.
    ///
    /// # Errors
    /// [`Error::Load`] when the kernel refuses the update.
    pub fn set_server(&mut self, pid: u32) -> Result<(), Error> {
        let mut value = [0; 16];
        value[..4].copy_from_slice(&pid.to_ne_bytes());
        value[8..12].copy_from_slice(&self.texts.to_ne_bytes());
        self.skel
            .maps
            .control
            .update(&0u32.to_ne_bytes(), &value, MapFlags::ANY)
            .map_err(|e| refused("naming the server", &e))
    }

    /// Detaches all programs. What is in the rings stays there.
    pub fn detach(&mut self) {
        self.packets.clear();
        self.audit = None;
        self.detach_probes();
    }

    /// Gives the events that wait, with the number of their ring, to `sink`. All events of a session are in one ring, and only those of
    /// one ring are in order. Returns how many.
    pub fn drain(&mut self, mut sink: impl FnMut(usize, Event<'_>)) -> usize {
        let mut events = 0;
        for (number, ring) in self.rings.iter_mut().enumerate() {
            events += ring.drain(|bytes| {
                if let Some(event) = Event::decode(bytes) {
                    sink(number, event);
                }
            });
        }
        events
    }

    /// How full the fullest ring is, 0.0 to 1.0.
    pub fn fill(&self) -> f64 {
        let full = |ring: &Ring| {
            let (used, size) = ring.fill();
            used as f64 / size as f64
        };
        self.rings.iter().map(full).fold(0.0, f64::max)
    }

    /// Size of each ring, bytes.
    pub fn ring_bytes(&self) -> u64 {
        self.rings.first().map_or(0, |ring| ring.fill().1)
    }

    /// The programs' accounts.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn accounts(&self, source: SourceKind, direction: Direction) -> Result<Accounts, Error> {
        let source = match source {
            SourceKind::Packets => 0u32,
            SourceKind::Calls => 1,
        };
        let key = source * 2 + u32::from(direction == Direction::Backend);
        let per_cpu = self
            .skel
            .maps
            .counters
            .lookup_percpu(&key.to_ne_bytes(), MapFlags::ANY)
            .map_err(|e| io::Error::other(format!("{e:#}")))
            .map_err(Error::system("reading the accounts"))?;
        let mut sum = Accounts::default();
        for bytes in per_cpu.iter().flatten() {
            if bytes.len() < size_of::<types::capture_counters>() {
                continue;
            }
            // SAFETY: as many bytes as the structure has, of any alignment; it has only integers.
            let one: types::capture_counters = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) };
            sum.seen.add(&one.seen);
            sum.recorded.add(&one.recorded);
            sum.lost.add(&one.lost);
            sum.fault.add(&one.fault);
            sum.filtered.add(&one.filtered);
            sum.unheard.add(&one.unheard);
            sum.again.add(&one.again);
        }
        Ok(sum)
    }

    /// How often the probes ran.
    pub fn hits(&self) -> Hits {
        let read = |key: u32| {
            let per_cpu = self.skel.maps.hits.lookup_percpu(&key.to_ne_bytes(), MapFlags::ANY).ok().flatten();
            let values = per_cpu.iter().flatten().filter_map(|bytes| bytes.first_chunk());
            values.map(|bytes| u64::from_ne_bytes(*bytes)).sum()
        };
        Hits { read: read(0), write: read(1), activity: read(2), layout: read(3) }
    }

    /// Instructions that the verifier walked, by program: its share of the limit of a million.
    pub fn verified_instructions(&self) -> Vec<(&'static str, u32)> {
        let progs = &self.skel.progs;
        [
            ("packet_in", &progs.packet_in),
            ("packet_out", &progs.packet_out),
            ("socket_state", &progs.socket_state),
            ("read_enter", &progs.read_enter),
            ("read_exit", &progs.read_exit),
            ("write_enter", &progs.write_enter),
            ("write_exit", &progs.write_exit),
            ("process_exit", &progs.process_exit),
            ("activity", &progs.activity),
            ("vio_read_enter", &progs.vio_read_enter),
            ("vio_read_exit", &progs.vio_read_exit),
            ("vio_write_enter", &progs.vio_write_enter),
            ("vio_write_exit", &progs.vio_write_exit),
            ("vio_ssl_read_enter", &progs.vio_ssl_read_enter),
            ("vio_ssl_read_exit", &progs.vio_ssl_read_exit),
            ("vio_ssl_write_enter", &progs.vio_ssl_write_enter),
            ("vio_ssl_write_exit", &progs.vio_ssl_write_exit),
            ("vio_delete", &progs.vio_delete),
            ("text_read", &progs.text_read),
            ("statement", &progs.statement),
            ("vio_process_exit", &progs.vio_process_exit),
        ]
        .map(|(name, program)| (name, verified(program)))
        .to_vec()
    }
}

fn verified(program: &libbpf_rs::ProgramMut<'_>) -> u32 {
    let mut info = libbpf_sys::bpf_prog_info::default();
    let mut len = size_of::<libbpf_sys::bpf_prog_info>() as u32;
    // SAFETY: info is as long as len says and all its pointers are null, so only plain fields are written.
    let rc = unsafe {
        libbpf_sys::bpf_obj_get_info_by_fd(program.as_fd().as_raw_fd(), (&raw mut info).cast(), &raw mut len)
    };
    if rc == 0 { info.verified_insns } else { 0 }
}

fn ring_map(size: u32) -> Result<MapHandle, Error> {
    let options = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    MapHandle::create(MapType::RingBuf, Some("capture_ring"), 0, 0, size, &options)
        .map_err(|e| refused(&format!("a ring of {size} bytes"), &e))
}

/// What the programs need was refused, without a log.
fn refused(what: &str, cause: &libbpf_rs::Error) -> Error {
    Error::Load { lacks: lacks::of_load(cause, ""), message: format!("{what}: {cause:#}") }
}

fn not_attached(what: impl Into<String>, part: Part, cause: &libbpf_rs::Error) -> Error {
    Error::Attach { what: what.into(), lacks: lacks::of_attach(part, cause), message: format!("{cause:#}") }
}

fn attach_exit(program: &libbpf_rs::ProgramMut<'_>) -> Result<Link, Error> {
    program
        .attach_raw_tracepoint("sched_process_exit")
        .map_err(|e| not_attached("the tracepoint sched_process_exit", Part::RawTracepoints, &e))
}

/// Programs that are attached to functions. All are for links of the kind "multi", which Linux has from 6.6 on; earlier versions do not
/// look at what a program is for.
fn expect_multi(progs: &mut OpenCaptureProgs<'_>) {
    for program in [
        &mut progs.read_enter,
        &mut progs.read_exit,
        &mut progs.write_enter,
        &mut progs.write_exit,
        &mut progs.activity,
        &mut progs.vio_read_enter,
        &mut progs.vio_read_exit,
        &mut progs.vio_write_enter,
        &mut progs.vio_write_exit,
        &mut progs.vio_ssl_read_enter,
        &mut progs.vio_ssl_read_exit,
        &mut progs.vio_ssl_write_enter,
        &mut progs.vio_ssl_write_exit,
        &mut progs.vio_delete,
        &mut progs.text_read,
        &mut progs.statement,
    ] {
        program.set_attach_type(ProgramAttachType::TraceUprobeMulti);
    }
}

/// Takes probes away, all at the same time: each waits until no CPU runs it any more, some tenths of a second.
fn drop_at_once(links: impl IntoIterator<Item = Link>) {
    thread::scope(|scope| {
        for link in links {
            scope.spawn(move || drop(link));
        }
    });
}

fn attach_probe(
    program: &libbpf_rs::ProgramMut<'_>,
    executable: &Path,
    symbol: &'static str,
    retprobe: bool,
) -> Result<Link, Error> {
    let log = capture_log();
    // The older kind of link waits for the others when it goes, the newer one does not.
    if let Ok(link) = program.attach_uprobe_multi(-1, executable, symbol, retprobe, false) {
        return Ok(link);
    }
    let options = UprobeOpts { retprobe, func_name: Some(symbol.into()), ..UprobeOpts::default() };
    program.attach_uprobe_with_opts(-1, executable, 0, options).map_err(|e| {
        if e.kind() == libbpf_rs::ErrorKind::NotFound || log.text().contains("failed to find symbol") {
            Error::NoSymbol { path: executable.to_owned(), symbol }
        } else {
            not_attached(format!("{symbol} of {}", executable.display()), Part::Uprobes, &e)
        }
    })
}
