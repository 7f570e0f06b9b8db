// SPDX-License-Identifier: Apache-2.0
//! Thousands who only want to be in the way: logins that stop half-way, and cancel requests with forged keys, all at once.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use underpass_testkit::{Batch, Client, Ini, Pooler, Port, Postgres, Result, Underpass};

/// Of one flood.
const HALF_LOGINS: usize = 2000;
const CANCELS: usize = 2000;
/// Floods, one after the other.
const FLOODS: usize = 3;
const THREADS: usize = 4;
/// Within which a peer answers, on a machine that has other things to do.
const SOON: Duration = Duration::from_secs(30);

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).expect("the pooler takes connections");
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream
}

/// Says a part of a login and no more.
fn half_login(port: u16, number: usize) -> TcpStream {
    let mut stream = connect(port);
    let startup =
        Batch::new().startup(196_608, &[("user", "nobody"), ("database", "postgres")]).as_bytes().to_vec();
    let part = match number % 4 {
        0 => &[],
        1 => &startup[..3],
        2 => &startup[..startup.len() - 1],
        // All of it: the pooler asks for a password.
        _ => &startup[..],
    };
    stream.write_all(part).unwrap();
    stream
}

fn forged_cancel(port: u16, number: usize) {
    let mut stream = connect(port);
    let secret = (number as u32).wrapping_mul(0x9e37_79b9).to_be_bytes();
    stream.write_all(Batch::new().cancel_request(number as u32, &secret).as_bytes()).unwrap();
    assert_eq!(stream.read(&mut [0; 1]).expect("the pooler closes"), 0);
}

/// All at once, and what the half logins are told in the end.
fn flood(port: u16) -> Vec<Vec<u8>> {
    let flooders: Vec<_> = (0..THREADS)
        .map(|thread| {
            std::thread::spawn(move || {
                let mut halves = Vec::new();
                for number in 0..HALF_LOGINS.max(CANCELS) / THREADS {
                    if number < HALF_LOGINS / THREADS {
                        halves.push(half_login(port, number));
                    }
                    if number < CANCELS / THREADS {
                        forged_cancel(port, thread << 24 | number);
                    }
                }
                halves
            })
        })
        .collect();
    let halves = flooders.into_iter().flat_map(|flooder| flooder.join().unwrap());
    let halves: Vec<TcpStream> = halves.collect();
    let told = |mut stream: TcpStream| {
        let mut told = Vec::new();
        stream.read_to_end(&mut told).expect("the pooler closes");
        told
    };
    halves.into_iter().map(told).collect()
}

/// Sets its flag when it is dropped.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A sample of the metrics; 0 if there is none.
fn metric(port: u16, sample: &str) -> u64 {
    let mut stream = connect(port);
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    let value = page.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    value.map_or(0, |value| value.parse().expect("a number"))
}

#[test]
fn floods_of_half_logins_and_forged_cancels_are_counted_and_nobody_elses_business() -> Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    assert!(
        hard > 2 * HALF_LOGINS as u64,
        "{hard} descriptors are too few for this test: raise `ulimit -Hn`"
    );
    let server = Postgres::start()?;
    let metrics = Port::reserve()?;
    let ini = Ini::new()
        .userlist("postgres", "")
        .userlist("nobody", "secret")
        .hba("host all postgres all trust\nhost all all all scram-sha-256\nlocal all all trust")
        .database("postgres", &format!("host=127.0.0.1 port={}", server.port()))
        .set("auth_type", "hba")
        .set("pool_mode", "transaction")
        .set("max_client_conn", "10000")
        .set("client_login_timeout", "2")
        // Else the kernel keeps those to itself who say nothing.
        .set("tcp_defer_accept", "0")
        .tail(&format!("[underpass]\nmetrics_listen = 127.0.0.1:{}", metrics.number()));
    let pooler = Underpass::start(&ini)?;
    let (port, metrics) = (pooler.port(), metrics.number());

    let is_over = AtomicBool::new(false);
    let options = pooler.options("postgres", "postgres");
    let mut witness = Client::connect(&options)?;
    let cancelable = Client::connect(&options)?;
    let mut resident = vec![pooler.resident_kib()?];
    let (questions, slowest) = std::thread::scope(|scope| {
        let witness = scope.spawn(|| {
            let (mut questions, mut slowest) = (0, Duration::ZERO);
            while !is_over.load(Ordering::Relaxed) {
                let asked = Instant::now();
                let answer = witness.query(&format!("select {questions}")).unwrap().ok().unwrap();
                assert_eq!(answer.value(), Some(questions.to_string().as_str()));
                slowest = slowest.max(asked.elapsed());
                questions += 1;
            }
            (questions, slowest)
        });
        // Whatever comes, the witness is told to end: the scope waits for it.
        let end = End(&is_over);
        for _ in 0..FLOODS {
            for told in flood(port) {
                let text = String::from_utf8_lossy(&told);
                assert!(text.contains("client_login_timeout"), "{text:?}");
            }
            resident.push(pooler.resident_kib().unwrap());
        }
        drop(end);
        witness.join().unwrap()
    });
    println!(
        "{questions} questions, the slowest in {slowest:?}; KiB before and after each flood: {resident:?}"
    );
    assert!(questions > 100 && slowest < Duration::from_secs(10), "{questions} questions, {slowest:?}");

    let (halves, cancels) = ((FLOODS * HALF_LOGINS) as u64, (FLOODS * CANCELS) as u64);
    // 57014, as PgBouncer: the login was cancelled.
    assert_eq!(metric(metrics, "underpass_client_errors_total{sqlstate=\"57014\"}"), halves);
    assert_eq!(metric(metrics, "underpass_cancel_keys_unknown_total"), cancels);
    let lists = pooler.console("SHOW LISTS")?.ok()?.rows();
    let login_clients = lists.iter().find(|row| row[0].as_deref() == Some("login_clients")).unwrap();
    assert_eq!(login_clients[1].as_deref(), Some("0"));
    // The first one makes tables grow, which may stay so; one of those behind it, at least, finds room for everything.
    let least = resident[1..].windows(2).map(|pair| pair[1].saturating_sub(pair[0])).min();
    assert!(resident[1] < resident[0] + 16 * 1024 && least < Some(1536), "{resident:?}");
    // A right key is still one.
    cancelable.cancel()?;
    assert_eq!(metric(metrics, "underpass_cancel_keys_unknown_total"), cancels);
    Ok(())
}
