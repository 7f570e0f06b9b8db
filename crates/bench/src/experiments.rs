// SPDX-License-Identifier: Apache-2.0
//! The table of experiments: what each shows, which experiment of which paper it follows, and its points.

use crate::pgbench::{Load, Protocol};
use crate::plans;
use crate::systems::{LoginKind, Setup};
use crate::tasks::Task;
use crate::workloads::TPCC;

/// Settings of the command line that shape the points of an experiment.
#[derive(Clone, Debug)]
pub struct Options {
    /// Clients, or the experiment's own.
    pub clients: Option<Vec<u32>>,
    /// Protocols, or the experiment's own.
    pub modes: Option<Vec<Protocol>>,
    /// Pool sizes: the first everywhere, further ones where there are more clients than that.
    pub pool_sizes: Vec<u32>,
    /// Workloads, or the experiment's own.
    pub workloads: Option<Vec<String>>,
    /// Kinds of logins, or all.
    pub logins: Option<Vec<LoginKind>>,
    /// Transactions per second of the experiments with a fixed rate.
    pub rate: f64,
    /// Size of workloads as a multiple of their small default.
    pub scale: u32,
    /// Seconds for which receivers of copies stop.
    pub pause_s: u64,
    /// Smaller and shorter everywhere.
    pub quick: bool,
}

impl Options {
    /// Clients of the command line, else `own`.
    #[must_use]
    pub fn clients_or(&self, own: &[u32]) -> Vec<u32> {
        self.clients.clone().unwrap_or_else(|| own.to_vec())
    }

    /// Protocols of the command line, else `own`.
    #[must_use]
    pub fn modes_or(&self, own: &[Protocol]) -> Vec<Protocol> {
        self.modes.clone().unwrap_or_else(|| own.to_vec())
    }

    /// Workloads of the command line, else `own`.
    #[must_use]
    pub fn workloads_or(&self, own: &[&str]) -> Vec<String> {
        self.workloads.clone().unwrap_or_else(|| own.iter().map(|name| (*name).to_owned()).collect())
    }
}

/// What is done at a point.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// pgbench with its built-in way of measuring; the workload's data must be loaded.
    Pgbench {
        /// The load.
        load: Load,
        /// Workload whose tables it needs.
        workload: String,
    },
    /// Something of our own.
    Task(Task),
}

/// How often a step is measured, when that differs from what the command line asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounds {
    /// As often as asked.
    #[default]
    AsAsked,
    /// Sizes that no drift of the machine moves, and long tasks.
    AtMost(u32),
    /// Differences so small that they need more.
    AtLeast(u32),
}

impl Rounds {
    /// The rounds when `asked` are asked for.
    #[must_use]
    pub fn of(self, asked: u32) -> u32 {
        match self {
            Self::AsAsked => asked,
            Self::AtMost(most) => asked.min(most),
            Self::AtLeast(least) => asked.max(least),
        }
    }
}

/// One point of an experiment, for every system.
#[derive(Clone, Debug)]
pub struct Step {
    /// Steps of one group follow each other closely: what is compared must be measured at about the same time.
    pub group: u32,
    /// Coordinates.
    pub point: crate::sample::Point,
    /// Equal settings.
    pub setup: Setup,
    /// What is done.
    pub work: Work,
    /// How often.
    pub rounds: Rounds,
    /// Also read TCP's round-trip times on both sides of the pooler.
    pub round_trips: bool,
}

impl Step {
    /// Whether its data are made by go-tpc.
    #[must_use]
    pub fn needs_go_tpc(&self) -> bool {
        match &self.work {
            Work::Pgbench { workload, .. } => workload == TPCC,
            Work::Task(task) => matches!(task, Task::Tpcc { .. }),
        }
    }

    /// A step that is measured as often as asked.
    #[must_use]
    pub fn new(group: u32, point: crate::sample::Point, setup: Setup, work: Work) -> Self {
        Self { group, point, setup, work, rounds: Rounds::AsAsked, round_trips: false }
    }
}

/// The scale at which a paper ran its experiment.
#[derive(Clone, Copy, Debug)]
pub struct PaperScale {
    /// Rows and size of its data, as far as it says.
    pub data: &'static str,
    /// Clients.
    pub clients: &'static str,
    /// Length, as far as it says.
    pub seconds: &'static str,
}

/// One experiment.
#[derive(Clone, Copy, Debug)]
pub struct Experiment {
    /// What `--experiment` takes.
    pub name: &'static str,
    /// Its heading.
    pub title: &'static str,
    /// What it shows, one paragraph.
    pub shows: &'static str,
    /// Section of a paper that it follows, or why it follows none.
    pub paper: &'static str,
    /// That paper's scale.
    pub scale: PaperScale,
    /// Systems when the command line names none; those not installed are left out, said aloud.
    pub systems: &'static [&'static str],
    /// Its points.
    pub plan: fn(&Options) -> Vec<Step>,
}

const NONE: PaperScale = PaperScale { data: "-", clients: "-", seconds: "-" };
const ALL: &[&str] = &["direct", "pgbouncer", "ours-off", "ours-d", "ours-a", "ours-b"];
const OPEN_LOOP: &[&str] = &["direct", "direct-few", "pgbouncer", "ours-off", "ours-d", "ours-a", "ours-b"];
const WITH_PGPOOL: &[&str] =
    &["direct", "pgbouncer", "pgpool", "odyssey", "pgdog", "pgcat", "ours-off", "ours-d", "ours-a", "ours-b"];
const USER_SPACE: &[&str] = &["direct", "pgbouncer", "ours-off", "ours-off-1"];

/// Every experiment in the order of the report.
pub const EXPERIMENTS: &[Experiment] = &[
    Experiment {
        name: "tax",
        title: "The tax of a pooler",
        shows: "How much CPU a pooler adds to the cheapest transaction there is, select 1, beyond what a direct \
                connection costs in the same round, and what is left of the throughput. All systems share the same \
                cores with pgbench and PostgreSQL, so CPU that a pooler wastes is throughput lost. The limits of \
                the project are about this table.",
        paper: "none; closest are Tigger 6.5 and 6.6, and kpgpool 6.1 and 6.5, which give throughput and pooler CPU apart",
        scale: NONE,
        systems: &[
            "direct",
            "pgbouncer",
            "pgbouncer-unix",
            "ours-off",
            "ours-off-1",
            "ours-off-unix",
            "ours-d",
            "ours-a",
            "ours-b",
            "odyssey",
            "pgdog",
            "pgcat",
        ],
        plan: plans::tax,
    },
    Experiment {
        name: "many",
        title: "Many clients at a fixed rate",
        shows: "Latency when many connections are open and few are active: the same 2,000 transactions per second \
                spread over all of them, counted from the moment each should have begun. A pooler wins when it \
                saves PostgreSQL its idle processes and loses when its own work per transaction shows. The tax is taken from \
                the same rate over as few direct connections as the pool has: a thousand direct ones cost more than a pooler.",
        paper: "Tigger 6.2, table 2 and figure 10",
        scale: PaperScale {
            data: "SmallBank 3.4 GB, TATP 1.9 GB, Twitter 4.4 GB, YCSB 2.3 GB",
            clients: "10,000",
            seconds: "not given, 5 runs",
        },
        systems: OPEN_LOOP,
        plan: plans::many,
    },
    Experiment {
        name: "serverless",
        title: "Serverless clients",
        shows: "Each transaction opens a connection, runs one query and closes, as a function in a cloud does. \
                Session pooling, YCSB reads at a fixed rate; by trust, where the pooler saves the fork of a backend, \
                and by SCRAM, where the exchange of proofs is added.",
        paper: "Tigger 6.3, figure 11",
        scale: PaperScale { data: "YCSB 2.3 GB", clients: "10,000", seconds: "not given, 5 runs" },
        systems: ALL,
        plan: plans::serverless,
    },
    Experiment {
        name: "protocol",
        title: "Protocol efficiency",
        shows: "Throughput of empty statements, where nothing but the handling of messages counts: session against \
                transaction pooling, TCP against a unix socket to the server, and the three ways to submit a \
                statement. What transaction pooling costs over session pooling is the price of finding transaction \
                ends. Ours with kernel_path off is the same code with the kernel's fast path switched off.",
        paper: "Tigger 6.5, figure 13; kpgpool 6.3 and 6.4 for sessions and prepared statements",
        scale: PaperScale { data: "none (No-op)", clients: "20", seconds: "not given, 5 runs" },
        systems: WITH_PGPOOL,
        plan: plans::protocol,
    },
    Experiment {
        name: "forward",
        title: "Naive byte forwarding",
        shows: "What a hop costs without any protocol or pool: a copy in user space by one thread and one epoll instance, and a \
                redirect by a program of one line in the kernel, between the forwarder's two sockets (lane D's way) or between its \
                client's and the backend's (lane A's). Each client has a server \
                connection of its own; empty statements. What separates copy and redirect is all that a lane can save. With \
                unix sockets too, which have no lane: beside what one could gain is lane A to the same server by TCP.",
        paper: "kpgpool 4.1.3, figure 4.1",
        scale: PaperScale { data: "none (sockperf)", clients: "not given", seconds: "not given" },
        systems: &[
            "direct",
            "forward-user",
            "forward-kernel",
            "forward-same-host",
            "forward-user-unix",
            "forward-kernel-unix",
            "pgbouncer",
            "pgbouncer-unix",
            "ours-a",
        ],
        plan: plans::forward,
    },
    Experiment {
        name: "sweep",
        title: "Concurrency with explicit transactions",
        shows: "Throughput and latency of BEGIN, one query, COMMIT as clients grow past the pool: three round trips \
                per transaction, in the simple protocol. The legs are TCP's own round-trip times, client to pooler \
                and pooler to server.",
        paper: "kpgpool 6.1 and 6.2, figures 6.1 and 6.2",
        scale: PaperScale { data: "not given", clients: "up to high load, not given", seconds: "not given" },
        systems: ALL,
        plan: plans::sweep,
    },
    Experiment {
        name: "queries",
        title: "Queries per transaction",
        shows: "How the cost of handing a server connection over spreads over more queries per transaction; 0 means \
                a query outside of any transaction. Session pooling of the same is the bound, for it never hands over.",
        paper: "kpgpool 6.3, figures 6.3 and 6.4",
        scale: PaperScale { data: "not given", clients: "not given", seconds: "not given" },
        systems: ALL,
        plan: plans::queries,
    },
    Experiment {
        name: "extended",
        title: "Prepared statements in transactions",
        shows: "Two executions of one prepared statement per transaction, parameters differing. PgBouncer 1.18 has \
                no named statements in transaction pooling and is shown with the unnamed statement instead.",
        paper: "kpgpool 6.4, figures 6.5 and 6.6",
        scale: PaperScale { data: "not given", clients: "not given", seconds: "not given" },
        systems: ALL,
        plan: plans::extended,
    },
    Experiment {
        name: "cpu",
        title: "Where the CPU goes",
        shows: "The same YCSB reads at the same fixed rate through every system: user, system and softirq time of the \
                whole machine and of the pooler's cgroup, and context switches, per transaction. Work that a lane \
                moves out of the pooler's process must not hide in softirqs or in PostgreSQL: hence the machine.",
        paper: "Tigger 6.6, figure 14a; kpgpool 6.5, figure 6.7 (cgroup only)",
        scale: PaperScale { data: "YCSB 2.3 GB", clients: "10,000", seconds: "not given, 5 runs" },
        systems: OPEN_LOOP,
        plan: plans::cpu,
    },
    Experiment {
        name: "workloads",
        title: "OLTP workloads",
        shows: "Throughput of whole workloads at full speed, where the queries do work and a pooler is a smaller part.",
        paper: "Tigger 6.1 for the choice of workloads; at full speed only its 6.8",
        scale: PaperScale {
            data: "1.9 to 4.4 GB each",
            clients: "10,000 (figure 16: not given)",
            seconds: "not given",
        },
        systems: ALL,
        plan: plans::workloads,
    },
    Experiment {
        name: "tpcc",
        title: "TPC-C, its five types apart",
        shows: "The mix of TPC-C as fast as it goes, by go-tpc: mean and p99 of each type, whose lengths differ by a \
                factor of ten. go-tpc prepares named statements, which PgBouncer 1.18 cannot follow in transaction \
                pooling; in session pooling all take part.",
        paper: "Tigger 6.2, table 3 (there at a fixed rate, as in tpcc-rate)",
        scale: PaperScale { data: "20 warehouses, 2.1 GB", clients: "10,000", seconds: "not given, 5 runs" },
        systems: ALL,
        plan: plans::tpcc,
    },
    Experiment {
        name: "tpcc-rate",
        title: "TPC-C at a fixed rate, its five types apart",
        shows: "100 transactions of TPC-C per second over many connections, open loop: mean and p99 of each type, counted from the \
                moment each should have begun. By pgbench, statement by statement and in the simple protocol, on \
                go-tpc's data; so PgBouncer takes part in transaction pooling.",
        paper: "Tigger 6.2, table 3",
        scale: PaperScale { data: "20 warehouses, 2.1 GB", clients: "10,000", seconds: "not given, 5 runs" },
        systems: OPEN_LOOP,
        plan: plans::tpcc_rate,
    },
    Experiment {
        name: "cores",
        title: "Cores",
        shows: "Throughput when the pooler may use one CPU and when it may use two; the other parts are not limited. TPC-C by go-tpc in session pooling.",
        paper: "Tigger 6.8, figure 16 (there by instance size, 2 to 32 virtual CPUs)",
        scale: PaperScale { data: "TPC-C 2.1 GB, YCSB 2.3 GB", clients: "not given", seconds: "not given" },
        systems: ALL,
        plan: plans::cores,
    },
    Experiment {
        name: "tls",
        title: "TLS clients",
        shows: "The tax with encrypted clients: a lane cannot read what is encrypted, so this is user space against \
                user space.",
        paper: "none",
        scale: NONE,
        systems: USER_SPACE,
        plan: plans::tls,
    },
    Experiment {
        name: "logins",
        title: "Logins per second",
        shows: "Connections that open, run select 1 and close, as fast as they go: by trust, by SCRAM and over TLS, in \
                both pool modes. With more threads a pooler should log in more clients per second, as far as it is the one \
                who works: by SCRAM a client derives keys for milliseconds and the pooler compares for microseconds, so what is \
                measured is the client. A certificate with an RSA key of 4,096 bits turns that round: to sign costs \
                milliseconds, to verify next to nothing. By that row threads are compared.",
        paper: "none; Tigger 6.3 has the latency of it",
        scale: NONE,
        systems: USER_SPACE,
        plan: plans::logins,
    },
    Experiment {
        name: "names",
        title: "Application names and a small pool",
        shows: "16 clients on 4 server connections, all with one application_name, then with four: a server that last \
                served another name must be told the new one first, unless a server with the right name is free \
                (as mostly with `-c 8 --pool-size 20`). \
                The share of transactions that a lane carried is shown.",
        paper: "none; the prototypes know no session state",
        scale: NONE,
        systems: ALL,
        plan: plans::names,
    },
    Experiment {
        name: "unix",
        title: "Unix sockets",
        shows: "The tax with clients on unix sockets, and with the server reached by unix socket too: what an \
                application on the pooler's own host would choose.",
        paper: "Tigger 6.5 has unix sockets to the server only",
        scale: NONE,
        systems: &["direct", "pgbouncer", "ours-off", "ours-off-1"],
        plan: plans::unix,
    },
    Experiment {
        name: "idle",
        title: "Idle clients",
        shows: "Memory of the pooler (Pss) with many logged-in clients that do nothing, and the latency of 2,000 \
                transactions per second of other clients beside them.",
        paper: "none; the clients of Tigger 6.2 are mostly idle",
        scale: NONE,
        systems: &["pgbouncer", "ours-off", "ours-off-1"],
        plan: plans::idle,
    },
    Experiment {
        name: "slow",
        title: "Readers that stop",
        shows: "Clients ask for large results and stop reading. What the pooler's process and the kernel (MemAvailable) \
                hold for each after a while must be a small constant, as on a direct connection; another client must feel \
                nothing meanwhile; then they read on, and every byte must arrive.",
        paper: "none; the papers do not treat it",
        scale: NONE,
        systems: ALL,
        plan: plans::slow,
    },
    Experiment {
        name: "slow-in",
        title: "Servers that stop",
        shows: "Clients send large copies to server processes that have stopped. What is held for each after a while \
                must be a small constant; then the server goes on, and every line must arrive in order.",
        paper: "none; the papers do not treat it",
        scale: NONE,
        systems: ALL,
        plan: plans::slow_in,
    },
    Experiment {
        name: "copy",
        title: "A large copy",
        shows: "Elapsed time and CPU of COPY of 2.4 GB out of the server, one at a time, without a pause.",
        paper: "none; Tigger 6.7 has pg_dump",
        scale: NONE,
        systems: ALL,
        plan: plans::copy,
    },
    Experiment {
        name: "copy-in",
        title: "A large copy in",
        shows: "Elapsed time and CPU of COPY of 2.4 GB into the server, which checks each line and stores none.",
        paper: "none",
        scale: NONE,
        systems: ALL,
        plan: plans::copy_in,
    },
    Experiment {
        name: "mirroring",
        title: "Mirroring to a second server",
        shows: "The same work on a second, equal server: at a rate that leaves half of the machine idle, and at full \
                speed. `sync` is the papers' meaning, the next statement waits until both servers are ready; by transactions, \
                the next transaction does; `async` never waits. In TPC-B each client has a branch of its own: two servers may give contended rows to two clients in \
                different order, and then neither goes on before a time-out. Each is compared with the same pooler without a mirror, before either of the two servers, so what is \
                added is what counts; and with the same pooler while the second server does the same work for a load of its own, \
                which tells how much of it is the machine's two servers instead of the mirroring. A mirror that is down is to cost nothing.",
        paper: "Tigger 6.4, figures 12 and 14b (there YCSB reads, sync)",
        scale: PaperScale { data: "YCSB 2.3 GB", clients: "20", seconds: "not given, 5 runs" },
        systems: &[
            "direct",
            "ours-off",
            "ours-off-second",
            "ours-off-apart",
            "ours-mirror-async",
            "ours-mirror-down",
            "ours-mirror-sync",
            "ours-mirror-sync-xact",
            "pgpool",
            "pgpool-mirror",
        ],
        plan: plans::mirroring,
    },
    Experiment {
        name: "mirroring-lanes",
        title: "Mirroring of clients in lanes",
        shows: "The same two workloads with clients whose bytes the kernel forwards: its programs tell the pooler what they \
                forward, and it says that again to the second server. In transaction pooling, without which clients of mirrors \
                have no lane; each lane is compared with itself without a mirror. With `sync` what comes before the mirror has answered \
                leaves the lane, as the share tells.",
        paper: "Tigger 6.4, figures 12 and 14b (there YCSB reads, sync)",
        scale: PaperScale { data: "YCSB 2.3 GB", clients: "20", seconds: "not given, 5 runs" },
        systems: &[
            "direct",
            "ours-d",
            "ours-mirror-async-d",
            "ours-mirror-sync-d",
            "ours-mirror-sync-xact-d",
            "ours-a",
            "ours-mirror-async-a",
            "ours-mirror-sync-a",
            "ours-mirror-sync-xact-a",
        ],
        plan: plans::mirroring_lanes,
    },
    Experiment {
        name: "tracing",
        title: "Tracing a server",
        shows: "Throughput of PostgreSQL alone, with log_statement = all, and with a tracer beside it in three stages: \
                attached only, parsed and thrown away, and written to disk; then with all responses, and by uprobes instead \
                of packets. No pooler takes part.",
        paper: "ANTtrail's evaluation, its five scenarios; written to disk it loses 12.6 to 16.4 %",
        scale: PaperScale { data: "YCSB, 10 GB", clients: "50", seconds: "30 minutes, 3 runs" },
        systems: &[
            "direct",
            "direct-logged",
            "trace-attach",
            "trace-process",
            "trace-persist",
            "trace-full",
            "trace-probes",
        ],
        plan: plans::tracing,
    },
    Experiment {
        name: "tracing-mariadb",
        title: "Tracing MariaDB",
        shows: "Throughput of MariaDB under sysbench, whose statements are prepared, alone, with general_log, and with a tracer \
                beside it in three stages, then with all rows, which come by the 100 MB a second: its rings may overflow where \
                the recorder gets little of the processors; and by uprobes instead of packets.",
        paper: "none; ANTtrail's evaluation has YCSB on MySQL",
        scale: NONE,
        systems: &[
            "direct",
            "direct-logged",
            "trace-attach",
            "trace-process",
            "trace-persist",
            "trace-full",
            "trace-probes",
        ],
        plan: plans::tracing_mariadb,
    },
    Experiment {
        name: "tracing-mariadb-ycsb",
        title: "Tracing MariaDB, YCSB",
        shows: "The mixes of the tracing paper on MariaDB with fifty clients, whose statements are texts as JDBC sends them, by a \
                script of sysbench: alone, with general_log, and with a tracer beside it in three stages.",
        paper: "ANTtrail's evaluation, its five scenarios on MySQL; written to disk it loses 3.6 to 9.4 %",
        scale: PaperScale { data: "YCSB, 10 GB", clients: "50", seconds: "30 minutes, 3 runs" },
        systems: &["direct", "direct-logged", "trace-attach", "trace-process", "trace-persist"],
        plan: plans::tracing_mariadb_ycsb,
    },
    Experiment {
        name: "dump",
        title: "Large transfer",
        shows: "Elapsed time of pg_dump over many tables of integers. The client is the bottleneck, so a pooler \
                should add nothing; what it costs in CPU is shown beside.",
        paper: "Tigger 6.7, figure 15",
        scale: PaperScale {
            data: "20 tables of 50,000,000 rows, 34 GB",
            clients: "1",
            seconds: "until done",
        },
        systems: ALL,
        plan: plans::dump,
    },
    Experiment {
        name: "proof",
        title: "Proof of the method",
        shows: "Two identical PgBouncers must not differ, and one that is stopped for 5 % of the time must be found \
                slower: if either fails, no other table of this run is worth reading.",
        paper: "none",
        scale: NONE,
        systems: &["direct", "pgbouncer", "pgbouncer-twin", "pgbouncer-slowed"],
        plan: plans::proof,
    },
];

/// The experiment of that name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Experiment> {
    EXPERIMENTS.iter().find(|experiment| experiment.name == name)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeSet;

    use super::*;

    pub(crate) fn options(quick: bool) -> Options {
        Options {
            clients: None,
            modes: None,
            pool_sizes: vec![20],
            workloads: None,
            logins: None,
            rate: 2000.0,
            scale: 1,
            pause_s: 10,
            quick,
        }
    }

    #[test]
    fn every_experiment_has_distinct_points_and_known_systems() {
        let systems = crate::systems::table(None).unwrap();
        for experiment in EXPERIMENTS {
            for quick in [false, true] {
                let steps = (experiment.plan)(&options(quick));
                assert!(!steps.is_empty(), "{}", experiment.name);
                let points: BTreeSet<_> = steps.iter().map(|step| &step.point).collect();
                assert_eq!(points.len(), steps.len(), "{}: two steps at one point", experiment.name);
            }
            for name in experiment.systems {
                assert!(systems.iter().any(|system| system.name == *name), "{name}");
            }
        }
    }

    /// docs/papers.md has a command for each experiment that follows one of a paper, and none that there is not.
    #[test]
    fn the_page_about_the_papers_names_the_experiments() {
        let page = include_str!("../../../docs/papers.md");
        let commands = page.split("`-e ").skip(1).filter_map(|rest| rest.split(['`', ' ']).next());
        let named: BTreeSet<&str> = commands.flat_map(|names| names.split(',')).collect();
        let unknown: Vec<_> = named.iter().filter(|name| find(name).is_none()).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
        let of_papers = EXPERIMENTS.iter().filter(|experiment| experiment.scale.clients != "-");
        // Whole workloads at full speed are no experiment of a paper by themselves; its choice of them is.
        let missing: Vec<_> =
            of_papers.map(|experiment| experiment.name).filter(|name| !named.contains(name)).collect();
        assert_eq!(missing, ["workloads"]);
    }

    #[test]
    fn every_paragraph_is_one() {
        for experiment in EXPERIMENTS {
            assert!(experiment.shows.len() > 80 && !experiment.shows.contains("  "), "{}", experiment.name);
        }
    }

    #[test]
    fn further_pool_sizes_apply_only_to_more_clients() {
        let mut options = options(false);
        options.clients = Some(vec![8, 64]);
        options.pool_sizes = vec![20, 64];
        let pools: Vec<(String, String)> = plans::tax(&options)
            .iter()
            .filter(|step| step.point.get("mode") == "simple")
            .map(|step| (step.point.get("clients").to_owned(), step.point.get("pool").to_owned()))
            .collect();
        let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
        assert_eq!(pools, vec![pair("8", "20"), pair("64", "20"), pair("64", "64")]);
    }
}
