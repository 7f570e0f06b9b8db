// SPDX-License-Identifier: Apache-2.0
//! Which prepared statements of a MySQL session have to do with a password. They have numbers, which only the answer tells: until
//! then, any number may be that of one that was asked for.

use underpass_mysql::command::{
    COM_RESET_CONNECTION, COM_STMT_CLOSE, COM_STMT_PREPARE, LAST_PREPARED, statement_number,
};

use crate::model::Outcome;
use crate::statements::prepared_tag;

/// Where a statement has a password besides its text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Secret {
    /// In its parameters: it sets one, or puts together SQL that does.
    pub(super) parameters: bool,
    /// In the rows that answer it.
    pub(super) rows: bool,
}

impl Secret {
    const NONE: Self = Self { parameters: false, rows: false };

    fn or(self, other: Self) -> Self {
        Self { parameters: self.parameters || other.parameters, rows: self.rows || other.rows }
    }
}

/// The statements of a session.
#[derive(Debug, Default)]
pub(super) struct Prepared {
    /// Those that were asked for and not answered, by their offsets.
    asked: Vec<(u64, Secret)>,
    numbers: foldhash::HashMap<u32, Secret>,
    /// The last that was asked for.
    last: Secret,
}

impl Prepared {
    /// Follows a command; `secret` is what its text tells, if it has one. Returns what the statement that it is about has.
    pub(super) fn follow(&mut self, offset: u64, payload: &[u8], secret: Secret) -> Secret {
        match payload.first() {
            Some(&COM_STMT_PREPARE) => {
                if !self.is_empty() || secret != Secret::NONE {
                    self.asked.push((offset, secret));
                }
                self.last = secret;
                return secret;
            }
            Some(&COM_RESET_CONNECTION) => *self = Self::default(),
            _ => {}
        }
        let Some(number) = statement_number(payload) else { return secret };
        let known = match number {
            LAST_PREPARED => self.last,
            number => self.numbers.get(&number).copied().unwrap_or_default(),
        };
        if payload.first() == Some(&COM_STMT_CLOSE) {
            self.numbers.remove(&number);
            return Secret::NONE; // it has no answer
        }
        self.asked.iter().fold(known, |secret, (_, asked)| secret.or(*asked))
    }

    /// The server answered this request. What is not known of it stays possible.
    pub(super) fn answered(&mut self, request: u64, outcome: &Outcome<'_>) {
        let Some(at) = self.asked.iter().position(|(offset, _)| *offset == request) else { return };
        match outcome {
            Outcome::Complete { tag } => {
                let Some((number, _)) = prepared_tag(tag) else { return };
                let (_, secret) = self.asked.remove(at);
                if secret == Secret::NONE {
                    self.numbers.remove(&number);
                } else {
                    self.numbers.insert(number, secret);
                }
            }
            Outcome::Error(_) => drop(self.asked.remove(at)),
            _ => {}
        }
    }

    /// The text of a statement came to be known, and that it has this.
    pub(super) fn filled(&mut self, number: u32, secret: Secret) {
        self.numbers.insert(number, secret);
    }

    /// Whether nothing is to be remembered.
    pub(super) fn is_empty(&self) -> bool {
        self.asked.is_empty() && self.numbers.is_empty() && self.last == Secret::NONE
    }
}
