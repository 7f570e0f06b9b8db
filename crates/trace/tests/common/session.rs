// SPDX-License-Identifier: Apache-2.0
//! Builds the records of one session as a recorder would, and what ran by them. Each protocol's tests add how it speaks.

use underpass_trace::statements::{Event, Statement, Statements, Transaction};
use underpass_trace::*;

/// The only session.
pub const SESSION: SessionId = SessionId(1);

/// What was built and found so far.
pub struct Session {
    statements: Statements,
    offset: u64,
    /// Nanoseconds; one passes from record to record.
    pub now: u64,
    pub found: Vec<Statement>,
    pub transactions: Vec<Transaction>,
}

impl Session {
    pub fn of(protocol: Protocol) -> Self {
        let statements = Statements::new(protocol);
        Self { statements, offset: 0, now: 0, found: Vec::new(), transactions: Vec::new() }
    }

    pub fn push(&mut self, record: &Record<'_>) {
        let mut events = Vec::new();
        self.statements.push(record, &mut events);
        for event in events {
            match event {
                Event::Statement(statement) => self.found.push(*statement),
                Event::Transaction(transaction) => self.transactions.push(transaction),
            }
        }
    }

    /// A message of the client; its offset.
    pub fn message(&mut self, message: Vec<u8>) -> u64 {
        self.now += 1;
        let offset = self.offset;
        self.offset += message.len() as u64;
        self.push(&Record::Frontend(Frontend::new(SESSION, self.now, offset, message)));
        offset
    }

    /// How a request ended.
    pub fn outcome(&mut self, request: u64, rows: u64, outcome: Outcome<'_>) {
        self.now += 1;
        let (first_ns, last_ns) = (self.now, self.now);
        let (session, offset, len) = (SESSION, 0, 10);
        self.push(&Record::Response(Response {
            session,
            request,
            offset,
            len,
            first_ns,
            last_ns,
            rows,
            outcome,
        }));
    }

    pub fn ready_at(&mut self, time_ns: u64, request: u64, status: TransactionStatus) {
        self.push(&Record::Ready(Ready { session: SESSION, time_ns, request, offset: 0, status }));
    }

    /// Texts of the statements; `?` where there is none.
    pub fn texts(&self) -> Vec<String> {
        let text = |s: &Statement| String::from_utf8_lossy(s.text.as_deref().unwrap_or(b"?")).into_owned();
        self.found.iter().map(text).collect()
    }
}
