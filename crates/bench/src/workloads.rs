// SPDX-License-Identifier: Apache-2.0
//! The workloads: schema, data and transactions as pgbench scripts, in bench/workloads.
//!
//! Tables, mixes and skew follow BenchBase, the framework of the Tigger paper; a test holds the numbers to its.

use anyhow::{Context, Result};

use crate::postgres::{DATABASE, Server};
use crate::sample::LoadedData;

/// One transaction type.
#[derive(Clone, Copy, Debug)]
pub struct Transaction {
    /// BenchBase's name.
    pub name: &'static str,
    /// Weight for pgbench; only the relation to the others counts.
    pub weight: u32,
    /// pgbench script.
    pub script: &'static str,
}

/// One workload.
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// What `--workloads` takes.
    pub name: &'static str,
    /// Schema and data, psql, with the variable `rows`; empty when there is none.
    pub load: &'static str,
    /// Value of `rows` at scale 1.
    pub rows: u64,
    /// What BenchBase's scale factor 1 has of the same, 0 where it has no such workload.
    pub benchbase_rows: u64,
    /// Its tables.
    pub tables: &'static [&'static str],
    /// Its transactions.
    pub transactions: &'static [Transaction],
}

macro_rules! script {
    ($file:literal) => {
        include_str!(concat!("../../../bench/workloads/", $file))
    };
}

/// Every workload.
pub const WORKLOADS: &[Workload] = &[
    Workload {
        name: "noop",
        load: "",
        rows: 0,
        benchbase_rows: 0,
        tables: &[],
        transactions: &[Transaction { name: "NoOp", weight: 1, script: ";\n" }],
    },
    Workload {
        name: "select1",
        load: "",
        rows: 0,
        benchbase_rows: 0,
        tables: &[],
        transactions: &[Transaction { name: "Select1", weight: 1, script: "select 1;\n" }],
    },
    Workload {
        name: "ycsb",
        load: script!("ycsb/load.sql"),
        rows: 100_000,
        benchbase_rows: 1_000,
        tables: &["usertable"],
        transactions: &[Transaction {
            name: "ReadRecord",
            weight: 100,
            script: script!("ycsb/read_record.sql"),
        }],
    },
    Workload {
        name: "ycsb-mixed",
        load: script!("ycsb/load.sql"),
        rows: 100_000,
        benchbase_rows: 1_000,
        tables: &["usertable_mixed"],
        transactions: &[
            Transaction { name: "ReadRecord", weight: 50, script: script!("ycsb/read_record.sql") },
            Transaction { name: "InsertRecord", weight: 5, script: script!("ycsb/insert_record.sql") },
            Transaction { name: "ScanRecord", weight: 15, script: script!("ycsb/scan_record.sql") },
            Transaction { name: "UpdateRecord", weight: 10, script: script!("ycsb/update_record.sql") },
            Transaction { name: "DeleteRecord", weight: 10, script: script!("ycsb/delete_record.sql") },
            Transaction {
                name: "ReadModifyWriteRecord",
                weight: 10,
                script: script!("ycsb/read_modify_write_record.sql"),
            },
        ],
    },
    Workload {
        name: "smallbank",
        load: script!("smallbank/load.sql"),
        rows: 100_000,
        benchbase_rows: 1_000_000,
        tables: &["accounts", "savings", "checking"],
        transactions: &[
            Transaction { name: "Amalgamate", weight: 15, script: script!("smallbank/amalgamate.sql") },
            Transaction { name: "Balance", weight: 15, script: script!("smallbank/balance.sql") },
            Transaction {
                name: "DepositChecking",
                weight: 15,
                script: script!("smallbank/deposit_checking.sql"),
            },
            Transaction { name: "SendPayment", weight: 25, script: script!("smallbank/send_payment.sql") },
            Transaction {
                name: "TransactSavings",
                weight: 15,
                script: script!("smallbank/transact_savings.sql"),
            },
            Transaction { name: "WriteCheck", weight: 15, script: script!("smallbank/write_check.sql") },
        ],
    },
    Workload {
        name: "tatp",
        load: script!("tatp/load.sql"),
        rows: 20_000,
        benchbase_rows: 100_000,
        tables: &["subscriber", "access_info", "special_facility", "call_forwarding"],
        transactions: &[
            Transaction {
                name: "DeleteCallForwarding",
                weight: 2,
                script: script!("tatp/delete_call_forwarding.sql"),
            },
            Transaction { name: "GetAccessData", weight: 35, script: script!("tatp/get_access_data.sql") },
            Transaction {
                name: "GetNewDestination",
                weight: 10,
                script: script!("tatp/get_new_destination.sql"),
            },
            Transaction {
                name: "GetSubscriberData",
                weight: 35,
                script: script!("tatp/get_subscriber_data.sql"),
            },
            Transaction {
                name: "InsertCallForwarding",
                weight: 2,
                script: script!("tatp/insert_call_forwarding.sql"),
            },
            Transaction { name: "UpdateLocation", weight: 14, script: script!("tatp/update_location.sql") },
            Transaction {
                name: "UpdateSubscriberData",
                weight: 2,
                script: script!("tatp/update_subscriber_data.sql"),
            },
        ],
    },
    Workload {
        name: "tpcb",
        load: script!("tpcb/load.sql"),
        rows: 1_000_000,
        benchbase_rows: 0,
        tables: &["pgbench_branches", "pgbench_tellers", "pgbench_accounts", "pgbench_history"],
        transactions: &[Transaction { name: "TpcB", weight: 1, script: script!("tpcb/tpcb.sql") }],
    },
    Workload {
        name: "twitter",
        load: script!("twitter/load.sql"),
        rows: 5_000,
        benchbase_rows: 500,
        tables: &["user_profiles", "followers", "follows", "tweets", "added_tweets"],
        transactions: &[
            Transaction { name: "GetTweet", weight: 1, script: script!("twitter/get_tweet.sql") },
            Transaction {
                name: "GetTweetsFromFollowing",
                weight: 1,
                script: script!("twitter/get_tweets_from_following.sql"),
            },
            Transaction { name: "GetFollowers", weight: 7, script: script!("twitter/get_followers.sql") },
            Transaction { name: "GetUserTweets", weight: 90, script: script!("twitter/get_user_tweets.sql") },
            Transaction { name: "InsertTweet", weight: 1, script: script!("twitter/insert_tweet.sql") },
        ],
    },
];

/// Names of all workloads.
pub const NAMES: &[&str] = &["noop", "select1", "ycsb", "ycsb-mixed", "smallbank", "tatp", "tpcb", "twitter"];

/// Skew of YCSB's keys in BenchBase.
const ZIPF_THETA: f64 = 0.99;

/// The workload of that name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Workload> {
    WORKLOADS.iter().find(|workload| workload.name == name)
}

impl Workload {
    /// Scripts with weights for pgbench.
    #[must_use]
    pub fn scripts(&self) -> Vec<(String, u32)> {
        self.transactions
            .iter()
            .map(|transaction| (self.renamed(transaction.script), transaction.weight))
            .collect()
    }

    /// Two workloads share YCSB's table and one of them deletes from it: each gets a table of its own.
    fn renamed(&self, text: &str) -> String {
        match self.tables {
            ["usertable_mixed"] => text.replace("usertable", "usertable_mixed"),
            _ => text.to_owned(),
        }
    }

    /// Variables of the scripts: `rows`, and the constants of YCSB's key distribution.
    #[must_use]
    pub fn variables(&self, scale: u32) -> Vec<(String, String)> {
        let rows = self.rows * u64::from(scale);
        let mut variables = vec![("rows".to_owned(), rows.to_string())];
        if self.name.starts_with("ycsb") {
            let (zetan, eta) = zipf_constants(rows);
            variables.extend([("zetan".to_owned(), zetan.to_string()), ("eta".to_owned(), eta.to_string())]);
        }
        variables
    }

    /// Makes schema and data and returns their size.
    ///
    /// # Errors
    /// When the server refuses a statement.
    pub fn load(&self, server: &Server, scale: u32) -> Result<LoadedData> {
        if self.load.is_empty() {
            return Ok(LoadedData::default());
        }
        server.psql_script(
            DATABASE,
            &self.renamed(self.load),
            &[("rows", (self.rows * u64::from(scale)).to_string())],
        )?;
        self.size(server)
    }

    fn size(&self, server: &Server) -> Result<LoadedData> {
        let names = self.tables.iter().map(|name| format!("'{name}'")).collect::<Vec<_>>().join(", ");
        // The loaders end in vacuum analyze, which sets reltuples.
        let sql = format!(
            "select sum(greatest(reltuples, 0))::bigint, sum(pg_total_relation_size(oid)) / 1e6 \
             from pg_class where relkind = 'r' and relname in ({names})"
        );
        LoadedData::parse(&server.psql(DATABASE, &sql)?).context("no size of the tables")
    }
}

/// zeta(n) and eta of Gray et al., "Quickly generating billion-record synthetic databases", for theta 0.99.
fn zipf_constants(n: u64) -> (f64, f64) {
    let zeta = |n: u64| (1..=n).map(|rank| (rank as f64).powf(-ZIPF_THETA)).sum::<f64>();
    let zetan = zeta(n);
    let eta = (1.0 - (2.0 / n as f64).powf(1.0 - ZIPF_THETA)) / (1.0 - zeta(2) / zetan);
    (zetan, eta)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mix(name: &str) -> Vec<(&'static str, u32)> {
        find(name).unwrap().transactions.iter().map(|t| (t.name, t.weight)).collect()
    }

    /// The weights of BenchBase's sample configurations for PostgreSQL.
    #[test]
    fn mixes_equal_benchbase() {
        assert_eq!(
            mix("ycsb-mixed"),
            [
                ("ReadRecord", 50),
                ("InsertRecord", 5),
                ("ScanRecord", 15),
                ("UpdateRecord", 10),
                ("DeleteRecord", 10),
                ("ReadModifyWriteRecord", 10)
            ]
        );
        assert_eq!(
            mix("smallbank"),
            [
                ("Amalgamate", 15),
                ("Balance", 15),
                ("DepositChecking", 15),
                ("SendPayment", 25),
                ("TransactSavings", 15),
                ("WriteCheck", 15)
            ]
        );
        assert_eq!(
            mix("tatp"),
            [
                ("DeleteCallForwarding", 2),
                ("GetAccessData", 35),
                ("GetNewDestination", 10),
                ("GetSubscriberData", 35),
                ("InsertCallForwarding", 2),
                ("UpdateLocation", 14),
                ("UpdateSubscriberData", 2)
            ]
        );
        assert_eq!(
            mix("twitter"),
            [
                ("GetTweet", 1),
                ("GetTweetsFromFollowing", 1),
                ("GetFollowers", 7),
                ("GetUserTweets", 90),
                ("InsertTweet", 1)
            ]
        );
    }

    /// Rows of scale factor 1 in BenchBase's constants; ours are a stated multiple of it.
    #[test]
    fn tables_equal_benchbase() {
        let shape = |name: &str| {
            let workload = find(name).unwrap();
            for table in workload.tables {
                let load = workload.renamed(workload.load);
                assert!(load.contains(&format!("create table {table} ")), "{name}: {table}");
            }
            (workload.benchbase_rows, workload.tables.len())
        };
        assert_eq!(shape("ycsb"), (1_000, 1));
        assert_eq!(shape("ycsb-mixed"), (1_000, 1));
        assert_eq!(shape("smallbank"), (1_000_000, 3));
        assert_eq!(shape("tatp"), (100_000, 4));
        assert_eq!(shape("twitter"), (500, 5));
        assert!(find("twitter").unwrap().load.contains(":rows * 40"), "20,000 tweets for 500 users");
    }

    /// Under Zipf 0.99 over n keys the first has 1 / zeta(n) of all draws, the second half of that to the 0.99.
    #[test]
    fn skew_equals_benchbase() {
        let n = 1_000;
        let (zetan, eta) = zipf_constants(n);
        let draw = |u: f64| match u * zetan {
            uz if uz < 1.0 => 0,
            uz if uz < 1.0 + 0.5_f64.powf(ZIPF_THETA) => 1,
            _ => (n as f64 * (eta * u - eta + 1.0).powf(1.0 / (1.0 - ZIPF_THETA))) as u64,
        };
        let draws = 1_000_000;
        let keys: Vec<u64> = (0..draws).map(|i| draw(f64::from(i) / f64::from(draws))).collect();
        let share = |key: u64| keys.iter().filter(|&&drawn| drawn == key).count() as f64 / f64::from(draws);
        assert!((share(0) * zetan - 1.0).abs() < 0.01);
        assert!((share(1) / share(0) - 0.5_f64.powf(ZIPF_THETA)).abs() < 0.01);
        assert!(keys.iter().all(|&key| key < n));
    }

    #[test]
    fn every_workload_has_a_name_and_scripts() {
        assert_eq!(WORKLOADS.iter().map(|workload| workload.name).collect::<Vec<_>>(), NAMES);
        assert!(WORKLOADS.iter().all(|workload| !workload.scripts().is_empty()));
    }
}
