// SPDX-License-Identifier: Apache-2.0
//! Data directories of servers, made once and copied: `initdb` takes most of a second of a processor, a copy a fraction of it, and the
//! tests start some hundred servers. The first is kept beside the test programs, under the build directory, for the runs to come.

use std::collections::hash_map::DefaultHasher;
use std::env;
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::process::{service_directory, service_user};
use crate::{Error, Result};

/// Makes `data` a copy of what `make` makes in the directories that it is given: the one to work in, and the data directory in it.
/// `program` is what `make` runs, and `arguments` how: another version of it, another user, or other arguments have a copy of their own.
///
/// # Errors
/// Those of `make`, or the copy fails.
pub(crate) fn copy(
    program: &Path,
    arguments: &[&str],
    data: &Path,
    make: impl FnOnce(&Path, &Path) -> Result<()>,
) -> Result<()> {
    let Some(kept) = place(program, arguments) else {
        let directory = data.parent().unwrap_or(data);
        return make(directory, data);
    };
    if !kept.exists() {
        let directory = service_directory()?;
        let made = directory.path().join("data");
        make(directory.path(), &made)?;
        // In a directory of its own beside it, so that it is there whole or not at all; who comes second throws away their own.
        let own =
            tempfile::tempdir_in(kept.parent().unwrap_or(&kept)).map_err(Error::io("temporary directory"))?;
        let whole = own.path().join("data");
        copy_tree(&made, &whole)?;
        let _ = fs::rename(&whole, &kept);
    }
    copy_tree(&kept, data)
}

/// Where the directory is kept; `None` if nothing can be kept, as on a file system that is read only.
fn place(program: &Path, arguments: &[&str]) -> Option<PathBuf> {
    let file = fs::metadata(program).ok()?;
    let mut hasher = DefaultHasher::new();
    (program, file.len(), file.modified().ok()?, arguments).hash(&mut hasher);
    service_user().map(|user| user.uid.as_raw()).hash(&mut hasher);
    let directory = env::current_exe().ok()?.parent()?.join("servers");
    fs::create_dir_all(&directory).ok()?;
    nix::unistd::access(&directory, nix::unistd::AccessFlags::W_OK).ok()?;
    let name = program.file_name()?.to_string_lossy();
    Some(directory.join(format!("{name}-{:016x}", hasher.finish())))
}

/// With owners, permissions and holes as they are.
fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    let output =
        Command::new("cp").arg("-a").arg("--").arg(from).arg(to).output().map_err(Error::io("run cp"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(Error::Exited {
        program: "cp".into(),
        status: output.status.to_string(),
        log: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}
