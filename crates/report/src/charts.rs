// SPDX-License-Identifier: Apache-2.0
//! The plots of the page, as ECharts options.

use charming::Chart;
use charming::component::{Axis, Grid, Legend};
use charming::element::{AxisLabel, AxisType, ItemStyle, LineStyle, Tooltip, Trigger};
use charming::series::{Bar, Line};
use hdrhistogram::Histogram;
use underpass_charts::{COLOURS, rounded};

use crate::Analysis;
use crate::text::{duration, shortened};

/// Statements in the plot of the most costly ones.
const TOP: usize = 12;
/// Intervals of a latency plot for each power of ten.
const PER_DECADE: f64 = 6.0;

/// One plot.
pub(crate) struct Plot {
    pub(crate) caption: &'static str,
    /// CSS pixels.
    pub(crate) height: usize,
    pub(crate) options: Chart,
}

/// All plots that the trace has numbers for.
pub(crate) fn of(analysis: &Analysis) -> Vec<Plot> {
    let mut plots = Vec::new();
    if analysis.statements > 0 {
        plots.push(load(analysis));
        plots.push(latency_over_time(analysis));
    }
    if analysis.sessions > 0 {
        plots.push(sessions(analysis));
    }
    plots.extend(distribution("Latencies of statements: how many took how long", &analysis.latency));
    plots.extend(top(analysis));
    plots.extend(distribution(
        "Transactions: how many lasted how long, from their first request to the end",
        &analysis.transaction_length,
    ));
    plots
}

fn load(analysis: &Analysis) -> Plot {
    let bins = analysis.bins.shown();
    let per_second = |count: u64| rounded(count as f64 * 1e9 / bins.width_ns as f64);
    let chart = over_time(bins.bins.len(), bins.width_ns)
        .y_axis(Axis::new().type_(AxisType::Value).min(0))
        .series(line("statements", bins.bins.iter().map(|bin| per_second(bin.statements)), 1))
        .series(line("errors", bins.bins.iter().map(|bin| per_second(bin.errors)), 5));
    Plot { caption: "Load: statements and errors a second", height: 260, options: chart }
}

fn latency_over_time(analysis: &Analysis) -> Plot {
    let bins = analysis.bins.shown();
    let at = |quantile: f64| {
        bins.bins.iter().map(move |bin| {
            if bin.latency.is_empty() { f64::NAN } else { ms(bin.latency.value_at_quantile(quantile)) }
        })
    };
    let chart = over_time(bins.bins.len(), bins.width_ns)
        .y_axis(Axis::new().type_(AxisType::Log))
        .series(line("p50", at(0.5), 1))
        .series(line("p95", at(0.95), 3))
        .series(line("p99", at(0.99), 5));
    Plot { caption: "Latency over time, ms", height: 260, options: chart }
}

fn sessions(analysis: &Analysis) -> Plot {
    let bins = analysis.bins.shown();
    let mut open = 0;
    let values = bins.bins.iter().map(|bin| {
        open += bin.sessions;
        open as f64
    });
    let chart = over_time(bins.bins.len(), bins.width_ns)
        .y_axis(Axis::new().type_(AxisType::Value).min(0))
        .series(line("open sessions", values, 4));
    Plot { caption: "Sessions that are open at the end of each interval", height: 200, options: chart }
}

/// Equal steps on a logarithmic axis, from the first that holds something to the last.
fn distribution(caption: &'static str, histogram: &Histogram<u64>) -> Option<Plot> {
    if histogram.is_empty() {
        return None;
    }
    let step = |ns: u64| (ns.max(1) as f64).log10() * PER_DECADE;
    let (first, last) = (step(histogram.min()).floor() as i32, step(histogram.max()).floor() as i32);
    let edge = |step: i32| 10f64.powf(f64::from(step) / PER_DECADE);
    let labels: Vec<String> = (first..=last).map(|at| duration(edge(at).round() as u64)).collect();
    let mut counts = vec![0u64; labels.len()];
    for value in histogram.iter_recorded() {
        let at = (step(value.value_iterated_to()).floor() as i32 - first).clamp(0, last - first) as usize;
        counts[at] += value.count_at_value();
    }
    let chart = Chart::new()
        .tooltip(Tooltip::new().trigger(Trigger::Axis))
        .grid(Grid::new().left("2%").right("3%").top("20").bottom("12").contain_label(true))
        .x_axis(Axis::new().type_(AxisType::Category).data(labels))
        .y_axis(Axis::new().type_(AxisType::Value))
        .series(
            Bar::new()
                .name("count")
                .data(counts.into_iter().map(|count| count as f64).collect::<Vec<_>>())
                .item_style(ItemStyle::new().color(COLOURS[1])),
        );
    Some(Plot { caption, height: 220, options: chart })
}

fn top(analysis: &Analysis) -> Option<Plot> {
    let top: Vec<_> = analysis.top().into_iter().take(TOP).collect();
    if top.is_empty() {
        return None;
    }
    let labels: Vec<String> = top.iter().map(|(_, one)| shortened(&one.label, 60)).collect();
    let seconds: Vec<f64> = top.iter().map(|(_, one)| rounded(one.total_ns as f64 / 1e9)).collect();
    let chart = Chart::new()
        .tooltip(Tooltip::new().trigger(Trigger::Axis))
        .grid(Grid::new().left("2%").right("5%").top("12").bottom("12").contain_label(true))
        .x_axis(Axis::new().type_(AxisType::Value))
        .y_axis(
            Axis::new()
                .type_(AxisType::Category)
                .inverse(true)
                .data(labels)
                .axis_label(AxisLabel::new().font_size(11.0)),
        )
        .series(Bar::new().name("seconds").data(seconds).item_style(ItemStyle::new().color(COLOURS[3])));
    let height = 70 + top.len() * 26;
    Some(Plot { caption: "Statements by the time they took in all, seconds", height, options: chart })
}

/// Seconds since the beginning along the foot.
fn over_time(count: usize, width_ns: u64) -> Chart {
    let labels = (0..count).map(|at| format!("{}s", rounded(at as f64 * width_ns as f64 / 1e9)));
    Chart::new()
        .tooltip(Tooltip::new().trigger(Trigger::Axis))
        .legend(Legend::new().top("0"))
        .grid(Grid::new().left("2%").right("3%").top("34").bottom("12").contain_label(true))
        .x_axis(Axis::new().type_(AxisType::Category).data(labels.collect::<Vec<String>>()))
}

/// A value that is no number is a gap.
fn line(name: &str, values: impl Iterator<Item = f64>, colour: usize) -> Line {
    let data = values.map(|value| {
        if value.is_nan() {
            charming::datatype::DataPoint::from("-")
        } else {
            charming::datatype::DataPoint::from(value)
        }
    });
    Line::new()
        .name(name)
        .show_symbol(false)
        .data(data.collect::<Vec<_>>())
        .line_style(LineStyle::new().width(1.5))
        .item_style(ItemStyle::new().color(COLOURS[colour % COLOURS.len()]))
}

/// Milliseconds for a logarithmic axis, which has no place for 0: a microsecond at least.
fn ms(ns: u64) -> f64 {
    rounded(ns.max(1_000) as f64 / 1e6)
}
