// SPDX-License-Identifier: Apache-2.0
//! The short form of `make test-soak`: our pooler in every pool mode, with every fault, clients always waiting.
//! Needs the pooler's binary; see `underpass_testkit::Underpass::binary`.

use underpass_soak::{Config, PoolMode, Report, run};
use underpass_testkit::{Ini, Pooler, Postgres, Underpass};

/// A report that fails is shown with what the pooler has to say: whether it still runs, and its log without the connections' comings and goings.
fn check_report(report: &Report, pooler: &mut Underpass) {
    if report.exit_code() == 0 {
        return;
    }
    let state = if pooler.is_running() { "runs" } else { "has ended" };
    let log = pooler.log();
    let lines: Vec<&str> = log
        .lines()
        .filter(|line| {
            !["login attempt", "new connection to server", "closing because"]
                .iter()
                .any(|word| line.contains(word))
        })
        .collect();
    let end = lines[lines.len().saturating_sub(200)..].join("\n");
    panic!("{report}\nthe pooler {state}; the end of its log:\n{end}");
}

fn check(name: &str, pool_mode: PoolMode) {
    check_with(name, pool_mode, |ini| ini);
}

fn check_with(name: &str, pool_mode: PoolMode, also: impl FnOnce(Ini) -> Ini) {
    let server = Postgres::start().unwrap();
    let ini = also(Ini::for_server(&server).set("pool_mode", name).set("default_pool_size", "5"));
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
    check_report(&report, &mut pooler);
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

/// Every third transaction has its client change the worker. (Clients of lanes do not.)
#[test]
fn clients_that_change_workers_leak_nothing() {
    check_with("transaction", PoolMode::Transaction, |ini| {
        ini.environment("UNDERPASS_TEST_MOVE", "3").tail("[underpass]\nthreads = 3\nkernel_path = off\n")
    });
}

/// Kernel lanes, with clients taken out of them at random moments. `pool` servers for 40 clients.
fn check_lanes(mode: PoolMode, same_host: &str, threads: u32, pool: &str) {
    let server = Postgres::start().unwrap();
    let name = if mode == PoolMode::Session { "session" } else { "transaction" };
    let ini = Ini::for_server(&server).set("pool_mode", name).set("default_pool_size", pool);
    let Some(ini) = ini.lanes(same_host, threads) else { return };
    let mut pooler = Underpass::start(&ini.environment("UNDERPASS_TEST_FLIP", "4")).unwrap();
    let mut config = Config::for_port(pooler.port());
    config.clients = 40;
    config.pool_mode = mode;
    let is_contended = pool == "5";
    // Sessions are given to their lanes less often.
    config.transactions = match mode {
        _ if is_contended => 10_000,
        PoolMode::Session => 80_000,
        _ => 50_000,
    };
    config.silence = 20;
    config.fault_every = 50;
    config.require_faults = 5;
    let report = run(&config).unwrap();
    check_report(&report, &mut pooler);
    assert!(pooler.is_running());
    let kernel = pooler.console("show kernel").unwrap().rows();
    let figure = |name: &str, item: &str| -> u64 {
        let found =
            kernel.iter().find(|row| row[1].as_deref() == Some(name) && row[2].as_deref() == Some(item));
        found.and_then(|row| row[3].as_deref()?.parse().ok()).unwrap_or(0)
    };
    println!(
        "{name}, same_host = {same_host}, {threads} threads, {pool} servers: D {}, A {}, B {}, user {}; {} taken, {} given",
        figure("D", "xacts"),
        figure("A", "xacts"),
        figure("B", "xacts"),
        figure("user", "xacts"),
        figure("all", "taken"),
        figure("all", "given"),
    );
    // A contended pool grants by its queue: its clients are in their lanes for moments only.
    let least = if is_contended { 100 } else { 10_000 };
    assert!(figure("all", "taken") >= least && figure("all", "given") >= least, "{kernel:?}");
    if !is_contended {
        let lane = match same_host {
            "off" => "D",
            "server" => "A",
            _ => "B",
        };
        assert!(figure(lane, "xacts") > 1000, "{kernel:?}");
    }
}

#[test]
fn lane_d_leaks_nothing() {
    check_lanes(PoolMode::Transaction, "off", 2, "60");
    check_lanes(PoolMode::Transaction, "off", 1, "5");
}

#[test]
fn lane_a_leaks_nothing() {
    check_lanes(PoolMode::Transaction, "server", 2, "60");
    check_lanes(PoolMode::Transaction, "server", 1, "5");
}

#[test]
fn lane_b_leaks_nothing() {
    check_lanes(PoolMode::Transaction, "both", 2, "60");
    check_lanes(PoolMode::Transaction, "both", 1, "5");
}

#[test]
fn sessions_in_lanes_leak_nothing() {
    check_lanes(PoolMode::Session, "off", 2, "60");
    check_lanes(PoolMode::Session, "server", 2, "60");
    check_lanes(PoolMode::Session, "both", 2, "60");
}
