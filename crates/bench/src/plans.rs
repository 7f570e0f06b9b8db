// SPDX-License-Identifier: Apache-2.0
//! The points of each experiment.

use clap::ValueEnum as _;

use crate::experiments::{Options, Rounds, Step, Work};
use crate::pgbench::{Load, Protocol};
use crate::profiles::POOL_SIZE;
use crate::sample::Point;
use crate::systems::{Login, LoginKind, PoolMode, Setup};
use crate::tasks::{CopyDirection, Script, Task};
use crate::workloads::{self, TPCC};

const ALL_MODES: &[Protocol] = &[Protocol::Simple, Protocol::Extended, Protocol::Prepared];
const SELECT_1: &str = "select 1;\n";

/// Rounds of the proof: a difference of 5 % must be told from one of 2.5 %, which ten rounds do only on a machine that is
/// as quiet as can be.
const PROOF_ROUNDS: u32 = 30;

/// Clients where threads are compared by their logins.
const LOGINS_AT_ONCE: u32 = 16;

/// Clients that the system must admit beyond those of the load: checks and administration.
const SPARE_CLIENTS: u32 = 20;

/// Transactions of TPC-C per second at a fixed rate: some 30 statements each.
const TPCC_RATE: f64 = 100.0;
/// Its types in the order of the workload's scripts, as the metrics of [`crate::tasks::tpcc::TYPES`] begin.
const TPCC_TYPES: [&str; 5] = ["new_order", "payment", "order_status", "delivery", "stock_level"];

fn first_pool(options: &Options) -> u32 {
    options.pool_sizes.first().copied().unwrap_or(POOL_SIZE)
}

fn setup(options: &Options, most_clients: u32) -> Setup {
    Setup::plain(first_pool(options), most_clients + SPARE_CLIENTS)
}

fn most(clients: &[u32]) -> u32 {
    clients.iter().copied().max().unwrap_or(1)
}

fn pgbench(group: u32, point: Point, setup: Setup, load: Load) -> Step {
    Step::new(group, point, setup, Work::Pgbench { load, workload: String::new() })
}

fn workload_step(
    group: u32,
    point: Point,
    setup: Setup,
    mut load: Load,
    name: &str,
    options: &Options,
) -> Step {
    let workload = workloads::find(name).expect("names are checked before a plan is made");
    load.scripts = workload.scripts();
    load.variables = workload.variables(options.scale);
    Step::new(group, point, setup, Work::Pgbench { load, workload: name.to_owned() })
}

/// Named statements are compared with PgBouncer's unnamed ones, so those are measured beside them.
fn with_extended(mut modes: Vec<Protocol>) -> Vec<Protocol> {
    if modes.contains(&Protocol::Prepared) && !modes.contains(&Protocol::Extended) {
        modes.push(Protocol::Extended);
    }
    modes.sort();
    modes.dedup();
    modes
}

/// Extended and prepared share a group because one is the other's measure.
fn group_of(index: usize, mode: Protocol) -> u32 {
    2 * index as u32 + u32::from(mode != Protocol::Simple)
}

/// select 1 over clients, pool sizes and protocols.
pub fn tax(options: &Options) -> Vec<Step> {
    let clients = options.clients_or(if options.quick { &[1, 8] } else { &[1, 8, 64] });
    let modes = with_extended(options.modes_or(if options.quick { &[Protocol::Simple] } else { ALL_MODES }));
    // Where clients may have to share, the point says among how many.
    let shared = |count: u32| options.pool_sizes.len() > 1 || count > POOL_SIZE;
    let mut steps = Vec::new();
    for (index, &count) in clients.iter().enumerate() {
        for (nth, &pool) in options.pool_sizes.iter().enumerate() {
            if nth > 0 && count <= first_pool(options) {
                continue;
            }
            for &mode in &modes {
                let mut point = Point::default().with("clients", count).with("mode", mode.name());
                if shared(count) {
                    point = point.with("pool", pool);
                }
                let group = group_of(index * options.pool_sizes.len() + nth, mode);
                let setup = Setup::plain(pool, most(&clients) + SPARE_CLIENTS);
                steps.push(pgbench(group, point, setup, Load::new(count, mode, SELECT_1)));
            }
        }
    }
    steps
}

/// A fixed rate over many connections.
pub fn many(options: &Options) -> Vec<Step> {
    let clients = options.clients_or(if options.quick { &[200] } else { &[1000] });
    let names = options.workloads_or(if options.quick {
        &["noop"]
    } else {
        &["noop", "smallbank", "tatp", "twitter", "ycsb"]
    });
    let mut steps = Vec::new();
    for &count in &clients {
        for name in &names {
            let point = Point::default().with("clients", count).with("workload", name);
            let mut load = Load::new(count, Protocol::Simple, "");
            load.rate = Some(options.rate);
            let group = steps.len() as u32;
            steps.push(workload_step(group, point, setup(options, most(&clients)), load, name, options));
        }
    }
    steps
}

/// Connect per transaction at a fixed rate, session pooling.
pub fn serverless(options: &Options) -> Vec<Step> {
    let clients = options.clients_or(&[20]);
    let mut steps = Vec::new();
    for &count in &clients {
        // A direct connection manages about 600 logins per second on two cores, and pgbench derives keys for about 230: rates that
        // all can carry keep latency finite.
        for (login, name, most_per_s) in [(Login::Trust, "trust", 300.0), (Login::Scram, "scram", 100.0)] {
            let setup = Setup { pool_mode: PoolMode::Session, login, ..setup(options, most(&clients)) };
            let mut load = Load::new(count, Protocol::Simple, "");
            let rate = options.rate.min(most_per_s);
            load.rate = Some(rate);
            load.reconnect = true;
            let point =
                Point::default().with("clients", count).with("login", name).with("rate", format!("{rate}/s"));
            let group = steps.len() as u32;
            steps.push(workload_step(group, point, setup, load, "ycsb", options));
        }
    }
    steps
}

/// Empty statements over pool modes, server sockets and protocols.
pub fn protocol(options: &Options) -> Vec<Step> {
    let clients = options.clients_or(&[20]);
    let modes = with_extended(options.modes_or(if options.quick { &[Protocol::Simple] } else { ALL_MODES }));
    let mut steps = Vec::new();
    for &count in &clients {
        for pool_mode in [PoolMode::Transaction, PoolMode::Session] {
            for server_unix in [false, true] {
                for &mode in &modes {
                    let mut setup = Setup { pool_mode, server_unix, ..setup(options, most(&clients)) };
                    // A session holds its server connection, so fewer would only make clients wait.
                    setup.pool_size = setup.pool_size.max(count);
                    let point = Point::default()
                        .with("clients", count)
                        .with("pooling", pool_mode.name())
                        .with("server", if server_unix { "unix" } else { "tcp" })
                        .with("mode", mode.name());
                    let group = group_of(steps.len() / modes.len(), mode);
                    steps.push(pgbench(group, point, setup, Load::new(count, mode, ";\n")));
                }
            }
        }
    }
    steps
}

/// Empty statements through forwarders without a protocol, of clients by TCP and by unix socket; PgBouncer in session pooling beside them.
pub fn forward(options: &Options) -> Vec<Step> {
    let clients = options.clients_or(if options.quick { &[8] } else { &[1, 8, 32] });
    let mut steps = Vec::new();
    for &count in &clients {
        for client_unix in [false, true] {
            let mut setup =
                Setup { pool_mode: PoolMode::Session, client_unix, ..setup(options, most(&clients)) };
            // A forwarder has a server connection for each client.
            setup.pool_size = setup.pool_size.max(most(&clients) + SPARE_CLIENTS);
            let point = Point::default()
                .with("clients", count)
                .with("client", if client_unix { "unix" } else { "tcp" });
            let load = Load::new(count, Protocol::Simple, ";\n");
            steps.push(pgbench(steps.len() as u32, point, setup, load));
        }
    }
    steps
}

/// BEGIN, a query, COMMIT over a range of clients.
pub fn sweep(options: &Options) -> Vec<Step> {
    let clients =
        options.clients_or(if options.quick { &[1, 8, 32] } else { &[1, 2, 4, 8, 16, 32, 64, 128] });
    let steps = clients.iter().enumerate().map(|(index, &count)| {
        let point = Point::default().with("clients", count);
        let load = Load::new(count, Protocol::Simple, "begin;\nselect 1;\ncommit;\n");
        let step = pgbench(index as u32, point, setup(options, most(&clients)), load);
        Step { round_trips: true, ..step }
    });
    steps.collect()
}

/// A growing number of queries per transaction in both pool modes.
pub fn queries(options: &Options) -> Vec<Step> {
    let counts: &[u32] = if options.quick { &[0, 1, 8] } else { &[0, 1, 2, 4, 8, 16] };
    let clients = options.clients_or(&[16]);
    let mut steps = Vec::new();
    for &count in &clients {
        for &queries in counts {
            for pool_mode in [PoolMode::Transaction, PoolMode::Session] {
                let script = match queries {
                    0 => SELECT_1.to_owned(),
                    _ => format!("begin;\n{}commit;\n", SELECT_1.repeat(queries as usize)),
                };
                let mut setup = Setup { pool_mode, ..setup(options, most(&clients)) };
                setup.pool_size = setup.pool_size.max(count);
                let point = Point::default()
                    .with("clients", count)
                    .with("queries", queries)
                    .with("pooling", pool_mode.name());
                steps.push(pgbench(queries, point, setup, Load::new(count, Protocol::Simple, &script)));
            }
        }
    }
    steps
}

/// Two executions of a prepared statement per transaction.
pub fn extended(options: &Options) -> Vec<Step> {
    let script = "\\set a random(1, 1000000)\nbegin;\nselect :a + 1;\nselect :a + 1;\ncommit;\n";
    let clients = options.clients_or(if options.quick { &[8] } else { &[1, 8, 32] });
    let mut steps = Vec::new();
    for (index, &count) in clients.iter().enumerate() {
        for mode in [Protocol::Extended, Protocol::Prepared] {
            let mut setup = setup(options, most(&clients));
            // pgbench prepares without attending to the thread's other clients: one that waits for a server
            // would keep them from ending the transactions in which they hold all servers.
            setup.pool_size = setup.pool_size.max(most(&clients));
            let point = Point::default().with("clients", count).with("mode", mode.name());
            steps.push(pgbench(index as u32, point, setup, Load::new(count, mode, script)));
        }
    }
    steps
}

/// YCSB reads at a fixed rate, for the division of CPU.
pub fn cpu(options: &Options) -> Vec<Step> {
    let clients = options.clients_or(if options.quick { &[100] } else { &[1000] });
    let steps = clients.iter().enumerate().map(|(index, &count)| {
        let mut load = Load::new(count, Protocol::Simple, "");
        load.rate = Some(options.rate);
        let point = Point::default().with("clients", count);
        workload_step(index as u32, point, setup(options, most(&clients)), load, "ycsb", options)
    });
    steps.collect()
}

/// Each workload at full speed.
pub fn workloads(options: &Options) -> Vec<Step> {
    let clients = options.clients_or(&[16]);
    let names = options.workloads_or(if options.quick {
        &["ycsb"]
    } else {
        &["noop", "select1", "ycsb", "ycsb-mixed", "smallbank", "tatp", "tpcb", "twitter"]
    });
    let mut steps = Vec::new();
    for &count in &clients {
        for name in &names {
            let point = Point::default().with("clients", count).with("workload", name);
            let load = Load::new(count, Protocol::Simple, "");
            let group = steps.len() as u32;
            steps.push(workload_step(group, point, setup(options, most(&clients)), load, name, options));
        }
    }
    steps
}

/// TPC-C in both pool modes.
pub fn tpcc(options: &Options) -> Vec<Step> {
    let clients = options.clients_or(&[20]);
    let mut steps = Vec::new();
    for &count in &clients {
        for pool_mode in [PoolMode::Transaction, PoolMode::Session] {
            let setup = Setup { pool_mode, ..setup(options, most(&clients)) };
            let point = Point::default().with("clients", count).with("pooling", pool_mode.name());
            steps.push(tpcc_step(steps.len() as u32, point, setup, count, options));
        }
    }
    steps
}

/// TPC-C at a rate that two cores hold.
pub fn tpcc_rate(options: &Options) -> Vec<Step> {
    let clients = options.clients_or(if options.quick { &[50] } else { &[200] });
    let steps = clients.iter().enumerate().map(|(index, &count)| {
        let rate = options.rate.min(TPCC_RATE);
        let point = Point::default()
            .with("clients", count)
            .with("rate", format!("{rate}/s"))
            .with("warehouses", 4 * options.scale);
        let mut load = Load::new(count, Protocol::Simple, "");
        load.rate = Some(rate);
        load.types = TPCC_TYPES.to_vec();
        workload_step(index as u32, point, setup(options, most(&clients)), load, TPCC, options)
    });
    steps.collect()
}

fn tpcc_step(group: u32, point: Point, mut setup: Setup, clients: u32, options: &Options) -> Step {
    let warehouses = if options.quick { 1 } else { 4 } * options.scale;
    // go-tpc holds some connections beside those of its clients.
    setup.pool_size = setup.pool_size.max(clients + 5);
    let work = Work::Task(Task::Tpcc { clients, warehouses });
    Step::new(group, point.with("warehouses", warehouses), setup, work)
}

/// One and two CPUs for the pooler.
pub fn cores(options: &Options) -> Vec<Step> {
    let clients = options.clients_or(&[32]);
    let names =
        options.workloads_or(if options.quick { &["noop", "ycsb"] } else { &["noop", "ycsb", "tpcc"] });
    let mut steps = Vec::new();
    for &count in &clients {
        for name in &names {
            for (cores, cpus) in [(1, "0"), (2, "0-1")] {
                let setup = Setup { cpus: Some(cpus.to_owned()), ..setup(options, most(&clients)) };
                let point =
                    Point::default().with("clients", count).with("cores", cores).with("workload", name);
                let group = steps.len() as u32 / 2;
                steps.push(if name == "tpcc" {
                    // Its named statements need a session where the pooler does not follow them.
                    let setup = Setup { pool_mode: PoolMode::Session, ..setup };
                    tpcc_step(group, point, setup, count, options)
                } else {
                    let load = Load::new(count, Protocol::Simple, "");
                    workload_step(group, point, setup, load, name, options)
                });
            }
        }
    }
    steps
}

/// The tax with TLS clients.
pub fn tls(options: &Options) -> Vec<Step> {
    let clients = options.clients_or(if options.quick { &[8] } else { &[1, 8, 64] });
    let steps = clients.iter().enumerate().map(|(index, &count)| {
        let setup = Setup { client_tls: true, ..setup(options, most(&clients)) };
        let point = Point::default().with("clients", count).with("mode", "simple");
        pgbench(index as u32, point, setup, Load::new(count, Protocol::Simple, SELECT_1))
    });
    steps.collect()
}

/// Connect, select 1, close, as fast as it goes.
pub fn logins(options: &Options) -> Vec<Step> {
    let clients = options.clients_or(&[4]);
    let mut steps = Vec::new();
    for &count in &clients {
        let pool_modes = [PoolMode::Transaction, PoolMode::Session];
        for &pool_mode in if options.quick { &pool_modes[..1] } else { &pool_modes } {
            for &kind in options.logins.as_deref().unwrap_or(LoginKind::value_variants()) {
                let (login, client_tls, rsa, name) = match kind {
                    LoginKind::Trust => (Login::Trust, false, false, "trust"),
                    LoginKind::Scram => (Login::Scram, false, false, "scram"),
                    LoginKind::Tls => (Login::Trust, true, false, "tls"),
                    LoginKind::TlsRsa4096 => (Login::Trust, true, true, "tls-rsa4096"),
                };
                // Enough logins under way at once that chance gives each thread of the pooler its share of them.
                let count = if rsa { count.max(LOGINS_AT_ONCE) } else { count };
                // Connections that are being closed count too.
                let setup = Setup { pool_mode, login, client_tls, rsa, ..setup(options, 4 * count) };
                let mut load = Load::new(count, Protocol::Simple, SELECT_1);
                load.reconnect = true;
                load.slow_logins = rsa || login == Login::Scram;
                let point = Point::default()
                    .with("clients", count)
                    .with("login", name)
                    .with("pooling", pool_mode.name());
                steps.push(pgbench(steps.len() as u32, point, setup, load));
            }
        }
    }
    steps
}

/// Clients that share a pool smaller than themselves under several application names.
pub fn names(options: &Options) -> Vec<Step> {
    let clients = options.clients_or(&[16]);
    let mut steps = Vec::new();
    for &count in &clients {
        for names in [1, 4] {
            let mut setup = setup(options, most(&clients));
            setup.pool_size = options.pool_sizes.first().copied().unwrap_or(4);
            let point =
                Point::default().with("clients", count).with("names", names).with("pool", setup.pool_size);
            let mut load = Load::new(count, Protocol::Simple, SELECT_1);
            load.application_names = names;
            steps.push(pgbench(steps.len() as u32, point, setup, load));
        }
    }
    steps
}

/// select 1 with clients on unix sockets, servers too or not.
pub fn unix(options: &Options) -> Vec<Step> {
    let clients = options.clients_or(if options.quick { &[8] } else { &[1, 8, 64] });
    let mut steps = Vec::new();
    for &count in &clients {
        for server_unix in [false, true] {
            let setup = Setup { client_unix: true, server_unix, ..setup(options, most(&clients)) };
            let point = Point::default()
                .with("clients", count)
                .with("server", if server_unix { "unix" } else { "tcp" });
            let load = Load::new(count, Protocol::Simple, SELECT_1);
            steps.push(pgbench(steps.len() as u32, point, setup, load));
        }
    }
    steps
}

/// Idle clients beside a fixed rate.
pub fn idle(options: &Options) -> Vec<Step> {
    let clients = options.clients_or(if options.quick { &[1000] } else { &[10_000] });
    let steps = clients.iter().enumerate().map(|(index, &count)| {
        let point = Point::default().with("clients", count);
        let work = Work::Task(Task::Idle { clients: count, rate: options.rate });
        Step::new(index as u32, point, setup(options, count + 64), work)
    });
    steps.collect()
}

/// Readers of a large result that stop.
pub fn slow(options: &Options) -> Vec<Step> {
    stalled(options, CopyDirection::Out)
}

/// Server processes that stop under large copies in.
pub fn slow_in(options: &Options) -> Vec<Step> {
    stalled(options, CopyDirection::In)
}

fn stalled(options: &Options, direction: CopyDirection) -> Vec<Step> {
    let clients = options.clients_or(if options.quick { &[1] } else { &[1, 32] });
    let steps = clients.iter().enumerate().map(|(index, &count)| {
        let mut setup = setup(options, most(&clients));
        // One is left for the client that is watched beside them.
        setup.pool_size = setup.pool_size.max(count + 1);
        // One copy has the size that the project's limits name; many share it, each still far beyond any buffer.
        let megabytes = (if options.quick { 300 } else { 2400 } / u64::from(count)).max(50);
        let point =
            Point::default().with("clients", count).with("copy", direction.name()).with("mb", megabytes);
        let pause_s = options.pause_s;
        let work = Work::Task(Task::Stalled { clients: count, direction, megabytes, pause_s });
        // One's limits are about another client's latency, which varies with the machine; those of many are about sizes.
        let rounds = if count == 1 { Rounds::AsAsked } else { Rounds::AtMost(3) };
        Step { rounds, ..Step::new(index as u32, point, setup, work) }
    });
    steps.collect()
}

/// A copy of 2.4 GB out, without any pause.
pub fn copy(options: &Options) -> Vec<Step> {
    whole(options, CopyDirection::Out)
}

/// The same into the server.
pub fn copy_in(options: &Options) -> Vec<Step> {
    whole(options, CopyDirection::In)
}

fn whole(options: &Options, direction: CopyDirection) -> Vec<Step> {
    let megabytes = if options.quick { 300 } else { 2400 };
    let point = Point::default().with("copy", direction.name()).with("mb", megabytes);
    let work = Work::Task(Task::Copy { direction, megabytes });
    vec![Step::new(0, point, setup(options, 1), work)]
}

/// A fixed rate with a second server that gets the same, and full speed, in session pooling: Pgpool-II has no other.
pub fn mirroring(options: &Options) -> Vec<Step> {
    mirrored(options, PoolMode::Session)
}

/// The same in transaction pooling, where clients of mirrors are in lanes.
pub fn mirroring_lanes(options: &Options) -> Vec<Step> {
    mirrored(options, PoolMode::Transaction)
}

fn mirrored(options: &Options, pool_mode: PoolMode) -> Vec<Step> {
    let clients = options.clients_or(&[20]);
    let mut steps = Vec::new();
    for &count in &clients {
        for name in options.workloads_or(&["ycsb", "tpcb-apart"]) {
            for rate in [Some(options.rate.min(500.0)), None] {
                let mut setup = Setup { pool_mode, ..setup(options, most(&clients)) };
                setup.pool_size = setup.pool_size.max(count);
                let speed = rate.map_or_else(|| "full".to_owned(), |rate| format!("{rate}/s"));
                let point =
                    Point::default().with("clients", count).with("rate", speed).with("workload", &name);
                let mut load = Load::new(count, Protocol::Simple, "");
                load.rate = rate;
                let group = steps.len() as u32;
                steps.push(workload_step(group, point, setup, load, &name, options));
            }
        }
    }
    steps
}

/// The server under a tracer: eight clients and more than the machine can serve at once, and fifty on the mixes of the
/// tracing paper.
pub fn tracing(options: &Options) -> Vec<Step> {
    let own: &[&str] =
        if options.quick { &["select-only"] } else { &["select-only", "tpcb", "ycsb-90-10", "ycsb-10-90"] };
    let mut steps = Vec::new();
    for name in options.workloads_or(own) {
        let clients = options.clients_or(if name.starts_with("ycsb") {
            &[50]
        } else if options.quick {
            &[8]
        } else {
            &[8, 32]
        });
        for &count in &clients {
            let point = Point::default().with("clients", count).with("workload", &name);
            let load = Load::new(count, Protocol::Simple, "");
            let group = steps.len() as u32;
            steps.push(workload_step(group, point, setup(options, most(&clients)), load, &name, options));
        }
    }
    steps
}

/// MariaDB under a tracer, by sysbench's own scripts.
pub fn tracing_mariadb(options: &Options) -> Vec<Step> {
    by_sysbench(options, 8, &[Script::ReadOnly, Script::ReadWrite])
}

/// MariaDB under a tracer, by the mixes of the tracing paper.
pub fn tracing_mariadb_ycsb(options: &Options) -> Vec<Step> {
    by_sysbench(options, 50, &[Script::Ycsb { reads: 90 }, Script::Ycsb { reads: 10 }])
}

fn by_sysbench(options: &Options, clients: u32, scripts: &[Script]) -> Vec<Step> {
    let clients = options.clients_or(&[clients]);
    let mut steps = Vec::new();
    for &count in &clients {
        for &script in scripts {
            let point = Point::default().with("clients", count).with("script", script.name());
            let work = Work::Task(Task::Sysbench { clients: count, script });
            steps.push(Step::new(steps.len() as u32, point, setup(options, count), work));
        }
    }
    steps
}

/// pg_dump of many tables.
pub fn dump(options: &Options) -> Vec<Step> {
    let rows = if options.quick { 100_000 } else { 1_000_000 } * u64::from(options.scale);
    let setup = Setup { pool_mode: PoolMode::Session, ..setup(options, 20) };
    let point = Point::default().with("tables", 20).with("rows", rows);
    vec![Step::new(0, point, setup, Work::Task(Task::Dump { tables: 20, rows }))]
}

/// select 1 with one client: the slowed twin loses what it is stopped for.
pub fn proof(options: &Options) -> Vec<Step> {
    let clients = options.clients_or(&[1]);
    let steps = clients.iter().enumerate().map(|(index, &count)| {
        let point = Point::default().with("clients", count).with("mode", "simple");
        let load = Load::new(count, Protocol::Simple, SELECT_1);
        let step = pgbench(index as u32, point, setup(options, most(&clients)), load);
        Step { rounds: Rounds::AtLeast(PROOF_ROUNDS), ..step }
    });
    steps.collect()
}
