// SPDX-License-Identifier: Apache-2.0
//! How long units took, there and here, and how late they were sent.

use std::time::Duration;

use serde::Serialize;
use underpass_stats::{Estimate, quantile_sorted};

use crate::outcome::{Answered, UnitOutcome};
use crate::plan::Plan;
use crate::run::Played;

/// A bootstrap draws from so many values at most, evenly picked; more make no narrower interval worth its time.
const BOOTSTRAP_MAX: usize = 500;

/// Quantiles of durations, microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Quantiles {
    /// How many.
    pub count: usize,
    /// Median.
    pub p50_us: f64,
    /// 95 %.
    pub p95_us: f64,
    /// 99 %.
    pub p99_us: f64,
    /// The longest.
    pub max_us: f64,
}

impl Quantiles {
    /// Of durations in microseconds.
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let at = |q| quantile_sorted(&values, q).unwrap_or(0.0);
        Self { count: values.len(), p50_us: at(0.5), p95_us: at(0.95), p99_us: at(0.99), max_us: at(1.0) }
    }
}

/// Latencies of one group of units, from sending to ReadyForQuery.
#[derive(Clone, Debug, Serialize)]
pub struct GroupLatency {
    /// What the group is, in `Plan::groups`.
    #[serde(skip)]
    pub group: u32,
    /// There: at capture, or on the other target.
    pub there: Quantiles,
    /// Here.
    pub here: Quantiles,
    /// Median over units of here by there, with its 90 % bootstrap interval; below 1 is faster here.
    pub ratio: Option<Estimate>,
}

/// How late units were sent, microseconds; by cause.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Lag {
    /// After the moment at which they were due, for whatever cause.
    pub total: Quantiles,
    /// Because the server had not yet answered the session's earlier units.
    pub server_busy: Quantiles,
    /// Because they waited for commits of other sessions.
    pub order_wait: Quantiles,
    /// Although nothing was to be waited for: the replayer's own doing.
    pub replayer_late: Quantiles,
    /// From the moment they were due to the answer: what a client with a schedule would have seen.
    pub latency_from_due: Quantiles,
}

fn us(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

fn answered(outcome: &UnitOutcome) -> Option<&Answered> {
    match outcome {
        UnitOutcome::Answered(answered) => Some(answered),
        _ => None,
    }
}

fn all(played: &Played) -> impl Iterator<Item = &Answered> {
    played.sessions.iter().flat_map(|session| &session.units).filter_map(answered)
}

/// Latencies by group, the group with the most time here first. `baseline` is the other target; without it, the capture.
pub fn by_group(plan: &Plan, baseline: Option<&Played>, played: &Played) -> Vec<GroupLatency> {
    let mut groups: Vec<(Vec<f64>, Vec<f64>, Vec<f64>)> = vec![Default::default(); plan.groups.len()];
    for (at, session) in plan.sessions.iter().enumerate() {
        for (index, unit) in session.units.iter().enumerate() {
            let Some(here) = played.sessions[at].units.get(index).and_then(answered) else { continue };
            let here_us = us(here.ready.saturating_sub(here.sent));
            let there_us = match baseline {
                Some(baseline) => baseline.sessions[at]
                    .units
                    .get(index)
                    .and_then(answered)
                    .map(|there| us(there.ready.saturating_sub(there.sent))),
                None => unit.ready_ns.map(|ready_ns| ready_ns.saturating_sub(unit.sent_ns) as f64 / 1e3),
            };
            let Some(group) = groups.get_mut(unit.group as usize) else { continue };
            group.1.push(here_us);
            if let Some(there_us) = there_us {
                group.0.push(there_us);
                if there_us > 0.0 {
                    group.2.push(here_us / there_us);
                }
            }
        }
    }
    let mut latencies: Vec<(f64, GroupLatency)> = groups
        .into_iter()
        .enumerate()
        .filter(|(_, (_, here, _))| !here.is_empty())
        .map(|(group, (there, here, ratios))| {
            let total = here.iter().sum();
            let step = ratios.len().div_ceil(BOOTSTRAP_MAX).max(1);
            let picked: Vec<f64> = ratios.iter().copied().step_by(step).collect();
            let latency = GroupLatency {
                group: group as u32,
                there: Quantiles::of(there),
                here: Quantiles::of(here),
                ratio: Estimate::of(&picked),
            };
            (total, latency)
        })
        .collect();
    latencies.sort_by(|one, other| other.0.total_cmp(&one.0));
    latencies.into_iter().map(|(_, latency)| latency).collect()
}

/// How late units were sent.
pub fn lag(played: &Played) -> Lag {
    let of = |value: fn(&Answered) -> Duration| Quantiles::of(all(played).map(value).map(us).collect());
    Lag {
        total: of(|unit| unit.sent.saturating_sub(unit.due)),
        server_busy: of(|unit| unit.free.saturating_sub(unit.due).saturating_sub(unit.order_wait)),
        order_wait: of(|unit| unit.order_wait),
        replayer_late: of(|unit| unit.sent.saturating_sub(unit.free)),
        latency_from_due: of(|unit| unit.ready.saturating_sub(unit.due)),
    }
}
