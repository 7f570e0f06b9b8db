// SPDX-License-Identifier: Apache-2.0
//! Does the method find what is there and nothing else? Identical systems and one that is slowed by a known amount say.

use crate::analysis::View;
use crate::sample::{Results, metric};
use crate::stats::Estimate;
use crate::systems::System;
use crate::table::interval;

/// How far from 1 the throughput of two identical systems may be.
const SAME: f64 = 0.02;

/// Half width of an interval in which a difference of 5 % could still hide or appear.
const TOO_WIDE: f64 = 0.05;

/// What a twin shows about the method.
#[derive(Clone, Debug)]
pub struct Finding {
    /// One sentence.
    pub text: String,
    /// True when the method found what is the case; false too when the interval is too wide to say.
    pub holds: bool,
}

/// Judges every twin that was measured.
#[must_use]
pub fn findings(results: &Results, systems: &[System]) -> Vec<Finding> {
    let view = View::of(results, "proof");
    let mut findings = Vec::new();
    for system in systems {
        let Some(twin) = &system.twin_of else { continue };
        for point in view.points() {
            if let Some(ratio) = view.ratio(&system.name, twin, point, metric::TPS) {
                findings.push(finding(system, twin, &point.label(), &ratio));
            }
        }
    }
    findings
}

fn finding(system: &System, twin: &str, at: &str, ratio: &Estimate) -> Finding {
    let (expected, holds) = if system.paused_percent > 0.0 {
        (format!("slowed by {} %: must be found slower", system.paused_percent), ratio.high < 1.0)
    } else {
        let around = ratio.low <= 1.0 && 1.0 <= ratio.high;
        ("identical: must not differ".to_owned(), around || (ratio.median - 1.0).abs() <= SAME)
    };
    let (word, holds) = match (holds, ratio.half_width() > TOO_WIDE) {
        (_, true) => ("undecided, the interval is too wide: more rounds, or a quieter machine", false),
        (true, false) => ("as it must be", true),
        (false, false) => ("NOT as it must be", false),
    };
    Finding {
        text: format!(
            "{} / {twin}, throughput at {at}: {} ({expected}): {word}",
            system.name,
            interval(ratio)
        ),
        holds,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(name: &str, median: f64, half: f64) -> bool {
        let systems = crate::systems::table(None).unwrap();
        let system = systems.iter().find(|system| system.name == name).unwrap();
        let ratio = Estimate { median, low: median - half, high: median + half, rounds: 10 };
        finding(system, "pgbouncer", "c=1", &ratio).holds
    }

    #[test]
    fn twins_must_not_differ_and_the_slowed_must() {
        assert!(judge("pgbouncer-twin", 1.01, 0.02));
        assert!(judge("pgbouncer-twin", 1.015, 0.001));
        assert!(!judge("pgbouncer-twin", 1.05, 0.02));
        assert!(judge("pgbouncer-slowed", 0.95, 0.03));
        assert!(!judge("pgbouncer-slowed", 0.98, 0.03));
        assert!(
            !judge("pgbouncer-twin", 1.0, 0.10),
            "nothing is proved by an interval that holds everything"
        );
    }
}
