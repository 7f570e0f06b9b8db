// SPDX-License-Identifier: Apache-2.0
//! Rules of the source tree that no compiler checks: arrows between layers, length of files, licence, leftovers.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand};

/// ARCHITECTURE.md, "Layers": a crate may use crates of lower layers only. Crates for development stand above all others.
const LAYERS: &[(&str, u32)] = &[
    ("underpass-wire", 0),
    ("underpass-mysql", 0),
    ("underpass-config", 0),
    ("underpass-sql", 0),
    ("underpass-stats", 0),
    ("underpass-procfs", 1),
    ("underpass-auth", 1),
    ("underpass-pool", 1),
    ("underpass-console", 1),
    ("underpass-mirror", 1),
    ("underpass-tls", 1),
    ("underpass-trace", 1),
    ("underpass-charts", 1),
    ("underpass-export", 3),
    ("underpass-report", 3),
    // A tool of the build: it runs before the kernel edges are compiled and uses none of our crates.
    ("underpass-bpf-build", 1),
    ("underpass-sockmap", 2),
    ("underpass-capture", 2),
    ("underpass-pooler", 3),
    ("underpass-replay", 3),
    ("underpass-cli", 4),
    ("underpass", 4),
    ("underpass-testkit", DEVELOPMENT),
    ("underpass-soak", DEVELOPMENT),
    ("underpass-bench", DEVELOPMENT),
];
const DEVELOPMENT: u32 = 5;

/// Over this many lines a file states the reason in a comment that begins with the words `Long because`.
const LINES_MAX: usize = 1000;

/// Licences that allow a program made of them to be given away under Apache-2.0. Of `A OR B` one suffices.
const LICENCES: [&str; 7] =
    ["Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT", "Unicode-3.0", "Zlib"];

/// Extensions of the files that are written by hand and carry a licence.
const SOURCES: [&str; 8] = ["rs", "c", "h", "sh", "py", "java", "go", "js"];

fn root() -> PathBuf {
    let crate_directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_directory.ancestors().nth(2).expect("crates/testkit is two levels down").to_owned()
}

/// All files that git knows or would add, with their text; binary files are left out.
fn files() -> BTreeMap<String, String> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .expect("git");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter(|name| !name.ends_with(".lock") && !name.starts_with("fuzz/corpus/"))
        .filter_map(|name| Some((name.to_owned(), fs::read_to_string(root().join(name)).ok()?)))
        .collect()
}

fn is_source(name: &str) -> bool {
    let path = Path::new(name);
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    SOURCES.contains(&extension) || path.ends_with("Makefile") || name == ".ci/run"
}

fn metadata() -> Metadata {
    MetadataCommand::new().manifest_path(root().join("Cargo.toml")).no_deps().exec().expect("cargo metadata")
}

fn assert_none(what: &str, found: &[String]) {
    assert!(found.is_empty(), "{what}:\n  {}", found.join("\n  "));
}

#[test]
fn crates_use_only_lower_layers() {
    let layers: BTreeMap<&str, u32> = LAYERS.iter().copied().collect();
    let mut wrong = Vec::new();
    for package in &metadata().packages {
        let name = package.name.as_str();
        let Some(&layer) = layers.get(name) else {
            wrong.push(format!("{name} has no layer in tidy.rs and ARCHITECTURE.md"));
            continue;
        };
        for dependency in &package.dependencies {
            let Some(&below) = layers.get(dependency.name.as_str()) else { continue };
            let development = dependency.kind == DependencyKind::Development || layer == DEVELOPMENT;
            if !development && below >= layer {
                wrong.push(format!("{name} (layer {layer}) uses {} (layer {below})", dependency.name));
            }
        }
    }
    assert_none("arrows that ARCHITECTURE.md does not allow", &wrong);
}

#[test]
fn the_layers_are_those_of_the_architecture() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    let mut wrong = Vec::new();
    for package in &metadata().packages {
        let short = package.name.trim_start_matches("underpass-");
        let named = text.lines().any(|line| line.starts_with('|') && line.contains(&format!("`{short}`")));
        if !named && package.name.as_str() != "underpass" {
            wrong.push(package.name.to_string());
        }
    }
    assert_none("crates missing in the table of ARCHITECTURE.md", &wrong);
}

#[test]
fn lints_and_versions_come_from_the_workspace() {
    let mut wrong = Vec::new();
    for package in &metadata().packages {
        let text = fs::read_to_string(&package.manifest_path).expect("manifest");
        for line in ["[lints]\nworkspace = true", "license.workspace = true", "edition.workspace = true"] {
            if !text.contains(line) {
                wrong.push(format!("{}: no `{}`", package.name, line.replace('\n', " ")));
            }
        }
        // A version is chosen once, with its reason.
        let own = text.lines().filter(|line| line.contains("version = \"") && !line.starts_with("version"));
        wrong.extend(own.map(|line| format!("{}: {line}", package.name)));
    }
    assert_none("manifests that do not inherit", &wrong);
}

#[test]
fn files_are_not_too_long() {
    let wrong: Vec<String> = files()
        .iter()
        .filter(|(name, text)| is_source(name) && !text.contains("Long because"))
        .map(|(name, text)| (name, text.lines().count()))
        .filter(|(_, lines)| *lines > LINES_MAX)
        .map(|(name, lines)| format!("{name}: {lines} lines"))
        .collect();
    assert_none("files over 1000 lines without a reason", &wrong);
}

#[test]
fn every_source_names_its_licence() {
    let mut wrong = Vec::new();
    for (name, text) in files().iter().filter(|(name, _)| is_source(name)) {
        let head: String = text.lines().take(4).collect::<Vec<_>>().join("\n");
        let bpf = name.ends_with(".bpf.c") || name.ends_with(".bpf.h");
        let wanted = if bpf { "(GPL-2.0-only OR BSD-2-Clause)" } else { "" };
        if !head.contains("SPDX-License-Identifier: ") || !head.contains(wanted) {
            wrong.push(name.clone());
        }
    }
    assert_none("files without the right SPDX-License-Identifier in the first lines", &wrong);
}

#[test]
fn nothing_is_left_unfinished() {
    // Put together here, so that this file does not find itself.
    let marks = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X")];
    let code = [concat!("to", "do!("), concat!("unimple", "mented!("), concat!("#[ig", "nore")];
    let mut wrong = Vec::new();
    for (name, text) in files().iter().filter(|(name, _)| is_source(name) || name.ends_with(".md")) {
        for (number, line) in text.lines().enumerate() {
            let mut words = line.split(|c: char| !c.is_ascii_alphanumeric());
            if words.any(|word| marks.contains(&word)) || code.iter().any(|call| line.contains(call)) {
                wrong.push(format!("{name}:{}: {}", number + 1, line.trim()));
            }
        }
    }
    assert_none("unfinished work", &wrong);
}

#[test]
fn no_machine_is_named() {
    // Home directories and work trees of whoever wrote a line. Temporary files are everybody's.
    let homes = [concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/wo", "rk/")];
    let mut wrong = Vec::new();
    for (name, text) in files() {
        for (number, line) in text.lines().enumerate() {
            let at = homes.iter().find_map(|home| line.find(home));
            // In the middle of a longer path, or of an address, it names nothing of ours.
            let alone = at.is_some_and(|at| {
                !line[..at].ends_with(|c: char| c.is_alphanumeric() || ".$}-_".contains(c))
            });
            if alone {
                wrong.push(format!("{name}:{}: {}", number + 1, line.trim()));
            }
        }
    }
    assert_none("paths of one machine", &wrong);
}

/// Words in back quotes.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

#[test]
fn documents_name_what_exists() {
    let makefile = fs::read_to_string(root().join("Makefile")).expect("Makefile");
    let folders = ["crates/", "tests/", "fuzz/", "scripts/", "docs/", "bench/", "etc/"];
    let mut wrong = Vec::new();
    for (name, text) in files().iter().filter(|(name, _)| name.ends_with(".md")) {
        let folder = root().join(name).parent().expect("a file is in a folder").to_owned();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next()) {
            if !link.is_empty() && !link.contains(':') && !folder.join(link).exists() {
                wrong.push(format!("{name}: no file {link}"));
            }
        }
        for word in quoted(text) {
            let is_path = folders.iter().any(|folder| word.starts_with(folder));
            // A command that begins with a path, or a pattern, names no file.
            if is_path && !word.contains([' ', '*', '{']) && !root().join(word).exists() {
                wrong.push(format!("{name}: no file {word}"));
            }
            let target = word.strip_prefix("make ").and_then(|rest| rest.split(' ').next());
            if target
                .is_some_and(|target| !target.contains('.') && !makefile.contains(&format!("\n{target}: ")))
            {
                wrong.push(format!("{name}: no target for {word}"));
            }
        }
    }
    assert_none("documents that name what is not there", &wrong);
}

#[test]
fn every_fuzz_target_is_built_and_has_a_corpus() {
    let manifest = fs::read_to_string(root().join("fuzz/Cargo.toml")).expect("fuzz/Cargo.toml");
    let mut wrong = Vec::new();
    for entry in fs::read_dir(root().join("fuzz/fuzz_targets")).expect("fuzz/fuzz_targets") {
        let path = entry.expect("entry").path();
        let name = path.file_stem().expect("name").to_string_lossy().into_owned();
        if !manifest.contains(&format!("path = \"fuzz_targets/{name}.rs\"")) {
            wrong.push(format!("{name}: not in fuzz/Cargo.toml"));
        }
        let inputs = fs::read_dir(root().join("fuzz/corpus").join(&name)).map_or(0, Iterator::count);
        if inputs == 0 {
            wrong.push(format!("{name}: no fuzz/corpus/{name}"));
        }
    }
    assert_none("fuzz targets that are not whole", &wrong);
}

/// Whether an SPDX expression can be met with `LICENCES`. Old manifests write `A/B` for `A OR B`.
fn is_free(expression: &str) -> bool {
    let expression = expression.replace(['(', ')'], "").replace('/', " OR ");
    let allowed = |name: &str| LICENCES.contains(&name.trim());
    // Without brackets this is stricter than SPDX: each part of an AND needs one of its alternatives.
    expression.split(" AND ").all(|part| part.split(" OR ").any(allowed))
}

#[test]
fn dependencies_are_free_and_come_from_the_registry() {
    let metadata = MetadataCommand::new()
        .manifest_path(root().join("Cargo.toml"))
        .other_options(["--locked".to_owned()])
        .exec()
        .expect("cargo metadata; if Cargo.lock is not current, build once and commit it");
    // `cargo metadata` adds what crates want on other platforms only; `cargo tree` has what is built on ours.
    let tree = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["tree", "--workspace", "--locked"])
        .args(["x86_64", "aarch64"].map(|machine| format!("--target={machine}-unknown-linux-gnu")))
        .args(["--prefix", "none", "--format", "{p}"])
        .current_dir(root())
        .output()
        .expect("cargo tree");
    assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
    let tree = String::from_utf8_lossy(&tree.stdout);
    let named = |line: &str| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
    let used: BTreeSet<String> = tree.lines().map(named).collect();
    assert!(
        used.contains(concat!("underpass-testkit v", env!("CARGO_PKG_VERSION"))),
        "cargo tree speaks otherwise"
    );
    let mut wrong = Vec::new();
    let packages = metadata.packages.iter();
    for package in packages.filter(|package| used.contains(&format!("{} v{}", package.name, package.version)))
    {
        let licence = package.license.as_deref().unwrap_or("no licence");
        if !is_free(licence) {
            wrong.push(format!("{} {}: {licence}", package.name, package.version));
        }
        if package.source.as_ref().is_some_and(|source| !source.is_crates_io()) {
            wrong.push(format!("{}: not from crates.io", package.name));
        }
    }
    assert_none("dependencies whose licence or source is not allowed", &wrong);
}
