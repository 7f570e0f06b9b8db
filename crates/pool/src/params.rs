// SPDX-License-Identifier: Apache-2.0
//! Reported parameters (`GUC_REPORT`): what a server said each has, what a client wants each to have, and the shortest way from one to
//! the other. PostgreSQL manual, 55.2.7 "Asynchronous Operations": ParameterStatus.

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
        for (name, value) in wanted.iter() {
            if self.get(name).is_some_and(|have| have != value) && is_settable(name) {
                // PostgreSQL takes any string for it, if its bytes are characters: these are in every encoding.
                cannot_fail &= name.eq_ignore_ascii_case("application_name") && value.is_ascii();
                // search_path is reported as a list of quoted identifiers. SET would take the whole, as a literal, for one name, and without quotes
                // run whatever else a client put there.
                if name.eq_ignore_ascii_case(SESSION_AUTHORIZATION) && value.is_empty() {
                    query.push_str("SET SESSION AUTHORIZATION DEFAULT;");
                } else if name.eq_ignore_ascii_case("search_path") {
                    query.push_str("SELECT pg_catalog.set_config('search_path',");
                    quote_literal(&mut query, value);
                    query.push_str(",false);");
                } else {
                    query.push_str("SET ");
                    quote_identifier(&mut query, name);
                    query.push_str(" = ");
                    quote_literal(&mut query, value);
                    query.push(';');
                }
            }
        }
        (!query.is_empty()).then_some(Restore { query, cannot_fail })
    }
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

/// Appends `value` as a literal that reads the same whatever `standard_conforming_strings` is.
pub fn quote_literal(out: &mut String, value: &str) {
    if value.contains('\\') {
        out.push_str(" E");
    }
    out.push('\'');
    for c in value.chars() {
        if c == '\'' || c == '\\' {
            out.push(c);
        }
        out.push(c);
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
