// SPDX-License-Identifier: Apache-2.0
//! What becomes of a statement in a plan: whether it is left out, and what is sent in its place.

use std::collections::BTreeMap;

use underpass_sql::Class;
use underpass_trace::Protocol;
use underpass_wire::frontend::build;

use super::script::Open;
use super::{Options, Reason, Unit};
use crate::classify::{Block, Classifier, Statement, shape, statements};

/// Notes that a unit, the last of its session, executes a statement.
pub(super) fn execute(unit: &mut Unit, open: &mut Open, index: u32, classifier: &Classifier) {
    open.executes.push(index);
    unit.may_write |= classifier.get(index).summary.may_write;
}

/// Why a statement is not played, if it is not.
pub(super) fn left_out(statement: &Statement, options: &Options) -> Option<Reason> {
    if !is_wanted(statement, options) {
        Some(Reason::Filter)
    } else if statement.administers {
        Some(Reason::Administration)
    } else if options.read_only && matches!(statement.summary.class, Class::Write | Class::LiftsReadOnly) {
        Some(Reason::ReadOnly)
    } else {
        None
    }
}

/// Whether the filter of fingerprints lets a statement pass.
pub(super) fn is_wanted(statement: &Statement, options: &Options) -> bool {
    let always = matches!(
        statement.summary.class,
        Class::Transaction | Class::Session | Class::LiftsReadOnly | Class::Empty
    );
    always || options.filter.fingerprint(&statement.fingerprint)
}

/// What is sent in the place of a Query.
pub(super) struct Instead {
    pub message: Vec<u8>,
    /// Statements are missing in it, so that it is answered otherwise.
    pub is_shorter: bool,
}

/// Notes what a unit, the last of its session, executes by Query; what to send in its place, if that is something else.
pub(super) fn query(
    unit: &mut Unit,
    open: &mut Open,
    text: &[u8],
    classifier: &mut Classifier,
    options: &Options,
) -> Option<Instead> {
    let index = classifier.classify(text);
    let statement = classifier.get(index);
    open.copies = statement.copies_in;
    let reason = left_out(statement, options);
    // What follows is a transaction still, or none.
    let kept = reason.filter(|reason| *reason != Reason::Filter).and_then(|_| block(text));
    let Some((kept, is_shorter)) = kept else {
        execute(unit, open, index, classifier);
        if let Some(reason) = reason {
            unit.omitted.get_or_insert(reason);
        }
        return None;
    };
    if is_shorter {
        unit.left_out = reason;
        open.copies = 0;
        open.drop_copy = true;
        let index = classifier.classify(&kept);
        execute(unit, open, index, classifier);
    } else {
        execute(unit, open, index, classifier);
    }
    let mut message = Vec::new();
    build::query(&mut message, &kept);
    Some(Instead { message, is_shorter })
}

/// What is prepared in the place of a BEGIN that lets its transaction write.
pub(super) fn prepare(text: &[u8], classifier: &mut Classifier, options: &Options) -> Option<Vec<u8>> {
    if !options.read_only {
        return None;
    }
    let index = classifier.classify(text);
    let lifts = classifier.get(index).summary.class == Class::LiftsReadOnly;
    let (kept, is_shorter) = lifts.then(|| block(text))??;
    (!is_shorter).then_some(kept)
}

/// What a text does to the transaction block around it, as a text that does nothing else; and whether that has fewer statements.
fn block(text: &[u8]) -> Option<(Vec<u8>, bool)> {
    let shape = shape(text);
    // The END of a function's body is none of a transaction.
    if statements(&shape, Protocol::Postgres)
        .any(|words| words.windows(2).any(|pair| pair == ["begin", "atomic"]))
    {
        return None;
    }
    // How it ends the transaction around it, and what then begins one.
    let (mut ends, mut begins) = (None, None);
    for words in statements(&shape, Protocol::Postgres) {
        match Block::of(&words) {
            Some(Block::Begins) => begins = Some(begin(&words)),
            Some(Block::Ends) => {
                let chains = words.contains(&"chain") && !words.contains(&"no");
                match begins.take() {
                    // What the text itself began is over, and perhaps begins again.
                    Some(begin) => begins = chains.then_some(begin),
                    None => {
                        let rolls_back = matches!(words[0], "rollback" | "abort");
                        ends.get_or_insert(if rolls_back { "rollback" } else { "commit" });
                        begins = chains.then(|| CHAIN.to_owned());
                    }
                }
            }
            None => {}
        }
    }
    let kept = match (ends, begins) {
        (None, None) => return None,
        (None, Some(begin)) => begin,
        (Some(end), None) => end.to_owned(),
        (Some(end), Some(chain)) if chain == CHAIN => format!("{end} {chain}"),
        (Some(end), Some(begin)) => format!("{end}; {begin}"),
    };
    Some((kept.into_bytes(), statements(&shape, Protocol::Postgres).nth(1).is_some()))
}

/// What begins a transaction like the one before.
const CHAIN: &str = "and chain";

/// A statement that begins a transaction with the modes of this one, except that it may write.
pub(super) fn begin(words: &[&str]) -> String {
    let mut kept = Vec::new();
    for word in words {
        match word {
            // In front of it, no other mode has READ as its last word.
            &"write" if kept.last() == Some(&"read") => {
                kept.pop();
            }
            word => kept.push(*word),
        }
    }
    kept.join(" ")
}

/// The name that `PREPARE name ...` defines.
pub(super) fn prepared_by_sql(query: &[u8]) -> Option<Vec<u8>> {
    let mut words =
        query.split(|byte| byte.is_ascii_whitespace() || *byte == b'(').filter(|word| !word.is_empty());
    let prepares = words.next()?.eq_ignore_ascii_case(b"prepare");
    prepares.then(|| words.next().map(|name| name.trim_ascii().to_ascii_lowercase()))?
}

/// Takes out the prepared statements that a text gives up.
pub(super) fn give_up<T>(prepared: &mut BTreeMap<Vec<u8>, T>, text: &[u8]) {
    for given_up in given_up_by_sql(text) {
        match given_up {
            GivenUp::All => prepared.clear(),
            GivenUp::One(name) => {
                prepared.remove(&name);
            }
        }
    }
}

/// The same for a text that is known but for its names: whether all are given up.
pub(super) fn give_up_all<T>(prepared: &mut BTreeMap<Vec<u8>, T>, text: &[u8]) {
    if given_up_by_sql(text).any(|given_up| given_up == GivenUp::All) {
        prepared.clear();
    }
}

/// Prepared statements that a text gives up.
#[derive(Debug, PartialEq, Eq)]
enum GivenUp {
    All,
    One(Vec<u8>),
}

/// What `DISCARD ALL`, `DEALLOCATE ALL` and `DEALLOCATE name` in a text give up.
fn given_up_by_sql(query: &[u8]) -> impl Iterator<Item = GivenUp> {
    query.split(|byte| *byte == b';').filter_map(|one| {
        let mut words = one.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
        let deallocates = match words.next()? {
            word if word.eq_ignore_ascii_case(b"deallocate") => true,
            word if word.eq_ignore_ascii_case(b"discard") => false,
            _ => return None,
        };
        let mut name = words.next()?;
        if deallocates && name.eq_ignore_ascii_case(b"prepare") {
            name = words.next().unwrap_or(name);
        }
        match name.strip_prefix(b"\"").and_then(|name| name.strip_suffix(b"\"")) {
            _ if name.eq_ignore_ascii_case(b"all") => Some(GivenUp::All),
            Some(quoted) if deallocates => Some(GivenUp::One(quoted.to_vec())),
            None if deallocates => Some(GivenUp::One(name.to_ascii_lowercase())),
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_text_gives_up_is_read_from_its_words() {
        let one = |name: &[u8]| GivenUp::One(name.to_vec());
        for (text, given_up) in [
            (&b"discard all"[..], vec![GivenUp::All]),
            (b"CLOSE ALL; DEALLOCATE ALL;", vec![GivenUp::All]),
            (b"deallocate prepare \"S_1\"; deallocate S_1", vec![one(b"S_1"), one(b"s_1")]),
            (b"discard plans; select 1", vec![]),
        ] {
            assert_eq!(given_up_by_sql(text).collect::<Vec<_>>(), given_up);
        }
    }

    #[test]
    fn of_a_text_its_transaction_control_is_left() {
        for (text, kept) in [
            ("insert into t values (1); commit", Some(("commit", true))),
            ("insert into t values ('; rollback'); abort", Some(("rollback", true))),
            ("begin read write", Some(("begin", false))),
            ("begin; insert into t values (1)", Some(("begin", true))),
            ("begin; insert into t values (1); commit", None),
            ("commit; begin; insert into t values (1)", Some(("commit; begin", true))),
            (
                "start transaction isolation level serializable, read write, not deferrable",
                Some(("start transaction isolation level serializable not deferrable", false)),
            ),
            (
                "begin work READ WRITE isolation level read committed; insert into t values (1)",
                Some(("begin work isolation level read committed", true)),
            ),
            (
                "begin deferrable, read write; insert into t values (1); commit and chain",
                Some(("begin deferrable", true)),
            ),
            ("insert into t values (1); commit and chain", Some(("commit and chain", true))),
            ("insert into t values (1); rollback and no chain", Some(("rollback", true))),
            ("commit and chain; insert into t values (1); commit; begin", Some(("commit; begin", true))),
            ("insert into t values (1); rollback to a", None),
            ("create function f() returns int begin atomic select 1; select 2; end", None),
        ] {
            let kept = kept.map(|(text, is_shorter): (&str, bool)| (text.into(), is_shorter));
            assert_eq!(block(text.as_bytes()), kept, "{text}");
        }
    }
}
