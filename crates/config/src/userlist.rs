// SPDX-License-Identifier: Apache-2.0
//! The auth_file, userlist.txt: `"user" "secret"` a line (PgBouncer's manual, "Authentication file format").

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Warning};
use crate::files::{Files, read_text};
use crate::secret::Secret;

/// Longest user name in bytes, PgBouncer's MAX_USERNAME with its terminating zero.
const MAX_USERNAME: usize = 127;
/// Longest secret in bytes, PgBouncer's MAX_PASSWORD.
const MAX_PASSWORD: usize = 65_534;

/// What a line-oriented file gave: what could be read, and what could not.
#[derive(Debug, Clone, PartialEq)]
pub struct Parsed<T> {
    /// What could be read.
    pub value: T,
    /// Lines that could not; what they said is not in `value`.
    pub errors: Vec<Error>,
    /// Lines that were read but hardly mean what their writer wants.
    pub warnings: Vec<Warning>,
}

/// The users of an auth_file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Userlist {
    users: BTreeMap<String, Secret>,
}

impl Userlist {
    /// Reads the file at `path`.
    pub fn load(files: &dyn Files, path: &Path) -> Result<Parsed<Self>, Error> {
        let name: Arc<str> = path.to_string_lossy().into();
        Ok(Self::parse(&name, &read_text(files, path, &name)?))
    }

    /// Reads the text of `file`. At the first broken line reading stops, as in PgBouncer: the users before it are
    /// there, and the error says where it is.
    pub fn parse(file: &Arc<str>, text: &str) -> Parsed<Self> {
        let mut users = BTreeMap::new();
        let mut scanner = Scanner { rest: text, line: 1 };
        let mut errors = Vec::new();
        loop {
            match scanner.entry() {
                Ok(Some((user, secret))) => drop(users.insert(user, secret)),
                Ok(None) => break,
                Err(expected) => {
                    errors.push(Error::new(file, scanner.line, ErrorKind::Userlist { expected }));
                    break;
                }
            }
        }
        Parsed { value: Self { users }, errors, warnings: Vec::new() }
    }

    /// The secret of `user`; an empty one means that the user exists and has no password here.
    pub fn get(&self, user: &str) -> Option<&Secret> {
        self.users.get(user)
    }

    /// All users in alphabetical order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Secret)> {
        self.users.iter().map(|(user, secret)| (user.as_str(), secret))
    }

    /// Number of users.
    pub fn len(&self) -> usize {
        self.users.len()
    }

    /// Whether there is no user.
    pub fn is_empty(&self) -> bool {
        self.users.is_empty()
    }
}

struct Scanner<'a> {
    rest: &'a str,
    line: u32,
}

impl<'a> Scanner<'a> {
    fn take(&mut self, bytes: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(bytes);
        self.line += taken.bytes().filter(|b| *b == b'\n').count() as u32;
        self.rest = rest;
        taken
    }

    /// The next entry; `None` at the end of the file.
    fn entry(&mut self) -> Result<Option<(String, Secret)>, &'static str> {
        loop {
            let space =
                self.rest.len() - self.rest.trim_start_matches(|c: char| c.is_ascii_whitespace()).len();
            self.take(space);
            match self.rest.as_bytes().first() {
                None => return Ok(None),
                Some(b';') => self.skip_line(),
                Some(b'"') => break,
                Some(_) => return Err("\"user\" \"secret\" in double quotes, or ';' and a comment"),
            }
        }
        let user = self.quoted(MAX_USERNAME, "a user name of at most 127 bytes in double quotes")?;
        // Anything may stand between the two, even a line end: PgBouncer looks for the next quote.
        let gap = self.rest.find('"').ok_or("a second field in double quotes, the secret")?;
        self.take(gap);
        let secret = self.quoted(MAX_PASSWORD, "a secret of at most 65534 bytes in double quotes")?;
        self.skip_line();
        Ok(Some((user, Secret::new(secret))))
    }

    fn skip_line(&mut self) {
        let end = self.rest.find('\n').unwrap_or(self.rest.len());
        self.take(end);
    }

    /// A field that starts with a quote; `""` inside is one.
    fn quoted(&mut self, max: usize, expected: &'static str) -> Result<String, &'static str> {
        let bytes = self.rest.as_bytes();
        let mut end = 1;
        loop {
            end += self.rest[end..].find('"').ok_or("a closing double quote")?;
            if bytes.get(end + 1) != Some(&b'"') {
                break;
            }
            end += 2;
        }
        // PgBouncer limits the length before unquoting.
        if end - 1 > max {
            return Err(expected);
        }
        Ok(self.take(end + 1)[1..end].replace("\"\"", "\""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::secret::SecretKind;

    fn parse(text: &str) -> Parsed<Userlist> {
        Userlist::parse(&Arc::from("userlist.txt"), text)
    }

    #[test]
    fn entries_comments_and_rest_of_line() {
        let scram = "SCRAM-SHA-256$4096:c2FsdHNhbHRzYWx0c2FsdA==$AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";
        let text = format!(
            "; comment \"x\"\n\"alice\" \"pa\"\"ss\" ignored \"too\n\n \"b\"\"ob\"\t\"md5{}\"\n\"carol\" \"{scram}\"\n\"d\"\"\"\n",
            "0123456789abcdef".repeat(2)
        );
        let parsed = parse(&text);
        // `"d"""` has one field only: the name d" and no secret.
        assert_eq!(parsed.errors.len(), 1);
        assert_eq!(parsed.errors[0].at.line, 6);
        let users = parsed.value;
        assert_eq!(users.len(), 3);
        assert_eq!(users.get("alice").map(Secret::expose), Some("pa\"ss"));
        assert_eq!(users.get("alice").map(Secret::kind), Some(SecretKind::Plain));
        assert_eq!(users.get("b\"ob").map(Secret::kind), Some(SecretKind::Md5));
        assert_eq!(users.get("carol").map(Secret::kind), Some(SecretKind::Scram));
    }

    #[test]
    fn later_entries_override_and_empty_secrets_count() {
        let users = parse("\"a\" \"1\"\n\"a\" \"2\"\n\"b\" \"\"").value;
        assert_eq!(users.get("a").map(Secret::expose), Some("2"));
        assert_eq!(users.get("b").map(Secret::expose), Some(""));
    }

    #[test]
    fn what_looks_nearly_like_a_hash_is_a_password() {
        for text in [
            "md5",
            "md50123456789ABCDEF0123456789ABCDEF",
            "md5 123456789abcdef0123456789abcdef",
            "SCRAM-SHA-256$0:c2FsdA==$AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=",
            "SCRAM-SHA-256$4096:c2FsdA==$short:short",
        ] {
            assert_eq!(Secret::new(text).kind(), SecretKind::Plain, "{text}");
        }
    }

    #[test]
    fn a_broken_line_ends_the_file() {
        for (text, line) in
            [("\"a\" \"1\"\nbob x\n\"c\" \"3\"", 2), ("\"a\" \"1\"\n\"b\" \"2", 2), ("# no\n", 1)]
        {
            let parsed = parse(text);
            assert_eq!(parsed.errors[0].at.line, line, "{text}");
            assert!(parsed.value.get("c").is_none());
        }
    }

    #[test]
    fn debug_hides_secrets() {
        let shown = format!("{:?}", parse("\"a\" \"hunter2\"").value);
        assert!(!shown.contains("hunter2"), "{shown}");
    }
}
