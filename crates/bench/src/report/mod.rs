// SPDX-License-Identifier: Apache-2.0
//! The page of a run: one HTML file that needs no network.

mod charts;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use underpass_charts::{escape, figure};

use crate::analysis::View;
use crate::experiments::{EXPERIMENTS, Experiment};
use crate::limits::{self, Judged, Limit, Verdict};
use crate::proof::Finding;
use crate::recordings;
use crate::sample::{Point, Results};
use crate::table::{self, interval};
use underpass_stats::Summary;

/// What a reader must know first.
const INTRODUCTION: &str = "<p>Every system did the same work in the same run, in random order within each round. Numbers are \
    medians over rounds; small ones beside them are the quartiles. The tax is the whole machine's CPU time per transaction minus \
    the direct connection's in the same round. Ratios are medians of per-round ratios with their 90 % bootstrap interval.</p>";

/// What the last column of the limits is.
const BARE_REDIRECTS: &str = " Bare redirects are programs without a protocol, of no more clients than there are servers or, where requests \
    are kept, with a bare queue: what they have of the same limit in the same run is the most that any program could have there.";

/// Writes the page.
///
/// # Errors
/// When the file cannot be written.
pub fn write(
    results: &Results,
    limits: &[Limit],
    judged: &[Judged],
    findings: &[Finding],
    path: &Path,
) -> Result<()> {
    let page = render(results, limits, judged, findings)?;
    fs::write(path, page).with_context(|| format!("cannot write {}", path.display()))
}

fn render(results: &Results, limits: &[Limit], judged: &[Judged], findings: &[Finding]) -> Result<String> {
    let mut body = INTRODUCTION.to_owned();
    body.push_str(&machine(results));
    body.push_str(&proof(findings));
    body.push_str(&limits_section(judged));
    for experiment in EXPERIMENTS.iter().filter(|e| results.samples.iter().any(|s| s.experiment == e.name)) {
        body.push_str(&section(experiment, results, limits)?);
    }
    Ok(underpass_charts::page("Underpass benchmarks", &body))
}

fn section(experiment: &Experiment, results: &Results, limits: &[Limit]) -> Result<String> {
    let view = View::of(results, experiment.name);
    let mut text = format!(
        "<section id=\"{name}\"><h2>{title}</h2><p>{shows}</p><p class=\"paper\">Follows: {paper}.</p>",
        name = experiment.name,
        title = escape(experiment.title),
        shows = escape(experiment.shows),
        paper = escape(experiment.paper),
    );
    text.push_str(&scale(experiment, &view, results));
    for chart in charts::of(&view, results) {
        text.push_str(&figure(&chart.caption, chart.height, &chart.options)?);
    }
    for point in view.points() {
        text.push_str(&point_table(experiment, &view, point, results, limits));
    }
    text.push_str("</section>\n");
    Ok(text)
}

/// Our scale beside the paper's, and whether the word repeat is allowed.
fn scale(experiment: &Experiment, view: &View<'_>, results: &Results) -> String {
    let points = view.points();
    let most_clients =
        points.iter().filter_map(|point| point.get("clients").parse::<u64>().ok()).max().unwrap_or(1);
    let used: Vec<_> = points
        .iter()
        .filter_map(|point| table::data_of(experiment, point, results))
        .collect::<BTreeMap<_, _>>()
        .into_iter()
        .collect();
    let ours = if used.is_empty() {
        "none".to_owned()
    } else {
        used.iter()
            .map(|(name, data)| format!("{name} {} rows, {:.0} MB", data.rows, data.mb))
            .collect::<Vec<_>>()
            .join("; ")
    };
    let longest = points
        .iter()
        .map(|point| table::time_of(view, point))
        .max_by(|a, b| a.seconds.total_cmp(&b.seconds).then(a.rounds.cmp(&b.rounds)));
    let repeats =
        points.iter().filter(|point| table::is_repeat(experiment, point, results) == Some(true)).count();
    let verdict = match (experiment.scale.clients, repeats) {
        ("-", _) => "no paper has this experiment".to_owned(),
        (_, 0) => "smaller than the paper's: no repeat of it".to_owned(),
        (_, count) => format!("{count} of {} points are large enough to be called a repeat", points.len()),
    };
    format!(
        "<div class=\"scroll\"><table><tr><th>scale</th><th>data</th><th>clients</th><th>seconds</th></tr>\
         <tr><td>here, at most</td><td>{ours}</td><td>{most_clients}</td><td>{}</td></tr>\
         <tr><td>paper</td><td>{}</td><td>{}</td><td>{}</td></tr></table></div><p class=\"paper\">{verdict}</p>",
        longest.map_or_else(String::new, |time| time.to_string()),
        escape(experiment.scale.data),
        escape(experiment.scale.clients),
        escape(experiment.scale.seconds),
    )
}

fn point_table(
    experiment: &Experiment,
    view: &View<'_>,
    point: &Point,
    results: &Results,
    limits: &[Limit],
) -> String {
    let systems = table::in_table_order(&view.systems_at(point), results);
    let columns: Vec<_> = table::COLUMNS
        .iter()
        .filter(|(name, ..)| systems.iter().any(|system| !view.values(system, point, name).is_empty()))
        .collect();
    let mut text = format!(
        "<h3>{} <small>{}</small></h3><div class=\"scroll\"><table><tr><th>system</th>",
        escape(&point.label()),
        escape(&table::scale_of(experiment, view, point, results))
    );
    for (_, heading, _) in &columns {
        let _ = write!(text, "<th>{heading}</th>");
    }
    text.push_str("<th>ratio</th></tr>");
    for system in systems {
        let _ = write!(text, "<tr><td>{}</td>", escape(&charts::title(results, system)));
        for (name, _, digits) in &columns {
            let value = Summary::of(&view.values(system, point, name));
            let shown = value.map_or_else(String::new, |summary| match summary.rounds {
                1 => format!("{:.digits$}", summary.median),
                _ => format!(
                    "{:.digits$} <small>{:.digits$}–{:.digits$}</small>",
                    summary.median, summary.low, summary.high
                ),
            });
            let _ = write!(text, "<td>{shown}</td>");
        }
        let ratio = table::headline(view, system, point).map_or_else(String::new, |ratio| ratio.to_string());
        let carried = limits::carried(limits, view, system, point) != Some(false);
        let failed = match (carried, recordings::whole(view, system, point)) {
            (false, _) => " <span class=\"not-met\">failed: not in the lane</span>",
            (true, Some(false)) => " <span class=\"not-met\">failed: not recorded as a whole</span>",
            _ => "",
        };
        let _ = write!(text, "<td>{ratio}{failed}</td></tr>");
    }
    text.push_str("</table></div>\n");
    text
}

fn machine(results: &Results) -> String {
    let meta = &results.meta;
    let mut text = String::from("<section><div class=\"scroll\"><table class=\"facts\">");
    let mut row = |name: &str, value: &str| {
        let _ = write!(text, "<tr><th>{}</th><td>{}</td></tr>", escape(name), escape(value));
    };
    row("began", &meta.began);
    row("revision", &meta.revision);
    row("kernel", &meta.kernel);
    row("CPU", &format!("{} x {}", meta.cpus, meta.cpu));
    row("memory", &format!("{} MiB", meta.memory_mib));
    row("hosts", &meta.topology);
    row("command", &meta.command);
    for (name, version) in &meta.versions {
        row(name, version);
    }
    for (what, value) in &meta.joined {
        row(what, value);
    }
    for skipped in &meta.skipped {
        row("left out", skipped);
    }
    if results.interrupted {
        row("interrupted", "holds what was measured until then");
    }
    let failed = results.samples.iter().filter(|sample| sample.error.is_some()).count();
    if failed > 0 {
        row("failed", &format!("{failed} of {} measurements", results.samples.len()));
    }
    text.push_str("</table></div></section>\n");
    text
}

fn proof(findings: &[Finding]) -> String {
    if findings.is_empty() {
        return String::new();
    }
    let items: String = findings
        .iter()
        .map(|finding| {
            let class = if finding.holds { "met" } else { "not-met" };
            format!("<li class=\"{class}\">{}</li>", escape(&finding.text))
        })
        .collect();
    format!("<section><h2>What the run proves of itself</h2><ul>{items}</ul></section>\n")
}

fn limits_section(judged: &[Judged]) -> String {
    if judged.is_empty() {
        return String::new();
    }
    let count = |verdict| judged.iter().filter(|one| one.verdict == verdict).count();
    let has_floors = judged.iter().any(|one| !one.floors.is_empty());
    let (about, heading) =
        if has_floors { (BARE_REDIRECTS, format!("<th>{}</th>", table::FLOOR)) } else { ("", String::new()) };
    let mut text = format!(
        "<section><h2>Limits</h2><p>{} of {} met, {} not met, {} failed because the lane did not carry the row, {} because not all was recorded, {} undecided.{about}</p>\
         <div class=\"scroll\"><table class=\"limits\"><tr><th>limit</th><th>bound</th><th>median, 90 % interval</th>\
         <th>verdict</th><th>aim</th><th>rounds</th>{heading}</tr>",
        count(Verdict::Met),
        judged.len(),
        count(Verdict::NotMet),
        count(Verdict::NotCarried),
        count(Verdict::NotRecorded),
        count(Verdict::Undecided),
    );
    for one in judged {
        let class = match one.verdict {
            Verdict::Met => "met",
            Verdict::NotMet | Verdict::NotCarried | Verdict::NotRecorded => "not-met",
            Verdict::Undecided => "undecided",
        };
        let floors =
            if has_floors { format!("<td>{}</td>", escape(&table::floors(one))) } else { String::new() };
        let _ = write!(
            text,
            "<tr><td>{} <small>{}</small></td><td>{}</td><td>{}</td><td class=\"{class}\">{}</td><td>{}</td><td>{}</td>{floors}</tr>",
            escape(&one.limit.source),
            escape(&one.point.label()),
            escape(&one.bounds.to_string()),
            interval(&one.estimate),
            one.verdict,
            one.bounds.aim.map_or_else(String::new, |aim| format!("{aim:.2}")),
            one.estimate.rounds,
        );
    }
    text.push_str("</table></div></section>\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::tests::sample;

    #[test]
    fn the_page_is_one_file_with_its_charts_and_without_the_network() {
        let mut results = Results::default();
        results.meta.cpu = "a <b> & c".into();
        let point = Point::default().with("clients", 8);
        for round in 0..3 {
            results.samples.push(sample("direct", round, &point, 20.0, 80_000.0));
            results.samples.push(sample("pgbouncer", round, &point, 30.0, 60_000.0));
        }
        let page = render(&results, &[], &[], &[]).unwrap();
        assert!(page.contains("echarts") && page.contains("\"type\":\"bar\""));
        assert!(page.contains("a &lt;b&gt; &amp; c"));
        let without_script = page.replace(underpass_charts::ECHARTS, "");
        assert!(without_script.contains("width=device-width") && !without_script.contains("https://"));
    }

    #[test]
    fn the_longest_time_is_told() {
        let experiment = crate::experiments::find("many").unwrap();
        let mut results = Results::default();
        for (clients, seconds) in [(8, 9.5), (16, 10.0)] {
            let mut one = sample("direct", 0, &Point::default().with("clients", clients), 1.0, 1.0);
            one.experiment = "many".into();
            one.metrics.insert(crate::sample::metric::SECONDS.into(), seconds);
            results.samples.push(one);
        }
        let text = scale(experiment, &View::of(&results, "many"), &results);
        assert!(text.contains("10.0 s in each of 1 rounds"), "{text}");
    }

    #[test]
    fn only_a_large_run_is_called_a_repeat() {
        let experiment = crate::experiments::find("many").unwrap();
        let mut results = Results::default();
        let point = Point::default().with("clients", 1000).with("workload", "ycsb");
        let mut one = sample("direct", 0, &point, 1.0, 1.0);
        one.experiment = "many".into();
        results.samples.push(one);
        let data = |mb| crate::sample::LoadedData { rows: 10, mb };
        results.meta.data.insert("ycsb".into(), data(120.0));
        assert!(scale(experiment, &View::of(&results, "many"), &results).contains("no repeat"));
        results.meta.data.insert("ycsb".into(), data(2300.0));
        assert!(scale(experiment, &View::of(&results, "many"), &results).contains("called a repeat"));
    }
}
