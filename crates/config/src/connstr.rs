// SPDX-License-Identifier: Apache-2.0
//! The `key=value key='va''lue'` strings of `[databases]`, `[users]` and `[peers]`.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{ErrorKind, Location, Warning};
use crate::value::Value;

/// Splits a connection string into pairs, lazily; after an error there are no further pairs.
pub(crate) struct Pairs<'a> {
    rest: &'a str,
    last_key: &'a str,
}

impl<'a> Pairs<'a> {
    pub(crate) fn new(text: &'a str) -> Self {
        Self { rest: text, last_key: "" }
    }

    fn fail<T>(&mut self) -> Option<Result<T, String>> {
        self.rest = "";
        let near = if self.last_key.is_empty() { "the start".to_owned() } else { self.last_key.to_owned() };
        Some(Err(near))
    }
}

fn is_space(c: char) -> bool {
    c == ' ' || c == '\t'
}

impl<'a> Iterator for Pairs<'a> {
    /// Key and unquoted value, or the key near which the text is broken.
    type Item = Result<(&'a str, String), String>;

    fn next(&mut self) -> Option<Self::Item> {
        let text = self.rest.trim_start_matches(is_space);
        if text.is_empty() {
            return None;
        }
        let end = text.find(|c| c == '=' || is_space(c)).unwrap_or(text.len());
        let (key, after) = text.split_at(end);
        if key.is_empty() {
            return self.fail();
        }
        self.last_key = key;
        let Some(after) = after.trim_start_matches(is_space).strip_prefix('=') else { return self.fail() };
        let after = after.trim_start_matches(is_space);

        let (value, rest) = if let Some(quoted) = after.strip_prefix('\'') {
            let Some((value, rest)) = unquote(quoted) else { return self.fail() };
            if !rest.is_empty() && !rest.starts_with(is_space) {
                return self.fail();
            }
            (value, rest)
        } else {
            let end = after.find(is_space).unwrap_or(after.len());
            (after[..end].to_owned(), &after[end..])
        };
        if value.is_empty() {
            return self.fail();
        }
        self.rest = rest;
        Some(Ok((key, value)))
    }
}

/// Takes text up to the closing quote; `''` is one quote.
fn unquote(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut rest = text;
    loop {
        let (part, after) = rest.split_once('\'')?;
        value.push_str(part);
        match after.strip_prefix('\'') {
            Some(after) => {
                value.push('\'');
                rest = after;
            }
            None => return Some((value, after)),
        }
    }
}

/// Reads the values of one connection string; knows its name and place for errors and warnings.
pub(crate) struct Reader<'a> {
    pub(crate) section: &'static str,
    pub(crate) at: Location,
    pub(crate) warnings: &'a mut Vec<Warning>,
}

impl Reader<'_> {
    /// Calls `set` for each pair; unknown keys are `set`'s business through [`unknown`](Self::unknown).
    pub(crate) fn read(
        &mut self,
        name: &str,
        text: &str,
        mut set: impl FnMut(&mut Self, &str, &str) -> Result<(), ErrorKind>,
    ) -> Result<(), ErrorKind> {
        for pair in Pairs::new(text) {
            let (key, value) =
                pair.map_err(|near| ErrorKind::ConnectionString { name: name.to_owned(), near })?;
            set(self, key, &value).map_err(|kind| match kind {
                ErrorKind::InvalidValue { key, value, expected } => {
                    ErrorKind::InvalidValue { key: format!("{name}.{key}"), value, expected }
                }
                other => other,
            })?;
        }
        Ok(())
    }

    pub(crate) fn unknown(&self, key: &str, known: &'static [&'static str]) -> ErrorKind {
        let nearest = crate::key::nearest(key, known.iter().copied());
        ErrorKind::UnknownKey { section: self.section, key: key.to_owned(), nearest }
    }

    /// A count; negative is `None`: the next wider setting applies.
    pub(crate) fn count(&mut self, key: &str, value: &str) -> Result<Option<u32>, ErrorKind> {
        let number = self.leading_integer(key, value)?;
        if number > i64::from(i32::MAX) {
            return Err(invalid(key, value, "an integer up to 2147483647"));
        }
        Ok(u32::try_from(number).ok())
    }

    /// Seconds, fractions allowed; negative is `None`.
    pub(crate) fn seconds(&mut self, key: &str, value: &str) -> Result<Option<Duration>, ErrorKind> {
        if let Ok(time) = Duration::parse(value) {
            return Ok(Some(time));
        }
        let number = self.leading_integer(key, value)?;
        if number > i64::from(i32::MAX) {
            return Err(invalid(key, value, "seconds up to 2147483647"));
        }
        Ok(u64::try_from(number).ok().map(Duration::from_secs))
    }

    /// A port; PgBouncer refuses 0 here.
    pub(crate) fn port(&mut self, key: &str, value: &str) -> Result<u16, ErrorKind> {
        let number = self.leading_integer(key, value)?;
        u16::try_from(number)
            .ok()
            .filter(|p| *p != 0)
            .ok_or_else(|| invalid(key, value, "a port from 1 to 65535"))
    }

    pub(crate) fn word<T: Value>(&mut self, key: &str, value: &str) -> Result<T, ErrorKind> {
        T::parse(value).map_err(|expected| invalid(key, value, &expected))
    }

    /// PgBouncer reads numbers here with atoi, which stops at the first character that is no digit. A file that starts
    /// it must start us, so the rest is ignored; with a warning, because it is hardly what was meant.
    fn leading_integer(&mut self, key: &str, value: &str) -> Result<i64, ErrorKind> {
        let sign = usize::from(value.starts_with(['-', '+']));
        let end = value[sign..].find(|c: char| !c.is_ascii_digit()).map_or(value.len(), |i| i + sign);
        let number: i64 =
            value[..end].parse().map_err(|_| invalid(key, value, "an integer, for example 20"))?;
        if end < value.len() {
            self.warnings.push(Warning {
                at: self.at.clone(),
                text: format!("{key}={value} is read as {number}, as PgBouncer does; write the number alone"),
            });
        }
        Ok(number)
    }
}

pub(crate) fn invalid(key: &str, value: &str, expected: &str) -> ErrorKind {
    ErrorKind::InvalidValue { key: key.to_owned(), value: value.to_owned(), expected: expected.to_owned() }
}

/// The place of text that comes from no file.
pub(crate) fn nowhere(what: &str) -> Location {
    Location::new(&Arc::from(what), 0)
}
