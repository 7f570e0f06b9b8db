// SPDX-License-Identifier: Apache-2.0
//! The messages that a client sends, put together in one buffer and sent in one write (PostgreSQL manual, "Message Formats").

/// Messages, one after the other.
#[derive(Debug, Default)]
pub struct Batch {
    bytes: Vec<u8>,
}

impl Batch {
    /// No message yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Any message; tag 0 stands for none.
    pub fn message(mut self, tag: u8, parts: &[&[u8]]) -> Self {
        if tag != 0 {
            self.bytes.push(tag);
        }
        let length: usize = parts.iter().map(|part| part.len()).sum();
        self.bytes.extend_from_slice(&(length as u32 + 4).to_be_bytes());
        parts.iter().for_each(|part| self.bytes.extend_from_slice(part));
        self
    }

    /// Query.
    pub fn query(self, sql: &str) -> Self {
        self.message(b'Q', &[sql.as_bytes(), b"\0"])
    }

    /// Parse, types left to the server.
    pub fn parse(self, statement: &str, sql: &str) -> Self {
        self.message(b'P', &[statement.as_bytes(), b"\0", sql.as_bytes(), b"\0\0\0"])
    }

    /// Bind with text parameters.
    pub fn bind(self, portal: &str, statement: &str, parameters: &[&str]) -> Self {
        let mut values = (parameters.len() as u16).to_be_bytes().to_vec();
        for value in parameters {
            values.extend_from_slice(&(value.len() as u32).to_be_bytes());
            values.extend_from_slice(value.as_bytes());
        }
        self.message(
            b'B',
            &[portal.as_bytes(), b"\0", statement.as_bytes(), b"\0\0\0", &values, &0u16.to_be_bytes()],
        )
    }

    /// Describe of the unnamed portal.
    pub fn describe_portal(self) -> Self {
        self.message(b'D', &[b"P\0"])
    }

    /// Describe of a statement.
    pub fn describe_statement(self, name: &str) -> Self {
        self.message(b'D', &[b"S", name.as_bytes(), b"\0"])
    }

    /// Close of a statement.
    pub fn close_statement(self, name: &str) -> Self {
        self.message(b'C', &[b"S", name.as_bytes(), b"\0"])
    }

    /// Execute; 0 rows means all.
    pub fn execute(self, portal: &str, max_rows: u32) -> Self {
        self.message(b'E', &[portal.as_bytes(), b"\0", &max_rows.to_be_bytes()])
    }

    /// Parse, Bind, Describe and Execute without names.
    pub fn extended(self, sql: &str, parameters: &[&str]) -> Self {
        self.parse("", sql).bind("", "", parameters).describe_portal().execute("", 0)
    }

    /// Flush.
    pub fn flush(self) -> Self {
        self.message(b'H', &[])
    }

    /// Sync.
    pub fn sync(self) -> Self {
        self.message(b'S', &[])
    }

    /// CopyData.
    pub fn copy_data(self, data: &str) -> Self {
        self.message(b'd', &[data.as_bytes()])
    }

    /// CopyDone.
    pub fn copy_done(self) -> Self {
        self.message(b'c', &[])
    }

    /// CopyFail.
    pub fn copy_fail(self, reason: &str) -> Self {
        self.message(b'f', &[reason.as_bytes(), b"\0"])
    }

    /// Terminate.
    pub fn terminate(self) -> Self {
        self.message(b'X', &[])
    }

    /// StartupMessage of protocol 3.0.
    pub fn startup(self, parameters: &[(&str, &str)]) -> Self {
        let mut body = 0x0003_0000u32.to_be_bytes().to_vec();
        for text in parameters.iter().flat_map(|(name, value)| [name, value]) {
            body.extend_from_slice(text.as_bytes());
            body.push(0);
        }
        self.message(0, &[&body, b"\0"])
    }

    /// CancelRequest.
    pub fn cancel_request(self, key: &[u8]) -> Self {
        self.message(0, &[&80_877_102u32.to_be_bytes(), key])
    }

    /// What has been put together.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }
}
