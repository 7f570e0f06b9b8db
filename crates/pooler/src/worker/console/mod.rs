// SPDX-License-Identifier: Apache-2.0
//! The admin console: its protocol, and commands that are answered later.
//!
//! A console client lives at one worker like any other. What it asks may need all workers, a thread of its own or time: then the client
//! is noted in `console_waits`, nothing more is read from it, and the answer comes as a task or when the sweep sees that it is due.

mod commands;
mod show;
mod sockets;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use underpass_console::command::QUERY_BYTES_MAX;
use underpass_console::help::{HELP_DETAIL, HELP_MESSAGE};
use underpass_console::session::WELCOME_PARAMETERS;
use underpass_console::text::{self, reason};
use underpass_console::{Access, ConsoleError, Table};
use underpass_pool::core::ClientRef;
use underpass_wire::backend::{FieldDescription, Report, Severity, TransactionStatus, build};
use underpass_wire::{Header, SqlState};

use super::{Farewell, Worker};
use crate::client::Phase;
use crate::logging;
use crate::pool::DatabaseState;
use crate::shared::phase;
use crate::table::Key;

/// A console client that waits for something to happen.
pub(crate) struct Wait {
    pub client: Key,
    /// Tag of the CommandComplete that ends the wait.
    tag: String,
    event: Event,
}

/// What ends a wait.
enum Event {
    /// A task with the answer.
    Answer,
    /// PAUSE: no server connection of this database, or any, is left.
    Paused(Option<Arc<DatabaseState>>),
    /// SUSPEND: all workers have written what they held.
    Suspended,
    /// WAIT_CLOSE: no obsolete server connection of this database, or any, is left.
    Closed(Option<Arc<DatabaseState>>),
}

/// What a command answers.
pub(crate) enum Reply {
    Done,
    Rows(Table),
    /// SHOW HELP.
    Help,
    Notice(&'static str),
    /// EmptyQueryResponse.
    Empty,
}

type Outcome = Result<Reply, ConsoleError>;

/// A message of a console client.
enum Message {
    Query(Vec<u8>),
    Terminate,
    /// Sync and Flush have nothing to say here, but no answer is owed either.
    Refused(ConsoleError),
    Malformed,
}

impl Worker {
    /// The client is in: greets it.
    pub(super) fn console_open(&mut self, key: Key, access: Access) {
        let me = ClientRef { worker: self.index, slot: key.index, generation: key.generation };
        let Some(client) = self.clients.get_mut(key) else { return };
        client.phase = Phase::Console(access);
        client.on_console = true;
        client.transport.forget_tap();
        client.request_at = self.now;
        (client.cancel_key, _) = self.shared.new_cancel_key(me, false);
        self.shared.control.consoles.fetch_add(1, Ordering::AcqRel);
        let mut out = Vec::with_capacity(512);
        build::authentication_ok(&mut out);
        let version = concat!(env!("CARGO_PKG_VERSION"), "/bouncer");
        build::parameter_status(&mut out, b"server_version", version.as_bytes());
        for (name, value) in WELCOME_PARAMETERS {
            build::parameter_status(&mut out, name.as_bytes(), value.as_bytes());
        }
        let (process_id, secret) = ((client.cancel_key >> 32) as u32, client.cancel_key as u32);
        build::backend_key_data(&mut out, process_id, &secret.to_be_bytes());
        build::ready_for_query(&mut out, TransactionStatus::Idle);
        if let Err(error) = client.outbox.send(&mut client.transport, &out) {
            self.client_io_failed(key, &error);
        }
    }

    /// Reads commands and carries them out, one at a time.
    pub(super) fn console_readable(&mut self, key: Key) {
        loop {
            let wait = self.console_waits.iter().find(|wait| wait.client == key);
            let (is_waiting, waits_long) =
                (wait.is_some(), wait.is_some_and(|wait| !matches!(wait.event, Event::Answer)));
            let Some(client) = self.clients.get_mut(key) else { return };
            let Phase::Console(access) = client.phase else { return };
            // The pause that it began stays, as in PgBouncer.
            if waits_long && client.ended {
                return self.close_client(key, Farewell::quiet(reason::CLIENT_EOF));
            }
            // A client that does not take its answers gets no more of them.
            if is_waiting || !client.outbox.is_empty() {
                client.readable = true;
                return;
            }
            match next_message(&mut client.inbox) {
                Some(Message::Query(query)) => {
                    client.request_at = self.now;
                    self.console_command(key, &query, access);
                    continue;
                }
                Some(Message::Terminate) => {
                    return self.close_client(key, Farewell::quiet(reason::CLIENT_CLOSE));
                }
                Some(Message::Refused(error)) => {
                    self.console_error(key, &error);
                    return self
                        .close_client(key, Farewell::told(SqlState::PROTOCOL_VIOLATION, reason::BAD_PACKET));
                }
                Some(Message::Malformed) => {
                    return self
                        .close_client(key, Farewell::told(SqlState::PROTOCOL_VIOLATION, reason::BAD_PACKET));
                }
                None => {}
            }
            match client.transport.read_more(&mut client.inbox, QUERY_BYTES_MAX) {
                Ok(outcome) if outcome.count == 0 => {
                    return self.close_client(key, Farewell::quiet(reason::CLIENT_EOF));
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    client.readable = false;
                    return;
                }
                Err(error) => return self.client_io_failed(key, &error),
            }
        }
    }

    /// Looks for waits that are over.
    pub(super) fn console_waits_check(&mut self) {
        let mut over = Vec::new();
        for (index, wait) in self.console_waits.iter().enumerate().rev() {
            let is_over = match &wait.event {
                _ if self
                    .clients
                    .get(wait.client)
                    .is_none_or(|client| !matches!(client.phase, Phase::Console(_))) =>
                {
                    true
                }
                Event::Answer => false,
                Event::Paused(database) => self.is_paused_out(database.as_deref()),
                Event::Suspended => self.is_suspended_out(),
                Event::Closed(database) => self.is_closed_out(database.as_deref()),
            };
            if is_over {
                over.push(index);
            }
        }
        // From the back, so that the other places stay.
        for index in over {
            let wait = self.console_waits.swap_remove(index);
            self.console_reply(wait.client, Some(&wait.tag), Ok(Reply::Done));
            self.console_readable(wait.client);
        }
    }

    /// The client waits for `event` from now on; it may have come already.
    fn console_wait(&mut self, client: Key, tag: String, event: Event) {
        self.console_waits.push(Wait { client, tag, event });
    }

    /// A task brings the answer to a client that waits for it.
    pub(crate) fn console_answer(&mut self, client: Key, outcome: Outcome) {
        let waits = |wait: &Wait| wait.client == client && matches!(wait.event, Event::Answer);
        let Some(index) = self.console_waits.iter().position(waits) else { return };
        let wait = self.console_waits.swap_remove(index);
        self.console_reply(client, Some(&wait.tag), outcome);
        self.console_readable(client);
    }

    /// A cancel request for a console client: ends its wait, and with it the pause that it waits for, also that of one database, where PgBouncer
    /// goes on waiting. In a shutdown no pause is taken back.
    pub(super) fn console_cancelled(&mut self, client: Key) {
        let cancellable = |wait: &Wait| wait.client == client && !matches!(wait.event, Event::Answer);
        let Some(index) = self.console_waits.iter().position(cancellable) else { return };
        let wait = self.console_waits.swap_remove(index);
        if self.shared.phase.load(Ordering::Acquire) < phase::WAIT_FOR_SERVERS {
            self.undo_wait(&wait.event);
        }
        let mut out = Vec::new();
        let report =
            Report::new(Severity::Error, SqlState::QUERY_CANCELED, "canceling statement due to user request");
        build::error_response(&mut out, &report);
        build::ready_for_query(&mut out, TransactionStatus::Idle);
        self.console_send(client, &out);
        self.console_readable(client);
    }

    fn console_error(&mut self, key: Key, error: &ConsoleError) {
        let mut out = Vec::new();
        self.refuse_command(key, error, &mut out);
        self.console_send(key, &out);
    }

    /// Logs a refusal in PgBouncer's two lines, of which the second can be switched off, and makes the message for the client.
    fn refuse_command(&self, key: Key, error: &ConsoleError, out: &mut Vec<u8>) {
        let text = error.to_string();
        logging::phrase(None, &text::console_error(&text));
        if let (Some(client), true) =
            (self.clients.get(key), self.shared.settings.load().config.log_pooler_errors)
        {
            logging::phrase(Some(client.label()), &text::pooler_error(&text));
        }
        let code = SqlState::new(error.sqlstate().as_bytes()).unwrap_or(SqlState::PROTOCOL_VIOLATION);
        build::error_response(out, &Report::new(Severity::Error, code, &text));
    }

    /// Sends an answer and ReadyForQuery. `tag` is the CommandComplete's.
    fn console_reply(&mut self, key: Key, tag: Option<&str>, outcome: Outcome) {
        let mut out = Vec::new();
        match outcome {
            Ok(reply) => {
                match reply {
                    Reply::Done => {}
                    Reply::Rows(table) => encode_table(&mut out, &table),
                    Reply::Help => {
                        let mut report =
                            Report::new(Severity::Notice, SqlState::SUCCESSFUL_COMPLETION, HELP_MESSAGE);
                        report.detail = Some(HELP_DETAIL);
                        build::notice_response(&mut out, &report);
                    }
                    Reply::Notice(text) => {
                        let report = Report::new(Severity::Notice, SqlState::SUCCESSFUL_COMPLETION, text);
                        build::notice_response(&mut out, &report);
                    }
                    Reply::Empty => build::empty_query_response(&mut out),
                }
                if let Some(tag) = tag {
                    build::command_complete(&mut out, tag);
                }
            }
            Err(error) => self.refuse_command(key, &error, &mut out),
        }
        build::ready_for_query(&mut out, TransactionStatus::Idle);
        self.console_send(key, &out);
    }

    fn console_send(&mut self, key: Key, out: &[u8]) {
        // It may have left.
        let Some(client) =
            self.clients.get_mut(key).filter(|client| matches!(client.phase, Phase::Console(_)))
        else {
            return;
        };
        if let Err(error) = client.outbox.send(&mut client.transport, out) {
            self.client_io_failed(key, &error);
        }
    }
}

fn encode_table(out: &mut Vec<u8>, table: &Table) {
    build::row_description(
        out,
        table.columns().iter().map(|column| {
            FieldDescription::new(column.name.as_bytes(), column.column_type.oid(), column.column_type.size())
        }),
    );
    for row in table.rows() {
        // The encoder wants to know the number of cells, which an iterator of unknown length does not tell.
        let cells: Vec<Option<&str>> = row.collect();
        build::data_row(out, cells);
    }
}

/// Takes a whole message from the front of `inbox`; `None` if there is none yet. What is too long is malformed: the inbox stays small.
fn next_message(inbox: &mut Vec<u8>) -> Option<Message> {
    // Query text, its zero, the length word, the type.
    const MESSAGE_BYTES_MAX: usize = QUERY_BYTES_MAX + 6;
    let header = match Header::parse(inbox) {
        Ok(Some(header)) if header.total() <= MESSAGE_BYTES_MAX => header,
        Ok(None) => return None,
        _ => return Some(Message::Malformed),
    };
    Some(match header.tag {
        b'Q' if inbox.len() < header.total() => return None,
        b'Q' => match inbox.drain(..header.total()).collect::<Vec<u8>>().get(5..) {
            Some([text @ .., 0]) if !text.contains(&0) => Message::Query(text.to_vec()),
            _ => Message::Malformed,
        },
        // Of all others the head is enough: the connection ends.
        b'X' => Message::Terminate,
        b'P' | b'B' | b'E' => Message::Refused(ConsoleError::ExtendedProtocol),
        other => Message::Refused(ConsoleError::UnsupportedPacket(other)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(text: &str) -> Vec<u8> {
        let mut bytes = Vec::new();
        crate::message(&mut bytes, b'Q', format!("{text}\0").as_bytes());
        bytes
    }

    #[test]
    fn messages_are_taken_whole_and_in_order() {
        let mut inbox = [query("SHOW VERSION"), query("RELOAD")].concat();
        let rest = inbox.split_off(inbox.len() - 3);
        assert!(matches!(next_message(&mut inbox), Some(Message::Query(text)) if text == b"SHOW VERSION"));
        assert!(next_message(&mut inbox).is_none());
        inbox.extend(rest);
        assert!(matches!(next_message(&mut inbox), Some(Message::Query(text)) if text == b"RELOAD"));
        assert!(inbox.is_empty());
    }

    #[test]
    fn what_is_no_query_is_refused() {
        let mut long = query(&"x".repeat(QUERY_BYTES_MAX + 1));
        assert!(matches!(next_message(&mut long), Some(Message::Malformed)));
        let mut longest = query(&"x".repeat(QUERY_BYTES_MAX));
        assert!(matches!(next_message(&mut longest), Some(Message::Query(_))));
        for bytes in [&b"Q\0\0\0\x05x"[..], b"Q\0\0\0\x03", b"Q\0\0\0\x07a\0\0", b"Q\xff\xff\xff\xff"] {
            assert!(matches!(next_message(&mut bytes.to_vec()), Some(Message::Malformed)), "{bytes:?}");
        }
        let refused = |bytes: &[u8]| match next_message(&mut bytes.to_vec()) {
            Some(Message::Refused(error)) => error,
            _ => panic!("not refused"),
        };
        assert_eq!(refused(b"P\0\0\0\x04"), ConsoleError::ExtendedProtocol);
        assert_eq!(refused(b"d\0\0\0\x04"), ConsoleError::UnsupportedPacket(b'd'));
        assert_eq!(refused(b"?\0\0\0\x44"), ConsoleError::UnsupportedPacket(b'?'), "without its body");
        assert!(matches!(next_message(&mut b"X\0\0\0\x04".to_vec()), Some(Message::Terminate)));
    }
}
