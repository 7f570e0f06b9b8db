// SPDX-License-Identifier: Apache-2.0
//! No client ever sees another's bytes: many clients, few servers, pipelines, transactions, splits, forced flips
//! between kernel and user space, clients that vanish. Every row carries its owner and its number.

mod common;

use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::journal::Journal;
use common::pooler::{Options, Pooler, Stats};
use common::{message, open, query, read_message, ready, row};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::event::{PollFd, PollFlags, poll};
use underpass_sockmap::{Config, Counter, Datapath, Lane, LaneChoice};

/// A query is `owner number rows size mode`; the answer is `rows` rows of `size` bytes that begin with owner and
/// number and are filled from a hash of them. `mode`: T begins or continues a transaction, I ends it.
fn row_text(owner: u64, number: u64, index: u64, size: usize) -> Vec<u8> {
    let mut hasher = DefaultHasher::new();
    (owner, number, index).hash(&mut hasher);
    let mut text = format!("{owner} {number} {index} {:x} ", hasher.finish()).into_bytes();
    while text.len() < size {
        text.push((b'a' + text.len() as u8 % 23) ^ (number as u8 & 7));
    }
    text
}

/// Reads as PostgreSQL does: waits for readiness, then reads without blocking. (A reader that already blocks in
/// recv() when its socket enters the map would sleep through what is redirected to it.)
struct Polled(TcpStream);

impl Read for Polled {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
            poll(&mut fds, None)?;
            match rustix::net::recv(&self.0, &mut *buffer, rustix::net::RecvFlags::DONTWAIT) {
                Ok((_, n)) => return Ok(n),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
    }
}

/// A mock PostgreSQL backend. It proves exclusive use: in a transaction only one owner may speak.
fn backend(mut socket: TcpStream, world: &World, seed: u64) -> String {
    let violations = &world.violations;
    let port = socket.peer_addr().unwrap().port();
    let mut random = StdRng::seed_from_u64(seed);
    let mut owner_in_transaction: Option<u64> = None;
    let mut input = io::BufReader::new(Polled(socket.try_clone().unwrap()));
    let mut out = Vec::new();
    let mut parsed: Option<Vec<u8>> = None;
    // The last request of each client: they are numbered, and come to one server in their order.
    let mut heard = HashMap::new();
    loop {
        let (kind, body) = match read_message(&mut input) {
            Ok(message) => message,
            Err(e) => return format!("read: {e}"),
        };
        let text = match kind {
            b'Q' => body,
            b'P' => {
                parsed = Some(body[1..].to_vec());
                out.extend(message(b'1', b""));
                continue;
            }
            b'B' => {
                out.extend(message(b'2', b""));
                continue;
            }
            b'D' => {
                out.extend(message(b'n', b""));
                continue;
            }
            b'E' => continue,
            b'S' => parsed.take().unwrap_or_default(),
            other => {
                eprintln!("a server got message {:?}", char::from(other));
                violations.fetch_add(1, Ordering::Relaxed);
                return "violation".into();
            }
        };
        let text = text.split(|&b| b == 0).next().unwrap_or_default();
        let words: Vec<u64> =
            String::from_utf8_lossy(text).split(' ').filter_map(|w| w.parse().ok()).collect();
        let &[owner, number, rows, size, transaction] = words.as_slice() else {
            eprintln!("a server got {:?} as {:?}", String::from_utf8_lossy(text), char::from(kind));
            violations.fetch_add(1, Ordering::Relaxed);
            return "violation".into();
        };
        if owner_in_transaction.is_some_and(|o| o != owner) {
            eprintln!("client {owner} in a transaction of {owner_in_transaction:?}");
            violations.fetch_add(1, Ordering::Relaxed);
        }
        world
            .journal
            .note(port, format!("backend got {:?} of client {owner}, number {number}", char::from(kind)));
        let last = heard.insert(owner, number).unwrap_or(0);
        if last >= number {
            eprintln!(
                "request {number} of client {owner} came behind {last}; server :{port}\n{}",
                world.journal.tell(&[port])
            );
            violations.fetch_add(1, Ordering::Relaxed);
        }
        owner_in_transaction = (transaction != 0).then_some(owner);
        for index in 0..rows {
            out.extend(row(&row_text(owner, number, index, size as usize)));
        }
        out.extend(message(b'C', b"SELECT 1\0"));
        out.extend(ready(if transaction != 0 { b'T' } else { b'I' }));
        // Sometimes wait for more requests, sometimes split the answer anywhere.
        if random.random_ratio(1, 4) && !input.buffer().is_empty() {
            continue;
        }
        let mut rest: &[u8] = &out;
        while !rest.is_empty() {
            let n = if random.random_ratio(1, 3) { random.random_range(1..=rest.len()) } else { rest.len() };
            if let Err(e) = socket.write_all(&rest[..n]) {
                return format!("write: {e}");
            }
            rest = &rest[n..];
        }
        out.clear();
    }
}

/// What the ends of all connections know together.
#[derive(Default)]
struct World {
    violations: AtomicU64,
    journal: Arc<Journal>,
}

/// One client's life: random requests, every answer checked byte by byte. Returns its transactions.
fn client(port: u16, owner: u64, end: &AtomicBool, world: &World) -> u64 {
    let mut random = StdRng::seed_from_u64(owner ^ seed() << 32);
    let mut number = 0u64;
    let mut transactions = 0;
    while !end.load(Ordering::Relaxed) {
        let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        socket.set_nodelay(true).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        expect_login(&mut socket);
        let mut input = io::BufReader::new(socket.try_clone().unwrap());
        for _ in 0..random.random_range(5..200) {
            if end.load(Ordering::Relaxed) {
                break;
            }
            let depth = if random.random_ratio(1, 3) { random.random_range(1..20) } else { 1 };
            let mut requests = Vec::new();
            let mut expected = Vec::new();
            for i in 0..depth {
                number += 1;
                let rows = random.random_range(0..4u64);
                let size = if random.random_ratio(1, 50) { 20_000 } else { random.random_range(30..300u64) };
                let transaction = u64::from(i + 1 < depth && random.random_ratio(1, 2));
                let text = format!("{owner} {number} {rows} {size} {transaction}");
                let extended = random.random_ratio(1, 2);
                if extended {
                    requests.extend([common::extended(&text), message(b'S', b"")].concat());
                } else {
                    requests.extend(query(&text));
                }
                expected.push((number, rows, size, transaction, extended));
            }
            if random.random_ratio(1, 4) {
                let cut = random.random_range(1..requests.len());
                socket.write_all(&requests[..cut]).unwrap();
                thread::yield_now();
                socket.write_all(&requests[cut..]).unwrap();
            } else {
                socket.write_all(&requests).unwrap();
            }
            let mine = socket.local_addr().unwrap().port();
            for (number, rows, size, transaction, extended) in expected {
                let mut expect = |kind: u8, want: &[u8]| {
                    let got = read_message(&mut input);
                    if !got.as_ref().is_ok_and(|(k, body)| *k == kind && body == want) {
                        world
                            .journal
                            .note(mine, format!("CLIENT {owner} found the fault in the answer to {number}"));
                        let got = got.map(|(k, b)| {
                            (char::from(k), String::from_utf8_lossy(&b[..b.len().min(60)]).into_owned())
                        });
                        panic!(
                            "client {owner}, request {number} {rows} {size} {transaction}: wanted {:?}, got {got:?}\n{}",
                            char::from(kind),
                            world.journal.tell_with(mine),
                        );
                    }
                };
                for kind in if extended { &b"12n"[..] } else { b"" } {
                    expect(*kind, b"");
                }
                for index in 0..rows {
                    expect(b'D', &row(&row_text(owner, number, index, size as usize))[5..]);
                }
                expect(b'C', b"SELECT 1\0");
                expect(b'Z', if transaction != 0 { b"T" } else { b"I" });
                transactions += u64::from(transaction == 0);
            }
        }
        match random.random_range(0..4) {
            0 => drop(socket.write_all(&message(b'X', b""))),
            1 => drop(socket.shutdown(Shutdown::Both)),
            2 => {
                // Vanish with a request in flight, perhaps cut, perhaps in a transaction.
                number += 1;
                let bytes = query(&format!("{owner} {number} 3 200 {}", random.random_range(0..2)));
                let cut = random.random_range(1..=bytes.len());
                let _ = socket.write_all(&bytes[..cut]);
            }
            _ => {}
        }
    }
    transactions
}

fn expect_login(socket: &mut TcpStream) {
    let mut hello = [0u8; 6];
    socket.read_exact(&mut hello).unwrap();
    assert_eq!(hello[..], ready(b'I'));
}

struct Outcome {
    transactions: u64,
    counters: Vec<(&'static str, u64)>,
    lane_chunks: u64,
    stats: Arc<Stats>,
}

fn chaos(lane: Lane, clients: u64, servers: u32, seconds: u64, flip_one_in: u32) -> Option<Outcome> {
    chaos_of(false, lane, clients, servers, seconds, flip_one_in)
}

/// `pinned`: session pooling.
fn chaos_of(
    pinned: bool,
    lane: Lane,
    clients: u64,
    servers: u32,
    seconds: u64,
    flip_one_in: u32,
) -> Option<Outcome> {
    let datapath: Arc<Datapath> =
        Arc::new(open(&Config { applications: lane == Lane::B, ..Config::default() })?);
    let world = Arc::new(World::default());
    let (stop, stats) = (Arc::new(AtomicBool::new(false)), Arc::new(Stats::default()));
    let database = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = database.local_addr().unwrap();
    let shared = Arc::clone(&world);
    let seeds = AtomicU64::new(1 + (seed() << 32));
    let options = Options {
        datapath: Arc::clone(&datapath),
        pool_size: servers,
        lane: if lane == Lane::D { LaneChoice::Remote } else { LaneChoice::Local { backend_pid: None } },
        applications: lane == Lane::B,
        pinned,
        connect: Box::new(move || {
            let socket = TcpStream::connect(address)?;
            let (far, _) = database.accept()?;
            far.set_nodelay(true)?;
            let (world, seed) = (Arc::clone(&shared), seeds.fetch_add(1, Ordering::Relaxed));
            let peer = far.peer_addr()?.port();
            thread::spawn(move || {
                let why = backend(far, &world, seed);
                world.journal.note(peer, format!("backend ends: {why}"));
            });
            Ok((socket, Some(std::process::id())))
        }),
        login: Box::new(|socket| socket.write_all(&ready(b'I'))),
        stop: Arc::clone(&stop),
        stats: Arc::clone(&stats),
        flip_one_in,
        journal: Some(Arc::clone(&world.journal)),
    };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut pooler = Pooler::new(options, listener).unwrap();
    let loop_thread = thread::spawn(move || pooler.run());
    let end = Arc::new(AtomicBool::new(false));
    let threads: Vec<_> = (1..=clients)
        .map(|owner| {
            let (world, end) = (Arc::clone(&world), Arc::clone(&end));
            thread::spawn(move || client(port, owner, &end, &world))
        })
        .collect();
    let (begun, least) = (Instant::now(), least_hand_overs());
    let hand_overs = || stats.taken.load(Ordering::Relaxed).min(stats.given.load(Ordering::Relaxed));
    while begun.elapsed() < Duration::from_secs(seconds)
        || (flip_one_in > 0 && hand_overs() < least && begun.elapsed() < HAND_OVERS_TAKE_MAX)
    {
        // Clients that saw wrong bytes have ended.
        if threads.iter().all(thread::JoinHandle::is_finished) {
            break;
        }
        thread::sleep(Duration::from_millis(100));
    }
    end.store(true, Ordering::Relaxed);
    let results: Vec<_> = threads.into_iter().map(thread::JoinHandle::join).collect();
    stop.store(true, Ordering::Relaxed);
    loop_thread.join().unwrap();
    let failed = results.iter().filter(|r| r.is_err()).count();
    let outcome = Outcome {
        transactions: results.iter().flatten().sum(),
        counters: datapath.counters().into_iter().filter(|&(_, n)| n > 0).collect(),
        lane_chunks: datapath.counter(match lane {
            Lane::D => Counter::ResponsesD,
            Lane::A => Counter::ResponsesA,
            Lane::B => Counter::ResponsesB,
        }),
        stats,
    };
    println!("{} transactions; {:?}; {:?}", outcome.transactions, outcome.stats, outcome.counters);
    assert_eq!(failed, 0, "clients that saw wrong bytes or waited too long");
    assert_eq!(world.violations.load(Ordering::Relaxed), 0, "servers used by two clients at once");
    assert!(outcome.transactions > 100);
    let stats = &outcome.stats;
    let (taken, given) = (stats.taken.load(Ordering::Relaxed), stats.given.load(Ordering::Relaxed));
    println!("links changed hands in {:?}: {taken} up, {given} down", begun.elapsed());
    assert!(flip_one_in == 0 || taken.min(given) >= least, "{taken} up, {given} down");
    Some(outcome)
}

/// Hand-overs in each direction that a test with flips sees, however long they take: fewer where the rest of `make test` waits for it.
fn least_hand_overs() -> u64 {
    if std::env::var("UNDERPASS_TEST_KERNEL_PATH").is_ok_and(|path| path == "require") {
        10_000
    } else {
        1000
    }
}

/// But no longer: in lane B the pooler's only thread looks for each client's socket through the whole host.
const HAND_OVERS_TAKE_MAX: Duration = Duration::from_secs(120);

/// Seconds per test, at least; the soak test of the project sets more.
fn seconds() -> u64 {
    std::env::var("LANE_CHAOS_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(4)
}

/// Where the random choices begin. They do not repeat a run: the order of threads is the machine's.
fn seed() -> u64 {
    std::env::var("LANE_CHAOS_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(0)
}

const LANES: [Lane; 3] = [Lane::D, Lane::A, Lane::B];

#[test]
fn more_servers_than_clients_stay_in_the_lane() {
    for lane in LANES {
        println!("-- lane {lane:?}");
        let Some(outcome) = chaos(lane, 4, 8, seconds(), 0) else { return };
        assert!(outcome.lane_chunks > outcome.transactions / 2, "most of it went through the lane");
    }
}

#[test]
fn few_servers_many_clients_and_flips_at_random() {
    for lane in LANES {
        println!("-- lane {lane:?}");
        let Some(outcome) = chaos(lane, 16, 3, seconds(), 2) else { return };
        assert!(outcome.stats.grants.load(Ordering::Relaxed) > 10, "clients had to queue");
        assert!(outcome.lane_chunks > 100, "the lane was used");
    }
}

#[test]
fn enough_servers_and_flips_at_random() {
    for lane in LANES {
        println!("-- lane {lane:?}");
        let Some(outcome) = chaos(lane, 8, 12, seconds(), 1) else { return };
        assert!(outcome.lane_chunks > outcome.transactions / 4, "the lane carried its part");
    }
}

/// Session pooling: batches may stay open, and links go up and come back without ending.
#[test]
fn sessions_and_flips_at_random() {
    for lane in LANES {
        println!("-- lane {lane:?}");
        let Some(outcome) = chaos_of(true, lane, 8, 40, seconds(), 1) else { return };
        assert!(outcome.lane_chunks > outcome.transactions / 4, "the lane carried its part");
    }
}
