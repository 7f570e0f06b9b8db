// SPDX-License-Identifier: Apache-2.0
//! How long units took, there and here, and how late they were sent.

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
    /// Of durations in seconds.
    pub fn of(mut values: Vec<f32>) -> Self {
        values.sort_unstable_by(f32::total_cmp);
        let at = |q| quantile_sorted(&values, q).map_or(0.0, |seconds| seconds * 1e6);
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

fn us(seconds: f32) -> f64 {
    f64::from(seconds) * 1e6
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
    // There and here, seconds. One that is not known there is not a number.
    let mut groups: Vec<Vec<(f32, f32)>> = vec![Vec::new(); plan.groups.len()];
    for (at, session) in plan.sessions.iter().enumerate() {
        for (index, unit) in session.units.iter().enumerate() {
            let Some(here) = played.sessions[at].units.get(index).and_then(answered) else { continue };
            // It does less here than there, or nothing at all.
            if unit.left_out.is_some() && (baseline.is_none() || plan.executes(unit).is_empty()) {
                continue;
            }
            let there = match baseline {
                Some(baseline) => {
                    baseline.sessions[at].units.get(index).and_then(answered).map(|there| there.latency_s)
                }
                None => unit
                    .ready_ns()
                    .map(|ready_ns| (ready_ns.saturating_sub(unit.sent_ns) as f64 / 1e9) as f32),
            };
            let Some(group) = groups.get_mut(unit.group as usize) else { continue };
            group.push((there.unwrap_or(f32::NAN), here.latency_s));
        }
    }
    let mut latencies: Vec<(f64, GroupLatency)> = groups
        .into_iter()
        .enumerate()
        .filter(|(_, pairs)| !pairs.is_empty())
        .map(|(group, pairs)| {
            let total = pairs.iter().map(|&(_, here)| us(here)).sum();
            let ratios = || pairs.iter().filter(|(there, _)| *there > 0.0);
            let step = ratios().count().div_ceil(BOOTSTRAP_MAX).max(1);
            let picked: Vec<f64> =
                ratios().step_by(step).map(|&(there, here)| f64::from(here) / f64::from(there)).collect();
            let latency = GroupLatency {
                group: group as u32,
                there: Quantiles::of(
                    pairs.iter().map(|&(there, _)| there).filter(|there| !there.is_nan()).collect(),
                ),
                here: Quantiles::of(pairs.iter().map(|&(_, here)| here).collect()),
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
    let of = |value: fn(&Answered) -> f32| Quantiles::of(all(played).map(value).collect());
    let total = |unit: &Answered| unit.server_busy_s + unit.order_wait_s + unit.replayer_late_s;
    Lag {
        total: of(total),
        server_busy: of(|unit| unit.server_busy_s),
        order_wait: of(|unit| unit.order_wait_s),
        replayer_late: of(|unit| unit.replayer_late_s),
        latency_from_due: of(|unit| {
            unit.server_busy_s + unit.order_wait_s + unit.replayer_late_s + unit.latency_s
        }),
    }
}
