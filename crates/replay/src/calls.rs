// SPDX-License-Identifier: Apache-2.0
//! Functions of PostgreSQL that a read-only transaction may call and that change something all the same.

use underpass_sql::functions;

/// What the calls in a text do that the server refuses to nobody.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Calls {
    /// They are about the server itself.
    pub administer: bool,
    /// They change something else.
    pub write: bool,
    /// They set what nobody can tell, perhaps that the session may write.
    pub set_anything: bool,
}

impl Calls {
    /// Of a text in lower case, with `?` for its literals.
    pub fn of(shape: &str) -> Self {
        let mut calls = Self::default();
        for statement in shape.split(';') {
            let first = statement.trim_start().split(|c: char| !c.is_alphanumeric()).next().unwrap_or("");
            // These name functions and call none.
            if ["alter", "comment", "drop", "grant", "revoke", "security"].contains(&first) {
                continue;
            }
            calls.add(statement);
        }
        calls
    }

    fn add(&mut self, statement: &str) {
        for (at, _) in statement.match_indices('(') {
            let is_word = |c: char| c.is_alphanumeric() || c == '_';
            let before = statement[..at].trim_end();
            let (before, name) = match before.strip_suffix('"') {
                // In quotes it is the same function.
                Some(quoted) => quoted.rsplit_once('"').unwrap_or(("", quoted)),
                None => before.split_at(before.trim_end_matches(is_word).len()),
            };
            // It is defined here.
            if before.trim_end().ends_with("function") {
                continue;
            }
            self.administer |= functions::administers(name);
            self.write |= functions::writes(name);
            if name == "set_config" {
                let setting = statement[at + 1..].trim_start().strip_prefix('?');
                self.set_anything |= !setting.is_some_and(|rest| rest.trim_start().starts_with(','));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_told_from_names() {
        let none = Calls::default();
        let administer = Calls { administer: true, ..none };
        let write = Calls { write: true, ..none };
        let set_anything = Calls { set_anything: true, ..none };
        for (shape, calls) in [
            ("select pg_terminate_backend(?)", administer),
            ("select pg_catalog.pg_cancel_backend (pid) from pg_stat_activity", administer),
            ("select count(pg_reload_conf())", administer),
            ("select ?; select * from pg_stat_reset_shared(?)", write),
            ("select pg_notify(?, $1)", write),
            ("select lo_unlink(a) from t", write),
            ("select * from dblink(?, ?) as t(a integer)", write),
            ("select * from public.dblink_fetch(?, ?) as t(a integer)", write),
            ("select dblink_connect(?)", none),
            ("select pg_stat_statements_reset()", write),
            ("select pg_start_backup(?, true)", write),
            ("select * from pg_stop_backup(false)", write),
            ("select pg_backup_start(?); select pg_backup_stop()", write),
            ("select pg_replication_origin_create(?)", write),
            ("select set_config($1, ?, true)", set_anything),
            ("select set_config(? || ?, ?, true)", set_anything),
            ("select set_config(?, $1, true)", none),
            ("grant execute on function pg_terminate_backend(integer) to joe", none),
            ("create or replace function pg_notify(text, text) returns void", none),
            ("select \"pg_terminate_backend\"(?)", administer),
            ("select pg_catalog.\"pg_notify\" (?, ?)", write),
            ("create function \"pg_notify\"(text, text) returns void", none),
            ("select \"my pg_notify\"(?)", none),
            ("select pg_notify from t where (a = ?)", none),
            ("select my_pg_notify(?)", none),
        ] {
            assert_eq!(Calls::of(shape), calls, "{shape}");
        }
    }
}
