// SPDX-License-Identifier: Apache-2.0
//! `wire.bpf.h`, compiled natively with sanitizers, against a reference framer and the codec of `underpass-wire`: random and
//! hostile streams and the fuzzers' corpora, every split into two, every byte alone, random splits.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use underpass_wire::{Framer, Piece};

const LENGTH_MAX: u32 = 1 << 30;

/// The specification: frames a whole stream at once, in the harness' words.
fn reference(stream: &[u8]) -> String {
    let mut out = String::new();
    let mut at = 0;
    loop {
        let rest = &stream[at..];
        let unit = if rest.first() == Some(&b'Z') { 6 } else { 5 };
        if rest.len() < unit {
            let _ = writeln!(out, "end 0 {}", rest.len());
            return out;
        }
        let length = u32::from_be_bytes([rest[1], rest[2], rest[3], rest[4]]);
        if !(4..=LENGTH_MAX).contains(&length) || unit == 6 && length != 5 {
            out.push_str("bad\n");
            return out;
        }
        let (body, status) = if unit == 6 { (0, rest[5]) } else { (length - 4, 0) };
        let _ = writeln!(out, "{} {body} {status}", rest[0]);
        let have = rest.len() - unit;
        if have < body as usize {
            let _ = writeln!(out, "end {} 0", body as usize - have);
            return out;
        }
        at += unit + body as usize;
    }
}

/// What the codec of user space makes of a whole stream, in the same words. It yields a header by itself, where the programs
/// take ReadyForQuery, whose length is always 5, together with its status.
fn codec(stream: &[u8]) -> String {
    let (mut framer, mut rest, mut out) = (Framer::new(LENGTH_MAX), stream, String::new());
    let mut is_ready = false;
    loop {
        let message = rest;
        match framer.next(&mut rest) {
            Ok(Some(Piece::Header(h))) => {
                is_ready = h.tag == b'Z';
                if is_ready && rest.is_empty() {
                    break out.push_str("end 0 5\n");
                }
                if is_ready && h.len != 5 {
                    break out.push_str("bad\n");
                }
                if !is_ready {
                    let _ = writeln!(out, "{} {} 0", h.tag, h.body_len());
                }
            }
            Ok(Some(Piece::Body(body))) => {
                if is_ready {
                    let _ = writeln!(out, "{} 0 {}", b'Z', body[0]);
                }
            }
            Ok(Some(Piece::End(_))) => {}
            Ok(None) => {
                let _ = writeln!(out, "end {} {}", framer.need(), framer.pending_header().len());
                break;
            }
            // The programs judge a ReadyForQuery when its status is there.
            Err(_) if message[0] == b'Z' && message.len() == 5 => break out.push_str("end 0 5\n"),
            Err(_) => break out.push_str("bad\n"),
        }
    }
    out
}

/// The inputs of the codec's fuzzers, failures of old among them.
fn corpora() -> Vec<Vec<u8>> {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/");
    ["wire_frames", "wire_backend", "wire_frontend"]
        .into_iter()
        .flat_map(|name| std::fs::read_dir(format!("{corpus}{name}")).unwrap())
        .map(|entry| std::fs::read(entry.unwrap().path()).unwrap())
        .collect()
}

fn stream(random: &mut StdRng) -> Vec<u8> {
    let mut out = Vec::new();
    for _ in 0..random.random_range(0..12) {
        match random.random_range(0..20) {
            0..5 => out.extend([b'Z', 0, 0, 0, 5, b"ITE"[random.random_range(0..3)]]),
            5 => out.extend((0..random.random_range(0..12)).map(|_| random.random::<u8>())),
            6 => {
                let length = [0, 3, 4, 5, LENGTH_MAX, LENGTH_MAX + 1, u32::MAX][random.random_range(0..7)];
                out.push(b"ZDQ"[random.random_range(0..3)]);
                out.extend(length.to_be_bytes());
            }
            _ => {
                let body = random.random_range(0..30u32);
                out.push(random.random_range(b'A'..=b'Y'));
                out.extend((body + 4).to_be_bytes());
                out.extend((0..body).map(|_| random.random::<u8>()));
            }
        }
    }
    let keep = if random.random_ratio(1, 3) { random.random_range(0..=out.len()) } else { out.len() };
    out.truncate(keep);
    out
}

fn case(input: &mut Vec<u8>, chunks: &[&[u8]]) {
    input.extend((chunks.len() as u32).to_le_bytes());
    for chunk in chunks {
        input.extend((chunk.len() as u32).to_le_bytes());
        input.extend(*chunk);
    }
}

#[test]
fn every_split_of_a_stream_gives_the_same_messages() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("harness");
    // Debian's clang packages leave the sanitizers' runtime out; gcc has it.
    let output = Command::new("cc")
        .args([
            "-O1",
            "-g",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover=all",
        ])
        .arg("-I")
        .arg(underpass_bpf_build::include_dir())
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/framing/harness.c"))
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let mut random = StdRng::seed_from_u64(3);
    let (mut input, mut expected, mut cases) = (Vec::new(), String::new(), 0);
    let mut streams = corpora();
    assert!(streams.len() > 30, "the corpora are there");
    streams.extend((0..1500).map(|_| stream(&mut random)));
    for bytes in streams {
        let want = reference(&bytes);
        assert_eq!(codec(&bytes), want, "{bytes:?}");
        let ones: Vec<&[u8]> = bytes.chunks(1).collect();
        case(&mut input, &ones);
        // Of a long one some: the harness gets the whole stream each time.
        let cuts: Vec<usize> = if bytes.len() <= 2048 {
            (0..=bytes.len()).collect()
        } else {
            (0..200).map(|_| random.random_range(0..=bytes.len())).collect()
        };
        for &cut in &cuts {
            case(&mut input, &[&bytes[..cut], &bytes[cut..]]);
        }
        let mut rest: &[u8] = &bytes;
        let mut pieces = Vec::new();
        while !rest.is_empty() {
            let (piece, tail) = rest.split_at(random.random_range(1..=rest.len().min(9)));
            pieces.push(piece);
            rest = tail;
        }
        case(&mut input, &pieces);
        cases += cuts.len() + 2;
        for _ in 0..cuts.len() + 2 {
            expected.push_str(&want);
        }
    }

    let mut child = Command::new(&program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap().unwrap();
    assert!(output.status.success(), "the harness or a sanitizer failed");
    let got = String::from_utf8(output.stdout).unwrap();
    for (number, (got, want)) in got.lines().zip(expected.lines()).enumerate() {
        assert_eq!(got, want, "line {number}");
    }
    assert_eq!(got.lines().count(), expected.lines().count());
    println!("{cases} splits agree");
}
