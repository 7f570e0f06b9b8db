// SPDX-License-Identifier: Apache-2.0
//! Who a row belongs to, written into the row itself, and what it means when it turns up at the wrong place.
//!
//! A token is `o<client>.<sequence>.<checksum>`. Sequences rise with every statement of a client and are never used twice,
//! the checksum binds both to the run's seed. A client knows exactly which tokens come next, so any other byte is a fault.

use std::fmt;
use std::io::Write as _;

/// A statement of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// Seed of the run.
    pub seed: u64,
    /// The client, from 0.
    pub client: u32,
    /// The client's count of statements.
    pub sequence: u64,
}

impl Owner {
    /// Appends the token.
    pub fn write(self, out: &mut Vec<u8>) {
        // Writing to a Vec does not fail.
        let _ = write!(out, "{self}");
    }

    fn checksum(self) -> u32 {
        // The finaliser of SplitMix64: every input bit reaches every output bit.
        let mut x = self.seed ^ (u64::from(self.client) << 40) ^ self.sequence;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) as u32
    }

    /// The first token in `bytes`, if there is one with the right checksum for this run.
    pub fn find(seed: u64, bytes: &[u8]) -> Option<Self> {
        let text = String::from_utf8_lossy(bytes);
        text.match_indices('o').find_map(|(at, _)| {
            let mut parts = text[at + 1..].splitn(3, '.');
            let client = parts.next()?.parse().ok()?;
            let sequence = parts.next()?.parse().ok()?;
            let sum = u32::from_str_radix(parts.next()?.get(..8)?, 16).ok()?;
            let owner = Self { seed, client, sequence };
            (owner.checksum() == sum).then_some(owner)
        })
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "o{}.{}.{:08x}", self.client, self.sequence, self.checksum())
    }
}

/// What was found wrong. Any one of these fails the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A row, notice or error that names another client.
    Foreign,
    /// Our own row of an earlier statement.
    Stale,
    /// A row came twice.
    Doubled,
    /// Rows came in another order.
    Reordered,
    /// A row or a whole answer did not come.
    Missing,
    /// A row whose content is not what was asked for.
    Corrupt,
    /// A message that the protocol does not allow here.
    Protocol,
    /// An error that nothing we did explains; a statement cancelled that we did not cancel.
    Error,
    /// A transaction changed its server, or saw settings of another one.
    Transaction,
    /// A committed row is not there, or one that was rolled back is.
    Ledger,
    /// The connection was closed without reason.
    Closed,
    /// No answer within the limit.
    Silence,
}

/// A fault of the pooler (or server) under test.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{kind:?}: client {client}: {detail}")]
pub struct Violation {
    /// What kind.
    pub kind: Kind,
    /// Who noticed.
    pub client: u32,
    /// What was expected and what came.
    pub detail: String,
}

/// Tells what a row is that is not the one expected.
pub fn classify(expected: Owner, wanted: &[u8], index: u32, got: &[u8]) -> Violation {
    let number = |row: &[u8]| -> Option<u32> {
        let text = String::from_utf8_lossy(row);
        text.split('/').nth(1)?.parse().ok()
    };
    let kind = match Owner::find(expected.seed, got) {
        Some(owner) if owner.client != expected.client => Kind::Foreign,
        Some(owner) if owner.sequence < expected.sequence => Kind::Stale,
        Some(owner) if owner.sequence > expected.sequence => Kind::Missing,
        Some(_) => match number(got) {
            Some(number) if number + 1 == index => Kind::Doubled,
            Some(number) if number < index => Kind::Reordered,
            Some(number) if number > index => Kind::Missing,
            _ => Kind::Corrupt,
        },
        None => Kind::Corrupt,
    };
    let mut detail = format!("row {index}: expected {}, got {}", short(wanted), short(got));
    if kind == Kind::Corrupt {
        detail += &difference(wanted, got);
    }
    Violation { kind, client: expected.client, detail }
}

/// From where to where two rows differ, as far as both go, and what is there: bytes of another row tell which way they came.
fn difference(wanted: &[u8], got: &[u8]) -> String {
    let differs = |&at: &usize| wanted[at] != got[at];
    let common = wanted.len().min(got.len());
    let (Some(first), Some(last)) = ((0..common).find(differs), (0..common).rfind(differs)) else {
        return String::new();
    };
    let (from, to) = (first.saturating_sub(40), (last + 40).min(common));
    format!(
        "; bytes {first} to {last} differ: expected {}, got {} to {}",
        short(&wanted[from..to]),
        short(&got[from..to]),
        short(&got[last.saturating_sub(40)..to])
    )
}

/// The beginning of some bytes, readable.
pub fn short(bytes: &[u8]) -> String {
    let cut = &bytes[..bytes.len().min(80)];
    let dots = if cut.len() < bytes.len() { "..." } else { "" };
    format!("`{}`{dots} ({} bytes)", cut.escape_ascii(), bytes.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: Owner = Owner { seed: 9, client: 3, sequence: 40 };

    fn kind(got: &str) -> Kind {
        classify(OWNER, format!("{OWNER}/5").as_bytes(), 5, got.as_bytes()).kind
    }

    #[test]
    fn every_wrong_row_has_its_name() {
        let other = |client, sequence| Owner { client, sequence, ..OWNER };
        assert_eq!(kind(&format!("{}/5", other(4, 40))), Kind::Foreign);
        assert_eq!(kind(&format!("{}/5", other(3, 39))), Kind::Stale);
        assert_eq!(kind(&format!("{}/5", other(3, 41))), Kind::Missing);
        assert_eq!(kind(&format!("{OWNER}/4")), Kind::Doubled);
        assert_eq!(kind(&format!("{OWNER}/2")), Kind::Reordered);
        assert_eq!(kind(&format!("{OWNER}/6")), Kind::Missing);
        assert_eq!(kind("nonsense"), Kind::Corrupt);
        assert_eq!(kind("o3.40.00000000/5"), Kind::Corrupt);
        let detail = classify(OWNER, b"o3.40.abc/5abcdef", 5, b"nonsense/5abZZeZ").detail;
        assert!(detail.contains("bytes 0 to 15 differ"), "{detail}");
    }

    #[test]
    fn tokens_are_found_anywhere_and_only_of_this_run() {
        let text = format!("error of {OWNER}: no");
        assert_eq!(Owner::find(9, text.as_bytes()), Some(OWNER));
        assert_eq!(Owner::find(8, text.as_bytes()), None);
    }
}
