// SPDX-License-Identifier: Apache-2.0
//! The distinct statements of a trace, each classified once.
//!
//! What a *function* does the text cannot tell: a function that is not known to be harmless may write, and read-only mode
//! therefore also has the server refuse writes (`default_transaction_read_only`).

use foldhash::HashMap;
use underpass_sql::{Class, Summary, hash_fingerprint, normalize, parse_bytes};
use underpass_trace::block::{self, Effect};
use underpass_trace::{Protocol, fold, strip_literals};

use crate::calls::Calls;

/// A text, classified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    /// libpg_query's fingerprint, 16 hexadecimal digits; texts that differ in literals only have the same.
    pub fingerprint: String,
    /// The text with its literals replaced by `$1`, `$2`, ..., and without comments, cut to 500 characters. A text that cannot be parsed: its
    /// shape.
    pub label: String,
    /// The first such text, whole; empty if it is longer than is remembered, or not UTF-8.
    pub sample: String,
    /// What it does. A text that cannot be parsed may do anything.
    pub summary: Summary,
    /// How often the server asks for data: COPY FROM STDIN.
    pub copies_in: u32,
    /// What it does first to a transaction block.
    pub block: Option<Block>,
    /// It calls functions about the captured server itself, such as `pg_terminate_backend`.
    pub administers: bool,
    /// It makes the session the login user's again.
    pub resets_user: bool,
}

/// What a statement does to a transaction block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Block {
    /// BEGIN, START TRANSACTION.
    Begins,
    /// COMMIT, ROLLBACK, PREPARE TRANSACTION, and other words for them.
    Ends,
}

impl Block {
    /// By the words of a statement.
    pub(crate) fn of(words: &[&str]) -> Option<Self> {
        match Effect::of(words) {
            Effect::Begins => Some(Self::Begins),
            Effect::Ends { .. } | Effect::Chains { .. } => Some(Self::Ends),
            Effect::Resumes | Effect::Nothing => None,
        }
    }
}

/// Classifies texts and remembers the answers.
#[derive(Debug, Default)]
pub struct Classifier {
    protocol: Protocol,
    /// By text; the values index `statements`.
    texts: HashMap<Vec<u8>, u32>,
    /// Fingerprints by text without literals.
    by_shape: HashMap<Vec<u8>, String>,
    /// By fingerprint and class.
    groups: HashMap<(String, Class, bool), u32>,
    statements: Vec<Statement>,
}

/// Texts that the classifier remembers word for word; above that only fingerprints are, which are bounded by the program
/// that sent them.
const TEXTS_MAX: usize = 100_000;
/// Shapes that are remembered; after that the memory is emptied. A workload has hundreds.
const SHAPES_MAX: usize = 50_000;
/// Longest text that is remembered word for word, bytes.
const TEXT_LEN_MAX: usize = 4096;
/// Longest label, characters.
const LABEL_CHARS_MAX: usize = 500;

impl Classifier {
    /// For statements of this protocol.
    pub fn new(protocol: Protocol) -> Self {
        Self { protocol, ..Self::default() }
    }

    /// The index of a text's statement, for [`get`](Self::get). Texts that differ in literals only share one.
    pub fn classify(&mut self, text: &[u8]) -> u32 {
        if let Some(&index) = self.texts.get(text) {
            return index;
        }
        let mut statement = match self.protocol {
            Protocol::Postgres => {
                let mut statement = classify(&String::from_utf8_lossy(text));
                self.unite(text, &mut statement.fingerprint);
                statement
            }
            Protocol::Mysql => classify_mysql(text),
        };
        if std::str::from_utf8(text).is_err() {
            statement.sample.clear();
        }
        let key = (statement.fingerprint.clone(), statement.summary.class, statement.summary.may_write);
        let next = self.statements.len() as u32;
        let index = *self.groups.entry(key).or_insert(next);
        if index == next {
            self.statements.push(statement);
        }
        if self.texts.len() < TEXTS_MAX && text.len() <= TEXT_LEN_MAX {
            self.texts.insert(text.to_vec(), index);
        }
        index
    }

    /// Gives texts that differ in literals only the fingerprint of the first of them: libpg_query's tells them apart in some utility
    /// statements (COMMENT, CREATE ROLE).
    fn unite(&mut self, text: &[u8], fingerprint: &mut String) {
        if self.by_shape.len() >= SHAPES_MAX {
            self.by_shape.clear();
        }
        let first = self.by_shape.entry(strip_literals(text, Protocol::Postgres));
        fingerprint.clone_from(first.or_insert_with(|| fingerprint.clone()));
    }

    /// What `classify` found. Panics on an index it never gave.
    pub fn get(&self, index: u32) -> &Statement {
        &self.statements[index as usize]
    }

    /// All distinct statements so far.
    pub fn statements(&self) -> &[Statement] {
        &self.statements
    }
}

fn classify(text: &str) -> Statement {
    let shape = shape(text.as_bytes());
    let mut summary = Summary::of(text).unwrap_or_else(|_| Summary {
        class: Class::Write,
        may_write: true,
        volatile: Vec::new(),
        creates: Vec::new(),
        alters: Vec::new(),
        defines: false,
        makes_anything: false,
        relations: Vec::new(),
        extensions: Vec::new(),
        notifies: false,
    });
    let (fingerprint, label) = match parse_bytes(text.as_bytes(), underpass_sql::Statement::parse) {
        Ok(parsed) => (parsed.fingerprint, parsed.text),
        Err(_) => (hash_fingerprint(shape.as_bytes()), shape.clone()),
    };
    let normalized = normalize(text).unwrap_or_else(|_| text.to_owned());
    summary.may_write |= writes_behind(&shape, &normalized, summary.class);
    // The summary asks for the kind of statement, and the server refuses these calls to nobody.
    let calls = Calls::of(&shape);
    if calls.write {
        summary.class = Class::Write;
        summary.may_write = true;
    } else if calls.set_anything {
        summary.class = summary.class.min(Class::LiftsReadOnly);
    }
    Statement {
        fingerprint: format!("{fingerprint:016x}"),
        label: shorten(&label),
        sample: sample(text),
        summary,
        copies_in: statements(&shape, Protocol::Postgres).filter(|words| copies_in(words)).count() as u32,
        block: statements(&shape, Protocol::Postgres).find_map(|words| Block::of(&words)),
        administers: calls.administer,
        resets_user: statements(&shape, Protocol::Postgres).any(|words| resets_user(&words)),
    }
}

/// Whether a statement makes a session the login user's again.
fn resets_user(words: &[&str]) -> bool {
    match words {
        // RESET ALL leaves the user and the role.
        ["discard", "all"] | ["reset", "session_authorization"] => true,
        ["reset", "session", "authorization"] => true,
        ["set", "session" | "local", rest @ ..] | ["set", rest @ ..] => matches!(
            rest,
            ["session", "authorization", "default"]
                | ["authorization", "default"]
                | ["session_authorization", "to", "default"]
                | ["session_authorization", "default"]
        ),
        _ => false,
    }
}

/// Whether something in a text may write that is not of the class of the whole: that is the class of one of its statements, and what EXECUTE and
/// COMMIT PREPARED do is not in their own words. `normalized` is what PostgreSQL's grammar still reads, without the literals of plans.
fn writes_behind(shape: &str, normalized: &str, class: Class) -> bool {
    if !matches!(class, Class::Transaction | Class::Session | Class::LiftsReadOnly) {
        return false;
    }
    let told = |words: Vec<&str>| match words[..] {
        ["prepare" | "deallocate", ..] => false,
        ["commit" | "rollback", "prepared", ..] => true,
        _ => words.contains(&"execute"),
    };
    if statements(shape, Protocol::Postgres).any(told) {
        return true;
    }
    // What is cut at a semicolon of a name or comment is no statement, and may write.
    let reads = |text: &str| Summary::of(text).is_ok_and(|summary| !summary.may_write);
    let several = statements(shape, Protocol::Postgres).nth(1).is_some();
    normalized.split(';').any(|one| {
        let shape = self::shape(one.as_bytes());
        let declares =
            statements(&shape, Protocol::Postgres).next().is_some_and(|words| words[0] == "declare");
        match declares {
            // What a cursor reads is behind FOR.
            true => {
                let from = one.to_ascii_lowercase().find(" for ").map(|at| at + " for ".len());
                !from.and_then(|from| one.get(from..)).is_some_and(reads)
            }
            false => several && !reads(one),
        }
    })
}

/// A text of PostgreSQL in lower case, without its literals and comments.
pub(crate) fn shape(text: &[u8]) -> String {
    String::from_utf8_lossy(&fold(&strip_literals(text, Protocol::Postgres))).into_owned()
}

/// The words of each statement of a text without literals.
pub(crate) fn statements(shape: &str, protocol: Protocol) -> impl Iterator<Item = Vec<&str>> {
    block::parts(shape, protocol).map(block::words).filter(|words| !words.is_empty())
}

/// Whether it is COPY FROM STDIN. To the grammar STDOUT is the same there.
fn copies_in(words: &[&str]) -> bool {
    words[0] == "copy"
        && words.windows(2).any(|pair| pair[0] == "from" && ["stdin", "stdout"].contains(&pair[1]))
}

fn classify_mysql(text: &[u8]) -> Statement {
    let (shape, summary) = crate::mysql::classify(text);
    Statement {
        fingerprint: format!("{:016x}", hash_fingerprint(shape.as_bytes())),
        label: shorten(&shape),
        sample: sample(&String::from_utf8_lossy(text)),
        summary,
        // Local files are asked for by another protocol.
        copies_in: 0,
        block: statements(&shape, Protocol::Mysql).find_map(|words| Block::of(&words)),
        administers: crate::mysql::administers(&shape),
        resets_user: false,
    }
}

fn sample(text: &str) -> String {
    if text.len() <= TEXT_LEN_MAX { text.to_owned() } else { String::new() }
}

fn shorten(text: &str) -> String {
    let text = text.trim();
    match text.char_indices().nth(LABEL_CHARS_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_do_not_make_another_statement() {
        let mut classifier = Classifier::default();
        let one = classifier.classify(b"select * from t where a = 1");
        let two = classifier.classify(b"select * from t where a = 2");
        let other = classifier.classify(b"select * from t where b = 2");
        assert_eq!(one, two);
        assert_ne!(one, other);
        assert_eq!(classifier.get(one).label, "select * from t where a = $1");
        assert_eq!(classifier.statements().len(), 2);
    }

    #[test]
    fn no_label_has_a_literal_of_a_client_and_none_makes_a_group() {
        for (form, label) in [
            ("create role r login password '{}'", "create role r login password $1"),
            ("set app.tenant to '{}'", "set app.tenant to $1"),
            ("comment on table t is '{}' -- {}", "comment on table t is $1"),
            ("notify c, '{}'", "notify c, $1"),
            ("execute p('{}', 4711)", "execute p($1, $2)"),
            ("do $${}$$", "do $1"),
            ("/* {} */ select 1", "select $1"),
            ("selekt '{}' /* {} */", "selekt ?"),
        ] {
            let mut classifier = Classifier::default();
            let index = classifier.classify(form.replace("{}", "hidden").as_bytes());
            assert_eq!(classifier.get(index).label, label);
            assert_eq!(classifier.classify(form.replace("{}", "other").as_bytes()), index, "{form}");
        }
    }

    #[test]
    fn texts_of_another_encoding_or_with_nul_are_no_panic() {
        let mut classifier = Classifier::default();
        for text in [&b"select '\xe9'"[..], b"sel\0ect", b"\xff\xff", b"select $$"] {
            let index = classifier.classify(text);
            assert!(!classifier.get(index).fingerprint.is_empty());
            // It is asked for on the target, where it would be another text.
            assert_eq!(classifier.get(index).sample.is_empty(), std::str::from_utf8(text).is_err());
        }
    }

    #[test]
    fn what_is_copied_in_is_counted() {
        for (text, count) in [
            ("copy t from stdin", 1),
            ("/* load */ COPY \"T\" (a, b)\nFROM STDIN WITH (format csv)", 1),
            ("begin; copy t from stdin; copy u from stdin; commit", 2),
            ("copy t from '/tmp/stdin'", 0),
            ("copy t from program 'cat'", 0),
            ("copy t to stdout", 0),
            ("select 'copy t from stdin', $$; copy t from stdin$$", 0),
        ] {
            assert_eq!(classify(text).copies_in, count, "{text}");
        }
    }

    #[test]
    fn what_cannot_be_parsed_may_write() {
        let summary = classify("not a statement at all").summary;
        assert!(summary.class == Class::Write && summary.may_write);
    }
}
