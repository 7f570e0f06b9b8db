// SPDX-License-Identifier: Apache-2.0
//! Entry points of the fuzz targets in `/fuzz`. Each takes any bytes and panics when an invariant breaks.
//!
//! `cargo test` replays the corpora of `/fuzz/corpus` over them, whole, cut and mutated.

use crate::codec::{self, State};
use crate::format::{BLOCK_RAW_MAX, BlockHeader, Head, VERSION_MAJOR, VERSION_MINOR, block_kind};
use crate::safety::Safety;
use crate::safety::passwords::may_have_password;
use crate::statements::Statements;
use crate::{Error, Frontend, Level, Masker, Meta, Protocol, Reader, Record, SessionId};

/// Target `trace_file`: the bytes are a segment. Reading ends, and what it lost is counted.
pub fn file(data: &[u8]) {
    let Ok(mut reader) = Reader::from_bytes(data.to_vec()) else { return };
    let mut records = 0;
    loop {
        match reader.next() {
            Ok(Some(_)) => records += 1,
            Ok(None) => break,
            Err(Error::Record { .. }) => {}
            Err(error) => panic!("memory has no such error: {error}"),
        }
    }
    assert!(matches!(reader.next(), Ok(None)), "the end stays the end");
    // A record takes two bytes, and compression at most a factor that a block's limit bounds.
    assert!(records <= (data.len() / 72 + 1) * BLOCK_RAW_MAX);
    assert!(reader.damage().bytes <= data.len() as u64 * 2);
}

/// Target `trace_records`: the bytes are the records of a block, with a right checksum. What decodes is encoded to the
/// same meaning again, and put together to statements.
pub fn records(data: &[u8]) {
    let raw = &data[..data.len().min(BLOCK_RAW_MAX)];
    let head = Head { major: VERSION_MAJOR, minor: VERSION_MINOR, segment: 1, trace_id: [0; 16] };
    let mut segment = head.encode().to_vec();
    let meta = serde_json::to_vec(&Meta::default()).expect("META is JSON");
    for (number, kind, payload) in [(0, block_kind::META, &meta[..]), (1, block_kind::RECORDS, raw)] {
        let len = payload.len() as u32;
        let payload_crc = crc32c::crc32c(payload);
        let header = BlockHeader {
            kind,
            number,
            raw_len: len,
            stored_len: len,
            payload_crc,
            ..BlockHeader::default()
        };
        segment.extend_from_slice(&header.encode());
        segment.extend_from_slice(payload);
    }
    let mut reader = Reader::from_bytes(segment).expect("head and META are intact");
    let (mut encoder, mut decoder) = (State::default(), State::default());
    let mut statements = Statements::new(Protocol::Postgres);
    let mut events = Vec::new();
    loop {
        match reader.next() {
            Ok(Some(record)) => {
                let mut fields = Vec::new();
                codec::encode(&mut encoder, &record, &mut fields);
                let again = codec::decode(&mut decoder, codec::kind_of(&record), &fields);
                assert_eq!(again.as_ref(), Ok(&record));
                statements.push(&record, &mut events);
            }
            Ok(None) => break,
            Err(Error::Record { .. }) => {}
            Err(error) => panic!("memory has no such error: {error}"),
        }
    }
}

/// Target `trace_safety`: the first byte chooses the protocol, masking and the message's type, the rest is its body.
/// What is stored has the length of what came; what holds no secret stays as it is; a second pass covers more at most.
pub fn safety(data: &[u8]) {
    let Some((&choice, body)) = data.split_first() else { return };
    let protocol = if choice & 1 == 0 { Protocol::Postgres } else { Protocol::Mysql };
    let masks = choice & 2 != 0;
    let masker = masks.then(|| Masker::new(b"key"));
    let mut message = match protocol {
        Protocol::Postgres => {
            let tags = b"QPBFdpXQ";
            let mut message = vec![tags[usize::from(choice >> 2) % tags.len()]];
            message.extend_from_slice(&(body.len() as u32 + 4).to_be_bytes());
            message
        }
        Protocol::Mysql => vec![0, 0, 0, 0],
    };
    message.extend_from_slice(body);
    let mut safety = Safety::new(protocol, Level::Summary, masker);
    let record = Record::Frontend(Frontend::new(SessionId(1), 1, 0, &message[..]));
    let stored = safety.apply(&record).into_owned();
    match &stored {
        Record::Frontend(frontend) => {
            assert_eq!(frontend.message.len(), message.len());
            assert_eq!(frontend.message.first(), message.first());
            assert_ne!((protocol, message[0]), (Protocol::Postgres, b'p'));
            if !masks && !may_have_password(&message, protocol) {
                assert!(frontend.message == message, "nothing was to be hidden");
            }
            let again = safety.apply(&stored);
            let Record::Frontend(again) = again.as_ref() else { panic!("{again:?}") };
            let mut pairs = frontend.message.iter().zip(&*again.message);
            // Where a covered text is no SQL, quotes may pair in another way than before.
            assert!(pairs.all(|(before, after)| before == after || *after == b'*'));
        }
        Record::Withheld(withheld) => assert_eq!(withheld.len, message.len() as u64),
        other => panic!("{other:?}"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    type Target = (&'static str, fn(&[u8]));
    const TARGETS: [Target; 3] =
        [("trace_file", super::file), ("trace_records", super::records), ("trace_safety", super::safety)];

    #[test]
    fn corpora() {
        for (name, target) in TARGETS {
            underpass_wire::fuzzing::over_corpus(name, 2, 2_000, target);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        #[test]
        fn any_bytes(data in prop::collection::vec(prop_oneof![3 => 0..16u8, 1 => any::<u8>()], 0..120)) {
            TARGETS.iter().for_each(|(_, target)| target(&data));
        }

        #[test]
        fn any_sql(choice: u8, text in "(password|set |identified by |= ?|'|''|\\$\\$|x|;|\\(|E'|\\\\|://|u:p@h| |\"|--|/\\*|1|\n){0,20}") {
            super::safety(&[&[choice], text.as_bytes(), b"\0"].concat());
        }
    }
}
