// SPDX-License-Identifier: Apache-2.0
//! The checker proves itself: it finds every fault of a relay that is wrong on purpose, and none in the same relay when it
//! is right.

mod relay;

use relay::Breakage;
use underpass_soak::{Config, FaultKind, Kind, PoolMode, Report, run};
use underpass_testkit::Postgres;

fn check(breakage: Breakage) -> Report {
    let server = Postgres::builder().setting("max_connections", "300").start().unwrap();
    let mut config = Config::for_port(relay::start(server.port(), 6, breakage));
    config.clients = 60;
    config.transactions = 15_000;
    config.pool_mode = PoolMode::Transaction;
    // A mixed-up answer may leave a client waiting for good; that is found as well, after this many seconds.
    config.silence = 3;
    // The relay knows no cancel keys.
    config.skip_fault = vec![FaultKind::Cancel, FaultKind::LateCancel];
    run(&config).unwrap_or_else(|error| panic!("{breakage:?}: {error:#}"))
}

/// Violations of these kinds must be among those found.
fn assert_caught(breakage: Breakage, kinds: &[Kind]) {
    let report = check(breakage);
    assert_eq!(report.exit_code(), 1, "{breakage:?}\n{report}");
    let named = report.violations.iter().any(|violation| kinds.contains(&violation.kind));
    assert!(named, "{breakage:?} wants one of {kinds:?}\n{report}");
}

#[test]
fn the_right_relay_passes() {
    let report = check(Breakage::None);
    assert_eq!(report.exit_code(), 0, "{report}");
}

#[test]
fn release_at_the_first_ready_for_query_is_caught() {
    assert_caught(Breakage::FirstReady, &[Kind::Foreign, Kind::Protocol, Kind::Transaction]);
}

#[test]
fn a_server_given_away_in_a_transaction_is_caught() {
    assert_caught(Breakage::IgnoresTransaction, &[Kind::Transaction]);
}

#[test]
fn a_server_given_away_in_a_pipeline_is_caught() {
    assert_caught(Breakage::IgnoresPipeline, &[Kind::Foreign]);
}

#[test]
fn a_server_used_on_after_its_client_left_is_caught() {
    assert_caught(Breakage::ReusesDirtyServer, &[Kind::Foreign, Kind::Protocol, Kind::Transaction]);
}

#[test]
fn a_lost_row_is_caught() {
    assert_caught(Breakage::LosesRow, &[Kind::Missing]);
}

#[test]
fn a_doubled_row_is_caught() {
    assert_caught(Breakage::DoublesRow, &[Kind::Doubled]);
}

#[test]
fn parameters_of_another_client_are_caught() {
    assert_caught(Breakage::ForgetsParameters, &[Kind::Transaction]);
}
