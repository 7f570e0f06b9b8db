// SPDX-License-Identifier: Apache-2.0
//! The ways in which a client misbehaves, gives up or disappears. Each is one client's own affair: no other may notice.
//!
//! A fault takes the connection and gives it back if it is still good.

use std::time::Duration;

use rand::Rng;
use tokio::time::{sleep, timeout};

use crate::batch::Batch;
use crate::client::{Checked, Client, QUERY_CANCELED, Rows, Stop};
use crate::config::{Config, PoolMode};
use crate::connection::{Connection, Lost, cancel};
use crate::traffic::{command, kinds};

kinds! {
    /// A fault that the checker makes.
    FaultKind {
        /// FIN while a statement runs.
        FinMidStatement = "FIN during a statement",
        /// RST while a statement runs.
        ResetMidStatement = "RST during a statement",
        /// FIN of our sending side only; what still comes must be ours.
        HalfClose = "half-close",
        /// Half a message, then FIN or RST.
        TornMessage = "torn message",
        /// Gone in a transaction block.
        IdleInTransaction = "gone in a transaction",
        /// Gone while the answer to `commit` is on its way.
        CommitCut = "gone during commit",
        /// Gone in the middle of COPY FROM STDIN.
        CopyInCut = "gone during copy in",
        /// COPY FROM STDIN that PostgreSQL refuses after it has asked for the data, with a Sync ahead of that; gone at once, or not.
        CopyRefused = "refused copy in",
        /// Gone in the middle of COPY TO STDOUT.
        CopyOutCut = "gone during copy out",
        /// Gone with many Syncs outstanding.
        PipelineCut = "gone during a pipeline",
        /// Does not read for a while.
        SlowReader = "slow reader",
        /// Waits no longer for a slow statement.
        GivesUp = "client-side timeout",
        /// CancelRequest for a running statement.
        Cancel = "cancel",
        /// CancelRequest for a statement that is about to end.
        LateCancel = "late cancel",
        /// CancelRequest with a wrong key.
        ForgedCancel = "forged cancel",
        /// statement_timeout fires.
        StatementTimeout = "statement_timeout",
        /// idle_in_transaction_session_timeout ends the server.
        SessionTimeout = "idle_in_transaction timeout",
        /// The server is terminated by the client's own statement.
        Terminated = "server terminated",
        /// Gone in the middle of the login.
        HalfLogin = "half a login",
    }
}

impl FaultKind {
    /// Whether it makes sense, and is wanted, under this configuration.
    pub fn possible(self, config: &Config) -> bool {
        let wanted = config.only_fault.is_empty() || config.only_fault.contains(&self);
        if !wanted || config.skip_fault.contains(&self) {
            return false;
        }
        match self {
            Self::IdleInTransaction
            | Self::CommitCut
            | Self::CopyInCut
            | Self::StatementTimeout
            | Self::SessionTimeout => config.pool_mode != PoolMode::Statement,
            _ => true,
        }
    }
}

/// Makes one fault.
pub(crate) async fn make(
    client: &mut Client,
    connection: Connection,
    kind: FaultKind,
) -> Checked<Option<Connection>> {
    match kind {
        FaultKind::FinMidStatement | FaultKind::ResetMidStatement => {
            mid_statement(client, connection, kind == FaultKind::ResetMidStatement).await
        }
        FaultKind::HalfClose => half_close(client, connection).await,
        FaultKind::TornMessage => torn_message(client, connection).await,
        FaultKind::IdleInTransaction => idle_in_transaction(client, connection).await,
        FaultKind::CommitCut => commit_cut(client, connection).await,
        FaultKind::CopyInCut => copy_in_cut(client, connection).await,
        FaultKind::CopyRefused => copy_refused(client, connection).await,
        FaultKind::CopyOutCut => copy_out_cut(client, connection).await,
        FaultKind::PipelineCut => pipeline_cut(client, connection).await,
        FaultKind::SlowReader => slow_reader(client, connection).await,
        FaultKind::GivesUp => gives_up(client, connection).await,
        FaultKind::Cancel => cancel_running(client, connection).await,
        FaultKind::LateCancel => late_cancel(client, connection).await,
        FaultKind::ForgedCancel => forged_cancel(client, connection).await,
        FaultKind::StatementTimeout => statement_timeout(client, connection).await,
        FaultKind::SessionTimeout => session_timeout(client, connection).await,
        FaultKind::Terminated => terminated(client, connection).await,
        FaultKind::HalfLogin => half_login(client, connection).await,
    }
}

/// Closes with FIN or RST, as it comes.
fn leave(client: &mut Client, connection: Connection) -> Checked<Option<Connection>> {
    if client.rng.random_ratio(1, 2) {
        connection.reset();
    }
    Ok(None)
}

fn some_rows(client: &mut Client, repeat: u32) -> Rows {
    let count = client.rng.random_range(2..30);
    client.new_rows(count, repeat)
}

async fn mid_statement(
    client: &mut Client,
    mut connection: Connection,
    reset: bool,
) -> Checked<Option<Connection>> {
    let rows = some_rows(client, 20);
    connection.send(&Batch::new().query(&rows.sql())).await?;
    // From "before the pooler has seen it" to "while the answer comes".
    sleep(Duration::from_micros(client.rng.random_range(0..3000))).await;
    if reset {
        connection.reset();
    }
    Ok(None)
}

async fn half_close(client: &mut Client, mut connection: Connection) -> Checked<Option<Connection>> {
    let rows = some_rows(client, 0);
    connection.send(&Batch::new().query(&rows.sql())).await?;
    connection.half_close().await?;
    // The peer may answer or leave; a part of our own answer in order is all that may come.
    match own_answer(client, &mut connection, rows).await {
        Err(silent @ Stop::Lost(Lost::Silent(_))) => Err(silent),
        Ok(()) | Err(Stop::Lost(_)) => Ok(None),
        Err(stop) => Err(stop),
    }
}

async fn own_answer(client: &mut Client, connection: &mut Connection, rows: Rows) -> Checked {
    client.expect(connection, b"T").await?;
    client.rows(connection, rows).await?;
    client.expect(connection, b"C").await?;
    client.ready(connection, b'I').await
}

async fn torn_message(client: &mut Client, mut connection: Connection) -> Checked<Option<Connection>> {
    let rows = some_rows(client, 0);
    let batch = Batch::new().query("select 1").query(&rows.sql());
    let cut = client.rng.random_range(1..batch.as_bytes().len());
    connection.send_bytes(&batch.as_bytes()[..cut]).await?;
    sleep(Duration::from_micros(client.rng.random_range(0..1000))).await;
    leave(client, connection)
}

async fn idle_in_transaction(client: &mut Client, mut connection: Connection) -> Checked<Option<Connection>> {
    let owner = client.owner();
    command(client, &mut connection, "begin", b'T').await?;
    command(client, &mut connection, &format!("set local underpass.owner = '{owner}'"), b'T').await?;
    // Must never be found by the audit.
    let insert = client.shared.ledger.insert(owner);
    command(client, &mut connection, &insert, b'T').await?;
    leave(client, connection)
}

async fn commit_cut(client: &mut Client, mut connection: Connection) -> Checked<Option<Connection>> {
    let owner = client.owner();
    let insert = client.shared.ledger.insert_uncertain(owner);
    command(client, &mut connection, "begin", b'T').await?;
    command(client, &mut connection, &insert, b'T').await?;
    client.entries.uncertain.push(owner.sequence);
    connection.send(&Batch::new().query("commit")).await?;
    leave(client, connection)
}

async fn copy_in_cut(client: &mut Client, mut connection: Connection) -> Checked<Option<Connection>> {
    let ledger_copy = client.shared.ledger.copy_in();
    command(client, &mut connection, "begin", b'T').await?;
    connection.send(&Batch::new().query(&ledger_copy)).await?;
    client.expect(&mut connection, b"G").await?;
    for _ in 0..client.rng.random_range(1..5) {
        let owner = client.owner();
        let line = client.shared.ledger.copy_line(owner);
        connection.send(&Batch::new().copy_data(&line)).await?;
    }
    leave(client, connection)
}

/// Into a view, which is found out behind CopyInResponse. The Sync that went ahead is then answered, and not ignored as in a COPY that reads.
async fn copy_refused(client: &mut Client, mut connection: Connection) -> Checked<Option<Connection>> {
    connection.send(&Batch::new().extended("copy pg_catalog.pg_user from stdin", &[]).sync()).await?;
    if client.rng.random_ratio(1, 2) {
        sleep(Duration::from_micros(client.rng.random_range(0..1000))).await;
        return leave(client, connection);
    }
    client.expect(&mut connection, b"12nG").await?;
    // wrong_object_type
    client.error(&mut connection, "42809", None).await?;
    client.ready(&mut connection, b'I').await?;
    Ok(Some(connection))
}

async fn copy_out_cut(client: &mut Client, mut connection: Connection) -> Checked<Option<Connection>> {
    let rows = client.new_rows(2000, 10);
    connection.send(&Batch::new().query(&format!("copy ({}) to stdout", rows.sql()))).await?;
    client.expect(&mut connection, b"H").await?;
    for index in 1..client.rng.random_range(1..100) {
        client.copy_row(&mut connection, rows, index).await?;
    }
    leave(client, connection)
}

async fn pipeline_cut(client: &mut Client, mut connection: Connection) -> Checked<Option<Connection>> {
    let first = some_rows(client, 0);
    let mut batch = Batch::new().extended(&first.sql(), &[]).sync();
    for _ in 0..client.rng.random_range(1..20) {
        let rows = some_rows(client, 0);
        batch = batch.extended(&rows.sql(), &[]).sync();
    }
    connection.send(&batch).await?;
    client.expect(&mut connection, b"12T").await?;
    client.rows(&mut connection, first).await?;
    leave(client, connection)
}

async fn slow_reader(client: &mut Client, mut connection: Connection) -> Checked<Option<Connection>> {
    // About 3 MB: more than the socket buffers on the way hold.
    let rows = client.new_rows(100, 2000);
    connection.send(&Batch::new().query(&rows.sql())).await?;
    sleep(Duration::from_millis(20)).await;
    own_answer(client, &mut connection, rows).await?;
    Ok(Some(connection))
}

async fn gives_up(client: &mut Client, mut connection: Connection) -> Checked<Option<Connection>> {
    let owner = client.owner();
    let sql = format!("select '{owner}/1' from pg_sleep(0.03)");
    connection.send(&Batch::new().query(&sql)).await?;
    let limit = Duration::from_millis(client.rng.random_range(1..15));
    let _ = timeout(limit, connection.next()).await;
    leave(client, connection)
}

async fn cancel_running(client: &mut Client, mut connection: Connection) -> Checked<Option<Connection>> {
    let rows = client.new_rows(1, 0);
    connection.send(&Batch::new().query(&format!("{} from pg_sleep(10)", rows.sql()))).await?;
    client.cancel_pending = true;
    let (target, key) = (client.config.target(), connection.key());
    loop {
        match timeout(Duration::from_millis(50), client.message(&mut connection)).await {
            // A request that arrives before the statement has a server is dropped, so it is repeated.
            Err(_elapsed) => cancel(&target, &key).await?,
            Ok(Ok(b'T')) => {}
            Ok(Ok(b'E')) if connection.field(b'C') == QUERY_CANCELED => break,
            Ok(Ok(tag)) => return Err(client.unexpected(&connection, 'E', tag)),
            Ok(Err(stop)) => return Err(stop),
        }
    }
    client.ready(&mut connection, b'I').await?;
    Ok(Some(connection))
}

async fn late_cancel(client: &mut Client, mut connection: Connection) -> Checked<Option<Connection>> {
    let rows = some_rows(client, 0);
    let (target, key) = (client.config.target(), connection.key());
    connection.send(&Batch::new().query(&rows.sql())).await?;
    client.cancel_pending = true;
    let (sent, answer) = tokio::join!(cancel(&target, &key), async {
        own_answer(client, &mut connection, rows).await.map(|()| connection)
    });
    sent?;
    match answer {
        Ok(connection) => Ok(Some(connection)),
        // Cancelled in time after all; whether rows came before it tells nothing.
        Err(Stop::LateCancel) => Ok(None),
        Err(stop) => Err(stop),
    }
}

async fn forged_cancel(client: &mut Client, mut connection: Connection) -> Checked<Option<Connection>> {
    let mut key = connection.key();
    // The right process identifier and a secret that is wrong in one bit: must not be felt even by ourselves.
    if let Some(last) = key.last_mut() {
        *last ^= 1;
    }
    let rows = some_rows(client, 20);
    connection.send(&Batch::new().query(&rows.sql())).await?;
    cancel(&client.config.target(), &key).await?;
    own_answer(client, &mut connection, rows).await?;
    Ok(Some(connection))
}

async fn statement_timeout(client: &mut Client, mut connection: Connection) -> Checked<Option<Connection>> {
    command(client, &mut connection, "begin", b'T').await?;
    command(client, &mut connection, "set local statement_timeout = 5", b'T').await?;
    connection.send(&Batch::new().query("select pg_sleep(10)")).await?;
    client.error(&mut connection, QUERY_CANCELED, None).await?;
    client.ready(&mut connection, b'E').await?;
    command(client, &mut connection, "rollback", b'I').await?;
    Ok(Some(connection))
}

async fn session_timeout(client: &mut Client, mut connection: Connection) -> Checked<Option<Connection>> {
    command(client, &mut connection, "begin", b'T').await?;
    let set = "set local idle_in_transaction_session_timeout = 5";
    command(client, &mut connection, set, b'T').await?;
    until_closed(client, connection).await
}

async fn terminated(client: &mut Client, mut connection: Connection) -> Checked<Option<Connection>> {
    connection.send(&Batch::new().query("select pg_terminate_backend(pg_backend_pid())")).await?;
    until_closed(client, connection).await
}

/// Our server is gone: an error, then the end of the stream; nothing else and nobody else's. The statement that ended it may
/// have had its own answer before.
async fn until_closed(client: &mut Client, mut connection: Connection) -> Checked<Option<Connection>> {
    loop {
        match client.message(&mut connection).await {
            Ok(b'T' | b'C' | b'E') => {}
            Ok(b'D') if connection.column() == Some(b"t") => {}
            Ok(tag) => return Err(client.unexpected(&connection, 'E', tag)),
            Err(Stop::Lost(Lost::Closed | Lost::Io(_))) => return Ok(None),
            Err(stop) => return Err(stop),
        }
    }
}

async fn half_login(client: &mut Client, connection: Connection) -> Checked<Option<Connection>> {
    let target = client.config.target();
    let mut other = Connection::open(&target).await?;
    let batch = Batch::new().startup(&[("user", &target.user), ("database", &target.database)]);
    let cut = client.rng.random_range(0..=batch.as_bytes().len());
    other.send_bytes(&batch.as_bytes()[..cut]).await?;
    if client.rng.random_ratio(1, 2) {
        other.reset();
    }
    Ok(Some(connection))
}
