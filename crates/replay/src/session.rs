// SPDX-License-Identifier: Apache-2.0
//! Plays one session: its units in their order, at their time, each compared to nothing yet.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use underpass_mysql::exchange::Exchange;
use underpass_trace::Protocol;
use underpass_wire::backend::{Fields, Message, TransactionStatus};
use underpass_wire::frontend::build;
use underpass_wire::tag::{backend as tag, frontend as frontend_tag};

use crate::connection::{Connection, set_session_authorization};
use crate::error::ConnectError;
use crate::mysql::resets_session;
use crate::outcome::{Actual, Sending, SessionOutcome, UnitOutcome};
use crate::plan::{Barrier, End, Messages, Rows, Says, Session, Step, Tag, Unit};
use crate::rowhash::RowHash;
use crate::run::{Pace, Run, Stop};

/// A connection that is not made by then is none.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);
/// Longer is not waited for a server that is to be left: the request to cancel what it does, and Terminate.
const GOODBYE_LIMIT: Duration = Duration::from_secs(2);
/// What is said to a server that wants data of a COPY which the trace does not have.
const NO_COPY_DATA: &str = "the replay has no data for this COPY";
/// Why a session is given up whose server skipped more than one unit, or took the Sync of another for that of the first.
const SKIPPED: &str = "a request without Sync failed here, and the server skips what was sent behind it";
/// What a server tells of the user as whom the session runs.
const SESSION_USER: &[u8] = b"session_authorization";
/// A Sync message. Neither a Query nor a FunctionCall ends in these bytes: with a zero the one, with a format code the other.
const SYNC: [u8; 5] = [frontend_tag::SYNC, 0, 0, 0, 4];
/// Below this a wait for commits was none.
const ORDER_WAIT_MIN: Duration = Duration::from_micros(100);
/// Error messages are cut to this many characters.
pub(crate) const MESSAGE_CHARS_MAX: usize = 300;

/// Plays a session to its end, or until it breaks or the replay is stopped.
pub(crate) async fn play(run: &Run, messages: &Messages, session: &Session) -> SessionOutcome {
    let _over = Over { run, session };
    let mut player = Player {
        run,
        messages,
        session,
        rows: run.options.rows,
        flights: VecDeque::new(),
        done: 0,
        last_ready: None,
        last_sent: None,
        become_user: None,
        login_user: String::new(),
        status: None,
        mysql_status: TransactionStatus::Idle,
        reset: false,
        cancelling: None,
        ready_again: false,
        outcome: SessionOutcome {
            units: vec![UnitOutcome::NotSent; session.units.len()],
            ..Default::default()
        },
    };
    let result = player.play().await;
    player.end(result);
    player.outcome
}

/// Says in the end that a session and its commits are over, also where a bug ends its task: nobody must wait for what will not come.
struct Over<'r> {
    run: &'r Run,
    session: &'r Session,
}

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.session.units.iter().for_each(|unit| self.run.commit_over(unit));
        self.run.session_over(self.session);
    }
}

/// A unit that was sent, or is being sent.
pub(crate) struct Flight {
    pub unit: usize,
    pub sending: Sending,
    /// Answers that the server owes (extended protocol).
    owed: usize,
    /// CopyInResponses, or wishes for a local file, that no data has answered yet.
    pub copy_in: usize,
    /// Number of the packet in which the local file goes on.
    pub file_sequence: u8,
    /// Nothing of it is left to send.
    pub sent_all: bool,
    /// Where its answer ends, in MySQL's protocol.
    pub exchange: Exchange,
    /// An error: the server skips to Sync.
    pub failed: bool,
    /// A COPY of it was ended, because there are no data: the error that follows is ours.
    copy_given_up: bool,
    /// How often ReadyForQuery has been asked for: a second time where a Sync came ahead of the data of a COPY.
    asked: u16,
    /// One of these was by Sync.
    syncs: bool,
    /// An error ended a request of the extended protocol: the server skips everything to Sync, a Query too.
    skips: bool,
    /// It is a Sync alone, the only unit that ReadyForQuery and nothing else may answer.
    is_sync: bool,
    /// The server has said something to it.
    is_heard: bool,
    /// When the client asks to cancel it.
    cancel_at: Option<Instant>,
    pub rows: u64,
    pub hash: Option<RowHash>,
}

impl Flight {
    /// Its Query, or its FunctionCall, is skipped as well, and no Sync follows in it: nothing ends its answer.
    fn is_skipped(&self) -> bool {
        self.skips && !self.syncs
    }
}

pub(crate) struct Player<'r> {
    pub run: &'r Run,
    messages: &'r Messages,
    pub session: &'r Session,
    rows: Rows,
    /// Units that are not answered, oldest first.
    pub flights: VecDeque<Flight>,
    /// Units before this index are answered or not sent at all.
    done: usize,
    /// When the last answer came.
    last_ready: Option<Instant>,
    /// When the last unit was sent.
    last_sent: Option<Instant>,
    /// As whom it runs, if that is another than who logs in.
    become_user: Option<String>,
    /// Who logs in.
    login_user: String,
    /// The transaction status after the last answer.
    status: Option<TransactionStatus>,
    /// The transaction status, in MySQL's protocol: an error leaves it.
    pub mysql_status: TransactionStatus,
    /// What we made of the session was undone: a statement made it the login user's again, or a command of MySQL's lets it write.
    pub reset: bool,
    /// A CancelRequest that is under way. Nothing may be sent before the server has passed it on, or it may hit that.
    cancelling: Option<JoinHandle<()>>,
    /// A COPY failed, and it is not known whether before it had read the Sync ahead of its data: then that is answered, too.
    ready_again: bool,
    outcome: SessionOutcome,
}

/// Why a session ends early.
pub(crate) enum Break {
    /// The connection.
    Lost(String),
    /// Somebody stopped the replay.
    Stopped,
}

impl From<std::io::Error> for Break {
    fn from(error: std::io::Error) -> Self {
        Self::Lost(error.to_string())
    }
}

impl From<ConnectError> for Break {
    fn from(error: ConnectError) -> Self {
        Self::Lost(error.to_string())
    }
}

impl Player<'_> {
    async fn play(&mut self) -> Result<(), Break> {
        let run = self.run;
        run.wait_start(self.session).await?;
        let mut connection = run.unless_now(self.connect()).await??;
        run.sessions_open(1);
        let units = run.unless_now(self.units(&mut connection)).await;
        let mut result = units.unwrap_or_else(|stop| Err(stop.into()));
        if result.is_ok() {
            result = run.wait_end(self.session, self.last_ready).await.map_err(Break::from);
        }
        run.sessions_open(-1);
        // A server that does not listen any more need not hear it.
        if !self.flights.is_empty() && run.stop() == Stop::Now && connection.mysql.is_none() {
            // What was stopped at once must not go on at the server. If that fails, it ends by itself.
            let request = crate::connection::cancel(&run.target, &connection.cancel);
            let _ = tokio::time::timeout(GOODBYE_LIMIT, request).await;
        }
        // Behind half of a message it would be taken for a part of it: the end of the connection says enough.
        let between_messages = self.flights.iter().all(|flight| flight.sent_all);
        if between_messages && !matches!(result, Err(Break::Lost(_))) {
            let _ = tokio::time::timeout(GOODBYE_LIMIT, connection.terminate()).await;
        }
        result
    }

    async fn connect(&mut self) -> Result<Connection, Break> {
        let session = self.session;
        let login = self.run.target.login(session.user.as_deref(), session.database.as_deref());
        let mut parameters: Vec<(&[u8], &[u8])> = Vec::new();
        if let Some(name) = &session.application_name {
            parameters.push((b"application_name", name));
        }
        parameters.extend(session.parameters.iter().map(|(name, value)| (&name[..], &value[..])));
        let is_mysql = self.run.target.protocol == Protocol::Mysql;
        if self.run.options.read_only && !is_mysql {
            parameters.retain(|(name, _)| *name != b"default_transaction_read_only");
            parameters.push((b"default_transaction_read_only", b"on"));
        }
        let opening = Connection::open(&self.run.target, &login, &parameters);
        let mut connection = tokio::time::timeout(CONNECT_LIMIT, opening)
            .await
            .map_err(|_| Break::Lost(format!("no login within {} s", CONNECT_LIMIT.as_secs())))??;
        for parse in &session.prepared {
            let mut messages = parse.clone();
            build::sync(&mut messages);
            if let Err(error) = connection.exchange(&messages).await {
                self.outcome.prepare_errors.push(error.to_string());
            }
        }
        for (&captured, text) in &session.statements {
            match connection.prepare(text).await {
                Ok(number) => connection.number(captured, number),
                Err(error) => self.outcome.prepare_errors.push(error.to_string()),
            }
        }
        if is_mysql {
            if self.run.options.read_only {
                connection.refuse_writes().await?;
            }
            return Ok(connection);
        }
        self.become_user = login.become_user;
        self.login_user = login.user;
        Ok(connection)
    }

    async fn units(&mut self, connection: &mut Connection) -> Result<(), Break> {
        let (run, session) = (self.run, self.session);
        for (index, unit) in session.units.iter().enumerate() {
            if unit.omitted.is_some() {
                if self.flights.is_empty() {
                    self.done = self.done.max(index + 1);
                }
                continue;
            }
            while self.done < unit.after as usize && !self.flights.is_empty() {
                self.receive(connection).await?;
            }
            if self.run.stop() >= Stop::Finish {
                break;
            }
            let is_user_undone =
                |flight: &Flight| self.become_user.is_some() && session.resets.contains(&flight.unit);
            let may_write_again =
                |flight: &Flight| run.options.read_only && resets_session(flight.exchange.command());
            let undoes = |flight: &Flight| is_user_undone(flight) || may_write_again(flight);
            if self.reset || self.flights.iter().any(undoes) {
                while !self.flights.is_empty() {
                    self.receive(connection).await?;
                }
            }
            // In a transaction that failed the server would refuse to, and refuses all that could do harm.
            if self.reset && self.status != Some(TransactionStatus::Failed) {
                self.reset = false;
                if connection.mysql.is_some() {
                    connection.refuse_writes().await?;
                } else if let Some(user) = &self.become_user {
                    connection.query(&set_session_authorization(user)).await?;
                }
            }
            // Ahead of its moment: what the system has to fetch from the disk makes nothing late.
            let first = session.steps[unit.steps()].first().map(|step| self.read(step)).transpose()?;
            let flight = match self.wait(index, unit, connection).await {
                // What is under way is still waited for.
                Err(Break::Stopped) if self.run.stop() == Stop::Finish => break,
                flight => flight?,
            };
            if let Some(cancelling) = self.cancelling.take() {
                let _ = cancelling.await;
            }
            self.flights.push_back(flight);
            self.send(unit, first, connection).await?;
            // What has come while it was sent is taken without waiting.
            self.take_messages(connection)?;
            self.go_on(connection).await?;
        }
        while !self.flights.is_empty() {
            self.receive(connection).await?;
        }
        if self.run.stop() >= Stop::Finish { Err(Break::Stopped) } else { Ok(()) }
    }

    /// Waits until a unit may be sent, and takes answers to earlier ones meanwhile.
    async fn wait(
        &mut self,
        index: usize,
        unit: &Unit,
        connection: &mut Connection,
    ) -> Result<Flight, Break> {
        let run = self.run;
        let arrived = Instant::now();
        let due = match run.options.pace {
            Pace::Timed => run.moment(unit.sent_ns),
            Pace::Asap => arrived,
            Pace::Think => self.after_pause(index, unit).unwrap_or(arrived),
        };
        let until = run.until(due);
        self.meanwhile(until, connection).await??;
        let paced = Instant::now();
        let mut released = false;
        if run.options.order_commit {
            let commits = run.wait_commits(unit.after_commits as usize);
            released = !self.meanwhile(commits, connection).await??;
        }
        let ordered = Instant::now();
        let order_wait =
            Some(ordered - paced).filter(|&wait| run.options.order_commit && wait > ORDER_WAIT_MIN);
        // Lateness of the timer is ours; what was waited for besides is the server's, or other sessions'.
        let free = if order_wait.is_some() { ordered } else { due.max(arrived) };
        let hash = match self.rows {
            Rows::Count => None,
            Rows::Ordered => Some(RowHash::ordered()),
            Rows::Unordered => Some(RowHash::unordered()),
        };
        Ok(Flight {
            unit: index,
            sending: Sending {
                due: run.since_start(due),
                free: run.since_start(free),
                order_wait: order_wait.unwrap_or_default(),
                released,
                ..Sending::default()
            },
            owed: 0,
            copy_in: 0,
            file_sequence: 0,
            sent_all: false,
            exchange: Exchange::new(self.session.commands.get(index).copied().unwrap_or_default()),
            failed: false,
            copy_given_up: false,
            asked: 0,
            syncs: false,
            skips: false,
            is_sync: false,
            is_heard: false,
            cancel_at: None,
            rows: 0,
            hash,
        })
    }

    /// When a client that pauses as long as at capture sends the unit.
    fn after_pause(&self, index: usize, unit: &Unit) -> Option<Instant> {
        let session = self.session;
        let previous = index.checked_sub(1).map(|at| &session.units[at]);
        let (then_ns, now) = match previous {
            None => (session.login_ns, None),
            // In a pipeline it did not wait for an answer.
            Some(previous) if (unit.after as usize) < index => (previous.sent_ns, self.last_sent),
            Some(previous) => (previous.ready_ns().unwrap_or(previous.sent_ns), self.last_ready),
        };
        let pause = self.run.scaled(unit.sent_ns.saturating_sub(then_ns));
        Some(now.unwrap_or_else(Instant::now) + pause)
    }

    /// Waits for something and takes answers to earlier units meanwhile.
    async fn meanwhile<T>(
        &mut self,
        wait: impl Future<Output = T>,
        connection: &mut Connection,
    ) -> Result<T, Break> {
        let mut wait = std::pin::pin!(wait);
        loop {
            if self.flights.is_empty() {
                return Ok(wait.await);
            }
            tokio::select! {
                biased;
                value = &mut wait => return Ok(value),
                received = self.receive(connection) => received?,
            }
        }
    }

    fn read(&self, step: &Step) -> Result<Vec<u8>, Break> {
        let bytes = self.messages.read(&step.bytes());
        bytes.map_err(|error| Break::Lost(format!("the messages of the trace cannot be read back: {error}")))
    }

    /// Sends a unit, the bytes of whose first step are at hand.
    async fn send(
        &mut self,
        unit: &Unit,
        mut first: Option<Vec<u8>>,
        connection: &mut Connection,
    ) -> Result<(), Break> {
        let now = Instant::now();
        self.last_sent = Some(now);
        if let Some(flight) = self.flights.back_mut() {
            flight.sending.sent = self.run.since_start(now);
            flight.cancel_at = self.session.cancels.get(&flight.unit).map(|&ns| now + self.run.scaled(ns));
        }
        let session = self.session;
        let closes = self.flights.back().and_then(|flight| session.closes.get(&flight.unit));
        for step in closes.into_iter().flatten() {
            let mut bytes = self.read(step)?;
            self.renumber(step, &mut bytes, connection);
            self.write(&bytes, connection).await?;
        }
        let mut wants_data = false;
        for step in &self.session.steps[unit.steps()] {
            let at_hand = first.take();
            match step.barrier {
                Barrier::None => {}
                Barrier::CopyIn => {
                    // After an error the server is ready by itself, if it was asked to be; else it waits for Sync.
                    let answers =
                        |flight: &Flight| !flight.failed || (flight.asked > 0 && !flight.is_skipped());
                    let waits = |flight: &Flight| flight.copy_in == 0 && answers(flight);
                    while self.flights.back().is_some_and(waits) {
                        self.receive(connection).await?;
                    }
                }
                Barrier::Answers => {
                    while self.flights.back().is_some_and(|flight| flight.owed > 0 && !flight.failed) {
                        self.receive(connection).await?;
                    }
                }
            }
            // The unit is over already: what the client said to a COPY that began is not wanted here.
            let Some(flight) = self.flights.back_mut() else { break };
            if step.barrier == Barrier::CopyIn {
                wants_data = flight.copy_in > 0;
                flight.copy_in = flight.copy_in.saturating_sub(1);
            }
            if step.says == Says::CopyData && !wants_data {
                continue;
            }
            flight.owed += usize::from(step.answers);
            flight.asked += u16::from(step.says == Says::Asks);
            let is_first = flight.owed == 0 && !flight.is_heard;
            let mut bytes = match at_hand {
                Some(bytes) => bytes,
                None => self.read(step)?,
            };
            if let Some(flight) = self.flights.back_mut() {
                flight.is_sync = is_first && bytes.first() == Some(&frontend_tag::SYNC);
                flight.syncs |= step.says == Says::Asks && bytes.ends_with(&SYNC);
            }
            self.renumber(step, &mut bytes, connection);
            self.write(&bytes, connection).await?;
        }
        connection.flush().await?;
        if let Some(flight) = self.flights.back_mut() {
            flight.sent_all = true;
        }
        self.go_on(connection).await
    }

    async fn write(&mut self, mut bytes: &[u8], connection: &mut Connection) -> Result<(), Break> {
        while !bytes.is_empty() {
            let done = connection.write_or_read(bytes).await?;
            bytes = &bytes[done.written..];
            self.take_messages(connection)?;
            if done.ended {
                return Err(Break::Lost("the server closed the connection".into()));
            }
        }
        Ok(())
    }

    /// Waits for bytes of the server and takes the messages in them.
    async fn receive(&mut self, connection: &mut Connection) -> Result<(), Break> {
        connection.flush().await?;
        // Of a pipeline the oldest unit is being executed.
        let cancel_at = self.flights.front().and_then(|flight| flight.cancel_at);
        let read = tokio::select! {
            biased;
            read = connection.read() => Some(read?),
            () = self.run.alarm(cancel_at) => None,
        };
        match read {
            None => self.cancel(connection),
            Some(0) => return Err(Break::Lost("the server closed the connection".into())),
            Some(_) => {
                self.take_messages(connection)?;
                self.go_on(connection).await?;
            }
        }
        Ok(())
    }

    /// Says what the server waits for, and the trace does not have.
    async fn go_on(&mut self, connection: &mut Connection) -> Result<(), Break> {
        self.end_skipping(connection).await?;
        self.end_copy(connection).await
    }

    /// The server skips to a Sync that the unit does not have: its Query was answered at capture, because what is before it had not failed.
    async fn end_skipping(&mut self, connection: &mut Connection) -> Result<(), Break> {
        let is_last = self.flights.len() == 1;
        let skipped = |flight: &&mut Flight| flight.sent_all && flight.is_skipped();
        let Some(flight) = self.flights.front_mut().filter(skipped) else { return Ok(()) };
        if !is_last {
            // It skips these as well, or takes the Sync of one of them.
            return Err(Break::Lost(SKIPPED.into()));
        }
        flight.syncs = true;
        connection.write_all(&SYNC).await?;
        Ok(())
    }

    /// The server waits for data that the trace does not have, for example because the COPY failed at capture before it wanted any: it
    /// would wait for ever, with a lock on the table.
    async fn end_copy(&mut self, connection: &mut Connection) -> Result<(), Break> {
        if connection.mysql.is_some() {
            return self.refuse_file(connection).await;
        }
        let is_last = self.flights.len() == 1;
        let wants = |flight: &&mut Flight| flight.sent_all && flight.copy_in > 0;
        let Some(flight) = self.flights.front_mut().filter(wants) else { return Ok(()) };
        if !is_last {
            // What the server took for data, or for an error in them, cannot be told.
            return Err(Break::Lost(
                "a COPY that failed at capture begins here, and takes what was sent behind it".into(),
            ));
        }
        flight.copy_in = 0;
        flight.copy_given_up = true;
        let mut messages = Vec::new();
        build::copy_fail(&mut messages, NO_COPY_DATA.as_bytes());
        if flight.owed > 0 {
            // By the extended protocol. It was waiting for data, and ignored the Sync.
            flight.asked += 1;
            build::sync(&mut messages);
        }
        connection.write_all(&messages).await?;
        Ok(())
    }

    /// Asks to cancel the unit that is being executed, as its client did.
    fn cancel(&mut self, connection: &Connection) {
        if let Some(flight) = self.flights.front_mut() {
            flight.cancel_at = None;
        }
        self.outcome.cancels += 1;
        let (target, key) = (self.run.target.clone(), connection.cancel.clone());
        self.cancelling = Some(tokio::spawn(async move {
            // If it fails, the statement ends by itself, and comes out differently.
            let request = crate::connection::cancel(&target, &key);
            let _ = tokio::time::timeout(CONNECT_LIMIT, request).await;
        }));
    }

    /// Takes all messages that were read whole.
    fn take_messages(&mut self, connection: &mut Connection) -> Result<(), Break> {
        if connection.mysql.is_some() {
            return self.take_mysql(connection);
        }
        while let Some((kind, body)) = connection.next_message()? {
            self.message(kind, body)?;
        }
        Ok(())
    }

    fn message(&mut self, kind: u8, body: &[u8]) -> Result<(), Break> {
        // These come at any time.
        if kind == tag::PARAMETER_STATUS {
            if let Ok(Message::ParameterStatus(status)) = Message::decode(kind, body)
                && status.name == SESSION_USER
            {
                self.note_user(status.value);
            }
            return Ok(());
        }
        if matches!(kind, tag::NOTICE_RESPONSE | tag::NOTIFICATION_RESPONSE) {
            return Ok(());
        }
        if self.ready_again {
            // Of the units that come after, only a Sync alone could be answered so.
            let (is_heard, is_sync) =
                self.flights.front().map_or((false, false), |f| (f.is_heard, f.is_sync));
            let is_ready = kind == tag::READY_FOR_QUERY;
            self.ready_again = is_ready && is_sync;
            if is_ready && !is_heard && !is_sync {
                return Ok(());
            }
        }
        let Some(flight) = self.flights.front_mut() else {
            // Out of a transaction a server says nothing unasked, except that it ends.
            let fields = Fields::decode(body).ok();
            let text =
                fields.and_then(Fields::message).map(|text| String::from_utf8_lossy(text).into_owned());
            return Err(Break::Lost(text.unwrap_or_else(|| "the server sent an answer to nothing".into())));
        };
        flight.is_heard = true;
        match kind {
            tag::DATA_ROW | tag::COPY_DATA => {
                flight.rows += 1;
                if let Some(hash) = &mut flight.hash {
                    hash.add(RowHash::of_row(body));
                }
            }
            tag::PARSE_COMPLETE
            | tag::BIND_COMPLETE
            | tag::CLOSE_COMPLETE
            | tag::NO_DATA
            | tag::ROW_DESCRIPTION => {
                flight.owed = flight.owed.saturating_sub(1);
            }
            tag::COPY_IN_RESPONSE => flight.copy_in += 1,
            tag::READY_FOR_QUERY => {
                let status = TransactionStatus::decode(body).map_err(|error| {
                    Break::Lost(format!("the server does not speak the protocol: {error}"))
                })?;
                // By the Sync of a later one, which came before we could say ours.
                if flight.is_skipped() {
                    return Err(Break::Lost(SKIPPED.into()));
                }
                self.ready_again |= flight.failed && flight.asked > 1;
                self.ready(status);
            }
            _ => {
                let end = match Message::decode(kind, body) {
                    Ok(Message::CommandComplete(complete)) => End::Complete(complete.tag.into()),
                    Ok(Message::FunctionCallResponse(_)) => End::Complete(Tag::new()),
                    Ok(Message::EmptyQueryResponse) => End::Empty,
                    Ok(Message::PortalSuspended) => End::Suspended,
                    Ok(Message::ErrorResponse(fields)) => {
                        flight.failed = true;
                        flight.skips |= flight.owed > 0;
                        match std::mem::take(&mut flight.copy_given_up) {
                            // It is not the server's: the COPY was under way.
                            true => End::Complete(NO_COPY_DATA.as_bytes().into()),
                            false => error_end(fields),
                        }
                    }
                    _ => return Ok(()),
                };
                flight.owed = flight.owed.saturating_sub(1);
                let hash = flight.hash.as_ref().map_or(0, RowHash::value);
                flight.sending.statements.push(Actual { end, rows: std::mem::take(&mut flight.rows), hash });
                flight.hash = flight.hash.take().map(RowHash::again);
            }
        }
        Ok(())
    }

    /// The server tells as whom the session runs. It may be the login user's again, whatever made it so: a function, for one, or a statement
    /// that was prepared before recording.
    fn note_user(&mut self, user: &[u8]) {
        let Some(become_user) = &self.become_user else { return };
        if user == self.login_user.as_bytes() {
            self.reset = true;
        } else if user == become_user.as_bytes() {
            self.reset = false;
        }
    }

    /// The oldest unit is answered.
    pub(crate) fn ready(&mut self, status: TransactionStatus) {
        let Some(flight) = self.flights.pop_front() else { return };
        let now = Instant::now();
        self.last_ready = Some(now);
        // This makes the session the login user's again. RESET may be of anything: what it did, the server has told.
        let resets = |actual: &Actual| matches!(&actual.end, End::Complete(tag) if **tag == *b"DISCARD ALL");
        self.reset |=
            flight.sending.statements.iter().any(resets) || self.session.resets.contains(&flight.unit);
        self.status = Some(status);
        let failed = flight.sending.statements.iter().any(|actual| matches!(actual.end, End::Error(..)));
        self.run.unit_over(&self.session.units[flight.unit], failed);
        self.done = self.flights.front().map_or(flight.unit + 1, |next| next.unit);
        let statements = &mut self.outcome.statements;
        let answered = flight.sending.answered(self.run.since_start(now), status, statements);
        self.outcome.units[flight.unit] = UnitOutcome::Answered(answered);
    }

    /// Settles what was not answered.
    fn end(&mut self, result: Result<(), Break>) {
        let lost = match result {
            Err(Break::Lost(why)) => {
                self.outcome.broken = Some(why);
                true
            }
            _ => false,
        };
        for flight in std::mem::take(&mut self.flights) {
            self.outcome.units[flight.unit] = UnitOutcome::Broken;
        }
        for (unit, outcome) in self.session.units.iter().zip(&mut self.outcome.units) {
            if lost && unit.omitted.is_none() && matches!(outcome, UnitOutcome::NotSent) {
                *outcome = UnitOutcome::NoConnection;
            }
        }
    }
}

fn error_end(fields: Fields<'_>) -> End {
    let sqlstate = fields.sqlstate().map_or(*b"XX000", |state| *state.as_bytes());
    let message = String::from_utf8_lossy(fields.message().unwrap_or_default()).into_owned();
    let message: String = message.chars().take(MESSAGE_CHARS_MAX).collect();
    End::Error(sqlstate, message.into())
}

impl From<Stop> for Break {
    fn from(_: Stop) -> Self {
        Self::Stopped
    }
}
