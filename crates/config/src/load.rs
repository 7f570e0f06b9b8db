// SPDX-License-Identifier: Apache-2.0
//! From files to a [`Config`].

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::config::Config;
use crate::connstr::Reader;
use crate::database::Database;
use crate::error::{Error, ErrorKind, Errors, Location, Warning};
use crate::files::{Files, MemFiles, OsFiles, read_text};
use crate::ini::{Item, items};
use crate::key::{self, Key, Section, Support};
use crate::mirror::{Mirror, SECTION_PREFIX};
use crate::peer::Peer;
use crate::user::User;

/// Depth of `%include`, PgBouncer's MAX_INCLUDE.
const MAX_INCLUDE: u32 = 10;
/// Most errors reported; one broken line often makes many.
const MAX_ERRORS: usize = 100;

/// What loading gives: the configuration, and what its writer should know.
#[derive(Debug, Clone, PartialEq)]
pub struct Loaded {
    /// The values.
    pub config: Config,
    /// To be logged once each.
    pub warnings: Vec<Warning>,
}

impl Config {
    /// Reads the files at `paths`: the first is PgBouncer's ini, the others (`--overlay`) add to it and override it.
    ///
    /// All faults are collected. Relative paths, those of `%include` too, are relative to the working directory.
    pub fn load(paths: &[&Path]) -> Result<Loaded, Errors> {
        Self::load_with(&OsFiles, paths)
    }

    /// As [`load`](Self::load), from any [`Files`].
    pub fn load_with(files: &dyn Files, paths: &[&Path]) -> Result<Loaded, Errors> {
        let mut loader = Loader {
            files,
            config: Config::default(),
            warnings: Vec::new(),
            errors: Vec::new(),
            section: None,
            main_opened: false,
            overlay: false,
        };
        for (i, path) in paths.iter().enumerate() {
            loader.section = None;
            loader.overlay = i > 0;
            let name: Arc<str> = path.to_string_lossy().into();
            loader.file(path, &name, 0);
        }
        let first: Arc<str> = paths.first().map_or("".into(), |p| p.to_string_lossy()).into();
        loader.finish(paths.first().copied(), &first)
    }

    /// Reads one text as if it were the file `name`; nothing can be included.
    pub fn parse(name: &str, text: &str) -> Result<Loaded, Errors> {
        Self::load_with(&MemFiles::new([(name, text)]), &[Path::new(name)])
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Open {
    Keys(Section),
    /// By name.
    Mirror(String),
    Databases,
    Users,
    Peers,
}

struct Loader<'a> {
    files: &'a dyn Files,
    config: Config,
    warnings: Vec<Warning>,
    errors: Vec<Error>,
    section: Option<Open>,
    main_opened: bool,
    overlay: bool,
}

impl Loader<'_> {
    fn fail(&mut self, file: &Arc<str>, line: u32, kind: ErrorKind) {
        if self.errors.len() < MAX_ERRORS {
            self.errors.push(Error::new(file, line, kind));
        }
    }

    fn file(&mut self, path: &Path, name: &Arc<str>, depth: u32) {
        let text = match read_text(self.files, path, name) {
            Ok(text) => text,
            Err(error) => return self.fail(name, error.at.line, error.kind),
        };
        for item in items(&text) {
            // Ten files that include each other twice would be read a thousand times, so the first faults end it.
            if self.errors.len() >= MAX_ERRORS {
                return;
            }
            match item {
                Err((line, expected)) => self.fail(name, line, ErrorKind::Syntax { expected }),
                Ok((line, Item::Section(section))) => self.open(section, name, line),
                Ok((line, Item::Setting { key, value })) => self.setting(&key, value, name, line),
                Ok((line, Item::Include(_))) if depth >= MAX_INCLUDE => {
                    self.fail(name, line, ErrorKind::IncludeDepth);
                    return;
                }
                Ok((line, Item::Include(include))) => {
                    let before = self.errors.len();
                    self.file(Path::new(include), &Arc::from(include), depth + 1);
                    // The name of an unreadable file alone does not say who wanted it.
                    if let [error] = &mut self.errors[before..]
                        && let ErrorKind::Unreadable { reason } = &mut error.kind
                        && error.at.file.as_ref() == include
                    {
                        reason.push_str(&format!(" (included from {name}:{line})"));
                    }
                    if self.errors.iter().any(|e| e.kind == ErrorKind::IncludeDepth) {
                        return;
                    }
                }
            }
        }
    }

    fn open(&mut self, section: &str, file: &Arc<str>, line: u32) {
        self.section = match section {
            "pgbouncer" => {
                if self.main_opened && !self.overlay {
                    self.reset_main(&Location::new(file, line));
                }
                self.main_opened = true;
                Some(Open::Keys(Section::Pgbouncer))
            }
            "underpass" => Some(Open::Keys(Section::Underpass)),
            "databases" => Some(Open::Databases),
            "users" => Some(Open::Users),
            "peers" => Some(Open::Peers),
            _ if section.starts_with(SECTION_PREFIX) => {
                let name = &section[SECTION_PREFIX.len()..];
                match Mirror::new(name, Location::new(file, line)) {
                    // An overlay may add to a section that the ini has.
                    Ok(mirror) => drop(self.config.mirrors.entry(name.to_owned()).or_insert(mirror)),
                    Err(kind) => self.fail(file, line, kind),
                }
                Some(Open::Mirror(name.to_owned()))
            }
            _ => {
                // What follows belongs to the unknown section; one error says it all.
                self.section = None;
                return self.fail(file, line, ErrorKind::UnknownSection { section: section.to_owned() });
            }
        };
    }

    /// PgBouncer fills in the defaults whenever `[pgbouncer]` begins, so a second one takes back what the first set,
    /// except keys whose default is null. Measured with 1.18; a file that relies on it must mean the same here.
    fn reset_main(&mut self, at: &Location) {
        let defaults = Config::default();
        let mut lost = Vec::new();
        for key in key::all().iter().filter(|k| k.section == Section::Pgbouncer && k.default.is_some()) {
            (key.copy)(&defaults, &mut self.config);
            if self.config.origins.remove(key.name).is_some() {
                lost.push(key.name);
            }
        }
        if !lost.is_empty() {
            self.warnings.push(Warning {
                at: at.clone(),
                text: format!(
                    "a further [pgbouncer] section sets all keys back to their defaults, as in PgBouncer: {}; join the sections",
                    lost.join(", ")
                ),
            });
        }
    }

    fn setting(&mut self, name: &str, value: &str, file: &Arc<str>, line: u32) {
        let Some(section) = self.section.clone() else {
            // After an unknown section its settings were already accounted for.
            if !self.errors.iter().any(|e| matches!(e.kind, ErrorKind::UnknownSection { .. })) {
                self.fail(file, line, ErrorKind::NoSection { key: name.to_owned() });
            }
            return;
        };
        let at = Location::new(file, line);
        let result = match section {
            Open::Keys(section) => self.key(section, name, value, at),
            // A section whose own name is wrong has been reported.
            Open::Mirror(mirror) => {
                self.config.mirrors.get_mut(&mirror).map_or(Ok(()), |mirror| mirror.set(name, value))
            }
            _ => self.entry(section, name, value, at),
        };
        if let Err(kind) = result {
            self.fail(file, line, kind);
        }
    }

    fn key(&mut self, section: Section, name: &str, value: &str, at: Location) -> Result<(), ErrorKind> {
        let Some(key) = key::find(section, name) else {
            let names = key::all().iter().filter(|k| k.section == section && k.shown).map(|k| k.name);
            let nearest = key::nearest(name, names);
            return Err(ErrorKind::UnknownKey { section: section.as_str(), key: name.to_owned(), nearest });
        };
        put(key, &mut self.config, value)?;
        self.config.origins.insert(origin_name(key), at);
        Ok(())
    }

    fn entry(&mut self, section: Open, name: &str, value: &str, at: Location) -> Result<(), ErrorKind> {
        let section_name = match section {
            Open::Databases => "databases",
            Open::Users => "users",
            _ => "peers",
        };
        let mut reader = Reader { section: section_name, at, warnings: &mut self.warnings };
        match section {
            Open::Databases => {
                let db = Database::parse(name, value, &mut reader)?;
                if name == "*" {
                    self.config.databases.fallback = Some(db);
                } else {
                    self.config.databases.named.insert(name.to_owned(), db);
                }
            }
            Open::Users => {
                let user = User::parse(name, value, &mut reader)?;
                self.config.users.insert(name.to_owned(), user);
            }
            _ => {
                let peer = Peer::parse(name, value, &mut reader)?;
                self.config.peers.insert(peer.id, peer);
            }
        }
        Ok(())
    }

    fn finish(mut self, first: Option<&Path>, name: &Arc<str>) -> Result<Loaded, Errors> {
        if !self.main_opened && self.errors.is_empty() {
            self.fail(name, 0, ErrorKind::NoMainSection);
        }
        let mirrors: Vec<_> =
            self.config.mirrors.values().map(|mirror| (mirror.at.clone(), mirror.clone())).collect();
        for (at, mirror) in mirrors {
            for (key, missing) in
                [("databases", mirror.databases.is_empty()), ("host", mirror.host.is_none())]
            {
                if missing {
                    let section = format!("{SECTION_PREFIX}{}", mirror.name);
                    self.fail(&at.file, at.line, ErrorKind::MissingKey { section, key });
                }
            }
        }
        if !self.errors.is_empty() {
            return Err(Errors(self.errors));
        }
        if !self.config.is_set("conffile") {
            self.config.conffile = first.map(Path::to_path_buf);
        }
        self.warnings.extend(no_effect(&self.config));
        Ok(Loaded { config: self.config, warnings: self.warnings })
    }
}

/// Sets a key, or says what is wrong.
pub(crate) fn put(key: &Key, config: &mut Config, value: &str) -> Result<(), ErrorKind> {
    if let Support::Unsupported(next) = key.support
        && !value.is_empty()
    {
        return Err(ErrorKind::Unsupported { what: key.name.to_owned(), next });
    }
    if key.name == "auth_type" && ["ldap", "pam"].iter().any(|m| value.eq_ignore_ascii_case(m)) {
        return Err(ErrorKind::Unsupported {
            what: format!("auth_type = {value}"),
            next: "use scram-sha-256 (with auth_file or auth_query), cert or hba",
        });
    }
    (key.put)(config, value).map_err(|expected| ErrorKind::InvalidValue {
        key: key.full_name(),
        value: value.to_owned(),
        expected,
    })
}

/// The name under which `origins` knows a key; static, so looking up allocates nothing.
pub(crate) fn origin_name(key: &'static Key) -> &'static str {
    static NAMES: std::sync::OnceLock<BTreeMap<&'static str, String>> = std::sync::OnceLock::new();
    match key.section {
        Section::Pgbouncer => key.name,
        Section::Underpass => {
            let names = NAMES.get_or_init(|| {
                let ours = key::all().iter().filter(|k| k.section == Section::Underpass);
                ours.map(|k| (k.name, k.full_name())).collect()
            });
            names.get(key.name).map_or(key.name, String::as_str)
        }
    }
}

/// One warning for each key without effect that is not at its default.
fn no_effect(config: &Config) -> Vec<Warning> {
    let defaults = Config::default();
    let set = key::all().iter().filter(|k| !(k.same)(config, &defaults));
    set.filter_map(|key| {
        let Support::NoEffect(note) = key.support else { return None };
        let at = config.origins.get(origin_name(key))?;
        Some(Warning { at: at.clone(), text: format!("{} has no effect in Underpass: {note}", key.name) })
    })
    .collect()
}
