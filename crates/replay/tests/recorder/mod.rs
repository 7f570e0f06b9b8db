// SPDX-License-Identifier: Apache-2.0
//! A relay that records what passes it: the bytes are the true ones, none is lost. They become records as those of any other source do.

// Each test file uses its own part.
#![allow(dead_code)]

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use underpass_replay::outcome::UnitOutcome;
use underpass_replay::plan::{self, Plan};
use underpass_replay::report::Report;
use underpass_replay::run::{self, Options, Played, Stopper};
use underpass_replay::{Identities, Target, preflight};
use underpass_testkit::Postgres;
use underpass_trace::assemble::{Audit, Origin, Piece, machine};
use underpass_trace::{
    Direction, EndReason, Level, Meta, Options as WriterOptions, Protocol, Record, SessionId, Source,
    Transport, Writer,
};

/// No replay of a test takes so long.
const PLAY_LIMIT: Duration = Duration::from_secs(60);

/// Records every connection to a server on 127.0.0.1.
pub struct Recorder {
    port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    records: Mutex<Vec<Record<'static>>>,
    begin: Instant,
    protocol: Protocol,
    level: Level,
    open: Mutex<Vec<thread::JoinHandle<()>>>,
}

impl Recorder {
    /// Begins to relay to a port.
    pub fn start(target: u16, level: Level) -> Self {
        Self::of(Protocol::Postgres, target, level)
    }

    /// The same with sessions of a protocol.
    pub fn of(protocol: Protocol, target: u16, level: Level) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bind");
        let port = listener.local_addr().expect("address").port();
        let shared = Arc::new(Shared {
            records: Mutex::default(),
            begin: Instant::now(),
            protocol,
            level,
            open: Mutex::default(),
        });
        let theirs = Arc::clone(&shared);
        thread::spawn(move || {
            for (number, client) in listener.incoming().enumerate() {
                let (Ok(client), Ok(server)) = (client, TcpStream::connect(("127.0.0.1", target))) else {
                    continue;
                };
                let shared = Arc::clone(&theirs);
                let relay = thread::spawn(move || relay(&shared, number as u64 + 1, &client, &server));
                theirs.open.lock().expect("lock").push(relay);
            }
        });
        Self { port, shared }
    }

    /// Where clients connect.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The records so far, when all connections are closed.
    pub fn records(&self) -> Vec<Record<'static>> {
        for relay in std::mem::take(&mut *self.shared.open.lock().expect("lock")) {
            relay.join().expect("relay");
        }
        self.shared.records.lock().expect("lock").clone()
    }

    /// Writes the records as a trace.
    pub fn write(&self, directory: &Path, meta: &Meta) {
        write(directory, meta, &self.records());
    }
}

/// Writes records as a trace.
pub fn write(directory: &Path, meta: &Meta, records: &[Record<'_>]) {
    let mut writer = Writer::create(directory, meta, WriterOptions::default()).expect("create");
    records.iter().for_each(|record| writer.write(record).expect("write"));
    writer.finish().expect("finish");
}

fn relay(shared: &Arc<Shared>, session: u64, client: &TcpStream, server: &TcpStream) {
    let origin = Origin {
        session: SessionId(session),
        source: Source::Synthetic,
        transport: Transport::Tcp,
        peer: None,
        level: shared.level,
    };
    let assembler = Mutex::new(machine(shared.protocol, origin));
    let pass = |mut from: &TcpStream, mut to: &TcpStream, direction: Direction| {
        let mut chunk = vec![0; 64 * 1024];
        while let Ok(len @ 1..) = from.read(&mut chunk) {
            {
                // A cause is recorded before what it causes, because it is passed on after that.
                let mut assembler = assembler.lock().expect("lock");
                let now_ns = shared.begin.elapsed().as_nanos() as u64;
                let mut records = shared.records.lock().expect("lock");
                let mut sink = |record: Record<'_>| records.push(record.into_owned());
                assembler.piece(direction, now_ns, Piece::Bytes(&chunk[..len]), &mut sink);
            }
            if to.write_all(&chunk[..len]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    };
    for stream in [client, server] {
        stream.set_nodelay(true).expect("nodelay");
    }
    thread::scope(|scope| {
        scope.spawn(|| pass(client, server, Direction::Frontend));
        pass(server, client, Direction::Backend);
    });
    let now_ns = shared.begin.elapsed().as_nanos() as u64;
    let mut records = shared.records.lock().expect("lock");
    let mut sink = |record: Record<'_>| records.push(record.into_owned());
    let mut assembler = assembler.into_inner().expect("lock");
    assembler.end(now_ns, EndReason::Unknown, Audit::default(), &mut sink);
}

/// What the trace of a private server says about itself.
pub fn meta(server: &Postgres, level: Level) -> Meta {
    let identifier =
        server.sql_value("select system_identifier from pg_control_system()").expect("identifier");
    let mut meta = Meta { level, ..Meta::default() };
    meta.server.version = server.sql_value("show server_version").expect("version");
    meta.server.system_identifier = Some(identifier);
    meta
}

/// The superuser of a private server, by TCP.
pub fn target(port: u16, identities: Identities) -> Target {
    Target::new(
        &format!("host=127.0.0.1 port={port} user=postgres dbname=postgres sslmode=disable"),
        identities,
    )
    .expect("target")
}

/// Plays records against a server and reports. What hangs fails.
pub fn play(plan: Plan, target: Target, options: Options) -> (Plan, Played, Report) {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("runtime");
    runtime.block_on(async {
        let mut plan = plan;
        let looked = preflight::check(&mut plan, &target).await.expect("preflight");
        assert_eq!(looked.problems, Vec::<String>::new());
        let plan = Arc::new(plan);
        let played = play_on(&plan, &target, &options).await;
        let report = Report::new(&plan, target.name(), &options, looked, &played, None);
        (Arc::into_inner(plan).expect("the only one"), played, report)
    })
}

/// Plays records against a baseline, then against a server, and reports.
pub fn play_both(plan: Plan, baseline: &Target, target: &Target, options: &Options) -> Report {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("runtime");
    runtime.block_on(async {
        let mut plan = plan;
        let looked = preflight::check(&mut plan, target).await.expect("preflight");
        let plan = Arc::new(plan);
        let there = play_on(&plan, baseline, options).await;
        let here = play_on(&plan, target, options).await;
        Report::new(&plan, target.name(), options, looked, &here, Some((&baseline.name(), &there)))
    })
}

async fn play_on(plan: &Arc<Plan>, target: &Target, options: &Options) -> Played {
    let stopper = Stopper::default();
    let play = run::play(Arc::clone(plan), target.clone(), options.clone(), Arc::default(), &stopper);
    tokio::time::timeout(PLAY_LIMIT, play).await.expect("the replay hangs").expect("play")
}

/// The plan of records.
pub fn plan(meta: &Meta, records: &[Record<'static>], options: &plan::Options) -> Plan {
    let plan = plan::from_records(meta.clone(), records.iter().cloned(), options).expect("a plan");
    // The relay loses nothing.
    assert_eq!((plan.holes, plan.headless_sessions), (0, 0));
    plan
}

/// The messages of a unit.
pub fn messages(plan: &Plan, session: &plan::Session, unit: &plan::Unit) -> Vec<u8> {
    let steps = session.steps[unit.steps()].iter();
    steps.flat_map(|step| plan.messages.read(&step.bytes()).expect("messages")).collect()
}

/// How many units were answered.
pub fn answered(played: &Played) -> usize {
    let units = played.sessions.iter().flat_map(|session| &session.units);
    units.filter(|unit| matches!(unit, UnitOutcome::Answered(_))).count()
}
