// SPDX-License-Identifier: Apache-2.0
//! The answers to authentication requests. All are of type `p`: what was asked last tells them apart.
//!
//! Their `Debug` shows lengths only: the contents are secrets.

use std::fmt;

use crate::MessageError;
use crate::reader::Reader;

/// A password, in clear or as `md5` and 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PasswordMessage<'a> {
    /// Without the terminator.
    pub password: &'a [u8],
}

impl<'a> PasswordMessage<'a> {
    /// Decodes a whole body. An empty password is well-formed here; PostgreSQL refuses it with 28P01.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        let mut r = Reader::new(body);
        let password = r.cstr()?;
        r.end()?;
        Ok(Self { password })
    }
}

impl fmt::Debug for PasswordMessage<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PasswordMessage({} bytes)", self.password.len())
    }
}

/// The choice of a SASL mechanism, with its first message.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SaslInitialResponse<'a> {
    /// `SCRAM-SHA-256` or `SCRAM-SHA-256-PLUS`.
    pub mechanism: &'a [u8],
    /// The mechanism's first client message; `None` when the length is -1.
    pub data: Option<&'a [u8]>,
}

impl<'a> SaslInitialResponse<'a> {
    /// Decodes a whole body.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        let mut r = Reader::new(body);
        let response = Self { mechanism: r.cstr()?, data: r.value()? };
        r.end()?;
        Ok(response)
    }
}

impl fmt::Debug for SaslInitialResponse<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mechanism = self.mechanism.escape_ascii();
        write!(f, "SASLInitialResponse({mechanism}, {} bytes)", self.data.map_or(0, <[u8]>::len))
    }
}

/// A further message of the chosen mechanism.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SaslResponse<'a> {
    /// The mechanism's data.
    pub data: &'a [u8],
}

impl<'a> SaslResponse<'a> {
    /// The whole body is data.
    pub const fn decode(body: &'a [u8]) -> Self {
        Self { data: body }
    }
}

impl fmt::Debug for SaslResponse<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SASLResponse({} bytes)", self.data.len())
    }
}
