// SPDX-License-Identifier: Apache-2.0
//! Messages of protocol 3 as plain bytes: what a client sends ([`Batch`]), what a server sends ([`Reply`]), what was
//! received ([`Message`]). PostgreSQL manual, "Message Formats".

use crate::{Result, ServerError};

/// One message: type byte and the payload after the length word.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Type byte; 0 for the messages before authentication, which have none.
    pub tag: u8,
    /// Payload, without type and length.
    pub body: Vec<u8>,
}

impl Message {
    /// Splits the first complete message off `buffer`; `None` if it is not complete yet.
    pub fn take(buffer: &mut Vec<u8>) -> Option<Self> {
        let length = u32::from_be_bytes(buffer.get(1..5)?.try_into().ok()?) as usize;
        let end = 1 + length.max(4);
        if buffer.len() < end {
            return None;
        }
        let message = Self { tag: buffer[0], body: buffer[5..end].to_vec() };
        buffer.drain(..end);
        Some(message)
    }

    /// All messages in `bytes`, which must hold whole messages only.
    pub fn all(bytes: &[u8]) -> Vec<Self> {
        let mut buffer = bytes.to_vec();
        std::iter::from_fn(|| Self::take(&mut buffer)).collect()
    }

    /// The bytes as on the wire.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.body.len() + 5);
        if self.tag != 0 {
            out.push(self.tag);
        }
        out.extend_from_slice(&(self.body.len() as u32 + 4).to_be_bytes());
        out.extend_from_slice(&self.body);
        out
    }

    /// The zero-terminated strings of the body, in order, as far as it consists of them.
    pub fn strings(&self) -> Vec<String> {
        self.body
            .split(|byte| *byte == 0)
            .take_while(|part| !part.is_empty())
            .map(|part| String::from_utf8_lossy(part).into_owned())
            .collect()
    }

    /// A field of an ErrorResponse or NoticeResponse, by its code (`b'C'` is SQLSTATE, `b'M'` the message).
    pub fn field(&self, code: u8) -> Option<String> {
        self.body
            .split(|byte| *byte == 0)
            .find(|part| part.first() == Some(&code))
            .map(|part| String::from_utf8_lossy(&part[1..]).into_owned())
    }

    /// The error in an ErrorResponse; `None` for other messages.
    pub fn error(&self) -> Option<ServerError> {
        (self.tag == b'E').then(|| ServerError {
            severity: self.field(b'V').or_else(|| self.field(b'S')).unwrap_or_default(),
            sqlstate: self.field(b'C').unwrap_or_default(),
            message: self.field(b'M').unwrap_or_default(),
        })
    }

    /// The columns of a DataRow, as text; `None` where NULL.
    pub fn columns(&self) -> Vec<Option<String>> {
        let mut columns = Vec::new();
        let mut rest = self.body.get(2..).unwrap_or_default();
        while let Some((length, tail)) = rest.split_first_chunk::<4>() {
            let length = i32::from_be_bytes(*length);
            let value = usize::try_from(length).ok().and_then(|length| tail.get(..length));
            columns.push(value.map(|bytes| String::from_utf8_lossy(bytes).into_owned()));
            rest = &tail[value.map_or(0, <[u8]>::len)..];
        }
        columns
    }

    /// Transaction status of a ReadyForQuery: `b'I'`, `b'T'` or `b'E'`.
    pub fn status(&self) -> Option<u8> {
        (self.tag == b'Z').then(|| self.body.first().copied()).flatten()
    }
}

/// Messages of a client, appended one after the other and sent in one piece: this is how pipelines are written.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    bytes: Vec<u8>,
}

/// Messages of a server, for [`crate::MockServer`].
#[derive(Debug, Clone, Default)]
pub struct Reply {
    bytes: Vec<u8>,
}

fn append(bytes: &mut Vec<u8>, tag: u8, parts: &[&[u8]]) {
    let length: usize = parts.iter().map(|part| part.len()).sum();
    if tag != 0 {
        bytes.push(tag);
    }
    bytes.extend_from_slice(&(length as u32 + 4).to_be_bytes());
    parts.iter().for_each(|part| bytes.extend_from_slice(part));
}

fn values(columns: &[Option<&str>]) -> Vec<u8> {
    let mut out = (columns.len() as u16).to_be_bytes().to_vec();
    for column in columns {
        match column {
            Some(value) => {
                out.extend_from_slice(&(value.len() as i32).to_be_bytes());
                out.extend_from_slice(value.as_bytes());
            }
            None => out.extend_from_slice(&(-1i32).to_be_bytes()),
        }
    }
    out
}

impl Batch {
    /// No message yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Any message, well formed or not in its body.
    pub fn message(mut self, tag: u8, body: &[u8]) -> Self {
        append(&mut self.bytes, tag, &[body]);
        self
    }

    /// Bytes as they are, for what is no message at all.
    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    fn parts(mut self, tag: u8, parts: &[&[u8]]) -> Self {
        append(&mut self.bytes, tag, parts);
        self
    }

    /// StartupMessage of this protocol version (0x0003_0000 is 3.0) with these parameters.
    pub fn startup(self, version: u32, parameters: &[(&str, &str)]) -> Self {
        let mut body = version.to_be_bytes().to_vec();
        for text in parameters.iter().flat_map(|(key, value)| [key, value]) {
            body.extend_from_slice(text.as_bytes());
            body.push(0);
        }
        body.push(0);
        self.message(0, &body)
    }

    /// SSLRequest.
    pub fn ssl_request(self) -> Self {
        self.message(0, &80_877_103u32.to_be_bytes())
    }

    /// GSSENCRequest.
    pub fn gssenc_request(self) -> Self {
        self.message(0, &80_877_104u32.to_be_bytes())
    }

    /// CancelRequest with the key of a session (4 bytes in protocol 3.0, up to 256 in 3.2).
    pub fn cancel_request(self, process_id: u32, secret_key: &[u8]) -> Self {
        self.parts(0, &[&80_877_102u32.to_be_bytes(), &process_id.to_be_bytes(), secret_key])
    }

    /// Query.
    pub fn query(self, sql: &str) -> Self {
        self.parts(b'Q', &[sql.as_bytes(), b"\0"])
    }

    /// Parse; the server infers the parameter types.
    pub fn parse(self, statement: &str, sql: &str) -> Self {
        self.parse_typed(statement, sql, &[])
    }

    /// Parse with parameter type OIDs.
    pub fn parse_typed(self, statement: &str, sql: &str, types: &[u32]) -> Self {
        let mut oids = (types.len() as u16).to_be_bytes().to_vec();
        types.iter().for_each(|oid| oids.extend_from_slice(&oid.to_be_bytes()));
        self.parts(b'P', &[statement.as_bytes(), b"\0", sql.as_bytes(), b"\0", &oids])
    }

    /// Bind, all parameters and results as text.
    pub fn bind(self, portal: &str, statement: &str, parameters: &[Option<&str>]) -> Self {
        self.parts(
            b'B',
            &[
                portal.as_bytes(),
                b"\0",
                statement.as_bytes(),
                b"\0",
                &0u16.to_be_bytes(),
                &values(parameters),
                &0u16.to_be_bytes(),
            ],
        )
    }

    /// Describe a prepared statement.
    pub fn describe_statement(self, name: &str) -> Self {
        self.parts(b'D', &[b"S", name.as_bytes(), b"\0"])
    }

    /// Describe a portal.
    pub fn describe_portal(self, name: &str) -> Self {
        self.parts(b'D', &[b"P", name.as_bytes(), b"\0"])
    }

    /// Execute; `max_rows` 0 means all.
    pub fn execute(self, portal: &str, max_rows: u32) -> Self {
        self.parts(b'E', &[portal.as_bytes(), b"\0", &max_rows.to_be_bytes()])
    }

    /// Close a prepared statement.
    pub fn close_statement(self, name: &str) -> Self {
        self.parts(b'C', &[b"S", name.as_bytes(), b"\0"])
    }

    /// Close a portal.
    pub fn close_portal(self, name: &str) -> Self {
        self.parts(b'C', &[b"P", name.as_bytes(), b"\0"])
    }

    /// Parse, Bind, Describe, Execute of the unnamed statement and portal, without Sync.
    pub fn extended(self, sql: &str, parameters: &[Option<&str>]) -> Self {
        self.parse("", sql).bind("", "", parameters).describe_portal("").execute("", 0)
    }

    /// FunctionCall, arguments and result as text.
    pub fn function_call(self, oid: u32, arguments: &[Option<&str>]) -> Self {
        self.parts(b'F', &[&oid.to_be_bytes(), &0u16.to_be_bytes(), &values(arguments), &0u16.to_be_bytes()])
    }

    /// Flush.
    pub fn flush(self) -> Self {
        self.message(b'H', b"")
    }

    /// Sync.
    pub fn sync(self) -> Self {
        self.message(b'S', b"")
    }

    /// CopyData.
    pub fn copy_data(self, data: &[u8]) -> Self {
        self.message(b'd', data)
    }

    /// CopyDone.
    pub fn copy_done(self) -> Self {
        self.message(b'c', b"")
    }

    /// CopyFail with a reason.
    pub fn copy_fail(self, reason: &str) -> Self {
        self.parts(b'f', &[reason.as_bytes(), b"\0"])
    }

    /// PasswordMessage (also the carrier of SASL and GSS responses, which are not zero-terminated: see `message`).
    pub fn password(self, password: &str) -> Self {
        self.parts(b'p', &[password.as_bytes(), b"\0"])
    }

    /// Terminate.
    pub fn terminate(self) -> Self {
        self.message(b'X', b"")
    }

    /// What has been put together.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl Reply {
    /// No message yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Any message, well formed or not in its body.
    pub fn message(mut self, tag: u8, body: &[u8]) -> Self {
        append(&mut self.bytes, tag, &[body]);
        self
    }

    /// Bytes as they are.
    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    fn parts(mut self, tag: u8, parts: &[&[u8]]) -> Self {
        append(&mut self.bytes, tag, parts);
        self
    }

    /// AuthenticationOk.
    pub fn authentication_ok(self) -> Self {
        self.authentication(0, b"")
    }

    /// Authentication request of any kind: 3 cleartext, 5 md5 (with a 4-byte salt), 10 SASL, 11 and 12 its continuation.
    pub fn authentication(self, kind: u32, data: &[u8]) -> Self {
        self.parts(b'R', &[&kind.to_be_bytes(), data])
    }

    /// ParameterStatus.
    pub fn parameter_status(self, name: &str, value: &str) -> Self {
        self.parts(b'S', &[name.as_bytes(), b"\0", value.as_bytes(), b"\0"])
    }

    /// BackendKeyData.
    pub fn backend_key_data(self, process_id: u32, secret_key: &[u8]) -> Self {
        self.parts(b'K', &[&process_id.to_be_bytes(), secret_key])
    }

    /// ReadyForQuery with `b'I'`, `b'T'` or `b'E'`.
    pub fn ready_for_query(self, status: u8) -> Self {
        self.message(b'Z', &[status])
    }

    /// What a PostgreSQL says after AuthenticationOk, up to and with the first ReadyForQuery.
    pub fn login(self, process_id: u32, secret_key: u32) -> Self {
        [
            ("server_version", "15.0"),
            ("server_encoding", "UTF8"),
            ("client_encoding", "UTF8"),
            ("DateStyle", "ISO, MDY"),
            ("IntervalStyle", "postgres"),
            ("TimeZone", "UTC"),
            ("integer_datetimes", "on"),
            ("standard_conforming_strings", "on"),
            ("application_name", ""),
        ]
        .iter()
        .fold(self, |reply, (name, value)| reply.parameter_status(name, value))
        .backend_key_data(process_id, &secret_key.to_be_bytes())
        .ready_for_query(b'I')
    }

    /// RowDescription of text columns.
    pub fn row_description(self, names: &[&str]) -> Self {
        let mut body = (names.len() as u16).to_be_bytes().to_vec();
        for name in names {
            body.extend_from_slice(name.as_bytes());
            // No table, type text (OID 25), variable size, no modifier, text format.
            body.extend_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 25, 255, 255, 255, 255, 255, 255, 0, 0]);
        }
        self.message(b'T', &body)
    }

    /// DataRow.
    pub fn data_row(self, columns: &[Option<&str>]) -> Self {
        self.message(b'D', &values(columns))
    }

    /// CommandComplete.
    pub fn command_complete(self, command: &str) -> Self {
        self.parts(b'C', &[command.as_bytes(), b"\0"])
    }

    /// A whole answer to `select` of one text value: RowDescription, DataRow, CommandComplete, ReadyForQuery.
    pub fn single_row(self, column: &str, value: &str) -> Self {
        self.row_description(&[column])
            .data_row(&[Some(value)])
            .command_complete("SELECT 1")
            .ready_for_query(b'I')
    }

    /// ErrorResponse.
    pub fn error(self, severity: &str, sqlstate: &str, message: &str) -> Self {
        self.report(b'E', severity, sqlstate, message)
    }

    /// NoticeResponse.
    pub fn notice(self, severity: &str, sqlstate: &str, message: &str) -> Self {
        self.report(b'N', severity, sqlstate, message)
    }

    fn report(self, tag: u8, severity: &str, sqlstate: &str, message: &str) -> Self {
        let fields = [(b'S', severity), (b'V', severity), (b'C', sqlstate), (b'M', message)];
        let mut body = Vec::new();
        for (code, text) in fields {
            body.push(code);
            body.extend_from_slice(text.as_bytes());
            body.push(0);
        }
        body.push(0);
        self.message(tag, &body)
    }

    /// What has been put together.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// Turns the first ErrorResponse among `messages` into an error.
pub(crate) fn first_error(messages: &[Message]) -> Result<()> {
    messages.iter().find_map(Message::error).map_or(Ok(()), |error| Err(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_taken_only_when_whole() {
        let batch = Batch::new().query("select 1").sync();
        let all = Message::all(batch.as_bytes());
        assert_eq!(all.iter().map(|message| message.tag).collect::<Vec<_>>(), b"QS");
        assert_eq!(all[0].strings(), ["select 1"]);
        for cut in 0..14 {
            assert_eq!(Message::take(&mut batch.as_bytes()[..cut].to_vec()), None, "{cut}");
        }
        assert_eq!(all[0].encode(), batch.as_bytes()[..14]);
    }

    #[test]
    fn rows_and_errors_are_read_back() {
        let reply = Reply::new().data_row(&[Some("a"), None, Some("")]).error("FATAL", "57P01", "bye");
        let all = Message::all(reply.as_bytes());
        assert_eq!(all[0].columns(), [Some("a".into()), None, Some(String::new())]);
        let error = all[1].error().unwrap();
        assert_eq!(error.to_string(), "FATAL 57P01: bye");
    }
}
