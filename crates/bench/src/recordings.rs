// SPDX-License-Identifier: Apache-2.0
//! What a tracer beside a system says of its own recording, and whether what was measured was recorded as a whole.

use std::collections::BTreeMap;

use crate::analysis::View;
use crate::experiments::EXPERIMENTS;
use crate::proof::Finding;
use crate::sample::{Point, Results, Sample, metric};
use crate::systems::System;

/// The one reason of loss that a measurement brings about itself: a tracer by probes begins beside connections that are open, whose server
/// waits inside the probed function.
const WAITED: &str = "probed sessions under way whose first request may be missing";

/// What `underpass trace` prints at its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// Sessions that were compared with what the kernel counted.
    pub audited: u64,
    /// Bytes that its programs saw.
    pub seen: u64,
    /// Bytes that are missing.
    pub lost: u64,
    /// Sessions of which only what they said first may be missing.
    pub waited: u64,
    /// Something else is missing.
    pub is_lossy: bool,
}

impl Told {
    /// Reads it; `None` without such an end.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut told = Self::default();
        let sessions = line(text, "sessions")?;
        told.audited = number_before(sessions, " of these audited")?;
        for bytes in text.lines().filter_map(|line| line.strip_prefix("bytes ")) {
            told.seen += number_after(bytes, ": seen ")?;
            told.lost += number_after(bytes, "+ lost ")?;
        }
        for reason in line(text, "losses")?.split(", ").filter(|reason| *reason != "nothing is missing") {
            match number_before(reason, &format!(" {WAITED}")) {
                Some(count) => told.waited += count,
                None => told.is_lossy = true,
            }
            // Holes of the trace; what the programs counted as lost may have been sent again.
            if reason.contains(" losses") {
                told.lost = told.lost.max(number_before(reason, " bytes in ")?);
            }
        }
        Some(told)
    }

    /// Adds it to the metrics of a sample; a sample of several turns has several.
    pub fn add_to(&self, metrics: &mut BTreeMap<String, f64>, is_audited: bool) {
        let mut add = |name: &str, value: u64| *metrics.entry(name.to_owned()).or_default() += value as f64;
        add(metric::SEEN, self.seen);
        add(metric::LOST, self.lost);
        add(metric::WAITED, self.waited);
        let mut least = |name: &str, value: f64| {
            let entry = metrics.entry(name.to_owned()).or_insert(value);
            *entry = entry.min(value);
        };
        least(metric::LOSSLESS, f64::from(u8::from(!self.is_lossy && self.waited == 0)));
        least(metric::WHOLE, f64::from(u8::from(!self.is_lossy)));
        if is_audited {
            least(metric::AUDITED, self.audited as f64);
        }
    }
}

/// The rest of the line that begins with this word.
fn line<'a>(text: &'a str, word: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(word)?.strip_prefix(' ')).map(str::trim)
}

fn number_before(text: &str, mark: &str) -> Option<u64> {
    text.split_once(mark)?.0.rsplit(' ').next()?.parse().ok()
}

fn number_after(text: &str, mark: &str) -> Option<u64> {
    text.split_once(mark)?.1.split(' ').next()?.parse().ok()
}

/// Why a sample of a recording cannot stand for one of everything; `None` for one that can, and for one of no recording.
fn flaw(sample: &Sample) -> Option<&'static str> {
    let value = |name| sample.metrics.get(name).copied();
    // Files from before there was the second have the first only.
    let whole = value(metric::WHOLE).or_else(|| value(metric::LOSSLESS));
    let clients = sample.point.get("clients").parse().unwrap_or(1.0);
    if whole.is_some_and(|whole| whole < 1.0) {
        Some("not lossless")
    } else if value(metric::AUDITED).is_some_and(|audited| audited < clients) {
        Some("fewer sessions audited than clients")
    } else {
        None
    }
}

/// Whether all samples of a system at a point were recorded as a whole; `None` for a system without recordings.
#[must_use]
pub fn whole(view: &View<'_>, system: &str, point: &Point) -> Option<bool> {
    let samples = view.samples(system, point);
    let is_any = samples.iter().any(|sample| sample.metrics.contains_key(metric::LOSSLESS));
    is_any.then(|| samples.iter().all(|sample| flaw(sample).is_none()))
}

/// What the recordings of each experiment were, one finding each for packets and for probes.
#[must_use]
pub fn findings(results: &Results, systems: &[System]) -> Vec<Finding> {
    let by_probes =
        |name: &str| systems.iter().any(|system| system.name == name && !system.records_packets());
    let mut findings = Vec::new();
    for experiment in EXPERIMENTS {
        let (probes, packets): (Vec<&Sample>, Vec<&Sample>) = results
            .samples
            .iter()
            .filter(|sample| sample.experiment == experiment.name && sample.error.is_none())
            .filter(|sample| sample.metrics.contains_key(metric::SEEN))
            .partition(|sample| by_probes(&sample.system));
        findings.extend(finding(experiment.name, "packets", &packets));
        findings.extend(finding(experiment.name, "probes alone", &probes));
    }
    findings
}

fn finding(experiment: &str, by: &str, samples: &[&Sample]) -> Option<Finding> {
    let count = samples.len();
    if count == 0 {
        return None;
    }
    let sum = |name| samples.iter().filter_map(|sample| sample.metrics.get(name)).sum::<f64>();
    let audited = samples.iter().filter(|sample| sample.metrics.contains_key(metric::AUDITED)).count();
    let mut flaws: BTreeMap<&str, usize> = BTreeMap::new();
    for why in samples.iter().filter_map(|sample| flaw(sample)) {
        *flaws.entry(why).or_default() += 1;
    }
    let mut text = format!(
        "{experiment}, {count} recordings by {by}: {:.0} bytes seen, {:.0} lost",
        sum(metric::SEEN),
        sum(metric::LOST)
    );
    if audited > 0 {
        text += &format!(", {:.0} sessions audited in {audited} of them", sum(metric::AUDITED));
    }
    let waited = sum(metric::WAITED);
    if waited > 0.0 {
        text +=
            &format!("; of {waited:.0} sessions that were open before, what they said first may be missing");
    }
    let holds = flaws.is_empty();
    let verdict = if holds {
        "nothing else is missing, as it must be".to_owned()
    } else {
        let parts: Vec<String> = flaws.iter().map(|(why, count)| format!("{count} {why}")).collect();
        format!("NOT as it must be: {}", parts.join(", "))
    };
    Some(Finding { text: format!("{text}: {verdict}"), holds })
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: &str = "recording PostgreSQL 15 (pid 7, TCP port 5432) into trace; Ctrl-C ends it\n\
        trace         trace  (0.1 MiB in 1 segments, 99 records)\n\
        packets       of TCP port 5432\n\
        time          1.4 s, fullest ring 2 %\n\
        sessions      8 (8 joined while under way), 8 ended, 8 of these audited against the kernel's own count\n\
        messages      40 of clients, 40 times ready\n\
        bytes         packets to the server: seen 1000 = recorded 1000 + lost 0 + filtered 0\n\
        bytes         packets to clients: seen 5000 = recorded 900 + lost 0 + filtered 4100, of these 7 sent again or out of order\n\
        losses        nothing is missing\n";

    fn with(losses: &str) -> Told {
        Told::parse(&END.replace("nothing is missing", losses)).unwrap()
    }

    #[test]
    fn the_end_of_a_recording_is_read() {
        let told = Told { audited: 8, seen: 6000, ..Told::default() };
        assert_eq!(Told::parse(END), Some(told));
        assert_eq!(Told::parse("recording PostgreSQL\n"), None);
        let waited = format!("8 {WAITED}");
        assert_eq!(with(&waited), Told { waited: 8, ..told });
        let holes = format!("70 bytes in 2 losses, {waited}, 1 records not written");
        assert_eq!(with(&holes), Told { waited: 8, lost: 70, is_lossy: true, ..told });
        let lost = END.replace("900 + lost 0", "800 + lost 100");
        assert_eq!(Told::parse(&lost).unwrap().lost, 100);
    }

    /// A sample of eight clients beside a tracer that said so.
    fn sample(system: &str, told: &Told, is_audited: bool) -> Sample {
        let point = Point::default().with("clients", 8);
        let mut sample = crate::analysis::tests::sample(system, 0, &point, 1.0, 1.0);
        sample.experiment = "tracing".into();
        told.add_to(&mut sample.metrics, is_audited);
        sample
    }

    fn judge(samples: &[Sample]) -> (Option<bool>, Vec<Finding>) {
        let results = Results { samples: samples.to_vec(), ..Results::default() };
        let view = View::of(&results, "tracing");
        let systems = crate::systems::table(None).unwrap();
        (whole(&view, &samples[0].system, &samples[0].point), findings(&results, &systems))
    }

    #[test]
    fn a_recording_by_packets_must_be_lossless_and_audited() {
        let good = sample("trace-persist", &with("nothing is missing"), true);
        let (is_whole, findings) = judge(&[good.clone(), good.clone()]);
        assert_eq!(is_whole, Some(true));
        assert_eq!(
            findings[0].text,
            "tracing, 2 recordings by packets: 12000 bytes seen, 0 lost, 16 sessions audited in 2 of them: nothing else is missing, as it must be"
        );
        assert!(findings[0].holds && findings.len() == 1);
        let few = sample("trace-persist", &Told { audited: 7, ..with("nothing is missing") }, true);
        let (is_whole, findings) = judge(&[good.clone(), few]);
        assert_eq!(is_whole, Some(false));
        assert!(findings[0].text.ends_with("NOT as it must be: 1 fewer sessions audited than clients"));
        let lossy = sample("trace-persist", &with("70 bytes in 2 losses"), true);
        let (is_whole, findings) = judge(&[lossy, good]);
        assert_eq!((is_whole, findings[0].holds), (Some(false), false));
        assert!(findings[0].text.contains(", 70 lost,"), "{}", findings[0].text);
        // Attached only: no session is known, and none audited.
        let attached = sample("trace-attach", &Told { audited: 0, ..with("nothing is missing") }, false);
        assert_eq!(judge(&[attached]).0, Some(true));
    }

    #[test]
    fn sessions_that_waited_are_told_apart_from_losses() {
        let waited = sample("trace-probes", &with(&format!("8 {WAITED}")), false);
        assert_eq!((waited.metrics[metric::LOSSLESS], waited.metrics[metric::WHOLE]), (0.0, 1.0));
        let (is_whole, findings) = judge(&[waited]);
        assert_eq!((is_whole, findings[0].holds), (Some(true), true));
        assert!(
            findings[0]
                .text
                .contains("by probes alone: 6000 bytes seen, 0 lost; of 8 sessions that were open before"),
            "{}",
            findings[0].text
        );
        let lossy = sample("trace-probes", &with(&format!("8 {WAITED}, 1 records not written")), false);
        assert_eq!(judge(&[lossy]).0, Some(false));
    }

    #[test]
    fn files_from_before_are_judged_by_what_they_have() {
        let mut old = sample("trace-persist", &with("nothing is missing"), false);
        for name in [metric::SEEN, metric::LOST, metric::WAITED, metric::WHOLE] {
            old.metrics.remove(name);
        }
        let (is_whole, findings) = judge(std::slice::from_ref(&old));
        assert_eq!((is_whole, findings.len()), (Some(true), 0));
        old.metrics.insert(metric::LOSSLESS.into(), 0.0);
        assert_eq!(judge(std::slice::from_ref(&old)).0, Some(false));
        old.metrics.remove(metric::LOSSLESS);
        assert_eq!(judge(&[old]).0, None);
    }
}
