// SPDX-License-Identifier: Apache-2.0
//! Where client, pooler and server run: one loopback, or three network namespaces joined by veth pairs.
//!
//! With namespaces every pair of hosts has a link of its own, as three machines on a switch without its cost:
//! client to pooler, pooler to server, and client to server for the direct baseline.

use std::process::Command;

use anyhow::{Result, bail};
use nix::unistd::Uid;

use crate::procs::output;

/// Loopback or namespaces, by the option `--topology`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Topology {
    /// Everything on 127.0.0.1.
    #[default]
    Loopback,
    /// Client, pooler and server in network namespaces of their own, joined by veth pairs; needs root.
    Netns,
}

/// Names and addresses of the three hosts.
#[derive(Debug)]
pub struct Hosts {
    /// Namespace in which load generators run.
    pub client: Option<String>,
    /// Namespace in which poolers run.
    pub pooler: Option<String>,
    /// Namespace in which PostgreSQL runs.
    pub server: Option<String>,
    /// The server's address as clients see it.
    pub server_from_client: &'static str,
    /// The server's address as poolers see it.
    pub server_from_pooler: &'static str,
    /// The poolers' address as clients see it.
    pub pooler_from_client: &'static str,
}

impl Hosts {
    /// Makes the hosts; namespaces go away with the value.
    ///
    /// # Errors
    /// When namespaces are wanted and this is not root, or `ip` fails.
    pub fn make(topology: Topology) -> Result<Self> {
        match topology {
            Topology::Loopback => Ok(Self {
                client: None,
                pooler: None,
                server: None,
                server_from_client: "127.0.0.1",
                server_from_pooler: "127.0.0.1",
                pooler_from_client: "127.0.0.1",
            }),
            Topology::Netns => Self::namespaces(),
        }
    }

    fn namespaces() -> Result<Self> {
        if !Uid::effective().is_root() {
            bail!("--topology netns makes network namespaces, which needs root: run as root or use loopback");
        }
        let name = |host: &str| format!("upbench-{}-{host}", std::process::id());
        let hosts = Self {
            client: Some(name("client")),
            pooler: Some(name("pooler")),
            server: Some(name("server")),
            server_from_client: "10.222.3.2",
            server_from_pooler: "10.222.2.2",
            pooler_from_client: "10.222.1.2",
        };
        for namespace in hosts.names() {
            ip(&["netns", "add", namespace])?;
            ip(&["-n", namespace, "link", "set", "lo", "up"])?;
            // As on loopback: else a connection per transaction runs out of ports within seconds, all in TIME_WAIT.
            let reuse = "echo 1 > /proc/sys/net/ipv4/tcp_tw_reuse; \
                         echo 1024 65535 > /proc/sys/net/ipv4/ip_local_port_range";
            ip(&["netns", "exec", namespace, "sh", "-ec", reuse])?;
        }
        hosts.join(&name("client"), &name("pooler"), 1)?;
        hosts.join(&name("pooler"), &name("server"), 2)?;
        hosts.join(&name("client"), &name("server"), 3)?;
        Ok(hosts)
    }

    /// Joins two namespaces by the veth pair of subnet `10.222.<subnet>.0/24`: `left` is .1 and `right` is .2.
    fn join(&self, left: &str, right: &str, subnet: u8) -> Result<()> {
        let (a, b) = (format!("veth{subnet}a"), format!("veth{subnet}b"));
        ip(&["link", "add", &a, "netns", left, "type", "veth", "peer", "name", &b, "netns", right])?;
        for (namespace, device, host) in [(left, &a, 1), (right, &b, 2)] {
            ip(&["-n", namespace, "addr", "add", &format!("10.222.{subnet}.{host}/24"), "dev", device])?;
            ip(&["-n", namespace, "link", "set", device, "up"])?;
        }
        Ok(())
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        [&self.client, &self.pooler, &self.server].into_iter().flatten().map(String::as_str)
    }

    /// True when the hosts are separate.
    #[must_use]
    pub fn apart(&self) -> bool {
        self.client.is_some()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for namespace in self.names() {
            // Its veth ends go with it.
            if let Err(error) = ip(&["netns", "del", namespace]) {
                eprintln!("{error:#}");
            }
        }
    }
}

fn ip(arguments: &[&str]) -> Result<()> {
    let mut command = Command::new("ip");
    command.args(arguments);
    output(command, &format!("ip {}", arguments.join(" "))).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_namespaces_reach_each_other_and_vanish() {
        if !Uid::effective().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let hosts = Hosts::make(Topology::Netns).unwrap();
        let names: Vec<String> = hosts.names().map(str::to_owned).collect();
        for (from, to) in
            [(0, hosts.pooler_from_client), (1, hosts.server_from_pooler), (0, hosts.server_from_client)]
        {
            let mut route = Command::new("ip");
            route.args(["-n", &names[from], "route", "get", to]);
            assert!(output(route, "ip route").unwrap().contains("veth"));
        }
        drop(hosts);
        let mut list = Command::new("ip");
        list.args(["netns", "list"]);
        let left = output(list, "ip netns").unwrap();
        assert!(names.iter().all(|name| !left.contains(name)), "{left}");
    }
}
