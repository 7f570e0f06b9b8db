// SPDX-License-Identifier: Apache-2.0
//! Finds passwords in SQL text and overwrites them, byte by byte, so that lengths and offsets stay.
//!
//! What is found (each with any form of string, in function bodies too):
//!
//! * `CREATE`/`ALTER` `ROLE`/`USER`/`GROUP` ... `PASSWORD '...'`: what psql's `\password` sends, the SCRAM secret;
//! * options whose name ends in `password`: `CREATE`/`ALTER USER MAPPING`, `SERVER`, `FOREIGN TABLE`;
//! * `password=...` in connection strings and URLs with a password, wherever a string holds one: `CREATE
//!   SUBSCRIPTION`, `dblink_connect`;
//! * MySQL: `IDENTIFIED BY`, `SET PASSWORD`, `PASSWORD('...')`, `MASTER_PASSWORD = '...'`, `START REPLICA PASSWORD = '...'`,
//!   their numbers like `0x...`, too;
//! * SQL that a statement puts together, `format('alter role %I password %L', ...)` or `'... password ' || quote_literal(...)`, and connection
//!   strings (`'host=h password=' || ...`): which of its strings is the password only the server knows, so all of them are overwritten ([`Told::composes`]). A password that is a bare
//!   number there (`format('... %L', 123456)`) is no string, and stays.
//!
//! It looks at tokens, not at grammar, so that a statement with an error in it gives nothing away either. What
//! has the form but not the sense (`... password 'x'` as a column of that type) is overwritten as well.
//!
//! Bytes that are not text have the form by chance, and must stay what they are: of values in binary format only what reads as
//! text is searched ([`cover_binary`]).

use std::ops::Range;

use super::connection;
use super::lexer::{Kind, Lexer, Token};
use crate::Protocol;

/// What a password is overwritten with.
pub(crate) const COVER: u8 = b'*';
/// Strings in strings in strings are followed so far.
const DEPTH_MAX: u32 = 4;
/// The shortest text with a password in it, `://:p@h`, bytes.
const TEXT_BYTES_MIN: usize = 7;

/// Whether `text` may hold a password at all: a scan at the speed of memory, so that other statements cost nothing.
pub(crate) fn may_have_password(text: &[u8], dialect: Protocol) -> bool {
    // URLs are known by "://".
    is_named(text)
        || memchr::memmem::find(text, b"://").is_some()
        || (dialect == Protocol::Mysql
            && memchr::memchr2_iter(b'f', b'F', text).any(|at| {
                at >= 6
                    && text.get(at - 6..at + 4).is_some_and(|word| word.eq_ignore_ascii_case(b"identified"))
            }))
}

/// Whether `password` is in a text.
fn is_named(text: &[u8]) -> bool {
    // 'w' is rarer than the other letters.
    memchr::memchr2_iter(b'w', b'W', text).any(|at| {
        at >= 4 && text.get(at - 4..at + 4).is_some_and(|word| word.eq_ignore_ascii_case(b"password"))
    })
}

/// What an SQL text told of passwords.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Told {
    /// It had one, which is overwritten.
    pub(crate) covered: bool,
    /// It puts together SQL that sets one, or a connection string, which then is in one of its other strings, or in a parameter. Or it is a
    /// parameter itself.
    pub(crate) composes: bool,
}

/// Overwrites all passwords in an SQL text.
pub(crate) fn cover(text: &mut [u8], dialect: Protocol) -> Told {
    if !may_have_password(text, dialect) {
        return Told::default();
    }
    let mut found = Found::default();
    find(text, 0, dialect, 0, &mut found);
    let composes = found.composed || found.asked;
    if found.composed {
        strings(text, 0, dialect, 0, &mut found.places);
    }
    Told { covered: overwrite(text, found.places), composes }
}

/// Whether the rows that answer a text of MySQL's have passwords in them, or their hashes.
pub(crate) fn shows_passwords(text: &[u8]) -> bool {
    let mut before: [&[u8]; 2] = [b"", b""];
    for Token { kind, inner } in Lexer::new(text, Protocol::Mysql) {
        let content = &text[inner];
        let is_after =
            |words: [&[u8]; 2]| before.iter().zip(words).all(|(have, word)| have.eq_ignore_ascii_case(word));
        let is = |word: &[u8]| content.eq_ignore_ascii_case(word);
        let shows = match kind {
            Kind::Word => {
                is_after([b"show", b"create"]) && is(b"user")
                    || is_after([b"mysql", b"."]) && is(b"user")
                    || before[1].eq_ignore_ascii_case(b"show") && is(b"grants")
                    || before[1].eq_ignore_ascii_case(b"random") && is(b"password")
                    || before[1].eq_ignore_ascii_case(b"to") && is(b"random")
                    || is(b"global_priv")
                    || is(b"authentication_string")
            }
            Kind::Comment if is_run(content, Protocol::Mysql) && shows_passwords(&content[1..]) => true,
            Kind::Comment => continue,
            _ => false,
        };
        if shows {
            return true;
        }
        before = [before[1], content];
    }
    false
}

/// Overwrites all passwords in a value, which may be a connection string or an SQL text; `true` if there was one.
pub(crate) fn cover_value(value: &mut [u8], dialect: Protocol) -> bool {
    if !may_have_password(value, dialect) {
        return false;
    }
    let mut found = Found::default();
    connection::find(value, 0, &mut found.places);
    find(value, 0, dialect, 1, &mut found);
    overwrite(value, found.places)
}

/// As [`cover_value`], in a value in binary format: an image, an array of texts, or a text like any other.
///
/// In 16 MiB of random bytes there is one `://`, and one time in eighty a colon and an `@` come behind it before a blank or a slash.
/// Texts that come in binary format are nearly always UTF-8, and without control characters. Where one of another encoding has a password's
/// name or a URL, it is searched beyond the bytes that are not UTF-8: they may be in the middle of the password.
pub(crate) fn cover_binary(value: &mut [u8], dialect: Protocol) -> bool {
    if !may_have_password(value, dialect) {
        return false;
    }
    let mut covered = false;
    for text in texts(value) {
        covered |= cover_value(&mut value[text], dialect);
    }
    covered
}

/// As [`cover_binary`], in values of MySQL's binary protocol one behind the other. How many there are only the answer to their PREPARE tells, so the byte
/// before a text, which says how long it is, may be taken for its first character: each is read without it, too.
pub(crate) fn cover_values(values: &mut [u8], dialect: Protocol) -> bool {
    if !may_have_password(values, dialect) {
        return false;
    }
    let mut covered = false;
    for text in texts(values) {
        for start in [text.start, text.start + 1] {
            covered |= cover_value(&mut values[start..text.end], dialect);
        }
    }
    covered
}

/// Where bytes read as text: UTF-8 without control characters but blanks, or, behind what announces a password, any bytes but those. What is
/// too short for a password is left out.
fn texts(bytes: &[u8]) -> Vec<Range<usize>> {
    let mut texts: Vec<Range<usize>> = Vec::new();
    let pieces = bytes
        .utf8_chunks()
        .flat_map(|chunk| chunk.valid().split(|c: char| c.is_control() && !c.is_ascii_whitespace()))
        .filter(|piece| !piece.is_empty());
    for piece in pieces {
        let start = piece.as_ptr() as usize - bytes.as_ptr() as usize;
        if texts.last().is_some_and(|before| start < before.end) {
            continue; // a text before it has been prolonged, and has all of it
        }
        let mut end = start + piece.len();
        if announces(piece.as_bytes()) {
            let is_text = |byte: &&u8| !byte.is_ascii_control() || byte.is_ascii_whitespace();
            end += bytes[end..].iter().take_while(is_text).count();
        }
        if end - start >= TEXT_BYTES_MIN {
            texts.push(start..end);
        }
    }
    texts
}

/// Whether a text has the name of a password or the scheme of a URL in it: more than random bytes have by chance.
fn announces(text: &[u8]) -> bool {
    let scheme = |at: usize| at >= 2 && text[at - 2..at].iter().all(u8::is_ascii_alphabetic);
    is_named(text) || memchr::memmem::find_iter(text, b"://").any(scheme)
}

fn overwrite(text: &mut [u8], places: Vec<Range<usize>>) -> bool {
    let mut covered = false;
    for byte in places.into_iter().flatten() {
        text[byte] = COVER;
        covered = true;
    }
    covered
}

/// Statements of which SET is a part: what follows it are columns.
const ASSIGNING_WORDS: [&[u8]; 4] = [b"update", b"insert", b"replace", b"load"];
/// Words in the body of a procedure, a trigger or an event behind which a statement begins.
const BODY_WORDS: [&[u8]; 7] = [b"begin", b"then", b"else", b"do", b"loop", b"repeat", b"row"];

/// What the last tokens ask of the next string.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Expect {
    Nothing,
    /// Behind `password`: the next token.
    Password,
    /// Behind `password =` or `password (`.
    Value,
    /// Behind a password: a string that follows at once is its continuation (manual, "String Constants").
    More,
    /// Behind `IDENTIFIED` and `SET PASSWORD`: every string up to the end of the statement, names of users included.
    Identified,
}

/// What [`find`] found.
#[derive(Debug, Default)]
struct Found {
    places: Vec<Range<usize>>,
    /// A string has `ALTER ROLE` or its like in it.
    alters: bool,
    /// The password of such a string, or of a connection string, is not in it: it ends before, or has a `%L` in its place.
    composed: bool,
    /// A parameter is a password.
    asked: bool,
}

/// Words of which two behind each other make a statement about somebody who may have a password.
const ALTERING_WORDS: [&[u8]; 2] = [b"create", b"alter"];
const ALTERED_WORDS: [&[u8]; 3] = [b"role", b"user", b"group"];
/// What stands between the somebody and the password.
const PIECE_WORDS: [&[u8]; 9] =
    [b"with", b"encrypted", b"login", b"password", b"identified", b"by", b"%l", b"%i", b"%s"];

fn find(text: &[u8], base: usize, dialect: Protocol, depth: u32, found: &mut Found) {
    let mut expect = Expect::Nothing;
    let mut sets = false;
    let mut set = false;
    let mut first = true;
    // Whether SET belongs to an UPDATE or its like, and whether the last word was one that does not: bodies of procedures
    // have statements anywhere.
    let (mut assigns, mut after_set) = (false, false);
    let mysql = dialect == Protocol::Mysql;
    let (mut altering, mut alters_here) = (false, false);
    for Token { kind, inner } in Lexer::new(text, dialect) {
        let content = &text[inner.clone()];
        let was_altering = std::mem::take(&mut altering);
        match kind {
            Kind::Comment => {
                // `/*! ... */` is run by MySQL; and whatever it is, it may have been a statement once.
                if depth < DEPTH_MAX {
                    let start = base + inner.start;
                    if is_run(content, dialect) {
                        find(content, start, dialect, depth + 1, found);
                    } else {
                        // A remark about users and passwords says nothing about the strings outside of it.
                        let mut inside = Found::default();
                        find(content, start, dialect, depth + 1, &mut inside);
                        if inside.composed {
                            strings(content, start, dialect, depth + 1, &mut inside.places);
                        }
                        found.places.append(&mut inside.places);
                    }
                }
                altering = was_altering;
                continue;
            }
            Kind::String if expect != Expect::Nothing => {
                if depth > 0 && content.iter().all(|&byte| byte == b'\'') {
                    // In a string the quotes are doubled: what looks like an empty string opens the password.
                    let start = (inner.end + 1).min(text.len());
                    let len = memchr::memchr(b'\'', &text[start..]);
                    found.composed |= found.alters && (len.is_none() || text[start..].starts_with(b"%"));
                    let len = len.unwrap_or(text.len() - start);
                    found.places.push(base + start..base + start + len);
                }
                found.places.push(base + inner.start..base + inner.end);
                if expect != Expect::Identified {
                    expect = Expect::More;
                }
            }
            Kind::String => {
                connection::find(content, base + inner.start, &mut found.places);
                found.composed |= connection::is_open(content);
                if depth < DEPTH_MAX && (may_have_password(content, dialect) || may_alter(content)) {
                    find(content, base + inner.start, dialect, depth + 1, found);
                }
                // MySQL's MASTER_PASSWORD and `OPTIONS ("password" 'x')` of strings in double quotes.
                expect = if ends_in_password(content) && inner.len() < 64 {
                    Expect::Password
                } else {
                    Expect::Nothing
                };
            }
            Kind::Word => {
                let is_one_of = |words: &[&[u8]]| words.iter().any(|word| content.eq_ignore_ascii_case(word));
                altering = is_one_of(&ALTERING_WORDS);
                alters_here |= depth > 0 && was_altering && is_one_of(&ALTERED_WORDS);
                found.alters |= alters_here;
                assigns = !is_one_of(&BODY_WORDS) && (assigns || is_one_of(&ASSIGNING_WORDS));
                let sets_this = after_set;
                after_set = !assigns && content.eq_ignore_ascii_case(b"set");
                if first {
                    set = content.eq_ignore_ascii_case(b"set");
                    sets = set || is_one_of(&[b"change", b"grant", b"start"]);
                    first = false;
                }
                if expect == Expect::Identified {
                    // `IDENTIFIED WITH mysql_native_password AS '...'`
                } else if mysql && (set || sets_this) && content.eq_ignore_ascii_case(b"password") {
                    // SET PASSWORD FOR 'somebody'@'%' = 'x' REPLACE 'y'
                    expect = Expect::Identified;
                } else if ends_in_password(content) {
                    expect = Expect::Password;
                } else if mysql && content.eq_ignore_ascii_case(b"identified") {
                    expect = Expect::Identified;
                } else if sets && expect == Expect::Password && !content.eq_ignore_ascii_case(b"null") {
                    // GRANT ... PASSWORD somebody = 'x', in a statement with an error
                } else if mysql && content.starts_with(b"_") {
                    // PASSWORD(_utf8mb4'x')
                } else {
                    expect = Expect::Nothing;
                }
            }
            Kind::Symbol(b';') => {
                (expect, first, sets, set) = (Expect::Nothing, true, false, false);
                (assigns, after_set) = (false, false);
            }
            Kind::Symbol(b'(') if expect == Expect::Password => expect = Expect::Value,
            Kind::Symbol(b'=') if expect == Expect::Password && (sets || depth > 0) => expect = Expect::Value,
            Kind::Symbol(b'\\') if depth > 0 => {} // before a quote, in a string with escapes
            // A conversion of `format`; in a pattern of LIKE it is a `%` with anything or nothing behind it.
            Kind::Symbol(b'%')
                if depth > 0
                    && expect == Expect::Password
                    && found.alters
                    && matches!(
                        text.get(inner.end),
                        Some(b'L' | b'I' | b's' | b'-' | b'*' | b'0'..=b'9')
                    ) =>
            {
                found.composed = true;
            }
            Kind::Symbol(b'?') if mysql && expect != Expect::Nothing => found.asked = true,
            Kind::Symbol(b'@' | b'%' | b'.' | b':' | b'$') if sets && expect == Expect::Password => {}
            Kind::Number
                if mysql && expect != Expect::Nothing && matches!(content, [b'0', b'x' | b'X', ..]) =>
            {
                found.places.push(base + inner.start + 2..base + inner.end);
            }
            Kind::Symbol(_) | Kind::Number => {
                if expect != Expect::Identified {
                    expect = Expect::Nothing;
                }
            }
        }
    }
    let open = matches!(expect, Expect::Password | Expect::Value | Expect::Identified);
    if depth > 0 && open && found.alters {
        // What is put together goes on behind a blank, a quote or a bracket, or has only words of SQL: 'reset password' is a text.
        let ends_in_letter = text.last().is_some_and(u8::is_ascii_alphanumeric);
        found.composed |= alters_here || !ends_in_letter || is_piece(text);
    }
}

/// Whether a comment is run: `/*! ... */`, and MariaDB's `/*M! ... */`.
pub(crate) fn is_run(comment: &[u8], dialect: Protocol) -> bool {
    dialect == Protocol::Mysql && (comment.starts_with(b"!") || comment.starts_with(b"M!"))
}

fn words(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty())
}

/// Whether a string has nothing in it but what stands between somebody and the password.
fn is_piece(text: &[u8]) -> bool {
    words(text).all(|word| PIECE_WORDS.iter().any(|known| word.eq_ignore_ascii_case(known)))
}

/// Whether a string is the beginning of SQL about a role, or a piece from the middle of it. No password begins with two such words, or
/// with a blank and has none but such words; that it has `password` or `://` somewhere tells nothing.
fn is_sql(text: &[u8], dialect: Protocol) -> bool {
    let mut begin = words(text);
    let mut next_is = |known: &[&[u8]]| {
        begin.next().is_some_and(|word| known.iter().any(|known| word.eq_ignore_ascii_case(known)))
    };
    if next_is(&ALTERING_WORDS) && next_is(&ALTERED_WORDS) {
        return true;
    }
    text.first().is_some_and(u8::is_ascii_whitespace) && is_piece(text) && may_have_password(text, dialect)
}

/// Whether a string can be the beginning of SQL about a role, whose password another string has.
fn may_alter(text: &[u8]) -> bool {
    let begins = |word: &&[u8]| {
        text.trim_ascii_start().get(..word.len()).is_some_and(|s| s.eq_ignore_ascii_case(word))
    };
    ALTERING_WORDS.iter().any(begins)
}

/// All strings of a text but those that are nothing but the SQL that it puts together. Of the body of a function, which is a string itself, its
/// strings, and those of comments that are run.
fn strings(text: &[u8], base: usize, dialect: Protocol, depth: u32, places: &mut Vec<Range<usize>>) {
    let mut first = true;
    let mut has_bodies = false;
    for Token { kind, inner } in Lexer::new(text, dialect) {
        let content = &text[inner.clone()];
        match kind {
            Kind::Word if std::mem::take(&mut first) => {
                has_bodies = [&b"do"[..], b"create"].iter().any(|word| content.eq_ignore_ascii_case(word));
            }
            Kind::Symbol(b';') => first = true,
            Kind::Comment if depth < DEPTH_MAX && is_run(content, dialect) => {
                strings(content, base + inner.start, dialect, depth + 1, places);
            }
            Kind::String if depth == 0 && has_bodies && text[..inner.start].ends_with(b"$") => {
                strings(content, base + inner.start, dialect, depth + 1, places);
            }
            Kind::String => {
                let quotes = memchr::memchr(b'\'', content).is_some();
                if (quotes || !is_sql(content, dialect)) && !connection::is_open_piece(content) {
                    places.push(base + inner.start..base + inner.end);
                }
            }
            _ => {}
        }
    }
}

fn ends_in_password(word: &[u8]) -> bool {
    word.len() >= 8 && word[word.len() - 8..].eq_ignore_ascii_case(b"password")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn covered(text: &str, dialect: Protocol) -> String {
        let mut bytes = text.as_bytes().to_vec();
        let found = cover(&mut bytes, dialect).covered;
        assert_eq!(found, bytes != text.as_bytes(), "{text}");
        assert_eq!(bytes.len(), text.len());
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn passwords_of_postgresql_are_covered() {
        for statement in [
            "CREATE ROLE a LOGIN PASSWORD 'S3cret'",
            "create user a with encrypted password 'S3cret' valid until '2030-01-01'",
            "ALTER ROLE a\n/* x */ PASSWORD -- y\n E'S3cret'",
            "ALTER USER \"o'b\" PASSWORD $$S3cret$$",
            "alter group g password U&'S3cret'",
            "CREATE USER MAPPING FOR a SERVER s OPTIONS (user 'u', password 'S3cret')",
            "ALTER USER MAPPING FOR a SERVER s OPTIONS (SET password 'S3cret', ADD sslpassword 'S3cret')",
            "ALTER USER MAPPING FOR a SERVER s OPTIONS (SET \"password\" 'S3cret')",
            "CREATE SUBSCRIPTION s CONNECTION 'host=h password=S3cret dbname=d' PUBLICATION p",
            "CREATE SUBSCRIPTION s CONNECTION 'host=h password = ''S3cret'' dbname=d' PUBLICATION p",
            "select dblink_connect('c', 'postgresql://u:S3cret@h/d')",
            "select dblink('postgresql://u@h/d?password=S3cret&x=y', 'select 1')",
            "select dblink_connect('c', 'postgresql://u:S3c?ret@h/d')",
            "select dblink_connect('c', 'postgresql://u:#S3cret@h')",
            "select dblink_connect('c', 'MySQL+pymysql://u:x@S3c#ret@h/d')",
            "select dblink_connect('host=h password=ab&S3cret user=u')",
            "select dblink_connect('host=h password=ab;S3cret user=u')",
            "select dblink_connect('host=h password=ab\"S3cret user=u')",
            "select dblink_connect('host=h password=ab\\ S3cret user=u')",
            "select dblink_connect(E'host=h password=ab\\\\ S3cret user=u')",
            "select dblink_connect('host=h password=ab''S3cret user=u')",
            "do $$ begin perform dblink_connect('host=h password=ab''S3cret user=u'); end $$",
            "select dblink_connect('Server=h;Password={ab;S3cret};User=u')",
            "select dblink('postgresql://u@h/d?password=ab;S3cret&x=y', 'select 1')",
            "select dblink_connect('host=h password=' || 'S3cret')",
            "select dblink_connect('host=h password=''' || 'S3cret' || '''')",
            "select dblink_connect(concat('password=', 'S3cret'))",
            "select dblink_connect(format('host=h password=%s', 'S3cret'))",
            "select dblink_connect(format('host=%s password=%2$s user=u', 'h', 'S3cret'))",
            "select dblink_connect(format('postgresql://u:%s@h/d', 'S3cret'))",
            "select dblink_connect('postgresql://u:' || 'S3cret' || '@h/d')",
            "do $$ begin perform dblink_connect('host=h password=' || 'S3cret'); end $$",
            "do $$ begin perform dblink_connect(format('host=h password=%L', 'S3cret')); end $$",
            "do 'begin perform dblink_connect(''host=h password='' || ''S3cret''); end'",
            "do $$ begin execute 'alter role a password ''S3cret'''; end $$",
            "select $$ E'alter role a password \\'S3cret\\'' $$",
            "do $a$ begin execute 'execute ''alter role a password ''''S3cret'''' '''; end $a$",
            "do $a$ begin alter role a password 'S3cret'; end $a$",
            "select 1; alter role a password 'S3cret'; select 2",
            "alter role a password 'S3cret",
            "alter role nonsense nonsense password 'S3cret' nonsense",
            "alter role a password 'S3c'\n  'S3cret'",
            "alter role a password -- x\n 'x' -- y\n 'S3cret' valid until 'infinity'",
            "select format('alter role %I password %L', 'a', 'S3cret')",
            "select format('ALTER USER %I WITH ENCRYPTED PASSWORD %2$L', 'a', $$S3cret$$)",
            "select format('create user %I login password ''%s''', 'a', 'S3cret')",
            "do $$ begin execute format('create role a password %L', 'S3cret'); end $$",
            "do $$ begin execute 'alter role a password ' || quote_literal('S3cret'); end $$",
            "do $$ begin execute 'alter role a password ''' || 'S3cret' || ''''; end $$",
            "do $$ begin execute 'alter role ' || quote_ident('a') || ' password ' || quote_literal('S3cret'); end $$",
            "do $$ declare p text := 'S3cret'; begin execute format('alter role a password %L', p); end $$",
            "do 'begin execute format(''alter role a password %L'', ''S3cret''); end'",
            "select concat_ws(' ', 'alter role', 'a', 'password', quote_literal('S3cret'))",
            "select format('alter role %I %s %L', 'a', 'with password', 'S3cret')",
            "select concat('alter role a password', quote_literal('S3cret'))",
            "select format('alter role a password %-9L', 'S3cret')",
            "/* select format('alter role %I password %L', 'a', 'S3cret') */ select 1",
        ] {
            let text = covered(statement, Protocol::Postgres);
            assert!(!text.contains("S3cret") && text.contains("******"), "{text}");
        }
    }

    #[test]
    fn passwords_that_read_like_sql_are_covered_in_what_puts_sql_together() {
        for password in [
            "Password123",
            "my-password",
            "S3cretpassword",
            "password",
            "alter3go!",
            "create",
            "Alter Bridge 1",
            "a://b",
            " my password",
            "password1",
        ] {
            let cover = "*".repeat(password.len());
            for (before, after) in [
                ("select format('alter role %I password %L', 'app', '", "')"),
                ("do $$ begin execute format('alter role a password %L','", "'); end $$"),
                ("select 'alter role a' || ' with password ' || quote_literal('", "')"),
            ] {
                let text = covered(&format!("{before}{password}{after}"), Protocol::Postgres);
                assert_eq!(text, format!("{}{cover}{after}", before.replace("'app'", "'***'")));
            }
        }
    }

    /// The body of a function that is given a password has none in it. It stays if it has no other string: what calls it would fail in a
    /// replay. With one, as of RAISE or LANGUAGE, it does not: which of them is a password is not known.
    #[test]
    fn a_statement_that_puts_sql_together_is_known() {
        let function = "create function f(u text, p text) returns void language plpgsql as $$ begin \
                        execute format('alter role %I password %L', u, p); end $$";
        assert_eq!(covered(function, Protocol::Postgres), function);
        let raises = "create function f(u text, p text) returns void language plpgsql as $$ begin \
                      execute format('alter role %I password %L', u, p); raise exception 'no'; end $$";
        assert_eq!(covered(raises, Protocol::Postgres), raises.replace("'no'", "'**'"));
        let connects = "create function f(p text) returns void language plpgsql as $$ begin \
                        perform dblink_connect(format('host=h password=%s', p)); end $$";
        assert_eq!(covered(connects, Protocol::Postgres), connects);
        for (text, composes) in [
            (function, true),
            (connects, true),
            ("select format('alter user %I password %L', $1::text, $2::text)", true),
            ("alter role a password 'x'", false),
            ("select format('%s has no password %s', 'a', 'b')", false),
            ("select dblink_connect('host=h password=' || $1)", true),
            ("select dblink_connect(format('host=h password=%s', $1))", true),
            ("select 'x' from log where message like '%password=%' and name = 'y'", false),
            ("insert into mail values ('user a has no password', 'x')", false),
            ("select 'x'", false),
        ] {
            assert_eq!(cover(&mut text.as_bytes().to_vec(), Protocol::Postgres).composes, composes, "{text}");
        }
    }

    #[test]
    fn passwords_of_mysql_are_covered() {
        for statement in [
            "CREATE USER a@b IDENTIFIED BY 'S3cret'",
            "create user 'a'@'%' identified with mysql_native_password as 'S3cret'",
            "ALTER USER a IDENTIFIED BY \"S3cret\" REPLACE 'S3cret'",
            "SET PASSWORD FOR 'a'@'b' = PASSWORD('S3cret')",
            "set password = 'S3cret'",
            "set password for a@localhost = 'S3cret'",
            "GRANT ALL ON *.* TO a IDENTIFIED BY 'S3cret'",
            "CHANGE MASTER TO MASTER_HOST='h', MASTER_PASSWORD='S3cret'",
            "/*! create user a identified by 'S3cret' */",
            "/*!50100 set password for 'a'@'%' = 'S3cret' */",
            "SET PASSWORD FOR 'a'@'b' = 'S3cret'",
            "SET PASSWORD FOR CURRENT_USER() = 'S3cret'",
            "SET PASSWORD = 'S3cret' REPLACE 'S3cret'",
            "SET PASSWORD FOR a = OLD_PASSWORD('S3cret')",
            "set statement max_statement_time = 1 for set password = 'S3cret'",
            "START REPLICA USER = 'u' PASSWORD = 'S3cret'",
            "start slave until master_log_file='f', master_log_pos=4 user='u' password='S3cret'",
            "START GROUP_REPLICATION USER='u', PASSWORD='S3cret'",
            "CHANGE REPLICATION SOURCE TO SOURCE_USER='u', SOURCE_PASSWORD='S3cret'",
            "select password(_utf8mb4'S3cret')",
            "ALTER USER a IDENTIFIED WITH mysql_native_password AS 0xS3cret",
            "set password for a = 0xS3cret",
            "select 5--1, '-- ', password('S3cret')",
            "select 5--'x', password('S3cret')",
            "create procedure p() begin set password = 'S3cret'; end",
            "create procedure p() set password for 'a'@'b' = 'S3cret'",
            "create procedure p() begin if 1 then update t set a = 1; else set password for a = 'S3cret'; end if; end",
            "create trigger g before update on t for each row set password = 'S3cret'",
            "create event e on schedule every 1 day do set password = 'S3cret'",
            "set @s = concat('alter user a identified by ', quote('S3cret'))",
            "/*!50100 set @s = concat('alter user a identified by ', quote('S3cret')) */",
            "set @s = concat('alter user a', ' identified by ', quote('S3cret identified'))",
        ] {
            let text = covered(statement, Protocol::Mysql);
            assert!(!text.contains("S3cret"), "{text}");
        }
    }

    #[test]
    fn parameters_that_are_passwords_are_known() {
        for (text, composes) in [
            ("set @s = concat('alter user a identified by ', quote(?))", true),
            ("alter user a identified by ?", true),
            ("insert into users values ('x', password(?))", true),
            ("update users set password = ? where id = ?", false),
            ("select ? from users where password = ?", false),
        ] {
            assert_eq!(cover(&mut text.as_bytes().to_vec(), Protocol::Mysql).composes, composes, "{text}");
        }
    }

    #[test]
    fn rows_with_passwords_are_known() {
        for text in [
            "show create user a@b",
            "SHOW /* x */ CREATE USER CURRENT_USER()",
            "/*!50700 show create user a */",
            "show grants for a",
            "select * from `mysql`.`user`",
            "select authentication_string from user",
            "create user a identified by random password",
            "set password for a to random",
        ] {
            assert!(shows_passwords(text.as_bytes()), "{text}");
        }
        for text in ["show create table user", "select user, 'to random' from t", "select * from app.user"] {
            assert!(!shows_passwords(text.as_bytes()), "{text}");
        }
    }

    #[test]
    fn other_statements_stay() {
        for statement in [
            "select * from users where name = 'password'",
            "update users set password = 'hash' where id = 1",
            "select password, 'x' from users",
            "alter role a password null",
            "select 'no password here'",
            "insert into links values ('https://example.org/a:b@c')",
            "set client_encoding = 'UTF8'",
            "insert into permissions(name) values ('create user'),('delete user'),('reset password')",
            "create type action as enum ('create user','login','change password')",
            "select query, 'x' from pg_stat_activity where query ilike 'alter role%password%' and usename = $1",
            "select 'x' from log where action like 'create user%' or action like '%password%' and name = $1",
            "/* create user: check password */ insert into t values ('a', $1)",
            "-- create user: check password\ninsert into t values ('a', $1)",
            "do $$ begin -- create user: check password \n raise notice 'x'; end $$",
            "select 'https://example.org?a:b@c', 'http://h:' || '80'",
        ] {
            let told = cover(&mut statement.as_bytes().to_vec(), Protocol::Postgres);
            assert_eq!(told, Told::default(), "{statement}");
        }
    }

    #[test]
    fn other_statements_of_mysql_stay() {
        for statement in [
            "update users set password = 'hash', name = 'x' where id = 1",
            "set password_history = 5, sql_mode = 'x'",
            "grant select (password) on t to 'a'@'b'",
            "select password, 0x41 from users",
            "start transaction; select password, 'x' from users",
            "create procedure p() begin update users set password = 'hash', name = 'x'; end",
            "insert into users set password = 'hash'",
            "load data infile 'f' into table users set password = 'x'",
        ] {
            assert_eq!(covered(statement, Protocol::Mysql), statement);
        }
        assert_eq!(
            covered("set password = 'x'; select 'x'", Protocol::Mysql),
            "set password = '*'; select 'x'"
        );
    }

    #[test]
    fn what_surrounds_a_password_stays() {
        assert_eq!(
            covered("alter role a password 'it''s' valid until 'infinity'", Protocol::Postgres),
            "alter role a password '*****' valid until 'infinity'"
        );
        assert_eq!(
            covered("create subscription s connection 'host=h password=x user=u'", Protocol::Postgres),
            "create subscription s connection 'host=h password=* user=u'"
        );
        for (before, after) in [
            (
                "do $$ begin perform f('password=y'); execute 'select f(''password=y'')'; end $$",
                "do $$ begin perform f('password=*'); execute 'select f(''password=*'')'; end $$",
            ),
            (
                "select '{\"a\": \"host=h password=x\", \"b\": 1}'",
                "select '{\"a\": \"host=h password=*\", \"b\": 1}'",
            ),
            (
                "select 'postgresql://h/d?password=x&a=b', 'Server=h;Password=x;User=u'",
                "select 'postgresql://h/d?password=*&a=b', 'Server=h;Password=*;User=u'",
            ),
            ("select f('host=h password=' || 'x')", "select f('host=h password=' || '*')"),
        ] {
            assert_eq!(covered(before, Protocol::Postgres), after);
        }
    }

    /// A text that is one value in another must not take time that grows with its square: 4 MB would take hours.
    #[test]
    fn long_texts_take_their_length() {
        let text = "password=".repeat(1 << 19);
        assert!(covered(&text, Protocol::Postgres) == text);
        let mut value = text.into_bytes();
        assert!(cover_value(&mut value, Protocol::Postgres));
        assert!(value[9..].iter().all(|&byte| byte == COVER));
        assert!(!cover_binary(&mut b"password\xff".repeat(1 << 19), Protocol::Postgres));
        assert_eq!(
            covered("'password=password=''x y'' z'", Protocol::Postgres),
            "'password=**************** z'"
        );
    }

    #[test]
    fn texts_in_binary_values_are_covered() {
        for (before, after) in [
            (&b"postgresql://u:S3cret@h/d"[..], &b"postgresql://u:******@h/d"[..]),
            (
                "\x01{\"dsn\": \"pq://ü:S3cret@h\"}".as_bytes(),
                "\x01{\"dsn\": \"pq://ü:******@h\"}".as_bytes(),
            ),
            // As in an array of texts, the second of them 0x80 bytes long.
            (
                b"\0\0\0\x0apassword=x\0\0\0\x80host=h\tpassword=S3cret user=u",
                b"\0\0\0\x0apassword=*\0\0\0\x80host=h\tpassword=****** user=u",
            ),
            (b"\xff\xfealter role a password 'S3cret'\xff", b"\xff\xfealter role a password '******'\xff"),
            (b"\x01://:p@h\0", b"\x01://:*@h\0"),
            (b"\xffa://:p@h\xff", b"\xffa://:*@h\xff"),
            // LATIN1, with an umlaut in the password.
            (b"host=h password=p\xe4sswort\0\xe4", b"host=h password=********\0\xe4"),
            (b"host=h password=\xe4 user=\xe4", b"host=h password=* user=\xe4"),
            (b"host=h password='a \xe4 b' user=u", b"host=h password=******* user=u"),
            (b"postgresql://u:p\xe4sswort@h/d", b"postgresql://u:********@h/d"),
            (b"alter role a password 'p\xe4sswort'", b"alter role a password '********'"),
        ] {
            let mut value = before.to_vec();
            assert!(cover_binary(&mut value, Protocol::Postgres));
            assert_eq!(value, after, "{}", String::from_utf8_lossy(before));
        }
    }

    #[test]
    fn bytes_that_are_no_text_stay() {
        for bytes in [
            &b"\x8a\xd0p://u\x02n:S3\xd4cr@h"[..],
            b"://\x81:a\x82@",
            b"a://b\0c:d@e",
            b"\xff://:p@\xff",
            b"\xd6://:\xf0\x9f@\xe9",
            b"\x02://example.org:\x9cx@",
            b"https://example.org\0:\x9cx@",
        ] {
            let mut value = bytes.to_vec();
            assert!(cover_value(&mut value.clone(), Protocol::Postgres), "it has the form: {bytes:?}");
            assert!(!cover_binary(&mut value, Protocol::Postgres));
            assert_eq!(value, bytes);
        }
    }

    proptest! {
        #[test]
        fn any_text(text in "(password|set |identified by |= ?|'|''|\\$\\$|\\$a\\$|x|;|\\(|E'|\\\\|://|u:p@h| |\"|--|/\\*|\\*/|\n){0,30}", mysql: bool) {
            let dialect = if mysql { Protocol::Mysql } else { Protocol::Postgres };
            let mut once = text.clone().into_bytes();
            cover(&mut once, dialect);
            prop_assert_eq!(once.len(), text.len());
        }
    }
}
