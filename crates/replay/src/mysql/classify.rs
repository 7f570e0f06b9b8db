// SPDX-License-Identifier: Apache-2.0
//! What a statement of MariaDB or MySQL does, by its words: no parser of their SQL is here.
//!
//! Everything errs on the side of "it writes": what is not known to read is a write, and a function that is not known to be harmless may be
//! one that somebody stored.

use std::collections::BTreeSet;

use underpass_sql::{Class, Summary};
use underpass_trace::{Protocol, fold, strip_literals};

use crate::classify::statements;

/// Functions that change nothing, and words that are followed by a bracket without being functions.
const HARMLESS: &str = " abs all and any as ascii avg between bin bit_and bit_or by case cast ceil ceiling char char_length character_length \
    coalesce concat concat_ws connection_id conv convert cos count crc32 curdate current_date current_time current_timestamp current_user \
    curtime database date date_add date_format date_sub datediff day dayname dayofmonth dayofweek dayofyear dense_rank distinct div elt else \
    except exists exp extract field find_in_set first_value floor format found_rows from from_days from_unixtime greatest group_concat having \
    hex hour if ifnull in index insert instr intersect interval is isnull join json_array json_arrayagg json_contains json_extract json_keys \
    json_length json_object json_objectagg json_search json_type json_unquote json_valid json_value key lag last_day last_insert_id \
    last_value lcase lead least left length like ln locate log log10 log2 lower lpad ltrim makedate maketime max md5 microsecond mid min \
    minute mod month monthname not now nullif oct on or order ord over partition period_add period_diff pi position pow power quarter quote \
    radians rand rank regexp repeat replace reverse right rlike round row row_count row_number rpad rtrim schema sec_to_time second select \
    session_user set sha sha1 sha2 sign sin sleep some soundex space sqrt std stddev str_to_date strcmp subdate substr substring \
    substring_index subtime sum sysdate system_user tan then time time_format time_to_sec timediff timestamp timestampadd timestampdiff \
    to_base64 to_days trim truncate ucase unhex union unix_timestamp upper user using utc_date utc_time utc_timestamp uuid values var_pop \
    variance version week weekday weekofyear when where window with xor year yearweek ";
/// Functions whose result is another one each time.
const VOLATILE: [&str; 16] = [
    "connection_id",
    "curdate",
    "current_date",
    "current_time",
    "current_timestamp",
    "curtime",
    "last_insert_id",
    "localtime",
    "localtimestamp",
    "now",
    "rand",
    "sysdate",
    "unix_timestamp",
    "utc_timestamp",
    "uuid",
    "uuid_short",
];
/// Words that no statement which only reads has.
const WRITES: [&str; 12] = [
    "delete",
    "get_lock",
    "insert",
    "into",
    "is_free_lock",
    "lastval",
    "next",
    "nextval",
    "release_all_locks",
    "release_lock",
    "setval",
    "update",
];
/// Bytes of a text without its literals that are looked at.
const LOOKED_AT_BYTES: usize = 64 << 10;

/// The text without literals, in lower case, and what it does.
pub(crate) fn classify(text: &[u8]) -> (String, Summary) {
    let shape = fold(&strip_literals(text, Protocol::Mysql));
    // Comments are not in the shape, and these are none. What is behind the part that is looked at may be anything.
    let hides = shape.len() > LOOKED_AT_BYTES
        || text.windows(3).any(|at| at == b"/*!")
        || text.windows(4).any(|at| at == b"/*M!");
    let shape = String::from_utf8_lossy(&shape[..shape.len().min(LOOKED_AT_BYTES)]).into_owned();
    let summary = summary(&shape, hides);
    (shape, summary)
}

/// Whether a statement is about the server itself: its threads have other numbers on the target.
pub(crate) fn administers(shape: &str) -> bool {
    let query = behind_settings(shape).1;
    statements(query, Protocol::Mysql).any(|words| matches!(words[0], "kill" | "shutdown"))
}

/// MariaDB's `SET STATEMENT a = 1, b = 2 FOR query`: its settings, which hold for the query only, and the query. Of all others the whole.
fn behind_settings(shape: &str) -> (&str, &str) {
    let begins = statements(shape, Protocol::Mysql)
        .next()
        .is_some_and(|words| words.starts_with(&["set", "statement"]));
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let alone = |&(at, word): &(usize, &str)| {
        !shape[..at].ends_with(is_word) && !shape[at + word.len()..].starts_with(is_word)
    };
    match shape.match_indices("for").find(alone).filter(|_| begins) {
        Some((at, word)) => (&shape[..at], &shape[at + word.len()..]),
        None => ("", shape),
    }
}

fn summary(whole: &str, hides: bool) -> Summary {
    let (settings, shape) = behind_settings(whole);
    let is_word = |c: char| c.is_alphanumeric() || c == '_' || c == '@';
    let words_of = |text| str::split(text, |c| !is_word(c)).filter(|word| !word.is_empty());
    let words: Vec<&str> = words_of(shape).collect();
    let has = |word: &str| words.contains(&word);
    let class = if hides || whole.trim_end_matches([';', ' ']).contains(';') {
        // Several statements are as bad as the worst that they could be.
        Class::Write
    } else {
        let lifts = words_of(settings).any(|word| word.ends_with("read_only"));
        class(&words).min(if lifts { Class::LiftsReadOnly } else { Class::Empty })
    };
    let reads = class == Class::Read;
    let may_write = match class {
        Class::Read | Class::Session => calls(whole).any(|name| !HARMLESS.contains(&format!(" {name} "))),
        Class::Write | Class::LiftsReadOnly => true,
        Class::Transaction | Class::Empty => false,
    };
    let creates = words.first().is_some_and(|word| *word == "create");
    let passed = ["create", "or", "replace", "temporary", "table", "view", "if", "not", "exists", "sequence"];
    let created = words.iter().find(|word| !passed.contains(word)).filter(|_| creates);
    let mut created: Vec<&str> = created.into_iter().copied().collect();
    let (altered, renamed) = altered(shape);
    created.extend(renamed);
    let names: BTreeSet<&str> =
        if reads || !creates { words.iter().copied().collect() } else { BTreeSet::new() };
    Summary {
        class,
        may_write,
        volatile: VOLATILE.iter().filter(|name| has(name)).map(|name| (*name).to_owned()).collect(),
        creates: created.into_iter().map(str::to_owned).collect(),
        alters: altered.into_iter().map(str::to_owned).collect(),
        defines: creates && (has("function") || has("procedure")),
        makes_anything: matches!(words[..], ["call", ..] | ["begin", "not", ..]),
        // Names of tables are among them.
        relations: names.into_iter().map(str::to_owned).collect(),
        extensions: Vec::new(),
        notifies: false,
    }
}

/// The tables and views that a statement changes, and the names that it gives them, both without their databases.
fn altered(shape: &str) -> (Vec<&str>, Vec<&str>) {
    let ends = |c: char| c.is_whitespace() || [',', '(', ')', ';', '='].contains(&c);
    // Quotes are gone, and a blank is behind the point of a quoted database: `shop. t`.
    let parts: Vec<&str> =
        shape.split(ends).filter(|part| !part.is_empty() && !part.ends_with('.')).collect();
    let kind = parts.iter().position(|part| ["table", "tables", "view"].contains(part));
    let verb = parts.first().copied().unwrap_or_default();
    let Some(kind) = kind.filter(|_| ["alter", "rename"].contains(&verb)) else {
        return (Vec::new(), Vec::new());
    };
    let rest = &parts[kind + 1..];
    // RENAME TABLE a TO b, c TO d; ALTER TABLE a ..., RENAME [TO | AS] b.
    let mut names = rest.iter().copied().filter(|part| !["if", "exists", "to"].contains(part)).map(last_name);
    if verb == "rename" {
        let names: Vec<&str> = names.collect();
        let of = |which: usize| names.iter().skip(which).step_by(2).copied().collect::<Vec<_>>();
        return (of(0), of(1));
    }
    let altered = names.next().into_iter().collect();
    let at = rest.iter().position(|part| *part == "rename");
    let behind = rest.iter().copied().skip(at.map_or(rest.len(), |at| at + 1));
    let renamed = behind.skip_while(|part| ["to", "as"].contains(part)).take(1);
    let renamed = renamed.filter(|part| !["column", "index", "key"].contains(part)).map(last_name);
    (altered, renamed.collect())
}

/// A name without its database.
fn last_name(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

fn class(words: &[&str]) -> Class {
    let pair = |one: &str, other: &str| words.windows(2).any(|pair| pair == [one, other]);
    let lifts = pair("read", "write") || words.iter().any(|word| word.ends_with("read_only"));
    let Some(first) = words.first() else { return Class::Empty };
    match (*first, words.get(1).copied().unwrap_or_default()) {
        ("set", _) if sets_for_all(words) => Class::Write,
        ("start", "transaction") | ("set", _) if lifts => Class::LiftsReadOnly,
        ("begin", "not") => Class::Write,
        ("begin" | "commit" | "rollback" | "savepoint", _)
        | ("start", "transaction")
        | ("release", "savepoint") => Class::Transaction,
        ("set" | "use" | "prepare" | "deallocate", _) => Class::Session,
        ("show" | "help", _) => Class::Read,
        // With ANALYZE, MySQL runs what it explains.
        ("desc" | "describe" | "explain", second) if second != "analyze" => Class::Read,
        ("select" | "table" | "values" | "with" | "do" | "desc" | "describe" | "explain", _) => {
            let locks = pair("for", "share") || pair("share", "mode");
            match locks || words.iter().any(|word| WRITES.contains(word)) {
                true => Class::Write,
                false => Class::Read,
            }
        }
        _ => Class::Write,
    }
}

/// Whether SET changes more than the session: the server's settings, passwords, the role that a user logs in with.
fn sets_for_all(words: &[&str]) -> bool {
    let set = |word: &&str| {
        let scope = word.strip_prefix("@@").unwrap_or(word);
        matches!(scope, "global" | "persist" | "persist_only") || *word == "password"
    };
    words.iter().any(set) || words.windows(3).any(|three| three == ["set", "default", "role"])
}

/// Words that are followed by an opening bracket.
fn calls(shape: &str) -> impl Iterator<Item = &str> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    shape.match_indices('(').filter_map(move |(at, _)| {
        let before = shape[..at].trim_end();
        let name = before.rsplit(|c| !is_word(c)).next()?;
        (!name.is_empty()).then_some(name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_to_read_writes() {
        let long = format!("select {} from t; drop table t", "a, ".repeat(LOOKED_AT_BYTES));
        for (text, class_of, may_write) in [
            ("SELECT a, count(*) FROM t WHERE b IN (1,2) AND (c = 'x')", Class::Read, false),
            ("(select 1) union (select 2)", Class::Read, false),
            ("select stored(1)", Class::Read, true),
            ("select * from t where a = 1 for update", Class::Write, true),
            ("select * from t lock in share mode", Class::Write, true),
            ("select a into @x from t", Class::Write, true),
            ("select nextval(s)", Class::Write, true),
            ("with x as (select 1) select * from x", Class::Read, false),
            ("with x as (select 1) delete from t", Class::Write, true),
            ("insert into t values (1)", Class::Write, true),
            ("update t set v = md5(concat(v, 'a'))", Class::Write, true),
            ("BEGIN", Class::Transaction, false),
            ("start transaction with consistent snapshot", Class::Transaction, false),
            ("start transaction read write", Class::LiftsReadOnly, true),
            ("start slave", Class::Write, true),
            ("commit", Class::Transaction, false),
            ("set names utf8mb4", Class::Session, false),
            ("set session transaction_read_only = 0", Class::LiftsReadOnly, true),
            ("set global max_connections = 5", Class::Write, true),
            ("set password = password('x')", Class::Write, true),
            ("set global read_only = 0", Class::Write, true),
            ("SET PERSIST max_connections = 5", Class::Write, true),
            ("set @a = 1, @@PERSIST.max_connections = 5", Class::Write, true),
            ("set @@persist_only.max_connections = 5", Class::Write, true),
            ("set @@global.max_connections = 5", Class::Write, true),
            ("set default role r to joe", Class::Write, true),
            ("set role r", Class::Session, false),
            ("set @persist = 1, @@session.sql_mode = concat(@@sql_mode, ',ANSI')", Class::Session, false),
            ("set @a = stored(1)", Class::Session, true),
            ("SET STATEMENT max_statement_time = 1 FOR SELECT a FROM t", Class::Read, false),
            ("set statement max_statement_time=1 for select a from t for update", Class::Write, true),
            ("set statement x = stored(1) for select 1", Class::Read, true),
            ("set statement format_x=1,y='for'\nfor\ninsert into t values (1)", Class::Write, true),
            ("set statement tx_read_only = 0 for select 1", Class::LiftsReadOnly, true),
            ("set statement max_statement_time=1 for set global read_only=0", Class::Write, true),
            ("set statement max_statement_time=1 for select 1; drop table t", Class::Write, true),
            ("/*!40000 drop table t */", Class::Write, true),
            ("select 1; drop table t", Class::Write, true),
            ("select 1;", Class::Read, false),
            ("-- nothing", Class::Empty, false),
            ("analyze update t set a = 1", Class::Write, true),
            ("call p()", Class::Write, true),
            ("explain delete from t", Class::Read, false),
            ("explain analyze select * from t", Class::Read, false),
            ("explain analyze delete t from t join u", Class::Write, true),
            (long.as_str(), Class::Write, true),
        ] {
            let (shape, summary) = classify(text.as_bytes());
            assert_eq!((summary.class, summary.may_write), (class_of, may_write), "{text}: {shape}");
        }
    }

    #[test]
    fn what_is_about_the_server_itself_is_told() {
        for (text, told) in [
            ("KILL QUERY 5", true),
            ("/* of a pool */ kill 5", true),
            ("select 1; shutdown", true),
            ("set statement max_statement_time = 1 for kill 5", true),
            ("select 'kill 5', kill from t", false),
            ("set @kill = 5", false),
        ] {
            assert_eq!(administers(&classify(text.as_bytes()).0), told, "{text}");
        }
    }

    #[test]
    fn what_is_created_is_known_by_name() {
        let (_, summary) = classify(b"CREATE TEMPORARY TABLE IF NOT EXISTS Sums (a int)");
        assert_eq!(summary.creates, ["sums"]);
        let (_, summary) = classify(b"select now() from `Sums`");
        assert!(summary.relations.contains(&"sums".to_owned()));
        assert_eq!(summary.volatile, ["now"]);
    }

    #[test]
    fn of_what_changes_a_table_only_its_names_count() {
        for (text, alters, creates) in [
            (
                "alter table shop.t add foreign key (id) references b(id) on delete set null",
                &["t"][..],
                &[] as &[&str],
            ),
            ("ALTER TABLE IF EXISTS `shop`.`t` rename to `u`", &["t"], &["u"]),
            ("alter table t rename column a to b", &["t"], &[]),
            ("rename table a to b, shop.c to shop.d", &["a", "c"], &["b", "d"]),
            ("alter user joe identified by 'x'", &[], &[]),
            ("select a from t", &[], &[]),
        ] {
            let (shape, summary) = classify(text.as_bytes());
            assert_eq!(summary.alters, alters, "{shape}");
            assert_eq!(summary.creates, creates, "{shape}");
        }
        let (_, summary) = classify(b"set statement lock_wait_timeout = 1 for alter table t rename to u");
        assert_eq!(
            (&summary.alters[..], &summary.creates[..]),
            (&["t".to_owned()][..], &["u".to_owned()][..])
        );
        let (_, summary) = classify(b"set statement lock_wait_timeout = 1 for create table t (a int)");
        assert_eq!(summary.creates, ["t"]);
        assert!(classify(b"call p()").1.makes_anything);
        assert!(!classify(b"create procedure p() select 1").1.makes_anything);
    }
}
