// SPDX-License-Identifier: Apache-2.0
//! Packets: three bytes of length, one of sequence, the payload. A payload of 2^24 - 1 bytes is continued by the next packet, so
//! a message whose length is a multiple of it ends with an empty one.

use std::borrow::Cow;

use crate::Error;

/// Bytes before a payload.
pub const HEADER_BYTES: usize = 4;
/// Longest payload of one packet, bytes; also the mark that another follows.
pub const PAYLOAD_BYTES_MAX: usize = 0xff_ffff;
/// Longest message, bytes: the largest `max_allowed_packet`, and headers.
pub const MESSAGE_BYTES_MAX: usize = (1 << 30) + (1 << 10);

/// A packet's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Bytes of payload.
    pub len: usize,
    /// Number of the packet since the command, wrapping. A command has 0.
    pub sequence: u8,
}

impl Header {
    /// The header at the beginning of `bytes`; `None` when there are not enough of them. All bytes are a header.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let &[a, b, c, sequence] = bytes.first_chunk()?;
        Some(Self { len: u32::from_le_bytes([a, b, c, 0]) as usize, sequence })
    }

    /// Whether the message goes on in the next packet.
    pub fn is_continued(self) -> bool {
        self.len == PAYLOAD_BYTES_MAX
    }

    /// Bytes of the packet.
    pub fn total(self) -> usize {
        HEADER_BYTES + self.len
    }
}

/// Bytes of the message at the beginning of `bytes`, headers included; `None` when it is not whole.
///
/// # Errors
/// [`Error::Sequence`] when its packets are not consecutive, [`Error::TooLong`].
pub fn message_len(bytes: &[u8]) -> Result<Option<usize>, Error> {
    let mut at = 0;
    let mut expected = None;
    loop {
        let Some(header) = Header::parse(&bytes[at..]) else { return Ok(None) };
        if let Some(expected) = expected
            && expected != header.sequence
        {
            return Err(Error::Sequence { expected, found: header.sequence });
        }
        if at + header.total() > MESSAGE_BYTES_MAX {
            return Err(Error::TooLong);
        }
        if at + header.total() > bytes.len() {
            return Ok(None);
        }
        at += header.total();
        if !header.is_continued() {
            return Ok(Some(at));
        }
        expected = Some(header.sequence.wrapping_add(1));
    }
}

/// The payload of a whole message: borrowed, unless it was in several packets. Of a message that is cut, what there is.
pub fn payload(message: &[u8]) -> Cow<'_, [u8]> {
    let Some(first) = Header::parse(message) else { return Cow::Borrowed(b"") };
    let body = &message[HEADER_BYTES..];
    if !first.is_continued() {
        return Cow::Borrowed(&body[..first.len.min(body.len())]);
    }
    let mut joined = Vec::with_capacity(message.len());
    let mut rest = message;
    while let Some(header) = Header::parse(rest) {
        let end = header.total().min(rest.len());
        joined.extend_from_slice(&rest[HEADER_BYTES..end]);
        rest = &rest[end..];
        if !header.is_continued() {
            break;
        }
    }
    Cow::Owned(joined)
}

/// Appends a message as packets, the first with this sequence number. Returns the number that comes next.
pub fn put_message(out: &mut Vec<u8>, mut sequence: u8, mut payload: &[u8]) -> u8 {
    loop {
        let len = payload.len().min(PAYLOAD_BYTES_MAX);
        out.extend_from_slice(&(len as u32).to_le_bytes()[..3]);
        out.push(sequence);
        out.extend_from_slice(&payload[..len]);
        payload = &payload[len..];
        sequence = sequence.wrapping_add(1);
        if len < PAYLOAD_BYTES_MAX {
            return sequence;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_of_16_mib_have_several_packets() {
        for (len, packets) in
            [(PAYLOAD_BYTES_MAX - 1, 1), (PAYLOAD_BYTES_MAX, 2), (2 * PAYLOAD_BYTES_MAX + 5, 3)]
        {
            let sent: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
            let mut out = Vec::new();
            assert_eq!(put_message(&mut out, 255, &sent), 255u8.wrapping_add(packets));
            assert_eq!(message_len(&out), Ok(Some(out.len())));
            assert_eq!(message_len(&out[..out.len() - 1]), Ok(None));
            assert!(payload(&out) == sent, "{len} bytes");
        }
    }

    #[test]
    fn a_packet_out_of_order_is_noticed() {
        let mut out = Vec::new();
        put_message(&mut out, 0, &vec![1; PAYLOAD_BYTES_MAX]);
        let last = out.len() - 1;
        out[last] = 7;
        assert_eq!(message_len(&out), Err(Error::Sequence { expected: 1, found: 7 }));
    }

    proptest! {
        #[test]
        fn messages_come_back(payload_in in proptest::collection::vec(any::<u8>(), 0..300), sequence: u8, cut in 0usize..304) {
            let mut out = Vec::new();
            put_message(&mut out, sequence, &payload_in);
            prop_assert_eq!(message_len(&out), Ok(Some(out.len())));
            prop_assert_eq!(&payload(&out)[..], &payload_in[..]);
            if cut < out.len() {
                prop_assert_eq!(message_len(&out[..cut]), Ok(None));
            }
        }
    }
}
