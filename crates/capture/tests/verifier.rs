// SPDX-License-Identifier: Apache-2.0
//! What the programs cost the verifier, against a budget that is checked in.

use underpass_capture::{Error, Kernel, ResponseLevel, Settings};
use underpass_trace::Protocol;

/// Instructions that the verifier may walk for all programs together, on the development kernel (6.18). The kernel's own limit is
/// a million for each.
const BUDGET: u32 = 250_000;

#[test]
fn the_programs_load_within_their_budget() {
    let settings = Settings {
        protocol: Protocol::Mysql,
        port: Some(1),
        netns: None,
        level: ResponseLevel::SUMMARY,
        ring_bytes: 1 << 20,
        rings: 2,
    };
    let kernel = match Kernel::open(&settings) {
        Ok(kernel) => kernel,
        Err(Error::Privileges { missing }) => return eprintln!("skipped: needs {missing}"),
        Err(error) => panic!("{error}"),
    };
    let costs = kernel.verified_instructions();
    println!("{costs:?}");
    assert!(costs.iter().all(|(_, instructions)| *instructions > 0), "the kernel does not tell");
    assert!(costs.iter().map(|(_, instructions)| instructions).sum::<u32>() <= BUDGET, "{costs:?}");
}
