// SPDX-License-Identifier: Apache-2.0
//! Takes from a text what libpg_query's normalize leaves: it replaces the constants of the statements that a plan is made for, and of the others
//! those that it knows (18.1 leaves `EXECUTE`, `PREPARE`, `CREATE`, `COMMENT` and more as they are), and it keeps comments.

use pg_query::protobuf::{ScanToken, Token};

use crate::{Error, syntax};

/// Statements whose constants are gone: numbers that are left in them are places (`ORDER BY 1`) and sizes (`varchar(10)`).
const NORMALIZED: &[&str] =
    &["select", "insert", "update", "delete", "merge", "with", "values", "table", "("];

/// The text with a `$n` for each constant that is left, and without comments.
pub(crate) fn hide(text: &str) -> Result<String, Error> {
    // As in `tokens`: a text without any token must not reach the scanner's binding.
    let tokens = pg_query::scan_tokens(&format!("{text}\n;")).map_err(syntax)?;
    let place = |token: &ScanToken| {
        let range = usize::try_from(token.start).ok()?..usize::try_from(token.end).ok()?;
        Some((text.get(range.clone())?, range))
    };
    let mut next = 1 + tokens
        .iter()
        .filter(|token| token.token == Token::Param as i32)
        .filter_map(|token| place(token)?.0.get(1..)?.parse::<u32>().ok())
        .max()
        .unwrap_or(0);
    let (mut out, mut at) = (String::with_capacity(text.len()), 0);
    let (mut depth, mut is_head, mut keeps_numbers) = (0i32, true, false);
    for token in &tokens {
        let Some((word, range)) = place(token) else { continue };
        let kind = Token::try_from(token.token).ok();
        if let Some(Token::SqlComment | Token::CComment) = kind {
            out.push_str(&text[at..range.start]);
            at = range.end;
            // What it kept apart stays so.
            if !out.is_empty() && !out.ends_with(char::is_whitespace) {
                out.push(' ');
            }
            continue;
        }
        if is_head {
            keeps_numbers = NORMALIZED.contains(&&*word.to_ascii_lowercase());
            is_head = false;
        }
        match word {
            "(" => depth += 1,
            ")" => depth -= 1,
            ";" if depth == 0 => is_head = true,
            _ => {}
        }
        let is_constant = match kind {
            Some(Token::Sconst | Token::Usconst | Token::Bconst | Token::Xconst) => true,
            Some(Token::Iconst | Token::Fconst) => !keeps_numbers,
            _ => false,
        };
        if is_constant {
            out.push_str(&text[at..range.start]);
            out.push_str(&format!("${next}"));
            next += 1;
            at = range.end;
        }
    }
    out.push_str(&text[at..]);
    Ok(out.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use crate::Statement;

    fn text(text: &str) -> String {
        Statement::parse(text).unwrap_or_else(|error| panic!("{text}: {error}")).text
    }

    #[test]
    fn no_statement_keeps_its_constants() {
        let cases = [
            ("execute p('hidden', 4711)", "execute p($1, $2)"),
            ("prepare p as select 'hidden', $1", "prepare p as select $2, $1"),
            (
                "create table t (a text default 'hidden', b int default 4711)",
                "create table t (a text default $1, b int default $2)",
            ),
            ("create table u as select 'hidden' as a", "create table u as select $1 as a"),
            ("create view v as select e'hid\\'den' as a", "create view v as select $1 as a"),
            ("comment on table t is 'hidden'", "comment on table t is $1"),
            (
                "create function f() returns int language sql as $$ select 4711 $$",
                "create function f() returns int language sql as $1",
            ),
            ("alter role r password 'hidden'", "alter role r password $1"),
            ("set x.y = 'hidden'", "set x.y = $1"),
            ("notify a, 'hidden'", "notify a, $1"),
            ("do 'hidden'", "do $1"),
        ];
        for (sql, expected) in cases {
            assert_eq!(text(sql), expected);
        }
    }

    #[test]
    fn no_statement_keeps_its_comments() {
        let cases = [
            ("select a /* hidden */ from t -- hidden", "select a from t"),
            ("-- hidden\nselect/* hidden */a from t", "select a from t"),
            ("/* /* hidden */ 'hidden' */ create table t (a int) /* x */;", "create table t (a int) ;"),
            ("-- hidden", ""),
            ("", ""),
        ];
        for (sql, expected) in cases {
            assert_eq!(text(sql).split_whitespace().collect::<Vec<_>>().join(" "), expected);
        }
    }

    #[test]
    fn places_and_names_stay() {
        assert_eq!(
            text("select \"it's\", a from t where b = 1 order by 2"),
            "select \"it's\", a from t where b = $1 order by 2"
        );
        assert_eq!(text("select 1; execute p(2)"), "select $1; execute p($2)");
    }

    /// Fingerprints are of the text as it came.
    #[test]
    fn fingerprints_do_not_depend_on_what_is_hidden() {
        for sql in ["execute p('hidden')", "select 1 /* hidden */", "create table t (a text default 'x')"] {
            assert_eq!(
                Statement::parse(sql).unwrap().fingerprint,
                pg_query::fingerprint(sql, 0, 0).unwrap().value
            );
        }
    }
}
