// SPDX-License-Identifier: Apache-2.0
//! Latency per leg, as TCP itself measures it: the smoothed round-trip time of the sockets on either side of the pooler.
//!
//! kpgpool's thesis takes it from `tcprtt`, which reads the same field of the same sockets. It is taken at the sender of
//! requests: the acknowledgement comes with the response, so it holds the time until the answer. A lane that takes
//! segments in the kernel acknowledges them at once, so its legs look shorter than what a client waits: the latencies
//! of transactions are the measure, this says where they arise.

use std::collections::BTreeMap;
use std::process::Command;

use crate::procs::{Launch, find_program};
use crate::sample::metric;
use crate::systems::{Instance, Place};

/// A socket that has received nothing for so long is not in use: its figure is an old one.
const RECENT_MS: u64 = 250;

/// One leg: its metric, the command that lists its sockets, and the word that marks those of the right process.
#[derive(Debug)]
struct Leg {
    name: &'static str,
    command: Command,
    owner: String,
}

/// Looks at the sockets of one instance.
#[derive(Debug)]
pub struct RoundTrips {
    legs: Vec<Leg>,
    /// Microseconds of each socket at each look.
    seen_us: BTreeMap<&'static str, Vec<f64>>,
}

impl RoundTrips {
    /// Looks at nothing where `ss` is not installed.
    #[must_use]
    pub fn new(instance: &Instance, place: Place<'_>) -> Self {
        let mut legs = Vec::new();
        if let Some(ss) = find_program("ss") {
            // Poolers share the server's port with a direct connection, so the owner of a socket counts too.
            let leg = |name, netns: &Option<String>, port: u16, owner: String| {
                let launch = Launch { netns: netns.clone(), keep_user: true, ..Launch::default() };
                let mut command = launch.command(place.account, &ss);
                command.args(["-tinpHO", "state", "established", &format!("( dport = :{port} )")]);
                Leg { name, command, owner }
            };
            let clients = "\"pgbench\"".to_owned();
            legs.push(leg(metric::CLIENT_LEG, &place.hosts.client, instance.endpoint.port, clients));
            if let Some(pid) = instance.pid() {
                legs.push(leg(
                    metric::SERVER_LEG,
                    &place.hosts.pooler,
                    place.server.port,
                    format!("pid={pid},"),
                ));
            }
        }
        Self { legs, seen_us: BTreeMap::new() }
    }

    /// Reads the sockets once; what cannot be read is missing in the result.
    pub fn look(&mut self) {
        for leg in &mut self.legs {
            if let Ok(output) = leg.command.output() {
                let text = String::from_utf8_lossy(&output.stdout);
                let sockets = text.lines().filter(|line| line.contains(&leg.owner));
                self.seen_us.entry(leg.name).or_default().extend(sockets.filter_map(parse));
            }
        }
    }

    /// The mean of each leg in microseconds.
    #[must_use]
    pub fn metrics(&self) -> BTreeMap<String, f64> {
        let with_values = self.seen_us.iter().filter(|(_, values)| !values.is_empty());
        with_values
            .map(|(name, values)| ((*name).to_owned(), values.iter().sum::<f64>() / values.len() as f64))
            .collect()
    }
}

/// The microseconds of `rtt:0.052/0.021` in a line about a socket that is in use.
fn parse(line: &str) -> Option<f64> {
    let value = |name: &str| line.split_ascii_whitespace().find_map(|word| word.strip_prefix(name));
    // What has just happened is left out of the line.
    let last_ms = value("lastrcv:").map_or(Some(0), |text| text.parse::<u64>().ok())?;
    let ms: f64 = value("rtt:")?.split('/').next()?.parse().ok()?;
    (last_ms <= RECENT_MS).then_some(ms * 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_times_of_sockets_in_use_are_read() {
        let line = |last: &str| {
            format!(
                "0 0 127.0.0.1:4 127.0.0.1:5 users:((\"pgbench\",pid=7,fd=4)) cubic rto:200 rtt:0.052/0.021 ato:40 {last} minrtt:0.01"
            )
        };
        assert_eq!(parse(&line("lastrcv:12")), Some(52.0));
        assert_eq!(parse(&line("")), Some(52.0));
        assert_eq!(parse(&line("lastrcv:9000")), None);
        assert_eq!(parse("0 0 127.0.0.1:4 127.0.0.1:5"), None);
    }
}
