// SPDX-License-Identifier: Apache-2.0
//! The shape of a statement: its text without literals, comments and needless blanks.

use std::ops::Range;

use super::lexer::{Kind, Lexer};
use crate::Protocol;

/// The text with `?` for every literal, one blank between tokens and no comments. Names keep PostgreSQL's quotes, which make others of them,
/// and lose MySQL's.
///
/// Cheap, and total: a key under which to remember what an expensive parser says, and a name for texts that it
/// refuses. Texts of one shape have one libpg_query fingerprint; the converse does not hold.
pub fn strip_literals(text: &[u8], dialect: Protocol) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len().min(1024));
    let mut end = 0;
    for mut token in Lexer::new(text, dialect) {
        if token.kind == Kind::Word && dialect == Protocol::Postgres {
            token.inner = with_quotes(text, token.inner, end);
        }
        if token.kind == Kind::Comment {
            end = token.inner.end;
            continue;
        }
        let apart = token.inner.start > end && !out.is_empty();
        let joined = matches!(token.kind, Kind::Symbol(b',' | b')' | b';' | b'.'));
        if apart && !joined {
            out.push(b' ');
        }
        end = token.inner.end;
        match token.kind {
            Kind::String | Kind::Number => out.push(b'?'),
            Kind::Symbol(b'$') => {
                // Where a parameter's number would be, its text is: `$1` and `$12` differ.
                let start = text[..token.inner.end].iter().rposition(|&byte| byte == b'$').unwrap_or(end);
                out.extend_from_slice(&text[start..end]);
            }
            _ => out.extend_from_slice(&text[token.inner]),
        }
    }
    out
}

/// A name with its quotes, if it has any, and the `U&` before them; `from` is where the token before it ends.
fn with_quotes(text: &[u8], name: Range<usize>, from: usize) -> Range<usize> {
    let Some(before) = text[from..name.start].strip_suffix(b"\"") else { return name };
    let prefix =
        if before.len() >= 2 && before[before.len() - 2..].eq_ignore_ascii_case(b"U&") { 2 } else { 0 };
    from + before.len() - prefix..(name.end + 1).min(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(text: &str) -> String {
        String::from_utf8(strip_literals(text.as_bytes(), Protocol::Postgres)).unwrap()
    }

    #[test]
    fn literals_and_blanks_make_no_difference() {
        assert_eq!(
            shape("select  a from t\nwhere b = 'it''s' and c=12 -- x"),
            "select a from t where b = ? and c=?"
        );
        assert_eq!(shape("select $1, $12"), "select $1, $12");
        assert_eq!(shape("select \"A b\", $$x$$"), "select \"A b\", ?");
        assert_eq!(shape("select \"a\"b"), "select \"a\"b");
        assert_eq!(shape("select a.\"b\"\"c\" , U&\"d\", \"e"), "select a.\"b\"\"c\", U&\"d\", \"e");
        assert_eq!(shape(""), "");
    }
}
