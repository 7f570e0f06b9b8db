// SPDX-License-Identifier: Apache-2.0
//! The leak checker's command line.

use std::env;
use std::process::ExitCode;

use clap::Parser;
use underpass_soak::{Config, run};

fn main() -> ExitCode {
    let mut config = Config::parse();
    if config.password.is_empty() {
        config.password = env::var("PGPASSWORD").unwrap_or_default();
    }
    match run(&config) {
        Ok(report) => {
            println!("{report}");
            ExitCode::from(report.exit_code())
        }
        Err(error) => {
            eprintln!("underpass-soak: {error:#}");
            ExitCode::from(2)
        }
    }
}
