// SPDX-License-Identifier: Apache-2.0
//! Finds the ECharts script that the `charming` crate ships, so that the report can carry it inside.
//!
//! The report must open without a network. The script is a megabyte and versioned by Cargo.lock already;
//! taking it from the dependency's own sources keeps a copy out of this repository.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let target = env::var("TARGET").expect("cargo sets TARGET");
    let manifest = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("Cargo.toml");
    let metadata = Command::new(env::var("CARGO").expect("cargo sets CARGO"))
        .args(["metadata", "--format-version", "1", "--offline", "--filter-platform", &target])
        .arg("--manifest-path")
        .arg(manifest)
        .output()
        .expect("cargo metadata runs");
    assert!(metadata.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&metadata.stderr));
    let metadata: serde_json::Value =
        serde_json::from_slice(&metadata.stdout).expect("cargo metadata is JSON");
    let charming = metadata["packages"]
        .as_array()
        .and_then(|packages| packages.iter().find(|package| package["name"] == "charming"))
        .and_then(|package| package["manifest_path"].as_str())
        .expect("charming is a dependency");
    let script = script_in(&Path::new(charming).with_file_name("src").join("asset"))
        .expect("charming ships echarts-*.min.js; if it no longer does, add the script to bench/templates");
    let out = Path::new(&env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("echarts.min.js");
    fs::copy(script, out).expect("the script can be copied");
}

fn script_in(folder: &Path) -> Option<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(folder)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("echarts-") && name.ends_with(".min.js")
        })
        .collect();
    found.sort();
    found.pop()
}
