// SPDX-License-Identifier: Apache-2.0
//! What differs on mirrors, per fingerprint of a statement.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use foldhash::fast::RandomState;
use serde::{Deserialize, Serialize};
use underpass_sql::{Statement, Varies, parse_bytes, strip_literals};

use crate::answer::{Answer, CommandResult, RowHash};
use crate::compare::{Difference, compare};
use crate::request::Text;
use crate::transaction::{Transaction, statements_of};

/// Texts whose parse is remembered. Texts that differ in literals only count once.
const TEXTS_MAX: usize = 8192;
/// Bytes of what they are remembered by. Texts whose literals are not told apart at a glance are remembered whole.
const TEXTS_BYTES_MAX: usize = 32 << 20;
/// Fingerprints that are told apart; further ones share a row.
const ROWS_MAX: usize = 5000;
/// Longest text of a statement that is kept, in bytes.
const TEXT_MAX: usize = 2000;
/// A statement counts as slower there if it took this many times as long, and [`SLOWER_BY`] longer.
const SLOWER_TIMES: u32 = 2;
/// See [`SLOWER_TIMES`]: below this, differences are the scheduler's.
const SLOWER_BY: Duration = Duration::from_millis(1);

/// Parsed statements by their text without literals.
#[derive(Debug, Default)]
pub struct Texts {
    known: HashMap<Box<[u8]>, Arc<Statement>, RandomState>,
    /// Bytes of its keys.
    bytes: usize,
    key: Vec<u8>,
}

impl Texts {
    /// The statement that `text` is, in whatever encoding. One that cannot be parsed has the fingerprint 0 and reads nothing for sure.
    pub fn statement(&mut self, text: &[u8]) -> Arc<Statement> {
        strip_literals(text, &mut self.key);
        if let Some(known) = self.known.get(&*self.key) {
            return known.clone();
        }
        // What is remembered is so for all texts of this key.
        let parsed = parse_bytes(text, Statement::parse);
        let statement = Arc::new(parsed.unwrap_or_else(|_| Statement {
            fingerprint: 0,
            text: "(cannot be parsed)".to_owned(),
            traits: underpass_sql::Traits::default(),
        }));
        // All at once, and rarely: what is in use comes back at once.
        if self.known.len() >= TEXTS_MAX || self.bytes + self.key.len() > TEXTS_BYTES_MAX {
            self.known.clear();
            self.bytes = 0;
        }
        self.bytes += self.key.len();
        self.known.insert(self.key.as_slice().into(), statement.clone());
        statement
    }
}

/// One difference, to look at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Example {
    /// The statement: as it was sent if literals may be shown, else without them.
    pub statement: String,
    /// What the primary answered.
    pub here: String,
    /// What the mirror answered.
    pub there: String,
}

/// What is known of one fingerprint on one mirror. Times are of cycles that run this statement alone, in microseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The mirror.
    pub mirror: String,
    /// The database of the pooler.
    pub database: String,
    /// libpg_query's fingerprint, 16 hexadecimal digits.
    pub fingerprint: String,
    /// Text without literals.
    pub query: String,
    /// Why results may differ with nothing being wrong.
    pub varies: Vec<Cow<'static, str>>,
    /// Results compared.
    pub compared: u64,
    /// Results that differ and should not, by [`Difference`].
    pub differences: Vec<(Cow<'static, str>, u64)>,
    /// Results that differ as they may: see `varies`.
    pub expected: u64,
    /// Cycles that were timed.
    pub timed: u64,
    /// Of them, those that took twice as long there, and a millisecond longer.
    pub slower: u64,
    /// Mean time on the primary.
    pub mean_here_us: u64,
    /// Mean time on the mirror.
    pub mean_there_us: u64,
    /// Longest time on the primary.
    pub max_here_us: u64,
    /// Longest time on the mirror.
    pub max_there_us: u64,
    /// The first difference that should not be.
    pub example: Option<Example>,
}

impl Row {
    /// How many results differ and should not.
    pub fn differing(&self) -> u64 {
        self.differences.iter().map(|(_, count)| count).sum()
    }

    /// Mean time there over mean time here; 0 where nothing was timed.
    pub fn ratio(&self) -> f64 {
        if self.timed == 0 { 0.0 } else { self.mean_there_us.max(1) as f64 / self.mean_here_us.max(1) as f64 }
    }
}

#[derive(Debug, Default)]
struct Entry {
    query: String,
    varies: Vec<Cow<'static, str>>,
    compared: u64,
    differences: [u64; Difference::ALL.len()],
    expected: u64,
    timed: u64,
    slower: u64,
    here: Duration,
    there: Duration,
    max_here: Duration,
    max_there: Duration,
    example: Option<Example>,
}

/// Times of all statements of a mirror.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Times {
    /// Cycles that were timed.
    pub timed: u64,
    /// Their time on the primary.
    pub here: Duration,
    /// Their time on the mirror.
    pub there: Duration,
}

/// Mirror, database, fingerprint.
type Key = (Arc<str>, Arc<str>, u64);

/// The table.
#[derive(Debug, Default)]
pub struct Differences {
    rows: HashMap<Key, Entry, RandomState>,
    texts: Texts,
}

impl Differences {
    /// Compares what the mirror answered (`there`) with the answers of the transaction, rows by `hash`. Returns how many
    /// cycles were compared.
    pub fn add(
        &mut self,
        mirror: &Arc<str>,
        database: &Arc<str>,
        transaction: &Transaction,
        there: &[Answer],
        hash: RowHash,
        show_literals: bool,
    ) -> u64 {
        let mut cycles = 0;
        for (index, (here, there)) in transaction.answers.iter().zip(there).enumerate() {
            cycles += 1;
            let statements = transaction.statements.get(index).map_or(&[][..], Vec::as_slice);
            let count = here.results.len().max(there.results.len());
            let [fails_here, fails_there] =
                [here, there].map(|answer| answer.results.iter().any(|result| result.sqlstate.is_some()));
            let has_error = fails_here || fails_there;
            let nothing = CommandResult::default();
            let statements: Vec<_> = statements_of(statements, count).map(Option::<&Text>::cloned).collect();
            for (at, text) in statements.iter().enumerate() {
                let text = text.as_deref().unwrap_or(b"");
                let statement = self.texts.statement(text);
                let entry = Self::entry(&mut self.rows, mirror, database, &statement);
                entry.compared += 1;
                let difference = match (here.results.get(at), there.results.get(at)) {
                    (Some(here), Some(there)) => compare(here, there, hash),
                    // An error that no result of the other stands beside: of a Parse, or of the Sync that commits.
                    (None, Some(there)) if !fails_here && there.sqlstate.is_some() => {
                        compare(&nothing, there, hash)
                    }
                    (Some(here), None) if !fails_there && here.sqlstate.is_some() => {
                        compare(here, &nothing, hash)
                    }
                    // An error ends a cycle early: it has been counted.
                    _ if has_error => continue,
                    _ => Some(Difference::ResultCount),
                };
                let Some(difference) = difference else { continue };
                if is_expected(difference, &statement, hash) {
                    entry.expected += 1;
                    continue;
                }
                entry.differences[difference as usize] += 1;
                if entry.example.is_none() && difference != Difference::Cascade {
                    let text =
                        if show_literals { String::from_utf8_lossy(text) } else { (&*statement.text).into() };
                    entry.example = Some(Example {
                        statement: clip(&text),
                        here: told(here.results.get(at), difference, hash, show_literals),
                        there: told(there.results.get(at), difference, hash, show_literals),
                    });
                }
            }
            if let ([text], false) = (&statements[..], has_error) {
                let statement = self.texts.statement(text.as_deref().unwrap_or(b""));
                Self::entry(&mut self.rows, mirror, database, &statement).time(here.took, there.took);
            }
        }
        cycles
    }

    fn entry<'a>(
        rows: &'a mut HashMap<Key, Entry, RandomState>,
        mirror: &Arc<str>,
        database: &Arc<str>,
        statement: &Statement,
    ) -> &'a mut Entry {
        let mut key = (mirror.clone(), database.clone(), statement.fingerprint);
        let mut query = &*statement.text;
        if rows.len() >= ROWS_MAX && !rows.contains_key(&key) {
            key.2 = u64::MAX;
            query = "(further statements)";
        }
        rows.entry(key).or_insert_with(|| Entry {
            query: clip(query),
            varies: statement.traits.all_varies().map(|varies| varies.name().into()).collect(),
            ..Entry::default()
        })
    }

    /// Forgets a mirror, of one database or of all.
    pub fn clear(&mut self, mirror: &str, database: Option<&str>) {
        self.rows.retain(|(name, of, _), _| {
            mirror != &**name || database.is_some_and(|database| database != &**of)
        });
    }

    /// What was timed, by mirror and database.
    pub fn times(&self) -> HashMap<(Arc<str>, Arc<str>), Times> {
        let mut all: HashMap<_, Times> = HashMap::new();
        for ((mirror, database, _), entry) in &self.rows {
            let times = all.entry((mirror.clone(), database.clone())).or_default();
            times.timed += entry.timed;
            times.here += entry.here;
            times.there += entry.there;
        }
        all
    }

    /// All rows: those with differences first, then by how much slower they are there.
    pub fn rows(&self) -> Vec<Row> {
        let mut rows: Vec<Row> = self.rows.iter().map(|(key, entry)| entry.row(key)).collect();
        rows.sort_by(|a, b| {
            let key = |row: &Row| (row.differing(), row.slower, row.compared);
            key(b).cmp(&key(a)).then_with(|| a.fingerprint.cmp(&b.fingerprint))
        });
        rows
    }
}

impl Entry {
    fn time(&mut self, here: Duration, there: Duration) {
        self.timed += 1;
        self.here += here;
        self.there += there;
        self.max_here = self.max_here.max(here);
        self.max_there = self.max_there.max(there);
        self.slower += u64::from(there > here * SLOWER_TIMES && there > here + SLOWER_BY);
    }

    fn row(&self, (mirror, database, fingerprint): &Key) -> Row {
        let mean = |total: Duration| (total.as_micros() as u64).checked_div(self.timed).unwrap_or(0);
        Row {
            mirror: mirror.to_string(),
            database: database.to_string(),
            fingerprint: format!("{fingerprint:016x}"),
            query: self.query.clone(),
            varies: self.varies.clone(),
            compared: self.compared,
            differences: Difference::ALL
                .into_iter()
                .map(|difference| (difference.name().into(), self.differences[difference as usize]))
                .filter(|(_, count)| *count > 0)
                .collect(),
            expected: self.expected,
            timed: self.timed,
            slower: self.slower,
            mean_here_us: mean(self.here),
            mean_there_us: mean(self.there),
            max_here_us: self.max_here.as_micros() as u64,
            max_there_us: self.max_there.as_micros() as u64,
            example: self.example.clone(),
        }
    }
}

/// Whether nothing need be wrong for this statement to differ so.
fn is_expected(difference: Difference, statement: &Statement, hash: RowHash) -> bool {
    match difference {
        Difference::Rows => {
            statement.traits.may_differ()
                || (hash == RowHash::Ordered && statement.traits.varies(Varies::Unordered))
        }
        Difference::Tag | Difference::RowCount => statement.traits.may_differ(),
        Difference::ErrorThere
        | Difference::ErrorHere
        | Difference::SqlState
        | Difference::Cascade
        | Difference::ResultCount => false,
    }
}

fn told(
    result: Option<&CommandResult>,
    difference: Difference,
    hash: RowHash,
    show_literals: bool,
) -> String {
    let Some(result) = result else { return "nothing".to_owned() };
    match result.sqlstate {
        // Messages quote values.
        Some(sqlstate) if show_literals => {
            format!("ERROR {}: {}", String::from_utf8_lossy(&sqlstate), result.message)
        }
        Some(sqlstate) => format!("ERROR {}", String::from_utf8_lossy(&sqlstate)),
        None if difference == Difference::Rows => {
            format!("{} (rows {:016x})", result.tag, result.row_hash(hash).unwrap_or_default())
        }
        None => format!("{}, {} rows", result.tag, result.rows),
    }
}

fn clip(text: &str) -> String {
    text.chars().take(TEXT_MAX).collect()
}

#[cfg(test)]
mod tests {
    use underpass_sql::PARSED_BYTES_MAX;

    use super::*;

    fn answer(results: Vec<CommandResult>, took_us: u64) -> Answer {
        Answer { results, status: b'I', took: Duration::from_micros(took_us) }
    }

    fn ok(tag: &str, hash: u64) -> CommandResult {
        CommandResult { tag: tag.into(), rows: 1, ordered: Some(hash), ..CommandResult::default() }
    }

    fn error(sqlstate: &[u8; 5]) -> CommandResult {
        CommandResult {
            sqlstate: Some(*sqlstate),
            message: "no such thing 'x'".into(),
            ..CommandResult::default()
        }
    }

    fn compared(cycles: &[(&str, CommandResult, CommandResult)], show_literals: bool) -> Vec<Row> {
        let transaction = Transaction {
            statements: cycles.iter().map(|(text, ..)| vec![Text::from(text.as_bytes())]).collect(),
            answers: cycles.iter().map(|(_, here, _)| answer(vec![here.clone()], 100)).collect(),
            ..Transaction::default()
        };
        let there: Vec<_> = cycles.iter().map(|(.., there)| answer(vec![there.clone()], 5000)).collect();
        let mut table = Differences::default();
        let names: (Arc<str>, Arc<str>) = ("m".into(), "d".into());
        let count = table.add(&names.0, &names.1, &transaction, &there, RowHash::Ordered, show_literals);
        assert_eq!(count, cycles.len() as u64);
        table.rows()
    }

    #[test]
    fn a_statement_is_the_same_whatever_its_literals() {
        let long = format!("select * from t where a = '{}'", "x".repeat(PARSED_BYTES_MAX));
        // Within the limit as it is, beyond it as UTF-8.
        let latin1 =
            [&b"select * from t where a = '"[..], &[0xe9; PARSED_BYTES_MAX / 2][..], &b"'"[..]].concat();
        let short: &[u8] = b"select * from t where a = 'x'";
        let orders: [[&[u8]; 4]; 3] = [
            [b"select * from t where a = '\xe9'", long.as_bytes(), short, &latin1],
            [long.as_bytes(), &latin1, short, b"select * from t where a = '\xe9'"],
            [&latin1, b"select * from t where a = '\xe9'", long.as_bytes(), short],
        ];
        for texts in orders {
            let mut known = Texts::default();
            for text in texts {
                let statement = known.statement(text);
                assert_ne!(statement.fingerprint, 0, "{}", statement.text);
                assert!(statement.text.starts_with("select * from t where a = "), "{}", statement.text);
            }
        }
    }

    #[test]
    fn long_texts_take_bounded_memory() {
        let mut known = Texts::default();
        for number in 0..200 {
            known.statement(format!("select E'\\n{number}{}'", "x".repeat(250 << 10)).as_bytes());
            assert_eq!(known.known.keys().map(|key| key.len()).sum::<usize>(), known.bytes);
            assert!(known.bytes <= TEXTS_BYTES_MAX);
        }
    }

    #[test]
    fn literals_are_hidden_unless_asked_for() {
        let cycles = [("select * from t where a = 'secret'", ok("SELECT 1", 0), error(b"42P01"))];
        let rows = compared(&cycles, false);
        assert_eq!(rows[0].differences, [("error_there".into(), 1)]);
        let example = rows[0].example.as_ref().unwrap();
        assert!(!format!("{:?}", rows[0]).contains("secret"), "{example:?}");
        assert_eq!(example.there, "ERROR 42P01");
        let rows = compared(&cycles, true);
        let example = rows[0].example.as_ref().unwrap();
        assert!(example.statement.contains("secret"));
        assert_eq!(example.there, "ERROR 42P01: no such thing 'x'");
    }

    #[test]
    fn what_may_vary_is_no_failure() {
        let rows = compared(
            &[
                ("select now() order by 1", ok("SELECT 1", 1), ok("SELECT 1", 2)),
                ("select a from t", ok("SELECT 1", 1), ok("SELECT 1", 2)),
                ("select a from t order by a", ok("SELECT 1", 1), ok("SELECT 1", 2)),
                ("select nextval('s') order by 1", ok("SELECT 1", 1), error(b"25006")),
            ],
            false,
        );
        let of = |part: &str| rows.iter().find(|row| row.query.ends_with(part)).unwrap();
        let clock = rows.iter().find(|row| row.query.contains("now()")).unwrap();
        assert_eq!((clock.expected, clock.differing()), (1, 0));
        assert_eq!(clock.varies, ["clock"]);
        assert_eq!((of("from t").expected, of("from t").differing()), (1, 0));
        assert_eq!(of("order by a").differences, [("rows".into(), 1)]);
        let sequence = rows.iter().find(|row| row.query.contains("nextval")).unwrap();
        assert_eq!(sequence.differences, [("error_there".into(), 1)]);
    }

    #[test]
    fn order_is_no_excuse_where_it_is_not_hashed() {
        let statement = Statement::parse("select a from t").unwrap();
        assert!(is_expected(Difference::Rows, &statement, RowHash::Ordered));
        assert!(!is_expected(Difference::Rows, &statement, RowHash::Unordered));
        let any = Statement::parse("select a from t limit 3").unwrap();
        assert!(is_expected(Difference::Rows, &any, RowHash::Unordered));
    }

    #[test]
    fn a_slower_plan_is_seen() {
        let rows = compared(&[("select 1 order by 1", ok("SELECT 1", 1), ok("SELECT 1", 1))], false);
        assert_eq!((rows[0].slower, rows[0].mean_here_us, rows[0].mean_there_us), (1, 100, 5000));
        assert!((rows[0].ratio() - 50.0).abs() < 0.01);
    }

    #[test]
    fn a_failure_and_its_cascade() {
        let rows = compared(
            &[
                ("insert into t values (1)", ok("INSERT 0 1", 0), error(b"42P01")),
                ("insert into u values (1)", ok("INSERT 0 1", 0), error(b"25P02")),
            ],
            false,
        );
        assert_eq!(rows.iter().map(Row::differing).sum::<u64>(), 2);
        assert!(rows.iter().any(|row| row.differences == [("cascade".into(), 1)] && row.example.is_none()));
    }

    /// Of cycles that run one statement, or none.
    fn of_cycle(text: Option<&str>, here: Vec<CommandResult>, there: Vec<CommandResult>) -> Vec<Row> {
        let transaction = Transaction {
            statements: vec![text.into_iter().map(|text| Text::from(text.as_bytes())).collect()],
            answers: vec![answer(here, 100)],
            ..Transaction::default()
        };
        let mut table = Differences::default();
        table.add(&"m".into(), &"d".into(), &transaction, &[answer(there, 100)], RowHash::Off, true);
        table.rows()
    }

    #[test]
    fn an_error_beside_which_nothing_stands_is_told() {
        let insert = "insert into t values (1)";
        let done = || ok("INSERT 0 1", 0);
        let rows = of_cycle(Some(insert), vec![done()], vec![done(), error(b"23505")]);
        assert_eq!(rows[0].differences, [("error_there".into(), 1)]);
        assert!(rows[0].example.as_ref().unwrap().there.contains("23505"));
        let rows = of_cycle(Some(insert), vec![done(), error(b"23505")], vec![done()]);
        assert_eq!(rows[0].differences, [("error_here".into(), 1)]);
        // A Parse alone.
        let rows = of_cycle(None, vec![], vec![error(b"42P01")]);
        assert_eq!(rows[0].differences, [("error_there".into(), 1)]);
        let rows = of_cycle(None, vec![], vec![error(b"25P02")]);
        assert_eq!(rows[0].differences, [("cascade".into(), 1)]);
        // The error that ended the cycle early is the only one that counts.
        let rows = of_cycle(Some(insert), vec![done(), error(b"23505")], vec![error(b"42P01")]);
        assert_eq!(rows[0].differences, [("error_there".into(), 1)]);
    }

    #[test]
    fn further_fingerprints_share_a_row() {
        let mut table = Differences::default();
        let names: (Arc<str>, Arc<str>) = ("m".into(), "d".into());
        for n in 0..ROWS_MAX + 10 {
            let statement = Statement {
                fingerprint: n as u64,
                text: "x".into(),
                traits: underpass_sql::Traits::default(),
            };
            Differences::entry(&mut table.rows, &names.0, &names.1, &statement).compared += 1;
        }
        assert_eq!(table.rows.len(), ROWS_MAX + 1);
        assert!(table.rows().iter().any(|row| row.compared == 10));
        table.clear("other", None);
        table.clear("m", Some("other"));
        assert_eq!(table.rows.len(), ROWS_MAX + 1);
        table.clear("m", Some("d"));
        assert!(table.rows.is_empty());
    }

    #[test]
    fn rows_are_json() {
        let rows = compared(&[("select 1", ok("SELECT 1", 1), error(b"57014"))], false);
        let json = serde_json::to_value(&rows).unwrap();
        assert_eq!(json[0]["query"], "select $1");
        assert_eq!(json[0]["differences"][0][0], "error_there");
    }
}
