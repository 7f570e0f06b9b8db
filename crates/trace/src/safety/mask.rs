// SPDX-License-Identifier: Apache-2.0
//! Masking: literals and parameters become others of the same length and look, by a keyed hash.
//!
//! Equal values stay equal, in texts and in parameters, as long as the key is the same; so joins, hot keys and
//! repeated parameters keep their shape. Digits become digits, letters letters, punctuation stays, dates stay
//! dates, and numbers keep their number of digits and fit into the integer type that they fitted into.
//!
//! It is masking, not anonymity: lengths, punctuation, equality and frequency remain visible. What stays as it is,
//! because it is structure: identifiers, numbers of one digit, numbers behind `LIMIT`, `OFFSET` and `FETCH`, the
//! strings behind `INTERVAL`, words for booleans, values of settings without a dot in their name. MySQL's `@variable` is no setting,
//! `@@setting` is one, and behind a `;` nothing of MySQL's is: it may be a variable of a stored procedure.

use std::path::{Path, PathBuf};

use hmac::{Hmac, Mac as _};
use sha2::Sha256;

use super::lexer::{Kind, Lexer};
use crate::Protocol;

/// Why a file gives no key.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyError {
    /// It cannot be read.
    #[error("cannot read the key {}: {_1}", _0.display())]
    Unreadable(PathBuf, std::io::Error),
    /// It has this many bytes.
    #[error("{}: a key of {_1} bytes can be guessed; make one by: head -c 32 /dev/urandom > FILE", _0.display())]
    Short(PathBuf, usize),
}

/// Masks with one key.
#[derive(Clone)]
pub struct Masker {
    keyed: Hmac<Sha256>,
}

impl std::fmt::Debug for Masker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Masker")
    }
}

impl Masker {
    /// A masker with this key; two with the same key mask alike. 32 random bytes are a good key.
    pub fn new(key: &[u8]) -> Self {
        // HMAC takes keys of any length: a key that is too long is hashed first.
        let Ok(keyed) = Hmac::new_from_slice(key) else { unreachable!("HMAC takes any key") };
        Self { keyed }
    }

    /// Fewest bytes of a key that [`read`](Self::read) takes: a shorter one can be guessed.
    pub const KEY_BYTES_MIN: usize = 16;

    /// A masker with the key in a file, which is all of its bytes.
    ///
    /// # Errors
    /// The file cannot be read, or has fewer than [`KEY_BYTES_MIN`](Self::KEY_BYTES_MIN) bytes.
    pub fn read(path: &Path) -> Result<Self, KeyError> {
        let key = std::fs::read(path).map_err(|error| KeyError::Unreadable(path.to_owned(), error))?;
        if key.len() < Self::KEY_BYTES_MIN {
            return Err(KeyError::Short(path.to_owned(), key.len()));
        }
        Ok(Self::new(&key))
    }

    /// A masker with a key that nobody knows: equal values stay equal in what this one masks, and nowhere else.
    ///
    /// # Errors
    /// The system has no random bytes.
    pub fn random() -> Result<Self, getrandom::Error> {
        let mut key = [0; 32];
        getrandom::fill(&mut key)?;
        Ok(Self::new(&key))
    }

    /// Masks the literals of an SQL text, and blanks its comments.
    pub(crate) fn sql(&self, text: &mut [u8], dialect: Protocol) {
        let mut previous = Vec::new();
        let (mut settings, mut dotted, mut first) = (false, false, true);
        // MariaDB's SET STATEMENT: settings up to FOR, and a statement behind it.
        let mut prefixed = false;
        let tokens: Vec<_> = Lexer::new(text, dialect).collect();
        for token in tokens {
            let at = token.inner.start;
            let doubled = text.get(at + 1) == Some(&b'@') || at > 0 && text[at - 1] == b'@';
            let content = &mut text[token.inner];
            match token.kind {
                Kind::Word => {
                    let is_second = settings && previous == b"set";
                    previous = content.to_ascii_lowercase();
                    // A setting's name in quotes has its dot in them.
                    dotted |= settings && content.contains(&b'.');
                    prefixed |= is_second && previous == b"statement" && dialect == Protocol::Mysql;
                    if prefixed && previous == b"for" {
                        (settings, prefixed, first) = (false, false, true);
                    } else if first {
                        settings = previous == b"set" || previous == b"show" || previous == b"reset";
                        (dotted, first) = (false, false);
                    }
                }
                Kind::Comment => content.fill(b' '),
                Kind::String => {
                    let structure = (settings && !dotted) || previous == b"interval";
                    if !structure {
                        self.value(content);
                    }
                }
                Kind::Number => {
                    const STRUCTURE: [&[u8]; 5] = [b"limit", b"offset", b"fetch", b"first", b"next"];
                    let structure = STRUCTURE.contains(&&previous[..]) || (settings && !dotted);
                    if !structure {
                        self.number(content);
                    }
                }
                Kind::Symbol(b';') => {
                    (first, previous) = (dialect == Protocol::Postgres, Vec::new());
                    settings &= first;
                }
                Kind::Symbol(b'@') if dialect == Protocol::Mysql && !doubled => dotted |= settings,
                Kind::Symbol(b'.') => dotted |= settings,
                Kind::Symbol(_) => previous.clear(),
            }
        }
    }

    /// Masks a parameter in binary format: printable text as text, everything else as random bytes.
    pub(crate) fn binary(&self, value: &mut [u8]) {
        let printable =
            |bytes: &[u8]| std::str::from_utf8(bytes).is_ok_and(|text| !text.chars().any(char::is_control));
        let as_number = matches!(value.len(), 1 | 2 | 4 | 8 | 16);
        if value.is_ascii() && printable(value) || !as_number && printable(value) {
            return self.value(value);
        }
        let mut stream = self.stream(value);
        value.iter_mut().for_each(|byte| *byte = stream.byte());
    }

    /// Masks a value in text form.
    pub(crate) fn value(&self, value: &mut [u8]) {
        const BOOLEANS: [&[u8]; 12] =
            [b"t", b"f", b"true", b"false", b"y", b"n", b"yes", b"no", b"on", b"off", b"null", b""];
        if BOOLEANS.iter().any(|word| value.eq_ignore_ascii_case(word)) {
            return;
        }
        let unsigned = value.strip_prefix(b"-").map_or(0, |_| 1);
        let digits = value.len() > unsigned
            && value[unsigned].is_ascii_digit()
            && value.iter().skip(unsigned).all(|byte| byte.is_ascii_digit() || *byte == b'.');
        if digits && value.iter().filter(|&&byte| byte == b'.').count() <= 1 {
            return self.number(&mut value[unsigned..]);
        }
        let date = is_date(value);
        let hexadecimal = value.len() >= 8
            && value.iter().all(|byte| byte.is_ascii_hexdigit() || matches!(byte, b'-' | b'\\' | b'x'));
        let mut stream = self.stream(value);
        for byte in value.iter_mut() {
            *byte = match *byte {
                b'0'..=b'9' => b'0' + stream.below(10),
                b'a'..=b'f' if hexadecimal => b'a' + stream.below(6),
                b'A'..=b'F' if hexadecimal => b'A' + stream.below(6),
                b'x' if hexadecimal => b'x',
                b'a'..=b'z' => b'a' + stream.below(26),
                b'A'..=b'Z' => b'A' + stream.below(26),
                0x80.. => b'a' + stream.below(26), // one letter for each byte of another script
                other => other,
            };
        }
        if date {
            repair_date(value);
        }
    }

    /// Masks digits; the exponent of a number and its sign stay.
    fn number(&self, number: &mut [u8]) {
        if let [b'0', radix @ (b'x' | b'X' | b'b' | b'B' | b'o' | b'O'), _, ..] = *number {
            return self.radix(number, radix.to_ascii_lowercase());
        }
        let mantissa = number.iter().position(|byte| matches!(byte, b'e' | b'E')).unwrap_or(number.len());
        if number.iter().filter(|byte| byte.is_ascii_digit()).count() <= 1 {
            return;
        }
        let integer = number.iter().all(u8::is_ascii_digit);
        let value: Option<u64> = integer.then(|| std::str::from_utf8(number).ok()?.parse().ok()).flatten();
        let mut stream = self.stream(number);
        for (at, byte) in number[..mantissa].iter_mut().enumerate() {
            match (at, *byte) {
                (0, b'1'..=b'9') => *byte = b'1' + stream.below(9),
                (_, b'0'..=b'9') if at > 0 => *byte = b'0' + stream.below(10),
                _ => {}
            }
        }
        // What was an int4 or int8 stays one: the first digit is the only one that must give way.
        let limit = match value {
            Some(value) if value <= i32::MAX as u64 => i32::MAX as u64,
            Some(value) if value <= i64::MAX as u64 => i64::MAX as u64,
            _ => return,
        };
        let masked: Option<u64> = std::str::from_utf8(number).ok().and_then(|text| text.parse().ok());
        if masked.is_none_or(|masked| masked > limit) {
            number[0] = b'1';
        }
    }

    /// Masks the digits of `0x...`, `0b...` and `0o...`. The first digit changes only so far that an int4 or int8 remains one.
    fn radix(&self, number: &mut [u8], radix: u8) {
        let mut stream = self.stream(number);
        for (at, byte) in number.iter_mut().enumerate().skip(2) {
            *byte = match (radix, *byte) {
                (b'b', first) if at == 2 => first,
                (b'b', b'0' | b'1') => b'0' + stream.below(2),
                (b'o', b'0' | b'1') if at == 2 => b'0' + stream.below(2),
                (b'o', b'2'..=b'7') if at == 2 => b'2' + stream.below(6),
                (b'x', b'8' | b'9') if at == 2 => b'8' + stream.below(2),
                (b'x', b'8' | b'9') => b'0' + stream.below(10),
                (b'x' | b'o', b'0'..=b'7') => b'0' + stream.below(8),
                (_, b'a'..=b'f') => b'a' + stream.below(6),
                (_, b'A'..=b'F') => b'A' + stream.below(6),
                (_, other) => other,
            };
        }
    }

    /// Bytes that depend on key and value. Quotes that are doubled or escaped hash like those that are not.
    fn stream(&self, value: &[u8]) -> Stream {
        let mut seed = self.keyed.clone();
        let mut rest = value;
        while let Some(at) = memchr::memchr2(b'\'', b'\\', rest) {
            seed.update(&rest[..at]);
            let escaped = rest.get(at + 1) == Some(&b'\'');
            seed.update(if escaped { b"'" } else { &rest[at..=at] });
            rest = &rest[at + 1 + usize::from(escaped)..];
        }
        seed.update(rest);
        let seed = seed.finalize().into_bytes();
        Stream { keyed: self.keyed.clone(), block: seed.into(), at: 0 }
    }
}

/// HMAC in a chain: each block is the hash of the one before.
struct Stream {
    keyed: Hmac<Sha256>,
    block: [u8; 32],
    at: usize,
}

impl Stream {
    fn byte(&mut self) -> u8 {
        if self.at == self.block.len() {
            let mut next = self.keyed.clone();
            next.update(&self.block);
            (self.block, self.at) = (next.finalize().into_bytes().into(), 0);
        }
        self.at += 1;
        self.block[self.at - 1]
    }

    /// A number in `0..limit`. A byte is a little biased; that reveals nothing of the value.
    fn below(&mut self, limit: u8) -> u8 {
        self.byte() % limit
    }
}

/// `YYYY-MM-DD`, with or without a time behind it.
fn is_date(value: &[u8]) -> bool {
    let shape = |bytes: &[u8]| {
        bytes.iter().enumerate().all(|(at, byte)| match at {
            4 | 7 => *byte == b'-',
            _ => byte.is_ascii_digit(),
        })
    };
    value.len() >= 10 && shape(&value[..10])
}

/// Brings the fields of a masked date and time back into their ranges.
fn repair_date(value: &mut [u8]) {
    let mut field = |at: usize, low: u8, count: u8| {
        let digits = match value.get(at..at + 2) {
            Some([tens @ b'0'..=b'9', ones @ b'0'..=b'9']) => (tens - b'0') * 10 + (ones - b'0'),
            _ => return,
        };
        let number = low + digits % count;
        (value[at], value[at + 1]) = (b'0' + number / 10, b'0' + number % 10);
    };
    field(0, 19, 2);
    field(5, 1, 12);
    field(8, 1, 28);
    field(11, 0, 24);
    field(14, 0, 60);
    field(17, 0, 60);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn masked(text: &str) -> String {
        let mut bytes = text.as_bytes().to_vec();
        Masker::new(b"key").sql(&mut bytes, Protocol::Postgres);
        String::from_utf8(bytes).unwrap()
    }

    fn value(text: &str) -> String {
        let mut bytes = text.as_bytes().to_vec();
        Masker::new(b"key").value(&mut bytes);
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn literals_change_and_the_rest_stays() {
        let text = masked("select a1 from t where name = 'Smith' and id = 4711 limit 10 -- of Smith");
        assert!(
            text.starts_with("select a1 from t where name = '") && text.contains(" limit 10 --"),
            "{text}"
        );
        assert!(!text.contains("Smith") && !text.contains("4711"), "{text}");
        assert_eq!(masked("set client_encoding = 'LATIN1'"), "set client_encoding = 'LATIN1'");
        assert!(!masked("set app.customer = 'Smith'").contains("Smith"));
        assert!(!masked("set \"app.customer\" = 'Smith'").contains("Smith"));
        assert_eq!(
            masked("select now() - interval '15 days', 3, $1 order by 1"),
            "select now() - interval '15 days', 3, $1 order by 1"
        );
    }

    #[test]
    fn variables_of_mysql_are_no_settings() {
        let masked = |text: &str| {
            let mut bytes = text.as_bytes().to_vec();
            Masker::new(b"key").sql(&mut bytes, Protocol::Mysql);
            String::from_utf8(bytes).unwrap()
        };
        for setting in [
            "set names 'latin1'",
            "set statement sql_mode='ANSI' for select 1",
            "set @@sql_mode = 'ANSI'",
            "set session sql_mode='ANSI', @@x='y'",
        ] {
            assert_eq!(masked(setting), setting);
        }
        for text in [
            "set statement max_statement_time=1 for select 'Smith'",
            "set statement sql_mode='ANSI' for set @mail = 'Smith'",
            "set @mail = 'Smith'",
            "set @a := 1, @mail='Smith'",
            "create procedure p() begin set x = 1; set y = 'Smith'; end",
        ] {
            assert!(!masked(text).contains("Smith"), "{text}");
        }
        let hex = masked("select 0x536d697468, X'536d697468', 0b1011011101111011");
        assert!(!hex.contains("536d697468") && !hex.contains("1011011101111011"), "{hex}");
        assert!(hex.starts_with("select 0x") && hex.contains(", X'") && hex.contains(", 0b"), "{hex}");
    }

    #[test]
    fn numbers_of_other_radices_keep_their_type() {
        for number in ["0x7fffffff", "0x1000_0000", "0x7fffffffffffffff", "0o17777777777", "0xFFFFFFFFF"] {
            let masked = masked(number);
            assert_ne!(masked, number);
            let radix = if number.starts_with("0x") { 16 } else { 8 };
            let parsed = |text: &str| i64::from_str_radix(&text[2..].replace('_', ""), radix).unwrap();
            assert!(parsed(number) > i32::MAX.into() || parsed(&masked) <= i32::MAX.into(), "{masked}");
        }
    }

    #[test]
    fn equal_values_stay_equal_wherever_they_are() {
        assert_eq!(masked("x = 'Smith''s'"), format!("x = '{}'", value("Smith''s")));
        assert_eq!(value("Smith''s").replace("''", "'"), value("Smith's"));
        assert_eq!(masked("x = 4711"), format!("x = {}", value("4711")));
        assert_ne!(value("Smith"), value("Smyth"));
        let mut other = *b"Smith";
        Masker::new(b"another key").value(&mut other);
        assert_ne!(other[..], *value("Smith").as_bytes());
    }

    #[test]
    fn values_keep_their_look() {
        let date = value("2024-02-29 23:59:58+00");
        assert_ne!(date, "2024-02-29 23:59:58+00");
        let part = |range: std::ops::Range<usize>| date[range].parse::<u32>().unwrap();
        assert!(
            (1..=12).contains(&part(5..7)) && (1..=28).contains(&part(8..10)) && part(11..13) < 24,
            "{date}"
        );
        let uuid = value("0b9c6a4e-7a1c-4d0f-9f34-0123456789ab");
        assert!(uuid.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-'), "{uuid}");
        for number in ["2147483647", "2000000000", "9223372036854775807", "42", "-17", "3.1415"] {
            let masked = value(number);
            assert_eq!(masked.len(), number.len());
            if let (Ok(_), Ok(after)) = (number.parse::<i32>(), masked.parse::<i64>()) {
                assert!(i32::try_from(after).is_ok(), "{number} {masked}");
            }
            assert!(masked.parse::<f64>().is_ok() && (number.contains('.') || masked.parse::<i64>().is_ok()));
        }
        assert_eq!(value("true"), "true");
    }

    #[test]
    fn binary_parameters_change_too() {
        let mut number = 4711u32.to_be_bytes();
        Masker::new(b"key").binary(&mut number);
        assert_ne!(u32::from_be_bytes(number), 4711);
        let mut text = *b"Jane Smith";
        Masker::new(b"key").binary(&mut text);
        assert!(text.is_ascii() && text[4] == b' ' && text != *b"Jane Smith");
    }

    proptest! {
        #[test]
        fn any_text_keeps_its_length_and_stays_text(text in "\\PC{0,60}") {
            let mut bytes = text.clone().into_bytes();
            Masker::new(b"key").sql(&mut bytes, Protocol::Postgres);
            prop_assert_eq!(bytes.len(), text.len());
            prop_assert!(std::str::from_utf8(&bytes).is_ok());
            let mut bytes = text.into_bytes();
            Masker::new(b"key").value(&mut bytes);
            prop_assert!(std::str::from_utf8(&bytes).is_ok());
        }
    }
}
