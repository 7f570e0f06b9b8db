// SPDX-License-Identifier: Apache-2.0
//! What one measurement yields, and the file that keeps all of them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use underpass_stats::quantile_sorted;

/// Version of the result file; raised when a field changes its meaning.
pub const FORMAT: u32 = 3;

/// Names of the metrics of a sample. Times are microseconds unless the name says `ms` or `s`.
pub mod metric {
    /// Transactions per second.
    pub const TPS: &str = "tps";
    /// Mean latency in milliseconds, from the intended start where the rate is fixed.
    pub const LATENCY_MEAN: &str = "latency_mean_ms";
    /// 99th percentile of the latency in milliseconds.
    pub const LATENCY_P99: &str = "latency_p99_ms";
    /// Share of the whole machine's CPU time that was busy, 0 to 1.
    pub const BUSY: &str = "busy";
    /// Busy time of the whole machine per transaction.
    pub const CPU: &str = "cpu_us";
    /// The user part of [`CPU`].
    pub const CPU_USER: &str = "cpu_user_us";
    /// The system part of [`CPU`].
    pub const CPU_SYSTEM: &str = "cpu_system_us";
    /// The softirq and irq part of [`CPU`].
    pub const CPU_SOFTIRQ: &str = "cpu_softirq_us";
    /// Time stolen by the hypervisor per transaction.
    pub const CPU_STEAL: &str = "cpu_steal_us";
    /// CPU time of the pooler's processes per transaction, by its cgroup where there is one.
    pub const POOLER_CPU: &str = "pooler_cpu_us";
    /// The user part of [`POOLER_CPU`].
    pub const POOLER_USER: &str = "pooler_user_us";
    /// The system part of [`POOLER_CPU`].
    pub const POOLER_SYSTEM: &str = "pooler_system_us";
    /// Context switches of the whole machine per transaction.
    pub const SWITCHES: &str = "switches";
    /// Context switches of the pooler per transaction.
    pub const POOLER_SWITCHES: &str = "pooler_switches";
    /// CPU time per transaction above the direct connection's of the same round; derived, not stored.
    pub const TAX: &str = "tax_us";
    /// Mean latency above that of the same system without its mirror, in the same round; derived, not stored.
    pub const ADDED_LATENCY: &str = "added_latency_ms";
    /// CPU per transaction above that of the same system without its mirror, in the same round; derived, not stored.
    pub const ADDED_CPU: &str = "added_cpu_us";
    /// Resident memory of the pooler in MiB.
    pub const MEMORY: &str = "memory_mib";
    /// Growth of the pooler's own memory (Pss) in MiB.
    pub const MEMORY_GROWTH: &str = "memory_growth_mib";
    /// Shrinkage of MemAvailable in MiB: kernel memory included.
    pub const UNAVAILABLE: &str = "unavailable_mib";
    /// Growth of [`UNAVAILABLE`] in the last two thirds of a pause.
    pub const CREEP: &str = "creep_mib";
    /// Mean latency of another client while receivers stand, over that of the same client before they stopped.
    pub const OTHERS_MEAN: &str = "others_mean";
    /// The same of the 99th percentile.
    pub const OTHERS_P99: &str = "others_p99";
    /// Elapsed time of one whole task in seconds.
    pub const SECONDS: &str = "seconds";
    /// CPU of the whole machine for one whole task in seconds.
    pub const CPU_SECONDS: &str = "cpu_s";
    /// Smoothed TCP round-trip time of the clients' sockets.
    pub const CLIENT_LEG: &str = "client_leg_us";
    /// Smoothed TCP round-trip time of the pooler's sockets to the server.
    pub const SERVER_LEG: &str = "server_leg_us";
    /// Share of transactions that the system's lane carried, 0 to 1.
    pub const LANE_SHARE: &str = "lane_share";
    /// Share of transactions that lane A carried, 0 to 1.
    pub const SHARE_A: &str = "share_a";
    /// The same of lane B.
    pub const SHARE_B: &str = "share_b";
    /// The same of lane D.
    pub const SHARE_D: &str = "share_d";
    /// Share of transactions that user space served, 0 to 1.
    pub const SHARE_USER: &str = "share_user";
    /// The name of the share of a lane, by its name in SHOW KERNEL.
    #[must_use]
    pub fn share(lane: &str) -> String {
        format!("share_{}", lane.to_ascii_lowercase())
    }
    /// Share of the clients' transactions that a mirror has executed, 0 to 1.
    pub const MIRRORED: &str = "mirrored";
    /// 1 when the tracer beside the system says that nothing is missing, else 0.
    pub const LOSSLESS: &str = "lossless";
    /// 1 when nothing is missing but what sessions said first that the probes found waiting ([`WAITED`]), else 0.
    pub const WHOLE: &str = "whole";
    /// Sessions that waited inside a probed function when the tracer came: of each the first request may be missing.
    pub const WAITED: &str = "waited";
    /// Sessions whose bytes were compared with the kernel's own count; of recordings by packets that know sessions.
    pub const AUDITED: &str = "audited";
    /// Payload bytes that the tracer's programs saw.
    pub const SEEN: &str = "seen_bytes";
    /// Of these, or of the streams, how many are missing.
    pub const LOST: &str = "lost_bytes";
    /// Seconds in which the transactions of the sample were counted.
    pub const WINDOW: &str = "window_s";
    /// Transactions that failed.
    pub const FAILED: &str = "failed";
}

/// The distribution of latencies of one sample in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    /// Smallest.
    pub min: f64,
    /// 25th percentile.
    pub p25: f64,
    /// Median.
    pub p50: f64,
    /// 75th percentile.
    pub p75: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Largest.
    pub max: f64,
    /// Mean.
    pub mean: f64,
    /// Transactions.
    pub count: usize,
}

impl Latency {
    /// Summarises latencies in milliseconds; `None` without any.
    #[must_use]
    pub fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        Some(Self {
            min: *values.first()?,
            p25: quantile_sorted(&values, 0.25)?,
            p50: quantile_sorted(&values, 0.5)?,
            p75: quantile_sorted(&values, 0.75)?,
            p99: quantile_sorted(&values, 0.99)?,
            max: *values.last()?,
            mean: values.iter().sum::<f64>() / values.len() as f64,
            count: values.len(),
        })
    }
}

/// Where in an experiment a measurement belongs: the same point is measured for every system.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Point(pub BTreeMap<String, String>);

impl Point {
    /// Adds a coordinate.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.0.insert(name.to_owned(), value.to_string());
        self
    }

    /// The value of a coordinate, empty if it has none.
    #[must_use]
    pub fn get(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    /// `clients=8 mode=simple` and so on; numbers sort as numbers through [`Point::sort_key`].
    #[must_use]
    pub fn label(&self) -> String {
        self.0.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
    }

    /// A key in which 8 comes before 64.
    #[must_use]
    pub fn sort_key(&self) -> Vec<(String, u64, String)> {
        self.0
            .iter()
            .map(|(name, value)| (name.clone(), value.parse().unwrap_or(u64::MAX), value.clone()))
            .collect()
    }
}

/// One measurement of one system at one point in one round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sample {
    /// Experiment by its name.
    pub experiment: String,
    /// System by its name.
    pub system: String,
    /// Round, from 0.
    pub round: u32,
    /// Place in the whole run's order, from 0: shows the interleaving.
    pub order: u32,
    /// Seconds since the run began.
    pub at_s: f64,
    /// Where in the experiment.
    pub point: Point,
    /// Metrics by name, see [`metric`].
    pub metrics: BTreeMap<String, f64>,
    /// Latency distribution where single transactions were logged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_ms: Option<Latency>,
    /// Why there is no result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// What was measured where.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Meta {
    /// Version of this file's shape.
    pub format: u32,
    /// When the run began, UTC.
    pub began: String,
    /// Git revision of the working tree, `-dirty` when it differs; empty outside a repository.
    pub revision: String,
    /// Kernel release.
    pub kernel: String,
    /// Processor model.
    pub cpu: String,
    /// CPUs that this process may use.
    pub cpus: usize,
    /// Main memory in MiB.
    pub memory_mib: u64,
    /// Versions of programs by name.
    pub versions: BTreeMap<String, String>,
    /// Where the hosts are: `loopback` or `netns`.
    pub topology: String,
    /// The command line that repeats the run.
    pub command: String,
    /// Titles of systems by name.
    pub titles: BTreeMap<String, String>,
    /// For systems with a mirror, the same system without it.
    #[serde(default)]
    pub without: BTreeMap<String, String>,
    /// Rows and MB of each workload that was loaded.
    pub data: BTreeMap<String, LoadedData>,
    /// Points left out because a system cannot do them, with the reason.
    pub skipped: Vec<String>,
    /// Where further files that a page was made of differ.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub joined: Vec<(String, String)>,
}

/// Size of a loaded workload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadedData {
    /// Rows over all its tables.
    pub rows: u64,
    /// Size of its tables and indexes in MB (10^6 bytes).
    pub mb: f64,
}

impl LoadedData {
    /// Reads `rows|mb` of psql.
    #[must_use]
    pub fn parse(answer: &str) -> Option<Self> {
        let (rows, mb) = answer.trim().split_once('|')?;
        Some(Self { rows: rows.parse().ok()?, mb: mb.parse().ok()? })
    }
}

/// A result file.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Results {
    /// What was measured where.
    pub meta: Meta,
    /// True when Ctrl-C ended it early.
    pub interrupted: bool,
    /// Every measurement in order.
    pub samples: Vec<Sample>,
}

impl Results {
    /// Reads a result file.
    ///
    /// # Errors
    /// When it is missing, not JSON, or of another version.
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let results: Self =
            serde_json::from_str(&text).with_context(|| format!("{}: not a result file", path.display()))?;
        anyhow::ensure!(
            results.meta.format == FORMAT,
            "{}: format {} but this program reads {FORMAT}",
            path.display(),
            results.meta.format
        );
        Ok(results)
    }

    /// Reads several files as one run, whose facts are those of the first; what differs in the others is noted.
    ///
    /// # Errors
    /// As [`Results::read`], or when two files have the same experiment at the same point for the same system.
    pub fn read_all(paths: &[PathBuf]) -> Result<Self> {
        let mut all = Self::default();
        for (index, path) in paths.iter().enumerate() {
            let one = Self::read(path)?;
            if index == 0 {
                all = one;
            } else {
                let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into());
                all.join(&name, one).with_context(|| path.display().to_string())?;
            }
        }
        Ok(all)
    }

    fn join(&mut self, name: &str, other: Self) -> Result<()> {
        let of = |sample: &Sample| {
            (sample.experiment.clone(), sample.system.clone(), sample.point.clone(), sample.round)
        };
        let known: BTreeSet<_> = self.samples.iter().map(of).collect();
        if let Some(twice) = other.samples.iter().find(|sample| known.contains(&of(sample))) {
            bail!("{} {} was measured in an earlier file too", twice.experiment, twice.point.label());
        }
        let meta = other.meta;
        for (what, ours, theirs) in [
            ("revision", &self.meta.revision, meta.revision),
            ("kernel", &self.meta.kernel, meta.kernel),
            ("CPU", &self.meta.cpu, meta.cpu),
            ("began", &self.meta.began, meta.began),
            ("command", &self.meta.command, meta.command),
            ("hosts", &self.meta.topology, meta.topology),
        ] {
            if *ours != theirs {
                self.meta.joined.push((format!("{name}: {what}"), theirs));
            }
        }
        self.meta.joined.extend(meta.joined);
        self.meta.versions.extend(meta.versions);
        self.meta.titles.extend(meta.titles);
        self.meta.without.extend(meta.without);
        self.meta.data.extend(meta.data);
        self.meta.skipped.extend(meta.skipped);
        self.interrupted |= other.interrupted;
        self.samples.extend(other.samples);
        Ok(())
    }

    /// Writes the file through a temporary name, so that a crash leaves the old one.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        }
        let unfinished = path.with_extension("json.part");
        fs::write(&unfinished, serde_json::to_vec_pretty(self)?)
            .and_then(|()| fs::rename(&unfinished, path))
            .with_context(|| format!("cannot write {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_summarised() {
        let latency = Latency::of((1..=101).map(f64::from).collect()).unwrap();
        assert_eq!((latency.min, latency.p50, latency.p99, latency.max), (1.0, 51.0, 100.0, 101.0));
        assert_eq!(Latency::of(Vec::new()), None);
    }

    #[test]
    fn points_sort_by_number() {
        let eight = Point::default().with("clients", 8);
        let many = Point::default().with("clients", 64);
        assert!(eight.sort_key() < many.sort_key());
        assert_eq!(eight.label(), "clients=8");
    }

    #[test]
    fn files_of_several_runs_are_one_but_the_same_point_twice_is_refused() {
        let one = |experiment: &str, revision: &str| Results {
            meta: Meta { revision: revision.into(), ..Meta::default() },
            samples: vec![Sample {
                experiment: experiment.into(),
                ..crate::analysis::tests::sample("direct", 0, &Point::default(), 1.0, 1.0)
            }],
            ..Results::default()
        };
        let mut all = one("tax", "a");
        all.join("second.json", one("copy", "b")).unwrap();
        assert_eq!(all.samples.len(), 2);
        assert_eq!(all.meta.joined, [("second.json: revision".to_owned(), "b".to_owned())]);
        assert!(all.join("third.json", one("tax", "a")).unwrap_err().to_string().contains("earlier"));
    }

    #[test]
    fn a_result_file_survives_the_disk_and_another_format_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/results.json");
        let mut results = Results { meta: Meta { format: FORMAT, ..Meta::default() }, ..Results::default() };
        results.samples.push(Sample {
            experiment: "tax".into(),
            system: "direct".into(),
            round: 0,
            order: 0,
            at_s: 1.0,
            point: Point::default().with("clients", 1),
            metrics: BTreeMap::from([(metric::TPS.to_owned(), 5.0)]),
            latency_ms: None,
            error: None,
        });
        results.write(&path).unwrap();
        assert_eq!(Results::read(&path).unwrap().samples[0].metrics[metric::TPS], 5.0);
        results.meta.format = FORMAT + 1;
        results.write(&path).unwrap();
        assert!(Results::read(&path).unwrap_err().to_string().contains("format"));
    }
}
