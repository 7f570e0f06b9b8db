// SPDX-License-Identifier: Apache-2.0
//! pgbench through the lanes, directly, and through Debian's pgbouncer, in interleaved rounds.
//!
//! `cargo run --release -p underpass-sockmap --example lane_bench -- [rounds] [seconds] [clients,...] [mode] [paths]`
//! Needs root, PostgreSQL 15 in /usr/lib/postgresql/15/bin, pgbouncer, and a user `postgres`. CPU is the whole
//! machine's busy time per transaction; the tax is that minus the direct connection's in the same round.

#[path = "../tests/common/journal.rs"]
#[allow(dead_code, reason = "the tests use it")]
mod journal;
#[path = "../tests/common/pooler.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod pooler;

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pooler::{Options, Pooler, Stats};
use underpass_sockmap::{Config, Counter, Datapath, LaneChoice};

const BIN: &str = "/usr/lib/postgresql/15/bin";
const PROTOCOL_3: u32 = 196_608;
const SSL_REQUEST: u32 = 80_877_103;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A child that is killed when dropped.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.0.id() as i32) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::INT);
        }
        let _ = self.0.wait();
    }
}

fn as_postgres(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups", program]);
    command
}

fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

fn wait_for(port: u16) -> Result<()> {
    let start = Instant::now();
    while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
        if start.elapsed() > Duration::from_secs(20) {
            return Err(format!("nothing listens on port {port}").into());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn start_postgres(dir: &Path) -> Result<(Killed, u16)> {
    let data = dir.join("data");
    let status = as_postgres(&format!("{BIN}/initdb"))
        .args(["-A", "trust", "-N", "-D"])
        .arg(&data)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()?;
    if !status.success() {
        return Err("initdb failed".into());
    }
    let port = free_port()?;
    let child = as_postgres(&format!("{BIN}/postgres"))
        .arg("-D")
        .arg(&data)
        .args(["-p", &port.to_string(), "-c", "listen_addresses=127.0.0.1", "-c", "max_connections=300"])
        .args(["-c", "fsync=off", "-c", "autovacuum=off", "-k"])
        .arg(dir)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    wait_for(port)?;
    Ok((Killed(child), port))
}

fn start_pgbouncer(dir: &Path, server: u16, pool: u32) -> Result<(Killed, u16)> {
    let port = free_port()?;
    let ini = dir.join("pgbouncer.ini");
    fs::write(
        &ini,
        format!(
            "[databases]\npostgres = host=127.0.0.1 port={server} user=postgres\n[pgbouncer]\nlisten_addr=127.0.0.1\n\
             listen_port={port}\nauth_type=any\npool_mode=transaction\ndefault_pool_size={pool}\nmax_client_conn=1000\n\
             log_connections=0\nlog_disconnections=0\nunix_socket_dir=\nignore_startup_parameters=extra_float_digits\n"
        ),
    )?;
    let child = as_postgres("/usr/sbin/pgbouncer")
        .args(["-q"])
        .arg(&ini)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    wait_for(port)?;
    Ok((Killed(child), port))
}

fn read_message(from: &mut TcpStream) -> io::Result<(u8, Vec<u8>)> {
    let mut head = [0u8; 5];
    from.read_exact(&mut head)?;
    let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
    let mut body = vec![0u8; length.saturating_sub(4)];
    from.read_exact(&mut body)?;
    Ok((head[0], body))
}

/// Logs in to PostgreSQL by trust and reads to the first ReadyForQuery.
fn connect(port: u16) -> io::Result<(TcpStream, Option<u32>)> {
    let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    let parameters = b"user\0postgres\0database\0postgres\0\0";
    let mut startup = (parameters.len() as u32 + 8).to_be_bytes().to_vec();
    startup.extend_from_slice(&PROTOCOL_3.to_be_bytes());
    startup.extend_from_slice(parameters);
    socket.write_all(&startup)?;
    let mut pid = None;
    loop {
        match read_message(&mut socket)? {
            (b'Z', _) => return Ok((socket, pid)),
            (b'K', body) => pid = body.get(..4).and_then(|b| Some(u32::from_be_bytes(b.try_into().ok()?))),
            (b'E', body) => return Err(io::Error::other(String::from_utf8_lossy(&body).into_owned())),
            _ => {}
        }
    }
}

/// Lets anybody in.
fn login(client: &mut TcpStream) -> io::Result<()> {
    loop {
        let mut head = [0u8; 8];
        client.read_exact(&mut head)?;
        let length = u32::from_be_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let code = u32::from_be_bytes([head[4], head[5], head[6], head[7]]);
        let mut rest = vec![0u8; length.saturating_sub(8)];
        client.read_exact(&mut rest)?;
        if code == SSL_REQUEST {
            client.write_all(b"N")?;
            continue;
        }
        let mut out = b"R\0\0\0\x08\0\0\0\0".to_vec();
        for (name, value) in
            [("server_version", "15.0"), ("client_encoding", "UTF8"), ("standard_conforming_strings", "on")]
        {
            out.push(b'S');
            out.extend_from_slice(&(name.len() as u32 + value.len() as u32 + 6).to_be_bytes());
            out.extend_from_slice(format!("{name}\0{value}\0").as_bytes());
        }
        out.extend_from_slice(b"K\0\0\0\x0c\0\0\0\x01\0\0\0\x01Z\0\0\0\x05I");
        return client.write_all(&out);
    }
}

struct Lanes {
    port: u16,
    datapath: Arc<Datapath>,
    stats: Arc<Stats>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn start_lanes(server: u16, pool_size: u32, lane: LaneChoice, pinned: bool) -> Result<Lanes> {
    let datapath = Arc::new(Datapath::open(&Config::default())?);
    let (stats, stop) = (Arc::new(Stats::default()), Arc::new(AtomicBool::new(false)));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    let options = Options {
        datapath: Arc::clone(&datapath),
        pool_size,
        lane,
        applications: false,
        pinned,
        connect: Box::new(move || connect(server)),
        login: Box::new(login),
        stop: Arc::clone(&stop),
        stats: Arc::clone(&stats),
        flip_one_in: 0,
        journal: None,
    };
    let mut pooler = Pooler::new(options, listener)?;
    let thread = std::thread::spawn(move || pooler.run());
    Ok(Lanes { port, datapath, stats, stop, thread: Some(thread) })
}

/// Busy CPU time of the whole machine, in ticks of 10 ms.
fn busy_ticks() -> Result<u64> {
    let text = fs::read_to_string("/proc/stat")?;
    let line = text.lines().next().ok_or("empty /proc/stat")?;
    let fields: Vec<u64> = line.split_whitespace().skip(1).filter_map(|f| f.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal
    Ok([0, 1, 2, 5, 6].iter().filter_map(|&i| fields.get(i)).sum())
}

struct Run {
    tps: f64,
    cpu_us: f64,
}

fn pgbench(port: u16, clients: u32, mode: &str, seconds: u32, script: &Path) -> Result<Run> {
    let before = busy_ticks()?;
    let start = Instant::now();
    let output = Command::new(format!("{BIN}/pgbench"))
        .args(["-n", "-h", "127.0.0.1", "-p", &port.to_string(), "-U", "postgres", "-M", mode])
        .args(["-c", &clients.to_string(), "-j", "1", "-T", &seconds.to_string(), "-f"])
        .arg(script)
        .arg("postgres")
        .output()?;
    let elapsed = start.elapsed().as_secs_f64();
    let busy = (busy_ticks()? - before) as f64 * 10_000.0;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let tps: f64 = text
        .lines()
        .find_map(|l| l.strip_prefix("tps = ")?.split_whitespace().next()?.parse().ok())
        .ok_or_else(|| format!("pgbench: {text}{}", String::from_utf8_lossy(&output.stderr)))?;
    Ok(Run { tps, cpu_us: busy / (tps * elapsed.min(f64::from(seconds))) })
}

/// All rounds of one path.
#[derive(Default)]
struct Series {
    tps: Vec<f64>,
    cpu_us: Vec<f64>,
    tax_us: Vec<f64>,
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |i: usize, default: &str| arguments.get(i).cloned().unwrap_or_else(|| default.to_owned());
    let rounds: u32 = argument(0, "3").parse()?;
    let seconds: u32 = argument(1, "3").parse()?;
    let clients: Vec<u32> =
        argument(2, "1,8").split(',').map(str::parse).collect::<std::result::Result<_, _>>()?;
    let mode = argument(3, "simple");
    let wanted = argument(4, "direct,pgbouncer,lane_d,lane_a,lane_d_pinned,lane_a_pinned");
    let pool_size = 20;

    let dir = tempfile::tempdir()?;
    Command::new("chown").arg("postgres").arg(dir.path()).status()?;
    let script = dir.path().join("select.sql");
    fs::write(&script, "select 1;\n")?;
    let (_postgres, server) = start_postgres(dir.path())?;
    let (_pgbouncer, pgbouncer) = start_pgbouncer(dir.path(), server, pool_size)?;

    for &c in &clients {
        let mut results: BTreeMap<&str, Series> = BTreeMap::new();
        let mut shares = BTreeMap::new();
        for _ in 0..rounds {
            let mut direct_cpu = 0.0;
            for path in wanted.split(',') {
                let local = LaneChoice::Local { backend_pid: None };
                let pinned_size = c.max(1);
                let lanes = match path {
                    "lane_d" => Some(start_lanes(server, pool_size, LaneChoice::Remote, false)?),
                    "lane_a" => Some(start_lanes(server, pool_size, local, false)?),
                    "lane_d_pinned" => Some(start_lanes(server, pinned_size, LaneChoice::Remote, true)?),
                    "lane_a_pinned" => Some(start_lanes(server, pinned_size, local, true)?),
                    _ => None,
                };
                let port = match (path, &lanes) {
                    ("direct", _) => server,
                    ("pgbouncer", _) => pgbouncer,
                    (_, Some(l)) => l.port,
                    _ => return Err(format!("unknown path {path}").into()),
                };
                let run = pgbench(port, c, &mode, seconds, &script)?;
                if path == "direct" {
                    direct_cpu = run.cpu_us;
                }
                if let Some(l) = &lanes {
                    let chunks: u64 = [Counter::ResponsesD, Counter::ResponsesA]
                        .iter()
                        .map(|&k| l.datapath.counter(k))
                        .sum();
                    let total = run.tps * f64::from(seconds);
                    let reasons: Vec<String> = l
                        .datapath
                        .counters()
                        .into_iter()
                        .filter(|&(_, n)| n > 0)
                        .map(|(name, n)| format!("{name}={n}"))
                        .collect();
                    shares.insert(
                        path.to_owned(),
                        (100.0 * chunks as f64 / total, reasons.join(" "), format!("{:?}", l.stats)),
                    );
                }
                let key = wanted.split(',').find(|k| *k == path).unwrap_or(path);
                let entry = results.entry(key).or_default();
                entry.tps.push(run.tps);
                entry.cpu_us.push(run.cpu_us);
                entry.tax_us.push(run.cpu_us - direct_cpu);
            }
        }
        println!("clients={c} mode={mode} rounds={rounds} x {seconds} s, pool {pool_size}, medians");
        let bouncer_tax = results.get("pgbouncer").map(|r| median(&mut r.tax_us.clone()));
        for (path, r) in &mut results {
            let (tps, cpu, tax) = (median(&mut r.tps), median(&mut r.cpu_us), median(&mut r.tax_us));
            let ratio = bouncer_tax.map_or(String::new(), |b| format!("  tax/pgbouncer {:5.2}", tax / b));
            println!("  {path:14} {tps:9.0} tps  {cpu:6.1} us CPU  tax {tax:6.1}{ratio}");
        }
        for (path, (share, reasons, stats)) in &shares {
            println!("  {path}: {share:.1} % of responses in the lane; {reasons}; {stats}");
        }
    }
    Ok(())
}
