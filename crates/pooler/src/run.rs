// SPDX-License-Identifier: Apache-2.0
//! Start and stop of the process; its main thread, which takes signals and keeps the periods of the statistics.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context as _;
use arc_swap::ArcSwap;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{EventfdFlags, PollFd, PollFlags, epoll, eventfd, poll};
use underpass_config::{Config, Finding, OsFiles, Severity};
use underpass_console::logline::Level;
use underpass_console::text;
use underpass_pool::Core;
use underpass_pool::prepared::Statements;

use crate::acceptors::Acceptors;
use crate::control::{self, Control};
use crate::deriver::Deriver;
use crate::gather::{self, Facts, Part, Periods};
use crate::kernel_rows;
use crate::lanes::Lanes;
use crate::mirrors::Mirrors;
use crate::peers::PeerQueues;
use crate::process::{self, Life, PidFile};
use crate::recording::{Anew, Recordings};
use crate::resolver::Resolver;
use crate::settings::{self, Settings};
use crate::shared::{Mailbox, Names, Shared, lock, phase};
use crate::worker::{Listener, Worker};
use crate::{descriptors, listeners, logging, metrics};

/// How the pooler is started.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// pgbouncer.ini, and files that are laid over it.
    pub config_paths: Vec<PathBuf>,
    /// `-d`
    pub daemonize: bool,
    /// `-v`, as often as given.
    pub verbose: u32,
    /// `-q`: nothing on standard error.
    pub quiet: bool,
    /// `-u`: the user to run as; overrides `user`.
    pub user: Option<String>,
}

/// What [`check`] found.
#[derive(Debug, Clone, Default)]
pub struct Checked {
    /// What would keep the pooler from starting, one line each.
    pub errors: Vec<String>,
    /// What works, but hardly as meant.
    pub warnings: Vec<String>,
}

/// Reads the configuration and everything it names, as a start would, and says what is wrong. Nothing is opened for writing, no socket
/// is touched.
#[must_use]
pub fn check(paths: &[PathBuf]) -> Checked {
    let as_paths: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
    let mut checked = Checked::default();
    let loaded = match Config::load(&as_paths) {
        Ok(loaded) => loaded,
        Err(errors) => {
            checked.errors = errors.0.iter().map(ToString::to_string).collect();
            return checked;
        }
    };
    let (errors, warnings) = findings(&loaded.config);
    checked.errors = errors;
    checked.warnings.extend(warnings);
    if checked.errors.is_empty() {
        match Settings::load_at_start(paths) {
            // Those of the files' syntax are among them.
            Ok((_, more)) => checked.warnings.extend(more),
            Err(error) => checked.errors.push(format!("{error:#}")),
        }
    }
    checked
}

/// Errors and warnings about the configuration.
fn findings(config: &Config) -> (Vec<String>, Vec<String>) {
    let found = underpass_config::check(config, &OsFiles);
    let (mut errors, mut warnings): (Vec<Finding>, Vec<Finding>) =
        found.into_iter().partition(|finding| finding.severity == Severity::Error);
    // PgBouncer starts with the users that it could read: see `Settings::load_at_start`.
    let is_read = |path: &PathBuf| std::fs::read(path).is_ok() || settings::is_missing(path);
    let is_tolerated = config.auth_file.as_ref().is_none_or(is_read);
    warnings.extend(errors.extract_if(.., |error| error.key == "auth_file" && is_tolerated).map(
        |mut finding| {
            finding.severity = Severity::Warning;
            finding
        },
    ));
    let texts = |all: Vec<Finding>| all.iter().map(ToString::to_string).collect();
    (texts(errors), texts(warnings))
}

/// Runs the pooler until a signal or SHUTDOWN ends it.
///
/// # Errors
/// What keeps it from starting, one line each, with a next step; the log has it too, if it could be opened.
pub fn run(options: &Options) -> anyhow::Result<()> {
    logging::start(options.verbose, options.quiet);
    start(options).inspect_err(|error| logging::fatal(&format!("{error:#}")))
}

fn start(options: &Options) -> anyhow::Result<()> {
    let background = process::is_background();
    if background {
        process::detach();
    }
    // All findings before the first file that fails: a start with several faults names them all.
    let as_paths: Vec<&Path> = options.config_paths.iter().map(PathBuf::as_path).collect();
    let (errors, doubts) = findings(&Config::load(&as_paths)?.config);
    anyhow::ensure!(errors.is_empty(), "{}", errors.join("\n"));
    let (mut settings, mut warnings) = Settings::load_at_start(&options.config_paths)?;
    if !settings.config.is_set("verbose") {
        // From here on `-v` is the key's value: SET changes it, and a RELOAD without the key leaves it.
        settings.config.verbose = options.verbose;
    }
    warnings.extend(doubts);
    let config = &settings.config;
    let user = process::service_user(config, options.user.as_deref())?;
    if options.daemonize && !background {
        return process::start_in_background(config);
    }
    // Before the first thread: all inherit the mask, and signals come to the main thread alone. One that comes during the start waits.
    let signals = Signals::take()?;
    let pidfile = config.pidfile.as_deref().filter(|path| !path.as_os_str().is_empty());
    // With `so_reuseport` clients of the process that runs would connect to this one as soon as it listens, and be reset when it gives up.
    pidfile.map(PidFile::refuse_second).transpose()?;
    // What root may do better comes first; then the process is the user's, and so is every file it makes.
    descriptors::raise_limit(&settings);
    let mut open = listeners::inherited(config)?;
    let is_activated = !open.is_empty();
    if !is_activated {
        open = listeners::tcp(config)?;
    }
    let metrics = config.underpass.metrics_listen.map(metrics::listen).transpose()?;
    // With the privileges of the start: programs and maps are made here and only used later.
    let lanes = Lanes::open(config)?.map(Arc::new);
    if let Some(user) = &user {
        process::become_user(user)?;
        process::warn_of_unreadable(config, &options.config_paths, user);
    }
    process::restrict(lanes.as_deref())?;
    logging::configure(config)?;
    let pidfile = pidfile.map(PidFile::create).transpose()?;
    let mut socket_file = None;
    if !is_activated && let Some((listener, file)) = listeners::unix(config)? {
        open.push(listener);
        socket_file = file;
    }
    anyhow::ensure!(!open.is_empty(), "nowhere to listen: set listen_addr or unix_socket_dir");
    for warning in warnings {
        log::warn!("{warning}");
    }
    let socket_file = Arc::new(Mutex::new(socket_file));
    let listening = Listening { open, metrics };
    let outcome = serve(settings, lanes, Control::new(socket_file.clone()), listening, &signals, background);
    drop((lock(&socket_file).take(), pidfile));
    outcome
}

/// Every socket that takes connections.
struct Listening {
    open: Vec<Listener>,
    metrics: Option<std::net::TcpListener>,
}

fn serve(
    settings: Settings,
    lanes: Option<Arc<Lanes>>,
    control: Control,
    Listening { open, metrics }: Listening,
    signals: &Signals,
    background: bool,
) -> anyhow::Result<()> {
    let threads = settings.config.underpass.threads.filter(|&threads| threads > 0).map_or_else(
        || std::thread::available_parallelism().map_or(1, |cores| cores.get()),
        |threads| threads as usize,
    );
    let shared = share(settings, lanes, control, threads)?;
    if let Some(lanes) = &shared.lanes {
        lanes.start_finder(Arc::downgrade(&shared)).context("cannot start a thread")?;
    }
    shared.mirrors.configure(&shared.settings.load().config);
    shared.recordings.configure(&shared.settings.load().config, Anew::None);
    for database in shared.settings.load().config.databases.named.values() {
        shared.database_state(database.clone(), false);
    }
    if let Some(listener) = metrics {
        let address = listener.local_addr()?;
        metrics::start(listener, shared.clone()).context("cannot start a thread")?;
        log::info!("metrics on http://{address}/metrics");
    }
    let mut workers = Workers {
        threads: Vec::new(),
        ended: Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?),
    };
    for index in 0..threads {
        workers.start(Worker::new(index as u16, shared.clone(), open.clone()))?;
    }
    // Workers hold them: a shutdown that closes its listeners closes them for good.
    drop(open);
    logging::phrase(None, &text::process_up(crate::VERSION, &format!("threads={threads}")));
    process::notify(Life::Ready);
    if background {
        process::background_ready()?;
    }
    main_loop(&shared, signals, &workers)?;
    process::notify(Life::Stopping);
    shared.broadcast(|worker| worker.stopping = true);
    let outcome = workers.join();
    shared.recordings.finish();
    if let Some(summary) = kernel_rows::summary(&shared) {
        log::info!("{summary}");
    }
    outcome
}

fn share(
    settings: Settings,
    lanes: Option<Arc<Lanes>>,
    control: Control,
    threads: usize,
) -> anyhow::Result<Arc<Shared>> {
    let mut mailboxes = Vec::with_capacity(threads);
    for _ in 0..threads {
        mailboxes.push(Mailbox::new(epoll::create(epoll::CreateFlags::CLOEXEC)?)?);
    }
    Ok(Arc::new(Shared {
        core: Mutex::new(Core::default()),
        statements: Statements::default(),
        parameters: Mutex::default(),
        names: std::sync::RwLock::new(Names::default()),
        logins: mailboxes.iter().map(|_| AtomicU32::new(u32::MAX)).collect(),
        mailboxes,
        cancel_keys: Mutex::default(),
        cancel_keys_unknown: Default::default(),
        broadcasts: Mutex::default(),
        acceptors: Acceptors::new(threads),
        client_errors: Default::default(),
        clients: AtomicU32::new(0),
        next_socket: AtomicU32::new(0),
        phase: AtomicU8::new(phase::RUNNING),
        paused: AtomicBool::new(false),
        epoch: AtomicU64::new(0),
        peers: PeerQueues::default(),
        resolver: Resolver::start(),
        deriver: Deriver::start(threads as u16)?,
        control,
        lanes,
        user_xacts: std::iter::repeat_with(Default::default).take(threads).collect(),
        mirrors: Mirrors::default(),
        recordings: Recordings::default(),
        started: Instant::now(),
        started_wall: SystemTime::now(),
        periods: Mutex::new(Periods::new(logging::now())),
        settings: ArcSwap::from_pointee(settings),
    }))
}

/// The worker threads, and the bell that each rings when it ends, in whatever way.
struct Workers {
    threads: Vec<JoinHandle<anyhow::Result<()>>>,
    ended: Arc<OwnedFd>,
}

/// Rings when dropped, so also when the thread panics.
struct Ring(Arc<OwnedFd>);

impl Drop for Ring {
    fn drop(&mut self) {
        // It only fails when the counter is full, and then the bell has been heard.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }
}

impl Workers {
    fn start(&mut self, worker: Worker) -> anyhow::Result<()> {
        let ring = Ring(self.ended.clone());
        let thread = std::thread::Builder::new().name(format!("worker {}", worker.index));
        let thread = thread.spawn(move || {
            let _ring = ring;
            worker.run()
        });
        self.threads.push(thread.context("cannot start a thread")?);
        Ok(())
    }

    fn join(self) -> anyhow::Result<()> {
        let mut outcome = Ok(());
        for thread in self.threads {
            match thread.join() {
                Ok(result) => outcome = outcome.and(result),
                Err(_) => outcome = outcome.and(Err(anyhow::anyhow!("a worker thread panicked"))),
            }
        }
        outcome
    }
}

/// The signals the pooler obeys, as a descriptor.
struct Signals(SignalFd);

impl Signals {
    fn take() -> anyhow::Result<Self> {
        let mut mask = SigSet::empty();
        for signal in [
            Signal::SIGHUP,
            Signal::SIGINT,
            Signal::SIGTERM,
            Signal::SIGQUIT,
            Signal::SIGUSR1,
            Signal::SIGUSR2,
        ] {
            mask.add(signal);
        }
        mask.thread_block()?;
        Ok(Self(SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?))
    }

    /// The next one that has come.
    fn next(&self) -> Option<Signal> {
        let signal = self.0.read_signal().ok().flatten()?;
        Signal::try_from(signal.ssi_signo as i32).ok()
    }
}

/// Signals and periods, until a worker has ended or a signal asks for the end.
fn main_loop(shared: &Arc<Shared>, signals: &Signals, workers: &Workers) -> anyhow::Result<()> {
    let period = || shared.settings.load().config.stats_period.max(Duration::from_secs(1));
    let mut period_began = Instant::now();
    let mut lanes_before = kernel_rows::Periodic::default();
    loop {
        // A RELOAD that changes the period takes effect at the end of the present one.
        let left = (period_began + period()).saturating_duration_since(Instant::now());
        let timeout =
            rustix::time::Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        let mut events = [
            PollFd::from_borrowed_fd(signals.0.as_fd(), PollFlags::IN),
            PollFd::new(&*workers.ended, PollFlags::IN),
        ];
        match poll(&mut events, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if !events[1].revents().is_empty() {
            return Ok(());
        }
        while let Some(signal) = signals.next() {
            if obey(shared, signal) {
                return Ok(());
            }
        }
        if period_began.elapsed() >= period() {
            period_began = Instant::now();
            end_period(shared, &mut lanes_before);
        }
    }
}

/// Acts on a signal; true when the process is to end.
fn obey(shared: &Arc<Shared>, signal: Signal) -> bool {
    let reloads = signal == Signal::SIGHUP;
    if reloads {
        process::notify(Life::Reloading);
    }
    let ends = control::signal(shared, signal);
    if reloads {
        process::notify(Life::Ready);
    }
    ends
}

/// A `stats_period` is over: snapshots for the averages, the line of `log_stats`, the status that systemd shows.
fn end_period(shared: &Arc<Shared>, lanes_before: &mut kernel_rows::Periodic) {
    let Some(parts) = gather::wait(shared, Duration::from_secs(2), Part::of) else { return };
    let facts = Facts::merge(shared, &parts, Instant::now());
    let averages = lock(&shared.periods).roll(&facts, logging::now());
    if shared.settings.load().config.log_stats {
        logging::write(Level::Log, None, Some("stats"), &averages.log_line());
        if let Some(line) = lanes_before.line(shared) {
            logging::write(Level::Log, None, Some("stats"), &line);
        }
    }
    let status = averages.status_line();
    process::notify(Life::Status(status.strip_prefix("STATUS=").unwrap_or(&status)));
}
