// SPDX-License-Identifier: Apache-2.0
//! The fuzz functions over the corpora in fuzz/corpus, and over what proptest makes.

use std::path::Path;

use proptest::prelude::*;
use underpass_config::{Config, fuzzing};

fn replay(corpus: &str, target: fn(&[u8])) {
    let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus")).join(corpus);
    let mut seeds = 0;
    for entry in std::fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
        let bytes = std::fs::read(entry.expect("entry").path()).expect("seed");
        // Each seed whole, cut at every byte, and with each byte lost: the neighbours of valid input.
        target(&bytes);
        for i in 0..bytes.len().min(600) {
            target(&bytes[..i]);
            target(&[&bytes[..i], &bytes[i + 1..]].concat());
        }
        seeds += 1;
    }
    assert!(seeds >= 5, "{corpus} has {seeds} seeds");
}

#[test]
fn corpus_ini() {
    replay("config_ini", fuzzing::ini);
}

#[test]
fn corpus_userlist() {
    replay("config_userlist", fuzzing::userlist);
}

#[test]
fn corpus_hba() {
    replay("config_hba", fuzzing::hba);
}

/// Lines that are nearly right, which random bytes never are.
fn ini_text() -> impl Strategy<Value = String> {
    let fragment = prop_oneof![
        prop::sample::select(vec![
            "[pgbouncer]",
            "[databases]",
            "[users]",
            "[peers]",
            "[underpass]",
            "%include a",
            "* = host=x",
            "=",
            "'",
            "\"",
            ";",
            "\n",
            "\r\n",
            " ",
            "x = host='a''b' pool_size=3",
            "1 = host=/p",
            "u = pool_mode=session",
            "pool_mode=transaction",
            "query_timeout=1e3",
            "auth_file=b",
            "auth_type=hba",
            "auth_hba_file=b",
            "threads=2",
            "unix_socket_mode=07",
            "auth_dbname=x",
            "-",
            "0x",
        ])
        .prop_map(str::to_owned),
        "[ -~]{0,12}",
        "\\PC{0,4}",
    ];
    prop::collection::vec(fragment, 0..24).prop_map(|parts| parts.join("\n"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn bytes_never_panic(data in prop::collection::vec(any::<u8>(), 0..300)) {
        fuzzing::ini(&data);
        fuzzing::userlist(&data);
        fuzzing::hba(&data);
    }

    #[test]
    fn nearly_right_files_never_panic(text in ini_text()) {
        fuzzing::ini(text.as_bytes());
        fuzzing::ini(format!("[pgbouncer]\n{text}").as_bytes());
    }

    #[test]
    fn nearly_right_hba_never_panics(text in "((local|host|hostssl)( |,|\t|\n|all|@h|\"|10\\.0\\.0\\.0/8|::/0|trust|md5|map=m|#){0,12}\n){0,4}") {
        fuzzing::hba(text.as_bytes());
    }

    #[test]
    fn nearly_right_userlists_and_urls_never_panic(text in "(postgres://)?[a-z\"%@:/,?&=\\[\\]\\\\'\n; ]{0,60}") {
        fuzzing::userlist(text.as_bytes());
    }

    /// Whatever stands in a quoted name or value comes back as it was.
    #[test]
    fn quoting_round_trips(name in "[^\n\0\"\\*]{1,20}", value in "[^\n\0\r]{1,20}") {
        prop_assume!(name != "pgbouncer");
        let name = format!("{name}\"");
        let text = format!(
            "[databases]\n\"{}\" = application_name='{}' port=1\n[pgbouncer]\n",
            name.replace('"', "\"\""),
            value.replace('\'', "''")
        );
        let config = Config::parse("p", &text).map_err(|e| TestCaseError::fail(e.to_string()))?.config;
        let db = &config.databases.named[&name];
        prop_assert_eq!(db.application_name.as_deref(), Some(value.as_str()));
    }

    /// A time goes in and comes out to the microsecond.
    #[test]
    fn times_are_exact(micros in 0u64..1_000_000_000_000) {
        let mut config = Config::default();
        let text = format!("{}.{:06}", micros / 1_000_000, micros % 1_000_000);
        prop_assert!(config.set("query_timeout", &text).is_ok());
        prop_assert_eq!(config.query_timeout.as_micros() as u64, micros);
    }
}
