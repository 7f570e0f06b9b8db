// SPDX-License-Identifier: Apache-2.0
//! Reads of the kernel's CPU accounting: the whole machine and one pooler.
//!
//! Busy time of the machine is *elapsed minus idle*. The kernel measures idle time at each transition, while it
//! samples user, system and softirq once per tick: at 250 Hz and 3 s that sampling alone is worth a few percent
//! of a transaction. So the sum comes from idle, and the samples only say how to divide it. `/proc/stat` cuts idle
//! time to 10 ms, one percent of a short window; `/proc/timer_list` (root) has the same quantity in nanoseconds.

use std::collections::BTreeMap;
use std::iter::Sum;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use std::{fs, io};

/// Length of one tick of `/proc/stat` and `/proc/PID/stat` in microseconds (USER_HZ is 100 on every Linux).
const TICK_US: f64 = 10_000.0;

/// One reading of `/proc/stat`, in ticks of 10 ms summed over all CPUs, and the total of context switches.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Machine {
    user: u64,
    nice: u64,
    system: u64,
    idle: u64,
    iowait: u64,
    irq: u64,
    softirq: u64,
    steal: u64,
    context_switches: u64,
    cpus: u32,
    /// Idle and iowait of all CPUs in nanoseconds, where the kernel tells.
    idle_ns: Option<u64>,
}

impl Machine {
    /// Reads `/proc/stat`, and `/proc/timer_list` where it may.
    ///
    /// # Errors
    /// When `/proc/stat` cannot be read or has an unknown shape.
    pub fn read() -> io::Result<Self> {
        let timers = fs::read_to_string("/proc/timer_list").ok();
        let mut machine = Self::parse(&fs::read_to_string("/proc/stat")?)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "/proc/stat: unknown format"))?;
        machine.idle_ns = timers.and_then(|text| idle_ns(&text, machine.cpus));
        Ok(machine)
    }

    fn parse(text: &str) -> Option<Self> {
        let mut machine = Self::default();
        for line in text.lines() {
            let mut words = line.split_ascii_whitespace();
            match words.next()? {
                "cpu" => {
                    let mut next = || words.next().and_then(|word| word.parse().ok());
                    machine.user = next()?;
                    machine.nice = next()?;
                    machine.system = next()?;
                    machine.idle = next()?;
                    machine.iowait = next()?;
                    machine.irq = next()?;
                    machine.softirq = next()?;
                    machine.steal = next()?;
                }
                "ctxt" => machine.context_switches = words.next()?.parse().ok()?,
                name if name.starts_with("cpu") => machine.cpus += 1,
                _ => {}
            }
        }
        (machine.cpus > 0).then_some(machine)
    }
}

/// `idle_sleeptime` and `iowait_sleeptime` of every CPU of `/proc/timer_list`; `None` when not all are there.
fn idle_ns(timers: &str, cpus: u32) -> Option<u64> {
    let all = |name: &str| -> Option<u64> {
        let values: Vec<u64> = timers
            .lines()
            .filter_map(|line| {
                line.trim_start()
                    .strip_prefix(name)?
                    .trim_start_matches([' ', ':'])
                    .split(' ')
                    .next()?
                    .parse()
                    .ok()
            })
            .collect();
        (values.len() == cpus as usize).then(|| values.iter().sum())
    };
    Some(all(".idle_sleeptime")? + all(".iowait_sleeptime")?)
}

/// CPU time of the machine between two readings, in microseconds over all CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Busy {
    /// Elapsed time of all CPUs minus idle, iowait and steal.
    pub total_us: f64,
    /// The part of `total_us` that was sampled as user (nice included).
    pub user_us: f64,
    /// The part sampled as system.
    pub system_us: f64,
    /// The part sampled as softirq.
    pub softirq_us: f64,
    /// The part sampled as hardware interrupts.
    pub irq_us: f64,
    /// Time the hypervisor kept from us; not part of `total_us`.
    pub steal_us: f64,
    /// Context switches.
    pub context_switches: f64,
}

impl Busy {
    /// The difference of two readings that were `elapsed_us` apart.
    #[must_use]
    pub fn between(before: &Machine, after: &Machine, elapsed_us: f64) -> Self {
        let ticks = |get: fn(&Machine) -> u64| get(after).saturating_sub(get(before)) as f64 * TICK_US;
        let user = ticks(|m| m.user + m.nice);
        let system = ticks(|m| m.system);
        let softirq = ticks(|m| m.softirq);
        let irq = ticks(|m| m.irq);
        let steal = ticks(|m| m.steal);
        let coarse = ticks(|m| m.idle + m.iowait);
        let idle = match (before.idle_ns, after.idle_ns) {
            // A CPU that is idle at this moment has not been given its present idle time yet: a long one shows in the
            // ticks, which have it. They are cut, so up to a tick per CPU below the truth.
            (Some(before), Some(after)) => (after.saturating_sub(before) as f64 / 1e3).max(coarse - TICK_US),
            _ => coarse,
        };
        let away = idle + steal;
        let total = (elapsed_us * f64::from(after.cpus) - away).max(0.0);
        let sampled = user + system + softirq + irq;
        let scale = if sampled > 0.0 { total / sampled } else { 0.0 };
        Self {
            total_us: total,
            user_us: user * scale,
            system_us: system * scale,
            softirq_us: softirq * scale,
            irq_us: irq * scale,
            steal_us: steal,
            context_switches: after.context_switches.saturating_sub(before.context_switches) as f64,
        }
    }
}

impl Sum for Busy {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), |sum, part| Self {
            total_us: sum.total_us + part.total_us,
            user_us: sum.user_us + part.user_us,
            system_us: sum.system_us + part.system_us,
            softirq_us: sum.softirq_us + part.softirq_us,
            irq_us: sum.irq_us + part.irq_us,
            steal_us: sum.steal_us + part.steal_us,
            context_switches: sum.context_switches + part.context_switches,
        })
    }
}

/// CPU time and context switches of a process and its descendants.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tree {
    /// User time in microseconds.
    pub user_us: f64,
    /// System time in microseconds.
    pub system_us: f64,
    /// Voluntary and involuntary switches of all threads that still exist.
    pub context_switches: f64,
    /// Resident memory in KiB, the sum of private pages and shared ones counted by share (Pss).
    pub pss_kib: f64,
    /// Resident memory in KiB with all that is shared (Rss): what is quoted of poolers.
    pub rss_kib: f64,
}

impl Tree {
    /// Reads the process `root` and all its descendants; `cgroup` gives exact CPU time where there is one.
    ///
    /// Memory is left at zero: [`Tree::with_memory`] adds it, because reading it is slow.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn read(root: u32, cgroup: Option<&Path>) -> io::Result<Self> {
        let mut tree = Self::default();
        for pid in descendants(root)? {
            // A process may end between the listing and this line; what it used is then lost, as in top(1).
            let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
            if let Some((user, system)) = parse_times(&stat) {
                tree.user_us += user as f64 * TICK_US;
                tree.system_us += system as f64 * TICK_US;
            }
            tree.context_switches += switches_of(pid);
        }
        if let Some(text) = cgroup.and_then(|path| fs::read_to_string(path.join("cpu.stat")).ok()) {
            tree.user_us = field(&text, "user_usec").unwrap_or(tree.user_us);
            tree.system_us = field(&text, "system_usec").unwrap_or(tree.system_us);
        }
        Ok(tree)
    }

    /// The same with resident memory, by `/proc/PID/smaps_rollup`.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn with_memory(mut self, root: u32) -> io::Result<Self> {
        for pid in descendants(root)? {
            let Ok(text) = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")) else { continue };
            self.pss_kib += field(&text, "Pss:").unwrap_or(0.0);
            self.rss_kib += field(&text, "Rss:").unwrap_or(0.0);
        }
        Ok(self)
    }

    /// What was used since `before`; memory is the later value.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            user_us: (self.user_us - before.user_us).max(0.0),
            system_us: (self.system_us - before.system_us).max(0.0),
            context_switches: (self.context_switches - before.context_switches).max(0.0),
            pss_kib: self.pss_kib,
            rss_kib: self.rss_kib,
        }
    }
}

/// Adds up what was used; memory is the last one's.
impl Sum for Tree {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::default(), |sum, part| Self {
            user_us: sum.user_us + part.user_us,
            system_us: sum.system_us + part.system_us,
            context_switches: sum.context_switches + part.context_switches,
            ..part
        })
    }
}

/// Everything that is read at one end of a measured window.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// When it was read.
    pub at: Instant,
    /// The same moment in microseconds since 1970, as programs log it.
    pub wall_us: u64,
    /// The whole machine.
    pub machine: Machine,
    /// The pooler; zero for a direct connection.
    pub pooler: Tree,
}

impl Reading {
    /// Reads the machine and, if there is one, the pooler.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn take(pooler: Option<u32>, cgroup: Option<&Path>) -> io::Result<Self> {
        let tree = pooler.map(|pid| Tree::read(pid, cgroup)).transpose()?.unwrap_or_default();
        let machine = Machine::read()?;
        let wall_us = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64;
        Ok(Self { at: Instant::now(), wall_us, machine, pooler: tree })
    }
}

/// A measured window: what was read at its two ends.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Its beginning.
    pub from: Reading,
    /// Its end.
    pub to: Reading,
}

impl Window {
    /// Its length in seconds.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.to.at.duration_since(self.from.at).as_secs_f64()
    }

    /// What all CPUs could have done within it, in microseconds.
    #[must_use]
    pub fn capacity_us(&self) -> f64 {
        self.seconds() * 1e6 * f64::from(self.to.machine.cpus)
    }

    /// CPU of the machine within it.
    #[must_use]
    pub fn busy(&self) -> Busy {
        Busy::between(&self.from.machine, &self.to.machine, self.seconds() * 1e6)
    }
}

/// `MemAvailable` in MiB: what the kernel thinks can be given to new work.
///
/// # Errors
/// When `/proc/meminfo` cannot be read.
pub fn memory_available_mib() -> io::Result<f64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    Ok(field(&text, "MemAvailable:").unwrap_or(0.0) / 1024.0)
}

/// A cgroup (version 2) of its own for one system; removed with the value.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    /// Makes a cgroup named after this process and `name`, or `None` where version 2 is not mounted or not ours to write.
    #[must_use]
    pub fn create(name: &str) -> Option<Self> {
        let mounts = fs::read_to_string("/proc/mounts").ok()?;
        let mount = mounts.lines().find_map(|line| {
            let mut words = line.split(' ');
            let (_, folder, kind) = (words.next()?, words.next()?, words.next()?);
            (kind == "cgroup2").then(|| PathBuf::from(folder))
        })?;
        let path = mount.join(format!("underpass-bench-{}-{name}", std::process::id()));
        fs::create_dir(&path).ok()?;
        let group = Self { path };
        group.path.join("cpu.stat").exists().then_some(group)
    }

    /// Where its files are.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Moves a process into it; children that it forks later follow.
    ///
    /// # Errors
    /// When the kernel refuses the write.
    pub fn add(&self, pid: u32) -> io::Result<()> {
        fs::write(self.path.join("cgroup.procs"), pid.to_string())
    }

    /// Removes a group. An empty one can always be removed; one that still has a dying process is tried again for a moment.
    pub fn remove(path: &Path) {
        for _ in 0..50 {
            if fs::remove_dir(path).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        Self::remove(&self.path);
    }
}

/// The processes below `root`, `root` first.
fn descendants(root: u32) -> io::Result<Vec<u32>> {
    let mut pids = vec![root];
    let mut next = 0;
    while next < pids.len() {
        let pid = pids[next];
        next += 1;
        let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for task in tasks {
            let path = task?.path().join("children");
            match fs::read_to_string(&path) {
                Ok(text) => {
                    pids.extend(text.split_ascii_whitespace().filter_map(|word| word.parse::<u32>().ok()))
                }
                // Kernels without CONFIG_PROC_CHILDREN: fall back to a search by parent.
                Err(_) if path.parent().is_some_and(Path::exists) => {
                    pids.extend(children_by_parent()?.remove(&pid).unwrap_or_default());
                    break;
                }
                Err(_) => {}
            }
        }
    }
    pids.dedup();
    Ok(pids)
}

fn children_by_parent() -> io::Result<BTreeMap<u32, Vec<u32>>> {
    let mut map: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
        let parent =
            stat.rsplit(')').next().and_then(|rest| rest.split_ascii_whitespace().nth(1)?.parse().ok());
        if let Some(parent) = parent {
            map.entry(parent).or_default().push(pid);
        }
    }
    Ok(map)
}

/// utime and stime of `/proc/PID/stat`, in ticks. The name in parentheses may hold anything, so count from its end.
fn parse_times(stat: &str) -> Option<(u64, u64)> {
    let mut words = stat.rsplit(')').next()?.split_ascii_whitespace().skip(11);
    Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
}

fn switches_of(pid: u32) -> f64 {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return 0.0 };
    tasks
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("status")).ok())
        .map(|text| {
            field(&text, "voluntary_ctxt_switches:").unwrap_or(0.0)
                + field(&text, "nonvoluntary_ctxt_switches:").unwrap_or(0.0)
        })
        .sum()
}

/// The number after a name at the beginning of a line.
fn field(text: &str, name: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.split_ascii_whitespace().next()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BEFORE: &str = "cpu  100 0 50 1000 0 0 10 0 0 0\ncpu0 50 0 25 500 0 0 5 0 0 0\ncpu1 50 0 25 500 0 0 5 0 0 0\nctxt 1000\n";
    const AFTER: &str = "cpu  200 0 100 1040 0 0 60 10 0 0\ncpu0 50 0 25 500 0 0 5 0 0 0\ncpu1 50 0 25 500 0 0 5 0 0 0\nctxt 1500\n";

    #[test]
    fn busy_is_elapsed_minus_idle_and_divided_as_sampled() {
        let (before, after) = (Machine::parse(BEFORE).unwrap(), Machine::parse(AFTER).unwrap());
        // Two CPUs for 1.3 s: 2.6 s, of which 0.4 s idle and 0.1 s stolen.
        let busy = Busy::between(&before, &after, 1_300_000.0);
        assert!((busy.total_us - 2_100_000.0).abs() < 1.0);
        assert!((busy.user_us + busy.system_us + busy.softirq_us + busy.irq_us - busy.total_us).abs() < 1.0);
        assert!((busy.user_us / busy.softirq_us - 2.0).abs() < 1e-9);
        assert!((busy.steal_us - 100_000.0).abs() < 1.0);
        assert!((busy.context_switches - 500.0).abs() < 1e-9);
    }

    #[test]
    fn idle_time_in_nanoseconds_is_preferred_and_never_below_the_ticks() {
        let text = "  .idle_sleeptime : 1000 nsecs\n  .iowait_sleeptime: 20 nsecs\n";
        assert_eq!(idle_ns(&text.repeat(2), 2), Some(2040));
        assert_eq!(idle_ns(text, 2), None, "a CPU is missing");
        let (mut before, mut after) = (Machine::parse(BEFORE).unwrap(), Machine::parse(AFTER).unwrap());
        // The ticks say 0.4 s idle.
        (before.idle_ns, after.idle_ns) = (Some(0), Some(404_000_000));
        let busy = |after: &Machine| Busy::between(&before, after, 1_300_000.0).total_us;
        assert!((busy(&after) - 2_096_000.0).abs() < 1.0);
        after.idle_ns = Some(0);
        assert!((busy(&after) - 2_110_000.0).abs() < 1.0);
    }

    #[test]
    fn foreign_formats_are_refused() {
        assert_eq!(Machine::parse(""), None);
        assert_eq!(Machine::parse("cpu  1 2 x"), None);
    }

    #[test]
    fn times_survive_a_name_with_spaces_and_parentheses() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 1 2 3 4 123 45 6 7 20 0 1 0";
        assert_eq!(parse_times(stat), Some((123, 45)));
    }

    #[test]
    fn the_own_process_and_its_child_are_counted() {
        let mut child = std::process::Command::new("sleep").arg("5").spawn().unwrap();
        let pids = descendants(std::process::id()).unwrap();
        assert!(pids.contains(&child.id()), "{pids:?}");
        let tree = Tree::read(std::process::id(), None).unwrap().with_memory(std::process::id()).unwrap();
        assert!(tree.context_switches > 0.0 && tree.pss_kib > 0.0);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
