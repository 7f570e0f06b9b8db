// SPDX-License-Identifier: Apache-2.0
//! What a client asks for: the first byte of a message with sequence number 0, and what it means.

use crate::Error;
use crate::capability::{self, Capabilities};
use crate::reader::Reader;
use crate::value::{self, Parameter};

/// Ends the session.
pub const COM_QUIT: u8 = 0x01;
/// Changes the default database.
pub const COM_INIT_DB: u8 = 0x02;
/// A text of one or several statements.
pub const COM_QUERY: u8 = 0x03;
/// Columns of a table.
pub const COM_FIELD_LIST: u8 = 0x04;
/// One line of numbers.
pub const COM_STATISTICS: u8 = 0x09;
/// SHOW PROCESSLIST.
pub const COM_PROCESS_INFO: u8 = 0x0a;
/// Another user in the same session.
pub const COM_CHANGE_USER: u8 = 0x11;
/// A replica's wish for the log.
pub const COM_BINLOG_DUMP: u8 = 0x12;
/// A replica's name, with a user and a password in it.
pub const COM_REGISTER_SLAVE: u8 = 0x15;
/// Prepares a statement.
pub const COM_STMT_PREPARE: u8 = 0x16;
/// Executes it.
pub const COM_STMT_EXECUTE: u8 = 0x17;
/// A part of a parameter; has no answer.
pub const COM_STMT_SEND_LONG_DATA: u8 = 0x18;
/// Forgets a statement; has no answer.
pub const COM_STMT_CLOSE: u8 = 0x19;
/// Forgets the long data of a statement, closes its cursor.
pub const COM_STMT_RESET: u8 = 0x1a;
/// Rows of a cursor.
pub const COM_STMT_FETCH: u8 = 0x1c;
/// A replica's wish for the log, MySQL 5.6.
pub const COM_BINLOG_DUMP_GTID: u8 = 0x1e;
/// The session as new.
pub const COM_RESET_CONNECTION: u8 = 0x1f;
/// Executes with many rows of parameters (MariaDB).
pub const COM_STMT_BULK_EXECUTE: u8 = 0xfa;

/// The statement's number that stands for the one prepared last (MariaDB).
pub const LAST_PREPARED: u32 = u32::MAX;
/// Most parameters of a statement, in both servers.
const PARAMETERS_MAX: u64 = 65_535;
/// Flag of COM_STMT_EXECUTE: the number of parameters is told.
const PARAMETER_COUNT_AVAILABLE: u8 = 8;

/// The command's name as the manuals write it; `None` for what is none.
pub fn name(command: u8) -> Option<&'static str> {
    Some(match command {
        0x00 => "COM_SLEEP",
        COM_QUIT => "COM_QUIT",
        COM_INIT_DB => "COM_INIT_DB",
        COM_QUERY => "COM_QUERY",
        COM_FIELD_LIST => "COM_FIELD_LIST",
        0x05 => "COM_CREATE_DB",
        0x06 => "COM_DROP_DB",
        0x07 => "COM_REFRESH",
        0x08 => "COM_SHUTDOWN",
        COM_STATISTICS => "COM_STATISTICS",
        COM_PROCESS_INFO => "COM_PROCESS_INFO",
        0x0b => "COM_CONNECT",
        0x0c => "COM_PROCESS_KILL",
        0x0d => "COM_DEBUG",
        0x0e => "COM_PING",
        0x0f => "COM_TIME",
        0x10 => "COM_DELAYED_INSERT",
        COM_CHANGE_USER => "COM_CHANGE_USER",
        COM_BINLOG_DUMP => "COM_BINLOG_DUMP",
        0x13 => "COM_TABLE_DUMP",
        0x14 => "COM_CONNECT_OUT",
        COM_REGISTER_SLAVE => "COM_REGISTER_SLAVE",
        COM_STMT_PREPARE => "COM_STMT_PREPARE",
        COM_STMT_EXECUTE => "COM_STMT_EXECUTE",
        COM_STMT_SEND_LONG_DATA => "COM_STMT_SEND_LONG_DATA",
        COM_STMT_CLOSE => "COM_STMT_CLOSE",
        COM_STMT_RESET => "COM_STMT_RESET",
        0x1b => "COM_SET_OPTION",
        COM_STMT_FETCH => "COM_STMT_FETCH",
        0x1d => "COM_DAEMON",
        COM_BINLOG_DUMP_GTID => "COM_BINLOG_DUMP_GTID",
        COM_RESET_CONNECTION => "COM_RESET_CONNECTION",
        COM_STMT_BULK_EXECUTE => "COM_STMT_BULK_EXECUTE",
        _ => return None,
    })
}

/// Whether clients send the command. The others have names only: servers use them for their own threads, or refuse them. A packet of a
/// replication stream begins like COM_SLEEP.
pub fn is_from_client(command: u8) -> bool {
    name(command).is_some() && !matches!(command, 0x00 | 0x0b | 0x0f | 0x10 | 0x13 | 0x14 | 0x1d)
}

/// Whether the server answers the command.
pub fn is_answered(command: u8) -> bool {
    !matches!(command, COM_QUIT | COM_STMT_SEND_LONG_DATA | COM_STMT_CLOSE)
}

/// Whether a command asks for what a statement is, or prepares one: then its answer is recorded and compared.
pub fn is_statement(command: u8) -> bool {
    matches!(
        command,
        COM_QUERY | COM_STMT_EXECUTE | COM_STMT_BULK_EXECUTE | COM_STMT_FETCH | COM_STMT_PREPARE
    )
}

/// Whether a stream of the replication protocol follows.
pub fn is_replication(command: u8) -> bool {
    matches!(command, COM_BINLOG_DUMP | COM_BINLOG_DUMP_GTID | 0x13)
}

/// The text of a COM_QUERY's payload, behind its attributes if there are some.
///
/// No capabilities are needed to know: with attributes, the second number is that of their sets, always 1, and no SQL has a byte
/// 0x01 there.
///
/// # Errors
/// [`Error`] when the attributes are malformed, [`Error::Unexpected`] for another command.
pub fn query_text(payload: &[u8]) -> Result<&[u8], Error> {
    let mut reader = Reader::new(payload);
    match reader.u8("the command")? {
        COM_QUERY => {}
        byte => return Err(Error::Unexpected { what: "COM_QUERY", byte }),
    }
    let mut attributes = reader;
    let count = attributes.integer("the number of attributes");
    let sets = attributes.integer("the number of sets");
    let (Ok(count), Ok(1)) = (count, sets) else { return Ok(reader.rest()) };
    if count > 0 {
        let mut types = Vec::new();
        value::decode(&mut attributes, count.min(PARAMETERS_MAX) as usize, true, &mut types, |_| false)?;
    }
    Ok(attributes.rest())
}

/// The number of the statement that a COM_STMT_EXECUTE, SEND_LONG_DATA, CLOSE, RESET, FETCH or BULK_EXECUTE is about.
pub fn statement_number(payload: &[u8]) -> Option<u32> {
    match payload.split_first_chunk::<5>()?.0 {
        [COM_STMT_EXECUTE..=COM_STMT_RESET | COM_STMT_FETCH | COM_STMT_BULK_EXECUTE, a, b, c, d] => {
            Some(u32::from_le_bytes([*a, *b, *c, *d]))
        }
        _ => None,
    }
}

/// COM_STMT_EXECUTE.
#[derive(Clone, Debug, PartialEq)]
pub struct Execute<'a> {
    /// The statement.
    pub statement: u32,
    /// Whether a cursor is wanted, and which.
    pub flags: u8,
    /// Values, in order.
    pub parameters: Vec<Parameter<'a>>,
}

impl<'a> Execute<'a> {
    /// Reads a payload. The number of parameters is known from the answer to COM_STMT_PREPARE. `types` are those of the
    /// statement's last execution, which the client need not repeat, and become those of this one. `is_long` tells which
    /// parameters came by COM_STMT_SEND_LONG_DATA: they are not here.
    ///
    /// # Errors
    /// [`Error::Truncated`], [`Error::Type`], [`Error::Unexpected`] for another command.
    pub fn decode(
        payload: &'a [u8],
        count: u16,
        capabilities: Capabilities,
        types: &mut Vec<u16>,
        is_long: impl Fn(usize) -> bool,
    ) -> Result<Self, Error> {
        let mut reader = Reader::new(payload);
        match reader.u8("the command")? {
            COM_STMT_EXECUTE => {}
            byte => return Err(Error::Unexpected { what: "COM_STMT_EXECUTE", byte }),
        }
        let statement = reader.u32("the statement's number")?;
        let flags = reader.u8("the flags")?;
        reader.u32("the number of iterations")?;
        let mut count = usize::from(count);
        let attributes = capabilities.has(capability::QUERY_ATTRIBUTES);
        if attributes && (count > 0 || flags & PARAMETER_COUNT_AVAILABLE != 0) {
            count = reader.integer("the number of parameters")?.min(PARAMETERS_MAX) as usize;
        }
        let parameters = if count == 0 {
            Vec::new()
        } else {
            value::decode(&mut reader, count, attributes, types, is_long)?
        };
        Ok(Self { statement, flags, parameters })
    }
}

/// COM_STMT_SEND_LONG_DATA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongData<'a> {
    /// The statement.
    pub statement: u32,
    /// Which parameter, from 0.
    pub parameter: u16,
    /// Its next bytes.
    pub data: &'a [u8],
}

impl<'a> LongData<'a> {
    /// Reads a payload.
    ///
    /// # Errors
    /// [`Error::Truncated`], [`Error::Unexpected`] for another command.
    pub fn decode(payload: &'a [u8]) -> Result<Self, Error> {
        let mut reader = Reader::new(payload);
        match reader.u8("the command")? {
            COM_STMT_SEND_LONG_DATA => {}
            byte => return Err(Error::Unexpected { what: "COM_STMT_SEND_LONG_DATA", byte }),
        }
        let statement = reader.u32("the statement's number")?;
        let parameter = reader.u16("the parameter's number")?;
        Ok(Self { statement, parameter, data: reader.rest() })
    }
}

/// The user and database of a COM_CHANGE_USER.
///
/// # Errors
/// [`Error::Truncated`], [`Error::Unexpected`] for another command.
pub fn change_user(payload: &[u8]) -> Result<(&[u8], &[u8]), Error> {
    let mut reader = Reader::new(payload);
    match reader.u8("the command")? {
        COM_CHANGE_USER => {}
        byte => return Err(Error::Unexpected { what: "COM_CHANGE_USER", byte }),
    }
    let user = reader.string_nul("the user")?;
    let len = reader.u8("the password")?;
    reader.take(len.into(), "the password")?;
    Ok((user, reader.string_nul("the database")?))
}
