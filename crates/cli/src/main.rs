// SPDX-License-Identifier: Apache-2.0
//! The `underpass` binary. Called by the name `pgbouncer` it is `underpass pooler`, so that a link replaces PgBouncer.
#![forbid(unsafe_code)]

mod args;
mod check;
mod export;
mod replay;
mod report;
mod trace;

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser as _;

use args::{AsPgBouncer, Cli, Command, Pooler};

fn main() -> ExitCode {
    let name = std::env::args_os().next().unwrap_or_default();
    let is_pgbouncer = Path::new(&name).file_name().is_some_and(|name| name == "pgbouncer");
    let command = if is_pgbouncer {
        match AsPgBouncer::try_parse() {
            Ok(parsed) => Command::Pooler(parsed.pooler),
            Err(error) => {
                let _ = error.print();
                // PgBouncer's status for a wrong command line is 1, too. Help and version are no errors.
                return if error.use_stderr() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
            }
        }
    } else {
        Cli::parse().command
    };
    let result = match command {
        Command::Pooler(pooler) => run(pooler),
        Command::Check => Ok(check::run()),
        Command::Report(report) => report::run(&report),
        Command::Export(arguments) => export::export(&arguments),
        Command::Import(arguments) => export::import(&arguments),
        Command::Trace(arguments) => trace::run(&arguments),
        Command::Replay(options) => replay::run(&options),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut args::command(), "underpass", &mut script);
            print(&script)
        }
        Command::Man => manual().and_then(|page| print(&page)),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            told(&error).lines().for_each(|line| eprintln!("underpass: {line}"));
            ExitCode::FAILURE
        }
    }
}

fn run(pooler: Pooler) -> anyhow::Result<ExitCode> {
    anyhow::ensure!(
        !pooler.reboot,
        "-R does not exist here: start another pooler on the same port (both with so_reuseport = 1), then end the old one by SIGTERM, \
         which lets its clients finish"
    );
    let mut config_paths: Vec<_> = pooler.file.into_iter().collect();
    config_paths.extend(pooler.overlay);
    if pooler.check {
        return Ok(check(&config_paths));
    }
    underpass_pooler::run(&underpass_pooler::Options {
        config_paths,
        daemonize: pooler.daemon,
        verbose: pooler.verbose.into(),
        quiet: pooler.quiet,
        user: pooler.user,
    })?;
    Ok(ExitCode::SUCCESS)
}

fn check(config_paths: &[std::path::PathBuf]) -> ExitCode {
    let checked = underpass_pooler::check(config_paths);
    for line in checked.errors.iter().chain(&checked.warnings) {
        eprintln!("{line}");
    }
    let count = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let (errors, warnings) = (checked.errors.len(), checked.warnings.len());
    println!("{}, {}", count(errors, "error"), count(warnings, "warning"));
    if errors == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// One page for the program and its commands.
fn manual() -> anyhow::Result<Vec<u8>> {
    let mut page = Vec::new();
    let command = args::command();
    clap_mangen::Man::new(command.clone()).render(&mut page)?;
    for part in command.get_subcommands().filter(|part| part.get_opts().any(|option| !option.is_global_set()))
    {
        let name = format!("underpass {}", part.get_name());
        writeln!(page, ".SH {}", name.to_uppercase())?;
        let part = clap_mangen::Man::new(part.clone().bin_name(name));
        part.render_description_section(&mut page)?;
        part.render_synopsis_section(&mut page)?;
        part.render_options_section(&mut page)?;
        part.render_extra_section(&mut page)?;
    }
    Ok(page)
}

/// An error with its causes. Some tell their cause themselves, which then is not told again.
fn told(error: &anyhow::Error) -> String {
    error
        .chain()
        .map(ToString::to_string)
        .reduce(|told, cause| if told.contains(&cause) { told } else { format!("{told}: {cause}") })
        .unwrap_or_default()
}

/// To standard output; a reader that has seen enough (`| head`) is no error.
fn print(text: &[u8]) -> anyhow::Result<ExitCode> {
    match std::io::stdout().write_all(text) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(ExitCode::SUCCESS),
    }
}
