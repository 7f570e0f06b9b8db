// SPDX-License-Identifier: Apache-2.0
//! The metrics endpoint, scraped while clients work and while peers misbehave.

mod common;
#[path = "../../console/tests/exposition/mod.rs"]
mod exposition;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::Site;
use exposition::parse;
use underpass_testkit::{Batch, Client, Options, Port, Postgres};

/// Sends bytes and reads to the end: head and body.
fn ask(address: SocketAddr, request: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(common::LIMIT)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), body.to_owned())
}

fn get(address: SocketAddr, path: &str) -> (String, String) {
    ask(address, &format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n"))
}

#[test]
fn scraped_under_load() {
    const CLIENTS: usize = 4;
    let server = Postgres::start().unwrap();
    let port = Port::reserve().unwrap();
    let address = SocketAddr::from(([127, 0, 0, 1], port.number()));
    let site = Site::with_database(
        &format!("* = host=127.0.0.1 port={} user=postgres", server.port()),
        "pool_mode = transaction\ndefault_pool_size = 2",
        &format!("metrics_listen = {address}\nthreads = 2"),
    );
    let _pooler = site.start(&["-q"]);
    site.wait_serving();
    let (is_over, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let (is_over, done) = (is_over.clone(), done.clone());
            let options = Options::new(site.port(), "postgres", "postgres");
            std::thread::spawn(move || {
                let mut client = Client::connect(&options).unwrap();
                while !is_over.load(Ordering::Relaxed) {
                    assert_eq!(client.query("select 1").unwrap().value(), Some("1"));
                    done.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    let total = |metrics: &str, family: &str| {
        let families = parse(metrics);
        let samples = &families[family].samples;
        samples.iter().filter(|(name, ..)| name.ends_with("_total")).map(|(_, _, value)| value).sum::<f64>()
    };
    let mut last = 0.0;
    let deadline = Instant::now() + Duration::from_secs(2);
    while Instant::now() < deadline {
        let (head, body) = get(address, "/metrics");
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(head.contains("application/openmetrics-text; version=1.0.0"), "{head}");
        let queries = total(&body, "underpass_queries");
        assert!(queries >= last, "a counter went back: {last} {queries}");
        last = queries;
    }
    is_over.store(true, Ordering::Relaxed);
    clients.into_iter().for_each(|client| client.join().unwrap());
    let (_, body) = get(address, "/metrics");
    let asked = done.load(Ordering::Relaxed) as f64;
    assert!(asked > 0.0);
    assert_eq!(total(&body, "underpass_queries"), asked, "every query is counted once");
    assert_eq!(total(&body, "underpass_xacts"), asked);
    assert_eq!(total(&body, "underpass_client_logins"), CLIENTS as f64);
    let families = parse(&body);
    assert!(families["underpass_servers"].samples.iter().any(|(_, labels, value)| {
        labels["database"] == "postgres" && labels["state"] == "idle" && (1.0..=2.0).contains(value)
    }));
}

/// All that was asked is in the histograms, where user space does all of it: each pool's own.
#[test]
fn histograms_hold_what_each_pool_was_asked() {
    const SLEEP: f64 = 0.2;
    let server = Postgres::start().unwrap();
    server.sql("create database other").unwrap();
    server.sql("create role somebody login").unwrap();
    let port = Port::reserve().unwrap();
    let address = SocketAddr::from(([127, 0, 0, 1], port.number()));
    let host = format!("host=127.0.0.1 port={}", server.port());
    let site = Site::with_database(
        &format!("postgres = {host}\nother = {host} pool_size=1"),
        "auth_type = trust\nauth_file = {dir}/users\npool_mode = transaction",
        &format!("metrics_listen = {address}\nkernel_path = off\nthreads = 2"),
    );
    site.write("users", "\"postgres\" \"\"\n\"somebody\" \"\"\n\"admin\" \"\"\n");
    let _pooler = site.start(&["-q"]);
    site.wait_serving();
    let connect =
        |user: &str, database: &str| Client::connect(&Options::new(site.port(), user, database)).unwrap();
    let ask = |client: &mut Client, sql: &str| drop(client.query(sql).unwrap().ok().unwrap());

    let begun = Instant::now();
    // Seven transactions of one query, and two of several.
    let mut client = connect("postgres", "postgres");
    (0..7).for_each(|_| ask(&mut client, "select 1"));
    for sql in ["begin", "select 1", "select 2", "commit", "begin", "rollback"] {
        ask(&mut client, sql);
    }
    // Two of the extended protocol.
    for _ in 0..2 {
        client.extended("select 1", &[]).unwrap().ok().unwrap();
    }
    // One whose query takes its time, and one that takes its time between its queries.
    let mut somebody = connect("somebody", "postgres");
    ask(&mut somebody, &format!("select pg_sleep({SLEEP})"));
    ask(&mut somebody, "begin");
    std::thread::sleep(Duration::from_secs_f64(SLEEP));
    ask(&mut somebody, "commit");
    // One that waits for the only server of its pool.
    let (mut holder, mut waiting) = (connect("postgres", "other"), connect("postgres", "other"));
    ask(&mut holder, "begin");
    waiting.send(&Batch::new().query("select 1")).unwrap();
    std::thread::sleep(Duration::from_secs_f64(SLEEP));
    ask(&mut holder, "commit");
    waiting.response().unwrap().ok().unwrap();
    let all = begun.elapsed().as_secs_f64();

    let families = parse(&get(address, "/metrics").1);
    let value = |family: &str, of: &str, database: &str, user: &str| {
        let samples = families[&format!("underpass_{family}")].samples.iter();
        let mut mine = samples.filter(|(name, labels, _)| {
            name.ends_with(of) && labels["database"] == database && labels["user"] == user
        });
        mine.next().unwrap_or_else(|| panic!("{family}{of} of {user} in {database}")).2
    };
    // Transactions and queries; of each histogram the least and the most that its sum may be.
    let pools = [
        ("postgres", "postgres", 11.0, 15.0, [(0.0, all); 3]),
        ("postgres", "somebody", 2.0, 3.0, [(0.0, all), (2.0 * SLEEP, all), (SLEEP, all)]),
        ("other", "postgres", 2.0, 3.0, [(SLEEP, all), (SLEEP, all), (0.0, all)]),
    ];
    for (database, user, xacts, queries, sums) in pools {
        let of = |family: &str, of: &str| value(family, of, database, user);
        let counts = ["wait_duration_seconds", "xact_duration_seconds", "query_duration_seconds"]
            .map(|family| of(family, "_count"));
        assert_eq!(counts, [xacts, xacts, queries], "{user} in {database}");
        assert_eq!([of("xacts", "_total"), of("queries", "_total")], [xacts, queries]);
        for (family, (least, most)) in
            ["wait_duration_seconds", "xact_duration_seconds", "query_duration_seconds"].iter().zip(sums)
        {
            let sum = of(family, "_sum");
            assert!((least..=most).contains(&sum), "{family} of {user} in {database}: {sum}");
        }
        // A histogram and the counter of the same time say the same.
        for kind in ["wait", "xact", "query"] {
            let (sum, total) = (
                of(&format!("{kind}_duration_seconds"), "_sum"),
                of(&format!("{kind}_time_seconds"), "_total"),
            );
            assert!((sum - total).abs() < 0.001, "{kind} of {user} in {database}: {sum}, counter {total}");
        }
    }
}

/// What SHOW KERNEL says and what is scraped are the same.
#[test]
fn lanes_are_scraped_as_the_console_shows_them() {
    if underpass_testkit::service_user().is_none() {
        println!("skipped: kernel lanes need root");
        return;
    }
    let server = Postgres::start().unwrap();
    let port = Port::reserve().unwrap();
    let address = SocketAddr::from(([127, 0, 0, 1], port.number()));
    let site = Site::with_database(
        &format!("* = host=127.0.0.1 port={} user=postgres", server.port()),
        "pool_mode = transaction\ndefault_pool_size = 2",
        &format!("metrics_listen = {address}\nkernel_path = require"),
    );
    let _pooler = site.start(&["-q"]);
    site.wait_serving();
    let mut client = Client::connect(&Options::new(site.port(), "postgres", "postgres")).unwrap();
    for n in 0..100 {
        assert_eq!(client.query("select 1").unwrap().value(), Some("1"));
        if n % 10 == 0 {
            // For user space, by a reason of a program's.
            let batch = Batch::new().parse(&format!("statement {n}"), "select 1").sync();
            client.exchange(&batch).unwrap().pop().unwrap().ok().unwrap();
        }
    }
    let shown = |kind: &str, item: &str| -> BTreeMap<String, f64> {
        let rows = site.console("SHOW KERNEL").into_iter();
        let rows = rows.map(|row| row.into_iter().map(Option::unwrap_or_default).collect::<Vec<_>>());
        rows.filter(|row| row[0] == kind && row[2] == item)
            .map(|row| (row[1].clone(), row[3].parse().unwrap()))
            .collect()
    };
    let families = parse(&get(address, "/metrics").1);
    let scraped = |family: &str, label: &str| -> BTreeMap<String, f64> {
        let samples = families[family].samples.iter();
        samples
            .filter(|(name, ..)| !name.ends_with("_created"))
            .map(|(_, labels, value)| (labels[label].clone(), *value))
            .collect()
    };
    for (family, label, kind, item) in [
        ("underpass_lane_xacts", "lane", "lane", "xacts"),
        ("underpass_lane_user_xacts", "reason", "user", "xacts"),
        ("underpass_lane_exits", "reason", "exit", "count"),
        ("underpass_lane_queued_bytes", "queue", "queue", "queued"),
    ] {
        let (scraped, shown) = (scraped(family, label), shown(kind, item));
        assert!(!scraped.is_empty() && scraped == shown, "{family}: {scraped:?}, shown: {shown:?}");
    }
    let xacts = scraped("underpass_lane_xacts", "lane");
    assert!(xacts["A"] >= 50.0 && xacts["user"] >= 10.0, "{xacts:?}");
    assert_eq!(xacts.values().sum::<f64>(), 110.0, "{xacts:?}");
    assert!(scraped("underpass_lane_user_xacts", "reason")["named_statement"] >= 1.0);
    // Somebody may have the kernel measure: then these go on.
    let (runs, shown) = (scraped("underpass_lane_program_runs", "program"), shown("program", "runs"));
    assert!(!runs.is_empty() && runs.keys().eq(shown.keys()), "{runs:?}, shown: {shown:?}");
    assert!(runs.iter().all(|(program, runs)| *runs <= shown[program]), "{runs:?}, shown: {shown:?}");
}

#[test]
fn who_breaks_the_rules_is_counted_and_logged() {
    let port = Port::reserve().unwrap();
    let address = SocketAddr::from(([127, 0, 0, 1], port.number()));
    let site = Site::with_database(
        "x = host=127.0.0.1",
        "logfile = {dir}/log",
        &format!("metrics_listen = {address}\nkernel_path = off"),
    );
    let _pooler = site.start(&["-q"]);
    site.wait_serving();
    let garbage: [&[u8]; 5] = [
        b"\0\0\0\0",                                       // 08P01: no length
        b"\0\0\0\x08\0\x02\0\0",                           // 0A000: protocol 2
        b"\0\0\0\x09\0\x03\0\0\0",                         // 28000: no user
        b"\x16\x03\x01\0\x05hello",                        // nothing can be said
        b"\0\0\0\x10\x04\xd2\x16\x2e\0\0\0\x01\0\0\0\x01", // CancelRequest with a key of nobody's
    ];
    for bytes in garbage {
        let mut peer = TcpStream::connect(("127.0.0.1", site.port())).unwrap();
        peer.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        peer.write_all(bytes).unwrap();
        // Closed in good order or reset, but closed.
        let ended = peer.read_to_end(&mut Vec::new());
        assert!(!ended.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock), "{bytes:?}");
    }
    let nowhere = Client::connect(&Options::new(site.port(), "postgres", "nowhere"));
    assert!(nowhere.is_err());

    let (_, body) = get(address, "/metrics");
    let families = parse(&body);
    for sqlstate in ["08P01", "0A000", "28000", "3D000", "none"] {
        let mut samples = families["underpass_client_errors"].samples.iter();
        let sample = samples.find(|(_, labels, _)| labels["sqlstate"] == sqlstate);
        assert!(sample.is_some_and(|(.., count)| *count == 1.0), "{sqlstate}: {body}");
    }
    assert_eq!(families["underpass_cancel_keys_unknown"].samples[0].2, 1.0);
    let log = site.read("log");
    for reason in
        ["protocol", "no username supplied", "TLS handshake", "unknown key", "no such database: nowhere"]
    {
        assert!(log.contains(reason), "{reason}: {log}");
    }
}

#[test]
fn other_requests_and_bad_peers() {
    let port = Port::reserve().unwrap();
    let address = SocketAddr::from(([127, 0, 0, 1], port.number()));
    let site = Site::with_database(
        "x = host=127.0.0.1",
        "",
        &format!("metrics_listen = {address}\nkernel_path = off"),
    );
    let _pooler = site.start(&["-q"]);
    site.wait_serving();
    let (head, body) = get(address, "/");
    assert!(head.starts_with("HTTP/1.1 200") && body.contains("/metrics"), "{head}");
    assert!(get(address, "/other").0.starts_with("HTTP/1.1 404"));
    assert!(ask(address, "POST /metrics HTTP/1.1\r\n\r\n").0.starts_with("HTTP/1.1 405"));
    assert!(ask(address, "hello\r\n\r\n").0.starts_with("HTTP/1.1 400"));
    let (head, body) = ask(address, "HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200") && body.is_empty());
    // One that says nothing is sent away; the next is served.
    let silent = TcpStream::connect(address).unwrap();
    let began = Instant::now();
    assert!(get(address, "/metrics").0.starts_with("HTTP/1.1 200"));
    assert!(began.elapsed() < Duration::from_secs(10));
    drop(silent);
    // One that leaves without reading does not end the endpoint.
    drop(TcpStream::connect(address).unwrap().write_all(b"GET /metrics HTTP/1.1\r\n\r\n"));
    assert!(get(address, "/metrics").0.starts_with("HTTP/1.1 200"));
}
