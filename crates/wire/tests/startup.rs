// SPDX-License-Identifier: Apache-2.0
//! First packets, byte for byte as in the manual.

use proptest::prelude::*;
use underpass_wire::startup::{self, FirstPacket, MAX_LEN, ProtocolVersion, build};
use underpass_wire::{FrameError, MessageError, SqlState};

fn built(fill: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = Vec::new();
    fill(&mut out);
    out
}

fn parsed(bytes: &[u8]) -> FirstPacket<'_> {
    let (packet, total) = startup::parse(bytes).unwrap().unwrap();
    assert_eq!(total, bytes.len());
    packet
}

/// A packet with a right length word.
fn packet(rest: &[u8]) -> Vec<u8> {
    [&(rest.len() as u32 + 4).to_be_bytes(), rest].concat()
}

#[test]
fn encryption_requests() {
    let ssl = built(build::ssl_request);
    assert_eq!(ssl, [0, 0, 0, 8, 4, 210, 22, 47]); // 80877103
    assert_eq!(parsed(&ssl), FirstPacket::SslRequest);
    let gss = built(build::gssenc_request);
    assert_eq!(gss, [0, 0, 0, 8, 4, 210, 22, 48]); // 80877104
    assert_eq!(parsed(&gss), FirstPacket::GssencRequest);
    for code in [&ssl[4..], &gss[4..]] {
        let long = packet(&[code, b"x"].concat());
        assert_eq!(startup::parse(&long), Err(MessageError::EncryptionRequest));
    }
}

#[test]
fn startup_message_golden() {
    let golden = b"\0\0\0\x1f\0\x03\0\0user\0bob\0database\0app\0\0";
    let pairs = [(&b"user"[..], &b"bob"[..]), (b"database", b"app")];
    assert_eq!(built(|out| build::startup_message(out, ProtocolVersion::V3_0, pairs)), golden);
    let FirstPacket::Startup(message) = parsed(golden) else { panic!() };
    assert_eq!(message.version, ProtocolVersion::V3_0);
    assert_eq!(message.parameters().collect::<Vec<_>>(), pairs);
    assert_eq!((message.user(), message.database()), (Some(&b"bob"[..]), Some(&b"app"[..])));
}

#[test]
fn startup_message_parts_ways() {
    let bytes = packet(b"\0\x03\0\x02_pq_.a\x001\0user\0x\0user\0bob\0database\0\0\0");
    let FirstPacket::Startup(message) = parsed(&bytes) else { panic!() };
    assert_eq!(message.version.to_string(), "3.2");
    assert_eq!(message.protocol_options().collect::<Vec<_>>(), [(&b"_pq_.a"[..], &b"1"[..])]);
    assert_eq!(message.parameters().count(), 3);
    assert_eq!(message.user(), Some(&b"bob"[..]), "the last one counts");
    assert_eq!(message.database(), Some(&b"bob"[..]), "an empty name is the user's");
    assert_eq!(message.get("application_name"), None);
}

#[test]
fn startup_message_layout() {
    for bad in [&b""[..], b"user", b"user\0", b"user\0bob", b"user\0bob\0", b"user\0bob\0\0x", b"\0\0"] {
        let bytes = packet(&[b"\0\x03\0\0", bad].concat());
        assert_eq!(startup::parse(&bytes), Err(MessageError::StartupLayout), "{bad:?}");
    }
    assert!(
        matches!(parsed(b"\0\0\0\x09\0\x03\0\0\0"), FirstPacket::Startup(_)),
        "no user: the caller's error"
    );
}

#[test]
fn builder_leaves_out_empty_names() {
    let pairs = [(&b""[..], &b"x"[..]), (b"\0hidden", b"x"), (b"user", b"b\0hidden")];
    let bytes = built(|out| build::startup_message(out, ProtocolVersion::V3_0, pairs));
    assert_eq!(bytes, packet(b"\0\x03\0\0user\0b\0\0"));
}

#[test]
fn other_protocols() {
    for (major, minor) in [(2, 0), (4, 0), (1234, 1), (0, 0), (0xffff, 0xffff)] {
        let version = ProtocolVersion { major, minor };
        let bytes = packet(&[&version.to_word().to_be_bytes()[..], b"rest"].concat());
        assert_eq!(parsed(&bytes), FirstPacket::UnsupportedProtocol(version));
    }
}

#[test]
fn cancel_request() {
    let golden = b"\0\0\0\x10\x04\xd2\x16\x2e\0\0\x12\x67\x01\x02\x03\x04";
    assert_eq!(built(|out| build::cancel_request(out, 4711, &[1, 2, 3, 4])), golden);
    let FirstPacket::Cancel(cancel) = parsed(golden) else { panic!() };
    assert_eq!((cancel.process_id, cancel.secret_key), (4711, &[1, 2, 3, 4][..]));
    assert_eq!(format!("{cancel:?}"), "CancelRequest { process_id: 4711, key_len: 4 }");
    for len in [0, 3, 4, 32, 256, 257] {
        let bytes = built(|out| build::cancel_request(out, 1, &vec![7; len]));
        let want = (4..=256).contains(&len);
        assert_eq!(matches!(startup::parse(&bytes), Ok(Some(_))), want, "key of {len}");
        assert_eq!(startup::parse(&bytes) == Err(MessageError::CancelKeyLength), !want);
    }
    assert_eq!(startup::parse(&packet(b"\x04\xd2\x16\x2e\0\0\0")), Err(MessageError::Truncated));
}

#[test]
fn lengths() {
    for bad in [0u32, 4, 7, MAX_LEN as u32 + 1, 0x7fff_ffff, u32::MAX] {
        let error = startup::parse(&bad.to_be_bytes()).unwrap_err();
        assert_eq!(error, MessageError::Frame(FrameError::StartupLength));
        assert_eq!(error.sqlstate(), SqlState::PROTOCOL_VIOLATION);
    }
    let mut largest = b"\0\x03\0\0a\0".to_vec();
    largest.resize(MAX_LEN - 4 - 2, b'v');
    largest.extend_from_slice(b"\0\0");
    assert!(matches!(parsed(&packet(&largest)), FirstPacket::Startup(_)));
    assert_eq!(startup::packet_len(b"\0\0\0"), Ok(None));
    assert_eq!(startup::parse(b""), Ok(None));
}

#[test]
fn direct_tls() {
    assert_eq!(startup::parse(b"\x16"), Ok(Some((FirstPacket::DirectTls, 0))));
    assert_eq!(startup::parse(b"\x16\x03\x01\x02\0\x01"), Ok(Some((FirstPacket::DirectTls, 0))));
}

#[test]
fn bytes_after_the_packet_are_left() {
    let bytes = [built(build::ssl_request), b"more".to_vec()].concat();
    assert_eq!(startup::parse(&bytes), Ok(Some((FirstPacket::SslRequest, 8))));
}

fn text(min: usize) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(1..=255u8, min..12)
}

proptest! {
    #[test]
    fn startup_roundtrip(
        minor in any::<u16>(),
        pairs in prop::collection::vec((text(1), text(0)), 0..8),
    ) {
        let version = ProtocolVersion { major: 3, minor };
        let given = pairs.iter().map(|(n, v)| (&n[..], &v[..])).filter(|(n, _)| !n.starts_with(b"_pq_."));
        let bytes = built(|out| build::startup_message(out, version, given.clone()));
        let FirstPacket::Startup(message) = parsed(&bytes) else { panic!() };
        prop_assert_eq!(message.version, version);
        prop_assert!(message.parameters().eq(given));
    }

    /// A backslash before every byte that needs one gives the word back.
    #[test]
    fn options_roundtrip(words in prop::collection::vec(text(1), 0..6)) {
        let escape = |word: &Vec<u8>| -> Vec<u8> { word.iter().flat_map(|&b| [b'\\', b]).collect() };
        let line = words.iter().map(escape).collect::<Vec<_>>().join(&b" \t"[..]);
        let split: Vec<Vec<u8>> = startup::options::words(&line).map(|w| w.into_owned()).collect();
        prop_assert_eq!(split, words);
    }
}
