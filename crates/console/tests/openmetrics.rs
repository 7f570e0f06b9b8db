// SPDX-License-Identifier: Apache-2.0
//! The metrics, read back by a strict parser of the OpenMetrics 1.0 text format.

mod exposition;

use std::collections::BTreeMap;

use exposition::{Family, Labels, parse};
use underpass_console::metrics::{DatabaseMetrics, Metrics, MirrorMetrics, PoolMetrics};
use underpass_console::rows::{Lists, PoolCounts};
use underpass_console::stats::PoolLatency;
use underpass_console::{PoolStats, Timestamp};

/// Everybody may choose such a name.
const ODD_NAME: &str = "a\"b\\c\nd{e=\"f\"} 1 å";

fn metrics() -> Metrics {
    let mut latency = PoolLatency::default();
    for us in [1, 20, 300, 4_000, 50_000, 600_000, 7_000_000, 80_000_000] {
        latency.wait.record(us);
        latency.xact.record(us * 2);
        latency.query.record(us / 2);
    }
    let stats = PoolStats {
        xact_count: 9_007_199_254_740_993,
        received: 5,
        xact_time: 2_500_000,
        ..PoolStats::default()
    };
    let counts = PoolCounts {
        cl_active: 1,
        cl_waiting: 2,
        sv_idle: 3,
        maxwait_us: 1_500_000,
        ..PoolCounts::default()
    };
    let pool = |database: &str, user: &str| PoolMetrics {
        database: database.to_owned(),
        user: user.to_owned(),
        stats,
        latency: latency.clone(),
        counts,
        pool_size: 20,
    };
    Metrics {
        version: "0.1.0".to_owned(),
        start: Timestamp(1_795_294_481_500_000),
        pools: vec![pool("d", "u"), pool("d", ODD_NAME), pool("", "")],
        databases: vec![
            DatabaseMetrics { name: "d".to_owned(), paused: true, ..DatabaseMetrics::default() },
            DatabaseMetrics { name: ODD_NAME.to_owned(), ..DatabaseMetrics::default() },
        ],
        lists: Lists { used_clients: 7, ..Lists::default() },
        client_errors: vec![("08P01".to_owned(), 21), ("none".to_owned(), 2)],
        cancel_keys_unknown: 31,
        lane_xacts: vec![("D", 11)],
        lane_user_xacts: vec![("no_server", 10)],
        lane_exits: vec![("parameter_changed", 12), ("unknown_message", 13)],
        lane_queued_bytes: vec![("responses", 14), ("applications", 15)],
        lane_programs: vec![("request_skb", 16, 0.5)],
        mirrors: vec![MirrorMetrics {
            mirror: "m".to_owned(),
            database: ODD_NAME.to_owned(),
            is_on: true,
            transactions: vec![("executed", 41), ("queue_full", 1)],
            queued: 3,
            queued_bytes: 4096,
            differing: 5,
            slower: 6,
            compared: 7,
            not_compared: 8,
            timed: 9,
            here_us: 1_500_000,
            there_us: 2_500_000,
            holds: 10,
            held_us: 500_000,
        }],
    }
}

fn value(families: &BTreeMap<String, Family>, family: &str, sample: &str, labels: &[(&str, &str)]) -> f64 {
    let labels: Labels =
        labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let samples = &families[family].samples;
    samples.iter().find(|(name, of, _)| name == sample && *of == labels).expect(sample).2
}

#[test]
fn an_exposition_obeys_the_format_and_holds_the_values() {
    let text = metrics().encode();
    let families = parse(&text);
    assert!(families.keys().all(|name| name.starts_with("underpass_")));
    let of = |family: &str, sample: &str, labels: &[(&str, &str)]| value(&families, family, sample, labels);
    let mirror = [("mirror", "m"), ("database", ODD_NAME)];
    let full = [("mirror", "m"), ("database", ODD_NAME), ("outcome", "queue_full")];
    assert_eq!(of("underpass_mirror_transactions", "underpass_mirror_transactions_total", &full), 1.0);
    assert_eq!(of("underpass_mirror_on", "underpass_mirror_on", &mirror), 1.0);
    assert_eq!(of("underpass_mirror_queued_bytes", "underpass_mirror_queued_bytes", &mirror), 4096.0);
    for (name, expected) in [
        ("slower", 6.0),
        ("compared", 7.0),
        ("not_compared", 8.0),
        ("timed", 9.0),
        ("time_here_seconds", 1.5),
        ("time_there_seconds", 2.5),
        ("holds", 10.0),
        ("held_seconds", 0.5),
    ] {
        let family = format!("underpass_mirror_{name}");
        assert_eq!(of(&family, &format!("{family}_total"), &mirror), expected, "{name}");
    }
    let pool = [("database", "d"), ("user", ODD_NAME)];
    assert_eq!(of("underpass_received_bytes", "underpass_received_bytes_total", &pool), 5.0);
    assert_eq!(of("underpass_xact_time_seconds", "underpass_xact_time_seconds_total", &pool), 2.5);
    assert_eq!(of("underpass_maxwait_seconds", "underpass_maxwait_seconds", &pool), 1.5);
    assert_eq!(of("underpass_wait_duration_seconds", "underpass_wait_duration_seconds_count", &pool), 8.0);
    let below = families["underpass_wait_duration_seconds"].samples.iter().find(|(name, labels, _)| {
        let bound = labels.get("le").map(|bound| bound.parse::<f64>().unwrap());
        name.ends_with("_bucket") && bound == Some(32e-6) && labels["user"] == "u"
    });
    assert_eq!(below.unwrap().2, 2.0);
    let waiting = [("database", "d"), ("user", "u"), ("state", "waiting")];
    assert_eq!(of("underpass_clients", "underpass_clients", &waiting), 2.0);
    assert_eq!(
        of("underpass_servers", "underpass_servers", &[("database", "d"), ("user", "u"), ("state", "idle")]),
        3.0
    );
    assert_eq!(of("underpass_database_paused", "underpass_database_paused", &[("database", "d")]), 1.0);
    assert_eq!(of("underpass_items", "underpass_items", &[("list", "used_clients")]), 7.0);
    assert_eq!(of("underpass_lane_xacts", "underpass_lane_xacts_total", &[("lane", "D")]), 11.0);
    assert_eq!(
        of("underpass_lane_user_xacts", "underpass_lane_user_xacts_total", &[("reason", "no_server")]),
        10.0
    );
    assert_eq!(
        of("underpass_lane_exits", "underpass_lane_exits_total", &[("reason", "unknown_message")]),
        13.0
    );
    assert_eq!(
        of("underpass_lane_queued_bytes", "underpass_lane_queued_bytes", &[("queue", "applications")]),
        15.0
    );
    let program = [("program", "request_skb")];
    assert_eq!(of("underpass_lane_program_runs", "underpass_lane_program_runs_total", &program), 16.0);
    assert_eq!(
        of("underpass_lane_program_time_seconds", "underpass_lane_program_time_seconds_total", &program),
        0.5
    );
    assert_eq!(of("underpass_build", "underpass_build_info", &[("version", "0.1.0")]), 1.0);
    assert_eq!(of("underpass_start_time_seconds", "underpass_start_time_seconds", &[]), 1_795_294_481.5);
    // Whole counters are printed in full, beyond what a float holds.
    assert!(text.contains("underpass_xacts_total{database=\"d\",user=\"u\"} 9007199254740993\n"));
    let units: Vec<_> = families.values().filter_map(|family| family.unit.as_deref()).collect();
    assert_eq!((units.len(), units.contains(&"bytes"), units.contains(&"seconds")), (16, true, true));
}

#[test]
fn without_pools_the_families_are_there() {
    let text = Metrics { pools: Vec::new(), databases: Vec::new(), ..metrics() }.encode();
    let families = parse(&text);
    assert!(families["underpass_xacts"].samples.is_empty());
    assert_eq!(families.len(), 49);
}

#[test]
fn the_parser_is_strict() {
    let good = "# HELP a x.\n# TYPE a gauge\na{b=\"c\"} 1\n# EOF\n";
    parse(good);
    for bad in [
        "# HELP a x.\n# TYPE a gauge\na 1\n",
        "# HELP a x.\n# TYPE a gauge\na 1\na 1\n# EOF\n",
        "# HELP a x.\n# TYPE a counter\na 1\n# EOF\n",
        "# TYPE a gauge\na 1\n# EOF\n",
        "# HELP a x.\n# TYPE a gauge\na{b=\"c} 1\n# EOF\n",
        "# HELP a x.\n# TYPE a gauge\na{b=\"c\",b=\"d\"} 1\n# EOF\n",
        "# HELP a x.\n# TYPE a gauge\n# UNIT a bytes\na 1\n# EOF\n",
        "# HELP a x.\n# TYPE a histogram\na_bucket{le=\"1.0\"} 2\na_bucket{le=\"+Inf\"} 1\na_sum 1\na_count 1\n# EOF\n",
        "# HELP a x.\n# TYPE a gauge\n\na 1\n# EOF\n",
    ] {
        let caught = std::panic::catch_unwind(|| parse(bad));
        assert!(caught.is_err(), "{bad}");
    }
}
