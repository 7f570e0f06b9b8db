// SPDX-License-Identifier: Apache-2.0
//! Compiles the lane programs' C for the target `framing_c`, with the sanitizers and the coverage that the rest of it has.

use std::env;
use std::path::Path;
use std::process::Command;

fn main() {
    let framing = Path::new("../crates/sockmap/tests/framing");
    let [programs, shared] = ["../crates/sockmap/src/bpf", "../crates/bpf-build/include"].map(Path::new);
    for path in [framing, programs, shared] {
        println!("cargo:rerun-if-changed={}", path.display());
    }
    let sources = ["case.c", "frames.c", "lanes.c"].map(|name| framing.join(name));
    let mut build = cc::Build::new();
    build
        .files(sources)
        .include(framing.join("native"))
        .include(shared)
        .opt_level(1)
        .debug(true)
        .flag("-Wno-unused-parameter")
        // Its own link line would go to every target.
        .cargo_metadata(false);
    let flags = env::var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default();
    // clang counts branches in libFuzzer's way; without it the target runs and sees only what the model's side does.
    match ["clang-19", "clang-14", "clang"].into_iter().find(|name| runs(name)) {
        Some(clang) if flags.contains("sancov") => {
            build.compiler(clang).flag("-fsanitize=fuzzer-no-link");
            build.flag("-fsanitize=undefined").flag("-fsanitize-trap=undefined");
        }
        _ => {
            build.flag("-fsanitize=undefined").flag("-fsanitize-undefined-trap-on-error");
        }
    }
    if flags.contains("sanitizer=address") {
        build.flag("-fsanitize=address");
    }
    build.compile("framing");
    println!("cargo:rustc-link-search=native={}", env::var("OUT_DIR").expect("set by cargo"));
}

fn runs(compiler: &str) -> bool {
    Command::new(compiler).arg("--version").output().is_ok_and(|output| output.status.success())
}
