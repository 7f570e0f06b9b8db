// SPDX-License-Identifier: Apache-2.0
//! The types of values: how each is read from the text after `=` and how SHOW CONFIG prints it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// A type a key can have.
pub(crate) trait Value: Sized {
    /// Name of the type in docs/config.md.
    const TYPE: &'static str;
    /// The text that stands for a default that PgBouncer shows as null.
    const UNSET: &'static str = "";
    /// The value, or what would have been accepted.
    fn parse(text: &str) -> Result<Self, String>;
    /// The text SHOW CONFIG prints; `None` is SQL's null.
    fn show(&self) -> Option<String>;
}

/// Parses a C integer as PgBouncer does with strtol(base 0): decimal, `0x` hexadecimal, leading `0` octal.
pub(crate) fn parse_int(text: &str) -> Option<i64> {
    let text = text.trim_ascii_start();
    let (negative, digits) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    if !digits.as_bytes().first()?.is_ascii_alphanumeric() {
        return None;
    }
    let magnitude = if let Some(hex) = digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X")) {
        if hex.starts_with('+') {
            return None;
        }
        i64::from_str_radix(hex, 16).ok()?
    } else if digits.len() > 1 && digits.starts_with('0') {
        i64::from_str_radix(&digits[1..], 8).ok().filter(|_| !digits[1..].starts_with(['+', '-']))?
    } else {
        digits.parse().ok()?
    };
    Some(if negative { -magnitude } else { magnitude })
}

fn int_in(text: &str, min: i64, max: i64) -> Result<i64, String> {
    parse_int(text)
        .filter(|n| (min..=max).contains(n))
        .ok_or_else(|| format!("an integer from {min} to {max}"))
}

impl Value for bool {
    const TYPE: &'static str = "0 or 1";
    fn parse(text: &str) -> Result<Self, String> {
        // PgBouncer's switches are C integers: any number but 0 is on, words such as "yes" are refused.
        int_in(text, i32::MIN.into(), i32::MAX.into()).map(|n| n != 0).map_err(|_| "0 (off) or 1 (on)".into())
    }
    fn show(&self) -> Option<String> {
        Some(u8::from(*self).to_string())
    }
}

impl Value for u32 {
    const TYPE: &'static str = "integer";
    const UNSET: &'static str = "0";
    fn parse(text: &str) -> Result<Self, String> {
        int_in(text, 0, u32::MAX.into()).map(|n| n as u32)
    }
    fn show(&self) -> Option<String> {
        Some(self.to_string())
    }
}

impl Value for u64 {
    const TYPE: &'static str = "bytes";
    fn parse(text: &str) -> Result<Self, String> {
        int_in(text, 0, i64::MAX).map(|n| n as u64)
    }
    fn show(&self) -> Option<String> {
        Some(self.to_string())
    }
}

impl Value for u16 {
    const TYPE: &'static str = "integer, 0 to 65535";
    fn parse(text: &str) -> Result<Self, String> {
        int_in(text, 0, u16::MAX.into()).map(|n| n as u16)
    }
    fn show(&self) -> Option<String> {
        Some(self.to_string())
    }
}

/// `peer_id`: 0 (no peering) to 16383, what fits beside the rest of a cancel key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PeerId(pub u16);

impl Value for PeerId {
    const TYPE: &'static str = "integer, 0 to 16383";
    fn parse(text: &str) -> Result<Self, String> {
        int_in(text, 0, 16383).map(|n| PeerId(n as u16))
    }
    fn show(&self) -> Option<String> {
        Some(self.0.to_string())
    }
}

/// Places in a table of the kernel lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct LanePlaces(pub u32);

impl Value for LanePlaces {
    const TYPE: &'static str = "integer, 1 to 1048576";
    fn parse(text: &str) -> Result<Self, String> {
        int_in(text, 1, 1 << 20).map(|n| LanePlaces(n as u32))
    }
    fn show(&self) -> Option<String> {
        Some(self.0.to_string())
    }
}

/// A limit of bytes in the kernel lanes. Less than 64 KiB would not hold what comes in one piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct LaneBytes(pub u32);

impl Value for LaneBytes {
    const TYPE: &'static str = "bytes, 65536 to 1073741824";
    fn parse(text: &str) -> Result<Self, String> {
        int_in(text, 1 << 16, 1 << 30).map(|n| LaneBytes(n as u32))
    }
    fn show(&self) -> Option<String> {
        Some(self.0.to_string())
    }
}

/// Bytes of a request that the kernel lanes keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeptBytes(pub u32);

impl Value for KeptBytes {
    const TYPE: &'static str = "bytes, 0 to 1024";
    fn parse(text: &str) -> Result<Self, String> {
        int_in(text, 0, 1024).map(|n| KeptBytes(n as u32))
    }
    fn show(&self) -> Option<String> {
        Some(self.0.to_string())
    }
}

/// `threads`: `None` is one per core.
impl Value for Option<u32> {
    const TYPE: &'static str = "integer, 0 = automatic";
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "" | "auto" => Ok(None),
            _ => int_in(text, 0, 1024).map(|n| (n != 0).then_some(n as u32)),
        }
    }
    fn show(&self) -> Option<String> {
        Some(self.unwrap_or(0).to_string())
    }
}

impl Value for Duration {
    const TYPE: &'static str = "seconds";
    fn parse(text: &str) -> Result<Self, String> {
        let expected = || "seconds, 0 or more, fractions allowed (no unit letters)".to_owned();
        let text = text.trim_ascii_start();
        // f64 also reads words ("inf", "nan"); a time starts with a digit or a point.
        if !text.starts_with(|c: char| c.is_ascii_digit() || c == '.' || c == '+') {
            return Err(expected());
        }
        let seconds: f64 = text.parse().map_err(|_| expected())?;
        // 68 years: what PgBouncer's log and SHOW can still print; also keeps sums with the clock from overflowing.
        if !(0.0..=2_147_483_647.0).contains(&seconds) {
            return Err("seconds from 0 to 2147483647".into());
        }
        Ok(Duration::from_micros((seconds * 1e6).round() as u64))
    }
    fn show(&self) -> Option<String> {
        Some(general_format(self.as_micros() as f64 / 1e6))
    }
}

/// C's `%g`: six significant digits, no trailing zeros, exponent form from 1e6 on. SHOW CONFIG prints times so.
pub(crate) fn general_format(value: f64) -> String {
    if value == 0.0 {
        return "0".into();
    }
    let scientific = format!("{value:.5e}");
    let Some((mantissa, exponent)) = scientific.split_once('e') else { return scientific };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let trim = |s: &str| match s.contains('.') {
        true => s.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => s.to_owned(),
    };
    if (-4..6).contains(&exponent) {
        return trim(&format!("{value:.*}", (5 - exponent) as usize));
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{}e{sign}{:02}", trim(mantissa), exponent.abs())
}

impl Value for String {
    const TYPE: &'static str = "text";
    fn parse(text: &str) -> Result<Self, String> {
        Ok(text.to_owned())
    }
    fn show(&self) -> Option<String> {
        Some(self.clone())
    }
}

impl Value for Option<String> {
    const TYPE: &'static str = "text";
    fn parse(text: &str) -> Result<Self, String> {
        Ok((!text.is_empty()).then(|| text.to_owned()))
    }
    fn show(&self) -> Option<String> {
        self.clone()
    }
}

impl Value for Option<PathBuf> {
    const TYPE: &'static str = "file";
    fn parse(text: &str) -> Result<Self, String> {
        Ok((!text.is_empty()).then(|| text.into()))
    }
    fn show(&self) -> Option<String> {
        self.as_ref().map(|p| p.to_string_lossy().into_owned())
    }
}

impl Value for Option<SocketAddr> {
    const TYPE: &'static str = "address:port";
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "" => Ok(None),
            _ => text
                .parse()
                .map(Some)
                .map_err(|_| "address:port, for example 127.0.0.1:9127 or [::1]:9127".into()),
        }
    }
    fn show(&self) -> Option<String> {
        self.map(|a| a.to_string())
    }
}

/// A list of names separated by commas or white space (`admin_users`, `ignore_startup_parameters`, `listen_addr`).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NameList {
    text: String,
    names: Vec<String>,
}

impl NameList {
    /// The names in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }

    /// Whether `name` is one of them, letter for letter.
    pub fn contains(&self, name: &str) -> bool {
        self.names.iter().any(|n| n == name)
    }

    /// As [`contains`](Self::contains) for parameter names, whose case does not matter to PostgreSQL.
    pub fn contains_ignore_case(&self, name: &str) -> bool {
        self.names.iter().any(|n| n.eq_ignore_ascii_case(name))
    }

    /// Whether there is no name at all.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }
}

impl Value for NameList {
    const TYPE: &'static str = "list";
    fn parse(text: &str) -> Result<Self, String> {
        let names = text
            .split(|c: char| c == ',' || c.is_ascii_whitespace())
            .filter(|s| !s.is_empty())
            .map(str::to_owned)
            .collect();
        Ok(Self { text: text.to_owned(), names })
    }
    fn show(&self) -> Option<String> {
        Some(self.text.clone())
    }
}

/// `server_check_query`: how an idle server connection is checked before it is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CheckQuery {
    /// Empty value: no check.
    Off,
    /// `<empty>`: an empty query, which needs no catalog and no transaction.
    Empty,
    /// This SQL.
    Sql(String),
}

impl Value for CheckQuery {
    const TYPE: &'static str = "SQL";
    fn parse(text: &str) -> Result<Self, String> {
        Ok(match text {
            "" => Self::Off,
            "<empty>" => Self::Empty,
            sql => Self::Sql(sql.to_owned()),
        })
    }
    fn show(&self) -> Option<String> {
        Some(match self {
            Self::Off => String::new(),
            Self::Empty => "<empty>".to_owned(),
            Self::Sql(sql) => sql.clone(),
        })
    }
}

/// `unix_socket_dir`: where unix sockets live, ours and the default of servers without `host`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UnixSocketDir {
    /// Empty value: no unix sockets.
    Off,
    /// A directory.
    Path(PathBuf),
    /// `@prefix`: Linux' abstract namespace; the prefix without `@`.
    Abstract(String),
}

impl Value for UnixSocketDir {
    const TYPE: &'static str = "directory";
    fn parse(text: &str) -> Result<Self, String> {
        Ok(match text.strip_prefix('@') {
            Some(name) => Self::Abstract(name.to_owned()),
            None if text.is_empty() => Self::Off,
            None => Self::Path(text.into()),
        })
    }
    fn show(&self) -> Option<String> {
        Some(match self {
            Self::Off => String::new(),
            Self::Path(path) => path.to_string_lossy().into_owned(),
            Self::Abstract(name) => format!("@{name}"),
        })
    }
}

/// `*_tls_protocols`: the TLS versions that are allowed. 1.0 and 1.1 can be named but rustls does not speak them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsProtocols {
    text: String,
    /// TLS 1.0 (named in the file; never spoken).
    pub v1_0: bool,
    /// TLS 1.1 (named in the file; never spoken).
    pub v1_1: bool,
    /// TLS 1.2.
    pub v1_2: bool,
    /// TLS 1.3.
    pub v1_3: bool,
}

impl Value for TlsProtocols {
    const TYPE: &'static str = "list";
    fn parse(text: &str) -> Result<Self, String> {
        let mut on = [false; 4];
        for word in text.split([',', ':', ' ', '\t']).filter(|w| !w.is_empty()) {
            let (negated, word) = word.strip_prefix('!').map_or((false, word), |w| (true, w));
            let named = match word.to_ascii_lowercase().as_str() {
                "all" | "legacy" => [true; 4],
                "tlsv1" => [true; 4],
                "secure" | "default" => [false, false, true, true],
                "tlsv1.0" => [true, false, false, false],
                "tlsv1.1" => [false, true, false, false],
                "tlsv1.2" => [false, false, true, false],
                "tlsv1.3" => [false, false, false, true],
                _ => return Err("a list of tlsv1.0, tlsv1.1, tlsv1.2, tlsv1.3, or secure or all".into()),
            };
            for (flag, named) in on.iter_mut().zip(named) {
                *flag = if named { !negated } else { *flag };
            }
        }
        let [v1_0, v1_1, v1_2, v1_3] = on;
        // An empty list restricts nothing, as in PgBouncer.
        if text.trim_ascii().is_empty() {
            return Ok(Self { text: text.to_owned(), v1_0: true, v1_1: true, v1_2: true, v1_3: true });
        }
        if on == [false; 4] {
            return Err("at least one TLS version: secure is a good choice".into());
        }
        Ok(Self { text: text.to_owned(), v1_0, v1_1, v1_2, v1_3 })
    }
    fn show(&self) -> Option<String> {
        Some(self.text.clone())
    }
}

/// `auth_dbname`: a database of `[databases]`, never the console's.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ReservedName(Option<String>);

impl ReservedName {
    /// The name, if one is set.
    pub fn as_deref(&self) -> Option<&str> {
        self.0.as_deref()
    }
}

impl Value for ReservedName {
    const TYPE: &'static str = "text";
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "pgbouncer" => Err("a database other than the console's, \"pgbouncer\"".into()),
            _ => Ok(Self((!text.is_empty()).then(|| text.to_owned()))),
        }
    }
    fn show(&self) -> Option<String> {
        self.0.clone()
    }
}
