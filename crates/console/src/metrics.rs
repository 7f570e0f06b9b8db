// SPDX-License-Identifier: Apache-2.0
//! OpenMetrics text from the values the console shows.
//!
//! A scrape collects a [`Metrics`], all owned, and turns it into text with [`Metrics::encode`]; between scrapes
//! nothing is kept. Units are base units: seconds and bytes. Names begin with `underpass_`.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeCounterValue, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::{Registry, Unit};

use crate::histogram::Histogram;
use crate::rows::{Lists, PoolCounts};
use crate::stats::{COUNTERS, PoolLatency, PoolStats};
use crate::time::Timestamp;

/// HTTP header `Content-Type` of the text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All values of one scrape.
#[derive(Debug, Clone)]
pub struct Metrics {
    /// Version of the program.
    pub version: String,
    /// When the process started.
    pub start: Timestamp,
    /// Pools; no pair of database and user may come twice.
    pub pools: Vec<PoolMetrics>,
    /// Databases; no name may come twice.
    pub databases: Vec<DatabaseMetrics>,
    /// Counts of internal lists.
    pub lists: Lists,
    /// Clients that were closed for an error of theirs or ours since start, by the SQLSTATE that they were told; `none` for those that
    /// could not be told anything.
    pub client_errors: Vec<(String, u64)>,
    /// Cancel requests since start whose key was nobody's.
    pub cancel_keys_unknown: u64,
    /// Transactions that a kernel lane forwarded since start, by name of the lane.
    pub lane_xacts: Vec<(&'static str, u64)>,
    /// Transactions that ended in user space where there are lanes, since start, by name of the reason.
    pub lane_user_xacts: Vec<(&'static str, u64)>,
    /// Times a link left the kernel since start, by name of the reason.
    pub lane_exits: Vec<(&'static str, u64)>,
    /// Bytes that a kernel lane forwarded and that slow readers have not taken, by name of the queue.
    pub lane_queued_bytes: Vec<(&'static str, u64)>,
    /// BPF programs of the lanes since start: name, runs, seconds in them. Zeros while the kernel does not measure.
    pub lane_programs: Vec<(&'static str, u64, f64)>,
    /// Mirrors; no pair of mirror and database may come twice.
    pub mirrors: Vec<MirrorMetrics>,
}

/// A mirror of a database.
#[derive(Debug, Clone, Default)]
pub struct MirrorMetrics {
    /// Name of the mirror.
    pub mirror: String,
    /// The database that is mirrored.
    pub database: String,
    /// Whether it gets what clients say.
    pub is_on: bool,
    /// Transactions by what became of them: `executed`, `filtered`, and the reasons why some were dropped.
    pub transactions: Vec<(&'static str, u64)>,
    /// Transactions that wait or are under way.
    pub queued: u64,
    /// Memory for them, in bytes.
    pub queued_bytes: u64,
    /// Results that differ and should not.
    pub differing: u64,
    /// Executions that took much longer there.
    pub slower: u64,
    /// Cycles whose answers were compared.
    pub compared: u64,
    /// Transactions that were executed and not compared.
    pub not_compared: u64,
    /// Statements that were timed on both.
    pub timed: u64,
    /// Their time on the primary, and on the mirror, in microseconds.
    pub here_us: u64,
    /// See `here_us`.
    pub there_us: u64,
    /// Times a client was held (`mode = sync`), and for how long altogether, in microseconds.
    pub holds: u64,
    /// See `holds`.
    pub held_us: u64,
}

/// A pool, all threads merged.
#[derive(Debug, Clone)]
pub struct PoolMetrics {
    /// Database.
    pub database: String,
    /// User.
    pub user: String,
    /// Counters since start.
    pub stats: PoolStats,
    /// Latencies since start.
    pub latency: PoolLatency,
    /// Connections now.
    pub counts: PoolCounts,
    /// Most servers it may have, reserve not counted.
    pub pool_size: u64,
}

/// A database.
#[derive(Debug, Clone, Default)]
pub struct DatabaseMetrics {
    /// Name.
    pub name: String,
    /// Server connections.
    pub current_connections: u64,
    /// `max_db_connections`; 0 is no limit.
    pub max_connections: u64,
    /// Client connections.
    pub current_client_connections: u64,
    /// `max_db_client_connections`; 0 is no limit.
    pub max_client_connections: u64,
    /// Paused.
    pub paused: bool,
    /// Disabled.
    pub disabled: bool,
}

impl Metrics {
    /// The text of the scrape, `# EOF` included.
    #[must_use]
    pub fn encode(self) -> String {
        let mut registry = Registry::with_prefix("underpass");
        registry.register_collector(Box::new(self));
        let mut exposition = String::new();
        text::encode(&mut exposition, &registry).expect("writing to a String");
        exposition
    }
}

/// How a counter is exported.
struct CounterMetric {
    name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
}

/// The counters in the order of [`PoolStats::values`]. Those in seconds are counted in microseconds.
const COUNTER_METRICS: [CounterMetric; COUNTERS] = [
    counter("server_assignments", "Times a server was given to a client.", None),
    counter("xacts", "Transactions.", None),
    counter("queries", "Queries.", None),
    counter("received", "Bytes received from clients.", Some(Unit::Bytes)),
    counter("sent", "Bytes sent to clients.", Some(Unit::Bytes)),
    counter("xact_time", "Time in transactions, idle ones included.", Some(Unit::Seconds)),
    counter("query_time", "Time in queries.", Some(Unit::Seconds)),
    counter("wait_time", "Time clients waited for a server.", Some(Unit::Seconds)),
    counter("client_parses", "Prepared statements that clients created.", None),
    counter("server_parses", "Prepared statements that were created on servers.", None),
    counter("binds", "Prepared statements that were bound.", None),
    counter("client_logins", "Successful logins of clients.", None),
];

const fn counter(name: &'static str, help: &'static str, unit: Option<Unit>) -> CounterMetric {
    CounterMetric { name, help, unit }
}

/// A histogram of a pool: name, help, where it is.
type LatencyMetric = (&'static str, &'static str, fn(&PoolLatency) -> &Histogram);

const LATENCY_METRICS: [LatencyMetric; 3] = [
    (
        "wait_duration",
        "From a client's request to the server that serves it; whom kernel lanes serve at once is left out.",
        |latency| &latency.wait,
    ),
    (
        "xact_duration",
        "Duration of transactions that end in user space: those of kernel lanes are in xact_time only.",
        |latency| &latency.xact,
    ),
    (
        "query_duration",
        "Duration of queries that end in user space: those of kernel lanes are in query_time only.",
        |latency| &latency.query,
    ),
];

/// A gauge of a database: name, help, value.
type DatabaseMetric = (&'static str, &'static str, fn(&DatabaseMetrics) -> u64);

const DATABASE_METRICS: [DatabaseMetric; 6] = [
    ("database_servers", "Server connections of the database.", |database| database.current_connections),
    ("database_servers_limit", "Most server connections, 0 for no limit.", |database| {
        database.max_connections
    }),
    ("database_clients", "Client connections of the database.", |database| {
        database.current_client_connections
    }),
    ("database_clients_limit", "Most client connections, 0 for no limit.", |database| {
        database.max_client_connections
    }),
    ("database_paused", "1 when the database is paused.", |database| u64::from(database.paused)),
    ("database_disabled", "1 when the database is disabled.", |database| u64::from(database.disabled)),
];

const US_PER_S: f64 = 1e6;

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        self.process(&mut encoder)?;
        self.pool_counters(&mut encoder)?;
        self.pool_gauges(&mut encoder)?;
        self.latencies(&mut encoder)?;
        for (name, help, value) in DATABASE_METRICS {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for database in &self.databases {
                let labels = [("database", database.name.as_str())];
                family.encode_family(&labels)?.encode_gauge(&value(database))?;
            }
        }
        self.lanes(&mut encoder)?;
        self.mirrors(&mut encoder)
    }
}

impl Metrics {
    fn process(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        encoder
            .encode_descriptor("build", "Version of the program.", None, MetricType::Info)?
            .encode_info(&[("version", self.version.as_str())])?;
        encoder
            .encode_descriptor(
                "start_time",
                "When the process started, since 1970.",
                Some(&Unit::Seconds),
                MetricType::Gauge,
            )?
            .encode_gauge(&(self.start.0 as f64 / US_PER_S))?;
        let mut family =
            encoder.encode_descriptor("items", "Counts of SHOW LISTS.", None, MetricType::Gauge)?;
        for (list, items) in self.lists.items() {
            family.encode_family(&[("list", list)])?.encode_gauge(&items)?;
        }
        let help = "Clients closed for an error, by the SQLSTATE they were told.";
        let mut family = encoder.encode_descriptor("client_errors", help, None, MetricType::Counter)?;
        for (sqlstate, closed) in &self.client_errors {
            plain_counter(&mut family.encode_family(&[("sqlstate", sqlstate.as_str())])?, closed)?;
        }
        let help = "Cancel requests whose key was nobody's.";
        let mut metric = encoder.encode_descriptor("cancel_keys_unknown", help, None, MetricType::Counter)?;
        plain_counter(&mut metric, &self.cancel_keys_unknown)
    }

    fn pool_counters(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for (index, CounterMetric { name, help, unit }) in COUNTER_METRICS.iter().enumerate() {
            let mut family = encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Counter)?;
            for pool in &self.pools {
                let (labels, value) = (pool.labels(), pool.stats.values()[index]);
                let mut metric = family.encode_family(&labels)?;
                match unit {
                    Some(Unit::Seconds) => plain_counter(&mut metric, &(value as f64 / US_PER_S))?,
                    _ => plain_counter(&mut metric, &value)?,
                }
            }
        }
        Ok(())
    }

    fn pool_gauges(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        type States = fn(&PoolCounts) -> Vec<(&'static str, u64)>;
        let families: [(&str, &str, States); 2] = [
            ("clients", "Clients by state.", client_states),
            ("servers", "Servers by state.", server_states),
        ];
        for (name, help, states) in families {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for pool in &self.pools {
                let [database, user] = pool.labels();
                for (state, count) in states(&pool.counts) {
                    family.encode_family(&[database, user, ("state", state)])?.encode_gauge(&count)?;
                }
            }
        }
        let mut family = encoder.encode_descriptor(
            "maxwait",
            "How long the first client of the queue has waited.",
            Some(&Unit::Seconds),
            MetricType::Gauge,
        )?;
        for pool in &self.pools {
            let seconds = pool.counts.maxwait_us as f64 / US_PER_S;
            family.encode_family(&pool.labels())?.encode_gauge(&seconds)?;
        }
        let help = "Most servers of the pool, reserve not counted.";
        let mut family = encoder.encode_descriptor("pool_size", help, None, MetricType::Gauge)?;
        for pool in &self.pools {
            family.encode_family(&pool.labels())?.encode_gauge(&pool.pool_size)?;
        }
        Ok(())
    }

    fn latencies(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        for (name, help, histogram) in LATENCY_METRICS {
            let mut family =
                encoder.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Histogram)?;
            for pool in &self.pools {
                let histogram = histogram(&pool.latency);
                let sum = histogram.sum_us() as f64 / US_PER_S;
                family.encode_family(&pool.labels())?.encode_histogram::<NoLabelSet>(
                    sum,
                    histogram.count(),
                    &histogram.export(),
                    None,
                )?;
            }
        }
        Ok(())
    }

    fn lanes(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let families = [
            ("lane_xacts", "Transactions that a kernel lane forwarded.", "lane", &self.lane_xacts),
            (
                "lane_user_xacts",
                "Transactions in user space although there are lanes, by reason.",
                "reason",
                &self.lane_user_xacts,
            ),
            ("lane_exits", "Times a link left the kernel, by reason.", "reason", &self.lane_exits),
        ];
        for (name, help, label, values) in families {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (key, value) in values {
                plain_counter(&mut family.encode_family(&[(label, *key)])?, value)?;
            }
        }
        let help = "What a kernel lane forwarded and slow readers have not taken, by where it waits.";
        let mut family =
            encoder.encode_descriptor("lane_queued", help, Some(&Unit::Bytes), MetricType::Gauge)?;
        for (queue, bytes) in &self.lane_queued_bytes {
            family.encode_family(&[("queue", *queue)])?.encode_gauge(bytes)?;
        }
        let help = "Runs of the kernel lanes' BPF programs, 0 while the kernel does not measure.";
        let mut family = encoder.encode_descriptor("lane_program_runs", help, None, MetricType::Counter)?;
        for (program, runs, _) in &self.lane_programs {
            plain_counter(&mut family.encode_family(&[("program", *program)])?, runs)?;
        }
        let help = "Time in the kernel lanes' BPF programs, 0 while the kernel does not measure.";
        let mut family = encoder.encode_descriptor(
            "lane_program_time",
            help,
            Some(&Unit::Seconds),
            MetricType::Counter,
        )?;
        for (program, _, seconds) in &self.lane_programs {
            plain_counter(&mut family.encode_family(&[("program", *program)])?, seconds)?;
        }
        Ok(())
    }
}

impl Metrics {
    fn mirrors(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Transactions that were to go to a mirror, by what became of them.";
        let mut family = encoder.encode_descriptor("mirror_transactions", help, None, MetricType::Counter)?;
        for mirror in &self.mirrors {
            for (outcome, value) in &mirror.transactions {
                let [name, database] = mirror.labels();
                plain_counter(&mut family.encode_family(&[name, database, ("outcome", outcome)])?, value)?;
            }
        }
        type Counted = (&'static str, &'static str, fn(&MirrorMetrics) -> u64);
        let counters: [Counted; 6] = [
            ("mirror_differences", "Results of mirrors that differ and should not.", |mirror| {
                mirror.differing
            }),
            ("mirror_slower", "Statements that took twice as long on a mirror.", |mirror| mirror.slower),
            ("mirror_compared", "Answers of mirrors that were compared.", |mirror| mirror.compared),
            ("mirror_not_compared", "Transactions that a mirror executed and nobody compared.", |mirror| {
                mirror.not_compared
            }),
            ("mirror_timed", "Statements whose time was taken on both.", |mirror| mirror.timed),
            ("mirror_holds", "Times a client waited for a mirror in mode = sync.", |mirror| mirror.holds),
        ];
        for (name, help, value) in counters {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for mirror in &self.mirrors {
                plain_counter(&mut family.encode_family(&mirror.labels())?, &value(mirror))?;
            }
        }
        let times: [Counted; 3] = [
            ("mirror_time_here", "Time of the timed statements on the primary.", |mirror| mirror.here_us),
            ("mirror_time_there", "Time of the timed statements on the mirror.", |mirror| mirror.there_us),
            ("mirror_held", "Time that clients waited for a mirror in mode = sync.", |mirror| mirror.held_us),
        ];
        for (name, help, value) in times {
            let mut family =
                encoder.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Counter)?;
            for mirror in &self.mirrors {
                let seconds = value(mirror) as f64 / US_PER_S;
                plain_counter(&mut family.encode_family(&mirror.labels())?, &seconds)?;
            }
        }
        type Gauge = (&'static str, &'static str, Option<Unit>, fn(&MirrorMetrics) -> u64);
        let gauges: [Gauge; 3] = [
            ("mirror_on", "1 if the mirror gets what clients say.", None, |mirror| mirror.is_on.into()),
            ("mirror_queued", "Transactions that wait or are under way.", None, |mirror| mirror.queued),
            ("mirror_queued", "Memory for them, of all databases.", Some(Unit::Bytes), |mirror| {
                mirror.queued_bytes
            }),
        ];
        for (name, help, unit, value) in gauges {
            let mut family = encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
            for mirror in &self.mirrors {
                family.encode_family(&mirror.labels())?.encode_gauge(&value(mirror))?;
            }
        }
        Ok(())
    }
}

impl MirrorMetrics {
    fn labels(&self) -> [(&'static str, &str); 2] {
        [("mirror", self.mirror.as_str()), ("database", self.database.as_str())]
    }
}

impl PoolMetrics {
    fn labels(&self) -> [(&'static str, &str); 2] {
        [("database", self.database.as_str()), ("user", self.user.as_str())]
    }
}

fn client_states(counts: &PoolCounts) -> Vec<(&'static str, u64)> {
    vec![
        ("active", counts.cl_active),
        ("waiting", counts.cl_waiting),
        ("active_cancel_req", counts.cl_active_cancel_req),
        ("waiting_cancel_req", counts.cl_waiting_cancel_req),
    ]
}

fn server_states(counts: &PoolCounts) -> Vec<(&'static str, u64)> {
    vec![
        ("active", counts.sv_active),
        ("active_cancel", counts.sv_active_cancel),
        ("being_canceled", counts.sv_being_canceled),
        ("idle", counts.sv_idle),
        ("used", counts.sv_used),
        ("tested", counts.sv_tested),
        ("login", counts.sv_login),
    ]
}

/// A counter without exemplar, whose types the encoder cannot infer.
fn plain_counter(metric: &mut MetricEncoder<'_>, value: &impl EncodeCounterValue) -> fmt::Result {
    metric.encode_counter(value, None::<&Exemplar<NoLabelSet, f64>>)
}
