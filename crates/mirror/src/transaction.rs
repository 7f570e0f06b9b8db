// SPDX-License-Identifier: Apache-2.0
//! What a client said and was answered between two points at which no transaction was open.

use std::time::Duration;

use crate::answer::Answer;
use crate::request::Text;

/// The client asked for its running statement to be cancelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cancel {
    /// The cycle that ran, from 0.
    pub cycle: usize,
    /// For how long it had run.
    pub after: Duration,
}

/// What is known of a transaction besides its bytes.
#[derive(Debug, Default)]
pub struct Transaction {
    /// Statements that each cycle runs. The last one may be open if the client vanished.
    pub statements: Vec<Vec<Text>>,
    /// It has prepared a statement by a name.
    pub has_named: bool,
    /// What the primary answered.
    pub answers: Vec<Answer>,
    /// Statements that were cancelled on the primary.
    pub cancels: Vec<Cancel>,
    /// The client vanished in the middle: what it left is rolled back, after its last statement had run for this long.
    pub abandoned: Option<Duration>,
    /// SQLSTATE of the error with which the primary ended the session in the middle (`57P01`, `25P03`).
    pub ended: Option<[u8; 5]>,
}

impl Transaction {
    /// Whether all statements only read, as far as their texts tell. `reads` judges one.
    pub fn is_read_only(&self, mut reads: impl FnMut(&Text) -> bool) -> bool {
        self.statements.iter().flatten().all(&mut reads)
    }

    /// Whether it may have left something in its session that later transactions need, as far as that can be told: a statement, a setting, a
    /// temporary table.
    pub fn changes_session(&self, keeps: impl FnMut(&Text) -> bool) -> bool {
        self.has_named || !self.statements.iter().flatten().all(keeps)
    }
}

/// The statement that each result of a cycle belongs to, as far as that can be told: `statements` and results in step, or all results to
/// the first statement, which is then a script.
pub fn statements_of(statements: &[Text], results: usize) -> impl Iterator<Item = Option<&Text>> {
    let in_step = statements.len() > 1 || results <= 1;
    (0..results).map(move |index| if in_step { statements.get(index) } else { statements.first() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_find_their_statements() {
        let texts: Vec<Text> = [&b"a"[..], b"b"].map(Text::from).to_vec();
        let of = |texts: &[Text], results| -> Vec<Option<Vec<u8>>> {
            statements_of(texts, results).map(|text| text.map(|text| text.to_vec())).collect()
        };
        assert_eq!(of(&texts, 2), [Some(b"a".to_vec()), Some(b"b".to_vec())]);
        assert_eq!(of(&texts, 1), [Some(b"a".to_vec())]);
        assert_eq!(of(&texts[..1], 2), [Some(b"a".to_vec()), Some(b"a".to_vec())]);
        assert_eq!(of(&[], 1), [None]);
    }

    #[test]
    fn a_name_or_a_text_changes_the_session() {
        let of = |has_named| Transaction {
            has_named,
            statements: vec![vec![Text::from(&b"update"[..])]],
            ..Transaction::default()
        };
        assert!(of(true).changes_session(|_| true));
        assert!(of(false).changes_session(|_| false));
        assert!(!of(false).changes_session(|_| true));
    }

    #[test]
    fn one_writer_makes_a_writing_transaction() {
        let reads = |text: &Text| text.starts_with(b"select");
        let of = |texts: &[&[u8]]| Transaction {
            statements: texts.iter().map(|text| vec![Text::from(*text)]).collect(),
            ..Transaction::default()
        };
        assert!(of(&[b"select 1", b"select 2"]).is_read_only(reads));
        assert!(!of(&[b"select 1", b"update"]).is_read_only(reads));
    }
}
