// SPDX-License-Identifier: Apache-2.0
//! The programs' C, compiled natively with sanitizers, against the codec of `underpass-wire`.
//!
//! `wire.bpf.h` alone, against a reference framer too: random and hostile streams and the fuzzers' corpora, every split into two, every byte
//! alone, random splits. And the programs of lane D whole, in a process that plays the kernel: conversations, in pieces, of which a model
//! says what is forwarded, what that does to the link, and what goes up to user space for which reason. The fuzz target `framing_c` does the same with
//! any bytes; its corpus is replayed here.

use std::io::{BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng, SeedableRng};
use tempfile::TempDir;
use underpass_wire::frontend::build as request;
use underpass_wire::tag::{backend, frontend};

#[path = "framing/model.rs"]
mod model;

use model::{Case, LENGTH_MAX, kind, what};

const HERE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/framing");

/// The programs' C as a program that reads cases.
struct Harness {
    _directory: TempDir,
    program: PathBuf,
}

impl Harness {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("harness");
        // Debian's clang packages leave the sanitizers' runtime out; gcc has it.
        let output = Command::new("cc")
            .args(["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"])
            .args(["-fsanitize=address,undefined", "-fno-sanitize-recover=all"])
            .arg(format!("-I{HERE}/native"))
            .arg("-I")
            .arg(underpass_bpf_build::include_dir())
            .args(["harness.c", "case.c", "frames.c", "lanes.c"].map(|name| format!("{HERE}/{name}")))
            .arg("-o")
            .arg(&program)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Self { _directory: directory, program }
    }

    /// Runs the cases and compares what is said of each.
    fn compare(&self, cases: &[Case]) {
        let mut input = Vec::new();
        for case in cases {
            let case = case.encode();
            input.extend((case.len() as u32).to_le_bytes());
            input.extend(case);
        }
        let mut child =
            Command::new(&self.program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let writer = std::thread::spawn(move || stdin.write_all(&input));
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        for (number, case) in cases.iter().enumerate() {
            let shown = || format!("case {number}: {:.3000}", format!("{case:?}"));
            let mut size = [0; 4];
            stdout.read_exact(&mut size).unwrap_or_else(|_| panic!("a sanitizer or a check: {}", shown()));
            let mut text = vec![0; u32::from_le_bytes(size) as usize];
            stdout.read_exact(&mut text).unwrap();
            assert_eq!(String::from_utf8(text).unwrap(), case.expected(), "{}", shown());
        }
        writer.join().unwrap().unwrap();
        assert!(child.wait().unwrap().success(), "the harness or a sanitizer failed");
        println!("{} cases agree", cases.len());
    }
}

/// Inputs of fuzzers, failures of old among them.
fn corpora(names: &[&str]) -> Vec<Vec<u8>> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus");
    names
        .iter()
        .flat_map(|name| std::fs::read_dir(corpus.join(name)).unwrap())
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

fn pieces<'a>(random: &mut StdRng, mut rest: &'a [u8], size_max: usize) -> Vec<&'a [u8]> {
    let mut pieces = Vec::new();
    while !rest.is_empty() {
        let (piece, tail) = rest.split_at(random.random_range(1..=rest.len().min(size_max)));
        pieces.push(piece);
        rest = tail;
    }
    pieces
}

#[test]
fn every_split_of_a_stream_gives_the_same_messages() {
    let mut random = StdRng::seed_from_u64(3);
    let mut streams = corpora(&["wire_frames", "wire_backend", "wire_frontend"]);
    assert!(streams.len() > 30, "the corpora are there");
    streams.extend((0..1500).map(|_| stream(&mut random)));
    let harness = Harness::new();
    for streams in streams.chunks(200) {
        let mut cases = Vec::new();
        for bytes in streams {
            cases.push(Case::stream(&bytes.chunks(1).collect::<Vec<_>>()));
            // Of a long one some: the harness gets the whole stream each time.
            let cuts: Vec<usize> = if bytes.len() <= 2048 {
                (0..=bytes.len()).collect()
            } else {
                (0..200).map(|_| random.random_range(0..=bytes.len())).collect()
            };
            cases.extend(cuts.into_iter().map(|cut| Case::stream(&[&bytes[..cut], &bytes[cut..]])));
            cases.push(Case::stream(&pieces(&mut random, bytes, 9)));
        }
        harness.compare(&cases);
    }
}

/// One request, mostly of those that a lane carries.
fn ask(random: &mut StdRng, out: &mut Vec<u8>) {
    const NAMES: [&[u8]; 7] = [b"", b"", b"s", b"s12", b"s1234", b"s1", b"other"];
    let long = [b's'; 70];
    let name = match random.random_range(0..40) {
        0 => &long[..random.random_range(60..70)],
        _ => NAMES.choose(random).unwrap(),
    };
    match random.random_range(0..24) {
        0..6 => request::query(out, b"select 1"),
        6 | 7 => request::sync(out),
        8..11 => {
            request::parse(out, b"", b"select 2", []);
            request::bind(out, b"", b"", [], [], []);
            request::execute(out, b"", 0);
            request::sync(out);
        }
        11..15 => {
            request::bind(out, b"", name, [], [], []);
            request::execute(out, b"", 0);
            request::sync(out);
        }
        15 => request::describe(out, underpass_wire::frontend::Target::Statement, name),
        16 => request::close(out, underpass_wire::frontend::Target::Portal, name),
        17 => request::parse(out, name, b"select 3", []),
        18..20 => request::copy_data(out, b"1\t2\n"),
        20 => request::copy_done(out),
        21 => request::flush(out),
        22 => message(out, *frontend::ALL.choose(random).unwrap(), random.random_range(0..40)),
        _ => message(out, random.random(), [0, 1, 1, 9, 9996, 9997][random.random_range(0..6)]),
    }
}

/// One response, mostly of those that a lane carries.
fn answer(random: &mut StdRng, out: &mut Vec<u8>) {
    use underpass_wire::backend::build;
    match random.random_range(0..24) {
        0..12 => {
            let status = *b"IIIIIIIITTE\0".choose(random).unwrap();
            out.extend([b'Z', 0, 0, 0, 5, status]);
        }
        12..15 => build::data_row(out, [Some(&b"1"[..]), None]),
        15..18 => {
            let tags = [
                "SELECT 1",
                "DISCARD ALL",
                "DEALLOCATE ALL",
                "DEALLOCATE",
                "DELETE 1234",
                "DELETE 12345678",
                "DISCARD TEMP",
            ];
            build::command_complete(out, tags.choose(random).unwrap());
        }
        18 => out.extend(b"E\0\0\0\x06M\0"),
        19 => out.extend(b"G\0\0\0\x07\0\0\0"),
        20 | 21 => build::bind_complete(out),
        22 => message(out, *backend::ALL.choose(random).unwrap(), random.random_range(0..40)),
        _ => message(out, random.random(), random.random_range(0..9)),
    }
}

fn message(out: &mut Vec<u8>, tag: u8, body: u32) {
    out.push(tag);
    out.extend((body + 4).to_be_bytes());
    out.extend((0..body).map(|n| n as u8));
}

fn conversation(random: &mut StdRng) -> Case {
    let pinned = if random.random_ratio(1, 3) { kind::PINNED } else { 0 };
    let mut case = Case { kind: kind::LANE | pinned, pieces: Vec::new() };
    for _ in 0..random.random_range(1..8) {
        let (server, mut out) = (random.random_ratio(3, 5), Vec::new());
        for _ in 0..random.random_range(1..4) {
            if server { answer(random, &mut out) } else { ask(random, &mut out) }
        }
        let who = if server { what::SERVER } else { 0 };
        let also = match random.random_range(0..60) {
            0 => what::RETIRE,
            1 => what::HOLD,
            _ => 0,
        };
        let size_max = if random.random_ratio(1, 3) { 20 } else { out.len().max(1) };
        let parts = if random.random_ratio(2, 3) { vec![&out[..]] } else { pieces(random, &out, size_max) };
        case.pieces.extend(parts.into_iter().map(|part| (who | also, part.to_vec())));
    }
    case
}

#[test]
fn lanes_carry_what_the_codec_says() {
    let mut random = StdRng::seed_from_u64(5);
    let mut cases = Vec::new();
    let seeds = corpora(&["framing_c"]);
    assert!(seeds.len() > 20, "the corpus is there");
    for mut seed in seeds {
        cases.extend(Case::from_input(&seed));
        for at in 0..seed.len().min(300) {
            cases.extend(Case::from_input(&seed[..at]));
            let byte = seed[at];
            for other in [0, 1, 4, 0xff, byte.wrapping_add(1), byte ^ 0x20] {
                seed[at] = other;
                cases.extend(Case::from_input(&seed));
            }
            seed[at] = byte;
        }
    }
    cases.extend((0..60_000).map(|_| conversation(&mut random)));
    // At the limits of a chunk and of a cycle.
    for syncs in [4096, 4097, 16_383, 16_384] {
        let (mut many, mut ready) = (Vec::new(), Vec::new());
        (0..syncs).for_each(|_| request::sync(&mut many));
        (0..syncs).for_each(|_| ready.extend(b"Z\0\0\0\x05I"));
        let mut one = Vec::new();
        request::query(&mut one, b"begin");
        let pieces = vec![(0, many.clone()), (what::SERVER, ready.clone()), (0, one.clone())];
        cases.push(Case { kind: kind::LANE, pieces });
        let pieces = vec![(0, one.clone()), (0, many), (what::SERVER, ready)];
        cases.push(Case { kind: kind::LANE, pieces });
    }
    // A statement's name in the last bytes of a send.
    for size in 65_380..65_530 {
        let mut out = Vec::new();
        request::query(&mut out, &vec![b'-'; size - 6 - 13 - 10 - 5]);
        request::bind(&mut out, b"", b"s", [], [], []);
        request::execute(&mut out, b"", 0);
        request::sync(&mut out);
        cases.push(Case { kind: kind::LANE, pieces: vec![(0, out)] });
    }
    for size in [65_000, 65_537] {
        let mut begin = Vec::new();
        request::query(&mut begin, &vec![b'-'; 300_000]);
        let pieces = begin.chunks(size).map(|chunk| (0, chunk.to_vec())).collect();
        cases.push(Case { kind: kind::LANE, pieces });
    }

    let text: String = cases.iter().map(Case::expected).collect();
    for reason in REASONS {
        assert!(text.contains(&format!(" {reason}\n")), "no case ends as {reason}");
    }
    for count in ["pending 2", "xacts 1", "xacts 2"] {
        assert!(text.contains(count), "no case has {count}");
    }
    Harness::new().compare(&cases);
}

/// The reasons that come from what was said, and not from the state of sockets.
const REASONS: [&str; 25] = [
    "type",
    "length",
    "split",
    "batch",
    "messages",
    "depth",
    "named_statement",
    "unprepared",
    "statements",
    "error",
    "named_portal",
    "unnamed_bind",
    "unnamed_parse",
    "terminate",
    "copy_stray",
    "copy_pipeline",
    "copy_end",
    "idle_link",
    "request_budget",
    "no_client",
    "after_rfq",
    "rfq_unexpected",
    "dirty",
    "retire",
    "held",
];
