// SPDX-License-Identifier: Apache-2.0
//! Server messages, byte for byte as in the manual, and malformed ones.

use proptest::prelude::*;
use underpass_wire::backend::{
    Authentication, BackendKeyData, CommandComplete, CopyResponse, DataRow, FieldDescription, Fields,
    FunctionCallResponse, Message, NegotiateProtocolVersion, NotificationResponse, ParameterDescription,
    ParameterStatus, Report, RowDescription, Severity, TransactionStatus, build,
};
use underpass_wire::startup::ProtocolVersion;
use underpass_wire::{MessageError, SqlState, tag};

/// A builder without arguments, and the type byte of what it builds.
type Builder = (fn(&mut Vec<u8>), u8);

fn built(fill: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = Vec::new();
    fill(&mut out);
    out
}

#[test]
fn authentication() {
    assert_eq!(built(build::authentication_ok), b"R\0\0\0\x08\0\0\0\0");
    assert_eq!(built(build::authentication_cleartext_password), b"R\0\0\0\x08\0\0\0\x03");
    let md5 = built(|out| build::authentication_md5_password(out, *b"salt"));
    assert_eq!(md5, b"R\0\0\0\x0c\0\0\0\x05salt");
    assert_eq!(built(|out| build::authentication_sasl_continue(out, b"r=1")), b"R\0\0\0\x0b\0\0\0\x0br=1");
    assert_eq!(built(|out| build::authentication_sasl_final(out, b"v=1")), b"R\0\0\0\x0b\0\0\0\x0cv=1");

    let decode = Authentication::decode;
    assert_eq!(decode(b"\0\0\0\0"), Ok(Authentication::Ok));
    assert_eq!(decode(b"\0\0\0\x02"), Ok(Authentication::KerberosV5));
    assert_eq!(decode(b"\0\0\0\x03"), Ok(Authentication::CleartextPassword));
    assert_eq!(decode(&md5[5..]), Ok(Authentication::Md5Password { salt: *b"salt" }));
    assert_eq!(decode(b"\0\0\0\x07"), Ok(Authentication::Gss));
    assert_eq!(decode(b"\0\0\0\x08x"), Ok(Authentication::GssContinue { data: b"x" }));
    assert_eq!(decode(b"\0\0\0\x09"), Ok(Authentication::Sspi));
    assert_eq!(decode(b"\0\0\0\x0br=1"), Ok(Authentication::SaslContinue { data: b"r=1" }));
    assert_eq!(decode(b"\0\0\0\x0cv=1"), Ok(Authentication::SaslFinal { data: b"v=1" }));

    assert_eq!(decode(b"\0\0\0"), Err(MessageError::Truncated));
    assert_eq!(decode(b"\0\0\0\0x"), Err(MessageError::TrailingBytes));
    assert_eq!(decode(b"\0\0\0\x05sal"), Err(MessageError::Truncated));
    for unknown in [1, 4, 6, 13, 255] {
        assert_eq!(Authentication::decode(&[0, 0, 0, unknown]), Err(MessageError::UnknownAuthentication));
    }
}

#[test]
fn authentication_sasl() {
    let golden = b"R\0\0\0\x17\0\0\0\x0aSCRAM-SHA-256\0\0";
    assert_eq!(built(|out| build::authentication_sasl(out, ["SCRAM-SHA-256", ""])), golden);
    let Ok(Authentication::Sasl { mechanisms }) = Authentication::decode(&golden[5..]) else { panic!() };
    assert_eq!(mechanisms.collect::<Vec<_>>(), [b"SCRAM-SHA-256"]);
    let bad = |body| Authentication::decode(body).unwrap_err();
    assert_eq!(bad(b"\0\0\0\x0aA\0"), MessageError::MissingTerminator);
    assert_eq!(bad(b"\0\0\0\x0aA\0\0B\0"), MessageError::TrailingBytes);
}

#[test]
fn ready_for_query() {
    for (status, byte) in [
        (TransactionStatus::Idle, b'I'),
        (TransactionStatus::Transaction, b'T'),
        (TransactionStatus::Failed, b'E'),
    ] {
        assert_eq!(built(|out| build::ready_for_query(out, status)), [b'Z', 0, 0, 0, 5, byte]);
        assert_eq!(TransactionStatus::decode(&[byte]), Ok(status));
    }
    assert_eq!(TransactionStatus::decode(b""), Err(MessageError::Truncated));
    assert_eq!(TransactionStatus::decode(b"II"), Err(MessageError::TrailingBytes));
    assert_eq!(TransactionStatus::decode(b"i"), Err(MessageError::TransactionStatus));
}

#[test]
fn parameter_status() {
    let golden = b"S\0\0\0\x12DateStyle\0ISO\0";
    assert_eq!(built(|out| build::parameter_status(out, b"DateStyle", b"ISO")), golden);
    let view = ParameterStatus::decode(&golden[5..]).unwrap();
    assert_eq!((view.name, view.value), (&b"DateStyle"[..], &b"ISO"[..]));
    assert_eq!(ParameterStatus::decode(b"a\0b"), Err(MessageError::MissingTerminator));
    assert_eq!(ParameterStatus::decode(b"a\0b\0c"), Err(MessageError::TrailingBytes));
}

#[test]
fn backend_key_data() {
    let golden = b"K\0\0\0\x0c\0\0\x12\x67\x01\x02\x03\x04";
    assert_eq!(built(|out| build::backend_key_data(out, 4711, &[1, 2, 3, 4])), golden);
    let view = BackendKeyData::decode(&golden[5..]).unwrap();
    assert_eq!((view.process_id, view.secret_key), (4711, &[1, 2, 3, 4][..]));
    assert_eq!(format!("{view:?}"), "BackendKeyData(4711, key of 4 bytes)");
    for (len, fits) in [(3, false), (4, true), (32, true), (256, true), (257, false)] {
        let bytes = built(|out| build::backend_key_data(out, 1, &vec![0; len]));
        assert_eq!(BackendKeyData::decode(&bytes[5..]).is_ok(), fits);
    }
    assert_eq!(BackendKeyData::decode(b"\0\0\0"), Err(MessageError::Truncated));
}

#[test]
fn error_response() {
    let report = Report::new(Severity::Fatal, SqlState::TOO_MANY_CONNECTIONS, "no more");
    let golden = b"E\0\0\0\x29SFATAL\0VFATAL\0C53300\0Mno more\0Hwait\0\0";
    let report = Report { hint: Some("wait"), ..report };
    let made = built(|out| build::error_response(out, &report));
    assert_eq!(made, golden);
    let fields = Fields::decode(&golden[5..]).unwrap();
    assert_eq!(fields.severity(), Some(&b"FATAL"[..]));
    assert_eq!(fields.sqlstate(), Some(SqlState::TOO_MANY_CONNECTIONS));
    assert_eq!(fields.message(), Some(&b"no more"[..]));
    assert_eq!((fields.detail(), fields.hint()), (None, Some(&b"wait"[..])));
    assert_eq!(fields.map(|(code, _)| code).collect::<Vec<_>>(), b"SVCMH");
}

#[test]
fn notice_response() {
    let report = Report::new(Severity::Notice, SqlState::WARNING, "m");
    let made = built(|out| build::notice_response(out, &report));
    assert_eq!(made, b"N\0\0\0\x1fSNOTICE\0VNOTICE\0C01000\0Mm\0\0");
}

#[test]
fn fields_of_old_and_odd_servers() {
    let old = Fields::decode(b"SFEHLER\0Cxx\0\0").unwrap();
    assert_eq!(old.severity(), Some(&b"FEHLER"[..]), "before 9.6 there is only the translated one");
    assert_eq!(old.sqlstate(), None, "not five characters");
    assert_eq!(Fields::decode(b"\0").unwrap().count(), 0);
    assert_eq!(Fields::decode(b"\xf0new\0\0").unwrap().get(0xf0), Some(&b"new"[..]));
    assert_eq!(Fields::decode(b""), Err(MessageError::Truncated));
    assert_eq!(Fields::decode(b"Mtext\0"), Err(MessageError::Truncated));
    assert_eq!(Fields::decode(b"Mtext"), Err(MessageError::MissingTerminator));
    assert_eq!(Fields::decode(b"\0M"), Err(MessageError::TrailingBytes));
}

#[test]
fn command_complete() {
    assert_eq!(built(|out| build::command_complete(out, "SHOW")), b"C\0\0\0\x09SHOW\0");
    let rows = |tag: &[u8]| CommandComplete { tag }.rows();
    assert_eq!(rows(b"SELECT 5"), Some(5));
    assert_eq!(rows(b"INSERT 0 17"), Some(17));
    assert_eq!(rows(b"COPY 18446744073709551615"), Some(u64::MAX));
    for none in [&b"BEGIN"[..], b"CREATE TABLE", b"", b"SELECT ", b"X 1a", b"X 18446744073709551616", b"X -1"]
    {
        assert_eq!(rows(none), None);
    }
    assert_eq!(CommandComplete::decode(b"BEGIN"), Err(MessageError::MissingTerminator));
}

#[test]
fn negotiate_protocol_version() {
    let golden = b"v\0\0\0\x13\0\x03\0\x02\0\0\0\x01_pq_.x\0";
    let made = built(|out| {
        build::negotiate_protocol_version(out, ProtocolVersion::V3_2, [&b"_pq_.x"[..]]);
    });
    assert_eq!(made, golden);
    let view = NegotiateProtocolVersion::decode(&golden[5..]).unwrap();
    assert_eq!((view.newest, view.minor()), (ProtocolVersion::V3_2, 2));
    assert_eq!(view.options().collect::<Vec<_>>(), [b"_pq_.x"]);
    let minor_only = NegotiateProtocolVersion::decode(b"\0\0\0\x02\0\0\0\0").unwrap();
    assert_eq!(minor_only.minor(), 2, "the manual's reading");
    let bad = |body| NegotiateProtocolVersion::decode(body).unwrap_err();
    assert_eq!(bad(b"\0\x03\0\0\xff\xff\xff\xffa\0"), MessageError::MissingTerminator);
    assert_eq!(bad(b"\0\x03\0\0\0\0\0\0a\0"), MessageError::TrailingBytes);
}

#[test]
fn notification_response() {
    let golden = b"A\0\0\0\x0c\0\0\0\x07ch\0\0";
    assert_eq!(built(|out| build::notification_response(out, 7, b"ch", b"")), golden);
    let view = NotificationResponse::decode(&golden[5..]).unwrap();
    assert_eq!((view.process_id, view.channel, view.payload), (7, &b"ch"[..], &b""[..]));
    assert_eq!(NotificationResponse::decode(b"\0\0\0\x07ch\0"), Err(MessageError::MissingTerminator));
}

#[test]
fn row_description() {
    let golden = b"T\0\0\0\x1b\0\x01id\0\0\0\0\0\0\0\0\0\0\x17\0\x04\xff\xff\xff\xff\0\0";
    let field = FieldDescription::new(b"id", 23, 4);
    assert_eq!(built(|out| build::row_description(out, [field])), golden);
    assert_eq!(RowDescription::decode(&golden[5..]).unwrap().collect::<Vec<_>>(), [field]);
    let mut bad = golden[5..].to_vec();
    *bad.last_mut().unwrap() = 2;
    assert_eq!(RowDescription::decode(&bad).unwrap_err(), MessageError::FormatCode);
    assert_eq!(RowDescription::decode(b"\0\x02").unwrap_err(), MessageError::MissingTerminator);
    assert_eq!(RowDescription::decode(&golden[5..20]).unwrap_err(), MessageError::Truncated);
    assert_eq!(RowDescription::decode(b"\0\0x").unwrap_err(), MessageError::TrailingBytes);
}

#[test]
fn data_row() {
    let golden = b"D\0\0\0\x0f\0\x02\0\0\0\x01x\xff\xff\xff\xff";
    assert_eq!(built(|out| build::data_row(out, [Some("x"), None])), golden);
    let row = DataRow::decode(&golden[5..]).unwrap();
    assert_eq!(row.columns.collect::<Vec<_>>(), [Some(&b"x"[..]), None]);
    let bad = |body| DataRow::decode(body).unwrap_err();
    assert_eq!(bad(b"\0"), MessageError::Truncated);
    assert_eq!(bad(b"\0\x01\xff\xff\xff\xfe"), MessageError::ValueLength);
    assert_eq!(bad(b"\0\x01\x7f\xff\xff\xff"), MessageError::Truncated);
    assert_eq!(bad(b"\0\0x"), MessageError::TrailingBytes);
}

#[test]
fn parameter_description() {
    let golden = b"t\0\0\0\x0a\0\x01\0\0\0\x17";
    assert_eq!(built(|out| build::parameter_description(out, [23])), golden);
    assert_eq!(ParameterDescription::decode(&golden[5..]).unwrap().types.collect::<Vec<_>>(), [23]);
    assert_eq!(ParameterDescription::decode(b"\0\x01\0\0\0"), Err(MessageError::Truncated));
}

#[test]
fn copy_responses() {
    let builders: [Builder; 3] = [
        (|out| build::copy_in_response(out, 1, [1, 1]), b'G'),
        (|out| build::copy_out_response(out, 1, [1, 1]), b'H'),
        (|out| build::copy_both_response(out, 1, [1, 1]), b'W'),
    ];
    for (build, tag) in builders {
        let made = built(build);
        assert_eq!(made, [tag, 0, 0, 0, 11, 1, 0, 2, 0, 1, 0, 1]);
        let view = CopyResponse::decode(&made[5..]).unwrap();
        assert_eq!((view.format, view.column_formats.collect::<Vec<_>>()), (1, vec![1, 1]));
    }
    assert_eq!(CopyResponse::decode(b"\x02\0\0"), Err(MessageError::FormatCode));
    assert_eq!(CopyResponse::decode(b"\0\0\x01"), Err(MessageError::Truncated));
}

#[test]
fn function_call_response() {
    assert_eq!(built(|out| build::function_call_response(out, None)), b"V\0\0\0\x08\xff\xff\xff\xff");
    assert_eq!(FunctionCallResponse::decode(b"\0\0\0\x01x").unwrap().value, Some(&b"x"[..]));
    assert_eq!(FunctionCallResponse::decode(b"\0\0\0\x02x"), Err(MessageError::Truncated));
}

#[test]
fn messages_without_body() {
    let builders: [Builder; 7] = [
        (build::empty_query_response, b'I'),
        (build::parse_complete, b'1'),
        (build::bind_complete, b'2'),
        (build::close_complete, b'3'),
        (build::no_data, b'n'),
        (build::portal_suspended, b's'),
        (build::copy_done, b'c'),
    ];
    for (build, tag) in builders {
        assert_eq!(built(build), [tag, 0, 0, 0, 4]);
        assert!(Message::decode(tag, b"").is_ok());
        assert_eq!(Message::decode(tag, b"x").unwrap_err(), MessageError::TrailingBytes);
    }
}

#[test]
fn unknown_types() {
    for byte in 0..=255u8 {
        let unknown = matches!(Message::decode(byte, b""), Err(MessageError::UnknownType));
        assert_eq!(unknown, !tag::backend::ALL.contains(&byte), "{}", byte as char);
    }
}

proptest! {
    #[test]
    fn data_row_roundtrip(
        columns in prop::collection::vec(prop::option::of(prop::collection::vec(any::<u8>(), 0..30)), 0..20),
    ) {
        let given = || columns.iter().map(Option::as_deref);
        let bytes = built(|out| build::data_row(out, given()));
        prop_assert!(DataRow::decode(&bytes[5..]).unwrap().columns.eq(given()));
        for n in 0..bytes.len() - 5 {
            prop_assert!(DataRow::decode(&bytes[5..5 + n]).is_err());
        }
    }

    #[test]
    fn row_description_roundtrip(
        names in prop::collection::vec("[a-z]{0,9}", 0..9),
        numbers in any::<(u32, i16, u32, i16, i32, bool)>(),
    ) {
        let (table_oid, attribute, type_oid, type_size, type_modifier, binary) = numbers;
        let format = u16::from(binary);
        let fields: Vec<_> = names
            .iter()
            .map(|name| FieldDescription {
                name: name.as_bytes(), table_oid, attribute, type_oid, type_size, type_modifier, format,
            })
            .collect();
        let bytes = built(|out| build::row_description(out, fields.iter().copied()));
        prop_assert!(RowDescription::decode(&bytes[5..]).unwrap().eq(fields));
    }

    #[test]
    fn report_roundtrip(message in "[^\0]{0,40}", detail in prop::option::of("[^\0]{0,40}")) {
        let report = Report::new(Severity::Error, SqlState::SYNTAX_ERROR, &message);
        let bytes = built(|out| build::error_response(out, &Report { detail: detail.as_deref(), ..report }));
        let fields = Fields::decode(&bytes[5..]).unwrap();
        prop_assert_eq!(fields.message(), Some(message.as_bytes()));
        prop_assert_eq!(fields.detail(), detail.as_deref().map(str::as_bytes));
        prop_assert_eq!(fields.sqlstate(), Some(SqlState::SYNTAX_ERROR));
    }
}
