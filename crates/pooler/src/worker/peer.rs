// SPDX-License-Identifier: Apache-2.0
//! Cancel keys among poolers that share an address (`peer_id`, `[peers]`): a key says which pooler gave it, so that any of them can pass a
//! request on to that one.
//!
//! A key is the process id (upper half) and the first four secret bytes. With peering, its second and third byte hold the peer id, the low
//! byte first, and the last two bits of the secret count how often the request may still be passed on: PgBouncer's layout, so that both
//! may be among the peers.

/// How often a request may be passed on, in the key's lowest bits.
const HOPS: u64 = 0b11;
/// Of the last byte of the peer id: the third of the key, whose bytes are read as a big-endian number.
const PEER_SHIFT: u32 = 32 + 8;

/// Turns 64 random bits into a key of this pooler. The process id is positive, for clients that print it.
pub(super) fn mark(random: u64, peer_id: u16) -> u64 {
    let key = random & 0x7fff_ffff_ffff_ffff;
    match peer_id {
        0 => key,
        id => (key & !(0xffff << PEER_SHIFT)) | u64::from(id.swap_bytes()) << PEER_SHIFT | HOPS,
    }
}

/// The pooler that gave `key`, if it is another one.
pub(super) fn other(key: u64, peer_id: u16) -> Option<u16> {
    let id = ((key >> PEER_SHIFT) as u16).swap_bytes();
    (peer_id != 0 && id != peer_id).then_some(id)
}

/// The key as this pooler gave it, however many hops the request has behind it.
pub(super) fn own(key: u64, peer_id: u16) -> u64 {
    if peer_id == 0 { key } else { key | HOPS }
}

/// The key as it is passed on; `None` if it has been often enough.
pub(super) fn forwarded(key: u64) -> Option<u64> {
    (key & HOPS != 0).then(|| key - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_finds_its_pooler_in_at_most_three_hops() {
        let key = mark(u64::MAX, 7);
        assert_eq!((other(key, 7), other(key, 8), other(key, 0)), (None, Some(7), None));
        let hops = std::iter::successors(Some(key), |&key| forwarded(key))
            .inspect(|&key| assert_eq!(own(key, 7), mark(u64::MAX, 7)));
        assert_eq!(hops.count(), 4);
        assert!(key >> 63 == 0);
        assert_eq!(own(mark(5, 0), 0), 5);
    }

    #[test]
    fn the_peer_id_is_where_pgbouncer_looks_for_it() {
        let key = mark(0, 0x1234);
        assert_eq!(key.to_be_bytes(), [0, 0x34, 0x12, 0, 0, 0, 0, 3]);
        assert_eq!(other(key, 1), Some(0x1234));
    }
}
