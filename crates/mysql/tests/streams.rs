// SPDX-License-Identifier: Apache-2.0
//! Whole exchanges, typed by hand after the manuals: what each message means and where each answer ends. What only MySQL 8 sends
//! is marked so, and has never been compared with such a server.

use underpass_mysql::capability::{self, Capabilities};
use underpass_mysql::command::{self, Execute};
use underpass_mysql::exchange::{End, Exchange, Session, Step};
use underpass_mysql::handshake::{AuthSwitch, First, Greeting, Login};
use underpass_mysql::value::Parameter;
use underpass_mysql::{Error, packet};

const COLUMN: &[u8] = b"\x03def\0\0\0\x01a\0\x0c\x3f\0\x01\0\0\0\x03\x81\0\0\0\0";
const EOF: &[u8] = b"\xfe\0\0\x02\0";
const EOF_MORE: &[u8] = b"\xfe\0\0\x0a\0";
/// OK in the place of EOF, with a transaction open.
const OK_EOF: &[u8] = b"\xfe\0\0\x03\0\0\0";

/// What an answer comes to: `c` part, `r` row, `R` end of rows, `O` OK, `E` error, `P` prepared, `F` file, `T` text; `.` last.
fn told(command: u8, session: &mut Session, messages: &[&[u8]]) -> String {
    let mut exchange = Exchange::new(command);
    let mut text = String::new();
    for message in messages {
        match exchange.message(message, message.len(), session) {
            Ok(Step::Part) => text.push('c'),
            Ok(Step::Row) => text.push('r'),
            Ok(Step::WantsFile { .. }) => text.push('F'),
            Ok(Step::End { end, last }) => {
                text.push(match end {
                    End::Ok(_) => 'O',
                    End::Rows(_) => 'R',
                    End::Prepared(_) => 'P',
                    End::Err(_) => 'E',
                    End::Text => 'T',
                });
                if last {
                    text.push('.');
                }
            }
            Err(_) => text.push('!'),
        }
    }
    assert_eq!(exchange.is_done(), text.ends_with('.'), "{text}");
    text
}

fn with_eof() -> Session {
    Session::new(Capabilities(capability::PROTOCOL_41))
}

fn without_eof() -> Session {
    Session::new(Capabilities(capability::PROTOCOL_41 | capability::DEPRECATE_EOF))
}

#[test]
fn results_with_and_without_eof_packets() {
    let classic: &[&[u8]] = &[b"\x01", COLUMN, EOF, b"\x011", b"\xfb", EOF];
    let modern: &[&[u8]] = &[b"\x01", COLUMN, b"\x011", b"\xfb", OK_EOF];
    assert_eq!(told(3, &mut with_eof(), classic), "cccrrR.");
    assert_eq!(told(3, &mut without_eof(), modern), "ccrrR.");
    // A joined session finds out, and remembers.
    for (messages, expected, deprecated) in [(classic, "cccrrR.", false), (modern, "ccrrR.", true)] {
        let mut session = Session::joined();
        assert_eq!(told(3, &mut session, messages), expected);
        assert_eq!(session.deprecate_eof, Some(deprecated));
        assert_eq!(told(3, &mut session, messages), expected);
    }
    let mut session = Session::joined();
    assert_eq!(told(3, &mut session, &[b"\x01", COLUMN, OK_EOF]), "ccR.", "no rows");
    assert_eq!(session.deprecate_eof, Some(true));
}

#[test]
fn a_change_of_user_ends_with_ok_whatever_the_plugin_says() {
    let ok = b"\0\0\0\x02\0\0\0";
    let messages: &[&[u8]] = &[b"\xfeplugin\0nonce\0", b"\x01key", b"\x02factor", b"\x08data", ok];
    assert_eq!(told(0x11, &mut with_eof(), messages), "ccccO.");
    assert_eq!(told(0x11, &mut with_eof(), &[b"\x01key", b"\xff\x15\x04#28000no"]), "cE.");
}

#[test]
fn several_results_and_errors() {
    let ok_more = b"\0\x02\0\x0a\0\0\0";
    let messages: &[&[u8]] =
        &[ok_more, b"\x01", COLUMN, EOF, b"\x011", EOF_MORE, b"\xff\x7a\x04#42S02No such table"];
    assert_eq!(told(3, &mut with_eof(), messages), "OcccrRE.");
    assert_eq!(told(3, &mut with_eof(), &[b"\x01", COLUMN, EOF, b"\xff\x25\x05#70100killed"]), "cccE.");
    // MariaDB tells progress as an error that is none.
    assert_eq!(
        told(3, &mut with_eof(), &[b"\xff\xff\xff\x01\x01\x02\0\0\0\x04copy", b"\0\0\0\x02\0\0\0"]),
        "cO."
    );
}

#[test]
fn prepared_statements() {
    let ok = |columns: u8, parameters: u8| [0, 7, 0, 0, 0, columns, 0, parameters, 0, 0, 0, 0];
    assert_eq!(told(0x16, &mut with_eof(), &[&ok(0, 0)]), "P.");
    assert_eq!(told(0x16, &mut with_eof(), &[&ok(1, 2), COLUMN, COLUMN, EOF, COLUMN, EOF]), "cccccP.");
    assert_eq!(told(0x16, &mut with_eof(), &[&ok(0, 1), COLUMN, EOF]), "ccP.");
    assert_eq!(told(0x16, &mut without_eof(), &[&ok(1, 2), COLUMN, COLUMN, COLUMN]), "cccP.");
    assert_eq!(told(0x16, &mut Session::joined(), &[&ok(1, 1), COLUMN, EOF, COLUMN, EOF]), "ccccP.");
    assert_eq!(told(0x16, &mut Session::joined(), &[&ok(1, 1), COLUMN, COLUMN]), "ccP.");
    // Where nothing follows the definitions, the next command tells that no EOF packet does.
    let mut session = Session::joined();
    let mut exchange = Exchange::new(0x16);
    for message in [&ok(1, 0)[..], COLUMN] {
        assert_eq!(exchange.end_if_complete(&mut session), None);
        assert_eq!(exchange.message(message, message.len(), &mut session), Ok(Step::Part));
    }
    assert!(matches!(exchange.end_if_complete(&mut session), Some(End::Prepared(_))));
    assert_eq!((exchange.is_done(), session.deprecate_eof), (true, Some(true)));
    // A cursor's rows stay at the server.
    assert_eq!(told(0x17, &mut Session::joined(), &[b"\x01", COLUMN, b"\xfe\0\0\x42\0"]), "ccR.");
    assert_eq!(told(0x1c, &mut with_eof(), &[b"\0\0\x01", b"\xfe\0\0\xc2\0"]), "rR.");
    // MariaDB leaves out columns that the client has.
    let mut session = without_eof();
    assert_eq!(told(0x17, &mut session, &[b"\x01\0", b"\0\0\x01", OK_EOF]), "crR.");
}

#[test]
fn the_other_commands() {
    assert_eq!(told(3, &mut with_eof(), &[b"\xfb/tmp/x", b"\0\x02\0\x02\0\0\0"]), "FO.");
    assert_eq!(told(9, &mut with_eof(), &[b"Uptime: 1"]), "T.");
    assert_eq!(told(4, &mut with_eof(), &[COLUMN, COLUMN, EOF]), "ccO.");
    assert_eq!(told(0x1b, &mut with_eof(), &[EOF]), "O.");
    assert_eq!(
        told(0x11, &mut with_eof(), &[b"\xfemysql_native_password\0abc\0", b"\0\0\0\x02\0\0\0"]),
        "cO."
    );
    assert!(Exchange::new(command::COM_STMT_CLOSE).is_done());
}

#[test]
fn what_is_no_answer_is_refused() {
    let mut exchange = Exchange::new(3);
    let mut session = with_eof();
    assert!(matches!(exchange.message(b"", 0, &mut session), Err(Error::Truncated(_))));
    assert!(exchange.message(b"\0\0\0\x02\0\0\0", 7, &mut session).is_ok());
    assert!(matches!(exchange.message(b"\0\0\0\x02\0\0\0", 7, &mut session), Err(Error::Unexpected { .. })));
}

#[test]
fn a_login_comes_back() {
    let login = Login {
        capabilities: Capabilities(capability::PROTOCOL_41 | capability::MARIADB_PROGRESS),
        collation: 45,
        user: b"ann",
        database: Some(b"shop"),
        plugin: Some(b"mysql_native_password"),
        attributes: vec![(b"program_name", b"till"), (b"_pid", b"7")],
    };
    let mut message = Vec::new();
    login.put(&mut message, 1, &[9; 20]);
    let payload = packet::payload(&message);
    let Ok(First::Login(read)) = First::decode(&payload) else { panic!("{:?}", First::decode(&payload)) };
    assert_eq!((read.user, read.database, read.plugin), (login.user, login.database, login.plugin));
    assert_eq!(read.attributes, login.attributes);
    assert!(read.capabilities.has(capability::MARIADB_PROGRESS | capability::CONNECT_ATTRS));
    assert!(!read.capabilities.compressed());
    for cut in 0..36 {
        assert!(First::decode(&payload[..cut]).is_err(), "{cut}");
    }
    let mut old = payload.to_vec();
    old[1] &= !2;
    assert_eq!(First::decode(&old), Err(Error::OldProtocol(10)));
}

#[test]
fn tls_is_asked_for_by_a_login_without_user() {
    let mut payload = vec![0; 32];
    payload[..4].copy_from_slice(&((capability::PROTOCOL_41 | capability::SSL) as u32).to_le_bytes());
    assert_eq!(First::decode(&payload), Ok(First::SslRequest));
}

/// The greeting of a MariaDB 10.11.
#[test]
fn a_greeting_of_mariadb() {
    let mut bytes =
        b"\x0a5.5.5-10.11.19-MariaDB\0\x2a\0\0\0abcdefgh\0\xfe\xf7\x2d\x02\0\xff\x81\x15".to_vec();
    bytes.extend_from_slice(b"\0\0\0\0\0\0\x1d\0\0\0ijklmnopqrst\0mysql_native_password\0");
    let greeting = Greeting::decode(&bytes).unwrap();
    assert_eq!(greeting.server_version(), b"10.11.19-MariaDB");
    assert_eq!((greeting.connection_id, greeting.plugin), (42, &b"mysql_native_password"[..]));
    assert_eq!(greeting.nonce, b"abcdefghijklmnopqrst");
    assert!(greeting.capabilities.has(capability::MARIADB_PROGRESS | capability::DEPRECATE_EOF));
    assert_eq!(
        Greeting::decode(b"\xff\x10\x04Too many connections").unwrap_err(),
        Error::Unexpected { what: "a greeting", byte: 255 }
    );
    assert_eq!(Greeting::decode(b"\x09old").unwrap_err(), Error::OldProtocol(9));
}

/// Not verified on a server: MySQL 8 asks for its own plugin, and a client may send attributes with a statement.
#[test]
fn unverified_what_mysql_8_adds() {
    let switch = AuthSwitch::decode(b"\xfecaching_sha2_password\0abcdefghijklmnopqrst\0").unwrap();
    assert_eq!((switch.plugin, switch.data), (&b"caching_sha2_password"[..], &b"abcdefghijklmnopqrst\0"[..]));
    let modern = Capabilities(capability::PROTOCOL_41 | capability::QUERY_ATTRIBUTES);
    assert_eq!(command::query_text(b"\x03\0\x01select 1"), Ok(&b"select 1"[..]));
    // One attribute, `a` of type VAR_STRING, with the value `xyz`.
    assert_eq!(command::query_text(b"\x03\x01\x01\0\x01\xfd\0\x01a\x03xyzselect 1"), Ok(&b"select 1"[..]));
    for text in [&b"select 1"[..], b"", b"\0", b"x", b"\xfc\x01"] {
        assert_eq!(command::query_text(&[b"\x03", text].concat()), Ok(text), "no attributes");
    }
    // The value is longer than the message.
    assert!(command::query_text(b"\x03\x01\x01\0\x01\xfd\0\x01a\x30xyz").is_err());
    // Flag 8: the number of parameters is told, attributes included.
    let execute = b"\x17\x01\0\0\0\x08\x01\0\0\0\x02\0\x01\x03\0\0\xfd\0\x01a\x2a\0\0\0\x03xyz";
    let execute = Execute::decode(execute, 1, modern, &mut Vec::new(), |_| false).unwrap();
    assert_eq!(execute.parameters, [Parameter::Signed(42), Parameter::Bytes(b"xyz")]);
}

#[test]
fn parameters_of_every_kind() {
    let mut bytes = b"\x17\x05\0\0\0\0\x01\0\0\0".to_vec();
    let parameters: &[(u16, &[u8], Option<&str>)] = &[
        (1, b"\xff", Some("-1")),
        (0x8001, b"\xff", Some("255")),
        (2, b"\x00\x80", Some("-32768")),
        (3, b"\xff\xff\xff\xff", Some("-1")),
        (0x8008, b"\xff\xff\xff\xff\xff\xff\xff\xff", Some("18446744073709551615")),
        (4, b"\0\0\xc0\x3f", Some("1.5")),
        (5, b"\0\0\0\0\0\0\xf8\xbf", Some("-1.5")),
        (6, b"", None),
        (10, b"\x04\xe8\x07\x02\x1d", Some("2024-02-29")),
        (12, b"\x0b\xe8\x07\x02\x1d\x0c\x22\x38\x40\xe2\x01\x00", Some("2024-02-29 12:34:56.123456")),
        (7, b"\0", Some("0000-00-00")),
        (11, b"\x08\x01\x01\0\0\0\x02\x03\x04", Some("-26:03:04")),
        (242, b"\x04abcd", Some("abcd")),
        (246, b"\x0412.5", Some("12.5")),
        (252, b"\x02\0\xff", Some("\0\u{fffd}")),
        (253, b"\x00", Some("")),
    ];
    let count = parameters.len();
    bytes.extend(std::iter::repeat_n(0, count.div_ceil(8)));
    bytes.push(1);
    parameters.iter().for_each(|(kind, ..)| bytes.extend_from_slice(&kind.to_le_bytes()));
    let values_at = bytes.len();
    parameters.iter().for_each(|(_, value, _)| bytes.extend_from_slice(value));
    let mut types = Vec::new();
    let none = Capabilities::default();
    let execute = Execute::decode(&bytes, count as u16, none, &mut types, |_| false).unwrap();
    assert_eq!(execute.statement, 5);
    for (parameter, (kind, _, text)) in execute.parameters.iter().zip(parameters) {
        let found = parameter.text().map(|text| String::from_utf8_lossy(&text).into_owned());
        assert_eq!(found.as_deref(), *text, "type {kind}");
    }
    for cut in 0..bytes.len() {
        assert!(
            Execute::decode(&bytes[..cut], count as u16, none, &mut Vec::new(), |_| false).is_err(),
            "{cut}"
        );
    }
    // The next execution need not repeat the types.
    let mut again = bytes[..10 + count.div_ceil(8)].to_vec();
    again.push(0);
    again.extend_from_slice(&bytes[values_at..]);
    let second = Execute::decode(&again, count as u16, none, &mut types, |_| false).unwrap();
    assert_eq!(second.parameters, execute.parameters);
    assert!(Execute::decode(&again, count as u16, none, &mut Vec::new(), |_| false).is_err());
}
