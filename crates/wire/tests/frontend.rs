// SPDX-License-Identifier: Apache-2.0
//! Client messages, byte for byte as in the manual, and malformed ones.

use proptest::prelude::*;
use underpass_wire::frontend::{
    Bind, Close, CopyFail, Describe, Execute, FunctionCall, Message, Parse, PasswordMessage, Query,
    SaslInitialResponse, Target, bind_names, build, first_name, len_max,
};
use underpass_wire::{MessageError, tag};

/// A builder without arguments, and the type byte of what it builds.
type Builder = (fn(&mut Vec<u8>), u8);

fn built(fill: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = Vec::new();
    fill(&mut out);
    out
}

#[test]
fn query() {
    let golden = b"Q\0\0\0\x0dselect 1\0";
    assert_eq!(built(|out| build::query(out, b"select 1")), golden);
    assert_eq!(Query::decode(&golden[5..]), Ok(Query { query: b"select 1" }));
    assert_eq!(Query::decode(b"select 1"), Err(MessageError::MissingTerminator));
    assert_eq!(Query::decode(b"select\0 1\0"), Err(MessageError::TrailingBytes));
    assert_eq!(Query::decode(b""), Err(MessageError::MissingTerminator));
}

/// `SocketBackend` of PostgreSQL 14 to 18: which types there are, and which may be long.
#[test]
fn lengths_by_type() {
    for byte in 0..=u8::MAX {
        let expected = match byte {
            b'B' | b'F' | b'P' | b'Q' | b'd' => Some(0x3fff_fffe),
            b'C' | b'D' | b'E' | b'H' | b'S' | b'X' | b'c' | b'f' => Some(10_000),
            _ => None,
        };
        assert_eq!(len_max(byte), expected, "{:?}", byte as char);
    }
}

#[test]
fn strings_end_at_nul() {
    assert_eq!(built(|out| build::query(out, b"a\0X\0\0\0\x04")), b"Q\0\0\0\x06a\0");
}

#[test]
fn parse() {
    let golden = b"P\0\0\0\x17s1\0select $1\0\0\x01\0\0\0\x17";
    assert_eq!(built(|out| build::parse(out, b"s1", b"select $1", [23])), golden);
    let view = Parse::decode(&golden[5..]).unwrap();
    assert_eq!((view.name, view.query), (&b"s1"[..], &b"select $1"[..]));
    assert_eq!(view.param_types.collect::<Vec<_>>(), [23]);
    assert_eq!(first_name(&golden[5..8]), Some(&b"s1"[..]));
    assert_eq!(first_name(&golden[5..7]), None);
    assert_eq!(Parse::decode(b"\0q\0\0\x02\0\0\0\x17"), Err(MessageError::Truncated));
    assert_eq!(Parse::decode(b"\0q\0\0"), Err(MessageError::Truncated));
    assert_eq!(Parse::decode(b"\0q\0\0\0x"), Err(MessageError::TrailingBytes));
    assert_eq!(Parse::decode(b"name"), Err(MessageError::MissingTerminator));
}

#[test]
fn bind() {
    let golden = b"B\0\0\0\x1dp\0s1\0\0\x01\0\x01\0\x02\0\0\0\x02hi\xff\xff\xff\xff\0\x01\0\0";
    let params = [Some(&b"hi"[..]), None];
    assert_eq!(built(|out| build::bind(out, b"p", b"s1", [1], params, [0])), golden);
    let view = Bind::decode(&golden[5..]).unwrap();
    assert_eq!((view.portal, view.statement, view.rest), (&b"p"[..], &b"s1"[..], 5));
    assert_eq!(view.arguments.param_formats.collect::<Vec<_>>(), [1]);
    assert_eq!(view.arguments.params.len(), 2);
    assert_eq!(view.arguments.params.collect::<Vec<_>>(), params);
    assert_eq!(view.arguments.result_formats.collect::<Vec<_>>(), [0]);
}

#[test]
fn bind_renamed_from_a_part_of_its_body() {
    let original = built(|out| build::bind(out, b"", b"s1", [], [Some(&[7; 1000][..])], []));
    let part = &original[5..40];
    let names = bind_names(part).unwrap();
    let rest = &original[5 + names.rest..];
    let mut renamed = built(|out| build::bind_head(out, names.portal, b"_up_17", rest.len()));
    renamed.extend_from_slice(rest);
    assert_eq!(renamed, built(|out| build::bind(out, b"", b"_up_17", [], [Some(&[7; 1000][..])], [])));
    assert!((0..4).all(|n| bind_names(&original[5..5 + n]).is_none()));
    assert!(bind_names(&original[5..9]).is_some());
}

#[test]
fn bind_malformed() {
    let cases: [(&[u8], MessageError); 8] = [
        (b"p\0s", MessageError::MissingTerminator),
        (b"\0\0\0", MessageError::Truncated),
        (b"\0\0\0\x01\0\x02\0\0\0\0", MessageError::FormatCode),
        (b"\0\0\0\0\0\x01\xff\xff\xff\xfe\0\0", MessageError::ValueLength),
        (b"\0\0\0\0\0\x01\0\0\0\x05ab\0\0", MessageError::Truncated),
        (b"\0\0\0\x02\0\0\0\0\0\x01\0\0\0\0\0\0", MessageError::FormatCount),
        (b"\0\0\0\0\xff\xff", MessageError::Truncated),
        (b"\0\0\0\0\0\0\0\0x", MessageError::TrailingBytes),
    ];
    for (body, error) in cases {
        assert_eq!(Bind::decode(body).unwrap_err(), error, "{body:?}");
    }
}

/// The count is unsigned, as PostgreSQL reads it: drivers bind up to 65535 parameters.
#[test]
fn bind_with_most_parameters() {
    let bytes = built(|out| build::bind(out, b"", b"", [], std::iter::repeat_n(None, 65535), []));
    assert_eq!(Bind::decode(&bytes[5..]).unwrap().arguments.params.count(), 65535);
}

#[test]
fn describe_and_close() {
    let golden = b"D\0\0\0\x08Ss1\0";
    assert_eq!(built(|out| build::describe(out, Target::Statement, b"s1")), golden);
    assert_eq!(Describe::decode(&golden[5..]), Ok(Describe { target: Target::Statement, name: b"s1" }));
    let golden = b"C\0\0\0\x06P\0";
    assert_eq!(built(|out| build::close(out, Target::Portal, b"")), golden);
    assert_eq!(Close::decode(&golden[5..]), Ok(Close { target: Target::Portal, name: b"" }));
    assert_eq!(Describe::decode(b"Xs1\0"), Err(MessageError::Target));
    assert_eq!(Describe::decode(b""), Err(MessageError::Truncated));
    assert_eq!(Close::decode(b"S"), Err(MessageError::MissingTerminator));
    assert_eq!(Close::decode(b"S\0\0"), Err(MessageError::TrailingBytes));
}

#[test]
fn execute() {
    let golden = b"E\0\0\0\x0ap\0\0\0\0\x64";
    assert_eq!(built(|out| build::execute(out, b"p", 100)), golden);
    assert_eq!(Execute::decode(&golden[5..]), Ok(Execute { portal: b"p", max_rows: 100 }));
    assert_eq!(Execute::decode(b"p\0\0\0"), Err(MessageError::Truncated));
}

#[test]
fn function_call() {
    let golden = b"F\0\0\0\x15\0\0\x06\x3e\0\x01\0\x01\0\x01\0\0\0\x01x\0\x01";
    assert_eq!(built(|out| build::function_call(out, 1598, [1], [Some(&b"x"[..])], 1)), golden);
    let view = FunctionCall::decode(&golden[5..]).unwrap();
    assert_eq!((view.function, view.args.len(), view.result_format), (1598, 1, 1));
    let bad = |body| FunctionCall::decode(body).unwrap_err();
    assert_eq!(bad(b"\0\0\0\x01\0\0\0\0\0\x02"), MessageError::FormatCode);
    assert_eq!(bad(b"\0\0\0\x01\0\x02\0\0\0\0\0\0\0\0"), MessageError::FormatCount);
    assert_eq!(bad(b"\0\0\0\x01\0\0\0\0"), MessageError::Truncated);
}

#[test]
fn messages_without_body() {
    let builders: [Builder; 4] =
        [(build::sync, b'S'), (build::flush, b'H'), (build::terminate, b'X'), (build::copy_done, b'c')];
    for (build, tag) in builders {
        assert_eq!(built(build), [tag, 0, 0, 0, 4]);
        assert!(Message::decode(tag, b"").is_ok());
        assert_eq!(Message::decode(tag, b"x").unwrap_err(), MessageError::TrailingBytes);
    }
}

#[test]
fn copy() {
    assert_eq!(built(|out| build::copy_data(out, b"1\n")), b"d\0\0\0\x061\n");
    let golden = b"f\0\0\0\x07no\0";
    assert_eq!(built(|out| build::copy_fail(out, b"no")), golden);
    assert_eq!(CopyFail::decode(&golden[5..]), Ok(CopyFail { message: b"no" }));
    assert_eq!(CopyFail::decode(b"no"), Err(MessageError::MissingTerminator));
}

#[test]
fn passwords() {
    let golden = b"p\0\0\0\x0bsecret\0";
    assert_eq!(built(|out| build::password(out, b"secret")), golden);
    let view = PasswordMessage::decode(&golden[5..]).unwrap();
    assert_eq!(view.password, b"secret");
    assert_eq!(format!("{view:?}"), "PasswordMessage(6 bytes)");
    assert_eq!(PasswordMessage::decode(b"sec\0ret\0"), Err(MessageError::TrailingBytes));
}

#[test]
fn sasl() {
    let golden = b"p\0\0\0\x1cSCRAM-SHA-256\0\0\0\0\x06n,,n=x";
    assert_eq!(built(|out| build::sasl_initial_response(out, b"SCRAM-SHA-256", Some(b"n,,n=x"))), golden);
    let view = SaslInitialResponse::decode(&golden[5..]).unwrap();
    assert_eq!((view.mechanism, view.data), (&b"SCRAM-SHA-256"[..], Some(&b"n,,n=x"[..])));
    assert_eq!(format!("{view:?}"), "SASLInitialResponse(SCRAM-SHA-256, 6 bytes)");
    assert_eq!(SaslInitialResponse::decode(b"m\0\xff\xff\xff\xff").unwrap().data, None);
    assert_eq!(SaslInitialResponse::decode(b"m\0\xff\xff\xff\xfe"), Err(MessageError::ValueLength));
    assert_eq!(SaslInitialResponse::decode(b"m\0\0\0\0\x01"), Err(MessageError::Truncated));
    assert_eq!(built(|out| build::sasl_response(out, b"c=biws")), b"p\0\0\0\x0ac=biws");
}

#[test]
fn unknown_types() {
    for byte in 0..=255u8 {
        let unknown = matches!(Message::decode(byte, b""), Err(MessageError::UnknownType));
        assert_eq!(unknown, !tag::frontend::ALL.contains(&byte), "{}", byte as char);
    }
}

fn text() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(1..=255u8, 0..20)
}

fn values() -> impl Strategy<Value = Vec<Option<Vec<u8>>>> {
    prop::collection::vec(prop::option::of(prop::collection::vec(any::<u8>(), 0..20)), 0..12)
}

proptest! {
    #[test]
    fn parse_roundtrip(name in text(), query in text(), types in prop::collection::vec(any::<u32>(), 0..12)) {
        let bytes = built(|out| build::parse(out, &name, &query, types.iter().copied()));
        let view = Parse::decode(&bytes[5..]).unwrap();
        prop_assert_eq!((view.name, view.query), (&name[..], &query[..]));
        prop_assert!(view.param_types.eq(types));
    }

    #[test]
    fn bind_roundtrip(portal in text(), statement in text(), params in values(), binary in any::<bool>()) {
        let format = u16::from(binary);
        let given = || params.iter().map(Option::as_deref);
        let formats = vec![format; params.len()];
        let bytes = built(|out| build::bind(out, &portal, &statement, formats.clone(), given(), [format]));
        let view = Bind::decode(&bytes[5..]).unwrap();
        prop_assert_eq!((view.portal, view.statement), (&portal[..], &statement[..]));
        prop_assert!(view.arguments.params.eq(given()));
        prop_assert!(view.arguments.param_formats.eq(formats));
        // No prefix of a message is a message.
        for n in 0..bytes.len() - 5 {
            prop_assert!(Bind::decode(&bytes[5..5 + n]).is_err());
        }
    }
}
