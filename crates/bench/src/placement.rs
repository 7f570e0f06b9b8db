// SPDX-License-Identifier: Apache-2.0
//! Where threads are when a slice begins.
//!
//! The scheduler wakes a thread where it last ran, so what was held and goes on stands where it stood: a load that once found
//! itself on its server's CPU kept a threefold speed over many turns and starts, which no number of them averages. So each
//! thread begins a slice on a CPU of our choice, and after a moment all is left to the scheduler again.
//!
//! The choice is not left to chance alone: the slices of a sample go through all places that clients, pooler and server can
//! take relative to each other, and all systems go through the same ones. What luck would add to a sample is then in every one.

use std::fs;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use rand::Rng;

/// Which place the programs take in a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    start: u32,
    slice: u32,
}

impl Pattern {
    /// The first place of a round, at random.
    #[must_use]
    pub fn draw(rng: &mut impl Rng) -> Self {
        Self { start: rng.random(), slice: 0 }
    }

    /// The place in the nth slice of the round.
    #[must_use]
    pub fn at(self, slice: u32) -> Self {
        Self { slice, ..self }
    }

    /// On which of `cpus` CPUs the clients, the pooler and the server's processes begin. Any run of `cpus` cubed slices has all.
    fn offsets(self, cpus: u32) -> [u32; 3] {
        let number = (self.start % cpus.pow(3)) + self.slice;
        [number % cpus, number / cpus % cpus, number / cpus / cpus % cpus]
    }
}

/// Threads that are each held on one CPU until the value goes.
#[derive(Debug)]
pub struct Placement(Vec<(Pid, CpuSet)>);

impl Placement {
    /// Puts each thread of `clients`, of `pooler` and of the children of `server` on one of the CPUs that it may use. Threads of
    /// one of the three are dealt out in turn.
    #[must_use]
    pub fn take(pattern: Pattern, clients: &[u32], pooler: Option<u32>, server: u32) -> Self {
        let mut placed = Vec::new();
        let of = |processes: &[u32]| processes.iter().copied().flat_map(threads).collect::<Vec<Pid>>();
        let groups = [of(clients), of(&pooler.into_iter().collect::<Vec<_>>()), of(&children(server))];
        for (group, program) in groups.iter().zip(0..) {
            for (thread, nth) in group.iter().zip(0_u32..) {
                // A thread may end at any moment; then there is nothing to place.
                let Ok(before) = sched_getaffinity(*thread) else { continue };
                let cpus: Vec<usize> =
                    (0..CpuSet::count()).filter(|cpu| before.is_set(*cpu).unwrap_or(false)).collect();
                // Beyond some CPUs a sample has too few slices for all places anyway.
                let count = (cpus.len() as u32).clamp(1, 64);
                let offset = pattern.offsets(count)[program];
                let Some(&cpu) = cpus.get((offset.wrapping_add(nth) % count) as usize) else { continue };
                let mut one = CpuSet::new();
                if one.set(cpu).is_ok() && sched_setaffinity(*thread, &one).is_ok() {
                    placed.push((*thread, before));
                }
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

/// The processes that a process with one thread has started; none where the kernel does not list them.
fn children(process: u32) -> Vec<u32> {
    let text = fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap_or_default();
    text.split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn cpus_of(process: u32) -> usize {
        let set = sched_getaffinity(Pid::from_raw(process as i32)).unwrap();
        (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap()).count()
    }

    #[test]
    fn threads_are_placed_and_free_again() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let before = cpus_of(child.id());
        let pattern = Pattern::draw(&mut rand::rng());
        let placement = Placement::take(pattern, &[child.id()], None, 0);
        assert_eq!(cpus_of(child.id()), 1);
        drop(placement);
        assert_eq!(cpus_of(child.id()), before);
        // The same as a child of a server.
        let placement = Placement::take(pattern, &[], None, std::process::id());
        let placed = placement.0.iter().any(|(pid, _)| pid.as_raw() == child.id() as i32);
        // A test's thread that is not the main one starts the program, so the kernel lists it there.
        assert!(placed || children(std::process::id()).is_empty());
        drop(placement);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn eight_slices_have_every_place_on_two_cpus_once() {
        for _ in 0..100 {
            let round = Pattern::draw(&mut rand::rng());
            let places: BTreeSet<[u32; 3]> = (0..8).map(|slice| round.at(slice).offsets(2)).collect();
            assert_eq!(places.len(), 8, "{round:?}");
        }
    }
}
