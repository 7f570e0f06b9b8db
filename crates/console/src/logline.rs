// SPDX-License-Identifier: Apache-2.0
//! Log records as lines: PgBouncer's text format, or JSON.
//!
//! Names and messages come from peers: a line break in a message is followed by a tab, in a name it is escaped,
//! as are all other control characters, so nobody can forge a record or speak to the reader's terminal.

use std::fmt::{self, Write};
use std::net::SocketAddr;

use serde::Serialize;

use crate::ident::{Side, SocketId};
use crate::time::{Timestamp, Zone};

/// Importance of a record, most important first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// The process ends.
    Fatal,
    /// Something failed.
    Error,
    /// Something looks wrong.
    Warning,
    /// What happens in service.
    Log,
    /// From `-v`, `verbose = 1`.
    Debug,
    /// From `-vv`, `verbose = 2`.
    Noise,
}

impl Level {
    /// Word in the line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fatal => "FATAL",
            Self::Error => "ERROR",
            Self::Warning => "WARNING",
            Self::Log => "LOG",
            Self::Debug => "DEBUG",
            Self::Noise => "NOISE",
        }
    }

    /// Severity for syslog (RFC 5424, 2 critical to 7 debug).
    #[must_use]
    pub const fn syslog_severity(self) -> u8 {
        match self {
            Self::Fatal => 2,
            Self::Error => 3,
            Self::Warning => 4,
            Self::Log => 6,
            Self::Debug | Self::Noise => 7,
        }
    }

    /// The least important level that is written with `verbose`.
    #[must_use]
    pub const fn for_verbosity(verbose: u8) -> Self {
        match verbose {
            0 => Self::Log,
            1 => Self::Debug,
            _ => Self::Noise,
        }
    }
}

/// Other end of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerAddress {
    /// TCP.
    Tcp(SocketAddr),
    /// Unix socket.
    Unix {
        /// Process at the other end, where the kernel tells.
        pid: Option<u32>,
        /// Port the socket is named after.
        port: u16,
    },
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix { pid: Some(pid), port } => write!(f, "unix({pid}):{port}"),
            Self::Unix { pid: None, port } => write!(f, "unix:{port}"),
        }
    }
}

/// The connection a record is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketLabel<'a> {
    /// Side.
    pub side: Side,
    /// Identifier.
    pub id: SocketId,
    /// Database, `None` before it is known.
    pub database: Option<&'a str>,
    /// User, `None` before it is known.
    pub user: Option<&'a str>,
    /// Number of the peer, when the connection forwards a cancel request to one; then there is no user.
    pub peer_id: Option<u32>,
    /// Other end.
    pub address: PeerAddress,
}

impl fmt::Display for SocketLabel<'_> {
    /// `C-0x550000000010: db/user@127.0.0.1:5000`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}: ", self.side.letter(), self.id.pointer())?;
        match self.peer_id {
            Some(peer) => write!(f, "peer-{peer}")?,
            None => {
                let (database, user) = (self.database.unwrap_or("(nodb)"), self.user.unwrap_or("(nouser)"));
                write!(Escape { to: f, line_breaks: LineBreaks::Escape }, "{database}/{user}")?;
            }
        }
        write!(f, "@{}", self.address)
    }
}

/// A log record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    /// When.
    pub time: Timestamp,
    /// Process id.
    pub pid: u32,
    /// Importance.
    pub level: Level,
    /// The connection it is about.
    pub socket: Option<SocketLabel<'a>>,
    /// Name of what happened ([`crate::text::Phrase::event`]), JSON only.
    pub event: Option<&'a str>,
    /// What happened.
    pub message: &'a str,
}

impl Record<'_> {
    /// Appends the line of a log file, its line break included:
    /// `2026-11-21 20:54:41.123 UTC [pid] LOG C-0x550000000010: db/user@127.0.0.1:5000 message`.
    pub fn write_text(&self, line: &mut String, zone: &Zone) {
        line.push_str(&self.time.millis_text(zone));
        write_infallibly(line, format_args!(" [{}] {} ", self.pid, self.level.name()));
        self.write_body(line);
        line.push('\n');
    }

    /// Appends the line as syslog gets it, which adds time, process and severity itself.
    pub fn write_body(&self, line: &mut String) {
        if let Some(socket) = &self.socket {
            write_infallibly(line, format_args!("{socket} "));
        }
        let message = self.message.trim_end_matches(['\n', '\r']);
        let mut escape = Escape { to: line, line_breaks: LineBreaks::Indent };
        escape.write_str(message).expect("writing to a String");
    }

    /// Appends the record as one line of JSON. Keys that do not apply are left out.
    pub fn write_json(&self, line: &mut String, zone: &Zone) {
        let json = JsonRecord {
            time: self.time.rfc3339_text(zone),
            level: self.level.name(),
            pid: self.pid,
            side: self.socket.map(|socket| socket.side.name()),
            id: self.socket.map(|socket| socket.id.get()),
            ptr: self.socket.map(|socket| socket.id.pointer().to_string()),
            db: self.socket.and_then(|socket| socket.database),
            user: self.socket.and_then(|socket| socket.user),
            peer: self.socket.and_then(|socket| socket.peer_id),
            addr: self.socket.map(|socket| socket.address.to_string()),
            event: self.event,
            message: self.message,
        };
        line.push_str(&serde_json::to_string(&json).expect("a flat structure of texts and numbers"));
        line.push('\n');
    }
}

/// Keys of a JSON line, in this order.
#[derive(Serialize)]
struct JsonRecord<'a> {
    time: String,
    level: &'static str,
    pid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    side: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ptr: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    db: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    addr: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    event: Option<&'a str>,
    message: &'a str,
}

fn write_infallibly(line: &mut String, args: fmt::Arguments<'_>) {
    line.write_fmt(args).expect("writing to a String");
}

/// What becomes of a line break.
#[derive(Clone, Copy)]
enum LineBreaks {
    /// Kept, with a tab after it: the rest cannot pass for a record.
    Indent,
    /// Escaped like other control characters.
    Escape,
}

/// Writes text with control characters as `\x1b`; tabs stay.
struct Escape<'a, W: Write> {
    to: &'a mut W,
    line_breaks: LineBreaks,
}

impl<W: Write> Write for Escape<'_, W> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut plain = 0;
        for (at, c) in text.char_indices() {
            if !c.is_control() || c == '\t' {
                continue;
            }
            self.to.write_str(&text[plain..at])?;
            plain = at + c.len_utf8();
            match (c, self.line_breaks) {
                ('\n', LineBreaks::Indent) => self.to.write_str("\n\t")?,
                _ => write!(self.to, "\\x{:02x}", u32::from(c))?,
            }
        }
        self.to.write_str(&text[plain..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOCKET: SocketLabel<'static> = SocketLabel {
        side: Side::Client,
        id: SocketId::FIRST,
        database: Some("db"),
        user: Some("user"),
        peer_id: None,
        address: PeerAddress::Tcp(SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 5000)),
    };

    fn record(socket: Option<SocketLabel<'static>>, message: &'static str) -> Record<'static> {
        let time = Timestamp(1_795_294_481_123_456);
        Record { time, pid: 42, level: Level::Log, socket, event: Some("login"), message }
    }

    fn text(record: &Record<'_>) -> String {
        let mut line = String::new();
        record.write_text(&mut line, &Zone::UTC);
        line
    }

    #[test]
    fn text_lines_are_those_of_pgbouncer() {
        assert_eq!(
            text(&record(Some(SOCKET), "message")),
            "2026-11-21 20:54:41.123 UTC [42] LOG C-0x550000000010: db/user@127.0.0.1:5000 message\n"
        );
        assert_eq!(text(&record(None, "stats: x")), "2026-11-21 20:54:41.123 UTC [42] LOG stats: x\n");
    }

    #[test]
    fn labels_of_every_kind_of_socket() {
        let v6 = PeerAddress::Tcp("[::1]:6432".parse().unwrap());
        let unix = |pid| PeerAddress::Unix { pid, port: 6432 };
        let server = SocketLabel { side: Side::Server, ..SOCKET };
        let cases = [
            (SocketLabel { address: v6, ..server }, "S-0x550000000010: db/user@[::1]:6432"),
            (SocketLabel { address: unix(Some(7)), ..SOCKET }, "C-0x550000000010: db/user@unix(7):6432"),
            (SocketLabel { address: unix(None), ..SOCKET }, "C-0x550000000010: db/user@unix:6432"),
            (SocketLabel { peer_id: Some(3), ..server }, "S-0x550000000010: peer-3@127.0.0.1:5000"),
            (
                SocketLabel { database: None, user: None, ..SOCKET },
                "C-0x550000000010: (nodb)/(nouser)@127.0.0.1:5000",
            ),
        ];
        for (label, expected) in cases {
            assert_eq!(label.to_string(), expected);
        }
    }

    #[test]
    fn a_peer_cannot_forge_a_line() {
        let socket = SocketLabel { user: Some("u\n2026 [1] LOG x"), ..SOCKET };
        let line = text(&record(Some(socket), "a\nb\x1b[31m\r\u{9b}c\td\n\n"));
        assert!(line.ends_with(" a\n\tb\\x1b[31m\\x0d\\x9bc\td\n"), "{line:?}");
        assert!(line.contains("db/u\\x0a2026 [1] LOG x@"), "{line:?}");
        assert_eq!(line.matches('\n').count(), 2);
    }

    #[test]
    fn json_is_one_object_on_one_line() {
        let mut line = String::new();
        let socket = SocketLabel { user: Some("a\"b\n"), ..SOCKET };
        record(Some(socket), "two\nlines").write_json(&mut line, &Zone::UTC);
        assert_eq!(line.matches('\n').count(), 1);
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        let expected = serde_json::json!({
            "time": "2026-11-21T20:54:41.123456Z", "level": "LOG", "pid": 42, "side": "client", "id": 1,
            "ptr": "0x550000000010", "db": "db", "user": "a\"b\n", "addr": "127.0.0.1:5000", "event": "login",
            "message": "two\nlines",
        });
        assert_eq!(value, expected);
        let mut line = String::new();
        Record { event: None, ..record(None, "x") }.write_json(&mut line, &Zone::UTC);
        assert_eq!(
            line,
            "{\"time\":\"2026-11-21T20:54:41.123456Z\",\"level\":\"LOG\",\"pid\":42,\"message\":\"x\"}\n"
        );
    }

    #[test]
    fn verbosity_and_syslog() {
        assert_eq!(
            [0, 1, 2, 9].map(Level::for_verbosity),
            [Level::Log, Level::Debug, Level::Noise, Level::Noise]
        );
        assert!(Level::Fatal < Level::for_verbosity(0) && Level::Noise > Level::for_verbosity(1));
        assert_eq!(Level::Fatal.syslog_severity(), 2);
    }
}
