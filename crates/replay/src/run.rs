// SPDX-License-Identifier: Apache-2.0
//! Plays all sessions of a plan against one target.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike as _;
use tokio::sync::watch;

use crate::Error;
use crate::outcome::SessionOutcome;
use crate::plan::{Plan, Rows, Session, Unit};
use crate::session;
use crate::target::Target;
use crate::timer::Timer;
use crate::watermark::Watermark;

/// When units are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pace {
    /// At their moment in the trace, counted from its beginning; later if the session is not yet answered.
    #[default]
    Timed,
    /// So long after the previous answer as at capture: the client's pauses are kept, whatever the server's speed.
    Think,
    /// At once. A session still starts only when those have ended that had ended before it at capture.
    Asap,
}

/// How a plan is played.
#[derive(Clone, Debug)]
pub struct Options {
    /// When units are sent.
    pub pace: Pace,
    /// Time runs so many times faster than at capture: above 0; 1 is as at capture.
    pub speed: f64,
    /// A unit waits for the commits it came after at capture.
    pub order_commit: bool,
    /// When nothing commits for so long, units that wait for commits are released; where time runs slower than at capture, for so long of
    /// the trace's time.
    pub order_stuck: Duration,
    /// `default_transaction_read_only = on` in every session. The plan must be made with the same.
    pub read_only: bool,
    /// Hash rows.
    pub rows: Rows,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            pace: Pace::default(),
            speed: 1.0,
            order_commit: false,
            order_stuck: Duration::from_secs(10),
            read_only: false,
            rows: Rows::default(),
        }
    }
}

impl Options {
    /// How long nothing may commit. Pauses of the trace are longer at a lower speed; at a higher one the server is no faster.
    fn stuck_limit(&self) -> Duration {
        let slower = match self.pace {
            Pace::Asap => 1.0,
            Pace::Timed | Pace::Think => self.speed.min(1.0),
        };
        Duration::try_from_secs_f64(self.order_stuck.as_secs_f64() / slower)
            .unwrap_or(STUCK_MAX)
            .min(STUCK_MAX)
    }
}

/// How far a replay is to be stopped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stop {
    /// Not.
    #[default]
    No,
    /// Send nothing more, wait for what is under way.
    Finish,
    /// At once.
    Now,
}

/// Stops a replay from outside.
#[derive(Clone, Debug)]
pub struct Stopper(watch::Sender<Stop>);

impl Default for Stopper {
    fn default() -> Self {
        Self(watch::Sender::new(Stop::No))
    }
}

impl Stopper {
    /// Asks once to finish, twice to stop at once.
    pub fn stop(&self) {
        self.0.send_modify(|stop| *stop = if *stop == Stop::No { Stop::Finish } else { Stop::Now });
    }
}

/// Counts of a replay under way.
#[derive(Debug, Default)]
pub struct Progress {
    /// Units that are answered.
    pub units: AtomicU64,
    /// Those of them in which a statement failed.
    pub failed: AtomicU64,
    /// Sessions that are connected.
    pub sessions: AtomicI64,
    /// How far the replay is in the trace's time, nanoseconds since its beginning.
    pub trace_ns: AtomicU64,
}

/// A replay that is over.
#[derive(Debug)]
pub struct Played {
    /// Of each session of the plan.
    pub sessions: Vec<SessionOutcome>,
    /// When it began.
    pub started: SystemTime,
    /// How long it took.
    pub elapsed: Duration,
    /// Whether it was stopped before its end.
    pub stopped: bool,
    /// Processor time that this process used.
    pub cpu: Duration,
}

/// What all sessions of a replay share.
#[derive(Debug)]
pub(crate) struct Run {
    pub options: Options,
    pub target: Target,
    plan_origin_ns: u64,
    start: Instant,
    timer: Timer,
    commits: Watermark,
    ends: Watermark,
    progress: Arc<Progress>,
    stop: watch::Receiver<Stop>,
}

/// A session that waits for the end of another one longer than this starts all the same.
const SESSION_STUCK: Duration = Duration::from_secs(600);
/// Longer nothing is waited for: the clock must reach it.
const STUCK_MAX: Duration = Duration::from_secs(1 << 32);

/// Plays a plan. Returns when all sessions are over, or stopped.
pub async fn play(
    plan: Arc<Plan>,
    target: Target,
    options: Options,
    progress: Arc<Progress>,
    stopper: &Stopper,
) -> Result<Played, Error> {
    let started = SystemTime::now();
    let cpu_before = cpu();
    let run = Arc::new(Run {
        plan_origin_ns: plan.origin_ns,
        start: Instant::now(),
        timer: Timer::start().map_err(Error::Threads)?,
        commits: Watermark::new(plan.commits),
        ends: Watermark::new(plan.sessions.iter().filter(|session| session.ended.is_some()).count()),
        progress,
        stop: stopper.0.subscribe(),
        options,
        target,
    });
    let tasks: Vec<_> = (0..plan.sessions.len())
        .map(|at| {
            let (run, plan) = (Arc::clone(&run), Arc::clone(&plan));
            tokio::spawn(async move { session::play(&run, &plan.messages, &plan.sessions[at]).await })
        })
        .collect();
    let mut sessions = Vec::with_capacity(tasks.len());
    for task in tasks {
        sessions.push(task.await.unwrap_or_else(|error| SessionOutcome {
            broken: Some(format!("a bug of the replayer: {error}")),
            ..SessionOutcome::default()
        }));
    }
    Ok(Played {
        sessions,
        started,
        elapsed: run.start.elapsed(),
        stopped: run.stop() != Stop::No,
        cpu: cpu().saturating_sub(cpu_before),
    })
}

fn cpu() -> Duration {
    let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) else { return Duration::ZERO };
    let microseconds = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    Duration::from_micros(microseconds.try_into().unwrap_or(0))
}

impl Run {
    /// A duration of the trace in the replay's time.
    pub fn scaled(&self, ns: u64) -> Duration {
        Duration::from_secs_f64(ns as f64 / 1e9 / self.options.speed)
    }

    /// A moment of the trace in the replay's time.
    pub fn moment(&self, ns: u64) -> Instant {
        self.start + self.scaled(ns.saturating_sub(self.plan_origin_ns))
    }

    /// Time since the replay began.
    pub fn since_start(&self, at: Instant) -> Duration {
        at.saturating_duration_since(self.start)
    }

    /// How far it is to be stopped.
    pub fn stop(&self) -> Stop {
        *self.stop.borrow()
    }

    /// Returns when it is to be stopped so far.
    pub async fn stopped(&self, stop: Stop) {
        let mut changes = self.stop.clone();
        if changes.wait_for(|now| *now >= stop).await.is_err() {
            // Nobody is left who could stop it.
            std::future::pending::<()>().await;
        }
    }

    /// Waits until a moment.
    pub async fn until(&self, at: Instant) -> Result<(), Stop> {
        self.or_stopped(self.timer.until(at)).await
    }

    /// Waits until a moment, also while the replay is being finished; for ever without one.
    pub async fn alarm(&self, at: Option<Instant>) {
        match at {
            Some(at) => self.timer.until(at).await,
            None => std::future::pending().await,
        }
    }

    /// Waits until the first `below` commits of the trace are done; `false` if that is hopeless.
    pub async fn wait_commits(&self, below: usize) -> Result<bool, Stop> {
        self.or_stopped(self.commits.wait(below, self.options.stuck_limit())).await
    }

    /// Waits until a session may begin.
    pub async fn wait_start(&self, session: &Session) -> Result<(), Stop> {
        if self.options.pace != Pace::Asap {
            self.until(self.moment(session.start_ns)).await?;
        }
        if self.options.pace != Pace::Timed {
            self.or_stopped(self.ends.wait(session.after_ended, SESSION_STUCK)).await?;
        }
        Ok(())
    }

    /// Waits until a session that has nothing more to say may end.
    pub async fn wait_end(&self, session: &Session, last_ready: Option<Instant>) -> Result<(), Stop> {
        let Some(end_ns) = session.end_ns else { return Ok(()) };
        match (self.options.pace, last_ready, session.units.last().and_then(Unit::ready_ns)) {
            (Pace::Timed, ..) => self.until(self.moment(end_ns)).await,
            (Pace::Think, Some(now), Some(then_ns)) => {
                self.until(now + self.scaled(end_ns.saturating_sub(then_ns))).await
            }
            _ => Ok(()),
        }
    }

    async fn or_stopped<T>(&self, wait: impl Future<Output = T>) -> Result<T, Stop> {
        if self.stop() >= Stop::Finish {
            return Err(self.stop());
        }
        tokio::select! {
            biased;
            value = wait => Ok(value),
            () = self.stopped(Stop::Finish) => Err(self.stop()),
        }
    }

    /// Does something, unless the replay is stopped at once meanwhile: then it is given up wherever it is.
    pub async fn unless_now<T>(&self, work: impl Future<Output = T>) -> Result<T, Stop> {
        tokio::select! {
            biased;
            value = work => Ok(value),
            () = self.stopped(Stop::Now) => Err(Stop::Now),
        }
    }

    /// So many sessions more are connected.
    pub fn sessions_open(&self, change: i64) {
        self.progress.sessions.fetch_add(change, Ordering::Relaxed);
    }

    /// A unit is answered.
    pub fn unit_over(&self, unit: &Unit, failed: bool) {
        self.progress.units.fetch_add(1, Ordering::Relaxed);
        self.progress.failed.fetch_add(failed.into(), Ordering::Relaxed);
        self.progress.trace_ns.fetch_max(unit.sent_ns.saturating_sub(self.plan_origin_ns), Ordering::Relaxed);
        self.commit_over(unit);
    }

    /// If the unit is a commit: it is over, one way or another.
    pub fn commit_over(&self, unit: &Unit) {
        if let Some(commit) = unit.commit() {
            self.commits.over(commit);
        }
    }

    /// A session is over.
    pub fn session_over(&self, session: &Session) {
        if let Some(ended) = session.ended {
            self.ends.over(ended);
        }
    }
}

#[cfg(test)]
mod tests {
    use underpass_trace::{
        ByteTotals, EndReason, Frontend, Meta, Ready, Record, SessionEnd, SessionId, SessionStart, Source,
        TransactionStatus, Transport,
    };
    use underpass_wire::frontend::build;

    use super::*;
    use crate::plan::{self, from_records};
    use crate::target::Identities;

    fn start(session: SessionId, time_ns: u64) -> Record<'static> {
        Record::SessionStart(SessionStart {
            session,
            time_ns,
            ready_ns: Some(time_ns),
            source: Source::Synthetic,
            transport: Transport::Tcp,
            peer: None,
            backend_pid: None,
            midstream: false,
            protocol_version: 3 << 16,
            database: Some(b"db"[..].into()),
            user: Some(b"joe"[..].into()),
            application_name: None,
            parameters: Vec::new(),
            frontend_offset: 0,
            backend_offset: 0,
        })
    }

    /// Two sessions, of which the second commits once.
    fn plan() -> Plan {
        let session = SessionId(2);
        let mut insert = Vec::new();
        build::query(&mut insert, b"insert into t values (1)");
        let ready = Ready { session, time_ns: 3, request: 0, offset: 0, status: TransactionStatus::Idle };
        let (frontend, backend) = (ByteTotals::default(), ByteTotals::default());
        let end = SessionEnd { session, time_ns: 4, reason: EndReason::Terminate, frontend, backend };
        let records = [
            start(SessionId(1), 0),
            start(session, 1),
            Record::Frontend(Frontend::new(session, 2, 0, insert)),
            Record::Ready(ready),
            Record::SessionEnd(end),
        ];
        from_records(Meta::default(), records, &plan::Options::default()).unwrap()
    }

    #[test]
    fn nobody_waits_for_a_session_that_a_bug_has_ended() {
        let plan = Arc::new(plan());
        assert_eq!((plan.commits, plan.sessions[1].ended), (1, Some(0)));
        // Its moment is beyond any clock.
        let options = Options { speed: f64::MIN_POSITIVE, order_stuck: Duration::ZERO, ..Options::default() };
        let run = Arc::new(Run {
            plan_origin_ns: plan.origin_ns,
            start: Instant::now(),
            timer: Timer::start().unwrap(),
            commits: Watermark::new(1),
            ends: Watermark::new(1),
            progress: Arc::default(),
            stop: watch::Sender::new(Stop::No).subscribe(),
            options,
            target: Target::new("postgres://joe@127.0.0.1:1/db", Identities::default()).unwrap(),
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (theirs, sessions) = (Arc::clone(&run), Arc::clone(&plan));
            let played = tokio::spawn(async move {
                session::play(&theirs, &sessions.messages, &sessions.sessions[1]).await;
            });
            assert!(played.await.unwrap_err().is_panic());
            assert!(run.commits.wait(1, Duration::ZERO).await && run.ends.wait(1, Duration::ZERO).await);
        });
    }

    #[test]
    fn a_slower_replay_waits_longer_and_a_faster_one_does_not_wait_shorter() {
        for (pace, speed, seconds) in [
            (Pace::Timed, 1.0, 10),
            (Pace::Timed, 0.1, 100),
            (Pace::Think, 0.5, 20),
            (Pace::Timed, 100.0, 10),
            (Pace::Asap, 0.1, 10),
            (Pace::Timed, 1e-300, STUCK_MAX.as_secs()),
        ] {
            let limit = Options { pace, speed, ..Options::default() }.stuck_limit();
            assert_eq!(limit.as_secs_f64().round() as u64, seconds, "{pace:?} {speed}");
        }
    }
}
