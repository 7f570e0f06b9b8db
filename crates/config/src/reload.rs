// SPDX-License-Identifier: Apache-2.0
//! SET, RELOAD and SHOW CONFIG.

use std::collections::BTreeSet;

use crate::config::Config;
use crate::error::ErrorKind;
use crate::key::{self, Change, Key, Section};
use crate::load::{origin_name, put};

/// One row of SHOW CONFIG; all columns are text, `None` is null.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigRow {
    /// Column `key`.
    pub key: String,
    /// Column `value`.
    pub value: Option<String>,
    /// Column `default`.
    pub default: Option<&'static str>,
    /// Column `changeable`: `yes` or `no`.
    pub changeable: bool,
}

/// What SET did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetOutcome {
    /// The value is in place.
    Changed,
    /// It had that value already.
    Unchanged,
    /// The key changes with a restart only; the value was checked and ignored. PgBouncer says nothing then.
    NeedsRestart,
}

/// A key whose value differs between two configurations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangedKey {
    /// The row of the table.
    pub key: &'static Key,
    /// The running value.
    pub old: Option<String>,
    /// The value in the file.
    pub new: Option<String>,
}

/// Names that were added, removed or changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamesDiff<T = String> {
    /// Only in the new configuration.
    pub added: Vec<T>,
    /// Only in the old one.
    pub removed: Vec<T>,
    /// In both, with other settings.
    pub changed: Vec<T>,
}

/// What RELOAD changes.
#[derive(Debug, Clone, PartialEq)]
pub struct ReloadDiff {
    /// The configuration to run with from now on: the new one, with restart-only keys at their running values.
    pub config: Config,
    /// Keys that change now.
    pub changed: Vec<ChangedKey>,
    /// Restart-only keys that differ in the file and keep their running value; log [`kept_warning`] for each.
    pub kept: Vec<ChangedKey>,
    /// `[databases]`; the fall-back is called `*`.
    pub databases: NamesDiff,
    /// Databases whose server connections must be closed when released: "database configuration changed".
    pub reconnect: Vec<String>,
    /// `[users]`.
    pub users: NamesDiff,
    /// `[peers]`.
    pub peers: NamesDiff<u16>,
}

impl ReloadDiff {
    /// Whether any key changed whose name starts with `prefix`: `client_tls`, `server_tls`, `log`, ...
    pub fn touches(&self, prefix: &str) -> bool {
        self.changed.iter().any(|c| c.key.name.starts_with(prefix))
    }
}

/// The log line for a key in [`ReloadDiff::kept`].
pub fn kept_warning(kept: &ChangedKey) -> String {
    let text = |v: &Option<String>| v.clone().unwrap_or_else(|| "(unset)".into());
    format!(
        "{} = {} in the file needs a restart; {} stays in effect",
        kept.key.full_name(),
        text(&kept.new),
        text(&kept.old)
    )
}

impl Config {
    /// SET: changes one key, by the name SHOW CONFIG prints. On error nothing changes.
    pub fn set(&mut self, name: &str, value: &str) -> Result<SetOutcome, ErrorKind> {
        let Some(key) = key::find_full(name) else {
            let nearest = key::nearest(name, key::all().iter().filter(|k| k.shown).map(|k| origin_name(k)));
            return Err(ErrorKind::UnknownKey {
                section: Section::Pgbouncer.as_str(),
                key: name.to_owned(),
                nearest,
            });
        };
        let mut changed = self.clone();
        put(key, &mut changed, value)?;
        if key.change == Change::Restart {
            return Ok(SetOutcome::NeedsRestart);
        }
        if (key.same)(self, &changed) {
            return Ok(SetOutcome::Unchanged);
        }
        *self = changed;
        Ok(SetOutcome::Changed)
    }

    /// The value of a key as SHOW CONFIG prints it; the outer `None`: no such key.
    pub fn get(&self, name: &str) -> Option<Option<String>> {
        key::find_full(name).map(|k| k.show(self))
    }

    /// SHOW CONFIG: PgBouncer's keys in alphabetical order, then `underpass.*`.
    pub fn show(&self) -> impl Iterator<Item = ConfigRow> {
        key::all().iter().filter(|k| k.shown).map(|key| ConfigRow {
            key: key.full_name(),
            value: key.show(self),
            default: key.default,
            changeable: key.change == Change::Reload,
        })
    }

    /// Compares the running configuration with the file's for RELOAD.
    pub fn diff_for_reload(old: &Config, new: &Config) -> ReloadDiff {
        let mut config = new.clone();
        let (mut changed, mut kept) = (Vec::new(), Vec::new());
        for &key in key::all() {
            if (key.same)(old, new) {
                continue;
            }
            let difference = || ChangedKey { key, old: key.show(old), new: key.show(new) };
            if stays_when_absent(key) && !new.is_set(key.name) {
                (key.copy)(old, &mut config);
            } else if key.change == Change::Restart {
                (key.copy)(old, &mut config);
                kept.push(difference());
            } else {
                changed.push(difference());
            }
        }
        let databases = Self::all_databases(old, new);
        let reconnect = databases
            .changed
            .iter()
            .filter(|name| match (old.entry(name), new.entry(name)) {
                (Some(old), Some(new)) => old.needs_reconnect(new),
                _ => false,
            })
            .cloned()
            .collect();
        let users =
            diff(old.users.iter(), |name| new.users.get(name), new.users.keys(), |a, b| a.same_settings(b));
        let peers =
            diff(old.peers.iter(), |id| new.peers.get(id), new.peers.keys(), |a, b| a.same_settings(b));
        ReloadDiff { config, changed, kept, databases, reconnect, users, peers }
    }

    /// An entry of `[databases]` by its name in the file, `*` included.
    fn entry(&self, name: &str) -> Option<&crate::database::Database> {
        if name == "*" { self.databases.fallback.as_ref() } else { self.databases.named.get(name) }
    }

    fn all_databases(old: &Config, new: &Config) -> NamesDiff {
        let names = |c: &Config| -> Vec<String> {
            c.databases
                .fallback
                .iter()
                .map(|d| d.name.clone())
                .chain(c.databases.named.keys().cloned())
                .collect()
        };
        let (old_names, new_names) = (names(old), names(new));
        let olds = old_names.iter().filter_map(|n| old.entry(n).map(|d| (n, d)));
        diff(olds, |name| new.entry(name), new_names.iter(), |a, b| a.same_settings(b))
    }
}

/// Keys that a command-line option or SET may have given: a file that does not name them leaves them alone, as in
/// PgBouncer, which never sets a null default.
fn stays_when_absent(key: &Key) -> bool {
    matches!(key.name, "user" | "verbose" | "conffile") && key.section == Section::Pgbouncer
}

fn diff<'a, K: Clone + Ord + 'a, V: 'a>(
    old: impl Iterator<Item = (&'a K, &'a V)>,
    in_new: impl Fn(&K) -> Option<&'a V>,
    new_keys: impl Iterator<Item = &'a K>,
    same: impl Fn(&V, &V) -> bool,
) -> NamesDiff<K> {
    let (mut known, mut removed, mut changed) = (BTreeSet::new(), Vec::new(), Vec::new());
    for (key, value) in old {
        known.insert(key);
        match in_new(key) {
            None => removed.push(key.clone()),
            Some(now) if !same(value, now) => changed.push(key.clone()),
            Some(_) => {}
        }
    }
    NamesDiff { added: new_keys.filter(|k| !known.contains(k)).cloned().collect(), removed, changed }
}
