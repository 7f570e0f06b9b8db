// SPDX-License-Identifier: Apache-2.0
//! The OpenMetrics endpoint (`metrics_listen`): a thread of its own that answers one HTTP request after the other.
//!
//! A scrape asks every worker for its counters, which costs each of them microseconds, and never keeps one waiting. A peer gets a bounded
//! request, a bounded time and no second request on its connection.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use underpass_console::metrics::{CONTENT_TYPE, DatabaseMetrics, Metrics, PoolMetrics};

use underpass_wire::SqlState;

use crate::gather::{self, Facts, Part};
use crate::shared::{Shared, lock};
use crate::{kernel_rows, mirror_rows};

/// Longest request read; Prometheus sends some hundred bytes.
const REQUEST_BYTES_MAX: usize = 8 * 1024;
/// Time for a peer to say what it wants, and to take each part of the answer.
const PEER_TIMEOUT: Duration = Duration::from_secs(2);
/// Time for workers to answer. They are there within a millisecond, or a shutdown has ended them.
const WORKERS_TIMEOUT: Duration = Duration::from_secs(2);

/// Opens the endpoint.
///
/// # Errors
/// The address is in use or not ours.
pub(crate) fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).with_context(|| {
        format!("metrics_listen: cannot listen on {address}; change it or stop the other process")
    })
}

/// Starts to answer.
///
/// # Errors
/// No thread can be had.
pub(crate) fn start(listener: TcpListener, shared: Arc<Shared>) -> io::Result<()> {
    let serve = move || {
        for stream in listener.incoming() {
            match stream.and_then(|stream| answer(&stream, &shared)) {
                Ok(()) => {}
                Err(error) => {
                    log::debug!("metrics: {error}");
                    // Short of descriptors, accept fails at once again and again.
                    if error
                        .raw_os_error()
                        .is_some_and(|code| code == nix::libc::EMFILE || code == nix::libc::ENFILE)
                    {
                        std::thread::sleep(Duration::from_millis(100));
                    }
                }
            }
        }
    };
    std::thread::Builder::new().name("metrics".into()).spawn(serve).map(drop)
}

fn answer(stream: &TcpStream, shared: &Shared) -> io::Result<()> {
    stream.set_read_timeout(Some(PEER_TIMEOUT))?;
    stream.set_write_timeout(Some(PEER_TIMEOUT))?;
    let request = match read_request(stream, Instant::now() + PEER_TIMEOUT) {
        Ok(request) => request,
        Err(refusal) => return respond(stream, refusal, "text/plain", false, ""),
    };
    let with_body = request.method != Method::Head;
    match (request.method, request.path.as_str()) {
        (Method::Other, _) => {
            respond(stream, "405 Method Not Allowed", "text/plain", true, "GET or HEAD only\n")
        }
        (_, "/metrics") => match collect(shared) {
            Some(metrics) => respond(stream, "200 OK", CONTENT_TYPE, with_body, &metrics.encode()),
            None => respond(stream, "503 Service Unavailable", "text/plain", with_body, "shutting down\n"),
        },
        // SHOW MIRRORS and SHOW MIRROR_DIFF for programs.
        (_, "/mirror_diff") => {
            respond(stream, "200 OK", "application/json", with_body, &mirror_rows::snapshot_json(shared))
        }
        (_, "/") => {
            let text = "Underpass: metrics are at /metrics, what mirrors answer otherwise at /mirror_diff\n";
            respond(stream, "200 OK", "text/plain", with_body, text)
        }
        _ => {
            respond(stream, "404 Not Found", "text/plain", with_body, "not found; metrics are at /metrics\n")
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Method {
    Get,
    Head,
    Other,
}

#[derive(Debug, PartialEq, Eq)]
struct Request {
    method: Method,
    path: String,
}

/// Reads up to the empty line that ends the headers; `Err` is the status to answer.
fn read_request(mut stream: impl Read, deadline: Instant) -> Result<Request, &'static str> {
    let mut head = Vec::new();
    let mut chunk = [0; 1024];
    while !head.windows(4).any(|bytes| bytes == b"\r\n\r\n") {
        if head.len() > REQUEST_BYTES_MAX {
            return Err("431 Request Header Fields Too Large");
        }
        // A peer that sends a byte now and then would stay for ever otherwise.
        if Instant::now() > deadline {
            return Err("408 Request Timeout");
        }
        match stream.read(&mut chunk) {
            Ok(0) => return Err("400 Bad Request"),
            Ok(count) => head.extend_from_slice(&chunk[..count]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Err("408 Request Timeout"),
        }
    }
    let line = head.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let mut words = std::str::from_utf8(line).map_err(|_| "400 Bad Request")?.split(' ');
    match (words.next(), words.next(), words.next(), words.next()) {
        (Some(method), Some(target), Some("HTTP/1.1" | "HTTP/1.0"), None) if target.starts_with('/') => {
            let method = match method {
                "GET" => Method::Get,
                "HEAD" => Method::Head,
                _ => Method::Other,
            };
            Ok(Request { method, path: target.split('?').next().unwrap_or_default().to_owned() })
        }
        _ => Err("400 Bad Request"),
    }
}

fn respond(mut stream: &TcpStream, status: &str, kind: &str, with_body: bool, body: &str) -> io::Result<()> {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    if with_body {
        stream.write_all(body.as_bytes())?;
    }
    stream.shutdown(std::net::Shutdown::Write)
}

/// Everything a scrape shows. `None` when workers have ended.
fn collect(shared: &Shared) -> Option<Metrics> {
    let parts = gather::wait(shared, WORKERS_TIMEOUT, Part::of)?;
    let facts = Facts::merge(shared, &parts, Instant::now());
    let pools = facts
        .pools
        .into_iter()
        .map(|facts| PoolMetrics {
            database: facts.pool.database.name.clone(),
            user: facts.pool.user.name.clone(),
            stats: facts.stats,
            latency: facts.latency,
            counts: facts.counts,
            pool_size: facts.size.into(),
        })
        .collect();
    let settings = shared.settings.load();
    let config = &settings.config;
    let databases = shared
        .databases()
        .into_iter()
        .map(|database| {
            let configured = database.settings.load();
            DatabaseMetrics {
                name: database.name.clone(),
                current_connections: lock(&shared.core).database_connections(database.number).into(),
                max_connections: config.max_db_connections(&configured).into(),
                current_client_connections: database.clients.load(Ordering::Relaxed).into(),
                max_client_connections: config.max_db_client_connections(&configured).into(),
                paused: database.paused.load(Ordering::Relaxed),
                disabled: database.disabled.load(Ordering::Relaxed),
            }
        })
        .collect();
    Some(Metrics {
        version: crate::VERSION.to_owned(),
        start: shared.timestamp(shared.started),
        pools,
        databases,
        lists: facts.lists,
        client_errors: client_errors(shared),
        cancel_keys_unknown: shared.cancel_keys_unknown.load(Ordering::Relaxed),
        lane_xacts: kernel_rows::xacts(shared),
        lane_user_xacts: kernel_rows::user_xacts(shared),
        lane_exits: kernel_rows::exits(shared),
        lane_queued_bytes: kernel_rows::queued(shared),
        lane_programs: kernel_rows::costs(shared),
        mirrors: mirror_rows::metrics(shared),
    })
}

fn client_errors(shared: &Shared) -> Vec<(String, u64)> {
    lock(&shared.client_errors).iter().map(|(told, count)| (told.label(), *count)).collect()
}

/// What a client was told when it was closed for an error. As many values as PostgreSQL has codes, whatever a server makes up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Told {
    Code(SqlState),
    /// Nothing could be said.
    Nothing,
    /// A code of the server's own.
    Other,
}

impl Told {
    pub fn of(sqlstate: Option<SqlState>) -> Self {
        match sqlstate {
            None => Told::Nothing,
            Some(code) if code.condition().is_some() => Told::Code(code),
            Some(_) => Told::Other,
        }
    }

    fn label(self) -> String {
        match self {
            Told::Code(code) => code.to_string(),
            Told::Nothing => "none".to_owned(),
            Told::Other => "other".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Request, &'static str> {
        read_request(text.as_bytes(), Instant::now() + PEER_TIMEOUT)
    }

    #[test]
    fn requests() {
        let get = |path: &str| Ok(Request { method: Method::Get, path: path.to_owned() });
        assert_eq!(read("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"), get("/metrics"));
        assert_eq!(read("GET /metrics?name[]=a HTTP/1.0\r\n\r\n"), get("/metrics"));
        assert_eq!(read("POST / HTTP/1.1\r\n\r\n").unwrap().method, Method::Other);
        assert_eq!(read("HEAD / HTTP/1.1\r\n\r\n").unwrap().method, Method::Head);
    }

    #[test]
    fn codes_that_a_server_makes_up_have_one_label() {
        let label = |code: &[u8]| Told::of(SqlState::new(code)).label();
        assert_eq!([label(b"28P01"), label(b"ZZ001"), label(b"ZZ002")], ["28P01", "other", "other"]);
        assert_eq!(Told::of(None).label(), "none");
    }

    #[test]
    fn refusals() {
        for (text, status) in [
            ("", "400"),
            ("GET /metrics HTTP/1.1\r\n", "400"),
            ("GET metrics HTTP/1.1\r\n\r\n", "400"),
            ("GET / HTTP/2\r\n\r\n", "400"),
            ("\x16\x03\x01 / x\r\n\r\n", "400"),
        ] {
            assert!(read(text).unwrap_err().starts_with(status), "{text:?}");
        }
        let long = format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(2 * REQUEST_BYTES_MAX));
        assert!(read(&long).unwrap_err().starts_with("431"));
        assert!(read_request(&b"GET"[..], Instant::now() - PEER_TIMEOUT).unwrap_err().starts_with("408"));
    }
}
