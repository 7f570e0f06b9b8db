// SPDX-License-Identifier: Apache-2.0
//! A cheap key for the cache of parsed statements: the text with its literals blanked, without a parser.

/// Writes into `key` the text with every number replaced by `0` and every string by `''`: the same for texts that differ in literals only, so
/// that a parser need not see each of them. Where telling literals apart would need more than a glance (comments, dollar quoting,
/// backslashes) the key is the text itself.
pub fn strip_literals(text: &[u8], key: &mut Vec<u8>) {
    key.clear();
    if !strip(text, key) {
        key.clear();
        key.extend_from_slice(text);
    }
}

fn strip(text: &[u8], key: &mut Vec<u8>) -> bool {
    let mut at = 0;
    while let Some(&byte) = text.get(at) {
        let next = text.get(at + 1).copied();
        let after_name = key.last().is_some_and(|&last| is_name(last));
        match byte {
            b'-' if next == Some(b'-') => return false,
            b'/' if next == Some(b'*') => return false,
            b'$' if !next.is_some_and(|next| next.is_ascii_digit()) => return false,
            // E'', B'', X'', U&'': the letters before it are in the key already, and escapes make it fall back.
            b'\'' => {
                let Some(end) = string_end(text, at + 1) else { return false };
                key.extend_from_slice(b"''");
                at = end;
                continue;
            }
            b'"' => {
                let Some(length) = memchr(b'"', &text[at + 1..]) else { return false };
                key.extend_from_slice(&text[at..at + length + 2]);
                at += length + 2;
                continue;
            }
            b'0'..=b'9' if !after_name => {
                key.push(b'0');
                at += number_length(&text[at..]);
                continue;
            }
            _ => key.push(byte),
        }
        at += 1;
    }
    true
}

/// The length of a number at the beginning of a text, with the sign of its exponent: without, `1e-3` would have the key of `5-3`.
fn number_length(text: &[u8]) -> usize {
    let length = |from: usize| text[from..].iter().take_while(|&&b| is_name(b) || b == b'.').count();
    let mantissa = length(0);
    let is_decimal = text[..mantissa - 1].iter().all(|b| b.is_ascii_digit() || matches!(b, b'.' | b'_'));
    match text[mantissa - 1..] {
        [b'e' | b'E', b'+' | b'-', b'0'..=b'9', ..] if is_decimal => mantissa + 1 + length(mantissa + 1),
        _ => mantissa,
    }
}

/// Bytes of names, numbers and parameters.
fn is_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'$' || byte >= 0x80
}

/// Behind the closing quote of a string that began before `at`.
fn string_end(text: &[u8], mut at: usize) -> Option<usize> {
    loop {
        match *text.get(at)? {
            b'\\' => return None,
            b'\'' if text.get(at + 1) == Some(&b'\'') => at += 2,
            b'\'' => return Some(at + 1),
            _ => at += 1,
        }
    }
}

fn memchr(wanted: u8, text: &[u8]) -> Option<usize> {
    text.iter().position(|&byte| byte == wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> String {
        let mut key = Vec::new();
        strip_literals(text.as_bytes(), &mut key);
        String::from_utf8(key).unwrap()
    }

    #[test]
    fn literals_go() {
        assert_eq!(key("update t1 set v = 'it''s' where id=-12.5e3"), "update t1 set v = '' where id=-0");
        assert_eq!(key("select 1e-3, 1.5E+10-2, 5-3, 0x1e-3, 1e-a"), "select 0, 0-0, 0-0, 0-0, 0-a");
        assert_eq!(key("select $1, a1, \"b 2\", 3"), "select $1, a1, \"b 2\", 0");
    }

    #[test]
    fn what_is_not_sure_stays() {
        for text in
            ["select 1 -- 2", "select /* ' */ 1", "select $$1$$", "select E'\\'1'", "select '1", "select \"1"]
        {
            assert_eq!(key(text), text);
        }
    }
}
