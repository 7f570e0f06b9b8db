// SPDX-License-Identifier: Apache-2.0
//! Query, FunctionCall and the client's side of COPY.

use crate::reader::Reader;
use crate::{Formats, MessageError, Values};

/// Simple query: one string with any number of statements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Query<'a> {
    /// The text.
    pub query: &'a [u8],
}

impl<'a> Query<'a> {
    /// Decodes a whole body.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        let mut r = Reader::new(body);
        let query = r.cstr()?;
        r.end()?;
        Ok(Self { query })
    }
}

/// The old fast-path call of a function.
#[derive(Clone, Copy, Debug)]
pub struct FunctionCall<'a> {
    /// The function's object identifier.
    pub function: u32,
    /// None (all text), one (for all), or one for each argument.
    pub arg_formats: Formats<'a>,
    /// The arguments.
    pub args: Values<'a>,
    /// The result's format: 0 text, 1 binary.
    pub result_format: u16,
}

impl<'a> FunctionCall<'a> {
    /// Decodes a whole body.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        let mut r = Reader::new(body);
        let call = Self {
            function: r.u32()?,
            arg_formats: r.formats()?,
            args: r.values()?,
            result_format: r.u16()?,
        };
        r.end()?;
        if call.arg_formats.len() > 1 && call.arg_formats.len() != call.args.len() {
            return Err(MessageError::FormatCount);
        }
        if call.result_format > 1 {
            return Err(MessageError::FormatCode);
        }
        Ok(call)
    }
}

/// A part of a COPY stream, cut anywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyData<'a> {
    /// The bytes.
    pub data: &'a [u8],
}

impl<'a> CopyData<'a> {
    /// The whole body is data.
    pub const fn decode(body: &'a [u8]) -> Self {
        Self { data: body }
    }
}

/// The client gives up COPY IN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyFail<'a> {
    /// What the server's error will quote.
    pub message: &'a [u8],
}

impl<'a> CopyFail<'a> {
    /// Decodes a whole body.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        let mut r = Reader::new(body);
        let message = r.cstr()?;
        r.end()?;
        Ok(Self { message })
    }
}
