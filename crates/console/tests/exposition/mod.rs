// SPDX-License-Identifier: Apache-2.0
//! A strict parser of the OpenMetrics 1.0 text format: it panics at whatever the specification forbids.
#![allow(dead_code, reason = "every test file uses a part")]

use std::collections::{BTreeMap, HashSet};

/// Labels of a sample.
pub type Labels = BTreeMap<String, String>;

/// A metric family.
#[derive(Debug)]
pub struct Family {
    pub kind: String,
    pub help: bool,
    pub unit: Option<String>,
    pub samples: Vec<(String, Labels, f64)>,
}

/// Reads an exposition; panics at whatever the specification forbids.
pub fn parse(text: &str) -> BTreeMap<String, Family> {
    let body = text.strip_suffix("# EOF\n").expect("ends with # EOF");
    assert!(!body.contains("# EOF") && !body.contains("\n\n") && !body.contains('\r'));
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut current = String::new();
    let mut series = HashSet::new();
    for line in body.lines() {
        if let Some(metadata) = line.strip_prefix("# ") {
            let mut words = metadata.splitn(3, ' ');
            let (keyword, name, value) =
                (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
            assert_name(name);
            if name != current {
                assert!(!families.contains_key(name), "{name} is in two places");
                current = name.to_owned();
                let family = Family { kind: String::new(), help: false, unit: None, samples: Vec::new() };
                families.insert(current.clone(), family);
            }
            let family = families.get_mut(name).unwrap();
            assert!(family.samples.is_empty(), "metadata comes before the samples");
            match keyword {
                "HELP" => {
                    assert!(!family.help && !value.is_empty() && !value.contains('\\'));
                    family.help = true;
                }
                "TYPE" => {
                    assert!(family.kind.is_empty(), "one TYPE");
                    family.kind = value.to_owned();
                }
                "UNIT" => {
                    assert!(
                        family.unit.is_none() && name.ends_with(&format!("_{value}")),
                        "{name} has unit {value}"
                    );
                    family.unit = Some(value.to_owned());
                }
                other => panic!("keyword {other}"),
            }
            continue;
        }
        let (name, labels, value) = sample(line);
        let family = families.get_mut(&current).expect("samples come after metadata");
        let suffix = name.strip_prefix(&current).unwrap_or_else(|| panic!("{name} is not of {current}"));
        let suffixes: &[&str] = match family.kind.as_str() {
            "counter" => &["_total"],
            "gauge" => &[""],
            "info" => &["_info"],
            "histogram" => &["_bucket", "_sum", "_count"],
            other => panic!("type {other}"),
        };
        assert!(suffixes.contains(&suffix), "{name}");
        assert!(series.insert((name.clone(), labels.clone())), "{name} {labels:?} comes twice");
        assert!(family.kind == "gauge" || value >= 0.0);
        family.samples.push((name, labels, value));
    }
    for (name, family) in &families {
        assert!(family.help && !family.kind.is_empty(), "{name} has HELP and TYPE");
        if family.kind == "histogram" {
            histogram(name, family);
        }
    }
    families
}

fn assert_name(name: &str) {
    let mut characters = name.chars();
    assert!(characters.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_'), "{name}");
    assert!(characters.all(|c| c.is_ascii_alphanumeric() || c == '_'), "{name}");
}

/// `name{label="value",...} number`
fn sample(line: &str) -> (String, Labels, f64) {
    let end = line.find(['{', ' ']).expect(line);
    let name = line[..end].to_owned();
    assert_name(&name);
    let mut labels = Labels::new();
    let mut rest = &line[end..];
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            let (label, after) = rest.split_once("=\"").expect(line);
            assert_name(label);
            let (value, after) = unescape(after);
            assert!(labels.insert(label.to_owned(), value).is_none(), "{label} comes twice");
            match after.strip_prefix(',') {
                Some(next) => rest = next,
                None => {
                    rest = after.strip_prefix('}').expect(line);
                    break;
                }
            }
        }
    }
    let value = rest.strip_prefix(' ').expect(line);
    assert!(!value.contains(' '), "neither timestamp nor exemplar: {line}");
    (name, labels, value.parse().expect(line))
}

/// Reads a label value to its closing quote.
fn unescape(text: &str) -> (String, &str) {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, c)) = characters.next() {
        match c {
            '"' => return (value, &text[at + 1..]),
            '\\' => value.push(match characters.next().expect("an escape is complete").1 {
                'n' => '\n',
                c @ ('\\' | '"') => c,
                other => panic!("escape {other}"),
            }),
            c => value.push(c),
        }
    }
    panic!("label value without end: {text}");
}

/// Bounds rise to +Inf, counts never fall, the last is `_count`.
fn histogram(name: &str, family: &Family) {
    let mut groups: BTreeMap<Labels, Vec<(f64, f64)>> = BTreeMap::new();
    for (sample, labels, value) in &family.samples {
        let mut labels = labels.clone();
        if *sample == format!("{name}_bucket") {
            let bound = match labels.remove("le").expect("a bucket has a bound").as_str() {
                "+Inf" => f64::INFINITY,
                bound => bound.parse().unwrap(),
            };
            groups.entry(labels).or_default().push((bound, *value));
        } else {
            groups.entry(labels).or_default();
        }
    }
    let value = |suffix: &str, labels: &Labels| {
        let sample = format!("{name}_{suffix}");
        family.samples.iter().find(|(name, of, _)| *name == sample && of == labels).unwrap().2
    };
    for (labels, buckets) in groups {
        assert!(buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "{name} {labels:?}");
        let (bound, count) = *buckets.last().unwrap();
        assert!(bound.is_infinite() && count == value("count", &labels), "{name} {labels:?}");
        // Waits shorter than a microsecond add nothing.
        assert!(value("sum", &labels) >= 0.0);
    }
}
