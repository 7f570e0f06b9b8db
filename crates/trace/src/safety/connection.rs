// SPDX-License-Identifier: Apache-2.0
//! Passwords in connection strings: libpq's, lists with semicolons, and URLs.
//!
//! What ends a value depends on what it is a part of: in libpq's `password=ab&c;d` only a blank does (manual, "Connection Strings"), behind
//! a `&` another `&`, behind a `;` another `;`. A quote ends it where the connection string stands in SQL that is in the text, too. Where
//! that is not sure, too much is taken.

use std::ops::Range;

/// What a password is one of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// libpq's `host=h password=x`.
    Keyword,
    /// `Server=h;Password=x`.
    List,
    /// `?host=h&password=x`.
    Url,
}

/// Schemes whose passwords may have any byte but `/`.
const DATABASE_SCHEMES: [&[u8]; 3] = [b"postgres", b"mysql", b"mariadb"];

/// Where a text has passwords.
pub(super) fn find(text: &[u8], base: usize, places: &mut Vec<Range<usize>>) {
    // The end of the last value without quotes: one that begins in it ends with it, and is not looked at again.
    let mut bare_end = 0;
    let mut quotes = Quotes { text, at: 0, open: Vec::new(), is_double: false };
    for (name, start) in named(text) {
        let is_quoted = text.get(start) == Some(&b'\'');
        if start < bare_end && !is_quoted || is_conversion(&text[start..]) {
            continue;
        }
        let len = if is_quoted {
            quoted_len(&text[start..])
        } else {
            quotes.advance(start);
            let len = bare_len(text, start, form(&text[..name]), &quotes);
            bare_end = start + len;
            len
        };
        places.push(base + start..base + start + len);
    }
    for slashes in memchr::memmem::find_iter(text, b"://") {
        let from = slashes + 3;
        let authority = authority(text, slashes);
        let Some(host) = authority.iter().rposition(|&byte| byte == b'@') else { continue };
        if let Some(colon) = authority[..host].iter().position(|&byte| byte == b':')
            && !is_conversion(&authority[colon + 1..])
        {
            places.push(base + from + colon + 1..base + from + host);
        }
    }
}

/// Whether the password of a connection string comes from elsewhere: it ends where that would begin, or has a conversion of `format` there.
pub(super) fn is_open(text: &[u8]) -> bool {
    let is_quote = |byte: &u8| matches!(byte, b'\'' | b'\\');
    let opens = |(_, start): (usize, usize)| {
        let rest = &text[start..];
        let quotes = rest.iter().take_while(|byte| is_quote(byte)).count();
        let blanks = rest[quotes..].iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        let behind = &rest[quotes + blanks..];
        behind.is_empty()
            || conversion_len(&rest[quotes..]).is_some()
            || quotes > 0 && (behind.starts_with(b"||") || behind.starts_with(b","))
    };
    named(text).any(opens)
        || memchr::memmem::find_iter(text, b"://").any(|slashes| {
            let authority = authority(text, slashes);
            let Some(colon) = authority.iter().position(|&byte| byte == b':') else { return false };
            let password = &authority[colon + 1..];
            is_of_database(&text[..slashes])
                && (password.is_empty() && slashes + 3 + authority.len() == text.len()
                    || password.ends_with(b"@") && is_conversion(password)
                    || password.contains(&b'@') && conversion_len(password).is_some())
        })
}

/// Whether an open connection string is nothing else, and has no password of its own.
pub(super) fn is_open_piece(text: &[u8]) -> bool {
    let end = text.iter().rposition(|&byte| byte != b'\'').map_or(0, |last| last + 1);
    is_open(text) && !text[..end].iter().any(|byte| matches!(byte, b'\'' | b'('))
}

/// Where the names of passwords begin that have an equals sign behind them, and where their values do.
fn named(text: &[u8]) -> impl Iterator<Item = (usize, usize)> {
    memchr::memchr2_iter(b'd', b'D', text).filter_map(|at| {
        let name = at.checked_sub(7)?;
        if !text[name..=at].eq_ignore_ascii_case(b"password") {
            return None;
        }
        let blank = |from: usize| text[from..].iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        let equals = at + 1 + blank(at + 1);
        (text.get(equals) == Some(&b'=')).then(|| (name, equals + 1 + blank(equals + 1)))
    })
}

/// The form that a name has which is behind this text, but for its own first letters.
fn form(before: &[u8]) -> Form {
    let is_letter = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.');
    match before.iter().rev().find(|byte| !is_letter(byte)) {
        Some(b'?' | b'&') => Form::Url,
        Some(b';') => Form::List,
        _ => Form::Keyword,
    }
}

/// The length of a value without quotes around it.
fn bare_len(text: &[u8], start: usize, form: Form, quotes: &Quotes<'_>) -> usize {
    let mut at = start;
    if form == Form::List && text.get(start) == Some(&b'{') {
        // ODBC's braces: what is in them ends nothing.
        at += memchr::memchr(b'}', &text[start..]).unwrap_or(0);
    }
    while let Some(&byte) = text.get(at) {
        // In an SQL string the backslash may be doubled itself.
        let is_escaped = at > start && text[at - 1] == b'\\';
        let run = if byte == b'\'' { run(&text[at..]) } else { 1 };
        let ends = match byte {
            b'&' => form == Form::Url,
            b';' => form == Form::List,
            b'\'' => quotes.end_at(run) && !(is_escaped && run == 1),
            b'"' => quotes.is_double && !is_escaped,
            _ => byte.is_ascii_whitespace() && !is_escaped,
        };
        if ends {
            break;
        }
        at += run;
    }
    at - start
}

/// The length of a value in quotes, which are doubled if it stands in an SQL string.
fn quoted_len(text: &[u8]) -> usize {
    let quote: &[u8] = if text.get(1) == Some(&b'\'') { b"''" } else { b"'" };
    let mut at = quote.len();
    while at < text.len() {
        if text[at] == b'\\' {
            at += 2;
        } else if text[at..].starts_with(quote) {
            return at + quote.len();
        } else {
            at += 1;
        }
    }
    text.len()
}

/// Which quotes are open at a place of a text: that of a function's body has strings, which have strings with doubled quotes.
struct Quotes<'t> {
    text: &'t [u8],
    at: usize,
    /// How many stand for one, from the outermost.
    open: Vec<usize>,
    is_double: bool,
}

impl Quotes<'_> {
    fn advance(&mut self, to: usize) {
        while let Some(next) = self.text.get(self.at..to).and_then(|rest| memchr::memchr2(b'\'', b'"', rest))
        {
            self.at += next;
            if self.text[self.at] == b'"' {
                self.is_double = !self.is_double;
                self.at += 1;
                continue;
            }
            let run = run(&self.text[self.at..]);
            if self.end_at(run) {
                self.open.pop();
            } else if self.open.last().is_none_or(|open| run < *open || run == 2 * open) {
                self.open.push(run);
            }
            self.at += run;
        }
        self.at = self.at.max(to);
    }

    /// Whether so many quotes end the string that is open; an even number of its own are a part of it.
    fn end_at(&self, run: usize) -> bool {
        self.open.last().is_some_and(|open| !run.is_multiple_of(2 * open))
    }
}

/// How many quotes a text begins with.
fn run(text: &[u8]) -> usize {
    text.iter().take_while(|&&byte| byte == b'\'').count()
}

/// User, password and host of the URL whose `://` is there.
fn authority(text: &[u8], slashes: usize) -> &[u8] {
    let is_of_database = is_of_database(&text[..slashes]);
    let rest = &text[slashes + 3..];
    let ends = |byte: &u8| {
        *byte == b'/' || byte.is_ascii_whitespace() || !is_of_database && matches!(byte, b'?' | b'#')
    };
    &rest[..rest.iter().position(ends).unwrap_or(rest.len())]
}

/// Whether a text ends in the scheme of a database, `postgresql+psycopg2` and the like included.
fn is_of_database(before: &[u8]) -> bool {
    const SCHEME_BYTES_MAX: usize = 32;
    let tail = &before[before.len().saturating_sub(SCHEME_BYTES_MAX)..];
    let is_scheme = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
    let scheme = &tail[tail.iter().rposition(|byte| !is_scheme(byte)).map_or(0, |at| at + 1)..];
    DATABASE_SCHEMES
        .iter()
        .any(|known| scheme.windows(known.len()).any(|word| word.eq_ignore_ascii_case(known)))
}

/// Whether a text begins with a conversion that is none of a URL's (`%20s`): it stays, so that what calls its function does not fail.
fn is_conversion(text: &[u8]) -> bool {
    conversion_len(text).is_some_and(|len| len == 2 || text[..len].contains(&b'$'))
}

/// The length of the conversion of `format` that a text begins with, and that nothing but a separator follows.
fn conversion_len(text: &[u8]) -> Option<usize> {
    let flags = text.strip_prefix(b"%")?;
    let is_flag = |byte: &u8| byte.is_ascii_digit() || matches!(byte, b'$' | b'-' | b'*');
    let len = 1 + flags.iter().take_while(|byte| is_flag(byte)).count() + 1;
    let is_one = matches!(text.get(len - 1), Some(b's' | b'I' | b'L'));
    let is_apart = text.get(len).is_none_or(|byte| {
        byte.is_ascii_whitespace() || matches!(byte, b'\'' | b'"' | b'&' | b';' | b'@' | b'\\')
    });
    (is_one && is_apart).then_some(len)
}
