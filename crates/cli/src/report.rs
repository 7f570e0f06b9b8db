// SPDX-License-Identifier: Apache-2.0
//! `underpass report`: what a recorded workload was, or what differs on mirrors.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Args;
use underpass_mirror::Snapshot;
use underpass_report::Analysis;
use underpass_trace::Reader;

/// `underpass report`.
#[derive(Debug, Args)]
pub(crate) struct Report {
    /// The trace: its directory, or one segment of it.
    #[arg(required_unless_present = "mirrors")]
    pub trace: Option<PathBuf>,
    /// What differs on mirrors, in the place of a trace: what the pooler serves at `/mirror_diff`; `-` reads it from standard input.
    #[arg(long, value_name = "FILE", conflicts_with = "trace")]
    pub mirrors: Option<PathBuf>,
    /// Where the page goes; `report.html` in the trace's directory, `mirrors.html` in this one, if not said. A page that is there is replaced.
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Prints the summary only, and writes no page.
    #[arg(long, conflicts_with = "output")]
    pub no_page: bool,
    /// How many statements are shown, those that took most time in all; of mirrors, in each table.
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub top: usize,
}

pub(crate) const HELP: &str = "\
Examples:
  underpass report monday                    the summary here, the page in monday/report.html
  underpass report monday -o /tmp/a.html     the page elsewhere
  underpass report monday --no-page --top 5  a short summary only
  curl -s http://127.0.0.1:9127/mirror_diff | underpass report --mirrors -

The page is one file that needs no network. Its first box says what the trace does not know: losses, sessions that
were joined in their middle, what was redacted or filtered.

--mirrors shows what mirrors answered otherwise than the primary: what failed there that worked here, what got slower by
how much, and what was not compared. It reads the JSON that a pooler with metrics_listen serves at /mirror_diff.";

/// Prints the summary and writes the page.
pub(crate) fn run(arguments: &Report) -> anyhow::Result<ExitCode> {
    let (summary, page, path) = match (&arguments.mirrors, &arguments.trace) {
        (Some(source), _) => {
            let snapshot = snapshot(source)?;
            let page =
                (!arguments.no_page).then(|| underpass_report::mirrors::page(&snapshot, arguments.top));
            (underpass_report::mirrors::text(&snapshot, arguments.top), page, "mirrors.html".into())
        }
        (None, trace) => {
            let trace = trace.as_deref().context("no trace was named")?;
            let analysis = Analysis::of(&mut Reader::open(trace)?)?;
            let page = || underpass_report::page(&analysis, arguments.top, &[]);
            let page = (!arguments.no_page).then(page).transpose()?;
            (underpass_report::text(&analysis, arguments.top), page, beside(trace))
        }
    };
    crate::print(summary.as_bytes())?;
    if let Some(page) = page {
        let path = arguments.output.clone().unwrap_or(path);
        write(&path, page.as_bytes()).with_context(|| format!("cannot write {}", path.display()))?;
        crate::export::tell(&format!("page: {}", path.display()));
    }
    Ok(ExitCode::SUCCESS)
}

fn snapshot(source: &Path) -> anyhow::Result<Snapshot> {
    let mut json = String::new();
    if source == Path::new("-") {
        std::io::stdin().read_to_string(&mut json).context("cannot read standard input")?;
    } else {
        json =
            std::fs::read_to_string(source).with_context(|| format!("cannot read {}", source.display()))?;
    }
    serde_json::from_str(&json).with_context(|| {
        format!("{} is not what a pooler of this version serves at /mirror_diff", source.display())
    })
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
