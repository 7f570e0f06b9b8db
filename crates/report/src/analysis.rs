// SPDX-License-Identifier: Apache-2.0
//! One pass over a trace.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;
use underpass_trace::statements::{Event, Request, Statements, Transaction};
use underpass_trace::{
    ByteTotals, Clock, Counters, Damage, Direction, Error, Level, LossReason, Meta, Outcome, Reader, Record,
    SessionEnd, SessionId, SessionStart, Source, WithheldReason,
};

use crate::Fingerprints;
use crate::bins::{Bins, count, histogram};

/// Fingerprints that are told apart, 15 KB each at most; later ones count together.
const FINGERPRINTS_MAX: usize = 5_000;
/// Groups of sessions that are told apart; later ones count together.
const GROUPS_MAX: usize = 1_000;
/// Characters of an error message that are kept as an example.
const EXAMPLE_CHARS: usize = 200;

/// A server behind a pooler that recorded.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KnownServer {
    /// Where the pooler's configuration has it.
    pub address: String,
    /// Its `server_version`.
    pub version: String,
    /// Its `system_identifier`, if it said so.
    pub system_identifier: Option<String>,
}

/// What a trace says.
#[derive(Clone, Debug)]
pub struct Analysis {
    /// What the trace says about itself.
    pub meta: Meta,
    /// What of its file could not be read.
    pub damage: Damage,
    /// Records that were malformed.
    pub malformed: u64,
    /// Records that were read.
    pub records: u64,
    /// The times of the first and the last record, monotonic nanoseconds.
    pub span_ns: Option<(u64, u64)>,
    /// The first clock, which tells what these times are.
    pub clock: Option<Clock>,
    /// Requests that were answered.
    pub statements: u64,
    /// Those that ended with an error.
    pub errors: u64,
    /// Those whose text is not known: prepared before recording began. FunctionCall and Sync have none.
    pub unknown_texts: u64,
    /// Those of which nothing but their end is known.
    pub unknown_outcomes: u64,
    /// Those of these whose end was not seen either: they have no latency.
    pub unknown_ends: u64,
    /// Those whose text or parameters were redacted.
    pub redacted: u64,
    /// Latencies: from the request's last byte to its answer's, nanoseconds.
    pub latency: Histogram<u64>,
    /// Statements by fingerprint.
    pub by_fingerprint: BTreeMap<u64, Statement>,
    /// Errors by SQLSTATE.
    pub by_sqlstate: BTreeMap<String, ErrorClass>,
    /// Sessions by database, user and application name.
    pub by_group: BTreeMap<[String; 3], Group>,
    /// Sessions that began, or were joined.
    pub sessions: u64,
    /// Those that were joined in their middle.
    pub midstream: u64,
    /// Those that come from a server's log.
    pub imported: u64,
    /// Logins that failed.
    pub failed_logins: u64,
    /// Cancel requests.
    pub cancels: u64,
    /// How long sessions lasted that both began and ended in the trace, nanoseconds.
    pub session_length: Histogram<u64>,
    /// The most sessions that were open at a time.
    pub sessions_max: u64,
    /// Transaction blocks that ended, and those of them that failed.
    pub transactions: u64,
    /// Those in which a statement failed.
    pub transactions_failed: u64,
    /// Their lengths, nanoseconds.
    pub transaction_length: Histogram<u64>,
    /// Their requests.
    pub transaction_requests: Histogram<u64>,
    /// Losses: how many and how many bytes, by reason.
    pub losses: BTreeMap<LossReason, (u64, u64)>,
    /// Bytes left out on purpose, by reason.
    pub withheld: BTreeMap<&'static str, u64>,
    /// Accounts of all sessions that ended, frontend and backend.
    pub totals: [ByteTotals; 2],
    /// Sessions whose accounts do not add up.
    pub unbalanced: u64,
    /// The recorder's last accounts.
    pub counters: Option<Counters>,
    /// The servers of a trace that a pooler made, by the database as clients name it.
    pub servers: BTreeMap<String, KnownServer>,
    /// What the recorder said that is no number.
    pub notes: Vec<String>,
    pub(crate) bins: Bins,
    /// When sessions began, and when they ended: in a trace of a log, an end may come long after its time.
    begins: Vec<u64>,
    ends: Vec<u64>,
    open: foldhash::HashMap<SessionId, Open>,
}

/// Statements of one fingerprint.
#[derive(Clone, Debug)]
pub struct Statement {
    /// The text of one of them, without literals.
    pub label: String,
    /// How many.
    pub count: u64,
    /// How many ended with an error.
    pub errors: u64,
    /// Rows of all of them.
    pub rows: u64,
    /// Bytes of all their answers.
    pub bytes: u64,
    /// The sum of their latencies, nanoseconds.
    pub total_ns: u128,
    /// Latencies, nanoseconds; of all but those whose end was not seen.
    pub latency: Histogram<u32>,
}

/// Errors of one SQLSTATE.
#[derive(Clone, Debug, Default)]
pub struct ErrorClass {
    /// How many.
    pub count: u64,
    /// The message of one of them.
    pub example: String,
    /// The fingerprints that met it most lately.
    pub fingerprint: Option<u64>,
}

/// Sessions of one database, user and application name.
#[derive(Clone, Copy, Debug, Default)]
pub struct Group {
    /// Sessions.
    pub sessions: u64,
    /// Their statements.
    pub statements: u64,
    /// Their errors.
    pub errors: u64,
}

impl Statement {
    /// The mean of the latencies that are known.
    pub(crate) fn mean_ns(&self) -> u64 {
        (self.total_ns / u128::from(self.latency.len().max(1))) as u64
    }
}

#[derive(Clone, Debug)]
struct Open {
    group: [String; 3],
    start_ns: u64,
    midstream: bool,
}

impl Analysis {
    /// Reads the trace to its end. Damage is counted, malformed records are counted and passed over.
    ///
    /// # Errors
    /// When a file cannot be read, or a segment belongs to another trace.
    pub fn of(reader: &mut Reader) -> Result<Self, Error> {
        let meta = reader.meta().clone();
        let mut statements = Statements::new(meta.protocol);
        let mut fingerprints = Fingerprints::new(meta.protocol);
        let mut analysis = Self::new(meta);
        let mut events = Vec::new();
        loop {
            match reader.next() {
                Ok(Some(record)) => {
                    analysis.record(&record);
                    statements.push(&record, &mut events);
                    for event in &events {
                        analysis.event(event, &record, &mut fingerprints);
                    }
                    if let Record::SessionEnd(end) = record {
                        analysis.session_end(&end);
                    }
                }
                Ok(None) => break,
                Err(Error::Record { .. }) => analysis.malformed += 1,
                Err(error) => return Err(error),
            }
        }
        analysis.damage = reader.damage();
        let (begins, ends) = (std::mem::take(&mut analysis.begins), std::mem::take(&mut analysis.ends));
        analysis.sessions_max = most_at_a_time(begins, ends);
        Ok(analysis)
    }

    fn new(meta: Meta) -> Self {
        Self {
            meta,
            damage: Damage::default(),
            malformed: 0,
            records: 0,
            span_ns: None,
            clock: None,
            statements: 0,
            errors: 0,
            unknown_texts: 0,
            unknown_outcomes: 0,
            unknown_ends: 0,
            redacted: 0,
            latency: histogram(3),
            by_fingerprint: BTreeMap::new(),
            by_sqlstate: BTreeMap::new(),
            by_group: BTreeMap::new(),
            sessions: 0,
            midstream: 0,
            imported: 0,
            failed_logins: 0,
            cancels: 0,
            session_length: histogram(2),
            sessions_max: 0,
            transactions: 0,
            transactions_failed: 0,
            transaction_length: histogram(3),
            transaction_requests: histogram(2),
            losses: BTreeMap::new(),
            withheld: BTreeMap::new(),
            totals: [ByteTotals::default(); 2],
            unbalanced: 0,
            counters: None,
            servers: BTreeMap::new(),
            notes: Vec::new(),
            bins: Bins::new(),
            begins: Vec::new(),
            ends: Vec::new(),
            open: foldhash::HashMap::default(),
        }
    }

    fn record(&mut self, record: &Record<'_>) {
        self.records += 1;
        // The clock was read before the first record, and may be much older.
        if !matches!(record, Record::Clock(_) | Record::Counters(_) | Record::Server(_) | Record::Note(_)) {
            let now = record.time_ns();
            self.span_ns =
                Some(self.span_ns.map_or((now, now), |(first, last)| (first.min(now), last.max(now))));
        }
        match record {
            Record::SessionStart(start) => self.session_start(start),
            Record::Cancel(_) => self.cancels += 1,
            Record::Clock(clock) => self.clock = self.clock.or(Some(*clock)),
            Record::Counters(counters) => self.counters = Some(*counters),
            Record::Note(note) => self.notes.push(String::from_utf8_lossy(&note.text).into_owned()),
            Record::Server(server) => {
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                let known = KnownServer {
                    address: text(&server.address),
                    version: text(&server.version),
                    system_identifier: server.system_identifier.as_deref().map(text),
                };
                self.servers.insert(text(&server.database), known);
            }
            Record::Loss(loss) => {
                let sum = self.losses.entry(loss.reason).or_default();
                *sum = (sum.0 + 1, sum.1.saturating_add(loss.len));
                self.bins.at(loss.time_ns).lost_bytes += loss.len;
            }
            Record::Withheld(withheld) => {
                let why = match withheld.reason {
                    WithheldReason::Authentication => "logins and passwords",
                    WithheldReason::Filter => "filters",
                    WithheldReason::Replication => "replication",
                    WithheldReason::Masking => "data that cannot be masked",
                    WithheldReason::Incomplete => "messages that never ended",
                };
                *self.withheld.entry(why).or_default() += withheld.len;
            }
            _ => {}
        }
    }

    fn session_start(&mut self, start: &SessionStart<'_>) {
        self.sessions += 1;
        self.midstream += u64::from(start.midstream);
        self.imported += u64::from(start.source == Source::Import);
        self.failed_logins += u64::from(!start.midstream && start.ready_ns.is_none());
        let name = |bytes: &Option<underpass_trace::Bytes<'_>>| {
            bytes.as_ref().map_or_else(|| "?".to_owned(), |bytes| String::from_utf8_lossy(bytes).into_owned())
        };
        let mut group = [name(&start.database), name(&start.user), name(&start.application_name)];
        if self.by_group.len() >= GROUPS_MAX && !self.by_group.contains_key(&group) {
            group = ["(others)".to_owned(), String::new(), String::new()];
        }
        self.by_group.entry(group.clone()).or_default().sessions += 1;
        let open = Open { group, start_ns: start.time_ns, midstream: start.midstream };
        self.open.insert(start.session, open);
        self.begins.push(start.time_ns);
        self.bins.at(start.time_ns).sessions += 1;
    }

    fn session_end(&mut self, end: &SessionEnd) {
        let Some(open) = self.open.remove(&end.session) else { return };
        self.ends.push(end.time_ns.max(open.start_ns));
        if !open.midstream {
            count(&mut self.session_length, end.time_ns.saturating_sub(open.start_ns));
        }
        self.bins.at(end.time_ns).sessions -= 1;
        for (sum, one) in self.totals.iter_mut().zip([end.frontend, end.backend]) {
            sum.seen = sum.seen.saturating_add(one.seen);
            sum.recorded = sum.recorded.saturating_add(one.recorded);
            sum.lost = sum.lost.saturating_add(one.lost);
            sum.withheld = sum.withheld.saturating_add(one.withheld);
        }
        self.unbalanced += u64::from(!(end.frontend.add_up() && end.backend.add_up()));
    }

    fn event(&mut self, event: &Event, record: &Record<'_>, fingerprints: &mut Fingerprints) {
        match event {
            Event::Statement(statement) => {
                let seen = self.end_was_seen(statement, record);
                self.statement(statement, seen, fingerprints);
            }
            Event::Transaction(Transaction { start_ns, end_ns, requests, failed, .. }) => {
                self.transactions += 1;
                self.transactions_failed += u64::from(*failed);
                count(&mut self.transaction_length, end_ns.saturating_sub(*start_ns));
                count(&mut self.transaction_requests, *requests);
            }
        }
    }

    /// Whether the time of a statement that this record completes is its own: what is lost ends with the loss, the next answer or the session.
    /// Where a part of an Execute's answer was seen, nothing tells whether that was its end.
    fn end_was_seen(&self, one: &underpass_trace::statements::Statement, record: &Record<'_>) -> bool {
        if one.outcome != Outcome::Unknown {
            return true;
        }
        let is_answered = match record {
            Record::Ready(ready) if one.kind == Request::Simple => ready.request == one.request,
            Record::Ready(_) => true,
            _ => false,
        };
        match self.meta.level {
            Level::None => is_answered,
            _ => one.bytes > 0 && (is_answered || one.kind != Request::Simple),
        }
    }

    fn statement(
        &mut self,
        one: &underpass_trace::statements::Statement,
        end_was_seen: bool,
        fingerprints: &mut Fingerprints,
    ) {
        let latency_ns = one.end_ns.saturating_sub(one.time_ns);
        let failed = matches!(one.outcome, Outcome::Error(_));
        self.statements += 1;
        self.errors += u64::from(failed);
        let has_text = !matches!(one.kind, Request::Function | Request::Commit);
        self.unknown_texts += u64::from(one.text.is_none() && has_text);
        self.unknown_outcomes += u64::from(one.outcome == Outcome::Unknown);
        self.redacted += u64::from(one.redaction != underpass_trace::Redaction::None);
        self.unknown_ends += u64::from(!end_was_seen);
        let bin = self.bins.at(one.end_ns);
        bin.statements += 1;
        bin.errors += u64::from(failed);
        if end_was_seen {
            count(&mut bin.latency, latency_ns);
            count(&mut self.latency, latency_ns);
        }
        if let Some(group) = self.open.get(&one.session).and_then(|open| self.by_group.get_mut(&open.group)) {
            group.statements += 1;
            group.errors += u64::from(failed);
        }
        let text = one.text.as_deref();
        // No fingerprints of libpg_query in practice: 0 is of a text that is not known, 1 what came too late, 2 and 3 what has no text.
        let mut fingerprint = match one.kind {
            Request::Function => 2,
            Request::Commit => 3,
            _ => text.map_or(0, |text| fingerprints.of(text)),
        };
        if self.by_fingerprint.len() >= FINGERPRINTS_MAX && !self.by_fingerprint.contains_key(&fingerprint) {
            fingerprint = 1;
        }
        let entry = self.by_fingerprint.entry(fingerprint).or_insert_with(|| Statement {
            label: match (fingerprint, text) {
                (1, _) => format!("(more than {FINGERPRINTS_MAX} others)"),
                (2, _) => "(FunctionCall)".to_owned(),
                (3, _) => "(Sync: the commit of what ran before it)".to_owned(),
                (_, Some(text)) => fingerprints.label(text),
                (_, None) => "(prepared before recording began)".to_owned(),
            },
            count: 0,
            errors: 0,
            rows: 0,
            bytes: 0,
            total_ns: 0,
            latency: histogram(2),
        });
        entry.count += 1;
        entry.errors += u64::from(failed);
        entry.rows = entry.rows.saturating_add(one.rows);
        entry.bytes = entry.bytes.saturating_add(one.bytes);
        if end_was_seen {
            entry.total_ns += u128::from(latency_ns);
            count(&mut entry.latency, latency_ns);
        }
        if let Outcome::Error(error) = &one.outcome {
            let class =
                self.by_sqlstate.entry(String::from_utf8_lossy(&error.sqlstate).into_owned()).or_default();
            class.count += 1;
            class.fingerprint = Some(fingerprint);
            if class.example.is_empty() {
                let message = String::from_utf8_lossy(&error.message);
                class.example = message.chars().take(EXAMPLE_CHARS).collect();
            }
        }
    }

    /// Seconds from the first record to the last.
    pub fn seconds(&self) -> f64 {
        self.span_ns.map_or(0.0, |(first, last)| last.saturating_sub(first) as f64 / 1e9)
    }

    /// A monotonic time as UTC, nanoseconds since 1970; `None` without a clock in the trace.
    pub fn utc_ns(&self, time_ns: u64) -> Option<i128> {
        let clock = self.clock?;
        Some(i128::from(clock.realtime_ns) + i128::from(time_ns) - i128::from(clock.monotonic_ns))
    }

    /// Statements by the time that they took in all, most first.
    pub fn top(&self) -> Vec<(u64, &Statement)> {
        let mut all: Vec<_> =
            self.by_fingerprint.iter().map(|(print, statement)| (*print, statement)).collect();
        all.sort_by(|a, b| b.1.total_ns.cmp(&a.1.total_ns).then(a.0.cmp(&b.0)));
        all
    }

    /// Bytes that are known to be lost.
    pub fn lost_bytes(&self) -> u64 {
        self.losses.values().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// What the trace does not know or cannot vouch for, one sentence each; empty if it is whole.
    pub fn caveats(&self) -> Vec<String> {
        let mut all = Vec::new();
        let mut say = |count: u64, text: String| {
            if count > 0 {
                all.push(text);
            }
        };
        for (reason, (events, bytes)) in &self.losses {
            say(*events, format!("Lost: {bytes} bytes in {events} gaps, {}.", loss_words(*reason)));
        }
        if let Some(counters) = self.counters {
            let (seen, lost) = (counters.seen, counters.lost);
            say(
                lost.events,
                format!(
                    "The recorder counted {} of {} events as lost, {} bytes.",
                    lost.events, seen.events, lost.bytes
                ),
            );
            let accounted = counters.recorded.bytes + lost.bytes + counters.filtered.bytes;
            say(
                u64::from(accounted != seen.bytes),
                format!(
                    "The recorder's accounts do not add up: {} bytes seen, {accounted} accounted for.",
                    seen.bytes
                ),
            );
        }
        let Damage { blocks, bytes, segments, torn } = self.damage;
        say(blocks, format!("Damaged: {blocks} blocks of the file, {bytes} bytes, could not be read."));
        say(segments, format!("Missing: {segments} segments of the file."));
        say(
            u64::from(torn),
            "The trace has no regular end: the recorder was killed, or is still at work.".to_owned(),
        );
        say(self.malformed, format!("{} records could not be understood.", self.malformed));
        say(self.unbalanced, format!("The byte accounts of {} sessions do not add up.", self.unbalanced));
        say(
            self.midstream,
            format!(
                "{} of {} sessions were joined in their middle; their start is not here.",
                self.midstream, self.sessions
            ),
        );
        say(
            self.unknown_texts,
            format!(
                "{} statements have no text: they were prepared before recording began.",
                self.unknown_texts
            ),
        );
        say(
            self.unknown_outcomes,
            format!("The outcome of {} statements is not known.", self.unknown_outcomes),
        );
        say(
            self.unknown_ends,
            format!("The end of {} of these was not seen: they are in no latency.", self.unknown_ends),
        );
        say(self.redacted, format!("{} statements are redacted.", self.redacted));
        say(
            self.imported,
            format!(
                "{} sessions come from a server log, which knows neither rows nor bytes nor protocol messages.",
                self.imported
            ),
        );
        for (why, bytes) in &self.withheld {
            say(*bytes, format!("Left out on purpose: {bytes} bytes, {why}."));
        }
        for filter in &self.meta.filters {
            say(1, format!("Only a part of the traffic was recorded: {filter}."));
        }
        for note in &self.notes {
            say(1, format!("The recorder says: {note}."));
        }
        let ppm = self.meta.sample_ppm;
        say(
            u64::from(ppm < 1_000_000),
            format!("Only {} % of the sessions were recorded.", f64::from(ppm) / 1e4),
        );
        all
    }
}

/// The most sessions that were open at a time.
fn most_at_a_time(mut begins: Vec<u64>, mut ends: Vec<u64>) -> u64 {
    begins.sort_unstable();
    ends.sort_unstable();
    let (mut most, mut ended) = (0, 0);
    for (at, begin) in begins.iter().enumerate() {
        ended += ends[ended..].iter().take_while(|end| *end < begin).count();
        most = most.max(at + 1 - ended);
    }
    most as u64
}

/// What every trace leaves out, whatever it says.
pub(crate) const NEVER_RECORDED: &str = "Never recorded: statements inside functions and triggers (no client sends them), passwords, cancel keys.";

fn loss_words(reason: LossReason) -> &'static str {
    match reason {
        LossReason::RingFull => "because the ring buffer was full",
        LossReason::Fault => "because the kernel could not read them",
        LossReason::Gap => "for reasons unknown",
        LossReason::WriterQueue => "because the recorder could not keep up",
        LossReason::Resync => "because the message boundary was not known after an earlier loss",
        LossReason::Protocol => "because they did not follow the protocol",
        LossReason::Audit => "noticed by the audit at the connection's end only",
        _ => "for a reason that this version does not know",
    }
}

/// Which direction an index of [`Analysis::totals`] is.
pub(crate) const DIRECTIONS: [(Direction, &str); 2] =
    [(Direction::Frontend, "from clients"), (Direction::Backend, "to clients")];
