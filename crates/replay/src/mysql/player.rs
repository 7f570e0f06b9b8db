// SPDX-License-Identifier: Apache-2.0
//! A session while it is played: statements get the numbers that they have here, answers are followed to their ends.

use underpass_mysql::command::{COM_CHANGE_USER, COM_RESET_CONNECTION, COM_STMT_PREPARE, is_statement};
use underpass_mysql::exchange::{End as Ending, Step as Part};
use underpass_mysql::response::{self, status};
use underpass_wire::backend::TransactionStatus;

use crate::connection::Connection;
use crate::outcome::Actual;
use crate::plan::{End, Step};
use crate::rowhash::RowHash;
use crate::session::{Break, Flight, MESSAGE_CHARS_MAX, Player};

/// A deadlock: the one error that ends the transaction.
const DEADLOCK: u16 = 1213;

impl Player<'_> {
    /// Gives the prepared statements in the bytes of a step the numbers that they have at this server.
    pub(crate) fn renumber(&self, step: &Step, bytes: &mut [u8], connection: &Connection) {
        let Some(numbers) = &connection.mysql else { return };
        let refs = &self.session.statement_refs;
        let from = refs.partition_point(|&(at, _)| at < step.bytes().start);
        let to = refs.partition_point(|&(at, _)| at < step.bytes().end);
        for &(at, captured) in &refs[from..to] {
            let at = (at - step.bytes().start) as usize;
            bytes[at..at + 4].copy_from_slice(&numbers.statement(captured).to_le_bytes());
        }
    }

    /// Takes all messages that were read whole.
    pub(crate) fn take_mysql(&mut self, connection: &mut Connection) -> Result<(), Break> {
        let Some(mut session) = connection.mysql.take() else { return Ok(()) };
        let result = self.take_all(connection, &mut session);
        connection.mysql = Some(session);
        result
    }

    fn take_all(&mut self, connection: &mut Connection, session: &mut super::Session) -> Result<(), Break> {
        while let Some((sequence, payload)) = connection.next_mysql()? {
            self.mysql_message(sequence, &payload, session)?;
        }
        Ok(())
    }

    fn mysql_message(
        &mut self,
        sequence: u8,
        payload: &[u8],
        session: &mut super::Session,
    ) -> Result<(), Break> {
        let Some(flight) = self.flights.front_mut() else {
            // Between two commands a server says nothing, except why it closes the connection.
            let text = response::Err::decode(payload)
                .map(|error| String::from_utf8_lossy(error.message).into_owned());
            return Err(Break::Lost(text.unwrap_or_else(|_| "the server sent an answer to nothing".into())));
        };
        let step = flight.exchange.message(payload, payload.len(), &mut session.exchange);
        let step =
            step.map_err(|error| Break::Lost(format!("the server does not speak the protocol: {error}")))?;
        match step {
            Part::Part => {}
            Part::Row => {
                flight.rows += 1;
                if let Some(hash) = &mut flight.hash {
                    hash.add(RowHash::of_row(payload));
                }
            }
            Part::WantsFile { .. } => {
                flight.copy_in += 1;
                flight.file_sequence = sequence.wrapping_add(1);
            }
            Part::End { end, last } => {
                let (command, unit) = (flight.exchange.command(), flight.unit);
                let failed = matches!(end, Ending::Err(_));
                let end = match end {
                    Ending::Ok(ok) => {
                        self.mysql_status = status_of(ok.status);
                        complete(&format!("OK {}", ok.affected_rows))
                    }
                    Ending::Rows(ok) => {
                        self.mysql_status = status_of(ok.status);
                        complete(&format!("ROWS {}", flight.rows))
                    }
                    Ending::Prepared(answer) => {
                        if let Some(&captured) = self.session.prepares.get(&unit) {
                            session.statements.insert(captured, answer.statement);
                        }
                        complete(&format!("PREPARE {}", answer.parameters))
                    }
                    Ending::Text => complete(""),
                    Ending::Err(error) => {
                        flight.failed = true;
                        flight.copy_in = 0;
                        if error.code == DEADLOCK {
                            self.mysql_status = TransactionStatus::Idle;
                        }
                        let message = String::from_utf8_lossy(error.message);
                        let message: String = message.chars().take(MESSAGE_CHARS_MAX).collect();
                        End::Error(error.sqlstate, message.into())
                    }
                };
                if failed
                    && command == COM_STMT_PREPARE
                    && let Some(captured) = self.session.prepares.get(&unit)
                {
                    session.statements.remove(captured);
                }
                let hash = flight.hash.as_ref().map_or(0, RowHash::value);
                let rows = std::mem::take(&mut flight.rows);
                if is_statement(command) || failed {
                    flight.sending.statements.push(Actual { end, rows, hash });
                }
                flight.hash = flight.hash.take().map(RowHash::again);
                if last {
                    // The session may write again.
                    self.reset |= !failed && self.run.options.read_only && resets_session(command);
                    let status = self.mysql_status;
                    self.ready(status);
                }
            }
        }
        Ok(())
    }

    /// The server waits for a local file that the trace does not have: an empty one, so that it goes on.
    pub(crate) async fn refuse_file(&mut self, connection: &mut Connection) -> Result<(), Break> {
        let wants = |flight: &&mut Flight| flight.sent_all && flight.copy_in > 0;
        if connection.mysql.is_some()
            && let Some(flight) = self.flights.front_mut().filter(wants)
        {
            flight.copy_in = 0;
            connection.write_all(&[0, 0, 0, flight.file_sequence]).await?;
        }
        Ok(())
    }
}

/// Whether a command puts back what was set in the session.
pub(crate) fn resets_session(command: u8) -> bool {
    matches!(command, COM_RESET_CONNECTION | COM_CHANGE_USER)
}

fn complete(tag: &str) -> End {
    End::Complete(tag.as_bytes().into())
}

fn status_of(flags: u16) -> TransactionStatus {
    match flags & status::IN_TRANSACTION {
        0 => TransactionStatus::Idle,
        _ => TransactionStatus::Transaction,
    }
}
