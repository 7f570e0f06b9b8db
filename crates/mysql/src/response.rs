// SPDX-License-Identifier: Apache-2.0
//! Messages of the server behind the login. Which of them is due, and where an answer ends, is known by [`crate::exchange`].

use crate::Error;
use crate::reader::Reader;

/// First byte of an OK packet.
pub const OK: u8 = 0x00;
/// First byte of a request for a local file.
pub const LOCAL_INFILE: u8 = 0xfb;
/// First byte of an EOF packet, and of the OK packet behind rows.
pub const EOF: u8 = 0xfe;
/// In the place of a value of the text protocol: NULL.
const NULL: u8 = 0xfb;
/// First byte of an ERR packet.
pub const ERR: u8 = 0xff;
/// Error number of what is no error: how far a statement of MariaDB has come.
pub const PROGRESS: u16 = 0xffff;

/// Status flags, `SERVER_STATUS_*` and `SERVER_*`.
pub mod status {
    /// A transaction is open.
    pub const IN_TRANSACTION: u16 = 1;
    /// Every statement is a transaction of its own.
    pub const AUTOCOMMIT: u16 = 2;
    /// Another result follows.
    pub const MORE_RESULTS: u16 = 8;
    /// Rows are to be fetched by COM_STMT_FETCH.
    pub const CURSOR_EXISTS: u16 = 0x40;
    /// The session's state has changed, and the packet says how.
    pub const STATE_CHANGED: u16 = 0x4000;
}

/// What an OK packet or the end of rows tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ok<'a> {
    /// Rows that were changed.
    pub affected_rows: u64,
    /// The value that was made for an AUTO_INCREMENT column; 0 for none.
    pub last_insert_id: u64,
    /// Flags of [`status`].
    pub status: u16,
    /// Warnings.
    pub warnings: u16,
    /// The new default database, where the packet tells it.
    pub schema: Option<&'a [u8]>,
}

/// Kind of a change of state: the default database.
const STATE_SCHEMA: u8 = 1;

impl<'a> Ok<'a> {
    /// Reads an OK packet, also one that stands for EOF.
    ///
    /// # Errors
    /// [`Error::Unexpected`], [`Error::Truncated`]. What comes behind the warnings never is one: a head suffices.
    pub fn decode(payload: &'a [u8]) -> Result<Self, Error> {
        let mut reader = Reader::new(payload);
        match reader.u8("OK")? {
            OK | EOF => {}
            byte => return Err(Error::Unexpected { what: "OK", byte }),
        }
        let mut ok = Self {
            affected_rows: reader.integer("the number of rows")?,
            last_insert_id: reader.integer("the last insert id")?,
            status: reader.u16("the status")?,
            warnings: reader.u16("the warnings")?,
            schema: None,
        };
        if ok.status & status::STATE_CHANGED != 0 {
            ok.schema = schema(reader).unwrap_or(None);
        }
        Ok(ok)
    }

    /// Reads an EOF packet: it has only warnings and status.
    ///
    /// # Errors
    /// [`Error::Unexpected`], [`Error::Truncated`].
    pub fn decode_eof(payload: &[u8]) -> Result<Self, Error> {
        let mut reader = Reader::new(payload);
        match reader.u8("EOF")? {
            EOF => {}
            byte => return Err(Error::Unexpected { what: "EOF", byte }),
        }
        let warnings = reader.u16("the warnings")?;
        Ok(Self { status: reader.u16("the status")?, warnings, ..Self::default() })
    }
}

fn schema<'a>(mut reader: Reader<'a>) -> Result<Option<&'a [u8]>, Error> {
    reader.string("the message")?;
    let mut changes = Reader::new(reader.string("the changes of state")?);
    while !changes.is_empty() {
        let kind = changes.u8("a change of state")?;
        let data = changes.string("a change of state")?;
        if kind == STATE_SCHEMA {
            return Reader::new(data).string("the database").map(Some);
        }
    }
    Ok(None)
}

/// An ERR packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Err<'a> {
    /// Number: 1146 for a table that does not exist.
    pub code: u16,
    /// SQLSTATE; `HY000` where the packet has none (before the login).
    pub sqlstate: [u8; 5],
    /// Message.
    pub message: &'a [u8],
}

impl<'a> Err<'a> {
    /// Reads a payload.
    ///
    /// # Errors
    /// [`Error::Unexpected`], [`Error::Truncated`].
    pub fn decode(payload: &'a [u8]) -> Result<Self, Error> {
        let mut reader = Reader::new(payload);
        match reader.u8("ERR")? {
            ERR => {}
            byte => return Err(Error::Unexpected { what: "ERR", byte }),
        }
        let code = reader.u16("the error's number")?;
        Ok(match reader.rest() {
            [b'#', a, b, c, d, e, message @ ..] => Self { code, sqlstate: [*a, *b, *c, *d, *e], message },
            message => Self { code, sqlstate: *b"HY000", message },
        })
    }
}

/// Answer to COM_STMT_PREPARE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrepareOk {
    /// The statement's number.
    pub statement: u32,
    /// Columns of its result.
    pub columns: u16,
    /// Its parameters.
    pub parameters: u16,
}

impl PrepareOk {
    /// Reads a payload.
    ///
    /// # Errors
    /// [`Error::Unexpected`], [`Error::Truncated`].
    pub fn decode(payload: &[u8]) -> Result<Self, Error> {
        let mut reader = Reader::new(payload);
        match reader.u8("the prepared statement")? {
            OK => {}
            byte => return Err(Error::Unexpected { what: "a prepared statement", byte }),
        }
        Ok(Self {
            statement: reader.u32("the statement's number")?,
            columns: reader.u16("the number of columns")?,
            parameters: reader.u16("the number of parameters")?,
        })
    }
}

/// Number of columns that a result begins with, and whether they follow (MariaDB may leave them out).
///
/// # Errors
/// [`Error::Truncated`], [`Error::Unexpected`].
pub fn column_count(payload: &[u8]) -> Result<(u64, bool), Error> {
    let mut reader = Reader::new(payload);
    let count = reader.integer("the number of columns")?;
    let follow = reader.is_empty() || reader.u8("the mark of columns")? != 0;
    Ok((count, follow))
}

/// The values of a row of the text protocol; `None` is NULL.
///
/// # Errors
/// [`Error::Truncated`].
pub fn text_row(payload: &[u8]) -> Result<Vec<Option<&[u8]>>, Error> {
    let mut reader = Reader::new(payload);
    let mut values = Vec::new();
    while let Some(&first) = reader.rest().first() {
        if first == NULL {
            reader.u8("a value")?;
            values.push(None);
        } else {
            values.push(Some(reader.string("a value")?));
        }
    }
    Ok(values)
}
