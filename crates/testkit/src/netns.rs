// SPDX-License-Identifier: Apache-2.0
//! Network namespaces joined by a veth pair (root only): two hosts on one machine, with real addresses, MTU and routes.

use std::fs::File;
use std::net::SocketAddrV4;
use std::os::fd::AsRawFd;
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

    /// Lets segments on its loopback be as long as this, above the 64 KiB of before Linux 6.3 (BIG TCP for IPv4), by the rtnetlink request
    /// that newer versions of `ip link set` send; Debian 12's knows half of it.
    ///
    /// # Errors
    /// No privilege, or the kernel knows no such segments.
    pub fn set_longest_segment(&self, bytes: u32) -> Result<()> {
        // linux/if_link.h: IFLA_GSO_MAX_SIZE, IFLA_GRO_MAX_SIZE, and both for IPv4.
        const ATTRIBUTES: [u16; 4] = [41, 58, 63, 64];
        // linux/rtnetlink.h, linux/netlink.h
        const RTM_SETLINK: u16 = 19;
        const REQUEST_AND_ACKNOWLEDGE: u16 = 1 | 4;
        // The first interface of every namespace.
        const LOOPBACK: u32 = 1;
        let mut body = Vec::new();
        // struct ifinfomsg: family, padding, type, index, flags, change
        for field in [0, LOOPBACK, 0, 0] {
            body.extend(u32::to_ne_bytes(field));
        }
        for attribute in ATTRIBUTES {
            body.extend([u16::to_ne_bytes(8), attribute.to_ne_bytes()].concat());
            body.extend(bytes.to_ne_bytes());
        }
        // struct nlmsghdr: length, type, flags, sequence number, port
        let mut request = Vec::new();
        request.extend((16 + body.len() as u32).to_ne_bytes());
        request.extend([RTM_SETLINK.to_ne_bytes(), REQUEST_AND_ACKNOWLEDGE.to_ne_bytes()].concat());
        request.extend([0; 8]);
        request.extend(body);
        let refusal = self.run(|| ask_netlink(&request))?.map_err(Error::io("ask rtnetlink"))?;
        if refusal == 0 {
            return Ok(());
        }
        let source = std::io::Error::from_raw_os_error(-refusal);
        Err(Error::Io { what: format!("segments of {bytes} bytes"), source })
    }

    /// Has connections that are opened inside to `from` end at `to` (DNAT), by nft or else iptables.
    ///
    /// # Errors
    /// Neither is installed, or the kernel has no NAT.
    pub fn translate(&self, from: SocketAddrV4, to: SocketAddrV4) -> Result<()> {
        let (address, port, to) = (from.ip().to_string(), from.port().to_string(), to.to_string());
        let rule = ["ip", "daddr", &address, "tcp", "dport", &port, "dnat", "to", &to];
        // Those that are there already may be added again.
        let by_nft = [
            vec!["nft", "add", "table", "ip", "upk"],
            vec!["nft", "add", "chain", "ip", "upk", "out", "{ type nat hook output priority -100 ; }"],
            [&["nft", "add", "rule", "ip", "upk", "out"][..], &rule].concat(),
        ];
        let of_iptables = ["-t", "nat", "-A", "OUTPUT", "-p", "tcp", "-d", &address, "--dport", &port];
        let by_iptables =
            vec![[&["iptables"][..], &of_iptables, &["-j", "DNAT", "--to-destination", &to]].concat()];
        let inside = |commands: &[Vec<&str>]| {
            commands.iter().try_for_each(|words| ip(&[&["netns", "exec", &self.name][..], words].concat()))
        };
        inside(&by_nft).or_else(|error| inside(&by_iptables).map_err(|_| error))
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

/// Sends a request and returns the error of the answer, struct nlmsgerr's first field behind a header of 16 bytes.
fn ask_netlink(request: &[u8]) -> std::io::Result<i32> {
    use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, socket};
    let socket =
        socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkRoute)?;
    send(socket.as_raw_fd(), request, MsgFlags::empty())?;
    let mut answer = [0; 1024];
    let length = recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty())?;
    let error = answer[..length].get(16..20).and_then(|field| field.try_into().ok());
    error.map(i32::from_ne_bytes).ok_or_else(|| std::io::Error::other("a short answer"))
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
