// SPDX-License-Identifier: Apache-2.0
//! The smallest PostgreSQL client that can sit idle by the thousand and stop reading when told to.
//!
//! It knows start-up without a password and reads messages by type and length (PostgreSQL manual, 55.7). Load comes
//! from pgbench; this is for what pgbench cannot do.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::postgres::DATABASE;
use crate::systems::Endpoint;

/// Protocol 3.0 in a StartupMessage.
const PROTOCOL_3_0: u32 = 196_608;

/// How much is read or written at once in a copy.
const BUFFER_BYTES: usize = 256 * 1024;

/// A logged-in connection.
#[derive(Debug)]
pub struct Client {
    stream: TcpStream,
}

impl Client {
    /// Connects by TCP and logs in without a password.
    ///
    /// # Errors
    /// When the connection fails or the server wants a password or answers with an error.
    pub fn connect(endpoint: &Endpoint) -> io::Result<Self> {
        let stream = TcpStream::connect((endpoint.host.as_str(), endpoint.port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        let mut client = Self { stream };
        let mut body = PROTOCOL_3_0.to_be_bytes().to_vec();
        for word in ["user", endpoint.user, "database", DATABASE, ""] {
            body.extend_from_slice(word.as_bytes());
            body.push(0);
        }
        client.stream.write_all(&(body.len() as u32 + 4).to_be_bytes())?;
        client.stream.write_all(&body)?;
        loop {
            let (kind, body) = client.message()?;
            match kind {
                b'Z' => return Ok(client),
                b'E' => return Err(io::Error::other(error_text(&body))),
                b'R' if body != [0; 4] => return Err(io::Error::other("the server wants a password")),
                _ => {}
            }
        }
    }

    /// A second handle of its socket, to shut it down from another thread.
    ///
    /// # Errors
    /// When there are no descriptors left.
    pub fn socket(&self) -> io::Result<TcpStream> {
        self.stream.try_clone()
    }

    /// Sends a Query message.
    ///
    /// # Errors
    /// When the socket fails.
    pub fn send_query(&mut self, sql: &str) -> io::Result<()> {
        let mut message = vec![b'Q'];
        message.extend_from_slice(&(sql.len() as u32 + 5).to_be_bytes());
        message.extend_from_slice(sql.as_bytes());
        message.push(0);
        self.stream.write_all(&message)
    }

    /// Runs a query and returns the first column of its rows, as text.
    ///
    /// # Errors
    /// When the socket fails or the server answers with an error.
    pub fn query(&mut self, sql: &str) -> io::Result<Vec<String>> {
        self.send_query(sql)?;
        let (mut rows, mut error) = (Vec::new(), None);
        loop {
            let (kind, body) = self.message()?;
            match kind {
                b'D' => rows.extend(first_column(&body)),
                b'E' => error = Some(error_text(&body)),
                b'Z' => return error.map_or(Ok(rows), |text| Err(io::Error::other(text))),
                _ => {}
            }
        }
    }

    /// Reads a copy out to ReadyForQuery, hands every line to `look` and returns how many there were.
    ///
    /// # Errors
    /// When the socket fails or the server answers with an error.
    pub fn drain_copy(&mut self, mut look: impl FnMut(&[u8])) -> io::Result<u64> {
        // Messages arrive by the million: a large buffer keeps the reader from being what is measured.
        let mut reader = io::BufReader::with_capacity(BUFFER_BYTES, &self.stream);
        let mut lines = 0;
        let mut body = Vec::new();
        loop {
            let kind = read_message(&mut reader, &mut body)?;
            match kind {
                b'd' => {
                    lines += 1;
                    look(&body);
                }
                b'E' => return Err(io::Error::other(error_text(&body))),
                b'Z' => return Ok(lines),
                _ => {}
            }
        }
    }

    /// Sends `lines` lines of a copy in that was asked for, each filled in by `line`, and returns the command tag.
    ///
    /// # Errors
    /// When the socket fails or the server answers with an error.
    pub fn send_copy(&mut self, lines: u64, mut line: impl FnMut(&mut Vec<u8>)) -> io::Result<String> {
        while self.message()?.0 != b'G' {}
        let mut buffer = Vec::with_capacity(BUFFER_BYTES * 2);
        for _ in 0..lines {
            let start = buffer.len();
            buffer.extend_from_slice(b"d\0\0\0\0");
            line(&mut buffer);
            let length = (buffer.len() - start - 1) as u32;
            buffer[start + 1..start + 5].copy_from_slice(&length.to_be_bytes());
            if buffer.len() >= BUFFER_BYTES {
                self.stream.write_all(&buffer)?;
                buffer.clear();
            }
        }
        buffer.extend_from_slice(b"c\0\0\0\x04");
        self.stream.write_all(&buffer)?;
        let mut tag = String::new();
        loop {
            let (kind, body) = self.message()?;
            match kind {
                b'C' => tag = String::from_utf8_lossy(&body).trim_end_matches('\0').to_owned(),
                b'E' => return Err(io::Error::other(error_text(&body))),
                b'Z' => return Ok(tag),
                _ => {}
            }
        }
    }

    fn message(&mut self) -> io::Result<(u8, Vec<u8>)> {
        let mut body = Vec::new();
        let kind = read_message(&mut self.stream, &mut body)?;
        Ok((kind, body))
    }
}

fn read_message(reader: &mut impl Read, body: &mut Vec<u8>) -> io::Result<u8> {
    let mut head = [0; 5];
    reader.read_exact(&mut head)?;
    let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
    let length =
        length.checked_sub(4).ok_or_else(|| io::Error::other("a message shorter than its own length"))?;
    body.resize(length, 0);
    reader.read_exact(body)?;
    Ok(head[0])
}

/// The first column of a DataRow; `None` when it is null or there is none.
fn first_column(body: &[u8]) -> Option<String> {
    let (_, rest) = body.split_at_checked(2)?;
    let (length, rest) = rest.split_at_checked(4)?;
    let length = usize::try_from(i32::from_be_bytes(length.try_into().ok()?)).ok()?;
    Some(String::from_utf8_lossy(rest.get(..length)?).into_owned())
}

/// The message field of an ErrorResponse.
fn error_text(body: &[u8]) -> String {
    body.split(|byte| *byte == 0)
        .find_map(|field| field.strip_prefix(b"M"))
        .map_or_else(|| "an error without text".to_owned(), |text| String::from_utf8_lossy(text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_framed_and_short_lengths_refused() {
        let mut body = Vec::new();
        let mut bytes: &[u8] = b"d\0\0\0\x07abcZ\0\0\0\x05I";
        assert_eq!(read_message(&mut bytes, &mut body).unwrap(), b'd');
        assert_eq!(body, b"abc");
        assert_eq!(read_message(&mut bytes, &mut body).unwrap(), b'Z');
        assert!(read_message(&mut &b"d\0\0\0\x03"[..], &mut body).is_err());
        assert!(read_message(&mut &b"d\0\0\0\x09ab"[..], &mut body).is_err());
    }

    #[test]
    fn the_first_column_of_a_row_is_read() {
        assert_eq!(first_column(b"\0\x01\0\0\0\x02hi").as_deref(), Some("hi"));
        assert_eq!(first_column(b"\0\x01\xff\xff\xff\xff"), None, "null");
        assert_eq!(first_column(b"\0\x01\0\0\0\x09hi"), None, "shorter than it says");
    }

    #[test]
    fn the_message_of_an_error_is_found() {
        assert_eq!(error_text(b"SFATAL\0C28000\0Mno such user\0\0"), "no such user");
        assert_eq!(error_text(b""), "an error without text");
    }
}
