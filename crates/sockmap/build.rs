// SPDX-License-Identifier: Apache-2.0
//! Compiles the programs and writes the Rust names of reasons and counters from their one table.

use std::fs;
use std::path::{Path, PathBuf};

const HEADERS: [&str; 13] = [
    "bits.bpf.h",
    "direct.bpf.h",
    "gauges.bpf.h",
    "lanes.h",
    "lanes.bpf.h",
    "idle.bpf.h",
    "queue.bpf.h",
    "request.bpf.h",
    "request_scan.bpf.h",
    "response.bpf.h",
    "response_scan.bpf.h",
    "tap.h",
    "tap.bpf.h",
];

fn main() {
    if let Err(error) = run() {
        eprintln!("{error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let source = Path::new("src/bpf");
    let mut program = underpass_bpf_build::Program::new(source.join("lanes.bpf.c"));
    for header in HEADERS {
        program = program.depends(source.join(header));
    }
    program.build("lanes.skel.rs")?;
    underpass_bpf_build::Program::new(source.join("forward.bpf.c")).build("forward.skel.rs")?;
    underpass_bpf_build::Program::new(source.join("kept.bpf.c"))
        .depends(source.join("bits.bpf.h"))
        .build("kept.skel.rs")?;
    underpass_bpf_build::Program::new(source.join("holders.bpf.c"))
        .depends(source.join("holders.h"))
        .build("holders.skel.rs")?;

    let header = source.join("lanes.h");
    let reasons = underpass_bpf_build::read_table(&header, "LANE_REASONS")?;
    let counters = underpass_bpf_build::read_table(&header, "LANE_COUNTERS")?;
    let mut names = underpass_bpf_build::write_table(
        &reasons,
        "Reason",
        "Why a direction went to user space, or a release did not happen. From `LANE_REASONS` in `lanes.h`.",
    );
    names.push_str(&underpass_bpf_build::write_table(
        &counters,
        "Counter",
        "What the programs count beside reasons. From `LANE_COUNTERS` in `lanes.h`.",
    ));
    let out = PathBuf::from(std::env::var("OUT_DIR")?).join("names.rs");
    fs::write(out, names)?;
    Ok(())
}
