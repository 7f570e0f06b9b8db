// SPDX-License-Identifier: Apache-2.0
//! The `underpass` binary.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// A data path for databases that goes underneath user space.
#[derive(Debug, Parser)]
#[command(name = "underpass", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs the connection pooler with a pgbouncer.ini.
    Pooler(Pooler),
}

#[derive(Debug, clap::Args)]
struct Pooler {
    /// Runs in the background.
    #[arg(short, long)]
    daemon: bool,
    /// Says more; can be given several times.
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,
    /// Says nothing on standard error.
    #[arg(short, long)]
    quiet: bool,
    /// User to run as.
    #[arg(short, long)]
    user: Option<String>,
    /// Reads the configuration, says what is wrong with it, and exits.
    #[arg(long)]
    check: bool,
    /// A second file laid over the first, for the section [underpass].
    #[arg(long, value_name = "FILE")]
    overlay: Vec<PathBuf>,
    /// The configuration, a pgbouncer.ini.
    file: PathBuf,
}

struct Stderr;

impl log::Log for Stderr {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }
    fn log(&self, record: &log::Record<'_>) {
        eprintln!("{} {}", record.level(), record.args());
    }
    fn flush(&self) {}
}

fn main() -> ExitCode {
    let Command::Pooler(pooler) = Cli::parse().command;
    let _ = log::set_logger(&Stderr);
    log::set_max_level(if pooler.quiet { log::LevelFilter::Off } else { log::LevelFilter::Info });
    let mut config_paths = vec![pooler.file];
    config_paths.extend(pooler.overlay);
    let result = if pooler.check {
        underpass_pooler::check(&config_paths)
            .map(|warnings| warnings.iter().for_each(|warning| println!("{warning}")))
    } else {
        underpass_pooler::run(&underpass_pooler::Options {
            config_paths,
            daemonize: pooler.daemon,
            verbose: pooler.verbose.into(),
            quiet: pooler.quiet,
            user: pooler.user,
        })
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("underpass: {error:#}");
            ExitCode::FAILURE
        }
    }
}
