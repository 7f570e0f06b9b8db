// SPDX-License-Identifier: Apache-2.0
//! A replay's report as sections of the page that `underpass report` makes of its trace.

use std::fmt::Write as _;

use underpass_charts::{Section, escape};

use crate::latency::Quantiles;
use crate::report::Report;

/// Rows of a table on the page; all are in the JSON report.
const ROWS_MAX: usize = 200;

/// The sections, most important first.
pub fn sections(report: &Report) -> Vec<Section> {
    let mut sections = vec![
        Section { title: "Replay".into(), html: facts(report) },
        Section { title: "Replay: what came out differently".into(), html: differences(report) },
        Section { title: "Replay: latency there and here".into(), html: latencies(report) },
        Section { title: "Replay: sent late".into(), html: lateness(report) },
    ];
    for (title, lines) in [("Replay: not played", report.not_played()), ("Replay: notes", report.all_notes())]
    {
        if !lines.is_empty() {
            let items: String = lines.iter().map(|line| format!("<li>{}</li>", escape(line))).collect();
            sections.push(Section { title: title.into(), html: format!("<ul>{items}</ul>") });
        }
    }
    sections
}

fn facts(report: &Report) -> String {
    let counts = &report.counts;
    let rows = [
        ("target", format!("{}, {} {}", report.target, report.preflight.product, report.preflight.version)),
        ("compared with", report.compared_with.clone()),
        (
            "played",
            format!(
                "{} of {} units in {} sessions, {} cancel requests{}",
                counts.answered,
                counts.units,
                counts.sessions,
                counts.cancels,
                if report.stopped { "; stopped before the end" } else { "" }
            ),
        ),
        ("equal", format!("{} of {}; {} not known there", counts.equal, counts.compared, counts.unknown)),
        ("time", format!("{:.1} s; captured in {:.1} s", report.elapsed_s, report.captured_s)),
        ("pace, order", format!("{}, speed {}; order {}", report.pace, report.speed, report.order)),
    ];
    let mut html = String::from("<div class=\"scroll\"><table class=\"facts\">");
    for (name, value) in rows {
        let _ = write!(html, "<tr><th>{name}</th><td>{}</td></tr>", escape(&value));
    }
    html + "</table></div>"
}

fn differences(report: &Report) -> String {
    let mut html = String::new();
    for line in &report.shortcomings {
        let _ = write!(html, "<p>{}</p>", escape(line));
    }
    if report.is_equal() {
        html += "<p>Nothing.</p>";
    }
    if report.counts.unknown > 0 {
        let _ =
            write!(html, "<p>{} units have an outcome that is not known there.</p>", report.counts.unknown);
    }
    if report.divergences.is_empty() {
        return html;
    }
    html += &table(&["count", "difference", "fingerprint", "!statement", "!there", "!here", "session"]);
    for one in report.divergences.iter().take(ROWS_MAX) {
        let example = one.examples.first();
        let of = |text: Option<&String>| escape(text.map_or("", String::as_str));
        let _ = write!(
            html,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td class=\"text\">{}</td><td class=\"text\">{}</td>\
             <td class=\"text\">{}</td><td>{}</td></tr>",
            one.count,
            escape(one.kind.text()),
            escape(&one.fingerprint),
            escape(&one.statement),
            of(example.map(|example| &example.expected)),
            of(example.map(|example| &example.actual)),
            example.map_or_else(String::new, |example| example.session.to_string()),
        );
    }
    html += "</table></div>";
    html + &more(report.divergences.len())
}

fn latencies(report: &Report) -> String {
    let mut html = String::from(
        "<p>From sending to ReadyForQuery, microseconds. The ratio is the median over units of here by there, with its 90 % bootstrap \
         interval; it is shown in bold if the interval does not hold 1.</p>",
    );
    html += &table(&[
        "units",
        "p50 there",
        "p50 here",
        "p99 there",
        "p99 here",
        "here/there",
        "fingerprint",
        "!statement",
    ]);
    for group in report.groups.iter().take(ROWS_MAX) {
        let ratio = group.ratio.map_or_else(String::new, |ratio| {
            let text = format!("{:.2} [{:.2}, {:.2}]", ratio.median, ratio.low, ratio.high);
            if ratio.low > 1.0 || ratio.high < 1.0 { format!("<b>{text}</b>") } else { text }
        });
        let _ = write!(
            html,
            "<tr><td>{}</td><td>{:.0}</td><td>{:.0}</td><td>{:.0}</td><td>{:.0}</td><td>{ratio}</td><td>{}</td>\
             <td class=\"text\">{}</td></tr>",
            group.here.count,
            group.there.p50_us,
            group.here.p50_us,
            group.there.p99_us,
            group.here.p99_us,
            escape(&group.fingerprint),
            escape(&group.statement),
        );
    }
    html += "</table></div>";
    html + &more(report.groups.len())
}

fn lateness(report: &Report) -> String {
    let mut html = String::from(
        "<p>Microseconds. If <i>replayer late</i> is large, the replayer or its machine was too slow, and latencies say little.</p>",
    );
    html += &table(&["", "p50", "p95", "p99", "max"]);
    for (name, lag) in report.lags() {
        let Quantiles { p50_us, p95_us, p99_us, max_us, .. } = lag;
        let _ = write!(
            html,
            "<tr><td>{name}</td><td>{p50_us:.0}</td><td>{p95_us:.0}</td><td>{p99_us:.0}</td><td>{max_us:.0}</td></tr>"
        );
    }
    html + "</table></div>"
}

/// The beginning of a table; a column that begins with `!` holds text.
fn table(columns: &[&str]) -> String {
    let heads: String = columns
        .iter()
        .map(|column| match column.strip_prefix('!') {
            Some(column) => format!("<th class=\"text\">{column}</th>"),
            None => format!("<th>{column}</th>"),
        })
        .collect();
    format!("<div class=\"scroll\"><table><tr>{heads}</tr>")
}

fn more(rows: usize) -> String {
    match rows.checked_sub(ROWS_MAX) {
        None | Some(0) => String::new(),
        Some(more) => format!("<p>{more} more are in the JSON report.</p>"),
    }
}
