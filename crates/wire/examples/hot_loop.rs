// SPDX-License-Identifier: Apache-2.0
//! Prints nanoseconds per message of the paths that every forwarded byte takes.
//!
//! ```text
//! cargo run --release -p underpass-wire --example hot_loop
//! ```

use std::hint::black_box;
use std::time::Instant;

use underpass_wire::backend::{self, FieldDescription, TransactionStatus};
use underpass_wire::frontend::{self, bind_names};
use underpass_wire::{Framer, Header, MAX_MESSAGE_LEN, Piece, tag};

/// Passes over each stream; the best of several is printed, as the machine may be busy.
const PASSES: u32 = 20_000;
const ROUNDS: u32 = 7;

fn main() {
    let (select_1, prepared, rows) = (select_1(), prepared(), rows());
    report("framer, response to select 1", 4, || frame(&select_1, select_1.len()));
    report("framer, same, chunks of 7 bytes", 4, || frame(&select_1, 7));
    report("framer, Bind Describe Execute Sync", 4, || frame(&prepared, prepared.len()));
    report("framer, 100 DataRows", 100, || frame(&rows, rows.len()));
    let bind = &prepared[5..];
    report("bind_names", 1, || bind_names(black_box(bind)).map_or(0, |names| names.rest));
    report("decode of 100 DataRows of 2 columns", 100, || decode(&rows));
    let mut out = Vec::with_capacity(64);
    report("build of ReadyForQuery", 1, || {
        out.clear();
        backend::build::ready_for_query(&mut out, black_box(TransactionStatus::Idle));
        out.len()
    });
}

/// Runs `work`, which handles `messages` messages.
fn report(what: &str, messages: u32, mut work: impl FnMut() -> usize) {
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        for _ in 0..PASSES {
            black_box(work());
        }
        best = best.min(start.elapsed().as_nanos() as f64 / f64::from(PASSES) / f64::from(messages));
    }
    println!("{best:8.2} ns per message  {what}");
}

fn frame(stream: &[u8], chunk_len: usize) -> usize {
    let mut framer = Framer::new(MAX_MESSAGE_LEN);
    let mut ends = 0;
    for mut chunk in black_box(stream).chunks(chunk_len) {
        while let Ok(Some(piece)) = framer.next(&mut chunk) {
            ends += usize::from(matches!(piece, Piece::End(_)));
        }
    }
    ends
}

fn decode(mut stream: &[u8]) -> usize {
    let mut bytes = 0;
    while let Ok(Some(header)) = Header::parse(stream) {
        let (message, rest) = stream.split_at(header.total());
        if let (tag::backend::DATA_ROW, Ok(row)) = (header.tag, backend::DataRow::decode(&message[5..])) {
            bytes += row.columns.flatten().map(<[u8]>::len).sum::<usize>();
        }
        stream = rest;
    }
    bytes
}

fn select_1() -> Vec<u8> {
    let mut out = Vec::new();
    backend::build::row_description(&mut out, [FieldDescription::new(b"?column?", 23, 4)]);
    backend::build::data_row(&mut out, [Some("1")]);
    backend::build::command_complete(&mut out, "SELECT 1");
    backend::build::ready_for_query(&mut out, TransactionStatus::Idle);
    out
}

fn prepared() -> Vec<u8> {
    let mut out = Vec::new();
    frontend::build::bind(&mut out, b"", b"P_0", [], [Some(&b"4711"[..])], [1]);
    frontend::build::describe(&mut out, frontend::Target::Portal, b"");
    frontend::build::execute(&mut out, b"", 0);
    frontend::build::sync(&mut out);
    out
}

fn rows() -> Vec<u8> {
    let mut out = Vec::new();
    for _ in 0..100 {
        backend::build::data_row(&mut out, [Some("4711"), Some("some text of a common length")]);
    }
    out
}
