// SPDX-License-Identifier: Apache-2.0
//! What can be wrong with a configuration: where, what was expected, and what to do next.
//!
//! No message ever contains a password or a whole connection string: logs are read by more people than files.

use std::fmt;
use std::sync::Arc;

/// A line of a file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Location {
    /// The path as it was given (command line or `%include`).
    pub file: Arc<str>,
    /// Line number, from 1; 0 stands for the file as a whole.
    pub line: u32,
}

impl Location {
    /// Line `line` (from 1; 0 is the whole file) of `file`.
    pub fn new(file: &Arc<str>, line: u32) -> Self {
        Self { file: file.clone(), line }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line == 0 { f.write_str(&self.file) } else { write!(f, "{}:{}", self.file, self.line) }
    }
}

/// One fault in a configuration file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {kind}")]
pub struct Error {
    /// Where it is.
    pub at: Location,
    /// What it is.
    pub kind: ErrorKind,
}

impl Error {
    pub(crate) fn new(file: &Arc<str>, line: u32, kind: ErrorKind) -> Self {
        Self { at: Location::new(file, line), kind }
    }
}

/// The kinds of fault; the text of each ends with the next step.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The file cannot be read.
    #[error(
        "could not load file: {reason}; check the path (it is relative to the working directory) and the permissions of the pooler's user"
    )]
    Unreadable {
        /// The operating system's words.
        reason: String,
    },
    /// Bytes that are not text.
    #[error("the line is not valid UTF-8 or holds a NUL byte; save the file as UTF-8")]
    NotText,
    /// A line of the ini file that is neither section, setting, comment nor `%include`.
    #[error("syntax error: expected {expected}; comments start with ';' or '#' at the start of a line")]
    Syntax {
        /// What could have stood here.
        expected: &'static str,
    },
    /// `[name]` is no section PgBouncer or Underpass knows.
    #[error(
        "unknown section [{section}]: expected [pgbouncer], [databases], [users], [peers], [underpass] or [underpass:mirror:NAME]; correct the name or remove the section"
    )]
    UnknownSection {
        /// The name found.
        section: String,
    },
    /// `key = value` before the first section.
    #[error("parameter \"{key}\" stands before any section; put [pgbouncer] on a line above it")]
    NoSection {
        /// The key found.
        key: String,
    },
    /// No `[pgbouncer]` section in any of the files.
    #[error("main section missing: add a line [pgbouncer]")]
    NoMainSection,
    /// More than ten files deep.
    #[error("include nesting level too deep: at most 10; look for files that include each other")]
    IncludeDepth,
    /// A key that does not exist in its section.
    #[error("{}{}", unknown(.section, .key), suggestion(.nearest))]
    UnknownKey {
        /// Section without brackets.
        section: &'static str,
        /// The key found.
        key: String,
        /// A key that exists and is spelled nearly the same.
        nearest: Option<&'static str>,
    },
    /// A key without which the section means nothing.
    #[error("[{section}] has no {key}; add a line {key} = ...")]
    MissingKey {
        /// Section without brackets.
        section: String,
        /// The key.
        key: &'static str,
    },
    /// A value that its key does not accept.
    #[error(
        "invalid value \"{value}\" for parameter {key}: expected {expected}; correct it or remove the line to get the default"
    )]
    InvalidValue {
        /// The key, `name.key` inside connection strings.
        key: String,
        /// The value found, never a secret.
        value: String,
        /// What would have been accepted.
        expected: String,
    },
    /// A connection string that cannot be split into `key=value` pairs.
    #[error(
        "syntax error in connection string of \"{name}\" near {near}: expected key=value with a value that is not empty; put values with spaces into single quotes and double a quote inside them"
    )]
    ConnectionString {
        /// Database, user or peer.
        name: String,
        /// The key at or after which it went wrong.
        near: String,
    },
    /// A name that may not be used here.
    #[error("{what} \"{name}\" {rule}; choose another name")]
    Name {
        /// database, peer, ...
        what: &'static str,
        /// The name.
        name: String,
        /// Why it is refused.
        rule: &'static str,
    },
    /// Something PgBouncer can do and Underpass cannot.
    #[error("{what} is not supported by Underpass; {next}")]
    Unsupported {
        /// Key and value, or method.
        what: String,
        /// What to use instead.
        next: &'static str,
    },
    /// A line of the HBA file.
    #[error("hba: {found}: expected {expected}")]
    Hba {
        /// The column found.
        found: String,
        /// What should stand there and what to do.
        expected: &'static str,
    },
    /// A line of the ident map file.
    #[error("ident map: {found}: expected {expected}")]
    Ident {
        /// The column found.
        found: String,
        /// What should stand there and what to do.
        expected: &'static str,
    },
    /// The auth_file.
    #[error("broken auth file: expected {expected}; the entries from this line on are not used")]
    Userlist {
        /// What should stand there.
        expected: &'static str,
    },
    /// A connection URL or a libpq connection string.
    #[error("invalid connection string: {found}: expected {expected}")]
    Url {
        /// The part found, never the password.
        found: String,
        /// What should stand there.
        expected: &'static str,
    },
}

/// PgBouncer has other words inside connection strings than for keys of the main section.
fn unknown(section: &str, key: &str) -> String {
    match section {
        "databases" | "peers" => format!("unrecognized connection parameter: {key}"),
        "users" => format!("unrecognized user parameter: {key}"),
        _ => format!("unknown parameter: {section}/{key}"),
    }
}

fn suggestion(nearest: &Option<&'static str>) -> String {
    match nearest {
        Some(name) => format!("; did you mean {name}?"),
        None => "; docs/config.md lists every key, remove the line".to_owned(),
    }
}

/// All faults of a configuration, at least one, in the order of the files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Errors(pub Vec<Error>);

impl fmt::Display for Errors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, error) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{error}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Errors {}

impl From<Error> for Errors {
    fn from(error: Error) -> Self {
        Self(vec![error])
    }
}

/// Something that works but is probably not what the writer of the file wants; logged once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// Where it is.
    pub at: Location,
    /// What it is and what to do.
    pub text: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.at, self.text)
    }
}
