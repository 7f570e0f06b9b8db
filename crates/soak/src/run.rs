// SPDX-License-Identifier: Apache-2.0
//! A run: set-up, the clients' loops, audit, report.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rand::Rng;
use tokio::task::LocalSet;
use tokio::time::{sleep, timeout};

use crate::client::{Client, STATEMENT_NAMES, Stop};
use crate::config::{Config, PoolMode};
use crate::connection::{Connection, Lost};
use crate::faults::{self, FaultKind};
use crate::ledger::{Entries, Ledger};
use crate::monitor;
use crate::owner::{Kind, Violation};
use crate::report::{Observed, Report};
use crate::traffic::{self, TrafficKind};

/// After so many violations the run stops: the first ones tell the most.
const VIOLATIONS_MAX: usize = 20;
/// In session pooling a client keeps its server: after so many scenarios it makes room for those that wait.
const SESSION_SCENARIOS: u32 = 40;
/// Between two attempts to log in.
const RETRY: Duration = Duration::from_millis(20);

/// What all clients share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) ledger: Ledger,
    over: AtomicBool,
    transactions: AtomicU64,
    connected: AtomicU64,
    faults_begun: AtomicU64,
    traffic: Vec<AtomicU64>,
    faults: Vec<AtomicU64>,
    logins: AtomicU64,
    refusals: AtomicU64,
    late_cancels: AtomicU64,
    violations: Mutex<Vec<Violation>>,
    entries: Mutex<BTreeMap<u32, Entries>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

fn counters(length: usize) -> Vec<AtomicU64> {
    (0..length).map(|_| AtomicU64::new(0)).collect()
}

fn values(counters: &[AtomicU64]) -> Vec<u64> {
    counters.iter().map(|counter| counter.load(Ordering::Relaxed)).collect()
}

impl Shared {
    fn new(config: &Config) -> Self {
        Self {
            ledger: Ledger::new(config.table.as_deref()),
            over: AtomicBool::new(false),
            transactions: AtomicU64::new(0),
            connected: AtomicU64::new(0),
            faults_begun: AtomicU64::new(0),
            traffic: counters(TrafficKind::ALL.len()),
            faults: counters(FaultKind::ALL.len()),
            logins: AtomicU64::new(0),
            refusals: AtomicU64::new(0),
            late_cancels: AtomicU64::new(0),
            violations: Mutex::default(),
            entries: Mutex::default(),
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    fn stop(&self) {
        self.over.store(true, Ordering::Release);
    }

    /// Whether the run is in full swing: nearly everybody is connected.
    pub(crate) fn is_busy(&self, config: &Config) -> bool {
        self.connected.load(Ordering::Relaxed) * 10 >= u64::from(config.clients) * 9
    }

    fn report_violation(&self, violation: Violation) {
        let mut violations = lock(&self.violations);
        violations.push(violation);
        if violations.len() >= VIOLATIONS_MAX {
            self.over.store(true, Ordering::Release);
        }
    }

    fn done(&self, config: &Config, transactions: u64) {
        let all = self.transactions.fetch_add(transactions, Ordering::AcqRel) + transactions;
        if all >= config.transactions {
            self.over.store(true, Ordering::Release);
        }
    }

    /// The fault that is due now, if one is: all kinds in turn, so that each fires equally often.
    fn due_fault(&self, config: &Config) -> Option<FaultKind> {
        let due = self.transactions.load(Ordering::Relaxed).checked_div(config.fault_every)?;
        let begun = self.faults_begun.load(Ordering::Relaxed);
        if begun >= due {
            return None;
        }
        self.faults_begun.compare_exchange(begun, begun + 1, Ordering::AcqRel, Ordering::Relaxed).ok()?;
        let possible: Vec<FaultKind> =
            FaultKind::ALL.iter().filter(|kind| kind.possible(config)).copied().collect();
        possible.get((begun % possible.len().max(1) as u64) as usize).copied()
    }
}

/// Runs the checker. An error means that it could not run; what it found is in the report.
pub fn run(config: &Config) -> anyhow::Result<Report> {
    let config = Arc::new(config.clone());
    let shared = Arc::new(Shared::new(&config));
    let target = config.target();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build();
    let control = runtime().context("runtime")?;
    control
        .block_on(async { timeout(config.silence_limit(), shared.ledger.create(&target)).await })
        .context("no answer to the set-up")?
        .context("set-up")?;

    let begin = Instant::now();
    let threads = config.threads.clamp(1, config.clients.max(1));
    let observed = thread::scope(|scope| -> anyhow::Result<Option<Observed>> {
        for number in 0..threads {
            let (config, shared) = (Arc::clone(&config), Arc::clone(&shared));
            let runtime = runtime().context("runtime")?;
            scope.spawn(move || {
                let tasks = LocalSet::new();
                for id in (0..config.clients).filter(|id| id % threads == number) {
                    let client = Client::new(id, Arc::clone(&config), Arc::clone(&shared));
                    tasks.spawn_local(live(client));
                }
                runtime.block_on(tasks);
            });
        }
        let observed = control.block_on(async {
            let observe = async {
                let observed = monitor::observe(&config, &shared).await;
                if observed.is_err() {
                    // A run that nobody observes would only end as such, much later.
                    shared.stop();
                }
                observed
            };
            tokio::join!(observe, progress(&config, &shared)).0
        });
        observed.context("console")
    })?;
    let elapsed = begin.elapsed();

    let entries = std::mem::take(&mut *lock(&shared.entries));
    let audited =
        entries.values().map(|entries| entries.committed.len() + entries.uncertain.len()).sum::<usize>();
    control.block_on(async {
        // A commit that was cut off may still be on its way.
        sleep(Duration::from_millis(200)).await;
        let audit = async {
            let wrong = shared.ledger.audit(&target, config.seed, &entries).await?;
            shared.ledger.remove(&target).await.map(|()| wrong)
        };
        let impossible = |why: String| Violation {
            kind: Kind::Ledger,
            client: 0,
            detail: format!("audit impossible: {why}"),
        };
        let wrong = match timeout(config.silence_limit(), audit).await {
            Ok(Ok(wrong)) => wrong,
            // A pooler that cannot do this any more has failed too; what was found before must not get lost.
            Ok(Err(lost)) => vec![impossible(lost.to_string())],
            Err(_) => vec![impossible("no answer".into())],
        };
        lock(&shared.violations).extend(wrong);
    });

    let mut report = Report {
        transactions: shared.transactions.load(Ordering::Relaxed),
        elapsed,
        traffic: values(&shared.traffic),
        faults: values(&shared.faults),
        logins: shared.logins.load(Ordering::Relaxed),
        refusals: shared.refusals.load(Ordering::Relaxed),
        late_cancels: shared.late_cancels.load(Ordering::Relaxed),
        audited: audited as u64,
        observed,
        violations: std::mem::take(&mut *lock(&shared.violations)),
        unmet: Vec::new(),
    };
    report.judge(&config);
    Ok(report)
}

async fn progress(config: &Config, shared: &Shared) {
    let begin = Instant::now();
    let mut next = Duration::from_secs(config.progress);
    while !shared.is_over() {
        sleep(Duration::from_millis(50)).await;
        if config.progress > 0 && begin.elapsed() >= next {
            next += Duration::from_secs(config.progress);
            let done = shared.transactions.load(Ordering::Relaxed);
            let rate = done as f64 / begin.elapsed().as_secs_f64();
            let faults = values(&shared.faults).iter().sum::<u64>();
            let violations = lock(&shared.violations).len();
            eprintln!("{done} transactions, {rate:.0}/s, {faults} faults, {violations} violations");
        }
    }
}

/// A client's life: log in, play, make faults, log in again.
async fn live(mut client: Client) {
    let (config, shared) = (Arc::clone(&client.config), Arc::clone(&client.shared));
    while !shared.is_over() {
        let Some(connection) = connect(&mut client).await else { break };
        count(&shared.connected);
        match session(&mut client, connection).await {
            Ok(()) => {}
            Err(Stop::LateCancel) => count(&shared.late_cancels),
            Err(Stop::Violation(violation)) => shared.report_violation(violation),
            Err(Stop::Lost(lost)) => {
                let kind = if matches!(lost, Lost::Protocol(_)) { Kind::Protocol } else { Kind::Closed };
                shared.report_violation(Violation { kind, client: client.id, detail: lost.to_string() });
            }
        }
        shared.connected.fetch_sub(1, Ordering::Relaxed);
        if config.pool_mode == PoolMode::Session {
            sleep(RETRY).await;
        }
    }
    lock(&shared.entries).insert(client.id, std::mem::take(&mut client.entries));
}

/// Logs in, again and again if refused: a server that has just lost many clients may be full for a moment.
async fn connect(client: &mut Client) -> Option<Connection> {
    let target = client.config.target();
    let name = client.application_name();
    let deadline = Instant::now() + client.config.silence_limit();
    client.statements = [None; STATEMENT_NAMES];
    client.cancel_pending = false;
    loop {
        let limit = client.config.silence_limit();
        let lost = match timeout(limit, Connection::connect(&target, &name)).await {
            Ok(Ok(connection)) => {
                count(&client.shared.logins);
                return Some(connection);
            }
            Ok(Err(lost)) => lost.to_string(),
            Err(_) => "no answer".into(),
        };
        if client.shared.is_over() {
            return None;
        }
        count(&client.shared.refusals);
        if Instant::now() > deadline {
            let detail = format!("no login within {limit:?}: {lost}");
            client.shared.report_violation(Violation { kind: Kind::Silence, client: client.id, detail });
            return None;
        }
        sleep(RETRY).await;
    }
}

/// One connection, until it is used up.
async fn session(client: &mut Client, mut connection: Connection) -> Result<(), Stop> {
    let (config, shared) = (Arc::clone(&client.config), Arc::clone(&client.shared));
    let id = client.id;
    // Each answer has its time, not the scenario: on a busy machine twenty round trips take longer than one may, and nobody is silent.
    let told = |stop: Stop, what: &str| match stop {
        Stop::Lost(lost @ Lost::Silent(_)) => {
            Violation { kind: Kind::Silence, client: id, detail: format!("{lost}: {what}") }.into()
        }
        other => other,
    };
    let mut scenarios = 0;
    while !shared.is_over() {
        if let Some(kind) = shared.due_fault(&config) {
            let made = faults::make(client, connection, kind).await;
            let left = made.map_err(|stop| told(stop, kind.name()))?;
            count(&shared.faults[kind as usize]);
            match left {
                Some(left) => connection = left,
                None => return Ok(()),
            }
        }
        let kind = TrafficKind::choose(&config, &mut client.rng);
        let played = traffic::play(client, &mut connection, kind).await;
        let transactions = played.map_err(|stop| told(stop, kind.name()))?;
        // An answer that was not cancelled: the request that might have hit it is spent.
        client.cancel_pending = false;
        count(&shared.traffic[kind as usize]);
        shared.done(&config, transactions);
        scenarios += 1;
        let enough = config.pool_mode == PoolMode::Session && scenarios >= SESSION_SCENARIOS;
        if enough || client.rng.random_ratio(1, 2000) {
            break;
        }
    }
    connection.terminate().await;
    Ok(())
}
