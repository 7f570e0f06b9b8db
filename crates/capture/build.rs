// SPDX-License-Identifier: Apache-2.0
//! Compiles the capture programs.

use std::path::Path;

const HEADERS: [&str; 6] =
    ["capture.h", "capture.bpf.h", "packet.bpf.h", "call.bpf.h", "postgres.bpf.h", "vio.bpf.h"];

fn main() {
    let source = Path::new("src/bpf");
    let mut program = underpass_bpf_build::Program::new(source.join("capture.bpf.c"));
    for header in HEADERS {
        program = program.depends(source.join(header));
    }
    if let Err(error) = program.build("capture.skel.rs") {
        eprintln!("{error}");
        std::process::exit(1);
    }
}
