// SPDX-License-Identifier: Apache-2.0
//! Sessions recorded between PostgreSQL 15.18's own clients and server (SCRAM login; psql with COPY, an error, a
//! warning and NOTIFY; pgbench with prepared statements): every message decodes, in the order we know.
//!
//! Unlike the golden vectors these bytes were made by PostgreSQL, not typed by us.

use underpass_wire::backend::{self, Authentication, TransactionStatus};
use underpass_wire::startup::{self, FirstPacket};
use underpass_wire::{Framer, MAX_MESSAGE_LEN, Piece, SqlState, frontend};

const PSQL: [&[u8]; 2] = [include_bytes!("data/psql_client.bin"), include_bytes!("data/psql_server.bin")];
const PGBENCH: [&[u8]; 2] =
    [include_bytes!("data/pgbench_client.bin"), include_bytes!("data/pgbench_server.bin")];

fn messages(mut stream: &[u8]) -> Vec<(u8, &[u8])> {
    let mut framer = Framer::new(MAX_MESSAGE_LEN);
    let mut all = Vec::new();
    let mut body = &b""[..];
    while let Some(piece) = framer.next(&mut stream).unwrap() {
        match piece {
            Piece::Header(_) => body = b"",
            Piece::Body(whole) => body = whole,
            Piece::End(header) => all.push((header.tag, body)),
        }
    }
    assert!(framer.at_boundary() && stream.is_empty());
    all
}

fn client(stream: &[u8]) -> Vec<(u8, &[u8])> {
    let (first, total) = startup::parse(stream).unwrap().unwrap();
    let FirstPacket::Startup(message) = first else { panic!("{first:?}") };
    assert_eq!((message.user(), message.database()), (Some(&b"postgres"[..]), Some(&b"postgres"[..])));
    messages(&stream[total..])
}

fn tags(messages: &[(u8, &[u8])]) -> String {
    messages.iter().map(|&(tag, _)| char::from(tag)).collect()
}

#[test]
fn all_messages_decode() {
    for [client_stream, server_stream] in [PSQL, PGBENCH] {
        for (tag, body) in client(client_stream) {
            frontend::Message::decode(tag, body).unwrap();
        }
        for (tag, body) in messages(server_stream) {
            backend::Message::decode(tag, body).unwrap();
        }
    }
}

#[test]
fn login() {
    let server = messages(PSQL[1]);
    let requests: Vec<_> = server.iter().take(4).map(|m| Authentication::decode(m.1).unwrap()).collect();
    let Authentication::Sasl { mut mechanisms } = requests[0] else { panic!() };
    assert!(mechanisms.any(|name| name == b"SCRAM-SHA-256"));
    assert!(matches!(requests[1], Authentication::SaslContinue { .. }));
    assert!(matches!(requests[2], Authentication::SaslFinal { .. }));
    assert_eq!(requests[3], Authentication::Ok);
    let client = client(PSQL[0]);
    let first = frontend::SaslInitialResponse::decode(client[0].1).unwrap();
    assert_eq!(first.mechanism, b"SCRAM-SHA-256");
    assert!(first.data.unwrap().starts_with(b"n,,n="));
}

#[test]
fn psql() {
    let server = messages(PSQL[1]);
    let status: String = server
        .iter()
        .filter(|m| m.0 == b'Z')
        .map(|m| char::from(TransactionStatus::decode(m.1).unwrap().to_byte()))
        .collect();
    assert_eq!(status, "IITEIIIIIIIII");
    let errors = server.iter().filter(|m| m.0 == b'E' || m.0 == b'N');
    let codes: Vec<_> = errors.map(|m| backend::Fields::decode(m.1).unwrap().sqlstate().unwrap()).collect();
    assert_eq!(codes, [SqlState::DIVISION_BY_ZERO, SqlState::WARNING]);
    let row = server.iter().find(|m| m.0 == b'D').map(|m| backend::DataRow::decode(m.1).unwrap()).unwrap();
    assert_eq!(row.columns.collect::<Vec<_>>(), [Some(&b"1"[..]), None, Some(b"text")]);
    let copied = server.iter().filter(|m| m.0 == b'C').filter(|m| m.1.starts_with(b"COPY"));
    let rows: Vec<_> = copied.map(|m| backend::CommandComplete::decode(m.1).unwrap().rows()).collect();
    assert_eq!(rows, [Some(2), Some(2)]);
    assert_eq!(tags(&server), "RRRRSSSSSSSSSSSSSKZTDCZCZEZCZCSZCZGCZHddcCZNCZCZCAZIZ");
    assert_eq!(tags(&client(PSQL[0])), "ppQQQQQQQdcQQQQQX");
}

#[test]
fn pgbench() {
    assert_eq!(tags(&client(PGBENCH[0])), "ppPSBDESBDESX");
    assert_eq!(tags(&messages(PGBENCH[1])), "RRRRSSSSSSSSSSSSSKZ1Z2TDCZ2TDCZ");
    let binds = client(PGBENCH[0]).into_iter().filter(|m| m.0 == b'B');
    let names: Vec<_> = binds.map(|m| frontend::bind_names(m.1).unwrap().statement).collect();
    assert_eq!(names, [b"P_0", b"P_0"]);
}
