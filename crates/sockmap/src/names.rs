// SPDX-License-Identifier: Apache-2.0
//! Names of reasons and counters, generated from the tables in `bpf/lanes.h`.

include!(concat!(env!("OUT_DIR"), "/names.rs"));

#[cfg(test)]
mod tests {
    use super::{Counter, Reason};

    #[test]
    fn the_manual_lists_every_reason_and_counter() {
        let manual = include_str!("../../../docs/lanes.md");
        let reasons = Reason::ALL.iter().map(|r| (r.name(), r.meaning()));
        for (name, meaning) in reasons.chain(Counter::ALL.iter().map(|c| (c.name(), c.meaning()))) {
            assert!(manual.contains(&format!("| {name} | {meaning} |")), "docs/lanes.md lacks {name}");
        }
    }
}
