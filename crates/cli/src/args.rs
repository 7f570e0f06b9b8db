// SPDX-License-Identifier: Apache-2.0
//! The command line. Help, manual page and completions all come from the structures here.

use std::path::PathBuf;

use clap::{Args, CommandFactory as _, Parser, Subcommand};

/// A data path for databases that goes underneath user space.
#[derive(Debug, Parser)]
#[command(name = "underpass", display_name = "Underpass", version = underpass_pooler::VERSION_NUMBER, propagate_version = true, subcommand_required = true)]
#[command(override_usage = "underpass <COMMAND>", after_help = EXAMPLES, after_long_help = LONG_HELP)]
#[command(disable_version_flag = true)]
pub(crate) struct Cli {
    /// Prints the version, which is also what SHOW VERSION says.
    #[arg(short = 'V', long, action = clap::ArgAction::Version, global = true)]
    version: Option<bool>,
    #[command(subcommand)]
    pub command: Command,
}

/// What the program can be asked to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Runs the connection pooler with a pgbouncer.ini.
    #[command(display_name = "Underpass", override_usage = "underpass pooler [OPTIONS] <FILE>")]
    #[command(after_help = POOLER_EXAMPLES, after_long_help = POOLER_LONG_HELP)]
    Pooler(Pooler),
    /// Says what the kernel lanes can do here, why not, and what they cost; exits with 0 if at least one works.
    Check,
    /// Says what a recorded workload was: statements, latencies, errors, sessions, and what is missing.
    #[command(after_help = crate::report::HELP)]
    Report(crate::report::Report),
    /// Writes a trace as Parquet, JSON lines or SQL scripts.
    #[command(after_help = crate::export::EXPORT_HELP)]
    Export(crate::export::Export),
    /// Makes a trace of PostgreSQL's CSV logs.
    #[command(after_help = crate::export::IMPORT_HELP)]
    Import(crate::export::Import),
    /// Records the workload of a running PostgreSQL, MariaDB or MySQL, with no restart and no change to it.
    #[command(override_usage = "underpass trace [OPTIONS]", after_help = TRACE_EXAMPLES)]
    Trace(Box<crate::trace::Trace>),
    /// Plays a recorded workload against another server and says what came out differently.
    #[command(after_help = crate::replay::EXAMPLES)]
    Replay(Box<crate::replay::Replay>),
    /// Prints a completion script for a shell: underpass completions bash > /etc/bash_completion.d/underpass
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Prints the manual page: underpass man | man -l -
    Man,
}

/// `underpass pooler`, and the whole command line when called as `pgbouncer`.
#[derive(Debug, Args)]
pub(crate) struct Pooler {
    /// Runs in the background; needs `pidfile`, and `logfile` or `syslog`.
    ///
    /// The command returns when the pooler serves, or with an error and the reason when it cannot. Under systemd leave it out.
    #[arg(short, long)]
    pub daemon: bool,
    /// Says more; -vv says still more. The key `verbose` overrides it.
    #[arg(short, long, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Logs nothing on standard error.
    #[arg(short, long)]
    pub quiet: bool,
    /// User to become, when started by root. Overrides the key `user`.
    #[arg(short, long, value_name = "USER")]
    pub user: Option<String>,
    /// Reads the configuration and the files it names, says what is wrong, and exits: 0 if the pooler would start.
    #[arg(long)]
    pub check: bool,
    /// A file laid over FILE; the place of the section `[underpass]`, which PgBouncer does not know. Can be given several times.
    #[arg(long, value_name = "OVERLAY")]
    pub overlay: Vec<PathBuf>,
    /// PgBouncer's online restart, which does not exist here; the message names what does.
    #[arg(short = 'R', long, hide = true)]
    pub reboot: bool,
    /// The configuration, a pgbouncer.ini.
    #[arg(required_unless_present = "reboot")]
    pub file: Option<PathBuf>,
}

/// The command line when the program is called by the name of what it replaces.
#[derive(Debug, Parser)]
#[command(name = "pgbouncer", display_name = "Underpass", version = underpass_pooler::VERSION_NUMBER, disable_version_flag = true)]
#[command(about = "Underpass in the place of PgBouncer: a connection pooler for PostgreSQL.")]
#[command(
    override_usage = "pgbouncer [OPTIONS] <FILE>",
    after_help = "Called as `pgbouncer` this is `underpass pooler`."
)]
#[command(after_long_help = POOLER_LONG_HELP)]
pub(crate) struct AsPgBouncer {
    /// Prints the version, which is also what SHOW VERSION says.
    #[arg(short = 'V', long, action = clap::ArgAction::Version)]
    version: Option<bool>,
    #[command(flatten)]
    pub pooler: Pooler,
}

macro_rules! examples {
    () => {
        "\
Start with the file you have:
  underpass pooler --check /etc/pgbouncer/pgbouncer.ini
  underpass pooler /etc/pgbouncer/pgbouncer.ini"
    };
}

macro_rules! pooler_examples {
    () => {
        "\
Examples:
  underpass pooler --check pgbouncer.ini               what is wrong with it?
  underpass pooler pgbouncer.ini                       in the foreground, as systemd wants it
  underpass pooler -d -u postgres pgbouncer.ini        in the background, started by root
  underpass pooler --overlay fast.ini pgbouncer.ini    with a second file for our own keys
  psql -p 6432 -U ADMIN pgbouncer -c 'SHOW POOLS'      the console"
    };
}

const TRACE_EXAMPLES: &str = "\
Examples:
  underpass trace --list                           what can be recorded, and how
  underpass trace                                  the only server here, until Ctrl-C
  underpass trace -p 5432 -o monday -d 3600        an hour of one server, into a new directory
  underpass trace -p 5432 --require-lossless       status 3 if a single byte is missing

Exit status:
  0  recorded
  1  could not start; standard error says why
  2  the command line is wrong
  3  something is missing, with --require-lossless";

macro_rules! signals {
    () => {
        "\
Signals:
  HUP         RELOAD: reads the configuration again and opens the log file again
  TERM        SHUTDOWN WAIT_FOR_CLIENTS; the second time, at once
  INT         SHUTDOWN WAIT_FOR_SERVERS; the second time, at once
  QUIT        at once
  USR1, USR2  PAUSE, RESUME"
    };
}

macro_rules! exit_status {
    () => {
        "\
Exit status:
  0  ended as asked, or --check found nothing that keeps it from starting
  1  could not start, or failed; standard error says why
  2  the command line is wrong (1 when called by the name pgbouncer)"
    };
}

const EXAMPLES: &str = examples!();
const LONG_HELP: &str = concat!(examples!(), "\n\n", exit_status!());
const POOLER_EXAMPLES: &str = pooler_examples!();
const POOLER_LONG_HELP: &str = concat!(pooler_examples!(), "\n\n", signals!(), "\n\n", exit_status!());

/// The whole command line, for documents.
pub(crate) fn command() -> clap::Command {
    Cli::command()
}
