// SPDX-License-Identifier: Apache-2.0
//! Whether a text can stand in a script: psql and the shell of MariaDB read it before the server does, and run commands of their own
//! that they find in it. What the server refused may hold any of them.
//!
//! Beside the way a session reads strings, there is another that it may be switched to (`standard_conforming_strings`,
//! `NO_BACKSLASH_ESCAPES`); strings that end elsewhere then are written so that they end at the same place in both.

const OPEN: &str = "a quote, bracket or comment that is not closed";
const BACKSLASH: &str = "a backslash that the shell would take for a command";
const TWO_WAYS: &str = "a literal that shell and server may read in two ways";
const NUL: &str = "a NUL in it";
const COMMAND: &str = "a line that the shell would take for its own command";

/// A text for a script.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Safe {
    pub(crate) text: String,
    /// It holds several statements.
    pub(crate) several: bool,
}

struct Scan<'a> {
    text: &'a str,
    at: usize,
    out: String,
}

impl Scan<'_> {
    fn new(text: &str) -> Scan<'_> {
        Scan { text, at: 0, out: String::with_capacity(text.len()) }
    }

    fn bytes(&self) -> &[u8] {
        self.text.as_bytes()
    }

    fn peek(&self, ahead: usize) -> u8 {
        self.bytes().get(self.at + ahead).copied().unwrap_or(0)
    }

    /// Where the bytes end that `is` holds for, from here.
    fn run(&self, is: impl Fn(u8) -> bool) -> usize {
        self.bytes()[self.at..]
            .iter()
            .position(|&byte| !is(byte))
            .map_or(self.text.len(), |len| self.at + len)
    }

    fn copy_to(&mut self, end: usize) {
        self.out.push_str(&self.text[self.at..end]);
        self.at = end;
    }

    /// Behind the end of a literal whose opening quote is here.
    fn quoted(&self, quote: u8, backslash: bool) -> Result<usize, &'static str> {
        let mut at = self.at + 1;
        while let Some(&byte) = self.bytes().get(at) {
            if byte == b'\\' && backslash {
                at += 2;
            } else if byte != quote {
                at += 1;
            } else if self.bytes().get(at + 1) == Some(&quote) {
                at += 2;
            } else {
                return Ok(at + 1);
            }
        }
        Err(OPEN)
    }
}

/// The text for psql, or why there is none.
///
/// psql sends what is before a semicolon by itself; but the statements of one Query are one transaction, unless they end
/// it themselves (manual, "Multiple Statements in a Simple Query"). Between them, `\;` keeps them in one Query.
pub(crate) fn psql(text: &str) -> Result<Safe, &'static str> {
    let mut scan = Scan::new(text);
    let (mut parens, mut begins, mut begun) = (0_u32, 0_u32, false);
    // Where psql would end a statement, in what is written; and those ends that another statement came after.
    let (mut ends, mut between) = (Vec::new(), Vec::new());
    // First letters of the words that make psql look for BEGIN and END, by place.
    let (mut places, mut words) = ([0_u8; 4], 0);
    let mut after_literal = false;
    while scan.at < text.len() {
        let (byte, next) = (scan.peek(0), scan.peek(1));
        if byte == 0 {
            return Err(NUL);
        }
        if byte.is_ascii_whitespace() || byte == 0x0b {
            scan.copy_to(scan.at + 1);
            continue;
        }
        if byte == b'-' && next == b'-' {
            let end = scan.run(|byte| byte != b'\n' && byte != b'\r' && byte != 0);
            scan.copy_to(end);
            continue;
        }
        if byte == b'/' && next == b'*' {
            let end = nested_comment(&scan)?;
            scan.copy_to(end);
            continue;
        }
        if byte != b';' {
            between.append(&mut ends);
            begun = true;
        }
        let in_parts = std::mem::take(&mut after_literal);
        match byte {
            b'\\' => return Err(BACKSLASH),
            b'\'' => {
                let end = scan.quoted(b'\'', false)?;
                let literal = &text[scan.at..end];
                // The second part of a literal is read as the first by the server, but not by psql.
                if in_parts && literal.contains('\\') {
                    return Err(TWO_WAYS);
                }
                if has_escaped(literal, '\'') {
                    scan.out.push('E');
                    scan.out.push_str(&literal.replace('\\', "\\\\"));
                    scan.at = end;
                } else {
                    scan.copy_to(end);
                }
                after_literal = true;
            }
            b'"' => {
                let end = scan.quoted(b'"', false)?;
                scan.copy_to(end);
            }
            b'$' => {
                let end = scan.run_after(1, |byte| byte.is_ascii_digit());
                if end > scan.at + 1 {
                    scan.at_number(end)?;
                } else if let Some(end) = dollar_quoted(&scan)? {
                    scan.copy_to(end);
                } else {
                    scan.copy_to(scan.at + 1);
                }
            }
            b'0'..=b'9' => scan.at_number(scan.at)?,
            b':' if matches!(next, b':' | b'=') => scan.copy_to(scan.at + 2),
            b':' => {
                scan.copy_to(scan.at + 1);
                // Before a name, also one of digits, psql would put a variable here. A blank means nothing to the server.
                if is_word_part(next) || matches!(next, b'\'' | b'"' | b'{') {
                    scan.out.push(' ');
                }
            }
            _ if is_word_start(byte) => {
                let end = scan.run(|byte| is_word_part(byte) || byte == b'$');
                let word = &text[scan.at..end];
                scan.copy_to(end);
                let quote = scan.peek(0);
                if word.eq_ignore_ascii_case("u") && quote == b'&' && matches!(scan.peek(1), b'\'' | b'"') {
                    scan.copy_to(end + 1);
                    let close = scan.quoted(scan.peek(0), false)?;
                    after_literal = scan.peek(0) == b'\'';
                    scan.copy_to(close);
                } else if quote == b'\'' && word.eq_ignore_ascii_case("e") {
                    let close = scan.quoted(b'\'', true)?;
                    scan.copy_to(close);
                    after_literal = true;
                } else if quote == b'\'' && matches!(word, "b" | "B" | "x" | "X" | "n" | "N") {
                    let close = scan.quoted(b'\'', false)?;
                    if text[scan.at..close].contains('\\') {
                        return Err(TWO_WAYS);
                    }
                    scan.copy_to(close);
                    after_literal = true;
                }
                let is = |names: &[&str]| names.iter().any(|name| word.eq_ignore_ascii_case(name));
                if words < places.len() && is(&["create", "function", "procedure", "or", "replace"]) {
                    places[words] = byte.to_ascii_lowercase();
                }
                words += 1;
                let routine = matches!(places, [b'c', b'f' | b'p', ..] | [b'c', b'o', b'r', b'f' | b'p']);
                if routine && parens == 0 {
                    if is(&["begin"]) || begins > 0 && is(&["case"]) {
                        begins += 1;
                    } else if is(&["end"]) {
                        begins = begins.saturating_sub(1);
                    }
                }
            }
            _ => {
                match byte {
                    b'(' => parens += 1,
                    b')' => parens = parens.saturating_sub(1),
                    b';' if parens == 0 && begins == 0 => {
                        (places, words) = ([0; 4], 0);
                        // One before the first statement is between no two.
                        if begun {
                            ends.push(scan.out.len());
                        }
                    }
                    _ => {}
                }
                scan.copy_to(scan.at + 1);
            }
        }
    }
    // psql takes no semicolon for the end before they are closed.
    if parens > 0 || begins > 0 {
        return Err(OPEN);
    }
    Ok(Safe { several: !between.is_empty(), text: with_backslashes(&scan.out, &between) })
}

/// The text with a backslash before each of these places.
fn with_backslashes(text: &str, places: &[usize]) -> String {
    let mut out = String::with_capacity(text.len() + places.len());
    let mut from = 0;
    for &place in places {
        out.push_str(&text[from..place]);
        out.push('\\');
        from = place;
    }
    out + &text[from..]
}

impl Scan<'_> {
    fn run_after(&self, ahead: usize, is: impl Fn(u8) -> bool) -> usize {
        let start = self.at + ahead;
        self.bytes()[start..].iter().position(|&byte| !is(byte)).map_or(self.text.len(), |len| start + len)
    }

    /// Copies a number whose digits are at `digits`. Versions differ in where one ends that letters follow.
    fn at_number(&mut self, digits: usize) -> Result<(), &'static str> {
        self.copy_to(digits);
        let end = self.run(|byte| is_word_part(byte) || byte == b'.');
        self.copy_to(end);
        match (self.peek(0), self.peek(1)) {
            (b'\'' | b'"' | b'$', _) | (b'&', b'\'' | b'"') => Err(TWO_WAYS),
            _ => Ok(()),
        }
    }
}

const fn is_word_start(byte: u8) -> bool {
    byte.is_ascii_alphabetic() || byte == b'_' || byte >= 0x80
}

const fn is_word_part(byte: u8) -> bool {
    is_word_start(byte) || byte.is_ascii_digit()
}

/// Behind the end of a comment of PostgreSQL's, which nest.
fn nested_comment(scan: &Scan<'_>) -> Result<usize, &'static str> {
    let (bytes, mut at, mut depth) = (scan.bytes(), scan.at, 0_u32);
    while at < bytes.len() {
        match (bytes[at], bytes.get(at + 1)) {
            (0, _) => return Err(NUL),
            (b'/', Some(b'*')) => (at, depth) = (at + 2, depth + 1),
            (b'*', Some(b'/')) => (at, depth) = (at + 2, depth - 1),
            _ => at += 1,
        }
        if depth == 0 {
            return Ok(at);
        }
    }
    Err(OPEN)
}

/// Behind the end of `$tag$ ... $tag$`, if one begins here.
fn dollar_quoted(scan: &Scan<'_>) -> Result<Option<usize>, &'static str> {
    let mark = scan.run_after(1, is_word_part);
    if scan.bytes().get(mark) != Some(&b'$') {
        return Ok(None);
    }
    let tag = &scan.text[scan.at..=mark];
    match scan.text[mark + 1..].find(tag) {
        Some(len) => Ok(Some(mark + 1 + len + tag.len())),
        None => Err(OPEN),
    }
}

/// Whether a quote in it stands behind an odd number of backslashes: it ends there or not, by the session's setting.
fn has_escaped(literal: &str, quote: char) -> bool {
    let mut odd = false;
    for each in literal.chars() {
        if odd && each == quote {
            return true;
        }
        odd = each == '\\' && !odd;
    }
    false
}

/// Commands of the shell at the beginning of a statement.
const COMMANDS: &[&str] = &[
    "?",
    "charset",
    "clear",
    "connect",
    "costs",
    "delimiter",
    "edit",
    "ego",
    "exit",
    "go",
    "help",
    "nopager",
    "notee",
    "nowarning",
    "pager",
    "print",
    "prompt",
    "query_attributes",
    "quit",
    "rehash",
    "resetconnection",
    "sandbox",
    "source",
    "ssl_session_data_print",
    "status",
    "system",
    "tee",
    "warnings",
];
/// Those that reach beyond the shell: with `--named-commands` they are taken at the beginning of any line.
const FAR_COMMANDS: &[&str] = &["connect", "delimiter", "edit", "pager", "source", "system", "tee"];

/// The text for the shell of MariaDB or MySQL, or why there is none.
pub(crate) fn mysql(text: &str) -> Result<String, &'static str> {
    let mut scan = Scan::new(text);
    let (mut line_start, mut first) = (true, true);
    while scan.at < text.len() {
        let (byte, next, third) = (scan.peek(0), scan.peek(1), scan.peek(2));
        if byte == 0 {
            return Err(NUL);
        }
        if byte == b'\n' || byte == b'\r' {
            line_start = true;
            scan.copy_to(scan.at + 1);
            continue;
        }
        if byte.is_ascii_whitespace() || byte == 0x0b {
            scan.copy_to(scan.at + 1);
            continue;
        }
        let dashes = byte == b'-' && next == b'-';
        // Shell and server differ on control characters here.
        if dashes && third.is_ascii_control() && !matches!(third, b'\t' | b'\n' | b'\r' | 0) {
            return Err(TWO_WAYS);
        }
        if byte == b'#' || dashes && (third.is_ascii_whitespace() || third == 0) {
            let end = scan.run(|byte| byte != b'\n');
            if text[scan.at..end].contains('\0') {
                return Err(NUL);
            }
            scan.copy_to(end);
            continue;
        }
        if byte == b'/' && next == b'*' {
            let inner = scan.at + 2;
            let len = text[inner..].find("*/").ok_or(OPEN)?;
            let comment = &text[inner..inner + len];
            if comment.contains('\0') {
                return Err(NUL);
            }
            // One that some servers run and others skip: it has to be whole either way.
            if comment.starts_with(['!', '+']) || comment.starts_with("M!") {
                let nested = ["/*", "--", "#", "\\", "\n"].iter().any(|mark| comment.contains(mark));
                if nested || mysql(comment).is_err() {
                    return Err(TWO_WAYS);
                }
                first = false;
            }
            scan.copy_to(inner + len + 2);
            continue;
        }
        let rest = &scan.bytes()[scan.at..];
        // The shell looks for this one at every character.
        if rest.len() > 9 && rest[..9].eq_ignore_ascii_case(b"delimiter") && rest[9].is_ascii_whitespace() {
            return Err(COMMAND);
        }
        if first || line_start {
            let word = rest.split(u8::is_ascii_whitespace).next().unwrap_or(rest);
            let word = word.split(|&byte| byte == b';').next().unwrap_or(word);
            let commands = if first { COMMANDS } else { FAR_COMMANDS };
            if commands.iter().any(|name| word.eq_ignore_ascii_case(name.as_bytes())) {
                return Err(COMMAND);
            }
        }
        (first, line_start) = (byte == b';', false);
        match byte {
            b'\\' => return Err(BACKSLASH),
            b'\'' | b'"' => {
                let end = scan.quoted(byte, true)?;
                let literal = &text[scan.at..end];
                if literal.contains('\0') {
                    return Err(NUL);
                }
                double_quotes(&mut scan.out, literal, char::from(byte));
                scan.at = end;
            }
            b'`' => {
                let end = scan.quoted(b'`', false)?;
                // The server takes it for itself, the shell for an escape.
                if text[scan.at..end].contains(['\\', '\0']) {
                    return Err(TWO_WAYS);
                }
                scan.copy_to(end);
            }
            _ => {
                let len = text[scan.at..].chars().next().map_or(1, char::len_utf8);
                scan.copy_to(scan.at + len);
            }
        }
    }
    Ok(scan.out)
}

/// A literal whose escaped quotes become doubled ones, which end it nowhere.
fn double_quotes(out: &mut String, literal: &str, quote: char) {
    let mut chars = literal.chars();
    while let Some(each) = chars.next() {
        match (each, if each == '\\' { chars.next() } else { None }) {
            ('\\', Some(escaped)) if escaped == quote => out.extend([quote, quote]),
            (_, Some(escaped)) => out.extend(['\\', escaped]),
            (_, None) => out.push(each),
        }
    }
}

/// COPY data without the mark of its end, or why there is none.
pub(crate) fn copy_data(data: &str) -> Result<&str, &'static str> {
    if data.contains('\0') {
        return Err(NUL);
    }
    let whole = data.strip_suffix('\n').unwrap_or(data);
    let (before, last) = whole.rsplit_once('\n').map_or(("", whole), |(before, last)| (before, last));
    let is_mark = |line: &str| line.trim_end_matches('\r') == "\\.";
    let rows = match (is_mark(last), before.is_empty()) {
        (true, true) => "",
        (true, false) => &data[..=before.len()],
        (false, _) => data,
    };
    // psql would end the COPY there, and run what follows.
    if rows.split('\n').any(is_mark) {
        return Err("COPY data with the mark of its end before its end");
    }
    Ok(rows)
}

/// For a comment, which a line end would end.
pub(crate) fn comment(text: &str) -> String {
    text.replace(char::is_control, " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn same(text: &str) {
        assert_eq!(psql(text).map(|safe| safe.text).as_deref(), Ok(text));
    }

    #[test]
    fn what_psql_would_run_is_no_text_for_it() {
        for text in [
            "select 1 \\! touch /tmp/x",
            "select 1 \\g |sh",
            "select '\\' \\! x '",
            "select $a$ $a$ \\! x",
            "/* /* */ */ \\! x",
            "select 1 --\r\\! x",
            "select \"a\\\" \\! x",
            "select 1$$ \\! x $$",
            "select a$$ \\! x $$",
        ] {
            assert!(psql(text).is_err(), "{text}");
        }
        for text in [
            "select '\\d', E'\\'', E'\\\\', $$ \\! ' $$, $a$ $$ \\ $a$, \"a\\\"",
            "select 1 -- \\! x '",
            "/* \\! ' /* */ ' */ select a$b$, $1, 1.5e-7",
            "select U&'\\0061', 'it''s'",
        ] {
            same(text);
        }
    }

    #[test]
    fn what_is_open_is_no_text() {
        for text in [
            "select 'abc",
            "select E'abc\\'",
            "select \"abc",
            "select $$abc",
            "select $a$abc$$",
            "/* abc /* */",
            "select (1",
            "create function f() begin atomic select 1",
            "create or replace procedure f() begin",
        ] {
            assert_eq!(psql(text), Err(OPEN), "{text}");
        }
        same("create function f() returns int begin atomic select case 1 when 1 then 2 end; end");
        same("select ')', (1))");
    }

    #[test]
    fn variables_of_psql_are_not_put_in() {
        let text = |text: &str| psql(text).unwrap().text;
        assert_eq!(text("select 1 :DBNAME, a[x:y]"), "select 1 : DBNAME, a[x: y]");
        assert_eq!(
            text("select :'USER', :\"USER\", :{?USER}, :::USER"),
            "select : 'USER', : \"USER\", : {?USER}, ::: USER"
        );
        same("select a::int, ':DBNAME', f(a := 1), $$:USER$$ -- :USER");
    }

    /// `standard_conforming_strings = off` in the session would move the end of the first string.
    #[test]
    fn a_literal_ends_where_it_ends_in_every_session() {
        let text = |text: &str| psql(text).unwrap().text;
        assert_eq!(text("select '\\', '\\! touch x'"), "select E'\\\\', '\\! touch x'");
        assert_eq!(text("like 'a' escape '\\'"), "like 'a' escape E'\\\\'");
        assert_eq!(psql("select E'a'\n'\\' \\! touch x'"), Err(TWO_WAYS));
        assert_eq!(psql("select n'\\', '\\! x'"), Err(TWO_WAYS));
    }

    #[test]
    fn statements_of_one_query_stay_in_it() {
        let several = |text: &str, written: &str| {
            let safe = psql(text).unwrap();
            assert_eq!((safe.text.as_str(), safe.several), (written, true), "{text}");
        };
        several("select 1; drop table t", "select 1\\; drop table t");
        several("begin;insert into t values (';');commit;", "begin\\;insert into t values (';')\\;commit;");
        several("a /* ; */ ; /* ; */ -- ;\n; b; -- ;", "a /* ; */ \\; /* ; */ -- ;\n\\; b; -- ;");
        several("do $$ begin; end $$; \"a;b\"; E'\\';'", "do $$ begin; end $$\\; \"a;b\"\\; E'\\';'");
        several("; a;; b", "; a\\;\\; b");
        // The literal before it is written longer than it was.
        several("select '\\', ';'; select 2", "select E'\\\\', ';'\\; select 2");
        several(
            "create function f() returns int begin atomic select 1; select 2; end; begin; select f()",
            "create function f() returns int begin atomic select 1; select 2; end\\; begin\\; select f()",
        );
        for text in [
            "select 1; -- ; that is all",
            "select 1;; ;",
            "; select 1",
            "create rule r as on insert to t do (select 1; select 2)",
            "create procedure p() begin atomic select case 1 when 1 then 2 end; select 2; end",
        ] {
            same(text);
            assert!(!psql(text).unwrap().several, "{text}");
        }
    }

    #[test]
    fn nul_is_in_no_script() {
        assert!(psql("select 1\0").is_err() && psql("-- \0").is_err() && psql("/* \0 */").is_err());
        assert!(mysql("select 1\0").is_err() && mysql("# \0").is_err() && mysql("select '\0'").is_err());
        assert!(copy_data("a\0\n").is_err());
    }

    #[test]
    fn what_the_shell_of_mariadb_would_run_is_no_text_for_it() {
        for text in [
            "select 1 \\! touch /tmp/x",
            "select 1\n\\. file",
            "system touch /tmp/x",
            "  SOURCE x",
            "-- a\nsystem x",
            "/* a */ system x",
            "select 1,\nsystem x",
            "select 1 delimiter x",
            "select 1; system x",
            "select 'a",
            "select 'a\\'",
            "select `a",
            "select `a\\` \\! x`",
            "/* a",
            "/*!99999 ' */ \\! x '",
            "/*! ' */ select ' */",
            "status",
        ] {
            assert!(mysql(text).is_err(), "{text}");
        }
        for text in [
            "select 'a\\n', \"it's\", `c``d`, 5--1 -- \\! '\n, 2 # \\! '\n, 3 /* \\! ' */",
            "select\nstatus\nfrom t",
            "/*!40101 SET NAMES 'utf8' */",
            "select 'system\nsystem x', '\u{e9}'",
            "use shop",
        ] {
            assert_eq!(mysql(text).as_deref(), Ok(text));
        }
        // NO_BACKSLASH_ESCAPES would end it at the first quote.
        assert_eq!(mysql("select '\\' \\! x #'").as_deref(), Ok("select ''' \\! x #'"));
        assert_eq!(mysql("select '\\\\', \"\\\"\\'\"").as_deref(), Ok("select '\\\\', \"\"\"\\'\""));
    }

    #[test]
    fn copy_data_ends_once() {
        for data in ["1\n\\.\n\\! cmd\n\\.\n", "1\r\n\\.\r\n\\! cmd\r\n", "\\.\n\\.\n", "\\.\nselect 1"] {
            assert!(copy_data(data).is_err(), "{data}");
        }
        assert_eq!(copy_data("1\n\\.\n"), Ok("1\n"));
        assert_eq!(copy_data("1\n\\.\r"), Ok("1\n"));
        assert_eq!(copy_data("\\."), Ok(""));
        assert_eq!(copy_data("\n\\.x\n"), Ok("\n\\.x\n"));
    }
}
