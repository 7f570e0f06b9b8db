// SPDX-License-Identifier: Apache-2.0
//! The four SCRAM messages (RFC 5802 section 7), read as PostgreSQL's auth-scram.c reads them.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;

use super::KEY_LEN;

/// Why a message is not SCRAM; the text continues "malformed SCRAM message: ".
pub(crate) type Malformed = &'static str;

/// Reads `x=value` attributes separated by commas.
struct Attributes<'a> {
    rest: Option<&'a str>,
}

impl<'a> Attributes<'a> {
    fn new(text: &'a str) -> Self {
        Self { rest: Some(text) }
    }

    fn any(&mut self) -> Result<(u8, &'a str), Malformed> {
        let rest = self.rest.ok_or("attribute missing")?;
        let (attribute, rest) = match rest.split_once(',') {
            Some((attribute, rest)) => (attribute, Some(rest)),
            None => (rest, None),
        };
        self.rest = rest;
        match attribute.as_bytes() {
            [name, b'=', ..] if name.is_ascii_alphabetic() => Ok((*name, &attribute[2..])),
            _ => Err("attribute expected"),
        }
    }

    fn expect(&mut self, name: u8) -> Result<&'a str, Malformed> {
        match self.any()? {
            (b'm', _) => Err("an extension is demanded that is not supported"),
            (found, value) if found == name => Ok(value),
            _ => Err("unexpected attribute"),
        }
    }

    /// Extensions without a demand may follow and mean nothing.
    fn end(mut self) -> Result<(), Malformed> {
        while self.rest.is_some() {
            self.any()?;
        }
        Ok(())
    }
}

pub(crate) fn text(payload: &[u8]) -> Result<&str, Malformed> {
    if payload.contains(&0) {
        return Err("NUL byte");
    }
    std::str::from_utf8(payload).map_err(|_| "not UTF-8")
}

/// Printable ASCII without the comma, at least one character.
fn nonce(value: &str) -> Result<&str, Malformed> {
    if value.is_empty() || !value.bytes().all(|b| b.is_ascii_graphic()) {
        return Err("nonce with unprintable characters");
    }
    Ok(value)
}

/// The channel binding flag at the start of client-first-message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BindingFlag<'a> {
    /// `n`: the client does not support channel binding.
    No,
    /// `y`: the client does, but believes that the server does not.
    ServerLacks,
    /// `p=type`: the client uses it.
    Used(&'a str),
}

#[derive(Debug)]
pub(crate) struct ClientFirst<'a> {
    pub flag: BindingFlag<'a>,
    /// Whether an authorization identity is given, which PostgreSQL refuses.
    pub authzid: bool,
    /// gs2-header, repeated by the client in `c=` of its final message.
    pub gs2_header: &'a str,
    /// client-first-message-bare, a part of AuthMessage.
    pub bare: &'a str,
    pub nonce: &'a str,
}

impl<'a> ClientFirst<'a> {
    pub(crate) fn parse(payload: &'a [u8]) -> Result<Self, Malformed> {
        let message = text(payload)?;
        let mut parts = message.splitn(3, ',');
        let (Some(flag), Some(authzid), Some(bare)) = (parts.next(), parts.next(), parts.next()) else {
            return Err("GS2 header expected");
        };
        let flag = match flag {
            "n" => BindingFlag::No,
            "y" => BindingFlag::ServerLacks,
            _ => BindingFlag::Used(flag.strip_prefix("p=").ok_or("unknown channel binding flag")?),
        };
        let authzid = match authzid {
            "" => false,
            _ if authzid.starts_with("a=") => true,
            _ => return Err("authorization identity expected"),
        };
        let mut attributes = Attributes::new(bare);
        attributes.expect(b'n')?;
        let nonce = nonce(attributes.expect(b'r')?)?;
        attributes.end()?;
        let gs2_header = &message[..message.len() - bare.len()];
        Ok(Self { flag, authzid, gs2_header, bare, nonce })
    }
}

#[derive(Debug)]
pub(crate) struct ServerFirst<'a> {
    pub nonce: &'a str,
    pub salt: Vec<u8>,
    pub iterations: u32,
}

impl<'a> ServerFirst<'a> {
    pub(crate) fn parse(message: &'a str) -> Result<Self, Malformed> {
        let mut attributes = Attributes::new(message);
        let nonce = nonce(attributes.expect(b'r')?)?;
        let salt = BASE64.decode(attributes.expect(b's')?).map_err(|_| "salt is not base64")?;
        let iterations = attributes.expect(b'i')?;
        if !iterations.bytes().all(|b| b.is_ascii_digit()) {
            return Err("invalid iteration count");
        }
        let iterations = iterations.parse().ok().filter(|&n| n > 0).ok_or("invalid iteration count")?;
        attributes.end()?;
        Ok(Self { nonce, salt, iterations })
    }
}

#[derive(Debug)]
pub(crate) struct ClientFinal<'a> {
    /// `c=`, still base64.
    pub binding: &'a str,
    pub nonce: &'a str,
    pub proof: [u8; KEY_LEN],
    /// client-final-message-without-proof, a part of AuthMessage.
    pub without_proof: &'a str,
}

impl<'a> ClientFinal<'a> {
    pub(crate) fn parse(payload: &'a [u8]) -> Result<Self, Malformed> {
        let message = text(payload)?;
        // The proof is the last attribute, and base64 has no comma.
        let (without_proof, proof) = message.rsplit_once(",p=").ok_or("proof expected")?;
        let mut attributes = Attributes::new(without_proof);
        let binding = attributes.expect(b'c')?;
        let nonce = attributes.expect(b'r')?;
        attributes.end()?;
        let proof = BASE64.decode(proof).map_err(|_| "proof is not base64")?;
        let proof = proof.try_into().map_err(|_| "proof of the wrong length")?;
        Ok(Self { binding, nonce, proof, without_proof })
    }
}

/// server-final-message: the signature, or the error the server names (`e=`).
pub(crate) fn server_final(payload: &[u8]) -> Result<Result<[u8; KEY_LEN], &str>, Malformed> {
    let mut attributes = Attributes::new(text(payload)?);
    match attributes.any()? {
        (b'v', value) => {
            attributes.end()?;
            let signature = BASE64.decode(value).map_err(|_| "server signature is not base64")?;
            Ok(Ok(signature.try_into().map_err(|_| "server signature of the wrong length")?))
        }
        (b'e', error) => Ok(Err(error)),
        _ => Err("server signature expected"),
    }
}
