// SPDX-License-Identifier: Apache-2.0
//! `underpass report`: what a recorded workload was.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Args;
use underpass_report::Analysis;
use underpass_trace::Reader;

/// `underpass report`.
#[derive(Debug, Args)]
pub(crate) struct Report {
    /// The trace: its directory, or one segment of it.
    pub trace: PathBuf,
    /// Where the page goes; `report.html` in the trace's directory if not said. A page that is there is replaced.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Prints the summary only, and writes no page.
    #[arg(long, conflicts_with = "output")]
    pub no_page: bool,
    /// How many statements are shown, those that took most time in all.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub top: usize,
}

pub(crate) const HELP: &str = "\
Examples:
  underpass report monday                    the summary here, the page in monday/report.html
  underpass report monday -o /tmp/a.html     the page elsewhere
  underpass report monday --no-page --top 5  a short summary only

The page is one file that needs no network. Its first box says what the trace does not know: losses, sessions that
were joined in their middle, what was redacted or filtered.";

/// Prints the summary and writes the page.
pub(crate) fn run(arguments: &Report) -> anyhow::Result<ExitCode> {
    let mut reader = Reader::open(&arguments.trace)?;
    let analysis = Analysis::of(&mut reader)?;
    crate::print(underpass_report::text(&analysis, arguments.top).as_bytes())?;
    if arguments.no_page {
        return Ok(ExitCode::SUCCESS);
    }
    let path = arguments.output.clone().unwrap_or_else(|| beside(&arguments.trace));
    let page = underpass_report::page(&analysis, arguments.top, &[])?;
    write(&path, page.as_bytes()).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("page: {}", path.display());
    Ok(ExitCode::SUCCESS)
}

fn beside(trace: &Path) -> PathBuf {
    let folder = if trace.is_dir() { Some(trace) } else { trace.parent() };
    folder.unwrap_or(Path::new("")).join("report.html")
}

/// The page holds texts of statements: it is the owner's, as the trace is.
pub(crate) fn write(path: &Path, page: &[u8]) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let mut options = std::fs::File::options();
    options.write(true).create(true).truncate(true).mode(0o600).open(path)?.write_all(page)
}
