// SPDX-License-Identifier: Apache-2.0
//! The fuzz function of the link tracker over its corpus in fuzz/corpus, and over near misses of it.

use std::path::Path;

use underpass_pool::fuzzing;

#[test]
fn corpus_link() {
    let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/pool_link"));
    let mut seeds = 0;
    for entry in std::fs::read_dir(dir).expect("corpus") {
        let bytes = std::fs::read(entry.expect("entry").path()).expect("seed");
        fuzzing::link(&bytes);
        // Cut at every byte, with each byte lost, and with a bit of each turned over.
        for i in 0..bytes.len().min(600) {
            fuzzing::link(&bytes[..i]);
            fuzzing::link(&[&bytes[..i], &bytes[i + 1..]].concat());
            for bit in [0, 3, 6] {
                let mut turned = bytes.clone();
                turned[i] ^= 1 << bit;
                fuzzing::link(&turned);
            }
        }
        seeds += 1;
    }
    assert!(seeds >= 5, "{seeds} seeds");
}
