// SPDX-License-Identifier: Apache-2.0
//! The tables of the terminal.

use std::fmt::{self, Write as _};

use crate::analysis::{BASELINE, DIRECT, DIRECT_FEW, View};
use crate::experiments::Experiment;
use crate::limits::{self, Judged, Limit};
use crate::proof::Finding;
use crate::recordings;
use crate::sample::{LoadedData, Point, Results, metric};
use crate::tasks::sysbench::YCSB_DATA;
use crate::workloads::TPCC;
use underpass_stats::{Estimate, Summary};

/// A column: metric, heading, digits after the point.
pub type Column = (&'static str, &'static str, usize);

/// The columns of every table, as far as there are values.
pub const COLUMNS: &[Column] = &[
    (metric::TPS, "tps", 0),
    (metric::LATENCY_MEAN, "mean ms", 3),
    (metric::LATENCY_P99, "p99 ms", 3),
    (metric::BUSY, "busy", 2),
    (metric::CPU, "CPU us", 1),
    (metric::TAX, "tax us", 1),
    (metric::ADDED_LATENCY, "added ms", 3),
    (metric::ADDED_CPU, "added us", 1),
    (metric::POOLER_CPU, "pooler us", 1),
    (metric::SWITCHES, "switches", 2),
    (metric::LOSSLESS, "lossless", 0),
    (metric::WHOLE, "whole", 0),
    (metric::AUDITED, "audited", 0),
    (metric::SEEN, "bytes seen", 0),
    (metric::LOST, "bytes lost", 0),
    (metric::WAITED, "waited", 0),
    (metric::MIRRORED, "mirrored", 3),
    (metric::SHARE_A, "lane A", 3),
    (metric::SHARE_B, "lane B", 3),
    (metric::SHARE_D, "lane D", 3),
    (metric::SHARE_USER, "user space", 3),
    (metric::CLIENT_LEG, "client leg us", 0),
    (metric::SERVER_LEG, "server leg us", 0),
    (metric::MEMORY, "MiB", 1),
    (metric::MEMORY_GROWTH, "growth MiB", 2),
    (metric::UNAVAILABLE, "unavail. MiB", 1),
    (metric::CREEP, "creep MiB", 2),
    (metric::OTHERS_MEAN, "others", 2),
    (metric::OTHERS_P99, "others p99", 2),
    (metric::SECONDS, "seconds", 2),
    (metric::CPU_SECONDS, "CPU s", 2),
    ("delivery_mean_ms", "Delivery", 2),
    ("delivery_p99_ms", "p99", 2),
    ("new_order_mean_ms", "NewOrder", 2),
    ("new_order_p99_ms", "p99", 2),
    ("order_status_mean_ms", "OrderStatus", 2),
    ("order_status_p99_ms", "p99", 2),
    ("payment_mean_ms", "Payment", 2),
    ("payment_p99_ms", "p99", 2),
    ("stock_level_mean_ms", "StockLevel", 2),
    ("stock_level_p99_ms", "p99", 2),
];

/// What the last column of a row says.
#[derive(Debug)]
pub struct Headline<'a> {
    /// Which metric is compared.
    pub metric: &'static str,
    /// With which system's.
    pub to: &'a str,
    /// The ratio.
    pub ratio: Estimate,
}

impl fmt::Display for Headline<'_> {
    /// `tax 0.82 [0.79, 0.86] of pgbouncer`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} of {}", short(self.metric), interval(&self.ratio), self.to)
    }
}

/// The ratio that says most of a row: that of the tax to PgBouncer's where there is one. Where no PgBouncer takes part, that of the
/// throughput, or of the latency at a fixed rate, to the same system without its mirror or to a direct connection.
#[must_use]
pub fn headline<'a>(view: &View<'a>, system: &str, point: &Point) -> Option<Headline<'a>> {
    let ratio = |to, name| Some(Headline { metric: name, to, ratio: view.ratio(system, to, point, name)? });
    if [BASELINE, DIRECT, DIRECT_FEW].contains(&system) {
        return None;
    }
    if !view.samples(BASELINE, &view.comparable(BASELINE, point)).is_empty() {
        return [metric::TAX, metric::TPS, metric::SECONDS]
            .into_iter()
            .find_map(|name| ratio(BASELINE, name));
    }
    let at_a_rate = !["", "full"].contains(&point.get("rate"));
    let name = if at_a_rate { metric::LATENCY_MEAN } else { metric::TPS };
    ratio(view.without(system).unwrap_or(DIRECT), name)
}

/// All tables of one experiment.
#[must_use]
pub fn of_experiment(experiment: &Experiment, results: &Results, limits: &[Limit]) -> String {
    let view = View::of(results, experiment.name);
    let mut text = format!("\n{} ({})\n", experiment.title, experiment.paper);
    for point in view.points() {
        let _ = writeln!(text, "\n  {} ({})", point.label(), scale_of(experiment, &view, point, results));
        let systems = in_table_order(&view.systems_at(point), results);
        let columns: Vec<&Column> = COLUMNS
            .iter()
            .filter(|(name, ..)| systems.iter().any(|s| !view.values(s, point, name).is_empty()))
            .collect();
        let mut rows = vec![heading(&columns)];
        for system in systems {
            let mut row = vec![system.to_owned()];
            row.extend(columns.iter().map(|(name, _, digits)| cell(&view, system, point, name, *digits)));
            let mut last = headline(&view, system, point).map_or_else(String::new, |ratio| ratio.to_string());
            if limits::carried(limits, &view, system, point) == Some(false) {
                last.push_str("  FAILED: not in the lane");
            }
            if recordings::whole(&view, system, point) == Some(false) {
                last.push_str("  FAILED: not recorded as a whole");
            }
            row.push(last);
            rows.push(row);
        }
        text.push_str(&aligned(&rows));
    }
    let failed = results.samples.iter().filter(|s| s.experiment == experiment.name && s.error.is_some());
    for sample in failed.take(10) {
        let error = sample.error.as_deref().unwrap_or_default();
        let _ = writeln!(
            text,
            "  failed: {} {} round {}: {error}",
            sample.system,
            sample.point.label(),
            sample.round
        );
    }
    text
}

/// What the twins say about the method, and recordings about themselves.
#[must_use]
pub fn of_proof(findings: &[Finding]) -> String {
    findings.iter().map(|finding| format!("\n  {}", finding.text)).collect::<String>()
        + if findings.is_empty() { "" } else { "\n" }
}

/// The verdicts.
#[must_use]
pub fn of_limits(judged: &[Judged]) -> String {
    if judged.is_empty() {
        return String::new();
    }
    let has_floors = judged.iter().any(|one| !one.floors.is_empty());
    let mut heading = vec!["limit", "point", "bound", "aim", "measured, 90 % interval", "rounds", "verdict"];
    heading.extend(has_floors.then_some(FLOOR));
    let mut rows = vec![heading.into_iter().map(str::to_owned).collect::<Vec<_>>()];
    for one in judged {
        let mut row = vec![
            one.limit.source.clone(),
            one.point.label(),
            one.bounds.to_string(),
            one.bounds.aim.map_or_else(String::new, |aim| format!("{aim:.2}")),
            interval(&one.estimate),
            one.estimate.rounds.to_string(),
            one.verdict.to_string(),
        ];
        row.extend(has_floors.then(|| floors(one)));
        rows.push(row);
    }
    format!("\nLimits\n{}", aligned(&rows))
}

/// The heading of [`floors`].
pub const FLOOR: &str = "bare redirect";

/// What redirects without a protocol have of the same limit: `0.44 [0.41, 0.47] forward-kernel`.
#[must_use]
pub fn floors(judged: &Judged) -> String {
    let each = judged.floors.iter().map(|(name, estimate)| format!("{} {name}", interval(estimate)));
    each.collect::<Vec<_>>().join("; ")
}

/// A metric's name without its unit.
#[must_use]
pub fn short(name: &str) -> &str {
    name.split('_').next().unwrap_or(name)
}

/// `0.82 [0.79, 0.86]`, marked when it is too wide to decide anything.
#[must_use]
pub fn interval(estimate: &Estimate) -> String {
    let narrow = estimate.half_width() <= limits::MAX_HALF_WIDTH;
    let wide = if narrow { "" } else { " wide" };
    format!("{:.2} [{:.2}, {:.2}]{wide}", estimate.median, estimate.low, estimate.high)
}

fn heading(columns: &[&Column]) -> Vec<String> {
    let names = columns.iter().map(|(_, title, _)| (*title).to_owned());
    ["system".to_owned()].into_iter().chain(names).chain(["ratio".to_owned()]).collect()
}

/// The median, with half the distance of the quartiles as spread.
fn cell(view: &View<'_>, system: &str, point: &Point, name: &str, digits: usize) -> String {
    match Summary::of(&view.values(system, point, name)) {
        Some(summary) if summary.rounds > 1 => {
            format!("{:.digits$} ±{:.digits$}", summary.median, (summary.high - summary.low) / 2.0)
        }
        Some(summary) => format!("{:.digits$}", summary.median),
        None => String::new(),
    }
}

/// The workload of a point and its data, `None` if it needs none. Points name their workload where an experiment has
/// several; those with one fixed workload run on YCSB.
#[must_use]
pub fn data_of<'a>(
    experiment: &Experiment,
    point: &Point,
    results: &'a Results,
) -> Option<(&'a str, LoadedData)> {
    let name = match (point.get("workload"), experiment.name) {
        ("", "tpcc" | "tpcc-rate") => TPCC,
        ("", "cpu" | "serverless") => "ycsb",
        ("", "tracing-mariadb") => "sysbench",
        ("", "tracing-mariadb-ycsb") => YCSB_DATA,
        (name, _) => name,
    };
    let (name, data) = results.meta.data.get_key_value(name)?;
    (data.rows > 0).then_some((name.as_str(), *data))
}

/// How long a point was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Time {
    /// Of a sample.
    pub seconds: f64,
    /// Samples of a system.
    pub rounds: usize,
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1} s in each of {} rounds", self.seconds, self.rounds)
    }
}

/// How long a point was measured.
#[must_use]
pub fn time_of(view: &View<'_>, point: &Point) -> Time {
    let systems = view.systems_at(point);
    let of = |name| systems.iter().flat_map(|system| view.values(system, point, name)).collect::<Vec<_>>();
    let medians = [metric::WINDOW, metric::SECONDS].iter().filter_map(|name| Summary::of(&of(name)));
    let seconds = medians.map(|summary| summary.median).fold(0.0, f64::max);
    let rounds = systems.iter().map(|system| view.samples(system, point).len()).max().unwrap_or(0);
    Time { seconds, rounds }
}

/// Clients and MB from which a point may be called a repeat of a paper's experiment.
const REPEAT_CLIENTS: u64 = 1_000;
const REPEAT_MB: f64 = 1_000.0;

/// Whether a point may be called a repeat; `None` where no paper has the experiment.
#[must_use]
pub fn is_repeat(experiment: &Experiment, point: &Point, results: &Results) -> Option<bool> {
    let clients = point.get("clients").parse().unwrap_or(1);
    let mb = data_of(experiment, point, results).map_or(0.0, |(_, data)| data.mb);
    (experiment.scale.clients != "-").then_some(clients >= REPEAT_CLIENTS && mb >= REPEAT_MB)
}

/// Rows, MB, clients and seconds of a point beside the paper's, and whether it is a repeat.
#[must_use]
pub fn scale_of(experiment: &Experiment, view: &View<'_>, point: &Point, results: &Results) -> String {
    let data = data_of(experiment, point, results)
        .map_or_else(String::new, |(_, data)| format!("{} rows, {:.0} MB, ", data.rows, data.mb));
    let clients = match point.get("clients") {
        "" => String::new(),
        "1" => "1 client, ".to_owned(),
        count => format!("{count} clients, "),
    };
    let paper = &experiment.scale;
    let beside = match paper.clients {
        "-" => String::new(),
        count => {
            let word = if is_repeat(experiment, point, results) == Some(true) { "a" } else { "no" };
            format!("; paper: {}, {count} clients, {}: {word} repeat", paper.data, paper.seconds)
        }
    };
    format!("{data}{clients}{}{beside}", time_of(view, point))
}

/// Systems as the table of systems orders them, so that every block reads alike.
#[must_use]
pub fn in_table_order<'a>(systems: &[&'a str], results: &Results) -> Vec<&'a str> {
    let order: Vec<String> = crate::systems::table(None)
        .map(|table| table.into_iter().map(|system| system.name).collect())
        .unwrap_or_else(|_| results.meta.titles.keys().cloned().collect());
    let mut sorted = systems.to_vec();
    sorted.sort_by_key(|name| order.iter().position(|known| known == name).unwrap_or(usize::MAX));
    sorted
}

/// Rows as columns of equal width: the first to the left, the others to the right.
fn aligned(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|c| c.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        text.push_str("  ");
        for (column, value) in row.iter().enumerate() {
            let pad = " ".repeat(widths[column] - value.chars().count());
            match column {
                0 => text.extend([value.as_str(), pad.as_str()]),
                _ => text.extend(["  ", pad.as_str(), value.as_str()]),
            }
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::tests::sample;

    #[test]
    fn a_table_shows_medians_and_the_ratio() {
        let point = Point::default().with("clients", 8);
        let mut results = Results::default();
        for round in 0..3 {
            results.samples.push(sample("direct", round, &point, 20.0, 80_000.0));
            results.samples.push(sample("pgbouncer", round, &point, 30.0, 60_000.0));
            results.samples.push(sample("ours-off", round, &point, 28.0, 62_000.0));
        }
        let experiment = crate::experiments::find("tax").unwrap();
        let text = of_experiment(experiment, &results, &[]);
        assert!(text.contains("tax 0.80 [0.80, 0.80] of pgbouncer"), "{text}");
        assert!(text.find("direct").unwrap() < text.find("ours-off").unwrap());
    }

    #[test]
    fn without_pgbouncer_a_mirror_is_compared_with_none_and_a_tracer_with_the_server_alone() {
        let mut results = Results::default();
        results.meta.without.insert("ours-mirror-async-d".into(), "ours-d".into());
        let full = Point::default().with("rate", "full");
        let at_a_rate = Point::default().with("rate", "500/s");
        for point in [&full, &at_a_rate] {
            for (system, value) in
                [("direct", 100.0), ("ours-d", 80.0), ("ours-mirror-async-d", 60.0), ("trace-full", 50.0)]
            {
                let mut one = sample(system, 0, point, 1.0, value);
                one.metrics.insert(metric::LATENCY_MEAN.to_owned(), 6000.0 / value);
                results.samples.push(one);
            }
        }
        let view = View::of(&results, "tax");
        let text = |system, point| headline(&view, system, point).map(|headline| headline.to_string());
        assert_eq!(text("ours-mirror-async-d", &full).unwrap(), "tps 0.75 [0.75, 0.75] of ours-d");
        assert_eq!(text("ours-mirror-async-d", &at_a_rate).unwrap(), "latency 1.33 [1.33, 1.33] of ours-d");
        assert_eq!(text("trace-full", &full).unwrap(), "tps 0.50 [0.50, 0.50] of direct");
        assert_eq!(text("direct", &full), None);
    }

    #[test]
    fn only_a_large_point_is_called_a_repeat() {
        let experiment = crate::experiments::find("many").unwrap();
        let of = |clients: u32, mb: f64| {
            let mut results = Results::default();
            results.meta.data.insert("ycsb".into(), LoadedData { rows: 1, mb });
            let point = Point::default().with("clients", clients).with("workload", "ycsb");
            let view = View::of(&results, "many");
            scale_of(experiment, &view, &point, &results)
        };
        assert!(of(1_000, 1_200.0).ends_with(": a repeat"), "{}", of(1_000, 1_200.0));
        assert!(of(999, 1_200.0).ends_with(": no repeat"));
        assert!(of(10_000, 999.0).ends_with(": no repeat"));
        let tax = crate::experiments::find("tax").unwrap();
        assert_eq!(is_repeat(tax, &Point::default(), &Results::default()), None);
    }

    #[test]
    fn columns_align() {
        let rows = vec![vec!["a".into(), "1".into()], vec!["bb".into(), "22".into()]];
        assert_eq!(aligned(&rows), "  a    1\n  bb  22\n");
    }
}
