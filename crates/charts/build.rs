// SPDX-License-Identifier: Apache-2.0
//! Finds the ECharts script that the `charming` crate ships, so that the report can carry it inside.
//!
//! The report must open without a network. The script is a megabyte and versioned by Cargo.lock already;
//! taking it from the dependency's own sources keeps a copy out of this repository.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

const LOCK: &str = "../../Cargo.lock";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={LOCK}");
    let script = in_registry()
        .or_else(|| Some(by_cargo()))
        .and_then(|sources| script_in(&sources.join("src").join("asset")))
        .expect(
            "charming ships echarts-*.min.js; if it no longer does, the script has to come from elsewhere",
        );
    let out = Path::new(&env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("echarts.min.js");
    fs::copy(script, out).expect("the script can be copied");
}

/// Where cargo unpacks what it downloads. A first build has only fetched what it needs itself, with which `cargo metadata`, which
/// wants the dependencies of the whole workspace, would fail.
fn in_registry() -> Option<PathBuf> {
    let lock = fs::read_to_string(LOCK).ok()?;
    let version = lock.split_once("name = \"charming\"\nversion = \"")?.1.split_once('"')?.0;
    let home = env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(Path::new(&env::var_os("HOME")?).join(".cargo")))?;
    let registries = fs::read_dir(home.join("registry").join("src")).ok()?;
    registries
        .filter_map(|registry| Some(registry.ok()?.path().join(format!("charming-{version}"))))
        .find(|sources| sources.is_dir())
}

/// Dependencies that are vendored or patched.
fn by_cargo() -> PathBuf {
    let target = env::var("TARGET").expect("cargo sets TARGET");
    let manifest = Path::new(&env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("Cargo.toml");
    let metadata = Command::new(env::var("CARGO").expect("cargo sets CARGO"))
        .args(["metadata", "--format-version", "1", "--offline", "--filter-platform", &target])
        .arg("--manifest-path")
        .arg(manifest)
        .output()
        .expect("cargo metadata runs");
    let error = String::from_utf8_lossy(&metadata.stderr);
    assert!(metadata.status.success(), "cargo metadata (`cargo fetch` may help): {error}");
    let metadata: serde_json::Value =
        serde_json::from_slice(&metadata.stdout).expect("cargo metadata is JSON");
    let manifest = metadata["packages"]
        .as_array()
        .and_then(|packages| packages.iter().find(|package| package["name"] == "charming"))
        .and_then(|package| package["manifest_path"].as_str())
        .expect("charming is a dependency");
    Path::new(manifest).parent().expect("a manifest is in a directory").to_owned()
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
