// SPDX-License-Identifier: Apache-2.0
//! A trace of MariaDB in every format that says something of messages.

use arrow_array::cast::AsArray as _;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use underpass_export::{json_lines, parquet as tables, sql};
use underpass_mysql::packet::put_message;
use underpass_trace::*;

/// Commands, and the tag that answers each.
const WORK: [(&[u8], &[u8]); 8] = [
    (b"\x03insert into t values ('it''s')", b"OK 1"),
    (b"\x16update t set a = ? where b = ? or c = ?", b"PREPARE 7 3"),
    (b"\x17\x07\0\0\0\0\x01\0\0\0\x04\x01\x08\0\xfd\0\x06\0\x2a\0\0\0\0\0\0\0\x04o'\\x", b"OK 2"),
    (b"\x17\x07\0\0\0\0\x01\0\0\0\x04\0\x2b\0\0\0\0\0\0\0\x01\xff", b"OK 0"),
    (b"\x03load data local infile 'x' into table t", b"OK 3"),
    (b"\x03select 1; select 2", b"ROWS 1"),
    // Rows of a cursor; many rows of parameters, of MariaDB.
    (b"\x1c\x07\0\0\0\x0a\0\0\0", b"ROWS 10"),
    (b"\xfa\x07\0\0\0\0\0\0\0", b"OK 2"),
];

fn trace(directory: &std::path::Path) -> Reader {
    let meta = Meta { protocol: Protocol::Mysql, ..Meta::default() };
    let mut writer = Writer::create(directory, &meta, Options::default()).unwrap();
    let session = SessionId(1);
    let mut offset = 0;
    for (at, (payload, tag)) in WORK.iter().enumerate() {
        let time_ns = at as u64 * 1_000;
        let mut message = Vec::new();
        put_message(&mut message, 0, payload);
        let request = offset;
        offset += message.len() as u64;
        writer.write(&Record::Frontend(Frontend::new(session, time_ns, request, message))).unwrap();
        if payload.starts_with(b"\x03load") {
            // Numbers wrap at 256.
            for number in [255, 0] {
                let mut message = Vec::new();
                put_message(&mut message, number, b"\x03data");
                let at = offset;
                offset += message.len() as u64;
                writer.write(&Record::Frontend(Frontend::new(session, time_ns, at, message))).unwrap();
            }
        }
        let (first_ns, last_ns) = (time_ns + 300, time_ns + 400);
        let outcome = Outcome::Complete { tag: (*tag).into() };
        let response = Response { session, request, offset: 0, len: 9, first_ns, last_ns, rows: 0, outcome };
        writer.write(&Record::Response(response)).unwrap();
        let status = TransactionStatus::Idle;
        writer
            .write(&Record::Ready(Ready { session, time_ns: last_ns, request, offset: 0, status }))
            .unwrap();
    }
    writer.finish().unwrap();
    Reader::open(directory).unwrap()
}

#[test]
fn a_script_for_the_servers_shell() {
    let parent = tempfile::tempdir().unwrap();
    let mut reader = trace(&parent.path().join("trace"));
    let scripts = parent.path().join("scripts");
    let summary = sql::export(&mut reader, &scripts).unwrap();
    assert_eq!((summary.files, summary.statements, summary.left_out), (1, 4, 3));
    let script = std::fs::read_to_string(scripts.join("session-000001.sql")).unwrap();
    for part in [
        "insert into t values ('it''s')\n;\n",
        "PREPARE underpass FROM 'update t set a = ? where b = ? or c = ?';\nSET @underpass_1 = '42';\n\
         SET @underpass_2 = 'o''\\\\x';\nSET @underpass_3 = NULL;\n\
         EXECUTE underpass USING @underpass_1, @underpass_2, @underpass_3;\nDEALLOCATE PREPARE underpass;\n",
        "SET @underpass_2 = X'ff';\n",
        "-- left out: LOAD DATA: its data is not in the script\n",
        "-- left out: rows of a cursor",
        "-- left out: a prepared statement with ? whose parameters are not known\n",
        "delimiter //\nselect 1; select 2\n//\ndelimiter ;\n",
    ] {
        assert!(script.contains(part), "{part}\n{script}");
    }
}

#[test]
fn lines_name_commands_and_leave_nothing_out() {
    let parent = tempfile::tempdir().unwrap();
    let mut reader = trace(&parent.path().join("trace"));
    let mut lines = Vec::new();
    json_lines::export(&mut reader, &mut lines).unwrap();
    let lines: Vec<serde_json::Value> =
        lines.split(|&b| b == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect();
    let of = |kind: &str| lines.iter().filter(|line| line["type"] == kind).collect::<Vec<_>>();
    assert_eq!(of("COM_QUERY")[0]["query"], "insert into t values ('it''s')");
    assert_eq!(of("COM_STMT_PREPARE").len(), 1);
    assert_eq!((of("file").len(), of("COM_QUERY").len()), (2, 3));
    assert_eq!(of("COM_STMT_EXECUTE")[0]["statement"], 7);
    assert!(of("COM_STMT_EXECUTE")[0]["message_base64"].is_string());
}

#[test]
fn tables_have_a_row_for_each_statement() {
    let parent = tempfile::tempdir().unwrap();
    let mut reader = trace(&parent.path().join("trace"));
    let place = parent.path().join("tables");
    let summary = tables::export(&mut reader, &place).unwrap();
    assert_eq!(summary.malformed, 0);
    let file = std::fs::File::open(place.join("statements/date=1970-01-01/hour=00/part-00000.parquet"));
    let read = ParquetRecordBatchReaderBuilder::try_new(file.unwrap()).unwrap().build().unwrap();
    let rows: Vec<_> = read.map(Result::unwrap).collect();
    assert_eq!((rows.len(), rows[0].num_rows() as u64), (1, summary.statements));
    let texts = |name: &str| -> Vec<Option<String>> {
        let column = rows[0].column_by_name(name).unwrap().as_string::<i32>();
        column.iter().map(|text| text.map(str::to_owned)).collect()
    };
    let update = "update t set a = ? where b = ? or c = ?";
    let expected = [
        ("insert into t values ('it''s')", "OK 1"),
        (update, "OK 2"),
        (update, "OK 0"),
        ("load data local infile 'x' into table t", "OK 3"),
        ("select 1; select 2", "ROWS 1"),
        (update, "ROWS 10"),
        (update, "OK 2"),
    ];
    assert_eq!(texts("text"), expected.map(|(text, _)| Some(text.to_owned())));
    assert_eq!(texts("tag"), expected.map(|(_, tag)| Some(tag.to_owned())));
    let parameters = rows[0].column_by_name("parameters").unwrap().as_list::<i32>().value(1);
    let parameters: Vec<Option<&str>> = parameters.as_string::<i32>().iter().collect();
    assert_eq!(parameters, [Some("42"), Some("o'\\x"), None]);
}
