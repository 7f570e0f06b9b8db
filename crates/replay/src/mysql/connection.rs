// SPDX-License-Identifier: Apache-2.0
//! The login, and statements of our own.

use std::borrow::Cow;

use underpass_auth::Secret;
use underpass_mysql::auth::{self, FAST_AUTH_DONE, FULL_AUTH_WANTED};
use underpass_mysql::capability::{self, Capabilities};
use underpass_mysql::command::{COM_QUERY, COM_STMT_CLOSE, COM_STMT_PREPARE};
use underpass_mysql::exchange::{self, End, Exchange, Step};
use underpass_mysql::handshake::{AUTH_MORE, AUTH_SWITCH, AuthSwitch, Greeting, NATIVE_PASSWORD};
use underpass_mysql::packet::{self, Header};
use underpass_mysql::{handshake, response};
use underpass_trace::statements::{CAPABILITIES, COLLATION};

use super::Session;
use crate::connection::{Connection, connect_plain};
use crate::error::ConnectError;
use crate::target::{Login, Target};

/// What a session uses of which the trace does not say it: what every client has.
const USUAL: u64 = capability::TRANSACTIONS
    | capability::MULTI_STATEMENTS
    | capability::MULTI_RESULTS
    | capability::PS_MULTI_RESULTS
    | capability::DEPRECATE_EOF;
/// What every login of ours needs.
const NEEDED: u64 = capability::PROTOCOL_41
    | capability::SECURE_CONNECTION
    | capability::PLUGIN_AUTH
    | capability::PLUGIN_AUTH_LENENC;
/// What a session may have used and ours does not: the connection is our own matter.
const NOT_OURS: u64 = capability::COMPRESS | capability::ZSTD_COMPRESSION | capability::SSL;
/// The collation of a session of which the trace does not say it: `utf8mb4_general_ci`.
const UTF8MB4: u8 = 45;

/// A message: the number of its last packet, and its payload.
type Numbered<'a> = (u8, Cow<'a, [u8]>);

impl From<underpass_mysql::Error> for ConnectError {
    fn from(error: underpass_mysql::Error) -> Self {
        Self::Protocol(error.to_string())
    }
}

/// What a session's start says of its login.
struct Wanted<'a> {
    capabilities: u64,
    collation: u8,
    attributes: Vec<(&'a [u8], &'a [u8])>,
}

impl<'a> Wanted<'a> {
    fn of(parameters: &[(&'a [u8], &'a [u8])]) -> Self {
        // The last: a client may have sent an attribute of that name, and what the recorder adds comes behind.
        let number = |wanted: &[u8]| -> Option<u64> {
            let (_, value) = parameters.iter().rev().find(|(name, _)| *name == wanted)?;
            std::str::from_utf8(value).ok()?.parse().ok()
        };
        let attributes = parameters.iter().filter(|(name, _)| *name != CAPABILITIES && *name != COLLATION);
        Self {
            capabilities: number(CAPABILITIES).unwrap_or(USUAL),
            collation: number(COLLATION).and_then(|number| number.try_into().ok()).unwrap_or(UTF8MB4),
            attributes: attributes
                .map(
                    |&(name, value)| {
                        if name == b"application_name" {
                            (&b"program_name"[..], value)
                        } else {
                            (name, value)
                        }
                    },
                )
                .collect(),
        }
    }
}

impl Connection {
    pub(crate) async fn open_mysql(
        target: &Target,
        login: &Login,
        parameters: &[(&[u8], &[u8])],
    ) -> Result<Self, ConnectError> {
        let mut connection = Self::over(connect_plain(target).await?);
        let (_, first) = connection.message().await?;
        if first.first() == Some(&response::ERR) {
            return Err(server_error(&first));
        }
        let greeting = Greeting::decode(&first)?;
        let wanted = Wanted::of(parameters);
        let capabilities = wanted.capabilities & !NOT_OURS | NEEDED;
        let capabilities = Capabilities(capabilities & greeting.capabilities.0);
        if wanted.capabilities & capability::QUERY_ATTRIBUTES != 0
            && !capabilities.has(capability::QUERY_ATTRIBUTES)
        {
            return Err(ConnectError::Capability("query attributes (MySQL 8.0.23)"));
        }
        let mut sequence = 1;
        let mut sent = capabilities;
        if let Some(tls) = &target.tls {
            if greeting.capabilities.has(capability::SSL) {
                sent.0 |= capability::SSL;
                let mut out = Vec::new();
                handshake::put_ssl_request(&mut out, sequence, sent, wanted.collation);
                connection.write_all(&out).await?;
                connection = connection.encrypt(target, tls).await?;
                sequence += 1;
            } else if tls.sslmode.requires_tls() {
                return Err(ConnectError::NoTls);
            }
        }
        let password = match &login.secret {
            Some(Secret::Plain(password)) => password.as_bytes(),
            _ => b"",
        };
        let (plugin, proof) = match auth::proof(greeting.plugin, password, &greeting.nonce) {
            Some(proof) => (greeting.plugin, proof),
            // The server switches if the user has another one.
            None => (NATIVE_PASSWORD, auth::native_password(password, &greeting.nonce)),
        };
        let database = Some(login.database.as_bytes()).filter(|name| !name.is_empty());
        let mut out = Vec::new();
        handshake::Login {
            capabilities: sent,
            collation: wanted.collation,
            user: login.user.as_bytes(),
            database,
            plugin: Some(plugin),
            attributes: wanted.attributes.clone(),
        }
        .put(&mut out, sequence, &proof);
        connection.write_all(&out).await?;
        connection.authenticate(password).await?;
        connection.mysql =
            Some(Session { exchange: exchange::Session::new(capabilities), statements: Default::default() });
        Ok(connection)
    }

    /// Says what the plugin of the user wants, until the server lets us in.
    async fn authenticate(&mut self, password: &[u8]) -> Result<(), ConnectError> {
        loop {
            let (sequence, message) = self.message().await?;
            let answer = match message[..] {
                [response::OK, ..] => return Ok(()),
                [response::ERR, ..] => return Err(server_error(&message)),
                [AUTH_SWITCH, ..] => {
                    let switch = AuthSwitch::decode(&message)?;
                    let name = || String::from_utf8_lossy(switch.plugin).into_owned();
                    auth::proof(switch.plugin, password, switch.data)
                        .ok_or_else(|| ConnectError::Plugin(name()))?
                }
                [AUTH_MORE, FAST_AUTH_DONE] => continue,
                [AUTH_MORE, FULL_AUTH_WANTED] if self.is_private() => [password, b"\0"].concat(),
                [AUTH_MORE, FULL_AUTH_WANTED] => return Err(ConnectError::PasswordInClear),
                _ => return Err(ConnectError::Protocol("an unknown step of the login".into())),
            };
            let mut out = Vec::new();
            packet::put_message(&mut out, sequence.wrapping_add(1), &answer);
            self.write_all(&out).await?;
        }
    }

    /// The next message that has been read whole.
    pub fn next_mysql(&mut self) -> Result<Option<Numbered<'_>>, ConnectError> {
        let Some(len) = packet::message_len(self.unused())? else {
            self.give_back();
            return Ok(None);
        };
        let message = self.use_up(len);
        let mut last = 0;
        let mut rest = message;
        while let Some(header) = Header::parse(rest) {
            last = header.sequence;
            rest = &rest[header.total().min(rest.len())..];
        }
        Ok(Some((last, packet::payload(message))))
    }

    /// The next message, waiting for it.
    async fn message(&mut self) -> Result<(u8, Vec<u8>), ConnectError> {
        loop {
            if let Some((sequence, payload)) = self.next_mysql()? {
                return Ok((sequence, payload.into_owned()));
            }
            if self.read().await? == 0 {
                return Err(ConnectError::Closed);
            }
        }
    }

    /// Runs SQL; the rows as text.
    pub(super) async fn run_sql(&mut self, sql: &str) -> Result<Vec<Vec<Option<String>>>, ConnectError> {
        self.command(COM_QUERY, sql.as_bytes()).await.map(|(rows, _)| rows)
    }

    /// The session may read only, until it says otherwise.
    pub(crate) async fn refuse_writes(&mut self) -> Result<(), ConnectError> {
        self.run_sql("set session transaction read only").await.map(drop)
    }

    /// Has a statement prepared; its number here.
    pub(crate) async fn prepare(&mut self, text: &[u8]) -> Result<u32, ConnectError> {
        let (_, prepared) = self.command(COM_STMT_PREPARE, text).await?;
        prepared.ok_or_else(|| ConnectError::Protocol("a prepared statement has no number".into()))
    }

    /// A statement of the trace has this number here.
    pub(crate) fn number(&mut self, captured: u32, number: u32) {
        if let Some(session) = &mut self.mysql {
            session.statements.insert(captured, number);
        }
    }

    /// Has a statement prepared, and forgets it.
    pub(super) async fn try_prepare(&mut self, sql: &str) -> Result<(), ConnectError> {
        let (_, prepared) = self.command(COM_STMT_PREPARE, sql.as_bytes()).await?;
        if let Some(number) = prepared {
            let mut out = Vec::new();
            packet::put_message(&mut out, 0, &[&[COM_STMT_CLOSE], &number.to_le_bytes()[..]].concat());
            self.write_all(&out).await?;
        }
        Ok(())
    }

    async fn command(
        &mut self,
        command: u8,
        argument: &[u8],
    ) -> Result<(Vec<Vec<Option<String>>>, Option<u32>), ConnectError> {
        let mut out = Vec::new();
        let mut payload = vec![command];
        let attributes =
            self.mysql.as_ref().is_some_and(|it| it.exchange.capabilities.has(capability::QUERY_ATTRIBUTES));
        if attributes && command == COM_QUERY {
            // No attributes, one set of them.
            payload.extend_from_slice(&[0, 1]);
        }
        payload.extend_from_slice(argument);
        packet::put_message(&mut out, 0, &payload);
        self.write_all(&out).await?;
        let mut exchange = Exchange::new(command);
        let (mut rows, mut prepared) = (Vec::new(), None);
        while !exchange.is_done() {
            let (_, message) = self.message().await?;
            let Some(session) = &mut self.mysql else { return Err(ConnectError::Closed) };
            match exchange.message(&message, message.len(), &mut session.exchange)? {
                Step::Row => {
                    let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
                    let row = response::text_row(&message)?;
                    rows.push(row.into_iter().map(|value| value.map(text)).collect());
                }
                Step::End { end: End::Err(_), .. } => return Err(server_error(&message)),
                Step::End { end: End::Prepared(answer), .. } => prepared = Some(answer.statement),
                Step::WantsFile { .. } => return Err(ConnectError::Protocol("a file is wanted".into())),
                Step::End { .. } | Step::Part => {}
            }
        }
        Ok((rows, prepared))
    }
}

fn server_error(message: &[u8]) -> ConnectError {
    match response::Err::decode(message) {
        Ok(error) => ConnectError::Server {
            sqlstate: String::from_utf8_lossy(&error.sqlstate).into_owned(),
            message: format!("{} (error {})", String::from_utf8_lossy(error.message), error.code),
        },
        Err(error) => error.into(),
    }
}
