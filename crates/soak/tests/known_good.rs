// SPDX-License-Identifier: Apache-2.0
//! The checker passes on systems that are known to be right: PostgreSQL itself, and Debian's PgBouncer in all pool modes.

use underpass_soak::{Config, FaultKind, PoolMode, Report, TrafficKind, run};
use underpass_testkit::{Ini, PgBouncer, Pooler, Postgres};

/// Two faults that PgBouncer 1.18 does not survive; the checker found both, and they are skipped where 1.18 must pass.
///
/// - `PipelineCut`: a client that disappears with Syncs outstanding leaves its server in the pool once one ReadyForQuery has
///   arrived; the rest of the answers goes to the next client.
/// - `TornMessage`: the first part of a message has gone on to the server when the client disappears; the pooler's own
///   reset query or SET then becomes the message's other part, and the server waits for good.
const PGBOUNCER_FAILS: [FaultKind; 2] = [FaultKind::PipelineCut, FaultKind::TornMessage];

fn config_for_pgbouncer(port: u16, pool_mode: PoolMode) -> Config {
    Config { skip_fault: PGBOUNCER_FAILS.to_vec(), ..config(port, pool_mode) }
}

fn config(port: u16, pool_mode: PoolMode) -> Config {
    let mut config = Config::for_port(port);
    config.clients = 60;
    config.transactions = 20_000;
    config.pool_mode = pool_mode;
    config
}

fn assert_passed(report: &Report) {
    assert_eq!(report.exit_code(), 0, "{report}");
    assert!(report.transactions >= 20_000 && report.audited > 0, "{report}");
}

fn pooler(server: &Postgres, pool_mode: &str) -> PgBouncer {
    let ini = Ini::for_server(server).set("pool_mode", pool_mode).set("default_pool_size", "5");
    PgBouncer::start(&ini).unwrap()
}

#[test]
fn postgresql_itself_with_every_shape_and_every_fault() {
    let server = Postgres::builder().setting("max_connections", "300").start().unwrap();
    let mut config = config(server.port(), PoolMode::Session);
    config.prepared = true;
    let report = run(&config).unwrap();
    assert_passed(&report);
    for kind in TrafficKind::ALL {
        assert!(report.traffic(*kind) > 0, "{}\n{report}", kind.name());
    }
    for kind in FaultKind::ALL {
        assert!(report.fault(*kind) > 5, "{}\n{report}", kind.name());
    }
    // Nothing is left behind in the database.
    assert_eq!(server.sql_value("select count(*) from pg_tables where tablename ~ 'soak'").unwrap(), "0");
}

#[test]
fn pgbouncer_in_transaction_pooling_under_pressure() {
    let server = Postgres::start().unwrap();
    let pooler = pooler(&server, "transaction");
    let mut config = config_for_pgbouncer(pooler.port(), PoolMode::Transaction);
    config.console_user = Some("pooler_admin".into());
    config.console_password = "pooler_admin_password".into();
    config.require_clients_per_server = 10;
    config.require_faults = 5;
    let report = run(&config).unwrap();
    assert_passed(&report);
    // One more than the pool while a server is being cancelled.
    let observed = report.observed.as_ref().unwrap();
    assert!(observed.looks_with_queue > 0 && observed.servers_max <= 6, "{report}");
    assert_eq!(report.traffic(TrafficKind::Prepared), 0);
}

#[test]
fn pgbouncer_in_session_and_statement_pooling() {
    let server = Postgres::start().unwrap();
    let session = pooler(&server, "session");
    let mut config_session = config_for_pgbouncer(session.port(), PoolMode::Session);
    config_session.prepared = true;
    assert_passed(&run(&config_session).unwrap());

    let statement = pooler(&server, "statement");
    let report = run(&config_for_pgbouncer(statement.port(), PoolMode::Statement)).unwrap();
    assert_eq!(report.exit_code(), 0, "{report}");
    assert_eq!(report.traffic(TrafficKind::Transaction), 0);
}
