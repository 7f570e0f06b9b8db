// SPDX-License-Identifier: Apache-2.0
//! Results: descriptions, rows, the announcement of COPY.

use crate::reader::Reader;
use crate::{Formats, MessageError, Oids, Values};

/// Types of a statement's parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParameterDescription<'a> {
    /// One for each parameter.
    pub types: Oids<'a>,
}

impl<'a> ParameterDescription<'a> {
    /// Decodes a whole body.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        let mut r = Reader::new(body);
        let types = r.oids()?;
        r.end()?;
        Ok(Self { types })
    }
}

/// One column of a RowDescription.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldDescription<'a> {
    /// The column's name.
    pub name: &'a [u8],
    /// Its table, or 0.
    pub table_oid: u32,
    /// Its number in that table, or 0.
    pub attribute: i16,
    /// Its type.
    pub type_oid: u32,
    /// The type's size, bytes; negative for variable size (`pg_type.typlen`).
    pub type_size: i16,
    /// The type's modifier, -1 for none (`pg_attribute.atttypmod`).
    pub type_modifier: i32,
    /// 0 text, 1 binary; 0 when described before Bind.
    pub format: u16,
}

impl<'a> FieldDescription<'a> {
    /// A column in text format that belongs to no table, as a console's are. `type_size` as in `pg_type.typlen`.
    pub const fn new(name: &'a [u8], type_oid: u32, type_size: i16) -> Self {
        Self { name, table_oid: 0, attribute: 0, type_oid, type_size, type_modifier: -1, format: 0 }
    }

    fn read(r: &mut Reader<'a>) -> Result<Self, MessageError> {
        let field = Self {
            name: r.cstr()?,
            table_oid: r.u32()?,
            attribute: r.i16()?,
            type_oid: r.u32()?,
            type_size: r.i16()?,
            type_modifier: r.i32()?,
            format: r.u16()?,
        };
        if field.format > 1 { Err(MessageError::FormatCode) } else { Ok(field) }
    }
}

/// Columns of the rows that follow. As an iterator: its fields.
#[derive(Clone, Copy, Debug)]
pub struct RowDescription<'a> {
    left: u16,
    reader: Reader<'a>,
}

impl<'a> RowDescription<'a> {
    /// Decodes a whole body.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        let mut r = Reader::new(body);
        let left = r.u16()?;
        let reader = r;
        for _ in 0..left {
            FieldDescription::read(&mut r)?;
        }
        r.end()?;
        Ok(Self { left, reader })
    }
}

impl<'a> Iterator for RowDescription<'a> {
    type Item = FieldDescription<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        FieldDescription::read(&mut self.reader).ok() // checked when the view was made
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (usize::from(self.left), Some(usize::from(self.left)))
    }
}

impl ExactSizeIterator for RowDescription<'_> {}

/// One row.
#[derive(Clone, Copy, Debug)]
pub struct DataRow<'a> {
    /// One for each column.
    pub columns: Values<'a>,
}

impl<'a> DataRow<'a> {
    /// Decodes a whole body.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        let mut r = Reader::new(body);
        let columns = r.values()?;
        r.end()?;
        Ok(Self { columns })
    }
}

/// CopyInResponse, CopyOutResponse, CopyBothResponse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyResponse<'a> {
    /// Of the whole: 0 text, 1 binary.
    pub format: u8,
    /// Of each column; all 0 when the whole is text.
    pub column_formats: Formats<'a>,
}

impl<'a> CopyResponse<'a> {
    /// Decodes a whole body.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        let mut r = Reader::new(body);
        let response = Self { format: r.u8()?, column_formats: r.formats()? };
        r.end()?;
        if response.format > 1 { Err(MessageError::FormatCode) } else { Ok(response) }
    }
}

/// The result of FunctionCall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionCallResponse<'a> {
    /// `None` is null.
    pub value: Option<&'a [u8]>,
}

impl<'a> FunctionCallResponse<'a> {
    /// Decodes a whole body.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        let mut r = Reader::new(body);
        let value = r.value()?;
        r.end()?;
        Ok(Self { value })
    }
}
