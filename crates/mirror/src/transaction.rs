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

    /// Whether it may have left something in its session that later transactions need, as far as the texts tell: a statement, a setting, a
    /// temporary table.
    pub fn changes_session(&self) -> bool {
        self.has_named || self.statements.iter().flatten().any(|text| changes_session(text))
    }
}

/// By the words outside of strings and comments.
fn changes_session(text: &[u8]) -> bool {
    let (mut first, mut previous) = (String::new(), String::new());
    let mut rest = text;
    while let [byte, behind @ ..] = rest {
        match byte {
            b'\'' => rest = behind_end(behind, b"'"),
            b'-' if behind.starts_with(b"-") => rest = behind_end(behind, b"\n"),
            b'/' if behind.starts_with(b"*") => rest = behind_end(&behind[1..], b"*/"),
            b';' => {
                (first, previous) = (String::new(), String::new());
                rest = behind;
            }
            _ if is_word(*byte) => {
                let length = rest.iter().take_while(|byte| is_word(**byte)).count();
                let word = String::from_utf8_lossy(&rest[..length]).to_ascii_lowercase();
                rest = &rest[length..];
                let changes = match (first.as_str(), previous.as_str(), word.as_str()) {
                    ("", _, "reset" | "discard" | "deallocate") | (_, _, "set_config") => true,
                    ("set", "set", next) => !["local", "transaction", "constraints"].contains(&next),
                    ("prepare", "prepare", next) => next != "transaction",
                    (_, "create" | "replace" | "local" | "global" | "into", "temp" | "temporary") => true,
                    _ => false,
                };
                if changes {
                    return true;
                }
                if first.is_empty() {
                    first.clone_from(&word);
                }
                previous = word;
            }
            // A name in quotes is none of the words.
            b'"' => {
                rest = behind_end(behind, b"\"");
                let changes = first == "set" && previous == "set";
                if changes {
                    return true;
                }
                previous.clear();
            }
            _ => rest = behind,
        }
    }
    false
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

/// What is behind the first `end`.
fn behind_end<'a>(text: &'a [u8], end: &[u8]) -> &'a [u8] {
    let at = text.windows(end.len()).position(|part| part == end);
    at.map_or(&[], |at| &text[at + end.len()..])
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
            assert!(changes_session(text.as_bytes()), "{text}");
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
            assert!(!changes_session(text.as_bytes()), "{text}");
        }
        let named = Transaction { has_named: true, ..Transaction::default() };
        assert!(named.changes_session() && !Transaction::default().changes_session());
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
