// SPDX-License-Identifier: Apache-2.0
//! The startup parameter `options`: command-line switches for the backend (`PGOPTIONS` of libpq).
//!
//! Words are split as PostgreSQL's `pg_split_opts` does: at white space, where a backslash makes the next
//! character part of the word. Of the switches only `-c name=value` and `--name=value` are read, as by PgBouncer.

use std::borrow::Cow;

use crate::MessageError;

/// The words of an `options` value. A word is copied only when it holds a backslash.
pub fn words(options: &[u8]) -> Words<'_> {
    Words { rest: options }
}

/// The settings of an `options` value, in order: names with `-` turned into `_`, and values.
///
/// After an error the iterator goes on with the next word; callers stop at the first error.
pub fn settings(options: &[u8]) -> Settings<'_> {
    Settings { words: words(options) }
}

/// A name and its value.
pub type Setting<'a> = (Cow<'a, [u8]>, Cow<'a, [u8]>);

/// See [`words`].
#[derive(Clone, Debug)]
pub struct Words<'a> {
    rest: &'a [u8],
}

/// `isspace` of the C locale; Rust's ASCII notion lacks the vertical tab.
fn is_space(byte: u8) -> bool {
    byte.is_ascii_whitespace() || byte == 0x0b
}

impl<'a> Iterator for Words<'a> {
    type Item = Cow<'a, [u8]>;

    fn next(&mut self) -> Option<Self::Item> {
        let start = self.rest.iter().position(|&b| !is_space(b))?;
        let text = &self.rest[start..];
        let mut end = 0;
        let mut escaped = false;
        while end < text.len() && !is_space(text[end]) {
            if text[end] == b'\\' {
                escaped = true;
                end += 1; // the next byte belongs to the word, whatever it is
            }
            end += 1;
        }
        let (word, rest) = text.split_at(end.min(text.len()));
        self.rest = rest;
        Some(if escaped { Cow::Owned(unescape(word)) } else { Cow::Borrowed(word) })
    }
}

/// Drops each backslash that escapes; one at the very end escapes nothing and goes too.
fn unescape(word: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(word.len());
    let mut bytes = word.iter();
    while let Some(&byte) = bytes.next() {
        match byte {
            b'\\' => out.extend(bytes.next()),
            _ => out.push(byte),
        }
    }
    out
}

/// See [`settings`].
#[derive(Clone, Debug)]
pub struct Settings<'a> {
    words: Words<'a>,
}

impl<'a> Iterator for Settings<'a> {
    type Item = Result<Setting<'a>, MessageError>;

    fn next(&mut self) -> Option<Self::Item> {
        let word = self.words.next()?;
        Some(match word.as_ref() {
            b"-c" => self.words.next().ok_or(MessageError::OptionValue).and_then(|w| setting(w, 0)),
            [b'-', b'c', ..] | [b'-', b'-', _, ..] => setting(word, 2),
            _ => Err(MessageError::OptionSwitch),
        })
    }
}

/// Splits `name=value` behind a switch of `skip` bytes.
fn setting(word: Cow<'_, [u8]>, skip: usize) -> Result<Setting<'_>, MessageError> {
    let equals = memchr::memchr(b'=', &word[skip..]).ok_or(MessageError::OptionValue)? + skip;
    if equals == skip {
        return Err(MessageError::OptionSwitch);
    }
    let (mut name, value) = match word {
        Cow::Borrowed(w) => (Cow::Borrowed(&w[skip..equals]), Cow::Borrowed(&w[equals + 1..])),
        Cow::Owned(w) => (Cow::Owned(w[skip..equals].to_vec()), Cow::Owned(w[equals + 1..].to_vec())),
    };
    if name.contains(&b'-') {
        name.to_mut().iter_mut().filter(|b| **b == b'-').for_each(|b| *b = b'_');
    }
    Ok((name, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(text: &str) -> Vec<String> {
        words(text.as_bytes()).map(|w| String::from_utf8(w.into_owned()).unwrap()).collect()
    }

    type Owned = Result<(String, String), MessageError>;

    fn set(text: &str) -> Vec<Owned> {
        let text_of = |w: Cow<'_, [u8]>| String::from_utf8(w.into_owned()).unwrap();
        settings(text.as_bytes()).map(|s| s.map(|(n, v)| (text_of(n), text_of(v)))).collect()
    }

    fn ok(name: &str, value: &str) -> Owned {
        Ok((name.to_owned(), value.to_owned()))
    }

    #[test]
    fn splits_as_pg_split_opts() {
        assert_eq!(split(""), [""; 0]);
        assert_eq!(split(" \t\n\x0b\x0c\r"), [""; 0]);
        assert_eq!(split("  a  b\tc "), ["a", "b", "c"]);
        assert_eq!(split(r"a\ b c\\d \e"), ["a b", r"c\d", "e"]);
        assert_eq!(split(r"end\"), ["end"]);
        assert_eq!(split(r"\"), [""]);
        assert_eq!(split("a\\\tb"), ["a\tb"]);
    }

    #[test]
    fn words_without_backslash_are_borrowed() {
        assert!(words(b"-c a=b").all(|w| matches!(w, Cow::Borrowed(_))));
    }

    #[test]
    fn reads_settings() {
        assert_eq!(
            set(r"-c geqo=off --search-path=a,b -cstatement_timeout=5min -c app=a\ b=c --x="),
            [
                ok("geqo", "off"),
                ok("search_path", "a,b"),
                ok("statement_timeout", "5min"),
                ok("app", "a b=c"),
                ok("x", ""),
            ]
        );
    }

    #[test]
    fn refuses_the_rest() {
        assert_eq!(set("-c"), [Err(MessageError::OptionValue)]);
        assert_eq!(set("-c geqo"), [Err(MessageError::OptionValue)]);
        assert_eq!(set("--geqo"), [Err(MessageError::OptionValue)]);
        assert_eq!(set("-c =x"), [Err(MessageError::OptionSwitch)]);
        assert_eq!(set("-e"), [Err(MessageError::OptionSwitch)]);
        assert_eq!(set("-- a"), [Err(MessageError::OptionSwitch), Err(MessageError::OptionSwitch)]);
        assert_eq!(set("word"), [Err(MessageError::OptionSwitch)]);
    }
}
