// SPDX-License-Identifier: Apache-2.0
//! `underpass-bench rows`: what the tables of the documents are made of.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;
use underpass_stats::Estimate;

use crate::analysis::View;
use crate::experiments;
use crate::sample::{Point, Results};

/// What to print.
#[derive(Args, Debug)]
pub struct RowsArgs {
    /// Result files.
    #[arg(required = true)]
    results: Vec<PathBuf>,
    /// The experiment.
    #[arg(short, long)]
    experiment: String,
    /// Metrics by their names in the file, such as latency_mean_ms,latency_p99_ms: with a slash between them in each cell.
    #[arg(short, long, value_delimiter = ',', required = true)]
    metrics: Vec<String>,
    /// Systems, the columns. Without it: the experiment's own.
    #[arg(short, long, value_delimiter = ',')]
    systems: Vec<String>,
    /// Ratios to this system's value of the same round, in place of values.
    #[arg(long, value_name = "SYSTEM")]
    relative_to: Option<String>,
    /// Only points with these coordinates, such as workload=tpcb; of several values of one any.
    #[arg(long = "where", value_delimiter = ',', value_name = "NAME=VALUE")]
    at: Vec<String>,
}

/// A heading and a row for each point: medians of the rounds with their 90 % bootstrap intervals. A cell without a value is empty.
///
/// # Errors
/// When a file cannot be read, or nothing in it is asked for.
pub fn rows(arguments: &RowsArgs) -> Result<String> {
    let experiment = experiments::find(&arguments.experiment)
        .with_context(|| format!("unknown experiment {}: see list", arguments.experiment))?;
    let mut at: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for one in &arguments.at {
        let (name, value) = one.split_once('=').with_context(|| format!("--where {one}: no NAME=VALUE"))?;
        at.entry(name).or_default().push(value);
    }
    let results = Results::read_all(&arguments.results)?;
    let view = View::of(&results, experiment.name);
    let systems: Vec<&str> = match &arguments.systems[..] {
        [] => experiment.systems.to_vec(),
        named => named.iter().map(String::as_str).collect(),
    };
    let mut text = format!("| {} | {} |\n", experiment.name, systems.join(" | "));
    text += &format!("|---{}|\n", "|---".repeat(systems.len()));
    let mut points = view.points();
    points.retain(|point| at.iter().all(|(name, values)| values.contains(&point.get(name))));
    ensure!(!points.is_empty(), "no such points of {} in these files", experiment.name);
    for point in points {
        let cells: Vec<String> = systems.iter().map(|system| cell(&view, system, point, arguments)).collect();
        text += &format!("| {} | {} |\n", point.label(), cells.join(" | "));
    }
    Ok(text)
}

fn cell(view: &View<'_>, system: &str, point: &Point, arguments: &RowsArgs) -> String {
    let of = |metric: &String| match &arguments.relative_to {
        Some(to) => view.ratio(system, to, point, metric),
        None => Estimate::of(&view.values(system, point, metric)),
    };
    arguments.metrics.iter().filter_map(of).map(|one| shown(&one)).collect::<Vec<_>>().join(" / ")
}

/// `1.59 [1.55, 1.63]`, `43.4 [42.0, 44.1]`.
fn shown(estimate: &Estimate) -> String {
    let digits = if estimate.median < 10.0 { 2 } else { 1 };
    format!("{:.digits$} [{:.digits$}, {:.digits$}]", estimate.median, estimate.low, estimate.high)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::sample::{FORMAT, metric};

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        rows: RowsArgs,
    }

    #[test]
    fn rows_have_medians_and_intervals_or_ratios() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("results.json");
        let mut results = Results::default();
        results.meta.format = FORMAT;
        for (workload, factor) in [("tpcb", 1.0), ("select-only", 8.0)] {
            let point = Point::default().with("clients", 8).with("workload", workload);
            for round in 0..3 {
                for (system, latency) in [("direct", 2.0), ("trace-persist", 3.0)] {
                    let mut one = crate::analysis::tests::sample(system, round, &point, 1.0, 1.0);
                    one.experiment = "tracing".into();
                    one.metrics.insert(metric::LATENCY_MEAN.into(), latency * factor);
                    one.metrics.insert(metric::LATENCY_P99.into(), latency * factor * 2.0);
                    results.samples.push(one);
                }
            }
        }
        results.write(&path).unwrap();
        let print = |words: &str| {
            let words = words.split_ascii_whitespace();
            let line = ["rows", path.to_str().unwrap(), "-e", "tracing"].into_iter().chain(words);
            rows(&Line::parse_from(line).rows)
        };
        let text = print(
            "-m latency_mean_ms,latency_p99_ms -s direct,trace-persist,trace-full --where workload=tpcb",
        );
        assert_eq!(
            text.unwrap(),
            "| tracing | direct | trace-persist | trace-full |\n|---|---|---|---|\n\
             | clients=8 workload=tpcb | 2.00 [2.00, 2.00] / 4.00 [4.00, 4.00] | 3.00 [3.00, 3.00] / 6.00 [6.00, 6.00] |  |\n"
        );
        let text = print("-m latency_mean_ms -s trace-persist --relative-to direct").unwrap();
        assert_eq!(text.matches("1.50 [1.50, 1.50]").count(), 2, "{text}");
        let text =
            print("-m latency_mean_ms -s trace-persist --where workload=tpcb,workload=select-only").unwrap();
        assert!(text.contains("| 24.0 [24.0, 24.0] |") && text.contains("| 3.00 [3.00, 3.00] |"), "{text}");
        assert!(print("-m tps --where workload=nope").unwrap_err().to_string().contains("no such points"));
        assert!(print("-m tps --where nope").unwrap_err().to_string().contains("no NAME=VALUE"));
    }
}
