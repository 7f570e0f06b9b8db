// SPDX-License-Identifier: Apache-2.0
//! One row of the table of keys, and the macro that makes a struct and its rows from one list.
//!
//! The lists themselves are in `keys.rs`. Parsing, defaults, SET, RELOAD, SHOW CONFIG and docs/config.md all read
//! this table, so they cannot disagree.

use crate::config::Config;

/// The section a key belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Section {
    /// `[pgbouncer]`
    Pgbouncer,
    /// `[underpass]`: keys PgBouncer does not have.
    Underpass,
}

impl Section {
    /// The name between the brackets.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pgbouncer => "pgbouncer",
            Self::Underpass => "underpass",
        }
    }
}

/// When a new value takes effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// With RELOAD and SET.
    Reload,
    /// With the next start only.
    Restart,
}

/// Whether the key means here what it means in PgBouncer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    /// The same.
    Same,
    /// Nearly: the note says what differs.
    Differs(&'static str),
    /// Accepted and ignored: the note says why.
    NoEffect(&'static str),
    /// Refused when set: the note says what to use instead.
    Unsupported(&'static str),
}

/// One key of `[pgbouncer]` or `[underpass]`.
pub struct Key {
    /// Name as in the file.
    pub name: &'static str,
    /// Its section.
    pub section: Section,
    /// Heading in docs/config.md.
    pub group: &'static str,
    /// Type, for documentation.
    pub value_type: &'static str,
    /// Text of the default; `None` where PgBouncer shows null.
    pub default: Option<&'static str>,
    /// When a change takes effect.
    pub change: Change,
    /// Same as PgBouncer or not.
    pub support: Support,
    /// In SHOW CONFIG; false for names that PgBouncer on Linux does not list.
    pub shown: bool,
    /// What it does, in Markdown.
    pub doc: &'static str,
    pub(crate) get: fn(&Config) -> Option<String>,
    pub(crate) put: fn(&mut Config, &str) -> Result<(), String>,
    pub(crate) copy: fn(&Config, &mut Config),
    pub(crate) same: fn(&Config, &Config) -> bool,
}

impl Key {
    /// The name in SHOW CONFIG and SET: plain for PgBouncer's keys, `underpass.name` for ours.
    pub fn full_name(&self) -> String {
        match self.section {
            Section::Pgbouncer => self.name.to_owned(),
            Section::Underpass => format!("underpass.{}", self.name),
        }
    }

    /// The value in `config` as SHOW CONFIG prints it; `None` is null.
    pub fn show(&self, config: &Config) -> Option<String> {
        (self.get)(config).or_else(|| self.default.map(|_| String::new()))
    }
}

/// Rows are unique by section and name.
impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.section == other.section && self.name == other.name
    }
}

impl Eq for Key {}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Key({}/{})", self.section.as_str(), self.name)
    }
}

/// Makes a struct with one public field per key, its defaults, and the static rows of the table.
///
/// `access` names two functions from a [`Config`] to the struct, shared and mutable. Each key reads
/// `name: Type = default, Change [, attribute];` with its documentation above it.
macro_rules! keys {
    (
        $(#[$meta:meta])*
        struct $name:ident, rows $rows:ident, section $section:ident, access ($get:path, $get_mut:path);
        also { $($(#[$emeta:meta])* $extra:ident: $ety:ty,)* }
        $(group $group:literal {
            $($(#[doc = $doc:literal])+ $key:ident: $ty:ty = $default:expr, $change:ident $(, $attr:ident $(= $note:literal)?)?;)+
        })+
    ) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq)]
        pub struct $name {
            $($($(#[doc = $doc])+ pub $key: $ty,)+)+
            $($(#[$emeta])* pub $extra: $ety,)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self {
                    $($($key: $crate::key::parse_default(stringify!($key), $default),)+)+
                    $($extra: Default::default(),)*
                }
            }
        }

        pub(crate) static $rows: &[$crate::key::Key] = &[
            $($($crate::key::Key {
                name: stringify!($key),
                section: $crate::key::Section::$section,
                group: $group,
                value_type: <$ty as $crate::value::Value>::TYPE,
                default: $default,
                change: $crate::key::Change::$change,
                support: $crate::key::keys!(@support $($attr $(= $note)?)?),
                shown: $crate::key::keys!(@shown $($attr)?),
                doc: concat!($($doc, "\n"),+),
                get: |c| $crate::value::Value::show(&$get(c).$key),
                put: |c, text| { $get_mut(c).$key = $crate::value::Value::parse(text)?; Ok(()) },
                copy: |from, to| $get_mut(to).$key = $get(from).$key.clone(),
                same: |a, b| $get(a).$key == $get(b).$key,
            },)+)+
        ];
    };
    (@support) => { $crate::key::Support::Same };
    (@support differs = $note:literal) => { $crate::key::Support::Differs($note) };
    (@support no_effect = $note:literal) => { $crate::key::Support::NoEffect($note) };
    (@support hidden = $note:literal) => { $crate::key::Support::NoEffect($note) };
    (@support unsupported = $note:literal) => { $crate::key::Support::Unsupported($note) };
    (@shown hidden) => { false };
    (@shown $($other:ident)?) => { true };
}
pub(crate) use keys;

/// The value of a default. A default that does not parse is a mistake in the table, found by any test.
pub(crate) fn parse_default<T: crate::value::Value>(key: &str, text: Option<&str>) -> T {
    let text = text.unwrap_or(T::UNSET);
    T::parse(text).unwrap_or_else(|expected| panic!("default of {key}: {text:?} is not {expected}"))
}

/// All keys: PgBouncer's in alphabetical order, which is SHOW CONFIG's, then those of `[underpass]`.
pub fn all() -> &'static [&'static Key] {
    static ALL: std::sync::OnceLock<Vec<&'static Key>> = std::sync::OnceLock::new();
    ALL.get_or_init(|| {
        let mut pgbouncer: Vec<&Key> = crate::config::PGBOUNCER_KEYS.iter().collect();
        pgbouncer.sort_by_key(|k| k.name);
        let mut underpass: Vec<&Key> = crate::underpass::UNDERPASS_KEYS.iter().collect();
        underpass.sort_by_key(|k| k.name);
        pgbouncer.extend(underpass);
        pgbouncer
    })
}

/// The key `name` of `section`.
pub fn find(section: Section, name: &str) -> Option<&'static Key> {
    all().iter().copied().find(|k| k.section == section && k.name == name)
}

/// The key by the name SHOW CONFIG and SET use: `listen_port`, `underpass.threads`.
pub fn find_full(name: &str) -> Option<&'static Key> {
    match name.strip_prefix("underpass.") {
        Some(rest) => find(Section::Underpass, rest),
        None => find(Section::Pgbouncer, name),
    }
}

/// The candidate that is at most two edits away from `name`, for "did you mean".
pub(crate) fn nearest(name: &str, candidates: impl Iterator<Item = &'static str>) -> Option<&'static str> {
    // An absurdly long name is no typing mistake, and the distance is quadratic.
    if name.len() > 64 {
        return None;
    }
    candidates.map(|c| (distance(name, c), c)).filter(|(d, _)| *d <= 2).min().map(|(_, c)| c)
}

/// Levenshtein distance over bytes, one row at a time.
fn distance(a: &str, b: &str) -> usize {
    let b = b.as_bytes();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
