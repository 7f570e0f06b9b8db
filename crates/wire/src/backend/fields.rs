// SPDX-License-Identifier: Apache-2.0
//! The fields of ErrorResponse and NoticeResponse (manual, "Error and Notice Message Fields").

use crate::reader::Reader;
use crate::{MessageError, SqlState};

/// Codes of the fields.
pub mod field {
    /// Severity, in the server's language.
    pub const SEVERITY_LOCAL: u8 = b'S';
    /// Severity, never translated; PostgreSQL 9.6 and later.
    pub const SEVERITY: u8 = b'V';
    /// The SQLSTATE.
    pub const CODE: u8 = b'C';
    /// The primary message.
    pub const MESSAGE: u8 = b'M';
    /// More about the problem.
    pub const DETAIL: u8 = b'D';
    /// What to do about it.
    pub const HINT: u8 = b'H';
    /// Where in the query, characters from 1.
    pub const POSITION: u8 = b'P';
    /// As POSITION, in a query of the server's own.
    pub const INTERNAL_POSITION: u8 = b'p';
    /// That query.
    pub const INTERNAL_QUERY: u8 = b'q';
    /// The call stack.
    pub const WHERE: u8 = b'W';
    /// Name of a schema.
    pub const SCHEMA: u8 = b's';
    /// Name of a table.
    pub const TABLE: u8 = b't';
    /// Name of a column.
    pub const COLUMN: u8 = b'c';
    /// Name of a data type.
    pub const DATA_TYPE: u8 = b'd';
    /// Name of a constraint.
    pub const CONSTRAINT: u8 = b'n';
    /// Source file of the server.
    pub const FILE: u8 = b'F';
    /// Line of that file.
    pub const LINE: u8 = b'L';
    /// Routine in that file.
    pub const ROUTINE: u8 = b'R';
}

/// The body of an ErrorResponse or NoticeResponse. As an iterator: codes and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    /// Decodes a whole body. Unknown codes are kept, as the manual asks.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        let mut r = Reader::new(body);
        while r.u8()? != 0 {
            r.cstr()?;
        }
        r.end()?;
        Ok(Self { rest: body })
    }

    /// The value of a field of [`field`].
    pub fn get(mut self, code: u8) -> Option<&'a [u8]> {
        self.find_map(|(c, value)| (c == code).then_some(value))
    }

    /// `ERROR`, `FATAL`, `PANIC`, `WARNING`, `NOTICE`, ...: not translated, unless the server is older than 9.6.
    pub fn severity(self) -> Option<&'a [u8]> {
        self.get(field::SEVERITY).or_else(|| self.get(field::SEVERITY_LOCAL))
    }

    /// The SQLSTATE, when it is well-formed.
    pub fn sqlstate(self) -> Option<SqlState> {
        self.get(field::CODE).and_then(SqlState::new)
    }

    /// The primary message.
    pub fn message(self) -> Option<&'a [u8]> {
        self.get(field::MESSAGE)
    }

    /// More about the problem.
    pub fn detail(self) -> Option<&'a [u8]> {
        self.get(field::DETAIL)
    }

    /// What to do about it.
    pub fn hint(self) -> Option<&'a [u8]> {
        self.get(field::HINT)
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = (u8, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let mut r = Reader::new(self.rest);
        let code = r.u8().ok().filter(|&code| code != 0)?;
        let value = r.cstr().ok()?;
        self.rest = r.rest;
        Some((code, value))
    }
}

/// Severity of an error or notice, in the manual's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Severity {
    /// The statement failed; the session lives.
    Error,
    /// The session ends.
    Fatal,
    /// All sessions end.
    Panic,
    /// Something is probably wrong.
    Warning,
    /// Worth knowing.
    Notice,
    /// For developers.
    Debug,
    /// What was asked for.
    Info,
    /// For administrators.
    Log,
}

impl Severity {
    /// As in the fields `S` and `V`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Error => "ERROR",
            Self::Fatal => "FATAL",
            Self::Panic => "PANIC",
            Self::Warning => "WARNING",
            Self::Notice => "NOTICE",
            Self::Debug => "DEBUG",
            Self::Info => "INFO",
            Self::Log => "LOG",
        }
    }
}

/// The fields of an ErrorResponse or NoticeResponse that a pooler fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report<'a> {
    /// Fields `S` and `V`.
    pub severity: Severity,
    /// Field `C`.
    pub code: SqlState,
    /// Field `M`: one line.
    pub message: &'a str,
    /// Field `D`.
    pub detail: Option<&'a str>,
    /// Field `H`.
    pub hint: Option<&'a str>,
}

impl<'a> Report<'a> {
    /// A report without detail and hint.
    pub const fn new(severity: Severity, code: SqlState, message: &'a str) -> Self {
        Self { severity, code, message, detail: None, hint: None }
    }
}
