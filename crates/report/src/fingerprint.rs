// SPDX-License-Identifier: Apache-2.0
//! Which statements are the same but for their literals: libpg_query's fingerprint, remembered by shape.

use underpass_sql::{Error, Statement, hash_fingerprint};
use underpass_trace::{Protocol, fold, strip_literals};

/// Shapes that are remembered; after that the memory is emptied. A workload has hundreds.
const SHAPES_MAX: usize = 50_000;

/// Tells and remembers fingerprints.
#[derive(Debug)]
pub struct Fingerprints {
    protocol: Protocol,
    by_shape: foldhash::HashMap<Vec<u8>, u64>,
}

impl Fingerprints {
    /// For statements of this protocol: MySQL's have the hash of their shape, whose words are in lower case and whose lists of values
    /// are one.
    pub fn new(protocol: Protocol) -> Self {
        Self { protocol, by_shape: foldhash::HashMap::default() }
    }

    /// The fingerprint of a text. For what is not in PostgreSQL's grammar, and for texts that are over [`underpass_sql::PARSED_BYTES_MAX`] without their
    /// literals, or have comments, dollar quotes or backslashes and are over it with them, it is a hash of the text without literals.
    pub fn of(&mut self, text: &[u8]) -> u64 {
        let shape = self.shape(text);
        if let Some(&known) = self.by_shape.get(&shape) {
            return known;
        }
        let fingerprint = match self.protocol {
            Protocol::Postgres => match underpass_sql::parse_bytes(text, underpass_sql::fingerprint) {
                Ok(fingerprint) => fingerprint,
                // Not remembered: others of this shape may be shorter.
                Err(Error::TooLong(_)) => return hash_fingerprint(&shape),
                Err(_) => hash_fingerprint(&shape),
            },
            Protocol::Mysql => hash_fingerprint(&shape),
        };
        if self.by_shape.len() >= SHAPES_MAX {
            self.by_shape.clear();
        }
        self.by_shape.insert(shape, fingerprint);
        fingerprint
    }

    fn shape(&self, text: &[u8]) -> Vec<u8> {
        let shape = strip_literals(text, self.protocol);
        match self.protocol {
            Protocol::Postgres => shape,
            Protocol::Mysql => fold(&shape),
        }
    }

    /// The text as it is shown, without literals and comments: with `$1` in their place where it can be parsed, otherwise its shape.
    pub fn label(&self, text: &[u8]) -> String {
        let parsed = match self.protocol {
            Protocol::Postgres => {
                underpass_sql::parse_bytes(text, |text| Ok(Statement::parse(text)?.text)).ok()
            }
            Protocol::Mysql => None,
        };
        let label = parsed.unwrap_or_else(|| String::from_utf8_lossy(&self.shape(text)).into_owned());
        label.split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

#[cfg(test)]
mod tests {
    use underpass_sql::PARSED_BYTES_MAX;

    use super::*;

    #[test]
    fn literals_make_no_difference_and_names_do() {
        let mut prints = Fingerprints::new(Protocol::Postgres);
        assert_eq!(prints.of(b"select 1"), prints.of(b"SELECT  2 -- x"));
        assert_eq!(
            prints.of(b"select * from t where a in (1,2)"),
            prints.of(b"select * from t where a in (3)")
        );
        assert_ne!(prints.of(b"select a from t"), prints.of(b"select b from t"));
        assert_eq!(prints.of(b"selekt 'a'"), prints.of(b"selekt 'b'"));
        assert_ne!(prints.of(b"selekt a"), prints.of(b"selekt b"));
        assert_eq!(prints.label(b"select *  from t where a = 'x'"), "select * from t where a = $1");
        assert_eq!(prints.label(b"selekt 'x'"), "selekt ?");
        assert_eq!(prints.label(b"select '\xff'"), "select $1");
        let mut prints = Fingerprints::new(Protocol::Postgres);
        let latin1 = prints.of(b"select b from t where a = '\xe9'");
        assert_eq!(prints.of(b"select  b from t where a = 'x'"), latin1);
        assert_eq!(Fingerprints::new(Protocol::Postgres).of(b"select b from t where a = 'x'"), latin1);
    }

    #[test]
    fn nothing_that_is_shown_has_a_literal_of_a_client() {
        let prints = Fingerprints::new(Protocol::Postgres);
        for (text, shown) in [
            ("create role r login password 'hidden'", "create role r login password $1"),
            ("set app.tenant to 'hidden'", "set app.tenant to $1"),
            ("comment on table t is 'hidden' -- hidden", "comment on table t is $1"),
            ("notify c, 'hidden'", "notify c, $1"),
            ("execute p('hidden', 4711)", "execute p($1, $2)"),
            ("do $$begin raise 'hidden'; end$$", "do $1"),
            ("/* hidden */ select 1", "select $1"),
            ("selekt 'hidden' /* hidden */", "selekt ?"),
        ] {
            assert_eq!(prints.label(text.as_bytes()), shown);
        }
        let prints = Fingerprints::new(Protocol::Mysql);
        assert!(!prints.label(b"set @a = 'hidden' -- hidden").contains("hidden"));
    }

    #[test]
    fn the_length_of_a_literal_makes_no_difference() {
        let of = |text: &[u8]| Fingerprints::new(Protocol::Postgres).of(text);
        let short = b"select b from t where a = 'x'";
        // The second is within the limit as it is, beyond it as UTF-8.
        for literal in [vec![b'x'; PARSED_BYTES_MAX], vec![0xe9; PARSED_BYTES_MAX / 2]] {
            let long = [&b"select b from t where a = '"[..], &literal[..], &b"'"[..]].concat();
            let mut prints = Fingerprints::new(Protocol::Postgres);
            assert_eq!(prints.of(&long), of(short));
            assert_eq!(prints.of(short), of(short));
            assert_eq!(prints.label(&long), "select b from t where a = $1");
        }
        // Too long to be told apart at a glance, but that is its own affair.
        let mut prints = Fingerprints::new(Protocol::Postgres);
        prints.of(format!("select b from t where a = $${}$$", "x".repeat(PARSED_BYTES_MAX)).as_bytes());
        assert_eq!(prints.of(short), of(short));
    }
}
