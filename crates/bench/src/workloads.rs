// SPDX-License-Identifier: Apache-2.0
//! The workloads: schema, data and transactions as pgbench scripts, in bench/workloads.
//!
//! Tables, mixes and skew follow BenchBase, the framework of the Tigger paper; a test holds the numbers to its.

use anyhow::Result;

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
    /// Its tables begin with this.
    pub prefix: &'static str,
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
        prefix: "",
        transactions: &[Transaction { name: "NoOp", weight: 1, script: ";\n" }],
    },
    Workload {
        name: "select1",
        load: "",
        rows: 0,
        prefix: "",
        transactions: &[Transaction { name: "Select1", weight: 1, script: "select 1;\n" }],
    },
    Workload {
        name: "ycsb",
        load: script!("ycsb/load.sql"),
        rows: 100_000,
        prefix: "usertable",
        transactions: &[Transaction { name: "ReadRecord", weight: 100, script: script!("ycsb/read_record.sql") }],
    },
    Workload {
        name: "ycsb-mixed",
        load: script!("ycsb/load.sql"),
        rows: 100_000,
        prefix: "usertable",
        transactions: &[
            Transaction { name: "ReadRecord", weight: 50, script: script!("ycsb/read_record.sql") },
            Transaction { name: "UpdateRecord", weight: 50, script: script!("ycsb/update_record.sql") },
        ],
    },
];

/// Names of all workloads.
pub const NAMES: &[&str] = &["noop", "select1", "ycsb", "ycsb-mixed"];

/// The workload of that name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Workload> {
    WORKLOADS.iter().find(|workload| workload.name == name)
}

impl Workload {
    /// Scripts with weights for pgbench.
    #[must_use]
    pub fn scripts(&self) -> Vec<(String, u32)> {
        self.transactions.iter().map(|transaction| (transaction.script.to_owned(), transaction.weight)).collect()
    }

    /// Variables of the scripts.
    #[must_use]
    pub fn variables(&self, scale: u32) -> Vec<(String, String)> {
        vec![("rows".to_owned(), (self.rows * u64::from(scale)).to_string())]
    }

    /// Makes schema and data and returns their size.
    ///
    /// # Errors
    /// When the server refuses a statement.
    pub fn load(&self, server: &Server, scale: u32) -> Result<LoadedData> {
        if self.load.is_empty() {
            return Ok(LoadedData::default());
        }
        server.psql_script(DATABASE, self.load, &[("rows", (self.rows * u64::from(scale)).to_string())])?;
        self.size(server)
    }

    fn size(&self, server: &Server) -> Result<LoadedData> {
        let sql = format!(
            "select coalesce(sum(n_live_tup), 0), coalesce(sum(pg_total_relation_size(relid)), 0) / 1e6 \
             from pg_stat_user_tables where relname like '{}%'",
            self.prefix
        );
        let answer = server.psql(DATABASE, &sql)?;
        let mut words = answer.trim().split('|').map(|word| word.parse::<f64>().unwrap_or(0.0));
        let (rows, mb) = (words.next().unwrap_or(0.0), words.next().unwrap_or(0.0));
        Ok(LoadedData { rows: rows as u64, mb })
    }
}
