// SPDX-License-Identifier: Apache-2.0
//! The lines of an ini file, without their meaning.
//!
//! Follows PgBouncer's reader, quirks included: comments only where a line (or the rest after `[section]`) starts,
//! `;` and `#` are ordinary inside values, spaces around `=` and at the end of a value do not count.

use std::borrow::Cow;

/// What a line says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Item<'a> {
    /// `[name]`
    Section(&'a str),
    /// `key = value`; the key is unquoted.
    Setting { key: Cow<'a, str>, value: &'a str },
    /// `%include path`
    Include(&'a str),
}

/// An item and its line, from 1; or the line of a syntax error and what was expected.
pub(crate) type Parsed<'a> = Result<(u32, Item<'a>), (u32, &'static str)>;

/// All items of a file in order, up to and including the first syntax error.
pub(crate) fn items(text: &str) -> Vec<Parsed<'_>> {
    let mut items = Vec::new();
    for (i, line) in text.split('\n').enumerate() {
        let line_number = i as u32 + 1;
        let mut rest = skip_space(line);
        // A section header may be followed by a setting or a comment on its line.
        while !rest.is_empty() && !rest.starts_with([';', '#']) {
            match item(rest) {
                Ok((item, after)) => {
                    items.push(Ok((line_number, item)));
                    rest = skip_space(after);
                }
                Err(expected) => {
                    items.push(Err((line_number, expected)));
                    return items;
                }
            }
        }
    }
    items
}

fn skip_space(text: &str) -> &str {
    text.trim_start_matches(is_c_space)
}

/// C's isspace.
fn is_c_space(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\r' | '\n' | '\x0b' | '\x0c')
}

fn is_blank(c: char) -> bool {
    c == ' ' || c == '\t'
}

/// One item at the start of `text`, which is not empty, and what follows it on the line.
fn item(text: &str) -> Result<(Item<'_>, &str), &'static str> {
    if let Some(after) = text.strip_prefix("%include")
        && after.starts_with(is_blank)
    {
        let path = after.trim_matches(is_c_space);
        if path.is_empty() {
            return Err("a file name after %include");
        }
        return Ok((Item::Include(path), ""));
    }
    if let Some(after) = text.strip_prefix('[') {
        let (name, after) = after.split_once(']').ok_or("']' after the section's name")?;
        return Ok((Item::Section(name), after));
    }
    let (key, after) = name(text)?;
    let value = after
        .trim_start_matches(is_blank)
        .strip_prefix('=')
        .ok_or("key = value (names other than letters, digits and _.-* must be in double quotes)")?;
    Ok((Item::Setting { key, value: value.trim_start_matches(is_blank).trim_end_matches(is_c_space) }, ""))
}

/// A name: bare, in double quotes with `""` for one, or in single quotes (PgBouncer's sources; its manual has double).
fn name(text: &str) -> Result<(Cow<'_, str>, &str), &'static str> {
    let (name, after) = if let Some(quoted) = text.strip_prefix('"') {
        let mut name = String::new();
        let mut rest = quoted;
        loop {
            let (part, after) = rest.split_once('"').ok_or("a closing double quote")?;
            name.push_str(part);
            match after.strip_prefix('"') {
                Some(after) => {
                    name.push('"');
                    rest = after;
                }
                None => break (Cow::Owned(name), after),
            }
        }
    } else if let Some(quoted) = text.strip_prefix('\'') {
        let (name, after) = quoted.split_once('\'').ok_or("a closing single quote")?;
        (Cow::Borrowed(name), after)
    } else {
        let end = text
            .find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-' | '*')))
            .unwrap_or(text.len());
        (Cow::Borrowed(&text[..end]), &text[end..])
    };
    if name.is_empty() { Err("a name before '='") } else { Ok((name, after)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting<'a>(key: &'a str, value: &'a str) -> Item<'a> {
        Item::Setting { key: key.into(), value }
    }

    fn ok(text: &str) -> Vec<(u32, Item<'_>)> {
        items(text).into_iter().map(|i| i.expect("no syntax error")).collect()
    }

    #[test]
    fn comments_only_at_line_start() {
        let text = "; a\n  # b\n[pgbouncer] ; c\nlogfile = /a;b # c  \r\n\n";
        assert_eq!(ok(text), [(3, Item::Section("pgbouncer")), (4, setting("logfile", "/a;b # c"))]);
    }

    #[test]
    fn a_setting_may_follow_its_section() {
        assert_eq!(ok("[users]bob= x"), [(1, Item::Section("users")), (1, setting("bob", "x"))]);
    }

    #[test]
    fn names_bare_and_quoted() {
        let text = "a.b-c_*1=1\n\"x \"\"y\"\" =\" = 2\n'my db'=3\n*=\n";
        let expected = [
            (1, setting("a.b-c_*1", "1")),
            (2, setting("x \"y\" =", "2")),
            (3, setting("my db", "3")),
            (4, setting("*", "")),
        ];
        assert_eq!(ok(text), expected);
    }

    #[test]
    fn include_needs_a_blank_and_a_name() {
        assert_eq!(ok("%include  a b.ini \n"), [(1, Item::Include("a b.ini"))]);
        assert!(items("%includefoo")[0].is_err());
        assert!(items("%include  ")[0].is_err());
    }

    #[test]
    fn syntax_errors_stop_with_their_line() {
        for text in ["a\nb", "[x", "\"a = 1", "'a = 1", "\"\"=1", "=1", "ä=1", "a b = 1"] {
            let items = items(text);
            assert_eq!(items.len(), 1, "{text}");
            assert_eq!(items[0].as_ref().map_err(|e| e.0), Err(1), "{text}");
        }
    }
}
