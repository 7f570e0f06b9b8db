// SPDX-License-Identifier: Apache-2.0
//! What changes the running process, whoever asks for it: the console or a signal.
//!
//! These functions may run on any thread. They change what all workers share and leave the rest to the workers as tasks; none waits
//! for a worker. What takes until transactions are over (PAUSE, SHUTDOWN) is watched by the sweep of the workers.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::time::Instant;

use nix::sys::signal::Signal;
use underpass_config::{Config, SetOutcome, kept_warning};
use underpass_console::text::{self, Phrase, SignalAction, reason};
use underpass_console::{ConsoleError, ShutdownMode};
use underpass_pool::PoolId;

use crate::descriptors::{self, Need};
use crate::listeners::SocketFile;
use crate::logging;
use crate::pool::{DatabaseState, Pool};
use crate::process::{self, Life};
use crate::recording::Anew;
use crate::settings::Settings;
use crate::shared::{Shared, lock, phase};
use crate::worker::Worker;

/// The key of a recording's place, as SET names it.
const TRACE_DIR: &str = "underpass.trace_dir";

/// State of the control plane.
pub(crate) struct Control {
    /// RELOAD, SET, PAUSE and the like read, change and replace: one at a time.
    changing: Mutex<()>,
    /// Console clients.
    pub consoles: AtomicU32,
    /// Workers that have nothing left to write, while suspended.
    pub flushed: AtomicU32,
    is_listening: AtomicBool,
    /// The file of the unix socket, if the process made it.
    socket_file: Arc<Mutex<Option<SocketFile>>>,
    /// Since when pools (by number) and automatic databases are unused; worker 0 keeps it.
    pub idle_pools: Mutex<HashMap<PoolId, Instant>>,
    pub idle_databases: Mutex<HashMap<u32, Instant>>,
}

impl Control {
    pub fn new(socket_file: Arc<Mutex<Option<SocketFile>>>) -> Self {
        Self {
            changing: Mutex::default(),
            consoles: AtomicU32::new(0),
            flushed: AtomicU32::new(0),
            is_listening: AtomicBool::new(true),
            socket_file,
            idle_pools: Mutex::default(),
            idle_databases: Mutex::default(),
        }
    }
}

/// Writes a phrase to the log.
pub(crate) fn say(phrase: &Phrase) {
    logging::phrase(None, phrase);
}

/// Acts on a signal. True when the process is about to end and nothing more needs to be waited for but the workers.
pub(crate) fn signal(shared: &Arc<Shared>, signal: Signal) -> bool {
    let before = shared.phase.load(Ordering::Acquire);
    if before == phase::IMMEDIATE {
        return true;
    }
    let shutting_down = before >= phase::WAIT_FOR_SERVERS;
    let heard = |action| say(&text::signal(action));
    match signal {
        Signal::SIGHUP => {
            heard(SignalAction::Reload);
            // The log says what is wrong.
            let _ = reload(shared);
        }
        Signal::SIGINT if shutting_down => {
            heard(SignalAction::InterruptAgain);
            end(shared);
        }
        Signal::SIGINT => {
            heard(SignalAction::WaitForServers);
            shutdown(shared, ShutdownMode::WaitForServers);
        }
        Signal::SIGTERM if shutting_down => {
            heard(SignalAction::TerminateAgain);
            end(shared);
        }
        Signal::SIGTERM => {
            heard(SignalAction::WaitForClients);
            shutdown(shared, ShutdownMode::WaitForClients);
        }
        Signal::SIGQUIT => {
            heard(SignalAction::Quit);
            end(shared);
        }
        Signal::SIGUSR1 => match pause(shared) {
            Ok(()) => heard(SignalAction::Pause),
            Err(_) => heard(SignalAction::AlreadyPaused),
        },
        Signal::SIGUSR2 => {
            let is_over = resume(shared).is_ok();
            heard(match before {
                _ if shutting_down => SignalAction::ResumeRefused,
                phase::SUSPENDED => SignalAction::ResumeSuspend,
                _ if is_over => SignalAction::ResumePause,
                _ => SignalAction::NotPaused,
            });
        }
        _ => {}
    }
    shared.phase.load(Ordering::Acquire) == phase::IMMEDIATE
}

/// PAUSE of everything. Servers are released at the end of their transactions and closed then.
///
/// # Errors
/// It is paused or suspended already, or a shutdown is under way that does not wait for clients.
pub(crate) fn pause(shared: &Arc<Shared>) -> Result<(), ConsoleError> {
    let _changing = lock(&shared.control.changing);
    refuse_if_paused(shared)?;
    shared.paused.store(true, Ordering::Release);
    apply_pauses(shared);
    Ok(())
}

/// PAUSE of one database.
///
/// # Errors
/// As [`pause`].
pub(crate) fn pause_database(shared: &Arc<Shared>, database: &DatabaseState) -> Result<(), ConsoleError> {
    let _changing = lock(&shared.control.changing);
    refuse_if_paused(shared)?;
    database.paused.store(true, Ordering::Release);
    apply_pauses(shared);
    Ok(())
}

/// PAUSE of each database for itself, so that RESUME brings them back one by one as PgBouncer does, or all.
fn pause_each(shared: &Arc<Shared>) -> Result<(), ConsoleError> {
    let _changing = lock(&shared.control.changing);
    refuse_if_paused(shared)?;
    for database in shared.databases() {
        if !database.is_mirror && !database.paused.swap(true, Ordering::AcqRel) {
            database.killed.store(true, Ordering::Release);
        }
    }
    apply_pauses(shared);
    Ok(())
}

fn refuse_if_paused(shared: &Shared) -> Result<(), ConsoleError> {
    match shared.phase.load(Ordering::Acquire) {
        phase::SUSPENDED => Err(ConsoleError::AlreadyPaused),
        // Clients go on in a shutdown that waits for them, so they can be paused, as in PgBouncer.
        phase::RUNNING | phase::WAIT_FOR_CLIENTS if !shared.paused.load(Ordering::Acquire) => Ok(()),
        phase::RUNNING | phase::WAIT_FOR_CLIENTS => Err(ConsoleError::AlreadyPaused),
        _ => Err(ConsoleError::ShuttingDown),
    }
}

/// RESUME of everything: ends PAUSE, SUSPEND, and KILL of everything. Databases that were paused by name stay so.
///
/// # Errors
/// There is nothing to resume, or a shutdown is under way.
pub(crate) fn resume(shared: &Arc<Shared>) -> Result<(), ConsoleError> {
    let _changing = lock(&shared.control.changing);
    match shared.phase.load(Ordering::Acquire) {
        phase::SUSPENDED => {
            shared.phase.store(phase::RUNNING, Ordering::Release);
            shared.broadcast(Worker::unsuspend);
        }
        phase::RUNNING => {
            let mut killed = shared.databases();
            killed.retain(|database| database.killed.swap(false, Ordering::AcqRel));
            if !shared.paused.swap(false, Ordering::AcqRel) && killed.is_empty() {
                return Err(ConsoleError::NotPaused);
            }
            killed.iter().for_each(|database| database.paused.store(false, Ordering::Release));
        }
        _ => return Err(ConsoleError::ShuttingDown),
    }
    apply_pauses(shared);
    Ok(())
}

/// Ends a PAUSE of everything that was cancelled before it was answered.
pub(crate) fn undo_pause(shared: &Arc<Shared>) {
    let _changing = lock(&shared.control.changing);
    shared.paused.store(false, Ordering::Release);
    apply_pauses(shared);
}

/// RESUME of one database.
///
/// # Errors
/// It is not paused.
pub(crate) fn resume_database(shared: &Arc<Shared>, database: &DatabaseState) -> Result<(), ConsoleError> {
    let _changing = lock(&shared.control.changing);
    if !database.paused.swap(false, Ordering::AcqRel) {
        return Err(ConsoleError::DatabaseNotPaused(database.name.clone()));
    }
    database.killed.store(false, Ordering::Release);
    apply_pauses(shared);
    Ok(())
}

/// SUSPEND: every worker writes what it holds and stops reading.
///
/// # Errors
/// Something is paused or suspended already, or a shutdown is under way.
pub(crate) fn suspend(shared: &Arc<Shared>) -> Result<(), ConsoleError> {
    let _changing = lock(&shared.control.changing);
    refuse_if_paused(shared)?;
    if shared.phase.load(Ordering::Acquire) != phase::RUNNING {
        return Err(ConsoleError::ShuttingDown);
    }
    if shared.databases().iter().any(|database| database.paused.load(Ordering::Relaxed)) {
        return Err(ConsoleError::PausedDatabases);
    }
    shared.phase.store(phase::SUSPENDED, Ordering::Release);
    shared.control.flushed.store(0, Ordering::Release);
    // Lanes go on by themselves otherwise.
    for pool in shared.pools() {
        lock(&shared.core).set_paused(pool.id, true);
    }
    shared.broadcast(Worker::suspend);
    Ok(())
}

/// Tells the core which pools are paused; closes what pauses do not leave open, and serves the queues of the others.
fn apply_pauses(shared: &Arc<Shared>) {
    {
        // A pool that is being made sees the new state already, or is in this list.
        let names = shared.names.read().unwrap_or_else(PoisonError::into_inner);
        for pool in names.pools() {
            let mut core = lock(&shared.core);
            let is_removed = pool.removed.load(Ordering::Acquire);
            core.set_paused(pool.id, is_removed || shared.is_paused(&pool.database));
        }
    }
    shared.broadcast(|worker| {
        worker.close_paused();
        if worker.index == 0 {
            worker.serve_queues();
        }
    });
}

/// Drops clients and servers of one database, or of all, and leaves it paused.
///
/// # Errors
/// Everything is paused or suspended already.
pub(crate) fn kill(shared: &Arc<Shared>, database: Option<&DatabaseState>) -> Result<(), ConsoleError> {
    match database {
        None => pause_each(shared)?,
        Some(database) => pause_database(shared, database)?,
    }
    let number = database.map(|database| database.number);
    shared.broadcast(move |worker| worker.kill(number, reason::SERVER_SHUTTING_DOWN));
    Ok(())
}

/// Begins a shutdown. The sweep ends the process when what it waits for has come.
pub(crate) fn shutdown(shared: &Arc<Shared>, mode: ShutdownMode) {
    let target = match mode {
        ShutdownMode::Immediate => return end(shared),
        ShutdownMode::WaitForServers => phase::WAIT_FOR_SERVERS,
        ShutdownMode::WaitForClients => phase::WAIT_FOR_CLIENTS,
    };
    let _changing = lock(&shared.control.changing);
    if shared.phase.load(Ordering::Acquire) == phase::IMMEDIATE {
        return;
    }
    shared.phase.store(target, Ordering::Release);
    process::notify(Life::Stopping);
    stop_listening(shared);
    shared.broadcast(Worker::unsuspend);
    apply_pauses(shared);
    if target == phase::WAIT_FOR_SERVERS {
        shared.broadcast(Worker::drain);
    } else {
        // One that waits for servers may have begun before.
        shared.broadcast(|worker| worker.draining = false);
    }
}

/// Ends the process: every worker says good-bye and stops, which the main thread sees.
pub(crate) fn end(shared: &Shared) {
    if shared.phase.swap(phase::IMMEDIATE, Ordering::AcqRel) == phase::IMMEDIATE {
        return;
    }
    stop_listening(shared);
    drop(lock(&shared.control.socket_file).take());
    shared.broadcast(|worker| worker.stopping = true);
}

/// Closes the listening sockets, so that another process can take their places. Our unix socket stays for the console.
fn stop_listening(shared: &Shared) {
    if shared.control.is_listening.swap(false, Ordering::AcqRel) {
        shared.broadcast(Worker::stop_listening);
    }
}

/// RECONNECT: every server connection is closed when it is released, idle ones now.
pub(crate) fn reconnect(shared: &Arc<Shared>, database: Option<&DatabaseState>) {
    let number = database.map(|database| database.number);
    shared.mirrors.forget_servers(database);
    let pools =
        shared.pools().into_iter().filter(|pool| number.is_none_or(|number| pool.database.number == number));
    make_obsolete(shared, pools.collect(), reason::OBSOLETE);
}

/// Marks the servers of these pools as obsolete.
fn make_obsolete(shared: &Shared, pools: Vec<Arc<Pool>>, reason: &'static str) {
    shared.epoch.fetch_add(1, Ordering::Relaxed);
    let mut idle = Vec::new();
    for pool in &pools {
        let mut core = lock(&shared.core);
        idle.extend(core.obsolete(pool.id));
        // Who logs in next is told what the new servers say. Under the lock: an old one's word would stay else (`Worker::serves`).
        pool.welcome.store(None);
    }
    let numbers: HashSet<PoolId> = pools.iter().map(|pool| pool.id).collect();
    shared.broadcast(move |worker| worker.give_up_lookups(reason, |_, pool| numbers.contains(&pool.id)));
    shared.mailboxes[0].post(Box::new(move |worker| {
        for (_, server) in idle {
            worker.bury(server, reason);
        }
        pools.iter().for_each(|pool| worker.launch(pool.id));
    }));
}

/// RELOAD: reads the files again. With an error in them nothing changes. May take long: not for workers.
///
/// # Errors
/// The files cannot be used; the log says why.
pub(crate) fn reload(shared: &Arc<Shared>) -> Result<(), ConsoleError> {
    let _changing = lock(&shared.control.changing);
    let old = shared.settings.load_full();
    // Whatever the files say now: the log may have been rotated, and what comes next belongs into the new one.
    reopen_log(&old.config);
    let (mut settings, warnings) = old.reload(&reload_paths(&old)).map_err(|error| {
        log::error!("RELOAD failed, the old configuration stays: {error:#}");
        ConsoleError::ReloadFailed
    })?;
    for warning in warnings {
        log::warn!("{warning}");
    }
    let diff = Config::diff_for_reload(&old.config, &settings.config);
    for kept in &diff.kept {
        log::warn!("{}", kept_warning(kept));
    }
    let is_server_tls_changed = diff.touches("server_tls");
    settings.config = diff.config;
    keep_auth_context(&old, &mut settings);
    descriptors::raise_limit(&settings);
    apply(shared, settings, is_server_tls_changed, Anew::Failed);
    Ok(())
}

fn reopen_log(config: &Config) {
    if let Err(error) = logging::configure(config) {
        log::error!("{error:#}");
    }
}

/// `conffile` may have been SET to another file.
fn reload_paths(old: &Settings) -> Vec<PathBuf> {
    let mut paths = old.paths.clone();
    if let (Some(first), Some(conffile)) = (paths.first_mut(), &old.config.conffile) {
        conffile.clone_into(first);
    }
    paths
}

/// The SCRAM keys that are cached, and the salts shown to users who do not exist, stay what they were.
fn keep_auth_context(old: &Settings, new: &mut Settings) {
    match old.auth.reload(&new.auth_options()) {
        Ok(context) => new.auth = Arc::new(context),
        Err(error) => log::warn!("authentication keys are drawn anew: {error}"),
    }
}

/// What SET did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SetDone {
    Done,
    /// The TLS key has its value, but what it says cannot be used: connections go on as before.
    TlsNotApplied,
}

/// SET: changes one key until the next RELOAD. May read files: not for workers.
///
/// # Errors
/// No such key, or no such value; the log says which.
pub(crate) fn set(shared: &Arc<Shared>, key: &str, value: &str) -> Result<SetDone, ConsoleError> {
    let _changing = lock(&shared.control.changing);
    let old = shared.settings.load_full();
    let mut config = old.config.clone();
    let failed = |error: &dyn std::fmt::Display| {
        log::warn!("SET {key} failed: {error}");
        ConsoleError::SetFailed
    };
    let anew = if key == TRACE_DIR { Anew::All } else { Anew::None };
    match config.set(key, value) {
        Ok(SetOutcome::Changed) => {}
        Ok(SetOutcome::Unchanged) if anew == Anew::All && shared.recordings.has_ended() => {}
        Ok(SetOutcome::Unchanged) => return Ok(SetDone::Done),
        Ok(SetOutcome::NeedsRestart) => {
            log::warn!("{key} changes with a restart only");
            return Ok(SetDone::Done);
        }
        Err(error) => return Err(failed(&error)),
    }
    let is_tls = key.contains("_tls");
    match old.with(config.clone(), key) {
        Ok(mut settings) => {
            keep_auth_context(&old, &mut settings);
            if Need::of(&settings) != Need::of(&old) {
                descriptors::raise_limit(&settings);
            }
            apply(shared, settings, key.starts_with("server_tls"), anew);
            Ok(SetDone::Done)
        }
        Err(error) if is_tls => {
            say(&text::tls_setup_failed(&format_args!("{error:#}")));
            let kept = Settings { config, ..Settings::clone(&old) };
            apply(shared, kept, false, anew);
            Ok(SetDone::TlsNotApplied)
        }
        Err(error) => Err(failed(&format_args!("{error:#}"))),
    }
}

/// Puts new settings in force: for databases, pools, and the servers that were made under others.
fn apply(shared: &Arc<Shared>, settings: Settings, is_server_tls_changed: bool, anew: Anew) {
    let settings = Arc::new(settings);
    shared.settings.store(settings.clone());
    reopen_log(&settings.config);
    let mut changed = Vec::new();
    for database in shared.databases() {
        if database.forgotten.load(Ordering::Relaxed) {
            continue;
        }
        match settings.config.database(&database.name) {
            None => {
                say(&text::database_dropped(&database.name));
                forget(shared, std::slice::from_ref(&database), true);
                let number = database.number;
                shared.broadcast(move |worker| {
                    worker.kill(Some(number), reason::DATABASE_REMOVED);
                });
            }
            Some((configured, is_auto)) => {
                if database.settings.load().needs_reconnect(&configured) {
                    changed.push(database.number);
                }
                database.is_auto.store(is_auto, Ordering::Relaxed);
                database.settings.store(Arc::new(configured));
            }
        }
    }
    for configured in settings.config.databases.named.values() {
        shared.database_state(configured.clone(), false);
    }
    changed.extend(shared.mirrors.configure(&settings.config));
    // Before pools are told: what is recorded does not enter lanes.
    shared.recordings.configure(&settings.config, anew);
    let (mut obsolete, mut others) = (Vec::new(), Vec::new());
    for pool in shared.pools() {
        let is_other_link = shared.refresh(&pool);
        let is_obsolete = is_other_link || is_server_tls_changed || changed.contains(&pool.database.number);
        if is_obsolete { obsolete.push(pool) } else { others.push(pool) }
    }
    if !obsolete.is_empty() {
        make_obsolete(shared, obsolete, reason::DATABASE_CHANGED);
    }
    if shared.lanes.is_some() {
        shared.broadcast(Worker::leave_unfit_lanes);
    }
    shared.broadcast(Worker::mirrors_changed);
    shared.broadcast(Worker::recording_changed);
    // All workers have the same sockets.
    shared.mailboxes[0].post(Box::new(Worker::listeners_changed));
    // Limits may have grown.
    shared.mailboxes[0].post(Box::new(move |worker| others.iter().for_each(|pool| worker.launch(pool.id))));
}

/// A recording that has ended by itself keeps no pool out of the kernel lanes any more. Called now and then: whoever changes the settings at the
/// moment is not waited for.
pub(crate) fn tell_of_recording(shared: &Shared) {
    let _changing = match shared.control.changing.try_lock() {
        Ok(changing) => changing,
        Err(TryLockError::Poisoned(changing)) => changing.into_inner(),
        Err(TryLockError::WouldBlock) => return,
    };
    if shared.recordings.has_just_ended() {
        for pool in shared.pools() {
            shared.refresh(&pool);
        }
    }
}

/// These databases are not known any more, until somebody asks for them again. `removed`: whoever has to do with them is sent away next.
pub(crate) fn forget(shared: &Shared, databases: &[Arc<DatabaseState>], removed: bool) {
    if databases.is_empty() {
        return;
    }
    for database in databases {
        database.forgotten.store(true, Ordering::Release);
        database.paused.store(false, Ordering::Release);
        database.killed.store(false, Ordering::Release);
        database.disabled.store(false, Ordering::Release);
    }
    let mut numbers: HashSet<u32> = databases.iter().map(|database| database.number).collect();
    numbers.extend(shared.mirrors.forget(databases));
    let mut pools = shared.pools();
    pools.retain(|pool| numbers.contains(&pool.database.number));
    for pool in &pools {
        // What a server told may not be true of the next one.
        pool.welcome.store(None);
        pool.secret.store(None);
        pool.proved.store(None);
        let mut core = lock(&shared.core);
        // In the lock: who brings the pool back at the same time takes all of this back, or nothing.
        pool.forgotten.store(true, Ordering::Release);
        core.keep_minimum(pool.id, false);
        // Nobody who waits for it has a connection opened that would outlive it. A database that nobody uses may get a client at this very
        // moment, which stays; and what is queued for a mirror is played to its end.
        let removed = removed && !pool.database.is_mirror;
        pool.removed.store(removed, Ordering::Release);
        core.set_paused(pool.id, removed || shared.is_held(&pool.database));
    }
    // One that comes again may be another: no connection made for this one is left to it, wherever it is now.
    make_obsolete(shared, pools, reason::DATABASE_REMOVED);
}
