// SPDX-License-Identifier: Apache-2.0
//! One command and its answer: which message of the server means what, and where the answer ends.
//!
//! ```text
//!            ┌─ OK, ERR ──────────────────────────────────────> done, or the next result
//! command ───┼─ number of columns, columns, [EOF], rows, end ─> done, or the next result
//!            ├─ request for a local file, data of the client, OK or ERR
//!            └─ prepared statement, parameters, [EOF], columns, [EOF]
//! ```
//!
//! The EOF packets in brackets are not sent with `CLIENT_DEPRECATE_EOF`. Where it is not known whether that is in use, because
//! the login was not seen, the first result that has columns tells.

use crate::capability::{self, Capabilities};
use crate::command::*;
use crate::response::{self, EOF, ERR, LOCAL_INFILE, Ok as OkPacket, PROGRESS, PrepareOk, status};
use crate::{Error, packet};

/// Shortest packet that begins with 0xfe and is no EOF packet, bytes.
const EOF_BYTES_MAX: usize = 9;

/// What is used in a session, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    /// Flags of the login; of a joined session, what is common to all clients.
    pub capabilities: Capabilities,
    /// Whether EOF packets are left out; `None` when it is not known yet.
    pub deprecate_eof: Option<bool>,
}

impl Session {
    /// A session whose login was seen.
    pub fn new(capabilities: Capabilities) -> Self {
        Self { capabilities, deprecate_eof: Some(capabilities.has(capability::DEPRECATE_EOF)) }
    }

    /// A session that was joined: it speaks protocol 4.1, and everything else shows.
    pub fn joined() -> Self {
        let capabilities = Capabilities(capability::PROTOCOL_41 | capability::TRANSACTIONS);
        Self { capabilities, deprecate_eof: None }
    }
}

/// What a message of the server meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// A part of the answer that needs no telling: columns, progress, authentication.
    Part,
    /// A row.
    Row,
    /// The server waits for a local file: messages of the client that end with an empty one.
    WantsFile {
        /// Its name.
        name: &'a [u8],
    },
    /// A result ends.
    End {
        /// How.
        end: End<'a>,
        /// Whether it is the last one: the server waits for the next command.
        last: bool,
    },
}

/// How a result ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End<'a> {
    /// OK.
    Ok(OkPacket<'a>),
    /// All rows have been sent, or stay at the server in a cursor.
    Rows(OkPacket<'a>),
    /// A statement was prepared.
    Prepared(PrepareOk),
    /// ERR.
    Err(response::Err<'a>),
    /// A text without a status (COM_STATISTICS).
    Text,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The first message of a result.
    First,
    /// So many definitions of columns are still to come.
    Columns(u64),
    /// All have come. It is not known whether EOF is next.
    AfterColumns,
    Rows,
    /// Definitions of a prepared statement: parameters, then columns.
    Prepared {
        left: u32,
        then: u32,
        answer: PrepareOk,
    },
    /// All definitions of a kind have come, EOF is next, or perhaps only the next kind.
    PreparedEof {
        then: u32,
        answer: PrepareOk,
    },
    File,
    Done,
}

/// A command that is being answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    command: u8,
    state: State,
}

impl Exchange {
    /// A command of which nothing has been answered. Those that have no answer ([`is_answered`]) are done.
    pub fn new(command: u8) -> Self {
        let state = match command {
            COM_STMT_FETCH => State::Rows,
            command if is_answered(command) => State::First,
            _ => State::Done,
        };
        Self { command, state }
    }

    /// The command.
    pub fn command(&self) -> u8 {
        self.command
    }

    /// Whether the answer is complete.
    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Whether rows are next: every message that is not empty, and begins with neither ERR nor EOF, is one, and changes nothing.
    pub fn in_rows(&self) -> bool {
        self.state == State::Rows
    }

    /// Whether the client is to send a file.
    pub fn wants_file(&self) -> bool {
        self.state == State::File
    }

    /// Whether the answer may be complete, and the next command is what tells. If so, it is.
    pub fn end_if_complete(&mut self, session: &mut Session) -> Option<End<'static>> {
        let State::PreparedEof { then: 0, answer } = self.state else { return None };
        if session.deprecate_eof.is_some() {
            return None;
        }
        session.deprecate_eof = Some(true);
        self.state = State::Done;
        Some(End::Prepared(answer))
    }

    /// The next message of the server: the beginning of its payload, and the length of it all.
    ///
    /// # Errors
    /// The message does not belong here: the stream is not what it seems to be.
    pub fn message<'a>(
        &mut self,
        head: &'a [u8],
        len: usize,
        session: &mut Session,
    ) -> Result<Step<'a>, Error> {
        let byte = head.first().copied().ok_or(Error::Truncated("an answer"));
        match self.state {
            State::Done => Err(Error::Unexpected { what: "no answer at all", byte: byte.unwrap_or(0) }),
            State::First | State::File => self.first(byte?, head, len, session),
            State::Columns(left) => {
                if byte? == ERR {
                    return self.error(head);
                }
                self.after_columns(left - 1, session);
                Ok(Step::Part)
            }
            State::AfterColumns => {
                let is_eof = byte? == EOF && len < EOF_BYTES_MAX;
                // EOF has five bytes; the OK packet behind no rows at all has at least seven.
                let known = *session.deprecate_eof.get_or_insert(!(is_eof && len == 5));
                self.state = State::Rows;
                if known || !is_eof {
                    return self.row(byte?, head, len, session);
                }
                let eof = OkPacket::decode_eof(head)?;
                if eof.status & status::CURSOR_EXISTS != 0 {
                    return Ok(self.end(End::Rows(eof), eof.status));
                }
                Ok(Step::Part)
            }
            State::Rows => self.row(byte?, head, len, session),
            State::Prepared { left, then, answer } => {
                self.state = match left - 1 {
                    0 => State::PreparedEof { then, answer },
                    left => State::Prepared { left, then, answer },
                };
                self.skip_eof(session);
                Ok(self.prepared())
            }
            State::PreparedEof { then, answer } => {
                let is_eof = byte? == EOF && len < EOF_BYTES_MAX;
                if !is_eof && then == 0 {
                    return Err(Error::Unexpected { what: "the end of a prepared statement", byte: byte? });
                }
                session.deprecate_eof.get_or_insert(!is_eof);
                self.state = State::Prepared { left: then, then: 0, answer };
                if is_eof {
                    return Ok(self.prepared());
                }
                // It was the first of the columns.
                self.message(head, len, session)
            }
        }
    }

    fn first<'a>(
        &mut self,
        byte: u8,
        head: &'a [u8],
        len: usize,
        session: &mut Session,
    ) -> Result<Step<'a>, Error> {
        match (self.command, byte) {
            (_, ERR) => return self.error(head),
            (COM_STATISTICS, _) => {
                self.state = State::Done;
                return Ok(Step::End { end: End::Text, last: true });
            }
            // What a plugin says, of whichever kind.
            (COM_CHANGE_USER, byte) if byte != response::OK => return Ok(Step::Part),
            (COM_FIELD_LIST, byte) if byte != EOF => return Ok(Step::Part),
            (COM_STMT_PREPARE, response::OK) => {
                let answer = PrepareOk::decode(head)?;
                let (left, then) = (answer.parameters.into(), answer.columns.into());
                self.state = State::Prepared { left, then, answer };
                return Ok(self.prepared());
            }
            (_, response::OK) => {
                let ok = OkPacket::decode(head)?;
                return Ok(self.end(End::Ok(ok), ok.status));
            }
            (_, EOF) if len < EOF_BYTES_MAX => {
                let eof = self.decode_end(head, len, session)?;
                return Ok(self.end(End::Ok(eof), eof.status));
            }
            (COM_QUERY, LOCAL_INFILE) if self.state == State::First => {
                self.state = State::File;
                return Ok(Step::WantsFile { name: &head[1..] });
            }
            _ if self.state == State::File => {
                return Err(Error::Unexpected { what: "the answer to a file", byte });
            }
            _ => {}
        }
        let (columns, follow) = response::column_count(head)?;
        self.after_columns(if follow { columns } else { 0 }, session);
        Ok(Step::Part)
    }

    /// So many columns are still to come.
    fn after_columns(&mut self, left: u64, session: &Session) {
        self.state = match (left, session.deprecate_eof) {
            (0, Some(true)) => State::Rows,
            (0, _) => State::AfterColumns,
            _ => State::Columns(left),
        };
    }

    fn row<'a>(
        &mut self,
        byte: u8,
        head: &'a [u8],
        len: usize,
        session: &Session,
    ) -> Result<Step<'a>, Error> {
        match byte {
            ERR => self.error(head),
            // A row that begins so has a first column of 16 MiB.
            EOF if len < packet::PAYLOAD_BYTES_MAX => {
                let end = self.decode_end(head, len, session)?;
                Ok(self.end(End::Rows(end), end.status))
            }
            _ => Ok(Step::Row),
        }
    }

    /// The end of rows: EOF, or an OK packet in its place.
    fn decode_end<'a>(&self, head: &'a [u8], len: usize, session: &Session) -> Result<OkPacket<'a>, Error> {
        match session.deprecate_eof {
            Some(true) | None if len > 5 => OkPacket::decode(head),
            _ => OkPacket::decode_eof(head),
        }
    }

    fn error<'a>(&mut self, head: &'a [u8]) -> Result<Step<'a>, Error> {
        let error = response::Err::decode(head)?;
        if error.code == PROGRESS {
            return Ok(Step::Part);
        }
        self.state = State::Done;
        Ok(Step::End { end: End::Err(error), last: true })
    }

    fn end<'a>(&mut self, end: End<'a>, status: u16) -> Step<'a> {
        let last = status & status::MORE_RESULTS == 0;
        self.state = if last { State::Done } else { State::First };
        Step::End { end, last }
    }

    /// Nothing stands between the kinds of definitions when EOF is deprecated.
    fn skip_eof(&mut self, session: &Session) {
        if let (State::PreparedEof { then, answer }, Some(true)) = (self.state, session.deprecate_eof) {
            self.state = State::Prepared { left: then, then: 0, answer };
        }
    }

    /// Goes on to the next kind of definitions that there is.
    fn prepared(&mut self) -> Step<'static> {
        match self.state {
            State::Prepared { left: 0, then: 0, answer } => {
                self.state = State::Done;
                Step::End { end: End::Prepared(answer), last: true }
            }
            State::Prepared { left: 0, then, answer } => {
                self.state = State::Prepared { left: then, then: 0, answer };
                Step::Part
            }
            _ => Step::Part,
        }
    }
}
