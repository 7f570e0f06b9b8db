// SPDX-License-Identifier: Apache-2.0
//! The shapes of the protocol. Each function runs one scenario on a connection that is idle, checks every message of the
//! answer, leaves the connection idle, and returns how many transactions it has seen through.

use std::fmt::Write as _;

use rand::Rng;
use rand::seq::IndexedRandom;

use crate::batch::Batch;
use crate::client::{Checked, Client, Rows, STATEMENT_NAMES};
use crate::config::{Config, PoolMode};
use crate::connection::Connection;
use crate::owner::Kind;

macro_rules! kinds {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
        pub enum $name { $($(#[$doc])* $variant,)+ }

        impl $name {
            /// All, in the order of their counters.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Name in the report.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }
    };
}
pub(crate) use kinds;

kinds! {
    /// A shape of the protocol.
    TrafficKind {
        /// Query with one or several rows.
        Simple = "simple",
        /// One Query with several statements.
        SimpleMulti = "simple, several statements",
        /// Parse, Bind, Describe, Execute, Sync without names.
        Extended = "extended",
        /// The same, answered by Flush before the Sync.
        Flush = "extended with Flush",
        /// Named statements that every client means differently.
        Prepared = "prepared by name",
        /// Many Syncs in one write, some of them with an error.
        Pipeline = "pipeline of Syncs",
        /// Many statements before one Sync.
        PipelineGroup = "pipeline, one Sync",
        /// Many Queries in one write.
        PipelineSimple = "pipeline of Queries",
        /// begin ... commit with a round trip each; server and settings must stay.
        Transaction = "transaction",
        /// begin ... commit in one write.
        TransactionPipelined = "transaction in one write",
        /// Rows written, committed or rolled back, audited at the end.
        Ledger = "ledger",
        /// COPY TO STDOUT.
        CopyOut = "copy out",
        /// COPY FROM STDIN by either protocol, read back, committed, rolled back or failed by CopyFail.
        CopyIn = "copy in",
        /// An error that names us.
        Error = "error",
        /// An error in a transaction block.
        ErrorInTransaction = "error in transaction",
        /// A notice that names us.
        Notice = "notice",
        /// Rows of up to 200 kB.
        LargeRows = "large rows",
        /// A named portal fetched in pieces.
        Portal = "portal with row limit",
        /// Session parameters are ours, leftovers of other clients' transactions are not there.
        State = "session state",
        /// EmptyQueryResponse.
        Empty = "empty query",
    }
}

impl TrafficKind {
    /// How often it is chosen, relative to the others; 0 if it cannot work under this configuration.
    fn weight(self, config: &Config) -> u32 {
        let transactions = config.pool_mode != PoolMode::Statement;
        match self {
            Self::Simple | Self::Extended => 20,
            Self::Prepared => 20 * u32::from(config.prepared),
            Self::Pipeline => 8,
            Self::SimpleMulti | Self::Error => 5,
            Self::PipelineGroup | Self::PipelineSimple | Self::CopyOut | Self::State => 4,
            Self::Notice | Self::Flush => 3,
            Self::LargeRows | Self::Empty => 1,
            Self::Transaction => 6 * u32::from(transactions),
            Self::TransactionPipelined => 5 * u32::from(transactions),
            Self::Ledger => 4 * u32::from(transactions),
            Self::CopyIn | Self::Portal | Self::ErrorInTransaction => 3 * u32::from(transactions),
        }
    }

    pub(crate) fn choose(config: &Config, rng: &mut impl Rng) -> Self {
        Self::ALL.choose_weighted(rng, |kind| kind.weight(config)).copied().unwrap_or(Self::Simple)
    }
}

/// Runs one scenario.
pub(crate) async fn play(
    client: &mut Client,
    connection: &mut Connection,
    kind: TrafficKind,
) -> Checked<u64> {
    match kind {
        TrafficKind::Simple => simple(client, connection).await,
        TrafficKind::SimpleMulti => simple_multi(client, connection).await,
        TrafficKind::Extended => extended(client, connection).await,
        TrafficKind::Flush => flush(client, connection).await,
        TrafficKind::Prepared => prepared(client, connection).await,
        TrafficKind::Pipeline => pipeline(client, connection).await,
        TrafficKind::PipelineGroup => pipeline_group(client, connection).await,
        TrafficKind::PipelineSimple => pipeline_simple(client, connection).await,
        TrafficKind::Transaction => transaction(client, connection).await,
        TrafficKind::TransactionPipelined => transaction_pipelined(client, connection).await,
        TrafficKind::Ledger => ledger(client, connection).await,
        TrafficKind::CopyOut => copy_out(client, connection).await,
        TrafficKind::CopyIn => copy_in(client, connection).await,
        TrafficKind::Error => error(client, connection).await,
        TrafficKind::ErrorInTransaction => error_in_transaction(client, connection).await,
        TrafficKind::Notice => notice(client, connection).await,
        TrafficKind::LargeRows => large_rows(client, connection).await,
        TrafficKind::Portal => portal(client, connection).await,
        TrafficKind::State => state(client, connection).await,
        TrafficKind::Empty => empty(client, connection).await,
    }
}

/// Mostly one row, sometimes several.
fn some_rows(client: &mut Client) -> Rows {
    let count = if client.rng.random_ratio(2, 3) { 1 } else { client.rng.random_range(2..12) };
    client.new_rows(count, 0)
}

/// Sends a command without rows and reads its answer.
pub(crate) async fn command(
    client: &mut Client,
    connection: &mut Connection,
    sql: &str,
    status: u8,
) -> Checked {
    connection.send(&Batch::new().query(sql)).await?;
    client.expect(connection, b"C").await?;
    client.ready(connection, status).await
}

async fn answer(client: &mut Client, connection: &mut Connection, before: &[u8], rows: Rows) -> Checked {
    client.expect(connection, before).await?;
    client.rows(connection, rows).await?;
    client.expect(connection, b"C").await
}

async fn simple(client: &mut Client, connection: &mut Connection) -> Checked<u64> {
    let rows = some_rows(client);
    connection.send(&Batch::new().query(&rows.sql())).await?;
    answer(client, connection, b"T", rows).await?;
    client.ready(connection, b'I').await?;
    Ok(1)
}

async fn simple_multi(client: &mut Client, connection: &mut Connection) -> Checked<u64> {
    let parts = [some_rows(client), some_rows(client), some_rows(client)];
    connection.send(&Batch::new().query(&parts.map(Rows::sql).join("; "))).await?;
    for rows in parts {
        answer(client, connection, b"T", rows).await?;
    }
    client.ready(connection, b'I').await?;
    Ok(1)
}

/// Rows whose values travel as parameters.
fn bind_rows(batch: Batch, rows: Rows) -> Batch {
    let (token, count) = (rows.owner.to_string(), rows.count.to_string());
    if rows.count == 1 {
        batch.extended("select $1::text || '/1'", &[&token])
    } else {
        batch.extended("select $1::text || '/' || i from generate_series(1, $2::int) i", &[&token, &count])
    }
}

async fn extended(client: &mut Client, connection: &mut Connection) -> Checked<u64> {
    let rows = some_rows(client);
    connection.send(&bind_rows(Batch::new(), rows).sync()).await?;
    answer(client, connection, b"12T", rows).await?;
    client.ready(connection, b'I').await?;
    Ok(1)
}

async fn flush(client: &mut Client, connection: &mut Connection) -> Checked<u64> {
    let rows = some_rows(client);
    connection.send(&bind_rows(Batch::new(), rows).flush()).await?;
    answer(client, connection, b"12T", rows).await?;
    // The answer is complete and the transaction is not: the server must not be given away here.
    connection.send(&Batch::new().sync()).await?;
    client.ready(connection, b'I').await?;
    Ok(1)
}

/// The same name means another text for each client, the same text has another name: what a pooler that renames and shares
/// statements must not mix up. The text is told by the end of each row.
async fn prepared(client: &mut Client, connection: &mut Connection) -> Checked<u64> {
    if client.rng.random_ratio(1, 400) {
        command(client, connection, "deallocate all", b'I').await?;
        client.statements = [None; STATEMENT_NAMES];
        return Ok(1);
    }
    let number = client.rng.random_range(0..STATEMENT_NAMES);
    // Kernel lanes rename names of three bytes and more: some are shorter, half are as long as drivers make them.
    let name = if number.is_multiple_of(2) { format!("s{number}") } else { format!("statement_{number}") };
    let mut batch = Batch::new();
    let mut before = Vec::new();
    if client.statements[number].is_some() && client.rng.random_ratio(1, 20) {
        batch = batch.close_statement(&name);
        before.push(b'3');
        client.statements[number] = None;
    }
    let variant = match client.statements[number] {
        Some(variant) => variant,
        None => {
            let variant = client.rng.random_range(0..60);
            batch = batch.parse(
                &name,
                &format!("select $1::text || '/' || i || '/v{variant}' from generate_series(1, $2::int) i"),
            );
            before.push(b'1');
            // A pipeline may prepare and use in one write, or wait for ParseComplete first.
            if client.rng.random_ratio(1, 2) {
                connection.send(&std::mem::take(&mut batch).sync()).await?;
                client.expect(connection, &std::mem::take(&mut before)).await?;
                client.ready(connection, b'I').await?;
            }
            variant
        }
    };
    client.statements[number] = Some(variant);
    if client.rng.random_ratio(1, 10) {
        batch = batch.describe_statement(&name);
        before.extend_from_slice(b"tT");
    }
    let rows = some_rows(client);
    batch = batch
        .bind("", &name, &[&rows.owner.to_string(), &rows.count.to_string()])
        .describe_portal()
        .execute("", 0)
        .sync();
    before.extend_from_slice(b"2T");
    connection.send(&batch).await?;
    client.expect(connection, &before).await?;
    for index in 1..=rows.count {
        let write = |out: &mut Vec<u8>| {
            rows.write(index, out);
            out.extend_from_slice(format!("/v{variant}").as_bytes());
        };
        client.row(connection, rows.owner, index, write).await?;
    }
    client.expect(connection, b"C").await?;
    client.ready(connection, b'I').await?;
    Ok(1)
}

/// A statement whose error message names its owner: 22P02, invalid text representation.
const NAMING_ERROR: &str = "select $1::text::int";

async fn pipeline(client: &mut Client, connection: &mut Connection) -> Checked<u64> {
    let depth = if client.rng.random_ratio(1, 50) { 200 } else { client.rng.random_range(2..16) };
    let mut batch = Batch::new();
    let mut steps = Vec::with_capacity(depth);
    for _ in 0..depth {
        let fails = client.rng.random_ratio(1, 10);
        let rows = some_rows(client);
        batch = if fails {
            // What follows the error up to Sync is skipped by the server.
            bind_rows(batch.extended(NAMING_ERROR, &[&rows.owner.to_string()]), rows).sync()
        } else {
            bind_rows(batch, rows).sync()
        };
        steps.push((fails, rows));
    }
    connection.send(&batch).await?;
    for (fails, rows) in steps {
        if fails {
            client.error(connection, "22P02", Some(rows.owner)).await?;
        } else {
            answer(client, connection, b"12T", rows).await?;
        }
        client.ready(connection, b'I').await?;
    }
    Ok(depth as u64)
}

async fn pipeline_group(client: &mut Client, connection: &mut Connection) -> Checked<u64> {
    let group: Vec<Rows> = (0..client.rng.random_range(2..8)).map(|_| some_rows(client)).collect();
    let batch = group.iter().fold(Batch::new(), |batch, rows| bind_rows(batch, *rows));
    connection.send(&batch.sync()).await?;
    for rows in group {
        answer(client, connection, b"12T", rows).await?;
    }
    client.ready(connection, b'I').await?;
    Ok(1)
}

async fn pipeline_simple(client: &mut Client, connection: &mut Connection) -> Checked<u64> {
    let group: Vec<Rows> = (0..client.rng.random_range(2..10)).map(|_| some_rows(client)).collect();
    let batch = group.iter().fold(Batch::new(), |batch, rows| batch.query(&rows.sql()));
    connection.send(&batch).await?;
    let count = group.len() as u64;
    for rows in group {
        answer(client, connection, b"T", rows).await?;
        client.ready(connection, b'I').await?;
    }
    Ok(count)
}

async fn transaction(client: &mut Client, connection: &mut Connection) -> Checked<u64> {
    let owner = client.owner();
    command(client, connection, "begin", b'T').await?;
    command(client, connection, &format!("set local underpass.owner = '{owner}'"), b'T').await?;
    connection.send(&Batch::new().query("select pg_backend_pid()")).await?;
    client.expect(connection, b"TD").await?;
    let pid = String::from_utf8_lossy(connection.column().unwrap_or_default()).into_owned();
    client.expect(connection, b"C").await?;
    client.ready(connection, b'T').await?;
    for _ in 0..client.rng.random_range(1..4) {
        let rows = some_rows(client);
        connection.send(&bind_rows(Batch::new(), rows).sync()).await?;
        answer(client, connection, b"12T", rows).await?;
        client.ready(connection, b'T').await?;
    }
    let check = "select current_setting('underpass.owner') || '/' || pg_backend_pid()";
    connection.send(&Batch::new().query(check)).await?;
    client.expect(connection, b"T").await?;
    client.text_row(connection, Kind::Transaction, &format!("{owner}/{pid}")).await?;
    client.expect(connection, b"C").await?;
    client.ready(connection, b'T').await?;
    let end = if client.rng.random_ratio(1, 2) { "commit" } else { "rollback" };
    command(client, connection, end, b'I').await?;
    Ok(1)
}

async fn transaction_pipelined(client: &mut Client, connection: &mut Connection) -> Checked<u64> {
    let (first, second) = (some_rows(client), some_rows(client));
    let batch = bind_rows(Batch::new().query("begin").query(&first.sql()), second).sync().query("commit");
    connection.send(&batch).await?;
    client.expect(connection, b"C").await?;
    client.ready(connection, b'T').await?;
    answer(client, connection, b"T", first).await?;
    client.ready(connection, b'T').await?;
    answer(client, connection, b"12T", second).await?;
    client.ready(connection, b'T').await?;
    client.expect(connection, b"C").await?;
    client.ready(connection, b'I').await?;
    Ok(1)
}

async fn ledger(client: &mut Client, connection: &mut Connection) -> Checked<u64> {
    let owner = client.owner();
    let insert = client.shared.ledger.insert(owner);
    command(client, connection, "begin", b'T').await?;
    command(client, connection, &insert, b'T').await?;
    if client.rng.random_ratio(1, 3) {
        command(client, connection, "rollback", b'I').await?;
    } else {
        client.entries.uncertain.push(owner.sequence);
        command(client, connection, "commit", b'I').await?;
        client.entries.uncertain.pop();
        client.entries.committed.push(owner.sequence);
    }
    Ok(1)
}

async fn copy_out(client: &mut Client, connection: &mut Connection) -> Checked<u64> {
    let count = client.rng.random_range(2..40);
    let rows = client.new_rows(count, 0);
    connection.send(&Batch::new().query(&format!("copy ({}) to stdout", rows.sql()))).await?;
    client.expect(connection, b"H").await?;
    for index in 1..=rows.count {
        client.copy_row(connection, rows, index).await?;
    }
    client.expect(connection, b"cC").await?;
    client.ready(connection, b'I').await?;
    Ok(1)
}

async fn copy_in(client: &mut Client, connection: &mut Connection) -> Checked<u64> {
    let owners: Vec<_> = (0..client.rng.random_range(2..20)).map(|_| client.owner()).collect();
    let (first, last) = (owners[0], owners[owners.len() - 1]);
    command(client, connection, "begin", b'T').await?;
    let copy = client.shared.ledger.copy_in();
    // As libpq does it: a Sync behind Execute, which PostgreSQL ignores once it reads data, and another one at the end.
    let is_extended = client.rng.random_ratio(1, 2);
    if is_extended {
        connection.send(&Batch::new().extended(&copy, &[]).sync()).await?;
        client.expect(connection, b"12nG").await?;
    } else {
        connection.send(&Batch::new().query(&copy)).await?;
        client.expect(connection, b"G").await?;
    }
    let end = |batch: Batch| if is_extended { batch.sync() } else { batch };
    let mut batch = Batch::new();
    for owner in &owners {
        batch = batch.copy_data(&client.shared.ledger.copy_line(*owner));
    }
    if client.rng.random_ratio(1, 4) {
        connection.send(&end(batch.copy_fail(&first.to_string()))).await?;
        client.error(connection, "57014", Some(first)).await?;
        client.ready(connection, b'E').await?;
        command(client, connection, "rollback", b'I').await?;
        return Ok(1);
    }
    connection.send(&end(batch.copy_done())).await?;
    client.expect(connection, b"C").await?;
    client.ready(connection, b'T').await?;
    let select = client.shared.ledger.select_between(first, last);
    connection.send(&Batch::new().query(&select)).await?;
    client.expect(connection, b"T").await?;
    for (index, owner) in owners.iter().enumerate() {
        client.row(connection, *owner, index as u32, |out| owner.write(out)).await?;
    }
    client.expect(connection, b"C").await?;
    client.ready(connection, b'T').await?;
    if client.rng.random_ratio(3, 4) {
        command(client, connection, "rollback", b'I').await?;
    } else {
        let sequences: Vec<u64> = owners.iter().map(|owner| owner.sequence).collect();
        client.entries.uncertain.extend(&sequences);
        command(client, connection, "commit", b'I').await?;
        client.entries.uncertain.truncate(client.entries.uncertain.len() - sequences.len());
        client.entries.committed.extend(sequences);
    }
    Ok(1)
}

async fn error(client: &mut Client, connection: &mut Connection) -> Checked<u64> {
    let owner = client.owner();
    let batch = if client.rng.random_ratio(1, 2) {
        Batch::new().query(&format!("select '{owner}'::int"))
    } else {
        Batch::new().extended(NAMING_ERROR, &[&owner.to_string()]).sync()
    };
    connection.send(&batch).await?;
    client.error(connection, "22P02", Some(owner)).await?;
    client.ready(connection, b'I').await?;
    Ok(1)
}

async fn error_in_transaction(client: &mut Client, connection: &mut Connection) -> Checked<u64> {
    let owner = client.owner();
    command(client, connection, "begin", b'T').await?;
    connection.send(&Batch::new().query(&format!("select '{owner}'::int"))).await?;
    client.error(connection, "22P02", Some(owner)).await?;
    client.ready(connection, b'E').await?;
    let rows = some_rows(client);
    connection.send(&Batch::new().query(&rows.sql())).await?;
    // in_failed_sql_transaction
    client.error(connection, "25P02", None).await?;
    client.ready(connection, b'E').await?;
    let end = if client.rng.random_ratio(1, 2) { "rollback" } else { "commit" };
    command(client, connection, end, b'I').await?;
    Ok(1)
}

async fn notice(client: &mut Client, connection: &mut Connection) -> Checked<u64> {
    let owner = client.owner();
    client.noticed = None;
    command(client, connection, &format!("do $$ begin raise notice '{owner}'; end $$"), b'I').await?;
    if client.noticed != Some(owner.sequence) {
        return Err(client.violation(Kind::Missing, format!("notice {owner}, got {:?}", client.noticed)));
    }
    Ok(1)
}

async fn large_rows(client: &mut Client, connection: &mut Connection) -> Checked<u64> {
    // Past the socket buffers and past any buffer of a pooler; tokens have about 16 bytes.
    let (count, repeat) = (client.rng.random_range(1..4), client.rng.random_range(500..12_000));
    let rows = client.new_rows(count, repeat);
    connection.send(&Batch::new().query(&rows.sql())).await?;
    answer(client, connection, b"T", rows).await?;
    client.ready(connection, b'I').await?;
    Ok(1)
}

async fn portal(client: &mut Client, connection: &mut Connection) -> Checked<u64> {
    let count = client.rng.random_range(4..20);
    let rows = client.new_rows(count, 0);
    let step = client.rng.random_range(1..5);
    let batch =
        Batch::new().query("begin").parse("", &rows.sql()).bind("p", "", &[]).execute("p", step).sync();
    connection.send(&batch).await?;
    client.expect(connection, b"C").await?;
    client.ready(connection, b'T').await?;
    client.expect(connection, b"12").await?;
    let mut next = 1;
    loop {
        let rest = count + 1 - next;
        client.rows_from(connection, rows, next, next + step.min(rest) - 1).await?;
        // PostgreSQL finds the end only when it looks for one row more: a full portion is always followed by another.
        client.expect(connection, if rest < step { b"C" } else { b"s" }).await?;
        client.ready(connection, b'T').await?;
        if rest < step {
            break;
        }
        next += step;
        connection.send(&Batch::new().execute("p", step).sync()).await?;
    }
    command(client, connection, "commit", b'I').await?;
    Ok(1)
}

async fn state(client: &mut Client, connection: &mut Connection) -> Checked<u64> {
    let mut sql = String::from("select current_setting('application_name')");
    // A missing_ok setting that was never set is NULL, one that was local to an ended transaction is empty.
    let _ = write!(sql, " || '/' || coalesce(current_setting('underpass.owner', true), '')");
    connection.send(&Batch::new().query(&sql)).await?;
    client.expect(connection, b"T").await?;
    let wanted = format!("{}/", client.application_name());
    client.text_row(connection, Kind::Transaction, &wanted).await?;
    client.expect(connection, b"C").await?;
    client.ready(connection, b'I').await?;
    Ok(1)
}

async fn empty(client: &mut Client, connection: &mut Connection) -> Checked<u64> {
    connection.send(&Batch::new().query("")).await?;
    client.expect(connection, b"I").await?;
    client.ready(connection, b'I').await?;
    Ok(1)
}
