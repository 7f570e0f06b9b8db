// SPDX-License-Identifier: Apache-2.0
//! SQL text as tokens: enough to find literals, in PostgreSQL's rules ("Lexical Structure") and in MySQL's.
//!
//! Total: every byte of any text belongs to a token or is blank, and nothing fails. A literal without its end runs
//! to the end of the text. `standard_conforming_strings` is taken to be on, as it is since PostgreSQL 9.1, and MySQL's
//! `NO_BACKSLASH_ESCAPES` off. Bytes below 0x80 are ASCII: of SJIS, GBK and their like, whose characters may end in a backslash or
//! a quote, strings can be misread.

use std::ops::Range;

use crate::Protocol;

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A keyword or an identifier, quoted or not; `inner` is without quotes.
    Word,
    /// A string of any form; `inner` is what is between the quotes.
    String,
    /// A number.
    Number,
    /// A comment; `inner` is without its marks.
    Comment,
    /// Any other byte.
    Symbol(u8),
}

/// A token and its place in the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    pub(crate) kind: Kind,
    pub(crate) inner: Range<usize>,
}

/// The tokens of a text.
#[derive(Clone, Debug)]
pub(crate) struct Lexer<'a> {
    text: &'a [u8],
    at: usize,
    dialect: Protocol,
}

impl<'a> Lexer<'a> {
    pub(crate) const fn new(text: &'a [u8], dialect: Protocol) -> Self {
        Self { text, at: 0, dialect }
    }

    fn peek(&self, ahead: usize) -> u8 {
        self.text.get(self.at + ahead).copied().unwrap_or(0)
    }

    fn is_mysql(&self) -> bool {
        self.dialect == Protocol::Mysql
    }

    /// From behind the opening quote to behind the closing one; a doubled quote is none.
    fn quoted(&mut self, kind: Kind, quote: u8, backslash: bool) -> Token {
        let start = self.at;
        while self.at < self.text.len() {
            let byte = self.text[self.at];
            let escaped = byte == b'\\' && backslash || byte == quote && self.peek(1) == quote;
            if escaped {
                self.at += 2;
            } else if byte == quote {
                self.at += 1;
                return Token { kind, inner: start..self.at - 1 };
            } else {
                self.at += 1;
            }
        }
        self.at = self.text.len();
        Token { kind, inner: start.min(self.at)..self.at }
    }

    fn line_comment(&mut self, mark: usize) -> Token {
        let start = self.at + mark;
        let mysql = self.is_mysql();
        let end = self.text[start..].iter().position(|&byte| byte == b'\n' || byte == b'\r' && !mysql);
        self.at = end.map_or(self.text.len(), |end| start + end);
        Token { kind: Kind::Comment, inner: start..self.at }
    }

    /// PostgreSQL's nest.
    fn block_comment(&mut self) -> Token {
        let start = self.at + 2;
        self.at = start;
        let mut depth = 1;
        while self.at < self.text.len() {
            match (self.text[self.at], self.peek(1)) {
                (b'*', b'/') => {
                    depth -= 1;
                    self.at += 2;
                    if depth == 0 {
                        return Token { kind: Kind::Comment, inner: start..self.at - 2 };
                    }
                }
                (b'/', b'*') if !self.is_mysql() => {
                    depth += 1;
                    self.at += 2;
                }
                _ => self.at += 1,
            }
        }
        self.at = self.text.len();
        Token { kind: Kind::Comment, inner: start..self.at }
    }

    /// `$tag$ ... $tag$`, if one begins here.
    fn dollar_quoted(&mut self) -> Option<Token> {
        let rest = &self.text[self.at + 1..];
        let tag = rest.iter().position(|&byte| byte == b'$')?;
        let name = &rest[..tag];
        let is_tag =
            name.first().is_none_or(|&byte| is_word_start(byte)) && name.iter().all(|&b| is_word_part(b));
        if !is_tag || name.contains(&b'$') {
            return None;
        }
        let delimiter = &self.text[self.at..self.at + tag + 2];
        let start = self.at + delimiter.len();
        let end = find(&self.text[start..], delimiter).map(|end| start + end);
        self.at = end.map_or(self.text.len(), |end| end + delimiter.len());
        Some(Token { kind: Kind::String, inner: start..end.unwrap_or(self.text.len()) })
    }

    fn word(&mut self) -> Token {
        let start = self.at;
        while self.at < self.text.len() && is_word_part(self.text[self.at]) {
            self.at += 1;
        }
        Token { kind: Kind::Word, inner: start..self.at }
    }

    fn number(&mut self) -> Token {
        let start = self.at;
        while self.at < self.text.len() {
            let byte = self.text[self.at];
            let exponent_sign = matches!(byte, b'+' | b'-')
                && matches!(self.text[self.at - 1], b'e' | b'E')
                && self.text[start].is_ascii_digit()
                && !matches!(self.text.get(start + 1), Some(b'x' | b'X'));
            // `1..10` of PL/pgSQL is two numbers.
            let range = byte == b'.' && self.peek(1) == b'.';
            if range || !(byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_') || exponent_sign) {
                break;
            }
            self.at += 1;
        }
        Token { kind: Kind::Number, inner: start..self.at }
    }
}

impl Iterator for Lexer<'_> {
    type Item = Token;

    fn next(&mut self) -> Option<Token> {
        while self.text.get(self.at)?.is_ascii_whitespace() {
            self.at += 1;
        }
        let (byte, next) = (self.text[self.at], self.peek(1));
        Some(match (byte, next) {
            (b'\'', _) => {
                self.at += 1;
                self.quoted(Kind::String, b'\'', self.is_mysql())
            }
            (b'e' | b'E', b'\'') => {
                self.at += 2;
                self.quoted(Kind::String, b'\'', true)
            }
            (b'b' | b'B' | b'x' | b'X' | b'n' | b'N', b'\'') => {
                self.at += 2;
                self.quoted(Kind::String, b'\'', self.is_mysql())
            }
            (b'u' | b'U', b'&') if self.peek(2) == b'\'' && !self.is_mysql() => {
                self.at += 3;
                self.quoted(Kind::String, b'\'', false)
            }
            (b'u' | b'U', b'&') if self.peek(2) == b'"' && !self.is_mysql() => {
                self.at += 3;
                self.quoted(Kind::Word, b'"', false)
            }
            (b'"', _) => {
                self.at += 1;
                let kind = if self.is_mysql() { Kind::String } else { Kind::Word };
                self.quoted(kind, b'"', self.is_mysql())
            }
            (b'`', _) if self.is_mysql() => {
                self.at += 1;
                self.quoted(Kind::Word, b'`', false)
            }
            // In MySQL `5--1` is 6: a blank, a control character or the end (0 here) makes the comment.
            (b'-', b'-') if !self.is_mysql() || self.peek(2) == b' ' || self.peek(2).is_ascii_control() => {
                self.line_comment(2)
            }
            (b'#', _) if self.is_mysql() => self.line_comment(1),
            (b'/', b'*') => self.block_comment(),
            (b'$', _) if !self.is_mysql() => {
                if let Some(token) = self.dollar_quoted() {
                    token
                } else {
                    self.at += 1;
                    // `$1` is no literal: its number is a symbol as well.
                    while self.peek(0).is_ascii_digit() {
                        self.at += 1;
                    }
                    Token { kind: Kind::Symbol(b'$'), inner: self.at - 1..self.at }
                }
            }
            (b'0'..=b'9', _) | (b'.', b'0'..=b'9') => self.number(),
            _ if is_word_start(byte) => self.word(),
            _ => {
                self.at += 1;
                Token { kind: Kind::Symbol(byte), inner: self.at - 1..self.at }
            }
        })
    }
}

const fn is_word_start(byte: u8) -> bool {
    byte.is_ascii_alphabetic() || byte == b'_' || byte >= 0x80
}

const fn is_word_part(byte: u8) -> bool {
    is_word_start(byte) || byte.is_ascii_digit() || byte == b'$'
}

pub(crate) fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    memchr::memmem::find(text, what)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tokens(text: &str, dialect: Protocol) -> Vec<(Kind, &str)> {
        Lexer::new(text.as_bytes(), dialect).map(|token| (token.kind, &text[token.inner])).collect()
    }

    fn strings(text: &str) -> Vec<&str> {
        let all = tokens(text, Protocol::Postgres);
        all.into_iter().filter(|(kind, _)| *kind == Kind::String).map(|(_, text)| text).collect()
    }

    #[test]
    fn strings_of_postgresql() {
        assert_eq!(
            strings("select 'a', 'it''s', E'it\\'s', b'01', U&'d\\0061'"),
            ["a", "it''s", "it\\'s", "01", "d\\0061"]
        );
        assert_eq!(strings("select 'c:\\', 'x'"), ["c:\\", "x"]);
        assert_eq!(strings("do $$ 'in' $$; select $f$ $$ $f$"), [" 'in' ", " $$ "]);
        assert_eq!(strings("select $1, $2, a$b$, 'x'"), ["x"]);
        assert_eq!(
            strings("select \"it's\", 'x' -- 'no'\n, 'y' /* 'no' /* 'no' */ 'no' */, 'z'"),
            ["x", "y", "z"]
        );
        assert_eq!(strings("select 'open"), ["open"]);
        assert_eq!(strings("select E'open\\"), ["open\\"]);
    }

    #[test]
    fn strings_of_mysql() {
        let text = "select 'it\\'s', \"x\", `c` # 'no'\n, 'y' /* /* */ , 'z'";
        let all = tokens(text, Protocol::Mysql);
        let strings: Vec<_> =
            all.iter().filter(|(kind, _)| *kind == Kind::String).map(|(_, text)| *text).collect();
        assert_eq!(strings, ["it\\'s", "x", "y", "z"]);
        assert!(all.contains(&(Kind::Word, "c")));
    }

    #[test]
    fn comments_of_mysql() {
        let strings = |text: &'static str| -> Vec<_> {
            let all = tokens(text, Protocol::Mysql);
            all.into_iter().filter(|(kind, _)| *kind == Kind::String).map(|(_, text)| text).collect()
        };
        assert_eq!(strings("select 5--'a', 'b' -- 'no'\n, 'c' --\t'no'\n --\n'd' --"), ["a", "b", "c", "d"]);
        assert_eq!(strings("select 1 # it's\r it's\n, 'a'"), ["a"]);
        assert_eq!(strings("select u&'it\\'s', 'a'"), ["it\\'s", "a"]);
    }

    #[test]
    fn numbers() {
        let numbers = |text: &'static str| -> Vec<_> {
            let all = tokens(text, Protocol::Postgres);
            all.into_iter().filter(|(kind, _)| *kind == Kind::Number).map(|(_, text)| text).collect()
        };
        assert_eq!(numbers("a1 = 12 and b=3.5e-7-1"), ["12", "3.5e-7", "1"]);
        assert_eq!(numbers("0x1F+1_000 .5 1..10 $1"), ["0x1F", "1_000", ".5", "1", ".10"]);
    }

    proptest! {
        #[test]
        fn any_text(bytes in "[ a-eEuU&$'\"\\\\/*#.0-9_\n;`-]{0,60}", mysql: bool) {
            let dialect = if mysql { Protocol::Mysql } else { Protocol::Postgres };
            let mut end = 0;
            for token in Lexer::new(bytes.as_bytes(), dialect) {
                prop_assert!(token.inner.start >= end && token.inner.end <= bytes.len());
                end = token.inner.end;
            }
        }
    }
}
