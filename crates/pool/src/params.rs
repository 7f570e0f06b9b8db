// SPDX-License-Identifier: Apache-2.0
//! Reported parameters (`GUC_REPORT`): what a server said each has, what a client wants each to have, and the shortest way from one to
//! the other. PostgreSQL manual, 55.2.7 "Asynchronous Operations": ParameterStatus.

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::{Arc, Weak};

use foldhash::fast::RandomState;

/// The order of two names, whose case does not matter.
fn order(a: &str, b: &str) -> Ordering {
    let different = a.bytes().zip(b.bytes()).find(|(a, b)| a != b && !a.eq_ignore_ascii_case(b));
    match different {
        Some((a, b)) => a.to_ascii_lowercase().cmp(&b.to_ascii_lowercase()),
        None => a.len().cmp(&b.len()),
    }
}

/// A set of parameters, sorted by lower-case name. Equal sets are shared: an idle client costs a pointer. Sets that differ share what they
/// have in common: where sessions are reset between clients, a parameter changes twice for each of them.
#[derive(Debug, Clone, Default)]
pub struct ParameterSet {
    entries: Vec<(Arc<str>, Arc<str>)>,
    /// Given by [`ParameterTable::intern`], 0 before.
    fingerprint: u32,
}

impl PartialEq for ParameterSet {
    fn eq(&self, other: &Self) -> bool {
        self.entries == other.entries
    }
}

impl Eq for ParameterSet {}

impl Hash for ParameterSet {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.entries.hash(state);
    }
}

/// Parameters that are reported but cannot be set by a session: differences in them are the server's own, or follow from others
/// (`is_superuser` from `session_authorization`).
const NOT_SETTABLE: [&str; 7] = [
    "in_hot_standby",
    "integer_datetimes",
    "is_superuser",
    "server_encoding",
    "server_version",
    "system_identifier",
    "default_transaction_read_only_by_recovery",
];

/// Who a session acts as. The one it has logged in as stands in a set as the empty string: what is called `app` on one server may be called otherwise on
/// another, on a mirror or after a RELOAD, and nobody but the client's own `SET SESSION AUTHORIZATION` asks for somebody else.
pub const SESSION_AUTHORIZATION: &str = "session_authorization";

/// Whether `name` is one that a session can set.
pub fn is_settable(name: &str) -> bool {
    !NOT_SETTABLE.iter().any(|fixed| fixed.eq_ignore_ascii_case(name))
}

impl ParameterSet {
    fn position(&self, name: &str) -> Result<usize, usize> {
        self.entries.binary_search_by(|(have, _)| order(have, name))
    }

    /// The value of `name`, whose case does not matter.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.position(name).ok().map(|at| &*self.entries[at].1)
    }

    /// Sets `name`; true if that changed anything. The spelling of the first setter is kept.
    pub fn set(&mut self, name: &str, value: &str) -> bool {
        match self.position(name) {
            Ok(at) if *self.entries[at].1 == *value => false,
            Ok(at) => {
                self.entries[at].1 = value.into();
                true
            }
            Err(at) => {
                self.entries.insert(at, (name.into(), value.into()));
                true
            }
        }
    }

    /// All parameters, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.entries.iter().map(|(name, value)| (&**name, &**value))
    }

    /// Equal for equal sets and for no others, once interned: what a kernel lane compares.
    pub fn fingerprint(&self) -> u32 {
        self.fingerprint
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether a session with the values of `other` is what this set asks for, as far as can be compared.
    pub fn is_settled_by(&self, other: &ParameterSet) -> bool {
        self.iter().all(|(name, value)| other.get(name) == Some(value) || !is_settable(name))
    }

    /// The statements that take a session from `self` to `wanted`, all in one simple query: one round trip, or none (`None`). Only
    /// parameters that the server reports are compared; others cannot be known.
    pub fn restore_query(&self, wanted: &ParameterSet) -> Option<Restore> {
        let (mut query, mut cannot_fail) = (String::new(), true);
        let takes_escapes = self.takes_escapes();
        let encoding = wanted.get("client_encoding").or(self.get("client_encoding"));
        let is_encoding_other = self.get("client_encoding") != encoding;
        for (name, value) in wanted.iter() {
            let hex = hex_of_raw(value);
            let differs = |have| have != value || hex.is_some() && is_encoding_other;
            if self.get(name).is_some_and(differs) && is_settable(name) {
                // PostgreSQL takes any string for it, if its bytes are characters: these are in every encoding.
                cannot_fail &=
                    name.eq_ignore_ascii_case("application_name") && value.is_ascii() && hex.is_none();
                // search_path is reported as a list of quoted identifiers. SET would take the whole, as a literal, for one name, and without quotes
                // run whatever else a client put there.
                if name.eq_ignore_ascii_case(SESSION_AUTHORIZATION) && value.is_empty() {
                    query.push_str("SET SESSION AUTHORIZATION DEFAULT;");
                } else if let Some(hex) = hex {
                    query.push_str("SELECT pg_catalog.set_config(");
                    quote_literal(&mut query, name, takes_escapes);
                    query.push_str(",pg_catalog.convert_from(pg_catalog.decode('");
                    query.push_str(hex);
                    query.push_str("','hex'),");
                    quote_literal(&mut query, encoding.unwrap_or("UTF8"), takes_escapes);
                    query.push_str("),false);");
                } else if name.eq_ignore_ascii_case("search_path") {
                    query.push_str("SELECT pg_catalog.set_config('search_path',");
                    quote_literal(&mut query, value, takes_escapes);
                    query.push_str(",false);");
                } else {
                    query.push_str("SET ");
                    quote_identifier(&mut query, name);
                    query.push_str(" = ");
                    quote_literal(&mut query, value, takes_escapes);
                    query.push(';');
                }
            }
        }
        (!query.is_empty()).then_some(Restore { query, cannot_fail })
    }

    /// Whether a session with these takes `\u` of any character in a literal: older servers do in UTF-8 alone, and none does where nothing is
    /// converted (`pg_unicode_to_server` has no conversion to these two).
    fn takes_escapes(&self) -> bool {
        let major = |version: &str| version.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok();
        let Some(encoding) = self.get("server_encoding") else { return false };
        let is = |name: &str| encoding.eq_ignore_ascii_case(name);
        let is_new = self.get("server_version").and_then(major).is_some_and(|major: u32| major >= 13);
        is("UTF8") || is_new && !encoding.is_empty() && !is("SQL_ASCII") && !is("MULE_INTERNAL")
    }
}

/// Between the text and the bytes, in hexadecimal, of a value that is not UTF-8. Values of others have none.
const RAW_MARK: char = '\0';

/// The value of a parameter as a server reports it, in the session's `client_encoding`. One that is not UTF-8 equals none that is, and no
/// other: a session that has it is not taken for one that has nothing set.
pub fn from_wire(value: &[u8]) -> Cow<'_, str> {
    match String::from_utf8_lossy(value) {
        Cow::Borrowed(text) if !text.contains(RAW_MARK) => Cow::Borrowed(text),
        text => {
            let mut text = text.replace(RAW_MARK, "");
            text.push(RAW_MARK);
            value.iter().for_each(|byte| text.push_str(&format!("{byte:02x}")));
            Cow::Owned(text)
        }
    }
}

/// The bytes that [`from_wire`] was given.
pub fn to_wire(value: &str) -> Cow<'_, [u8]> {
    let Some(hex) = hex_of_raw(value) else { return Cow::Borrowed(value.as_bytes()) };
    let digit = |digit: u8| char::from(digit).to_digit(16).unwrap_or(0) as u8;
    let pairs = hex.as_bytes().chunks(2);
    Cow::Owned(pairs.map(|pair| pair.iter().fold(0, |byte, &d| byte << 4 | digit(d))).collect())
}

/// Of a value that is not UTF-8.
fn hex_of_raw(value: &str) -> Option<&str> {
    let (_, hex) = value.split_once(RAW_MARK)?;
    hex.bytes().all(|byte| byte.is_ascii_hexdigit()).then_some(hex)
}

/// See [`ParameterSet::restore_query`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restore {
    /// What to send.
    pub query: String,
    /// Only `application_name` changes, to something that PostgreSQL always takes: what follows need not wait for the answer.
    pub cannot_fail: bool,
}

/// Appends `name` as a quoted identifier.
pub fn quote_identifier(out: &mut String, name: &str) {
    out.push('"');
    for c in name.chars() {
        if c == '"' {
            out.push('"');
        }
        out.push(c);
    }
    out.push('"');
}

/// Appends `value` as a literal that reads the same whatever `standard_conforming_strings` is, and with `takes_escapes` (PostgreSQL manual,
/// 4.1.2.2) whatever `client_encoding`, which is another client's still when this is read.
fn quote_literal(out: &mut String, value: &str, takes_escapes: bool) {
    if value.contains('\\') || takes_escapes && !value.is_ascii() {
        out.push_str(" E");
    }
    out.push('\'');
    for c in value.chars() {
        match c {
            '\'' | '\\' => out.extend([c, c]),
            '\u{10000}'.. if takes_escapes => out.push_str(&format!("\\U{:08x}", u32::from(c))),
            '\u{80}'.. if takes_escapes => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            _ => out.push(c),
        }
    }
    out.push('\'');
}

/// A set that is shared until somebody changes it.
pub type SharedParameters = Arc<ParameterSet>;

/// All sets in use, each once.
#[derive(Debug, Default)]
pub struct ParameterTable {
    sets: HashMap<u64, Vec<Weak<ParameterSet>>, RandomState>,
    hasher: RandomState,
    sweep_at: usize,
    last_fingerprint: u32,
}

impl ParameterTable {
    /// The shared copy of `set`.
    pub fn intern(&mut self, mut set: ParameterSet) -> SharedParameters {
        let hash = self.hasher.hash_one(&set);
        let entries = self.sets.entry(hash).or_default();
        if let Some(found) = entries.iter().filter_map(Weak::upgrade).find(|known| **known == set) {
            return found;
        }
        // 32 bits wrap after four thousand million distinct sets.
        self.last_fingerprint = self.last_fingerprint.wrapping_add(1);
        set.fingerprint = self.last_fingerprint;
        let shared = Arc::new(set);
        // A set that comes and goes, with nobody else's beside it, would leave one behind each time: the sweep counts hashes.
        entries.retain(|entry| entry.strong_count() > 0);
        entries.push(Arc::downgrade(&shared));
        if self.sets.len() >= self.sweep_at.max(256) {
            self.sets.retain(|_, entries| {
                entries.retain(|entry| entry.strong_count() > 0);
                !entries.is_empty()
            });
            self.sweep_at = self.sets.len() * 2;
        }
        shared
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(entries: &[(&str, &str)]) -> ParameterSet {
        let mut set = ParameterSet::default();
        entries.iter().for_each(|(name, value)| {
            set.set(name, value);
        });
        set
    }

    fn query(have: &ParameterSet, wanted: &ParameterSet) -> Option<String> {
        have.restore_query(wanted).map(|restore| restore.query)
    }

    #[test]
    fn only_an_ascii_application_name_cannot_fail() {
        let server = set(&[("application_name", ""), ("TimeZone", "UTC")]);
        let cannot_fail = |wanted: &[(&str, &str)]| server.restore_query(&set(wanted)).unwrap().cannot_fail;
        assert!(cannot_fail(&[("application_name", "it's \\ \"x\"")]));
        assert!(cannot_fail(&[("Application_Name", "a"), ("TimeZone", "UTC")]));
        assert!(!cannot_fail(&[("application_name", "é")]));
        assert!(!cannot_fail(&[("TimeZone", "CET")]));
        assert!(!cannot_fail(&[("application_name", "a"), ("TimeZone", "CET")]));
    }

    #[test]
    fn equal_sets_are_one() {
        let mut table = ParameterTable::default();
        let first = table.intern(set(&[("TimeZone", "UTC")]));
        assert!(Arc::ptr_eq(&first, &table.intern(set(&[("TimeZone", "UTC")]))));
        assert!(!Arc::ptr_eq(&first, &table.intern(set(&[("TimeZone", "CET")]))));
        assert!(first.is_settled_by(&set(&[("timezone", "UTC"), ("is_superuser", "on")])));
    }

    #[test]
    fn a_set_that_comes_and_goes_leaves_nothing_behind() {
        let mut table = ParameterTable::default();
        (0..100_000).for_each(|_| drop(table.intern(set(&[("TimeZone", "UTC")]))));
        assert_eq!(table.sets.values().map(Vec::len).sum::<usize>(), 1);
    }

    #[test]
    fn names_have_no_case() {
        let mut have = set(&[("TimeZone", "UTC")]);
        assert!(!have.set("timezone", "UTC"));
        assert!(have.set("TIMEZONE", "CET"));
        assert_eq!(have.iter().collect::<Vec<_>>(), [("TimeZone", "CET")]);
    }

    #[test]
    fn restores_only_what_differs_and_is_reported() {
        let server = set(&[
            ("TimeZone", "UTC"),
            ("DateStyle", "ISO, MDY"),
            ("server_version", "15"),
            ("application_name", ""),
        ]);
        let client = set(&[
            ("timezone", "UTC"),
            ("datestyle", "ISO, DMY"),
            ("server_version", "14"),
            ("extra_float_digits", "3"),
        ]);
        assert_eq!(query(&server, &client).as_deref(), Some("SET \"datestyle\" = 'ISO, DMY';"));
        assert_eq!(server.restore_query(&set(&[("TimeZone", "UTC")])), None);
    }

    #[test]
    fn characters_are_told_in_no_encoding_where_the_server_knows_them_so() {
        let wanted = set(&[("search_path", "caf\u{e9} \\ \u{1f600}")]);
        let asked = |version, encoding| {
            let server =
                set(&[("search_path", ""), ("server_version", version), ("server_encoding", encoding)]);
            query(&server, &wanted).unwrap()
        };
        let escaped = r"SELECT pg_catalog.set_config('search_path', E'caf\u00e9 \\ \U0001f600',false);";
        let plain = "SELECT pg_catalog.set_config('search_path', E'caf\u{e9} \\\\ \u{1f600}',false);";
        assert_eq!(asked("15.4 (Debian 15.4-1)", "LATIN1"), escaped);
        assert_eq!(asked("9.6.3", "UTF8"), escaped);
        assert_eq!(asked("12.17", "LATIN1"), plain);
        assert_eq!(asked("15.4", "SQL_ASCII"), plain);
        assert_eq!(asked("", ""), plain);
    }

    /// In a session whose `client_encoding` is LATIN1.
    #[test]
    fn a_value_that_is_not_utf_8_is_nobody_elses() {
        let latin = from_wire(b"caf\xe9");
        assert_eq!(*to_wire(&latin), *b"caf\xe9");
        assert_eq!(*to_wire(&from_wire("caf\u{e9}".as_bytes())), *"caf\u{e9}".as_bytes());
        assert_eq!(*to_wire(&from_wire(b"\0'")), *b"\0'");
        for name in [SESSION_AUTHORIZATION, "search_path", "application_name"] {
            let has = |value: &str, encoding| set(&[(name, value), ("client_encoding", encoding)]);
            let server = has(&latin, "LATIN1");
            let own = format!(
                "SELECT pg_catalog.set_config('{name}',\
                 pg_catalog.convert_from(pg_catalog.decode('636166e9','hex'),'LATIN1'),false);"
            );
            for other in ["", "public", "caf\u{e9}", &from_wire(b"caf\xe8")] {
                let other = has(other, "LATIN1");
                assert!(server.restore_query(&other).is_some(), "{name} is left to {other:?}");
                let back = other.restore_query(&server).unwrap();
                assert_eq!((&*back.query, back.cannot_fail), (&*own, false));
            }
            assert_eq!(server.restore_query(&server.clone()), None);
            // The same bytes are other characters there.
            assert!(query(&has(&latin, "LATIN2"), &server).unwrap().contains(&own));
        }
    }

    #[test]
    fn quotes_what_needs_quoting() {
        let server = set(&[("application_name", ""), ("search_path", "public")]);
        let client = set(&[("application_name", "it's \\ \"x\""), ("search_path", "\"$user\", public")]);
        assert_eq!(
            query(&server, &client).as_deref(),
            Some(
                "SET \"application_name\" =  E'it''s \\\\ \"x\"';\
                 SELECT pg_catalog.set_config('search_path','\"$user\", public',false);"
            )
        );
        let [joe, own] = ["joe", ""].map(|user| set(&[(SESSION_AUTHORIZATION, user)]));
        assert_eq!(query(&own, &joe).as_deref(), Some("SET \"session_authorization\" = 'joe';"));
        assert_eq!(query(&joe, &own).as_deref(), Some("SET SESSION AUTHORIZATION DEFAULT;"));
        let hostile = set(&[("search_path", "a; drop table t --'")]);
        assert_eq!(
            query(&server, &hostile).as_deref(),
            Some("SELECT pg_catalog.set_config('search_path','a; drop table t --''',false);")
        );
    }
}
