// SPDX-License-Identifier: Apache-2.0
//! Build dependency of the kernel edges: finds clang, compiles a `.bpf.c`, writes its skeleton.
//!
//! Invariants: the shared headers of `include/` are on the include path of every program; a warning of clang is
//! an error, because a warning in a BPF program is a bug that the verifier reports much less readably; and a
//! build script reruns when any of its inputs changes.
//!
//! ```no_run
//! // build.rs
//! underpass_bpf_build::Program::new("src/bpf/lanes.bpf.c").depends("src/bpf/lanes.h").build("lanes.skel.rs").unwrap();
//! ```

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

mod table;
pub use table::{Entry, read_table, write_table};

/// Oldest clang whose BPF back end emits the atomics (`-mcpu=v3`) and BTF that the programs use.
pub const CLANG_VERSION_MIN: u32 = 14;

/// What went wrong while building a BPF program.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No usable compiler; the text names what was tried.
    #[error(
        "no clang with a BPF back end, version {CLANG_VERSION_MIN} or newer; tried {tried}. \
         Install one (Debian: apt-get install clang-19 or clang-14) or set CLANG=/path/to/clang"
    )]
    NoClang {
        /// The commands that were tried, separated by commas.
        tried: String,
    },
    /// A build script variable that cargo sets is missing: not called from a build script.
    #[error("{0} is not set: call this from a build script")]
    NotABuildScript(&'static str),
    /// clang or the skeleton generator failed; the text is its output.
    #[error("{path}: {message}")]
    Compile {
        /// The `.bpf.c` file.
        path: PathBuf,
        /// Output of the compiler.
        message: String,
    },
    /// A file could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A table of names in a header is malformed.
    #[error("{path}: no entries `X(NAME, \"name\", \"meaning\")` in the macro {name}")]
    Table {
        /// The header.
        path: PathBuf,
        /// The macro that should hold the table.
        name: String,
    },
}

/// The folder of BPF headers that programs of several crates share (`wire.bpf.h`, `compat.bpf.h`).
pub fn include_dir() -> PathBuf {
    // Of the crate that is being built, not of this one as it was compiled: checkouts may share a target directory.
    let caller = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&caller).join("../bpf-build/include")
}

/// The compiler: `$CLANG`, then clang-19, clang-14 and clang, the first that is new enough and targets BPF.
///
/// # Errors
/// [`Error::NoClang`] when none is.
pub fn clang() -> Result<PathBuf, Error> {
    println!("cargo:rerun-if-env-changed=CLANG");
    let wanted: Vec<OsString> = match env::var_os("CLANG") {
        Some(path) => vec![path],
        None => ["clang-19", "clang-14", "clang"].iter().map(OsString::from).collect(),
    };
    for candidate in &wanted {
        if clang_version(candidate).is_some_and(|version| version >= CLANG_VERSION_MIN) {
            return Ok(PathBuf::from(candidate));
        }
    }
    let tried = wanted.iter().map(|c| c.to_string_lossy().into_owned()).collect::<Vec<_>>().join(", ");
    Err(Error::NoClang { tried })
}

/// Major version of a clang that has the BPF target, or `None`.
fn clang_version(command: &OsString) -> Option<u32> {
    let output =
        Command::new(command).args(["--target=bpf", "-dM", "-E", "-x", "c", "/dev/null"]).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().find_map(|line| line.strip_prefix("#define __clang_major__ "))?.trim().parse().ok()
}

/// One BPF object and what it depends on.
#[derive(Debug)]
pub struct Program {
    source: PathBuf,
    depends: Vec<PathBuf>,
}

impl Program {
    /// A program by the path of its `.bpf.c`, relative to the crate that is being built.
    pub fn new(source: impl Into<PathBuf>) -> Self {
        Self { source: source.into(), depends: Vec::new() }
    }

    /// Names a further file whose change rebuilds the program.
    #[must_use]
    pub fn depends(mut self, path: impl Into<PathBuf>) -> Self {
        self.depends.push(path.into());
        self
    }

    /// Compiles the program and writes the skeleton `$OUT_DIR/<skeleton>`, whose path is returned.
    ///
    /// # Errors
    /// [`Error::NoClang`], [`Error::Compile`] with the compiler's own words, [`Error::NotABuildScript`].
    pub fn build(&self, skeleton: &str) -> Result<PathBuf, Error> {
        let out_dir = env::var_os("OUT_DIR").ok_or(Error::NotABuildScript("OUT_DIR"))?;
        let arch =
            env::var("CARGO_CFG_TARGET_ARCH").map_err(|_| Error::NotABuildScript("CARGO_CFG_TARGET_ARCH"))?;
        let include = include_dir();
        let output = PathBuf::from(out_dir).join(skeleton);
        for path in self.depends.iter().chain([&self.source, &include]) {
            println!("cargo:rerun-if-changed={}", path.display());
        }

        let mut args: Vec<OsString> =
            ["-mcpu=v3", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter", "-I"]
                .iter()
                .map(OsString::from)
                .collect();
        args.push(include.into_os_string());
        // Without a cross sysroot clang's BPF target looks for the architecture's <asm/types.h> nowhere.
        let triplet = PathBuf::from(format!("/usr/include/{arch}-linux-gnu"));
        if triplet.is_dir() {
            args.push("-idirafter".into());
            args.push(triplet.into_os_string());
        }

        libbpf_cargo::SkeletonBuilder::new()
            .source(&self.source)
            .clang(clang()?)
            .clang_args(args)
            .build_and_generate(&output)
            .map_err(|e| Error::Compile { path: self.source.clone(), message: format!("{e:?}") })?;
        Ok(output)
    }
}
