// SPDX-License-Identifier: Apache-2.0
//! The report as one HTML file that needs no network.

use std::fmt::Write as _;

use underpass_charts::{Section, escape, figure};

use crate::analysis::{DIRECTIONS, NEVER_RECORDED};
use crate::text::{duration, protocol, servers, time, when};
use crate::{Analysis, charts};

/// The page, with this many statements in its table, and further sections at its end.
///
/// # Errors
/// When a plot cannot be serialised, which is a bug.
pub fn page(analysis: &Analysis, top: usize, more: &[Section]) -> Result<String, serde_json::Error> {
    let mut body = facts(analysis);
    body.push_str(&honesty(analysis));
    for plot in charts::of(analysis) {
        body.push_str(&figure(plot.caption, plot.height, &plot.options)?);
    }
    body.push_str(&statements(analysis, top));
    body.push_str(&errors(analysis));
    body.push_str(&groups(analysis));
    body.push_str(&accounts(analysis));
    for section in more {
        let _ = writeln!(body, "<section><h2>{}</h2>{}</section>", escape(&section.title), section.html);
    }
    let host = &analysis.meta.host;
    let title = if host.is_empty() { "Workload".to_owned() } else { format!("Workload of {host}") };
    Ok(underpass_charts::page(&title, &body))
}

fn facts(analysis: &Analysis) -> String {
    let meta = &analysis.meta;
    let mut text = String::from("<section><div class=\"scroll\"><table class=\"facts\">");
    let mut row = |name: &str, value: String| {
        if !value.is_empty() {
            let _ = write!(text, "<tr><th>{}</th><td>{}</td></tr>", escape(name), escape(&value));
        }
    };
    let servers = servers(analysis);
    if servers.is_empty() {
        row("server", format!("{} {}", protocol(analysis), meta.server.version));
    }
    servers.into_iter().for_each(|server| row("server", server));
    row("system identifier", meta.server.system_identifier.clone().unwrap_or_default());
    row("addresses", meta.server.addresses.join(", "));
    row("host", [&meta.host[..], &meta.kernel].join(" ").trim().to_owned());
    if let Some((first, last)) = analysis.span_ns {
        row("recorded", format!("{} to {}", when(analysis, first), when(analysis, last)));
    }
    row("recorder", format!("{}, level {:?}, {}", meta.writer, meta.level, meta.sources.join(", ")));
    row("statements", format!("{}, {} errors", analysis.statements, analysis.errors));
    let rate = analysis.statements as f64 / analysis.seconds().max(1e-9);
    row(
        "load",
        if analysis.seconds() > 0.0 { format!("{rate:.0} statements a second") } else { String::new() },
    );
    if !analysis.latency.is_empty() {
        let at = |quantile| duration(analysis.latency.value_at_quantile(quantile));
        let max = duration(analysis.latency.max());
        row(
            "latency",
            format!("p50 {}, p95 {}, p99 {}, p99.9 {}, max {max}", at(0.5), at(0.95), at(0.99), at(0.999)),
        );
    }
    row(
        "sessions",
        format!(
            "{}, {} at most at a time, {} failed logins, {} cancel requests",
            analysis.sessions, analysis.sessions_max, analysis.failed_logins, analysis.cancels
        ),
    );
    if analysis.transactions > 0 {
        let (length, requests) = (&analysis.transaction_length, &analysis.transaction_requests);
        row(
            "transaction blocks",
            format!(
                "{}, {} failed; length p50 {}, p99 {}, max {}; requests p50 {}, max {}",
                analysis.transactions,
                analysis.transactions_failed,
                duration(length.value_at_quantile(0.5)),
                duration(length.value_at_quantile(0.99)),
                duration(length.max()),
                requests.value_at_quantile(0.5),
                requests.max()
            ),
        );
    }
    text.push_str("</table></div></section>\n");
    text
}

fn honesty(analysis: &Analysis) -> String {
    let caveats = analysis.caveats();
    let class = if caveats.is_empty() { "honesty whole" } else { "honesty" };
    let mut text = format!("<section class=\"{class}\"><h2>What this trace does not know</h2><ul>");
    for caveat in &caveats {
        let _ = write!(text, "<li>{}</li>", escape(caveat));
    }
    if caveats.is_empty() {
        text.push_str("<li>Nothing is known to be missing.</li>");
    }
    let _ = writeln!(text, "<li>{NEVER_RECORDED}</li></ul></section>");
    text
}

fn statements(analysis: &Analysis, top: usize) -> String {
    let statements = analysis.top();
    if statements.is_empty() {
        return String::new();
    }
    let total: u128 = statements.iter().map(|(_, one)| one.total_ns).sum();
    let mut text = String::from(
        "<section><h2>Statements</h2><p>Statements that differ in literals only count together. Time is what their clients waited.</p>\
         <div class=\"scroll\"><table><tr><th>fingerprint</th><th>time</th><th>count</th><th>mean</th><th>p50</th><th>p95</th>\
         <th>p99</th><th>max</th><th>rows</th><th>bytes</th><th>errors</th><th class=\"text\">statement</th></tr>",
    );
    for (fingerprint, one) in statements.iter().take(top) {
        let at = |quantile| time(one, one.latency.value_at_quantile(quantile));
        let _ = write!(
            text,
            "<tr><td>{fingerprint:016x}</td><td>{:.1} %</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td>\
             <td>{}</td><td>{}</td><td>{}</td><td class=\"text\">{}</td></tr>",
            one.total_ns as f64 / total.max(1) as f64 * 100.0,
            one.count,
            time(one, one.mean_ns()),
            at(0.5),
            at(0.95),
            at(0.99),
            time(one, one.latency.max()),
            one.rows,
            one.bytes,
            one.errors,
            escape(&crate::text::shortened(&one.label, 2_000)),
        );
    }
    text.push_str("</table></div>");
    if statements.len() > top {
        let _ = write!(text, "<p>{} more are not shown.</p>", statements.len() - top);
    }
    text.push_str("</section>\n");
    text
}

fn errors(analysis: &Analysis) -> String {
    if analysis.by_sqlstate.is_empty() {
        return String::new();
    }
    let mut text = String::from(
        "<section><h2>Errors</h2><div class=\"scroll\"><table><tr><th>SQLSTATE</th><th>count</th><th>fingerprint of one</th>\
         <th class=\"text\">message of one</th></tr>",
    );
    let mut classes: Vec<_> = analysis.by_sqlstate.iter().collect();
    classes.sort_by_key(|(_, class)| std::cmp::Reverse(class.count));
    for (sqlstate, class) in classes {
        let fingerprint = class.fingerprint.map_or_else(String::new, |print| format!("{print:016x}"));
        let _ = write!(
            text,
            "<tr><td>{}</td><td>{}</td><td>{fingerprint}</td><td class=\"text\">{}</td></tr>",
            escape(sqlstate),
            class.count,
            escape(&class.example)
        );
    }
    text.push_str("</table></div></section>\n");
    text
}

fn groups(analysis: &Analysis) -> String {
    let mut groups: Vec<_> = analysis.by_group.iter().collect();
    groups.sort_by_key(|(_, group)| std::cmp::Reverse(group.statements));
    let mut text = String::from(
        "<section><h2>Sessions</h2><div class=\"scroll\"><table><tr><th>database</th><th>user</th><th>application_name</th>\
         <th>sessions</th><th>statements</th><th>errors</th></tr>",
    );
    for ([database, user, application], group) in groups.iter().take(100) {
        let _ = write!(
            text,
            "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            escape(database),
            escape(user),
            escape(application),
            group.sessions,
            group.statements,
            group.errors
        );
    }
    text.push_str("</table></div>");
    if !analysis.session_length.is_empty() {
        let length = &analysis.session_length;
        let _ = write!(
            text,
            "<p>Sessions that began and ended in the trace lasted p50 {}, p99 {}, max {}.</p>",
            duration(length.value_at_quantile(0.5)),
            duration(length.value_at_quantile(0.99)),
            duration(length.max())
        );
    }
    text.push_str("</section>\n");
    text
}

/// Where the bytes went.
fn accounts(analysis: &Analysis) -> String {
    let mut text = String::from(
        "<section><h2>Accounts</h2><p>Of the sessions that ended: bytes seen = recorded + lost + withheld.</p>\
         <div class=\"scroll\"><table><tr><th>bytes</th><th>seen</th><th>recorded</th><th>lost</th><th>withheld</th></tr>",
    );
    for (sum, (_, name)) in analysis.totals.iter().zip(DIRECTIONS) {
        let _ = write!(
            text,
            "<tr><td>{name}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            sum.seen, sum.recorded, sum.lost, sum.withheld
        );
    }
    text.push_str("</table></div></section>\n");
    text
}
