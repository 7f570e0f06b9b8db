// SPDX-License-Identifier: Apache-2.0
//! Values of the binary protocol, as COM_STMT_EXECUTE carries them.

use std::fmt::Write as _;

use crate::Error;
use crate::reader::Reader;

/// Bit of a parameter's type that says that its number has no sign.
const UNSIGNED: u16 = 0x8000;

/// Types, `MYSQL_TYPE_*`, whose values are not strings.
mod kind {
    pub(super) const TINY: u8 = 1;
    pub(super) const SHORT: u8 = 2;
    pub(super) const LONG: u8 = 3;
    pub(super) const FLOAT: u8 = 4;
    pub(super) const DOUBLE: u8 = 5;
    pub(super) const NULL: u8 = 6;
    pub(super) const TIMESTAMP: u8 = 7;
    pub(super) const LONGLONG: u8 = 8;
    pub(super) const INT24: u8 = 9;
    pub(super) const DATE: u8 = 10;
    pub(super) const TIME: u8 = 11;
    pub(super) const DATETIME: u8 = 12;
    pub(super) const YEAR: u8 = 13;
}

/// A parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Parameter<'a> {
    /// NULL.
    Null,
    /// A number with a sign.
    Signed(i64),
    /// A number without.
    Unsigned(u64),
    /// FLOAT.
    Float(f32),
    /// DOUBLE.
    Double(f64),
    /// DATE, DATETIME, TIMESTAMP: as on the wire, 0, 4, 7 or 11 bytes.
    Date(&'a [u8]),
    /// TIME: as on the wire, 0, 8 or 12 bytes.
    Time(&'a [u8]),
    /// Strings, decimals, blobs and all that is sent as such.
    Bytes(&'a [u8]),
    /// Sent before, by COM_STMT_SEND_LONG_DATA.
    Long,
}

impl Parameter<'_> {
    /// The value as the server would write it in the text protocol; `None` for NULL, and for [`Parameter::Long`], whose bytes are
    /// elsewhere.
    pub fn text(&self) -> Option<Vec<u8>> {
        Some(match *self {
            Self::Null | Self::Long => return None,
            Self::Signed(number) => number.to_string().into_bytes(),
            Self::Unsigned(number) => number.to_string().into_bytes(),
            Self::Float(number) => number.to_string().into_bytes(),
            Self::Double(number) => number.to_string().into_bytes(),
            Self::Date(fields) => date(fields).into_bytes(),
            Self::Time(fields) => time(fields).into_bytes(),
            Self::Bytes(bytes) => bytes.to_vec(),
        })
    }
}

fn date(fields: &[u8]) -> String {
    let mut text = match *fields {
        [a, b, month, day, ..] => format!("{:04}-{month:02}-{day:02}", u16::from_le_bytes([a, b])),
        _ => "0000-00-00".to_owned(),
    };
    if let [_, _, _, _, hour, minute, second, micros @ ..] = fields {
        let _ = write!(text, " {hour:02}:{minute:02}:{second:02}");
        micro(&mut text, micros);
    }
    text
}

/// Days are hours in the text of TIME.
fn time(fields: &[u8]) -> String {
    let [sign, a, b, c, d, hour, minute, second, micros @ ..] = fields else { return "00:00:00".to_owned() };
    let hours = u64::from(u32::from_le_bytes([*a, *b, *c, *d])) * 24 + u64::from(*hour);
    let mut text = format!("{}{hours:02}:{minute:02}:{second:02}", if *sign == 0 { "" } else { "-" });
    micro(&mut text, micros);
    text
}

fn micro(text: &mut String, bytes: &[u8]) {
    if let Ok(bytes) = bytes.try_into() {
        let _ = write!(text, ".{:06}", u32::from_le_bytes(bytes));
    }
}

/// Reads what stands behind the head of COM_STMT_EXECUTE, or of a COM_QUERY with attributes, for `count` parameters: which are NULL,
/// whether types follow, the types (with names, when `named`), the values.
pub(crate) fn decode<'a>(
    reader: &mut Reader<'a>,
    count: usize,
    named: bool,
    types: &mut Vec<u16>,
    is_long: impl Fn(usize) -> bool,
) -> Result<Vec<Parameter<'a>>, Error> {
    let nulls = reader.take(count.div_ceil(8), "the map of NULLs")?;
    if reader.u8("the mark of types")? != 0 {
        types.clear();
        for _ in 0..count {
            types.push(reader.u16("a type")?);
            if named {
                reader.string("a parameter's name")?;
            }
        }
    }
    let mut values = Vec::new();
    for at in 0..count {
        let is_null = nulls[at / 8] & (1 << (at % 8)) != 0;
        values.push(if is_long(at) {
            Parameter::Long
        } else if is_null {
            Parameter::Null
        } else {
            parameter(reader, *types.get(at).ok_or(Error::Truncated("the types of an earlier execution"))?)?
        });
    }
    Ok(values)
}

fn parameter<'a>(reader: &mut Reader<'a>, wire_type: u16) -> Result<Parameter<'a>, Error> {
    let what = "a parameter";
    let number = |signed: i64, unsigned: u64| match wire_type & UNSIGNED {
        0 => Parameter::Signed(signed),
        _ => Parameter::Unsigned(unsigned),
    };
    Ok(match wire_type as u8 {
        kind::NULL => Parameter::Null,
        kind::TINY => reader.u8(what).map(|byte| number((byte as i8).into(), byte.into()))?,
        kind::SHORT | kind::YEAR => reader.u16(what).map(|word| number((word as i16).into(), word.into()))?,
        kind::LONG | kind::INT24 => reader.u32(what).map(|word| number((word as i32).into(), word.into()))?,
        kind::LONGLONG => {
            let word = u64::from(reader.u32(what)?) | u64::from(reader.u32(what)?) << 32;
            number(word as i64, word)
        }
        kind::FLOAT => Parameter::Float(f32::from_bits(reader.u32(what)?)),
        kind::DOUBLE => {
            let bits = u64::from(reader.u32(what)?) | u64::from(reader.u32(what)?) << 32;
            Parameter::Double(f64::from_bits(bits))
        }
        kind::DATE | kind::DATETIME | kind::TIMESTAMP => {
            let len = reader.u8(what)?;
            Parameter::Date(reader.take(len.into(), what)?)
        }
        kind::TIME => {
            let len = reader.u8(what)?;
            Parameter::Time(reader.take(len.into(), what)?)
        }
        // VECTOR (MySQL 9) is 242.
        0 | 15 | 16 | 242 | 245..=255 => Parameter::Bytes(reader.string(what)?),
        other => return Err(Error::Type(other)),
    })
}
