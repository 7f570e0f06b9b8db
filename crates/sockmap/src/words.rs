// SPDX-License-Identifier: Apache-2.0
//! Bits of the shared words. Macros of `bpf/lanes.h` and `bpf/tap.h` are not in their BTF, so a test compares the two.

pub(crate) const DIR_USER: u64 = 1 << 63;
pub(crate) const DIR_BYTES: u64 = !DIR_USER;

pub(crate) const LINK_PENDING_MASK: u64 = 0xffff;
pub(crate) const LINK_OPEN: u64 = 1 << 16;
pub(crate) const LINK_STATUS_SHIFT: u32 = 17;
pub(crate) const LINK_STATUS_MASK: u64 = 3 << LINK_STATUS_SHIFT;
pub(crate) const LINK_LINKED: u64 = 1 << 19;
pub(crate) const LINK_HELD: u64 = 1 << 20;
pub(crate) const LINK_PINNED: u64 = 1 << 21;
pub(crate) const LINK_COPY: u64 = 1 << 22;
pub(crate) const LINK_EXTENDED: u64 = 1 << 23;
pub(crate) const LINK_SERVER_SHIFT: u32 = 24;
pub(crate) const LINK_SERVER_MASK: u64 = 0xf_ffff << LINK_SERVER_SHIFT;
pub(crate) const LINK_KEPT: u64 = 1 << LINK_SERVER_SHIFT;
pub(crate) const LINK_GEN_SHIFT: u32 = 44;

pub(crate) const CLEAR_KNOWN: u64 = 1 << 63;

pub(crate) const PEER_LINKED: u64 = 1 << 63;

pub(crate) const SENT_KNOWN: u64 = 1 << 63;
pub(crate) const SENT_GEN_SHIFT: u32 = 32;
pub(crate) const SENT_GEN_MASK: u64 = 0xf_ffff;
pub(crate) const DOUBT_NS: u64 = 1_000_000_000;

pub(crate) const SRV_LOCAL: u32 = 1;
pub(crate) const SRV_RETIRE: u32 = 2;
pub(crate) const SRV_LOST: u32 = 4;

pub(crate) const CLI_UNNAMED: u32 = 1;
pub(crate) const CLI_BATCH: u32 = 2;
pub(crate) const CLI_NAMED: u32 = 4;

pub(crate) const POOL_CLOSED: u32 = 1;

pub(crate) const QUEUE_TAKEN: u64 = 1 << 63;
pub(crate) const QUEUE_NUMBER_SHIFT: u32 = 32;
pub(crate) const QUEUE_NUMBER_MASK: u64 = 0x7fff_ffff;

pub(crate) const TAP_TELL: u32 = 1;
pub(crate) const TAP_WAITS: u32 = 2;
pub(crate) const TAP_STEPS: u32 = 4;
pub(crate) const TAP_AT_SHIFT: u32 = 3;

/// `enum look_map`.
pub(crate) const LOOK_CLIENT: u32 = 1;
pub(crate) const LOOK_SERVER: u32 = 2;
pub(crate) const LOOK_BACKEND: u32 = 3;
pub(crate) const LOOK_APP: u32 = 4;

/// `enum tap_kind`.
pub(crate) const TAP_REQUEST: u16 = 1;
pub(crate) const TAP_RESPONSE: u16 = 2;

pub(crate) const TAP_PIECE: u16 = 1;
pub(crate) const TAP_BEGIN: u16 = 2;
pub(crate) const TAP_END: u16 = 4;
pub(crate) const TAP_BUSY: u16 = 8;

#[cfg(test)]
mod tests {
    /// Every constant above has its `#define` with the same value.
    #[test]
    fn the_header_and_this_file_agree() {
        let header = concat!(include_str!("bpf/lanes.h"), include_str!("bpf/tap.h"));
        let defined = |name: &str| -> u64 {
            let line = header
                .lines()
                .find(|l| l.strip_prefix("#define ").and_then(|r| r.split_whitespace().next()) == Some(name))
                .unwrap_or_else(|| panic!("{name} is not in the headers"));
            let text = line.split_once(name).unwrap().1.split("/*").next().unwrap().trim();
            evaluate(text)
        };
        for (name, value) in [
            ("DIR_USER", super::DIR_USER),
            ("LINK_PENDING_MASK", super::LINK_PENDING_MASK),
            ("LINK_OPEN", super::LINK_OPEN),
            ("LINK_STATUS_SHIFT", super::LINK_STATUS_SHIFT.into()),
            ("LINK_STATUS_MASK", super::LINK_STATUS_MASK),
            ("LINK_LINKED", super::LINK_LINKED),
            ("LINK_HELD", super::LINK_HELD),
            ("LINK_PINNED", super::LINK_PINNED),
            ("LINK_COPY", super::LINK_COPY),
            ("LINK_EXTENDED", super::LINK_EXTENDED),
            ("LINK_SERVER_SHIFT", super::LINK_SERVER_SHIFT.into()),
            ("LINK_GEN_SHIFT", super::LINK_GEN_SHIFT.into()),
            ("PEER_LINKED", super::PEER_LINKED),
            ("SRV_LOCAL", super::SRV_LOCAL.into()),
            ("SRV_RETIRE", super::SRV_RETIRE.into()),
            ("SRV_LOST", super::SRV_LOST.into()),
            ("QUEUE_TAKEN", super::QUEUE_TAKEN),
            ("QUEUE_NUMBER_SHIFT", super::QUEUE_NUMBER_SHIFT.into()),
            ("QUEUE_NUMBER_MASK", super::QUEUE_NUMBER_MASK),
            ("QUEUE_PLACES", crate::shared::QUEUE_PLACES as u64),
            ("KEPT_BYTES", crate::shared::KEPT_BYTES as u64),
            ("CLEAR_KNOWN", super::CLEAR_KNOWN),
            ("DOUBT_NS", super::DOUBT_NS),
            ("CLI_UNNAMED", super::CLI_UNNAMED.into()),
            ("CLI_BATCH", super::CLI_BATCH.into()),
            ("CLI_NAMED", super::CLI_NAMED.into()),
            ("POOL_CLOSED", super::POOL_CLOSED.into()),
            ("TAP_TELL", super::TAP_TELL.into()),
            ("TAP_WAITS", super::TAP_WAITS.into()),
            ("TAP_STEPS", super::TAP_STEPS.into()),
            ("TAP_AT_SHIFT", super::TAP_AT_SHIFT.into()),
            ("TAP_PIECE", super::TAP_PIECE.into()),
            ("TAP_BEGIN", super::TAP_BEGIN.into()),
            ("TAP_END", super::TAP_END.into()),
            ("TAP_BUSY", super::TAP_BUSY.into()),
            ("POOL_ORDINALS_MAX", crate::shared::POOL_ORDINALS_MAX as u64),
        ] {
            assert_eq!(defined(name), value, "{name}");
        }
        assert_eq!(
            super::LINK_SERVER_MASK,
            ((1 << defined("LINK_SERVER_BITS")) - 1) << super::LINK_SERVER_SHIFT
        );
    }

    /// `12`, `0xff`, `1 << 3`, each with C's suffixes and parentheses.
    fn evaluate(text: &str) -> u64 {
        let text = text.trim_matches(|c| c == '(' || c == ')');
        let number = |t: &str| {
            let t = t.trim().trim_end_matches(['u', 'U', 'L']);
            t.strip_prefix("0x").map_or_else(|| t.parse().unwrap(), |h| u64::from_str_radix(h, 16).unwrap())
        };
        match text.split_once("<<") {
            Some((value, shift)) => number(value) << number(shift),
            None => number(text),
        }
    }
}
