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

/// Transactions as `BenchBaseName weight "file"`, the file in a folder of bench/workloads.
macro_rules! transactions {
    ($folder:literal: $($name:ident $weight:literal $file:literal),+ $(,)?) => {
        &[$(Transaction {
            name: stringify!($name),
            weight: $weight,
            script: script!($folder, $file),
        }),+]
    };
}

macro_rules! script {
    ($folder:literal, $file:literal) => {
        include_str!(concat!("../../../bench/workloads/", $folder, "/", $file, ".sql"))
    };
}

/// A workload without data: one statement.
const fn statement(name: &'static str, transactions: &'static [Transaction]) -> Workload {
    Workload { name, load: "", rows: 0, benchbase_rows: 0, tables: &[], transactions }
}

/// One of the mixes over YCSB's table, which each have a copy of it, because some delete from it.
const fn ycsb(
    name: &'static str,
    table: &'static [&'static str; 1],
    transactions: &'static [Transaction],
) -> Workload {
    let load = script!("ycsb", "load");
    Workload { name, load, rows: 100_000, benchbase_rows: 1_000, tables: table, transactions }
}

/// Every workload.
pub const WORKLOADS: &[Workload] = &[
    statement("noop", &[Transaction { name: "NoOp", weight: 1, script: ";\n" }]),
    statement("select1", &[Transaction { name: "Select1", weight: 1, script: "select 1;\n" }]),
    ycsb("ycsb", &["usertable"], transactions!("ycsb": ReadRecord 100 "read_record")),
    ycsb(
        "ycsb-mixed",
        &["usertable_mixed"],
        transactions!("ycsb":
            ReadRecord 50 "read_record",
            InsertRecord 5 "insert_record",
            ScanRecord 15 "scan_record",
            UpdateRecord 10 "update_record",
            DeleteRecord 10 "delete_record",
            ReadModifyWriteRecord 10 "read_modify_write_record",
        ),
    ),
    ycsb(
        "ycsb-90-10",
        &["usertable_90_10"],
        transactions!("ycsb": ReadRecord 90 "read_record", UpdateRecord 10 "update_record"),
    ),
    ycsb(
        "ycsb-10-90",
        &["usertable_10_90"],
        transactions!("ycsb": ReadRecord 10 "read_record", UpdateRecord 90 "update_record"),
    ),
    Workload {
        name: "smallbank",
        load: script!("smallbank", "load"),
        rows: 100_000,
        benchbase_rows: 1_000_000,
        tables: &["accounts", "savings", "checking"],
        transactions: transactions!("smallbank":
            Amalgamate 15 "amalgamate",
            Balance 15 "balance",
            DepositChecking 15 "deposit_checking",
            SendPayment 25 "send_payment",
            TransactSavings 15 "transact_savings",
            WriteCheck 15 "write_check",
        ),
    },
    Workload {
        name: "tatp",
        load: script!("tatp", "load"),
        rows: 20_000,
        benchbase_rows: 100_000,
        tables: &["subscriber", "access_info", "special_facility", "call_forwarding"],
        transactions: transactions!("tatp":
            DeleteCallForwarding 2 "delete_call_forwarding",
            GetAccessData 35 "get_access_data",
            GetNewDestination 10 "get_new_destination",
            GetSubscriberData 35 "get_subscriber_data",
            InsertCallForwarding 2 "insert_call_forwarding",
            UpdateLocation 14 "update_location",
            UpdateSubscriberData 2 "update_subscriber_data",
        ),
    },
    Workload {
        name: "tpcb",
        load: script!("tpcb", "load"),
        rows: 1_000_000,
        benchbase_rows: 0,
        tables: &["pgbench_branches", "pgbench_tellers", "pgbench_accounts", "pgbench_history"],
        transactions: transactions!("tpcb": TpcB 1 "tpcb"),
    },
    Workload {
        name: "tpcb-apart",
        load: script!("tpcb", "load"),
        rows: 2_000_000,
        benchbase_rows: 0,
        tables: &["pgbench_branches", "pgbench_tellers", "pgbench_accounts", "pgbench_history"],
        transactions: transactions!("tpcb": TpcB 1 "tpcb_apart"),
    },
    Workload {
        name: "select-only",
        load: script!("tpcb", "load"),
        rows: 1_000_000,
        benchbase_rows: 0,
        tables: &["pgbench_branches", "pgbench_tellers", "pgbench_accounts", "pgbench_history"],
        transactions: transactions!("tpcb": SelectOnly 1 "select_only"),
    },
    // Its data are go-tpc's; `rows` are warehouses.
    Workload {
        name: TPCC,
        load: "",
        rows: 4,
        benchbase_rows: 1,
        tables: &[],
        transactions: transactions!("tpcc":
            NewOrder 45 "new_order",
            Payment 43 "payment",
            OrderStatus 4 "order_status",
            Delivery 4 "delivery",
            StockLevel 4 "stock_level",
        ),
    },
    Workload {
        name: "twitter",
        load: script!("twitter", "load"),
        rows: 5_000,
        benchbase_rows: 500,
        tables: &["user_profiles", "followers", "follows", "tweets", "added_tweets"],
        transactions: transactions!("twitter":
            GetTweet 1 "get_tweet",
            GetTweetsFromFollowing 1 "get_tweets_from_following",
            GetFollowers 7 "get_followers",
            GetUserTweets 90 "get_user_tweets",
            InsertTweet 1 "insert_tweet",
        ),
    },
];

/// The workload whose data go-tpc makes.
pub const TPCC: &str = "tpcc";

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
            .map(|transaction| (self.renamed(&unrolled(transaction.script)), transaction.weight))
            .collect()
    }

    /// A text of the workload with YCSB's table under this workload's name for it.
    fn renamed(&self, text: &str) -> String {
        match self.tables {
            [table] if table.starts_with("usertable") => text.replace("usertable", table),
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

/// A script with its block between `-- {{each NAME FIRST LAST}}` and `-- {{end}}` said once for each number, which stands where
/// the block has `{{NAME}}`: pgbench has no loops.
fn unrolled(script: &str) -> String {
    let block = || {
        let (before, rest) = script.split_once("-- {{each ")?;
        let (head, rest) = rest.split_once("}}\n")?;
        let (body, after) = rest.split_once("-- {{end}}\n")?;
        let (name, numbers) = head.split_once(' ')?;
        let (first, last) = numbers.split_once(' ')?;
        let numbers = first.parse::<u32>().ok()?..=last.parse().ok()?;
        let place = format!("{{{{{name}}}}}");
        let bodies: String = numbers.map(|number| body.replace(&place, &number.to_string())).collect();
        Some([before, &bodies, after].concat())
    };
    block().unwrap_or_else(|| script.to_owned())
}

/// zeta(n) and eta of Gray et al., "Quickly generating billion-record synthetic databases", for theta 0.99.
#[must_use]
pub fn zipf_constants(n: u64) -> (f64, f64) {
    let zeta = |n: u64| (1..=n).map(|rank| (rank as f64).powf(-ZIPF_THETA)).sum::<f64>();
    let zetan = zeta(n);
    let eta = (1.0 - (2.0 / n as f64).powf(1.0 - ZIPF_THETA)) / (1.0 - zeta(2) / zetan);
    (zetan, eta)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

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
            mix(TPCC),
            [("NewOrder", 45), ("Payment", 43), ("OrderStatus", 4), ("Delivery", 4), ("StockLevel", 4)]
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

    /// `name type` of each column of a table, as its loader makes it.
    fn columns(load: &str, table: &str) -> Vec<String> {
        let body =
            load.split_once(&format!("create table {table} (")).unwrap().1.split_once(");\n").unwrap().0;
        let mut depth = 0;
        let split = |c: char| {
            depth += i32::from(c == '(') - i32::from(c == ')');
            c == ',' && depth == 0
        };
        let parts = body.split(split).map(str::trim).filter(|part| !part.starts_with("primary key"));
        parts.map(|part| part.split_whitespace().take(2).collect::<Vec<_>>().join(" ")).collect()
    }

    /// The columns of BenchBase's schemas for PostgreSQL, in order, with `int` for `integer`.
    #[test]
    fn columns_equal_benchbase() {
        let numbered = |name: &str, kind: &str| (1..=10).map(move |n| format!("{name}{n} {kind}")).collect();
        let list = |text: &str| text.split(", ").map(str::to_owned).collect::<Vec<String>>();
        let subscriber: Vec<Vec<String>> = vec![
            list("s_id int, sub_nbr varchar(15)"),
            numbered("bit_", "smallint"),
            numbered("hex_", "smallint"),
            numbered("byte2_", "smallint"),
            list("msc_location int, vlr_location int"),
        ];
        let usertable: Vec<Vec<String>> = vec![list("ycsb_key int"), numbered("field", "text")];
        for (workload, table, expected) in [
            ("ycsb", "usertable", usertable.concat()),
            ("smallbank", "accounts", list("custid bigint, name varchar(64)")),
            ("smallbank", "savings", list("custid bigint, bal float")),
            ("smallbank", "checking", list("custid bigint, bal float")),
            ("tatp", "subscriber", subscriber.concat()),
            (
                "tatp",
                "access_info",
                list(
                    "s_id int, ai_type smallint, data1 smallint, data2 smallint, data3 varchar(3), data4 varchar(5)",
                ),
            ),
            (
                "tatp",
                "special_facility",
                list(
                    "s_id int, sf_type smallint, is_active smallint, error_cntrl smallint, data_a smallint, \
                     data_b varchar(5)",
                ),
            ),
            (
                "tatp",
                "call_forwarding",
                list(
                    "s_id int, sf_type smallint, start_time smallint, end_time smallint, numberx varchar(15)",
                ),
            ),
            (
                "twitter",
                "user_profiles",
                list(
                    "uid int, name varchar(255), email varchar(255), partitionid int, partitionid2 smallint, \
                     followers int",
                ),
            ),
            ("twitter", "followers", list("f1 int, f2 int")),
            ("twitter", "follows", list("f1 int, f2 int")),
            ("twitter", "tweets", list("id bigint, uid int, text char(140), createdate timestamp")),
            ("twitter", "added_tweets", list("id serial, uid int, text char(140), createdate timestamp")),
        ] {
            assert_eq!(columns(find(workload).unwrap().load, table), expected, "{workload}: {table}");
        }
        let references = |name: &str| find(name).unwrap().load.matches("references").count();
        assert_eq!((references("smallbank"), references("tatp"), references("twitter")), (2, 3, 4));
    }

    /// Where BenchBase draws evenly, so do we: SmallBank's customers.
    #[test]
    fn smallbank_is_not_skewed() {
        let flat = |script: &str| script.contains("\\set customer random(0, :rows - 1)");
        assert!(find("smallbank").unwrap().transactions.iter().all(|transaction| flat(transaction.script)));
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

    /// BenchBase draws TATP's subscribers evenly.
    #[test]
    fn tatp_is_not_skewed() {
        let flat = |script: &str| script.contains("\\set subscriber random(1, :rows)");
        assert!(find("tatp").unwrap().transactions.iter().all(|transaction| flat(transaction.script)));
    }

    /// TPC-C's non-uniform draws (2.1.6), which BenchBase has too, and the sizes of its orders (2.4.1.3).
    #[test]
    fn tpcc_draws_as_tpcc_says() {
        let of = |name: &str| {
            let workload = find(TPCC).unwrap();
            workload.transactions.iter().find(|transaction| transaction.name == name).unwrap().script
        };
        let (customer, last) = ("(random(0, 1023) | random(1, 3000))", "(random(0, 255) | random(0, 999))");
        let item = "(random(0, 8191) | random(1, 100000))";
        assert!(["NewOrder", "Payment", "OrderStatus"].iter().all(|name| of(name).contains(customer)));
        assert!(["Payment", "OrderStatus"].iter().all(|name| of(name).contains(last)));
        assert!(["Payment", "OrderStatus"].iter().all(|name| of(name).contains("\\if :by_name <= 60\n")));
        assert!(of("NewOrder").contains(item) && of("NewOrder").contains("\\set lines random(5, 15)"));
        assert!(of("StockLevel").contains("\\set threshold random(10, 20)"));
    }

    #[test]
    fn blocks_are_said_once_for_each_number() {
        let script = "begin;\n-- {{each n 9 11}}\nselect {{n}};\n-- {{end}}\ncommit;\n";
        assert_eq!(unrolled(script), "begin;\nselect 9;\nselect 10;\nselect 11;\ncommit;\n");
        assert_eq!(unrolled("select 1;\n"), "select 1;\n");
        for (script, _) in find(TPCC).unwrap().scripts() {
            assert!(!script.contains("{{"), "{script}");
            assert_eq!(script.matches("\n\\if").count(), script.matches("\n\\endif").count());
        }
    }

    #[test]
    fn every_workload_has_a_name_of_its_own_and_scripts() {
        let names: BTreeSet<&str> = WORKLOADS.iter().map(|workload| workload.name).collect();
        assert_eq!(names.len(), WORKLOADS.len());
        assert!(WORKLOADS.iter().all(|workload| !workload.scripts().is_empty()));
    }

    /// The tracing paper's mixes of YCSB.
    #[test]
    fn read_heavy_and_write_heavy_are_nine_to_one() {
        assert_eq!(mix("ycsb-90-10"), [("ReadRecord", 90), ("UpdateRecord", 10)]);
        assert_eq!(mix("ycsb-10-90"), [("ReadRecord", 10), ("UpdateRecord", 90)]);
    }
}
