// SPDX-License-Identifier: Apache-2.0
//! A disk that is soon full (root only).

use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::{Error, Result};

/// A file system in memory, unmounted when dropped.
#[derive(Debug)]
pub struct SmallDisk(TempDir);

impl SmallDisk {
    /// Mounts one of this size.
    ///
    /// # Errors
    /// The process may not mount.
    pub fn mount(kib: u32) -> Result<Self> {
        let directory = TempDir::new().map_err(Error::io("make a directory to mount on"))?;
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &format!("size={kib}k"), "tmpfs"]).arg(directory.path());
        let output = mount.output().map_err(Error::io("run mount"))?;
        if output.status.success() {
            return Ok(Self(directory));
        }
        Err(Error::Exited {
            program: "mount".into(),
            status: output.status.to_string(),
            log: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.path()).status();
    }
}
