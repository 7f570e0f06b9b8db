// SPDX-License-Identifier: Apache-2.0
//! The capabilities that a capture needs.

use caps::{CapSet, Capability};

use crate::discover::Server;
use crate::error::Error;
use crate::procfs;

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

impl Server {
    /// The capabilities that the calling thread lacks for this server, beside those that every capture needs: its files may belong to another
    /// user, and the self-test of packets connects from inside its network namespace.
    pub fn missing_capabilities(&self) -> Vec<&'static str> {
        let is_elsewhere = procfs::namespace(std::process::id(), "net") != Some(self.netns);
        let may_go = caps::has_cap(None, CapSet::Effective, Capability::CAP_SYS_ADMIN).unwrap_or(false);
        let data = self.is_unreadable.then_some("CAP_DAC_READ_SEARCH");
        let namespace = (is_elsewhere && !self.addresses.is_empty() && !may_go).then_some("CAP_SYS_ADMIN");
        data.into_iter().chain(namespace).collect()
    }
}

/// `packets`: they are to be recorded.
pub(crate) fn check_for(server: &Server, packets: bool) -> Result<(), Error> {
    let missing = if packets || server.is_unreadable { server.missing_capabilities() } else { Vec::new() };
    if missing.is_empty() { Ok(()) } else { Err(Error::Privileges { missing: missing.join(", ") }) }
}

pub(crate) fn check() -> Result<(), Error> {
    let missing = missing_capabilities();
    if missing.is_empty() { Ok(()) } else { Err(Error::Privileges { missing: missing.join(", ") }) }
}
