// SPDX-License-Identifier: Apache-2.0
//! What a kernel lacks that refuses the programs. Its own words, the verifier's above all, name neither the feature nor a version that has it.
#![allow(unsafe_code)]

use std::fs;
use std::path::Path;
use std::ptr;

use libbpf_rs::libbpf_sys;

use crate::error::Error;
use crate::kernel::Kernel;

/// Kernels on which recordings are tested; docs/tracing.md.
const TRIED: &str = "recordings are tested on Linux 6.1 and 6.18";

/// A part of the kernel that a capture stands on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    TypeInformation,
    Rings,
    RingPointers,
    TaskStorage,
    PacketPrograms,
    RawTracepoints,
    SocketState,
    Uprobes,
}

impl Part {
    const ALL: [Self; 8] = [
        Self::TypeInformation,
        Self::Rings,
        Self::RingPointers,
        Self::TaskStorage,
        Self::PacketPrograms,
        Self::RawTracepoints,
        Self::SocketState,
        Self::Uprobes,
    ];

    /// Its name, how a kernel is built with it, and the first that can be.
    const fn words(self) -> &'static str {
        match self {
            Self::TypeInformation => {
                "type information about itself (/sys/kernel/btf/vmlinux, CONFIG_DEBUG_INFO_BTF, from Linux 5.4)"
            }
            Self::Rings => "ring buffers (BPF_MAP_TYPE_RINGBUF, from Linux 5.8)",
            Self::RingPointers => "pointers into ring buffers (bpf_ringbuf_reserve_dynptr, from Linux 5.19)",
            Self::TaskStorage => "storage for each task (BPF_MAP_TYPE_TASK_STORAGE, from Linux 5.11)",
            Self::PacketPrograms => {
                "programs for the packets of a cgroup (cgroup_skb, CONFIG_CGROUP_BPF, their links from Linux 5.7)"
            }
            Self::RawTracepoints => {
                "programs at tracepoints (raw_tracepoint, CONFIG_BPF_EVENTS, from Linux 4.17)"
            }
            Self::SocketState => "the tracepoint inet_sock_set_state (from Linux 4.16)",
            Self::Uprobes => "uprobes (the event source uprobe, CONFIG_UPROBE_EVENTS, from Linux 4.17)",
        }
    }

    /// Whether this kernel has it; `None` when that cannot be told.
    fn is_there(self) -> Option<bool> {
        let map = |kind| {
            // SAFETY: a number, and a null pointer for options, of which there are none.
            yes_or_no(unsafe { libbpf_sys::libbpf_probe_bpf_map_type(kind, ptr::null()) })
        };
        let program = |kind| {
            // SAFETY: as above.
            yes_or_no(unsafe { libbpf_sys::libbpf_probe_bpf_prog_type(kind, ptr::null()) })
        };
        let helper = |kind, number| {
            // SAFETY: as above.
            yes_or_no(unsafe { libbpf_sys::libbpf_probe_bpf_helper(kind, number, ptr::null()) })
        };
        match self {
            Self::TypeInformation => is_in("/sys/kernel", "btf/vmlinux"),
            Self::Rings => map(libbpf_sys::BPF_MAP_TYPE_RINGBUF),
            Self::RingPointers => {
                helper(libbpf_sys::BPF_PROG_TYPE_CGROUP_SKB, libbpf_sys::BPF_FUNC_ringbuf_reserve_dynptr)
            }
            Self::TaskStorage => map(libbpf_sys::BPF_MAP_TYPE_TASK_STORAGE),
            Self::PacketPrograms => program(libbpf_sys::BPF_PROG_TYPE_CGROUP_SKB),
            Self::RawTracepoints => program(libbpf_sys::BPF_PROG_TYPE_RAW_TRACEPOINT),
            Self::SocketState => ["/sys/kernel/tracing/events", "/sys/kernel/debug/tracing/events"]
                .into_iter()
                .find_map(|events| is_in(events, "sock/inet_sock_set_state")),
            Self::Uprobes => is_in("/sys/bus/event_source/devices", "uprobe"),
        }
    }
}

/// What libbpf says about a feature: below zero, that it could not find out.
const fn yes_or_no(answer: i32) -> Option<bool> {
    match answer {
        0 => Some(false),
        1.. => Some(true),
        _ => None,
    }
}

/// Whether a directory of the kernel's has an entry; one that is not mounted tells nothing.
fn is_in(directory: &str, entry: &str) -> Option<bool> {
    let directory = Path::new(directory);
    directory.is_dir().then(|| directory.join(entry).exists())
}

/// Helpers of the programs that not every kernel with their other parts has, with the first version.
const HELPERS: [(&str, &str); 7] = [
    ("bpf_get_current_task_btf", "5.11"),
    ("bpf_ringbuf_query", "5.8"),
    ("bpf_skc_to_tcp_sock", "5.9"),
    ("bpf_sk_storage_get", "5.2"),
    ("bpf_probe_read_user_str", "5.5"),
    ("bpf_probe_read_kernel", "5.5"),
    ("bpf_probe_read_user", "5.5"),
];

/// What is known of a refusal.
#[derive(Clone, Debug, Default)]
pub(crate) struct Refusal {
    /// The kernel's release.
    release: String,
    /// The parts that this kernel does not have.
    missing: Vec<Part>,
    /// It said that it is not permitted, or not known, or that there is no memory.
    kind: Option<libbpf_rs::ErrorKind>,
    /// It is locked down against readers of its memory.
    is_locked: bool,
    /// What libbpf printed.
    log: String,
}

impl Refusal {
    fn new(cause: &libbpf_rs::Error, log: &str) -> Self {
        Self {
            release: release(),
            missing: Vec::new(),
            kind: Some(cause.kind()),
            is_locked: is_locked(&fs::read_to_string("/sys/kernel/security/lockdown").unwrap_or_default()),
            log: log.to_owned(),
        }
    }

    /// Names what is missing: a feature with the version that has it, or the permission.
    fn words(&self) -> String {
        let kernel = format!("this kernel, Linux {},", self.release);
        let mut lacks: Vec<String> = self.missing.iter().map(|part| part.words().to_owned()).collect();
        lacks.extend(helper(&self.log));
        if self.log.contains("BPF program is too large") {
            lacks.push("a verifier that looks at a million instructions (from Linux 5.2)".to_owned());
        }
        if !lacks.is_empty() {
            return format!("{kernel} lacks {}; {TRIED}", lacks.join(", and "));
        }
        if self.is_locked {
            return format!(
                "{kernel} is locked down (lockdown=confidentiality), and lets nobody read its memory or put probes anywhere"
            );
        }
        // A verifier that refuses says "permission denied", too.
        let is_verdict = self.log.contains("PROG LOAD LOG");
        match self.kind {
            Some(libbpf_rs::ErrorKind::PermissionDenied) if !is_verdict => format!(
                "{kernel} does not permit it, though this process has CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON and CAP_SYS_PTRACE: a security module, or a \
                 container's filter of the system calls bpf and perf_event_open, forbids it"
            ),
            Some(libbpf_rs::ErrorKind::OutOfMemory) => {
                format!("{kernel} has no memory for it: a smaller --ring-size needs less")
            }
            _ => format!("{kernel} has all that is known to be needed, and refuses it all the same; {TRIED}"),
        }
    }
}

/// The helper that the verifier does not know, or not for such a program.
fn helper(log: &str) -> Option<String> {
    let name = ["unknown func ", "cannot use helper "].iter().find_map(|before| {
        let (_, rest) = log.split_once(before)?;
        rest.split(['#', ' ', '\n']).next().filter(|name| name.starts_with("bpf_"))
    })?;
    Some(match HELPERS.iter().find(|(known, _)| *known == name) {
        Some((_, version)) => format!("the function {name} for programs (from Linux {version})"),
        None => format!("the function {name} for programs"),
    })
}

/// Whether `/sys/kernel/security/lockdown` says that nobody may read the kernel's memory: the mode in brackets is the present one.
fn is_locked(lockdown: &str) -> bool {
    lockdown.contains("[confidentiality]")
}

fn release() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned()
}

/// What keeps the programs from being loaded, or their rings from being made.
pub(crate) fn of_load(cause: &libbpf_rs::Error, log: &str) -> String {
    let is_missing = |part: &Part| *part != Part::Uprobes && part.is_there() == Some(false);
    Refusal { missing: Part::ALL.into_iter().filter(is_missing).collect(), ..Refusal::new(cause, log) }
        .words()
}

/// What keeps a program from being attached that needs this part.
pub(crate) fn of_attach(part: Part, cause: &libbpf_rs::Error) -> String {
    // A tracepoint is known by its name.
    let is_unknown = part == Part::SocketState && cause.kind() == libbpf_rs::ErrorKind::NotFound;
    let is_missing = is_unknown || part.is_there() == Some(false);
    Refusal { missing: is_missing.then_some(part).into_iter().collect(), ..Refusal::new(cause, "") }.words()
}

/// Tries whether this kernel takes the programs, and attaches those for packets' accounts: nothing of a server is looked at. `Ok` with what
/// keeps it from probing functions, in words.
///
/// # Errors
/// As [`Kernel::open`], and [`Error::Attach`].
pub fn trial() -> Result<Option<String>, Error> {
    Kernel::trial()?;
    let lacks = Part::Uprobes.is_there() == Some(false);
    Ok(lacks.then(|| format!("this kernel, Linux {}, lacks {}", release(), Part::Uprobes.words())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal() -> Refusal {
        Refusal { release: "5.4.0-9".into(), ..Refusal::default() }
    }

    #[test]
    fn missing_parts_are_named_with_the_version_that_has_them() {
        let one = Refusal { missing: vec![Part::Rings, Part::TaskStorage], ..refusal() };
        assert_eq!(
            one.words(),
            "this kernel, Linux 5.4.0-9, lacks ring buffers (BPF_MAP_TYPE_RINGBUF, from Linux 5.8), and storage for each task \
             (BPF_MAP_TYPE_TASK_STORAGE, from Linux 5.11); recordings are tested on Linux 6.1 and 6.18"
        );
        for part in Part::ALL {
            let words = Refusal { missing: vec![part], ..refusal() }.words();
            assert!(words.contains("lacks ") && words.contains("from Linux "), "{words}");
        }
        let uprobes = Refusal { missing: vec![Part::Uprobes], ..refusal() }.words();
        assert!(uprobes.contains("CONFIG_UPROBE_EVENTS, from Linux 4.17"), "{uprobes}");
        let tracepoint = Refusal { missing: vec![Part::SocketState], ..refusal() }.words();
        assert!(tracepoint.contains("the tracepoint inet_sock_set_state (from Linux 4.16)"), "{tracepoint}");
    }

    /// As kernels up to 6.7 and later ones say it.
    #[test]
    fn a_function_that_the_verifier_does_not_know_is_named() {
        for said in [
            "-- BEGIN PROG LOAD LOG --\n12: (85) call bpf_get_current_task_btf#158\nunknown func bpf_get_current_task_btf#158\n",
            "program of this type cannot use helper bpf_get_current_task_btf#158\n",
        ] {
            let words = Refusal { log: said.into(), ..refusal() }.words();
            assert!(
                words.contains("lacks the function bpf_get_current_task_btf for programs (from Linux 5.11);"),
                "{words}"
            );
        }
        let words = Refusal { log: "unknown func bpf_of_tomorrow#999\n".into(), ..refusal() }.words();
        assert!(words.contains("lacks the function bpf_of_tomorrow for programs;"), "{words}");
        let large = "BPF program is too large. Processed 131073 insn\n";
        let words = Refusal { log: large.into(), ..refusal() }.words();
        assert!(words.contains("a million instructions (from Linux 5.2)"), "{words}");
    }

    #[test]
    fn what_is_not_permitted_is_told_from_what_is_refused() {
        let denied = Refusal { kind: Some(libbpf_rs::ErrorKind::PermissionDenied), ..refusal() };
        let words = denied.words();
        assert!(words.contains("does not permit it, though this process has CAP_BPF"), "{words}");
        let locked = Refusal { is_locked: true, ..denied.clone() }.words();
        assert!(locked.contains("lockdown=confidentiality"), "{locked}");
        let verdict = Refusal { log: "-- BEGIN PROG LOAD LOG --\nR1 invalid mem access".into(), ..denied };
        let words = verdict.words();
        assert!(words.contains("has all that is known to be needed, and refuses it all the same"), "{words}");
        let full = Refusal { kind: Some(libbpf_rs::ErrorKind::OutOfMemory), ..refusal() }.words();
        assert!(full.contains("a smaller --ring-size"), "{full}");
    }

    #[test]
    fn the_mode_of_lockdown_is_the_one_in_brackets() {
        assert!(is_locked("none integrity [confidentiality]\n"));
        assert!(!is_locked("none [integrity] confidentiality\n") && !is_locked(""));
    }

    /// Of the machine that runs the tests, which records elsewhere: whatever can be told is there.
    #[test]
    fn the_parts_of_this_kernel_are_found_where_recordings_work() {
        if crate::privileges::check().is_err() {
            eprintln!("skipped: needs the capabilities of a recorder");
            return;
        }
        let missing: Vec<Part> =
            Part::ALL.into_iter().filter(|part| part.is_there() == Some(false)).collect();
        assert!(missing.is_empty(), "{missing:?}");
        assert!(trial().expect("the programs load").is_none());
    }

    #[test]
    fn the_kernels_own_words_come_behind() {
        let error = Error::Load { lacks: refusal().words(), message: "-22\nR1 invalid".into() };
        let text = error.to_string();
        let at = |what| text.find(what).expect(what);
        assert!(
            text.starts_with("the kernel refused the capture programs: this kernel, Linux 5.4.0-9,"),
            "{text}"
        );
        assert!(at("has all that is known") < at("in its own words: -22\nR1 invalid"), "{text}");
    }
}
