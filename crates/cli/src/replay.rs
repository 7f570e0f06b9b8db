// SPDX-License-Identifier: Apache-2.0
//! `underpass replay`: plays a trace against another server.

use std::collections::BTreeMap;
use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use tokio::signal::unix::{Signal, SignalKind, signal};
use underpass_replay::plan::{self, Filter, Plan, Rows};
use underpass_replay::preflight::{self, Preflight};
use underpass_replay::report::Report;
use underpass_replay::run::{self, Options, Pace, Played, Progress, Stopper};
use underpass_replay::{Error, Identities, Target};
use underpass_trace::{Level, Protocol};

/// How often the progress bar moves.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// How many statements of the trace a page shows; what `underpass report` does if it is not told.
const PAGE_STATEMENTS: usize = 20;

/// `underpass replay`.
#[derive(Debug, Args)]
pub(crate) struct Replay {
    /// The trace: a directory that `underpass trace` made, or one segment of it.
    pub trace: PathBuf,
    /// Where to play it: a libpq connection string, postgres://user@host:port/db or "host=... user=..."; for a trace of MariaDB or MySQL,
    /// mysql://user@host:port/db.
    ///
    /// The password is better given in PGPASSWORD (MYSQL_PWD): other users of this machine can see command lines.
    #[arg(long, value_name = "DSN")]
    pub to: String,
    /// Plays the trace on this server first and compares --to with it instead of the capture.
    #[arg(long, value_name = "DSN")]
    pub baseline: Option<String>,
    /// When statements are sent.
    #[arg(long, value_enum, default_value_t = PaceArg::Timed)]
    pub pace: PaceArg,
    /// So many times faster than at capture; 0.5 is half as fast.
    #[arg(long, default_value_t = 1.0, value_parser = speed)]
    pub speed: f64,
    /// What sessions wait for besides their own answers.
    #[arg(long, value_enum, default_value_t = Order::None)]
    pub order: Order,
    /// With --order commit: when nothing commits for so many seconds, what waits for commits is sent all the same, and counted.
    /// With a --speed below 1 they are the trace's seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, value_parser = seconds)]
    pub order_stuck: f64,
    /// Plays only what reads: writes are left out, and the server is told to refuse what is overlooked.
    #[arg(long)]
    pub read_only: bool,
    /// What of the rows is compared. More than their number needs a trace of level full, or --baseline.
    #[arg(long, value_enum, default_value_t = RowsArg::Count)]
    pub rows: RowsArg,
    /// Only sessions of this database; can be given several times, as the other filters.
    #[arg(long, value_name = "NAME", help_heading = "Filters")]
    pub database: Vec<String>,
    /// Only sessions of this user.
    #[arg(long, value_name = "NAME", help_heading = "Filters")]
    pub user: Vec<String>,
    /// Only sessions that began with this application_name.
    #[arg(long, value_name = "NAME", help_heading = "Filters")]
    pub application_name: Vec<String>,
    /// Only this session, by its number in the trace.
    #[arg(long, value_name = "NUMBER", help_heading = "Filters")]
    pub session: Vec<u64>,
    /// Only statements with this fingerprint; transaction control and SET are kept.
    #[arg(long, value_name = "HEX", help_heading = "Filters")]
    pub fingerprint: Vec<String>,
    /// Only what was sent so many seconds after the beginning of the trace, or later.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, help_heading = "Filters")]
    pub from: Option<f64>,
    /// Only what was sent before so many seconds after the beginning of the trace.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, help_heading = "Filters")]
    pub until: Option<f64>,
    /// Passwords of users of the target, one `"user" "password"` a line (PgBouncer's auth_file). Others are reached through
    /// the user of --to, which must be a superuser, and SET SESSION AUTHORIZATION; of MariaDB and MySQL they are not.
    #[arg(long, value_name = "FILE", help_heading = "Users and databases")]
    pub credentials: Option<PathBuf>,
    /// All sessions run as the user of --to.
    #[arg(long, conflicts_with = "credentials", help_heading = "Users and databases")]
    pub one_user: bool,
    /// A captured user has another name there.
    #[arg(long, value_name = "OLD=NEW", value_parser = pair, help_heading = "Users and databases")]
    pub map_user: Vec<(String, String)>,
    /// A captured database has another name there.
    #[arg(long, value_name = "OLD=NEW", value_parser = pair, help_heading = "Users and databases")]
    pub map_database: Vec<(String, String)>,
    /// Looks at the trace and the target, says what would be played, and sends nothing of it.
    #[arg(long)]
    pub dry_run: bool,
    /// Plays although the target does not fit: the captured server itself, too few connections, missing databases, users or relations.
    #[arg(long)]
    pub force: bool,
    /// Writes the report as JSON, too; `-` for standard output instead of the text.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Writes a page, too, with the report of the trace and that of its replay: one HTML file that needs no network.
    #[arg(long, value_name = "FILE")]
    pub page: Option<PathBuf>,
    /// Exits with 3 if anything came out differently, or was not compared because the replay was stopped, the server of --baseline went away,
    /// or nothing is known that could be.
    #[arg(long)]
    pub require_equal: bool,
    /// Shows no progress.
    #[arg(short, long)]
    pub quiet: bool,
}

/// When statements are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PaceArg {
    /// At their time in the trace; late if the session still waits for an answer.
    Timed,
    /// With the pauses that the clients made: a faster server gets more load.
    Think,
    /// At once.
    Asap,
}

/// What sessions wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Order {
    /// Nothing: transactions may interleave otherwise than at capture.
    None,
    /// The commits that came before at capture: updates of the same rows come in the order of the trace. What overlapped may still
    /// come out otherwise (docs/replay.md, "Order").
    Commit,
}

/// What of rows is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RowsArg {
    /// Their number.
    Count,
    /// Their contents in order.
    Ordered,
    /// Their contents in any order.
    Unordered,
}

pub(crate) const EXAMPLES: &str = "\
Examples:
  underpass replay monday --to postgres://postgres@test:5432/ --dry-run
  underpass replay monday --to postgres://postgres@test:5432/                     as it was
  underpass replay monday --to ... --order commit --pace asap --require-equal    updates of a row in the order of the trace
  underpass replay monday --to ... --baseline postgres://postgres@old/           two servers compared
  underpass replay monday --to ... --read-only --speed 2                         on a standby, twice as fast

The first Ctrl-C (or SIGTERM) sends nothing more, waits for what is under way and reports; the second stops at once.";

fn speed(text: &str) -> Result<f64, String> {
    let speed: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if speed.is_finite() && (0.001..=1000.0).contains(&speed) {
        Ok(speed)
    } else {
        Err("a number from 0.001 to 1000".into())
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.0..=1e9).contains(&seconds) { Ok(seconds) } else { Err("seconds, from 0".into()) }
}

fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((old, new)) if !old.is_empty() && !new.is_empty() => Ok((old.to_owned(), new.to_owned())),
        _ => Err("OLD=NEW".into()),
    }
}

impl Replay {
    fn filter(&self) -> Filter {
        let set = |names: &[String]| names.iter().cloned().collect();
        Filter {
            databases: set(&self.database),
            users: set(&self.user),
            application_names: set(&self.application_name),
            sessions: self.session.iter().copied().collect(),
            fingerprints: self.fingerprint.iter().map(|hex| hex.to_ascii_lowercase()).collect(),
            from: self.from.map(Duration::from_secs_f64),
            to: self.until.map(Duration::from_secs_f64),
        }
    }

    fn rows(&self) -> Rows {
        match self.rows {
            RowsArg::Count => Rows::Count,
            RowsArg::Ordered => Rows::Ordered,
            RowsArg::Unordered => Rows::Unordered,
        }
    }

    fn options(&self) -> Options {
        Options {
            pace: match self.pace {
                PaceArg::Timed => Pace::Timed,
                PaceArg::Think => Pace::Think,
                PaceArg::Asap => Pace::Asap,
            },
            speed: self.speed,
            order_commit: self.order == Order::Commit,
            order_stuck: Duration::from_secs_f64(self.order_stuck),
            read_only: self.read_only,
            rows: self.rows(),
        }
    }

    fn databases(&self) -> BTreeMap<String, String> {
        self.map_database.iter().cloned().collect()
    }

    fn identities(&self) -> Result<Identities, Error> {
        let mut identities = Identities {
            users: self.map_user.iter().cloned().collect(),
            databases: self.databases(),
            one_user: self.one_user,
            ..Identities::default()
        };
        if let Some(path) = &self.credentials {
            identities.load_passwords(path)?;
        }
        Ok(identities)
    }
}

/// Runs the command.
pub(crate) fn run(replay: &Replay) -> anyhow::Result<ExitCode> {
    let identities = replay.identities()?;
    let target = Target::new(&replay.to, identities.clone())?;
    let baseline = replay.baseline.as_ref().map(|dsn| Target::new(dsn, identities)).transpose()?;
    let options = plan::Options {
        filter: replay.filter(),
        read_only: replay.read_only,
        rows: replay.rows(),
        databases: replay.databases(),
    };
    let plan = plan::read(&replay.trace, &options)
        .with_context(|| format!("cannot read the trace {}", replay.trace.display()))?;
    let has_rows = plan.meta.level == Level::Full
        && plan.meta.protocol == Protocol::Postgres
        && !plan.meta.redaction.literals;
    ensure!(
        replay.rows == RowsArg::Count || baseline.is_some() || has_rows,
        "the trace does not have the rows of results, which --rows would compare: only unmasked ones of PostgreSQL that were recorded \
         with --level full have; compare with another server (--baseline), or the numbers of rows (--rows count)"
    );
    if plan.units() == 0 {
        let omitted: Vec<String> = plan
            .omitted
            .sessions
            .iter()
            .map(|(reason, count)| format!("{count} sessions: {}", reason.text()))
            .chain(
                plan.omitted.units.iter().map(|(reason, count)| format!("{count} units: {}", reason.text())),
            )
            .collect();
        let why = if omitted.is_empty() { "it holds no statements".to_owned() } else { omitted.join("; ") };
        return Err(Error::Nothing(why).into());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(play(replay, plan, target, baseline))
}

async fn play(
    replay: &Replay,
    mut plan: Plan,
    target: Target,
    baseline: Option<Target>,
) -> anyhow::Result<ExitCode> {
    let mut looked = preflight::check(&mut plan, &target).await?;
    let mut problems = Vec::new();
    if let Some(baseline) = &baseline {
        let other = preflight::check(&mut plan, baseline).await?;
        looked.note_extensions(&other, &baseline.name());
        problems.extend(other.problems.into_iter().map(|problem| format!("{}: {problem}", baseline.name())));
    }
    problems.splice(0..0, looked.problems.iter().cloned());
    if replay.dry_run {
        print(&dry_run(&plan, &target, &looked, &problems))?;
        return Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    if !problems.is_empty() && !replay.force {
        return Err(Error::Unfit(problems).into());
    }
    let plan = Arc::new(plan);
    let stopper = Stopper::default();
    let mut terminate = signal(SignalKind::terminate()).context("catching signals")?;
    let signals = tokio::spawn({
        let stopper = stopper.clone();
        async move {
            while asked_to_stop(&mut terminate).await.is_ok() {
                eprintln!("underpass: finishing what is under way; Ctrl-C again stops at once");
                stopper.stop();
            }
        }
    });
    let there = match &baseline {
        Some(baseline) => Some((baseline.name(), play_one(replay, &plan, baseline, &stopper).await?)),
        None => None,
    };
    let played = play_one(replay, &plan, &target, &stopper).await?;
    signals.abort();
    let there = there.as_ref().map(|(name, played)| (name.as_str(), played));
    let report = Report::new(&plan, target.name(), &replay.options(), looked, &played, there);
    let json = || serde_json::to_string_pretty(&report).context("the report as JSON");
    match &replay.json {
        Some(path) if path.as_os_str() == "-" => print(&(json()? + "\n"))?,
        Some(path) => {
            print(&report.text())?;
            crate::report::write(path, (json()? + "\n").as_bytes())
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        None => print(&report.text())?,
    }
    if let Some(path) = &replay.page {
        page(&replay.trace, &report)
            .and_then(|page| Ok(crate::report::write(path, page.as_bytes())?))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(if replay.require_equal && !report.is_equal() { ExitCode::from(3) } else { ExitCode::SUCCESS })
}

/// Waits for Ctrl-C or SIGTERM.
async fn asked_to_stop(terminate: &mut Signal) -> std::io::Result<()> {
    tokio::select! {
        asked = tokio::signal::ctrl_c() => asked,
        _ = terminate.recv() => Ok(()),
    }
}

/// The page of the trace, with this replay in it.
fn page(trace: &Path, report: &Report) -> anyhow::Result<String> {
    let analysis = underpass_report::Analysis::of(&mut underpass_trace::Reader::open(trace)?)?;
    let sections = underpass_replay::page::sections(report);
    Ok(underpass_report::page(&analysis, PAGE_STATEMENTS, &sections)?)
}

async fn play_one(
    replay: &Replay,
    plan: &Arc<Plan>,
    target: &Target,
    stopper: &Stopper,
) -> anyhow::Result<Played> {
    let progress = Arc::new(Progress::default());
    let shown = (!replay.quiet && std::io::stderr().is_terminal()).then(|| {
        let (progress, units, name) = (Arc::clone(&progress), plan.units() as u64, target.name());
        tokio::spawn(async move { show(&progress, units, &name).await })
    });
    let played =
        run::play(Arc::clone(plan), target.clone(), replay.options(), Arc::clone(&progress), stopper).await;
    if let Some(shown) = shown {
        shown.abort();
        eprint!("\r\x1b[K");
    }
    Ok(played?)
}

async fn show(progress: &Progress, units: u64, name: &str) {
    let bar = ProgressBar::new(units);
    if let Ok(style) = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} {per_sec} {msg}") {
        bar.set_style(style);
    }
    bar.set_prefix(name.to_owned());
    loop {
        bar.set_position(progress.units.load(Ordering::Relaxed));
        bar.set_message(format!(
            "{} sessions, {} errors, trace at {:.0} s",
            progress.sessions.load(Ordering::Relaxed),
            progress.failed.load(Ordering::Relaxed),
            progress.trace_ns.load(Ordering::Relaxed) as f64 / 1e9
        ));
        tokio::time::sleep(PROGRESS_INTERVAL).await;
    }
}

fn dry_run(plan: &Plan, target: &Target, looked: &Preflight, problems: &[String]) -> String {
    let mut lines = vec![format!(
        "Would play {} units in {} sessions ({} at once at most), {:.1} s of trace, {} commits, on {} ({} {}).",
        plan.units(),
        plan.sessions.len(),
        plan.sessions_peak,
        (plan.end_ns - plan.origin_ns) as f64 / 1e9,
        plan.commits,
        target.name(),
        looked.product,
        looked.version
    )];
    lines.push(format!("The target parsed {} distinct statements.", looked.statements_checked));
    for (reason, count) in &plan.omitted.sessions {
        lines.push(format!("not played: {count} sessions: {}", reason.text()));
    }
    for (reason, count) in &plan.omitted.units {
        lines.push(format!("not played: {count} units: {}", reason.text()));
    }
    lines.extend(looked.notes.iter().map(|note| format!("note: {note}")));
    lines.extend(problems.iter().map(|problem| format!("does not fit: {problem}")));
    lines.join("\n") + "\n"
}

/// To standard output; a reader that has seen enough (`| head`) is no error.
fn print(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}
