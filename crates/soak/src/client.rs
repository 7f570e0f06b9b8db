// SPDX-License-Identifier: Apache-2.0
//! A soak client: its identity, what it expects next, and the strict reading of answers.
//!
//! Nothing is skipped while reading: each message must be the one that the protocol and the statement call for. The only
//! messages allowed at any time are those that PostgreSQL may send at any time: NoticeResponse and ParameterStatus, and of
//! these a notice must not name somebody else.

use std::sync::Arc;

use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::config::Config;
use crate::connection::{Connection, Lost};
use crate::ledger::Entries;
use crate::owner::{Kind, Owner, Violation, classify, short};
use crate::run::Shared;

/// SQLSTATE query_canceled, of a CancelRequest and of statement_timeout alike.
pub(crate) const QUERY_CANCELED: &str = "57014";

/// Names of prepared statements that each client uses; every client means another text by them.
pub(crate) const STATEMENT_NAMES: usize = 20;

/// Why a scenario ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Stop {
    #[error(transparent)]
    Violation(#[from] Violation),
    #[error(transparent)]
    Lost(#[from] Lost),
    /// Our own cancel request came late and hit our own next statement, which the protocol cannot exclude (PostgreSQL
    /// manual, "Canceling Requests in Progress").
    #[error("late cancel of our own")]
    LateCancel,
}

pub(crate) type Checked<T = ()> = Result<T, Stop>;

pub(crate) struct Client {
    pub(crate) id: u32,
    pub(crate) config: Arc<Config>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) rng: StdRng,
    pub(crate) entries: Entries,
    /// Which text each statement name stands for on the present connection.
    pub(crate) statements: [Option<u32>; STATEMENT_NAMES],
    /// A cancel request of ours may still be on its way.
    pub(crate) cancel_pending: bool,
    /// The last notice that named us.
    pub(crate) noticed: Option<u64>,
    sequence: u64,
    wanted: Vec<u8>,
}

/// Rows that a statement returns: `token/i`, with `repeat` further tokens at the end of each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) owner: Owner,
    pub(crate) count: u32,
    pub(crate) repeat: u32,
}

impl Rows {
    /// The statement with its values in the text.
    pub(crate) fn sql(self) -> String {
        let Self { owner, count, repeat } = self;
        match (count, repeat) {
            (1, 0) => format!("select '{owner}/1'"),
            (_, 0) => format!("select '{owner}/' || i from generate_series(1, {count}) i"),
            _ => format!(
                "select '{owner}/' || i || '/' || repeat('{owner}', {repeat}) from generate_series(1, {count}) i"
            ),
        }
    }

    /// What row `index` (from 1) must be.
    pub(crate) fn write(self, index: u32, out: &mut Vec<u8>) {
        self.owner.write(out);
        out.push(b'/');
        out.extend_from_slice(index.to_string().as_bytes());
        if self.repeat > 0 {
            out.push(b'/');
            let token = self.owner.to_string();
            (0..self.repeat).for_each(|_| out.extend_from_slice(token.as_bytes()));
        }
    }
}

impl Client {
    pub(crate) fn new(id: u32, config: Arc<Config>, shared: Arc<Shared>) -> Self {
        let seed = config.seed.wrapping_mul(1_000_003).wrapping_add(u64::from(id));
        Self {
            id,
            config,
            shared,
            rng: StdRng::seed_from_u64(seed),
            entries: Entries::default(),
            statements: [None; STATEMENT_NAMES],
            cancel_pending: false,
            noticed: None,
            sequence: 0,
            wanted: Vec::new(),
        }
    }

    /// The owner of a new statement.
    pub(crate) fn owner(&mut self) -> Owner {
        self.sequence += 1;
        Owner { seed: self.config.seed, client: self.id, sequence: self.sequence }
    }

    /// A new statement with rows.
    pub(crate) fn new_rows(&mut self, count: u32, repeat: u32) -> Rows {
        Rows { owner: self.owner(), count, repeat }
    }

    pub(crate) fn application_name(&self) -> String {
        format!("soak-{}", self.id)
    }

    pub(crate) fn violation(&self, kind: Kind, detail: impl Into<String>) -> Stop {
        Stop::Violation(Violation { kind, client: self.id, detail: detail.into() })
    }

    /// The next message that belongs to an answer.
    pub(crate) async fn message(&mut self, connection: &mut Connection) -> Checked<u8> {
        loop {
            match connection.next().await? {
                b'N' => match Owner::find(self.config.seed, connection.body()) {
                    Some(owner) if owner.client != self.id => {
                        return Err(self.violation(Kind::Foreign, format!("notice of {owner}")));
                    }
                    Some(owner) => self.noticed = Some(owner.sequence),
                    None => {}
                },
                b'S' => {}
                tag => return Ok(tag),
            }
        }
    }

    /// These messages, in this order.
    pub(crate) async fn expect(&mut self, connection: &mut Connection, tags: &[u8]) -> Checked {
        for wanted in tags {
            let tag = self.message(connection).await?;
            if tag != *wanted {
                return Err(self.unexpected(connection, char::from(*wanted), tag));
            }
        }
        Ok(())
    }

    /// ReadyForQuery with this transaction status.
    pub(crate) async fn ready(&mut self, connection: &mut Connection, status: u8) -> Checked {
        self.expect(connection, b"Z").await?;
        if connection.body() != [status] {
            let detail = format!("status {:?}, got {}", char::from(status), short(connection.body()));
            return Err(self.violation(Kind::Transaction, detail));
        }
        Ok(())
    }

    /// These rows, in DataRow messages.
    pub(crate) async fn rows(&mut self, connection: &mut Connection, rows: Rows) -> Checked {
        self.rows_from(connection, rows, 1, rows.count).await
    }

    /// Rows `first` to `last`.
    pub(crate) async fn rows_from(
        &mut self,
        connection: &mut Connection,
        rows: Rows,
        first: u32,
        last: u32,
    ) -> Checked {
        for index in first..=last {
            self.row(connection, rows.owner, index, |out| rows.write(index, out)).await?;
        }
        Ok(())
    }

    /// One DataRow with one column, whose content `write` tells.
    pub(crate) async fn row(
        &mut self,
        connection: &mut Connection,
        owner: Owner,
        index: u32,
        write: impl FnOnce(&mut Vec<u8>),
    ) -> Checked {
        let tag = self.message(connection).await?;
        if tag == b'C' || tag == b'Z' {
            return Err(self.violation(Kind::Missing, format!("row {index} of {owner}")));
        }
        if tag != b'D' {
            return Err(self.unexpected(connection, 'D', tag));
        }
        self.wanted.clear();
        write(&mut self.wanted);
        self.compare(owner, index, connection.column().unwrap_or(connection.body()))
    }

    /// One CopyData line.
    pub(crate) async fn copy_row(&mut self, connection: &mut Connection, rows: Rows, index: u32) -> Checked {
        self.expect(connection, b"d").await?;
        self.wanted.clear();
        rows.write(index, &mut self.wanted);
        self.wanted.push(b'\n');
        self.compare(rows.owner, index, connection.body())
    }

    fn compare(&self, owner: Owner, index: u32, got: &[u8]) -> Checked {
        if got == self.wanted {
            return Ok(());
        }
        Err(classify(owner, &self.wanted, index, got).into())
    }

    /// One row with this text.
    pub(crate) async fn text_row(&mut self, connection: &mut Connection, kind: Kind, text: &str) -> Checked {
        self.expect(connection, b"D").await?;
        let got = connection.column().unwrap_or(connection.body());
        if got == text.as_bytes() {
            return Ok(());
        }
        let detail = format!("expected `{text}`, got {}", short(got));
        Err(self.violation(kind, detail))
    }

    /// An ErrorResponse with this SQLSTATE that names `owner`, if given; what of Parse, Bind and Describe succeeded before
    /// it is the planner's choice.
    pub(crate) async fn error(
        &mut self,
        connection: &mut Connection,
        sqlstate: &str,
        owner: Option<Owner>,
    ) -> Checked {
        let tag = loop {
            match self.message(connection).await? {
                b'1' | b'2' | b'T' => {}
                tag => break tag,
            }
        };
        let named = Owner::find(self.config.seed, connection.body());
        let right = tag == b'E'
            && connection.field(b'C') == sqlstate
            && owner.is_none_or(|owner| named == Some(owner));
        if right { Ok(()) } else { Err(self.unexpected(connection, 'E', tag)) }
    }

    /// What it means that message `tag` came instead of `wanted`.
    pub(crate) fn unexpected(&self, connection: &Connection, wanted: char, tag: u8) -> Stop {
        let named = Owner::find(self.config.seed, connection.body());
        let foreign = named.is_some_and(|owner| owner.client != self.id);
        let stale = named.is_some_and(|owner| owner.client == self.id && owner.sequence < self.sequence);
        if tag == b'E' {
            let (sqlstate, message) = (connection.field(b'C'), connection.field(b'M'));
            if sqlstate == QUERY_CANCELED && self.cancel_pending {
                return Stop::LateCancel;
            }
            let kind = if foreign { Kind::Foreign } else { Kind::Error };
            return self.violation(kind, format!("expected {wanted}, got {sqlstate} {message}"));
        }
        let kind = match tag {
            _ if foreign => Kind::Foreign,
            b'D' | b'd' if stale => Kind::Stale,
            b'D' | b'd' => Kind::Doubled,
            _ => Kind::Protocol,
        };
        let detail = format!("expected {wanted}, got {:?} {}", char::from(tag), short(connection.body()));
        self.violation(kind, detail)
    }
}
