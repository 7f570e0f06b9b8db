// SPDX-License-Identifier: Apache-2.0
//! What reached the mirror: a row about a mirror that was switched off, or that lost half, is one about none; and one about a mirror that is to be
//! down is about that.

use anyhow::{Context, Result, ensure};

use crate::systems::{Instance, Place};

/// Transactions of clients, and those of them that the mirror has executed, from `SHOW MIRRORS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mirrored {
    transactions: u64,
    executed: u64,
}

/// Asks the console of `instance`, whose mirror is on, or to be down.
///
/// # Errors
/// When it does not answer, or the mirror is not so, with its reason.
pub fn read(instance: &Instance, place: Place<'_>, is_down: bool) -> Result<Mirrored> {
    parse(&instance.ask(place, "pgbouncer", "SHOW MIRRORS")?, is_down)
}

/// Reads the first row: mirror, database, host, port, mode, send, state, reason, transactions, executed and more.
fn parse(text: &str, is_down: bool) -> Result<Mirrored> {
    let words: Vec<&str> = text.lines().next().unwrap_or("").split('|').collect();
    let [_, _, _, _, _, _, state, reason, transactions, executed, ..] = words[..] else {
        anyhow::bail!("SHOW MIRRORS has no mirror: {text:?}");
    };
    // One that is down is tried again now and then.
    let wanted: &[&str] = if is_down { &["down", "checking"] } else { &["on"] };
    ensure!(wanted.contains(&state), "the mirror is {state}: {reason}");
    let number = |word: &str| word.parse().with_context(|| format!("SHOW MIRRORS: {word} is no number"));
    Ok(Mirrored { transactions: number(transactions)?, executed: number(executed)? })
}

impl Mirrored {
    /// Share of what was said since `before` that the mirror has executed; `None` when nothing was said. What waits in its
    /// queue is not in it.
    #[must_use]
    pub fn share_since(&self, before: &Self) -> Option<f64> {
        let said = self.transactions.saturating_sub(before.transactions) as f64;
        (said > 0.0).then(|| self.executed.saturating_sub(before.executed) as f64 / said)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_of_what_was_said_and_a_mirror_that_is_off_is_an_error() {
        let text = |state: &str, said: u64, done: u64| {
            format!("second|bench|127.0.0.1|5433|sync|all|{state}|timeout|{said}|{done}|0|0|0\n")
        };
        let parse = |text: &str| parse(text, false);
        let (before, after) = (parse(&text("on", 100, 90)).unwrap(), parse(&text("on", 200, 185)).unwrap());
        assert_eq!(after.share_since(&before), Some(0.95));
        assert_eq!(after.share_since(&after), None);
        let error = parse(&text("off", 200, 100)).unwrap_err().to_string();
        assert_eq!(error, "the mirror is off: timeout");
        assert!(parse("").is_err());
        let down = |state: &str| super::parse(&text(state, 200, 0), true);
        assert!(down("down").is_ok() && down("checking").is_ok() && down("on").is_err());
    }
}
