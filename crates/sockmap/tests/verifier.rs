// SPDX-License-Identifier: Apache-2.0
//! What the programs cost the verifier, against a budget that is checked in.

mod common;

use std::time::Instant;

use underpass_sockmap::Config;

/// Instructions that the verifier may walk per program on the development kernel (6.18). The kernel's own limit is
/// a million; growing towards it makes older kernels refuse the object. Raise one only with a reason in the commit.
const BUDGET: [(&str, u32); 6] = [
    ("request_skb", 320_000),
    ("response_skb", 70_000),
    ("response_msg", 75_000),
    ("request_msg", 100),
    ("backend_queue", 100),
    ("socket_look", 300),
];

/// The same with a tap, whose branches nobody else loads.
const TAPPED_BUDGET: [(&str, u32); 6] = [
    ("request_skb", 320_000),
    ("response_skb", 115_000),
    ("response_msg", 105_000),
    ("request_msg", 100),
    ("backend_queue", 100),
    ("socket_look", 300),
];

/// Likewise with the stops that tests can put between steps.
const STALLED_BUDGET: [(&str, u32); 6] = [
    ("request_skb", 375_000),
    ("response_skb", 130_000),
    ("response_msg", 120_000),
    ("request_msg", 300_000),
    ("backend_queue", 200),
    ("socket_look", 300),
];

/// The same for lane B, with a tap.
const APPLICATIONS_BUDGET: [(&str, u32); 6] = [
    ("request_skb", 375_000),
    ("response_skb", 115_000),
    ("response_msg", 105_000),
    ("request_msg", 300_000),
    ("backend_queue", 200),
    ("socket_look", 300),
];

#[test]
fn the_programs_load_within_their_budgets() {
    load(&Config::default(), BUDGET);
    load(&Config { kept_bytes_max: 0, ..Config::default() }, BUDGET);
    load(&Config { tap_ring_bytes: 1 << 20, ..Config::default() }, TAPPED_BUDGET);
    load(&Config { tap_ring_bytes: 1 << 20, applications: true, ..Config::default() }, APPLICATIONS_BUDGET);
    let stalled =
        Config { tap_ring_bytes: 1 << 20, applications: true, stall_rounds: 1, ..Config::default() };
    load(&stalled, STALLED_BUDGET);
}

fn load(config: &Config, budgets: [(&str, u32); 6]) {
    let start = Instant::now();
    let Some(dp) = common::open(config) else { return };
    println!("opened in {:?}", start.elapsed());
    for (cost, (name, budget)) in dp.program_costs().iter().zip(budgets) {
        println!("{name}: {} instructions verified, budget {budget}", cost.verified_instructions);
        assert_eq!(cost.name, name);
        assert!(cost.verified_instructions > 0, "the kernel does not tell");
        assert!(cost.verified_instructions <= budget, "{name} is over its budget");
    }
    let start = Instant::now();
    drop(dp);
    println!("closed in {:?}", start.elapsed());
}
