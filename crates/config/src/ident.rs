// SPDX-License-Identifier: Apache-2.0
//! The ident map file: `map-name system-user database-user` (PostgreSQL manual, "User Name Maps").
//!
//! PgBouncer's subset: no regular expressions, no groups; the database user may be `all`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::error::{Error, ErrorKind};
use crate::files::{Files, read_text};
use crate::tokens::{Cursor, Token, shown, tokens};
use crate::userlist::Parsed;

/// All maps of a file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct IdentMaps {
    maps: BTreeMap<String, Vec<IdentLine>>,
}

/// One line of a map.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdentLine {
    /// Name of the operating system's user, or a name in the client certificate.
    pub system_user: String,
    /// The database user it may become; `None` is `all`.
    pub database_user: Option<String>,
}

impl IdentMaps {
    /// Reads the file at `path`.
    pub fn load(files: &dyn Files, path: &Path) -> Result<Parsed<Self>, Error> {
        let name: Arc<str> = path.to_string_lossy().into();
        Ok(Self::parse(&name, &read_text(files, path, &name)?))
    }

    /// Reads the text of `file`; broken lines are left out and reported.
    pub fn parse(file: &Arc<str>, text: &str) -> Parsed<Self> {
        let mut maps = Self::default();
        let mut errors = Vec::new();
        for (i, line) in text.lines().enumerate() {
            match parse_line(line) {
                Ok(Some((map, line))) => maps.maps.entry(map).or_default().push(line),
                Ok(None) => {}
                Err((found, expected)) => {
                    errors.push(Error::new(file, i as u32 + 1, ErrorKind::Ident { found, expected }));
                }
            }
        }
        Parsed { value: maps, errors, warnings: Vec::new() }
    }

    /// The lines of a map, in order; `None`: there is no such map.
    pub fn get(&self, map: &str) -> Option<&[IdentLine]> {
        self.maps.get(map).map(Vec::as_slice)
    }

    /// Whether `map` lets somebody who is `is_system_user` become `database_user`. A certificate can have several
    /// names, so the caller decides what its system user is.
    pub fn allows(&self, map: &str, database_user: &str, is_system_user: impl Fn(&str) -> bool) -> bool {
        self.get(map).unwrap_or_default().iter().any(|line| {
            line.database_user.as_deref().is_none_or(|u| u == database_user)
                && is_system_user(&line.system_user)
        })
    }
}

type Fault = (String, &'static str);

fn parse_line(line: &str) -> Result<Option<(String, IdentLine)>, Fault> {
    let tokens = tokens(line).ok_or(("a quote".to_owned(), "a closing double quote"))?;
    if tokens.is_empty() {
        return Ok(None);
    }
    let mut cursor = Cursor::new(tokens);
    let map = match cursor.next() {
        Some(Token::Word(map)) => map,
        other => return Err((shown(other), "the name of a map, unquoted")),
    };
    let system_user = match cursor.next() {
        Some(Token::Word(user)) if user.starts_with('/') => {
            return Err((user, "a plain system user; regular expressions are not supported, list the users"));
        }
        Some(Token::Word(user) | Token::Quoted(user)) => user,
        other => return Err((shown(other), "a system user")),
    };
    let database_user = match cursor.next() {
        Some(Token::Word(user)) if user == "all" => None,
        Some(Token::Word(user)) if user.starts_with(['+', '/']) => {
            return Err((
                user,
                "a plain database user or all; groups and regular expressions are not supported",
            ));
        }
        Some(Token::Word(user) | Token::Quoted(user)) => Some(user),
        other => return Err((shown(other), "a database user or all")),
    };
    match cursor.next() {
        None => Ok(Some((map, IdentLine { system_user, database_user }))),
        more => Err((shown(more), "three columns and no more")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_and_matching() {
        let text = "# comment\nops root postgres\nops \"alice x\" all # all of them\n\nweb www \"all\"\n";
        let parsed = IdentMaps::parse(&Arc::from("ident"), text);
        assert!(parsed.errors.is_empty(), "{:?}", parsed.errors);
        let maps = parsed.value;
        assert!(maps.allows("ops", "postgres", |u| u == "root"));
        assert!(!maps.allows("ops", "bob", |u| u == "root"));
        assert!(maps.allows("ops", "bob", |u| u == "alice x"));
        assert!(maps.allows("web", "all", |u| u == "www"), "quoted all is a name");
        assert!(!maps.allows("web", "bob", |u| u == "www"));
        assert!(!maps.allows("none", "bob", |_| true));
    }

    #[test]
    fn broken_lines_are_reported_and_left_out() {
        let text = "a b\n\"m\" a b\nm /^(.*)$ x\nm a +group\nm a b c\nm \"a b\n";
        let parsed = IdentMaps::parse(&Arc::from("ident"), text);
        let lines: Vec<u32> = parsed.errors.iter().map(|e| e.at.line).collect();
        assert_eq!(lines, [1, 2, 3, 4, 5, 6]);
        assert!(parsed.value.get("m").is_none());
    }
}
