// SPDX-License-Identifier: Apache-2.0
//! What a statement does, judged by its tokens.

use crate::functions;

/// Why the same statement may give other results a second time, or on another server, with nothing being wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Varies {
    /// Asks the clock: `now()`, `current_timestamp`.
    Clock,
    /// Draws: `random()`, `gen_random_uuid()`.
    Random,
    /// Takes from a sequence: `nextval()`; the order of sessions decides.
    Sequence,
    /// Asks what differs from server to server or session to session: `pg_backend_pid()`, `txid_current()`, `version()`.
    Server,
    /// `LISTEN`, `NOTIFY`, advisory locks: depends on other sessions.
    Sessions,
    /// Rows come in no promised order: no `ORDER BY`.
    Unordered,
    /// Which rows come is not promised: `LIMIT` or the like without `ORDER BY`.
    AnyRows,
    /// Shows costs, times or sizes: `EXPLAIN`, catalogs of statistics.
    Statistics,
}

impl Varies {
    /// All, in the order in which they are told.
    pub const ALL: [Self; 8] = [
        Self::Clock,
        Self::Random,
        Self::Sequence,
        Self::Server,
        Self::Sessions,
        Self::Unordered,
        Self::AnyRows,
        Self::Statistics,
    ];

    /// The word for tables and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Clock => "clock",
            Self::Random => "random",
            Self::Sequence => "sequence",
            Self::Server => "server",
            Self::Sessions => "sessions",
            Self::Unordered => "unordered",
            Self::AnyRows => "any_rows",
            Self::Statistics => "statistics",
        }
    }
}

/// What a statement does, as far as its tokens tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traits {
    /// All statements of the text only read, or steer a transaction or session. "No" where that is not sure.
    pub is_read_only: bool,
    /// Nothing of it stays in its session: no setting, prepared statement or temporary table. "No" where that is not sure; what functions do is not
    /// seen.
    pub keeps_session: bool,
    /// A bit for each of [`Varies`].
    varies: u8,
}

const CLOCK: &[&str] =
    &["now", "clock_timestamp", "statement_timestamp", "transaction_timestamp", "timeofday", "age"];
pub(crate) const CLOCK_WORDS: &[&str] =
    &["current_timestamp", "current_time", "current_date", "localtime", "localtimestamp"];
const RANDOM: &[&str] = &[
    "random",
    "random_normal",
    "gen_random_bytes",
    "setseed",
    "gen_random_uuid",
    "uuidv4",
    "uuidv7",
    "uuid_generate_v1",
    "uuid_generate_v4",
];
const SEQUENCE: &[&str] = &["nextval", "currval", "lastval", "setval"];
const SERVER: &[&str] = &[
    "pg_backend_pid",
    "txid_current",
    "pg_current_xact_id",
    "txid_current_snapshot",
    "pg_current_snapshot",
    "version",
    "inet_client_port",
    "inet_client_addr",
    "inet_server_addr",
    "inet_server_port",
    "pg_postmaster_start_time",
    "pg_conf_load_time",
    "pg_current_wal_lsn",
    "pg_current_wal_insert_lsn",
    "pg_is_in_recovery",
    "current_setting",
    "pg_relation_size",
    "pg_total_relation_size",
    "pg_table_size",
    "pg_database_size",
];
const SERVER_WORDS: &[&str] = &["ctid", "xmin", "xmax", "cmin", "cmax", "tableoid", "oid"];
/// Functions that change something although they stand in a SELECT, beside those that read-only transactions may call ([`functions`]).
const WRITING: &[&str] = &[
    "nextval",
    "setval",
    // It may lift what keeps a session from writing.
    "set_config",
];
/// Words with which a statement begins that reads, or steers a transaction or session.
const READING: &[&str] = &[
    "select",
    "with",
    "values",
    "table",
    "show",
    "begin",
    "start",
    "commit",
    "end",
    "rollback",
    "abort",
    "savepoint",
    "release",
    "set",
    "reset",
    "declare",
    "fetch",
    "move",
    "close",
    "explain",
    "deallocate",
    "discard",
    "(",
];
/// Words that a statement that only reads does not hold. Some are also names of columns; then it is taken for one that writes.
const WRITING_WORDS: &[&str] = &[
    "insert", "update", "delete", "merge", "into", "share", "truncate", "copy", "lock", "create", "drop",
    "alter", "analyze", "write", "prepared",
];

/// How the result of this function varies; `None`: not that anybody here knows.
pub(crate) fn varying_function(name: &str) -> Option<Varies> {
    let lists = [
        (CLOCK, Varies::Clock),
        (RANDOM, Varies::Random),
        (SEQUENCE, Varies::Sequence),
        (SERVER, Varies::Server),
    ];
    lists.into_iter().find(|(names, _)| names.contains(&name)).map(|(_, how)| how)
}

fn is_writing(function: &str) -> bool {
    let locks = function.starts_with("pg_") && function.contains("advisory");
    locks || WRITING.contains(&function) || functions::administers(function) || functions::writes(function)
}

impl Traits {
    /// Judges the tokens of a text, in order. Names in double quotes keep their quotes and match nothing.
    pub(crate) fn of<'a>(tokens: impl Iterator<Item = &'a str>) -> Self {
        let mut traits = Self { is_read_only: true, keeps_session: true, varies: 0 };
        let mut judge = Judge::default();
        let mut tokens = tokens.map(str::to_ascii_lowercase).peekable();
        while let Some(word) = tokens.next() {
            let calls = tokens.peek().is_some_and(|next| next == "(");
            judge.word(&word, calls, &mut traits);
        }
        judge.end(&mut traits);
        traits
    }

    /// Whether the result varies in this way.
    pub fn varies(self, how: Varies) -> bool {
        self.varies & bit(how) != 0
    }

    /// All ways in which the result varies.
    pub fn all_varies(self) -> impl Iterator<Item = Varies> {
        Varies::ALL.into_iter().filter(move |how| self.varies(*how))
    }

    /// Whether values may differ, not only the order of rows.
    pub fn may_differ(self) -> bool {
        self.varies & !bit(Varies::Unordered) != 0
    }

    fn add(&mut self, how: Varies) {
        self.varies |= bit(how);
    }
}

const fn bit(how: Varies) -> u8 {
    1 << how as u8
}

/// A query at one depth of brackets.
#[derive(Debug, Default, Clone, Copy)]
struct Level {
    is_ordered: bool,
    is_limited: bool,
}

#[derive(Debug, Default)]
struct Judge {
    levels: Vec<Level>,
    top: Level,
    /// Of the present statement.
    words: usize,
    /// It begins with RESET or DISCARD.
    resets: bool,
    /// It begins with SET.
    sets: bool,
    /// It begins with PREPARE.
    prepares: bool,
    /// The word before may have TEMPORARY behind it.
    makes: bool,
    /// It begins with COPY, which gives rows with TO.
    copies: bool,
    /// It begins with FETCH: what its cursor is over is not seen.
    fetches: bool,
    gives_rows: bool,
    /// The word before was SKIP.
    skips: bool,
}

impl Judge {
    fn word(&mut self, word: &str, calls: bool, traits: &mut Traits) {
        if word.starts_with("--") || word.starts_with("/*") {
            return;
        }
        if word == ";" && self.levels.is_empty() {
            return self.end(traits);
        }
        if self.words == 0 {
            traits.is_read_only &= READING.contains(&word);
            self.resets = ["reset", "discard"].contains(&word);
            self.sets = word == "set";
            self.prepares = word == "prepare";
            self.copies = word == "copy";
            self.fetches = word == "fetch";
            // What EXECUTE runs and what FETCH reads is in another statement, and its order too.
            self.gives_rows = ["select", "with", "values", "table", "(", "execute", "fetch"].contains(&word);
            match word {
                "listen" | "notify" | "unlisten" => traits.add(Varies::Sessions),
                "explain" => traits.add(Varies::Statistics),
                "show" => traits.add(Varies::Server),
                _ => {}
            }
        }
        let stays = match self.words {
            0 => self.resets || word == "deallocate",
            1 if self.sets => !["local", "transaction", "constraints"].contains(&word),
            1 if self.prepares => word != "transaction",
            _ => self.makes && ["temp", "temporary"].contains(&word),
        };
        if stays || (calls && word.trim_matches('"') == "set_config") {
            traits.keeps_session = false;
        }
        self.makes = ["create", "replace", "local", "global", "into"].contains(&word);
        self.words += 1;
        match word {
            "(" => self.levels.push(Level::default()),
            ")" => {
                if let Some(level) = self.levels.pop() {
                    if level.is_limited && !level.is_ordered {
                        traits.add(Varies::AnyRows);
                    }
                    // COPY (SELECT .. ORDER BY ..) TO
                    self.top.is_ordered |= self.copies && self.levels.is_empty() && level.is_ordered;
                }
            }
            "order" => self.level().is_ordered = true,
            // FETCH at the head of a statement is the cursor's.
            "limit" | "offset" | "tablesample" => self.level().is_limited = true,
            "fetch" if self.words > 1 => self.level().is_limited = true,
            "returning" => self.gives_rows = true,
            "to" if self.copies && self.levels.is_empty() => self.gives_rows = true,
            // All rows of the cursor, in whatever order; else which ones they are depends on it.
            "all" => self.fetches = false,
            // FOR UPDATE SKIP LOCKED
            "locked" if self.skips => traits.add(Varies::Sessions),
            _ => {}
        }
        self.skips = word == "skip";
        // What keeps a session from writing is a setting of its own.
        let lifts = word.contains("transaction_read_only") || (self.resets && word == "all");
        if lifts || WRITING_WORDS.contains(&word) || (calls && is_writing(word.trim_matches('"'))) {
            traits.is_read_only = false;
        }
        if calls && let Some(how) = varying_function(word) {
            traits.add(how);
        }
        if CLOCK_WORDS.contains(&word) {
            traits.add(Varies::Clock);
        }
        if SERVER_WORDS.contains(&word) {
            traits.add(Varies::Server);
        }
        if word.starts_with("pg_stat") {
            traits.add(Varies::Statistics);
        }
        if calls && word.starts_with("pg_") && word.contains("advisory") {
            traits.add(Varies::Sessions);
        }
    }

    fn level(&mut self) -> &mut Level {
        self.levels.last_mut().unwrap_or(&mut self.top)
    }

    fn end(&mut self, traits: &mut Traits) {
        if (self.top.is_limited || self.fetches) && !self.top.is_ordered {
            traits.add(Varies::AnyRows);
        }
        if self.gives_rows && !self.top.is_ordered {
            traits.add(Varies::Unordered);
        }
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Statement;

    fn traits(text: &str) -> Traits {
        Statement::parse(text).unwrap_or_else(|error| panic!("{text}: {error}")).traits
    }

    #[test]
    fn what_stays_in_a_session() {
        for text in [
            "SET work_mem = '1MB'",
            "begin; insert into t values (1); set session \"x\".y = 1",
            "/* app */ set \"my.setting\" = 1",
            "-- app\nreset all",
            "discard all",
            "select set_config('a.b', 'c', false)",
            "create temp table x (id int)",
            "create or replace temporary view v as select 1",
            "select 1 into temp x",
            "prepare p as insert into t values ($1)",
        ] {
            assert!(!traits(text).keeps_session, "{text}");
        }
        for text in [
            "update t set work_mem = 1",
            "insert into t values ('; set x = 1', 'it''s; reset all')",
            "set local work_mem = '1MB'; set transaction isolation level serializable",
            "set constraints all deferred",
            "prepare transaction 'x'",
            "insert into t values (1) /* ; discard all */",
            "select temp from \"set\"",
        ] {
            assert!(traits(text).keeps_session, "{text}");
        }
    }

    #[test]
    fn readers_are_told_from_writers() {
        for text in [
            "select 1",
            "with a as (select 1) select * from a",
            "begin; select 1; commit",
            "begin isolation level serializable read only",
            "show work_mem",
            "set search_path = x",
            "reset search_path",
            "discard temp",
            "select all 1",
            "select \"update\" from t",
            "select dblink_connect('a')",
            "select dblink from t",
            "declare c cursor for select 1",
            "(select 1) union (select 2)",
            "/* drop */ select 1 -- create",
            "",
        ] {
            assert!(traits(text).is_read_only, "{text}");
        }
        for text in [
            "insert into t values (1)",
            "with a as (delete from t returning *) select * from a",
            "select * from t for update",
            "select * from t for no key update",
            "select * from t for key share",
            "select * into u from t",
            "select nextval('s')",
            "select pg_notify('a', 'b')",
            "select * from dblink('a', 'b') as t(a int)",
            "select public.dblink_send_query('a', 'b')",
            "select pg_backup_start('a')",
            "select pg_create_physical_replication_slot('a')",
            "select pg_stat_reset_shared('bgwriter')",
            "select pg_try_advisory_xact_lock_shared(1)",
            "select pg_promote()",
            "explain analyze delete from t",
            "select 1; drop table t",
            "copy t from stdin",
            "call p()",
            "do 'begin end'",
            "vacuum",
            "prepare transaction 'x'",
            "notify a",
            "set default_transaction_read_only = off",
            "SET LOCAL Transaction_Read_Only TO off",
            "set \"default_transaction_read_only\" to default",
            "reset default_transaction_read_only",
            "reset all",
            "discard all",
            "begin read write",
            "set session characteristics as transaction read write",
            "select set_config('default_transaction_read_only', 'off', false)",
            "select \"set_config\"($1, 'off', false)",
        ] {
            assert!(!traits(text).is_read_only, "{text}");
        }
    }

    #[test]
    fn what_varies_is_named() {
        let cases = [
            ("select now() from t order by 1", vec![Varies::Clock]),
            ("insert into t values (current_timestamp)", vec![Varies::Clock]),
            ("select random() order by 1", vec![Varies::Random]),
            ("insert into t values (nextval('s'))", vec![Varies::Sequence]),
            ("select pg_backend_pid() order by 1", vec![Varies::Server]),
            ("listen x", vec![Varies::Sessions]),
            ("select * from t", vec![Varies::Unordered]),
            ("select * from t limit 1", vec![Varies::Unordered, Varies::AnyRows]),
            ("select * from (select * from t limit 1) s order by a", vec![Varies::AnyRows]),
            ("select row_number() over (order by a) from t order by 1", vec![]),
            ("select now from t order by 1", vec![]),
            ("update t set a = 1", vec![]),
            ("explain select 1", vec![Varies::Statistics]),
            ("select * from t order by a fetch first row only", vec![]),
            ("copy t to stdout", vec![Varies::Unordered]),
            ("copy t (a, b) to stdout with (format csv)", vec![Varies::Unordered]),
            ("copy (select a from t order by a) to stdout", vec![]),
            ("copy (select a from t limit 3) to stdout", vec![Varies::Unordered, Varies::AnyRows]),
            ("copy t from stdin", vec![]),
            ("fetch all from c", vec![Varies::Unordered]),
            ("fetch 10 from c", vec![Varies::Unordered, Varies::AnyRows]),
            ("execute p(1)", vec![Varies::Unordered]),
            ("select a from t order by a limit 1 for update skip locked", vec![Varies::Sessions]),
            ("select skip, locked from t order by 1", vec![]),
            ("/* route */ select * from t -- here", vec![Varies::Unordered]),
        ];
        for (text, expected) in cases {
            assert_eq!(traits(text).all_varies().collect::<Vec<_>>(), expected, "{text}");
        }
    }
}
