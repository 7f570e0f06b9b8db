// SPDX-License-Identifier: Apache-2.0
//! What to run: the command line, which is also the library's configuration.

use std::time::Duration;

use clap::{Parser, ValueEnum};

use crate::connection::Target;
use crate::faults::FaultKind;

/// How the pooler under test assigns servers; it decides which traffic is legal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PoolMode {
    /// A server per client connection; also a PostgreSQL without pooler. Clients reconnect now and then.
    Session,
    /// A server per transaction.
    Transaction,
    /// A server per statement: no explicit transactions.
    Statement,
}

/// Checks that a PostgreSQL pooler never gives a client what belongs to another.
///
/// Hundreds of clients speak every shape of the protocol, and disappear in every way there is. Each row, notice and error
/// names the statement it belongs to, so a foreign, missing, doubled or reordered one is noticed when it arrives.
///
/// Exit status: 0 all well, 1 a violation, 2 could not run, 3 a --require was not met.
#[derive(Debug, Clone, Parser)]
#[command(name = "underpass-soak", version)]
pub struct Config {
    /// Host of the pooler or server
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port
    #[arg(long, default_value_t = 6432)]
    pub port: u16,
    /// Database
    #[arg(long, default_value = "postgres")]
    pub database: String,
    /// User; must be allowed to create a table and to end its own backends
    #[arg(long, default_value = "postgres")]
    pub user: String,
    /// Password, if one is asked for; PGPASSWORD is used if absent
    #[arg(long, default_value = "")]
    pub password: String,
    /// Clients at the same time
    #[arg(long, default_value_t = 200)]
    pub clients: u32,
    /// Stop after so many transactions
    #[arg(long, default_value_t = 2_000_000)]
    pub transactions: u64,
    /// Seed of every random choice
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Pool mode of the pooler under test
    #[arg(long, value_enum, default_value = "transaction")]
    pub pool_mode: PoolMode,
    /// Also use named prepared statements (PgBouncer has them in transaction mode from 1.21)
    #[arg(long)]
    pub prepared: bool,
    /// One fault every so many transactions, of each kind in turn; 0 for none
    #[arg(long, default_value_t = 100)]
    pub fault_every: u64,
    /// Do not make these faults, for victims with a known bug
    #[arg(long, value_enum, value_delimiter = ',')]
    pub skip_fault: Vec<FaultKind>,
    /// Make only these faults, to find out which one a violation comes from
    #[arg(long, value_enum, value_delimiter = ',')]
    pub only_fault: Vec<FaultKind>,
    /// Keep the ledger in this table, which is there and empty, as (client int, sequence bigint, token text), and stays; without it a table is
    /// made, and dropped at the end. Rows whose commit was cut off end in `uncertain`
    #[arg(long)]
    pub table: Option<String>,
    /// Print the counts every so many seconds; 0 for never
    #[arg(long, default_value_t = 0)]
    pub progress: u64,
    /// Threads of the checker
    #[arg(long, default_value_t = 1)]
    pub threads: u32,
    /// Longest wait for an answer, in seconds
    #[arg(long, default_value_t = 60)]
    pub silence: u64,
    /// Admin console user: observes queueing and clients per server while running
    #[arg(long)]
    pub console_user: Option<String>,
    /// Password of the console user
    #[arg(long, default_value = "")]
    pub console_password: String,
    /// At least so many faults of each kind
    #[arg(long, default_value_t = 0)]
    pub require_faults: u64,
    /// At least so many clients per server; needs --console-user
    #[arg(long, default_value_t = 0)]
    pub require_clients_per_server: u64,
    /// Clients must be found waiting in every look at the console; needs --console-user
    #[arg(long)]
    pub require_queueing: bool,
}

impl Config {
    /// The defaults, for a port: what `underpass-soak --port PORT` would run.
    pub fn for_port(port: u16) -> Self {
        let mut config = Self::parse_from(["underpass-soak"]);
        config.port = port;
        config
    }

    /// Where the clients connect.
    pub fn target(&self) -> Target {
        Target {
            host: self.host.clone(),
            port: self.port,
            user: self.user.clone(),
            database: self.database.clone(),
            password: self.password.clone(),
            patience: self.silence_limit(),
        }
    }

    pub(crate) fn silence_limit(&self) -> Duration {
        Duration::from_secs(self.silence)
    }
}
