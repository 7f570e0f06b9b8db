// SPDX-License-Identifier: Apache-2.0
//! No secret gets into a trace, whatever a recorder hands over.

mod common;

use std::fs;
use std::path::Path;

use common::{read_all, segments};
use underpass_trace::*;
use underpass_wire::backend::build as backend;
use underpass_wire::frontend::build;

const SECRET: &[u8] = b"S3cretS3cret";

fn message(build: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = Vec::new();
    build(&mut bytes);
    bytes
}

fn frontend(offset: u64, build: impl FnOnce(&mut Vec<u8>)) -> Record<'static> {
    Record::Frontend(Frontend::new(SessionId(1), offset, offset, message(build)))
}

/// Writes without compression, so that the secret would be seen in the file.
fn write(directory: &Path, masker: Option<Masker>, records: &[Record<'_>]) -> Vec<Record<'static>> {
    let options = Options { zstd_level: 0, masker, ..Options::default() };
    let mut writer = Writer::create(directory, &Meta::default(), options).unwrap();
    records.iter().for_each(|record| writer.write(record).unwrap());
    writer.finish().unwrap();
    for segment in segments(directory) {
        let bytes = fs::read(segment).unwrap();
        let found = bytes.windows(SECRET.len()).any(|window| window == SECRET);
        assert!(!found, "the secret is in the file");
    }
    read_all(directory).0
}

fn error(request: u64) -> Record<'static> {
    let message = b"syntax error at or near \"S3cretS3cret\"";
    let outcome = Outcome::Error(ErrorOutcome { sqlstate: *b"42601", fatal: false, message: message.into() });
    Record::Response(Response {
        session: SessionId(1),
        request,
        offset: 0,
        len: 10,
        first_ns: 1,
        last_ns: 1,
        rows: 0,
        outcome,
    })
}

fn response_error(message: Vec<u8>) -> Record<'static> {
    Record::Backend(Backend { session: SessionId(1), time_ns: 9, offset: 70, message: message.into() })
}

#[test]
fn passwords_are_never_stored() {
    let parent = tempfile::tempdir().unwrap();
    let alter = b"alter role app password 'S3cretS3cret' valid until 'infinity'";
    let quoting = message(|out| {
        out.extend_from_slice(b"E\0\0\0\x1aMnear S3cretS3cret\0C42601\0\0");
        let len = (out.len() - 1) as u32;
        out[1..5].copy_from_slice(&len.to_be_bytes());
    });
    let records = [
        frontend(0, |out| build::password(out, SECRET)),
        frontend(100, |out| build::sasl_response(out, SECRET)),
        frontend(200, |out| build::query(out, alter)),
        error(200),
        response_error(quoting),
        frontend(300, |out| build::parse(out, b"s", b"create user a password $$S3cretS3cret$$", [])),
        frontend(400, |out| {
            let conninfo = &b"host=h password=S3cretS3cret"[..];
            build::bind(out, b"", b"", [], [Some(conninfo), Some(b"kept")], []);
        }),
        Record::Backend(Backend {
            session: SessionId(1),
            time_ns: 5,
            offset: 0,
            message: message(|out| backend::backend_key_data(out, 7, SECRET)).into(),
        }),
        Record::PreparedFill(PreparedFill {
            session: SessionId(1),
            time_ns: 5,
            name: b"p"[..].into(),
            query: b"alter user a password 'S3cretS3cret'"[..].into(),
            param_types: vec![],
            redaction: Redaction::None,
        }),
    ];
    let read = write(&parent.path().join("trace"), None, &records);
    assert_eq!(read.len(), records.len());
    for (stored, given) in read.iter().zip(&records) {
        match (stored, given) {
            (Record::Withheld(withheld), Record::Frontend(given)) => {
                assert_eq!((withheld.offset, withheld.len), (given.offset, given.wire_len));
                assert_eq!(withheld.reason, WithheldReason::Authentication);
            }
            (Record::Frontend(stored), Record::Frontend(given)) => {
                assert_eq!(stored.redaction, Redaction::Password);
                assert_eq!(stored.message.len(), given.message.len());
                let differ = stored.message.iter().zip(&*given.message).filter(|(a, b)| a != b).count();
                assert_eq!(differ, SECRET.len(), "only the password is covered");
            }
            (Record::Response(stored), _) => {
                let Outcome::Error(error) = &stored.outcome else { panic!("{stored:?}") };
                assert!(error.sqlstate == *b"42601" && error.message.is_empty());
            }
            (Record::Withheld(_) | Record::PreparedFill(_), _) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn errors_of_other_statements_keep_their_message() {
    let parent = tempfile::tempdir().unwrap();
    let ready = Record::Ready(Ready {
        session: SessionId(1),
        time_ns: 3,
        request: 0,
        offset: 10,
        status: TransactionStatus::Idle,
    });
    let mut later = error(100);
    if let Record::Response(response) = &mut later
        && let Outcome::Error(error) = &mut response.outcome
    {
        error.message = b"division by zero"[..].into();
    }
    let records = [
        frontend(0, |out| build::query(out, b"alter role a password 'S3cretS3cret'")),
        ready,
        frontend(100, |out| build::query(out, b"select 1/0")),
        later.clone(),
    ];
    let read = write(&parent.path().join("trace"), None, &records);
    assert_eq!(read[3], later);
    assert_eq!(read[2], records[2], "nothing else is touched");
}

#[test]
fn masking_hides_values_and_keeps_equality() {
    let parent = tempfile::tempdir().unwrap();
    let bind = |value: &[u8], format| message(|out| build::bind(out, b"", b"s", [format], [Some(value)], []));
    let records = [
        frontend(0, |out| build::query(out, b"select 'S3cretS3cret'")),
        Record::Frontend(Frontend::new(SessionId(1), 1, 100, bind(SECRET, 0))),
        Record::Frontend(Frontend::new(SessionId(1), 2, 200, bind(SECRET, 1))),
        Record::Frontend(Frontend::new(SessionId(1), 3, 300, bind(b"S3cretS4cret", 0))),
        frontend(400, |out| build::copy_data(out, SECRET)),
        error(0),
        response_error(message(|out| backend::data_row(out, [Some(SECRET)]))),
    ];
    let directory = parent.path().join("trace");
    let read = write(&directory, Some(Masker::new(b"key")), &records);
    assert!(Reader::open(&directory).unwrap().meta().redaction.literals);
    let value = |at: usize| {
        let Record::Frontend(frontend) = &read[at] else { panic!("{:?}", read[at]) };
        assert_eq!(frontend.redaction, Redaction::Masked);
        let message = underpass_wire::frontend::Message::decode(frontend.message[0], &frontend.message[5..]);
        match message.unwrap() {
            underpass_wire::frontend::Message::Query(query) => query.query[8..20].to_vec(),
            underpass_wire::frontend::Message::Bind(mut bind) => {
                bind.arguments.params.next().unwrap().unwrap().to_vec()
            }
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(value(0), value(1));
    assert_eq!(value(1), value(2));
    assert_ne!(value(1), value(3));
    assert!(matches!(&read[4], Record::Withheld(withheld) if withheld.reason == WithheldReason::Masking));
    assert!(matches!(&read[6], Record::Withheld(withheld) if withheld.reason == WithheldReason::Masking));
}
