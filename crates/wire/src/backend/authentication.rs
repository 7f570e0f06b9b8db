// SPDX-License-Identifier: Apache-2.0
//! The AuthenticationXXX family: type `R`, told apart by the first word of the body.

use crate::MessageError;
use crate::reader::Reader;

/// What the server wants, or says, during the login.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Authentication<'a> {
    /// 0: the login succeeded.
    Ok,
    /// 2: Kerberos V5; no server of today sends it.
    KerberosV5,
    /// 3: a password in clear.
    CleartextPassword,
    /// 5: a password hashed with this salt.
    Md5Password {
        /// Random.
        salt: [u8; 4],
    },
    /// 7: GSSAPI begins.
    Gss,
    /// 8: GSSAPI or SSPI data.
    GssContinue {
        /// For the library.
        data: &'a [u8],
    },
    /// 9: SSPI begins.
    Sspi,
    /// 10: SASL begins, with one of these mechanisms.
    Sasl {
        /// In the server's order of preference.
        mechanisms: Mechanisms<'a>,
    },
    /// 11: the mechanism's next server message.
    SaslContinue {
        /// Of the mechanism.
        data: &'a [u8],
    },
    /// 12: the mechanism's last server message; Ok follows.
    SaslFinal {
        /// Of the mechanism.
        data: &'a [u8],
    },
}

impl<'a> Authentication<'a> {
    /// Decodes a whole body.
    pub fn decode(body: &'a [u8]) -> Result<Self, MessageError> {
        let mut r = Reader::new(body);
        let request = match r.u32()? {
            0 => Self::Ok,
            2 => Self::KerberosV5,
            3 => Self::CleartextPassword,
            5 => Self::Md5Password { salt: r.bytes4()? },
            7 => Self::Gss,
            8 => return Ok(Self::GssContinue { data: r.rest }),
            9 => Self::Sspi,
            10 => return Ok(Self::Sasl { mechanisms: Mechanisms::decode(r)? }),
            11 => return Ok(Self::SaslContinue { data: r.rest }),
            12 => return Ok(Self::SaslFinal { data: r.rest }),
            _ => return Err(MessageError::UnknownAuthentication),
        };
        r.end()?;
        Ok(request)
    }
}

/// Names of SASL mechanisms: an iterator, in the server's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mechanisms<'a> {
    rest: &'a [u8],
}

impl<'a> Mechanisms<'a> {
    fn decode(mut r: Reader<'a>) -> Result<Self, MessageError> {
        let rest = r.rest;
        while !r.cstr()?.is_empty() {}
        r.end()?;
        Ok(Self { rest })
    }
}

impl<'a> Iterator for Mechanisms<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let mut r = Reader::new(self.rest);
        let name = r.cstr().ok().filter(|name| !name.is_empty())?;
        self.rest = r.rest;
        Some(name)
    }
}
