// SPDX-License-Identifier: Apache-2.0
//! Writes the seeds of the fuzz corpora: `cargo run -p underpass-wire --example gen_corpus -- fuzz/corpus`.
//! The seeds `psql_server` and `pgbench_server` are the recordings of `tests/data` behind a seed byte.

use std::path::{Path, PathBuf};

use underpass_wire::backend::{self, FieldDescription, Report, Severity, TransactionStatus};
use underpass_wire::frontend::{self, Target};
use underpass_wire::startup::{self, ProtocolVersion};
use underpass_wire::{Framer, Piece, SqlState, tag};

fn main() {
    let root = PathBuf::from(std::env::args().nth(1).expect("usage: gen_corpus DIRECTORY"));
    let (client, server) = (frontend_messages(), backend_messages());
    write(&root, "wire_startup", startup_packets());
    write(&root, "wire_frontend", messages(&client, tag::frontend::name));
    write(&root, "wire_backend", messages(&server, tag::backend::name));
    write(&root, "wire_frames", streams(&client, &server));
}

fn write(root: &Path, target: &str, seeds: Vec<(String, Vec<u8>)>) {
    let dir = root.join(target);
    std::fs::create_dir_all(&dir).expect("creatable corpus directory");
    for (name, bytes) in seeds {
        std::fs::write(dir.join(name), bytes).expect("writable corpus directory");
    }
}

/// One seed for each message of the stream: type byte and body.
fn messages(mut stream: &[u8], name: fn(u8) -> &'static str) -> Vec<(String, Vec<u8>)> {
    let mut framer = Framer::new(underpass_wire::MAX_MESSAGE_LEN);
    let mut seeds = Vec::new();
    let mut seed = Vec::new();
    while let Some(piece) = framer.next(&mut stream).expect("built messages") {
        match piece {
            Piece::Header(header) => seed = vec![header.tag],
            Piece::Body(part) => seed.extend_from_slice(part),
            Piece::End(header) => {
                let name = format!("{:02}-{}", seeds.len(), name(header.tag));
                seeds.push((name, std::mem::take(&mut seed)));
            }
        }
    }
    seeds
}

fn startup_packets() -> Vec<(String, Vec<u8>)> {
    use startup::build;
    let make = |name: &str, fill: &dyn Fn(&mut Vec<u8>)| {
        let mut out = Vec::new();
        fill(&mut out);
        (name.to_owned(), out)
    };
    let user = [(&b"user"[..], &b"bob"[..]), (b"database", b"app")];
    let rich = [(&b"user"[..], &b"bob"[..]), (b"_pq_.x", b"1"), (b"options", b"-c geqo=off")];
    vec![
        make("ssl_request", &|out| build::ssl_request(out)),
        make("gssenc_request", &|out| build::gssenc_request(out)),
        make("cancel_4", &|out| build::cancel_request(out, 4711, b"\x01\x02\x03\x04")),
        make("cancel_32", &|out| build::cancel_request(out, 4711, &[7; 32])),
        make("startup_3_0", &|out| build::startup_message(out, ProtocolVersion::V3_0, user)),
        make("startup_3_2", &|out| build::startup_message(out, ProtocolVersion::V3_2, rich)),
        make("direct_tls", &|out| out.extend_from_slice(b"\x16\x03\x01\x02\x00\x01")),
        make("protocol_2", &|out| out.extend_from_slice(b"\0\0\0\x08\0\x02\0\0")),
        make("options", &|out| out.extend_from_slice(br"-c a=b\ c --x-y=z -cq=1 \")),
    ]
}

fn frontend_messages() -> Vec<u8> {
    use frontend::build;
    let mut out = Vec::new();
    build::query(&mut out, b"select 1");
    build::parse(&mut out, b"s1", b"select $1::int", [23, 0]);
    build::bind(&mut out, b"p", b"s1", [0, 1], [Some(&b"42"[..]), None], [1]);
    build::bind(&mut out, b"", b"", [], [], []);
    build::describe(&mut out, Target::Statement, b"s1");
    build::execute(&mut out, b"p", 100);
    build::close(&mut out, Target::Portal, b"p");
    build::flush(&mut out);
    build::sync(&mut out);
    build::copy_data(&mut out, b"1\tx\n");
    build::copy_done(&mut out);
    build::copy_fail(&mut out, b"no");
    build::function_call(&mut out, 1598, [1], [Some(&b"\0\0\0\x01"[..])], 1);
    build::password(&mut out, b"md5deadbeef");
    build::sasl_initial_response(&mut out, b"SCRAM-SHA-256", Some(b"n,,n=,r=abc"));
    build::sasl_response(&mut out, b"c=biws,r=abc,p=xyz");
    build::terminate(&mut out);
    out
}

fn backend_messages() -> Vec<u8> {
    use backend::build;
    let mut out = Vec::new();
    build::authentication_sasl(&mut out, ["SCRAM-SHA-256-PLUS", "SCRAM-SHA-256"]);
    build::authentication_sasl_continue(&mut out, b"r=abc,s=c2FsdA==,i=4096");
    build::authentication_sasl_final(&mut out, b"v=sig");
    build::authentication_md5_password(&mut out, [1, 2, 3, 4]);
    build::authentication_cleartext_password(&mut out);
    build::authentication_ok(&mut out);
    build::negotiate_protocol_version(&mut out, ProtocolVersion::V3_2, [&b"_pq_.x"[..]]);
    build::parameter_status(&mut out, b"client_encoding", b"UTF8");
    build::backend_key_data(&mut out, 4711, &[9; 4]);
    build::backend_key_data(&mut out, 4711, &[9; 32]);
    build::ready_for_query(&mut out, TransactionStatus::Idle);
    build::parse_complete(&mut out);
    build::bind_complete(&mut out);
    build::parameter_description(&mut out, [23, 25]);
    build::row_description(
        &mut out,
        [FieldDescription::new(b"id", 23, 4), FieldDescription::new(b"t", 25, -1)],
    );
    build::data_row(&mut out, [Some("1"), None]);
    build::data_row::<&str>(&mut out, []);
    build::portal_suspended(&mut out);
    build::command_complete(&mut out, "INSERT 0 1");
    build::no_data(&mut out);
    build::close_complete(&mut out);
    build::empty_query_response(&mut out);
    let fatal = Report::new(Severity::Fatal, SqlState::TOO_MANY_CONNECTIONS, "no more connections");
    build::error_response(&mut out, &Report { detail: Some("d"), hint: Some("h"), ..fatal });
    build::notice_response(&mut out, &Report::new(Severity::Notice, SqlState::WARNING, "careful"));
    build::notification_response(&mut out, 4711, b"channel", b"payload");
    build::copy_in_response(&mut out, 0, [0, 0]);
    build::copy_out_response(&mut out, 1, [1]);
    build::copy_both_response(&mut out, 0, []);
    build::copy_data(&mut out, b"1\tx\n");
    build::copy_done(&mut out);
    build::function_call_response(&mut out, None);
    build::ready_for_query(&mut out, TransactionStatus::Failed);
    out
}

/// Streams for the framer: a seed byte for the chunk sizes, then messages, whole and broken.
fn streams(client: &[u8], server: &[u8]) -> Vec<(String, Vec<u8>)> {
    let stream = |name: &str, seed: u8, bytes: &[u8]| (name.to_owned(), [&[seed], bytes].concat());
    vec![
        stream("client", 3, client),
        stream("server", 11, server),
        stream("syncs", 7, &b"S\0\0\0\x04".repeat(20)),
        stream("cut_header", 1, b"S\0\0\0\x04Q\0\0"),
        stream("cut_body", 1, b"Q\0\0\0\x20select"),
        stream("too_small", 5, b"S\0\0\0\x04Q\0\0\0\x03x"),
        stream("too_large", 5, b"S\0\0\0\x04Q\x7f\xff\xff\xffx"),
        stream("negative", 9, b"Z\0\0\0\x05IZ\xff\xff\xff\xff"),
    ]
}
