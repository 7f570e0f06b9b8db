// SPDX-License-Identifier: Apache-2.0
//! No secret gets into a trace, whatever a recorder hands over.

mod common;

use std::fs;
use std::path::Path;

use common::{read_all, segments};
use underpass_mysql::command::query_text;
use underpass_mysql::packet::{HEADER_BYTES, PAYLOAD_BYTES_MAX, payload, put_message};
use underpass_trace::*;
use underpass_wire::backend::build as backend;
use underpass_wire::frontend::{Target, build};

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
    write_of(Protocol::Postgres, directory, masker, records)
}

fn write_of(
    protocol: Protocol,
    directory: &Path,
    masker: Option<Masker>,
    records: &[Record<'_>],
) -> Vec<Record<'static>> {
    write_at(protocol, Level::Summary, directory, masker, records)
}

fn write_at(
    protocol: Protocol,
    level: Level,
    directory: &Path,
    masker: Option<Masker>,
    records: &[Record<'_>],
) -> Vec<Record<'static>> {
    let options = Options { zstd_level: 0, masker, ..Options::default() };
    let meta = Meta { protocol, level, ..Meta::default() };
    let mut writer = Writer::create(directory, &meta, options).unwrap();
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

/// 16 MiB of what random bytes hold sooner or later: URLs with a password, but of bytes that are in no text.
#[test]
fn binary_values_are_stored_bit_by_bit() {
    let parent = tempfile::tempdir().unwrap();
    let value: Vec<u8> = b"\x8a://\x01:\xd4\x02@\xb5".iter().copied().cycle().take(16 << 20).collect();
    let records = [frontend(0, |out| build::bind(out, b"", b"s", [1], [Some(&value[..])], []))];
    let read = write(&parent.path().join("trace"), None, &records);
    assert!(read == records, "it is another value");
}

/// `ALTER ROLE` takes no parameters, so programs have the server quote the password: it is a parameter of another statement then.
#[test]
fn passwords_that_sql_is_put_together_with_are_never_stored() {
    let parent = tempfile::tempdir().unwrap();
    let composing = b"select format('alter role %I password %L', $1::text, $2::text)";
    let bind = |offset, name: &'static [u8]| {
        frontend(offset, move |out| {
            build::bind(out, b"", name, [], [Some(&b"app"[..]), Some(SECRET)], []);
        })
    };
    let records = [
        frontend(0, |out| build::parse(out, b"s", composing, [])),
        bind(100, b"s"),
        response_error(message(|out| backend::data_row(out, [Some(SECRET)]))),
        frontend(200, |out| build::query(out, b"select format('alter role a password %L', 'S3cretS3cret')")),
    ];
    let read = write(&parent.path().join("trace"), None, &records);
    let redaction = |at: usize| match &read[at] {
        Record::Frontend(frontend) => frontend.redaction,
        other => panic!("{other:?}"),
    };
    assert_eq!(redaction(0), Redaction::None, "there is none in the text");
    assert_eq!(redaction(1), Redaction::Password);
    assert!(matches!(&read[2], Record::Withheld(_)), "a row that has it: {:?}", read[2]);
    assert_eq!(redaction(3), Redaction::Password);

    // The name is another statement's by now.
    let mut later = records[..2].to_vec();
    later.insert(1, frontend(50, |out| build::parse(out, b"s", b"select $1, $2", [])));
    later[2] = frontend(100, |out| build::bind(out, b"", b"s", [], [Some(&b"a"[..]), Some(b"b")], []));
    let read = write(&parent.path().join("later"), None, &later);
    assert_eq!(read[2], later[2]);
}

/// The server tells of the Execute what it does not like in the value of the Bind.
#[test]
fn errors_that_quote_a_covered_value_lose_their_message() {
    let parent = tempfile::tempdir().unwrap();
    let composing = b"select run('alter role x password ''' || $1 || '''')";
    let mut later = error(300);
    if let Record::Response(response) = &mut later
        && let Outcome::Error(error) = &mut response.outcome
    {
        error.message = b"division by zero"[..].into();
    }
    let records = [
        frontend(0, |out| build::parse(out, b"s", composing, [])),
        frontend(100, |out| build::bind(out, b"", b"s", [], [Some(&b"'S3cretS3cret"[..])], [])),
        frontend(150, |out| build::execute(out, b"", 0)),
        error(150),
        response_error(message(|out| backend::copy_data(out, SECRET))),
        ready(200),
        frontend(300, |out| build::query(out, b"select 1/0")),
        later,
    ];
    let read = write(&parent.path().join("trace"), None, &records);
    assert!(
        matches!(&read[3], Record::Response(Response { outcome: Outcome::Error(error), .. }) if error.message.is_empty())
    );
    assert_eq!(reason(&read[4]), WithheldReason::Authentication);
    assert_eq!(read[5..], records[5..], "Ready ends it");
}

/// A portal outlives Sync in a transaction, and a prepared statement outlives the transaction.
#[test]
fn what_is_executed_later_stays_covered() {
    let parent = tempfile::tempdir().unwrap();
    let ready = |request, status| {
        Record::Ready(Ready { session: SessionId(1), time_ns: 9, request, offset: 90, status })
    };
    let row = || response_error(message(|out| backend::copy_data(out, SECRET)));
    let harmless = || response_error(message(|out| backend::copy_data(out, b"1")));
    let conninfo = &b"host=h password=S3cretS3cret"[..];
    let alter = b"alter role a password 'S3cretS3cret'";
    let records = [
        frontend(0, |out| build::parse(out, b"", b"select $1", [])),
        frontend(100, |out| build::bind(out, b"c", b"", [], [Some(conninfo)], [])),
        ready(150, TransactionStatus::Transaction),
        harmless(),
        frontend(200, |out| build::execute(out, b"c", 1)),
        row(),
        ready(250, TransactionStatus::Transaction),
        frontend(300, |out| build::execute(out, b"c", 1)),
        error(300),
        ready(350, TransactionStatus::Idle),
        // The portal is gone; another of its name has nothing to hide.
        frontend(400, |out| build::bind(out, b"c", b"", [], [Some(&b"1"[..])], [])),
        frontend(450, |out| build::execute(out, b"c", 0)),
        harmless(),
        ready(500, TransactionStatus::Idle),
        frontend(600, |out| build::parse(out, b"s", alter, [])),
        ready(650, TransactionStatus::Idle),
        frontend(700, |out| build::bind(out, b"", b"s", [], [], [])),
        frontend(750, |out| build::execute(out, b"", 0)),
        error(750),
        ready(800, TransactionStatus::Idle),
        frontend(900, |out| build::parse(out, b"s", b"select 1", [])),
        frontend(950, |out| build::bind(out, b"", b"s", [], [], [])),
        frontend(970, |out| build::execute(out, b"", 0)),
        harmless(),
    ];
    let read = write(&parent.path().join("trace"), None, &records);
    assert_eq!(read.len(), records.len());
    for (at, (stored, given)) in read.iter().zip(&records).enumerate() {
        match at {
            // Bind and Parse, without the password.
            1 | 14 => {}
            5 => assert_eq!(reason(stored), WithheldReason::Authentication),
            8 | 18 => assert!(
                matches!(stored, Record::Response(Response { outcome: Outcome::Error(error), .. }) if error.message.is_empty())
            ),
            _ => assert_eq!(stored, given, "{at}"),
        }
    }
}

/// What the server skips after an error ends nothing: the old statement answers, whatever its client thinks.
#[test]
fn what_a_skipped_message_should_end_stays_covered() {
    let parent = tempfile::tempdir().unwrap();
    let alter = b"alter role a password 'S3cretS3cret'";
    let close =
        |offset, name: &'static [u8]| frontend(offset, move |out| build::close(out, Target::Statement, name));
    let uses = |offset, name: &'static [u8]| {
        [
            frontend(offset, move |out| build::bind(out, b"", name, [], [], [])),
            frontend(offset + 20, |out| build::execute(out, b"", 0)),
            error(offset + 20),
            frontend(offset + 40, build::sync),
            ready(offset + 40),
        ]
    };
    for (at, (fails, ends)) in [
        // Behind an error, in the batch of one, ahead of one, and without one.
        (Some(100), close(120, b"s")),
        (Some(120), close(120, b"s")),
        (Some(130), close(120, b"s")),
        (None, close(120, b"s")),
        // A name that is taken is not given again.
        (Some(120), frontend(120, |out| build::parse(out, b"s", b"select 1", []))),
    ]
    .into_iter()
    .enumerate()
    {
        let mut records = vec![
            frontend(0, |out| build::parse(out, b"s", alter, [])),
            frontend(50, build::sync),
            ready(50),
            frontend(100, |out| build::execute(out, b"other", 0)),
            ends,
            frontend(130, |out| build::execute(out, b"another", 0)),
            frontend(150, build::sync),
        ];
        records.extend(fails.map(harmless_error));
        records.push(ready(150));
        let from = records.len();
        records.extend(uses(200, b"s"));
        let is_covered = fails.is_some_and(|fails| fails <= 120);
        if !is_covered {
            records[from + 2] = harmless_error(220);
        }
        let read = write(&parent.path().join(at.to_string()), None, &records);
        let mut expected = records.clone();
        if is_covered {
            expected[from + 2] = without_message(&records[from + 2]);
        }
        assert_eq!(read[1..], expected[1..], "{at}");
    }
}

/// The same of statements that put a password together, whose values are hidden before their batch is answered, and where nothing
/// tells errors.
#[test]
fn values_stay_hidden_where_what_ends_their_statement_may_be_skipped() {
    let parent = tempfile::tempdir().unwrap();
    let composing = b"select format('alter role %I password %L', $1::text, $2::text)";
    let bind = |offset, value: &'static [u8]| {
        frontend(offset, move |out| build::bind(out, b"", b"s", [], [Some(&b"app"[..]), Some(value)], []))
    };
    let anew = |offset| {
        [
            frontend(offset, |out| build::execute(out, b"", 0)),
            frontend(offset + 10, |out| build::close(out, Target::Statement, b"s")),
            frontend(offset + 20, |out| build::parse(out, b"s", b"select $1, $2", [])),
            bind(offset + 30, b"kept"),
            frontend(offset + 40, build::sync),
        ]
    };
    for (level, error, is_hidden) in
        [(Level::Summary, true, true), (Level::Summary, false, false), (Level::None, false, true)]
    {
        let mut records = vec![frontend(0, |out| build::parse(out, b"s", composing, [])), ready(50)];
        records.extend(anew(100));
        // In the next batch already, and nothing has been answered.
        records.push(bind(200, SECRET));
        if error {
            records.push(harmless_error(100));
        }
        records.extend([ready(140), bind(300, if is_hidden { SECRET } else { b"kept" })]);
        let directory = parent.path().join(format!("{level:?}{error}"));
        let read = write_at(Protocol::Postgres, level, &directory, None, &records);
        let redacted = |record: &Record<'_>| matches!(record, Record::Frontend(frontend) if frontend.redaction == Redaction::Password);
        let found: Vec<_> = read.iter().enumerate().filter(|(_, r)| redacted(r)).map(|(at, _)| at).collect();
        let last = records.len() - 1;
        assert_eq!(found, if is_hidden { vec![7, last] } else { vec![7] }, "{level:?} {error}");
    }
}

fn harmless_error(request: u64) -> Record<'static> {
    let mut record = error(request);
    if let Record::Response(response) = &mut record
        && let Outcome::Error(error) = &mut response.outcome
    {
        error.message = b"division by zero"[..].into();
    }
    record
}

fn without_message(record: &Record<'static>) -> Record<'static> {
    let mut record = record.clone();
    if let Record::Response(response) = &mut record
        && let Outcome::Error(error) = &mut response.outcome
    {
        error.message = b""[..].into();
    }
    record
}

/// Statements that look for the words, or have them as data, put nothing together: their values are needed for a replay.
#[test]
fn values_of_statements_about_the_words_stay() {
    let parent = tempfile::tempdir().unwrap();
    for (at, text) in [
        "select query from pg_stat_activity where query ilike 'alter role%password%' and usename = $1",
        "select id from log where action like 'create user%' or action like '%password%' and name = $1",
        "insert into permissions(name) values ('create user'), ('reset password'), ($1)",
        "/* create user: check password */ insert into t values ('a', $1)",
    ]
    .into_iter()
    .enumerate()
    {
        let records = [
            frontend(0, |out| build::parse(out, b"s", text.as_bytes(), [])),
            frontend(200, |out| build::bind(out, b"", b"s", [], [Some(&b"joe"[..])], [])),
        ];
        let read = write(&parent.path().join(at.to_string()), None, &records);
        assert!(read == records, "{text}: {read:?}");
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
        frontend(500, |out| build::copy_fail(out, b"bad row S3cretS3cret")),
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

/// A record of MySQL's protocol, the packets numbered from `sequence` on.
fn mysql(offset: u64, sequence: u8, payload: &[u8]) -> Record<'static> {
    let message = message(|out| _ = put_message(out, sequence, payload));
    Record::Frontend(Frontend::new(SessionId(1), offset, offset, message))
}

fn stored_mysql(masker: Option<Masker>, records: &[Record<'_>]) -> Vec<Record<'static>> {
    let parent = tempfile::tempdir().unwrap();
    let read = write_of(Protocol::Mysql, &parent.path().join("trace"), masker, records);
    assert_eq!(read.len(), records.len());
    read
}

fn reason(record: &Record<'_>) -> WithheldReason {
    let Record::Withheld(withheld) = record else { panic!("{record:?}") };
    withheld.reason
}

fn text(record: &Record<'_>) -> Vec<u8> {
    let Record::Frontend(frontend) = record else { panic!("{record:?}") };
    let payload = payload(&frontend.message);
    query_text(&payload).unwrap().to_vec()
}

fn ready(request: u64) -> Record<'static> {
    Record::Ready(Ready {
        session: SessionId(1),
        time_ns: 9,
        request,
        offset: 90,
        status: TransactionStatus::Idle,
    })
}

/// One attribute with the secret as value, an odd quote in its name, and the text.
fn with_attribute(text: &[u8]) -> Vec<u8> {
    [b"\x03\x01\x01\0\x01\xfd\0\x02'a\x0c", SECRET, text].concat()
}

#[test]
fn passwords_of_mysql_are_never_stored() {
    let quoting = message(|out| _ = put_message(out, 1, b"\xff\x28\x04#42000near 'S3cretS3cret'"));
    let records = [
        mysql(0, 0, b"\x03set password for 'a'@'b' = 'S3cretS3cret'"),
        error(0),
        response_error(quoting),
        ready(0),
        mysql(100, 0, b"\x11bob\0\x0cS3cretS3cretshop\0"),
        // What the plugin asks for, in a packet of its own.
        mysql(200, 2, b"S3cretS3cret\0"),
        ready(100),
        mysql(300, 0, b"\x15\x01\0\0\0\x04host\x04repl\x0cS3cretS3cret"),
        mysql(400, 0, b"\x16create user a identified by 'S3cretS3cret'"),
        mysql(500, 0, b"\x03\x01\x01\0\x01\xfd\0\x02'a\x03xyzset password = 'S3cretS3cret'"),
        // The attribute's value is longer than the message.
        mysql(600, 0, b"\x03\x01\x01\0\x01\xfd\0\x01a\xf0set password = 'S3cretS3cret'"),
    ];
    let read = stored_mysql(None, &records);
    assert_eq!(text(&read[0]), b"set password for '*'@'*' = '************'");
    assert!(
        matches!(&read[1], Record::Response(Response { outcome: Outcome::Error(error), .. }) if error.message.is_empty())
    );
    for at in [2, 4, 5, 7, 10] {
        assert_eq!(reason(&read[at]), WithheldReason::Authentication, "{at}");
    }
    assert_eq!(text(&read[9]), b"set password = '************'");
    for (stored, given) in read.iter().zip(&records) {
        if let (Record::Frontend(stored), Record::Frontend(given)) = (stored, given) {
            assert_eq!((stored.redaction, stored.message.len()), (Redaction::Password, given.message.len()));
        }
    }
}

#[test]
fn masking_hides_values_of_mysql() {
    let records = [
        mysql(0, 0, &with_attribute(b"select 'S3cretS3cret', 0x533363726574")),
        mysql(100, 0, b"\x17\x01\0\0\0\0\x01\0\0\0\0\x01\xfd\0\x0cS3cretS3cret"),
        mysql(200, 0, b"\x18\x01\0\0\0\0\0S3cretS3cret"),
        mysql(300, 0, b"\xfa\x01\0\0\0\x80\0\xfd\0\0\x0cS3cretS3cret"),
        mysql(400, 0, b"\x03set @mail = 'S3cretS3cret'"),
        mysql(500, 0, b"\x16select 'S3cretS3cret'"),
        mysql(600, 0, b"\x03load data local infile 'f' into table t"),
        mysql(700, 255, SECRET),
        // The numbers wrap; it begins like COM_INIT_DB.
        mysql(800, 0, b"\x02S3cretS3cret"),
        mysql(900, 1, b""),
        mysql(1000, 0, b"\x02shop"),
        // No client sends these: nobody knows where they have values.
        mysql(1100, 0, b"\0S3cretS3cret"),
        mysql(1200, 0, b"\x60S3cretS3cret"),
    ];
    let read = stored_mysql(Some(Masker::new(b"key")), &records);
    for at in [1, 2, 3, 7, 8, 9, 11, 12] {
        assert_eq!(reason(&read[at]), WithheldReason::Masking, "{at}");
    }
    let masked = text(&read[0]);
    let start = masked.iter().position(|&byte| byte != b' ').unwrap();
    assert!(masked[start..].starts_with(b"select '") && !masked.ends_with(b"533363726574"), "{masked:?}");
    assert_eq!(masked[start + 8..start + 20], text(&read[4])[13..25], "equal values stay equal");
    for at in [0, 4, 5, 6] {
        let (Record::Frontend(stored), Record::Frontend(given)) = (&read[at], &records[at]) else {
            panic!("{at}")
        };
        assert_eq!((stored.redaction, stored.message.len()), (Redaction::Masked, given.message.len()));
    }
    assert_eq!(read[10], records[10], "behind the file, a command is one");
}

#[test]
fn a_local_file_is_no_command_however_its_packets_are_numbered() {
    // As a command the second packet would be withheld, and the third covered.
    let file = [mysql(0, 255, b"1,2"), mysql(100, 0, b"\x11a,b"), mysql(200, 0, b"\x03set password = 'x'")];
    let read = stored_mysql(None, &file);
    assert_eq!(read, file);
    let loss = Record::Loss(Loss {
        session: Some(SessionId(1)),
        time_ns: 5,
        direction: Direction::Frontend,
        offset: 50,
        len: 1,
        reason: LossReason::Gap,
    });
    let end = Record::Response(Response {
        session: SessionId(1),
        request: 0,
        offset: 0,
        len: 10,
        first_ns: 1,
        last_ns: 1,
        rows: 0,
        outcome: Outcome::Complete { tag: b"OK 0"[..].into() },
    });
    for end in [end, ready(0), loss] {
        let records = [mysql(0, 255, b"1,2"), end, mysql(100, 0, b"\x03set password = 'S3cretS3cret'")];
        assert_eq!(text(&stored_mysql(None, &records)[2]), b"set password = '************'");
    }
}

#[test]
fn passwords_across_packets_of_16_mib_are_covered() {
    // The second header is in the middle of the password.
    let before = PAYLOAD_BYTES_MAX - 1 - b"set password = '".len() - 6;
    let statement = [b"\x03set password = '", &b"S3cret"[..], b"S3cret'"].concat();
    let blanks = vec![b' '; before];
    let payload = [&statement[..1], &blanks, &statement[1..]].concat();
    let record = mysql(0, 0, &payload);
    let Record::Frontend(given) = &record else { unreachable!() };
    assert_eq!(given.message.len(), payload.len() + 2 * HEADER_BYTES);
    for masker in [None, Some(Masker::new(b"key"))] {
        let read = stored_mysql(masker, std::slice::from_ref(&record));
        let Record::Frontend(stored) = &read[0] else { panic!("a Frontend") };
        assert_eq!(stored.message.len(), given.message.len());
        let second = HEADER_BYTES + PAYLOAD_BYTES_MAX;
        assert_eq!(
            stored.message[second..second + HEADER_BYTES],
            given.message[second..second + HEADER_BYTES]
        );
        assert!(stored.message.ends_with(b"******'") && stored.message[..second].ends_with(b"'******"));
    }
}

#[test]
fn parameters_of_mysql_are_searched() {
    let execute = |values: &[u8]| [b"\x17\x01\0\0\0\0\x01\0\0\0\0\x01\xfd\0", values].concat();
    let value = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    let url = value("postgres://joe:S3cretS3cret@host/database");
    // Their lengths are printable, so that they read as a part of the text.
    let connection = value("password=S3cretS3cret host=db.example.org port=3306");
    let statement = value("alter user joe identified by 'S3cretS3cret'");
    let records = [
        mysql(0, 0, &execute(&url)),
        mysql(100, 0, &execute(&connection)),
        mysql(200, 0, &execute(&statement)),
        mysql(300, 0, &execute(&[url, b"\x02\xff\xfe".to_vec(), statement].concat())),
        mysql(400, 0, b"\x18\x01\0\0\0\0\0password=S3cretS3cret"),
        mysql(500, 0, &execute(b"\x04\xff\xd8\xff\xe0")),
    ];
    let read = stored_mysql(None, &records);
    for (at, (stored, given)) in read.iter().zip(&records).enumerate() {
        let (Record::Frontend(stored), Record::Frontend(given)) = (stored, given) else {
            panic!("{stored:?}")
        };
        assert!(memchr::memmem::find(&stored.message, SECRET).is_none(), "{at}: {:?}", stored.message);
        assert_eq!(stored.message.len(), given.message.len());
        let expected = if at == 5 { Redaction::None } else { Redaction::Password };
        assert_eq!(stored.redaction, expected, "{at}");
    }
}

fn mysql_row(value: &[u8]) -> Record<'static> {
    let message = message(|out| _ = put_message(out, 1, &[b"\x0c", value].concat()));
    Record::Backend(Backend { session: SessionId(1), time_ns: 9, offset: 70, message: message.into() })
}

fn answer(request: u64, tag: &'static [u8]) -> Record<'static> {
    let Record::Response(response) = error(request) else { unreachable!() };
    Record::Response(Response { outcome: Outcome::Complete { tag: tag.into() }, ..response })
}

#[test]
fn parameters_that_mysql_puts_sql_together_with_are_never_stored() {
    let execute = |number: [u8; 4], value: &[u8]| {
        [&[0x17], &number[..], b"\0\x01\0\0\0\0\x01\xfd\0\x0c", value].concat()
    };
    let (last, other) = ([0xff; 4], b"a harmless 1");
    let records = [
        mysql(0, 0, b"\x16set @s = concat('alter user a identified by ', quote(?))"),
        mysql(100, 0, &execute(last, SECRET)),
        answer(0, b"PREPARE 5 1"),
        ready(0),
        mysql(200, 0, b"\x16select ?"),
        answer(200, b"PREPARE 6 1"),
        ready(200),
        mysql(300, 0, &execute([5, 0, 0, 0], SECRET)),
        mysql_row(SECRET),
        ready(300),
        mysql(400, 0, &[b"\x18\x05\0\0\0\0\0", SECRET].concat()),
        ready(400),
        mysql(500, 0, &execute([6, 0, 0, 0], other)),
        mysql_row(other),
        mysql(600, 0, &execute(last, other)),
    ];
    let read = stored_mysql(None, &records);
    for at in [1, 7, 8, 10] {
        assert_eq!(reason(&read[at]), WithheldReason::Authentication, "{at}");
    }
    for at in [4, 12, 13, 14] {
        assert_eq!(read[at], records[at], "{at}");
    }
}

/// The text comes to be known when the statement runs: from then on.
#[test]
fn parameters_of_older_statements_of_mysql_are_not_stored_once_their_text_is_known() {
    let execute = |value: &[u8]| [&b"\x17\x05\0\0\0\0\x01\0\0\0\0\x01\xfd\0\x0c"[..], value].concat();
    let fill = |query: &'static [u8]| {
        Record::PreparedFill(PreparedFill {
            session: SessionId(1),
            time_ns: 5,
            name: b"5"[..].into(),
            query: query.into(),
            param_types: vec![],
            redaction: Redaction::None,
        })
    };
    let composed = b"set @s = concat('alter user a identified by ', quote(?))";
    for (text, is_withheld) in [(&composed[..], true), (b"select ?", false)] {
        let records = [
            mysql(0, 0, &execute(b"a harmless 1")),
            fill(text),
            ready(0),
            mysql(100, 0, &execute(b"a harmless 2")),
            mysql_row(b"a harmless 2"),
        ];
        let read = stored_mysql(None, &records);
        assert_eq!(read[0], records[0]);
        for at in [3, 4] {
            assert_eq!(matches!(read[at], Record::Withheld(_)), is_withheld, "{at}");
        }
    }
    let read = stored_mysql(None, &[fill(b"alter user a identified by 'S3cretS3cret'")]);
    let Record::PreparedFill(stored) = &read[0] else { panic!("{read:?}") };
    assert_eq!(stored.redaction, Redaction::Password);
    assert!(!stored.query.windows(SECRET.len()).any(|window| window == SECRET));
}

#[test]
fn rows_that_show_passwords_of_mysql_are_never_stored() {
    let records = [
        mysql(0, 0, b"\x03show create user a"),
        mysql_row(SECRET),
        ready(0),
        mysql(100, 0, b"\x03select 1"),
        mysql_row(b"a harmless 1"),
        ready(100),
        mysql(200, 0, b"\x03create user a identified by random password"),
        mysql_row(SECRET),
        ready(200),
        mysql(300, 0, b"\x16show grants"),
        answer(300, b"PREPARE 7 0"),
        ready(300),
        mysql(400, 0, b"\x17\x07\0\0\0\0\x01\0\0\0"),
        mysql_row(SECRET),
        ready(400),
    ];
    let parent = tempfile::tempdir().unwrap();
    let read = write_at(Protocol::Mysql, Level::Full, &parent.path().join("trace"), None, &records);
    for at in [1, 7, 13] {
        assert_eq!(reason(&read[at]), WithheldReason::Authentication, "{at}");
    }
    for at in [3, 4, 12] {
        assert_eq!(read[at], records[at], "{at}");
    }
}
