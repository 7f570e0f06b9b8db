// SPDX-License-Identifier: Apache-2.0
//! What this kernel and this process may do, found by doing it on private sockets, reported as data.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use caps::{CapSet, Capability};
use rustix::net::sockopt::set_socket_send_buffer_size;

use crate::datapath::{
    ClientSlot, Config, Datapath, Lane, LaneChoice, PoolSlot, ServerSlot, ServerSpec, enqueued_at_rest,
};
use crate::error::Error;
use crate::handover::Give;
use crate::holder::{Found, holder_of};
use crate::names::Counter;
use crate::socket;
use crate::tap_stream::{TapStream, Tapped};
use crate::taps::TapBatch;

/// Longest wait for bytes on a private connection; a lane that needs longer does not work.
const PATIENCE: Duration = Duration::from_secs(10);
/// Transactions that are timed per lane.
const TIMED_TRANSACTIONS: u32 = 200;
/// Clients, servers and pools that the tests need one after the other: a freed slot rests.
const PLACES_MIN: u32 = 4;
/// Send buffer towards a client that reads late, and what it is sent: more than that and its window of 64 KiB hold, less than
/// `response_queue_bytes_max`.
const LATE_BUFFER_BYTES: usize = 16 << 10;
const LATE_ANSWER_BYTES: usize = 200 << 10;
/// How long the worker must have written nothing more to count as having met the full buffer.
const STANDSTILL: Duration = Duration::from_millis(10);

/// The capabilities that the lanes need, and whether this process has them in its effective set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Privileges {
    /// CAP_BPF: load programs, make maps. (CAP_SYS_ADMIN stands in for it.)
    pub bpf: bool,
    /// CAP_NET_ADMIN: programs of the network types, socket maps.
    pub net_admin: bool,
    /// CAP_PERFMON: reads of kernel memory, which the queue gauges need.
    pub perfmon: bool,
    /// CAP_SYS_PTRACE: duplicate a backend's socket; lane A only.
    pub sys_ptrace: bool,
}

impl Privileges {
    /// Of the calling thread.
    pub fn probe() -> Self {
        let has = |cap| caps::has_cap(None, CapSet::Effective, cap).unwrap_or(false);
        let admin = has(Capability::CAP_SYS_ADMIN);
        Self {
            bpf: admin || has(Capability::CAP_BPF),
            net_admin: has(Capability::CAP_NET_ADMIN),
            perfmon: admin || has(Capability::CAP_PERFMON),
            sys_ptrace: has(Capability::CAP_SYS_PTRACE),
        }
    }

    /// Names of what a lane lacks.
    pub fn missing_for(&self, lane: Lane) -> Vec<&'static str> {
        let needs = |name: &&'static str| lane != Lane::D || *name != "CAP_SYS_PTRACE";
        self.missing().into_iter().filter(needs).collect()
    }

    /// Names of what is missing.
    pub fn missing(&self) -> Vec<&'static str> {
        [
            (self.bpf, "CAP_BPF"),
            (self.net_admin, "CAP_NET_ADMIN"),
            (self.perfmon, "CAP_PERFMON"),
            (self.sys_ptrace, "CAP_SYS_PTRACE"),
        ]
        .into_iter()
        .filter_map(|(has, name)| (!has).then_some(name))
        .collect()
    }
}

/// One line of the report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Feature {
    /// What was tried, for example `lane D`.
    pub name: &'static str,
    /// It works.
    pub works: bool,
    /// Why not; empty when it works.
    pub why_not: String,
    /// Time of one round trip through it, where that means something.
    pub cost: Option<Duration>,
}

/// What the self-test found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Release of the running kernel.
    pub kernel: String,
    /// Capabilities of this process.
    pub privileges: Privileges,
    /// Everything that was tried, in order.
    pub features: Vec<Feature>,
}

impl Report {
    /// May this lane be used?
    pub fn works(&self, lane: Lane) -> bool {
        self.features.iter().any(|f| f.works && f.name == name_of(lane))
    }

    /// Why a lane does not work: what it lacks, or what its test met.
    pub fn why_not(&self, lane: Lane) -> String {
        let missing = self.privileges.missing_for(lane);
        if !missing.is_empty() {
            return format!("missing {}; see `underpass check`", missing.join(", "));
        }
        let load = self.features.iter().find(|f| !f.works && f.name == LOAD);
        load.or_else(|| self.features.iter().find(|f| !f.works && f.name == name_of(lane)))
            .map_or_else(|| "not tested".to_owned(), |f| format!("{}: {}", f.name, f.why_not))
    }
}

fn name_of(lane: Lane) -> &'static str {
    match lane {
        Lane::D => LANE_D,
        Lane::A => LANE_A,
        Lane::B => LANE_B,
    }
}

const LOAD: &str = "load programs";
const LANE_D: &str = "lane D";
const LANE_A: &str = "lane A";
const LANE_B: &str = "lane B";
const TAP: &str = "mirrors in D";

/// Opens small lanes of its own, plain, for applications and with a tap, and sends transactions through each, on loopback. Takes less than a second;
/// leaves nothing.
pub fn run() -> Report {
    let config =
        Config { clients_max: 4, servers_max: 4, pools_max: 4, event_ring_bytes: 4096, ..Config::default() };
    let mut report = open(&config).0;
    if report.works(Lane::A) {
        let attached = Datapath::open(&Config { applications: true, ..config.clone() })
            .and_then(|datapath| round_trips(&datapath, Lane::B));
        report.features.push(feature(LANE_B, attached.map(Some)));
    }
    if report.works(Lane::D) {
        // Programs of their own to the verifier.
        let tapped = Datapath::open(&Config { tap_ring_bytes: 64 << 10, ..config })
            .and_then(|datapath| round_trips(&datapath, Lane::D));
        report.features.push(feature(TAP, tapped.map(Some)));
    }
    report
}

/// Opens lanes as configured and sends transactions through each, on loopback. The lanes come along, their counters at 0, if all of it
/// worked: the verifier takes most of the time, so they are worth keeping. After a failure their state is unknown; [`Datapath::open`] makes
/// new ones for a lane that works. Likewise for sizes below what the tests need: those are made with more.
pub fn open(config: &Config) -> (Report, Option<Datapath>) {
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    let privileges = Privileges::probe();
    let mut features = Vec::new();
    let mut opened = None;
    let sizes = sizes_for_tests(config);
    let fits = sizes.clients_max == config.clients_max
        && sizes.servers_max == config.servers_max
        && sizes.pools_max == config.pools_max
        && sizes.response_queue_bytes_max == config.response_queue_bytes_max;
    match Datapath::open(&sizes) {
        Ok(datapath) => {
            features.push(feature(LOAD, Ok(None)));
            let lanes = [(LANE_D, Lane::D), (LANE_A, Lane::A), (LANE_B, Lane::B)];
            for (name, lane) in lanes.into_iter().filter(|&(_, l)| l != Lane::B || config.applications) {
                // The test looks into its own process, which needs no privilege; a backend is another user's.
                if lane != Lane::D && !privileges.sys_ptrace {
                    let why_not = "missing CAP_SYS_PTRACE".to_owned();
                    features.push(Feature { name, works: false, why_not, cost: None });
                    continue;
                }
                if lane != Lane::D && forbids_attach() {
                    let why_not = "kernel.yama.ptrace_scope is 3: no process may have another's socket";
                    features.push(Feature { name, works: false, why_not: why_not.to_owned(), cost: None });
                    continue;
                }
                let mut outcome = feature(name, round_trips(&datapath, lane).map(Some));
                if !outcome.works {
                    outcome.why_not += &counted(&datapath);
                }
                features.push(outcome);
            }
            if fits && features.iter().all(|feature| feature.works) && datapath.reset_counters().is_ok() {
                opened = Some(datapath);
            }
        }
        Err(e) => {
            let missing = privileges.missing();
            let why = if missing.is_empty() {
                e.to_string()
            } else {
                format!("missing {}: {e}", missing.join(", "))
            };
            for name in [LOAD, LANE_D, LANE_A].into_iter().chain(config.applications.then_some(LANE_B)) {
                features.push(Feature { name, works: false, why_not: why.clone(), cost: None });
            }
        }
    }
    (Report { kernel, privileges, features }, opened)
}

/// As configured, but for what the tests need more of.
fn sizes_for_tests(config: &Config) -> Config {
    Config {
        clients_max: config.clients_max.max(PLACES_MIN),
        servers_max: config.servers_max.max(PLACES_MIN),
        pools_max: config.pools_max.max(PLACES_MIN),
        response_queue_bytes_max: config
            .response_queue_bytes_max
            .max(Config::default().response_queue_bytes_max),
        ..config.clone()
    }
}

/// The one setting that refuses what the test does not meet in its own process, whatever the privileges.
fn forbids_attach() -> bool {
    std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").is_ok_and(|scope| scope.trim() == "3")
}

/// What the programs counted, which tells how far the bytes came.
fn counted(datapath: &Datapath) -> String {
    let counters = datapath.counters().into_iter().filter(|(_, count)| *count > 0);
    let shown: Vec<String> = counters.map(|(name, count)| format!("{name} {count}")).collect();
    if shown.is_empty() { "; no program ran".to_owned() } else { format!("; counted: {}", shown.join(", ")) }
}

fn feature(name: &'static str, outcome: Result<Option<Duration>, Error>) -> Feature {
    match outcome {
        Ok(cost) => Feature { name, works: true, why_not: String::new(), cost },
        Err(e) => Feature { name, works: false, why_not: e.to_string(), cost: None },
    }
}

/// Transactions between private sockets; the time of one.
fn round_trips(dp: &Datapath, lane: Lane) -> Result<Duration, Error> {
    let io = Error::system("a private connection");
    let (mut app, client) = pair().map_err(&io)?;
    let (server, mut backend) = pair().map_err(&io)?;
    let pool = dp.add_pool()?;
    let backend_pid = Some(std::process::id());
    let choice = if lane == Lane::D { LaneChoice::Remote } else { LaneChoice::Local { backend_pid } };
    let spec = ServerSpec { pool, ordinal: 0, fingerprint: 1, lane: choice };
    let (server_slot, _) = dp.register_server(server.as_fd(), &spec)?;
    if lane == Lane::A {
        prove_found(dp, &backend)?;
    }
    let client_slot = dp.register_client(client.as_fd(), pool, 1)?;
    if lane == Lane::B {
        let application = holder_of(client.as_fd(), backend_pid, None)
            .and_then(Found::socket)
            .map_err(Error::system("finding the application's socket"))?;
        dp.attach_application(client_slot, application.as_fd())?;
    }
    let mut told =
        dp.has_tap().then(|| dp.set_client_tap(client_slot, Some(0))).transpose()?.map(TapStream::new);
    if dp.push_idle(server_slot, 0)? != Give::Done || dp.give_client(client_slot, 0)? != Give::Done {
        return Err(Error::State("a quiet direction could not be given to the kernel"));
    }

    const QUERY: &[u8] = b"Q\0\0\0\x0dselect 1\0";
    const ANSWER: &[u8] = b"C\0\0\0\x0dSELECT 1\0Z\0\0\0\x05I";
    let start = Instant::now();
    for _ in 0..TIMED_TRANSACTIONS {
        pass(&mut app, &mut backend, QUERY).map_err(Error::system("a request did not come through"))?;
        pass(&mut backend, &mut app, ANSWER).map_err(Error::system("a response did not come through"))?;
        until_released(dp, server_slot)?;
    }
    let cost = start.elapsed() / TIMED_TRANSACTIONS;
    let mut made = TIMED_TRANSACTIONS;
    if lane == Lane::B {
        made += 1;
        pass(&mut app, &mut backend, QUERY).map_err(Error::system("a request did not come through"))?;
        prove_direct(dp, client_slot, &mut app, &mut backend, ANSWER)?;
        until_released(dp, server_slot)?;
    }
    if lane == Lane::A && dp.can_keep() {
        // Those behind which others come.
        made += 2;
        prove_queue(dp, pool, &mut app, &mut backend, QUERY, ANSWER)?;
        until_released(dp, server_slot)?;
    }
    if lane == Lane::D {
        made += 1;
        pass(&mut app, &mut backend, QUERY).map_err(Error::system("a request did not come through"))?;
        read_late(dp, &mut app, &client, &mut backend)
            .map_err(Error::system("a response to a client that reads late"))?;
        until_released(dp, server_slot)?;
    }

    while dp.take(client_slot)?.is_none() {
        if start.elapsed() > 2 * PATIENCE {
            return Err(Error::State("the client could not be taken back"));
        }
    }
    if let Some(told) = &mut told {
        count_told(dp, client_slot, told, made)?;
    }
    dp.take_idle(server_slot)?;
    dp.free_client(client_slot)?;
    dp.free_server(server_slot)?;
    dp.free_pool(pool)?;
    Ok(cost)
}

/// Lane A: the socket of a backend that runs as another user could be found too. Our own, which /proc tells of, needs no iterator.
fn prove_found(dp: &Datapath, backend: &TcpStream) -> Result<(), Error> {
    let what = "asking who holds a backend's socket";
    let inode = rustix::fs::fstat(backend).map_err(|e| Error::System { what, source: e.into() })?.st_ino;
    let holders = dp.holders.as_ref().map_err(|why| Error::System {
        what: "loading the iterator over open files",
        source: io::Error::other(why.clone()),
    })?;
    match holders.descriptor_in(std::process::id(), inode).map_err(Error::system(what))? {
        Some(_) => Ok(()),
        None => Err(Error::State("the iterator over open files does not tell of our own")),
    }
}

/// Lane B: the responses so far went straight to the application but for the first, and one that it does not read is counted, or no bound would hold.
fn prove_direct(
    dp: &Datapath,
    client: ClientSlot,
    app: &mut TcpStream,
    backend: &mut TcpStream,
    answer: &[u8],
) -> Result<(), Error> {
    if dp.counter(Counter::XactsB) < u64::from(TIMED_TRANSACTIONS) - 1 {
        return Err(Error::State("responses did not go straight to the application"));
    }
    let io = Error::system("a response to the application");
    backend.write_all(answer).map_err(&io)?;
    let unread = dp.application_unread(client)?;
    if unread < answer.len() as u32 {
        return Err(Error::State("this kernel does not count what it puts into an application's socket"));
    }
    app.read_exact(&mut vec![0; answer.len()]).map_err(&io)?;
    if dp.application_unread(client)? != 0 {
        return Err(Error::State("this kernel counts bytes in an application's socket that were read"));
    }
    let start = Instant::now();
    while !dp.client_drained(client)? {
        if start.elapsed() > PATIENCE {
            return Err(Error::State("the end of a backend's send cannot be told"));
        }
    }
    Ok(())
}

/// Lane A: a request that waits in the kernel comes to the backend with its answer to another client, byte for byte, and so does that answer. That takes
/// helpers that nothing else here needs, and that kernels have had wrong.
fn prove_queue(
    dp: &Datapath,
    pool: PoolSlot,
    app: &mut TcpStream,
    backend: &mut TcpStream,
    query: &[u8],
    answer: &[u8],
) -> Result<(), Error> {
    let (mut waiting, near) = pair().map_err(Error::system("a private connection"))?;
    let client = dp.register_client(near.as_fd(), pool, 1)?;
    if dp.give_client(client, 0)? != Give::Done {
        return Err(Error::State("a quiet direction could not be given to the kernel"));
    }
    dp.set_pool_keeps(pool, true)?;
    let through = Error::system("a request that waited in the kernel");
    // Twice, of two lengths: what the kernel remembers of the first must not meet the second.
    for text in ["select 2", "select 'longer'"] {
        let later = [&b"Q\0\0\0"[..], &[text.len() as u8 + 5], text.as_bytes(), b"\0"].concat();
        pass(app, backend, query).map_err(&through)?;
        waiting.write_all(&later).map_err(&through)?;
        let start = Instant::now();
        while dp.queue_length(pool)? == 0 {
            if start.elapsed() > PATIENCE {
                return Err(Error::State("a request for which there is no server was not kept"));
            }
        }
        pass(backend, app, answer).map_err(&through)?;
        let mut got = vec![0; later.len()];
        backend.read_exact(&mut got).map_err(&through)?;
        if got != later {
            return Err(Error::State("a request that waited in the kernel came out as other bytes"));
        }
        pass(backend, &mut waiting, answer).map_err(&through)?;
    }
    dp.set_pool_keeps(pool, false)?;
    let start = Instant::now();
    while dp.take(client)?.is_none() {
        if start.elapsed() > PATIENCE {
            return Err(Error::State("the client that waited could not be taken back"));
        }
    }
    dp.free_client(client)?;
    Ok(())
}

fn until_released(dp: &Datapath, server: ServerSlot) -> Result<(), Error> {
    let start = Instant::now();
    while dp.server_peer(server)?.is_some() {
        if start.elapsed() > PATIENCE {
            return Err(Error::State("the server was not released"));
        }
    }
    Ok(())
}

/// Answers a client that does not read until its buffers are full, so that the kernel's worker can write a segment only in part. From commit
/// 405df89dd52c ("bpf, sockmap: Improved check for empty queue") to "bpf, sockmap: fix duplicated data transmission" (2025) kernels write such a segment again from
/// its beginning.
fn read_late(
    dp: &Datapath,
    app: &mut TcpStream,
    client: &TcpStream,
    backend: &mut TcpStream,
) -> io::Result<()> {
    set_socket_send_buffer_size(client, LATE_BUFFER_BYTES)?;
    // Short messages, whatever the longest may be, and numbers: no piece looks like another.
    let mut answer = Vec::with_capacity(LATE_ANSWER_BYTES + 64);
    for number in 0u32.. {
        if answer.len() >= LATE_ANSWER_BYTES {
            break;
        }
        answer.extend_from_slice(b"D\0\0\0\x24");
        (0..8).for_each(|_| answer.extend_from_slice(&number.to_be_bytes()));
    }
    answer.extend_from_slice(b"C\0\0\0\x0dSELECT 1\0Z\0\0\0\x05I");
    let before = enqueued_at_rest(client.as_fd())?;
    backend.write_all(&answer)?;
    until_full(dp, client, before, answer.len())?;
    let mut got = vec![0u8; answer.len()];
    app.read_exact(&mut got)?;
    match got.iter().zip(&answer).position(|(got, wanted)| got != wanted) {
        None => Ok(()),
        Some(at) => Err(io::Error::other(format!(
            "byte {at} of {} is another: this kernel forwards some bytes twice",
            answer.len()
        ))),
    }
}

/// Waits until the kernel's worker has written a part of the answer and cannot go on, or all of it, where buffers are so large. Where that takes too
/// long, what comes out is looked at all the same.
fn until_full(dp: &Datapath, client: &TcpStream, before: u64, answer: usize) -> io::Result<()> {
    let start = Instant::now();
    let (mut written, mut since) = (before, start);
    while start.elapsed() < PATIENCE && written - before < answer as u64 {
        let now = socket::bytes_enqueued(client.as_fd())?.unwrap_or(written);
        if now != written {
            (written, since) = (now, Instant::now());
        } else if written != before && dp.queued_bytes() > 0 && since.elapsed() > STANDSTILL {
            break;
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// Every transaction that was made must have been told, or be known as lost.
fn count_told(dp: &Datapath, client: ClientSlot, stream: &mut TapStream, made: u32) -> Result<(), Error> {
    let start = Instant::now();
    while !dp.sort_taps()? {
        if start.elapsed() > PATIENCE {
            return Err(Error::State("the tap's ring could not be read"));
        }
        std::thread::yield_now();
    }
    let mut batch = TapBatch::default();
    dp.take_taps(0, &mut batch);
    let (mut ended, mut lost) = (0, 0);
    let mut count = |event: Tapped<'_>| match event {
        Tapped::End => ended += 1,
        Tapped::Lost(more) => lost += more,
        Tapped::Broken => lost += 1,
        _ => {}
    };
    batch.iter().for_each(|record| stream.record(&record, &mut count));
    stream.taken(dp.tap_mark_of(client)?, &mut count);
    if ended == 0 || ended + lost != made {
        return Err(Error::State("the tap told other transactions than were forwarded"));
    }
    Ok(())
}

fn pair() -> io::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    let (far, peer) = listener.accept()?;
    if peer != near.local_addr()? {
        return Err(io::Error::other("somebody else connected to the private listener"));
    }
    for s in [&near, &far] {
        s.set_nodelay(true)?;
        s.set_read_timeout(Some(PATIENCE))?;
    }
    Ok((near, far))
}

fn pass(from: &mut TcpStream, to: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
    from.write_all(bytes)?;
    let mut got = vec![0u8; bytes.len()];
    to.read_exact(&mut got)?;
    if got == bytes { Ok(()) } else { Err(io::Error::other("other bytes came out")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_and_what_works_is_measured() {
        let report = run();
        for f in &report.features {
            println!("{}: works={} {} {:?}", f.name, f.works, f.why_not, f.cost);
            assert_eq!(f.works, f.why_not.is_empty());
        }
        if report.privileges.missing().is_empty() {
            assert!(report.works(Lane::D), "{:?}", report.features);
            assert!(report.works(Lane::A), "{:?}", report.features);
            assert!(report.works(Lane::B), "{:?}", report.features);
            assert!(report.features.iter().any(|f| f.name == TAP && f.works), "{:?}", report.features);
        } else {
            assert!(report.features.iter().all(|f| f.works || f.why_not.contains("CAP_")));
        }
    }

    #[test]
    fn why_backends_cannot_be_found_is_told() {
        if !Privileges::probe().missing().is_empty() {
            return eprintln!("skipped: the lanes need root");
        }
        let mut datapath = Datapath::open(&Config::default()).unwrap();
        datapath.holders = Err("refused\nlast line of the log".into());
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let backend = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let why = prove_found(&datapath, &backend).unwrap_err().to_string();
        assert_eq!(why, "loading the iterator over open files: refused\nlast line of the log");
    }

    /// As a pooler with `same_host = both` and a mirror opens them.
    #[test]
    fn lanes_for_applications_and_with_a_tap_pass_their_tests() {
        if !Privileges::probe().missing().is_empty() {
            return eprintln!("skipped: the lanes need root");
        }
        let config = Config { applications: true, tap_ring_bytes: 64 << 10, ..Config::default() };
        let (report, datapath) = open(&config);
        assert!(datapath.is_some(), "{:?}", report.features);
    }

    /// What the kernel's fault would look like cannot be had here, but that it is looked for: the reader of the last answer is late.
    #[test]
    fn with_a_tap_the_answer_that_is_read_late_is_tried_too() {
        if !Privileges::probe().missing().is_empty() {
            return eprintln!("skipped: the lanes need root");
        }
        let dp = Datapath::open(&Config { tap_ring_bytes: 64 << 10, ..Config::default() }).unwrap();
        round_trips(&dp, Lane::D).unwrap();
        assert_eq!(dp.counter(Counter::XactsD), u64::from(TIMED_TRANSACTIONS) + 1);
    }

    #[test]
    fn without_privilege_the_reasons_name_each_capability() {
        let none = Privileges { bpf: false, net_admin: false, perfmon: false, sys_ptrace: false };
        assert_eq!(none.missing(), ["CAP_BPF", "CAP_NET_ADMIN", "CAP_PERFMON", "CAP_SYS_PTRACE"]);
    }
}
