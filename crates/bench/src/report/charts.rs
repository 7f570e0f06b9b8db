// SPDX-License-Identifier: Apache-2.0
//! The plots, as ECharts options: the kinds that the papers use.

use charming::Chart;
use charming::component::{Axis, Grid, Legend};
use charming::datatype::DataPoint;
use charming::element::{AxisLabel, AxisType, ItemStyle, NameLocation, Tooltip, Trigger};
use charming::series::{Bar, Boxplot, Scatter};

use underpass_charts::{COLOURS, rounded};

use crate::analysis::View;
use crate::sample::{Latency, Point, Results, metric};
use crate::table::in_table_order;
use underpass_stats::Summary;

/// Height of a plot with few bars, and of one more row of bars, in CSS pixels.
const BASE_HEIGHT: usize = 110;
const ROW_HEIGHT: usize = 26;

/// One plot.
pub struct Plot {
    /// What it shows.
    pub caption: String,
    /// Its height in CSS pixels.
    pub height: usize,
    /// ECharts options.
    pub options: Chart,
}

/// The plots of an experiment: one of each kind for each point that has the numbers for it.
pub fn of(view: &View<'_>, results: &Results) -> Vec<Plot> {
    let mut plots = Vec::new();
    for (name, caption) in [
        (metric::TPS, "Throughput, transactions per second"),
        (metric::TAX, "Tax: CPU per transaction above direct, us"),
        (metric::MEMORY, "Memory of the pooler, MiB"),
        (metric::MEMORY_GROWTH, "Growth of the pooler's memory, MiB"),
        (metric::UNAVAILABLE, "Growth of unavailable memory, MiB"),
        (metric::SECONDS, "Elapsed, seconds"),
    ] {
        plots.extend(bars(view, results, name, caption));
    }
    for point in view.points() {
        plots.extend(cpu_stack(view, results, point, &MACHINE));
        plots.extend(cpu_stack(view, results, point, &POOLER));
        plots.extend(boxes(view, results, point));
    }
    plots
}

/// The title of a system for readers.
pub fn title(results: &Results, system: &str) -> String {
    results.meta.titles.get(system).cloned().unwrap_or_else(|| system.to_owned())
}

/// Horizontal bars: a group for each point and a bar for each system. Names beside bars stay readable on a phone.
fn bars(view: &View<'_>, results: &Results, name: &str, caption: &str) -> Option<Plot> {
    let points: Vec<&Point> = view
        .points()
        .into_iter()
        .filter(|p| view.systems_at(p).iter().any(|s| !view.values(s, p, name).is_empty()))
        .collect();
    let mut systems: Vec<&str> = points.iter().flat_map(|point| view.systems_at(point)).collect();
    systems.sort_unstable();
    systems.dedup();
    let systems = in_table_order(&systems, results);
    let measured = points
        .iter()
        .flat_map(|p| systems.iter().map(|s| view.values(s, p, name)))
        .any(|v| v.iter().any(|x| *x != 0.0));
    if !measured {
        return None;
    }
    let labels: Vec<String> = points.iter().map(|point| short_label(point)).collect();
    let mut chart = frame(&labels).legend(Legend::new().top("0"));
    for (index, system) in systems.iter().enumerate() {
        let data: Vec<DataPoint> = points
            .iter()
            .map(|point| match Summary::of(&view.values(system, point, name)) {
                Some(summary) => DataPoint::from(rounded(summary.median)),
                None => DataPoint::from("-"),
            })
            .collect();
        chart = chart.series(
            Bar::new()
                .name(title(results, system))
                .data(data)
                .item_style(ItemStyle::new().color(COLOURS[index % COLOURS.len()])),
        );
    }
    let height = BASE_HEIGHT + systems.len() * 12 + points.len() * (10 + systems.len() * 14);
    Some(Plot { caption: caption.to_owned(), height, options: chart })
}

/// What CPU time is stacked: a caption, the metric that a system must have, and its parts.
type Stack = (&'static str, &'static str, &'static [(&'static str, &'static str, &'static str)]);

const MACHINE: Stack = (
    "CPU of the whole machine per transaction, us",
    metric::CPU,
    &[
        (metric::CPU_USER, "user", COLOURS[1]),
        (metric::CPU_SYSTEM, "system", COLOURS[3]),
        (metric::CPU_SOFTIRQ, "softirq and irq", COLOURS[5]),
    ],
);

const POOLER: Stack = (
    "CPU of the pooler's cgroup per transaction, us",
    metric::POOLER_CPU,
    &[(metric::POOLER_USER, "user", COLOURS[1]), (metric::POOLER_SYSTEM, "system", COLOURS[3])],
);

/// The parts of CPU time per transaction, stacked; the systems that have none are left out.
fn cpu_stack(
    view: &View<'_>,
    results: &Results,
    point: &Point,
    (caption, whole, parts): &Stack,
) -> Option<Plot> {
    let systems: Vec<&str> = in_table_order(&view.systems_at(point), results)
        .into_iter()
        .filter(|system| view.values(system, point, whole).iter().any(|value| *value > 0.0))
        .collect();
    if systems.is_empty() {
        return None;
    }
    let labels: Vec<String> = systems.iter().map(|system| title(results, system)).collect();
    let mut chart = frame(&labels).legend(Legend::new().top("0"));
    for (name, part, colour) in *parts {
        let data: Vec<f64> = systems
            .iter()
            .map(|system| {
                Summary::of(&view.values(system, point, name)).map_or(0.0, |summary| rounded(summary.median))
            })
            .collect();
        chart = chart.series(
            Bar::new().name(*part).stack("cpu").data(data).item_style(ItemStyle::new().color(*colour)),
        );
    }
    let caption = format!("{caption}: {}", point.label());
    Some(Plot { caption, height: BASE_HEIGHT + systems.len() * ROW_HEIGHT, options: chart })
}

/// Latencies: whiskers at the minimum and the 99th percentile, a dot at the mean, as in the Tigger paper.
fn boxes(view: &View<'_>, results: &Results, point: &Point) -> Option<Plot> {
    let measured: Vec<(&str, Latency)> = in_table_order(&view.systems_at(point), results)
        .into_iter()
        .filter_map(|system| Some((system, typical(view, system, point)?)))
        .collect();
    if measured.is_empty() {
        return None;
    }
    let labels: Vec<String> = measured.iter().map(|(system, _)| title(results, system)).collect();
    let rows: Vec<Vec<f64>> =
        measured.iter().map(|(_, l)| [l.min, l.p25, l.p50, l.p75, l.p99].map(rounded).to_vec()).collect();
    let means: Vec<Vec<f64>> =
        measured.iter().enumerate().map(|(row, (_, l))| vec![rounded(l.mean), row as f64]).collect();
    let chart = frame(&labels)
        .legend(Legend::new().top("0"))
        .series(Boxplot::new().name("minimum, quartiles, p99").data(rows))
        .series(
            Scatter::new()
                .name("mean")
                .symbol_size(9.0)
                .data(means)
                .item_style(ItemStyle::new().color(COLOURS[5])),
        );
    let caption = format!("Latency, ms: {}", point.label());
    Some(Plot { caption, height: BASE_HEIGHT + measured.len() * ROW_HEIGHT, options: chart })
}

/// Each quantile's median over rounds.
fn typical(view: &View<'_>, system: &str, point: &Point) -> Option<Latency> {
    let all: Vec<Latency> =
        view.samples(system, point).iter().filter_map(|sample| sample.latency_ms).collect();
    let median = |get: fn(&Latency) -> f64| {
        Summary::of(&all.iter().map(get).collect::<Vec<_>>()).map_or(0.0, |summary| summary.median)
    };
    (!all.is_empty()).then(|| Latency {
        min: median(|l| l.min),
        p25: median(|l| l.p25),
        p50: median(|l| l.p50),
        p75: median(|l| l.p75),
        p99: median(|l| l.p99),
        max: median(|l| l.max),
        mean: median(|l| l.mean),
        count: all.iter().map(|l| l.count).sum(),
    })
}

/// Values to the right, categories down the side, first on top.
fn frame(categories: &[String]) -> Chart {
    Chart::new()
        .tooltip(Tooltip::new().trigger(Trigger::Axis))
        .grid(Grid::new().left("2%").right("5%").top("40").bottom("12").contain_label(true))
        .x_axis(Axis::new().type_(AxisType::Value).name_location(NameLocation::Middle))
        .y_axis(
            Axis::new()
                .type_(AxisType::Category)
                .inverse(true)
                .data(categories.to_vec())
                .axis_label(AxisLabel::new().font_size(11.0)),
        )
}

/// A point without the names of its coordinates where the value says enough.
fn short_label(point: &Point) -> String {
    let parts = point.0.iter().map(|(name, value)| match name.as_str() {
        "clients" => format!("c={value}"),
        "mode" | "workload" | "login" | "pooling" | "server" => value.clone(),
        _ => format!("{name}={value}"),
    });
    parts.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_short() {
        let point = Point::default().with("clients", 8).with("mode", "simple").with("queries", 2);
        assert_eq!(short_label(&point), "c=8 simple queries=2");
    }
}
