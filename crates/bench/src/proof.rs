// SPDX-License-Identifier: Apache-2.0
//! Does the method find what is there and nothing else? Identical systems and one that is slowed by a known amount say.

use crate::analysis::View;
use crate::sample::{Results, metric};
use crate::systems::System;
use underpass_stats::Estimate;

/// Two identical systems are shown to be equal when the whole 90 % interval of their ratio lies within this of 1: two
/// one-sided tests at 5 %. Half of what the slowed twin loses, so one interval cannot be both.
const SAME: f64 = 0.025;

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
    let slowed = system.paused_percent / 100.0;
    // Where the interval must lie, and where it must not touch: between them nothing is shown either way.
    let (expected, holds, refuted) = if slowed > 0.0 {
        let found = ratio.high < 1.0 && ratio.low <= 1.0 - slowed + SAME && ratio.high >= 1.0 - slowed - SAME;
        (
            format!("slowed by {} %: must be found slower by about that", system.paused_percent),
            found,
            ratio.low > 1.0 - slowed + SAME || ratio.high < 1.0 - slowed - SAME,
        )
    } else {
        let within = ratio.low >= 1.0 - SAME && ratio.high <= 1.0 + SAME;
        ("identical: must be equal".to_owned(), within, ratio.low > 1.0 + SAME || ratio.high < 1.0 - SAME)
    };
    let word = match (holds, refuted) {
        (true, _) => "as it must be",
        (false, true) => "NOT as it must be",
        (false, false) => "undecided, the interval is too wide: more rounds, or a quieter machine",
    };
    Finding {
        text: format!(
            "{} / {twin}, throughput at {at}, {} rounds: {:.3} [{:.3}, {:.3}] ({expected}): {word}",
            system.name, ratio.rounds, ratio.median, ratio.low, ratio.high
        ),
        holds,
    }
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng, rngs::StdRng};

    use super::*;

    fn judge(name: &str, median: f64, half: f64) -> bool {
        let systems = crate::systems::table(None).unwrap();
        let system = systems.iter().find(|system| system.name == name).unwrap();
        let ratio = Estimate { median, low: median - half, high: median + half, rounds: 10 };
        finding(system, "pgbouncer", "c=1", &ratio).holds
    }

    #[test]
    fn twins_must_be_equal_and_the_slowed_one_slower_by_what_it_is_slowed() {
        assert!(judge("pgbouncer-twin", 1.005, 0.015));
        assert!(judge("pgbouncer-twin", 1.015, 0.001), "a difference that is too small to matter");
        assert!(
            !judge("pgbouncer-twin", 1.0, 0.03),
            "nothing is shown by an interval that holds a difference"
        );
        assert!(!judge("pgbouncer-twin", 1.05, 0.02));
        assert!(judge("pgbouncer-slowed", 0.95, 0.03));
        assert!(!judge("pgbouncer-slowed", 0.98, 0.03), "it may be equal");
        assert!(!judge("pgbouncer-slowed", 0.90, 0.01), "slower than it was made");
    }

    /// Both findings over many simulated runs with the noise of a real one: how often the method errs, not only how it
    /// judges one interval.
    #[test]
    fn thirty_rounds_of_a_quiet_machine_show_both() {
        let mut rng = StdRng::seed_from_u64(3);
        // Per-round ratios of two turns of a second spread by about 3 % on a quiet machine.
        let mut ratio = |truth: f64| {
            let noise = || -> f64 { (0..12).map(|_| rng.random_range(-0.5..0.5)).sum::<f64>() * 0.03 };
            let values: Vec<f64> =
                std::iter::repeat_with(noise).take(30).map(|n| truth * (1.0 + n)).collect();
            Estimate::of(&values).unwrap()
        };
        let systems = crate::systems::table(None).unwrap();
        let system = |name: &str| systems.iter().find(|system| system.name == name).unwrap();
        let mut shown = |name: &str, truth: f64| {
            (0..40).filter(|_| finding(system(name), "pgbouncer", "c=1", &ratio(truth)).holds).count()
        };
        assert!(shown("pgbouncer-twin", 1.0) >= 38);
        assert!(shown("pgbouncer-slowed", 0.95) >= 38);
        assert!(shown("pgbouncer-twin", 0.95) == 0, "a slowed system must not pass for an equal one");
        assert!(shown("pgbouncer-slowed", 1.0) <= 2, "an equal system must not pass for a slowed one");
    }
}
