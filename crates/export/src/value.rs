// SPDX-License-Identifier: Apache-2.0
//! Parameters as text.

use std::fmt::Write as _;

/// Type OIDs of `pg_type.dat` whose binary form is decoded here.
mod oid {
    pub(super) const BOOL: u32 = 16;
    pub(super) const BYTEA: u32 = 17;
    pub(super) const NAME: u32 = 19;
    pub(super) const INT8: u32 = 20;
    pub(super) const INT2: u32 = 21;
    pub(super) const INT4: u32 = 23;
    pub(super) const TEXT: u32 = 25;
    pub(super) const OID: u32 = 26;
    pub(super) const JSON: u32 = 114;
    pub(super) const FLOAT4: u32 = 700;
    pub(super) const FLOAT8: u32 = 701;
    pub(super) const BPCHAR: u32 = 1042;
    pub(super) const VARCHAR: u32 = 1043;
    pub(super) const UUID: u32 = 2950;
}

/// A parameter as the text that the server would take for the same value: text format as it is, binary format
/// for the common types. `None` for a binary value of a type that is not known here, and for what is not UTF-8.
pub fn text_of(value: &[u8], format: u16, type_oid: u32) -> Option<String> {
    if format == 0 {
        return std::str::from_utf8(value).ok().map(str::to_owned);
    }
    match type_oid {
        oid::TEXT | oid::VARCHAR | oid::BPCHAR | oid::NAME | oid::JSON => {
            std::str::from_utf8(value).ok().map(str::to_owned)
        }
        oid::BOOL => {
            <[u8; 1]>::try_from(value).ok().map(|[byte]| if byte == 0 { "f" } else { "t" }.to_owned())
        }
        oid::INT2 => value.try_into().ok().map(|bytes| i16::from_be_bytes(bytes).to_string()),
        oid::INT4 => value.try_into().ok().map(|bytes| i32::from_be_bytes(bytes).to_string()),
        oid::INT8 => value.try_into().ok().map(|bytes| i64::from_be_bytes(bytes).to_string()),
        oid::OID => value.try_into().ok().map(|bytes| u32::from_be_bytes(bytes).to_string()),
        oid::FLOAT4 => value
            .try_into()
            .ok()
            .map(|bytes| float(f32::from_be_bytes(bytes).into(), f32::from_be_bytes(bytes).to_string())),
        oid::FLOAT8 => value
            .try_into()
            .ok()
            .map(|bytes| float(f64::from_be_bytes(bytes), f64::from_be_bytes(bytes).to_string())),
        oid::BYTEA => Some(hex(value)),
        oid::UUID if value.len() == 16 => {
            let digits = &hex(value)[2..];
            Some([&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-"))
        }
        _ => None,
    }
}

/// PostgreSQL's words for what is no number; Rust's shortest digits are exact.
fn float(value: f64, digits: String) -> String {
    if value.is_nan() {
        "NaN".to_owned()
    } else if value.is_infinite() {
        if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned()
    } else {
        digits
    }
}

/// `\x` and two digits a byte: the hex format of bytea.
pub(crate) fn hex(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(2 + 2 * bytes.len());
    text.push_str("\\x");
    for byte in bytes {
        let _ = write!(text, "{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binary_values_of_known_types() {
        assert_eq!(text_of(&42i32.to_be_bytes(), 1, 23).as_deref(), Some("42"));
        assert_eq!(text_of(&(-7i64).to_be_bytes(), 1, 20).as_deref(), Some("-7"));
        assert_eq!(text_of(&1.5f64.to_be_bytes(), 1, 701).as_deref(), Some("1.5"));
        assert_eq!(text_of(&f32::NEG_INFINITY.to_be_bytes(), 1, 700).as_deref(), Some("-Infinity"));
        assert_eq!(text_of(&[1], 1, 16).as_deref(), Some("t"));
        assert_eq!(text_of(&[0xab; 16], 1, 2950).as_deref(), Some("abababab-abab-abab-abab-abababababab"));
        assert_eq!(text_of(&[0, 255], 1, 17).as_deref(), Some("\\x00ff"));
        assert_eq!(text_of(b"x", 1, 25).as_deref(), Some("x"));
    }

    #[test]
    fn what_is_not_known_is_not_guessed() {
        assert_eq!(text_of(&[0, 0, 0, 1], 1, 0), None);
        assert_eq!(text_of(&[1, 2], 1, 23), None);
        assert_eq!(text_of(&[0xff], 0, 25), None);
    }
}
