// SPDX-License-Identifier: Apache-2.0
//! The extended query protocol: Parse, Bind, Describe, Execute, Close.

use crate::reader::Reader;
use crate::{Formats, MessageError, Oids, Values};

/// Prepares a statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parse<'a> {
    /// The statement's name; empty for the unnamed one.
    pub name: &'a [u8],
    /// One SQL statement.
    pub query: &'a [u8],
    /// Types of the first parameters; 0 leaves one to the server.
    pub param_types: Oids<'a>,
}

impl<'a> Parse<'a> {
    /// Decodes a whole body.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        let mut r = Reader::new(body);
        let parse = Self { name: r.cstr()?, query: r.cstr()?, param_types: r.oids()? };
        r.end()?;
        Ok(parse)
    }
}

/// The names at the front of a Bind, and where the rest begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BindNames<'a> {
    /// The portal to make; empty for the unnamed one.
    pub portal: &'a [u8],
    /// The statement to run; empty for the unnamed one.
    pub statement: &'a [u8],
    /// Offset in the body of what follows the two names, bytes.
    pub rest: usize,
}

/// Reads the names as soon as both are present in the beginning of a Bind's body. `None` says that more bytes
/// are needed, or, when `partial` is the whole body, that the message is malformed.
#[inline]
pub fn bind_names(partial: &[u8]) -> Option<BindNames<'_>> {
    let mut r = Reader::new(partial);
    let (portal, statement) = (r.cstr().ok()?, r.cstr().ok()?);
    Some(BindNames { portal, statement, rest: partial.len() - r.rest.len() })
}

/// Reads the string at the front of a partial body: the statement of a Parse, the portal of an Execute.
/// `None` as for [`bind_names`].
#[inline]
pub fn first_name(partial: &[u8]) -> Option<&[u8]> {
    Reader::new(partial).cstr().ok()
}

/// Binds parameters to a statement, which makes a portal.
#[derive(Clone, Copy, Debug)]
pub struct Bind<'a> {
    /// The portal to make; empty for the unnamed one.
    pub portal: &'a [u8],
    /// The statement to run; empty for the unnamed one.
    pub statement: &'a [u8],
    /// Offset in the body of what follows the two names, bytes.
    pub rest: usize,
    /// What follows them.
    pub arguments: BindArguments<'a>,
}

/// Parameters and formats of a Bind.
#[derive(Clone, Copy, Debug)]
pub struct BindArguments<'a> {
    /// None (all text), one (for all), or one for each parameter.
    pub param_formats: Formats<'a>,
    /// The parameters.
    pub params: Values<'a>,
    /// None (all text), one (for all), or one for each result column.
    pub result_formats: Formats<'a>,
}

impl<'a> Bind<'a> {
    /// Decodes a whole body, values included.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        let BindNames { portal, statement, rest } =
            bind_names(body).ok_or(MessageError::MissingTerminator)?;
        let mut r = Reader::new(&body[rest..]);
        let param_formats = r.formats()?;
        let params = r.values()?;
        if param_formats.len() > 1 && param_formats.len() != params.len() {
            return Err(MessageError::FormatCount);
        }
        let result_formats = r.formats()?;
        r.end()?;
        Ok(Self {
            portal,
            statement,
            rest,
            arguments: BindArguments { param_formats, params, result_formats },
        })
    }
}

/// What Describe and Close speak of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// `S`: a prepared statement.
    Statement,
    /// `P`: a portal.
    Portal,
}

impl Target {
    /// The byte on the wire.
    pub const fn to_byte(self) -> u8 {
        match self {
            Self::Statement => b'S',
            Self::Portal => b'P',
        }
    }

    fn from_byte(byte: u8) -> Result<Self, MessageError> {
        match byte {
            b'S' => Ok(Self::Statement),
            b'P' => Ok(Self::Portal),
            _ => Err(MessageError::Target),
        }
    }
}

/// Asks for the shape of a statement or portal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Describe<'a> {
    /// Which kind.
    pub target: Target,
    /// Its name; empty for the unnamed one.
    pub name: &'a [u8],
}

/// Forgets a statement or portal. It is no error when there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Close<'a> {
    /// Which kind.
    pub target: Target,
    /// Its name; empty for the unnamed one.
    pub name: &'a [u8],
}

fn target_and_name(body: &[u8]) -> Result<(Target, &[u8]), MessageError> {
    let mut r = Reader::new(body);
    let target = Target::from_byte(r.u8()?)?;
    let name = r.cstr()?;
    r.end()?;
    Ok((target, name))
}

impl<'a> Describe<'a> {
    /// Decodes a whole body.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        target_and_name(body).map(|(target, name)| Self { target, name })
    }
}

impl<'a> Close<'a> {
    /// Decodes a whole body.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        target_and_name(body).map(|(target, name)| Self { target, name })
    }
}

/// Runs a portal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Execute<'a> {
    /// The portal; empty for the unnamed one.
    pub portal: &'a [u8],
    /// The most rows to return; 0 and below: all.
    pub max_rows: i32,
}

impl<'a> Execute<'a> {
    /// Decodes a whole body.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        let mut r = Reader::new(body);
        let execute = Self { portal: r.cstr()?, max_rows: r.i32()? };
        r.end()?;
        Ok(execute)
    }
}
