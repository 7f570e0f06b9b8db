// SPDX-License-Identifier: Apache-2.0
//! What a statement is by its syntax tree: whether it can change anything, what it names, what makes its answer vary.
//!
//! libpg_query is PostgreSQL's own grammar, so nothing here guesses at syntax. What a *function* does the text cannot
//! tell: a function that is not known to be harmless may write.

use std::collections::BTreeSet;

use pg_query::NodeEnum;
use pg_query::protobuf::{ObjectType, RangeVar};

use crate::traits::{CLOCK_WORDS, varying_function};
use crate::{Error, syntax, tokens};

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

/// What the syntax tree of a text says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// What it is.
    pub class: Class,
    /// Whether it can change something that other sessions see. A read that calls a function nobody knows can.
    pub may_write: bool,
    /// Functions in it whose result depends on more than the data: `random`, `now`, `nextval`.
    pub volatile: Vec<String>,
    /// Relations that it creates or gives this name to, without schema: before it, they may be missing or others.
    pub creates: Vec<String>,
    /// Relations that it changes, without schema: they are there before it, perhaps with other columns.
    pub alters: Vec<String>,
    /// Whether it makes something else that later statements may name, like functions, types and schemas.
    pub defines: bool,
    /// Whether it may make anything, which its text does not tell: DO, CALL, and what moves things to another schema.
    pub makes_anything: bool,
    /// Relations that it names, without schema.
    pub relations: Vec<String>,
    /// Extensions that it creates.
    pub extensions: Vec<String>,
    /// Whether it registers for notifications, or sends them.
    pub notifies: bool,
}

impl Summary {
    /// Parses a text, whatever its length: whether a long one writes matters as much as of a short one.
    ///
    /// # Errors
    /// It is not the grammar's language: a syntax error, another dialect, or a newer server's. It may do anything.
    pub fn of(text: &str) -> Result<Self, Error> {
        let summary = pg_query::summary(text, 0, -1).map_err(syntax)?;
        let keywords = Keywords::of(text);
        let functions: BTreeSet<&str> =
            summary.functions.iter().map(|function| function.function_name.as_str()).collect();
        let kinds = || summary.statement_types.iter().map(String::as_str);
        let mut class = kinds().map(|kind| class_of(kind, &keywords)).min().unwrap_or(Class::Empty);
        // Settings are changed by a function, too.
        if functions.contains("set_config") && keywords.read_only_setting && class > Class::LiftsReadOnly {
            class = Class::LiftsReadOnly;
        }
        let volatile = functions.iter().copied().filter(|name| varying_function(name).is_some());
        let mut volatile: Vec<String> = volatile.map(str::to_owned).collect();
        volatile.extend(keywords.clock.iter().map(|&word| word.to_owned()));
        let unknown_function = || functions.iter().any(|name| !HARMLESS.contains(name));
        let last = |name: &str| name.rsplit('.').next().unwrap_or(name).to_owned();
        let relations: Vec<String> = summary.tables().iter().map(|name| last(name)).collect();
        let mut made = Made::default();
        if kinds().any(|kind| MAKES.contains(&kind)) || keywords.select_into {
            made = Made::of(text)?;
        }
        Ok(Self {
            may_write: class == Class::Write || (class == Class::Read && unknown_function()),
            class,
            volatile,
            creates: made.creates,
            alters: made.alters,
            defines: kinds().any(|kind| DEFINES.contains(&kind)),
            makes_anything: kinds().any(|kind| MAKES_ANYTHING.contains(&kind)),
            relations,
            extensions: made.extensions,
            notifies: kinds().any(|kind| ["ListenStmt", "UnlistenStmt", "NotifyStmt"].contains(&kind)),
        })
    }
}

/// What a text makes and changes. The summary does not tell it from what is only read.
#[derive(Debug, Default)]
struct Made {
    creates: Vec<String>,
    alters: Vec<String>,
    extensions: Vec<String>,
}

impl Made {
    fn of(text: &str) -> Result<Self, Error> {
        let parsed = pg_query::parse(text, 0).map_err(syntax)?;
        let mut made = Self::default();
        for node in parsed.protobuf.stmts.iter().filter_map(|raw| raw.stmt.as_ref()?.node.as_ref()) {
            made.add(node);
        }
        Ok(made)
    }

    fn add(&mut self, node: &NodeEnum) {
        let created: Option<&RangeVar> = match node {
            NodeEnum::CreateStmt(one) => one.relation.as_ref(),
            NodeEnum::CreateForeignTableStmt(one) => {
                one.base_stmt.as_ref().and_then(|base| base.relation.as_ref())
            }
            NodeEnum::CreateSeqStmt(one) => one.sequence.as_ref(),
            NodeEnum::CreateTableAsStmt(one) => one.into.as_ref().and_then(|into| into.rel.as_ref()),
            NodeEnum::ViewStmt(one) => one.view.as_ref(),
            NodeEnum::SelectStmt(one) => {
                // INTO is in the first of several that are joined by UNION.
                let mut select = one;
                while let Some(first) = &select.larg {
                    select = first;
                }
                select.into_clause.as_ref().and_then(|into| into.rel.as_ref())
            }
            NodeEnum::AlterTableStmt(one) => {
                self.alters.extend(one.relation.as_ref().map(|relation| relation.relname.clone()));
                None
            }
            NodeEnum::RenameStmt(one) => {
                self.alters.extend(one.relation.as_ref().map(|relation| relation.relname.clone()));
                if RELATIONS.iter().any(|kind| *kind as i32 == one.rename_type) {
                    self.creates.push(one.newname.clone());
                }
                None
            }
            NodeEnum::CreateExtensionStmt(one) => {
                self.extensions.push(one.extname.clone());
                // The view of an extension often has its name, as that of pg_stat_statements.
                self.creates.push(one.extname.clone());
                None
            }
            NodeEnum::CreateSchemaStmt(one) => {
                one.schema_elts.iter().filter_map(|part| part.node.as_ref()).for_each(|part| self.add(part));
                None
            }
            _ => None,
        };
        self.creates.extend(created.map(|relation| relation.relname.clone()));
    }
}

/// Kinds of relations that can be renamed.
const RELATIONS: [ObjectType; 6] = [
    ObjectType::ObjectForeignTable,
    ObjectType::ObjectIndex,
    ObjectType::ObjectMatview,
    ObjectType::ObjectSequence,
    ObjectType::ObjectTable,
    ObjectType::ObjectView,
];

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

/// Statements whose tree names what they make or change: see [`Made`].
const MAKES: [&str; 9] = [
    "AlterTableStmt",
    "CreateExtensionStmt",
    "CreateForeignTableStmt",
    "CreateSchemaStmt",
    "CreateSeqStmt",
    "CreateStmt",
    "CreateTableAsStmt",
    "RenameStmt",
    "ViewStmt",
];

/// Statements that make something else which statements name.
const DEFINES: [&str; 8] = [
    "CompositeTypeStmt",
    "CreateDomainStmt",
    "CreateEnumStmt",
    "CreateExtensionStmt",
    "CreateFunctionStmt",
    "CreateRangeStmt",
    "CreateSchemaStmt",
    "DefineStmt",
];

/// Statements that may make anything, or bring it to where it is looked for.
const MAKES_ANYTHING: [&str; 3] = ["AlterObjectSchemaStmt", "CallStmt", "DoStmt"];

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
    clock: Vec<&'static str>,
}

impl Keywords {
    fn of(text: &str) -> Self {
        let mut found = Self::default();
        let Ok(words) = tokens(text) else { return found };
        let words: Vec<String> = words
            .into_iter()
            .map(str::to_ascii_lowercase)
            .filter(|word| !word.starts_with("--") && !word.starts_with("/*"))
            .collect();
        let mut inserts = false;
        for (at, word) in words.iter().enumerate() {
            found.clock.extend(CLOCK_WORDS.iter().find(|clock| **clock == word.as_str()));
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
                word if word.contains("transaction_read_only") => found.read_only_setting = true,
                _ => {}
            }
        }
        found.clock.dedup();
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Summary {
        Summary::of(text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    fn class(text: &str) -> Class {
        of(text).class
    }

    fn owned(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
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
    fn created_extensions_are_named() {
        for (text, name) in [
            ("create extension pg_trgm", "pg_trgm"),
            ("CREATE EXTENSION IF NOT EXISTS \"uuid-ossp\" SCHEMA public;", "uuid-ossp"),
            ("select 1; create /* here */ extension Hstore", "hstore"),
        ] {
            assert_eq!(of(text).extensions, [name], "{text}");
        }
        assert!(of("create table extension (a int)").extensions.is_empty());
    }

    #[test]
    fn what_later_statements_may_name_is_known() {
        for (text, creates, alters) in [
            ("create table a (b int)", &["a"][..], &[] as &[&str]),
            // What is only read is there before.
            ("create table a (b int references c)", &["a"], &[]),
            ("create table s.a as select * from c", &["a"], &[]),
            ("create view a as select * from c", &["a"], &[]),
            ("create sequence a", &["a"], &[]),
            ("select 1 as b into a from c union select 2", &["a"], &[]),
            ("create schema s create table a (b int)", &["a"], &[]),
            ("alter table s.a add column c int", &[], &["a"]),
            ("alter table a rename to b", &["b"], &["a"]),
            ("alter table a rename column b to c", &[], &["a"]),
            ("create table b (c int); alter table a add column c int", &["b"], &["a"]),
            ("select 1", &[], &[]),
        ] {
            let found = of(text);
            assert!(!found.makes_anything, "{text}");
            assert_eq!((found.creates, found.alters), (owned(creates), owned(alters)), "{text}");
        }
        assert!(!of("create table a (b int)").defines);
        for text in [
            "create function f() returns int language sql as 'select 1'",
            "create procedure p() language sql as 'select 1'",
            "create type t as enum ('a')",
            "create type t as (a int)",
            "create domain d as int",
            "create aggregate g (int) (sfunc = int4pl, stype = int)",
            "create extension hstore",
            "create schema s",
        ] {
            let found = of(text);
            assert!(found.defines && !found.makes_anything, "{text}");
        }
        for text in ["do 'begin end'", "call p()", "alter table a set schema s"] {
            assert!(of(text).makes_anything, "{text}");
        }
    }

    #[test]
    fn a_function_nobody_knows_may_write() {
        assert!(!of("select count(*), max(a) from t").may_write);
        assert!(of("select transfer(1, 2)").may_write);
        assert_eq!(class("select transfer(1, 2)"), Class::Read);
        assert!(of("select nextval('s')").may_write);
    }

    #[test]
    fn what_depends_on_time_or_chance_is_named() {
        assert_eq!(of("select now(), random()").volatile, ["now", "random"]);
        assert_eq!(of("insert into t values (current_timestamp)").volatile, ["current_timestamp"]);
        assert!(of("select a from t").volatile.is_empty());
    }

    #[test]
    fn what_is_no_statement_is_an_error() {
        for text in ["not a statement at all", "select $$", "sel\0ect"] {
            assert!(matches!(Summary::of(text), Err(Error::Syntax(_))), "{text}");
        }
    }
}
