// SPDX-License-Identifier: Apache-2.0
//! The capabilities that a capture needs.

use caps::{CapSet, Capability};

use crate::error::Error;

/// Name of each capability and what stands in for it.
const NEEDED: [(Capability, Option<Capability>); 4] = [
    // Load programs, make maps.
    (Capability::CAP_BPF, Some(Capability::CAP_SYS_ADMIN)),
    // Attach to cgroups.
    (Capability::CAP_NET_ADMIN, None),
    // Tracepoints, uprobes, reads of kernel memory.
    (Capability::CAP_PERFMON, Some(Capability::CAP_SYS_ADMIN)),
    // Look into the server's processes: its executable, its sockets.
    (Capability::CAP_SYS_PTRACE, None),
];

/// The capabilities that the calling thread lacks, by name.
pub fn missing_capabilities() -> Vec<String> {
    let has = |capability| caps::has_cap(None, CapSet::Effective, capability).unwrap_or(false);
    NEEDED
        .iter()
        .filter(|(capability, instead)| !has(*capability) && !instead.is_some_and(has))
        .map(|(capability, _)| capability.to_string())
        .collect()
}

pub(crate) fn check() -> Result<(), Error> {
    let missing = missing_capabilities();
    if missing.is_empty() { Ok(()) } else { Err(Error::Privileges { missing: missing.join(", ") }) }
}
