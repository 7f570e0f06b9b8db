// SPDX-License-Identifier: Apache-2.0
//! The login: the server greets, the client answers, and both exchange what the authentication plugin wants until OK or ERR.

use crate::capability::{self, Capabilities};
use crate::reader::{Reader, put_integer, put_string};
use crate::{Error, packet};

/// First byte of an AuthSwitchRequest; alone, it asks for a password of before MySQL 4.1.
pub const AUTH_SWITCH: u8 = 0xfe;
/// First byte of more authentication data.
pub const AUTH_MORE: u8 = 0x01;
/// The plugin of a greeting that names none.
pub const NATIVE_PASSWORD: &[u8] = b"mysql_native_password";
/// Bytes of an SSLRequest.
pub const SSL_REQUEST_BYTES: usize = 32;
/// The protocol's version since MySQL 3.21.
const VERSION: u8 = 10;

/// The server's first message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Greeting<'a> {
    /// `5.5.5-10.11.19-MariaDB`: MariaDB hides behind 5.5.5 from old clients; see [`Greeting::server_version`].
    pub version: &'a [u8],
    /// The connection's number, which KILL takes.
    pub connection_id: u32,
    /// What the server can do.
    pub capabilities: Capabilities,
    /// Collation of the server.
    pub collation: u8,
    /// Flags of [`crate::response::status`].
    pub status: u16,
    /// What the password is hashed with: 20 bytes, without the zero behind them.
    pub nonce: Vec<u8>,
    /// The plugin of that nonce.
    pub plugin: &'a [u8],
}

impl<'a> Greeting<'a> {
    /// Reads a payload.
    ///
    /// # Errors
    /// [`Error::OldProtocol`], [`Error::Truncated`]. A server that refuses at once sends an ERR packet instead:
    /// [`Error::Unexpected`].
    pub fn decode(payload: &'a [u8]) -> Result<Self, Error> {
        let mut reader = Reader::new(payload);
        match reader.u8("the greeting")? {
            VERSION => {}
            0xff => return Err(Error::Unexpected { what: "a greeting", byte: 0xff }),
            old => return Err(Error::OldProtocol(old)),
        }
        let version = reader.string_nul("the server's version")?;
        let connection_id = reader.u32("the connection's number")?;
        let mut nonce = reader.take(8, "the nonce")?.to_vec();
        reader.take(1, "the greeting")?;
        let low = u64::from(reader.u16("the capabilities")?);
        let collation = reader.u8("the collation")?;
        let status = reader.u16("the status")?;
        let mut capabilities = low | u64::from(reader.u16("the capabilities")?) << 16;
        let nonce_len = reader.u8("the nonce's length")?;
        reader.take(6, "the greeting")?;
        let own = reader.u32("the capabilities")?;
        if low & capability::LONG_PASSWORD == 0 {
            capabilities |= u64::from(own) << 32;
        }
        if capabilities & capability::SECURE_CONNECTION != 0 {
            let rest = usize::from(nonce_len).saturating_sub(8).max(13);
            let second = reader.take(rest, "the nonce")?;
            nonce.extend_from_slice(second.strip_suffix(&[0]).unwrap_or(second));
        }
        let plugin = if capabilities & capability::PLUGIN_AUTH != 0 {
            // Some versions of MySQL 5.5 forgot the zero.
            reader.string_nul("the plugin").unwrap_or(reader.rest())
        } else {
            NATIVE_PASSWORD
        };
        let capabilities = Capabilities(capabilities);
        Ok(Self { version, connection_id, capabilities, collation, status, nonce, plugin })
    }

    /// The version without what hides MariaDB's.
    pub fn server_version(&self) -> &'a [u8] {
        match self.version.strip_prefix(b"5.5.5-") {
            Some(own) if own.windows(7).any(|word| word == b"MariaDB") => own,
            _ => self.version,
        }
    }
}

/// The client's first message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum First<'a> {
    /// TLS begins behind it.
    SslRequest,
    /// The login.
    Login(Login<'a>),
}

/// HandshakeResponse41, without the password's hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Login<'a> {
    /// What both use from here on.
    pub capabilities: Capabilities,
    /// Collation of the connection, which decides its character set.
    pub collation: u8,
    /// The user.
    pub user: &'a [u8],
    /// The database.
    pub database: Option<&'a [u8]>,
    /// The plugin that the client used.
    pub plugin: Option<&'a [u8]>,
    /// `program_name` and others, in the client's order.
    pub attributes: Vec<(&'a [u8], &'a [u8])>,
}

impl<'a> First<'a> {
    /// Reads a payload.
    ///
    /// # Errors
    /// [`Error::OldProtocol`] of a client from before MySQL 4.1, [`Error::Truncated`].
    pub fn decode(payload: &'a [u8]) -> Result<Self, Error> {
        let mut reader = Reader::new(payload);
        let mut capabilities = u64::from(reader.u32("the capabilities")?);
        if capabilities & capability::PROTOCOL_41 == 0 {
            return Err(Error::OldProtocol(VERSION));
        }
        reader.u32("the longest packet")?;
        let collation = reader.u8("the collation")?;
        reader.take(19, "the login")?;
        let own = reader.u32("the capabilities")?;
        if capabilities & capability::LONG_PASSWORD == 0 {
            capabilities |= u64::from(own) << 32;
        }
        let capabilities = Capabilities(capabilities);
        if reader.is_empty() && capabilities.has(capability::SSL) {
            return Ok(Self::SslRequest);
        }
        let user = reader.string_nul("the user")?;
        if capabilities.has(capability::PLUGIN_AUTH_LENENC) {
            reader.string("the password")?;
        } else if capabilities.has(capability::SECURE_CONNECTION) {
            let len = reader.u8("the password")?;
            reader.take(len.into(), "the password")?;
        } else {
            reader.string_nul("the password")?;
        }
        // What comes now may be missing, even where the flags promise it.
        let mut optional = |flag, what| match capabilities.has(flag) && !reader.is_empty() {
            true => reader.string_nul(what).map(Some),
            false => Ok(None),
        };
        let database = optional(capability::CONNECT_WITH_DB, "the database")?.filter(|name| !name.is_empty());
        let plugin = optional(capability::PLUGIN_AUTH, "the plugin")?;
        let mut attributes = Vec::new();
        if capabilities.has(capability::CONNECT_ATTRS) && !reader.is_empty() {
            let mut list = Reader::new(reader.string("the attributes")?);
            while !list.is_empty() {
                attributes.push((list.string("an attribute")?, list.string("an attribute")?));
            }
        }
        Ok(Self::Login(Login { capabilities, collation, user, database, plugin, attributes }))
    }
}

impl Login<'_> {
    /// Appends the login as a message, with the password's hash as the plugin makes it.
    pub fn put(&self, out: &mut Vec<u8>, sequence: u8, password: &[u8]) {
        let flag = |on: bool, flag: u64| if on { flag } else { 0 };
        let capabilities = self.capabilities.0
            | capability::PROTOCOL_41
            | capability::PLUGIN_AUTH_LENENC
            | capability::SECURE_CONNECTION
            | flag(self.database.is_some(), capability::CONNECT_WITH_DB)
            | flag(self.plugin.is_some(), capability::PLUGIN_AUTH)
            | flag(!self.attributes.is_empty(), capability::CONNECT_ATTRS);
        let mut body = Vec::new();
        body.extend_from_slice(&(capabilities as u32).to_le_bytes());
        body.extend_from_slice(&(packet::MESSAGE_BYTES_MAX as u32).to_le_bytes());
        body.push(self.collation);
        body.extend_from_slice(&[0; 19]);
        let own = if capabilities & capability::LONG_PASSWORD == 0 { (capabilities >> 32) as u32 } else { 0 };
        body.extend_from_slice(&own.to_le_bytes());
        body.extend_from_slice(self.user);
        body.push(0);
        put_string(&mut body, password);
        for name in [self.database, self.plugin].into_iter().flatten() {
            body.extend_from_slice(name);
            body.push(0);
        }
        if !self.attributes.is_empty() {
            let mut list = Vec::new();
            for (name, value) in &self.attributes {
                put_string(&mut list, name);
                put_string(&mut list, value);
            }
            put_integer(&mut body, list.len() as u64);
            body.extend_from_slice(&list);
        }
        packet::put_message(out, sequence, &body);
    }
}

/// Appends the request for TLS that a client makes before its login.
pub fn put_ssl_request(out: &mut Vec<u8>, sequence: u8, capabilities: Capabilities, collation: u8) {
    let mut body = Vec::with_capacity(SSL_REQUEST_BYTES);
    body.extend_from_slice(&((capabilities.0 | capability::SSL) as u32).to_le_bytes());
    body.extend_from_slice(&(packet::MESSAGE_BYTES_MAX as u32).to_le_bytes());
    body.push(collation);
    body.resize(SSL_REQUEST_BYTES, 0);
    packet::put_message(out, sequence, &body);
}

/// AuthSwitchRequest: the account wants another plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuthSwitch<'a> {
    /// The plugin.
    pub plugin: &'a [u8],
    /// What it begins with: its nonce, and with most plugins a zero behind it.
    pub data: &'a [u8],
}

impl<'a> AuthSwitch<'a> {
    /// Reads a payload that begins with [`AUTH_SWITCH`].
    ///
    /// # Errors
    /// [`Error::Unexpected`], [`Error::Truncated`].
    pub fn decode(payload: &'a [u8]) -> Result<Self, Error> {
        let mut reader = Reader::new(payload);
        match reader.u8("the switch of plugins")? {
            AUTH_SWITCH if reader.is_empty() => Ok(Self { plugin: b"mysql_old_password", data: b"" }),
            AUTH_SWITCH => {
                let plugin = reader.string_nul("the plugin")?;
                Ok(Self { plugin, data: reader.rest() })
            }
            byte => Err(Error::Unexpected { what: "a switch of plugins", byte }),
        }
    }
}
