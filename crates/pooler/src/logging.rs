// SPDX-License-Identifier: Apache-2.0
//! The log: standard error, `logfile` and syslog, in PgBouncer's lines or as JSON.
//!
//! Everything ends in [`write`]. Lines about a connection go there with the connection as a value ([`log_socket!`]), so that JSON has
//! it in fields; `log::info!` and its like serve for all else. A line is one write(2) to a file opened for appending: lines of threads
//! never mix, and a rotated file is complete.

use std::cell::RefCell;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock};
use std::time::SystemTime;

use anyhow::Context as _;
use arc_swap::ArcSwap;
use syslog::{Facility, LogFormat, Logger, LoggerBackend, Severity};
use underpass_config::{Config, LogFormat as LineFormat};
use underpass_console::logline::{Level, Record, SocketLabel};
use underpass_console::text::Phrase;
use underpass_console::{Timestamp, Zone};

use crate::shared::lock;

/// Where lines go.
#[derive(Default)]
struct Outputs {
    file: Option<File>,
    syslog: Option<Syslog>,
    json: bool,
}

static OUTPUTS: LazyLock<ArcSwap<Outputs>> = LazyLock::new(ArcSwap::default);
/// Whether standard error gets lines: not with `-q`, nor in the background.
static STDERR: AtomicBool = AtomicBool::new(false);

/// Lines written before it is known where lines go and in what format: kept for [`configure`].
static EARLY: Mutex<Vec<EarlyLine>> = Mutex::new(Vec::new());
static IS_EARLY: AtomicBool = AtomicBool::new(false);

struct EarlyLine {
    time: Timestamp,
    level: Level,
    event: Option<String>,
    message: String,
}

/// Begins to log: to memory until [`configure`] is called. Call it first, once.
pub(crate) fn start(verbose: u32, quiet: bool) {
    IS_EARLY.store(true, Ordering::Relaxed);
    STDERR.store(!quiet, Ordering::Relaxed);
    log::set_max_level(filter(verbose));
    // A second run in one process (tests) finds its logger in place.
    let _ = log::set_logger(&Facade);
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let message = format!("bug: thread {} panicked: {panic}", thread.name().unwrap_or("main"));
        write(Level::Fatal, None, Some("panic"), &message);
    }));
}

/// Writes the lines that were kept; from now on lines are written at once.
fn release_early() {
    if IS_EARLY.swap(false, Ordering::Relaxed) {
        for line in std::mem::take(&mut *lock(&EARLY)) {
            let EarlyLine { time, level, event, message } = line;
            put(&Record {
                time,
                pid: std::process::id(),
                level,
                socket: None,
                event: event.as_deref(),
                message: &message,
            });
        }
    }
}

/// The start has failed with this message. Standard error gets it from the caller, who knows the reader.
pub(crate) fn fatal(message: &str) {
    release_early();
    leave_stderr();
    message.lines().for_each(|line| write(Level::Fatal, None, Some("fatal"), line));
}

/// Lines stop going to standard error: the process is in the background now.
pub(crate) fn leave_stderr() {
    STDERR.store(false, Ordering::Relaxed);
}

/// Opens what `config` names and closes what was open: at start, RELOAD and SIGHUP, so that files can be rotated by renaming.
///
/// # Errors
/// The log file cannot be opened, or syslog is not there. What was open stays open then.
pub(crate) fn configure(config: &Config) -> anyhow::Result<()> {
    let file = match config.logfile.as_deref().filter(|path| !path.as_os_str().is_empty()) {
        Some(path) => Some(open(path)?),
        None => None,
    };
    let syslog = match config.syslog {
        true => Some(Syslog::open(&config.syslog_ident, &config.syslog_facility)?),
        false => None,
    };
    OUTPUTS.store(Arc::new(Outputs { file, syslog, json: config.underpass.log_format == LineFormat::Json }));
    log::set_max_level(filter(config.verbose));
    release_early();
    Ok(())
}

fn open(path: &Path) -> anyhow::Result<File> {
    File::options()
        .append(true)
        .create(true)
        .mode(0o640)
        // A background process has no terminal, and must not get one by opening it.
        .custom_flags(nix::libc::O_NOCTTY)
        .open(path)
        .with_context(|| format!("logfile: cannot open {}; check path and permissions", path.display()))
}

const fn filter(verbose: u32) -> log::LevelFilter {
    match verbose {
        0 => log::LevelFilter::Info,
        1 => log::LevelFilter::Debug,
        _ => log::LevelFilter::Trace,
    }
}

const fn level_of(level: log::Level) -> Level {
    match level {
        log::Level::Error => Level::Error,
        log::Level::Warn => Level::Warning,
        log::Level::Info => Level::Log,
        log::Level::Debug => Level::Debug,
        log::Level::Trace => Level::Noise,
    }
}

/// Whether lines of this level are written; ask before making an expensive one.
pub(crate) fn enabled(level: Level) -> bool {
    let least = match log::max_level() {
        log::LevelFilter::Off => return false,
        log::LevelFilter::Error => Level::Error,
        log::LevelFilter::Warn => Level::Warning,
        log::LevelFilter::Info => Level::Log,
        log::LevelFilter::Debug => Level::Debug,
        log::LevelFilter::Trace => Level::Noise,
    };
    level <= least
}

/// Writes a line about the connection `socket`: level, connection, name of the event (for JSON), then as `format!`.
macro_rules! log_socket {
    ($level:ident, $socket:expr, $event:expr, $($message:tt)+) => {
        if $crate::logging::enabled(underpass_console::logline::Level::$level) {
            $crate::logging::write(
                underpass_console::logline::Level::$level,
                Some($socket),
                Some($event),
                &format!($($message)+),
            );
        }
    };
}
pub(crate) use log_socket;

/// Writes one of the console crate's phrases.
pub(crate) fn phrase(socket: Option<SocketLabel<'_>>, phrase: &Phrase) {
    write(phrase.level, socket, Some(phrase.event), &phrase.text);
}

/// Writes a line, if its level is wanted.
pub(crate) fn write(level: Level, socket: Option<SocketLabel<'_>>, event: Option<&str>, message: &str) {
    if !enabled(level) {
        return;
    }
    let time = now();
    // There are no connections that early.
    if IS_EARLY.load(Ordering::Relaxed) {
        let (event, message) = (event.map(str::to_owned), message.to_owned());
        return lock(&EARLY).push(EarlyLine { time, level, event, message });
    }
    put(&Record { time, pid: std::process::id(), level, socket, event, message });
}

fn put(record: &Record<'_>) {
    thread_local! {
        static LINE: RefCell<String> = const { RefCell::new(String::new()) };
    }
    let outputs = OUTPUTS.load();
    let stderr = STDERR.load(Ordering::Relaxed);
    LINE.with_borrow_mut(|line| {
        if stderr || outputs.file.is_some() {
            line.clear();
            let zone = zone(record.time);
            if outputs.json {
                record.write_json(line, &zone)
            } else {
                record.write_text(line, &zone)
            }
            if let Some(file) = &outputs.file {
                // A full disk stops the log, not the service.
                let _ = (&*file).write_all(line.as_bytes());
            }
            if stderr {
                let _ = std::io::stderr().write_all(line.as_bytes());
            }
        }
        if let Some(syslog) = &outputs.syslog {
            line.clear();
            if outputs.json {
                record.write_json(line, &Zone::UTC)
            } else {
                record.write_body(line)
            }
            syslog.send(record.level, line.trim_end_matches('\n'));
        }
        // One long message (an error with a query in it) does not keep its memory for ever.
        line.shrink_to(4096);
    });
}

/// The present moment.
pub(crate) fn now() -> Timestamp {
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Timestamp(since_epoch.as_micros() as u64)
}

/// The process' time zone (TZ, /etc/localtime) at a moment.
pub(crate) fn zone(at: Timestamp) -> Zone {
    /// Zones change their offset at full quarters of an hour.
    const QUARTER_S: u64 = 900;
    thread_local! {
        static LAST: RefCell<(u64, Zone)> = const { RefCell::new((u64::MAX, Zone::UTC)) };
    }
    static SYSTEM: OnceLock<jiff::tz::TimeZone> = OnceLock::new();
    let second = at.0 / 1_000_000;
    LAST.with_borrow_mut(|(quarter, zone)| {
        if *quarter != second / QUARTER_S {
            let system =
                SYSTEM.get_or_init(|| jiff::tz::TimeZone::try_system().unwrap_or(jiff::tz::TimeZone::UTC));
            let moment = jiff::Timestamp::from_second(second as i64).unwrap_or(jiff::Timestamp::UNIX_EPOCH);
            let info = system.to_offset_info(moment);
            *zone = Zone::new(info.abbreviation(), info.offset().seconds());
            *quarter = second / QUARTER_S;
        }
        zone.clone()
    })
}

/// What `log::info!` and its like end in.
struct Facade;

impl log::Log for Facade {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        // Libraries talk to their authors; operators see what is wrong.
        let ours = metadata.target().starts_with("underpass");
        ours || metadata.level() <= log::Level::Warn
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            let message = record.args();
            match message.as_str() {
                Some(message) => write(level_of(record.level()), None, None, message),
                None => write(level_of(record.level()), None, None, &message.to_string()),
            }
        }
    }

    fn flush(&self) {}
}

/// A connection to the syslog daemon. A line that it does not take at once is lost: the service does not wait for its log.
struct Syslog {
    logger: Mutex<Option<Logger<LoggerBackend, SyslogLine>>>,
    line: SyslogLine,
}

impl Syslog {
    fn open(ident: &str, facility: &str) -> anyhow::Result<Self> {
        // An unknown name means daemon, as in PgBouncer; the check of the configuration warns of it.
        let facility = format!("log_{facility}").parse().unwrap_or(Facility::LOG_DAEMON);
        let line = SyslogLine { facility, ident: ident.to_owned() };
        let logger = Self::connect(&line).context("syslog = 1, but no syslog daemon listens on /dev/log")?;
        Ok(Self { logger: Mutex::new(Some(logger)), line })
    }

    fn connect(line: &SyslogLine) -> anyhow::Result<Logger<LoggerBackend, SyslogLine>> {
        let logger = syslog::unix(line.clone()).map_err(|error| anyhow::anyhow!("{error}"))?;
        if let LoggerBackend::Unix(socket) = &logger.backend {
            socket.set_nonblocking(true)?;
        }
        Ok(logger)
    }

    fn send(&self, level: Level, message: &str) {
        let mut logger = lock(&self.logger);
        let send = |logger: &mut Logger<LoggerBackend, SyslogLine>| match level {
            Level::Fatal => logger.crit(message),
            Level::Error => logger.err(message),
            Level::Warning => logger.warning(message),
            Level::Log => logger.info(message),
            Level::Debug | Level::Noise => logger.debug(message),
        };
        if logger.as_mut().is_some_and(|logger| send(logger).is_ok()) {
            return;
        }
        // The daemon was restarted.
        *logger = Self::connect(&self.line).ok();
        if let Some(logger) = logger.as_mut() {
            let _ = send(logger);
        }
    }
}

/// The format of RFC 3164 as syslog(3) of the C library writes it: no host name.
#[derive(Clone)]
struct SyslogLine {
    facility: Facility,
    ident: String,
}

impl LogFormat<&str> for SyslogLine {
    fn format<W: std::io::Write>(
        &self,
        out: &mut W,
        severity: Severity,
        message: &str,
    ) -> syslog::Result<()> {
        let time = jiff::Zoned::now().strftime("%b %e %H:%M:%S").to_string();
        let priority = self.facility as u32 | severity as u32;
        let line = format!("<{priority}>{time} {}[{}]: {message}", self.ident, std::process::id());
        out.write_all(line.as_bytes()).map_err(syslog::Error::Write)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_level_decides() {
        log::set_max_level(filter(0));
        assert!(enabled(Level::Fatal) && enabled(Level::Log) && !enabled(Level::Debug));
        log::set_max_level(filter(1));
        assert!(enabled(Level::Debug) && !enabled(Level::Noise));
        log::set_max_level(filter(7));
        assert!(enabled(Level::Noise));
    }

    #[test]
    fn a_syslog_line_has_priority_time_and_name() {
        let line = SyslogLine { facility: Facility::LOG_DAEMON, ident: "pooler".into() };
        let mut out = Vec::new();
        line.format(&mut out, Severity::LOG_INFO, "hello").unwrap();
        let out = String::from_utf8(out).unwrap();
        // daemon is facility 3, info is severity 6: 3 * 8 + 6.
        assert!(
            out.starts_with("<30>") && out.ends_with(&format!(" pooler[{}]: hello", std::process::id())),
            "{out}"
        );
    }

    #[test]
    fn every_facility_of_pgbouncer_is_known() {
        for name in ["auth", "authpriv", "daemon", "user", "local0", "local7"] {
            assert!(format!("log_{name}").parse::<Facility>().is_ok(), "{name}");
        }
    }
}
