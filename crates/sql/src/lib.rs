// SPDX-License-Identifier: Apache-2.0
//! What a statement is, told from its text: a fingerprint that is the same whatever the literals, the text without them, whether it only
//! reads, and what makes its result differ from one run to the next.
//!
//! The lexer, the parser and the fingerprint are PostgreSQL's own (libpg_query); no other crate calls it. [`Traits`] judge by tokens, for whoever
//! asks while traffic waits; [`Summary`] by the syntax tree. A name says what a function is called, not what it does: both err on the
//! side of "it writes", and whoever relies on them runs the statement in a read-only transaction as well.
//!
//! ```
//! use underpass_sql::Statement;
//!
//! let one = Statement::parse("select * from t where id = 17").unwrap();
//! let other = Statement::parse("SELECT * FROM t WHERE id=4 -- again").unwrap();
//! assert_eq!(one.fingerprint, other.fingerprint);
//! assert_eq!(one.text, "select * from t where id = $1");
//! assert!(one.traits.is_read_only);
//! ```

pub mod functions;
mod hide;
mod strip;
mod summary;
mod traits;

pub use strip::strip_literals;
pub use summary::{Class, Summary};
pub use traits::{Traits, Varies};

/// Longest text that is parsed, in bytes. Longer ones are dumps and bulk loads, whose shape tells nothing.
pub const PARSED_BYTES_MAX: usize = 256 * 1024;

/// Why a text could not be parsed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Over [`PARSED_BYTES_MAX`].
    #[error("statement of {0} bytes is too long to be parsed")]
    TooLong(usize),
    /// Not in the grammar of this version of PostgreSQL.
    #[error("{0}")]
    Syntax(String),
}

/// A statement, or several of one simple query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Statement {
    /// libpg_query's fingerprint: equal for texts that differ in literals, blanks, comments and the like only.
    pub fingerprint: u64,
    /// The text with `$1`, `$2` in the place of literals, and without comments.
    pub text: String,
    /// What it does, as far as tokens tell.
    pub traits: Traits,
}

impl Statement {
    /// Parses the text of a Query or Parse message.
    ///
    /// # Errors
    /// The text is too long or not in the grammar.
    pub fn parse(text: &str) -> Result<Self, Error> {
        Ok(Self {
            fingerprint: fingerprint(text)?,
            text: hide::hide(&normalize(text)?)?,
            traits: Traits::of(tokens(text)?.into_iter()),
        })
    }
}

/// libpg_query's fingerprint of a text: see [`Statement::fingerprint`].
///
/// # Errors
/// The text is too long or not in the grammar. [`hash_fingerprint`] may take its place.
pub fn fingerprint(text: &str) -> Result<u64, Error> {
    check_length(text)?;
    Ok(pg_query::fingerprint(text, 0, 0).map_err(syntax)?.value)
}

/// A text with `$1`, `$2` in the place of its literals, as far as libpg_query replaces them: in utility statements some stay, and so do comments.
/// [`Statement::text`] has none.
///
/// # Errors
/// The text is too long or not in the grammar.
pub fn normalize(text: &str) -> Result<String, Error> {
    check_length(text)?;
    pg_query::normalize(text).map_err(syntax)
}

/// What `parse`, one of this crate's functions, says of a text in whatever encoding: bytes that are no UTF-8 are taken for U+FFFD. A literal must
/// not decide what all texts of a shape are, so a text too long for the parser is parsed without its literals.
///
/// # Errors
/// Those of `parse`; [`Error::TooLong`] if the text is too long without its literals as well.
pub fn parse_bytes<T>(text: &[u8], parse: impl Fn(&str) -> Result<T, Error>) -> Result<T, Error> {
    match parse(&String::from_utf8_lossy(&text[..text.len().min(PARSED_BYTES_MAX + 1)])) {
        Err(Error::TooLong(_)) => {
            let mut stripped = Vec::new();
            strip_literals(text, &mut stripped);
            parse(&String::from_utf8_lossy(&stripped))
        }
        said => said,
    }
}

/// In the place of a fingerprint for what has none: FNV-1a with 64 bits, the same in every run and version.
pub fn hash_fingerprint(text: &[u8]) -> u64 {
    text.iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The tokens of a text, comments among them.
fn tokens(text: &str) -> Result<Vec<&str>, Error> {
    // A text without any token must not reach the scanner's binding, which makes a slice of its null pointer. A line of its own: the
    // text may end in a comment.
    let tokens = pg_query::scan_tokens(&format!("{text}\n;")).map_err(syntax)?;
    let word = |token: &pg_query::protobuf::ScanToken| {
        text.get(usize::try_from(token.start).ok()?..usize::try_from(token.end).ok()?)
    };
    Ok(tokens.iter().filter_map(word).collect())
}

fn check_length(text: &str) -> Result<(), Error> {
    if text.len() > PARSED_BYTES_MAX { Err(Error::TooLong(text.len())) } else { Ok(()) }
}

fn syntax(error: pg_query::Error) -> Error {
    Error::Syntax(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn print(text: &str) -> u64 {
        Statement::parse(text).unwrap().fingerprint
    }

    #[test]
    fn literals_make_no_difference_and_names_do() {
        assert_eq!(print("select 1"), print("select  2 /* x */"));
        assert_eq!(print("select * from t where a in (1, 2)"), print("select * from t where a in (1, 2, 3)"));
        assert_eq!(print("insert into t values (1, 'x')"), print("insert into t values ($1, $2)"));
        assert_ne!(print("select a from t"), print("select b from t"));
        assert_ne!(print("select 1"), print("select 1; select 1"));
    }

    #[test]
    fn what_is_no_sql_is_an_error() {
        assert!(matches!(Statement::parse("selekt 1"), Err(Error::Syntax(_))));
        assert!(matches!(Statement::parse(&"x".repeat(PARSED_BYTES_MAX + 1)), Err(Error::TooLong(_))));
        assert!(Statement::parse("").is_ok());
        assert!(matches!(Statement::parse("select '\0'"), Err(Error::Syntax(_))));
    }

    #[test]
    fn literals_are_gone_from_the_text() {
        let text = Statement::parse("update t set v = 'secret' where id = 12345").unwrap().text;
        assert_eq!(text, "update t set v = $1 where id = $2");
    }

    /// The cheap key and the fingerprint agree: texts with one key have one fingerprint.
    #[test]
    fn equal_keys_have_equal_fingerprints() {
        let texts = [
            "select 1",
            "select 22",
            "select 'a'",
            "select 'it''s'",
            "select E'a\\'b', 3.5e-7",
            "select 1e-3",
            "select 5-3",
            "select 0x1e-3",
            "select $1, a1 from t2",
            "select -1, +2, 0x1F, 1_000",
            "select \"it's\" from t where x = 'y'",
            "insert into t values (1,2),(3,4)",
            "select $$body$$ -- c",
        ];
        let (mut one, mut other) = (Vec::new(), Vec::new());
        for a in texts {
            for b in texts {
                strip_literals(a.as_bytes(), &mut one);
                strip_literals(b.as_bytes(), &mut other);
                if one == other {
                    assert_eq!(print(a), print(b), "{a} {b}");
                }
            }
        }
    }
}
