// SPDX-License-Identifier: Apache-2.0
//! Commands of the console, from the parsed text to the answer.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use underpass_console::error::AdminVerb;
use underpass_console::session::{SET_IGNORED, SET_TLS_NOT_APPLIED};
use underpass_console::text;
use underpass_console::{Access, Command, ConsoleError, ShutdownMode, command};

use super::{Event, Outcome, Reply};
use crate::control::{self, SetDone, say};
use crate::gather::gather;
use crate::pool::DatabaseState;
use crate::shared::{Shared, lock};
use crate::table::Key;
use crate::worker::Worker;
use crate::worker::login::CONSOLE;

/// What a command comes to.
pub(super) enum Progress {
    /// The answer.
    Now(Outcome),
    /// It comes when this has happened.
    Later(Event),
    /// No answer: the process ends.
    Never,
}

impl From<Outcome> for Progress {
    fn from(outcome: Outcome) -> Self {
        Self::Now(outcome)
    }
}

impl Worker {
    /// Carries out one query string.
    pub(super) fn console_command(&mut self, key: Key, query: &[u8], access: Access) {
        let command = match command::parse(query, access) {
            Ok(command) => command,
            Err(error) => return self.console_reply(key, None, Err(error)),
        };
        let tag = command.tag();
        if let Some((word, database)) = logged(&command) {
            say(&text::console_command(word, database));
        }
        match self.run_command(key, command) {
            Ok(Progress::Now(outcome)) => self.console_reply(key, tag.as_deref(), outcome),
            Ok(Progress::Later(event)) => {
                self.console_wait(key, tag.unwrap_or_default(), event);
                self.console_waits_check_new();
            }
            Ok(Progress::Never) => {}
            Err(error) => self.console_reply(key, None, Err(error)),
        }
    }

    fn run_command(&mut self, key: Key, command: Command) -> Result<Progress, ConsoleError> {
        let shared = self.shared.clone();
        let done = Ok(Progress::Now(Ok(Reply::Done)));
        match command {
            Command::Empty => Ok(Progress::Now(Ok(Reply::Empty))),
            Command::Show(show) => Ok(self.show(key, show)),
            Command::ShowParameter(parameter) => Ok(Progress::Now(Ok(Reply::Rows(parameter.table())))),
            Command::SetIgnored(_) => Ok(Progress::Now(Ok(Reply::Notice(SET_IGNORED)))),
            Command::Set { key: name, value } => self.on_thread(key, move |shared| {
                control::set(shared, &name, &value).map(|done| match done {
                    SetDone::Done => Reply::Done,
                    SetDone::TlsNotApplied => Reply::Notice(SET_TLS_NOT_APPLIED),
                })
            }),
            Command::Reload => self.on_thread(key, |shared| control::reload(shared).map(|()| Reply::Done)),
            Command::Pause(name) => {
                let database = find(&shared, name, AdminVerb::Pause)?;
                match &database {
                    Some(database) => control::pause_database(&shared, database)?,
                    None => control::pause(&shared)?,
                }
                self.close_paused();
                Ok(Progress::Later(Event::Paused(database)))
            }
            Command::Resume(name) => {
                match name {
                    None => control::resume(&shared)?,
                    Some(name) if name == CONSOLE => return Err(ConsoleError::DatabaseNotPaused(name)),
                    Some(name) => control::resume_database(&shared, &*database(&shared, name)?)?,
                }
                done
            }
            Command::Suspend => {
                control::suspend(&shared)?;
                Ok(Progress::Later(Event::Suspended))
            }
            Command::Disable(name) => {
                if let Some(database) = find(&shared, Some(name), AdminVerb::Disable)? {
                    database.disabled.store(true, Ordering::Release);
                }
                done
            }
            Command::Enable(name) => {
                if let Some(database) = find(&shared, Some(name), AdminVerb::Enable)? {
                    database.disabled.store(false, Ordering::Release);
                }
                done
            }
            Command::EnableMirror(name) => {
                switch_mirror(&shared, name, true)?;
                done
            }
            Command::DisableMirror(name) => {
                switch_mirror(&shared, name, false)?;
                done
            }
            Command::Reconnect(name) => {
                let database = find(&shared, name, AdminVerb::Reconnect)?;
                control::reconnect(&shared, database.as_deref());
                done
            }
            Command::Kill(name) => {
                let database = find(&shared, name, AdminVerb::Kill)?;
                control::kill(&shared, database.as_deref())?;
                done
            }
            Command::KillClient(id) => {
                let found = move |worker: &mut Self| worker.kill_client(id);
                Ok(self.collect(key, found, |found: Vec<bool>| {
                    if found.contains(&true) { Ok(Reply::Done) } else { Err(ConsoleError::ClientNotFound) }
                }))
            }
            Command::WaitClose(name) => {
                Ok(Progress::Later(Event::Closed(find(&shared, name, AdminVerb::WaitClose)?)))
            }
            Command::Shutdown(mode) => {
                control::shutdown(&shared, mode);
                if mode == ShutdownMode::Immediate { Ok(Progress::Never) } else { done }
            }
        }
    }

    /// Asks every worker for a part and answers with what `outcome` makes of all of them.
    pub(super) fn collect<T: Send + 'static>(
        &self,
        key: Key,
        part: impl Fn(&mut Self) -> T + Send + Sync + 'static,
        outcome: impl FnOnce(Vec<T>) -> Outcome + Send + 'static,
    ) -> Progress {
        let (shared, home) = (self.shared.clone(), self.index);
        gather(&self.shared, part, move |parts| {
            let outcome = outcome(parts);
            shared.mailboxes[home as usize].post(Box::new(move |worker| worker.console_answer(key, outcome)));
        });
        Progress::Later(Event::Answer)
    }

    /// Runs what reads files on a thread of its own; the answer comes back as a task.
    fn on_thread(
        &self,
        key: Key,
        work: impl FnOnce(&Arc<Shared>) -> Outcome + Send + 'static,
    ) -> Result<Progress, ConsoleError> {
        let (shared, home) = (self.shared.clone(), self.index);
        let spawned = std::thread::Builder::new().name("control".into()).spawn(move || {
            let outcome = work(&shared);
            shared.mailboxes[home as usize].post(Box::new(move |worker| worker.console_answer(key, outcome)));
        });
        match spawned {
            Ok(_) => Ok(Progress::Later(Event::Answer)),
            Err(error) => {
                log::error!("cannot start a thread: {error}");
                Err(ConsoleError::ReloadFailed)
            }
        }
    }

    /// A wait that was just begun may be over already.
    fn console_waits_check_new(&mut self) {
        let Some(wait) = self.console_waits.last() else { return };
        let is_over = match &wait.event {
            Event::Answer => false,
            Event::Paused(database) => self.is_paused_out(database.as_deref()),
            Event::Suspended => self.is_suspended_out(),
            Event::Closed(database) => self.is_closed_out(database.as_deref()),
        };
        if let Some(wait) = self.console_waits.pop_if(|_| is_over) {
            self.console_reply(wait.client, Some(&wait.tag), Ok(Reply::Done));
        }
    }

    /// Whether nothing is left of what PAUSE waits for. A RESUME from elsewhere ends the wait too. A mirror that hangs is not waited for.
    pub(super) fn is_paused_out(&self, database: Option<&DatabaseState>) -> bool {
        // Names before the core, as everywhere: who makes a pool holds the one and waits for the other.
        let pools = self.shared.pools();
        let core = lock(&self.shared.core);
        pools
            .iter()
            .filter(|pool| !pool.database.is_mirror)
            .filter(|pool| database.is_none_or(|database| pool.database.number == database.number))
            .all(|pool| !core.is_paused(pool.id) || core.connections(pool.id) == 0)
    }

    pub(super) fn is_suspended_out(&self) -> bool {
        let is_over = self.shared.phase.load(Ordering::Acquire) != crate::shared::phase::SUSPENDED;
        is_over || self.shared.control.flushed.load(Ordering::Acquire) as usize >= self.shared.mailboxes.len()
    }

    pub(super) fn is_closed_out(&self, database: Option<&DatabaseState>) -> bool {
        // Names before the core, as everywhere: who makes a pool holds the one and waits for the other.
        let pools = self.shared.pools();
        let core = lock(&self.shared.core);
        pools
            .iter()
            .filter(|pool| !pool.database.is_mirror)
            .filter(|pool| database.is_none_or(|database| pool.database.number == database.number))
            .all(|pool| core.close_needed(pool.id) == 0)
    }

    /// Takes back what a cancelled command began.
    pub(super) fn undo_wait(&self, event: &Event) {
        // Whoever resumed before leaves nothing to do.
        let _ = match event {
            Event::Paused(None) => {
                control::undo_pause(&self.shared);
                Ok(())
            }
            Event::Suspended => control::resume(&self.shared),
            Event::Paused(Some(database)) => control::resume_database(&self.shared, database),
            Event::Closed(_) | Event::Answer => Ok(()),
        };
    }
}

fn switch_mirror(shared: &Shared, name: String, on: bool) -> Result<(), ConsoleError> {
    if shared.mirrors.switch(&shared.settings.load().config, &name, on) {
        return Ok(());
    }
    Err(ConsoleError::NoSuchMirror(name))
}

/// The database a command names; `None` where it names none.
fn find(
    shared: &Shared,
    name: Option<String>,
    verb: AdminVerb,
) -> Result<Option<Arc<DatabaseState>>, ConsoleError> {
    match name {
        None => Ok(None),
        Some(database) if database == CONSOLE => Err(ConsoleError::AdminDatabase { verb, database }),
        Some(name) => database(shared, name).map(Some),
    }
}

fn database(shared: &Shared, name: String) -> Result<Arc<DatabaseState>, ConsoleError> {
    shared.database(&name).ok_or(ConsoleError::NoSuchDatabase(name))
}

/// Commands that go to the log, with their argument.
fn logged(command: &Command) -> Option<(&'static str, Option<&str>)> {
    Some(match command {
        Command::Reload => ("RELOAD", None),
        Command::Pause(name) => ("PAUSE", name.as_deref()),
        Command::Resume(name) => ("RESUME", name.as_deref()),
        Command::Suspend => ("SUSPEND", None),
        Command::Disable(name) => ("DISABLE", Some(name)),
        Command::Enable(name) => ("ENABLE", Some(name)),
        Command::DisableMirror(name) => ("DISABLE MIRROR", Some(name)),
        Command::EnableMirror(name) => ("ENABLE MIRROR", Some(name)),
        Command::Reconnect(name) => ("RECONNECT", name.as_deref()),
        Command::Kill(name) => ("KILL", name.as_deref()),
        Command::WaitClose(name) => ("WAIT_CLOSE", name.as_deref()),
        Command::Shutdown(ShutdownMode::Immediate) => ("SHUTDOWN", None),
        Command::Shutdown(ShutdownMode::WaitForServers) => ("SHUTDOWN WAIT_FOR_SERVERS", None),
        Command::Shutdown(ShutdownMode::WaitForClients) => ("SHUTDOWN WAIT_FOR_CLIENTS", None),
        _ => return None,
    })
}
