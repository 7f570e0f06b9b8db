// SPDX-License-Identifier: Apache-2.0
//! Where threads are when a slice begins.
//!
//! The scheduler wakes a thread where it last ran, so what was held and goes on stands where it stood: a load that once found
//! itself on its server's CPU kept a threefold speed over many turns and starts, which no number of them averages. So the
//! place of each thread is drawn at random, and after a moment all is left to the scheduler again.

use std::fs;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use rand::seq::IndexedRandom;

/// Threads that are each held on one CPU until the value goes.
#[derive(Debug)]
pub struct Placement(Vec<(Pid, CpuSet)>);

impl Placement {
    /// Puts each thread of these processes on one of the CPUs that it may use.
    #[must_use]
    pub fn draw(processes: impl IntoIterator<Item = u32>) -> Self {
        let mut rng = rand::rng();
        let mut placed = Vec::new();
        for thread in processes.into_iter().flat_map(threads) {
            // A thread may end at any moment; then there is nothing to place.
            let Ok(before) = sched_getaffinity(thread) else { continue };
            let cpus: Vec<usize> =
                (0..CpuSet::count()).filter(|cpu| before.is_set(*cpu).unwrap_or(false)).collect();
            let Some(&cpu) = cpus.choose(&mut rng) else { continue };
            let mut one = CpuSet::new();
            if one.set(cpu).is_ok() && sched_setaffinity(thread, &one).is_ok() {
                placed.push((thread, before));
            }
        }
        Self(placed)
    }
}

impl Drop for Placement {
    fn drop(&mut self) {
        for (thread, before) in &self.0 {
            // One that has ended needs nothing.
            let _ = sched_setaffinity(*thread, before);
        }
    }
}

fn threads(process: u32) -> Vec<Pid> {
    let Ok(entries) = fs::read_dir(format!("/proc/{process}/task")) else { return Vec::new() };
    let names = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    names.map(Pid::from_raw).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_placed_and_free_again() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let count = || {
            let set = sched_getaffinity(Pid::from_raw(child.id() as i32)).unwrap();
            (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap()).count()
        };
        let before = count();
        let placement = Placement::draw([child.id()]);
        assert_eq!(count(), 1);
        drop(placement);
        assert_eq!(count(), before);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
