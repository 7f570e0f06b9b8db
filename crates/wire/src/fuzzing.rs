// SPDX-License-Identifier: Apache-2.0
//! Entry points of the fuzz targets in `/fuzz`. Each takes any bytes and panics when an invariant breaks.
//!
//! `cargo test` replays the corpora of `/fuzz/corpus` over them, whole, cut and mutated.

use std::fs;
use std::path::Path;

use crate::backend::{self, Authentication, Fields};
use crate::builder::{counted, cstr, message};
use crate::frontend::{self, bind_names};
use crate::startup::{self, FirstPacket, MAX_LEN};
use crate::{FrameError, Framer, Header, Piece};

/// The length limit of the [`frames`] target: small, so that it is met.
const FRAMES_MAX_LEN: u32 = 1 << 20;

/// What a stream holds: complete messages, then the error or the bytes of a message without its end.
type Outcome = (Vec<(Header, Vec<u8>)>, Result<usize, FrameError>);

/// Target `wire_frames`. The first byte seeds the chunk sizes, the rest is the stream: however it is cut, the
/// frames are those that a look at the whole stream finds.
pub fn frames(data: &[u8]) {
    let Some((&seed, stream)) = data.split_first() else { return };
    let whole = frames_of_whole(stream);
    assert_eq!(frames_of_chunks(stream, |left| left), whole, "one chunk");
    assert_eq!(frames_of_chunks(stream, |_| 1), whole, "chunks of one byte");
    let mut state = u32::from(seed) | 1;
    let random = |left: usize| {
        state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        (state >> 24) as usize % 12 % (left + 1) // empty chunks too
    };
    assert_eq!(frames_of_chunks(stream, random), whole, "random chunks");
}

fn frames_of_whole(mut stream: &[u8]) -> Outcome {
    let mut messages = Vec::new();
    loop {
        match Header::parse_max(stream, FRAMES_MAX_LEN) {
            Err(error) => return (messages, Err(error)),
            Ok(Some(header)) if header.total() <= stream.len() => {
                let (message, rest) = stream.split_at(header.total());
                messages.push((header, message[5..].to_vec()));
                stream = rest;
            }
            Ok(_) => return (messages, Ok(stream.len())),
        }
    }
}

fn frames_of_chunks(mut stream: &[u8], mut size: impl FnMut(usize) -> usize) -> Outcome {
    let mut framer = Framer::new(FRAMES_MAX_LEN);
    let mut messages = Vec::new();
    let mut body = Vec::new();
    let mut began = false;
    while !stream.is_empty() {
        let (mut chunk, rest) = stream.split_at(size(stream.len()));
        loop {
            let before = (framer, chunk);
            match framer.next(&mut chunk) {
                Ok(Some(Piece::Header(_))) => assert!(!std::mem::replace(&mut began, true)),
                Ok(Some(Piece::Body(part))) => {
                    assert!(began && !part.is_empty());
                    body.extend_from_slice(part);
                }
                Ok(Some(Piece::End(header))) => {
                    assert!(std::mem::take(&mut began));
                    assert_eq!(body.len(), header.body_len());
                    messages.push((header, std::mem::take(&mut body)));
                }
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(chunk, before.1, "an error consumes nothing");
                    assert_eq!(framer.pending_header(), before.0.pending_header());
                    assert_eq!(framer.next(&mut chunk), Err(error), "an error stays");
                    return (messages, Err(error));
                }
            }
        }
        assert!(chunk.is_empty());
        assert_eq!(framer.at_boundary(), !began && framer.pending_header().is_empty());
        framer = hand_over(&framer);
        stream = rest;
    }
    let unfinished = framer.header().map_or(framer.pending_header().len(), |_| 5 + body.len());
    (messages, Ok(unfinished))
}

/// Every state between two chunks can be taken over by another framer.
fn hand_over(framer: &Framer) -> Framer {
    let (need, hdr, hdr_len) = framer.parts();
    Framer::from_parts(FRAMES_MAX_LEN, need, hdr, hdr_len).expect("a reachable state")
}

/// Target `wire_startup`: the bytes are a first packet, and also the value of `options`.
pub fn startup(data: &[u8]) {
    startup::options::settings(data).for_each(drop);
    let words: usize = startup::options::words(data).map(|word| word.len()).sum();
    assert!(words <= data.len());
    let Ok(Some((first, total))) = startup::parse(data) else { return };
    assert!(total <= data.len() && total <= MAX_LEN);
    for n in 0..total {
        assert_eq!(startup::parse(&data[..n]), Ok(None), "a part is never an answer");
    }
    let mut again = Vec::new();
    match first {
        FirstPacket::Startup(message) => {
            startup::build::startup_message(&mut again, message.version, message.pairs());
            assert_eq!(
                message.parameters().count() + message.protocol_options().count(),
                message.pairs().count()
            );
        }
        FirstPacket::Cancel(c) => startup::build::cancel_request(&mut again, c.process_id, c.secret_key),
        FirstPacket::SslRequest => startup::build::ssl_request(&mut again),
        FirstPacket::GssencRequest => startup::build::gssenc_request(&mut again),
        FirstPacket::DirectTls => assert_eq!(total, 0),
        FirstPacket::UnsupportedProtocol(version) => {
            assert_ne!(version.major, 3);
            return;
        }
    }
    assert_eq!(again, &data[..total]);
}

/// Target `wire_frontend`. The first byte is the type, the rest the body: what decodes is rebuilt the same.
pub fn frontend(data: &[u8]) {
    use frontend::{Message, build};
    let Some((&tag, body)) = data.split_first() else { return };
    let Ok(message) = Message::decode(tag, body) else { return };
    let mut out = Vec::new();
    match message {
        Message::Bind(bind) => {
            let names = bind_names(body).expect("a whole Bind has both names");
            assert_eq!((names.portal, names.statement, names.rest), (bind.portal, bind.statement, bind.rest));
            assert!((0..bind.rest).all(|n| bind_names(&body[..n]).is_none()));
            let a = bind.arguments;
            let (params, results) = (a.params, a.result_formats);
            build::bind(&mut out, bind.portal, bind.statement, a.param_formats, params, results);
            let mut head = Vec::new();
            build::bind_head(&mut head, bind.portal, bind.statement, body.len() - bind.rest);
            head.extend_from_slice(&body[bind.rest..]);
            assert_eq!(head, out);
        }
        Message::Close(close) => build::close(&mut out, close.target, close.name),
        Message::CopyData(copy) => build::copy_data(&mut out, copy.data),
        Message::CopyDone => build::copy_done(&mut out),
        Message::CopyFail(fail) => build::copy_fail(&mut out, fail.message),
        Message::Describe(describe) => build::describe(&mut out, describe.target, describe.name),
        Message::Execute(execute) => build::execute(&mut out, execute.portal, execute.max_rows),
        Message::Flush => build::flush(&mut out),
        Message::FunctionCall(call) => {
            build::function_call(&mut out, call.function, call.arg_formats, call.args, call.result_format);
        }
        Message::Parse(parse) => {
            build::parse(&mut out, parse.name, parse.query, parse.param_types);
            let mut head = Vec::new();
            let rest = &body[parse.name.len() + 1..];
            build::parse_head(&mut head, parse.name, rest.len());
            head.extend_from_slice(rest);
            assert_eq!(head, out);
        }
        Message::Password(body) => return password(body),
        Message::Query(query) => build::query(&mut out, query.query),
        Message::Sync => build::sync(&mut out),
        Message::Terminate => build::terminate(&mut out),
    }
    assert_message(&out, tag, body);
}

/// A body of type `p` in each of its meanings.
fn password(body: &[u8]) {
    let tag = crate::tag::frontend::PASSWORD;
    let mut out = Vec::new();
    frontend::build::sasl_response(&mut out, frontend::SaslResponse::decode(body).data);
    assert_message(&out, tag, body);
    if let Ok(message) = frontend::PasswordMessage::decode(body) {
        out.clear();
        frontend::build::password(&mut out, message.password);
        assert_message(&out, tag, body);
    }
    if let Ok(message) = frontend::SaslInitialResponse::decode(body) {
        out.clear();
        frontend::build::sasl_initial_response(&mut out, message.mechanism, message.data);
        assert_message(&out, tag, body);
    }
}

/// Target `wire_backend`. The first byte is the type, the rest the body: what decodes is rebuilt the same.
pub fn backend(data: &[u8]) {
    use backend::{Message, build};
    let Some((&tag, body)) = data.split_first() else { return };
    let Ok(decoded) = Message::decode(tag, body) else { return };
    let mut out = Vec::new();
    match decoded {
        Message::Authentication(request) => authentication(&mut out, request),
        Message::BackendKeyData(key) => build::backend_key_data(&mut out, key.process_id, key.secret_key),
        Message::BindComplete => build::bind_complete(&mut out),
        Message::CloseComplete => build::close_complete(&mut out),
        Message::CommandComplete(complete) => {
            let digits = complete.rows().map_or(0, |rows| rows.to_string().len());
            assert!(digits < complete.tag.len().max(1));
            message(&mut out, tag, |out| cstr(out, complete.tag));
        }
        Message::CopyData(data) => build::copy_data(&mut out, data),
        Message::CopyDone => build::copy_done(&mut out),
        Message::CopyInResponse(c) => build::copy_in_response(&mut out, c.format, c.column_formats),
        Message::CopyOutResponse(c) => build::copy_out_response(&mut out, c.format, c.column_formats),
        Message::CopyBothResponse(c) => build::copy_both_response(&mut out, c.format, c.column_formats),
        Message::DataRow(row) => build::data_row(&mut out, row.columns),
        Message::EmptyQueryResponse => build::empty_query_response(&mut out),
        Message::ErrorResponse(fields) | Message::NoticeResponse(fields) => report(&mut out, tag, fields),
        Message::FunctionCallResponse(response) => build::function_call_response(&mut out, response.value),
        Message::NegotiateProtocolVersion(n) => {
            build::negotiate_protocol_version(&mut out, n.newest, n.options());
        }
        Message::NoData => build::no_data(&mut out),
        Message::NotificationResponse(n) => {
            build::notification_response(&mut out, n.process_id, n.channel, n.payload);
        }
        Message::ParameterDescription(parameters) => {
            build::parameter_description(&mut out, parameters.types);
        }
        Message::ParameterStatus(status) => build::parameter_status(&mut out, status.name, status.value),
        Message::ParseComplete => build::parse_complete(&mut out),
        Message::PortalSuspended => build::portal_suspended(&mut out),
        Message::ReadyForQuery(status) => build::ready_for_query(&mut out, status),
        Message::RowDescription(fields) => build::row_description(&mut out, fields),
    }
    assert_message(&out, tag, body);
}

/// Also the requests that a pooler only receives, for which there is no public builder.
fn authentication(out: &mut Vec<u8>, request: Authentication<'_>) {
    use backend::build;
    let plain = |out: &mut Vec<u8>, code: u8, data: &[u8]| {
        out.push(b'R');
        counted(out, |out| {
            out.extend_from_slice(&[0, 0, 0, code]);
            out.extend_from_slice(data);
        });
    };
    match request {
        Authentication::Ok => build::authentication_ok(out),
        Authentication::KerberosV5 => plain(out, 2, b""),
        Authentication::CleartextPassword => build::authentication_cleartext_password(out),
        Authentication::Md5Password { salt } => build::authentication_md5_password(out, salt),
        Authentication::Gss => plain(out, 7, b""),
        Authentication::GssContinue { data } => plain(out, 8, data),
        Authentication::Sspi => plain(out, 9, b""),
        Authentication::Sasl { mechanisms } => {
            let mut names: Vec<u8> = mechanisms.flat_map(|name| [name, b"\0"].concat()).collect();
            names.push(0);
            plain(out, 10, &names);
        }
        Authentication::SaslContinue { data } => build::authentication_sasl_continue(out, data),
        Authentication::SaslFinal { data } => build::authentication_sasl_final(out, data),
    }
}

fn report(out: &mut Vec<u8>, tag: u8, fields: Fields<'_>) {
    assert_eq!(fields.message(), fields.get(b'M'));
    assert!(fields.sqlstate().is_none_or(|code| fields.get(b'C') == Some(code.as_bytes())));
    message(out, tag, |out| {
        for (code, value) in fields {
            out.push(code);
            cstr(out, value);
        }
        out.push(0);
    });
}

fn assert_message(message: &[u8], tag: u8, body: &[u8]) {
    assert_eq!(message[..5], Header::new(tag, body.len()).to_bytes());
    assert_eq!(&message[5..], body);
}

/// Runs a target over its corpus in `/fuzz/corpus`: each seed whole, and at each of its first `positions` bytes cut, and with that byte set
/// to values at which something changes. Panics when there are fewer than `seeds_min` seeds, or the target does.
pub fn over_corpus(target: &str, seeds_min: usize, positions: usize, run: fn(&[u8])) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let mut seeds = 0;
    for entry in fs::read_dir(&directory).expect("the corpus is checked in") {
        let mut seed = fs::read(entry.expect("an entry").path()).expect("a seed");
        run(&seed);
        for at in 0..seed.len().min(positions) {
            run(&seed[..at]);
            let byte = seed[at];
            for other in [0, 1, 4, 0x7f, 0x80, 0xff, byte.wrapping_add(1), byte ^ 0x10, byte ^ 0x20] {
                seed[at] = other;
                run(&seed);
            }
            seed[at] = byte;
        }
        seeds += 1;
    }
    assert!(seeds >= seeds_min, "{target} has {seeds} seeds");
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    type Target = (&'static str, fn(&[u8]));
    const TARGETS: [Target; 4] = [
        ("wire_frames", super::frames),
        ("wire_startup", super::startup),
        ("wire_frontend", super::frontend),
        ("wire_backend", super::backend),
    ];

    #[test]
    fn corpora() {
        for (name, target) in TARGETS {
            super::over_corpus(name, 5, 400, target);
        }
    }

    /// Bytes that often look like small counts, lengths and terminators.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let byte = prop_oneof![4 => Just(0u8), 2 => 0..12u8, 1 => Just(0xff), 3 => any::<u8>()];
        prop::collection::vec(byte, 0..80)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        #[test]
        fn any_bytes(data in bytes(), tag in any::<prop::sample::Index>()) {
            TARGETS.iter().for_each(|(_, target)| target(&data));
            let typed = |all: &[u8]| [&[*tag.get(all)], &data[..]].concat();
            super::frontend(&typed(crate::tag::frontend::ALL));
            super::backend(&typed(crate::tag::backend::ALL));
        }
    }
}
