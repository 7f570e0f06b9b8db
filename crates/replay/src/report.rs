// SPDX-License-Identifier: Apache-2.0
//! What a replay found, for people and for programs.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;
use underpass_stats::Estimate;

use crate::compare::{self, Compared, Divergence, Found, Kind};
use crate::latency::{self, Lag, Quantiles};
use crate::outcome::UnitOutcome;
use crate::plan::{Omitted, Plan, Rows, Unit};
use crate::preflight::{Preflight, volatile};
use crate::run::{Options, Pace, Played};

/// So many groups are printed.
const GROUPS_PRINTED: usize = 15;
/// So many differences are printed.
const DIVERGENCES_PRINTED: usize = 10;

/// The whole report; its JSON form is described in docs/replay.md.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Form of this report; grows when fields change their meaning.
    pub version: u32,
    /// What it was compared with: `capture`, or the other target.
    pub compared_with: String,
    /// Host and port.
    pub target: String,
    /// What was found out about the target.
    pub preflight: Preflight,
    /// `timed`, `think` or `asap`.
    pub pace: &'static str,
    /// Times as fast as at capture.
    pub speed: f64,
    /// `none` or `commit`.
    pub order: &'static str,
    /// Whether writes were left out.
    pub read_only: bool,
    /// When the replay began, seconds since 1970.
    pub started_unix: f64,
    /// How long it took, seconds.
    pub elapsed_s: f64,
    /// How long the played part of the trace is, seconds.
    pub captured_s: f64,
    /// Whether it was stopped before its end.
    pub stopped: bool,
    /// Processor time of the replayer, seconds.
    pub replayer_cpu_s: f64,
    /// Sessions and units.
    pub counts: Counts,
    /// What was not played.
    pub omitted: Omitted,
    /// Why it is not known that nothing came out differently, a line each: the replay was stopped, for example.
    pub shortcomings: Vec<String>,
    /// Differences by kind.
    pub kinds: BTreeMap<Kind, u64>,
    /// Errors 25P02 that were folded into the error before them.
    pub cascades: u64,
    /// Differences by group and kind, with examples.
    pub divergences: Vec<Difference>,
    /// Latencies, by group.
    pub groups: Vec<GroupReport>,
    /// How late units were sent.
    pub lag: Lag,
    /// Functions whose result changes from run to run, with the units that call them.
    pub volatile: BTreeMap<String, u64>,
    /// Sessions that were not connected, or lost their connection, with the reason.
    pub broken_sessions: Vec<(u64, String)>,
    /// The same on the other target.
    pub baseline_broken_sessions: Vec<(u64, String)>,
    /// Other things worth knowing.
    pub notes: Vec<String>,
}

/// Sessions and units.
#[derive(Debug, Default, Serialize)]
pub struct Counts {
    /// Sessions of the plan.
    pub sessions: usize,
    /// Those that recording joined in their middle.
    pub midstream_sessions: usize,
    /// Units of the plan.
    pub units: usize,
    /// Those that were answered.
    pub answered: u64,
    /// Those that were not sent because the replay was stopped.
    pub not_sent: u64,
    /// Those that were compared.
    pub compared: u64,
    /// Those without a difference.
    pub equal: u64,
    /// Those whose outcome there is not known.
    pub unknown: u64,
    /// Commits that others may have waited for.
    pub commits: usize,
    /// Units that were sent before commits they should have waited for.
    pub released: u64,
    /// CancelRequests that were sent: as long after the statement as at capture, if it had not ended by then.
    pub cancels: u64,
}

/// One kind of difference in one group.
#[derive(Debug, Serialize)]
pub struct Difference {
    /// Fingerprint of the group.
    pub fingerprint: String,
    /// Its statement, literals replaced.
    pub statement: String,
    /// How it differs.
    pub kind: Kind,
    /// How often.
    pub count: u64,
    /// The first of them.
    pub examples: Vec<Divergence>,
}

/// Latency of one group, there and here, from sending to ReadyForQuery.
#[derive(Debug, Serialize)]
pub struct GroupReport {
    /// Its fingerprint.
    pub fingerprint: String,
    /// Its statement, literals replaced.
    pub statement: String,
    /// There: at capture, or on the other target.
    pub there: Quantiles,
    /// Here.
    pub here: Quantiles,
    /// Median of here by there, with its 90 % bootstrap interval.
    pub ratio: Option<Estimate>,
}

impl Report {
    /// Puts the report together. `baseline` is the replay on the other target, with its name, if there was one.
    pub fn new(
        plan: &Plan,
        target: String,
        options: &Options,
        preflight: Preflight,
        played: &Played,
        baseline: Option<(&str, &Played)>,
    ) -> Self {
        let compared = match baseline {
            Some((_, baseline)) => compare::with_other(plan, baseline, played),
            None => compare::with_capture(plan, played),
        };
        let group = |group: u32| {
            let group = &plan.groups[group as usize];
            (group.key.clone(), group.label.clone())
        };
        let groups = latency::by_group(plan, baseline.map(|(_, baseline)| baseline), played)
            .into_iter()
            .map(|latency| {
                let (fingerprint, statement) = group(latency.group);
                GroupReport {
                    fingerprint,
                    statement,
                    there: latency.there,
                    here: latency.here,
                    ratio: latency.ratio,
                }
            })
            .collect();
        Self {
            version: 1,
            compared_with: baseline.map_or("capture", |(name, _)| name).to_owned(),
            target,
            pace: match options.pace {
                Pace::Timed => "timed",
                Pace::Think => "think",
                Pace::Asap => "asap",
            },
            speed: options.speed,
            order: if options.order_commit { "commit" } else { "none" },
            read_only: options.read_only,
            started_unix: played
                .started
                .duration_since(std::time::UNIX_EPOCH)
                .map_or(0.0, |since| since.as_secs_f64()),
            elapsed_s: played.elapsed.as_secs_f64(),
            captured_s: (plan.end_ns - plan.origin_ns) as f64 / 1e9,
            stopped: played.stopped,
            replayer_cpu_s: played.cpu.as_secs_f64(),
            counts: counts(plan, played, &compared),
            shortcomings: shortcomings(plan, played, baseline, &compared),
            omitted: plan.omitted.clone(),
            cascades: compared.cascades,
            divergences: differences(compared.divergences, group),
            kinds: compared.kinds,
            groups,
            lag: latency::lag(played),
            volatile: volatile(plan, played),
            broken_sessions: broken_sessions(plan, played),
            baseline_broken_sessions: baseline
                .map_or_else(Vec::new, |(_, baseline)| broken_sessions(plan, baseline)),
            notes: notes(plan, options, played, baseline.is_some()),
            preflight,
        }
    }

    /// Whether nothing came out differently, as far as that is known of single units, and nothing kept the rest from being compared.
    pub fn is_equal(&self) -> bool {
        self.kinds.is_empty() && self.broken_sessions.is_empty() && self.shortcomings.is_empty()
    }

    /// The report for a terminal.
    pub fn text(&self) -> String {
        let mut out = String::new();
        // Writing to a String does not fail.
        let _ = self.write(&mut out);
        quiet(&out)
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let counts = &self.counts;
        writeln!(
            out,
            "Played {} of {} units in {} sessions on {} ({} {}) in {:.1} s; captured in {:.1} s.{}",
            counts.answered,
            counts.units,
            counts.sessions,
            self.target,
            self.preflight.product,
            self.preflight.version,
            self.elapsed_s,
            self.captured_s,
            if self.stopped { " Stopped before the end." } else { "" }
        )?;
        writeln!(
            out,
            "Pace {}, speed {}, order {}{}. Replayer: {:.2} s of processor time.",
            self.pace,
            self.speed,
            self.order,
            if self.read_only { ", read-only" } else { "" },
            self.replayer_cpu_s
        )?;
        writeln!(
            out,
            "\nCompared with {}: {} units, {} equal, {} with an outcome that is not known there.",
            self.compared_with, counts.compared, counts.equal, counts.unknown
        )?;
        self.shortcomings.iter().try_for_each(|line| writeln!(out, "  {line}"))?;
        for (kind, count) in &self.kinds {
            writeln!(out, "  {count:>8}  {}", kind.text())?;
        }
        if self.cascades > 0 {
            writeln!(
                out,
                "  {:>8}  results that only follow from such an error in their transaction",
                self.cascades
            )?;
        }
        for difference in self.divergences.iter().take(DIVERGENCES_PRINTED) {
            let Some(example) = difference.examples.first() else { continue };
            writeln!(
                out,
                "\n  {} x {}: {}",
                difference.count,
                difference.kind.text(),
                line(&difference.statement, 90)
            )?;
            writeln!(out, "      there: {}", line(&example.expected, 100))?;
            writeln!(out, "      here:  {}   (session {})", line(&example.actual, 100), example.session)?;
        }
        if self.divergences.len() > DIVERGENCES_PRINTED {
            writeln!(
                out,
                "\n  and {} more; all are in the JSON report",
                self.divergences.len() - DIVERGENCES_PRINTED
            )?;
        }
        writeln!(out, "\nLatency, us (here/there: median ratio and its 90 % interval)")?;
        writeln!(
            out,
            "  {:>8} {:>10} {:>10} {:>10} {:>10}  {:<22} statement",
            "units", "p50 there", "p50 here", "p99 there", "p99 here", "here/there"
        )?;
        for group in self.groups.iter().take(GROUPS_PRINTED) {
            let ratio = group.ratio.map_or("-".to_owned(), |ratio| {
                format!("{:.2} [{:.2}, {:.2}]", ratio.median, ratio.low, ratio.high)
            });
            writeln!(
                out,
                "  {:>8} {:>10.0} {:>10.0} {:>10.0} {:>10.0}  {ratio:<22} {}",
                group.here.count,
                group.there.p50_us,
                group.here.p50_us,
                group.there.p99_us,
                group.here.p99_us,
                line(&group.statement, 60)
            )?;
        }
        writeln!(out, "\nSent late, us{:>17} {:>10} {:>10} {:>10}", "p50", "p95", "p99", "max")?;
        for (name, lag) in self.lags() {
            writeln!(
                out,
                "  {name:<18} {:>9.0} {:>10.0} {:>10.0} {:>10.0}",
                lag.p50_us, lag.p95_us, lag.p99_us, lag.max_us
            )?;
        }
        section(out, "Not played", &self.not_played())?;
        section(out, "Notes", &self.all_notes())
    }

    /// How late units were sent, by what they waited for.
    pub(crate) fn lags(&self) -> [(&'static str, Quantiles); 5] {
        [
            ("in all", self.lag.total),
            ("server busy", self.lag.server_busy),
            ("order of commits", self.lag.order_wait),
            ("replayer late", self.lag.replayer_late),
            ("answer since due", self.lag.latency_from_due),
        ]
    }

    /// What was not played and why, a line each.
    pub(crate) fn not_played(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (reason, count) in &self.omitted.sessions {
            lines.push(format!("{count} sessions: {}", reason.text()));
        }
        for (reason, count) in &self.omitted.units {
            lines.push(format!("{count} units: {}", reason.text()));
        }
        if self.counts.not_sent > 0 {
            lines.push(format!("{} units: the replay was stopped", self.counts.not_sent));
        }
        let there = format!(", on {}", self.compared_with);
        for (place, sessions) in [("", &self.broken_sessions), (&there, &self.baseline_broken_sessions)] {
            for (session, why) in sessions.iter().take(DIVERGENCES_PRINTED) {
                lines.push(format!("session {session} from some point on{place}: {why}"));
            }
            if sessions.len() > DIVERGENCES_PRINTED {
                lines.push(format!("and {} sessions more{place}", sessions.len() - DIVERGENCES_PRINTED));
            }
        }
        lines
    }

    /// What its reader should know, a line each.
    pub(crate) fn all_notes(&self) -> Vec<String> {
        let mut notes: Vec<String> =
            self.preflight.problems.iter().map(|text| format!("forced: {text}")).collect();
        notes.extend(self.preflight.notes.iter().chain(&self.notes).cloned());
        if !self.volatile.is_empty() {
            let list: Vec<String> =
                self.volatile.iter().map(|(name, count)| format!("{name} ({count})")).collect();
            notes.push(format!("units whose result changes from run to run: {}", list.join(", ")));
        }
        notes
    }
}

fn section(out: &mut String, title: &str, lines: &[String]) -> std::fmt::Result {
    if lines.is_empty() {
        return Ok(());
    }
    writeln!(out, "\n{title}")?;
    // What a server says in several lines is one here.
    lines.iter().try_for_each(|one| writeln!(out, "  {}", line(one, usize::MAX)))
}

/// A text with nothing in it that would command the terminal. Names, errors of servers and statements are anybody's.
pub(crate) fn quiet(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { ' ' } else { c }).collect()
}

/// One line of at most so many characters.
fn line(text: &str, chars: usize) -> String {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match text.char_indices().nth(chars) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

/// The units of the plan with what became of each.
fn units<'a>(plan: &'a Plan, played: &'a Played) -> impl Iterator<Item = (&'a Unit, &'a UnitOutcome)> {
    let sessions = plan.sessions.iter().zip(&played.sessions);
    sessions.flat_map(|(session, outcome)| session.units.iter().zip(&outcome.units))
}

fn counts(plan: &Plan, played: &Played, compared: &Compared) -> Counts {
    let mut counts = Counts {
        sessions: plan.sessions.len(),
        midstream_sessions: plan.sessions.iter().filter(|session| session.midstream).count(),
        units: plan.units(),
        compared: compared.units,
        equal: compared.equal,
        unknown: compared.unknown,
        commits: plan.commits,
        ..Counts::default()
    };
    counts.cancels = played.sessions.iter().map(|session| session.cancels).sum();
    for (unit, outcome) in units(plan, played) {
        match outcome {
            UnitOutcome::Answered(answered) => {
                counts.answered += 1;
                counts.released += u64::from(answered.released);
            }
            UnitOutcome::NotSent if unit.omitted.is_none() => counts.not_sent += 1,
            _ => {}
        }
    }
    counts
}

fn differences(
    found: BTreeMap<(u32, Kind), Found>,
    group: impl Fn(u32) -> (String, String),
) -> Vec<Difference> {
    let difference = |((number, kind), found): (_, Found)| {
        let (fingerprint, statement) = group(number);
        Difference { fingerprint, statement, kind, count: found.count, examples: found.examples }
    };
    let mut list: Vec<Difference> = found.into_iter().map(difference).collect();
    list.sort_by_key(|one| std::cmp::Reverse(one.count));
    list
}

/// Sessions that were not connected, or lost their connection, with the reason.
fn broken_sessions(plan: &Plan, played: &Played) -> Vec<(u64, String)> {
    let sessions = plan.sessions.iter().zip(&played.sessions);
    sessions.filter_map(|(session, outcome)| Some((session.id.0, outcome.broken.clone()?))).collect()
}

/// Units of a replay of which the outcome is so.
fn units_that(plan: &Plan, played: &Played, is: impl Fn(&UnitOutcome) -> bool) -> usize {
    units(plan, played).filter(|(unit, outcome)| unit.omitted.is_none() && is(outcome)).count()
}

/// Why units were not compared that should have been, a line each.
fn shortcomings(
    plan: &Plan,
    played: &Played,
    baseline: Option<(&str, &Played)>,
    compared: &Compared,
) -> Vec<String> {
    let mut lines = Vec::new();
    let not_sent = |played| units_that(plan, played, |outcome| matches!(outcome, UnitOutcome::NotSent));
    if let Some((name, there)) = baseline {
        if there.stopped {
            lines.push(format!("the replay on {name} was stopped; {} units were not sent", not_sent(there)));
        }
        // A session may be lost with nothing in it that was to be compared: it tells nothing of this target all the same.
        let lost = there.sessions.iter().filter(|session| session.broken.is_some()).count();
        if lost > 0 {
            let is_lost = |outcome: &_| matches!(outcome, UnitOutcome::Broken | UnitOutcome::NoConnection);
            let units = units_that(plan, there, is_lost);
            lines.push(format!("{lost} sessions were lost on {name}; {units} units have no answer there"));
        }
    }
    if played.stopped {
        lines.push(format!("the replay was stopped; {} units were not sent", not_sent(played)));
    }
    if compared.units == 0 {
        lines.push("nothing was compared".into());
    }
    lines
}

fn notes(plan: &Plan, options: &Options, played: &Played, has_baseline: bool) -> Vec<String> {
    let mut notes = Vec::new();
    let midstream = plan.sessions.iter().filter(|session| session.midstream).count();
    if midstream > 0 {
        notes.push(format!(
            "{midstream} sessions were joined in their middle: settings they had made before are not restored"
        ));
    }
    if plan.damaged_blocks > 0 {
        notes.push(format!("{} blocks of the trace could not be read", plan.damaged_blocks));
    }
    if plan.malformed_records > 0 {
        notes.push(format!(
            "{} records of the trace could not be understood: they are not played, nor is the rest of their blocks",
            plan.malformed_records
        ));
    }
    if plan.is_torn {
        notes.push("the trace has no regular end: the recorder was killed, or is still at work, and what came last is not played".into());
    }
    if plan.holes > 0 {
        notes.push(format!(
            "{} bytes of clients are missing in the trace, in {} places: units that were there are not played, and not counted",
            plan.hole_bytes, plan.holes
        ));
    }
    if plan.headless_sessions > 0 {
        notes.push(format!(
            "{} sessions are not played: their beginning is missing in the trace",
            plan.headless_sessions
        ));
    }
    if plan.meta.redaction.literals {
        notes.push(
            "the trace is masked: literals and parameters are hashes, and results differ for that".into(),
        );
    }
    if plan.classifier.statements().iter().any(|statement| statement.summary.notifies) {
        notes.push("LISTEN and NOTIFY are played; which notifications arrive is not compared".into());
    }
    if options.order_commit && plan.close_commits > 0 {
        notes.push(format!(
            "{} pairs of overlapping commits were over within 50 us of each other: their order is not certain",
            plan.close_commits
        ));
    }
    let released = |outcome: &_| matches!(outcome, UnitOutcome::Answered(answered) if answered.released);
    let released = units(plan, played).filter(|(_, outcome)| released(outcome)).count();
    if released > 0 {
        notes.push(format!(
            "{released} units were sent before commits they should have waited for: nothing moved any more"
        ));
    }
    let without_rows =
        if has_baseline || options.rows == Rows::Count { 0 } else { results_without_rows(plan, played) };
    if without_rows > 0 {
        notes.push(format!(
            "of {without_rows} results the trace does not have the rows: only their number was compared (record with --level full, or compare with --baseline)"
        ));
    }
    let prepare: usize = played.sessions.iter().map(|session| session.prepare_errors.len()).sum();
    if prepare > 0 {
        notes.push(format!("{prepare} statements prepared before recording are refused by the target"));
    }
    notes
}

/// Results with rows, of units that were answered, whose rows the plan does not know.
fn results_without_rows(plan: &Plan, played: &Played) -> usize {
    units(plan, played)
        .filter(|(_, outcome)| matches!(outcome, UnitOutcome::Answered(_)))
        .flat_map(|(unit, _)| plan.expected(unit))
        .filter(|expected| expected.end.is_some() && expected.rows > 0 && expected.hash.is_none())
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_the_report_commands_the_terminal() {
        assert_eq!(quiet("a\x1b[2Jb\u{9b}2J\r\nc"), "a [2Jb 2J \nc");
        let mut out = String::new();
        section(&mut out, "Not played", &["session 1: no\nsuch\tuser".into()]).unwrap();
        assert_eq!(out, "\nNot played\n  session 1: no such user\n");
    }
}
