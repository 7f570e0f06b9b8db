// SPDX-License-Identifier: Apache-2.0
//! What the statements of a text do to a transaction block, by their words.

use crate::{Protocol, TransactionStatus, fold, strip_literals};

/// What a statement does to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// BEGIN, START TRANSACTION.
    Begins,
    /// COMMIT, ROLLBACK, PREPARE TRANSACTION, and other words for them.
    Ends {
        /// What was done in it lasts.
        commits: bool,
    },
    /// AND CHAIN: it ends one and begins the next.
    Chains {
        /// What was done in the first lasts.
        commits: bool,
    },
    /// ROLLBACK TO SAVEPOINT, after which a block that had failed goes on.
    Resumes,
    /// All others.
    Nothing,
}

impl Effect {
    /// By the words of a statement in lower case.
    pub fn of(words: &[&str]) -> Self {
        let commits = match words {
            // BEGIN NOT ATOMIC is a compound statement of MariaDB.
            ["begin", "not", ..] => return Self::Nothing,
            ["begin", ..] | ["start", "transaction", ..] => return Self::Begins,
            ["prepare", "transaction", ..] => return Self::Ends { commits: true },
            // COMMIT PREPARED stands outside of blocks.
            [_, "prepared", ..] => return Self::Nothing,
            ["commit" | "end", ..] => true,
            ["rollback" | "abort", ..] => false,
            _ => return Self::Nothing,
        };
        let rest: Vec<&str> =
            words[1..].iter().copied().filter(|word| !matches!(*word, "work" | "transaction")).collect();
        match rest[..] {
            ["to", ..] => Self::Resumes,
            ["and", "chain", ..] => Self::Chains { commits },
            _ => Self::Ends { commits },
        }
    }

    /// The status after it, if it is done.
    pub fn after(self, before: TransactionStatus) -> TransactionStatus {
        match (before, self) {
            (TransactionStatus::Idle, Self::Begins) => TransactionStatus::Transaction,
            (TransactionStatus::Idle, _) | (_, Self::Ends { .. }) => TransactionStatus::Idle,
            (_, Self::Chains { .. } | Self::Resumes) => TransactionStatus::Transaction,
            (before, Self::Begins | Self::Nothing) => before,
        }
    }

    /// The status after it, if it fails. A COMMIT that fails has rolled back.
    pub fn failed(self, before: TransactionStatus) -> TransactionStatus {
        match (before, self) {
            (TransactionStatus::Idle, _) | (_, Self::Ends { .. } | Self::Chains { .. }) => {
                TransactionStatus::Idle
            }
            _ => TransactionStatus::Failed,
        }
    }
}

/// A statement of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Its first word in lower case; empty if it begins with none.
    pub verb: String,
    /// What it does.
    pub effect: Effect,
}

/// The statements of a text without literals and comments ([`strip_literals`]): it is cut at each `;` that is not in a name. Some may be blank.
pub fn parts(shape: &str, protocol: Protocol) -> impl Iterator<Item = &str> {
    let quote = match protocol {
        Protocol::Postgres => '"',
        Protocol::Mysql => '`',
    };
    let mut in_name = false;
    shape.split(move |c: char| {
        in_name ^= c == quote;
        c == ';' && !in_name
    })
}

/// The words of one of [`parts`]: names, too, in their quotes or not.
pub fn words(part: &str) -> Vec<&str> {
    part.split(|c| !is_word(c)).filter(|word| !word.is_empty()).collect()
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The statements of a text of PostgreSQL, in order.
pub fn steps(text: &[u8]) -> Vec<Step> {
    let shape = String::from_utf8_lossy(&fold(&strip_literals(text, Protocol::Postgres))).into_owned();
    let mut steps = Vec::new();
    let mut in_body = false;
    for one in parts(&shape, Protocol::Postgres).filter(|one| !one.trim().is_empty()) {
        let words = words(one);
        // What is between BEGIN ATOMIC and END is a function's.
        if in_body {
            in_body = words.first() != Some(&"end");
            continue;
        }
        in_body =
            words.first() == Some(&"create") && words.windows(2).any(|two| *two == ["begin", "atomic"][..]);
        let verb = if one.trim_start().starts_with(is_word) { words.first().copied() } else { None };
        let verb = verb.unwrap_or_default().to_owned();
        let effect = if verb.is_empty() { Effect::Nothing } else { Effect::of(&words) };
        steps.push(Step { verb, effect });
    }
    steps
}

/// The status after a text all of whose statements were done.
pub fn after(before: TransactionStatus, steps: &[Step]) -> TransactionStatus {
    steps.iter().fold(before, |status, step| step.effect.after(status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_statement_of_a_text_counts() {
        use TransactionStatus::{Failed, Idle, Transaction};
        for (before, text, status) in [
            (Idle, "begin", Transaction),
            (Idle, "/* app */ BEGIN isolation level serializable", Transaction),
            (Idle, "start transaction read only", Transaction),
            (Idle, "begin; update t set a = 1; commit", Idle),
            (Idle, "commit; begin", Transaction),
            (Idle, "select 'x; begin', \"begin\"; -- begin\n", Idle),
            (Idle, "do $$begin perform 1; end$$", Idle),
            (Idle, "\"begin\"", Idle),
            (Idle, "select 1 as \"x; begin\"", Idle),
            (Transaction, "commit and chain", Transaction),
            (Transaction, "commit work and no chain", Idle),
            (Failed, "rollback transaction and chain", Transaction),
            (Failed, "rollback work to savepoint s", Transaction),
            (Failed, "rollback to \"chain\"; abort", Idle),
            (Transaction, "prepare transaction 'x'", Idle),
            (Transaction, "prepare p as select 1", Transaction),
            (Idle, "commit prepared 'x'", Idle),
            (Transaction, "end", Idle),
            (
                Transaction,
                "create function f() returns int begin atomic select 1; end; select 1",
                Transaction,
            ),
            (Transaction, ";;", Transaction),
        ] {
            assert_eq!(after(before, &steps(text.as_bytes())), status, "{text}");
        }
    }

    #[test]
    fn a_commit_that_fails_is_the_end() {
        let commit = Effect::Ends { commits: true };
        assert_eq!(commit.failed(TransactionStatus::Transaction), TransactionStatus::Idle);
        assert_eq!(Effect::Resumes.failed(TransactionStatus::Transaction), TransactionStatus::Failed);
        assert_eq!(Effect::Nothing.failed(TransactionStatus::Idle), TransactionStatus::Idle);
    }
}
