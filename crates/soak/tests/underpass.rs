// SPDX-License-Identifier: Apache-2.0
//! The short form of `make test-soak`: our pooler in every pool mode, with every fault, clients always waiting.
//! Needs the pooler's binary; see `underpass_testkit::Underpass::binary`.

use underpass_soak::{Config, PoolMode, run};
use underpass_testkit::{Ini, Pooler, Postgres, Underpass};

fn check(name: &str, pool_mode: PoolMode) {
    let server = Postgres::start().unwrap();
    let ini = Ini::for_server(&server).set("pool_mode", name).set("default_pool_size", "5");
    let mut pooler = Underpass::start(&ini).unwrap();
    let mut config = Config::for_port(pooler.port());
    config.clients = 60;
    config.transactions = 40_000;
    config.pool_mode = pool_mode;
    config.prepared = true;
    config.silence = 20;
    config.fault_every = 50;
    config.console_user = Some("pooler_admin".into());
    config.console_password = "pooler_admin_password".into();
    config.require_clients_per_server = 10;
    config.require_faults = 10;
    let report = run(&config).unwrap();
    assert_eq!(report.exit_code(), 0, "{report}");
    assert!(report.observed.as_ref().is_some_and(|seen| seen.looks_with_queue > 0), "{report}");
    assert!(pooler.is_running());
}

#[test]
fn transaction_pooling_leaks_nothing() {
    check("transaction", PoolMode::Transaction);
}

#[test]
fn session_pooling_leaks_nothing() {
    check("session", PoolMode::Session);
}

#[test]
fn statement_pooling_leaks_nothing() {
    check("statement", PoolMode::Statement);
}
