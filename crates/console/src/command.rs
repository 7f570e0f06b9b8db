// SPDX-License-Identifier: Apache-2.0
//! Grammar of the admin console: one simple-query string in, one [`Command`] out.
//!
//! The grammar is PgBouncer's: `WORD [WORD] [;]` and `SET WORD {= | TO} {WORD | 'STRING'} [;]`, where WORD is
//! `[0-9A-Za-z_]+` or a double-quoted name, `""` and `''` being the quotes themselves. There is one statement to
//! a query. Three differences are meant: an empty query is answered as PostgreSQL does (drivers ping with it),
//! `PAUSE ""` names the database with the empty name instead of meaning all of them, and KILL_CLIENT refuses
//! what follows the digits.

use crate::error::ConsoleError;
use crate::session::{SessionParameter, session_parameter};
use crate::show::Show;

/// Longest command word, in bytes (PgBouncer's buffer less its terminator). Longer ones are "bad arguments".
pub const COMMAND_BYTES_MAX: usize = 15;
/// Longest argument or key, in bytes after unquoting: PostgreSQL's NAMEDATALEN - 1.
pub const ARGUMENT_BYTES_MAX: usize = 63;
/// Longest value of SET, in bytes after unquoting.
pub const VALUE_BYTES_MAX: usize = 255;

/// Longest query, in bytes: PgBouncer takes only messages that fit its buffer, `pkt_buf`. Longer ones are invalid.
pub const QUERY_BYTES_MAX: usize = 4096;

/// Who is asking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Access {
    /// Listed in `stats_users` only: may look, not act, and not see SHOW FDS.
    Stats,
    /// Listed in `admin_users`, or the peer-UID login `pgbouncer` on the unix socket.
    Admin,
}

/// A command that the asking user may give.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Nothing but blanks and a semicolon: EmptyQueryResponse.
    Empty,
    /// `SHOW x` or `SELECT x`.
    Show(Show),
    /// SHOW of a PostgreSQL parameter that the console pretends to have: one text column called as it is.
    ShowParameter(&'static SessionParameter),
    /// SET of such a parameter: accepted with [`crate::session::SET_IGNORED`], without effect.
    SetIgnored(&'static SessionParameter),
    /// `SET key = value`: changes a key of pgbouncer.ini until the next RELOAD.
    Set {
        /// Key as typed.
        key: String,
        /// Value, unquoted.
        value: String,
    },
    /// Reads the configuration again.
    Reload,
    /// Waits until server connections are free, then closes them; of one database or of all.
    Pause(Option<String>),
    /// Undoes PAUSE, KILL or SUSPEND.
    Resume(Option<String>),
    /// Flushes and stops all sockets.
    Suspend,
    /// Refuses new clients of a database.
    Disable(String),
    /// Undoes DISABLE.
    Enable(String),
    /// Sends nothing more to a mirror.
    DisableMirror(String),
    /// Undoes DISABLE MIRROR, and whatever else switched it off.
    EnableMirror(String),
    /// Closes every server connection as soon as it is released.
    Reconnect(Option<String>),
    /// Drops all client and server connections at once and leaves the database paused.
    Kill(Option<String>),
    /// Drops one client, by the `id` of SHOW CLIENTS.
    KillClient(u64),
    /// Answers when all server connections seen by an earlier RECONNECT or RELOAD have been closed.
    WaitClose(Option<String>),
    /// Ends the process.
    Shutdown(ShutdownMode),
}

/// How SHUTDOWN ends the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShutdownMode {
    /// At once, without an answer.
    Immediate,
    /// When all server connections have been released (as SIGINT).
    WaitForServers,
    /// When all clients have left (as SIGTERM).
    WaitForClients,
}

impl Command {
    /// Tag of the CommandComplete message. `Empty` has none: EmptyQueryResponse takes its place.
    #[must_use]
    pub fn tag(&self) -> Option<String> {
        let word = match self {
            Self::Empty => return None,
            Self::Set { key, value } => return Some(format!("SET {key}={value}")),
            Self::Show(_) | Self::ShowParameter(_) => "SHOW",
            Self::SetIgnored(_) => "SET",
            Self::Reload => "RELOAD",
            Self::Pause(_) => "PAUSE",
            Self::Resume(_) => "RESUME",
            Self::Suspend => "SUSPEND",
            Self::Disable(_) | Self::DisableMirror(_) => "DISABLE",
            Self::Enable(_) | Self::EnableMirror(_) => "ENABLE",
            Self::Reconnect(_) => "RECONNECT",
            Self::Kill(_) => "KILL",
            Self::KillClient(_) => "KILL_CLIENT",
            Self::WaitClose(_) => "WAIT_CLOSE",
            Self::Shutdown(_) => "SHUTDOWN",
        };
        Some(word.to_owned())
    }
}

/// Parses the string of one Query message (without its terminating zero) and checks that `access` suffices.
///
/// # Errors
/// The answer for the client: not in the grammar, too long, incomplete, or not permitted.
pub fn parse(query: &[u8], access: Access) -> Result<Command, ConsoleError> {
    let syntax = || ConsoleError::invalid(query);
    if query.len() > QUERY_BYTES_MAX {
        return Err(syntax());
    }
    let text = std::str::from_utf8(query).map_err(|_| syntax())?;
    let tokens = tokenize(text).ok_or_else(syntax)?;
    match tokens.as_slice() {
        [] => Ok(Command::Empty),
        [Token::Word(word)] => simple(word, None, access).unwrap_or_else(|| Err(syntax())),
        [Token::Word(word), Token::Word(argument)] => {
            simple(word, Some(argument), access).unwrap_or_else(|| Err(syntax()))
        }
        [Token::Word(word), Token::Word(mirror), Token::Word(name)] if mirror.is_bare("mirror") => {
            switch_mirror(word, name, access).unwrap_or_else(|| Err(syntax()))
        }
        [Token::Word(set), Token::Word(key), operator, value] if set.is_bare("set") && operator.assigns() => {
            assign(key, value, access).unwrap_or_else(|| Err(syntax()))
        }
        _ => Err(syntax()),
    }
}

/// `WORD [WORD]`; `None` is a syntax error. PgBouncer reports a wrong argument before a missing permission.
fn simple(word: &Word, argument: Option<&Word>, access: Access) -> Option<Result<Command, ConsoleError>> {
    let longest = [(Some(word), COMMAND_BYTES_MAX), (argument, ARGUMENT_BYTES_MAX)];
    if longest.iter().any(|(word, max)| word.is_some_and(|word| word.text.len() > *max)) {
        return Some(Err(ConsoleError::BadArguments));
    }
    let argument = argument.map(|argument| argument.text.clone());
    let command = match word.text.to_ascii_lowercase().as_str() {
        "show" | "select" => return show(&argument?, access),
        "reload" if argument.is_none() => Ok(Command::Reload),
        "suspend" if argument.is_none() => Ok(Command::Suspend),
        "shutdown" => Ok(Command::Shutdown(shutdown_mode(argument.as_deref())?)),
        "pause" => Ok(Command::Pause(argument)),
        "resume" => Ok(Command::Resume(argument)),
        "reconnect" => Ok(Command::Reconnect(argument)),
        "kill" => Ok(Command::Kill(argument)),
        "wait_close" => Ok(Command::WaitClose(argument)),
        "disable" => argument.map(Command::Disable).ok_or(ConsoleError::DatabaseRequired),
        "enable" => argument.map(Command::Enable).ok_or(ConsoleError::DatabaseRequired),
        "kill_client" => argument
            .and_then(|id| id.parse().ok())
            .map(Command::KillClient)
            .ok_or(ConsoleError::InvalidClientPointer),
        _ => return None,
    };
    Some(if access == Access::Admin { command } else { Err(ConsoleError::AdminAccessNeeded) })
}

/// `ENABLE MIRROR name`, `DISABLE MIRROR name`; `None` is a syntax error. With two words MIRROR is the name of a database.
fn switch_mirror(word: &Word, name: &Word, access: Access) -> Option<Result<Command, ConsoleError>> {
    let command = match word {
        word if word.is_bare("enable") => Command::EnableMirror(name.text.clone()),
        word if word.is_bare("disable") => Command::DisableMirror(name.text.clone()),
        _ => return None,
    };
    Some(match access {
        _ if name.text.len() > ARGUMENT_BYTES_MAX => Err(ConsoleError::BadArguments),
        Access::Admin => Ok(command),
        Access::Stats => Err(ConsoleError::AdminAccessNeeded),
    })
}

fn show(name: &str, access: Access) -> Option<Result<Command, ConsoleError>> {
    if let Some(parameter) = session_parameter(name) {
        return Some(Ok(Command::ShowParameter(parameter)));
    }
    let show = Show::from_name(name)?;
    Some(if access >= show.access() { Ok(Command::Show(show)) } else { Err(ConsoleError::AdminAccessNeeded) })
}

fn shutdown_mode(argument: Option<&str>) -> Option<ShutdownMode> {
    match argument {
        None => Some(ShutdownMode::Immediate),
        Some(mode) if mode.eq_ignore_ascii_case("wait_for_servers") => Some(ShutdownMode::WaitForServers),
        Some(mode) if mode.eq_ignore_ascii_case("wait_for_clients") => Some(ShutdownMode::WaitForClients),
        Some(_) => None,
    }
}

/// `SET key = value`; `None` is a syntax error.
fn assign(key: &Word, value: &Token, access: Access) -> Option<Result<Command, ConsoleError>> {
    let value = match value {
        Token::Word(word) => &word.text,
        Token::String(text) => text,
        Token::Equals => return None,
    };
    if key.text.is_empty() || key.text.len() > ARGUMENT_BYTES_MAX || value.len() > VALUE_BYTES_MAX {
        return Some(Err(ConsoleError::BadArguments));
    }
    if let Some(parameter) = session_parameter(&key.text) {
        return Some(Ok(Command::SetIgnored(parameter)));
    }
    Some(match access {
        Access::Admin => Ok(Command::Set { key: key.text.clone(), value: value.clone() }),
        Access::Stats => Err(ConsoleError::AdminAccessNeeded),
    })
}

#[derive(Debug, PartialEq, Eq)]
enum Token {
    Word(Word),
    /// `'...'`, unquoted.
    String(String),
    Equals,
}

#[derive(Debug, PartialEq, Eq)]
struct Word {
    text: String,
    quoted: bool,
}

impl Word {
    fn is_bare(&self, keyword: &str) -> bool {
        !self.quoted && self.text.eq_ignore_ascii_case(keyword)
    }
}

impl Token {
    fn assigns(&self) -> bool {
        match self {
            Self::Equals => true,
            Self::Word(word) => word.is_bare("to"),
            Self::String(_) => false,
        }
    }
}

/// More tokens than any command has: parsing stops, so that a long query costs nothing.
const TOKENS_MAX: usize = 4;

/// Splits a query; `None` when a character has no place in the grammar or there are too many tokens.
fn tokenize(text: &str) -> Option<Vec<Token>> {
    let mut tokens = Vec::with_capacity(TOKENS_MAX);
    let mut rest = text.trim_matches(BLANKS);
    rest = rest.strip_suffix(';').unwrap_or(rest).trim_end_matches(BLANKS);
    let mut separated = true;
    while let Some(first) = rest.chars().next() {
        let (token, after) = match first {
            '=' => (Token::Equals, &rest[1..]),
            // Adjacent words are an error (`show"stats"`): PgBouncer wants blanks between them.
            '"' if separated => {
                let (text, after) = unquote(rest, '"')?;
                (Token::Word(Word { text, quoted: true }), after)
            }
            '\'' => {
                let (text, after) = unquote(rest, '\'')?;
                (Token::String(text), after)
            }
            c if is_word(c) && separated => {
                let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
                (Token::Word(Word { text: rest[..end].to_owned(), quoted: false }), &rest[end..])
            }
            _ => return None,
        };
        if tokens.len() == TOKENS_MAX {
            return None;
        }
        let trimmed = after.trim_start_matches(BLANKS);
        separated = token == Token::Equals || trimmed.len() < after.len();
        tokens.push(token);
        rest = trimmed;
    }
    Some(tokens)
}

/// Blanks of the grammar. No comments: `--` is an error, as in PgBouncer.
const BLANKS: [char; 4] = [' ', '\t', '\n', '\r'];

const fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Takes a quoted text off the front of `text`, which begins with `quote`; a doubled quote stands for itself.
fn unquote(text: &str, quote: char) -> Option<(String, &str)> {
    let mut unquoted = String::new();
    let mut rest = &text[1..];
    loop {
        let end = rest.find(quote)?;
        unquoted.push_str(&rest[..end]);
        rest = &rest[end + 1..];
        match rest.strip_prefix(quote) {
            Some(after) => {
                unquoted.push(quote);
                rest = after;
            }
            None => return Some((unquoted, rest)),
        }
    }
}
