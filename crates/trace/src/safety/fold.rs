// SPDX-License-Identifier: Apache-2.0
//! The shape of a statement of MariaDB or MySQL, which libpg_query does not parse: words in lower case, lists of values as one.

/// Folds a text without literals ([`strip_literals`](super::strip_literals)): upper case to lower, and the lists behind IN and VALUES, of
/// whatever length and number, to `(?+)`. Names that differ by case only become one: they are, but for tables on some file systems.
pub fn fold(shape: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(shape.len());
    let mut rest = shape;
    while let Some((&byte, after)) = rest.split_first() {
        if byte == b'('
            && ends_in_list_word(out.trim_ascii_end())
            && let Some(len) = lists(rest)
        {
            out.extend_from_slice(b"(?+)");
            rest = &rest[len..];
            continue;
        }
        out.push(byte.to_ascii_lowercase());
        rest = after;
    }
    out
}

fn ends_in_list_word(text: &[u8]) -> bool {
    [&b"in"[..], b"values", b"value"].iter().any(|word| ends_in_word(text, word))
}

fn ends_in_word(text: &[u8], word: &[u8]) -> bool {
    let Some(before) = text.strip_suffix(word) else { return false };
    before.last().is_none_or(|byte| !byte.is_ascii_alphanumeric() && *byte != b'_')
}

/// Length of the lists of literals and parameters at the beginning: `(?, ?), (?, ?)`.
fn lists(text: &[u8]) -> Option<usize> {
    let mut len = list(text)?;
    loop {
        let next = text[len..].trim_ascii_start();
        let Some(next) = next.strip_prefix(b",") else { return Some(len) };
        let next = next.trim_ascii_start();
        let Some(more) = list(next) else { return Some(len) };
        len = text.len() - next.len() + more;
    }
}

fn list(text: &[u8]) -> Option<usize> {
    let inner = text.strip_prefix(b"(")?;
    // Not up to the next bracket: with many of them, and none that closes, every look would be at all of the text.
    let end = inner.iter().position(|byte| !matches!(byte, b'?' | b',' | b' ' | b'-'))?;
    (inner[end] == b')' && inner[..end].contains(&b'?')).then_some(end + 2)
}

#[cfg(test)]
mod tests {
    use super::fold;

    #[test]
    fn lists_and_case_make_no_difference() {
        for (shape, folded) in [
            ("SELECT * FROM T WHERE a IN (?,?,?)", "select * from t where a in (?+)"),
            ("insert into t values (?, ?),(?, ?)", "insert into t values (?+)"),
            ("insert into t values (?, now())", "insert into t values (?, now())"),
            (
                "insert into t values(?), (?) on duplicate key update a= ?",
                "insert into t values(?+) on duplicate key update a= ?",
            ),
            ("select sleep (?), min (?)", "select sleep (?), min (?)"),
            ("select a in (select ?)", "select a in (select ?)"),
            ("in (", "in ("),
            ("in (?, ?", "in (?, ?"),
            ("in (?(?)", "in (?(?)"),
            ("a in (-?) or b in ()", "a in (?+) or b in ()"),
            ("", ""),
        ] {
            assert_eq!(String::from_utf8(fold(shape.as_bytes())).unwrap(), folded);
        }
    }

    /// A text with many blanks or brackets must not take time that grows with its square: 4 MB would take hours.
    #[test]
    fn long_texts_take_their_length() {
        for shape in [" ".repeat(1 << 22), "in(".repeat(1 << 20), "in (?, ".repeat(1 << 19)] {
            assert_eq!(fold(shape.as_bytes()), shape.as_bytes());
        }
    }
}
