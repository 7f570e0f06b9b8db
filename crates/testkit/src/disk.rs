// SPDX-License-Identifier: Apache-2.0
//! A disk that is soon full (root only).

use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::{Error, Result};

/// What `mount` says where the process lacks the privilege.
const REFUSALS: [&str; 2] = ["must be superuser", "permission denied"];

/// A file system in memory, unmounted when dropped.
#[derive(Debug)]
pub struct SmallDisk(TempDir);

impl SmallDisk {
    /// Mounts one of this size for a user. `None`, with a line that says so, where the process may not mount: a test is skipped then.
    ///
    /// # Errors
    /// Another reason why it cannot be mounted.
    pub fn mount(kib: u32, owner: u32) -> Result<Option<Self>> {
        let directory = TempDir::new().map_err(Error::io("make a directory to mount on"))?;
        let mut mount = Command::new("mount");
        let options = format!("size={kib}k,mode=0700,uid={owner}");
        mount.args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(directory.path());
        let output = mount.output().map_err(Error::io("run mount"))?;
        if output.status.success() {
            return Ok(Some(Self(directory)));
        }
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        if REFUSALS.iter().any(|refusal| log.contains(refusal)) {
            println!("skipped: {}", log.trim());
            return Ok(None);
        }
        Err(Error::Exited { program: "mount".into(), status: output.status.to_string(), log })
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: a server may still have files open there.
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}
