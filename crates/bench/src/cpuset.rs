// SPDX-License-Identifier: Apache-2.0
//! One CPU or two for a pooler: by a cpuset of control groups where one can be made, of either version; else its caller has to
//! take affinity, from which a program may free itself.

use std::fs;
use std::path::{Path, PathBuf};

use crate::counters::Cgroup;

/// A control group whose processes run on some CPUs only.
#[derive(Debug)]
pub struct Cpuset {
    folder: PathBuf,
    /// In version 1 it is a group of our own; in version 2 the system's group, which accounts for it, has this too.
    own: bool,
}

impl Cpuset {
    /// Makes one for `cpus`, as `taskset -c` takes them; `None` where there is no cpuset controller that we may use.
    #[must_use]
    pub fn make(name: &str, cpus: &str, accounting: Option<&Cgroup>) -> Option<Self> {
        if let Some(group) = accounting
            && fs::write(group.path().join("cpuset.cpus"), cpus).is_ok()
        {
            return Some(Self { folder: group.path().to_owned(), own: false });
        }
        let parent = version_1(&fs::read_to_string("/proc/mounts").ok()?)?;
        let folder = parent.join(format!("underpass-bench-{}-{name}", std::process::id()));
        fs::create_dir(&folder).ok()?;
        let set = Self { folder, own: true };
        // A new set has neither CPUs nor memory, and takes no process before it has both.
        let memory = fs::read_to_string(parent.join("cpuset.mems")).ok()?;
        fs::write(set.folder.join("cpuset.mems"), memory.trim()).ok()?;
        fs::write(set.folder.join("cpuset.cpus"), cpus).ok()?;
        Some(set)
    }

    /// The folder with its `cgroup.procs`.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// By what this machine keeps a pooler on its CPUs, for the result file.
    #[must_use]
    pub fn means() -> &'static str {
        let accounting = Cgroup::create("cpuset-trial");
        let made = Self::make("trial", "0", accounting.as_ref());
        if made.is_some() { "cgroup cpuset" } else { "affinity (sched_setaffinity)" }
    }
}

impl Drop for Cpuset {
    fn drop(&mut self) {
        if self.own {
            Cgroup::remove(&self.folder);
        }
    }
}

/// Where the cpuset controller of version 1 is mounted, by `/proc/mounts`.
fn version_1(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        let [_, folder, "cgroup", options, ..] = words[..] else { return None };
        options.split(',').any(|option| option == "cpuset").then(|| PathBuf::from(folder))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_of_version_1_is_found() {
        let mounts = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
                      cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n\
                      cgroup /sys/fs/cgroup/cpuset cgroup rw,relatime,cpuset 0 0\n";
        assert_eq!(version_1(mounts), Some(PathBuf::from("/sys/fs/cgroup/cpuset")));
        assert_eq!(version_1("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n"), None);
    }

    #[test]
    fn a_process_in_a_cpuset_has_its_cpus_and_no_other() {
        let accounting = Cgroup::create("cpuset-test");
        let Some(set) = Cpuset::make("test", "0", accounting.as_ref()) else {
            eprintln!("skipped: no cpuset can be made here");
            return;
        };
        let launch = crate::procs::Launch { cgroup: Some(set.path().to_owned()), ..Default::default() };
        let account = crate::procs::Account { switch_to: None, name: String::new() };
        let mut command = launch.command(&account, "grep");
        command.args(["Cpus_allowed_list", "/proc/self/status"]);
        let text = crate::procs::output(command, "grep").unwrap();
        assert_eq!(text.split_whitespace().last(), Some("0"), "{text}");
        let folder = set.path().to_owned();
        drop((set, accounting));
        assert!(!folder.exists());
    }
}
