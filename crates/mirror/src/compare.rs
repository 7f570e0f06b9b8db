// SPDX-License-Identifier: Apache-2.0
//! How the answer of a mirror differs from the primary's.

use crate::answer::{CommandResult, RowHash};

/// SQLSTATE `in_failed_sql_transaction`: an error before this one is the cause.
const IN_FAILED_TRANSACTION: [u8; 5] = *b"25P02";

/// In what two results of the same command differ; the first that applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Difference {
    /// An error there, none here.
    ErrorThere,
    /// An error here, none there.
    ErrorHere,
    /// Errors of different SQLSTATE.
    SqlState,
    /// A follow-up: the transaction had failed there by an earlier difference.
    Cascade,
    /// Different tags, such as `UPDATE 1` and `UPDATE 0`.
    Tag,
    /// Different numbers of rows.
    RowCount,
    /// The same number of rows with other contents.
    Rows,
    /// More results, or fewer, in the same cycle.
    ResultCount,
}

impl Difference {
    /// All, in the order in which they are told.
    pub const ALL: [Self; 8] = [
        Self::ErrorThere,
        Self::ErrorHere,
        Self::SqlState,
        Self::Cascade,
        Self::Tag,
        Self::RowCount,
        Self::Rows,
        Self::ResultCount,
    ];

    /// The word for columns and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ErrorThere => "error_there",
            Self::ErrorHere => "error_here",
            Self::SqlState => "sqlstate",
            Self::Cascade => "cascade",
            Self::Tag => "tag",
            Self::RowCount => "row_count",
            Self::Rows => "rows",
            Self::ResultCount => "result_count",
        }
    }
}

/// Compares how a command ended on the primary (`here`) and on the mirror (`there`), rows by `how`; `None` = the same.
pub fn compare(here: &CommandResult, there: &CommandResult, how: RowHash) -> Option<Difference> {
    match (here.sqlstate, there.sqlstate) {
        (one, Some(IN_FAILED_TRANSACTION)) if one != Some(IN_FAILED_TRANSACTION) => Some(Difference::Cascade),
        (Some(IN_FAILED_TRANSACTION), other) if other != Some(IN_FAILED_TRANSACTION) => {
            Some(Difference::Cascade)
        }
        (None, Some(_)) => Some(Difference::ErrorThere),
        (Some(_), None) => Some(Difference::ErrorHere),
        (Some(one), Some(other)) if one != other => Some(Difference::SqlState),
        (Some(_), Some(_)) => None,
        // The end of a transaction that failed on one of them.
        (None, None) if is_end(&here.tag) && is_end(&there.tag) && here.tag != there.tag => {
            Some(Difference::Cascade)
        }
        (None, None) if here.rows != there.rows => Some(Difference::RowCount),
        (None, None) if here.tag != there.tag => Some(Difference::Tag),
        (None, None) if have_other_rows(here, there, how) => Some(Difference::Rows),
        (None, None) => None,
    }
}

/// Where a hash was not taken on both sides, as after a RELOAD, nothing is known.
fn have_other_rows(here: &CommandResult, there: &CommandResult, how: RowHash) -> bool {
    here.row_hash(how).zip(there.row_hash(how)).is_some_and(|(here, there)| here != there)
}

fn is_end(tag: &str) -> bool {
    matches!(tag, "COMMIT" | "ROLLBACK")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ok(tag: &str, rows: u64, hash: u64) -> CommandResult {
        CommandResult { tag: tag.into(), rows, ordered: Some(hash), ..CommandResult::default() }
    }

    fn error(sqlstate: &[u8; 5]) -> CommandResult {
        CommandResult { sqlstate: Some(*sqlstate), ..CommandResult::default() }
    }

    #[test]
    fn each_difference() {
        let cases = [
            (ok("SELECT 1", 1, 7), ok("SELECT 1", 1, 7), None),
            (ok("SELECT 1", 1, 7), ok("SELECT 1", 1, 8), Some(Difference::Rows)),
            (ok("SELECT 1", 1, 7), ok("SELECT 2", 2, 7), Some(Difference::RowCount)),
            (ok("UPDATE 1", 0, 0), ok("UPDATE 0", 0, 0), Some(Difference::Tag)),
            (ok("UPDATE 1", 0, 0), error(b"42P01"), Some(Difference::ErrorThere)),
            (error(b"42P01"), ok("UPDATE 1", 0, 0), Some(Difference::ErrorHere)),
            (error(b"42P01"), error(b"42703"), Some(Difference::SqlState)),
            (error(b"42P01"), error(b"42P01"), None),
            (ok("UPDATE 1", 0, 0), error(b"25P02"), Some(Difference::Cascade)),
            (error(b"25P02"), ok("UPDATE 1", 0, 0), Some(Difference::Cascade)),
            (error(b"25P02"), error(b"25P02"), None),
            (ok("COMMIT", 0, 0), ok("ROLLBACK", 0, 0), Some(Difference::Cascade)),
        ];
        for (here, there, expected) in cases {
            assert_eq!(compare(&here, &there, RowHash::Ordered), expected, "{here:?} {there:?}");
            // Each mirror compares as it is told to.
            let without_rows = expected.filter(|difference| *difference != Difference::Rows);
            assert_eq!(compare(&here, &there, RowHash::Unordered), without_rows, "{here:?} {there:?}");
        }
    }
}
