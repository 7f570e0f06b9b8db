// SPDX-License-Identifier: Apache-2.0
//! The summary for a terminal.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::Analysis;
use crate::analysis::{DIRECTIONS, KnownServer, NEVER_RECORDED, Statement};

/// Databases of one server that are named.
const DATABASES_MAX: usize = 10;

/// The summary, with this many statements.
pub fn text(analysis: &Analysis, top: usize) -> String {
    let mut out = String::new();
    let meta = &analysis.meta;
    let mut line = |name: &str, value: String| {
        let _ = writeln!(out, "{name:<13} {value}");
    };
    let servers = servers(analysis);
    if servers.is_empty() {
        let version =
            if meta.server.version.is_empty() { "of unknown version" } else { &meta.server.version };
        line("server", format!("{} {version}{}", protocol(analysis), on(&meta.host)));
    } else {
        line("recorded by", format!("a pooler{}", on(&meta.host)));
        servers.into_iter().for_each(|server| line("server", server));
    }
    if let Some((first, last)) = analysis.span_ns {
        let (first, last) = (when(analysis, first), when(analysis, last));
        line(
            "recorded",
            format!("{first} to {last}, {} s, {} records", seconds(analysis.seconds()), analysis.records),
        );
    } else {
        line("recorded", "nothing".to_owned());
    }
    line(
        "sessions",
        format!(
            "{} ({} at most at a time, {} joined midstream, {} failed logins)",
            analysis.sessions, analysis.sessions_max, analysis.midstream, analysis.failed_logins
        ),
    );
    let rate = analysis.statements as f64 / analysis.seconds().max(1e-9);
    let rate = if analysis.seconds() > 0.0 { format!(", {rate:.0} a second") } else { String::new() };
    line("statements", format!("{}{rate}, {} errors", analysis.statements, analysis.errors));
    if !analysis.latency.is_empty() {
        let at = |quantile| duration(analysis.latency.value_at_quantile(quantile));
        line(
            "latency",
            format!(
                "p50 {}, p95 {}, p99 {}, max {}",
                at(0.5),
                at(0.95),
                at(0.99),
                duration(analysis.latency.max())
            ),
        );
    }
    if analysis.transactions > 0 {
        let length = &analysis.transaction_length;
        line(
            "transactions",
            format!(
                "{} blocks, {} failed; p50 {}, p99 {}, max {}",
                analysis.transactions,
                analysis.transactions_failed,
                duration(length.value_at_quantile(0.5)),
                duration(length.value_at_quantile(0.99)),
                duration(length.max())
            ),
        );
    }
    for (sum, (_, name)) in analysis.totals.iter().zip(DIRECTIONS) {
        if sum.seen > 0 {
            line(
                "bytes",
                format!(
                    "{name}: {} seen = {} recorded + {} lost + {} withheld",
                    sum.seen, sum.recorded, sum.lost, sum.withheld
                ),
            );
        }
    }
    statements(analysis, top, &mut out);
    errors(analysis, &mut out);
    let caveats = analysis.caveats();
    let _ = writeln!(out, "\nWhat this trace does not know");
    for caveat in &caveats {
        let _ = writeln!(out, "  {caveat}");
    }
    if caveats.is_empty() {
        let _ = writeln!(out, "  Nothing is known to be missing.");
    }
    let _ = writeln!(out, "  {NEVER_RECORDED}");
    out
}

fn statements(analysis: &Analysis, top: usize, out: &mut String) {
    let statements = analysis.top();
    if statements.is_empty() || top == 0 {
        return;
    }
    let total: u128 = statements.iter().map(|(_, statement)| statement.total_ns).sum();
    let _ = writeln!(
        out,
        "\n{:>6} {:>9} {:>8} {:>8} {:>8} {:>9} {:>7}  statement",
        "time", "count", "mean", "p95", "p99", "rows", "errors"
    );
    for (_, one) in statements.iter().take(top) {
        let share = one.total_ns as f64 / total.max(1) as f64 * 100.0;
        let _ = writeln!(
            out,
            "{share:>5.1}% {:>9} {:>8} {:>8} {:>8} {:>9} {:>7}  {}",
            one.count,
            time(one, one.mean_ns()),
            time(one, one.latency.value_at_quantile(0.95)),
            time(one, one.latency.value_at_quantile(0.99)),
            one.rows,
            one.errors,
            shortened(&one.label, 100)
        );
    }
    if statements.len() > top {
        let _ = writeln!(out, "       ... and {} more", statements.len() - top);
    }
}

/// A latency of a statement, if any is known.
pub(crate) fn time(one: &Statement, ns: u64) -> String {
    if one.latency.is_empty() { "-".to_owned() } else { duration(ns) }
}

fn errors(analysis: &Analysis, out: &mut String) {
    if analysis.by_sqlstate.is_empty() {
        return;
    }
    let _ = writeln!(out, "\n{:>9}  SQLSTATE", "errors");
    let mut classes: Vec<_> = analysis.by_sqlstate.iter().collect();
    classes.sort_by_key(|(_, class)| std::cmp::Reverse(class.count));
    for (sqlstate, class) in classes.iter().take(10) {
        let _ = writeln!(out, "{:>9}  {sqlstate}  {}", class.count, shortened(&class.example, 100));
    }
}

/// The servers behind a pooler that recorded, each with its databases.
pub(crate) fn servers(analysis: &Analysis) -> Vec<String> {
    let mut databases = BTreeMap::<_, Vec<&str>>::new();
    for (database, server) in &analysis.servers {
        databases.entry(server).or_default().push(database);
    }
    let one = |(server, databases): (&KnownServer, Vec<&str>)| {
        let shown = &databases[..databases.len().min(DATABASES_MAX)];
        let more = if databases.len() > shown.len() { ", ..." } else { "" };
        let identifier = server.system_identifier.as_deref().unwrap_or("unknown");
        format!(
            "{} {} at {}, system identifier {identifier}: {}{more}",
            protocol(analysis),
            server.version,
            server.address,
            shown.join(", ")
        )
    };
    databases.into_iter().map(one).collect()
}

/// The protocol's name for readers.
pub(crate) fn protocol(analysis: &Analysis) -> &'static str {
    match analysis.meta.protocol {
        underpass_trace::Protocol::Postgres => "PostgreSQL",
        underpass_trace::Protocol::Mysql if analysis.meta.server.version.contains("MariaDB") => "MariaDB",
        underpass_trace::Protocol::Mysql => "MySQL",
    }
}

fn on(host: &str) -> String {
    if host.is_empty() { String::new() } else { format!(" on {host}") }
}

/// A monotonic time as a date, or as seconds if the trace has no clock.
pub(crate) fn when(analysis: &Analysis, time_ns: u64) -> String {
    let utc = analysis.utc_ns(time_ns).and_then(|ns| jiff::Timestamp::from_nanosecond(ns).ok());
    utc.map_or_else(
        || format!("{:.3} s", time_ns as f64 / 1e9),
        |time| time.strftime("%Y-%m-%d %H:%M:%S UTC").to_string(),
    )
}

fn seconds(seconds: f64) -> String {
    if seconds < 10.0 { format!("{seconds:.2}") } else { format!("{seconds:.0}") }
}

/// Nanoseconds with a unit, three digits.
pub(crate) fn duration(ns: u64) -> String {
    let value = ns as f64;
    let (value, unit) = match ns {
        0..1_000 => return format!("{ns}ns"),
        1_000..1_000_000 => (value / 1e3, "us"),
        1_000_000..1_000_000_000 => (value / 1e6, "ms"),
        _ => (value / 1e9, "s"),
    };
    let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.digits$}{unit}")
}

/// At most this many characters, on one line, and nothing that would command the terminal.
pub(crate) fn shortened(text: &str, chars: usize) -> String {
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    let mut short: String = text.chars().map(clean).take(chars).collect();
    if text.chars().nth(chars).is_some() {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_three_digits() {
        let texts: Vec<_> = [999, 1_000, 12_345, 123_456, 1_234_567, 98_765_432_100].map(duration).into();
        assert_eq!(texts, ["999ns", "1.00us", "12.3us", "123us", "1.23ms", "98.8s"]);
    }

    #[test]
    fn labels_do_not_command_the_terminal() {
        assert_eq!(shortened("a\x1b[2Jb\nc", 20), "a [2Jb c");
        assert_eq!(shortened("abcdef", 3), "abc…");
    }
}
