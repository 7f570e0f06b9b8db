// SPDX-License-Identifier: Apache-2.0
//! What the console answers when it refuses, in PgBouncer's words, because scripts compare them.

use std::borrow::Cow;

/// Longest text of an error sent to a console client, in bytes. PgBouncer formats into a 1024-byte buffer.
pub const MESSAGE_BYTES_MAX: usize = 1023;

/// Why a console command was refused. `Display` is the message of the ErrorResponse, severity ERROR; the session
/// lives on unless [`ConsoleError::closes_session`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConsoleError {
    /// Not in the grammar. Holds the query as it came, invalid UTF-8 replaced, shortened to fit a message.
    #[error("invalid command '{0}', use SHOW HELP;")]
    InvalidCommand(String),
    /// A word is longer than the console accepts, or a key is empty.
    #[error("bad arguments")]
    BadArguments,
    /// A user of `stats_users` asked for what only `admin_users` may do.
    #[error("admin access needed")]
    AdminAccessNeeded,
    /// DISABLE or ENABLE without a database.
    #[error("a database is required")]
    DatabaseRequired,
    /// The argument of KILL_CLIENT is not a number.
    #[error("invalid client pointer supplied")]
    InvalidClientPointer,
    /// No client has the id given to KILL_CLIENT.
    #[error("client not found")]
    ClientNotFound,
    /// The database named in a command is not configured and no `*` entry takes it.
    #[error("no such database: {0}")]
    NoSuchDatabase(String),
    /// The command may not be aimed at the console's own database.
    #[error("cannot {} admin db: {database}", .verb.text())]
    AdminDatabase {
        /// What was to be done.
        verb: AdminVerb,
        /// The name as typed.
        database: String,
    },
    /// RESUME of a database that is not paused.
    #[error("database {0} is not paused")]
    DatabaseNotPaused(String),
    /// RESUME while nothing is paused or suspended.
    #[error("pooler is not paused/suspended")]
    NotPaused,
    /// PAUSE, SUSPEND or KILL while paused or suspended.
    #[error("already suspended/paused")]
    AlreadyPaused,
    /// SUSPEND must flush buffers, which a paused database could hold up.
    #[error("cannot suspend with paused databases")]
    PausedDatabases,
    /// RESUME during a shutdown.
    #[error("pooler is shutting down")]
    ShuttingDown,
    /// Unknown key, bad value, or a key that needs a restart. The log says which.
    #[error("SET failed")]
    SetFailed,
    /// No `[underpass:mirror:NAME]` section has this name.
    #[error("no such mirror: {0}")]
    NoSuchMirror(String),
    /// The new configuration was refused; the old one stays.
    #[error("RELOAD failed, see logs for additional details")]
    ReloadFailed,
    /// Parse, Bind or Execute: the console speaks the simple protocol only.
    #[error("extended query protocol not supported by admin console")]
    ExtendedProtocol,
    /// A message type that is neither Query nor Terminate; holds the type byte.
    #[error("unsupported packet type for admin console: {0}")]
    UnsupportedPacket(u8),
}

/// Commands that refuse the console's own database, as their message names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminVerb {
    /// PAUSE
    Pause,
    /// RECONNECT
    Reconnect,
    /// DISABLE
    Disable,
    /// ENABLE
    Enable,
    /// KILL
    Kill,
    /// WAIT_CLOSE
    WaitClose,
}

impl AdminVerb {
    const fn text(self) -> &'static str {
        match self {
            Self::Pause => "pause",
            Self::Reconnect => "reconnect",
            Self::Disable => "disable",
            Self::Enable => "enable",
            Self::Kill => "kill",
            Self::WaitClose => "wait in",
        }
    }
}

impl ConsoleError {
    /// SQLSTATE of the ErrorResponse: PgBouncer answers 08P01 for everything but a failed RELOAD.
    #[must_use]
    pub const fn sqlstate(&self) -> &'static str {
        match self {
            Self::ReloadFailed => "F0000",
            Self::InvalidCommand(_)
            | Self::BadArguments
            | Self::AdminAccessNeeded
            | Self::DatabaseRequired
            | Self::InvalidClientPointer
            | Self::ClientNotFound
            | Self::NoSuchDatabase(_)
            | Self::NoSuchMirror(_)
            | Self::AdminDatabase { .. }
            | Self::DatabaseNotPaused(_)
            | Self::NotPaused
            | Self::AlreadyPaused
            | Self::PausedDatabases
            | Self::ShuttingDown
            | Self::SetFailed
            | Self::ExtendedProtocol
            | Self::UnsupportedPacket(_) => "08P01",
        }
    }

    /// True when the console closes the connection after the error (reason `bad packet`).
    #[must_use]
    pub const fn closes_session(&self) -> bool {
        matches!(self, Self::ExtendedProtocol | Self::UnsupportedPacket(_))
    }

    /// The error for a query that is not in the grammar.
    pub(crate) fn invalid(query: &[u8]) -> Self {
        // The fixed words take 34 bytes of the message.
        let room = MESSAGE_BYTES_MAX - "invalid command '', use SHOW HELP;".len();
        // U+FFFD is three bytes for one bad byte: shorten again after the replacement.
        let text = String::from_utf8_lossy(&query[..query.len().min(room)]);
        let mut end = text.len().min(room);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        Self::InvalidCommand(match text {
            Cow::Borrowed(text) => text[..end].to_owned(),
            Cow::Owned(mut text) => {
                text.truncate(end);
                text
            }
        })
    }
}
