// SPDX-License-Identifier: Apache-2.0
//! What a statement's text says about it: its fingerprint, whether it can change anything, whether it can be expected to
//! give the same answer twice.
//!
//! libpg_query is PostgreSQL's own grammar, so nothing here guesses at syntax. What a *function* does the text cannot
//! tell: a function that is not known to be harmless may write, and read-only mode therefore also has the server
//! refuse writes (`default_transaction_read_only`).

use std::collections::BTreeSet;

use foldhash::HashMap;

/// What kind of statement a text is. Of several statements in one text the first that applies, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Changes or locks data, definitions or settings of the server; or no parser understands it.
    Write,
    /// Lifts a read-only transaction or its default: `SET TRANSACTION READ WRITE`, `BEGIN READ WRITE`.
    LiftsReadOnly,
    /// BEGIN, COMMIT, ROLLBACK, SAVEPOINT and their like.
    Transaction,
    /// Touches only the session: SET, RESET, DISCARD, LISTEN, PREPARE, DEALLOCATE, cursors.
    Session,
    /// Reads.
    Read,
    /// No statement at all.
    Empty,
}

/// A text, classified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    /// libpg_query's fingerprint, 16 hexadecimal digits; texts that differ in literals only have the same.
    pub fingerprint: String,
    /// The text with its literals replaced by `$1`, `$2`, ..., cut to 500 characters.
    pub label: String,
    /// The first such text, whole; empty if it is longer than is remembered.
    pub sample: String,
    /// What it is.
    pub class: Class,
    /// Whether it can change something that other sessions see. A read that calls a function nobody knows can.
    pub may_write: bool,
    /// Functions in it whose result depends on more than the data: `random`, `now`, `nextval`.
    pub volatile: Vec<String>,
    /// Relations that it creates, without schema.
    pub creates: Vec<String>,
    /// Relations that it names, without schema.
    pub relations: Vec<String>,
    /// Whether it registers for notifications, or sends them.
    pub notifies: bool,
}

/// Classifies texts and remembers the answers.
#[derive(Debug, Default)]
pub struct Classifier {
    /// By text; the values index `statements`.
    texts: HashMap<Vec<u8>, u32>,
    /// By fingerprint and class.
    groups: HashMap<(String, Class, bool), u32>,
    statements: Vec<Statement>,
}

/// Texts that the classifier remembers word for word; above that only fingerprints are, which are bounded by the program
/// that sent them.
const TEXTS_MAX: usize = 100_000;
/// Longest text that is remembered word for word, bytes.
const TEXT_LEN_MAX: usize = 4096;
/// Longest label, characters.
const LABEL_CHARS_MAX: usize = 500;

impl Classifier {
    /// The index of a text's statement, for [`get`](Self::get). Texts that differ in literals only share one.
    pub fn classify(&mut self, text: &[u8]) -> u32 {
        if let Some(&index) = self.texts.get(text) {
            return index;
        }
        let statement = classify(&String::from_utf8_lossy(text));
        let key = (statement.fingerprint.clone(), statement.class, statement.may_write);
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

    /// What `classify` found. Panics on an index it never gave.
    pub fn get(&self, index: u32) -> &Statement {
        &self.statements[index as usize]
    }

    /// All distinct statements so far.
    pub fn statements(&self) -> &[Statement] {
        &self.statements
    }
}

/// Statements by their node in PostgreSQL's grammar, as libpg_query names them, that only touch the session.
const SESSION: [&str; 10] = [
    "ClosePortalStmt",
    "ConstraintsSetStmt",
    "DeallocateStmt",
    "DeclareCursorStmt",
    "DiscardStmt",
    "FetchStmt",
    "ListenStmt",
    "UnlistenStmt",
    "VariableSetStmt",
    "VariableShowStmt",
];

/// Functions of PostgreSQL whose result depends on time, chance or the session.
const VOLATILE: [&str; 25] = [
    "clock_timestamp",
    "currval",
    "gen_random_bytes",
    "gen_random_uuid",
    "inet_client_addr",
    "inet_client_port",
    "inet_server_addr",
    "inet_server_port",
    "lastval",
    "nextval",
    "now",
    "pg_backend_pid",
    "pg_current_wal_insert_lsn",
    "pg_current_wal_lsn",
    "pg_current_xact_id",
    "pg_postmaster_start_time",
    "random",
    "setseed",
    "statement_timestamp",
    "timeofday",
    "transaction_timestamp",
    "txid_current",
    "uuid_generate_v1",
    "uuid_generate_v4",
    "uuidv7",
];

/// Functions of PostgreSQL that a SELECT may call and still only read: those that workloads call most.
/// One that is missing here costs order, not truth: its statement is ordered like a write.
const HARMLESS: [&str; 83] = [
    "abs",
    "age",
    "array_agg",
    "array_length",
    "array_position",
    "array_to_string",
    "avg",
    "bool_and",
    "bool_or",
    "btrim",
    "ceil",
    "ceiling",
    "char_length",
    "clock_timestamp",
    "coalesce",
    "concat",
    "concat_ws",
    "count",
    "current_database",
    "current_schema",
    "current_schemas",
    "current_setting",
    "date_part",
    "date_trunc",
    "dense_rank",
    "encode",
    "exp",
    "extract",
    "first_value",
    "floor",
    "format",
    "format_type",
    "generate_series",
    "greatest",
    "inet_server_addr",
    "inet_server_port",
    "initcap",
    "json_agg",
    "json_build_object",
    "jsonb_agg",
    "jsonb_build_object",
    "lag",
    "last_value",
    "lead",
    "least",
    "left",
    "length",
    "ln",
    "lower",
    "lpad",
    "ltrim",
    "max",
    "md5",
    "min",
    "mod",
    "now",
    "ntile",
    "obj_description",
    "octet_length",
    "pg_backend_pid",
    "pg_get_expr",
    "pg_get_userbyid",
    "pg_is_in_recovery",
    "pg_sleep",
    "pg_table_is_visible",
    "position",
    "power",
    "random",
    "rank",
    "regexp_replace",
    "replace",
    "right",
    "round",
    "row_number",
    "rtrim",
    "split_part",
    "string_agg",
    "substr",
    "substring",
    "sum",
    "to_char",
    "upper",
    "version",
];

fn classify(text: &str) -> Statement {
    let fingerprint = pg_query::fingerprint(text, 0, 0);
    let summary = pg_query::summary(text, 0, -1);
    let (Ok(fingerprint), Ok(summary)) = (fingerprint, summary) else {
        // Not the grammar's language: a syntax error, another dialect, or a newer server's. It may do anything.
        return Statement {
            fingerprint: format!("{:016x}", fallback_hash(text)),
            label: shorten(text),
            sample: sample(text),
            class: Class::Write,
            may_write: true,
            volatile: Vec::new(),
            creates: Vec::new(),
            relations: Vec::new(),
            notifies: false,
        };
    };
    let keywords = Keywords::of(text);
    let functions: BTreeSet<&str> =
        summary.functions.iter().map(|function| function.function_name.as_str()).collect();
    let classes = || summary.statement_types.iter().map(|kind| class_of(kind, &keywords));
    let mut class = classes().min().unwrap_or(Class::Empty);
    // Settings are changed by a function, too.
    if functions.contains("set_config") && keywords.read_only_setting && class > Class::LiftsReadOnly {
        class = Class::LiftsReadOnly;
    }
    let volatile = |name: &&str| VOLATILE.contains(name);
    let mut volatile: Vec<String> = functions.iter().copied().filter(volatile).map(str::to_owned).collect();
    volatile.extend(keywords.volatile.iter().map(|&word| word.to_owned()));
    let unknown_function = || functions.iter().any(|name| !HARMLESS.contains(name));
    let last = |name: &str| name.rsplit('.').next().unwrap_or(name).to_owned();
    let creating =
        summary.statement_types.iter().any(|kind| CREATES.contains(&kind.as_str())) || keywords.select_into;
    let relations: Vec<String> = summary.tables().iter().map(|name| last(name)).collect();
    Statement {
        fingerprint: fingerprint.hex,
        sample: sample(text),
        label: shorten(&pg_query::normalize(text).unwrap_or_else(|_| text.to_owned())),
        may_write: class == Class::Write || (class == Class::Read && unknown_function()),
        class,
        volatile,
        creates: if creating { relations.clone() } else { Vec::new() },
        relations,
        notifies: summary
            .statement_types
            .iter()
            .any(|kind| ["ListenStmt", "UnlistenStmt", "NotifyStmt"].contains(&kind.as_str())),
    }
}

/// Statements that make relations.
const CREATES: [&str; 6] =
    ["CreateStmt", "CreateTableAsStmt", "ViewStmt", "CreateSeqStmt", "CreateForeignTableStmt", "RenameStmt"];

fn class_of(kind: &str, keywords: &Keywords) -> Class {
    match kind {
        "SelectStmt" if keywords.locks || keywords.select_into => Class::Write,
        "SelectStmt" => Class::Read,
        // Without ANALYZE it plans only; with it, what it explains is in the list as well.
        "ExplainStmt" => Class::Read,
        "TransactionStmt" if keywords.read_write => Class::LiftsReadOnly,
        "TransactionStmt" => Class::Transaction,
        "VariableSetStmt" if keywords.read_only_setting || keywords.read_write => Class::LiftsReadOnly,
        "PrepareStmt" | "ExecuteStmt" if keywords.writes => Class::Write,
        // What EXECUTE runs is not in its text; the server's own guard decides.
        "PrepareStmt" | "ExecuteStmt" => Class::Session,
        "CopyStmt" if keywords.copies_out && !keywords.writes => Class::Read,
        kind if SESSION.contains(&kind) => Class::Session,
        _ => Class::Write,
    }
}

/// What the tokens of a text say that libpg_query's summary does not.
#[derive(Debug, Default)]
struct Keywords {
    /// FOR UPDATE, FOR SHARE, FOR NO KEY UPDATE, FOR KEY SHARE.
    locks: bool,
    /// INTO outside INSERT and MERGE.
    select_into: bool,
    /// READ WRITE.
    read_write: bool,
    /// A setting or string that names `transaction_read_only`.
    read_only_setting: bool,
    /// INSERT, UPDATE, DELETE, MERGE anywhere.
    writes: bool,
    /// COPY ... TO STDOUT.
    copies_out: bool,
    /// CURRENT_TIMESTAMP and its like, which are keywords and no functions.
    volatile: Vec<&'static str>,
}

impl Keywords {
    fn of(text: &str) -> Self {
        let mut found = Self::default();
        let Ok(scan) = pg_query::scan(text) else { return found };
        let words: Vec<String> = scan
            .tokens
            .iter()
            .filter_map(|token| text.get(token.start as usize..token.end as usize))
            .map(str::to_ascii_lowercase)
            .filter(|word| !word.starts_with("--") && !word.starts_with("/*"))
            .collect();
        let mut inserts = false;
        for (at, word) in words.iter().enumerate() {
            let next = |n: usize| words.get(at + n).map_or("", String::as_str);
            match word.as_str() {
                "for" if matches!(next(1), "update" | "share") => found.locks = true,
                "for" if next(1) == "no" && next(2) == "key" => found.locks = true,
                "for" if next(1) == "key" && next(2) == "share" => found.locks = true,
                "into" if !inserts => found.select_into = true,
                "read" if next(1) == "write" => found.read_write = true,
                "insert" | "merge" => (found.writes, inserts) = (true, true),
                "update" | "delete" => found.writes = true,
                "to" if next(1) == "stdout" => found.copies_out = true,
                "current_timestamp" => found.volatile.push("current_timestamp"),
                "current_date" => found.volatile.push("current_date"),
                "current_time" => found.volatile.push("current_time"),
                "localtimestamp" => found.volatile.push("localtimestamp"),
                "localtime" => found.volatile.push("localtime"),
                word if word.contains("transaction_read_only") => found.read_only_setting = true,
                _ => {}
            }
        }
        found.volatile.dedup();
        found
    }
}

/// FNV-1a: stable between runs and versions, as libpg_query's fingerprints are.
fn fallback_hash(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
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

    fn class(text: &str) -> Class {
        classify(text).class
    }

    #[test]
    fn reads_and_writes_are_told_apart() {
        for text in [
            "select 1",
            "select * from t where a = $1 order by b",
            "with x as (select 1) select * from x",
            "table t",
            "values (1), (2)",
            "explain select 1",
            "copy t to stdout",
            "select 'for update'",
            "select 1 -- for update",
        ] {
            assert_eq!(class(text), Class::Read, "{text}");
        }
        for text in [
            "insert into t values (1)",
            "update t set a = 1",
            "delete from t",
            "merge into t using s on t.a = s.a when matched then delete",
            "with x as (delete from t returning a) select * from x",
            "select * from t for update",
            "select * from (select * from t for no key update) s",
            "select 1 into u",
            "create table u as select 1",
            "explain analyze insert into t values (1)",
            "copy t from stdin",
            "copy (delete from t returning a) to stdout",
            "do $$ begin end $$",
            "call p()",
            "vacuum",
            "notify n",
            "lock table t",
            "select 1; insert into t values (1)",
            "not a statement at all",
            "prepare p as insert into t values (1)",
        ] {
            assert_eq!(class(text), Class::Write, "{text}");
        }
    }

    #[test]
    fn the_rest_is_named() {
        for text in ["begin", "commit", "rollback to savepoint a", "savepoint a", "begin read only"] {
            assert_eq!(class(text), Class::Transaction, "{text}");
        }
        for text in ["set x.y = 1", "reset all", "discard all", "listen n", "show all", "fetch 5 from c"] {
            assert_eq!(class(text), Class::Session, "{text}");
        }
        for text in [
            "begin read write",
            "set transaction read write",
            "set default_transaction_read_only = off",
            "select set_config('transaction_read_only', 'off', false)",
            "set session characteristics as transaction read write",
        ] {
            assert_eq!(class(text), Class::LiftsReadOnly, "{text}");
        }
        assert_eq!(class(""), Class::Empty);
        assert_eq!(class(" ; -- nothing"), Class::Empty);
    }

    #[test]
    fn a_function_nobody_knows_may_write() {
        assert!(!classify("select count(*), max(a) from t").may_write);
        assert!(classify("select transfer(1, 2)").may_write);
        assert_eq!(class("select transfer(1, 2)"), Class::Read);
        assert!(classify("select nextval('s')").may_write);
    }

    #[test]
    fn what_depends_on_time_or_chance_is_named() {
        assert_eq!(classify("select now(), random()").volatile, ["now", "random"]);
        assert_eq!(classify("insert into t values (current_timestamp)").volatile, ["current_timestamp"]);
        assert!(classify("select a from t").volatile.is_empty());
    }

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
    fn texts_of_another_encoding_or_with_nul_are_no_panic() {
        let mut classifier = Classifier::default();
        for text in [&b"select '\xe9'"[..], b"sel\0ect", b"\xff\xff", b"select $$"] {
            let index = classifier.classify(text);
            assert!(!classifier.get(index).fingerprint.is_empty());
        }
    }
}
