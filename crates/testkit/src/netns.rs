// SPDX-License-Identifier: Apache-2.0
//! Network namespaces joined by a veth pair (root only): two hosts on one machine, with real addresses, MTU and routes.

use std::fs::File;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use nix::sched::{CloneFlags, setns};

use crate::{Error, Result};

/// A network namespace with its loopback up; deleted with the value, and its interfaces with it.
#[derive(Debug)]
pub struct Netns {
    name: String,
}

impl Netns {
    /// Creates one. Fails unless root and iproute2 is installed.
    pub fn new() -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("upk-{}-{number}", std::process::id());
        ip(&["netns", "add", &name])?;
        let namespace = Self { name };
        namespace.ip(&["link", "set", "lo", "up"])?;
        Ok(namespace)
    }

    /// Its name, for `ip netns`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs `ip` with these arguments inside.
    pub fn ip(&self, arguments: &[&str]) -> Result<()> {
        ip(&[&["-n", &self.name], arguments].concat())
    }

    /// A command that will run inside.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, program]);
        command
    }

    /// Runs `work` in a thread inside: sockets made there, and processes started there, belong to the namespace for good.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let path = format!("/run/netns/{}", self.name);
        let file = File::open(&path).map_err(Error::io(format!("open {path}")))?;
        thread::scope(|scope| {
            scope
                .spawn(move || {
                    setns(&file, CloneFlags::CLONE_NEWNET)
                        .map_err(|errno| Error::Io { what: "setns".into(), source: errno.into() })?;
                    Ok(work())
                })
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = ip(&["netns", "delete", &self.name]);
    }
}

/// A veth pair between two namespaces, 10.77.0.1/30 and 10.77.0.2/30.
#[derive(Debug)]
pub struct Veth {
    /// Address of the first namespace.
    pub first: &'static str,
    /// Address of the second.
    pub second: &'static str,
}

impl Veth {
    /// Joins two namespaces; the interface is `veth0` in each. One pair per namespace.
    pub fn between(first: &Netns, second: &Netns) -> Result<Self> {
        first.ip(&[
            "link",
            "add",
            "veth0",
            "type",
            "veth",
            "peer",
            "name",
            "veth0",
            "netns",
            second.name(),
        ])?;
        let veth = Self { first: "10.77.0.1", second: "10.77.0.2" };
        for (namespace, address) in [(first, veth.first), (second, veth.second)] {
            namespace.ip(&["address", "add", &format!("{address}/30"), "dev", "veth0"])?;
            namespace.ip(&["link", "set", "veth0", "up"])?;
        }
        Ok(veth)
    }
}

fn ip(arguments: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(arguments).output().map_err(Error::io("run ip"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(Error::Exited {
        program: format!("ip {}", arguments.join(" ")),
        status: output.status.to_string(),
        log: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}
