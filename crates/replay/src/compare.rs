// SPDX-License-Identifier: Apache-2.0
//! What came out differently: from the capture, or from another target.

use std::collections::BTreeMap;

use serde::Serialize;
use underpass_wire::backend::TransactionStatus as Status;

use crate::outcome::{Actual, UnitOutcome};
use crate::plan::{End, Expected, Plan, Unit};
use crate::run::Played;

/// `in_failed_sql_transaction`: follows from an earlier error.
const IN_FAILED_TRANSACTION: [u8; 5] = *b"25P02";
/// `read_only_sql_transaction`: read-only mode did what it is for.
const READ_ONLY_TRANSACTION: [u8; 5] = *b"25006";

/// How an outcome differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// It succeeded there and fails here.
    Error,
    /// It failed there and succeeds here.
    NoError,
    /// It fails with another SQLSTATE.
    OtherError,
    /// Another number of rows sent, or affected.
    Rows,
    /// As many rows with other contents.
    RowContents,
    /// Another command tag.
    Tag,
    /// More or fewer results.
    Results,
    /// The transaction status after it.
    Status,
    /// The connection ended.
    Broken,
    /// Read-only mode: the server refused a write that the text did not show.
    RefusedWrite,
}

impl Kind {
    /// In words.
    pub fn text(self) -> &'static str {
        match self {
            Self::Error => "error instead of success",
            Self::NoError => "success instead of an error",
            Self::OtherError => "another error",
            Self::Rows => "another number of rows",
            Self::RowContents => "other rows",
            Self::Tag => "another command tag",
            Self::Results => "another number of results",
            Self::Status => "another transaction status",
            Self::Broken => "connection lost",
            Self::RefusedWrite => "write refused by read-only mode",
        }
    }
}

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Divergence {
    /// The session's number in the trace.
    pub session: u64,
    /// Offset of the unit's first message in the trace.
    pub offset: u64,
    /// What the unit is reported by.
    pub group: u32,
    /// How it differs.
    pub kind: Kind,
    /// What was there.
    pub expected: String,
    /// What is here.
    pub actual: String,
    /// Errors 25P02, on either side, that followed from this one in its transaction, and are not counted on their own.
    pub cascade: u64,
}

/// Of each kind of difference in each group so many examples are kept: everything may be different in a long trace.
pub const EXAMPLES_MAX: usize = 5;

/// Differences of one kind in one group of units.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// How many.
    pub count: u64,
    /// The first of them, in the order of sessions and units.
    pub examples: Vec<Divergence>,
}

/// The result of a comparison.
#[derive(Clone, Debug, Default)]
pub struct Compared {
    /// Units that were compared.
    pub units: u64,
    /// Of them, those without a difference.
    pub equal: u64,
    /// Units of which nothing is known that could be compared.
    pub unknown: u64,
    /// Differences by kind.
    pub kinds: BTreeMap<Kind, u64>,
    /// Errors 25P02 that followed from another difference.
    pub cascades: u64,
    /// Differences by group and kind.
    pub divergences: BTreeMap<(u32, Kind), Found>,
}

/// Compares a replay with the capture.
pub fn with_capture(plan: &Plan, played: &Played) -> Compared {
    let mut compared = Compared::default();
    for (session, actual) in plan.sessions.iter().zip(&played.sessions) {
        let mut walk = Walk::new(&mut compared, session.id.0);
        walk.is_imported = session.is_imported;
        for (unit, outcome) in session.units.iter().zip(&actual.units) {
            match outcome {
                UnitOutcome::NotSent => {}
                UnitOutcome::NoConnection => walk.broken(unit, "no connection"),
                UnitOutcome::Broken => walk.broken(unit, "no answer"),
                UnitOutcome::Answered(answered) => {
                    let expected: Vec<Side<'_>> = plan.expected(unit).iter().map(Side::expected).collect();
                    let known = unit.ready_ns().is_some() && expected.iter().all(|one| one.end.is_some());
                    if known && !(expected.is_empty() && plan.meta.level == underpass_trace::Level::None) {
                        let statements = actual.statements(answered);
                        walk.unit_or_nothing(plan, unit, &expected, unit.status, statements, answered.status);
                    } else {
                        walk.unknown(unit.status, answered.status);
                    }
                }
            }
        }
    }
    compared
}

/// Compares a replay (`played`) with one of the same plan on another target (`baseline`).
pub fn with_other(plan: &Plan, baseline: &Played, played: &Played) -> Compared {
    let mut compared = Compared::default();
    for (at, session) in plan.sessions.iter().enumerate() {
        let mut walk = Walk::new(&mut compared, session.id.0);
        let (those, these) = (&baseline.sessions[at], &played.sessions[at]);
        let pairs = those.units.iter().zip(&these.units);
        for (unit, pair) in session.units.iter().zip(pairs) {
            match pair {
                (UnitOutcome::Answered(there), UnitOutcome::Answered(here)) => {
                    let expected: Vec<Side<'_>> = those.statements(there).iter().map(Side::actual).collect();
                    walk.unit_or_nothing(
                        plan,
                        unit,
                        &expected,
                        there.status,
                        these.statements(here),
                        here.status,
                    );
                }
                (UnitOutcome::Answered(_), UnitOutcome::Broken) => walk.broken(unit, "no answer"),
                (UnitOutcome::Answered(_), UnitOutcome::NoConnection) => walk.broken(unit, "no connection"),
                (UnitOutcome::NotSent, _) | (_, UnitOutcome::NotSent) => {}
                _ => walk.compared.unknown += 1,
            }
        }
    }
    compared
}

/// One statement's outcome, wherever it comes from.
struct Side<'a> {
    end: Option<&'a End>,
    rows: u64,
    hash: Option<u64>,
}

impl<'a> Side<'a> {
    fn expected(expected: &'a Expected) -> Self {
        Self { end: expected.end.as_ref(), rows: expected.rows, hash: expected.hash }
    }

    fn actual(actual: &'a Actual) -> Self {
        Self { end: Some(&actual.end), rows: actual.rows, hash: Some(actual.hash) }
    }

    fn sqlstate(&self) -> Option<[u8; 5]> {
        match self.end {
            Some(End::Error(sqlstate, _)) => Some(*sqlstate),
            _ => None,
        }
    }

    fn text(&self) -> String {
        match self.end {
            Some(End::Complete(tag)) => format!("{} ({} rows)", String::from_utf8_lossy(tag), self.rows),
            Some(End::Empty) => "empty".into(),
            Some(End::Suspended) => format!("suspended after {} rows", self.rows),
            Some(End::Error(sqlstate, message)) => format!("{} {message}", String::from_utf8_lossy(sqlstate)),
            None => "unknown".into(),
        }
    }
}

/// Where a divergence is counted, and which of the examples there it is, if it is one.
#[derive(Clone, Copy)]
struct Root {
    place: (u32, Kind),
    example: usize,
}

/// Goes through the units of one session.
struct Walk<'c> {
    compared: &'c mut Compared,
    session: u64,
    /// What was there is from a log, which tells less.
    is_imported: bool,
    /// The divergence that put the transaction into its failed state on one side only, while that lasts on either.
    root: Option<Root>,
    /// The first divergence of the unit that is compared.
    first: Option<Root>,
}

impl<'c> Walk<'c> {
    fn new(compared: &'c mut Compared, session: u64) -> Self {
        Self { compared, session, is_imported: false, root: None, first: None }
    }

    fn broken(&mut self, unit: &Unit, how: &str) {
        self.compared.units += 1;
        self.add(unit, Kind::Broken, String::new(), how.into());
    }

    fn add(&mut self, unit: &Unit, kind: Kind, expected: String, actual: String) {
        *self.compared.kinds.entry(kind).or_default() += 1;
        let (session, offset, group) = (self.session, unit.offset, unit.group);
        let found = self.compared.divergences.entry((group, kind)).or_default();
        self.first.get_or_insert(Root { place: (group, kind), example: found.examples.len() });
        found.count += 1;
        if found.examples.len() < EXAMPLES_MAX {
            found.examples.push(Divergence { session, offset, group, kind, expected, actual, cascade: 0 });
        }
    }

    /// Something only follows from this divergence.
    fn follows(&mut self, root: Root) {
        self.compared.cascades += 1;
        let found = self.compared.divergences.get_mut(&root.place);
        if let Some(example) = found.and_then(|found| found.examples.get_mut(root.example)) {
            example.cascade += 1;
        }
    }

    /// Counts a unit whose outcome there is not known.
    fn unknown(&mut self, expected_status: Option<Status>, status: Option<Status>) {
        self.compared.unknown += 1;
        self.over_unless_failed([expected_status, status]);
    }

    /// Where the transaction is in its failed state on neither side, nothing more follows from what failed in it.
    fn over_unless_failed(&mut self, statuses: [Option<Status>; 2]) {
        if !statuses.contains(&Some(Status::Failed)) {
            self.root = None;
        }
    }

    /// Compares a unit, perhaps one of which nothing is executed: that it is equal says nothing.
    fn unit_or_nothing(
        &mut self,
        plan: &Plan,
        unit: &Unit,
        expected: &[Side<'_>],
        expected_status: Option<Status>,
        actual: &[Actual],
        status: Option<Status>,
    ) {
        let (units, equal) = (self.compared.units, self.compared.equal);
        self.unit(unit, expected, expected_status, actual, status);
        let is_empty = unit.left_out.is_some() && plan.executes(unit).is_empty();
        if is_empty && self.compared.equal > equal {
            (self.compared.units, self.compared.equal) = (units, equal);
        }
    }

    fn unit(
        &mut self,
        unit: &Unit,
        expected: &[Side<'_>],
        expected_status: Option<Status>,
        actual: &[Actual],
        status: Option<Status>,
    ) {
        self.first = None;
        self.compared.units += 1;
        let mut folded = false;
        // Of a Query of several statements a log tells how the last one ended that was executed.
        let actual = match (self.is_imported, expected.len()) {
            (true, 1) => &actual[actual.len().saturating_sub(1)..],
            _ => actual,
        };
        let count = expected.len().max(actual.len());
        for at in 0..count {
            let (there, here) = (expected.get(at), actual.get(at).map(Side::actual));
            match (there, here) {
                (Some(there), Some(here)) => {
                    // On one side only: what it would have done there, nobody knows.
                    let cascades = (here.sqlstate() == Some(IN_FAILED_TRANSACTION))
                        != (there.sqlstate() == Some(IN_FAILED_TRANSACTION));
                    match self.root {
                        Some(root) if cascades => {
                            self.follows(root);
                            folded = true;
                        }
                        _ => self.statement(unit, there, &here),
                    }
                    // After an error the rest of the unit is missing, which says nothing new.
                    if here.sqlstate().is_some() != there.sqlstate().is_some() {
                        break;
                    }
                }
                (there, here) => {
                    let text = |side: Option<&Side<'_>>| side.map_or("no result".into(), Side::text);
                    self.add(unit, Kind::Results, text(there), text(here.as_ref()));
                    break;
                }
            }
        }
        if (status == Some(Status::Failed)) != (expected_status == Some(Status::Failed)) {
            self.root = self.root.or(self.first);
        }
        let differs = self.first.is_some();
        if !differs && !folded && self.root.is_none() {
            match (expected_status, status) {
                // A log does not tell it: it is inferred from the words.
                (Some(there), Some(here)) if there != here && !self.is_imported => {
                    self.add(unit, Kind::Status, format!("{there:?}"), format!("{here:?}"));
                }
                _ => self.compared.equal += 1,
            }
        } else if !differs && !folded {
            // In a transaction that failed on one side only: COMMIT becomes ROLLBACK, and nothing else is new.
            self.compared.equal += 1;
        }
        self.over_unless_failed([expected_status, status]);
    }

    fn statement(&mut self, unit: &Unit, there: &Side<'_>, here: &Side<'_>) {
        let kind = match (there.end, here.end) {
            (Some(End::Error(was, _)), Some(End::Error(is, _))) if was == is => return,
            (Some(End::Error(..)), Some(End::Error(..))) => Kind::OtherError,
            (_, Some(End::Error(READ_ONLY_TRANSACTION, _))) => Kind::RefusedWrite,
            (_, Some(End::Error(..))) => Kind::Error,
            (Some(End::Error(..)), _) => Kind::NoError,
            // What the process had been called before it was given nothing to do.
            (Some(End::Complete(_)), Some(End::Empty)) if self.is_imported => return,
            (Some(End::Complete(was)), Some(End::Complete(is))) => {
                let ((was, was_rows), (is, mut is_rows)) = (split_tag(was), split_tag(is));
                let mut is_same = was == is;
                if self.is_imported {
                    is_same = is_in_log(was, is);
                    // It has no numbers.
                    is_rows = was_rows.and(is_rows);
                }
                // COMMIT of a transaction that failed on one side says ROLLBACK there; its reason is reported already.
                if !is_same && self.root.is_some() {
                    if let Some(root) = self.root {
                        self.follows(root);
                    }
                    return;
                }
                match (is_same, was_rows == is_rows) {
                    (false, _) => Kind::Tag,
                    (true, false) => Kind::Rows,
                    (true, true) => return self.rows(unit, there, here, was_rows.is_some()),
                }
            }
            // As many as it was asked for.
            (Some(End::Suspended), Some(End::Suspended)) => return self.rows(unit, there, here, true),
            (Some(was), Some(is)) if std::mem::discriminant(was) != std::mem::discriminant(is) => Kind::Tag,
            _ => return self.rows(unit, there, here, false),
        };
        self.add(unit, kind, there.text(), here.text());
    }

    /// Compares the rows of results that ended in the same way. Where that tells their number already, the rows that were seen may be fewer
    /// (a trace does not have all of a long response) or more (COPY sends a header, too).
    fn rows(&mut self, unit: &Unit, there: &Side<'_>, here: &Side<'_>, is_number_told: bool) {
        if self.is_imported || there.rows != here.rows && is_number_told {
            return;
        }
        if there.rows != here.rows {
            self.add(unit, Kind::Rows, there.text(), here.text());
        } else if there.hash.is_some_and(|hash| Some(hash) != here.hash) {
            self.add(unit, Kind::RowContents, there.text(), here.text());
        }
    }
}

/// The words of a command tag, and its number of rows.
fn split_tag(tag: &[u8]) -> (&[u8], Option<u64>) {
    match tag.iter().rposition(|byte| *byte == b' ') {
        Some(at) => match std::str::from_utf8(&tag[at + 1..]).ok().and_then(|digits| digits.parse().ok()) {
            Some(rows) => (&tag[..at], Some(rows)),
            None => (tag, None),
        },
        None => (tag, None),
    }
}

/// Whether a log calls a statement so that ended with a tag of these words. It has the title of the process: what the statement is, not how
/// it ended.
fn is_in_log(title: &[u8], tag: &[u8]) -> bool {
    let words = |text| <[u8]>::strip_suffix(text, b" 0").unwrap_or(text);
    match (words(title), words(tag)) {
        (title, tag) if title == tag => true,
        // Another title, `idle` for one, where the server does not keep it (`update_process_title`).
        (title, _) if title.is_empty() || title.iter().any(u8::is_ascii_lowercase) => true,
        (b"EXECUTE", _) => true,
        (b"CREATE TABLE AS" | b"CREATE MATERIALIZED VIEW" | b"SELECT INTO", b"SELECT") => true,
        (b"COMMIT" | b"PREPARE TRANSACTION", b"ROLLBACK") => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit() -> Unit {
        Unit::new(7, 0, 0, 0)
    }

    fn complete(tag: &str) -> Actual {
        Actual { end: End::Complete(tag.as_bytes().into()), rows: 0, hash: 0 }
    }

    fn error(sqlstate: &[u8; 5]) -> Actual {
        Actual { end: End::Error(*sqlstate, "no".into()), rows: 0, hash: 0 }
    }

    /// Units as (there, status there, here, status here).
    fn compare(units: &[(&[Actual], Status, &[Actual], Status)]) -> Compared {
        let mut compared = Compared::default();
        let mut walk = Walk::new(&mut compared, 1);
        for (there, status_there, here, status_here) in units {
            let expected: Vec<Side<'_>> = there.iter().map(Side::actual).collect();
            walk.unit(&unit(), &expected, Some(*status_there), here, Some(*status_here));
        }
        compared
    }

    fn kinds(compared: &Compared) -> Vec<(Kind, u64)> {
        let examples = compared.divergences.values().flat_map(|found| &found.examples);
        examples.map(|one| (one.kind, one.cascade)).collect()
    }

    #[test]
    fn the_same_is_equal() {
        let compared = compare(&[
            (&[complete("SELECT 5")], Status::Idle, &[complete("SELECT 5")], Status::Idle),
            (&[error(b"23505")], Status::Idle, &[error(b"23505")], Status::Idle),
        ]);
        assert_eq!((compared.units, compared.equal), (2, 2));
    }

    #[test]
    fn every_kind_is_told() {
        let rows = |rows| Actual { rows, ..complete("FETCH") };
        let hash = |hash| Actual { hash, ..complete("FETCH") };
        let suspended = |hash| Actual { end: End::Suspended, rows: 5, hash };
        for (there, here, kind) in [
            (complete("SELECT 5"), error(b"42P01"), Kind::Error),
            (error(b"42P01"), complete("SELECT 5"), Kind::NoError),
            (error(b"42P01"), error(b"23505"), Kind::OtherError),
            (complete("UPDATE 5"), complete("UPDATE 6"), Kind::Rows),
            (rows(1), rows(2), Kind::Rows),
            (hash(1), hash(2), Kind::RowContents),
            (suspended(1), suspended(2), Kind::RowContents),
            (complete("INSERT 0 1"), complete("UPDATE 1"), Kind::Tag),
            (complete("UPDATE 1"), error(b"25006"), Kind::RefusedWrite),
        ] {
            let compared = compare(&[(&[there], Status::Idle, &[here], Status::Idle)]);
            assert_eq!(kinds(&compared), [(kind, 0)]);
            assert_eq!(compared.equal, 0);
        }
        let compared = compare(&[(&[complete("A")], Status::Idle, &[], Status::Idle)]);
        assert_eq!(kinds(&compared), [(Kind::Results, 0)]);
        let compared = compare(&[(&[complete("A")], Status::Idle, &[complete("A")], Status::Transaction)]);
        assert_eq!(kinds(&compared), [(Kind::Status, 0)]);
    }

    #[test]
    fn what_a_log_does_not_tell_is_no_difference() {
        let compare = |there: &Actual, here: &[Actual], status| {
            let mut compared = Compared::default();
            let mut walk = Walk::new(&mut compared, 1);
            walk.is_imported = true;
            let expected = [Side::actual(there)];
            walk.unit(&unit(), &expected, Some(Status::Idle), here, Some(status));
            assert_eq!((compared.units, compared.equal), (1, u64::from(compared.kinds.is_empty())));
            kinds(&compared).first().map(|one| one.0)
        };
        let rows = |tag, rows| Actual { rows, ..complete(tag) };
        let empty = Actual { end: End::Empty, ..complete("") };
        for (there, here, kind) in [
            (complete("SELECT"), rows("SELECT 5", 5), None),
            (complete("INSERT"), complete("INSERT 0 1"), None),
            (complete("INSERT 0 1"), complete("INSERT 0 2"), Some(Kind::Rows)),
            (complete("EXPLAIN"), rows("EXPLAIN", 5), None),
            (complete("EXECUTE"), complete("UPDATE 1"), None),
            (complete("SELECT INTO"), complete("SELECT 1"), None),
            (complete("COMMIT"), complete("ROLLBACK"), None),
            (complete("idle"), complete("SELECT 1"), None),
            (complete("idle"), empty, None),
            (complete("INSERT"), complete("UPDATE 1"), Some(Kind::Tag)),
            (complete("SELECT"), error(b"42P01"), Some(Kind::Error)),
            (error(b"42P01"), complete("SELECT 1"), Some(Kind::NoError)),
        ] {
            assert_eq!(compare(&there, &[here], Status::Idle), kind);
        }
        // Of several statements it tells of the last that was executed; the status it does not tell at all.
        let all = [complete("BEGIN"), rows("SELECT 5", 5), complete("UPDATE 1")];
        assert_eq!(compare(&complete("UPDATE"), &all, Status::Transaction), None);
        assert_eq!(compare(&complete("SELECT"), &all, Status::Transaction), Some(Kind::Tag));
        let failed = [complete("BEGIN"), error(b"22012")];
        assert_eq!(compare(&error(b"22012"), &failed, Status::Failed), None);
    }

    #[test]
    fn rows_are_not_counted_where_the_end_tells_their_number() {
        let rows = |tag, rows| Actual { rows, ..complete(tag) };
        let suspended = |rows| Actual { end: End::Suspended, rows, hash: 0 };
        for (there, here, kind) in [
            (rows("COPY 5", 5), rows("COPY 5", 6), None),
            (suspended(160), suspended(1000), None),
            (rows("SELECT 1000", 160), rows("SELECT 1000", 1000), None),
            (rows("SELECT 1000", 160), rows("SELECT 999", 160), Some(Kind::Rows)),
            (rows("EXPLAIN", 5), rows("EXPLAIN", 6), Some(Kind::Rows)),
        ] {
            let compared = compare(&[(&[there], Status::Idle, &[here], Status::Idle)]);
            assert_eq!(kinds(&compared).first().map(|one| one.0), kind);
        }
    }

    #[test]
    fn what_follows_from_an_error_is_folded_into_it() {
        let (t, e, i) = (Status::Transaction, Status::Failed, Status::Idle);
        let compared = compare(&[
            (&[complete("BEGIN")], t, &[complete("BEGIN")], t),
            (&[complete("INSERT 0 1")], t, &[error(b"23505")], e),
            (&[complete("UPDATE 1")], t, &[error(b"25P02")], e),
            (&[complete("SELECT 1")], t, &[error(b"25P02")], e),
            (&[complete("COMMIT")], i, &[complete("ROLLBACK")], i),
            (&[complete("SELECT 1")], i, &[complete("SELECT 1")], i),
        ]);
        assert_eq!(kinds(&compared), [(Kind::Error, 3)]);
        assert_eq!(compared.divergences[&(0, Kind::Error)].examples[0].offset, 7);
        assert_eq!(compared.cascades, 3);
    }

    #[test]
    fn what_followed_from_an_error_at_capture_is_folded_into_it() {
        let (t, e, i) = (Status::Transaction, Status::Failed, Status::Idle);
        let failed = [
            (&[complete("BEGIN")][..], t, &[complete("BEGIN")][..], t),
            (&[error(b"40P01")], e, &[complete("INSERT 0 1")], t),
            (&[error(b"25P02")], e, &[complete("UPDATE 1")], t),
            (&[error(b"25P02")], e, &[error(b"23505")], e),
            (&[error(b"25P02")], e, &[error(b"25P02")], e),
        ];
        let after = (&[complete("SELECT 1")][..], i, &[complete("SELECT 2")][..], i);
        // What comes behind the end of the transaction is new, also where that is ROLLBACK TO SAVEPOINT.
        for (end, tag, status) in [("ROLLBACK", "COMMIT", i), ("ROLLBACK", "ROLLBACK", t)] {
            let end = (&[complete(end)][..], status, &[complete(tag)][..], status);
            let compared = compare(&[&failed[..], &[end, after]].concat());
            let follows = 2 + u64::from(tag == "COMMIT");
            assert_eq!(kinds(&compared), [(Kind::NoError, follows), (Kind::Rows, 0)]);
            assert_eq!(compared.cascades, follows);
        }
    }

    #[test]
    fn what_followed_at_capture_from_an_error_that_is_not_played_counts_once() {
        let (t, e, i) = (Status::Transaction, Status::Failed, Status::Idle);
        let compared = compare(&[
            (&[error(b"25P02")], e, &[complete("SELECT 1")], t),
            (&[error(b"25P02")], e, &[complete("SELECT 1")], t),
            (&[complete("ROLLBACK")], i, &[complete("COMMIT")], i),
        ]);
        assert_eq!(kinds(&compared), [(Kind::NoError, 2)]);
    }

    #[test]
    fn where_everything_differs_some_are_kept_and_all_are_counted() {
        let (there, here) = ([complete("SELECT 5")], [error(b"42P01")]);
        let unit = (&there[..], Status::Idle, &here[..], Status::Idle);
        let compared = compare(&vec![unit; 10_000]);
        let found = &compared.divergences[&(0, Kind::Error)];
        assert_eq!((found.count, found.examples.len(), compared.kinds[&Kind::Error]), (10_000, 5, 10_000));
    }

    #[test]
    fn a_cascade_that_was_there_at_capture_is_equal() {
        let e = Status::Failed;
        let compared = compare(&[
            (&[error(b"23505")], e, &[error(b"23505")], e),
            (&[error(b"25P02")], e, &[error(b"25P02")], e),
        ]);
        assert_eq!((compared.equal, compared.divergences.len()), (2, 0));
    }

    #[test]
    fn tags_are_split() {
        assert_eq!(split_tag(b"INSERT 0 5"), (&b"INSERT 0"[..], Some(5)));
        assert_eq!(split_tag(b"CREATE TABLE"), (&b"CREATE TABLE"[..], None));
        assert_eq!(split_tag(b"BEGIN"), (&b"BEGIN"[..], None));
    }
}
